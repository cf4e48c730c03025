package hca_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/guestdrv"
)

// budgeted opens device i; the guest uses the given amount of memory.
func (s *site) budgeted(i, size int) (*client, *guestdrv.Buffer, *guestdrv.MR) {
	s.t.Helper()
	c := s.open(i)
	b, err := c.Alloc(size)
	if err != nil {
		s.t.Fatal(err)
	}
	mr, err := c.pd.Register(context.Background(), b,
		guestdrv.AccessLocalWrite|guestdrv.AccessRemoteRead|guestdrv.AccessRemoteWrite)
	if err != nil {
		s.t.Fatal(err)
	}
	return c, b, mr
}

// VMs whose memory is far larger than the part that the host may keep resident (PF-15):
// transfers all over it succeed, within the budget, with the real host driver.
// Then the guests disconnect under traffic, and all their memory is released.
func TestBudget(t *testing.T) { testBudget(t, peerOptions) }

// The same if no end retries RNR NAKs (HF-1).
func TestBudgetNoRetries(t *testing.T) {
	o := peerOptions
	o.RNRRetry = guestdrv.NoRetry
	testBudget(t, o)
}

func testBudget(t *testing.T, o guestdrv.ConnectOptions) {
	const (
		size   = 24 << 20
		budget = 6 << 20
		chunk  = 100_000
	)
	s := newSite(t, 2, 2, hca.Limits{}, budget)
	ca, ba, ma := s.budgeted(0, size)
	cb, bb, mb := s.budgeted(1, size)
	a, b := ca.end(t), cb.end(t)
	joinWith(t, a, b, o)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	rng := rand.New(rand.NewPCG(1, 2))
	wcs := make([]guestdrv.Completion, 4)
	post := func(i int, from, to int) error {
		return a.qp.PostSend(requests[i%2](uint64(i), mb.Remote(to), ma.SGE(from, chunk)).With(guestdrv.SendSignaled))
	}
	for i := range 300 {
		from, to := rng.IntN(size-chunk), rng.IntN(size-chunk)
		src := ba.Bytes()[from:][:chunk]
		if i%2 == 1 {
			src = bb.Bytes()[to:][:chunk]
		}
		for k := range src {
			src[k] = byte(i + k*k)
		}
		if err := post(i, from, to); err != nil {
			t.Fatal(err)
		}
		n, err := a.cq.PollWait(ctx, wcs)
		if err != nil || n != 1 || wcs[0].Status != guestdrv.WCSuccess {
			t.Fatalf("transfer %d: %d completions, %+v, %v; %+v", i, n, wcs[0], err, ca.h.dev.Describe().Faults)
		}
		if !bytes.Equal(ba.Bytes()[from:][:chunk], bb.Bytes()[to:][:chunk]) {
			t.Fatalf("transfer %d: data differs", i)
		}
	}
	for _, c := range []*client{ca, cb} {
		f := c.h.dev.Describe().Faults
		if f.Host.Raised < 50 || f.Host.Failed != 0 || f.Parked != 0 || f.Drains == 0 {
			t.Errorf("%+v", f)
		}
		if m := c.h.budget.Status(); m.Evictions == 0 || m.Resident > budget || m.Held == 0 {
			t.Errorf("%+v", m)
		}
	}
	for i := range 16 {
		if err := post(i, rng.IntN(size-chunk), rng.IntN(size-chunk)); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []*client{ca, cb} {
		at := time.Now()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if d := time.Since(at); d > patience/2 {
			t.Errorf("closing took %v", d)
		}
	}
	for _, h := range s.hosts {
		testutil.Eventually(t, "the device is idle", func() bool {
			st := h.dev.Describe()
			return !st.Connected && st.Faults.Parked == 0
		})
		// The guests' memory is neither held nor resident any more.
		testutil.Eventually(t, "its memory is released", func() bool {
			m := h.budget.Status()
			return m.Held == 0 && m.Resident == 0
		})
	}
}

// BenchmarkGuestFault is a WRITE of 8 bytes to a page that its guest makes present at
// once and clears afterwards. The metrics are the device's own: from raising the
// fault to RESUME_FAULT.
func BenchmarkGuestFault(b *testing.B) {
	s := newSite(b, 2, 1, hca.Limits{}, 0)
	ca, cb := s.open(0), s.open(1)
	defer ca.Close()
	defer cb.Close()
	x, y := ca.end(b), cb.end(b)
	join(b, x, y)
	page, err := cb.Alloc(4096)
	if err != nil {
		b.Fatal(err)
	}
	mr, err := cb.pd.RegisterOnDemand(context.Background(), 0x10000, 4096,
		guestdrv.AccessLocalWrite|guestdrv.AccessRemoteWrite,
		guestdrv.PagerFunc(func(_ context.Context, _ guestdrv.PageFault, pas []uint64) error {
			pas[0] = uint64(page.PA())
			return nil
		}))
	if err != nil {
		b.Fatal(err)
	}
	wcs := make([]guestdrv.Completion, 1)
	for b.Loop() {
		err := x.qp.PostSend(guestdrv.NewWrite(0, mr.Remote(0), ca.mr.SGE(0, 8)).With(guestdrv.SendSignaled))
		if err != nil {
			b.Fatal(err)
		}
		if n, err := x.cq.PollWait(b.Context(), wcs); n != 1 || err != nil || wcs[0].Status != guestdrv.WCSuccess {
			b.Fatalf("%d, %v, %+v", n, err, wcs[0])
		}
		if err := mr.Invalidate(context.Background(), 0x10000, 4096); err != nil {
			b.Fatal(err)
		}
	}
	f := cb.h.dev.Describe().Faults.Guest
	b.ReportMetric(float64(f.Median), "p50-ns")
	b.ReportMetric(float64(f.P99), "p99-ns")
	b.ReportMetric(float64(f.Mean), "mean-ns")
}
