package confine

import (
	"errors"
	"fmt"
	"os"
	"slices"
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

// Keep drops all capabilities but those given, for good and on every thread; the others also from the inheritable and
// the ambient set. With cgo it drops them on the calling thread only, and returns ErrCgo.
func Keep(keep ...uint) error {
	sets, err := capabilities(0)
	if err != nil {
		return err
	}
	var left [2]unix.CapUserData
	for _, c := range keep {
		left[c/32].Permitted |= sets[c/32].Permitted & (1 << (c % 32))
	}
	for i := range left {
		left[i].Effective = left[i].Permitted
	}
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	switch _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&h)),
		uintptr(unsafe.Pointer(&left[0])), 0); errno {
	case 0:
	case unix.ENOTSUP:
		if err := unix.Capset(&h, &left[0]); err != nil {
			return fmt.Errorf("capset: %w", err)
		}
		return ErrCgo
	default:
		return fmt.Errorf("capset: %w", errno)
	}
	return nil
}

// Bound removes all capabilities but those given from the calling thread's bounding set, if it may (CAP_SETPCAP), and
// takes from root the privilege of getting all by starting a program (capabilities(7), SECBIT_NOROOT). Threads and
// processes that the thread starts inherit both.
func Bound(keep ...uint) error {
	if !Holds(unix.CAP_SETPCAP) {
		return nil // it can gain none: PR_SET_NO_NEW_PRIVS
	}
	for c := uint(0); c <= unix.CAP_LAST_CAP; c++ {
		if slices.Contains(keep, c) {
			continue
		}
		// EINVAL: the kernel does not know it.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("PR_CAPBSET_DROP of capability %d: %w", c, err)
		}
	}
	const noRoot = 1<<0 | 1<<1 // SECBIT_NOROOT, SECBIT_NOROOT_LOCKED
	if err := unix.Prctl(unix.PR_SET_SECUREBITS, noRoot, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_SECUREBITS: %w", err)
	}
	return nil
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
