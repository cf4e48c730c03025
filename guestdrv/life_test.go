package guestdrv_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/testutil/ways"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/guestdrv"
)

// TestReopen closes a driver during traffic, many times; the other side continues, and nothing is left.
func TestReopen(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 3})
	ha, hb, hc := r.hosts[0], r.hosts[1], r.hosts[2]
	const size = 200000
	// A connection between two other hosts that must not be affected.
	x, y := connect(t, ha, hc, qpDefaults(), guestdrv.ConnectOptions{})
	_, xm := ha.region(t, size, allAccess)
	_, ym := hc.region(t, size, allAccess)
	fds, maps := countFDs(t), countMaps(t)
	for range 5 {
		// Patient enough for a busy machine: the first WRITE must succeed.
		a, b := connect(t, ha, hb, qpDefaults(), guestdrv.ConnectOptions{Timeout: 14, RetryCnt: 2})
		_, bm := hb.region(t, size, allAccess)
		for i := range 20 {
			wr := &request{ID: uint64(i), Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
				SGL: []guestdrv.SGE{xm.SGE(0, size)}, RemoteAddr: bm.Addr(), RKey: bm.RKey()}
			a.post(t, wr)
			wr.RemoteAddr, wr.RKey = ym.Addr(), ym.RKey()
			x.post(t, wr)
		}
		expect(t, a.scq, 0, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		_ = b
		if err := hb.Device.Close(); err != nil {
			t.Fatal(err)
		}
		for i := range 20 {
			expect(t, x.scq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		}
		// Requests that had not arrived fail: the first by too many retries, the others flushed.
		failed := false
		for _, wc := range await(t, a.scq, 19) {
			switch {
			case !failed && wc.Status == guestdrv.WCSuccess:
			case !failed && (wc.Status == guestdrv.WCRetryExcErr || wc.Status == guestdrv.WCRemAccessErr):
				failed = true
			case failed && wc.Status == guestdrv.WCWRFlushErr:
			default:
				t.Fatalf("completion %+v (%s)", wc, wc.Status)
			}
		}
		destroy(t, a)
		r.open(hb)
	}
	_ = y
	if n := countFDs(t); n > fds {
		t.Errorf("%d file descriptors are open, %d before", n, fds)
	}
	if n := countMaps(t); n > maps+4 { // the runtime may add a few
		t.Errorf("%d mappings, %d were", n, maps)
	}
}

func countFDs(tb testing.TB) int {
	tb.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	return len(e)
}

// countMaps counts the mappings of memory files.
func countMaps(tb testing.TB) int {
	tb.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		tb.Fatal(err)
	}
	return strings.Count(string(b), "/memfd:")
}

// TestDaemonGone stops the server under a driver that waits for a completion.
func TestDaemonGone(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1})
	h := r.hosts[0]
	cq := h.cq(t, 10)
	done := make(chan error, 3)
	go func() {
		_, err := cq.PollWait(context.Background(), make([]guestdrv.Completion, 1))
		done <- err
	}()
	go func() {
		_, err := h.NextEvent(context.Background())
		done <- err
	}()
	go func() {
		_, err := h.Resolve(context.Background(), guestdrv.IPGID(netip.MustParseAddr("10.0.0.99")), 0)
		done <- err
	}()
	select {
	case <-h.Done():
		t.Error("the device is done before the daemon")
	default:
	}
	if err := h.Err(); err != nil {
		t.Errorf("error of a usable device: %v", err)
	}
	if err := h.srv.Close(); err != nil {
		t.Fatal(err)
	}
	<-h.Done()
	if err := h.Err(); !errors.Is(err, guestdrv.ErrDisconnected) {
		t.Errorf("the device ended with %v", err)
	}
	for range 3 {
		if err := <-done; !errors.Is(err, guestdrv.ErrDisconnected) {
			t.Errorf("waiting ended with %v", err)
		}
	}
	if _, err := h.AllocPD(bg); !errors.Is(err, guestdrv.ErrDisconnected) {
		t.Errorf("command without a device: %v", err)
	}
	if err := h.Device.Close(); err != nil {
		t.Error(err)
	}
	if _, err := h.AllocPD(bg); !errors.Is(err, guestdrv.ErrClosed) {
		t.Errorf("command on a closed device: %v", err)
	}
	if err := h.Err(); !errors.Is(err, guestdrv.ErrClosed) {
		t.Errorf("error of a closed device: %v", err)
	}
}

