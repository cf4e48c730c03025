package translate

import (
	"fmt"
	"sync/atomic"
)

// RegionFlags change what a region's table is.
type RegionFlags uint32

// Flags of RegionSpec, as in vnicd_abi.h.
const (
	Phys         RegionFlags = 1 << 0 // no table: VAs are PAs
	DemandPaging RegionFlags = 1 << 1 // pages come and go (on-demand paging)
	Implicit     RegionFlags = 1 << 2 // with DemandPaging: an address space from VA 0 on (ODP-1)

	regionFlagsKnown = Phys | DemandPaging | Implicit
)

// MaxImplicit bounds the length of an implicit region, in bytes.
const MaxImplicit = 1 << 57

// Bounds of a region's page size.
const (
	MinPageShift = 12
	MaxPageShift = 30
)

// RegionSpec says what CreateRegion makes.
type RegionSpec struct {
	PD        PD
	Access    Access
	Flags     RegionFlags
	PageShift uint8  // log2 of the MTT's page size, 12..30; unused with Phys
	IOVA      VA     // first address as the keys' holders name it
	Length    uint64 // bytes, > 0
	Offset    uint64 // of the first byte in the first page; 0 with Phys
	NPages    uint64 // MTT entries: cover Offset+Length; 0 with Phys
}

// validate checks everything but quotas, and ignores hints in Access.
func (sp *RegionSpec) validate() error {
	sp.Access &^= accessHints | accessHugeTLB
	bad := func(format string, args ...any) error {
		return fmt.Errorf("memory region: "+format+": %w", append(args, ErrInvalid)...)
	}
	switch _, ok := sp.IOVA.Add(sp.Length - 1); {
	case sp.Access&^accessKnown != 0:
		return bad("unknown access flags %#x", uint32(sp.Access&^accessKnown))
	case sp.Access&(RemoteWrite|RemoteAtomic) != 0 && sp.Access&LocalWrite == 0:
		// IBTA 10.6: remote write or atomic requires local write.
		return bad("access %#x has remote write or atomic without local write", uint32(sp.Access))
	case sp.Flags&^regionFlagsKnown != 0:
		return bad("unknown flags %#x", uint32(sp.Flags&^regionFlagsKnown))
	case sp.Length == 0:
		return bad("length 0")
	case !ok:
		return bad("IOVA %#x and length %#x wrap around", uint64(sp.IOVA), sp.Length)
	}
	if sp.Flags&Phys != 0 {
		if sp.Offset != 0 || sp.NPages != 0 || sp.Flags != Phys {
			return bad("physical region with offset %d, %d pages, flags %#x, expected 0, 0, %#x", sp.Offset, sp.NPages, uint32(sp.Flags), uint32(Phys))
		}
		return nil
	}
	if sp.Flags&Implicit != 0 && (sp.Flags&DemandPaging == 0 || sp.IOVA != 0 || sp.Offset != 0 || sp.PageShift != PageShift ||
		sp.Length > MaxImplicit || sp.NPages != sp.Length>>PageShift || sp.Length&pageMask != 0) {
		return bad("implicit region with flags %#x, IOVA %#x, offset %#x, page shift %d, length %#x, %d pages, expected %#x, 0, 0, %d, at most %#x, length in pages",
			sp.Flags, uint64(sp.IOVA), sp.Offset, sp.PageShift, sp.Length, sp.NPages, DemandPaging|Implicit, PageShift, uint64(MaxImplicit))
	}
	if sp.PageShift < MinPageShift || sp.PageShift > MaxPageShift {
		return bad("page shift %d, expected %d..%d", sp.PageShift, MinPageShift, MaxPageShift)
	}
	size := uint64(1) << sp.PageShift
	if sp.Offset >= size {
		return bad("offset %#x is not within a page of %#x", sp.Offset, size)
	}
	end := sp.Offset + sp.Length
	if end < sp.Length || (end-1)>>sp.PageShift >= sp.NPages {
		return bad("%d pages of %#x do not cover offset %#x and length %#x", sp.NPages, size, sp.Offset, sp.Length)
	}
	return nil
}

// Region is a key context with its MTT (PF-1). Its geometry never changes;
// table entries do, by SetPages and ClearPages of its VM.
type Region struct {
	// What a lookup reads, together.
	key    Key
	pd     PD
	access Access
	shift  uint8 // log2 of the page size
	phys   bool
	iova   VA
	length uint64
	offset uint64
	mtt    []mttGroup // empty if phys

	groupShift uint8  // log2 of the bytes that an mttGroup covers
	groupMask  uint64 // those bytes - 1
	pageMask   uint64 // page size - 1

	npages     uint64
	demand     bool
	generation atomic.Uint64
}

// LKey returns the local key. It is the same number as the remote key.
func (r *Region) LKey() Key { return r.key }

// RKey returns the remote key.
func (r *Region) RKey() Key { return r.key }

