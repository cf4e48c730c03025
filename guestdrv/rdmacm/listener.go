package rdmacm

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

// ListenConfig configures a Listener. The zero value is usable.
type ListenConfig struct {
	// Backlog is the number of requests that wait for Listener.Accept; 0: 128. Of a full one the peer with most
	// requests loses its newest to a peer with fewer; any other request is rejected. Both with RejectNoResources.
	Backlog int
}

// Listener receives the requests for a port.
type Listener struct {
	m     *Manager
	port  *port
	ready chan struct{} // holds a token while the backlog may not be empty
	done  chan struct{}
	once  sync.Once
}

// Listen opens a port. It fails with ErrInUse if the Manager has a Listener for it.
func (m *Manager) Listen(number uint16, cfg ListenConfig) (*Listener, error) {
	if cfg.Backlog == 0 {
		cfg.Backlog = 128
	}
	if number == 0 || cfg.Backlog < 0 {
		return nil, invalid("port %d with a backlog of %d", number, cfg.Backlog)
	}
	l := &Listener{m: m, ready: make(chan struct{}, 1), done: make(chan struct{})}
	if err := m.act(func(_ time.Time, x *machine) (err error) {
		if l.port, err = x.listen(number, cfg.Backlog, l.changed); err == nil {
			m.ports[l] = true
		}
		return err
	}); err != nil {
		return nil, err
	}
	return l, nil
}

// changed is the port's callback. m.mu is held.
func (l *Listener) changed() {
	select {
	case l.ready <- struct{}{}:
	default:
	}
}

// Addr returns the address and port.
func (l *Listener) Addr() netip.AddrPort { return netip.AddrPortFrom(l.m.cfg.Address, l.port.number) }

// Accept waits for a request. The program answers it by Request.Accept or Request.Reject.
func (l *Listener) Accept(ctx context.Context) (*Request, error) {
	for {
		var r *Request
		if err := l.m.act(func(_ time.Time, x *machine) error {
			s := x.take(l.port)
			if s == nil {
				return nil
			}
			if len(l.port.backlog) > 0 {
				l.changed() // for another call
			}
			r = &Request{m: l.m, session: s, local: l.Addr(), remote: s.header.src, private: s.header.rest}
			return nil
		}); r != nil || err != nil {
			return r, err
		}
		select {
		case <-l.ready:
		case <-l.done:
			return nil, ErrClosed
		case <-l.m.done:
			return nil, l.m.cause()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// cause returns why the service has ended.
func (m *Manager) cause() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// Close closes the port. Requests in the backlog are rejected with RejectServiceID; connections stay. It always returns
// nil.
func (l *Listener) Close() error {
	l.once.Do(func() {
		l.m.mu.Lock()
		defer l.m.mu.Unlock()
		_ = l.m.actLocked(func(now time.Time, x *machine) error {
			x.unlisten(now, l.port)
			return nil
		})
		delete(l.m.ports, l)
		close(l.done)
	})
	return nil
}

// Request is a peer's request for a connection. The peer waits only for some time (that of Linux for 73 s, longer after
// it has repeated its request), then Accept fails with ErrTimeout. A request that is not answered needs no release.
type Request struct {
	m             *Manager
	session       *session
	local, remote netip.AddrPort
	private       []byte
}

// RemoteAddr returns the peer's address, which its network has verified as it verifies those of all packets, and the
// port that it claims.
func (r *Request) RemoteAddr() netip.AddrPort { return r.remote }

// LocalAddr returns this end's address and port.
func (r *Request) LocalAddr() netip.AddrPort { return r.local }

// PrivateData returns the private data of Dial, MaxPrivateREQ bytes: zero bytes follow the peer's data.
func (r *Request) PrivateData() []byte { return r.private }

// Accept accepts the request and waits until the peer is ready, too. It fails with ErrTimeout if the peer has given up
// or does not answer, and with a *RejectError if it has changed its mind.
func (r *Request) Accept(ctx context.Context, p Params) (_ *Conn, err error) {
	m := r.m
	if p, err = p.withDefaults(m, MaxPrivateREP); err != nil {
		return nil, err
	}
	c := m.newConn(p)
	c.local, c.remote, c.private = r.local, r.remote, r.private
	req := &r.session.request // does not change
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	if err := m.act(func(time.Time, *machine) error {
		switch {
		case r.session.state != reqReceived:
			return r.session.why()
		case r.session.changed != nil:
			return invalid("the request is being accepted")
		}
		c.session, r.session.changed = r.session, c.changed
		return nil
	}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = c.Close()
			err = m.reason(err)
		}
	}()
	path, err := m.path(ctx, guestdrv.IPGID(r.remote.Addr()))
	if err != nil {
		return nil, err
	}
	if err := c.newQP(ctx); err != nil {
		return nil, err
	}
	if err := c.connectQP(ctx, c.fromREQ(path, req)); err != nil {
		return nil, err
	}
	if err := m.act(func(now time.Time, x *machine) error { return x.accept(now, c.session, c.replyTo()) }); err != nil {
		return nil, err
	}
	if err := c.await(ctx, established); err != nil {
		return nil, err
	}
	if err := m.act(func(time.Time, *machine) error {
		m.conns[c] = true
		return nil
	}); err != nil {
		return nil, err
	}
	return c, nil
}

// Reject rejects the request. private, at most MaxPrivateREJ bytes, goes to the peer's program. Programs use
// RejectConsumer; the other reasons are for what the reason says.
func (r *Request) Reject(reason Reason, private []byte) error {
	if len(private) > MaxPrivateREJ {
		return invalid("%d bytes of private data, at most %d", len(private), MaxPrivateREJ)
	}
	return r.m.act(func(now time.Time, x *machine) error {
		if r.session.changed != nil {
			return invalid("the request is being accepted")
		}
		return x.reject(now, r.session, reason, private)
	})
}
