package vxlan

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// rawAddr is a struct sockaddr_in or sockaddr_in6 as bytes.
type rawAddr [unix.SizeofSockaddrInet6]byte

// mmsghdr is the kernel's struct mmsghdr.
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
	_   [4]byte
}

// control holds the ancillary data of one message: the traffic class.
type control [24]byte // CMSG_SPACE(sizeof(int))

func putRawAddr(r *rawAddr, a netip.AddrPort, scope uint32) (n uint32) {
	*r = rawAddr{}
	binary.BigEndian.PutUint16(r[2:], a.Port())
	if a.Addr().Is4() {
		binary.NativeEndian.PutUint16(r[0:], unix.AF_INET)
		ip := a.Addr().As4()
		copy(r[4:], ip[:])
		return unix.SizeofSockaddrInet4
	}
	binary.NativeEndian.PutUint16(r[0:], unix.AF_INET6)
	ip := a.Addr().As16()
	copy(r[8:], ip[:])
	binary.NativeEndian.PutUint32(r[24:], scope)
	return unix.SizeofSockaddrInet6
}

// addr returns the address without its zone: the socket's own address implies it.
func (r *rawAddr) addr() netip.Addr {
	switch binary.NativeEndian.Uint16(r[0:]) {
	case unix.AF_INET:
		return netip.AddrFrom4([4]byte(r[4:8]))
	case unix.AF_INET6:
		return netip.AddrFrom16([16]byte(r[8:24]))
	}
	return netip.Addr{}
}

// port returns the port.
func (r *rawAddr) port() uint16 { return binary.BigEndian.Uint16(r[2:]) }

// putTOS writes the control message that sets one datagram's traffic class.
func (c *control) putTOS(tos uint8, v6 bool) {
	binary.NativeEndian.PutUint64(c[0:], unix.SizeofCmsghdr+4)
	if v6 {
		binary.NativeEndian.PutUint32(c[8:], unix.IPPROTO_IPV6)
		binary.NativeEndian.PutUint32(c[12:], unix.IPV6_TCLASS)
	} else {
		binary.NativeEndian.PutUint32(c[8:], unix.IPPROTO_IP)
		binary.NativeEndian.PutUint32(c[12:], unix.IP_TOS)
	}
	binary.NativeEndian.PutUint32(c[16:], uint32(tos))
}

// tos reads the traffic class from the control message of a received datagram of n control bytes; 0 if there is none.
func (c *control) tos(n uint64) uint8 {
	if n < unix.SizeofCmsghdr+1 {
		return 0
	}
	level, typ := binary.NativeEndian.Uint32(c[8:]), binary.NativeEndian.Uint32(c[12:])
	switch {
	case level == unix.IPPROTO_IP && typ == unix.IP_TOS:
		return c[16] // the kernel sends one byte
	case level == unix.IPPROTO_IPV6 && typ == unix.IPV6_TCLASS && n >= unix.SizeofCmsghdr+4:
		return uint8(binary.NativeEndian.Uint32(c[16:]))
	}
	return 0
}

func setIovec(v *unix.Iovec, p []byte) {
	v.Base = unsafe.SliceData(p)
	v.SetLen(len(p))
}

// setName points a message at an address, which must stay where it is until the call.
func (m *mmsghdr) setName(r *rawAddr, n uint32) {
	m.hdr.Name = &r[0]
	m.hdr.Namelen = n
}

func (m *mmsghdr) setIov(v []unix.Iovec) {
	m.hdr.Iov = unsafe.SliceData(v)
	m.hdr.SetIovlen(len(v))
}

func (m *mmsghdr) setControl(c *control, on bool) {
	if !on {
		m.hdr.Control = nil
		m.hdr.SetControllen(0)
		return
	}
	m.hdr.Control = &c[0]
	m.hdr.SetControllen(len(c))
}

// gsoControl holds the ancillary data of a message to be cut: segment size and traffic class.
type gsoControl [24 + 24]byte

// setGSO has a message cut into datagrams of size bytes.
func (m *mmsghdr) setGSO(c *gsoControl, tos uint8, v6 bool, size uint16) {
	binary.NativeEndian.PutUint64(c[0:], unix.SizeofCmsghdr+2)
	binary.NativeEndian.PutUint32(c[8:], unix.SOL_UDP)
	binary.NativeEndian.PutUint32(c[12:], unix.UDP_SEGMENT)
	binary.NativeEndian.PutUint16(c[16:], size)
	n := 24
	if tos != 0 {
		(*control)(c[24:]).putTOS(tos, v6)
		n = 48
	}
	m.hdr.Control = &c[0]
	m.hdr.SetControllen(n)
}

// recvmmsg and sendmmsg never block (the sockets are non-blocking), so they skip the Go scheduler's bookkeeping for
// calls that might.
func recvmmsg(fd int, msgs []mmsghdr) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(msgs))),
		uintptr(len(msgs)), unix.MSG_DONTWAIT, 0, 0)
	return int(n), errno
}

func sendmmsg(fd int, msgs []mmsghdr) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(msgs))),
		uintptr(len(msgs)), unix.MSG_DONTWAIT, 0, 0)
	return int(n), errno
}

// Offsets in what SO_MEMINFO returns (linux/sock_diag.h).
const (
	skMemInfoDrops = 8
	skMemInfoVars  = 9
)

// socketDrops returns how many datagrams the kernel has dropped at a socket, modulo 2^32.
func socketDrops(fd int) (uint32, error) {
	var info [skMemInfoVars]uint32
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0, errno
	}
	return info[skMemInfoDrops], nil
}
