package evpn

import (
	"net/netip"

	"github.com/osrg/gobgp/v4/pkg/apiutil"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// path is the best route for an NLRI, or its withdrawal, without anything of BGP's encoding: what a Speaker judges.
type path struct {
	nlri
	used      bool // its type is
	withdrawn bool
	from      netip.Addr // neighbour; invalid: it is this host's own route
	// Attributes.
	nextHop  netip.Addr
	mobility        // type 2
	vni      uint32 // RFC 8365 section 5.1.3: all 24 bits of the label
	labelled bool   // it has a label
	foreign  bool   // it names encapsulations, and VXLAN is none of them
	targets  []RouteTarget
	oddMAC   bool // type 2: the length of the MAC is not 48 bits
	hasIP    bool // type 2: the length of the IP address is not 0
	// Type 3: the tunnel is ingress replication, to that address.
	replicates bool
	tunnel     netip.Addr
}

// maxTargets is more than the number of route targets that a message of 4096 bytes has (RFC 4271 section 4.1).
const maxTargets = 512

// own is the key of one of this host's routes: the claim of a network.
type own struct {
	rd  [8]byte
	vni uint32
	claim
}

// advert is one of this host's routes.
type advert struct {
	own
	mobility
	targets []RouteTarget
}

// readPath reads a path of gobgp's.
func readPath(p *apiutil.Path) (out path) {
	out.withdrawn = p.Withdrawal
	if p.PeerAddress.IsValid() {
		out.from = p.PeerAddress.Unmap()
	}
	e, ok := p.Nlri.(*bgp.EVPNNLRI)
	if !ok {
		return out
	}
	out.used = out.identify(e)
	if !out.used || p.Withdrawal || !out.from.IsValid() {
		return out
	}
	encaps, vxlan := 0, false
	for _, x := range p.Attrs {
		switch x := x.(type) {
		case *bgp.PathAttributeMpReachNLRI:
			out.nextHop = unmap(x.Nexthop)
		case *bgp.PathAttributePmsiTunnel:
			if out.kind == bgp.EVPN_INCLUSIVE_MULTICAST_ETHERNET_TAG {
				out.vni, out.labelled = x.Label, true
				if id, ok := x.TunnelID.(*bgp.IngressReplTunnelID); ok &&
					x.TunnelType == bgp.PMSI_TUNNEL_TYPE_INGRESS_REPL {
					out.replicates, out.tunnel = true, unmap(id.Value)
				}
			}
		case *bgp.PathAttributeExtendedCommunities:
			for _, ec := range x.Value {
				if c, ok := ec.(*bgp.EncapExtended); ok {
					encaps++
					vxlan = vxlan || c.TunnelType == bgp.TUNNEL_TYPE_VXLAN
				}
				out.readCommunity(ec)
			}
		}
	}
	out.foreign = encaps > 0 && !vxlan
	if d, ok := e.RouteTypeData.(*bgp.EVPNMacIPAdvertisementRoute); ok {
		if len(d.Labels) > 0 {
			out.vni, out.labelled = d.Labels[0], true
		}
		out.oddMAC, out.hasIP = d.MacAddressLength != 48, d.IPAddressLength != 0
	}
	return out
}

// identify reads an NLRI; false: its type is not used.
func (k *nlri) identify(e *bgp.EVPNNLRI) bool {
	k.kind = e.RouteType
	switch d := e.RouteTypeData.(type) {
	case *bgp.EVPNMacIPAdvertisementRoute:
		if len(d.MacAddress) != len(k.mac) {
			return false
		}
		k.etag, k.mac = d.ETag, vswitch.MAC(d.MacAddress)
		if d.IPAddressLength != 0 {
			k.ip = unmap(d.IPAddress)
		}
		return k.setRD(d.RD)
	case *bgp.EVPNMulticastEthernetTagRoute:
		k.etag, k.ip = d.ETag, unmap(d.IPAddress)
		return k.setRD(d.RD)
	}
	return false
}

func (k *nlri) setRD(rd bgp.RouteDistinguisherInterface) bool {
	if rd == nil {
		return false
	}
	b, err := rd.Serialize()
	return err == nil && copy(k.rd[:], b) == len(k.rd)
}

func (p *path) readCommunity(ec bgp.ExtendedCommunityInterface) {
	switch ec := ec.(type) {
	case *bgp.EncapExtended:
	case *bgp.MacMobilityExtended:
		p.seq, p.sticky = ec.Sequence, ec.IsSticky
	default:
		if t, sub := ec.GetTypes(); sub == bgp.EC_SUBTYPE_ROUTE_TARGET && len(p.targets) < maxTargets &&
			(t == twoOctetAS || t == ipv4Address || t == fourOctetAS) {
			if b, err := ec.Serialize(); err == nil && len(b) == len(RouteTarget{}) {
				p.targets = append(p.targets, RouteTarget(b))
			}
		}
	}
}
