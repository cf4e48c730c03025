package hca

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

var le = binary.LittleEndian

var (
	errEventBuffer = errors.New("event buffer is too small")
	errReadOnly    = errors.New("hca: the configuration space is read-only")
)

// drainTimeout is how long a reset waits for users of guest memory before it says
// so. Batches last microseconds; only a stuck loop gets here.
const drainTimeout = 10 * time.Second

// Config describes an adapter.
type Config struct {
	// Name appears in the log and, as a suggestion for the RDMA device's name, in
	// the configuration space (at most 31 bytes).
	Name string
	// MAC is shared with the VM's virtio-net device; unicast.
	MAC [6]byte
	// Loops run the data path; the first abi.MaxEngines of them are used. At least
	// one, not closed before the device is.
	Loops []*loop.Loop
	// Pool supplies frame buffers. Its capacity must hold a 4096-byte path MTU.
	Pool *frame.Pool
	// MTU gives the tenant network's MTU in bytes (Ethernet payload). Called from
	// any goroutine. Nil: 1500.
	MTU func() int
	// CEQs is the number of completion event queues, 1..abi.MaxCEQs; 0: one per loop.
	CEQs int
	// DataPath selects the optional parts of the data path; nil: DefaultDataPath.
	DataPath *DataPath
	// Limits of this VM; zero fields take defaults.
	Limits Limits
	// Version is shown to the driver (at most 23 bytes).
	Version string
	// Log may be nil.
	Log hclog.Logger
}

// DataPath selects optional parts of the data path. The peer sees valid RoCE whatever is selected.
type DataPath struct {
	// LocalCopy copies from memory to memory between two QPs of one loop. Without it they exchange frames.
	LocalCopy bool
	// ECN enables congestion control of RC by ECN marks and CNPs (IBTA A17.9). Without it loss is the only congestion
	// signal.
	ECN bool
	// SelectiveRepeat retransmits only lost packets if the peer of an RC QP is a vnicd. Without it, and to other peers, a
	// loss resends the whole window (go-back-N).
	SelectiveRepeat bool
}

// DefaultDataPath selects everything.
func DefaultDataPath() *DataPath { return &DataPath{LocalCopy: true, ECN: true, SelectiveRepeat: true} }

// Device is the HCA of one VM. It implements virtio.Device (methods for the
// connection's goroutine) and the HCA face of an vswitch.VMPort (Deliver, Up: any
// loop). States:
//
//	New -> idle <-> connected (Connected, Disconnected) -> Close: closed
//	        connected: down <-> up (queue 0 runs)
type Device struct {
	cfg  Config
	lim  Limits
	pace *pacer // nil: no limit
	log  hclog.Logger

	engines []*engine
	byLoop  [loop.MaxLoops]*engine
	async   *eventQueue
	ceqs    []*eventQueue

	// Read by loops.
	port          atomic.Pointer[Port]
	up            atomic.Bool
	link          atomic.Bool
	broken        atomic.Bool // the guest's memory vanished: nothing is done until a reset
	gids          gidTable
	ahs           atomic.Pointer[ahTable]
	groups        atomic.Pointer[mcastTable]
	qps           []atomic.Pointer[qp] // by index: the low 16 bits of the QP number
	cqFailures    atomic.Uint64
	invalidations atomic.Uint64 // CLEAR_MTT commands
	fetches       atomic.Uint64 // host faults of control goroutines
	faults        guestFaults
	rejected      rejectCounts
	conns         connections
	// faultCounts has a place for each side of each QP index: see guestFault's
	// token. A place is touched by the engine of the QP that has the index.
	faultCounts []uint32
	warned      rateLimit

	generation atomic.Uint32

	// Of the connection; set by Connected before any queue or object exists.
	mem          atomic.Pointer[translate.Space]
	portListener atomic.Pointer[virtio.Conn] // notified when the port changes
	vm           *translate.VM
	// Of the connection's goroutine.
	conn     virtio.Conn
	commands *commandLoop
	closed   bool

	mu     sync.Mutex // guards the tables below; one command, reset or status query at a time
	tables tables
}

