// Package vswitch is the logical forwarding element, a tenant's Ethernet switch (MT-2). There is one Network per VNI,
// with its own table and ports, so frames never pass between tenants with the same addresses (MT-9).
//
// Processing of a frame, all on the loop that received it, in Attachment.Input:
//
//	check    length, MTU, rate, source address, anti-spoofing, reserved groups (input.go)
//	learn    source MAC and VLAN -> (port, remote) (learn.go, fdb.go)
//	look up  destination MAC and VLAN: one port, or flood within the port's storm limit
//	deliver  Port.Deliver on the same loop; a port on another loop passes the frame through its own mailbox
//
// Split horizon: a frame from a tunnel (VTEP) never goes to a tunnel, because every peer has sent its own copies to all
// others (head-end replication, RFC 7348 section 4.2 with unicast in place of the group).
//
// Frames are lent: Input lends the buffer to every port, and the caller still owns its reference. A frame is not
// changed on its way.
package vswitch

import (
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
)

// Defaults and bounds of Config.
const (
	DefaultMTU         = 1500
	MinMTU             = 576 // RFC 791: every IPv4 host must accept it
	MaxMTU             = 65535
	DefaultMaxEntries  = 16384
	MaxMaxEntries      = 1 << 20
	DefaultPortEntries = 4096
	DefaultAge         = 300 * time.Second // IEEE 802.1Q, table 8-6
	DefaultMaxPorts    = 1024
	maxMaxPorts        = 1<<14 - 1 // port numbers in fdb values
	MaxVNI             = 1<<24 - 1
)

// Numbers of buckets swept between two frames: once per second, and for each frame whose source did not fit.
const (
	maxSweep  = 1024
	fullSweep = 4
)

// HeaderLen is the length of an untagged Ethernet header.
const HeaderLen = 14

// Errors that callers test for.
var (
	ErrMACInUse     = errors.New("vswitch: MAC address is in use by another port of the network")
	ErrTooManyPorts = errors.New("vswitch: network has its maximum of ports")
	ErrClosed       = errors.New("vswitch: port is closed")
	ErrMonitored    = errors.New("vswitch: port is being captured already")
)

// Config describes a network. Zero values take the defaults.
type Config struct {
	VNI  uint32 // 1 to MaxVNI
	Name string
	// MTU is the largest layer-3 packet in bytes. Zero: the underlay's limit (SetUnderlayMTU), otherwise
	// DefaultMTU.
	MTU int
	// MaxEntries bounds the forwarding table, MaxPortEntries the part of it that addresses learnt at one port other
	// than a tunnel may fill. While the table is full, a port below its share (an even part for each learning port)
	// displaces entries of ports above theirs.
	MaxEntries     int
	MaxPortEntries int
	// Storm is the ports' default limit of frames per second without a known single receiver; zero = DefaultStorm, or
	// Unlimited.
	Storm int
	// Age is how long an entry lives without a frame from it, 1 s or more.
	Age      time.Duration
	MaxPorts int
	// Snoop keeps multicast frames from ports without members (SetSnooping).
	Snoop bool
	// noHold turns off the detection of loops outside, for tests of models without it: flapping addresses move freely,
	// and returning frames pass.
	noHold bool
	// MaxNeighbours bounds the IP addresses known for answering ARP and neighbour solicitations.
	MaxNeighbours int
	// Pool provides buffers for frames made by the switch: answers to ARP and neighbour solicitations, and ICMP errors
	// for frames beyond the MTU. Nil: it sends none, and requests are flooded.
	Pool *frame.Pool
	// Clock must be the clock of the loops; the default is loop's.
	Clock loop.Clock
	Log   hclog.Logger
}

