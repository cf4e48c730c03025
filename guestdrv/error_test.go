package guestdrv_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/vnicd/vnicd/device/abi"
	"github.com/vnicd/vnicd/guestdrv"
)

// quick are options under which failing retries end soon.
var quick = guestdrv.ConnectOptions{Timeout: 8, RetryCnt: 3, RNRRetry: 2, MinRNRTimer: 1}

func (e *end) state(tb testing.TB) uint8 {
	tb.Helper()
	a, err := e.qp.Query()
	if err != nil {
		tb.Fatal(err)
	}
	return a.QPState
}

// TestRCErrors makes one request fail in every way that a peer or a key can make
// it fail and checks the status (IBTA 10.10.3, 11.6.2), that the QP goes to ERR
// and that what was queued behind is flushed.
func TestRCErrors(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	src, smr := ha.region(t, 8192, abi.AccessLocalWrite)
	_, ro := ha.region(t, 8192, 0)
	dst, dmr := hb.region(t, 8192, allAccess)
	absent, err := hb.pd.RegisterPages(guestdrv.PageSpec{IOVA: 0x10000, Length: 8192, PageShift: 12, PAs: []uint64{dst.PA(), abi.MTTAbsent}, Access: allAccess})
	if err != nil {
		t.Fatal(err)
	}
	_, readOnly := hb.region(t, 8192, abi.AccessRemoteRead)
	_, local := hb.region(t, 8192, abi.AccessLocalWrite)
	otherPD, err := hb.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	_, foreign := func() (*guestdrv.Buffer, *guestdrv.MR) {
		b, err := hb.Alloc(8192)
		if err != nil {
			t.Fatal(err)
		}
		mr, err := otherPD.Register(b, allAccess)
		if err != nil {
			t.Fatal(err)
		}
		return b, mr
	}()
	gone, err := hb.pd.Register(dst, allAccess)
	if err != nil {
		t.Fatal(err)
	}
	if err := gone.Deregister(); err != nil {
		t.Fatal(err)
	}
	write := func(mr *guestdrv.MR, off uint64, n int) *guestdrv.SendWR {
		return &guestdrv.SendWR{Opcode: abi.WRRDMAWrite, SGL: []abi.SGE{smr.SGE(0, n)}, RemoteAddr: mr.Addr() + off, RKey: mr.RKey()}
	}
	read := func(mr *guestdrv.MR, off uint64, n int) *guestdrv.SendWR {
		return &guestdrv.SendWR{Opcode: abi.WRRDMARead, SGL: []abi.SGE{smr.SGE(0, n)}, RemoteAddr: mr.Addr() + off, RKey: mr.RKey()}
	}
	atomic := func(mr *guestdrv.MR, off uint64) *guestdrv.SendWR {
		return &guestdrv.SendWR{Opcode: abi.WRAtomicFetchAndAdd, SGL: []abi.SGE{smr.SGE(0, 8)}, RemoteAddr: mr.Addr() + off, RKey: mr.RKey(), CompareAdd: 1}
	}
	send := func(sge ...abi.SGE) *guestdrv.SendWR { return &guestdrv.SendWR{Opcode: abi.WRSend, SGL: sge} }
	for _, tc := range []struct {
		name   string
		wr     *guestdrv.SendWR
		recv   []abi.SGE // posted at the peer, nil: none
		access uint32    // of the peer's QP, 0: all
		status uint32
		peer   uint32 // status of the peer's receive, if one was posted
	}{
		{name: "write beyond the end", wr: write(dmr, 8000, 500), status: abi.WCRemAccessErr},
		{name: "write before the start", wr: write(dmr, ^uint64(0), 1), status: abi.WCRemAccessErr},
		{name: "write that wraps", wr: &guestdrv.SendWR{Opcode: abi.WRRDMAWrite, SGL: []abi.SGE{smr.SGE(0, 64)}, RemoteAddr: ^uint64(0) - 10, RKey: dmr.RKey()}, status: abi.WCRemAccessErr},
		{name: "write without right", wr: write(readOnly, 0, 100), status: abi.WCRemAccessErr},
		{name: "write to another PD", wr: write(foreign, 0, 100), status: abi.WCRemAccessErr},
		{name: "write with a stale key", wr: write(gone, 0, 100), status: abi.WCRemAccessErr},
		{name: "write with key 0", wr: &guestdrv.SendWR{Opcode: abi.WRRDMAWrite, SGL: []abi.SGE{smr.SGE(0, 64)}, RemoteAddr: dst.PA()}, status: abi.WCRemAccessErr},
		{name: "write of several packets beyond the end", wr: write(dmr, 8192-5000, 5001), status: abi.WCRemAccessErr},
		{name: "write to an absent page that stays so", wr: write(absent, 4096, 100), status: abi.WCRNRRetryExcErr},
		{name: "write, QP forbids", wr: write(dmr, 0, 100), access: abi.AccessRemoteRead, status: abi.WCRemInvReqErr},
		{name: "read beyond the end", wr: read(dmr, 8000, 500), status: abi.WCRemAccessErr},
		{name: "read without right", wr: read(local, 0, 100), status: abi.WCRemAccessErr},
		{name: "atomic without right", wr: atomic(readOnly, 0), status: abi.WCRemAccessErr},
		{name: "atomic unaligned", wr: atomic(dmr, 4), status: abi.WCRemInvReqErr},
		{name: "gather beyond the end", wr: send(abi.SGE{Addr: src.Addr() + 8000, Length: 500, LKey: smr.LKey()}), status: abi.WCLocProtErr},
		{name: "gather with a bad key", wr: send(abi.SGE{Addr: src.Addr(), Length: 5, LKey: smr.LKey() ^ 0x55}), status: abi.WCLocProtErr},
		{name: "gather with the reserved key", wr: send(abi.SGE{Addr: src.PA(), Length: 5, LKey: abi.DMALKey}), status: abi.WCLocProtErr},
		{name: "scatter without right", wr: &guestdrv.SendWR{Opcode: abi.WRRDMARead, SGL: []abi.SGE{ro.SGE(0, 100)}, RemoteAddr: dmr.Addr(), RKey: dmr.RKey()}, status: abi.WCLocProtErr},
		{name: "receive buffer too short", wr: send(smr.SGE(0, 5000)), recv: []abi.SGE{dmr.SGE(0, 4999)}, status: abi.WCRemInvReqErr, peer: abi.WCLocLenErr},
		{name: "receive buffer's key is bad", wr: send(smr.SGE(0, 100)), recv: []abi.SGE{{Addr: dst.Addr(), Length: 100, LKey: dmr.LKey() ^ 0x55}}, status: abi.WCRemOpErr, peer: abi.WCLocProtErr},
		{name: "receive buffer is read-only", wr: send(smr.SGE(0, 100)), recv: []abi.SGE{readOnly.SGE(0, 100)}, status: abi.WCRemOpErr, peer: abi.WCLocProtErr},
		{name: "no receive buffer", wr: send(smr.SGE(0, 100)), status: abi.WCRNRRetryExcErr},
		{name: "unknown opcode", wr: &guestdrv.SendWR{Opcode: 99, SGL: []abi.SGE{smr.SGE(0, 100)}}, status: abi.WCLocQPOpErr},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := quick
			o.Access = tc.access
			a, b := connect(t, ha, hb, qpDefaults(), o)
			if tc.recv != nil {
				b.recv(t, 50, tc.recv...)
			}
			fill(src.Bytes(), 1)
			before := append([]byte{}, dst.Bytes()...)
			tc.wr.ID, tc.wr.Flags = 10, 0 // unsignalled: a failure is reported all the same
			if err := a.qp.QueueSend(tc.wr); err != nil {
				t.Fatal(err)
			}
			if err := a.qp.QueueSend(&guestdrv.SendWR{ID: 11, Opcode: abi.WRSend}); err != nil {
				t.Fatal(err)
			}
			a.recv(t, 12)
			a.qp.Ring()
			expect(t, a.scq, 10, tc.status, 0)
			expect(t, a.scq, 11, abi.WCWRFlushErr, 0)
			expect(t, a.rcq, 12, abi.WCWRFlushErr, 0)
			if tc.recv != nil {
				expect(t, b.rcq, 50, tc.peer, 0)
			}
			if s := a.state(t); s != abi.QPErr {
				t.Errorf("QP is in state %d, want ERR", s)
			}
			// What is posted in ERR is flushed as well.
			a.post(t, &guestdrv.SendWR{ID: 13, Opcode: abi.WRSend})
			expect(t, a.scq, 13, abi.WCWRFlushErr, 0)
			if tc.status == abi.WCRemAccessErr && !bytes.Equal(before, dst.Bytes()) {
				t.Error("the target was written to")
			}
			destroy(t, a, b)
		})
	}
	st, err := hb.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if st.Value[abi.StatAccessErrors] == 0 || st.Value[abi.StatTxNaks] == 0 || st.Value[abi.StatTxRNR] == 0 {
		t.Errorf("errors were not counted: %v", st.Value)
	}
}