// TestDone: a device that violates the protocol, or is closed, ends all waits with Err. A command that it has not
// answered keeps its memory, because the device may still use that.
func TestDone(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 2, driver: guestdrv.Config{Timeout: patience}})
	broken := errors.New("protocol violation")
	for i, tc := range []struct {
		end  func(*host)
		want error
	}{
		{func(h *host) { h.Fail(broken); h.Fail(errors.New("second")) }, broken},
		{func(h *host) { go h.Device.Close() }, guestdrv.ErrClosed},
	} {
		h := r.hosts[i]
		cq := h.cq(t, 10)
		qp, err := h.pd.CreateQP(bg, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: cq, RecvCQ: cq})
		if err != nil {
			t.Fatal(err)
		}
		room := largest(t, h)
		release := stopLoops(t, h.site)
		waits := []func() error{
			func() error { return qp.Close() },
			func() error { return qp.Close() }, // waits for the other's answer
			func() error { _, err := cq.PollWait(bg, make([]guestdrv.Completion, 1)); return err },
			func() error { _, err := h.NextEvent(bg); return err },
			func() error {
				_, err := h.Resolve(bg, guestdrv.IPGID(netip.MustParseAddr("10.0.0.99")), 0)
				return err
			},
		}
		ended := make(chan error, len(waits))
		for _, w := range waits {
			go func() { ended <- w() }()
		}
		time.Sleep(20 * time.Millisecond) // for most of them to wait
		tc.end(h)
		<-h.Done()
		for range waits {
			if err := <-ended; !errors.Is(err, tc.want) {
				t.Errorf("waiting ended with %v, want %v", err, tc.want)
			}
		}
		if err := h.Err(); !errors.Is(err, tc.want) {
			t.Errorf("error %v, want %v", err, tc.want)
		}
		if _, err := h.AllocPD(bg); !errors.Is(err, tc.want) {
			t.Errorf("command: %v, want %v", err, tc.want)
		}
		if tc.want == broken {
			if n := largest(t, h); n > room {
				t.Errorf("memory of a QP was released before its answer: %d bytes, %d before", n, room)
			}
		}
		release()
		if err := h.Device.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestCloseUnderUse closes a driver while other goroutines wait and issue commands.
func TestCloseUnderUse(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1})
	h := r.hosts[0]
	for range 20 {
		d, pd := h.Device, h.pd
		cq := h.cq(t, 4)
		var wg sync.WaitGroup
		check := func(err error) bool {
			if err != nil && !errors.Is(err, guestdrv.ErrClosed) && !errors.Is(err, guestdrv.ErrDisconnected) {
				t.Error(err)
			}
			return err == nil
		}
		started := make(chan struct{}, 3)
		wg.Go(func() {
			started <- struct{}{}
			_, err := cq.PollWait(context.Background(), make([]guestdrv.Completion, 1))
			check(err)
		})
		for range 2 {
			wg.Go(func() {
				started <- struct{}{}
				for {
					b, err := d.Alloc(4096)
					if !check(err) {
						return
					}
					mr, err := pd.Register(bg, b, 0)
					if !check(err) || !check(mr.Close()) {
						return
					}
					b.Close()
				}
			})
		}
		for range 3 {
			<-started
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		r.open(h)
	}
}

// TestConcurrentCommands creates and destroys objects from several goroutines.
func TestConcurrentCommands(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1})
	h := r.hosts[0]
	var wg sync.WaitGroup
	for g := range 6 {
		wg.Go(func() {
			for i := range 15 {
				b, err := h.Alloc(4096 * (1 + (g+i)%5))
				if err != nil {
					t.Error(err)
					return
				}
				mr, err := h.pd.Register(bg, b, allAccess)
				if err != nil {
					t.Error(err)
					return
				}
				cq, err := h.CreateCQ(bg, 10, guestdrv.CQOptions{CEQ: i % int(h.Info().NumCEQs)})
				if err != nil {
					t.Error(err)
					return
				}
				qp, err := h.pd.CreateQP(bg, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: cq, RecvCQ: cq})
				if err != nil {
					t.Error(err)
					return
				}
				for _, f := range []func() error{qp.Close, cq.Close, mr.Close} {
					if err := f(); err != nil {
						t.Error(err)
					}
				}
				b.Close()
			}
		})
	}
	wg.Wait()
}

