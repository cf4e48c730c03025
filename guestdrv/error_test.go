package guestdrv_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
)

// quick are options under which failing retries end soon.
var quick = guestdrv.ConnectOptions{Timeout: 8, RetryCnt: 3, RNRRetry: 2, MinRNRTimer: 1}

func (e *end) state(tb testing.TB) guestdrv.QPState {
	tb.Helper()
	a, err := e.qp.Query(bg)
	if err != nil {
		tb.Fatal(err)
	}
	return a.State
}

func destroy(tb testing.TB, ends ...*end) {
	tb.Helper()
	for _, e := range ends {
		if err := e.qp.Close(); err != nil {
			tb.Error(err)
		}
		for _, cq := range []*guestdrv.CQ{e.scq, e.rcq} {
			if err := cq.Close(); err != nil {
				tb.Error(err)
			}
		}
	}
}

// TestRetryExceeded sends to a QP that does not exist.
func TestRetryExceeded(t *testing.T) {
	r := newRig(t, rigConfig{})
	_, smr := r.hosts[0].region(t, 4096, 0)
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), quick)
	if err := b.qp.Close(); err != nil {
		t.Fatal(err)
	}
	a.post(t, &request{ID: 1, Opcode: guestdrv.WRSend, SGL: []guestdrv.SGE{smr.SGE(0, 100)}})
	expect(t, a.scq, 1, guestdrv.WCRetryExcErr, 0)
	st, err := a.h.Stats(bg)
	if err != nil {
		t.Fatal(err)
	}
	if st[guestdrv.StatTimeouts] == 0 || st[guestdrv.StatRetransmits] == 0 {
		t.Errorf("no timeouts or retransmissions counted: %v", st)
	}
}

// TestRNRRecovers posts the receive only after the sender got an RNR NAK.
func TestRNRRecovers(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	src, smr := a.h.region(t, 8192, 0)
	dst, dmr := b.h.region(t, 8192, guestdrv.AccessLocalWrite)
	fill(src.Bytes(), 1)
	a.post(t, &request{ID: 1, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{smr.SGE(0, 5000)}})
	ctx := ctxFor(t)
	for {
		st, err := a.h.Stats(bg)
		if err != nil {
			t.Fatal(err)
		}
		if st[guestdrv.StatRxRNR] > 0 {
			break
		}
		if ctx.Err() != nil {
			t.Fatal("no RNR NAK arrived")
		}
	}
	b.recv(t, 2, dmr.SGE(0, 8192))
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpSend)
	expect(t, b.rcq, 2, guestdrv.WCSuccess, guestdrv.WCOpRecv)
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
	if err := b.qp.ToErr(bg); err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		expect(t, b.rcq, uint64(i), guestdrv.WCWRFlushErr, 0)
	}
	b.post(t, &request{ID: 70, Opcode: guestdrv.WRSend})
	expect(t, b.scq, 70, guestdrv.WCWRFlushErr, 0)
	b.recv(t, 71)
	// A post to the RQ has no doorbell (rxe's ABI); the next post to the SQ makes the device read it, too.
	b.post(t, &request{ID: 72, Opcode: guestdrv.WRSend})
	expect(t, b.scq, 72, guestdrv.WCWRFlushErr, 0)
	expect(t, b.rcq, 71, guestdrv.WCWRFlushErr, 0)

	for _, e := range []*end{a, b} {
		if err := e.qp.Reset(bg); err != nil {
			t.Fatal(err)
		}
	}
	join(t, a, b, guestdrv.ConnectOptions{})
	b.recv(t, 80, dmr.SGE(0, 100))
	a.post(t, &request{ID: 81, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{smr.SGE(0, 100)}})
	expect(t, a.scq, 81, guestdrv.WCSuccess, guestdrv.WCOpSend)
	expect(t, b.rcq, 80, guestdrv.WCSuccess, guestdrv.WCOpRecv)
}

