package guestdrv_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/guestdrv"
)

// kernelPair is a connection whose first end belongs to a kernel.
func kernelPair(t *testing.T, r *rig) (a, b *end) {
	t.Helper()
	return kernelPairAs(t, r, quick)
}

func kernelPairAs(t *testing.T, r *rig, o guestdrv.ConnectOptions) (a, b *end) {
	t.Helper()
	c := qpDefaults()
	c.Privileged, c.SigAll = true, true
	return connect(t, r.hosts[0], r.hosts[1], c, o)
}

func fastMR(t *testing.T, e *end, pages int) *guestdrv.FastMR {
	t.Helper()
	m, err := e.h.pd.AllocFast(bg, pages)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// mapped is FastMR.Map that must succeed.
func mapped(tb testing.TB, m *guestdrv.FastMR, buf *guestdrv.Buffer, off, n int, low uint8,
	access guestdrv.Access) *guestdrv.Registration {
	tb.Helper()
	reg, err := m.Map(buf, off, n, low, access)
	if err != nil {
		tb.Fatal(err)
	}
	return reg
}

// TestFastRegister: register, use by the peer, invalidate by either side, then again with another low byte; only the
// order of the send queue connects the steps (IBTA 10.6.4, 10.8.3).
func TestFastRegister(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := kernelPair(t, r)
	mem, err := a.h.Alloc(64 << 10)
	if err != nil {
		t.Fatal(err)
	}
	src, smr := b.h.region(t, 64<<10, allAccess)
	fill(src.Bytes(), 3)
	m := fastMR(t, a, 8)
	n := 20000
	for round := range 20 {
		off, low := 1000+100*round, uint8(7*round)
		reg := mapped(t, m, mem, off, n, low, allAccess)
		clear(mem.Bytes())
		// In one batch: register, and send to the peer, which writes and invalidates the key.
		for _, wr := range []*request{
			{ID: 1, Opcode: guestdrv.WRRegMR, Reg: reg},
			{ID: 2, Opcode: guestdrv.WRRDMARead, SGL: []guestdrv.SGE{{Addr: reg.IOVA, Length: 4000, LKey: reg.RKey}},
				RemoteAddr: smr.Addr(), RKey: smr.RKey()},
		} {
			if err := queueSend(a.qp, wr); err != nil {
				t.Fatal(err)
			}
		}
		a.qp.Ring()
		expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRegMR)
		expect(t, a.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpRDMARead)
		if !bytes.Equal(mem.Bytes()[off:off+4000], src.Bytes()[:4000]) {
			t.Fatal("data differ: a READ after the registration")
		}
		b.post(t, &request{ID: 3, Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{smr.SGE(0, n)}, RemoteAddr: reg.IOVA,
			RKey: reg.RKey})
		if round%2 == 0 {
			a.recv(t, 4)
			b.post(t, &request{ID: 5, Opcode: guestdrv.WRSendWithInv, InvalidateKey: reg.RKey})
			wc := expect(t, a.rcq, 4, guestdrv.WCSuccess, guestdrv.WCOpRecv)
			if wc.Flags&guestdrv.WCFlagWithInvalidate != guestdrv.WCFlagWithInvalidate || le.Uint32(wc.Imm[:]) != reg.RKey {
				t.Fatalf("completion of a SEND with Invalidate: %+v", wc)
			}
			expect(t, b.scq, 3, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
			expect(t, b.scq, 5, guestdrv.WCSuccess, guestdrv.WCOpSend)
		} else {
			expect(t, b.scq, 3, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
			a.post(t, &request{ID: 6, Opcode: guestdrv.WRLocalInv, InvalidateKey: reg.RKey})
			expect(t, a.scq, 6, guestdrv.WCSuccess, guestdrv.WCOpLocalInv)
		}
		if !bytes.Equal(mem.Bytes()[off:off+n], src.Bytes()[:n]) {
			t.Fatal("data differ")
		}
	}
	// An invalidated key is invalid for the peer.
	b.post(t, &request{ID: 7, Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{smr.SGE(0, 8)}, RemoteAddr: mem.Addr(),
		RKey: m.Key()})
	expect(t, b.scq, 7, guestdrv.WCRemAccessErr, 0)
	destroy(t, a, b)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestLocalInvWaits: an invalidation starts when earlier requests have completed, so an earlier SEND from the region is
// complete.
func TestLocalInvWaits(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := kernelPairAs(t, r, guestdrv.ConnectOptions{}) // waits for a receive without limit
	mem, err := a.h.Alloc(32 << 10)
	if err != nil {
		t.Fatal(err)
	}
	dst, dmr := b.h.region(t, 32<<10, allAccess)
	m := fastMR(t, a, 8)
	for round := range 10 {
		fill(mem.Bytes(), uint64(round))
		reg := mapped(t, m, mem, 0, 32<<10, uint8(round), guestdrv.AccessLocalWrite)
		for _, wr := range []*request{
			{ID: 1, Opcode: guestdrv.WRRegMR, Reg: reg},
			{ID: 2, Opcode: guestdrv.WRSend, SGL: []guestdrv.SGE{{Addr: reg.IOVA, Length: 32 << 10, LKey: reg.RKey}}},
			{ID: 3, Opcode: guestdrv.WRLocalInv, InvalidateKey: reg.RKey},
			{ID: 4, Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{{Addr: mem.PA(), Length: 8}}, RemoteAddr: dmr.Addr(),
				RKey: dmr.RKey()},
		} {
			if err := queueSend(a.qp, wr); err != nil {
				t.Fatal(err)
			}
		}
		a.qp.Ring()
		expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRegMR)
		if round%2 == 0 {
			// The SEND gets RNR NAKs meanwhile; its memory must still be valid afterwards.
			if wcs := make([]guestdrv.Completion, 1); a.scq.Poll(wcs) != 0 {
				t.Fatalf("completed without a receive: %+v", wcs)
			}
		}
		b.recv(t, 9, dmr.SGE(0, 32<<10))
		expect(t, a.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpSend)
		expect(t, a.scq, 3, guestdrv.WCSuccess, guestdrv.WCOpLocalInv)
		expect(t, a.scq, 4, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		expect(t, b.rcq, 9, guestdrv.WCSuccess, guestdrv.WCOpRecv)
		if !bytes.Equal(mem.Bytes(), dst.Bytes()) {
			t.Fatal("data differ")
		}
	}
}

// TestManageRefused: invalid regions and windows.
func TestManageRefused(t *testing.T) {
	h := newRig(t, rigConfig{hosts: 1}).hosts[0]
	for _, n := range []int{0, abi.MaxFastReg + 1} {
		if _, err := h.pd.AllocFast(bg, n); !errors.Is(err, guestdrv.StatusInvalid) {
			t.Errorf("region of %d pages: %v", n, err)
		}
	}
	if _, err := h.pd.AllocMW(bg, 3); !errors.Is(err, guestdrv.StatusInvalid) {
		t.Errorf("window of type 3: %v", err)
	}
}

// TestMemoryWindows: both types, as rxe's provider posts them, on QPs of processes (IBTA 10.6.7).
func TestMemoryWindows(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	mem, mr := ha.region(t, 16384, guestdrv.AccessLocalWrite|guestdrv.AccessMWBind)
	src, smr := hb.region(t, 16384, allAccess)
	fill(src.Bytes(), 5)
	for typ := uint32(1); typ <= 2; typ++ {
		c := qpDefaults()
		c.SigAll = true
		a, b := connect(t, ha, hb, c, quick)
		w, err := ha.pd.AllocMW(bg, typ)
		if err != nil {
			t.Fatal(err)
		}
		bind := &guestdrv.BindMW{Key: w.Key(), NewKey: w.Key() + 1, Region: mr.LKey(), Access: guestdrv.AccessRemoteWrite,
			Addr: mem.Addr() + 500, Length: 6000}
		a.post(t, &request{ID: 1, Opcode: guestdrv.WRBindMW, Bind: bind})
		expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpBindMW)
		key := w.Key()&^0xff | (w.Key()+1)&0xff
		write := func(e *end, id uint64, status guestdrv.WCStatus) {
			t.Helper()
			e.post(t, &request{ID: id, Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{smr.SGE(0, 6000)},
				RemoteAddr: bind.Addr, RKey: key})
			expect(t, e.scq, id, status, guestdrv.WCOpRDMAWrite)
		}
		write(b, 2, guestdrv.WCSuccess)
		if !bytes.Equal(mem.Bytes()[500:6500], src.Bytes()[:6000]) {
			t.Fatal("data differ")
		}
		if err := mr.Close(); !errors.Is(err, guestdrv.StatusBusy) {
			t.Fatalf("a region with a window was deregistered: %v", err)
		}
		// Another connection of the same domain: type 1 is for all QPs, type 2B for its own.
		x, y := connect(t, ha, hb, c, quick)
		write(y, 3, map[uint32]guestdrv.WCStatus{1: guestdrv.WCSuccess, 2: guestdrv.WCRemAccessErr}[typ])
		destroy(t, x, y)
		if typ == 1 { // bound again: the previous key is invalid
			next := *bind
			next.Key, next.NewKey = key, key&^0xff|(key+1)&0xff
			a.post(t, &request{ID: 4, Opcode: guestdrv.WRBindMW, Bind: &next})
			expect(t, a.scq, 4, guestdrv.WCSuccess, guestdrv.WCOpBindMW)
		} else { // the peer invalidates it
			a.recv(t, 4)
			b.post(t, &request{ID: 5, Opcode: guestdrv.WRSendWithInv, InvalidateKey: key})
			expect(t, a.rcq, 4, guestdrv.WCSuccess, guestdrv.WCOpRecv)
			expect(t, b.scq, 5, guestdrv.WCSuccess, guestdrv.WCOpSend)
			again := *bind
			again.Key, again.NewKey = key, key
			a.post(t, &request{ID: 6, Opcode: guestdrv.WRBindMW, Bind: &again})
			expect(t, a.scq, 6, guestdrv.WCSuccess, guestdrv.WCOpBindMW)
			write(b, 7, guestdrv.WCSuccess)
			a.post(t, &request{ID: 8, Opcode: guestdrv.WRLocalInv, InvalidateKey: key})
			expect(t, a.scq, 8, guestdrv.WCSuccess, guestdrv.WCOpLocalInv)
		}
		write(b, 9, guestdrv.WCRemAccessErr)
		destroy(t, a, b)
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := mr.Close(); err != nil {
		t.Fatalf("a region without windows left: %v", err)
	}
	if at := ha.Attr(); at.MaxMW == 0 || at.MaxFastReg != abi.MaxFastReg ||
		at.Caps&(guestdrv.CapMemMgt|guestdrv.CapMW) != guestdrv.CapMemMgt|guestdrv.CapMW {
		t.Errorf("attributes: %+v", at)
	}
}

// TestWindowsOnDemand: windows on a region with more pages than frames, which are evicted during operations. The
// region's Pager is called with the region's own key and address, however the window names them. After its eviction a
// page is not written to through the window either, which the arena checks (EP-3).
func TestWindowsOnDemand(t *testing.T) {
	const pages, frames, first, n = 32, 8, 3*page + 104, 20 * page
	for _, tc := range []struct {
		typ             uint32
		access          guestdrv.Access
		vxlan, implicit bool
	}{
		{1, 0, false, false}, {1, 0, true, true}, {2, 0, true, false}, {2, guestdrv.AccessZeroBased, false, true},
		{2, guestdrv.AccessZeroBased, true, false},
	} {
		t.Run(fmt.Sprintf("type %d/zero-based %t/implicit %t/VXLAN %t", tc.typ, tc.access != 0, tc.implicit, tc.vxlan),
			func(t *testing.T) {
				r := newRig(t, rigConfig{vxlan: tc.vxlan})
				ha, hb := r.hosts[0], r.hosts[1]
				far := newArena(t, ha, 1<<41, pages, frames)
				var hold, refuse atomic.Bool
				asked, answer := make(chan guestdrv.PageFault, 1), make(chan struct{})
				release := sync.OnceFunc(func() { close(answer) })
				t.Cleanup(release) // otherwise the end of a failed test waits for the Pager for ever
				far.hook = func(_ context.Context, f guestdrv.PageFault) error {
					switch {
					case refuse.Load():
						return errOutside
					case hold.Load():
						select {
						case asked <- f:
						default:
						}
						<-answer
					}
					return nil
				}
				const rights = guestdrv.AccessLocalWrite | guestdrv.AccessMWBind
				if tc.implicit {
					mr, err := ha.pd.RegisterImplicit(bg, rights, far)
					if err != nil {
						t.Fatal(err)
					}
					far.use(mr)
				} else {
					far.register(rights)
				}
				mem, mr := hb.region(t, 2*n, allAccess)
				fill(mem.Bytes(), uint64(tc.typ))
				want := bytes.Clone(mem.Bytes()[:n])
				w, err := ha.pd.AllocMW(bg, tc.typ)
				if err != nil {
					t.Fatal(err)
				}
				c := qpDefaults()
				c.SigAll = true
				bind := guestdrv.BindMW{Key: w.Key(), Region: far.mr.LKey(), Addr: far.va(first), Length: n,
					Access: tc.access | guestdrv.AccessRemoteWrite | guestdrv.AccessRemoteRead | guestdrv.AccessRemoteAtomic}
				rebind := func(a *end) {
					t.Helper()
					bind.NewKey = bind.Key&^0xff | (bind.Key+1)&0xff
					a.post(t, &request{ID: 1, Opcode: guestdrv.WRBindMW, Bind: &bind})
					expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpBindMW)
					bind.Key = bind.NewKey
				}
				// The peer's operation, which finds no window now, may take the QP to ERR before the request is
				// complete.
				unbind := func(a *end) {
					t.Helper()
					wr, op := request{ID: 2, Opcode: guestdrv.WRLocalInv, InvalidateKey: bind.Key}, guestdrv.WCOpLocalInv
					none := guestdrv.BindMW{Key: bind.Key, NewKey: bind.Key&^0xff | (bind.Key+1)&0xff}
					if tc.typ == 1 {
						wr, op = request{ID: 2, Opcode: guestdrv.WRBindMW, Bind: &none}, guestdrv.WCOpBindMW
					}
					a.post(t, &wr)
					switch wc := await(t, a.scq, 1)[0]; {
					case wc.ID != 2 || wc.Status != guestdrv.WCWRFlushErr && (wc.Status != guestdrv.WCSuccess || wc.Opcode != op):
						t.Fatalf("completion %+v (%s), want id 2, success or flushed", wc, wc.Status)
					case wc.Status == guestdrv.WCSuccess && tc.typ == 1:
						bind.Key = none.NewKey
					}
				}
				at := func(off int) uint64 {
					if tc.access != 0 {
						return uint64(off)
					}
					return bind.Addr + uint64(off)
				}
				do := func(b *end, op guestdrv.Opcode, wcop guestdrv.WCOpcode, local, off, n int, status guestdrv.WCStatus) {
					t.Helper()
					b.post(t, &request{ID: 3, Opcode: op, SGL: []guestdrv.SGE{mr.SGE(local, n)}, RemoteAddr: at(off), RKey: bind.Key,
						Swap: 5, CompareAdd: 5})
					expect(t, b.scq, 3, status, wcop)
				}

				a, b := connect(t, ha, hb, c, faulty)
				rebind(a)
				for off := 0; off < n; off += 5 * page {
					do(b, guestdrv.WRRDMAWrite, guestdrv.WCOpRDMAWrite, off, off, 5*page, guestdrv.WCSuccess)
				}
				for off := 0; off < n; off += 5 * page {
					do(b, guestdrv.WRRDMARead, guestdrv.WCOpRDMARead, n+off, off, 5*page, guestdrv.WCSuccess)
				}
				if !bytes.Equal(mem.Bytes()[n:], want) {
					t.Error("data differ")
				}
				far.expect(first, want, "the region beneath")
				far.evictAll()
				do(b, guestdrv.WRAtomicFetchAndAdd, guestdrv.WCOpFetchAdd, 0, 7*page, 8, guestdrv.WCSuccess)
				le.PutUint64(want[7*page:], le.Uint64(want[7*page:])+5)
				far.expect(first, want, "after an atomic")
				if got := far.mr.Stats(); got.Faults < n/page || got.Failed != 0 {
					t.Errorf("faults: %+v", got)
				}
				if err := far.mr.Close(); !errors.Is(err, guestdrv.StatusBusy) {
					t.Fatalf("a region with a window was deregistered: %v", err)
				}
				far.evictAll()
				do(b, guestdrv.WRRDMAWrite, guestdrv.WCOpRDMAWrite, 0, 0, 8, guestdrv.WCSuccess) // the region still has its Pager

				// The window is removed while an operation waits for a page of it. The operation stops waiting and
				// finds no window afterwards.
				far.evictAll()
				hold.Store(true)
				b.post(t, &request{ID: 4, Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{mr.SGE(0, page)},
					RemoteAddr: at(9 * page), RKey: bind.Key})
				if f := <-asked; f.VA != far.va(first+9*page)&^(page-1) || !f.Write {
					t.Errorf("the Pager was called for %#x, write %t", f.VA, f.Write)
				}
				unbind(a)
				hold.Store(false)
				release()
				expect(t, b.scq, 4, guestdrv.WCRemAccessErr, guestdrv.WCOpRDMAWrite)
				far.expect(first+9*page, want[9*page:10*page], "a removed window")
				destroy(t, a, b)

				// An address for which the region's Pager has no page is invalid through the window, too (PF-13).
				a, b = connect(t, ha, hb, c, faulty)
				rebind(a)
				far.evictAll()
				refuse.Store(true)
				do(b, guestdrv.WRRDMARead, guestdrv.WCOpRDMARead, n, page, 8, guestdrv.WCRemAccessErr)
				destroy(t, a, b)
				if err := w.Close(); err != nil {
					t.Fatal(err)
				}
				far.check()
				if err := far.mr.Close(); err != nil {
					t.Errorf("a region without its window: %v", err)
				}
			})
	}
}
