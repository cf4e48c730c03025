package hostdriver

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/translate"
)

// late keeps the faults of a Driver that found memory short, and has them served again (HF-2). Each is an object of the
// device that waits, so their number is bounded by the VM's limits. They need no goroutine.
//
//	server finds memory short ──▶ waiting ──▶ the queue, and a server: memory is there, or it is short again
//
// While memory stays short one fault at a time is tried, at growing intervals, the oldest first. Once one has got its
// memory, twice as many are tried each time, like a slow start.
type late struct {
	clock Clock
	q     *translate.FaultQueue
	log   hclog.Logger

	mu      sync.Mutex
	waiting []lateFault                    // the oldest attempt first
	tried   map[*translate.Fault]time.Time // back in the queue, or with a server; since when memory has been short
	holds   map[*Hold]time.Time            // Holds that wait, since when
	window  int                            // how many may be tried at once
	failed  bool                           // one of those that are tried found memory short again
	delay   time.Duration                  // before the next attempt
	stop    func() bool                    // of the timer; nil: it does not run
	reason  error                          // of the last fault that found memory short
	total   uint64                         // faults and holds that found memory short, each once
	logged  time.Time
	closed  bool
}

type lateFault struct {
	f     *translate.Fault
	since time.Time
}

const (
	minDelay = 5 * time.Millisecond
	maxDelay = 500 * time.Millisecond
	// maxWindow bounds the faults that are tried at once.
	maxWindow = 256
	// shortageLog is the time between two messages about one shortage.
	shortageLog = time.Minute
)

func (l *late) init(clock Clock, q *translate.FaultQueue, log hclog.Logger) {
	l.clock, l.q, l.log = clock, q, log
	l.tried, l.holds = make(map[*translate.Fault]time.Time), make(map[*Hold]time.Time)
	l.window, l.delay = 1, minDelay
}

// add takes over a fault that found memory short.
func (l *late) add(f *translate.Fault, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	since, again := l.tried[f]
	if again {
		delete(l.tried, f)
		l.failed = true
	} else {
		since = l.clock.Now()
		l.total++
	}
	l.waiting = append(l.waiting, lateFault{f, since})
	l.shortLocked(err)
	l.endLocked()
}

// endLocked begins the wait for the next attempt, if the last one is over.
func (l *late) endLocked() {
	if len(l.tried) > 0 {
		return
	}
	if l.failed {
		l.failed, l.window, l.delay = false, 1, min(2*l.delay, maxDelay)
	}
	if l.stop == nil && len(l.waiting) > 0 {
		l.stop = l.clock.AfterFunc(l.delay, l.expired)
	}
}

func (l *late) shortLocked(err error) {
	l.reason = err
	if now := l.clock.Now(); l.logged.IsZero() || now.Sub(l.logged) >= shortageLog {
		l.logged = now
		l.log.Warn("host memory is short: operations of the device wait for it", "waiting", l.countLocked(), "reason", err)
	}
}

func (l *late) countLocked() int { return len(l.waiting) + len(l.tried) + len(l.holds) }

// settle forgets a fault that is about to be finished.
func (l *late) settle(f *translate.Fault, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.tried[f]; !ok {
		return
	}
	delete(l.tried, f)
	if !l.failed {
		if err == nil {
			l.window, l.delay = min(2*l.window, maxWindow), minDelay
		}
		l.retryLocked()
	}
	l.endLocked()
}

// expired is called by the timer.
func (l *late) expired() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stop = nil
	l.retryLocked()
}

// hurry has all faults served again at once: some of them may end, because their memory is gone.
func (l *late) hurry() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.window = max(l.window, len(l.waiting)+len(l.tried))
	l.retryLocked()
	l.window = min(l.window, maxWindow)
}

// retryLocked has the oldest faults served again, as many as the window permits.
func (l *late) retryLocked() {
	n := min(len(l.waiting), l.window-len(l.tried))
	if l.closed || n <= 0 {
		return
	}
	if l.stop != nil {
		l.stop()
		l.stop = nil
	}
	for _, w := range l.waiting[:n] {
		l.tried[w.f] = w.since
		l.q.Return(w.f)
	}
	l.waiting = append(l.waiting[:0], l.waiting[n:]...)
}

// close returns all faults to the queue. No server runs any more.
func (l *late) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.stop != nil {
		l.stop()
		l.stop = nil
	}
	for _, w := range l.waiting {
		l.q.Return(w.f)
	}
	l.waiting = nil
	clear(l.tried)
}

// hold is Budget.bring for h, and waits while memory is short.
func (d *Driver) hold(ctx context.Context, h *Hold, r *region, i uint64) (*granule, error) {
	l := &d.late
	for delay := minDelay; ; delay = min(2*delay, maxDelay) {
		g, err := d.opts.Budget.bring(ctx, r, i, true)
		if !errors.Is(err, ErrShort) {
			l.mu.Lock()
			delete(l.holds, h)
			l.mu.Unlock()
			return g, err
		}
		expired := make(chan struct{})
		l.mu.Lock()
		if _, again := l.holds[h]; !again {
			l.holds[h] = l.clock.Now()
			l.total++
		}
		l.shortLocked(err)
		l.mu.Unlock()
		stop := l.clock.AfterFunc(delay, func() { close(expired) })
		select {
		case <-expired:
			continue
		case <-ctx.Done():
			err = ctx.Err()
		case <-d.ctx.Done():
			err = ErrClosed
		}
		stop()
		l.mu.Lock()
		delete(l.holds, h)
		l.mu.Unlock()
		return nil, err
	}
}

// shortage is what waits for memory.
type shortage struct {
	waiting int
	total   uint64
	oldest  time.Duration
	reason  string
}

func (l *late) status() (s shortage) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.waiting, s.total = l.countLocked(), l.total
	if s.waiting == 0 {
		return s
	}
	now := l.clock.Now()
	older := func(since time.Time) { s.oldest = max(s.oldest, now.Sub(since)) }
	for _, w := range l.waiting {
		older(w.since)
	}
	for _, since := range l.tried {
		older(since)
	}
	for _, since := range l.holds {
		older(since)
	}
	s.reason = l.reason.Error()
	return s
}
