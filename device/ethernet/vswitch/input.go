package vswitch

import (
	"time"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// Input passes a frame from this port into the network. Loop thread only. The buffer is lent: the caller keeps its
// reference, and the frame must not be changed any more.
func (a *Attachment) Input(l *loop.Loop, b *frame.Buf, from Source) {
	r := a.net.enter(l)
	defer r.leave()
	a.input(l, r, b, from, nil)
}

// input is Input, inside enter. It stores the result of the lookup in p, if p is not nil.
func (a *Attachment) input(l *loop.Loop, r *reader, b *frame.Buf, from Source, p *Path) {
	n := a.net
	if a.closed.Load() {
		a.Counters.Drop(l, PortClosed, b.Segments())
		return
	}
	f := b.Bytes()
	if m := a.monitor.Load(); m != nil {
		(*m).Frame(l, true, f)
	}
	if len(f) < HeaderLen {
		a.Counters.Drop(l, ShortFrame, 1)
		return
	}
	frames := b.Segments()
	r.countIn(a, frames, b.WireBytes())
	h := b.Layout()
	if reason, ok := a.admit(l, b, f, h); !ok {
		a.Counters.Drop(l, reason, frames)
		if reason == TooBig {
			a.tooBig(l, f, h, n.MTU(), from)
		}
		return
	}
	now := uint32(l.Now() / int64(time.Second))
	if n.tick.Load() != now {
		n.sweep(now)
	}
	if a.keys == nil && !n.learn(l, a, b, uint16(from.Remote), now) {
		return
	}
	if (h.Type == header.TypeARP || h.Type == header.TypeIPv6) && a.resolve(l, f, h, from, now) {
		return
	}
	t, gen := n.table.Load(), n.gen.Load()
	out, to := r.lookup(n, macKey(f), vlanKey(h.VLAN), gen, now)
	if p != nil {
		p.set(a, out, int(h.L3), to, gen)
	}
	if out != nil {
		if p := n.short.Load(); p != nil {
			offer(*p, l, b, h, a, out, from.Remote, to)
		}
		a.unicast(l, b, out, to)
		return
	}
	if !a.limits.stormOf(from.Remote).take(l.Now(), frames) {
		a.Counters.Drop(l, Storm, frames)
		return
	}
	if a.keys == nil {
		n.echoes.note(f, now)
	}
	if s := n.snooping.Load(); s != nil && a.snoop(s, l, b, t, from, now) {
		return
	}
	a.flood(l, b, t, macKey(f)&groupBit == 0 && n.tunnels.Load()&noTunnelFlood != 0)
}

// find looks up an address in its VLAN, then among the static entries, which apply to all VLANs.
func (n *Network) find(mac, vlan uint64, now uint32) (value, bool) {
	_, _, v, ok := n.fdb.find(mac | vlan)
	if !ok && vlan != 0 {
		if _, _, v, ok = n.fdb.find(mac); ok && !v.static() {
			return 0, false
		}
	}
	return v, ok && !v.expired(now, n.age)
}

// admit makes the checks that need no tables.
func (a *Attachment) admit(l *loop.Loop, b *frame.Buf, f []byte, h *header.Layout) (why Reason, ok bool) {
	if header.IsTag(h.Type) && len(f) < int(h.L3)+header.VLANLen {
		return ShortFrame, false
	}
	if b.WireLen() > int(a.net.mtu.Load())+int(h.L3) {
		return TooBig, false
	}
	src := macKey(f[6:])
	if src == 0 || src&groupBit != 0 {
		return BadSource, false
	}
	if a.keys != nil && !a.owns(src) {
		return Spoofed, false
	}
	if dst := macKey(f); dst>>4 == 0x0180c2000000>>4 {
		return Reserved, false
	}
	if a.ips != nil && !a.guard(f, h) {
		return SpoofedIP, false
	}
	if !a.limits.in.take(l.Now(), 8*b.WireBytes()) {
		return RateLimit, false
	}
	return 0, true
}

func (a *Attachment) unicast(l *loop.Loop, b *frame.Buf, out *Attachment, to Destination) {
	if out == a && !a.cfg.Hairpin || out != a && a.cfg.Kind == KindVTEP && out.cfg.Kind == KindVTEP {
		a.Counters.Drop(l, SplitHorizon, b.Segments())
		return
	}
	out.output(l, b, to)
}

// output delivers a frame to the port, completed as far as the port requires.
func (a *Attachment) output(l *loop.Loop, b *frame.Buf, to Destination) {
	if !a.takes(b) {
		a.finish(l, b, to)
		return
	}
	if !a.limits.out.take(l.Now(), 8*b.WireBytes()) {
		a.Counters.Drop(l, RateLimit, b.Segments())
		return
	}
	a.net.readers[l.ID()].countOut(a, b.Segments(), b.WireBytes())
	if m := a.monitor.Load(); m != nil {
		(*m).Frame(l, false, b.Bytes())
	}
	a.port.Deliver(l, b, to)
}

// flood delivers a frame to all ports; without tunnels if here is set.
func (a *Attachment) flood(l *loop.Loop, b *frame.Buf, t *portTable, here bool) {
	a.Counters.flood(l)
	sent, none := false, NoPort
	for _, out := range t.flood {
		if out == a || a.cfg.Kind == KindVTEP && out.cfg.Kind == KindVTEP {
			continue
		}
		if here && out.cfg.Kind == KindVTEP {
			none = UnknownUnicast
			continue
		}
		sent = true
		out.output(l, b, Destination{Flood: true})
	}
	if !sent {
		a.Counters.Drop(l, none, b.Segments())
	}
}
