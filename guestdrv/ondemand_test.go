package guestdrv_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/guestdrv"
)

const readOnlyPage = guestdrv.PageReadOnly

// faulty are options for connections with faults on a busy machine: an operation fails only if its page never comes.
var faulty = guestdrv.ConnectOptions{MinRNRTimer: 5, Timeout: 18}

// touch makes the device write to one byte of every granule of mr, from an end of the same host that is connected to
// itself.
func touch(tb testing.TB, x *end, mr *guestdrv.MR) {
	tb.Helper()
	for off := 0; off < int(mr.Len()); off += granule {
		x.post(tb, &request{ID: 9, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{mr.SGE(off, 1)}, RemoteAddr: mr.Addr() + uint64(off), RKey: mr.RKey()})
		expect(tb, x.scq, 9, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	}
}

// warm makes a region's memory present on the host: otherwise messages of unreliable services are dropped until it is
// (PF-11).
func (h *host) warm(tb testing.TB, mr *guestdrv.MR) {
	tb.Helper()
	x := h.selfEnd(tb)
	touch(tb, x, mr)
	destroy(tb, x)
}

// selfEnd is an end that is connected to itself.
func (h *host) selfEnd(tb testing.TB) *end {
	tb.Helper()
	e := h.end(tb, qpDefaults(), 77)
	if err := e.qp.Connect(bg, guestdrv.Peer{QPN: e.qp.Number(), PSN: 77, Path: h.at()},
		guestdrv.ConnectOptions{PSN: 77, Access: peerAccess}); err != nil {
		tb.Fatal(err)
	}
	return e
}

func (h *host) stat(tb testing.TB, s guestdrv.Stat) uint64 {
	tb.Helper()
	st, err := h.Stats(bg)
	if err != nil {
		tb.Fatal(err)
	}
	return st[s]
}

// verb is an operation between two arenas: n bytes at offset lo of the near one and ro of the far one.
type verb struct {
	name     string
	typ      guestdrv.QPType
	op       guestdrv.Opcode
	wcop     guestdrv.WCOpcode
	n        int
	recv     bool // consumes a receive
	reverse  bool // data flows to the near side
	readOnly bool // the far side is only read
}

var verbs = []verb{
	{name: "RC SEND", typ: guestdrv.QPTypeRC, op: guestdrv.WRSend, wcop: guestdrv.WCOpSend, n: 30000, recv: true},
	{name: "RC SEND with immediate", typ: guestdrv.QPTypeRC, op: guestdrv.WRSendWithImm, wcop: guestdrv.WCOpSend, n: 9000,
		recv: true},
	{name: "RC WRITE", typ: guestdrv.QPTypeRC, op: guestdrv.WRRDMAWrite, wcop: guestdrv.WCOpRDMAWrite, n: 50000},
	{name: "RC WRITE with immediate", typ: guestdrv.QPTypeRC, op: guestdrv.WRRDMAWriteWithImm,
		wcop: guestdrv.WCOpRDMAWrite, n: 9000, recv: true},
	{name: "RC READ", typ: guestdrv.QPTypeRC, op: guestdrv.WRRDMARead, wcop: guestdrv.WCOpRDMARead, n: 50000,
		reverse: true, readOnly: true},
	{name: "RC compare and swap", typ: guestdrv.QPTypeRC, op: guestdrv.WRAtomicCmpAndSwp, wcop: guestdrv.WCOpCompSwap,
		n: 8},
	{name: "RC fetch and add", typ: guestdrv.QPTypeRC, op: guestdrv.WRAtomicFetchAndAdd, wcop: guestdrv.WCOpFetchAdd,
		n: 8},
	{name: "UC SEND", typ: guestdrv.QPTypeUC, op: guestdrv.WRSend, wcop: guestdrv.WCOpSend, n: 9000, recv: true},
	{name: "UC WRITE", typ: guestdrv.QPTypeUC, op: guestdrv.WRRDMAWrite, wcop: guestdrv.WCOpRDMAWrite, n: 9000},
	{name: "UD SEND", typ: guestdrv.QPTypeUD, op: guestdrv.WRSend, wcop: guestdrv.WCOpSend, n: 1000, recv: true},
}

// TestOnDemand runs every operation of every transport with pages that are absent at stage one, at stage two, or both,
// on either side or both (PF-8..12, ODP-7). The operation must end with the right data whatever was absent; the faults
// must have been raised at that level (PF-7).
func TestOnDemand(t *testing.T) {
	const near, far = 1, 2
	r := newRig(t, rigConfig{driver: guestdrv.Config{Memory: 96 << 20}})
	ha, hb := r.hosts[0], r.hosts[1]
	selfs := []*end{ha.selfEnd(t), hb.selfEnd(t)}
	base := uint64(0x7000_0000_0000)
	for _, v := range verbs {
		for sides := near; sides <= near|far; sides++ {
			for levels := 1; levels <= 3; levels++ {
				name := fmt.Sprintf("%s/%s/%s", v.name, []string{"", "near", "far", "both"}[sides],
					[]string{"", "guest", "host", "guest and host"}[levels])
				base += 1 << 30
				t.Run(name, func(t *testing.T) {
					la, ra := newArena(t, ha, base, 16, 16), newArena(t, hb, base+1<<29, 16, 16)
					for i, a := range []*arena{la, ra} {
						if sides&(1<<i) == 0 || levels&2 == 0 {
							a.warm(selfs[i])
						}
						a.register(allAccess)
						if sides&(1<<i) == 0 || levels&1 == 0 {
							if err := a.mr.Prefetch(ctxFor(t), a.base, 16*page, true); err != nil {
								t.Fatal(err)
							}
						}
					}
					v.run(t, la, ra, sides, levels)
					// No memory is released: the next arenas' memory must be absent on the host.
					for _, a := range []*arena{la, ra} {
						if err := a.mr.Close(); err != nil {
							t.Error(err)
						}
					}
				})
			}
		}
	}
}

// run performs the operation once, or until it arrives, and checks it.
func (v *verb) run(t *testing.T, la, ra *arena, sides, levels int) {
	ha, hb := la.h, ra.h
	guest := []uint64{ha.stat(t, guestdrv.StatGuestFaults), hb.stat(t, guestdrv.StatGuestFaults)}
	hosts := []uint64{ha.stat(t, guestdrv.StatHostFaults), hb.stat(t, guestdrv.StatHostFaults)}
	a, b := v.ends(t, ha, hb)
	const lo, ro = 4000, 2 * page // unaligned: the first page is used by 96 bytes
	src := make([]byte, v.n)
	fill(src, uint64(levels))
	wr := request{
		ID: 1, Opcode: v.op, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{la.mr.SGEAt(la.va(lo), v.n)},
		RemoteAddr: ra.va(ro), RKey: ra.mr.RKey(),
	}
	old := make([]byte, v.n)
	fill(old, 99)
	want := src
	switch v.op {
	case guestdrv.WRRDMARead:
		ra.write(ro, src)
	case guestdrv.WRAtomicCmpAndSwp:
		ra.write(ro, old)
		wr.CompareAdd, wr.Swap = binary.NativeEndian.Uint64(old), binary.NativeEndian.Uint64(src)
	case guestdrv.WRAtomicFetchAndAdd:
		ra.write(ro, old)
		wr.CompareAdd = 12345
		want = binary.NativeEndian.AppendUint64(nil, binary.NativeEndian.Uint64(old)+12345)
	default:
		la.write(lo, src)
	}
	grh := 0
	if v.typ == guestdrv.QPTypeUD {
		grh = grhLen
		wr.AH, wr.RemoteQPN, wr.QKey = ha.ah(t, hb), b.qp.Number(), 5
		defer wr.AH.Close()
	}
	if v.recv {
		// With immediate data, no memory of the receive buffer is used.
		b.recv(t, 2, ra.mr.SGEAt(ra.va(ro-grh), v.n+grh))
	}
	arrived := func() bool { return bytes.Equal(ra.read(ro, v.n), want) }
	if v.recv {
		arrived = func() bool {
			var wcs [1]guestdrv.Completion
			if b.rcq.Poll(wcs[:]) == 0 {
				return false
			}
			if wcs[0].Status != guestdrv.WCSuccess || int(wcs[0].ByteLen) != v.n+grh {
				t.Fatalf("receive completion %+v", wcs[0])
			}
			return true
		}
	}
	for done := false; !done; {
		a.post(t, &wr)
		expect(t, a.scq, 1, guestdrv.WCSuccess, v.wcop)
		if v.typ == guestdrv.QPTypeRC {
			if v.recv {
				expect(t, b.rcq, 2, guestdrv.WCSuccess, guestdrv.WCOpRecv+btoi(v.op == guestdrv.WRRDMAWriteWithImm))
			}
			break
		}
		// Messages that meet an absent page are lost until it is present (PF-11).
		for tries := 0; tries < 20 && !done; tries++ {
			if done = arrived(); !done {
				time.Sleep(time.Millisecond)
			}
		}
	}
	switch {
	case v.reverse:
		la.expect(lo, want, "near side")
	case v.op == guestdrv.WRAtomicCmpAndSwp || v.op == guestdrv.WRAtomicFetchAndAdd:
		la.expect(lo, old, "near side, result of the atomic")
		ra.expect(ro, want, "far side")
	default:
		ra.expect(ro, want, "far side")
	}
	for i, h := range []*host{ha, hb} {
		g, n := h.stat(t, guestdrv.StatGuestFaults)-guest[i], h.stat(t, guestdrv.StatHostFaults)-hosts[i]
		absent := sides&(1<<i) != 0
		if (g > 0) != (absent && levels&1 != 0) {
			t.Errorf("side %d: %d guest faults", i, g)
		}
		// Work rings are host memory, too, and may have been absent.
		if absent && levels&2 != 0 && n == 0 {
			t.Errorf("side %d: no host fault", i)
		}
	}
}

func btoi(b bool) guestdrv.WCOpcode {
	if b {
		return guestdrv.WCOpRecvRDMAWithImm - guestdrv.WCOpRecv
	}
	return 0
}

// ends makes a pair of QPs with the verb's transport.
func (v *verb) ends(t *testing.T, ha, hb *host) (a, b *end) {
	c := qpDefaults()
	c.Type = v.typ
	if v.typ == guestdrv.QPTypeUD {
		return ha.udEnd(t, c, 5), hb.udEnd(t, c, 5)
	}
	return connect(t, ha, hb, c, faulty)
}

// TestOnDemandCapabilities checks the device's capabilities (ODP-2).
func TestOnDemandCapabilities(t *testing.T) {
	at := newRig(t, rigConfig{hosts: 1}).hosts[0].Attr()
	const all = guestdrv.ODPSend | guestdrv.ODPRecv | guestdrv.ODPWrite | guestdrv.ODPRead | guestdrv.ODPAtomic |
		guestdrv.ODPSRQRecv
	if at.ODPRC != all || at.ODPUC&(guestdrv.ODPSend|guestdrv.ODPWrite) != guestdrv.ODPSend|guestdrv.ODPWrite ||
		at.ODPUD&(guestdrv.ODPSend) != guestdrv.ODPSend {
		t.Errorf("RC %#x, UC %#x, UD %#x", at.ODPRC, at.ODPUC, at.ODPUD)
	}
}

// TestImplicit uses addresses all over the implicit region, including both ends (ODP-1).
func TestImplicit(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	a, _ := connect(t, ha, hb, qpDefaults(), guestdrv.ConnectOptions{})
	buf, err := hb.Alloc(8 * page)
	if err != nil {
		t.Fatal(err)
	}
	places := []uint64{0, page, 1 << 32, 0x7fff_ffff_f000, 1 << 48, 1<<56 - page, guestdrv.ImplicitLength - page}
	mr, err := hb.pd.RegisterImplicit(bg, allAccess, guestdrv.PagerFunc(func(_ context.Context, f guestdrv.PageFault,
		pas []uint64) error {
		for i, p := range places {
			if p == f.VA {
				pas[0] = buf.PA() + uint64(i*page)
				return nil
			}
		}
		return errOutside
	}))
	if err != nil {
		t.Fatal(err)
	}
	src, smr := ha.region(t, page, 0)
	for i, va := range places {
		fill(src.Bytes(), uint64(i))
		a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{smr.SGE(0, page)}, RemoteAddr: va, RKey: mr.RKey()})
		expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		if !bytes.Equal(buf.Bytes()[i*page:][:page], src.Bytes()) {
			t.Errorf("%#x: data differ", va)
		}
	}
	// A huge invalidation costs only the present pages.
	if err := mr.Invalidate(bg, 0, guestdrv.ImplicitLength); err != nil {
		t.Fatal(err)
	}
	before := mr.Stats().Faults
	a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{smr.SGE(0, 8)}, RemoteAddr: 1 << 48, RKey: mr.RKey()})
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	if mr.Stats().Faults == before {
		t.Error("no fault after an invalidation")
	}
	if err := mr.Close(); err != nil {
		t.Error(err)
	}
}

