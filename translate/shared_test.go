package translate

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// Readers use regions while their keys are revoked, their pages cleared and their memory slot removed. The memory
// really is unmapped, so a use after the drain is a SIGSEGV here, and a stale translation shows in the contents.
func TestConcurrentRelease(t *testing.T) {
	const slotPA, slotSize = PA(8 << 21), 2 << 21
	s := NewSpace(1)
	vm := NewVM(s, Limits{})
	var key atomic.Uint32
	var stop atomic.Bool
	var hits atomic.Int64
	var readers sync.WaitGroup
	for slot := range 2 {
		readers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(slot), 4))
			for !stop.Load() {
				tok := s.Epochs().Enter(ByLoop(slot))
				for range 8 {
					va := VA(rng.IntN(slotSize - 64))
					b, m := vm.Resolve(Key(key.Load()), 1, va, 64, LocalWrite)
					if m.OK() {
						hits.Add(1)
						for i := range b { // page n of the region holds n
							if b[i] != byte((uint64(va)+uint64(i))>>PageShift) {
								t.Error("stale translation")
								stop.Store(true)
							}
						}
					}
				}
				s.Epochs().Leave(slot, tok)
				runtime.Gosched()
			}
		})
	}
	pas := make([]PA, slotSize>>PageShift)
	for i := range pas {
		pas[i] = slotPA + PA(i<<PageShift)
	}
	rng := rand.New(rand.NewPCG(1, 5))
	for round := range 30 {
		host, err := unix.Mmap(-1, 0, slotSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANONYMOUS|unix.MAP_PRIVATE)
		if err != nil {
			t.Fatal(err)
		}
		for i := range host {
			host[i] = byte(i >> PageShift)
		}
		if err := s.Map(slotPA, host); err != nil {
			t.Fatal(err)
		}
		r, err := vm.CreateRegion(RegionSpec{PD: 1, Access: LocalWrite, PageShift: 12, Length: slotSize,
			NPages: uint64(len(pas))})
		if err != nil {
			t.Fatal(err)
		}
		if err := vm.SetPages(r.Handle(), 0, pas); err != nil {
			t.Fatal(err)
		}
		key.Store(uint32(r.LKey()))
		for before := hits.Load(); hits.Load() < before+50 && !stop.Load(); {
			runtime.Gosched()
		}
		for range 3 { // a page is withdrawn, gets other contents, and comes back
			p := rng.Uint64N(uint64(len(pas)))
			if err := vm.ClearPages(t.Context(), r.Handle(), p, 1); err != nil {
				t.Fatal(err)
			}
			page := host[p<<PageShift : (p+1)<<PageShift]
			clear(page)
			for i := range page {
				page[i] = byte(p)
			}
			if err := vm.SetPages(r.Handle(), p, pas[p:p+1]); err != nil {
				t.Fatal(err)
			}
		}
		if round%2 == 0 { // key first, or memory first
			if err := vm.DestroyRegion(t.Context(), r.Handle()); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Unmap(slotPA, slotSize); err != nil {
			t.Fatal(err)
		}
		if err := s.Epochs().Flip().Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := unix.Munmap(host); err != nil {
			t.Fatal(err)
		}
		if round%2 != 0 {
			if err := vm.DestroyRegion(t.Context(), r.Handle()); err != nil {
				t.Fatal(err)
			}
		}
	}
	stop.Store(true)
	readers.Wait()
}

// The guest polls the last word of a device's write: an aligned 8-byte word is either old or new.
func TestStoresDoNotTear(t *testing.T) {
	s := NewSpace(1)
	mustMap(t, s, 0, hostMem(t, 1<<16))
	for _, n := range []int{8, 16, 24, 40, 64, 104, 256, 1000, 4096, 32768} {
		var words [3]*atomic.Uint64
		for i, off := range [...]int{0, n / 2 &^ 7, n - 8} {
			var m Miss
			if words[i], m = s.RingUint64(PA(512 + off)); !m.OK() {
				t.Fatal(m.Err())
			}
		}
		src := [2][]byte{make([]byte, n), bytes.Repeat([]byte{0xff}, n)}
		s.Write(512, src[0])
		var stop atomic.Bool
		var watcher sync.WaitGroup
		watcher.Go(func() {
			for !stop.Load() {
				for i, word := range words {
					if w := word.Load(); w != 0 && w != ^uint64(0) {
						t.Errorf("%d bytes: word %d of 3: %#x", n, i, w)
						return
					}
				}
			}
		})
		for i := range 5000 {
			s.Write(512, src[i&1])
		}
		stop.Store(true)
		watcher.Wait()
	}
}

