package vxlan

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Protection is an interface that encrypts and authenticates what passes through it (package wireguard).
//
// The VTEP's sockets are bound to the interface (SO_BINDTODEVICE), so the kernel neither sends a datagram by another
// one nor delivers a datagram that has come by another one. That holds if the interface is down or has gone: the
// sockets keep its number, sending fails, and nothing arrives. A second socket on the same address and port, bound to
// no interface, gets what is left, which is what anybody on the path may have sent. A filter drops these datagrams
// before they are queued, and the kernel counts them (Unprotected), so that a flood costs no engine anything.
type Protection interface {
	// Name returns the interface's name.
	Name() string
	// Peer reports whether the interface accepts datagrams from that address. Loops call it; it takes no lock.
	Peer(netip.Addr) bool
	// Refresh adapts the interface to the routes of the network below. The VTEP calls it, one call at a time, after
	// changes of interfaces and routes, and now and then.
	Refresh()
}

// device returns the name of the only interface that the sockets use; "": any.
func (vt *VTEP) device() string {
	if vt.cfg.Protection == nil {
		return ""
	}
	return vt.cfg.Protection.Name()
}

// openGuard opens the socket that counts unprotected datagrams.
func (vt *VTEP) openGuard() error {
	if vt.cfg.Protection == nil {
		return nil
	}
	local := netip.AddrPortFrom(vt.cfg.Local, vt.cfg.Port)
	sa, err := sockAddr(vt.nl, local)
	if err != nil {
		return err
	}
	if vt.guard, err = openShared(sa, local, "", refuseAll); err != nil {
		return err
	}
	// Without this the kernel takes the first group of sockets with SO_REUSEPORT that accepts a datagram, though another
	// is bound to the datagram's interface (udp4_lib_lookup2 in net/ipv4/udp.c).
	if err := unix.SetsockoptInt(vt.guard, unix.SOL_SOCKET, unix.SO_REUSEPORT, 0); err != nil {
		return fmt.Errorf("vxlan: setsockopt SO_REUSEPORT: %w", err)
	}
	return nil
}