// TestReadOnlyPages reads pages first and writes to them later (copy on write).
func TestReadOnlyPages(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	a, _ := connect(t, ha, hb, qpDefaults(), guestdrv.ConnectOptions{})
	far := newArena(t, hb, 1<<30, 4, 4)
	far.readOnly = true
	far.register(allAccess)
	content := make([]byte, page)
	fill(content, 3)
	far.write(0, content)
	buf, mr := ha.region(t, page, guestdrv.AccessLocalWrite)
	wr := &request{ID: 1, Opcode: guestdrv.WRRDMARead, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{mr.SGE(0, page)},
		RemoteAddr: far.base, RKey: far.mr.RKey()}
	a.post(t, wr)
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMARead)
	if !bytes.Equal(buf.Bytes(), content) {
		t.Error("READ: data differ")
	}
	faults := far.mr.Stats().Faults
	a.post(t, wr)
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMARead)
	if n := far.mr.Stats().Faults; n != faults {
		t.Errorf("%d faults by reading a present page", n-faults)
	}
	fill(buf.Bytes(), 4)
	wr.Opcode = guestdrv.WRRDMAWrite
	a.post(t, wr)
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	far.expect(0, buf.Bytes(), "after WRITE")
	if n := far.mr.Stats().Faults; n == faults {
		t.Error("a read-only page was written to without a fault")
	}
}

