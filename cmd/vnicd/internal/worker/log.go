package worker

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strings"
	"time"
	"unicode"

	"github.com/hashicorp/go-hclog"
)

// maxLine bounds the lines that the daemon takes from a worker's log, in bytes.
const maxLine = 2048

// budget bounds their number: a burst, and then so many per second. Lines of level info and above have one, those of
// debug and trace another. A worker limits the lines about each of its sources itself (package loglimit); this is for
// one that was taken over.
type budget struct {
	burst, rate int
	tokens      int
	filled      time.Time
	suppressed  int
}

func newBudgets(now time.Time) (loud, quiet *budget) {
	return &budget{burst: 100, rate: 10, tokens: 100, filled: now},
		&budget{burst: 2000, rate: 200, tokens: 2000, filled: now}
}

func (b *budget) allow(now time.Time) bool {
	if n := now.Sub(b.filled) / (time.Second / time.Duration(b.rate)); n > 0 {
		b.tokens = int(min(int64(b.tokens)+int64(n), int64(b.burst)))
		b.filled = b.filled.Add(n * (time.Second / time.Duration(b.rate)))
	}
	if b.tokens == 0 {
		b.suppressed++
		return false
	}
	b.tokens--
	return true
}

// newLogger returns the logger of a worker process: lines without time and name, which the daemon adds.
func newLogger(w io.Writer, level hclog.Level) hclog.Logger {
	return hclog.New(&hclog.LoggerOptions{Output: w, Level: level, DisableTime: true})
}

// levels are hclog's names, as it writes them.
var levels = map[string]hclog.Level{"TRACE": hclog.Trace, "DEBUG": hclog.Debug, "INFO": hclog.Info, "WARN": hclog.Warn,
	"ERROR": hclog.Error}

// relayLog passes a worker's lines to the daemon's log until r ends. Lines that are none of hclog's, such as the stack
// of a crash, become warnings.
func relayLog(r io.Reader, log hclog.Logger, now func() time.Time) {
	b := bufio.NewReaderSize(r, maxLine)
	loud, quiet := newBudgets(now())
	for rest := false; ; {
		line, err := b.ReadSlice('\n') // ErrBufferFull: a long line, whose rest is dropped
		skip := rest
		rest = errors.Is(err, bufio.ErrBufferFull)
		if text := clean(line); !skip && text != "" {
			level, text := split(text)
			from := loud
			if level < hclog.Info {
				from = quiet
			}
			if from.allow(now()) {
				var args []any
				if from.suppressed > 0 {
					args, from.suppressed = []any{"suppressed", from.suppressed}, 0
				}
				log.Log(level, text, args...)
			}
		}
		if err != nil && !rest {
			return
		}
	}
}

// split separates hclog's level from the rest of a line.
func split(line string) (hclog.Level, string) {
	if name, text, ok := strings.Cut(strings.TrimPrefix(line, "["), "]"); ok && line[0] == '[' {
		if l, ok := levels[name]; ok {
			return l, strings.TrimSpace(text)
		}
	}
	return hclog.Warn, line
}

// clean replaces what could deceive a reader of the log: control characters and invalid text.
func clean(line []byte) string {
	return strings.TrimRight(strings.Map(func(r rune) rune {
		switch {
		case r == '\t':
			return ' '
		case !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, string(bytes.TrimRight(line, "\r\n"))), " ")
}
