package guestdrv_test

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"

	"github.com/vnicd/vnicd/device/ethernet/fastpath"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/nstest"
	"github.com/vnicd/vnicd/device/testutil/ways"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/translate"
)

// localPath selects whether devices of a site copy or send frames. All tests run both ways.
var localPath bool

func TestMain(m *testing.M) { goleak.VerifyTestMain(ways.Tests{M: m, Local: &localPath}) }

// patience bounds every wait, with room for a busy machine under the race detector; only a failing test waits that
// long.
const patience = 60 * time.Second

// rigConfig describes a rig. The zero value: two hosts on one site with two loops, MTU 1500.
type rigConfig struct {
	hosts  int
	loops  int // per site
	mtu    int
	vxlan  bool // two sites with one host each, joined by VXLAN between network namespaces; needs root
	second bool // each site has another underlay address, 192.0.2.11 and .12, that is a peer of the other, too
	pool   int  // frame buffers per site; 0: 4096
	limits hca.Limits
	idle   bool   // no driver is opened: the test does that itself
	budget uint64 // bytes of each host's memory that the device may keep resident; 0: all
	driver guestdrv.Config
	spin   time.Duration
	work   func() *worktime.Account // of each host; nil: none

	noFeatures bool // devices offer no feature bits

	untrusted bool   // drivers are not trusted, as applications are
	memory    uint64 // bytes that a driver may share; 0: any number
}

// rig is a network with several HCAs, each with a driver, in one process but with real sockets between driver and
// device, and between sites.
type rig struct {
	tb    testing.TB
	cfg   rigConfig
	dir   string
	log   hclog.Logger
	sites []*site
	hosts []*host
}

// site is the equivalent of one vnicd: loops, buffers and its part of the tenant's network.
type site struct {
	loops []*loop.Loop
	pool  *frame.Pool
	net   *vswitch.Network
	ns    *nstest.NS // with vxlan
	vt    *vxlan.VTEP
}

// host is one HCA and its driver.
type host struct {
	*guestdrv.Device
	site *site
	hca  *hca.Device
	srv  *vhostuser.Server
	port *vswitch.VMPort
	path string
	mac  [6]byte
	gid  guestdrv.GID
	pd   *guestdrv.PD

	attribute translate.Attribute
	rig       *rig
	work      *worktime.Account
	kept      *testutil.Keeper
	replacing sync.Mutex
	posted    atomic.Int64
}

func newRig(tb testing.TB, cfg rigConfig) *rig {
	tb.Helper()
	if cfg.hosts == 0 {
		cfg.hosts = 2
	}
	if cfg.loops == 0 {
		cfg.loops = 2
	}
	cfg.loops = ways.Engines(cfg.loops)
	if cfg.mtu == 0 {
		cfg.mtu = 1500
	}
	if cfg.driver.Memory == 0 {
		cfg.driver.Memory = 24 << 20 // the device makes all of it resident
	}
	if cfg.pool == 0 {
		cfg.pool = 4096
	}
	r := &rig{tb: tb, cfg: cfg, dir: tb.TempDir()}
	level := hclog.Error // tests cause warnings such as refused commands on purpose
	if os.Getenv("VNICD_TEST_LOG") != "" {
		level = hclog.Trace
	}
	r.log = hclog.New(&hclog.LoggerOptions{Name: "rig", Level: level})
	sites := 1
	if cfg.vxlan {
		sites = cfg.hosts
	}
	for range sites {
		r.sites = append(r.sites, r.newSite())
	}
	if cfg.vxlan {
		r.joinSites()
	}
	for i := range cfg.hosts {
		h := r.attach(i, r.sites[i%sites])
		if !cfg.idle {
			r.open(h)
		}
		r.hosts = append(r.hosts, h)
	}
	return r
}

