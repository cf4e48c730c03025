// Side: data

package hca

import (
	"sync"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/journal"
)

// A CQ's word in the journal: its sequence number (39 bits, never 0: the number of completions written so far, which
// the next one is assigned), whether it has failed (bit 24), and the producer index (22 bits: Limits.CQEs). In between
// are two bits, which older versions do not know: they wrote 0, and ignore others.
//
// While the CQ works they say how many free elements the producer knows of: 1 + min(n, 2), or 0 if that is not known.
// A process that revives the CQ finds only the guest's consumer index. If it is one beyond the producer, it tells a
// full ring from one whose guest has passed the producer (see cq.full).
//
// A CQ that has failed assigns no more numbers. The bits say whether the driver knows of the failure:
//
//	cqUntold    the CQ error event is to be posted
//	cqTelling   the event becomes visible alone, where the event queue's used ring has the position (16 bits, plus 1)
//	            that is in the place of the sequence number: if it goes on there, the driver has not seen the event
const (
	cqSeqShift  = 25
	cqSeqMax    = 1<<39 - 1
	cqFailed    = 1 << 24
	cqTelling   = 1 << 23
	cqUntold    = 1 << 22
	cqRoomShift = 22
	cqRoomMax   = 2
	cqProdMask  = 1<<cqRoomShift - 1
)

// cqNotice says what the driver knows of a CQ's failure. The CQ's producer and the asynchronous event queue's engine
// write the CQ's word when it has failed, and the control side may assign another word meanwhile.
type cqNotice struct {
	mu    sync.Mutex // guards state and position, and after a failure the word; innermost
	state uint64     // 0, cqUntold, or cqUntold|cqTelling
	at    uint16     // cqTelling: position in the used ring
}

// show posts a completion that is in the journal, unless that was done already.
func (c *cq) show(o *output) {
	if c.shared {
		c.mu.Lock()
		defer c.mu.Unlock()
	}
	if c.failed.Load() {
		return
	}
	switch seq := o.place.Load(); seq {
	case 0:
		o.place.Store(c.seq)
		point()
	case c.seq: // whoever assigned it was interrupted: the index, which comes last, says when
		if v, m := c.r.index(abi.RingProducerOff); m.OK() && v == (c.prod+1)&c.r.mask {
			c.prod, c.room = v, max(c.room, 1)-1
			c.seq = c.seq%cqSeqMax + 1
			c.save()
			return
		}
	default:
		return // it is in the ring
	}
	c.produce(&o.wc, o.solicited)
	point()
	c.seq = c.seq%cqSeqMax + 1
	c.save()
	point()
}

// save stores the position in the journal; the producer.
func (c *cq) save() {
	if c.failed.Load() {
		c.notice.mu.Lock()
		defer c.notice.mu.Unlock()
	}
	if c.word == nil {
		return
	}
	v := c.seq<<cqSeqShift | uint64(c.prod)
	if c.failed.Load() {
		v = c.notice.add(v | cqFailed)
	} else {
		room := c.room // not known better since the word of a killed process said so
		if room == 0 {
			room = min(c.r.mask-(c.prod-c.cons)&c.r.mask, cqRoomMax)
		}
		v |= uint64(1+room) << cqRoomShift
	}
	c.word.Store(v)
}

// add returns the word v of a CQ that has failed with what the driver knows. The caller holds mu.
func (n *cqNotice) add(v uint64) uint64 {
	if v = v&^(cqUntold|cqTelling) | n.state; n.state&cqTelling != 0 {
		v = v&(1<<cqSeqShift-1) | (uint64(n.at)+1)<<cqSeqShift
	}
	return v
}

// setNotice changes what the driver knows of the CQ's failure.
func (c *cq) setNotice(state uint64, at uint16) {
	n := &c.notice
	n.mu.Lock()
	defer n.mu.Unlock()
	n.state, n.at = state, at
	if c.word != nil && c.failed.Load() {
		c.word.Store(n.add(c.word.Load()))
	}
}

// told reports whether the driver has seen the event that a killed process was about to make visible, now that the
// event queue goes on at a position of the used ring.
func (c *cq) told(at uint16) bool {
	n := &c.notice
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.state&cqTelling != 0 && n.at != at
}

// setWord assigns a word of the journal; nil: none. The caller excludes the producer.
func (c *cq) setWord(w *journal.Word) {
	c.notice.mu.Lock()
	defer c.notice.mu.Unlock()
	c.word = w
}

// recall sets what the word of a killed process says besides the producer index and whether the CQ has failed.
func (c *cq) recall(w *journal.Word) {
	v := w.Load()
	c.setWord(w)
	switch c.seq = v >> cqSeqShift; {
	case v&cqFailed == 0:
		// In a ring of two, a producer that follows by one could not be told from one that has produced one.
		if room := uint32(v>>cqRoomShift) & 3; room > 0 && c.r.mask > 1 {
			c.room = room - 1
		}
	case v&cqTelling != 0:
		c.setNotice(v&(cqUntold|cqTelling), uint16(c.seq-1))
	}
}
