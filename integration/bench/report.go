package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// report prints the table as results arrive and writes them as JSON lines, and in the end as a plot.
type report struct {
	out  io.Writer
	file *os.File
	enc  *json.Encoder
	rows []plotted
	err  error // first write error
}

// machine describes the machine of a run.
type machine struct {
	Kernel string `json:"kernel"`
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"`
	Load   string `json:"load"` // at the start of the run
	Go     string `json:"go"`
	Commit string `json:"commit,omitempty"`
	Cycles string `json:"cycles,omitempty"` // why perf does not count them
	// Rows that trained the compiler's profile.
	Trained []string `json:"trained,omitempty"`
}

func thisMachine() machine {
	line := func(path string) string {
		b, _ := os.ReadFile(path) // empty if it cannot be read
		s, _, _ := strings.Cut(string(b), "\n")
		return s
	}
	m := machine{Kernel: line("/proc/sys/kernel/osrelease"), Cores: runtime.NumCPU(), Load: line("/proc/loadavg"),
		Go: runtime.Version()}
	info, _ := os.ReadFile("/proc/cpuinfo")
	for l := range strings.Lines(string(info)) {
		if k, v, ok := strings.Cut(l, ":"); ok && strings.TrimSpace(k) == "model name" {
			m.CPU = strings.TrimSpace(v)
			break
		}
	}
	if err := cyclesCounted(); err != nil {
		m.Cycles = err.Error()
	}
	m.Trained, _ = trainedRows(trainedPath) // none if the file cannot be read
	if out, err := exec.Command("git", "describe", "--always", "--dirty").Output(); err == nil {
		m.Commit = strings.TrimSpace(string(out))
	}
	return m
}

// line is the JSON of one row. docs/benchmarks.md describes the fields.
type line struct {
	Row          string     `json:"row"`
	What         string     `json:"what"`
	Unit         string     `json:"unit"`
	Ours         float64    `json:"ours"`
	AnchorWhat   string     `json:"anchor_what,omitempty"`
	Anchor       float64    `json:"anchor,omitempty"`
	Ratio        float64    `json:"ratio,omitempty"`
	Verdict      verdict    `json:"verdict,omitempty"`
	Short        float64    `json:"short,omitempty"` // how far the median misses a goal, as a part of it
	Goals        []goalLine `json:"goals,omitempty"`
	Spread       float64    `json:"spread"`
	AnchorSpread float64    `json:"anchor_spread,omitempty"`
	// Processor time of the whole machine per unit of work.
	Per          string             `json:"per"`
	CPU          float64            `json:"cpu_ns"`
	AnchorCPU    float64            `json:"anchor_cpu_ns,omitempty"`
	Stolen       float64            `json:"stolen,omitempty"` // the largest part of the machine's time in a round
	Extra        map[string]float64 `json:"extra,omitempty"`
	Rounds       []float64          `json:"rounds"`
	AnchorRounds []float64          `json:"anchor_rounds,omitempty"`
	CPURounds    []float64          `json:"cpu_ns_rounds"`
	// Of the anchor.
	AnchorCPURounds []float64 `json:"anchor_cpu_ns_rounds,omitempty"`
}

// goalLine is the JSON of one goal.
type goalLine struct {
	Goal       string   `json:"goal"`
	Low        *float64 `json:"low,omitempty"` // absent: not finite
	High       *float64 `json:"high,omitempty"`
	Confidence float64  `json:"confidence"`
	Verdict    verdict  `json:"verdict"`
}

// failureLine is the JSON of a row that could not be measured.
type failureLine struct {
	Row   string `json:"row"`
	Error string `json:"error"`
}

const format = "%-22s %-11s %8s %8s %7s  %-18s %-14s %-14s %-11s %-26s %s\n"

func newReport(path string, out io.Writer) (*report, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	r := &report{out: out, file: f, enc: json.NewEncoder(f)}
	r.enc.SetEscapeHTML(false)
	m := thisMachine()
	r.json(m)
	r.printf("%s, %d cores, Linux %s, %s; load %s\n", m.CPU, m.Cores, m.Kernel, m.Go, m.Load)
	var load float64
	if _, err := fmt.Sscan(m.Load, &load); err == nil && load > 0.5 {
		r.printf("This machine has other load: rows that need two cores at once are measured too low, and the spread is large.\n")
	}
	if m.Cycles != "" {
		r.printf("Figures show time but no cycles, which are not counted here (%s).\n", m.Cycles)
	}
	if len(m.Trained) > 0 {
		r.printf("Rows that trained the compiler's profile:\n%s\n", wrapped(m.Trained, 118))
	}
	return r, nil
}

// columns ends the head.
func (r *report) columns() {
	r.printf("\n")
	r.printf(format, "row", "unit", "ours", "anchor", "ratio", "goal", "verdict", "interval", "spread +-%",
		"machine, ns per unit", "what / anchor")
}

