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

// descriptor is struct virtq_desc (virtio 1.2, 2.7.5), copied in.
type descriptor struct {
	addr  translate.PA
	len   uint32
	flags uint16
	next  uint16
}

func (q *Queue) readDesc(table *translate.Window, i uint32, d *descriptor) translate.Miss {
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

// walk follows the chain that starts at head, with descriptor d. The number of steps is bounded by
// the table's size, so a loop ends as an error; so does everything else that
// virtio 1.2, 2.7.5 forbids a driver to do.
func (q *Queue) walk(c *Chain, head uint16, d descriptor) error {
	c.head = head
	var (
		table    = &q.desc
		limit    = uint32(q.size) // entries of the table being walked
		i        = uint32(head)
		steps    uint32
		indirect bool
		where    = "descriptor"
		nread    int
	)
	for {
		if steps == limit {
			return q.breakRing(where, i, uint64(head), fmt.Sprintf("a chain without loops, at most %d long", limit))
		}
		if steps++; steps > 1 || indirect {
			if m := q.readDesc(table, i, &d); !m.OK() {
				return q.missed(where, m)
			}
		}
		if d.flags&descIndirect != 0 {
			switch {
			case !q.indirect:
				return q.breakRing(where+" flags", i, uint64(d.flags), "no INDIRECT (not negotiated)")
			case indirect:
				return q.breakRing(where+" flags", i, uint64(d.flags), "no INDIRECT within an indirect table")
			case d.flags&descNext != 0:
				return q.breakRing(where+" flags", i, uint64(d.flags), "INDIRECT without NEXT")
			case d.len == 0 || d.len%descSize != 0 || d.len > MaxChain*descSize:
				return q.breakRing("indirect table length", i, uint64(d.len), fmt.Sprintf("a multiple of %d from %d to %d", descSize, descSize, MaxChain*descSize))
			}
			if _, ok := d.addr.Add(uint64(d.len)); !ok {
				return q.breakRing("indirect table address", i, uint64(d.addr), "no wrap-around")
			}
			q.table = q.space.Window(d.addr, uint64(d.len))
			table, limit, i, steps = &q.table, d.len/descSize, 0, 0
			indirect, where = true, "indirect descriptor"
			continue
		}
		if err := q.addSeg(c, &d, where, i, &nread); err != nil {
			return err
		}
		if d.flags&descNext == 0 {
			break
		}
		if uint32(d.next) >= limit {
			return q.breakRing(where+" next", i, uint64(d.next), fmt.Sprintf("below %d", limit))
		}
		i = uint32(d.next)
	}
	c.reads = nread
	return nil
}

func (q *Queue) addSeg(c *Chain, d *descriptor, where string, i uint32, nread *int) error {
	if d.flags&descWrite == 0 && len(c.segs) != *nread {
		return q.breakRing(where+" flags", i, uint64(d.flags), "no readable buffer behind a writable one")
	}
	if d.len == 0 {
		return nil // carries nothing; virtio does not forbid it
	}
	if _, ok := d.addr.Add(uint64(d.len)); !ok {
		return q.breakRing(where+" address", i, uint64(d.addr), "no wrap-around")
	}
	if len(c.segs) == MaxChain {
		return q.breakRing(where, i, uint64(len(c.segs)), fmt.Sprintf("at most %d buffers in a chain", MaxChain))
	}
	c.segs = append(c.segs, Seg{PA: d.addr, Len: d.len})
	if d.flags&descWrite == 0 {
		*nread++
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
