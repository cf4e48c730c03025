package roce

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// The requester (IBTA 9.7.3, 9.9). WQEs are fetched in order into a ring of
// slots, get their PSNs then, are sent packet by packet within the window, and
// complete in order when the responses reach their last PSN:
//
//	   head            cur            tail          slots (numbers of WQEs)
//	    | acknowledged  | sent, going  | fetched |
//	    v  in part      v              v
//	----[una ....................[nxt ............ sent]   PSNs
//
// una is the oldest PSN without response and lies in slot head; nxt is the next to
// send and lies in slot cur; sent is the end of what was ever sent. Go-back-N sets
// nxt back to una and reads the message's data again.
type requester struct {
	slots           []sendSlot // power of two
	head, cur, tail uint32
	una, nxt, sent  uint64
	assigned        uint64 // first PSN of the next WQE

	// READ and atomic requests in flight, by their end (exclusive), oldest first.
	// A READ is requested in parts of at most readChunk packets, so that a long one
	// cannot flood the path; a part's limits stay the same when it is asked for again.
	rd             []uint64 // power of two
	rdHead, rdTail uint32

	ours      bool // the newest response says that the peer is a vnicd, which repeats responses one by one and cuts padding off
	window    window
	board     board
	replies   replies
	unasked   uint32 // packets sent since the last AckReq
	timeout   int64  // ns, 0: none
	retryLeft uint8
	rnrLeft   uint8
	// recovering: went back because of a gap; further signs of the same gap are
	// ignored until something new is acknowledged or the timer expires.
	recovering bool
	blocked    bool // Run stopped for something that an acknowledgement cures

	rtxAt    int64  // retransmission deadline: a probe, or the timeout itself
	fullAt   int64  // when the timeout counts as one (probe.go)
	srtt     int64  // smoothed time from request to response, ns; 0: not known
	rttMin   int64  // the shortest of late, ...
	rttMinAt int64  // ... and when it was
	timed    uint64 // PSN whose response is being timed, 0: none
	timedAt  int64
	probes   uint8 // sent since the last progress
	rnrAt    int64 // RNR: silent until then
	stallAt  int64 // no buffer: try again then

	near   *QP            // the peer, while this turn may reach it directly
	missed translate.Miss // in own memory, on the local path

	// UD: what q.tx was made for
	udAV     AddressVector
	udQPN    uint32
	udCached bool

	comp   Completion
	result [atomicLen]byte // of an atomic, on its way to or from memory
}

type sendSlot struct {
	w          WQE
	info       *wrInfo
	first, end uint64
	// failed: ends with w.Status once all before it have completed (IBTA 10.8.5:
	// completions stay in order).
	failed bool
	done   bool // memory management: executed
}

const (
	readChunk   = 64   // packets
	ackEvery    = 64   // packets without AckReq
	bufferDelay = 50e3 // ns before trying again
	drainDelay  = 5e3  // ns, about as long as a batch of another loop
)

func (q *QP) slot(n uint32) *sendSlot { return &q.slots[n&uint32(len(q.slots)-1)] }

// allocate makes the ring of WQEs with storage for their segments and data.
func (q *QP) allocate() {
	n := q.cfg.MaxOutstanding
	q.slots = make([]sendSlot, n)
	sges := make([]SGE, n*q.cfg.MaxSendSGE)
	inline := make([]byte, n*q.cfg.MaxInline)
	for i := range q.slots {
		w := &q.slots[i].w
		w.SGEs, sges = sges[:0:q.cfg.MaxSendSGE], sges[q.cfg.MaxSendSGE:]
		w.InlineData, inline = inline[:0:q.cfg.MaxInline], inline[q.cfg.MaxInline:]
	}
	q.wqe.SGEs = make([]SGE, 0, q.cfg.MaxRecvSGE)
	if q.typ == RC {
		q.rd = make([]uint64, 1<<ceilLog2(q.cfg.MaxRdAtomic))
		n := 1 << ceilLog2(q.cfg.Window+readChunk) // what may be under way
		q.board = newBoard(n)
		q.replies.frames = make([]*frame.Buf, min(n, repliesSpan))
		q.ahead.frames = make([]*frame.Buf, aheadSpan)
	}
}

