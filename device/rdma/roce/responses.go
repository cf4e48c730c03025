package roce

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// READs and atomics at the responder, and the sending of all responses.

// newResource returns the resource for the next READ or atomic; nil if that resource still has responses to send for
// the first time: the requester has more than max_dest_rd_atomic requests in flight. If it is only being repeated, for
// a duplicate, the repetition is dropped: a requester that respects the limit sends a new request only after earlier
// responses have arrived.
func (r *responder) newResource() *resource {
	if r.depth == 0 {
		return nil
	}
	a := r.resource(r.accepted)
	if a.pending {
		if a.sentEnd < a.end {
			return nil
		}
		a.pending = false
		r.pending--
	}
	return a
}

// acceptRead records a READ request that is in sequence (IBTA 9.7.5.1.8).
func (q *QP) acceptRead(p *wire.RoCE) verdict {
	if q.resp.op != 0 || q.attr.Access&translate.RemoteRead == 0 {
		return vInvReq
	}
	h := p.RETH()
	va, key, n := translate.VA(h.VA), translate.Key(h.RKey), uint64(h.Length)
	r := q.resp.newResource()
	if r == nil || n > maxMessage {
		return vInvReq
	}
	if n > 0 {
		if m := q.memory.CheckRemote(key, va, n, translate.RemoteRead); !m.OK() {
			return vRemAccess
		}
	}
	end := q.resp.epsn + packets(n, q.mtu)
	*r = resource{
		first: q.resp.epsn, end: end, start: q.resp.epsn, next: q.resp.epsn, stop: end,
		va: va, key: key, length: n, op: wire.ReadRequest,
	}
	q.recordResource(r)
	return vOK
}

var atomicOps = [...]AtomicOp{
	wire.CompareSwap: AtomicCompareSwap, wire.FetchAdd: AtomicFetchAdd, wire.AtomicWrite: AtomicWrite,
}

// acceptAtomic executes an atomic that is in sequence, at once and only once: a
// duplicate gets the remembered result (IBTA 9.7.5.1.3).
func (q *QP) acceptAtomic(p *wire.RoCE) verdict {
	a := &q.resp.atomic
	a.op = p.Info.Op
	if a.op == wire.AtomicWrite {
		h := p.RETH()
		if h.Length != atomicLen || len(p.Payload) != atomicLen {
			return vInvReq
		}
		a.va, a.key = translate.VA(h.VA), translate.Key(h.RKey)
		a.swapAdd = binary.LittleEndian.Uint64(p.Payload) // bytes, as they lie in memory
	} else {
		h := p.AtomicETH()
		a.va, a.key, a.compare, a.swapAdd = translate.VA(h.VA), translate.Key(h.RKey), h.Compare, h.SwapAdd
	}
	if q.resp.op != 0 || q.attr.Access&atomicOps[a.op].Needs() == 0 || a.va&(atomicLen-1) != 0 ||
		q.resp.depth == 0 {
		return vInvReq
	}
	parked := q.faults.request.cause == waitAtomic
	v := q.executeAtomic()
	if v == vParked && parked {
		return vFault // its requester repeats it, and gets an RNR NAK
	}
	return v
}

// flushNeeds returns the rights of QP and region that a FLUSH needs (A19); 0: the FLUSH is not valid.
func flushNeeds(h wire.FETH) (need translate.Access) {
	if h.Selectivity > wire.FlushRegion {
		return 0
	}
	if h.Placement&wire.FlushGlobal != 0 {
		need |= translate.FlushGlobal
	}
	if h.Placement&wire.FlushPersistent != 0 {
		need |= translate.FlushPersistent
	}
	return need
}

// acceptFlush records a FLUSH that is in sequence (A19). All requests before it have been executed, and this device's
// stores are visible to all observers at once, so nothing is left to do.
func (q *QP) acceptFlush(p *wire.RoCE) verdict {
	h, f := p.RETH(), p.FETH()
	need := flushNeeds(f)
	if need == 0 || q.resp.op != 0 || q.attr.Access&need != need || q.resp.depth == 0 {
		return vInvReq
	}
	whole := f.Selectivity == wire.FlushRegion
	if !q.memory.FlushRemote(translate.Key(h.RKey), translate.VA(h.VA), uint64(h.Length), whole, need).OK() {
		return vRemAccess
	}
	if !q.resp.emptyDue.add(q.resp.epsn) {
		return vNoRoom
	}
	q.advanceAccepted(q.resp.epsn + 1)
	return vOK
}

