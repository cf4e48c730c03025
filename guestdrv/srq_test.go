package guestdrv_test

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/guestdrv"
)

// nextEvent returns the next asynchronous event that is not "communication established".
func (h *host) nextEvent(tb testing.TB) guestdrv.Event {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		e, err := h.NextEvent(ctx)
		if err != nil {
			tb.Fatalf("waiting for an event: %v", err)
		}
		if e.Type != guestdrv.EventQPCommEst {
			return e
		}
	}
}

func (h *host) wantEvent(tb testing.TB, typ guestdrv.EventType, handle uint32) {
	tb.Helper()
	if e := h.nextEvent(tb); e.Type != typ || e.Handle != handle {
		tb.Fatalf("event %v of %d, want %v of %d", e.Type, e.Handle, typ, handle)
	}
}

// TestSRQ shares one receive queue among QPs, consumes it below its limit, resizes it while it has requests, and uses
// it up.
func TestSRQ(t *testing.T) {
	r := newRig(t, rigConfig{})
	ha, hb := r.hosts[0], r.hosts[1]
	srq, err := hb.pd.CreateSRQ(bg, guestdrv.SRQConfig{MaxWR: 30, MaxSGE: 2})
	if err != nil {
		t.Fatal(err)
	}
	src, smr := ha.region(t, 8192, 0)
	dst, dmr := hb.region(t, 64<<10, guestdrv.AccessLocalWrite)
	fill(src.Bytes(), 1)
	posted := 0
	post := func() error {
		err := srq.PostRecv(&guestdrv.RecvWR{ID: uint64(posted),
			SGL: []guestdrv.SGE{dmr.SGE(posted%30*2048, 1024), dmr.SGE(posted%30*2048+1024, 1024)}})
		if err == nil {
			posted++
		}
		return err
	}
	for post() == nil {
	}
	if posted < 30 {
		t.Fatalf("room for %d requests, want 30 at least", posted)
	}
	c := qpDefaults()
	c.SRQ, c.RecvCQ = srq, hb.cq(t, 100)
	var as []*end
	for range 3 {
		a, b := ha.end(t, qpDefaults(), 0), hb.end(t, c, 0)
		join(t, a, b, quick)
		as = append(as, a)
	}
	if err := srq.SetLimit(bg, 10); err != nil {
		t.Fatal(err)
	}
	if l, err := srq.Limit(bg); err != nil || l != 10 {
		t.Fatalf("limit %d, %v", l, err)
	}
	next := uint64(0) // all QPs together consume requests in order
	send := func(i int) {
		t.Helper()
		as[i%3].post(t, &request{ID: uint64(i), Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{smr.SGE(i, 1500)}})
		expect(t, as[i%3].scq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpSend)
		expect(t, c.RecvCQ, next, guestdrv.WCSuccess, guestdrv.WCOpRecv)
		if !bytes.Equal(dst.Bytes()[next%30*2048:][:1500], src.Bytes()[i:i+1500]) {
			t.Fatalf("message %d: data differ", i)
		}
		next++
	}
	for i := range 5 {
		send(i)
	}
	if err := srq.Resize(bg, 100); err != nil {
		t.Fatal(err)
	}
	for i := 5; i < posted; i++ {
		send(i)
	}
	hb.wantEvent(t, guestdrv.EventSRQLimit, srq.Number())
	if l, err := srq.Limit(bg); err != nil || l != 0 {
		t.Fatalf("limit %d after its event, %v; want 0", l, err)
	}
	as[0].post(t, &request{ID: 1, Opcode: guestdrv.WRSend, SGL: []guestdrv.SGE{smr.SGE(0, 1)}})
	expect(t, as[0].scq, 1, guestdrv.WCRNRRetryExcErr, 0)
	if err := srq.Close(); !errors.Is(err, guestdrv.StatusBusy) {
		t.Errorf("destroying an SRQ in use: %v", err)
	}
}