var (
	_ virtio.Device = (*Device)(nil)
)

// New makes an adapter and puts it on its loops. Errors wrap ErrConfig.
func New(cfg Config) (*Device, error) {
	d := &Device{cfg: cfg, lim: cfg.Limits, log: cfg.Log}
	if d.log == nil {
		d.log = hclog.NewNullLogger()
	}
	if err := d.lim.complete(); err != nil {
		return nil, err
	}
	if d.cfg.DataPath == nil {
		d.cfg.DataPath = DefaultDataPath()
	}
	d.pace = newPacer(d.lim.Messages)
	switch {
	case cfg.Name == "" || len(cfg.Name) > 31:
		return nil, fmt.Errorf("%w: name %q must have 1..31 bytes", ErrConfig, cfg.Name)
	case len(cfg.Version) > 23:
		return nil, fmt.Errorf("%w: version %q has more than 23 bytes", ErrConfig, cfg.Version)
	case cfg.MAC[0]&1 != 0 || cfg.MAC == [6]byte{}:
		return nil, fmt.Errorf("%w: MAC %x is not a unicast address", ErrConfig, cfg.MAC)
	case len(cfg.Loops) == 0:
		return nil, fmt.Errorf("%w: no loops", ErrConfig)
	case cfg.Pool == nil:
		return nil, fmt.Errorf("%w: no pool", ErrConfig)
	case cfg.CEQs < 0 || cfg.CEQs > abi.MaxCEQs:
		return nil, fmt.Errorf("%w: %d completion event queues, must be 1..%d", ErrConfig, cfg.CEQs, abi.MaxCEQs)
	}
	if n := 4096 + frameOverhead; cfg.Pool.Capacity() < n {
		return nil, fmt.Errorf("%w: buffers of %d bytes, need %d", ErrConfig, cfg.Pool.Capacity(), n)
	}
	loops := cfg.Loops[:min(len(cfg.Loops), abi.MaxEngines)]
	if d.cfg.CEQs == 0 {
		d.cfg.CEQs = len(loops)
	}
	if d.cfg.MTU == nil {
		d.cfg.MTU = func() int { return 1500 }
	}
	for i, l := range loops {
		if d.byLoop[l.ID()] != nil {
			return nil, fmt.Errorf("%w: two loops have ID %d", ErrConfig, l.ID())
		}
		e := newEngine(d, i, l)
		d.engines = append(d.engines, e)
		d.byLoop[l.ID()] = e
	}
	d.async = d.newEventQueue(abi.EventQueue)
	for i := range d.cfg.CEQs {
		d.ceqs = append(d.ceqs, d.newEventQueue(abi.CEQQueue(i)))
	}
	d.qps = make([]atomic.Pointer[qp], d.lim.QPs+firstQPIndex)
	d.faultCounts = make([]uint32, 2*len(d.qps))
	d.conns.table = cm.NewTable(2 * d.lim.QPs)
	d.link.Store(true)
	d.generation.Store(uint32(time.Now().UnixNano())) // differs from that of an earlier vnicd
	d.tables.reset(d)
	for _, e := range d.engines {
		e.start()
	}
	return d, nil
}

// Close takes the device off its loops. The front end must be disconnected and
// the port detached from its network: Deliver must not be called any more.
func (d *Device) Close() {
	if d.closed {
		return
	}
	d.closed = true
	if d.conn != nil {
		d.Disconnected()
	}
	for _, e := range d.engines {
		e.stop()
	}
}

// SetLink sets the port's state and tells the driver. From any goroutine but loops.
func (d *Device) SetLink(up bool) {
	if d.link.Swap(up) != up {
		d.PortChanged()
	}
}

// PortChanged tells the driver to look at the port again: the MTU is another. It does
// not wait for anything: who calls it may hold locks that concern all VMs.
func (d *Device) PortChanged() {
	if c := d.portListener.Load(); c != nil {
		(*c).ConfigChanged()
	}
}

