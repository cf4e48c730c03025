package translate

import (
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"sync"
	"sync/atomic"
)

// Errors of VM.
var (
	ErrLimit    = errors.New("limit reached")
	ErrNoRegion = errors.New("no such memory region")
)

// Marks in lists of PAs: an absent page (VNICD_MTT_ABSENT), and, in regions with demand paging, a page whose writes are
// guest faults (VNICD_MTT_READ_ONLY).
const (
	absentPA   PA = 1
	readOnlyPA PA = mttReadOnly
)

// Limits bound a VM's use of stage one. Zero fields take defaults.
type Limits struct {
	MaxRegions int // memory regions, 1..2^24-1; default 65536
	// MaxPages is in MTT entries of 8 bytes over all regions; default 2^25 (128 GiB of 4 KiB pages). A pinned region
	// counts its pages. A demand region counts the memory of its table: 64 for a group of 512 pages with a present one,
	// and 512 more if it has several. When the limit is reached, groups of demand regions are reclaimed.
	MaxPages uint64
	// Account is charged with regions, windows and entries; nil: nobody is. When it is full, groups of demand regions are
	// reclaimed, too.
	Account *Account
}

// VM is stages one and two of one HCA function: the memory protection table, whose index is the upper part of a key,
// the regions with their MTTs, and the Space of their PAs. A key of one VM is meaningless in another (PF-5). Lookups
// are wait-free and are made between Enter and Leave of Space().Epochs(). Commands that change tables take the VM's
// mutex.
type VM struct {
	mpt   []atomic.Pointer[mptGroup]
	mask  uint32 // of the bits of a key's index that are a place in mpt; the others only have to match
	space *Space
	lim   Limits

	mu      sync.Mutex // guards the fields below and all stores to tables
	regions int
	pages   uint64
	random  *rand.ChaCha8

	clearing  *Drain // of the last removal of entries that was flipped for
	undrained bool   // entries were reclaimed since
	demand    demandPool
}

const (
	mptGroupShift = 7
	mptGroupSize  = 1 << mptGroupShift
	mptGroupMask  = mptGroupSize - 1
)

type mptGroup struct {
	region  [mptGroupSize]atomic.Pointer[Region]
	dynamic [mptGroupSize]atomic.Pointer[Dynamic]
	variant [mptGroupSize]uint8 // of the next key; guarded by VM.mu
}

// complete fills in defaults.
func (l *Limits) complete() {
	if l.MaxRegions <= 0 {
		l.MaxRegions = 1 << 16
	}
	l.MaxRegions = min(l.MaxRegions, maxKeyIndex)
	if l.MaxPages == 0 {
		l.MaxPages = 1 << 25
	}
}

// places returns the number of places of the table of keys: a power of two, of which at most two thirds are in use, so
// that a free one is found at random.
func (l *Limits) places() int { return min(1<<bits.Len32(uint32(l.MaxRegions)*3/2), maxKeyIndex+1) }

// mptGroups returns how many groups these places are in.
func (l *Limits) mptGroups() int { return (l.places() + mptGroupMask) >> mptGroupShift }

// NewVM returns a VM over s, without regions.
func NewVM(s *Space, lim Limits) *VM {
	lim.complete()
	var seed [32]byte
	_, _ = crand.Read(seed[:]) // never fails
	places := lim.places()
	return &VM{
		mpt:    make([]atomic.Pointer[mptGroup], lim.mptGroups()),
		mask:   uint32(places - 1),
		space:  s,
		lim:    lim,
		random: rand.NewChaCha8(seed),
	}
}

// SeedKeys makes the keys to come predictable, for tests that need two VMs with equal ones.
func (vm *VM) SeedKeys(seed [32]byte) {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	vm.random.Seed(seed)
}

// Space returns stage two.
func (vm *VM) Space() *Space { return vm.space }

// Limits returns the limits in force, defaults filled in.
func (vm *VM) Limits() Limits { return vm.lim }

// Usage returns the numbers of regions and MTT entries in use.
func (vm *VM) Usage() (regions int, pages uint64) {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	return vm.regions, vm.pages
}

