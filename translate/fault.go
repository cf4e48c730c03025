package translate

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Fault is a miss that waits for its driver (PF-7). It is embedded in whoever
// waits, so that raising one allocates nothing and a queue is never longer than
// there are waiters. Whoever waits holds no epoch.
type Fault struct {
	// Set by the owner before Raise, left alone until Done. Miss.Len is the
	// bytes wanted from Miss.Where on, at least 1; Write says that the access
	// changes memory.
	Miss  Miss
	Write bool

	// Done is set once. It is called exactly once for each Raise that returned
	// true, on a goroutine of the server, and must not block; the fault may
	// already be raised anew from within. nil: try again. Otherwise the address
	// is invalid or its memory is gone for good (PF-13).
	Done func(f *Fault, err error)

	waiting atomic.Bool
	raised  time.Time
	next    *Fault // in the queue
}

// Waiting reports whether the fault is raised and not yet served. It turns
// false just before Done is called.
func (f *Fault) Waiting() bool { return f.waiting.Load() }

// FaultQueue carries faults from the loops to the driver that serves them:
// oldest first, none lost, none twice. Raising is lock-free; any number of
// goroutines may serve. The zero value is ready for use.
type FaultQueue struct {
	head     atomic.Pointer[Fault] // raised and not yet sorted, newest first
	sleepers atomic.Int32          // servers that wait, or are about to
	wakeup   atomic.Pointer[chan struct{}]
	raised   atomic.Uint64
	estimate atomic.Int64 // ns

	mu     sync.Mutex // servers only
	sorted *Fault     // raised before all that head holds, oldest first
	served uint64
	failed uint64
	times  Histogram
}

// FaultStats counts the faults of a queue. Raised = Served + Failed + Waiting.
type FaultStats struct {
	Raised  uint64
	Served  uint64 // tried again
	Failed  uint64 // ended with an error (PF-13)
	Waiting uint64
	Time    Histogram // from Raise to Finish
}

// Raise hands f to the server and reports true, or does nothing and reports
// false if f waits already. Any thread; it never blocks and never allocates.
func (q *FaultQueue) Raise(f *Fault) bool {
	if !f.waiting.CompareAndSwap(false, true) {
		return false
	}
	f.raised = time.Now()
	q.raised.Add(1)
	for {
		f.next = q.head.Load()
		if q.head.CompareAndSwap(f.next, f) {
			break
		}
	}
	q.wake()
	return true
}

// wake wakes one server if any sleeps. No wake-up is lost: a server announces
// itself before it looks for the last time, a raiser puts its fault in place
// before it looks for sleepers, and a token that no server took yet stays.
func (q *FaultQueue) wake() {
	if q.sleepers.Load() > 0 {
		select {
		case *q.wakeup.Load() <- struct{}{}:
		default:
		}
	}
}

// TryNext returns the fault that waits longest, nil if there is none.
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
		q.wake() // tokens count at most one: pass it on
	}
	return f
}

// Next is TryNext that waits for a fault, or until ctx ends: then it returns
// ctx's error, also when faults wait.
func (q *FaultQueue) Next(ctx context.Context) (*Fault, error) {
	for {
		if err := ctx.Err(); err != nil {
			q.wake() // the token that we may have taken belongs to another server
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

// Finish records the time of service and calls f.Done with err. f came from
// Next or TryNext and is finished once; then it belongs to its owner again.
func (q *FaultQueue) Finish(f *Fault, err error) {
	took := time.Since(f.raised)
	q.mu.Lock()
	q.times.Add(took)
	if err == nil {
		q.served++
	} else {
		q.failed++
	}
	// Smoothed as round-trip times are: one eighth of each new sample.
	old := q.estimate.Load()
	if q.times.Count == 1 {
		old = int64(took)
	}
	q.estimate.Store(old + (int64(took)-old)/8)
	q.mu.Unlock()
	// Waiting ends before Done begins: Done makes the owner try again, which
	// may raise the next fault at once.
	done := f.Done
	f.waiting.Store(false)
	done(f, err)
}

// Estimate returns the smoothed time from Raise to Finish, 0 before the first.
// Any thread.
func (q *FaultQueue) Estimate() time.Duration { return time.Duration(q.estimate.Load()) }

// Stats returns the counters.
func (q *FaultQueue) Stats() FaultStats {
	q.mu.Lock()
	defer q.mu.Unlock()
	raised := q.raised.Load()
	return FaultStats{Raised: raised, Served: q.served, Failed: q.failed, Waiting: raised - q.served - q.failed, Time: q.times}
}

// Faults returns the host event queue: faults of stage two, which the host
// driver serves (PF-7).
func (s *Space) Faults() *FaultQueue { return &s.faults }

// Fetch raises a host fault for m and waits until it is served; write says that
// the access will change memory. nil: try again. For goroutines that are no
// loops, never between Enter and Leave. A miss that is no host fault is returned
// as the error it is; if ctx ends first its error is returned.
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
