// Package systemd speaks the service protocols of systemd: sd_notify(3), the watchdog, socket activation
// (sd_listen_fds(3)) and the file descriptor store. Without systemd every function does nothing.
package systemd

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// States of a service; several may be joined by newlines.
const (
	Ready    = "READY=1"
	Stopping = "STOPPING=1"
	alive    = "WATCHDOG=1"
)

// sendLimit is how long a message may wait until the manager has read others. It is an error then.
const sendLimit = 30 * time.Second

// Managed reports whether a service manager listens.
func Managed() bool { return os.Getenv("NOTIFY_SOCKET") != "" }

// Notify sends a state to the service manager.
func Notify(state string) error { return notify(state) }

// notify sends a state together with descriptors.
func notify(state string, fds ...int) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	// a leading @ is an abstract name here too
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("systemd: %w", err)
	}
	defer c.Close()
	_ = c.SetWriteDeadline(time.Now().Add(sendLimit))
	var rights []byte
	if len(fds) > 0 {
		rights = syscall.UnixRights(fds...)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("systemd: %w", err)
	}
	// Package net cannot send descriptors on a connected datagram socket.
	var sent error
	if err := raw.Write(func(fd uintptr) bool {
		sent = syscall.Sendmsg(int(fd), []byte(state), rights, nil, syscall.MSG_NOSIGNAL)
		return sent != syscall.EAGAIN
	}); err != nil {
		return fmt.Errorf("systemd: %w", err)
	}
	if sent != nil {
		return fmt.Errorf("systemd: %w", sent)
	}
	return nil
}

// Watch feeds the watchdog as long as healthy returns nil, until ctx ends. Without a watchdog it returns at once.
func Watch(ctx context.Context, healthy func(context.Context) error) {
	usec, err := strconv.ParseInt(os.Getenv("WATCHDOG_USEC"), 10, 64)
	if err != nil || usec <= 0 {
		return
	}
	if pid := os.Getenv("WATCHDOG_PID"); pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return
	}
	every := time.Duration(usec) * time.Microsecond / 3
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		ask, cancel := context.WithTimeout(ctx, every)
		if healthy(ask) == nil {
			_ = Notify(alive)
		}
		cancel()
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

// firstFD is the first of the passed descriptors (SD_LISTEN_FDS_START).
const firstFD = 3

// parent stands for the number of the process in LISTEN_PID, which a parent that is no shell does not know before the
// child's start: "parent:PID".
const parent = "parent:"

// Environment returns the variables for a child of this process that does as its service: it sends its states to the
// socket notify, and was passed descriptors with these names, from the third on.
func Environment(notify string, names []string) []string {
	return []string{"NOTIFY_SOCKET=" + notify, "LISTEN_PID=" + parent + strconv.Itoa(os.Getpid()),
		"LISTEN_FDS=" + strconv.Itoa(len(names)), "LISTEN_FDNAMES=" + strings.Join(names, ":")}
}

// Descriptor is a named descriptor.
type Descriptor struct {
	Name string
	FD   int
}

// Passed returns all descriptors that were passed. The caller owns them.
func Passed() (all []Descriptor) {
	all = passedFiles()
	for _, d := range all {
		syscall.CloseOnExec(d.FD)
	}
	return all
}

func passedFiles() (all []Descriptor) {
	passed(func(fd int, name string) bool {
		all = append(all, Descriptor{name, fd})
		return true
	})
	return all
}

// passed calls f with each descriptor that systemd passed, and its name, until f returns false.
func passed(f func(fd int, name string) bool) {
	n, err := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	switch pid := os.Getenv("LISTEN_PID"); {
	case err != nil:
		return
	case pid != strconv.Itoa(os.Getpid()) && pid != parent+strconv.Itoa(os.Getppid()):
		return
	}
	names := strings.Split(os.Getenv("LISTEN_FDNAMES"), ":")
	for i := range min(n, len(names)) {
		if !f(firstFD+i, names[i]) {
			return
		}
	}
}

// Listener returns the socket that systemd passed under a name (FileDescriptorName=), or nil.
func Listener(name string) (net.Listener, error) {
	fd := -1
	passed(func(n int, is string) bool {
		if is == name {
			fd = n
		}
		return fd < 0
	})
	if fd < 0 {
		return nil, nil
	}
	f := os.NewFile(uintptr(fd), name)
	l, err := net.FileListener(f) // a copy
	_ = f.Close()
	if err != nil {
		return nil, fmt.Errorf("systemd: the socket %q: %w", name, err)
	}
	if u, ok := l.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false) // systemd owns it
	}
	return l, nil
}
