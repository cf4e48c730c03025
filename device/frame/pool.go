// Package frame has the frame buffers of the data path: of fixed size, created once, reference-counted and shared by
// all loops.
//
// Ownership. Get returns a buffer with one reference, owned by the caller. To keep a lent buffer, a borrower calls Ref,
// and later Free. A buffer that has more than one owner, or that was passed to vswitch's Input, is read-only: neither
// its bytes nor its bounds may change, because other ports, possibly on other loops, read it too. The bytes around it
// (Around) belong to the last owner.
package frame

import (
	"fmt"
	"sync/atomic"
)

// Headroom is the free space in front of a new buffer's data, enough for all headers that any layer prepends (outer
// Ethernet 14 + 802.1Q 4 + IPv6 40 + UDP 8 + VXLAN 8, rounded up to cache lines).
const Headroom = 128

// DefaultCapacity is the frame capacity used when Config.Capacity is zero: a 9000-byte jumbo frame with all headers.
const DefaultCapacity = 10 << 10

// DefaultCount is the number of buffers made when Config.Count is zero.
const DefaultCount = 8192

// BigCapacity is the frame capacity of the big buffers: an IPv6 packet of 64 KiB with its Ethernet header and two tags,
// and some bytes by which a receiver detects truncation.
const BigCapacity = 64<<10 + 256

// Limits of Config. They prevent an enormous allocation by a wrong configuration value.
const (
	MinCapacity = 256
	MaxCapacity = 1 << 20
	MaxCount    = 1 << 20
)

const cacheLine = 64

// Config describes a pool. Zero values take the defaults.
type Config struct {
	// Count is the number of buffers, at most MaxCount.
	Count int
	// Capacity is the largest frame in bytes that one buffer holds after its headroom, MinCapacity to MaxCapacity.
	Capacity int
	// Big is the number of additional buffers of BigCapacity bytes, for frames with pending segmentation; at most
	// MaxCount. 0 = none.
	Big int
}

// Pool is a fixed set of buffers. All methods are safe on any loop and allocate nothing.
//
// The free list is a stack of buffer indices (the most recently used buffer is the warmest in the cache). Its head has
// a tag that changes with every operation, so that a pop that was overtaken does not mistake a recycled index for the
// one it read (the ABA problem).
type Pool struct {
	_    [cacheLine]byte
	head atomic.Uint64 // tag<<32 | index+1 of the first free buffer; low half 0 = empty
	_    [cacheLine - 8]byte

	bufs []Buf
	cap  int
	home *Pool // itself, or the pool whose big buffers these are
	big  *Pool // nil = none

	exhausted atomic.Uint64
	kept      atomic.Int64
}

// NewPool makes a pool. The operating system provides the memory page by page, when buffers are first used.
func NewPool(c Config) (*Pool, error) {
	if c.Count == 0 {
		c.Count = DefaultCount
	}
	if c.Capacity == 0 {
		c.Capacity = DefaultCapacity
	}
	if c.Count < 1 || c.Count > MaxCount {
		return nil, fmt.Errorf("frame: pool of %d buffers; want 1 to %d", c.Count, MaxCount)
	}
	if c.Capacity < MinCapacity || c.Capacity > MaxCapacity {
		return nil, fmt.Errorf("frame: buffer capacity %d bytes; want %d to %d", c.Capacity, MinCapacity, MaxCapacity)
	}
	p := newClass(c.Count, c.Capacity)
	if c.Big < 0 || c.Big > MaxCount {
		return nil, fmt.Errorf("frame: %d big buffers; want 0 to %d", c.Big, MaxCount)
	}
	if c.Big > 0 {
		p.big = newClass(c.Big, BigCapacity)
		p.big.home = p
	}
	return p, nil
}

