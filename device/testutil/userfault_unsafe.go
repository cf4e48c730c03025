package testutil

import (
	"encoding/binary"
	"os"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Numbers of <linux/userfaultfd.h>.
const (
	uffdUserModeOnly    = 1
	uffdAPI             = 0xaa
	uffdioAPI           = 0xc018aa3f
	uffdioRegister      = 0xc020aa00
	uffdioCopy          = 0xc028aa03
	uffdRegisterMissing = 1
	uffdMessage         = 32 // bytes of an event; the address of a fault is at 16
)

// UserFaults are the faults of a mapping's absent pages, which this process answers (userfaultfd).
type UserFaults struct {
	tb   testing.TB
	file *os.File
	once sync.Once
}

// NewUserFaults makes every access to an absent page of memory, a mapping, wait for Fill, until Close or the end of the
// test. With userOnly the kernel itself does not wait: a system call that is given such a page fails.
func NewUserFaults(tb testing.TB, memory []byte, userOnly bool) *UserFaults {
	tb.Helper()
	flags := uintptr(unix.O_CLOEXEC | unix.O_NONBLOCK)
	if userOnly {
		flags |= uffdUserModeOnly
	}
	fd, _, e := unix.Syscall(unix.SYS_USERFAULTFD, flags, 0, 0)
	if e == unix.ENOSYS {
		tb.Skip("this kernel has no userfaultfd")
	}
	if e != 0 {
		tb.Fatalf("userfaultfd: %v (needs root, or vm.unprivileged_userfaultfd=1)", e)
	}
	api := struct{ api, features, ioctls uint64 }{api: uffdAPI}
	_, _, e = unix.Syscall(unix.SYS_IOCTL, fd, uffdioAPI, uintptr(unsafe.Pointer(&api)))
	// Until then epoll, and with it os.File, takes it for broken.
	u := &UserFaults{tb: tb, file: os.NewFile(fd, "userfaultfd")}
	tb.Cleanup(u.Close)
	if e != 0 {
		tb.Fatal("UFFDIO_API:", e)
	}
	r := struct{ start, len, mode, ioctls uint64 }{
		uint64(uintptr(unsafe.Pointer(unsafe.SliceData(memory)))), uint64(len(memory)), uffdRegisterMissing, 0}
	if e := u.ioctl(uffdioRegister, unsafe.Pointer(&r)); e != 0 {
		tb.Fatal("UFFDIO_REGISTER:", e)
	}
	return u
}

func (u *UserFaults) ioctl(request uintptr, arg unsafe.Pointer) (e unix.Errno) {
	c, err := u.file.SyscallConn()
	if err != nil {
		return unix.EBADF
	}
	if c.Control(func(fd uintptr) { _, _, e = unix.Syscall(unix.SYS_IOCTL, fd, request, uintptr(arg)) }) != nil {
		return unix.EBADF
	}
	return e
}

// Next waits for a fault and returns the address; false after Close.
func (u *UserFaults) Next() (addr uint64, ok bool) {
	var b [uffdMessage]byte
	if n, err := u.file.Read(b[:]); err != nil || n != len(b) {
		return 0, false
	}
	return binary.NativeEndian.Uint64(b[16:]), true
}

// Fill makes data, whole pages, the pages at addr, unless they are there meanwhile.
func (u *UserFaults) Fill(addr uint64, data []byte) {
	c := struct{ dst, src, len, mode, copied uint64 }{dst: addr,
		src: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(data)))), len: uint64(len(data))}
	if e := u.ioctl(uffdioCopy, unsafe.Pointer(&c)); e != 0 && e != unix.EEXIST {
		u.tb.Errorf("UFFDIO_COPY: %v", e)
	}
}

// Close ends the waiting: pages that are still absent are zero.
func (u *UserFaults) Close() { u.once.Do(func() { _ = u.file.Close() }) }
