package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

func TestPick(t *testing.T) {
	for _, tc := range []struct {
		only, first string
		n           int
	}{
		{"local_write_1m", "local_write_1m", 1},
		{"idle_8vms local_write_1m", "local_write_1m", 2},
		{"local_", "local_write_1m", 3},
		{"=guest_fault", "guest_fault", 1},
		{"guest_fault", "guest_fault", 3},
	} {
		rows, err := pick(tc.only)
		if err != nil || len(rows) != tc.n || rows[0].Name != tc.first {
			t.Errorf("pick(%q) = %d rows, %v", tc.only, len(rows), err)
		}
	}
	for _, unknown := range []string{"nonsense", "=guest_"} {
		if _, err := pick("local_write_1m," + unknown); err == nil || !strings.Contains(err.Error(), `"`+unknown+`"`) {
			t.Errorf("an unknown row: %v", err)
		}
	}
	names := map[string]bool{}
	for _, r := range registry() {
		if names[r.Name] || r.What == "" || (r.Section == nil) == (r.Open == nil) {
			t.Errorf("row %q is wrong", r.Name)
		}
		names[r.Name] = true
	}
}

func TestStatistics(t *testing.T) {
	if m := median([]float64{9, 1, 5}); m != 5 {
		t.Errorf("median of three: %v", m)
	}
	if m := median([]float64{4, 1, 9, 2}); m != 3 {
		t.Errorf("median of four: %v", m)
	}
	if s := spread([]float64{8, 10, 12}); s != 0.2 {
		t.Errorf("spread: %v", s)
	}
	r := &Result{Ours: []float64{10, 30, 20}, Anchor: []float64{10, 10, 10}}
	for _, tc := range []struct {
		goals []Goal
		short float64
	}{
		{nil, 0},
		{[]Goal{atLeast(20), ratioAtLeast(2)}, 0},
		{[]Goal{atLeast(40)}, 0.5},
		{[]Goal{atMost(10)}, 1},
		{[]Goal{ratioAtLeast(4), atMost(16)}, 0.5},
		{[]Goal{ratioAtMost(1)}, 1},
	} {
		if got := r.short(tc.goals); got != tc.short {
			t.Errorf("%+v: short by %v, want %v", tc.goals, got, tc.short)
		}
	}
}

// With -anchors=false goals on the ratio are not decided.
func TestWithoutAnchor(t *testing.T) {
	r := &Result{Ours: []float64{1, 1, 1, 1, 1}}
	goals := []Goal{atMost(2), ratioAtMost(8)}
	if _, v, _ := r.judge(goals); v != undecided || r.short(goals) != 0 {
		t.Errorf("%s, short by %v", v, r.short(goals))
	}
	rep, err := newReport(filepath.Join(t.TempDir(), "x.jsonl"), new(bytes.Buffer))
	if err != nil {
		t.Fatal(err)
	}
	rep.add(Row{Name: "x", Unit: "ns", Goals: goals}, r)
	if err := rep.close(); err != nil {
		t.Error(err)
	}
}

// TestReport checks the table's columns and that every line of the file is JSON.
func TestReport(t *testing.T) {
	var out bytes.Buffer
	path := filepath.Join(t.TempDir(), "sub", "x.jsonl")
	rep, err := newReport(path, &out)
	if err != nil {
		t.Fatal(err)
	}
	row := Row{Name: "some_row", What: "speed", Anchor: "light", Unit: "GB/s", Goals: []Goal{ratioAtLeast(0.95)}}
	rep.add(row, &Result{Ours: []float64{5, 4, 6, 5, 5}, Anchor: []float64{10, 10, 10, 10, 10},
		Extra: map[string]float64{"p99": 123456},
		OursWork: []work{{"KiB", 1000, machineTime{busy: 50 * time.Microsecond, stolen: 50 * time.Microsecond}},
			{"KiB", 1000, machineTime{busy: 70 * time.Microsecond}}},
		AnchorWork: []work{{"KiB", 1000, machineTime{busy: 40 * time.Microsecond}}}})
	rep.add(Row{Name: "idle", What: "nothing", Anchor: "nothing", Unit: "%", Goals: []Goal{atMost(1)}},
		&Result{Ours: []float64{0.5, 0.5, 0.5, 0.5, 0.5}, Anchor: []float64{0, 0, 0, 0, 0}})
	rep.add(Row{Name: "chance", What: "a coin", Unit: "heads/s", Goals: []Goal{atLeast(1)}},
		&Result{Ours: []float64{2, 2, 2, 0, 2}})
	rep.failure(Row{Name: "broken"}, os.ErrNotExist)
	if err := rep.close(); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"some_row", "0.50x", "missed by 47%", "0.40..0.60x",
		"not decided    0.00..2.00", "speed / light", "p99 123k", "<= 1 ", "broken", "FAILED",
		"60.0 40.0 /KiB", "took up to 50%"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var lines []map[string]any
	for l := range bytes.Lines(b) {
		var m map[string]any
		if err := json.Unmarshal(l, &m); err != nil {
			t.Fatalf("%q: %v", l, err)
		}
		lines = append(lines, m)
	}
	if len(lines) != 5 || lines[1]["verdict"] != "missed" || lines[1]["ratio"] != 0.5 || lines[2]["verdict"] != "met" ||
		lines[3]["verdict"] != "not decided" || lines[1]["cpu_ns"] != 60.0 || lines[1]["stolen"] != 0.5 {
		t.Errorf("lines: %v", lines)
	}
	if _, has := lines[2]["ratio"]; has {
		t.Error("a ratio to an anchor of 0")
	}
}

