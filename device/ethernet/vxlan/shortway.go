package vxlan

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// What the short path asks the kernel: how an interface is, where a far end is, and whether the way there is to be IPsec's.

// route is the way to a far end.
type route struct {
	dev int // interface
	mtu int // for tenants
}

// routeTo asks for the way to a peer; false: there is none, none by a wire, or one that the kernel would not let a frame go as it is: the short path
// passes by IPsec and by what a route encapsulates in.
func (s *short) routeTo(x *peer) (route, bool) {
	vt := s.vt
	if s.ipsec.cover(vt.cfg.Local, x.addr) {
		return route{}, false
	}
	routes, err := vt.nl.RouteGetWithOptions(x.addr.AsSlice(), &netlink.RouteGetOptions{SrcAddr: vt.cfg.Local.AsSlice()})
	if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST || routes[0].Encap != nil {
		return route{}, false
	}
	link, err := vt.nl.LinkByIndex(routes[0].LinkIndex)
	if err != nil || link.Attrs().Flags&net.FlagUp == 0 || link.Attrs().EncapType != "ether" {
		return route{}, false
	}
	mtu := link.Attrs().MTU
	if m := routes[0].MTU; m > 0 {
		mtu = min(mtu, m)
	}
	return route{link.Attrs().Index, vt.inner(mtu)}, true
}

// inside runs f on a thread that is in the VTEP's network namespace: interfaces have their numbers there.
func (s *short) inside(f func() error) error {
	here, err := netns.Get()
	if err != nil {
		return err
	}
	defer here.Close()
	if here.Equal(s.ns) {
		return f()
	}
	runtime.LockOSThread()
	if err := netns.Set(s.ns); err != nil {
		runtime.UnlockOSThread()
		return err
	}
	err = f()
	if netns.Set(here) == nil {
		runtime.UnlockOSThread() // else it ends with the goroutine
	}
	return err
}

var (
	errNoTAP   = errors.New("the interface is not in this network namespace")
	errWatched = errors.New("somebody looks at the interface's frames")
)

// hostState asks for a host port's interface. Who has moved it to another namespace has another's under its number here, or none.
func (vt *VTEP) hostState(index int) (hostState, error) {
	link, err := vt.nl.LinkByIndex(index)
	if err != nil {
		return hostState{}, err
	}
	if link.Type() != "tuntap" {
		return hostState{}, errNoTAP
	}
	a := link.Attrs()
	own := 0
	if a.MasterIndex != 0 {
		own = 1 // a bridge's ports are promiscuous
	}
	return hostState{a.MTU, a.Promisc > own}, nil
}

// policies are the IPsec policies (xfrm) of a network namespace. Not for use by several goroutines at once.
type policies struct {
	nl     *netlink.Handle // nil: the kernel has none
	events *nl.NetlinkSocket
	ended  chan struct{}
	family int
	all    []netlink.XfrmPolicy
	err    error // they are not known
}

// watchPolicies reads them in the network namespace of the calling thread, and calls changed when there are others.
func watchPolicies(v6 bool, changed func()) (*policies, error) {
	p := &policies{family: netlink.FAMILY_V4, ended: make(chan struct{})}
	if v6 {
		p.family = netlink.FAMILY_V6
	}
	var err error
	if p.nl, err = netlink.NewHandle(unix.NETLINK_XFRM); errors.Is(err, unix.EPROTONOSUPPORT) {
		return p, nil
	} else if err != nil {
		return nil, fmt.Errorf("IPsec policies: %w", err)
	}
	if p.events, err = nl.Subscribe(unix.NETLINK_XFRM, nl.XFRMNLGRP_POLICY); err != nil {
		p.nl.Close()
		return nil, fmt.Errorf("IPsec policies: %w", err)
	}
	p.changed()
	go func() {
		defer close(p.ended)
		for {
			// Too many at once are an error, too, and a change.
			_, _, err := p.events.Receive()
			if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR) {
				return // closed; they are read once a second all the same
			}
			changed()
		}
	}()
	return p, nil
}

func (p *policies) close() {
	if p.nl != nil {
		p.events.Close()
		<-p.ended
		p.nl.Close()
	}
}

// changed reads them again and tells whether they are others.
func (p *policies) changed() bool {
	if p.nl == nil {
		return false
	}
	was, wasErr := p.all, p.err
	p.all, p.err = p.nl.XfrmPolicyList(p.family)
	return (p.err == nil) != (wasErr == nil) || !reflect.DeepEqual(was, p.all)
}

// cover tells whether there is one for datagrams between two addresses that does more than let them pass, or may be.
func (p *policies) cover(local, far netip.Addr) bool {
	if p.err != nil {
		return true
	}
	has := func(n *net.IPNet, a netip.Addr) bool { return n == nil || n.Contains(a.AsSlice()) }
	for _, x := range p.all {
		switch {
		case x.Action == netlink.XFRM_POLICY_ALLOW && len(x.Tmpls) == 0:
		case x.Dir == netlink.XFRM_DIR_OUT && has(x.Src, local) && has(x.Dst, far), x.Dir == netlink.XFRM_DIR_IN && has(x.Src, far) && has(x.Dst, local):
			return true
		}
	}
	return false
}