func ceilLog2(n int) int {
	s := 0
	for 1<<s < n {
		s++
	}
	return s
}

func (q *QP) resetRequester() {
	q.forget()
	q.requester = requester{slots: q.slots, rd: q.rd, window: newWindow(min(q.cfg.Window, strangerWindow)), board: board{sentAt: q.board.sentAt, marks: q.board.marks},
		replies: replies{frames: q.replies.frames}}
	q.startRequester(0)
}

// startRequester sets the first PSN to send.
func (q *QP) startRequester(psn uint32) {
	p := psnBase + uint64(psn)
	q.una, q.nxt, q.sent, q.assigned = p, p, p, p
}

// fetch takes the next WQE from the SQ into the ring.
func (q *QP) fetch() bool {
	if q.state != RTS {
		return false // SQD: only what was begun
	}
	if q.tail-q.head == uint32(len(q.slots)) {
		q.blocked = true
		return false
	}
	s := q.slot(q.tail)
	if !q.fetchInto(s) {
		return false
	}
	w := &s.w
	s.first, s.end = q.assigned, q.assigned
	if !s.failed {
		if st := q.checkWQE(s); st != StatusSuccess {
			s.failed, w.Status = true, st
		}
	}
	if !s.failed {
		switch s.info.kind {
		case kindManage:
		case kindAtomic:
			s.end++
		default:
			s.end += packets(w.Length, q.mtu)
		}
		q.assigned = s.end
	}
	return true
}

// fetchInto asks the adapter for WQE tail; false if there is none now.
func (q *QP) fetchInto(s *sendSlot) bool {
	w := &s.w
	w.Seq, w.SGEs, w.InlineData = q.tail, w.SGEs[:0], w.InlineData[:0]
	w.Opcode, w.Length, w.Status = 0, 0, StatusSuccess // of a bad WQE that leaves them out
	s.failed, s.done = false, false
	f := q.a.FetchSend(q.tail, w)
	if f == FetchFault {
		q.awaitQueue(Requester)
		return false
	}
	if q.waits.send.cause == atQueue {
		q.waits.send.end()
	}
	switch f {
	case FetchReady:
	case FetchBad:
		s.failed = true
		if s.w.Status == StatusSuccess {
			s.w.Status = StatusLocQPOp
		}
	default:
		return false
	}
	s.info = s.w.Opcode.info()
	q.tail++
	return true
}

// checkWQE applies the rules that do not depend on rings (IBTA 10.7, 9.7.7).
func (q *QP) checkWQE(s *sendSlot) Status {
	w := &s.w
	switch s.info.kind {
	case kindBad:
		return StatusLocQPOp
	case kindFlush, kindRead, kindAtomic, kindAtomicWrite:
		if q.typ != RC || q.attr.MaxRdAtomic == 0 || w.Inline && s.info.kind.returns() {
			return StatusLocQPOp
		}
		if s.info.kind == kindFlush && flushNeeds(w.Flush) == 0 {
			return StatusLocQPOp
		}
		if s.info.kind == kindAtomic && w.Length < 8 || s.info.kind == kindAtomicWrite && w.Length != 8 {
			return StatusLocLen
		}
	}
	if q.typ == UC && !s.info.uc || q.typ.class() == classUD && !s.info.ud {
		return StatusLocQPOp
	}
	if w.Length > maxMessage || w.Inline && w.Length != uint64(len(w.InlineData)) {
		return StatusLocLen
	}
	if q.typ.class() == classUD && w.Length > uint64(q.cfg.MTU) {
		return StatusLocLen
	}
	return StatusSuccess
}

