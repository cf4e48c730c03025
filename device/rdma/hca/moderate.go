// Side: data

package hca

import (
	"time"

	"github.com/vnicd/vnicd/device/loop"
)

// Moderation of a CQ's events (MODIFY_CQ): an event that is due is delayed until there are more completions, or a time
// has passed. The producer counts, the engine of the CQ's event queue measures the time, and whichever is first resets
// cq.delayed and posts the event:
//
//	due --the arm word was set--> delayed, eventLater --count or timer--> eventNow
//
// The arm word is reset when the event is due, so that the driver, which may ask for the next event any time, gets one
// event for both. A process that ends leaves the event to the next one, which posts it at once.

// Bits of a completion's eventNode.
const (
	eventNow   = 1 << iota
	eventLater // the timer is to be armed
)

// moderation is immutable, except for the timer, which belongs to the engine of the CQ's event queue.
type moderation struct {
	count  uint16 // completions, at least 2
	period uint16 // microseconds, at least 1
	timer  *loop.Timer
}

// newModerationTimer makes the timer that a CQ keeps.
func (c *cq) newModerationTimer() *loop.Timer {
	e := c.ceq.engine
	return e.loop.NewTimer(func(int64) { c.hasten() }, loop.Name("hca cq timer"), e.faultOption(),
		loop.Metered(&e.dev.meter))
}

// moderate replaces the moderation; nil: there is none. A delayed event is posted.
func (c *cq) moderate(m *moderation) {
	c.moderation.Store(m)
	c.hasten()
}

// due posts an event, or delays it; the producer.
func (c *cq) due() {
	m := c.moderation.Load()
	switch {
	case m == nil:
		c.ceq.post(&c.comp, eventNow)
	case c.delayed.Load():
		c.counted()
	default:
		c.first = c.prod
		c.delayed.Store(true)
		c.ceq.post(&c.comp, eventLater)
	}
}

// counted posts a delayed event if there are enough completions; the producer.
func (c *cq) counted() {
	if m := c.moderation.Load(); m == nil || (c.prod-c.first)&c.r.mask >= uint32(m.count)-1 {
		c.hasten()
	}
}

// hasten posts a delayed event, if there is one; any thread.
func (c *cq) hasten() {
	if c.delayed.CompareAndSwap(true, false) {
		c.ceq.post(&c.comp, eventNow)
	}
}

// expect arms the timer for a delayed event; on the engine of the event queue.
func (c *cq) expect() {
	switch m := c.moderation.Load(); {
	case !c.delayed.Load():
	case m == nil:
		c.hasten()
	default:
		m.timer.Arm(c.ceq.engine.loop.Now() + int64(time.Duration(m.period)*time.Microsecond))
	}
}
