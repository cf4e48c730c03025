package hostdriver

import (
	"context"
	"errors"
	"testing"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/translate"
)

// waiter is an operation that waits for a fault.
type waiter struct {
	translate.Fault
	done chan error
}

// raise raises n faults in s, a granule apart, from pa on.
func raise(s *translate.Space, pa translate.PA, n int) []*waiter {
	ws := make([]*waiter, n)
	for i := range ws {
		w := &waiter{done: make(chan error, 1)}
		w.Miss = translate.Miss{Kind: translate.HostFault, Where: translate.Where{PA: pa + translate.PA(i*minGranule)},
			Len: 1}
		w.Done = func(_ *translate.Fault, err error) { w.done <- err }
		s.Faults().Raise(&w.Fault)
		ws[i] = w
	}
	return ws
}

// stall makes every fault that needs a new page of r's mapping hang, as on a dead swap device, until the returned
// function is called.
func stall(t *testing.T, r *region) (release func()) {
	t.Helper()
	return testutil.NewUserFaults(t, r.m.whole, false).Close
}

// fills counts the granules that are being made resident.
func fills(b *Budget) (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for d := range b.drivers {
		for _, r := range d.regions {
			for _, g := range r.m.granules {
				if g.state == filling {
					n++
				}
			}
		}
	}
	return n
}

// Close during faults: faults in the kernel, faults that wait for them and queued faults all end with an error, and
// nothing stays.
func TestCloseAmidFaults(t *testing.T) {
	const name = "vnicd-test-amid-close"
	b := NewBudget(MinBudget)
	d, s := newDriver(t, Options{Budget: b})
	slot(t, d, name, 0, 64<<20)
	release := stall(t, d.regions[0])
	ws := append(raise(s, 0, 3*servers), raise(s, 0, 2)...)
	testutil.Eventually(t, "all servers are stuck", func() bool { return fills(b) == servers })
	held := make(chan error, 1)
	go func() {
		_, err := d.Hold(context.Background(), 0, 1)
		held <- err
	}()
	closed := make(chan struct{})
	go func() { d.Close(); close(closed) }()
	testutil.Eventually(t, "slot is withdrawn", func() bool { return !s.Contains(0, 1) })
	select {
	case <-closed:
		t.Fatal("unmapped while the kernel fills it")
	default:
	}
	release()
	<-closed
	for i, w := range ws {
		if err := <-w.done; !errors.Is(err, ErrClosed) && !errors.Is(err, translate.ErrMemoryGone) &&
			!errors.Is(err, translate.ErrMiss) {
			t.Errorf("fault %d: %v", i, err)
		}
	}
	if err := <-held; err == nil {
		t.Error("Hold succeeded on a closed driver")
	}
	if n := mappings(t, name); n != 0 {
		t.Errorf("%d mappings left", n)
	}
	if st := b.Status(); st.Resident != 0 || st.Held != 0 || st.FailedFaults != uint64(len(ws)) {
		t.Errorf("%+v", st)
	}
}

// A slot is removed during its faults; faults of other slots are served.
func TestRemoveAmidFaults(t *testing.T) {
	const name = "vnicd-test-amid-remove"
	b := NewBudget(0)
	d, s := newDriver(t, Options{Budget: b})
	slot(t, d, name, 0, 8<<20)
	slot(t, d, "vnicd-test-amid-other", 8<<20, 8<<20)
	r := d.regions[0]
	release := stall(t, r)
	ws := raise(s, 0, servers-1)
	testutil.Eventually(t, "servers are stuck", func() bool { return fills(b) == servers-1 })
	removed := make(chan error, 1)
	go func() { removed <- d.RemoveSlot(0, 8<<20, 0x7f0000000000) }()
	testutil.Eventually(t, "slot is withdrawn", func() bool { return !s.Contains(0, 1) })
	if err := fetch(testContext(t), s, 8<<20, 1<<20); err != nil {
		t.Error("a fault in another slot:", err)
	}
	if err := fetch(testContext(t), s, 0, 1); !errors.Is(err, translate.ErrMiss) {
		t.Error("a fault in the removed slot:", err)
	}
	release()
	if err := <-removed; err != nil {
		t.Fatal(err)
	}
	for _, w := range ws {
		if err := <-w.done; !errors.Is(err, translate.ErrMemoryGone) {
			t.Error(err)
		}
	}
	if n := mappings(t, name); n != 0 {
		t.Errorf("%d mappings left", n)
	}
	// A fault found its slot just before the slot was removed.
	if _, err := b.bring(context.Background(), r, 100, false); !errors.Is(err, translate.ErrMemoryGone) {
		t.Error(err)
	}
	if err := audit(b, true); err != nil {
		t.Error(err)
	}
}

// One VM whose memory is never served does not delay another VM (PF-8, PF-16).
func TestFaultsOfOthers(t *testing.T) {
	stuckB := NewBudget(MinBudget)
	stuck, stuckS := newDriver(t, Options{Budget: stuckB})
	slot(t, stuck, "vnicd-test-others-stuck", 0, 64<<20)
	release := stall(t, stuck.regions[0])
	defer release()
	ws := raise(stuckS, 0, 500)
	testutil.Eventually(t, "servers are stuck", func() bool { return fills(stuckB) == servers })
	d, s := newDriver(t, Options{Budget: NewBudget(MinBudget)})
	slot(t, d, "vnicd-test-others", 0, 64<<20)
	ctx := testContext(t)
	for i := range 1000 {
		if err := fetch(ctx, s, translate.PA(i*minGranule), 1); err != nil {
			t.Fatal(err)
		}
	}
	for _, w := range ws {
		if !w.Waiting() {
			t.Fatal("a fault ended without its memory")
		}
	}
	release()
	for _, w := range ws {
		if err := <-w.done; err != nil {
			t.Fatal(err)
		}
	}
	st := d.Status()
	t.Logf("service beside a stuck VM: mean %v, 99%% within %v", st.FaultTime.Mean(), st.FaultTime.Quantile(0.99))
}

// A fault whose waiter has gone, and many faults for the same memory.
func TestSameGranule(t *testing.T) {
	b := NewBudget(0)
	d, s := newDriver(t, Options{Budget: b})
	slot(t, d, "vnicd-test-same", 0, 8<<20)
	release := stall(t, d.regions[0])
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan error, 1)
	go func() { gone <- fetch(ctx, s, 1<<20, 1) }()
	var ws []*waiter
	for range 100 {
		ws = append(ws, raise(s, 1<<20, 1)...)
	}
	testutil.Eventually(t, "one server is stuck", func() bool { return fills(b) == 1 })
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if s.Faults().Raise(&ws[0].Fault) {
		t.Error("a waiting fault was raised again")
	}
	release()
	for _, w := range ws {
		if err := <-w.done; err != nil {
			t.Error(err)
		}
	}
	if st := b.Status(); st.Resident != minGranule || st.HostFaults != 101 {
		t.Errorf("%+v", st)
	}
}