// runRC sends up to budget packets; more tells whether the budget ended it.
func (q *QP) runRC(budget int) (more bool) {
	if q.state != RTS && q.state != SQD {
		return false
	}
	q.blocked = false
	asked, left := false, uint64(0)
	for ; budget > 0; budget-- {
		if q.board.active && q.nxt < q.sent {
			q.skip()
		}
		if q.rnrAt != 0 || q.stallAt != 0 || q.waits.send.stops(q.nxt) {
			return false
		}
		if q.cur == q.tail && !q.fetch() {
			return false
		}
		s := q.slot(q.cur)
		if s.failed {
			if q.cur == q.head {
				q.failHead(s.w.Status)
			}
			return false
		}
		if s.info.kind == kindManage {
			if !q.manage(s) {
				return false
			}
			q.cur++
			q.retire()
			continue
		}
		if !asked {
			asked = true
			q.near, left = q.localPeer()
		}
		if q.near != nil {
			switch q.localRC(q.near, s, &left) {
			case localDone:
				if left == 0 {
					return true
				}
				continue
			case localStop:
				return false
			}
		}
		if !q.sendRC(s) {
			return false
		}
	}
	return true
}

// sendRC sends the next packet of slot cur, if it may.
func (q *QP) sendRC(s *sendSlot) bool {
	full := q.nxt-q.una >= uint64(q.cfg.Window) && !q.board.mending || q.flight() >= q.window.packets() && !(q.board.mending && q.nxt == q.una)
	if full || q.nxt == s.first && s.w.Fence && q.fenced() {
		q.blocked = true
		return false
	}
	if s.info.kind.answered() {
		return q.sendReadAtomic(s)
	}
	buf := q.sendPacket(s, q.nxt-s.first)
	if buf == nil {
		return false
	}
	q.advanceNxt(s, q.nxt+1)
	q.send(&q.tx, buf)
	return true
}

// manage executes the memory management request in slot cur, once, when its turn has
// come: what is behind it finds the memory as it leaves it (IBTA 10.8.3).
func (q *QP) manage(s *sendSlot) bool {
	switch {
	case s.done: // went back behind it
		return true
	case s.info.last && q.cur != q.head, s.w.Fence && q.fenced():
		q.blocked = true
		return false
	}
	out, m := q.a.Manage(&s.w)
	switch {
	case m.Fault():
		q.awaitSend(atGather, q.nxt, m)
		return false
	case !m.OK() || out == translate.Refused:
		q.stats.LocalErrors++
		q.failSlot(s, StatusMemMgt)
		return false
	case out == translate.Again:
		q.stallAt = q.now + drainDelay
		return false
	}
	if q.waits.send.cause == atGather && q.nxt >= q.waits.send.psn {
		q.waits.send.end()
	}
	s.done = true
	return true
}

// retire completes memory management requests that nothing stands before any more.
func (q *QP) retire() {
	for q.head != q.tail && q.slot(q.head).done && q.live() {
		q.completeHead(StatusSuccess)
	}
}

// fenced tells whether a READ or atomic before slot cur is still in flight
// (IBTA 10.8.3.3).
func (q *QP) fenced() bool {
	if q.rdHead == q.rdTail {
		return false
	}
	for n := q.head; n != q.cur; n++ {
		if q.slot(n).info.kind.answered() {
			return true
		}
	}
	return false
}

// advanceNxt notes that everything of s before PSN end was sent.
func (q *QP) advanceNxt(s *sendSlot, end uint64) {
	m := marks(0)
	if s.info.kind.answered() {
		m = isReply | isFirst
	}
	if q.nxt < q.sent {
		m = q.board.repeated(m, min(end, q.sent)-q.nxt)
		q.stats.Retransmits += min(end, q.sent) - q.nxt
	} else if q.timed == 0 && !q.board.active {
		q.timed, q.timedAt = q.nxt+1, q.now
	}
	q.board.note(q.nxt, end, q.now, m)
	q.nxt = end
	if end >= q.sent {
		q.sent = end
		if q.board.mending {
			q.board.mending, q.board.holes = false, 0
		}
	}
	if end == s.end {
		q.cur++
	}
	q.armRetransmit()
}

