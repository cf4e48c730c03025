package roce

import (
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// The responder (IBTA 9.7.4, 9.7.5). Requests execute on arrival; what is to be
// answered is noted, and Run sends it: READ responses and atomic results in PSN
// order, then one acknowledgement for all that came meanwhile. So acknowledgements
// coalesce per batch, and never overtake a READ response before them, which the
// requester would take for a loss.
type responder struct {
	epsn uint64 // expected PSN
	msn  uint32

	// The message in progress.
	msg     wire.Operation // Send, Write or 0: between messages
	off     uint64         // bytes placed
	va      translate.VA
	rkey    translate.Key
	length  uint64  // announced by RETH
	wqe     RecvWQE // the receive in use
	haveWQE bool
	dropMsg bool // UC: the rest of this message is ignored

	memory   []answer // ring of max_dest_rd_atomic
	answered uint64   // READs and atomics accepted so far
	pending  int      // answers with something to send

	owed      owedSet // empty answers
	repeats   owedSet // responses of READs to be sent again, each alone
	selective bool    // the newest request's sender understands that

	ackPending bool
	ackPSN     uint64 // newest SEND or WRITE packet executed: an ACK must never
	// name the PSN of a READ or atomic, which some requesters would complete by it
	nak     wire.Syndrome // to send, 0: none; may be nakFault
	nakSent bool          // everything ahead of epsn is dropped in silence (IBTA 9.7.5.2.4)
	fatal   failure

	rnrRead uint64 // where the READ that waits was asked for again: RNR NAK is due; 0: none

	atomic struct { // the newest request, to be executed once its page is there
		op               wire.Operation
		va               translate.VA
		key              translate.Key
		compare, swapAdd uint64
	}

	ahead  ahead
	cnpDue bool  // marked packets came
	cnpAt  int64 // not before

	respStallAt int64 // no buffer
	rcomp       Completion
	grh         [40]byte // UD: on its way to memory
}

// answer is a READ or atomic, remembered so that a duplicate can be answered
// again (IBTA 9.7.5.1.2-3).
type answer struct {
	first, end uint64 // PSNs of the whole request
	// The response being sent: next of the request for [start, stop).
	start, next, stop uint64
	sent              uint64 // how far responses have ever been sent
	va                translate.VA
	key               translate.Key
	length            uint64
	value             uint64
	op                wire.Operation
	behindSend        bool // the PSN before first is a SEND's or WRITE's
	owes              bool // ... and is to be acknowledged if this has to wait
	pending           bool
}

// failure ends the responder once its NAK is out.
type failure struct {
	syndrome wire.Syndrome // 0: none
	status   Status
	event    EventKind
	psn      uint64
}

// verdict is the outcome of executing a request packet.
type verdict uint8

const (
	vOK        verdict = iota
	vNotReady          // no receive WQE
	vFault             // absent memory
	vParked            // absent memory, but the request was kept
	vInvReq            // malformed or not permitted on this QP
	vRemAccess         // R_Key violation
	vRecvShort         // the receive WQE is too small
	vRecvProt          // the receive WQE's segments are not accessible
	vRecvBad           // the receive WQE is malformed; its Status says how
	vImmAccess         // R_Key violation with the receive WQE of immediate data taken
	vCrowded           // no room to note an empty answer
)

func (q *QP) resetResponder() {
	q.dropAhead()
	q.responder = responder{wqe: RecvWQE{SGEs: q.wqe.SGEs[:0]}, ahead: q.ahead}
	q.startResponder(0)
}

func (q *QP) startResponder(psn uint32) {
	q.epsn = psnBase + uint64(psn)
	q.ackPSN = q.epsn - 1
}

// resizeResources sets how many READs and atomics are remembered. The newest of
// those known are kept: SQD, where this may change, does not stop the responder.
func (q *QP) resizeResources(n int) {
	if n == len(q.memory) {
		return
	}
	old := q.memory
	q.memory = make([]answer, n)
	q.pending = 0
	known := min(q.answered, uint64(len(old)), uint64(n))
	for i := uint64(1); i <= known; i++ {
		r := old[(q.answered-i)%uint64(len(old))]
		q.memory[(q.answered-i)%uint64(n)] = r
		if r.pending {
			q.pending++
		}
	}
}

// respClear drops all that was to be sent.
func (q *QP) respClear() {
	for i := range q.memory {
		q.memory[i].pending = false
	}
	q.pending = 0
	q.ackPending, q.nak = false, 0
	q.rnrRead = 0
	q.fatal = failure{}
	q.owed, q.repeats = owedSet{}, owedSet{}
	q.cnpDue = false
	q.dropAhead()
}

func (q *QP) receiveRC(p *wire.RoCE) {
	if p.Info.Is(wire.Response) {
		q.receiveResponse(p)
		return
	}
	if q.fatal.syndrome != 0 {
		q.stats.RxDropped++
		return
	}
	q.selective = p.BTH.Selective && !q.cfg.GoBackN
	psn := extend(q.epsn, p.BTH.PSN)
	switch {
	case psn > q.epsn:
		q.stats.OutOfSequence++
		if !q.keepAhead(p, psn) && !q.nakSent {
			q.dropAhead()
			q.nakSent, q.nak = true, wire.NAKSequence
			if q.waits.request.cause == atAtomic {
				q.nak = nakFault // nothing was lost
			}
			q.wake()
		}
		return
	case psn < q.epsn:
		q.stats.Duplicates++
		q.duplicate(p, psn)
		if q.ahead.untilAt != 0 {
			q.catchUp()
		}
		return
	}
	q.request(p)
	if q.ahead.untilAt != 0 {
		q.catchUp()
	}
}

// request executes the request that is expected.
func (q *QP) request(p *wire.RoCE) {
	switch p.Info.Op {
	case wire.ReadRequest:
		q.verdictRC(q.acceptRead(p))
	case wire.Flush:
		q.verdictRC(q.acceptFlush(p))
	case wire.CompareSwap, wire.FetchAdd, wire.AtomicWrite:
		q.verdictRC(q.acceptAtomic(p))
	default:
		v := q.execute(p)
		if v == vOK {
			q.ackPSN = q.epsn
			q.advance(q.epsn + 1) // which gives a kept frame back: from here on p is no more than its copied headers
			if p.Info.Is(wire.Last) {
				q.msn++
			}
			if p.BTH.AckReq {
				q.ackPending = true
				q.wake()
			}
		}
		q.verdictRC(v)
	}
}

// advance makes psn the next to be expected.
func (q *QP) advance(psn uint64) {
	if q.ahead.untilAt != 0 {
		q.passed(psn - q.epsn)
	}
	q.epsn = psn
	q.nakSent, q.nak = false, 0
	if q.waits.request.cause != atNothing {
		q.waits.request.end()
	}
}

// verdictRC turns a failure into its NAK (IBTA 9.9.3, table 60).
func (q *QP) verdictRC(v verdict) {
	switch v {
	case vOK, vParked:
		return
	case vFault:
		q.stats.FaultDrops++
		q.nak, q.nakSent = nakFault, true
	case vNotReady:
		q.nak, q.nakSent = wire.SyndromeRNR|wire.Syndrome(q.attr.MinRNRTimer&0x1f), true
	case vInvReq:
		q.fatal = failure{syndrome: wire.NAKInvalidRequest, status: StatusRemInvReq, event: EventReqErr}
	case vRemAccess:
		q.stats.AccessErrors++
		q.fatal = failure{syndrome: wire.NAKRemoteAccess, status: StatusRemAccess, event: EventAccessErr}
	case vImmAccess: // 11.6.2, "Local Access Error"
		q.stats.AccessErrors++
		q.fatal = failure{syndrome: wire.NAKRemoteAccess, status: StatusLocAccess, event: EventAccessErr}
	case vCrowded: // as if it had been lost: when its sender repeats it, the answers before it are out
		q.nak, q.nakSent = wire.NAKSequence, true
	case vRecvShort:
		q.fatal = failure{syndrome: wire.NAKInvalidRequest, status: StatusLocLen}
	case vRecvProt:
		q.fatal = failure{syndrome: wire.NAKRemoteOp, status: StatusLocProt}
	case vRecvBad:
		q.fatal = failure{syndrome: wire.NAKRemoteOp, status: q.wqe.Status}
	}
	if q.fatal.syndrome != 0 {
		q.fatal.psn = q.epsn
	}
	q.dropAhead()
	q.wake()
}

// execute carries out a SEND or WRITE packet that is in sequence, RC or UC. On
// any verdict but vOK nothing has changed that a repetition of the packet would
// not find as it was.
func (q *QP) execute(p *wire.RoCE) verdict {
	n := uint64(len(p.Payload))
	first, last := p.Info.Is(wire.First), p.Info.Is(wire.Last)
	// Opcode sequence (IBTA 9.7.4.1.2) and packet length (9.7.4.1.6).
	if first && q.msg != 0 || !first && q.msg != p.Info.Op {
		return vInvReq
	}
	if n > uint64(q.mtu) || !last && n != uint64(q.mtu) || last && !first && n == 0 {
		return vInvReq
	}
	if p.Info.Op == wire.Write {
		if v := q.executeWrite(p, n); v != vOK {
			return v
		}
	} else if v := q.executeSend(p, n); v != vOK {
		return v
	}
	if p.Info.Is(wire.HasIETH) {
		switch q.a.InvalidateRemote(translate.Key(p.InvKey())) {
		case translate.Refused:
			return vRemAccess
		case translate.Again:
			return vParked
		}
	}
	if !last {
		q.msg = p.Info.Op
		q.off += n
		return vOK
	}
	if p.Info.Op == wire.Send || p.Info.Is(wire.HasImm) {
		q.completeRecv(p, q.off+n)
	}
	q.msg, q.off = 0, 0
	return vOK
}

// executeSend places payload in the receive buffers, taking a receive WQE for
// the first packet.
func (q *QP) executeSend(p *wire.RoCE, n uint64) verdict {
	if v := q.takeRecv(); v != vOK {
		return v
	}
	if q.off+n > q.wqe.Length {
		q.stats.LocalErrors++
		return vRecvShort
	}
	if n == 0 {
		return vOK
	}
	want := q.wqe.Length
	if p.Info.Is(wire.Last) {
		want = n
	}
	return q.place(q.off, p.Payload, want)
}

// place copies data into the receive WQE's segments. If it is absent, up to want
// bytes from there on are asked for.
func (q *QP) place(off uint64, data []byte, want uint64) verdict {
	m := q.a.Scatter(q.wqe.SGEs, off, data)
	if m.OK() {
		return vOK
	}
	if m.Fault() {
		m.Len = min(segmentRest(q.wqe.SGEs, off, m), want)
		q.await(Responder, &q.waits.request, atRecv, q.epsn, m)
		return vFault
	}
	q.stats.LocalErrors++
	return vRecvProt
}

// takeRecv makes sure that a receive WQE is at hand.
func (q *QP) takeRecv() verdict {
	if q.haveWQE {
		if q.wqe.Status != StatusSuccess {
			return vRecvBad
		}
		return vOK
	}
	q.wqe = RecvWQE{SGEs: q.wqe.SGEs[:0]}
	switch q.a.FetchRecv(&q.wqe) {
	case FetchReady:
		q.haveWQE = true
		return vOK
	case FetchBad:
		if q.wqe.Status == StatusSuccess {
			q.wqe.Status = StatusLocQPOp
		}
		q.haveWQE = true
		return vRecvBad
	case FetchFault:
		q.awaitQueue(Responder)
		return vFault
	}
	return vNotReady
}

func (q *QP) executeWrite(p *wire.RoCE, n uint64) verdict {
	last := p.Info.Is(wire.Last)
	if p.Info.Is(wire.First) {
		if q.attr.Access&translate.RemoteWrite == 0 {
			return vInvReq
		}
		r := p.RETH()
		va, key, length := translate.VA(r.VA), translate.Key(r.RKey), uint64(r.Length)
		if length > maxMessage || last && length != n || !last && length <= n {
			return vInvReq
		}
		if length > 0 { // a zero-length WRITE names no memory (IBTA 9.7.4.1.5)
			if m := q.a.CheckRemote(key, va, length, translate.RemoteWrite); !m.OK() {
				return q.writeRefused()
			}
		}
		q.va, q.rkey, q.length, q.off = va, key, length, 0
	}
	left := q.length - q.off
	if last && n != left || !last && n >= left {
		return vInvReq
	}
	if p.Info.Is(wire.HasImm) {
		// Before the data: a repetition after RNR must not have to undo anything.
		if v := q.takeRecv(); v != vOK {
			return v
		}
	}
	if n > 0 {
		if m := q.a.WriteRemote(q.rkey, q.va+translate.VA(q.off), p.Payload); !m.OK() {
			if !m.Fault() {
				return q.writeRefused()
			}
			m.Len = rangeRest(q.va, q.length, m)
			q.await(Responder, &q.waits.request, atWrite, q.epsn, m) // PF-8
			return vFault
		}
	}
	return vOK
}

// writeRefused is the verdict on a WRITE that violates its R_Key's limits.
func (q *QP) writeRefused() verdict {
	if q.haveWQE {
		return vImmAccess
	}
	return vRemAccess
}

// completeRecv finishes the receive in use with the packet that ends it.
func (q *QP) completeRecv(p *wire.RoCE, n uint64) {
	c := &q.rcomp
	*c = Completion{Opcode: WCRecv, ByteLen: uint32(n), SrcQP: q.attr.DestQPN, Solicited: p.BTH.Solicited, VLAN: NoVLAN}
	if p.Info.Op == wire.Write {
		c.Opcode = WCRecvWithImm
	}
	if p.Info.Is(wire.HasImm) {
		c.Flags |= FlagImm
		c.Imm = p.Imm()
	}
	if p.Info.Is(wire.HasIETH) {
		c.Flags |= FlagInv
		c.InvKey = translate.Key(p.InvKey())
	}
	q.finishRecv()
}

// finishRecv completes the receive in use with rcomp. What waited for its memory
// waits no more.
func (q *QP) finishRecv() {
	q.haveWQE = false
	if q.waits.request.cause == atRecv {
		q.waits.request.end()
	}
	q.a.CompleteRecv(&q.wqe, &q.rcomp)
}

// failRecv completes the receive in use, if any, with an error.
func (q *QP) failRecv(st Status) {
	if !q.haveWQE {
		return
	}
	q.rcomp = Completion{Status: st, Opcode: WCRecv, VLAN: NoVLAN}
	q.finishRecv()
}
