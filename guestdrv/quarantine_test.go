package guestdrv_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/translate"
)

// setDMA changes h's attribute as the daemon does, and returns when no access under the previous one is in progress.
func (h *host) setDMA(tb testing.TB, u translate.Uplink) {
	tb.Helper()
	was := h.attribute.Uplink()
	if u == translate.UplinkBlocked {
		h.hca.Quarantine(true)
	}
	drains, err := h.attribute.Set(u)
	if err != nil {
		tb.Fatal(err)
	}
	if was == translate.UplinkBlocked && u != was {
		h.hca.Quarantine(false)
	}
	for _, d := range drains {
		if err := d.Wait(ctxFor(tb)); err != nil {
			tb.Fatal(err)
		}
	}
}

// stream keeps requests outstanding at an end until one fails or stop is called, and then waits for all of them.
type stream struct {
	succeeded atomic.Uint64
	stopped   atomic.Bool
	ended     chan struct{}
	failed    []guestdrv.WCStatus // set when ended: in order
}

const streamDepth = 16

func (e *end) stream(tb testing.TB, next func() *request) *stream {
	s := &stream{ended: make(chan struct{})}
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	tb.Cleanup(cancel)
	go func() {
		defer close(s.ended)
		var buf [streamDepth]guestdrv.Completion
		for open := 0; ; {
			for len(s.failed) == 0 && !s.stopped.Load() && open < streamDepth {
				wr := next()
				wr.Flags |= guestdrv.SendSignaled
				if err := postSend(e.qp, wr); err != nil {
					tb.Error(err)
					return
				}
				open++
			}
			if open == 0 {
				return
			}
			n, err := e.scq.PollWait(ctx, buf[:])
			if err != nil {
				tb.Errorf("%d requests never completed: %v", open, err)
				return
			}
			open -= n
			for _, c := range buf[:n] {
				if c.Status == guestdrv.WCSuccess {
					s.succeeded.Add(1)
				} else {
					s.failed = append(s.failed, c.Status)
				}
			}
		}
	}()
	return s
}

// progress waits until n more requests have succeeded.
func (s *stream) progress(tb testing.TB, n uint64) {
	tb.Helper()
	want := s.succeeded.Load() + n
	testutil.Eventually(tb, "progress of the stream", func() bool { return s.succeeded.Load() >= want })
}

// outcome waits for the end and returns the status of the first request that failed; the others were flushed.
func (s *stream) outcome(tb testing.TB) guestdrv.WCStatus {
	tb.Helper()
	select {
	case <-s.ended:
	case <-time.After(2 * patience):
		tb.Fatal("the stream does not end")
	}
	if len(s.failed) == 0 {
		return guestdrv.WCSuccess
	}
	for _, st := range s.failed[1:] {
		if st != guestdrv.WCWRFlushErr {
			tb.Errorf("behind the failed request: %v", st)
		}
	}
	return s.failed[0]
}

// quarantineRig is a VM that is quarantined, its peer, and two others: one on the VM's host.
type quarantineRig struct {
	*rig
	vm, peer, other, far *host
	vmBuf, peerBuf       *guestdrv.Buffer
	vmMR, peerMR         *guestdrv.MR
	undisturbed          *stream // from other to far
}

func newQuarantineRig(t *testing.T, remote bool) *quarantineRig {
	t.Helper()
	x := &quarantineRig{rig: newRig(t, rigConfig{vxlan: remote})}
	for i := 2; i < 4; i++ {
		h := x.attach(i, x.sites[i%len(x.sites)])
		x.open(h)
		x.hosts = append(x.hosts, h)
	}
	x.vm, x.peer, x.other, x.far = x.hosts[0], x.hosts[1], x.hosts[2], x.hosts[3]
	x.vmBuf, x.vmMR = x.vm.region(t, 64<<10, allAccess)
	x.peerBuf, x.peerMR = x.peer.region(t, 64<<10, allAccess)
	a, b := connect(t, x.other, x.far, qpDefaults(), guestdrv.ConnectOptions{Timeout: 18})
	_, mine := x.other.region(t, 8192, allAccess)
	_, theirs := x.far.region(t, 8192, allAccess)
	x.undisturbed = a.stream(t, func() *request {
		return &request{Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{mine.SGE(0, 8192)}, RemoteAddr: theirs.Addr(),
			RKey: theirs.RKey()}
	})
	t.Cleanup(func() { destroy(t, a, b) })
	return x
}

// end checks that the other VMs noticed nothing.
func (x *quarantineRig) end(t *testing.T) {
	t.Helper()
	x.undisturbed.progress(t, 100)
	x.undisturbed.stopped.Store(true)
	if st := x.undisturbed.outcome(t); st != guestdrv.WCSuccess {
		t.Errorf("another VM of the host: %v", st)
	}
}

