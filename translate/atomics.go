package translate

import "sync/atomic"

// casTries bounds CompareSwap against a guest that keeps changing the word.
const casTries = 1024

// CompareSwap is the IBTA CmpSwap operation (9.4.5) on a word of guest memory,
// atomic with respect to the guest's processors too: if the word equals compare it becomes swap. It returns the old
// value either way.
func CompareSwap(p *atomic.Uint64, compare, swap uint64) (old uint64) {
	for range casTries {
		if old = p.Load(); old != compare {
			return old
		}
		if p.CompareAndSwap(compare, swap) {
			return compare
		}
	}
	// The guest changed the word between Load and CompareAndSwap each time. It differed from compare at each attempt, so
	// any other value is a correct result.
	return ^compare
}

// FetchAdd is the IBTA FetchAdd operation (9.4.5): it adds modulo 2^64 and
// returns the old value.
func FetchAdd(p *atomic.Uint64, add uint64) (old uint64) { return p.Add(add) - add }
