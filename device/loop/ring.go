package loop

import (
	"math/bits"
	"sync/atomic"
)

const cacheLine = 64

// ring is a bounded queue with many producers and one consumer at a time. Each cell has a sequence number: equal to the
// position = free for the producer of that position, position+1 = filled for its consumer, position+size = free for the
// next lap. Producers contend only on tail; none ever waits.
type ring[T any] struct {
	cells []ringCell[T]
	mask  uint64
	_     [cacheLine]byte
	tail  atomic.Uint64
	_     [cacheLine - 8]byte
	head  atomic.Uint64 // written only by the consumer
}

type ringCell[T any] struct {
	seq atomic.Uint64
	v   T
}

// newRing makes a ring of at least n cells (rounded up to a power of two, at least 2).
func newRing[T any](n int) *ring[T] {
	size := uint64(2)
	if n > 2 {
		size = 1 << bits.Len64(uint64(n-1))
	}
	r := &ring[T]{cells: make([]ringCell[T], size), mask: size - 1}
	for i := range r.cells {
		r.cells[i].seq.Store(uint64(i))
	}
	return r
}

// put appends v; false if the ring is full. Callable from any goroutine.
func (r *ring[T]) put(v T) bool {
	pos := r.tail.Load()
	for {
		c := &r.cells[pos&r.mask]
		switch seq := c.seq.Load(); {
		case seq == pos:
			if r.tail.CompareAndSwap(pos, pos+1) {
				c.v = v
				c.seq.Store(pos + 1)
				return true
			}
			pos = r.tail.Load()
		case seq < pos: // still has the value of the previous lap
			return false
		default: // another producer took this position
			pos = r.tail.Load()
		}
	}
}

// get removes the oldest value; false if there is none. One consumer at a time.
func (r *ring[T]) get() (v T, ok bool) {
	pos := r.head.Load()
	c := &r.cells[pos&r.mask]
	if c.seq.Load() != pos+1 {
		return v, false
	}
	v = c.v
	var zero T
	c.v = zero
	r.head.Store(pos + 1)
	c.seq.Store(pos + r.mask + 1)
	return v, true
}

// empty reports whether get would return false now.
func (r *ring[T]) empty() bool {
	pos := r.head.Load()
	return r.cells[pos&r.mask].seq.Load() != pos+1
}
