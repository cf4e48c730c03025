// Side: data

package hca

import (
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Work request decoding. A slot of a work ring stays writable by the guest at
// all times: each byte is copied out once, and only the copy is decoded.
// Fields that the rxe provider leaves stale (iova, state, psn, resid) are
// not read; dma.length serves inline data only, because some releases
// miscompute it for gather lists.

// opAllowed lists the operations of each QP type (IBTA 10.7.2). Other operations
// are not offered in the capabilities and complete with a local QP operation error,
// as does REG_MR on a QP that is not privileged.
var opAllowed = [...]uint64{
	roce.GSI: 1<<abi.WRSend | 1<<abi.WRSendWithImm,
	roce.UD:  1<<abi.WRSend | 1<<abi.WRSendWithImm,
	roce.UC: 1<<abi.WRSend | 1<<abi.WRSendWithImm | 1<<abi.WRRDMAWrite | 1<<abi.WRRDMAWriteWithImm |
		1<<abi.WRBindMW,
	roce.RC: 1<<abi.WRSend | 1<<abi.WRSendWithImm | 1<<abi.WRRDMAWrite | 1<<abi.WRRDMAWriteWithImm |
		1<<abi.WRRDMARead | 1<<abi.WRAtomicCmpAndSwp | 1<<abi.WRAtomicFetchAndAdd |
		1<<abi.WRSendWithInv | 1<<abi.WRLocalInv | 1<<abi.WRBindMW | 1<<abi.WRRegMR | 1<<abi.WRAtomicWrite | 1<<abi.WRFlush,
}

// sendWQESize and recvWQESize are the required sizes of an element.
func sendWQESize(sges, inline int) int {
	return abi.SizeSendWQE + max(sges*abi.SizeSGE, inline)
}

func recvWQESize(sges int) int { return abi.SizeRecvWQE + sges*abi.SizeSGE }

// decodeSend fills w from raw, the fixed part of a slot (abi.SizeSendWQE bytes).
// tail is the number of bytes that follow the fixed part, for decodeTail.
// False: the request is malformed, w.Status has the reason.
func (q *qp) decodeSend(raw []byte, w *roce.WQE) (tail int, ok bool) {
	s := abi.SendWQE(raw)
	op, flags := s.Opcode(), s.Flags()
	w.ID = s.ID()
	w.Signaled = q.sigAll || flags&abi.SendSignaled != 0
	w.Solicited = flags&abi.SendSolicited != 0
	w.Fence = flags&abi.SendFence != 0
	w.Inline = false
	w.Length = 0
	w.Imm = [4]byte{}
	w.Status = roce.StatusLocQPOp
	if op >= 64 || opAllowed[q.typ]&(1<<op) == 0 {
		return 0, false
	}
	w.Opcode = roce.WROpcode(op)
	reads := false // data flows towards the SGEs
	switch op {
	case abi.WRSendWithImm:
		w.Imm = s.Imm()
	case abi.WRSendWithInv:
		w.InvKey = translate.Key(s.InvalidateRKey())
	case abi.WRFlush:
		rkey, placement, selectivity := s.Flush()
		w.RemoteVA, w.RKey, w.FlushLen = translate.VA(s.RemoteAddr()), translate.Key(rkey), s.DMALength()
		w.Flush = wire.FETH{Placement: placement, Selectivity: selectivity}
		return 0, placement <= abi.FlushGlobal|abi.FlushPersistent && selectivity <= abi.FlushMR
	case abi.WRLocalInv, abi.WRBindMW, abi.WRRegMR:
		return 0, q.decodeManage(s, &w.Manage)
	case abi.WRRDMAWrite, abi.WRRDMAWriteWithImm, abi.WRRDMARead, abi.WRAtomicWrite:
		w.Imm = s.Imm()
		w.RemoteVA, w.RKey = translate.VA(s.RemoteAddr()), translate.Key(s.RKey())
		reads = op == abi.WRRDMARead
	case abi.WRAtomicCmpAndSwp, abi.WRAtomicFetchAndAdd:
		w.RemoteVA, w.RKey = translate.VA(s.RemoteAddr()), translate.Key(s.AtomicRKey())
		w.Compare, w.SwapAdd = s.CompareAdd(), s.Swap()
		if op == abi.WRAtomicFetchAndAdd {
			w.SwapAdd = s.CompareAdd()
		}
		reads = true
	}
	if q.typ == roce.UD || q.typ == roce.GSI {
		w.RemoteQPN, w.QKey = s.RemoteQPN(), s.QKey()
		if w.RemoteQPN > 0xffffff {
			return 0, false
		}
	}
	n, nsge := s.DMALength(), s.NumSGE()
	// The builder verbs (ibv_wr_set_inline_data) of the rxe provider leave the flag
	// to the application; a length without SGEs is inline data too.
	if flags&abi.SendInline != 0 || nsge == 0 && n > 0 && !reads {
		if reads {
			return 0, false
		}
		if n > uint32(q.maxInline) {
			w.Status = roce.StatusLocLen
			return 0, false
		}
		w.Inline = true
		return int(n), true
	}
	if nsge > uint32(q.maxSendSGE) {
		return 0, false
	}
	return int(nsge) * abi.SizeSGE, true
}

// decodeManage decodes a memory management request; it has no data.
func (q *qp) decodeManage(s abi.SendWQE, m *roce.Manage) bool {
	switch s.Opcode() {
	case abi.WRLocalInv:
		*m = roce.Manage{Key: translate.Key(s.InvalidateRKey())}
	case abi.WRBindMW:
		addr, length, region, old, key, access := s.MW()
		*m = roce.Manage{
			Key: translate.Key(old), NewKey: translate.Key(key), Region: translate.Key(region),
			Access: translate.Access(access), VA: translate.VA(addr), Length: length,
		}
	case abi.WRRegMR:
		var r abi.RegWR
		// RA-2: page lists are physical addresses.
		if !q.privileged || r.Decode(s[abi.SendWQERegOff:]) != nil {
			return false
		}
		*m = roce.Manage{
			Key: translate.Key(r.RKey), Access: translate.Access(r.Access), VA: translate.VA(r.IOVA), Length: r.Length,
			List: translate.PA(r.PageList), NPages: r.NPages, Offset: r.Offset, PageShift: r.PageShift,
		}
	}
	return true
}

// decodeTail fills w's segments or inline data from the bytes behind the fixed part.
func decodeTail(tail []byte, w *roce.WQE) {
	if w.Inline {
		w.SGEs = w.SGEs[:0]
		w.InlineData = append(w.InlineData[:0], tail...)
		w.Length = uint64(len(tail))
		return
	}
	w.InlineData = w.InlineData[:0]
	w.SGEs, w.Length = decodeSGEs(tail, w.SGEs[:0])
}

// decodeSGEs appends the segments in b to sg, except those of length zero: nothing is
// accessed there, so their keys do not matter. It returns the sum of the lengths, which cannot overflow.
func decodeSGEs(b []byte, sg []roce.SGE) ([]roce.SGE, uint64) {
	total := uint64(0)
	for ; len(b) >= abi.SizeSGE; b = b[abi.SizeSGE:] {
		e := abi.SGE{Addr: le.Uint64(b), Length: le.Uint32(b[8:]), LKey: le.Uint32(b[12:])}
		if e.Length == 0 {
			continue
		}
		sg = append(sg, roce.SGE{VA: translate.VA(e.Addr), Length: e.Length, Key: translate.Key(e.LKey)})
		total += uint64(e.Length)
	}
	return sg, total
}

// fetchSend copies in and decodes the element at sq.next.
func (q *qp) fetchSend(w *roce.WQE) roce.Fetch {
	at := q.sq.at(q.sq.next)
	raw := q.scratch[:abi.SizeSendWQE]
	if m := q.sq.mem.Read(raw, at); !m.OK() {
		return q.ringMiss(roce.Requester, "send queue", m)
	}
	tail, ok := q.decodeSend(raw, w)
	if !ok {
		q.sq.consume()
		return roce.FetchBad
	}
	if q.typ == roce.UD || q.typ == roce.GSI {
		m, ok := q.dev.lookup(abi.SendWQE(raw).AHNum(), uint32(q.pd), &q.ah, &w.AV)
		switch {
		case m.Fault():
			return q.ringFault(roce.Requester, m)
		case !ok:
			w.Status = roce.StatusLocQPOp
			q.sq.consume()
			return roce.FetchBad
		}
	}
	b := q.scratch[:tail]
	if tail > 0 {
		if m := q.sq.mem.Read(b, at+abi.SendWQESGEOff); !m.OK() {
			return q.ringMiss(roce.Requester, "send queue", m)
		}
	}
	decodeTail(b, w)
	w.Status = roce.StatusSuccess
	q.sq.consume()
	return roce.FetchReady
}

// decodeRecv fills w from the fixed part of a receive request and returns how many
// bytes of SGEs follow. False: malformed.
func decodeRecv(raw []byte, maxSGE int, w *roce.RecvWQE) (tail int, ok bool) {
	r := abi.RecvWQE(raw)
	w.ID, w.Length, w.SGEs = r.ID(), 0, w.SGEs[:0]
	n := r.NumSGE()
	if n > uint32(maxSGE) {
		w.Status = roce.StatusLocQPOp
		return 0, false
	}
	return int(n) * abi.SizeSGE, true
}

// fetchRecv fetches the element at wr.next of a receive ring: it copies the element in and
// returns it to the guest at once, valid or not. On a miss nothing has changed:
// the page of the consumer index is checked before the element is fetched. later: the caller publishes that index.
func fetchRecv(wr *workRing, scratch []byte, maxSGE int, w *roce.RecvWQE, later bool) (roce.Fetch, translate.Miss) {
	cons, m := wr.mem.Uint32(abi.RingConsumerOff)
	if !m.OK() {
		return roce.FetchFault, m
	}
	at := wr.at(wr.next)
	raw := scratch[:abi.SizeRecvWQE]
	if m := wr.mem.Read(raw, at); !m.OK() {
		return roce.FetchFault, m
	}
	res := roce.FetchReady
	w.Status = roce.StatusSuccess
	tail, ok := decodeRecv(raw, maxSGE, w)
	if !ok {
		res = roce.FetchBad
	} else if tail > 0 {
		b := scratch[:tail]
		if m := wr.mem.Read(b, at+abi.RecvWQESGEOff); !m.OK() {
			return roce.FetchFault, m
		}
		w.SGEs, w.Length = decodeSGEs(b, w.SGEs)
	}
	wr.consume()
	wr.release()
	if !later {
		cons.Store(wr.done)
		wr.stale = false
	}
	return res, translate.Miss{}
}
