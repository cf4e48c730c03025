package worktime

import (
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/worktime/worktimetest"
)

// manual is a clock, and a thread, that only the test moves.
type manual struct{ *worktimetest.Clock }

// use lets a piece of work take d of the processor.
func (m *manual) use(a *Account, k Kind, d time.Duration) {
	w := a.Start(k)
	m.Work(d)
	w.Stop()
	w.Stop() // without effect
}

func newManual(percent int) (*manual, *Account) {
	m := &manual{worktimetest.New(0)}
	return m, New(Config{Percent: percent, Burst: time.Second, Exact: true, Clock: m, Thread: m.Thread})
}

func TestKinds(t *testing.T) {
	m, a := newManual(0)
	m.use(a, Commands, 1)
	m.use(a, Messages, 20)
	m.use(a, Paging, 300)
	m.use(a, Commands, time.Hour)
	s := a.Status()
	if s.Commands != time.Hour+1 || s.Messages != 20 || s.Paging != 300 || s.Percent != 0 {
		t.Errorf("%+v", s)
	}
	if d := a.Delay(); d != 0 {
		t.Errorf("without a bound a command waits for %v", d)
	}
}

// Commands may use the burst at once, and then the share of the time that passes.
func TestShare(t *testing.T) {
	m, a := newManual(25)
	m.use(a, Commands, 999*time.Millisecond)
	if d := a.Delay(); d != 0 {
		t.Fatalf("within the burst a command waits for %v", d)
	}
	used, begin := time.Duration(0), m.Now()
	for m.Now().Sub(begin) < time.Minute {
		if d := a.Delay(); d > 0 {
			m.Advance(d)
			if d := a.Delay(); d != 0 {
				t.Fatalf("after its wait the command has to wait for %v more", d)
			}
		}
		m.use(a, Commands, 3*time.Millisecond)
		used += 3 * time.Millisecond
	}
	if passed := m.Now().Sub(begin); used < passed/4-10*time.Millisecond || used > passed/4+10*time.Millisecond {
		t.Errorf("%v of the processor used within %v, want a quarter", used, passed)
	}
	m.Advance(1000 * time.Hour)
	m.use(a, Commands, time.Second-1)
	if d := a.Delay(); d != 0 {
		t.Errorf("after a long rest the bucket is not full: %v", d)
	}
	m.use(a, Commands, 1)
	if a.Delay() == 0 {
		t.Error("after a long rest the bucket is more than full")
	}
}

// Paging is counted, and charged to nobody; messages are charged; a debt has a bound.
func TestCharged(t *testing.T) {
	m, a := newManual(50)
	m.use(a, Paging, time.Hour)
	if d := a.Delay(); d != 0 {
		t.Errorf("paging delays commands by %v", d)
	}
	m.use(a, Messages, time.Hour)
	if d, most := a.Delay(), maxDelay+time.Second; d <= 0 || d > most {
		t.Errorf("after an hour of messages a command waits for %v, want up to %v", d, most)
	}
	a.Delayed()
	if n := a.Status().Delayed; n != 1 {
		t.Errorf("%d delayed commands, want 1", n)
	}
}

func TestLap(t *testing.T) {
	m, a := newManual(50)
	w := a.Start(Commands)
	defer w.Stop()
	m.Work(5)
	w.Lap()
	if got := a.Status().Commands; got != 5 {
		t.Errorf("%v after a lap, want 5ns", got)
	}
	w.Lap()
	if got := a.Status().Commands; got != 5 {
		t.Errorf("%v after two laps, want 5ns", got)
	}
}

// Work that another kind counts is not counted twice.
func TestWithout(t *testing.T) {
	m, a := newManual(0)
	w := a.Start(Messages)
	m.Work(1)
	_ = w.Without(func() error { m.use(a, Paging, 100); return nil })
	m.Work(10)
	w.Stop()
	if s := a.Status(); s.Messages != 11 || s.Paging != 100 {
		t.Errorf("%+v, want 11 of messages and 100 of paging", s)
	}
}

func TestNil(t *testing.T) {
	var a *Account
	w := a.Start(Commands)
	w.Lap()
	_ = w.Without(func() error { return nil })
	w.Stop()
	a.Delayed()
	if d, s := a.Delay(), a.Status(); d != 0 || s != (Status{}) {
		t.Errorf("no account: %v, %+v", d, s)
	}
}

// Samples count for all pieces of work, and each piece is as likely to be measured: what all take is found, except for
// the pieces since the last sample.
func TestSamples(t *testing.T) {
	m := &manual{worktimetest.New(0)}
	a := New(Config{Clock: m, Thread: m.Thread})
	const n = 10000
	for range n / 2 {
		m.use(a, Paging, 3)
		w := a.Start(Commands)
		m.Work(7)
		w.Lap()
		m.Work(7)
		w.Stop()
	}
	s := a.Status()
	for _, x := range []struct{ got, most, each time.Duration }{{s.Paging, 3 * n / 2, 3}, {s.Commands, 7 * n, 7}} {
		if x.got > x.most || x.got < x.most-x.each*2*sampleEvery {
			t.Errorf("%v, want %v in pieces of %v", x.got, x.most, x.each)
		}
	}
}

// The real clock counts work, not waiting.
func TestThreadTime(t *testing.T) {
	a := New(Config{})
	w := a.Start(Commands)
	defer w.Stop()
	for x := 1; a.Status().Commands < time.Millisecond; x++ { // until the clock has counted it
		w.Lap()
	}
}
