// Side: data

package hca

import (
	"sync/atomic"
	"time"
)

// pacer spreads the send requests of a VM's queue pairs over time, across loops: each request reserves the next
// free time slot (ITU-T I.371's generic cell rate algorithm, with reservations instead of refusals). So waiting
// queue pairs send in the order in which they asked, and each asks once.
type pacer struct {
	unit int64        // ns per request
	next atomic.Int64 // the next free slot
}

// paceBurst is how much sending time a VM accumulates while it is idle.
const paceBurst = int64(time.Millisecond)

// newPacer allows rate requests a second; nil: any number.
func newPacer(rate int) *pacer {
	if rate == 0 {
		return nil
	}
	return &pacer{unit: int64(time.Second) / int64(rate)}
}

// reserve returns when the current request may be sent: at now or later.
func (p *pacer) reserve(now int64) int64 {
	for {
		next := p.next.Load()
		at := max(next, now-paceBurst)
		if p.next.CompareAndSwap(next, at+p.unit) {
			return max(at, now)
		}
	}
}

// mayFetch reports whether q may fetch its next send request now. If not, it arms the timer for the reserved time.
func (q *qp) mayFetch(p *pacer) bool {
	now := q.engine.loop.Now()
	if q.paceAt == 0 {
		q.paceAt = p.reserve(now)
	}
	if q.paceAt > now {
		q.arm()
		return false
	}
	q.paceAt = 0
	return true
}
