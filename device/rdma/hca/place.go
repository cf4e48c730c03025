// Side: control

package hca

import (
	"github.com/vnicd/vnicd/device/rdma/roce"
)

// Placement of QPs on engines. A QP gets an engine when it is created. It may get another once: when its peer is set
// and belongs to another loop of this host. On one loop they need no frames (local.go).

// place chooses the engine of a new QP: that of its SRQ or CQs, so that they need
// no lock, else the engines in turn.
func (c *cmd) place(p qpParts) *engine {
	switch {
	case c.as != nil:
		return c.as.engine
	case p.srq != nil && p.srq.owner != nil:
		return p.srq.owner
	case p.scq.owner != nil:
		return p.scq.owner
	case p.rcq.owner != nil:
		return p.rcq.owner
	}
	e := c.d.data.engines[c.t.nextLane%len(c.d.data.engines)]
	c.t.nextLane++
	return e
}

// addUser counts a QP on engine e as a user of its CQs and SRQ, and makes CQs that
// another engine also uses take their lock from now on.
func (c *cmd) addUser(p *qpParts, e *engine) {
	for _, o := range []*cqObject{p.scq, p.rcq} {
		o.refs++
		o.usedOn(e)
	}
	if p.srq != nil {
		p.srq.refs++
		p.srq.owner = e
	}
}

// usedOn records that a QP of engine e will use the CQ.
func (o *cqObject) usedOn(e *engine) {
	switch {
	case o.owner == nil:
		o.owner = e
	case o.owner != e && !o.q.shared:
		// On the owner's loop it takes effect before the other loop's QP exists.
		o.owner.onLoop(func() { o.q.shared = true })
	}
}

// removeUser is the inverse of addUser. An object without users has no owner and no lock.
func (c *cmd) removeUser(p *qpParts) {
	for _, o := range []*cqObject{p.scq, p.rcq} {
		if o.refs--; o.refs == 0 {
			o.owner, o.q.shared = nil, false
		}
	}
	if p.srq != nil {
		if p.srq.refs--; p.srq.refs == 0 {
			p.srq.owner = nil
		}
	}
}

// colocate moves a QP that has just become ready to receive to its peer's loop, if they should share one.
func (c *cmd) colocate(o *qpObject) {
	q := o.q
	if len(c.d.data.engines) == 1 || q.typ != roce.RC && q.typ != roce.UC || q.srq != nil {
		return // the QPs of an SRQ share one engine
	}
	var to *engine
	q.engine.onLoop(func() { to = q.peerEngine() })
	if to != nil {
		c.moveQP(o, to)
	}
}

// moveQP moves a QP, which has a peer and has sent nothing yet, to another engine. Meanwhile no loop finds the QP:
// frames that arrive then are lost, as they were before it became ready. If it is not movable, it stays.
func (c *cmd) moveQP(o *qpObject, to *engine) {
	q, from, hidden := o.q, o.q.engine, false
	from.onLoop(func() {
		if hidden = q.hide(); hidden { // an engine's new log does not have it meanwhile
			from.settleNow()
			c.effect(func(j *controlJournal) { j.addQP(o) })
		}
	})
	if !hidden {
		return
	}
	// Only loops look QPs up: after this visit no loop uses one that it found before.
	for _, e := range c.d.data.engines {
		e.onLoop(func() {})
	}
	// A memory fault stops the device; the QP goes to its new engine, where a reset finds it.
	_ = from.visit(q.leaveEngine)
	for _, x := range []*cqObject{o.uses.scq, o.uses.rcq} {
		if x.refs == 1 || x.refs == 2 && q.scq == q.rcq {
			x.owner = to // the QP is the only user
		}
		x.usedOn(to)
	}
	_ = to.visit(func() { q.joinEngine(to) })
}
