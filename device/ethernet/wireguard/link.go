package wireguard

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"

	"github.com/vnicd/vnicd/device/ethernet/vxlan"
)

const (
	// firstTable plus the listening port is the number of our routing table, which nobody else is likely to use.
	firstTable = 478_900_000
	// rulePriority is before the main table's, 32766.
	rulePriority = 4789
	// usualMTU is that of an interface without a route to any peer, as wg-quick(8) chooses it.
	usualMTU = 1420
	// Overhead of a packet: IP, UDP 8, WireGuard's header 16 and tag 16.
	overhead4 = 20 + 8 + 32
	overhead6 = 40 + 8 + 32
	// mark begins the alias of our interfaces.
	mark = "vnicd"
)

// alias says whose an interface is (ip link show): "vnicd 10.9.0.1:4789 51820 /run/vnicd".
type alias struct {
	vtep  netip.AddrPort
	port  uint16 // WireGuard's
	owner string // Config.Owner
}

func (a alias) String() string { return fmt.Sprintf("%s %v %d %s", mark, a.vtep, a.port, a.owner) }

// parseAlias reads an alias; ok is false for one of another program. The VTEP alone is enough.
func parseAlias(text string) (a alias, ok bool) {
	f := strings.SplitN(text, " ", 4)
	if len(f) < 2 || f[0] != mark {
		return a, false
	}
	var err error
	if a.vtep, err = netip.ParseAddrPort(f[1]); err != nil {
		return a, false
	}
	if len(f) == 4 {
		port, err := strconv.ParseUint(f[2], 10, 16)
		if err != nil {
			return a, false
		}
		a.port, a.owner = uint16(port), f[3]
	}
	return a, true
}

// Sweep removes what killed vnicds of an owner (Config.Owner) have left: their interfaces, whatever the names and
// ports, and the rules that lead there. A vnicd without WireGuard needs it, too: the rules come before the host's
// routes. What belongs to a VTEP that is in use stays.
func Sweep(owner string) error {
	nl, err := netlink.NewHandle(syscall.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("wireguard: netlink: %w", err)
	}
	defer nl.Close()
	return sweep(nl, owner, "")
}

// sweep is Sweep but for the interface called except.
func sweep(nl *netlink.Handle, owner, except string) (err error) {
	links, err := nl.LinkList()
	if errors.Is(err, netlink.ErrDumpInterrupted) {
		err = nil // another interface has changed meanwhile
	}
	if err != nil {
		return fmt.Errorf("wireguard: list interfaces: %w", err)
	}
	for _, l := range links {
		a, ours := parseAlias(l.Attrs().Alias)
		if l.Type() == "wireguard" && ours && l.Attrs().Name != except && a.owner == owner && owner != "" && !inUse(a.vtep) {
			err = errors.Join(err, remove(nl, l, a))
		}
	}
	return err
}

// remove removes an interface that a killed vnicd has left, and its rule.
func remove(nl *netlink.Handle, l netlink.Link, a alias) error {
	if err := nl.LinkDel(l); err != nil {
		return fmt.Errorf("wireguard: remove the interface %[1]s that an earlier vnicd has left (ip link del %[1]s): %[2]w",
			l.Attrs().Name, err)
	}
	if a.port != 0 {
		_ = nl.RuleDel(rule(a.vtep.Addr(), a.port))
	}
	return nil
}

// removeLeft removes the interface of the configured name that a killed vnicd has left, and others that killed vnicds
// of the same owner have left.
func (d *Device) removeLeft() error {
	c := &d.cfg
	if err := sweep(d.nl, c.Owner, c.Interface); err != nil {
		return err
	}
	link, err := d.nl.LinkByName(c.Interface)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	} else if err != nil {
		return fmt.Errorf("wireguard: interface %s: %w", c.Interface, err)
	}
	a, ours := parseAlias(link.Attrs().Alias)
	if link.Type() != "wireguard" || !ours {
		return fmt.Errorf("%w: %s exists, of type %s, and without the alias of vnicd's interfaces: choose another name or remove "+
			"it (ip link del %s)", ErrForeign, c.Interface, link.Type(), c.Interface)
	}
	if inUse(a.vtep) {
		return fmt.Errorf("%w: %s is in use by the vnicd with the VTEP %v", ErrForeign, c.Interface, a.vtep)
	}
	return remove(d.nl, link, a)
}

// inUse reports whether a program has the UDP address, as a running VTEP does.
func inUse(a netip.AddrPort) bool {
	s, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(a))
	if err == nil {
		_ = s.Close()
	}
	return errors.Is(err, syscall.EADDRINUSE)
}

// add makes the interface.
func (d *Device) add() error {
	c := &d.cfg
	addrs, err := d.nl.AddrList(nil, family(c.Local))
	if err != nil {
		return fmt.Errorf("wireguard: list addresses: %w", err)
	}
	for _, a := range addrs {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && ip.Unmap() == c.Local {
			name := fmt.Sprintf("number %d", a.LinkIndex)
			if l, err := d.nl.LinkByIndex(a.LinkIndex); err == nil {
				name = l.Attrs().Name
			}
			return fmt.Errorf("wireguard: %v is an address of interface %s; a protected VTEP needs one of its own, which vnicd "+
				"gives to %s", c.Local, name, c.Interface)
		}
	}
	at := netlink.NewLinkAttrs()
	at.Name, at.MTU = c.Interface, usualMTU
	link := &netlink.Wireguard{LinkAttrs: at}
	switch err := d.nl.LinkAdd(link); {
	case errors.Is(err, syscall.EOPNOTSUPP):
		return fmt.Errorf("wireguard: the kernel has no WireGuard, or its module cannot be loaded (modprobe wireguard): %w", err)
	case err != nil:
		return fmt.Errorf("wireguard: make the interface %s: %w", c.Interface, err)
	}
	made, err := d.nl.LinkByName(c.Interface)
	if err != nil {
		return fmt.Errorf("wireguard: interface %s: %w", c.Interface, err)
	}
	d.index, d.mtu = made.Attrs().Index, usualMTU
	a := alias{netip.AddrPortFrom(c.Local, c.Port), c.ListenPort, c.Owner}
	if err := d.nl.LinkSetAlias(made, a.String()); err != nil {
		return fmt.Errorf("wireguard: alias of interface %s: %w", c.Interface, err)
	}
	return nil
}

