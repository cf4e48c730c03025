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
type cause uint8

const (
	atNothing cause = iota
	atQueue         // work queue: QP fatal
	atGather        // requester's message: local protection error
	atResult        // READ or atomic result: local protection error
	atRead          // READ at the responder: remote access NAK
	atWrite         // WRITE: remote access NAK
	atAtomic        // atomic: remote access NAK
	atRecv          // receive buffer: local protection error, remote operational NAK
)

// needs are the rights that a fault is raised with. They go with the wait: when a
// fault has to wait for another one, what the QP met last is something else.
var needs = [...]translate.Access{
	atGather: 0, atResult: translate.LocalWrite, atRecv: translate.LocalWrite,
	atRead: translate.RemoteRead, atWrite: translate.RemoteWrite, // atAtomic: the operation's
}

// wait is something that waits for a fault, if cause is set.
type wait struct {
	cause cause
	mine  bool   // the fault that is out is this one
	told  bool   // the peer was sent an RNR NAK for it
	wqe   uint32 // requester: number of the WQE
	psn   uint64 // requester: nothing from here on is sent; responder: what missed
	m     translate.Miss
	since int64 // when psn was first refused
	// againAt is when to raise the fault once more, in case that it was forgotten;
	// 0: due.
	againAt int64
}

// waits is the part of a QP that outlives a reset: a fault stays out.
type waits struct {
	out     [2]bool // by Side: the adapter owes a Resume
	send    wait    // Requester
	read    wait    // Responder: the oldest READ to be answered
	request wait    // Responder: the request at epsn, which is dropped, or an atomic
	sqGone  bool    // the queue's memory is invalid: no more is fetched
	rqGone  bool
}

const (
	// faultAgain is a safety net only.
	faultAgain = 100e6
	// maxFault bounds what is asked for at once, bytes.
	maxFault = 1 << 20
	// firstDelay is what a fault is thought to take before one was measured, ns.
	firstDelay = 2e6
	// nakFault in responder.nak stands for an RNR NAK for a fault: its time is chosen
	// when it leaves.
	nakFault wire.Syndrome = 0x5f
)

// end makes w wait for nothing. Since when its PSN was refused is remembered: the
// same packet may meet one absent page after another.
func (w *wait) end() { *w = wait{psn: w.psn, since: w.since} }

// held tells whether there is nothing to do but wait.
func (w *wait) held() bool { return w.cause != atNothing && w.againAt != 0 }

// stops tells whether w keeps PSN psn and all after it from being sent.
func (w *wait) stops(psn uint64) bool { return w.held() && psn >= w.psn }

// is tells whether w waits for the same as a miss that was just met.
func (w *wait) is(c cause, m *translate.Miss) bool {
	return w.cause == c && w.m.Kind == m.Kind && w.m.Key == m.Key && w.m.Where == m.Where
}

// await makes w wait for m. A miss that is met again changes nothing.
func (q *QP) await(side Side, w *wait, c cause, psn uint64, m translate.Miss) {
	q.stats.Faults++
	m.Len = min(max(m.Len, 1), maxFault)
	overdue := false
	if w.is(c, &m) {
		w.psn, w.wqe = psn, q.cur // another operation may meet it first now
		if w.againAt != 0 {
			return
		}
		overdue = true
	} else {
		n := wait{cause: c, wqe: q.cur, psn: psn, m: m, since: q.now}
		if w.psn == psn {
			n.told, n.since = w.told, w.since // the peer still waits for the same packet
		}
		*w = n
	}
	w.againAt = q.now + faultAgain
	if overdue || !q.out[side] {
		q.raise(side, w)
	}
}

// raise hands w's fault to the adapter.
func (q *QP) raise(side Side, w *wait) {
	if !q.out[side] {
		q.out[side] = true
		w.mine = true
	}
	w.againAt = q.now + faultAgain
	need := needs[w.cause]
	if w.cause == atAtomic {
		need = atomicOps[q.atomic.op].Needs()
	}
	if w.cause != atQueue {
		q.a.Fault(side, w.m, need)
	}
}

// awaitSend is await for the requester. A miss behind the one that it waits for,
// met because that was tried again, has to wait its turn.
func (q *QP) awaitSend(c cause, psn uint64, m translate.Miss) {
	w := &q.waits.send
	if w.cause != atNothing && psn > w.psn {
		q.stats.Faults++
		w.againAt = q.now + faultAgain
		return
	}
	q.await(Requester, w, c, psn, m)
}

