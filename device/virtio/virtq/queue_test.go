package virtq

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/translate"
)

const bufArea = memBase + 0x40000

func TestChainRoundTrip(t *testing.T) {
	g := newGuest(t, 8)
	q := g.queue(nil)
	copy(g.at(bufArea, 5), "hello")
	copy(g.at(bufArea+0x100, 7), ", world")
	g.setDesc(g.desc, 5, uint64(bufArea), 5, descNext, 2)
	g.setDesc(g.desc, 2, uint64(bufArea+0x100), 7, descNext, 7)
	g.setDesc(g.desc, 7, uint64(bufArea+0x200), 3, descNext|descWrite, 0)
	g.setDesc(g.desc, 0, uint64(bufArea+0x300), 100, descWrite, 0)
	g.offer(0, 5)

	var c Chain
	if ok, err := q.Pop(&c); !ok || err != nil {
		t.Fatalf("Pop = %v, %v", ok, err)
	}
	if c.Head() != 5 || c.ReadableLen() != 12 || c.WritableLen() != 103 || len(c.Readable()) != 2 ||
		len(c.Writable()) != 2 {
		t.Fatalf("chain %+v", c)
	}
	got := make([]byte, 20)
	n, m := c.ReadAll(got)
	if !m.OK() || string(got[:n]) != "hello, world" {
		t.Fatalf("read %q, %v", got[:n], m)
	}
	if n, m := c.ReadAt(got[:4], 3); !m.OK() || string(got[:n]) != "lo, " {
		t.Fatalf("read at 3: %q, %v", got[:n], m)
	}
	if n, m := c.ReadAt(got, 12); n != 0 || !m.OK() {
		t.Fatalf("read at the end: %d, %v", n, m)
	}
	if n, m := c.WriteAt([]byte("abcdef"), 1); n != 6 || !m.OK() {
		t.Fatalf("write: %d, %v", n, m)
	}
	if !bytes.Equal(g.at(bufArea+0x200, 3), []byte{0, 'a', 'b'}) || !bytes.Equal(g.at(bufArea+0x300, 4), []byte("cdef")) {
		t.Fatal("bytes were written elsewhere")
	}
	if n, m := c.WriteAt(make([]byte, 200), 100); n != 3 || !m.OK() {
		t.Fatalf("write at the end: %d, %v", n, m)
	}
	if err := q.Push(&c, 7); err != nil {
		t.Fatal(err)
	}
	if g.usedIdx() != 0 {
		t.Fatal("used index moved before Publish")
	}
	if err := q.Publish(); err != nil {
		t.Fatal(err)
	}
	if id, n := g.usedElem(0); g.usedIdx() != 1 || id != 5 || n != 7 {
		t.Fatalf("used index %d, element %d, %d", g.usedIdx(), id, n)
	}
	if ok, err := q.Pop(&c); ok || err != nil {
		t.Fatalf("Pop of an empty ring = %v, %v", ok, err)
	}
}

func TestIndirect(t *testing.T) {
	g := newGuest(t, 4)
	q := g.queue(func(c *Config) { c.Indirect = true })
	table := bufArea + 0x1000 - 32 // the table crosses a page
	g.setDesc(table, 0, uint64(bufArea), 16, descNext, 2)
	g.setDesc(table, 2, uint64(bufArea+0x2000), 8, descNext|descWrite, 1)
	g.setDesc(table, 1, uint64(bufArea+0x3000), 8, descWrite, 0)
	// 2.7.5.3.2: direct descriptors may precede the indirect one.
	g.setDesc(g.desc, 1, uint64(bufArea+0x4000), 4, descNext, 3)
	g.setDesc(g.desc, 3, uint64(table), 48, descIndirect, 0)
	g.offer(0, 1)
	var c Chain
	if ok, err := q.Pop(&c); !ok || err != nil {
		t.Fatalf("Pop = %v, %v", ok, err)
	}
	want := []Seg{{bufArea + 0x4000, 4}, {bufArea, 16}, {bufArea + 0x2000, 8}, {bufArea + 0x3000, 8}}
	if c.Head() != 1 || len(c.Readable()) != 2 || len(c.Writable()) != 2 ||
		c.Readable()[0] != want[0] || c.Readable()[1] != want[1] || c.Writable()[0] != want[2] || c.Writable()[1] != want[3] {
		t.Fatalf("chain %+v", c)
	}
}

