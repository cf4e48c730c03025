// Side: data

package hca

import (
	"errors"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

var errEventBuffer = errors.New("event buffer is too small")

// Events. An event queue (asynchronous, or one of the completion event queues)
// belongs to one engine, whose loop alone touches the virtqueue: queue number q to
// engine q modulo the number of engines. Any thread may post: the event becomes a bit in
// the object's own eventNode, and the node is put on a list unless it is on one
// already. So memory is bounded by the number of objects, posting never waits,
// and no event is lost while the driver has no buffer; equal events that the
// driver has not fetched are merged.

// nodeKind tells what an eventNode's handle names.
type nodeKind uint8

const (
	nodeCompletion nodeKind = iota // a CQ, for a completion event queue
	nodeCQ
	nodeQP
	nodeSRQ
	nodeFault   // a QP with a side that waits for the guest's driver
	nodeAnswers // nothing: answers to faults, for an engine
)

// eventNode is an object's place in an event queue, or in an engine's list of answers
// to faults.
//
//	idle --post--> queued (incoming or waiting list) --last bit posted--> idle
type eventNode struct {
	handle uint32
	kind   nodeKind
	bits   atomic.Uint32 // events not posted yet; bit = abi.EventType
	queued atomic.Bool
	next   *eventNode // in the list that holds the node

	cq    *cq               // nodeCompletion, nodeCQ
	fault *guestFault       // nodeFault
	wake  func(bits uint32) // nodeAnswers
}

func (n *eventNode) init(handle uint32, k nodeKind) { n.handle, n.kind = handle, k }

// failing returns the CQ whose failure the node tells, or nil.
func (n *eventNode) failing() *cq {
	if n.kind == nodeCQ {
		return n.cq
	}
	return nil
}

// unqueue empties a node that has left its list: the next post queues it again.
func (n *eventNode) unqueue() uint32 {
	n.next = nil
	n.queued.Store(false)
	return n.bits.Swap(0)
}

// eventStack is a stack of nodes: any thread pushes, one engine takes all at once.
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

// pending reports whether the stack has nodes.
func (s *eventStack) pending() bool { return s.head.Load() != nil }

// eventList is an engine's own list of nodes, oldest first.
type eventList struct{ first, last *eventNode }

// collect moves the pushed nodes to the end of the list, in order.
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

// pop removes the oldest node of the list, which is not empty. The node counts as
// queued until unqueue.
func (l *eventList) pop() *eventNode {
	n := l.first
	if l.first = n.next; l.first == nil {
		l.last = nil
	}
	return n
}

// unpop puts a node back at the head, unless a post has just queued it again.
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
	dev      *dataSide
	index    int // virtqueue
	engine   *engine
	incoming eventStack

	// The fields below belong to the engine.
	q       *virtq.Queue // nil while the driver has not started it
	watch   *loop.Watch
	waiting eventList // nodes that wait for buffers
	chain   virtq.Chain
	starved bool // the driver was asked to kick
	unsent  bool // events are in the used ring and not signalled yet
	telling *cq  // whose error is the only such event
	buf     [abi.SizeEvent]byte

	// absent is a fault of a buffer that is absent on the host; only this queue waits for it (PF-7).
	absent   translate.Fault
	fetching bool // absent was raised for q, not for a previous virtqueue
	served   eventNode
}

// newEventQueue creates the event queue of virtqueue i and assigns it to its engine.
func (d *dataSide) newEventQueue(i int) *eventQueue {
	e := d.engines[i%len(d.engines)]
	eq := &eventQueue{dev: d, index: i, engine: e}
	eq.served.init(0, nodeAnswers)
	eq.served.wake = func(bits uint32) {
		if bits&answerHostFailed != 0 && eq.fetching {
			eq.dev.warn("event buffer unavailable, queue stopped", "queue", eq.index)
			eq.q.Fail(errEventBuffer)
		}
		eq.fetching = false
		eq.run()
	}
	eq.absent.Write = true
	eq.absent.Done = func(_ *translate.Fault, err error) {
		if err != nil {
			e.postAnswer(&eq.served, answerHostFailed)
			return
		}
		e.postAnswer(&eq.served, answerHost)
	}
	e.events = append(e.events, eq)
	return eq
}

// post records events for n; any thread.
func (eq *eventQueue) post(n *eventNode, bits uint32) {
	if eq.incoming.push(n, bits) {
		eq.engine.wake()
	}
}

// pending reports whether run has work.
func (eq *eventQueue) pending() bool { return eq.incoming.pending() }

// run posts events until the buffers are used up; engine only, inside an epoch.
func (eq *eventQueue) run() {
	eq.waiting.collect(&eq.incoming)
	if eq.q == nil || eq.absent.Waiting() || eq.waiting.first == nil && !eq.unsent {
		return
	}
	for eq.waiting.first != nil && (eq.telling == nil || eq.signal()) {
		n := eq.waiting.pop()
		bits := n.unqueue()
		if bits&eventLater != 0 && n.kind == nodeCompletion {
			n.cq.expect()
			bits &^= eventLater
		}
		if left, ok := eq.emit(n, bits); !ok {
			eq.waiting.unpop(n, left)
			break
		}
	}
	eq.signal()
}

// signal makes the events in the used ring visible; false if it cannot.
func (eq *eventQueue) signal() bool {
	if !eq.unsent {
		return true
	}
	if !eq.check(eq.q.Signal()) {
		return false
	}
	point()
	if eq.unsent = false; eq.telling != nil {
		eq.telling.setNotice(0, 0)
		eq.telling = nil
	}
	return true
}

