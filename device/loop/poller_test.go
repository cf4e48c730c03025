package loop

import (
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil"
)

// tenant is an owner with a handler of each kind.
type tenant struct {
	meter  Meter
	poller testPoller
	polled *Polled
	timer  *Timer
	fd     int
	box    *Mailbox[int]
}

func newTenant(t testing.TB, l *Loop) *tenant {
	t.Helper()
	x := &tenant{fd: newEventfd(t)}
	m := Metered(&x.meter)
	if _, err := l.Watch(x.fd, func() { drain(x.fd) }, m); err != nil {
		t.Fatal(err)
	}
	x.polled = l.AddPoller(&x.poller, m)
	x.timer = l.NewTimer(func(int64) {}, m)
	x.box = NewMailbox(l, 64, func(n int) { x.poller.done.Add(int64(n)) }, nil, m)
	return x
}

// A poller that has had no work for a while rests, and is called again as soon as somebody may have made work for it:
// for its owner alone, or for anybody.
func TestRest(t *testing.T) {
	clock := NewManualClock(1)
	l := newLoop(t, Config{Clock: clock, SpinFor: time.Microsecond})
	a, b := newTenant(t, l), newTenant(t, l)
	free := &testPoller{}
	l.AddPoller(free)
	settle := func() {
		t.Helper()
		clock.Advance(restAfter)
		l.Step()
		before := [2]int{a.poller.polled, b.poller.polled}
		frees := free.polled
		for range 3 * epollEvery {
			l.Step()
		}
		if after := [2]int{a.poller.polled, b.poller.polled}; after != before || l.resting != 4 {
			t.Fatalf("polled %v times without work, before %v; %d of 2 pollers and 2 mailboxes rest", after, before, l.resting)
		}
		if n := free.polled - frees; n != 3*epollEvery {
			t.Fatalf("a poller without a Meter was called %d times in %d iterations", n, 3*epollEvery)
		}
		if !a.poller.asleep.Load() {
			t.Fatal("a poller rests without a request for a wake-up")
		}
	}
	for _, x := range []struct {
		name string
		wake func()
		both bool
	}{
		{"a watch", func() { kick(t, a.fd) }, false},
		{"a timer", func() { l.arrange(func() { a.timer.Arm(clock.Now()) }) }, false},
		{"a mailbox", func() { a.box.Put(0) }, false},
		{"Rouse", func() { l.arrange(a.polled.Rouse) }, false},
		{"DoFor", func() { _ = l.DoFor(&a.meter, func() {}) }, false},
		{"VisitFor", func() { l.VisitFor(&a.meter, func() {}) }, false},
		{"VisitFor on the loop", func() { l.arrange(func() { l.VisitFor(&a.meter, func() {}) }) }, false},
		{"PostFor", func() { l.PostFor(&a.meter, func() {}) }, false},
		{"Do", func() { _ = l.Do(func() {}) }, true},
		{"Visit", func() { l.Visit(func() {}) }, true},
		{"Post", func() { l.Post(func() {}) }, true},
		{"Wake", l.Wake, true},
	} {
		settle()
		before := [2]int{a.poller.polled, b.poller.polled}
		x.wake()
		for range epollEvery {
			l.Step()
		}
		if a.poller.polled == before[0] {
			t.Errorf("%s does not rouse its owner's poller", x.name)
		}
		if (b.poller.polled != before[1]) != x.both {
			t.Errorf("%s: another owner's poller was called %d times", x.name, b.poller.polled-before[1])
		}
		if a.poller.asleep.Load() {
			t.Errorf("%s: the request for a wake-up was not withdrawn", x.name)
		}
	}
	settle()
	l.VisitFor(nil, func() {})
	l.PostFor(nil, func() {})
	if l.Step(); l.resting != 4 {
		t.Errorf("a function that makes work for nobody leaves %d of 4 resting", l.resting)
	}
}

