package fastpath

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// policies are the IPsec policies (xfrm) of a network namespace. Only one goroutine may use them at a time.
type policies struct {
	nl     *netlink.Handle // nil: the kernel has no IPsec
	events *nl.NetlinkSocket
	ended  chan struct{}
	family int
	all    []netlink.XfrmPolicy
	err    error // why they could not be read
}

// watchPolicies reads the policies of the calling thread's network namespace, and calls changed, on a separate
// goroutine, after each notification of a change.
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
			// ENOBUFS: notifications were lost, so something changed.
			_, _, err := p.events.Receive()
			if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR) {
				return // closed; sweepLocked reads the policies once a second anyway
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

// changed reads the policies again and reports whether they differ.
func (p *policies) changed() bool {
	if p.nl == nil {
		return false
	}
	was, wasErr := p.all, p.err
	p.all, p.err = p.nl.XfrmPolicyList(p.family)
	return (p.err == nil) != (wasErr == nil) || !reflect.DeepEqual(was, p.all)
}

// cover reports whether a policy may not just pass datagrams between two addresses: true if policies cannot be read.
func (p *policies) cover(local, far netip.Addr) bool {
	if p.err != nil {
		return true
	}
	has := func(n *net.IPNet, a netip.Addr) bool { return n == nil || n.Contains(a.AsSlice()) }
	for _, x := range p.all {
		switch {
		case x.Action == netlink.XFRM_POLICY_ALLOW && len(x.Tmpls) == 0:
		case x.Dir == netlink.XFRM_DIR_OUT && has(x.Src, local) && has(x.Dst, far),
			x.Dir == netlink.XFRM_DIR_IN && has(x.Src, far) && has(x.Dst, local):
			return true
		}
	}
	return false
}