// CreateRegion makes a region, all of whose pages are absent, and publishes its key. It returns ErrInvalid for a bad
// spec, ErrLimit if a quota is exhausted.
func (vm *VM) CreateRegion(sp RegionSpec) (*Region, error) { return vm.createRegion(sp, 0) }

// createRegion makes a region with that key; 0: with a new one.
func (vm *VM) createRegion(sp RegionSpec, key Key) (*Region, error) {
	if err := sp.validate(); err != nil {
		return nil, err
	}
	vm.mu.Lock()
	defer vm.mu.Unlock()
	demand, need := sp.Flags&DemandPaging != 0, sp.NPages
	r := &Region{pd: sp.PD, phys: sp.Flags&Phys != 0, demand: demand}
	r.setGeometry(&sp)
	if demand {
		need = 0
	}
	g, idx, key, err := vm.newKeyLocked(key, need, r.cost())
	if err != nil {
		return nil, err
	}
	r.key = key
	if demand {
		r.sparse = newSparseMTT(r, &vm.demand)
	} else {
		r.mtt = make([]mttGroup, (sp.NPages+mttGroupMask)>>mttGroupShift)
	}
	vm.pages += r.chargeLocked()
	g.region[idx&mptGroupMask].Store(r)
	return r, nil
}

// newKeyLocked takes want, or, if that is 0, an index and its next key. It returns ErrLimit if there is no free index
// or no room for that many pages, or for what the key costs, which is charged; ErrInvalid if want is not free.
func (vm *VM) newKeyLocked(want Key, pages uint64, c keyCost) (g *mptGroup, idx uint32, key Key, err error) {
	if want != 0 && (vm.place(want) == 0 || !vm.emptyLocked(vm.place(want))) {
		return nil, 0, 0, fmt.Errorf("key %#x is reserved or in use: %w", uint32(want), ErrInvalid)
	}
	if vm.regions >= vm.lim.MaxRegions {
		return nil, 0, 0, fmt.Errorf("memory regions: %d exist: %w", vm.regions, ErrLimit)
	}
	if !vm.roomLocked(pages, c.object+c.entries, groupRange{}) && pages > vm.lim.MaxPages-vm.pages {
		return nil, 0, 0, fmt.Errorf("MTT entries: %d of %d in use, %d more requested: %w", vm.pages, vm.lim.MaxPages, pages,
			ErrLimit)
	}
	if err := vm.lim.Account.chargeKey(c); err != nil {
		return nil, 0, 0, err
	}
	if idx = vm.place(want); want == 0 {
		idx = vm.takeIndexLocked()
	}
	if g = vm.mpt[idx>>mptGroupShift].Load(); g == nil {
		g = vm.newMPTGroup()
		vm.mpt[idx>>mptGroupShift].Store(g)
	}
	v := &g.variant[idx&mptGroupMask]
	vm.regions++
	if want != 0 {
		*v = uint8(want) + 1
		return g, idx, want, nil
	}
	index := uint32(vm.random.Uint64())&maxKeyIndex&^vm.mask | idx
	key = Key(index<<keyVariantBits | uint32(*v))
	*v++ // the next key of this place is another one, whatever its random bits are
	return g, idx, key, nil
}

// giveIndexLocked frees an index, its pages, and what its key cost.
func (vm *VM) giveIndexLocked(pages uint64, c keyCost) {
	vm.lim.Account.Credit(CostRegions, c.object)
	vm.lim.Account.Credit(CostEntries, c.entries)
	vm.regions--
	vm.pages -= pages
}

// newMPTGroup starts the variants at random.
func (vm *VM) newMPTGroup() *mptGroup {
	g := new(mptGroup)
	_, _ = vm.random.Read(g.variant[:]) // never fails
	return g
}

// takeIndexLocked returns a free place of the table, chosen at random, so that keys cannot be predicted (TR-3, TR-4).
// Place 0 stays empty, because it could make key 0, which is reserved (RA-1). The loop ends:
// at most MaxRegions places are in use, which are fewer than there are.
func (vm *VM) takeIndexLocked() uint32 {
	for range 128 {
		if idx := uint32(vm.random.Uint64()) & vm.mask; idx != 0 && vm.emptyLocked(idx) {
			return idx
		}
	}
	// Nearly all are in use: MaxRegions is close to 2^24.
	idx := uint32(vm.random.Uint64()) & vm.mask
	for idx == 0 || !vm.emptyLocked(idx) {
		idx = (idx + 1) & vm.mask
	}
	return idx
}

