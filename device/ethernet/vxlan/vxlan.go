// Package vxlan is the VTEP, the end of the tunnels between hosts (RFC 7348): it has UDP sockets on the loops, and one
// port in each tenant network.
//
// Receiving: every loop has a socket on the VTEP's address and port, and the kernel spreads flows over them. A batch is
// received straight into frame buffers; then each datagram is checked: VXLAN header, VNI known, sender a peer of that
// network, ECN. The frame goes on into the network (vswitch checks the inner frame).
//
// Sending: Deliver, on any loop, appends to that loop's batch and holds a reference to the frame; the header is
// prepended by scatter/gather, so frames to several peers are never copied. The batch leaves at the loop's flush, or
// when it is full; a frame with pending segmentation leaves at once, for the kernel to segment (gso.go). Datagrams that
// the kernel does not accept at once are dropped and counted, as on a network card; sending never waits. Each loop
// sends from several sockets, whose ports are the flows' entropy for the underlay's equal-cost paths; a flow stays on
// one socket, so it is not reordered.
//
// Lock order: VTEP.mu, then vswitch's, then origins.mu.
package vxlan

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/go-hclog"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
)

// Defaults of Config.
const (
	DefaultPort = 4789 // IANA
	DefaultDSCP = 26   // AF31 (RFC 2597), the lossless class of MT-8
	BestEffort  = -1

	// DefaultSourcePorts is the number of UDP source ports of each loop.
	DefaultSourcePorts = 16
	maxSourcePorts     = 64

	// DefaultMaxPeers bounds the peers of one network, configured and learnt.
	DefaultMaxPeers = 512
	maxMaxPeers     = 1<<16 - 2 // vswitch.Remote
)

// Overhead of encapsulation over an inner layer-3 packet: IP, UDP 8, VXLAN 8, inner Ethernet 14.
const (
	overhead4 = 20 + 8 + HeaderLen + vswitch.HeaderLen
	overhead6 = 40 + 8 + HeaderLen + vswitch.HeaderLen
)

// Errors that callers test for.
var (
	ErrDuplicateVNI = errors.New("vxlan: VNI is in use")
	ErrUnknownVNI   = errors.New("vxlan: no such VNI")
	ErrPeer         = errors.New("vxlan: invalid peer")
	ErrTooManyPeers = errors.New("vxlan: too many peers")
	ErrPeerFamily   = errors.New("vxlan: peer and local address are of different families")
	ErrMTU          = errors.New("vxlan: network's MTU is larger than the underlay carries")
	ErrClosed       = errors.New("vxlan: closed")
)

// Config describes a VTEP.
type Config struct {
	// Local is this host's underlay address, IPv4 or IPv6; it must be configured on an interface.
	Local netip.Addr
	// Port is the UDP port of this VTEP and of its peers; zero = DefaultPort.
	Port uint16
	// Loops receive and send; at least one.
	Loops []*loop.Loop
	// Pool provides buffers for received frames.
	Pool *frame.Pool
	// DSCP is the traffic class of RoCE frames, 1 to 63; zero = DefaultDSCP, BestEffort = none.
	DSCP int
	// SourcePorts is the number of UDP source ports per loop, 1 to 64; zero = DefaultSourcePorts. They are below 1024 if
	// the process may bind such ports (then all loops together have at most 171), otherwise above 49151.
	SourcePorts int
	// PeerPorts is from which UDP ports peers must send.
	PeerPorts PeerPorts
	// ZeroChecksum6 sends IPv6 datagrams without UDP checksum (RFC 6935). Off by default, as in Linux's vxlan devices,
	// because peers must be configured to accept that. Received datagrams may have a valid checksum or none.
	ZeroChecksum6 bool
	// Segmentation lets the kernel or its card segment large frames and messages of several datagrams, and coalesce
	// received ones. Such datagrams have checksums, over IPv4 too. Off: every datagram is sent and received on its own.
	Segmentation bool
	// Protection is the interface that encrypts what this VTEP and its peers exchange. Local must be its address.
	// Datagrams leave through it only, and others are not accepted; there is no short path. Nil: the underlay is as safe
	// as its wires.
	Protection Protection
	// ShortPath opens the short path (fastpath.Open): established TCP of host ports stays in the kernel where possible;
	// over IPv6 it sends only with ZeroChecksum6. Nil: all frames go through the switch.
	ShortPath func(ShortPathConfig) (ShortPath, error)
	Log       hclog.Logger
}

