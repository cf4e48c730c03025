package roce

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// READs and atomics at the responder, and the sending of all that it owes.

// newAnswer takes the next place among those remembered. It fails if that one
// still owes its first response: the requester has more in flight than agreed.
// If it only repeats one, for a duplicate, the repetition is dropped: a requester
// that keeps to the agreement asks for more only after what it had asked for has
// arrived.
func (q *QP) newAnswer() *answer {
	if len(q.memory) == 0 {
		return nil
	}
	r := &q.memory[q.answered%uint64(len(q.memory))]
	if r.pending {
		if r.sent < r.end {
			return nil
		}
		r.pending = false
		q.pending--
	}
	return r
}

// acceptRead notes a READ request that is in sequence (IBTA 9.7.5.1.8).
func (q *QP) acceptRead(p *wire.RoCE) verdict {
	if q.msg != 0 || q.attr.Access&translate.RemoteRead == 0 {
		return vInvReq
	}
	h := p.RETH()
	va, key, n := translate.VA(h.VA), translate.Key(h.RKey), uint64(h.Length)
	r := q.newAnswer()
	if r == nil || n > maxMessage {
		return vInvReq
	}
	if n > 0 {
		if m := q.a.CheckRemote(key, va, n, translate.RemoteRead); !m.OK() {
			return vRemAccess
		}
	}
	end := q.epsn + packets(n, q.mtu)
	*r = answer{first: q.epsn, end: end, start: q.epsn, next: q.epsn, stop: end, va: va, key: key, length: n, op: wire.ReadRequest}
	q.remember(r)
	return vOK
}

var atomicOps = [...]AtomicOp{
	wire.CompareSwap: AtomicCompareSwap, wire.FetchAdd: AtomicFetchAdd, wire.AtomicWrite: AtomicWrite,
}

// acceptAtomic executes an atomic that is in sequence, at once and only once: a
// duplicate gets the remembered result (IBTA 9.7.5.1.3).
func (q *QP) acceptAtomic(p *wire.RoCE) verdict {
	a := &q.atomic
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
	if q.msg != 0 || q.attr.Access&atomicOps[a.op].Needs() == 0 || a.va&(atomicLen-1) != 0 || len(q.memory) == 0 {
		return vInvReq
	}
	parked := q.waits.request.cause == atAtomic
	v := q.executeAtomic()
	if v == vParked && parked {
		return vFault // its requester asks again: it is told to wait
	}
	return v
}

// flushNeeds is the right that a FLUSH needs, of the QP and of the region (A19); 0: it asks for what there is not.
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

// acceptFlush notes a FLUSH that is in sequence (A19). All before it has been executed, and what this
// device stores everybody sees at once: there is nothing left to do.
func (q *QP) acceptFlush(p *wire.RoCE) verdict {
	h, f := p.RETH(), p.FETH()
	need := flushNeeds(f)
	if need == 0 || q.msg != 0 || q.attr.Access&need != need || len(q.memory) == 0 {
		return vInvReq
	}
	if !q.a.FlushRemote(translate.Key(h.RKey), translate.VA(h.VA), uint64(h.Length), f.Selectivity == wire.FlushRegion, need).OK() {
		return vRemAccess
	}
	if !q.owed.add(q.epsn) {
		return vCrowded
	}
	q.accepted(q.epsn + 1)
	return vOK
}

