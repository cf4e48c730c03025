package rstream

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/guestdrv/rdmacm"
)

// Conn is a connection, a net.Conn. All methods may be called from any goroutine; calls of Read wait for each other,
// as do calls of Write.
type Conn struct {
	cm  *rdmacm.Conn
	cfg Config
	mem *memory

	ctx     context.Context // of the poller; Close ends it
	cancel  context.CancelFunc
	polled  chan struct{}                  // closed when the poller has ended
	wcs     [pollBatch]guestdrv.Completion // the poller's
	closing chan struct{}                  // closed by Close

	readDeadline, writeDeadline *deadline
	readable, writable, idle    signal

	// Locks, in this order: reading and writing are each held for the length of a call; mu is for the fields below it
	// and for posting to the send queue.
	reading, writing sync.Mutex
	closeMu          sync.Mutex // held by Close
	mu               sync.Mutex
	s                *stream
	err              error // why the connection has failed
	closed           bool
	order            binary.ByteOrder // of the peer's SGL; set before the poller starts
	entry            [sgeLen]byte     // the payload of a credit update
	mappings         []*Mapping       // by their index in the peer's table; nil: free

	wr  guestdrv.SendWR // the request that is being posted, and its SGL
	sgl [1]guestdrv.SGE
}

// signal holds a token after something has changed. One goroutine at a time waits for it, and looks itself afterwards.
type signal chan struct{}

func (s signal) set() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// Addr is the address of an end, a net.Addr.
type Addr struct{ netip.AddrPort }

// Network returns "rdma".
func (Addr) Network() string { return "rdma" }

// LocalAddr returns this end's address and port, an Addr.
func (c *Conn) LocalAddr() net.Addr { return Addr{c.cm.LocalAddr()} }

// RemoteAddr returns the peer's address and port, an Addr.
func (c *Conn) RemoteAddr() net.Addr { return Addr{c.cm.RemoteAddr()} }

// SetDeadline sets the deadlines of Read and Write, pending and future; the zero time is none. After it they fail with
// an error that is os.ErrDeadlineExceeded and a net.Error with Timeout() true. Data that a Write has reported stays on
// its way.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline sets the deadline of Read, see SetDeadline.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.setDeadline(c.readDeadline, t) }

// SetWriteDeadline sets the deadline of Write, see SetDeadline.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.setDeadline(c.writeDeadline, t) }

func (c *Conn) setDeadline(d *deadline, t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock() // so that Close stops the timer of the last setting
	if c.closed {
		return c.opError("set", net.ErrClosed)
	}
	d.set(t)
	return nil
}

// Read reads at least one byte, unless b is empty. It returns io.EOF after all data if the peer has closed its
// direction or the connection. If the connection has failed, it returns ErrReset or ErrProtocol after the data that
// had arrived.
func (c *Conn) Read(b []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	for {
		off, n, err := c.readState()
		if err != nil {
			if err == io.EOF {
				return 0, err
			}
			return 0, c.opError("read", err)
		}
		if len(b) == 0 {
			return 0, nil
		}
		if n > 0 {
			k := copy(b, c.mem.received(off, n))
			c.mu.Lock()
			c.s.in.consumed(uint32(k))
			c.pump()
			c.mu.Unlock()
			return k, nil
		}
		select {
		case <-c.readable:
		case <-c.readDeadline.done():
		case <-c.closing:
		}
	}
}

// readState returns what can be read, or why nothing can be read any more.
func (c *Conn) readState() (off, n uint32, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	off, n = c.s.in.readable()
	switch {
	case c.closed:
		err = net.ErrClosed
	case c.readDeadline.over():
		err = os.ErrDeadlineExceeded
	case n > 0:
	case c.s.finished:
		err = io.EOF
	default:
		err = c.err
	}
	return off, n, err
}

// Write writes b. It returns when the data is on its way, in the send buffer or inline, and waits for the peer to
// read if its receive buffer is full. n is the number of bytes that the peer gets even if there is an error, unless
// the connection fails. The error is ErrShutdown after CloseWrite, ErrReset if the peer has closed the connection, or
// why it has failed.
func (c *Conn) Write(b []byte) (n int, err error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	for {
		k, err := c.writeSome(b[n:])
		n += k
		if err != nil {
			return n, c.opError("write", err)
		}
		if n == len(b) {
			return n, nil
		}
		if k > 0 {
			continue
		}
		select {
		case <-c.writable:
		case <-c.writeDeadline.done():
		case <-c.closing:
		}
	}
}

