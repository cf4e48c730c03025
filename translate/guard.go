package translate

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
)

// ErrMemoryGone: an access to guest memory raised SIGBUS, because the file behind it was truncated or no huge page was
// available.
var ErrMemoryGone = errors.New("guest memory is gone")

// Guard runs f, which touches guest memory, on a control goroutine, and turns a memory fault into ErrMemoryGone, so
// that one VM's memory cannot end the daemon. Other panics are passed on. Loops do not use Guard; they recover per
// batch. f must release its resources by defer.
func Guard(f func() error) (err error) {
	old := debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(old)
	defer func() {
		if r := recover(); r != nil {
			fault, ok := FaultAddr(r)
			if !ok {
				panic(r)
			}
			err = fmt.Errorf("host address %#x: %w", fault, ErrMemoryGone)
		}
	}()
	return f()
}

// FaultAddr reports whether a recovered value is a memory fault raised under debug.SetPanicOnFault, and its host
// address.
func FaultAddr(recovered any) (addr uintptr, ok bool) {
	e, isRuntime := recovered.(runtime.Error)
	if !isRuntime {
		return 0, false
	}
	var a interface{ Addr() uintptr }
	if !errors.As(e, &a) {
		return 0, false
	}
	return a.Addr(), true
}
