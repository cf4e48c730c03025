package guestdrv

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
)

var le = binary.LittleEndian

// Config configures a Device. The zero value is usable.
type Config struct {
	// Memory is the size in bytes of the memory for buffers, rings and queues; 0 means 64 MiB. Pages are allocated by
	// the kernel when they are first used.
	Memory uint64
	// AHEntries is the size of the address handle table, one entry of which is reserved; 0 means 1024. The limit
	// DeviceAttr.MaxAH applies, too.
	AHEntries int
	// Timeout bounds Open, every command and every Close of an object; 0 means 30 s. A command also ends with its context.
	Timeout time.Duration

	refuse uint64 // virtio features not to accept, for tests
}

// Device is an open HCA. All methods may be called from any goroutine.
type Device struct {
	cfg Config
	fe  *frontend.Device
	mem *memory

	shared sharedMemory

	conf abi.Config
	attr abi.DeviceAttr
	cmds *commander
	dbs  []*doorbell
	late lateWork

	async *asyncEvents
	ahs   ahTable
	gids  gidTable

	mu  sync.Mutex
	cqs map[uint32]*CQ // by number, for completion events; guarded by mu

	faults faultServer

	users  users
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	once   sync.Once
	done   chan struct{} // closed when failed is set
	failMu sync.Mutex
	failed error // first fatal error, ErrDisconnected and ErrClosed included; guarded by failMu
}

const (
	defaultMemory  = 64 << 20
	defaultTimeout = 30 * time.Second
	defaultAHs     = 1024
	queueSize      = 64 // entries of each virtqueue
)

// Where an empty path of Open leads: to what is in the environment variable SocketVariable, or to DefaultSocket. In a
// container, `vnicd cdi` sets the variable, and the application's socket is there.
const (
	SocketVariable = "VNICD_SOCKET"
	DefaultSocket  = "/run/vnicd/hca"
)

// Open connects to the HCA socket of a running vnicd and initialises the device; "" is the socket that a container has
// (SocketVariable). It fails with ErrNotVNICD or ErrVersion if another device listens there. ctx bounds only Open.
func Open(ctx context.Context, path string, cfg Config) (_ *Device, err error) {
	path = cmp.Or(path, os.Getenv(SocketVariable), DefaultSocket)
	if cfg.Memory == 0 {
		cfg.Memory = defaultMemory
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = defaultTimeout
	}
	if cfg.AHEntries == 0 {
		cfg.AHEntries = defaultAHs
	}
	d := &Device{
		cfg: cfg, done: make(chan struct{}), cqs: map[uint32]*CQ{}, late: lateWork{wake: make(chan struct{}, 1)},
		faults: faultServer{work: make(chan fault), regions: map[uint32]*OnDemandMR{}},
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			_ = d.Close()
		}
	}()
	if d.mem, err = newMemory(cfg.Memory); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, cfg.Timeout, ErrTimeout)
	defer cancel()
	fc := frontend.Config{Path: path, Memory: d.mem.Memory, QueueSize: queueSize, Features: abi.Features,
		Refuse: cfg.refuse}
	if d.fe, err = frontend.Open(ctx, fc); err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", path, err)
	}
	if d.conf, err = d.readConfig(ctx); err != nil {
		return nil, err
	}
	if err := d.checkConfig(); err != nil {
		return nil, err
	}
	if err := d.startQueues(); err != nil {
		return nil, err
	}
	if err := d.do(ctx, abi.CmdQueryDevice, nil, 0, &d.attr); err != nil {
		return nil, err
	}
	d.setNonce()
	for _, db := range d.dbs {
		req := abi.SetDoorbells{
			Engine: uint32(db.engine), NPages: abi.DoorbellPages, PA: [abi.DoorbellPages]uint64(db.buf.pagePAs()),
		}
		if err := d.do(ctx, abi.CmdSetDoorbells, &req, abi.SizeSetDoorbells, nil); err != nil {
			return nil, err
		}
	}
	if err := d.setupAHs(ctx); err != nil {
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
	d.wg.Go(d.watch)
	d.wg.Go(func() { d.late.run(d.ctx) })
	if d.cmds, err = newCommander(d); err != nil {
		return err
	}
	if d.async, err = newAsyncEvents(d); err != nil {
		return err
	}
	for i := range int(d.conf.NumCEQs) {
		if err := d.startCEQ(abi.CEQQueue(i)); err != nil {
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

// Close ends the connection, which destroys every object of the device, and unmaps the memory. Pending commands and
// waits fail with ErrClosed. Posting, polling and accesses to Buffer.Bytes must have ended before. Close returns when
// all goroutines of the device have ended. Further calls return nil.
func (d *Device) Close() error {
	var err error
	d.once.Do(func() {
		idle := d.users.close()
		d.cancel()
		d.fail(ErrClosed)
		d.clearNonce()
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

// fail records a fatal error of the device and ends all waits; the first one is kept.
func (d *Device) fail(err error) {
	d.failMu.Lock()
	defer d.failMu.Unlock()
	if d.failed == nil {
		d.failed = err
		close(d.done)
	}
}

// watch waits for the end of the connection.
func (d *Device) watch() {
	select {
	case <-d.fe.Gone():
		d.fail(ErrDisconnected)
	case <-d.ctx.Done():
	}
}

// Done returns a channel that is closed when the device has become unusable: vnicd has ended or closed the connection,
// it has violated the protocol, or Close was called. Err has the reason. A program that only polls, which notices
// nothing of it, waits for Done.
func (d *Device) Done() <-chan struct{} { return d.done }

// Err returns nil while the device is usable, then the error with which commands and waits fail: ErrClosed after Close,
// ErrDisconnected if vnicd has gone, and another error if the device violated the protocol. After the latter two, too,
// Close releases the memory.
func (d *Device) Err() error {
	select {
	case <-d.ctx.Done():
		return ErrClosed
	default:
	}
	if d.gone() {
		return ErrDisconnected
	}
	d.failMu.Lock()
	defer d.failMu.Unlock()
	return d.failed
}

// gone reports whether vnicd has closed the connection.
func (d *Device) gone() bool {
	select {
	case <-d.fe.Gone():
		return true
	default:
		return false
	}
}

// has reports whether the device can access the page at pa.
func (d *Device) has(pa uint64) bool { return d.mem.has(pa) || d.shared.has(pa) }

// Alloc allocates n bytes of zeroed memory that the device can access. It fails with ErrNoMemory if Config.Memory is
// used up.
func (d *Device) Alloc(n int) (*Buffer, error) { return d.AllocAligned(n, pageSize) }

// AllocAligned is Alloc at a PA that is a multiple of align, a power of two of at least 4096. The VA is aligned like
// the memory as a whole, to 4096 at least.
func (d *Device) AllocAligned(n, align int) (*Buffer, error) {
	if n <= 0 || align < pageSize || align&(align-1) != 0 {
		return nil,
			invalid("allocation of %d bytes aligned to %d: expected a positive size and a power of two of at least %d", n, align,
				pageSize)
	}
	if err := d.users.enter(); err != nil {
		return nil, err
	}
	defer d.users.leave()
	return d.mem.alloc(uint64(n), uint64(align))
}
