package main

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// mmsghdr is struct mmsghdr (sendmmsg(2)).
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32 // bytes sent or received
	_   [4]byte
}

// point makes m a message of these pieces, which must stay in place.
func (m *mmsghdr) point(pieces []unix.Iovec) {
	m.hdr.Iov = unsafe.SliceData(pieces)
	m.hdr.SetIovlen(len(pieces))
}

func iovec(b []byte) (v unix.Iovec) {
	v.Base = unsafe.SliceData(b)
	v.SetLen(len(b))
	return v
}

// sendmmsg sends at least one message and returns how many.
func sendmmsg(fd int, msgs []mmsghdr) (int, error) { return mmsg(unix.SYS_SENDMMSG, fd, msgs, 0) }

// recvmmsg waits for at least one message and returns how many it read.
func recvmmsg(fd int, msgs []mmsghdr, flags int) (int, error) {
	return mmsg(unix.SYS_RECVMMSG, fd, msgs, flags|unix.MSG_WAITFORONE)
}

func mmsg(call uintptr, fd int, msgs []mmsghdr, flags int) (int, error) {
	for {
		n, _, errno := unix.Syscall6(call, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(msgs))),
			uintptr(len(msgs)), uintptr(flags), 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
