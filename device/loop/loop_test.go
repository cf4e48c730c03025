package loop

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newLoop(t testing.TB, c Config) *Loop {
	t.Helper()
	l, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

func startLoop(t testing.TB, c Config) *Loop {
	t.Helper()
	l := newLoop(t, c)
	if err := l.Start(); err != nil {
		t.Fatal(err)
	}
	return l
}

func newEventfd(t testing.TB) int {
	t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func kick(t testing.TB, fd int) {
	t.Helper()
	if _, err := unix.Write(fd, []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
		t.Fatal(err)
	}
}

func drain(fd int) {
	var b [8]byte
	_, _ = unix.Read(fd, b[:])
}

func openFDs(t *testing.T) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

func TestConfig(t *testing.T) {
	for _, c := range []Config{{ID: -1}, {ID: MaxLoops}, {SpinFor: -1}} {
		if _, err := New(c); err == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
}

// Loops start and stop without leaking goroutines or descriptors, in every state.
func TestLifeAndLeaks(t *testing.T) {
	before := openFDs(t)
	for i := range 50 {
		l, err := New(Config{SpinFor: time.Duration(i%3) * 10 * time.Microsecond})
		if err != nil {
			t.Fatal(err)
		}
		if i%5 != 0 {
			if err := l.Start(); err != nil {
				t.Fatal(err)
			}
			if err := l.Start(); !errors.Is(err, ErrStarted) {
				t.Fatalf("second Start: %v", err)
			}
			l.Do(func() {})
		}
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(l.Close)
		}
		wg.Wait()
		if err := l.Start(); !errors.Is(err, ErrClosed) {
			t.Fatalf("Start after Close: %v", err)
		}
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestDo(t *testing.T) {
	l := newLoop(t, Config{})
	ran := 0
	l.Do(func() {
		ran++
		if !l.OnLoop() {
			t.Error("inline Do is not on the loop")
		}
		l.Do(func() { ran++ })
	})
	if ran != 2 || l.OnLoop() {
		t.Fatalf("before Start: ran %d", ran)
	}
	if err := l.Start(); err != nil {
		t.Fatal(err)
	}
	l.Do(func() {
		if !l.OnLoop() {
			t.Error("Do is not on the loop")
		}
		l.Do(func() { ran++ })
	})
	if ran != 3 {
		t.Fatalf("on the loop: ran %d", ran)
	}
	l.Close()
	l.Do(func() { ran++ })
	if ran != 4 {
		t.Fatalf("after Close: ran %d", ran)
	}
	if l.Post(func() {}) {
		t.Error("Post after Close was accepted")
	}
}

// Every Do runs exactly once and alone, during any Start and Close.
func TestDoRacesLife(t *testing.T) {
	for range 30 {
		l := newLoop(t, Config{})
		var wg sync.WaitGroup
		n := 0 // accessed in Do only: the race detector checks that
		for range 4 {
			wg.Go(func() {
				for range 100 {
					l.Do(func() { n++ })
				}
			})
		}
		wg.Go(func() { _ = l.Start() }) // ErrClosed if Close came first
		wg.Go(l.Close)
		wg.Wait()
		l.Do(func() {
			if n != 400 {
				t.Errorf("%d of 400 ran", n)
			}
		})
	}
}

func TestPostIsBoundedAndOrdered(t *testing.T) {
	l := newLoop(t, Config{})
	var got []int
	n := 0
	for l.Post(func() { got = append(got, len(got)) }) {
		n++
	}
	if n != postCapacity {
		t.Errorf("took %d posts, want %d", n, postCapacity)
	}
	l.Step()
	if len(got) != maxPosts {
		t.Errorf("one iteration ran %d posts, want %d", len(got), maxPosts)
	}
	if err := l.Start(); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if len(got) != n {
		t.Errorf("%d of %d posts ran by Close", len(got), n)
	}
}

func TestWatch(t *testing.T) {
	l := startLoop(t, Config{})
	fd := newEventfd(t)
	var runs atomic.Int32
	w, err := l.Watch(fd, func() { drain(fd); runs.Add(1) })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Watch(fd, func() {}); !errors.Is(err, ErrDuplicate) {
		t.Errorf("second watch: %v", err)
	}
	if _, err := l.Watch(-1, func() {}); err == nil {
		t.Error("watch of -1 was accepted")
	}
	for i := range int32(5) {
		kick(t, fd)
		testutil.Eventually(t, "ready runs", func() bool { return runs.Load() == i+1 })
	}
	w.Close()
	w.Close()
	kick(t, fd)
	l.Do(func() {})
	l.Do(func() {})
	if runs.Load() != 5 {
		t.Error("ready ran after Close")
	}
	if _, err := l.Watch(fd, func() { drain(fd); runs.Add(1) }); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, "level-triggered", func() bool { return runs.Load() == 6 })
}

// A handler closes another watch with an event in the same batch, and a new watch gets the slot: neither may run for
// the old event.
func TestWatchClosedInBatch(t *testing.T) {
	l := newLoop(t, Config{})
	const n = 8
	var fds [n]int
	var ws [n]*Watch
	ran := 0
	for i := range n {
		fds[i] = newEventfd(t)
	}
	other := newEventfd(t)
	for i := range n {
		w, err := l.Watch(fds[i], func() {
			ran++
			for j := range n {
				if j != i {
					ws[j].Close()
				}
			}
			if _, err := l.Watch(other, func() { t.Error("new watch ran for an old event") }); err != nil &&
				!errors.Is(err, ErrDuplicate) {
				t.Error(err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		ws[i] = w
		kick(t, fds[i])
	}
	l.Step()
	if ran != 1 {
		t.Errorf("%d handlers ran, want 1", ran)
	}
}

func TestWatchClosesItself(t *testing.T) {
	l := startLoop(t, Config{})
	fd := newEventfd(t)
	var w *Watch
	var runs atomic.Int32
	l.Do(func() {
		var err error
		if w, err = l.Watch(fd, func() { runs.Add(1); w.Close() }); err != nil {
			t.Error(err)
		}
	})
	kick(t, fd)
	testutil.Eventually(t, "ready runs", func() bool { return runs.Load() == 1 })
	l.Do(func() {})
	if runs.Load() != 1 {
		t.Error("ran after closing itself")
	}
}

type testPoller struct {
	work      atomic.Int64
	done      atomic.Int64
	asleep    atomic.Bool
	prepared  int
	polled    int
	inPrepare func() bool
	inPoll    func()
}

func (p *testPoller) Poll(int64) bool {
	p.polled++
	if p.prepared != 0 {
		panic("Poll before Resume")
	}
	if p.inPoll != nil {
		p.inPoll()
	}
	n := p.work.Swap(0)
	p.done.Add(n)
	return n > 0
}

func (p *testPoller) Prepare() bool {
	p.prepared++
	p.asleep.Store(true)
	if p.inPrepare != nil {
		return p.inPrepare()
	}
	return p.work.Load() > 0
}

func (p *testPoller) Resume() {
	if p.prepared--; p.prepared != 0 {
		panic("Resume without Prepare, or Prepare twice")
	}
	p.asleep.Store(false)
}

// With a producer that kicks only on request no wake-up is lost: the doorbell protocol.
func TestPollerProtocol(t *testing.T) {
	for _, spin := range []time.Duration{0, 50 * time.Microsecond} {
		l := startLoop(t, Config{SpinFor: spin})
		fd := newEventfd(t)
		if _, err := l.Watch(fd, func() { drain(fd) }); err != nil {
			t.Fatal(err)
		}
		p := &testPoller{}
		l.AddPoller(p)
		const n = 3000
		for i := range int64(n) {
			p.work.Add(1)
			if p.asleep.Load() {
				kick(t, fd)
			}
			if i%7 == 0 {
				testutil.Eventually(t, "work is seen", func() bool { return p.done.Load() == i+1 })
			}
		}
		testutil.Eventually(t, "all work is seen", func() bool { return p.done.Load() == n })
		l.RemovePoller(p)
		polled := p.polled
		l.Do(func() {})
		if p.polled != polled {
			t.Error("polled after RemovePoller")
		}
	}
}

func TestPrepareRefusesSleep(t *testing.T) {
	l := startLoop(t, Config{})
	p := &testPoller{}
	var refuse atomic.Bool
	refuse.Store(true)
	p.inPrepare = refuse.Load
	l.AddPoller(p)
	testutil.Eventually(t, "keeps going", func() bool { return l.Stats().Rounds > 100 })
	if s := l.Stats().Sleeps; s > 50 { // it may have slept before the poller was added
		t.Errorf("slept %d times", s)
	}
	refuse.Store(false)
	s := l.Stats().Sleeps
	testutil.Eventually(t, "sleeps", func() bool { return l.Stats().Sleeps > s })
}

// Removing pollers, hooks and watches during the walk over them neither skips a handler nor runs one twice.
func TestRemovalDuringWalk(t *testing.T) {
	l := newLoop(t, Config{})
	const n = 5
	var counts [n]int
	var ps [n]*testPoller
	for i := range n {
		ps[i] = &testPoller{}
		ps[i].inPoll = func() {
			counts[i]++
			if i == 2 && counts[2] == 1 {
				l.RemovePoller(ps[2])
				l.RemovePoller(ps[0])
				l.RemovePoller(ps[4])
			}
		}
		l.AddPoller(ps[i])
	}
	var hooks [n]*Hook
	var hookCounts [n]int
	for i := range n {
		hooks[i] = l.AtFlush(func() {
			hookCounts[i]++
			if i == 1 {
				hooks[0].Close()
				hooks[1].Close()
				hooks[3].Close()
			}
		})
	}
	l.Step()
	if counts != [n]int{1, 1, 1, 1, 0} || hookCounts != [n]int{1, 1, 1, 0, 1} {
		t.Errorf("first: pollers %v hooks %v", counts, hookCounts)
	}
	l.Step()
	if counts != [n]int{1, 2, 1, 2, 0} || hookCounts != [n]int{1, 1, 2, 0, 2} {
		t.Errorf("second: pollers %v hooks %v", counts, hookCounts)
	}
}

// An idle loop sleeps: no iterations while nothing happens.
func TestIdleSleeps(t *testing.T) {
	l := startLoop(t, Config{SpinFor: 20 * time.Microsecond})
	l.AddPoller(&testPoller{})
	NewMailbox(l, 4, func(int) {}, nil)
	testutil.Eventually(t, "falls asleep", func() bool { return l.sleeping.Load() == 1 })
	before := l.Stats()
	time.Sleep(50 * time.Millisecond) // not a wait for a result: an interval in which nothing may happen
	if after := l.Stats(); after.Rounds > before.Rounds+1 {
		t.Errorf("%d iterations while idle", after.Rounds-before.Rounds)
	}
}

func TestMailbox(t *testing.T) {
	l := startLoop(t, Config{})
	type item struct{ from, seq int }
	const producers, each = 4, 5000
	var next [producers]int
	var released atomic.Int64
	m := NewMailbox(l, 64, func(v item) {
		if v.seq != next[v.from] {
			t.Errorf("producer %d: got %d, want %d", v.from, v.seq, next[v.from])
		}
		next[v.from]++
	}, func(item) { released.Add(1) })
	var wg sync.WaitGroup
	for p := range producers {
		wg.Go(func() {
			for i := range each {
				for !m.Put(item{p, i}) {
					time.Sleep(10 * time.Microsecond)
				}
			}
		})
	}
	wg.Wait()
	testutil.Eventually(t, "all arrive", func() bool { return released.Load() == producers*each })
	m.Close()
	m.Close()
}

func TestMailboxFullAndClose(t *testing.T) {
	l := newLoop(t, Config{})
	handled, released := 0, 0
	m := NewMailbox(l, 4, func(int) { handled++ }, func(int) { released++ })
	for i := range 4 {
		if !m.Put(i) {
			t.Fatalf("refused %d", i)
		}
	}
	if m.Put(4) {
		t.Error("a full mailbox accepted a value")
	}
	m.Close()
	l.Step()
	if handled != 0 || released != 4 {
		t.Errorf("handled %d, released %d", handled, released)
	}
}

func BenchmarkMailbox(b *testing.B) {
	l := newLoop(b, Config{})
	m := NewMailbox(l, 256, func(int) {}, nil)
	b.ReportAllocs()
	for b.Loop() {
		for i := range mailBatch {
			m.Put(i)
		}
		m.Poll(0)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*mailBatch), "ns/item")
}

func BenchmarkIteration(b *testing.B) {
	l := newLoop(b, Config{SpinFor: time.Second})
	for range 4 {
		l.AddPoller(&testPoller{})
	}
	b.ReportAllocs()
	l.Do(func() {
		for b.Loop() {
			l.pass(false)
		}
	})
}

// A loop is shared for some time after the poller with work has changed.
func TestShared(t *testing.T) {
	clock := NewManualClock(1e9)
	l := newLoop(t, Config{Clock: clock})
	a, b := &testPoller{}, &testPoller{}
	l.AddPoller(a)
	l.AddPoller(b)
	mail := NewMailbox(l, 8, func(int) {}, nil)
	defer mail.Close()
	step := func(want bool, what string, ps ...*testPoller) {
		t.Helper()
		for _, p := range ps {
			p.work.Add(1)
		}
		l.Step()
		if l.Shared() != want {
			t.Errorf("%s: shared is %t", what, !want)
		}
	}
	l.Step()
	clock.Advance(2 * time.Millisecond)
	step(false, "no work yet")
	step(true, "first work", a)
	clock.Advance(2 * time.Millisecond)
	mail.Put(1)
	step(false, "the same poller and a mailbox", a)
	step(true, "both", a, b)
	step(true, "the other is idle", a)
	clock.Advance(sharedFor - time.Microsecond)
	step(true, "shortly after", a)
	clock.Advance(time.Microsecond)
	step(false, "long after", a)
	step(true, "the other poller", b)
	clock.Advance(2 * time.Millisecond)
	step(false, "long after", b)
	l.RemovePoller(b)
	step(true, "after the removal of the other poller", a)
}

// Polling in vain is shortened, restored when work arrives in time, and tried in full length now and then.
func TestAdaptivePolling(t *testing.T) {
	clock := NewManualClock(1e9)
	l := newLoop(t, Config{Clock: clock, SpinFor: 20 * time.Microsecond})
	sleepy := false
	p := &testPoller{inPrepare: func() bool { sleepy = true; return true }}
	l.AddPoller(p)
	l.Do(func() {
		work := func() {
			p.work.Add(1)
			l.pass(true)
		}
		polled := func(want int) {
			t.Helper()
			us := 0
			for sleepy = false; !sleepy && us < 100; us++ {
				clock.Advance(time.Microsecond)
				l.pass(true)
			}
			if us != want {
				t.Errorf("polls for %d us before it sleeps; want %d", us, want)
			}
			clock.Advance(time.Duration(50-us) * time.Microsecond)
			work()
		}
		work()
		clock.Advance(15 * time.Microsecond)
		work()
		for _, us := range []int{20, 10, 5, 3, 2} {
			polled(us)
		}
		clock.Advance(15 * time.Microsecond)
		work()
		polled(20)
		for range maxMisses - 1 {
			polled(max(1, int(l.patience+999)/1000))
		}
		if l.patience != 0 {
			t.Errorf("polls for %d ns after %d misses; want 0", l.patience, maxMisses)
		}
		polled(1)
		polled(20)
		polled(10)
	})
}
