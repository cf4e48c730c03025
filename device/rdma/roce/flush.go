package roce

// Flushing (IBTA 10.3.1.8, 10.8.6). In ERROR all posted WQEs complete with StatusFlush, also those that are posted
// later. In SQE only those of the send queue do.

// Posting a receive rings no doorbell, so a QP in ERROR polls its receive queue, backing off.
const (
	flushDelayMin = 1e6   // ns
	flushDelayMax = 256e6 // ns
)

// flush completes up to budget posted WQEs. It returns true if there may be more.
func (q *QP) flush(budget int) (more bool) {
	if q.flushSends(&budget) {
		return true
	}
	if q.resp.haveRecv {
		q.failRecv(StatusFlush)
	}
	if q.cfg.HasSRQ {
		// Receives in an SRQ belong to other QPs as well (IBTA 10.2.9.3).
		if !q.lastWQE {
			q.lastWQE = true
			q.sched.Event(EventLastWQE)
		}
		return false
	}
	if q.faults.rqInvalid {
		return false
	}
	found := false
	for ; budget > 0; budget-- {
		if v := q.ensureRecv(); v != vOK && v != vRecvBad {
			q.pollFlush(found)
			return false
		}
		found = true
		q.stats.Flushed++
		q.failRecv(StatusFlush)
	}
	return true
}

// pollFlush sets the time of the next look at the receive queue.
func (q *QP) pollFlush(found bool) {
	if found || q.flushDelay == 0 {
		q.flushDelay = flushDelayMin
	}
	q.flushAt = q.now + q.flushDelay
	q.flushDelay = min(q.flushDelay*2, flushDelayMax)
}

// flushSends completes send WQEs, at most *budget, and subtracts their number from it.
func (q *QP) flushSends(budget *int) (more bool) {
	for ; *budget > 0; *budget-- {
		if q.req.head == q.req.tail &&
			(q.faults.sqInvalid || q.faults.send.blocked() || !q.fetchInto(q.req.slot(q.req.tail))) {
			return false
		}
		q.stats.Flushed++
		q.completeHead(StatusFlush)
	}
	return true
}