// TestHostileRings: each ring has one error, which the device must name.
func TestHostileRings(t *testing.T) {
	ind := func(c *Config) { c.Indirect = true }
	for _, tc := range []struct {
		name string
		mod  func(*Config)
		do   func(g *guest)
		what string
	}{
		{"available index too far", nil, func(g *guest) { g.put16(g.avail+2, 9) }, "available index"},
		{"available index runs backwards", nil, func(g *guest) { g.put16(g.avail+2, 0xffff) }, "available index"},
		{"head beyond the table", nil, func(g *guest) { g.offer(0, 8) }, "available ring entry"},
		{"next beyond the table", nil, func(g *guest) {
			g.setDesc(g.desc, 0, uint64(bufArea), 4, descNext, 8)
			g.offer(0, 0)
		}, "descriptor next"},
		{"loop of one", nil, func(g *guest) {
			g.setDesc(g.desc, 0, uint64(bufArea), 4, descNext, 0)
			g.offer(0, 0)
		}, "descriptor"},
		{"loop of two after a head", nil, func(g *guest) {
			g.setDesc(g.desc, 0, uint64(bufArea), 4, descNext, 1)
			g.setDesc(g.desc, 1, uint64(bufArea), 4, descNext, 2)
			g.setDesc(g.desc, 2, uint64(bufArea), 4, descNext, 1)
			g.offer(0, 0)
		}, "descriptor"},
		{"readable after writable", nil, func(g *guest) {
			g.setDesc(g.desc, 0, uint64(bufArea), 4, descNext|descWrite, 1)
			g.setDesc(g.desc, 1, uint64(bufArea), 4, 0, 0)
			g.offer(0, 0)
		}, "descriptor flags"},
		{"address wraps", nil, func(g *guest) {
			g.setDesc(g.desc, 0, ^uint64(0)-2, 4, 0, 0)
			g.offer(0, 0)
		}, "descriptor address"},
		{"more than 4 GiB", nil, func(g *guest) {
			g.setDesc(g.desc, 0, uint64(bufArea), 0xffffffff, descNext, 1)
			g.setDesc(g.desc, 1, uint64(bufArea), 1, 0, 0)
			g.offer(0, 0)
		}, "descriptor length"},
		{"indirect not negotiated", nil, func(g *guest) {
			g.setDesc(g.desc, 0, uint64(bufArea), 16, descIndirect, 0)
			g.offer(0, 0)
		}, "descriptor flags"},
		{"indirect with next", ind, func(g *guest) {
			g.setDesc(g.desc, 0, uint64(bufArea), 16, descIndirect|descNext, 1)
			g.offer(0, 0)
		}, "descriptor flags"},
		{"indirect in indirect", ind, func(g *guest) {
			g.setDesc(g.desc, 0, uint64(bufArea), 16, descIndirect, 0)
			g.setDesc(bufArea, 0, uint64(bufArea), 16, descIndirect, 0)
			g.offer(0, 0)
		}, "indirect descriptor flags"},
		{"empty indirect table", ind, func(g *guest) {
			g.setDesc(g.desc, 0, uint64(bufArea), 0, descIndirect, 0)
			g.offer(0, 0)
		}, "indirect table length"},
		{"ragged indirect table", ind, func(g *guest) {
			g.setDesc(g.desc, 0, uint64(bufArea), 17, descIndirect, 0)
			g.offer(0, 0)
		}, "indirect table length"},
		{"huge indirect table", ind, func(g *guest) {
			g.setDesc(g.desc, 0, uint64(bufArea), 16*(MaxChain+1), descIndirect, 0)
			g.offer(0, 0)
		}, "indirect table length"},
		{"indirect table wraps", ind, func(g *guest) {
			g.setDesc(g.desc, 0, ^uint64(0)-15, 32, descIndirect, 0)
			g.offer(0, 0)
		}, "indirect table address"},
		{"indirect loop", ind, func(g *guest) {
			g.setDesc(g.desc, 0, uint64(bufArea), 32, descIndirect, 0)
			g.setDesc(bufArea, 0, uint64(bufArea), 1, descNext, 1)
			g.setDesc(bufArea, 1, uint64(bufArea), 1, descNext, 0)
			g.offer(0, 0)
		}, "indirect descriptor"},
		{"indirect next beyond its table", ind, func(g *guest) {
			g.setDesc(g.desc, 0, uint64(bufArea), 32, descIndirect, 0)
			g.setDesc(bufArea, 0, uint64(bufArea), 1, descNext, 2)
			g.offer(0, 0)
		}, "indirect descriptor next"},
		{"indirect table outside memory", ind, func(g *guest) {
			g.setDesc(g.desc, 0, 1<<40, 32, descIndirect, 0)
			g.offer(0, 0)
		}, "indirect descriptor"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := newGuest(t, 8)
			refuses(t, g, tc.mod, func() { tc.do(g) }, tc.what)
		})
	}
}

