package loop

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
)

// An alarm is set for an earlier deadline, when it has gone off, and when it would soon do so in vain; else it is left
// as it is.
func TestAlarm(t *testing.T) {
	a, err := newAlarm()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(a.fd)
	now := Monotonic()
	for _, x := range []struct {
		at, deadline time.Duration
		want         time.Duration // until it goes off, at most
		least        time.Duration
	}{
		{0, 2 * time.Hour, 2 * time.Hour, time.Hour},
		{time.Minute, 3 * time.Hour, 2 * time.Hour, time.Hour},           // it is early enough
		{time.Minute, time.Hour, 59 * time.Minute, 50 * time.Minute},     // too late
		{time.Hour, 3 * time.Hour, 2 * time.Hour, 110 * time.Minute},     // it has gone off
		{2 * time.Hour, 6 * time.Hour, 4 * time.Hour, 210 * time.Minute}, // it would soon go off in vain
		{4 * time.Hour, 4*time.Hour + 1, 1, -time.Hour},                  // at once
	} {
		if err := a.by(now+int64(x.deadline), now+int64(x.at)); err != nil {
			t.Fatal(err)
		}
		var left unix.ItimerSpec
		if err := unix.TimerfdGettime(a.fd, &left); err != nil {
			t.Fatal(err)
		}
		if d := time.Duration(left.Value.Nano()); d > x.want || d < x.least {
			t.Errorf("%v for %v: it goes off in %v, want %v", x.at, x.deadline, d, x.want)
		}
	}
}

// An alarm is worth its cost when it was not set for a while: the longer, the more setting it costs, and longer if none
// was of use.
func TestAlarmAffordable(t *testing.T) {
	a, err := newAlarm()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(a.fd)
	now := Monotonic()
	want := func(deadline, want time.Duration) {
		t.Helper()
		if got := a.affordable(now+int64(deadline), now); got != now+int64(want) {
			t.Errorf("affordable in %v, want %v", time.Duration(got-now), want)
		}
	}
	want(time.Microsecond, time.Microsecond)
	for i := range 100 {
		now = Monotonic()
		if err := a.by(now+soon-int64(i)*1e3, now); err != nil {
			t.Fatal(err)
		}
	}
	if a.cost <= 0 || a.cost > maxCost {
		t.Errorf("setting it takes %d ns", a.cost)
	}
	now, a.cost = a.setAt, 5e3
	want(time.Microsecond, 8*time.Millisecond) // none was of use
	a.cost = 1e3
	want(time.Microsecond, 200*time.Microsecond)
	a.usedAt, a.cost = now-lately, 5e3
	want(time.Microsecond, time.Millisecond)
	want(time.Hour, time.Hour)
	if err := a.by(now+soon, now+1e3); err != nil { // which leaves it as it is
		t.Fatal(err)
	}
	want(time.Microsecond, time.Millisecond)
	if err := a.by(now-10e6+1, now-10e6); err != nil { // the loop was interrupted
		t.Fatal(err)
	}
	if a.cost > 6e3 {
		t.Errorf("an interruption of 10 ms made it %d ns", a.cost)
	}
}

// Timers of a loop that sleeps come one after the other, whether they are due soon or later than a nap, also those that
// are armed before an alarm that is set.
func TestTimersWakeLoop(t *testing.T) {
	l := startLoop(t, Config{})
	fired := make(chan int64, 1)
	near, far := l.NewTimer(func(now int64) { fired <- now }), l.NewTimer(func(int64) {})
	for i := range 20 {
		delay := []time.Duration{200 * time.Microsecond, time.Millisecond, 3 * time.Millisecond,
			time.Duration(nap) + 10*time.Millisecond}[i%4]
		asleep := l.Stats().Sleeps
		deadline := int64(0)
		l.Visit(func() {
			far.Arm(l.Now() + int64(time.Hour))
			near.Stop()
		})
		testutil.Eventually(t, "the loop sleeps", func() bool { return l.Stats().Sleeps > asleep })
		l.Visit(func() {
			deadline = l.Now() + int64(delay)
			near.Arm(deadline)
		})
		select {
		case now := <-fired:
			if now < deadline {
				t.Errorf("%d ns early", deadline-now)
			}
		case <-time.After(time.Minute):
			t.Fatal("the timer did not wake the loop")
		}
	}
}

// Where the kernel knows no time-outs in ns, none is early either.
func TestEpollWaitMillis(t *testing.T) {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(epfd)
	var events [1]unix.EpollEvent
	for _, timeout := range []int64{0, 1, 1500e3, 30e6} {
		begin := Monotonic()
		if n, took := epollWaitMillis(epfd, events[:], timeout), Monotonic()-begin; n != 0 || took < timeout {
			t.Errorf("%d ns: %d events after %d ns", timeout, n, took)
		}
	}
	fd, err := unix.Eventfd(1, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.EpollCtl(epfd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN}); err != nil {
		t.Fatal(err)
	}
	if n := epollWaitMillis(epfd, events[:], -1); n != 1 {
		t.Errorf("%d events, want 1", n)
	}
}