func TestParsers(t *testing.T) {
	m, err := parseCSV("warning\niterations,50.0_percentile_lat,overall_mr\n100,0.5,10\n200,0.159,244517\n")
	if err != nil || m["50.0_percentile_lat"] != 0.159 || m["overall_mr"] != 244517 {
		t.Errorf("CSV: %v, %v", m, err)
	}
	if _, err := parseCSV("connection refused"); err == nil {
		t.Error("CSV without figures is no error")
	}
	b, ok := parseBenchmark("BenchmarkWrite/64-2   \t  1000\t 1234 ns/op\t 5.5 GB/s\t 0 B/op")
	if !ok || b.Name != "Write/64-2" || b.N != 1000 || b.Metrics["ns/op"] != 1234 || b.Metrics["B/op"] != 0 {
		t.Errorf("benchmark line: %+v, %v", b, ok)
	}
	for _, l := range []string{"ok  \tgithub.com/x 1.2s", "BenchmarkFoo", "goos: linux", "BenchmarkFoo some words here"} {
		if _, ok := parseBenchmark(l); ok {
			t.Errorf("%q was parsed as a benchmark", l)
		}
	}
}

func TestFaultTimes(t *testing.T) {
	var times []float64
	for i := range 1000 {
		times = append(times, float64(i+1))
	}
	for _, tc := range []struct {
		n       int
		q, want float64
	}{
		{1, 0.5, 1}, {1, 0, 1}, {1, 0.999, 1}, {4, 0.5, 2}, {5, 0.5, 3}, {1000, 0.5, 500}, {1000, 0.99, 990},
		{1000, 0.999, 999}, {1000, 1, 1000}, {100, 0.999, 100},
	} {
		if got := quantile(times[:tc.n], tc.q); got != tc.want {
			t.Errorf("quantile %v of %d times: %v, want %v", tc.q, tc.n, got, tc.want)
		}
	}
	f := faults{n: 7, sum: 21 * time.Microsecond}
	if f.mean() != 3 {
		t.Errorf("mean %v, want 3", f.mean())
	}
}

// TestCounter counts a software event that every kernel has, for this process's threads and one that is created later.
func TestCounter(t *testing.T) {
	c, err := newCounter(unix.PERF_TYPE_SOFTWARE, unix.PERF_COUNT_SW_TASK_CLOCK, os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	read := func() time.Duration {
		t.Helper()
		n, err := c.read()
		if err != nil {
			t.Fatal(err)
		}
		return time.Duration(n)
	}
	before := read()
	var stop atomic.Bool
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // not unlocked: the thread ends with the goroutine
		for !stop.Load() {
		}
	}()
	for deadline := time.Now().Add(time.Minute); read()-before < 10*time.Millisecond; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("a thread was busy for a minute and %v was counted", read()-before)
		}
	}
	stop.Store(true)
	<-ended
	if err := c.close(); err != nil {
		t.Error(err)
	}
	if _, err := newCounter(unix.PERF_TYPE_SOFTWARE, 1<<40, os.Getpid()); err == nil ||
		!strings.Contains(err.Error(), "perf_event_open") {
		t.Errorf("an unknown event: %v", err)
	}
}

