// Side: control

package hca

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/hypervisor/loglimit"
	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/translate"
)

var errReadOnly = errors.New("hca: the configuration space is read-only")

// drainTimeout is how long a reset waits for users of guest memory before it logs
// an error. Batches last microseconds; only a stuck loop exceeds it.
const drainTimeout = 10 * time.Second

// Config describes an adapter.
type Config struct {
	// Name appears in the log and, as a suggestion for the RDMA device's name, in
	// the configuration space (at most 31 bytes).
	Name string
	// MAC is shared with the VM's virtio-net device; unicast.
	MAC [6]byte
	// Loops run the data path; the first abi.MaxEngines of them are used. At least
	// one; they must outlive the device.
	Loops []*loop.Loop
	// Pool supplies frame buffers. Its capacity must hold a 4096-byte path MTU.
	Pool *frame.Pool
	// MTU returns the tenant network's MTU in bytes (Ethernet payload). It is called
	// from any goroutine. Nil: 1500.
	MTU func() int
	// CEQs is the number of completion event queues, 1..abi.MaxCEQs; 0: one per loop.
	CEQs int
	// DataPath selects the optional parts of the data path; nil: DefaultDataPath.
	DataPath *DataPath
	// Limits of this VM; zero fields take defaults.
	Limits Limits
	// Account is charged with what the VM makes the device allocate; nil: the device makes one with Limits.Memory.
	Account *translate.Account
	// Work counts the processor time of the VM's commands, and delays them beyond their share; nil: neither.
	Work *worktime.Account
	// Journal keeps the state in a memory file, so that the device survives its process (CO-2). See virtio.Survivor.
	Journal bool
	// Version is shown to the driver (at most 23 bytes).
	Version string
	// Log may be nil.
	Log hclog.Logger
}

// Device is the HCA of one VM: its control side; the field data is the data side. It implements virtio.Device (methods
// for the connection's goroutine). States:
//
//	New -> idle <-> connected (Connected, Disconnected) -> Close: closed
//	        connected: down <-> up (queue 0 runs)
type Device struct {
	cfg     Config
	lim     Limits
	log     hclog.Logger
	data    *dataSide
	account *translate.Account

	generation    atomic.Uint32
	features      atomic.Uint64 // accepted by the driver
	invalidations atomic.Uint64 // CLEAR_MTT commands
	fetches       atomic.Uint64 // host faults of control goroutines
	faults        guestFaults
	portListener  atomic.Pointer[virtio.Conn] // notified when the port changes; nil: no front end

	driver sync.Mutex  // held while a driver starts, stops, or turns out to have gone; before mu
	look   *time.Timer // calls lookForDriver while the VM is paused; guarded by driver; nil: never paused

	// Fields of the connection's goroutine. It changes commands while it holds driver.
	conn     virtio.Conn
	commands *commandLoop
	closed   bool
	position uint16 // of the command queue when it was stopped, also by the process that wrote the context
	// Of a killed process, until the command queue starts.
	pastQueue queueRecord
	pastJobs  map[uint64]jobRecord

	journal *controlJournal // nil: none; changes while no command runs, under mu

	mu     sync.Mutex // guards the tables below; one command, reset or status query at a time
	tables tables
}

var _ virtio.Device = (*Device)(nil)

// New creates an adapter and attaches it to its loops. Errors wrap ErrConfig.
func New(cfg Config) (*Device, error) {
	d := &Device{cfg: cfg, lim: cfg.Limits, log: loglimit.New(cfg.Log)}
	if err := d.lim.complete(); err != nil {
		return nil, err
	}
	if d.cfg.DataPath == nil {
		d.cfg.DataPath = DefaultDataPath()
	}
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
		if slices.ContainsFunc(loops[:i], func(x *loop.Loop) bool { return x.ID() == l.ID() }) {
			return nil, fmt.Errorf("%w: two loops have ID %d", ErrConfig, l.ID())
		}
	}
	d.data = &dataSide{
		mac: cfg.MAC, pool: cfg.Pool, mtu: d.cfg.MTU, options: *d.cfg.DataPath, rdAtomic: d.lim.RdAtomic,
		pace: newPacer(d.lim.Messages), log: d.log,
	}
	d.data.init(loops, d.cfg.CEQs, d.lim.QPs)
	if d.account = cfg.Account; d.account == nil {
		d.account = translate.NewAccount(d.lim.Memory)
	}
	d.account.Take(translate.CostDevice, d.lim.fixed(len(loops)))
	d.generation.Store(uint32(time.Now().UnixNano())) // differs from the generation of an earlier vnicd
	d.tables.reset(d)
	for _, e := range d.data.engines {
		e.start()
	}
	return d, nil
}

// Close detaches the device from its loops. The front end must be disconnected, the
// port must be detached from its network, and Deliver must not be called any more.
func (d *Device) Close() {
	if d.closed {
		return
	}
	d.closed = true
	if d.conn != nil {
		d.Disconnected()
	}
	for _, e := range d.data.engines {
		e.stop()
	}
	d.account.Credit(translate.CostDevice, d.lim.fixed(len(d.data.engines)))
}

