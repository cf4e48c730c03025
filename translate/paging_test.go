package translate

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// The sparse table against a map, with concurrent readers: pages that are always present are never missed, through
// growth, rebuilding and shrinking, and no page yields another's entry.
func TestSparseModel(t *testing.T) {
	const anchors = 40
	vm := NewVM(NewSpace(1), Limits{MaxPages: 1 << 24})
	r, err := vm.CreateRegion(RegionSpec{Flags: DemandPaging | Implicit, PageShift: 12, Length: MaxImplicit,
		NPages: MaxImplicit >> 12})
	if err != nil {
		t.Fatal(err)
	}
	// A page's PA contains its number (modulo the width), so any mix-up shows.
	paOf := func(p uint64) PA { return PA(p * 0x9e3779b97f4a7c15 >> 30 << PageShift & uint64(MaxPA-1)) }
	rng := rand.New(rand.NewPCG(3, 3))
	fixed := make([]uint64, anchors)
	for i := range fixed {
		if fixed[i] = rng.Uint64N(r.npages); i%4 == 1 {
			fixed[i] = fixed[i-1] + 1<<mttGroupShift // the next group
		}
		if err := vm.SetPages(r.Handle(), fixed[i], []PA{paOf(fixed[i])}); err != nil {
			t.Fatal(err)
		}
	}
	var stop atomic.Bool
	var readers sync.WaitGroup
	for g := range 2 {
		readers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 7))
			for !stop.Load() {
				tok := vm.Space().Epochs().Enter(ByLoop(g))
				for range 50 {
					p := fixed[rng.IntN(anchors)]
					if pa, _, ok := r.toPA(p<<PageShift, 1, true); !ok || pa != paOf(p) {
						t.Errorf("page %#x: %v, %v", p, pa, ok)
						stop.Store(true)
					}
					p = p&^mttGroupMask + rng.Uint64N(3<<mttGroupShift) // added and removed
					if pa, _, ok := r.toPA(p%r.npages<<PageShift, 1, true); ok && pa != paOf(p%r.npages) {
						t.Errorf("page %#x: %v", p, pa)
						stop.Store(true)
					}
				}
				vm.Space().Epochs().Leave(g, tok)
				runtime.Gosched()
			}
		})
	}
	model := map[uint64]bool{}
	isFixed := map[uint64]bool{}
	for _, p := range fixed {
		isFixed[p], model[p] = true, true
	}
	for step := range 6000 {
		if stop.Load() {
			break
		}
		p := fixed[rng.IntN(anchors)]&^mttGroupMask + rng.Uint64N(3<<mttGroupShift)
		if p %= r.npages; rng.IntN(2) == 0 {
			p = rng.Uint64N(r.npages)
		}
		shrink := step/1500%2 == 1 // grows, shrinks, grows, shrinks
		switch {
		case !shrink:
			if err := vm.SetPages(r.Handle(), p, []PA{paOf(p)}); err != nil {
				t.Fatal(err)
			}
			model[p] = true
		default:
			first, n := p, uint64(1)
			if rng.IntN(2) == 0 {
				n = min(rng.Uint64N(1<<44), r.npages-first)
			}
			for _, f := range fixed { // leave out the fixed pages
				if f >= first && f-first < n {
					n = f - first
				}
			}
			want := false
			for p := range model {
				if p >= first && p-first < n {
					want = true
					delete(model, p)
				}
			}
			gen := r.Generation()
			d, err := vm.StartClear(r.Handle(), first, n)
			if lost := r.Generation() != gen; err != nil || lost != want || lost && d == nil {
				t.Fatalf("clear %d from %#x: lost %v, %v; model says %v", n, first, lost, err, want)
			}
		}
		groups := map[uint64]bool{}
		if step%100 == 0 {
			for p := range model {
				groups[p>>mttGroupShift] = true
			}
			if r.sparse.live != len(groups) {
				t.Fatalf("%d groups exist, model has %d", r.sparse.live, len(groups))
			}
			checkAccount(t, vm)
		}
	}
	stop.Store(true)
	readers.Wait()
	for p := range model {
		if pa, _, ok := r.toPA(p<<PageShift, 1, true); !ok || pa != paOf(p) {
			t.Fatalf("page %#x is lost", p)
		}
	}
	// Clear everything in one command: it costs only the present pages, and frees all memory.
	if err := vm.ClearPages(t.Context(), r.Handle(), 0, r.npages); err != nil {
		t.Fatal(err)
	}
	table := r.sparse.table.Load()
	if _, used := vm.Usage(); used != sparseTableCharge || r.sparse.live != 0 || len(table.slots) > 64 {
		t.Errorf("%d pages charged, %d groups, %d slots left", used, r.sparse.live, len(table.slots))
	}
	checkAccount(t, vm)
}