// executeAtomic executes resp.atomic, the request with the expected PSN. If its page is absent, the request is kept and
// no message is sent (PF-10). Requests behind it must not overtake it: see keepsBehind.
func (q *QP) executeAtomic() verdict {
	a := &q.resp.atomic
	var r *resource // stays nil for an ATOMIC WRITE
	if a.op == wire.AtomicWrite {
		if !q.resp.emptyDue.fits(q.resp.epsn) {
			return vNoRoom
		}
	} else if r = q.resp.newResource(); r == nil {
		return vInvReq
	}
	var old uint64
	var m translate.Miss
	if r == nil && q.resp.epsn < q.resp.stored { // a repetition, as of a WRITE
		m = q.memory.CheckRemote(a.key, a.va, atomicLen, translate.RemoteWrite)
	} else if old, m = q.memory.AtomicRemote(a.key, a.va, atomicOps[a.op], a.compare, a.swapAdd); m.OK() && r == nil {
		q.memory.Stored(q.resp.epsn + 1)
	}
	if m.Fault() {
		q.waitFor(Responder, &q.faults.request, waitAtomic, q.resp.epsn, m)
		return vParked
	}
	if !m.OK() {
		return vRemAccess
	}
	dropped := q.resp.nak == nakFault // a request behind it was dropped, and its RNR NAK has not been sent
	if end := q.resp.epsn + 1; r != nil {
		*r = resource{
			first: q.resp.epsn, end: end, start: q.resp.epsn, next: q.resp.epsn, stop: end,
			value: old, op: a.op,
		}
		q.recordResource(r)
	} else {
		q.resp.emptyDue.add(q.resp.epsn)
		q.advanceAccepted(end)
	}
	if dropped {
		q.resp.nak, q.resp.nakSent = nakFault, true
	}
	return vOK
}

// recordResource accepts the request that r, from newResource, describes.
func (q *QP) recordResource(r *resource) {
	q.resp.accepted++
	r.pending = true
	q.resp.pending++
	r.behindSend = q.resp.ackPSN == r.first-1
	r.ackDue = r.behindSend && q.resp.ackPending
	q.advanceAccepted(r.end)
}

// advanceAccepted makes end the expected PSN, after a request that has a response of its own.
func (q *QP) advanceAccepted(end uint64) {
	q.advanceEPSN(end)
	q.resp.msn++
	q.resp.ackPending = false // the response acknowledges everything before it
	q.wake()
}

// handleDuplicate answers a request that was executed before (IBTA 9.7.4.2.2, 9.7.5.1.2-3). A request that does not
// match the original is dropped.
func (q *QP) handleDuplicate(p *wire.RoCE, psn uint64) {
	if op := p.Info.Op; op == wire.Send || op == wire.Write {
		q.resp.ackPending = true
		if q.resp.pending > 0 {
			r := q.resp.oldestPending()
			if psn < r.first && r.behindSend && r.next == r.start {
				r.ackDue = true
			}
			q.resp.acknowledgeBy(r)
		}
		q.wake()
		return
	}
	r := q.resp.findResource(psn)
	if op := p.Info.Op; r == nil && (op == wire.Flush || op == wire.AtomicWrite) && q.resp.emptyDue.add(psn) {
		q.wake()
		return
	}
	if r == nil || r.op != p.Info.Op {
		q.stats.RxDropped++
		return
	}
	stop := r.end
	if r.op == wire.ReadRequest {
		h := p.RETH()
		va, key, n := translate.VA(h.VA), translate.Key(h.RKey), uint64(h.Length)
		off := (psn - r.first) * uint64(q.mtu)
		if key != r.key || va != r.va+translate.VA(off) || off > r.length ||
			n > r.length-off && r.length%uint64(q.mtu) != 0 {
			q.stats.RxDropped++
			return
		}
		// A requester that was continued after a kill may divide a READ in another way: it gets what belongs to this
		// part, and asks for the rest.
		n = min(n, r.length-off)
		stop = psn + packets(n, q.mtu)
		if n < r.length-off && n%uint64(q.mtu) != 0 {
			q.stats.RxDropped++ // would end inside a packet of the original
			return
		}
	}
	if r.pending && r.next <= psn && stop <= r.stop {
		// The original responses have not been sent yet, and answer this request too.
		q.resp.acknowledgeBy(r)
		if w := &q.faults.read; w.blocked() && r.next == w.psn && r == q.resp.oldestPending() &&
			(q.peerWaits() || q.resp.peerSelective && w.ofHost()) {
			q.resp.rnrRead = psn
			q.wake()
		}
		return
	}
	if r.op == wire.ReadRequest && q.resp.peerSelective && q.queueRepeats(r, psn, stop) {
		return
	}
	r.start, r.next, r.stop = psn, psn, stop
	q.resp.acknowledgeBy(r)
	q.queueResponses(r)
}

