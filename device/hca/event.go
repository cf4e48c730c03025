package hca

import (
	"sync/atomic"

	"github.com/vnicd/vnicd/device/abi"
	"github.com/vnicd/vnicd/device/engine"
	"github.com/vnicd/vnicd/device/virtq"
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
)

// eventNode is an object's place in an event queue.
//
//	idle --post--> queued (incoming or waiting list) --last bit posted--> idle
type eventNode struct {
	handle uint32
	kind   nodeKind
	bits   atomic.Uint32 // events not posted yet; bit = abi.EventType
	queued atomic.Bool
	next   *eventNode // of whichever list holds the node
}

func (n *eventNode) init(handle uint32, k nodeKind) { n.handle, n.kind = handle, k }

// eventQueue is one event virtqueue.
type eventQueue struct {
	dev   *Device
	index int // virtqueue
	lane  *lane
	// incoming is a stack that any thread pushes on and the lane takes whole.
	incoming atomic.Pointer[eventNode]

	// The rest is the lane's.
	q           *virtq.Queue // nil while the driver has not started it
	watch       *engine.Watch
	first, last *eventNode // waiting for buffers, oldest first
	chain       virtq.Chain
	starved     bool // the driver was asked to kick
	buf         [abi.SizeEvent]byte
	kick        [8]byte
}

// post records events for n; any thread.
func (e *eventQueue) post(n *eventNode, bits uint32) {
	n.bits.Or(bits)
	if n.queued.Swap(true) {
		return
	}
	for {
		head := e.incoming.Load()
		n.next = head
		if e.incoming.CompareAndSwap(head, n) {
			break
		}
	}
	e.lane.wake()
}

// pending tells whether run has something to do.
func (e *eventQueue) pending() bool { return e.incoming.Load() != nil }

// run posts what it can; lane only, inside an epoch.
func (e *eventQueue) run() {
	e.collect()
	if e.q == nil || e.first == nil {
		return
	}
	posted := false
	for e.first != nil {
		n := e.first
		// The node leaves the list before its bits are read: a post from here on
		// either is seen below or queues the node again.
		next := n.next
		n.next = nil
		n.queued.Store(false)
		bits := n.bits.Swap(0)
		left, ok := e.emit(n, bits)
		posted = posted || left != bits
		if !ok {
			// Put back what is left, at the head unless a post has just queued it anew.
			n.bits.Or(left)
			if n.queued.Swap(true) {
				e.first = next
			} else {
				n.next = next
			}
			break
		}
		e.first = next
	}
	if e.first == nil {
		e.last = nil
	}
	if posted {
		if err := e.q.Signal(); err != nil {
			e.broke(err)
		}
	}
}

// collect moves incoming nodes to the end of the waiting list, in order.
func (e *eventQueue) collect() {
	var rev *eventNode
	tail := e.incoming.Swap(nil)
	newest := tail
	for n := tail; n != nil; {
		next := n.next
		n.next = rev
		rev, n = n, next
	}
	if rev == nil {
		return
	}
	if e.first == nil {
		e.first = rev
	} else {
		e.last.next = rev
	}
	e.last = newest
}

// emit posts n's events, lowest type first. It returns those that are left and
// false when the driver has no buffer.
func (e *eventQueue) emit(n *eventNode, bits uint32) (uint32, bool) {
	for t := uint32(0); bits>>t != 0; t++ {
		if bits&(1<<t) == 0 {
			continue
		}
		if !e.take() {
			return bits, false
		}
		size := abi.SizeEvent
		if n.kind == nodeCompletion {
			size = abi.SizeCEQE
			(&abi.CEQE{CQN: n.handle}).Encode(e.buf[:])
		} else {
			(&abi.Event{Type: abi.EventType(t), Handle: n.handle}).Encode(e.buf[:])
		}
		if e.chain.WritableLen() < uint64(size) {
			e.dev.warn("event buffer too small, queue stopped", "queue", e.index, "bytes", e.chain.WritableLen(), "need", size)
			e.q.Fail(errEventBuffer)
			return bits, false
		}
		w, m := e.chain.WriteAll(e.buf[:size])
		if !m.OK() {
			e.dev.warn("event buffer not in guest memory, queue stopped", "queue", e.index, "miss", m)
			e.q.Fail(&faultError{what: "event buffer", miss: m})
			return bits, false
		}
		if err := e.q.Push(&e.chain, uint32(w)); err != nil {
			e.broke(err)
			return bits, false
		}
		bits &^= 1 << t
	}
	return 0, true
}

// take pops a buffer of the driver. If there is none it asks to be told, and looks
// once more (virtio 1.2, 2.7.13.3.1); while buffers last the driver need not kick.
func (e *eventQueue) take() bool {
	for starved := false; ; starved = true {
		ok, err := e.q.Pop(&e.chain)
		if err == nil && ok {
			if e.starved {
				e.starved = false
				err = e.q.SetNotify(false)
			}
			if err == nil {
				return true
			}
		}
		if err == nil && !starved {
			e.starved = true
			err = e.q.SetNotify(true)
		}
		if err != nil {
			e.broke(err)
			return false
		}
		if starved {
			return false
		}
	}
}

func (e *eventQueue) broke(err error) {
	if !virtq.IsRepairable(err) {
		e.dev.warn("event queue broken", "queue", e.index, "error", err)
	}
}

// forget drops an object that is going away from the lists; lane only.
func (e *eventQueue) forget(n *eventNode) {
	e.collect()
	var prev *eventNode
	for x := e.first; x != nil; prev, x = x, x.next {
		if x != n {
			continue
		}
		if prev == nil {
			e.first = n.next
		} else {
			prev.next = n.next
		}
		if e.last == n {
			e.last = prev
		}
		break
	}
	n.next = nil
	n.bits.Store(0)
	n.queued.Store(false)
}

// clear drops everything: the device was reset; lane only.
func (e *eventQueue) clear() {
	e.collect()
	for n := e.first; n != nil; {
		next := n.next
		n.next = nil
		n.bits.Store(0)
		n.queued.Store(false)
		n = next
	}
	e.first, e.last = nil, nil
}
