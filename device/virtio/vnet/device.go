package vnet

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
	"github.com/vnicd/vnicd/translate"
)

// Virtio-net feature bits (virtio 1.2, 5.1.3). Offloads are in offload.go.
const (
	FeatureMTU      = 1 << 3  // VIRTIO_NET_F_MTU
	FeatureMrgRxbuf = 1 << 15 // VIRTIO_NET_F_MRG_RXBUF
	FeatureMQ       = 1 << 22 // VIRTIO_NET_F_MQ
	FeatureInOrder  = 1 << 35 // VIRTIO_F_IN_ORDER: chains are returned in order

	// FeatureRingPacked selects packed rings.
	FeatureRingPacked = virtio.FeatureRingPacked
)

// MaxPairs bounds the queue pairs of one device.
const MaxPairs = 8

// Port is the device's port of the switch: a *vswitch.VMPort.
type Port interface {
	InputNet(l *loop.Loop, b *frame.Buf)
	Begin(l *loop.Loop) vswitch.Batch
	SetOffloads(n frame.Need)
	Attachment() *vswitch.Attachment
	Claim() error
}

// Config describes a device.
type Config struct {
	Name  string
	MAC   vswitch.MAC // of the VM's port; for announcements and status only, the guest gets it from the front end
	Pairs int         // queue pairs, 1..MaxPairs; 0 is 1
	Loops []*loop.Loop
	Pool  *frame.Pool
	Port  Port         // the device adds its drops to the attachment's counters
	Log   hclog.Logger // nil: silent
	// Account is charged with the memory that the guest's rings make the device allocate; nil: nobody is.
	Account *translate.Account
}

// Device implements virtio.Device, virtio.NetDevice and vswitch.Face. Create it and pass it to vswitch.VMPort.SetNet
// and to vhostuser.Listen; undo that in reverse order, then Close it.
type Device struct {
	cfg   Config
	log   hclog.Logger
	pairs []*pair
	owner *loop.Owner
	meter loop.Meter // the loops' time for this device

	journal int // a memory file, see survive.go; -1: none. Of the connection's goroutine

	// Written by the connection's goroutine, read for status.
	connected atomic.Bool
	features  atomic.Uint64
	active    atomic.Int32 // pairs that receive, for distributing flows
	broken    atomic.Pointer[string]
}

var (
	_ virtio.Survivor  = (*Device)(nil)
	_ virtio.Device    = (*Device)(nil)
	_ virtio.NetDevice = (*Device)(nil)
	_ vswitch.NetFace  = (*Device)(nil)
)

// New makes a device without a guest. Pair i lives on Loops[i % len(Loops)].
func New(cfg Config) (*Device, error) {
	if cfg.Pairs == 0 {
		cfg.Pairs = 1
	}
	switch {
	case cfg.Pairs < 0 || cfg.Pairs > MaxPairs:
		return nil, fmt.Errorf("vnet: %s: %d queue pairs, want 1 to %d", cfg.Name, cfg.Pairs, MaxPairs)
	case len(cfg.Loops) == 0 || cfg.Pool == nil || cfg.Port == nil:
		return nil, fmt.Errorf("vnet: %s: needs loops, a buffer pool and a port", cfg.Name)
	}
	cfg.Log = loglimit.New(cfg.Log)
	d := &Device{cfg: cfg, log: cfg.Log, journal: -1}
	d.owner = loop.NewOwner(d.fault)
	cfg.Account.Take(translate.CostDevice, uint64(cfg.Pairs)*pairCost())
	for i := range cfg.Pairs {
		d.pairs = append(d.pairs, newPair(d, i, cfg.Loops[i%len(cfg.Loops)]))
	}
	return d, nil
}

// Close removes the device from its loops. No front end may be connected, and no frame may be delivered to it any more.
func (d *Device) Close() {
	for _, p := range d.pairs {
		p.close()
	}
	d.cfg.Account.Credit(translate.CostDevice, uint64(len(d.pairs))*pairCost())
}

// pairCost bounds what the guest's chains make a pair allocate: the lists of their buffers, which append doubles.
func pairCost() uint64 {
	return maxMerge*translate.AllocatedFor[virtq.Seg](2*frameWalk) + translate.AllocatedFor[virtq.Seg](2*virtq.MaxChain) +
		translate.AllocatedFor[pair](1)
}

// Features implements virtio.Device.
func (d *Device) Features() uint64 {
	f := uint64(FeatureMrgRxbuf|FeatureMTU|FeatureInOrder|FeatureRingPacked) | offered(d.cfg.Pool)
	if len(d.pairs) > 1 {
		f |= FeatureMQ
	}
	return f
}

// NumQueues implements virtio.Device: receive and transmit queues alternate.
func (d *Device) NumQueues() int { return 2 * len(d.pairs) }

// ConfigSize implements virtio.Device: the front end provides MAC, status and MTU.
func (d *Device) ConfigSize() int { return 0 }

// ReadConfig implements virtio.Device; there is no configuration space.
func (d *Device) ReadConfig([]byte, uint32) error { return errNoConfig }

// WriteConfig implements virtio.Device.
func (d *Device) WriteConfig(uint32, []byte) error { return errNoConfig }

var errNoConfig = errors.New("vnet: the front end keeps the configuration space")

// Connected implements virtio.Device.
func (d *Device) Connected(virtio.Conn) {
	d.broken.Store(nil)
	d.connected.Store(true)
}

// Attached reports whether a front end is connected. Callable from any goroutine.
func (d *Device) Attached() bool { return d.connected.Load() }

// Disconnected implements virtio.Device.
func (d *Device) Disconnected() {
	d.Reset()
	d.dropJournal()
	d.connected.Store(false)
}

