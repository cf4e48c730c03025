// Package ways selects the settings with which tests run. By default each rig has the engines that its test requests,
// and packages that use Tests run once with frames and once with the local path. The environment variable VNICD_WAYS
// forces settings:
//
//	VNICD_WAYS="engines=2 spin=1ms local-copy=false segmentation=false ecn=false short-path=true selective-repeat=false
//	            journal=true passes=1"
//
// Settings not named keep their defaults; passes bounds how often Tests runs the tests. `make test-ways` runs a set in
// which every pair of settings occurs.
package ways

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Env is the variable's name.
const Env = "VNICD_WAYS"

// settings are the forced settings; nil: not forced.
type settings struct {
	engines                  *int
	spin                     *time.Duration
	local, segmentation, ecn *bool
	short, selective         *bool
	journal                  *bool
	passes                   *int
}

var forced = must(parse(os.Getenv(Env)))

func must(s settings, err error) settings {
	if err != nil {
		panic(err) // a run with other settings than requested must not pass
	}
	return s
}

func parse(text string) (s settings, err error) {
	for _, f := range strings.Fields(text) {
		key, value, _ := strings.Cut(f, "=")
		switch key {
		case "engines":
			s.engines, err = take(strconv.Atoi(value))
			if err == nil && *s.engines < 1 {
				err = fmt.Errorf("%q is not a number of engines", value)
			}
		case "spin":
			s.spin, err = take(time.ParseDuration(value))
		case "local-copy":
			s.local, err = take(strconv.ParseBool(value))
		case "segmentation":
			s.segmentation, err = take(strconv.ParseBool(value))
		case "ecn":
			s.ecn, err = take(strconv.ParseBool(value))
		case "short-path":
			s.short, err = take(strconv.ParseBool(value))
		case "selective-repeat":
			s.selective, err = take(strconv.ParseBool(value))
		case "journal":
			s.journal, err = take(strconv.ParseBool(value))
		case "passes":
			s.passes, err = take(strconv.Atoi(value))
			if err == nil && *s.passes < 1 {
				err = fmt.Errorf("%q is not a number of passes", value)
			}
		default:
			err = fmt.Errorf("no setting %q", key)
		}
		if err != nil {
			return s, fmt.Errorf("%s: %w", Env, err)
		}
	}
	return s, nil
}

func take[T any](v T, err error) (*T, error) { return &v, err }

func or[T any](p *T, otherwise T) T {
	if p != nil {
		return *p
	}
	return otherwise
}

// Engines returns the number of loops of a rig whose test requests n.
func Engines(n int) int { return or(forced.engines, n) }

// Spin returns how long loops poll before they sleep.
func Spin(d time.Duration) time.Duration { return or(forced.spin, d) }

// Segmentation reports whether tunnels send messages of several datagrams.
func Segmentation() bool { return or(forced.segmentation, true) }

// ECN reports whether RC congestion control uses ECN marks and CNPs.
func ECN() bool { return or(forced.ecn, true) }

// SelectiveRepeat reports whether RC retransmits only lost packets.
func SelectiveRepeat() bool { return or(forced.selective, true) }

// ShortPath reports whether frames of host ports may take the short path.
func ShortPath() bool { return or(forced.short, true) }

// LocalCopy reports whether RDMA between VMs of one host is copied from memory to memory.
func LocalCopy() bool { return or(forced.local, true) }

// Config returns lines for a daemon's configuration file with the forced settings, except those that text has
// already.
func Config(text string) string {
	var b strings.Builder
	add := func(key string, value any) {
		if !strings.Contains("\n"+text, "\n"+key+":") {
			fmt.Fprintf(&b, "%s: %v\n", key, value)
		}
	}
	if forced.engines != nil {
		add("engines", *forced.engines)
	}
	if forced.spin != nil {
		add("spin", *forced.spin)
	}
	if forced.ecn != nil {
		add("ecn", *forced.ecn)
	}
	if forced.short != nil {
		add("short-path", *forced.short)
	}
	if forced.journal != nil {
		add("journal", *forced.journal)
	}
	var debug []string
	for _, f := range []struct {
		key   string
		value *bool
	}{{"local-copy", forced.local}, {"segmentation", forced.segmentation}, {"selective-repeat", forced.selective}} {
		if f.value != nil {
			debug = append(debug, fmt.Sprintf("%s: %v", f.key, *f.value))
		}
	}
	if debug != nil {
		add("debug", "{"+strings.Join(debug, ", ")+"}")
	}
	return b.String()
}

// Tests is a testing.M for goleak.VerifyTestMain. It runs the tests with frames, once more with the local path, and
// then with journals. Benchmarks and fuzzing run once.
type Tests struct {
	M       *testing.M
	Local   *bool // whether the tests' devices may copy instead of sending frames
	Journal *bool // whether they keep a journal; nil: they cannot
}

// Run runs the tests and returns the exit status of the worst run.
func (t Tests) Run() int {
	*t.Local = or(forced.local, *t.Local)
	if t.Journal != nil {
		*t.Journal = or(forced.journal, *t.Journal)
	}
	code := t.M.Run()
	for _, again := range t.more() {
		fmt.Println("running again with", again.with)
		*again.setting = true
		code = max(code, t.M.Run())
	}
	return code
}

// pass is one more run of the tests, with one more setting on.
type pass struct {
	with    string
	setting *bool
}

// more returns the runs that follow the first.
func (t Tests) more() []pass {
	once := forced.local != nil
	for _, f := range []string{"test.bench", "test.fuzz"} {
		once = once || flag.Lookup(f).Value.String() != ""
	}
	if once {
		return nil
	}
	passes := []pass{{"the local path", t.Local}}
	if t.Journal != nil && forced.journal == nil {
		passes = append(passes, pass{"journals", t.Journal})
	}
	return passes[:min(len(passes), or(forced.passes, len(passes)+1)-1)]
}