func TestParseCycles(t *testing.T) {
	v, err := parseCycles("\n  CPU cycles/packet=200.00 (total cycles=2000 / total RX packets=10) at 2400 MHz Clock\n")
	if err != nil || v != 12e6 {
		t.Error(v, err)
	}
	for _, bad := range []string{"", "CPU cycles/packet=0.00 (total cycles=0 / total RX packets=1) at 2400 MHz Clock"} {
		if v, err := parseCycles(bad); err == nil {
			t.Errorf("%q: %v", bad, v)
		}
	}
}

func TestParseTestpmd(t *testing.T) {
	port := "  RX-packets: 1000    RX-missed: 0   RX-bytes: 64000\n  Throughput (since last show)\n  Rx-pps:   250    Rx-bps: 9\n"
	seconds, total := parseTestpmd("Port statistics ===\n" + port + port + "\n" + port)
	if len(seconds) != 1 || seconds[0] != 500 || total != 2000 {
		t.Errorf("%v, %v", seconds, total)
	}
}

// Ours and anchor alternate, each first in turn, and a round's figures are means.
func TestRound(t *testing.T) {
	var order string
	n := 0.0
	sample := func(who string) func(context.Context, time.Duration) (Sample, error) {
		return func(_ context.Context, d time.Duration) (Sample, error) {
			if d != time.Second {
				t.Errorf("one sample took %v", d)
			}
			order += who
			n++
			return Sample{Value: n, Extra: map[string]float64{who: 2 * n},
				Work: work{"message", n, machineTime{busy: time.Duration(n)}}}, nil
		}
	}
	m := Meter{Ours: sample("o"), Anchor: sample("a"), Turns: 2}
	ours, anchor, err := m.round(context.Background(), 2*time.Second, true)
	if err != nil || order != "oaao" || ours.Value != 2.5 || anchor.Value != 2.5 || ours.Extra["o"] != 5 ||
		anchor.Extra["a"] != 5 {
		t.Errorf("%v: %v %v %v", order, ours, anchor, err)
	}
	// The round's work is the sum of its turns'.
	if ours.Work != (work{"message", 5, machineTime{busy: 5}}) || anchor.Work.units != 5 {
		t.Errorf("work: %+v, %+v", ours.Work, anchor.Work)
	}
}

// A sample without work, or in another unit than the anchor's, is an error: every row accounts for the machine's time.
func TestRoundNeedsWork(t *testing.T) {
	sample := func(w work) func(context.Context, time.Duration) (Sample, error) {
		return func(context.Context, time.Duration) (Sample, error) { return Sample{Value: 1, Work: w}, nil }
	}
	some := work{unit: "message", units: 1}
	for _, m := range []Meter{
		{Ours: sample(work{})}, {Ours: sample(some), Anchor: sample(work{})},
		{Ours: sample(work{unit: "message"})}, {Ours: sample(some), Anchor: sample(work{unit: "KiB", units: 1})},
	} {
		_, _, err := m.round(context.Background(), time.Second, true)
		if err == nil || !strings.Contains(err.Error(), "work") {
			t.Error(err)
		}
	}
	if _, _, err := (&Meter{Ours: sample(some), Anchor: sample(some)}).round(context.Background(), time.Second,
		true); err != nil {
		t.Error(err)
	}
}

// A look-up all over the region translates every page that it draws, and the loads cover their memory.
func TestColdTranslation(t *testing.T) {
	var b Bench
	b.Lab = &lab.Lab{Env: &harness.Env{}}
	defer b.Run()
	m, err := coldTranslation(10_000)(context.Background(), &b)
	if err != nil {
		t.Fatal(err)
	}
	ours, anchor, err := m.round(context.Background(), 10*time.Millisecond, true)
	if err != nil || ours.Value <= 0 || ours.Extra["overlapped"] <= 0 || anchor.Value <= 0 {
		t.Errorf("%+v, %+v, %v", ours, anchor, err)
	}
}

// Samples of emulated guests say so, others do not.
func TestEmulated(t *testing.T) {
	var tcg, kvm Sample
	accel(qemu.TCG).mark(&tcg)
	accel(qemu.KVM).mark(&kvm)
	if tcg.Extra[emulated] != 1 || kvm.Extra != nil {
		t.Errorf("TCG: %v, KVM: %v", tcg.Extra, kvm.Extra)
	}
}
