package virtq

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/vnicd/vnicd/translate"
)

// model is a naive driver with an idealised queue beside it: it remembers every
// chain it offered as plain lists, and checks what the device's side makes of
// the same ring.
type model struct {
	*guest
	r        *rand.Rand
	q        *Queue
	call     *event
	eventIdx bool
	indirect bool

	free   []int // free descriptors
	offers []*offered
	taken  []*offered // popped, in order; pushed ones are removed
	staged []*offered // pushed, not published
	done   []*offered // published, not collected
	avail  uint16
	seen   uint16
}

type offered struct {
	head   uint16
	descs  []int
	out    []byte // what the device must read
	in     []Seg  // where it may write
	inLen  int
	wrote  []byte
	length uint32
	chain  *Chain
}

const (
	slotSize = 256 // bytes of buffer per descriptor, direct or indirect
	maxSegs  = 6
)

// bufAt is the buffer of segment k of descriptor d: no two offers share one.
func bufAt(d, k int) translate.PA {
	return memBase + 0x20000 + translate.PA((d*maxSegs+k)*slotSize)
}

func tableAt(d int) translate.PA { return memBase + 0x8000 + translate.PA(d*16*maxSegs) }

func (m *model) offer() {
	segs := 1 + m.r.IntN(maxSegs)
	out := m.r.IntN(segs + 1)
	asTable := m.indirect && m.r.IntN(2) == 0
	need := segs
	if asTable {
		need = 1
	}
	if len(m.free) < need {
		return
	}
	m.r.Shuffle(len(m.free), func(i, j int) { m.free[i], m.free[j] = m.free[j], m.free[i] })
	o := &offered{descs: append([]int(nil), m.free[:need]...)}
	m.free = m.free[need:]
	o.head = uint16(o.descs[0])
	for k := range segs {
		n := m.r.IntN(slotSize + 1) // empty ones too
		pa, fl := bufAt(o.descs[0], k), uint16(0)
		if k < out {
			b := m.at(pa, n)
			for i := range b {
				b[i] = byte(m.r.Uint32())
			}
			o.out = append(o.out, b...)
		} else {
			fl = descWrite
			o.in = append(o.in, Seg{pa, uint32(n)})
			o.inLen += n
		}
		next := 0
		if k < segs-1 {
			fl |= descNext
			next = k + 1
			if !asTable {
				next = o.descs[k+1]
			}
		}
		if asTable {
			m.setDesc(tableAt(o.descs[0]), k, uint64(pa), uint32(n), fl, uint16(next))
		} else {
			m.setDesc(m.desc, o.descs[k], uint64(pa), uint32(n), fl, uint16(next))
		}
	}
	if asTable {
		m.setDesc(m.desc, o.descs[0], uint64(tableAt(o.descs[0])), uint32(16*segs), descIndirect, 0xffff)
	}
	m.guest.offer(m.avail, o.head)
	m.avail++
	m.offers = append(m.offers, o)
}

func (m *model) pop(t *testing.T) {
	c := &Chain{}
	ok, err := m.q.Pop(c)
	if err != nil {
		t.Fatal(err)
	}
	if ok != (len(m.offers) > 0) {
		t.Fatalf("Pop = %v with %d on offer", ok, len(m.offers))
	}
	if !ok {
		return
	}
	o := m.offers[0]
	m.offers = m.offers[1:]
	if c.Head() != o.head || c.ReadableLen() != uint64(len(o.out)) || c.WritableLen() != uint64(o.inLen) {
		t.Fatalf("chain head %d, %d+%d bytes; offered head %d, %d+%d", c.Head(), c.ReadableLen(), c.WritableLen(), o.head, len(o.out), o.inLen)
	}
	got := make([]byte, len(o.out)+1)
	if n, miss := c.ReadAll(got); !miss.OK() || !bytes.Equal(got[:n], o.out) {
		t.Fatal("contents differ", miss)
	}
	o.chain = c
	m.taken = append(m.taken, o)
}

func (m *model) push(t *testing.T) {
	if len(m.taken) == 0 {
		return
	}
	i := m.r.IntN(len(m.taken))
	o := m.taken[i]
	m.taken = append(m.taken[:i:i], m.taken[i+1:]...)
	n := m.r.IntN(o.inLen + 1)
	o.wrote = make([]byte, n)
	for i := range o.wrote {
		o.wrote[i] = byte(m.r.Uint32())
	}
	o.length = uint32(n)
	// In two pieces, to try offsets.
	cut := m.r.IntN(n + 1)
	for _, w := range []struct{ a, b int }{{cut, n}, {0, cut}} {
		if k, miss := o.chain.WriteAt(o.wrote[w.a:w.b], uint64(w.a)); k != w.b-w.a || !miss.OK() {
			t.Fatal("short write", k, miss)
		}
	}
	if err := m.q.Push(o.chain, o.length); err != nil {
		t.Fatal(err)
	}
	m.staged = append(m.staged, o)
}

func (m *model) unpop(t *testing.T) {
	// Only possible while nothing popped later than the ones given back has
	// been pushed; the model's list is in order of popping.
	n := m.r.IntN(len(m.taken) + 1)
	for i := len(m.taken) - n; i < len(m.taken)-1; i++ {
		if m.taken[i].chain == nil {
			return
		}
	}
	if uint16(len(m.taken)) != uint16(m.q.InFlight()) {
		t.Fatalf("%d in flight, model has %d", m.q.InFlight(), len(m.taken))
	}
	// The device may give back only what it took last, without gaps.
	back := m.taken[len(m.taken)-n:]
	base := int(m.q.lastAvail) - n
	for i, o := range back {
		if m.get16(m.guest.avail+4+translate.PA(2*((base+i)&(m.size-1)))) != o.head {
			return
		}
	}
	if err := m.q.Unpop(n); err != nil {
		t.Fatal(err)
	}
	m.offers = append(append([]*offered(nil), back...), m.offers...)
	m.taken = m.taken[:len(m.taken)-n]
}

