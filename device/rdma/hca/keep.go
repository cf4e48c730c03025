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
	maxLaneKept = 256 // by all QPs of a lane
	maxLaneHeld = 512 // ... ahead of their turn
)

// Keep implements roce.Adapter.
func (q *qp) Keep() bool {
	if q.sides[roce.Responder].want.Kind != translate.HostFault {
		return false
	}
	return q.keepThis()
}

// keepThis keeps the frame that is being received, ahead of all that comes.
func (q *qp) keepThis() bool {
	if q.retry { // it was the first, and stays so
		q.retry = false
		return true
	}
	return q.keep()
}

// keep keeps the frame that is being received, behind the others.
func (q *qp) keep() bool {
	l := q.lane
	if len(q.kept) >= maxKept || l.kept >= maxLaneKept {
		return false
	}
	b := l.keepFrame()
	if b == nil {
		return false
	}
	q.kept = append(q.kept, b)
	l.kept++
	return true
}

// keepFrame returns the frame that is being received, to be kept, and a reference to it: itself, or a copy if it is one of a train. Nil: it cannot be had.
func (l *lane) keepFrame() *frame.Buf {
	pool := l.dev.cfg.Pool
	if l.frame == nil || !pool.Keep() {
		return nil
	}
	if l.single == nil {
		l.frame.Ref()
		return l.frame
	}
	b := pool.Get()
	if b == nil || !b.Append(l.single) {
		if b != nil {
			b.Free()
		}
		pool.Unkeep(1)
		return nil
	}
	return b
}

// redeliver receives what was kept, until something of it has to be kept again;
// inside an epoch.
func (q *qp) redeliver() {
	l := q.lane
	for len(q.kept) > 0 && !q.dead {
		p := &l.rx
		if err := wire.ParseRoCE(q.kept[0].Bytes(), p); err == nil { // as it did before
			q.retry = true
			l.cur, l.frame = q, q.kept[0]
			q.t.Receive(l.loop.Now(), p)
			l.cur, l.frame = nil, nil
			*p = wire.RoCE{}
			if !q.retry {
				return
			}
			q.retry = false
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
	q.lane.kept -= n
	q.dev.cfg.Pool.Unkeep(n)
}

// Hold implements roce.Adapter: what comes ahead of its turn waits for what was lost before it. Bounded by itself, so that it leaves
// room for what waits for pages.
func (q *qp) Hold() *frame.Buf {
	l := q.lane
	if l.held >= maxLaneHeld {
		return nil
	}
	b := l.keepFrame()
	if b != nil {
		l.held++
		q.held++
	}
	return b
}

// Release implements roce.Adapter.
func (q *qp) Release(b *frame.Buf) {
	b.Free()
	q.lane.held--
	q.held--
	q.dev.cfg.Pool.Unkeep(1)
}

// InHand implements roce.Adapter.
func (q *qp) InHand(b *frame.Buf) { q.lane.frame, q.lane.single = b, nil }