// Up tells whether a driver runs the device: frames for it are the HCA's then.
func (d *Device) Up() bool { return d.up.Load() }

// MAC returns the device's address.
func (d *Device) MAC() [6]byte { return d.cfg.MAC }

// setUp recomputes Up; connection goroutine. A running command queue is the sign of a
// driver: front ends start queues when the driver sets DRIVER_OK, and QEMU does not
// pass the status itself on for its generic device.
func (d *Device) setUp() {
	d.up.Store(d.commands != nil && !d.broken.Load())
}

func (d *Device) space() *translate.Space { return d.mem.Load() }

// qpAt returns the QP at an index of the table, nil if there is none.
func (d *Device) qpAt(i int) *qp {
	if i < 0 || i >= len(d.qps) {
		return nil
	}
	return d.qps[i].Load()
}

// wakeAll makes every engine look at what concerns all.
func (d *Device) wakeAll() {
	for _, e := range d.engines {
		e.wake()
	}
}

// Features implements virtio.Device: the ABI has no feature bits yet.
func (d *Device) Features() uint64 { return 0 }

// NumQueues implements virtio.Device.
func (d *Device) NumQueues() int { return abi.NumQueues(len(d.ceqs), len(d.engines)) }

// ConfigSize implements virtio.Device.
func (d *Device) ConfigSize() int { return abi.SizeConfig }

// SetFeatures implements virtio.Device.
func (d *Device) SetFeatures(uint64) error { return nil }

// ReadConfig implements virtio.Device.
func (d *Device) ReadConfig(dst []byte, off uint32) error {
	var b [abi.SizeConfig]byte
	c := abi.Config{
		Magic: abi.Magic, ABIVersion: abi.Version, MAC: d.cfg.MAC, NumCEQs: uint16(len(d.ceqs)),
		NumEngines: uint16(len(d.engines)), PortMTU: uint32(d.portMTU()), Generation: d.generation.Load(),
	}
	if d.link.Load() {
		c.LinkUp = 1
	}
	copy(c.DeviceName[:31], d.cfg.Name)
	copy(c.FWVersion[:23], d.cfg.Version)
	c.Encode(b[:])
	if uint64(off)+uint64(len(dst)) > abi.SizeConfig {
		return fmt.Errorf("hca: configuration read of %d bytes at %d, there are %d", len(dst), off, abi.SizeConfig)
	}
	copy(dst, b[off:])
	return nil
}

// WriteConfig implements virtio.Device.
func (d *Device) WriteConfig(uint32, []byte) error { return errReadOnly }

// Connected implements virtio.Device.
func (d *Device) Connected(c virtio.Conn) {
	d.conn = c
	s := c.Space()
	s.Epochs().SetNamer(epochSlot)
	d.mem.Store(s)
	d.vm = translate.NewVM(s, translate.Limits{MaxRegions: d.lim.MRs, MaxPages: d.lim.MTTs})
	for _, e := range d.engines {
		e.loop.Do(func() { e.space = s })
	}
	d.mu.Lock()
	d.tables.conn, d.tables.vm = c, d.vm
	d.mu.Unlock()
	d.portListener.Store(&c)
	d.log.Info("front end connected")
}

// Attached tells whether a front end is connected. Any goroutine.
func (d *Device) Attached() bool { return d.portListener.Load() != nil }

// Disconnected implements virtio.Device.
func (d *Device) Disconnected() {
	d.portListener.Store(nil)
	d.teardown()
	d.mu.Lock()
	d.tables.conn, d.tables.vm = nil, nil
	d.mu.Unlock()
	for _, e := range d.engines {
		e.loop.Do(func() { e.space = nil })
	}
	d.mem.Store(nil)
	d.vm, d.conn = nil, nil
	d.log.Info("front end disconnected")
}

// Reset implements virtio.Device. If there was state to lose the driver is
// told to look at the generation: the reset may not have been its own idea (QEMU
// also resets the device when the VM is stopped and goes on).
func (d *Device) Reset() {
	if d.teardown() && d.conn != nil {
		d.conn.ConfigChanged()
	}
}

