package translate

// HeatCells is the number of cells of a HeatMap.
const HeatCells = 256

// minHeatShift makes the smallest cell 64 KiB.
const minHeatShift = 16

// HeatMap counts events by place in guest memory. Its cells have equal size (a power of two) and begin at Base, which
// is a multiple of their total size. For an address outside, cells double in size, merging in pairs, until it is
// inside: the map has the same size for any memory, and no count is lost. The zero value is ready for use. It is not
// safe for concurrent use.
type HeatMap struct {
	Base  PA
	Shift uint8 // log2 of a cell's bytes; 0: empty
	Cells [HeatCells]uint64
}

// Add counts an event at pa.
func (h *HeatMap) Add(pa PA) { h.add(pa, minHeatShift, 1) }

// Merge adds the counts of o.
func (h *HeatMap) Merge(o *HeatMap) {
	for i, n := range o.Cells {
		if n > 0 {
			h.add(o.Base+PA(i)<<(o.Shift&63), o.Shift, n)
		}
	}
}

// add counts n events in the cell of 1<<shift bytes that contains pa.
func (h *HeatMap) add(pa PA, shift uint8, n uint64) {
	if h.Shift == 0 {
		h.Shift, h.Base = shift, pa&^(HeatCells<<(shift&63)-1)
	}
	for h.Shift < shift || (pa-h.Base)>>(h.Shift&63) >= HeatCells {
		h.widen()
	}
	h.Cells[(pa-h.Base)>>(h.Shift&63)] += n
}

// CellSize returns the bytes of a cell, 0 if nothing was counted.
func (h *HeatMap) CellSize() uint64 {
	if h.Shift == 0 {
		return 0
	}
	return 1 << h.Shift
}

// widen doubles the cell size: the present cells become the lower or the upper half.
func (h *HeatMap) widen() {
	var half [HeatCells / 2]uint64
	for i := range half {
		half[i] = h.Cells[2*i] + h.Cells[2*i+1]
	}
	clear(h.Cells[:])
	h.Shift++
	base := h.Base &^ (HeatCells<<(h.Shift&63) - 1)
	if base == h.Base {
		copy(h.Cells[:], half[:])
	} else {
		copy(h.Cells[len(half):], half[:])
	}
	h.Base = base
}
