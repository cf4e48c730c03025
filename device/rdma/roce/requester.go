package roce

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/roce/recovery"
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
	slots           []sendSlot // ring of WQEs; the length is a power of two
	head, cur, tail uint32
	una, nxt, sent  uint64
	nextPSN         uint64 // first PSN of the next WQE

	// Ends (exclusive) of the READ and atomic requests in flight, oldest first. A READ is requested in parts of at most
	// readChunk packets, so that a long READ cannot flood the path. A repeated part keeps its original limits.
	readEnds           []uint64 // ring; the length is a power of two
	readHead, readTail uint32

	sinceAckReq uint32 // packets sent since the last AckReq
	rnrLeft     uint8  // RNR NAKs left before the WQE fails
	blocked     bool   // Run stopped for a reason that an acknowledgement removes
	rnrUntil    int64  // RNR wait: nothing is sent before; 0: no wait
	stallUntil  int64  // no buffer, or a drain in progress: try again then; 0: not stalled

	localPeer *QP            // the peer, while this Run may reach it directly
	localMiss translate.Miss // in the QP's own memory, on the local path

	// UD: the path that q.tx was encoded for
	udAV     AddressVector
	udQPN    uint32
	udCached bool

	cqe          Completion
	atomicResult [atomicLen]byte // result of an atomic, on its way to or from memory
}

type sendSlot struct {
	w          WQE
	info       *wrInfo
	first, end uint64
	// failed: ends with w.Status once all before it have completed (IBTA 10.8.5:
	// completions stay in order).
	failed   bool
	executed bool // memory management: executed
}

const (
	readChunk   = 64   // packets
	ackEvery    = 64   // packets without AckReq
	bufferDelay = 50e3 // ns before trying again
	drainDelay  = 5e3  // ns, about as long as a batch of another loop
)

func (r *requester) slot(n uint32) *sendSlot { return &r.slots[n&uint32(len(r.slots)-1)] }

// allocate makes the ring of WQEs with storage for their segments and data.
func (q *QP) allocate() {
	n := q.cfg.MaxOutstanding
	q.req.slots = make([]sendSlot, n)
	sges := make([]SGE, n*q.cfg.MaxSendSGE)
	inline := make([]byte, n*q.cfg.MaxInline)
	for i := range q.req.slots {
		w := &q.req.slots[i].w
		w.SGEs, sges = sges[:0:q.cfg.MaxSendSGE], sges[q.cfg.MaxSendSGE:]
		w.InlineData, inline = inline[:0:q.cfg.MaxInline], inline[q.cfg.MaxInline:]
	}
	q.resp.recv.SGEs = make([]SGE, 0, q.cfg.MaxRecvSGE)
	if q.typ == RC {
		q.req.readEnds = make([]uint64, 1<<ceilLog2(q.cfg.MaxRdAtomic))
		q.recovery.allocate(1 << ceilLog2(q.cfg.Window+readChunk)) // as many PSNs as may be in flight
		q.resp.reorder.Queue = recovery.NewQueue(reorderSpan)
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
	q.clearScoreboard()
	q.req = requester{slots: q.req.slots, readEnds: q.req.readEnds}
	q.recovery.reset(min(q.cfg.Window, goBackNWindow))
	q.req.start(0)
}

// start sets the first PSN to send.
func (r *requester) start(psn uint32) {
	p := psnBase + uint64(psn)
	r.una, r.nxt, r.sent, r.nextPSN = p, p, p, p
}

// fetch takes the next WQE from the SQ into the ring.
func (q *QP) fetchWQE() bool {
	if q.state != RTS {
		return false // SQD: only what was begun
	}
	if q.req.tail-q.req.head == uint32(len(q.req.slots)) {
		q.req.blocked = true
		return false
	}
	s := q.req.slot(q.req.tail)
	if !q.fetchInto(s) {
		return false
	}
	w := &s.w
	s.first, s.end = q.req.nextPSN, q.req.nextPSN
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
		q.req.nextPSN = s.end
	}
	return true
}

