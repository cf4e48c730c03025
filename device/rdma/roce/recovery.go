package roce

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/roce/recovery"
)

// Loss recovery (IBTA 9.7.6.1.3, 9.7.5.2.4). With any peer: go-back-N after a NAK, an implied NAK or a timeout, each
// counted against retry_cnt until something is acknowledged. Between two vnicds: selective repeat (selective.go).
//
// The timeout is chosen for a whole fabric (67 ms is usual). A loss at the end of a burst, which no NAK reports, would
// cost that much. Once the connection's response time is known, the oldest packets are therefore sent again earlier,
// as tail-loss probes: a few of them, backing off, not charged to retry_cnt. Between two vnicds a first probe comes
// much earlier, once for each una: what is lost most often, and waited for, is a message alone. Few packets are then
// sent again as a whole. Of many only the oldest is, by itself: if it was their acknowledgement that was lost it
// brings another one. Of a READ all responses of the request are asked for that are missing. If it brings only what it
// asked for, and then nothing comes for as long, the rest was lost as well: it is sent again as by a probe that comes
// late. Not so soon after a silence, though: where the path is full, flows that return at once would leave nothing to
// those that have waited longer. Under traffic an early probe comes only as often as the loop can afford a timer that
// near (Scheduler.Affordable), which is more often where packets are lost: where there are gaps, where the oldest of
// many is answered for itself alone, and where few packets that were sent twice are answered once. Of the oldest of
// many the last shows nothing: under traffic one acknowledgement answers the probe and what was sent before it.
//
// The timeout is the value that the user set, then twice and four times that value, which is as long as such a timer
// may take (9.7.6.1.3). Each of these times has at least one probe. A peer that gets no processor for half a second, or
// a congested path, must not break the connection. If the peer has been slow lately, the first timeouts are longer,
// too: twice the longest response time, up to four times the value.
//
// A timer that expires late says that this loop did not run: the response may have arrived meanwhile, and timers expire
// before what has arrived is received. So such an expiry is no expiry. The timer runs once more, for as long as it was
// late: what has accumulated meanwhile is received by then. A loop that is always late sends every second probe.

const (
	probeMin    = 4e6 // ns
	probeFactor = 8   // of the smoothed response time
	maxProbes   = 16  // doublings of the time between probes; with that many the timeout comes first
	vainProbes  = 2   // so many without an answer: the peer is away

	earlyMin     = 350e3 // ns
	earlyPackets = 4     // few: so many in flight are sent again
	earlyHeard   = 64    // packets acknowledged since the last silence until the oldest of many is
	earlyBackoff = 4     // doublings at most of the time until the early probe, for a path with late responses
	earlyCalm    = 64    // advances of una until it comes earlier again
	earlyJudged  = 4     // advances of una after which it was not in vain

	lateTimer = 1e6 // ns; a loop that runs is not that late
	// maxLate is how often in a row a late timeout has no effect. The next one counts, so a dead peer is noticed.
	maxLate = 4
)

// lossRecovery is the part of a QP that detects lost packets and makes the requester send them again.
type lossRecovery struct {
	cwnd       recovery.Window
	scoreboard recovery.Scoreboard
	responses  responseQueue // responses ahead of una

	// peerSelective: the newest response says that the peer is a vnicd, which repeats READ responses one by one and
	// removes padding.
	peerSelective bool

	// gapReported: the requester went back because of a gap. Further reports of it are ignored until una advances
	// or the timer expires.
	gapReported bool

	retryLeft uint8
	probes    uint8 // tail-loss probes since una last advanced
	returned  bool  // since then the peer was away, and has said that it is back
	early     earlyProbe
	timeout   int64  // local ACK timeout, ns; 0: none
	rtxAt     int64  // deadline of the retransmission timer, for a probe or for the timeout; 0: not armed
	timeoutAt int64  // when the timeout expires and counts against retry_cnt; 0: not running
	timedPSN  uint64 // the response time is measured when una reaches this PSN; 0: no measurement is running
	timedAt   int64  // when the packet before timedPSN was sent

	late        uint8 // how often in a row an expiry had no effect because it was late
	silentSince int64 // since when the peer has not answered the oldest packet, which was sent again; 0: it was not
}

