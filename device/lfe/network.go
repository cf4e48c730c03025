// Package lfe is the logical forwarding element, a tenant's Ethernet switch (MT-2). One Network per VNI; each has its
// own table and its own ports, so tenants with the same addresses never meet (MT-9).
//
// What happens to a frame, all on the loop that brought it, in Attachment.Input:
//
//	check    length, MTU, source address, anti-spoofing, reserved groups
//	learn    source MAC -> (port, remote); see fdb
//	look up  destination MAC: one port, or flood
//	deliver  Port.Deliver on this same loop; a port that lives on another loop hands over by its own mailbox
//
// Split horizon: what came from a tunnel (VTEP) never goes to a tunnel, because every peer has sent its own copies
// to all others (head-end replication, RFC 7348 section 4.2 with unicast in place of the group).
//
// Frames are lent: Input lends the buffer to every port, the caller still owns its reference. Nobody changes a
// frame on its way.
package lfe

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/device/engine"
	"github.com/vnicd/vnicd/device/packet"
)

// Defaults and bounds of Config.
const (
	DefaultMTU         = 1500
	MinMTU             = 576 // RFC 791: what every IPv4 host must take
	MaxMTU             = 65535
	DefaultMaxEntries  = 16384
	MaxMaxEntries      = 1 << 20
	DefaultPortEntries = 4096
	DefaultAge         = 300 * time.Second // IEEE 802.1Q, table 8-6
	DefaultMaxPorts    = 1024
	maxMaxPorts        = 1<<15 - 1 // port numbers in fdb values
	MaxVNI             = 1<<24 - 1
)

// How many buckets are swept between two frames: once per second, and for each frame whose source did not fit.
const (
	maxSweep  = 1024
	fullSweep = 4
)

// HeaderLen is the length of an untagged Ethernet header.
const HeaderLen = 14

// Errors that callers test for.
var (
	ErrMACInUse     = errors.New("lfe: MAC address is in use by another port of the network")
	ErrTooManyPorts = errors.New("lfe: network has its maximum of ports")
	ErrClosed       = errors.New("lfe: port is closed")
)

// Config describes a network. Zero values take the defaults.
type Config struct {
	VNI  uint32 // 1 to MaxVNI
	Name string
	// MTU is the largest layer-3 packet in bytes. Zero: as large as the underlay carries (SetUnderlayMTU), else
	// DefaultMTU.
	MTU int
	// MaxEntries bounds the forwarding table, MaxPortEntries the share that one port may fill by sending from
	// many addresses.
	MaxEntries     int
	MaxPortEntries int
	// Age is how long an entry lives without a frame from it, 1 s or more.
	Age      time.Duration
	MaxPorts int
	// Clock must be the clock of the loops; it defaults to the engine's.
	Clock engine.Clock
}

// Network is one tenant's switch. Input and lookups run on any loop without locks; ports come and go at any time.
type Network struct {
	cfg     Config
	age     uint32
	sweepBy int
	clock   engine.Clock
	fdb     *fdb
	entries atomic.Int64
	statics atomic.Int64
	moves   atomic.Uint64
	evicted atomic.Uint64
	tick    atomic.Uint32
	mtu     atomic.Int32 // in force
	table   atomic.Pointer[portTable]

	readers [engine.MaxLoops]reader

	mu sync.Mutex // guards the writers of table, and the fields below

	mtuWatchers []*func(int)
	underlay    int
	pastTotals  Totals
}

// portTable is an immutable snapshot of the ports.
type portTable struct {
	byID  []*Attachment // nil = free
	flood []*Attachment
}

// reader counts one loop's stays inside Input, odd = inside. A writer that has published a new port table waits until
// every loop that was inside has left; then nobody uses the old table.
type reader struct {
	seq   atomic.Uint64
	depth int // loop's own: a port may send from inside Deliver
	_     [48]byte
}

