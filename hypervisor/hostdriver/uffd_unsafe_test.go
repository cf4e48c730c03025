package hostdriver

import (
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Numbers of <linux/userfaultfd.h>.
const (
	uffdAPI             = 0xaa
	uffdioAPI           = 0xc018aa3f
	uffdioRegister      = 0xc020aa00
	uffdRegisterMissing = 1
)

// stall makes every fault that needs a new page of r's mapping hang, as on a dead swap device, until the returned
// function is called.
func stall(t *testing.T, r *region) (release func()) {
	t.Helper()
	fd, _, e := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if e == unix.ENOSYS {
		t.Skip("this kernel has no userfaultfd")
	}
	if e != 0 {
		t.Fatalf("userfaultfd: %v (needs root, or vm.unprivileged_userfaultfd=1)", e)
	}
	api := struct{ api, features, ioctls uint64 }{api: uffdAPI}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, fd, uffdioAPI, uintptr(unsafe.Pointer(&api))); e != 0 {
		t.Fatal("UFFDIO_API:", e)
	}
	reg := struct{ start, len, mode, ioctls uint64 }{
		start: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(r.m.whole)))), len: uint64(len(r.m.whole)),
		mode: uffdRegisterMissing,
	}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, fd, uffdioRegister, uintptr(unsafe.Pointer(&reg))); e != 0 {
		t.Fatal("UFFDIO_REGISTER:", e)
	}
	var once sync.Once
	release = func() { once.Do(func() { _ = unix.Close(int(fd)) }) }
	t.Cleanup(release)
	return release
}
