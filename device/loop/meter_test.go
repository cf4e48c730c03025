package loop

import (
	"testing"
	"time"
)

// worker is a handler that takes cost of the clock in each iteration.
type worker struct {
	clock *ManualClock
	cost  time.Duration
	then  func()
}

func (w *worker) Poll(int64) bool {
	w.clock.Advance(w.cost)
	if w.then != nil {
		w.then()
	}
	return true
}

func (w *worker) Prepare() bool { return true }
func (w *worker) Resume()       {}

// near checks a time that is known to have been want per iteration. Iterations since the last sample are missing, and
// no others.
func near(t *testing.T, what string, got, each time.Duration, iterations int) {
	t.Helper()
	if most := each * time.Duration(iterations); got > most || got < most-each*2*meterEvery {
		t.Errorf("%s: %v in %d iterations of %v each", what, got, iterations, each)
	}
}

// Every handler's time counts for its owner: pollers, mailboxes, timers, watches and hooks. That of others does not.
func TestMeter(t *testing.T) {
	clock := NewManualClock(1)
	l := newLoop(t, Config{Clock: clock})
	var polled, mailed, timed, watched, flushed Meter
	l.AddPoller(&worker{clock: clock, cost: 3}, Metered(&polled))
	l.AddPoller(&worker{clock: clock, cost: 1000})
	box := NewMailbox(l, 8, func(struct{}) { clock.Advance(5) }, nil, Metered(&mailed))
	var timer *Timer
	timer = l.NewTimer(func(now int64) { clock.Advance(7); timer.Arm(now + 1) }, Metered(&timed))
	l.Visit(func() { timer.Arm(1) })
	fd := newEventfd(t)
	kick(t, fd) // and never drained
	if _, err := l.Watch(fd, func() { clock.Advance(11) }, Metered(&watched)); err != nil {
		t.Fatal(err)
	}
	l.AtFlush(func() { clock.Advance(13) }, Metered(&flushed))
	const n = 10000
	for range n {
		box.Put(struct{}{})
		l.Step()
	}
	near(t, "poller", polled.Time(), 3, n)
	near(t, "mailbox", mailed.Time(), 5, n)
	near(t, "timer", timed.Time(), 7, n)
	near(t, "watch", watched.Time(), 11, n)
	near(t, "hook", flushed.Time(), 13, n)
}

// Work for one owner within another's handler counts for the one, also after a memory fault in it.
func TestCharge(t *testing.T) {
	clock := NewManualClock(1)
	l := newLoop(t, Config{Clock: clock})
	var outer, inner, next Meter
	faulty, gone := false, hole(t)
	l.AddPoller(&worker{clock: clock, cost: 3, then: func() {
		prev := l.Charge(&inner)
		clock.Advance(20)
		if faulty {
			gone[5000]++
		}
		l.Charge(prev)
		clock.Advance(4)
	}}, Metered(&outer), OnFault(func(Fault) {}))
	l.AddPoller(&worker{clock: clock, cost: 5}, Metered(&next))
	const n = 1000
	for range n {
		l.Step()
	}
	near(t, "outer", outer.Time(), 7, n)
	near(t, "inner", inner.Time(), 20, n)
	near(t, "next", next.Time(), 5, n)
	faulty = true
	for range n {
		l.Step()
	}
	near(t, "next after faults", next.Time(), 5, 2*n)
}

// A loop that meters allocates nothing.
func TestMeterAllocatesNothing(t *testing.T) {
	l := newLoop(t, Config{})
	var m Meter
	l.AddPoller(&worker{clock: NewManualClock(1)}, Metered(&m))
	f := func() {
		l.stage, l.idleRounds = stageEvents, 0
		for !l.pass(false) {
		}
	}
	if n := testing.AllocsPerRun(1000, f); n > 0 {
		t.Errorf("%v allocations per iteration", n)
	}
}
