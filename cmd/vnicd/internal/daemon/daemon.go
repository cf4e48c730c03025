package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/abi"
	"github.com/vnicd/vnicd/device/engine"
	"github.com/vnicd/vnicd/device/lfe"
	"github.com/vnicd/vnicd/device/packet"
	"github.com/vnicd/vnicd/device/tap"
	"github.com/vnicd/vnicd/device/vxlan"
	"github.com/vnicd/vnicd/translate"
)

// bufferSize holds the largest frame: MTU 9000, Ethernet header and VLAN tags,
// and the VXLAN header of a received datagram.
const bufferSize = 9216

// Daemon is a running host.
type Daemon struct {
	cfg     *config.Config
	version string
	log     hclog.Logger
	started time.Time

	loops []*engine.Loop
	pool  *packet.Pool
	vtep  *vxlan.VTEP // nil without an underlay
	nets  map[string]*lfe.Network
	vms   []*vm
	gvms  *translate.GVMTable // the memory of every connected front end

	undo []func() // in the order of making; Close goes backwards
}

// HCAQueues is the number of virtqueues of each HCA: commands, events, and a
// completion and a doorbell queue per engine.
func HCAQueues(cfg *config.Config) int { return abi.NumQueues(cfg.Engines, cfg.Engines) }

// Start makes everything in cfg and serves it until Close. On an error nothing
// is left behind.
func Start(cfg *config.Config, version string, log hclog.Logger) (*Daemon, error) {
	d := &Daemon{cfg: cfg, version: version, log: log, started: time.Now(), nets: map[string]*lfe.Network{}, gvms: translate.NewGVMTable(2 * len(cfg.VMs))}
	for _, step := range []func() error{d.makeRunDir, d.makeLoops, d.makeNetworks, d.makeTAPs, d.makeVMs, d.serve} {
		if err := step(); err != nil {
			_ = d.Close()
			return nil, err
		}
	}
	return d, nil
}

// Close undoes Start: VMs are disconnected, TAP ports and sockets removed, all
// threads joined. It may be called twice.
func (d *Daemon) Close() error {
	for len(d.undo) > 0 {
		f := d.undo[len(d.undo)-1]
		d.undo = d.undo[:len(d.undo)-1]
		f()
	}
	return nil
}

func (d *Daemon) onClose(f func()) { d.undo = append(d.undo, f) }

func (d *Daemon) makeRunDir() error {
	if err := os.MkdirAll(d.cfg.RunDir, 0o755); err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("run-dir %s cannot be made: %w; run as root or set `run-dir` to a directory of yours", d.cfg.RunDir, err)
		}
		return fmt.Errorf("run-dir: %w", err)
	}
	if err := unix.Access(d.cfg.RunDir, unix.W_OK|unix.X_OK); err != nil {
		return fmt.Errorf("run-dir %s is not writable: %w; run as root or set `run-dir` to a directory of yours", d.cfg.RunDir, err)
	}
	return nil
}

func (d *Daemon) makeLoops() (err error) {
	if d.pool, err = packet.NewPool(packet.Config{Count: d.cfg.Buffers, Capacity: bufferSize}); err != nil {
		return err
	}
	for i := range d.cfg.Engines {
		l, err := engine.New(engine.Config{ID: i, SpinFor: d.cfg.Spin, Log: d.log.Named("engine")})
		if err != nil {
			return fmt.Errorf("engine %d: %w", i, err)
		}
		d.onClose(l.Close)
		if err := l.Start(); err != nil {
			return fmt.Errorf("engine %d: %w", i, err)
		}
		d.loops = append(d.loops, l)
	}
	return nil
}

// loopFor spreads VMs and ports over the loops.
func (d *Daemon) loopFor(i int) *engine.Loop { return d.loops[i%len(d.loops)] }

func (d *Daemon) makeNetworks() error {
	if v := d.cfg.VTEP; v != nil {
		dscp := int(v.DSCP)
		if dscp == 0 {
			dscp = vxlan.BestEffort
		}
		vt, err := vxlan.New(vxlan.Config{
			Local: v.Local, Port: v.Port, Loops: d.loops, Pool: d.pool, DSCP: dscp, ZeroChecksum6: v.ZeroChecksum6, Log: d.log.Named("vxlan"),
		})
		if err != nil {
			return fmt.Errorf("vtep: %w%s", err, hint(err))
		}
		d.onClose(vt.Close)
		d.vtep = vt
	}
	for _, n := range d.cfg.Networks {
		net, err := lfe.NewNetwork(lfe.Config{
			VNI: n.VNI, Name: n.Name, MTU: n.MTU, Age: n.Ageing, MaxEntries: n.MaxEntries, Storm: n.Storm, Pool: d.pool, Log: d.log.Named("switch"),
		})
		if err != nil {
			return err
		}
		d.nets[n.Name] = net
		if d.vtep == nil {
			continue
		}
		var opts []vxlan.NetworkOption
		if n.LearnPeers {
			opts = append(opts, vxlan.LearnPeers())
		}
		if err := d.vtep.AddNetwork(net, n.Peers, opts...); err != nil {
			return fmt.Errorf("%s:%d: network %q: %w", d.cfg.Path, n.Line, n.Name, err)
		}
	}
	return nil
}

func (d *Daemon) makeTAPs() error {
	for i, n := range d.cfg.Networks {
		if n.TAP == nil {
			continue
		}
		t, err := tap.Open(tap.Config{
			Network: d.nets[n.Name], Loop: d.loopFor(i), Pool: d.pool, Name: n.TAP.Name,
			Addrs: n.TAP.Addresses, Bridge: n.TAP.Bridge, Log: d.log.Named("tap"),
		})
		if err != nil {
			return fmt.Errorf("%s:%d: TAP port %q of network %q: %w%s", d.cfg.Path, n.TAP.Line, n.TAP.Name, n.Name, err, hint(err))
		}
		d.onClose(func() { _ = t.Close() })
	}
	return nil
}

func (d *Daemon) makeVMs() error {
	raiseLockLimit()
	for i, c := range d.cfg.VMs {
		v, err := d.makeVM(c, d.loopFor(i), uint32(i+1))
		if err != nil {
			return fmt.Errorf("%s:%d: VM %q: %w%s", d.cfg.Path, c.Line, c.Name, err, hint(err))
		}
		d.vms = append(d.vms, v)
	}
	return nil
}

func (d *Daemon) serve() error {
	c, err := startControl(d, d.cfg.Control)
	if err != nil {
		return err
	}
	d.onClose(c.close)
	return nil
}

// hint adds what the user can do about the usual reasons.
func hint(err error) string {
	switch {
	case errors.Is(err, unix.EPERM):
		return " (vnicd needs CAP_NET_ADMIN for this: run it as root or with that capability)"
	case errors.Is(err, unix.EACCES):
		return " (permission denied: run as root, or see who owns the path)"
	case errors.Is(err, unix.EADDRINUSE):
		return " (in use: by another vnicd, or by a vxlan device of the kernel with the same port)"
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return " (no interface of this host has that address: see `ip address`)"
	case errors.Is(err, unix.ENOENT) && errors.Is(err, fs.ErrNotExist):
		return " (is the tun module loaded, and does /dev/net/tun exist?)"
	}
	return ""
}
