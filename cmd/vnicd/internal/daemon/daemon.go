package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/confine"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/systemd"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/worker"
	"github.com/vnicd/vnicd/device/ethernet/fastpath"
	"github.com/vnicd/vnicd/device/ethernet/overlay"
	"github.com/vnicd/vnicd/device/ethernet/overlay/evpn"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/ethernet/wireguard"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/hypervisor/localsocket"
	"github.com/vnicd/vnicd/translate"
)

// bufferSize holds the largest frame: MTU 9000, Ethernet header and VLAN tags, and the VXLAN header of a received
// datagram.
const bufferSize = 9216

// maxVMs bounds the VMs of one daemon; each has two front ends with memory.
const maxVMs = 1024

// bigBuffers is the number of normal buffers per buffer of 64 KiB, which takes a frame that its sender left
// unsegmented.
const bigBuffers = 16

// Daemon is a running host.
type Daemon struct {
	version  string
	path     string // absolute, of the configuration
	log      hclog.Logger
	started  time.Time
	confined bool

	loops  []*loop.Loop
	probes [loop.MaxLoops]probe // one per loop
	pool   *frame.Pool
	vtep   *vxlan.VTEP         // nil without an underlay
	guard  *wireguard.Device   // nil: the underlay is not protected
	gvms   *translate.GVMTable // the memory of every connected front end
	source *overlay.API        // the routes that operators set
	evpn   *evpn.Speaker       // nil: no BGP
	memory *hostdriver.Host    // nil: the host's memory is not watched
	fronts sync.Map            // VM's name -> func() bool: whether a QEMU is connected to it

	// mu serialises changes, so that readers see none half-made. It is taken before every other lock, and never by
	// loops.
	mu     sync.RWMutex
	cfg    *config.Config // in force; a change replaces it
	nets   map[string]*network
	vms    map[string]*vm
	going  map[string]*vm // removed, but their memory is not released yet
	placed int            // ports that got a loop so far

	removals sync.WaitGroup // those of going; added to under mu

	reloading sync.Mutex     // one reload at a time; before mu
	settling  map[string]*vm // whose memory-budget it has changed; guarded by reloading

	capMu sync.Mutex
	caps  captures

	workers *worker.Spawner // nil: what foreign hosts and clients send is handled in this process

	store systemd.Store  // keeps VMs' connections for the next vnicd
	kept  vhostuser.Kept // connections of the previous vnicd
	hcas  atomic.Int64   // VMs and applications, see netKeeper

	cannotKeep error // why applications' connections cannot be kept; nil: they can, or there is no keeper

	blameless bool // the previous vnicd did not end by a fault of its own
	resends   resends

	continuity vhostuser.Continuity

	undo undo
}

// undo is a list of functions that take something down, run in reverse order.
type undo []func()

func (u *undo) push(f func()) { *u = append(*u, f) }

func (u *undo) run() {
	for len(*u) > 0 {
		last := len(*u) - 1
		f := (*u)[last]
		*u = (*u)[:last]
		f()
	}
}

// HCAQueues is the number of virtqueues of each HCA: commands, events, and a completion and a doorbell queue per
// engine.
func HCAQueues(cfg *config.Config) int { return abi.NumQueues(cfg.Engines, cfg.Engines) }

// Option changes what Start does.
type Option func(*Daemon)

// Confined makes Start forbid the system calls that vnicd does not need once it serves (confine.AfterStart), before
// anybody can connect: for the whole process and for good, so it must not start programs either.
func Confined(d *Daemon) { d.confined = true }

// Workers has parts that handle foreign input run in processes of their own. s must stay open until Close.
func Workers(s *worker.Spawner) Option { return func(d *Daemon) { d.workers = s } }

