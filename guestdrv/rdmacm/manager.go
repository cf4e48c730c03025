package rdmacm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

// Config configures a Manager. Only Address is required.
type Config struct {
	// Address is this end's IP address in the tenant's network. New writes it to entry GIDIndex of the device's GID
	// table with the options GID.
	Address  netip.Addr
	GIDIndex int
	GID      guestdrv.GIDOptions
	// PD is the protection domain of connections whose Params name none; nil: the Manager makes one.
	PD *guestdrv.PD
	// MaxConnections bounds the connections, those being set up or closed included; 0 means 16384.
	MaxConnections int
	// ResponseTimeout is the time that each end has for an answer before the message is repeated, as a code:
	// 4.096 us * 2^ResponseTimeout, 8..23; 0 means 18 (1.07 s).
	ResponseTimeout uint8
	// MaxRetries is how often a message is repeated, 1..15; 0 means 15.
	MaxRetries uint8
	// TimeWait is for how long a closed connection is remembered; 0 means 1 s. It must exceed the lifetime of packets.
	TimeWait time.Duration
}

func (c Config) withDefaults() (Config, error) {
	if c.MaxConnections == 0 {
		c.MaxConnections = 16384
	}
	if c.ResponseTimeout == 0 {
		c.ResponseTimeout = 18
	}
	if c.MaxRetries == 0 {
		c.MaxRetries = 15
	}
	if c.TimeWait == 0 {
		c.TimeWait = time.Second
	}
	c.Address = c.Address.Unmap()
	switch {
	case !unicast(c.Address) || c.Address.Zone() != "":
		return c, invalid("address %v: want a unicast IP address such as 10.0.0.1", c.Address)
	case c.MaxConnections < 0, c.TimeWait < 0:
		return c, invalid("%d connections, %v in time wait: expected no negative numbers", c.MaxConnections, c.TimeWait)
	case c.ResponseTimeout < 8 || c.ResponseTimeout > 23:
		return c, invalid("response timeout %d, expected 8..23", c.ResponseTimeout)
	case c.MaxRetries > 15:
		return c, invalid("%d retries, expected 1..15", c.MaxRetries)
	}
	return c, nil
}

// Manager is the connection manager of a device: it owns queue pair 1. All methods may be called from any goroutine.
type Manager struct {
	dev  *guestdrv.Device
	cfg  Config
	gid  guestdrv.GID
	pd   *guestdrv.PD
	made []interface{ Close() error } // by New, in order
	wg   sync.WaitGroup

	ctx       context.Context // of the service; Close ends it
	cancel    context.CancelFunc
	open      context.Context // ends when Close begins
	closeOpen context.CancelFunc
	calls     sync.WaitGroup // of Dial and Accept; added to under mu while not closing
	done      chan struct{}  // closed when the service has ended

	mu      sync.Mutex
	machine *machine           // this and the rest are guarded by mu
	gsi     gsi                // except polling, which is the service's
	conns   map[*Conn]bool     // not closed
	ports   map[*Listener]bool // likewise
	err     error              // why the service has ended
	closing bool               // Close has been called
	// draining: the service ends when the last messages have left.
	draining bool
	until    time.Time          // the service sleeps until then; zero: without limit
	wake     context.CancelFunc // ends its sleep

	flusher flusher
}

// New makes queue pair 1 of the device, of which there is one, and starts the connection manager. ctx only bounds New.
func New(ctx context.Context, dev *guestdrv.Device, cfg Config) (_ *Manager, err error) {
	if cfg, err = cfg.withDefaults(); err != nil {
		return nil, err
	}
	m := &Manager{dev: dev, cfg: cfg, gid: guestdrv.IPGID(cfg.Address), pd: cfg.PD, done: make(chan struct{}),
		conns: map[*Conn]bool{}, ports: map[*Listener]bool{}, wake: func() {},
		flusher: flusher{wake: make(chan struct{}, 1)}}
	defer func() {
		if err != nil {
			_ = m.closeMade() // err is the first error; Device.Close releases what is left
		}
	}()
	if err := dev.SetGID(ctx, cfg.GIDIndex, m.gid, cfg.GID); err != nil {
		return nil, err
	}
	mtu := guestdrv.MTUFromBytes(dev.Info().PortMTU)
	if mtu == 0 {
		return nil, invalid("the port's MTU of %d bytes carries no RoCE", dev.Info().PortMTU)
	}
	guid := dev.Attr().NodeGUID
	m.machine = newMachine(settings{gid: m.gid, guid: binary.BigEndian.Uint64(guid[:]), maxMTU: uint8(mtu),
		most: cfg.MaxConnections, response: cfg.ResponseTimeout, retries: cfg.MaxRetries, timeWait: cfg.TimeWait,
		random: rand.Uint32})
	pd, err := dev.AllocPD(ctx)
	if err != nil {
		return nil, err
	}
	m.made = append(m.made, pd)
	if m.pd == nil {
		m.pd = pd
	}
	if err := m.openGSI(ctx, pd); err != nil {
		return nil, fmt.Errorf("queue pair 1: %w", err)
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.open, m.closeOpen = context.WithCancel(m.ctx)
	m.wg.Go(m.serve)
	m.wg.Go(func() { m.flusher.run(m.ctx) })
	return m, nil
}

// PD returns the protection domain of connections whose Params name none. Programs register their memory in it.
func (m *Manager) PD() *guestdrv.PD { return m.pd }

// Device returns the device.
func (m *Manager) Device() *guestdrv.Device { return m.dev }

// Addr returns this end's address.
func (m *Manager) Addr() netip.Addr { return m.cfg.Address }

// Counters returns the counters.
func (m *Manager) Counters() Counters {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.machine.counters
}

// Connections returns the number of connections, those being set up and those in time wait included.
func (m *Manager) Connections() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.machine.byLocal)
}