// TestLargeRegion needs several SET_MTT commands, pages out of order, and accesses across pages.
func TestLargeRegion(t *testing.T) {
	r := newRig(t, rigConfig{driver: guestdrv.Config{Memory: 192 << 20}})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	const pages = 20000
	buf, err := b.h.Alloc(pages << 12)
	if err != nil {
		t.Fatal(err)
	}
	// Pages in reverse order: VA page i is the buffer's page pages-1-i.
	pas := make([]uint64, pages)
	for i := range pas {
		pas[i] = buf.PA() + uint64(pages-1-i)<<12
	}
	const iova, offset = 0x1230000000, 100
	mr, err := b.h.pd.RegisterPages(bg, guestdrv.PageSpec{IOVA: iova, Length: pages<<12 - offset, Offset: offset,
		PageShift: 12, PAs: pas, Access: allAccess})
	if err != nil {
		t.Fatal(err)
	}
	src, smr := a.h.region(t, 3<<12, guestdrv.AccessLocalWrite)
	fill(src.Bytes(), 1)
	for _, off := range []int{0, 5000, 8189<<12 - 50, 8190<<12 - 150, (pages-3)<<12 - 200} {
		a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
			SGL: []guestdrv.SGE{smr.SGE(0, 3<<12)}, RemoteAddr: iova + uint64(off), RKey: mr.RKey()})
		expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
		var got []byte
		for p := off + offset; len(got) < 3<<12; {
			page, in := p>>12, p&4095
			n := min(4096-in, 3<<12-len(got))
			got = append(got, buf.Bytes()[(pages-1-page)<<12+in:][:n]...)
			p += n
		}
		if !bytes.Equal(got, src.Bytes()) {
			t.Fatalf("offset %d: data differ", off)
		}
	}
}

// TestPrivileged checks which QPs may use real addresses (RA-1..3).
func TestPrivileged(t *testing.T) {
	r := newRig(t, rigConfig{})
	c := qpDefaults()
	c.Privileged = true
	a, b := connect(t, r.hosts[0], r.hosts[1], c, quick)
	src, _ := a.h.region(t, 8192, 0)
	dst, dmr := b.h.region(t, 8192, allAccess)
	fill(src.Bytes(), 1)
	a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{{Addr: src.PA() + 1, Length: 6000}}, RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	if !bytes.Equal(src.Bytes()[1:6001], dst.Bytes()[:6000]) {
		t.Fatal("data differ")
	}
	a.post(t, &request{ID: 2, Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{{Addr: 1 << 60, Length: 6}},
		RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
	expect(t, a.scq, 2, guestdrv.WCLocProtErr, 0)
}

// TestHostileRing corrupts the parts that a guest's user space can write: the geometry in the ring header and the
// indices. The device must not use them, and no other guest may be affected.
func TestHostileRing(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	dst, dmr := b.h.region(t, 4096, allAccess)
	a.qp.RingGeometry(31, 0xffffffff)
	a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled | sendInline, Inline: []byte("x"),
		RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)

	x, _ := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), quick)
	x.qp.SendIndices(0xfffffff0, 0x12345678)
	x.qp.Ring()
	// Whatever x does with that, the other connection continues.
	for i := range 100 {
		a.post(t, &request{ID: uint64(i), Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled | sendInline,
			Inline: []byte("yz"), RemoteAddr: dst.Addr(), RKey: dmr.RKey()})
		expect(t, a.scq, uint64(i), guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	}
	if err := x.qp.Close(); err != nil {
		t.Error(err)
	}
}

// TestDatapathAllocs posts and polls on a live connection without an allocation.
func TestDatapathAllocs(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	_, smr := a.h.region(t, 4096, 0)
	_, dmr := b.h.region(t, 4096, guestdrv.AccessLocalWrite)
	wr := guestdrv.NewSend(1, smr.SGE(0, 64)).With(guestdrv.SendSignaled)
	rwr := guestdrv.RecvWR{ID: 2, SGL: []guestdrv.SGE{dmr.SGE(0, 64)}}
	wcs := make([]guestdrv.Completion, 1)
	ctx := ctxFor(t)
	// This counts the whole process: driver, device and loops.
	n := testing.AllocsPerRun(200, func() {
		if b.qp.PostRecv(&rwr) != nil || a.qp.PostSend(wr) != nil {
			t.Fatal("post failed")
		}
		for b.rcq.Poll(wcs) == 0 || wcs[0].Status != guestdrv.WCSuccess {
			if ctx.Err() != nil {
				t.Fatal("no completion")
			}
		}
		for a.scq.Poll(wcs) == 0 || wcs[0].Status != guestdrv.WCSuccess {
			if ctx.Err() != nil {
				t.Fatal("no completion")
			}
		}
	})
	if n > allocsAllowed {
		t.Errorf("%v allocations per message", n)
	}
}

