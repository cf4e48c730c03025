package hca_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/ways"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/device/virtio/vhostuser/frontend"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
)

// These tests run devices as vnicd does: loops on their own threads, real sockets,
// drivers in other goroutines.

const patience = 60 * time.Second

type site struct {
	t     testing.TB
	loops []*loop.Loop
	pool  *frame.Pool
	net   *vswitch.Network
	hosts []*host
}

type host struct {
	dev  *hca.Device
	path string
	mac  [6]byte
	gid  guestdrv.GID

	budget *hostdriver.Budget
}

// newSite creates devices; budget bounds each guest's memory that the host keeps
// resident; 0: no bound.
func newSite(t testing.TB, hosts, loops int, lim hca.Limits, budget uint64) *site {
	t.Helper()
	return newSiteOf(t, hosts, ways.Engines(loops), lim, budget)
}

// newSiteOf is newSite with the given number of loops.
func newSiteOf(t testing.TB, hosts, loops int, lim hca.Limits, budget uint64) *site {
	t.Helper()
	s := &site{t: t}
	var err error
	if s.pool, err = frame.NewPool(frame.Config{Count: 4096}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if n := s.pool.InUse(); n != 0 {
			t.Errorf("%d frame buffers are still in use", n)
		}
	})
	for i := range loops {
		l, err := loop.New(loop.Config{ID: i, SpinFor: ways.Spin(20 * time.Microsecond)})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.Close)
		s.loops = append(s.loops, l)
	}
	if s.net, err = vswitch.NewNetwork(vswitch.Config{VNI: 1, Name: "n", MTU: 1500}); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for i := range hosts {
		h := &host{budget: hostdriver.NewBudget(budget), path: filepath.Join(dir, fmt.Sprint(i)),
			mac: [6]byte{2, 0, 0, 0, 1, byte(i)}, gid: guestdrv.IPGID(netip.AddrFrom4([4]byte{10, 0, 1, byte(i)}))}
		port, err := vswitch.NewVMPort(s.net, vswitch.VMPortConfig{Name: fmt.Sprint(i), MAC: h.mac, Loop: s.loops[i%loops]})
		if err != nil {
			t.Fatal(err)
		}
		h.dev, err = hca.New(hca.Config{Name: fmt.Sprint("h", i), MAC: h.mac, Loops: s.loops, Pool: s.pool, MTU: s.net.MTU,
			Limits: lim, DataPath: &hca.DataPath{LocalCopy: hca.LocalPath, ECN: ways.ECN(),
				SelectiveRepeat: ways.SelectiveRepeat()}, Log: hclog.NewNullLogger()})
		if err != nil {
			t.Fatal(err)
		}
		h.dev.SetPort(port)
		port.SetHCA(h.dev.HCAFace())
		srv, err := vhostuser.Listen(vhostuser.Config{Path: h.path, Budget: h.budget}, h.dev, 1)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := srv.Close(); err != nil {
				t.Error(err)
			}
			port.SetHCA(nil)
			h.dev.Close()
			port.Close()
		})
		s.hosts = append(s.hosts, h)
	}
	return s
}

// client is an open driver with the objects that traffic needs.
type client struct {
	*guestdrv.Device
	h  *host
	pd *guestdrv.PD
	b  *guestdrv.Buffer
	mr *guestdrv.MR
}

const bufSize = 256 << 10

func (s *site) open(i int) *client {
	s.t.Helper()
	c := &client{h: s.hosts[i]}
	var err error
	if c.Device, err = guestdrv.Open(context.Background(), c.h.path, guestdrv.Config{}); err != nil {
		s.t.Fatal(err)
	}
	if err = c.SetGID(context.Background(), 0, c.h.gid, guestdrv.GIDOptions{}); err != nil {
		s.t.Fatal(err)
	}
	if c.pd, err = c.AllocPD(context.Background()); err != nil {
		s.t.Fatal(err)
	}
	if c.b, err = c.Alloc(bufSize); err != nil {
		s.t.Fatal(err)
	}
	if c.mr, err = c.pd.Register(context.Background(), c.b,
		guestdrv.AccessLocalWrite|guestdrv.AccessRemoteRead|guestdrv.AccessRemoteWrite|
			guestdrv.AccessRemoteAtomic); err != nil {
		s.t.Fatal(err)
	}
	return c
}

type end struct {
	c  *client
	cq *guestdrv.CQ
	qp *guestdrv.QP
}

func (c *client) end(t testing.TB) *end {
	t.Helper()
	cq, err := c.CreateCQ(context.Background(), 128, guestdrv.CQOptions{})
	if err != nil {
		t.Fatal(err)
	}
	qp, err := c.pd.CreateQP(context.Background(), guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: cq, RecvCQ: cq,
		MaxSendWR: 32, MaxRecvWR: 32})
	if err != nil {
		t.Fatal(err)
	}
	return &end{c, cq, qp}
}

// peerOptions let peers write and read. The timeout is a second in all: a busy machine may leave a loop waiting for its
// turn that long.
var peerOptions = guestdrv.ConnectOptions{Access: guestdrv.AccessRemoteWrite | guestdrv.AccessRemoteRead, Timeout: 15}

