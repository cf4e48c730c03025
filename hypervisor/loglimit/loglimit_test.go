package loglimit

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
)

// stage is a limited logger with a clock that stands still.
type stage struct {
	log hclog.Logger
	out bytes.Buffer
	now time.Time
}

func newStage(level hclog.Level) *stage {
	s := &stage{now: time.Unix(1000, 0)}
	s.log = newAt(hclog.New(&hclog.LoggerOptions{Output: &s.out, Level: level}), func() time.Time { return s.now })
	return s
}

// lines returns the lines since the last call.
func (s *stage) lines() []string {
	defer s.out.Reset()
	return strings.Split(strings.TrimSuffix(s.out.String(), "\n"), "\n")
}

// A burst passes, then a line for each interval, with the number of those suppressed; a pause allows one burst, however
// long it is.
func TestLimit(t *testing.T) {
	s := newStage(hclog.Debug)
	for i := range 100 {
		s.log.Warn("mistake", "n", i)
	}
	if l := s.lines(); len(l) != Burst || strings.Contains(strings.Join(l, ""), "suppressed") {
		t.Errorf("%d lines at once, want %d: %q", len(l), Burst, l)
	}
	s.now = s.now.Add(Interval)
	s.log.Warn("one")
	s.log.Warn("another")
	if l := s.lines(); len(l) != 1 || !strings.Contains(l[0], fmt.Sprintf("one: suppressed=%d", 100-Burst)) {
		t.Errorf("a second later: %q", l)
	}
	s.now = s.now.Add(1000 * time.Hour)
	for range 100 {
		s.log.Warn("mistake")
	}
	if l := s.lines(); len(l) != Burst || !strings.Contains(l[0], "suppressed=1") || strings.Contains(l[1], "suppressed") {
		t.Errorf("after a pause: %d lines, %q", len(l), l[:2])
	}
	for range 10 * Burst { // a line in each tenth of an interval
		s.now = s.now.Add(Interval / 10)
		s.log.Warn("slowly")
	}
	if l := s.lines(); len(l) != Burst {
		t.Errorf("%d lines in %v", len(l), Burst*Interval)
	}
}

// Loggers made from a limited one share its limits; levels do not, and neither do other sources.
func TestShared(t *testing.T) {
	s := newStage(hclog.Info)
	for i, l := range []hclog.Logger{s.log, s.log.With("vm", "a"), s.log.Named("hca"),
		s.log.Named("x").ResetNamed("y").With("z", 1), New(s.log)} {
		for range 100 {
			l.Warn("mistake")
			l.Log(hclog.Warn, "mistake")
			l.StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Warn}).Print("mistake")
		}
		if got := s.lines(); i == 0 && len(got) != Burst || i > 0 && got[0] != "" {
			t.Errorf("logger %d: %d lines %q", i, len(got), got[0])
		}
	}
	s.log.Error("an error")
	s.log.Info("a note")
	s.log.Debug("not at this level")
	if got := s.lines(); len(got) != 2 {
		t.Errorf("a flood of warnings hides other levels: %q", got)
	}
	if other := newStage(hclog.Info); true {
		other.log.Warn("another source")
		if got := other.lines(); got[0] == "" {
			t.Error("sources share limits")
		}
	}
}

// Lines that the level hides use up nothing; those of debugging are not limited.
func TestLevels(t *testing.T) {
	s := newStage(hclog.Error)
	for range 100 {
		s.log.Warn("hidden")
	}
	s.log.SetLevel(hclog.Debug)
	s.log.Warn("shown")
	if got := s.lines(); len(got) != 1 || strings.Contains(got[0], "suppressed") {
		t.Errorf("%q", got)
	}
	for range 100 {
		s.log.Debug("much")
	}
	if got := s.lines(); len(got) != 100 {
		t.Errorf("%d lines of debugging", len(got))
	}
	New(nil).Error("nowhere")
}
