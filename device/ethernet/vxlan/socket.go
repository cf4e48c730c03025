package vxlan

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	rcvBuf = 8 << 20
	sndBuf = 4 << 20
)

// sockAddr makes the address argument of bind.
func sockAddr(nl *netlink.Handle, a netip.AddrPort) (unix.Sockaddr, error) {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}, nil
	}
	scope, err := scopeOf(nl, a.Addr())
	if err != nil {
		return nil, err
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16(), ZoneId: scope}, nil
}

// scopeOf returns the interface index of a link-local address's zone, 0 = none.
func scopeOf(nl *netlink.Handle, a netip.Addr) (uint32, error) {
	if a.Zone() == "" {
		return 0, nil
	}
	link, err := nl.LinkByName(a.Zone())
	if err != nil {
		return 0, fmt.Errorf("vxlan: address %v: interface %q: %w", a, a.Zone(), err)
	}
	return uint32(link.Attrs().Index), nil
}

type option struct {
	level, opt, value int
	name              string
}

// openSocket makes a UDP socket with all options set, not yet bound. It sends and receives through one interface only,
// unless device is empty.
func openSocket(local netip.Addr, device string, zeroChecksum6 bool) (fd int, err error) {
	family := unix.AF_INET
	opts := []option{
		// DF, and no path MTU discovery: anybody can send the ICMP error that would lower the MTU (TR-3). The kernel
		// refuses datagrams that exceed the interface's MTU with EMSGSIZE instead of fragmenting (RFC 7348, section 4.3).
		// IP_PMTUDISC_INTERFACE would not let the kernel note the error at all, but sends without DF (ip(7)).
		{unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE, "IP_MTU_DISCOVER"},
		{unix.IPPROTO_IP, unix.IP_RECVTOS, 1, "IP_RECVTOS"},
		// Checksum zero: the inner frame has its own (RFC 7348, section 5).
		{unix.SOL_SOCKET, unix.SO_NO_CHECK, 1, "SO_NO_CHECK"},
	}
	if local.Is6() {
		family = unix.AF_INET6
		zero := 0
		if zeroChecksum6 {
			zero = 1
		}
		opts = []option{
			{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1, "IPV6_V6ONLY"},
			{unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_INTERFACE, "IPV6_MTU_DISCOVER"},
			{unix.IPPROTO_IPV6, unix.IPV6_DONTFRAG, 1, "IPV6_DONTFRAG"},
			{unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, 1, "IPV6_RECVTCLASS"},
			// RFC 6935 allows zero for tunnels: accept it, send it only if configured.
			{unix.SOL_UDP, unix.UDP_NO_CHECK6_RX, 1, "UDP_NO_CHECK6_RX"},
			{unix.SOL_UDP, unix.UDP_NO_CHECK6_TX, zero, "UDP_NO_CHECK6_TX"},
		}
	}
	fd, err = unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_UDP)
	if err != nil {
		return -1, fmt.Errorf("vxlan: socket: %w", err)
	}
	for _, o := range opts {
		if err := unix.SetsockoptInt(fd, o.level, o.opt, o.value); err != nil {
			unix.Close(fd)
			return -1, fmt.Errorf("vxlan: setsockopt %s: %w", o.name, err)
		}
	}
	if device != "" {
		if err := unix.BindToDevice(fd, device); err != nil {
			unix.Close(fd)
			return -1, fmt.Errorf("vxlan: setsockopt SO_BINDTODEVICE %q: %w", device, err)
		}
	}
	return fd, nil
}

// setBuffer asks for a large buffer, beyond the system's limit if privileged.
func setBuffer(fd, force, plain, size int) {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, size) != nil {
		// As large as net.core.[rw]mem_max allows; the kernel clamps and does not fail.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, plain, size)
	}
}

