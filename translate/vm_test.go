package translate

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"
)

func TestTwoStages(t *testing.T) {
	s := NewSpace(7)
	mem := hostMem(t, 4<<20)
	mustMap(t, s, 0x100000, mem)
	vm := NewVM(s, Limits{})
	const va = VA(0x7f0000000123)
	r, err := vm.CreateRegion(RegionSpec{PD: 3, Access: LocalWrite | RemoteWrite | RemoteRead, PageShift: 12, IOVA: va,
		Length: 8192, Offset: 0x123, NPages: 3})
	if err != nil {
		t.Fatal(err)
	}
	if m := vm.Write(r.RKey(), 3, va, []byte("x"), RemoteWrite); m.Kind != GuestFault || m.VA != va || m.Key != r.RKey() {
		t.Fatalf("absent page: %+v", m)
	}
	if err := vm.SetPages(r.Handle(), 0, []PA{0x105000, 0x102000, 0x103000}); err != nil {
		t.Fatal(err)
	}
	src := bytes.Repeat([]byte("0123456789abcdef"), 512)
	if m := vm.Write(r.RKey(), 3, va, src, RemoteWrite); !m.OK() {
		t.Fatal(m.Err())
	}
	dst := make([]byte, len(src))
	if m := vm.Read(dst, r.LKey(), 3, va, 0); !m.OK() || !bytes.Equal(src, dst) {
		t.Fatal("read back", m.Err())
	}
	if !bytes.Equal(mem[0x5123:0x6000], src[:0xedd]) || !bytes.Equal(mem[0x2000:0x3123], src[0xedd:]) {
		t.Fatal("bytes are not in the pages of the tables")
	}
	if err := vm.DestroyRegion(context.Background(), r.Handle()); err != nil {
		t.Fatal(err)
	}
	if m := vm.Check(r.RKey(), 3, va, 1, 0); m.Kind != BadKey {
		t.Fatalf("revoked key: %v", m.Err())
	}
}

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

func TestCreateRegionRefuses(t *testing.T) {
	good := RegionSpec{Access: LocalWrite, PageShift: 12, IOVA: 0x1000, Length: 8192, NPages: 2}
	for name, f := range map[string]func(*RegionSpec){
		"no length":           func(s *RegionSpec) { s.Length = 0 },
		"shift too small":     func(s *RegionSpec) { s.PageShift = 11 },
		"shift too large":     func(s *RegionSpec) { s.PageShift = 31 },
		"shift 255":           func(s *RegionSpec) { s.PageShift = 255 },
		"wraps around":        func(s *RegionSpec) { s.IOVA = VA(^uint64(0) - 8190) },
		"length 2^64-1":       func(s *RegionSpec) { s.Length = ^uint64(0) },
		"all of it, wrapping": func(s *RegionSpec) { s.Length, s.IOVA, s.NPages = ^uint64(0), 0, ^uint64(0) },
		"offset of a page":    func(s *RegionSpec) { s.Offset = 4096; s.NPages = 3 },
		"offset huge":         func(s *RegionSpec) { s.Offset = ^uint64(0) },
		"too few pages":       func(s *RegionSpec) { s.Offset = 1 },
		"no pages":            func(s *RegionSpec) { s.NPages = 0 },
		"remote, not local":   func(s *RegionSpec) { s.Access = RemoteWrite },
		"atomic, not local":   func(s *RegionSpec) { s.Access = RemoteAtomic },
		"access bits":         func(s *RegionSpec) { s.Access |= 1 << 9 },
		"flags":               func(s *RegionSpec) { s.Flags = 1 << 5 },
		"implicit, pinned":    func(s *RegionSpec) { s.Flags, s.IOVA = Implicit, 0 },
		"implicit, IOVA":      func(s *RegionSpec) { s.Flags = Implicit | DemandPaging },
		"implicit, offset":    func(s *RegionSpec) { s.Flags, s.IOVA, s.Offset = Implicit|DemandPaging, 0, 1; s.Length -= 1 },
		"implicit, shift": func(s *RegionSpec) {
			s.Flags, s.IOVA, s.PageShift = Implicit|DemandPaging, 0, 13
			s.NPages = 1
		},
		"implicit, pages": func(s *RegionSpec) { s.Flags, s.IOVA, s.NPages = Implicit|DemandPaging, 0, 3 },
		"implicit, 2^57 + 1": func(s *RegionSpec) {
			s.Flags, s.IOVA, s.NPages, s.Length = Implicit|DemandPaging, 0, MaxImplicit>>12+1, MaxImplicit+4096
		},
		"implicit, physical":  func(s *RegionSpec) { s.Flags, s.IOVA, s.NPages = Implicit|Phys, 0, 0 },
		"physical with pages": func(s *RegionSpec) { s.Flags = Phys },
	} {
		vm := NewVM(NewSpace(1), Limits{})
		sp := good
		f(&sp)
		if _, err := vm.CreateRegion(sp); !errors.Is(err, ErrInvalid) &&
			!(strings.Contains(name, "all of it") && errors.Is(err, ErrLimit)) {
			t.Errorf("%s: %v", name, err)
		}
		if n, pages := vm.Usage(); n != 0 || pages != 0 {
			t.Errorf("%s: usage %d, %d", name, n, pages)
		}
	}
	vm := NewVM(NewSpace(1), Limits{})
	good.Access |= accessHugeTLB | 1<<20 // hints
	r, err := vm.CreateRegion(good)
	if err != nil || r.Access() != LocalWrite {
		t.Error(r, err)
	}
	good.IOVA, good.Access = VA(^uint64(0)-8191), 0 // ends with the last address
	if r, err = vm.CreateRegion(good); err != nil {
		t.Fatal(err)
	}
	if m := vm.Check(r.LKey(), 0, VA(^uint64(0)), 1, 0); !m.OK() {
		t.Error(m.Err())
	}
	if m := vm.Check(r.LKey(), 0, VA(^uint64(0)), 2, 0); m.Kind != OutOfRange {
		t.Error(m.Err())
	}
}

