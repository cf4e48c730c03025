package virtq

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/translate"
)

// killed is a ring whose indices start at from, in which n chains of one buffer each were popped, and those at the
// places in pushed were returned, in that order, by a process that was killed then.
func killed(t *testing.T, size int, from uint16, n int, pushed ...int) (g *guest, popped uint16) {
	t.Helper()
	g = newGuest(t, size)
	g.put16(g.avail+2, from)
	g.put16(g.used+2, from)
	q := g.queue(func(c *Config) { c.Base = from })
	chains := make([]Chain, n)
	for i := range chains {
		g.setDesc(g.desc, i, uint64(memBase)+0x80000, uint32(100+i), descWrite, 0)
		g.offer(from+uint16(i), uint16(i))
		if ok, err := q.Pop(&chains[i]); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	for _, i := range pushed {
		if err := q.Push(&chains[i], 1); err != nil {
			t.Fatal(err)
		}
	}
	if err := q.Publish(); err != nil {
		t.Fatal(err)
	}
	return g, q.Popped()
}

// The driver sees each chain once, also if chains were returned out of order before the kill and the indices wrap
// around, and chains that it made available later are popped after those.
func TestReopen(t *testing.T) {
	for _, from := range []uint16{0, 0x7ffe, 0xfffd} {
		g, popped := killed(t, 8, from, 6, 4, 0, 5)
		if popped != from+6 {
			t.Fatalf("popped up to %#x", popped)
		}
		g.setDesc(g.desc, 7, uint64(memBase)+0x80000, 77, descWrite, 0)
		g.offer(popped, 7)
		q := g.queue(nil)
		if changed, err := q.Resume(); changed != (from+3 != 0) || err != nil {
			t.Fatal(changed, err)
		}
		if q.Popped() != from+3 {
			t.Errorf("position %#x, want %#x", q.Popped(), from+3)
		}
		if err := q.Reopen(popped); err != nil {
			t.Fatal(err)
		}
		if q.InFlight() != 3 || q.Base() != from+3 {
			t.Errorf("%d in flight from %#x", q.InFlight(), q.Base())
		}
		var next, c Chain
		if ok, err := q.Pop(&next); !ok || err != nil || next.Head() != 7 {
			t.Fatalf("the chain after them: %d, %v, %v", next.Head(), ok, err)
		}
		for _, head := range []uint16{3, 1, 2} {
			if err := q.Retake(&c, head); err != nil || c.Head() != head || c.WritableLen() != 100+uint64(head) {
				t.Fatalf("chain %d of %d bytes: %v", c.Head(), c.WritableLen(), err)
			}
			if err := q.Unpop(&c); err == nil {
				t.Error("given back")
			}
			if err := q.Push(&c, 9); err != nil {
				t.Fatal(err)
			}
		}
		if err := q.Retake(&c, 1); err == nil || !strings.Contains(err.Error(), "not in flight") {
			t.Errorf("a fourth one: %v", err)
		}
		if err := errors.Join(q.Push(&next, 0), q.Signal()); err != nil {
			t.Fatal(err)
		}
		var got []uint32
		for i := from; i != g.usedIdx(); i++ {
			id, _ := g.usedElem(i)
			got = append(got, id)
		}
		if want := []uint32{4, 0, 5, 3, 1, 2, 7}; !slices.Equal(got, want) {
			t.Errorf("used %d, want %d", got, want)
		}
		if q.InFlight() != 0 || q.Broken() != nil {
			t.Errorf("%d in flight, %v", q.InFlight(), q.Broken())
		}
	}
}

// What a killed process left may be anything (CO-7).
func TestReopenHostile(t *testing.T) {
	g, popped := killed(t, 8, 0xfffe, 5, 1)
	reopened := func(at uint16) (*Queue, error) {
		q := g.queue(nil)
		if _, err := q.Resume(); err != nil {
			t.Fatal(err)
		}
		return q, q.Reopen(at)
	}
	for _, at := range []uint16{0xfffe, popped + 5, popped + 0x8000} { // behind the used index, or beyond the ring
		if q, err := reopened(at); err == nil || !strings.Contains(err.Error(), "at most 8 past 0xffff") {
			t.Errorf("%#x: %v", at, err)
		} else if q.Broken() != nil || q.InFlight() != 0 {
			t.Errorf("%#x: changed the queue: %v", at, q.Broken())
		}
	}
	q, err := reopened(popped + 4) // beyond what is available
	if err != nil {
		t.Fatal(err)
	}
	var re *RingError
	if _, err := q.Pop(&Chain{}); !errors.As(err, &re) || re.What != "available index" {
		t.Errorf("beyond the available index: %v", err)
	}
	if q, err = reopened(popped); err != nil {
		t.Fatal(err)
	}
	if err := q.Reopen(popped); err == nil || !strings.Contains(err.Error(), "in flight") {
		t.Errorf("twice: %v", err)
	}
	if err := g.queue(nil).Retake(&Chain{}, 0); err == nil {
		t.Error("Retake without Reopen")
	}

	for what, x := range map[string]struct {
		head uint16
		set  func()
	}{
		"head of a chain in flight": {8, func() {}},
		"descriptor next":           {0, func() { g.setDesc(g.desc, 0, uint64(memBase), 8, descNext, 8) }},
		"descriptor":                {0, func() { g.setDesc(g.desc, 0, uint64(memBase), 8, descNext, 0) }},
		"descriptor flags":          {0, func() { g.setDesc(g.desc, 0, uint64(memBase), 16, descIndirect, 0) }},
		"descriptor address":        {0, func() { g.setDesc(g.desc, 0, 1<<64-1, 16, 0, 0) }},
	} {
		if q, err = reopened(popped); err != nil {
			t.Fatal(err)
		}
		x.set()
		var c Chain
		if err := q.Retake(&c, x.head); !errors.As(err, &re) || re.What != what {
			t.Errorf("%s: %v", what, err)
		}
		if q.Broken() == nil || len(c.Readable())+len(c.Writable()) > 0 {
			t.Errorf("%s: the queue continues, with %v", what, c.segs)
		}
		if err := q.Retake(&c, 1); !errors.Is(err, ErrBroken) {
			t.Errorf("%s: then %v", what, err)
		}
	}
}

// A packed ring is refused.
func TestReopenPacked(t *testing.T) {
	g := newGuest(t, 8)
	g.packed = true
	q := g.queue(nil)
	if err := q.Reopen(q.Popped()); err == nil || !strings.Contains(err.Error(), "packed") {
		t.Error(err)
	}
	if err := q.Retake(&Chain{}, 0); err == nil {
		t.Error("retaken")
	}
}

// A process that is killed while it polls leaves a ring of which the driver does not announce buffers.
func TestResumeNotifies(t *testing.T) {
	g := newGuest(t, 8)
	q := g.queue(nil)
	if err := q.SetNotify(false); err != nil || g.get16(g.used) != usedNoNotify {
		t.Fatal(err)
	}
	q = g.queue(nil)
	if _, err := q.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := q.SetNotify(true); err != nil || g.get16(g.used) != 0 {
		t.Errorf("flags %#x: %v", g.get16(g.used), err)
	}
}

// A page that is absent is fetched, and the chain is taken then.
func TestRetakeAbsent(t *testing.T) {
	g, popped := killed(t, 8, 0, 1)
	q := g.queue(nil)
	if _, err := q.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := q.Reopen(popped); err != nil {
		t.Fatal(err)
	}
	if err := g.space.Withdraw(memBase, translate.PageSize); err != nil {
		t.Fatal(err)
	}
	var c Chain
	if err := q.Retake(&c, 0); !IsRepairable(err) || q.Broken() != nil {
		t.Fatalf("absent: %v, %v", err, q.Broken())
	}
	if err := g.space.Map(memBase, g.mem[:translate.PageSize]); err != nil {
		t.Fatal(err)
	}
	if err := q.Retake(&c, 0); err != nil || c.WritableLen() != 100 {
		t.Fatalf("%d bytes, %v", c.WritableLen(), err)
	}
}
