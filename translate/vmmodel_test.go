package translate

import (
	"encoding/binary"
	"errors"
	"maps"
	"math/rand/v2"
	"testing"
)

// naiveRegion is stage one as plain fields and a map.
type naiveRegion struct {
	spec  RegionSpec
	r     *Region
	pages map[uint64]PA // with readOnlyPA
	// Of a demand region: the groups that have had several present pages since they were empty, and whether any page was
	// ever present.
	leaves map[uint64]bool
	used   bool
}

// pa translates one byte.
func (n *naiveRegion) pa(va VA, write bool) (PA, bool) {
	if n.spec.Flags&Phys != 0 {
		return PA(va), true
	}
	off := uint64(va-n.spec.IOVA) + n.spec.Offset
	pa, ok := n.pages[off>>n.spec.PageShift]
	if pa&readOnlyPA != 0 {
		ok, pa = !write, pa-readOnlyPA
	}
	return pa + PA(off&(1<<n.spec.PageShift-1)), ok
}

// charge is the region's share of the quota (HF-3): its pages, or with demand paging the memory of its table.
func (n *naiveRegion) charge() (sum uint64) {
	if n.spec.Flags&DemandPaging == 0 {
		return n.spec.NPages
	}
	if n.used {
		sum = sparseTableCharge
	}
	for g := range n.groups() {
		sum += n.groupCharge(g)
	}
	return sum
}

func (n *naiveRegion) groupCharge(g uint64) uint64 {
	if n.leaves[g] {
		return sparseGroupCharge + mttGroupSize
	}
	return sparseGroupCharge
}

// groups are those of a demand region that have a present page.
func (n *naiveRegion) groups() map[uint64]bool {
	groups := map[uint64]bool{}
	for p := range n.pages {
		groups[p/512] = true
	}
	return groups
}

// set stores pas and reports whether a present page was changed or removed.
func (n *naiveRegion) set(first uint64, pas []PA) (lost bool) {
	for i, pa := range pas {
		old, had := n.pages[first+uint64(i)]
		lost = lost || had && old != pa && old != pa|readOnlyPA
		if n.pages[first+uint64(i)] = pa; pa&1 != 0 {
			delete(n.pages, first+uint64(i))
		}
	}
	n.settle()
	return lost
}

// settle follows a change of pages.
func (n *naiveRegion) settle() {
	if n.spec.Flags&DemandPaging == 0 {
		return
	}
	n.used = n.used || len(n.pages) > 0
	count := map[uint64]int{}
	for p := range n.pages {
		count[p/512]++
	}
	for g, k := range count {
		if k > 1 {
			n.leaves[g] = true
		}
	}
	for g := range n.leaves {
		if count[g] == 0 {
			delete(n.leaves, g)
		}
	}
}

// reclaim removes the groups that the table has lost from the model, and returns how many. Those of keep must be there.
func (n *naiveRegion) reclaim(t *testing.T, keep groupRange) (lost int) {
	t.Helper()
	if n.spec.Flags&DemandPaging == 0 {
		return 0
	}
	for g := range n.groups() {
		if run, entries := n.r.stateLocked(g); run != 0 || entries != nil {
			continue
		}
		if keep.contains(n.r, g) {
			t.Fatalf("group %d was reclaimed for its own pages", g)
		}
		lost++
		for p := range n.pages {
			if p/512 == g {
				delete(n.pages, p)
			}
		}
	}
	n.settle()
	return lost
}

// expect returns the required result of an access of n bytes: the first miss, in steps to 4 KiB boundaries.
func expect(regions map[Key]*naiveRegion, s naiveSpace, key Key, pd PD, va VA, n uint64, need Access) (kind MissKind,
	at VA) {
	reg := regions[key]
	switch {
	case reg == nil:
		return BadKey, va
	case reg.spec.PD != pd:
		return BadPD, va
	case reg.spec.Access&need != need:
		return BadAccess, va
	case va < reg.spec.IOVA || uint64(va-reg.spec.IOVA) > reg.spec.Length || n > reg.spec.Length-uint64(va-reg.spec.IOVA):
		return OutOfRange, va
	}
	for o := uint64(0); o < n; {
		pa, ok := reg.pa(va+VA(o), need.Writes())
		if !ok {
			return GuestFault, va + VA(o)
		}
		if _, kind := s.at(pa); kind != None {
			return kind, va + VA(o)
		}
		o += PageSize - uint64(pa)&pageMask
	}
	return None, 0
}

