// Package loglimit keeps a guest, a front end or a neighbour from filling the host's log. Whoever logs about one of
// these does so through a logger of this package; all loggers derived from one share its limits.
package loglimit

import (
	"io"
	"log"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
)

// Limits of one source and level: Burst lines at once, then one for each Interval.
const (
	Burst    = 20
	Interval = time.Second
)

// logger limits the lines of level Info and above. Those of Debug and Trace are for an operator who asked for them, and
// pass.
type logger struct {
	hclog.Logger
	limits *limits
}

// New returns a logger that passes lines to l within the limits. A line after suppressed ones has their number as
// "suppressed". Each level has limits of its own, so that a flood of warnings hides no error. If l limits already, it
// is returned as it is; nil discards all lines.
func New(l hclog.Logger) hclog.Logger { return newAt(l, time.Now) }

// Another returns a logger to the same output with limits of its own, for another source. For an l without limits it is
// New.
func Another(l hclog.Logger) hclog.Logger {
	if x, ok := l.(*logger); ok {
		return newAt(x.Logger, x.limits.now)
	}
	return New(l)
}

func newAt(l hclog.Logger, now func() time.Time) hclog.Logger {
	switch l := l.(type) {
	case nil:
		return hclog.NewNullLogger()
	case *logger:
		return l
	}
	return &logger{l, &limits{now: now}}
}

// limits are those of one source.
type limits struct {
	now func() time.Time

	mu     sync.Mutex
	levels [hclog.Error + 1]bucket
}

type bucket struct {
	tokens     int
	last       time.Time
	suppressed int
}

// allow takes a token and returns the number of lines suppressed before.
func (x *limits) allow(level hclog.Level) (suppressed int, ok bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	b, now := &x.levels[level], x.now()
	if b.last.IsZero() {
		b.tokens, b.last = Burst, now
	}
	if n := int64(now.Sub(b.last) / Interval); n > 0 {
		b.tokens = int(min(int64(b.tokens)+n, Burst))
		b.last = b.last.Add(time.Duration(n) * Interval)
	}
	if b.tokens == 0 {
		b.suppressed++
		return 0, false
	}
	b.tokens--
	suppressed, b.suppressed = b.suppressed, 0
	return suppressed, true
}

// Log implements hclog.Logger.
func (l *logger) Log(level hclog.Level, msg string, args ...any) {
	if level > hclog.Error || level != hclog.NoLevel && level < l.GetLevel() {
		return // as the logger below would
	}
	if level >= hclog.Info {
		n, ok := l.limits.allow(level)
		if !ok {
			return
		}
		if n > 0 {
			args = append(args[:len(args):len(args)], "suppressed", n)
		}
	}
	l.Logger.Log(level, msg, args...)
}

// Info implements hclog.Logger.
func (l *logger) Info(msg string, args ...any) { l.Log(hclog.Info, msg, args...) }

// Warn implements hclog.Logger.
func (l *logger) Warn(msg string, args ...any) { l.Log(hclog.Warn, msg, args...) }

// Error implements hclog.Logger.
func (l *logger) Error(msg string, args ...any) { l.Log(hclog.Error, msg, args...) }

// With implements hclog.Logger.
func (l *logger) With(args ...any) hclog.Logger { return &logger{l.Logger.With(args...), l.limits} }

// Named implements hclog.Logger.
func (l *logger) Named(name string) hclog.Logger { return &logger{l.Logger.Named(name), l.limits} }

// ResetNamed implements hclog.Logger.
func (l *logger) ResetNamed(name string) hclog.Logger {
	return &logger{l.Logger.ResetNamed(name), l.limits}
}

// StandardLogger implements hclog.Logger.
func (l *logger) StandardLogger(o *hclog.StandardLoggerOptions) *log.Logger {
	return log.New(l.StandardWriter(o), "", 0)
}

// StandardWriter implements hclog.Logger. Lines count as of the level that o forces, or as information.
func (l *logger) StandardWriter(o *hclog.StandardLoggerOptions) io.Writer {
	w := &writer{l.Logger.StandardWriter(o), l.limits, hclog.Info}
	if o != nil && o.ForceLevel >= hclog.Info && o.ForceLevel <= hclog.Error {
		w.level = o.ForceLevel
	}
	return w
}

// writer passes one line with each Write, as package log does.
type writer struct {
	to     io.Writer
	limits *limits
	level  hclog.Level
}

func (w *writer) Write(line []byte) (int, error) {
	if _, ok := w.limits.allow(w.level); !ok {
		return len(line), nil
	}
	return w.to.Write(line)
}