// A read-only page: reads succeed, writes are guest faults until the driver has made it writable, which counts as no
// loss. Only demand regions have read-only pages.
func TestReadOnlyPages(t *testing.T) {
	s := NewSpace(1)
	mustMap(t, s, 0, hostMem(t, 1<<20))
	vm := NewVM(s, Limits{})
	sp := RegionSpec{Access: LocalWrite | RemoteAtomic | RemoteRead, Flags: DemandPaging, PageShift: 12, IOVA: 0x40000,
		Length: 4 << 12, NPages: 4}
	r, err := vm.CreateRegion(sp)
	if err != nil {
		t.Fatal(err)
	}
	ro := []PA{0x1000 | readOnlyPA, 0x2000 | readOnlyPA, 0x3000, 0x4000 | absentPA | readOnlyPA}
	if err := vm.SetPages(r.Handle(), 0, ro); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 3<<12)
	if m := vm.Read(buf, r.LKey(), 0, 0x40000, RemoteRead); !m.OK() {
		t.Error(m.Err())
	}
	if b, m := vm.Resolve(r.LKey(), 0, 0x40000, 100, 0); !m.OK() || len(b) != 100 {
		t.Error(m.Err())
	}
	writes := func(want MissKind, at VA) {
		t.Helper()
		if m := vm.Write(r.LKey(), 0, 0x41ff0, buf[:32], 0); m.Kind != want || want != None &&
			(m.VA != 0x41ff0 || m.Len != 32) {
			t.Errorf("%+v", m)
		}
		if _, m := vm.Uint64(r.LKey(), 0, at, RemoteAtomic); m.Kind != want {
			t.Errorf("%+v", m)
		}
		if _, m := vm.Resolve(r.LKey(), 0, at, 1, LocalWrite); m.Kind != want {
			t.Errorf("%+v", m)
		}
	}
	writes(GuestFault, 0x40008)
	gen := r.Generation()
	if err := vm.SetPages(r.Handle(), 0, []PA{0x1000, 0x2000}); err != nil || r.Generation() != gen {
		t.Error("a page that became writable counts as lost", err)
	}
	writes(None, 0x40008)
	if err := vm.SetPages(r.Handle(), 0, ro[:1]); err != nil || r.Generation() == gen {
		t.Error("a page that became read-only does not count as lost", err)
	}
	if m := vm.Read(buf[:1], r.LKey(), 0, 0x43000, 0); m.Kind != GuestFault {
		t.Error("absent and read-only is absent:", m.Err())
	}
	sp.Flags = 0
	if r, err = vm.CreateRegion(sp); err != nil {
		t.Fatal(err)
	}
	if err := vm.SetPages(r.Handle(), 0, ro); !errors.Is(err, ErrInvalid) {
		t.Error(err)
	}
}

