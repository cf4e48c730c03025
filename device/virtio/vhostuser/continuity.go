package vhostuser

import (
	"sync"
	"time"
)

// Continuity counts what became of the previous process's connections (CO-1, CO-2); servers share it. The zero value is
// ready for use.
type Continuity struct {
	// Resumed, if set before the first use, is called when no connection is being resumed any more: devices that send to
	// each other find each other from then on. It is called on any goroutine, perhaps several times.
	Resumed func()

	mu sync.Mutex
	s  ContinuityStatus
}

// ContinuityStatus is the state of a Continuity.
type ContinuityStatus struct {
	Pending   int           // connections that are being resumed
	Continued int           // running devices that go on where the previous process stopped them
	Silence   time.Duration // the longest time for which one of these stood still
	Revived   int           // devices with a driver that go on where the previous process was killed
	Lost      int           // devices with a driver that do not go on: it begins anew, or has lost its device
}

// Status returns the present state.
func (c *Continuity) Status() ContinuityStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.s
}

// Hold keeps Resumed from being called until release: the caller is about to begin to resume connections.
func (c *Continuity) Hold() (release func()) {
	c.begin()
	return func() { c.end(anew, 0) }
}

// begin and end enclose the resumption of a connection. end is called once for each begin. Both accept nil.
func (c *Continuity) begin() {
	if c != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.s.Pending++
	}
}

func (c *Continuity) end(how outcome, silence time.Duration) {
	if c != nil && c.count(how, silence) == 0 && c.Resumed != nil {
		c.Resumed()
	}
}

// count counts a connection that was resumed, and returns how many are left.
func (c *Continuity) count(how outcome, silence time.Duration) (left int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.Pending--
	switch how {
	case continued:
		c.s.Continued++
		c.s.Silence = max(c.s.Silence, silence)
	case revived:
		c.s.Revived++
	case lost:
		c.s.Lost++
	}
	return c.s.Pending
}

// outcome is what became of a device with a driver.
type outcome int

const (
	anew      outcome = iota // there was no driver, or no connection
	continued                // from what the previous process handed over
	revived                  // from what it kept when it was killed
	lost                     // not at all, though it had a driver
)
