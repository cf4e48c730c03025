package translate

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
)

// naiveSpace is stage two as a map from page to host address; 0: reserved.
type naiveSpace map[PA]hostAddr

func (n naiveSpace) at(pa PA) (hostAddr, MissKind) {
	h, ok := n[pa&^pageMask]
	switch {
	case !ok:
		return 0, BadAddress
	case h == 0:
		return 0, HostFault
	}
	return h + hostAddr(pa&pageMask), None
}

// check compares one lookup of n bytes.
func (n naiveSpace) check(t *testing.T, s *Space, pa PA, size int) {
	t.Helper()
	want, kind := n.at(pa)
	b, m := s.Host(pa, size)
	if m.Kind != kind {
		t.Fatalf("%v: %v, model says %v", pa, m.Kind, kind)
	}
	if kind != None {
		if m.PA != pa || m.Len != uint64(size) || b != nil {
			t.Fatalf("%v: %+v", pa, m)
		}
		return
	}
	if addrOf(b) != want {
		t.Fatalf("%v: host %#x, model says %#x", pa, addrOf(b), want)
	}
	for o := range len(b) {
		if o&pageMask != 0 && o != len(b)-1 {
			continue
		}
		if h, kind := n.at(pa + PA(o)); kind != None || h != want+hostAddr(o) {
			t.Fatalf("%v: byte %d of %d is not contiguous", pa, o, len(b))
		}
	}
	if len(b) < size { // must end where contiguity ends
		if h, kind := n.at(pa + PA(len(b))); kind == None && h == want+hostAddr(len(b)) {
			t.Fatalf("%v: stops after %d of %d bytes", pa, len(b), size)
		}
	}
}

func TestSpaceModel(t *testing.T) {
	const pages = 1536 // three leaves
	host := hostMem(t, 2*pages*PageSize)
	// The range begins off a leaf boundary and crosses one of dirs as well.
	const base = PA(1<<32 - 700*PageSize)
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 3))
		s := NewSpace(1)
		model := naiveSpace{}
		span := func() (PA, uint64) {
			n := uint64(1 + rng.IntN(40))
			if rng.IntN(3) == 0 {
				n = uint64(1 + rng.IntN(pages))
			}
			first := uint64(rng.IntN(pages))
			if rng.IntN(3) == 0 {
				first = first &^ 511 // line up with leaves sometimes
				first += uint64(leafSize-base%leafSize) >> PageShift
			}
			if rng.IntN(4) == 0 { // exactly one leaf
				first, n = uint64(leafSize-base%leafSize)>>PageShift, leafPages
			}
			n = min(n, pages-min(first, pages-1))
			return base + PA(first<<PageShift), n
		}
		for range 200 {
			pa, n := span()
			free, memory := true, true
			for i := range n {
				h, ok := model[pa+PA(i<<PageShift)]
				free = free && (!ok || h == 0)
				memory = memory && ok
			}
			switch rng.IntN(4) {
			case 0: // Map
				at := uint64(rng.IntN(2*pages-int(n))) << PageShift
				if rng.IntN(2) == 0 { // such that neighbours become contiguous
					at = uint64(pa - base)
				}
				b := host[at : at+n<<PageShift]
				err := s.Map(pa, b)
				if free != (err == nil) || err != nil && !errors.Is(err, ErrOverlap) {
					t.Fatalf("seed %d: map: %v", seed, err)
				}
				if err == nil {
					for i := range n {
						model[pa+PA(i<<PageShift)] = addrOf(b) + hostAddr(i<<PageShift)
					}
				}
			case 1: // Reserve
				empty := true
				for i := range n {
					_, ok := model[pa+PA(i<<PageShift)]
					empty = empty && !ok
				}
				err := s.Reserve(pa, n<<PageShift)
				if empty != (err == nil) || err != nil && !errors.Is(err, ErrOverlap) {
					t.Fatalf("seed %d: reserve: %v", seed, err)
				}
				if err == nil {
					for i := range n {
						model[pa+PA(i<<PageShift)] = 0
					}
				}
			default:
				keep := rng.IntN(2) == 0
				remove := s.Unmap
				if keep {
					remove = s.Withdraw
				}
				err := remove(pa, n<<PageShift)
				if memory != (err == nil) || err != nil && !errors.Is(err, ErrNotMapped) {
					t.Fatalf("seed %d: unmap: %v", seed, err)
				}
				for i := range n {
					if err == nil && keep {
						model[pa+PA(i<<PageShift)] = 0
					} else if err == nil {
						delete(model, pa+PA(i<<PageShift))
					}
				}
			}
			for range 30 {
				pa := base + PA(rng.IntN(pages<<PageShift))
				model.check(t, s, pa, 1+rng.IntN(3<<leafShift))
			}
			pa, n = span()
			all := true
			for i := range n {
				_, ok := model[pa+PA(i<<PageShift)]
				all = all && ok
			}
			if s.Contains(pa+1, n<<PageShift-1) != all {
				t.Fatalf("seed %d: Contains(%v, %d pages) is not %v", seed, pa, n, all)
			}
		}
		for p := base; p < base+pages<<PageShift; p += PageSize {
			model.check(t, s, p, 1<<16)
		}
	}
}

