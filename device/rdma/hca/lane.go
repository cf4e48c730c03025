package hca

import (
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
	// inboxFrames bounds the frames that wait for a lane. Senders keep at most a
	// window of packets per QP in flight, so an overflow is a burst of many QPs,
	// which the transport repairs as any loss.
	inboxFrames = 2048
	// A poll gives each QP of the run list qpBudget packets or work requests in
	// turn, until pollBudget is used up: every VM of a loop, and every QP of a VM,
	// gets its share whatever the others do.
	qpBudget   = 16
	pollBudget = 128
	pollShared = 32 // while other VMs have work for the loop, for their latency: a slice
	// QPs that may consume nothing of pollBudget still cost a turn each.
	pollTurns = 64
	// What is copied without packets counts against pollBudget, too, in units of 4 KiB,
	// and so does what is flushed: a WQE read and a CQE written, which nobody may do
	// faster than others have data moved (make bench ONLY=fair_flood).
	localShift = 12
	flushCost  = 4
	// At most one notice is outstanding.
	noticeSlots = 2
)

// lane is the device's share of one loop: an engine of the ABI. All fields that
// are not marked otherwise belong to the loop.
//
// The pipeline of an iteration, in the order of the loop's pollers:
//
//	inbox    frames for QPs of this lane: parse, ICRC, roce.QP.Receive
//	lane     doorbells -> run list -> roce.QP.Run -> WQEs in, frames out, CQEs
//	notices  events for the driver -> event virtqueues
//
// Deliver never calls into a QP: a frame that a QP sends may come back to a QP of
// the same loop within the same call, through the switch, and the transport is
// not re-entrant. So every frame goes through an inbox.
type lane struct {
	dev  *Device
	id   int // engine number of the ABI
	loop *loop.Loop

	inbox   *loop.Mailbox[*frame.Buf]
	notices *loop.Mailbox[struct{}]
	events  []*eventQueue // fixed; those whose virtqueue is served here

	armed   bool // SET_DOORBELLS was given and the memory is there
	db      doorbells
	dbWatch *loop.Watch
	ringFn  func(slot int)
	rangFn  func(slot int)

	first, last *qp // run list
	cur         *qp // whose turn it is
	meeting     meeting
	qps         int // QPs that live here
	cqSeen      uint64

	answers eventStack // to faults: pushed by any thread
	resume  eventList  // taken from there

	rx        wire.RoCE
	frame     *frame.Buf           // that is being received
	single    []byte               // the packet in it, if it is a train
	head      [gso.MaxHeaders]byte // ... and what each packet of that begins with
	kept      int                  // frames that QPs keep
	held      int                  // those that wait for what was lost before them
	keptDrops uint64               // frames that found no room behind those

	stats  roce.Stats
	parked int // sides of QPs that wait for a page
	// Faults raised (PF-7).
	hostFaults, guestFaults uint64

	listRaw [8 * abi.MaxFastReg]byte // a page list, as copied in, ...
	list    [abi.MaxFastReg]translate.PA

	frozen    bool          // no driver: guest memory is left alone
	inboxFull atomic.Uint64 // any thread
	noted     atomic.Bool   // any thread: a notice is on its way
	space     *translate.Space
}

func newLane(d *Device, id int, loop *loop.Loop) *lane {
	l := &lane{dev: d, id: id, loop: loop}
	l.ringFn, l.rangFn = l.ring, l.rang
	return l
}

// start puts the lane on its loop.
func (l *lane) start() {
	fault := l.fault()
	l.inbox = loop.NewMailbox(l.loop, inboxFrames, l.receive, l.handed, loop.Name("hca inbox"), fault)
	l.inbox.Weigh((*frame.Buf).Segments)
	l.loop.AddPoller(l, loop.Name("hca"), fault)
	l.notices = loop.NewMailbox(l.loop, noticeSlots, l.notice, nil, loop.Name("hca events"), fault)
}

// stop takes the lane off its loop; no QP lives here any more.
func (l *lane) stop() {
	l.inbox.Close()
	l.loop.RemovePoller(l)
	l.notices.Close()
}

// fault makes memory faults in a handler the lane's business.
func (l *lane) fault() loop.Option { return loop.OnFault(l.onFault) }

// onFault hears that a handler of this lane met memory that is not there. If it
// was another VM's (a frame was on its way into it), the QP whose turn it was just
// gets another turn. If it was this guest's, the device stops until a reset: its
// rings may be half written.
func (l *lane) onFault(f loop.Fault) {
	q, far := l.cur, l.meeting.far
	l.cur, l.meeting.far = nil, nil
	if far != nil && far.space != l.space && !l.space.Holds(f.Addr) {
		// A copy between two VMs, and it was not this one's page. If it is nobody's any
		// more, it went just now, and is looked up anew.
		if far.space.Holds(f.Addr) {
			far.onFault(loop.Fault{Addr: f.Addr, Where: f.Where})
		}
		f.Foreign = true
	}
	if f.Foreign {
		if q != nil {
			l.push(q)
		}
		l.wake() // for answers behind the one that was cut short
		return
	}
	if !l.dev.broken.Swap(true) {
		l.dev.up.Store(false)
		l.dev.log.Error("the guest's memory vanished; the device stops until it is reset", "fault", f)
	}
}