// acknowledgeBy leaves an acknowledgement of requests before r to the responses of r, which are to be sent. If r must
// wait before the first of them, there is an ACK.
//
// In the midst of the responses there must be none, nor right behind them as long as another repetition may follow:
// Linux rxe (6.12) takes an ACK of earlier requests for the end of the READ that it receives, and the next response,
// which is then out of sequence, ends the connection.
func (r *responder) acknowledgeBy(o *resource) {
	if !r.ackPending || r.ackPSN >= o.first {
		return
	}
	r.ackPending = false
	if o.behindSend && o.next == o.start {
		o.ackDue = true
	}
}

// queueResponses makes Run send the responses of r from next on.
func (q *QP) queueResponses(r *resource) {
	if !r.pending {
		r.pending = true
		q.resp.pending++
	}
	q.wake()
}

// queueRepeats records that the responses [psn, stop) of r, a READ, are to be sent again, except those that are about
// to be sent anyway. So the responses being sent are not cut off, and one gap does not replace another. It returns
// false if they are too many.
func (q *QP) queueRepeats(r *resource, psn, stop uint64) bool {
	if stop-psn > psnSetSpan || !q.resp.repeatsDue.fits(psn) || !q.resp.repeatsDue.fits(stop-1) {
		return false
	}
	for ; psn < stop; psn++ {
		if !r.pending || psn < r.next || psn >= r.stop {
			q.resp.repeatsDue.add(psn)
		}
	}
	q.wake()
	return true
}

// resendReadResponse sends the response psn of a READ again. If its memory is not accessible, the response becomes the
// first of those that its resource has to send, and is handled like any other.
func (q *QP) resendReadResponse(psn uint64) {
	r := q.resp.findResource(psn)
	if r == nil || r.op != wire.ReadRequest {
		q.resp.repeatsDue.remove(psn) // the requester has exceeded max_dest_rd_atomic since
		return
	}
	m, ok := q.sendResponse(r, psn, true, true)
	if !m.OK() {
		if !r.pending {
			r.next, r.stop = psn, psn+1
		}
		r.next, r.stop = min(r.next, psn), max(r.stop, psn+1)
		r.start = r.next
		q.queueResponses(r)
	}
	if ok || !m.OK() {
		q.resp.repeatsDue.remove(psn)
	}
}

// sendEmptyResponse sends the response to the FLUSH or ATOMIC WRITE with PSN psn: a READ response without data (A19).
func (q *QP) sendEmptyResponse(psn uint64) {
	t := bth{opcode: wire.OpRCReadResponseOnly, destQP: q.attr.DestQPN, psn: psn, selective: q.resp.peerSelective}
	buf, hdr, _ := q.newFrame(&q.tx, &t, wire.AETHLen, 0)
	if buf == nil {
		q.resp.stallUntil = q.now + bufferDelay
		return
	}
	h := wire.AETH{Syndrome: wire.NoCredits, MSN: q.resp.msn}
	h.Encode(hdr)
	q.resp.emptyDue.remove(psn)
	q.transmit(&q.tx, buf)
}

