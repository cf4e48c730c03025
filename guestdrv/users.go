package guestdrv

import "sync"

// users counts the calls that access the device's memory, so that Close can wait for them before it unmaps. Calls nest.
// Posting and polling take no lock and are not counted: their callers must have stopped before Close.
type users struct {
	mu     sync.Mutex
	n      int           // guarded by mu
	closed bool          // guarded by mu
	idle   chan struct{} // closed by the last leave after close
}

// enter fails with ErrClosed after close.
func (u *users) enter() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closed {
		return ErrClosed
	}
	u.n++
	return nil
}

func (u *users) leave() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.n--
	if u.closed && u.n == 0 {
		close(u.idle)
	}
}

// close makes enter fail. The returned channel is closed when the last user has left.
func (u *users) close() <-chan struct{} {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closed = true
	u.idle = make(chan struct{})
	if u.n == 0 {
		close(u.idle)
	}
	return u.idle
}
