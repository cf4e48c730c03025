package keeper

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/systemd"
)

// maxStored bounds the descriptors of the store.
const maxStored = 131072

// store has the descriptors that the daemon wants the next one to get, and receives the daemon's messages. The
// descriptors are bare numbers: as os.Files, Go's poller would wake up for each event on those that do not block.
type store struct {
	log     hclog.Logger
	dir     string   // of the socket; nobody else may enter it
	lock    *os.File // dir, locked as long as it is in use: otherwise systemd-tmpfiles(8) removes what is old in /tmp
	conn    *net.UnixConn
	settled chan struct{}      // capacity 1; see settle
	ready   chan int           // the sender of each READY=1; capacity 1
	forward func(state string) // what is not for the store
	done    sync.WaitGroup

	mu     sync.Mutex
	sender int                  // process whose messages count
	kept   []systemd.Descriptor // in the order of their arrival
}

// newStore listens. inherited are descriptors that the keeper itself was passed.
func newStore(log hclog.Logger, inherited []systemd.Descriptor, forward func(string)) (*store, error) {
	s := &store{log: log, kept: inherited, forward: forward, ready: make(chan int, 1),
		settled: make(chan struct{}, 1)}
	var err error
	if s.dir, err = os.MkdirTemp("", "vnicd-keeper-"); err != nil { // of mode 0700
		return nil, fmt.Errorf("directory of the keeper's socket: %w", err)
	}
	if s.lock, err = os.Open(s.dir); err == nil {
		err = unix.Flock(int(s.lock.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	}
	if err != nil {
		_ = s.lock.Close()
		_ = os.RemoveAll(s.dir)
		return nil, fmt.Errorf("lock of the directory of the keeper's socket: %w", err)
	}
	if s.conn, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: s.path(), Net: "unixgram"}); err != nil {
		_ = s.lock.Close()
		_ = os.RemoveAll(s.dir)
		return nil, fmt.Errorf("the keeper's socket: %w", err)
	}
	raw, err := s.conn.SyscallConn()
	if err == nil {
		var failed error
		err = raw.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1) })
		err = errors.Join(err, failed)
	}
	if err != nil {
		s.close()
		return nil, fmt.Errorf("credentials of the daemon's messages: %w", err)
	}
	s.done.Go(s.receive)
	return s, nil
}

// startSender starts a daemon, whose messages count from then on, and no longer those of others.
func (s *store) startSender(c *exec.Cmd) error {
	s.mu.Lock() // its first message may arrive before its number is known
	defer s.mu.Unlock()
	err := c.Start()
	if s.sender = 0; err == nil {
		s.sender = c.Process.Pid
	}
	return err
}

func (s *store) counts(from int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return from == s.sender
}

// settle waits until all messages that have been sent were handled: those of a daemon that has ended count.
func (s *store) settle() error {
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: s.path(), Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("the keeper's socket: %w", err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("SETTLED=1")); err != nil {
		return fmt.Errorf("the keeper's socket: %w", err)
	}
	if _, ok := <-s.settled; !ok {
		return errors.New("the keeper's socket is not read any more")
	}
	return nil
}

func (s *store) path() string { return filepath.Join(s.dir, "notify") }

func (s *store) close() {
	_ = s.conn.Close()
	s.done.Wait()
	for _, d := range s.kept {
		_ = unix.Close(d.FD)
	}
	_ = os.RemoveAll(s.dir)
	_ = s.lock.Close()
}

// copies returns duplicates of the stored descriptors, which the caller closes.
func (s *store) copies() (files []*os.File, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.kept {
		fd, err := duplicate(d.FD)
		if err != nil {
			closeFiles(files)
			return nil, fmt.Errorf("duplicate of %s: %w", d.Name, err)
		}
		files = append(files, os.NewFile(uintptr(fd), d.Name))
	}
	return files, nil
}

func duplicate(fd int) (int, error) {
	return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, firstFile)
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// receive handles messages until the socket is closed.
func (s *store) receive() {
	defer close(s.settled)
	// The kernel passes at most 253 descriptors in a message.
	b, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(253*4)+unix.CmsgSpace(unix.SizeofUcred))
	for {
		n, nr, flags, _, err := s.conn.ReadMsgUnix(b, oob)
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				s.log.Error("the daemon's messages cannot be received", "error", err)
			}
			return
		}
		fds, from, err := control(oob[:nr])
		switch {
		case err != nil:
			s.log.Warn("message of the daemon refused", "error", err)
		case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
			s.log.Warn("message of the daemon refused: it is too long")
		case from == os.Getpid():
			s.settled <- struct{}{}
		case !s.counts(from):
			s.log.Warn("message of another process refused", "pid", from)
		default:
			s.handle(from, strings.Split(string(b[:n]), "\n"), fds)
		}
		closeAll(fds)
	}
}

// control returns the descriptors and the sender of a message.
func control(oob []byte) (fds []int, from int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, 0, err
	}
	for i := range msgs {
		switch msgs[i].Header.Type {
		case unix.SCM_RIGHTS:
			some, err := unix.ParseUnixRights(&msgs[i])
			if err != nil {
				return fds, 0, err
			}
			for _, fd := range some {
				unix.CloseOnExec(fd)
			}
			fds = append(fds, some...)
		case unix.SCM_CREDENTIALS:
			c, err := unix.ParseUnixCredentials(&msgs[i])
			if err != nil {
				return fds, 0, err
			}
			from = int(c.Pid)
		}
	}
	return fds, from, nil
}

// handle does what a message asks for. The caller closes its descriptors.
func (s *store) handle(from int, words []string, fds []int) {
	is := func(w string) bool { return slices.Contains(words, w) }
	name := ""
	for _, w := range words {
		if v, ok := strings.CutPrefix(w, "FDNAME="); ok {
			name = v
		}
	}
	switch {
	case is("FDSTORE=1"):
		s.keep(name, fds)
		return
	case is("FDSTOREREMOVE=1"):
		s.remove(name)
		return
	case is("BARRIER=1"): // closing the descriptor is the answer (sd_notify_barrier(3))
		return
	case is("STOPPING=1"): // of this daemon; the keeper says so of itself
		return
	case is("READY=1"):
		select {
		case <-s.ready:
		default:
		}
		s.ready <- from
	}
	s.forward(strings.Join(words, "\n"))
}

func (s *store) keep(name string, fds []int) {
	if len(fds) != 1 || name == "" || strings.ContainsAny(name, ":\x00") {
		s.log.Warn("a descriptor of the daemon is not stored: a message needs one descriptor and a name", "name", name,
			"descriptors", len(fds))
		return
	}
	fd, err := duplicate(fds[0])
	if err != nil {
		s.log.Error("a descriptor of the daemon is not stored", "name", name, "error", err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.kept) >= maxStored {
		s.log.Error("a descriptor of the daemon is not stored: the store is full", "name", name, "limit", maxStored)
		_ = unix.Close(fd)
		return
	}
	s.removeLocked(name) // a daemon that is ending forgets nothing: the newest counts
	s.kept = append(s.kept, systemd.Descriptor{Name: name, FD: fd})
}

// remove takes the descriptors with that name out of the store.
func (s *store) remove(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.removeLocked(name)
}

func (s *store) removeLocked(name string) {
	s.kept = slices.DeleteFunc(s.kept, func(d systemd.Descriptor) bool {
		if d.Name == name {
			_ = unix.Close(d.FD)
		}
		return d.Name == name
	})
}
