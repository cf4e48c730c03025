package loop

import (
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

// nap bounds, in ms, how long a loop that goes to sleep keeps Go's processor. Under traffic that lets a loop sleep for
// some microseconds at a time, giving the processor up and reclaiming it each time would keep the runtime's monitor
// thread awake, which cost a fifth of the daemons' time for TCP between hosts. In practice the runtime ends the nap by
// a signal, at once to stop the world, and after 10 ms in any case. With a bound shorter than a tick the kernel would
// set a timer for each sleep.
const nap = 20

// epollWait blocks until an event. It returns the number of events, 0 also when interrupted: the caller checks its
// queues and calls again.
func epollWait(epfd int, events []unix.EpollEvent) int {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])),
		uintptr(len(events)), nap, 0, 0)
	if errno == 0 && n > 0 {
		return int(n)
	}
	rest, err := unix.EpollWait(epfd, events, -1)
	if err != nil {
		return 0
	}
	return rest
}
