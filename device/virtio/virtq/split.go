package virtq

import (
	"encoding/binary"
	"fmt"

	"github.com/vnicd/vnicd/translate"
)

// The split ring (virtio 1.2, 2.7): a descriptor table, and two rings for available and for used chains.

const (
	availNoInterrupt = 1 // 2.7.6
	usedNoNotify     = 1 // 2.7.8

	usedElemSize = 8
)

// pendingSplit reads the available index.
func (q *Queue) pendingSplit() (int, error) {
	v, err := q.load16("available index", &q.avail, 2)
	if err != nil {
		return 0, err
	}
	n := v - q.lastAvail
	if n > q.size {
		return 0, q.breakRing("available index", 0, uint64(v), fmt.Sprintf("at most %d past %#x", q.size, q.lastAvail))
	}
	// A driver cannot own a descriptor twice: one in flight is not available again before it was pushed.
	if int(n)+q.InFlight() > int(q.size) {
		return 0, q.breakRing("available index", 0, uint64(v), fmt.Sprintf("no more than %d chains with %d in flight", q.size,
			q.InFlight()))
	}
	q.availSeen = v
	return int(n), nil
}

// fetchSplit fills ready until it finds an error.
func (q *Queue) fetchSplit() (err error) {
	n := int(q.availSeen - q.lastAvail)
	if n == 0 {
		if n, err = q.pendingSplit(); n == 0 {
			return err
		}
	}
	ring, table := q.avail.Bytes(4+2*uint64(q.size)), q.desc.Bytes(descSize*uint64(q.size))
	for q.have < min(n, ahead) {
		if err = q.begin(q.lastAvail+uint16(q.have), &q.ready[q.have], ring, table); err != nil {
			return err
		}
		q.have++
	}
	return nil
}

// begin reads an available ring entry and the first descriptor of its chain; ring and table are nil unless each is
// contiguous on the host. The caller decides about an error, because it may not be that chain's turn yet.
func (q *Queue) begin(at uint16, t *taken, ring, table []byte) error {
	slot := at & q.mask
	if ring != nil {
		t.head = binary.LittleEndian.Uint16(ring[4+2*int(slot):])
	} else {
		w, shift, m := q.avail.Around(4 + 2*uint64(slot))
		if !m.OK() {
			return &MissError{Queue: q.idx, What: "available ring entry", Miss: m}
		}
		t.head = uint16(le32(w.Load()) >> shift)
	}
	if t.head >= q.size {
		return &RingError{Queue: q.idx, What: "available ring entry", Index: uint32(slot), Value: uint64(t.head),
			Want: fmt.Sprintf("below %d", q.size)}
	}
	return q.readHead(t, table)
}

// readHead reads the first descriptor of the chain at t.head, which is below size.
func (q *Queue) readHead(t *taken, table []byte) error {
	if table != nil {
		t.desc.decode(table[descSize*int(t.head):])
	} else if m := q.readDesc(&q.desc, uint32(t.head), &t.desc); !m.OK() {
		return &MissError{Queue: q.idx, What: "descriptor", Miss: m}
	}
	t.lookUp(q.space)
	return nil
}

// useSplit writes the next used entry.
func (q *Queue) useSplit(c *Chain, written uint32) translate.Miss {
	binary.LittleEndian.PutUint64(q.elem[:], uint64(written)<<32|uint64(c.head))
	return q.used.Write8(4+usedElemSize*uint64(q.usedNext&q.mask), &q.elem)
}

// storeUsed writes flags and index of the used ring, both owned by the device, in one store that orders the entries
// before it and the reads of event words after it.
func (q *Queue) storeUsed(idx uint16) error {
	w, m := q.used.Uint32(0)
	if !m.OK() {
		return q.missed("used index", m)
	}
	w.Store(le32(uint32(q.usedFlags) | uint32(idx)<<16))
	return nil
}

// wantedSplit reports whether the driver asked for an interrupt.
func (q *Queue) wantedSplit() (bool, error) {
	if q.eventIdx {
		ev, err := q.load16("used event index", &q.avail, 4+2*uint64(q.size))
		return err == nil && q.passed(ev), err
	}
	fl, err := q.load16("available flags", &q.avail, 0)
	return err == nil && fl&availNoInterrupt == 0, err
}

// notifySplit implements SetNotify.
func (q *Queue) notifySplit(on bool) error {
	if q.eventIdx {
		if !on {
			return nil // the driver kicks at most once per round of the index
		}
		return q.storeAvailEvent(q.lastAvail)
	}
	fl := uint16(0)
	if !on {
		fl = usedNoNotify
	}
	if fl == q.usedFlags {
		return nil
	}
	q.usedFlags = fl
	return q.storeUsed(q.usedPub)
}

// storeAvailEvent writes the word after the used entries. The other half of its aligned word is not the device's, hence
// compare-and-swap; it is bounded, because a guest could rewrite its half all the time.
func (q *Queue) storeAvailEvent(v uint16) error {
	w, _, m := q.used.Around(4 + usedElemSize*uint64(q.size))
	if !m.OK() {
		return q.missed("available event index", m)
	}
	for range 64 {
		old := w.Load()
		if w.CompareAndSwap(old, le32(le32(old)&0xffff0000|uint32(v))) {
			return nil
		}
	}
	return q.breakRing("available event index", 0, uint64(v), "a word that the driver does not write")
}
