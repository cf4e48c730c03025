package roce

// Recovery (IBTA 9.7.6.1.3, 9.7.5.2.4): go-back-N upon a NAK, an implied NAK or a
// timeout, each counted against retry_cnt until something is acknowledged.
//
// The timeout is chosen for a whole fabric (67 ms is usual), so a loss at the end
// of a burst, which no NAK reports, would cost that much. Once the connection's
// response time is known, the oldest packets are therefore repeated earlier, in
// small number, ever more seldom, and without counting: probes.
//
// What counts is the time the user set, then twice and four times that, which is as long as
// a timer of it may take (9.7.6.1.3), with a probe at least once in each such time: a peer that has no processor for half
// a second, or a path that is crowded, is not a broken connection.

const (
	probeMin    = 4e6 // ns
	probeFactor = 8   // of the smoothed response time
	rttMinFor   = 10e9
)

// armRetransmit sets the deadline if none is running.
func (q *QP) armRetransmit() {
	if q.timeout == 0 || q.rtxAt != 0 {
		return
	}
	if q.fullAt == 0 {
		q.fullAt = q.now + q.timeout<<min(q.attr.RetryCnt-q.retryLeft, 2)
	}
	q.rtxAt = min(q.fullAt, q.now+q.timeout)
	if q.srtt != 0 {
		d := max(probeMin, probeFactor*q.srtt)
		if q.board.active && q.probes <= repairProbes {
			d = max(repairProbe, 2*q.srtt+q.late())
		}
		q.rtxAt = min(q.rtxAt, q.now+d<<min(q.probes, 16))
	}
}

// measure takes the response time if the timed packet has been answered.
func (q *QP) measure() {
	if q.timed == 0 || q.una < q.timed {
		return
	}
	q.timed = 0
	q.sample(max(q.now-q.timedAt, 1))
}

// sample takes a response time.
func (q *QP) sample(rtt int64) {
	if rtt <= q.rttMin || q.rttMin == 0 || q.now-q.rttMinAt > rttMinFor {
		q.rttMin, q.rttMinAt = rtt, q.now
	}
	if q.srtt == 0 {
		q.srtt = rtt
		return
	}
	q.srtt = max(q.srtt+(rtt-q.srtt)/8, 1)
}

// timedOut is called when no response came in time.
func (q *QP) timedOut() {
	switch {
	case !q.live() || q.sent == q.una:
	case q.rnrAt != 0 || q.stallAt != 0:
		// It is us who are silent: the peer may owe nothing yet.
		q.fullAt = 0
		q.armRetransmit()
	case q.now < q.fullAt:
		q.probes++
		if q.probeHole() {
			return
		}
		if q.board.active {
			q.probes = 1 // of those that go back
		}
		q.window.silence()
		q.goBack()
	default:
		q.stats.Timeouts++
		q.window.noteCalm()
		q.retry()
	}
}

// lost reacts to a gap: go back once, and count it (IBTA 9.7.6.1.3, 9.7.5.2.4).
func (q *QP) lost() {
	if q.recovering || q.rnrAt != 0 {
		return
	}
	q.retry()
}

// retry goes back, or gives up when retry_cnt is used up.
func (q *QP) retry() {
	if q.retryLeft == 0 {
		q.failHead(StatusRetryExc)
		return
	}
	q.retryLeft--
	q.window.lost()
	q.fullAt, q.probes = 0, 0
	q.goBack()
}

// goBack makes una the next PSN to send.
func (q *QP) goBack() {
	q.nxt, q.cur = q.una, q.head
	q.forget()
	q.recovering = true
	q.rtxAt = 0
	q.timed = 0 // which transmission a response would answer is not known now
	q.wake()
}