// TestAnswersNobodyWaitsFor: answers to faults are sent to the device without an interrupt in return, although there
// are more of them than command slots. Commands with a waiting caller get their answers in between.
func TestAnswersNobodyWaitsFor(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	a, _ := connect(t, ha, hb, qpDefaults(), guestdrv.ConnectOptions{})
	const pages = 200
	far := newArena(t, hb, 1<<30, pages, pages)
	far.register(allAccess)
	_, mr := ha.region(t, page, guestdrv.AccessLocalWrite)
	hb.stat(t, 0)
	hb.CommandInterrupts()
	for i := range uint64(pages) {
		a.post(t, &request{ID: i, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{mr.SGE(0, 8)}, RemoteAddr: far.base + i*page, RKey: far.mr.RKey()})
		expect(t, a.scq, i, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		if i == pages/2 {
			hb.stat(t, 0)
		}
	}
	if s := far.mr.Stats(); s.Faults < pages || s.Failed != 0 {
		t.Errorf("%+v, expected a fault for each of %d pages", s, pages)
	}
	// One command has a waiting caller; the others cause an interrupt only when all slots are in use.
	if n := hb.CommandInterrupts(); n == 0 || n > pages/4 {
		t.Errorf("%d interrupts, expected few", n)
	}
}

// answering runs f with a driver that answers faults by one command, and with one that does not know
// CapSetMTTResume, or finds an older device.
func answering(t *testing.T, f func(t *testing.T, forget guestdrv.Caps)) {
	t.Run("SET_MTT", func(t *testing.T) { f(t, 0) })
	t.Run("SET_MTT, RESUME_FAULT", func(t *testing.T) { f(t, guestdrv.CapSetMTTResume) })
}

// TestFaultCommands looks at the commands that answer faults: one each if the device can (PF-7, PF-8).
func TestFaultCommands(t *testing.T) {
	answering(t, func(t *testing.T, forget guestdrv.Caps) {
		r := newRig(t, rigConfig{})
		ha, hb := r.hosts[0], r.hosts[1]
		if hb.Attr().Caps&guestdrv.CapSetMTTResume == 0 {
			t.Fatalf("capabilities %v", hb.Attr().Caps)
		}
		hb.Forget(forget)
		a, _ := connect(t, ha, hb, qpDefaults(), faulty)
		const pages = 40 // all command slots are used
		far := newArena(t, hb, 1<<30, pages, pages).register(allAccess)
		buf, mr := ha.region(t, page, guestdrv.AccessLocalWrite)
		// Each command slot is used, so its memory is present on the host: RESUME_FAULT would overtake a SET_MTT whose
		// request must be fetched, and the operation would fault again.
		for range pages {
			hb.stat(t, guestdrv.StatFaultsResumed)
		}
		for i := range pages {
			fill(buf.Bytes(), uint64(i))
			a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
				SGL: []guestdrv.SGE{mr.SGE(0, page)}, RemoteAddr: far.va(i * page), RKey: far.mr.RKey()})
			expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
			far.expect(i*page, buf.Bytes(), "far side")
		}
		ops := hb.LastCommands()
		if ops["SET_MTT"] == 0 || (ops["RESUME_FAULT"] == 0) != (forget == 0) {
			t.Errorf("commands %v", ops)
		}
		if n := hb.stat(t, guestdrv.StatFaultsResumed); n != pages || far.mr.Stats().Faults != pages {
			t.Errorf("%d faults, %d resumed, want %d of each", far.mr.Stats().Faults, n, pages)
		}
	})
}

