package loop

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/loop/eventfd"
)

// stage and index are the position in the iteration. Both are kept in the Loop, so that an iteration interrupted by a
// memory fault continues after the handler that faulted.
type stage uint8

const (
	stageEvents stage = iota
	stagePosts
	stageTimers
	stagePollers
	stageArmed
	stageFlush
	stagePrepare
	stageSleep
)

// pass runs an iteration from l.stage on and returns true at its end, false if a memory fault interrupted it (the next
// call continues). With block it may sleep.
func (l *Loop) pass(block bool) (complete bool) {
	defer l.recoverFault()
	for {
		switch l.stage {
		case stageEvents:
			if l.index == 0 {
				l.begin()
			}
			for l.index < l.nev {
				l.index++
				l.runEvent(&l.events[l.index-1])
			}
			l.nev = 0
			l.enter(stagePosts)
		case stagePosts:
			for l.index < maxPosts && l.runPost() {
				l.index++
				l.busy = true
			}
			l.enter(stageTimers)
		case stageTimers:
			l.runTimers()
			l.enter(stagePollers)
		case stagePollers:
			for l.index < len(l.awake) {
				e := l.awake[l.index]
				l.index++
				l.begins(&e.h)
				l.poll(e)
				l.current = nil
				l.blamed = nil
			}
			l.due = len(l.armed)
			l.enter(stageArmed)
		case stageArmed:
			for l.index < l.due {
				k := l.armed[l.index]
				l.index++
				k.armed = false
				l.begins(&k.h)
				k.f()
				l.current = nil
				l.blamed = nil
			}
			l.armed = slices.Delete(l.armed, 0, l.due)
			l.enter(stageFlush)
		case stageFlush:
			for l.index < len(l.hooks) {
				k := l.hooks[l.index]
				l.index++
				l.begins(&k.h)
				k.f()
				l.current = nil
				l.blamed = nil
			}
			l.rounds.Store(l.rounds.Load() + 1)
			if l.busy {
				l.adapt(l.now - l.lastWork)
				l.lastWork = l.now
			}
			if !block || l.busy || l.now-l.lastWork < l.patience {
				l.enter(stageEvents)
				return true
			}
			l.mayWork = false
			l.enter(stagePrepare)
		case stagePrepare:
			for l.index < len(l.awake) {
				e := l.awake[l.index]
				l.index++
				l.begins(&e.h)
				e.asked = true
				if e.p.Prepare() {
					l.mayWork = true
				}
				l.current = nil
				l.blamed = nil
			}
			l.enter(stageSleep)
		case stageSleep:
			if !l.mayWork {
				if l.sample.on {
					l.stopSample()
				}
				l.sleep()
			}
			// After a wake-up the loop polls once in full, and keeps polling if that finds work.
			l.enter(stageEvents)
			return true
		}
	}
}

// begins records that a handler is about to run.
func (l *Loop) begins(h *handler) {
	l.current = h
	if l.sample.on {
		l.switchMeter(h.meter)
	}
}

func (l *Loop) enter(s stage) { l.stage, l.index = s, 0 }

// begin starts an iteration: time, and epoll unless sleep has just filled the event list.
func (l *Loop) begin() {
	l.now = l.clock.Now()
	l.busy = false
	l.takeRoused()
	l.nextSample()
	if l.nev > 0 {
		return
	}
	// While polling, descriptors are checked only now and then.
	if l.idleRounds++; l.idleRounds < epollEvery && l.now-l.looked < epollAfter && len(l.awake) > 0 && l.spin > 0 {
		return
	}
	l.idleRounds, l.looked = 0, l.now
	l.nev = epollNow(l.epfd, l.events)
	if l.nev > 0 {
		l.idleRounds = epollEvery // busy descriptors are checked every time
	}
}

// adapt sets how long to poll before the next sleep, from the time without work, in ns. The time is halved after
// polling in vain, because on few cores polling takes time from the threads whose work the loop waits for. The time
// without work includes waking up; so after maxMisses the full time is tried, in case work would now arrive while
// polling.
func (l *Loop) adapt(idle int64) {
	if idle > l.spin {
		l.patience /= 2
		l.misses++
	}
	if idle <= l.spin || l.misses > maxMisses {
		l.patience, l.misses = l.spin, 0
	}
}

// sleep waits in epoll until an event, a wake-up or the next timer: until the alarm if that is due soon.
func (l *Loop) sleep() {
	timeout := int64(-1)
	if next := l.timers.next(); next != 0 {
		if _, manual := l.clock.(*ManualClock); !manual {
			now := l.clock.Now()
			switch {
			case next <= now:
				return
			case next-now >= soon:
				timeout = next - now
			case l.alarm.by(next, now) != nil:
				return
			}
		}
	}
	l.sleeping.Store(1)
	if l.posts.empty() && !l.stopping.Load() && !l.rousing() && !l.mailPending() && !l.manualDue() {
		l.sleeps.Store(l.sleeps.Load() + 1)
		l.nev = epollWait(l.epfd, l.events, timeout)
	}
	l.sleeping.Store(0)
}

// mailPending checks the mailboxes again after sleeping was set; see wake.
func (l *Loop) mailPending() bool {
	for _, e := range l.awake {
		if e.mail != nil && e.mail.pending() {
			return true
		}
	}
	return false
}

// manualDue reports whether a manual clock was moved past the next timer before sleeping was set.
func (l *Loop) manualDue() bool {
	m, ok := l.clock.(*ManualClock)
	if !ok {
		return false
	}
	next := l.timers.next()
	return next != 0 && next <= m.Now()
}

func (l *Loop) runEvent(ev *unix.EpollEvent) {
	switch ev.Fd {
	case alarmSlot: // runTimers has the work, if there is any
		return
	case wakeSlot:
		eventfd.Take(l.wakefd)
		l.busy = true
		return
	}
	if int(ev.Fd) >= len(l.watches) {
		return
	}
	// A handler of this batch may have closed the watch, and a new one may have its slot.
	w := l.watches[ev.Fd]
	if w == nil || w.gen != ev.Pad {
		return
	}
	l.busy = true
	l.rouseOwner(w.h.meter)
	l.begins(&w.h)
	w.ready()
	l.current = nil
	l.blamed = nil
}

// runPost runs the oldest post; false if there is none.
func (l *Loop) runPost() bool {
	p, ok := l.posts.get()
	if !ok {
		return false
	}
	l.rouseFor(p.whom)
	if d := p.d; d != nil {
		d.err = l.protect(d.f)
		close(d.done)
		return true
	}
	l.begins(&postHandler)
	p.f()
	l.current = nil
	l.blamed = nil
	return true
}

var postHandler = handler{name: "post"}

// runTimers fires the due timers. A timer that arms itself for a time that is due fires in the next iteration.
func (l *Loop) runTimers() {
	for limit := len(l.timers); l.index < limit; l.index++ {
		t := l.timers.due(l.now)
		if t == nil {
			return
		}
		l.busy = true
		l.rouseOwner(t.h.meter)
		l.begins(&t.h)
		t.f(l.now)
		l.current = nil
		l.blamed = nil
	}
}