// A fault has the number of bytes wanted from the missing byte on: for stage one all the rest, for stage two those that
// follow in physical memory.
func TestFaultSaysWhatIsWanted(t *testing.T) {
	s := NewSpace(1)
	if err := s.Reserve(0, 1<<20); err != nil {
		t.Fatal(err)
	}
	mustMap(t, s, 0x7000, hostMem(t, PageSize))
	vm := NewVM(s, Limits{})
	r, err := vm.CreateRegion(RegionSpec{Access: LocalWrite, Flags: DemandPaging, PageShift: 12, IOVA: 0, Length: 5 << 12,
		NPages: 5})
	if err != nil {
		t.Fatal(err)
	}
	if err := vm.SetPages(r.Handle(), 0, []PA{0x7000, 0x4000, 0x5000, 0x9000}); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4<<12)
	for name, f := range map[string]func(b []byte, va VA) Miss{
		"read":  func(b []byte, va VA) Miss { return vm.Read(b, r.LKey(), 0, va, 0) },
		"write": func(b []byte, va VA) Miss { return vm.Write(r.LKey(), 0, va, b, LocalWrite) },
		"resolve": func(b []byte, va VA) Miss {
			_, m := vm.Resolve(r.LKey(), 0, max(va, 0x1000), uint64(len(b))-uint64(max(va, 0x1000)-va), 0)
			return m
		},
	} {
		if m := f(buf, 0x800); m != (Miss{HostFault, r.LKey(), Where{0x1000, 0x4000}, 0x2000}) {
			t.Errorf("%s: %+v", name, m)
		}
		if m := f(buf[:0x900], 0x800); m != (Miss{HostFault, r.LKey(), Where{0x1000, 0x4000}, 0x100}) {
			t.Errorf("%s: %+v", name, m)
		}
		if m := f(buf[:0x1000], 0x4000); m != (Miss{GuestFault, r.LKey(), Where{VA: 0x4000}, 0x1000}) {
			t.Errorf("%s: %+v", name, m)
		}
	}
	if m := s.Read(buf, 0x7800); m != (Miss{HostFault, 0, Where{PA: 0x8000}, 4<<12 - 0x800}) {
		t.Errorf("%+v", m)
	}
}