// Network is one tenant's switch. Input and lookups run on any loop without locks; ports may be attached and closed at
// any time.
type Network struct {
	cfg       Config
	age       uint32
	sweepBy   int
	clock     loop.Clock
	fdb       *fdb
	entries   atomic.Int64
	statics   atomic.Int64
	moves     atomic.Uint64
	evicted   atomic.Uint64
	displaced atomic.Uint64
	flaps     flaps
	echoes    echoes
	neigh     neighbours
	log       hclog.Logger
	tick      atomic.Uint32
	mtu       atomic.Int32  // in force
	tunnels   atomic.Uint32 // noTunnelFlood, noTunnelLearn
	changed   atomic.Pointer[func()]
	table     atomic.Pointer[portTable]
	// gen changes after every change of the tables by which a known address may be elsewhere: paths and routes are
	// valid only while it is unchanged. A new address does not affect known ones. It also changes after other changes
	// that Route depends on, before the loops are waited for.
	gen   atomic.Uint64
	short atomic.Pointer[ShortPath] // nil: every frame goes through the switch

	snooping atomic.Pointer[snooper] // nil: multicast is flooded

	readers [loop.MaxLoops]reader

	mu sync.Mutex // guards the writers of table, and the fields below

	mtuWatchers []*func(int)
	underlay    int
	pastTotals  Totals
}

// portTable is an immutable snapshot of the ports.
type portTable struct {
	byID  []*Attachment // nil = free
	flood []*Attachment
	learn int // number of learning ports
}

func newPortTable(byID, flood []*Attachment) *portTable {
	t := &portTable{byID: byID, flood: flood}
	for _, a := range flood {
		if a.keys == nil {
			t.learn++
		}
	}
	return t
}

// NewNetwork makes a switch without ports.
func NewNetwork(c Config) (*Network, error) {
	if c.VNI == 0 || c.VNI > MaxVNI {
		return nil, fmt.Errorf("vswitch: network %q: VNI %d; want 1 to %d", c.Name, c.VNI, MaxVNI)
	}
	if c.MTU != 0 && (c.MTU < MinMTU || c.MTU > MaxMTU) {
		return nil, fmt.Errorf("vswitch: network %q: MTU %d; want %d to %d, or 0 for the underlay's limit", c.Name,
			c.MTU, MinMTU, MaxMTU)
	}
	def(&c.MaxEntries, DefaultMaxEntries)
	def(&c.MaxPortEntries, min(DefaultPortEntries, c.MaxEntries))
	def(&c.MaxPorts, DefaultMaxPorts)
	if c.Age == 0 {
		c.Age = DefaultAge
	}
	if c.MaxEntries < 1 || c.MaxEntries > MaxMaxEntries {
		return nil, fmt.Errorf("vswitch: network %q: table of %d entries; want 1 to %d", c.Name, c.MaxEntries, MaxMaxEntries)
	}
	if c.MaxPortEntries < 1 || c.MaxPortEntries > c.MaxEntries {
		return nil, fmt.Errorf("vswitch: network %q: %d entries per port; want 1 to %d", c.Name, c.MaxPortEntries,
			c.MaxEntries)
	}
	if c.MaxPorts < 1 || c.MaxPorts > maxMaxPorts {
		return nil, fmt.Errorf("vswitch: network %q: %d ports; want 1 to %d", c.Name, c.MaxPorts, maxMaxPorts)
	}
	def(&c.MaxNeighbours, DefaultMaxNeighbours)
	if c.MaxNeighbours < 1 || c.MaxNeighbours > MaxMaxNeighbours {
		return nil, fmt.Errorf("vswitch: network %q: table of %d neighbours; want 1 to %d", c.Name, c.MaxNeighbours,
			MaxMaxNeighbours)
	}
	if c.Storm == 0 {
		c.Storm = DefaultStorm
	}
	if err := checkStorm(c.Storm); err != nil {
		return nil, fmt.Errorf("vswitch: network %q: %w", c.Name, err)
	}
	if c.Age < time.Second || c.Age > 365*24*time.Hour {
		return nil, fmt.Errorf("vswitch: network %q: ageing time %v; want 1s to a year", c.Name, c.Age)
	}
	n := &Network{cfg: c, age: uint32(c.Age / time.Second), clock: c.Clock, fdb: newFDB(c.MaxEntries), log: c.Log}
	for i := range n.readers {
		n.readers[i].loop = i
	}
	n.neigh.init(c.MaxNeighbours)
	n.echoes.seed = maphash.MakeSeed()
	if n.log == nil {
		n.log = hclog.NewNullLogger()
	}
	if n.clock == nil {
		n.clock = monotonic{}
	}
	// One second's share of the table, so that all of it is swept once per ageing time; bounded, because it happens
	// between two frames.
	n.sweepBy = min(len(n.fdb.buckets)/int(n.age)+1, maxSweep)
	n.table.Store(&portTable{})
	n.SetSnooping(c.Snoop)
	n.applyMTULocked()
	return n, nil
}