func TestSpaceRefuses(t *testing.T) {
	s := NewSpace(1)
	mem := hostMem(t, 4*PageSize)
	mustMap(t, s, 0x10000, mem)
	for name, c := range map[string]struct {
		err  error
		want error
	}{
		"misaligned PA":   {s.Map(0x20001, mem), ErrInvalid},
		"misaligned host": {s.Map(0x20000, mem[1:PageSize+1]), ErrInvalid},
		"half a page":     {s.Map(0x20000, mem[:100]), ErrInvalid},
		"nothing":         {s.Map(0x20000, nil), ErrInvalid},
		"beyond the end":  {s.Map(MaxPA-PageSize, mem), ErrInvalid},
		"wraps around":    {s.Map(PA(^uint64(0)&^pageMask), mem), ErrInvalid},
		"overlap":         {s.Map(0x13000, mem), ErrOverlap},
		"reserve":         {s.Reserve(0xf000, 2*PageSize), ErrOverlap},
		"reserve all":     {s.Reserve(0, 1<<63), ErrInvalid},
		"unmap too much":  {s.Unmap(0x10000, 5*PageSize), ErrNotMapped},
		"unmap nothing":   {s.Unmap(0x10000, 0), ErrInvalid},
		"unmap elsewhere": {s.Unmap(1<<40, PageSize), ErrNotMapped},
		"withdraw":        {s.Withdraw(0xf000, PageSize), ErrNotMapped},
	} {
		if !errors.Is(c.err, c.want) {
			t.Errorf("%s: %v, expected %v", name, c.err, c.want)
		}
	}
	if err := s.Map(MaxPA-4*PageSize, mem); err != nil { // the last pages can be used
		t.Error(err)
	}
	if b, m := s.Host(MaxPA-1, 100); !m.OK() || len(b) != 1 {
		t.Error(len(b), m.Err())
	}
}

func TestSpaceHostileAddresses(t *testing.T) {
	s := NewSpace(1)
	mustMap(t, s, 0, hostMem(t, PageSize))
	mustMap(t, s, MaxPA-PageSize, hostMem(t, PageSize))
	buf := make([]byte, 64)
	for _, pa := range []PA{PageSize, PageSize - 1, 1 << 21, 1 << 32, 1 << 47, MaxPA - 1, MaxPA, 1 << 63, ^PA(0),
		^PA(0) - 62, ^PA(0) - 63} {
		if m := s.Read(buf, pa); m.Kind != BadAddress || m.Len != 64-uint64(m.PA-pa) {
			t.Errorf("read at %v: %+v", pa, m)
		}
		if m := s.Write(pa, buf); m.Kind != BadAddress {
			t.Errorf("write at %v: %+v", pa, m)
		}
		if _, m := s.RingUint64(pa &^ 7); pa > MaxPA && m.Kind != BadAddress {
			t.Errorf("word at %v: %+v", pa, m)
		}
	}
	for _, pa := range []PA{1, 2, 4, 6, 7, 12} {
		if _, m := s.RingUint64(pa); m.Kind != BadAddress || m.PA != pa {
			t.Errorf("misaligned %v: %+v", pa, m)
		}
	}
	for _, pa := range []PA{1, 2, 3} {
		if _, m := s.RingUint32(pa); m.Kind != BadAddress {
			t.Errorf("misaligned %v: %+v", pa, m)
		}
	}
	if _, m := s.Host(0, -1); m.Kind != OutOfRange {
		t.Error(m)
	}
	if b, m := s.Host(1<<60, 0); b != nil || !m.OK() {
		t.Error(m)
	}
	if m := s.Read(nil, 1<<60); !m.OK() {
		t.Error(m)
	}
	if m := s.Write(1<<60, nil); !m.OK() {
		t.Error(m)
	}
}

