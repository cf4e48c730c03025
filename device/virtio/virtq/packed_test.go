package virtq

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/vnicd/vnicd/translate"
)

// packedGuest is the driver's side of a packed ring, independent of the device's code.
type packedGuest struct {
	*guest
	eventIdx    bool
	next        int // index of the next list
	nextRound   int // odd: the wrap counter is 1
	seen        int // index of the next used descriptor
	seenRound   int
	free        int
	evAt, evRnd int // place at which the driver wants an interrupt
}

func newPackedGuest(t testing.TB, size int) *packedGuest {
	g := newGuest(t, size)
	g.avail = g.desc + translate.PA(16*size)
	g.used = g.avail + 4
	g.packed = true
	return &packedGuest{guest: g, free: size, nextRound: 1, seenRound: 1}
}

// write makes descriptor i available in a round; the device sees it at once.
func (g *packedGuest) write(i, round int, s Seg, id, flags uint16) {
	b := g.at(g.desc+translate.PA(16*i), 12)
	binary.LittleEndian.PutUint64(b, uint64(s.PA))
	binary.LittleEndian.PutUint32(b[8:], s.Len)
	if round&1 != 0 {
		flags |= 1 << 7
	} else {
		flags |= 1 << 15
	}
	g.word(g.desc + translate.PA(16*i+12)).Store(uint32(id) | uint32(flags)<<16)
}

func (g *packedGuest) word(pa translate.PA) *atomic.Uint32 {
	w, m := g.space.RingUint32(pa)
	if !m.OK() {
		g.t.Fatal(m)
	}
	return w
}

// put makes a list available, of which out buffers are readable; more are flags of all of them.
func (g *packedGuest) put(id uint16, bufs []Seg, out int, more uint16) {
	at, round := g.next, g.nextRound
	for k := range bufs {
		if k > 0 {
			g.write(g.next, g.nextRound, bufs[k], id, more|flagsOf(k, out, len(bufs)))
		}
		g.step(&g.next, &g.nextRound)
	}
	g.write(at, round, bufs[0], id, more|flagsOf(0, out, len(bufs))) // the first one last
	g.free -= len(bufs)
}

// flagsOf returns NEXT and WRITE for buffer k of n, of which out are readable.
func flagsOf(k, out, n int) (fl uint16) {
	if k >= out {
		fl |= 2
	}
	if k < n-1 {
		fl |= 1
	}
	return fl
}

func (g *packedGuest) step(at, round *int) {
	if *at++; *at == g.size {
		*at = 0
		*round++
	}
}

// take returns the next used descriptor, of a list of n.
func (g *packedGuest) take(n int) (id, written uint32, ok bool) {
	pa := g.desc + translate.PA(16*g.seen)
	last := g.word(pa + 12).Load()
	fl := last >> 16
	if (fl>>7&1 != 0) != (g.seenRound&1 != 0) || (fl>>15&1 != 0) != (g.seenRound&1 != 0) {
		return 0, 0, false
	}
	if fl&2 != 0 {
		written = g.get32(pa + 8)
	}
	for range n {
		g.step(&g.seen, &g.seenRound)
	}
	g.free += n
	return last & 0xffff, written, true
}

// packedDriver is the layout of a packed ring. Its ids are arbitrary 16-bit values.
type packedDriver struct {
	*packedGuest
	ids []int // unused
}

