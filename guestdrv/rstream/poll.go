package rstream

import (
	"errors"
	"fmt"

	"github.com/vnicd/vnicd/guestdrv"
)

// The poller is a connection's goroutine: it handles completions, which are those of this end's messages and the
// messages of the peer, posts credit updates, and wakes Read, Write and Close.

// pollBatch is the number of completions that are handled at once.
const pollBatch = 32

// IDs of work requests. That of a data message also has the bytes of the send buffer that it holds.
const (
	dataID    = 0
	receiveID = 1 << 63
	controlID = 1 << 62 // control messages and credit updates
)

// postReceives fills the receive queue, before the peer can send.
func postReceives(qp *guestdrv.QP, n int) error {
	for range n {
		if err := qp.PostRecv(guestdrv.NewRecv(receiveID)); err != nil {
			return err
		}
	}
	return nil
}

func (c *Conn) poll() {
	defer close(c.polled)
	cq := c.cm.RecvCQ() // of both directions
	for {
		n, err := cq.PollWait(c.ctx, c.wcs[:])
		if err != nil {
			c.mu.Lock()
			c.fail(err)
			c.mu.Unlock()
			return
		}
		c.mu.Lock()
		failed := c.err
		for i := range c.wcs[:n] {
			c.complete(&c.wcs[i])
		}
		c.pump()
		if c.s.idle() || c.closed && c.s.out.posted == 0 {
			c.idle.set()
		}
		disconnect := failed == nil && c.err != nil
		c.mu.Unlock()
		if disconnect {
			_ = c.cm.Disconnect(c.ctx) // so that the peer knows at once; what remains is Close's
		}
	}
}

// complete handles a completion. c.mu is held.
func (c *Conn) complete(wc *guestdrv.Completion) {
	if err := wc.Err(); err != nil {
		c.lost(err)
		return
	}
	switch {
	case wc.ID == controlID:
		c.s.completed()
	case wc.ID != receiveID:
		c.s.out.completed(int(wc.ID))
		c.writable.set()
	case c.err != nil: // the peer's messages have no meaning any more
	case wc.Opcode != guestdrv.WCOpRecvRDMAWithImm:
		c.fail(violation("%v message of %d bytes, expected a WRITE with immediate data", wc.Opcode, wc.ByteLen))
	default:
		if err := c.s.receive(messageOf(wc.Imm)); err != nil {
			c.fail(err)
			return
		}
		if err := c.cm.QP().PostRecv(&again); err != nil {
			c.fail(err)
		}
		c.readable.set()
		c.writable.set()
	}
}

// again is the receive request of all messages: they bring no data that it could hold. It does not change.
var again = guestdrv.RecvWR{ID: receiveID}

// lost handles a request that has failed: the queue pair is in ERR. After the peer's DISCONNECT that is expected.
func (c *Conn) lost(err error) {
	if c.s.gone {
		return
	}
	if errors.Is(err, guestdrv.WCWRFlushErr) {
		if cause := c.cm.Err(); cause != nil {
			err = cause
		}
	}
	c.fail(fmt.Errorf("%w: %w", ErrReset, err))
}

// fail ends the connection; the first error stays. c.mu is held.
func (c *Conn) fail(err error) {
	if c.err == nil {
		c.err = err
	}
	c.readable.set()
	c.writable.set()
	c.idle.set()
}

// pump posts the control messages and credit updates that are due. c.mu is held.
func (c *Conn) pump() {
	for c.err == nil {
		p, ok := c.s.next()
		if !ok {
			return
		}
		var payload []byte
		if p.hasEntry {
			payload = c.entry[:]
			p.entry.encode(payload, c.order)
		}
		c.post(p, controlID, payload, guestdrv.SGE{})
	}
}

// post posts a WRITE, of a message or silent, with inline data or, if that is nil, with the data of an SGE. c.mu is
// held.
func (c *Conn) post(p post, id uint64, inline []byte, data guestdrv.SGE) {
	if p.silent {
		c.wr = *guestdrv.NewWrite(id|uint64(p.held), p.to)
	} else {
		c.wr = *guestdrv.NewWriteImm(id|uint64(p.held), p.to, p.msg.imm())
	}
	if c.wr.Inline = inline; inline == nil && data.Length > 0 {
		c.sgl[0] = data
		c.wr.SGL = c.sgl[:]
	}
	err := c.cm.QP().PostSend(&c.wr)
	c.wr.Inline = nil // the caller's
	if err != nil {
		c.fail(err) // the queue has room for all that stream permits
	}
}
