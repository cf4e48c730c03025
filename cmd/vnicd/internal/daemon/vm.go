package daemon

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/ivshmem"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vnet"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/hypervisor/localsocket"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/translate"
)

// vm is one guest's NIC: a port of its network with two faces, each behind a
// vhost-user socket. A host application has the HCA alone (PF-4).
type vm struct {
	cfg  *config.VM // replaced when the VM moves; Daemon.mu
	gvmi translate.GVMI
	port *vswitch.VMPort
	net  *vnet.Device // nil: an application
	hca  *hca.Device
	srv  *vhostuser.Server // of the HCA
	// keeps reports whether the HCA's connection outlives this process.
	keeps func() bool
	// behind reports whether a QEMU's ivshmem device is connected; nil: it cannot be.
	behind func() bool

	netSrv *vhostuser.Server // of the network device's socket; nil: an application

	budget    *hostdriver.Budget  // of both sockets
	work      *worktime.Account   // likewise, and of the HCA's commands
	attribute translate.Attribute // likewise
	changing  sync.Mutex          // one change of the attribute at a time; before Daemon.mu

	stopMTU func() // ends following the network's MTU
	undo    undo
}

// newVM makes a VM's devices and sockets. On an error it makes nothing.
func (d *Daemon) newVM(c *config.VM) (v *vm, err error) {
	if d.going[c.Name] != nil {
		return nil, fmt.Errorf("%w: %w", errConflict, beingRemoved(c.Name))
	}
	v = &vm{cfg: c, budget: hostdriver.NewBudget(c.MemoryBudget)}
	shared := c.Limits.Memory
	if shared == 0 {
		shared = hostdriver.DefaultShared()
	}
	v.budget.SetShared(shared)
	v.work = worktime.New(worktime.Config{Percent: cmp.Or(c.Limits.ControlTime, worktime.DefaultPercent)})
	v.budget.SetWork(v.work)
	if c.Application != nil {
		v.gvmi = translate.HostGVMI
	} else if v.gvmi, err = d.freeGVMI(); err != nil {
		return nil, err
	}
	if err := v.open(d); err != nil {
		v.undo.run()
		return nil, fmt.Errorf("%w%s", err, hint(err))
	}
	return v, nil
}

// freeGVMI returns the lowest number that no VM uses. 0 is the host's.
func (d *Daemon) freeGVMI() (translate.GVMI, error) {
	used := map[translate.GVMI]bool{}
	for _, vms := range []map[string]*vm{d.vms, d.going} {
		for _, v := range vms {
			used[v.gvmi] = true
		}
	}
	for g := translate.GVMI(1); g <= maxVMs; g++ {
		if !used[g] {
			return g, nil
		}
	}
	return 0, fmt.Errorf("there are %d VMs already", maxVMs)
}

