package roce

import (
	"github.com/vnicd/vnicd/device/rdma/roce/recovery"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Selective repeat, the requester's part: only lost packets are sent again. recovery.Scoreboard decides which packets
// are lost. Retransmissions by selective repeat are not counted against retry_cnt: the peer is alive. The timeout keeps
// running until the oldest packet is acknowledged. When it expires, the requester goes back, which clears the
// scoreboard.
//
// Retransmission uses the code of go-back-N: nxt returns to una, and packets that need no retransmission are skipped.
const (
	gapProbeMin  = 200e3 // ns
	maxGapProbes = 3     // probes of one packet each before a probe goes back
)

// clearScoreboard discards what is known of the packets in flight, and the queued responses: all packets are to be sent
// again.
func (q *QP) clearScoreboard() {
	b := &q.recovery.scoreboard
	if !b.Active {
		return
	}
	q.recovery.responses.drop(q.link)
	b.Clear(q.req.una, q.req.sent)
}

// receiveSelectiveAck handles a report of a gap at psn and of the packets that have arrived behind it.
func (q *QP) receiveSelectiveAck(psn uint64, p *wire.RoCE) {
	arrivals := p.Arrivals()
	if !q.cfg.SelectiveRepeat {
		q.stats.RxDropped++
		return
	}
	q.stats.RxSelectiveAcks++
	if arrivals.Has(0) {
		q.requestWaits(psn)
		return
	}
	if !q.acknowledge(psn) && !(q.requesterActive() && q.keepsResponses(p)) {
		if q.requesterActive() { // the response to a READ is missing
			q.gapDetected()
		}
		return
	}
	if q.req.rnrUntil != 0 {
		return // it was sent before the RNR NAK; the peer has emptied its reorder queue since
	}
	b := &q.recovery.scoreboard
	b.Start(q.req.una)
	if b.SelectiveAck(psn, q.req.una, q.req.sent, &arrivals, q.now) {
		q.restartTimers()
	}
}

// requestWaits handles a report that the request at psn has arrived and waits there for a page that is absent on the
// host (suspend.go). The peer is alive, and its silence is neither congestion nor a measure of the path. No probes
// follow, and the timeout begins again.
func (q *QP) requestWaits(psn uint64) {
	l := &q.recovery
	if !q.acknowledge(psn) || q.req.rnrUntil != 0 {
		return
	}
	l.retryLeft, l.timedPSN, l.silentSince = q.attr.RetryCnt, 0, 0
	l.gapReported = false // a NAK that follows asks for what the peer could not keep
	l.cwnd.Restore()
	l.rtxAt, l.timeoutAt, l.probes = 0, 0, maxProbes
	q.armRetransmit()
}

// restartTimers restarts the retransmission timer after a report that packets have arrived behind the gap.
func (q *QP) restartTimers() {
	l := &q.recovery
	l.scoreboard.Extend(q.req.sent)
	l.timedPSN = 0
	l.rtxAt, l.probes = 0, 0
	q.armRetransmit()
}

// detectLosses checks all packets in flight, after an arrival or when the scoreboard's CheckAt has passed, and starts
// the retransmission of those that are lost.
func (q *QP) detectLosses() {
	l, r := &q.recovery, &q.req
	b := &l.scoreboard
	b.ClearCounts()
	b.Retransmitting = b.Retransmitting && r.nxt < r.sent
	if b.Done(r.una) || !q.requesterActive() {
		q.clearScoreboard()
		return
	}
	if r.rnrUntil != 0 || r.nxt < r.sent && !b.Retransmitting {
		return // all packets that the peer has not received are sent again anyway
	}
	lost, oldest := b.DetectLosses(r.una, r.sent, q.now)
	if lost == 0 {
		return
	}
	q.sched.Used()
	if b.CutWindow(oldest, r.sent) {
		l.cwnd.OnSelectiveLoss(lost, b.QueueBuilt())
	}
	b.Retransmitting = true
	r.nxt, r.cur = r.una, r.head
	q.wake()
}

// skipDelivered advances nxt past packets that need no retransmission.
func (q *QP) skipDelivered() {
	b, r := &q.recovery.scoreboard, &q.req
	q.armRetransmit() // as nothing may be left to send, which would arm it
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

// probeGap sends the oldest packet again if the peer has later ones but has stopped reporting. It returns false if the
// requester must go back.
func (q *QP) probeGap() bool {
	b := &q.recovery.scoreboard
	if !b.Active || q.recovery.probes > maxGapProbes || q.req.nxt < q.req.sent && !b.Retransmitting {
		return false
	}
	b.MarkLost(q.req.una)
	q.detectLosses()
	q.armRetransmit()
	return b.Active
}

// inFlight returns how many PSNs are in flight; packets that are lost, or have arrived at the peer, are not.
func (q *QP) inFlight() uint64 {
	return q.recovery.scoreboard.InFlight(q.req.una, q.req.nxt, q.req.sent)
}

// noteSent records that the packets [nxt, end) of s are sent at this moment.
func (q *QP) noteSent(s *sendSlot, end uint64) {
	b, r := &q.recovery.scoreboard, &q.req
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