func newIDs(r *rand.Rand, size int) (ids []int) {
	for i := range size {
		ids = append(ids, i)
	}
	r.Shuffle(size, func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids
}

// idOf returns the ring's id for number i of the model.
func idOf(i int) uint16 { return uint16(i * 40503) }

func (p *packedDriver) full() bool { return p.free == 0 }

func (p *packedDriver) bufs(n int) []translate.PA {
	all := make([]translate.PA, n)
	for k := range all {
		all[k] = bufAt(p.ids[0], k)
	}
	return all
}

func (p *packedDriver) put(_ *rand.Rand, bufs []Seg, out int, table bool) (*offered, bool) {
	n := len(bufs)
	if table {
		n = 1
	}
	if p.free < n {
		return nil, false
	}
	i := p.ids[0]
	p.ids = p.ids[1:]
	o := &offered{head: idOf(i), descs: []int{i}, entries: n}
	if !table {
		p.packedGuest.put(o.head, bufs, out, 0)
		return o, true
	}
	for k, b := range bufs {
		// Other flags and ids have no meaning here.
		p.setDesc(tableAt(i), k, uint64(b.PA), b.Len, 0x5aa5, 0x8085|flagsOf(k, out, 1))
	}
	p.packedGuest.put(o.head, []Seg{{tableAt(i), uint32(16 * len(bufs))}}, 1, 4)
	return o, true
}

func (p *packedDriver) get(o *offered) (id, n uint32, ok bool) {
	if id, n, ok = p.take(o.entries); ok {
		p.ids = append(p.ids, o.descs...)
	}
	return id, n, ok
}

func (p *packedDriver) ask(r *rand.Rand) {
	r.Shuffle(len(p.ids), func(i, j int) { p.ids[i], p.ids[j] = p.ids[j], p.ids[i] })
	v := uint32(r.IntN(2))
	if p.eventIdx && r.IntN(3) > 0 {
		p.evAt, p.evRnd = p.seen, p.seenRound
		for range r.IntN(min(p.size, 4)) {
			p.step(&p.evAt, &p.evRnd)
		}
		v = 2
	}
	p.word(p.avail).Store(uint32(p.evAt) | uint32(p.evRnd&1)<<15 | v<<16)
}

func (p *packedDriver) wants(n, behind int, first bool) bool {
	switch p.word(p.avail).Load() >> 16 {
	case 0:
		return true
	case 1:
		return false
	}
	end := p.seenRound*p.size + p.seen + behind
	for i := end - n; i < end; i++ {
		first = first || (i-p.evRnd*p.size-p.evAt)%(2*p.size) == 0
	}
	return first
}

// TestPackedLiteral checks what the device writes, byte for byte.
func TestPackedLiteral(t *testing.T) {
	g, call := newPackedGuest(t, 4), newEvent(t)
	q := g.queue(func(c *Config) { c.EventIdx, c.Call = true, call.n })
	desc := func(i int) string { return hex.EncodeToString(g.at(g.desc+translate.PA(16*i), 16)) }
	want := func(what, got, want string) {
		t.Helper()
		if got != want {
			t.Fatalf("%s: %s, want %s", what, got, want)
		}
	}
	device := func() string { return hex.EncodeToString(g.at(g.used, 4)) }
	var a, b, c Chain
	pop := func(c *Chain, id uint16, n int) {
		t.Helper()
		if ok, err := q.Pop(c); !ok || err != nil || c.Head() != id || len(c.Readable())+len(c.Writable()) != n {
			t.Fatalf("Pop = %v, %v: %+v", ok, err, c)
		}
	}
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}

	do(q.SetNotify(false))
	want("no notification", device(), "00000100")
	do(q.SetNotify(true))
	want("notification of the first", device(), "00800200")
	if ok, err := q.Pop(&c); ok || err != nil {
		t.Fatalf("Pop of an empty ring = %v, %v", ok, err)
	}

	g.put(0xabcd, []Seg{{bufArea, 1}, {bufArea + 16, 2}, {bufArea + 32, 3}}, 1, 0)
	g.put(0x1234, []Seg{{bufArea + 48, 4}}, 1, 0)
	pop(&a, 0xabcd, 3)
	do(q.SetNotify(true))
	want("notification after the popped chains", device(), "03800200")
	do(q.SetNotify(false))
	want("no need to withdraw it", device(), "03800200")
	pop(&b, 0x1234, 1)
	if n, err := q.Pending(); n != 0 || err != nil || q.InFlight() != 4 {
		t.Fatalf("%d pending, %v, %d in flight", n, err, q.InFlight())
	}
	do(q.Push(&a, 5))
	do(q.Push(&b, 0))
	want("staged", desc(0)[24:], "cdab8100")
	want("staged", desc(3)[24:], "34128000")
	do(q.Signal())
	want("a list, five bytes written", desc(0)[16:], "05000000cdab8280")
	want("skipped", desc(1)[24:], "cdab8080")
	want("skipped", desc(2)[24:], "cdab8080")
	want("one, nothing written", desc(3)[16:], "0000000034128080")
	if call.take(t) != 1 {
		t.Fatal("no interrupt")
	}
	do(q.SetNotify(true))
	want("notification of the second round", device(), "00000200")

	// In the second round the flags are inverted, and the list wraps around.
	for range 2 {
		g.take(3)
		g.take(1)
	}
	g.put(1, []Seg{{bufArea, 1}}, 1, 0)
	g.put(2, []Seg{{bufArea, 1}}, 1, 0)
	g.put(3, []Seg{{bufArea, 1}}, 1, 0)
	for id := uint16(1); id < 4; id++ {
		pop(&c, id, 1)
		do(q.Push(&c, 0))
	}
	do(q.Publish())
	want("used in the second round", desc(0)[16:], "0000000001000000")
	g.put(4, []Seg{{bufArea, 8}, {bufArea, 8}}, 0, 0)
	want("the last of the second round", desc(3)[24:], "04000380")
	want("the first of the third", desc(0)[24:], "04008200")
	pop(&c, 4, 2)
	do(q.Push(&c, 16))
	do(q.Publish())
	want("used across the end", desc(3)[16:], "1000000004000200")
	want("skipped across the end", desc(0)[24:], "04008080")
	do(q.SetNotify(true))
	want("notification in the third round", device(), "01800200")
	if q.Base() != 0x8001 {
		t.Fatalf("base %#x", q.Base())
	}
}

