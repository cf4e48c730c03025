package guestdrv_test

import (
	"bytes"
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/guestdrv"
)

// TestRemoteAt addresses an implicit region by VAs. Its pages can be set by its Pager only.
func TestRemoteAt(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	const base, at = 1 << 40, 1<<40 + 100
	buf, err := hb.Alloc(page)
	if err != nil {
		t.Fatal(err)
	}
	far, err := hb.pd.RegisterImplicit(bg, allAccess, guestdrv.PagerFunc(
		func(_ context.Context, f guestdrv.PageFault, pas []uint64) error {
			if f.VA == base {
				pas[0] = buf.PA()
			}
			return nil
		}))
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := any(far).(interface {
		SetPages(context.Context, uint64, []uint64) error
	}); ok {
		t.Error("an on-demand region has SetPages, which bypasses Invalidate")
	}
	if p := far.RemoteAt(at); p != far.Remote(at) || p != (guestdrv.Remote{Addr: at, RKey: far.RKey()}) {
		t.Errorf("%+v, %+v by offset", p, far.Remote(at))
	}
	a, _ := connect(t, ha, hb, qpDefaults(), faulty)
	src, mr := ha.region(t, page, guestdrv.AccessLocalWrite)
	fill(src.Bytes(), 1)
	wr := guestdrv.NewWrite(1, far.RemoteAt(at), mr.SGE(0, 1000)).With(guestdrv.SendSignaled)
	if err := a.qp.PostSend(wr); err != nil {
		t.Fatal(err)
	}
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	if !bytes.Equal(buf.Bytes()[100:1100], src.Bytes()[:1000]) {
		t.Error("data differ")
	}
}

// TestRanges: SGE and Remote panic for what is not within the region, as a slice expression does.
func TestRanges(t *testing.T) {
	h := newRig(t, rigConfig{hosts: 1}).hosts[0]
	buf, mr := h.region(t, 3*page, allAccess)
	none := guestdrv.PagerFunc(func(context.Context, guestdrv.PageFault, []uint64) error { return errOutside })
	const base, length = 1<<40 + 100, 1 << 33
	large, err := h.pd.RegisterOnDemand(bg, base, length, allAccess, none)
	if err != nil {
		t.Fatal(err)
	}
	panics := func(f func()) (p bool) {
		defer func() { p = recover() != nil }()
		f()
		return false
	}
	for _, tc := range []struct {
		off, n int
		small  bool // fits mr
		large  bool // fits large
	}{
		{0, 0, true, true},
		{0, 3 * page, true, true},
		{3 * page, 0, true, true},
		{page, 2*page + 1, false, true},
		{3*page + 1, 0, false, true},
		{-1, 1, false, false},
		{1, -1, false, false},
		{math.MinInt, 0, false, false},
		{0, math.MaxUint32, false, true},
		{0, math.MaxUint32 + 1, false, false},
		{0, math.MaxUint32 + 9, false, false}, // not 8 bytes
		{length - 1, 1, false, true},
		{length - 1, 2, false, false},
		{math.MaxInt, math.MaxInt, false, false},
	} {
		for what, f := range map[string]func() guestdrv.SGE{
			"SGE":              func() guestdrv.SGE { return mr.SGE(tc.off, tc.n) },
			"SGE, on demand":   func() guestdrv.SGE { return large.SGE(tc.off, tc.n) },
			"SGEAt, on demand": func() guestdrv.SGE { return large.SGEAt(base+uint64(tc.off), tc.n) },
		} {
			ok, want := tc.large, guestdrv.SGE{Addr: base + uint64(tc.off), Length: uint32(tc.n), LKey: large.LKey()}
			if what == "SGE" {
				ok, want.Addr, want.LKey = tc.small, buf.Addr()+uint64(tc.off), mr.LKey()
			}
			var got guestdrv.SGE
			if p := panics(func() { got = f() }); p == ok || ok && got != want {
				t.Errorf("%s(%d, %d): %+v, panic %t, want %+v, panic %t", what, tc.off, tc.n, got, p, want, !ok)
			}
		}
	}
	for off, ok := range map[int]bool{0: true, length: true, length + 1: false, -1: false} {
		if p := panics(func() { large.Remote(off) }); p == ok {
			t.Errorf("Remote(%d): panic %t", off, p)
		}
		if p := panics(func() { large.RemoteAt(base + uint64(off)) }); p == ok {
			t.Errorf("RemoteAt(base+%d): panic %t", off, p)
		}
	}

	// SGEs whose lengths do not fit 32 bits together are refused when they are posted, and take no slot.
	e := h.end(t, qpDefaults(), 0)
	sgl := []guestdrv.SGE{large.SGE(0, math.MaxUint32), large.SGE(0, 1)}
	for range 200 {
		if err := e.qp.PostSend(guestdrv.NewWrite(1, large.Remote(0), sgl...)); !errors.Is(err, guestdrv.ErrInvalid) {
			t.Fatalf("PostSend: %v", err)
		}
		if err := e.qp.PostRecv(guestdrv.NewRecv(1, sgl...)); !errors.Is(err, guestdrv.ErrInvalid) {
			t.Fatalf("PostRecv: %v", err)
		}
	}
	if n := e.qp.Outstanding(); n != 0 {
		t.Errorf("%d requests outstanding", n)
	}
}

