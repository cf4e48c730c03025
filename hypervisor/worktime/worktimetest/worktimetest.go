// Package worktimetest has a clock for tests of worktime.Account, which only the test moves.
package worktimetest

import (
	"slices"
	"sync"
	"time"
)

// Clock is a worktime.Clock and the processor time of all threads.
type Clock struct {
	mu     sync.Mutex // guards the fields below
	now    time.Time
	thread time.Duration
	step   time.Duration
	timers []*timer
}

type timer struct {
	at time.Time
	f  func()
}

// New returns a Clock. Each reading of Thread takes step more than the one before.
func New(step time.Duration) *Clock { return &Clock{now: time.Unix(1000, 0), step: step} }

// Now implements worktime.Clock.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// AfterFunc implements worktime.Clock.
func (c *Clock) AfterFunc(after time.Duration, f func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &timer{at: c.now.Add(after), f: f}
	if after <= 0 {
		go f()
		return func() bool { return false }
	}
	c.timers = append(c.timers, t)
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		before := len(c.timers)
		c.timers = slices.DeleteFunc(c.timers, func(x *timer) bool { return x == t })
		return len(c.timers) < before
	}
}

// Advance moves the time and runs the timers that are due.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	c.now = c.now.Add(d)
	var due []*timer
	c.timers = slices.DeleteFunc(c.timers, func(t *timer) bool {
		if t.at.After(c.now) {
			return false
		}
		due = append(due, t)
		return true
	})
	c.mu.Unlock()
	for _, t := range due {
		t.f()
	}
}

// Timers is the number of timers that are not due.
func (c *Clock) Timers() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.timers)
}

// Thread is the processor time of the calling thread.
func (c *Clock) Thread() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.thread += c.step
	return c.thread
}

// Work lets the threads work for d.
func (c *Clock) Work(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.thread += d
}
