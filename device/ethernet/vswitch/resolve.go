package vswitch

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// Address resolution. Claims in ARP and ND messages are recorded; a request for a known address is answered here
// instead of being flooded (RFC 9161 describes the same for EVPN). Rules:
//
//   - An address that is static for another MAC cannot be claimed.
//   - A port with MACs of its own may claim addresses only for those.
//   - Requests from tunnels are not answered: the host at the other end has let them pass because it does not know the
//     address.
//   - A request is answered only if the target's MAC is in the table, at another port than the request's.
//   - Probes (ARP from 0.0.0.0, RFC 5227; solicitations from ::, RFC 4862 section 5.4) and announcements ask whether an
//     address is in use. They are answered only from static entries, because snooped ones may be outdated.

// resolve handles the frame if it is for address resolution. done is true if the frame ends here: answered, or dropped
// and counted.
func (a *Attachment) resolve(l *loop.Loop, f []byte, h *header.Layout, from Source, now uint32) (done bool) {
	switch {
	case h.Type == header.TypeARP:
		return a.arp(l, f, h, from, now)
	case h.Is(header.IsIPv6):
		if h.Proto == header.ProtoICMPv6 && len(f) >= int(h.L4)+8 {
			p, off := f[h.L3:], int(h.L4-h.L3)
			switch p[off] {
			case header.NDNeighborSolicit, header.NDNeighborAdvert:
				return a.nd(l, f, h, off, from, now)
			case header.NDRouterAdvert:
				// Its sender is a router; our answers for it must say so, or hosts that use it would drop it.
				return !a.claim(l, ip(p[8:24]), h, macKey(f[6:]), true, true, now)
			}
		}
	}
	return false
}

// claim records an address; if it may not be claimed, it counts a drop and returns false.
func (a *Attachment) claim(l *loop.Loop, addr ip, h *header.Layout, mac uint64, router, known bool, now uint32) bool {
	if a.net.snoop(a, addr, h.VLAN, mac, router, known, now) {
		return true
	}
	a.Counters.Drop(l, SpoofedNeighbour, 1)
	return false
}

func (a *Attachment) arp(l *loop.Loop, f []byte, h *header.Layout, from Source, now uint32) (done bool) {
	var m header.ARP
	if _, err := m.Decode(f[h.L3:]); err != nil {
		return false // not IPv4 over Ethernet
	}
	sender := macKey(m.SenderMAC[:])
	if a.keys != nil && !a.owns(sender) {
		a.Counters.Drop(l, SpoofedNeighbour, 1)
		return true
	}
	spa, tpa := header.Mapped4(m.SenderIP), header.Mapped4(m.TargetIP)
	probe := m.SenderIP == [4]byte{}
	if !probe && sender == macKey(f[6:]) && !a.claim(l, spa, h, sender, false, true, now) {
		return true
	}
	if m.Op != header.ARPRequest || macKey(f)&groupBit == 0 || spa == tpa {
		return false
	}
	e, ok := a.answers(tpa, h, sender, probe, now)
	if !ok {
		return false
	}
	b := a.net.cfg.Pool.Get()
	if b == nil {
		return false
	}
	defer b.Free()
	mac := keyMAC(e.mac)
	b.Append(f[6:12])
	b.Append(mac[:])
	b.Append(f[12:h.L3]) // the same tags
	reply := header.ARP{Op: header.ARPReply, SenderMAC: header.MAC(mac), SenderIP: m.TargetIP, TargetMAC: m.SenderMAC,
		TargetIP: m.SenderIP}
	at := b.Len()
	b.SetLen(at + header.ARPLen)
	reply.Encode(b.Bytes()[at:])
	a.answer(l, b, from)
	return true
}

// answers returns the entry for answering a request from this port.
func (a *Attachment) answers(target ip, h *header.Layout, sender uint64, probe bool, now uint32) (neighbour, bool) {
	n := a.net
	if n.cfg.Pool == nil || a.cfg.Kind == KindVTEP {
		return neighbour{}, false
	}
	e, ok := n.neighbourOf(target, h.VLAN, now)
	if !ok || e.mac == sender || probe && !e.static {
		return neighbour{}, false
	}
	v, ok := n.find(e.mac, vlanKey(h.VLAN), now)
	return e, ok && v.port() != a.id
}

func (a *Attachment) owns(mac uint64) bool {
	for _, k := range a.keys {
		if k == mac {
			return true
		}
	}
	return false
}

// nd handles a neighbour solicitation or advertisement; off is the offset of ICMPv6 after the IPv6 header at h.L3.
func (a *Attachment) nd(l *loop.Loop, f []byte, h *header.Layout, off int, from Source, now uint32) (done bool) {
	p := f[h.L3:]
	src, dst := ip(p[8:24]), ip(p[24:40])
	end := header.IPv6Len + int(binary.BigEndian.Uint16(p[4:]))
	var m header.Neighbor
	// RFC 4861, 7.1: a message that receivers would ignore is not used, but may pass.
	if p[7] != 255 || end < off || end > len(p) || m.Decode(p[off:end], src, dst) != nil || m.Target[0] == 0xff {
		return false
	}
	link, from6 := macKey(m.Link[:]), macKey(f[6:])
	if a.keys != nil && (m.HasLink && !a.owns(link) || m.Advert && a.ips != nil && !a.mayUse6(m.Target)) {
		a.Counters.Drop(l, SpoofedNeighbour, 1)
		return true
	}
	probe := src == ip{}
	switch {
	case m.Advert:
		return m.HasLink && link == from6 && !a.claim(l, m.Target, h, link, m.Router, true, now)
	case !probe && m.HasLink && link == from6 && !a.claim(l, src, h, link, false, false, now):
		return true
	case macKey(f)&groupBit == 0 || src == m.Target:
		return false
	}
	e, ok := a.answers(m.Target, h, from6, probe, now)
	if !ok {
		return false
	}
	b := a.net.cfg.Pool.Get()
	if b == nil {
		return false
	}
	defer b.Free()
	mac, to := keyMAC(e.mac), src
	reply := header.Neighbor{Advert: true, Router: e.router, Solicited: !probe, Override: true, Target: m.Target,
		Link: header.MAC(mac), HasLink: true}
	if probe { // to all nodes (RFC 4861, 7.2.4)
		to = ip{0: 0xff, 1: 2, 15: 1}
		b.Append([]byte{0x33, 0x33, 0, 0, 0, 1})
	} else {
		b.Append(f[6:12])
	}
	b.Append(mac[:])
	b.Append(f[12:h.L3])
	at := b.Len()
	b.SetLen(at + header.IPv6Len + reply.Len())
	out := b.Bytes()[at:]
	ip6 := header.IPv6{PayloadLen: uint16(reply.Len()), NextHeader: header.ProtoICMPv6, HopLimit: 255, Src: m.Target,
		Dst: to}
	ip6.Encode(out)
	reply.Encode(out[header.IPv6Len:], m.Target, to)
	a.answer(l, b, from)
	return true
}
