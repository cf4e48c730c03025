// Side: control

package hca

import "github.com/vnicd/vnicd/translate"

// Memory that must not be absent: completion rings and their arm words, doorbells,
// the table of address handles. Writing a completion cannot wait for a page, and
// these areas are small. Work rings are many, and may be absent (PF-12).

// holds is the memory that one object holds.
type holds []func()

func (h *holds) release() {
	for _, f := range *h {
		f()
	}
	*h = nil
}

// spansOf returns the first length bytes of a list of pages, adjacent pages as one.
func spansOf(pas []translate.PA, size, length uint64) (spans []span) {
	for len(pas) > 0 && length > 0 {
		k := 1
		for k < len(pas) && pas[k] == pas[0]+translate.PA(uint64(k)*size) {
			k++
		}
		n := min(uint64(k)*size, length)
		spans = append(spans, span{pas[0], n})
		pas, length = pas[k:], length-n
	}
	return spans
}