// NewNetwork makes a switch without ports.
func NewNetwork(c Config) (*Network, error) {
	if c.VNI == 0 || c.VNI > MaxVNI {
		return nil, fmt.Errorf("lfe: network %q: VNI %d; want 1 to %d", c.Name, c.VNI, MaxVNI)
	}
	if c.MTU != 0 && (c.MTU < MinMTU || c.MTU > MaxMTU) {
		return nil, fmt.Errorf("lfe: network %q: MTU %d; want %d to %d, or 0 for what the underlay carries", c.Name, c.MTU, MinMTU, MaxMTU)
	}
	def(&c.MaxEntries, DefaultMaxEntries)
	def(&c.MaxPortEntries, min(DefaultPortEntries, c.MaxEntries))
	def(&c.MaxPorts, DefaultMaxPorts)
	if c.Age == 0 {
		c.Age = DefaultAge
	}
	if c.MaxEntries < 1 || c.MaxEntries > MaxMaxEntries {
		return nil, fmt.Errorf("lfe: network %q: table of %d entries; want 1 to %d", c.Name, c.MaxEntries, MaxMaxEntries)
	}
	if c.MaxPortEntries < 1 || c.MaxPortEntries > c.MaxEntries {
		return nil, fmt.Errorf("lfe: network %q: %d entries per port; want 1 to %d", c.Name, c.MaxPortEntries, c.MaxEntries)
	}
	if c.MaxPorts < 1 || c.MaxPorts > maxMaxPorts {
		return nil, fmt.Errorf("lfe: network %q: %d ports; want 1 to %d", c.Name, c.MaxPorts, maxMaxPorts)
	}
	if c.Age < time.Second || c.Age > 365*24*time.Hour {
		return nil, fmt.Errorf("lfe: network %q: ageing time %v; want 1s to a year", c.Name, c.Age)
	}
	n := &Network{cfg: c, age: uint32(c.Age / time.Second), clock: c.Clock, fdb: newFDB(c.MaxEntries)}
	if n.clock == nil {
		n.clock = monotonic{}
	}
	// One second's share of the table, so that all of it is swept once per ageing time; bounded, because it happens
	// between two frames.
	n.sweepBy = min(len(n.fdb.buckets)/int(n.age)+1, maxSweep)
	n.table.Store(&portTable{})
	n.applyMTULocked()
	return n, nil
}

type monotonic struct{}

func (monotonic) Now() int64 { return engine.Monotonic() }

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

// ConfiguredMTU returns the MTU that was asked for, 0 = as large as the underlay carries.
func (n *Network) ConfiguredMTU() int { return n.cfg.MTU }

// SetUnderlayMTU tells the network how large an inner layer-3 packet its tunnels carry, 0 = it has none. Unless the
// configuration names an MTU, that is the network's.
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

// OnMTU calls f with the new MTU whenever it has changed, on the goroutine that changed it, until cancel is called.
// A call may be under way while cancel returns.
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
			return nil, fmt.Errorf("lfe: network %q, port %q: %v is not the address of a port", n.cfg.Name, pc.Name, m)
		}
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
	a := &Attachment{net: n, port: port, cfg: pc, id: uint16(id)}
	a.cfg.MACs = slices.Clone(pc.MACs)
	for _, m := range a.cfg.MACs {
		a.keys = append(a.keys, m.key())
	}
	t := &portTable{byID: slices.Clone(old.byID), flood: append(slices.Clone(old.flood), a)}
	if id == len(t.byID) {
		t.byID = append(t.byID, nil)
	}
	t.byID[id] = a
	if pc.Attached != nil {
		pc.Attached(a)
	}
	// The port must be in the table before an entry points to it.
	n.table.Store(t)
	for i, m := range a.cfg.MACs {
		if err := n.setStatic(m, a, 0); err != nil {
			n.detachLocked(a)
			return nil, fmt.Errorf("network %q, port %q, MAC %v: %w", n.cfg.Name, pc.Name, a.cfg.MACs[i], err)
		}
	}
	return a, nil
}

// detachLocked takes a out, waits until no loop uses it, and removes its entries.
func (n *Network) detachLocked(a *Attachment) {
	a.closed.Store(true)
	old := n.table.Load()
	t := &portTable{byID: slices.Clone(old.byID), flood: slices.Clone(old.flood)}
	t.flood = slices.DeleteFunc(t.flood, func(x *Attachment) bool { return x == a })
	// The number stays taken until the entries that carry it are gone.
	n.table.Store(t)
	n.quiesce(a.cfg.Loop)
	n.purge(func(v value) bool { return v.port() == a.id })
	t = &portTable{byID: slices.Clone(t.byID), flood: t.flood}
	t.byID[a.id] = nil
	n.table.Store(t)
	n.quiesce(a.cfg.Loop)
	n.pastTotals.merge(a.Counters.Totals())
}

// Quiesce returns when every Input that was in progress on any loop has ended. Not to be called from inside Deliver.
func (n *Network) Quiesce() { n.quiesce(nil) }

