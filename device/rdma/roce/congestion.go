package roce

import (
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Congestion control (RoCE v2: annex A17.9). Packets of an RC QP say that their sender reacts to congestion (ECT(0)). A queue
// on the way that grows marks them (CE; on the underlay the tunnel carries the mark over, RFC 6040); whoever receives one
// tells its sender by a CNP, the notification point; and the sender, the reaction point, lets less be under way.
//
// CNPs say that there is congestion, not how much, and come at most once in cnpGap: hardware counts on that. How much is
// estimated as DCTCP does (RFC 8257), from how many of the last windows were marked: alpha, a moving average. A marked window
// is cut by alpha/2, once per window, however many CNPs come: flows that share a full queue give way by a few per cent each, as
// often as it takes; a queue that is full for the first time halves them. A CNP can be forged, if at all, only by
// who may send as the peer does (admit.go), and one packet may always be under way.
//
// A loss halves the window. READ responses are flow-controlled by who asks for them, so their marks also count here, as those of
// requests do at the far end.
const (
	cnpGap = 50e3 // ns between CNPs of one QP

	winUnit   = 256     // of window.size, per packet
	alphaOne  = 1 << 10 // of window.alpha
	alphaGain = 4       // 1/16, as in RFC 8257

	// After a mark a window grows by one packet per window, as the others' on the same queue do, and from the patience-th
	// on by one more each time, up to briskly: the path has become free. Where only loss tells, it does so at once.
	patience = 5
	briskly  = 8

	firstWindow = 16 // packets: each window is twice the last until there is a sign of congestion
	restart     = 4  // the same after a loss, up to half of what was under way
	leastHole   = 2  // what is left if nothing else has to be repeated
	rare        = 16 // one loss among so many packets may be chance
)

// window bounds the packets of a requester that are under way.
type window struct {
	size, full uint32 // 1/winUnit packets
	goal       uint32 // until there each window is twice the last
	// What they were before silence cut them; 0: it did not.
	calm, calmGoal uint32
	acked          uint32 // packets since it was last adjusted
	alpha          uint32 // of the last windows, how many were marked
	growth         uint32 // packets by which it grew last, and patience
	cut            uint64 // PSN: marks of what was sent before have been heeded
	told           bool   // the path has marked since the window was full
}

func newWindow(packets int) window {
	n := uint32(packets) * winUnit
	return window{size: min(n, firstWindow*winUnit), full: n, goal: n, alpha: alphaOne}
}

// bound sets how many may be under way at most.
func (w *window) bound(packets int) {
	full := uint32(packets) * winUnit
	if w.goal == w.full { // no sign of congestion so far
		w.goal = full
	}
	if w.calmGoal == w.full {
		w.calmGoal = full
	}
	w.full, w.goal, w.size = full, min(w.goal, full), min(w.size, full)
}

// packets is how many may be under way: at least one.
func (w *window) packets() uint64 { return uint64(w.size / winUnit) }

// progress takes n packets, up to una, as acknowledged.
func (w *window) progress(una, n uint64) {
	w.calm = 0
	if w.size < w.goal {
		w.size = min(w.size+uint32(min(n, maxWindow))*winUnit, w.goal)
		return
	}
	if una <= w.cut {
		return // some of them were marked
	}
	if w.acked += uint32(min(n, maxWindow)); uint64(w.acked) < w.packets() {
		return
	}
	w.acked = 0
	w.alpha -= w.alpha >> alphaGain
	w.growth = min(w.growth+1, patience+briskly)
	w.size += winUnit * max(1, w.growth-min(patience, w.growth))
	if w.size >= w.full {
		w.size, w.alpha, w.told = w.full, alphaOne, false // the next congestion is a new one
	}
}

// marked hears of congestion that packets from una on, the oldest under way, may have met. sent is the end of all.
func (w *window) marked(una, sent uint64) {
	if una == sent || una < w.cut {
		return
	}
	w.cut = sent
	w.alpha += (alphaOne - w.alpha) >> alphaGain
	w.size = max(w.size-w.size*w.alpha/(2*alphaOne), winUnit)
	w.goal, w.acked, w.growth, w.told = w.size, 0, 0, true
}

// lost hears of a packet that did not arrive. What was sent behind it is dropped where it arrives (go-back-N) but still fills the queue
// on the way, so the repetition begins with few.
func (w *window) lost() {
	size := max(w.size, w.goal)
	w.goal = max(size/2, min(size, restart*winUnit))
	w.size = min(w.size, restart*winUnit)
	w.acked, w.growth = 0, 0
	if !w.told {
		w.growth = patience + briskly
	}
}

// hole hears that so many packets did not arrive while later ones did (RC between two vnicds): once for all that were under way. Only
// they are sent again, so there is nothing to begin anew with. A loss is taken for chance if the queue is no longer than usual (TCP Veno's
// criterion) and it is one of many; neither is enough, as who comes to a queue that is always full knows no shorter one.
func (w *window) hole(lost uint64, queued bool) {
	chance := !queued && lost*rare <= w.packets()
	cut := w.size / 2
	if chance {
		cut = w.size / 5
	}
	w.size = max(w.size-cut, min(w.size, leastHole*winUnit))
	w.goal, w.acked, w.growth = w.size, 0, 0
	if chance && !w.told {
		w.growth = patience + briskly
	}
}

// silence notes that nothing comes back: a probe is due.
func (w *window) silence() {
	w.noteCalm()
	w.lost()
}

// noteCalm keeps the size as it was before silence cut it.
func (w *window) noteCalm() {
	if w.calm == 0 {
		w.calm, w.calmGoal = w.size, w.goal
	}
}

// restore undoes what silence did: it was no congestion.
func (w *window) restore() {
	if w.calm != 0 {
		w.size, w.goal, w.calm = min(w.calm, w.full), min(w.calmGoal, w.full), 0
	}
}

// controlled tells whether the QP takes part, over path av. UC and UD have no window to cut, so their packets' ECN field is what
// their owners' traffic class says; RoCE v1 has no such field.
func (q *QP) controlled(av *AddressVector) bool { return q.typ == RC && !q.cfg.NoECN && !av.RoCEv1 }

// receiveMarked notes that p, of this connection, met congestion.
func (q *QP) receiveMarked(p *wire.RoCE) {
	if p.V1 {
		return
	}
	q.stats.ECNMarked++
	// Nobody could send fewer acknowledgements or CNPs.
	if q.cfg.NoECN || q.typ.class() == classUD || len(p.Payload) == 0 {
		return
	}
	if p.Info.Op == wire.ReadResponse {
		q.window.marked(q.una, q.sent)
	}
	if q.now >= q.cnpAt && !q.cnpDue {
		q.cnpDue = true
		q.wake()
	}
}

// receiveCNP is the reaction point's part.
func (q *QP) receiveCNP() {
	q.stats.RxCNP++
	q.window.marked(q.una, q.sent)
}

// sendCNP tells the peer that its packets meet congestion.
func (q *QP) sendCNP() {
	buf, hdr, _ := q.frame(&q.tx, &bth{}, wire.CNPLen, 0)
	if buf == nil {
		q.respStallAt = q.now + bufferDelay
		return
	}
	clear(hdr)
	// Not as others': BECN, and neither MigReq nor PSN.
	h := wire.BTH{Opcode: wire.OpCNP, PKey: wire.DefaultPKey, BECN: true, DestQP: q.attr.DestQPN}
	h.Encode(buf.Bytes()[q.tx.Len():])
	q.cnpDue, q.cnpAt = false, q.now+cnpGap
	q.stats.TxCNP++
	q.send(&q.tx, buf)
}
