package daemon

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/confine"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/worker"
	"github.com/vnicd/vnicd/device/ethernet/overlay/evpn"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// BGPWorker is the process that runs BGP: gobgp, its TCP connections, and the decoding of all messages.
var BGPWorker = worker.Kind{
	Name:         "bgp",
	Capabilities: []uint{unix.CAP_NET_BIND_SERVICE}, // port 179, until it listens
	Calls:        append(confine.TCPClient(), confine.Connections()...),
	MaxFiles:     1024,
	MaxMemory:    16 << 30, // for many more routes than neighbours may send; the kernel then ends this process first
	Open:         func(p *worker.Process) (func() error, error) { return evpn.Open(p.Conn, p.Log) },
}

// bgpProcess keeps a process that runs BGP.
func (d *Daemon) bgpProcess(serve func(context.Context, evpn.Conn) error) (stop func()) {
	return d.workers.Supervise(worker.Config{Kind: BGPWorker.Name, Log: d.log.Named(BGPWorker.Name),
		Serve: func(ctx context.Context, c *worker.Conn) error { return serve(ctx, c) }}).Close
}

var errNoEVPN = fmt.Errorf("%w: this host has no `evpn` section", errNotFound)

// EVPN returns the BGP sessions, and what each network gets from them.
func (d *Daemon) EVPN() (*evpn.Status, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.evpn == nil {
		return nil, errNoEVPN
	}
	return d.evpn.Status(), nil
}

// EVPNRoutes lists received and advertised routes of one network, or of all if name is empty.
func (d *Daemon) EVPNRoutes(name string) ([]evpn.RouteStatus, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.evpn == nil {
		return nil, errNoEVPN
	}
	if name != "" {
		if _, err := d.network(name); err != nil {
			return nil, err
		}
	}
	return d.evpn.Routes(name), nil
}

// ClearDuplicate lets EVPN use a MAC again that was held as a duplicate.
func (d *Daemon) ClearDuplicate(name string, m vswitch.MAC) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	n, err := d.network(name)
	if err != nil {
		return err
	}
	if n.evpn == nil || !n.evpn.ClearDuplicate(m) {
		return fmt.Errorf("%w: %v is not a duplicate in network %q", errNotFound, m, name)
	}
	return nil
}