type monotonic struct{}

func (monotonic) Now() int64 { return loop.Monotonic() }

func def(v *int, d int) {
	if *v == 0 {
		*v = d
	}
}

// VNI returns the network's VXLAN network identifier.
func (n *Network) VNI() uint32 { return n.cfg.VNI }

// Name returns the network's name.
func (n *Network) Name() string { return n.cfg.Name }

// MTU returns the largest layer-3 packet in bytes that the network carries now.
func (n *Network) MTU() int { return int(n.mtu.Load()) }

// ConfiguredMTU returns the configured MTU, 0: the underlay's limit.
func (n *Network) ConfiguredMTU() int { return n.cfg.MTU }

// SetUnderlayMTU sets the largest inner layer-3 packet that the tunnels carry, 0 = there are none. It is the network's
// MTU unless one is configured.
func (n *Network) SetUnderlayMTU(mtu int) {
	n.mu.Lock()
	before := n.MTU()
	n.underlay = mtu
	n.applyMTULocked()
	after := n.MTU()
	var tell []func(int)
	if after != before {
		for _, w := range n.mtuWatchers {
			tell = append(tell, *w)
		}
	}
	n.mu.Unlock()
	for _, f := range tell {
		f(after)
	}
}

// OnMTU calls f with the new MTU after each change, on the goroutine that changed it, until cancel is called. A call
// may still be running when cancel returns.
func (n *Network) OnMTU(f func(mtu int)) (cancel func()) {
	w := &f
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mtuWatchers = append(n.mtuWatchers, w)
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.mtuWatchers = slices.DeleteFunc(n.mtuWatchers, func(x *func(int)) bool { return x == w })
	}
}

func (n *Network) applyMTULocked() {
	before := n.MTU()
	defer func() {
		if n.MTU() != before {
			n.advance()
		}
	}()
	switch {
	case n.cfg.MTU != 0:
		n.mtu.Store(int32(n.cfg.MTU))
	case n.underlay != 0:
		n.mtu.Store(int32(min(n.underlay, MaxMTU)))
	default:
		n.mtu.Store(DefaultMTU)
	}
}