// TestPackedMisuse: the device cannot return chains that it does not hold, nor return them twice.
func TestPackedMisuse(t *testing.T) {
	g := newPackedGuest(t, 4)
	q := g.queue(nil)
	g.put(1, []Seg{{bufArea, 4}, {bufArea, 4}}, 1, 0)
	g.put(2, []Seg{{bufArea, 4}}, 1, 0)
	var a, b Chain
	for _, c := range []*Chain{&a, &b} {
		if ok, err := q.Pop(c); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	if err := q.Push(&a, 0); err != nil {
		t.Fatal(err)
	}
	if q.Push(&a, 0) == nil {
		t.Error("Push accepted a list twice")
	}
	if q.Unpop(&a) == nil {
		t.Error("Unpop accepted a pushed list")
	}
	if err := q.Unpop(&b); err != nil {
		t.Error(err)
	}
}

// TestPackedEvents: the driver asks for an interrupt at a place.
func TestPackedEvents(t *testing.T) {
	const size = 4
	for _, tc := range []struct {
		name   string
		word   uint32 // the driver event structure
		desc   bool   // EVENT_IDX
		before int    // used and signalled before
		used   int
		want   bool
	}{
		{"always", 0, true, 1, 1, true},
		{"never", 1 << 16, true, 1, 1, false},
		{"reserved", 3 << 16, true, 1, 1, true},
		{"a place without EVENT_IDX", 2<<16 | 0x8000, false, 1, 1, true},
		{"the next", 2<<16 | 0x8001, true, 1, 1, true},
		{"the last of two", 2<<16 | 0x8002, true, 1, 2, true},
		{"the one after them", 2<<16 | 0x8003, true, 1, 2, false},
		{"the one before them", 2<<16 | 0x8000, true, 1, 2, false},
		{"across the end", 2 << 16, true, 3, 2, true},
		{"before the end", 2<<16 | 0x8003, true, 3, 2, true},
		{"the same offset a round ago", 2<<16 | 0x8000, true, 3, 2, false},
		{"a whole round", 2<<16 | 0x0001, true, 2, 4, true},
		{"beyond the ring", 2<<16 | 0xffff, true, 1, 1, true}, // too many interrupts are harmless
	} {
		t.Run(tc.name, func(t *testing.T) {
			g, call := newPackedGuest(t, size), newEvent(t)
			q := g.queue(func(c *Config) { c.EventIdx, c.Call = tc.desc, call.n })
			var c Chain
			use := func(n int) {
				t.Helper()
				for i := range n {
					g.put(uint16(i), []Seg{{bufArea, 1}}, 1, 0)
					if ok, err := q.Pop(&c); !ok || err != nil {
						t.Fatal(ok, err)
					}
					if err := q.Push(&c, 0); err != nil {
						t.Fatal(err)
					}
				}
				if err := q.Signal(); err != nil {
					t.Fatal(err)
				}
			}
			use(tc.before)
			call.take(t)
			g.word(g.avail).Store(tc.word)
			use(tc.used)
			if got := call.take(t) == 1; got != tc.want {
				t.Errorf("interrupt: %v", got)
			}
		})
	}
}

// TestHostilePackedRings: each ring has one error, which the device must name.
func TestHostilePackedRings(t *testing.T) {
	const top = ^translate.PA(0)
	ind := func(c *Config) { c.Indirect = true }
	one := []Seg{{bufArea, 4}}
	for _, tc := range []struct {
		name string
		mod  func(*Config)
		do   func(g *packedGuest)
		what string
	}{
		{"list without end", nil, func(g *packedGuest) {
			for range 8 {
				g.put(1, one, 1, 1)
			}
		}, "descriptor flags"},
		{"readable after writable", nil, func(g *packedGuest) {
			g.put(1, one, 0, 1)
			g.put(1, one, 1, 0)
		}, "descriptor flags"},
		{"address wraps", nil, func(g *packedGuest) { g.put(1, []Seg{{top - 2, 4}}, 1, 0) }, "descriptor address"},
		{"more than 4 GiB", nil, func(g *packedGuest) { g.put(1, []Seg{{bufArea, 0xffffffff}, {bufArea, 1}}, 2, 0) },
			"descriptor length"},
		{"indirect not negotiated", nil, func(g *packedGuest) { g.put(1, []Seg{{bufArea, 16}}, 1, 4) }, "descriptor flags"},
		{"indirect with next", ind, func(g *packedGuest) { g.put(1, []Seg{{bufArea, 16}}, 1, 5) }, "descriptor flags"},
		{"indirect in a list", ind, func(g *packedGuest) {
			g.put(1, one, 1, 1)
			g.put(1, []Seg{{bufArea, 16}}, 1, 4)
		}, "descriptor flags"},
		{"empty indirect table", ind, func(g *packedGuest) { g.put(1, []Seg{{bufArea, 0}}, 1, 4) }, "indirect table length"},
		{"ragged indirect table", ind, func(g *packedGuest) { g.put(1, []Seg{{bufArea, 17}}, 1, 4) },
			"indirect table length"},
		{"huge indirect table", ind, func(g *packedGuest) { g.put(1, []Seg{{bufArea, 16 * (MaxChain + 1)}}, 1, 4) },
			"indirect table length"},
		{"indirect table wraps", ind, func(g *packedGuest) { g.put(1, []Seg{{top - 15, 32}}, 1, 4) },
			"indirect table address"},
		{"indirect table outside memory", ind, func(g *packedGuest) { g.put(1, []Seg{{1 << 40, 32}}, 1, 4) },
			"indirect descriptor"},
		{"readable after writable in a table", ind, func(g *packedGuest) {
			g.setDesc(bufArea, 0, uint64(bufArea), 1, 0, 2)
			g.setDesc(bufArea, 1, uint64(bufArea), 1, 0, 0)
			g.put(1, []Seg{{bufArea, 32}}, 1, 4)
		}, "indirect descriptor flags"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := newPackedGuest(t, 8)
			refuses(t, g.guest, tc.mod, func() { tc.do(g) }, tc.what)
		})
	}
}