// newClass makes the buffers of one size.
func newClass(count, capacity int) *Pool {
	stride := (Headroom + capacity + cacheLine - 1) &^ (cacheLine - 1)
	p := &Pool{bufs: make([]Buf, count), cap: stride - Headroom}
	p.home = p
	slab := make([]byte, stride*count)
	for i := range p.bufs {
		b := &p.bufs[i]
		b.pool, b.free = p, true
		b.refs.Store(1)
		b.index = uint32(i)
		b.data = slab[i*stride : (i+1)*stride : (i+1)*stride]
		if i+1 < count {
			b.next.Store(uint32(i) + 2)
		}
	}
	p.head.Store(1)
	return p
}

// Get returns an empty buffer (length 0, Headroom in front) with one reference, or nil if all are in use.
func (p *Pool) Get() *Buf {
	for {
		h := p.head.Load()
		i := uint32(h)
		if i == 0 {
			p.exhausted.Add(1)
			return nil
		}
		b := &p.bufs[i-1]
		// Another loop may take b now and change next; then head's tag has also changed and the swap fails.
		if p.head.CompareAndSwap(h, nextTag(h)|uint64(b.next.Load())) {
			b.free = false
			b.Reset()
			return b
		}
	}
}

// GetFor is Get for a frame of n bytes, from the big buffers if necessary. Nil also if n is beyond Largest.
func (p *Pool) GetFor(n int) *Buf {
	switch {
	case n <= p.cap:
		return p.Get()
	case p.big != nil && n <= p.big.cap:
		return p.big.Get()
	}
	return nil
}

func (p *Pool) put(b *Buf) {
	for {
		h := p.head.Load()
		b.next.Store(uint32(h))
		if p.head.CompareAndSwap(h, nextTag(h)|uint64(b.index+1)) {
			return
		}
	}
}

// nextTag returns the upper half of a head word that follows h.
func nextTag(h uint64) uint64 { return (h>>32 + 1) << 32 }

// Keep asks to keep one more buffer for a long time, until an event outside the data path. At most half of the pool may
// be kept, so the other buffers stay available. If it returns true, Unkeep must follow.
func (p *Pool) Keep() bool {
	if p.kept.Add(1) > int64(len(p.bufs)/2) {
		p.kept.Add(-1)
		return false
	}
	return true
}

// KeepLong is Keep for a buffer that is kept until somebody acts who may never do so. own is how many buffers the
// caller keeps already. The fewer are left of those that may be kept, the fewer any caller may keep this way, so that n
// callers of KeepLong leave at least a share of 1/(n+1) to others.
func (p *Pool) KeepLong(own int) bool {
	if p.kept.Load()+int64(own) >= int64(len(p.bufs)/2) {
		return false
	}
	return p.Keep()
}

// Unkeep reports that n buffers are no longer kept.
func (p *Pool) Unkeep(n int) { p.kept.Add(-int64(n)) }

// KeepBig and UnkeepBig are Keep and Unkeep for one big buffer.
func (p *Pool) KeepBig() bool { return p.big != nil && p.big.Keep() }
func (p *Pool) UnkeepBig()    { p.big.Unkeep(1) }

// Capacity returns the largest frame in bytes that fits after the headroom (at least Config.Capacity).
func (p *Pool) Capacity() int { return p.cap }

// Largest returns the largest frame in bytes that GetFor supports.
func (p *Pool) Largest() int {
	if p.big != nil {
		return p.big.cap
	}
	return p.cap
}

// Count returns the number of buffers, free or in use, without the big ones.
func (p *Pool) Count() int { return len(p.bufs) }

// Exhausted returns how many times Get found no free buffer.
func (p *Pool) Exhausted() uint64 {
	n := p.exhausted.Load()
	if p.big != nil {
		n += p.big.exhausted.Load()
	}
	return n
}

// InUse returns the number of buffers that have an owner, big ones included, for status output and leak tests. It walks
// the free list, again if loops change it meanwhile, and after some tries returns an estimate.
func (p *Pool) InUse() int {
	free := 0
	for range 16 {
		h := p.head.Load()
		free = 0
		for i := uint32(h); i != 0 && free < len(p.bufs); free++ {
			i = p.bufs[i-1].next.Load()
		}
		if p.head.Load() == h {
			break
		}
	}
	used := len(p.bufs) - free
	if p.big != nil {
		used += p.big.InUse()
	}
	return used
}
