package virtq

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/loop/eventfd"
)

// Notifier is an outgoing eventfd whose file the front end may exchange while the data path signals it (vhost-user
// SET_VRING_CALL: QEMU does so each time a guest masks an interrupt). The descriptor number never changes: Set replaces
// the file behind it with dup3, so that a loop never writes to a number that was closed and reused.
type Notifier struct {
	on   atomic.Bool // a file is set
	fd   atomic.Int32
	hint eventfd.Hint

	mu     sync.Mutex // serialises Set and Close
	closed bool
}

// NewNotifier returns a notifier with no file: Signal does nothing.
func NewNotifier() *Notifier {
	_ = eventfd.Prepare() // the daemon logs why that failed
	n := &Notifier{}
	n.fd.Store(-1)
	return n
}

// Set makes fd the file to be signalled; -1 means none (the driver polls). The caller still owns fd. Any goroutine may
// call it at any time.
func (n *Notifier) Set(fd int) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return errors.New("virtq: notifier is closed")
	}
	if fd < 0 {
		n.on.Store(false)
		return nil
	}
	if cur := n.fd.Load(); cur >= 0 {
		if err := unix.Dup3(fd, int(cur), unix.O_CLOEXEC); err != nil {
			return fmt.Errorf("virtq: replace eventfd: %w", err)
		}
	} else {
		d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("virtq: duplicate eventfd: %w", err)
		}
		n.fd.Store(int32(d))
	}
	n.on.Store(true)
	return nil
}

// FD returns the descriptor, which the Notifier owns; -1 if no file is set. No other goroutine may call Set meanwhile.
func (n *Notifier) FD() int {
	if !n.on.Load() {
		return -1
	}
	return int(n.fd.Load())
}

// Signal adds one to the eventfd. It does not block, whatever the front end does to the file. If the front end lets its
// counter overflow, the signal is lost.
func (n *Notifier) Signal() {
	if !n.on.Load() {
		return
	}
	eventfd.Raise(int(n.fd.Load()), &n.hint)
}

// Close closes the descriptor. The caller ensures that Signal is not called any more. It may be called twice.
func (n *Notifier) Close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return
	}
	n.closed = true
	n.on.Store(false)
	if fd := n.fd.Load(); fd >= 0 {
		_ = unix.Close(int(fd))
	}
}
