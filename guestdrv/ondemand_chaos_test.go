package guestdrv_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/guestdrv"
)

// TestOversubscription has fewer frames than pages on both sides of several connections (PF-15), which read, write,
// send and add at random while other goroutines evict random pages. Every operation is compared with a model; released
// frames must not be written to (PF-14, EP-3). With a budget, the host's memory for the device is smaller than the
// frames, too.
func TestOversubscription(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  rigConfig
		ops  int
	}{
		{"guest", rigConfig{}, 80},
		{"guest and host", rigConfig{budget: 4 << 20, driver: guestdrv.Config{Memory: 48 << 20}}, 60},
		{"one loop, few buffers", rigConfig{loops: 1, pool: 24}, 40},
		{"VXLAN", rigConfig{vxlan: true}, 40},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, tc.cfg)
			ha, hb := r.hosts[0], r.hosts[1]
			stride := page
			if tc.cfg.budget > 0 {
				stride = granule // 80 of them take 5 MiB
			}
			const workers, part = 4, 40 // pages of each
			near := newSparseArena(t, ha, 1<<40, workers*part, 80, stride).register(allAccess)
			far := newSparseArena(t, hb, 1<<41, workers*part, 80, stride).register(allAccess)
			var ends [workers][2]*end
			for w := range workers {
				ends[w][0], ends[w][1] = connect(t, ha, hb, qpDefaults(), faulty)
			}
			out := []*evictor{near.startEvictor(1), far.startEvictor(2)}
			t.Run("workers", func(t *testing.T) {
				for w := range workers {
					t.Run(fmt.Sprint(w), func(t *testing.T) {
						t.Parallel()
						randomOps(t, ends[w][0], ends[w][1], near, far, w*part*page, part*page, tc.ops, uint64(w), func() {
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
			near.check()
			far.check()
			for _, ar := range []*arena{near, far} {
				s := ar.mr.Stats()
				t.Logf("%+v", s)
				if s.Faults == 0 || s.Invalidations == 0 || s.Failed != 0 {
					t.Errorf("faults %d, invalidations %d, failed %d", s.Faults, s.Invalidations, s.Failed)
				}
				ar.evictAll()
				ar.check()
				if err := ar.mr.Close(); err != nil {
					t.Error(err)
				}
				ar.check()
			}
			if n := hb.stat(t, guestdrv.StatHostFaults); tc.cfg.budget > 0 && n < 20 {
				t.Errorf("only %d host faults under a budget", n)
			}
		})
	}
}

// randomOps runs operations one at a time on bytes [lo, lo+size) of both arenas and
// compares each outcome with a model.
func randomOps(t *testing.T, a, b *end, near, far *arena, lo, size, ops int, seed uint64, worked func()) {
	rng := rand.New(rand.NewPCG(seed, 11))
	here, there := make([]byte, size), make([]byte, size) // the model
	for i := range ops {
		n := 1 + rng.IntN(5*page)
		at, to := rng.IntN(size-n), rng.IntN(size-n)
		wr := request{ID: uint64(i), Flags: guestdrv.SendSignaled, RKey: far.mr.RKey()}
		var wcop guestdrv.WCOpcode
		switch rng.IntN(4) {
		case 0:
			wr.Opcode, wcop = guestdrv.WRRDMAWrite, guestdrv.WCOpRDMAWrite
		case 1:
			wr.Opcode, wcop = guestdrv.WRRDMARead, guestdrv.WCOpRDMARead
		case 2:
			wr.Opcode, wcop = guestdrv.WRSend, guestdrv.WCOpSend
			b.recv(t, uint64(i), far.mr.SGEAt(far.va(lo+to), n))
		case 3:
			wr.Opcode, wcop = guestdrv.WRAtomicFetchAndAdd, guestdrv.WCOpFetchAdd
			n, to = 8, to&^7
			wr.CompareAdd = rng.Uint64()
		}
		wr.SGL, wr.RemoteAddr = []guestdrv.SGE{near.mr.SGEAt(near.va(lo+at), n)}, far.va(lo+to)
		if wr.Opcode == guestdrv.WRRDMAWrite || wr.Opcode == guestdrv.WRSend {
			fill(here[at:at+n], rng.Uint64())
			near.write(lo+at, here[at:at+n])
		}
		a.post(t, &wr)
		expect(t, a.scq, uint64(i), guestdrv.WCSuccess, wcop)
		switch wr.Opcode {
		case guestdrv.WRRDMARead:
			copy(here[at:at+n], there[to:])
		case guestdrv.WRAtomicFetchAndAdd:
			copy(here[at:at+n], there[to:])
			binary.NativeEndian.PutUint64(there[to:], binary.NativeEndian.Uint64(there[to:])+wr.CompareAdd)
		case guestdrv.WRSend:
			expect(t, b.rcq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRecv)
			fallthrough
		default:
			copy(there[to:to+n], here[at:])
		}
		near.expect(lo+at, here[at:at+n], fmt.Sprintf("operation %d (%d), near side", i, wr.Opcode))
		far.expect(lo+to, there[to:to+n], fmt.Sprintf("operation %d (%d), far side", i, wr.Opcode))
		if t.Failed() {
			return
		}
		worked()
	}
	near.expect(lo, here, "near side, all")
	far.expect(lo, there, "far side, all")
}

// TestNoLateWrites streams WRITEs without a pause into pages that are evicted at random: no write reaches a frame after
// Invalidate has returned for it (ODP-5, EP-3).
func TestNoLateWrites(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  rigConfig
	}{{"local", rigConfig{}}, {"VXLAN", rigConfig{vxlan: true}}} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, tc.cfg)
			ha, hb := r.hosts[0], r.hosts[1]
			const pages, n, perQP, window = 24, 3 * page, 150, 16
			far := newArena(t, hb, 1<<40, pages, 16).register(allAccess)
			buf, mr := ha.region(t, n, 0)
			for i := range buf.Bytes() {
				buf.Bytes()[i] = 0x11
			}
			out := far.startEvictor(1)
			t.Run("writers", func(t *testing.T) {
				for w := range 3 {
					a, _ := connect(t, ha, hb, qpDefaults(), faulty)
					t.Run(fmt.Sprint(w), func(t *testing.T) {
						t.Parallel()
						rng := rand.New(rand.NewPCG(uint64(w), 3))
						for i := range perQP + window {
							if i < perQP {
								a.post(t, &request{
									ID: uint64(i), Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{mr.SGE(0, n)},
									RemoteAddr: far.va(rng.IntN(pages*page - n)), RKey: far.mr.RKey(),
								})
							}
							if i >= window {
								expect(t, a.scq, uint64(i-window), guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
								out.worked(2)
							}
						}
					})
				}
			})
			out.stop()
			far.evictAll()
			far.check()
			for i, c := range far.read(0, pages*page) {
				if c != 0 && c != 0x11 {
					t.Fatalf("byte %d is %#x, which was never written", i, c)
				}
			}
			if s := far.mr.Stats(); s.Invalidations < 20 || s.Faults < 20 {
				t.Errorf("too few faults or invalidations: %+v", s)
			}
		})
	}
}