func (n *Network) quiesce(own *engine.Loop) {
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

func (n *Network) enter(l *engine.Loop) *reader {
	r := &n.readers[l.ID()]
	if r.depth++; r.depth == 1 {
		r.seq.Add(1)
	}
	return r
}

func (r *reader) leave() {
	if r.depth--; r.depth == 0 {
		r.seq.Add(1)
	}
}

// purge removes the entries whose value matches, static ones included.
func (n *Network) purge(match func(value) bool) {
	for i := range n.fdb.buckets {
		n.fdb.buckets[i].removeIf(true, func(_ uint64, v value) bool { return match(v) }, n.gone)
	}
}

// gone keeps the counts right when an entry leaves the table.
func (n *Network) gone(v value) {
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

// setStatic stores a static entry; a dynamic one for the same MAC gives way.
func (n *Network) setStatic(m MAC, a *Attachment, remote uint16) error {
	now := n.seconds()
	expired := func(v value) bool { return v.expired(now, n.age) }
	var old value
	var conflict bool
	res := n.fdb.put(m.key(), makeValue(a.id, true, remote, now), true, expired, func(v value) bool {
		old = v
		conflict = v != 0 && v.static() && v.port() != a.id
		return !conflict
	}, n.gone)
	switch {
	case conflict:
		return ErrMACInUse
	case res == putNoSpace:
		return fmt.Errorf("lfe: forwarding table has no room for static entry %v", m)
	}
	if old != 0 {
		n.gone(old)
	}
	n.entries.Add(1)
	n.statics.Add(1)
	return nil
}

// SetStatic makes a MAC reachable by a port, and for tunnel ports by a remote, without learning; it neither ages nor
// moves. It replaces a learnt entry, or an earlier static one of the same port. ErrMACInUse: static for another port.
func (n *Network) SetStatic(m MAC, a *Attachment, remote Remote) error {
	if m.IsGroup() || m.IsZero() {
		return fmt.Errorf("lfe: network %q: %v cannot be a static entry", n.cfg.Name, m)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if a.closed.Load() {
		return ErrClosed
	}
	return n.setStatic(m, a, uint16(remote))
}

// RemoveStatic removes a static entry of that port, and tells whether there was one.
func (n *Network) RemoveStatic(m MAC, a *Attachment) bool {
	removed := 0
	x, y := n.fdb.pair(m.key())
	for _, b := range [2]*bucket{x, y} {
		removed += b.removeIf(true, func(k uint64, v value) bool {
			return k == m.key() && v.static() && v.port() == a.id
		}, n.gone)
	}
	return removed > 0
}

// FlushRemote forgets everything, static entries included, that lies behind one remote of a tunnel port.
func (n *Network) FlushRemote(a *Attachment, remote Remote) {
	n.purge(func(v value) bool { return v.port() == a.id && v.remote() == uint16(remote) })
}

// FlushPort forgets what was learnt on a port.
func (n *Network) FlushPort(a *Attachment) {
	n.purge(func(v value) bool { return v.port() == a.id && !v.static() })
}

// Input lets a frame that came from this port into the network. Loop thread only. The buffer is lent: the caller keeps
// its reference, and from here on nobody changes the frame.
func (a *Attachment) Input(l *engine.Loop, b *packet.Buf, from Source) {
	n := a.net
	r := n.enter(l)
	defer r.leave()
	if a.closed.Load() {
		a.Counters.Drop(l, PortClosed, 1)
		return
	}
	f := b.Bytes()
	if len(f) < HeaderLen {
		a.Counters.Drop(l, ShortFrame, 1)
		return
	}
	a.Counters.In(l, len(f))
	if reason, ok := a.admit(f); !ok {
		a.Counters.Drop(l, reason, 1)
		return
	}
	now := uint32(l.Now() / int64(time.Second))
	if n.tick.Load() != now {
		n.sweep(now)
	}
	if a.keys == nil && !n.learn(l, a, macKey(f[6:]), uint16(from.Remote), now) {
		a.Counters.Drop(l, StaticMoved, 1)
		return
	}
	dst := macKey(f)
	t := n.table.Load()
	if dst&groupBit == 0 {
		if _, _, v, ok := n.fdb.find(dst); ok && !v.expired(now, n.age) {
			if int(v.port()) < len(t.byID) {
				if out := t.byID[v.port()]; out != nil {
					a.unicast(l, b, out, Destination{Remote: Remote(v.remote())})
					return
				}
			}
		}
	}
	a.flood(l, b, t)
}

// admit checks what can be seen without the table.
func (a *Attachment) admit(f []byte) (Reason, bool) {
	if limit := int(a.net.mtu.Load()) + HeaderLen; len(f) > limit && len(f) > limit+tagLen(f) {
		return TooBig, false
	}
	src := macKey(f[6:])
	if src == 0 || src&groupBit != 0 {
		return BadSource, false
	}
	if a.keys != nil && !slices.Contains(a.keys, src) {
		return Spoofed, false
	}
	if dst := macKey(f); dst>>4 == 0x0180c2000000>>4 {
		return Reserved, false
	}
	return 0, true
}

// tagLen returns the length of the VLAN tags (at most two) in front of the Ethernet type.
func tagLen(f []byte) int {
	n := 0
	for n < 8 && len(f) >= HeaderLen+n {
		switch uint16(f[12+n])<<8 | uint16(f[13+n]) {
		case 0x8100, 0x88a8:
			n += 4
		default:
			return n
		}
	}
	return n
}

func (a *Attachment) unicast(l *engine.Loop, b *packet.Buf, out *Attachment, to Destination) {
	switch {
	case out == a && !a.cfg.Hairpin, out != a && a.cfg.Kind == KindVTEP && out.cfg.Kind == KindVTEP:
		a.Counters.Drop(l, SplitHorizon, 1)
	default:
		out.Counters.Out(l, b.Len())
		out.port.Deliver(l, b, to)
	}
}

func (a *Attachment) flood(l *engine.Loop, b *packet.Buf, t *portTable) {
	a.Counters.flood(l)
	sent := false
	for _, out := range t.flood {
		if out == a || a.cfg.Kind == KindVTEP && out.cfg.Kind == KindVTEP {
			continue
		}
		sent = true
		out.Counters.Out(l, b.Len())
		out.port.Deliver(l, b, Destination{Flood: true})
	}
	if !sent {
		a.Counters.Drop(l, NoPort, 1)
	}
}

// learn notes where a source is. It returns false when the frame must be dropped because the address belongs to a
// static entry elsewhere: letting it pass would let one port pose as another.
func (n *Network) learn(l *engine.Loop, a *Attachment, src uint64, remote uint16, now uint32) bool {
	fresh := makeValue(a.id, false, remote, now)
	b, slot, v, ok := n.fdb.find(src)
	if ok {
		switch {
		case v.place() == fresh.place():
			if v.seen() != now {
				b.vals[slot].CompareAndSwap(uint64(v), uint64(fresh))
			}
			return true
		case v.static():
			// A static entry of the same port (another remote of the same tunnel) stands; the frame is legitimate.
			return v.port() == a.id
		}
	}
	return n.learnSlow(l, a, src, fresh, now)
}

// learnSlow inserts a new address or moves a known one.
func (n *Network) learnSlow(l *engine.Loop, a *Attachment, src uint64, fresh value, now uint32) bool {
	// Take the places first and give them back if they are not needed: several loops insert at once and the limits hold.
	if a.entries.Add(1) > int64(n.cfg.MaxPortEntries) {
		a.entries.Add(-1)
		a.Counters.Drop(l, PortFull, 1)
		return true
	}
	if n.entries.Add(1) > int64(n.cfg.MaxEntries) {
		n.sweepSome(now, fullSweep) // make room for the next one
		if n.entries.Load() > int64(n.cfg.MaxEntries) {
			n.entries.Add(-1)
			a.entries.Add(-1)
			a.Counters.Drop(l, TableFull, 1)
			return true
		}
	}
	var old value
	static := false
	res := n.fdb.put(src, fresh, false, func(v value) bool { return v.expired(now, n.age) }, func(v value) bool {
		old = v
		static = v != 0 && v.static()
		return !static
	}, n.gone)
	switch {
	case res == putDone && old == 0:
	case res == putDone:
		if old.place() != fresh.place() && !old.expired(now, n.age) {
			n.moves.Add(1)
		}
		n.gone(old)
	default:
		n.entries.Add(-1)
		a.entries.Add(-1)
		if res == putNoSpace {
			a.Counters.Drop(l, TableFull, 1)
		}
	}
	return !static || old.port() == a.id
}

// sweep removes what has expired from the next stretch of the table, once per second on whichever loop comes first.
func (n *Network) sweep(now uint32) {
	last := n.tick.Load()
	if int32(now-last) <= 0 || !n.tick.CompareAndSwap(last, now) {
		return
	}
	n.sweepSome(now, n.sweepBy)
}

func (n *Network) sweepSome(now uint32, count int) {
	start := n.fdb.hand.Add(uint64(count)) - uint64(count)
	for i := range uint64(min(count, len(n.fdb.buckets))) {
		b := &n.fdb.buckets[(start+i)&n.fdb.mask]
		if k := b.removeIf(false, func(_ uint64, v value) bool { return v.expired(now, n.age) }, n.gone); k > 0 {
			n.evicted.Add(uint64(k))
		}
	}
}
