package vswitch

import (
	"sync/atomic"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
)

// reader is one loop's part of a network: whether it is inside, and results that it reuses for the frames of a burst.
type reader struct {
	// seq is odd while the loop is inside Input. A writer that has published a new port table waits until every loop
	// that was inside has left; then no loop uses the old table.
	seq   atomic.Uint64
	depth int // a port may call Input from inside Deliver
	loop  int // number of its loop
	// in and out are counts since the loop entered that are not in the ports' counters yet: a store to a counter read
	// by others waits for all stores before it, such as those of a frame to a guest's memory.
	in, out tally
	known   [knownPlaces]place
	_       [64]byte
}

// tally counts consecutive frames of one port.
type tally struct {
	port          *Attachment
	frames, bytes int
}

// place is the forwarding table's result for an address.
type place struct {
	key  uint64 // of the table
	gen  uint64 // of the network, when it was looked up
	out  *Attachment
	to   Destination
	tick uint32 // second of the lookup, because entries age
}

const knownPlaces = 16

func (n *Network) enter(l *loop.Loop) *reader {
	r := &n.readers[l.ID()]
	if r.depth++; r.depth == 1 {
		r.seq.Add(1)
	}
	return r
}

func (r *reader) leave() {
	if r.depth--; r.depth == 0 {
		r.publishIn()
		r.publishOut()
		r.seq.Add(1)
	}
}

// countIn counts a frame, or one that becomes several, sent by a port; the port's counters have it when the loop has
// left.
func (r *reader) countIn(a *Attachment, frames, bytes int) {
	if r.in.port != a {
		r.publishIn()
		r.in.port = a
	}
	r.in.frames += frames
	r.in.bytes += bytes
}

// countOut is countIn for frames delivered to a port.
func (r *reader) countOut(a *Attachment, frames, bytes int) {
	if r.out.port != a {
		r.publishOut()
		r.out.port = a
	}
	r.out.frames += frames
	r.out.bytes += bytes
}

func (r *reader) publishIn() {
	if t := &r.in; t.port != nil {
		t.port.Counters.in(r.loop, t.frames, t.bytes)
		*t = tally{}
	}
}

func (r *reader) publishOut() {
	if t := &r.out; t.port != nil {
		t.port.Counters.out(r.loop, t.frames, t.bytes)
		*t = tally{}
	}
}

// lookup is Network.lookup with the loop's results of this second, while no known address may be elsewhere; gen is
// Network.gen read before.
func (r *reader) lookup(n *Network, dst, vlan, gen uint64, now uint32) (*Attachment, Destination) {
	key := dst | vlan
	p := &r.known[(key^key>>4)%knownPlaces]
	if p.key == key && p.gen == gen && p.tick == now && p.out != nil {
		return p.out, p.to
	}
	out, to := n.lookup(dst, vlan, now)
	*p = place{key: key, gen: gen, out: out, to: to, tick: now}
	return out, to
}

// Batch lets a loop process frames of a VM's network device together: entering the network and counting are done once.
type Batch struct {
	port *VMPort
	att  *Attachment
	loop *loop.Loop
	r    *reader
}

// Begin starts a batch; the port may be moved during it. Loop thread only.
func (p *VMPort) Begin(l *loop.Loop) Batch {
	a := p.att.Load()
	return Batch{p, a, l, a.net.enter(l)}
}

// Input is VMPort.InputNet.
func (b *Batch) Input(f *frame.Buf) {
	if b.port.att.Load() != b.att {
		b.port.InputNet(b.loop, f)
		return
	}
	b.att.input(b.loop, b.r, f, Source{}, nil)
}

// End ends the batch. Changes of the network wait for it.
func (b *Batch) End() { b.r.leave() }