// Reset implements virtio.Device. Queues, the only other state, are stopped.
func (d *Device) Reset() {
	_ = d.SetFeatures(0)
	d.broken.Store(nil)
}

// SetFeatures implements virtio.Device.
func (d *Device) SetFeatures(f uint64) error {
	d.features.Store(f)
	d.cfg.Port.SetOffloads(guestTakes(f))
	return nil
}

// StartQueue implements virtio.Device.
func (d *Device) StartQueue(i int, q *virtq.Queue) error {
	p := d.pairs[i/2]
	f := d.features.Load()
	if i%2 == 0 {
		p.startRx(q, f)
		d.recount()
		if err := d.cfg.Port.Claim(); err != nil {
			d.log.Warn("the VM's address remains elsewhere", "reason", err)
		}
		return nil
	}
	return p.startTx(q, f)
}

// StopQueue implements virtio.Device.
func (d *Device) StopQueue(i int) {
	p := d.pairs[i/2]
	if i%2 == 0 {
		p.stopRx()
		d.recount()
	} else {
		p.stopTx()
	}
}

// recount counts the pairs, from the first on, that can receive.
func (d *Device) recount() {
	n := 0
	for n < len(d.pairs) && d.pairs[n].receiving.Load() {
		n++
	}
	d.active.Store(int32(n))
}

// Running implements vswitch.NetFace.
func (d *Device) Running() bool { return d.active.Load() > 0 }

// SetMTU implements virtio.NetDevice. An MTU larger than the network's is accepted, because QEMU would otherwise leave
// the guest without a network: the MTU may have shrunk since the VM was started, and the sender of a packet that is too
// big gets an answer.
func (d *Device) SetMTU(mtu uint16) {
	if most := d.cfg.Port.Attachment().Network().MTU(); int(mtu) > most {
		d.log.Warn("guest's MTU exceeds the network's", "vm", d.cfg.Name, "mtu", mtu, "network", most)
	}
}

// SendRARP implements virtio.NetDevice: a reverse ARP request from the guest's address, so that switches learn its new
// location.
func (d *Device) SendRARP(mac [6]byte) {
	p := d.pairs[0]
	p.loop.Post(func() {
		b := d.cfg.Pool.Get()
		if b == nil {
			return
		}
		defer b.Free()
		if b.Append(rarp(mac)) {
			d.cfg.Port.InputNet(p.loop, b)
		}
	})
}

// rarp returns a reverse ARP request (RFC 903) for mac itself, padded to Ethernet's minimum length.
func rarp(mac [6]byte) []byte {
	f := make([]byte, 0, 60)
	f = append(f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff)
	f = append(f, mac[:]...)
	f = append(f, 0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3) // RARP, Ethernet, IPv4, lengths, request reverse
	f = append(f, mac[:]...)
	f = append(f, 0, 0, 0, 0)
	f = append(f, mac[:]...)
	f = append(f, 0, 0, 0, 0)
	return f[:60]
}

// Deliver implements vswitch.Face: on any loop, on several at once.
func (d *Device) Deliver(l *loop.Loop, b *frame.Buf) {
	p := d.pairs[0]
	if n := d.active.Load(); n > 1 {
		p = d.pairs[flowHash(b.Bytes(), b.Layout())%uint32(n)]
	}
	if p.loop == l {
		p.receive(b)
		return
	}
	b.Ref()
	if !p.mail.Put(b) {
		b.Free()
		d.drop(l, vswitch.QueueFull)
	}
}

func (d *Device) drop(l *loop.Loop, r vswitch.Reason) {
	d.cfg.Port.Attachment().Counters.Drop(l, r, 1)
}

// fault is called when this VM's memory has vanished during a loop's access (architecture.md, decision 4). The device
// stops.
func (d *Device) fault(f loop.Fault) {
	for _, p := range d.pairs {
		p.failAll(f)
	}
}

// fail records why a queue broke; the guest's driver sees a stopped queue, the operator a log line.
func (d *Device) fail(what string, pair int, err error) {
	s := fmt.Sprintf("%s queue of pair %d: %v", what, pair, err)
	if d.broken.CompareAndSwap(nil, &s) {
		d.log.Error("network queue stopped until the guest resets the device", "vm", d.cfg.Name, "queue", what, "pair", pair,
			"reason", err)
	}
}

// Status is a snapshot for `vnicd status`. Frames, bytes and drops are in the port's counters.
type Status struct {
	Connected bool     `json:"connected"`
	Features  string   `json:"features,omitempty"`
	Pairs     []string `json:"pairs"` // each "stopped", "rx", "tx" or "rx+tx"
	// EngineTime is how long engines worked for the device since it was made: an estimate, see loop.Meter.
	EngineTime time.Duration `json:"engine_time_ns"`
	Broken     string        `json:"broken,omitempty"`
}

// Up reports whether a guest's driver sends and receives.
func (s *Status) Up() bool { return slices.Contains(s.Pairs, "rx+tx") }

// Describe returns a snapshot. Callable from any goroutine.
func (d *Device) Describe() Status {
	s := Status{Connected: d.connected.Load(), EngineTime: d.meter.Time()}
	if f := d.features.Load(); f != 0 {
		s.Features = fmt.Sprintf("%#x", f)
	}
	if b := d.broken.Load(); b != nil {
		s.Broken = *b
	}
	for _, p := range d.pairs {
		rx, tx := p.receiving.Load(), p.sending.Load()
		switch {
		case rx && tx:
			s.Pairs = append(s.Pairs, "rx+tx")
		case rx:
			s.Pairs = append(s.Pairs, "rx")
		case tx:
			s.Pairs = append(s.Pairs, "tx")
		default:
			s.Pairs = append(s.Pairs, "stopped")
		}
	}
	return s
}
