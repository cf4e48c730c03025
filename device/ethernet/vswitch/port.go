package vswitch

import (
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
)

// Kind is what a port connects. Only KindVTEP changes how the switch treats it (split horizon).
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

// Remote numbers the peers of a tunnel port, which assigns the numbers, from 1. Zero: none.
type Remote uint16

// Source is a frame's origin, beyond its port.
type Source struct {
	Remote Remote // of tunnel ports; zero otherwise
}

// Destination is a frame's destination, beyond its port.
type Destination struct {
	Remote Remote // of tunnel ports: the one peer that has the address
	Flood  bool   // group or unknown address: a tunnel port sends it to all its peers
}

// Port receives frames from a network.
type Port interface {
	// Deliver receives a frame. It runs on the loop l that received the frame, which may be any, and on several at
	// once. b is lent: Ref it to keep it, and Free it later. Deliver must not block and must not change the frame. It
	// may call Input of any port.
	Deliver(l *loop.Loop, b *frame.Buf, to Destination)
}

// Monitor receives a port's frames.
type Monitor interface {
	// Frame is called for every frame that the port sends (out), before any check, and for every one delivered to it.
	// It runs on the loop l, on several loops at once; it must not block, nor change or keep f.
	Frame(l *loop.Loop, out bool, f []byte)
}

// PortConfig describes a port.
type PortConfig struct {
	Name string
	Kind Kind
	// MACs are the only source addresses that the port may use; they are reachable from the start. Nil: the port's
	// addresses are learnt.
	MACs []MAC
	// Loop is the port's loop, for status output; nil if it has several.
	Loop *loop.Loop
	// Hairpin delivers frames back to the port that sent them if the table has their destination there.
	Hairpin bool
	// Storm is the port's limit of frames per second without a known single receiver; zero = the network's, or
	// Unlimited.
	Storm int
	// Rate is the port's limit in bits per second, in each direction separately, counting frames from destination MAC
	// to payload; frames in excess are dropped. Zero = none.
	Rate int64
	// IPs are the only IP addresses that a port with one MAC may use: as source of IP packets and RoCE, and in ARP and
	// ND. Link-local IPv6 addresses are allowed unless some are listed. The switch answers ARP and ND for them. Nil:
	// any.
	IPs []netip.Addr
	// Attached, if set, is called with the attachment before the first Deliver.
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
	linkLocal bool     // any link-local address besides ips
	limits    limits
	offloads  atomic.Uint32 // frame.Need that the port accepts
	entries   atomic.Int64  // learnt
	closed    atomic.Bool
	allUntil  atomic.Uint32 // second until which the port takes all multicast frames

	maxEntries int64

	monitor atomic.Pointer[Monitor] // nil = no capture

	// Counters are the port's: In counts frames sent into the network, Out those delivered to the port. The port counts
	// its own drops here, too.
	Counters Counters
}

// SetMonitor passes the port's frames to m: once it has returned, all of them, also those that routes (see Route) would
// bypass. It fails with ErrMonitored if there is a monitor.
func (a *Attachment) SetMonitor(m Monitor) error {
	if !a.monitor.CompareAndSwap(nil, &m) {
		return ErrMonitored
	}
	a.net.advance()
	a.net.Quiesce()
	return nil
}

// RemoveMonitor removes the monitor. Once it has returned, Frame is not running and will not be called.
func (a *Attachment) RemoveMonitor() {
	a.monitor.Store(nil)
	a.net.advance()
	a.net.Quiesce()
}

// Network returns the port's network.
func (a *Attachment) Network() *Network { return a.net }

// Config returns the port's configuration. Its slices must not be changed.
func (a *Attachment) Config() PortConfig { return a.cfg }

// Close removes the port and its table entries from the network. Once it has returned, Deliver is not running on any
// loop and will not be called, and frames that the port still sends are dropped. It waits for frames in progress on
// other loops, so it is for the control plane; never call it from inside Deliver. It may be called twice.
func (a *Attachment) Close() {
	n := a.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if !a.closed.Load() {
		n.detachLocked(a)
	}
}
