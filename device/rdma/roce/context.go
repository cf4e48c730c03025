package roce

import (
	"slices"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/record"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// The context of a QP: what another process needs to continue it (CO-1). It is written while the QP is frozen, and read
// into a new QP, which is frozen then: nothing happens before Thaw.
//
//	in the context      attributes, PSNs, work requests that were fetched and not completed, the message in progress,
//	                    the receive request in use, the answers of READs and atomics that a duplicate may ask for,
//	                    whether the requester is a vnicd
//	lost, as packets    kept and queued frames, acknowledgements
//	learned again       congestion window, response times, what the peer understands as responder
//	met again           absent pages that operations wait for
//
// After Thaw the requester sends again from its oldest unacknowledged packet (UC: the message in progress from its
// beginning), and the responder acknowledges once more, so that a peer that was refused continues at once. A peer that
// lost requests repeats them after its timeout.
//
// What is read is untrusted (CO-7). It may describe a state that this vnicd would not have reached, but it keeps the
// invariants on which this package relies; keys are looked up and rights checked at each access anyway.

const maxPSN = 1 << 60 // beyond what any connection reaches

func recordPSN(c *record.Codec, psn *uint64, what string) {
	record.Num(c, psn)
	checkPSN(c, psn, what)
}

// checkPSN checks a PSN that was read.
func checkPSN(c *record.Codec, psn *uint64, what string) {
	if c.Reading() && (*psn < psnBase-psnHalf || *psn > maxPSN) {
		c.Fail("%s is %#x, must be %#x to %#x", what, *psn, uint64(psnBase-psnHalf), uint64(maxPSN))
	}
}

// Context writes the context of q, which is frozen, or reads it into q, which is new and is frozen afterwards.
// addressable reports whether q may send to a path; it is asked about paths that are read.
func (q *QP) Context(c *record.Codec, now int64, addressable func(*AddressVector) bool) {
	q.context(c, now, addressable, q.req.refetch && q.fetchesAgain() || q.lacksRequests())
}

// Journal writes the context of q as it is between two calls. If possible it is without the work requests that were
// fetched: the next process fetches them again, as their slots in the queue are not free before they complete.
func (q *QP) Journal(c *record.Codec, now int64) {
	q.context(c, now, nil, q.fetchesAgain() || q.lacksRequests())
}

// fetchesAgain reports whether q can do without its work requests: no request in flight has a length of its own.
func (q *QP) fetchesAgain() bool {
	return q.typ == RC && q.state == RTS && q.req.readHead == q.req.readTail
}

// lacksRequests reports whether requests of which packets were sent have not been fetched again. No READ is in flight.
func (q *QP) lacksRequests() bool {
	return q.typ == RC && (q.state == RTS || q.state == SQD) && q.req.nextPSN < q.req.sent
}

// Refetches reports whether the context that was read has no work requests: the adapter must return the oldest one that
// is not completed at the next FetchSend.
func (q *QP) Refetches() bool { return q.req.refetch }

// executedRequests returns the memory management requests that were executed and are not completed.
func (r *requester) executedRequests() (out []uint32) {
	for n := r.head; n != r.tail; n++ {
		if r.slot(n).executed {
			out = append(out, n)
		}
	}
	return append(out, r.executedBefore...)
}

// maxExecuted bounds the memory management requests that were executed and wait for earlier requests.
const maxExecuted = 1 << 16

func (q *QP) context(c *record.Codec, now int64, addressable func(*AddressVector) bool, refetch bool) {
	state := q.state
	if c.Since(4) {
		q.recordFlags(c, &state, &refetch)
	} else {
		record.Max(c, &state, Err, "state")
		c.Bool(&q.commEst)
		c.Bool(&q.draining)
		c.Bool(&q.lastWQE)
		c.Bool(&q.faults.sqInvalid)
		c.Bool(&q.faults.rqInvalid)
	}
	if q.attrRecord == nil || c.Reading() {
		q.attrContext(c, now, state, addressable)
	} else {
		c.Fixed(q.attrRecord)
	}
	if state == Reset || c.Err() != nil {
		return
	}
	if c.Since(3) && !c.Since(4) {
		c.Bool(&refetch)
	}
	if refetch {
		q.req.recordPosition(c, q)
	} else {
		q.req.record(c, q, state, addressable)
	}
	if c.Since(4) {
		q.resp.record(c, q)
	} else {
		q.resp.recordNumbers(c, q)
	}
	if c.Reading() && c.Err() == nil {
		q.resp.check(c)
	}
	if c.Reading() && c.Err() == nil {
		q.state = state
		q.req.past = q.req.una + uint64(q.cfg.Window+readChunk)
		q.frozen = frozen{since: now, refused: true, moved: true}
		q.flushDelay = flushDelayMin
	}
}

// recordFlags is the state, and truth values. No work requests follow if refetch is set.
func (q *QP) recordFlags(c *record.Codec, state *State, refetch *bool) {
	flags := [...]*bool{&q.commEst, &q.draining, &q.lastWQE, &q.faults.sqInvalid, &q.faults.rqInvalid, refetch}
	w := [...]uint64{uint64(*state) | record.Pack(flags[:]...)<<8}
	c.Words(w[:])
	if !c.Reading() {
		return
	}
	if w[0]&0xff > uint64(Err) || w[0]>>(8+len(flags)) != 0 {
		c.Fail("state and flags are %#x", w[0])
		return
	}
	*state = State(w[0])
	record.Unpack(w[0]>>8, flags[:]...)
}

// attrContext is the part of the attributes, which rarely change.
func (q *QP) attrContext(c *record.Codec, now int64, state State, addressable func(*AddressVector) bool) {
	from, attr := len(c.Bytes()), q.attr
	attr.record(c, &q.cfg, addressable)
	if !c.Reading() {
		q.attrRecord = slices.Clone(c.Bytes()[from:])
		return
	}
	q.now = now
	q.adoptAttr(c, state, &attr)
}

// adoptAttr sets attributes that were read, and what follows from them.
func (q *QP) adoptAttr(c *record.Codec, state State, a *Attr) {
	if c.Err() != nil || state == Reset {
		return
	}
	connected := q.typ == RC || q.typ == UC
	if connected && state >= RTR && state != Err && a.AV.DGID == [16]byte{} {
		c.Fail("a connected queue pair in state %v without a peer", state)
		return
	}
	mask := MaskAccess | MaskPKeyIndex | MaskPort | MaskQKey | MaskTimeout | MaskRetryCnt | MaskRNRRetry |
		MaskMinRNRTimer | MaskMaxRdAtomic | MaskMaxDestRdAtomic | MaskSQDNotify | MaskDestQPN | MaskAV | MaskRQPSN | MaskSQPSN
	if a.PathMTU != 0 {
		mask |= MaskPathMTU
	}
	q.allocate()
	if connected && a.AV.DGID != [16]byte{} {
		av := a.AV
		if q.usesECN(&av) {
			av.TrafficClass = av.TrafficClass&^header.ECNMask | header.ECT0
		}
		t, err := av.template(q.cfg.QPN, a.DestQPN)
		if err != nil {
			c.Fail("address vector: %v", err)
			return
		}
		q.tx = t
	}
	q.applyAttr(a, mask)
}

// record describes the attributes, but the state.
func (a *Attr) record(c *record.Codec, cfg *Config, addressable func(*AddressVector) bool) {
	record.Num(c, &a.PathMTU)
	record.Max(c, &a.Timeout, 31, "timeout")
	record.Max(c, &a.RetryCnt, 7, "retry_cnt")
	record.Max(c, &a.RNRRetry, 7, "rnr_retry")
	record.Max(c, &a.MinRNRTimer, 31, "min_rnr_timer")
	record.Max(c, &a.MaxRdAtomic, uint8(cfg.MaxRdAtomic), "max_rd_atomic")
	record.Max(c, &a.MaxDestRdAtomic, uint8(cfg.MaxRdAtomic), "max_dest_rd_atomic")
	c.Bool(&a.SQDNotify)
	record.Max(c, &a.PKeyIndex, 0, "pkey_index")
	record.Num(c, &a.Port)
	record.Num(c, &a.Access)
	record.Num(c, &a.QKey)
	record.Max(c, &a.DestQPN, psnMask, "dest_qp_num")
	record.Max(c, &a.RQPSN, psnMask, "rq_psn")
	record.Max(c, &a.SQPSN, psnMask, "sq_psn")
	a.AV.record(c, addressable)
	// It may exceed the port's MTU, which may have become smaller since.
	if c.Reading() && a.PathMTU > 5 {
		c.Fail("path_mtu is %d, must be at most 5", a.PathMTU)
	}
}

// record describes the address; the zero DGID means none.
func (v *AddressVector) record(c *record.Codec, addressable func(*AddressVector) bool) {
	c.Fixed(v.DMAC[:])
	c.Fixed(v.SMAC[:])
	record.Num(c, &v.VLAN)
	c.Fixed(v.SGID[:])
	c.Fixed(v.DGID[:])
	record.Num(c, &v.TrafficClass)
	record.Num(c, &v.HopLimit)
	record.Max(c, &v.SL, 15, "service level")
	record.Max(c, &v.FlowLabel, 0xfffff, "flow_label")
	c.Bool(&v.RoCEv1)
	record.Num(c, &v.SGIDIndex)
	if !c.Reading() || v.DGID == [16]byte{} {
		return
	}
	if v.VLAN != NoVLAN && v.VLAN > 4094 || !addressable(v) {
		c.Fail("address vector of another device: source MAC %x, VLAN %d", v.SMAC, v.VLAN)
	}
}

// record describes the requester: work requests head to tail, and how much of them is acknowledged. In the error state
// they have no PSNs: they are flushed.
func (r *requester) record(c *record.Codec, q *QP, state State, addressable func(*AddressVector) bool) {
	n := c.Len(int(r.tail-r.head), q.cfg.MaxOutstanding, "send requests")
	first, una, sent := r.nextPSN, r.una, r.sent // first: of the oldest request
	switch {
	case state == Err:
		una, sent = first, first
	case n > 0 && !c.Reading():
		first = r.slot(r.head).first
	}
	record.Num(c, &r.head)
	recordPSN(c, &first, "first PSN of the send queue")
	recordPSN(c, &una, "oldest unacknowledged PSN")
	recordPSN(c, &sent, "end of the PSNs sent")
	record.Max(c, &r.rnrLeft, rnrForever, "RNR NAKs left")
	if c.Reading() {
		r.tail, r.nextPSN, r.una, r.sent = r.head, first, una, sent
	}
	for len(r.slots) < n { // only while reading, when it is empty
		r.grow(&q.cfg)
	}
	for i := range uint32(n) {
		s := r.slot(r.head + i)
		s.record(c, q, addressable)
		if c.Err() != nil {
			return
		}
		if !c.Reading() {
			continue
		}
		if s.w.Seq = r.head + i; !q.adoptSlot(c, s, state) {
			return
		}
		r.tail++
	}
	var ends []uint64
	if state != Err {
		ends = r.requestsInFlight()
	}
	record.List(c, &ends, len(r.readEnds), "READs and atomics in flight", func(e *uint64) {
		recordPSN(c, e, "end of a READ")
	})
	if c.Reading() {
		most := uint64(maxPSN)
		if q.typ == RC { // whose recovery has room for so many
			most = uint64(q.cfg.Window + readChunk)
		}
		r.adoptPositions(c, first, ends, most)
	}
}

// recordPosition describes the requester without its work requests.
func (r *requester) recordPosition(c *record.Codec, q *QP) {
	first, una, sent := r.nextPSN, r.una, r.sent
	executed := r.executedBefore
	if !c.Reading() && r.head != r.tail {
		first = r.slot(r.head).first
		if r.manages {
			executed = r.executedRequests()
		}
	}
	if c.Since(4) {
		w := [...]uint64{first, una, sent, uint64(r.head) | uint64(r.rnrLeft)<<32 | uint64(len(executed))<<40}
		c.Words(w[:])
		if c.Reading() {
			first, una, sent, r.head, r.rnrLeft = w[0], w[1], w[2], uint32(w[3]), uint8(w[3]>>32)
			n := int(w[3] >> 40)
			if r.rnrLeft > rnrForever || n > maxExecuted {
				c.Fail("%d RNR NAKs left, %d executed requests", r.rnrLeft, n)
				return
			}
			executed = make([]uint32, n)
		}
		checkPSN(c, &first, "first PSN of the send queue")
		checkPSN(c, &una, "oldest unacknowledged PSN")
		checkPSN(c, &sent, "end of the PSNs sent")
		for i := range executed {
			record.Num(c, &executed[i])
		}
	} else {
		record.Num(c, &r.head)
		recordPSN(c, &first, "first PSN of the send queue")
		recordPSN(c, &una, "oldest unacknowledged PSN")
		recordPSN(c, &sent, "end of the PSNs sent")
		record.Max(c, &r.rnrLeft, rnrForever, "RNR NAKs left")
		record.List(c, &executed, maxExecuted, "executed requests", func(n *uint32) { record.Num(c, n) })
	}
	if !c.Reading() {
		return
	}
	r.executedBefore = executed
	if una < first || una-first > packets(maxMessage, q.mtu) || sent < una || sent-una > uint64(q.cfg.Window+readChunk) ||
		q.typ != RC {
		c.Fail("PSN %#x is unacknowledged, %#x sent: the oldest request begins with %#x", una, sent, first)
	}
	r.refetch, r.tail, r.cur = true, r.head, r.head
	r.nextPSN, r.una, r.nxt, r.sent = first, una, una, sent
}

// sentBefore is called when the peer acknowledges PSN psn, which this process has not sent. A killed process may have
// sent it after the context.
func (q *QP) sentBefore(psn uint64) {
	r := &q.req
	for r.nextPSN <= psn {
		if !q.fetchWQE() {
			return
		}
		if s := r.slot(r.tail - 1); s.failed || s.info.kind == kindManage && !s.executed {
			return // sent or not, it is first to be executed here
		}
	}
	r.sent = psn + 1
}

// fetchSent fetches the requests again of which packets were sent, so that responses find them. It returns false if
// that is not possible now.
func (q *QP) fetchSent() bool {
	for r := &q.req; r.nextPSN < r.sent; {
		if !q.fetchWQE() {
			return false
		}
		if s := r.slot(r.tail - 1); s.failed { // the guest has changed it: nothing behind it was sent
			r.sent = max(s.first, r.una)
			r.nextPSN = max(r.nextPSN, r.sent) // the QP ends with this request
		}
	}
	return true
}

// resumes completes slot s, which was fetched again by the next process: it may be acknowledged in part, or executed.
func (q *QP) resumes(s *sendSlot) {
	r := &q.req
	if len(r.executedBefore) > 0 && s.w.Seq == r.executedBefore[0] {
		s.executed = s.info.kind == kindManage
		r.manages = true
		r.executedBefore = r.executedBefore[1:]
	}
	if r.nxt > s.first && r.nxt >= s.end && !s.failed { // the guest has changed it
		s.failed, s.w.Status = true, StatusLocQPOp
	}
	r.refetch = len(r.executedBefore) > 0
}

// requestsInFlight returns the ends of READs and atomics in flight, oldest first.
func (r *requester) requestsInFlight() []uint64 {
	ends := r.endsCopy[:0]
	for i := r.readHead; i != r.readTail; i++ {
		ends = append(ends, r.readEnds[i&uint32(len(r.readEnds)-1)])
	}
	return ends
}

// adoptSlot completes a work request that was read, as fetchWQE does.
func (q *QP) adoptSlot(c *record.Codec, s *sendSlot, state State) bool {
	s.info = s.w.Opcode.info()
	s.first, s.end = q.req.nextPSN, q.req.nextPSN
	if s.failed || state == Err {
		return true
	}
	// Attributes may have changed since the request was fetched: max_rd_atomic in SQD, and the port's MTU.
	most := q.attr.MaxRdAtomic
	q.attr.MaxRdAtomic = max(most, 1)
	st := q.checkWQE(s)
	q.attr.MaxRdAtomic = most
	if st != StatusSuccess && q.typ.class() == classUD {
		s.failed, s.w.Status = true, st
		return true
	}
	if st != StatusSuccess {
		c.Fail("send request %d has operation %d, length %d: status %d", s.w.Seq, s.w.Opcode, s.w.Length, st)
		return false
	}
	switch s.info.kind {
	case kindManage:
	case kindAtomic:
		s.end++
	default:
		s.end += packets(s.w.Length, q.mtu)
	}
	q.req.nextPSN = s.end
	return true
}

// adoptPositions checks the PSNs that were read against the work requests, the first of which begins with PSN first,
// and goes back to una. At most most packets are in flight.
func (r *requester) adoptPositions(c *record.Codec, first uint64, ends []uint64, most uint64) {
	if c.Err() != nil {
		return
	}
	limit := first // una may not be beyond it
	if r.head != r.tail {
		if s := r.slot(r.head); s.end > s.first {
			limit = s.end - 1
		}
	}
	if r.una < first || r.una > limit || r.sent < r.una || r.sent > r.nextPSN || r.sent-r.una > most {
		c.Fail("PSNs %#x unacknowledged, %#x sent: the oldest request has %#x to %#x, all end at %#x", r.una, r.sent, first,
			limit, r.nextPSN)
		return
	}
	r.nxt, r.cur = r.una, r.head
	// A repeated READ keeps its end, which lies in the request that it belongs to.
	n, last := r.head, uint64(0)
	for _, e := range ends {
		for n != r.tail && r.slot(n).end < e {
			n++
		}
		if n == r.tail || e <= r.slot(n).first || e <= last || !r.slot(n).info.kind.needsResponse() {
			c.Fail("a READ or atomic in flight ends at PSN %#x, which no request has", e)
			return
		}
		last = e
	}
	r.readHead, r.readTail = 0, uint32(copy(r.readEnds, ends))
}

// record describes a work request.
func (s *sendSlot) record(c *record.Codec, q *QP, addressable func(*AddressVector) bool) {
	w := &s.w
	// A request that failed when a part of it had been sent keeps its PSNs: it is tried again, and fails again.
	failed := s.failed && (s.end == s.first || q.state == Err)
	if c.Bool(&failed); c.Reading() {
		s.failed = failed
	}
	c.Bool(&s.executed)
	q.req.manages = q.req.manages || s.executed
	record.Max(c, &w.Status, StatusGeneral, "status")
	record.Num(c, &w.ID)
	record.Num(c, &w.Opcode)
	c.Bool(&w.Signaled)
	c.Bool(&w.Solicited)
	c.Bool(&w.Fence)
	c.Bool(&w.Inline)
	c.Fixed(w.Imm[:])
	record.Num(c, &w.InvKey)
	record.Num(c, &w.RemoteVA)
	record.Num(c, &w.RKey)
	record.Num(c, &w.Compare)
	record.Num(c, &w.SwapAdd)
	record.Num(c, &w.Flush.Placement)
	record.Num(c, &w.Flush.Selectivity)
	record.Num(c, &w.FlushLen)
	record.Num(c, &w.Length)
	w.Manage.record(c)
	w.SGEs = recordSGEs(c, w.SGEs, q.cfg.MaxSendSGE)
	n := c.Len(len(w.InlineData), q.cfg.MaxInline, "bytes of inline data")
	if c.Reading() {
		w.InlineData = w.InlineData[:n]
	}
	c.Fixed(w.InlineData)
	if q.typ.class() == classUD {
		w.AV.record(c, addressable)
		record.Max(c, &w.RemoteQPN, psnMask, "remote QP number")
		record.Num(c, &w.QKey)
	}
	if !c.Reading() || s.failed {
		return
	}
	switch sum := sumSGEs(w.SGEs); {
	case s.executed && w.Opcode.info().kind != kindManage:
		c.Fail("send request with operation %d has been executed here", w.Opcode)
	case !w.Inline && len(w.SGEs) > 0 && w.Length != sum:
		c.Fail("send request of %d bytes with segments of %d", w.Length, sum)
	case q.typ.class() == classUD && w.AV.DGID == [16]byte{}:
		c.Fail("datagram without an address")
	}
}

// record describes the operands of a memory management request.
func (m *Manage) record(c *record.Codec) {
	record.Num(c, &m.Key)
	record.Num(c, &m.NewKey)
	record.Num(c, &m.Region)
	record.Num(c, &m.Access)
	record.Num(c, &m.VA)
	record.Num(c, &m.Length)
	record.Num(c, &m.List)
	record.Num(c, &m.NPages)
	record.Num(c, &m.Offset)
	record.Num(c, &m.PageShift)
}

// recordSGEs describes segments; when reading, into the storage of s, which has room for most.
func recordSGEs(c *record.Codec, s []SGE, most int) []SGE {
	n := c.Len(len(s), most, "segments")
	if c.Reading() {
		s = s[:n]
	}
	for i := range s {
		record.Num(c, &s[i].VA)
		record.Num(c, &s[i].Length)
		record.Num(c, &s[i].Key)
	}
	return s
}

func sumSGEs(s []SGE) (n uint64) {
	for i := range s {
		n += uint64(s[i].Length)
	}
	return n
}

// record describes the responder: since version 4 what changes often is in words.
func (r *responder) record(c *record.Codec, q *QP) {
	failed, empty := r.fatal.syndrome != 0, r.emptyDue.hi != r.emptyDue.lo
	flags := []*bool{&r.dropMessage, &r.haveRecv, &failed, &empty, &r.peerSelective}
	if !c.Since(6) {
		flags = flags[:4]
	}
	w := [...]uint64{r.epsn, r.ackPSN, uint64(r.va), r.off, r.length, record.Pair(uint32(r.rkey), r.msn), r.accepted,
		uint64(r.op) | record.Pack(flags...)<<8}
	c.Words(w[:])
	if c.Reading() {
		r.epsn, r.ackPSN, r.va, r.off, r.length = w[0], w[1], translate.VA(w[2]), w[3], w[4]
		r.rkey, r.msn, r.accepted, r.op = translate.Key(w[5]), uint32(w[5]>>32), w[6], wire.Operation(w[7])
		record.Unpack(w[7]>>8, flags...)
		checkPSN(c, &r.epsn, "expected PSN")
		checkPSN(c, &r.ackPSN, "newest PSN executed")
		if r.op > wire.Write || w[7]>>(8+len(flags)) != 0 || r.off > maxMessage || r.length > maxMessage ||
			q.typ != RC && (failed || empty) {
			c.Fail("operation %#x in progress, with %d of %d bytes", w[7], r.off, r.length)
			return
		}
	}
	if r.haveRecv {
		r.recv.record(c, q)
	}
	if failed {
		r.fatal.record(c)
	}
	if q.typ == RC {
		r.recordResources(c, q)
	}
	if empty {
		r.emptyDue.record(c)
	}
}

// recordNumbers is record before version 4.
func (r *responder) recordNumbers(c *record.Codec, q *QP) {
	recordPSN(c, &r.epsn, "expected PSN")
	recordPSN(c, &r.ackPSN, "newest PSN executed")
	record.Num(c, &r.msn)
	record.Max(c, &r.op, wire.Write, "operation in progress")
	record.Max(c, &r.off, maxMessage, "bytes received")
	record.Num(c, &r.va)
	record.Num(c, &r.rkey)
	record.Max(c, &r.length, maxMessage, "length of a WRITE")
	c.Bool(&r.dropMessage)
	c.Bool(&r.haveRecv)
	r.recv.record(c, q)
	if q.typ == RC { // others have no responses
		r.fatal.record(c)
		record.Num(c, &r.accepted)
		r.recordResources(c, q)
		r.emptyDue.record(c)
	}
}

// check checks what was read.
func (r *responder) check(c *record.Codec) {
	switch {
	case r.ackPSN >= r.epsn:
		c.Fail("PSN %#x was executed, %#x is expected", r.ackPSN, r.epsn)
	case r.op == wire.Write && r.off > r.length:
		c.Fail("%d of %d bytes of a WRITE were received", r.off, r.length)
	case r.haveRecv && r.recv.Length != sumSGEs(r.recv.SGEs):
		c.Fail("receive request of %d bytes with segments of %d", r.recv.Length, sumSGEs(r.recv.SGEs))
	}
}

func (w *RecvWQE) record(c *record.Codec, q *QP) {
	record.Num(c, &w.ID)
	record.Num(c, &w.Length)
	record.Num(c, &w.Token)
	record.Max(c, &w.Status, StatusGeneral, "status")
	w.SGEs = recordSGEs(c, w.SGEs, q.cfg.MaxRecvSGE)
}

func (f *failure) record(c *record.Codec) {
	record.Num(c, &f.syndrome)
	record.Max(c, &f.status, StatusGeneral, "status")
	record.Max(c, &f.event, EventLastWQE, "event")
	record.Num(c, &f.psn)
}

// recordResources describes the READs and atomics that may be repeated, newest first.
func (r *responder) recordResources(c *record.Codec, q *QP) {
	slots := uint64(r.depth)
	if c.Reading() && r.accepted > maxPSN {
		c.Fail("%d READs and atomics accepted", r.accepted)
	}
	known := 0 // fewer than there is room for if their number was raised lately
	for !c.Reading() && uint64(known) < min(r.accepted, slots) && r.resource(r.accepted-1-uint64(known)).op != 0 {
		known++
	}
	known = c.Len(known, int(min(r.accepted, slots)), "READs and atomics")
	end := r.epsn
	for i := uint64(1); i <= uint64(known) && c.Err() == nil; i++ {
		o := r.resource(r.accepted - i)
		o.record(c)
		if !c.Reading() || c.Err() != nil {
			continue
		}
		if o.end > end || !o.consistent(q.mtu) {
			c.Fail("READ or atomic %d with PSNs %#x to %#x, responses %#x, %#x, %#x, %#x: before %#x", o.op, o.first, o.end,
				o.start, o.next, o.stop, o.sentEnd, end)
		}
		if end = o.first; o.pending {
			r.pending++
		}
	}
}

// record describes the set.
func (o *psnSet) record(c *record.Codec) {
	n := o.hi - o.lo
	record.Max(c, &n, psnSetSpan, "span of PSNs")
	if n == 0 {
		return
	}
	recordPSN(c, &o.lo, "first PSN of a set")
	for i := range o.bits {
		record.Num(c, &o.bits[i])
	}
	if c.Reading() {
		o.hi = o.lo + n
	}
}

func (o *resource) record(c *record.Codec) {
	if c.Since(4) {
		flags := [...]*bool{&o.behindSend, &o.ackDue, &o.pending}
		w := [...]uint64{o.first, o.end, o.start, o.next, o.stop, o.sentEnd, uint64(o.va), o.length, o.value,
			uint64(o.op) | record.Pack(flags[:]...)<<8 | uint64(o.key)<<32}
		c.Words(w[:])
		if !c.Reading() {
			return
		}
		*o = resource{first: w[0], end: w[1], start: w[2], next: w[3], stop: w[4], sentEnd: w[5], va: translate.VA(w[6]),
			length: w[7], value: w[8], op: wire.Operation(w[9]), key: translate.Key(w[9] >> 32)}
		if record.Unpack(w[9]>>8, flags[:]...); o.length > maxMessage {
			c.Fail("a READ of %d bytes", o.length)
		}
		return
	}
	record.Num(c, &o.op)
	for _, psn := range []*uint64{&o.first, &o.end, &o.start, &o.next, &o.stop, &o.sentEnd} {
		record.Num(c, psn)
	}
	record.Num(c, &o.va)
	record.Num(c, &o.key)
	record.Max(c, &o.length, maxMessage, "length of a READ")
	record.Num(c, &o.value)
	c.Bool(&o.behindSend)
	c.Bool(&o.ackDue)
	c.Bool(&o.pending)
}

// consistent reports whether the PSNs of a resource that was read are those of its operation.
func (o *resource) consistent(mtu uint32) bool {
	n := uint64(1)
	switch o.op {
	case wire.ReadRequest:
		n = packets(o.length, mtu)
	case wire.CompareSwap, wire.FetchAdd:
	default:
		return false
	}
	ordered := o.first <= o.start && o.start <= o.next && o.next <= o.stop && o.stop <= o.end
	return o.first >= psnBase-psnHalf && o.end == o.first+n && ordered && (!o.pending || o.next < o.stop) &&
		o.sentEnd <= o.end
}
