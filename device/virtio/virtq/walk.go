package virtq

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"

	"github.com/vnicd/vnicd/translate"
)

// le32 converts between the little-endian words of a ring and the host's order.
func le32(v uint32) uint32 {
	if hostBig {
		return bits.ReverseBytes32(v)
	}
	return v
}

var hostBig = binary.NativeEndian.Uint16([]byte{0, 1}) == 1

// descriptor is a copy of struct virtq_desc (virtio 1.2, 2.7.5) or struct pvirtq_desc (2.8.13).
type descriptor struct {
	addr  translate.PA
	len   uint32
	flags uint16
	next  uint16 // packed: the buffer's id
}

func (q *Queue) readDesc(table *translate.RingWindow, i uint32, d *descriptor) translate.Miss {
	if m := table.Read16(&q.raw, descSize*uint64(i)); !m.OK() {
		return m
	}
	d.decode(q.raw[:])
	return translate.Miss{}
}

// decode reads each word of b once.
func (d *descriptor) decode(b []byte) {
	_ = b[descSize-1]
	d.addr = translate.PA(binary.LittleEndian.Uint64(b))
	last := binary.LittleEndian.Uint64(b[8:])
	d.len, d.flags, d.next = uint32(last), uint16(last>>32), uint16(last>>48)
}

// decodePacked decodes the two words of a packed ring's descriptor, which is known to be available.
func (d *descriptor) decodePacked(addr, last uint64) {
	d.addr, d.len, d.next, d.flags = translate.PA(addr), uint32(last), uint16(last>>32),
		uint16(last>>48)&^(descAvail|descUsed)
}

func (q *Queue) readPacked(table *translate.RingWindow, i uint32, d *descriptor) translate.Miss {
	if m := table.Read16(&q.raw, descSize*uint64(i)); !m.OK() {
		return m
	}
	d.decodePacked(binary.LittleEndian.Uint64(q.raw[:]), binary.LittleEndian.Uint64(q.raw[8:]))
	return translate.Miss{}
}

// enough reports whether no more of the chain is to be read after n descriptors of it: the device has the bytes that it
// needs, or the chain is cut.
func (q *Queue) enough(c *Chain, n int) bool {
	if c.writeLen >= q.part.need {
		return true
	}
	c.cut = n >= q.part.most
	return c.cut
}

// walk follows the chain that starts with t.
func (q *Queue) walk(c *Chain, t *taken) error {
	switch {
	case !q.packed:
		return q.walkSplit(c, t.head, t.desc)
	case t.desc.flags&descIndirect != 0:
		return q.walkTable(c, t)
	}
	return q.walkPacked(c, t.desc)
}

// walkSplit follows a chain from head on, with descriptor d. The number of steps is bounded by the table's size and by
// MaxChain, so a loop is an error; so are all other violations of virtio 1.2, 2.7.5.
func (q *Queue) walkSplit(c *Chain, head uint16, d descriptor) error {
	c.head, c.entries = head, 1
	var (
		read     int
		table    = &q.desc
		limit    = uint32(q.size) // entries of the table being walked
		i        = uint32(head)
		steps    uint32
		indirect bool
		where    = "descriptor"
	)
	for {
		if steps == limit || steps > MaxChain { // empty buffers count, too
			return q.breakRing(where, i, uint64(head), fmt.Sprintf("a chain without loops, at most %d long",
				min(limit, MaxChain)))
		}
		if steps++; steps > 1 || indirect {
			if m := q.readDesc(table, i, &d); !m.OK() {
				return q.missed(where, m)
			}
		}
		read++
		q.walked++
		if d.flags&descIndirect != 0 {
			if indirect {
				return q.breakRing(where+" flags", i, uint64(d.flags), "no INDIRECT within an indirect table")
			}
			if err := q.openTable(&d, i); err != nil {
				return err
			}
			table, limit, i, steps = &q.table, d.len/descSize, 0, 0
			indirect, where = true, "indirect descriptor"
			continue
		}
		if err := q.addSeg(c, &d, where, i); err != nil {
			return err
		}
		if d.flags&descNext == 0 || q.enough(c, read) {
			return nil
		}
		if uint32(d.next) >= limit {
			return q.breakRing(where+" next", i, uint64(d.next), fmt.Sprintf("below %d", limit))
		}
		i = uint32(d.next)
	}
}