func TestVMModel(t *testing.T) {
	const pages = 4096 // of guest memory from 4 GiB on
	const base = PA(1 << 32)
	host := hostMem(t, pages*PageSize)
	rng := rand.New(rand.NewPCG(9, 9))
	rights := []Access{0, LocalWrite, LocalWrite | RemoteWrite, LocalWrite | RemoteRead | RemoteAtomic, RemoteRead,
		LocalWrite | RemoteWrite | RemoteRead | RemoteAtomic}
	for round := range 2 {
		s, ms := NewSpace(1), naiveSpace{}
		for first := uint64(0); first < pages; { // parts, with reserved and missing ones between
			n := min(uint64(1+rng.IntN(900)), pages-first)
			pa, piece := base+PA(first<<PageShift), host[first<<PageShift:(first+n)<<PageShift]
			kind := rng.IntN(8)
			if kind == 0 {
				if err := s.Reserve(pa, n<<PageShift); err != nil {
					t.Fatal(err)
				}
			} else if kind > 1 {
				mustMap(t, s, pa, piece)
			}
			for i := range n {
				switch {
				case kind == 0:
					ms[pa+PA(i<<PageShift)] = 0
				case kind > 1:
					ms[pa+PA(i<<PageShift)] = addrOf(piece) + hostAddr(i<<PageShift)
				}
			}
			first += n
		}
		vm := NewVM(s, Limits{MaxRegions: 20, MaxPages: 20000})
		model := map[Key]*naiveRegion{}
		var dead []Key
		pick := func() *naiveRegion {
			i := rng.IntN(max(len(model), 1))
			for _, r := range model {
				if i--; i < 0 {
					return r
				}
			}
			return nil
		}
		usage := func() (n uint64) {
			for _, r := range model {
				n += r.charge()
			}
			return n
		}
		// reclaimed brings the model up to date after a command that may have reclaimed groups, and returns those of r.
		before := uint64(0)
		reclaimed := func(r *naiveRegion, keep groupRange) (own int) {
			all := 0
			for _, x := range model {
				k := x.reclaim(t, keep)
				if all += k; x == r {
					own = k
				}
			}
			if before += uint64(all); before != vm.Reclaimed() {
				t.Fatalf("%d groups are gone, %d were reclaimed", before, vm.Reclaimed())
			}
			return own
		}
		// least is the usage if all groups but those of keep were reclaimed.
		least := func(keep groupRange) (n uint64) {
			for _, x := range model {
				n += x.charge()
				for g := range x.groups() {
					if x.spec.Flags&DemandPaging != 0 && !keep.contains(x.r, g) {
						n -= x.groupCharge(g)
					}
				}
			}
			return n
		}
		for range 350 {
			switch r := pick(); rng.IntN(6) {
			case 0:
				sp := RegionSpec{PD: PD(rng.IntN(3)), Access: rights[rng.IntN(len(rights))],
					PageShift: uint8(12 + max(0, rng.IntN(20)-10)), IOVA: VA(rng.Uint64() >> rng.IntN(20)),
					Length: 1 + rng.Uint64N(8<<20)}
				switch rng.IntN(8) {
				case 0:
					sp = RegionSpec{PD: sp.PD, Access: sp.Access, Flags: Phys, IOVA: VA(base) - VA(rng.IntN(4096)), Length: sp.Length}
				case 1:
					sp.Flags, sp.IOVA, sp.PageShift = DemandPaging|Implicit, 0, 12
					sp.Length = MaxImplicit >> rng.IntN(30)
					sp.NPages = sp.Length >> 12
				default:
					if rng.IntN(2) == 0 {
						sp.Flags = DemandPaging
						sp.Length <<= rng.IntN(20)
					}
					sp.Offset = rng.Uint64N(1 << sp.PageShift)
					sp.NPages = (sp.Offset+sp.Length-1)>>sp.PageShift + 1 + uint64(rng.IntN(2))
				}
				reg, err := vm.CreateRegion(sp)
				reclaimed(nil, groupRange{})
				if err != nil {
					_, fits := sp.IOVA.Add(sp.Length - 1)
					if fits && !errors.Is(err, ErrLimit) || !fits && !errors.Is(err, ErrInvalid) {
						t.Fatal(err)
					}
					if fits && len(model) < 20 && sp.NPages+least(groupRange{}) <= vm.lim.MaxPages {
						t.Fatalf("%d pages refused beside %d: %v", sp.NPages, least(groupRange{}), err)
					}
					break
				}
				if model[reg.LKey()] != nil {
					t.Fatal("key given twice")
				}
				model[reg.LKey()] = &naiveRegion{spec: sp, r: reg, pages: map[uint64]PA{}, leaves: map[uint64]bool{}}
			case 1:
				if r == nil || rng.IntN(3) > 0 {
					break
				}
				if err := vm.DestroyRegion(t.Context(), r.r.Handle()); err != nil {
					t.Fatal(err)
				}
				delete(model, r.r.LKey())
				dead = append(dead, r.r.LKey())
			case 2, 3:
				if r == nil || r.spec.NPages == 0 {
					break
				}
				first := rng.Uint64N(r.spec.NPages)
				n := 1 + rng.Uint64N(min(r.spec.NPages-first, 5000))
				if rng.IntN(2) == 0 {
					first, n = 0, min(r.spec.NPages, 5000)
				}
				pas := make([]PA, n)
				at := base + PA(rng.IntN(pages))<<PageShift
				run := rng.IntN(3) > 0
				for i := range pas {
					if pas[i] = at; !run {
						pas[i] = base + PA(rng.IntN(pages+2))<<PageShift
						if rng.IntN(5) == 0 {
							pas[i] |= 1
						}
					}
					pas[i] &^= 1<<r.spec.PageShift - 2
					if r.spec.Flags&DemandPaging != 0 && (i/100)%3 == 1 {
						pas[i] |= readOnlyPA
					}
					at += 1 << r.spec.PageShift
				}
				gen, lost := r.r.Generation(), false
				err := vm.SetPages(r.r.Handle(), first, pas)
				keep := groupRange{r.r, first / 512, (first + n) / 512}
				own := reclaimed(r, keep)
				if err != nil {
					after := naiveRegion{spec: r.spec, pages: maps.Clone(r.pages), leaves: maps.Clone(r.leaves), used: r.used}
					after.set(first, pas)
					need := least(keep)
					if after.used && !r.used {
						need += sparseTableCharge
					}
					had := r.groups()
					for g := range after.groups() {
						switch {
						case !keep.contains(r.r, g):
						case had[g]:
							need += after.groupCharge(g) - r.groupCharge(g)
						default:
							need += after.groupCharge(g)
						}
					}
					if !errors.Is(err, ErrLimit) || need <= vm.lim.MaxPages {
						t.Fatalf("need %d of %d: %v", need, vm.lim.MaxPages, err)
					}
					if own > 0 != (r.r.Generation() != gen) {
						t.Fatal("the generation did not change")
					}
					break
				}
				lost = own > 0
				lost = r.set(first, pas) || lost
				if lost != (r.r.Generation() != gen) {
					t.Fatal("the generation did not change")
				}
			case 4:
				if r == nil || r.spec.NPages == 0 {
					break
				}
				first := rng.Uint64N(r.spec.NPages)
				n := min(rng.Uint64N(r.spec.NPages-first+1), rng.Uint64N(700))
				if rng.IntN(4) == 0 {
					first = rng.Uint64N(min(r.spec.NPages, 1500))
					n = rng.Uint64N(r.spec.NPages - first)
				}
				gen, lost := r.r.Generation(), false
				if err := vm.ClearPages(t.Context(), r.r.Handle(), first, n); err != nil {
					t.Fatal(err)
				}
				for p := range r.pages {
					if p >= first && p-first < n {
						lost = true
						delete(r.pages, p)
					}
				}
				r.settle()
				if lost != (r.r.Generation() != gen) {
					t.Fatal("the generation did not change")
				}
			}
			for range 20 { // accesses
				r := pick()
				if r == nil {
					break
				}
				key, pd, need := r.r.LKey(), r.spec.PD, []Access{0, LocalWrite, RemoteRead, RemoteWrite}[rng.IntN(4)]
				va, n := r.spec.IOVA+VA(rng.Uint64N(r.spec.Length)), 1+rng.Uint64N(20000)
				for p := range r.pages { // most often at present pages
					if at := p<<r.spec.PageShift + rng.Uint64N(1<<r.spec.PageShift) - r.spec.Offset; at < r.spec.Length &&
						rng.IntN(4) > 0 {
						va = r.spec.IOVA + VA(at)
					}
					break
				}
				switch rng.IntN(12) {
				case 0:
					pd++
				case 1:
					key ^= 1 << rng.IntN(32)
				case 2:
					if len(dead) > 0 {
						key = dead[rng.IntN(len(dead))]
					}
				case 3:
					va = VA(rng.Uint64())
				case 4:
					n = rng.Uint64()>>rng.IntN(64) | 1
				case 5:
					n = ^uint64(0) - uint64(rng.IntN(3))
				}
				checkAccess(t, vm, model, ms, key, pd, va, n, need)
			}
		}
		regions, used := vm.Usage()
		want := usage()
		if regions != len(model) || used != want {
			t.Fatalf("round %d: usage %d, %d; model %d, %d", round, regions, used, len(model), want)
		}
		if err := vm.DestroyAll(t.Context()); err != nil {
			t.Fatal(err)
		}
		for key, r := range model {
			if m := vm.Check(key, r.spec.PD, r.spec.IOVA, 0, 0); m.Kind != BadKey {
				t.Fatal(m)
			}
		}
		if regions, used := vm.Usage(); regions != 0 || used != 0 {
			t.Fatal(regions, used)
		}
	}
}