// Start sets up everything in cfg and serves it until Close. After an error nothing is left.
func Start(cfg *config.Config, version string, log hclog.Logger, options ...Option) (*Daemon, error) {
	d := &Daemon{cfg: cfg, version: version, log: log, started: time.Now(), nets: map[string]*network{},
		vms: map[string]*vm{}, going: map[string]*vm{}, settling: map[string]*vm{}, source: &overlay.API{},
		gvms: translate.NewGVMTable(2 * maxVMs)}
	for _, o := range options {
		o(d)
	}
	var err error
	if d.path, err = filepath.Abs(cfg.Path); err != nil {
		return nil, err
	}
	if d.kept, err = d.store.Kept(); err != nil {
		log.Warn("descriptors of the previous vnicd are dropped: their VMs may lose this device", "error", err)
	}
	d.continuity.Resumed = func() { d.resends.Go(d.resend) }
	d.blameless = d.watchCrash()
	steps := []func() error{
		d.makeRunDir, d.makeLoops, d.protect, d.makeVTEP, d.renounce, d.makeEVPN, d.makeNetworks, d.watchHost, d.checkFiles,
		d.makeVMs, d.serve,
	}
	for _, step := range steps {
		if err := step(); err != nil {
			_ = d.Close()
			return nil, err
		}
	}
	d.mu.Lock() // clients add VMs already, which take theirs
	left := d.kept.Drop(&d.store)
	d.mu.Unlock()
	left = slices.DeleteFunc(left, func(name string) bool { return strings.HasPrefix(name, netKeptAs) })
	if len(left) > 0 {
		log.Warn("VMs or applications of the previous vnicd are not in the configuration: their HCAs stay dead", "sockets",
			left)
	}
	return d, nil
}

// Close undoes Start: it disconnects VMs, removes TAP ports and sockets, and joins all threads. systemd keeps the VMs'
// descriptors for the next vnicd. Close may be called twice. If a VM cannot be disconnected within endLimit, Close
// leaves everything below the VMs to the process's end.
func (d *Daemon) Close() error {
	d.store.Freeze()
	d.resends.end()
	d.undo.run()
	if err := d.store.Flush(flushLimit); err != nil {
		d.log.Warn("VMs may lose their HCAs", "error", err)
	}
	return nil
}

// flushLimit bounds the wait for the service manager at the end. It is usually done within a millisecond.
const flushLimit = 5 * time.Second

// endLimit bounds the wait for the ends of all VMs, within the unit's TimeoutStopSec. A descriptor of a front end's may
// block close(2) for as long as that wishes: a socket with SO_LINGER, or a file of its own file system.
const endLimit = 15 * time.Second

// together runs functions at the same time, and returns the names of those that have not ended after limit.
func together(limit time.Duration, all map[string]func()) (left []string) {
	ended := make(chan string, len(all))
	for name, f := range all {
		go func() {
			f()
			ended <- name
		}()
	}
	running := maps.Clone(all)
	for late := time.After(limit); len(running) > 0; {
		select {
		case name := <-ended:
			delete(running, name)
		case <-late:
			return slices.Sorted(maps.Keys(running))
		}
	}
	return nil
}

// keeper returns the keeper of connections, nil without systemd.
func (d *Daemon) keeper() vhostuser.Keeper {
	if !systemd.Managed() {
		return nil
	}
	return &d.store
}

// The names under which connections are kept begin with these; the name of the VM or application follows.
const (
	netKeptAs = "net/"
	hcaKeptAs = "hca/"
	appKeptAs = "app/"
	// QEMU's connection to an HCA behind ivshmem; the rest of that HCA is as of any.
	ivshmemKeptAs = "ivshmem/"
)

// netKeeper keeps connections of network devices, where there is room: the HCAs of all VMs come first, because they do
// not survive the end of theirs.
type netKeeper struct {
	vhostuser.Keeper
	d *Daemon
}

func (d *Daemon) netKeeper(k vhostuser.Keeper) vhostuser.Keeper {
	if k == nil {
		return nil
	}
	return netKeeper{k, d}
}

// Keep implements vhostuser.Keeper.
func (k netKeeper) Keep(name string, fd int) error {
	stored, ofHCAs, most := k.d.store.Stored(hcaKeptAs, appKeptAs, ivshmemKeptAs)
	if !roomForCard(stored, ofHCAs, most, int(k.d.hcas.Load())*descriptorsOfHCA(len(k.d.loops))) {
		return fmt.Errorf("%d descriptors are stored, and the rest of %d is for HCAs", stored, most)
	}
	return k.Keeper.Keep(name, fd)
}

// roomForCard reports whether a store that has ofHCAs of its descriptors for HCAs, and takes at most most, has room for
// another one that is not: all HCAs together need forHCAs.
func roomForCard(stored, ofHCAs, most, forHCAs int) bool { return stored+max(forHCAs-ofHCAs, 0) < most }

// descriptorsOfHCA is what is usually kept of a VM's HCA: of each ring four eventfds (kick, error, and the last two for
// calls), its connection's socket, channel, pipe and state, its journal, up to four files of memory, and QEMU's
// connection and what it was given if the HCA is behind ivshmem.
func descriptorsOfHCA(engines int) int { return 4*abi.NumQueues(engines, engines) + 11 }

func (d *Daemon) onClose(f func()) { d.undo.push(f) }

