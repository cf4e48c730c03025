// Package config reads vnicd's configuration: a YAML file and its fragments, checked key by key, so that all mistakes
// are reported together, each with its file and line.
//
// Each stage has a file. load.go reads the files, merge.go makes one tree of theirs. parse.go walks the tree, refuses
// unknown keys, and converts values to the types below. check.go then finds what only the whole shows (duplicates,
// references, address families).
package config

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/overlay/evpn"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/hypervisor/localsocket"
	"github.com/vnicd/vnicd/translate"
)

// Defaults of the optional keys.
const (
	DefaultRunDir     = "/run/vnicd"
	DefaultVXLANPort  = 4789 // RFC 7348 section 5
	DefaultDSCP       = 26   // AF31 (MT-8)
	DefaultEngines    = 1
	DefaultEngineNice = -10 // as Open vSwitch's threads have
	DefaultSpin       = 20 * time.Microsecond
	DefaultSocketMode = 0o660

	DefaultControlGroup = "vnicd-admin"
	DefaultStatusGroup  = "vnicd-status"

	MaxEngines        = 8 // VNICD_MAX_ENGINES of the device ABI
	MaxVNI            = 1<<24 - 1
	maxInterfaceName  = 15 // IFNAMSIZ less the NUL
	maxUnixSocketPath = 107
	maxNameLength     = 32
	minMTU, maxMTU    = 1280, 9000
	maxQPs            = 65535
	maxMRs            = 1 << 20
	maxAHs            = 1 << 18
	DefaultBuffers    = 8192
	defaultAppMemory  = 1 << 30
	DefaultMonitoring = "127.0.0.1:9469" // only with the page; otherwise `listen` has no default

	DefaultPressureLimit = 10  // percent of time
	DefaultMemoryWeight  = 100 // as cgroup weights
	maxMemoryWeight      = 10000
)

// Config is one host's configuration.
type Config struct {
	// Path of the file, for messages.
	Path string
	// Files are those that were read: the main file and its fragments, in that order.
	Files []string
	// Overrides are the single values that stand in several files.
	Overrides []Override
	// Keys are the places of the keys outside of lists, by their path, such as vtep.port.
	Keys map[string]Place
	// Host is this host's name in status output. Default: the system's.
	Host string
	// RunDir holds the sockets. Default /run/vnicd.
	RunDir string
	// Control is the path of the control socket, which gives full control. Default RunDir/vnicd.sock.
	Control string
	// Status is the path of the control socket that only answers questions. Default RunDir/vnicd-status.sock.
	Status string
	// ControlGroup and StatusGroup may open these sockets, besides root and the daemon's user; -1: nobody else. Default:
	// the groups vnicd-admin and vnicd-status, if the host has them.
	ControlGroup, StatusGroup int
	// SocketMode is the permission of the VM sockets: who may attach a VM that has no Owner.
	SocketMode uint32
	// Engines is the number of data-path threads, 1..8.
	Engines int
	// EngineCPUs are the processors of the engines, one each, in order. Empty: not pinned.
	EngineCPUs []int
	// EngineNice is the nice value of their threads, -20..19, as far as the daemon has the permission.
	EngineNice int
	// Spin bounds how long an engine polls after its last work before it sleeps; it polls less where polling was in
	// vain.
	Spin time.Duration
	// Buffers is the number of frame buffers.
	Buffers int
	// ECN makes RC connections ECN-capable: they report and respond to congestion before packets are lost. Default true.
	ECN bool
	// Journal keeps the HCAs' state in shared memory all the time, so that RDMA connections survive a crash of vnicd
	// (CO-2), where a keeper or systemd passes it on. Default true.
	Journal bool
	// ShortPath lets the kernel carry established TCP of host ports, or forbids it. Nil: used where the kernel can.
	ShortPath *bool
	// Debug switches fast paths off.
	Debug Debug
	// LogLevel is one of trace, debug, info, warn, error.
	LogLevel string
	// Monitoring is the server for metrics. Zero value: no server.
	Monitoring Monitoring
	// MemoryPressure returns guest memory to the host while it is short of memory (HF-4).
	MemoryPressure MemoryPressure
	// VTEP is nil on a host without an underlay: its networks are local.
	VTEP *VTEP
	// Underlay is nil if the underlay is not protected.
	Underlay *Underlay
	// EVPN is nil if this host does not use BGP.
	EVPN *EVPN
	// Networks in the order of the file.
	Networks []*Network
	// VMs, and host applications, in the order of the file.
	VMs []*VM
}