// checkAccount compares the VM's account with the memory that its tables really have (HF-3): 8 bytes a page.
func checkAccount(t *testing.T, vm *VM) {
	t.Helper()
	vm.mu.Lock()
	defer vm.mu.Unlock()
	var account, words uint64
	groups, leaves, listed := 0, 0, 0
	for i := range vm.mpt {
		g := vm.mpt[i].Load()
		for k := 0; g != nil && k < len(g.region); k++ {
			r := g.region[k].Load()
			if r == nil {
				continue
			}
			account += r.chargeLocked()
			if !r.demand {
				continue
			}
			m, live := r.sparse, 0
			if m.table.Load() != noGroups {
				words += uint64(len(m.table.Load().slots)) * sparseSlotWords
			}
			for _, n := range m.numbersLocked() {
				live++
				if run, entries := r.stateLocked(n); entries != nil {
					leaves++
					words += mttGroupSize
				} else if run&mttAlone == 0 && m.r.npages-n<<mttGroupShift != 1 {
					t.Errorf("group %d has neither entries nor a page", n)
				}
			}
			if live != m.live {
				t.Errorf("%d groups, counted as %d", live, m.live)
			}
			if groups += live; live > 0 {
				if listed++; vm.demand.regions[m.place] != m {
					t.Error("a region is not in the reclaimer's list")
				}
			}
		}
	}
	if p := &vm.demand; p.groups != groups || p.leaves != leaves || len(p.regions) != listed {
		t.Errorf("reclaimer knows %d groups, %d with entries, in %d regions; there are %d, %d, %d", p.groups, p.leaves,
			len(p.regions), groups, leaves, listed)
	}
	if account > vm.pages || vm.pages > vm.lim.MaxPages { // keys for fast registration count, too
		t.Errorf("account %d of %d, regions have %d", vm.pages, vm.lim.MaxPages, account)
	}
	if words > account {
		t.Errorf("%d words charged, %d allocated", account, words)
	}
}