// sendPacket builds packet number i of a SEND or WRITE. It returns nil if there
// is no buffer or the data cannot be had; the latter may fail the WQE.
func (q *QP) sendPacket(s *sendSlot, i uint64) *frame.Buf {
	w, mtu := &s.w, uint64(q.mtu)
	off := i * mtu
	n := int(min(w.Length-off, mtu))
	first, last := i == 0, s.first+i+1 == s.end
	t := bth{
		opcode: s.info.ops.pick(first, last),
		qpn:    q.attr.DestQPN,
		psn:    s.first + i,
		// BTH.SE is meant for the packet that completes a receive (IBTA 9.2.3).
		solicited: last && w.Solicited && (s.info.kind == kindSend || s.info.imm),
	}
	ext := 0
	if s.info.kind == kindWrite && first {
		ext = wire.RETHLen
	}
	if last && (s.info.imm || s.info.inv) {
		ext += wire.ImmLen
	}
	if q.typ == UC {
		t.opcode += ucOpcode
	} else {
		t.selective = !q.cfg.GoBackN
		q.unasked++
		if t.ackReq = last || q.near != nil || q.unasked >= ackEvery || q.board.mending || q.flight()+1 >= q.window.packets(); t.ackReq {
			q.unasked = 0
		}
	}
	buf, hdr, data := q.frame(&q.tx, &t, ext, n)
	if buf == nil {
		q.stallAt = q.now + bufferDelay
		return nil
	}
	buf.Offload.Pad = q.ours
	if s.info.kind == kindWrite && first {
		r := wire.RETH{VA: uint64(w.RemoteVA), RKey: uint32(w.RKey), Length: uint32(w.Length)}
		hdr = hdr[r.Encode(hdr):]
	}
	if last && s.info.imm {
		wire.PutImm(hdr, w.Imm)
	}
	if last && s.info.inv {
		wire.PutIETH(hdr, uint32(w.InvKey))
	}
	if !q.gather(s, data, off) {
		buf.Free()
		return nil
	}
	return buf
}

// gather reads message data; a miss suspends (PF-10) or fails the WQE.
func (q *QP) gather(s *sendSlot, dst []byte, off uint64) bool {
	if len(dst) == 0 {
		return true
	}
	if s.w.Inline {
		copy(dst, s.w.InlineData[off:])
		return true
	}
	m := q.a.Gather(dst, &s.w, off)
	switch {
	case m.OK():
		if q.waits.send.cause == atGather && q.nxt >= q.waits.send.psn {
			q.waits.send.end()
		}
		return true
	case m.Fault():
		m.Len = segmentRest(s.w.SGEs, off, m)
		q.awaitSend(atGather, q.nxt, m)
	default:
		q.stats.LocalErrors++
		q.failSlot(s, StatusLocProt)
	}
	return false
}

// failSlot ends slot s, which is the one being sent, with an error: now if it is
// the oldest, else when its turn comes.
func (q *QP) failSlot(s *sendSlot, st Status) {
	s.failed, s.w.Status = true, st
	if s == q.slot(q.head) {
		q.failHead(st)
	}
}

// completeHead finishes the oldest WQE.
func (q *QP) completeHead(st Status) {
	s := q.slot(q.head)
	q.head++
	if int32(q.cur-q.head) < 0 {
		q.cur = q.head
	}
	c := &q.comp
	*c = Completion{Status: st, ByteLen: uint32(s.w.Length)}
	c.Opcode = s.info.wc
	if s.info.kind == kindAtomic {
		c.ByteLen = 8
	}
	q.a.CompleteSend(&s.w, c)
}

// failHead completes the oldest WQE with an error and stops the send queue: RC
// goes to ERROR, UC and UD to SQE (IBTA 10.3.1.7, 10.3.1.8).
func (q *QP) failHead(st Status) {
	q.completeHead(st)
	if q.typ == RC {
		q.toErr()
		return
	}
	q.state = SQE
	q.assigned, q.una, q.sent = q.nxt, q.nxt, q.nxt // what is sent after SQE has the PSNs that this left unused
	q.waits.send.end()
	q.wake()
}

// checkDrained raises the event once SQD has nothing left in flight.
func (q *QP) checkDrained() {
	if q.state != SQD || !q.draining || q.head != q.tail {
		return
	}
	q.draining = false
	if q.attr.SQDNotify {
		q.a.Event(EventSQDrained)
	}
}
