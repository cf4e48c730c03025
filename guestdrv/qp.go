package guestdrv

import (
	"context"
	"fmt"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// QPConfig describes a QP. Type and the CQs are required. DeviceAttr has the limits of the numbers.
type QPConfig struct {
	Type           QPType
	SendCQ, RecvCQ *CQ  // may be the same
	SRQ            *SRQ // takes the place of a receive queue; or nil
	MaxSendWR      int  // outstanding send requests, at least; 0 means 1
	MaxRecvWR      int  // outstanding receive requests, at least; 0 means 1
	MaxSendSGE     int  // of a request; 0 means 1
	MaxRecvSGE     int  // of a request; 0 means 1
	MaxInline      int  // bytes of inline data in a request
	SigAll         bool // every send request completes as with SendSignaled
	Privileged     bool // may use DMALKey with PAs (RA-2), and NewRegister
}

// QP is a queue pair. One goroutine at a time posts send requests, and one posts receive requests.
type QP struct {
	*object
	recvQueue // empty if the QP uses an SRQ
	num       uint32
	typ       QPType
	sq        *ring
	maxSGE    int
	maxInline int
	db        *doorbell
	slot      uint32
}

// CreateQP makes a QP in state RESET. See QP.Connect and QP.StartUD for the next step.
func (p *PD) CreateQP(ctx context.Context, c QPConfig) (*QP, error) {
	if err := p.d.users.enter(); err != nil {
		return nil, err
	}
	defer p.d.users.leave()
	d := p.d
	if c.SendCQ == nil || c.RecvCQ == nil {
		return nil, invalid("a QP needs a send and a receive CQ")
	}
	c.MaxSendSGE, c.MaxRecvSGE = max(c.MaxSendSGE, 1), max(c.MaxRecvSGE, 1)
	c.MaxSendWR, c.MaxRecvWR = max(c.MaxSendWR, 1), max(c.MaxRecvWR, 1)
	if most := int64(d.attr.MaxQPWR); int64(c.MaxSendWR) > most || int64(c.MaxRecvWR) > most {
		return nil, invalid("%d send and %d receive requests, at most %d", c.MaxSendWR, c.MaxRecvWR, most)
	}
	if most := int64(d.attr.MaxSGE); int64(c.MaxSendSGE) > most || int64(c.MaxRecvSGE) > most {
		return nil, invalid("%d send and %d receive SGEs, at most %d", c.MaxSendSGE, c.MaxRecvSGE, most)
	}
	if c.MaxInline < 0 || int64(c.MaxInline) > int64(d.attr.MaxInline) {
		return nil, invalid("%d bytes of inline data, expected 0..%d", c.MaxInline, d.attr.MaxInline)
	}
	sq, err := newRing(d.mem, c.MaxSendWR, abi.SizeSendWQE+max(c.MaxSendSGE*abi.SizeSGE, c.MaxInline), 0)
	if err != nil {
		return nil, err
	}
	q := &QP{typ: c.Type, sq: sq, maxSGE: c.MaxSendSGE, maxInline: c.MaxInline}
	req := abi.CreateQP{
		Type: uint32(c.Type), PDN: p.handle, SendCQN: c.SendCQ.handle, RecvCQN: c.RecvCQ.handle,
		MaxSendSGE: uint32(c.MaxSendSGE), MaxInline: uint32(c.MaxInline), SQ: sq.desc(),
	}
	pages := sq.pages()
	if c.SigAll {
		req.Flags |= abi.QPSigAll
	}
	if c.Privileged {
		req.Flags |= abi.QPPrivileged
	}
	if c.SRQ != nil {
		req.Flags |= abi.QPHasSRQ
		req.SRQN = c.SRQ.handle
	} else {
		if q.recvQueue, err = newRecvQueue(d.mem, c.MaxRecvWR, c.MaxRecvSGE); err != nil {
			sq.free()
			return nil, err
		}
		req.MaxRecvSGE, req.RQ = uint32(c.MaxRecvSGE), q.ring.desc()
		pages = append(pages, q.ring.pages()...)
	}
	var resp abi.CreateQPResp
	err = d.create(ctx, creation{
		request: request{op: abi.CmdCreateQP, fixed: &req, size: abi.SizeCreateQP, words: pages},
		resp:    &resp, destroy: abi.CmdDestroyQP, free: q.freeRings,
	})
	if err != nil {
		return nil, err
	}
	q.object = &object{d: d, destroy: abi.CmdDestroyQP, handle: resp.QPN, free: q.freeRings}
	if int64(resp.Engine) >= int64(len(d.dbs)) || resp.DBSlot >= abi.DoorbellSlots {
		_ = q.Close()
		return nil, fmt.Errorf("malformed response to CREATE_QP: engine %d, doorbell %d", resp.Engine, resp.DBSlot)
	}
	q.num, q.db, q.slot = resp.QPN, d.dbs[resp.Engine], resp.DBSlot
	return q, nil
}

func (q *QP) freeRings() {
	q.sq.free()
	if q.ring != nil {
		q.ring.free()
	}
}

// Number returns the QP's number, which its peers need: Peer.QPN, Datagram.QPN.
func (q *QP) Number() uint32 { return q.num }

// Type returns the QP's type.
func (q *QP) Type() QPType { return q.typ }

// Close destroys the QP. Outstanding requests do not complete. No goroutine may post meanwhile or afterwards.
func (q *QP) Close() error { return q.close() }

// PostSend queues a request and rings the doorbell. It fails with ErrFull if the queue is full, which holds at least
// QPConfig.MaxSendWR outstanding requests, or with ErrInvalid if the request does not fit the QP, or its SGEs have 4
// GiB or more together. It does not check the QP's state. Errors of the request itself are in its Completion. PostSend
// copies the request, neither blocks nor allocates, and takes no lock.
func (q *QP) PostSend(wr *SendWR) error {
	if err := q.QueueSend(wr); err != nil {
		return err
	}
	q.Ring()
	return nil
}

// QueueSend is PostSend without the doorbell: queue several requests, then call Ring once. The device may start them
// earlier.
func (q *QP) QueueSend(wr *SendWR) error {
	switch {
	case len(wr.Inline) > q.maxInline:
		return errInlineLen
	case wr.Inline == nil && len(wr.SGL) > q.maxSGE:
		return errTooManySGEs
	}
	slot := q.sq.room()
	if slot == nil {
		return ErrFull
	}
	if err := wr.encode(q, slot); err != nil {
		return err
	}
	q.sq.publish()
	return nil
}

// Ring rings the doorbell: it notifies the device of queued requests.
func (q *QP) Ring() { q.db.ring(q.slot) }

// Outstanding returns the number of send requests that have not completed.
func (q *QP) Outstanding() int { return q.sq.pending() }