// TestFastRange: FastMR.Map lists only pages of the buffer, and no more than the region has room for.
func TestFastRange(t *testing.T) {
	h := newRig(t, rigConfig{hosts: 1}).hosts[0]
	buf, err := h.Alloc(8 * page)
	if err != nil {
		t.Fatal(err)
	}
	m, err := h.pd.AllocFast(bg, 4)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		off, n int
		pages  uint32 // 0: refused
	}{
		{0, 4 * page, 4},
		{7*page + 1, page - 1, 1},
		{page - 1, 2, 2},
		{1, 4 * page, 0},        // five pages
		{0, 4*page + 1, 0},      // likewise
		{7 * page, page + 1, 0}, // beyond the buffer
		{8 * page, 1, 0},        // likewise
		{-page, page, 0},        // before it
		{0, 0, 0},               // nothing
		{page, -1, 0},
		{page, math.MaxInt, 0}, // overflows
		{math.MaxInt, page, 0},
		{math.MinInt, page, 0},
		{0, 600 * page, 0}, // more than a list has room for
		{page, math.MaxInt - 1, 0},
	} {
		reg, err := m.Map(buf, tc.off, tc.n, 1, allAccess)
		if tc.pages == 0 {
			if !errors.Is(err, guestdrv.ErrInvalid) || reg != nil {
				t.Errorf("Map(%d, %d): %+v, %v", tc.off, tc.n, reg, err)
			}
			continue
		}
		if err != nil || reg.NPages != tc.pages || reg.Length != uint64(tc.n) || reg.IOVA != buf.Addr()+uint64(tc.off) {
			t.Errorf("Map(%d, %d): %+v, %v, want %d pages", tc.off, tc.n, reg, err, tc.pages)
		}
	}
}

// TestBufferInUse: a buffer with regions in it cannot be closed, and keeps its contents.
func TestBufferInUse(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1, driver: guestdrv.Config{Timeout: 200 * time.Millisecond}})
	h := r.hosts[0]
	buf, first := h.region(t, 3*page, allAccess)
	second, err := h.pd.RegisterRange(bg, buf, 100, 5000, guestdrv.AccessLocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	busy := func(want string) {
		t.Helper()
		if err := buf.Close(); !errors.Is(err, guestdrv.StatusBusy) || !strings.Contains(err.Error(), want) {
			t.Errorf("Close: %v, want %q", err, want)
		}
		if buf.Len() != 3*page {
			t.Fatalf("the buffer has %d bytes", buf.Len())
		}
	}
	// A refused registration leaves nothing.
	if _, err := h.pd.Register(bg, buf, guestdrv.AccessRemoteWrite); !errors.Is(err, guestdrv.StatusInvalid) {
		t.Errorf("remote write without local write: %v", err)
	}
	if _, err := h.pd.RegisterRange(bg, buf, page, 3*page, 0); !errors.Is(err, guestdrv.ErrInvalid) {
		t.Errorf("beyond the buffer: %v", err)
	}
	busy("2 registered regions")
	for range 2 { // the second has no effect
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
	}
	busy("1 registered regions")
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}

	// A registration that the driver does not wait for any more counts until the device has undone it.
	qp := h.end(t, qpDefaults(), 0).qp
	release := stopLoops(t, h.site)
	if err := qp.Close(); !errors.Is(err, guestdrv.ErrTimeout) {
		t.Errorf("closing a QP: %v", err)
	}
	ctx, cancel := context.WithTimeout(bg, 10*time.Millisecond)
	defer cancel()
	if _, err := h.pd.Register(ctx, buf, allAccess); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Register: %v", err)
	}
	busy("1 registered regions")
	release()
	testutil.Eventually(t, "the buffer can be closed", func() bool { return buf.Close() == nil })
	if err := buf.Close(); err != nil {
		t.Errorf("closed twice: %v", err)
	}
	if _, err := h.pd.Register(bg, buf, allAccess); !errors.Is(err, guestdrv.ErrInvalid) {
		t.Errorf("Register in a closed buffer: %v", err)
	}
}

// TestBufferRace closes a buffer while it is being registered: one of the two fails.
func TestBufferRace(t *testing.T) {
	h := newRig(t, rigConfig{hosts: 1}).hosts[0]
	for range 50 {
		buf, err := h.Alloc(page)
		if err != nil {
			t.Fatal(err)
		}
		closed := make(chan error, 1)
		go func() { closed <- buf.Close() }()
		mr, rerr := h.pd.Register(bg, buf, allAccess)
		if cerr := <-closed; (cerr == nil) == (rerr == nil) {
			t.Fatalf("Close: %v, Register: %v", cerr, rerr)
		}
		if rerr != nil {
			continue
		}
		if err := mr.Close(); err != nil {
			t.Fatal(err)
		}
		if err := buf.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
