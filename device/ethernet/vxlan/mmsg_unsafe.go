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

// control is one control message with an int.
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

// rxControl holds the ancillary data of a received message: traffic class and, if the kernel has coalesced several
// datagrams, their size.
type rxControl [24 + 24]byte

// parse reads n bytes of control messages. size is 0 if the message is one datagram; the caller must check it.
func (c *rxControl) parse(n uint64) (tos uint8, size int) {
	p := c[:min(n, uint64(len(c)))]
	for len(p) > unix.SizeofCmsghdr {
		end := binary.NativeEndian.Uint64(p)
		if end <= unix.SizeofCmsghdr || end > uint64(len(p)) {
			break
		}
		data := p[unix.SizeofCmsghdr:end]
		level, typ := binary.NativeEndian.Uint32(p[8:]), binary.NativeEndian.Uint32(p[12:])
		switch {
		case level == unix.IPPROTO_IP && typ == unix.IP_TOS:
			tos = data[0] // the kernel sends one byte
		case level == unix.IPPROTO_IPV6 && typ == unix.IPV6_TCLASS && len(data) >= 4:
			tos = uint8(binary.NativeEndian.Uint32(data))
		case level == unix.SOL_UDP && typ == unix.UDP_GRO && len(data) >= 4:
			size = int(int32(binary.NativeEndian.Uint32(data)))
		}
		p = p[min((end+7)&^7, uint64(len(p))):]
	}
	return tos, size
}

func iovec(p []byte) (v unix.Iovec) {
	setIovec(&v, p)
	return v
}

func setIovec(v *unix.Iovec, p []byte) {
	v.Base = unsafe.SliceData(p)
	v.SetLen(len(p))
}

// setName points a message at an address, which must not move before the call.
func (m *mmsghdr) setName(r *rawAddr, n uint32) {
	m.hdr.Name = &r[0]
	m.hdr.Namelen = n
}

func (m *mmsghdr) setIov(v []unix.Iovec) {
	m.hdr.Iov = unsafe.SliceData(v)
	m.hdr.SetIovlen(len(v))
}

func (m *mmsghdr) setControl(c []byte) {
	m.hdr.Control = unsafe.SliceData(c)
	m.hdr.SetControllen(len(c))
}

// txControl holds the ancillary data of a message to be sent.
type txControl [24 + 24]byte

// put writes the control messages; with a size other than 0 the kernel segments the message into datagrams of that
// size. It returns the used part.
func (c *txControl) put(tos uint8, v6 bool, size int) []byte {
	n := 0
	if size != 0 {
		binary.NativeEndian.PutUint64(c[0:], unix.SizeofCmsghdr+2)
		binary.NativeEndian.PutUint32(c[8:], unix.SOL_UDP)
		binary.NativeEndian.PutUint32(c[12:], unix.UDP_SEGMENT)
		binary.NativeEndian.PutUint16(c[16:], uint16(size))
		n = 24
	}
	if tos != 0 {
		(*control)(c[n:]).putTOS(tos, v6)
		n += 24
	}
	return c[:n]
}

// recvmmsg and sendmmsg never block (the sockets are non-blocking), so they skip the Go scheduler's bookkeeping for
// blocking calls.
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

// Offsets in the result of SO_MEMINFO (linux/sock_diag.h).
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