func (r *rig) newSite() *site {
	r.tb.Helper()
	s := &site{}
	var err error
	if s.pool, err = frame.NewPool(frame.Config{Count: r.cfg.pool}); err != nil {
		r.tb.Fatal(err)
	}
	r.tb.Cleanup(func() {
		if n := s.pool.InUse(); n != 0 {
			r.tb.Errorf("%d frame buffers leaked", n)
		}
	})
	for i := range r.cfg.loops {
		l, err := loop.New(loop.Config{ID: i, SpinFor: ways.Spin(r.cfg.spin), Log: r.log})
		if err != nil {
			r.tb.Fatal(err)
		}
		if err := l.Start(); err != nil {
			r.tb.Fatal(err)
		}
		r.tb.Cleanup(l.Close)
		s.loops = append(s.loops, l)
	}
	if s.net, err = vswitch.NewNetwork(vswitch.Config{VNI: 7, Name: "tenant", MTU: r.cfg.mtu}); err != nil {
		r.tb.Fatal(err)
	}
	return s
}

// joinSites gives each of the two sites a network namespace with an underlay address and a VTEP, and joins the
// namespaces by a veth pair.
func (r *rig) joinSites() {
	r.tb.Helper()
	var ns []*nstest.NS
	for range r.sites {
		ns = append(ns, nstest.New(r.tb, "guestdrv"))
	}
	const overhead = 50 // of VXLAN over IPv4
	nstest.Pair(ns[0], ns[1], "underlay", r.cfg.mtu+overhead)
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}) }
	for i, s := range r.sites {
		s.ns = ns[i]
		ns[i].Addr("underlay", addr(i).String()+"/24")
		peers := []netip.Addr{addr(1 - i)}
		if r.cfg.second {
			ns[i].Addr("underlay", addr(10+i).String()+"/24")
			peers = append(peers, addr(11-i))
		}
		ns[i].Do(func() {
			c := vxlan.Config{Local: addr(i), Loops: s.loops, Pool: s.pool, Segmentation: ways.Segmentation(), Log: r.log}
			if ways.ShortPath() {
				c.ShortPath = fastpath.Open
			}
			vt, err := vxlan.New(c)
			if err != nil {
				r.tb.Fatal(err)
			}
			r.tb.Cleanup(vt.Close)
			s.vt = vt
			if err := vt.AddNetwork(s.net, peers); err != nil {
				r.tb.Fatal(err)
			}
		})
	}
}

// attach makes HCA i and puts it on a site's network.
func (r *rig) attach(i int, s *site) *host {
	r.tb.Helper()
	h := &host{
		site: s,
		path: filepath.Join(r.dir, fmt.Sprintf("h%d", i)),
		mac:  [6]byte{2, 0, 0, 0, 0, byte(i + 1)},
		gid:  guestdrv.IPGID(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})),
		rig:  r,
		kept: testutil.NewKeeper(r.tb),
	}
	if r.cfg.work != nil {
		h.work = r.cfg.work()
	}
	var err error
	h.port, err = vswitch.NewVMPort(s.net, vswitch.VMPortConfig{Name: fmt.Sprintf("h%d", i), MAC: vswitch.MAC(h.mac),
		Loop: s.loops[i%len(s.loops)]})
	if err != nil {
		r.tb.Fatal(err)
	}
	r.tb.Cleanup(h.port.Close)
	r.serve(h, nil)
	r.tb.Cleanup(func() { r.endDevice(h) })
	return h
}

// serve makes h's device and its socket. kept is what the previous process has kept; nil: none.
func (r *rig) serve(h *host, kept vhostuser.Kept) {
	r.tb.Helper()
	name := filepath.Base(h.path)
	var err error
	h.hca, err = hca.New(hca.Config{
		Name: name, MAC: h.mac, Loops: h.site.loops, Pool: h.site.pool, MTU: h.site.net.MTU, Limits: r.cfg.limits,
		Version: "test", DataPath: &hca.DataPath{LocalCopy: localPath, ECN: ways.ECN(),
			SelectiveRepeat: ways.SelectiveRepeat()}, Log: r.log.Named(name), Work: h.work,
	})
	if err != nil {
		r.tb.Fatal(err)
	}
	h.hca.SetPort(h.port)
	h.port.SetNet(h.hca.Neighbours()) // as the daemon does: answers ARP and ND, for Device.Resolve of the others
	h.port.SetHCA(h.hca.HCAFace())
	var hide uint64
	if r.cfg.noFeatures {
		hide = abi.Features
	}
	h.srv, err = vhostuser.Listen(vhostuser.Config{Path: h.path, Hide: hide, Log: r.log.Named("vhost"),
		Attribute: &h.attribute, Budget: hostdriver.NewBudget(r.cfg.budget), Work: h.work, Keeper: h.kept,
		KeepAs: "hca/" + name, Kept: kept, Sealed: r.cfg.untrusted, MaxMemory: r.cfg.memory},
		h.hca, 0)
	if err != nil {
		r.tb.Fatal(err)
	}
}

