// Side: data

package hca

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// The host pages behind its guest's back. A guest that has done all that it must
// for a message to arrive should not lose the first one to each part of its memory:
// programs that talk UC or UD over a good network do not expect that at all, and
// the connection manager waits seconds for its next try. So what meets a page that
// is absent on the host is kept, and what comes behind it too, in order, until the
// page is there. What finds no room, and all that meets a page absent in the guest,
// is dropped (PF-11). What has to wait for an invalidation is kept likewise (manage.go).

// Bounds of what is kept, for buffers are the host's, for all VMs; together they keep half of the pool at most.
const (
	maxKept     = 64  // by one QP: a message of 64 KiB in packets of 1 KiB
	maxLaneKept = 256 // by all QPs of an engine
	maxLaneHeld = 512 // ... ahead of their turn
)

// Keep implements roce.Adapter.
func (q *qp) Keep() bool {
	if q.waiters[roce.Responder].waits().Kind != translate.HostFault {
		return false
	}
	return q.keepThis()
}

// keepThis keeps the frame that is being received, ahead of all that comes.
func (q *qp) keepThis() bool {
	if q.redelivering { // it was the first, and stays so
		q.redelivering = false
		return true
	}
	return q.keep()
}

// keep keeps the frame that is being received, behind the others.
func (q *qp) keep() bool {
	e := q.engine
	if len(q.kept) >= maxKept || e.kept >= maxLaneKept {
		return false
	}
	b := e.keepFrame()
	if b == nil {
		return false
	}
	q.kept = append(q.kept, b)
	e.kept++
	return true
}

// keepFrame returns the frame that is being received, to be kept, and a reference to it: itself, or a copy if it is one
// of a train. Nil: it cannot be had.
func (e *engine) keepFrame() *frame.Buf {
	pool := e.dev.pool
	if e.receiving == nil || !pool.Keep() {
		return nil
	}
	if e.trainPacket == nil {
		e.receiving.Ref()
		return e.receiving
	}
	b := pool.Get()
	if b == nil || !b.Append(e.trainPacket) {
		if b != nil {
			b.Free()
		}
		pool.Unkeep(1)
		return nil
	}
	b.SetLayout(e.receiving.Layout())
	return b
}

// redeliver receives what was kept, until something of it has to be kept again;
// inside an epoch.
func (q *qp) redeliver() {
	e := q.engine
	for len(q.kept) > 0 && !q.closed {
		p := &e.packet
		if b := q.kept[0]; wire.ParseRoCE(b.Bytes(), b.Layout(), p) == nil { // as it did before
			q.redelivering = true
			e.current, e.receiving = q, q.kept[0]
			q.t.Receive(e.loop.Now(), p)
			e.current, e.receiving = nil, nil
			*p = wire.RoCE{}
			if !q.redelivering {
				return
			}
			q.redelivering = false
		}
		q.dropKept(1)
	}
}

// dropKept gives the first n frames back.
func (q *qp) dropKept(n int) {
	for _, b := range q.kept[:n] {
		b.Free()
	}
	q.kept = append(q.kept[:0], q.kept[n:]...)
	q.engine.kept -= n
	q.dev.pool.Unkeep(n)
}

// Hold implements roce.Adapter: what comes ahead of its turn waits for what was lost before it. Bounded by itself, so
// that it leaves room for what waits for pages.
func (q *qp) Hold() *frame.Buf {
	e := q.engine
	if e.heldFrames >= maxLaneHeld {
		return nil
	}
	b := e.keepFrame()
	if b != nil {
		e.heldFrames++
		q.heldFrames++
	}
	return b
}

// Release implements roce.Adapter.
func (q *qp) Release(b *frame.Buf) {
	b.Free()
	q.engine.heldFrames--
	q.heldFrames--
	q.dev.pool.Unkeep(1)
}

// InHand implements roce.Adapter.
func (q *qp) InHand(b *frame.Buf) { q.engine.receiving, q.engine.trainPacket = b, nil }
