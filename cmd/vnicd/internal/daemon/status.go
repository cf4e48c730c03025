package daemon

import (
	"maps"
	"os"
	"slices"
	"time"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/cmd/vnicd/internal/keeper"
	"github.com/vnicd/vnicd/device/ethernet/overlay/evpn"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/ethernet/wireguard"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/virtio/vnet"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/translate"
)

// Status is what `vnicd status` shows and `vnicd status -j` prints.
type Status struct {
	Host    string        `json:"host"`
	Config  string        `json:"config"` // absolute path of the main configuration file
	Version string        `json:"version"`
	PID     int           `json:"pid"`
	Uptime  float64       `json:"uptime_seconds"`
	Engines []loop.Stats  `json:"engines"`
	Buffers BufferStatus  `json:"buffers"`
	VTEP    *vxlan.Status `json:"vtep,omitempty"`

	Protection *wireguard.Status `json:"protection,omitempty"` // of the underlay; nil: none

	Networks []vswitch.Status `json:"networks"`
	VMs      []VMStatus       `json:"vms"`
	EVPN     *evpn.Status     `json:"evpn,omitempty"`

	Memory *hostdriver.HostStatus `json:"memory,omitempty"` // of the host; nil: not watched

	// WorkersEnded: the processes for BGP and monitoring have ended and cannot be started again by this vnicd.
	WorkersEnded bool `json:"workers_ended,omitempty"`

	Keeper    *keeper.Status  `json:"keeper,omitempty"` // nil: `vnicd run` without --keep
	Continued ContinuedStatus `json:"continued"`
}

// ContinuedStatus describes the HCAs of the previous vnicd's VMs (CO-1).
type ContinuedStatus struct {
	Pending int     `json:"pending"`         // are being resumed
	HCAs    int     `json:"hcas"`            // of running VMs: went on where the previous vnicd stopped them
	Silence float64 `json:"silence_seconds"` // the longest time for which one of these stood still
	Revived int     `json:"revived"`         // went on where the previous vnicd was killed
	Lost    int     `json:"lost"`            // of running VMs: did not go on; their programs got flush errors, see the log
}

func (d *Daemon) continued() ContinuedStatus {
	s := d.continuity.Status()
	return ContinuedStatus{s.Pending, s.Continued, s.Silence.Seconds(), s.Revived, s.Lost}
}

// IsApplication reports whether this is a host application.
func (v *VMStatus) IsApplication() bool { return v.NetSocket == "" }

// BufferStatus is the use of frame buffers.
type BufferStatus struct {
	Count     int    `json:"count"`     // of the normal size
	InUse     int    `json:"in_use"`    // of all sizes
	Exhausted uint64 `json:"exhausted"` // times that none was free
}

// VMStatus is a guest with its two sockets and devices, or a host application with one.
type VMStatus struct {
	Name      string `json:"name"`
	Network   string `json:"network"`
	MAC       string `json:"mac"`
	NetSocket string `json:"net_socket,omitempty"` // "": an application
	HCASocket string `json:"hca_socket,omitempty"` // for vhost-user; "": only IvshmemSocket
	HCAKind   string `json:"hca_kind,omitempty"`   // config.VM.HCA; "": an application
	AppDir    string `json:"app_dir,omitempty"`    // an application's, with its socket as hca; "": a VM
	// IvshmemSocket is that for QEMU's ivshmem-doorbell; "": none.
	IvshmemSocket string `json:"ivshmem_socket,omitempty"`
	// HCADevice is the kind of QEMU's device that is connected; "": none, or an application.
	HCADevice string      `json:"hca_device,omitempty"`
	Going     bool        `json:"going,omitempty"` // removed, but its memory is not released yet
	Net       vnet.Status `json:"net"`             // zero for an application
	HCA       hca.Status  `json:"hca"`

	// Outlives is what the HCA's connection outlives, with what its programs have open; NetOutlives is the same of the
	// network device, whose link goes down otherwise.
	Outlives    Outlives `json:"outlives,omitempty"`
	NetOutlives Outlives `json:"net_outlives,omitempty"`

	Memory hostdriver.Status `json:"memory"`
	DMA    DMAStatus         `json:"dma"`

	Control worktime.Status `json:"control"` // processor time outside of the engines
}

