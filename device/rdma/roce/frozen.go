package roce

import "github.com/vnicd/vnicd/device/rdma/wire"

// A VM that is paused (CO-3). Between Freeze and Thaw the QP accesses no guest memory: it executes, completes and times
// nothing. To a peer that is silence, which uses up retry_cnt within seconds. So a frozen responder of RC answers
// requests:
//
//	executed before     SENDs and WRITEs are acknowledged again
//	anything else       a peer that retries RNR NAKs for ever is sent one; a vnicd is told that its request waits; for
//	                    any other peer the only answer that could help might also end the connection, so it gets none
//
// What a peer does after RNR NAKs is often unknown (Linux rxe, without connection management). Most programs ask for
// endless retries, and for 7 of retry_cnt: such a peer gets its first RNR NAK when it has repeated a request a few
// times, which it does no more often than retry_cnt allows.
//
// After Thaw it asks for requests that it has not answered.
//
// Responses that arrive are dropped. After Thaw the requester sends again what is unacknowledged, which is not charged
// to retry_cnt: the peer was not silent, this side was.

// silentRepeats is how often a request of a peer that is not known to wait is repeated before it is refused.
const silentRepeats = 3

// A frozen responder asks its peer to wait for as long as the pause has lasted, within these bounds, ns. Thaw ends the
// wait early (PF-9).
const (
	minFrozenWait = 1e6
	maxFrozenWait = 650e6
)

// frozen is what a QP remembers during a pause.
type frozen struct {
	since    int64
	arrivals uint8 // of requests that were not answered
	refused  bool  // an RNR NAK was sent
	moved    bool  // from another process: the wait after an RNR NAK was lost
}

// Freeze begins a pause. Until Thaw only ReceiveFrozen, Query and Close may be called.
func (q *QP) Freeze(now int64) { q.frozen = frozen{since: now} }

// ReceiveFrozen is Receive during a pause: of the adapter it calls only Link's GetBuf and Transmit, and PeerPatience.
func (q *QP) ReceiveFrozen(now int64, p *wire.RoCE) {
	if q.closed || q.typ != RC || q.state < RTR || q.state == Err || p.Info.Is(wire.Response) {
		return
	}
	q.now = now
	if !q.admits(p) || p.Info.Op == wire.CNP || q.resp.fatal.syndrome != 0 {
		return
	}
	r := &q.resp
	r.peerSelective, r.patience = p.BTH.Selective && q.cfg.SelectiveRepeat, p.BTH.Patience
	psn := extend(r.epsn, p.BTH.PSN)
	if psn > r.epsn {
		return // the one before it is asked for by its repetition
	}
	if psn < r.epsn {
		q.stats.Duplicates++
		if op := p.Info.Op; op == wire.Send || op == wire.Write {
			q.acknowledgeFrozen(psn)
			return
		}
	}
	q.holdPeer(psn)
}

// acknowledgeFrozen answers a SEND or WRITE that was executed before the pause. An acknowledgement must not name or
// overtake the response of a READ or atomic that has not been sent. What another process has sent is not known yet.
func (q *QP) acknowledgeFrozen(psn uint64) {
	r := &q.resp
	if r.pending > 0 {
		if o := r.oldestPending(); !q.frozen.moved && o.behindSend && psn < o.first && o.next == o.start {
			q.sendAck(wire.NoCredits, o.first-1)
		}
		return
	}
	if _, due := r.emptyDue.first(); due || r.ackPSN < psn || r.epsn-r.ackPSN >= psnHalf/2 {
		return
	}
	q.sendAck(wire.NoCredits, r.ackPSN)
}

// holdPeer makes the sender of request psn wait, if there is a way.
func (q *QP) holdPeer(psn uint64) {
	r, f := &q.resp, &q.frozen
	switch patience := q.patience(); {
	case patience == wire.PatienceForever:
	case r.peerSelective:
		q.sendWaits(psn)
		return
	case patience == wire.PatienceEnds:
		return
	default:
		if f.arrivals <= silentRepeats {
			f.arrivals++
			return
		}
	}
	d, at := min(max(q.now-f.since, minFrozenWait), maxFrozenWait), psn
	if r.pending > 0 {
		at = min(at, r.oldestPending().next) // an RNR NAK acknowledges what is before it, and must not name a READ as such
	}
	if q.sendAck(wire.SyndromeRNR|rnrCode(d), at) && psn == r.epsn {
		// Requests behind it are on their way, and come again after it.
		f.refused, r.nakSent = true, true
	}
}

// Thaw ends a pause. Timer and Run must be called next.
func (q *QP) Thaw(now int64) {
	q.now = now
	f := q.frozen
	q.frozen = frozen{}
	if q.closed || q.typ != RC {
		return
	}
	if q.requesterActive() && q.req.sent > q.req.una {
		l := &q.recovery
		if f.moved && q.attr.RNRRetry != rnrForever { // the next attempt may be too early, and is not charged
			q.req.rnrLeft = min(q.req.rnrLeft+1, q.attr.RNRRetry)
		}
		l.retryLeft, l.probes = q.attr.RetryCnt, 0
		l.timeoutAt, l.responses.expiresAt = 0, 0
		if q.req.rnrUntil == 0 && q.req.stallUntil == 0 && q.faults.send.cause == waitNone {
			q.goBack()
		} else {
			l.rtxAt = 0
			q.armRetransmit()
		}
	}
	if q.resp.stallUntil != 0 { // of a response during the pause
		q.resp.stallUntil = now
	}
	switch {
	case f.refused:
		r := &q.resp
		// Of a READ that is the newest request the peer may have a part, and may have asked for the rest.
		withinRead := f.moved && !r.peerSelective && r.ackPSN+1 < r.epsn
		if q.state >= RTR && q.state != Err && r.epsn-r.ackPSN < psnHalf/2 && !withinRead {
			r.ackPending = true
			if r.pending > 0 {
				r.acknowledgeBy(r.oldestPending())
			}
			q.wake()
		}
	case f.arrivals > 0:
		q.askAgain()
	}
}

// askAgain makes the responder ask, once, for the request that it expects, because it has left requests without an
// answer: the peer need not wait for its timeout, and sends again what is in flight. It must not be called if requests
// may be on their way: a peer with no retries left would take the NAK for the last one.
func (q *QP) askAgain() {
	r := &q.resp
	if q.closed || q.typ != RC || q.state < RTR || q.state == Err || r.fatal.syndrome != 0 || r.nak != 0 ||
		q.faults.request.cause != waitNone || r.reorder.arrived.Any() {
		return // it answers anyway
	}
	r.nak, r.nakSent = wire.NAKSequence, true
	q.wake()
}
