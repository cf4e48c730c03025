package daemon

import (
	"context"
	"errors"
	"fmt"
	stdlog "log"
	"net"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/net/netutil"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/systemd"
	"github.com/vnicd/vnicd/hypervisor/localsocket"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
)

// Rights of a control socket's clients, which the permissions of the socket grant.
type right uint8

const (
	mayRead   right = iota // questions: states, counters, tables, connections; no packets
	mayChange              // everything
)

// statusClients bounds the connections to the status socket, so that those who only ask cannot use up the daemon's
// descriptors. Further ones wait in the socket's backlog. The control socket has no such bound: who may change
// everything is not kept out by those who may not.
const statusClients = 64

// control is the HTTP server on a control socket.
type control struct {
	srv  *http.Server
	done chan struct{}
}

// startControl serves api on the socket path, or on the one that systemd passed under name. Besides root and the
// daemon's user, members of gid may open it, if that is a group. most bounds the connections; 0: no bound.
func startControl(name, path string, gid, most int, api http.Handler, log hclog.Logger) (*control, error) {
	l, err := systemd.Listener(name)
	if err == nil && l == nil {
		l, err = ListenUnix(path, gid)
	}
	if err != nil {
		return nil, fmt.Errorf("%s socket: %w", name, err)
	}
	if most > 0 {
		l = netutil.LimitListener(l, most)
	}
	c := &control{
		srv: &http.Server{Handler: api, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second,
			MaxHeaderBytes: 64 << 10, ErrorLog: ErrorLog(log)}, done: make(chan struct{}),
	}
	go func() {
		defer close(c.done)
		if err := c.srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("control socket failed", "socket", path, "error", err)
		}
	}()
	return c, nil
}

// ErrorLog returns the log of an HTTP server for mistakes of its clients, of which each could fill it otherwise.
func ErrorLog(log hclog.Logger) *stdlog.Logger {
	return loglimit.New(log).StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Warn})
}

func (c *control) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if c.srv.Shutdown(ctx) != nil {
		_ = c.srv.Close()
	}
	<-c.done
}

// ListenUnix listens at path for root, this process's user and the group gid (localsocket.None: no group). It replaces
// a socket file without a listener; a live one is an error.
func ListenUnix(path string, gid int) (net.Listener, error) {
	l, err := localsocket.Listen(path, 0o660, &localsocket.Owner{UID: localsocket.None, GID: gid})
	switch {
	case errors.Is(err, localsocket.ErrInUse):
		return nil,
			fmt.Errorf("%s is in use: another vnicd is running with this path; stop it or choose another `control` and `run-dir`", path)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return l, nil
}

// warnShared warns if those who may attach a VM have full control of the host, too.
func (d *Daemon) warnShared() {
	d.mu.RLock()
	defer d.mu.RUnlock()
	groups := localsocket.Groups(d.cfg.Control)
	for _, v := range d.cfg.VMs {
		gid := os.Getegid()
		if v.Owner != nil {
			gid = v.Owner.GID
		}
		if gid > 0 && slices.Contains(groups, gid) && d.cfg.SocketPermission(v)&0o020 != 0 {
			d.log.Warn("a process that may attach this VM has full control of this vnicd: give the control socket another group",
				"vm", v.Name, "group", localsocket.GroupName(gid), "control", d.cfg.Control)
			return
		}
	}
}
