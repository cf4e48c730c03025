package loop

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil"
)

func TestTimerBasics(t *testing.T) {
	clock := NewManualClock(1000)
	l := newLoop(t, Config{Clock: clock})
	var fired []int64
	tm := l.NewTimer(func(now int64) { fired = append(fired, now) })
	tm.Arm(1500)
	step := func(d time.Duration) { clock.Advance(d); l.Step() }
	step(499)
	if len(fired) != 0 || !tm.Armed() || tm.Deadline() != 1500 {
		t.Fatalf("early: %v, armed %v, deadline %d", fired, tm.Armed(), tm.Deadline())
	}
	step(1)
	step(1000)
	if len(fired) != 1 || fired[0] != 1500 || tm.Armed() {
		t.Fatalf("fired %v, armed %v", fired, tm.Armed())
	}
	tm.Arm(10)
	l.Step()
	if len(fired) != 2 {
		t.Error("a deadline in the past did not fire")
	}
	tm.Arm(5000)
	tm.Stop()
	tm.Stop()
	step(10000)
	if len(fired) != 2 {
		t.Error("fired after Stop")
	}
}

// What a sleeping loop waits for is the earliest deadline, not one from which a timer was re-armed.
func TestTimerNext(t *testing.T) {
	l := newLoop(t, Config{Clock: NewManualClock(1)})
	var timers [3]*Timer
	for i := range timers {
		timers[i] = l.NewTimer(func(int64) {})
		timers[i].Arm(1000 + int64(i))
	}
	for i, deadline := range []int64{5000, 4000, 6000} {
		timers[i].Arm(deadline)
	}
	if at := l.timers.next(); at != 4000 {
		t.Errorf("the next deadline is %d", at)
	}
	for i := range timers {
		timers[i].Stop()
	}
	if at := l.timers.next(); at != 0 {
		t.Errorf("the next deadline is %d without a timer", at)
	}
}

// A timer that arms itself for now runs once per iteration and does not monopolise the loop.
func TestTimerRearmsItself(t *testing.T) {
	l := newLoop(t, Config{Clock: NewManualClock(1)})
	n := 0
	var tm *Timer
	tm = l.NewTimer(func(now int64) { n++; tm.Arm(now) })
	tm.Arm(1)
	for range 3 {
		l.Step()
	}
	if n != 3 {
		t.Errorf("ran %d times in 3 iterations", n)
	}
}

// Random arms, stops and advances against a naive model: exactly the due timers fire, in the order of their deadlines.
func TestTimerModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	clock := NewManualClock(1)
	l := newLoop(t, Config{Clock: clock})
	const n = 100
	var timers [n]*Timer
	var model [n]int64
	var fired []int
	for i := range n {
		timers[i] = l.NewTimer(func(int64) { fired = append(fired, i) })
	}
	for range 20000 {
		i := rng.IntN(n)
		switch rng.IntN(4) {
		case 0, 1:
			model[i] = clock.Now() + rng.Int64N(1000)
			timers[i].Arm(model[i])
		case 2:
			model[i] = 0
			timers[i].Stop()
		case 3:
			clock.Advance(time.Duration(rng.Int64N(100)))
			now := clock.Now()
			fired = fired[:0]
			l.Step()
			last := int64(0)
			for _, k := range fired {
				if model[k] == 0 || model[k] > now || model[k] < last {
					t.Fatalf("timer %d with deadline %d fired at %d after %d", k, model[k], now, last)
				}
				last, model[k] = model[k], 0
			}
			for k, d := range model {
				if d != 0 && d <= now {
					t.Fatalf("timer %d with deadline %d did not fire at %d", k, d, now)
				}
			}
		}
		for j, x := range l.timers {
			if x.index != j || j > 0 && l.timers[(j-1)/4].key > x.key {
				t.Fatalf("heap is not ordered at %d", j)
			}
		}
	}
}

// A sleeping loop wakes for its timer, by the real clock and by a manual one.
func TestTimerWakesLoop(t *testing.T) {
	l := startLoop(t, Config{})
	got := make(chan int64, 1)
	tm := l.NewTimer(func(now int64) { got <- now })
	deadline := Monotonic() + int64(5*time.Millisecond)
	l.Do(func() { tm.Arm(deadline) })
	if now := <-got; now < deadline {
		t.Errorf("fired %d ns early", deadline-now)
	}

	clock := NewManualClock(1)
	l = startLoop(t, Config{ID: 1, Clock: clock})
	tm = l.NewTimer(func(now int64) { got <- now })
	l.Do(func() { tm.Arm(1_000_000) })
	testutil.Eventually(t, "falls asleep", func() bool { return l.sleeping.Load() == 1 })
	clock.Advance(time.Millisecond)
	if now := <-got; now != 1_000_001 {
		t.Errorf("fired at %d", now)
	}
}

func TestTimerAllocs(t *testing.T) {
	l := newLoop(t, Config{Clock: NewManualClock(1)})
	tm := l.NewTimer(func(int64) {})
	tm.Arm(10)
	tm.Stop()
	if n := testing.AllocsPerRun(1000, func() { tm.Arm(5); tm.Arm(9); tm.Arm(3); tm.Stop() }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkTimerRearmLater(b *testing.B) {
	l := newLoop(b, Config{Clock: NewManualClock(1)})
	for i := range 1000 {
		l.NewTimer(func(int64) {}).Arm(int64(i) + 10)
	}
	tm := l.NewTimer(func(int64) {})
	when := int64(1000)
	b.ReportAllocs()
	for b.Loop() {
		when++
		tm.Arm(when)
	}
}

func BenchmarkTimerArmStop(b *testing.B) {
	l := newLoop(b, Config{Clock: NewManualClock(1)})
	for i := range 1000 {
		l.NewTimer(func(int64) {}).Arm(int64(i)*10 + 10)
	}
	tm := l.NewTimer(func(int64) {})
	b.ReportAllocs()
	for b.Loop() {
		tm.Arm(5000)
		tm.Stop()
	}
}
