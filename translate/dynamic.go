package translate

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

// ErrBusy: memory windows are bound to a region.
var ErrBusy = errors.New("memory windows are bound to it")

// Kind is the kind of a key that work requests change.
type Kind uint8

// Kinds; windows are numbered as in enum ib_mw_type.
const (
	FastRegion Kind = 0 // registered and invalidated by work requests (IBTA 10.6.4)
	Window1    Kind = 1 // memory window type 1: belongs to a protection domain (IBTA 10.6.7)
	Window2    Kind = 2 // type 2B: belongs to the queue pair that bound it
)

// MaxFastPages bounds the pages of a FastRegion.
const MaxFastPages = mttGroupSize

// Outcome is the result of a request that changes a key.
type Outcome uint8

// Outcomes.
const (
	Done    Outcome = iota
	Again           // others still use the key's former memory: retry soon
	Refused         // not permitted, or malformed; nothing has changed
)

// Dynamic is a key that work requests register and invalidate, without a command and without the VM's lock. Its index
// is fixed; the owner chooses the low byte.
//
//	free --Register, Bind--> valid --Invalidate--> draining --no readers--> free
//	                           any --StartDestroy--> closed
//
// While the key is valid, the MPT points to now, as to any region. To avoid allocations, now is reused, but only when
// no reader can see it; an invalidation is Done only then.
type Dynamic struct {
	vm     *VM
	kind   Kind
	pd     PD
	handle Key
	slot   *atomic.Pointer[Region] // its place in the MPT
	pages  uint64                  // a FastRegion's capacity

	mu    sync.Mutex // a leaf in the lock order, held for one request; guards the fields below
	state dynamicState
	key   Key
	now   Region
	base  *Region // the region that a window is bound to
	drain Drain
}

type dynamicState uint8

const (
	dynFree dynamicState = iota
	dynValid
	dynDraining
	dynClosed
)

// CreateDynamic makes a key that is not valid yet. pages, 1..MaxFastPages, is the capacity of a FastRegion, which
// counts against Limits.MaxPages; for windows it is 0. The key is also the handle for StartDestroy. Errors: ErrInvalid,
// ErrLimit.
func (vm *VM) CreateDynamic(k Kind, pd PD, pages uint64) (Key, error) {
	return vm.createDynamic(k, pd, pages, 0)
}

// createDynamic is CreateDynamic for a given key; 0: for a new one.
func (vm *VM) createDynamic(k Kind, pd PD, pages uint64, key Key) (Key, error) {
	if k > Window2 || k == FastRegion && (pages == 0 || pages > MaxFastPages) || k != FastRegion && pages != 0 {
		return 0, fmt.Errorf("key of kind %d for %d pages, at most %d: %w", k, pages, MaxFastPages, ErrInvalid)
	}
	vm.mu.Lock()
	defer vm.mu.Unlock()
	d := &Dynamic{vm: vm, kind: k, pd: pd, pages: pages}
	g, idx, key, err := vm.newKeyLocked(key, pages, d.cost())
	if err != nil {
		return 0, err
	}
	d.handle, d.key, d.slot = key, key, &g.region[idx&mptGroupMask]
	d.now.dynamic = true
	if k == FastRegion {
		d.now.mtt = make([]mttGroup, 1)
		d.now.mtt[0].entries.Store(new(mttEntries))
	}
	vm.pages += pages
	g.dynamic[idx&mptGroupMask].Store(d)
	return key, nil
}

// dynamic returns the object with key's index, or nil.
func (vm *VM) dynamic(key Key) *Dynamic {
	idx := vm.place(key)
	g := vm.mpt[idx>>mptGroupShift].Load()
	if g == nil {
		return nil
	}
	d := g.dynamic[idx&mptGroupMask].Load()
	if d == nil || d.handle.Index() != key.Index() {
		return nil
	}
	return d
}

// FastSpec is a fast registration.
type FastSpec struct {
	Key       Key // index of the FastRegion, with the new low byte
	Access    Access
	PageShift uint8
	IOVA      VA
	Length    uint64
	Offset    uint64 // of the first byte in the first page
}

