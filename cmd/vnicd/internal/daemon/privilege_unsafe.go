package daemon

import (
	"errors"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// dropCapability drops a capability for good, on every thread. It fails in a program built with cgo, because Go does
// not know all threads of such a program.
func dropCapability(c uint) error {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&h, &sets[0]); err != nil {
		return err
	}
	s, bit := &sets[c/32], uint32(1)<<(c%32)
	if s.Permitted&bit == 0 {
		return nil
	}
	s.Permitted &^= bit
	s.Effective &^= bit
	s.Inheritable &^= bit // clears the ambient bit, too
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&h)),
		uintptr(unsafe.Pointer(&sets[0])), 0)
	if errno == unix.ENOTSUP {
		return errors.New("built with cgo")
	}
	if errno != 0 {
		return errno
	}
	return nil
}
