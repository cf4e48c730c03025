package roce

import (
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// responder is the part of a QP that executes the peer's requests (IBTA 9.7.4, 9.7.5). Requests execute on arrival and
// their responses are recorded. Run sends the responses: READ data and atomic results in PSN order, then one
// acknowledgement for everything that arrived since the last. So acknowledgements coalesce per batch, and never
// overtake a READ response before them, which would look like a loss to the requester.
type responder struct {
	epsn uint64 // expected PSN
	msn  uint32 // message sequence number

	// The message in progress.
	op          wire.Operation // Send, Write, or 0 between messages
	off         uint64         // bytes placed
	va          translate.VA
	rkey        translate.Key
	length      uint64  // announced by RETH
	recv        RecvWQE // the receive WQE in use
	haveRecv    bool
	dropMessage bool // UC: the rest of this message is ignored

	resources []resource // ring of depth, see resource
	depth     int        // max_dest_rd_atomic
	accepted  uint64     // READs and atomics accepted so far
	pending   int        // resources with responses to send

	emptyDue      psnSet        // FLUSHes and ATOMIC WRITEs whose responses are due
	repeatsDue    psnSet        // READ responses to send again, each alone
	peerSelective bool          // the sender of the newest request understands selective acknowledgements
	patience      wire.Patience // of the newest request

	ackPending bool
	// ackPSN is the newest SEND or WRITE packet executed. An ACK must never name the PSN of a READ or atomic: some
	// requesters would complete the READ by it.
	ackPSN  uint64
	nak     wire.Syndrome // to be sent; 0: none; may be nakFault
	nakSent bool          // packets ahead of epsn are dropped without an answer (IBTA 9.7.5.2.4)
	missing uint64        // end of the PSNs that were dropped in silence because of an absent page (suspend.go)
	fatal   failure
	stored  uint64 // the previous process has stored the data of WRITEs before this PSN

	rnrRead uint64 // PSN at which the waiting READ was requested again: an answer is due; 0: none
	waitDue bool   // a report is due that the request at epsn waits for a page

	atomic struct { // the newest atomic request, executed once its page is present
		op               wire.Operation
		va               translate.VA
		key              translate.Key
		compare, swapAdd uint64
	}

	reorder requestQueue // requests ahead of epsn, and the one at epsn that waits for a page
	cnpDue  bool         // marked packets have arrived
	cnpAt   int64        // no CNP before

	stallUntil int64 // no buffer: try again then; 0: not stalled
	cqe        Completion
	grh        [40]byte // UD: the GRH area, before it is copied to memory
}

// resource is a responder resource: a READ or atomic that is remembered, so that a duplicate can be answered again
// (IBTA 9.7.5.1.2-3).
type resource struct {
	first, end uint64 // PSNs of the whole request
	// The responses being sent are [start, stop); next is the next of them.
	start, next, stop uint64
	sentEnd           uint64 // end of the responses that were ever sent
	va                translate.VA
	key               translate.Key
	length            uint64
	value             uint64
	op                wire.Operation
	behindSend        bool // the PSN before first is that of a SEND or WRITE, and may be acknowledged while this waits
	ackDue            bool // ... which is to be done
	pending           bool
}

// failure is an error that ends the connection once its NAK has been sent.
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
	vNoRoom            // no room to record an empty response
	vForbidden         // UD: the VM's attribute forbids the device to write the datagram (PF-3)
)

// reset returns to the state of a new QP and keeps the storage.
func (r *responder) reset(link Link) {
	r.reorder.drop(link)
	*r = responder{recv: RecvWQE{SGEs: r.recv.SGEs[:0]}, reorder: r.reorder}
	r.start(0)
}

// maxStored is more packets than a QP stores between two commits.
const maxStored = 1 << 16