// openReceivers makes n sockets that share local through SO_REUSEPORT, so that the kernel spreads flows over loops.
func openReceivers(nl *netlink.Handle, local netip.AddrPort, n int, device string) (fds []int, err error) {
	defer func() {
		if err != nil {
			closeAll(fds)
			fds = nil
		}
	}()
	sa, err := sockAddr(nl, local)
	if err != nil {
		return nil, err
	}
	// SO_REUSEPORT would let another daemon of the same user bind the port, and each would get half of the frames. A
	// socket without it detects that.
	probe, err := openSocket(local.Addr(), "", false)
	if err != nil {
		return nil, err
	}
	err = unix.Bind(probe, sa)
	unix.Close(probe)
	if err != nil {
		return nil, bindError(local, err)
	}
	for range n {
		fd, err := openShared(sa, local, device, func(fd int) error {
			setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, rcvBuf)
			return nil
		})
		if err != nil {
			return fds, err
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

// openShared makes a socket that shares its address and port with others of this process. prepare is called before it
// is bound.
func openShared(sa unix.Sockaddr, local netip.AddrPort, device string, prepare func(fd int) error) (fd int, err error) {
	if fd, err = openSocket(local.Addr(), device, false); err != nil {
		return -1, err
	}
	if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		err = fmt.Errorf("vxlan: setsockopt SO_REUSEPORT: %w", err)
	} else if err = prepare(fd); err == nil {
		if err = unix.Bind(fd, sa); err != nil {
			err = bindError(local, err)
		}
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func bindError(local netip.AddrPort, err error) error {
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return fmt.Errorf("vxlan: UDP %v is in use (another daemon, or a kernel vxlan device?): %w", local, err)
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return fmt.Errorf("vxlan: %v is not an address of this host: %w", local.Addr(), err)
	}
	return fmt.Errorf("vxlan: bind UDP %v: %w", local, err)
}

// openSender makes a send-only socket. Datagrams to its port are filtered out before they are queued.
func openSender(nl *netlink.Handle, from netip.AddrPort, device string, zeroChecksum6 bool) (fd int, err error) {
	sa, err := sockAddr(nl, from)
	if err != nil {
		return -1, err
	}
	if fd, err = openSocket(from.Addr(), device, zeroChecksum6); err != nil {
		return -1, err
	}
	setBuffer(fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, sndBuf)
	if err = refuseAll(fd); err == nil {
		if err = unix.Bind(fd, sa); err != nil {
			err = fmt.Errorf("vxlan: bind UDP source port %v: %w", from, err)
		}
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// refuseAll has the kernel drop and count all datagrams for a socket (socketDrops); none is queued.
func refuseAll(fd int) error {
	filter := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: 1, Filter: &filter[0]}); err != nil {
		return fmt.Errorf("vxlan: setsockopt SO_ATTACH_FILTER: %w", err)
	}
	return nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// underlayLink is the interface that has the local address. virtual: frames there may come from a kernel on this
// machine, which passes messages on as their sender made them, not as coalesced from a wire. Then all datagrams of a
// message must be of one network; otherwise a tenant could hide datagrams of other networks in a message of a kernel's
// vxlan device. WireGuard encrypts each datagram by itself, and the receiving kernel coalesces them, as from a wire.
type underlayLink struct {
	mtu     int
	name    string
	index   int
	virtual bool
}

// findUnderlay returns the interface that has the address: the one of that name, unless device is empty.
func findUnderlay(nl *netlink.Handle, local netip.Addr, device string) (u underlayLink, err error) {
	family := netlink.FAMILY_V4
	if local.Is6() {
		family = netlink.FAMILY_V6
	}
	addrs, err := nl.AddrList(nil, family)
	if err != nil {
		return u, fmt.Errorf("vxlan: list addresses: %w", err)
	}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		if !ok || ip.Unmap() != local.WithZone("") {
			continue
		}
		link, err := nl.LinkByIndex(a.LinkIndex)
		if err != nil {
			return u, fmt.Errorf("vxlan: interface of %v: %w", local, err)
		}
		at := link.Attrs()
		if (local.Zone() == "" || local.Zone() == at.Name) && (device == "" || device == at.Name) {
			return underlayLink{at.MTU, at.Name, at.Index,
				!slices.Contains([]string{"device", "vlan", "bond", "team", "wireguard"}, link.Type())}, nil
		}
	}
	if device != "" {
		return u, fmt.Errorf("vxlan: %v is not an address of interface %s, which protects the underlay", local, device)
	}
	return u, fmt.Errorf("vxlan: %v is not an address of this host", local)
}
