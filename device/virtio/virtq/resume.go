package virtq

import (
	"fmt"
	"math"
)

// Resume reads the device's position from the ring, and continues there. A front end that lost its back end may know
// less (QEMU's base of a packed ring is from its start). If its base differs, chains were taken and never returned;
// they are taken again (devices return chains in the order in which they took them, or call Reopen), and the driver is
// interrupted, because it may not have been notified of the chains returned last. Call it once, before the first Pop.
// It reports whether the base was changed.
func (q *Queue) Resume() (changed bool, err error) {
	from, at := q.lastAvail, uint16(0)
	if q.packed {
		at, err = q.resumePacked()
	} else {
		at, err = q.resumeSplit()
	}
	if err != nil {
		return false, err
	}
	q.lastAvail, q.availSeen, q.usedNext = at, at, at
	q.pos, q.have = 0, 0
	if at == from && at == q.usedPub {
		return false, nil
	}
	return true, q.Signal()
}

// resumeSplit reads the used index, and sets usedPub and usedFlags: a process that was killed may have left NO_NOTIFY.
func (q *Queue) resumeSplit() (uint16, error) {
	w, m := q.used.Uint32(0)
	if !m.OK() {
		return 0, q.missed("used index", m)
	}
	v := le32(w.Load())
	q.usedFlags, q.usedPub = uint16(v)&usedNoNotify, uint16(v>>16)
	return q.usedPub, nil
}

// Popped returns the position behind the last chain that was popped (a number modulo 1<<16).
func (q *Queue) Popped() uint16 { return q.lastAvail }

// Reopen continues a split ring at a position that Popped returned in a process that was killed, instead of the used
// index: the chains in between were popped, and the caller knows the heads of those that were not pushed (Retake).
// popped is at most Size ahead of the used position (Base). Call it once, after Resume and before the first Pop.
func (q *Queue) Reopen(popped uint16) error {
	n := int(popped - q.usedNext)
	switch {
	case q.packed:
		return fmt.Errorf("virtq: queue %d: a packed ring is not reopened", q.idx)
	case q.InFlight() > 0:
		return fmt.Errorf("virtq: queue %d: Reopen with %d chains in flight", q.idx, q.InFlight())
	case n > int(q.size):
		return fmt.Errorf("virtq: queue %d: Reopen at %#x, want at most %d past %#x", q.idx, popped, q.size, q.usedNext)
	}
	q.lastAvail, q.availSeen, q.retake = popped, popped, n
	q.pos, q.have = 0, 0
	return nil
}

// Retake pops the chain with that head again: one of those that were in flight when Reopen was called. Its errors are
// those of Pop, and it can be repeated after a repairable one. The chain can be pushed, but not be given back.
func (q *Queue) Retake(c *Chain, head uint16) error {
	if err := q.check(); err != nil {
		return err
	}
	if q.retake == 0 {
		return fmt.Errorf("virtq: queue %d: Retake of a chain that was not in flight", q.idx)
	}
	if head >= q.size {
		return q.breakRing("head of a chain in flight", 0, uint64(head), fmt.Sprintf("below %d", q.size))
	}
	q.part = part{math.MaxUint64, math.MaxInt}
	t := taken{head: head}
	if err := q.readHead(&t, nil); err != nil {
		return q.judge(err)
	}
	if err := q.open(c, &t); err != nil {
		return err
	}
	q.retake--
	c.again = true
	return nil
}

// resumePacked finds the place of the next used descriptor, and sets usedPub and staged.
//
// Only the device changes USED flags, and it changes all of them once in each round: those before the place have the
// wrap counter that is valid there, the others have the inverse (a new ring is all zeros, and starts with 1). So they
// change at one place. But a device killed in showPacked leaves three such places: from p, the true position, to x the
// descriptors are still available; from x to e they are overwritten, but the driver does not see them before the
// others. They cannot be taken again; so the chains from p to x are returned with nothing written, which for a receiver
// is a frame too short.
func (q *Queue) resumePacked() (uint16, error) {
	r := usedFlags{q: q}
	place, x, found := uint16(0), uint16(0), false
	for i := range q.size {
		if r.change(i) {
			place = i
			// If none is available after a place, none is before it.
			if x, found = i, r.available(q.before(i)) && !r.available(i); found {
				break
			}
		}
	}
	if !found {
		place |= r.used(place) ^ wrapBit
		q.usedPub = place
		return place, r.err
	}
	e := q.behind(x)
	for !r.change(e) && !r.available(e) && e != x {
		e = q.behind(e)
	}
	p := q.before(x)
	for !r.change(p) && p != e {
		p = q.before(p)
	}
	place = p | r.used(p) ^ wrapBit
	q.usedPub = place
	var d descriptor
	for at := p; at != x; {
		u := used{at: place, entries: 1}
		for {
			if m := q.readPacked(&q.desc, uint32(at), &d); !m.OK() {
				return 0, q.missed("descriptor", m)
			}
			if at = q.behind(at); d.flags&descNext == 0 || at == x {
				break
			}
			u.entries++
		}
		if u.id = d.next; d.flags&descNext != 0 { // the rest of the list, with its id, has been overwritten
			u.id = uint16(r.tail(x))
		}
		q.staged = append(q.staged, u)
		place = q.forward(place, int(u.entries))
	}
	n := int(e) - int(x)
	if n < 0 {
		n += int(q.size)
	}
	return q.forward(place, n), r.err
}

// before and behind return the neighbours of a descriptor.
func (q *Queue) before(i uint16) uint16 {
	if i == 0 {
		i = q.size
	}
	return i - 1
}

func (q *Queue) behind(i uint16) uint16 {
	if i++; i == q.size {
		i = 0
	}
	return i
}

// usedFlags reads the flags of a packed ring that only the driver may be writing.
type usedFlags struct {
	q   *Queue
	err error // the first error; flags that could not be read are 0
}

// tail returns a descriptor's id and flags.
func (r *usedFlags) tail(i uint16) uint32 {
	w, m := r.q.desc.Uint32(tail(i))
	if !m.OK() {
		if r.err == nil {
			r.err = r.q.missed("descriptor", m)
		}
		return 0
	}
	return le32(w.Load())
}

func (r *usedFlags) used(i uint16) uint16 { return uint16(r.tail(i)>>16) & descUsed }

// available reports whether the driver has made i available and the device has not overwritten it.
func (r *usedFlags) available(i uint16) bool {
	f := r.tail(i) >> 16
	return f>>7&1 != f>>15&1
}

// change reports whether the USED flags of i and its predecessor are of different rounds.
func (r *usedFlags) change(i uint16) bool {
	return (r.used(i) != r.used(r.q.before(i))) != (i == 0)
}
