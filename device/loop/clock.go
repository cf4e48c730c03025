package loop

import (
	"sync"
	"time"
)

// Clock gives loops their time: monotonic nanoseconds, never zero.
type Clock interface {
	Now() int64
}

// processStart anchors the default clock, minus one second so that no reading is ever zero, which timers use as "not
// armed".
var processStart = time.Now().Add(-time.Second)

// Monotonic returns the time of the default clock: monotonic nanoseconds since a moment before the process started.
func Monotonic() int64 { return int64(time.Since(processStart)) }

type realClock struct{}

func (realClock) Now() int64 { return Monotonic() }

// ManualClock is a Clock for tests: only Advance moves it. A started loop with a ManualClock sleeps until it has work
// or the clock moves.
type ManualClock struct {
	mu    sync.Mutex
	now   int64
	loops map[*Loop]struct{}
}

// NewManualClock makes a clock that shows start nanoseconds; start must be positive.
func NewManualClock(start int64) *ManualClock {
	if start <= 0 {
		panic("loop: a manual clock starts at a positive time")
	}
	return &ManualClock{now: start, loops: make(map[*Loop]struct{})}
}

// Now implements Clock.
func (c *ManualClock) Now() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// Advance moves the clock by d and wakes the loops that use it.
func (c *ManualClock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now += int64(d)
	for l := range c.loops {
		l.wake()
	}
}

func (c *ManualClock) add(l *Loop) {
	c.mu.Lock()
	c.loops[l] = struct{}{}
	c.mu.Unlock()
}

func (c *ManualClock) remove(l *Loop) {
	c.mu.Lock()
	delete(c.loops, l)
	c.mu.Unlock()
}