// Account returns the account of what the VM makes the device allocate.
func (d *Device) Account() *translate.Account { return d.account }

// SetLink sets the port's state and notifies the driver. From any goroutine but loops.
func (d *Device) SetLink(up bool) {
	if d.data.link.Swap(up) != up {
		d.PortChanged()
	}
}

// Quarantine takes the port down, or up again, and notifies the driver. Going down it ends the RC and UC connections:
// their QPs enter the error state and flush their work requests, so that no program waits for a peer that it cannot
// reach. UD QPs continue, the GSI QP among them: drivers do not make it anew. From any goroutine but loops.
func (d *Device) Quarantine(on bool) {
	d.SetLink(!on)
	for _, e := range d.data.engines {
		if on {
			_ = e.visit(e.disconnect) // a device without memory has stopped
		}
	}
}

// Resend makes the device's RC QPs send again what is in flight, and acknowledge once more: their peers may have come
// back since they sent. From any goroutine but loops.
func (d *Device) Resend() {
	for _, e := range d.data.engines {
		_ = e.visit(func() { // a device without memory has stopped
			if !e.frozen {
				e.freeze()
				e.thaw()
			}
		})
	}
}

// PortChanged notifies the driver that the port's MTU has changed. It does not
// block: the caller may hold locks that all VMs share.
func (d *Device) PortChanged() {
	if c := d.portListener.Load(); c != nil {
		(*c).ConfigChanged()
	}
}

// SetPort sets the port that receives the device's frames. Nil: none.
func (d *Device) SetPort(p Port) {
	if p == nil {
		d.data.port.Store(nil)
		return
	}
	d.data.port.Store(&p)
}

// HCAFace is the HCA face of the device's port (vswitch.VMPort). It is the data side itself.
func (d *Device) HCAFace() vswitch.HCAFace { return d.data }

// Neighbours is the network face of the port of a device without a network card. While a driver runs, it answers
// ARP and ND requests for the device's GIDs; it drops other frames.
func (d *Device) Neighbours() vswitch.Face { return neighbours{d.data} }

// MAC returns the device's address.
func (d *Device) MAC() [6]byte { return d.cfg.MAC }

// setUp recomputes up; connection goroutine. A running command queue is the sign of a
// driver: front ends start queues when the driver sets DRIVER_OK, and QEMU does not
// forward the status itself for its generic device.
func (d *Device) setUp() {
	d.data.up.Store(d.commands != nil && !d.data.broken.Load())
	d.data.paused.Store(false)
	if port := d.data.port.Load(); port != nil && d.data.up.Load() {
		if err := (*port).Claim(); err != nil {
			d.log.Warn("the VM's address remains elsewhere", "reason", err)
		}
	}
}

// Features implements virtio.Device.
func (d *Device) Features() uint64 { return abi.Features }

// NumQueues implements virtio.Device.
func (d *Device) NumQueues() int { return abi.NumQueues(len(d.data.ceqs), len(d.data.engines)) }

// ConfigSize implements virtio.Device.
func (d *Device) ConfigSize() int { return abi.SizeConfig }

// SetFeatures implements virtio.Device. The transport accepts only features that were offered.
func (d *Device) SetFeatures(f uint64) error {
	d.features.Store(f)
	return nil
}