// refuses checks that do's change of the ring breaks the queue, with an error that names what.
func refuses(t *testing.T, g *guest, mod func(*Config), do func(), what string) {
	t.Helper()
	errfd := newEvent(t)
	q := g.queue(func(c *Config) {
		c.Err = errfd.n
		if mod != nil {
			mod(c)
		}
	})
	do()
	var c Chain
	ok, err := q.Pop(&c)
	if ok || !errors.Is(err, ErrBroken) {
		t.Fatalf("Pop = %v, %v", ok, err)
	}
	if !strings.Contains(err.Error(), "queue 3: "+what+" ") {
		t.Errorf("error %q does not name %q", err, what)
	}
	if len(c.Readable())+len(c.Writable()) != 0 || c.ReadableLen() != 0 {
		t.Error("chain is not empty after an error")
	}
	if q.Broken() == nil || errfd.take(t) != 1 {
		t.Error("queue is not broken, or the front end was not notified once")
	}
	if _, err := q.Pop(&c); !errors.Is(err, ErrBroken) {
		t.Errorf("second Pop: %v", err)
	}
	for _, err := range []error{q.Push(&c, 0), q.Signal(), q.SetNotify(true), q.Publish()} {
		if !errors.Is(err, ErrBroken) {
			t.Errorf("broken queue still works: %v", err)
		}
	}
}

func TestRingOutsideMemory(t *testing.T) {
	g := newGuest(t, 8)
	for name, mod := range map[string]func(*Config){
		"available": func(c *Config) { c.Avail = 1 << 40 },
		"used":      func(c *Config) { c.Used = 1 << 40 },
		"desc":      func(c *Config) { c.Desc = 1 << 40 },
	} {
		t.Run(name, func(t *testing.T) {
			q := g.queue(mod)
			g.put16(g.avail+2, 0)
			g.setDesc(g.desc, 0, uint64(bufArea), 4, 0, 0)
			g.offer(0, 0)
			var c Chain
			ok, err := q.Pop(&c)
			if name == "used" {
				if !ok {
					t.Fatal(err)
				}
				err = q.Push(&c, 0)
			}
			var me *MissError
			if !errors.Is(err, ErrBroken) || !errors.As(err, &me) || me.Miss.Kind != translate.BadAddress {
				t.Fatalf("error %v", err)
			}
		})
	}
}

// TestHostFault: an absent page does not break the queue; the same call works once the page is back.
func TestHostFault(t *testing.T) {
	g := newGuest(t, 8)
	q := g.queue(nil)
	g.setDesc(g.desc, 0, uint64(bufArea), 4, 0, 0)
	g.offer(0, 0)
	if err := g.space.Withdraw(memBase, translate.PageSize); err != nil {
		t.Fatal(err)
	}
	var c Chain
	if ok, err := q.Pop(&c); ok || !IsRepairable(err) || errors.Is(err, ErrBroken) {
		t.Fatalf("Pop = %v, %v", ok, err)
	}
	if err := g.space.Map(memBase, g.mem[:translate.PageSize]); err != nil {
		t.Fatal(err)
	}
	if ok, err := q.Pop(&c); !ok || err != nil {
		t.Fatalf("Pop after repair = %v, %v", ok, err)
	}
}

