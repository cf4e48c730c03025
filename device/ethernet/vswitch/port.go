package vswitch

import (
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
)

// Kind says what a port is. Only KindVTEP changes how the switch treats it (split horizon).
type Kind uint8

// The kinds of ports.
const (
	KindVM   Kind = iota + 1 // a VM's virtio-net and HCA
	KindHCA                  // a host application's HCA, without a network interface
	KindTAP                  // the host
	KindVTEP                 // a tunnel to other hosts
)

// String returns the name that status output uses.
func (k Kind) String() string {
	switch k {
	case KindVM:
		return "vm"
	case KindHCA:
		return "hca"
	case KindTAP:
		return "tap"
	case KindVTEP:
		return "vtep"
	}
	return fmt.Sprintf("kind-%d", uint8(k))
}

// Remote numbers the far ends of a tunnel port; the port gives the numbers out, from 1. Zero: none.
type Remote uint16

// Source says where a frame came from, beyond its port.
type Source struct {
	Remote Remote // of tunnel ports; zero otherwise
}

// Destination says where a frame goes, beyond its port.
type Destination struct {
	Remote Remote // of tunnel ports: the one far end that has the address
	Flood  bool   // group address or unknown: a tunnel port sends it to all its far ends
}

// Port takes frames out of a network.
type Port interface {
	// Deliver takes a frame. It runs on the loop l on which the frame came in, which may be any, and on several at
	// once. b is lent: Ref it to keep it, and Free it later. Deliver must not block and must not change the frame.
	// It may call Input of any port.
	Deliver(l *loop.Loop, b *frame.Buf, to Destination)
}

// Monitor sees a port's frames.
type Monitor interface {
	// Frame is called for every frame that the port sends (out) before any check, and for every one that it is given. It
	// runs on the loop l, on several loops at once; it must not block, change or keep f.
	Frame(l *loop.Loop, out bool, f []byte)
}

// PortConfig describes a port.
type PortConfig struct {
	Name string
	Kind Kind
	// MACs are the only source addresses the port may use; they are reachable from the start. Nil: the port's
	// addresses are learnt.
	MACs []MAC
	// Loop is the one that owns the port, for status output; nil when the port has no single one.
	Loop *loop.Loop
	// Hairpin delivers frames back to the port that they came from if the table says that their destination is there.
	Hairpin bool
	// Storm is the port's limit of frames per second without one known receiver; zero = the network's, or Unlimited.
	Storm int
	// Rate is the port's limit in bits per second, frames counted from destination MAC to payload, in each direction by
	// itself; what exceeds it is dropped. Zero = none.
	Rate int64
	// IPs are the only IP addresses that a port with one MAC may use: as source of IP packets and RoCE, and in ARP and ND.
	// Link-local IPv6 addresses are free unless some are listed. The switch answers ARP and ND for them. Nil: any.
	IPs []netip.Addr
	// Attached, if set, is called with the attachment before the first Deliver, so that the port knows it by then.
	Attached func(*Attachment)
}

func checkStorm(n int) error {
	if n != Unlimited && (n < 0 || n > MaxStorm) {
		return fmt.Errorf("storm limit of %d frames/s; want 1 to %d, or %d for none", n, MaxStorm, Unlimited)
	}
	return nil
}

func (p *PortConfig) check() error {
	if p.Rate != 0 && (p.Rate < MinRate || p.Rate > MaxRate) {
		return fmt.Errorf("rate of %d bit/s; want %d to %d", p.Rate, MinRate, MaxRate)
	}
	return checkStorm(p.Storm)
}

// Attachment is a port's connection to a network.
type Attachment struct {
	net       *Network
	port      Port
	cfg       PortConfig
	id        uint16
	keys      []uint64 // MACs, packed
	ips       []ip     // nil = any
	linkLocal bool     // besides ips, any link-local address
	limits    limits
	offloads  atomic.Uint32 // frame.Need that the port takes
	entries   atomic.Int64  // learnt
	closed    atomic.Bool

	maxEntries int64

	monitor atomic.Pointer[Monitor] // nil = nobody looks

	// Counters are the port's: In is what it sent into the network, Out what the network gave it. The port counts its own
	// drops here too.
	Counters Counters
}

// SetMonitor lets m see the port's frames: once it has returned, all of them, and there are frames where routes (see
// Route) did without. ErrMonitored if somebody does already.
func (a *Attachment) SetMonitor(m Monitor) error {
	if !a.monitor.CompareAndSwap(nil, &m) {
		return ErrMonitored
	}
	a.net.advance()
	a.net.Quiesce()
	return nil
}

// RemoveMonitor ends that. Once it has returned, Frame is not running and will not be called.
func (a *Attachment) RemoveMonitor() {
	a.monitor.Store(nil)
	a.net.advance()
	a.net.Quiesce()
}

// Network returns the network the port is attached to.
func (a *Attachment) Network() *Network { return a.net }

// Config returns what the port was attached with. Its slices must not be changed.
func (a *Attachment) Config() PortConfig { return a.cfg }

// Close takes the port off the network and removes its table entries. Once it has returned, Deliver is not running on
// any loop and will not be called, and frames that the port still sends are dropped. It waits for the frames in
// progress on other loops, so it is for the control plane; never call it from inside Deliver. Twice is harmless.
func (a *Attachment) Close() {
	n := a.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if !a.closed.Load() {
		n.detachLocked(a)
	}
}
