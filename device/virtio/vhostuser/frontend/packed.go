package frontend

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"github.com/vnicd/vnicd/translate"
)

// The packed ring (virtio 1.2, 2.8). A place is an offset with the wrap counter in bit 15. Its arithmetic does not use
// virtq's, so that a mistake in either shows.

const (
	flagAvail = 1 << 7
	flagUsed  = 1 << 15

	wrapBit = 1 << 15

	eventDisable = 1 << 16 // 2.8.10: flags in the upper half, a place in the lower
	eventDesc    = 2 << 16
	eventMask    = 3 << 16
)

// packedRing is the driver's state of a packed ring.
type packedRing struct {
	tails []*atomic.Uint32 // id and flags of each descriptor
	room  int              // free descriptors
	head  uint32           // the tail that Kick stores; the device sees no staged chain before that
}

// initPacked makes an empty ring.
func (q *Queue) initPacked() error {
	p := &packedRing{room: int(q.size), tails: make([]*atomic.Uint32, q.size)}
	for i := range p.tails {
		w, err := q.mem.Uint32(q.descPA + translate.PA(16*i+12))
		if err != nil {
			return err
		}
		p.tails[i] = w
	}
	q.packed, q.next, q.kicked, q.seen = p, wrapBit, wrapBit, wrapBit
	return nil
}

// forward returns the place n descriptors after p, at most a round.
func (q *Queue) forward(p uint16, n int) uint16 {
	at := int(p&^wrapBit) + n
	if at >= int(q.size) {
		at -= int(q.size)
		p ^= wrapBit
	}
	return p&wrapBit | uint16(at)
}

// distance returns how far b is after a, within two rounds.
func (q *Queue) distance(a, b uint16) int {
	n := int(b&^wrapBit) - int(a&^wrapBit) + (int(b>>15)-int(a>>15))*int(q.size)
	if n < 0 {
		n += 2 * int(q.size)
	}
	return n
}

// addPacked implements Add; n is the number of buffers.
func (q *Queue) addPacked(token uint64, out, in []Buf, n int) error {
	p := q.packed
	table := q.tables != 0 && n > 1 && n <= maxIndirect
	need := n
	if table {
		need = 1
	}
	if p.room < need {
		return ErrFull
	}
	id := q.take()
	if table {
		t := int(id) * maxIndirect * 16
		for i := range n {
			b, fl := pick(out, in, i)
			putDesc(q.tabMem[t+i*16:], b, 0, fl) // the flags are in the last word
		}
		q.write(Buf{PA: q.tables + translate.PA(t), Len: uint32(n * 16)}, id, flagIndirect)
	} else {
		for i := range n {
			b, fl := pick(out, in, i)
			if i < n-1 {
				fl |= flagNext
			}
			q.write(b, id, fl)
		}
	}
	q.chains[id] = chain{token: token, n: uint16(need)}
	p.room -= need
	return nil
}

// write stages the next descriptor.
func (q *Queue) write(b Buf, id, flags uint16) {
	i := int(q.next &^ wrapBit)
	d := q.desc[16*i:]
	binary.LittleEndian.PutUint64(d, uint64(b.PA))
	binary.LittleEndian.PutUint32(d[8:], b.Len)
	if q.next&wrapBit != 0 {
		flags |= flagAvail
	} else {
		flags |= flagUsed
	}
	if tail := uint32(id) | uint32(flags)<<16; q.next == q.kicked {
		q.packed.head = tail
	} else {
		q.packed.tails[i].Store(le32(tail))
	}
	q.next = q.forward(q.next, 1)
}

// kickPacked makes the staged chains available, and reports whether the device wants a kick (2.8.21).
func (q *Queue) kickPacked() bool {
	old := q.kicked
	q.packed.tails[old&^wrapBit].Store(le32(q.packed.head))
	q.kicked = q.next
	ev := le32(q.uIdx.Load())
	if q.eventIdx && ev&eventMask == eventDesc {
		n := q.distance(uint16(ev), q.next)
		return n > 0 && n <= q.distance(old, q.next)
	}
	return ev&eventMask != eventDisable
}

// used returns the tail of the next used descriptor, if there is one.
func (q *Queue) used() (tail uint32, ok bool) {
	tail = le32(q.packed.tails[q.seen&^wrapBit].Load())
	want := uint32(0)
	if q.seen&wrapBit != 0 {
		want = flagAvail | flagUsed
	}
	return tail, tail>>16&(flagAvail|flagUsed) == want
}

// getPacked implements Get.
func (q *Queue) getPacked() (token uint64, written uint32, ok bool, err error) {
	tail, ok := q.used()
	if !ok {
		return 0, 0, false, nil
	}
	id := uint16(tail)
	if id >= q.size || q.chains[id].n == 0 {
		return 0, 0, false, fmt.Errorf("frontend: queue %d: device returned chain %d, which it did not have", q.index, id)
	}
	if tail>>16&flagWrite != 0 {
		written = binary.LittleEndian.Uint32(q.desc[16*int(q.seen&^wrapBit)+8:])
	}
	c := q.chains[id]
	q.chains[id] = chain{}
	q.free = append(q.free, id)
	q.packed.room += int(c.n)
	q.seen = q.forward(q.seen, int(c.n))
	return c.token, written, true, nil
}

// event returns the word that EnableCall writes.
func (q *Queue) event(on bool) uint32 {
	switch {
	case !on:
		return eventDisable
	case q.eventIdx:
		return eventDesc | uint32(q.seen)
	}
	return 0
}
