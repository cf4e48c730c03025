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

// Contain runs f, which is control work of one device or connection on a goroutine of its own. A panic of f becomes a
// *BugError, also if guest memory vanished where no Guard expected it (ErrMemoryGone); the caller logs it with its
// stack and ends that device (TR-6). It is not for loops, which work for all VMs: there a bug ends the process.
func Contain(f func() error) (err error) {
	old := debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(old)
	defer func() {
		if r := recover(); r != nil {
			err = &BugError{Value: r, Stack: string(debug.Stack())}
		}
	}()
	return f()
}

// BugError is a panic that Contain has recovered.
type BugError struct {
	Value any    // of the panic
	Stack string // where it occurred
}

// Error implements error. The stack is logged apart.
func (e *BugError) Error() string { return fmt.Sprintf("bug in vnicd: %v", e.Value) }

// Unwrap makes a memory fault an ErrMemoryGone.
func (e *BugError) Unwrap() error {
	if _, ok := FaultAddr(e.Value); ok {
		return ErrMemoryGone
	}
	if err, ok := e.Value.(error); ok {
		return err
	}
	return nil
}

// StackOf returns the stack of the BugError in err, "" if there is none.
func StackOf(err error) string {
	var b *BugError
	if errors.As(err, &b) {
		return b.Stack
	}
	return ""
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

// Guarded is the right to enter epochs, and so to access guest memory: proof that a memory fault of its holder ends in
// an error or in a fault handler, and not the process. Loops have one (loop.Loop.Guarded); other goroutines get none,
// as Epochs.Within enters for them. The zero value permits nothing.
type Guarded struct{ slot uint8 } // reader slot + 1

// ByLoop returns the right of a loop whose reader slot that is. Only package loop calls it, whose threads recover
// memory faults, and tests; .ci/lint checks that.
func ByLoop(slot int) Guarded { return Guarded{slot: uint8(uint(slot)%epochSlots) + 1} }

// Within runs f, which accesses guest memory, on a control goroutine: inside the current epoch with that reader slot
// (see Enter), and guarded (see Guard). f must not wait.
func (e *Epochs) Within(slot int, f func() error) error {
	return Guard(func() error {
		g := ByLoop(slot)
		t := e.Enter(g)
		defer e.Leave(slot, t)
		return f()
	})
}