// TestRefusedPages has a device that refuses the pages of an answer, as pinned regions use all of the VM's quota:
// SET_MTT does not resume the operation then. It is a shortage that may pass, so the operation waits (HF-2), and ends
// well once there is room.
func TestRefusedPages(t *testing.T) {
	answering(t, func(t *testing.T, forget guestdrv.Caps) {
		const quota, rest = 1024, 150 // a table costs 144, a page in it 64
		r := newRig(t, rigConfig{limits: hca.Limits{MTTs: quota}})
		ha, hb := r.hosts[0], r.hosts[1]
		hb.Forget(forget)
		far := newArena(t, hb, 1<<30, 4, 4).register(allAccess)
		_, mr := ha.region(t, page, guestdrv.AccessLocalWrite)
		a, b := connect(t, ha, hb, qpDefaults(), faulty)
		buf, err := hb.Alloc(page)
		if err != nil {
			t.Fatal(err)
		}
		pas := slices.Repeat([]uint64{buf.PA()}, quota-rest)
		for round := range 2 { // the second finds a region that has been refused before
			all, err := hb.pd.RegisterPages(bg, guestdrv.PageSpec{PageShift: 12, Length: (quota - rest) * page, PAs: pas})
			if err != nil {
				t.Fatal(err)
			}
			a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
				SGL: []guestdrv.SGE{mr.SGE(0, 8)}, RemoteAddr: far.base, RKey: far.mr.RKey()})
			before := far.mr.Stats().Later
			testutil.Eventually(t, "several pauses", func() bool { return far.mr.Stats().Later >= before+4 })
			var wcs [1]guestdrv.Completion
			if a.scq.Poll(wcs[:]) != 0 {
				t.Errorf("round %d: completed without its page: %+v", round, wcs[0])
			}
			if err := all.Close(); err != nil {
				t.Fatal(err)
			}
			expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
			if n := far.mr.Stats().Failed; n != 0 {
				t.Errorf("round %d: %d faults failed", round, n)
			}
			far.evictAll()
		}
		destroy(t, a, b)
	})
}

