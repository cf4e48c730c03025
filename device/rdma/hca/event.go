package hca

import (
	"sync/atomic"

	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// Events. An event queue (asynchronous, or one of the completion event queues)
// belongs to one lane, whose loop alone touches the virtqueue: queue number q to
// lane q modulo the number of lanes. Anybody may post: the event becomes a bit in
// the object's own eventNode, and the node goes on a list if it is not there
// already. So memory is bounded by the number of objects, posting never waits,
// and no event is lost while the driver has no buffer; equal events that the
// driver has not fetched are one.

// nodeKind says what an eventNode's handle names.
type nodeKind uint8

const (
	nodeCompletion nodeKind = iota // a CQ, for a completion event queue
	nodeCQ
	nodeQP
	nodeSRQ
	nodeFault  // a QP, one side of which waits for the guest's driver
	nodeServed // nothing: answers to faults, for a lane
)

// eventNode is an object's place in an event queue, or in a lane's list of answers
// to faults.
//
//	idle --post--> queued (incoming or waiting list) --last bit posted--> idle
type eventNode struct {
	handle uint32
	kind   nodeKind
	bits   atomic.Uint32 // events not posted yet; bit = abi.EventType
	queued atomic.Bool
	next   *eventNode // of whichever list holds the node

	fault *guestFault       // nodeFault
	wake  func(bits uint32) // nodeServed
}

func (n *eventNode) init(handle uint32, k nodeKind) { n.handle, n.kind = handle, k }

// take empties the node, which has left its list: a post from here on queues it anew.
func (n *eventNode) take() uint32 {
	n.next = nil
	n.queued.Store(false)
	return n.bits.Swap(0)
}

// eventStack is what any thread pushes nodes on and one lane takes whole.
type eventStack struct{ head atomic.Pointer[eventNode] }

// push records bits for n; true if n was not queued before.
func (s *eventStack) push(n *eventNode, bits uint32) bool {
	n.bits.Or(bits)
	if n.queued.Swap(true) {
		return false
	}
	for {
		head := s.head.Load()
		n.next = head
		if s.head.CompareAndSwap(head, n) {
			return true
		}
	}
}

// pending tells whether there is something to take.
func (s *eventStack) pending() bool { return s.head.Load() != nil }

// eventList is a lane's own list of nodes, oldest first.
type eventList struct{ first, last *eventNode }

// collect moves what was pushed to the end of the list, in order.
func (l *eventList) collect(s *eventStack) {
	newest := s.head.Swap(nil)
	var rev *eventNode
	for n := newest; n != nil; {
		next := n.next
		n.next = rev
		rev, n = n, next
	}
	if rev == nil {
		return
	}
	if l.first == nil {
		l.first = rev
	} else {
		l.last.next = rev
	}
	l.last = newest
}

// pop takes the oldest node off the list, which is not empty. The node counts as
// queued until its take.
func (l *eventList) pop() *eventNode {
	n := l.first
	if l.first = n.next; l.first == nil {
		l.last = nil
	}
	return n
}

// unpop puts a node back at the head, unless a post has just queued it anew.
func (l *eventList) unpop(n *eventNode, bits uint32) {
	n.bits.Or(bits)
	if n.queued.Swap(true) {
		return
	}
	if n.next = l.first; l.first == nil {
		l.last = n
	}
	l.first = n
}

// remove takes n off the list if it is there.
func (l *eventList) remove(n *eventNode) {
	var prev *eventNode
	for x := l.first; x != nil; prev, x = x, x.next {
		if x != n {
			continue
		}
		if prev == nil {
			l.first = n.next
		} else {
			prev.next = n.next
		}
		if l.last == n {
			l.last = prev
		}
		return
	}
}

// eventQueue is one event virtqueue.
type eventQueue struct {
	dev      *Device
	index    int // virtqueue
	lane     *lane
	incoming eventStack

	// The rest is the lane's.
	q       *virtq.Queue // nil while the driver has not started it
	watch   *loop.Watch
	waiting eventList // for buffers
	chain   virtq.Chain
	starved bool // the driver was asked to kick
	unsent  bool // events were pushed and not signalled yet
	buf     [abi.SizeEvent]byte

	// A buffer that is absent on the host: the queue waits for it, alone (PF-7).
	absent   translate.Fault
	fetching bool // absent was raised for q, not for one before it
	served   eventNode
}

// newEventQueue makes the event queue of virtqueue i and gives it to its lane.
func (d *Device) newEventQueue(i int) *eventQueue {
	l := d.lanes[i%len(d.lanes)]
	e := &eventQueue{dev: d, index: i, lane: l}
	e.served.init(0, nodeServed)
	e.served.wake = func(bits uint32) {
		if bits&servedHostFail != 0 && e.fetching {
			e.dev.warn("event buffer cannot be had, queue stopped", "queue", e.index)
			e.q.Fail(errEventBuffer)
		}
		e.fetching = false
		e.run()
	}
	e.absent.Write = true
	e.absent.Done = func(_ *translate.Fault, err error) {
		if err != nil {
			l.answer(&e.served, servedHostFail)
			return
		}
		l.answer(&e.served, servedHost)
	}
	l.events = append(l.events, e)
	return e
}

// post records events for n; any thread.
func (e *eventQueue) post(n *eventNode, bits uint32) {
	if e.incoming.push(n, bits) {
		e.lane.wake()
	}
}

// pending tells whether run has something to do.
func (e *eventQueue) pending() bool { return e.incoming.pending() }

// run posts what it can; lane only, inside an epoch.
func (e *eventQueue) run() {
	e.waiting.collect(&e.incoming)
	if e.q == nil || e.absent.Waiting() || e.waiting.first == nil && !e.unsent {
		return
	}
	for e.waiting.first != nil {
		n := e.waiting.pop()
		bits := n.take()
		if left, ok := e.emit(n, bits); !ok {
			e.waiting.unpop(n, left)
			break
		}
	}
	if e.unsent && e.ok(e.q.Signal()) {
		e.unsent = false
	}
}

// emit posts n's events, lowest type first. It returns those that are left and
// false when the driver has no buffer, or none that is there.
func (e *eventQueue) emit(n *eventNode, bits uint32) (uint32, bool) {
	for t := uint32(0); bits>>t != 0; t++ {
		if bits&(1<<t) == 0 {
			continue
		}
		if !e.take() {
			return bits, false
		}
		e.encode(n, abi.EventType(t))
		if n.kind == nodeFault {
			n.fault.posting() // what it says has been read: it may be answered, and raised anew, from here on
		}
		if !e.write(n) && (n.kind != nodeFault || n.fault.unposted()) {
			return bits, false
		}
		bits &^= 1 << t
	}
	return 0, true
}

// encode puts an event into buf.
func (e *eventQueue) encode(n *eventNode, t abi.EventType) {
	switch n.kind {
	case nodeCompletion:
		(&abi.CEQE{CQN: n.handle}).Encode(e.buf[:])
	case nodeFault:
		ev := n.fault.event(n.handle)
		ev.Encode(e.buf[:])
	default:
		(&abi.Event{Type: t, Handle: n.handle}).Encode(e.buf[:])
	}
}

// write puts buf into the buffer that take got, and pushes it.
func (e *eventQueue) write(n *eventNode) bool {
	size := abi.SizeEvent
	if n.kind == nodeCompletion {
		size = abi.SizeCEQE
	}
	if e.chain.WritableLen() < uint64(size) {
		e.dev.warn("event buffer too small, queue stopped", "queue", e.index, "bytes", e.chain.WritableLen(), "need", size)
		e.q.Fail(errEventBuffer)
		return false
	}
	w, m := e.chain.WriteAll(e.buf[:size])
	if m.Kind == translate.HostFault {
		if e.ok(e.q.Unpop(&e.chain)) {
			e.fetch(m)
		}
		return false
	}
	if !m.OK() {
		e.dev.warn("event buffer not in guest memory, queue stopped", "queue", e.index, "miss", m)
		e.q.Fail(&faultError{what: "event buffer", miss: m})
		return false
	}
	if err := e.q.Push(&e.chain, uint32(w)); err != nil {
		if virtq.IsRepairable(err) && !e.ok(e.q.Unpop(&e.chain)) {
			return false
		}
		e.ok(err)
		return false
	}
	e.unsent = true
	return true
}

// fetch raises a host fault, after which the queue goes on.
func (e *eventQueue) fetch(m translate.Miss) {
	if !e.absent.Waiting() {
		e.absent.Miss, e.fetching = m, true
		e.lane.hostFaults++
		e.lane.space.Faults().Raise(&e.absent)
	}
}

// take pops a buffer of the driver. If there is none it asks to be told, and looks
// once more (virtio 1.2, 2.7.13.3.1); while buffers last the driver need not kick.
func (e *eventQueue) take() bool {
	for starved := false; ; starved = true {
		ok, err := e.q.Pop(&e.chain)
		if err == nil && ok {
			if e.starved {
				e.starved = e.q.SetNotify(false) != nil // a hint: later will do
			}
			return true
		}
		if err == nil && !starved {
			e.starved = true
			err = e.q.SetNotify(true)
		}
		if !e.ok(err) {
			return false
		}
		if starved {
			return false
		}
	}
}

// ok judges what the virtqueue said: a page of it that is absent is fetched.
func (e *eventQueue) ok(err error) bool {
	if err == nil {
		return true
	}
	if m, absent := hostMiss(err); absent {
		e.fetch(m)
	} else {
		e.dev.warn("event queue broken", "queue", e.index, "error", err)
	}
	return false
}

// drop forgets objects that are going away, on the queue's lane.
func (e *eventQueue) drop(nodes ...*eventNode) {
	e.lane.loop.Do(func() {
		e.waiting.collect(&e.incoming)
		for _, n := range nodes {
			e.waiting.remove(n)
			n.take()
		}
	})
}

// clear drops everything: the device was reset; lane only.
func (e *eventQueue) clear() {
	e.waiting.collect(&e.incoming)
	for e.waiting.first != nil {
		e.waiting.pop().take()
	}
	e.unsent = false
}
