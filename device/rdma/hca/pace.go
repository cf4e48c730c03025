// Side: data

package hca

import (
	"sync/atomic"
	"time"
)

// pacer spreads the send requests of a VM's queue pairs over time, whatever loops they live on: each takes the next
// free moment (ITU-T I.371's generic cell rate algorithm, with reservations instead of refusals). So queue pairs
// that wait have their turns in the order in which they asked, and none looks twice.
type pacer struct {
	unit int64        // ns that a request takes
	next atomic.Int64 // the moment that is free
}

// paceBurst is how much a VM that was idle may be ahead.
const paceBurst = int64(time.Millisecond)

// newPacer allows rate requests a second; nil: any number.
func newPacer(rate int) *pacer {
	if rate == 0 {
		return nil
	}
	return &pacer{unit: int64(time.Second) / int64(rate)}
}

// reserve returns when the request that is at hand may go: at now or later.
func (p *pacer) reserve(now int64) int64 {
	for {
		next := p.next.Load()
		at := max(next, now-paceBurst)
		if p.next.CompareAndSwap(next, at+p.unit) {
			return max(at, now)
		}
	}
}

// mayFetch tells whether q may take its next send request now. If not, it gets a turn when it may.
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