// earlyProbe is the first probe between vnicds. If both transmissions are answered, it was in vain, and the next ones
// wait longer.
type earlyProbe struct {
	armed, done bool
	otherwise   int64  // if armed: when the first probe is due without it
	sent        uint64 // first PSN that the last one has sent again; 0: it was in vain, or there was none
	oldest      bool   // of many, the oldest is to be sent again
	first       uint64 // ... its PSN
	end         uint64 // ... end of what it asks for: of a READ all responses of the request
	whole       uint64 // ... it was: end of all in flight then; 0: it was not, or whether it was lost is known
	part        bool   // ... una has advanced since then, at first by its PSN only
	heard       uint8  // packets acknowledged since the peer was last silent, at most earlyHeard
	doublings   uint8  // of the time until it is sent
	calm        uint8  // advances of una since it was in vain
	judged      uint8  // advances of una until it is known whether the last one was in vain; 0: it is
}

// delay returns after how many ns it is due.
func (e *earlyProbe) delay(rtt int64) int64 { return max(earlyMin, 2*rtt) << e.doublings }

// sends notes that packets from una on are sent again, and after how many advances of una that was of use unless a
// duplicate comes before; 0: that shows nothing.
func (e *earlyProbe) sends(una uint64, judged uint8) { e.sent, e.judged = una, judged }

// answered notes that una has advanced by n, and reports whether this shows that the last one was of use.
func (e *earlyProbe) answered(n uint64) (used bool) {
	e.armed, e.done, e.oldest = false, false, false
	e.heard = uint8(min(uint64(e.heard)+n, earlyHeard))
	if e.doublings != 0 {
		if e.calm++; e.calm == earlyCalm {
			e.doublings, e.calm = e.doublings-1, 0
		}
	}
	if e.judged == 0 {
		return false
	}
	e.judged--
	return e.judged == 0
}

// lost notes una, which has advanced, and reports whether the oldest of many packets is known to have been lost: it was
// answered alone, then what was sent after the probe, and no duplicate has come before. If others were answered with
// it, all may have been late.
func (e *earlyProbe) lost(una uint64) bool {
	if e.whole == 0 {
		return false
	}
	if una == e.first+1 {
		e.part = true
	}
	if e.part && una <= e.whole {
		return false
	}
	lost := e.part
	e.forget()
	return lost
}

// alone reports whether only the oldest of many packets has been answered, as una says: those behind it were lost, too.
func (e *earlyProbe) alone(una uint64) bool { return e.part && una == e.end }

// forget ends the observation of the oldest one of many packets: it was answered, or a silence or a gap has the rest
// sent again and the window cut, which it would do a second time.
func (e *earlyProbe) forget() { e.whole, e.part = 0, false }

// duplicate notes a response that says nothing new. One to a request that was sent twice may name a later PSN.
func (e *earlyProbe) duplicate(psn uint64) {
	if e.sent != 0 && psn >= e.sent {
		e.doublings, e.calm, e.sent, e.judged = min(e.doublings+1, earlyBackoff), 0, 0, 0
		e.forget()
	}
}

// allocate makes the rings for n PSNs in flight.
func (l *lossRecovery) allocate(n int) {
	l.scoreboard = recovery.NewScoreboard(n)
	l.responses.Queue = recovery.NewQueue(min(n, responseSpan))
}

// reset returns to the state of a new QP whose window is at most maxWindow packets, and keeps the rings. No response is
// queued.
func (l *lossRecovery) reset(maxWindow int) {
	l.scoreboard.Reset()
	*l = lossRecovery{
		cwnd:       recovery.NewWindow(maxWindow),
		scoreboard: l.scoreboard,
		responses:  responseQueue{Queue: l.responses.Queue},
	}
}

