package roce

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Responses as the requester sees them (IBTA 9.7.5.1.9, 9.7.5.2). A response with
// PSN p also acknowledges every SEND and WRITE packet before p; a READ or atomic
// before p that has no response yet means that its response was lost, which counts
// as a NAK for a sequence error (9.7.5.1.10: implied NAK).

// receiveResponse handles an ACKNOWLEDGE, READ response or ATOMIC acknowledge.
func (q *QP) receiveResponse(p *wire.RoCE) {
	if q.state != RTS && q.state != SQD {
		q.stats.RxDropped++
		return
	}
	q.meet(p.BTH.Selective)
	psn := extend(q.una, p.BTH.PSN)
	if psn < q.una || psn >= q.sent {
		// Old, or for something never sent (IBTA 9.7.5.1.5 ghosts).
		q.stats.Duplicates++
		if psn < q.una && p.Info.Op != wire.Ack {
			q.twice(psn)
		}
		if psn < q.una && p.Info.Op == wire.Ack && p.AETH().Syndrome.Kind() == wire.SyndromeACK {
			q.receiverReady()
		}
		return
	}
	q.response(psn, p)
	if q.board.active {
		q.replay()
		q.judge()
	}
	if q.blocked || q.nxt < q.sent {
		q.wake()
	}
	q.checkDrained()
}

// meet hears from the peer's newest response whether it is a vnicd, which may have more under way.
func (q *QP) meet(ours bool) {
	if q.ours == ours {
		return
	}
	q.ours = ours
	n := q.cfg.Window
	if !ours {
		n = min(n, strangerWindow)
	}
	q.window.bound(n)
}

func (q *QP) response(psn uint64, p *wire.RoCE) {
	switch p.Info.Op {
	case wire.Ack:
		q.receiveAck(psn, p)
	case wire.AtomicAck:
		q.receiveAtomicAck(psn, p)
	case wire.ReadResponse:
		q.receiveReadResponse(psn, p)
	case wire.SelectiveAck:
		q.receiveMap(psn, p)
	}
}

func (q *QP) receiveAck(psn uint64, p *wire.RoCE) {
	syn := p.AETH().Syndrome
	switch syn.Kind() {
	case wire.SyndromeACK:
		if !q.ackTo(psn+1) && q.live() && psn >= q.slot(q.head).end {
			q.gap(psn, p)
		}
	case wire.SyndromeRNR:
		q.stats.RxRNR++
		if !q.ackTo(psn) {
			q.lost()
			return
		}
		q.receiverNotReady(syn.Value())
	case wire.SyndromeNAK:
		q.ackTo(psn)
		if !q.live() {
			return
		}
		// Any other NAK ends the connection at the responder. So a READ before psn that
		// has no response yet, because it was lost or met an absent page here, will never
		// have one, and it is the READ that tells the program why.
		switch syn {
		case wire.NAKSequence:
			q.lost()
		case wire.NAKInvalidRequest:
			q.failHead(StatusRemInvReq)
		case wire.NAKRemoteAccess:
			q.failHead(StatusRemAccess)
		case wire.NAKRemoteOp:
			q.failHead(StatusRemOp)
		default:
			q.stats.RxDropped++ // reserved code
		}
	default:
		q.stats.RxDropped++
	}
}

// live tells whether the requester still runs: completing a WQE may have met a
// failed one behind it.
func (q *QP) live() bool { return q.state == RTS || q.state == SQD }

// ackTo takes everything before PSN to as acknowledged, as far as no unanswered
// READ or atomic stands in the way, and reports whether una got there.
func (q *QP) ackTo(to uint64) bool {
	start := q.una
	for q.una < to {
		s := q.slot(q.head)
		if s.info.kind.answered() {
			break
		}
		if to < s.end {
			q.una = to
			break
		}
		q.una = s.end
		q.completeHead(StatusSuccess)
	}
	q.progress(start)
	return q.una == to && q.live()
}

// progress does what is due when una has moved on from start.
func (q *QP) progress(start uint64) {
	n := q.una - start
	if n == 0 {
		return
	}
	if q.board.active {
		for psn := start; psn < q.una; psn++ {
			if m := *q.board.mark(psn); m&(isReply|isThere) == isReply {
				q.replied(psn)
			} else if !q.board.has(psn) {
				q.arrived(psn)
			}
		}
		if q.replies.kept > 0 {
			q.replies.untilAt = q.now + aheadFor
		}
	}
	q.retryLeft, q.rnrLeft = q.attr.RetryCnt, q.attr.RNRRetry
	q.recovering = false
	if q.rnrAt != 0 {
		q.rnrAt = 0 // what was not ready has answered
		q.wake()
	}
	if q.nxt < q.una {
		q.nxt, q.cur = q.una, q.head
	}
	q.retireRequests()
	q.measure()
	q.rtxAt, q.fullAt, q.probes = 0, 0, 0
	if q.nxt > q.una {
		q.armRetransmit()
	}
	q.window.progress(q.una, n)
	q.retire()
	if q.head != q.tail && q.slot(q.head).failed {
		q.failHead(q.slot(q.head).w.Status)
	}
}