// endDevice ends h's socket and device.
func (r *rig) endDevice(h *host) {
	if err := h.srv.Close(); err != nil {
		r.tb.Error(err)
	}
	h.port.SetHCA(nil)
	h.port.SetNet(nil)
	h.hca.Close()
}

// replace ends h's device in good order and continues with a new one, as two processes would.
func (h *host) replace() {
	h.rig.tb.Helper()
	h.replacing.Lock()
	defer h.replacing.Unlock()
	h.kept.End()
	h.rig.endDevice(h)
	h.rig.serve(h, h.kept.Pass())
}

// replaceOften makes all tests run while devices are replaced (CO-1).
var replaceOften = flag.Int("replace", 0, "replace a host's device before every `n`th request that it posts; 0: never")

// maybeReplace replaces h's device, if it is time.
func (h *host) maybeReplace() {
	if n := int64(*replaceOften); n > 0 && h.posted.Add(1)%n == 0 {
		h.replace()
	}
}

// open connects a driver to h and gives it an address and a PD.
func (r *rig) open(h *host) {
	r.tb.Helper()
	d, err := guestdrv.Open(bg, h.path, r.cfg.driver)
	if err != nil {
		r.tb.Fatal(err)
	}
	r.tb.Cleanup(func() {
		if err := d.Close(); err != nil {
			r.tb.Error(err)
		}
	})
	h.Device = d
	if err := d.SetGID(bg, 0, h.gid, guestdrv.GIDOptions{}); err != nil {
		r.tb.Fatal(err)
	}
	if h.pd, err = d.AllocPD(bg); err != nil {
		r.tb.Fatal(err)
	}
}

func (h *host) at() guestdrv.Path { return guestdrv.Path{GID: h.gid, MAC: h.mac} }

const allAccess = guestdrv.AccessLocalWrite | guestdrv.AccessRemoteWrite | guestdrv.AccessRemoteRead |
	guestdrv.AccessRemoteAtomic

// region allocates and registers n bytes.
func (h *host) region(tb testing.TB, n int, access guestdrv.Access) (*guestdrv.Buffer, *guestdrv.MR) {
	tb.Helper()
	b, err := h.Alloc(n)
	if err != nil {
		tb.Fatal(err)
	}
	mr, err := h.pd.Register(bg, b, access)
	if err != nil {
		tb.Fatal(err)
	}
	return b, mr
}

func (h *host) cq(tb testing.TB, n int) *guestdrv.CQ {
	tb.Helper()
	cq, err := h.CreateCQ(bg, n, guestdrv.CQOptions{})
	if err != nil {
		tb.Fatal(err)
	}
	return cq
}

// end is one end of a connection, with a CQ for each direction.
type end struct {
	h        *host
	qp       *guestdrv.QP
	scq, rcq *guestdrv.CQ
	srq      *guestdrv.SRQ // or nil
	psn      uint32
	received []guestdrv.WCStatus // by repost

	completed atomic.Int64 // send requests, by mixedTraffic
}

// qpDefaults are large enough for most tests.
func qpDefaults() guestdrv.QPConfig {
	return guestdrv.QPConfig{Type: guestdrv.QPTypeRC, MaxSendWR: 64, MaxRecvWR: 64, MaxSendSGE: 4, MaxRecvSGE: 4,
		MaxInline: 128}
}