// notePeer records whether the peer's newest response says that it is a vnicd. To a vnicd window packets may be in
// flight, to others fewer.
func (l *lossRecovery) notePeer(selective bool, window int) {
	if l.peerSelective == selective {
		return
	}
	l.peerSelective = selective
	if !selective {
		window = min(window, goBackNWindow)
	}
	l.cwnd.SetMax(window)
}

// armRetransmit arms the retransmission timer if it is not armed.
func (q *QP) armRetransmit() {
	l, now := &q.recovery, q.now
	if l.timeout == 0 || l.rtxAt != 0 {
		return
	}
	if l.timeoutAt == 0 {
		l.timeoutAt, l.late = now+l.nextTimeout(q.attr.RetryCnt-l.retryLeft), 0
	}
	l.rtxAt = min(l.timeoutAt, now+l.timeout)
	if rtt := l.scoreboard.RTT.Smoothed; rtt != 0 {
		d := max(probeMin, probeFactor*rtt)
		if l.scoreboard.Active && l.probes <= maxGapProbes {
			d = max(gapProbeMin, 2*rtt+l.scoreboard.ReorderWindow())
		} else if l.peerSelective && l.probes == 0 && !l.early.done {
			l.early.armed, l.early.otherwise = true, min(l.rtxAt, now+d)
			d = min(d, q.sched.Affordable(now+l.early.delay(rtt))-now)
		}
		l.rtxAt = min(l.rtxAt, now+d<<min(l.probes, maxProbes))
	}
}

// nextTimeout returns how long the peer may be silent after a number of timeouts: between one and four times the
// timeout (9.7.6.1.3).
func (l *lossRecovery) nextTimeout(timeouts uint8) int64 {
	slow := max(l.timeout, 2*min(l.scoreboard.RTT.Max, 2*l.timeout))
	return min(slow<<min(timeouts, 2), 4*l.timeout)
}

// measureRTT samples the response time if the timed packet has been acknowledged.
func (l *lossRecovery) measureRTT(una uint64, now int64) {
	if l.silentSince != 0 {
		l.scoreboard.RTT.Silence(now, now-l.silentSince)
		l.silentSince = 0
	}
	if l.timedPSN == 0 || una < l.timedPSN {
		return
	}
	l.timedPSN = 0
	l.scoreboard.RTT.Sample(now, max(now-l.timedAt, 1))
}

// isLate reports whether the retransmission timer, which is late by that many ns, is to run once more.
func (l *lossRecovery) isLate(now, late int64) bool {
	deferrals := uint8(1) // of a probe: a loop that is always late shall send some
	if now >= l.timeoutAt {
		deferrals = maxLate
	}
	if late < lateTimer || l.late >= deferrals {
		l.late = 0
		return false
	}
	l.late++
	l.rtxAt = now + min(late, l.timeout)
	return true
}

// retransmitTimeout is called when the retransmission timer expires, late by that many ns.
func (q *QP) retransmitTimeout(late int64) {
	l := &q.recovery
	switch {
	case !q.requesterActive() || q.req.sent == q.req.una:
	case q.req.rnrUntil != 0 || q.req.stallUntil != 0:
		// This side waits itself: the peer may have nothing to answer.
		l.timeoutAt = 0
		q.armRetransmit()
	case l.isLate(q.now, late):
	case q.probeEarly():
	case q.now < l.timeoutAt:
		l.noteSilence(q.req.una)
		l.probes++
		if q.probeGap() {
			return
		}
		if l.scoreboard.Active {
			l.probes = 1 // from here on probes go back
		}
		l.cwnd.OnSilence()
		q.goBack()
	default:
		q.stats.Timeouts++
		l.noteSilence(q.req.una)
		l.cwnd.Save()
		q.countedGoBack()
	}
}

