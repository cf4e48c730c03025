package loop

import (
	"slices"
	"sync/atomic"
)

// A loop serves all VMs of a host, of which most are idle. So a poller that has had no work for restAfter rests: it has
// been asked to have itself woken (Prepare), as before the loop sleeps, and the loop does not call it until somebody
// rouses it:
//
//	a handler of the same owner   a Watch, a Timer, or a Mailbox with a value, that has the same Meter
//	Do, Visit, Post               their functions may have made work for anybody
//	DoFor, VisitFor, PostFor      and theirs for one owner, or for nobody
//	Wake, Polled.Rouse            whoever makes work for it in another owner's handler
//	Mailbox.Put                   for a mailbox, from any thread
//
// A poller without a Meter never rests, unless it is a mailbox.

// restAfter is the time without work, in ns, after which a poller rests, unless SpinFor is longer: enough for an
// exchange of messages to go on without wake-ups, which cost a guest a system call or an exit.
const restAfter = 1e6

// everyone is the owner of all pollers.
var everyone Meter

// Poller is a source of work that the loop polls while it is awake, such as a ring in guest memory (whose kick eventfd,
// a Watch, only wakes the loop).
type Poller interface {
	// Poll does a bounded amount of work and reports whether there was any.
	Poll(now int64) (busy bool)
	// Prepare is called before the loop sleeps, or leaves the poller alone: request a wake-up (publish a flag), then check
	// once more, and return true if there may be work; then the loop does not sleep.
	Prepare() (mayWork bool)
	// Resume is called between a Prepare and the next Poll, to withdraw the request. There is none if the poller is
	// removed before.
	Resume()
}

// Polled is a poller's record in its loop.
type Polled struct {
	l    *Loop
	p    Poller
	h    handler
	mail interface{ pending() bool } // nil: it is no mailbox

	// Owned by the loop's thread.
	worked  int64   // when it last had work, or was roused
	asked   bool    // Prepare was called, and Resume was not
	resting bool    // it is not in l.awake
	closed  bool    // it was removed
	sibling *Polled // the next of its owner that rests

	// Of a mailbox that rests. Whoever resets quiet puts it on l.roused.
	quiet flag
	next  *Polled
}

// AddPoller adds p after the pollers that are awake. Callable from anywhere.
func (l *Loop) AddPoller(p Poller, opts ...Option) *Polled {
	e := &Polled{l: l, p: p}
	l.addPoller(e, "poller", opts)
	return e
}

func (l *Loop) addPoller(e *Polled, name string, opts []Option) {
	e.h.init(name, opts)
	e.h.remove = func() { l.removePoller(e.p) }
	l.arrange(func() {
		e.worked = l.now
		l.pollers = append(l.pollers, e)
		l.awake = append(l.awake, e)
	})
}

// RemovePoller removes p: once it has returned, p is not running and will not be called. An unknown p is ignored.
// Callable from anywhere except other loops' threads.
func (l *Loop) RemovePoller(p Poller) { l.arrange(func() { l.removePoller(p) }) }

func (l *Loop) removePoller(p Poller) {
	i := slices.IndexFunc(l.pollers, func(e *Polled) bool { return e.p == p })
	if i < 0 {
		return
	}
	e := l.pollers[i]
	l.pollers = slices.Delete(l.pollers, i, i+1)
	e.closed = true
	if l.worker == e {
		l.worker = nil
	}
	if e.resting {
		e.forget()
	} else {
		l.leave(e)
	}
}

// leave removes e from the walk. One in progress does not skip the next poller, which moves up.
func (l *Loop) leave(e *Polled) {
	i := slices.Index(l.awake, e)
	l.awake = slices.Delete(l.awake, i, i+1)
	if (l.stage == stagePollers || l.stage == stagePrepare) && i < l.index {
		l.index--
	}
}

