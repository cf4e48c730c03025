package hostdriver

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vnicd/vnicd/translate"
)

// TestSetLimit: a limit below what must stay changes nothing; a higher one ends a wait for room.
func TestSetLimit(t *testing.T) {
	b := NewBudget(0)
	d, _ := newDriver(t, Options{Budget: b})
	slot(t, d, "vnicd-test-limit", 0, 64<<20)
	h, err := d.Hold(testContext(t), 0, 3<<20)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(limit, least uint64) {
		t.Helper()
		before := b.Status().Budget
		if n := b.Least(); n != least {
			t.Errorf("the least limit is %d bytes, want %d", n, least)
		}
		if err := b.SetLimit(limit); !errors.Is(err, ErrBudget) || b.Status().Budget != before {
			t.Errorf("a limit of %d: %v, %+v", limit, err, b.Status())
		}
	}
	set := func(limit uint64) {
		t.Helper()
		if err := b.SetLimit(limit); err != nil || b.Status().Budget != limit {
			t.Errorf("a limit of %d: %v, %+v", limit, err, b.Status())
		}
	}
	refused(5<<20, 6<<20)
	set(6 << 20)
	refused(5<<20, 6<<20)
	if _, err := d.Hold(testContext(t), 3<<20, 1); !errors.Is(err, ErrBudget) {
		t.Errorf("a hold beyond half of the new limit: %v", err)
	}
	h.Release()
	refused(MinBudget-1, MinBudget)
	set(MinBudget)
	set(0)
	set(MinBudget)

	full := NewBudget(MinBudget) // with nothing that can be evicted
	full.used = MinBudget
	took := make(chan error)
	go func() {
		full.mu.Lock()
		defer full.mu.Unlock()
		took <- full.takeLocked(testContext(t), minGranule)
	}()
	for waits := false; !waits; time.Sleep(time.Millisecond) {
		full.mu.Lock()
		waits = full.waiting > 0
		full.mu.Unlock()
	}
	if err := full.SetLimit(MinBudget + minGranule); err != nil {
		t.Error(err)
	}
	if err := <-took; err != nil {
		t.Error(err)
	}

	// 64 GiB without a limit: granules of 512 KiB.
	b2 := NewBudget(0)
	d2, _ := newDriver(t, Options{Budget: b2})
	slot(t, d2, "vnicd-test-limit-large", 0, 64<<30)
	if n := b2.Least(); n != 8<<20 {
		t.Errorf("with large granules the least limit is %d", n)
	}
	d2.Close()
	if n := b2.Least(); n != MinBudget {
		t.Errorf("without memory the least limit is %d", n)
	}
}

// TestSetWeight: a weight changes what is divided at present (HF-4).
func TestSetWeight(t *testing.T) {
	s := newStand(t)
	one, _ := s.vm(t, 0, 100, 256<<20)
	two, _ := s.vm(t, 0, 100, 256<<20)
	s.wait(time.Second, 0)
	s.zone.Free, s.zone.Reserve = gib/16, gib/2
	s.wait(time.Minute, 0.3)
	if a, b := one.Status(), two.Status(); a.Target != b.Target || a.Target == 0 || a.Resident > a.Target {
		t.Errorf("%+v, %+v", a, b)
	}
	s.SetWeight(one, 300)
	if a, b := one.Status().Target, two.Status().Target; a < 140<<20 || b < 64<<20-1 || a+b > gib/4 {
		t.Errorf("targets of %d and %d bytes", a, b)
	}
	for s.shrink() {
	}
	if n := two.Status(); n.Resident > n.Target {
		t.Errorf("%+v", n)
	}
	gone := NewBudget(0)
	s.SetWeight(gone, 300)
	if s.wait(time.Second, 0.3); gone.Status().Target != 0 {
		t.Error("a VM that was not added has a share")
	}
}

