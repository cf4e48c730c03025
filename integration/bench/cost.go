package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// Resources that processes use: time, cycles, memory.

// cpuTime returns the run time of a process's threads, by the scheduler's account.
func cpuTime(p *harness.Process) (sum time.Duration, err error) {
	threads, err := threadTimes(p.PID())
	for _, t := range threads {
		sum += t
	}
	return sum, err
}

// threadTimes returns the run time of each thread of a process, by thread id.
func threadTimes(pid int) (map[int]time.Duration, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("process %d has no threads: %w", pid, err)
	}
	times := map[int]time.Duration{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has ended
		}
		tid, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		ns, _, _ := strings.Cut(string(b), " ")
		n, err := strconv.ParseInt(ns, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		times[tid] = time.Duration(n)
	}
	return times, nil
}

// privateMemory returns a process's anonymous resident memory in bytes, which excludes guest memory.
func privateMemory(p *harness.Process) (float64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	if err != nil {
		return 0, err
	}
	for l := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(l, "RssAnon:"); ok {
			kb, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 64)
			return kb * 1024, err
		}
	}
	return 0, fmt.Errorf("process %d: no RssAnon", p.PID())
}

// ran returns the run time of the hosts' daemons.
func ran(hosts []*lab.Host) (sum time.Duration, err error) {
	for _, h := range hosts {
		t, err := cpuTime(h.Proc)
		if err != nil {
			return 0, err
		}
		sum += t
	}
	return sum, nil
}

// costing is working that also adds the processor time in ns that the hosts' daemons used per unit, and cycles if perf
// counts them.
func costing(hosts []*lab.Host, unit string, f func() (Sample, float64, error)) (s Sample, err error) {
	var cycles counter
	if cyclesCounted() == nil {
		var pids []int
		for _, h := range hosts {
			pids = append(pids, h.Proc.PID())
		}
		if cycles, err = newCounter(unix.PERF_TYPE_HARDWARE, unix.PERF_COUNT_HW_CPU_CYCLES, pids...); err != nil {
			return s, err
		}
		defer func() { err = errors.Join(err, cycles.close()) }()
	}
	before, err := ran(hosts)
	if err != nil {
		return s, err
	}
	s, err = working(unit, f)
	if err != nil {
		return s, err
	}
	n := s.Work.units
	after, err := ran(hosts)
	if err != nil {
		return s, err
	}
	if s.Extra == nil {
		s.Extra = map[string]float64{}
	}
	s.Extra["daemons, ns/"+unit] = float64(after-before) / n
	if cycles != nil {
		counted, err := cycles.read()
		if err != nil {
			return s, err
		}
		s.Extra["daemons, cycles/"+unit] = float64(counted) / n
	}
	return s, nil
}

// counter counts an event of perf_event_open(2) for all threads of some processes.
type counter []int // file descriptors

// newCounter counts an event (PERF_TYPE_..., PERF_COUNT_...) for the processes' threads and the threads that these
// create later.
func newCounter(kind uint32, event uint64, pids ...int) (c counter, err error) {
	attr := unix.PerfEventAttr{Type: kind, Config: event, Bits: unix.PerfBitInherit}
	attr.Size = uint32(binary.Size(attr))
	for _, pid := range pids {
		threads, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(pid), "task"))
		if err != nil {
			return nil, errors.Join(err, c.close())
		}
		for _, t := range threads {
			tid, err := strconv.Atoi(t.Name())
			if err != nil {
				return nil, errors.Join(err, c.close())
			}
			fd, err := unix.PerfEventOpen(&attr, tid, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
			switch {
			case errors.Is(err, unix.ESRCH): // the thread has ended
			case err != nil:
				return nil, errors.Join(fmt.Errorf("perf_event_open: %w", err), c.close())
			default:
				c = append(c, fd)
			}
		}
	}
	return c, nil
}

// read returns the count since newCounter.
func (c counter) read() (sum uint64, err error) {
	var n [8]byte
	for _, fd := range c {
		if _, err := unix.Read(fd, n[:]); err != nil {
			return 0, fmt.Errorf("reading a perf event: %w", err)
		}
		sum += binary.NativeEndian.Uint64(n[:])
	}
	return sum, nil
}

func (c counter) close() (err error) {
	for _, fd := range c {
		err = errors.Join(err, unix.Close(fd))
	}
	return err
}

// cyclesCounted returns nil if perf counts processor cycles here; most virtual machines do not allow it.
var cyclesCounted = sync.OnceValue(func() error {
	c, err := newCounter(unix.PERF_TYPE_HARDWARE, unix.PERF_COUNT_HW_CPU_CYCLES, os.Getpid())
	return errors.Join(err, c.close())
})
