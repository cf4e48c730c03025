// Side: control

package hca

import (
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// Commands about completion queues and shared receive queues.

func createCQ(c *cmd) error {
	var r abi.CreateCQ
	if err := r.Decode(c.in); err != nil {
		return err
	}
	list, err := c.pages(abi.SizeCreateCQ, r.Ring.NPages)
	switch {
	case err != nil:
		return err
	case len(c.t.cqs) >= c.d.lim.CQs:
		return &limitError{what: "completion queues", n: uint64(len(c.t.cqs)) + 1, max: uint64(c.d.lim.CQs)}
	case int(r.CEQ) >= len(c.d.data.ceqs):
		return refuse(abi.StatusInvalid, "completion event queue %d, the device has %d", r.CEQ, len(c.d.data.ceqs))
	case r.ArmPA&3 != 0:
		return refuse(abi.StatusInvalid, "arm word at PA %#x is not 4-byte aligned", r.ArmPA)
	}
	ring, err := c.cqRing(&r.Ring, list)
	if err != nil {
		return err
	}
	h, err := c.hold(ringRanges(&r.Ring, list), []translate.Range{{PA: translate.PA(r.ArmPA), N: 4}})
	if err != nil {
		return err
	}
	q := newCQ(c.d.data, takeID(c, c.t.cqs, &c.t.lastCQ), ring, translate.PA(r.ArmPA), c.d.data.ceqs[r.CEQ])
	o := &cqObject{q: q, ring: h[0], arm: h[1], cost: cqCost(&ring)}
	if err := o.cost.charge(c.d.account); err != nil {
		dropAll(h)
		return err
	}
	err = c.epoch(func() error {
		if _, m := c.d.data.space().RingUint32(q.arm); !m.OK() {
			return &faultError{what: "arm word", miss: m}
		}
		if m := q.start(); !m.OK() {
			return &faultError{what: "completion ring", miss: m}
		}
		return nil
	})
	if err != nil {
		o.drop(c.d.account)
		return err
	}
	if j := c.d.journaled(); j != nil {
		j.giveWord(o)
	}
	c.t.cqs[q.n] = o
	c.touch(recCQ, q.n)
	(&abi.Handle{Handle: q.n}).Encode(c.reply(abi.SizeHandle))
	return nil
}

// ring decodes a ring that the command requires.
func (c *cmd) ring(a *abi.Ring, list []byte, minElem, maxElems int) (ring, error) {
	if a.NPages == 0 {
		return ring{}, refuse(abi.StatusInvalid, "the ring has no pages")
	}
	return newRing(c.d.data.space(), a, list, minElem, maxElems)
}

// cqRing is ring for completions. All of its memory is held, so elements are at most twice as large as a completion.
func (c *cmd) cqRing(a *abi.Ring, list []byte) (ring, error) {
	if a.NPages != 0 && a.Log2ElemSize > abi.WCLog2ElemSize+1 {
		return ring{}, refuse(abi.StatusInvalid, "log2_elem_size of a completion ring is %d, must be %d..%d", a.Log2ElemSize,
			abi.WCLog2ElemSize, abi.WCLog2ElemSize+1)
	}
	return c.ring(a, list, abi.SizeWC, c.d.lim.CQEs)
}

// ringRanges returns the memory of a ring that has been checked.
func ringRanges(a *abi.Ring, list []byte) []translate.Range {
	return rangesOf(decodePAs(list), 1<<a.PageShift, a.Length)
}

// onOwner runs f where no other thread uses an object of that owner: on the
// owner's loop, or on this goroutine if the object has no owner.
func (c *cmd) onOwner(e *engine, f func() error) error {
	if e == nil {
		return c.epoch(f)
	}
	return c.on(e, f)
}

func resizeCQ(c *cmd) error {
	var r abi.ResizeCQ
	if err := r.Decode(c.in); err != nil {
		return err
	}
	list, err := c.pages(abi.SizeResizeCQ, r.Ring.NPages)
	if err != nil {
		return err
	}
	o, err := c.t.cq(r.CQN)
	if err != nil {
		return err
	}
	ring, err := c.cqRing(&r.Ring, list)
	if err != nil {
		return err
	}
	h, err := c.hold(ringRanges(&r.Ring, list))
	if err != nil {
		return err
	}
	// The VM pays for both rings until the old one is released.
	resized := listCost(&ring)
	if err = resized.charge(c.d.account); err == nil {
		if err = c.moveCQ(o, ring); err != nil {
			resized.credit(c.d.account)
		}
	}
	if err != nil {
		dropAll(h)
		return err
	}
	o.cost.swapList(c.d.account, resized)
	o.ring.drop()
	o.ring = h[0]
	c.touch(recCQ, r.CQN)
	return nil
}

// moveCQ moves a CQ to a new ring, in parts.
func (c *cmd) moveCQ(o *cqObject, to ring) error {
	var m cqMove
	err := c.onOwner(o.owner, func() (err error) {
		m, err = o.q.startMove(to)
		return err
	})
	for done := false; err == nil && !done; {
		err = c.onOwner(o.owner, func() (err error) {
			done, err = o.q.continueMove(&m, func() {
				c.effect(func(j *controlJournal) { j.swapWord(c.d, o) })
			})
			return err
		})
	}
	return err
}

func modifyCQ(c *cmd) error {
	var r abi.ModifyCQ
	if err := r.Decode(c.in); err != nil {
		return err
	}
	o, err := c.t.cq(r.CQN)
	if err != nil {
		return err
	}
	o.moderate(r.Count, r.Period)
	c.touch(recCQ, r.CQN)
	return nil
}

func destroyCQ(c *cmd) error {
	n, err := c.handle()
	if err != nil {
		return err
	}
	o, err := c.t.cq(n)
	if err != nil {
		return err
	}
	if o.refs > 0 {
		return refuse(abi.StatusBusy, "completion queue %d is used by %d queue pairs", n, o.refs)
	}
	delete(c.t.cqs, n)
	c.touch(recCQ, n)
	if j := c.d.journaled(); j != nil {
		j.takeWord(o)
	}
	o.drop(c.d.account)
	o.q.delayed.Store(false)
	o.q.ceq.drop(&o.q.comp)
	c.d.data.async.drop(&o.q.asyn)
	return nil
}

func createSRQ(c *cmd) error {
	var r abi.CreateSRQ
	if err := r.Decode(c.in); err != nil {
		return err
	}
	list, err := c.pages(abi.SizeCreateSRQ, r.Ring.NPages)
	if err != nil {
		return err
	}
	p, err := c.t.pd(r.PDN)
	switch {
	case err != nil:
		return err
	case len(c.t.srqs) >= c.d.lim.SRQs:
		return &limitError{what: "shared receive queues", n: uint64(len(c.t.srqs)) + 1, max: uint64(c.d.lim.SRQs)}
	case r.MaxSGE > uint32(c.d.lim.SRQSGEs):
		return &limitError{what: "segments of an SRQ's work requests", n: uint64(r.MaxSGE), max: uint64(c.d.lim.SRQSGEs)}
	}
	ring, err := c.ring(&r.Ring, list, recvWQESize(int(r.MaxSGE)), c.d.lim.SRQWRs)
	if err != nil {
		return err
	}
	if r.Limit > ring.mask {
		return refuse(abi.StatusInvalid, "limit %d, the ring holds %d requests", r.Limit, ring.mask)
	}
	cost := srqCost(&ring, int(r.MaxSGE))
	if err := cost.charge(c.d.account); err != nil {
		return err
	}
	s := newSRQ(c.d.data, takeID(c, c.t.srqs, &c.t.lastSRQ), int(r.MaxSGE), r.Limit, ring)
	err = c.epoch(func() error {
		if m := s.wr.start(); !m.OK() {
			return &faultError{what: "shared receive queue", miss: m}
		}
		return nil
	})
	if err != nil {
		cost.credit(c.d.account)
		return err
	}
	p.refs++
	c.t.srqs[s.n] = &srqObject{q: s, pdn: r.PDN, cost: cost}
	c.touch(recSRQObject, s.n)
	(&abi.Handle{Handle: s.n}).Encode(c.reply(abi.SizeHandle))
	return nil
}

func modifySRQ(c *cmd) error {
	var r abi.ModifySRQ
	if err := r.Decode(c.in); err != nil {
		return err
	}
	list, err := c.pages(abi.SizeModifySRQ, r.Ring.NPages)
	if err != nil {
		return err
	}
	o, err := c.t.srq(r.SRQN)
	switch {
	case err != nil:
		return err
	case r.Flags&^uint32(abi.SRQLimit|abi.SRQResize) != 0:
		return refuse(abi.StatusInvalid, "flags %#x, known are %#x", r.Flags, abi.SRQLimit|abi.SRQResize)
	case r.Flags&abi.SRQResize == 0 && r.Ring.NPages != 0:
		return refuse(abi.StatusInvalid, "a ring without the resize flag")
	}
	s := o.q
	var ring ring
	var resized cost
	if r.Flags&abi.SRQResize != 0 {
		if ring, err = c.ring(&r.Ring, list, recvWQESize(s.maxSGE), c.d.lim.SRQWRs); err != nil {
			return err
		}
		resized = listCost(&ring)
		if err := resized.charge(c.d.account); err != nil {
			return err
		}
	}
	err = c.onOwner(o.owner, func() error {
		if o.owner != nil {
			o.owner.commitNow()
		}
		mask := s.wr.mask
		if r.Flags&abi.SRQResize != 0 {
			mask = ring.mask
		}
		if r.Flags&abi.SRQLimit != 0 && r.Limit > mask {
			return refuse(abi.StatusInvalid, "limit %d, the ring holds %d requests", r.Limit, mask)
		}
		if r.Flags&abi.SRQResize != 0 {
			if err := s.resize(ring); err != nil {
				return err
			}
		}
		if r.Flags&abi.SRQLimit != 0 {
			s.limit = r.Limit
		}
		c.effect(func(j *controlJournal) { j.addSRQ(o) })
		return nil
	})
	switch {
	case err != nil:
		resized.credit(c.d.account)
	case r.Flags&abi.SRQResize != 0:
		o.cost.swapList(c.d.account, resized)
	}
	return err
}

func querySRQ(c *cmd) error {
	n, err := c.handle()
	if err != nil {
		return err
	}
	o, err := c.t.srq(n)
	if err != nil {
		return err
	}
	var a abi.SRQAttr
	err = c.onOwner(o.owner, func() error {
		a.Limit = o.q.limit
		return nil
	})
	a.Encode(c.reply(abi.SizeSRQAttr))
	return err
}

func destroySRQ(c *cmd) error {
	n, err := c.handle()
	if err != nil {
		return err
	}
	o, err := c.t.srq(n)
	if err != nil {
		return err
	}
	if o.refs > 0 {
		return refuse(abi.StatusBusy, "shared receive queue %d is used by %d queue pairs", n, o.refs)
	}
	delete(c.t.srqs, n)
	c.touch(recSRQObject, n)
	o.cost.credit(c.d.account)
	c.t.pds[o.pdn].refs--
	c.d.data.async.drop(&o.q.asyn)
	return nil
}
