// Side: data

package hca

import (
	"sync/atomic"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/journal"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/translate"
)

// A QP has an index and a number. The index is the place in dataSide.qps and the doorbell slot; indices are dense, so
// that doorbells are few words of memory. The number is random, so that it cannot be predicted (TR-3, TR-4); its low
// bits are the place in dataSide.numbers. 0xffffff is the multicast QP number (IBTA
// 10.5). QP 0 does not exist with Ethernet, QP 1 is the GSI QP (IBTA annex A16).
const (
	qpIndexes    = 1 << 16
	qpIndexMask  = qpIndexes - 1
	gsiQPN       = 1
	firstQPIndex = 2
	mcastQPN     = 0xffffff // of 24 bits
)

// qp is a queue pair: rings and memory on this side, the transport's state in t.
// It implements roce.Adapter. After it is published all fields that change belong to
// its engine's loop.
type qp struct {
	dev      *dataSide
	engine   *engine
	n        uint32 // QP number
	index    int    // index in dataSide.qps, doorbell slot
	typ      roce.Type
	pd       translate.PD
	windowPD translate.PD // domain of the type 2B memory windows that it bound

	privileged bool // RA-2: may use abi.DMALKey
	sigAll     bool
	maxSendSGE int
	maxRecvSGE int
	maxInline  int

	sq, rq   workRing
	hasRQ    bool
	srq      *srq
	scq, rcq *cq

	t          *roce.QP
	own        *counters // nil: the QP counts in its engine's
	timer      *loop.Timer
	localRoute localRoute

	deadline int64 // of the transport's timer
	paceAt   int64 // reserved time of the next send request; 0: none (pace.go)

	path     vswitch.Path                 // RC, UC: to the peer (MT-5)
	patience atomic.Uint32                // RC: wire.Patience of the peer as connection management shows it
	source   atomic.Pointer[sourceFilter] // nil: accepts no packet

	touched   bool          // in engineJournal.touched
	recorded  bool          // in engineJournal.qps
	unshown   bool          // in engineJournal.shown
	past      []pastAtomic  // executed by the previous process
	stored    *journal.Word // in the journal: see Stored; nil: there is none
	scheduled bool          // on the engine's run list
	next      *qp
	running   bool // within Run: the SQ's consumer index is written when it ends
	failing   bool // enters the error state at the next turn
	closed    bool // destroyed

	bellNode     eventNode          // of a moved QP: doorbells rung on its first engine
	waiters      [2]faultWaiter     // by roce.Side: faults
	lastFault    translate.MissKind // of the responder
	kept         []*frame.Buf       // UC and UD: received again when their page is there
	heldFrames   int                // frames in the reorder queues
	redelivering bool               // the first of them is being received again
	draining     bool               // it waits for its invalidation to complete (manage.go)
	drainAt      int64              // when that was last checked

	// Completions whose consumer index could not be written yet: the page of the
	// SQ's header is absent, and a program that polls a completion expects its slot to be free.
	unpostedCQEs []abi.WC

	asyn    eventNode
	scratch []byte // one element of SQ or RQ
	ah      [abi.SizeAH]byte
	wc      abi.WC
}

var _ roce.Adapter = (*qp)(nil)

// run runs the transport for one turn. True: it has more work.
func (q *qp) run(now int64, budget int) bool {
	q.engine.touch(q)
	if q.failing {
		q.toErr(now)
	}
	defer q.engine.endLocal()
	waits := false
	if q.draining {
		waits = !q.drainDone(now)
		if q.engine.journal != nil {
			q.engine.settle() // what was received is acknowledged after its commit
		}
	}
	if q.t.State() == roce.Err {
		budget = max(budget/flushCost, 1)
	}
	q.running = true
	more := q.t.Run(now, budget)
	q.running = false
	if q.engine.journal == nil {
		q.publishSend()
		q.publishRecv()
	}
	return more || waits
}

// fail sends the QP to the error state at its next turn, because the caller may be
// inside the transport.
func (q *qp) fail(why string) {
	if q.failing || q.closed || q.t.State() == roce.Err || q.t.State() == roce.Reset {
		return
	}
	q.dev.warn("queue pair failed", "qp", q.n, "reason", why)
	q.failing = true
	q.engine.schedule(q)
}

// toErr sends the QP to the error state. The caller is not inside the transport.
func (q *qp) toErr(now int64) {
	q.failing = false
	if err := q.t.Modify(now, &roce.Attr{State: roce.Err}, roce.MaskState); err == nil {
		q.Event(roce.EventFatal)
	}
}