// Handle names the region in commands.
func (r *Region) Handle() uint32 { return uint32(r.key) }

// PD returns the protection domain.
func (r *Region) PD() PD { return r.pd }

// Access returns the granted rights.
func (r *Region) Access() Access { return r.access }

// Length returns the region's size in bytes.
func (r *Region) Length() uint64 { return r.length }

// Demand tells whether the region pages on demand.
func (r *Region) Demand() bool { return r.demand }

// Generation changes each time entries that were present may have changed or
// gone, before the epoch is flipped: whoever keeps a translation beyond its
// epoch compares.
func (r *Region) Generation() uint64 { return r.generation.Load() }

// The MTT: one word per page in groups of 512, made when first written, so that
// creating a region costs 16 bytes per 512 pages however large it is. An entry
// is PA | 1 when present, | 2 if it must not be written through, else 0. If all pages of a group are physically
// contiguous, run holds the first entry: then a lookup skips the group, and a
// region of 10 million such pages is described by 300 KiB. run is a shortcut
// beside entries that are always right.
const (
	mttGroupShift = 9
	mttGroupSize  = 1 << mttGroupShift
	mttGroupMask  = mttGroupSize - 1
	mttPresent    = 1
	mttReadOnly   = 2
	mttFlags      = mttPresent | mttReadOnly
)

type mttGroup struct {
	run     atomic.Uint64
	entries atomic.Pointer[[mttGroupSize]atomic.Uint64]
}

// page returns the entry of page p (p < npages), and how many pages from p on
// are known to be contiguous.
func (r *Region) page(p uint64) (entry, contiguous uint64) {
	g := &r.mtt[p>>mttGroupShift]
	i := p & mttGroupMask
	if w := g.run.Load(); w != 0 {
		return w + i<<(r.shift&63), mttGroupSize - i
	}
	t := g.entries.Load()
	if t == nil {
		return 0, 0
	}
	return t[i].Load(), 1
}

// toPA translates off, an offset into the region that has been checked, and
// says how many of the n bytes from there on are physically contiguous (at
// least 1). ok is false when the page is absent, or read-only and to be written.
func (r *Region) toPA(off, n uint64, write bool) (pa PA, got uint64, ok bool) {
	if r.phys {
		return PA(uint64(r.iova) + off), n, true
	}
	off += r.offset
	shift := r.shift & 63
	p := off >> shift
	in := off & (1<<shift - 1)
	w, pages := r.page(p)
	if w == 0 || write && w&mttReadOnly != 0 {
		return 0, 0, false
	}
	pa = PA(w&^mttFlags + in)
	got = pages<<shift - in
	for got < n {
		p += pages
		w += pages << shift
		next, more := r.page(p)
		if next != w {
			break
		}
		got += more << shift
		pages = more
	}
	return pa, min(got, n), true
}

// setLocked stores pas from page first on; ranges have been checked. It
// reports whether a present entry was changed or removed: the same page made
// writable is no change for those who read it.
func (r *Region) setLocked(first uint64, pas []PA) (lost bool) {
	for len(pas) > 0 {
		g := &r.mtt[first>>mttGroupShift]
		i := first & mttGroupMask
		n := min(uint64(len(pas)), mttGroupSize-i)
		t := g.entries.Load()
		if t == nil {
			t = new([mttGroupSize]atomic.Uint64)
			g.entries.Store(t)
		}
		for k, pa := range pas[:n] {
			w := uint64(0)
			if pa&absentPA == 0 {
				w = uint64(pa) | mttPresent // bit 1 is readOnlyPA
			}
			e := &t[i+uint64(k)]
			if old := e.Load(); old != w {
				lost = lost || old != 0 && old != w|mttReadOnly
				e.Store(w)
			}
		}
		g.summariseLocked(r.shift, r.npages-(first-i))
		first, pas = first+n, pas[n:]
	}
	return lost
}

// clearLocked removes count entries from page first on.
func (r *Region) clearLocked(first, count uint64) (lost bool) {
	for count > 0 {
		g := &r.mtt[first>>mttGroupShift]
		i := first & mttGroupMask
		n := min(count, mttGroupSize-i)
		if t := g.entries.Load(); t != nil {
			for k := i; k < i+n; k++ {
				if t[k].Load() != 0 {
					lost = true
					t[k].Store(0)
				}
			}
			g.run.Store(0)
		}
		first, count = first+n, count-n
	}
	return lost
}

// summariseLocked makes run agree with the entries, of which the region has n
// (the last group may be short; nobody looks beyond).
func (g *mttGroup) summariseLocked(shift uint8, n uint64) {
	t := g.entries.Load()
	w := t[0].Load()
	for k := range min(n, mttGroupSize) {
		if w == 0 || t[k].Load() != w+k<<shift {
			w = 0
			break
		}
	}
	g.run.Store(w)
}
