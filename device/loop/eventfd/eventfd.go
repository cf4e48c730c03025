// Package eventfd lets goroutines wait for eventfds in Go's network poller. A goroutine that waits there holds neither
// a thread nor one of the scheduler's processors. A blocking system call holds both until the scheduler's monitor takes
// the processor away, which costs several thread switches each time, more than most waits are worth.
package eventfd

import (
	"encoding/binary"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Waiter waits for signals of an eventfd. One goroutine waits; any goroutine may set the deadline or close it.
//
// The count is never read. The poller asks epoll for edges, and each write causes one whatever the count is. Reading
// would make the eventfd writable, which is an edge, too, and wakes a thread for nothing in every process that polls it
// this way.
type Waiter struct {
	fd     int
	f      *os.File
	c      syscall.RawConn
	shared bool // with another process
	hint   Hint
}

// New makes an eventfd.
func New() (*Waiter, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	return open(fd)
}

// Dup makes a Waiter for a duplicate of fd, a non-blocking eventfd that another process may have, too.
func Dup(fd int) (*Waiter, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("eventfd: dup: %w", err)
	}
	_ = Prepare()
	w, err := open(dup)
	if err == nil {
		w.shared = true
	}
	return w, err
}

func open(fd int) (*Waiter, error) {
	w := &Waiter{fd: fd, f: os.NewFile(uintptr(fd), "eventfd")}
	var err error
	if w.c, err = w.f.SyscallConn(); err != nil {
		_ = w.f.Close()
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	return w, nil
}

// FD returns the descriptor, which the Waiter still owns.
func (w *Waiter) FD() int { return w.fd }

// Wait calls look, and calls it again after every signal until it returns true. A signal during look is not lost. Wait
// fails with os.ErrDeadlineExceeded, possibly before the first look, and with another error once w is closed.
func (w *Waiter) Wait(look func() bool) error {
	return w.c.Read(func(uintptr) bool { return look() })
}

// Signal signals. It neither blocks nor allocates, and may be called at any time.
func (w *Waiter) Signal() {
	_ = w.c.Write(func(fd uintptr) bool {
		if w.shared {
			Raise(int(fd), &w.hint)
		} else {
			Add(int(fd))
		}
		return true
	})
}

var one = binary.NativeEndian.AppendUint64(nil, 1)

// SetDeadline ends Wait at t; the zero time removes the deadline.
func (w *Waiter) SetDeadline(t time.Time) error { return w.f.SetReadDeadline(t) }

// Close ends Wait. It may be called twice.
func (w *Waiter) Close() { _ = w.f.Close() }
