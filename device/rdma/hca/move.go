// Side: data

package hca

import (
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/roce"
)

// A QP moves between engines: the parts of a move that run on loops. place.go decides and orders them.

// peerEngine returns the engine that q should move to, nil if it should stay; on its loop. Both QPs reach the same
// decision, in any order or at once: their indices select the lower or the higher of the two loops.
func (q *qp) peerEngine() *engine {
	p := q.localPeer()
	if p == nil || p == q || p.dev.byLoop[q.engine.loop.ID()] == nil {
		return nil
	}
	here, there := q.engine.loop.ID(), p.engine.loop.ID()
	low := (q.index+p.index)>>1&1 == 0
	if here == there || p.srq == nil && low == (here < there) {
		return nil
	}
	return q.dev.byLoop[there]
}

// movable reports whether q is ready to receive and its engine has no reference to it: no fault, no kept frame, no
// completion; on its loop.
func (q *qp) movable() bool {
	for i := range q.waiters {
		s := &q.waiters[i]
		if !s.waits().OK() || s.host.Waiting() || s.guest.state.Load()&faultStateMask != faultIdle ||
			s.answers.queued.Load() {
			return false
		}
	}
	return q.t.State() == roce.RTR && !q.closed && !q.failing && !q.draining && len(q.kept) == 0 && q.heldFrames == 0 &&
		len(q.unpostedCQEs) == 0
}

// hide removes q from the tables of QPs if it is movable; on its loop.
func (q *qp) hide() bool {
	if !q.movable() {
		return false
	}
	q.dev.withdraw(q)
	return true
}

// leaveEngine removes q from its engine; q is hidden and no loop uses it any more. On its loop.
func (q *qp) leaveEngine() {
	e := q.engine
	defer func() {
		e.unschedule(q)
		q.timer.Stop()
		delete(e.apart, q)
		e.qps--
		if e.journal != nil {
			e.journal.forget(q)
		}
	}()
	if t, ok := e.enter(); ok {
		defer e.leave(t)
		e.runAnswers() // a forwarded doorbell
	}
}

// joinEngine assigns q to an engine and puts it back into the tables of QPs; on that engine's loop.
func (q *qp) joinEngine(e *engine) {
	q.engine, q.localRoute = e, localRoute{}
	q.timer = e.loop.NewTimer(q.onTimer, loop.Name("hca qp timer"), e.faultOption(), loop.Metered(&e.dev.meter))
	e.qps++
	q.dev.publish(q)
	if q.own != nil {
		e.apart[q] = struct{}{}
	}
	q.t.CountIn(&q.counts().Stats)
	q.t.Moved(e.loop.Now())
	e.schedule(q)
	e.touch(q)
	e.settleNow()
}
