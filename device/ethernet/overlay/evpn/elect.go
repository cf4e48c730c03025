package evpn

import (
	"math"
	"net/netip"
	"slices"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vnicd/vnicd/device/ethernet/overlay"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// mac is the state of one MAC: the routes of others that claim it, and its presence here.
type mac struct {
	addr   vswitch.MAC
	routes []*route
	best   *route // in the table
	here   presence
	after  uint32 // above the sequence numbers of withdrawn claims
}

// ip is the same for an IP address. It follows its MAC's mobility; if several MACs claim it, the latest claim wins.
type ip struct {
	addr   netip.Addr
	routes []*route
	best   *route      // in the table
	at     vswitch.MAC // MAC at a port of this host; zero: none
	since  uint64      // in the order of route.arrived
}

// full counts the installed addresses of one kind, and records those that found no room.
type full struct {
	n, max  int
	waiting map[any]struct{} // *mac or *ip
}

// take updates the count for an address that was and is now to be installed or not; false: there is no room.
func (f *full) take(x any, was, is bool) bool {
	delete(f.waiting, x)
	switch {
	case is && !was && f.n >= f.max:
		if f.waiting == nil {
			f.waiting = map[any]struct{}{}
		}
		f.waiting[x] = struct{}{}
		return false
	case is && !was:
		f.n++
	case was && !is:
		f.n--
	}
	return true
}

// beats orders claims to one MAC (RFC 7432 sections 15 and 15.2): static addresses do not move; then the higher
// sequence number wins, then the lower VTEP address.
func (a mobility) beats(b mobility, vtep, other netip.Addr) bool {
	switch {
	case a.sticky != b.sticky:
		return a.sticky
	case a.seq != b.seq:
		return a.seq > b.seq
	}
	return vtep.Less(other)
}

// maxClaims bounds the routes for one address: every change of one looks at all of them, so a neighbour must not be
// able to send a quarter of a million for one MAC. Routes in excess are refused until they are advertised again.
const maxClaims = 1024

// crowded reports whether there is no room for one more route for an address.
func (n *Network) crowded(k nlri) bool {
	if k.kind != bgp.EVPN_ROUTE_TYPE_MAC_IP_ADVERTISEMENT {
		return false
	}
	m, x := n.macs[k.mac], n.ips[k.ip]
	return m != nil && len(m.routes) >= maxClaims || x != nil && len(x.routes) >= maxClaims
}

// takeLocked processes BGP's new best path of an NLRI, or its withdrawal.
func (s *Speaker) takeLocked(p *path) {
	k, ok := p.nlri, p.used
	if p.withdrawn || !p.from.IsValid() { // our own route has become the best path
		if ok {
			s.dropLocked(k)
		}
		return
	}
	r, why := s.decode(p)
	if why != nil {
		s.ignored[why.Error()]++
	}
	if r == nil {
		if ok {
			s.dropLocked(k)
		}
		return
	}
	if why != nil {
		if n, ok := s.warn.allow(s.clock()); ok {
			s.log.Warn("EVPN route refused", "network", r.net.table.Network().Name(), "route", r.nlri, "neighbour", r.from,
				"next-hop", r.vtep, "why", why, "more", n)
		}
	}
	old := s.routes[k]
	if old != nil && old.net != r.net {
		s.dropLocked(k)
		old = nil
	}
	if old == nil && r.net.crowded(k) {
		s.ignored[errClaims.Error()]++
		return
	}
	// BGP ends the session of a neighbour that exceeds its limit. Until then, or if the process that runs BGP has been
	// taken over, no more is kept.
	limit := s.cfg.limit(r.from)
	if (old == nil || old.from != r.from) && s.held[r.from] >= limit && s.swept[r.from] != s.epoch {
		s.sweepLocked(r.from, s.epoch) // routes of processes that have ended make room
	}
	if (old == nil || old.from != r.from) && s.held[r.from] >= limit {
		s.ignored[errLimit.Error()]++
		s.dropLocked(k)
		return
	}
	s.arrivals++
	r.arrived = s.arrivals
	if old != nil && old.vtep == r.vtep && old.mobility == r.mobility {
		r.arrived = old.arrived // advertised again
	}
	r.epoch = s.epoch
	s.forgetRouteLocked(k, old)
	s.routes[k] = r
	s.held[r.from]++
	r.net.replace(old, r)
}

func (s *Speaker) dropLocked(k nlri) {
	if r := s.routes[k]; r != nil {
		s.forgetRouteLocked(k, r)
		r.net.replace(r, nil)
	}
}

// forgetRouteLocked removes a route, if there is one, from the speaker alone.
func (s *Speaker) forgetRouteLocked(k nlri, r *route) {
	if r == nil {
		return
	}
	delete(s.routes, k)
	if s.held[r.from]--; s.held[r.from] == 0 {
		delete(s.held, r.from)
	}
}

// replace replaces a route by another with the same key; either may be nil.
func (n *Network) replace(old, r *route) {
	k := old
	if k == nil {
		k = r
	}
	if k.kind == bgp.EVPN_INCLUSIVE_MULTICAST_ETHERNET_TAG {
		n.countVTEP(r, 1)
		n.countVTEP(old, -1)
		return
	}
	m := n.mac(k.mac)
	if r == nil {
		m.after = max(m.after, above(old.seq))
	}
	m.routes = swap(m.routes, old, r)
	if k.nlri.ip.IsValid() {
		x := n.ip(k.nlri.ip)
		x.routes = swap(x.routes, old, r)
	}
	n.electMAC(m)
	if k.nlri.ip.IsValid() {
		n.electIP(n.ip(k.nlri.ip))
	}
}

func swap(list []*route, old, r *route) []*route {
	if i := slices.Index(list, old); i >= 0 && old != nil {
		if r != nil {
			list[i] = r
			return list
		}
		return slices.Delete(list, i, i+1)
	}
	return append(list, r)
}

// countVTEP maintains the flood list.
func (n *Network) countVTEP(r *route, by int) {
	if r == nil || r.why != nil {
		return
	}
	before := n.vteps[r.vtep]
	n.vteps[r.vtep] += by
	key := overlay.Key{Kind: overlay.Peer, VTEP: r.vtep}
	switch {
	case n.vteps[r.vtep] == 0:
		delete(n.vteps, r.vtep)
		n.table.Withdraw(n, key)
	case before == 0:
		_ = n.table.Set(n, overlay.Route{Key: key}) // the table keeps the reason
	}
}

func (n *Network) mac(a vswitch.MAC) *mac {
	m := n.macs[a]
	if m == nil {
		m = &mac{addr: a, after: n.gone[a]}
		delete(n.gone, a)
		n.macs[a] = m
	}
	return m
}

// remember keeps the sequence number of a MAC without claims, so that it rises also if an address is withdrawn at its
// old location before it is advertised at the new one. If there are too many, arbitrary ones are dropped.
func (n *Network) remember(m *mac) {
	if m.after == 0 {
		return
	}
	for a := range n.gone {
		if len(n.gone) < n.cfg.MaxEntries {
			break
		}
		delete(n.gone, a)
	}
	n.gone[m.addr] = m.after
}

func (n *Network) ip(a netip.Addr) *ip {
	x := n.ips[a]
	if x == nil {
		x = &ip{addr: a}
		n.ips[a] = x
	}
	return x
}

// strongest returns the best claim of others, or nil.
func (m *mac) strongest() (best *route) {
	for _, r := range m.routes {
		if r.why == nil && (best == nil || r.beats(best.mobility, r.vtep, best.vtep)) {
			best = r
		}
	}
	return best
}

// next returns a sequence number above all claims of others, unusable ones included, because gobgp compares with them,
// too.
func (m *mac) next() uint32 {
	seq := m.after
	for _, r := range m.routes {
		seq = max(seq, above(r.seq))
	}
	return seq
}

// above returns the next sequence number, or the maximum.
func above(seq uint32) uint32 {
	if seq == math.MaxUint32 {
		return seq
	}
	return seq + 1
}

// electMAC decides the location of a MAC.
func (n *Network) electMAC(m *mac) {
	best := m.strongest()
	switch h := &m.here; {
	case h.frozen && best != nil:
		return
	case h.frozen: // the other claim is withdrawn
		n.thaw(m)
	case !h.here || best == nil:
	case h.beats(best.mobility, n.s.cfg.VTEP, best.vtep):
		best = nil
	case h.fixed:
		n.contest(m, best)
		best = nil
	default:
		n.leave(m)
	}
	if !n.taken.macs.take(m, m.best != nil, best != nil) {
		best = nil
	}
	was := m.best
	m.best = best
	key := overlay.Key{Kind: overlay.MAC, MAC: m.addr}
	switch {
	case best != nil && (was == nil || was.vtep != best.vtep || was.sticky != best.sticky):
		_ = n.table.Set(n, overlay.Route{Key: key, Behind: best.vtep, Yields: !best.sticky}) // the table keeps the reason
	case best == nil && was != nil:
		n.table.Withdraw(n, key)
	}
	if best == nil != (was == nil) || best != nil && best.vtep != was.vtep {
		for _, r := range m.routes {
			if r.nlri.ip.IsValid() {
				n.electIP(n.ip(r.nlri.ip))
			}
		}
	}
	if was != nil && best == nil {
		n.admit(&n.taken.macs)
	}
	if len(m.routes) == 0 && !m.here.here {
		delete(n.macs, m.addr)
		n.remember(m)
	}
}

// electIP decides which MAC has an IP address.
func (n *Network) electIP(x *ip) {
	var best *route
	for _, r := range x.routes {
		if n.follows(r) && (best == nil || r.arrived > best.arrived) {
			best = r
		}
	}
	if best != nil && !x.at.IsZero() && x.since > best.arrived {
		best = nil
	}
	if !n.taken.ips.take(x, x.best != nil, best != nil) {
		best = nil
	}
	was := x.best
	x.best = best
	key := overlay.Key{Kind: overlay.IP, IP: x.addr}
	switch {
	case best != nil && (was == nil || was.mac != best.mac):
		_ = n.table.Set(n, overlay.Route{Key: key, At: best.mac, Yields: true})
	case best == nil && was != nil:
		n.table.Withdraw(n, key)
	}
	if was != nil && best == nil {
		n.admit(&n.taken.ips)
	}
	if len(x.routes) == 0 && x.at.IsZero() {
		delete(n.ips, x.addr)
	}
}

// follows reports whether a route for an IP address comes from its MAC's location.
func (n *Network) follows(r *route) bool {
	m := n.macs[r.mac]
	return r.why == nil && m != nil && m.best != nil && m.best.vtep == r.vtep
}

// admit gives freed room to addresses that wait for it.
func (n *Network) admit(f *full) {
	for x := range f.waiting {
		delete(f.waiting, x)
		switch x := x.(type) {
		case *mac:
			n.electMAC(x)
		case *ip:
			n.electIP(x)
		}
		return
	}
}

// state returns why a route is not installed, nil if it is.
func (r *route) state() error {
	n := r.net
	if r.why != nil {
		return r.why
	}
	key := overlay.Key{Kind: overlay.Peer, VTEP: r.vtep}
	if r.kind == bgp.EVPN_ROUTE_TYPE_MAC_IP_ADVERTISEMENT {
		m := n.macs[r.mac]
		_, full := n.taken.macs.waiting[m]
		switch {
		case full:
			return errFull
		case m.here.here && m.best == nil:
			return errLocal
		case m.best == nil || m.best.vtep != r.vtep:
			return errStale
		}
		key = overlay.Key{Kind: overlay.MAC, MAC: r.mac}
		if r.nlri.ip.IsValid() {
			x := n.ips[r.nlri.ip]
			_, full := n.taken.ips.waiting[x]
			switch {
			case full:
				return errFull
			case x.best == nil && !x.at.IsZero():
				return errLocal
			case x.best == nil:
				return errMobility
			case x.best.mac != r.mac:
				return errStale
			}
			key = overlay.Key{Kind: overlay.IP, IP: r.nlri.ip}
		}
	}
	_, why := n.table.State(n, key)
	return why
}