// A poller whose last look finds work does not rest, and one with work does not either.
func TestRestRefused(t *testing.T) {
	clock := NewManualClock(1)
	l := newLoop(t, Config{Clock: clock, SpinFor: time.Microsecond})
	x := newTenant(t, l)
	late := true
	x.poller.inPrepare = func() bool { return late }
	for i := range 5 {
		clock.Advance(2 * restAfter)
		l.Step()
		if x.poller.polled != i+1 {
			t.Fatalf("polled %d times in %d iterations", x.poller.polled, i+1)
		}
	}
	late = false
	x.poller.inPoll = func() { x.poller.work.Add(1) }
	for i := range 5 {
		clock.Advance(2 * restAfter)
		l.Step()
		if x.poller.polled != i+6 {
			t.Fatalf("polled %d times in %d iterations, with work", x.poller.polled, i+6)
		}
	}
}

// startResting starts a loop on which pollers rest as soon as they have no work.
func startResting(t testing.TB) *Loop {
	t.Helper()
	l := newLoop(t, Config{})
	l.rest = 0
	if err := l.Start(); err != nil {
		t.Fatal(err)
	}
	return l
}

// The loop does not sleep before it has called a poller again that has refused to rest, or that a hook has roused.
func TestRestNoSleep(t *testing.T) {
	l := startResting(t)
	const n = 200
	var refused, roused atomic.Int64
	a, b := &testPoller{}, &testPoller{}
	a.inPrepare = func() bool { return refused.Add(1) < n }
	l.AddPoller(a, Metered(new(Meter)))
	testutil.Eventually(t, "a poller refuses", func() bool { return refused.Load() >= n })
	e := l.AddPoller(b, Metered(new(Meter)))
	l.AtFlush(func() {
		if e.resting && roused.Load() < n {
			roused.Add(1)
			e.Rouse()
		}
	})
	testutil.Eventually(t, "a hook rouses", func() bool { return roused.Load() == n })
}

// A poller that removes itself when it has no work does not rest, neither from Poll nor from Prepare.
func TestRestRemovesItself(t *testing.T) {
	l := newLoop(t, Config{})
	l.rest = 0
	var m Meter
	a, b := &testPoller{}, &testPoller{}
	a.inPoll = func() { l.RemovePoller(a) }
	b.inPrepare = func() bool { l.RemovePoller(b); return false }
	l.AddPoller(a, Metered(&m))
	l.AddPoller(b, Metered(&m))
	l.Step()
	l.Visit(func() {})
	l.Step()
	if a.polled != 1 || a.prepared != 0 || b.polled != 1 || l.resting != 0 || len(l.awake) != 0 {
		t.Errorf("called %d and %d times; %d rest, %d are awake", a.polled, b.polled, l.resting, len(l.awake))
	}
}

// Beside a poller whose turns take long, one that rests waits for its wake-up no longer than for two turns.
func TestRestBesideLongTurns(t *testing.T) {
	clock := NewManualClock(1)
	l := newLoop(t, Config{Clock: clock, SpinFor: time.Microsecond})
	x := newTenant(t, l)
	l.AddPoller(&worker{clock: clock, cost: epollAfter})
	clock.Advance(restAfter)
	l.Step()
	before := x.poller.polled
	kick(t, x.fd)
	l.arrange(func() {
		l.idleRounds, l.looked = 0, clock.Now()
		for range 3 {
			l.pass(false)
		}
	})
	if x.poller.polled == before {
		t.Error("three turns of another poller, and no call")
	}
}

// lateMail is a mailbox that gets a value just before it rests.
type lateMail struct{ testPoller }

func (*lateMail) pending() bool { return true }

// A mailbox looks once more after it has asked to be roused.
func TestMailboxLooksAgain(t *testing.T) {
	l := newLoop(t, Config{})
	l.rest = 0
	m := &lateMail{}
	e := &Polled{l: l, p: m, mail: m}
	l.addPoller(e, "mailbox", nil)
	l.Step()
	if e.resting || e.quiet.take() {
		t.Error("a mailbox with a value rests")
	}
}