func TestSetPagesRefuses(t *testing.T) {
	vm := NewVM(NewSpace(1), Limits{})
	r, err := vm.CreateRegion(RegionSpec{PageShift: 21, Length: 4 << 21, NPages: 4})
	if err != nil {
		t.Fatal(err)
	}
	phys, err := vm.CreateRegion(RegionSpec{Flags: Phys, Length: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	h, ctx := r.Handle(), t.Context()
	two := []PA{0, 1 << 21}
	for name, c := range map[string]struct{ err, want error }{
		"misaligned":     {vm.SetPages(h, 0, []PA{1 << 21, 1 << 20}), ErrInvalid},
		"too high":       {vm.SetPages(h, 0, []PA{MaxPA}), ErrInvalid},
		"past the end":   {vm.SetPages(h, 3, two), ErrInvalid},
		"wraps":          {vm.SetPages(h, ^uint64(0), two), ErrInvalid},
		"no such region": {vm.SetPages(h+1, 0, two), ErrNoRegion},
		"handle 0":       {vm.SetPages(0, 0, two), ErrNoRegion},
		"huge handle":    {vm.SetPages(^uint32(0), 0, two), ErrNoRegion},
		"physical":       {vm.SetPages(phys.Handle(), 0, two), ErrInvalid},
		"clear":          {vm.ClearPages(ctx, h, 1, 4), ErrInvalid},
		"clear wraps":    {vm.ClearPages(ctx, h, 1, ^uint64(0)), ErrInvalid},
		"destroy":        {vm.DestroyRegion(ctx, h^1), ErrNoRegion},
	} {
		if !errors.Is(c.err, c.want) {
			t.Errorf("%s: %v", name, c.err)
		}
	}
	if m := vm.Read(make([]byte, 1), r.LKey(), 0, 1<<21, 0); m.Kind != GuestFault {
		t.Errorf("a refused command had an effect: %v", m.Err())
	}
}

func TestQuotas(t *testing.T) {
	vm := NewVM(NewSpace(1), Limits{MaxRegions: 3, MaxPages: 10})
	mk := func(n uint64) (*Region, error) {
		return vm.CreateRegion(RegionSpec{PageShift: 12, Length: n << 12, NPages: n})
	}
	a, err := mk(8)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := mk(3); !errors.Is(err, ErrLimit) {
		t.Error(err)
	}
	if _, err := mk(1 << 51); !errors.Is(err, ErrLimit) {
		t.Error(err)
	}
	if _, err := mk(1); err != nil {
		t.Error(err)
	}
	if _, err := mk(1); err != nil {
		t.Error(err)
	}
	if _, err := vm.CreateRegion(RegionSpec{Flags: Phys, Length: 1}); !errors.Is(err, ErrLimit) {
		t.Error(err)
	}
	if err := vm.DestroyRegion(t.Context(), a.Handle()); err != nil {
		t.Fatal(err)
	}
	if _, err := mk(8); err != nil {
		t.Error(err)
	}
}

// An index's keys come back with another variant, and key 0 (RA-1) never.
func TestKeyVariants(t *testing.T) {
	vm := NewVM(NewSpace(1), Limits{MaxRegions: 2})
	seen := map[Key]bool{}
	for range 2 * 256 {
		r, err := vm.CreateRegion(RegionSpec{Flags: Phys, Length: 1})
		if err != nil {
			t.Fatal(err)
		}
		if seen[r.LKey()] || r.LKey().Index() == 0 || r.LKey() != r.RKey() || r.LKey().Variant() != uint8(r.Handle()) {
			t.Fatalf("key %#x", r.LKey())
		}
		seen[r.LKey()] = true
		if err := vm.DestroyRegion(t.Context(), r.Handle()); err != nil {
			t.Fatal(err)
		}
		for k := range seen {
			if m := vm.Check(k, 0, 0, 0, 0); m.Kind != BadKey {
				t.Fatalf("old key %#x: %v", k, m.Err())
			}
		}
	}
	if vm.Check(0, 0, 0, 0, 0).Kind != BadKey {
		t.Error("key 0")
	}
}

// PF-5: keys of one VM used in another VM reach nothing.
func TestKeysStayInTheirVM(t *testing.T) {
	a, b := NewVM(NewSpace(1), Limits{}), NewVM(NewSpace(2), Limits{})
	r, err := a.CreateRegion(RegionSpec{Flags: Phys, Length: 1 << 40})
	if err != nil {
		t.Fatal(err)
	}
	if m := b.Check(r.RKey(), 0, 0, 1, 0); m.Kind != BadKey {
		t.Error(m.Err())
	}
}

func TestZeroLength(t *testing.T) {
	vm := NewVM(NewSpace(1), Limits{})
	if b, m := vm.Resolve(77, 0, 0, 0, RemoteWrite); b != nil || !m.OK() {
		t.Error(m.Err())
	}
	if m := vm.Read(nil, 77, 0, 0, 0); !m.OK() {
		t.Error(m.Err())
	}
	if m := vm.Write(77, 0, 0, nil, RemoteWrite); !m.OK() {
		t.Error(m.Err())
	}
}

func TestMissText(t *testing.T) {
	for kind := BadKey; kind <= Blocked; kind++ {
		err := Miss{Kind: kind, Key: 0x1234, Where: Where{0x5000, 0x6000}, Len: 7}.Err()
		if !errors.Is(err, ErrMiss) || !strings.Contains(err.Error(), kind.String()) ||
			!strings.Contains(err.Error(), "7 bytes") {
			t.Errorf("%v", err)
		}
	}
	if err := (Miss{}).Err(); err != nil {
		t.Error(err)
	}
	if s := MissKind(99).String(); s != "miss kind 99" {
		t.Error(s)
	}
}

func TestDestroyContext(t *testing.T) {
	vm := NewVM(NewSpace(1), Limits{})
	r, err := vm.CreateRegion(RegionSpec{Flags: Phys, Length: 1})
	if err != nil {
		t.Fatal(err)
	}
	tok := vm.Space().Epochs().Enter(0)
	defer vm.Space().Epochs().Leave(0, tok)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := vm.DestroyRegion(ctx, r.Handle()); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if m := vm.Check(r.LKey(), 0, 0, 0, 0); m.Kind != BadKey {
		t.Error("key survives")
	}
}

// A call that clears pages which another call has just cleared must not report them free too early.
func TestClearOfCleared(t *testing.T) {
	s := NewSpace(1)
	vm := NewVM(s, Limits{})
	r, err := vm.CreateRegion(RegionSpec{Flags: DemandPaging, PageShift: 12, Length: 4 << 12, NPages: 4})
	if err != nil {
		t.Fatal(err)
	}
	if err := vm.SetPages(r.Handle(), 0, []PA{0x1000, 0x2000, 0x3000, 0x4000}); err != nil {
		t.Fatal(err)
	}
	tok := s.Epochs().Enter(3)
	if err := vm.SetPages(r.Handle(), 3, []PA{absentPA}); err != nil {
		t.Fatal(err)
	}
	if d, err := vm.StartClear(r.Handle(), 3, 1); err != nil || d == nil || d.Done() {
		t.Fatalf("clear of pages that SetPages made absent: %v, %v", d, err)
	}
	for i := range uint64(2) {
		d, err := vm.StartClear(r.Handle(), i, 2)
		if err != nil || d == nil || d.Done() {
			t.Fatalf("clear %d: %v, %v", i, d, err)
		}
	}
	again, err := vm.StartClear(r.Handle(), 0, 3)
	if err != nil || again == nil || again.Done() {
		t.Fatalf("clear of cleared pages still in use: %v, %v", again, err)
	}
	s.Epochs().Leave(3, tok)
	if !again.Done() {
		t.Error("not done without readers")
	}
	if d, err := vm.StartClear(r.Handle(), 0, 3); d != nil || err != nil {
		t.Errorf("clear of pages cleared long ago: %v, %v", d, err)
	}
}
