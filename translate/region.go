package translate

import (
	"fmt"
	"sync/atomic"
)

// RegionFlags select the kind of a region's table.
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

// RegionSpec describes a region to CreateRegion.
type RegionSpec struct {
	PD        PD
	Access    Access
	Flags     RegionFlags
	PageShift uint8  // log2 of the MTT's page size, 12..30; unused with Phys
	IOVA      VA     // first address, as users of the key write it
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
			return bad("physical region with offset %d, %d pages, flags %#x, expected 0, 0, %#x", sp.Offset, sp.NPages,
				uint32(sp.Flags), uint32(Phys))
		}
		return nil
	}
	if sp.Flags&Implicit != 0 && (sp.Flags&DemandPaging == 0 || sp.IOVA != 0 || sp.Offset != 0 ||
		sp.PageShift != PageShift ||
		sp.Length > MaxImplicit || sp.NPages != sp.Length>>PageShift || sp.Length&pageMask != 0) {
		return bad("implicit region with flags %#x, IOVA %#x, offset %#x, page shift %d, length %#x, %d pages, expected %#x, 0, 0, %d, at most %#x, length in pages",
			sp.Flags, uint64(sp.IOVA), sp.Offset, sp.PageShift, sp.Length, sp.NPages, DemandPaging|Implicit, PageShift,
			uint64(MaxImplicit))
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

// Region is a key context with its MTT (PF-1). Its geometry never changes; SetPages and ClearPages of its VM change
// table entries.
type Region struct {
	// Fields that a lookup reads, kept together.
	key    Key
	pd     PD
	access Access
	shift  uint8 // log2 of the page size
	phys   bool
	iova   VA
	length uint64
	offset uint64
	mtt    []mttGroup // empty if phys or demand
	sparse *sparseMTT // nil unless demand

	groupShift uint8  // log2 of the bytes of an mttGroup
	groupMask  uint64 // those bytes - 1
	pageMask   uint64 // page size - 1

	npages     uint64
	demand     bool
	dynamic    bool // belongs to a Dynamic: no window can be bound to it
	generation atomic.Uint64
	windows    atomic.Int32 // bound to it; noWindows: being destroyed
	base       *Region      // of a window: the region with its pages
}

// setGeometry sets everything but the key, the domain and the table.
func (r *Region) setGeometry(sp *RegionSpec) {
	r.access = sp.Access&accessKnown | LocalRead
	r.shift, r.iova, r.length, r.offset, r.npages = sp.PageShift, sp.IOVA, sp.Length, sp.Offset, sp.NPages
	r.groupShift = sp.PageShift + mttGroupShift
	r.groupMask = 1<<(sp.PageShift+mttGroupShift) - 1
	r.pageMask = 1<<sp.PageShift - 1
}

// LKey returns the local key. It is the same number as the remote key.
func (r *Region) LKey() Key { return r.key }

// RKey returns the remote key.
func (r *Region) RKey() Key { return r.key }

// Handle identifies the region in commands.
func (r *Region) Handle() uint32 { return uint32(r.key) }

// PD returns the protection domain.
func (r *Region) PD() PD { return r.pd }

// Access returns the granted rights.
func (r *Region) Access() Access { return r.access &^ LocalRead }

// IOVA returns the region's first address.
func (r *Region) IOVA() VA { return r.iova }

// Length returns the region's size in bytes.
func (r *Region) Length() uint64 { return r.length }

// Demand reports whether the region pages on demand.
func (r *Region) Demand() bool { return r.demand }

// PageSize returns the bytes per MTT entry.
func (r *Region) PageSize() uint64 { return r.pageMask + 1 }

// Generation changes whenever present entries may have changed or been removed, before the epoch is flipped. A user
// that keeps a translation beyond its epoch compares it.
func (r *Region) Generation() uint64 { return r.generation.Load() }