// VTEP is one tunnel end. Networks and peers may be added and removed at any time.
type VTEP struct {
	cfg      Config
	dscp     uint8
	v6       bool
	log      hclog.Logger
	segments bool            // UDP_SEGMENT works
	virtual  atomic.Bool     // the underlay may be a wire inside this machine; see underlayLink
	nl       *netlink.Handle // in the namespace that the VTEP was made in

	nets atomic.Pointer[map[uint32]*port]
	rx   []*receiver
	tx   [loop.MaxLoops]*sender

	paths atomic.Pointer[map[netip.Addr]int] // inner MTU by peer, as last found; 0 = no route
	kick  chan struct{}                      // capacity 1: MTUs are to be computed again
	guard int                                // socket that counts unprotected datagrams; -1: none (protect.go)

	short   ShortPath // nil: none, for the reason in noShort
	noShort string

	origins origins
	refused refusals
	monitor atomic.Pointer[Monitor] // nil = no capture

	// Counters has what belongs to no network: In and Out count datagrams, drops such as unknown VNIs.
	Counters vswitch.Counters

	mu     sync.Mutex // guards the writers of nets and of ports' peers, and the fields below
	mtu    int        // inner, of the local address's interface
	dev    string     // that interface
	index  int        // its number
	closed bool

	stopWatch func() // stops following the underlay
}

// New opens the sockets and starts to receive.
func New(c Config) (*VTEP, error) {
	c.Local = c.Local.Unmap()
	if !c.Local.IsValid() || c.Local.IsUnspecified() || c.Local.IsMulticast() {
		return nil, fmt.Errorf("vxlan: local address %v; want a unicast address of this host", c.Local)
	}
	if len(c.Loops) == 0 {
		return nil, errors.New("vxlan: no loops")
	}
	if c.Pool == nil {
		return nil, errors.New("vxlan: no buffer pool")
	}
	if c.Port == 0 {
		c.Port = DefaultPort
	}
	switch {
	case c.DSCP == 0:
		c.DSCP = DefaultDSCP
	case c.DSCP == BestEffort:
		c.DSCP = 0
	case c.DSCP < 0 || c.DSCP > 63:
		return nil, fmt.Errorf("vxlan: DSCP %d; want 1 to 63, 0 for the default or -1 for best effort", c.DSCP)
	}
	if c.SourcePorts == 0 {
		c.SourcePorts = DefaultSourcePorts
	}
	if c.SourcePorts < 1 || c.SourcePorts > maxSourcePorts {
		return nil, fmt.Errorf("vxlan: %d source ports; want 1 to %d", c.SourcePorts, maxSourcePorts)
	}
	c.Log = loglimit.New(c.Log)
	vt := &VTEP{cfg: c, dscp: uint8(c.DSCP), v6: c.Local.Is6(), log: c.Log, kick: make(chan struct{}, 1), guard: -1}
	vt.paths.Store(&map[netip.Addr]int{})
	vt.nets.Store(&map[uint32]*port{})
	var err error
	if vt.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("vxlan: netlink: %w", err)
	}
	if err := vt.refreshLocked(); err != nil {
		vt.shutdown()
		return nil, err
	}
	if err := vt.open(); err != nil {
		vt.shutdown()
		return nil, err
	}
	vt.openShortPath()
	vt.follow()
	return vt, nil
}

func (vt *VTEP) open() error {
	ports := newSupply(vt)
	for _, l := range vt.cfg.Loops {
		if vt.tx[l.ID()] != nil {
			return fmt.Errorf("vxlan: two loops with ID %d", l.ID())
		}
		s, err := newSender(vt, l, ports)
		if err != nil {
			return err
		}
		vt.tx[l.ID()] = s
		vt.segments = vt.cfg.Segmentation && canSegment(s.socks[0].fd)
	}
	fds, err := openReceivers(vt.nl, netip.AddrPortFrom(vt.cfg.Local, vt.cfg.Port), len(vt.cfg.Loops), vt.device())
	if err != nil {
		return err
	}
	for i, l := range vt.cfg.Loops {
		vt.rx = append(vt.rx, newReceiver(vt, l, fds[i]))
	}
	if err := vt.openGuard(); err != nil {
		return err
	}
	for _, r := range vt.rx {
		if err := r.start(); err != nil {
			return err
		}
	}
	return nil
}

// Local returns the VTEP's underlay address.
func (vt *VTEP) Local() netip.Addr { return vt.cfg.Local }