// TestPhysRegion registers a range of physical addresses: VAs are PAs.
func TestPhysRegion(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), guestdrv.ConnectOptions{})
	src, smr := a.h.region(t, 20000, 0)
	dst, err := b.h.Alloc(20000)
	if err != nil {
		t.Fatal(err)
	}
	mr, err := b.h.pd.RegisterPages(bg, guestdrv.PageSpec{IOVA: dst.PA(), Length: 20000, PageShift: 12, Access: allAccess,
		Physical: true})
	if err != nil {
		t.Fatal(err)
	}
	fill(src.Bytes(), 1)
	a.post(t, &request{ID: 1, Opcode: guestdrv.WRRDMAWrite, Flags: guestdrv.SendSignaled,
		SGL: []guestdrv.SGE{smr.SGE(0, 19000)}, RemoteAddr: dst.PA() + 1000, RKey: mr.RKey()})
	expect(t, a.scq, 1, guestdrv.WCSuccess, guestdrv.WCOpRDMAWrite)
	if !bytes.Equal(dst.Bytes()[1000:], src.Bytes()[:19000]) {
		t.Error("data differ")
	}
}

// TestSecondDriver connects while another driver has the device.
func TestSecondDriver(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1})
	d, err := guestdrv.Open(bg, r.hosts[0].path, guestdrv.Config{Timeout: patience})
	if err == nil {
		_ = d.Close()
		t.Fatal("a second driver could connect")
	}
	t.Log(err)
	if _, err := r.hosts[0].AllocPD(bg); err != nil {
		t.Errorf("the first driver was disturbed: %v", err)
	}
}

// TestOpenWithoutPath: the environment names the socket, or it is where containers have it.
func TestOpenWithoutPath(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1})
	_ = r.hosts[0].Device.Close()
	t.Setenv(guestdrv.SocketVariable, r.hosts[0].path)
	d, err := guestdrv.Open(bg, "", guestdrv.Config{})
	if err != nil {
		t.Fatal(err)
	}
	_ = d.Close()
	t.Setenv(guestdrv.SocketVariable, "")
	if _, err := guestdrv.Open(bg, "", guestdrv.Config{}); err == nil ||
		!strings.Contains(err.Error(), guestdrv.DefaultSocket) {
		t.Errorf("without the variable: %v", err)
	}
}

// TestQueryQP reads back the attributes that were set.
func TestQueryQP(t *testing.T) {
	r := newRig(t, rigConfig{})
	o := guestdrv.ConnectOptions{Timeout: 13, RetryCnt: 5, RNRRetry: 4, MinRNRTimer: 9, RdAtomic: 3, MTU: guestdrv.MTU512,
		Access: guestdrv.AccessRemoteRead}
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), o)
	q, err := a.qp.Query(bg)
	if err != nil {
		t.Fatal(err)
	}
	if q.State != guestdrv.QPRTS || q.PathMTU != guestdrv.MTU512 || q.Timeout != 13 || q.RetryCnt != 5 ||
		q.RNRRetry != 4 ||
		q.MinRNRTimer != 9 || q.MaxRdAtomic != 3 || q.MaxDestRdAtomic != 3 || q.Access != guestdrv.AccessRemoteRead ||
		q.DestQPN != b.qp.Number() ||
		q.RQPSN != b.psn || q.SQPSN != a.psn || q.Path.GID != b.h.gid || q.Path.MAC != b.h.mac || q.Path.HopLimit != 64 ||
		q.Path.VLAN != 0 {
		t.Errorf("attributes %+v", q)
	}
	if p, err := a.h.Port(bg); err != nil || p.State != guestdrv.PortActive || p.ActiveMTU != 1024 || p.ActiveSpeed == 0 ||
		p.ActiveWidth == 0 {
		t.Errorf("port %+v, %v", p, err)
	}
}

// wrongDevice is another virtio device behind the socket.
type wrongDevice struct {
	virtio.Device
	patch func([]byte)
}

func (w wrongDevice) ReadConfig(dst []byte, off uint32) error {
	if err := w.Device.ReadConfig(dst, off); err != nil {
		return err
	}
	if off == 0 {
		w.patch(dst)
	}
	return nil
}