func (d *Daemon) makeRunDir() error {
	_, err := os.Stat(d.cfg.RunDir)
	made := errors.Is(err, fs.ErrNotExist)
	if err := os.MkdirAll(d.cfg.RunDir, 0o755); err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("cannot create run-dir %s: %w; run as root or set `run-dir` to a directory of yours",
				d.cfg.RunDir, err)
		}
		return fmt.Errorf("run-dir: %w", err)
	}
	if made { // whatever the umask: the sockets have permissions of their own
		if err := os.Chmod(d.cfg.RunDir, 0o755); err != nil {
			return fmt.Errorf("run-dir: %w", err)
		}
	}
	if err := unix.Access(d.cfg.RunDir, unix.W_OK|unix.X_OK); err != nil {
		return fmt.Errorf("run-dir %s is not writable: %w; run as root or set `run-dir` to a directory of yours",
			d.cfg.RunDir, err)
	}
	localsocket.Sweep(d.cfg.RunDir)
	d.checkWay()
	return nil
}

// checkWay warns if the owners of sockets cannot reach them.
func (d *Daemon) checkWay() {
	if !slices.ContainsFunc(d.cfg.VMs, func(v *config.VM) bool { return v.Owner != nil }) {
		return
	}
	for dir := d.cfg.RunDir; ; dir = filepath.Dir(dir) {
		if fi, err := os.Stat(dir); err == nil && fi.Mode()&0o001 == 0 {
			d.log.Warn("a directory on the way to the sockets is closed to other users: those of `user` and `group` may be unable "+
				"to open theirs", "directory", dir, "mode", fi.Mode().Perm().String())
		}
		if dir == filepath.Dir(dir) {
			return
		}
	}
}

func (d *Daemon) makeLoops() (err error) {
	if d.pool, err = frame.NewPool(frame.Config{Count: d.cfg.Buffers, Capacity: bufferSize,
		Big: max(d.cfg.Buffers/bigBuffers, 64)}); err != nil {
		return err
	}
	if err := loop.KeepOff(d.cfg.EngineCPUs); err != nil {
		return err
	}
	if err := eventfd.Prepare(); err != nil {
		d.log.Warn("the kernel's asynchronous I/O is not available for signals: a QEMU or an application that was taken "+
			"over can make engines wait (see fs.aio-max-nr)", "reason", err)
	}
	for i := range d.cfg.Engines {
		c := loop.Config{ID: i, SpinFor: d.cfg.Spin, Nice: d.cfg.EngineNice, Log: d.log.Named("engine")}
		if len(d.cfg.EngineCPUs) > 0 {
			c.CPUs = d.cfg.EngineCPUs[i : i+1]
		}
		l, err := loop.New(c)
		if err != nil {
			return fmt.Errorf("engine %d: %w", i, err)
		}
		d.onClose(l.Close)
		if err := l.Start(); err != nil {
			return fmt.Errorf("engine %d: %w; `engine-cpus` must be processors that this process may use", i, err)
		}
		d.loops = append(d.loops, l)
	}
	return nil
}

// nextLoop distributes VMs and ports over the loops.
func (d *Daemon) nextLoop() *loop.Loop {
	d.placed++
	return d.loops[(d.placed-1)%len(d.loops)]
}

// otherLoops returns all loops but one.
func (d *Daemon) otherLoops(one *loop.Loop) []*loop.Loop {
	return slices.DeleteFunc(slices.Clone(d.loops), func(l *loop.Loop) bool { return l == one })
}

func (d *Daemon) makeVTEP() error {
	v := d.cfg.VTEP
	if v == nil {
		return nil
	}
	dscp := int(v.DSCP)
	if dscp == 0 {
		dscp = vxlan.BestEffort
	}
	short := d.cfg.ShortPath
	c := vxlan.Config{
		Local: v.Local, Port: v.Port, Loops: d.loops, Pool: d.pool, DSCP: dscp, ZeroChecksum6: v.ZeroChecksum6,
		PeerPorts: v.PeerPorts, Segmentation: d.cfg.Debug.Segmentation, Log: d.log.Named("vxlan"),
	}
	if short == nil || *short {
		c.ShortPath = fastpath.Open
	}
	if d.guard != nil {
		c.Protection = d.guard
	}
	vt, err := vxlan.New(c)
	if err != nil {
		return fmt.Errorf("vtep: %w%s", err, hint(err))
	}
	d.onClose(vt.Close)
	d.vtep = vt
	if s := vt.Status().ShortPath; short != nil && *short && s.State != vxlan.ShortPathOn {
		return fmt.Errorf("`short-path: true` is %s (omit the key to use it only where possible)", s.State)
	}
	return nil
}