// A write that is not possible as a whole writes nothing.
func TestSpaceWriteWhole(t *testing.T) {
	s := NewSpace(1)
	mem := hostMem(t, 4*PageSize)
	mustMap(t, s, 0, mem[:2*PageSize])
	if err := s.Reserve(2*PageSize, PageSize); err != nil {
		t.Fatal(err)
	}
	src := bytes.Repeat([]byte{0xaa}, 3*PageSize)
	if m := s.Write(0, src); m.Kind != HostFault || m.PA != 2*PageSize || m.Len != PageSize || !m.Fault() {
		t.Fatalf("%+v", m)
	}
	if !bytes.Equal(mem, make([]byte, len(mem))) {
		t.Fatal("written in part")
	}
	if err := s.Map(2*PageSize, mem[3*PageSize:]); err != nil { // present now, elsewhere on the host
		t.Fatal(err)
	}
	if m := s.Write(100, src[:len(src)-100]); !m.OK() {
		t.Fatal(m.Err())
	}
	got := make([]byte, len(src)-100)
	if m := s.Read(got, 100); !m.OK() || !bytes.Equal(got, src[:len(got)]) {
		t.Fatal("read back", m.Err())
	}
	if mem[2*PageSize] != 0 || mem[3*PageSize] != 0xaa {
		t.Fatal("written in the wrong place")
	}
}

// Whatever the order in which pages come, a whole leaf ends up as one entry, and becomes pages again when one of them
// leaves.
func TestSpaceLeaves(t *testing.T) {
	s := NewSpace(1)
	mem := hostMem(t, leafSize)
	for _, i := range rand.New(rand.NewPCG(7, 7)).Perm(leafPages) {
		if _, run := s.leaf(leafSize); run != 0 {
			t.Fatal("leaf too early")
		}
		mustMap(t, s, leafSize+PA(i<<PageShift), mem[i<<PageShift:(i+1)<<PageShift])
	}
	if h, run := s.leaf(leafSize + 5); run != leafSize-5 || h != addrOf(mem)+5 {
		t.Fatal("no leaf", run)
	}
	if err := s.Withdraw(leafSize+PageSize, PageSize); err != nil {
		t.Fatal(err)
	}
	if b, m := s.Host(leafSize, leafSize); !m.OK() || len(b) != PageSize {
		t.Fatal(len(b), m.Err())
	}
	mustMap(t, s, leafSize+PageSize, mem[PageSize:2*PageSize])
	if _, run := s.leaf(leafSize); run != leafSize {
		t.Fatal("no leaf again")
	}
}

// DPDK's virtio-user, for example, uses its own virtual addresses as PAs.
func TestSpaceHighAddresses(t *testing.T) {
	s := NewSpace(0)
	mem := hostMem(t, 4<<20)
	const pa = PA(0x7f1234567000)
	mustMap(t, s, pa, mem)
	if m := s.Write(pa+3<<20, []byte("there")); !m.OK() {
		t.Fatal(m.Err())
	}
}

func TestGVMTable(t *testing.T) {
	tab := NewGVMTable(3)
	a, b, host := NewSpace(5), NewSpace(5), NewSpace(HostGVMI)
	for _, s := range []*Space{a, b, host} {
		if err := tab.Bind(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := tab.Bind(NewSpace(6)); !errors.Is(err, ErrLimit) {
		t.Error(err)
	}
	tab.Release(host)
	if err := tab.Bind(a); !errors.Is(err, ErrInvalid) {
		t.Errorf("bound twice: %v", err)
	}
	tab.Release(b)
	if got := tab.Spaces(5); len(got) != 1 || got[0] != a {
		t.Error(got)
	}
	tab.Release(a)
	tab.Release(a)
	if tab.Spaces(5) != nil {
		t.Error(tab.Spaces(5))
	}
	if err := tab.Bind(NewSpace(6)); err != nil {
		t.Error(err)
	}
}
