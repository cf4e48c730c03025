package roce

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Responses, the requester's part (IBTA 9.7.5.1.9, 9.7.5.2). A response with PSN p also acknowledges every SEND and
// WRITE packet before p. If a READ or atomic before p has no response yet, its response was lost. This counts as a NAK
// for a sequence error (9.7.5.1.10: implied NAK).

// receiveResponse handles an ACKNOWLEDGE, READ response or ATOMIC acknowledge.
func (q *QP) receiveResponse(p *wire.RoCE) {
	if q.state != RTS && q.state != SQD {
		q.stats.RxDropped++
		return
	}
	if q.req.nextPSN < q.req.sent && !q.fetchSent() {
		q.stats.RxDropped++
		return
	}
	q.recovery.notePeer(p.BTH.Selective, q.cfg.Window)
	psn := extend(q.req.una, p.BTH.PSN)
	if psn >= q.req.sent && psn < q.req.past && p.Info.Op == wire.Ack {
		q.sentBefore(psn)
	}
	if psn < q.req.una || psn >= q.req.sent {
		// A duplicate, or a response to a PSN that was never sent (IBTA 9.7.5.1.5: ghosts).
		q.stats.Duplicates++
		if psn >= q.req.una {
			return
		}
		q.recovery.early.duplicate(psn)
		if p.Info.Op != wire.Ack {
			q.recovery.scoreboard.DuplicateResponse(psn, q.req.sent)
		} else if p.AETH().Syndrome.Kind() == wire.SyndromeACK {
			q.receiverReady()
			q.peerReturned()
		}
		return
	}
	q.handleResponse(psn, p)
	if q.recovery.scoreboard.Active {
		q.handleQueuedResponses()
		q.detectLosses()
	}
	if q.req.blocked || q.req.nxt < q.req.sent {
		q.wake()
	}
	q.checkDrained()
}

// handleResponse handles a response that is in order: its PSN is in [una, sent).
func (q *QP) handleResponse(psn uint64, p *wire.RoCE) {
	switch p.Info.Op {
	case wire.Ack:
		q.receiveAck(psn, p)
	case wire.AtomicAck:
		q.receiveAtomicAck(psn, p)
	case wire.ReadResponse:
		q.receiveReadResponse(psn, p)
	case wire.SelectiveAck:
		q.receiveSelectiveAck(psn, p)
	}
}