// quarantined is one operation under one attribute.
type quarantined struct {
	name   string
	op     guestdrv.Opcode
	byPeer bool // the peer is the requester
	n      int
	// What it ends with under each attribute; WCSuccess: it goes on.
	ro, blocked guestdrv.WCStatus
	// What the other end's receive ends with under ro; 0: none is posted.
	roRecv guestdrv.WCStatus
}

var quarantinedOps = []quarantined{
	{"SEND from the VM", guestdrv.WRSend, false, 3000, guestdrv.WCSuccess, guestdrv.WCWRFlushErr, guestdrv.WCSuccess},
	{"WRITE from the VM", guestdrv.WRRDMAWrite, false, 20000, guestdrv.WCSuccess, guestdrv.WCWRFlushErr, 0},
	{"READ by the VM", guestdrv.WRRDMARead, false, 20000, guestdrv.WCLocProtErr, guestdrv.WCWRFlushErr, 0},
	{"atomic by the VM", guestdrv.WRAtomicFetchAndAdd, false, 8, guestdrv.WCLocProtErr, guestdrv.WCWRFlushErr, 0},
	{"SEND to the VM", guestdrv.WRSend, true, 3000, guestdrv.WCRemOpErr, guestdrv.WCRetryExcErr, guestdrv.WCLocProtErr},
	{"WRITE to the VM", guestdrv.WRRDMAWrite, true, 20000, guestdrv.WCRemAccessErr, guestdrv.WCRetryExcErr, 0},
	{"READ of the VM", guestdrv.WRRDMARead, true, 20000, guestdrv.WCSuccess, guestdrv.WCRetryExcErr, 0},
	{"atomic on the VM", guestdrv.WRAtomicFetchAndAdd, true, 8, guestdrv.WCRemAccessErr, guestdrv.WCRetryExcErr, 0},
}

// TestQuarantine restricts a VM whose queue pair is busy, and releases it (PF-3): what its program and its peer see,
// with the peer on the same host and on another one. Nothing hangs, its memory stays as it was, others notice nothing,
// and new connections work after the release.
func TestQuarantine(t *testing.T) {
	for _, remote := range []bool{false, true} {
		t.Run(fmt.Sprintf("remote=%v", remote), func(t *testing.T) {
			x := newQuarantineRig(t, remote)
			for _, u := range []translate.Uplink{translate.UplinkReadOnly, translate.UplinkBlocked} {
				for _, c := range quarantinedOps {
					t.Run(u.String()+"/"+c.name, func(t *testing.T) { x.restrict(t, u, &c) })
				}
			}
			x.end(t)
		})
	}
}

// restrict is one case: a new connection under load, u, the release.
func (x *quarantineRig) restrict(t *testing.T, u translate.Uplink, c *quarantined) {
	from, to := x.vm, x.peer
	mine, theirs := x.vmMR, x.peerMR
	if c.byPeer {
		from, to, mine, theirs = to, from, theirs, mine
	}
	a, b := connect(t, from, to, qpDefaults(), guestdrv.ConnectOptions{Timeout: 13})
	defer destroy(t, a, b)
	receives := uint64(0)
	if c.op == guestdrv.WRSend {
		for range 32 {
			b.recv(t, receives, theirs.SGE(0, c.n))
			receives++
		}
	}
	s := a.stream(t, func() *request {
		if c.op == guestdrv.WRSend {
			b.repost(t, theirs.SGE(0, c.n))
		}
		return &request{Opcode: c.op, SGL: []guestdrv.SGE{mine.SGE(0, c.n)}, RemoteAddr: theirs.Addr(), RKey: theirs.RKey(),
			CompareAdd: 1}
	})
	s.progress(t, 50)
	x.vm.setDMA(t, u)
	const canary = 0x5c
	for i := range x.vmBuf.Bytes() {
		x.vmBuf.Bytes()[i] = canary
	}
	want := c.ro
	if u == translate.UplinkBlocked {
		want = c.blocked
	}
	if want == guestdrv.WCSuccess {
		s.progress(t, 50)
		s.stopped.Store(true)
	}
	got := s.outcome(t)
	if got != want {
		t.Errorf("the requester sees %v, want %v", got, want)
	}
	if bytes.Count(x.vmBuf.Bytes(), []byte{canary}) != len(x.vmBuf.Bytes()) {
		t.Errorf("written under %v", u)
	}
	if u == translate.UplinkReadOnly && c.roRecv != 0 {
		x.checkReceives(t, b, c.roRecv)
	}
	if u == translate.UplinkBlocked {
		x.checkBlocked(t, a, b, c.byPeer)
	}
	x.vm.setDMA(t, translate.UplinkReadWrite)
	x.checkPort(t, guestdrv.PortActive)
	x.undisturbed.progress(t, 1)
}