// Register gives a free FastRegion of protection domain pd the memory that sp and pas, its pages, describe (IBTA
// 11.4.4.1). The caller has entered the epoch with slot.
func (vm *VM) Register(slot int, pd PD, sp *FastSpec, pas []PA) Outcome {
	d := vm.dynamic(sp.Key)
	if d == nil || d.kind != FastRegion || d.pd != pd || uint64(len(pas)) > d.pages {
		return Refused
	}
	rs := RegionSpec{
		Access: sp.Access, PageShift: sp.PageShift, IOVA: sp.IOVA, Length: sp.Length, Offset: sp.Offset,
		NPages: uint64(len(pas)),
	}
	if sp.Access&(OnDemand|ZeroBased) != 0 || rs.validate() != nil {
		return Refused
	}
	for _, pa := range pas {
		if uint64(pa)&(1<<sp.PageShift-1) != 0 || pa >= MaxPA {
			return Refused
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.settleLocked() == Again {
		return Again
	}
	if d.state != dynFree {
		return Refused
	}
	d.key = sp.Key
	r := &d.now
	r.setGeometry(&rs)
	r.key, r.pd = sp.Key, pd
	r.setLocked(0, pas)
	d.publishLocked()
	return Done
}

// BindSpec is the binding of a memory window.
type BindSpec struct {
	Window Key // the present key
	NewKey Key // its low byte becomes the window's
	Region Key // L_Key
	Access Access
	VA     VA
	Length uint64 // 0: type 1 only, unbinds
}

// windowRights are the rights that a window can grant. Programs also ask for local write, which a window cannot grant
// because its key is not an L_Key (ibv_bind_mw; IBTA 10.6.7.2.2).
const windowRights = RemoteWrite | RemoteRead | RemoteAtomic | FlushGlobal

// Bind binds a memory window to a part of a region (IBTA 10.6.7.2, 11.4.4.2), for a QP in protection domain pd. qp is
// the QP's own domain, to which a type 2 window then belongs. A type 1 window may already be bound. The caller has
// entered the epoch with slot.
func (vm *VM) Bind(slot int, pd, qp PD, sp *BindSpec) Outcome {
	d := vm.dynamic(sp.Window)
	if d == nil || d.kind == FastRegion || d.pd != pd || sp.Access&^(windowRights|LocalWrite|ZeroBased) != 0 {
		return Refused
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.settleLocked() == Again {
		return Again
	}
	var base *Region
	switch {
	case d.state == dynClosed || d.key != sp.Window:
		return Refused
	case d.kind == Window1 && sp.Access&ZeroBased != 0:
		return Refused // IBTA o10-36.2.2
	case d.kind == Window2 && (d.state != dynFree || sp.Length == 0):
		return Refused // o10-37.2.30, o10-37.2.40
	case sp.Length != 0:
		if base = vm.bindable(pd, sp); base == nil {
			return Refused
		}
	}
	if d.state == dynValid && d.invalidateLocked(slot) == Again {
		return Again
	}
	key := sp.Window&^(1<<keyVariantBits-1) | sp.NewKey&(1<<keyVariantBits-1)
	if base == nil {
		d.key = key
		return Done
	}
	if !base.hold() {
		return Refused
	}
	d.base, d.key = base, key
	d.now.view(base, sp, key)
	if d.now.pd = pd; d.kind == Window2 {
		d.now.pd = qp
	}
	d.publishLocked()
	return Done
}

// bindable returns the region to which sp can bind a window, or nil.
func (vm *VM) bindable(pd PD, sp *BindSpec) *Region {
	r, _, kind := vm.lookup(sp.Region, pd, sp.VA, sp.Length, MWBind) // C10-72, C10-73, C10-75
	switch {
	case kind != None, r.dynamic, r.phys, r.access&ZeroBased != 0:
		return nil
	case sp.Access&(RemoteWrite|RemoteAtomic) != 0 && r.access&LocalWrite == 0: // C10-74
		return nil
	}
	return r
}

// Invalidate makes key invalid (IBTA 10.6.5), for a QP in protection domain pd. If it returns Again, the key is already
// invalid, and another call reports when its memory is no longer in use. An already invalid key is not an error; a key
// of another kind or domain is Refused. The caller has entered the epoch with slot.
func (vm *VM) Invalidate(slot int, pd PD, key Key) Outcome {
	return vm.invalidate(slot, pd, key, func(*Region) bool { return true })
}

// InvalidateRemote is Invalidate for the peer of a QP whose own domain is qp: it cannot invalidate type 2 windows that
// other QPs have bound.
func (vm *VM) InvalidateRemote(slot int, pd, qp PD, key Key) Outcome {
	return vm.invalidate(slot, pd, key, func(r *Region) bool { return r.pd == pd || r.pd == qp })
}

func (vm *VM) invalidate(slot int, pd PD, key Key, may func(*Region) bool) Outcome {
	d := vm.dynamic(key)
	if d == nil || d.kind == Window1 || d.pd != pd { // o10-37.2.26
		return Refused
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == dynClosed || d.key != key || d.state != dynFree && !may(&d.now) {
		return Refused
	}
	if d.state == dynValid {
		return d.invalidateLocked(slot)
	}
	return d.settleLocked()
}

// invalidateLocked leaves state dynValid. It needs no drain if the caller is the only reader.
func (d *Dynamic) invalidateLocked(slot int) Outcome {
	d.voidLocked()
	e := &d.vm.space.epochs
	if e.Alone(slot) {
		d.state = dynFree
		return Done
	}
	e.begin(&d.drain)
	d.state = dynDraining
	return Again
}

// settleLocked leaves state dynDraining if the drain is done.
func (d *Dynamic) settleLocked() Outcome {
	if d.state == dynDraining {
		if !d.drain.Done() {
			return Again
		}
		d.state = dynFree
	}
	return Done
}

func (d *Dynamic) publishLocked() {
	d.state = dynValid
	d.slot.Store(&d.now)
}

// voidLocked removes the key from the MPT.
func (d *Dynamic) voidLocked() {
	d.slot.Store(nil)
	d.now.generation.Add(1)
	if d.base != nil {
		d.base.windows.Add(-1)
		d.base = nil
	}
}

// close ends the object for good.
func (d *Dynamic) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == dynValid {
		d.voidLocked()
	}
	d.state = dynClosed
}

// noWindows is the window count of a region that is being destroyed: no more can be bound.
const noWindows = -1 << 30

// hold counts a window, unless the region is being destroyed.
func (r *Region) hold() bool {
	for {
		n := r.windows.Load()
		if n < 0 {
			return false
		}
		if r.windows.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// view makes r a window on a part of base. It shares base's table, so pages appear and disappear in both, and a release
// waits for readers of both, since they use the same epochs.
func (r *Region) view(base *Region, sp *BindSpec, key Key) {
	in := uint64(sp.VA - base.iova)
	r.key, r.access, r.base = key, sp.Access&windowRights, base
	r.shift, r.mtt, r.sparse, r.npages = base.shift, base.mtt, base.sparse, base.npages
	r.groupShift, r.groupMask, r.pageMask = base.groupShift, base.groupMask, base.pageMask
	r.iova, r.length, r.offset = sp.VA, sp.Length, base.offset+in
	if sp.Access&ZeroBased != 0 {
		r.iova = 0
	}
}