// enter begins a batch that touches guest memory. False: the device has no guest,
// or one that is paused or whose memory vanished.
func (l *lane) enter() (translate.Token, bool) {
	if l.space == nil || l.frozen || l.dev.broken.Load() {
		return 0, false
	}
	return l.space.Epochs().Enter(l.loop.ID()), true
}

func (l *lane) leave(t translate.Token) {
	l.frame, l.single = nil, nil // a fault may have cut receive short
	l.space.Epochs().Leave(l.loop.ID(), t)
}

// Poll implements loop.Poller.
func (l *lane) Poll(now int64) bool {
	if !l.armed && l.qps == 0 {
		return false
	}
	t, ok := l.enter()
	if !ok {
		return false
	}
	defer l.leave(t)
	busy := false
	if l.armed {
		l.db.settle(l.rangFn) // in case that a fault has cut the last pass short
		any, m := l.db.scan(l.ringFn)
		if !m.OK() && !m.Fault() {
			l.dev.warn("doorbell area is gone", "engine", l.id, "miss", m)
			l.armed = false
		}
		busy = any
	}
	if n := l.dev.cqFailures.Load(); n != l.cqSeen {
		l.cqSeen = n
		l.failQPs()
	}
	budget := pollBudget
	if l.loop.Shared() {
		budget = pollShared
	}
	for turns := 0; l.first != nil && turns < pollTurns && budget > 0; turns++ {
		q := l.pop()
		l.cur = q
		before := l.served()
		if q.run(now, min(qpBudget, budget)) {
			l.push(q)
		}
		l.cur, l.meeting.far = nil, nil
		budget -= int(l.served()-before) + 1
		busy = true
	}
	l.db.settle(l.rangFn)
	return busy
}

// served is what its QPs have had of the loop's time so far, in units of pollBudget.
func (l *lane) served() uint64 {
	return l.stats.TxPackets + flushCost*l.stats.Flushed + l.stats.LocalBytes>>localShift
}

// Prepare implements loop.Poller: need_wakeup, then one more look.
func (l *lane) Prepare() bool {
	t, ok := l.enter()
	if !ok {
		return false // whatever is on the lists waits for thaw or the end
	}
	defer l.leave(t)
	if l.first != nil || l.dev.cqFailures.Load() != l.cqSeen {
		return true
	}
	if !l.armed {
		return false
	}
	l.db.setWakeup(true)
	return l.db.rung()
}

// Resume implements loop.Poller.
func (l *lane) Resume() {
	if !l.armed {
		return
	}
	if t, ok := l.enter(); ok {
		defer l.leave(t)
		l.db.setWakeup(false)
	}
}

// freeze stops the lane at the guest's memory: the front end has stopped the
// command queue, so the VM is paused (its memory must not change any more) or the
// driver is gone (its memory is somebody else's soon).
func (l *lane) freeze() { l.frozen = true }

// thaw goes on: timers and bells that came meanwhile are made up for.
func (l *lane) thaw() {
	l.frozen = false
	t, ok := l.enter()
	if !ok {
		return
	}
	defer l.leave(t)
	for i := range l.dev.qps {
		if q := l.dev.qps[i].Load(); q != nil && q.lane == l {
			q.t.Timer(l.loop.Now())
			l.push(q)
		}
	}
	l.answered()
	for _, e := range l.events {
		e.run()
	}
}

// ring puts the QP of a doorbell slot on the run list, if it lives here.
func (l *lane) ring(slot int) {
	if q := l.dev.qpAt(slot); q != nil && q.lane == l {
		l.push(q)
	}
}

// rang is called for each bell that ring was called for, or that was rung since: what the QP has not seen it gets a turn for. The bells of one
// that has moved are still rung here.
func (l *lane) rang(slot int) {
	switch q := l.dev.qpAt(slot); {
	case q == nil:
	case q.lane != l:
		q.lane.answer(&q.bell, 1)
	case q.sq.maybeMore():
		l.push(q)
	}
}

// push appends q to the run list unless it is there.
func (l *lane) push(q *qp) {
	if q.listed || q.dead {
		return
	}
	q.listed = true
	q.next = nil
	if l.last == nil {
		l.first = q
	} else {
		l.last.next = q
	}
	l.last = q
}

func (l *lane) pop() *qp {
	q := l.first
	l.first = q.next
	if l.first == nil {
		l.last = nil
	}
	q.next, q.listed = nil, false
	return q
}

// unlist takes q off the run list.
func (l *lane) unlist(q *qp) {
	if !q.listed {
		return
	}
	var prev *qp
	for x := l.first; x != nil; prev, x = x, x.next {
		if x != q {
			continue
		}
		if prev == nil {
			l.first = q.next
		} else {
			prev.next = q.next
		}
		if l.last == q {
			l.last = prev
		}
		break
	}
	q.next, q.listed = nil, false
}