// MTU returns the largest inner layer-3 packet in bytes that the interface of the local address and our buffers carry:
// the interface's MTU less 50 (IPv4) or 70 (IPv6). The paths to a network's peers may allow more or less.
func (vt *VTEP) MTU() int {
	vt.mu.Lock()
	defer vt.mu.Unlock()
	return vt.mtu
}

// RefreshMTU checks interfaces and routes again and passes the MTUs on to the networks. The VTEP does so by itself
// after changes.
func (vt *VTEP) RefreshMTU() error {
	vt.mu.Lock()
	defer vt.mu.Unlock()
	if vt.closed {
		return ErrClosed
	}
	return vt.refreshLocked()
}

func mtuError(dev string, under, mtu int) error {
	return fmt.Errorf("vxlan: interface %s has MTU %d, which leaves %d for tenants; want at least %d", dev, under, mtu,
		vswitch.MinMTU)
}

// AddNetwork makes the VTEP a port of a network, with the hosts that serve the same VNI as peers. The network's MTU
// follows the underlay's unless it is configured; one that does not fit is refused (ErrMTU).
func (vt *VTEP) AddNetwork(net *vswitch.Network, peers []netip.Addr, opts ...NetworkOption) (err error) {
	vt.mu.Lock()
	defer vt.mu.Unlock()
	if vt.closed {
		return ErrClosed
	}
	old := *vt.nets.Load()
	if old[net.VNI()] != nil {
		return fmt.Errorf("%w: %d", ErrDuplicateVNI, net.VNI())
	}
	p := newPort(vt, net)
	for _, o := range opts {
		o(p)
	}
	if p.maxPeers < 1 || p.maxPeers > maxMaxPeers {
		return fmt.Errorf("vxlan: network %q: limit of %d peers; want 1 to %d", net.Name(), p.maxPeers, maxMaxPeers)
	}
	if err := p.setPeersLocked(peers); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			vt.origins.drop(p.peers.Load().list...)
		}
	}()
	p.configured = slices.Clone(peers)
	p.mtu = vt.narrowest(p.peers.Load(), make(map[netip.Addr]int), make(map[int]int))
	if want := net.ConfiguredMTU(); want > p.mtu {
		return fmt.Errorf("%w: network %q wants %d, the paths from %s carry %d", ErrMTU, net.Name(), want, vt.cfg.Local,
			p.mtu)
	}
	if _, err := net.Attach(p, vswitch.PortConfig{Name: "vxlan " + vt.cfg.Local.String(), Kind: vswitch.KindVTEP,
		Attached: func(a *vswitch.Attachment) { p.att = a }}); err != nil {
		return err
	}
	p.together()
	net.SetUnderlayMTU(p.mtu)
	m := maps.Clone(old)
	m[net.VNI()] = p
	vt.nets.Store(&m)
	if vt.short != nil {
		vt.short.Join(p.att)
	}
	vt.recompute()
	return nil
}

// RemoveNetwork removes the VTEP's port from a network; frames of its VNI are dropped from then on.
func (vt *VTEP) RemoveNetwork(vni uint32) error {
	vt.mu.Lock()
	defer vt.mu.Unlock()
	return vt.removeLocked(vni)
}

func (vt *VTEP) removeLocked(vni uint32) error {
	p := (*vt.nets.Load())[vni]
	if p == nil {
		return fmt.Errorf("%w: %d", ErrUnknownVNI, vni)
	}
	m := maps.Clone(*vt.nets.Load())
	delete(m, vni)
	vt.nets.Store(&m)
	if vt.short != nil {
		vt.short.Leave(p.att)
	}
	p.att.Close()
	p.net.SetUnderlayMTU(0)
	vt.origins.drop(p.peers.Load().list...)
	return nil
}

// SetPeers replaces the configured peers of a network. Addresses behind removed peers are removed from the table;
// learnt peers stay.
func (vt *VTEP) SetPeers(vni uint32, peers []netip.Addr) error {
	vt.mu.Lock()
	defer vt.mu.Unlock()
	p := (*vt.nets.Load())[vni]
	if p == nil {
		return fmt.Errorf("%w: %d", ErrUnknownVNI, vni)
	}
	defer vt.recompute()
	if err := p.setPeersLocked(peers); err != nil {
		return err
	}
	p.configured = slices.Clone(peers)
	return nil
}

// AddPeer makes a host a peer of a network, if it is none yet.
func (vt *VTEP) AddPeer(vni uint32, peer netip.Addr) error {
	return vt.changePeers(vni, func(now []netip.Addr) []netip.Addr {
		if peer = peer.Unmap(); slices.Contains(now, peer) {
			return now
		}
		return append(now, peer)
	})
}

