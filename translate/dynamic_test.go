package translate

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

const dynBase = PA(0x100000)

// dynVM is a VM over n pages from dynBase on.
func dynVM(t *testing.T, pages int) (*VM, []byte) {
	t.Helper()
	s := NewSpace(3)
	mem := hostMem(t, pages*PageSize)
	mustMap(t, s, dynBase, mem)
	return NewVM(s, Limits{MaxRegions: 64}), mem
}

func mustKey(t *testing.T, vm *VM, k Kind, pd PD, pages uint64) Key {
	t.Helper()
	key, err := vm.CreateDynamic(k, pd, pages)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// inside runs f inside an epoch, as a loop does.
func inside(vm *VM, slot int, f func() Outcome) Outcome {
	e := vm.Space().Epochs()
	tok := e.Enter(ByLoop(slot))
	defer e.Leave(slot, tok)
	return f()
}

func want(t *testing.T, what string, got, want Outcome) {
	t.Helper()
	if got != want {
		t.Fatalf("%s: outcome %d, want %d", what, got, want)
	}
}

// varied returns the key with the next variant.
func varied(k Key) Key { return k&^0xff | (k+1)&0xff }

// TestFastRegion: work requests make a key valid and invalid, low byte included (IBTA 10.6.4).
func TestFastRegion(t *testing.T) {
	vm, mem := dynVM(t, 16)
	key := mustKey(t, vm, FastRegion, 5, 4)
	all := LocalWrite | RemoteWrite | RemoteRead
	sp := FastSpec{Key: varied(key), Access: all, PageShift: 12, IOVA: 0xffff888000001123, Length: 2 * PageSize,
		Offset: 0x123}
	pas := []PA{dynBase + 9*PageSize, dynBase + 2*PageSize, dynBase + 3*PageSize}
	reg := func(sp FastSpec, pd PD, pas []PA) Outcome {
		return inside(vm, 1, func() Outcome { return vm.Register(1, pd, &sp, pas) })
	}
	inv := func(pd PD, k Key) Outcome {
		return inside(vm, 1, func() Outcome { return vm.Invalidate(1, pd, k) })
	}
	if m := vm.Check(key, 5, sp.IOVA, 1, 0); m.Kind != BadKey {
		t.Fatalf("a key without memory: %v", m.Err())
	}
	for what, f := range map[string]func(sp *FastSpec, pd *PD, pas *[]PA){
		"another domain":       func(_ *FastSpec, pd *PD, _ *[]PA) { *pd = 6 },
		"another index":        func(sp *FastSpec, _ *PD, _ *[]PA) { sp.Key += 256 },
		"too many pages":       func(_ *FastSpec, _ *PD, p *[]PA) { *p = append(*p, *p...) },
		"too few pages":        func(_ *FastSpec, _ *PD, p *[]PA) { *p = (*p)[:2] },
		"misaligned page":      func(_ *FastSpec, _ *PD, p *[]PA) { *p = []PA{dynBase, dynBase + 8, dynBase} },
		"page beyond memory":   func(_ *FastSpec, _ *PD, p *[]PA) { *p = []PA{dynBase, MaxPA, dynBase} },
		"no length":            func(sp *FastSpec, _ *PD, _ *[]PA) { sp.Length = 0 },
		"wraps around":         func(sp *FastSpec, _ *PD, _ *[]PA) { sp.IOVA = 0xfffffffffffff800 },
		"offset beyond a page": func(sp *FastSpec, _ *PD, _ *[]PA) { sp.Offset = PageSize },
		"page size":            func(sp *FastSpec, _ *PD, _ *[]PA) { sp.PageShift = 11 },
		"huge page size":       func(sp *FastSpec, _ *PD, _ *[]PA) { sp.PageShift = 255 },
		"remote without local": func(sp *FastSpec, _ *PD, _ *[]PA) { sp.Access = RemoteWrite },
		"on demand":            func(sp *FastSpec, _ *PD, _ *[]PA) { sp.Access |= OnDemand },
		"unknown right":        func(sp *FastSpec, _ *PD, _ *[]PA) { sp.Access |= LocalRead },
	} {
		s, pd, p := sp, PD(5), append([]PA(nil), pas...)
		f(&s, &pd, &p)
		want(t, what, reg(s, pd, p), Refused)
	}
	want(t, "register", reg(sp, 5, pas), Done)
	want(t, "register twice", reg(sp, 5, pas), Refused)
	if m := vm.Check(key, 5, sp.IOVA, 1, 0); m.Kind != BadKey {
		t.Fatalf("the old low byte: %v", m.Err())
	}
	src := bytes.Repeat([]byte("fast register!! "), 512)
	if m := vm.Write(sp.Key, 5, sp.IOVA, src, RemoteWrite); !m.OK() {
		t.Fatal(m.Err())
	}
	if !bytes.Equal(mem[9*PageSize+0x123:10*PageSize], src[:PageSize-0x123]) ||
		!bytes.Equal(mem[2*PageSize:][:PageSize+0x123], src[PageSize-0x123:]) {
		t.Fatal("bytes are not in the listed pages")
	}
	for what, m := range map[string]Miss{
		"another domain": vm.Check(sp.Key, 6, sp.IOVA, 1, 0), "beyond": vm.Check(sp.Key, 5, sp.IOVA, sp.Length+1, 0),
		"a right not given": vm.Check(sp.Key, 5, sp.IOVA, 8, RemoteAtomic),
	} {
		if m.OK() {
			t.Errorf("%s: permitted", what)
		}
	}
	// Commands cannot change keys that belong to work requests.
	if err := vm.SetPages(uint32(sp.Key), 0, pas); !errors.Is(err, ErrInvalid) {
		t.Errorf("SetPages: %v", err)
	}
	if _, err := vm.StartDestroy(uint32(sp.Key)); !errors.Is(err, ErrNoRegion) {
		t.Errorf("destroyed by a key that is not its handle: %v", err)
	}
	want(t, "invalidate another domain's", inv(6, sp.Key), Refused)
	want(t, "invalidate an old key", inv(5, key), Refused)
	want(t, "invalidate", inv(5, sp.Key), Done)
	want(t, "invalidate again", inv(5, sp.Key), Done)
	if m := vm.Check(sp.Key, 5, sp.IOVA, 1, 0); m.Kind != BadKey {
		t.Fatalf("an invalidated key: %v", m.Err())
	}
	want(t, "register again", reg(sp, 5, pas[:3]), Done)

	regions, pages := vm.Usage()
	if regions != 1 || pages != 4 {
		t.Errorf("usage %d regions, %d pages", regions, pages)
	}
	if err := vm.DestroyRegion(context.Background(), uint32(key)); err != nil {
		t.Fatal(err)
	}
	want(t, "register a destroyed key", reg(sp, 5, pas), Refused)
	want(t, "invalidate a destroyed key", inv(5, sp.Key), Refused)
	if m := vm.Check(sp.Key, 5, sp.IOVA, 1, 0); m.Kind != BadKey {
		t.Fatalf("a destroyed key: %v", m.Err())
	}
	if regions, pages = vm.Usage(); regions != 0 || pages != 0 {
		t.Errorf("usage afterwards: %d regions, %d pages", regions, pages)
	}
	for _, x := range []struct {
		k     Kind
		pages uint64
	}{{FastRegion, 0}, {FastRegion, MaxFastPages + 1}, {Window1, 1}, {3, 0}} {
		if _, err := vm.CreateDynamic(x.k, 5, x.pages); !errors.Is(err, ErrInvalid) {
			t.Errorf("kind %d with %d pages: %v", x.k, x.pages, err)
		}
	}
}

// TestInvalidateWaits: a key is invalid at once, and the invalidation is Done when nothing uses the memory any more
// (EP-3).
func TestInvalidateWaits(t *testing.T) {
	vm, _ := dynVM(t, 4)
	key := mustKey(t, vm, FastRegion, 5, 1)
	sp := FastSpec{Key: key, Access: LocalWrite, PageShift: 12, IOVA: 0x1000, Length: 4096}
	e := vm.Space().Epochs()
	call := func(f func() Outcome) Outcome { return inside(vm, 1, f) }
	register := func() Outcome { return vm.Register(1, 5, &sp, []PA{dynBase}) }
	invalidate := func() Outcome { return vm.Invalidate(1, 5, key) }
	want(t, "register", call(register), Done)
	for _, slot := range []int{2, 1, 17} { // another loop, and other readers in the caller's slot
		reader := e.Enter(ByLoop(slot))
		want(t, "invalidate with a reader inside", call(invalidate), Again)
		if m := vm.Check(key, 5, 0x1000, 1, 0); m.Kind != BadKey {
			t.Fatalf("not invalid at once: %v", m.Err())
		}
		want(t, "register with a reader inside", call(register), Again)
		late := e.Enter(ByLoop(slot))
		want(t, "still", call(invalidate), Again)
		e.Leave(slot, reader)
		want(t, "later readers do not matter", call(invalidate), Done)
		want(t, "register again", call(register), Done)
		e.Leave(slot, late)
	}
	// Destroyed meanwhile: a waiting caller is told that there is no such key.
	reader := e.Enter(ByLoop(3))
	want(t, "invalidate", call(invalidate), Again)
	d, err := vm.StartDestroy(uint32(key))
	if err != nil {
		t.Fatal(err)
	}
	want(t, "invalidate a key that was destroyed", call(invalidate), Refused)
	if d.Done() {
		t.Error("destroyed under a reader")
	}
	e.Leave(3, reader)
	if !d.Done() {
		t.Error("not done without readers")
	}
}

// TestWindows: binding, rebinding, rights (IBTA 10.6.7).
func TestWindows(t *testing.T) {
	vm, mem := dynVM(t, 16)
	const pd, qp, other = PD(5), PD(1<<31 | 1), PD(1<<31 | 2)
	r, err := vm.CreateRegion(RegionSpec{PD: pd, Access: LocalWrite | MWBind, PageShift: 12, IOVA: 0x7000_0100,
		Length: 7936, Offset: 0x100, NPages: 2})
	if err != nil {
		t.Fatal(err)
	}
	if err := vm.SetPages(r.Handle(), 0, []PA{dynBase + 4*PageSize, dynBase + PageSize}); err != nil {
		t.Fatal(err)
	}
	plain, err := vm.CreateRegion(RegionSpec{PD: pd, Access: RemoteRead | MWBind, PageShift: 12, IOVA: 0x7000_0000,
		Length: 4096, NPages: 1})
	if err != nil {
		t.Fatal(err)
	}
	noBind, err := vm.CreateRegion(RegionSpec{PD: pd, Access: LocalWrite, PageShift: 12, IOVA: 0x7000_0000, Length: 4096,
		NPages: 1})
	if err != nil {
		t.Fatal(err)
	}
	call := func(f func() Outcome) Outcome { return inside(vm, 1, f) }
	bind := func(sp BindSpec) Outcome { return call(func() Outcome { return vm.Bind(1, pd, qp, &sp) }) }
	for _, k := range []Kind{Window1, Window2} {
		handle := mustKey(t, vm, k, pd, 0)
		w := handle
		ok := BindSpec{Window: w, NewKey: varied(w), Region: r.LKey(),
			Access: LocalWrite | RemoteWrite | RemoteRead | FlushGlobal, VA: 0x7000_0800, Length: 4096}
		for what, f := range map[string]func(*BindSpec){
			"an old key":                func(sp *BindSpec) { sp.Window++ },
			"no such region":            func(sp *BindSpec) { sp.Region++ },
			"before the region":         func(sp *BindSpec) { sp.VA = 0x7000_00ff },
			"beyond the region":         func(sp *BindSpec) { sp.Length = 8000 },
			"wraps around":              func(sp *BindSpec) { sp.Length = 1<<64 - 1 },
			"another right":             func(sp *BindSpec) { sp.Access |= MWBind },
			"flush to persistence":      func(sp *BindSpec) { sp.Access |= FlushPersistent },
			"region without bind":       func(sp *BindSpec) { sp.Region, sp.VA, sp.Length = noBind.LKey(), 0x7000_0000, 16 },
			"write without local write": func(sp *BindSpec) { sp.Region, sp.VA, sp.Length = plain.LKey(), 0x7000_0000, 16 },
			"a window as region":        func(sp *BindSpec) { sp.Region = w },
		} {
			sp := ok
			f(&sp)
			want(t, what, bind(sp), Refused)
		}
		want(t, "another domain", call(func() Outcome { return vm.Bind(1, pd+1, qp, &ok) }), Refused)
		want(t, "bind", bind(ok), Done)
		w = ok.NewKey
		domain := pd
		if k == Window2 {
			domain = qp
			for _, d := range []PD{pd, other} {
				if m := vm.Check(w, d, 0x7000_0800, 1, RemoteRead); m.Kind != BadPD {
					t.Errorf("type 2 window of another QP, domain %#x: %v", d, m.Err())
				}
			}
		}
		if m := vm.Write(w, domain, 0x7000_0ffe, []byte("over"), RemoteWrite); !m.OK() {
			t.Fatal(m.Err())
		}
		if m := vm.CheckKey(w, domain, FlushGlobal); !m.OK() { // as a whole (A19)
			t.Error(m.Err())
		}
		if string(mem[5*PageSize-2:5*PageSize]) != "ov" || string(mem[PageSize:PageSize+2]) != "er" {
			t.Fatal("bytes are not in the region's pages")
		}
		for what, m := range map[string]Miss{
			"as L_Key":          vm.Read(make([]byte, 1), w, domain, 0x7000_0800, LocalRead),
			"local write":       vm.Write(w, domain, 0x7000_0800, []byte{1}, LocalWrite),
			"before it":         vm.Check(w, domain, 0x7000_07ff, 1, RemoteRead),
			"beyond it":         vm.Check(w, domain, 0x7000_0800, 4097, RemoteRead),
			"a right not given": vm.Check(w, domain, 0x7000_0800, 8, RemoteAtomic),
		} {
			if m.OK() {
				t.Errorf("type %d, %s: permitted", k, what)
			}
		}
		if _, err := vm.StartDestroy(r.Handle()); !errors.Is(err, ErrBusy) {
			t.Errorf("region with a window destroyed: %v", err)
		}
		next := ok
		next.Window, next.NewKey, next.VA = w, varied(w), 0x7000_0100
		inv := func(key Key) Outcome { return call(func() Outcome { return vm.Invalidate(1, pd, key) }) }
		remote := func(domain PD) Outcome {
			return call(func() Outcome { return vm.InvalidateRemote(1, pd, domain, w) })
		}
		want(t, "the peer of another QP", remote(other), Refused)
		if m := vm.Check(w, domain, 0x7000_0800, 1, RemoteRead); !m.OK() {
			t.Errorf("a window that another QP's peer tried to invalidate: %v", m.Err())
		}
		if k == Window2 {
			want(t, "the peer of its QP", remote(qp), Done)
			again := ok
			again.Window, again.NewKey = w, w
			want(t, "bind again", bind(again), Done)
		}
		if k == Window1 {
			want(t, "type 1 is not invalidated", inv(w), Refused)
			want(t, "zero-based", bind(BindSpec{Window: w, Region: r.LKey(), Access: ZeroBased, VA: next.VA, Length: 8}),
				Refused)
			want(t, "bound again", bind(next), Done)
			if m := vm.Check(w, domain, 0x7000_0800, 1, RemoteRead); m.Kind != BadKey {
				t.Errorf("the binding before: %v", m.Err())
			}
			want(t, "unbound", bind(BindSpec{Window: next.NewKey, NewKey: w}), Done)
			if m := vm.Check(w, domain, 0x7000_0800, 1, RemoteRead); m.Kind != BadKey {
				t.Errorf("unbound: %v", m.Err())
			}
		} else {
			want(t, "bound twice", bind(next), Refused)
			want(t, "invalidate", inv(w), Done)
			want(t, "no length", bind(BindSpec{Window: w, NewKey: w, Region: r.LKey()}), Refused)
			next.Access |= ZeroBased
			want(t, "zero-based", bind(next), Done)
			got := make([]byte, 4)
			if m := vm.Read(got, next.NewKey, qp, 0xefe, RemoteRead); !m.OK() || string(got) != "over" {
				t.Errorf("zero-based: %q %v", got, m.Err())
			}
		}
		if err := vm.DestroyRegion(context.Background(), uint32(handle)); err != nil {
			t.Fatal(err)
		}
	}
	if err := vm.DestroyRegion(context.Background(), r.Handle()); err != nil {
		t.Errorf("a region without windows left: %v", err)
	}
	if err := vm.DestroyAll(context.Background()); err != nil {
		t.Fatal(err)
	}
	if n, pages := vm.Usage(); n != 0 || pages != 0 {
		t.Errorf("usage afterwards: %d, %d", n, pages)
	}
}

// TestWindowOnDemand: a window on a demand region shows the present pages; an absent page is a fault of the region
// beneath, with its key and address. A release of a page waits for readers of both (ODP-5).
func TestWindowOnDemand(t *testing.T) {
	vm, mem := dynVM(t, 16)
	const pd, qp = PD(5), PD(1<<31 | 1)
	for _, implicit := range []bool{false, true} {
		sp := RegionSpec{PD: pd, Access: LocalWrite | MWBind | OnDemand, Flags: DemandPaging, PageShift: PageShift,
			IOVA: 0x7000_0100, Length: 7936, Offset: 0x100, NPages: 2}
		first := uint64(0)
		if implicit {
			sp.Flags, sp.IOVA, sp.Offset, sp.Length, sp.NPages = DemandPaging|Implicit, 0, 0, MaxImplicit, MaxImplicit>>PageShift
			first = 0x7000_0000 >> PageShift
		}
		r, err := vm.CreateRegion(sp)
		if err != nil {
			t.Fatal(err)
		}
		w := mustKey(t, vm, Window2, pd, 0)
		bind := BindSpec{Window: w, NewKey: w, Region: r.LKey(), Access: RemoteWrite | RemoteRead | ZeroBased,
			VA: 0x7000_0800, Length: 4096}
		want(t, "bind", inside(vm, 1, func() Outcome { return vm.Bind(1, pd, qp, &bind) }), Done)
		write := func(va VA, b string) Miss {
			tok := vm.Space().Epochs().Enter(ByLoop(1))
			defer vm.Space().Epochs().Leave(1, tok)
			return vm.Write(w, qp, va, []byte(b), RemoteWrite)
		}
		absent := func(va, beneath VA) {
			t.Helper()
			m := write(va, "over")
			if m.Kind != GuestFault || m.Key != w || m.VA != va {
				t.Fatalf("absent at %#x: %+v", va, m)
			}
			if key, at := vm.Beneath(m.Key, m.VA); key != r.LKey() || at != beneath {
				t.Fatalf("beneath %#x is %#x of %#x, want %#x of %#x", va, at, key, beneath, r.LKey())
			}
		}
		absent(0x7fe, 0x7000_0ffe)
		if err := vm.SetPages(r.Handle(), first, []PA{dynBase + 4*PageSize}); err != nil {
			t.Fatal(err)
		}
		absent(0x800, 0x7000_1000)
		if err := vm.SetPages(r.Handle(), first+1, []PA{dynBase + PageSize}); err != nil {
			t.Fatal(err)
		}
		clear(mem)
		if m := write(0x7fe, "over"); !m.OK() || string(mem[5*PageSize-2:5*PageSize]) != "ov" ||
			string(mem[PageSize:PageSize+2]) != "er" {
			t.Fatalf("bytes are not in the region's pages: %v", m.Err())
		}
		if key, va := vm.Beneath(r.LKey(), 0x7000_0800); key != r.LKey() || va != 0x7000_0800 {
			t.Errorf("beneath a region: %#x of %#x", va, key)
		}
		reader := vm.Space().Epochs().Enter(ByLoop(2))
		d, err := vm.StartClear(r.Handle(), first, 1)
		if err != nil || d.Done() {
			t.Errorf("a page was released beneath a reader: %v", err)
		}
		absent(0, 0x7000_0800)
		vm.Space().Epochs().Leave(2, reader)
		if !d.Done() {
			t.Error("not released without readers")
		}
		if _, err := vm.StartDestroy(r.Handle()); !errors.Is(err, ErrBusy) {
			t.Errorf("region with a window destroyed: %v", err)
		}
		for _, h := range []uint32{uint32(w), r.Handle()} {
			if err := vm.DestroyRegion(context.Background(), h); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestFastRegionRace: loops read through keys that others register and invalidate all the time. A read finds only what
// the key meant: each page holds its own number, and the key's low byte, address and pages match.
func TestFastRegionRace(t *testing.T) {
	const pages, keys, readers = 256, 4, 3
	vm, mem := dynVM(t, pages)
	for p := range pages {
		for o := 0; o < PageSize; o += 8 {
			binary.LittleEndian.PutUint64(mem[p*PageSize+o:], uint64(p))
		}
	}
	var key [keys]Key
	for i := range key {
		key[i] = mustKey(t, vm, FastRegion, 5, 4)
	}
	const rounds = 400
	var last [keys]atomic.Uint32 // low byte
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var hits atomic.Int64
	for n := range readers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rng := rand.New(rand.NewPCG(uint64(n), 1))
			buf := make([]byte, 4*PageSize)
			for {
				select {
				case <-stop:
					return
				default:
				}
				// Low byte v means pages 4v.. of the memory at address v<<20.
				i := rng.IntN(keys)
				v := uint64(last[i].Load())
				inside(vm, 4+n, func() Outcome {
					k := key[i]&^255 | Key(v)
					if m := vm.Read(buf, k, 5, VA(v<<20), 0); m.OK() {
						hits.Add(1)
						for o := 0; o < len(buf); o += 8 {
							if got := binary.LittleEndian.Uint64(buf[o:]); got != 4*v+uint64(o/PageSize) {
								t.Errorf("key %#x, byte %d: page %d", k, o, got)
								return Done
							}
						}
					} else if m.Kind != BadKey {
						t.Errorf("key %#x: %v", k, m.Err())
					}
					return Done
				})
			}
		}()
	}
	// Two loops that register and invalidate, each its own keys.
	var owners sync.WaitGroup
	for n := range 2 {
		owners.Add(1)
		go func() {
			defer owners.Done()
			rng := rand.New(rand.NewPCG(uint64(n), 2))
			for i := range rounds {
				own := n + 2*(i%2)
				k, v := key[own], Key(rng.Uint64N(64))
				last[own].Store(uint32(v))
				sp := FastSpec{Key: k&^255 | v, PageShift: 12, IOVA: VA(v) << 20, Length: 4 * PageSize}
				first := dynBase + PA(4*v)*PageSize
				for inside(vm, n, func() Outcome {
					return vm.Register(n, 5, &sp, []PA{first, first + PageSize, first + 2*PageSize, first + 3*PageSize})
				}) != Done {
					runtime.Gosched()
				}
				for inside(vm, n, func() Outcome { return vm.Invalidate(n, 5, sp.Key) }) != Done {
					runtime.Gosched()
				}
				// No reader may be inside: a new owner's bytes would show.
				vm.dynamic(k).now.iova = 0xdead
			}
		}()
	}
	owners.Wait()
	close(stop)
	wg.Wait()
	t.Logf("%d reads hit", hits.Load())
}

func BenchmarkFastRegister(b *testing.B) {
	s := NewSpace(3)
	vm := NewVM(s, Limits{})
	key, err := vm.CreateDynamic(FastRegion, 5, 256)
	if err != nil {
		b.Fatal(err)
	}
	pas := make([]PA, 256)
	for i := range pas {
		pas[i] = PA(i*7) << 12
	}
	sp := FastSpec{Key: key, PageShift: 12, IOVA: 1 << 30, Length: 1 << 20}
	tok := s.Epochs().Enter(ByLoop(1))
	defer s.Epochs().Leave(1, tok)
	b.ReportAllocs()
	for range b.N {
		if vm.Register(1, 5, &sp, pas) != Done || vm.Invalidate(1, 5, key) != Done {
			b.Fatal("refused")
		}
	}
}
