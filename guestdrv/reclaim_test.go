package guestdrv_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/guestdrv"
)

const window = 512 * page // of addresses that one group of MTT entries covers

// TestOnePagePerWindow writes to one page in each 2 MiB of an implicit region, to many times more of them than the VM's
// quota of entries holds (HF-2, HF-3): every address is valid, so every WRITE arrives. Then it reads them all back.
func TestOnePagePerWindow(t *testing.T) {
	const windows, quota = 4000, 1 << 16
	r := newRig(t, rigConfig{hosts: 1, limits: hca.Limits{MTTs: quota}, driver: guestdrv.Config{Memory: 48 << 20}})
	h := r.hosts[0]
	a, _ := connect(t, h, h, qpDefaults(), faulty)
	frames, err := h.Alloc(windows * page)
	if err != nil {
		t.Fatal(err)
	}
	const base = 0x7f00_0000_0000
	mr, err := h.pd.RegisterImplicit(bg, allAccess, guestdrv.PagerFunc(func(_ context.Context, f guestdrv.PageFault,
		pas []uint64) error {
		n := (f.VA - base) / window
		if n >= windows || f.VA%window != n%512*page {
			return errOutside
		}
		pas[0] = frames.PA() + n*page
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	buf, local := h.region(t, page, guestdrv.AccessLocalWrite)
	va := func(n uint64) uint64 { return base + n*window + n%512*page + n%500*8 }
	do := func(op guestdrv.Opcode, wcop guestdrv.WCOpcode, n uint64) {
		a.post(t, &request{ID: n, Opcode: op, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{local.SGE(0, 8)},
			RemoteAddr: va(n), RKey: mr.RKey()})
		expect(t, a.scq, n, guestdrv.WCSuccess, wcop)
	}
	word := func(n uint64) uint64 { return n*0x9e3779b97f4a7c15 + 1 }
	for n := range uint64(windows) {
		binary.NativeEndian.PutUint64(buf.Bytes(), word(n))
		do(guestdrv.WRRDMAWrite, guestdrv.WCOpRDMAWrite, n)
		if got := binary.NativeEndian.Uint64(frames.Bytes()[n*page+n%500*8:]); got != word(n) {
			t.Fatalf("window %d: %#x, want %#x", n, got, word(n))
		}
	}
	for n := range uint64(windows) {
		do(guestdrv.WRRDMARead, guestdrv.WCOpRDMARead, n)
		if got := binary.NativeEndian.Uint64(buf.Bytes()); got != word(n) {
			t.Fatalf("window %d read back: %#x, want %#x", n, got, word(n))
		}
	}
	if s := h.hca.Describe(); s.MTTs > quota {
		t.Errorf("%d entries, the quota is %d", s.MTTs, quota)
	}
	if s := mr.Stats(); s.Failed != 0 || s.Faults < 2*windows-quota/64 {
		t.Errorf("%+v", s)
	}
}

// TestRandomAccessBeyondQuota works at random on four times as many entries as each VM's quota has, from both ends,
// while pages are invalidated and evicted. All data are checked; released frames are not written to (HF-3, EP-3).
func TestRandomAccessBeyondQuota(t *testing.T) {
	const workers, part = 2, 8 // windows of each
	const quota = workers * part / 4 * (512 + 64)
	r := newRig(t, rigConfig{limits: hca.Limits{MTTs: quota}, driver: guestdrv.Config{Memory: 48 << 20}})
	ha, hb := r.hosts[0], r.hosts[1]
	const pages, frames = workers * part * 512, 2000
	near := newArena(t, ha, 1<<40, pages, frames).register(allAccess)
	far := newArena(t, hb, 1<<41, pages, frames).register(allAccess)
	var ends [workers][2]*end
	for w := range workers {
		ends[w][0], ends[w][1] = connect(t, ha, hb, qpDefaults(), faulty)
	}
	out := []*evictor{near.startEvictor(1), far.startEvictor(2)}
	t.Run("workers", func(t *testing.T) {
		for w := range workers {
			t.Run(fmt.Sprint(w), func(t *testing.T) {
				t.Parallel()
				randomOps(t, ends[w][0], ends[w][1], near, far, w*part*window, part*window, 300, uint64(w), func() {
					for _, e := range out {
						e.worked(4)
					}
				})
			})
		}
	})
	for _, e := range out {
		e.stop()
	}
	for _, a := range []*arena{near, far} {
		s, d := a.mr.Stats(), a.h.hca.Describe()
		t.Logf("%+v, %d entries, %d groups reclaimed", s, d.MTTs, d.MTTsReclaimed)
		if s.Faults == 0 || s.Invalidations == 0 || s.Failed != 0 || d.MTTs > quota || d.MTTsReclaimed < 20 {
			t.Errorf("%+v, %d entries of %d, %d groups reclaimed", s, d.MTTs, quota, d.MTTsReclaimed)
		}
		a.evictAll()
		a.check()
		if err := a.mr.Close(); err != nil {
			t.Error(err)
		}
		a.check()
	}
}

// TestPagerWithoutMemory has a Pager that has no page now, which is no reason to fail: the operation waits (HF-2).
func TestPagerWithoutMemory(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	a, _ := connect(t, ha, hb, qpDefaults(), faulty)
	far := newArena(t, hb, 1<<30, 4, 4)
	var short atomic.Bool
	short.Store(true)
	far.hook = func(context.Context, guestdrv.PageFault) error {
		if short.Load() {
			return fmt.Errorf("no frame: %w", guestdrv.ErrNoMemory)
		}
		return nil
	}
	far.register(allAccess)
	_, mr := ha.region(t, page, guestdrv.AccessLocalWrite)
	a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{mr.SGE(0, 8)}, RemoteAddr: far.base, RKey: far.mr.RKey()})
	testutil.Eventually(t, "several pauses", func() bool { return far.mr.Stats().Later >= 4 })
	var wcs [1]guestdrv.Completion
	if a.scq.Poll(wcs[:]) != 0 {
		t.Errorf("completed without its page: %+v", wcs[0])
	}
	short.Store(false)
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	if n := far.mr.Stats().Failed; n != 0 {
		t.Errorf("%d faults failed", n)
	}
	// The region closes during a pause: the operation ends.
	short.Store(true)
	before := far.mr.Stats().Later
	a.post(t, &request{ID: 2, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{mr.SGE(0, 8)}, RemoteAddr: far.va(2 * page), RKey: far.mr.RKey()})
	testutil.Eventually(t, "a pause", func() bool { return far.mr.Stats().Later > before })
	if err := far.mr.Close(); err != nil {
		t.Fatal(err)
	}
	expect(t, a.scq, 2, guestdrv.WCRemAccessErr, 0)
}