func TestNewRefusals(t *testing.T) {
	s := translate.NewSpace(1)
	good := Config{Size: 8, Desc: 0x1000, Avail: 0x2000, Used: 0x3000}
	for name, tc := range map[string]struct {
		mod  func(*Config)
		want string
	}{
		"zero":        {func(c *Config) { c.Size = 0 }, "size 0"},
		"odd":         {func(c *Config) { c.Size = 6 }, "size 6"},
		"large":       {func(c *Config) { c.Size = 65536 }, "size 65536"},
		"desc":        {func(c *Config) { c.Desc = 0x1008 }, "descriptor table"},
		"avail":       {func(c *Config) { c.Avail = 0x2001 }, "available ring"},
		"used":        {func(c *Config) { c.Used = 0x3002 }, "used ring"},
		"used at end": {func(c *Config) { c.Used = ^translate.PA(0) - 7 }, "used ring"},
		"large ring":  {func(c *Config) { c.Packed, c.Size = true, 32769 }, "size 32769"},
		"ring":        {func(c *Config) { c.Packed, c.Desc = true, 0x1008 }, "descriptor ring"},
		"driver area": {func(c *Config) { c.Packed, c.Avail = true, 0x2002 }, "driver event structure"},
		"device area": {func(c *Config) { c.Packed, c.Used = true, 0x3002 }, "device event structure"},
		"base":        {func(c *Config) { c.Packed, c.Base = true, 0x8008 }, "base 0x8008"},
	} {
		c := good
		tc.mod(&c)
		if _, err := New(s, c); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	good.Packed, good.Size, good.Base = true, 7, 0x8006
	if _, err := New(s, good); err != nil {
		t.Error(err)
	}
}

func TestUnpopAndMisuse(t *testing.T) {
	g := newGuest(t, 4)
	q := g.queue(nil)
	for i := range 3 {
		g.setDesc(g.desc, i, uint64(bufArea), 4, 0, 0)
		g.offer(uint16(i), uint16(i))
	}
	var a, b Chain
	for _, c := range []*Chain{&a, &b} {
		if ok, err := q.Pop(c); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	c := b
	if err := q.Unpop(&b); err != nil {
		t.Fatal(err)
	}
	if q.InFlight() != 1 || q.Unpop(&c) == nil {
		t.Fatal("Unpop accepted a chain that is not in flight")
	}
	if ok, err := q.Pop(&b); !ok || err != nil || b.Head() != 1 {
		t.Fatalf("Pop after Unpop: %v %v head %d", ok, err, b.Head())
	}
	if n, err := q.Pending(); n != 1 || err != nil {
		t.Fatalf("Pending = %d, %v", n, err)
	}
	for _, c := range []*Chain{&b, &a} { // out of order is allowed
		if err := q.Push(c, 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := q.Push(&a, 0); err == nil {
		t.Fatal("Push accepted a chain that was not popped")
	}
	if err := q.Signal(); err != nil {
		t.Fatal(err)
	}
	if id0, _ := g.usedElem(0); id0 != 1 || g.usedIdx() != 2 {
		t.Fatal("used ring wrong")
	}
}

// TestPushClampsLength: a bug in the device cannot make a driver read bytes that were not written.
func TestPushClampsLength(t *testing.T) {
	g := newGuest(t, 4)
	q := g.queue(nil)
	g.setDesc(g.desc, 0, uint64(bufArea), 4, descWrite, 0)
	g.offer(0, 0)
	var c Chain
	if ok, err := q.Pop(&c); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if err := q.Push(&c, 5); err != nil {
		t.Fatal(err)
	}
	if _, n := g.usedElem(0); n != 4 {
		t.Fatalf("used length %d", n)
	}
}

// TestInFlightBound: a driver that offers a descriptor twice is detected.
func TestInFlightBound(t *testing.T) {
	g := newGuest(t, 4)
	q := g.queue(nil)
	for i := range 4 {
		g.setDesc(g.desc, i, uint64(bufArea), 4, 0, 0)
		g.offer(uint16(i), uint16(i))
	}
	var c Chain
	for range 4 {
		if ok, err := q.Pop(&c); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	g.offer(4, 0)
	if ok, err := q.Pop(&c); ok || !errors.Is(err, ErrBroken) {
		t.Fatalf("Pop = %v, %v", ok, err)
	}
}

func TestResume(t *testing.T) {
	g := newGuest(t, 4)
	g.put16(g.used+2, 0xfffe)
	g.put16(g.avail+2, 0xffff)
	g.setDesc(g.desc, 2, uint64(bufArea), 4, 0, 0)
	g.put16(g.avail+4+2*2, 2) // entry 0xfffe
	q := g.queue(func(c *Config) { c.Base = 0xffff })
	if changed, err := q.Resume(); !changed || err != nil {
		t.Fatalf("Resume = %v, %v", changed, err)
	}
	var c Chain
	if ok, err := q.Pop(&c); !ok || err != nil || c.Head() != 2 {
		t.Fatalf("Pop = %v, %v, head %d", ok, err, c.Head())
	}
	if err := q.Push(&c, 0); q.Base() != 0xffff || err != nil {
		t.Fatalf("base %#x, %v", q.Base(), err)
	}
}

// TestPiece: a chain of one buffer is available in place while it is resident and contiguous on the host.
func TestPiece(t *testing.T) {
	g := newGuest(t, 8)
	q := g.queue(nil)
	g.setDesc(g.desc, 0, uint64(bufArea)+100, 50, 0, 0)
	g.setDesc(g.desc, 1, uint64(bufArea)+200, 50, descWrite, 0)
	g.setDesc(g.desc, 2, uint64(bufArea)+300, 50, descNext, 3)
	g.setDesc(g.desc, 3, uint64(bufArea)+400, 50, 0, 0)
	g.setDesc(g.desc, 4, uint64(memBase)+memSize-10, 50, 0, 0)
	copy(g.at(bufArea+100, 5), "hello")
	for i, head := range []uint16{0, 1, 2, 4} {
		g.offer(uint16(i), head)
	}
	var c Chain
	pop := func() {
		t.Helper()
		if ok, err := q.Pop(&c); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	pop()
	if b := c.Piece(5); string(b) != "hello" || c.Piece(50) == nil || c.Piece(51) != nil {
		t.Errorf("%q", b)
	}
	pop()
	if b := c.Piece(50); len(b) != 50 || &b[0] != &g.at(bufArea+200, 1)[0] {
		t.Errorf("%d bytes of a writable buffer", len(b))
	}
	if err := g.space.Withdraw(bufArea, 0x1000); err != nil {
		t.Fatal(err)
	}
	if c.Piece(1) != nil {
		t.Error("a piece of withdrawn memory")
	}
	if err := g.space.Map(bufArea, g.at(bufArea, 0x1000)); err != nil {
		t.Fatal(err)
	}
	if c.Piece(1) == nil {
		t.Error("no piece of restored memory")
	}
	pop()
	if c.Piece(1) != nil {
		t.Error("a piece of a chain of two buffers")
	}
	pop()
	if c.Piece(1) != nil {
		t.Error("a piece that exceeds memory")
	}
}

// TestReadAhead: the starts of chains are read ahead; an error in one is reported in order, and returned chains are
// popped again unchanged.
func TestReadAhead(t *testing.T) {
	const n, bad = 24, 20
	g := newGuest(t, 32)
	q := g.queue(nil)
	for i := range uint16(n) {
		g.setDesc(g.desc, int(i), uint64(bufArea)+uint64(i)*64, uint32(i)+1, 0, 0)
		g.offer(i, i)
	}
	g.put16(g.avail+4+2*bad, 32)
	var c Chain
	pop := func(want uint16) {
		t.Helper()
		if ok, err := q.Pop(&c); !ok || err != nil {
			t.Fatal(ok, err)
		}
		if c.Head() != want || c.ReadableLen() != uint64(want)+1 || c.Readable()[0].PA != bufArea+64*translate.PA(want) {
			t.Fatalf("chain %+v, want %d", c, want)
		}
	}
	// Unpop within the chains read ahead, and beyond them.
	for _, k := range []uint16{10, ahead + 2} {
		var first Chain
		for i := range k {
			if pop(i); i == 0 {
				first = c
			}
		}
		if err := q.Unpop(&first); err != nil {
			t.Fatal(err)
		}
	}
	// The driver does not own these descriptors, so its later writes may count or not.
	g.setDesc(g.desc, 3, uint64(bufArea)+3*64, 4, 0, 9)
	for i := range uint16(bad) {
		pop(i)
	}
	var re *RingError
	if _, err := q.Pop(&c); !errors.As(err, &re) || re.Index != bad || re.Value != 32 {
		t.Fatal(err)
	}
}

// TestReadAheadOutsideMemory: a descriptor outside memory breaks the queue in its chain's turn, not when it is read
// ahead.
func TestReadAheadOutsideMemory(t *testing.T) {
	g := newGuest(t, 1<<15)
	q := g.queue(func(c *Config) { c.Desc = memBase + memSize - 4*16 })
	table := translate.PA(memBase + memSize - 4*16)
	for i := range 4 {
		g.setDesc(table, i, uint64(bufArea), 4, 0, 0)
	}
	for i, head := range []uint16{0, 3, 4, 1} {
		g.offer(uint16(i), head)
	}
	var c Chain
	for _, head := range []uint16{0, 3} {
		if ok, err := q.Pop(&c); !ok || err != nil || c.Head() != head {
			t.Fatal(ok, err, c.Head())
		}
		if err := q.Push(&c, 0); err != nil {
			t.Fatal(err)
		}
	}
	var me *MissError
	if _, err := q.Pop(&c); !errors.Is(err, ErrBroken) || !errors.As(err, &me) || me.What != "descriptor" {
		t.Fatal(err)
	}
	if _, err := q.Pop(&c); !errors.Is(err, ErrBroken) {
		t.Fatal(err)
	}
}
