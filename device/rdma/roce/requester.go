package roce

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/roce/recovery"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// requester is the part of a QP that sends requests (IBTA 9.7.3, 9.9). WQEs are fetched in order into a ring of slots,
// where they get their PSNs. They are sent packet by packet within the window, and complete in order when the responses
// reach their last PSN:
//
//	   head            cur            tail          slots (numbers of WQEs)
//	    | acknowledged  | sent, going  | fetched |
//	    v  in part      v              v
//	----[una ....................[nxt ............ sent]   PSNs
//
// una is the oldest PSN without response and belongs to slot head. nxt is the next PSN to send and belongs to slot cur.
// sent is the end of all PSNs that were ever sent. Go-back-N sets nxt back to una and gathers the messages' data again.
type requester struct {
	slots           []sendSlot // ring of WQEs; the length is a power of two, see grow
	head, cur, tail uint32     // numbers of WQEs
	una, nxt, sent  uint64     // PSNs
	nextPSN         uint64     // first PSN of the next WQE

	// Ends (exclusive) of the READ and atomic requests in flight, oldest first. A READ is requested in parts of at
	// most readChunk packets, so that a long READ cannot flood the path. A repeated part keeps its original limits.
	readEnds           []uint64 // ring; the length is a power of two
	readHead, readTail uint32
	endsCopy           []uint64 // room for a copy of them

	// After a context without work requests (context.go): requests are fetched that were fetched before, of which these
	// were executed, oldest first.
	refetch        bool
	past           uint64 // PSNs before it may have been sent by a process that was killed after the context
	revived        bool   // there was such a process
	executedBefore []uint32
	manages        bool // a memory management request was executed

	sinceAckReq uint32 // packets sent since the last AckReq
	patience    wire.Patience
	rnrLeft     uint8 // RNR NAKs left before the WQE fails
	blocked     bool  // Run stopped for a reason that an acknowledgement removes
	rnrUntil    int64 // RNR wait: nothing is sent before; 0: no wait
	stallUntil  int64 // no buffer, or a drain in progress: try again then; 0: not stalled

	localPeer *QP            // the peer, if this Run may use the local path
	localMiss translate.Miss // miss in the QP's own memory, on the local path

	// With a journal: READs and atomics that were executed on the local path since the last commit. The responder
	// remembers max_dest_rd_atomic of them.
	uncommitted  int
	awaitsCommit bool   // the next READ or atomic does
	atomicFound  uint64 // what the newest atomic on the local path has found

	// UD: the path for which QP.tx was encoded
	udAV     AddressVector
	udQPN    uint32
	udCached bool

	cqe          Completion
	atomicResult [atomicLen]byte // result of an atomic, on its way to or from memory
}

// sendSlot is one WQE in the ring.
type sendSlot struct {
	w          WQE
	info       *wrInfo
	first, end uint64 // PSNs; equal for memory management requests
	failed     bool   // completes with w.Status after all before it (IBTA 10.8.5: completions are in order)
	executed   bool   // memory management: executed
}

const (
	readChunk   = 64   // packets
	ackEvery    = 64   // packets between two acknowledgement requests
	bufferDelay = 50e3 // ns until a buffer is tried again
	drainDelay  = 5e3  // ns, about as long as a batch of another loop
)

func (r *requester) slot(n uint32) *sendSlot { return &r.slots[n&uint32(len(r.slots)-1)] }

// firstSlots is how many WQEs the ring of a new QP has room for.
const firstSlots = 4

// allocate prepares all parts, when the QP leaves RESET. What takes much memory is made or grows when it is used: a
// program may have thousands of connections, of which few are busy.
func (q *QP) allocate() {
	q.req.allocate(&q.cfg)
	q.resp.recv.SGEs = make([]SGE, 0, q.cfg.MaxRecvSGE)
	if q.typ == RC {
		q.recovery.allocate(1 << ceilLog2(q.cfg.Window+readChunk)) // as many PSNs as may be in flight
		q.resp.reorder.Queue = recovery.NewQueue(reorderSpan)
	}
}