// never is a hook of a Pager that does not answer.
func never(ctx context.Context, _ guestdrv.PageFault) error {
	<-ctx.Done()
	return ctx.Err()
}

// TestNeverAnswered has a Pager that never answers, on either side. Other QPs of the same VMs and of others continue
// (PF-8, PF-16); regions are created and destroyed, and pages invalidated, including those that are waited for (EP-5).
// Once the region is destroyed, the operation ends with an error.
func TestNeverAnswered(t *testing.T) {
	for _, side := range []string{"near", "far"} {
		t.Run(side, func(t *testing.T) {
			r := newRig(t, rigConfig{hosts: 4, loops: 1})
			ha, hb := r.hosts[0], r.hosts[1]
			stuck := newArena(t, ha, 1<<40, 8, 8)
			status := guestdrv.WCLocProtErr
			if side == "far" {
				stuck = newArena(t, hb, 1<<40, 8, 8)
				status = guestdrv.WCRemAccessErr
			}
			var asked atomic.Int32
			stuck.hook = func(ctx context.Context, f guestdrv.PageFault) error {
				if f.VA != stuck.base {
					return nil
				}
				asked.Add(1)
				return never(ctx, f)
			}
			stuck.register(allAccess)
			var waiting []*end
			for range 3 {
				a, _ := connect(t, ha, hb, qpDefaults(), faulty)
				_, mr := ha.region(t, page, allAccess)
				wr := &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{mr.SGE(0, 8)},
					RemoteAddr: stuck.base, RKey: stuck.mr.RKey()}
				if side == "near" {
					_, fmr := hb.region(t, page, allAccess)
					wr.SGL[0], wr.RemoteAddr, wr.RKey = stuck.mr.SGEAt(stuck.base, 8), fmr.Addr(), fmr.RKey()
				}
				a.post(t, wr)
				wr.ID = 2
				a.post(t, wr)
				waiting = append(waiting, a)
			}
			testutil.Eventually(t, "three faults", func() bool { return asked.Load() == 3 })

			for _, p := range [][2]*host{{ha, hb}, {hb, ha}, {r.hosts[2], r.hosts[3]}, {ha, r.hosts[2]}} {
				x, y := connect(t, p[0], p[1], qpDefaults(), guestdrv.ConnectOptions{})
				mixedTraffic(t, x, y, 40, 1)
				destroy(t, x, y)
			}
			// Other pages of the same region, with their own faults.
			x, _ := connect(t, ha, hb, qpDefaults(), faulty)
			_, mr := ha.region(t, page, allAccess)
			wr := &request{ID: 3, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{mr.SGE(0, 8)},
				RemoteAddr: stuck.va(3 * page), RKey: stuck.mr.RKey()}
			if side == "near" {
				_, fmr := hb.region(t, page, allAccess)
				wr.SGL[0], wr.RemoteAddr, wr.RKey = stuck.mr.SGEAt(stuck.va(3*page), 8), fmr.Addr(), fmr.RKey()
			}
			for range 10 {
				x.post(t, wr)
				expect(t, x.scq, 3, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
				if !stuck.evict(3) {
					t.Error("the page was absent")
				}
			}
			for range 20 {
				_, mr := ha.region(t, page, allAccess)
				if err := mr.Close(); err != nil {
					t.Fatal(err)
				}
				if err := stuck.mr.Invalidate(bg, 0, 1<<63); err != nil {
					t.Fatal(err)
				}
			}
			for _, a := range waiting {
				var wcs [1]guestdrv.Completion
				if a.scq.Poll(wcs[:]) != 0 {
					t.Errorf("completed without its page: %+v", wcs[0])
				}
			}
			if err := stuck.mr.Close(); err != nil {
				t.Fatal(err)
			}
			for _, a := range waiting {
				if wc := await(t, a.scq, 1)[0]; wc.ID != 1 || wc.Status != status {
					t.Errorf("completion %+v (%s), want %q", wc, wc.Status, status)
				}
				expect(t, a.scq, 2, guestdrv.WCWRFlushErr, 0)
			}
			stuck.check()
		})
	}
}