func TestAtomics(t *testing.T) {
	s := NewSpace(1)
	mustMap(t, s, 0, hostMem(t, PageSize))
	w, m := s.RingUint64(8)
	if !m.OK() {
		t.Fatal(m.Err())
	}
	if old := FetchAdd(w, ^uint64(0)); old != 0 || w.Load() != ^uint64(0) {
		t.Error(old)
	}
	if old := FetchAdd(w, 3); old != ^uint64(0) || w.Load() != 2 {
		t.Error(old)
	}
	if old := CompareSwap(w, 1, 9); old != 2 || w.Load() != 2 {
		t.Error(old)
	}
	if old := CompareSwap(w, 2, 9); old != 2 || w.Load() != 9 {
		t.Error(old)
	}
	// With concurrent processors: every addition counts, every swap is exclusive.
	w.Store(0)
	var won atomic.Int64
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 1000 {
				for {
					old := w.Load()
					if CompareSwap(w, old, old+1) == old {
						break
					}
				}
				won.Add(1)
				FetchAdd(w, 1)
			}
		})
	}
	all.Wait()
	if w.Load() != 8000 || won.Load() != 4000 {
		t.Errorf("%d, %d", w.Load(), won.Load())
	}
}

func TestRing(t *testing.T) {
	s := NewSpace(1)
	mem := hostMem(t, 1<<20)
	mustMap(t, s, 0x100000, mem)
	for name, pas := range map[string][]PA{
		"scattered":  {0x103000, 0x101000, 0x108000},
		"contiguous": {0x104000, 0x105000, 0x106000},
	} {
		const length = 2*PageSize + 100
		r, err := NewRing(s, pas, 12, length)
		if err != nil {
			t.Fatal(err)
		}
		if r.Len() != length {
			t.Error(r.Len())
		}
		pas[1] = 0 // the list was copied
		rng := rand.New(rand.NewPCG(6, 6))
		model := make([]byte, length)
		for range 500 {
			off := rng.Uint64N(length)
			src := make([]byte, rng.Uint64N(length-off+1))
			for i := range src {
				src[i] = byte(rng.Uint32())
			}
			if m := r.Write(off, src); !m.OK() {
				t.Fatal(name, m.Err())
			}
			copy(model[off:], src)
			got := make([]byte, length)
			if m := r.Read(got, 0); !m.OK() || !bytes.Equal(got, model) {
				t.Fatal(name, "differs", m.Err())
			}
		}
		w, m := r.Uint32(PageSize)
		if !m.OK() {
			t.Fatal(m.Err())
		}
		w.Store(0x01020304)
		var got [4]byte
		if m := r.Read(got[:], PageSize); !m.OK() || got[0]+got[3] != 5 {
			t.Error(got, m.Err())
		}
		for _, c := range []struct{ off, n uint64 }{{length, 1}, {length - 3, 4}, {length + 1, 0}, {^uint64(0), 1},
			{^uint64(0) - 3, 8}, {0, length + 1}} {
			buf := make([]byte, c.n)
			if m := r.Read(buf, c.off); m.Kind != OutOfRange {
				t.Errorf("read %d at %#x: %v", c.n, c.off, m.Kind)
			}
			if m := r.Write(c.off, buf); m.Kind != OutOfRange {
				t.Errorf("write %d at %#x: %v", c.n, c.off, m.Kind)
			}
		}
		for _, off := range []uint64{1, 2, length - 3, length &^ 3, ^uint64(0) - 3} {
			if _, m := r.Uint32(off); m.Kind != OutOfRange {
				t.Errorf("word at %#x: %v", off, m.Kind)
			}
		}
	}
	r, err := NewRing(s, []PA{0x101000}, 12, 64)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Withdraw(0x101000, PageSize); err != nil { // PF-12
		t.Fatal(err)
	}
	if m := r.Read(make([]byte, 8), 0); m.Kind != HostFault {
		t.Error(m.Err())
	}
	if m := r.Write(0, make([]byte, 8)); m.Kind != HostFault {
		t.Error(m.Err())
	}
	if _, m := r.Uint32(0); m.Kind != HostFault {
		t.Error(m.Err())
	}
}

