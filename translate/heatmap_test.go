package translate

import (
	"math/rand/v2"
	"testing"
)

// A map equals its events counted with its final cell size, which is the smallest possible.
func TestHeatMap(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for round := range 500 {
		var h, other HeatMap
		var all []PA
		base, span := PA(r.Uint64N(uint64(MaxPA))), uint64(1)<<r.IntN(48)
		for range 1 + r.IntN(300) {
			pa := min(base+PA(r.Uint64N(span)), MaxPA-1)
			all = append(all, pa)
			if r.IntN(4) == 0 {
				other.Add(pa)
			} else {
				h.Add(pa)
			}
		}
		h.Merge(&other)
		want := HeatMap{Base: h.Base, Shift: h.Shift}
		lowest, highest := MaxPA, PA(0)
		for _, pa := range all {
			want.Cells[uint64(pa-h.Base)/h.CellSize()]++
			lowest, highest = min(lowest, pa), max(highest, pa)
		}
		if h != want {
			t.Fatalf("round %d: cells of %#x bytes, sums differ", round, h.CellSize())
		}
		// Half of the size is too small except by alignment.
		half := PA(h.CellSize() * HeatCells / 2)
		if h.CellSize() < 64<<10 || h.CellSize() > 64<<10 && lowest/half == highest/half {
			t.Fatalf("round %d: cells of %#x bytes for addresses %v to %v", round, h.CellSize(), lowest, highest)
		}
	}
	var none, h HeatMap
	if h.Merge(&none); h.CellSize() != 0 {
		t.Error("an empty map has a cell size")
	}
}
