package translate

import (
	"fmt"
	"iter"
)

// Keys that another process continues (CO-1): their state, and how it is made again. The other process checks it like
// commands and work requests of a guest, which is what it came from (CO-7).

// KeyState describes a region, or a key that work requests change.
type KeyState struct {
	Handle  Key // names it in commands
	Dynamic bool
	// Spec describes a region. Of a Dynamic that is valid it has access (with ZeroBased), page size and geometry of the
	// memory that the key names now; of any, the PD.
	Spec RegionSpec

	// The fields below are a Dynamic's.
	Kind     Kind
	Capacity uint64 // pages of a FastRegion
	Key      Key    // present key
	Valid    bool   // registered, or bound
	QP       PD     // domain of the queue pair that bound a type 2 window
	Base     Key    // region of a window
	Pages    []PA   // of a FastRegion
}

// PageRun is a number of consecutive MTT entries: absent (bit 0 of PA set), or of pages that are contiguous from PA on.
type PageRun struct {
	N  uint64
	PA PA
}

// State returns the state of a region or Dynamic; ErrNoRegion if there is none. No loop may be inside an epoch: a key
// that is being invalidated counts as free.
func (vm *VM) State(handle uint32) (KeyState, error) {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if d := vm.dynamic(Key(handle)); d != nil && d.handle == Key(handle) {
		return d.keyState(), nil
	}
	r, err := vm.Region(handle)
	if err != nil {
		return KeyState{}, err
	}
	s := KeyState{Handle: r.key, Spec: r.spec()}
	if s.Spec.PD = r.pd; r.phys {
		s.Spec.Flags = Phys
	}
	if r.demand {
		s.Spec.Flags = DemandPaging // Implicit only permits a greater length in a command
	}
	return s, nil
}

// DynamicState is State for the Dynamic with a key's index; false if there is none. It takes no lock that commands hold
// for long.
func (vm *VM) DynamicState(key Key) (KeyState, bool) {
	d := vm.dynamic(key)
	if d == nil {
		return KeyState{}, false
	}
	return d.keyState(), true
}

// spec returns the region's access and geometry.
func (r *Region) spec() RegionSpec {
	return RegionSpec{
		Access: r.access &^ LocalRead, PageShift: r.shift, IOVA: r.iova, Length: r.length, Offset: r.offset, NPages: r.npages,
	}
}

func (d *Dynamic) keyState() KeyState {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := KeyState{
		Handle: d.handle, Dynamic: true, Kind: d.kind, Capacity: d.pages, Key: d.key, Valid: d.state == dynValid,
	}
	if s.Valid {
		s.Spec = d.now.spec()
	}
	s.Spec.PD = d.pd
	switch {
	case !s.Valid:
	case d.kind == FastRegion:
		for p := range d.now.npages {
			w, _ := d.now.page(p)
			s.Pages = append(s.Pages, PA(w&^mttFlags))
		}
	default:
		// Where the window begins in its region.
		if va := d.base.iova + VA(d.now.offset-d.base.offset); va != d.now.iova {
			s.Spec.IOVA = va
			s.Spec.Access |= ZeroBased
		}
		s.Base = d.base.key
		if d.kind == Window2 {
			s.QP = d.now.pd
		}
	}
	return s
}

// Pages returns up to n entries of a pinned region from the first on, in order. The entries of demand regions are not
// state: they are absent in the other process, and the guest's driver gives them again.
func (r *Region) Pages(first, n uint64) iter.Seq[PageRun] {
	if r.demand || r.phys || first >= r.npages {
		return func(func(PageRun) bool) {}
	}
	end := first + min(n, r.npages-first)
	return func(yield func(PageRun) bool) { r.pages(first, end, yield) }
}

func (r *Region) pages(first, end uint64, yield func(PageRun) bool) {
	run := PageRun{PA: absentPA}
	for p := first; p < end; {
		w, n := r.page(p)
		if n == 0 { // nor is another page of the group present
			n = mttGroupSize - p&mttGroupMask
		}
		n = min(n, end-p)
		pa := PA(w &^ mttFlags)
		if w == 0 {
			pa = absentPA
		}
		next := run.PA
		if run.PA != absentPA {
			next += PA(run.N << r.shift)
		}
		if run.N > 0 && (pa == absentPA) == (run.PA == absentPA) && pa == next {
			run.N += n
		} else {
			if run.N > 0 && !yield(run) {
				return
			}
			run = PageRun{N: n, PA: pa}
		}
		p += n
	}
	if run.N > 0 {
		yield(run)
	}
}

// Restore makes a region or Dynamic again, with the same keys. A pinned region's entries are absent; SetPages sets
// them. A window's region must exist. ErrInvalid: the state contradicts itself, or a key is in use.
func (vm *VM) Restore(s *KeyState) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("key %#x: "+format+": %w", append(append([]any{uint32(s.Handle)}, args...), ErrInvalid)...)
	}
	if s.Handle == 0 {
		return bad("reserved")
	}
	if !s.Dynamic {
		_, err := vm.createRegion(s.Spec, s.Handle)
		return err
	}
	switch {
	case s.Key.Index() != s.Handle.Index():
		return bad("present key %#x has another index", uint32(s.Key))
	case s.Valid && s.Spec.Length == 0:
		return bad("names nothing")
	}
	if _, err := vm.createDynamic(s.Kind, s.Spec.PD, s.Capacity, s.Handle); err != nil {
		return err
	}
	d := vm.dynamic(s.Handle)
	d.mu.Lock()
	d.key = s.Key
	d.mu.Unlock()
	if !s.Valid {
		return nil
	}
	out := Refused
	if s.Kind == FastRegion {
		out = vm.Register(restoreSlot, s.Spec.PD, &FastSpec{
			Key: s.Key, Access: s.Spec.Access, PageShift: s.Spec.PageShift, IOVA: s.Spec.IOVA, Length: s.Spec.Length,
			Offset: s.Spec.Offset,
		}, s.Pages)
	} else if err := vm.space.epochs.Within(restoreSlot, func() error {
		out = vm.Bind(restoreSlot, s.Spec.PD, s.QP, &BindSpec{
			Window: s.Key, NewKey: s.Key, Region: s.Base, Access: s.Spec.Access, VA: s.Spec.IOVA, Length: s.Spec.Length,
		})
		return nil
	}); err != nil {
		return err
	}
	if out != Done {
		return bad("its registration or binding is not permitted")
	}
	return nil
}

// restoreSlot is the reader slot of control goroutines.
const restoreSlot = epochSlots - 1
