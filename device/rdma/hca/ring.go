// Side: data

package hca

import (
	"fmt"
	"math/bits"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// ring is a work or completion ring in guest memory (device/rdma/abi's Ring). Its
// geometry is that of the command; the header, which the guest's user space can
// write, is not trusted.
type ring struct {
	mem   translate.Ring
	mask  uint32 // number of elements - 1
	shift uint8  // log2 of the element's size
}

// newRing checks a ring that a command names. minElem is the required element size
// in bytes, maxElems the VM's limit; pages is the list of PAs. The length is that of the
// elements, or up to the end of the last 4 KiB of them: neither a page list nor the memory
// that is held for a ring covers more than the device accesses.
func newRing(space *translate.Space, a *abi.Ring, pages []byte, minElem, maxElems int) (ring, error) {
	switch {
	case a.PageShift < 12 || a.PageShift > 30:
		return ring{}, fmt.Errorf("page_shift is %d, must be 12..30", a.PageShift)
	case a.Log2ElemSize < 6 || a.Log2ElemSize > 16:
		return ring{}, fmt.Errorf("log2_elem_size is %d, must be 6..16", a.Log2ElemSize)
	case 1<<a.Log2ElemSize < minElem:
		return ring{}, fmt.Errorf("elements of %d bytes, need %d", 1<<a.Log2ElemSize, minElem)
	case a.NumElems < 2 || bits.OnesCount32(a.NumElems) != 1:
		return ring{}, fmt.Errorf("num_elems is %d, must be a power of two, at least 2", a.NumElems)
	case uint64(a.NumElems) > uint64(maxElems):
		return ring{}, &limitError{what: "elements of a ring", n: uint64(a.NumElems), max: uint64(maxElems)}
	}
	need := abi.RingLength(a.NumElems, a.Log2ElemSize)
	pageSize := uint64(1) << a.PageShift
	switch {
	case a.Length < need:
		return ring{}, fmt.Errorf("length is %d, %d elements of %d bytes need %d", a.Length, a.NumElems, 1<<a.Log2ElemSize,
			need)
	case a.Length > (need+translate.PageSize-1)&^(translate.PageSize-1):
		return ring{}, fmt.Errorf("length is %d, %d elements of %d bytes take only %d", a.Length, a.NumElems,
			1<<a.Log2ElemSize, need)
	case a.Length > uint64(a.NPages)<<a.PageShift:
		return ring{}, fmt.Errorf("length is %d, %d pages of %d bytes hold less", a.Length, a.NPages, pageSize)
	case a.Length <= uint64(a.NPages-1)<<a.PageShift:
		return ring{}, fmt.Errorf("%d pages of %d bytes, a length of %d needs fewer", a.NPages, pageSize, a.Length)
	}
	pas := make([]translate.PA, a.NPages)
	for i := range pas {
		pas[i] = translate.PA(abi.PA(pages, i))
	}
	mem, err := translate.NewRing(space, pas, a.PageShift, a.Length)
	if err != nil {
		return ring{}, memoryError(err)
	}
	return ring{mem: mem, mask: a.NumElems - 1, shift: a.Log2ElemSize}, nil
}

// at is the offset of element i.
func (r *ring) at(i uint32) uint64 { return abi.RingDataOff + uint64(i&r.mask)<<r.shift }

// index reads an index that the guest owns, masked.
func (r *ring) index(off uint64) (uint32, translate.Miss) {
	p, m := r.mem.Uint32(off)
	if !m.OK() {
		return 0, m
	}
	return p.Load() & r.mask, m
}

// setIndex publishes an index that the device owns. It is a release store and a
// full barrier: earlier writes are visible first.
func (r *ring) setIndex(off uint64, v uint32) translate.Miss {
	p, m := r.mem.Uint32(off)
	if m.OK() {
		p.Store(v & r.mask)
	}
	return m
}

// workRing is a ring that the device consumes: SQ, RQ or SRQ. An element is
// fetched (copied in) and later released, when the consumer index passes it;
// for receive rings both happen at once. The device keeps its own indices; of the
// header it writes only the consumer index.
type workRing struct {
	ring
	next uint32 // next element to fetch
	done uint32 // consumer index: next element to release
	have uint32 // known posted elements from next on
	// The guest does not see done yet.
	stale bool
}

// start adopts the indices of the header: an empty ring normally, or a ring
// whose WQEs were posted before the device got it.
func (w *workRing) start() translate.Miss {
	c, m := w.index(abi.RingConsumerOff)
	w.next, w.done, w.have, w.stale = c, c, 0, false
	return m
}

// errIndex reports that the producer index moved over elements that the device holds:
// the guest wrote an invalid value.
var errIndex = fmt.Errorf("producer index moved back over elements in use")

// posted checks for new elements and returns how many can be fetched.
func (w *workRing) posted() (uint32, translate.Miss, error) {
	p, m := w.index(abi.RingProducerOff)
	if !m.OK() {
		return 0, m, nil
	}
	// One slot stays empty, so at most mask elements are fetched or posted.
	n := (p - w.next) & w.mask
	if held := (w.next - w.done) & w.mask; n+held > w.mask {
		return 0, m, errIndex
	}
	w.have = n
	return n, m, nil
}

// maybeMore reports whether there are elements that posted has not found yet; true if the index cannot be read now.
func (w *workRing) maybeMore() bool {
	p, m := w.index(abi.RingProducerOff)
	return !m.OK() || p != (w.next+w.have)&w.mask
}

// consume counts the element at next as fetched.
func (w *workRing) consume() {
	w.next = (w.next + 1) & w.mask
	w.have--
}

// release returns the oldest fetched element; publish tells the guest.
func (w *workRing) release() {
	w.done = (w.done + 1) & w.mask
	w.stale = true
}

// publish writes the consumer index out.
func (w *workRing) publish() translate.Miss { return w.setIndex(abi.RingConsumerOff, w.done) }

// discard drops all posted and fetched elements: the QP went to RESET (IBTA 10.3.1).
func (w *workRing) discard() translate.Miss {
	p, m := w.index(abi.RingProducerOff)
	if !m.OK() {
		return m
	}
	if m = w.setIndex(abi.RingConsumerOff, p); m.OK() {
		w.next, w.done, w.have, w.stale = p, p, 0, false
	}
	return m
}

// move copies the elements from..to (exclusive, indices of r) to the start of
// dst and sets dst's indices. tmp holds the smaller of both element sizes.
func (r *ring) move(dst *ring, from, to uint32, tmp []byte) (uint32, translate.Miss) {
	n := uint32(0)
	for i := from; i != to; i = (i + 1) & r.mask {
		if m := r.mem.Read(tmp, r.at(i)); !m.OK() {
			return n, m
		}
		if m := dst.mem.Write(dst.at(n), tmp); !m.OK() {
			return n, m
		}
		n++
	}
	if m := dst.setIndex(abi.RingConsumerOff, 0); !m.OK() {
		return n, m
	}
	return n, dst.setIndex(abi.RingProducerOff, n)
}
