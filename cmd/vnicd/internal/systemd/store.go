package systemd

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Store is systemd's file descriptor store (FileDescriptorStoreMax=). systemd passes what is kept there to the service
// at its next start, however the service ended. Names contain a slash, unlike those of sockets. The zero value is an
// empty store; Kept, if it is called, comes first.
type Store struct {
	names   names
	frozen  atomic.Bool
	hurried atomic.Int64 // until when Keep does not wait, as time.Now().UnixNano()

	sending sync.Mutex // see send

	turn sync.Mutex // held while a barrier is under way; before mu
	mu   sync.Mutex
	next *barrier // the one that follows it, if anybody waits for that; guarded by mu
}

// Messages to the manager, which a name follows.
const (
	storeAs  = "FDSTORE=1\nFDNAME="
	removeAs = "FDSTOREREMOVE=1\nFDNAME="
)

// barrier is sent once for all who wait for it: they have sent before what it is to confirm.
type barrier struct {
	done chan struct{} // closed when err is set
	err  error
}

// A Keep waits for systemd for at most keepLimit. If that was not enough, systemd is stuck or overloaded, and those
// that follow within hurry do not wait.
const (
	keepLimit = 2 * time.Second
	hurry     = time.Minute
)

// Keep stores a copy of fd under name. It waits until systemd has it, because systemd drops messages of a process that
// was killed before it reads them: what relies on fd, such as a driver's first queue, begins afterwards (CO-2). A
// systemd that does not read its messages delays, but does not prevent it. Each name is a message of its own, because
// all descriptors of a message get one name; but those who wait at the same time, such as the VMs that a daemon adopts
// at its start, wait for one answer. A store that is full is an error: the next process could not be started.
func (s *Store) Keep(name string, fd int) error {
	if !Managed() {
		return nil
	}
	as, err := s.names.add(name, func(table int) error { return s.send(storeAs+namesFile, table) })
	if err == nil {
		err = s.send(storeAs+as, fd)
	}
	if err != nil {
		return err
	}
	return s.confirm()
}

// Stored returns how many descriptors are stored, how many of them under names that begin with one of the kinds, such
// as "hca/", and how many may be stored.
func (s *Store) Stored(kinds ...string) (n, ofKinds, most int) { return s.names.count(kinds...) }

// confirm waits until systemd has read what the caller has sent. One of those who wait at the same time sends the
// barrier, when that before it has been answered.
func (s *Store) confirm() error {
	s.mu.Lock()
	b, first := s.next, s.next == nil
	if first {
		b = &barrier{done: make(chan struct{})}
		s.next = b
	}
	s.mu.Unlock()
	if !first {
		<-b.done
		return b.err
	}
	s.turn.Lock()
	defer s.turn.Unlock()
	s.mu.Lock()
	s.next = nil // who comes from now on may not have sent yet
	s.mu.Unlock()
	b.err = s.hurriedFlush()
	close(b.done)
	return b.err
}

// hurriedFlush is Flush within keepLimit, unless systemd was too slow for that lately.
func (s *Store) hurriedFlush() error {
	now := time.Now()
	if now.UnixNano() < s.hurried.Load() {
		return nil
	}
	removals := s.names.removed()
	err := s.Flush(keepLimit)
	if err == nil {
		s.names.confirmed(removals)
	}
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
	return s.names.remove(name, func(as string) error { return s.send(removeAs + as) })
}

// send sends one message at a time: the kernel queues few, and each that systemd reads would wake all who wait to send.
func (s *Store) send(state string, fds ...int) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	return notify(state, fds...)
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
	err = s.send("BARRIER=1", int(w.Fd())) // systemd closes it when it comes to this message (sd_notify_barrier(3))
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

// Kept returns the descriptors that were passed, by name. The caller owns them. What has no name is dropped; err says
// what that was.
func (s *Store) Kept() (map[string]int, error) {
	table := -1
	var stored []Descriptor
	for _, d := range passedFiles() {
		switch {
		case !strings.Contains(d.Name, "/"): // a socket's
			continue
		case d.Name == namesFile && table < 0:
			table = d.FD
		case d.Name == namesFile: // a second one
			_ = syscall.Close(d.FD)
			continue
		default:
			stored = append(stored, d)
		}
		syscall.CloseOnExec(d.FD)
	}
	return s.take(table, stored)
}

// take returns those of the stored descriptors that have a name in the table, -1 if there is none.
func (s *Store) take(table int, stored []Descriptor) (kept map[string]int, err error) {
	kept = map[string]int{}
	if table >= 0 {
		s.names.adopt(os.NewFile(uintptr(table), namesFile))
	} else {
		s.names.adopt(nil)
	}
	is := map[string]bool{}
	for _, d := range stored {
		name, bad := s.names.passed(d.Name)
		if bad != nil {
			err = errors.Join(err, bad)
			_ = syscall.Close(d.FD)
			if !is[d.Name] { // the name may be that of two
				s.names.refuse(d.Name, func(as string) error { return s.send(removeAs + as) })
			}
			continue
		}
		kept[name], is[d.Name] = d.FD, true
	}
	s.names.settle()
	return kept, err
}
