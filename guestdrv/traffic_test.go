package guestdrv_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
)

// TestBothWays runs mixed traffic in both directions of one connection, on one loop and on two, with many buffers and
// with few.
func TestBothWays(t *testing.T) {
	for _, tc := range []rigConfig{{loops: 1}, {loops: 2}, {loops: 1, pool: 24}, {loops: 2, pool: 24}} {
		t.Run(fmt.Sprintf("%d loops, %d buffers", tc.loops, tc.pool), func(t *testing.T) {
			r := newRig(t, tc)
			a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{Timeout: 13})
			t.Run("both", func(t *testing.T) {
				t.Run("there", func(t *testing.T) {
					t.Parallel()
					mixedTraffic(t, a, b, 200, 1)
				})
				t.Run("back", func(t *testing.T) {
					t.Parallel()
					mixedTraffic(t, b, a, 200, 2)
				})
			})
		})
	}
}

// TestSizesOfRequests uses the device's maximum of SGEs and inline data.
func TestSizesOfRequests(t *testing.T) {
	r := newRig(t, rigConfig{})
	at := r.hosts[0].Attr()
	c := qpDefaults()
	c.MaxSendSGE, c.MaxRecvSGE, c.MaxInline = int(at.MaxSGE), int(at.MaxSGE), int(at.MaxInline)
	a, b := connect(t, r.hosts[0], r.hosts[1], c, guestdrv.ConnectOptions{})
	src, smr := a.h.region(t, 100000, guestdrv.AccessLocalWrite)
	dst, dmr := b.h.region(t, 100000, allAccess)
	fill(src.Bytes(), 1)
	var gather, scatter []guestdrv.SGE
	var want []byte
	for i := range c.MaxSendSGE {
		n, off := 1+i*97%700, i*1000+i
		gather = append(gather, smr.SGE(off, n))
		want = append(want, src.Bytes()[off:off+n]...)
	}
	per := len(want)/c.MaxRecvSGE + 1
	for i := range c.MaxRecvSGE {
		scatter = append(scatter, dmr.SGE((c.MaxRecvSGE-1-i)*2000, per))
	}
	b.recv(t, 1, scatter...)
	a.post(t, &request{ID: 2, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled, SGL: gather})
	expect(t, a.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpSend)
	if wc := expect(t, b.rcq, 1, guestdrv.WCSuccess, guestdrv.WCOpRecv); int(wc.ByteLen) != len(want) {
		t.Fatalf("%d bytes received of %d", wc.ByteLen, len(want))
	}
	var got []byte
	for i := range c.MaxRecvSGE {
		got = append(got, dst.Bytes()[(c.MaxRecvSGE-1-i)*2000:][:per]...)
	}
	if !bytes.Equal(got[:len(want)], want) {
		t.Error("data differ")
	}

	a.post(t, &request{
		ID: 3, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled | sendInline, Inline: src.Bytes()[:c.MaxInline],
		RemoteAddr: dst.Addr(), RKey: dmr.RKey(),
	})
	expect(t, a.scq, 3, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	if !bytes.Equal(dst.Bytes()[:c.MaxInline], src.Bytes()[:c.MaxInline]) {
		t.Error("inline data differ")
	}

	// A request beyond the queue's limits is refused before it reaches the device.
	if err := postSend(a.qp, &request{SGL: make([]guestdrv.SGE, c.MaxSendSGE+1)}); err == nil {
		t.Error("too many SGEs were accepted")
	}
	if err := postSend(a.qp, &request{Flags: sendInline, Inline: make([]byte, c.MaxInline+1)}); err == nil {
		t.Error("too much inline data was accepted")
	}
	if err := b.qp.PostRecv(&guestdrv.RecvWR{SGL: make([]guestdrv.SGE, c.MaxRecvSGE+1)}); err == nil {
		t.Error("too many receive SGEs were accepted")
	}
}

// TestDrain stops a send queue during its work and lets it continue.
func TestDrain(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	src, smr := a.h.region(t, 200000, 0)
	dst, dmr := b.h.region(t, 200000, allAccess)
	fill(src.Bytes(), 1)
	const n = 40
	left := 0
	// Retry if all requests completed before the queue could be stopped.
	for try := 0; left == 0; try++ {
		if try == 1000 {
			t.Fatal("the queue could never be stopped in time")
		}
		if try > 0 {
			if got := a.scqPolled(t, n); got != n {
				t.Fatalf("%d completions of %d", got, n)
			}
			if err := a.qp.Modify(bg, guestdrv.QPAttr{State: guestdrv.QPRTS}, guestdrv.QPAttrState); err != nil {
				t.Fatal(err)
			}
		}
		for i := range n {
			a.post(t, &request{ID: uint64(i), Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
				SGL: []guestdrv.SGE{smr.SGE(0, 200000)}, RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
		}
		if err := a.qp.Modify(bg, guestdrv.QPAttr{State: guestdrv.QPSQD, EnSQDAsyncNotify: true},
			guestdrv.QPAttrState|guestdrv.QPAttrEnSQDAsyncNotify); err != nil {
			t.Fatal(err)
		}
		a.h.wantEvent(t, guestdrv.EventSQDrained, a.qp.Number())
		q, err := a.qp.Query(bg)
		if err != nil || q.State != guestdrv.QPSQD || q.SQDraining {
			t.Fatalf("drained: %+v, %v", q, err)
		}
		left = a.qp.Outstanding()
	}
	if got := a.scqPolled(t, n-left); got != n-left {
		t.Fatalf("%d completions, %d of %d requests are left", got, left, n)
	}
	if a.qp.Outstanding() != left {
		t.Fatal("a drained queue continued")
	}
	if err := a.qp.Modify(bg, guestdrv.QPAttr{State: guestdrv.QPRTS}, guestdrv.QPAttrState); err != nil {
		t.Fatal(err)
	}
	for i := n - left; i < n; i++ {
		expect(t, a.scq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	}
	if !bytes.Equal(src.Bytes(), dst.Bytes()) {
		t.Error("data differ")
	}
}

// scqPolled polls at most n completions, which must be present, in order and successful.
func (e *end) scqPolled(tb testing.TB, n int) int {
	tb.Helper()
	wcs := make([]guestdrv.Completion, n+1)
	got := e.scq.Poll(wcs)
	for i := range got {
		if wcs[i].ID != uint64(i) || wcs[i].Status != guestdrv.WCSuccess {
			tb.Fatalf("completion %+v", wcs[i])
		}
	}
	return got
}

// TestLink takes the port down and up; the driver is notified.
func TestLink(t *testing.T) {
	r := newRig(t, rigConfig{})
	h := r.hosts[0]
	ctx := ctxFor(t)
	for _, up := range []bool{false, true} {
		h.hca.SetLink(up)
		select {
		case <-h.ConfigChanged():
		case <-ctx.Done():
			t.Fatal("the driver was not notified")
		}
		c, err := h.ReadInfo(bg)
		if err != nil || (c.LinkUp) != up {
			t.Errorf("link %t, %v; want up %v", c.LinkUp, err, up)
		}
		want := guestdrv.PortDown
		if up {
			want = guestdrv.PortActive
		}
		if p, err := h.Port(bg); err != nil || p.State != want {
			t.Errorf("port state %d, %v; want %d", p.State, err, want)
		}
	}
}

// TestPlain uses virtqueues without indirect descriptors and event indices.
func TestPlain(t *testing.T) {
	r := newRig(t, rigConfig{driver: guestdrv.Config{}.SimpleQueues()})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	mixedTraffic(t, a, b, 50, 1)
	b.recv(t, 1)
	a.post(t, &request{ID: 2, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled})
	expect(t, a.scq, 2, guestdrv.WCSuccess, guestdrv.WCOpSend)
	expect(t, b.rcq, 1, guestdrv.WCSuccess, guestdrv.WCOpRecv)
}
