package vxlan

import (
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// The tenants' MTU. A network's MTU is what its narrowest path carries: for each of its peers, the MTU that is
// configured for the route (`ip route ... mtu`), otherwise that of the route's interface. Without a reachable peer it
// is that of the local address's interface. Changes of interfaces and routes and the kernel's refusals (EMSGSIZE) are
// followed.
//
// Path MTU discovery is not: one forged ICMP error would lower the MTU of every network with that peer for ten minutes
// (TR-3; RFC 8201, section 6). The sockets ignore what it finds (socket.go), and so does this file.

const (
	// settle is how long changes are collected before the MTUs are computed again.
	settle = 100 * time.Millisecond
	// recheck is how often they are computed without a known change: a notification may have been lost.
	recheck = time.Minute
)

// inner is what encapsulation leaves of an underlay MTU, within our buffers: one buffer holds a received datagram's
// VXLAN header, inner Ethernet header and up to two VLAN tags.
func (vt *VTEP) inner(mtu int) int {
	if vt.v6 {
		mtu -= overhead6
	} else {
		mtu -= overhead4
	}
	return min(mtu, vt.cfg.Pool.Capacity()-HeaderLen-vswitch.HeaderLen-8)
}

// pathTo asks the kernel for the route to a peer, and returns the largest inner layer-3 packet (of an untagged frame)
// that it carries; 0 if there is no route.
func (vt *VTEP) pathTo(x *peer, devs map[int]int) int {
	opts := netlink.RouteGetOptions{OifIndex: int(x.scope)}
	if vt.cfg.Protection != nil {
		opts.OifIndex = vt.index
	}
	routes, err := vt.nl.RouteGetWithOptions(x.addr.AsSlice(), &opts)
	if err != nil || len(routes) == 0 {
		return 0
	}
	r := routes[0]
	mtu, known := devs[r.LinkIndex]
	if !known {
		if link, err := vt.nl.LinkByIndex(r.LinkIndex); err == nil {
			mtu = link.Attrs().MTU
		}
		devs[r.LinkIndex] = mtu
	}
	if m := RouteMTU(vt.nl, x.addr, opts); m > 0 && (mtu == 0 || m < mtu) {
		mtu = m
	}
	if mtu == 0 {
		return 0
	}
	return max(vt.inner(mtu), vswitch.MinMTU)
}

// RouteMTU returns the MTU that the operator has configured for the route to an address (`ip route ... mtu`), 0 if
// none; what path MTU discovery has found is not in it.
func RouteMTU(nl *netlink.Handle, to netip.Addr, opts netlink.RouteGetOptions) int {
	opts.FIBMatch = true // the route itself, not the kernel's cache with its exceptions
	routes, err := nl.RouteGetWithOptions(to.AsSlice(), &opts)
	if err != nil || len(routes) == 0 {
		return 0
	}
	return routes[0].MTU
}

// narrowest returns the MTU that the paths to a set of peers allow, and adds them to paths.
func (vt *VTEP) narrowest(s *peerSet, paths map[netip.Addr]int, devs map[int]int) int {
	mtu := 0
	for _, x := range s.list {
		m, known := paths[x.addr]
		if !known {
			m = vt.pathTo(x, devs)
			paths[x.addr] = m
		}
		if m > 0 && (mtu == 0 || m < mtu) {
			mtu = m
		}
	}
	if mtu == 0 {
		return vt.mtu
	}
	return mtu
}

// refreshLocked computes all MTUs and passes them on to the networks.
func (vt *VTEP) refreshLocked() error {
	if vt.cfg.Protection != nil {
		vt.cfg.Protection.Refresh()
	}
	u, err := findUnderlay(vt.nl, vt.cfg.Local, vt.device())
	if err != nil {
		return err
	}
	mtu := vt.inner(u.mtu)
	if mtu < vswitch.MinMTU {
		return mtuError(u.name, u.mtu, mtu)
	}
	if vt.mtu != 0 && vt.mtu != mtu {
		vt.log.Info("underlay MTU changed", "interface", u.name, "mtu", u.mtu, "for tenants", mtu, "before", vt.mtu)
	}
	vt.mtu, vt.dev, vt.index = mtu, u.name, u.index
	vt.virtual.Store(u.virtual)
	paths, devs := make(map[netip.Addr]int), make(map[int]int)
	for vni, p := range *vt.nets.Load() {
		m := vt.narrowest(p.peers.Load(), paths, devs)
		if want := p.net.ConfiguredMTU(); want > m && m != p.mtu {
			vt.log.Warn("configured MTU exceeds the underlay's", "vni", vni, "mtu", want, "possible", m)
		} else if p.mtu != 0 && m != p.mtu {
			vt.log.Info("network MTU changed", "vni", vni, "mtu", m, "before", p.mtu)
		}
		p.mtu = m
		p.net.SetUnderlayMTU(m)
		p.together()
	}
	vt.paths.Store(&paths)
	return nil
}

// follow starts a goroutine that computes the MTUs again after each change, until stopWatch. If the kernel sends no
// notifications, the VTEP works with the MTUs found at start.
func (vt *VTEP) follow() {
	done, stopped := make(chan struct{}), make(chan struct{})
	lost := func(err error) {
		select {
		case <-done: // closed by us
		default:
			vt.log.Warn("changes of the underlay are no longer followed", "error", err)
		}
	}
	links, routes := make(chan netlink.LinkUpdate, 16), make(chan netlink.RouteUpdate, 16)
	if err := netlink.LinkSubscribeWithOptions(links, done,
		netlink.LinkSubscribeOptions{ErrorCallback: lost}); err != nil {
		vt.log.Warn("changes of the underlay's interfaces are not followed", "error", err)
		close(links)
	}
	if err := netlink.RouteSubscribeWithOptions(routes, done,
		netlink.RouteSubscribeOptions{ErrorCallback: lost}); err != nil {
		vt.log.Warn("changes of the underlay's routes are not followed", "error", err)
		close(routes)
	}
	vt.stopWatch = func() {
		close(done)
		<-stopped
	}
	go func() {
		defer close(stopped)
		vt.watch(done, links, routes)
		for range links { // closed after done, or on an error
		}
		for range routes {
		}
	}()
}

func (vt *VTEP) watch(done <-chan struct{}, links <-chan netlink.LinkUpdate, routes <-chan netlink.RouteUpdate) {
	next := time.NewTimer(recheck)
	defer next.Stop()
	pending := false
	for {
		changed, ok := true, true
		select {
		case <-done:
			return
		case _, ok = <-links:
			if !ok {
				links = nil
			}
		case _, ok = <-routes:
			if !ok {
				routes = nil
			}
		case <-vt.kick:
		case <-next.C:
			changed, pending = false, false
			next.Reset(recheck)
			vt.refresh()
		}
		if changed && vt.short != nil {
			vt.short.Recheck()
		}
		if changed && ok && !pending {
			pending = true
			next.Reset(settle)
		}
	}
}

func (vt *VTEP) refresh() {
	vt.mu.Lock()
	defer vt.mu.Unlock()
	if vt.closed {
		return
	}
	if err := vt.refreshLocked(); err != nil {
		vt.log.Warn("cannot follow a change of the underlay", "interface", vt.dev, "error", err)
	}
}

// recompute schedules a refresh. Any goroutine may call it, loops included.
func (vt *VTEP) recompute() {
	select {
	case vt.kick <- struct{}{}:
	default: // already scheduled
	}
}