// findResource returns the READ or atomic that psn belongs to; nil: it is not remembered.
func (r *responder) findResource(psn uint64) *resource {
	n := uint64(r.depth)
	for i := uint64(1); i <= min(n, r.accepted); i++ {
		a := r.resource(r.accepted - i)
		if psn >= a.first && psn < a.end {
			return a
		}
	}
	return nil
}

// oldestPending returns the oldest resource with responses to send. pending is not 0.
func (r *responder) oldestPending() *resource {
	n := uint64(r.depth)
	for i := min(n, r.accepted); i > 0; i-- {
		if a := r.resource(r.accepted - i); a.pending {
			return a
		}
	}
	return nil
}

// respond sends up to budget packets of responses. It returns true if it stopped because the budget was used up.
func (q *QP) respond(budget int) (more bool) {
	if q.resp.cnpDue && q.resp.stallUntil == 0 {
		q.sendCNP()
	}
	for q.resp.stallUntil == 0 {
		var r *resource
		if q.resp.pending > 0 {
			r = q.resp.oldestPending()
		}
		if psn, ok := q.resp.emptyDue.first(); ok && (r == nil || psn < r.next) {
			if budget--; budget < 0 {
				return true
			}
			q.sendEmptyResponse(psn)
			continue
		}
		if psn, ok := q.resp.repeatsDue.first(); ok && (r == nil || psn < r.next) {
			if budget--; budget < 0 {
				return true
			}
			q.resendReadResponse(psn)
			continue
		}
		if r == nil {
			break
		}
		if w := &q.faults.read; w.blocked() && r.next == w.psn {
			q.respondWhileWaiting(r)
			return false
		}
		if budget--; budget < 0 {
			return true
		}
		q.sendNextResponse(r)
	}
	if q.resp.stallUntil != 0 {
		return false
	}
	q.resp.rnrRead = 0
	syn, psn, sacked := q.resp.fatal.syndrome, q.resp.fatal.psn, false
	switch {
	case syn != 0:
	case q.resp.nak == nakFault:
		syn, psn = q.rnrSyndrome(&q.faults.request), q.resp.epsn
	case q.resp.nak != 0:
		syn, psn = q.resp.nak, q.resp.epsn
	case q.resp.waitDue && q.faults.request.cause != waitNone:
		if !q.sendWaits(q.resp.epsn) {
			return false
		}
		sacked, q.resp.waitDue = true, false
	case q.resp.reorder.arrived.Any() && (q.resp.ackPending || q.resp.reorder.sackDue) &&
		q.faults.request.cause == waitNone: // else the request at epsn is not missing
		sacked = q.sendSelectiveAck()
	case q.resp.ackPending:
		syn, psn = wire.NoCredits, q.resp.ackPSN
	default:
		return false
	}
	if !sacked && !q.sendAck(syn, psn) {
		return false
	}
	if q.resp.nak == nakFault && q.faults.request.cause != waitNone {
		q.faults.request.rnrSent = true
	}
	q.resp.ackPending, q.resp.nak = false, 0
	if f := q.resp.fatal; f.syndrome != 0 {
		q.resp.fatal = failure{}
		q.failRecv(f.status)
		if f.event != 0 {
			q.sched.Event(f.event)
		}
		q.toErr()
	}
	return false
}

// respondWhileWaiting sends the messages that are permitted while r, the oldest READ, waits for a page.
func (q *QP) respondWhileWaiting(r *resource) {
	if r.ackDue && q.sendAck(wire.NoCredits, r.first-1) {
		r.ackDue = false
	}
	if q.resp.rnrRead < r.next || q.resp.rnrRead >= r.stop {
		return // the READ was not repeated, or the repetition is obsolete
	}
	if q.resp.stallUntil != 0 {
		return
	}
	sent := false
	if q.peerWaits() {
		sent = q.sendAck(q.rnrSyndrome(&q.faults.read), q.resp.rnrRead)
	} else {
		sent = q.sendWaits(q.resp.rnrRead)
	}
	if sent {
		q.resp.rnrRead = 0
	}
}

