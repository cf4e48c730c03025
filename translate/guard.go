package translate

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
)

// ErrMemoryGone says that guest memory faulted while it was being touched: the
// file behind it was shrunk, or a huge page could not be had (SIGBUS).
var ErrMemoryGone = errors.New("guest memory is gone")

// Guard runs f, which touches guest memory, on a control goroutine, and turns a
// memory fault into ErrMemoryGone: one VM's memory must never kill the daemon
// (architecture.md, decision 4). Other panics pass. Loops do not use it; they
// recover per batch. f must release what it holds by defer.
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

// FaultAddr tells whether a recovered value is a memory fault raised under
// debug.SetPanicOnFault, and at which host address.
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
