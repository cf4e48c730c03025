package hca

import (
	"context"
	"encoding/binary"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/loop/eventfd"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/testutil/ways"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/translate"
)

// LocalPath tells whether devices may copy instead of sending frames. All tests run
// both ways.
var LocalPath bool

// Journaled tells whether devices keep journals. All tests run with and without.
var Journaled bool

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(ways.Tests{M: m, Local: &LocalPath, Journal: &Journaled})
}

// world is a set of guests whose frames reach each other, on loops that the test
// steps by hand: only steps run code, and time stands still unless
// the test advances it.
type world struct {
	tb      testing.TB
	loops   []*loop.Loop
	pool    *frame.Pool
	clock   *loop.ManualClock
	guests  []*guest
	lose    func(frame []byte) bool // frames that are lost
	carried int
	train   *train           // nil: frames go one by one
	net     *vswitch.Network // for routes only; frames do not pass it
}

// guest is a device and its guest's memory; the test is its driver.
type guest struct {
	*Device
	*dataSide // the device's data side
	w         *world
	tb        testing.TB
	mem       []byte
	memfd     int
	space     *translate.Space
	view      *translate.Space // the guest's own view: no page is ever absent
	next      translate.PA
	resp      [abi.SizeResp + maxReply]byte
	notes     int                                         // config change notices
	hold      func(pa translate.PA, n uint64)             // called by Hold; nil: no effect
	block     atomic.Pointer[func(context.Context) error] // makes Hold wait; nil: it does not
	blocked   atomic.Int32                                // calls of block
	held      atomic.Int32                                // holds that were not released
	onMemory  atomic.Pointer[func()]                      // called by Memory; nil: no effect
	paged     bool                                        // connect gives the memory to a host driver
	driver    *hostdriver.Driver                          // of paged memory
	port      *vswitch.VMPort
	kicks     map[*engine]int // eventfds
}

const (
	memBase = translate.PA(0x40000000)
	memSize = 16 << 20
)

// movesNoData skips a test of the control side in the run with the local path alone: how data would move is nothing to
// it, and the run with journals has the local path, too.
func movesNoData(tb testing.TB) {
	if LocalPath && !Journaled {
		tb.Skip("it runs with frames, and with journals and the local path")
	}
}

// poolSize is the number of a world's frame buffers.
var poolSize = 1024

func newWorld(tb testing.TB, loops, guests int, lim Limits) *world {
	tb.Helper()
	w := &world{tb: tb, clock: loop.NewManualClock(int64(time.Hour))}
	pool, err := frame.NewPool(frame.Config{Count: poolSize, Big: 8})
	if err != nil {
		tb.Fatal(err)
	}
	w.pool = pool
	if w.net, err = vswitch.NewNetwork(vswitch.Config{VNI: 1, MTU: 4096 + mtuOverhead, Clock: w.clock}); err != nil {
		tb.Fatal(err)
	}
	for i := range loops {
		l, err := loop.New(loop.Config{ID: i, Clock: w.clock})
		if err != nil {
			tb.Fatal(err)
		}
		w.loops = append(w.loops, l)
	}
	for i := range guests {
		w.guests = append(w.guests, w.newGuest(byte(i+1), lim))
	}
	tb.Cleanup(func() {
		for _, g := range w.guests {
			g.remove()
		}
		for _, l := range w.loops {
			l.Close()
		}
		if n := w.pool.InUse(); n != 0 {
			tb.Errorf("%d frame buffers are still in use", n)
		}
	})
	return w
}

func (w *world) newGuest(id byte, lim Limits) *guest {
	w.tb.Helper()
	d, err := New(Config{Name: "g" + string('0'+rune(id)), MAC: [6]byte{2, 0, 0, 0, 0, id}, Loops: w.loops, Pool: w.pool,
		Limits: lim, Journal: Journaled,
		MTU: func() int { return 4096 + mtuOverhead }})
	if err != nil {
		w.tb.Fatal(err)
	}
	g := &guest{Device: d, dataSide: d.data, w: w, tb: w.tb}
	if g.port, err = vswitch.NewVMPort(w.net, vswitch.VMPortConfig{Name: d.cfg.Name, MAC: d.cfg.MAC}); err != nil {
		w.tb.Fatal(err)
	}
	g.port.SetHCA(d.HCAFace())
	d.SetPort(framePort(w.carry))
	if LocalPath {
		d.SetPort(&shortcut{g.port, w})
	}
	g.connect()
	return g
}

