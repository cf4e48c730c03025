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
	l.arrange(func() { err = l.addWatch(w) })
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
func (w *Watch) Close() { w.l.arrange(w.closeOnLoop) }

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

// Hook is a function that runs at the end of an iteration.
type Hook struct {
	l      *Loop
	h      handler
	f      func()
	armed  bool // it is in l.armed
	closed bool
}

// AtFlush calls f at the end of every iteration of the loop, to send batches of frames. f must be cheap when there is
// nothing to send. Callable from anywhere.
func (l *Loop) AtFlush(f func(), opts ...Option) *Hook {
	k := l.NewHook(f, opts...)
	l.arrange(func() { l.hooks = append(l.hooks, k) })
	return k
}

// NewHook makes a hook whose f is called at the end of iterations for which it is armed. Callable from anywhere.
func (l *Loop) NewHook(f func(), opts ...Option) *Hook {
	k := &Hook{l: l, f: f}
	k.h.init("flush", opts)
	k.h.remove = k.closeOnLoop
	return k
}

// Arm has the function called at the end of this iteration; armed by a hook, of the next one. Loop thread only.
func (k *Hook) Arm() {
	if !k.armed && !k.closed {
		k.armed, k.l.busy = true, true // no sleep before it was called
		k.l.armed = append(k.l.armed, k)
	}
}

// Close removes the hook: once it has returned, the function is not running and will not be called. Callable from
// anywhere except other loops' threads, and twice.
func (k *Hook) Close() { k.l.arrange(k.closeOnLoop) }

func (k *Hook) closeOnLoop() {
	l := k.l
	k.closed, k.armed = true, false
	if i := slices.Index(l.hooks, k); i >= 0 {
		l.hooks = slices.Delete(l.hooks, i, i+1)
		if l.stage == stageFlush && i < l.index {
			l.index--
		}
	}
	if i := slices.Index(l.armed, k); i >= 0 {
		l.armed = slices.Delete(l.armed, i, i+1)
		if l.stage == stageArmed && i < l.due {
			l.due--
			if i < l.index {
				l.index--
			}
		}
	}
}
