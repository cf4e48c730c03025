package roce

import (
	"github.com/vnicd/vnicd/device/rdma/roce/recovery"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Selective repeat, the requester's part: only lost packets are sent again. recovery.Scoreboard decides which packets are lost.
// Retransmissions by selective repeat are not counted against retry_cnt: the peer is alive. The timeout runs on until the oldest
// packet is acknowledged. Then the scoreboard is cleared, as before any other going back.
//
// Retransmission uses the code of going back: nxt returns to una, and what need not be sent again is skipped.
const (
	gapProbeMin  = 200e3 // ns
	maxGapProbes = 3     // probes of one packet each before a probe goes back
)

// clearScoreboard discards what is known of the packets in flight: all of them are to be sent again.
func (q *QP) clearScoreboard() {
	b := &q.recovery.board
	if !b.Active {
		return
	}
	q.dropQueuedResponses()
	b.Clear(q.req.una, q.req.sent)
}

// receiveSelectiveAck handles a report of a gap at psn and of the packets that have arrived behind it.
func (q *QP) receiveSelectiveAck(psn uint64, p *wire.RoCE) {
	arrivals := p.Arrivals()
	if !q.cfg.SelectiveRepeat || arrivals.Has(0) {
		q.stats.RxDropped++
		return
	}
	q.stats.RxSelectiveAcks++
	if !q.acknowledge(psn) && !(q.requesterActive() && q.keepsResponses(p)) {
		if q.requesterActive() { // the response of a READ is missing
			q.gapDetected()
		}
		return
	}
	if q.req.rnrUntil != 0 {
		return // sent before the RNR NAK; the peer has dropped its reorder queue since
	}
	b := &q.recovery.board
	b.Start(q.req.una)
	if b.SelectiveAck(psn, q.req.una, q.req.sent, &arrivals, q.now) {
		q.restartTimers()
	}
}

// restartTimers goes on after a sign that packets do arrive: only the acknowledgement of the oldest is delayed.
func (q *QP) restartTimers() {
	l := &q.recovery
	l.board.Extend(q.req.sent)
	l.timedPSN = 0
	l.rtxAt, l.probes = 0, 0
	q.armRetransmit()
}

// detectLosses looks at all that is in flight, after something has arrived or after some time.
func (q *QP) detectLosses() {
	l, r := &q.recovery, &q.req
	b := &l.board
	b.ClearCounts()
	b.Retransmitting = b.Retransmitting && r.nxt < r.sent
	if b.Done(r.una) || !q.requesterActive() {
		q.clearScoreboard()
		return
	}
	if r.rnrUntil != 0 || r.nxt < r.sent && !b.Retransmitting {
		return // everything is sent again, except what the peer has
	}
	lost, oldest := b.DetectLosses(r.una, r.sent, q.now)
	if lost == 0 {
		return
	}
	if b.CutWindow(oldest, r.sent) {
		l.cwnd.OnSelectiveLoss(lost, b.QueueBuilt())
	}
	b.Retransmitting = true
	r.nxt, r.cur = r.una, r.head
	q.wake()
}

// skipDelivered advances nxt past what need not be sent again.
func (q *QP) skipDelivered() {
	b, r := &q.recovery.board, &q.req
	q.armRetransmit() // possibly nothing is sent that would arm it
	for r.nxt < r.sent && !b.NeedsRetransmit(r.nxt, q.now) {
		s := r.slot(r.cur)
		switch {
		case s.end == r.nxt: // memory management
		case s.info.kind.needsResponse() && r.nxt >= b.Executed: // the request as a whole
			r.nxt, _ = q.requestEnd(s)
		default:
			r.nxt++
		}
		if r.nxt == s.end {
			r.cur++
		}
	}
	if r.nxt == r.sent {
		b.EndRetransmit()
	}
}

// probeGap sends the oldest packet again if the peer has later ones and reports no more. It returns false if going back is due.
func (q *QP) probeGap() bool {
	b := &q.recovery.board
	if !b.Active || q.recovery.probes > maxGapProbes || q.req.nxt < q.req.sent && !b.Retransmitting {
		return false
	}
	b.MarkLost(q.req.una)
	q.detectLosses()
	q.armRetransmit()
	return b.Active
}

// inFlight returns how many PSNs are in flight; what is lost, or has arrived at the peer, is not.
func (q *QP) inFlight() uint64 { return q.recovery.board.InFlight(q.req.una, q.req.nxt, q.req.sent) }

// noteSent records that the packets [nxt, end) of s are sent now.
func (q *QP) noteSent(s *sendSlot, end uint64) {
	b, r := &q.recovery.board, &q.req
	f := recovery.Flags(0)
	if s.info.kind.needsResponse() {
		f = recovery.AwaitsResponse | recovery.FirstResponse
	}
	if r.nxt < r.sent {
		n := min(end, r.sent) - r.nxt
		f = b.NoteRetransmit(f, n)
		q.stats.Retransmits += n
	} else if q.recovery.timedPSN == 0 && !b.Active {
		q.recovery.timedPSN, q.recovery.timedAt = r.nxt+1, q.now
	}
	b.NoteSent(r.nxt, end, q.now, f)
}
