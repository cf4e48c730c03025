package evpn

import (
	"cmp"
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/osrg/gobgp/v4/api"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// Status has the speaker's sessions and networks.
type Status struct {
	AS       uint32          `json:"as"`
	RouterID netip.Addr      `json:"router_id"`
	VTEP     netip.Addr      `json:"vtep"`
	Sessions []SessionStatus `json:"sessions"`
	Networks []NetworkStatus `json:"networks"`
	// Refused counts routes that were unusable when they arrived, by reason.
	Refused map[string]uint64 `json:"refused,omitempty"`
}

// RefusedReasons returns the reasons that Status.Refused counts, each once.
func RefusedReasons() (out []string) {
	for _, why := range []error{errType, errTarget, errVNI, errTag, errMAC, errIP, errNextHop, errFamily, errOwn,
		errForeign, errEncap, errLimit, errClaims, errTunnel} {
		out = append(out, why.Error())
	}
	return out
}

// SessionStatus is one neighbour.
type SessionStatus struct {
	Neighbour  netip.Addr `json:"neighbour"`
	AS         uint32     `json:"as"`
	State      string     `json:"state"`
	Since      time.Time  `json:"since,omitzero"` // established
	Received   uint64     `json:"received"`       // routes from the neighbour
	Advertised uint64     `json:"advertised"`     // routes to the neighbour
	Updates    uint64     `json:"updates"`        // messages received
	Flaps      uint32     `json:"flaps"`
	MaxRoutes  int        `json:"max_routes"`
	Why        string     `json:"why,omitempty"` // why the session is down
}

// NetworkStatus is one MAC-VRF.
type NetworkStatus struct {
	Network    string        `json:"network"`
	VNI        uint32        `json:"vni"`
	RD         string        `json:"rd"`
	Import     []RouteTarget `json:"import"`
	Export     []RouteTarget `json:"export"`
	VTEPs      int           `json:"vteps"`
	MACs       int           `json:"macs"` // installed, from others
	IPs        int           `json:"ips"`
	MaxEntries int           `json:"max_entries"`
	Waiting    int           `json:"waiting"`    // without room
	Advertised int           `json:"advertised"` // MACs and MACs with IP
	Frozen     int           `json:"frozen"`     // current duplicates
	Duplicates uint64        `json:"duplicates"` // duplicates so far
}

// RouteStatus is one route, of this host or of another.
type RouteStatus struct {
	Network   string      `json:"network,omitempty"`
	Type      string      `json:"type"` // multicast, mac
	RD        string      `json:"rd"`
	MAC       vswitch.MAC `json:"mac,omitzero"`
	IP        netip.Addr  `json:"ip,omitzero"`
	VTEP      netip.Addr  `json:"vtep"`
	Sequence  uint32      `json:"sequence"`
	Sticky    bool        `json:"sticky,omitempty"`
	Neighbour netip.Addr  `json:"neighbour,omitzero"` // that sent it; none for this host's own
	Active    bool        `json:"active"`
	Why       string      `json:"why,omitempty"` // why it is not active
}

// Status returns a snapshot.
func (s *Speaker) Status() *Status {
	st := &Status{AS: s.cfg.AS, RouterID: s.cfg.RouterID, VTEP: s.cfg.VTEP, Sessions: s.bgp.sessions(),
		Networks: []NetworkStatus{}}
	var out uint64 // all sessions get the same routes
	s.mu.Lock()
	defer s.mu.Unlock()
	st.Refused = maps.Clone(s.ignored)
	for _, vni := range slices.Sorted(maps.Keys(s.networks)) {
		n := s.networks[vni]
		x := NetworkStatus{
			Network: n.table.Network().Name(), VNI: vni, RD: rdName(n.rd), Import: n.cfg.Import, Export: n.export,
			VTEPs: len(n.vteps), MACs: n.taken.macs.n, IPs: n.taken.ips.n, MaxEntries: n.cfg.MaxEntries,
			Waiting: len(n.taken.macs.waiting) + len(n.taken.ips.waiting), Advertised: len(n.said), Duplicates: n.duplicates,
		}
		if x.Import == nil {
			x.Import = n.export
		}
		for _, m := range n.macs {
			if m.here.frozen {
				x.Frozen++
			}
		}
		st.Networks = append(st.Networks, x)
		out += uint64(len(n.said)) + 1
	}
	for i := range st.Sessions {
		if x := &st.Sessions[i]; !x.Since.IsZero() {
			x.Advertised = out
		}
	}
	return st
}

// MaxListed bounds the result of Routes.
const MaxListed = 1 << 18

// Routes lists this host's and the received routes of one network or of all; routes for no network of this host are
// listed only with all.
func (s *Speaker) Routes(network string) (out []RouteStatus) {
	var foreign []*path
	if network == "" {
		_ = s.bgp.each(func(p *path) {
			if p.used && p.from.IsValid() {
				foreign = append(foreign, p)
			}
		})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.networks {
		name := n.table.Network().Name()
		if network != "" && name != network {
			continue
		}
		out = append(out, RouteStatus{Network: name, Type: "multicast", RD: rdName(n.rd), IP: s.cfg.VTEP, VTEP: s.cfg.VTEP,
			Active: true})
		for c, m := range n.said {
			out = append(out, RouteStatus{Network: name, Type: "mac", RD: rdName(n.rd), MAC: c.mac, IP: c.ip, VTEP: s.cfg.VTEP,
				Sequence: m.seq, Sticky: m.sticky, Active: true})
		}
	}
	for _, r := range s.routes {
		if len(out) >= MaxListed {
			break
		}
		if name := r.net.table.Network().Name(); network == "" || name == network {
			x := r.status(r.state())
			x.Network = name
			out = append(out, x)
		}
	}
	for _, p := range foreign {
		if s.routes[p.nlri] == nil && len(out) < MaxListed {
			r := route{nlri: p.nlri, vtep: p.nextHop, from: p.from, mobility: p.mobility}
			out = append(out, r.status(errTarget))
		}
	}
	slices.SortFunc(out, func(a, b RouteStatus) int {
		return cmp.Or(cmp.Compare(a.Network, b.Network), strings.Compare(b.Type, a.Type), slices.Compare(a.MAC[:], b.MAC[:]),
			a.IP.Compare(b.IP), a.VTEP.Compare(b.VTEP), cmp.Compare(a.RD, b.RD))
	})
	return out
}

func (r *route) status(why error) RouteStatus {
	x := RouteStatus{Type: r.typeName(), RD: rdName(r.rd), MAC: r.mac, IP: r.nlri.ip, VTEP: r.vtep, Sequence: r.seq,
		Sticky: r.sticky, Neighbour: r.from, Active: why == nil}
	if why != nil {
		x.Why = why.Error()
	}
	return x
}

// sessions returns the status of gobgp's sessions.
func (b *session) sessions() []SessionStatus {
	out := []SessionStatus{}
	limits := map[netip.Addr]int{}
	for _, n := range b.cfg.Neighbours {
		limits[n.Address] = n.limit()
	}
	_ = b.srv.ListPeer(context.Background(), &api.ListPeerRequest{}, func(p *api.Peer) {
		a, err := netip.ParseAddr(p.GetState().GetNeighborAddress())
		if err != nil {
			return
		}
		x := SessionStatus{
			Neighbour: a, AS: p.GetConf().GetPeerAsn(), MaxRoutes: limits[a], Flaps: p.GetState().GetFlops(),
			Updates: p.GetState().GetMessages().GetReceived().GetUpdate(),
			State:   strings.ToLower(strings.TrimPrefix(p.GetState().GetSessionState().String(), "SESSION_STATE_")),
		}
		if p.GetState().GetSessionState() == api.PeerState_SESSION_STATE_ESTABLISHED {
			x.Since = p.GetTimers().GetState().GetUptime().AsTime()
		} else {
			x.Why = p.GetState().GetDisconnectMessage()
		}
		x.Received = received(p)
		out = append(out, x)
	})
	for _, n := range b.cfg.Neighbours {
		if until, away := b.away.get(n.Address); away {
			out = append(out, SessionStatus{Neighbour: n.Address, AS: n.AS, State: "idle", MaxRoutes: limits[n.Address],
				Why: "neighbour exceeded its route limit; accepted again in " +
					until.Sub(b.cfg.Clock()).Round(time.Second).String()})
		}
	}
	slices.SortFunc(out, func(a, b SessionStatus) int { return a.Neighbour.Compare(b.Neighbour) })
	return out
}
