package evpn

import (
	"errors"
	"net/netip"

	"github.com/osrg/gobgp/v4/pkg/apiutil"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// nlri is the key of a route (RFC 7432 sections 7.2 and 7.3).
type nlri struct {
	kind uint8 // bgp.EVPN_ROUTE_TYPE_*
	rd   [8]byte
	etag uint32
	mac  vswitch.MAC // type 2
	ip   netip.Addr  // type 2: may be invalid (no IP address); type 3: the originating router
}

// route is another speaker's route for a network of this host.
type route struct {
	nlri
	net      *Network
	vtep     netip.Addr // next hop
	from     netip.Addr // neighbour
	mobility            // type 2
	arrived  uint64     // order of arrival
	why      error      // the route is unusable
}

// mobility is the MAC mobility extended community (RFC 7432 section 7.7); zero if absent.
type mobility struct {
	seq    uint32
	sticky bool
}

// Reasons why a route is unusable. They are few and without details, because counters and metrics are by reason.
var (
	errType    = errors.New("route type is not used here")
	errTarget  = errors.New("no network imports its route targets")
	errVNI     = errors.New("VNI is not that of the network that imports it")
	errTag     = errors.New("its Ethernet tag is not 0")
	errMAC     = errors.New("MAC is not the address of a host")
	errIP      = errors.New("IP is not the address of a host")
	errNextHop = errors.New("next hop is not the address of a VTEP")
	errFamily  = errors.New("next hop is of another address family than this VTEP")
	errOwn     = errors.New("next hop is this host")
	errForeign = errors.New("next hop is not one that the neighbour may name")
	errEncap   = errors.New("encapsulation is not VXLAN")
	errClaims  = errors.New("its MAC or IP has its maximum of routes")
	errTunnel  = errors.New("tunnel of the multicast route is not ingress replication to its next hop")
)

// Reasons why a usable route is not installed.
var (
	errLocal    = errors.New("address is at a port of this host")
	errStale    = errors.New("another VTEP has it more recently")
	errMobility = errors.New("its MAC is elsewhere")
	errFull     = errors.New("network has its maximum of addresses from others")
)

// identify reads the key of a path's NLRI; false: its type is not used.
func identify(p *apiutil.Path) (k nlri, ok bool) {
	e, ok := p.Nlri.(*bgp.EVPNNLRI)
	if !ok {
		return k, false
	}
	k.kind = e.RouteType
	switch d := e.RouteTypeData.(type) {
	case *bgp.EVPNMacIPAdvertisementRoute:
		if len(d.MacAddress) != len(k.mac) {
			return k, false
		}
		k.etag, k.mac, k.ip = d.ETag, vswitch.MAC(d.MacAddress), unmap(d.IPAddress)
		return k, k.setRD(d.RD)
	case *bgp.EVPNMulticastEthernetTagRoute:
		k.etag, k.ip = d.ETag, unmap(d.IPAddress)
		return k, k.setRD(d.RD)
	}
	return k, false
}

func (k *nlri) setRD(rd bgp.RouteDistinguisherInterface) bool {
	if rd == nil {
		return false
	}
	b, err := rd.Serialize()
	return err == nil && copy(k.rd[:], b) == len(k.rd)
}

// attributes are the used attributes of a path.
type attributes struct {
	targets []RouteTarget
	encaps  int  // number of encapsulations that it names
	vxlan   bool // VXLAN is one of them
	nextHop netip.Addr
	mobility
	pmsi *bgp.PathAttributePmsiTunnel
}

func readAttributes(p *apiutil.Path) (a attributes) {
	for _, x := range p.Attrs {
		switch x := x.(type) {
		case *bgp.PathAttributeMpReachNLRI:
			a.nextHop = unmap(x.Nexthop)
		case *bgp.PathAttributePmsiTunnel:
			a.pmsi = x
		case *bgp.PathAttributeExtendedCommunities:
			for _, ec := range x.Value {
				a.readCommunity(ec)
			}
		}
	}
	return a
}

func (a *attributes) readCommunity(ec bgp.ExtendedCommunityInterface) {
	switch ec := ec.(type) {
	case *bgp.EncapExtended:
		a.encaps++
		a.vxlan = a.vxlan || ec.TunnelType == bgp.TUNNEL_TYPE_VXLAN
	case *bgp.MacMobilityExtended:
		a.seq, a.sticky = ec.Sequence, ec.IsSticky
	default:
		if t, sub := ec.GetTypes(); sub == bgp.EC_SUBTYPE_ROUTE_TARGET &&
			(t == twoOctetAS || t == ipv4Address || t == fourOctetAS) {
			if b, err := ec.Serialize(); err == nil && len(b) == len(RouteTarget{}) {
				a.targets = append(a.targets, RouteTarget(b))
			}
		}
	}
}

// decode reads and checks another speaker's path. The route is nil if it is for no network of this host; otherwise the
// error says why it is unusable.
func (s *Speaker) decode(p *apiutil.Path) (*route, error) {
	k, ok := identify(p)
	if !ok {
		return nil, errType
	}
	a := readAttributes(p)
	vni, named := label(p, &a)
	n, match := s.importerLocked(a.targets, vni)
	if n == nil {
		return nil, errTarget
	}
	r := &route{nlri: k, net: n, vtep: a.nextHop, from: p.PeerAddress.Unmap(), mobility: a.mobility}
	r.why = s.judge(r, &a, p.Nlri.(*bgp.EVPNNLRI))
	if r.why == nil && (!match || !named) {
		r.why = errVNI
	}
	return r, r.why
}

// label returns the VNI of a route (RFC 8365 section 5.1.3: all 24 bits).
func label(p *apiutil.Path, a *attributes) (vni uint32, ok bool) {
	switch d := p.Nlri.(*bgp.EVPNNLRI).RouteTypeData.(type) {
	case *bgp.EVPNMacIPAdvertisementRoute:
		if len(d.Labels) > 0 {
			return d.Labels[0], true
		}
	case *bgp.EVPNMulticastEthernetTagRoute:
		if a.pmsi != nil {
			return a.pmsi.Label, true
		}
	}
	return 0, false
}

// importerLocked finds the network that imports a route with those targets: preferably the one with that VNI.
func (s *Speaker) importerLocked(targets []RouteTarget, vni uint32) (found *Network, match bool) {
	for _, rt := range targets {
		for _, n := range s.targets[rt] {
			if n.vni == vni {
				return n, true
			}
			found = n
		}
		if v, ok := rt.derivedVNI(); ok {
			if n := s.networks[v]; n != nil && n.cfg.Import == nil {
				if v == vni {
					return n, true
				}
				found = n
			}
		}
	}
	return found, false
}

// judge returns why a route is unusable, regardless of other routes.
func (s *Speaker) judge(r *route, a *attributes, e *bgp.EVPNNLRI) error {
	switch {
	case r.etag != 0:
		return errTag
	case a.encaps > 0 && !a.vxlan:
		return errEncap
	case !hostAddr(r.vtep):
		return errNextHop
	case r.vtep == s.cfg.VTEP:
		return errOwn
	case r.vtep.Is4() != s.cfg.VTEP.Is4():
		return errFamily
	case !s.mayName(r.from, r.vtep):
		return errForeign
	}
	switch d := e.RouteTypeData.(type) {
	case *bgp.EVPNMacIPAdvertisementRoute:
		if d.MacAddressLength != 48 || r.mac.IsZero() || r.mac.IsGroup() {
			return errMAC
		}
		if d.IPAddressLength != 0 && !hostAddr(r.ip) {
			return errIP
		}
	case *bgp.EVPNMulticastEthernetTagRoute:
		if a.pmsi == nil || a.pmsi.TunnelType != bgp.PMSI_TUNNEL_TYPE_INGRESS_REPL {
			return errTunnel
		}
		if id, ok := a.pmsi.TunnelID.(*bgp.IngressReplTunnelID); !ok || unmap(id.Value) != r.vtep {
			return errTunnel
		}
	}
	return nil
}

// mayName reports whether a neighbour may use a next hop.
func (s *Speaker) mayName(from, vtep netip.Addr) bool {
	for i := range s.cfg.Neighbours {
		if x := &s.cfg.Neighbours[i]; x.Address == from {
			if x.NextHops == nil {
				return true
			}
			for _, p := range x.NextHops {
				if p.Contains(vtep) {
					return true
				}
			}
			return false
		}
	}
	return false
}

// hostAddr reports whether an address can be that of a host.
func hostAddr(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() &&
		a != netip.AddrFrom4([4]byte{255, 255, 255, 255}) && a.Zone() == ""
}

func unmap(a netip.Addr) netip.Addr {
	if a.IsValid() {
		return a.Unmap()
	}
	return a
}

// String describes a route for the log.
func (k nlri) String() string {
	text := k.typeName() + " rd " + rdName(k.rd)
	if k.kind == bgp.EVPN_ROUTE_TYPE_MAC_IP_ADVERTISEMENT {
		text += " " + k.mac.String()
	}
	if k.ip.IsValid() {
		text += " " + k.ip.String()
	}
	return text
}

func (k nlri) typeName() string {
	if k.kind == bgp.EVPN_INCLUSIVE_MULTICAST_ETHERNET_TAG {
		return "multicast"
	}
	return "mac"
}

func rdName(rd [8]byte) string { return bgp.GetRouteDistinguisher(rd[:]).String() }