// TestInvalidAddress has a Pager that refuses: the operation ends with the right error on both sides (PF-13), locally
// and across VXLAN.
func TestInvalidAddress(t *testing.T) {
	for _, vxlan := range []bool{false, true} {
		t.Run(map[bool]string{false: "local", true: "VXLAN"}[vxlan], func(t *testing.T) {
			r := newRig(t, rigConfig{vxlan: vxlan})
			ha, hb := r.hosts[0], r.hosts[1]
			no := func(context.Context, guestdrv.PageFault) error { return errOutside }
			near, far := newArena(t, ha, 1<<40, 4, 4), newArena(t, hb, 1<<41, 4, 4)
			near.hook, far.hook = no, no
			near.register(allAccess)
			far.register(allAccess)
			_, good := ha.region(t, 2*page, allAccess)
			_, goodFar := hb.region(t, 2*page, allAccess)
			for _, tc := range []struct {
				name      string
				op        guestdrv.Opcode
				near, far bool // whose address is invalid
				status    guestdrv.WCStatus
				farStatus guestdrv.WCStatus // of the receive, if there is one
			}{
				{"WRITE, near", guestdrv.WRRDMAWrite, true, false, guestdrv.WCLocProtErr, 0},
				{"WRITE, far", guestdrv.WRRDMAWrite, false, true, guestdrv.WCRemAccessErr, 0},
				{"READ, near", guestdrv.WRRDMARead, true, false, guestdrv.WCLocProtErr, 0},
				{"READ, far", guestdrv.WRRDMARead, false, true, guestdrv.WCRemAccessErr, 0},
				{"atomic, far", guestdrv.WRAtomicFetchAndAdd, false, true, guestdrv.WCRemAccessErr, 0},
				{"atomic, near", guestdrv.WRAtomicFetchAndAdd, true, false, guestdrv.WCLocProtErr, 0},
				{"SEND, near", guestdrv.WRSend, true, false, guestdrv.WCLocProtErr, 0},
				{"SEND, far", guestdrv.WRSend, false, true, guestdrv.WCRemOpErr, guestdrv.WCLocProtErr},
			} {
				t.Run(tc.name, func(t *testing.T) {
					a, b := connect(t, ha, hb, qpDefaults(), faulty)
					local, remote, rkey, into := good.SGE(0, 8), goodFar.Addr(), goodFar.RKey(), goodFar.SGE(0, 8)
					if tc.near {
						local = near.mr.SGEAt(near.va(64), 8)
					}
					if tc.far {
						remote, rkey, into = far.va(64), far.mr.RKey(), far.mr.SGEAt(far.va(64), 8)
					}
					if tc.op == guestdrv.WRSend {
						b.recv(t, 2, into)
					}
					a.post(t, &request{ID: 1, Opcode: tc.op, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{local},
						RemoteAddr: remote, RKey: rkey})
					if wc := await(t, a.scq, 1)[0]; wc.Status != tc.status {
						t.Errorf("%s, want %s", wc.Status, tc.status)
					}
					if tc.farStatus != 0 {
						if wc := await(t, b.rcq, 1)[0]; wc.Status != tc.farStatus {
							t.Errorf("receive: %s, want %s", wc.Status, tc.farStatus)
						}
					}
					destroy(t, a, b)
				})
			}
			if near.mr.Stats().Failed == 0 || far.mr.Stats().Failed == 0 {
				t.Errorf("failed faults: near %d, far %d", near.mr.Stats().Failed, far.mr.Stats().Failed)
			}
		})
	}
}