// recall drops the events that the driver has seen, though the killed process could not note it: the virtqueue starts.
func (eq *eventQueue) recall() {
	eq.waiting.collect(&eq.incoming)
	var seen []*eventNode
	for n := eq.waiting.first; n != nil; n = n.next {
		if c := n.failing(); c != nil && c.told(eq.q.Base()) {
			seen = append(seen, n)
		}
	}
	for _, n := range seen {
		eq.waiting.remove(n)
		n.unqueue()
		n.cq.setNotice(0, 0)
	}
}

// emit posts n's events, lowest type first. It returns the events that are left, and
// false if the driver has no buffer or the next buffer is absent.
func (eq *eventQueue) emit(n *eventNode, bits uint32) (uint32, bool) {
	failing := n.failing()
	for t := uint32(0); bits>>t != 0; t++ {
		if bits&(1<<t) == 0 {
			continue
		}
		if failing != nil && !eq.signal() { // its event comes alone
			return bits, false
		}
		if !eq.popBuffer() {
			return bits, false
		}
		eq.encode(n, abi.EventType(t))
		if n.kind == nodeFault {
			n.fault.posting() // its fields have been read: from here on it may be answered and raised again
		}
		if failing != nil {
			failing.setNotice(cqUntold|cqTelling, eq.q.Base())
			point()
		}
		written := eq.write(n)
		if !written && failing != nil {
			failing.setNotice(cqUntold, 0)
		}
		if !written && (n.kind != nodeFault || n.fault.unposted()) {
			return bits, false
		}
		bits &^= 1 << t
		eq.telling = failing
	}
	return 0, true
}

// encode puts an event into buf.
func (eq *eventQueue) encode(n *eventNode, t abi.EventType) {
	switch n.kind {
	case nodeCompletion:
		(&abi.CEQE{CQN: n.handle}).Encode(eq.buf[:])
	case nodeFault:
		ev := n.fault.event(n.handle)
		ev.Encode(eq.buf[:])
	default:
		(&abi.Event{Type: t, Handle: n.handle}).Encode(eq.buf[:])
	}
}

// write copies buf into the buffer that popBuffer got, and pushes it.
func (eq *eventQueue) write(n *eventNode) bool {
	size := abi.SizeEvent
	if n.kind == nodeCompletion {
		size = abi.SizeCEQE
	}
	if eq.chain.WritableLen() < uint64(size) {
		eq.dev.warn("event buffer too small, queue stopped", "queue", eq.index, "bytes", eq.chain.WritableLen(), "need", size)
		eq.q.Fail(errEventBuffer)
		return false
	}
	w, m := eq.chain.WriteMessage(eq.buf[:size])
	if m.Kind == translate.HostFault {
		if eq.check(eq.q.Unpop(&eq.chain)) {
			eq.fetch(m)
		}
		return false
	}
	if !m.OK() {
		eq.dev.warn("event buffer not in guest memory, queue stopped", "queue", eq.index, "miss", m)
		eq.q.Fail(&faultError{what: "event buffer", miss: m})
		return false
	}
	if err := eq.q.Push(&eq.chain, uint32(w)); err != nil {
		if virtq.IsRepairable(err) && !eq.check(eq.q.Unpop(&eq.chain)) {
			return false
		}
		eq.check(err)
		return false
	}
	eq.unsent = true
	return true
}

// fetch raises a host fault; its answer restarts the queue.
func (eq *eventQueue) fetch(m translate.Miss) {
	if !eq.absent.Waiting() {
		eq.absent.Miss, eq.fetching = m, true
		eq.engine.stats.hostFaults++
		eq.engine.space.Faults().Raise(&eq.absent)
	}
}

// eventWalk bounds the descriptors of an event's buffer; drivers use one. The loop, which other VMs share, writes many
// events in a turn.
const eventWalk = 8

// popBuffer pops a buffer of the driver. If there is none it requests a notification and tries
// once more (virtio 1.2, 2.7.13.3.1); while buffers last the driver need not kick.
func (eq *eventQueue) popBuffer() bool {
	for starved := false; ; starved = true {
		ok, err := eq.q.PopPart(&eq.chain, abi.SizeEvent, eventWalk)
		if err == nil && ok && eq.chain.Cut() {
			eq.dev.warn("event buffer in too many descriptors, queue stopped", "queue", eq.index, "most", eventWalk)
			eq.q.Fail(errEventBuffer)
			return false
		}
		if err == nil && ok {
			if eq.starved {
				eq.starved = eq.q.SetNotify(false) != nil // only a hint: a later attempt suffices
			}
			return true
		}
		if err == nil && !starved {
			eq.starved = true
			err = eq.q.SetNotify(true)
		}
		if !eq.check(err) {
			return false
		}
		if starved {
			return false
		}
	}
}

// check handles an error of the virtqueue; if one of its pages is absent, it fetches the page.
func (eq *eventQueue) check(err error) bool {
	if err == nil {
		return true
	}
	if m, absent := hostMiss(err); absent {
		eq.fetch(m)
	} else {
		eq.dev.warn("event queue broken", "queue", eq.index, "error", err)
	}
	return false
}

// drop removes the nodes of objects that are being destroyed, on the queue's engine.
func (eq *eventQueue) drop(nodes ...*eventNode) {
	eq.engine.onLoop(func() {
		eq.waiting.collect(&eq.incoming)
		for _, n := range nodes {
			eq.waiting.remove(n)
			n.unqueue()
		}
	})
}

// clear drops all events, for a reset of the device; engine only.
func (eq *eventQueue) clear() {
	eq.waiting.collect(&eq.incoming)
	for eq.waiting.first != nil {
		eq.waiting.pop().unqueue()
	}
	eq.unsent, eq.telling = false, nil
}
