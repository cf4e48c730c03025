// Package systemd speaks the service protocols of systemd: sd_notify(3), the watchdog, and socket activation
// (sd_listen_fds(3)). Without systemd every function does nothing.
package systemd

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// What a service says; several may be joined by newlines.
const (
	Ready    = "READY=1"
	Stopping = "STOPPING=1"
	alive    = "WATCHDOG=1"
)

// Notify tells the service manager a state.
func Notify(state string) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"}) // a leading @ is an abstract name there too
	if err != nil {
		return fmt.Errorf("systemd: %w", err)
	}
	defer c.Close()
	if _, err := c.Write([]byte(state)); err != nil {
		return fmt.Errorf("systemd: %w", err)
	}
	return nil
}

// Watch feeds the watchdog as long as healthy says nil, until ctx ends. It returns at once if there is no watchdog.
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

// Listener returns the socket that systemd passed under a name (FileDescriptorName=), nil if it did not.
func Listener(name string) (net.Listener, error) {
	n, err := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	if err != nil || os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil, nil
	}
	names := strings.Split(os.Getenv("LISTEN_FDNAMES"), ":")
	for i := range min(n, len(names)) {
		if names[i] != name {
			continue
		}
		f := os.NewFile(uintptr(firstFD+i), name)
		l, err := net.FileListener(f) // a copy
		_ = f.Close()
		if err != nil {
			return nil, fmt.Errorf("systemd: the socket %q: %w", name, err)
		}
		if u, ok := l.(*net.UnixListener); ok {
			u.SetUnlinkOnClose(false) // it is systemd's
		}
		return l, nil
	}
	return nil, nil
}
