package hostdriver

import (
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/translate"
)

// A slot costs nothing until it is used. Used pages are in the table, their neighbours are not.
func TestDemand(t *testing.T) {
	const name = "vnicd-test-demand"
	d, s := newDriver(t, Options{})
	fd := slot(t, d, name, 1<<32, 64<<20)
	if u := smaps(t, name); u.rss != 0 || !u.lockedFlag {
		t.Errorf("fresh: %+v", u)
	}
	if _, m := s.Host(1<<32, 1); m.Kind != translate.HostFault {
		t.Fatalf("absent page: %v", m.Kind)
	}
	ctx := testContext(t)
	if err := fetch(ctx, s, 1<<32+0x12345, 1); err != nil {
		t.Fatal(err)
	}
	for pa, want := range map[translate.PA]bool{0: false, 0xffff: false, 0x10000: true, 0x1ffff: true, 0x20000: false} {
		if got := present(s, 1<<32+pa); got != want {
			t.Errorf("%v present: %v", pa, got)
		}
	}
	// A fault brings in what it asks for, up to 2 MiB, and not beyond the slot.
	if err := fetch(ctx, s, 1<<32+1<<20, 1<<40); err != nil {
		t.Fatal(err)
	}
	if err := fetch(ctx, s, 1<<32+64<<20-1, 1<<20); err != nil {
		t.Fatal(err)
	}
	for pa, want := range map[translate.PA]bool{1 << 20: true, 3<<20 - 1: true, 3 << 20: false, 64<<20 - 1: true} {
		if got := present(s, 1<<32+pa); got != want {
			t.Errorf("%v present: %v", pa, got)
		}
	}
	want := uint64(2<<20 + 2*minGranule)
	if u, st := smaps(t, name), d.Status(); u.rss != want || u.locked != want || st.Resident != want ||
		st.HostFaults != 3 || st.FailedFaults != 0 || st.FaultTime.Count != 3 {
		t.Errorf("%+v, %+v, expected %d bytes resident", u, st, want)
	}
	// The device's writes arrive in the file.
	if err := access(ctx, s, 0, 1<<32+8<<20, 5, func(b []byte) { copy(b, "hello") }); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 5)
	if _, err := unix.Pread(fd, got, 8<<20); err != nil || string(got) != "hello" {
		t.Errorf("%q, %v", got, err)
	}
	if err := fetch(ctx, s, 1<<32-1, 1); !errors.Is(err, translate.ErrMiss) {
		t.Errorf("outside of every slot: %v", err)
	}
	if err := audit(d.opts.Budget, true); err != nil {
		t.Error(err)
	}
}

// An inactive granule that is used again comes back without the kernel. Other inactive ones are evicted, oldest first;
// held ones stay.
func TestBudgetOrder(t *testing.T) {
	const name = "vnicd-test-order"
	b := NewBudget(MinBudget)
	d, s := newDriver(t, Options{Budget: b})
	slot(t, d, name, 0, 16<<20)
	ctx := testContext(t)
	pa := func(i int) translate.PA { return translate.PA(i * minGranule) }
	h, err := d.Hold(ctx, pa(0)+100, 8)
	if err != nil {
		t.Fatal(err)
	}
	const fit = MinBudget / minGranule
	for i := range fit {
		if err := fetch(ctx, s, pa(i), 1); err != nil {
			t.Fatal(err)
		}
	}
	st := b.Status()
	if st.Resident != MinBudget || st.Held != minGranule || st.Inactive == 0 || st.Evictions != 0 {
		t.Fatalf("full: %+v", st)
	}
	if present(s, pa(1)) || !present(s, pa(0)) || !present(s, pa(fit-1)) {
		t.Fatal("granule 1 is the oldest that is not held: only it and its successors are withdrawn")
	}
	if err := fetch(ctx, s, pa(1), 1); err != nil || !present(s, pa(1)) {
		t.Fatal(err)
	}
	if st := b.Status(); st.Refaults != 1 || st.Evictions != 0 {
		t.Errorf("second chance: %+v", st)
	}
	// Many more faults: the granule that was used again outlives its neighbour.
	for i := fit; i < fit+2; i++ {
		if err := fetch(ctx, s, pa(i), 1); err != nil {
			t.Fatal(err)
		}
	}
	b.mu.Lock()
	gs := d.regions[0].m.granules
	if gs[1] == nil || gs[2] != nil || gs[3] != nil {
		t.Errorf("granules 1..3: %v %v %v, expected 1 to be there", gs[1], gs[2], gs[3])
	}
	b.mu.Unlock()
	for i := range 3 * fit {
		if err := fetch(ctx, s, pa(fit+i), 1); err != nil {
			t.Fatal(err)
		}
		if u := smaps(t, name); u.rss > MinBudget {
			t.Fatalf("%+v", u)
		}
		if err := audit(b, true); err != nil {
			t.Fatal(err)
		}
	}
	if !present(s, pa(0)) {
		t.Error("held memory was withdrawn")
	}
	h.Release()
	h.Release()
	for i := range 2 * fit {
		if err := fetch(ctx, s, pa(fit+i), 1); err != nil {
			t.Fatal(err)
		}
	}
	if st := b.Status(); present(s, pa(0)) || st.Held != 0 {
		t.Errorf("released, but still present: %+v", st)
	}
}

