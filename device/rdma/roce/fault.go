package roce

import (
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Waiting for absent pages. An operation that misses an absent page stops, raises a fault and holds no resources.
// Resume makes it try again. The messages to the peer (PF-8 to PF-11):
//
//	requester   send queue, gather, result   none: it is merely slow
//	responder   READ, atomic                 none, unless the peer repeats the request
//	            SEND, WRITE                  none while they are kept; else RNR NAK, and an ACK when the page is
//	                                         present (suspend.go)
//	            UC, UD                       none: dropped and counted
//
// A requester that repeats a READ or atomic after its timeout would soon use up retry_cnt. It gets an RNR NAK for the
// response that it waits for, as if the responder had had no resources for the request (IBTA 9.7.5.2.8), and counts it
// against rnr_retry only. Requests that executed behind the READ were not acknowledged and will be duplicates.
//
// A requester whose rnr_retry may run out gets no RNR NAK for an absent page at all (HF-1).
//
// One fault per side is outstanding at a time (faultWaits.raised). Its answer belongs to the wait that raised it
// (wait.raised). If that wait has ended, by a reset or because the page became present otherwise, the answer only
// permits another fault to be raised.

// waitCause says which operation waits, and so how it fails if the address is invalid (PF-13).
type waitCause uint8

const (
	waitNone   waitCause = iota
	waitQueue            // work queue: QP fatal
	waitGather           // requester's message: local protection error
	waitResult           // READ or atomic result: local protection error
	waitRead             // READ at the responder: remote access NAK
	waitWrite            // WRITE: remote access NAK
	waitAtomic           // atomic: remote access NAK
	waitRecv             // receive buffer: local protection error, remote operational NAK
)

// faultAccess holds the rights with which a fault is raised. They depend on the wait, not on the newest miss: a fault
// may have to wait until another one is answered.
var faultAccess = [...]translate.Access{
	waitGather: 0, waitResult: translate.LocalWrite, waitRecv: translate.LocalWrite,
	waitRead: translate.RemoteRead, waitWrite: translate.RemoteWrite, // waitAtomic: those of the operation
}

// wait is an operation that waits for an absent page. It waits for none if cause is waitNone.
type wait struct {
	cause     waitCause
	raised    bool   // the outstanding fault of its side is this one
	rnrSent   bool   // the peer was sent an RNR NAK for it
	wqe       uint32 // requester: number of the WQE
	psn       uint64 // requester: nothing is sent from this PSN on; responder: the PSN that missed
	miss      translate.Miss
	refusedAt int64 // when psn was first refused
	// retryAt is when the fault is raised once more, in case its answer was lost; 0: due.
	retryAt int64
}

// faultWaits is the part of a QP that waits for absent pages. raised outlives a reset: a fault stays outstanding.
type faultWaits struct {
	raised    [2]bool // by Side: a fault is outstanding, Resume follows
	send      wait    // Requester
	read      wait    // Responder: the oldest READ to be answered
	request   wait    // Responder: the request at epsn
	sqInvalid bool    // the queue's memory is invalid: no more is fetched
	rqInvalid bool
}

const (
	// faultRetry is the interval, ns, at which waits are retried without an answer: a safety net.
	faultRetry = 100e6
	// maxFault bounds the bytes of one fault.
	maxFault = 1 << 20
	// defaultFaultDelay is the expected service time before one was measured, ns.
	defaultFaultDelay = 2e6
	// nakFault in responder.nak is an RNR NAK for a fault. Its timer is chosen when it is sent.
	nakFault wire.Syndrome = 0x5f
)

// clear ends the wait. It keeps the time since which its PSN has been refused: the same packet may miss one absent page
// after another.
func (w *wait) clear() { *w = wait{psn: w.psn, refusedAt: w.refusedAt} }

// blocked reports whether w must still wait.
func (w *wait) blocked() bool { return w.cause != waitNone && w.retryAt != 0 }

// blocks reports whether w prevents PSN psn and all after it from being sent.
func (w *wait) blocks(psn uint64) bool { return w.blocked() && psn >= w.psn }

// sameMiss reports whether w waits for the page of the new miss m.
func (w *wait) sameMiss(c waitCause, m *translate.Miss) bool {
	return w.cause == c && w.miss.Kind == m.Kind && w.miss.Key == m.Key && w.miss.Where == m.Where
}

// waitFor makes w wait for m. A repeated miss changes nothing.
func (q *QP) waitFor(side Side, w *wait, c waitCause, psn uint64, m translate.Miss) {
	q.stats.Faults++
	m.Len = min(max(m.Len, 1), maxFault)
	overdue := false
	if w.sameMiss(c, &m) {
		w.psn, w.wqe = psn, q.req.cur // another operation may be the first to miss the page
		if w.retryAt != 0 {
			return
		}
		overdue = true
	} else {
		n := wait{cause: c, wqe: q.req.cur, psn: psn, miss: m, refusedAt: q.now}
		if w.psn == psn {
			n.rnrSent, n.refusedAt = w.rnrSent, w.refusedAt // the peer waits because of the same packet
		}
		*w = n
	}
	w.retryAt = q.now + faultRetry
	if overdue || !q.faults.raised[side] {
		q.raiseFault(side, w)
	}
}

// raiseFault passes w's fault to the scheduler. The adapter has raised that of a work queue itself.
func (q *QP) raiseFault(side Side, w *wait) {
	if !q.faults.raised[side] {
		q.faults.raised[side] = true
		w.raised = true
	}
	w.retryAt = q.now + faultRetry
	need := faultAccess[w.cause]
	if w.cause == waitAtomic {
		need = atomicOps[q.resp.atomic.op].Needs()
	}
	if w.cause != waitQueue {
		q.sched.Fault(side, w.miss, need)
	}
}

// requesterWait is waitFor for the requester. A miss behind the one that it waits for, which occurs while that one is
// retried, is not raised before.
func (q *QP) requesterWait(c waitCause, psn uint64, m translate.Miss) {
	w := &q.faults.send
	if w.cause != waitNone && psn > w.psn {
		q.stats.Faults++
		w.retryAt = q.now + faultRetry
		return
	}
	q.waitFor(Requester, w, c, psn, m)
}

// waitForQueue records that a work queue's memory is absent. The adapter has raised that fault itself.
func (q *QP) waitForQueue(side Side) {
	if side == Requester {
		q.requesterWait(waitQueue, q.req.nextPSN, translate.Miss{})
		return
	}
	q.waitFor(side, &q.faults.request, waitQueue, q.resp.epsn, translate.Miss{})
}

// Waits returns what side waits for: the miss that its outstanding fault is about, if that is still waited for, or else
// one that is not raised yet. The miss's Kind is None if side does not wait, or if queue is true: it waits for its work
// queue, whose miss the adapter knows.
func (q *QP) Waits(side Side) (m translate.Miss, queue bool) {
	w := &q.faults.send
	if side == Responder {
		w = &q.faults.read
		if !w.raised && (w.cause == waitNone || q.faults.request.raised) {
			w = &q.faults.request
		}
	}
	return w.miss, w.cause == waitQueue
}

// Resume is called when the fault that side waits for was served: the operation is tried again. If !ok, the address is
// invalid and the operation fails (PF-13). The answer to a wait that has ended does nothing.
func (q *QP) Resume(now int64, side Side, ok bool) {
	if q.closed {
		return
	}
	q.now = now
	q.faults.raised[side] = false
	if ok {
		q.stats.Resumed++
	} else {
		q.stats.Invalid++
	}
	if side == Requester {
		q.resumeRequester(ok)
	} else {
		q.resumeResponder(ok)
	}
	q.armTimer()
}

func (q *QP) resumeRequester(ok bool) {
	w := q.faults.send
	if w.cause == waitNone {
		return
	}
	q.faults.send.clear()
	q.wake()
	if ok || !w.raised {
		return
	}
	if w.cause == waitQueue {
		q.queueInvalid(&q.faults.sqInvalid)
		return
	}
	if int32(w.wqe-q.req.head) < 0 || int32(q.req.tail-w.wqe) <= 0 || !q.requesterActive() {
		return
	}
	if s := q.req.slot(w.wqe); !s.failed {
		q.stats.LocalErrors++
		q.failSlot(s, StatusLocProt)
	}
}

func (q *QP) resumeResponder(ok bool) {
	switch {
	case q.faults.read.raised:
		w := q.faults.read
		q.faults.read.clear()
		q.wake()
		if !ok && q.resp.pending > 0 {
			if r := q.resp.oldestPending(); r.next == w.psn {
				q.failRead(r)
			}
		}
	case q.faults.request.raised:
		w := q.faults.request
		q.faults.request.clear()
		q.resumeRequest(&w, ok)
	}
	for _, w := range [...]*wait{&q.faults.read, &q.faults.request} {
		if w.cause != waitNone && !q.faults.raised[Responder] {
			if w.cause == waitQueue { // only looking for a receive raises it
				refused := w.rnrSent
				w.clear()
				q.resumeQueue(refused)
				q.wake()
				continue
			}
			q.raiseFault(Responder, w)
		}
	}
}

// resumeRequest ends the wait of a request. Its packet was kept or dropped at the miss.
func (q *QP) resumeRequest(w *wait, ok bool) {
	q.resp.waitDue = false
	if w.cause == waitQueue {
		if !ok {
			q.queueInvalid(&q.faults.rqInvalid)
			return
		}
		if q.state == Err {
			q.wake() // to continue flushing
		}
	}
	if q.typ != RC {
		if ok {
			return
		}
		if w.cause == waitWrite {
			q.stats.AccessErrors++
		} else if q.resp.haveRecv {
			q.stats.LocalErrors++
			q.failRecv(StatusLocProt)
			q.toErr()
		}
		return
	}
	if w.psn != q.resp.epsn || q.resp.fatal.syndrome != 0 || q.state == Err {
		return
	}
	switch {
	case !ok && w.cause == waitRecv:
		q.stats.LocalErrors++
		q.applyVerdict(vRecvProt)
	case !ok:
		q.applyVerdict(vRemAccess)
	case w.cause == waitAtomic:
		q.retryAtomic()
	default:
		q.resumeQueue(w.rnrSent)
	}
}

// retryAtomic tries the waiting atomic again.
func (q *QP) retryAtomic() {
	q.applyVerdict(q.executeAtomic())
	if q.resp.reorder.expiresAt != 0 {
		q.executeQueuedRequests(false)
	}
	q.askForMissing()
}

// queueInvalid fails a QP whose work queue lies in invalid memory.
func (q *QP) queueInvalid(invalid *bool) {
	*invalid = true
	if q.state == Err {
		return
	}
	q.sched.Event(EventFatal)
	q.toErr()
}

// retryFaults retries waits whose faults were not answered for faultRetry.
func (q *QP) retryFaults() {
	due := func(w *wait) bool {
		if w.cause == waitNone || w.retryAt == 0 || q.now < w.retryAt {
			return false
		}
		w.retryAt = 0
		return true
	}
	if due(&q.faults.send) || due(&q.faults.read) {
		q.wake()
	}
	switch w := &q.faults.request; {
	case !due(w):
	case w.cause == waitAtomic:
		q.retryAtomic()
	case q.resp.reorder.arrived.Has(0):
		q.executeQueuedRequests(true)
	default:
		q.raiseFault(Responder, w)
	}
}

// rnrSyndrome returns the RNR NAK for w. Its timer is the expected service time (PF-8), or the time for which the
// packet has been refused already, so that a slow pager does not use up the peer's rnr_retry. A peer that says itself
// that it retries for ever is a vnicd, whose wait ends when the page is present (PF-9): it is told twice that time, as
// a third of all faults take longer than expected. If the wait has ended, the timer is the shortest.
func (q *QP) rnrSyndrome(w *wait) wire.Syndrome {
	d := int64(0)
	if w.cause != waitNone {
		if d = q.sched.FaultDelay(); d <= 0 {
			d = defaultFaultDelay
		}
		if d = max(d, q.now-w.refusedAt); q.resp.patience == wire.PatienceForever {
			d *= 2
		}
	}
	return wire.SyndromeRNR | rnrCode(d)
}

// segmentRest returns the number of bytes from m to the end of its segment. off is the offset in the message at which
// the access began.
func segmentRest(sg []SGE, off uint64, m translate.Miss) uint64 {
	at := uint64(m.VA)
	if m.Key == 0 { // a segment that skips stage one
		at = uint64(m.PA)
	}
	for i := range sg {
		n := uint64(sg[i].Length)
		if off >= n {
			off -= n
			continue
		}
		if d := at - uint64(sg[i].VA); d >= off && d < n {
			return n - d
		}
		off = 0
	}
	return m.Len
}

// rangeRest is segmentRest for the n bytes from va on.
func rangeRest(va translate.VA, n uint64, m translate.Miss) uint64 {
	if d := uint64(m.VA) - uint64(va); d < n {
		return n - d
	}
	return m.Len
}
