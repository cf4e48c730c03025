package vxlan

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
	"github.com/vnicd/vnicd/device/frame/header"
)

// Receive coalescing. Consecutive frames of one flow in a batch go into their network as one large frame, as from a
// sender with TSO or USO, if the destination's port accepts it; package gso decides which frames can be merged. No
// frame is kept beyond the batch, and the order within a flow is kept.

// mergeFlows bounds the flows that are merged at a time.
const mergeFlows = 8

// merger holds the flows of one loop.
type merger struct {
	flows [mergeFlows]mergedFlow
	next  int // index of the next flow to be evicted, round robin
	used  int
	last  *mergedFlow // flow of the latest frame, nil = none
	train train

	// Finished frames on their way to the network. A memory fault loses only the one in hand.
	out  [2]output
	outs int
}

// output is a merged or a single frame.
type output struct {
	b     *frame.Buf // nil: f
	f     []byte
	at    header.Layout // of f
	alone int           // see receiver.deliver
	port  *port
	peer  *peer
}

// mergedFlow is one flow of one network and peer. In use while it has parts.
type mergedFlow struct {
	gso.Merger
	port  *port
	peer  *peer
	hash  uint32
	takes frame.Need // of the destination's port
	asked bool
	first []byte // the first part
	at    header.Layout
	alone int // see receiver.deliver
}

// train is consecutive RoCE packets of one connection, network and peer. There is one at a time.
type train struct {
	gso.Train
	port  *port
	peer  *peer
	takes bool // the destination's port accepts trains
	at    header.Layout
	alone int // see receiver.deliver
}

// continues takes a RoCE packet, valid until flush, that continues the train; false: it does not. Its headers are those
// of the train, byte by byte, so they need not be located.
func (r *receiver) continues(f []byte, p *port, x *peer) bool {
	t := &r.merger.train
	if t.Packets() == 0 || t.port != p || t.peer != x || !t.Continues(f) {
		return false
	}
	if t.Packets() == 1 {
		t.takes = p.att.Accepts(r.l, f, &t.at)&frame.NeedTrain != 0
	}
	return t.takes && t.Add(r.vt.cfg.Pool, f)
}

// couple begins a train with a RoCE packet, valid until flush; false: the frame is none.
func (r *receiver) couple(f []byte, at *header.Layout, p *port, x *peer, alone int) bool {
	g := &r.merger
	var next gso.Train
	ok, roce := next.Start(f, at)
	if !roce {
		return false
	}
	g.uncouple()
	if ok {
		g.train = train{Train: next, port: p, peer: x, at: *at, alone: alone}
	} else {
		g.put(output{f: f, at: *at, alone: alone, port: p, peer: x})
	}
	r.drain()
	return true
}

// uncouple finishes the train.
func (g *merger) uncouple() {
	if t := &g.train; t.Packets() > 0 {
		f := t.First()
		g.put(output{b: t.Take(), f: f, at: t.at, alone: t.alone, port: t.port, peer: t.peer})
	}
}

// merge adds a frame, valid until flush.
func (r *receiver) merge(f []byte, at *header.Layout, p *port, x *peer, alone int) {
	g := &r.merger
	part, ok := gso.Parse(f, at)
	if !ok && g.used == 0 {
		r.deliver(f, at, p, x, alone)
		return
	}
	r.sort(f, at, p, x, alone, part, ok)
	r.drain()
}

// sort adds a frame to its flow, or starts a flow with it, and finishes what it must not overtake.
func (r *receiver) sort(f []byte, at *header.Layout, p *port, x *peer, alone int, part gso.Part, ok bool) {
	g := &r.merger
	if fl := g.last; ok && fl != nil && fl.Parts() > 0 && fl.port == p && fl.peer == x && r.add(fl, f, part) {
		if fl.Full() {
			g.finish(fl)
		}
		return
	}
	hash := classify(f, at).hash
	var free *mergedFlow
	for i := range g.flows {
		fl := &g.flows[i]
		if fl.Parts() == 0 {
			free = fl
			continue
		}
		if fl.hash != hash || fl.port != p || fl.peer != x {
			continue
		}
		if ok && r.add(fl, f, part) {
			g.last = fl
			if fl.Full() {
				g.finish(fl)
			}
			return
		}
		g.finish(fl) // so that this frame does not overtake it
		free = fl
		break
	}
	if !ok || part.Last() {
		g.put(output{f: f, at: *at, alone: alone, port: p, peer: x})
		return
	}
	if free == nil {
		free = &g.flows[g.next]
		g.next = (g.next + 1) % mergeFlows
		g.finish(free)
	}
	free.Start(f, part)
	free.port, free.peer, free.hash, free.first, free.at, free.alone, free.asked = p, x, hash, f, *at, alone, false
	g.used++
}

func (r *receiver) add(fl *mergedFlow, f []byte, part gso.Part) bool {
	if !fl.asked {
		fl.asked, fl.takes = true, fl.port.att.Accepts(r.l, fl.first, &fl.at)
	}
	return part.Need()&^(fl.takes|frame.NeedCsum) == 0 && fl.Add(r.vt.cfg.Pool, f, part)
}

// finish moves a flow's frame to the output.
func (g *merger) finish(fl *mergedFlow) {
	g.used--
	g.put(output{b: fl.Take(), f: fl.first, at: fl.at, alone: fl.alone, port: fl.port, peer: fl.peer})
}

func (g *merger) put(o output) {
	g.out[g.outs] = o
	g.outs++
}

// drain delivers the output to its networks.
func (r *receiver) drain() {
	for g := &r.merger; g.outs > 0; {
		o := g.out[0]
		g.out[0], g.out[1] = g.out[1], output{}
		g.outs--
		if o.b != nil {
			r.input(o.b, o.port, o.peer)
		} else {
			r.deliver(o.f, &o.at, o.port, o.peer, o.alone)
		}
	}
}

// flush ends a batch: it finishes and delivers everything.
func (r *receiver) flush() {
	r.drain()
	r.merger.uncouple()
	r.drain()
	for i := 0; r.merger.used > 0 && i < mergeFlows; i++ {
		if fl := &r.merger.flows[i]; fl.Parts() > 0 {
			r.merger.finish(fl)
			r.drain()
		}
	}
}

// clear removes all flows.
func (g *merger) clear() {
	for i := range g.flows {
		if fl := &g.flows[i]; fl.Parts() > 0 {
			if b := fl.Take(); b != nil {
				b.Free()
			}
		}
	}
	if b := g.train.Take(); b != nil {
		b.Free()
	}
	for ; g.outs > 0; g.outs-- {
		if b := g.out[g.outs-1].b; b != nil {
			b.Free()
		}
	}
	g.used = 0
}