// TestOnDemandBounds: an access outside of a region is an error at once, without a fault, for any end, address and key.
func TestOnDemandBounds(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 3})
	ha, hb, hc := r.hosts[0], r.hosts[1], r.hosts[2]
	far := newArena(t, hb, 1<<40, 4, 4).register(allAccess)
	foreign := newArena(t, hc, 1<<40, 4, 4).register(allAccess)
	gone := newArena(t, hb, 1<<41, 4, 4).register(allAccess)
	if err := gone.mr.Close(); err != nil {
		t.Fatal(err)
	}
	// The top of the address space.
	top := newArena(t, hb, 1<<64-4*page, 4, 4)
	top.register(allAccess)
	_, mr := ha.region(t, 4*page, allAccess)
	for _, tc := range []struct {
		name string
		va   uint64
		key  uint32
		n    int
		ok   bool
	}{
		{"last bytes", far.va(4*page - 8), far.mr.RKey(), 8, true},
		{"one byte too many", far.va(4*page - 8), far.mr.RKey(), 9, false},
		{"before the first", far.base - 1, far.mr.RKey(), 2, false},
		{"far away", 5, far.mr.RKey(), 8, false},
		{"wraps around", 1<<64 - 4, far.mr.RKey(), 8, false},
		{"top, last bytes", 1<<64 - 8, top.mr.RKey(), 8, true},
		{"top, wraps around", 1<<64 - 4, top.mr.RKey(), 8, false},
		{"stale key", gone.base, gone.mr.RKey(), 8, false},
		{"key of another VM", foreign.base, foreign.mr.RKey() ^ 0x100, 8, false},
		{"variant of another key", far.base, far.mr.RKey() ^ 1, 8, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := connect(t, ha, hb, qpDefaults(), guestdrv.ConnectOptions{})
			a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
				SGL: []guestdrv.SGE{mr.SGE(0, tc.n)}, RemoteAddr: tc.va, RKey: tc.key})
			want := guestdrv.WCSuccess
			if !tc.ok {
				want = guestdrv.WCRemAccessErr
			}
			if wc := await(t, a.scq, 1)[0]; wc.Status != want {
				t.Errorf("%s, want %s", wc.Status, want)
			}
			destroy(t, a, b)
		})
	}
	if n := foreign.mr.Stats().Faults; n != 0 {
		t.Errorf("%d faults in a VM without traffic", n)
	}
	if n := far.mr.Stats().Faults + top.mr.Stats().Faults; n != 2 {
		t.Errorf("%d faults, want 2", n)
	}
	for _, bad := range []struct{ iova, n uint64 }{{0, 0}, {1 << 63, 1<<63 + 1}, {4095, 1<<64 - 1}} {
		if _, err := hb.pd.RegisterOnDemand(bg, bad.iova, bad.n, allAccess, far); err == nil {
			t.Errorf("a region of %#x bytes at %#x was accepted", bad.n, bad.iova)
		}
	}
}

