package rstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
)

// Dial connects to a port such as "10.0.0.1:7471". Its errors are those of rdmacm's Dial, or ErrProtocol if the peer
// does not speak the protocol. They are wrapped in a *net.OpError.
func Dial(ctx context.Context, m *rdmacm.Manager, address string, cfg Config) (*Conn, error) {
	c, err := dial(ctx, m, address, cfg)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: "rdma", Addr: peer(address), Err: err}
	}
	return c, nil
}

// peer is the address of a peer as the program named it.
type peer string

func (peer) Network() string  { return "rdma" }
func (p peer) String() string { return string(p) }

func dial(ctx context.Context, m *rdmacm.Manager, address string, cfg Config) (_ *Conn, err error) {
	cfg, err = cfg.withDefaults(m)
	if err != nil {
		return nil, err
	}
	c, err := newConn(ctx, m, cfg)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.abandon())
		}
	}()
	if c.cm, err = m.Dial(ctx, address, c.params()); err != nil {
		return nil, because(err)
	}
	hello, err := decodeConnData(c.cm.PrivateData())
	if err != nil {
		return nil, err
	}
	c.start(&hello)
	return c, nil
}

// because adds the text with which a Listener has rejected the request.
func because(err error) error {
	var e *rdmacm.RejectError
	if !errors.As(err, &e) {
		return err
	}
	text, _, _ := bytes.Cut(e.PrivateData, []byte{0})
	if len(text) == 0 {
		return err
	}
	return fmt.Errorf("%w: %q", err, text)
}

// accept accepts a request.
func accept(ctx context.Context, req *rdmacm.Request, m *rdmacm.Manager, cfg Config) (_ *Conn, err error) {
	hello, err := decodeConnData(req.PrivateData())
	if err != nil {
		_ = req.Reject(rdmacm.RejectConsumer, rejection(err)) // fails if the peer has given up
		return nil, err
	}
	c, err := newConn(ctx, m, cfg)
	if err != nil {
		_ = req.Reject(rdmacm.RejectNoResources, rejection(err))
		return nil, err
	}
	if c.cm, err = req.Accept(ctx, c.params()); err != nil {
		return nil, errors.Join(err, c.abandon())
	}
	c.start(&hello)
	return c, nil
}

// rejection returns an error's text as private data.
func rejection(err error) []byte {
	text := err.Error()
	return []byte(text[:min(len(text), rdmacm.MaxPrivateREJ)])
}

// newConn makes a connection's memory and state, before the peer knows of it.
func newConn(ctx context.Context, m *rdmacm.Manager, cfg Config) (*Conn, error) {
	mem, err := newMemory(ctx, m.Device(), &cfg)
	if err != nil {
		return nil, err
	}
	c := &Conn{cfg: cfg, mem: mem, polled: make(chan struct{}), closing: make(chan struct{}),
		readDeadline: newDeadline(), writeDeadline: newDeadline(), readable: make(signal, 1), writable: make(signal, 1),
		idle: make(signal, 1)}
	c.s = newStream(mem.buffer(), uint16(cfg.ReceiveQueue), cfg.SendBuffer, cfg.SendQueue, cfg.Maps, mem.take,
		mem.readIOMap)
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c, nil
}

// params are those of the connection manager. No end READs.
func (c *Conn) params() rdmacm.Params {
	qp := c.cfg.queuePair()
	return rdmacm.Params{PD: c.mem.pd, QP: qp, Access: guestdrv.AccessRemoteWrite, ResponderResources: rdmacm.None,
		InitiatorDepth: rdmacm.None, PrivateData: c.s.hello(c.mem.sgl()).encode(),
		Prepare: func(cm *rdmacm.Conn) error { return postReceives(cm.QP(), qp.MaxRecvWR) }}
}

// start begins to transfer data with what the peer has said.
func (c *Conn) start(hello *connData) {
	c.order = hello.order()
	c.s.connect(hello)
	c.mappings = make([]*Mapping, hello.iomaps)
	c.mu.Lock()
	c.pump()
	c.mu.Unlock()
	go c.poll()
}

// abandon releases a connection that was not made.
func (c *Conn) abandon() error {
	c.cancel()
	if c.cm != nil {
		if err := c.cm.Close(); err != nil {
			return err
		}
	}
	return c.mem.close()
}
