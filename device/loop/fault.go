package loop

import "fmt"

// Fault reports that the code a loop ran touched memory that was not there: SIGBUS when a guest's memory file
// shrank or a huge page could not be had, SIGSEGV when a mapping is gone. The loop has unwound that call
// and goes on; whatever the call had half done stays half done and is the owner's to clean up.
type Fault struct {
	// Addr is the address that could not be accessed.
	Addr uintptr
	// Where names the handler that was running, such as "poller".
	Where string
	// Foreign is set when the memory belonged to another owner (see Loop.Blame), who has been told first: the handler
	// was merely interrupted by it, should release what it held, and go on.
	Foreign bool
}

// Error implements error.
func (f Fault) Error() string {
	return fmt.Sprintf("memory fault at address %#x in %s", f.Addr, f.Where)
}

// Owner is somebody whose memory a loop touches, for instance a VM's device. See Loop.Blame.
type Owner struct {
	onFault func(Fault)
}

// NewOwner makes an Owner; onFault runs on the loop that faulted.
func NewOwner(onFault func(Fault)) *Owner { return &Owner{onFault: onFault} }

// Blame declares whose memory the loop is about to touch, and returns the previous declaration, which the caller
// restores when it is done:
//
//	prev := l.Blame(d.owner)
//	... copy into the guest ...
//	l.Blame(prev)
//
// A fault in between is reported to that owner, and then, as Foreign, to the handler that was running. So a frame that
// arrives by the handler of one port and hits a hole in another port's VM stops that VM's device and not the first
// port. The declaration ends with the handler in any case. Loop thread only.
func (l *Loop) Blame(o *Owner) (prev *Owner) {
	prev = l.blamed
	l.blamed = o
	return prev
}

// Option adjusts a handler (Watch, AddPoller, AtFlush, NewTimer, NewMailbox).
type Option func(*handler)

// OnFault names the function that hears of memory faults in this handler, on the loop's thread. Without one, a handler
// that faults is removed from the loop and the fault is logged: running it again would most likely fault again.
func OnFault(f func(Fault)) Option { return func(h *handler) { h.onFault = f } }

// Name gives the handler a name for Fault.Where and log lines.
func Name(name string) Option { return func(h *handler) { h.name = name } }

// handler is what the loop keeps about anything it calls.
type handler struct {
	name    string
	onFault func(Fault)
	remove  func() // takes it out of the loop, on the loop's thread; nil where it runs only once anyway
}

func (h *handler) init(name string, opts []Option) {
	h.name = name
	for _, o := range opts {
		o(h)
	}
}

// recoverFault is deferred around every stretch of an iteration. It takes memory faults only; every other panic is a
// bug and ends the process as usual.
func (l *Loop) recoverFault() {
	h, blamed := l.current, l.blamed
	l.current, l.blamed = nil, nil
	if h == nil && l.doing == nil {
		return
	}
	r := recover()
	if r == nil {
		return
	}
	// Only faults at a real address carry one (debug.SetPanicOnFault); nil dereferences do not.
	a, ok := r.(interface {
		error
		Addr() uintptr
	})
	if !ok {
		panic(r)
	}
	l.faults.Add(1)
	f := Fault{Addr: a.Addr(), Where: "Do"}
	if h != nil {
		f.Where = h.name
	}
	if blamed != nil && blamed.onFault != nil {
		blamed.onFault(f)
		f.Foreign = true
	}
	if d := l.doing; d != nil {
		// As if f had been called directly: the fault belongs to the goroutine that called Do, too.
		l.doing = nil
		d.fault = a
		close(d.done)
		return
	}
	switch {
	case h.onFault != nil:
		h.onFault(f)
	case f.Foreign:
	default:
		l.log.Error("handler removed after a memory fault", "handler", h.name, "address", fmt.Sprintf("%#x", f.Addr))
		if h.remove != nil {
			h.remove()
		}
	}
}