// ringMiss handles a miss on ring memory: absent for now (PF-12), or not guest memory.
func (q *qp) ringMiss(which roce.Side, what string, m translate.Miss) roce.Fetch {
	if m.Fault() {
		return q.ringFault(which, m)
	}
	q.fail(what + " is not in guest memory")
	return roce.FetchEmpty
}

// Completions that wait for the SQ's consumer index. A flush would complete all requests of a ring meanwhile; so none
// is fetched once mayPostpone wait. Those that the transport has under way by then, at most as many, still complete.
const (
	mayPostpone = 64
	maxUnposted = 2 * mayPostpone
)

// FetchSend implements roce.Adapter.
func (q *qp) FetchSend(seq uint32, w *roce.WQE) roce.Fetch {
	if len(q.unpostedCQEs) >= mayPostpone {
		return roce.FetchEmpty // postUnposted schedules the QP
	}
	if q.sq.have == 0 {
		n, m, err := q.sq.posted()
		switch {
		case !m.OK():
			return q.ringMiss(roce.Requester, "send queue", m)
		case err != nil:
			q.fail("send queue: " + err.Error())
			return roce.FetchEmpty
		case n == 0:
			return roce.FetchEmpty
		}
	}
	// Flushed requests are not paced: they are never sent.
	if p := q.dev.pace; p != nil && q.t.State() == roce.RTS && !q.mayFetch(p) {
		return roce.FetchEmpty
	}
	w.Seq = seq
	return q.fetchSend(w)
}

// CompleteSend implements roce.Adapter. The consumer index is written first: a program
// that polls the completion may post again at once.
func (q *qp) CompleteSend(w *roce.WQE, c *roce.Completion) {
	q.sq.release()
	quiet := !w.Signaled && c.Status == roce.StatusSuccess
	if quiet && q.running {
		return // at the end of the turn, or with the next completion
	}
	journaled := q.engine.journal != nil // the index moves after the commit
	there := journaled || q.publishSend()
	if quiet {
		return
	}
	q.wc = abi.WC{
		ID: w.ID, Status: uint32(c.Status), Opcode: uint32(c.Opcode), ByteLen: c.ByteLen, QPN: q.n, PortNum: 1,
		VendorErr: vendorErr(c.Status),
	}
	if !there {
		q.unpostedCQEs = append(q.unpostedCQEs, q.wc) // FetchSend bounds them
		return
	}
	q.postSend(&q.wc)
}

func (q *qp) postSend(wc *abi.WC) {
	q.complete(q.scq, wc, wc.Status != uint32(roce.StatusSuccess), true)
}

// publishSend writes the SQ's consumer index, if it is stale, and then the completions that
// waited for it. False: its page is absent, and a fault was raised.
func (q *qp) publishSend() bool {
	if !q.sq.stale {
		return true
	}
	switch m := q.sq.publish(); {
	case m.Fault():
		q.waiters[roce.Requester].raiseHost(m, true, true)
		return false
	case !m.OK():
		q.fail("send queue is not in guest memory")
	}
	q.postUnposted()
	return true
}

// postUnposted posts the completions that waited for the SQ's consumer index.
func (q *qp) postUnposted() {
	q.sq.stale = false
	for i := range q.unpostedCQEs {
		q.postSend(&q.unpostedCQEs[i])
	}
	if len(q.unpostedCQEs) >= mayPostpone {
		q.engine.schedule(q) // FetchSend has refused requests
	}
	q.unpostedCQEs = q.unpostedCQEs[:0]
}

// vendorErr returns the vendor error of failed completions; its values are specific to vnicd.
func vendorErr(s roce.Status) uint32 {
	if s == roce.StatusSuccess {
		return 0
	}
	return 0x764e00 | uint32(s)
}

// FetchRecv implements roce.Adapter.
func (q *qp) FetchRecv(w *roce.RecvWQE) roce.Fetch {
	if q.srq != nil {
		q.engine.touchSRQ(q.srq)
		f, m := q.srq.fetch(w, q.Journaled())
		if f == roce.FetchFault {
			return q.ringFault(roce.Responder, m)
		}
		return f
	}
	if !q.hasRQ {
		return roce.FetchEmpty
	}
	if q.rq.have == 0 {
		n, m, err := q.rq.posted()
		switch {
		case !m.OK():
			return q.ringMiss(roce.Responder, "receive queue", m)
		case err != nil:
			q.fail("receive queue: " + err.Error())
			return roce.FetchEmpty
		case n == 0:
			return roce.FetchEmpty
		}
	}
	f, m := fetchRecv(&q.rq, q.scratch, q.maxRecvSGE, w, q.Journaled())
	if !m.OK() {
		return q.ringMiss(roce.Responder, "receive queue", m)
	}
	return f
}