func (r *report) printf(format string, args ...any) {
	_, err := fmt.Fprintf(r.out, format, args...)
	r.err = errors.Join(r.err, err)
}

func (r *report) json(v any) { r.err = errors.Join(r.err, r.enc.Encode(v)) }

func (r *report) add(row Row, res *Result) {
	l := line{
		Row: row.Name, What: row.What, Unit: row.Unit, Ours: median(res.Ours), Spread: spread(res.Ours),
		Extra: res.Extra, Rounds: res.Ours, AnchorRounds: res.Anchor,
	}
	cpu := l.account(res)
	what, anchor, ratio, sp := row.What, "", "", percent(l.Spread)
	if len(res.Anchor) > 0 {
		l.AnchorWhat, l.Anchor, l.Ratio, l.AnchorSpread = row.Anchor, median(res.Anchor), finite(median(res.ratios())),
			spread(res.Anchor)
		what += " / " + row.Anchor
		anchor, ratio, sp = number(l.Anchor), times(l.Ratio), sp+" "+percent(l.AnchorSpread)
	}
	var goals []string
	shown, bounds := "", ""
	all, v, decisive := res.judge(row.Goals)
	r.rows = append(r.rows, plotted{row: row, res: res, goals: all})
	if len(all) > 0 {
		for i := range all {
			j := &all[i]
			goals = append(goals, j.Goal.describe())
			l.Goals = append(l.Goals, goalLine{j.Goal.describe(), finiteOnly(j.Low), finiteOnly(j.High), j.Confidence,
				j.Verdict})
		}
		l.Verdict, l.Short = v, finite(res.short(row.Goals))
		shown, bounds = v.shows(l.Short), all[decisive].describe()
	}
	r.printf(format, row.Name, row.Unit, number(l.Ours), anchor, ratio, strings.Join(goals, ", "), shown, bounds, sp,
		cpu, what)
	var extras []string
	if l.Stolen >= 0.01 {
		extras = append(extras, fmt.Sprintf("the hypervisor took up to %s%% of a round", percent(l.Stolen)))
	}
	if len(res.Extra) > 0 {
		for k, v := range res.Extra {
			extras = append(extras, k+" "+number(v))
		}
		slices.Sort(extras)
	}
	if len(extras) > 0 {
		r.printf("%-22s %s\n", "", strings.Join(extras, ", "))
	}
	r.json(l)
}

// account fills in the machine's processor time and returns it for the table: ours, the anchor's, the unit.
func (l *line) account(res *Result) string {
	each := func(all []work) (ns []float64) {
		for i := range all {
			ns = append(ns, all[i].perUnit())
			l.Per, l.Stolen = all[i].unit, max(l.Stolen, all[i].stolen())
		}
		return ns
	}
	l.CPURounds, l.AnchorCPURounds = each(res.OursWork), each(res.AnchorWork)
	if len(l.CPURounds) == 0 {
		return ""
	}
	l.CPU = median(l.CPURounds)
	if len(l.AnchorCPURounds) == 0 {
		return number(l.CPU) + " /" + l.Per
	}
	l.AnchorCPU = median(l.AnchorCPURounds)
	return number(l.CPU) + " " + number(l.AnchorCPU) + " /" + l.Per
}

func (r *report) failure(row Row, err error) {
	r.printf("%-22s FAILED: %v\n", row.Name, err)
	r.rows = append(r.rows, plotted{row: row, failed: err.Error()})
	r.json(failureLine{row.Name, err.Error()})
}

// close writes the plot, too.
func (r *report) close() error {
	return errors.Join(r.err, r.file.Close(), writePlot(plotPath(r.file.Name()), r.rows))
}

// finite replaces infinities and NaN by 0, which JSON omits.
func finite(v float64) float64 {
	if math.IsInf(v, 0) || math.IsNaN(v) {
		return 0
	}
	return v
}

// finiteOnly returns nil for infinities and NaN, which JSON omits.
func finiteOnly(v float64) *float64 {
	if math.IsInf(v, 0) || math.IsNaN(v) {
		return nil
	}
	return &v
}

func times(ratio float64) string {
	if ratio == 0 {
		return "-"
	}
	return number(ratio) + "x"
}

func percent(part float64) string { return fmt.Sprintf("%.0f", 100*part) }

// number writes v with three significant digits, without an exponent.
func number(v float64) string {
	switch a := math.Abs(v); {
	case a >= 1e9:
		return fmt.Sprintf("%.3gG", v/1e9)
	case a >= 1e6:
		return fmt.Sprintf("%.3gM", v/1e6)
	case a >= 1e4:
		return fmt.Sprintf("%.3gk", v/1e3)
	case a >= 100:
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 0.095 || a == 0:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}