// executeAtomic executes q.atomic, the request at epsn. If its page is absent, the
// request stays here, without a message (PF-10). Those behind it must not overtake
// it: the first to arrive is answered RNR.
func (q *QP) executeAtomic() verdict {
	a := &q.atomic
	var r *answer // stays nil for an ATOMIC WRITE
	if a.op == wire.AtomicWrite {
		if !q.owed.fits(q.epsn) {
			return vCrowded
		}
	} else if r = q.newAnswer(); r == nil {
		return vInvReq
	}
	old, m := q.a.AtomicRemote(a.key, a.va, atomicOps[a.op], a.compare, a.swapAdd)
	if m.Fault() {
		q.await(Responder, &q.waits.request, atAtomic, q.epsn, m)
		return vParked
	}
	if !m.OK() {
		return vRemAccess
	}
	dropped := q.nak == nakFault // and the peer does not know yet
	if end := q.epsn + 1; r != nil {
		*r = answer{first: q.epsn, end: end, start: q.epsn, next: q.epsn, stop: end, value: old, op: a.op}
		q.remember(r)
	} else {
		q.owed.add(q.epsn)
		q.accepted(end)
	}
	if dropped {
		q.nak, q.nakSent = nakFault, true
	}
	return vOK
}

// remember accepts the request that r, the place of newAnswer, answers.
func (q *QP) remember(r *answer) {
	q.answered++
	r.pending = true
	q.pending++
	r.behindSend = q.ackPSN == r.first-1
	r.owes = r.behindSend && q.ackPending
	q.accepted(r.end)
}

// accepted goes on behind a request that has a response, from PSN end on.
func (q *QP) accepted(end uint64) {
	q.advance(end)
	q.msn++
	q.ackPending = false // the response acknowledges what was before
	q.wake()
}

// duplicate answers a request that was executed before (IBTA 9.7.4.2.2,
// 9.7.5.1.2-3). What does not match the original is dropped.
func (q *QP) duplicate(p *wire.RoCE, psn uint64) {
	if op := p.Info.Op; op == wire.Send || op == wire.Write {
		q.ackPending = true
		if q.pending > 0 {
			if r := q.oldestPending(); psn < r.first {
				r.owes = r.behindSend
			}
		}
		q.wake()
		return
	}
	r := q.remembered(psn)
	if op := p.Info.Op; r == nil && (op == wire.Flush || op == wire.AtomicWrite) && q.owed.add(psn) {
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
		if key != r.key || va != r.va+translate.VA(off) || off > r.length || n > r.length-off {
			q.stats.RxDropped++
			return
		}
		stop = psn + packets(n, q.mtu)
		if n < r.length-off && n%uint64(q.mtu) != 0 {
			q.stats.RxDropped++ // would end inside a packet of the original
			return
		}
	}
	if r.pending && r.next <= psn && stop <= r.stop {
		// Not sent yet: the original response will do.
		if w := &q.waits.read; w.held() && r.next == w.psn && r == q.oldestPending() {
			q.rnrRead = psn
			q.wake()
		}
		return
	}
	if r.op == wire.ReadRequest && q.selective && q.repeat(r, psn, stop) {
		return
	}
	r.start, r.next, r.stop = psn, psn, stop
	q.goOn(r)
}

// goOn has r's responses sent, from next on.
func (q *QP) goOn(r *answer) {
	if !r.pending {
		r.pending = true
		q.pending++
	}
	q.wake()
}

// repeat notes that the responses [psn, stop) of r, a READ, are to be sent again, but for those that are about to be sent anyway. Thus the
// rest of an answer is not cut off, and one gap does not make forget another. False: they are too many.
func (q *QP) repeat(r *answer, psn, stop uint64) bool {
	if stop-psn > owedSpan || !q.repeats.fits(psn) || !q.repeats.fits(stop-1) {
		return false
	}
	for ; psn < stop; psn++ {
		if !r.pending || psn < r.next || psn >= r.stop {
			q.repeats.add(psn)
		}
	}
	q.wake()
	return true
}

// answerAgain sends the response psn of a READ again. If it cannot, it is repeated as the first of all that its answer still has to
// send: what becomes of it then, and of those behind it, is as with any other.
func (q *QP) answerAgain(psn uint64) {
	r := q.remembered(psn)
	if r == nil || r.op != wire.ReadRequest {
		q.repeats.remove(psn) // its requester has asked for more than agreed since
		return
	}
	m, ok := q.answer(r, psn, true, true)
	if !m.OK() {
		if !r.pending {
			r.next, r.stop = psn, psn+1
		}
		r.next, r.stop = min(r.next, psn), max(r.stop, psn+1)
		r.start = r.next
		q.goOn(r)
	}
	if ok || !m.OK() {
		q.repeats.remove(psn)
	}
}

