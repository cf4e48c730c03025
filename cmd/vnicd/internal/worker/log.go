package worker

import (
	"bufio"
	"bytes"
	"io"
	"strings"
	"time"
	"unicode"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/hypervisor/loglimit"
)

// Bounds of what the daemon takes from a worker's log, of all levels: bytes of one line, and lines in a burst and
// per second after it. Package loglimit limits the levels that are always logged further.
const (
	maxLine  = 2048
	logBurst = 2000
	logRate  = 200
)

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
	log = loglimit.Another(log)
	b := bufio.NewReaderSize(r, maxLine)
	tokens, refilled := logBurst, now()
	for rest := false; ; {
		line, err := b.ReadSlice('\n') // ErrBufferFull: a long line, whose rest is dropped
		skip := rest
		rest = err == bufio.ErrBufferFull
		if n := int(min(now().Sub(refilled)/(time.Second/logRate), logBurst)); n > 0 {
			tokens, refilled = min(tokens+n, logBurst), now()
		}
		if text := clean(line); !skip && text != "" && tokens > 0 {
			tokens--
			level, text := split(text)
			log.Log(level, text)
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
