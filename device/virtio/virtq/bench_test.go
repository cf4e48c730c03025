package virtq

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/translate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func benchCycle(b *testing.B, packed, indirect bool) {
	if packed {
		benchPacked(b, indirect)
		return
	}
	g := newGuest(b, 256)
	q := g.queue(func(c *Config) { c.EventIdx, c.Indirect = true, indirect })
	for i := range 256 {
		if indirect {
			g.setDesc(g.desc, i, uint64(bufArea), 32, descIndirect, 0)
		} else {
			g.setDesc(g.desc, i, uint64(bufArea+0x100), 12, descNext|descWrite, uint16(i^1))
		}
	}
	g.setDesc(bufArea, 0, uint64(bufArea+0x100), 12, descNext, 1)
	g.setDesc(bufArea, 1, uint64(bufArea+0x200), 1500, 0, 0)
	if !indirect {
		for i := 1; i < 256; i += 2 {
			g.setDesc(g.desc, i, uint64(bufArea+0x200), 1500, descWrite, 0)
		}
	}
	var c Chain
	ep := g.space.Epochs()
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		g.offer(uint16(i), uint16(i*2)&0xfe)
		t := ep.Enter(translate.ByLoop(0))
		if ok, err := q.Pop(&c); !ok || err != nil {
			b.Fatal(ok, err)
		}
		if err := q.Push(&c, 0); err != nil {
			b.Fatal(err)
		}
		if err := q.Signal(); err != nil {
			b.Fatal(err)
		}
		ep.Leave(0, t)
	}
}

// BenchmarkCycle pops, pushes and signals one chain of two buffers.
func BenchmarkCycle(b *testing.B) {
	b.Run("direct", func(b *testing.B) { benchCycle(b, false, false) })
	b.Run("indirect", func(b *testing.B) { benchCycle(b, false, true) })
	b.Run("packed-direct", func(b *testing.B) { benchCycle(b, true, false) })
	b.Run("packed-indirect", func(b *testing.B) { benchCycle(b, true, true) })
}

func benchPacked(b *testing.B, indirect bool) {
	g := newPackedGuest(b, 256)
	q := g.queue(func(c *Config) { c.EventIdx, c.Indirect = true, indirect })
	g.setDesc(bufArea, 0, uint64(bufArea+0x100), 12, 0, 0)
	g.setDesc(bufArea, 1, uint64(bufArea+0x200), 1500, 0, 0)
	table := []Seg{{bufArea, 32}}
	list := []Seg{{bufArea + 0x100, 12}, {bufArea + 0x200, 1500}}
	var c Chain
	ep := g.space.Epochs()
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		if indirect {
			g.put(7, table, 1, descIndirect)
		} else {
			g.put(7, list, 2, 0)
		}
		t := ep.Enter(translate.ByLoop(0))
		if ok, err := q.Pop(&c); !ok || err != nil {
			b.Fatal(ok, err)
		}
		if err := q.Push(&c, 0); err != nil {
			b.Fatal(err)
		}
		if err := q.Signal(); err != nil {
			b.Fatal(err)
		}
		ep.Leave(0, t)
	}
}

func TestCycleAllocatesNothing(t *testing.T) {
	for i := range 4 {
		packed, indirect := i&1 != 0, i&2 != 0
		r := testing.Benchmark(func(b *testing.B) { benchCycle(b, packed, indirect) })
		if r.N == 0 || r.AllocsPerOp() != 0 { // 0: the benchmark failed
			t.Errorf("packed %v, indirect %v: %d rounds, %d allocations per chain", packed, indirect, r.N, r.AllocsPerOp())
		}
	}
}
