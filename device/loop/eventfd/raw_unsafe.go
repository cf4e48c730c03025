package eventfd

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Add and Take are for loops, and for whoever signals often. They skip what Go's scheduler does around system calls
// that may last: its monitor thread takes the processor away from a goroutine that it finds in one after 10 ms, and
// then looks every 20 us for a while whether there are more such, which on few cores is a noticeable part of one.

// Add adds one to the count of fd, which is an eventfd that does not block.
func Add(fd int) {
	// EAGAIN means that the count is full, so whoever waits has been woken.
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(one))),
		uintptr(len(one)))
}

// Take sets the count of fd to zero. It does not block either if the other side has made the eventfd one that does, and
// has taken the count first (RWF_NOWAIT).
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
