package hca

import (
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/roce"
)

// Which engine a QP lives on. It gets one when it is created, and may get another once: when it is told its peer, and
// that lives on another loop of this host. On one loop they need no frames (local.go).

// place chooses the engine of a new QP: where its SRQ or CQs are produced already,
// so that they need no lock, else the engines in turn.
func (c *cmd) place(p qpParts) *engine {
	switch {
	case p.srq != nil && p.srq.owner != nil:
		return p.srq.owner
	case p.scq.owner != nil:
		return p.scq.owner
	case p.rcq.owner != nil:
		return p.rcq.owner
	}
	e := c.d.engines[c.t.nextLane%len(c.d.engines)]
	c.t.nextLane++
	return e
}

// addUser counts a QP on engine l as a user of its CQs and SRQ, and makes CQs that
// another engine uses too take their lock from now on.
func (c *cmd) addUser(p *qpParts, e *engine) {
	for _, q := range []*cq{p.scq, p.rcq} {
		q.refs++
		q.usedOn(e)
	}
	if p.srq != nil {
		p.srq.refs++
		p.srq.owner = e
	}
}

// usedOn notes that a QP of engine l is about to use the CQ; command goroutine.
func (q *cq) usedOn(e *engine) {
	switch {
	case q.owner == nil:
		q.owner = e
	case q.owner != e && !q.shared:
		// On the owner's loop it takes effect before the other loop's QP is there.
		q.owner.loop.Do(func() { q.shared = true })
	}
}

// removeUser is its counterpart. An object without users has no owner and no lock.
func (c *cmd) removeUser(p *qpParts) {
	for _, q := range []*cq{p.scq, p.rcq} {
		if q.refs--; q.refs == 0 {
			q.owner, q.shared = nil, false
		}
	}
	if p.srq != nil {
		if p.srq.refs--; p.srq.refs == 0 {
			p.srq.owner = nil
		}
	}
}

// colocate moves a QP that has just become ready to receive to its peer's loop, if they should share one.
func (c *cmd) colocate(q *qp) {
	if len(c.d.engines) == 1 || q.typ != roce.RC && q.typ != roce.UC || q.srq != nil {
		return // the QPs of an SRQ live together
	}
	var to *engine
	q.engine.loop.Do(func() { to = q.peerEngine() })
	if to != nil {
		c.moveQP(q, to)
	}
}

// peerEngine returns the engine that q should move to, nil if it should stay; on its loop. Both QPs reach the same
// decision, in any order or at once: the lower or the higher of the two loops, as their QP numbers say.
func (q *qp) peerEngine() *engine {
	p := q.localPeer()
	if p == nil || p == q || p.dev.byLoop[q.engine.loop.ID()] == nil {
		return nil
	}
	here, there := q.engine.loop.ID(), p.engine.loop.ID()
	low := (q.n+p.n)>>1&1 == 0
	if here == there || p.srq == nil && low == (here < there) {
		return nil
	}
	return q.dev.byLoop[there]
}

// moveQP moves q, which has a peer and has sent nothing yet, to another engine. Meanwhile no loop finds the QP: frames
// that arrive then are lost, as they were before it became ready. If it is not movable, it stays.
func (c *cmd) moveQP(q *qp, to *engine) {
	from, quiet := q.engine, false
	from.loop.Do(func() {
		if quiet = q.movable(); quiet {
			c.d.qps[q.index].Store(nil)
		}
	})
	if !quiet {
		return
	}
	// Whoever has found it has done with it after that: only loops look for QPs.
	for _, e := range c.d.engines {
		e.loop.Do(func() {})
	}
	from.loop.Do(func() {
		if t, ok := from.enter(); ok {
			from.runAnswers() // a doorbell that was passed on
			from.leave(t)
		}
		from.unschedule(q)
		q.timer.Stop()
		from.qps--
	})
	for _, x := range []*cq{q.scq, q.rcq} {
		if x.refs == 1 || x.refs == 2 && q.scq == q.rcq {
			x.owner = to // nobody else's
		}
		x.usedOn(to)
	}
	to.loop.Do(func() {
		q.engine, q.localRoute = to, localRoute{}
		q.timer = to.loop.NewTimer(q.onTimer, loop.Name("hca qp timer"), to.faultOption())
		to.qps++
		c.d.qps[q.index].Store(q)
		q.t.Moved(to.loop.Now(), &to.stats)
		to.schedule(q)
	})
}

// movable reports whether q is ready to receive and nothing refers to it from its engine: no fault, no kept frame, no
// completion; on its loop.
func (q *qp) movable() bool {
	for i := range q.waiters {
		s := &q.waiters[i]
		if !s.want.OK() || s.host.Waiting() || s.guest.state.Load()&faultStateMask != faultIdle || s.answers.queued.Load() {
			return false
		}
	}
	return q.t.State() == roce.RTR && !q.closed && !q.failing && !q.draining && len(q.kept) == 0 && q.heldFrames == 0 &&
		len(q.unpostedCQEs) == 0
}