// TestCQEvents checks which completions raise an event. The device clears the arm word when it raises one, so an
// unchanged arm word means no event; the device has checked the word for a completion once the next one is present.
func TestCQEvents(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	ctx := ctxFor(t)
	wcs := make([]guestdrv.Completion, 1)
	send := func(flags guestdrv.SendFlags) {
		t.Helper()
		b.recv(t, 1)
		a.post(t, &request{ID: 2, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled | flags})
		for b.rcq.Poll(wcs) == 0 {
			if ctx.Err() != nil {
				t.Fatal("no completion")
			}
		}
		if wcs[0].Status != guestdrv.WCSuccess {
			t.Fatalf("completion %+v", wcs[0])
		}
		expect(t, a.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpSend)
	}
	wait := func() {
		t.Helper()
		if err := b.rcq.Wait(ctx); err != nil {
			t.Fatal(err)
		}
		if v := b.rcq.Armed(); v != abi.ArmNone {
			t.Fatalf("armed %d after an event", v)
		}
	}

	if b.rcq.Arm(false) {
		t.Error("an empty CQ reports completions")
	}
	send(0)
	wait()

	b.rcq.Arm(true)
	send(0)
	send(0)
	if v := b.rcq.Armed(); v != abi.ArmSolicited {
		t.Fatalf("arm word %d, want %d: an unsolicited completion raised an event", v, abi.ArmSolicited)
	}
	send(guestdrv.SendSolicited)
	wait()

	// A failed completion counts as solicited.
	b.rcq.Arm(true)
	b.recv(t, 3)
	if err := b.qp.ToErr(bg); err != nil {
		t.Fatal(err)
	}
	wait()
	if !b.rcq.Arm(false) {
		t.Error("a CQ with a completion reports none")
	}
	expect(t, b.rcq, 3, guestdrv.WCWRFlushErr, 0)
}

// TestCQOverflow leaves completions unpolled until the CQ is full.
func TestCQOverflow(t *testing.T) {
	r := newRig(t, rigConfig{})
	c := qpDefaults()
	c.SendCQ = r.hosts[0].cq(t, 3)
	a := r.hosts[0].end(t, c, 0)
	b := r.hosts[1].end(t, qpDefaults(), 0)
	join(t, a, b, guestdrv.ConnectOptions{})
	for i := range c.SendCQ.Cap() + 1 {
		a.post(t, &request{ID: uint64(i), Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled})
	}
	a.h.wantEvent(t, guestdrv.EventCQErr, c.SendCQ.Number())
	wcs := make([]guestdrv.Completion, 10)
	if n := c.SendCQ.Poll(wcs); n != c.SendCQ.Cap() {
		t.Errorf("%d completions in the ring, want %d", n, c.SendCQ.Cap())
	}
	for i := range c.SendCQ.Cap() {
		if wcs[i].ID != uint64(i) || wcs[i].Status != guestdrv.WCSuccess {
			t.Errorf("completion %d: %+v", i, wcs[i])
		}
	}
}

// TestResizeCQ grows and shrinks a CQ that holds completions.
func TestResizeCQ(t *testing.T) {
	r := newRig(t, rigConfig{})
	if r.hosts[0].Attr().Caps&guestdrv.CapResizeCQ == 0 {
		t.Fatal("device cannot resize CQs")
	}
	c := qpDefaults()
	c.SendCQ = r.hosts[0].cq(t, 15)
	a := r.hosts[0].end(t, c, 0)
	b := r.hosts[1].end(t, qpDefaults(), 0)
	join(t, a, b, guestdrv.ConnectOptions{})
	var posted, polled uint64
	batch := func(n int) {
		t.Helper()
		for range n {
			a.post(t, &request{ID: posted, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled})
			posted++
		}
		ctx := ctxFor(t)
		for a.qp.Outstanding() > 0 {
			if ctx.Err() != nil {
				t.Fatal("requests do not complete")
			}
		}
	}
	poll := func(n int) {
		t.Helper()
		for range n {
			expect(t, c.SendCQ, polled, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
			polled++
		}
	}
	batch(14)
	poll(10)
	batch(8) // wraps around
	if err := c.SendCQ.Resize(bg, 60); err != nil {
		t.Fatal(err)
	}
	batch(40)
	poll(45)
	if err := c.SendCQ.Resize(bg, 3); !errors.Is(err, guestdrv.StatusInvalid) {
		t.Errorf("7 completions into a CQ of 3: %v", err)
	}
	if err := c.SendCQ.Resize(bg, 7); err != nil {
		t.Fatal(err)
	}
	poll(7)
	batch(7)
	poll(7)
}