func (r *requester) allocate(cfg *Config) {
	r.grow(cfg)
	if cfg.Type == RC {
		r.readEnds = make([]uint64, 1<<ceilLog2(cfg.MaxRdAtomic))
		r.endsCopy = make([]uint64, 0, len(r.readEnds))
	}
}

// grow makes the ring of WQEs, with storage for their segments and inline data, or replaces one that is full by one of
// four times the size, MaxOutstanding at most.
func (r *requester) grow(cfg *Config) {
	old, used := r.slots, r.tail-r.head
	r.slots = make([]sendSlot, min(max(4*len(old), firstSlots), cfg.MaxOutstanding))
	for n := r.head; n != r.tail; n++ {
		*r.slot(n) = old[n&uint32(len(old)-1)]
	}
	added := len(r.slots) - int(used)
	sges, inline := make([]SGE, added*cfg.MaxSendSGE), make([]byte, added*cfg.MaxInline)
	for i := range uint32(added) {
		w := &r.slot(r.tail + i).w
		w.SGEs, sges = sges[:0:cfg.MaxSendSGE], sges[cfg.MaxSendSGE:]
		w.InlineData, inline = inline[:0:cfg.MaxInline], inline[cfg.MaxInline:]
	}
}

func ceilLog2(n int) int {
	s := 0
	for 1<<s < n {
		s++
	}
	return s
}

// reset returns to the state of a new QP and keeps the rings.
func (r *requester) reset() {
	*r = requester{slots: r.slots, readEnds: r.readEnds, endsCopy: r.endsCopy}
	r.start(0)
}

// start sets the first PSN to send.
func (r *requester) start(psn uint32) {
	p := psnBase + uint64(psn)
	r.una, r.nxt, r.sent, r.nextPSN = p, p, p, p
}