func (v *vm) open(d *Daemon) (err error) {
	c, home, sw := v.cfg, d.nextLoop(), d.nets[v.cfg.Network].sw
	d.hcas.Add(1)
	v.undo.push(func() { d.hcas.Add(-1) })
	v.undo.push(v.share(d.memory))
	log := loglimit.New(d.log.With("vm", c.Name)) // one for all devices and connections of the VM
	v.port, err = vswitch.NewVMPort(sw, vswitch.VMPortConfig{Name: c.Name, MAC: vswitch.MAC(c.MAC), IPs: c.IPs,
		Rate: c.Rate, Storm: c.Storm, Loop: home, Kind: v.kind()})
	if err != nil {
		return err
	}
	v.undo.push(v.port.Close)
	if c.QMP != "" {
		v.undo.push(watchMemory(c.QMP, v.budget.Resync, log.Named("qmp")))
	}
	limits := hca.Limits{
		QPs: c.Limits.QPs, CQs: c.Limits.CQs, MRs: c.Limits.MRs, AHs: c.Limits.AHs, MTTs: c.Limits.Pages,
		Messages: c.Limits.Messages, Memory: c.Limits.HostMemory,
	}
	keeper := d.keeper()
	if c.Application != nil && d.cannotKeep != nil {
		keeper = nil
		log.Warn("the application's connection will end with this vnicd", "reason", d.cannotKeep)
	}
	account, err := hca.NewAccount(limits)
	if err != nil {
		return err
	}
	if c.Application == nil {
		if v.net, err = vnet.New(vnet.Config{
			Name: c.Name, MAC: vswitch.MAC(c.MAC), Pairs: c.Queues, Loops: append([]*loop.Loop{home}, d.otherLoops(home)...),
			Pool: d.pool, Port: v.port, Log: log.Named("net"), Account: account,
		}); err != nil {
			return err
		}
		v.undo.push(v.net.Close)
	}
	if v.hca, err = hca.New(hca.Config{
		Name: "vnic0", MAC: [6]byte(c.MAC), Loops: d.loops, Pool: d.pool, MTU: v.mtu, Version: firmware(d.version),
		Log: log.Named("hca"), DataPath: &hca.DataPath{LocalCopy: d.cfg.Debug.LocalCopy, ECN: d.cfg.ECN,
			SelectiveRepeat: d.cfg.Debug.SelectiveRepeat},
		Limits: limits, Account: account, Work: v.work,
		Journal: d.cfg.Journal && keeper != nil,
	}); err != nil {
		return err
	}
	v.undo.push(v.hca.Close)
	if _, err := v.attribute.Set(c.DMA); err != nil {
		return err
	}
	v.hca.Quarantine(c.DMA == translate.UplinkBlocked)

	v.hca.SetPort(v.port)
	if v.net != nil {
		v.port.SetNet(v.net)
	} else {
		v.port.SetNet(v.hca.Neighbours())
	}
	v.port.SetHCA(v.hca.HCAFace())
	v.followMTU(sw)
	v.undo.push(func() { v.stopMTU() })
	// Undone before the devices close, so that no frame reaches a closed device.
	v.undo.push(func() { v.port.SetHCA(nil); v.port.SetNet(nil) })

	d.fronts.Store(c.Name, v.attached)
	v.undo.push(func() { d.fronts.Delete(c.Name) })
	socket := vhostuser.Config{
		Path: d.cfg.HCASocket(c), Mode: d.cfg.SocketPermission(c), Owner: c.Owner, Log: log, VMs: d.gvms,
		Attribute: &v.attribute, Budget: v.budget, Work: v.work, SlotName: d.slotName,
	}
	kept := socket
	if !d.cfg.Debug.GuestFeatures {
		kept.Hide = abi.Features
	}
	kept.Keeper, kept.KeepAs, kept.Kept = keeper, hcaKeptAs+c.Name, d.kept
	kept.Continuity, kept.Blameless = &d.continuity, d.blameless
	if a := c.Application; a != nil {
		kept.KeepAs, kept.MaxMemory, kept.Sealed = appKeptAs+c.Name, a.Memory, true
		dir := d.cfg.AppDir(c)
		if err := makeAppDir(dir); err != nil {
			return err
		}
		kept.Also = []string{filepath.Join(dir, config.AppSocket)}
		return v.listenHCA(kept)
	}
	// QEMU's ivshmem device says nothing of memory and resets, and for the generic device QEMU only stops the rings, as
	// for a pause: both learn from the network card.
	socket.MachineReset = v.hca.MachineReset
	iv, err := v.listenBoth(kept, d.cfg)
	if err != nil {
		return err
	}
	if iv != nil {
		socket.Follower = iv
		socket.MachineReset = func() { v.hca.MachineReset(); iv.MachineReset() }
	}
	// QEMU connects its virtio-net to the next vnicd by itself, but the guest sees its link go down then. The HCA's
	// devices do not survive the end of their connection.
	socket.Path = d.cfg.NetSocket(c)
	socket.Keeper, socket.KeepAs, socket.Kept = d.netKeeper(d.keeper()), netKeptAs+c.Name, d.kept
	socket.Reconnects, socket.Blameless = true, d.blameless
	socket.Migrates = true // QEMU itself refuses to migrate a VM with an HCA, whichever device that is
	v.netSrv, err = v.listen(socket, v.net)
	return err
}

// makeAppDir makes an application's directory, if there is none. It outlives the application and the daemon: containers
// have it, and the next socket must appear in the same one. They must not see what a killed daemon has left there.
func makeAppDir(dir string) error {
	err := os.Mkdir(dir, 0o755)
	if err == nil {
		return os.Chmod(dir, 0o755) // whatever the umask: the socket has permissions of its own
	}
	if st, serr := os.Lstat(dir); serr != nil || !st.IsDir() {
		return err
	}
	localsocket.Sweep(dir)
	return nil
}