// CompleteRecv implements roce.Adapter.
func (q *qp) CompleteRecv(w *roce.RecvWQE, c *roce.Completion) {
	q.wc = abi.WC{
		ID: w.ID, Status: uint32(c.Status), Opcode: uint32(c.Opcode), ByteLen: c.ByteLen, QPN: q.n, SrcQP: c.SrcQP,
		Flags: c.Flags & (roce.FlagGRH | roce.FlagImm), SL: q.wcSL(c), PortNum: 1, VendorErr: vendorErr(c.Status),
	}
	switch {
	case c.Flags&roce.FlagImm != 0:
		q.wc.Ex = c.Imm
	case c.Flags&roce.FlagInv != 0:
		q.wc.Flags |= abi.WCFlagsInvalidate
		le.PutUint32(q.wc.Ex[:], uint32(c.InvKey))
	}
	q.complete(q.rcq, &q.wc, c.Solicited || c.Status != roce.StatusSuccess, false)
}

// wcSL is the service level of a receive completion. RoCE has none (IBTA A16.4), but
// a UD completion must report the packet type (A17.4.5.1), for which ibv_wc has no
// field. Processes get it here, encoded as ConnectX does, which programs rely on (UCX up to
// 1.18 otherwise takes packets for foreign ones). A kernel gets the 802.1p priority.
func (q *qp) wcSL(c *roce.Completion) uint8 {
	switch {
	case q.privileged || c.Flags&roce.FlagGRH == 0:
		return c.SL
	case c.RoCEv1:
		return abi.WCSLRoCEv1
	case c.IPv4:
		return abi.WCSLIPv4
	}
	return abi.WCSLIPv6
}

// phys reports whether a local segment skips stage one: the reserved key of a
// privileged QP names guest-physical memory (RA-1, RA-2); elsewhere it is no key.
func (q *qp) phys(k translate.Key) bool { return k == abi.DMALKey && q.privileged }

// Gather implements roce.Adapter.
func (q *qp) Gather(dst []byte, w *roce.WQE, off uint64) translate.Miss {
	for i := range w.SGEs {
		s := &w.SGEs[i]
		if off >= uint64(s.Length) {
			off -= uint64(s.Length)
			continue
		}
		n := min(uint64(len(dst)), uint64(s.Length)-off)
		if m := q.readLocal(dst[:n], s, off); !m.OK() {
			return m
		}
		if dst = dst[n:]; len(dst) == 0 {
			return translate.Miss{}
		}
		off = 0
		q.engine.steps++
	}
	if len(dst) > 0 {
		return translate.Miss{Kind: translate.OutOfRange, Len: uint64(len(dst))}
	}
	return translate.Miss{}
}

func (q *qp) readLocal(dst []byte, s *roce.SGE, off uint64) translate.Miss {
	va, ok := s.VA.Add(off)
	if !ok {
		return translate.Miss{Kind: translate.OutOfRange, Key: s.Key, Where: translate.Where{VA: s.VA}, Len: uint64(s.Length)}
	}
	if q.phys(s.Key) {
		return q.engine.space.Read(dst, translate.PA(va))
	}
	return q.dev.vm.Read(dst, s.Key, q.pd, va, translate.LocalRead)
}

// Scatter implements roce.Adapter.
func (q *qp) Scatter(sg []roce.SGE, off uint64, src []byte) translate.Miss {
	for i := range sg {
		s := &sg[i]
		if off >= uint64(s.Length) {
			off -= uint64(s.Length)
			continue
		}
		n := min(uint64(len(src)), uint64(s.Length)-off)
		if m := q.writeLocal(s, off, src[:n]); !m.OK() {
			return m
		}
		if src = src[n:]; len(src) == 0 {
			return translate.Miss{}
		}
		off = 0
	}
	if len(src) > 0 {
		return translate.Miss{Kind: translate.OutOfRange, Len: uint64(len(src))}
	}
	return translate.Miss{}
}

func (q *qp) writeLocal(s *roce.SGE, off uint64, src []byte) translate.Miss {
	va, ok := s.VA.Add(off)
	if !ok {
		return translate.Miss{Kind: translate.OutOfRange, Key: s.Key, Where: translate.Where{VA: s.VA}, Len: uint64(s.Length)}
	}
	if q.phys(s.Key) {
		return q.engine.space.Write(translate.PA(va), src)
	}
	return q.dev.vm.Write(s.Key, q.pd, va, src, translate.LocalWrite)
}

