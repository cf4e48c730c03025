package loop

import (
	"fmt"
	"runtime/debug"

	"github.com/vnicd/vnicd/translate"
)

// Fault reports that a handler accessed memory that was not there: SIGBUS if a guest's memory file was truncated or no
// huge page was available, SIGSEGV if a mapping is gone. The loop has unwound that call and continues; its owner must
// clean up what the call left half done.
type Fault struct {
	// Addr is the address that could not be accessed.
	Addr uintptr
	// Where names the handler that was running, such as "poller".
	Where string
	// Foreign is set if the memory belonged to another owner (see Loop.Blame), which has been notified first: the
	// handler was only interrupted; it should release what it held, and continue.
	Foreign bool
}

// Unwrap makes a Fault a translate.ErrMemoryGone.
func (f Fault) Unwrap() error { return translate.ErrMemoryGone }

// Error implements error.
func (f Fault) Error() string {
	return fmt.Sprintf("memory fault at address %#x in %s", f.Addr, f.Where)
}

// Owner is the owner of memory that a loop accesses, for instance a VM's device. See Loop.Blame.
type Owner struct {
	onFault func(Fault)
}

// NewOwner makes an Owner; onFault runs on the loop that faulted. As all fault handlers, it must not access guest
// memory: it sets flags and schedules work.
func NewOwner(onFault func(Fault)) *Owner { return &Owner{onFault: onFault} }

// Blame declares whose memory the loop is about to access, and returns the previous declaration, which the caller
// restores afterwards:
//
//	prev := l.Blame(d.owner)
//	... copy into the guest ...
//	l.Blame(prev)
//
// A fault in between is reported to that owner, and then, as Foreign, to the handler that was running. So if a frame
// received by one port's handler hits a hole in another port's VM, that VM's device stops and not the first port. The
// declaration ends with the handler in any case. Loop thread only.
func (l *Loop) Blame(o *Owner) (prev *Owner) {
	prev = l.blamed
	l.blamed = o
	return prev
}

// Option adjusts a handler (Watch, AddPoller, AtFlush, NewTimer, NewMailbox).
type Option func(*handler)

// OnFault sets the function that is called on the loop's thread after a memory fault in this handler. It must not
// access guest memory; it sets flags and schedules work. Without one, the handler is removed from the loop and the
// fault is logged, because running it again would probably fault again; likewise if the function itself faults.
func OnFault(f func(Fault)) Option { return func(h *handler) { h.onFault = f } }

// Name names the handler in Fault.Where and log lines.
func Name(name string) Option { return func(h *handler) { h.name = name } }

// handler is the loop's record of anything that it calls.
type handler struct {
	name    string
	onFault func(Fault)
	meter   *Meter // whose time it is; nil: nobody's
	remove  func() // removes it from the loop, on the loop's thread; nil if it runs only once
}

func (h *handler) init(name string, opts []Option) {
	h.name = name
	for _, o := range opts {
		o(h)
	}
}

// recoverFault is deferred around every part of an iteration. It recovers memory faults only; any other panic is a bug
// and ends the process.
func (l *Loop) recoverFault() {
	h, blamed := l.current, l.blamed
	l.current, l.blamed = nil, nil
	if h == nil {
		return
	}
	r := recover()
	if r == nil {
		return
	}
	f := l.fault(r, h.name, blamed)
	l.rouseOwner(h.meter) // a mailbox's value was interrupted
	switch {
	case h.onFault != nil:
		if l.notify(h.onFault, f) {
			return
		}
	case f.Foreign:
		return
	default:
		l.log.Error("handler removed after a memory fault", "handler", h.name, "address", fmt.Sprintf("%#x", f.Addr))
	}
	if h.remove != nil {
		h.remove()
	}
}

// protect runs f on the thread that has the loop's state, and returns the memory fault that interrupted it, or nil.
func (l *Loop) protect(f func()) (err error) {
	outer := l.blamed
	old := debug.SetPanicOnFault(true) // before Start and after Close the goroutine is the caller's
	defer func() {
		debug.SetPanicOnFault(old)
		blamed := l.blamed
		l.blamed = outer
		if r := recover(); r != nil {
			err = l.fault(r, "Do", blamed)
		}
	}()
	f()
	return nil
}

// fault turns a recovered value into a Fault, and notifies the owner of the memory. It passes other panics on.
func (l *Loop) fault(recovered any, where string, blamed *Owner) Fault {
	addr, ok := translate.FaultAddr(recovered) // nil dereferences, for one, have no address
	if !ok {
		panic(recovered)
	}
	l.faults.Add(1)
	f := Fault{Addr: addr, Where: where}
	if blamed != nil && blamed.onFault != nil {
		l.notify(blamed.onFault, f)
		f.Foreign = true
	}
	return f
}

// notify calls a fault handler. It runs while the iteration is being unwound, so a memory fault in it would otherwise
// end the process. False: there was one.
func (l *Loop) notify(onFault func(Fault), f Fault) (ok bool) {
	defer func() {
		if r := recover(); r != nil {
			addr, is := translate.FaultAddr(r)
			if !is {
				panic(r)
			}
			l.faults.Add(1)
			l.log.Error("fault handler accessed memory that is gone, which it must not do", "handler", f.Where, "address",
				fmt.Sprintf("%#x", addr))
		}
	}()
	onFault(f)
	return true
}