func (q *QP) receiveAck(psn uint64, p *wire.RoCE) {
	syn := p.AETH().Syndrome
	switch syn.Kind() {
	case wire.SyndromeACK:
		if !q.acknowledge(psn+1) && q.requesterActive() && psn >= q.req.slot(q.req.head).end {
			q.responseGap(psn, p)
		}
	case wire.SyndromeRNR:
		q.stats.RxRNR++
		if !q.acknowledge(psn) {
			q.gapDetected()
			return
		}
		q.receiverNotReady(syn.Value())
	case wire.SyndromeNAK:
		q.acknowledge(psn)
		if !q.requesterActive() {
			return
		}
		// Any other NAK ends the connection at the responder. If a READ before psn has no response yet, because
		// it was lost or met an absent page here, it will never have one. Then the READ is the WQE that
		// completes with the error.
		switch syn {
		case wire.NAKSequence:
			q.gapDetected()
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

// requesterActive reports whether the requester still runs. Completing a WQE may complete a failed one behind it, which
// ends this.
func (q *QP) requesterActive() bool { return q.state == RTS || q.state == SQD }

// acknowledge moves una to PSN to and completes WQEs, but not past a READ or atomic without response. It reports
// whether una reached to.
func (q *QP) acknowledge(to uint64) bool {
	start := q.req.una
	for q.req.una < to {
		s := q.req.slot(q.req.head)
		if s.info.kind.needsResponse() {
			break
		}
		if to < s.end {
			q.req.una = to
			break
		}
		q.req.una = s.end
		q.completeHead(StatusSuccess)
	}
	q.advanceUna(start)
	return q.req.una == to && q.requesterActive()
}

// advanceUna updates timers, counters and the window after una has moved on from start.
func (q *QP) advanceUna(start uint64) {
	n := q.req.una - start
	if n == 0 {
		return
	}
	if b := &q.recovery.scoreboard; b.Active {
		b.Acknowledged(start, q.req.una, q.req.sent, q.now)
		if q.recovery.responses.Len() > 0 {
			q.recovery.responses.expiresAt = q.now + reorderTimeout
		}
	}
	q.recovery.retryLeft, q.req.rnrLeft = q.attr.RetryCnt, q.attr.RNRRetry
	q.recovery.gapReported = false
	if q.req.rnrUntil != 0 {
		q.req.rnrUntil = 0 // the receiver has become ready
		q.wake()
	}
	if q.req.nxt < q.req.una {
		q.req.nxt, q.req.cur = q.req.una, q.req.head
	}
	q.req.retireReads()
	if l := &q.recovery; l.early.lost(q.req.una) && l.scoreboard.CutWindow(l.early.first, q.req.sent) {
		l.cwnd.OnSelectiveLoss(1, l.scoreboard.QueueBuilt())
	}
	if q.recovery.early.answered(n) {
		q.sched.Used()
	}
	q.recovery.measureRTT(q.req.una, q.now)
	q.recovery.rtxAt, q.recovery.timeoutAt, q.recovery.probes, q.recovery.returned = 0, 0, 0, false
	if q.req.nxt > q.req.una {
		q.armRetransmit()
	}
	q.recovery.cwnd.OnAck(q.req.una, n)
	q.completeManaged()
	if q.req.head != q.req.tail && q.req.slot(q.req.head).failed {
		q.failHead(q.req.slot(q.req.head).w.Status)
	}
}

// consumeResponse moves una past the response that was just handled, which is of slot s.
func (q *QP) consumeResponse(s *sendSlot) {
	start := q.req.una
	q.req.una++
	if q.req.una == s.end {
		q.completeHead(StatusSuccess)
	}
	q.advanceUna(start)
}

// matchResponse returns the slot that waits for response p, an ATOMIC acknowledge or not. If there is none, it handles
// the gap before p, or drops p.
func (q *QP) matchResponse(psn uint64, p *wire.RoCE, atomicAck bool) (*sendSlot, bool) {
	if !q.acknowledge(psn) {
		q.responseGap(psn, p)
		return nil, false
	}
	s := q.req.slot(q.req.head)
	if !s.info.kind.needsResponse() || (s.info.kind == kindAtomic) != atomicAck {
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
	s, ok := q.matchResponse(psn, p, false)
	if !ok {
		return
	}
	// Some responders begin a repetition with FIRST, others (rxe) with MIDDLE, so only the position determines the
	// length.
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
		q.consumeResponse(s)
	}
}

func (q *QP) receiveAtomicAck(psn uint64, p *wire.RoCE) {
	if p.AETH().Syndrome.Kind() != wire.SyndromeACK {
		q.stats.RxDropped++
		return
	}
	s, ok := q.matchResponse(psn, p, true)
	if !ok {
		return
	}
	// The result is an integer in the guest's byte order, which is little-endian.
	binary.LittleEndian.PutUint64(q.req.atomicResult[:], p.AtomicAck())
	if q.scatterResult(s, 0, q.req.atomicResult[:]) {
		q.consumeResponse(s)
	}
}

// scatterResult stores response data. A miss suspends or fails the WQE. If the memory is absent, the response is
// dropped and requested again (PF-10).
func (q *QP) scatterResult(s *sendSlot, off uint64, data []byte) bool {
	if len(data) == 0 {
		return true
	}
	m := q.memory.Scatter(s.w.SGEs, off, data)
	switch {
	case m.OK():
		if q.faults.send.cause == waitResult {
			q.faults.send.clear()
			q.wake() // Resume, which comes later, finds no wait and does not
		}
		return true
	case m.Fault():
		m.Len = segmentRest(s.w.SGEs, off, m)
		q.goBack()
		q.recovery.timeoutAt, q.recovery.probes = 0, 0
		q.requesterWait(waitResult, q.req.una, m)
	default:
		q.stats.LocalErrors++
		q.failHead(StatusLocProt)
	}
	return false
}

// receiverNotReady waits for the time given in the peer's RNR NAK (IBTA 9.7.5.2.8). If the receiver is not ready after
// that either, it drops all that is sent but answers the first packet. So one packet is sent then, as a probe.
func (q *QP) receiverNotReady(timer uint8) {
	if q.req.rnrUntil != 0 {
		return // a copy of the NAK
	}
	if q.attr.RNRRetry != rnrForever {
		if q.req.rnrLeft == 0 {
			q.failHead(StatusRNRRetryExc)
			return
		}
		q.req.rnrLeft--
	}
	q.goBack()
	q.recovery.timeoutAt, q.recovery.probes = 0, 0
	// The peer is alive, and its silence before was not congestion.
	q.recovery.retryLeft, q.recovery.silentSince = q.attr.RetryCnt, 0
	q.recovery.cwnd.Restore()
	q.recovery.cwnd.OnNotReady(q.req.una)
	q.req.rnrUntil = q.now + rnrTimer[timer]
}

// receiverReady ends an RNR wait: an acknowledgement of nothing new means that the receiver became ready early (PF-9).
// The RNR NAK is then not charged to rnr_retry. A late copy of an older ACK does no more harm than another RNR NAK.
func (q *QP) receiverReady() {
	if q.req.rnrUntil == 0 {
		return
	}
	q.req.rnrUntil = 0
	q.recovery.cwnd.OnReady()
	if q.attr.RNRRetry != rnrForever {
		q.req.rnrLeft = min(q.req.rnrLeft+1, q.attr.RNRRetry)
	}
	q.wake()
}

// peerReturned is called for an acknowledgement of nothing new. After probes in vain it says that the peer is back, and
// most likely without what was sent to it meanwhile: a vnicd sends one when it continues in another process or after a
// pause (Thaw). What is unacknowledged is then sent again at once instead of after the time that the probes have
// doubled. A late copy of an older acknowledgement, or a peer that sends many, causes one repetition until una
// advances.
func (q *QP) peerReturned() {
	l := &q.recovery
	if l.returned || l.probes < vainProbes || q.req.rnrUntil != 0 || q.req.stallUntil != 0 || !q.requesterActive() {
		return
	}
	l.returned, l.silentSince = true, 0
	l.timeoutAt, l.probes = 0, 0
	l.cwnd.Restore() // it was no congestion
	q.goBack()
}