// TestOnlyReads: with OnlyReads, WRITE in indirect tables is ignored; otherwise it is respected.
func TestOnlyReads(t *testing.T) {
	for _, only := range []bool{false, true} {
		g := newPackedGuest(t, 4)
		q := g.queue(func(c *Config) { c.Indirect = true })
		if only {
			q.OnlyReads()
		}
		g.setDesc(bufArea, 0, uint64(bufArea)+0x100, 12, 0, 2)
		g.setDesc(bufArea, 1, uint64(bufArea)+0x200, 60, 0, 0)
		g.put(1, []Seg{{bufArea, 32}}, 1, 4)
		var c Chain
		if ok, err := q.Pop(&c); ok != only || only && (len(c.Readable()) != 2 || c.ReadableLen() != 72) {
			t.Errorf("only %v: Pop = %v, %v: %+v", only, ok, err, c)
		}
	}
}

// TestPackedInFlightBound: a driver that offers a descriptor twice is detected, for single descriptors and lists.
func TestPackedInFlightBound(t *testing.T) {
	g := newPackedGuest(t, 4)
	q := g.queue(nil)
	var c Chain
	for id := range uint16(4) {
		g.put(id, []Seg{{bufArea, 4}}, 1, 0)
	}
	for range 4 {
		if ok, err := q.Pop(&c); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	if n, err := q.Pending(); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	if ok, err := q.Pop(&c); ok || err != nil {
		t.Fatal(ok, err)
	}
	g.put(0, []Seg{{bufArea, 4}}, 1, 0)
	if ok, err := q.Pop(&c); ok || !errors.Is(err, ErrBroken) {
		t.Fatal(ok, err)
	}

	g = newPackedGuest(t, 4)
	q = g.queue(nil)
	g.put(0, []Seg{{bufArea, 4}, {bufArea, 4}}, 1, 0)
	if ok, err := q.Pop(&c); !ok || err != nil {
		t.Fatal(ok, err)
	}
	g.put(1, []Seg{{bufArea, 4}, {bufArea, 4}, {bufArea, 4}}, 1, 0)
	var re *RingError
	if ok, err := q.Pop(&c); ok || !errors.As(err, &re) || re.Index != 3 {
		t.Fatal(ok, err)
	}
}

// TestPackedReadAhead: an error in a later chain is reported in order, and returned chains are popped again.
func TestPackedReadAhead(t *testing.T) {
	g := newPackedGuest(t, 64)
	q := g.queue(nil)
	put := func(id uint16) {
		switch {
		case id == 40:
			g.put(id, []Seg{{bufArea, 1}}, 1, 4)
		case id%5 == 4:
			g.put(id, []Seg{{bufArea, 1}, {bufArea, uint32(id)}}, 2, 0)
		default:
			g.put(id, []Seg{{bufArea, uint32(id) + 1}}, 1, 0)
		}
	}
	for id := range uint16(41) {
		put(id)
	}
	var c, first Chain
	for _, k := range []uint16{10, 30, 40} {
		for id := range k {
			if ok, err := q.Pop(&c); !ok || err != nil || c.Head() != id || c.ReadableLen() != uint64(id)+1 {
				t.Fatal(ok, err, c.Head(), c.ReadableLen(), id)
			}
			if id == 0 {
				first = c
			}
		}
		if k < 40 {
			if err := q.Unpop(&first); err != nil {
				t.Fatal(err)
			}
		}
	}
	if q.Broken() != nil {
		t.Fatal("queue broke before the chain's turn")
	}
	if ok, err := q.Pop(&c); ok || !errors.Is(err, ErrBroken) {
		t.Fatal(ok, err)
	}
}

// TestPackedAbsent: each withdrawn page of a ring is waited for in the turn of its descriptors; memory that does not
// exist breaks the queue.
func TestPackedAbsent(t *testing.T) {
	for _, gone := range []bool{false, true} {
		g := newPackedGuest(t, 512)
		g.avail, g.used = bufArea+0x1000, bufArea+0x1004
		q := g.queue(nil)
		page := memBase + translate.PageSize // the ring's second page
		var c Chain
		withdraw := func() error { return g.space.Withdraw(page, translate.PageSize) }
		if gone {
			withdraw = func() error { return g.space.Unmap(page, translate.PageSize) }
			t.Cleanup(func() { _ = g.space.Map(page, g.at(page, translate.PageSize)) })
		}
		again := func(err error) {
			t.Helper()
			if gone != errors.Is(err, ErrBroken) || gone == IsRepairable(err) {
				t.Fatalf("gone %v: %v", gone, err)
			}
			if !gone {
				if err := g.space.Map(page, g.at(page, translate.PageSize)); err != nil {
					t.Fatal(err)
				}
			}
		}
		for id := range uint16(255) {
			g.put(id, []Seg{{bufArea, 4}}, 1, 0)
		}
		g.put(255, []Seg{{bufArea, 4}, {bufArea, 4}}, 1, 0) // across both pages
		g.put(256, []Seg{{bufArea, 4}}, 1, 0)
		if err := withdraw(); err != nil {
			t.Fatal(err)
		}
		for id := range uint16(255) {
			if ok, err := q.Pop(&c); !ok || err != nil || c.Head() != id {
				t.Fatal(ok, err)
			}
			if id < 254 {
				if err := q.Push(&c, 0); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := q.Signal(); err != nil {
			t.Fatal(err)
		}
		var list Chain
		_, err := q.Pop(&list)
		if again(err); gone {
			continue
		}
		if ok, err := q.Pop(&list); !ok || err != nil || list.Head() != 255 {
			t.Fatal(ok, err)
		}
		// Either both are used, or none.
		if err := errors.Join(q.Push(&c, 0), q.Push(&list, 3), withdraw()); err != nil {
			t.Fatal(err)
		}
		for range 254 {
			if _, _, ok := g.take(1); !ok {
				t.Fatal("not used")
			}
		}
		again(q.Signal())
		if _, _, ok := g.take(1); ok {
			t.Fatal("half of the list is used")
		}
		if err := q.Signal(); err != nil {
			t.Fatal(err)
		}
		if id, _, ok := g.take(1); !ok || id != 254 {
			t.Fatal(id, ok)
		}
		if id, n, ok := g.take(2); !ok || id != 255 || n != 3 {
			t.Fatal(id, n, ok)
		}
		if ok, err := q.Pop(&c); !ok || err != nil || c.Head() != 256 {
			t.Fatal(ok, err)
		}
	}
}