// poll calls a poller in the walk over those that are awake.
func (l *Loop) poll(e *Polled) {
	if e.asked {
		e.asked = false
		e.p.Resume()
	}
	switch {
	case e.p.Poll(l.now):
		l.busy = true
		e.worked = l.now
		if e.mail != nil {
			l.rouseOwner(e.h.meter)
		} else if e != l.worker {
			l.worker, l.sharedAt = e, l.now
		}
	case !e.closed && l.now-e.worked >= l.rest && (e.mail != nil || e.h.meter != nil):
		l.letRest(e)
	}
}

// letRest lets e rest, unless there is work now.
func (l *Loop) letRest(e *Polled) {
	e.asked = true
	if e.p.Prepare() {
		e.worked, l.busy = l.now, true
		return
	}
	if e.closed { // by its Prepare
		return
	}
	if e.mail != nil {
		// Put appends a value before it checks quiet, and this sets quiet before it checks for values.
		e.quiet.set()
		if e.mail.pending() && e.quiet.take() {
			e.worked, l.busy = l.now, true
			return
		}
	} else if s := e.siblings(); s != nil {
		e.sibling, *s = *s, e
	}
	e.resting = true
	l.resting++
	l.leave(e)
}

// siblings is the list of the pollers of the same owner that rest on this loop; nil if the poller has no owner.
func (e *Polled) siblings() **Polled {
	if e.h.meter == nil {
		return nil
	}
	return &e.h.meter.slots[e.l.id].resting
}

// forget ends e's rest without a rousal.
func (e *Polled) forget() {
	e.resting = false
	e.l.resting--
	if e.mail != nil {
		return
	}
	for s := e.siblings(); *s != nil; s = &(*s).sibling {
		if *s == e {
			*s, e.sibling = e.sibling, nil
			return
		}
	}
}

// Rouse ends the poller's rest: it is called in this iteration, or in the next one. Cheap if it does not rest. Loop
// thread only.
func (e *Polled) Rouse() {
	if e.resting {
		e.rouse()
	}
}

func (e *Polled) rouse() {
	e.forget()
	e.worked = e.l.now
	e.l.awake = append(e.l.awake, e)
	e.l.busy = true // so that the loop does not sleep before it has been called
}

// rouseOwner rouses the pollers of one owner, none for nil.
func (l *Loop) rouseOwner(m *Meter) {
	if m == nil {
		return
	}
	for m.slots[l.id].resting != nil {
		m.slots[l.id].resting.rouse()
	}
}

// rouseFor rouses an owner's pollers, or those of everyone.
func (l *Loop) rouseFor(m *Meter) {
	if m == &everyone {
		l.rouseAll()
	} else {
		l.rouseOwner(m)
	}
}

// rouseAll rouses all pollers but mailboxes, which have no work but by Put.
func (l *Loop) rouseAll() {
	if l.resting == 0 {
		return
	}
	for _, e := range l.pollers {
		if e.mail == nil {
			e.Rouse()
		}
	}
}

// rouseFromAny rouses a mailbox after quiet was taken. Callable from any thread.
func (e *Polled) rouseFromAny() {
	for {
		e.next = e.l.roused.Load()
		if e.l.roused.CompareAndSwap(e.next, e) {
			return
		}
	}
}

// takeRoused ends the rest of what other threads have roused.
func (l *Loop) takeRoused() {
	if l.asked.Load() {
		l.asked.Store(false)
		l.rouseAll()
	}
	if l.roused.Load() == nil {
		return
	}
	for e := l.roused.Swap(nil); e != nil; {
		next := e.next
		e.next = nil
		if e.resting { // it may have been removed
			e.rouse()
		}
		e = next
	}
}

// rousing reports whether takeRoused has work.
func (l *Loop) rousing() bool { return l.asked.Load() || l.roused.Load() != nil }

// flag is set by one thread; one of several that find it set takes it.
type flag struct{ v atomic.Bool }

func (f *flag) set() { f.v.Store(true) }

func (f *flag) take() bool { return f.v.Load() && f.v.CompareAndSwap(true, false) }
