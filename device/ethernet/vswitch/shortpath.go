package vswitch

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// ShortPath carries TCP between host ports and a tunnel port of one network outside the switch, where the switch would
// forward the frames unchanged (package fastpath does so in the kernel). None of its methods may block.
type ShortPath interface {
	// Offer gets the two ports that a frame passes between. It is called for each such frame, on the frame's loop.
	Offer(l *loop.Loop, c Candidate)
	// Invalidate makes all earlier OnlyForwards answers void. It is called after each change of the network's tables,
	// on any goroutine.
	Invalidate()
	// Carried returns the counters of frames that have passed a port outside the switch. It must not call the network.
	Carried(a *Attachment) Totals
}

// Candidate describes untagged TCP frames from one address to another. One port is a host port, the other a tunnel
// port; Remote is that tunnel's peer.
type Candidate struct {
	From, To *Attachment
	Remote   Remote
	Dst, Src MAC
}

// SetShortPath lets p carry frames of the network; nil removes it.
func (n *Network) SetShortPath(p ShortPath) {
	if p == nil {
		n.short.Store(nil)
		return
	}
	n.short.Store(&p)
}

// offer offers a frame from port a to port out to the short path.
func offer(p ShortPath, l *loop.Loop, b *frame.Buf, h *header.Layout, a, out *Attachment, from Remote, to Destination) {
	c := Candidate{From: a, To: out, Remote: to.Remote}
	switch {
	case a.cfg.Kind == KindTAP && out.cfg.Kind == KindVTEP:
	case a.cfg.Kind == KindVTEP && out.cfg.Kind == KindTAP:
		c.Remote = from
	default:
		return
	}
	if h.L3 == HeaderLen && h.Proto == header.ProtoTCP && h.L4 != 0 {
		f := b.Bytes()
		c.Dst, c.Src = MAC(f), MAC(f[6:])
		p.Offer(l, c)
	}
}

// OnlyForwards reports whether the switch forwards all of the candidate's frames within the MTU unchanged. The answer
// is valid until the next ShortPath.Invalidate. Both addresses must be known at exactly these places (MT-6), and
// neither port may have a monitor, a rate, or a list of addresses. Callable from any goroutine.
func (n *Network) OnlyForwards(c *Candidate) bool {
	a, out := c.From, c.To
	if a.closed.Load() || out.closed.Load() || !a.unseen() || !out.unseen() || a.limits.in.unit != 0 ||
		out.limits.out.unit != 0 ||
		a.keys != nil || a.ips != nil {
		return false
	}
	now := n.seconds()
	at := func(m MAC, p *Attachment) (value, bool) {
		r := uint16(0)
		if p.cfg.Kind == KindVTEP {
			r = uint16(c.Remote)
		}
		v, ok := n.find(m.key(), 0, now)
		return v, ok && v.port() == p.id && v.remote() == r
	}
	_, ok := at(c.Dst, out)
	if !ok {
		return false
	}
	src, ok := at(c.Src, a)
	return ok && (!src.yields() || a.cfg.Kind == KindVTEP) // a host port takes over a yielding entry
}

// Refresh renews the age of an address that was seen ago seconds ago at its learnt place.
func (n *Network) Refresh(m MAC, a *Attachment, r Remote, ago uint32) {
	b, slot, v, ok := n.fdb.find(m.key())
	fresh := makeValue(a.id, false, uint16(r), n.seconds()-ago)
	if ok && v.place() == fresh.place() && int32(fresh.seen()-v.seen()) > 0 {
		b.vals[slot].CompareAndSwap(uint64(v), uint64(fresh))
	}
}

// carried returns the port's counters of the short path.
func (a *Attachment) carried() Totals {
	if p := a.net.short.Load(); p != nil {
		return (*p).Carried(a)
	}
	return Totals{}
}

// Port returns the Port that was attached.
func (a *Attachment) Port() Port { return a.port }

// Closed reports whether the port has left the network.
func (a *Attachment) Closed() bool { return a.closed.Load() }
