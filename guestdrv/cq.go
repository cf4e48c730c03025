package guestdrv

import (
	"context"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// CQ is a completion queue. One goroutine at a time polls and arms it.
type CQ struct {
	*object
	ring   *ring
	spare  *ring // the other ring of an unanswered Resize, see there
	armBuf *Buffer
	arm    *atomic.Uint32
	event  chan struct{} // holds one completion event
}

// CQOptions are options of CreateCQ. The zero value is usable.
type CQOptions struct {
	CEQ int // completion event queue that serves Wait, 0..Info.NumCEQs-1
}

// CreateCQ makes a CQ for at least n unpolled completions, 1..DeviceAttr.MaxCQE. If more arrive, the device raises
// EventCQErr and the CQ is unusable.
func (d *Device) CreateCQ(ctx context.Context, n int, o CQOptions) (*CQ, error) {
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
	// The arm word has its own page, as in a guest: there, rings are mapped into user space and the arm word is not.
	armBuf, err := d.mem.alloc(4, pageSize)
	if err != nil {
		r.free()
		return nil, err
	}
	cq := &CQ{ring: r, armBuf: armBuf, arm: atomic32(armBuf.data, 0), event: make(chan struct{}, 1)}
	req := abi.CreateCQ{Ring: r.desc(), ArmPA: armBuf.PA(), CEQ: uint32(o.CEQ)}
	var h abi.Handle
	err = d.create(ctx, creation{
		request: request{op: abi.CmdCreateCQ, fixed: &req, size: abi.SizeCreateCQ, words: r.pages()},
		resp:    &h, destroy: abi.CmdDestroyCQ, free: cq.freeMemory,
	})
	if err != nil {
		return nil, err
	}
	cq.object = &object{d: d, destroy: abi.CmdDestroyCQ, handle: h.Handle, free: func() {
		d.mu.Lock()
		if d.cqs[h.Handle] == cq { // the device may have given the number to another CQ
			delete(d.cqs, h.Handle)
		}
		d.mu.Unlock()
		cq.freeMemory()
	}}
	// The device raises events only after Arm, so none precedes this entry.
	d.mu.Lock()
	d.cqs[h.Handle] = cq
	d.mu.Unlock()
	return cq, nil
}

func (c *CQ) freeMemory() {
	c.ring.free()
	if c.spare != nil {
		c.spare.free()
	}
	c.armBuf.free()
}

// Number returns the CQ's number in the device, as in Event.Handle.
func (c *CQ) Number() uint32 { return c.handle }

// Cap returns the number of unpolled completions for which the CQ has room, at least what CreateCQ or Resize requested.
func (c *CQ) Cap() int { return int(c.ring.mask) }

// Poll moves up to len(wcs) completions into wcs, oldest first, and returns their number. It does not wait. Nor does it
// notice that the connection to vnicd is lost: see Device.Done.
func (c *CQ) Poll(wcs []Completion) int {
	cons, prod := c.ring.cons.Load()&c.ring.mask, c.ring.prod.Load()&c.ring.mask
	n := 0
	for n < len(wcs) && cons != prod {
		wcs[n].decode(c.ring.elem(cons))
		cons = (cons + 1) & c.ring.mask
		n++
	}
	if n > 0 {
		c.ring.cons.Store(cons)
	}
	return n
}

// Arm requests one event for the next completion or, with solicitedOnly, for the next that is solicited or failed. It
// reports whether completions are present already: these may have arrived before Arm and raise no event, so poll again.
func (c *CQ) Arm(solicitedOnly bool) (missed bool) {
	v := uint32(abi.ArmNext)
	if solicitedOnly {
		v = abi.ArmSolicited
	}
	c.arm.Store(v)
	return c.ring.pending() > 0
}

// Wait waits for the event that Arm requested. An event that arrives while no goroutine waits is kept for the next
// Wait, so the CQ may be empty when Wait returns. When the device becomes unusable, Wait fails with Device.Err.
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
	case <-c.d.done:
		return c.d.Err()
	}
}

// PollWait is Poll, but arms the CQ and waits until there is at least one completion. It returns nil for completions of
// failed requests, too: see Completion.Err.
func (c *CQ) PollWait(ctx context.Context, wcs []Completion) (int, error) {
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

// pollArm polls, and arms the CQ if it is empty. again reports that completions have arrived meanwhile.
func (c *CQ) pollArm(wcs []Completion) (n int, again bool, err error) {
	if err := c.d.users.enter(); err != nil {
		return 0, false, err
	}
	defer c.d.users.leave()
	if n = c.Poll(wcs); n == 0 {
		again = c.Arm(false)
	}
	return n, again, nil
}

// Resize moves the CQ to a ring for at least n completions. The CQ must not be polled meanwhile. If Resize ends with
// its context or with ErrTimeout, it is unknown which ring the device uses: the CQ can only be closed, which releases
// both.
func (c *CQ) Resize(ctx context.Context, n int) error {
	d := c.d
	if err := d.users.enter(); err != nil {
		return err
	}
	defer d.users.leave()
	if n < 1 || int64(n) > int64(d.attr.MaxCQE) {
		return invalid("CQ of %d entries, expected 1..%d", n, d.attr.MaxCQE)
	}
	if c.spare != nil {
		return invalid("the outcome of an earlier Resize is unknown")
	}
	r, err := newRing(d.mem, n, 1<<abi.WCLog2ElemSize, 0)
	if err != nil {
		return err
	}
	req := abi.ResizeCQ{CQN: c.handle, Ring: r.desc()}
	abandoned, err := d.call(ctx, request{op: abi.CmdResizeCQ, fixed: &req, size: abi.SizeResizeCQ, words: r.pages()}, nil)
	switch {
	case abandoned:
		c.spare = r
		return err
	case err != nil:
		r.free()
		return err
	}
	c.ring.free()
	c.ring = r
	return nil
}

// Close destroys the CQ. It fails with StatusBusy while a QP uses the CQ.
func (c *CQ) Close() error { return c.close() }
