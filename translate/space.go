package translate

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

// Errors of the table writers. Messages that wrap them name the values.
var (
	ErrInvalid   = errors.New("invalid argument")
	ErrOverlap   = errors.New("range overlaps existing guest memory")
	ErrNotMapped = errors.New("range is not guest memory")
)

// Space is stage two of one guest memory: PA -> host address (PF-1). Only the host driver writes it (PF-2). Loops read
// it without locks, between Enter and Leave of Epochs.
//
// The table has one entry per 2 MiB of guest physical memory ("leaf"), used if those 2 MiB are all present and
// contiguous on the host, or all reserved and never published. Otherwise there is a table of 4 KiB entries beneath it.
// If the lower table exists it is authoritative; a present leaf is a shortcut beside it. A reader tries the leaf first,
// and uses the lower table only if the leaf is 0.
type Space struct {
	table  atomic.Pointer[pa2ma]
	uplink atomic.Uint32 // Uplink: checked with every access (PF-3); and logging
	log    atomic.Pointer[WriteLog]
	gen    atomic.Uint64 // incremented after every change of table and uplink, before the epoch is drained; see Window
	gvmi   GVMI

	epochs Epochs
	faults FaultQueue

	mu sync.Mutex // writers only; guards all table stores

	refused [2]atomic.Uint64 // accesses that the attribute forbade: reads, writes
}

const (
	leafShift    = 21
	leafSize     = 1 << leafShift
	leafPages    = leafSize >> PageShift
	dirShift     = 32 // guest memory that one dir spans: 4 GiB
	dirLeaves    = 1 << (dirShift - leafShift)
	dirLeafMask  = dirLeaves - 1
	leafPageMask = leafPages - 1
)

// An entry is a page-aligned host address plus these bits. 0: no memory here.
const (
	entryPresent  = 1 // the address may be used
	entryReserved = 2 // guest memory whose page is absent: a host fault
)

// pa2ma is the top of the table: an immutable slice of dirs (noDir where there is no memory), replaced when it changes.
// Old and new tops share the dirs, which change through atomics.
type pa2ma struct{ dirs []*paDir }

// noDir is never written.
var noDir = new(paDir)

type paDir struct {
	leaf  [dirLeaves]atomic.Uint64
	small [dirLeaves]atomic.Pointer[paTable]
}

type paTable [leafPages]atomic.Uint64

// NewSpace returns an empty stage-two table for VM g.
func NewSpace(g GVMI) *Space {
	s := &Space{gvmi: g}
	s.table.Store(&pa2ma{})
	s.gen.Store(1) // a Window begins with 0
	return s
}

// GVMI returns the VM that this memory belongs to.
func (s *Space) GVMI() GVMI { return s.gvmi }

// Epochs returns the epochs that guard this memory.
func (s *Space) Epochs() *Epochs { return &s.epochs }

// Reserve declares [pa, pa+n) as guest memory whose pages are all absent:
// accesses are host faults (PF-7) until Map publishes them. Both are multiples
// of the page size. It returns ErrOverlap if any of it is guest memory already.
func (s *Space) Reserve(pa PA, n uint64) error {
	if err := checkSpan(pa, n); err != nil {
		return fmt.Errorf("reserve: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, ok := s.emptyLocked(pa, n); !ok {
		return fmt.Errorf("reserve %v, %d bytes: %v: %w", pa, n, at, ErrOverlap)
	}
	s.reserveLocked(pa, n)
	s.gen.Add(1)
	return nil
}

// Map publishes host as the guest memory from pa on. pa, host's address and its length are multiples of the page size.
// host must be memory outside the Go heap that stays mapped until Unmap (or Withdraw) and a drained epoch: the Space
// does not keep it alive. The range must either not be guest memory, or be reserved and absent; otherwise Map returns
// ErrOverlap. On error nothing is changed.
func (s *Space) Map(pa PA, host []byte) error {
	n := uint64(len(host))
	if err := checkSpan(pa, n); err != nil {
		return fmt.Errorf("map: %w", err)
	}
	base := addrOf(host)
	if base&pageMask != 0 {
		return fmt.Errorf("map %v: host address %#x is not a multiple of %d: %w", pa, uint64(base), PageSize, ErrInvalid)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, ok := s.absentLocked(pa, n); !ok {
		return fmt.Errorf("map %v, %d bytes: %v: %w", pa, n, at, ErrOverlap)
	}
	s.fillLocked(pa, uint64(base), n)
	s.gen.Add(1)
	return nil
}

// Withdraw makes [pa, pa+n) absent but keeps it guest memory: later accesses
// are host faults (PF-14). As with Unmap, the caller then drains the epoch before it releases the host memory.
func (s *Space) Withdraw(pa PA, n uint64) error {
	return s.remove("withdraw", pa, n, entryReserved)
}

// Unmap removes [pa, pa+n), all of which must be guest memory (ErrNotMapped). It only clears entries: the caller drains
// the epoch (EP-3), then unmaps the host memory.
func (s *Space) Unmap(pa PA, n uint64) error {
	return s.remove("unmap", pa, n, 0)
}

func (s *Space) remove(what string, pa PA, n uint64, entry uint64) error {
	if err := checkSpan(pa, n); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, ok := s.memoryLocked(pa, n); !ok {
		return fmt.Errorf("%s %v, %d bytes: %v: %w", what, pa, n, at, ErrNotMapped)
	}
	s.clearLocked(pa, n, entry)
	s.gen.Add(1)
	return nil
}

// Contains reports whether all of [pa, pa+n) is guest memory, present or not.
func (s *Space) Contains(pa PA, n uint64) bool {
	if n == 0 {
		return true
	}
	first := pa &^ pageMask
	last, ok := pa.Add(n - 1)
	if !ok || last >= MaxPA {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok = s.memoryLocked(first, uint64(last&^pageMask-first)+PageSize)
	return ok
}

func checkSpan(pa PA, n uint64) error {
	switch end, ok := pa.Add(n); {
	case n == 0:
		return fmt.Errorf("%v: empty range: %w", pa, ErrInvalid)
	case uint64(pa)&pageMask != 0 || n&pageMask != 0:
		return fmt.Errorf("%v, %d bytes: not multiples of %d: %w", pa, n, PageSize, ErrInvalid)
	case !ok || end > MaxPA:
		return fmt.Errorf("%v, %d bytes: ends beyond %v: %w", pa, n, MaxPA, ErrInvalid)
	}
	return nil
}