// probeEarly handles the expiry of the timer for the early probe.
func (q *QP) probeEarly() bool {
	l := &q.recovery
	if !l.early.armed {
		return false
	}
	l.early.armed, l.early.done = false, true
	if l.scoreboard.Active || q.now >= l.timeoutAt {
		return false
	}
	many := q.req.sent-q.req.una > earlyPackets
	switch {
	case q.req.nxt < q.req.sent:
		l.rtxAt = l.early.otherwise
	case !many:
		l.early.sends(q.req.una, earlyJudged)
		q.goBack()
	case l.early.alone(q.req.una):
		q.sched.Used()
		return false
	case l.early.heard < earlyHeard || !q.oldestAlone():
		l.rtxAt = l.early.otherwise
	default:
		l.early.sends(q.req.una, 0)
		l.early.oldest, l.rtxAt = true, l.early.otherwise
		q.wake()
	}
	return true
}

// oldestAlone reports whether the oldest packet can be sent again by itself.
func (q *QP) oldestAlone() bool {
	r := &q.req
	if r.nxt < r.sent || r.una == r.sent || r.rnrUntil != 0 || r.stallUntil != 0 || q.faults.send.cause != waitNone {
		return false
	}
	s := r.slot(r.head)
	return !s.failed && s.info.kind != kindManage
}

// sendOldest sends the oldest of many packets again; of a READ the request for all responses that it still lacks. What
// is known of the others does not change: they may only be late. It returns false if the requester must stop.
func (q *QP) sendOldest() bool {
	e, r := &q.recovery.early, &q.req
	e.oldest = false
	if !q.oldestAlone() {
		return true
	}
	s, nxt, cur := r.slot(r.head), r.nxt, r.cur
	r.nxt, r.cur = r.una, r.head // of which a fault or an error would be
	buf, end := q.oldestFrame(s)
	if !q.requesterActive() {
		return false
	}
	r.nxt, r.cur = nxt, cur
	if buf == nil {
		return true
	}
	e.first, e.end, e.whole, e.part = r.una, end, r.sent, false
	q.recovery.timedPSN = 0 // as in goBack
	q.stats.Retransmits += end - r.una
	q.transmit(&q.tx, buf)
	return true
}

// oldestFrame makes the frame that asks for an answer to PSN nxt, of slot s, which was sent before, and returns the end
// of what it asks for; nil: there is none.
func (q *QP) oldestFrame(s *sendSlot) (buf *frame.Buf, end uint64) {
	if !s.info.kind.needsResponse() {
		q.req.sinceAckReq = ackEvery // it asks for an acknowledgement
		return q.sendPacket(s, q.req.nxt-s.first), q.req.nxt + 1
	}
	end, repeated := q.requestEnd(s)
	if !repeated {
		return nil, end
	}
	return q.readAtomicFrame(s, end), end
}

// noteSilence records that una is sent again because the peer is silent.
func (l *lossRecovery) noteSilence(una uint64) {
	l.early.heard = 0
	l.early.forget()
	if l.silentSince == 0 {
		l.silentSince = l.scoreboard.SentAt(una)
	}
}

// gapDetected reacts to a gap: it goes back and counts it, once per gap (IBTA 9.7.6.1.3, 9.7.5.2.4).
func (q *QP) gapDetected() {
	if q.recovery.gapReported || q.req.rnrUntil != 0 {
		return
	}
	q.countedGoBack()
}

// countedGoBack goes back and counts it against retry_cnt. If that is used up, the oldest WQE fails.
func (q *QP) countedGoBack() {
	l := &q.recovery
	if l.retryLeft == 0 {
		q.failHead(StatusRetryExc)
		return
	}
	l.retryLeft--
	l.early.forget()
	l.cwnd.OnLoss()
	l.timeoutAt, l.probes = 0, 0
	q.goBack()
}

// goBack makes una the next PSN to send.
func (q *QP) goBack() {
	q.req.nxt, q.req.cur = q.req.una, q.req.head
	q.clearScoreboard()
	q.recovery.gapReported = true
	q.recovery.rtxAt = 0
	q.recovery.timedPSN = 0 // a response would not tell which transmission it answers
	q.wake()
}