// up gives the interface its address and makes the rule for its routes.
func (d *Device) up() error {
	c := &d.cfg
	link := &netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Index: d.index}}
	// Nobody else has addresses on this interface. Without the flag the kernel takes a moment to find that out, during
	// which it refuses routes with an IPv6 source address.
	addr := &netlink.Addr{IPNet: host(c.Local), Flags: syscall.IFA_F_NODAD}
	if err := d.nl.AddrAdd(link, addr); err != nil {
		return fmt.Errorf("wireguard: address %v of interface %s: %w", c.Local, c.Interface, err)
	}
	switch err := d.nl.LinkSetUp(link); {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("wireguard: UDP port %d is in use: %w", c.ListenPort, err)
	case err != nil:
		return fmt.Errorf("wireguard: interface %s: %w", c.Interface, err)
	}
	r := rule(c.Local, c.ListenPort)
	_ = d.nl.RuleDel(r) // of a killed vnicd
	if err := d.nl.RuleAdd(r); err != nil {
		return fmt.Errorf("wireguard: rule for routing table %d: %w", r.Table, err)
	}
	d.rules = append(d.rules, r)
	return nil
}

// rule leads what this host itself sends to the routes of the interface with that VTEP's address and port.
func rule(vtep netip.Addr, port uint16) *netlink.Rule {
	r := netlink.NewRule()
	r.Family, r.IifName, r.Table, r.Priority = family(vtep), "lo", table(port), rulePriority // lo: made by this host
	return r
}

func family(a netip.Addr) int {
	if a.Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}

func table(port uint16) int { return firstTable + int(port) }

func (d *Device) route(to netip.Addr) *netlink.Route {
	return &netlink.Route{LinkIndex: d.index, Dst: host(to), Src: d.cfg.Local.AsSlice(), Table: table(d.cfg.ListenPort),
		Scope: netlink.SCOPE_LINK}
}

func host(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// own reports whether the interface is still the one that we have made.
func (d *Device) own() error {
	link, err := d.nl.LinkByIndex(d.index)
	switch {
	case errors.As(err, new(netlink.LinkNotFoundError)):
		return fmt.Errorf("wireguard: somebody has removed the interface %s; restart vnicd to make it again", d.cfg.Interface)
	case err != nil:
		return fmt.Errorf("wireguard: interface %s: %w", d.cfg.Interface, err)
	case link.Type() != "wireguard" || link.Attrs().Name != d.cfg.Interface:
		return fmt.Errorf("wireguard: somebody has renamed the interface %s to %s; restart vnicd", d.cfg.Interface,
			link.Attrs().Name)
	}
	return nil
}

// Refresh implements vxlan.Protection: the MTU follows that of the routes to the peers' endpoints.
func (d *Device) Refresh() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refreshLocked()
}

// leastMTU6 is the least MTU of an interface with IPv6 (RFC 8200, section 5): with less, the kernel removes its
// addresses and routes for good. What a path then does not carry, encrypted, is fragmented.
const leastMTU6 = 1280

func (d *Device) refreshLocked() {
	if d.closed {
		return
	}
	mtu := bestMTU(d.nl, d.index, d.set.Peers)
	if d.cfg.Local.Is6() {
		mtu = max(mtu, leastMTU6)
	}
	if mtu == d.mtu {
		return
	}
	if err := d.nl.LinkSetMTU(&netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Index: d.index}}, mtu); err != nil {
		d.cfg.Log.Warn("cannot change the MTU of the WireGuard interface", "interface", d.cfg.Interface, "mtu", mtu,
			"error", err)
		return
	}
	d.mtu = mtu
}

// bestMTU returns what the narrowest path to a peer's endpoint leaves to an encrypted packet. Paths that lead back into
// the interface do not count.
func bestMTU(nl *netlink.Handle, index int, peers []Peer) int {
	best, links := 0, map[int]int{}
	for _, p := range peers {
		to := p.Endpoint.Addr()
		routes, err := nl.RouteGet(to.AsSlice())
		if err != nil || len(routes) == 0 || routes[0].LinkIndex == index {
			continue
		}
		at := routes[0].LinkIndex
		if _, known := links[at]; !known {
			if link, err := nl.LinkByIndex(at); err == nil {
				links[at] = link.Attrs().MTU
			}
		}
		mtu := links[at]
		if m := vxlan.RouteMTU(nl, to, netlink.RouteGetOptions{}); m > 0 && (mtu == 0 || m < mtu) {
			mtu = m
		}
		if to.Is4() {
			mtu -= overhead4
		} else {
			mtu -= overhead6
		}
		if mtu > 0 && (best == 0 || mtu < best) {
			best = mtu
		}
	}
	if best == 0 {
		return usualMTU
	}
	return best
}