// RemovePeer removes a configured peer, and the addresses behind it from the table. Other hosts, learnt peers included,
// are left as they are.
func (vt *VTEP) RemovePeer(vni uint32, peer netip.Addr) error {
	peer = peer.Unmap().WithZone("")
	return vt.changePeers(vni, func(now []netip.Addr) []netip.Addr {
		return slices.DeleteFunc(now, func(a netip.Addr) bool { return a.WithZone("") == peer })
	})
}

func (vt *VTEP) changePeers(vni uint32, change func([]netip.Addr) []netip.Addr) error {
	vt.mu.Lock()
	defer vt.mu.Unlock()
	p := (*vt.nets.Load())[vni]
	if p == nil {
		return fmt.Errorf("%w: %d", ErrUnknownVNI, vni)
	}
	defer vt.recompute()
	want := change(slices.Clone(p.configured))
	if err := p.setPeersLocked(want); err != nil {
		return err
	}
	p.configured = want
	return nil
}

// SetLearnPeers turns the learning of peers on or off; learnt peers stay.
func (vt *VTEP) SetLearnPeers(vni uint32, on bool) error {
	p := (*vt.nets.Load())[vni]
	if p == nil {
		return fmt.Errorf("%w: %d", ErrUnknownVNI, vni)
	}
	p.learn.Store(on)
	return nil
}

// Attachment returns the VTEP's port in a network, nil if there is none, for static entries (vswitch.Network.SetStatic
// with the number that Remote returns).
func (vt *VTEP) Attachment(vni uint32) *vswitch.Attachment {
	if p := (*vt.nets.Load())[vni]; p != nil {
		return p.att
	}
	return nil
}

// Remote returns vswitch's number for a peer of a network; ok is false if it is none.
func (vt *VTEP) Remote(vni uint32, peer netip.Addr) (r vswitch.Remote, ok bool) {
	if p := (*vt.nets.Load())[vni]; p != nil {
		if x := p.peers.Load().byAddr[peer.Unmap().WithZone("")]; x != nil {
			return x.id, true
		}
	}
	return 0, false
}

// Monitor receives a VTEP's datagrams.
type Monitor interface {
	// Datagram is called for every datagram that was sent (out) and for every one that arrived, before any check. The
	// payload is header followed by inner. It runs on the loop l, on several loops at once; it must not block, nor
	// change or keep the slices.
	Datagram(l *loop.Loop, out bool, src, dst netip.AddrPort, tos uint8, header, inner []byte)
}

// SetMonitor passes all datagrams to m from now on. It fails with vswitch.ErrMonitored if there is a monitor already.
func (vt *VTEP) SetMonitor(m Monitor) error {
	if !vt.monitor.CompareAndSwap(nil, &m) {
		return vswitch.ErrMonitored
	}
	if vt.short != nil {
		vt.short.Invalidate()
	}
	return nil
}

// RemoveMonitor removes the monitor. Once it has returned, Datagram is not running and will not be called.
func (vt *VTEP) RemoveMonitor() {
	vt.monitor.Store(nil)
	vt.barrier()
}

// barrier returns when all handlers that ran when it was called have returned.
func (vt *VTEP) barrier() {
	for _, l := range vt.cfg.Loops {
		l.VisitFor(nil, func() {})
	}
}

// Close removes the VTEP from all networks, stops sending and closes the sockets. It may be called twice.
func (vt *VTEP) Close() {
	vt.mu.Lock()
	stop := vt.stopWatch
	vt.stopWatch = nil
	vt.mu.Unlock()
	if stop != nil {
		stop() // the goroutine may be waiting for mu
	}
	vt.mu.Lock()
	defer vt.mu.Unlock()
	if vt.closed {
		return
	}
	vt.closed = true
	for _, vni := range slices.Collect(maps.Keys(*vt.nets.Load())) {
		_ = vt.removeLocked(vni) // cannot fail: it is in the list
	}
	vt.shutdown()
}

func (vt *VTEP) shutdown() {
	if vt.short != nil {
		vt.short.Close()
	}
	for _, r := range vt.rx {
		r.stop()
	}
	for _, s := range vt.tx {
		if s != nil {
			s.stop()
		}
	}
	if vt.guard >= 0 {
		unix.Close(vt.guard)
	}
	vt.nl.Close()
}