// answerEmpty sends the response to the FLUSH or ATOMIC WRITE with PSN psn: that of a READ of nothing (A19).
func (q *QP) answerEmpty(psn uint64) {
	t := bth{opcode: wire.OpRCReadResponseOnly, qpn: q.attr.DestQPN, psn: psn, selective: q.selective}
	buf, hdr, _ := q.frame(&q.tx, &t, wire.AETHLen, 0)
	if buf == nil {
		q.respStallAt = q.now + bufferDelay
		return
	}
	h := wire.AETH{Syndrome: wire.NoCredits, MSN: q.msn}
	h.Encode(hdr)
	q.owed.remove(psn)
	q.send(&q.tx, buf)
}

// remembered finds the READ or atomic that psn belongs to.
func (q *QP) remembered(psn uint64) *answer {
	n := uint64(len(q.memory))
	for i := uint64(1); i <= min(n, q.answered); i++ {
		r := &q.memory[(q.answered-i)%n]
		if psn >= r.first && psn < r.end {
			return r
		}
	}
	return nil
}

// oldestPending returns the first answer that owes responses. pending is not 0.
func (q *QP) oldestPending() *answer {
	n := uint64(len(q.memory))
	for i := min(n, q.answered); i > 0; i-- {
		if r := &q.memory[(q.answered-i)%n]; r.pending {
			return r
		}
	}
	return nil
}

// respond sends up to budget packets of what the responder owes.
func (q *QP) respond(budget int) (more bool) {
	if q.cnpDue && q.respStallAt == 0 {
		q.sendCNP()
	}
	for q.respStallAt == 0 {
		var r *answer
		if q.pending > 0 {
			r = q.oldestPending()
		}
		if psn, ok := q.owed.next(); ok && (r == nil || psn < r.next) {
			if budget--; budget < 0 {
				return true
			}
			q.answerEmpty(psn)
			continue
		}
		if psn, ok := q.repeats.next(); ok && (r == nil || psn < r.next) {
			if budget--; budget < 0 {
				return true
			}
			q.answerAgain(psn)
			continue
		}
		if r == nil {
			break
		}
		if w := &q.waits.read; w.held() && r.next == w.psn {
			q.whileWaiting(r)
			return false
		}
		if budget--; budget < 0 {
			return true
		}
		q.answerNext(r)
	}
	if q.respStallAt != 0 {
		return false
	}
	q.rnrRead = 0
	syn, psn, told := q.fatal.syndrome, q.fatal.psn, false
	switch {
	case syn != 0:
	case q.nak == nakFault:
		syn, psn = q.rnrFor(&q.waits.request), q.epsn
	case q.nak != 0:
		syn, psn = q.nak, q.epsn
	case q.ahead.there.Any() && (q.ackPending || q.ahead.tell):
		told = q.sendMap()
	case q.ackPending:
		syn, psn = wire.NoCredits, q.ackPSN
	default:
		return false
	}
	if !told && !q.sendAck(syn, psn) {
		return false
	}
	if q.nak == nakFault && q.waits.request.cause != atNothing {
		q.waits.request.told = true
	}
	q.ackPending, q.nak = false, 0
	if f := q.fatal; f.syndrome != 0 {
		q.fatal = failure{}
		q.failRecv(f.status)
		if f.event != 0 {
			q.a.Event(f.event)
		}
		q.toErr()
	}
	return false
}