// TestSetLimitInUse: while both faces of a VM use its memory, the limit falls to an eighth of it and rises again. What
// is resident follows, in the kernel's account too, and no byte is wrong (PF-15).
func TestSetLimitInUse(t *testing.T) {
	const name, size, pa = "vnicd-test-limit-used", 64 << 20, translate.PA(1 << 32)
	b := NewBudget(0)
	_, s, _ := twoFaces(t, b, name, size)
	ctx := testContext(t)
	stop := make(chan struct{})
	var ends sync.WaitGroup
	var accesses [2]atomic.Uint64
	end := sync.OnceFunc(func() { close(stop); ends.Wait() })
	defer end()
	for i := range s {
		if err := fetchAll(ctx, s[i], pa, size); err != nil {
			t.Fatal(err)
		}
		ends.Go(func() { // counts in words of its own
			rnd := rand.New(rand.NewPCG(1, uint64(i)))
			want := map[translate.PA]uint64{}
			for {
				select {
				case <-stop:
					return
				default:
				}
				at := pa + translate.PA(rnd.IntN(size/translate.PageSize)*translate.PageSize+8*i)
				err := access(ctx, s[i], i, at, 8, func(m []byte) {
					if n := binary.NativeEndian.Uint64(m); n != want[at] {
						t.Errorf("face %d at %v: %d, want %d", i, at, n, want[at])
					}
					want[at]++
					binary.NativeEndian.PutUint64(m, want[at])
				})
				if err != nil {
					t.Errorf("face %d: %v", i, err)
					return
				}
				accesses[i].Add(1)
			}
		})
	}
	work := func() { // both faces, for a while
		t.Helper()
		for i := range accesses {
			for n := accesses[i].Load() + 2000; accesses[i].Load() < n && !t.Failed(); time.Sleep(time.Millisecond) {
			}
		}
	}
	work()
	if st, u := b.Status(), smaps(t, name); st.Resident != size || u.rss != size {
		t.Errorf("without a limit: %+v, %+v", st, u)
	}
	check := func(least, most uint64) {
		t.Helper()
		// The kernel counts page by page: what is evicted meanwhile, and what comes in its place, may both count.
		st, u, moved := b.Status(), smaps(t, name), uint64(16*minGranule)
		if st.Resident < least || st.Resident > most || u.rss > most+moved || u.locked > most+moved {
			t.Errorf("%d to %d bytes may be resident: %d are, in the kernel's account %+v", least, most, st.Resident, u)
		}
	}
	for _, limit := range []uint64{size / 8, MinBudget, size / 2, size / 8} {
		before := b.Status()
		if err := b.SetLimit(limit); err != nil {
			t.Fatal(err)
		}
		if err := b.Settle(ctx); err != nil {
			t.Fatal(err)
		}
		check(0, limit)
		work()
		check(min(limit, before.Resident)/2, limit)
		if limit > before.Budget && b.Status().Resident <= before.Budget && before.Budget != 0 {
			t.Errorf("a higher limit changed nothing: %d bytes are resident, before %d", b.Status().Resident, before.Resident)
		}
	}
	if n := b.Status().Evictions; n < (size-size/8)/minGranule {
		t.Errorf("%d evictions", n)
	}
	if err := b.SetLimit(0); err != nil {
		t.Fatal(err)
	}
	end()
	for i := range s {
		if err := fetchAll(ctx, s[i], pa, size); err != nil {
			t.Fatal(err)
		}
	}
	check(size, size)

	// Faults alone lower it too, without one of them waiting for all.
	if err := b.SetLimit(size / 8); err != nil {
		t.Fatal(err)
	}
	check(size, size)
	b.mu.Lock()
	before := b.counters.evictions
	err := b.takeLocked(ctx, minGranule)
	n := b.counters.evictions - before
	b.giveLocked(minGranule)
	b.mu.Unlock()
	if err != nil || n != 2 {
		t.Errorf("%d evictions for one granule: %v", n, err)
	}
	for range size / minGranule {
		b.mu.Lock()
		err := b.takeLocked(ctx, minGranule)
		b.giveLocked(minGranule)
		b.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(0, size/8)
	if err := audit(b, true); err != nil {
		t.Error(err)
	}

	// Memory in use stays until its reader leaves; Settle waits for that as long as it may.
	if err := b.SetLimit(0); err != nil {
		t.Fatal(err)
	}
	if err := fetchAll(ctx, s[0], pa, size); err != nil {
		t.Fatal(err)
	}
	token := s[0].Epochs().Enter(translate.ByLoop(3))
	if err := b.SetLimit(MinBudget); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if err := b.Settle(short); !errors.Is(err, context.DeadlineExceeded) || b.Status().Resident <= MinBudget {
		t.Errorf("%v, %+v", err, b.Status())
	}
	s[0].Epochs().Leave(3, token)
	if err := b.Settle(ctx); err != nil {
		t.Error(err)
	}
	check(0, MinBudget)
}

// fetchAll raises a fault for each granule.
func fetchAll(ctx context.Context, s *translate.Space, pa translate.PA, size uint64) error {
	for at := uint64(0); at < size; at += minGranule {
		if err := fetch(ctx, s, pa+translate.PA(at), 1); err != nil {
			return err
		}
	}
	return nil
}