func join(t testing.TB, a, b *end) {
	t.Helper()
	joinWith(t, a, b, peerOptions)
}

func joinWith(t testing.TB, a, b *end, o guestdrv.ConnectOptions) {
	t.Helper()
	for _, x := range [][2]*end{{a, b}, {b, a}} {
		p := guestdrv.Peer{QPN: x[1].qp.Number(), Path: guestdrv.Path{GID: x[1].c.h.gid, MAC: x[1].c.h.mac}}
		if err := x[0].qp.Connect(context.Background(), p, o); err != nil {
			t.Fatal(err)
		}
	}
}

// requests are the constructors that the tests alternate.
var requests = []func(uint64, guestdrv.Remote, ...guestdrv.SGE) *guestdrv.SendWR{guestdrv.NewWrite, guestdrv.NewRead}

// write keeps writing until stop or the QP fails; it returns how many writes succeeded.
func (e *end) write(ctx context.Context, peer *end) (done int, last guestdrv.WCStatus) {
	wcs := make([]guestdrv.Completion, 32)
	posted := 0
	for id := uint64(0); ctx.Err() == nil; {
		for posted < 16 {
			err := e.qp.PostSend(requests[id%2](id, peer.c.mr.Remote(0), e.c.mr.SGE(0, 20000)).With(guestdrv.SendSignaled))
			if err != nil {
				return done, last
			}
			posted++
			id++
		}
		n, err := e.cq.PollWait(ctx, wcs)
		if err != nil {
			return done, last
		}
		posted -= n
		for _, wc := range wcs[:n] {
			if last = wc.Status; last != guestdrv.WCSuccess {
				return done, last
			}
			done++
		}
	}
	return done, last
}

