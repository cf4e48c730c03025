package virtq

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/vnicd/vnicd/translate"
)

// model is a naive driver with an idealised queue: it remembers every chain it offered as plain lists, and compares
// them with the device's side of the ring.
type model struct {
	layout
	g        *guest
	r        *rand.Rand
	config   func(*Config)
	q        *Queue
	call     *event
	indirect bool
	ordered  bool // chains are returned in order, so that the device may crash

	offers []*offered
	taken  []*offered // popped, in order, not yet pushed
	pops   int        // chains popped and not given back
	staged []*offered // pushed, not published
	done   []*offered // published, not collected
	fresh  int        // ring entries published since the last interrupt decision
	first  bool       // there was no interrupt decision yet
	went   int        // chains returned
}

// layout is the driver's side of one layout.
type layout interface {
	// put makes a chain available if there is room: out readable bufs, then writable ones; table: in an indirect table.
	put(r *rand.Rand, bufs []Seg, out int, table bool) (o *offered, ok bool)
	full() bool
	// bufs returns addresses for the buffers of the chain that put would make next.
	bufs(n int) []translate.PA
	// get returns the next used chain; o is the chain that the model expects.
	get(o *offered) (id, written uint32, ok bool)
	// ask randomly chooses the interrupts that the driver wants; wants reports whether one is due after n more entries
	// were published, with behind entries not yet seen by the driver.
	ask(r *rand.Rand)
	wants(n, behind int, first bool) bool
}

type offered struct {
	head    uint16
	descs   []int  // split: descriptors; packed: their number
	seq     int    // number among the chains popped
	entries int    // of the ring
	out     []byte // bytes that the device must read
	in      []Seg  // buffers that it may write
	inLen   int
	wrote   []byte
	length  uint32
	chain   *Chain
}

const (
	slotSize = 256 // bytes of buffer per descriptor, direct or indirect
	maxSegs  = 6
)

// bufAt is the buffer of segment k of descriptor (or id) d: chains in the ring never share one.
func bufAt(d, k int) translate.PA {
	return memBase + 0x20000 + translate.PA((d*maxSegs+k)*slotSize)
}

func tableAt(d int) translate.PA { return memBase + 0x8000 + translate.PA(d*16*maxSegs) }

// splitDriver is the layout of a split ring.
type splitDriver struct {
	*guest
	eventIdx    bool
	free        []int // free descriptors
	avail, seen uint16
}

func (s *splitDriver) full() bool { return len(s.free) == 0 }

func (s *splitDriver) bufs(n int) []translate.PA {
	all := make([]translate.PA, n)
	for k := range all {
		all[k] = bufAt(s.free[0], k)
	}
	return all
}

func (s *splitDriver) put(r *rand.Rand, bufs []Seg, out int, table bool) (*offered, bool) {
	need := len(bufs)
	if table {
		need = 1
	}
	if len(s.free) < need {
		return nil, false
	}
	o := &offered{descs: append([]int(nil), s.free[:need]...), entries: 1}
	s.free = s.free[need:]
	o.head = uint16(o.descs[0])
	for k, b := range bufs {
		fl, next := uint16(0), 0
		if k >= out {
			fl = descWrite
		}
		if k < len(bufs)-1 {
			fl |= descNext
			next = k + 1
			if !table {
				next = o.descs[k+1]
			}
		}
		if table {
			s.setDesc(tableAt(o.descs[0]), k, uint64(b.PA), b.Len, fl, uint16(next))
		} else {
			s.setDesc(s.desc, o.descs[k], uint64(b.PA), b.Len, fl, uint16(next))
		}
	}
	if table {
		s.setDesc(s.desc, o.descs[0], uint64(tableAt(o.descs[0])), uint32(16*len(bufs)), descIndirect, 0xffff)
	}
	s.offer(s.avail, o.head)
	s.avail++
	return o, true
}

func (s *splitDriver) get(o *offered) (id, n uint32, ok bool) {
	if s.usedIdx() == s.seen {
		return 0, 0, false
	}
	id, n = s.usedElem(s.seen)
	s.seen++
	s.free = append(s.free, o.descs...)
	return id, n, true
}

func (s *splitDriver) ask(r *rand.Rand) {
	r.Shuffle(len(s.free), func(i, j int) { s.free[i], s.free[j] = s.free[j], s.free[i] })
	if s.eventIdx {
		s.put16(s.guest.avail+4+translate.PA(2*s.size), s.seen+uint16(r.IntN(3)))
	} else {
		s.put16(s.guest.avail, uint16(r.IntN(2)))
	}
}

