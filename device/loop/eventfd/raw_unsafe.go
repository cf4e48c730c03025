package eventfd

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Add and Take are for loops, and for frequent signals. They skip the Go scheduler's bookkeeping for blocking system
// calls: its monitor thread takes the processor away from a goroutine that it finds in such a call after 10 ms, and
// then polls every 20 us for a while for others, which on few cores takes a noticeable part of one.

// Add adds one to the count of fd, which must be a non-blocking eventfd of this process alone: see Raise.
func Add(fd int) {
	// EAGAIN: the count is at its maximum, so the waiter has been woken.
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(one))),
		uintptr(len(one)))
}

// Take sets the count of fd to zero. It does not block (RWF_NOWAIT), even if the other side has made the eventfd
// blocking and has read the count first.
func Take(fd int) {
	var b [8]byte
	iov := unix.Iovec{Base: &b[0], Len: uint64(len(b))}
	const wherever = ^uintptr(0)
	if _, _, errno := unix.RawSyscall6(unix.SYS_PREADV2, uintptr(fd), uintptr(unsafe.Pointer(&iov)), 1, wherever, wherever,
		unix.RWF_NOWAIT); errno == unix.EOPNOTSUPP {
		// before Linux 5.8
		_, _, _ = unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&b)), uintptr(len(b)))
	}
}
