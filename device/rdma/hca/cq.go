// Side: data

package hca

import (
	"sync"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/journal"
	"github.com/vnicd/vnicd/translate"
)

// cq is a completion queue. Its producer is the loop of its QPs. If QPs of several
// loops use it, shared is set (on the first loop, before the second one learns of
// the CQ) and mu orders the loops.
//
// The order of a completion: element, producer index (release and full barrier),
// arm word. The driver's is the reverse: arm word, barrier, producer index. So
// either the driver sees the completion or the device sees the arm word.
type cq struct {
	dev *dataSide
	n   uint32
	ceq *eventQueue
	arm translate.PA

	shared bool
	mu     sync.Mutex
	r      ring
	prod   uint32 // next element to write
	cons   uint32 // the guest's consumer index when last read
	room   uint32 // until the first completion after a kill: at least so many elements were free; 0: see cons
	wc     [abi.SizeWC]byte
	seq    uint64        // journal.go
	word   *journal.Word // in the journal; nil: there is none

	moderation atomic.Pointer[moderation] // of its events; nil: there is none
	delayed    atomic.Bool                // an event is due that was not posted
	first      uint32                     // prod with the first completion of that event

	failed atomic.Bool // overrun, or its memory is gone: no more CQEs are written
	notice cqNotice

	comp eventNode // for the completion event queue
	asyn eventNode // for the asynchronous event queue
}

// newCQ makes a CQ whose ring is empty.
func newCQ(d *dataSide, n uint32, r ring, arm translate.PA, ceq *eventQueue) *cq {
	c := &cq{dev: d, n: n, r: r, arm: arm, ceq: ceq, seq: 1}
	c.comp.init(n, nodeCompletion)
	c.comp.cq = c
	c.asyn.init(n, nodeCQ)
	c.asyn.cq = c
	return c
}

// start adopts the producer index of the header.
func (c *cq) start() translate.Miss {
	p, m := c.r.index(abi.RingProducerOff)
	c.prod, c.cons = p, p
	return m
}

// post writes wc, and raises a completion event if the guest asked for one.
// solicited: the completion also triggers a "solicited only" arm
// (IBTA 11.4.2.2: the sender set the bit, or the request failed).
func (c *cq) post(wc *abi.WC, solicited bool) {
	if c.shared {
		c.mu.Lock()
		defer c.mu.Unlock() // also when a vanished page unwinds this call
	}
	c.produce(wc, solicited)
}

// produce is post without the lock.
func (c *cq) produce(wc *abi.WC, solicited bool) {
	if c.failed.Load() {
		return
	}
	full, m := c.full()
	switch {
	case !m.OK():
		c.fail("its ring is gone", m)
		return
	case full:
		c.fail("overrun: the guest did not poll it in time", m)
		return
	}
	wc.Encode(c.wc[:])
	if m = c.r.mem.Write(c.r.at(c.prod), c.wc[:]); m.OK() {
		point()
		c.prod = (c.prod + 1) & c.r.mask
		m = c.r.setIndex(abi.RingProducerOff, c.prod)
	}
	if !m.OK() {
		c.fail("its ring is gone", m)
		return
	}
	arm, m := c.dev.space().RingUint32(c.arm)
	if !m.OK() {
		c.fail("its arm word is gone", m)
		return
	}
	switch arm.Load() {
	case abi.ArmNone:
		if c.delayed.Load() {
			c.counted()
		}
		return
	case abi.ArmSolicited:
		if !solicited {
			return
		}
	}
	if arm.Swap(abi.ArmNone) != abi.ArmNone {
		c.due()
	}
}

