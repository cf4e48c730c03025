// Side: control

package hca

import (
	"cmp"
	"slices"

	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/translate"
)

// Memory that must not be absent: completion rings and their arm words, doorbells,
// the table of address handles. Writing a completion cannot wait for a page, and
// these areas are small. Work rings are many, and may be absent (PF-12).

// held is memory that one object holds, and what the hold costs (translate.CostHolds).
type held struct {
	release func() // nil: not held yet, or not any more
	account *translate.Account
	cost    uint64
	waiting uint64 // part of cost: the list of ranges, which is needed until the memory is there
}

// newHeld charges the hold of these ranges.
func newHeld(a *translate.Account, ranges []translate.Range) (held, error) {
	waiting := translate.AllocatedFor[translate.Range](len(ranges))
	cost := hostdriver.HoldCost(ranges) + waiting
	if err := a.Charge(translate.CostHolds, cost); err != nil {
		return held{}, memoryError(err)
	}
	return held{account: a, cost: cost, waiting: waiting}, nil
}

// there credits what only the wait for the memory needed.
func (h *held) there() {
	h.account.Credit(translate.CostHolds, h.waiting)
	h.cost, h.waiting = h.cost-h.waiting, 0
}

// drop ends the hold, if there is one.
func (h *held) drop() {
	if h.release != nil {
		h.release()
	}
	h.account.Credit(translate.CostHolds, h.cost)
	*h = held{}
}

func dropAll(hs []held) {
	for i := range hs {
		hs[i].drop()
	}
}

// spansOf returns the first length bytes of a list of pages, in its order, adjacent pages as one.
func spansOf(pas []translate.PA, size, length uint64) (spans []translate.Range) {
	for len(pas) > 0 && length > 0 {
		k := 1
		for k < len(pas) && pas[k] == pas[0]+translate.PA(uint64(k)*size) {
			k++
		}
		n := min(uint64(k)*size, length)
		spans = append(spans, translate.Range{PA: pas[0], N: n})
		pas, length = pas[k:], length-n
	}
	return spans
}

// rangesOf is spansOf in ascending order and without overlaps: a page that is listed twice costs as much as once.
func rangesOf(pas []translate.PA, size, length uint64) []translate.Range {
	ranges := spansOf(pas, size, length)
	slices.SortFunc(ranges, func(a, b translate.Range) int { return cmp.Compare(a.PA, b.PA) })
	merged := ranges[:0]
	for _, x := range ranges {
		last := len(merged) - 1
		if last < 0 || x.PA > merged[last].PA+translate.PA(merged[last].N) {
			merged = append(merged, x)
			continue
		}
		merged[last].N = max(merged[last].N, uint64(x.PA-merged[last].PA)+x.N)
	}
	return slices.Clip(merged)
}