// writeSome posts a message with the first bytes of b, as far as there is room. c.writing is held.
func (c *Conn) writeSome(b []byte) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.writeState(); err != nil || len(b) == 0 {
		return 0, err
	}
	n, inline, err := c.s.out.plan(len(b))
	if err != nil {
		c.fail(err)
	}
	if n == 0 || err != nil {
		return 0, err
	}
	off, err := c.stage(b[:n], inline)
	if err != nil {
		return 0, err
	}
	c.postStaged(c.s.out.commit(n, inline), b[:n], off, inline)
	return n, c.err
}

// stage copies data that is not sent inline to the head of the send buffer, and returns where that is. c.writing is
// held, and c.mu, which it releases meanwhile.
func (c *Conn) stage(b []byte, inline bool) (off int, err error) {
	if inline {
		return 0, nil
	}
	off = c.s.out.head // changed with c.writing held only
	c.mu.Unlock()
	copy(c.mem.outgoing(off, len(b)), b)
	c.mu.Lock()
	if err := c.writeState(); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return 0, err
	}
	return off, nil
}

// postStaged posts a WRITE of data that stage has been given. c.mu is held.
func (c *Conn) postStaged(p post, b []byte, off int, inline bool) {
	if inline {
		c.post(p, dataID, b, guestdrv.SGE{})
	} else {
		c.post(p, dataID, nil, c.mem.out.SGE(off, len(b)))
	}
}

// writeState returns why nothing can be written any more. c.mu is held.
func (c *Conn) writeState() error {
	switch {
	case c.closed:
		return net.ErrClosed
	case c.err != nil:
		return c.err
	case !c.s.out.writable:
		return ErrShutdown
	case c.s.gone:
		return fmt.Errorf("%w: closed by the peer", ErrReset)
	case c.writeDeadline.over():
		return os.ErrDeadlineExceeded
	}
	return nil
}

// CloseWrite ends the direction to the peer, whose reads return io.EOF after all data. This end can still read. A
// Write that waits fails with ErrShutdown.
func (c *Conn) CloseWrite() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return c.opError("close", net.ErrClosed)
	case c.err != nil:
		return c.opError("close", c.err)
	}
	c.s.closeWrite()
	c.pump()
	c.writable.set()
	return nil
}

// Close ends the connection and releases its memory. Pending calls fail with net.ErrClosed. It waits until the peer's
// device has received what was written, at most Config.CloseTimeout, after which it fails with os.ErrDeadlineExceeded
// and the peer may have lost data; the connection is closed then, too. Close may be repeated after an error; further
// calls return nil.
func (c *Conn) Close() error {
	c.mu.Lock()
	if !c.closed {
		c.closed = true
		close(c.closing)
		c.readDeadline.stop()
		c.writeDeadline.stop()
		c.s.close()
		c.pump()
	}
	c.mu.Unlock()
	c.closeMu.Lock()
	defer c.closeMu.Unlock()
	// Reads and writes copy from and to memory that is released below.
	c.reading.Lock()
	defer c.reading.Unlock()
	c.writing.Lock()
	defer c.writing.Unlock()
	err := c.drain()
	if e := c.release(); e != nil {
		return c.opError("close", e)
	}
	if err != nil {
		return c.opError("close", err)
	}
	return nil
}

// disconnectWait bounds how long Close waits for the acknowledgement of DISCONNECT alone: a peer that closes at the
// same time may have destroyed its queue pair. The connection manager tells it, too.
const disconnectWait = time.Second

// drain waits until all that was sent has arrived, or cannot arrive any more.
func (c *Conn) drain() error {
	data, all := time.NewTimer(c.cfg.CloseTimeout), time.NewTimer(min(disconnectWait, c.cfg.CloseTimeout))
	defer data.Stop()
	defer all.Stop()
	late, expired := false, false
	for {
		c.mu.Lock()
		done := c.s.idle() || c.s.gone || c.err != nil || late && c.s.out.posted == 0
		c.mu.Unlock()
		switch {
		case done:
			return nil
		case expired:
			return fmt.Errorf("the peer's device does not acknowledge data: %w", os.ErrDeadlineExceeded)
		}
		select {
		case <-c.idle:
		case <-c.polled:
			return nil
		case <-all.C:
			late = true
		case <-data.C:
			late, expired = true, true
		}
	}
}

// release ends the poller and releases everything. It may be repeated after an error.
func (c *Conn) release() error {
	c.cancel()
	<-c.polled
	if err := c.cm.Close(); err != nil {
		return err
	}
	if err := c.unmap(); err != nil {
		return err
	}
	if err := c.mem.close(); err != nil && c.cm.Manager().Device().Err() == nil {
		return err // a device that is lost has destroyed everything
	}
	return nil
}

func (c *Conn) opError(op string, err error) error {
	return &net.OpError{Op: op, Net: "rdma", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}
