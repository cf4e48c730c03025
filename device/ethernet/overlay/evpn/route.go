package evpn

import (
	"errors"
	"net/netip"

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
	epoch    uint64     // Speaker.epoch at its arrival
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
	errLimit   = errors.New("its neighbour has its maximum of routes")
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

// decode checks another speaker's route. The route is nil if it is for no network of this host; otherwise the error
// says why it is unusable.
func (s *Speaker) decode(p *path) (*route, error) {
	if !p.used {
		return nil, errType
	}
	n, match := s.importerLocked(p.targets, p.vni)
	if n == nil {
		return nil, errTarget
	}
	r := &route{nlri: p.nlri, net: n, vtep: p.nextHop, from: p.from, mobility: p.mobility}
	r.why = s.judge(r, p)
	if r.why == nil && (!match || !p.labelled) {
		r.why = errVNI
	}
	return r, r.why
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
func (s *Speaker) judge(r *route, p *path) error {
	switch {
	case r.etag != 0:
		return errTag
	case p.foreign:
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
	switch r.kind {
	case bgp.EVPN_ROUTE_TYPE_MAC_IP_ADVERTISEMENT:
		if p.oddMAC || r.mac.IsZero() || r.mac.IsGroup() {
			return errMAC
		}
		if p.hasIP && !hostAddr(r.ip) {
			return errIP
		}
	case bgp.EVPN_INCLUSIVE_MULTICAST_ETHERNET_TAG:
		if !p.replicates || p.tunnel != r.vtep {
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