// whileWaiting sends what may be sent while r, the oldest READ, waits for a page.
func (q *QP) whileWaiting(r *answer) {
	if r.owes && q.sendAck(wire.NoCredits, r.first-1) {
		r.owes = false
	}
	if q.rnrRead < r.next || q.rnrRead >= r.stop {
		return // nobody asked, or for what another repetition has made obsolete
	}
	if q.respStallAt == 0 && q.sendAck(q.rnrFor(&q.waits.read), q.rnrRead) {
		q.rnrRead = 0
	}
}

func (q *QP) sendAck(syn wire.Syndrome, psn uint64) bool {
	t := bth{opcode: wire.OpRCAck, qpn: q.attr.DestQPN, psn: psn, selective: q.selective}
	buf, hdr, _ := q.frame(&q.tx, &t, wire.AETHLen, 0)
	if buf == nil {
		q.respStallAt = q.now + bufferDelay
		return false
	}
	h := wire.AETH{Syndrome: syn, MSN: q.msn}
	h.Encode(hdr)
	switch syn.Kind() {
	case wire.SyndromeACK:
		q.stats.TxAcks++
	case wire.SyndromeRNR:
		q.stats.TxRNR++
	default:
		q.stats.TxNaks++
	}
	q.send(&q.tx, buf)
	return true
}

// answer sends the response psn of r, as the first or last of those asked for or not.
func (q *QP) answer(r *answer, psn uint64, first, last bool) (m translate.Miss, ok bool) {
	t := bth{opcode: wire.OpRCAtomicAck, qpn: q.attr.DestQPN, psn: psn, selective: q.selective}
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
	buf, hdr, data := q.frame(&q.tx, &t, ext, n)
	if buf == nil {
		q.respStallAt = q.now + bufferDelay
		return m, false
	}
	buf.Offload.Pad = q.selective
	if ext != 0 {
		h := wire.AETH{Syndrome: wire.NoCredits, MSN: q.msn}
		h.Encode(hdr)
	}
	if atomicAck {
		wire.PutAtomicAck(hdr[wire.AETHLen:], r.value)
	} else if n > 0 {
		if m = q.a.ReadRemote(data, r.key, r.va+translate.VA(off)); !m.OK() {
			buf.Free()
			return m, false
		}
		if q.waits.read.cause != atNothing && q.waits.read.psn == psn {
			q.waits.read.end()
		}
	}
	q.send(&q.tx, buf)
	return m, true
}

// answerNext sends the next packet of r, unless it has to wait or fails.
func (q *QP) answerNext(r *answer) {
	m, ok := q.answer(r, r.next, r.next == r.start, r.next+1 == r.stop)
	if !m.OK() {
		q.readMiss(r, m)
	}
	if !ok {
		return
	}
	r.next++
	r.owes = false
	r.sent = max(r.sent, r.next)
	if r.next == r.stop {
		r.pending = false
		q.pending--
	}
}

// readMiss: absent memory delays the response without a message (PF-10); a key
// that has gone meanwhile ends the connection.
func (q *QP) readMiss(r *answer, m translate.Miss) {
	if !m.Fault() {
		q.failRead(r)
		return
	}
	m.Len = rangeRest(r.va, min(r.length, (r.stop-r.first)*uint64(q.mtu)), m)
	q.await(Responder, &q.waits.read, atRead, r.next, m)
}

// failRead ends the connection at the next response of r. But if that one has been
// sent before, the requester most likely has it, and its owner may have taken the
// memory back since: then the repetition alone ends. A requester that does wait
// for it learns from the NAK that there is no more; any other ignores it as old.
func (q *QP) failRead(r *answer) {
	psn := r.next
	q.stats.AccessErrors++
	if psn < r.sent {
		r.pending = false
		q.pending--
		q.sendAck(wire.NAKRemoteAccess, psn)
		return
	}
	q.respClear()
	q.fatal = failure{syndrome: wire.NAKRemoteAccess, status: StatusRemAccess, event: EventAccessErr, psn: psn}
}