// Attach connects a port. The port's MACs, if any, become static entries of the table; ErrMACInUse if another port has
// one of them.
func (n *Network) Attach(port Port, pc PortConfig) (*Attachment, error) {
	for _, m := range pc.MACs {
		if m.IsGroup() || m.IsZero() {
			return nil, fmt.Errorf("vswitch: network %q, port %q: %v is not the address of a port", n.cfg.Name, pc.Name, m)
		}
	}
	if err := pc.check(); err != nil {
		return nil, fmt.Errorf("vswitch: network %q, port %q: %w", n.cfg.Name, pc.Name, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	old := n.table.Load()
	id := slices.Index(old.byID, nil)
	if id < 0 {
		id = len(old.byID)
	}
	if id >= n.cfg.MaxPorts {
		return nil, fmt.Errorf("%w: network %q, port %q: %d", ErrTooManyPorts, n.cfg.Name, pc.Name, n.cfg.MaxPorts)
	}
	a := &Attachment{net: n, port: port, cfg: pc, id: uint16(id), maxEntries: int64(n.cfg.MaxPortEntries)}
	a.limits.set(&pc, n.cfg.Storm)
	if pc.Kind == KindVTEP {
		a.maxEntries = int64(n.cfg.MaxEntries)
	}
	a.cfg.MACs = slices.Clone(pc.MACs)
	for _, m := range a.cfg.MACs {
		a.keys = append(a.keys, m.key())
	}
	if err := a.setIPs(pc.IPs); err != nil {
		return nil, fmt.Errorf("vswitch: network %q, port %q: %w", n.cfg.Name, pc.Name, err)
	}
	byID := slices.Clone(old.byID)
	if id == len(byID) {
		byID = append(byID, nil)
	}
	byID[id] = a
	if pc.Attached != nil {
		pc.Attached(a)
	}
	n.attached(a)
	// The port must be in the table before an entry points to it.
	n.table.Store(newPortTable(byID, append(slices.Clone(old.flood), a)))
	for _, m := range a.cfg.MACs {
		if err := n.setStatic(Address{MAC: m}, a, 0, false); err != nil {
			n.detachLocked(a)
			return nil, fmt.Errorf("network %q, port %q, MAC %v: %w", n.cfg.Name, pc.Name, m, err)
		}
	}
	for _, addr := range pc.IPs {
		if err := n.setNeighbour(addr, Address{MAC: a.cfg.MACs[0]}, a.id, false); err != nil {
			n.detachLocked(a)
			return nil, fmt.Errorf("port %q: %w", pc.Name, err)
		}
	}
	return a, nil
}

// detachLocked removes a from the port table, waits until no loop uses it, and removes its entries.
func (n *Network) detachLocked(a *Attachment) {
	a.closed.Store(true)
	n.advance() // routes end; loops that have entered one are waited for
	old := n.table.Load()
	// The number is not reused before the entries with it are removed.
	t := newPortTable(slices.Clone(old.byID), slices.DeleteFunc(slices.Clone(old.flood),
		func(x *Attachment) bool { return x == a }))
	n.table.Store(t)
	n.forgetPort(a)
	n.quiesce(a.cfg.Loop)
	n.purge(func(_ uint64, v value) bool { return v.port() == a.id })
	n.neigh.removeIf(func(e *neighbour) bool { return e.port == a.id })
	n.advance() // before the last quiesce, which waits for loops that entered by an older path
	t = newPortTable(slices.Clone(t.byID), t.flood)
	t.byID[a.id] = nil
	n.table.Store(t)
	n.quiesce(a.cfg.Loop)
	n.forgetHomes(func(s *flap) bool { return s.home.port() == a.id }, func() {})
	n.pastTotals.Merge(a.Counters.Totals())
}

// Port returns the port of that name, nil if there is none.
func (n *Network) Port(name string) *Attachment {
	for _, a := range n.table.Load().flood {
		if a.cfg.Name == name {
			return a
		}
	}
	return nil
}

// Quiesce returns when every Input that was in progress on any loop has ended. It must not be called from inside
// Deliver.
func (n *Network) Quiesce() { n.quiesce(nil) }

func (n *Network) quiesce(own *loop.Loop) {
	for i := range n.readers {
		if own != nil && own.ID() == i && own.OnLoop() {
			continue
		}
		r := &n.readers[i]
		for seq := r.seq.Load(); seq&1 != 0 && r.seq.Load() == seq; {
			time.Sleep(10 * time.Microsecond)
		}
	}
}

// purge removes the matching entries, static ones included.
func (n *Network) purge(match func(key uint64, v value) bool) {
	for i := range n.fdb.buckets {
		n.fdb.buckets[i].removeIf(true, match, n.gone)
	}
}

// gone updates the counts when an entry was removed or replaced.
func (n *Network) gone(v value) {
	n.advance()
	n.entries.Add(-1)
	if v.static() {
		n.statics.Add(-1)
		return
	}
	if a := n.byID(v.port()); a != nil {
		a.entries.Add(-1)
	}
}

func (n *Network) byID(id uint16) *Attachment {
	t := n.table.Load()
	if int(id) >= len(t.byID) {
		return nil
	}
	return t.byID[id]
}

func (n *Network) seconds() uint32 { return uint32(n.clock.Now() / int64(time.Second)) }
