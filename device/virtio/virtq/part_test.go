package virtq

import (
	"errors"
	"strings"
	"testing"
)

// PopPart stops behind the bytes or the descriptors that it is given. A chain that is cut can only be given back.
func TestPopPart(t *testing.T) {
	g := newGuest(t, 64)
	q := g.queue(nil)
	for i := range 20 { // one chain of 20 buffers of 10 bytes
		flags := uint16(descWrite | descNext)
		if i == 19 {
			flags = descWrite
		}
		g.setDesc(g.desc, i, uint64(memBase)+0x80000, 10, flags, uint16(i+1))
	}
	g.offer(0, 0)
	var c Chain
	for _, x := range []struct {
		need   uint64
		most   int
		bytes  uint64
		walked uint64
		cut    bool
	}{
		{1, 100, 10, 1, false}, {10, 1, 10, 1, false}, {11, 1, 10, 1, true}, {55, 6, 60, 6, false}, {55, 5, 50, 5, true},
		{200, 20, 200, 20, false}, {1000, 100, 200, 20, false}, {1000, 20, 200, 20, false}, {1000, 19, 190, 19, true},
	} {
		before := q.Walked()
		if ok, err := q.PopPart(&c, x.need, x.most); !ok || err != nil {
			t.Fatal(ok, err)
		}
		if c.WritableLen() != x.bytes || q.Walked()-before != x.walked || c.Cut() != x.cut {
			t.Errorf("%+v: %d bytes, %d read, cut %v", x, c.WritableLen(), q.Walked()-before, c.Cut())
		}
		if x.cut {
			if err := q.Push(&c, 1); err == nil || !strings.Contains(err.Error(), "not read to its end") {
				t.Errorf("%+v: Push: %v", x, err)
			}
		}
		if err := q.Unpop(&c); err != nil {
			t.Fatal(err)
		}
	}
	if ok, err := q.Pop(&c); !ok || err != nil || c.WritableLen() != 200 || c.Cut() {
		t.Errorf("Pop: %v, %v, %d bytes", ok, err, c.WritableLen())
	}
	if err := q.Push(&c, 200); err != nil {
		t.Error(err)
	}
}

// Buffers without bytes are descriptors like others: a chain of them ends at MaxChain.
func TestEmptyBuffersAreBounded(t *testing.T) {
	const size = 4096
	split, packed := newGuest(t, size), newGuest(t, size)
	packed.packed = true
	for i := range size {
		split.setDesc(split.desc, i, 0, 0, descNext, uint16((i+1)%size))
		packed.setDesc(packed.desc, i, 0, 0, 0, descNext|descAvail)
	}
	split.offer(0, 0)
	for _, g := range []*guest{split, packed} {
		q := g.queue(nil)
		var c Chain
		ok, err := q.Pop(&c)
		var broken *RingError
		if ok || !errors.As(err, &broken) || q.Walked() > MaxChain+1 {
			t.Errorf("packed %v: %v, %v, %d descriptors read", g.packed, ok, err, q.Walked())
		}
	}
}
