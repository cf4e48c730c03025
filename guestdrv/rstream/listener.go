package rstream

import (
	"context"
	"net"
	"sync"

	"github.com/vnicd/vnicd/guestdrv/rdmacm"
)

// Listener receives connections for a port, a net.Listener. It sets up several at once, so that a peer that does not
// complete its connection holds up no other.
type Listener struct {
	m   *rdmacm.Manager
	cm  *rdmacm.Listener
	cfg Config

	ctx     context.Context // Close ends it
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	places  chan struct{} // one token for each connection that is being set up or waits for Accept
	ready   chan *Conn    // has room for all
	done    chan struct{} // closed when the goroutines have ended
	err     error         // why; set before done is closed
	closing sync.Once
}

// Listen opens a port. It fails with rdmacm.ErrInUse if the Manager has a listener for it. Close the Listener and its
// connections before the Manager.
func Listen(m *rdmacm.Manager, port uint16, cfg Config) (*Listener, error) {
	cfg, err := cfg.withDefaults(m)
	if err != nil {
		return nil, err
	}
	cm, err := m.Listen(port, rdmacm.ListenConfig{Backlog: cfg.Backlog})
	if err != nil {
		return nil, err
	}
	l := &Listener{m: m, cm: cm, cfg: cfg, places: make(chan struct{}, cfg.Backlog), ready: make(chan *Conn, cfg.Backlog),
		done: make(chan struct{})}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	go l.serve()
	return l, nil
}

// Addr returns the address and port, an Addr.
func (l *Listener) Addr() net.Addr { return Addr{l.cm.Addr()} }

// serve takes requests as long as there are places.
func (l *Listener) serve() {
	defer close(l.done)
	defer l.wg.Wait()
	for {
		select {
		case l.places <- struct{}{}:
		case <-l.ctx.Done():
			l.err = net.ErrClosed
			return
		}
		req, err := l.cm.Accept(l.ctx)
		if err != nil {
			if l.err = err; l.ctx.Err() != nil {
				l.err = net.ErrClosed
			}
			return
		}
		l.wg.Go(func() { l.accept(req) })
	}
}

// accept sets up a connection. A request that fails concerns only its peer, which is told.
func (l *Listener) accept(req *rdmacm.Request) {
	ctx, cancel := context.WithTimeout(l.ctx, l.cfg.HandshakeTimeout)
	defer cancel()
	c, err := accept(ctx, req, l.m, l.cfg)
	if err != nil {
		<-l.places
		return
	}
	l.ready <- c
}

// Accept waits for a connection, which is a *Conn. It fails with net.ErrClosed after Close, and with the Manager's
// error if that has ended.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.ready:
		<-l.places
		return c, nil
	case <-l.done:
		return nil, &net.OpError{Op: "accept", Net: "rdma", Addr: l.Addr(), Err: l.err}
	}
}

// Close closes the port and the connections that wait for Accept; those that Accept has returned stay. It always
// returns nil; further calls do nothing.
func (l *Listener) Close() error {
	l.closing.Do(func() {
		l.cancel()
		_ = l.cm.Close() // never fails
		<-l.done
		for {
			select {
			case c := <-l.ready:
				_ = c.Close() // its peer is gone if it fails
			default:
				return
			}
		}
	})
	return nil
}