// CheckRemote implements roce.Adapter. The reserved key is never an R_Key (RA-3). A key
// of another domain may be a window of this QP's own (IBTA 10.6.7, type 2B).
func (q *qp) CheckRemote(key translate.Key, va translate.VA, n uint64, need translate.Access) translate.Miss {
	m := q.dev.vm.Check(key, q.pd, va, n, need)
	if m.Kind == translate.BadPD {
		m = q.dev.vm.Check(key, q.windowPD, va, n, need)
	}
	return m
}

// FlushRemote implements roce.Adapter.
func (q *qp) FlushRemote(key translate.Key, va translate.VA, n uint64, whole bool,
	need translate.Access) translate.Miss {
	if !whole {
		return q.CheckRemote(key, va, n, need)
	}
	m := q.dev.vm.CheckKey(key, q.pd, need)
	if m.Kind == translate.BadPD {
		m = q.dev.vm.CheckKey(key, q.windowPD, need)
	}
	return m
}

// ReadRemote implements roce.Adapter.
func (q *qp) ReadRemote(dst []byte, key translate.Key, va translate.VA) translate.Miss {
	m := q.dev.vm.Read(dst, key, q.pd, va, translate.RemoteRead)
	if m.Kind == translate.BadPD {
		m = q.dev.vm.Read(dst, key, q.windowPD, va, translate.RemoteRead)
	}
	return m
}

// WriteRemote implements roce.Adapter.
func (q *qp) WriteRemote(key translate.Key, va translate.VA, src []byte) translate.Miss {
	m := q.dev.vm.Write(key, q.pd, va, src, translate.RemoteWrite)
	if m.Kind == translate.BadPD {
		m = q.dev.vm.Write(key, q.windowPD, va, src, translate.RemoteWrite)
	}
	return m
}

// Stored implements roce.Adapter.
func (q *qp) Stored(psn uint64) {
	if q.stored != nil {
		q.stored.Store(psn)
		point()
	}
}

// AtomicRemote implements roce.Adapter. It is atomic with respect to the guest's own
// processors too (IBTA 9.4.5, IB_ATOMIC_GLOB).
func (q *qp) AtomicRemote(key translate.Key, va translate.VA, op roce.AtomicOp, compare, swapAdd uint64) (uint64,
	translate.Miss) {
	p, m := q.dev.vm.Uint64(key, q.pd, va, op.Needs())
	if m.Kind == translate.BadPD {
		p, m = q.dev.vm.Uint64(key, q.windowPD, va, op.Needs())
	}
	if !m.OK() {
		return 0, m
	}
	switch {
	case op == roce.AtomicWrite: // may be repeated
	case q.Journaled():
		return q.loggedAtomic(p, key, va, op, compare, swapAdd), m
	}
	switch op {
	case roce.AtomicCompareSwap:
		return translate.CompareSwap(p, compare, swapAdd), m
	case roce.AtomicFetchAdd:
		return translate.FetchAdd(p, swapAdd), m
	}
	p.Store(swapAdd)
	return 0, m
}

// GetBuf implements roce.Adapter.
func (q *qp) GetBuf() *frame.Buf { return q.dev.pool.Get() }

// Transmit implements roce.Adapter.
func (q *qp) Transmit(b *frame.Buf) {
	defer b.Free() // also if the receiver's memory vanished
	q.dev.transmit(q, b)
}

// ArmTimer implements roce.Adapter.
func (q *qp) ArmTimer(deadline int64) {
	q.deadline = deadline
	q.arm()
}

// Affordable implements roce.Adapter.
func (q *qp) Affordable(deadline int64) int64 { return q.engine.loop.Affordable(deadline) }

// Used implements roce.Adapter.
func (q *qp) Used() { q.engine.loop.Used() }

// arm sets the timer to the earliest deadline.
func (q *qp) arm() {
	at := q.deadline
	if q.paceAt != 0 && (at == 0 || q.paceAt < at) {
		at = q.paceAt
	}
	if at == 0 {
		q.timer.Stop()
		return
	}
	q.timer.Arm(at)
}

// onTimer is the timer's function.
func (q *qp) onTimer(now int64) {
	if q.closed {
		return
	}
	t, ok := q.engine.enter()
	if !ok {
		return
	}
	defer q.engine.leave(t)
	if q.paceAt != 0 && q.paceAt <= now {
		q.engine.schedule(q)
	}
	q.deadline = 0
	q.engine.touch(q)
	q.engine.current = q
	q.t.Timer(now) // arms the timer again if a deadline remains
	q.engine.current = nil
	if q.deadline == 0 && q.paceAt > now {
		q.arm()
	}
}