// checkAccess compares every way of access with the model.
func checkAccess(t *testing.T, vm *VM, model map[Key]*naiveRegion, ms naiveSpace, key Key, pd PD, va VA, n uint64,
	need Access) {
	t.Helper()
	// Large lengths test keys and ranges; only small ones are copied.
	kind, at := expect(model, ms, key, pd, va, n, need)
	checkKind := kind
	if kind == GuestFault || kind == HostFault || kind == BadAddress {
		checkKind = None
	}
	if m := vm.Check(key, pd, va, n, need); m.Kind != checkKind {
		t.Fatalf("check %#x %v %d: %v, model says %v", key, va, n, m.Kind, checkKind)
	}
	b, m := vm.Resolve(key, pd, va, n, need)
	if at != va && m.Kind != None || at == va && m.Kind != kind {
		t.Fatalf("resolve %#x %v %d: %v, model says %v at %v", key, va, n, m.Kind, kind, at)
	}
	if m.OK() {
		if len(b) == 0 || uint64(len(b)) > n {
			t.Fatalf("resolve: %d of %d bytes", len(b), n)
		}
		for o := 0; ; o = min(o+PageSize, len(b)-1) {
			pa, ok := model[key].pa(va+VA(o), need.Writes())
			h, kind := ms.at(pa)
			if !ok || kind != None || h != addrOf(b)+hostAddr(o) {
				t.Fatalf("resolve: byte %d of %d is wrong", o, len(b))
			}
			if o == len(b)-1 {
				break
			}
		}
	}
	if n > 1<<20 {
		return
	}
	src := make([]byte, n)
	for i := range src {
		src[i] = byte(va) + byte(i)
	}
	wneed, wkind, wat := need, kind, at
	if !need.Writes() {
		wneed |= LocalWrite
		wkind, wat = expect(model, ms, key, pd, va, n, wneed)
	}
	m = vm.Write(key, pd, va, src, need)
	if m.Kind != wkind || wkind != None && (m.VA != wat || m.Key != key) {
		t.Fatalf("write %#x %v %d: %+v, model says %v at %v", key, va, n, m, wkind, wat)
	}
	if left := n - uint64(wat-va); wkind != None && m.Len != left &&
		!(m.Len > 0 && m.Len < left && (wkind == HostFault || wkind == BadAddress)) {
		t.Fatalf("write %#x %v %d: %+v wants %d bytes, model says %d", key, va, n, m, m.Len, left)
	}
	dst := make([]byte, n)
	m = vm.Read(dst, key, pd, va, need)
	if m.Kind != kind || kind != None && m.VA != at {
		t.Fatalf("read: %+v, model says %v at %v", m, kind, at)
	}
	if wkind == None { // the write is at the model's address
		for _, o := range []uint64{0, n / 2, n - 1} {
			pa, _ := model[key].pa(va+VA(o), true)
			var one [1]byte
			if m := vm.space.Read(one[:], pa); !m.OK() || one[0] != dst[o] {
				t.Fatalf("byte %d is not at %v", o, pa)
			}
		}
	}
	kind, _ = expect(model, ms, key, pd, va, 8, need)
	if pa, ok := PA(0), false; kind == None {
		if pa, ok = model[key].pa(va, need.Writes()); !ok || pa%8 != 0 {
			kind = BadAddress
		}
	}
	w, m := vm.Uint64(key, pd, va, need)
	// A word that is misaligned and also absent further on may give either miss.
	if m.Kind != kind && !(m.Kind == BadAddress && kind != BadKey) {
		t.Fatalf("word at %v: %v, model says %v", va, m.Kind, kind)
	}
	if m.OK() {
		var eight [8]byte
		vm.Read(eight[:], key, pd, va, need)
		if w.Load() != binary.NativeEndian.Uint64(eight[:]) {
			t.Fatal("word differs")
		}
	}
}