// repost posts another receive if one has completed.
func (e *end) repost(tb testing.TB, sge guestdrv.SGE) {
	var wcs [8]guestdrv.Completion
	for _, c := range wcs[:e.rcq.Poll(wcs[:])] {
		e.received = append(e.received, c.Status)
		if err := e.qp.PostRecv(&guestdrv.RecvWR{SGL: []guestdrv.SGE{sge}}); err != nil {
			tb.Error(err)
		}
	}
}

// checkReceives: the last receive that was not flushed has ended with want.
func (x *quarantineRig) checkReceives(t *testing.T, b *end, want guestdrv.WCStatus) {
	t.Helper()
	last := func() guestdrv.WCStatus {
		var wcs [64]guestdrv.Completion
		for _, c := range wcs[:b.rcq.Poll(wcs[:])] {
			b.received = append(b.received, c.Status)
		}
		for _, st := range slices.Backward(b.received) {
			if st != guestdrv.WCWRFlushErr {
				return st
			}
		}
		return guestdrv.WCWRFlushErr
	}
	testutil.Eventually(t, "the receiver's last completion", func() bool { return last() == want })
}

// checkBlocked: the VM's queue pair is in ERR and its receives were flushed, its port is down, and its commands work.
func (x *quarantineRig) checkBlocked(t *testing.T, a, b *end, byPeer bool) {
	t.Helper()
	e := a
	if byPeer {
		e = b
	}
	state := func() guestdrv.QPState {
		s, err := e.qp.Query(bg)
		if err != nil {
			t.Fatal(err)
		}
		return s.State
	}
	testutil.Eventually(t, "the queue pair's error state", func() bool { return state() == guestdrv.QPErr })
	x.checkPort(t, guestdrv.PortDown)
	_, mr := x.vm.region(t, 4096, allAccess)
	if err := mr.Close(); err != nil {
		t.Error(err)
	}
}

func (x *quarantineRig) checkPort(t *testing.T, want guestdrv.PortState) {
	t.Helper()
	if p, err := x.vm.Port(bg); err != nil || p.State != want {
		t.Errorf("the VM's port: %v, %v; want %v", p.State, err, want)
	}
}

// A datagram to a restricted VM is dropped, and neither ends the queue pair nor takes a receive: the GSI queue pair
// must work after the release. A datagram from a blocked VM fails.
func TestQuarantineUD(t *testing.T) {
	x := newQuarantineRig(t, false)
	a, b := x.peer.udEnd(t, udConfig(), guestdrv.DefaultQKey), x.vm.udEnd(t, udConfig(), guestdrv.DefaultQKey)
	x.vm.warm(t, x.vmMR)
	ah, back := x.peer.ah(t, x.vm), x.vm.ah(t, x.peer)
	datagram := func(e *end, mr *guestdrv.MR, ah *guestdrv.AH, to *end) guestdrv.WCStatus {
		e.post(t, &request{Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled, SGL: []guestdrv.SGE{mr.SGE(0, 100)}, AH: ah,
			RemoteQPN: to.qp.Number(), QKey: guestdrv.DefaultQKey})
		return await(t, e.scq, 1)[0].Status
	}
	b.recv(t, 1, x.vmMR.SGE(0, 4096))
	for i, u := range []translate.Uplink{translate.UplinkReadOnly, translate.UplinkBlocked} {
		x.vm.setDMA(t, u)
		clear(x.vmBuf.Bytes())
		dropped := func() uint64 { return x.vm.hca.Describe().Stats["rx_dropped"] }
		before := dropped()
		if st := datagram(a, x.peerMR, ah, b); st != guestdrv.WCSuccess {
			t.Fatal(st)
		}
		testutil.Eventually(t, "the drop is counted", func() bool { return dropped() > before })
		if s, err := b.qp.Query(bg); err != nil || s.State != guestdrv.QPRTS {
			t.Fatalf("%v: %v, %v", u, s.State, err)
		}
		if !allZero(x.vmBuf.Bytes()) {
			t.Errorf("%v: the datagram was written", u)
		}
		if u == translate.UplinkBlocked {
			c := x.vm.udEnd(t, udConfig(), guestdrv.DefaultQKey)
			if st := datagram(c, x.vmMR, back, a); st != guestdrv.WCLocProtErr {
				t.Errorf("a datagram of the blocked VM: %v", st)
			}
			destroy(t, c)
		}
		x.vm.setDMA(t, translate.UplinkReadWrite)
		if st := datagram(a, x.peerMR, ah, b); st != guestdrv.WCSuccess {
			t.Fatal(st)
		}
		expect(t, b.rcq, uint64(i+1), guestdrv.WCSuccess, guestdrv.WCOpRecv)
		b.recv(t, uint64(i+2), x.vmMR.SGE(0, 4096))
	}
	destroy(t, a, b)
	x.end(t)
}