// No value is lost that is put into a mailbox while it goes to rest or the loop to sleep.
func TestMailboxRests(t *testing.T) {
	l := startResting(t)
	r := rand.New(rand.NewPCG(2, 30))
	var handled atomic.Int64
	m := NewMailbox(l, 4, func(int) { handled.Add(1) }, nil)
	for i := range int64(4000) {
		for range r.IntN(300) {
			_ = handled.Load()
		}
		m.Put(0)
		if i%4 == 0 { // without a look at the clock, so that the next value comes at any moment of a pass
			for n := 0; n < 1e6 && handled.Load() <= i; n++ {
			}
		}
		if handled.Load() <= i {
			testutil.Eventually(t, "the value is handled", func() bool { return handled.Load() > i })
		}
	}
}

// A mailbox whose handler faults rouses its owner's pollers, as one that does not.
func TestRestFault(t *testing.T) {
	m := hole(t)
	clock := NewManualClock(1)
	l := newLoop(t, Config{Clock: clock})
	x := newTenant(t, l)
	faults := 0
	box := NewMailbox(l, 4, func(int) { m[5000] = 0 }, nil, Metered(&x.meter), OnFault(func(Fault) { faults++ }))
	clock.Advance(restAfter)
	l.Step()
	before := x.poller.polled
	box.Put(0)
	l.Step()
	l.Step()
	if faults != 1 || x.poller.polled == before {
		t.Errorf("%d faults; the poller was called %d times", faults, x.poller.polled-before)
	}
}

// Pollers and mailboxes that rest, or are roused, can be removed, in any order.
func TestRestRemoved(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 30))
	for range 200 {
		clock := NewManualClock(1)
		l := newLoop(t, Config{Clock: clock})
		l.rest = 0
		var m Meter
		const n = 6
		var ps [n]testPoller
		var boxes [n]*Mailbox[int]
		for i := range n {
			l.AddPoller(&ps[i], Metered(&m))
			boxes[i] = NewMailbox(l, 4, func(int) {}, nil, Metered(&m))
		}
		l.Step()
		if l.resting != 2*n || len(l.awake) != 0 {
			t.Fatalf("%d pollers rest, want %d", l.resting, 2*n)
		}
		if r.IntN(2) == 0 {
			boxes[r.IntN(n)].Put(1)
		}
		if r.IntN(2) == 0 {
			l.VisitFor(&m, func() {})
		}
		removed := map[int]bool{}
		for _, i := range r.Perm(2 * n)[:r.IntN(2*n+1)] {
			if removed[i] = true; i < n {
				l.RemovePoller(&ps[i])
			} else {
				boxes[i-n].Close()
			}
		}
		var before [n]int
		for i := range ps {
			before[i] = ps[i].polled
		}
		l.Visit(func() {})
		for _, b := range boxes {
			b.Put(1)
		}
		l.Step()
		l.Step()
		for i := range ps {
			if called := ps[i].polled != before[i]; called == removed[i] {
				t.Errorf("poller %d: removed %t, called %t", i, removed[i], called)
			}
		}
		for i, b := range boxes {
			if handled := !b.pending(); handled == removed[n+i] {
				t.Errorf("mailbox %d: removed %t, handled %t", i, removed[n+i], handled)
			}
			b.Close()
		}
		for i := range ps {
			l.RemovePoller(&ps[i])
		}
		if l.resting != 0 || len(l.pollers)+len(l.awake) != 0 || m.slots[l.id].resting != nil {
			t.Fatalf("left over: %d resting, %d pollers, %d awake", l.resting, len(l.pollers), len(l.awake))
		}
	}
}

