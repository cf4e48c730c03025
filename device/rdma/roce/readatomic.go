package roce

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// READ, atomic, FLUSH and ATOMIC WRITE requests, the requester's part.

// atomicLen is the size of an atomic's operand, bytes.
const atomicLen = 8

// sendReadAtomic sends the request of slot cur from PSN nxt on. max_rd_atomic bounds the requests in flight (IBTA
// 9.7.8.1).
func (q *QP) sendReadAtomic(s *sendSlot) bool {
	end, repeated := q.requestEnd(s)
	full := q.req.readTail-q.req.readHead >= uint32(q.attr.MaxRdAtomic)
	if !repeated && (full || q.partUnknown(s) && q.req.nxt != q.req.una) {
		q.req.blocked = true
		return false
	}
	buf := q.readAtomicFrame(s, end)
	if buf == nil {
		return false
	}
	if !repeated {
		q.req.readEnds[q.req.readTail&uint32(len(q.req.readEnds)-1)] = end
		q.req.readTail++
	}
	q.req.sinceAckReq = 0
	q.advanceNxt(s, end)
	q.transmit(&q.tx, buf)
	return true
}

// readAtomicFrame makes the request of slot s for the responses [nxt, end); nil: there is no buffer, or an operand
// cannot be read, and the requester must stop.
func (q *QP) readAtomicFrame(s *sendSlot, end uint64) *frame.Buf {
	w := &s.w
	t := bth{
		opcode: s.info.ops.only, destQP: q.attr.DestQPN, psn: q.req.nxt,
		ackReq: true, selective: q.cfg.SelectiveRepeat, patience: q.req.patience,
	}
	ext, n := wire.RETHLen, 0
	switch s.info.kind {
	case kindAtomic:
		ext = wire.AtomicLen
	case kindFlush:
		ext = wire.FETHLen + wire.RETHLen
	case kindAtomicWrite:
		n = atomicLen
	}
	buf, hdr, data := q.newFrame(&q.tx, &t, ext, n)
	if buf == nil {
		q.req.stallUntil = q.now + bufferDelay
		return nil
	}
	switch s.info.kind {
	case kindRead:
		off := (q.req.nxt - s.first) * uint64(q.mtu)
		n := min(w.Length-off, (end-q.req.nxt)*uint64(q.mtu))
		r := wire.RETH{VA: uint64(w.RemoteVA) + off, RKey: uint32(w.RKey), Length: uint32(n)}
		r.Encode(hdr)
	case kindFlush:
		r := wire.RETH{VA: uint64(w.RemoteVA), RKey: uint32(w.RKey), Length: w.FlushLen}
		r.Encode(hdr[w.Flush.Encode(hdr):])
	case kindAtomicWrite:
		r := wire.RETH{VA: uint64(w.RemoteVA), RKey: uint32(w.RKey), Length: atomicLen}
		r.Encode(hdr)
		if !q.gather(s, data, 0) {
			buf.Free()
			return nil
		}
	default:
		r := wire.AtomicETH{VA: uint64(w.RemoteVA), RKey: uint32(w.RKey), SwapAdd: w.SwapAdd}
		if w.Opcode == WRCompareSwap {
			r.Compare = w.Compare
		}
		r.Encode(hdr)
	}
	return buf
}

// requestEnd returns the end of the request that starts at nxt: the same as before if it is repeated, else the end of a
// new part.
//
// A repetition is shorter than the original only if the peer has executed the original (selective.go). Otherwise the
// peer would take the shorter request for the original.
func (q *QP) requestEnd(s *sendSlot) (end uint64, repeated bool) {
	if q.req.nxt < q.req.sent {
		for i := q.req.readHead; i != q.req.readTail; i++ {
			if e := q.req.readEnds[i&uint32(len(q.req.readEnds)-1)]; e > q.req.nxt {
				if q.recovery.scoreboard.Active && q.req.nxt < q.recovery.scoreboard.Executed {
					e = q.dueEnd(e)
				}
				return e, true
			}
		}
		return q.req.nxt + 1, false
	}
	if q.partUnknown(s) {
		return q.req.nxt + 1, false
	}
	part := min(readChunk, q.recovery.cwnd.Packets())
	if q.recovery.peerSelective && q.attr.MaxRdAtomic > 1 {
		part = min(readChunk, max(q.recovery.cwnd.Packets()/2, 1)) // the part behind it shows that this one is lost
	}
	return min(s.end, q.req.nxt+part), false
}

// partUnknown reports whether a killed process may have sent a READ at nxt, of a length that is unknown. A peer drops a
// repetition that is longer than the original, and Linux rxe one that begins before an earlier repetition: so there is
// one packet in each request, and one request at a time.
func (q *QP) partUnknown(s *sendSlot) bool {
	return q.req.revived && s.info.kind == kindRead && q.req.nxt < max(q.req.sent, q.req.past)
}

// dueEnd returns the end of the responses from nxt on that are to be sent again, as far as the window allows.
func (q *QP) dueEnd(end uint64) uint64 {
	psn, room := q.req.nxt+1, int64(q.recovery.cwnd.Packets()-q.inFlight())
	for ; psn < end && room > 1 && q.recovery.scoreboard.NeedsRetransmit(psn, q.now); psn++ {
		room--
	}
	return psn
}

// retireReads forgets the READ and atomic requests that were answered in full.
func (r *requester) retireReads() {
	for r.readHead != r.readTail && r.readEnds[r.readHead&uint32(len(r.readEnds)-1)] <= r.una {
		r.readHead++
	}
}