// EP-2, EP-3: memory is evicted only when nothing uses it, even if the budget is full; the evictor waits, not the user.
func TestEvictionWaitsForReaders(t *testing.T) {
	const name = "vnicd-test-evict"
	b := NewBudget(MinBudget)
	d, s := newDriver(t, Options{Budget: b})
	slot(t, d, name, 0, 16<<20)
	ctx := testContext(t)
	if err := fetch(ctx, s, 0, 1); err != nil {
		t.Fatal(err)
	}
	tok := s.Epochs().Enter(translate.ByLoop(2))
	mem, _ := s.Host(0, minGranule)
	var after atomic.Bool
	done := make(chan error, 1)
	go func() {
		for i := range 2 * MinBudget / minGranule {
			if err := fetch(ctx, s, translate.PA(i*minGranule), 1); err != nil {
				done <- err
				return
			}
		}
		if !after.Load() {
			done <- errors.New("granule 0 was evicted under its reader")
		}
		done <- nil
	}()
	for deadline := time.Now().Add(30 * time.Second); b.Status().Resident < MinBudget; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("budget does not fill")
		}
	}
	mem[0], mem[minGranule-1] = 1, 2
	time.Sleep(20 * time.Millisecond) // time for a premature eviction
	if u := smaps(t, name); u.rss != MinBudget {
		t.Errorf("%+v", u)
	}
	after.Store(true)
	s.Epochs().Leave(2, tok)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestHoldLimits(t *testing.T) {
	b := NewBudget(MinBudget)
	d, s := newDriver(t, Options{Budget: b})
	slot(t, d, "vnicd-test-hold", 0, 8<<20)
	slot(t, d, "vnicd-test-hold", 8<<20, 8<<20)
	ctx := testContext(t)
	h, err := d.Hold(ctx, 8<<20-1, 2) // across two slots
	if err != nil || b.Status().Held != 2*minGranule {
		t.Fatal(err, b.Status())
	}
	if _, err := d.Hold(ctx, 0, MinBudget/2); !errors.Is(err, ErrBudget) {
		t.Errorf("a hold of more than half the budget: %v", err)
	}
	if _, err := d.Hold(ctx, 16<<20-1, 2); !errors.Is(err, translate.ErrMiss) {
		t.Errorf("beyond memory: %v", err)
	}
	if _, err := d.Hold(ctx, ^translate.PA(0), 2); !errors.Is(err, translate.ErrMiss) {
		t.Errorf("wraps: %v", err)
	}
	if st := b.Status(); st.Held != 2*minGranule {
		t.Errorf("a hold that failed left something: %+v", st)
	}
	h2, err := d.Hold(ctx, 8<<20-8, 8) // again
	if err != nil || b.Status().Held != 2*minGranule {
		t.Fatal(err, b.Status())
	}
	h.Release()
	if err := d.RemoveSlot(0, 8<<20, 0x7f0000000000); err != nil { // also while held
		t.Fatal(err)
	}
	if _, m := s.Host(8<<20-8, 8); m.Kind != translate.BadAddress {
		t.Error(m.Kind)
	}
	h2.Release()
	if st := b.Status(); st.Held != 0 || st.Resident != 2*minGranule { // both in the remaining slot
		t.Errorf("%+v", st)
	}
	if err := audit(b, true); err != nil {
		t.Error(err)
	}
}