func (s *splitDriver) wants(n, _ int, first bool) bool {
	if !s.eventIdx {
		return s.get16(s.guest.avail)&availNoInterrupt == 0
	}
	ev, now := s.get16(s.guest.avail+4+translate.PA(2*s.size)), s.usedIdx()
	for i := now - uint16(n); i != now; i++ {
		first = first || i == ev
	}
	return first
}

func (m *model) offer() {
	n := 1 + m.r.IntN(maxSegs)
	if m.full() {
		return
	}
	out := m.r.IntN(n + 1)
	places := m.bufs(n)
	var bufs []Seg
	var o offered
	for k, pa := range places {
		size := m.r.IntN(slotSize + 1) // including empty ones
		bufs = append(bufs, Seg{pa, uint32(size)})
		if k < out {
			b := m.g.at(pa, size)
			for i := range b {
				b[i] = byte(m.r.Uint32())
			}
			o.out = append(o.out, b...)
		} else {
			o.in = append(o.in, bufs[k])
			o.inLen += size
		}
	}
	if p, ok := m.put(m.r, bufs, out, m.indirect && m.r.IntN(2) == 0); ok {
		p.out, p.in, p.inLen = o.out, o.in, o.inLen
		m.offers = append(m.offers, p)
	}
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
		t.Fatalf("chain head %d, %d+%d bytes; offered head %d, %d+%d", c.Head(), c.ReadableLen(), c.WritableLen(), o.head,
			len(o.out), o.inLen)
	}
	got := make([]byte, len(o.out)+1)
	if n, miss := c.ReadAll(got); !miss.OK() || !bytes.Equal(got[:n], o.out) {
		t.Fatal("readable bytes differ", miss)
	}
	o.chain, o.seq = c, m.pops
	m.pops++
	m.taken = append(m.taken, o)
}

func (m *model) push(t *testing.T) {
	if len(m.taken) == 0 {
		return
	}
	i := 0
	if !m.ordered {
		i = m.r.IntN(len(m.taken))
	}
	o := m.taken[i]
	m.taken = append(m.taken[:i:i], m.taken[i+1:]...)
	n := m.r.IntN(o.inLen + 1)
	o.wrote = make([]byte, n)
	for i := range o.wrote {
		o.wrote[i] = byte(m.r.Uint32())
	}
	o.length = uint32(n)
	// In two pieces, to test offsets.
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

// unpop gives back some of the chains popped last that were not pushed.
func (m *model) unpop(t *testing.T) {
	entries := 0
	for _, o := range m.taken {
		entries += o.entries
	}
	if m.q.InFlight() != entries {
		t.Fatalf("%d in flight, model has %d", m.q.InFlight(), entries)
	}
	n := m.r.IntN(len(m.taken) + 1)
	for n > 0 && m.taken[len(m.taken)-n].seq != m.pops-n {
		n--
	}
	if n == 0 {
		return
	}
	back := m.taken[len(m.taken)-n:]
	if err := m.q.Unpop(back[0].chain); err != nil {
		t.Fatal(err)
	}
	m.offers = append(append([]*offered(nil), back...), m.offers...)
	m.taken = m.taken[:len(m.taken)-n]
	m.pops -= n
}

func (m *model) signal(t *testing.T) {
	quiet := m.r.IntN(4) == 0
	if quiet {
		if err := m.q.Publish(); err != nil {
			t.Fatal(err)
		}
	} else if err := m.q.Signal(); err != nil {
		t.Fatal(err)
	}
	for _, o := range m.staged {
		m.fresh += o.entries
	}
	m.done = append(m.done, m.staged...)
	m.staged = nil
	if !quiet {
		behind := 0
		for _, o := range m.done {
			behind += o.entries
		}
		want := (m.fresh > 0 || m.first) && m.wants(m.fresh, behind, m.first)
		if got := m.call.take(t) == 1; got != want {
			t.Fatalf("interrupt %v, want %v (%d used)", got, want, m.fresh)
		}
		m.fresh, m.first = 0, false
	}
}

func (m *model) collect(t *testing.T) {
	for len(m.done) > 0 {
		o := m.done[0]
		id, n, ok := m.get(o)
		if !ok {
			t.Fatalf("%d published chains were not used", len(m.done))
		}
		m.done = m.done[1:]
		if id != uint32(o.head) || n != o.length {
			t.Fatalf("used %d, %d bytes; want %d, %d", id, n, o.head, o.length)
		}
		left := o.wrote
		for _, s := range o.in {
			k := min(int(s.Len), len(left))
			if !bytes.Equal(m.g.at(s.PA, k), left[:k]) {
				t.Fatal("written bytes differ")
			}
			left = left[k:]
		}
		m.went++
	}
	if _, _, ok := m.get(&offered{}); ok {
		t.Fatal("an unpublished chain was used")
	}
	m.ask(m.r)
}

// crash replaces the queue by a new one without its state.
func (m *model) crash(t *testing.T) {
	if p, ok := m.layout.(*packedDriver); ok && m.r.IntN(2) == 0 {
		m.tear(t, p)
	}
	m.q = m.g.queue(m.config)
	changed, err := m.q.Resume()
	if err != nil {
		t.Fatal(err)
	}
	m.call.take(t)
	again := append(append(m.staged, m.taken...), m.offers...)
	m.offers, m.taken, m.staged = again, nil, nil
	m.fresh, m.first = 0, !changed
}

// kill replaces the queue by a new one, for a device that has its own table of the chains in flight.
func (m *model) kill(t *testing.T) {
	popped := m.q.Popped()
	m.q = m.g.queue(m.config)
	changed, err := m.q.Resume()
	if err == nil {
		err = m.q.Reopen(popped)
	}
	if err != nil {
		t.Fatal(err)
	}
	m.call.take(t)
	m.taken, m.staged = append(m.staged, m.taken...), nil
	for _, i := range m.r.Perm(len(m.taken)) {
		o := m.taken[i]
		o.chain, o.seq = &Chain{}, -1<<30 // it cannot be given back
		if err := m.q.Retake(o.chain, o.head); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(o.out)+1)
		if n, miss := o.chain.ReadAll(got); !miss.OK() || !bytes.Equal(got[:n], o.out) || o.chain.Head() != o.head ||
			o.chain.WritableLen() != uint64(o.inLen) {
			t.Fatal("another chain was taken", miss)
		}
	}
	if err := m.q.Retake(&Chain{}, 0); err == nil {
		t.Fatal("more chains taken than were in flight")
	}
	m.fresh, m.first = 0, !changed
}

