package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// Processor time of the whole machine, from the first line of /proc/stat. Unlike that of processes it contains
// everything that a figure costs, such as ksoftirqd, kernel workers and interrupts; and also the machine's other load.

// machineTime is processor time of all cores since boot.
type machineTime struct {
	busy   time.Duration // user, nice (both with guests), system, irq, softirq
	idle   time.Duration // idle, iowait
	stolen time.Duration // the hypervisor ran something else
}

// statTick is the unit of /proc/stat, USER_HZ; it is 100 Hz on every architecture that vnicd runs on.
const statTick = time.Second / 100

const procStat = "/proc/stat"

func readMachine(path string) (machineTime, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return machineTime{}, err
	}
	return parseStat(string(b))
}

// parseStat parses /proc/stat. Its fields are user, nice, system, idle, iowait, irq, softirq, steal, guest and
// guest_nice (proc_stat(5)); the last two are parts of user and nice.
func parseStat(s string) (m machineTime, err error) {
	for l := range strings.Lines(s) {
		f := strings.Fields(l)
		if len(f) == 0 || f[0] != "cpu" {
			continue
		}
		sums := []*time.Duration{&m.busy, &m.busy, &m.busy, &m.idle, &m.idle, &m.busy, &m.busy, &m.stolen}
		if len(f) < 1+len(sums) {
			return m, fmt.Errorf("%s: %d fields in %q, want at least %d", procStat, len(f), l, 1+len(sums))
		}
		for i, sum := range sums {
			n, err := strconv.ParseInt(f[1+i], 10, 64)
			if err != nil {
				return m, fmt.Errorf("%s: %w", procStat, err)
			}
			*sum += time.Duration(n) * statTick
		}
		return m, nil
	}
	return m, errors.New(procStat + ": no line of all processors")
}

// work is what a measured phase did, and what it cost the whole machine.
type work struct {
	unit  string // "KiB", "message"
	units float64
	cost  machineTime
}

// add adds the work of another phase of the same row.
func (w *work) add(x work) {
	w.unit = x.unit
	w.units += x.units
	w.cost.busy += x.cost.busy
	w.cost.idle += x.cost.idle
	w.cost.stolen += x.cost.stolen
}

// perUnit returns the machine's processor time per unit in ns.
func (w *work) perUnit() float64 { return float64(w.cost.busy) / w.units }

// stolen returns the part of the machine's time that the hypervisor did not give it.
func (w *work) stolen() float64 {
	all := w.cost.busy + w.cost.idle + w.cost.stolen
	if all <= 0 {
		return 0
	}
	return float64(w.cost.stolen) / float64(all)
}

// of returns the same work in another unit, of which each of w has that many.
func (w work) of(unit string, each float64) work {
	w.unit, w.units = unit, w.units*each
	return w
}

// phase is a measured phase that has begun.
type phase struct {
	path   string
	before machineTime
}

func begin() (phase, error) { return beginAt(procStat) }

func beginAt(path string) (phase, error) {
	now, err := readMachine(path)
	return phase{path, now}, err
}

// end returns the work of a phase that did that many units.
func (p phase) end(unit string, units float64) (work, error) {
	now, err := readMachine(p.path)
	return work{unit, units, machineTime{
		// The kernel's idle and iowait may go backwards by some ticks.
		busy: now.busy - p.before.busy, idle: max(0, now.idle-p.before.idle), stolen: now.stolen - p.before.stolen,
	}}, err
}

// working runs f, a measured phase, and adds its work to the sample. f also returns the number of units that it did. If
// only a part of f is measured, such as a stream without the comparison of its data, f sets the sample's work.
func working(unit string, f func() (Sample, float64, error)) (Sample, error) {
	p, err := begin()
	if err != nil {
		return Sample{}, err
	}
	s, n, err := f()
	if err != nil {
		return s, err
	}
	if s.Work.unit == "" {
		s.Work, err = p.end(unit, n)
	}
	return s, err
}
