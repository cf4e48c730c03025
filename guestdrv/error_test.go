package guestdrv_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
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