// QPs, CQs and regions are created and destroyed under traffic, on two loops, while
// the status is read. Other connections continue, whatever is destroyed.
func TestDestroyUnderTraffic(t *testing.T) {
	s := newSite(t, 2, 2, hca.Limits{}, 0)
	a, b := s.open(0), s.open(1)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	steady, steadyPeer := a.end(t), b.end(t)
	join(t, steady, steadyPeer)
	var wg sync.WaitGroup
	sctx, stop := context.WithCancel(ctx)
	steadyDone := 0
	var steadyLast guestdrv.WCStatus
	wg.Go(func() { steadyDone, steadyLast = steady.write(sctx, steadyPeer) })
	wg.Go(func() {
		for sctx.Err() == nil {
			for _, h := range s.hosts {
				if st := h.dev.Describe(); !st.Connected || !st.Up {
					t.Errorf("status %+v", st)
				}
			}
			time.Sleep(time.Millisecond) // leaves the processor to the loops
		}
	})
	for round := range 12 {
		x, y := a.end(t), b.end(t)
		join(t, x, y)
		wctx, wstop := context.WithCancel(ctx)
		var ww sync.WaitGroup
		ww.Go(func() { x.write(wctx, y) })
		ww.Go(func() { y.write(wctx, x) })
		tmp, err := b.Alloc(bufSize)
		if err != nil {
			t.Fatal(err)
		}
		mr, err := b.pd.Register(context.Background(), tmp, guestdrv.AccessLocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		if err := mr.Close(); err != nil { // drains while traffic runs
			t.Fatal(err)
		}
		if err := x.cq.Close(); !errors.Is(err, guestdrv.StatusBusy) {
			t.Fatalf("destroying a CQ in use: %v", err)
		}
		victim, other := x, y
		if round%2 == 1 {
			victim, other = y, x
		}
		if round%3 == 0 {
			if err := victim.qp.ToErr(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
		wstop()
		ww.Wait()
		for _, e := range []*end{victim, other} {
			if err := e.qp.Close(); err != nil {
				t.Fatal(err)
			}
			if err := e.cq.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	stop()
	wg.Wait()
	if steadyDone == 0 || steadyLast != guestdrv.WCSuccess {
		t.Errorf("the steady connection: %d done, last status %q", steadyDone, steadyLast)
	}
	for i, h := range s.hosts { // there were far more passes than between two samples
		if h.dev.Describe().EngineTime <= 0 {
			t.Errorf("host %d: no time of engines", i)
		}
	}
	for _, c := range []*client{a, b} {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A front end vanishes under traffic, both as sender and as target: its peers run
// into their timeouts, other VMs are unaffected, and the next front end gets a clean
// device. Repeated several times, to meet the races.
func TestDisconnectUnderTraffic(t *testing.T) {
	s := newSite(t, 3, 2, hca.Limits{}, 0)
	brief := peerOptions
	brief.Timeout = 13 // the test waits until it has passed as often as the queue pair retries
	a, b := s.open(0), s.open(1)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	steady, steadyPeer := a.end(t), b.end(t)
	join(t, steady, steadyPeer)
	var wg sync.WaitGroup
	sctx, stop := context.WithCancel(ctx)
	var steadyDone int
	var steadyLast guestdrv.WCStatus
	wg.Go(func() { steadyDone, steadyLast = steady.write(sctx, steadyPeer) })
	for range 4 {
		c := s.open(2)
		in, out := a.end(t), a.end(t)
		cin, cout := c.end(t), c.end(t)
		joinWith(t, in, cin, brief)
		join(t, out, cout)
		var ww sync.WaitGroup
		var failed atomic.Uint32
		ww.Go(func() {
			_, last := in.write(ctx, cin)
			failed.Store(uint32(last))
		})
		wctx, wstop := context.WithCancel(ctx)
		ww.Go(func() { cout.write(wctx, out) })
		// Both directions run before the front end disconnects.
		for {
			st, err := a.Stats(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			if st[guestdrv.StatRxPackets] > 0 && st[guestdrv.StatTxPackets] > 0 {
				break
			}
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		wstop()
		ww.Wait()
		if f := guestdrv.WCStatus(failed.Load()); f != guestdrv.WCRetryExcErr {
			t.Errorf("the peer of the lost front end ended with %q", f)
		}
		for _, e := range []*end{in, out} {
			if err := e.qp.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if st := s.hosts[2].dev.Describe(); len(st.QPs)+st.CQs+st.PDs+st.MRs+st.SRQs != 0 || st.MTTs != 0 {
			t.Errorf("left behind: %+v", st)
		}
	}
	stop()
	wg.Wait()
	if steadyDone == 0 || steadyLast != guestdrv.WCSuccess {
		t.Errorf("the steady connection: %d done, last status %q", steadyDone, steadyLast)
	}
	for _, c := range []*client{a, b} {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// raw connects without a driver.
func (s *site) raw(i int) (*frontend.Device, *frontend.Memory) {
	s.t.Helper()
	mem, err := frontend.NewMemory(frontend.Range{PA: 0x100000, Size: 4 << 20})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	d, err := frontend.Open(ctx, frontend.Config{Path: s.hosts[i].path, Memory: mem})
	if err != nil {
		s.t.Fatal(err)
	}
	return d, mem
}

// Chains that are not a command break only the command queue: the device
// goes down cleanly, and the next front end is served.
func TestHostileCommandChains(t *testing.T) {
	s := newSite(t, 1, 1, hca.Limits{}, 0)
	good := func(q *frontend.Queue, mem *frontend.Memory) bool {
		req, err := mem.Alloc(64, 8)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := mem.Bytes(req, 64)
		(&abi.Req{Opcode: abi.CmdCreatePD}).Encode(b)
		if err := q.Add(1, []frontend.Buf{{PA: req, Len: 8}}, []frontend.Buf{{PA: req + 32, Len: 32}}); err != nil {
			t.Fatal(err)
		}
		q.Kick()
		ok := false
		testutil.Eventually(t, "an answer", func() bool {
			_, n, got, err := q.Get()
			ok = n == 16
			return got || err != nil
		})
		return ok
	}
	for name, c := range map[string]struct{ out, in []frontend.Buf }{
		"request too long": {[]frontend.Buf{{PA: 0x100000, Len: abi.CmdMax + 1}},
			[]frontend.Buf{{PA: 0x180000, Len: 64}}},
		"response buffer too small": {[]frontend.Buf{{PA: 0x100000, Len: 8}}, nil},
		"little room":               {[]frontend.Buf{{PA: 0x100000, Len: 8}}, []frontend.Buf{{PA: 0x180000, Len: 7}}},
		"request outside memory":    {[]frontend.Buf{{PA: 0x10, Len: 8}}, []frontend.Buf{{PA: 0x180000, Len: 64}}},
		"response outside memory":   {[]frontend.Buf{{PA: 0x100000, Len: 8}}, []frontend.Buf{{PA: 1 << 40, Len: 64}}},
		"request without any bytes": {[]frontend.Buf{{PA: 0x100000, Len: 4}}, []frontend.Buf{{PA: 0x180000, Len: 64}}},
	} {
		t.Run(name, func(t *testing.T) {
			d, mem := s.raw(0)
			defer mem.Close()
			q := d.Queue(abi.CommandQueue)
			if !good(q, mem) {
				t.Error("a valid command failed")
			}
			if err := q.Add(7, c.out, c.in); err == nil {
				q.Kick()
			}
			testutil.Eventually(t, "the one PD", func() bool { return s.hosts[0].dev.Describe().PDs == 1 })
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			testutil.Eventually(t, "the disconnect", func() bool { return !s.hosts[0].dev.Describe().Connected })
		})
	}
	c := s.open(0)
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// Queues stop and restart, in any order, under traffic.
func TestQueueRestarts(t *testing.T) {
	s := newSite(t, 1, 2, hca.Limits{}, 0)
	d, mem := s.raw(0)
	defer mem.Close()
	r := rand.New(rand.NewPCG(1, 5))
	for range 60 {
		i := r.IntN(d.NumQueues())
		if err := d.StopQueue(i); err != nil {
			t.Fatal(err)
		}
		if i == abi.CommandQueue && s.hosts[0].dev.HCAFace().Up() {
			t.Error("up without a command queue")
		}
		if err := d.StartQueue(i); err != nil {
			t.Fatal(err)
		}
	}
	testutil.Eventually(t, "the device to be up", s.hosts[0].dev.HCAFace().Up)
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}