// listenBoth serves a VM's HCA on the sockets that its configuration wants. iv, if there is one, follows the network
// card's connection.
func (v *vm) listenBoth(c vhostuser.Config, cfg *config.Config) (iv *ivshmem.Server, err error) {
	_, c.Inner = c.Kept[ivshmemKeptAs+v.cfg.Name]
	if v.cfg.HCA == config.Ivshmem {
		if v.srv, err = vhostuser.Offer(c, v.hca, v.gvmi); err != nil {
			return nil, err
		}
		v.undo.push(func() { _ = v.srv.Close() })
	} else if err := v.listenHCA(c); err != nil {
		return nil, err
	}
	if v.cfg.HCA == config.VhostUser {
		return nil, nil
	}
	iv, err = ivshmem.Listen(ivshmem.Config{Path: cfg.IvshmemSocket(v.cfg), Mode: c.Mode, Owner: c.Owner, Log: c.Log,
		Work: c.Work, VirtioID: qemu.VirtioID, Queues: HCAQueues(cfg), Device: v.srv, KeepAs: ivshmemKeptAs + v.cfg.Name,
		Kept: c.Kept})
	if err != nil {
		return nil, err
	}
	v.undo.push(func() { _ = iv.Close() })
	v.behind = iv.Attached
	v.keeps = func() bool { return iv.Keeps() || !iv.Attached() && v.srv.Keeps() }
	return iv, nil
}

// listenHCA serves the HCA on a socket for vhost-user.
func (v *vm) listenHCA(c vhostuser.Config) (err error) {
	if v.srv, err = v.listen(c, v.hca); err == nil {
		v.keeps = v.srv.Keeps
	}
	return err
}

// checkFiles finds out whether connections of applications can be kept: whether this process can make memory files that
// are safe to use and that the next one can map.
func (d *Daemon) checkFiles() error {
	if d.keeper() == nil {
		return nil
	}
	fd, err := hostdriver.NewFile(translate.PageSize)
	if d.cannotKeep = err; err == nil {
		return unix.Close(fd)
	}
	return nil
}

// resends are goroutines that run resend, until end.
type resends struct {
	mu    sync.Mutex
	ended bool
	tasks sync.WaitGroup
}

func (r *resends) Go(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.ended {
		r.tasks.Go(f)
	}
}

func (r *resends) end() {
	r.mu.Lock()
	r.ended = true
	r.mu.Unlock()
	r.tasks.Wait()
}

// resend lets the VMs' HCAs send again once all of them are back: what one sent before another was there is lost.
func (d *Daemon) resend() {
	d.mu.RLock()
	defer d.mu.RUnlock()
	for _, v := range d.vms {
		v.hca.Resend()
	}
}

// listen serves a device on a socket.
func (v *vm) listen(c vhostuser.Config, dev virtio.Device) (*vhostuser.Server, error) {
	srv, err := vhostuser.Listen(c, dev, v.gvmi)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", c.Path, err)
	}
	v.undo.push(func() { _ = srv.Close() })
	return srv, nil
}

func (v *vm) kind() vswitch.Kind {
	if v.cfg.Application != nil {
		return vswitch.KindHCA
	}
	return vswitch.KindVM
}

// attached reports whether a QEMU or an application is connected to one of the sockets.
func (v *vm) attached() bool {
	return v.net != nil && v.net.Attached() || v.hca.Attached()
}

// firmware is the version as guests see it, without a commit: they have room for 23 bytes.
func firmware(version string) string {
	version, _, _ = strings.Cut(version, "-g")
	return version[:min(len(version), 23)]
}

// mtu is the MTU of the VM's present network.
func (v *vm) mtu() int { return v.port.Attachment().Network().MTU() }

// followMTU makes the HCA's path MTU follow the network's: the driver reads it again.
func (v *vm) followMTU(sw *vswitch.Network) {
	v.stopMTU = sw.OnMTU(func(int) { v.hca.PortChanged() })
}

// move moves the VM's port to another network.
func (v *vm) move(to *network, c *config.VM) error {
	if err := v.port.Move(to.sw); err != nil {
		return err
	}
	v.stopMTU()
	v.followMTU(to.sw)
	v.hca.PortChanged()
	v.cfg = c
	return nil
}

// slotName names an epoch's reader slot. Loops use the slots of their IDs; the others are for goroutines that handle
// commands and vhost-user messages.
func (d *Daemon) slotName(slot int) string {
	if slot < len(d.loops) {
		return d.loops[slot].String()
	}
	return "command or message"
}
