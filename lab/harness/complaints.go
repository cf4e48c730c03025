package harness

import (
	"context"
	"regexp"
	"strings"

	"github.com/vnicd/vnicd/hypervisor/qemu"
)

// complaint matches the lines with which the kernel, or one of its checks, reports a defect, and those with which a
// check says that it turned itself off: then it no longer checks anything.
var complaint = regexp.MustCompile(`\b(WARNING:|BUG:|BUG [\w-]+ \(|kernel BUG at|pagealloc:|Oops|general protection fault|` +
	`[Kk]ernel panic|Call Trace:|refcount_t:|UBSAN:|KASAN:|KCSAN:|ODEBUG:|list_(add|del) corruption|` +
	`INFO: task .* blocked|soft lockup|rcu: INFO|unregister_netdevice: waiting|leaked|Tainted: .*W|` +
	`unreferenced object|new suspected memory leaks|trying to register non-static key|` +
	`lockdep is turned off|turning off the locking correctness validator|Disabling lock debugging|` +
	`[Mm]emory leak detector disabled)`)

// Reports of several lines that Complaints judges as a whole.
var (
	race        = regexp.MustCompile(`\bBUG: KCSAN:`)
	raceEnd     = regexp.MustCompile(`={40,}$`)
	ours        = regexp.MustCompile(`\[vnicd\w*\]`)
	noMemory    = regexp.MustCompile(`: vmalloc error: |: page allocation failure: |FAULT_INJECTION: forcing a failure`)
	noMemoryEnd = regexp.MustCompile(`</TASK>`)
	// A process's own page fault that found no memory is repeated.
	noMemoryLine = regexp.MustCompile(`Huh VM_FAULT_OOM leaked out to the #PF handler\. Retrying PF`)
)

// longestReport bounds the lines of such a report.
const longestReport = 150

// A test writes these lines to a guest's kernel log around the injection of failures. Between them the report of a
// failed allocation is what the test asked for.
const (
	InjectionBegins = "vnicd test: failures are injected from here"
	InjectionEnds   = "vnicd test: no failure is injected from here"
)

// KernelLog is the guest's kernel log.
func KernelLog(ctx context.Context, m *qemu.Machine) (string, error) { return m.Run(ctx, "dmesg") }

// KernelComplaints returns the lines of the guest's kernel log that report a defect.
func KernelComplaints(ctx context.Context, m *qemu.Machine) ([]string, error) {
	text, err := KernelLog(ctx, m)
	if err != nil {
		return nil, err
	}
	return Complaints(text), nil
}

// Complaints returns the lines of a kernel log or console log that report a defect. Of KCSAN's data races it returns
// whole reports, and only those that name our module: the kernel has many that are deliberate and not marked.
func Complaints(log string) []string {
	var bad []string
	injected := false
	lines := strings.Split(log, "\n")
	for i := 0; i < len(lines); i++ {
		switch l := strings.TrimRight(lines[i], "\r"); {
		case strings.Contains(l, InjectionBegins):
			injected = true
		case strings.Contains(l, InjectionEnds):
			injected = false
		case race.MatchString(l):
			report, n := reportAt(lines[i:], raceEnd)
			if ours.MatchString(strings.Join(report, "\n")) {
				bad = append(bad, report...)
			}
			i += n - 1
		case injected && noMemory.MatchString(l):
			_, n := reportAt(lines[i:], noMemoryEnd)
			i += n - 1
		case injected && noMemoryLine.MatchString(l):
		case complaint.MatchString(l):
			bad = append(bad, l)
		}
	}
	return bad
}

// reportAt returns the lines up to the first one that matches end, and their number. Without such a line it returns as
// many as a report may have, but only the first counts as read.
func reportAt(lines []string, end *regexp.Regexp) (report []string, read int) {
	lines = lines[:min(len(lines), longestReport)]
	for i, l := range lines {
		if i > 0 && end.MatchString(strings.TrimRight(l, "\r")) {
			return lines[:i+1], i + 1
		}
	}
	return lines, 1
}
