package translate

import (
	"errors"
	"testing"
)

func TestAccountCharges(t *testing.T) {
	a := NewAccount(100)
	for _, x := range []struct {
		n    uint64
		ok   bool
		used uint64
	}{{60, true, 60}, {41, false, 60}, {40, true, 100}, {1, false, 100}, {0, true, 100}, {1 << 63, false, 100}} {
		if err := a.Charge(CostQPs, x.n); (err == nil) != x.ok || !x.ok && !errors.Is(err, ErrLimit) {
			t.Errorf("%d: %v", x.n, err)
		}
		if s := a.Status(); s.Used != x.used || a.Room() != 100-x.used {
			t.Errorf("%d: %+v", x.n, s)
		}
	}
	a.Take(CostDevice, 10) // beyond the limit: it exists already
	if a.Room() != 0 || a.Charge(CostHolds, 1) == nil {
		t.Errorf("%+v", a.Status())
	}
	a.Credit(CostQPs, 100)
	a.Credit(CostDevice, 11) // a bug
	if s := a.Status(); s.Used != 0 || s.Most != 110 || s.Refused != 4 || s.Miscounted != 1 || len(s.By) != 0 {
		t.Errorf("%+v", s)
	}
	var none *Account
	none.Take(CostQPs, 1)
	none.Credit(CostQPs, 1)
	if err := none.Charge(CostQPs, 1<<62); err != nil || none.Room() < 1<<62 || none.Status().Used != 0 {
		t.Error(err)
	}
}

// A region's cost follows its spec, and what destroying it credits is what making it charged; also of windows, of
// regions whose pages came and went, and of those that are refused.
func TestAccountOfKeys(t *testing.T) {
	a := NewAccount(64 << 10)
	vm := NewVM(NewSpace(1), Limits{Account: a})
	for _, x := range []struct {
		spec    RegionSpec
		entries uint64
	}{
		{RegionSpec{Length: 4096, NPages: 1, PageShift: 12}, 0},
		{RegionSpec{Length: 8192, NPages: 2, PageShift: 12}, 4096},
		{RegionSpec{Length: 512 << 12, NPages: 512, PageShift: 12}, 4096},
		{RegionSpec{Length: 513 << 12, NPages: 513, PageShift: 12}, 4096},
		{RegionSpec{Length: 514 << 12, NPages: 514, PageShift: 12}, 8192},
		{RegionSpec{Length: 1 << 40, Flags: Phys}, 0},
		{RegionSpec{Length: 1 << 40, NPages: 1 << 28, PageShift: 12, Flags: DemandPaging}, 0},
	} {
		r, err := vm.CreateRegion(x.spec)
		if err != nil {
			t.Fatal(err)
		}
		if s := a.Status(); s.By["entries"] != x.entries || s.By["regions"] == 0 {
			t.Errorf("%+v: %+v", x.spec, s)
		}
		if r.demand {
			if err := vm.SetPages(r.Handle(), 0, []PA{0, 4096}); err != nil || a.Status().By["entries"] < 4096 {
				t.Errorf("%v, %+v", err, a.Status())
			}
			if _, err := vm.StartClear(r.Handle(), 0, 2); err != nil || a.Status().By["entries"] >= 4096 {
				t.Errorf("%v, %+v", err, a.Status())
			}
		}
		if _, err := vm.StartDestroy(r.Handle()); err != nil || a.Status().Used != 0 {
			t.Errorf("%v, %+v", err, a.Status())
		}
	}
	for _, spec := range []RegionSpec{{Length: 1 << 30, NPages: 1 << 18, PageShift: 12}, {Length: 1, NPages: 1 << 63,
		PageShift: 12}} {
		if _, err := vm.CreateRegion(spec); !errors.Is(err, ErrLimit) || a.Status().Used != 0 {
			t.Errorf("%v, %+v", err, a.Status())
		}
	}
	for k := range Window2 + 1 {
		pages := uint64(0)
		if k == FastRegion {
			pages = 3
		}
		key, err := vm.CreateDynamic(k, 1, pages)
		if err != nil || a.Status().By["regions"] == 0 {
			t.Fatal(err, a.Status())
		}
		if _, err := vm.StartDestroy(uint32(key)); err != nil || a.Status().Used != 0 {
			t.Errorf("%v, %+v", err, a.Status())
		}
	}
}
