package roce

import (
	"fmt"
	"math/bits"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/roce/recovery"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Defaults and bounds of Config.
const (
	defaultOutstanding = 64
	defaultWindow      = 256
	goBackNWindow      = 128 // to peers other than vnicd: a loss resends all of it; as many as Linux rxe has in flight
	defaultRdAtomic    = 16
	maxRdAtomic        = 128
	maxWindow          = 4096
	minWindow          = 8
	maxMessage         = 1 << 31    // IBTA 9.7.7: largest RC and UC message
	rnrForever         = 7          // rnr_retry without limit (IBTA 9.7.5.2.8)
	GSIQKey            = 0x80010000 // Q_Key of every QP 1 (IBTA 10.2.5)
)

// QP is one queue pair. All methods must be called from the same loop. None of them blocks, and only Modify allocates.
type QP struct {
	cfg Config

	queues Queues
	memory Memory
	link   Link
	sched  Scheduler

	typ   Type
	state State
	mtu   uint32 // path MTU, bytes
	stats *Stats

	now       int64
	scheduled bool  // Schedule was called, and Run has not been since
	timerAt   int64 // deadline of the scheduler's timer; 0: none
	closed    bool
	commEst   bool // EventCommEst raised
	draining  bool // SQD entered, event or query outstanding
	lastWQE   bool // EventLastWQE raised

	attr       Attr
	attrRecord []byte        // as a context has it; nil: not known
	tx         wire.Template // RC, UC: to the peer

	req      requester    // fetches and sends WQEs (requester.go)
	recovery lossRecovery // detects losses and resends (recovery.go, selective.go)
	resp     responder    // executes the peer's requests (responder.go)
	faults   faultWaits   // operations that wait for absent pages (fault.go)
	frozen   frozen       // the VM is paused (frozen.go)

	flushAt    int64 // Err: when to look again for posted receives
	flushDelay int64
}

// NewQP returns a QP in state Reset. Zero fields of cfg take their defaults; values out of range are clamped.
func NewQP(cfg Config, a Adapter) *QP {
	cfg.complete()
	q := &QP{cfg: cfg, queues: a, memory: a, link: a, sched: a, typ: cfg.Type, stats: cfg.Stats}
	if q.stats == nil {
		q.stats = new(Stats)
	}
	q.reset()
	return q
}

// complete fills in defaults and clamps what is out of range.
func (cfg *Config) complete() {
	def := func(v *int, d, lo, hi int) {
		if *v == 0 {
			*v = d
		}
		*v = min(max(*v, lo), hi)
	}
	def(&cfg.MaxOutstanding, defaultOutstanding, 1, 1024)
	def(&cfg.Window, defaultWindow, minWindow, maxWindow)
	def(&cfg.MTU, 4096, 256, 4096)
	def(&cfg.MaxRdAtomic, defaultRdAtomic, 1, maxRdAtomic)
	if cfg.Type == UD || cfg.Type == GSI || cfg.Type == UC {
		cfg.MaxOutstanding = 1 // unacknowledged: one WQE at a time
	}
	cfg.MaxOutstanding = 1 << bits.Len(uint(cfg.MaxOutstanding-1))
}

// Footprint bounds the bytes that a QP with this configuration occupies in any state, without its Stats.
func (cfg Config) Footprint() uint64 {
	cfg.complete()
	n := cfg.MaxOutstanding
	size := translate.AllocatedFor[QP](1) + translate.AllocatedFor[sendSlot](n) +
		translate.AllocatedFor[SGE](n*cfg.MaxSendSGE) + translate.Allocated(uint64(n*cfg.MaxInline)) +
		translate.AllocatedFor[SGE](cfg.MaxRecvSGE)
	if cfg.Type == RC {
		psns := 1 << ceilLog2(cfg.Window+readChunk)
		size += 2*translate.AllocatedFor[uint64](1<<ceilLog2(cfg.MaxRdAtomic)) +
			translate.AllocatedFor[resource](cfg.MaxRdAtomic) + recovery.Footprint(psns) +
			recovery.QueueFootprint(min(psns, responseSpan)) + recovery.QueueFootprint(reorderSpan)
	}
	return size
}

// reset returns to the condition of a new QP. A fault that is outstanding stays so.
func (q *QP) reset() {
	q.state = Reset
	q.attr, q.attrRecord = Attr{AV: AddressVector{VLAN: NoVLAN}}, nil
	q.mtu = uint32(q.cfg.MTU)
	q.commEst, q.draining, q.lastWQE = false, false, false
	q.flushAt, q.flushDelay = 0, 0
	q.clearScoreboard()
	q.req.reset()
	q.recovery.reset(min(q.cfg.Window, goBackNWindow))
	q.resp.reset(q.link)
	q.faults = faultWaits{raised: q.faults.raised}
	q.frozen = frozen{}
	if q.timerAt != 0 {
		q.timerAt = 0
		q.sched.ArmTimer(0)
	}
}

// Header returns the headers that all packets of an RC or UC QP begin with, Ethernet to UDP, without their lengths; nil
// if the QP has no path yet.
func (q *QP) Header() []byte {
	if q.typ.class() == classUD || q.attr.AV.DGID == [16]byte{} {
		return nil
	}
	return q.tx.Bytes()
}

// QPN returns the QP's number.
func (q *QP) QPN() uint32 { return q.cfg.QPN }

// Destination returns the address and the QP number that an RC or UC QP sends to. The address is read-only.
func (q *QP) Destination() (*AddressVector, uint32) { return &q.attr.AV, q.attr.DestQPN }

// MTU returns the path MTU in bytes.
func (q *QP) MTU() uint32 { return q.mtu }

// State returns the current state.
func (q *QP) State() State { return q.state }

// Stats returns the counters (shared with other QPs if Config.Stats was given).
func (q *QP) Stats() *Stats { return q.stats }

// Query fills in all attributes (IBTA 11.2.5.3).
func (q *QP) Query(a *Attr) {
	*a = q.attr
	a.State, a.CurState = q.state, q.state
	a.SQDraining = q.state == SQD && q.req.head != q.req.tail
	a.SQPSN = uint32(q.req.nxt & psnMask)
	a.RQPSN = uint32(q.resp.epsn & psnMask)
}

// Progress says how far a QP is in its work: of one that stands still, on which side.
type Progress struct {
	Requests  int    // send requests that were fetched and have not completed
	Unacked   uint64 // PSNs that were sent and not acknowledged
	Responses int    // READs and atomics of the peer that are not answered completely
	NotReady  bool   // the peer's receiver is not ready: the requester waits
	Refused   bool   // requests were refused: the responder waits for the one with the expected PSN
}

// Progress returns the QP's progress.
func (q *QP) Progress() Progress {
	return Progress{
		Requests: int(q.req.tail - q.req.head), Unacked: q.req.sent - q.req.una, Responses: q.resp.pending,
		NotReady: q.req.rnrUntil != 0, Refused: q.resp.nakSent,
	}
}

// Close ends the QP. It completes nothing, and the adapter is not called again.
func (q *QP) Close() {
	q.resp.reorder.drop(q.link)
	q.clearScoreboard()
	q.closed = true
	q.state = Reset
	q.req.slots = nil
}

// Modify changes attributes and state (IBTA 11.2.5.2, table of 10.3.1). If it returns an error, a *ModifyError, nothing
// was changed.
func (q *QP) Modify(now int64, a *Attr, mask Mask) error {
	q.now = now
	from, to := q.state, q.state
	if mask&MaskState != 0 {
		to = a.State
	}
	refuse := func(reason string) error {
		return &ModifyError{QPN: q.cfg.QPN, Type: q.typ, From: from, To: to, Reason: reason}
	}
	reason := ""
	switch {
	case q.closed:
		reason = "the QP is closed"
	case mask&MaskCurState != 0 && a.CurState != from:
		reason = fmt.Sprintf("cur_qp_state is %v", a.CurState)
	default:
		if reason = checkTransition(q.typ, from, to, mask); reason == "" && to != Reset && to != Err {
			reason = q.cfg.checkValues(a, mask)
		}
	}
	if reason != "" {
		return refuse(reason)
	}
	if from == Reset && to != Reset && q.req.slots == nil {
		q.allocate() // flushing in ERROR fetches WQEs, too
	}
	switch to {
	case Reset:
		q.reset()
		return nil
	case Err:
		q.toErr()
		return nil
	}
	if mask&MaskAV != 0 && (q.typ == RC || q.typ == UC) {
		// The peer's QP number only varies the UDP source port, so it may follow later.
		remote := q.attr.DestQPN
		if mask&MaskDestQPN != 0 {
			remote = a.DestQPN
		}
		av := a.AV
		if q.usesECN(&av) {
			av.TrafficClass = av.TrafficClass&^header.ECNMask | header.ECT0
		}
		t, err := av.template(q.cfg.QPN, remote)
		if err != nil {
			return refuse(err.Error())
		}
		q.tx = t
	}
	q.applyAttr(a, mask)
	q.state = to
	switch {
	case from == SQD && to == SQD, from == to:
	case to == RTS:
		q.draining = false
		q.wake()
	case to == SQD:
		q.draining = true
		q.checkDrained()
	}
	q.armTimer()
	return nil
}

// applyAttr copies the attributes that mask names and updates the state that depends on them.
func (q *QP) applyAttr(a *Attr, mask Mask) {
	t := &q.attr
	q.attrRecord = nil
	if mask&MaskPKeyIndex != 0 {
		t.PKeyIndex = a.PKeyIndex
	}
	if mask&MaskPort != 0 {
		t.Port = a.Port
	}
	if mask&MaskAccess != 0 {
		t.Access = a.Access
	}
	if mask&MaskQKey != 0 {
		t.QKey = a.QKey
	}
	if mask&MaskPathMTU != 0 {
		t.PathMTU = a.PathMTU
		q.mtu = uint32(mtuBytes(a.PathMTU))
	}
	if mask&MaskTimeout != 0 {
		t.Timeout = a.Timeout
		q.recovery.timeout = timeoutNS(a.Timeout)
	}
	if mask&MaskRetryCnt != 0 {
		t.RetryCnt = a.RetryCnt
		q.recovery.retryLeft = a.RetryCnt
	}
	if mask&MaskRNRRetry != 0 {
		t.RNRRetry = a.RNRRetry
		q.req.rnrLeft, q.req.patience = a.RNRRetry, wire.PatienceEnds
		if a.RNRRetry == rnrForever {
			q.req.patience = wire.PatienceForever
		}
	}
	if mask&MaskMinRNRTimer != 0 {
		t.MinRNRTimer = a.MinRNRTimer
	}
	if mask&MaskMaxRdAtomic != 0 {
		t.MaxRdAtomic = a.MaxRdAtomic
	}
	if mask&MaskMaxDestRdAtomic != 0 {
		t.MaxDestRdAtomic = a.MaxDestRdAtomic
		q.resp.resizeResources(int(a.MaxDestRdAtomic))
	}
	if mask&MaskSQDNotify != 0 {
		t.SQDNotify = a.SQDNotify
	}
	if mask&MaskDestQPN != 0 {
		t.DestQPN = a.DestQPN
	}
	if mask&MaskAV != 0 {
		t.AV = a.AV
	}
	if mask&MaskRQPSN != 0 {
		t.RQPSN = a.RQPSN & psnMask
		q.resp.start(t.RQPSN)
	}
	if mask&MaskSQPSN != 0 {
		t.SQPSN = a.SQPSN & psnMask
		q.req.start(t.SQPSN)
	}
}

// toErr enters the error state, in which Run flushes posted work.
func (q *QP) toErr() {
	if q.state == Err {
		return
	}
	q.state = Err
	q.resp.dropResponses(q.link)
	q.faults.send.clear()
	q.faults.read.clear()
	q.faults.request.clear()
	q.clearScoreboard()
	q.recovery.rtxAt, q.req.rnrUntil, q.req.stallUntil, q.resp.stallUntil = 0, 0, 0, 0
	q.flushDelay = flushDelayMin
	q.wake()
}

// CountIn makes the QP count in stats from now on.
func (q *QP) CountIn(stats *Stats) { q.stats = stats }

// Moved is called first on the loop that the QP has moved to, and arms its timer again.
func (q *QP) Moved(now int64) { q.Timer(now) }

// wake schedules a Run, if none is scheduled.
func (q *QP) wake() {
	if !q.scheduled {
		q.scheduled = true
		q.sched.Schedule()
	}
}

// Run sends responses and requests, or flushes: at most about budget packets or WQEs. It is called after Schedule and
// when the send queue's doorbell has rung. If it returns more, it must be called again soon.
func (q *QP) Run(now int64, budget int) (more bool) {
	if q.closed {
		return false
	}
	q.now = now
	q.scheduled = false
	switch q.state {
	case Reset, Init:
		return false
	case Err:
		more = q.flush(budget)
	default:
		more = q.respond(max(budget/2, 1))
		if q.state != Err {
			switch q.typ {
			case RC:
				more = q.runRC(budget) || more
			case UC:
				more = q.runUC(budget) || more
			default:
				more = q.runUD(budget) || more
			}
			q.checkDrained()
		}
		if q.state == SQE && q.flushSends(&budget) {
			more = true
		}
		if q.state == Err {
			more = true
		}
	}
	q.armTimer()
	if more {
		q.scheduled = true
	}
	return more
}

// Timer is called when the deadline that was passed to ArmTimer has passed.
func (q *QP) Timer(now int64) {
	q.timerAt = 0
	if q.closed {
		return
	}
	q.now = now
	due := func(t *int64) bool {
		if *t == 0 || now < *t {
			return false
		}
		*t = 0
		return true
	}
	if due(&q.req.rnrUntil) || due(&q.req.stallUntil) || due(&q.resp.stallUntil) || due(&q.flushAt) {
		q.wake()
	}
	if due(&q.recovery.scoreboard.CheckAt) {
		q.detectLosses()
	}
	if due(&q.resp.reorder.expiresAt) {
		q.expireRequests()
	}
	if due(&q.recovery.responses.expiresAt) {
		q.recovery.cwnd.OnSilence()
		q.goBack()
	}
	if at := q.recovery.rtxAt; due(&q.recovery.rtxAt) {
		q.retransmitTimeout(now - at)
	}
	q.retryFaults()
	q.armTimer()
}

// armTimer arms the scheduler's timer for the earliest deadline. A timer that is armed for an earlier time is left
// alone: deadlines move back with every acknowledgement, and a spurious call of Timer costs less than rearming each
// time.
func (q *QP) armTimer() {
	var t int64
	for _, d := range [...]int64{
		q.recovery.rtxAt, q.recovery.scoreboard.CheckAt, q.recovery.responses.expiresAt,
		q.req.rnrUntil, q.req.stallUntil, q.resp.stallUntil, q.resp.reorder.expiresAt, q.flushAt,
		q.faults.send.retryAt, q.faults.read.retryAt, q.faults.request.retryAt,
	} {
		if d != 0 && (t == 0 || d < t) {
			t = d
		}
	}
	if t != 0 && (q.timerAt == 0 || t < q.timerAt) {
		q.timerAt = t
		q.sched.ArmTimer(t)
	}
}

// Receive processes a packet for this QP whose headers wire.ParseRoCE has validated and whose ICRC is correct. p and
// its payload are borrowed for the call.
func (q *QP) Receive(now int64, p *wire.RoCE) {
	if q.closed {
		return
	}
	q.now = now
	q.stats.RxPackets++
	q.stats.RxBytes += uint64(len(p.Payload))
	if q.state < RTR || q.state == Err {
		q.drop(DropState)
		return
	}
	if !q.admits(p) {
		return
	}
	if p.TOS&header.ECNMask == header.CE {
		q.receiveMarked(p)
	}
	if p.Info.Op == wire.CNP {
		q.receiveCNP()
		return
	}
	if q.state == RTR && !q.commEst {
		q.commEst = true
		q.sched.Event(EventCommEst)
	}
	switch q.typ {
	case RC:
		q.receiveRC(p)
	case UC:
		q.receiveUC(p)
	default:
		q.receiveUD(p)
	}
	q.armTimer()
}