// sendAck sends an ACK, NAK or RNR NAK. It returns false if there is no buffer.
func (q *QP) sendAck(syn wire.Syndrome, psn uint64) bool {
	t := bth{opcode: wire.OpRCAck, destQP: q.attr.DestQPN, psn: psn, selective: q.resp.peerSelective}
	buf, hdr, _ := q.newFrame(&q.tx, &t, wire.AETHLen, 0)
	if buf == nil {
		q.resp.stallUntil = q.now + bufferDelay
		return false
	}
	h := wire.AETH{Syndrome: syn, MSN: q.resp.msn}
	h.Encode(hdr)
	switch syn.Kind() {
	case wire.SyndromeACK:
		q.stats.TxAcks++
	case wire.SyndromeRNR:
		q.stats.TxRNR++
	default:
		q.stats.TxNaks++
	}
	q.transmit(&q.tx, buf)
	return true
}

// sendResponse sends the response psn of r; first and last say where it stands among the requested ones. ok is false if
// it was not sent: m is the miss, or OK if there is no buffer.
func (q *QP) sendResponse(r *resource, psn uint64, first, last bool) (m translate.Miss, ok bool) {
	t := bth{opcode: wire.OpRCAtomicAck, destQP: q.attr.DestQPN, psn: psn, selective: q.resp.peerSelective}
	ext, n := wire.AETHLen+wire.AtomicAckLen, 0
	atomicAck := r.op != wire.ReadRequest
	off := (psn - r.first) * uint64(q.mtu)
	if !atomicAck {
		t.opcode = readOps.pick(first, last)
		if ext = 0; first || last {
			ext = wire.AETHLen
		}
		n = int(min(r.length-off, uint64(q.mtu)))
	}
	buf, hdr, data := q.newFrame(&q.tx, &t, ext, n)
	if buf == nil {
		q.resp.stallUntil = q.now + bufferDelay
		return m, false
	}
	buf.Offload.Pad = q.resp.peerSelective
	if ext != 0 {
		h := wire.AETH{Syndrome: wire.NoCredits, MSN: q.resp.msn}
		h.Encode(hdr)
	}
	if atomicAck {
		wire.PutAtomicAck(hdr[wire.AETHLen:], r.value)
	} else if n > 0 {
		if m = q.memory.ReadRemote(data, r.key, r.va+translate.VA(off)); !m.OK() {
			buf.Free()
			return m, false
		}
		if q.faults.read.cause != waitNone && q.faults.read.psn == psn {
			q.faults.read.clear()
		}
	}
	q.transmit(&q.tx, buf)
	return m, true
}

// sendNextResponse sends the next response of r, unless it must wait or fails.
func (q *QP) sendNextResponse(r *resource) {
	m, ok := q.sendResponse(r, r.next, r.next == r.start, r.next+1 == r.stop)
	if !m.OK() {
		q.readMiss(r, m)
	}
	if !ok {
		return
	}
	r.next++
	r.ackDue = false
	r.sentEnd = max(r.sentEnd, r.next)
	if r.next == r.stop {
		r.pending = false
		q.resp.pending--
	}
}

// readMiss handles a miss m in the memory of r. Absent memory delays the response without a message (PF-10); an invalid
// key ends the connection.
func (q *QP) readMiss(r *resource, m translate.Miss) {
	if !m.Fault() {
		q.failRead(r)
		return
	}
	m.Len = rangeRest(r.va, min(r.length, (r.stop-r.first)*uint64(q.mtu)), m)
	q.waitFor(Responder, &q.faults.read, waitRead, r.next, m)
}

// failRead ends the connection at the next response of r. But if that response has been sent before, the requester most
// likely has it, and the owner of the memory may have deregistered it since: then only the repetition ends. A requester
// that does wait for the response fails by the NAK; any other ignores the NAK as old.
func (q *QP) failRead(r *resource) {
	psn := r.next
	q.stats.AccessErrors++
	if psn < r.sentEnd {
		r.pending = false
		q.resp.pending--
		q.sendAck(wire.NAKRemoteAccess, psn)
		return
	}
	q.resp.dropResponses(q.link)
	q.resp.fatal = failure{
		syndrome: wire.NAKRemoteAccess, status: StatusRemAccess, event: EventAccessErr, psn: psn,
	}
}
