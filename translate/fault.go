package translate

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Fault is a miss that waits for its driver (PF-7). The waiting object embeds it, so that raising it allocates nothing
// and a queue is never longer than the number of waiting objects. A waiting object holds no epoch.
type Fault struct {
	// Set by the owner before Raise, unchanged until Done. Miss.Len is the
	// bytes wanted from Miss.Where on, at least 1; Write says that the access
	// changes memory.
	Miss  Miss
	Write bool

	// Done is set once. A goroutine of the server calls it exactly once for each Raise that returned true. It must not
	// block, and may raise the fault again. err is nil if the access is to be retried; otherwise the address is invalid or
	// its memory is gone for good (PF-13).
	Done func(f *Fault, err error)

	waiting atomic.Bool
	raised  time.Time
	next    *Fault // in the queue
}

// Waiting reports whether the fault is raised and not yet served. It becomes false just before Done is called.
func (f *Fault) Waiting() bool { return f.waiting.Load() }

// FaultQueue carries faults from the loops to the driver that serves them: oldest first, each exactly once unless the
// server returns it. Raising is lock-free; any number of goroutines may serve. The zero value is ready for use.
type FaultQueue struct {
	head     atomic.Pointer[Fault] // raised, not yet sorted, newest first
	sleepers atomic.Int32          // servers that wait or are about to
	wakeup   atomic.Pointer[chan struct{}]
	raised   atomic.Uint64
	estimate atomic.Int64 // ns

	mu     sync.Mutex // servers only
	sorted *Fault     // raised before those in head, oldest first
	served uint64
	failed uint64
	times  Histogram
}

// FaultStats counts the faults of a queue. Raised = Served + Failed + Waiting.
type FaultStats struct {
	Raised  uint64
	Served  uint64 // the access was retried
	Failed  uint64 // ended with an error (PF-13)
	Waiting uint64
	Time    Histogram // from Raise to Finish
}

// Raise queues f for the server and returns true; if f is already waiting it does nothing and returns false. Safe from
// any thread; it never blocks and never allocates.
func (q *FaultQueue) Raise(f *Fault) bool {
	if !f.waiting.CompareAndSwap(false, true) {
		return false
	}
	f.raised = time.Now()
	q.raised.Add(1)
	q.push(f)
	return true
}

// Return queues f, which came from Next or TryNext, once more: its server could not serve it yet (HF-2). To its owner
// it has been waiting all the time.
func (q *FaultQueue) Return(f *Fault) { q.push(f) }

func (q *FaultQueue) push(f *Fault) {
	for {
		f.next = q.head.Load()
		if q.head.CompareAndSwap(f.next, f) {
			break
		}
	}
	q.wake()
}

// wake wakes one sleeping server, if there is one. No wake-up is lost: a server announces itself before its last check,
// a raiser queues its fault before it checks for sleepers, and a token that no server has taken stays.
func (q *FaultQueue) wake() {
	if q.sleepers.Load() > 0 {
		select {
		case *q.wakeup.Load() <- struct{}{}:
		default:
		}
	}
}

// TryNext returns the oldest fault, or nil.
func (q *FaultQueue) TryNext() *Fault {
	q.mu.Lock()
	if q.sorted == nil {
		for f := q.head.Swap(nil); f != nil; {
			f.next, q.sorted, f = q.sorted, f, f.next
		}
	}
	f := q.sorted
	if f != nil {
		q.sorted, f.next = f.next, nil
	}
	more := q.sorted != nil
	q.mu.Unlock()
	if more {
		q.wake() // there is at most one token: pass it on
	}
	return f
}

// Next waits for a fault. If ctx ends it returns ctx's error, even if faults are queued.
func (q *FaultQueue) Next(ctx context.Context) (*Fault, error) {
	for {
		if err := ctx.Err(); err != nil {
			q.wake() // we may have taken a token meant for another server
			return nil, err
		}
		if f := q.TryNext(); f != nil {
			return f, nil
		}
		if q.wakeup.Load() == nil {
			c := make(chan struct{}, 1)
			q.wakeup.CompareAndSwap(nil, &c)
		}
		q.sleepers.Add(1)
		f := q.TryNext()
		if f == nil {
			select {
			case <-*q.wakeup.Load():
			case <-ctx.Done():
			}
		}
		q.sleepers.Add(-1)
		if f != nil {
			return f, nil
		}
	}
}

// Finish records the service time and calls f.Done with err. f came from Next or TryNext; it is finished once and then
// belongs to its owner again.
func (q *FaultQueue) Finish(f *Fault, err error) {
	took := time.Since(f.raised)
	q.mu.Lock()
	q.times.Add(took)
	if err == nil {
		q.served++
	} else {
		q.failed++
	}
	// Smoothed like a round-trip time, with gain 1/8.
	old := q.estimate.Load()
	if q.times.Count == 1 {
		old = int64(took)
	}
	q.estimate.Store(old + (int64(took)-old)/8)
	q.mu.Unlock()
	// waiting is cleared before Done is called: the owner retries in Done and may raise the next fault at once.
	done := f.Done
	f.waiting.Store(false)
	done(f, err)
}

// Estimate returns the smoothed time from Raise to Finish, 0 before the first. Safe from any thread.
func (q *FaultQueue) Estimate() time.Duration { return time.Duration(q.estimate.Load()) }

// Stats returns the counters.
func (q *FaultQueue) Stats() FaultStats {
	q.mu.Lock()
	defer q.mu.Unlock()
	raised := q.raised.Load()
	return FaultStats{Raised: raised, Served: q.served, Failed: q.failed, Waiting: raised - q.served - q.failed,
		Time: q.times}
}

// Faults returns the queue of stage-two faults, which the host driver serves (PF-7).
func (s *Space) Faults() *FaultQueue { return &s.faults }

// Fetch raises a host fault for m and waits until it is served; write means that the access will change memory. It
// returns nil if the access is to be retried, m's error if m is not a host fault, or ctx's error. It is for control
// goroutines only, never between Enter and Leave.
func (s *Space) Fetch(ctx context.Context, m Miss, write bool) error {
	if m.Kind != HostFault {
		return m.Err()
	}
	served := make(chan error, 1) // ctx may end before
	s.faults.Raise(&Fault{Miss: m, Write: write, Done: func(_ *Fault, err error) { served <- err }})
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
