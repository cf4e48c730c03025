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
)

// maxStored bounds the descriptors of the store.
const maxStored = 32768

// store has the descriptors that the daemon wants the next one to get, and receives the daemon's messages.
type store struct {
	log     hclog.Logger
	dir     string // of the socket; nobody else may enter it
	conn    *net.UnixConn
	settled chan struct{}      // capacity 1; see settle
	ready   chan int           // the sender of each READY=1; capacity 1
	forward func(state string) // what is not for the store
	done    sync.WaitGroup

	mu     sync.Mutex
	sender int        // process whose messages count
	files  []*os.File // in the order of their arrival; their names are those of the descriptors
}

// newStore listens. inherited are descriptors that the keeper itself was passed.
func newStore(log hclog.Logger, inherited []*os.File, forward func(string)) (*store, error) {
	s := &store{log: log, files: inherited, forward: forward, ready: make(chan int, 1),
		settled: make(chan struct{}, 1)}
	var err error
	if s.dir, err = os.MkdirTemp("", "vnicd-keeper-"); err != nil { // of mode 0700
		return nil, fmt.Errorf("directory of the keeper's socket: %w", err)
	}
	if s.conn, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: s.path(), Net: "unixgram"}); err != nil {
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
	for _, f := range s.files {
		_ = f.Close()
	}
	_ = os.RemoveAll(s.dir)
}

// copies returns duplicates of the stored descriptors, which the caller closes.
func (s *store) copies() (files []*os.File, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.files {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			closeAll(files)
			return nil, fmt.Errorf("duplicate of %s: %w", f.Name(), err)
		}
		files = append(files, os.NewFile(uintptr(fd), f.Name()))
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
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
		files, from, err := control(oob[:nr])
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
			files = s.handle(from, strings.Split(string(b[:n]), "\n"), files)
		}
		closeAll(files)
	}
}

// control returns the descriptors and the sender of a message.
func control(oob []byte) (files []*os.File, from int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, 0, err
	}
	for i := range msgs {
		switch msgs[i].Header.Type {
		case unix.SCM_RIGHTS:
			fds, err := unix.ParseUnixRights(&msgs[i])
			if err != nil {
				return files, 0, err
			}
			for _, fd := range fds {
				unix.CloseOnExec(fd)
				files = append(files, os.NewFile(uintptr(fd), ""))
			}
		case unix.SCM_CREDENTIALS:
			c, err := unix.ParseUnixCredentials(&msgs[i])
			if err != nil {
				return files, 0, err
			}
			from = int(c.Pid)
		}
	}
	return files, from, nil
}

// handle does what a message asks for, and returns the descriptors that are not used any more.
func (s *store) handle(from int, words []string, files []*os.File) (unused []*os.File) {
	is := func(w string) bool { return slices.Contains(words, w) }
	name := ""
	for _, w := range words {
		if v, ok := strings.CutPrefix(w, "FDNAME="); ok {
			name = v
		}
	}
	switch {
	case is("FDSTORE=1"):
		return s.keep(name, files)
	case is("FDSTOREREMOVE=1"):
		return append(s.remove(name), files...)
	case is("BARRIER=1"): // closing the descriptor is the answer (sd_notify_barrier(3))
		return files
	case is("READY=1"):
		select {
		case <-s.ready:
		default:
		}
		s.ready <- from
	}
	s.forward(strings.Join(words, "\n"))
	return files
}

func (s *store) keep(name string, files []*os.File) (unused []*os.File) {
	if len(files) != 1 || name == "" || strings.ContainsAny(name, ":\x00") {
		s.log.Warn("a descriptor of the daemon is not stored: a message needs one descriptor and a name", "name", name,
			"descriptors", len(files))
		return files
	}
	fd, err := unix.FcntlInt(files[0].Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		s.log.Error("a descriptor of the daemon is not stored", "name", name, "error", err)
		return files
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.files) >= maxStored {
		s.log.Error("a descriptor of the daemon is not stored: the store is full", "name", name, "limit", maxStored)
		_ = unix.Close(fd)
		return files
	}
	s.files = append(s.files, os.NewFile(uintptr(fd), name))
	return files
}

// remove takes the descriptors with that name out of the store.
func (s *store) remove(name string) (removed []*os.File) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.files = slices.DeleteFunc(s.files, func(f *os.File) bool {
		if f.Name() != name {
			return false
		}
		removed = append(removed, f)
		return true
	})
	return removed
}
