package roce

import "github.com/vnicd/vnicd/device/wire"

// Selective repeat, the requester's part: only what is missing is sent again, as RFC 8985 (RACK) judges it. A packet counts as lost
// once another that was sent later has arrived, and as long has passed since it was sent as that one took, and some more, by which
// paths may differ. So neither the order of arrival matters, nor whether a packet is sent for the first time. Nothing of this is
// counted against retry_cnt: the peer lives. But its timeout goes on until the oldest packet is acknowledged, and then all that the
// peer is thought to have is forgotten, as before any other going back.
//
// Repetition uses the path of going back: nxt returns to una, and what is not due is skipped.
//
// The responses of a READ are not kept: from the first that is missing on they are asked for again (ack.go).
const (
	reorderMin   = 10e3 // ns, beside srtt/4
	reorderMax   = 8    // quarters of srtt
	reorderCalm  = 16   // losses without a repetition in vain until one is enough again
	repairProbe  = 200e3
	repairProbes = 3 // of one packet each, before a probe goes back
)

// board is what is known of packets under way. Until a map comes it is nothing but their times.
type board struct {
	sentAt []int64 // ring, by PSN: when it was sent last, and in the lowest bit whether that was not the first time

	active   bool          // a map has come and not all that was sent before has been acknowledged
	until    uint64        // the end of that
	base     uint64        // of there
	there    wire.Arrivals // what the peer keeps
	newest   int64         // of all that has arrived, what was sent last: when
	rtt      int64         // ... and how long it took
	held     uint64        // PSNs from una on that the peer keeps
	holes    uint64        // PSNs that are lost and yet to be repeated
	mending  bool          // ... from nxt on
	lookAt   int64         // when more of them may be
	heeded   uint64        // losses of what was sent before have cut the window
	quarters int64         // of srtt that a packet may come later than others
	calm     uint8
}

// forget gives up what is known: all is to be sent again.
func (b *board) forget() {
	b.active, b.mending, b.there, b.held, b.holes, b.lookAt = false, false, wire.Arrivals{}, 0, 0, 0
}

// note takes the time of the packets [psn, end).
func (b *board) note(psn, end uint64, now int64, again bool) {
	now <<= 1
	if again {
		now |= 1
	}
	for ; psn < end; psn++ {
		*b.when(psn) = now
	}
}

func (b *board) when(psn uint64) *int64 { return &b.sentAt[psn&uint64(len(b.sentAt)-1)] }

func (b *board) at(psn uint64) int64 { return *b.when(psn) >> 1 }

// has tells whether the peer keeps psn.
func (b *board) has(psn uint64) bool { return psn >= b.base && b.there.Has(psn-b.base) }

// arrived notes that psn has reached the peer.
func (q *QP) arrived(psn uint64) {
	b := &q.board
	at := b.at(psn)
	if *b.when(psn)&1 != 0 && q.now-at < q.rttMin {
		// It was not the repetition that arrived: the packet had only been late.
		b.quarters, b.calm = min(b.quarters+1, reorderMax), reorderCalm
		return
	}
	if at >= b.newest {
		b.newest, b.rtt = at, max(q.now-at, 1)
	}
}

// receiveMap hears of a gap at psn, and of what is there behind it.
func (q *QP) receiveMap(psn uint64, m wire.Arrivals) {
	if q.cfg.GoBackN || m.Has(0) {
		q.stats.RxDropped++
		return
	}
	q.stats.RxMaps++
	if !q.ackTo(psn) {
		if q.live() { // the response of a READ is missing
			q.lost()
		}
		return
	}
	if q.rnrAt != 0 {
		return // from before the RNR NAK; nothing is kept now
	}
	b := &q.board
	if !b.active {
		b.active, b.base, b.there, b.newest = true, psn, wire.Arrivals{}, 0
	}
	b.there.Shift(psn - b.base)
	b.base = psn
	newer := int64(0)
	for i := range min(q.sent-psn, aheadSpan) {
		if !m.Has(i) || b.there.Has(i) {
			continue
		}
		b.there.Set(i, 1)
		q.arrived(psn + i)
		newer = b.rtt
	}
	if newer == 0 {
		return // nothing new
	}
	b.until = q.sent
	q.timed = 0 // its acknowledgement waits for others
	q.sample(newer)
	q.rtxAt, q.probes = 0, 0
	q.armRetransmit()
}

// due tells whether psn is to be sent again.
func (q *QP) due(psn uint64) bool {
	b := &q.board
	if b.has(psn) {
		return false
	}
	at := b.at(psn)
	return !b.mending || at <= b.newest && q.now >= at+b.rtt+q.late()
}

// late is by how much paths may differ.
func (q *QP) late() int64 { return max(reorderMin, q.srtt*max(q.board.quarters, 1)/4) }

// judge looks at all that is under way after something has arrived, or after some time.
func (q *QP) judge() {
	b := &q.board
	b.lookAt, b.held, b.holes = 0, 0, 0
	if q.una >= b.until && !b.mending || !q.live() {
		b.forget()
		return
	}
	if q.rnrAt != 0 || q.nxt < q.sent && !b.mending {
		return // all goes again, but for what is there
	}
	wait, first := b.rtt+q.late(), uint64(0)
	for psn := q.una; psn < q.sent; psn++ {
		if b.has(psn) {
			b.held++
			continue
		}
		switch at := b.at(psn); {
		case at > b.newest:
		case q.now >= at+wait:
			if b.holes++; first == 0 {
				first = psn
			}
		case b.lookAt == 0 || at+wait < b.lookAt:
			b.lookAt = at + wait
		}
	}
	if b.holes == 0 {
		return
	}
	if first >= b.heeded {
		b.heeded = q.sent
		q.window.hole(b.holes, b.rtt > q.rttMin+q.rttMin/2)
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
	q.armRetransmit() // it may be that nothing is sent that would do it
	for q.nxt < q.sent && !q.due(q.nxt) {
		s := q.slot(q.cur)
		switch {
		case s.end == q.nxt: // memory management
		case s.info.kind.answered():
			q.nxt, _ = q.requestEnd(s)
		default:
			q.nxt++
		}
		if q.nxt == s.end {
			q.cur++
		}
	}
	if q.nxt == q.sent {
		q.board.mending, q.board.holes = false, 0
	}
}

// probeHole repeats the oldest packet if the peer has others and says no more. False: it is time for more than that.
func (q *QP) probeHole() bool {
	b := &q.board
	if !b.active || q.probes > repairProbes || q.nxt < q.sent {
		return false
	}
	*b.when(q.una) = 0
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
