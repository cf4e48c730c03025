// Side: data

package hca

import (
	"errors"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

const (
	// inboxFrames bounds the frames that wait for an engine. Senders keep at most a
	// window of packets per QP in flight, so an overflow is a burst to many QPs,
	// which the transport repairs as any loss.
	inboxFrames = 2048
	// A poll serves the QPs of the run list in turn, each with qpBudget packets or work
	// requests, until pollBudget is used up: every VM of a loop, and every QP of a VM,
	// gets its share whatever the others do.
	qpBudget   = 16
	pollBudget = 128
	pollShared = 32 // while other VMs have work for the loop, for their latency
	// pollTurns bounds the QPs served in a poll: those that use none of pollBudget cost time too.
	pollTurns = 64
	// Local copies count against pollBudget too, in units of 4 KiB, and so do flushed
	// requests, because flushing reads a WQE and writes a CQE and must not be cheaper
	// than moving data (make bench ONLY=fair_flood).
	localShift = 12
	flushCost  = 4
	// So do, per stepShift, the segments of a request beyond a packet's first, and the pages that requests register: each
	// is a lookup or more, and a request can have 32 one-byte segments, or 512 pages.
	stepShift = 3
	// At most one notice is outstanding.
	noticeSlots = 2
)

// engine is the device's share of one loop: an engine of the ABI. Fields not
// marked otherwise belong to the loop.
//
// The pipeline of an iteration, in the order of the loop's pollers:
//
//	inbox    frames for QPs of this engine: parse, ICRC, roce.QP.Receive
//	engine     doorbells -> run list -> roce.QP.Run -> WQEs in, frames out, CQEs
//	notices  events for the driver -> event virtqueues
//
// Deliver never calls into a QP: through the switch, a frame that a QP sends may reach
// another QP of the same loop within the same call, and the transport is
// not re-entrant. So every frame goes through an inbox.
type engine struct {
	dev  *dataSide
	id   int // engine number of the ABI
	loop *loop.Loop

	polled  *loop.Polled
	inbox   *loop.Mailbox[*frame.Buf]
	notices *loop.Mailbox[struct{}]
	events  []*eventQueue // fixed; queues served by this engine

	armed         bool // SET_DOORBELLS was executed and the memory is present
	db            doorbells
	dbWatch       *loop.Watch
	onBell        func(slot int)
	onBellCleared func(slot int)

	first, last *qp // run list
	current     *qp // the QP that runs
	local       localTurn
	qps         int // QPs of this engine
	cqSeen      uint64

	answers eventStack // answers to faults: pushed by any thread
	resume  eventList  // collected from answers

	packet       wire.RoCE
	receiving    *frame.Buf           // the frame that is being received
	trainPacket  []byte               // the current packet, if receiving is a train
	trainHeaders [gso.MaxHeaders]byte // the headers of the train's packets
	kept         int                  // frames that QPs keep
	heldFrames   int                  // frames in reorder queues
	keptDrops    uint64               // frames dropped instead of kept

	stats counters         // see counters.go
	past  counters         // what QPs counted apart, up to when it was taken
	apart map[*qp]struct{} // those that do
	steps uint64           // segments and pages, see stepShift

	listRaw [8 * abi.MaxFastReg]byte // a page list, as copied in
	list    [abi.MaxFastReg]translate.PA

	journal       *engineJournal // nil: the device's state does not survive the process
	frozen        bool           // no driver: guest memory is not accessed
	inboxFull     atomic.Uint64  // any thread
	noticePending atomic.Bool    // any thread: a notice is on its way
	space         *translate.Space
}

func newEngine(d *dataSide, id int, loop *loop.Loop) *engine {
	e := &engine{dev: d, id: id, loop: loop, apart: map[*qp]struct{}{}}
	e.onBell, e.onBellCleared = e.bellFound, e.bellCleared
	return e
}

// start attaches the engine to its loop.
func (e *engine) start() {
	fault, meter := e.faultOption(), loop.Metered(&e.dev.meter)
	e.inbox = loop.NewMailbox(e.loop, inboxFrames, e.receive, e.releaseBuf, loop.Name("hca inbox"), fault, meter)
	e.inbox.Weigh((*frame.Buf).Segments)
	e.polled = e.loop.AddPoller(e, loop.Name("hca"), fault, meter)
	e.notices = loop.NewMailbox(e.loop, noticeSlots, e.onNotice, nil, loop.Name("hca events"), fault, meter)
}

// stop detaches the engine from its loop; it has no QP any more.
func (e *engine) stop() {
	e.inbox.Close()
	e.loop.RemovePoller(e)
	e.notices.Close()
}

// faultOption reports memory faults in a handler to the engine.
func (e *engine) faultOption() loop.Option { return loop.OnFault(e.onMemoryFault) }

// onMemoryFault is called when a handler of this engine accessed memory that does not exist. It accesses no guest
// memory itself. If the memory is another VM's (a frame was being written to it), the current QP is scheduled again. If
// it is this guest's, the device stops until a reset: its rings may be half written.
func (e *engine) onMemoryFault(f loop.Fault) {
	q, far := e.current, e.local.peer
	e.current, e.local.peer = nil, nil
	if far != nil && far.space != e.space && !e.space.Holds(f.Addr) {
		// A copy between two VMs, and the page was not this VM's. If neither VM has it any more,
		// it was just removed; the next attempt looks the address up again.
		if far.space.Holds(f.Addr) {
			far.onMemoryFault(loop.Fault{Addr: f.Addr, Where: f.Where})
		}
		f.Foreign = true
	}
	if f.Foreign {
		if q != nil {
			e.schedule(q)
		}
		e.wake() // for the answers behind the interrupted one
		return
	}
	e.dev.stopped(f)
}

// onLoop runs f, which accesses no guest memory, on the engine's loop, and waits.
func (e *engine) onLoop(f func()) { e.loop.VisitFor(&e.dev.meter, f) }

// enter begins a batch that touches guest memory. False: the device has no guest,
// the guest is paused, or its memory vanished.
func (e *engine) enter() (translate.Token, bool) {
	if e.space == nil || e.frozen || e.dev.broken.Load() {
		return 0, false
	}
	return e.space.Epochs().Enter(e.loop.Guarded()), true
}

func (e *engine) leave(t translate.Token) {
	e.receiving, e.trainPacket = nil, nil // a fault may have interrupted receive
	e.space.Epochs().Leave(e.loop.ID(), t)
}

// Poll implements loop.Poller.
func (e *engine) Poll(now int64) bool {
	if !e.armed && e.qps == 0 {
		return false
	}
	t, ok := e.enter()
	if !ok {
		return false
	}
	defer e.leave(t)
	if e.journal != nil {
		e.settle()
	}
	busy := false
	if e.armed {
		e.db.clear(e.onBellCleared) // a memory fault may have interrupted the last pass
		any, m := e.db.scan(e.onBell)
		if !m.OK() && !m.Fault() {
			e.dev.warn("doorbell area unavailable", "engine", e.id, "miss", m)
			e.armed = false
		}
		busy = any
	}
	if n := e.dev.cqFailures.Load(); n != e.cqSeen {
		e.cqSeen = n
		e.failQPs()
	}
	budget := pollBudget
	if e.loop.Shared() {
		budget = pollShared
	}
	for turns := 0; e.first != nil && turns < pollTurns && budget > 0; turns++ {
		if e.journal != nil && (len(e.journal.changed) > 0 || e.first.t.AwaitsCommit()) {
			// A key that the next requests may tell a peer, or requests that a peer must have committed before it gets more.
			if e.settle(); e.first == nil {
				break
			}
		}
		q := e.nextQP()
		e.current = q
		before := e.served(q)
		if q.run(now, min(qpBudget, budget)) {
			e.schedule(q)
		}
		e.current, e.local.peer = nil, nil
		budget -= int(e.served(q)-before) + 1
		busy = true
	}
	if j := e.journal; j != nil && (j.committed < len(j.outputs) || len(j.peers) > 0) {
		e.settle()
	}
	e.db.clear(e.onBellCleared)
	return busy
}

// served is the work done so far, in units of pollBudget, for the QPs that count where q does.
func (e *engine) served(q *qp) uint64 {
	s := q.t.Stats()
	return s.TxPackets + flushCost*s.Flushed + s.LocalBytes>>localShift + e.steps>>stepShift
}

// Prepare implements loop.Poller: it sets need_wakeup, then checks for work once more.
func (e *engine) Prepare() bool {
	t, ok := e.enter()
	if !ok {
		return false // queued work waits for thaw or teardown
	}
	defer e.leave(t)
	if e.first != nil || e.dev.cqFailures.Load() != e.cqSeen || e.journal != nil && e.journal.pending() {
		return true
	}
	if !e.armed {
		return false
	}
	e.db.setWakeup(true)
	return e.db.anySet()
}

// Resume implements loop.Poller.
func (e *engine) Resume() {
	if !e.armed {
		return
	}
	if t, ok := e.enter(); ok {
		defer e.leave(t)
		e.db.setWakeup(false)
	}
}

// freeze keeps the engine off guest memory: the front end has stopped the command queue, so
// the VM is paused (its memory must not change) or the driver is gone (its memory is reused soon).
func (e *engine) freeze() {
	if e.frozen {
		return
	}
	e.frozen = true
	for i := range e.dev.qps {
		if q := e.dev.qps[i].Load(); q != nil && q.engine == e {
			q.t.Freeze(e.loop.Now())
		}
	}
}

// answersFrozen reports whether frames for a frozen engine are answered, without guest memory (CO-3).
func (e *engine) answersFrozen() bool { return e.frozen && e.space != nil && !e.dev.broken.Load() }

// thaw ends freeze, and processes timers, doorbells and events that were missed.
func (e *engine) thaw() {
	e.frozen = false
	t, ok := e.enter()
	if !ok {
		return
	}
	defer e.leave(t)
	for i := range e.dev.qps {
		if q := e.dev.qps[i].Load(); q != nil && q.engine == e {
			e.touch(q)
			q.t.Thaw(e.loop.Now())
			q.t.Timer(e.loop.Now())
			e.schedule(q)
		}
	}
	e.runAnswers()
	for _, q := range e.events {
		q.run()
	}
}

// bellFound schedules the QP of a doorbell slot, if it belongs to this engine.
func (e *engine) bellFound(slot int) {
	if q := e.dev.qpAt(slot); q != nil && q.engine == e {
		e.schedule(q)
	}
}

// bellCleared is called when a doorbell has been cleared. It reschedules the QP if work arrived meanwhile. The
// doorbells of a QP that has moved are still rung on its first engine, which passes them on.
func (e *engine) bellCleared(slot int) {
	switch q := e.dev.qpAt(slot); {
	case q == nil:
	case q.engine != e:
		q.engine.postAnswer(&q.bellNode, 1)
	case q.sq.maybeMore():
		e.schedule(q)
	}
}

// schedule appends q to the run list unless it is there.
func (e *engine) schedule(q *qp) {
	if q.scheduled || q.closed {
		return
	}
	e.polled.Rouse()
	q.scheduled = true
	q.next = nil
	if e.last == nil {
		e.first = q
	} else {
		e.last.next = q
	}
	e.last = q
}

func (e *engine) nextQP() *qp {
	q := e.first
	e.first = q.next
	if e.first == nil {
		e.last = nil
	}
	q.next, q.scheduled = nil, false
	return q
}

// unschedule removes q from the run list.
func (e *engine) unschedule(q *qp) {
	if !q.scheduled {
		return
	}
	var prev *qp
	for x := e.first; x != nil; prev, x = x, x.next {
		if x != q {
			continue
		}
		if prev == nil {
			e.first = q.next
		} else {
			prev.next = q.next
		}
		if e.last == q {
			e.last = prev
		}
		break
	}
	q.next, q.scheduled = nil, false
}

// failQPs sends the QPs of failed CQs to the error state. It walks all QPs of the
// engine; a CQ fails only once, so the cost per CQ is bounded by the VM's QPs.
func (e *engine) failQPs() {
	for i := range e.dev.qps {
		if q := e.dev.qps[i].Load(); q != nil && q.engine == e && (q.scq.failed.Load() || q.rcq.failed.Load()) {
			q.fail("its completion queue failed")
		}
	}
}

// disconnect sends the connected QPs to the error state, at once: none of them accesses memory afterwards. See
// Device.Quarantine.
func (e *engine) disconnect() {
	for i := range e.dev.qps {
		q := e.dev.qps[i].Load()
		if q != nil && q.engine == e && (q.typ == roce.RC || q.typ == roce.UC) && q.t.State() >= roce.RTR &&
			q.t.State() != roce.Err {
			q.dev.warn("queue pair failed", "qp", q.n, "reason", "the VM is quarantined")
			e.touch(q)
			q.toErr(e.loop.Now())
		}
	}
}

// postAnswer queues the answer to a fault for the engine; any thread.
func (e *engine) postAnswer(n *eventNode, bit uint32) {
	if e.answers.push(n, bit) {
		e.wake()
	}
}

// runAnswers resumes operations whose faults were served; inside an epoch. Nodes stay on
// the list until they are processed, also when a page that vanished unwinds one of them.
func (e *engine) runAnswers() {
	e.resume.collect(&e.answers)
	for e.resume.first != nil {
		n := e.resume.pop()
		n.wake(n.unqueue())
	}
}

// dropAnswers drops all answers: the objects that waited for them are destroyed.
func (e *engine) dropAnswers() {
	e.resume.collect(&e.answers)
	for e.resume.first != nil {
		e.resume.pop().unqueue()
	}
}

// forgetDoorbells ends the use of the doorbell area: the QPs that had doorbells are destroyed.
func (e *engine) forgetDoorbells() { e.armed, e.db = false, doorbells{} }

// wake makes the engine process its event queues and answers, from any thread.
func (e *engine) wake() {
	if !e.noticePending.Swap(true) {
		e.notices.Put(struct{}{})
	}
}

// onNotice resumes operations whose faults were served, and serves the event
// queues of the engine.
func (e *engine) onNotice(struct{}) {
	e.noticePending.Store(false)
	t, ok := e.enter()
	if !ok {
		return
	}
	defer e.leave(t)
	e.runAnswers()
	for _, q := range e.events {
		if q.waiting.first != nil || q.pending() {
			q.run()
		}
	}
}

// statistics adds c, which is of this engine, and what the engine itself counts to s.
func (e *engine) statistics(c *counters, s *abi.Stats) {
	c.report(s)
	s.Value[abi.StatRxDropped] += e.keptDrops + e.inboxFull.Load()
	s.Value[abi.StatFaultDrops] += e.keptDrops
}

// on runs f on an engine's loop inside an epoch.
func (e *engine) on(f func() error) (err error) {
	gone := e.visit(func() {
		t, ok := e.enter()
		if !ok {
			err = refuse(abi.StatusIO, "the guest's memory is gone")
			return
		}
		defer e.leave(t)
		err = f()
	})
	if gone != nil {
		return gone
	}
	return err
}

// visit runs f, which may access guest memory, on the engine's loop for a control goroutine. If the memory is gone, the
// device stops as after a fault in a handler; the error is a translate.ErrMemoryGone. What f has left half done lasts
// until the reset, so f leaves nothing that wipe cannot remove.
func (e *engine) visit(f func()) error {
	err := e.loop.DoFor(&e.dev.meter, func() {
		prev := e.loop.Charge(&e.dev.meter)
		f()
		e.loop.Charge(prev)
	})
	var fault loop.Fault
	if errors.As(err, &fault) {
		e.onLoop(func() { e.onMemoryFault(fault) })
	}
	return err
}
