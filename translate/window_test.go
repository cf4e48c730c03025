package translate

import (
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// TestWindowModel: after any change of the tables a window answers as its space does. A ring's is the same under every
// attribute; one of data yields nothing unless the device may read and write (PF-3).
func TestWindowModel(t *testing.T) {
	const pages = 8
	const base = PA(leafSize - pages/2*PageSize) // in two leaves
	host := hostMem(t, 2*pages*PageSize)
	s := NewSpace(3)
	var attribute Attribute
	attribute.Bind(s)
	// find returns what is contiguous from pa on, whatever the attribute is.
	find := func(pa PA, n int) ([]byte, MissKind) {
		h, got, kind := s.span(pa, uint64(n))
		if kind != None {
			return nil, kind
		}
		return hostBytes(h, int(got)), None
	}
	rng := rand.New(rand.NewPCG(4, 1))
	var windows []RingWindow
	var data []Window // at the same places
	for range 12 {
		at := rng.Uint64N(pages*PageSize-64) &^ 1
		n := min(64+rng.Uint64N(3*PageSize), pages*PageSize-at)
		windows, data = append(windows, s.RingWindow(base+PA(at), n)), append(data, s.Window(base+PA(at), n))
	}
	var raw [16]byte
	found := 0
	for range 20000 {
		p := rng.Uint64N(pages)
		pa, n := base+PA(p<<PageShift), min(1+rng.Uint64N(3), pages-p)<<PageShift
		switch rng.IntN(5) {
		case 0:
			_ = s.Reserve(pa, n)
		case 1: // mostly contiguous
			h := host[p<<PageShift:][:n]
			if rng.IntN(4) == 0 {
				h = host[(pages+p)<<PageShift:][:n]
			}
			_ = s.Map(pa, h)
		case 2:
			if rng.IntN(3) == 0 {
				_ = s.Withdraw(pa, n)
			}
		case 3:
			if rng.IntN(3) == 0 {
				_ = s.Unmap(pa, n)
			}
		case 4:
			u := Uplink(0)
			if rng.IntN(3) == 0 {
				u = []Uplink{UplinkReadOnly, UplinkBlocked}[rng.IntN(2)]
			}
			if _, err := attribute.Set(u); err != nil {
				t.Fatal(err)
			}
		}
		for i := range windows {
			w := &windows[i]
			off := rng.Uint64N(w.n - 16)
			word, m := w.Uint32(off)
			want, wm := s.RingUint32(w.pa + PA(off))
			if word != want || m != wm {
				t.Fatalf("Uint32 %v+%d: %p %+v, the space says %p %+v", w.pa, off, word, m, want, wm)
			}
			word, shift, m := w.Around(off &^ 1)
			at := w.pa + PA(off&^1)
			want, wm = s.RingUint32(at &^ 3)
			if word != want || m != wm || shift != uint(at&2)*8 {
				t.Fatalf("Around %v: %p %d %+v, the space says %p %+v", at, word, shift, m, want, wm)
			}
			at = w.pa + PA(off)
			fill := [8]byte{byte(rng.Uint32()), 1, 2, 3, 4, 5, 6, byte(rng.Uint32())}
			m = w.Write8(off, &fill)
			_, kind := find(at, 8)
			if kind == None {
				_, kind = find(at+7, 1)
			}
			if m.Kind != kind {
				t.Fatalf("Write8 %v: %+v, the space says %v", at, m, kind)
			}
			wrote := m.OK()
			var direct [16]byte
			m, wm = w.Read16(&raw, off), s.RingRead(direct[:], at)
			if m != wm || m.OK() && raw != direct {
				t.Fatalf("Read16 %v: %x %+v, the space says %x %+v", at, raw, m, direct, wm)
			}
			if wrote && m.OK() && [8]byte(raw[:8]) != fill {
				t.Fatalf("Read16 %v: %x behind Write8 of %x", at, raw, fill)
			}
			size := 1 + rng.Uint64N(w.n)
			switch got := w.Bytes(size); {
			case got == nil:
				if w.ok {
					t.Fatalf("Bytes(%d) of %d at %v: none", size, w.n, w.pa)
				}
			default:
				if direct, _ := find(w.pa, int(size)); len(direct) != int(size) || len(got) != int(size) ||
					&direct[0] != &got[0] {
					t.Fatalf("Bytes(%d) at %v: %p %d, the space says %p %d", size, w.pa, got, len(got), direct, len(direct))
				}
			}
			if w.Bytes(w.n+1) != nil {
				t.Fatal("bytes beyond the window")
			}
			if got, ring := data[i].Bytes(size), w.Bytes(size); attribute.Uplink() == UplinkReadWrite && ring != nil {
				if len(got) != len(ring) || &got[0] != &ring[0] {
					t.Fatalf("data window %v: %d bytes at %p, the ring's has %d at %p", w.pa, len(got), got, len(ring), ring)
				}
			} else if got != nil {
				t.Fatalf("data window %v of %d yields %d bytes under %v", w.pa, w.n, len(got), attribute.Uplink())
			}
			w.Prefetch(rng.IntN(2) == 0)
			data[i].Prefetch(rng.IntN(2) == 0)
			if w.ok {
				found++
			}
		}
	}
	if found < 10000 {
		t.Errorf("windows were contiguous only %d times", found)
	}
}

// TestWindowRelease: once a release is done, no window reads the removed memory.
func TestWindowRelease(t *testing.T) {
	const n = PageSize
	host := [2][]byte{hostMem(t, n), hostMem(t, n)}
	const gone = 0xdeadbeef
	s := NewSpace(1)
	mustMap(t, s, 0, host[0])
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for slot := range 2 {
		wg.Go(func() {
			w := s.RingWindow(0, n)
			var raw [16]byte
			for {
				select {
				case <-stop:
					return
				default:
				}
				e := s.Epochs().Enter(ByLoop(slot))
				for range 8 {
					if m := w.Read16(&raw, 64); m.OK() && binary.NativeEndian.Uint32(raw[:]) == gone {
						t.Error("read removed memory")
						s.Epochs().Leave(slot, e)
						return
					}
				}
				s.Epochs().Leave(slot, e)
			}
		})
	}
	for i := range 150 {
		if err := s.Unmap(0, n); err != nil {
			t.Fatal(err)
		}
		for d := s.Epochs().Flip(); !d.Done(); {
			runtime.Gosched()
		}
		// No reader may access it now; the race detector would report one.
		binary.NativeEndian.PutUint32(host[i%2][64:], gone)
		binary.NativeEndian.PutUint32(host[1-i%2][64:], uint32(i))
		mustMap(t, s, 0, host[1-i%2])
	}
	close(stop)
	wg.Wait()
}

// TestPrefetch: no address faults, not even in memory that was unmapped.
func TestPrefetch(t *testing.T) {
	s := NewSpace(1)
	mustMap(t, s, 0, hostMem(t, PageSize))
	gone := hostMem(t, PageSize)
	mustMap(t, s, PageSize, gone)
	if err := s.Reserve(4*PageSize, PageSize); err != nil {
		t.Fatal(err)
	}
	if err := unix.Munmap(gone); err != nil {
		t.Fatal(err)
	}
	for _, pa := range []PA{0, 100, PageSize - 1, PageSize, 2*PageSize - 1, 2 * PageSize, 4 * PageSize, MaxPA, ^PA(0)} {
		s.Prefetch(pa, false)
		s.Prefetch(pa, true)
	}
}