// TestDestroyWhileFaulting destroys QPs that wait for pages, at every step; later answers have no effect.
func TestDestroyWhileFaulting(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	far := newArena(t, hb, 1<<40, 8, 8)
	release := make(chan struct{})
	var asked atomic.Int32
	far.hook = func(ctx context.Context, _ guestdrv.PageFault) error {
		asked.Add(1)
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	far.register(allAccess)
	_, mr := ha.region(t, page, allAccess)
	for i := range 12 {
		a, b := connect(t, ha, hb, qpDefaults(), faulty)
		a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{mr.SGE(0, 8)}, RemoteAddr: far.base, RKey: far.mr.RKey()})
		testutil.Eventually(t, "a fault", func() bool { return asked.Load() == int32(i+1) })
		if i%3 == 0 { // a reset in place of destruction, then a fault
			for _, e := range []*end{b, a} {
				if err := e.qp.Modify(bg, guestdrv.QPAttr{State: guestdrv.QPReset}, guestdrv.QPAttrState); err != nil {
					t.Fatal(err)
				}
			}
		}
		destroy(t, b, a)
	}
	close(release)
	// Answers to faults of destroyed QPs, whose numbers are in use again.
	a, b := connect(t, ha, hb, qpDefaults(), faulty)
	mixedTraffic(t, a, b, 30, 1)
	if err := far.mr.Close(); err != nil {
		t.Fatal(err)
	}
	far.check()
}

// TestStarvedEvents leaves the device without buffers for events: a page fault waits for one, and is not lost.
func TestStarvedEvents(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	a, _ := connect(t, ha, hb, qpDefaults(), faulty)
	far := newArena(t, hb, 1<<40, 8, 8)
	var asked atomic.Bool
	far.hook = func(context.Context, guestdrv.PageFault) error {
		asked.Store(true)
		return nil
	}
	far.register(allAccess)
	// One event per drained QP; none of them is fetched.
	const n = 80
	cq := hb.cq(t, 8)
	want := map[uint32]bool{}
	for range n {
		e := hb.end(t, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: cq, RecvCQ: cq}, 1)
		if err := e.qp.Connect(bg, guestdrv.Peer{QPN: a.qp.Number(), PSN: 1, Path: ha.at()},
			guestdrv.ConnectOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := e.qp.Modify(bg, guestdrv.QPAttr{State: guestdrv.QPSQD, EnSQDAsyncNotify: true},
			guestdrv.QPAttrState|guestdrv.QPAttrEnSQDAsyncNotify); err != nil {
			t.Fatal(err)
		}
		want[e.qp.Number()] = true
	}
	buf, mr := ha.region(t, page, allAccess)
	fill(buf.Bytes(), 1)
	a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{mr.SGE(0, page)}, RemoteAddr: far.va(100), RKey: far.mr.RKey()})
	hb.faulted(t, 0)
	if asked.Load() {
		t.Error("the fault came before older events")
	}
	for len(want) > 0 {
		e := hb.nextEvent(t)
		if e.Type != guestdrv.EventSQDrained || !want[e.Handle] {
			t.Fatalf("event %v of %d", e.Type, e.Handle)
		}
		delete(want, e.Handle)
	}
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	far.expect(100, buf.Bytes(), "far side")
}