// full reports whether one more element would fill the ring. The consumer index, a
// cache line that the guest writes at every poll, is reread only when the last
// known value makes the ring look more than half full.
//
// The consumer index moves at most up to the producer index. Some releases of the
// rxe provider move it one beyond (rdma-core 44, end_poll after a failed
// next_poll). Reread this early, it cannot be mistaken for a full ring; the guest
// expects the next completion there, so the producer follows. After a kill the index
// that the killed process had read last is not known, but whether there was room.
func (c *cq) full() (bool, translate.Miss) {
	used := (c.prod - c.cons) & c.r.mask
	if used <= c.r.mask/2 {
		c.room = 0
		return false, translate.Miss{}
	}
	v, m := c.r.index(abi.RingConsumerOff)
	if !m.OK() {
		return false, m
	}
	passed := (v-c.cons)&c.r.mask > used || c.room > 0 && v == (c.prod+1)&c.r.mask
	if c.cons, c.room = v, 0; passed {
		c.prod = v
	}
	c.save() // what the next process has to know of v, before a completion follows
	point()
	return (c.prod+1)&c.r.mask == c.cons, m
}

// fail stops the CQ for good (IBTA 11.6.3: CQ error). The QPs that
// use it go to the error state, each on its own loop.
func (c *cq) fail(why string, m translate.Miss) {
	if c.failed.Swap(true) {
		return
	}
	if m.OK() {
		c.dev.warn("completion queue failed", "cq", c.n, "elements", c.r.mask+1, "reason", why)
	} else {
		c.dev.warn("completion queue failed", "cq", c.n, "reason", why, "miss", m)
	}
	c.setNotice(cqUntold, 0)
	c.save()
	point()
	c.dev.async.post(&c.asyn, 1<<abi.EventCQErr)
	c.dev.cqFailures.Add(1)
	c.dev.wakeAll()
}

// moveChunk is how many elements of a ring are moved at a time: the loop, which other VMs share, continues in between.
const moveChunk = 2048

// cqMove is a resize of a CQ in progress.
type cqMove struct {
	to     ring
	from   uint32 // next element of the old ring to move
	copied uint32 // elements of the new one
}

// startMove begins to move the completions that the guest has not polled to a new ring. It and continueMove
// run where no producer runs: on the loop of its QPs, or on the caller's goroutine if it has no QP, and under mu if
// shared. Meanwhile completions are produced into the old ring; the guest polls none (RESIZE_CQ).
func (c *cq) startMove(to ring) (m cqMove, err error) {
	if c.shared {
		c.mu.Lock()
		defer c.mu.Unlock()
	}
	cons, miss := c.r.index(abi.RingConsumerOff)
	if !miss.OK() {
		return m, &faultError{what: "the old ring", miss: miss}
	}
	m = cqMove{to: to, from: cons}
	return m, m.fits(c)
}

// fits checks that the new ring has room for all completions.
func (m *cqMove) fits(c *cq) error {
	if n := m.copied + (c.prod-m.from)&c.r.mask; n > m.to.mask {
		return refuse(abi.StatusInvalid, "%d completions are not polled yet, the new ring holds %d", n, m.to.mask)
	}
	return nil
}

// continueMove moves the next completions, and replaces the ring once all are moved. Each call moves at least one and
// they fit, so the number of calls is bounded, whatever is produced in between. moved is called when the new ring is in
// use, before anything is produced into it.
func (c *cq) continueMove(m *cqMove, moved func()) (done bool, err error) {
	if c.shared {
		c.mu.Lock()
		defer c.mu.Unlock()
	}
	if err := m.fits(c); err != nil {
		return false, err
	}
	tmp := make([]byte, abi.SizeWC)
	for n := 0; m.from != c.prod; n++ {
		if n == moveChunk {
			return false, nil
		}
		miss := c.r.mem.Read(tmp, c.r.at(m.from))
		if miss.OK() {
			miss = m.to.mem.Write(m.to.at(m.copied), tmp)
		}
		if !miss.OK() {
			return false, &faultError{what: "moving completions to the new ring", miss: miss}
		}
		m.from, m.copied = (m.from+1)&c.r.mask, m.copied+1
	}
	miss := m.to.setIndex(abi.RingConsumerOff, 0)
	if miss.OK() {
		miss = m.to.setIndex(abi.RingProducerOff, m.copied)
	}
	if !miss.OK() {
		return false, &faultError{what: "moving completions to the new ring", miss: miss}
	}
	c.r, c.prod, c.cons, c.room = m.to, m.copied, 0, 0
	moved()
	return true, nil
}
