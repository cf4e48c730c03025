package loop

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// epollNow returns pending events. It never blocks, so it skips the Go scheduler's bookkeeping for blocking system
// calls, which would cost more than the call.
func epollNow(epfd int, events []unix.EpollEvent) int {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])),
		uintptr(len(events)), 0, 0, 0)
	if errno != 0 { // EINTR
		return 0
	}
	return int(n)
}

// nap bounds how long a loop that goes to sleep keeps Go's processor. Under traffic that lets a loop sleep for some
// microseconds at a time, giving the processor up and reclaiming it each time would keep the runtime's monitor thread
// awake, which cost a fifth of the daemons' time for TCP between hosts. In practice the runtime ends the nap by a
// signal, at once to stop the world, and after 10 ms in any case. With a bound shorter than a tick the kernel would set
// a timer for each sleep.
const nap = int64(20 * time.Millisecond)

// epollWait blocks until an event, or for timeout nanoseconds; negative: for ever. It returns the number of events, 0
// also when interrupted: the caller checks its queues and calls again.
func epollWait(epfd int, events []unix.EpollEvent, timeout int64) int {
	begin, first := Monotonic(), nap
	if timeout >= 0 {
		first = min(nap, timeout)
	}
	ts := unix.NsecToTimespec(first)
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT2, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])),
		uintptr(len(events)), uintptr(unsafe.Pointer(&ts)), 0, 0)
	switch {
	case errno == unix.ENOSYS: // before Linux 5.11
		return epollWaitMillis(epfd, events, timeout)
	case errno == 0 && (n > 0 || first == timeout):
		return int(n)
	}
	var rest *unix.Timespec
	if timeout >= 0 {
		ts = unix.NsecToTimespec(max(0, timeout-(Monotonic()-begin)))
		rest = &ts
	}
	n, _, errno = unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])),
		uintptr(len(events)), uintptr(unsafe.Pointer(rest)), 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}

// epollWaitMillis is epollWait for older kernels. It rounds up, so that no timer is early.
func epollWaitMillis(epfd int, events []unix.EpollEvent, timeout int64) int {
	ms := -1
	if timeout >= 0 {
		ms = int(min((timeout+999_999)/1_000_000, 1<<30))
	}
	n, err := unix.EpollWait(epfd, events, ms)
	if err != nil {
		return 0
	}
	return n
}