// TestCommandErrors checks that commands are refused with the right status.
func TestCommandErrors(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1})
	h := r.hosts[0]
	buf, mr := h.region(t, 8192, allAccess)
	cq := h.cq(t, 16)
	qp, err := h.pd.CreateQP(bg, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: cq, RecvCQ: cq})
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, err error, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	check("PD in use", h.pd.Close(), guestdrv.StatusBusy)
	check("CQ in use", cq.Close(), guestdrv.StatusBusy)
	_, err = h.pd.RegisterPages(bg, guestdrv.PageSpec{IOVA: 0, Length: 4096, PageShift: 12, PAs: []uint64{12345 << 12},
		Access: allAccess})
	check("PA outside memory", err, guestdrv.StatusFault)
	_, err = h.pd.RegisterPages(bg, guestdrv.PageSpec{IOVA: 0, Length: 8192, PageShift: 12, PAs: []uint64{buf.PA()},
		Access: allAccess})
	check("too few pages", err, guestdrv.StatusInvalid)
	_, err = h.pd.RegisterPages(bg, guestdrv.PageSpec{IOVA: 0, Length: 4096, PageShift: 11, PAs: []uint64{buf.PA()},
		Access: allAccess})
	check("bad page shift", err, guestdrv.StatusInvalid)
	_, err = h.pd.RegisterPages(bg, guestdrv.PageSpec{IOVA: ^uint64(0) - 100, Length: 4096, PageShift: 12,
		PAs: []uint64{buf.PA()}, Access: allAccess})
	check("VA range wraps", err, guestdrv.StatusInvalid)
	_, err = h.pd.Register(bg, buf, guestdrv.AccessRemoteWrite)
	check("remote write without local write", err, guestdrv.StatusInvalid)
	check("SET_MTT beyond the table", mr.SetPages(bg, 1, []uint64{buf.PA(), buf.PA()}), guestdrv.StatusInvalid)
	check("RTR from RESET", qp.ToRTR(bg, guestdrv.Peer{QPN: 5, Path: h.at()}, guestdrv.ConnectOptions{}),
		guestdrv.StatusInvalid)
	if err := qp.ToInit(bg, guestdrv.AccessRemoteRead, 0); err != nil {
		t.Fatal(err)
	}
	path := h.at()
	path.SGIDIndex = 5
	check("empty GID entry", qp.ToRTR(bg, guestdrv.Peer{QPN: 5, Path: path}, guestdrv.ConnectOptions{}),
		guestdrv.StatusInvalid)
	check("MTU above the port's", qp.ToRTR(bg, guestdrv.Peer{QPN: 5, Path: h.at()},
		guestdrv.ConnectOptions{MTU: guestdrv.MTU4096}), guestdrv.StatusInvalid)
	if err := qp.Close(); err != nil {
		t.Fatal(err)
	}
	check("QP closed twice", qp.Close(), nil)
	if err := cq.Close(); err != nil {
		t.Fatal(err)
	}
	if err := mr.Close(); err != nil {
		t.Fatal(err)
	}
	check("MR closed twice", mr.Close(), nil)
	if err := h.pd.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestCompletionError: the error of a completion matches its status and no other.
func TestCompletionError(t *testing.T) {
	all := []guestdrv.WCStatus{guestdrv.WCLocLenErr, guestdrv.WCWRFlushErr, guestdrv.WCRemAccessErr,
		guestdrv.WCRNRRetryExcErr, guestdrv.WCGeneralErr, 999}
	for _, s := range all {
		err := fmt.Errorf("wrapped: %w", (&guestdrv.Completion{ID: 1, QPN: 2, Status: s}).Err())
		for _, other := range all {
			if errors.Is(err, other) != (s == other) {
				t.Errorf("%v: matches %v: %t", err, other, s != other)
			}
		}
		if errors.Is(err, guestdrv.WCSuccess) || s.Error() != s.String() {
			t.Errorf("%v: success, or printed as %q", err, s.Error())
		}
	}
	if err := (&guestdrv.Completion{}).Err(); err != nil {
		t.Errorf("success: %v", err)
	}
}