// walkPacked follows a list of consecutive descriptors, d first (2.8.6). The last one has the id, so the list is read
// to its end even if the device does not need the rest. The ring's size is the bound, because the driver owns none of
// those in flight, and MaxChain is.
func (q *Queue) walkPacked(c *Chain, d descriptor) error {
	at, limit := q.lastAvail, min(int(q.size)-q.InFlight(), MaxChain+1)
	for n := 1; ; n++ {
		i := uint32(at &^ wrapBit)
		if n > 1 {
			if m := q.readPacked(&q.desc, i, &d); !m.OK() {
				return q.missed("descriptor", m)
			}
			if d.flags&descIndirect != 0 {
				return q.breakRing("descriptor flags", i, uint64(d.flags), "no INDIRECT in a list")
			}
		}
		q.walked++
		if err := q.addSeg(c, &d, "descriptor", i); err != nil {
			return err
		}
		if d.flags&descNext == 0 {
			c.head, c.entries = d.next, uint16(n)
			return nil
		}
		if n >= q.part.most {
			c.entries, c.cut = uint16(n), true
			return nil
		}
		if n == limit {
			return q.breakRing("descriptor flags", i, uint64(d.flags), fmt.Sprintf("a list of at most %d", limit))
		}
		at = q.forward(at, 1)
	}
}

// walkTable reads all of a packed ring's indirect table; only its WRITE flags count (2.8.7).
func (q *Queue) walkTable(c *Chain, t *taken) error {
	if err := q.openTable(&t.desc, uint32(q.lastAvail&^wrapBit)); err != nil {
		return err
	}
	c.head, c.entries = t.head, 1
	for i := range t.desc.len / descSize {
		var d descriptor
		if m := q.readPacked(&q.table, i, &d); !m.OK() {
			return q.missed("indirect descriptor", m)
		}
		if q.onlyReads {
			d.flags = 0
		}
		q.walked++
		if err := q.addSeg(c, &d, "indirect descriptor", i); err != nil {
			return err
		}
		if last := t.desc.len/descSize - 1; i < last && q.enough(c, int(i)+1) {
			return nil
		}
	}
	return nil
}

// openTable makes table the indirect table of descriptor i.
func (q *Queue) openTable(d *descriptor, i uint32) error {
	switch {
	case !q.indirect:
		return q.breakRing("descriptor flags", i, uint64(d.flags), "no INDIRECT (not negotiated)")
	case d.flags&descNext != 0:
		return q.breakRing("descriptor flags", i, uint64(d.flags), "INDIRECT without NEXT")
	case d.len == 0 || d.len%descSize != 0 || d.len > MaxChain*descSize:
		return q.breakRing("indirect table length", i, uint64(d.len),
			fmt.Sprintf("a multiple of %d from %d to %d", descSize, descSize, MaxChain*descSize))
	}
	if _, ok := d.addr.Add(uint64(d.len)); !ok {
		return q.breakRing("indirect table address", i, uint64(d.addr), "no wrap-around")
	}
	q.table = q.space.RingWindow(d.addr, uint64(d.len))
	return nil
}

// addSeg appends a buffer to the chain.
func (q *Queue) addSeg(c *Chain, d *descriptor, where string, i uint32) error {
	if d.flags&descWrite == 0 && len(c.segs) != c.reads {
		return q.breakRing(where+" flags", i, uint64(d.flags), "no readable buffer after a writable one")
	}
	if d.len == 0 {
		return nil // an empty buffer; virtio does not forbid it
	}
	if _, ok := d.addr.Add(uint64(d.len)); !ok {
		return q.breakRing(where+" address", i, uint64(d.addr), "no wrap-around")
	}
	if len(c.segs) == MaxChain {
		return q.breakRing(where, i, uint64(len(c.segs)), fmt.Sprintf("at most %d buffers in a chain", MaxChain))
	}
	c.segs = append(c.segs, Seg{PA: d.addr, Len: d.len})
	if d.flags&descWrite == 0 {
		c.reads++
		c.readLen += uint64(d.len)
	} else {
		c.writeLen += uint64(d.len)
	}
	// 2.7.5.2: a chain is at most 2^32 bytes; used lengths have 32 bits.
	if c.readLen+c.writeLen > math.MaxUint32 {
		return q.breakRing(where+" length", i, uint64(d.len), "a chain of less than 4 GiB")
	}
	return nil
}
