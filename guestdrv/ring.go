package guestdrv

import (
	"math/bits"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// ring is a work or completion ring in shared memory (rdma_user_rxe.h). The driver writes one of its indices: prod of
// work queues, cons of CQs.
type ring struct {
	buf  *Buffer
	data []byte
	log2 uint8
	mask uint32
	prod *atomic.Uint32
	cons *atomic.Uint32
}

// newRing allocates a ring for at least n elements of at least size bytes, with extra bytes after it.
func newRing(mem *memory, n, size, extra int) (*ring, error) {
	log2 := uint8(max(bits.Len(uint(size-1)), 6))
	elems := uint32(1) << bits.Len(uint(n)) // the smallest power of two above n: one stays empty
	length := abi.RingLength(elems, log2)
	buf, err := mem.alloc(length+uint64(extra), pageSize)
	if err != nil {
		return nil, err
	}
	b := buf.data
	le.PutUint32(b[abi.RingLog2ElemSizeOff:], uint32(log2))
	le.PutUint32(b[abi.RingIndexMaskOff:], elems-1)
	return &ring{
		buf: buf, data: b[abi.RingDataOff:length], log2: log2, mask: elems - 1,
		prod: atomic32(b, abi.RingProducerOff), cons: atomic32(b, abi.RingConsumerOff),
	}, nil
}

// desc describes the ring for a command.
func (r *ring) desc() abi.Ring {
	n := r.mask + 1
	length := abi.RingLength(n, r.log2)
	return abi.Ring{
		Length: length, NPages: uint32((length + pageSize - 1) >> pageShift), PageShift: pageShift,
		Log2ElemSize: r.log2, NumElems: n,
	}
}

// pages returns the PAs that follow desc in a command.
func (r *ring) pages() []uint64 { return r.buf.pagePAs()[:r.desc().NPages] }

// elem returns element i.
func (r *ring) elem(i uint32) []byte {
	off := int(i&r.mask) << r.log2
	return r.data[off : off+1<<r.log2]
}

// room returns the next slot to fill, or nil if the ring is full.
func (r *ring) room() []byte {
	p := r.prod.Load()
	if (p+1)&r.mask == r.cons.Load()&r.mask {
		return nil
	}
	return r.elem(p)
}

// publish makes the slot that room returned visible to the device.
func (r *ring) publish() { r.prod.Store((r.prod.Load() + 1) & r.mask) }

// pending returns the number of elements that are published and not consumed.
func (r *ring) pending() int { return int((r.prod.Load() - r.cons.Load()) & r.mask) }

func (r *ring) free() { r.buf.free() }
