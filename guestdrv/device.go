package guestdrv

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

var le = binary.LittleEndian

// Config of a Device. The zero value is usable.
type Config struct {
	// Memory is the size in bytes of the memory that Device.Alloc, rings and
	// queues are taken from; 0 means 64 MiB. Pages are only used once touched.
	Memory uint64
	// AHEntries is the size of the address handle table; 0 means 1024, bounded by the device's limit.
	AHEntries int
	// Timeout bounds connecting and every command; 0 means 30 s.
	Timeout time.Duration
	// Plain does without indirect descriptors and event indices.
	Plain bool
}

// Device is an open HCA.
type Device struct {
	cfg  Config
	fe   *frontend.Device
	mem  *memory
	conf abi.Config
	attr abi.DeviceAttr
	cmds *commander
	dbs  []*doorbell

	async *asyncEvents
	ahs   ahTable

	mu  sync.Mutex
	cqs map[uint32]*CQ // by number, for completion events; guarded by mu

	faults faultServer

	users  users
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	once   sync.Once
	failMu sync.Mutex
	failed error // first fatal error, guarded by failMu
}

const (
	defaultMemory  = 64 << 20
	defaultTimeout = 30 * time.Second
	defaultAHs     = 1024
	queueSize      = 64 // entries of each virtqueue
)

// Open connects to the HCA socket of a running vnicd and brings the device up.
// It fails with ErrNotVNICD or ErrVersion if something else listens there.
func Open(path string, cfg Config) (_ *Device, err error) {
	if cfg.Memory == 0 {
		cfg.Memory = defaultMemory
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = defaultTimeout
	}
	if cfg.AHEntries == 0 {
		cfg.AHEntries = defaultAHs
	}
	d := &Device{cfg: cfg, cqs: map[uint32]*CQ{}, faults: faultServer{work: make(chan fault), regions: map[uint32]*OnDemandMR{}}}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			_ = d.Close()
		}
	}()
	if d.mem, err = newMemory(cfg.Memory); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(d.ctx, cfg.Timeout)
	defer cancel()
	fc := frontend.Config{Path: path, Memory: d.mem.Memory, QueueSize: queueSize, NoEvents: cfg.Plain, NoIndir: cfg.Plain}
	if d.fe, err = frontend.Open(ctx, fc); err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", path, err)
	}
	if d.conf, err = d.ReadConfig(); err != nil {
		return nil, err
	}
	if err := d.checkConfig(); err != nil {
		return nil, err
	}
	if err := d.startQueues(); err != nil {
		return nil, err
	}
	if err := d.do(abi.CmdQueryDevice, nil, 0, &d.attr); err != nil {
		return nil, err
	}
	for _, db := range d.dbs {
		req := abi.SetDoorbells{Engine: uint32(db.engine), NPages: abi.DoorbellPages, PA: [abi.DoorbellPages]uint64(db.buf.pagePAs())}
		if err := d.do(abi.CmdSetDoorbells, &req, abi.SizeSetDoorbells, nil); err != nil {
			return nil, err
		}
	}
	if err := d.setupAHs(); err != nil {
		return nil, err
	}
	return d, nil
}

func (d *Device) checkConfig() error {
	c := &d.conf
	if c.NumCEQs < 1 || c.NumCEQs > abi.MaxCEQs || c.NumEngines < 1 || c.NumEngines > abi.MaxEngines {
		return fmt.Errorf("configuration space: %d completion event queues and %d engines, expected 1..%d and 1..%d",
			c.NumCEQs, c.NumEngines, abi.MaxCEQs, abi.MaxEngines)
	}
	if n, want := d.fe.NumQueues(), abi.NumQueues(int(c.NumCEQs), int(c.NumEngines)); n < want {
		return fmt.Errorf("device serves %d queues, its configuration needs %d", n, want)
	}
	return nil
}

// startQueues fills the queues and starts their goroutines.
func (d *Device) startQueues() error {
	var err error
	if d.cmds, err = newCommander(d); err != nil {
		return err
	}
	if d.async, err = newAsyncEvents(d); err != nil {
		return err
	}
	for i := range int(d.conf.NumCEQs) {
		if err := d.completionQueue(abi.CEQQueue(i)); err != nil {
			return err
		}
	}
	for e := range int(d.conf.NumEngines) {
		db, err := newDoorbell(d, e)
		if err != nil {
			return err
		}
		d.dbs = append(d.dbs, db)
	}
	return nil
}

