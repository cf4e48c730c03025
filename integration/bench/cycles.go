package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// counter is an event of perf_event_open(2), counted for all threads of some processes.
type counter []int // file descriptors

// newCounter counts an event (PERF_TYPE_..., PERF_COUNT_...) of the threads that the processes have, and of those that these will make.
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
			case errors.Is(err, unix.ESRCH): // it has ended
			case err != nil:
				return nil, errors.Join(fmt.Errorf("perf_event_open: %w", err), c.close())
			default:
				c = append(c, fd)
			}
		}
	}
	return c, nil
}

// read returns what has been counted since newCounter.
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

// cyclesCounted is nil where perf counts the processors' cycles; most virtual machines do not let it.
var cyclesCounted = sync.OnceValue(func() error {
	c, err := newCounter(unix.PERF_TYPE_HARDWARE, unix.PERF_COUNT_HW_CPU_CYCLES, os.Getpid())
	return errors.Join(err, c.close())
})