func TestRingRefuses(t *testing.T) {
	s := NewSpace(1)
	mustMap(t, s, 0, hostMem(t, 4*PageSize))
	for name, c := range map[string]struct {
		pas    []PA
		shift  uint8
		length uint64
		want   error
	}{
		"no pages":        {nil, 12, 100, ErrInvalid},
		"no length":       {[]PA{0}, 12, 0, ErrInvalid},
		"too long":        {[]PA{0}, 12, 4097, ErrInvalid},
		"2^64-1":          {[]PA{0}, 12, ^uint64(0), ErrInvalid},
		"too many pages":  {[]PA{0, 4096}, 12, 4096, ErrInvalid},
		"shift 11":        {[]PA{0}, 11, 100, ErrInvalid},
		"shift 64":        {[]PA{0}, 64, 100, ErrInvalid},
		"misaligned":      {[]PA{0x800}, 12, 100, ErrInvalid},
		"absent bit":      {[]PA{1}, 12, 100, ErrInvalid},
		"not memory":      {[]PA{0x4000}, 12, 100, ErrNotMapped},
		"partly memory":   {[]PA{0}, 16, 5 * PageSize, ErrNotMapped},
		"wraps":           {[]PA{^PA(0) &^ pageMask}, 12, PageSize, ErrNotMapped},
		"second is wrong": {[]PA{0, 0x5000}, 12, 4097, ErrNotMapped},
	} {
		if _, err := NewRing(s, c.pas, c.shift, c.length); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := NewRing(s, []PA{0}, 16, 4*PageSize); err != nil { // uses only present memory
		t.Error(err)
	}
}

func TestGuard(t *testing.T) {
	gone, err := unix.Mmap(-1, 0, PageSize, unix.PROT_NONE, unix.MAP_ANONYMOUS|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(gone) }()
	released := false
	err = Guard(func() error {
		defer func() { released = true }()
		gone[5] = 1
		return nil
	})
	if !errors.Is(err, ErrMemoryGone) || !released || !strings.Contains(err.Error(), "host address 0x") {
		t.Errorf("%v, %v", err, released)
	}
	own := errors.New("own")
	if err := Guard(func() error { return own }); !errors.Is(err, own) {
		t.Error(err)
	}
	for _, f := range []func(){func() { panic("other") }, func() { var p []int; p[0] = 1 }} {
		func() {
			defer func() {
				if recover() == nil {
					t.Error("another panic was swallowed")
				}
			}()
			_ = Guard(func() error { f(); return nil })
		}()
	}
	if _, ok := FaultAddr("text"); ok {
		t.Error("text taken for a memory fault")
	}
}

func TestNoAllocations(t *testing.T) {
	s := NewSpace(1)
	mustMap(t, s, 0, hostMem(t, 1<<22))
	vm := NewVM(s, Limits{})
	r, err := vm.CreateRegion(RegionSpec{Access: LocalWrite, PageShift: 12, Length: 3 << 12, NPages: 4})
	if err != nil {
		t.Fatal(err)
	}
	if err := vm.SetPages(r.Handle(), 0, []PA{0x3000, 0x1000, 1, 0x7000}); err != nil {
		t.Fatal(err)
	}
	ring, err := NewRing(s, []PA{0x9000, 0x8000}, 12, 8192)
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 5000)
	for name, f := range map[string]func(){
		"Resolve": func() { _, _ = vm.Resolve(r.LKey(), 0, 10, 8000, LocalWrite) },
		"Read":    func() { vm.Read(buf, r.LKey(), 0, 10, 0) },
		"Write":   func() { vm.Write(r.LKey(), 0, 10, buf, LocalWrite) },
		"Fault":   func() { vm.Write(r.LKey(), 0, 8000, buf[:400], LocalWrite) },
		"Uint64":  func() { _, _ = vm.Uint64(r.LKey(), 0, 8, LocalWrite) },
		"Check":   func() { vm.Check(r.LKey(), 0, 8, 10000, LocalWrite) },
		"Host":    func() { _, _ = s.Host(0x1ff000, 1<<20) },
		"Space":   func() { s.Write(0x1ff000, buf); s.Read(buf, 0x1ff000) },
		"Ring":    func() { ring.Write(1000, buf); ring.Read(buf, 1000); _, _ = ring.Uint32(4096) },
		"Epochs":  func() { s.Epochs().Leave(1, s.Epochs().Enter(ByLoop(1))) },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// FuzzAccess uses arbitrary numbers for region creation and access; every granted access must be in the one mapped
// page.
func FuzzAccess(f *testing.F) {
	f.Add(uint64(0x1000), uint64(100), uint64(5), uint64(1), uint8(12), uint64(0x1010), uint64(20), uint32(0))
	f.Add(^uint64(0)-99, uint64(100), uint64(0), uint64(1), uint8(12), ^uint64(0), uint64(1), uint32(0))
	f.Add(uint64(0), ^uint64(0), uint64(0), ^uint64(0), uint8(30), ^uint64(0), ^uint64(0), uint32(1))
	mem := hostMem(f, 3*PageSize)
	f.Fuzz(func(t *testing.T, iova, length, offset, npages uint64, shift uint8, va, n uint64, flags uint32) {
		s := NewSpace(1)
		mustMap(t, s, 1<<30, mem[PageSize:2*PageSize])
		vm := NewVM(s, Limits{MaxPages: 1 << 16})
		r, err := vm.CreateRegion(RegionSpec{Access: LocalWrite, Flags: RegionFlags(flags), IOVA: VA(iova), Length: length,
			Offset: offset, NPages: npages, PageShift: shift})
		if err != nil {
			return
		}
		if !r.phys {
			if err := vm.SetPages(r.Handle(), 0, []PA{1 << 30}); err != nil {
				t.Fatal(err)
			}
		}
		b, m := vm.Resolve(r.LKey(), 0, VA(va), n, LocalWrite)
		inside := va >= iova && va-iova <= length && n <= length-(va-iova)
		if n > 0 && inside == (m.Kind == OutOfRange) {
			t.Fatalf("%v", m.Err())
		}
		if m.OK() && n > 0 {
			if uint64(len(b)) > n || addrOf(b) < addrOf(mem)+PageSize || addrOf(b)+hostAddr(len(b)) > addrOf(mem)+2*PageSize {
				t.Fatalf("bytes outside")
			}
			b[0], b[len(b)-1] = 1, 2
		}
	})
}