// closeWait bounds how long Close waits until its last messages have left.
const closeWait = time.Second

// Close disconnects and closes all connections and listeners, and releases queue pair 1. As with Device.Close, posting
// to the connections' queue pairs must have ended before. Peers that do not get the last message notice the end by
// their own timeouts. Close may be repeated after an error: it fails with StatusBusy while objects that the program
// made in Manager.PD exist.
func (m *Manager) Close() error {
	m.mu.Lock()
	m.closing = true
	m.mu.Unlock()
	m.closeOpen()
	m.calls.Wait() // they fail, and release what they made
	m.mu.Lock()
	conns, ports := slices.Collect(maps.Keys(m.conns)), slices.Collect(maps.Keys(m.ports))
	m.mu.Unlock()
	for _, l := range ports {
		_ = l.Close() // never fails
	}
	var errs []error
	for _, c := range conns {
		errs = append(errs, c.Close())
	}
	m.mu.Lock()
	m.draining = true
	m.wake()
	m.mu.Unlock()
	select {
	case <-m.done:
	case <-time.After(closeWait):
	}
	m.cancel()
	m.wg.Wait()
	return errors.Join(append(errs, m.closeMade())...)
}

// begin begins a call of Dial or Accept, which Close interrupts and waits for. The caller calls end.
func (m *Manager) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.err != nil:
		return nil, nil, m.err
	case m.closing:
		return nil, nil, ErrClosed
	}
	m.calls.Add(1)
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(m.open, func() { cancel(ErrClosed) })
	return ctx, func() {
		stop()
		cancel(nil)
		m.calls.Done()
	}, nil
}

// closeMade closes what New made, last first.
func (m *Manager) closeMade() error {
	m.gsi.paths.close()
	for i := len(m.made) - 1; i >= 0; i-- {
		if err := m.made[i].Close(); err != nil && m.dev.Err() == nil {
			return err
		}
		m.made = m.made[:i]
	}
	return nil
}

// serve is the service: it handles arriving messages and timers.
func (m *Manager) serve() {
	defer close(m.done)
	for {
		ctx, cancel, ok := m.prepareSleep()
		if !ok {
			return
		}
		n, err := m.gsi.cq.PollWait(ctx, m.gsi.wcs[:])
		cancel()
		if err != nil && m.dev.Err() != nil {
			m.fail(m.dev.Err())
			return
		}
		if err := m.complete(m.gsi.wcs[:n]); err != nil {
			m.fail(err)
			return
		}
	}
}

// prepareSleep handles due timers and returns the context of the service's next sleep. ok is false if the service
// shall end.
func (m *Manager) prepareSleep() (ctx context.Context, cancel context.CancelFunc, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.machine.tick(time.Now())
	m.flush()
	if m.ctx.Err() != nil || m.draining && m.gsi.idle() {
		m.failLocked(ErrClosed)
		return nil, nil, false
	}
	if m.until, ok = m.machine.next(); ok {
		ctx, cancel = context.WithDeadline(m.ctx, m.until)
	} else {
		ctx, cancel = context.WithCancel(m.ctx)
	}
	m.wake = cancel
	return ctx, cancel, true
}

// act calls f with the machine, sends the messages that result, and wakes the service if it must act earlier. It fails
// if the service has ended.
func (m *Manager) act(f func(now time.Time, x *machine) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return m.err
	}
	if m.closing {
		return ErrClosed
	}
	return m.actLocked(f)
}

func (m *Manager) actLocked(f func(now time.Time, x *machine) error) error {
	err := f(time.Now(), m.machine)
	m.flush()
	if t, ok := m.machine.next(); ok && (m.until.IsZero() || t.Before(m.until)) {
		m.wake()
	}
	return err
}

// fail ends the service: all connections end with err.
func (m *Manager) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failLocked(err)
}

func (m *Manager) failLocked(err error) {
	if m.err != nil {
		return
	}
	m.err = err
	for _, s := range m.machine.byLocal {
		m.machine.end(s, err)
	}
}