func (m *model) signal(t *testing.T) {
	// The plain meaning of the two ways to ask for interrupts.
	old, now := m.q.usedPub, m.q.usedNext
	want := false
	if m.eventIdx {
		ev := m.get16(m.guest.avail + 4 + translate.PA(2*m.size))
		for i := m.q.signalled; i != now; i++ {
			want = want || i == ev
		}
		want = want || !m.q.everSig
	} else {
		want = (now != m.q.signalled || !m.q.everSig) && m.get16(m.guest.avail)&availNoInterrupt == 0
	}
	if now != old && m.r.IntN(4) == 0 {
		if err := m.q.Publish(); err != nil {
			t.Fatal(err)
		}
	} else {
		if err := m.q.Signal(); err != nil {
			t.Fatal(err)
		}
		if got := m.call.take(t) == 1; got != want {
			t.Fatalf("interrupt %v, want %v (used %d..%d)", got, want, old, now)
		}
	}
	m.done = append(m.done, m.staged...)
	m.staged = nil
}

func (m *model) collect(t *testing.T) {
	for m.usedIdx() != m.seen {
		id, n := m.usedElem(m.seen)
		m.seen++
		o := m.done[0]
		m.done = m.done[1:]
		if id != uint32(o.head) || n != o.length {
			t.Fatalf("used %d, %d bytes; want %d, %d", id, n, o.head, o.length)
		}
		left := o.wrote
		for _, s := range o.in {
			k := min(int(s.Len), len(left))
			if !bytes.Equal(m.at(s.PA, k), left[:k]) {
				t.Fatal("written bytes differ")
			}
			left = left[k:]
		}
		m.free = append(m.free, o.descs...)
	}
	if m.eventIdx {
		m.put16(m.guest.avail+4+translate.PA(2*m.size), m.seen+uint16(m.r.IntN(3)))
	} else {
		m.put16(m.guest.avail, uint16(m.r.IntN(2)))
	}
}

// TestAgainstModel runs random operations on both sides of one ring.
func TestAgainstModel(t *testing.T) {
	for seed := range uint64(16) {
		eventIdx, indirect := seed&1 != 0, seed&2 != 0
		size := 1 << (1 + seed%7)
		t.Run(fmt.Sprintf("seed%d", seed), func(t *testing.T) {
			m := &model{guest: newGuest(t, size), r: rand.New(rand.NewPCG(seed, 1)), call: newEvent(t), eventIdx: eventIdx, indirect: indirect}
			for i := range size {
				m.free = append(m.free, i)
			}
			// Start close to the indices' wrap-around.
			start := uint16(0xfff0)
			m.avail, m.seen = start, start
			m.put16(m.guest.avail+2, start)
			m.put16(m.used+2, start)
			m.q = m.queue(func(c *Config) {
				c.Base, c.EventIdx, c.Indirect, c.Call = start, eventIdx, indirect, m.call.n
			})
			for range 4000 {
				switch m.r.IntN(8) {
				case 0, 1:
					m.offer()
				case 2, 3:
					m.pop(t)
				case 4:
					m.push(t)
				case 5:
					m.signal(t)
				case 6:
					m.collect(t)
				case 7:
					if m.r.IntN(3) == 0 {
						m.unpop(t)
					} else if err := m.q.SetNotify(m.r.IntN(2) == 0); err != nil {
						t.Fatal(err)
					}
				}
			}
			if m.seen == start {
				t.Fatal("nothing went through")
			}
		})
	}
}

// FuzzWalk feeds arbitrary descriptor tables; whatever they say, a chain stays
// within its bounds and its sums are right.
func FuzzWalk(f *testing.F) {
	d := func(addr uint64, n uint32, fl, next uint16) []byte {
		b := make([]byte, 16)
		binary.LittleEndian.PutUint64(b, addr)
		binary.LittleEndian.PutUint32(b[8:], n)
		binary.LittleEndian.PutUint16(b[12:], fl)
		binary.LittleEndian.PutUint16(b[14:], next)
		return b
	}
	f.Add(append(d(uint64(bufArea), 8, 1, 1), d(uint64(bufArea), 8, 2, 0)...), uint16(0), true)
	f.Add(append(d(uint64(memBase)+16, 16, 4, 0), d(uint64(bufArea), 8, 2, 0)...), uint16(0), true)
	f.Add(d(0, 0, 1, 0), uint16(0), false)
	f.Add(d(^uint64(0), 0xffffffff, 2, 9), uint16(7), false)
	f.Fuzz(func(t *testing.T, table []byte, head uint16, indirect bool) {
		g := newGuest(t, 8)
		copy(g.at(g.desc, 128), table)
		if len(table) > 128 {
			copy(g.at(bufArea, 0x1000), table[128:])
		}
		q := g.queue(func(c *Config) { c.Indirect = indirect })
		g.offer(0, head)
		var c Chain
		ok, err := q.Pop(&c)
		if ok == (err != nil) {
			t.Fatal(ok, err)
		}
		var r, w uint64
		for _, s := range c.Readable() {
			r += uint64(s.Len)
		}
		for _, s := range c.Writable() {
			w += uint64(s.Len)
		}
		if r != c.ReadableLen() || w != c.WritableLen() || len(c.Readable())+len(c.Writable()) > MaxChain || r+w > 0xffffffff {
			t.Fatalf("chain %d segments, %d+%d bytes", len(c.Readable())+len(c.Writable()), r, w)
		}
		if ok {
			c.ReadAll(make([]byte, 64))
			c.WriteAll(make([]byte, 64))
		}
	})
}
