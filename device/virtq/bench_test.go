package virtq

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func benchCycle(b *testing.B, indirect bool) {
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
		t := ep.Enter(0)
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

// BenchmarkCycle is pop, push and signal of one chain of two buffers.
func BenchmarkCycle(b *testing.B) {
	b.Run("direct", func(b *testing.B) { benchCycle(b, false) })
	b.Run("indirect", func(b *testing.B) { benchCycle(b, true) })
}

func TestCycleAllocatesNothing(t *testing.T) {
	for _, indirect := range []bool{false, true} {
		r := testing.Benchmark(func(b *testing.B) { benchCycle(b, indirect) })
		if r.N == 0 || r.AllocsPerOp() != 0 { // 0: it failed
			t.Errorf("indirect %v: %d rounds, %d allocations per chain", indirect, r.N, r.AllocsPerOp())
		}
	}
}