// Outlives is an end of this process; "": there is no connection.
type Outlives string

// What a connection outlives.
const (
	OutlivesNothing Outlives = "nothing"
	OutlivesRestart Outlives = "restart" // in good order, upgrades among them
	OutlivesKill    Outlives = "kill"    // and a restart
)

func (v *vm) outlives(h *hca.Status) Outlives {
	switch {
	case !h.Connected:
		return ""
	case !v.keeps():
		return OutlivesNothing
	case h.Journal || !h.Up && !h.Paused: // or there is no driver that would lose anything
		return OutlivesKill
	}
	return OutlivesRestart
}

// device is the kind of QEMU's device, see VMStatus.HCADevice.
func (v *vm) device(connected bool) string {
	switch {
	case !connected || v.cfg.Application != nil:
		return ""
	case v.behind != nil && v.behind():
		return config.Ivshmem
	}
	return config.VhostUser
}

func (v *vm) netOutlives(n *vnet.Status) Outlives {
	switch {
	case !n.Connected:
		return ""
	case v.netSrv.Keeps():
		return OutlivesKill
	}
	return OutlivesNothing
}

// DMAStatus is what a VM's devices may do to its memory (PF-3), and what was refused.
type DMAStatus struct {
	Attribute translate.Uplink `json:"attribute"`
	Refused   translate.Denied `json:"refused"`
}

// Status makes a snapshot. It waits for loops and for commands in progress.
func (d *Daemon) Status() *Status {
	d.mu.RLock()
	defer d.mu.RUnlock()
	s := &Status{Host: d.cfg.Host, Config: d.path, Version: d.version, PID: os.Getpid(),
		Uptime: time.Since(d.started).Seconds(), Keeper: keeper.Mine(), Continued: d.continued(),
		WorkersEnded: d.workers != nil && d.workers.Ended()}
	for _, l := range d.loops {
		s.Engines = append(s.Engines, l.Stats())
	}
	s.Buffers = BufferStatus{Count: d.pool.Count(), InUse: d.pool.InUse(), Exhausted: d.pool.Exhausted()}
	if d.vtep != nil {
		v := d.vtep.Status()
		s.VTEP = &v
	}
	if d.guard != nil {
		p := d.guard.Status()
		s.Protection = &p
	}
	if d.evpn != nil {
		s.EVPN = d.evpn.Status()
	}
	if d.memory != nil {
		m := d.memory.Status()
		s.Memory = &m
	}
	for _, n := range d.cfg.Networks {
		s.Networks = append(s.Networks, d.nets[n.Name].sw.Status())
	}
	for _, c := range d.cfg.VMs {
		s.VMs = append(s.VMs, d.vms[c.Name].status(d.cfg))
	}
	for _, name := range slices.Sorted(maps.Keys(d.going)) {
		vs := d.going[name].status(d.cfg)
		vs.Going = true
		s.VMs = append(s.VMs, vs)
	}
	return s
}

func (v *vm) status(cfg *config.Config) VMStatus {
	s := VMStatus{
		Name: v.cfg.Name, Network: v.cfg.Network, MAC: v.cfg.MAC.String(),
		HCAKind: v.cfg.HCA,
		HCA:     v.hca.Describe(), Memory: v.budget.Status(), Control: v.work.Status(),
		DMA: DMAStatus{v.attribute.Uplink(), v.attribute.Refused()},
	}
	if v.net != nil {
		s.NetSocket, s.Net = cfg.NetSocket(v.cfg), v.net.Describe()
		s.NetOutlives = v.netOutlives(&s.Net)
	}
	if v.cfg.Application != nil {
		s.AppDir = cfg.AppDir(v.cfg)
	}
	s.Outlives = v.outlives(&s.HCA)
	s.HCADevice = v.device(s.HCA.Connected)
	if v.cfg.HCA != config.Ivshmem {
		s.HCASocket = cfg.HCASocket(v.cfg)
	}
	if v.cfg.Application == nil && v.cfg.HCA != config.VhostUser {
		s.IvshmemSocket = cfg.IvshmemSocket(v.cfg)
	}
	return s
}
