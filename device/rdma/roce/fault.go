package roce

import (
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Waiting for absent pages. Whatever meets a miss that a driver can cure stops
// there, raises the fault and holds nothing; Resume makes it look again. What the
// peer hears of it (PF-8 to PF-11):
//
//	requester   send queue, gather, result   nothing: it is merely slow
//	responder   READ, atomic                 nothing, unless it becomes impatient
//	            SEND, WRITE                  RNR NAK, and an ACK when it may go on
//	            UC, UD                       nothing: dropped and counted
//
// A requester that repeats a READ or atomic because its timeout ended would soon
// have used up retry_cnt. It is told RNR for the response it waits for: to it that
// looks as if the responder had had no resources to accept the request (IBTA
// 9.7.5.2.8), and nothing more is counted but rnr_retry. What has executed behind
// the READ meanwhile was not acknowledged and will be a duplicate.
//
// One fault per side is with the adapter at a time (out). Its answer belongs to the
// wait that raised it (mine); if that wait has gone meanwhile, by a reset or because
// the page came in another way, the answer only means that another may be raised.

// cause says what waits, and so what becomes of it if the address is invalid (PF-13).
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

// needs are the rights that a fault is raised with. They go with the wait: when a
// fault has to wait for another one, what the QP met last is something else.
var faultAccess = [...]translate.Access{
	waitGather: 0, waitResult: translate.LocalWrite, waitRecv: translate.LocalWrite,
	waitRead: translate.RemoteRead, waitWrite: translate.RemoteWrite, // atAtomic: the operation's
}

// wait is something that waits for a fault, if cause is set.
type wait struct {
	cause     waitCause
	raised    bool   // the fault that is out is this one
	rnrSent   bool   // the peer was sent an RNR NAK for it
	wqe       uint32 // requester: number of the WQE
	psn       uint64 // requester: nothing from here on is sent; responder: what missed
	miss      translate.Miss
	refusedAt int64 // when psn was first refused
	// againAt is when to raise the fault once more, in case that it was forgotten;
	// 0: due.
	retryAt int64
}

// waits is the part of a QP that outlives a reset: a fault stays out.
type faultWaits struct {
	raised    [2]bool // by Side: the adapter owes a Resume
	send      wait    // Requester
	read      wait    // Responder: the oldest READ to be answered
	request   wait    // Responder: the request at epsn, which is dropped, or an atomic
	sqInvalid bool    // the queue's memory is invalid: no more is fetched
	rqInvalid bool
}

const (
	// faultAgain is a safety net only.
	faultRetry = 100e6
	// maxFault bounds what is asked for at once, bytes.
	maxFault = 1 << 20
	// firstDelay is what a fault is thought to take before one was measured, ns.
	defaultFaultDelay = 2e6
	// nakFault in responder.nak stands for an RNR NAK for a fault: its time is chosen
	// when it leaves.
	nakFault wire.Syndrome = 0x5f
)

// end makes w wait for nothing. Since when its PSN was refused is remembered: the
// same packet may meet one absent page after another.
func (w *wait) clear() { *w = wait{psn: w.psn, refusedAt: w.refusedAt} }

// held tells whether there is nothing to do but wait.
func (w *wait) blocked() bool { return w.cause != waitNone && w.retryAt != 0 }

// stops tells whether w keeps PSN psn and all after it from being sent.
func (w *wait) blocks(psn uint64) bool { return w.blocked() && psn >= w.psn }

// is tells whether w waits for the same as a miss that was just met.
func (w *wait) sameMiss(c waitCause, m *translate.Miss) bool {
	return w.cause == c && w.miss.Kind == m.Kind && w.miss.Key == m.Key && w.miss.Where == m.Where
}

// await makes w wait for m. A miss that is met again changes nothing.
func (q *QP) waitFor(side Side, w *wait, c waitCause, psn uint64, m translate.Miss) {
	q.stats.Faults++
	m.Len = min(max(m.Len, 1), maxFault)
	overdue := false
	if w.sameMiss(c, &m) {
		w.psn, w.wqe = psn, q.req.cur // another operation may meet it first now
		if w.retryAt != 0 {
			return
		}
		overdue = true
	} else {
		n := wait{cause: c, wqe: q.req.cur, psn: psn, miss: m, refusedAt: q.now}
		if w.psn == psn {
			n.rnrSent, n.refusedAt = w.rnrSent, w.refusedAt // the peer still waits for the same packet
		}
		*w = n
	}
	w.retryAt = q.now + faultRetry
	if overdue || !q.faults.raised[side] {
		q.raiseFault(side, w)
	}
}

// raise hands w's fault to the adapter.
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

// awaitSend is await for the requester. A miss behind the one that it waits for,
// met because that was tried again, has to wait its turn.
func (q *QP) requesterWait(c waitCause, psn uint64, m translate.Miss) {
	w := &q.faults.send
	if w.cause != waitNone && psn > w.psn {
		q.stats.Faults++
		w.retryAt = q.now + faultRetry
		return
	}
	q.waitFor(Requester, w, c, psn, m)
}

// awaitQueue notes that a work queue's memory is absent; the adapter has raised
// that fault itself.
func (q *QP) waitForQueue(side Side) {
	if side == Requester {
		q.requesterWait(waitQueue, q.req.nextPSN, translate.Miss{})
		return
	}
	q.waitFor(side, &q.faults.request, waitQueue, q.resp.epsn, translate.Miss{})
}

// Resume says that the fault which side waits for was served: the operation goes
// on, with a fresh look. !ok: the address is not valid, and the operation fails as
// its kind does (PF-13). An answer to what went away meanwhile does nothing.
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
				w.clear()
				q.wake()
				continue
			}
			q.raiseFault(Responder, w)
		}
	}
}

// resumeRequest: the packet that missed is long dropped, unless it was an atomic.
func (q *QP) resumeRequest(w *wait, ok bool) {
	if w.cause == waitQueue {
		if !ok {
			q.queueInvalid(&q.faults.rqInvalid)
			return
		}
		if q.state == Err {
			q.wake() // to go on flushing
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
	case w.rnrSent && q.resp.epsn-q.resp.ackPSN < psnHalf/2:
		// PF-9: the sender need not wait until its time is over.
		q.resp.ackPending = true
		q.wake()
	}
}

// goOnAtomic tries the atomic that waits once more.
func (q *QP) retryAtomic() {
	q.applyVerdict(q.executeAtomic())
	if q.resp.reorder.expiresAt != 0 {
		q.executeQueuedRequests()
	}
}

// queueGone ends a QP whose work queue lies in memory that is not valid.
func (q *QP) queueInvalid(gone *bool) {
	*gone = true
	if q.state == Err {
		return
	}
	q.sched.Event(EventFatal)
	q.toErr()
}

// faultTimer looks after faults that were not answered for long.
func (q *QP) faultTimer() {
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
	default:
		q.raiseFault(Responder, w)
	}
}

// rnrFor returns the RNR NAK for w: it names as long a wait as service is expected
// to take (PF-8), or as it has taken already, so that a slow pager does not use up
// the peer's rnr_retry. If w waits no more, the shortest.
func (q *QP) rnrSyndrome(w *wait) wire.Syndrome {
	d := int64(0)
	if w.cause != waitNone {
		if d = q.sched.FaultDelay(); d <= 0 {
			d = defaultFaultDelay
		}
		d = max(d, q.now-w.refusedAt)
	}
	return wire.SyndromeRNR | rnrCode(d)
}

// segmentRest returns how many bytes lie between m and the end of its segment. off
// is where in the message the access began.
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