// Debug has a switch for each fast path that operators need not switch off, and for feature bits: to find faults, and
// to test the paths behind them (`make test-ways`). All default to true.
type Debug struct {
	// LocalCopy turns RDMA between VMs of this host into a memory copy, without frames.
	LocalCopy bool
	// Segmentation passes several tunnel datagrams to and from the kernel as one message.
	Segmentation bool
	// SelectiveRepeat makes RC connections between two vnicds retransmit only lost packets.
	SelectiveRepeat bool
	// GuestFeatures offers guest drivers feature bits (CO-6).
	GuestFeatures bool
}

// Monitoring is the read-only HTTP server.
type Monitoring struct {
	// Listen is HOST:PORT, or the absolute path of a unix socket. "": no server.
	Listen string
	// Group may read from a unix socket, besides root and the daemon's user: Config.StatusGroup.
	Group int
	// Names are host names by which clients may address the server, besides that in Listen, IP addresses and localhost.
	Names []string
	// PProf serves Go's profiles too.
	PProf bool
	// Page serves the web page too.
	Page bool
	// WebConfig is the absolute path of a file with TLS and passwords, which LoadWeb reads. "": plain HTTP for everybody.
	WebConfig string
}

// MemoryPressure is the watch on the host's memory.
type MemoryPressure struct {
	// Watch is true by default.
	Watch bool
	// Limit is the percentage of time in which tasks wait for memory before VMs keep less of it, 1..100.
	Limit int
}

// VTEP is this host's end of the VXLAN tunnels (RFC 7348).
type VTEP struct {
	// Local is the underlay address; peers must be of the same family.
	Local netip.Addr
	// Port is the UDP port, 4789 by default.
	Port uint16
	// DSCP marks the outer header of RoCE frames (MT-8), 0..63.
	DSCP uint8
	// ZeroChecksum6 sends IPv6 datagrams without UDP checksum (RFC 6935).
	ZeroChecksum6 bool
	// PeerPorts is from which UDP ports peers must send (TR-3). Default auto.
	PeerPorts vxlan.PeerPorts
}

// Network is one tenant's L2 segment.
type Network struct {
	At    Place
	Name  string
	VNI   uint32
	MTU   int // 0: derived from the underlay
	Peers []netip.Addr
	// LearnPeers accepts frames from VTEPs that are not listed.
	LearnPeers bool
	// Ageing is the lifetime of a learnt address; 0: the switch's default.
	Ageing time.Duration
	// MaxEntries bounds the forwarding table; 0: the switch's default.
	MaxEntries int
	// Storm bounds each port's frames per second to unknown or several receivers; 0: the switch's default, -1: no
	// limit.
	Storm int
	// Snoop keeps multicast frames from ports without members; otherwise they are flooded, as by default.
	Snoop bool
	// FloodUnknown also sends frames to unknown unicast addresses into tunnels. Default true.
	FloodUnknown bool
	// EVPN lets the network take part in EVPN, if the host does. Default true.
	EVPN bool
	// RouteTargets are those that the network exports and imports in EVPN; nil: AS:VNI.
	RouteTargets []evpn.RouteTarget
	TAP          *TAP
}

// TAP is a host port of a network.
type TAP struct {
	At        Place
	Name      string
	Addresses []netip.Prefix
	Bridge    string
	// Rate bounds what the host sends, and what it receives, in bits per second. 0: no limit.
	Rate int64
	// Offloads leaves checksums and segmentation to the other end. Default true.
	Offloads bool
}

