package translate

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

// flush returns the pages of a report, as their first addresses.
func (l *WriteLog) flush(t *testing.T) []PA {
	t.Helper()
	pages := map[PA]bool{}
	if err := l.Flush(t.Context(), func(first PA, set uint64) {
		for i := range PA(64) {
			if set>>i&1 != 0 {
				pages[first+i*PageSize] = true
			}
		}
	}); err != nil {
		t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(pages))
}

// startLog begins a log of nobody's memory below end, and waits for its release.
func startLog(t *testing.T, s *Space, end PA) *WriteLog {
	t.Helper()
	l, d, err := s.LogWrites(end)
	if err == nil {
		err = d.Wait(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Each way to write is noted, with the pages that change and no others, under every attribute that permits it; no way
// to read is (CO-5). After Stop nothing is.
func TestWriteLog(t *testing.T) {
	x := newUplinkRig(t)
	var a Attribute
	a.Bind(x.space)
	pages := map[PA][]byte{0: x.host[:PageSize], leafSize - PageSize: x.host[leafSize-PageSize:]}
	last, m := x.space.HostRead(leafSize, PageSize)
	if !m.OK() {
		t.Fatal(m)
	}
	pages[leafSize] = last
	for round, u := range []Uplink{UplinkReadWrite, UplinkReadOnly, UplinkBlocked, UplinkReadWrite} {
		if _, err := a.Set(u); err != nil {
			t.Fatal(err)
		}
		l := startLog(t, x.space, leafSize+PageSize)
		if _, _, err := x.space.LogWrites(leafSize); !errors.Is(err, ErrInvalid) {
			t.Errorf("a second log: %v", err)
		}
		for i, c := range uplinkAccesses {
			for _, pa := range []PA{0, leafSize, leafSize - 4} { // in a leaf, in 4 KiB entries, across
				before := map[PA][]byte{}
				for p, b := range pages {
					before[p] = bytes.Clone(b)
				}
				m := c.do(x, pa, bytes.Repeat([]byte{byte(round<<6 + i + 1)}, 8))
				got := l.flush(t)
				for p, b := range pages {
					if !bytes.Equal(b, before[p]) && !slices.Contains(got, p) {
						t.Errorf("%v: %s at %v changes %v, noted: %v", u, c.name, pa, p, got)
					}
				}
				if most := 2; c.write && m.OK() && (len(got) == 0 || len(got) > most) || (!c.write || !m.OK()) && len(got) > 0 {
					t.Errorf("%v: %s at %v (%v): noted: %v", u, c.name, pa, m, got)
				}
			}
		}
		l.Stop()
		l.Stop()
		for _, c := range uplinkAccesses {
			c.do(x, 0, make([]byte, 8))
		}
		if got := l.flush(t); len(got) > 0 {
			t.Errorf("after Stop: %v", got)
		}
	}
	if a.Uplink() != UplinkReadWrite || x.space.uplink.Load() != 0 {
		t.Errorf("afterwards the uplink is %#x", x.space.uplink.Load())
	}
}

// Long writes are noted whole; what lies beyond the log is not.
func TestWriteLogRanges(t *testing.T) {
	s := NewSpace(1)
	const pages = 200
	mustMap(t, s, 0, hostMem(t, pages*PageSize))
	l := startLog(t, s, 150*PageSize)
	for _, x := range []struct{ pa, n, first, last int }{ // bytes, bytes, pages
		{0, 1, 0, 0}, {PageSize - 1, 1, 0, 0}, {PageSize - 1, 2, 0, 1}, {5 * PageSize, 64 * PageSize, 5, 68},
		{63*PageSize + 1, PageSize, 63, 64}, {0, 150 * PageSize, 0, 149}, {64 * PageSize, 64 * PageSize, 64, 127},
		{100 * PageSize, 100 * PageSize, 100, 191}, // the map has whole words
		{192 * PageSize, PageSize, 1, 0},
	} {
		if m := s.Write(PA(x.pa), make([]byte, x.n)); !m.OK() {
			t.Fatal(m)
		}
		var want []PA
		for p := x.first; p <= x.last; p++ {
			want = append(want, PA(p*PageSize))
		}
		if got := l.flush(t); !slices.Equal(got, want) {
			t.Errorf("%d bytes at %#x: %v, want %v", x.n, x.pa, got, want)
		}
	}
}

// A log of far addresses takes little memory, and none of it for what is not written to: who asks for one need not have
// that much memory (TR-6).
func TestWriteLogFar(t *testing.T) {
	s := NewSpace(1)
	const far = MaxPA - leafSize
	mustMap(t, s, 0, hostMem(t, PageSize))
	mustMap(t, s, far, hostMem(t, 2*PageSize))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	l := startLog(t, s, MaxPA)
	for _, pa := range []PA{8, far + PageSize} {
		if m := s.Write(pa, make([]byte, 8)); !m.OK() {
			t.Fatal(m)
		}
	}
	runtime.ReadMemStats(&after)
	if got := l.flush(t); !slices.Equal(got, []PA{0, far + PageSize}) {
		t.Errorf("%v", got)
	}
	// A pointer for each 128 MiB, twice, where bits would be 2 times 8 GiB.
	if n := after.TotalAlloc - before.TotalAlloc; n > 40<<20 {
		t.Errorf("it takes %d bytes", n)
	}
}

// A report waits for those who may still write, and one that was interrupted is not lost.
func TestWriteLogWaits(t *testing.T) {
	s := NewSpace(1)
	mustMap(t, s, 0, hostMem(t, 4*PageSize))
	l := startLog(t, s, 4*PageSize)
	tok := s.Epochs().Enter(ByLoop(0))
	b, m := s.Host(PageSize, 8)
	if !m.OK() {
		t.Fatal(m)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for range 2 {
		err := l.Flush(ended, func(PA, uint64) { t.Error("reported before the write") })
		if !errors.Is(err, context.Canceled) {
			t.Errorf("flush beside a reader: %v", err)
		}
	}
	var seen []byte // of the page, when it is reported
	done := make(chan error)
	go func() { done <- l.Flush(t.Context(), func(PA, uint64) { seen = append(seen, b[0]) }) }()
	for range 1000 {
		runtime.Gosched()
	}
	b[0] = 1
	s.Epochs().Leave(0, tok)
	if err := <-done; err != nil || !bytes.Equal(seen, []byte{1}) {
		t.Errorf("reported with %v, %v", seen, err)
	}
	if got := l.flush(t); len(got) > 0 {
		t.Errorf("noted twice: %v", got)
	}
}

// Memory that is copied page by page while loops write to it, and then by what the log says, is right once nobody
// writes: as a live migration does.
func TestWriteLogCopies(t *testing.T) {
	const pages = 16*leafPages + leafPages/2 // a page is seldom written to twice
	s := NewSpace(1)
	host := hostMem(t, pages*PageSize)
	mustMap(t, s, 0, host)
	vm := NewVM(s, Limits{})
	r, err := vm.CreateRegion(RegionSpec{Flags: Phys, Access: LocalWrite | RemoteWrite | RemoteAtomic,
		Length: pages * PageSize})
	if err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	var writes [3]atomic.Int64
	var writers sync.WaitGroup
	for slot := range writes {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(slot), 8))
			var held []byte
			var buf [64]byte
			for !stop.Load() {
				tok := s.Epochs().Enter(ByLoop(slot))
				for range 16 {
					// A few pages often, all of them now and then.
					pa := PA(rng.Uint64N(8)*PageSize + rng.Uint64N(PageSize/64-1)*64)
					if rng.IntN(4) == 0 {
						pa = PA(rng.Uint64N(pages*PageSize/64-1) * 64)
					}
					binary.LittleEndian.PutUint64(buf[:], rng.Uint64())
					switch rng.IntN(4) {
					case 0:
						s.Write(pa, buf[:])
					case 1:
						vm.Write(r.LKey(), 0, VA(pa), buf[:], RemoteWrite)
					case 2:
						if w, m := vm.Uint64(r.LKey(), 0, VA(pa), RemoteAtomic); m.OK() {
							w.Add(1)
						}
					case 3: // written at the end of the epoch
						held, _ = s.Host(pa, 64)
					}
				}
				runtime.Gosched()
				copy(held, buf[:])
				held = nil
				s.Epochs().Leave(slot, tok)
				writes[slot].Add(1)
			}
		})
	}
	progress := func() {
		for i := range writes {
			for was := writes[i].Load(); writes[i].Load() < was+3; {
				runtime.Gosched()
			}
		}
	}
	progress()
	l := startLog(t, s, pages*PageSize)
	copied := bytes.Clone(host)
	for range 40 {
		progress()
		for _, pa := range l.flush(t) {
			copy(copied[pa:pa+PageSize], host[pa:])
		}
	}
	stop.Store(true)
	writers.Wait()
	dirty := l.flush(t)
	if len(dirty) == 0 {
		t.Error("nothing was written at the end")
	}
	for _, pa := range dirty {
		copy(copied[pa:pa+PageSize], host[pa:])
	}
	if !bytes.Equal(copied, host) {
		t.Fatal("the copy differs")
	}
	l.Stop()
}
