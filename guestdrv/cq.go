package guestdrv

import (
	"context"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// CQ is a completion queue. One goroutine at a time polls and arms it.
type CQ struct {
	d      *Device
	num    uint32
	ring   *ring
	armBuf *Buffer
	arm    *atomic.Uint32
	event  chan struct{} // holds one completion event
}

// CQOptions of a CQ; the zero value is usable.
type CQOptions struct {
	CEQ int // completion event queue, 0..Config().NumCEQs-1
}

// CreateCQ makes a CQ for at least n completions that are not yet polled. If more
// arrive, the device raises a CQ error event and the CQ is of no more use.
func (d *Device) CreateCQ(n int, o CQOptions) (*CQ, error) {
	if err := d.users.enter(); err != nil {
		return nil, err
	}
	defer d.users.leave()
	if n < 1 || int64(n) > int64(d.attr.MaxCQE) {
		return nil, invalid("CQ of %d entries, expected 1..%d", n, d.attr.MaxCQE)
	}
	r, err := newRing(d.mem, n, 1<<abi.WCLog2ElemSize, 0)
	if err != nil {
		return nil, err
	}
	// The arm word has a page of its own, as in a guest: rings are mapped into
	// user space there, the arm word is not.
	armBuf, err := d.mem.alloc(4, pageSize)
	if err != nil {
		r.free()
		return nil, err
	}
	cq := &CQ{d: d, ring: r, armBuf: armBuf, arm: atomic32(armBuf.data, 0), event: make(chan struct{}, 1)}
	req := abi.CreateCQ{Ring: r.desc(), ArmPA: armBuf.PA(), CEQ: uint32(o.CEQ)}
	var h abi.Handle
	// Holding mu keeps an event from being looked up before the CQ is in the table.
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.do(abi.CmdCreateCQ, &req, abi.SizeCreateCQ, &h, r.pages()...); err != nil {
		r.free()
		armBuf.Free()
		return nil, err
	}
	cq.num = h.Handle
	d.cqs[cq.num] = cq
	return cq, nil
}

// Number is the CQ's number in the device.
func (c *CQ) Number() uint32 { return c.num }

// Cap is the number of completions that the CQ holds.
func (c *CQ) Cap() int { return int(c.ring.mask) }

// Poll moves up to len(wcs) completions into wcs and returns their number.
func (c *CQ) Poll(wcs []abi.WC) int {
	cons, prod := c.ring.cons.Load()&c.ring.mask, c.ring.prod.Load()&c.ring.mask
	n := 0
	for n < len(wcs) && cons != prod {
		_ = wcs[n].Decode(c.ring.elem(cons)) // a slot is never too short
		cons = (cons + 1) & c.ring.mask
		n++
	}
	if n > 0 {
		c.ring.cons.Store(cons)
	}
	return n
}

// Arm asks for one event for the next completion, or, with solicitedOnly, for
// the next that is solicited or failed. It reports whether completions are
// already waiting, which may have come too early to raise the event: poll again
// then.
func (c *CQ) Arm(solicitedOnly bool) (missed bool) {
	v := uint32(abi.ArmNext)
	if solicitedOnly {
		v = abi.ArmSolicited
	}
	c.arm.Store(v)
	return c.ring.pending() > 0
}

// Wait blocks until an event came that no Wait has returned for.
func (c *CQ) Wait(ctx context.Context) error {
	select {
	case <-c.event:
		return nil
	default:
	}
	select {
	case <-c.event:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-c.d.ctx.Done():
	case <-c.d.fe.Gone():
	}
	return c.d.closing()
}

// PollWait is Poll that waits, by arming the CQ, until at least one completion is there.
func (c *CQ) PollWait(ctx context.Context, wcs []abi.WC) (int, error) {
	for {
		n, again, err := c.pollArm(wcs)
		if n > 0 || len(wcs) == 0 || err != nil {
			return n, err
		}
		if again {
			continue
		}
		if err := c.Wait(ctx); err != nil {
			return 0, err
		}
	}
}

// pollArm polls, and arms the CQ if there was nothing; again says that there now is.
func (c *CQ) pollArm(wcs []abi.WC) (n int, again bool, err error) {
	if err := c.d.users.enter(); err != nil {
		return 0, false, err
	}
	defer c.d.users.leave()
	if n = c.Poll(wcs); n == 0 {
		again = c.Arm(false)
	}
	return n, again, nil
}

// Resize moves the CQ to a ring for at least n completions. Nobody may poll meanwhile.
func (c *CQ) Resize(n int) error {
	if err := c.d.users.enter(); err != nil {
		return err
	}
	defer c.d.users.leave()
	if n < 1 || int64(n) > int64(c.d.attr.MaxCQE) {
		return invalid("CQ of %d entries, expected 1..%d", n, c.d.attr.MaxCQE)
	}
	r, err := newRing(c.d.mem, n, 1<<abi.WCLog2ElemSize, 0)
	if err != nil {
		return err
	}
	req := abi.ResizeCQ{CQN: c.num, Ring: r.desc()}
	if err := c.d.do(abi.CmdResizeCQ, &req, abi.SizeResizeCQ, nil, r.pages()...); err != nil {
		r.free()
		return err
	}
	c.ring.free()
	c.ring = r
	return nil
}

// Destroy fails with abi.StatusBusy while a QP uses the CQ.
func (c *CQ) Destroy() error {
	if err := c.d.onHandle(abi.CmdDestroyCQ, c.num, nil); err != nil {
		return err
	}
	c.d.mu.Lock()
	delete(c.d.cqs, c.num)
	c.d.mu.Unlock()
	c.ring.free()
	c.armBuf.Free()
	return nil
}
