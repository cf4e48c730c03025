package translate

import (
	"fmt"
	"sync/atomic"
)

// Ring is a work or completion queue in guest memory, given by a list of pages. Every access goes through stage two, so
// a ring may be absent like any other memory (PF-12). Copies of a Ring share the page list. Methods are called between
// Enter and Leave, and are safe for concurrent use.
type Ring struct {
	space  *Space
	pas    []PA   // nil if the ring is one contiguous span
	base   PA     // of the first page
	shift  uint8  // log2 of the page size
	length uint64 // bytes
}

// NewRing describes length bytes that begin with the first of the pages. Pages have 1<<pageShift bytes (12..30) and
// that alignment, and there are exactly as many as length needs; otherwise the error is ErrInvalid. It is ErrNotMapped
// if a page is not guest memory. pas is copied.
func NewRing(s *Space, pas []PA, pageShift uint8, length uint64) (Ring, error) {
	if pageShift < MinPageShift || pageShift > MaxPageShift {
		return Ring{}, fmt.Errorf("ring: page shift %d, expected %d..%d: %w", pageShift, MinPageShift, MaxPageShift,
			ErrInvalid)
	}
	if length == 0 || (length-1)>>pageShift+1 != uint64(len(pas)) {
		return Ring{}, fmt.Errorf("ring: %d pages of %#x for %d bytes: %w", len(pas), uint64(1)<<pageShift, length,
			ErrInvalid)
	}
	size := uint64(1) << pageShift
	r := Ring{space: s, base: pas[0], shift: pageShift, length: length}
	contiguous := true
	for i, pa := range pas {
		if uint64(pa)&(size-1) != 0 {
			return Ring{}, fmt.Errorf("ring: page %d: %v is not a multiple of %#x: %w", i, pa, size, ErrInvalid)
		}
		if used := min(size, length-uint64(i)<<pageShift); !s.Contains(pa, used) {
			return Ring{}, fmt.Errorf("ring: page %d: %v, %d bytes: %w", i, pa, used, ErrNotMapped)
		}
		contiguous = contiguous && pa == pas[0]+PA(uint64(i)<<pageShift)
	}
	if !contiguous {
		r.pas = append([]PA(nil), pas...)
	}
	return r, nil
}

// Footprint returns the bytes that the page list occupies; 0 if the ring is contiguous.
func (r *Ring) Footprint() uint64 { return AllocatedFor[PA](len(r.pas)) }

// Len returns the ring's size in bytes; 0 for the zero Ring.
func (r *Ring) Len() uint64 { return r.length }

// at returns the PA of off and how many bytes of the ring follow contiguously.
func (r *Ring) at(off uint64) (PA, uint64) {
	if r.pas == nil {
		return r.base + PA(off), r.length - off
	}
	in := off & (1<<(r.shift&63) - 1)
	return r.pas[off>>(r.shift&63)] + PA(in), min(1<<(r.shift&63)-in, r.length-off)
}

func (r *Ring) inside(off, n uint64) bool { return off <= r.length && n <= r.length-off }

// Read copies len(dst) bytes from byte off on. Beyond the end it returns OutOfRange, with the offset as the Miss's VA.
func (r *Ring) Read(dst []byte, off uint64) Miss {
	if !r.inside(off, uint64(len(dst))) {
		return Miss{Kind: OutOfRange, Where: Where{VA: VA(off)}, Len: uint64(len(dst))}
	}
	for len(dst) > 0 {
		pa, n := r.at(off)
		n = min(n, uint64(len(dst)))
		if m := r.space.RingRead(dst[:n], pa); !m.OK() {
			return m
		}
		dst, off = dst[n:], off+n
	}
	return Miss{}
}

// Write copies src to byte off on, like Read.
func (r *Ring) Write(off uint64, src []byte) Miss {
	if !r.inside(off, uint64(len(src))) {
		return Miss{Kind: OutOfRange, Where: Where{VA: VA(off)}, Len: uint64(len(src))}
	}
	for len(src) > 0 {
		pa, n := r.at(off)
		n = min(n, uint64(len(src)))
		if m := r.space.RingWrite(pa, src[:n]); !m.OK() {
			return m
		}
		src, off = src[n:], off+n
	}
	return Miss{}
}

// Uint32 returns the 4-byte aligned word at byte off for atomic use within the
// epoch.
func (r *Ring) Uint32(off uint64) (*atomic.Uint32, Miss) {
	if off&3 != 0 || !r.inside(off, 4) {
		return nil, Miss{Kind: OutOfRange, Where: Where{VA: VA(off)}, Len: 4}
	}
	pa, _ := r.at(off)
	return r.space.RingUint32(pa)
}

// Pages returns the ring's pages, as NewRing took them.
func (r *Ring) Pages() (pas []PA, pageShift uint8) {
	if r.pas != nil || r.length == 0 {
		return r.pas, r.shift
	}
	pas = make([]PA, (r.length-1)>>r.shift+1)
	for i := range pas {
		pas[i] = r.base + PA(uint64(i)<<r.shift)
	}
	return pas, r.shift
}
