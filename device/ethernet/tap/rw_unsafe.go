package tap

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/frame/gso"
)

// The descriptors are non-blocking, so these calls skip the Go scheduler's bookkeeping for calls that might block. It
// costs about as much as reading a small frame, and keeps the runtime's monitor thread awake.

func read(fd int, p []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))),
		uintptr(len(p)))
	return int(n), errno
}

func write(fd int, p []byte) unix.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))),
		uintptr(len(p)))
	return errno
}

// outgoing holds the virtio header of a frame that a loop writes; each loop has its own, in its own cache lines.
type outgoing struct {
	header [gso.HeaderLen]byte
	iov    [2]unix.Iovec
	_      [64]byte
}

// write writes the header and a frame.
func (o *outgoing) write(fd int, f []byte) unix.Errno {
	o.iov[0].Base, o.iov[1].Base = &o.header[0], unsafe.SliceData(f)
	o.iov[0].SetLen(len(o.header))
	o.iov[1].SetLen(len(f))
	_, _, errno := unix.RawSyscall(unix.SYS_WRITEV, uintptr(fd), uintptr(unsafe.Pointer(&o.iov)), uintptr(len(o.iov)))
	o.iov[1].Base = nil
	return errno
}
