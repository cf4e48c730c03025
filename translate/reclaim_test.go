package translate

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// implicit makes an implicit region.
func implicit(t testing.TB, vm *VM) *Region {
	t.Helper()
	r, err := vm.CreateRegion(RegionSpec{PD: 1, Access: LocalWrite | RemoteWrite, Flags: DemandPaging | Implicit,
		PageShift: 12, Length: MaxImplicit, NPages: MaxImplicit >> 12})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// setGroup makes one page of group n present.
func setGroup(t testing.TB, vm *VM, r *Region, n uint64) {
	t.Helper()
	if err := vm.SetPages(r.Handle(), n<<mttGroupShift, []PA{PA(n << PageShift)}); err != nil {
		t.Fatal(err)
	}
}

// look is an access to group n.
func look(r *Region, n uint64) bool {
	_, _, ok := r.toPA(n<<(mttGroupShift+PageShift), 1, true)
	return ok
}

// One page in each of more groups than the quota has room for with entries: one page costs 64 words, not 512 (HF-3).
func TestOnePageOfAGroupCostsLittle(t *testing.T) {
	const groups = 1000
	vm := NewVM(NewSpace(1), Limits{MaxPages: groups<<mttGroupShift/8 + sparseTableCharge})
	r := implicit(t, vm)
	for n := range uint64(groups) {
		setGroup(t, vm, r, n)
	}
	for n := range uint64(groups) {
		if !look(r, n) {
			t.Fatalf("group %d is gone", n)
		}
	}
	if vm.Reclaimed() != 0 {
		t.Errorf("%d groups reclaimed within the quota", vm.Reclaimed())
	}
	checkAccount(t, vm)
}

// A group in use survives the hand; those that nothing uses go first, and the newest last, whether used or not. A
// lookup stores only if the hand has passed.
func TestReclaimsWhatIsNotUsed(t *testing.T) {
	const groups, hot = 400, 40
	vm := NewVM(NewSpace(1), Limits{MaxPages: groups*sparseGroupCharge + sparseTableCharge})
	r := implicit(t, vm)
	next := uint64(0)
	for ; next < groups; next++ {
		setGroup(t, vm, r, next)
	}
	lost, newest := 0, uint64(0) // newest: since when only the groups from next on are made
	for ; next < 20*groups; next++ {
		for n := range uint64(hot) {
			if !look(r, n) {
				lost, newest = lost+1, next
				setGroup(t, vm, r, n)
			}
		}
		setGroup(t, vm, r, next)
		if n := next - reclaimNewest; n >= newest && !look(r, n) {
			t.Fatalf("group %d is gone already", n)
		}
	}
	// The hand passes some 20 times over all groups; before it has marked those of the first round, any may go.
	if lost > 2*hot {
		t.Errorf("groups in use were removed %d times", lost)
	}
	g := r.sparse.find(5)
	g.run.Or(mttIdle)
	if look(r, 5); g.run.Load()&mttIdle != 0 {
		t.Error("a lookup left the mark")
	}
	g.run.Or(mttIdle)
	if _, m := vm.Resolve(r.key, 1, 5<<21, 8, RemoteWrite); m.Kind == GuestFault || g.run.Load()&mttIdle != 0 {
		t.Errorf("%v; mark %v", m, g.run.Load()&mttIdle != 0)
	}
	checkAccount(t, vm)
}

// Pinned regions keep their entries and get room at the expense of demand regions. A request beyond the rest of the
// quota is refused, and nothing is reclaimed in vain.
func TestPinnedRegionsAreNotReclaimed(t *testing.T) {
	const quota = 1 << 16
	vm := NewVM(NewSpace(1), Limits{MaxPages: quota})
	r := implicit(t, vm)
	pinned := func(pages uint64) (*Region, error) {
		return vm.CreateRegion(RegionSpec{PageShift: 12, Length: pages << 12, NPages: pages})
	}
	for n := range uint64(2000) {
		setGroup(t, vm, r, n)
	}
	p, err := pinned(quota / 2)
	if err != nil {
		t.Fatal(err)
	}
	pas := make([]PA, quota/2)
	for i := range pas {
		pas[i] = PA(i * 3 << PageShift)
	}
	if err := vm.SetPages(p.Handle(), 0, pas); err != nil {
		t.Fatal(err)
	}
	before := vm.Reclaimed()
	if _, err := pinned(quota / 2); !errors.Is(err, ErrLimit) {
		t.Error("more than the quota:", err)
	}
	if vm.Reclaimed() != before {
		t.Error("groups were reclaimed in vain")
	}
	for n := range uint64(2000) {
		setGroup(t, vm, r, n)
	}
	for i := range pas {
		if pa, _, ok := p.toPA(uint64(i)<<PageShift, 1, true); !ok || pa != pas[i] {
			t.Fatalf("page %d of the pinned region: %v, %v", i, pa, ok)
		}
	}
	if vm.Reclaimed() == before {
		t.Error("nothing was reclaimed")
	}
	checkAccount(t, vm)
	// All of the quota is pinned: later, not never (HF-2).
	if err := vm.DestroyRegion(t.Context(), p.Handle()); err != nil {
		t.Fatal(err)
	}
	if p, err = pinned(quota - sparseTableCharge - sparseGroupCharge + 1); err != nil {
		t.Fatal(err)
	}
	if err := vm.SetPages(r.Handle(), 7, []PA{0}); !errors.Is(err, ErrLimit) {
		t.Error("no room at all:", err)
	}
	if err := vm.DestroyRegion(t.Context(), p.Handle()); err != nil {
		t.Fatal(err)
	}
	if err := vm.SetPages(r.Handle(), 7, []PA{0}); err != nil {
		t.Error("with room again:", err)
	}
}

// A range that needs room for itself does not lose its own groups.
func TestReclaimSparesTheRequest(t *testing.T) {
	const groups = 16
	vm := NewVM(NewSpace(1), Limits{MaxPages: groups*(sparseGroupCharge+mttGroupSize) + sparseTableCharge})
	r := implicit(t, vm)
	pas := make([]PA, groups<<mttGroupShift)
	for i := range pas {
		pas[i] = PA(i * 3 << PageShift)
	}
	for round := range uint64(50) {
		first := round * groups / 2 << mttGroupShift // half of it is present
		if err := vm.SetPages(r.Handle(), first, pas); err != nil {
			t.Fatal(err)
		}
		for n := range uint64(groups) {
			if !look(r, first>>mttGroupShift+n) {
				t.Fatalf("round %d: group %d of the request is absent", round, n)
			}
		}
	}
	if err := vm.SetPages(r.Handle(), 0, append(pas, 0)); !errors.Is(err, ErrLimit) {
		t.Error("a request beyond the quota:", err)
	}
	checkAccount(t, vm)
}

// The guest frees a page when its CLEAR_MTT was answered. If its entry was reclaimed before, the answer still waits for
// the readers that found it (EP-3, TR-5), whether the reclaim began a release of its own or not.
func TestClearCoversReclaimedEntries(t *testing.T) {
	vm := NewVM(NewSpace(1), Limits{MaxPages: 4*sparseGroupCharge + sparseTableCharge})
	r := implicit(t, vm)
	ep := vm.Space().Epochs()
	gone := func() (out []uint64) {
		for n := range uint64(1000) {
			if run, t := r.stateLocked(n); run == 0 && t == nil {
				out = append(out, n)
			}
		}
		return out
	}
	next := uint64(0)
	for ; next < 4; next++ {
		setGroup(t, vm, r, next)
	}
	// Each reader finds a group that is reclaimed afterwards; the readers leave in any order.
	for round := range 200 {
		rng := rand.New(rand.NewPCG(uint64(round), 1))
		var toks []Token
		for slot := range 3 {
			toks = append(toks, ep.Enter(ByLoop(slot))) // may use every group that exists now
			for range 1 + rng.IntN(3) {
				setGroup(t, vm, r, next)
				next = (next + 1) % 1000
			}
		}
		absent := gone()
		d, err := vm.StartClear(r.Handle(), absent[rng.IntN(len(absent))]<<mttGroupShift, 1)
		if err != nil || d == nil {
			t.Fatalf("round %d: %v, %v", round, d, err)
		}
		for _, slot := range rng.Perm(3) {
			if d.Done() {
				t.Fatalf("round %d: answered while reader %d may use the page", round, slot)
			}
			ep.Leave(slot, toks[slot])
		}
		if !d.Done() {
			t.Fatalf("round %d: not answered without readers", round)
		}
	}
	for n := range uint64(1000) {
		if _, err := vm.StartClear(r.Handle(), n<<mttGroupShift, 1); err != nil {
			t.Fatal(err)
		}
	}
	if d, err := vm.StartClear(r.Handle(), 0, 1); d != nil || err != nil {
		t.Errorf("nothing is in use: %v, %v", d, err)
	}
}

// Random operations with a small quota, beside readers (with the race detector, too). A page is what the last SetPages
// made it, or absent; a released page, of which ClearPages has returned, is not used any more: its reader would find
// the mark of its next owner. Memory stays within the quota.
func TestReclaimModel(t *testing.T) {
	const regions, pages, frames = 3, 40 << mttGroupShift, 6000
	const quota = 12 * (sparseGroupCharge + mttGroupSize)
	vm := NewVM(NewSpace(1), Limits{MaxPages: quota})
	var rs [regions]*Region
	for i := range rs {
		rs[i] = implicit(t, vm)
	}
	// owner[f] is the page that frame f belongs to, +1; 0: free. A reader that translates a page checks the owner.
	var owner [frames]atomic.Uint64
	name := func(r int, p uint64) uint64 { return uint64(r)*pages + p + 1 }
	var stop atomic.Bool
	var found atomic.Uint64
	var readers sync.WaitGroup
	for slot := range 2 {
		readers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(slot), 21))
			for !stop.Load() {
				tok := vm.Space().Epochs().Enter(ByLoop(slot))
				for range 40 {
					r := rng.IntN(regions)
					p := rng.Uint64N(pages)
					if pa, _, ok := rs[r].toPA(p<<PageShift, 1, false); ok {
						found.Add(1)
						for range 2 { // until it leaves
							if o := owner[pa>>PageShift].Load(); o != name(r, p) {
								t.Errorf("page %d of region %d is in a frame of page %d", p, r, o)
								stop.Store(true)
							}
							runtime.Gosched()
						}
					}
				}
				vm.Space().Epochs().Leave(slot, tok)
				runtime.Gosched()
			}
		})
	}
	type page struct {
		r int
		p uint64
	}
	given := map[page]int{} // what the guest believes: the page is in that frame, and the device has it
	var free []int
	for f := range frames {
		free = append(free, f)
	}
	rng := rand.New(rand.NewPCG(5, 5))
	for range 4000 {
		if stop.Load() {
			break
		}
		r, first := rng.IntN(regions), rng.Uint64N(pages)
		n := min(1+rng.Uint64N(1<<rng.IntN(11)), pages-first)
		if rng.IntN(3) > 0 {
			n = min(1+rng.Uint64N(3), pages-first)
		}
		if rng.IntN(3) > 0 { // a fault: give pages, those given before in their frames
			var pas []PA
			for p := first; p < first+n; p++ {
				f, ok := given[page{r, p}]
				if !ok {
					if len(free) == 0 {
						break
					}
					f, free = free[len(free)-1], free[:len(free)-1]
					owner[f].Store(name(r, p))
					given[page{r, p}] = f
				}
				pas = append(pas, PA(f)<<PageShift)
			}
			if len(pas) == 0 {
				n = min(pages-first, 3<<mttGroupShift) // release some instead
			} else {
				if err := vm.SetPages(rs[r].Handle(), first, pas); err != nil {
					t.Fatal(err)
				}
				for i, pa := range pas {
					if got, _, ok := rs[r].toPA((first+uint64(i))<<PageShift, 1, false); !ok || got != pa {
						t.Fatalf("page %d of region %d: %v, %v, want %v", first+uint64(i), r, got, ok, pa)
					}
				}
				continue
			}
		}
		if err := vm.ClearPages(t.Context(), rs[r].Handle(), first, n); err != nil {
			t.Fatal(err)
		}
		for p := first; p < first+n; p++ {
			if f, ok := given[page{r, p}]; ok {
				owner[f].Store(0)
				free = append(free, f)
				delete(given, page{r, p})
			}
		}
		checkAccount(t, vm)
	}
	stop.Store(true)
	readers.Wait()
	if vm.Reclaimed() < 100 || found.Load() == 0 {
		t.Errorf("%d groups reclaimed, %d pages found by readers", vm.Reclaimed(), found.Load())
	}
	checkAccount(t, vm)
	if err := vm.DestroyAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkAccount(t, vm)
	if _, used := vm.Usage(); used != 0 {
		t.Errorf("%d words in use without regions", used)
	}
}

// A command removes at most as many groups as its own need takes, and passes a bounded number of others, however many
// there are and although all are in use.
func TestReclaimIsBounded(t *testing.T) {
	const groups = 20000
	vm := NewVM(NewSpace(1), Limits{MaxPages: groups*sparseGroupCharge + sparseTableCharge})
	r := implicit(t, vm)
	for n := range uint64(groups) {
		setGroup(t, vm, r, n)
	}
	marked := func() (sum int) {
		slots := r.sparse.table.Load().slots
		for i := range slots {
			if s := &slots[i]; s.existsLocked() && s.run.Load()&mttIdle != 0 {
				sum++
			}
		}
		return sum
	}
	before := marked()
	for n := range uint64(300) {
		gone, table := vm.Reclaimed(), r.sparse.table.Load()
		setGroup(t, vm, r, groups+n)
		if k := vm.Reclaimed() - gone; k != 1 {
			t.Fatalf("%d groups removed for one", k)
		}
		after := marked()
		if k := after - before; table == r.sparse.table.Load() && k > reclaimLook {
			t.Fatalf("the hand passed %d groups", k)
		}
		before = after
	}
}