// An emptied group is reused for the next one, of any region, but not while a reader may still use it.
func TestSpareGroup(t *testing.T) {
	vm := NewVM(NewSpace(1), Limits{})
	var rs [2]*Region
	for i := range rs {
		var err error
		if rs[i], err = vm.CreateRegion(RegionSpec{Flags: DemandPaging, PageShift: 12, Length: 1 << 30,
			NPages: 1 << 18}); err != nil {
			t.Fatal(err)
		}
	}
	set := func(r *Region, page uint64) *mttEntries {
		t.Helper()
		if err := vm.SetPages(r.Handle(), page, []PA{0x5000, 0x9000}); err != nil { // one page needs no entries
			t.Fatal(err)
		}
		e := r.sparse.find(page >> mttGroupShift).entries.Load()
		for k := range e {
			if w := e[k].Load(); (w != 0) != (uint64(k)-page&mttGroupMask < 2) {
				t.Fatalf("page %d: entry %d is %#x", page, k, w)
			}
		}
		return e
	}
	clear := func(r *Region, page uint64) *Drain {
		t.Helper()
		d, err := vm.StartClear(r.Handle(), page, 2)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	first := set(rs[0], 7)
	clear(rs[0], 7)
	if set(rs[1], 5000) != first {
		t.Error("new memory, although the emptied group has no reader")
	}
	ep := vm.space.Epochs()
	in := ep.Enter(ByLoop(3))
	d := clear(rs[1], 5000)
	second := set(rs[1], 9000)
	if second == first {
		t.Error("a group is reused while it may have a reader")
	}
	ep.Leave(3, in)
	if !d.Done() {
		t.Error("the reader has left")
	}
	if set(rs[0], 1) != first {
		t.Error("new memory, although the reader has left")
	}
	if set(rs[0], 1000) == first {
		t.Error("one group in two places")
	}
}

// An entry that a reader found stays valid: a slot of the table never changes its group, and a group's run survives
// the move to a larger table.
func TestSparseSlotsKeepTheirGroup(t *testing.T) {
	vm := NewVM(NewSpace(1), Limits{})
	r, err := vm.CreateRegion(RegionSpec{Flags: DemandPaging, PageShift: 12, Length: 1 << 50, NPages: 1 << 38})
	if err != nil {
		t.Fatal(err)
	}
	run := make([]PA, mttGroupSize)
	for i := range run {
		run[i] = PA(i) << PageShift
	}
	if err := vm.SetPages(r.Handle(), 0, run); err != nil {
		t.Fatal(err)
	}
	for n := uint64(1); n < 500; n++ {
		pages := 1 + n%4/2 // without entries, and with
		if err := vm.SetPages(r.Handle(), n<<mttGroupShift, []PA{0, 2 << PageShift}[:pages]); err != nil {
			t.Fatal(err)
		}
		g, table := r.sparse.find(n), r.sparse.table.Load()
		if n%2 == 0 {
			if err := vm.ClearPages(t.Context(), r.Handle(), n<<mttGroupShift, pages); err != nil {
				t.Fatal(err)
			}
		}
		for k := range uint64(40) {
			at := (1000*n + k) << mttGroupShift
			if err := vm.SetPages(r.Handle(), at, run[5:6]); err != nil {
				t.Fatal(err)
			}
			first := uint64(0)
			if e := g.entries.Load(); e != nil {
				first = e[0].Load()
			} else if w := g.run.Load(); w != 0 {
				first = alone(w, 0)
			}
			if want := n % 2 * mttPresent; first != want || (g.entries.Load() != nil) != (n%2 != 0 && pages > 1) {
				t.Fatalf("group %d became another, table moved: %v", n, table != r.sparse.table.Load())
			}
			if err := vm.ClearPages(t.Context(), r.Handle(), at, 1); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, pages := r.page(1); pages != mttGroupSize-1 {
		t.Errorf("%d pages are known to be contiguous", pages)
	}
}

// A guest that touches scattered pages of 2^57 bytes gets tables up to its quota, and then its least recently used
// groups are reclaimed (HF-3). No hash multiplier makes searches long.
func TestSparseBounded(t *testing.T) {
	const groups = 1000
	vm := NewVM(NewSpace(1), Limits{MaxPages: groups*sparseGroupCharge + 2*sparseTableCharge})
	r, err := vm.CreateRegion(RegionSpec{Flags: DemandPaging | Implicit, PageShift: 12, Length: MaxImplicit,
		NPages: MaxImplicit >> 12})
	if err != nil {
		t.Fatal(err)
	}
	other, err := vm.CreateRegion(RegionSpec{Flags: DemandPaging, PageShift: 12, Length: 1 << 50, NPages: 1 << 38})
	if err != nil {
		t.Fatal(err)
	}
	for _, stride := range []uint64{512, 1 << 20, 0x1003 << 9, 1 << 32} {
		present := func(i uint64) bool {
			run, entries := r.stateLocked(i * stride >> mttGroupShift)
			return run != 0 || entries != nil
		}
		made := vm.Reclaimed()
		for i := range uint64(3 * groups) {
			if err = vm.SetPages(r.Handle(), i*stride, []PA{0}); err != nil {
				t.Fatal(i, err)
			}
			if !present(i) {
				t.Fatalf("stride %#x: page %d is absent although its command succeeded", stride, i)
			}
		}
		if n := vm.Reclaimed() - made; n < 2*groups-2 || n > 2*groups || r.sparse.live < groups {
			t.Errorf("stride %#x: %d groups reclaimed, %d exist", stride, n, r.sparse.live)
		}
		if err := vm.SetPages(other.Handle(), 5, []PA{0}); err != nil || other.sparse.live != 1 {
			t.Error("another region got no room:", err)
		}
		if err := vm.SetPages(other.Handle(), 5, []PA{1, 1}); err != nil {
			t.Error("absent pages must cost nothing:", err)
		}
		if n := len(r.sparse.table.Load().slots); n > 16*groups {
			t.Errorf("%d slots for %d groups", n, groups)
		}
		// Churn at the limit: marks of removed groups must not fill the table.
		for i := range uint64(3 * groups) {
			if _, err := vm.StartClear(r.Handle(), i*stride, 512); err != nil {
				t.Fatal(i, err)
			}
			if err := vm.SetPages(r.Handle(), (i+groups)*stride, []PA{0}); err != nil {
				t.Fatal(i, err)
			}
		}
		if n := len(r.sparse.table.Load().slots); n > 16*groups {
			t.Errorf("%d slots for %d groups after churn", n, groups)
		}
		checkAccount(t, vm)
		if err := vm.ClearPages(t.Context(), r.Handle(), 0, r.npages); err != nil {
			t.Fatal(err)
		}
	}
}

// Granules come and go beside permanent memory: the permanent memory is never missed, and guest memory is never
// BadAddress in any state of the leaf.
func TestGranulesBesideReaders(t *testing.T) {
	const size, granule = 4 * leafSize, 64 << 10
	host := hostMem(t, size)
	s := NewSpace(1)
	if err := s.Reserve(0, size); err != nil {
		t.Fatal(err)
	}
	mustMap(t, s, 3*granule, host[3*granule:4*granule]) // in the first leaf, permanent
	var stop atomic.Bool
	var readers sync.WaitGroup
	for g := range 2 {
		readers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 8))
			for !stop.Load() {
				for range 100 {
					off := rng.Uint64N(size)
					h, _, kind := s.find(PA(off))
					if kind == None && h != addrOf(host)+hostAddr(off) || kind != None && (kind != HostFault || off/granule == 3) {
						t.Errorf("offset %#x: host %#x, %v", off, h, kind)
						stop.Store(true)
						return
					}
				}
				runtime.Gosched()
			}
		})
	}
	rng := rand.New(rand.NewPCG(1, 9))
	var present [size / granule]bool
	present[3] = true
	set := func(g int, on bool) {
		if g == 3 || present[g] == on {
			return
		}
		var err error
		if present[g] = on; on {
			err = s.Map(PA(g*granule), host[g*granule:(g+1)*granule])
		} else {
			err = s.Withdraw(PA(g*granule), granule)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	const perLeaf = leafSize / granule
	for range 300 {
		leaf := rng.IntN(size/leafSize) * perLeaf
		for _, g := range rng.Perm(perLeaf) { // fill it: contiguous, so it becomes a leaf
			set(leaf+g, true)
		}
		if _, run := s.leaf(PA(leaf * granule)); run != leafSize {
			t.Fatal("a full leaf is not summarised")
		}
		switch rng.IntN(3) {
		case 0: // granule by granule
			for _, g := range rng.Perm(perLeaf)[:1+rng.IntN(perLeaf)] {
				set(leaf+g, false)
			}
		case 1: // all at once, both ways
			if leaf != 0 {
				if err := s.Withdraw(PA(leaf*granule), leafSize); err != nil {
					t.Fatal(err)
				}
				mustMap(t, s, PA(leaf*granule), host[leaf*granule:][:leafSize])
			}
		}
	}
	stop.Store(true)
	readers.Wait()
	if err := s.Unmap(0, size); err != nil {
		t.Fatal(err)
	}
	if n := len(s.table.Load().dirs); n != 0 {
		t.Errorf("%d dirs left without memory", n)
	}
}

// The first granule that is published in 2 MiB replaces "all reserved" by a table: no reader sees "no memory" in
// between.
func TestFirstGranuleBesideReaders(t *testing.T) {
	const leaves = 500
	mem := hostMem(t, PageSize)
	for round := range 5 {
		s := NewSpace(1)
		if err := s.Reserve(0, leaves*leafSize); err != nil {
			t.Fatal(err)
		}
		var at atomic.Uint64
		var readers sync.WaitGroup
		for range 2 {
			readers.Go(func() {
				for i := uint64(0); i < leaves; i = at.Load() {
					for range 20 {
						if _, _, kind := s.find(PA(i*leafSize + leafSize/2)); kind != HostFault {
							t.Errorf("leaf %d: %v", i, kind)
							return
						}
					}
					runtime.Gosched()
				}
			})
		}
		for i := range uint64(leaves) {
			at.Store(i)
			if i%4 == uint64(round%4) {
				runtime.Gosched()
			}
			mustMap(t, s, PA(i*leafSize), mem)
		}
		at.Store(leaves)
		readers.Wait()
	}
}

// Slots at ever new addresses leave no tables behind.
func TestUnmapReturnsTables(t *testing.T) {
	s := NewSpace(1)
	mem := hostMem(t, 16*PageSize)
	mustMap(t, s, 5<<32, mem)
	for i := range 300 {
		pa := PA(i%20)<<34 + PA(i)<<leafShift - PageSize
		if i%20 == 0 {
			pa += PageSize
		}
		mustMap(t, s, pa, mem)
		if err := s.Unmap(pa+4*PageSize, 4*PageSize); err != nil {
			t.Fatal(err)
		}
		if err := s.Unmap(pa, 4*PageSize); err != nil {
			t.Fatal(err)
		}
		if err := s.Unmap(pa+8*PageSize, 8*PageSize); err != nil {
			t.Fatal(err)
		}
	}
	d := s.table.Load().dirs
	if len(d) != 6 || d[5].small[0].Load() == nil {
		t.Fatalf("%d dirs", len(d))
	}
	for i, d := range d[:5] {
		if d != noDir {
			t.Errorf("dir %d is left", i)
		}
	}
}

// Paging at both levels: loops write and check words through a region whose pages come at faults and are withdrawn all
// the time, by the guest's driver (clear, drain) and by the host's (withdraw, drain, then the memory is made
// inaccessible: a use after the drain is a SIGSEGV). Every access ends, no byte is lost, no fault is lost (PF-7, PF-14,
// EP-3).
func TestPagingBothLevels(t *testing.T) {
	const pages, budget, perLoop = 64, 20, 3000
	const region = VA(0x7f1234560000)
	host := hostMem(t, pages<<PageShift)
	s := NewSpace(1)
	if err := s.Reserve(0, pages<<PageShift); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mprotect(host, unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	vm := NewVM(s, Limits{})
	r, err := vm.CreateRegion(RegionSpec{PD: 1, Access: LocalWrite, Flags: DemandPaging | Implicit, PageShift: 12,
		Length: MaxImplicit, NPages: MaxImplicit >> 12})
	if err != nil {
		t.Fatal(err)
	}
	var guest FaultQueue
	ctx, cancel := context.WithCancel(t.Context())
	var servers, loops sync.WaitGroup

	var mu sync.Mutex // for the drivers
	resident, order := [pages]bool{}, []int{}
	protect := func(p, prot int) {
		if err := unix.Mprotect(host[p<<PageShift:(p+1)<<PageShift], prot); err != nil {
			t.Error(err)
		}
	}
	evict := func() {
		p := order[0]
		order = order[1:]
		resident[p] = false
		if err := s.Withdraw(PA(p<<PageShift), PageSize); err != nil {
			t.Error(err)
		}
		if err := s.Epochs().Flip().Wait(ctx); err != nil {
			t.Error(err)
		}
		protect(p, unix.PROT_NONE)
	}
	for range 2 { // the host driver serves on two goroutines
		servers.Go(func() {
			for {
				f, err := s.Faults().Next(ctx)
				if err != nil {
					return
				}
				mu.Lock()
				for n := uint64(0); n < f.Miss.Len+uint64(f.Miss.PA)&pageMask; n += PageSize {
					p := int((uint64(f.Miss.PA) + n) >> PageShift)
					if resident[p] {
						continue
					}
					if len(order) == budget {
						evict()
					}
					protect(p, unix.PROT_READ|unix.PROT_WRITE)
					mustMap(t, s, PA(p<<PageShift), host[p<<PageShift:(p+1)<<PageShift])
					resident[p], order = true, append(order, p)
				}
				mu.Unlock()
				s.Faults().Finish(f, nil)
			}
		})
	}
	page := func(p uint64) uint64 { return uint64(region)>>PageShift + p }
	servers.Go(func() { // the guest's driver: pages are read-only first, if that suffices
		for {
			f, err := guest.Next(ctx)
			if err != nil {
				return
			}
			for at := f.Miss.VA &^ pageMask; at < f.Miss.VA+VA(f.Miss.Len); at += PageSize {
				pa := PA(at-region) * 7 % (pages << PageShift) // not contiguous
				if !f.Write {
					pa |= readOnlyPA
				}
				if err := vm.SetPages(r.Handle(), uint64(at)>>PageShift, []PA{pa}); err != nil {
					t.Error(err)
				}
			}
			guest.Finish(f, nil)
		}
	})
	servers.Go(func() { // and its notifier
		rng := rand.New(rand.NewPCG(1, 1))
		for ctx.Err() == nil {
			if err := vm.ClearPages(ctx, r.Handle(), page(rng.Uint64N(pages)), 1+rng.Uint64N(4)); err != nil &&
				ctx.Err() == nil {
				t.Error(err)
			}
			runtime.Gosched()
		}
	})
	const nloops = 3
	for loop := range nloops {
		loops.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(loop), 6))
			model := map[VA]uint64{} // this loop's own words
			done := make(chan error, 1)
			var f Fault
			f.Done = func(_ *Fault, err error) { done <- err }
			access := func(write bool, try func() Miss) {
				for {
					tok := s.Epochs().Enter(ByLoop(loop))
					m := try()
					s.Epochs().Leave(loop, tok)
					if m.OK() {
						return
					}
					f.Miss, f.Write = m, write
					q := s.Faults()
					if m.Kind == GuestFault {
						q = &guest
					} else if m.Kind != HostFault {
						t.Error(m.Err())
						return
					}
					if !q.Raise(&f) {
						t.Error("waits already")
					}
					if err := <-done; err != nil {
						t.Error(err)
					}
				}
			}
			for range perLoop {
				va := region + VA(rng.IntN(pages<<PageShift/(16*nloops)-1)*16*nloops+16*loop)
				var b [16]byte
				if rng.IntN(2) == 0 {
					access(false, func() Miss { return vm.Read(b[:], r.LKey(), 1, va, 0) })
					if got := binary.NativeEndian.Uint64(b[:]); got != model[va] {
						t.Errorf("%v: %#x, wrote %#x", va, got, model[va])
						return
					}
					continue
				}
				model[va] = rng.Uint64()
				binary.NativeEndian.PutUint64(b[:], model[va])
				access(true, func() Miss { return vm.Write(r.LKey(), 1, va, b[:], LocalWrite) })
			}
		})
	}
	loops.Wait()
	cancel()
	servers.Wait()
	for _, q := range []*FaultQueue{s.Faults(), &guest} {
		if st := q.Stats(); st.Waiting != 0 || st.Raised < 100 || st.Failed != 0 {
			t.Errorf("%+v", st)
		}
	}
	if st := s.Epochs().Stats(); st.Drains < 100 || st.Longest <= 0 {
		t.Errorf("%+v", st)
	}
}