// TestIdle leaves QPs in every state and checks that the loops sleep.
func TestIdle(t *testing.T) {
	r := newRig(t, rigConfig{})
	a, b := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), quick)
	_, smr := a.h.region(t, 4096, allAccess)
	a.post(t, &request{ID: 1, Opcode: guestdrv.WRSend, SGL: []guestdrv.SGE{smr.SGE(0, 1)}}) // RNR: ends in ERR
	expect(t, a.scq, 1, guestdrv.WCRNRRetryExcErr, 0)
	_ = b
	u := a.h.udEnd(t, udConfig(), 5)
	ah := a.h.ah(t, b.h)
	// ends in SQE
	u.post(t, &request{ID: 2, Opcode: guestdrv.WRSend, SGL: []guestdrv.SGE{smr.SGE(0, 4000)}, AH: ah, RemoteQPN: 77,
		QKey: 5})
	expect(t, u.scq, 2, guestdrv.WCLocLenErr, 0)
	sqd, _ := connect(t, r.hosts[0], r.hosts[1], qpDefaults(), quick)
	if err := sqd.qp.Modify(bg, guestdrv.QPAttr{State: guestdrv.QPSQD, EnSQDAsyncNotify: true},
		guestdrv.QPAttrState|guestdrv.QPAttrEnSQDAsyncNotify); err != nil {
		t.Fatal(err)
	}
	a.h.wantEvent(t, guestdrv.EventSQDrained, sqd.qp.Number())
	// A loop that does not sleep makes tens of thousands of rounds in this time. QPs in ERR check for receives to flush
	// now and then, at growing intervals.
	var before [2]loop.Stats
	for i, l := range r.sites[0].loops {
		before[i] = l.Stats()
	}
	time.Sleep(200 * time.Millisecond)
	for i, l := range r.sites[0].loops {
		is := l.Stats()
		rounds, sleeps := is.Rounds-before[i].Rounds, is.Sleeps-before[i].Sleeps
		if polls := ways.Spin(0) > 0; sleeps > 200 || rounds > 200 && !polls || rounds > 0 && sleeps == 0 && polls {
			t.Errorf("loop %d made %d rounds and slept %d times while idle", i, rounds, sleeps)
		}
	}
}

// TestOpenErrors opens devices that are not a vnicd HCA.
func TestOpenErrors(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1})
	if err := r.hosts[0].Device.Close(); err != nil {
		t.Fatal(err)
	}
	open := func(patch func([]byte)) error {
		path := filepath.Join(t.TempDir(), "s")
		srv, err := vhostuser.Listen(vhostuser.Config{Path: path}, wrongDevice{r.hosts[0].hca, patch}, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer srv.Close()
		d, err := guestdrv.Open(bg, path, guestdrv.Config{})
		if err == nil {
			d.Close()
		}
		return err
	}
	if err := open(func(b []byte) { b[0] ^= 1 }); !errors.Is(err, guestdrv.ErrNotVNICD) {
		t.Errorf("wrong magic: %v", err)
	}
	if err := open(func(b []byte) { b[4] = 99 }); !errors.Is(err, guestdrv.ErrVersion) ||
		!strings.Contains(err.Error(), "99") {
		t.Errorf("wrong version: %v", err)
	}
	if err := open(func(b []byte) { b[4] = abi.Oldest - 1 }); !errors.Is(err, guestdrv.ErrVersion) {
		t.Errorf("version that is not spoken any more: %v", err)
	}
	// A later device may use bytes that are reserved today, and speaks this version all the same (CO-6).
	if err := open(func(b []byte) { b[abi.SizeConfig-1] = 1 }); err != nil {
		t.Errorf("reserved byte: %v", err)
	}
	if err := open(func(b []byte) { b[14] = 0 }); err == nil || !strings.Contains(err.Error(), "completion event queues") {
		t.Errorf("no completion event queues: %v", err)
	}
	if _, err := guestdrv.Open(bg, filepath.Join(t.TempDir(), "none"), guestdrv.Config{}); !errors.Is(err,
		os.ErrNotExist) {
		t.Errorf("no socket: %v", err)
	}
	var ne *net.OpError
	path := filepath.Join(t.TempDir(), "dead")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	ln.Close()
	if _, err := guestdrv.Open(bg, path, guestdrv.Config{}); !errors.As(err, &ne) {
		t.Errorf("dead socket: %v", err)
	}
}