// Close ends the connection, which destroys everything made through the device,
// and unmaps the memory. Commands and waits under way end with ErrClosed; posting,
// polling and the use of a Buffer's bytes must have ended. It is idempotent.
func (d *Device) Close() error {
	var err error
	d.once.Do(func() {
		idle := d.users.close()
		d.cancel()
		if d.fe != nil {
			err = d.fe.Close()
		}
		d.wg.Wait()
		<-idle
		if d.mem != nil {
			d.mem.Close()
		}
	})
	return err
}

// fail marks the device unusable; the first error stays.
func (d *Device) fail(err error) {
	d.failMu.Lock()
	if d.failed == nil {
		d.failed = err
	}
	d.failMu.Unlock()
}

func (d *Device) err() error {
	d.failMu.Lock()
	defer d.failMu.Unlock()
	return d.failed
}

// MAC is the address that the HCA shares with the VM's NIC.
func (d *Device) MAC() [6]byte { return d.conf.MAC }

// Config is the configuration space as it was at Open.
func (d *Device) Config() abi.Config { return d.conf }

// ReadConfig reads the configuration space anew: link state and MTU may change.
func (d *Device) ReadConfig() (abi.Config, error) {
	var b [abi.SizeConfig]byte
	var c abi.Config
	if err := d.fe.ReadConfig(b[:], 0); err != nil {
		return c, fmt.Errorf("reading configuration space: %w", err)
	}
	// Magic and version first: with another version the rest may mean anything.
	if m := le.Uint32(b[0:]); m != abi.Magic {
		return c, fmt.Errorf("%w: magic %#x, expected %#x", ErrNotVNICD, m, abi.Magic)
	}
	if v := le.Uint32(b[4:]); v != abi.Version {
		return c, fmt.Errorf("%w: device has %d, this driver %d", ErrVersion, v, abi.Version)
	}
	if err := c.Decode(b[:]); err != nil {
		return c, fmt.Errorf("configuration space: %w", err)
	}
	return c, nil
}

// ConfigChanged delivers one value after one or more changes of the configuration space.
func (d *Device) ConfigChanged() <-chan struct{} { return d.fe.ConfigChanged() }

// Attr are the device's capabilities and this connection's limits.
func (d *Device) Attr() abi.DeviceAttr { return d.attr }

// Port asks for the port's state.
func (d *Device) Port() (abi.PortAttr, error) {
	var p abi.PortAttr
	err := d.do(abi.CmdQueryPort, nil, 0, &p)
	return p, err
}

// Stats asks for the device's counters.
func (d *Device) Stats() (abi.Stats, error) {
	var s abi.Stats
	err := d.do(abi.CmdQueryStats, nil, 0, &s)
	return s, err
}

// Alloc takes n bytes of zeroed memory that the device can reach. It fails with
// ErrNoMemory if Config.Memory is used up.
func (d *Device) Alloc(n int) (*Buffer, error) { return d.AllocAligned(n, pageSize) }

// AllocAligned is Alloc at a PA and VA that are multiples of align, a power of
// two; the VA is only aligned as well as the memory as a whole is (4 KiB at least).
func (d *Device) AllocAligned(n, align int) (*Buffer, error) {
	if n <= 0 || align < pageSize || align&(align-1) != 0 {
		return nil, invalid("allocation of %d bytes aligned to %d: expected a positive size and a power of two from %d on", n, align, pageSize)
	}
	if err := d.users.enter(); err != nil {
		return nil, err
	}
	defer d.users.leave()
	return d.mem.alloc(uint64(n), uint64(align))
}

// closing says why an operation cannot go on, nil if it can.
func (d *Device) closing() error {
	select {
	case <-d.ctx.Done():
		return ErrClosed
	default:
	}
	select {
	case <-d.fe.Gone():
		return ErrDisconnected
	default:
		return d.err()
	}
}