// awaitQueue notes that a work queue's memory is absent; the adapter has raised
// that fault itself.
func (q *QP) awaitQueue(side Side) {
	if side == Requester {
		q.awaitSend(atQueue, q.assigned, translate.Miss{})
		return
	}
	q.await(side, &q.waits.request, atQueue, q.epsn, translate.Miss{})
}

// Resume says that the fault which side waits for was served: the operation goes
// on, with a fresh look. !ok: the address is not valid, and the operation fails as
// its kind does (PF-13). An answer to what went away meanwhile does nothing.
func (q *QP) Resume(now int64, side Side, ok bool) {
	if q.closed {
		return
	}
	q.now = now
	q.out[side] = false
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
	w := q.waits.send
	if w.cause == atNothing {
		return
	}
	q.waits.send.end()
	q.wake()
	if ok || !w.mine {
		return
	}
	if w.cause == atQueue {
		q.queueGone(&q.sqGone)
		return
	}
	if int32(w.wqe-q.head) < 0 || int32(q.tail-w.wqe) <= 0 || !q.live() {
		return
	}
	if s := q.slot(w.wqe); !s.failed {
		q.stats.LocalErrors++
		q.failSlot(s, StatusLocProt)
	}
}

func (q *QP) resumeResponder(ok bool) {
	switch {
	case q.waits.read.mine:
		w := q.waits.read
		q.waits.read.end()
		q.wake()
		if !ok && q.pending > 0 {
			if r := q.oldestPending(); r.next == w.psn {
				q.failRead(r)
			}
		}
	case q.waits.request.mine:
		w := q.waits.request
		q.waits.request.end()
		q.resumeRequest(&w, ok)
	}
	for _, w := range [...]*wait{&q.waits.read, &q.waits.request} {
		if w.cause != atNothing && !q.out[Responder] {
			if w.cause == atQueue { // only looking for a receive raises it
				w.end()
				q.wake()
				continue
			}
			q.raise(Responder, w)
		}
	}
}

// resumeRequest: the packet that missed is long dropped, unless it was an atomic.
func (q *QP) resumeRequest(w *wait, ok bool) {
	if w.cause == atQueue {
		if !ok {
			q.queueGone(&q.rqGone)
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
		if w.cause == atWrite {
			q.stats.AccessErrors++
		} else if q.haveWQE {
			q.stats.LocalErrors++
			q.failRecv(StatusLocProt)
			q.toErr()
		}
		return
	}
	if w.psn != q.epsn || q.fatal.syndrome != 0 || q.state == Err {
		return
	}
	switch {
	case !ok && w.cause == atRecv:
		q.stats.LocalErrors++
		q.verdictRC(vRecvProt)
	case !ok:
		q.verdictRC(vRemAccess)
	case w.cause == atAtomic:
		q.goOnAtomic()
	case w.told && q.epsn-q.ackPSN < psnHalf/2:
		// PF-9: the sender need not wait until its time is over.
		q.ackPending = true
		q.wake()
	}
}

// goOnAtomic tries the atomic that waits once more.
func (q *QP) goOnAtomic() {
	q.verdictRC(q.executeAtomic())
	if q.ahead.untilAt != 0 {
		q.catchUp()
	}
}

// queueGone ends a QP whose work queue lies in memory that is not valid.
func (q *QP) queueGone(gone *bool) {
	*gone = true
	if q.state == Err {
		return
	}
	q.a.Event(EventFatal)
	q.toErr()
}

// faultTimer looks after faults that were not answered for long.
func (q *QP) faultTimer() {
	due := func(w *wait) bool {
		if w.cause == atNothing || w.againAt == 0 || q.now < w.againAt {
			return false
		}
		w.againAt = 0
		return true
	}
	if due(&q.waits.send) || due(&q.waits.read) {
		q.wake()
	}
	switch w := &q.waits.request; {
	case !due(w):
	case w.cause == atAtomic:
		q.goOnAtomic()
	default:
		q.raise(Responder, w)
	}
}

// rnrFor returns the RNR NAK for w: it names as long a wait as service is expected
// to take (PF-8), or as it has taken already, so that a slow pager does not use up
// the peer's rnr_retry. If w waits no more, the shortest.
func (q *QP) rnrFor(w *wait) wire.Syndrome {
	d := int64(0)
	if w.cause != atNothing {
		if d = q.a.FaultDelay(); d <= 0 {
			d = firstDelay
		}
		d = max(d, q.now-w.since)
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