func destroy(tb testing.TB, ends ...*end) {
	tb.Helper()
	for _, e := range ends {
		if err := e.qp.Destroy(); err != nil {
			tb.Error(err)
		}
		for _, cq := range []*guestdrv.CQ{e.scq, e.rcq} {
			if err := cq.Destroy(); err != nil {
				tb.Error(err)
			}
		}
	}
}

// TestRetryExceeded sends to a QP that is not there.
func TestRetryExceeded(t *testing.T) {
	r := newRig(t, rigConfig{})
	_, smr := r.hosts[0].region(t, 4096, 0)
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), quick)
	if err := b.qp.Destroy(); err != nil {
		t.Fatal(err)
	}
	a.post(t, &guestdrv.SendWR{ID: 1, Opcode: abi.WRSend, SGL: []abi.SGE{smr.SGE(0, 100)}})
	expect(t, a.scq, 1, abi.WCRetryExcErr, 0)
	st, err := a.h.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if st.Value[abi.StatTimeouts] == 0 || st.Value[abi.StatRetransmits] == 0 {
		t.Errorf("no timeouts or retransmissions counted: %v", st.Value)
	}
}

// TestRNRRecovers posts the receive only after the sender was told that there is none.
func TestRNRRecovers(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	src, smr := a.h.region(t, 8192, 0)
	dst, dmr := b.h.region(t, 8192, abi.AccessLocalWrite)
	fill(src.Bytes(), 1)
	a.post(t, &guestdrv.SendWR{ID: 1, Opcode: abi.WRSend, Flags: abi.SendSignaled, SGL: []abi.SGE{smr.SGE(0, 5000)}})
	ctx := ctxFor(t)
	for {
		st, err := a.h.Stats()
		if err != nil {
			t.Fatal(err)
		}
		if st.Value[abi.StatRxRNR] > 0 {
			break
		}
		if ctx.Err() != nil {
			t.Fatal("no RNR NAK arrived")
		}
	}
	b.recv(t, 2, dmr.SGE(0, 8192))
	expect(t, a.scq, 1, abi.WCSuccess, abi.WCOpSend)
	expect(t, b.rcq, 2, abi.WCSuccess, abi.WCOpRecv)
	if !bytes.Equal(src.Bytes()[:5000], dst.Bytes()[:5000]) {
		t.Error("data differ")
	}
}

