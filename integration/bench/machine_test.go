package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// fakeStat has guest times, which are parts of user and nice, and a processor whose line must not be counted twice.
const fakeStat = `cpu  100 20 30 4000 50 6 7 80 90 10
cpu0 50 10 15 2000 25 3 3 40 45 5
intr 12345 0 9
ctxt 1
`

func TestParseStat(t *testing.T) {
	m, err := parseStat(fakeStat)
	want := machineTime{busy: 163 * statTick, idle: 4050 * statTick, stolen: 80 * statTick}
	if err != nil || m != want {
		t.Errorf("%+v, %v, want %+v", m, err, want)
	}
	for _, bad := range []string{"", "cpu0 1 2 3 4 5 6 7 8\n", "cpu  1 2 3 4 5 6 7\n", "cpu  1 2 3 x 5 6 7 8 9 10\n"} {
		if m, err := parseStat(bad); err == nil {
			t.Errorf("%q: %+v", bad, m)
		}
	}
	if _, err := readMachine(procStat); err != nil {
		t.Error("this machine:", err)
	}
}

func TestPhase(t *testing.T) {
	path := filepath.Join(t.TempDir(), "stat")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(fakeStat)
	p, err := beginAt(path)
	if err != nil {
		t.Fatal(err)
	}
	// 1 user, 2 nice, 3 system, 4 irq and 5 softirq more, 84 idle, iowait goes backwards, 1 stolen.
	write("cpu  101 22 33 4085 49 10 12 81 91 11\n")
	w, err := p.end("message", 3000)
	if err != nil || w.unit != "message" || w.cost != (machineTime{15 * statTick, 84 * statTick, statTick}) {
		t.Fatalf("%+v, %v", w, err)
	}
	if ns := w.perUnit(); ns != 50_000 { // 150 ms for 3000 messages
		t.Errorf("%v ns per message", ns)
	}
	if part := w.stolen(); part != 0.01 {
		t.Errorf("%v of the machine's time is stolen", part)
	}
	if kib := w.of("KiB", 0.5); kib.unit != "KiB" || kib.perUnit() != 100_000 || w.unit != "message" {
		t.Errorf("in KiB: %+v", kib)
	}
	w.add(work{"message", 1000, machineTime{busy: 85 * statTick}})
	if ns := w.perUnit(); ns != 250_000 {
		t.Errorf("%v ns per message of two phases", ns)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if w, err := p.end("message", 1); err == nil {
		t.Errorf("no file: %+v", w)
	}
}

// A sample that brings its own work, of a part of the phase, keeps it.
func TestWorkingKeepsWork(t *testing.T) {
	own := work{"message", 7, machineTime{busy: 1}}
	s, err := working("KiB", func() (Sample, float64, error) { return Sample{Work: own}, 9, nil })
	if err != nil || s.Work != own {
		t.Errorf("%+v, %v", s.Work, err)
	}
}

// Processor time of another process counts. It is compared with the kernel's own account of that process; a tenth less
// is accepted, because /proc/stat samples by ticks.
func TestWorkOfAnotherProcess(t *testing.T) {
	var used time.Duration
	s, err := working("run", func() (Sample, float64, error) {
		c := exec.Command("sh", "-c", "i=0; while [ $i -lt 500000 ]; do i=$((i+1)); done")
		if err := c.Run(); err != nil {
			return Sample{}, 0, err
		}
		used = c.ProcessState.UserTime() + c.ProcessState.SystemTime()
		return Sample{}, 1, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if used < 10*statTick {
		t.Fatalf("the process used only %v", used)
	}
	if got := s.Work.cost; got.busy+got.stolen < used*9/10-4*statTick {
		t.Errorf("the machine worked for %v while one process used %v", got.busy, used)
	}
}
