package translate

import (
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
)

// restoredVM makes the keys of vm with these handles again in another VM.
func restoredVM(t *testing.T, vm *VM, handles []uint32) *VM {
	t.Helper()
	to := NewVM(vm.Space(), vm.Limits())
	for _, h := range handles {
		s, err := vm.State(h)
		if err != nil {
			t.Fatal(err)
		}
		if err := to.Restore(&s); err != nil {
			t.Fatal(err)
		}
		if s.Dynamic {
			continue
		}
		r, err := vm.Region(h)
		if err != nil {
			t.Fatal(err)
		}
		first := uint64(0)
		for run := range r.Pages(0, math.MaxUint64) {
			pas := make([]PA, run.N)
			for i := range pas {
				if pas[i] = run.PA; run.PA != absentPA {
					pas[i] += PA(uint64(i) << r.shift)
				}
			}
			if err := to.SetPages(h, first, pas); err != nil {
				t.Fatal(err)
			}
			first += run.N
		}
		if want := r.npages; !r.demand && !r.phys && first != want {
			t.Errorf("%d entries, want %d", first, want)
		}
	}
	return to
}

// Random regions, fast registrations and windows are the same in the VM in which they were made again: state, entries,
// account; and later keys do not repeat those of before.
func TestRestore(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	vm := NewVM(NewSpace(1), Limits{MaxRegions: 4000})
	var handles []uint32
	var bindable []*Region
	pas := func(n uint64) []PA {
		list := make([]PA, n)
		for i := range list {
			switch rng.IntN(4) {
			case 0:
				list[i] = absentPA
			case 1:
				list[i] = PA(rng.Uint64N(1<<20) << PageShift)
			default:
				list[i] = PA(1<<32 + i<<PageShift)
			}
		}
		return list
	}
	for range 200 {
		n := 1 + rng.Uint64N(2000)
		sp := RegionSpec{PD: PD(1 + rng.Uint32N(3)), Access: LocalWrite | RemoteWrite | RemoteRead | MWBind,
			PageShift: PageShift, IOVA: VA(rng.Uint64N(1 << 40)), Length: n<<PageShift - 100, Offset: 50, NPages: n}
		switch rng.IntN(4) {
		case 0:
			sp.Flags, sp.PageShift, sp.Offset, sp.NPages = Phys, 0, 0, 0
		case 1:
			sp.Flags = DemandPaging
		}
		r, err := vm.CreateRegion(sp)
		if err != nil {
			t.Fatal(err)
		}
		handles = append(handles, r.Handle())
		if sp.Flags == 0 {
			if err := vm.SetPages(r.Handle(), 0, pas(n)); err != nil {
				t.Fatal(err)
			}
			bindable = append(bindable, r)
		}
	}
	for i := range 200 {
		kind, capacity := Kind(rng.IntN(3)), uint64(0)
		if kind == FastRegion {
			capacity = 1 + rng.Uint64N(MaxFastPages)
		}
		r := bindable[rng.IntN(len(bindable))]
		key, err := vm.CreateDynamic(kind, r.PD(), capacity)
		if err != nil {
			t.Fatal(err)
		}
		handles = append(handles, uint32(key))
		if i%3 == 0 {
			continue // free
		}
		out := Refused
		if kind == FastRegion {
			list := make([]PA, 1+rng.Uint64N(capacity))
			for i := range list {
				list[i] = PA(rng.Uint64N(1<<20) << PageShift)
			}
			out = vm.Register(0, r.PD(), &FastSpec{Key: key&^0xff | Key(i&0xff), Access: LocalWrite | RemoteRead,
				PageShift: PageShift, IOVA: 1 << 30, Length: uint64(len(list))<<PageShift - 7, Offset: 7}, list)
		} else {
			b := BindSpec{Window: key, NewKey: key + 1, Region: r.LKey(), Access: RemoteRead | RemoteWrite,
				VA: r.IOVA() + 10, Length: r.Length() - 20}
			if kind == Window2 && i%2 == 0 {
				b.Access |= ZeroBased
			}
			out = vm.Bind(0, r.PD(), 77, &b)
		}
		if out != Done {
			t.Fatalf("kind %d: %v", kind, out)
		}
	}
	to := restoredVM(t, vm, handles)
	for _, h := range handles {
		was, err := vm.State(h)
		if err != nil {
			t.Fatal(err)
		}
		if is, err := to.State(h); err != nil || !reflect.DeepEqual(is, was) {
			t.Errorf("%+v, %v; want %+v", is, err, was)
		}
	}
	for _, r := range bindable {
		other, err := to.Region(r.Handle())
		if err != nil {
			t.Fatal(err)
		}
		for p := range r.npages {
			w, _ := r.page(p)
			if o, _ := other.page(p); o != w {
				t.Fatalf("page %d: entry %#x, want %#x", p, o, w)
			}
		}
	}
	was, pages := vm.Usage()
	if is, n := to.Usage(); is != was || n != pages {
		t.Errorf("%d keys and %d entries, want %d and %d", is, n, was, pages)
	}
	for range 1000 {
		r, err := to.CreateRegion(RegionSpec{PD: 1, Length: 1, NPages: 1, PageShift: PageShift})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := vm.State(r.Handle()); err == nil {
			t.Errorf("key %#x is used twice", r.Handle())
		}
	}
}

// Contradictions are refused, and leave no key behind that could not be destroyed.
func TestRestoreRefuses(t *testing.T) {
	vm := NewVM(NewSpace(1), Limits{MaxRegions: 16})
	spec := RegionSpec{PD: 1, Length: 1, NPages: 1, PageShift: PageShift}
	if err := vm.Restore(&KeyState{Handle: 0x1234, Spec: spec}); err != nil {
		t.Fatal(err)
	}
	for what, s := range map[string]KeyState{
		"no key":            {Spec: spec},
		"key in use":        {Handle: 0x1234, Spec: spec},
		"place in use":      {Handle: 0x1235, Spec: spec},
		"reserved place":    {Handle: 0x5, Spec: spec},
		"bad region":        {Handle: 0x300, Spec: RegionSpec{PD: 1}},
		"kind":              {Handle: 0x300, Dynamic: true, Kind: 9, Key: 0x300},
		"capacity":          {Handle: 0x300, Dynamic: true, Kind: FastRegion, Key: 0x300, Capacity: 1000},
		"other index":       {Handle: 0x300, Dynamic: true, Kind: Window1, Key: 0x400},
		"window of nothing": {Handle: 0x300, Dynamic: true, Kind: Window1, Key: 0x301, Valid: true, Base: 0x999},
		"too many pages": {Handle: 0x400, Dynamic: true, Kind: FastRegion, Key: 0x400, Capacity: 1, Valid: true,
			Spec: RegionSpec{PageShift: PageShift, Length: 5000, NPages: 2}, Pages: make([]PA, 2)},
	} {
		if err := vm.Restore(&s); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := vm.DestroyAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n, pages := vm.Usage(); n != 0 || pages != 0 {
		t.Errorf("%d keys, %d pages are left", n, pages)
	}
}