func (vm *VM) emptyLocked(idx uint32) bool {
	g := vm.mpt[idx>>mptGroupShift].Load()
	return g == nil || g.region[idx&mptGroupMask].Load() == nil && g.dynamic[idx&mptGroupMask].Load() == nil
}

// Region returns the region with that handle, or ErrNoRegion.
func (vm *VM) Region(handle uint32) (*Region, error) {
	if r := vm.byKey(Key(handle)); r != nil {
		return r, nil
	}
	return nil, fmt.Errorf("handle %#x: %w", handle, ErrNoRegion)
}

// Beneath translates a window's key and address into those of its region, because the region's owner, which serves its
// faults, does not know windows. Other keys are returned unchanged. The caller holds an epoch.
func (vm *VM) Beneath(key Key, va VA) (Key, VA) {
	r := vm.byKey(key)
	if r == nil || r.base == nil {
		return key, va
	}
	return r.base.key, r.base.iova + (va - r.iova) + VA(r.offset-r.base.offset)
}

// Lookup returns the PA that stage one currently has for an address, if any, regardless of rights. It is for reports,
// not for access.
func (vm *VM) Lookup(key Key, va VA) (PA, bool) {
	r := vm.byKey(key)
	if r == nil {
		return 0, false
	}
	off := uint64(va) - uint64(r.iova)
	if off >= r.length {
		return 0, false
	}
	pa, _, ok := r.toPA(off, 1, false)
	return pa, ok
}

// SetPages writes MTT entries from first on. Each PA is a multiple of the region's page size; bit 0 set makes the entry
// absent, bit 1 read-only (demand paging only): a write to it is a GuestFault. On error the entries are unchanged
// (ErrNoRegion, ErrInvalid, and ErrLimit for demand regions if reclaiming the entries of others made too little room).
// Replacing present entries does not wait for readers of the old ones: use ClearPages first if those pages are going to
// be released.
func (vm *VM) SetPages(handle uint32, first uint64, pas []PA) error {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	r, err := vm.tableLocked(handle, first, uint64(len(pas)))
	if err != nil {
		return fmt.Errorf("set pages: %w", err)
	}
	mask := PA(1)<<r.shift - 1
	if r.demand {
		mask &^= readOnlyPA
	}
	for i, pa := range pas {
		if pa&absentPA == 0 && (pa&mask != 0 || pa >= MaxPA) {
			return fmt.Errorf("set pages: page %d: %v is not a multiple of %#x below %v: %w", first+uint64(i), pa,
				uint64(1)<<r.shift, MaxPA, ErrInvalid)
		}
	}
	keep := groupRange{r, first >> mttGroupShift, (first + uint64(len(pas))) >> mttGroupShift}
	if more := r.missingLocked(first, pas); !vm.roomLocked(more, more*entrySize, keep) {
		vm.lim.Account.refuse(more * entrySize)
		return fmt.Errorf("set pages: MTT entries: %d of %d in use, %d more needed, room for %d bytes: %w", vm.pages,
			vm.lim.MaxPages, more, vm.lim.Account.Room(), ErrLimit)
	}
	before := r.chargeLocked()
	lost := r.setLocked(first, pas)
	vm.chargedLocked(r, before)
	if lost {
		r.generation.Add(1)
		vm.releaseLocked()
	}
	return nil
}

// releaseLocked begins the release of removed entries.
func (vm *VM) releaseLocked() {
	vm.clearing = vm.space.epochs.Flip()
	vm.undrained = false
	vm.demand.spare.begun(vm.clearing)
}

// ClearPages makes count entries from first on absent and returns when the old ones are no longer in use (ODP-5, ODP-6,
// EP-3). Other pages are untouched. If ctx ends first it returns ctx's error; the entries are absent all the same.
func (vm *VM) ClearPages(ctx context.Context, handle uint32, first, count uint64) error {
	d, err := vm.StartClear(handle, first, count)
	if err != nil || d == nil {
		return err
	}
	return d.Wait(ctx)
}

