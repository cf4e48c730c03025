package fastpath

import (
	"errors"
	"net"
	"net/netip"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vxlan"
)

// route is the route to a peer.
type route struct {
	dev int // interface
	mtu int // of the tenant's network
}

// routeTo asks the kernel for the route to a peer. ok is false if there is none, if it leads over no Ethernet
// interface, or if the kernel would not send datagrams as they are: the short path bypasses IPsec and encapsulating
// routes.
func (c *controller) routeTo(peer netip.Addr) (to route, ok bool) {
	if c.ipsec.cover(c.cfg.Local, peer) {
		return route{}, false
	}
	opts := netlink.RouteGetOptions{SrcAddr: c.cfg.Local.AsSlice()}
	routes, err := c.nl.RouteGetWithOptions(peer.AsSlice(), &opts)
	if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST || routes[0].Encap != nil {
		return route{}, false
	}
	link, err := c.nl.LinkByIndex(routes[0].LinkIndex)
	if err != nil || link.Attrs().Flags&net.FlagUp == 0 || link.Attrs().EncapType != "ether" {
		return route{}, false
	}
	mtu := link.Attrs().MTU
	if m := vxlan.RouteMTU(c.nl, peer, opts); m > 0 {
		mtu = min(mtu, m)
	}
	return route{link.Attrs().Index, c.cfg.Tunnel.InnerMTU(mtu)}, true
}

// inside runs f on a thread in the VTEP's network namespace: the controller's interface indices are of that namespace.
func (c *controller) inside(f func() error) error {
	here, err := netns.Get()
	if err != nil {
		return err
	}
	defer here.Close()
	if here.Equal(c.ns) {
		return f()
	}
	runtime.LockOSThread()
	if err := netns.Set(c.ns); err != nil {
		runtime.UnlockOSThread()
		return err
	}
	err = f()
	if netns.Set(here) == nil {
		runtime.UnlockOSThread() // otherwise the thread ends with the goroutine
	}
	return err
}

var errNoTAP = errors.New("the interface is not in this network namespace")

// hostState is the state of a host port's interface.
type hostState struct {
	mtu       int
	monitored bool // promiscuous, as a capture makes it, which would miss frames on the short path
}

// hostState asks the kernel for a host port's interface. If the interface has moved to another namespace, its index
// here belongs to another interface or to none.
func (c *controller) hostState(index int) (hostState, error) {
	link, err := c.nl.LinkByIndex(index)
	if err != nil {
		return hostState{}, err
	}
	if link.Type() != "tuntap" {
		return hostState{}, errNoTAP
	}
	a := link.Attrs()
	own := 0
	if a.MasterIndex != 0 {
		own = 1 // a bridge makes its ports promiscuous
	}
	return hostState{a.MTU, a.Promisc > own}, nil
}