// Schedule implements roce.Adapter.
func (q *qp) Schedule() { q.engine.schedule(q) }

var eventTypes = [...]abi.EventType{
	roce.EventFatal: abi.EventQPFatal, roce.EventReqErr: abi.EventQPReqErr, roce.EventAccessErr: abi.EventQPAccessErr,
	roce.EventCommEst: abi.EventQPCommEst, roce.EventSQDrained: abi.EventSQDrained, roce.EventLastWQE: abi.EventQPLastWQE,
}

// Event implements roce.Adapter.
func (q *qp) Event(k roce.EventKind) {
	q.dev.async.post(&q.asyn, 1<<eventTypes[k])
}

// close destroys the QP; loop only. Afterwards no loop finds it, and this loop has no reference to it.
func (q *qp) close() {
	q.dev.withdraw(q)
	q.engine.settleNow() // while it may use its queues
	q.closed = true
	q.dropKept(len(q.kept))
	q.t.Close()
	q.countIn(false)
	q.unbind()
	q.timer.Stop()
	q.engine.unschedule(q)
	q.engine.qps--
}

// recvSGEs is the maximum number of segments of a receive request of the QP.
func (q *qp) recvSGEs() int {
	if q.srq != nil {
		return q.srq.maxSGE
	}
	return q.maxRecvSGE
}

// scratchSize is the size of the largest element of its rings.
func (q *qp) scratchSize() int {
	return max(sendWQESize(q.maxSendSGE, q.maxInline), recvWQESize(q.recvSGEs()))
}

// transport returns the configuration of the transport's part of the QP, which counts in stats.
func (q *qp) transport(stats *roce.Stats) roce.Config {
	d := q.dev
	return roce.Config{
		QPN: q.n, Type: q.typ, MaxSendSGE: q.maxSendSGE, MaxRecvSGE: q.recvSGEs(), MaxInline: q.maxInline,
		HasSRQ: q.srq != nil, MTU: d.portMTU(), MaxRdAtomic: d.rdAtomic, Stats: stats, ECN: d.options.ECN,
		SelectiveRepeat: d.options.SelectiveRepeat,
	}
}

// init completes a QP whose numbers, rings and capabilities are set; start follows.
func (q *qp) init() {
	q.scratch = make([]byte, q.scratchSize())
	q.asyn.init(q.n, nodeQP)
	for i := range q.waiters {
		q.waiters[i].init(q, roce.Side(i))
	}
	q.bellNode.init(q.n, nodeAnswers)
	q.bellNode.wake = func(uint32) { q.engine.schedule(q) }
}

// start creates the transport's part and publishes the QP; on its engine.
func (q *qp) start() error {
	d := q.dev
	if !q.engine.armed {
		return refuse(abi.StatusInvalid, "engine %d has no doorbells; SET_DOORBELLS must come first", q.engine.id)
	}
	if err := q.adoptIndices(); err != nil {
		return err
	}
	q.timer = q.engine.loop.NewTimer(q.onTimer, loop.Name("hca qp timer"), q.engine.faultOption(),
		loop.Metered(&q.engine.dev.meter))
	q.t = roce.NewQP(q.transport(&q.engine.stats.Stats), q)
	d.publish(q)
	q.engine.qps++
	q.engine.db.join(q.index)
	return nil
}

// adoptIndices reads the indices of the QP's rings.
func (q *qp) adoptIndices() error {
	if m := q.sq.start(); !m.OK() {
		return &faultError{what: "send queue", miss: m}
	}
	if q.hasRQ {
		if m := q.rq.start(); !m.OK() {
			return &faultError{what: "receive queue", miss: m}
		}
	}
	return nil
}

// modify changes attributes; on the QP's engine.
func (q *qp) modify(a *roce.Attr, mask roce.Mask) error {
	q.engine.touch(q)
	err := q.t.Modify(q.engine.loop.Now(), a, mask)
	if err == nil {
		if mask&roce.MaskState != 0 && a.State <= roce.RTR { // a connection begins or ends, with other PSNs
			q.past = nil
			q.Stored(0)
		}
		q.attributesChanged(mask)
	}
	return err
}

// discard empties the work queues (IBTA 10.3.1: RESET drops what was posted).
func (q *qp) discard() error {
	q.engine.touch(q)
	q.failing, q.draining = false, false
	q.dropKept(len(q.kept))
	if m := q.sq.discard(); !m.OK() {
		return &faultError{what: "send queue", miss: m}
	}
	q.postUnposted()
	if q.hasRQ {
		if m := q.rq.discard(); !m.OK() {
			return &faultError{what: "receive queue", miss: m}
		}
	}
	return nil
}
