package rdmacm

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

// Conn is a connection: a connected RC queue pair. The program posts to its queue pair and polls its CQs as usual.
//
// When the connection ends, Done is closed and the queue pair goes to ERR, so that all outstanding requests complete,
// with WCWRFlushErr. A peer that dies without a message is noticed by requests that fail, as with any RC queue pair:
// then the program calls Close.
type Conn struct {
	m             *Manager
	params        Params
	active        bool
	local, remote netip.AddrPort
	private       []byte

	qp               *guestdrv.QP
	psn              uint32 // that the peer sends first
	depth, responder uint8

	signal chan struct{} // holds a token after the session's state has changed; for Dial and Accept
	done   chan struct{} // closed when the connection ends
	over   chan struct{} // closed when that is settled with the peer

	// Guarded by m.mu.
	session                *session
	doneClosed, overClosed bool

	mu      sync.Mutex
	made    []interface{ Close() error } // queue pair and CQs, in order; guarded by mu once the connection is made
	flushed bool                         // the queue pair is in ERR or destroyed; guarded by mu
}

func (m *Manager) newConn(p Params) *Conn {
	return &Conn{m: m, params: p, signal: make(chan struct{}, 1), done: make(chan struct{}),
		over: make(chan struct{})}
}

// Manager returns the connection's manager.
func (c *Conn) Manager() *Manager { return c.m }

// QP returns the queue pair. It belongs to the connection, which closes it.
func (c *Conn) QP() *guestdrv.QP { return c.qp }

// SendCQ returns the CQ of send requests: that of Params, or the connection's own.
func (c *Conn) SendCQ() *guestdrv.CQ { return c.params.QP.SendCQ }

// RecvCQ returns the CQ of receive requests: that of Params, or the connection's own.
func (c *Conn) RecvCQ() *guestdrv.CQ { return c.params.QP.RecvCQ }

// LocalAddr returns this end's address and port.
func (c *Conn) LocalAddr() netip.AddrPort { return c.local }

// RemoteAddr returns the peer's address and port.
func (c *Conn) RemoteAddr() netip.AddrPort { return c.remote }

// PrivateData returns what the peer said: of a Conn from Dial the data of Accept, of one from Accept the data of Dial.
// Its length is that of the message's field: zero bytes follow the peer's data.
func (c *Conn) PrivateData() []byte { return c.private }

// InitiatorDepth returns how many READs and atomics this end may have outstanding; the queue pair observes it.
func (c *Conn) InitiatorDepth() uint8 { return c.depth }

// ResponderResources returns how many READs and atomics the peer may have outstanding.
func (c *Conn) ResponderResources() uint8 { return c.responder }

// Done returns a channel that is closed when the connection has ended: either end has disconnected, or the device is
// lost. Err has the reason.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err returns nil while the connection exists; then ErrPeerDisconnected, ErrClosed after Disconnect or Close, a
// *RejectError or Reason if the peer has lost the connection, or the error of the device.
func (c *Conn) Err() error {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if !c.doneClosed {
		return nil
	}
	return c.session.why()
}

// changed is the session's callback. m.mu is held.
func (c *Conn) changed() {
	select {
	case c.signal <- struct{}{}:
	default:
	}
	s := c.session
	if s == nil || !s.state.over() {
		return
	}
	if !c.doneClosed {
		c.doneClosed = true
		close(c.done)
		if s.up { // otherwise Dial or Accept fails and closes c
			c.m.flusher.add(c)
		}
	}
	if s.state != dreqSent && !c.overClosed {
		c.overClosed = true
		close(c.over)
	}
}

// flush moves the queue pair to ERR.
func (c *Conn) flush(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.flushed {
		return nil
	}
	err := c.qp.ToErr(ctx)
	c.flushed = err == nil
	return err
}

