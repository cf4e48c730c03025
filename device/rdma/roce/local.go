package roce

import (
	"encoding/binary"
	"math/bits"

	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// The local path: the peer is a QP of the same loop, and a request is one copy from memory to memory.
//
// Only steps that succeed use it. A step sends, executes and acknowledges several packets of a message at once: both
// QPs advance from one packet boundary to another, as if those packets had been on the wire. A step that cannot succeed
// at the peer (absent page, no receive, wrong key or state) changes nothing there, and its packet is sent as a frame.
// The frame fails in the same way and is answered by the only implementation of RNR NAKs, faults and errors. The same
// happens whenever the adapter requires frames.
//
// A step is taken only if this requester has nothing in flight and the peer expects the very next PSN. So frames and
// steps never overtake each other.
//
// A miss in the requester's own memory suspends it as when a frame is built.

// Messages of at least streamFrom bytes are copied with non-temporal stores, as Go's copy does from there on, but not
// in pieces shorter than streamLeast.
const (
	streamFrom  = 1 << 20
	streamLeast = 2 << 10
)

// localOutcome is the result of a step on the local path.
type localOutcome uint8

const (
	localDone  localOutcome = iota // some of the WQE, or all, is done
	localFrame                     // the next packet must be a frame
	localStop                      // the requester waits or has failed
	localMiss                      // own memory missed: requester.localMiss
)

// localPeer returns the peer if this Run may use the local path, and how many bytes it may copy.
func (q *QP) localPeer() (*QP, uint64) {
	p, slice := q.link.Peer()
	if p == nil || p == q || p.closed || p.typ != q.typ || p.mtu != q.mtu || p.state < RTR || p.state == Err {
		return nil, 0
	}
	// The checks of admits, in both directions.
	x, y := &q.attr.AV, &p.attr.AV
	if q.attr.DestQPN != p.cfg.QPN || p.attr.DestQPN != q.cfg.QPN || x.RoCEv1 != y.RoCEv1 ||
		x.SMAC != y.DMAC || x.DMAC != y.SMAC || x.SGID != y.DGID || x.DGID != y.SGID || !sameVLAN(x.VLAN, y.VLAN) {
		return nil, 0
	}
	return p, slice
}

// expectsLocal reports whether the responder is between packets and expects psn.
func (q *QP) expectsLocal(psn uint64) bool {
	r := &q.resp
	return (r.epsn^psn)&psnMask == 0 && r.epsn >= r.stored && r.fatal.syndrome == 0 && r.nak == 0 && !r.nakSent &&
		r.pending == 0 && r.emptyDue.empty() && r.repeatsDue.empty() &&
		!r.reorder.arrived.Any() && !r.dropMessage && q.faults.request.cause == waitNone
}

// localRC takes a step of slot cur of an RC QP. left is the number of bytes that this Run may still copy.
func (q *QP) localRC(p *QP, s *sendSlot, left *uint64) localOutcome {
	journaled := s.info.kind.needsResponse() && q.link.Journaled()
	if journaled && q.req.uncommitted >= p.resp.depth && p.resp.depth > 0 {
		*left, q.req.awaitsCommit = 0, true
		return localDone
	}
	if q.req.uncommitted > 0 && s.w.Fence && q.req.nxt == s.first {
		// A READ before it that is repeated, because this process was killed, must not find what it has written.
		*left, q.req.awaitsCommit = 0, true
		return localDone
	}
	if q.req.nxt != q.req.una || q.req.sent != q.req.una {
		// Packets are in flight. They are resent, or an acknowledgement is requested, as frames.
		if q.req.nxt < q.req.sent || q.req.sinceAckReq > 0 {
			return localFrame
		}
		q.req.blocked = true
		return localStop
	}
	if !p.expectsLocal(q.req.nxt) {
		return localFrame
	}
	n, res := q.localStep(p, s, left)
	if n > 0 {
		if journaled {
			p.remember(s, q.req.nxt-s.first, n, q.req.atomicFound)
			q.req.uncommitted++
		}
		q.req.nxt += n
		q.req.una, q.req.sent = q.req.nxt, q.req.nxt
		if s.info.kind == kindWrite || s.info.kind == kindAtomicWrite {
			p.memory.Stored(p.resp.epsn)
		}
		if s.info.kind.needsResponse() {
			p.resp.msn++ // each part of a READ is a request
		} else {
			p.resp.ackPSN = p.resp.epsn - 1
			if q.req.nxt == s.end {
				p.resp.msn++
			}
		}
		if q.req.nxt == s.end {
			q.req.cur++
			q.completeHead(StatusSuccess)
			return localDone
		}
	}
	return q.finishLocalMiss(s, res)
}

// remember keeps what a duplicate of n packets of s may ask for, a READ or atomic that was executed on the local path:
// if this process is killed, the requester may return to an older commit than the responder (CO-2).
func (q *QP) remember(s *sendSlot, packet, n, found uint64) {
	r := &q.resp
	off := packet * uint64(q.mtu)
	end := r.epsn
	x := resource{first: end - n, end: end, start: end, next: end, stop: end, sentEnd: end}
	switch s.w.Opcode {
	case WRRead:
		x.op, x.va, x.key = wire.ReadRequest, s.w.RemoteVA+translate.VA(off), s.w.RKey
		x.length = min(n*uint64(q.mtu), s.w.Length-off)
	case WRCompareSwap:
		x.op, x.value = wire.CompareSwap, found
	case WRFetchAdd:
		x.op, x.value = wire.FetchAdd, found
	default:
		return // a FLUSH or ATOMIC WRITE is answered without
	}
	x.behindSend = r.ackPSN == x.first-1
	*r.newResource() = x // there is one: no response is pending
	r.accepted++
}

// Committed tells q that its state, and before that its peer's, is valid in the journal.
func (q *QP) Committed() { q.req.uncommitted, q.req.awaitsCommit = 0, false }

// AwaitsCommit reports whether the work of q goes on after a commit: its peer remembers no more answers.
func (q *QP) AwaitsCommit() bool { return q.req.awaitsCommit }

// localUC is localRC for UC. If a frame is in flight, the peer expects another PSN.
func (q *QP) localUC(p *QP, s *sendSlot, left *uint64) localOutcome {
	if !p.expectsLocal(q.req.nxt) {
		return localFrame
	}
	if q.req.nxt == s.first {
		p.resp.op, p.resp.off = 0, 0 // a message in progress is abandoned
	}
	n, res := q.localStep(p, s, left)
	if n > 0 {
		q.req.nxt += n
		if q.req.nxt == s.end {
			q.req.una, q.req.sent = q.req.nxt, q.req.nxt
			q.completeHead(StatusSuccess)
			return localDone
		}
	}
	return q.finishLocalMiss(s, res)
}

// localStep executes packets of s at p, from nxt on, and returns their number.
func (q *QP) localStep(p *QP, s *sendSlot, left *uint64) (n uint64, res localOutcome) {
	off := (q.req.nxt - s.first) * uint64(q.mtu)
	want, size := uint64(0), uint64(0) // bytes
	if s.info.kind != kindAtomic {
		if want = s.w.Length - off; want > *left {
			want = *left &^ uint64(q.mtu-1) // whole packets
			if want == 0 {
				*left = 0
				return 0, localDone
			}
		}
	}
	p.now = q.now
	switch s.info.kind {
	case kindRead:
		size, res = q.localRead(p, s, off, want)
	case kindAtomic:
		if res = q.localAtomic(p, s); res != localDone {
			return 0, res
		}
	case kindFlush:
		f, whole := flushNeeds(s.w.Flush), s.w.Flush.Selectivity == wire.FlushRegion
		if p.resp.op != 0 || p.attr.Access&f != f || p.resp.depth == 0 ||
			!p.memory.FlushRemote(s.w.RKey, s.w.RemoteVA, uint64(s.w.FlushLen), whole, f).OK() {
			return 0, localFrame
		}
		res = localDone
	case kindAtomicWrite:
		if size, res = want, q.localAtomicWrite(p, s); res != localDone {
			return 0, res
		}
	default:
		size, res = q.localWrite(p, s, off, want)
	}
	*left -= min(size, *left)
	if res == localDone {
		n = packets(size, q.mtu)
	} else {
		size &^= uint64(q.mtu - 1)
		if n = size >> bits.TrailingZeros32(q.mtu); n == 0 {
			return 0, res
		}
	}
	if w := &q.faults.send; (w.cause == waitGather || w.cause == waitResult) && w.psn < q.req.nxt+n {
		w.clear()
	}
	if p.state == RTR && !p.commEst {
		p.commEst = true
		p.sched.Event(EventCommEst)
	}
	q.countLocal(p, s, n, size)
	p.resp.epsn += n
	if !s.info.kind.needsResponse() {
		p.finishLocalWrite(s, off, size)
	}
	return n, res
}

// countLocal counts n packets with size bytes as if they had been frames.
func (q *QP) countLocal(p *QP, s *sendSlot, n, size uint64) {
	from, to := q.stats, p.stats
	if s.info.kind.needsResponse() { // the request
		from.TxPackets++
		to.RxPackets++
		from, to = to, from
	}
	from.TxPackets += n
	from.TxBytes += size
	to.RxPackets += n
	to.RxBytes += size
	if q.req.nxt == s.first {
		q.stats.LocalMessages++
	}
	q.stats.LocalBytes += size
}

// localWrite copies want bytes of a SEND or WRITE from byte off on, and returns how many it has copied.
func (q *QP) localWrite(p *QP, s *sendSlot, off, want uint64) (done uint64, res localOutcome) {
	w := &s.w
	first, last, write := off == 0, off+want == w.Length, s.info.kind == kindWrite
	switch {
	case s.info.inv, first && p.resp.op != 0, !first && (p.resp.op != s.info.op() || p.resp.off != off):
		return 0, localFrame
	case write && first && p.attr.Access&translate.RemoteWrite == 0:
		return 0, localFrame
	case write && first && (!last || s.info.imm && w.Length > 0) && // else it is checked below
		!p.memory.CheckRemote(w.RKey, w.RemoteVA, w.Length, translate.RemoteWrite).OK():
		return 0, localFrame
	}
	if !write || last && s.info.imm {
		if p.ensureRecv() != vOK {
			p.armTimer()
			return 0, localFrame
		}
		if !write && off+want > p.resp.recv.Length {
			return 0, localFrame
		}
	}
	for done < want {
		at := off + done
		var src, dst []byte
		var m translate.Miss
		if w.Inline {
			src = w.InlineData[at : off+want]
		} else if src, m = q.memory.GatherSpan(w, at, want-done); !m.OK() {
			return done, q.ownMiss(s, at, m)
		}
		if write {
			if first && last && done == 0 && uint64(len(src)) < want &&
				!p.memory.CheckRemote(w.RKey, w.RemoteVA, want, translate.RemoteWrite).OK() {
				return 0, localFrame // before any of it is written
			}
			dst, m = p.memory.RemoteSpan(w.RKey, w.RemoteVA+translate.VA(at), uint64(len(src)), translate.RemoteWrite)
		} else {
			dst, m = p.memory.ScatterSpan(p.resp.recv.SGEs, at, uint64(len(src)))
		}
		if !m.OK() {
			return done, localFrame
		}
		done += uint64(s.copyPart(dst, src))
	}
	return done, localDone
}

// copyPart copies a part of the message.
func (s *sendSlot) copyPart(dst, src []byte) int {
	if s.w.Length >= streamFrom {
		return stream(dst, src)
	}
	return copy(dst, src)
}

// finishLocalWrite updates the responder after size bytes of s from off on were copied to its memory.
func (q *QP) finishLocalWrite(s *sendSlot, off, size uint64) {
	w := &s.w
	if off+size < w.Length {
		q.resp.op, q.resp.off = s.info.op(), off+size
		q.resp.va, q.resp.rkey, q.resp.length = w.RemoteVA, w.RKey, w.Length
		return
	}
	q.resp.op, q.resp.off = 0, 0
	if s.info.kind == kindWrite && !s.info.imm {
		return
	}
	c := &q.resp.cqe
	*c = Completion{
		Opcode: WCRecv, ByteLen: uint32(w.Length), SrcQP: q.attr.DestQPN, Solicited: w.Solicited, VLAN: NoVLAN,
	}
	if s.info.kind == kindWrite {
		c.Opcode = WCRecvWithImm
	}
	if s.info.imm {
		c.Flags, c.Imm = FlagImm, w.Imm
	}
	q.finishRecv()
}

// localRead copies want bytes of a READ from byte off on.
func (q *QP) localRead(p *QP, s *sendSlot, off, want uint64) (done uint64, res localOutcome) {
	w := &s.w
	if p.resp.op != 0 || p.attr.Access&translate.RemoteRead == 0 || p.resp.depth == 0 ||
		want > 0 && !p.memory.CheckRemote(w.RKey, w.RemoteVA+translate.VA(off), want, translate.RemoteRead).OK() {
		return 0, localFrame
	}
	for done < want {
		at := off + done
		src, m := p.memory.RemoteSpan(w.RKey, w.RemoteVA+translate.VA(at), want-done, translate.RemoteRead)
		if !m.OK() {
			return done, localFrame
		}
		dst, m := q.memory.ScatterSpan(w.SGEs, at, uint64(len(src)))
		if !m.OK() {
			return done, q.ownMiss(s, at, m)
		}
		done += uint64(s.copyPart(dst, src))
	}
	return done, localDone
}

// localAtomic executes an atomic. The memory of its result is looked up before: present memory stays present until the
// epoch ends.
func (q *QP) localAtomic(p *QP, s *sendSlot) localOutcome {
	w := &s.w
	if p.resp.op != 0 || p.attr.Access&translate.RemoteAtomic == 0 || p.resp.depth == 0 ||
		w.RemoteVA&(atomicLen-1) != 0 {
		return localFrame
	}
	dst, m := q.memory.ScatterSpan(w.SGEs, 0, atomicLen)
	if m.Fault() {
		return q.ownMiss(s, 0, m)
	}
	if len(dst) < atomicLen {
		return localFrame // it spans two pieces of memory, or has none
	}
	op, compare := AtomicFetchAdd, uint64(0)
	if w.Opcode == WRCompareSwap {
		op, compare = AtomicCompareSwap, w.Compare
	}
	old, m := p.memory.AtomicRemote(w.RKey, w.RemoteVA, op, compare, w.SwapAdd)
	if !m.OK() {
		return localFrame
	}
	binary.LittleEndian.PutUint64(dst, old)
	q.req.atomicFound = old
	return localDone
}

// localAtomicWrite executes an ATOMIC WRITE.
func (q *QP) localAtomicWrite(p *QP, s *sendSlot) localOutcome {
	w := &s.w
	if p.resp.op != 0 || p.attr.Access&translate.RemoteWrite == 0 || p.resp.depth == 0 ||
		w.RemoteVA&(atomicLen-1) != 0 {
		return localFrame
	}
	src := q.req.atomicResult[:]
	if w.Inline {
		copy(src, w.InlineData)
	} else if m := q.memory.Gather(src, w, 0); !m.OK() {
		return q.ownMiss(s, 0, m)
	}
	value := binary.LittleEndian.Uint64(src)
	if _, m := p.memory.AtomicRemote(w.RKey, w.RemoteVA, AtomicWrite, 0, value); !m.OK() {
		return localFrame
	}
	return localDone
}

// ownMiss records a miss in the requester's own memory at byte at of the message.
func (q *QP) ownMiss(s *sendSlot, at uint64, m translate.Miss) localOutcome {
	if m.Fault() {
		m.Len = segmentRest(s.w.SGEs, at, m)
	}
	q.req.localMiss = m
	return localMiss
}

// finishLocalMiss suspends or fails s if the step ended by a miss in the requester's own memory.
func (q *QP) finishLocalMiss(s *sendSlot, res localOutcome) localOutcome {
	if res != localMiss {
		return res
	}
	if !q.req.localMiss.Fault() {
		q.stats.LocalErrors++
		q.failSlot(s, StatusLocProt)
		return localStop
	}
	c := waitGather
	if s.info.kind.returnsData() {
		c = waitResult
	}
	q.requesterWait(c, q.req.nxt, q.req.localMiss)
	return localStop
}

// op returns the operation of the packets that carry a SEND or WRITE.
func (i *wrInfo) op() wire.Operation {
	if i.kind == kindWrite {
		return wire.Write
	}
	return wire.Send
}