// received moves una past the response just consumed.
func (q *QP) received(s *sendSlot) {
	start := q.una
	q.una++
	if q.una == s.end {
		q.completeHead(StatusSuccess)
	}
	q.progress(start)
}

// answers tells whether p is the response, an ATOMIC acknowledge or not, that slot
// head waits for; if not, a gap is dealt with.
func (q *QP) answers(psn uint64, p *wire.RoCE, atomicAck bool) (*sendSlot, bool) {
	if !q.ackTo(psn) {
		q.gap(psn, p)
		return nil, false
	}
	s := q.slot(q.head)
	if !s.info.kind.answered() || (s.info.kind == kindAtomic) != atomicAck {
		q.stats.RxDropped++
		return nil, false
	}
	return s, true
}

func (q *QP) receiveReadResponse(psn uint64, p *wire.RoCE) {
	if p.AETH().Syndrome.Kind() != wire.SyndromeACK { // MIDDLE has none, which reads as 0
		q.stats.RxDropped++
		return
	}
	s, ok := q.answers(psn, p, false)
	if !ok {
		return
	}
	// Responders differ in whether a repeated part starts with FIRST or goes on
	// with MIDDLE (rxe), so the position alone decides the length.
	off := (psn - s.first) * uint64(q.mtu)
	want := uint64(0) // of an ATOMIC WRITE (A19)
	if s.info.kind == kindRead {
		want = min(s.w.Length-off, uint64(q.mtu))
	}
	if uint64(len(p.Payload)) != want {
		q.failHead(StatusBadResp)
		return
	}
	if q.scatterResult(s, off, p.Payload) {
		q.received(s)
	}
}

func (q *QP) receiveAtomicAck(psn uint64, p *wire.RoCE) {
	if p.AETH().Syndrome.Kind() != wire.SyndromeACK {
		q.stats.RxDropped++
		return
	}
	s, ok := q.answers(psn, p, true)
	if !ok {
		return
	}
	// The result is an integer in the guest's byte order, which is little-endian.
	binary.LittleEndian.PutUint64(q.result[:], p.AtomicAck())
	if q.scatterResult(s, 0, q.result[:]) {
		q.received(s)
	}
}

// scatterResult stores response data; a miss suspends or fails the WQE. Absent
// memory costs a repetition: the response is dropped (PF-10).
func (q *QP) scatterResult(s *sendSlot, off uint64, data []byte) bool {
	if len(data) == 0 {
		return true
	}
	m := q.a.Scatter(s.w.SGEs, off, data)
	switch {
	case m.OK():
		if q.waits.send.cause == atResult {
			q.waits.send.end()
		}
		return true
	case m.Fault():
		m.Len = segmentRest(s.w.SGEs, off, m)
		q.goBack()
		q.fullAt, q.probes = 0, 0
		q.awaitSend(atResult, q.una, m)
	default:
		q.stats.LocalErrors++
		q.failHead(StatusLocProt)
	}
	return false
}

// receiverNotReady waits as the peer's RNR NAK asks (IBTA 9.7.5.2.8).
func (q *QP) receiverNotReady(timer uint8) {
	if q.rnrAt != 0 {
		return // a copy of the NAK
	}
	if q.attr.RNRRetry != 7 {
		if q.rnrLeft == 0 {
			q.failHead(StatusRNRRetryExc)
			return
		}
		q.rnrLeft--
	}
	q.goBack()
	q.fullAt, q.probes = 0, 0
	// The peer lives, and that it was silent before was no congestion.
	q.retryLeft = q.attr.RetryCnt
	q.window.restore()
	q.rnrAt = q.now + rnrTimer[timer]
}

// receiverReady ends the wait for a receiver: an acknowledgement of nothing new is
// its sign that it is ready before its time (PF-9). An RNR NAK taken back like that
// does not count. A late copy of an older ACK does no more harm than another NAK.
func (q *QP) receiverReady() {
	if q.rnrAt == 0 {
		return
	}
	q.rnrAt = 0
	if q.attr.RNRRetry != 7 {
		q.rnrLeft = min(q.rnrLeft+1, q.attr.RNRRetry)
	}
	q.wake()
}
