// Package testlog provides a log that tests can read while it is written.
package testlog

import (
	"bytes"
	"sync"

	"github.com/hashicorp/go-hclog"
)

// Log keeps everything written to it. The zero value is empty; any goroutine may use it.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// String returns everything written so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Logger returns a logger that writes to l.
func (l *Log) Logger() hclog.Logger { return hclog.New(&hclog.LoggerOptions{Output: l}) }
