package config

import (
	"net/netip"
	"reflect"
	"slices"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/vnicd/vnicd/device/ethernet/overlay/evpn"
)

// EVPN is this host as a BGP speaker (RFC 7432, RFC 8365).
type EVPN struct {
	At       Place
	AS       uint32
	RouterID netip.Addr // default: the VTEP's address, if it is IPv4
	// Listen is where sessions are accepted, by default the VTEP's address. Port is the TCP port; 0: none are accepted.
	Listen []netip.Addr
	Port   uint16
	// HoldTime ends a silent session. RestartTime is how long routes survive a broken session; 0: not at all.
	HoldTime, RestartTime time.Duration
	Neighbours            []Neighbour
}

// Neighbour is one BGP session.
type Neighbour struct {
	At Place
	evpn.Neighbour
}

// Equal reports whether two sections, or their absence, mean the same wherever they stand.
func (e *EVPN) Equal(other *EVPN) bool {
	if e == nil || other == nil {
		return e == other
	}
	return reflect.DeepEqual(e.elsewhere(), other.elsewhere())
}

// elsewhere returns a copy without places.
func (e *EVPN) elsewhere() EVPN {
	x := *e
	x.At, x.Neighbours = Place{}, slices.Clone(e.Neighbours)
	for i := range x.Neighbours {
		x.Neighbours[i].At = Place{}
	}
	return x
}

func (p *parser) evpnKeys(e *EVPN) object {
	return object{what: "evpn", keys: map[string]field{
		"as": number(p, "as", 1, 1<<32-2, &e.AS),
		"router-id": {func(n *yaml.Node) {
			if a, ok := p.addr("router-id", n); ok && !a.Is4() {
				p.fail(n, "router-id must be written as an IPv4 address, found %q", a)
			} else {
				e.RouterID = a
			}
		}, &Schema{Type: types{"string"}, Format: "ipv4"}},
		"listen":       p.addresses("evpn listen", &e.Listen),
		"port":         number(p, "evpn port", 0, 65535, &e.Port),
		"hold-time":    p.duration("hold-time", 3*time.Second, 65535*time.Second, "90s", &e.HoldTime),
		"restart-time": p.duration("restart-time", 0, 4095*time.Second, "120s", &e.RestartTime), // RFC 4724: 12 bits
		"neighbours": p.list("neighbours", p.neighbourKeys(&Neighbour{}).schema(),
			func(x *yaml.Node) { e.Neighbours = append(e.Neighbours, p.neighbour(x)) }),
	}}
}

func (p *parser) evpn(n *yaml.Node) *EVPN {
	e := &EVPN{At: p.place(n), Port: evpn.DefaultPort, HoldTime: evpn.DefaultHoldTime,
		RestartTime: evpn.DefaultRestartTime}
	p.need(n, p.mapping(n, p.evpnKeys(e)), "evpn", "as", "neighbours")
	for i := range e.Neighbours {
		if x := &e.Neighbours[i]; x.AS == 0 {
			x.AS = e.AS
		}
	}
	return e
}

func (p *parser) neighbourKeys(x *Neighbour) object {
	return object{"a neighbour", map[string]field{
		"address":       p.address("neighbour address", &x.Address),
		"as":            number(p, "neighbour as", 1, 1<<32-2, &x.AS),
		"password":      p.str("password", &Schema{Type: types{"string"}, MaxLength: evpn.MaxPassword}, &x.Password),
		"ttl-security":  number(p, "ttl-security", 1, 254, &x.Hops),
		"passive":       p.boolean("passive", &x.Passive),
		"port":          number(p, "neighbour port", 1, 65535, &x.Port),
		"local-address": p.address("local-address", &x.Local),
		"max-routes":    number(p, "max-routes", 1, evpn.MaxMaxRoutes, &x.MaxRoutes),
		"next-hops": {func(n *yaml.Node) {
			x.NextHops = []netip.Prefix{}
			p.sequence(n, "next-hops", func(e *yaml.Node) {
				if a, ok := p.prefix("a next hop", e); ok {
					x.NextHops = append(x.NextHops, a)
				}
			})
		}, listOf(text("[.:]"))},
	}, []string{"address"}}
}

func (p *parser) neighbour(n *yaml.Node) Neighbour {
	x := Neighbour{At: p.place(n)}
	p.read(n, p.neighbourKeys(&x))
	return x
}

// prefix accepts ADDRESS or ADDRESS/LENGTH.
func (p *parser) prefix(what string, n *yaml.Node) (netip.Prefix, bool) {
	s, ok := p.scalar(n, what)
	if !ok {
		return netip.Prefix{}, false
	}
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), true
	}
	x, err := netip.ParsePrefix(s)
	if err != nil {
		p.fail(n, "%s must be an IP address or IP/LENGTH such as 192.0.2.0/24, found %q", what, s)
	}
	return x, err == nil
}

func (p *parser) targets(dst *[]evpn.RouteTarget) field {
	return p.list("route-targets", text("^[0-9.]+:[0-9]+$"), func(e *yaml.Node) {
		s, ok := p.scalar(e, "a route target")
		if !ok {
			return
		}
		rt, err := evpn.ParseRouteTarget(s)
		if err != nil {
			p.fail(e, "%v", err)
			return
		}
		*dst = append(*dst, rt)
	})
}

// checkEVPN completes the section from the VTEP's, and finds mistakes that no single key shows.
func (c *Config) checkEVPN(errs *Errors) {
	e := c.EVPN
	if e == nil {
		for _, n := range c.Networks {
			if n.RouteTargets != nil {
				errs.add(n.At.sub("route-targets"), "network %q has route-targets, but there is no `evpn` section", n.Name)
			}
		}
		return
	}
	if c.VTEP == nil {
		errs.add(e.At, "evpn needs a `vtep` section with this host's underlay address")
		return
	}
	switch {
	case e.RouterID.IsValid():
	case c.VTEP.Local.Is4():
		e.RouterID = c.VTEP.Local
	default:
		errs.add(e.At, "evpn needs `router-id`, because vtep local is not an IPv4 address")
	}
	if e.Listen == nil && c.VTEP.Local.IsValid() {
		e.Listen = []netip.Addr{c.VTEP.Local}
	}
	if len(e.Neighbours) == 0 || len(e.Neighbours) > evpn.MaxNeighbours {
		errs.add(e.At, "evpn has %d neighbours; it needs 1 to %d", len(e.Neighbours), evpn.MaxNeighbours)
	}
	seen := map[netip.Addr]Place{}
	for _, n := range e.Neighbours {
		switch first, dup := seen[n.Address]; {
		case !n.Address.IsValid():
		case dup:
			errs.add(n.At.sub("address"), "neighbour %s is already listed in %s", n.Address, first.seenFrom(n.At))
		case n.Address == c.VTEP.Local:
			errs.add(n.At.sub("address"), "neighbour %s is this host itself (vtep local)", n.Address)
		case n.Local.IsValid() && n.Local.Is4() != n.Address.Is4():
			errs.add(n.At.sub("local-address"), "local-address %s is of another address family than neighbour %s", n.Local, n.Address)
		}
		seen[n.Address] = n.At
		if len(n.Password) > evpn.MaxPassword {
			errs.add(n.At.sub("password"), "password is %d bytes long; it may have %d (RFC 2385)", len(n.Password),
				evpn.MaxPassword)
		}
		if n.Passive && e.Port == 0 {
			errs.add(n.At.sub("passive"), "neighbour %s is passive, but evpn `port` 0 accepts no sessions", n.Address)
		}
	}
}
