// Side: data

package hca

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Host paging is invisible to the guest. A guest that has done everything required
// for a message to arrive should not lose the first message to each part of its
// memory: programs that use UC or UD over a reliable network do not expect that, and
// the connection manager waits seconds before it retries. So a packet that meets a
// page absent on the host is kept, and the packets behind it too, in order, until the
// page is present. Packets beyond the bounds, and packets that meet a page absent in
// the guest, are dropped (PF-11). Packets that wait for an invalidation are kept
// likewise (manage.go). This is for UC and UD: the transport keeps those of RC itself, in its reorder queue.

// Bounds of kept frames, because all VMs share the host's buffers; together they keep half of the pool at most.
const (
	maxKept     = 64  // by one QP: a message of 64 KiB in packets of 1 KiB
	maxLaneKept = 256 // by all QPs of an engine
	maxLaneHeld = 512 // in reorder queues of RC, by all QPs of an engine
)

// Keep implements roce.Adapter.
func (q *qp) Keep() bool {
	if q.waiters[roce.Responder].waits().Kind != translate.HostFault {
		return false
	}
	return q.keepThis()
}

// keepThis keeps the frame that is being received, ahead of all later frames.
func (q *qp) keepThis() bool {
	if q.redelivering { // it is the first already
		q.redelivering = false
		return true
	}
	return q.keep()
}

// keep keeps the frame that is being received, behind the other kept frames.
func (q *qp) keep() bool {
	e := q.engine
	if len(q.kept) >= maxKept || e.kept >= maxLaneKept || !e.dev.pool.Keep() {
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

// keepFrame returns the frame that is being received, which the pool lets the caller keep, with a reference to it: the
// frame itself, or a copy if it is a packet of a train. Nil: it is not kept.
func (e *engine) keepFrame() *frame.Buf {
	pool := e.dev.pool
	if e.receiving != nil && e.trainPacket == nil {
		e.receiving.Ref()
		return e.receiving
	}
	if e.receiving != nil {
		if b := pool.Get(); b != nil {
			if b.Append(e.trainPacket) {
				b.SetLayout(e.receiving.Layout())
				return b
			}
			b.Free()
		}
	}
	pool.Unkeep(1)
	return nil
}

// redeliver receives the kept frames until one of them has to be kept again;
// inside an epoch.
func (q *qp) redeliver() {
	e := q.engine
	e.touch(q)
	for len(q.kept) > 0 && !q.closed {
		p := &e.packet
		if b := q.kept[0]; wire.ParseRoCE(b.Bytes(), b.Layout(), p) == nil { // it parsed before
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

// dropKept frees the first n frames.
func (q *qp) dropKept(n int) {
	for _, b := range q.kept[:n] {
		b.Free()
	}
	q.kept = append(q.kept[:0], q.kept[n:]...)
	q.engine.kept -= n
	q.dev.pool.Unkeep(n)
}

// Hold implements roce.Adapter: an out-of-order packet waits for the lost ones before it, or a request for a page. The
// bound is not that of UC and UD. Requests that wait for pages take what is left of it only in part, each queue pair as
// much as it leaves to all others, and likewise of the pool: a guest that never provides its pages takes no room from
// others, nor from packets that wait for lost ones.
func (q *qp) Hold(absent bool) *frame.Buf {
	e, pool := q.engine, q.dev.pool
	switch {
	case e.heldFrames >= maxLaneHeld:
		return nil
	case absent && (q.heldFrames+e.heldFrames >= maxLaneHeld || !pool.KeepLong(e.heldFrames)):
		return nil
	case !absent && !pool.Keep():
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

// PeerPatience implements roce.Adapter.
func (q *qp) PeerPatience() wire.Patience { return wire.Patience(q.patience.Load()) }

// InHand implements roce.Adapter.
func (q *qp) InHand(b *frame.Buf) { q.engine.receiving, q.engine.trainPacket = b, nil }