// A balloon takes pages that the device has mapped, and Resync finds them.
func TestResync(t *testing.T) {
	const name = "vnicd-test-balloon"
	b := NewBudget(0)
	d, s := newDriver(t, Options{Budget: b})
	fd := slot(t, d, name, 0, 8<<20)
	ctx := testContext(t)
	h, err := d.Hold(ctx, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Release()
	for i := range translate.PA(4) {
		if err := access(ctx, s, 0, i*minGranule, 8, func(b []byte) { copy(b, "contents") }); err != nil {
			t.Fatal(err)
		}
	}
	for _, off := range []int64{0x3000, minGranule + 0x3000, 3 * minGranule} {
		if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, 4096); err != nil {
			t.Fatal(err)
		}
	}
	b.Resync()
	if !present(s, 0) || present(s, minGranule) || !present(s, 2*minGranule) || present(s, 3*minGranule) {
		t.Error("want granules 1 and 3 withdrawn: 0 is held, 2 is complete")
	}
	if st := b.Status(); st.Discarded != 2 || st.Resident != 2*minGranule {
		t.Errorf("%+v", st)
	}
	if err := audit(b, true); err != nil {
		t.Error(err)
	}
	for i, want := range []string{"contents", "contents", "contents", "\x00\x00\x00\x00\x00\x00\x00\x00"} {
		if err := access(ctx, s, 0, translate.PA(i*minGranule), 8, func(b []byte) {
			if string(b) != want {
				t.Errorf("granule %d has %q, want %q", i, b, want)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	d.Resync()
	if st := b.Status(); st.Discarded != 2 {
		t.Errorf("Resync without new holes: %+v", st)
	}
}

// If memory vanished, the fault gets an error; there is no SIGBUS (PF-13).
func TestFaultOnShrunkFile(t *testing.T) {
	d, s := newDriver(t, Options{})
	fd := memfd(t, "vnicd-test-gone", 8<<20, 0, 0)
	if err := d.AddSlot(Slot{Size: 8 << 20, FD: fd}); err != nil {
		t.Fatal(err)
	}
	ctx := testContext(t)
	if err := fetch(ctx, s, 4<<20, 1); err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, 2<<20+0x1000); err != nil {
		t.Fatal(err)
	}
	for _, pa := range []translate.PA{2 << 20, 3 << 20} {
		if err := fetch(ctx, s, pa, 1); !errors.Is(err, translate.ErrMemoryGone) {
			t.Errorf("%v: %v", pa, err)
		}
	}
	if err := fetch(ctx, s, 1<<20, 1<<20); err != nil {
		t.Error(err)
	}
	if _, err := d.Hold(ctx, 1<<20, 3<<20); !errors.Is(err, translate.ErrMemoryGone) {
		t.Error(err)
	}
	d.Resync()
	if present(s, 4<<20) {
		t.Error("vanished memory is in the table")
	}
	if st := d.Status(); st.Resident != 1<<20 || st.FailedFaults != 2 || st.Held != 0 {
		t.Errorf("%+v", st)
	}
	if err := audit(d.opts.Budget, true); err != nil {
		t.Error(err)
	}
}

// model runs random operations on two drivers of one budget from several goroutines. Only its writer knows each byte's
// value. Slots are added and removed; pages are held, punched, read. The accounting is audited throughout.
func TestModel(t *testing.T) {
	const (
		name    = "vnicd-test-model"
		size    = 8 << 20
		workers = 4
		rounds  = 400
	)
	b := NewBudget(MinBudget)
	ctx := testContext(t)
	type half struct {
		d    *Driver
		s    *translate.Space
		fd   [2]int
		gone [2]sync.RWMutex // held for writing while the slot is removed
	}
	var halves [2]half
	add := func(h *half, i int) error {
		return h.d.AddSlot(Slot{GuestPA: uint64(i) * size, UserAddr: uint64(i) * size, Size: size, FD: h.fd[i]})
	}
	for k := range halves {
		h := &halves[k]
		h.d, h.s = newDriver(t, Options{Budget: b})
		for i := range h.fd {
			h.fd[i] = memfd(t, name, size, 0, unix.F_SEAL_SHRINK)
			if err := add(h, i); err != nil {
				t.Fatal(err)
			}
		}
	}
	var wg sync.WaitGroup
	fail := func(err error) {
		if err != nil {
			t.Error(err)
		}
	}
	for w := range workers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(w)))
			// Each worker owns every 4th 4 KiB page of everything.
			value := map[[3]int]byte{}
			type hold struct {
				h     *Hold
				k, at int
				slot  int
			}
			var holds []hold
			for n := range rounds {
				k, i := rnd.IntN(2), rnd.IntN(2)
				page := rnd.IntN(size/4096/workers)*workers + w
				if rnd.IntN(2) == 0 {
					page = page % 512 // some are used more often
					page = page/workers*workers + w
				}
				h := &halves[k]
				pa := translate.PA(i*size + page*4096)
				op := rnd.IntN(20)
				h.gone[i].RLock()
				switch {
				case op < 12: // read what was written, write something else
					key := [3]int{k, i, page}
					next := byte(n*workers + w)
					fail(access(ctx, h.s, w, pa, 4096, func(mem []byte) {
						for _, at := range []int{0, 1234, 4095} {
							if mem[at] != value[key] {
								t.Errorf("driver %d, %v+%d: %d, want %d", k, pa, at, mem[at], value[key])
							}
							mem[at] = next
						}
					}))
					value[key] = next
				case op < 14:
					if x, err := h.d.Hold(ctx, pa, uint64(1+rnd.IntN(3*minGranule))); err == nil {
						holds = append(holds, hold{x, k, page, i})
						if !present(h.s, pa) {
							t.Errorf("driver %d, %v is held and absent", k, pa)
						}
					} else if !errors.Is(err, ErrBudget) && !errors.Is(err, translate.ErrMiss) &&
						!errors.Is(err, translate.ErrMemoryGone) {
						fail(err) // the range may reach into the second slot, which may be removed
					}
				case op < 17 && len(holds) > 0:
					x := rnd.IntN(len(holds))
					holds[x].h.Release()
					holds = append(holds[:x], holds[x+1:]...)
				case op == 17: // a balloon takes a page of this worker
					fail(unix.Fallocate(h.fd[i], unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(page*4096), 4096))
					delete(value, [3]int{k, i, page})
					h.d.Resync()
				case op == 18:
					fail(audit(b, false))
				case op == 19 && n%5 == 0:
					h.gone[i].RUnlock()
					h.gone[i].Lock()
					fail(h.d.RemoveSlot(uint64(i)*size, size, uint64(i)*size))
					if err := fetch(ctx, h.s, pa, 1); !errors.Is(err, translate.ErrMiss) {
						t.Errorf("fault in a removed slot: %v", err)
					}
					fail(add(h, i))
					h.gone[i].Unlock()
					h.gone[i].RLock()
				}
				h.gone[i].RUnlock()
			}
			for _, x := range holds {
				x.h.Release()
			}
			for key, want := range value {
				got := make([]byte, 1)
				if _, err := unix.Pread(halves[key[0]].fd[key[1]], got, int64(key[2]*4096+1234)); err != nil || got[0] != want {
					t.Errorf("file %v: %d, %v, want %d", key, got[0], err, want)
				}
			}
		})
	}
	stop := make(chan struct{})
	go func() { wg.Wait(); close(stop) }()
	for running := true; running; {
		select {
		case <-stop:
			running = false
		case <-time.After(5 * time.Millisecond):
		}
		b.mu.Lock() // the kernel counts page by page, so nothing may move meanwhile
		if u := smaps(t, name); u.rss > MinBudget {
			t.Errorf("%+v, budget %d", u, MinBudget)
		}
		b.mu.Unlock()
		if err := audit(b, !running); err != nil {
			t.Error(err)
		}
	}
	st := b.Status()
	t.Logf("%+v", st)
	if st.Held != 0 || st.Evictions == 0 || st.Refaults == 0 || st.Discarded == 0 {
		t.Errorf("%+v", st)
	}
	halves[0].d.Close()
	halves[1].d.Close()
	if st := b.Status(); st.Resident != 0 {
		t.Errorf("after Close: %+v", st)
	}
}