// StartClear is ClearPages without the wait: the old entries are out of use when the Drain is done. The Drain is nil if
// nothing was removed and entries that earlier calls removed or reclaimed are out of use too, so that a caller that
// finds a page absent may release it.
func (vm *VM) StartClear(handle uint32, first, count uint64) (*Drain, error) {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	r, err := vm.tableLocked(handle, first, count)
	if err != nil {
		return nil, fmt.Errorf("clear pages: %w", err)
	}
	before := r.chargeLocked()
	lost := r.clearLocked(first, count)
	vm.chargedLocked(r, before)
	if lost {
		r.generation.Add(1)
	}
	switch {
	case lost || vm.undrained:
		vm.releaseLocked()
	case vm.clearing != nil && vm.clearing.Done():
		vm.clearing = nil
	}
	return vm.clearing, nil
}

// tableLocked returns the region and checks [first, first+count) against its MTT.
func (vm *VM) tableLocked(handle uint32, first, count uint64) (*Region, error) {
	if vm.dynamic(Key(handle)) != nil { // a loop changes its region
		return nil, fmt.Errorf("handle %#x: its pages come from work requests: %w", handle, ErrInvalid)
	}
	r, err := vm.Region(handle)
	switch {
	case err != nil:
		return nil, err
	case r.phys:
		return nil, fmt.Errorf("handle %#x is a physical region, which has no pages: %w", handle, ErrInvalid)
	case first > r.npages || count > r.npages-first:
		return nil, fmt.Errorf("handle %#x: pages %d, %d more: region has %d: %w", handle, first, count, r.npages, ErrInvalid)
	}
	return r, nil
}

// DestroyRegion revokes the key at once and returns when the region is no longer in use (EP-3). If ctx ends first it
// returns ctx's error; the key is revoked all the same. It must not be called between Enter and Leave.
func (vm *VM) DestroyRegion(ctx context.Context, handle uint32) error {
	d, err := vm.StartDestroy(handle)
	if err != nil {
		return err
	}
	return d.Wait(ctx)
}

// StartDestroy is DestroyRegion without the wait: the region is out of use when the Drain is done. It also destroys
// keys from CreateDynamic. It returns ErrBusy if memory windows are bound to the region.
func (vm *VM) StartDestroy(handle uint32) (*Drain, error) {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if d := vm.dynamic(Key(handle)); d != nil {
		if d.handle != Key(handle) { // the handle is constant, the key is not
			return nil, fmt.Errorf("destroy region: handle %#x: %w", handle, ErrNoRegion)
		}
		vm.closeLocked(d)
		return vm.space.epochs.Flip(), nil
	}
	r, err := vm.Region(handle)
	if err == nil && !r.windows.CompareAndSwap(0, noWindows) {
		err = fmt.Errorf("handle %#x: %w", handle, ErrBusy)
	}
	if err != nil {
		return nil, fmt.Errorf("destroy region: %w", err)
	}
	vm.revokeLocked(r)
	return vm.space.epochs.Flip(), nil
}

func (vm *VM) closeLocked(d *Dynamic) {
	d.close()
	idx := vm.place(d.handle)
	vm.mpt[idx>>mptGroupShift].Load().dynamic[idx&mptGroupMask].Store(nil)
	vm.giveIndexLocked(d.pages, d.cost())
}

func (vm *VM) revokeLocked(r *Region) {
	idx := vm.place(r.key)
	vm.mpt[idx>>mptGroupShift].Load().region[idx&mptGroupMask].Store(nil)
	vm.giveIndexLocked(r.chargeLocked(), r.costLocked())
	if r.demand {
		vm.demand.forgetLocked(r.sparse)
	}
	r.generation.Add(1)
}

// DestroyAll revokes every region and returns when none is in use (device
// reset, disconnect). ctx as for DestroyRegion.
func (vm *VM) DestroyAll(ctx context.Context) error {
	vm.mu.Lock()
	for i := range vm.mpt {
		g := vm.mpt[i].Load()
		if g == nil {
			continue
		}
		for k := range g.region {
			if d := g.dynamic[k].Load(); d != nil {
				vm.closeLocked(d)
			}
			if r := g.region[k].Load(); r != nil {
				vm.revokeLocked(r)
			}
		}
	}
	vm.mu.Unlock()
	return vm.space.epochs.Flip().Wait(ctx)
}