// tear publishes the staged chains, and then reverts the last writes, which are the first descriptors, as if the device
// had crashed. Only what those descriptors had to report may be lost.
func (m *model) tear(t *testing.T, p *packedDriver) {
	n, behind := 0, 0
	for _, o := range m.staged {
		n += o.entries
	}
	for _, o := range m.done {
		behind += o.entries
	}
	was := bytes.Clone(m.g.at(m.g.desc, 16*m.g.size))
	if err := m.q.Publish(); err != nil {
		t.Fatal(err)
	}
	torn := m.r.IntN(n + 1)
	for i := range torn {
		slot := (p.seen + behind + i) % m.g.size
		copy(m.g.at(m.g.desc+translate.PA(16*slot), 16), was[16*slot:])
	}
	if torn == n {
		return // as if nothing had been published
	}
	at := 0
	for _, o := range m.staged {
		if at < torn {
			o.length, o.wrote = 0, nil
		}
		at += o.entries
	}
	m.done, m.staged = append(m.done, m.staged...), nil
}

// TestAgainstModel runs random operations on both sides of one ring.
func TestAgainstModel(t *testing.T) {
	for seed := range uint64(64) {
		eventIdx, indirect, packed, ordered := seed&1 != 0, seed&2 != 0, seed&4 != 0, seed&8 != 0
		t.Run(fmt.Sprintf("seed%d", seed), func(t *testing.T) {
			m := &model{r: rand.New(rand.NewPCG(seed, 1)), call: newEvent(t), indirect: indirect, ordered: ordered, first: true}
			size := 1 << (1 + m.r.IntN(7))
			var base uint16
			if packed {
				size = 1 + m.r.IntN(130)
				p := newPackedGuest(t, size)
				p.eventIdx = eventIdx
				m.layout, m.g, base = &packedDriver{p, newIDs(m.r, size)}, p.guest, wrapBit
			} else {
				// Start close to the wrap-around of the indices.
				s := &splitDriver{guest: newGuest(t, size), eventIdx: eventIdx, avail: 0xfff0, seen: 0xfff0}
				for i := range size {
					s.free = append(s.free, i)
				}
				s.put16(s.guest.avail+2, s.avail)
				s.put16(s.used+2, s.seen)
				m.layout, m.g, base = s, s.guest, s.avail
			}
			m.config = func(c *Config) {
				c.Base, c.EventIdx, c.Indirect, c.Call, c.Packed = base, eventIdx, indirect, m.call.n, packed
			}
			m.q = m.g.queue(m.config)
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
					switch m.r.IntN(4) {
					case 0:
						m.unpop(t)
					case 1:
						if ordered {
							m.crash(t)
						} else if !packed {
							m.kill(t)
						}
					default:
						if err := m.q.SetNotify(m.r.IntN(2) == 0); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			if m.went < 2*size {
				t.Fatalf("%d chains passed a ring of %d", m.went, size)
			}
		})
	}
}

// FuzzWalk feeds arbitrary descriptor tables; a chain must stay within its bounds, with right sums.
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
		checkSums(t, &c)
		if ok {
			c.ReadAll(make([]byte, 64))
			c.WriteAll(make([]byte, 64))
		}
	})
}