func (h *host) end(tb testing.TB, c guestdrv.QPConfig, psn uint32) *end {
	tb.Helper()
	e := &end{h: h, psn: psn, srq: c.SRQ}
	if c.SendCQ == nil {
		c.SendCQ = h.cq(tb, 512)
	}
	if c.RecvCQ == nil {
		c.RecvCQ = h.cq(tb, 512)
	}
	e.scq, e.rcq = c.SendCQ, c.RecvCQ
	var err error
	if e.qp, err = h.pd.CreateQP(bg, c); err != nil {
		tb.Fatal(err)
	}
	return e
}

// connect makes a pair of connected QPs between two hosts (which may be the same).
func connect(tb testing.TB, ha, hb *host, c guestdrv.QPConfig, o guestdrv.ConnectOptions) (a, b *end) {
	tb.Helper()
	// PSNs near the maximum, so that most tests wrap around.
	a, b = ha.end(tb, c, 0xfffff0), hb.end(tb, c, 0xfffffe)
	join(tb, a, b, o)
	return a, b
}

// peerAccess are all rights that a QP can grant its peer.
const peerAccess = guestdrv.AccessRemoteWrite | guestdrv.AccessRemoteRead | guestdrv.AccessRemoteAtomic |
	guestdrv.AccessFlushGlobal

// join connects two ends. They have all rights unless o restricts them.
func join(tb testing.TB, a, b *end, o guestdrv.ConnectOptions) {
	tb.Helper()
	if o.Access == 0 {
		o.Access = peerAccess
	}
	for _, x := range [][2]*end{{a, b}, {b, a}} {
		o := o
		o.PSN = x[0].psn
		if err := x[0].qp.Connect(bg, guestdrv.Peer{QPN: x[1].qp.Number(), PSN: x[1].psn, Path: x[1].h.at()}, o); err != nil {
			tb.Fatal(err)
		}
	}
}

func ctxFor(tb testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	tb.Cleanup(cancel)
	return ctx
}

// await returns the next n completions of cq, using completion events.
func await(tb testing.TB, cq *guestdrv.CQ, n int) []guestdrv.Completion {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out := make([]guestdrv.Completion, 0, n)
	buf := make([]guestdrv.Completion, n)
	for len(out) < n {
		k, err := cq.PollWait(ctx, buf[:n-len(out)])
		if err != nil {
			tb.Fatalf("waiting for %d completions, got %d (%v): %v", n, len(out), out, err)
		}
		out = append(out, buf[:k]...)
	}
	return out
}

// expect returns the next completion of cq and checks it.
func expect(tb testing.TB, cq *guestdrv.CQ, id uint64, status guestdrv.WCStatus,
	opcode guestdrv.WCOpcode) guestdrv.Completion {
	tb.Helper()
	wc := await(tb, cq, 1)[0]
	if wc.ID != id || wc.Status != status || (status == guestdrv.WCSuccess && wc.Opcode != opcode) {
		tb.Fatalf("completion %+v (%s), want id %d, %q, opcode %d", wc, wc.Status, id, status, opcode)
	}
	return wc
}

// post is PostSend that must succeed.
func (e *end) post(tb testing.TB, wr *request) {
	tb.Helper()
	e.h.maybeReplace()
	if err := postSend(e.qp, wr); err != nil {
		tb.Fatal(err)
	}
}

func (e *end) recv(tb testing.TB, id uint64, sgl ...guestdrv.SGE) {
	tb.Helper()
	e.h.maybeReplace()
	if err := e.qp.PostRecv(&guestdrv.RecvWR{ID: id, SGL: sgl}); err != nil {
		tb.Fatal(err)
	}
}

// fill writes a pattern that depends on seed and offset.
func fill(b []byte, seed uint64) {
	x := seed*0x9e3779b97f4a7c15 + 1
	for ; len(b) >= 8; b = b[8:] {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		le.PutUint64(b, x)
	}
	for i := range b {
		b[i] = byte(x>>(8*i)) ^ 0x55
	}
}
