package loop

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// The loop's own descriptors in epoll events; slots of watches are not negative.
const (
	wakeSlot  = -1
	alarmSlot = -2
)

// Watch is a descriptor that the loop watches for read readiness.
type Watch struct {
	l      *Loop
	h      handler
	fd     int
	slot   int
	gen    int32
	ready  func()
	closed bool // loop thread only
}

// Watch calls ready on the loop whenever fd is readable (level-triggered: ready must read, or it runs again in the next
// iteration) or has an error or hang-up pending. The caller still owns fd and closes it only after Close. Callable from
// anywhere. A descriptor can be watched once per loop: ErrDuplicate.
func (l *Loop) Watch(fd int, ready func(), opts ...Option) (*Watch, error) {
	w := &Watch{l: l, fd: fd, ready: ready}
	w.h.init("watch", opts)
	w.h.remove = w.closeOnLoop
	var err error
	l.Visit(func() { err = l.addWatch(w) })
	if err != nil {
		return nil, err
	}
	return w, nil
}

func (l *Loop) addWatch(w *Watch) error {
	if l.epfd < 0 {
		return ErrClosed
	}
	slot := len(l.watches)
	if n := len(l.freeSlots); n > 0 {
		slot = l.freeSlots[n-1]
	}
	l.watchGen++
	w.slot, w.gen = slot, l.watchGen
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(slot), Pad: w.gen}
	if err := unix.EpollCtl(l.epfd, unix.EPOLL_CTL_ADD, w.fd, &ev); err != nil {
		if errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("%w: fd %d", ErrDuplicate, w.fd)
		}
		return fmt.Errorf("loop: watch fd %d: %w", w.fd, err)
	}
	if slot == len(l.watches) {
		l.watches = append(l.watches, w)
	} else {
		l.freeSlots = l.freeSlots[:len(l.freeSlots)-1]
		l.watches[slot] = w
	}
	return nil
}

// Close ends the watch: once it has returned, ready does not run and will not be called. Callable from anywhere except
// other loops' threads, also from ready itself, and twice.
func (w *Watch) Close() { w.l.Visit(w.closeOnLoop) }

func (w *Watch) closeOnLoop() {
	if w.closed {
		return
	}
	w.closed = true
	l := w.l
	l.watches[w.slot] = nil
	l.freeSlots = append(l.freeSlots, w.slot)
	if l.epfd >= 0 {
		// An error means that the descriptor was closed too early, which removed it from epoll.
		_ = unix.EpollCtl(l.epfd, unix.EPOLL_CTL_DEL, w.fd, nil)
	}
}

// Poller is a source of work that the loop polls while it is awake, such as a ring in guest memory (whose kick eventfd,
// a Watch, only wakes the loop).
type Poller interface {
	// Poll does a bounded amount of work and reports whether there was any.
	Poll(now int64) (busy bool)
	// Prepare is called before the loop sleeps: request a wake-up (publish a flag), then check once more, and return
	// true if there may be work; then the loop does not sleep.
	Prepare() (mayWork bool)
	// Resume is called after every Prepare, when the loop is awake again, to withdraw the request.
	Resume()
}

type pollerEntry struct {
	p    Poller
	h    handler
	mail interface{ pending() bool }
}

// AddPoller adds p after the existing pollers. Callable from anywhere.
func (l *Loop) AddPoller(p Poller, opts ...Option) {
	l.addPoller(p, nil, opts)
}

func (l *Loop) addPoller(p Poller, mail interface{ pending() bool }, opts []Option) {
	e := &pollerEntry{p: p, mail: mail}
	e.h.init("poller", opts)
	e.h.remove = func() { l.removePoller(p) }
	l.Visit(func() { l.pollers = append(l.pollers, e) })
}

// RemovePoller removes p: once it has returned, p is not running and will not be called. An unknown p is ignored.
// Callable from anywhere except other loops' threads.
func (l *Loop) RemovePoller(p Poller) { l.Visit(func() { l.removePoller(p) }) }

func (l *Loop) removePoller(p Poller) {
	for i, e := range l.pollers {
		if e.p == p {
			l.pollers = slices.Delete(l.pollers, i, i+1)
			if l.worker == e {
				l.worker = nil
			}
			switch l.stage {
			case stagePrepare, stageSleep, stageResume:
				if i < l.prepared {
					l.prepared--
				}
				fallthrough
			case stagePollers:
				// The walk in progress must not skip the next poller, which moved up.
				if i < l.index {
					l.index--
				}
			}
			return
		}
	}
}

// Hook is a function that runs at the end of every iteration.
type Hook struct {
	l *Loop
	h handler
	f func()
}

// AtFlush calls f at the end of every iteration of the loop, to send batches of frames or completions. f must be cheap
// when there is nothing to send. Callable from anywhere.
func (l *Loop) AtFlush(f func(), opts ...Option) *Hook {
	k := &Hook{l: l, f: f}
	k.h.init("flush", opts)
	k.h.remove = k.closeOnLoop
	l.Visit(func() { l.hooks = append(l.hooks, k) })
	return k
}

// Close removes the hook: once it has returned, the function is not running and will not be called. Callable from
// anywhere except other loops' threads, and twice.
func (k *Hook) Close() { k.l.Visit(k.closeOnLoop) }

func (k *Hook) closeOnLoop() {
	l := k.l
	if i := slices.Index(l.hooks, k); i >= 0 {
		l.hooks = slices.Delete(l.hooks, i, i+1)
		if l.stage == stageFlush && i < l.index {
			l.index--
		}
	}
}