// Revived says that q continues what a killed process has left. stored: that process had stored the data of WRITEs
// before this PSN, as it told the adapter (Memory.Stored); what is not plausible has no effect. It may also have sent
// any response since its last commit, whose receiver goes on at once, and any request. So no request before a READ is
// acknowledged while that READ waits (see acknowledgeBy).
func (q *QP) Revived(stored uint64) {
	if q.typ != RC { // others repeat nothing
		return
	}
	if stored > q.resp.epsn && stored-q.resp.epsn <= maxStored {
		q.resp.stored = stored
	}
	q.req.revived = true
	for i := range q.resp.resources {
		r := &q.resp.resources[i]
		r.sentEnd = r.end
		r.behindSend, r.ackDue = false, false
	}
}

// StoredBefore returns what Revived has set, 0 if that does not matter any more.
func (q *QP) StoredBefore() uint64 {
	if q.resp.stored <= q.resp.epsn {
		return 0
	}
	return q.resp.stored
}

// Expected returns the PSN that the responder expects, extended to 64 bits: it never returns to an earlier value.
func (q *QP) Expected() uint64 { return q.resp.epsn }

// start sets the first expected PSN.
func (r *responder) start(psn uint32) {
	r.epsn = psnBase + uint64(psn)
	r.ackPSN = r.epsn - 1
}

// resizeResources sets how many READs and atomics are remembered. It keeps the newest: SQD, where the number may
// change, does not stop the responder.
func (r *responder) resizeResources(n int) {
	if n == r.depth {
		return
	}
	old, known := r.resources, min(r.accepted, uint64(r.depth), uint64(n))
	r.resources, r.depth, r.pending = nil, n, 0
	if old == nil {
		return
	}
	for i := uint64(1); i <= known; i++ {
		a := old[(r.accepted-i)%uint64(len(old))]
		*r.resource(r.accepted - i) = a
		if a.pending {
			r.pending++
		}
	}
}

// resource returns the place of READ or atomic n, counted from 0, if depth is not 0. The ring is made when it is used
// for the first time.
func (r *responder) resource(n uint64) *resource {
	if r.resources == nil {
		r.resources = make([]resource, r.depth)
	}
	return &r.resources[n%uint64(r.depth)]
}

// dropResponses discards all responses that are due, and the queued requests.
func (r *responder) dropResponses(link Link) {
	for i := range r.resources {
		r.resources[i].pending = false
	}
	r.pending = 0
	r.ackPending, r.nak = false, 0
	r.rnrRead, r.missing, r.waitDue = 0, 0, false
	r.fatal = failure{}
	r.emptyDue, r.repeatsDue = psnSet{}, psnSet{}
	r.cnpDue = false
	r.reorder.drop(link)
}

func (q *QP) receiveRC(p *wire.RoCE) {
	if p.Info.Is(wire.Response) {
		q.receiveResponse(p)
		return
	}
	if q.resp.fatal.syndrome != 0 {
		q.stats.RxDropped++
		return
	}
	q.resp.peerSelective, q.resp.patience = p.BTH.Selective && q.cfg.SelectiveRepeat, p.BTH.Patience
	psn := extend(q.resp.epsn, p.BTH.PSN)
	switch {
	case psn > q.resp.epsn:
		q.stats.OutOfSequence++
		if !q.queueRequest(p, psn) && !q.resp.nakSent {
			q.refuseAhead(psn)
		}
		return
	case psn < q.resp.epsn:
		q.stats.Duplicates++
		q.handleDuplicate(p, psn)
		if q.resp.reorder.expiresAt != 0 {
			q.executeQueuedRequests(false)
		}
		return
	}
	if q.resp.reorder.expiresAt != 0 {
		q.receiveBeforeQueue(p)
		return
	}
	q.executeRequest(p)
}

// executeRequest executes p, the request with the expected PSN.
func (q *QP) executeRequest(p *wire.RoCE) {
	switch p.Info.Op {
	case wire.ReadRequest:
		q.applyVerdict(q.acceptRead(p))
	case wire.Flush:
		q.applyVerdict(q.acceptFlush(p))
	case wire.CompareSwap, wire.FetchAdd, wire.AtomicWrite:
		q.applyVerdict(q.acceptAtomic(p))
	default:
		v := q.executeSendWrite(p)
		if v == vOK {
			q.resp.ackPSN = q.resp.epsn
			// This releases a queued frame: from here on only the decoded headers of p are valid.
			q.advanceEPSN(q.resp.epsn + 1)
			if p.Info.Is(wire.Last) {
				q.resp.msn++
			}
			if p.BTH.AckReq {
				q.resp.ackPending = true
				q.wake()
			}
		}
		q.applyVerdict(v)
	}
}

