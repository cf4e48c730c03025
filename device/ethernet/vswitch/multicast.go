package vswitch

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// Multicast snooping (RFC 4541, for IGMP and MLD): which frames to group addresses are not flooded.
//
//	RoCE                   to HCAs that have joined the group; not to others; flooded as before to all else, because a
//	                       program may attach a UD QP to a group without an IGMP or MLD report
//	IGMP and MLD reports   to routers and tunnels, if there is a querier
//	IP, a known group      to members, routers, and ports that take all, if the querier's hosts have had time to answer
//	all else               flooded: queries, link-local groups, unknown groups, addresses that do not fit the packet
//
// Between tunnels frames are not forwarded, so every host must know all others' members: reports of this host's ports
// go into all tunnels, and those from tunnels make the peer a member.

// GroupMember is an HCA that can tell whether it has joined a group (IPv4 as mapped IPv6). Joined is called on any
// loop.
type GroupMember interface {
	Joined(group [16]byte) bool
}

// snoop delivers a frame to a group address, and returns false if the frame is to be flooded.
func (a *Attachment) snoop(s *snooper, l *loop.Loop, b *frame.Buf, t *portTable, from Source, now uint32) bool {
	f, h := b.Bytes(), b.Layout()
	dst := macKey(f)
	if dst&groupBit == 0 || dst == macBits {
		return false
	}
	if h.Is(header.IsRoCE) {
		return a.roceGroup(l, b, t)
	}
	// The table knows one VLAN tag: hosts behind a second one are not those that a querier without it asks.
	if h.L4 == 0 || h.L3 > HeaderLen+header.VLANLen {
		return false
	}
	zk := zoneKey{h.VLAN, h.Is(header.IsIPv6)}
	group, ok := groupOf(f, h, dst)
	if !ok {
		return false
	}
	p := spot{a, from.Remote}
	if a.cfg.Kind != KindVTEP {
		p.remote = 0
	}
	if header.IsMembership(f, h) {
		return a.membership(s, l, b, t, p, zk, now)
	}
	if hold, ok := header.PIMHold(f, h); ok {
		s.put(event{kind: eventRouter, spot: p, zone: zk, now: now, until: now + seconds(min(hold, maxHold))})
		s.wake()
		return false
	}
	z := s.zone(zk)
	if linkLocal(&group) || z == nil || !z.active(now) {
		return false
	}
	members := s.members(&groupKey{group, h.VLAN})
	if !anyAlive(members, now) {
		return false
	}
	a.Counters.prune(l)
	if !a.toMembers(s, l, b, t, members, *z.routers.Load(), now) {
		a.Counters.Drop(l, NoMember, b.Segments())
	}
	return true
}

// groupOf returns the group of an IP packet, if the frame's MAC is the group's (RFC 1112, 6.4; RFC 2464, 7).
func groupOf(f []byte, h *header.Layout, dst uint64) (group ip, ok bool) {
	p := f[h.L3:]
	if h.Is(header.IsIPv6) {
		group = ip(p[24:40])
		return group, group[0] == 0xff && dst == 0x3333<<32|uint64(binary.BigEndian.Uint32(group[12:]))
	}
	v4 := [4]byte(p[16:20])
	return header.Mapped4(v4), v4[0]>>4 == 14 &&
		dst == 0x01005e<<24|uint64(binary.BigEndian.Uint32(v4[:])&0x7fffff)
}

// linkLocal reports whether a group is for one link (224.0.0.0/24, ff02::/16) or less: hosts need not report those.
func linkLocal(g *ip) bool {
	if g[0] == 0xff {
		return g[1]&15 <= 2
	}
	return g[12] == 224 && g[13] == 0 && g[14] == 0
}

func anyAlive(ms []*member, now uint32) bool {
	for _, m := range ms {
		if m.alive(now) {
			return true
		}
	}
	return false
}

// forwards reports whether frames of a may go to out: split horizon.
func (a *Attachment) forwards(out *Attachment) bool {
	return out != a && (a.cfg.Kind != KindVTEP || out.cfg.Kind != KindVTEP)
}