// Inline data is in the work ring, which the attribute does not concern. It does not leave a blocked VM either.
func TestQuarantineInline(t *testing.T) {
	x := newQuarantineRig(t, false)
	x.vm.setDMA(t, translate.UplinkBlocked)
	a, b := connect(t, x.vm, x.peer, qpDefaults(), guestdrv.ConnectOptions{Timeout: 10, RetryCnt: 2})
	b.recv(t, 7, x.peerMR.SGE(0, 100))
	a.post(t, &request{ID: 1, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled | sendInline, Inline: []byte("out")})
	expect(t, a.scq, 1, guestdrv.WCRetryExcErr, 0)
	if n := b.rcq.Poll(make([]guestdrv.Completion, 1)); n != 0 {
		t.Error("a blocked VM has sent")
	}
	if d := x.vm.hca.Describe().Drops; d["link-down-sent"] == 0 {
		t.Errorf("the frames are not counted: %v", d)
	}
	destroy(t, a, b)
	x.end(t)
}

// The driver learns that the port has gone down and that its connections have ended.
func TestQuarantineEvents(t *testing.T) {
	x := newQuarantineRig(t, false)
	a, b := connect(t, x.vm, x.peer, qpDefaults(), guestdrv.ConnectOptions{})
	for len(x.vm.ConfigChanged()) > 0 {
		<-x.vm.ConfigChanged()
	}
	a.recv(t, 3, x.vmMR.SGE(0, 100))
	x.vm.setDMA(t, translate.UplinkBlocked)
	ctx := ctxFor(t)
	for {
		ev, err := x.vm.NextEvent(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if ev.Type == guestdrv.EventQPFatal && ev.Handle == a.qp.Number() {
			break
		}
	}
	expect(t, a.rcq, 3, guestdrv.WCWRFlushErr, 0)
	select {
	case <-x.vm.ConfigChanged():
	case <-ctx.Done():
		t.Fatal("the driver was not told of the port")
	}
	destroy(t, a, b)
	x.end(t)
}

// An operation that waits for a page while the attribute changes ends once the page is there, and does not access it.
func TestQuarantineWaiting(t *testing.T) {
	for _, u := range []translate.Uplink{translate.UplinkReadOnly, translate.UplinkBlocked} {
		for _, byPeer := range []bool{true, false} {
			t.Run(fmt.Sprintf("%v, by the peer: %v", u, byPeer), func(t *testing.T) {
				x := newQuarantineRig(t, false)
				page, err := x.vm.Alloc(4096)
				if err != nil {
					t.Fatal(err)
				}
				asked, answer := make(chan struct{}, 100), make(chan struct{})
				const iova = 0x40000000
				mr, err := x.vm.pd.RegisterOnDemand(bg, iova, 4096, allAccess,
					guestdrv.PagerFunc(func(_ context.Context, _ guestdrv.PageFault, pas []uint64) error {
						asked <- struct{}{}
						<-answer
						pas[0] = page.PA()
						return nil
					}))
				if err != nil {
					t.Fatal(err)
				}
				from, to := x.vm, x.peer
				wr := &request{ID: 1, Opcode: guestdrv.WRRDMARead, Flags: guestdrv.SendSignaled,
					SGL: []guestdrv.SGE{mr.SGEAt(iova, 64)}, RemoteAddr: x.peerMR.Addr(), RKey: x.peerMR.RKey()}
				want := guestdrv.WCLocProtErr
				if byPeer {
					from, to = to, from
					wr.Opcode, wr.SGL = guestdrv.WRRDMAWrite, []guestdrv.SGE{x.peerMR.SGE(0, 64)}
					wr.RemoteAddr, wr.RKey = iova, mr.RKey()
					want = guestdrv.WCRemAccessErr
				}
				fill(x.peerBuf.Bytes(), 3)
				a, b := connect(t, from, to, qpDefaults(), guestdrv.ConnectOptions{Timeout: 13})
				a.post(t, wr)
				select {
				case <-asked:
				case <-time.After(patience):
					t.Fatal("no fault")
				}
				x.vm.setDMA(t, u)
				close(answer)
				wc := await(t, a.scq, 1)[0]
				if u == translate.UplinkBlocked {
					if want = guestdrv.WCWRFlushErr; byPeer {
						want = guestdrv.WCRetryExcErr
					}
				}
				if wc.Status != want {
					t.Errorf("%v, want %v", wc.Status, want)
				}
				if !allZero(page.Bytes()) {
					t.Error("the page was written")
				}
				x.vm.setDMA(t, translate.UplinkReadWrite)
				destroy(t, a, b)
				if err := mr.Close(); err != nil && !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
				x.end(t)
			})
		}
	}
}