// No work is lost on a loop that is kept awake while the pollers with a producer each rest, are roused by its kicks or
// by values in their mailboxes, and are removed and added again.
func TestRestProtocol(t *testing.T) {
	for _, rest := range []time.Duration{0, 10 * time.Microsecond, 100 * time.Microsecond} {
		l := newLoop(t, Config{})
		l.rest = int64(rest)
		if err := l.Start(); err != nil {
			t.Fatal(err)
		}
		l.AddPoller(&testPoller{inPrepare: func() bool { return true }}) // the loop never sleeps
		var all sync.WaitGroup
		var rested atomic.Int64
		for i := range 3 {
			x := newTenant(t, l)
			all.Go(func() {
				r := rand.New(rand.NewPCG(uint64(i), uint64(rest)))
				for sent := int64(1); sent <= 1500; sent++ {
					switch r.IntN(8) {
					case 0:
						for !x.box.Put(1) {
							time.Sleep(10 * time.Microsecond)
						}
					case 1:
						l.RemovePoller(&x.poller)
						l.VisitFor(nil, func() { x.poller.prepared = 0 })
						x.poller.asleep.Store(false)
						x.poller.work.Add(1)
						x.polled = l.AddPoller(&x.poller, Metered(&x.meter))
					default:
						x.poller.work.Add(1)
						if x.poller.asleep.Load() {
							rested.Add(1)
							kick(t, x.fd)
						}
					}
					if r.IntN(4) == 0 {
						testutil.Eventually(t, "all work is seen", func() bool { return x.poller.done.Load() == sent })
						time.Sleep(time.Duration(r.IntN(100)) * time.Microsecond)
					}
				}
				testutil.Eventually(t, "all work is seen", func() bool { return x.poller.done.Load() == 1500 })
			})
		}
		all.Wait()
		if rested.Load() == 0 {
			t.Errorf("no poller rested after %v", rest)
		}
	}
}

// A hook that is armed runs once, at the end of the iteration, those of every iteration after it; armed by a hook it
// runs in the next one, for which the loop does not sleep.
func TestArmedHooks(t *testing.T) {
	l := newLoop(t, Config{})
	var order []string
	step := func(want ...string) {
		t.Helper()
		order = nil
		if l.Step(); !slices.Equal(order, want) {
			t.Errorf("order %v, want %v", order, want)
		}
	}
	l.AtFlush(func() { order = append(order, "always") })
	var a, b, c *Hook
	again := true
	a = l.NewHook(func() {
		order = append(order, "a")
		if again {
			again = false
			a.Arm()
			c.Close()
		}
	})
	b = l.NewHook(func() { order = append(order, "b") })
	c = l.NewHook(func() { order = append(order, "c") })
	step("always")
	l.Visit(func() { a.Arm(); c.Arm(); b.Arm(); a.Arm() })
	step("a", "b", "always")
	step("a", "always")
	step("always")
	if again = true; l.busy {
		t.Error("an iteration without work, with work")
	}
	l.Visit(a.Arm)
	step("a", "always")
	if !l.busy {
		t.Error("the loop may sleep before an armed hook runs")
	}
	step("a", "always")
	l.Visit(func() { c.Arm(); a.Arm(); a.Close(); b.Arm() })
	step("b", "always")
}

// BenchmarkIdleOwners is an iteration in which one of many owners has work.
func BenchmarkIdleOwners(b *testing.B) {
	l := newLoop(b, Config{SpinFor: time.Second})
	l.rest = 0
	for range 1000 {
		var m Meter
		l.AddPoller(&testPoller{}, Metered(&m))
		NewMailbox(l, 4, func(int) {}, nil, Metered(&m))
	}
	busy := &testPoller{}
	busy.inPoll = func() { busy.work.Add(1) }
	l.AddPoller(busy)
	b.ReportAllocs()
	l.VisitFor(nil, func() {
		for b.Loop() {
			l.pass(false)
		}
	})
}
