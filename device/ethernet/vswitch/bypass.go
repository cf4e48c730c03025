package vswitch

import (
	"sync/atomic"

	"github.com/vnicd/vnicd/device/loop"
)

// Bypass carries TCP between host ports and a tunnel port without the switch, where the switch would do nothing but pass it on.
type Bypass interface {
	// Offer says where a frame goes that could do without us. It is called for each, on the frame's loop, and must not block.
	Offer(l *loop.Loop, c Candidate)
	// Carried returns what has passed a port without us. It must not call the network.
	Carried(a *Attachment) Totals
}

// Candidate is where untagged TCP frames from one address to another go. One port is a host's, the other a tunnel, to that far end.
type Candidate struct {
	From, To *Attachment
	Remote   Remote
	Dst, Src MAC
}

// bypass is what a network has one for.
type bypass struct {
	Bypass
	generation *atomic.Uint64
}

// SetBypass lets b carry frames from now on; nil ends that. generation is counted on whenever gen is: what the bypass was told before
// holds no longer.
func (n *Network) SetBypass(b Bypass, generation *atomic.Uint64) {
	if b == nil {
		n.bypass.Store(nil)
		return
	}
	n.bypass.Store(&bypass{b, generation})
}

// turn moves the generation on, after a change.
func (n *Network) turn() {
	n.gen.Add(1)
	if b := n.bypass.Load(); b != nil {
		b.generation.Add(1)
	}
}

// offer offers a frame on its way from a port to another to the bypass.
func (b *bypass) offer(l *loop.Loop, f []byte, h *headerInfo, a, out *Attachment, from Remote, to Destination) {
	c := Candidate{From: a, To: out, Remote: to.Remote}
	switch {
	case a.cfg.Kind == KindTAP && out.cfg.Kind == KindVTEP:
	case a.cfg.Kind == KindVTEP && out.cfg.Kind == KindTAP:
		c.Remote = from
	default:
		return
	}
	if h.l3 == HeaderLen && isTCP(f[HeaderLen:], h.typ) {
		c.Dst, c.Src = MAC(f), MAC(f[6:])
		b.Offer(l, c)
	}
}

func isTCP(p []byte, typ uint16) bool {
	const tcp = 6
	return typ == etherIPv4 && len(p) > 9 && p[9] == tcp || typ == etherIPv6 && len(p) > 6 && p[6] == tcp
}

// Vouch tells whether the switch passes on all frames like the candidate, unless they are beyond the MTU, and as they are. That holds until the
// generation moves on, if that was read before. Both addresses must be known to be exactly there (MT-6), and nobody may have to see,
// count against a rate, or check the frames. Safe from any goroutine.
func (n *Network) Vouch(c *Candidate) bool {
	a, out := c.From, c.To
	if a.closed.Load() || out.closed.Load() || !a.unseen() || !out.unseen() || a.limits.in.unit != 0 || out.limits.out.unit != 0 || a.keys != nil || a.ips != nil {
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
	return ok && (!src.yields() || a.cfg.Kind == KindVTEP) // a host port is about to take it over
}

// Heard notes that an address was heard of, so many seconds ago, where it has been learnt to be.
func (n *Network) Heard(m MAC, a *Attachment, r Remote, ago uint32) {
	b, slot, v, ok := n.fdb.find(m.key())
	fresh := makeValue(a.id, false, uint16(r), n.seconds()-ago)
	if ok && v.place() == fresh.place() && int32(fresh.seen()-v.seen()) > 0 {
		b.vals[slot].CompareAndSwap(uint64(v), uint64(fresh))
	}
}

// carried is what the bypass has carried past the port.
func (a *Attachment) carried() Totals {
	if b := a.net.bypass.Load(); b != nil {
		return b.Carried(a)
	}
	return Totals{}
}

// Port returns what takes the port's frames.
func (a *Attachment) Port() Port { return a.port }

// Closed tells whether the port is off the network.
func (a *Attachment) Closed() bool { return a.closed.Load() }