// Dial connects to a port such as "10.0.0.1:7471". It fails with a *RejectError if the peer refuses, with ErrTimeout
// if it does not answer (Config.ResponseTimeout, MaxRetries), and with the context's error if that ends first.
func (m *Manager) Dial(ctx context.Context, address string, p Params) (_ *Conn, err error) {
	to, err := m.peerOf(address)
	if err != nil {
		return nil, err
	}
	if p, err = p.withDefaults(m, MaxPrivateREQ); err != nil {
		return nil, err
	}
	c := m.newConn(p)
	c.active, c.local, c.remote = true, m.anyPort(), to
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	defer func() {
		if err != nil {
			_ = c.Close()
			err = m.reason(err)
		}
	}()
	peer := guestdrv.IPGID(to.Addr())
	path, err := m.path(ctx, peer)
	if err != nil {
		return nil, err
	}
	if err := c.newQP(ctx); err != nil {
		return nil, err
	}
	req := c.request(ipHeader{src: c.local, dst: to.Addr(), rest: p.PrivateData})
	if err := m.act(func(now time.Time, x *machine) (err error) {
		c.session, err = x.connect(now, peer, req, c.changed)
		return err
	}); err != nil {
		return nil, err
	}
	if err := c.await(ctx, repReceived); err != nil {
		return nil, err
	}
	c.private = c.session.reply.Private // does not change any more
	if err := c.connectQP(ctx, c.fromREP(path, &c.session.reply)); err != nil {
		return nil, err
	}
	if err := m.act(func(_ time.Time, x *machine) error {
		m.conns[c] = true
		return x.ready(c.session)
	}); err != nil {
		return nil, err
	}
	return c, nil
}

// reason returns the error of Dial or Accept: Close ends their context.
func (m *Manager) reason(err error) error {
	if errors.Is(err, context.Canceled) && m.open.Err() != nil {
		return ErrClosed
	}
	return err
}

// await waits until the session has reached a state.
func (c *Conn) await(ctx context.Context, want state) error {
	for {
		c.m.mu.Lock()
		at, up, err := c.session.state, c.session.up, c.session.why()
		c.m.mu.Unlock()
		switch {
		case at == want || up: // the peer may have ended it already
			return nil
		case at.over():
			return err
		}
		select {
		case <-c.signal:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Disconnect ends the connection and waits until the peer has confirmed, or does not answer any more. Requests that are
// still outstanding complete with WCWRFlushErr: wait for the completions of those that matter before. Close must still
// be called.
func (c *Conn) Disconnect(ctx context.Context) error {
	if err := c.flush(ctx); err != nil {
		return err
	}
	if err := c.m.act(func(now time.Time, x *machine) error {
		x.disconnect(now, c.session, ErrClosed)
		return nil
	}); err != nil {
		return err
	}
	select {
	case <-c.over:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close ends the connection, if it exists, and destroys the queue pair and the connection's own CQs. Posting and
// polling must have ended before. It does not wait for the peer, which is told again until it confirms. Close may be
// repeated after an error; further calls return nil.
func (c *Conn) Close() error {
	c.m.mu.Lock()
	if c.session != nil {
		_ = c.m.actLocked(func(now time.Time, x *machine) error {
			x.abandon(now, c.session)
			return nil
		})
	}
	c.m.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.flushed = true
	if err := c.release(); err != nil {
		return err
	}
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	delete(c.m.conns, c)
	return nil
}

// flusher moves the queue pairs of ended connections to ERR. The service does not, because it must not wait for
// commands.
type flusher struct {
	mu   sync.Mutex
	list []*Conn       // guarded by mu
	wake chan struct{} // holds a token while list may not be empty
}

func (f *flusher) add(c *Conn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = append(f.list, c)
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

func (f *flusher) run(ctx context.Context) {
	for {
		select {
		case <-f.wake:
		case <-ctx.Done():
			return
		}
		f.mu.Lock()
		list := f.list
		f.list = nil
		f.mu.Unlock()
		for _, c := range list {
			_ = c.flush(ctx) // fails only with the device, whose end the program notices
		}
	}
}