// checkSums checks a chain's bounds and sums.
func checkSums(t *testing.T, c *Chain) {
	t.Helper()
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
}

// FuzzPacked lets a driver write anything into a packed ring while the device works: the device uses no more
// descriptors than the ring has, and writes nowhere else.
func FuzzPacked(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4}, []byte{}, true)
	f.Add([]byte{5, 47, 0x80, 5, 46, 2, 0, 0, 1, 1, 2, 3}, []byte{0, 0, 1, 0, 0, 0, 0, 0, 64, 0, 0, 0, 9, 0, 0x81, 0},
		false)
	f.Add([]byte{0, 6, 5, 14, 0x80, 0, 4, 0, 1, 2, 6, 0}, []byte{0, 0, 1, 0, 0, 0, 0, 0, 64, 0, 0, 0, 9, 0, 0x84, 0}, true)
	f.Fuzz(func(t *testing.T, ops, ring []byte, indirect bool) {
		const size = 5
		g := newPackedGuest(t, size)
		copy(g.at(g.desc, 16*size), ring)
		q := g.queue(func(c *Config) { c.Indirect, c.EventIdx = indirect, true })
		behind := g.at(g.used+4, 4096)
		for i := range behind {
			behind[i] = 0xa5
		}
		var flight []*Chain
		for len(ops) > 0 {
			op := ops[0]
			ops = ops[1:]
			switch op % 7 {
			case 0:
				c := &Chain{}
				ok, err := q.Pop(c)
				if ok && err != nil {
					t.Fatal(err)
				}
				if checkSums(t, c); ok {
					flight = append(flight, c)
				}
			case 1:
				if len(flight) > 0 {
					i := int(op) / 7 % len(flight)
					_ = q.Push(flight[i], uint32(op))
					flight = append(flight[:i:i], flight[i+1:]...)
				}
			case 2:
				_ = q.Signal()
			case 3:
				_ = q.SetNotify(op&8 != 0)
			case 4:
				if n := len(flight); n > 0 {
					_ = q.Unpop(flight[n-1])
					flight = flight[:n-1]
				}
			case 5: // a byte of the ring, or of the driver event structure
				if len(ops) > 1 {
					g.at(g.desc, 16*size+4)[int(ops[0])%(16*size+4)] = ops[1]
					ops = ops[2:]
				}
			case 6:
				if n, err := q.Pending(); n > 1 && err == nil && n > ahead {
					t.Fatal(n)
				}
			}
			n := 0
			for _, c := range flight {
				n += int(c.entries)
			}
			if n > size || q.Broken() == nil && q.InFlight() > size {
				t.Fatalf("%d descriptors in flight, %d", n, q.InFlight())
			}
		}
		q = g.queue(func(c *Config) { c.Indirect, c.EventIdx = indirect, true })
		if _, err := q.Resume(); err != nil || int(q.Base()&^wrapBit) >= size || len(q.staged) != 0 {
			t.Fatal(err, q.Base(), q.staged)
		}
		var c Chain
		if ok, err := q.Pop(&c); ok && errors.Join(err, q.Push(&c, 1), q.Signal()) != nil {
			t.Fatal(err, q.Broken())
		}
		for i, b := range behind {
			if b != 0xa5 {
				t.Fatalf("byte %d after the ring was written", i)
			}
		}
	})
}
