package systemd

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// Store is systemd's file descriptor store (FileDescriptorStoreMax=). systemd passes what is kept there to the service
// at its next start, however the service ended. Names contain a slash, unlike those of sockets.
type Store struct {
	frozen  atomic.Bool
	hurried atomic.Int64 // until when Keep does not wait, as time.Now().UnixNano()
}

// A Keep waits for systemd for at most keepLimit. If that was not enough, systemd is stuck or overloaded, and those
// that follow within hurry do not wait.
const (
	keepLimit = 2 * time.Second
	hurry     = time.Minute
)

// Keep stores a copy of fd under name. It waits until systemd has it, because systemd drops messages of a process that
// was killed before it reads them: what relies on fd, such as a driver's first queue, begins afterwards (CO-2). A
// systemd that does not read its messages delays, but does not prevent it.
func (s *Store) Keep(name string, fd int) error {
	if err := notify("FDSTORE=1\nFDNAME="+name, fd); err != nil {
		return err
	}
	now := time.Now()
	if now.UnixNano() < s.hurried.Load() {
		return nil
	}
	err := s.Flush(keepLimit)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		s.hurried.Store(now.Add(hurry).UnixNano())
		return nil
	}
	return err
}

// Forget removes the descriptors stored under name.
func (s *Store) Forget(name string) error {
	if s.frozen.Load() {
		return nil
	}
	return notify("FDSTOREREMOVE=1\nFDNAME=" + name)
}

// Freeze makes Forget do nothing: the service is ending and leaves its descriptors to the next.
func (s *Store) Freeze() { s.frozen.Store(true) }

// Flush waits until systemd has read what was kept, for at most limit: it drops messages of a process that has ended.
func (s *Store) Flush(limit time.Duration) error {
	if !Managed() {
		return nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("systemd: %w", err)
	}
	defer r.Close()
	err = notify("BARRIER=1", int(w.Fd())) // systemd closes it when it comes to this message (sd_notify_barrier(3))
	_ = w.Close()
	if err != nil {
		return err
	}
	_ = r.SetReadDeadline(time.Now().Add(limit))
	if _, err := r.Read(make([]byte, 1)); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("systemd does not read its messages: %w", err)
	}
	return nil
}

// Ending reports whether Freeze was called.
func (s *Store) Ending() bool { return s.frozen.Load() }

// Kept returns the descriptors that were passed, by name. The caller owns them.
func (s *Store) Kept() map[string]int {
	kept := map[string]int{}
	passed(func(fd int, name string) bool {
		switch _, twice := kept[name]; {
		case !strings.Contains(name, "/"):
		case twice:
			_ = syscall.Close(fd)
		default:
			syscall.CloseOnExec(fd)
			kept[name] = fd
		}
		return true
	})
	return kept
}
