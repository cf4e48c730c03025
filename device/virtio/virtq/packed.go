package virtq

import (
	"encoding/binary"
	"fmt"

	"github.com/vnicd/vnicd/translate"
)

// The packed ring (virtio 1.2, 2.8) consists of descriptors only: the driver makes them available, and the device
// overwrites them as used. Two flags tell which, relative to a wrap counter that changes with every round.
//
// A place is the offset of a descriptor with the wrap counter in bit 15, as in event structures and vhost-user's bases.

const (
	descAvail = 1 << 7
	descUsed  = 1 << 15

	wrapBit = 1 << 15

	// Flags of the event structures (2.8.10), in the upper half of their word; the lower half is a place.
	eventEnable  = 0 << 16
	eventDisable = 1 << 16
	eventDesc    = 2 << 16
	eventMask    = 3 << 16
	unknown      = eventMask // a reserved value: nothing was written yet
)

// distance returns how far place b is after a, within two rounds. For a place outside the ring, which a driver may
// write, the result is meaningless.
func (q *Queue) distance(a, b uint16) int {
	n := int(b&^wrapBit) - int(a&^wrapBit) + (int(b>>15)-int(a>>15))*int(q.size)
	if n < 0 {
		n += q.round
	}
	return n
}

// forward returns the place n descriptors, at most a round, after p.
func (q *Queue) forward(p uint16, n int) uint16 {
	at := int(p&^wrapBit) + n
	if at >= int(q.size) {
		at -= int(q.size)
		p ^= wrapBit
	}
	return p&wrapBit | uint16(at)
}

// availableAt and usedAt return the two flags of an available and of a used descriptor at place p (2.8.1).
func availableAt(p uint16) uint32 {
	if p&wrapBit != 0 {
		return descAvail
	}
	return descUsed
}

func usedAt(p uint16) uint32 {
	if p&wrapBit != 0 {
		return descAvail | descUsed
	}
	return 0
}

// tail returns the offset of a descriptor's last word, id and flags.
func tail(p uint16) uint64 { return descSize*uint64(p&^wrapBit) + 12 }

// pendingPacked checks only the next descriptor.
func (q *Queue) pendingPacked() (int, error) {
	w, m := q.desc.Uint32(tail(q.lastAvail))
	if !m.OK() {
		return 0, q.missed("descriptor", m)
	}
	flags := le32(w.Load()) >> 16
	if flags&(descAvail|descUsed) != availableAt(q.lastAvail) {
		return 0, nil
	}
	// All are in flight, so none of them can be available.
	if q.InFlight() == int(q.size) {
		return 0, q.breakRing("descriptor flags", uint32(q.lastAvail&^wrapBit), uint64(flags),
			fmt.Sprintf("no more than %d descriptors in flight", q.size))
	}
	return 1, nil
}

// fetchPacked fills ready until it finds an error. After a list of several descriptors it stops, because the next
// chain's start is only known once the list is walked.
func (q *Queue) fetchPacked() error {
	most := min(int(q.size)-q.InFlight(), ahead)
	if most == 0 {
		_, err := q.pendingPacked()
		return err
	}
	ring := q.desc.Bytes(descSize * uint64(q.size))
	for at := q.lastAvail; q.have < most; at = q.forward(at, 1) {
		t := &q.ready[q.have]
		w, m := q.desc.Uint32(tail(at))
		if !m.OK() {
			return &MissError{Queue: q.idx, What: "descriptor", Miss: m}
		}
		last := le32(w.Load()) // before the others: the driver owns them until then
		if last>>16&(descAvail|descUsed) != availableAt(at) {
			return nil
		}
		b := q.raw[:]
		if ring != nil {
			b = ring[descSize*int(at&^wrapBit):][:descSize]
		} else if m := q.desc.Read16(&q.raw, descSize*uint64(at&^wrapBit)); !m.OK() {
			return &MissError{Queue: q.idx, What: "descriptor", Miss: m}
		}
		t.desc.decodePacked(binary.LittleEndian.Uint64(b), uint64(last)<<32|uint64(binary.LittleEndian.Uint32(b[8:])))
		t.head = t.desc.next
		t.lookUp(q.space)
		if q.have++; t.desc.flags&descNext != 0 {
			return nil
		}
	}
	return nil
}

// used is a chain that was pushed but not published.
type used struct {
	at      uint16 // place of its used descriptor
	id      uint16
	entries uint16
	written uint32
}

// showPacked writes the used descriptors of the staged chains, the first one last (2.8.9): the driver reads them in
// order, so it sees none before that. Its store orders the others before it, and the reads of event words after it.
func (q *Queue) showPacked() translate.Miss {
	for i := len(q.staged) - 1; i >= 0; i-- {
		if m := q.show(&q.staged[i], i == 0); !m.OK() {
			return m
		}
	}
	q.staged = q.staged[:0]
	return translate.Miss{}
}

func (q *Queue) show(u *used, first bool) translate.Miss {
	// A list has one used descriptor; the driver skips the others and does not read them. They are marked as well, so
	// that the USED flags tell the device's position after a crash: see resumePacked.
	for n := int(u.entries) - 1; n > 0; n-- {
		p := q.forward(u.at, n)
		w, m := q.desc.Uint32(tail(p))
		if !m.OK() {
			return m
		}
		w.Store(le32(usedAt(p)<<16 | uint32(u.id)))
	}
	last := usedAt(u.at)<<16 | uint32(u.id)
	if u.written > 0 {
		last |= descWrite << 16
	}
	if !first {
		binary.LittleEndian.PutUint64(q.elem[:], uint64(last)<<32|uint64(u.written))
		return q.desc.Write8(tail(u.at)-4, &q.elem)
	}
	n, m := q.desc.Uint32(tail(u.at) - 4)
	if !m.OK() {
		return m
	}
	w, m := q.desc.Uint32(tail(u.at))
	if m.OK() {
		n.Store(le32(u.written))
		w.Store(le32(last))
	}
	return m
}

// wantedPacked reports whether the driver asked for an interrupt.
func (q *Queue) wantedPacked() (bool, error) {
	w, m := q.avail.Uint32(0)
	if !m.OK() {
		return false, q.missed("driver event structure", m)
	}
	v := le32(w.Load())
	if q.eventIdx && v&eventMask == eventDesc {
		return q.passed(uint16(v)), nil
	}
	return v&eventMask != eventDisable, nil
}

// notifyPacked implements SetNotify.
func (q *Queue) notifyPacked(on bool) error {
	v := uint32(eventEnable)
	switch {
	case !on && q.event&eventMask == eventDesc:
		return nil // the driver kicks at most once in two rounds of the ring
	case !on:
		v = eventDisable
	case q.eventIdx:
		v = eventDesc | uint32(q.lastAvail)
	}
	if v == q.event {
		return nil
	}
	w, m := q.used.Uint32(0)
	if !m.OK() {
		return q.missed("device event structure", m)
	}
	w.Store(le32(v))
	q.event = v
	return nil
}
