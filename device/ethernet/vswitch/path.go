package vswitch

import (
	"time"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// Path is the destination of one connection's frames: the switch's result for one of them, kept until its tables change
// (MT-5). All frames sent on a path have the same Ethernet and IP addresses. The zero value is a path not known yet. A
// path is used on one loop at a time.
type Path struct {
	att *Attachment // sending port
	gen uint64      // Network.gen when it was found
	l3  int         // length of the frames' Ethernet header
	out *Attachment // nil: not known
	to  Destination

	last  *Attachment // the last known one, to detect moves
	moves uint64
}

// Known reports whether the path leads to one port; otherwise its frames are flooded.
func (p *Path) Known() bool { return p.out != nil }

// Out returns the path's port, nil if none is known, and for tunnel ports the peer.
func (p *Path) Out() (*Attachment, Remote) { return p.out, p.to.Remote }

// Moves counts how often the path's destination has changed.
func (p *Path) Moves() uint64 { return p.moves }

func (p *Path) set(a, out *Attachment, l3 int, to Destination, gen uint64) {
	if p.last != nil && out != nil && (p.last != out || p.to != to) {
		p.moves++
	}
	if out != nil {
		p.last, p.to = out, to
	}
	p.att, p.gen, p.l3, p.out = a, gen, l3, out
}

// advance starts a new generation after a change of the tables: every Path, Route and OnlyForwards answer is void.
func (n *Network) advance() {
	n.gen.Add(1)
	if p := n.short.Load(); p != nil {
		(*p).Invalidate()
	}
}

// holds reports whether the path agrees with the tables of a's network. Inside enter.
func (p *Path) holds(a *Attachment) bool {
	return p.att == a && p.gen == a.net.gen.Load() && p.out != nil
}

// Send passes a frame into the network as Input does, on a path: the first frame looks the path up, later ones use it
// until a table changes. Loop thread only.
func (a *Attachment) Send(l *loop.Loop, b *frame.Buf, p *Path) {
	n := a.net
	r := n.enter(l)
	defer r.leave()
	if !p.holds(a) || a.closed.Load() {
		a.input(l, r, b, Source{}, p)
		return
	}
	if m := a.monitor.Load(); m != nil {
		(*m).Frame(l, true, b.Bytes())
	}
	frames, bytes := b.Segments(), b.WireBytes()
	r.countIn(a, frames, bytes)
	switch {
	case b.WireLen() > int(n.mtu.Load())+p.l3:
		a.Counters.Drop(l, TooBig, frames)
	case !a.limits.in.take(l.Now(), 8*bytes):
		a.Counters.Drop(l, RateLimit, frames)
	default:
		a.unicast(l, b, p.out, p.to)
	}
}

// Resolve looks up the path of frames that start with f (Ethernet and IP header), without sending one. False: the
// destination is not known, or the port may not send such frames. Loop thread only.
func (a *Attachment) Resolve(l *loop.Loop, f []byte, p *Path) bool {
	n := a.net
	r := n.enter(l)
	defer r.leave()
	if a.closed.Load() || len(f) < HeaderLen {
		return false
	}
	if p.holds(a) {
		return true
	}
	h := header.Locate(f)
	if src := macKey(f[6:]); a.keys != nil && !a.owns(src) || a.ips != nil && !a.guard(f, h) {
		return false
	}
	gen := n.gen.Load()
	out, to := n.lookup(macKey(f), vlanKey(h.VLAN), uint32(l.Now()/int64(time.Second)))
	if out == a && !a.cfg.Hairpin {
		out = nil
	}
	p.set(a, out, int(h.L3), to, gen)
	return out != nil
}

// lookup returns the one port of an address, nil for a group or unknown address. Inside enter.
func (n *Network) lookup(dst, vlan uint64, now uint32) (*Attachment, Destination) {
	if dst&groupBit != 0 {
		return nil, Destination{}
	}
	v, ok := n.find(dst, vlan, now)
	if !ok {
		return nil, Destination{}
	}
	return n.byID(v.port()), Destination{Remote: Remote(v.remote())}
}

// Owner returns the MAC of a known IP address (IPv4 as mapped IPv6); vlan is 0 for untagged frames. Callable from any
// goroutine; it may miss an address while the table changes.
func (n *Network) Owner(addr [16]byte, vlan uint16) (MAC, bool) {
	e, ok := n.neighbourOf(addr, vlan, n.seconds())
	return keyMAC(e.mac), ok
}
