package loop

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

func affinity(t *testing.T) (cpus []int) {
	t.Helper()
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	for c := range len(set) * strconv.IntSize {
		if set.IsSet(c) {
			cpus = append(cpus, c)
		}
	}
	return cpus
}

// A loop's thread gets its processors and nice value; other threads are not affected.
func TestThread(t *testing.T) {
	all := affinity(t)
	last := all[len(all)-1:]
	l := newLoop(t, Config{CPUs: last, Nice: 7})
	if err := l.Start(); err != nil {
		t.Fatal(err)
	}
	var nice int
	var cpus []int
	l.Do(func() {
		raw, err := unix.Getpriority(unix.PRIO_PROCESS, 0) // the system call returns 20 minus the nice value
		if err != nil {
			t.Error(err)
		}
		nice, cpus = 20-raw, affinity(t)
	})
	if nice != 7 || !slices.Equal(cpus, last) {
		t.Errorf("nice %d, processors %v, want 7 and %v", nice, cpus, last)
	}
	if s := l.Stats(); s.Nice != 7 || !slices.Equal(s.CPUs, last) {
		t.Errorf("%+v", s)
	}
	if got := affinity(t); !slices.Equal(got, all) {
		t.Errorf("this thread may use %v, %v before", got, all)
	}
}

// A loop whose processors do not exist does not start; its state stays new, and it can be closed.
func TestNoSuchProcessor(t *testing.T) {
	for _, cpu := range []int{1023, 1024, -1} {
		l := newLoop(t, Config{CPUs: []int{cpu}})
		if err := l.Start(); !errors.Is(err, unix.EINVAL) {
			t.Errorf("processor %d: %v", cpu, err)
		}
		ran := false
		l.Do(func() { ran = true })
		if !ran {
			t.Error("Do did not run after the failed Start")
		}
	}
}

// TestKeepOff runs in its own process, whose threads are kept off the first of two processors; loops may still use it.
func TestKeepOff(t *testing.T) {
	const env = "VNICD_TEST_KEEP_OFF"
	if os.Getenv(env) == "" {
		c := exec.Command(os.Args[0], "-test.run=^TestKeepOff$", "-test.v")
		c.Env = append(os.Environ(), env+"=1")
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	all := affinity(t)
	if err := KeepOff(all); err != nil || !slices.Equal(affinity(t), all) {
		t.Fatalf("%v: this thread may use %v, of %v; want no change", err, affinity(t), all)
	}
	if len(all) == 1 {
		t.Log("one processor: no thread can be kept off it")
		return
	}
	if err := KeepOff(all[:1]); err != nil {
		t.Fatal(err)
	}
	l := newLoop(t, Config{CPUs: all[:1]})
	if err := l.Start(); err != nil {
		t.Fatal(err)
	}
	var own, others []int
	l.Do(func() { own = affinity(t) })
	if others = affinity(t); !slices.Equal(own, all[:1]) || !slices.Equal(others, all[1:]) {
		t.Errorf("the loop is on %v, others on %v, of %v", own, others, all)
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	apart := 0
	for _, task := range tasks {
		tid, _ := strconv.Atoi(task.Name())
		var set unix.CPUSet
		if err := unix.SchedGetaffinity(tid, &set); err == nil && set.IsSet(all[0]) {
			apart++
		}
	}
	if apart != 1 {
		t.Errorf("%d other threads may use the loop's processor", apart)
	}
}
