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
	"path/filepath"
	"strconv"
	"strings"
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
	names    []string
	dev, ino uint64
	once     sync.Once
}

// Listen makes the socket path with the permissions mode, for owner alone if it is not nil: others, the group of the
// process too, then have no permission whatever mode says. It replaces the socket of a process that has ended; ErrInUse
// is the error for one that is served, and any other file at that path is left alone.
//
// also are further names of the socket, in directories that exist: hard links, which appear and disappear with path.
//
// The socket is bound without any permission under another name, then gets mode and owner, then its names. So nobody
// can connect earlier than permitted, also not by the other name.
func Listen(path string, mode os.FileMode, owner *Owner, also ...string) (*Listener, error) {
	if err := clearStale(path); err != nil {
		return nil, err
	}
	for _, name := range also {
		if st, err := os.Lstat(name); err == nil && st.Mode()&fs.ModeSocket == 0 {
			return nil, fmt.Errorf("%s exists and is not a socket", name)
		}
	}
	tmp := temporary(path)
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
	if err = unix.Lstat(tmp, &st); err != nil {
		_ = ln.Close()
		return nil, err
	}
	l := &Listener{UnixListener: ln, names: append(also[:len(also):len(also)], path), dev: st.Dev, ino: st.Ino}
	if err := l.publish(path, mode, owner); err != nil {
		_ = l.Close()
		return nil, err
	}
	return l, nil
}

// publish gives the socket, which is bound to path's temporary name, its owner and its names, path the last.
func (l *Listener) publish(path string, mode os.FileMode, owner *Owner) (err error) {
	tmp := temporary(path)
	for _, name := range l.names {
		defer l.remove(temporary(name)) // after an error
		// Links come before the socket has another owner, whose sockets only CAP_FOWNER may link (protected_hardlinks).
		if name != path {
			_ = os.Remove(temporary(name))
			err = errors.Join(err, os.Link(tmp, temporary(name)))
		}
	}
	if err == nil {
		err = owner.give(tmp, mode)
	}
	for _, name := range l.names {
		if err == nil {
			err = os.Rename(temporary(name), name)
		}
	}
	return err
}

// temporary returns the name that a socket has until it has its owner.
func temporary(name string) string { return fmt.Sprintf("%s.%d", name, os.Getpid()) }

// Sweep removes the temporary names of sockets in a directory whose processes ended while they made them. What it
// cannot remove stays: nobody listens there.
func Sweep(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		pid, err := strconv.Atoi(strings.TrimPrefix(filepath.Ext(e.Name()), "."))
		if err != nil || pid <= 0 || e.Type()&fs.ModeSocket == 0 {
			continue
		}
		if errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			_ = os.Remove(filepath.Join(dir, e.Name()))
		}
	}
}

// remove removes a name of this socket; one of another socket it leaves.
func (l *Listener) remove(name string) {
	var st unix.Stat_t
	if unix.Lstat(name, &st) == nil && st.Dev == l.dev && st.Ino == l.ino {
		_ = os.Remove(name)
	}
}

// Close stops listening and removes the socket's names, unless another process has replaced them. It may be called
// twice.
func (l *Listener) Close() (err error) {
	l.once.Do(func() {
		for _, name := range l.names {
			l.remove(name)
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
