package rstream

import (
	"sync"
	"time"
)

// deadline is one of a connection's deadlines. Its zero value is not usable, see newDeadline.
type deadline struct {
	mu      sync.Mutex
	timer   *time.Timer
	setting int           // number of calls of set, so that the timer of an earlier one has no effect
	expired chan struct{} // closed when the deadline passes; replaced by set if it has passed
	passed  bool
}

func newDeadline() *deadline { return &deadline{expired: make(chan struct{})} }

// set sets the deadline; the zero time is none.
func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.setting++
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	if d.passed {
		d.passed, d.expired = false, make(chan struct{})
	}
	if t.IsZero() {
		return
	}
	left := time.Until(t)
	if left <= 0 {
		d.pass()
		return
	}
	setting := d.setting
	d.timer = time.AfterFunc(left, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.setting == setting {
			d.pass()
		}
	})
}

// pass ends waits. d.mu is held.
func (d *deadline) pass() {
	d.passed = true
	close(d.expired)
}

// done returns a channel that is closed when the deadline has passed.
func (d *deadline) done() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.expired
}

// over reports whether the deadline has passed.
func (d *deadline) over() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.passed
}

// stop ends the timer, for a connection that is closed.
func (d *deadline) stop() { d.set(time.Time{}) }