// TestResumeTokens answers faults that were not raised, which has no effect (ABI).
func TestResumeTokens(t *testing.T) {
	r := newRig(t, rigConfig{})
	for _, token := range []uint32{0, 1, 0x10001, 0xffffffff} {
		if err := r.hosts[0].ResumeFault(bg, token, true); !errors.Is(err, guestdrv.StatusNotFound) {
			t.Errorf("token %#x: %v", token, err)
		}
	}
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	mixedTraffic(t, a, b, 50, 1)
}

// TestOnDemandSRQ receives into absent pages through a shared receive queue, by several QPs: a QP that waits for its
// page does not delay the others (ODP-7).
func TestOnDemandSRQ(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	srq, err := hb.pd.CreateSRQ(bg, guestdrv.SRQConfig{MaxWR: 16, MaxSGE: 2})
	if err != nil {
		t.Fatal(err)
	}
	const n = 3000
	far := newArena(t, hb, 1<<40, 16, 16)
	release := make(chan struct{})
	far.hook = func(ctx context.Context, f guestdrv.PageFault) error {
		if f.VA != far.base { // only the first buffer's page is delayed
			return nil
		}
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	far.register(allAccess)
	for i := range 8 {
		off := 2 * i * page // two pages each; the message is in two parts
		if err := srq.PostRecv(&guestdrv.RecvWR{ID: uint64(i),
			SGL: []guestdrv.SGE{far.mr.SGEAt(far.va(off+100), 1000), far.mr.SGEAt(far.va(off+page), n)}}); err != nil {
			t.Fatal(err)
		}
	}
	buf, mr := ha.region(t, n, 0)
	fill(buf.Bytes(), 8)
	c := qpDefaults()
	c.SRQ = srq
	send := func(a *end, id uint64) {
		a.post(t, &request{ID: id, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{mr.SGE(0, n)}})
	}
	pair := func() (a, b *end) {
		a, b = ha.end(t, qpDefaults(), 1), hb.end(t, c, 2)
		join(t, a, b, faulty)
		return a, b
	}
	first, into := pair()
	send(first, 1)
	testutil.Eventually(t, "the first fault", func() bool { return far.mr.Stats().Faults > 0 })
	for i := range 5 {
		a, b := pair()
		send(a, 2)
		expect(t, a.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpSend)
		wc := await(t, b.rcq, 1)[0]
		if wc.Status != guestdrv.WCSuccess || wc.ByteLen != n || wc.ID == 0 {
			t.Fatalf("QP %d: completion %+v", i, wc)
		}
		off := 2 * int(wc.ID) * page
		far.expect(off+100, buf.Bytes()[:1000], "first part")
		far.expect(off+page, buf.Bytes()[1000:], "second part")
	}
	close(release)
	expect(t, first.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpSend)
	expect(t, into.rcq, 0, guestdrv.WCSuccess, guestdrv.WCOpRecv)
	far.expect(100, buf.Bytes()[:1000], "first part")
	far.expect(page, buf.Bytes()[1000:], "second part")
}
