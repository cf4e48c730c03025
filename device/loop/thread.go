package loop

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// settle sets the processors and nice value of the calling thread, which is the loop's. A refused nice value is no
// error.
func (l *Loop) settle() error {
	if len(l.cpus) > 0 {
		if err := setAffinity(0, l.cpus); err != nil {
			return fmt.Errorf("loop: loop %d: processors %v: %w", l.id, l.cpus, err)
		}
	}
	if l.nice != 0 {
		// On Linux PRIO_PROCESS applies to one thread.
		if err := unix.Setpriority(unix.PRIO_PROCESS, 0, l.nice); err != nil {
			l.log.Debug("loop thread's nice value unchanged (CAP_SYS_NICE or RLIMIT_NICE would permit it)", "nice", l.nice,
				"reason", err)
			l.nice = 0
		}
	}
	return nil
}

func setAffinity(tid int, cpus []int) error {
	var set unix.CPUSet
	set.Zero()
	for _, c := range cpus {
		set.Set(c)
	}
	if set.Count() != len(cpus) {
		return fmt.Errorf("%w: processors are numbered from 0 to %d", unix.EINVAL, len(set)*strconv.IntSize-1)
	}
	return unix.SchedSetaffinity(tid, &set)
}

// A loop occupies one of the Go scheduler's processors, also while it naps; others keep their number.
func addProcessors(n int) {
	processors.Lock()
	defer processors.Unlock()
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + n)
}

var processors sync.Mutex

// KeepOff removes cpus from the affinity of this process's threads and of those that they create later, to reserve them
// for loops. It has no effect if no processor would remain. Call it before Start.
func KeepOff(cpus []int) error {
	for again := true; again; { // a thread not seen yet may have created another meanwhile
		again = false
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return fmt.Errorf("loop: %w", err)
		}
		for _, t := range tasks {
			tid, err := strconv.Atoi(t.Name())
			if err != nil {
				return fmt.Errorf("loop: thread %q: %w", t.Name(), err)
			}
			changed, err := leave(tid, cpus)
			if err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("loop: thread %d: %w", tid, err)
			}
			again = again || changed
		}
	}
	return nil
}

// leave removes cpus from a thread's affinity.
func leave(tid int, cpus []int) (changed bool, err error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(tid, &set); err != nil {
		return false, err
	}
	before := set.Count()
	for _, c := range cpus {
		set.Clear(c)
	}
	if n := set.Count(); n == 0 || n == before {
		return false, nil
	}
	return true, unix.SchedSetaffinity(tid, &set)
}