// TestInvalidateWhilePagingIn invalidates pages while the Pager works on them: pages found before the invalidation do
// not get into the table.
func TestInvalidateWhilePagingIn(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	a, _ := connect(t, ha, hb, qpDefaults(), faulty)
	frames, err := hb.Alloc(16 * page)
	if err != nil {
		t.Fatal(err)
	}
	spoil(frames.Bytes())
	var mr *guestdrv.OnDemandMR
	ready := make(chan struct{})
	asked := 0
	mr, err = hb.pd.RegisterOnDemand(bg, 1<<40, 8*page, allAccess,
		guestdrv.PagerFunc(func(_ context.Context, f guestdrv.PageFault, pas []uint64) error {
			<-ready
			pas[0] = frames.PA() + uint64(asked*page)
			if asked++; asked < 5 {
				return mr.Invalidate(bg, f.VA+8, 1)
			}
			return mr.Invalidate(bg, f.VA+page, page) // another page: does not concern this fault
		}))
	if err != nil {
		t.Fatal(err)
	}
	close(ready)
	buf, lmr := ha.region(t, page, allAccess)
	fill(buf.Bytes(), 7)
	a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{lmr.SGE(0, page)}, RemoteAddr: mr.Addr() + page, RKey: mr.RKey()})
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	if s := mr.Stats(); s.Retries != 4 || s.Pages != 1 || asked != 5 {
		t.Errorf("asked %d times, %+v", asked, s)
	}
	for i := range 16 {
		got := frames.Bytes()[i*page:][:page]
		if i == 4 && string(got) != string(buf.Bytes()) {
			t.Error("data differ")
		}
		if i != 4 && got[0] != canary {
			t.Errorf("frame %d was written to", i)
		}
	}
	if err := mr.Close(); err != nil {
		t.Fatal(err)
	}
	if err := mr.Prefetch(ctxFor(t), mr.Addr(), page, false); !errors.Is(err, guestdrv.ErrClosed) {
		t.Errorf("prefetch of a destroyed region: %v", err)
	}
}

// TestDaemonClosesWhileFaulting ends the daemon's side during faults of both levels: no goroutines (TestMain checks),
// mappings, descriptors or locked memory are left.
func TestDaemonClosesWhileFaulting(t *testing.T) {
	closeOnce := func(t *testing.T) {
		r := newRig(t, rigConfig{budget: 4 << 20, driver: guestdrv.Config{Memory: 48 << 20}})
		ha, hb := r.hosts[0], r.hosts[1]
		stuck := newArena(t, hb, 1<<40, 8, 8)
		stuck.hook = never
		stuck.register(allAccess)
		busy := newSparseArena(t, hb, 1<<41, 200, 150, granule).register(allAccess)
		_, mr := ha.region(t, page, allAccess)
		for i := range 6 {
			a, _ := connect(t, ha, hb, qpDefaults(), faulty)
			ar := []*arena{stuck, busy}[i%2]
			for k := range 60 {
				a.post(t, &request{Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{mr.SGE(0, page)},
					RemoteAddr: ar.va((i*k*page + 7) % (7 * page)), RKey: ar.mr.RKey()})
				if ar == busy {
					a.post(t, &request{Opcode: guestdrv.WRRDMARead, SGL: []guestdrv.SGE{mr.SGE(0, page)},
						RemoteAddr: busy.va((i*60 + k) % 199 * page), RKey: ar.mr.RKey()})
				}
				if a.qp.Outstanding() > 60 {
					break
				}
			}
		}
		testutil.Eventually(t, "faults", func() bool { return stuck.mr.Stats().Faults > 0 && busy.mr.Stats().Faults > 5 })
		if err := hb.srv.Close(); err != nil {
			t.Error(err)
		}
		if err := stuck.mr.Close(); !errors.Is(err, guestdrv.ErrDisconnected) {
			t.Errorf("deregistration without a device: %v", err)
		}
	}
	t.Run("first", closeOnce)
	fds, maps, locked := countFDs(t), countMaps(t), lockedMemory(t)
	for i := range 3 {
		t.Run(fmt.Sprint(i), closeOnce)
	}
	if n := countFDs(t); n > fds {
		t.Errorf("%d file descriptors are open, %d before", n, fds)
	}
	if n := countMaps(t); n > maps {
		t.Errorf("%d mappings, %d were", n, maps)
	}
	if n := lockedMemory(t); n > locked {
		t.Errorf("%d KiB of memory are locked, %d before", n, locked)
	}
}

// lockedMemory returns the locked memory of this process, in KiB.
func lockedMemory(tb testing.TB) int {
	tb.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		tb.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "VmLck:")
	n, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		tb.Fatal(err)
	}
	return n
}
