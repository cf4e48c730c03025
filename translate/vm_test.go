package translate

import (
	"bytes"
	"context"
	"errors"
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

// A key cannot be computed from others (TR-3, TR-4): neither from the keys that another VM's
// regions, windows and fast registrations got in the same order, nor from the ones before it.
func TestKeysAreRandom(t *testing.T) {
	const n = 256
	keys := func() (k [n]Key) {
		vm := NewVM(NewSpace(1), Limits{})
		for i := range k {
			if i%2 == 0 {
				r, err := vm.CreateRegion(RegionSpec{Flags: Phys, Length: 1})
				if err != nil {
					t.Fatal(err)
				}
				k[i] = r.RKey()
				continue
			}
			var err error
			if k[i], err = vm.CreateDynamic(Window2, 1, 0); err != nil {
				t.Fatal(err)
			}
		}
		return k
	}
	a, b := keys(), keys()
	same, steps := 0, map[Key]bool{}
	var ones [32]int
	for i := range n {
		if a[i] == b[i] {
			same++
		}
		if i > 0 {
			steps[a[i]-a[i-1]] = true
		}
		for bit := range ones {
			ones[bit] += int(a[i] >> bit & 1)
		}
	}
	// With random keys each of these fails less often than once in 10^12 runs.
	if same > 3 {
		t.Errorf("%d of %d keys are the same in another VM", same, n)
	}
	if len(steps) < n-16 {
		t.Errorf("only %d different steps between %d keys", len(steps), n)
	}
	for bit, k := range ones {
		if k < n/4 || k > n*3/4 {
			t.Errorf("bit %d is set in %d of %d keys", bit, k, n)
		}
	}
}

// A key matches in all its bits, those that are no place in the table, too: for a fast registration or an invalidation
// the upper 24 (the consumer owns the others).
func TestKeyMatchesWhole(t *testing.T) {
	vm := NewVM(NewSpace(1), Limits{MaxRegions: 8})
	r, err := vm.CreateRegion(RegionSpec{Flags: Phys, Length: 1, PD: 1})
	if err != nil {
		t.Fatal(err)
	}
	fast, err := vm.CreateDynamic(FastRegion, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	spec := FastSpec{Access: RemoteWrite | LocalWrite, PageShift: PageShift, Length: PageSize}
	for bit := range 32 {
		if m := vm.Check(r.RKey()^1<<bit, 1, 0, 1, 0); m.Kind != BadKey {
			t.Errorf("bit %d of a region's key does not matter: %v", bit, m.Err())
		}
		if bit < keyVariantBits {
			continue
		}
		spec.Key = fast ^ 1<<bit
		if vm.Register(0, 1, &spec, []PA{0}) != Refused {
			t.Errorf("registered with bit %d wrong", bit)
		}
	}
	spec.Key = fast ^ 1
	if got := vm.Register(0, 1, &spec, []PA{0}); got != Done {
		t.Errorf("with another variant: %v", got)
	}
}

// All places can be used, and no key is given twice.
func TestKeysToTheLast(t *testing.T) {
	const n = 1000
	vm := NewVM(NewSpace(1), Limits{MaxRegions: n})
	seen := map[Key]bool{}
	for range n {
		r, err := vm.CreateRegion(RegionSpec{Flags: Phys, Length: 1})
		if err != nil {
			t.Fatal(err)
		}
		if seen[r.RKey()] || vm.byKey(r.RKey()) != r {
			t.Fatalf("key %#x", r.RKey())
		}
		seen[r.RKey()] = true
	}
	if _, err := vm.CreateRegion(RegionSpec{Flags: Phys, Length: 1}); !errors.Is(err, ErrLimit) {
		t.Error(err)
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
	tok := vm.Space().Epochs().Enter(ByLoop(0))
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
	tok := s.Epochs().Enter(ByLoop(3))
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
