package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
)

// control is the HTTP server on the unix socket that `vnicd status` asks. It
// only reads.
type control struct {
	srv  *http.Server
	done chan struct{}
}

func startControl(d *Daemon, path string) (*control, error) {
	l, err := listenUnix(path)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(d.Status()); err != nil {
			d.log.Debug("status reply", "error", err)
		}
	})
	c := &control{
		srv:  &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second},
		done: make(chan struct{}),
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

// listenUnix listens at path with mode 0660. A socket file that nobody listens
// on any more is replaced; one that is alive is an error.
func listenUnix(path string) (net.Listener, error) {
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = conn.Close()
		return nil, fmt.Errorf("%s is in use: another vnicd is running with this path; stop it or choose another `control` and `run-dir`", path)
	}
	if fi, err := os.Lstat(path); err == nil {
		if fi.Mode().Type() != os.ModeSocket {
			return nil, fmt.Errorf("%s exists and is no socket; remove it or choose another path", path)
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

// Query asks the daemon behind the control socket for its status.
func Query(ctx context.Context, path string) (*Status, error) {
	client := http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		},
		DisableKeepAlives: true,
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://vnicd/v1/status", nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("no vnicd at %s: start it with `vnicd run`, or name its socket with --control", path)
	case errors.Is(err, os.ErrPermission):
		return nil, fmt.Errorf("no permission for %s: run as root or as a member of the socket's group", path)
	case err != nil:
		return nil, fmt.Errorf("asking vnicd at %s: %w", path, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("vnicd at %s answered %s", path, resp.Status)
	}
	var s Status
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil {
		return nil, fmt.Errorf("reading vnicd's answer: %w", err)
	}
	return &s, nil
}