// advanceEPSN makes psn the expected PSN.
func (q *QP) advanceEPSN(psn uint64) {
	if q.resp.reorder.expiresAt != 0 {
		q.resp.reorder.advance(q.resp.epsn, psn-q.resp.epsn, q.now, q.link)
	}
	q.resp.epsn = psn
	q.resp.nakSent, q.resp.nak = false, 0
	if q.faults.request.cause != waitNone {
		q.faults.request.clear()
		q.resp.waitDue = false
	}
}

// applyVerdict records the NAK that verdict v calls for (IBTA 9.9.3, table 60).
func (q *QP) applyVerdict(v verdict) {
	switch v {
	case vOK, vParked:
		return
	case vFault:
		q.suspendRequest()
		return
	case vNotReady:
		q.resp.nak, q.resp.nakSent = wire.SyndromeRNR|wire.Syndrome(q.attr.MinRNRTimer&0x1f), true
	case vInvReq:
		q.resp.fatal = failure{syndrome: wire.NAKInvalidRequest, status: StatusRemInvReq, event: EventReqErr}
	case vRemAccess:
		q.stats.AccessErrors++
		q.resp.fatal = failure{syndrome: wire.NAKRemoteAccess, status: StatusRemAccess, event: EventAccessErr}
	case vImmAccess: // 11.6.2, "Local Access Error"
		q.stats.AccessErrors++
		q.resp.fatal = failure{syndrome: wire.NAKRemoteAccess, status: StatusLocAccess, event: EventAccessErr}
	case vNoRoom: // as if it had been lost: when it is repeated, the responses before it have been sent
		q.resp.nak, q.resp.nakSent = wire.NAKSequence, true
	case vRecvShort:
		q.resp.fatal = failure{syndrome: wire.NAKInvalidRequest, status: StatusLocLen}
	case vRecvProt:
		q.resp.fatal = failure{syndrome: wire.NAKRemoteOp, status: StatusLocProt}
	case vRecvBad:
		q.resp.fatal = failure{syndrome: wire.NAKRemoteOp, status: q.resp.recv.Status}
	}
	if q.resp.fatal.syndrome != 0 {
		q.resp.fatal.psn = q.resp.epsn
	}
	q.resp.reorder.drop(q.link)
	q.wake()
}

// executeSendWrite executes a SEND or WRITE packet that is in sequence, RC or UC. Unless the verdict is vOK, a
// repetition of the packet finds the state unchanged.
func (q *QP) executeSendWrite(p *wire.RoCE) verdict {
	n := uint64(len(p.Payload))
	first, last := p.Info.Is(wire.First), p.Info.Is(wire.Last)
	// Opcode sequence (IBTA 9.7.4.1.2) and packet length (9.7.4.1.6).
	if first && q.resp.op != 0 || !first && q.resp.op != p.Info.Op {
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
		switch q.memory.InvalidateRemote(translate.Key(p.InvKey())) {
		case translate.Refused:
			return vRemAccess
		case translate.Again:
			return vParked
		}
	}
	if !last {
		q.resp.op = p.Info.Op
		q.resp.off += n
		return vOK
	}
	if p.Info.Op == wire.Send || p.Info.Is(wire.HasImm) {
		q.completeRecv(p, q.resp.off+n)
	}
	q.resp.op, q.resp.off = 0, 0
	return vOK
}

// executeSend copies the payload to the receive buffers. The first packet fetches a receive WQE.
func (q *QP) executeSend(p *wire.RoCE, n uint64) verdict {
	if v := q.ensureRecv(); v != vOK {
		return v
	}
	if q.resp.off+n > q.resp.recv.Length {
		q.stats.LocalErrors++
		return vRecvShort
	}
	if n == 0 {
		return vOK
	}
	want := q.resp.recv.Length
	if p.Info.Is(wire.Last) {
		want = n
	}
	return q.scatterRecv(q.resp.off, p.Payload, want)
}