// TestFlush moves a QP with posted work to ERR, then through RESET back to work.
func TestFlush(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	_, smr := a.h.region(t, 4096, allAccess)
	_, dmr := b.h.region(t, 4096, allAccess)
	for i := range 20 {
		b.recv(t, uint64(i), dmr.SGE(0, 100))
	}
	if err := b.qp.ToErr(); err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		expect(t, b.rcq, uint64(i), abi.WCWRFlushErr, 0)
	}
	b.post(t, &guestdrv.SendWR{ID: 70, Opcode: abi.WRSend})
	expect(t, b.scq, 70, abi.WCWRFlushErr, 0)
	b.recv(t, 71)
	// A post to the RQ has no doorbell (rxe's ABI); the next one to the SQ brings it along at the latest.
	b.post(t, &guestdrv.SendWR{ID: 72, Opcode: abi.WRSend})
	expect(t, b.scq, 72, abi.WCWRFlushErr, 0)
	expect(t, b.rcq, 71, abi.WCWRFlushErr, 0)

	for _, e := range []*end{a, b} {
		if err := e.qp.Reset(); err != nil {
			t.Fatal(err)
		}
	}
	join(t, a, b, guestdrv.ConnectOptions{})
	b.recv(t, 80, dmr.SGE(0, 100))
	a.post(t, &guestdrv.SendWR{ID: 81, Opcode: abi.WRSend, Flags: abi.SendSignaled, SGL: []abi.SGE{smr.SGE(0, 100)}})
	expect(t, a.scq, 81, abi.WCSuccess, abi.WCOpSend)
	expect(t, b.rcq, 80, abi.WCSuccess, abi.WCOpRecv)
}