// shortcut is a port with the network's routes, but whose frames go to carry.
type shortcut struct {
	*vswitch.VMPort
	w *world
}

func (s *shortcut) InputHCA(l *loop.Loop, b *frame.Buf)                 { s.w.carry(l, b) }
func (s *shortcut) SendHCA(l *loop.Loop, b *frame.Buf, _ *vswitch.Path) { s.w.carry(l, b) }

// framePort is a Port that carries frames and has no routes.
type framePort func(l *loop.Loop, b *frame.Buf)

func (f framePort) InputHCA(l *loop.Loop, b *frame.Buf)                  { f(l, b) }
func (f framePort) SendHCA(l *loop.Loop, b *frame.Buf, _ *vswitch.Path)  { f(l, b) }
func (f framePort) ResolveHCA(*loop.Loop, []byte, *vswitch.Path) bool    { return false }
func (f framePort) Claim() error                                         { return nil }
func (f framePort) RouteHCA(*loop.Loop, *vswitch.Flow) (r vswitch.Route) { return r }
func (f framePort) Owner([16]byte, uint16) (mac vswitch.MAC, ok bool)    { return mac, false }

// losing makes the network lose frames; from then on the local path is off.
func (w *world) losing(lose func(frame []byte) bool) {
	w.lose = lose
	for _, g := range w.guests {
		g.SetPort(framePort(w.carry))
	}
}

// carry is the network: a frame goes to the guest that it addresses, or to all others.
func (w *world) carry(l *loop.Loop, b *frame.Buf) {
	f := b.Bytes()
	w.carried++
	if w.lose != nil && w.lose(f) {
		return
	}
	if w.train != nil {
		w.train.take(l, f)
		return
	}
	w.hand(l, b)
}

func (w *world) hand(l *loop.Loop, b *frame.Buf) {
	f := b.Bytes()
	for _, g := range w.guests {
		if f[0]&1 != 0 && [6]byte(f[6:12]) != g.cfg.MAC || [6]byte(f[:6]) == g.cfg.MAC {
			g.Deliver(l, b)
		}
	}
}

type fakeConn struct{ g *guest }

func (c fakeConn) Space() *translate.Space { return c.g.space }
func (c fakeConn) ConfigChanged()          { c.g.notes++ }

// Hold: all of the guest's memory is always mapped.
func (c fakeConn) Hold(ctx context.Context, ranges []translate.Range) (release func(), err error) {
	if c.g.driver != nil {
		h, err := c.g.driver.HoldRanges(ctx, ranges)
		if err != nil {
			return nil, err
		}
		return h.Release, nil
	}
	if block := c.g.block.Load(); block != nil {
		c.g.blocked.Add(1)
		err := (*block)(ctx)
		c.g.blocked.Add(-1)
		if err != nil {
			return nil, err
		}
	}
	for _, x := range ranges {
		if c.g.hold != nil {
			c.g.hold(x.PA, x.N)
		}
	}
	n := int32(len(ranges))
	c.g.held.Add(n)
	return sync.OnceFunc(func() { c.g.held.Add(-n) }), nil
}
func (c fakeConn) Memory() hostdriver.Status {
	if f := c.g.onMemory.Load(); f != nil {
		(*f)()
	}
	return hostdriver.Status{}
}

// connect gives the device fresh memory and the objects that every driver creates first.
func (g *guest) connect() {
	g.tb.Helper()
	fd, err := unix.MemfdCreate("guest", unix.MFD_CLOEXEC)
	if err != nil {
		g.tb.Fatal(err)
	}
	if err := unix.Ftruncate(fd, memSize); err != nil {
		g.tb.Fatal(err)
	}
	mem, err := unix.Mmap(fd, 0, memSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		g.tb.Fatal(err)
	}
	g.memfd = fd
	g.mem, g.next = mem, memBase
	g.space = translate.NewSpace(1)
	g.view = translate.NewSpace(1)
	spaces := []*translate.Space{g.view, g.space}
	if g.paged {
		spaces = spaces[:1]
		g.servePages()
	}
	for _, s := range spaces {
		if err := s.Map(memBase, mem); err != nil {
			g.tb.Fatal(err)
		}
	}
	g.Connected(fakeConn{g})
	if _, err := g.Journal(); err != nil {
		g.tb.Fatal(err)
	}
	g.up.Store(true)
	g.setUpDriver()
}

