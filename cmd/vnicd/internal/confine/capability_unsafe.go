package confine

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrCgo is Drop's error in a program built with cgo: Go does not know all threads of such a program.
var ErrCgo = errors.New("this program was built with cgo (build it with CGO_ENABLED=0, as `make build` does)")

// Drop drops a capability (CAP_...) for good, on every thread, and verifies that none has it any more in its permitted,
// effective or inheritable set; the ambient set is a part of these (capabilities(7)).
func Drop(c uint) error {
	sets, err := capabilities(0)
	if err != nil {
		return err
	}
	if held(sets, c) {
		s, bit := &sets[c/32], uint32(1)<<(c%32)
		s.Permitted &^= bit
		s.Effective &^= bit
		s.Inheritable &^= bit
		h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		switch _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&h)),
			uintptr(unsafe.Pointer(&sets[0])), 0); errno {
		case 0:
		case unix.ENOTSUP:
			return ErrCgo
		default:
			return fmt.Errorf("capset: %w", errno)
		}
	}
	// A thread that appears from here on inherits the sets of one that was found without the capability.
	return verifyDropped(c)
}

// Holds reports whether the calling thread may use a capability.
func Holds(c uint) bool {
	sets, err := capabilities(0)
	return err == nil && sets[c/32].Effective&(1<<(c%32)) != 0
}

// verifyDropped looks for a thread that has a capability.
func verifyDropped(c uint) error {
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return fmt.Errorf("cannot verify that no thread has it: %w", err)
	}
	for _, t := range threads {
		id, err := strconv.Atoi(t.Name())
		if err != nil {
			return fmt.Errorf("cannot verify that no thread has it: /proc/self/task/%s: %w", t.Name(), err)
		}
		switch sets, err := capabilities(id); {
		case errors.Is(err, unix.ESRCH): // ended meanwhile
		case err != nil:
			return fmt.Errorf("cannot verify that no thread has it: capget of thread %d: %w", id, err)
		case held(sets, c):
			return fmt.Errorf("thread %d still has it", id)
		}
	}
	return nil
}

// capabilities returns the sets of a thread; 0: the caller.
func capabilities(thread int) (sets [2]unix.CapUserData, err error) {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3, Pid: int32(thread)}
	err = unix.Capget(&h, &sets[0])
	return sets, err
}

func held(sets [2]unix.CapUserData, c uint) bool {
	s, bit := sets[c/32], uint32(1)<<(c%32)
	return (s.Permitted|s.Effective|s.Inheritable)&bit != 0
}