// fetchWQE fetches the next WQE into the ring and assigns its PSNs. It returns false if there is none or no room.
func (q *QP) fetchWQE() bool {
	if q.state != RTS && q.req.nextPSN >= q.req.sent {
		return false // SQD: only WQEs that were begun
	}
	if n := len(q.req.slots); int(q.req.tail-q.req.head) == n {
		if n == q.cfg.MaxOutstanding {
			q.req.blocked = true
			return false
		}
		q.req.grow(&q.cfg)
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
	if q.req.refetch {
		q.resumes(s)
	}
	return true
}

// fetchInto fetches WQE tail into s. It returns false if none is posted or if it is not accessible.
func (q *QP) fetchInto(s *sendSlot) bool {
	w := &s.w
	w.Seq, w.SGEs, w.InlineData = q.req.tail, w.SGEs[:0], w.InlineData[:0]
	w.Opcode, w.Length, w.Status = 0, 0, StatusSuccess // FetchBad may leave them unset
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

// checkWQE applies the transport's rules to a WQE (IBTA 10.7, 9.7.7).
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

// runRC sends up to budget packets. It returns true if it stopped because the budget was used up.
func (q *QP) runRC(budget int) (more bool) {
	if q.state != RTS && q.state != SQD {
		return false
	}
	q.req.blocked = false
	if q.req.nextPSN < q.req.sent && !q.fetchSent() {
		return false
	}
	if q.recovery.early.oldest && !q.sendOldest() {
		return false
	}
	asked, left := false, uint64(0)
	for ; budget > 0; budget-- {
		if q.recovery.scoreboard.Active && q.req.nxt < q.req.sent {
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
			if q.link.Journaled() {
				return true // requests behind it may tell the peer its key, after the commit
			}
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
		if q.req.uncommitted > 0 && s.info.kind.needsResponse() { // frames would not count
			q.req.awaitsCommit = true
			return true
		}
		if !q.sendRC(s) {
			return false
		}
	}
	return true
}

// sendRC sends the next packet of slot cur, if the window permits it.
func (q *QP) sendRC(s *sendSlot) bool {
	if q.windowFull() || q.req.nxt == s.first && s.w.Fence && q.req.fenceBlocks() {
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
	q.transmit(&q.tx, buf)
	return true
}

// windowFull reports whether no more packets may be in flight. The oldest packet may always be sent again.
func (q *QP) windowFull() bool {
	retransmitting := q.recovery.scoreboard.Retransmitting
	return q.req.nxt-q.req.una >= uint64(q.cfg.Window) && !retransmitting ||
		q.inFlight() >= q.recovery.cwnd.Packets() && !(retransmitting && q.req.nxt == q.req.una)
}

// executeManage executes the memory management request in slot cur, once and in order: requests behind it find the
// memory as it leaves it (IBTA 10.8.3). It returns false if the requester must stop.
func (q *QP) executeManage(s *sendSlot) bool {
	switch {
	case s.executed: // the requester went back beyond it
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
	s.executed, q.req.manages = true, true
	return true
}

// completeManaged completes executed memory management requests at the head of the ring.
func (q *QP) completeManaged() {
	for q.req.head != q.req.tail && q.req.slot(q.req.head).executed && q.requesterActive() {
		q.completeHead(StatusSuccess)
	}
}

// fenceBlocks reports whether a READ or atomic before slot cur is still in flight (IBTA 10.8.3.3).
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

// advanceNxt records that the packets of s before PSN end were sent.
func (q *QP) advanceNxt(s *sendSlot, end uint64) {
	q.noteSent(s, end)
	q.req.nxt = end
	if end >= q.req.sent {
		q.req.sent = end
		if q.recovery.scoreboard.Retransmitting {
			q.recovery.scoreboard.EndRetransmit()
		}
	}
	if end == s.end {
		q.req.cur++
	}
	q.armRetransmit()
}

// sendPacket builds packet number i of a SEND or WRITE. It returns nil if there is no buffer or if the data is not
// accessible; the latter may fail the WQE.
func (q *QP) sendPacket(s *sendSlot, i uint64) *frame.Buf {
	w, mtu := &s.w, uint64(q.mtu)
	off := i * mtu
	n := int(min(w.Length-off, mtu))
	first, last := i == 0, s.first+i+1 == s.end
	t := bth{
		opcode: s.info.ops.pick(first, last),
		destQP: q.attr.DestQPN,
		psn:    s.first + i,
		// BTH.SE is set in the packet that completes a receive (IBTA 9.2.3).
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
		t.selective, t.patience = q.cfg.SelectiveRepeat, q.req.patience
		q.req.sinceAckReq++
		t.ackReq = last || q.req.localPeer != nil || q.req.sinceAckReq >= ackEvery ||
			q.recovery.scoreboard.Retransmitting || q.inFlight()+1 >= q.recovery.cwnd.Packets()
		if t.ackReq {
			q.req.sinceAckReq = 0
		}
	}
	buf, hdr, data := q.newFrame(&q.tx, &t, ext, n)
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

// gather copies message data to dst. A miss suspends (PF-10) or fails the WQE.
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

// failSlot fails slot s, which is being sent: at once if it is the oldest, else after those before it have completed.
func (q *QP) failSlot(s *sendSlot, st Status) {
	s.failed, s.w.Status = true, st
	if s == q.req.slot(q.req.head) {
		q.failHead(st)
	}
}

// completeHead completes the oldest WQE with status st.
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
	if q.req.head != q.req.tail { // else it could not be fetched again, and will be flushed
		q.completeHead(st)
	}
	if q.typ == RC {
		q.toErr()
		return
	}
	q.state = SQE
	// The PSNs that it left unused are used after SQE.
	q.req.nextPSN, q.req.una, q.req.sent = q.req.nxt, q.req.nxt, q.req.nxt
	q.faults.send.clear()
	q.wake()
}

// checkDrained raises EventSQDrained when nothing is in flight in SQD.
func (q *QP) checkDrained() {
	if q.state != SQD || !q.draining || q.req.head != q.req.tail || q.req.nextPSN < q.req.sent {
		return
	}
	q.draining = false
	if q.attr.SQDNotify {
		q.sched.Event(EventSQDrained)
	}
}