// ReadConfig implements virtio.Device.
func (d *Device) ReadConfig(dst []byte, off uint32) error {
	var b [abi.SizeConfig]byte
	c := abi.Config{
		Magic: abi.Magic, ABIVersion: abi.Oldest, MAC: d.cfg.MAC, NumCEQs: uint16(len(d.data.ceqs)),
		NumEngines: uint16(len(d.data.engines)), PortMTU: uint32(d.data.portMTU()), Generation: d.generation.Load(),
	}
	if d.data.link.Load() {
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
	d.data.mem.Store(s)
	d.data.vm = translate.NewVM(s, d.lim.stageOne(d.account))
	for _, e := range d.data.engines {
		e.onLoop(func() { e.space = s })
	}
	d.mu.Lock()
	d.tables.conn, d.tables.vm = c, d.data.vm
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
	d.closeJournal()
	d.tables.conn, d.tables.vm = nil, nil
	d.mu.Unlock()
	for _, e := range d.data.engines {
		e.onLoop(func() { e.space = nil })
	}
	d.data.mem.Store(nil)
	d.data.vm, d.conn = nil, nil
	d.features.Store(0)
	d.log.Info("front end disconnected")
}

// Reset implements virtio.Device. If state was lost, the driver is notified to check
// the generation, because the driver may not have caused the reset (QEMU also resets
// the device when the VM is stopped and continued).
func (d *Device) Reset() {
	if d.teardown() && d.conn != nil {
		d.conn.ConfigChanged()
	}
}

// teardown destroys all objects of the guest, users before the objects that they use,
// and reports whether there were any. The other VMs are not notified;
// their QPs run into their timeouts.
func (d *Device) teardown() (lost bool) {
	for i := range d.NumQueues() {
		d.StopQueue(i) // virtio.Device's contract stops it before; a repetition is harmless
	}
	d.driver.Lock()
	defer d.driver.Unlock()
	d.data.up.Store(false)
	d.data.paused.Store(false)
	if d.look != nil {
		d.look.Stop()
	}
	d.generation.Add(1)
	return d.wipe()
}

// wipe is teardown except for the queues.
func (d *Device) wipe() (lost bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := &d.tables
	qps := t.qps
	lost = qps+len(t.cqs)+len(t.srqs)+len(t.mrs)+len(t.pds) > 0 || d.data.ahs.Load() != nil
	// QPs first: after them no loop uses rings, CQs or memory any more.
	for _, e := range d.data.engines {
		e.onLoop(func() {
			for _, o := range t.qpList {
				if o.q.engine == e {
					o.q.close()
				}
			}
			e.forgetDoorbells()
		})
	}
	for _, o := range t.cqs {
		o.q.delayed.Store(false)
	}
	// No thread posts events any more; pending events concern destroyed objects.
	for _, e := range d.data.engines {
		e.onLoop(func() {
			for _, q := range e.events {
				q.clear()
			}
			e.dropAnswers()
			e.frozen = false // there is nothing left that a paused VM must keep
		})
	}
	d.data.conns.clear()
	d.data.ahs.Store(nil)
	if d.data.vm != nil {
		ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
		defer cancel()
		if err := d.data.vm.DestroyAll(ctx); err != nil {
			d.log.Error("memory regions are still in use after a reset", "error", err)
		}
	}
	if qps > 0 {
		d.log.Info("device reset", "qps", qps)
	}
	d.tables.reset(d)
	d.data.broken.Store(false)
	d.pastJobs = nil
	d.wiped()
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
	return d.data.engines[i-abi.DoorbellQueue(len(d.data.ceqs), 0)].startDoorbells(q)
}

// startCommandQueue starts the device. A queue that starts at 0, and was stopped elsewhere, has a new driver, and so
// has one if the previous driver's nonce is gone. If objects of that driver still exist, the front end did not report
// the reset (it may only have stopped the queues). The generation stays at a start from 0: the new driver has read it
// already and has lost no state. Elsewhere it changes, in case the driver is the old one after all.
func (d *Device) startCommandQueue(q *virtq.Queue) error {
	d.driver.Lock()
	defer d.driver.Unlock()
	if d.commands != nil {
		return errors.New("hca: the command queue runs already")
	}
	begins := q.Base() == 0 && d.position != 0
	if gone := d.driverGone(); (begins || gone) && d.wipe() {
		d.log.Info("new driver: state of the previous one dropped", "nonce_gone", gone)
		if !begins {
			d.generation.Add(1)
			d.PortChanged()
		}
	}
	past, err := d.reopen(q)
	if err != nil {
		// The driver resets the device when it sees the generation.
		d.log.Error("commands of the killed vnicd are lost: the driver has to begin anew", "reason", err)
		d.generation.Add(1)
		d.wipe()
		d.PortChanged()
	}
	d.queueStarts(q, past)
	c, err := d.newCommands(q, past)
	if err != nil {
		return err
	}
	d.commands = c
	var failed error
	for _, e := range d.data.engines { // before the first command, which needs them
		if err := d.thaw(e); err != nil && failed == nil {
			failed = fmt.Errorf("hca: engine %d: %w", e.id, err)
		}
	}
	c.start()
	if failed != nil {
		d.stopCommandQueue()
		return failed
	}
	d.setUp()
	return nil
}

// thaw lets an engine go on. If another VM's memory vanishes meanwhile, that VM's device stops and this one goes on, as
// often as there may be such VMs.
func (d *Device) thaw(e *engine) error {
	const others = 1024
	for tries := 0; ; tries++ {
		err := e.visit(e.thaw)
		if err == nil || d.data.broken.Load() || tries == others {
			return err
		}
	}
}

// StopQueue implements virtio.Device.
func (d *Device) StopQueue(i int) {
	switch {
	case i < 0 || i >= d.NumQueues():
	case i == abi.CommandQueue:
		d.driver.Lock()
		defer d.driver.Unlock()
		d.stopCommandQueue()
	default:
		if eq := d.eventQueueAt(i); eq != nil {
			eq.stop()
			return
		}
		d.data.engines[i-abi.DoorbellQueue(len(d.data.ceqs), 0)].stopDoorbells()
	}
}

// stopCommandQueue freezes the device; under driver.
func (d *Device) stopCommandQueue() {
	if d.commands == nil {
		return
	}
	d.data.up.Store(false)
	d.commands.stop()
	d.position = d.commands.q.Base()
	d.commands = nil
	for _, e := range d.data.engines {
		_ = e.visit(func() { // a device whose memory is gone has stopped
			e.settleNow()
			e.freeze()
		})
		e.onLoop(e.freeze)
	}
	d.queueStopped(d.position)
	d.pauses()
}

func (d *Device) eventQueueAt(i int) *eventQueue {
	if i == abi.EventQueue {
		return d.data.async
	}
	if n := i - abi.CEQQueue(0); n < len(d.data.ceqs) {
		return d.data.ceqs[n]
	}
	return nil
}