// failQPs sends the QPs of failed CQs to the error state. It walks all QPs of the
// lane; a CQ fails once, and costs its VM as much as its VM has QPs.
func (l *lane) failQPs() {
	for i := range l.dev.qps {
		if q := l.dev.qps[i].Load(); q != nil && q.lane == l && (q.scq.failed.Load() || q.rcq.failed.Load()) {
			q.fail("its completion queue failed")
		}
	}
}

// answer hands the answer to a fault to who waits for it; any thread.
func (l *lane) answer(n *eventNode, bit uint32) {
	if l.answers.push(n, bit) {
		l.wake()
	}
}

// answered lets those go on whose faults were served; inside an epoch. They stay on
// the list until their turn, also when a page that vanished unwinds one of them.
func (l *lane) answered() {
	l.resume.collect(&l.answers)
	for l.resume.first != nil {
		n := l.resume.pop()
		n.wake(n.take())
	}
}

// forgetAnswers drops the answers that nobody waits for any more.
func (l *lane) forgetAnswers() {
	l.resume.collect(&l.answers)
	for l.resume.first != nil {
		l.resume.pop().take()
	}
}

// wake makes the lane look at its event queues and answers, from any thread.
func (l *lane) wake() {
	if !l.noted.Swap(true) {
		l.notices.Put(struct{}{})
	}
}

// notice lets operations go on whose faults were served, and serves the event
// queues of the lane.
func (l *lane) notice(struct{}) {
	l.noted.Store(false)
	t, ok := l.enter()
	if !ok {
		return
	}
	defer l.leave(t)
	l.answered()
	for _, e := range l.events {
		if e.waiting.first != nil || e.pending() {
			e.run()
		}
	}
}

// receive handles a frame from the inbox.
func (l *lane) receive(b *frame.Buf) {
	t, ok := l.enter()
	if !ok {
		return
	}
	defer l.leave(t)
	if b.Offload.GSOSize != 0 {
		l.receiveTrain(b)
	} else {
		l.receiveFrame(b, nil)
	}
	l.rx = wire.RoCE{} // no reference to the buffer outlives the call
}

// receiveTrain handles a train (gso.Train). Where the packets have no headers of their own, those of the first are put in front of them, over what
// has been received already: nobody else reads the frame, or it is copied.
func (l *lane) receiveTrain(b *frame.Buf) {
	if b.Shared() {
		c := l.dev.cfg.Pool.GetFor(b.Len())
		if c == nil {
			l.inboxFull.Add(uint64(b.Segments()))
			return
		}
		defer c.Free()
		c.Append(b.Bytes())
		c.Offload = b.Offload
		b = c
	}
	f, head, size := b.Bytes(), int(b.Offload.Payload), int(b.Offload.GSOSize)
	n := copy(l.head[:], f[:head])
	for at := head; at+size <= len(f); at += size {
		p := f[at-head : at+size : at+size]
		copy(p, l.head[:n])
		l.receiveFrame(b, p)
	}
}

// receiveFrame handles a frame, which is b or, of a train, single.
func (l *lane) receiveFrame(b *frame.Buf, single []byte) {
	frame := single
	if single == nil {
		frame = b.Bytes()
	}
	p := &l.rx
	if err := wire.ParseRoCE(frame, p); err != nil {
		l.dev.turned[refusedHeader].Add(1)
		return
	}
	if !wire.CheckICRC(frame, p) {
		l.dev.turned[refusedICRC].Add(1)
		return
	}
	l.frame, l.single = b, single
	l.dispatch(p)
	l.frame, l.single = nil, nil
}

// statistics adds the lane's counters to s.
func (l *lane) statistics(s *abi.Stats) {
	r := &l.stats
	for _, x := range []struct {
		i abi.Stat
		n uint64
	}{
		{abi.StatTxPackets, r.TxPackets}, {abi.StatTxBytes, r.TxBytes}, {abi.StatRxPackets, r.RxPackets},
		{abi.StatRxBytes, r.RxBytes}, {abi.StatTxAcks, r.TxAcks}, {abi.StatTxNaks, r.TxNaks}, {abi.StatTxRNR, r.TxRNR},
		{abi.StatRxRNR, r.RxRNR}, {abi.StatRetransmits, r.Retransmits}, {abi.StatTimeouts, r.Timeouts},
		{abi.StatOutOfSequence, r.OutOfSequence}, {abi.StatDuplicates, r.Duplicates},
		{abi.StatRxDropped, r.RxDropped + l.keptDrops + l.inboxFull.Load()}, {abi.StatAccessErrors, r.AccessErrors},
		{abi.StatGuestFaults, l.guestFaults}, {abi.StatHostFaults, l.hostFaults},
		{abi.StatFaultDrops, r.FaultDrops + l.keptDrops},
	} {
		s.Value[x.i] += x.n
	}
}
