package evpn

import (
	"context"
	"net/netip"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// Duplicate detection (RFC 7432 section 15.1): an address that has moved to this host dupMoves times within dupTime is
// at two places.
const (
	dupMoves = 5
	dupTime  = 180 * time.Second
)

// Limits of how often the ports are checked: soon after a change, but no more often than this; and periodically, for
// aged entries.
const (
	lookApart = 20 * time.Millisecond
	lookEvery = time.Second
)

// presence is the state of a MAC at a port of this host.
type presence struct {
	here  bool
	fixed bool // it is the port's own: frames from elsewhere do not move it
	mobility
	moves  moves
	frozen bool // a duplicate: routes of it are neither advertised nor installed
}

// moves are the last times at which an address moved here.
type moves struct {
	at [dupMoves]time.Time
	n  int
}

// add records a move and reports whether there were too many.
func (m *moves) add(now time.Time) bool {
	m.at[m.n%dupMoves] = now
	m.n++
	oldest := m.at[m.n%dupMoves]
	return m.n >= dupMoves && now.Sub(oldest) < dupTime
}

// claim is what is advertised: a MAC, or a MAC with an IP address. The zero claim is the network itself (type 3).
type claim struct {
	mac vswitch.MAC
	ip  netip.Addr
}

// watchPorts checks this host's ports until ctx ends.
func (s *Speaker) watchPorts(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.kick:
		case <-tick.C:
		}
		s.look()
		select {
		case <-ctx.Done():
			return
		case <-time.After(lookApart):
		}
	}
}

func (s *Speaker) look() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.networks {
		n.look()
	}
}

// look compares the addresses at the ports with the known ones, and advertises the changes.
func (n *Network) look() {
	macs, ips := n.table.Network().Locals()
	here := make(map[vswitch.MAC]bool, len(macs))
	for _, l := range macs {
		client := l.Kind == vswitch.KindVM || l.Kind == vswitch.KindHCA
		if client && n.cfg.Present != nil && !n.cfg.Present(l.Port) {
			continue
		}
		here[l.MAC] = true
		m := n.mac(l.MAC)
		m.here.fixed = l.Fixed
		m.here.sticky = l.Fixed && !client // set by an operator; VMs may move
		if !m.here.here && !m.here.frozen {
			n.arrive(m)
		}
	}
	for a, m := range n.here {
		if !here[a] {
			n.leave(m)
			n.thaw(m)
			n.electMAC(m)
		}
	}
	at := make(map[netip.Addr]bool, len(ips))
	for _, l := range ips {
		at[l.IP] = true
		if x := n.ip(l.IP); x.at != l.MAC {
			n.s.arrivals++
			x.at, x.since = l.MAC, n.s.arrivals
			n.hereIPs[l.IP] = x
			n.electIP(x)
		}
	}
	for a, x := range n.hereIPs {
		if !at[a] {
			delete(n.hereIPs, a)
			x.at = vswitch.MAC{}
			n.electIP(x)
		}
	}
	n.say()
}

// arrive records that a MAC is now at a port of this host. If others have it, it has moved here.
func (n *Network) arrive(m *mac) {
	if best := m.strongest(); best != nil {
		if best.sticky && !m.here.fixed {
			return // a sticky MAC does not move; the table's entry does not yield
		}
		if m.here.moves.add(n.s.clock()) {
			n.freeze(m, best)
			return
		}
	}
	m.here.here, m.here.seq = true, m.next()
	n.here[m.addr] = m
	n.electMAC(m)
}

// leave records that a MAC has gone, or that another VTEP has the better claim. say withdraws what was advertised.
func (n *Network) leave(m *mac) {
	m.after = max(m.after, m.here.seq)
	m.here.here, m.here.mobility = false, mobility{}
	delete(n.here, m.addr)
	n.s.poke()
}

// contest answers a claim to a MAC that cannot leave its port (RFC 7432 section 15: with the next sequence number).
func (n *Network) contest(m *mac, other *route) {
	switch {
	case other.sticky && !m.here.sticky:
		if more, ok := n.s.warn.allow(n.s.clock()); ok {
			n.s.log.Warn("another VTEP advertises a MAC of this host as static", "network", n.table.Network().Name(), "mac",
				m.addr, "vtep", other.vtep, "more", more)
		}
	case m.here.moves.add(n.s.clock()):
		n.freeze(m, other)
	default:
		m.here.seq = m.next()
		n.s.poke()
	}
}

// freeze ends the contest for a MAC at two places: its advertised and installed routes stay unchanged.
func (n *Network) freeze(m *mac, other *route) {
	m.here.frozen = true
	n.duplicates++
	n.s.log.Error("duplicate MAC: here and behind another VTEP; EVPN ignores it until one of them is gone",
		"network", n.table.Network().Name(), "mac", m.addr, "vtep", other.vtep, "moves", dupMoves, "within", dupTime)
}

// thaw reverts freeze.
func (n *Network) thaw(m *mac) {
	if m.here.frozen {
		m.here.frozen, m.here.moves = false, moves{}
		n.s.log.Info("MAC no longer duplicate", "network", n.table.Network().Name(), "mac", m.addr)
	}
}

// ClearDuplicate unfreezes a duplicate MAC, and reports whether it was frozen.
func (n *Network) ClearDuplicate(a vswitch.MAC) bool {
	n.s.mu.Lock()
	defer n.s.mu.Unlock()
	m := n.macs[a]
	if m == nil || !m.here.frozen {
		return false
	}
	n.thaw(m)
	n.electMAC(m)
	n.s.poke()
	return true
}

// say advertises the addresses here, and withdraws the others.
func (n *Network) say() {
	want := make(map[claim]mobility, len(n.said))
	for a, m := range n.here {
		if !m.here.frozen {
			want[claim{mac: a}] = m.here.mobility
		}
	}
	for a, x := range n.hereIPs {
		if mob, ok := want[claim{mac: x.at}]; ok {
			want[claim{mac: x.at, ip: a}] = mob
		}
	}
	for c := range n.said {
		if m := n.macs[c.mac]; m != nil && m.here.frozen {
			continue
		}
		if _, ok := want[c]; !ok {
			n.s.withdraw(n, c)
			delete(n.said, c)
		}
	}
	for c, mob := range want {
		if was, ok := n.said[c]; ok && was == mob {
			continue
		}
		if err := n.s.bgp.advertise(n.advert(c, mob)); err != nil {
			// An unusable route has a higher number: the next check advertises a higher one.
			n.macs[c.mac].here.seq = n.macs[c.mac].next()
			n.s.log.Debug("not advertised", "mac", c.mac, "ip", c.ip, "error", err)
			continue
		}
		n.said[c] = mob
	}
}