// fetchInto asks the adapter for WQE tail; false if there is none now.
func (q *QP) fetchInto(s *sendSlot) bool {
	w := &s.w
	w.Seq, w.SGEs, w.InlineData = q.req.tail, w.SGEs[:0], w.InlineData[:0]
	w.Opcode, w.Length, w.Status = 0, 0, StatusSuccess // of a bad WQE that leaves them out
	s.failed, s.executed = false, false
	f := q.queues.FetchSend(q.req.tail, w)
	if f == FetchFault {
		q.waitForQueue(Requester)
		return false
	}
	if q.faults.send.cause == waitQueue {
		q.faults.send.clear()
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
	q.req.tail++
	return true
}

// checkWQE applies the rules that do not depend on rings (IBTA 10.7, 9.7.7).
func (q *QP) checkWQE(s *sendSlot) Status {
	w := &s.w
	switch s.info.kind {
	case kindBad:
		return StatusLocQPOp
	case kindFlush, kindRead, kindAtomic, kindAtomicWrite:
		if q.typ != RC || q.attr.MaxRdAtomic == 0 || w.Inline && s.info.kind.returnsData() {
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
	q.req.blocked = false
	asked, left := false, uint64(0)
	for ; budget > 0; budget-- {
		if q.recovery.board.Active && q.req.nxt < q.req.sent {
			q.skipDelivered()
		}
		if q.req.rnrUntil != 0 || q.req.stallUntil != 0 || q.faults.send.blocks(q.req.nxt) {
			return false
		}
		if q.req.cur == q.req.tail && !q.fetchWQE() {
			return false
		}
		s := q.req.slot(q.req.cur)
		if s.failed {
			if q.req.cur == q.req.head {
				q.failHead(s.w.Status)
			}
			return false
		}
		if s.info.kind == kindManage {
			if !q.executeManage(s) {
				return false
			}
			q.req.cur++
			q.completeManaged()
			continue
		}
		if !asked {
			asked = true
			q.req.localPeer, left = q.localPeer()
		}
		if q.req.localPeer != nil {
			switch q.localRC(q.req.localPeer, s, &left) {
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
	full := q.req.nxt-q.req.una >= uint64(q.cfg.Window) && !q.recovery.board.Retransmitting || q.inFlight() >= q.recovery.cwnd.Packets() && !(q.recovery.board.Retransmitting && q.req.nxt == q.req.una)
	if full || q.req.nxt == s.first && s.w.Fence && q.req.fenceBlocks() {
		q.req.blocked = true
		return false
	}
	if s.info.kind.needsResponse() {
		return q.sendReadAtomic(s)
	}
	buf := q.sendPacket(s, q.req.nxt-s.first)
	if buf == nil {
		return false
	}
	q.advanceNxt(s, q.req.nxt+1)
	q.send(&q.tx, buf)
	return true
}

// manage executes the memory management request in slot cur, once, when its turn has
// come: what is behind it finds the memory as it leaves it (IBTA 10.8.3).
func (q *QP) executeManage(s *sendSlot) bool {
	switch {
	case s.executed: // went back behind it
		return true
	case s.info.afterAll && q.req.cur != q.req.head, s.w.Fence && q.req.fenceBlocks():
		q.req.blocked = true
		return false
	}
	out, m := q.memory.Manage(&s.w)
	switch {
	case m.Fault():
		q.requesterWait(waitGather, q.req.nxt, m)
		return false
	case !m.OK() || out == translate.Refused:
		q.stats.LocalErrors++
		q.failSlot(s, StatusMemMgt)
		return false
	case out == translate.Again:
		q.req.stallUntil = q.now + drainDelay
		return false
	}
	if q.faults.send.cause == waitGather && q.req.nxt >= q.faults.send.psn {
		q.faults.send.clear()
	}
	s.executed = true
	return true
}

// retire completes memory management requests that nothing stands before any more.
func (q *QP) completeManaged() {
	for q.req.head != q.req.tail && q.req.slot(q.req.head).executed && q.requesterActive() {
		q.completeHead(StatusSuccess)
	}
}

// fenced tells whether a READ or atomic before slot cur is still in flight
// (IBTA 10.8.3.3).
func (r *requester) fenceBlocks() bool {
	if r.readHead == r.readTail {
		return false
	}
	for n := r.head; n != r.cur; n++ {
		if r.slot(n).info.kind.needsResponse() {
			return true
		}
	}
	return false
}

// advanceNxt notes that everything of s before PSN end was sent.
func (q *QP) advanceNxt(s *sendSlot, end uint64) {
	q.noteSent(s, end)
	q.req.nxt = end
	if end >= q.req.sent {
		q.req.sent = end
		if q.recovery.board.Retransmitting {
			q.recovery.board.EndRetransmit()
		}
	}
	if end == s.end {
		q.req.cur++
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
		destQP: q.attr.DestQPN,
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
		t.selective = q.cfg.SelectiveRepeat
		q.req.sinceAckReq++
		if t.ackReq = last || q.req.localPeer != nil || q.req.sinceAckReq >= ackEvery || q.recovery.board.Retransmitting || q.inFlight()+1 >= q.recovery.cwnd.Packets(); t.ackReq {
			q.req.sinceAckReq = 0
		}
	}
	buf, hdr, data := q.frame(&q.tx, &t, ext, n)
	if buf == nil {
		q.req.stallUntil = q.now + bufferDelay
		return nil
	}
	buf.Offload.Pad = q.recovery.peerSelective
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
	m := q.memory.Gather(dst, &s.w, off)
	switch {
	case m.OK():
		if q.faults.send.cause == waitGather && q.req.nxt >= q.faults.send.psn {
			q.faults.send.clear()
		}
		return true
	case m.Fault():
		m.Len = segmentRest(s.w.SGEs, off, m)
		q.requesterWait(waitGather, q.req.nxt, m)
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
	if s == q.req.slot(q.req.head) {
		q.failHead(st)
	}
}

// completeHead finishes the oldest WQE.
func (q *QP) completeHead(st Status) {
	s := q.req.slot(q.req.head)
	q.req.head++
	if int32(q.req.cur-q.req.head) < 0 {
		q.req.cur = q.req.head
	}
	c := &q.req.cqe
	*c = Completion{Status: st, ByteLen: uint32(s.w.Length)}
	c.Opcode = s.info.wc
	if s.info.kind == kindAtomic {
		c.ByteLen = 8
	}
	q.queues.CompleteSend(&s.w, c)
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
	q.req.nextPSN, q.req.una, q.req.sent = q.req.nxt, q.req.nxt, q.req.nxt // what is sent after SQE has the PSNs that this left unused
	q.faults.send.clear()
	q.wake()
}

// checkDrained raises the event once SQD has nothing left in flight.
func (q *QP) checkDrained() {
	if q.state != SQD || !q.draining || q.req.head != q.req.tail {
		return
	}
	q.draining = false
	if q.attr.SQDNotify {
		q.sched.Event(EventSQDrained)
	}
}