// renounce drops the rights that were needed only to load the VTEP's programs, so that an attacker in this process
// cannot load others or start a program. A daemon that keeps them does not start.
func (d *Daemon) renounce() error {
	err := confine.Drop(unix.CAP_BPF)
	if errors.Is(err, confine.ErrCgo) && confine.Holds(unix.CAP_SYS_ADMIN) {
		// CAP_SYS_ADMIN includes CAP_BPF (capabilities(7)): without the one, the other would remain.
		d.log.Warn("vnicd runs with CAP_SYS_ADMIN, and so with the right to load programs into the kernel; use the package's unit")
		err = nil
	}
	if err != nil {
		return fmt.Errorf("cannot drop CAP_BPF, with which a compromised vnicd could load programs into the kernel: %w; to run "+
			"without the short path, set `short-path: false` and start vnicd without this capability (with systemd: drop-in of "+
			"vnicd.service, see SECURITY.md)", err)
	}
	if !d.confined {
		return nil
	}
	if err := confine.Forbid(confine.AfterStart); err != nil {
		return fmt.Errorf("cannot forbid system calls that vnicd does not need, which would let a compromised vnicd start "+
			"programs: %w; the kernel needs CONFIG_SECCOMP_FILTER, and a container's own filter must allow seccomp(2)", err)
	}
	return nil
}

func (d *Daemon) makeEVPN() (err error) {
	c := d.cfg.EVPN
	if c == nil {
		return nil
	}
	ec := evpn.Config{
		AS: c.AS, RouterID: c.RouterID, VTEP: d.cfg.VTEP.Local, Listen: c.Listen, Port: c.Port, HoldTime: c.HoldTime,
		RestartTime: c.RestartTime, Log: d.log.Named("evpn"),
	}
	for _, n := range c.Neighbours {
		ec.Neighbours = append(ec.Neighbours, n.Neighbour)
	}
	if d.workers != nil {
		ec.Process = d.bgpProcess
	}
	d.evpn, err = evpn.New(ec)
	switch {
	case errors.Is(err, unix.EACCES):
		return fmt.Errorf("%v: %w (vnicd needs CAP_NET_BIND_SERVICE for ports below 1024: run it as root or with that capability, or set evpn `port`)", c.At, err)
	case err != nil:
		return fmt.Errorf("%v: %w%s", c.At, err, hint(err))
	}
	d.onClose(d.evpn.Close)
	return nil
}

func (d *Daemon) makeNetworks() error {
	d.onClose(func() {
		for _, n := range d.nets {
			n.undo.run()
		}
	})
	for _, c := range d.cfg.Networks {
		n, err := d.newNetwork(c)
		if err != nil {
			return fmt.Errorf("%v: network %q: %w", c.At, c.Name, err)
		}
		d.nets[c.Name] = n
	}
	return nil
}

func (d *Daemon) makeVMs() error {
	raiseLockLimit()
	d.onClose(func() {
		d.mu.Lock()
		vms := d.vms
		d.cfg, d.vms = d.cfg.Clone(), map[string]*vm{}
		d.cfg.VMs = nil
		d.mu.Unlock()
		ends := map[string]func(){"those being removed": d.removals.Wait}
		for name, v := range vms {
			ends[name] = v.undo.run
		}
		if left := together(endLimit, ends); len(left) > 0 {
			// They still use what follows. The process ends without it, as it would be killed, which the VMs outlive, too.
			d.undo = nil
			d.log.Error("VMs cannot be disconnected: vnicd ends without that", "vms", left, "waited", endLimit)
		}
	})
	defer d.continuity.Hold()()
	for _, c := range d.cfg.VMs {
		v, err := d.newVM(c)
		if err != nil {
			return fmt.Errorf("%v: VM %q: %w", c.At, c.Name, err)
		}
		d.vms[c.Name] = v
	}
	return nil
}

func (d *Daemon) serve() error {
	cfg := d.cfg // from the first socket on, clients replace it
	for _, x := range []struct {
		name, path string
		gid, most  int
		gives      right
	}{{"control", cfg.Control, cfg.ControlGroup, 0, mayChange},
		{"status", cfg.Status, cfg.StatusGroup, statusClients, mayRead}} {
		c, err := startControl(x.name, x.path, x.gid, x.most, d.api(x.gives, cfg.Control), d.log)
		if err != nil {
			return err
		}
		d.onClose(c.close)
	}
	d.warnShared()
	d.onClose(func() { _ = d.endCapture(0) })
	return nil
}

// hint adds advice for the usual reasons.
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