// toMembers delivers a frame to members and routers, once to each, and to ports that take all. It returns false if
// there are none.
func (a *Attachment) toMembers(s *snooper, l *loop.Loop, b *frame.Buf, t *portTable, members, routers []*member,
	now uint32) (sent bool) {
	for _, m := range members {
		if m.alive(now) && a.forwards(m.att) && !m.att.takesAll(now) {
			m.att.output(l, b, m.destination())
			sent = true
		}
	}
	for _, r := range routers {
		if r.alive(now) && a.forwards(r.att) && !r.att.takesAll(now) && !contains(members, r.spot, now) {
			r.att.output(l, b, r.destination())
			sent = true
		}
	}
	if int32(s.all.Load()-now) <= 0 {
		return sent
	}
	for _, out := range t.flood {
		if out.takesAll(now) && a.forwards(out) {
			out.output(l, b, Destination{Flood: true})
			sent = true
		}
	}
	return sent
}

func contains(ms []*member, p spot, now uint32) bool {
	for _, m := range ms {
		if m.spot == p {
			return m.alive(now)
		}
	}
	return false
}

// roceGroup delivers a RoCE frame to a group address: to all ports but HCAs that have not joined.
func (a *Attachment) roceGroup(l *loop.Loop, b *frame.Buf, t *portTable) bool {
	f, h := b.Bytes(), b.Layout()
	p := f[h.L3:]
	var group ip
	switch {
	case h.Type == header.TypeIPv4 && h.L4 != 0:
		group = header.Mapped4([4]byte(p[16:20]))
	case (h.Type == header.TypeIPv6 && h.L4 != 0 || h.Type == header.TypeRoCE1) && len(p) >= header.IPv6Len:
		group = ip(p[24:40])
	default:
		return false
	}
	a.Counters.prune(l)
	sent := false
	for _, out := range t.flood {
		if !a.forwards(out) {
			continue
		}
		if v, ok := out.port.(groupPort); ok && !v.joined(group) {
			continue
		}
		out.output(l, b, Destination{Flood: true})
		sent = true
	}
	if !sent {
		a.Counters.Drop(l, NoMember, b.Segments())
	}
	return true
}

// groupPort is a port that can tell whether it wants RoCE frames of a group.
type groupPort interface {
	joined(group ip) bool
}

// membership handles an IGMP or MLD message. It returns false if the message is to be flooded.
func (a *Attachment) membership(s *snooper, l *loop.Loop, b *frame.Buf, t *portTable, p spot, zk zoneKey,
	now uint32) bool {
	var m header.Membership
	if m.Decode(b.Bytes(), b.Layout()) != nil {
		return false // receivers ignore it
	}
	defer s.wake()
	if m.Query {
		s.query(&m, b.Layout(), p, zk, now)
		return false
	}
	if n := m.Records(); n > 0 && !a.limits.recordsOf(p.remote).take(l.Now(), n) {
		s.refuse(a, now, n)
	} else {
		for {
			group, joins, ok := m.Next()
			if !ok {
				break
			}
			if linkLocal(&group) {
				continue
			}
			e := event{kind: eventLeave, spot: p, zone: zk, addr: group, now: now}
			if joins {
				e.kind = eventJoin
			}
			s.put(e)
		}
	}
	z := s.zone(zk)
	if z == nil || !z.asked(now) {
		return false
	}
	// Not to other hosts: they would not report the same group (RFC 4541, 2.1.1).
	routers := *z.routers.Load()
	for _, r := range routers {
		if r.alive(now) && r.att.cfg.Kind != KindVTEP && a.forwards(r.att) {
			r.att.output(l, b, Destination{Flood: true})
		}
	}
	if a.cfg.Kind != KindVTEP {
		for _, out := range t.flood {
			if out.cfg.Kind == KindVTEP {
				out.output(l, b, Destination{Flood: true})
			}
		}
	}
	return true
}

// query records a query, which is flooded then. Only a general query that every host of the zone gets, and has to
// answer in time, makes a querier: otherwise a VM could let memberships of others end by claiming to be one.
func (s *snooper) query(m *header.Membership, h *header.Layout, p spot, zk zoneKey, now uint32) {
	general := m.Group == ip{}
	within := m.Response > 0 && m.Response <= maxResponse && m.Interval <= maxInterval
	hidden := h.L3 != HeaderLen && h.VLAN == 0 // a priority tag, which many hosts do not accept
	e := event{kind: eventQuery, spot: p, zone: zk, addr: m.Source, now: now, elect: general && within && !hidden,
		until: now + seconds(leastMembers)}
	if e.elect {
		e.timers = timersOf(m)
		e.until = now + max(e.present, e.lifetime)
		// At once, not in the goroutine: no host must see another's answer to this query.
		if z := s.zone(zk); z != nil {
			z.query(now, &e.timers)
		}
	}
	s.put(e)
}
