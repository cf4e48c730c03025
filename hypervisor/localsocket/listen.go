// Package localsocket makes Unix sockets that only given users and groups may open, and reads the credentials of the
// processes that have connected.
package localsocket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrInUse is wrapped by Listen's error if a process listens at the path.
var ErrInUse = errors.New("socket is in use")

// Listener is a listening socket in the file system.
type Listener struct {
	*net.UnixListener
	path     string
	dev, ino uint64
	once     sync.Once
}

// Listen makes the socket path with the permissions mode, for owner alone if it is not nil: others, the group of the
// process too, then have no permission whatever mode says. It replaces the socket of a process that has ended; ErrInUse
// is the error for one that is served, and any other file at that path is left alone.
//
// The socket is bound without any permission under another name, then gets mode and owner, then its name. So nobody can
// connect earlier than permitted, also not by the other name.
func Listen(path string, mode os.FileMode, owner *Owner) (*Listener, error) {
	if err := clearStale(path); err != nil {
		return nil, err
	}
	tmp := fmt.Sprintf("%s.%d", path, os.Getpid())
	if room := len(unix.RawSockaddrUnix{}.Path) - 1; len(tmp) > room {
		return nil, fmt.Errorf("path is %d bytes too long for a socket", len(tmp)-room)
	}
	_ = os.Remove(tmp)
	c := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		// bind(2) gives the file the mode of the socket's inode.
		return errors.Join(raw.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0) }), err)
	}}
	nl, err := c.Listen(context.Background(), "unix", tmp)
	if err != nil {
		return nil, err
	}
	ln := nl.(*net.UnixListener)
	ln.SetUnlinkOnClose(false)
	var st unix.Stat_t
	if err = owner.give(tmp, mode); err == nil {
		err = unix.Lstat(tmp, &st)
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		_ = ln.Close()
		_ = os.Remove(tmp)
		return nil, err
	}
	return &Listener{UnixListener: ln, path: path, dev: st.Dev, ino: st.Ino}, nil
}

// Close stops listening and removes the socket, unless another process has replaced it. It may be called twice.
func (l *Listener) Close() (err error) {
	l.once.Do(func() {
		var st unix.Stat_t
		if unix.Lstat(l.path, &st) == nil && st.Dev == l.dev && st.Ino == l.ino {
			_ = os.Remove(l.path)
		}
		err = l.UnixListener.Close()
	})
	return err
}

func clearStale(path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.Mode()&fs.ModeSocket == 0 {
		return errors.New("exists and is not a socket")
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		_ = c.Close()
		return ErrInUse
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("cannot tell whether the socket is in use: %w", err)
	}
	return nil // rename replaces it
}
