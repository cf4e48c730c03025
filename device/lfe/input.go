package lfe

import (
	"slices"
	"time"

	"github.com/vnicd/vnicd/device/engine"
	"github.com/vnicd/vnicd/device/packet"
)

// Input lets a frame that came from this port into the network. Loop thread only. The buffer is lent: the caller keeps
// its reference, and from here on nobody changes the frame.
func (a *Attachment) Input(l *engine.Loop, b *packet.Buf, from Source) {
	n := a.net
	r := n.enter(l)
	defer r.leave()
	if a.closed.Load() {
		a.Counters.Drop(l, PortClosed, 1)
		return
	}
	f := b.Bytes()
	if len(f) < HeaderLen {
		a.Counters.Drop(l, ShortFrame, 1)
		return
	}
	a.Counters.In(l, len(f))
	vlan, reason, ok := a.admit(l, f)
	if !ok {
		a.Counters.Drop(l, reason, 1)
		return
	}
	now := uint32(l.Now() / int64(time.Second))
	if n.tick.Load() != now {
		n.sweep(now)
	}
	if a.keys == nil && !n.learn(l, a, macKey(f[6:])|vlan, uint16(from.Remote), now) {
		a.Counters.Drop(l, StaticMoved, 1)
		return
	}
	dst := macKey(f)
	t := n.table.Load()
	if dst&groupBit == 0 {
		if v, ok := n.find(dst, vlan, now); ok && int(v.port()) < len(t.byID) {
			if out := t.byID[v.port()]; out != nil {
				a.unicast(l, b, out, Destination{Remote: Remote(v.remote())})
				return
			}
		}
	}
	if !a.limits.stormOf(from.Remote).take(l.Now(), 1) {
		a.Counters.Drop(l, Storm, 1)
		return
	}
	a.flood(l, b, t)
}

// find looks an address up: in its VLAN, and then among the static entries, which are for all VLANs.
func (n *Network) find(mac, vlan uint64, now uint32) (value, bool) {
	_, _, v, ok := n.fdb.find(mac | vlan)
	if !ok && vlan != 0 {
		if _, _, v, ok = n.fdb.find(mac); ok && !v.static() {
			return 0, false
		}
	}
	return v, ok && !v.expired(now, n.age)
}

// admit checks what can be seen without the table, and returns the frame's VLAN as part of a table key.
func (a *Attachment) admit(l *engine.Loop, f []byte) (vlan uint64, why Reason, ok bool) {
	if isTag(f[12:]) {
		if len(f) < HeaderLen+4 {
			return 0, ShortFrame, false
		}
		vlan = uint64(f[14]&15)<<56 | uint64(f[15])<<48
	}
	if limit := int(a.net.mtu.Load()) + HeaderLen; len(f) > limit && len(f) > limit+tagLen(f) {
		return 0, TooBig, false
	}
	src := macKey(f[6:])
	if src == 0 || src&groupBit != 0 {
		return 0, BadSource, false
	}
	if a.keys != nil && !slices.Contains(a.keys, src) {
		return 0, Spoofed, false
	}
	if dst := macKey(f); dst>>4 == 0x0180c2000000>>4 {
		return 0, Reserved, false
	}
	if !a.limits.in.take(l.Now(), 8*len(f)) {
		return 0, RateLimit, false
	}
	return vlan, 0, true
}

// isTag tells whether an Ethernet type announces a VLAN tag.
func isTag(p []byte) bool { return p[0] == 0x81 && p[1] == 0 || p[0] == 0x88 && p[1] == 0xa8 }

// tagLen returns the length of the VLAN tags (at most two) in front of the Ethernet type.
func tagLen(f []byte) int {
	n := 0
	for n < 4*maxTags && len(f) >= HeaderLen+n && isTag(f[12+n:]) {
		n += 4
	}
	return n
}

func (a *Attachment) unicast(l *engine.Loop, b *packet.Buf, out *Attachment, to Destination) {
	if out == a && !a.cfg.Hairpin || out != a && a.cfg.Kind == KindVTEP && out.cfg.Kind == KindVTEP {
		a.Counters.Drop(l, SplitHorizon, 1)
		return
	}
	out.output(l, b, to)
}

// output gives a frame to the port.
func (a *Attachment) output(l *engine.Loop, b *packet.Buf, to Destination) {
	if !a.limits.out.take(l.Now(), 8*b.Len()) {
		a.Counters.Drop(l, RateLimit, 1)
		return
	}
	a.Counters.Out(l, b.Len())
	a.port.Deliver(l, b, to)
}

func (a *Attachment) flood(l *engine.Loop, b *packet.Buf, t *portTable) {
	a.Counters.flood(l)
	sent := false
	for _, out := range t.flood {
		if out == a || a.cfg.Kind == KindVTEP && out.cfg.Kind == KindVTEP {
			continue
		}
		sent = true
		out.output(l, b, Destination{Flood: true})
	}
	if !sent {
		a.Counters.Drop(l, NoPort, 1)
	}
}
