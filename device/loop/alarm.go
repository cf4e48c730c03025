package loop

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// alarm ends a loop's sleep when the next timer is due soon. It is a timer of the kernel that stays set over many
// sleeps, where a time-out of epoll would be set and taken back by each: under traffic a loop sleeps for microseconds
// at a time, with a timer that is due in a fraction of a millisecond, before the kernel's next tick. Setting such a
// timer programs the processor's, which in a virtual machine costs microseconds (RDMA WRITEs of 8 bytes between two
// hosts took 43 us in place of 36). For a timer that is due later epoll's time-out is the cheaper one: while an alarm
// is set, each sleep of the processor takes more (a round trip between programs that sleep took 5 % more).
//
// A timer that only makes something faster (affordable) is not worth more than a small part of the loop's time. Where
// the processor's timer is its own, setting it takes a fraction of a microsecond, and an alarm is always worth it. In a
// virtual machine within another one it takes 10 us, and 30 to go off: there, under traffic, it is worth it only if
// such a timer was of use lately.
type alarm struct {
	fd     int
	at     int64 // when it goes off; in the past: it is not set
	setAt  int64 // when it was set last; 0: never
	cost   int64 // what setting it takes, ns, smoothed
	usedAt int64 // when an affordable timer was last of use; 0: never
}

const (
	alarmShare = 200  // settings that nothing depends on take one part in so many of the loop's time at most
	maxCost    = 10e3 // ns; longer ones were interrupted, and no timer shall be late by more than alarmShare*maxCost
	costWeight = 8    // the newest cost counts for one part in so many
	soon       = 1e6  // ns; timers that are due later need no alarm
	cheap      = 1e3  // ns; a cost up to which use does not matter
	lately     = 15e8 // ns; some 5,000 round trips, of which five lose a packet where one in a thousand is lost
	idleFactor = 8    // times as long between settings where none was of use lately: under traffic that is never
)

func newAlarm() (alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return alarm{fd: -1}, fmt.Errorf("timerfd_create: %w", err)
	}
	return alarm{fd: fd}, nil
}

// by makes sure that it goes off at the deadline or before, and after now. Where it is set for less than half of that
// time it is put off: the timers were armed anew meanwhile, and it would wake the loop in vain, which costs more. After
// an error the caller must not rely on it.
func (a *alarm) by(deadline, now int64) error {
	if now < a.at && a.at <= deadline && a.at-now >= (deadline-now)/2 {
		return nil
	}
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(deadline - now)}
	if err := unix.TimerfdSettime(a.fd, 0, &spec, nil); err != nil {
		return err
	}
	a.at, a.setAt = deadline, now
	a.cost += (min(Monotonic()-now, maxCost) - a.cost) / costWeight
	return nil
}

// affordable returns the earliest time from deadline on for which setting the alarm is worth its cost.
func (a *alarm) affordable(deadline, now int64) int64 {
	pause := alarmShare * a.cost
	if a.cost > cheap && (a.usedAt == 0 || now-a.usedAt > lately) {
		pause *= idleFactor
	}
	return max(deadline, a.setAt+pause)
}