// VM is one guest: a MAC that its virtio-net and its HCA share, and limits.
type VM struct {
	At      Place
	Name    string
	Network string
	MAC     net.HardwareAddr
	// IPs are the only addresses that the VM may use. Nil: any.
	IPs []netip.Addr
	// Queues is the number of virtio-net's queue pairs, 1 by default.
	Queues int
	// HCA is how QEMU may have the HCA. Applications have no choice.
	HCA string
	// Rate bounds what the VM sends, and what it receives, in bits per second. 0: no limit.
	Rate int64
	// Storm is as in Network, for this VM; 0: the network's.
	Storm  int
	Limits Limits
	// MemoryBudget bounds the bytes of the VM's memory that are kept resident for its devices (PF-15). 0: no limit.
	MemoryBudget uint64
	// MemoryWeight is the VM's share of memory under pressure, 1..10000, relative to the others'. Default 100.
	MemoryWeight int
	// Owner are the only processes, besides root's, that may open the VM's sockets. Nil: those that SocketMode permits.
	Owner *localsocket.Owner
	// QMP is the path of a monitor socket of the VM's QEMU. "": none.
	QMP string
	// DMA is what the VM's devices may do to its memory (PF-3). FileDMA is its value in the file: a reload leaves DMA,
	// which an operator may have changed since, unless that differs.
	DMA, FileDMA translate.Uplink
	// Application is set for a program of the host (PF-4), which has an HCA but no virtio-net.
	Application *Application
}

// Values of VM.HCA.
const (
	VhostUser = "vhost-user" // QEMU's generic vhost-user device
	Ivshmem   = "ivshmem"    // QEMU's ivshmem-doorbell
	Auto      = "auto"       // either of them, on sockets of their own (default)
)

// Application has the keys of a host application that VMs do not have.
type Application struct {
	// Mode is the socket's permission: who may act as the application. With an Owner, only its part for them counts.
	Mode uint32
	// Memory bounds how much memory it may share with the device.
	Memory uint64
}

// What returns the kind of port, for messages.
func (v *VM) What() string {
	if v.Application != nil {
		return "application"
	}
	return "VM"
}

// Limits bound a VM's use of the host's resources. Zero: the device's default.
type Limits struct {
	QPs      int
	CQs      int
	MRs      int
	AHs      int
	Pages    uint64 // MTT entries over all regions
	Messages int    // send requests a second; 0: any number
	// Memory bounds the bytes that the VM's QEMU, or the application, may share with the devices.
	Memory uint64
	// HostMemory bounds the bytes of the daemon that the VM's objects occupy.
	HostMemory uint64
	// ControlTime is the percentage of one processor that the VM's commands may use, 1..100.
	ControlTime int
}

// NetSocket is the path of the VM's virtio-net vhost-user socket.
func (c *Config) NetSocket(vm *VM) string { return filepath.Join(c.RunDir, vm.Name+".net") }

// SocketPermission is the mode of a VM's sockets, as far as its Owner leaves it.
func (c *Config) SocketPermission(vm *VM) os.FileMode {
	if vm.Application != nil {
		return os.FileMode(vm.Application.Mode)
	}
	return os.FileMode(c.SocketMode)
}

// IvshmemSocket is the path of the socket of the VM's HCA for QEMU's ivshmem-doorbell.
func (c *Config) IvshmemSocket(vm *VM) string { return filepath.Join(c.RunDir, vm.Name+".ivshmem") }

// HCASocket is the path of the socket of the VM's HCA for QEMU's generic vhost-user device, or of an application.
func (c *Config) HCASocket(vm *VM) string { return filepath.Join(c.RunDir, vm.Name+".hca") }

// AppDir is the directory with nothing but an application's socket, named AppSocket. A container gets the directory,
// because each vnicd makes a new socket, which a mount of the socket itself would not show.
func (c *Config) AppDir(vm *VM) string { return filepath.Join(c.RunDir, vm.Name+".app") }

// AppSocket is the name of an application's socket in its directory.
const AppSocket = "hca"

// place returns where a key outside of lists stands; the file as a whole if it does not.
func (c *Config) place(key string) Place {
	if p, ok := c.Keys[key]; ok {
		return p
	}
	return Place{File: c.Path, Key: key}
}

// VM returns the VM of that name, or an error that lists all VMs.
func (c *Config) VM(name string) (*VM, error) {
	var names []string
	for _, vm := range c.VMs {
		if vm.Name == name {
			return vm, nil
		}
		names = append(names, vm.Name)
	}
	return nil, fmt.Errorf("no VM %q in %s; it has: %s", name, c.Path, orNone(names))
}

// Network returns the network of that name, or nil.
func (c *Config) Network(name string) *Network {
	for _, n := range c.Networks {
		if n.Name == name {
			return n
		}
	}
	return nil
}

func orNone(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}
