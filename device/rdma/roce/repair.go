package roce

import (
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Selective repeat, the requester's part: only what is missing is sent again, as RFC 8985 (RACK) judges it. A packet counts as lost
// once another that was sent later has arrived, and as long has passed since it was sent as that one took, and some more, by which
// paths may differ. So neither the order of arrival matters, nor whether a packet is sent for the first time. Nothing of this is
// counted against retry_cnt: the peer lives. But its timeout goes on until the oldest packet is acknowledged, and then all that the
// peer is thought to have is forgotten, as before any other going back.
//
// What a READ or atomic is answered arrives in the order in which it is answered, behind all that was asked for before: when it was
// asked for says little about when that is. So its response is lost if one behind it, asked for no earlier, has been there for as
// long as paths may differ. Those behind it are kept (replies.go).
//
// Repetition uses the path of going back: nxt returns to una, and what is not due is skipped.
const (
	reorderMin   = 10e3 // ns, beside srtt/4
	reorderMax   = 8    // quarters of srtt
	reorderCalm  = 16   // losses without a repetition in vain until one is enough again
	repairProbe  = 200e3
	repairProbes = 3 // of one packet each, before a probe goes back
)

// marks are what is known of one PSN under way.
type marks uint8

const (
	sentAgain marks = 1 << iota // not for the first time
	sentAlone                   // ... but what was behind it was not
	isReply                     // of a READ or atomic: what is awaited is a response
	isFirst                     // ... the first of its request
	isMissed                    // ... one behind it is there since sentAt
	isWaiting                   // ... the peer has the request and will execute it in its turn
	isThere                     // the peer has it; of a reply: it is here
)

// board is what is known of packets under way. Until a map or a response comes that shows a gap it is nothing but their times.
type board struct {
	sentAt []int64 // ring, by PSN: when it was sent last
	marks  []marks // ring, by PSN

	active   bool   // a gap has shown and not all that was sent before has been acknowledged
	until    uint64 // the end of that
	executed uint64 // the peer has executed all before
	newest   int64  // of all that has arrived at the peer, what was sent last: when
	rtt      int64  // ... and how long it took
	took     int64  // the newest response time
	held     uint64 // PSNs from una on that the peer has
	holes    uint64 // PSNs that are lost and yet to be repeated
	mending  bool   // ... from nxt on
	lookAt   int64  // when more of them may be
	heeded   uint64 // losses of what was sent before have cut the window
	quarters int64  // of srtt that a packet may come later than others
	calm     uint8
}

// newBoard makes a board for as many PSNs.
func newBoard(n int) board { return board{sentAt: make([]int64, n), marks: make([]marks, n)} }

// note takes the time of the packets [psn, end).
func (b *board) note(psn, end uint64, now int64, m marks) {
	for ; psn < end; psn++ {
		*b.at(psn), *b.mark(psn) = now, m
		m &^= isFirst
	}
}

func (b *board) at(psn uint64) *int64 { return &b.sentAt[psn&uint64(len(b.sentAt)-1)] }

func (b *board) mark(psn uint64) *marks { return &b.marks[psn&uint64(len(b.marks)-1)] }

// has tells whether psn need not be sent again.
func (b *board) has(psn uint64) bool {
	m := *b.mark(psn)
	return m&isThere != 0 || m&isReply == 0 && psn < b.executed
}

// open begins to note what is there.
func (q *QP) open() {
	if b := &q.board; !b.active {
		b.active, b.executed, b.newest = true, q.una, 0
	}
}

// forget gives up what is known: all is to be sent again.
func (q *QP) forget() {
	b := &q.board
	if !b.active {
		return
	}
	q.dropReplies()
	for psn := q.una; psn < q.sent; psn++ {
		*b.mark(psn) &^= isMissed | isWaiting | isThere
	}
	b.active, b.mending, b.executed, b.held, b.holes, b.lookAt = false, false, 0, 0, 0, 0
}

// inVain notes that what was sent again had only been late.
func (b *board) inVain() { b.quarters, b.calm = min(b.quarters+1, reorderMax), reorderCalm }

// arrived notes that psn has reached the peer.
func (q *QP) arrived(psn uint64) {
	b := &q.board
	at := *b.at(psn)
	if *b.mark(psn)&sentAgain != 0 && q.now-at < q.rttMin {
		b.inVain()
		return
	}
	if at >= b.newest && at != 0 {
		b.newest, b.rtt = at, max(q.now-at, 1)
		b.took = b.rtt
	}
}

// replied notes that the response psn is here. (Only what comes twice shows that it was asked for in vain: twice.)
func (q *QP) replied(psn uint64) {
	b := &q.board
	at := *b.at(psn)
	switch m := *b.mark(psn); {
	case m&isMissed != 0: // it is itself late
	case m&sentAlone != 0: // the peer answers such requests at once, in their order
		for p := q.una; p < q.sent; p++ {
			if *b.mark(p)&sentAlone != 0 && *b.at(p) < at {
				q.miss(p)
			}
		}
	case m&(isFirst|sentAgain) == isFirst:
		b.took = max(q.now-at, 1)
		q.sample(b.took)
	}
}

// twice hears of the response psn once more.
func (q *QP) twice(psn uint64) {
	b := &q.board
	if q.sent-psn > uint64(len(b.marks)) {
		return
	}
	if m := b.mark(psn); *m&(isReply|sentAlone) == isReply|sentAlone {
		*m &^= sentAlone
		b.inVain()
	}
}

// overdue notes that all responses before end have left the peer that were asked for until at and are to come at all.
func (q *QP) overdue(end uint64, at int64) {
	b := &q.board
	waits := false
	for psn := q.una; psn < end; psn++ {
		m := *b.mark(psn)
		if m&(isFirst|isReply) != isReply {
			waits = m&isWaiting != 0 && psn >= b.executed
		}
		if !waits && *b.at(psn) <= at {
			q.miss(psn)
		}
	}
}

// miss notes that psn should have been here by now, if it is a response.
func (q *QP) miss(psn uint64) {
	b := &q.board
	if m := b.mark(psn); *m&(isReply|isMissed|isThere) == isReply {
		*m |= isMissed
		*b.at(psn) = q.now
	}
}

// receiveMap hears of a gap at psn, and of what is there behind it.
func (q *QP) receiveMap(psn uint64, p *wire.RoCE) {
	arrivals := p.Arrivals()
	if q.cfg.GoBackN || arrivals.Has(0) {
		q.stats.RxDropped++
		return
	}
	q.stats.RxMaps++
	if !q.ackTo(psn) && !(q.live() && q.keeps(p)) {
		if q.live() { // the response of a READ is missing
			q.lost()
		}
		return
	}
	if q.rnrAt != 0 {
		return // from before the RNR NAK; nothing is kept now
	}
	q.open()
	b := &q.board
	b.executed = max(b.executed, psn)
	end, newest, took := uint64(0), int64(0), int64(0)
	for i := range min(q.sent-psn, aheadSpan) {
		m := b.mark(psn + i)
		if !arrivals.Has(i) || *m&(isWaiting|isThere) != 0 {
			continue
		}
		switch {
		case *m&isReply == 0:
			*m |= isThere
		case *m&isMissed == 0:
			*m |= isWaiting
		default:
			*m = *m&^isMissed | isWaiting
			continue // it was late
		}
		end, newest = psn+i, max(newest, *b.at(psn + i))
		q.arrived(psn + i)
		took = b.rtt
	}
	if took == 0 {
		return // nothing new
	}
	q.sample(took)
	q.overdue(end, newest)
	q.heard()
}

// heard goes on after it has shown that what was sent does arrive: the acknowledgement of the oldest waits for others.
func (q *QP) heard() {
	q.board.until = q.sent
	q.timed = 0
	q.rtxAt, q.probes = 0, 0
	q.armRetransmit()
}

// lostAt is when psn counts as lost, by what is known; 0: not yet.
func (q *QP) lostAt(psn uint64) int64 {
	b := &q.board
	at := *b.at(psn)
	switch m := *b.mark(psn); {
	case m&isMissed != 0:
		return at + q.late()
	case m&isReply != 0 || at > b.newest:
		return 0
	}
	return at + b.rtt + q.late()
}

// due tells whether psn is to be sent again.
func (q *QP) due(psn uint64) bool {
	if q.board.has(psn) {
		return false
	}
	if !q.board.mending {
		return true
	}
	at := q.lostAt(psn)
	return at != 0 && q.now >= at
}

// late is by how much paths may differ.
func (q *QP) late() int64 { return max(reorderMin, q.srtt*max(q.board.quarters, 1)/4) }

// judge looks at all that is under way after something has arrived, or after some time.
func (q *QP) judge() {
	b := &q.board
	b.lookAt, b.held, b.holes = 0, 0, 0
	b.mending = b.mending && q.nxt < q.sent
	if q.una >= b.until && !b.mending || !q.live() {
		q.forget()
		return
	}
	if q.rnrAt != 0 || q.nxt < q.sent && !b.mending {
		return // all goes again, but for what is there
	}
	oldest := uint64(0)
	for psn := q.una; psn < q.sent; psn++ {
		if b.has(psn) {
			b.held++
			continue
		}
		switch at := q.lostAt(psn); {
		case at == 0:
		case q.now >= at:
			if b.holes++; oldest == 0 {
				oldest = psn
			}
		case b.lookAt == 0 || at < b.lookAt:
			b.lookAt = at
		}
	}
	if b.holes == 0 {
		return
	}
	if oldest >= b.heeded {
		b.heeded = q.sent
		q.window.hole(b.holes, b.took > q.rttMin+q.rttMin/2)
		if b.calm--; b.calm == 0 || b.calm > reorderCalm {
			b.quarters, b.calm = 1, 0
		}
	}
	b.mending = true
	q.nxt, q.cur = q.una, q.head
	q.wake()
}

// skip passes over what need not be sent again.
func (q *QP) skip() {
	b := &q.board
	q.armRetransmit() // it may be that nothing is sent that would do it
	for q.nxt < q.sent && !q.due(q.nxt) {
		s := q.slot(q.cur)
		switch {
		case s.end == q.nxt: // memory management
		case s.info.kind.answered() && q.nxt >= b.executed: // the request as a whole
			q.nxt, _ = q.requestEnd(s)
		default:
			q.nxt++
		}
		if q.nxt == s.end {
			q.cur++
		}
	}
	if q.nxt == q.sent {
		b.mending, b.holes = false, 0
	}
}

// repeated notes that n packets marked m are sent again.
func (b *board) repeated(m marks, n uint64) marks {
	if b.mending {
		m |= sentAlone
	}
	b.holes -= min(b.holes, n)
	return m | sentAgain
}

// probeHole repeats the oldest packet if the peer has others and says no more. False: it is time for more than that.
func (q *QP) probeHole() bool {
	b := &q.board
	if !b.active || q.probes > repairProbes || q.nxt < q.sent && !b.mending {
		return false
	}
	if *b.at(q.una) = 0; *b.mark(q.una)&isReply != 0 {
		*b.mark(q.una) |= isMissed
	}
	q.judge()
	q.armRetransmit()
	return b.active
}

// flight is how many PSNs are under way: what is lost, or waits at the peer, is not.
func (q *QP) flight() uint64 {
	if b := &q.board; b.active && (b.mending || q.nxt == q.sent) {
		return q.sent - q.una - b.held - b.holes
	}
	return q.nxt - q.una
}
