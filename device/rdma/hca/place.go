package hca

import (
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/roce"
)

// Which lane a QP lives on. It gets one when it is created, and may get another once: when it is told its peer, and that lives on
// another loop of this host. On one loop they need no frames (local.go).

// place chooses the lane of a new QP: where its SRQ or CQs are produced already,
// so that they need no lock, else the lanes in turn.
func (c *cmd) place(p qpParts) *lane {
	switch {
	case p.srq != nil && p.srq.owner != nil:
		return p.srq.owner
	case p.scq.owner != nil:
		return p.scq.owner
	case p.rcq.owner != nil:
		return p.rcq.owner
	}
	l := c.d.lanes[c.t.nextLane%len(c.d.lanes)]
	c.t.nextLane++
	return l
}

// share counts a QP on lane l as a user of its CQs and SRQ, and makes CQs that
// another lane uses too take their lock from now on.
func (c *cmd) share(p *qpParts, l *lane) {
	for _, q := range []*cq{p.scq, p.rcq} {
		q.refs++
		q.usedOn(l)
	}
	if p.srq != nil {
		p.srq.refs++
		p.srq.owner = l
	}
}

// usedOn notes that a QP of lane l is about to use the CQ; command goroutine.
func (q *cq) usedOn(l *lane) {
	switch {
	case q.owner == nil:
		q.owner = l
	case q.owner != l && !q.shared:
		// On the owner's loop it takes effect before the other loop's QP is there.
		q.owner.loop.Do(func() { q.shared = true })
	}
}

// unshare is the opposite. An object without users has no owner and no lock.
func (c *cmd) unshare(p *qpParts) {
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

// meet brings a QP that has just become ready to receive to its peer's loop, if it should be there.
func (c *cmd) meet(q *qp) {
	if len(c.d.lanes) == 1 || q.typ != roce.RC && q.typ != roce.UC || q.srq != nil {
		return // the QPs of an SRQ live together
	}
	var to *lane
	q.lane.loop.Do(func() { to = q.meetingPlace() })
	if to != nil {
		c.move(q, to)
	}
}

// meetingPlace returns the lane that q should move to, nil if it should stay; on its loop. Its peer, who asks the same, comes to the
// same place, whoever asks first or if both do at once: the lower or the higher of the two loops, as their numbers say.
func (q *qp) meetingPlace() *lane {
	p := q.neighbour()
	if p == nil || p == q || p.dev.byLoop[q.lane.loop.ID()] == nil {
		return nil
	}
	here, there := q.lane.loop.ID(), p.lane.loop.ID()
	low := (q.n+p.n)>>1&1 == 0
	if here == there || p.srq == nil && low == (here < there) {
		return nil
	}
	return q.dev.byLoop[there]
}

// move takes q, which has a peer and has sent nothing yet, to another lane. For a moment there is no such QP: frames that arrive then
// are lost, as they were until a moment before. If it is in the middle of something, it stays.
func (c *cmd) move(q *qp, to *lane) {
	from, quiet := q.lane, false
	from.loop.Do(func() {
		if quiet = q.quiet(); quiet {
			c.d.qps[q.index].Store(nil)
		}
	})
	if !quiet {
		return
	}
	// Whoever has found it has done with it after that: only loops look for QPs.
	for _, l := range c.d.lanes {
		l.loop.Do(func() {})
	}
	from.loop.Do(func() {
		if t, ok := from.enter(); ok {
			from.answered() // a doorbell that was passed on
			from.leave(t)
		}
		from.unlist(q)
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
		q.lane, q.near = to, near{}
		q.timer = to.loop.NewTimer(q.onTimer, loop.Name("hca qp timer"), to.fault())
		to.qps++
		c.d.qps[q.index].Store(q)
		q.t.Moved(to.loop.Now(), &to.stats)
		to.push(q)
	})
}

// quiet tells whether q is ready to receive, and no answer to anything is on its way to its lane; on its loop.
func (q *qp) quiet() bool {
	for i := range q.sides {
		s := &q.sides[i]
		if !s.want.OK() || s.host.Waiting() || s.guest.state.Load()&faultStateMask != faultIdle || s.served.queued.Load() {
			return false
		}
	}
	return q.t.State() == roce.RTR && !q.dead && !q.doomed && !q.draining && len(q.kept) == 0 && q.held == 0 && len(q.owed) == 0
}