// TestCommandErrors sees that commands are refused with the status that says why.
func TestCommandErrors(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1})
	h := r.hosts[0]
	buf, mr := h.region(t, 8192, allAccess)
	cq := h.cq(t, 16)
	qp, err := h.pd.CreateQP(guestdrv.QPConfig{Type: abi.QPTypeRC, SendCQ: cq, RecvCQ: cq})
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, err error, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	check("PD in use", h.pd.Destroy(), abi.StatusBusy)
	check("CQ in use", cq.Destroy(), abi.StatusBusy)
	_, err = h.pd.RegisterPages(guestdrv.PageSpec{IOVA: 0, Length: 4096, PageShift: 12, PAs: []uint64{12345 << 12}, Access: allAccess})
	check("PA outside memory", err, abi.StatusFault)
	_, err = h.pd.RegisterPages(guestdrv.PageSpec{IOVA: 0, Length: 8192, PageShift: 12, PAs: []uint64{buf.PA()}, Access: allAccess})
	check("too few pages", err, abi.StatusInvalid)
	_, err = h.pd.RegisterPages(guestdrv.PageSpec{IOVA: 0, Length: 4096, PageShift: 11, PAs: []uint64{buf.PA()}, Access: allAccess})
	check("bad page shift", err, abi.StatusInvalid)
	_, err = h.pd.RegisterPages(guestdrv.PageSpec{IOVA: ^uint64(0) - 100, Length: 4096, PageShift: 12, PAs: []uint64{buf.PA()}, Access: allAccess})
	check("VA range wraps", err, abi.StatusInvalid)
	_, err = h.pd.Register(buf, abi.AccessRemoteWrite)
	check("remote write without local write", err, abi.StatusInvalid)
	check("SET_MTT beyond the table", mr.SetPages(1, []uint64{buf.PA(), buf.PA()}), abi.StatusInvalid)
	check("RTR from RESET", qp.ToRTR(guestdrv.Peer{QPN: 5, Path: h.at()}, guestdrv.ConnectOptions{}), abi.StatusInvalid)
	check("GID of another MAC's index", h.ClearGID(60000), abi.StatusInvalid)
	if err := qp.ToInit(abi.AccessRemoteRead, 0); err != nil {
		t.Fatal(err)
	}
	path := h.at()
	path.SGIDIndex = 5
	check("empty GID entry", qp.ToRTR(guestdrv.Peer{QPN: 5, Path: path}, guestdrv.ConnectOptions{}), abi.StatusInvalid)
	check("MTU above the port's", qp.ToRTR(guestdrv.Peer{QPN: 5, Path: h.at()}, guestdrv.ConnectOptions{MTU: abi.MTU4096}), abi.StatusInvalid)
	if err := qp.Destroy(); err != nil {
		t.Fatal(err)
	}
	check("QP destroyed twice", qp.Destroy(), abi.StatusNotFound)
	if err := cq.Destroy(); err != nil {
		t.Fatal(err)
	}
	if err := mr.Deregister(); err != nil {
		t.Fatal(err)
	}
	check("MR destroyed twice", mr.Deregister(), abi.StatusNotFound)
	if err := h.pd.Destroy(); err != nil {
		t.Fatal(err)
	}
}
