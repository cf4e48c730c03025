package engine

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// epollNow takes events that are there already. It never blocks, so it skips the Go scheduler's bookkeeping for
// system calls that might, which would cost more than the call.
func epollNow(epfd int, events []unix.EpollEvent) int {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])),
		uintptr(len(events)), 0, 0, 0)
	if errno != 0 { // EINTR
		return 0
	}
	return int(n)
}

// epollWait blocks until an event or for timeout nanoseconds; negative = for ever. It returns the number of events, 0
// also when interrupted: the caller looks around and comes back.
func epollWait(epfd int, events []unix.EpollEvent, timeout int64) int {
	var ts *unix.Timespec
	if timeout >= 0 {
		t := unix.NsecToTimespec(timeout)
		ts = &t
	}
	n, _, errno := unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])),
		uintptr(len(events)), uintptr(unsafe.Pointer(ts)), 0, 0)
	if errno == unix.ENOSYS { // before Linux 5.11: milliseconds, rounded up so that a timer is never early
		ms := -1
		if timeout >= 0 {
			ms = int(min((timeout+999_999)/1_000_000, 1<<30))
		}
		got, err := unix.EpollWait(epfd, events, ms)
		if err != nil {
			return 0
		}
		return got
	}
	if errno != 0 {
		return 0
	}
	return int(n)
}