// servePages gives the memory to a host driver.
func (g *guest) servePages() {
	g.tb.Helper()
	g.driver = hostdriver.New(g.space, hclog.NewNullLogger(), hostdriver.Options{})
	if err := g.driver.AddSlot(hostdriver.Slot{GuestPA: uint64(memBase), Size: memSize, FD: g.memfd}); err != nil {
		g.tb.Fatal(err)
	}
}

func (g *guest) setUpDriver() {
	g.tb.Helper()
	for i := range g.engines {
		pa := uint64(g.alloc(abi.DoorbellSize))
		g.must(abi.CmdSetDoorbells, enc(abi.SizeSetDoorbells,
			&abi.SetDoorbells{Engine: uint32(i), NPages: 3, PA: [3]uint64{pa, pa + 4096, pa + 8192}}))
	}
	g.must(abi.CmdSetGID, enc(abi.SizeSetGID, &abi.SetGID{Index: 0, Type: abi.GIDRoCEv2, VLANID: abi.NoVLAN,
		SMAC: g.cfg.MAC, GID: g.gid()}))
}

func (g *guest) gid() [16]byte {
	return [16]byte{10: 0xff, 11: 0xff, 12: 10, 13: 0, 14: 0, 15: g.cfg.MAC[5]}
}

// disconnect removes the memory, which must not be in use.
func (g *guest) disconnect() {
	g.tb.Helper()
	if g.mem == nil {
		return
	}
	g.Disconnected()
	for i, e := range g.engines {
		if e.qps != 0 || e.first != nil || e.armed || e.space != nil {
			g.tb.Errorf("engine %d after disconnect: %d QPs, run list %v, armed %v", i, e.qps, e.first != nil, e.armed)
		}
		for _, q := range e.events {
			if q.waiting.first != nil || q.pending() {
				g.tb.Errorf("queue %d still has events after disconnect", q.index)
			}
		}
	}
	if g.paged {
		g.driver.Close()
	} else if err := g.space.Unmap(memBase, memSize); err != nil {
		g.tb.Error(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := g.space.Epochs().Flip().Wait(ctx); err != nil {
		g.tb.Errorf("guest memory is still in use: %v", err)
	}
	if err := unix.Munmap(g.mem); err != nil {
		g.tb.Error(err)
	}
	unix.Close(g.memfd)
	g.mem = nil
}

func (g *guest) remove() {
	g.disconnect()
	g.port.SetHCA(nil)
	g.Close()
}

// alloc returns zeroed pages.
func (g *guest) alloc(n int) translate.PA {
	g.tb.Helper()
	pa := g.next
	g.next += translate.PA((n + 4095) &^ 4095)
	if g.next > memBase+memSize {
		g.tb.Fatal("the test guest is out of memory")
	}
	return pa
}

// at returns n bytes of guest memory.
func (g *guest) at(pa translate.PA, n int) []byte { return g.mem[pa-memBase:][:n:n] }

func (g *guest) u32(pa translate.PA) *atomic.Uint32 {
	p, m := g.view.RingUint32(pa)
	if !m.OK() {
		g.tb.Fatal(m)
	}
	return p
}

func (g *guest) u64(pa translate.PA) *atomic.Uint64 {
	p, m := g.view.RingUint64(pa)
	if !m.OK() {
		g.tb.Fatal(m)
	}
	return p
}

// encoder is any structure of device/rdma/abi.
type encoder interface{ Encode([]byte) }

// enc encodes a structure of the given size, and PAs behind it.
func enc(size int, e encoder, pas ...uint64) []byte {
	b := make([]byte, size+8*len(pas))
	e.Encode(b)
	abi.PutPAs(b[size:], pas)
	return b
}

// runHere executes a request on the caller's goroutine, waits for host memory and releases as the command queue does,
// and returns the response's length.
func (g *guest) runHere(req, out []byte, room uint64) int {
	j := &job{req: req, room: room}
	for {
		next, w := g.execute(j)
		if w != nil {
			if len(w.ranges) == 0 {
				g.fetches.Add(1)
			}
			w.do(context.Background(), fakeConn{g})
		}
		if w == nil || next != stageRun {
			break
		}
		j.waited = w
	}
	if j.drain != nil {
		if err := j.drain.Wait(context.Background()); err != nil {
			g.tb.Error(err)
		}
	}
	return copy(out, j.resp[:j.n])
}

// raw runs a request unchanged.
func (g *guest) raw(req []byte) (abi.Status, []byte) {
	n := g.runHere(req, g.resp[:], uint64(len(g.resp)))
	var r abi.Resp
	if err := r.Decode(g.resp[:n]); err != nil || int(r.Length) != n-abi.SizeResp {
		g.tb.Fatalf("response % x: %v", g.resp[:n], err)
	}
	return r.Status, g.resp[abi.SizeResp:n]
}

func (g *guest) do(op abi.Opcode, payload []byte) (abi.Status, []byte) {
	b := make([]byte, abi.SizeReq, abi.SizeReq+len(payload))
	(&abi.Req{Opcode: op, Length: uint32(len(payload))}).Encode(b)
	return g.raw(append(b, payload...))
}

func (g *guest) must(op abi.Opcode, payload []byte) []byte {
	g.tb.Helper()
	s, r := g.do(op, payload)
	if s != abi.StatusOK {
		g.tb.Fatalf("%v: %v", op, s)
	}
	return r
}

// refused checks that a command ends with status want.
func (g *guest) refused(want abi.Status, op abi.Opcode, payload []byte) {
	g.tb.Helper()
	if s, _ := g.do(op, payload); s != want {
		g.tb.Errorf("%v: %v, want %v", op, s, want)
	}
}

func (g *guest) mustHandle(op abi.Opcode, payload []byte) uint32 {
	g.tb.Helper()
	return binary.LittleEndian.Uint32(g.must(op, payload))
}

func handle(n uint32) []byte { return enc(abi.SizeHandle, &abi.Handle{Handle: n}) }

func (g *guest) pd() uint32 {
	g.tb.Helper()
	return g.mustHandle(abi.CmdCreatePD, nil)
}

// tring is a ring from the driver's side.
type tring struct {
	g    *guest
	base translate.PA
	desc abi.Ring
	pas  []uint64
}

func (g *guest) ring(elems uint32, log2 uint8) tring {
	n := abi.RingLength(elems, log2)
	r := tring{g: g, base: g.alloc(int(n))}
	r.desc = abi.Ring{Length: n, NPages: uint32((n + 4095) / 4096), PageShift: 12, Log2ElemSize: log2, NumElems: elems}
	for i := range r.desc.NPages {
		r.pas = append(r.pas, uint64(r.base)+4096*uint64(i))
	}
	return r
}

func (r *tring) prod() *atomic.Uint32 { return r.g.u32(r.base + abi.RingProducerOff) }
func (r *tring) cons() *atomic.Uint32 { return r.g.u32(r.base + abi.RingConsumerOff) }
func (r *tring) elem(i uint32) []byte {
	i &= r.desc.NumElems - 1
	return r.g.at(r.base+abi.RingDataOff+translate.PA(i)<<r.desc.Log2ElemSize, 1<<r.desc.Log2ElemSize)
}

// push advances the producer after the caller filled its element.
func (r *tring) push() { r.prod().Store((r.prod().Load() + 1) & (r.desc.NumElems - 1)) }

type tcq struct {
	tring
	n   uint32
	arm translate.PA
}

func (g *guest) cq(elems uint32) *tcq {
	g.tb.Helper()
	c := &tcq{tring: g.ring(elems, abi.WCLog2ElemSize), arm: g.alloc(4)}
	c.n = g.mustHandle(abi.CmdCreateCQ, enc(abi.SizeCreateCQ, &abi.CreateCQ{Ring: c.desc, ArmPA: uint64(c.arm)}, c.pas...))
	return c
}

// poll takes all completions.
func (c *tcq) poll() (out []abi.WC) {
	c.g.tb.Helper()
	for c.cons().Load() != c.prod().Load() {
		var wc abi.WC
		if err := wc.Decode(c.elem(c.cons().Load())); err != nil {
			c.g.tb.Fatal(err)
		}
		out = append(out, wc)
		c.cons().Store((c.cons().Load() + 1) & (c.desc.NumElems - 1))
	}
	return out
}

type tqp struct {
	g        *guest
	n        uint32
	engine   uint32
	slot     uint32
	sq, rq   tring
	scq, rcq *tcq
}

// qpSpec has the attributes of a QP that tests vary.
type qpSpec struct {
	typ      uint32
	flags    uint32
	pd       uint32
	srq      uint32
	scq, rcq *tcq
	elems    uint32
}

func (g *guest) qpRequest(s *qpSpec) (*tqp, abi.CreateQP, []byte) {
	g.tb.Helper()
	if s.typ == 0 {
		s.typ = abi.QPTypeRC
	}
	if s.elems == 0 {
		s.elems = 64
	}
	if s.scq == nil {
		s.scq = g.cq(256)
	}
	if s.rcq == nil {
		s.rcq = s.scq
	}
	q := &tqp{g: g, scq: s.scq, rcq: s.rcq, sq: g.ring(s.elems, 9)}
	r := abi.CreateQP{Type: s.typ, Flags: s.flags, PDN: s.pd, SendCQN: s.scq.n, RecvCQN: s.rcq.n, SRQN: s.srq,
		MaxSendSGE: 4, MaxRecvSGE: 4, MaxInline: 64, SQ: q.sq.desc}
	pas := q.sq.pas
	if s.flags&abi.QPHasSRQ == 0 {
		q.rq = g.ring(s.elems, 7)
		r.RQ = q.rq.desc
		pas = append(pas[:len(pas):len(pas)], q.rq.pas...)
	}
	return q, r, enc(abi.SizeCreateQP, &r, pas...)
}

func (g *guest) qp(s qpSpec) *tqp {
	g.tb.Helper()
	q, _, payload := g.qpRequest(&s)
	var resp abi.CreateQPResp
	if err := resp.Decode(g.must(abi.CmdCreateQP, payload)); err != nil {
		g.tb.Fatal(err)
	}
	q.n, q.engine, q.slot = resp.QPN, resp.Engine, resp.DBSlot
	return q
}

// modify changes the state, with the attributes that the transition requires.
func (q *tqp) modify(state uint8, mask uint32, a abi.QPAttr) {
	q.g.tb.Helper()
	a.QPN, a.QPState, a.AttrMask = q.n, state, mask|abi.QPAttrState
	a.PortNum = 1
	q.g.must(abi.CmdModifyQP, enc(abi.SizeQPAttr, &a))
}

func (q *tqp) state() uint8 {
	q.g.tb.Helper()
	var a abi.QPAttr
	if err := a.Decode(q.g.must(abi.CmdQueryQP, handle(q.n))); err != nil {
		q.g.tb.Fatal(err)
	}
	return a.QPState
}

const remoteAll = abi.AccessRemoteWrite | abi.AccessRemoteRead | abi.AccessRemoteAtomic

func (g *guest) av() abi.AV {
	return abi.AV{DGID: g.gid(), DMAC: g.cfg.MAC, VLANID: abi.NoVLAN, HopLimit: 64}
}

// connectRC moves a QP to RTS.
func (q *tqp) connectRC(peer *tqp) {
	q.g.tb.Helper()
	q.connectRNR(peer, 7)
}

// connectRNR is connectRC with an rnr_retry.
func (q *tqp) connectRNR(peer *tqp, rnr uint8) {
	q.g.tb.Helper()
	q.modify(abi.QPInit, abi.QPAttrPKeyIndex|abi.QPAttrPort|abi.QPAttrAccessFlags, abi.QPAttr{AccessFlags: remoteAll})
	q.modify(abi.QPRTR,
		abi.QPAttrAV|abi.QPAttrPathMTU|abi.QPAttrDestQPN|abi.QPAttrRQPSN|abi.QPAttrMaxDestRdAtomic|abi.QPAttrMinRNRTimer,
		abi.QPAttr{PathMTU: abi.MTU4096, DestQPN: peer.n, RQPSN: 7, MaxDestRdAtomic: 4, MinRNRTimer: 1, AV: peer.g.av()})
	q.modify(abi.QPRTS, abi.QPAttrSQPSN|abi.QPAttrTimeout|abi.QPAttrRetryCnt|abi.QPAttrRNRRetry|abi.QPAttrMaxQPRdAtomic,
		abi.QPAttr{SQPSN: 7, Timeout: 14, RetryCnt: 3, RNRRetry: rnr, MaxRdAtomic: 4})
}

// connectUD moves a UD QP to RTS.
func (q *tqp) connectUD(qkey uint32) {
	q.g.tb.Helper()
	q.modify(abi.QPInit, abi.QPAttrPKeyIndex|abi.QPAttrPort|abi.QPAttrQKey, abi.QPAttr{QKey: qkey})
	q.modify(abi.QPRTR, 0, abi.QPAttr{})
	q.modify(abi.QPRTS, abi.QPAttrSQPSN, abi.QPAttr{})
}

func (w *world) pair() (a, b *tqp) {
	w.tb.Helper()
	ga, gb := w.guests[0], w.guests[len(w.guests)-1]
	a, b = ga.qp(qpSpec{pd: ga.pd()}), gb.qp(qpSpec{pd: gb.pd()})
	a.connectRC(b)
	b.connectRC(a)
	return a, b
}

// bell rings the doorbell.
func (q *tqp) bell() {
	e := q.g.engines[q.engine]
	db := e.db.pages[0]
	if !e.armed {
		return
	}
	word := db + abi.DoorbellBitsOff + translate.PA(8*(q.slot/64))
	q.g.u64(word).Or(1 << (q.slot % 64))
	q.g.u64(db + abi.DoorbellSummaryOff + translate.PA(8*(q.slot/4096))).Or(1 << (q.slot / 64 % 64))
	if q.g.u32(db+abi.DoorbellNeedWakeupOff).Load() != 0 {
		q.g.kick(e)
	}
}

// kick is the driver's notification of an engine that asks for one.
func (g *guest) kick(e *engine) {
	fd, ok := g.kicks[e]
	if !ok {
		var err error
		if fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
			g.tb.Fatal(err)
		}
		g.tb.Cleanup(func() { unix.Close(fd) })
		if _, err := e.loop.Watch(fd, func() { eventfd.Take(fd) }, loop.Metered(&e.dev.meter)); err != nil {
			g.tb.Fatal(err)
		}
		if g.kicks == nil {
			g.kicks = map[*engine]int{}
		}
		g.kicks[e] = fd
	}
	eventfd.Add(fd)
}

// wqe returns the next free slot of the SQ.
func (q *tqp) wqe() abi.SendWQE { return abi.SendWQE(q.sq.elem(q.sq.prod().Load())) }

func (q *tqp) recv(id uint64, sgl ...abi.SGE) {
	abi.RecvWQE(q.rq.elem(q.rq.prod().Load())).Set(id, sgl)
	q.rq.push()
}

// post publishes the filled slot and rings the doorbell.
func (q *tqp) post() {
	q.sq.push()
	q.bell()
}

// mr registers n bytes at their PA.
func (g *guest) mr(pd uint32, pa translate.PA, n int, access uint32) uint32 {
	g.tb.Helper()
	var r abi.CreateMRResp
	pages := uint64((n + 4095) / 4096)
	req := abi.CreateMR{PDN: pd, Access: access, PageShift: 12, IOVA: uint64(pa), Length: uint64(n), NPages: pages}
	if err := r.Decode(g.must(abi.CmdCreateMR, enc(abi.SizeCreateMR, &req))); err != nil {
		g.tb.Fatal(err)
	}
	pas := make([]uint64, pages)
	for i := range pas {
		pas[i] = uint64(pa) + 4096*uint64(i)
	}
	g.must(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: r.Handle, Count: uint16(pages)}, pas...))
	return r.LKey
}

// step runs iterations of all loops until n passed.
func (w *world) step(n int) {
	for range n {
		for _, l := range w.loops {
			l.Step()
		}
		if w.train != nil {
			w.train.leave(w.loops[0])
		}
	}
}

// until steps until cond holds.
func (w *world) until(what string, cond func() bool) {
	w.tb.Helper()
	const steps = 20000
	for i, begin := 0, time.Now(); i < steps || time.Since(begin) < 20*time.Second; i++ {
		if cond() {
			return
		}
		w.step(1)
		if i < steps {
			w.clock.Advance(time.Millisecond)
		} else {
			time.Sleep(time.Millisecond) // the host's driver, a goroutine, has not run yet
		}
	}
	w.tb.Fatalf("timeout waiting for %s", what)
}

// await collects n completions.
func (c *tcq) await(n int) []abi.WC {
	c.g.tb.Helper()
	var out []abi.WC
	c.g.w.until("completions", func() bool {
		out = append(out, c.poll()...)
		return len(out) >= n
	})
	if len(out) > n {
		c.g.tb.Fatalf("%d completions, want %d: %+v", len(out), n, out)
	}
	return out
}