// teardown destroys everything the guest made, in the order in which things use
// each other, and tells whether there was anything. The other VMs are not told;
// their QPs run into their timeouts.
func (d *Device) teardown() (lost bool) {
	for i := range d.NumQueues() {
		d.StopQueue(i) // stopped already, as the contract says; harmless then
	}
	d.up.Store(false)
	d.generation.Add(1)
	return d.wipe()
}

// wipe is teardown without the queues.
func (d *Device) wipe() (lost bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := &d.tables
	qps := t.qps
	lost = qps+len(t.cqs)+len(t.srqs)+len(t.mrs)+len(t.pds) > 0 || d.ahs.Load() != nil
	// QPs first: with them go all users of rings, CQs and memory on the loops.
	for _, e := range d.engines {
		e.loop.Do(func() {
			for _, o := range t.qpList {
				if q := o.q; q.engine == e {
					d.qps[q.index].Store(nil)
					q.close()
				}
			}
			e.armed = false
			e.db = doorbells{}
		})
	}
	// Nobody posts events any more; what is pending concerns objects that are gone.
	for _, e := range d.engines {
		e.loop.Do(func() {
			for _, q := range e.events {
				q.clear()
			}
			e.dropAnswers()
		})
	}
	d.conns.mu.Lock()
	d.conns.table.Clear()
	d.conns.mu.Unlock()
	d.ahs.Store(nil)
	if d.vm != nil {
		ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
		defer cancel()
		if err := d.vm.DestroyAll(ctx); err != nil {
			d.log.Error("memory regions are still in use after a reset", "error", err)
		}
	}
	if qps > 0 {
		d.log.Info("device reset", "qps", qps)
	}
	d.tables.reset(d)
	d.broken.Store(false)
	return lost
}

// StartQueue implements virtio.Device.
func (d *Device) StartQueue(i int, q *virtq.Queue) error {
	if i < 0 || i >= d.NumQueues() {
		return fmt.Errorf("hca: queue %d, the device has %d", i, d.NumQueues())
	}
	if i == abi.CommandQueue {
		return d.startCommandQueue(q)
	}
	if eq := d.eventQueueAt(i); eq != nil {
		return eq.start(q)
	}
	return d.engines[i-abi.DoorbellQueue(len(d.ceqs), 0)].startDoorbells(q)
}

// startCommandQueue makes the device run. A queue that begins at its beginning has
// a new driver: if what an older one made is still there, the front end did not
// say that the device was reset (it may only have stopped the queues). The
// generation stays: the new driver has read it already, and has lost nothing.
func (d *Device) startCommandQueue(q *virtq.Queue) error {
	if d.commands != nil {
		return errors.New("hca: the command queue runs already")
	}
	if q.Base() == 0 && d.wipe() {
		d.log.Info("new driver: state of the previous one dropped")
	}
	c, err := d.startCommands(q)
	if err != nil {
		return err
	}
	d.commands = c
	for _, e := range d.engines {
		e.loop.Do(e.thaw)
	}
	d.setUp()
	return nil
}

// StopQueue implements virtio.Device.
func (d *Device) StopQueue(i int) {
	switch {
	case i < 0 || i >= d.NumQueues():
	case i == abi.CommandQueue:
		if d.commands != nil {
			d.up.Store(false)
			d.commands.stop()
			d.commands = nil
			for _, e := range d.engines {
				e.loop.Do(e.freeze)
			}
		}
	default:
		if eq := d.eventQueueAt(i); eq != nil {
			eq.stop()
			return
		}
		d.engines[i-abi.DoorbellQueue(len(d.ceqs), 0)].stopDoorbells()
	}
}

func (d *Device) eventQueueAt(i int) *eventQueue {
	if i == abi.EventQueue {
		return d.async
	}
	if n := i - abi.CEQQueue(0); n < len(d.ceqs) {
		return d.ceqs[n]
	}
	return nil
}
