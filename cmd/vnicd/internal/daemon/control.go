package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/systemd"
)

// control is the HTTP server on the unix socket. The socket's permissions (0660, the daemon's user and group) are the
// only check: a client that may open it may do everything.
type control struct {
	srv  *http.Server
	done chan struct{}
}

func startControl(d *Daemon, path string) (*control, error) {
	l, err := systemd.Listener("control")
	if err == nil && l == nil {
		l, err = ListenUnix(path)
	}
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	c := &control{
		srv: &http.Server{Handler: d.api(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second,
			MaxHeaderBytes: 64 << 10}, done: make(chan struct{}),
	}
	go func() {
		defer close(c.done)
		if err := c.srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			d.log.Error("control socket failed", "error", err)
		}
	}()
	return c, nil
}

func (c *control) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if c.srv.Shutdown(ctx) != nil {
		_ = c.srv.Close()
	}
	<-c.done
}

// ListenUnix listens at path with mode 0660. It replaces a socket file without a listener; a live one is an error.
func ListenUnix(path string) (net.Listener, error) {
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = conn.Close()
		return nil,
			fmt.Errorf("%s is in use: another vnicd is running with this path; stop it or choose another `control` and `run-dir`", path)
	}
	if fi, err := os.Lstat(path); err == nil {
		if fi.Mode().Type() != os.ModeSocket {
			return nil, fmt.Errorf("%s exists and is not a socket; remove it or choose another path", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o660); err != nil {
		_ = l.Close()
		return nil, err
	}
	return l, nil
}