// scatterRecv copies data to the receive WQE's segments, from byte off on. If memory is absent, it raises a fault for
// up to want bytes.
func (q *QP) scatterRecv(off uint64, data []byte, want uint64) verdict {
	m := q.memory.Scatter(q.resp.recv.SGEs, off, data)
	if m.OK() {
		return vOK
	}
	if m.Fault() {
		m.Len = min(segmentRest(q.resp.recv.SGEs, off, m), want)
		q.waitFor(Responder, &q.faults.request, waitRecv, q.resp.epsn, m)
		return vFault
	}
	if m.Kind == translate.Blocked && q.typ.class() == classUD {
		return vForbidden
	}
	q.stats.LocalErrors++
	return vRecvProt
}

// ensureRecv fetches a receive WQE if none is in use.
func (q *QP) ensureRecv() verdict {
	if q.resp.haveRecv {
		if q.resp.recv.Status != StatusSuccess {
			return vRecvBad
		}
		return vOK
	}
	q.resp.recv = RecvWQE{SGEs: q.resp.recv.SGEs[:0]}
	switch q.queues.FetchRecv(&q.resp.recv) {
	case FetchReady:
		q.resp.haveRecv = true
		return vOK
	case FetchBad:
		if q.resp.recv.Status == StatusSuccess {
			q.resp.recv.Status = StatusLocQPOp
		}
		q.resp.haveRecv = true
		return vRecvBad
	case FetchFault:
		q.waitForQueue(Responder)
		return vFault
	}
	return vNotReady
}

// executeWrite writes the payload of a WRITE packet to memory.
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
			if m := q.memory.CheckRemote(key, va, length, translate.RemoteWrite); !m.OK() {
				return q.writeRefused()
			}
		}
		q.resp.va, q.resp.rkey, q.resp.length, q.resp.off = va, key, length, 0
	}
	left := q.resp.length - q.resp.off
	if last && n != left || !last && n >= left {
		return vInvReq
	}
	if p.Info.Is(wire.HasImm) {
		// Before the data, so that an RNR NAK leaves nothing to undo.
		if v := q.ensureRecv(); v != vOK {
			return v
		}
	}
	switch {
	case n == 0:
	case q.resp.epsn < q.resp.stored: // a repetition
		at := q.resp.va + translate.VA(q.resp.off)
		if m := q.memory.CheckRemote(q.resp.rkey, at, n, translate.RemoteWrite); !m.OK() {
			return q.writeRefused()
		}
	default:
		if m := q.memory.WriteRemote(q.resp.rkey, q.resp.va+translate.VA(q.resp.off), p.Payload); !m.OK() {
			if !m.Fault() {
				return q.writeRefused()
			}
			m.Len = rangeRest(q.resp.va, q.resp.length, m)
			q.waitFor(Responder, &q.faults.request, waitWrite, q.resp.epsn, m) // PF-8
			return vFault
		}
		if q.typ == RC {
			q.memory.Stored(q.resp.epsn + 1)
		}
	}
	return vOK
}

// writeRefused returns the verdict on a WRITE that violates its R_Key's limits.
func (q *QP) writeRefused() verdict {
	if q.resp.haveRecv {
		return vImmAccess
	}
	return vRemAccess
}

// completeRecv completes the receive in use with p, the last packet of its message.
func (q *QP) completeRecv(p *wire.RoCE, n uint64) {
	c := &q.resp.cqe
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

// finishRecv completes the receive in use with r.cqe, and ends a wait for its memory.
func (q *QP) finishRecv() {
	q.resp.haveRecv = false
	if q.faults.request.cause == waitRecv {
		q.faults.request.clear()
	}
	q.queues.CompleteRecv(&q.resp.recv, &q.resp.cqe)
}

// failRecv completes the receive in use, if any, with an error.
func (q *QP) failRecv(st Status) {
	if !q.resp.haveRecv {
		return
	}
	q.resp.cqe = Completion{Status: st, Opcode: WCRecv, VLAN: NoVLAN}
	q.finishRecv()
}
