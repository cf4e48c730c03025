package hca

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// localWorld is a world with the local path, whatever LocalPath is.
func localWorld(t *testing.T, loops, guests int) *world {
	t.Helper()
	defer func(old bool) { LocalPath = old }(LocalPath)
	LocalPath = true
	return newWorld(t, loops, guests, Limits{})
}

// mover WRITEs from one guest to another.
type mover struct {
	t        *testing.T
	a, b     *tqp
	src, dst translate.PA
	lkey     uint32
	rkey     uint32
	size     int
	n        uint64
}

func newMover(t *testing.T, a, b *tqp, size int) *mover {
	t.Helper()
	m := &mover{t: t, a: a, b: b, size: size, src: a.g.alloc(size), dst: b.g.alloc(size)}
	m.lkey, m.rkey = a.g.mr(1, m.src, size, demandAccess), b.g.mr(1, m.dst, size, demandAccess)
	return m
}

// move WRITEs once and returns the status and the number of frames.
func (m *mover) move() (status uint32, frames int) {
	m.t.Helper()
	m.n++
	pattern(m.a.g.at(m.src, m.size), byte(m.n))
	before := m.a.g.w.carried
	s := m.a.wqe()
	s.SetRequest(m.n, abi.WRRDMAWrite, abi.SendSignaled)
	s.SetRDMA(uint64(m.dst), m.rkey)
	s.SetSGEs([]abi.SGE{{Addr: uint64(m.src), Length: uint32(m.size), LKey: m.lkey}})
	m.a.post()
	wc := m.a.scq.await(1)[0]
	if wc.ID != m.n {
		m.t.Fatalf("completion %+v", wc)
	}
	if wc.Status == abi.WCSuccess && !bytes.Equal(m.a.g.at(m.src, m.size), m.b.g.at(m.dst, m.size)) {
		m.t.Fatal("data differs")
	}
	return wc.Status, m.a.g.w.carried - before
}

// expect moves once; the request must succeed, with or without frames.
func (m *mover) expect(what string, asFrames bool) {
	m.t.Helper()
	if st, n := m.move(); st != abi.WCSuccess || (n > 0) != asFrames {
		m.t.Errorf("%s: status %d, %d frames", what, st, n)
	}
}

type watcher struct{}

func (watcher) Frame(*loop.Loop, bool, []byte) {}

// Between two VMs of a loop there are no frames, unless a capture needs them, or they
// would be refused, delayed, or delivered elsewhere. The change takes effect at the
// next turn, and so does its end.
func TestLocalPath(t *testing.T) {
	w := localWorld(t, 1, 3)
	ga, gb := w.guests[0], w.guests[2]
	a, b := w.pair()
	m := newMover(t, a, b, 300_000)
	m.expect("at first", false)
	for _, g := range []*guest{ga, gb} {
		if err := g.port.Attachment().SetMonitor(watcher{}); err != nil {
			t.Fatal(err)
		}
		m.expect("a capture", true)
		g.port.Attachment().RemoveMonitor()
		m.expect("capture ended", false)
	}
	for _, g := range []*guest{ga, gb} {
		g.port.SetHCA(nil)
		m.expect("without HCA", true)
		g.port.SetHCA(g.HCAFace())
		m.expect("with HCA", false)
	}
	for _, g := range []*guest{ga, gb} {
		g.SetPort(framePort(w.carry))
		m.expect("switched off", true)
		g.SetPort(&shortcut{g.port, w})
		m.expect("switched on", false)
	}
	other, err := vswitch.NewNetwork(vswitch.Config{VNI: 2, MTU: 4096 + mtuOverhead, Clock: w.clock})
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range []*guest{ga, gb} {
		if err := g.port.Move(other); err != nil {
			t.Fatal(err)
		}
		m.expect("another network", true) // the test's wire still carries it
		if err := g.port.Move(w.net); err != nil {
			t.Fatal(err)
		}
		m.expect("moved back", false)
	}
	small, err := vswitch.NewNetwork(vswitch.Config{VNI: 3, MTU: 4096, Clock: w.clock})
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range []*guest{ga, gb} {
		if err := g.port.Move(small); err != nil {
			t.Fatal(err)
		}
	}
	m.expect("frames beyond the MTU", true)
	if ga.Stats().Value[abi.StatTxPackets] == 0 {
		t.Error("no frame was counted")
	}
}

// Events that end a connection over the wire end it on the local path.
func TestLocalPeerGone(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(m *mover)
	}{
		{"peer in error", func(m *mover) { m.b.modify(abi.QPErr, 0, abi.QPAttr{}) }},
		{"peer reset", func(m *mover) { m.b.modify(abi.QPReset, 0, abi.QPAttr{}) }},
		{"peer destroyed", func(m *mover) { m.b.g.must(abi.CmdDestroyQP, handle(m.b.n)) }},
		{"peer's port down", func(m *mover) { m.b.g.link.Store(false) }},
		{"own port down", func(m *mover) { m.a.g.link.Store(false) }},
		{"peer has no driver", func(m *mover) { m.b.g.up.Store(false) }},
		{"peer's address gone", func(m *mover) {
			m.b.g.must(abi.CmdSetGID, enc(abi.SizeSetGID, &abi.SetGID{Type: abi.GIDRoCEv2, VLANID: abi.NoVLAN,
				SMAC: m.b.g.cfg.MAC, GID: [16]byte{10: 0xff, 11: 0xff, 12: 11, 15: 99}}))
		}},
		{"peer connected to another", func(m *mover) {
			third := m.a.g.w.guests[1]
			q := third.qp(qpSpec{pd: third.pd()})
			m.b.modify(abi.QPReset, 0, abi.QPAttr{})
			m.b.connectRC(q)
		}},
		{"peer's device reset", func(m *mover) { m.b.g.Reset() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := localWorld(t, 1, 3)
			a, b := w.pair()
			m := newMover(t, a, b, 20_000)
			m.expect("before", false)
			c.do(m)
			was := append([]byte(nil), b.g.at(m.dst, m.size)...)
			if st, _ := m.move(); st != abi.WCRetryExcErr {
				t.Errorf("status %d", st)
			}
			if !bytes.Equal(was, b.g.at(m.dst, m.size)) {
				t.Error("memory was written")
			}
		})
	}
}

// QPs of different loops move together, QPs of one VM also copy, and a QP that is its own peer sends frames. A QP
// with an SRQ stays.
func TestLocalPlaces(t *testing.T) {
	w := localWorld(t, 3, 2)
	g, h := w.guests[0], w.guests[1]
	pd, hpd := g.pd(), h.pd()
	srq, _ := g.srq(pd, 16, 0)
	var qs, hs []*tqp
	for range 4 {
		qs, hs = append(qs, g.qp(qpSpec{pd: pd})), append(hs, h.qp(qpSpec{pd: hpd}))
	}
	stays := g.qp(qpSpec{pd: pd, srq: srq, flags: abi.QPHasSRQ})
	home := stays.where()
	for _, c := range []struct {
		x, y   *tqp
		frames bool
	}{
		{qs[0], qs[3], false}, {qs[3], qs[0], false}, {qs[0], qs[1], false}, {qs[1], qs[2], false}, {qs[1], qs[1], true},
		{qs[0], hs[1], false}, {hs[2], qs[0], false}, {qs[3], hs[2], false}, {qs[2], hs[0], false},
		{hs[0], stays, false}, {hs[1], stays, false}, {hs[2], stays, false}, {stays, qs[2], false},
	} {
		x, y := c.x.where(), c.y.where()
		for _, p := range [][2]*tqp{{c.x, c.y}, {c.y, c.x}} {
			p[0].modify(abi.QPReset, 0, abi.QPAttr{})
			p[0].connectRC(p[1])
		}
		newMover(t, c.x, c.y, 9000).expect(fmt.Sprintf("QPs %d, %d on engines %d, %d", c.x.n, c.y.n, x, y), c.frames)
		if stays.where() != home {
			t.Error("a QP left its SRQ")
		}
	}
	for _, d := range w.guests {
		n := 0
		for _, e := range d.engines {
			n += e.qps
		}
		if n != d.tables.qps {
			t.Errorf("engines count %d QPs of %d", n, d.tables.qps)
		}
	}
}

// where returns the QP's engine.
func (q *tqp) where() int { return q.g.qpFor(q.n).engine.id }

// When a QP moves, its completion queue gets a lock if other QPs use it, and moves too if none does.
func TestMoveLeavesCQ(t *testing.T) {
	for _, shared := range []bool{false, true} {
		w := localWorld(t, 2, 2)
		g, h := w.guests[0], w.guests[1]
		pd, hpd := g.pd(), h.pd()
		x := g.qp(qpSpec{pd: pd})
		if shared {
			g.qp(qpSpec{pd: pd, scq: x.scq, rcq: x.rcq})
		}
		g.qp(qpSpec{pd: pd})
		var y *tqp
		for range 4 {
			if y = h.qp(qpSpec{pd: hpd}); y.where() != x.where() && (x.slot+y.slot)>>1&1 == uint32(1-x.where()) {
				break // to y's engine
			}
		}
		from := x.where()
		x.connectRC(y)
		y.connectRC(x)
		if x.where() == from || x.where() != y.where() {
			t.Fatalf("on engines %d and %d", x.where(), y.where())
		}
		c := g.tables.cqs[x.scq.n]
		if c.q.shared != shared || !shared && c.owner != g.engines[x.where()] {
			t.Errorf("shared %v, owner %d; want %v", c.q.shared, c.owner.id, shared)
		}
		newMover(t, x, y, 100).expect("moved", false)
		newMover(t, y, x, 100).expect("moved", false)
	}
}

// During a copy the releases of both VMs wait (EP-1, EP-3), and so do changes
// of the switch; afterwards they complete.
func TestLocalHolds(t *testing.T) {
	w := localWorld(t, 1, 2)
	a, b := w.pair()
	q := a.g.qpFor(a.n)
	w.loops[0].Do(func() {
		tok, _ := q.engine.enter()
		if p, _ := q.Peer(); p != b.g.qpFor(b.n).t {
			t.Fatal("another peer")
		}
		da, db := a.g.space.Epochs().Flip(), b.g.space.Epochs().Flip()
		if da.Done() || db.Done() {
			t.Error("a release did not wait")
		}
		q.engine.endLocal()
		q.engine.endLocal()
		if da.Done() || !db.Done() {
			t.Error("the peer's memory is still in use")
		}
		q.engine.leave(tok)
		if !da.Done() {
			t.Error("own memory is still in use")
		}
	})
	w.net.Quiesce() // hangs if the switch is still in use
}

// Missing memory of a VM stops that VM's device and no other, on either side of
// a copy.
func TestLocalHole(t *testing.T) {
	for _, own := range []bool{true, false} {
		t.Run(fmt.Sprintf("own=%v", own), func(t *testing.T) {
			w := localWorld(t, 1, 2)
			a, b := w.pair()
			m := newMover(t, a, b, 64<<10)
			m.expect("before", false)
			victim, other, at := a.g, b.g, m.src
			if !own {
				victim, other, at = b.g, a.g, m.dst
			}
			// The memory behind is missing; rings and tables lie before.
			if err := unix.Ftruncate(victim.memfd, int64(at-memBase)+8192); err != nil {
				t.Fatal(err)
			}
			s := a.wqe()
			s.SetRequest(9, abi.WRRDMAWrite, abi.SendSignaled)
			s.SetRDMA(uint64(m.dst), m.rkey)
			s.SetSGEs([]abi.SGE{{Addr: uint64(m.src), Length: uint32(m.size), LKey: m.lkey}})
			a.post()
			w.step(10)
			if !victim.broken.Load() || other.broken.Load() {
				t.Errorf("stopped: victim %v, other %v", victim.broken.Load(), other.broken.Load())
			}
			if !own { // as if the peer's port had gone
				if wc := a.scq.await(1)[0]; wc.Status != abi.WCRetryExcErr {
					t.Errorf("%+v", wc)
				}
			}
			other.must(abi.CmdQueryPort, nil)
		})
	}
}

// Copies are made in slices; a pass makes one slice while another VM has work for the loop, so that it waits no longer.
func TestLocalSlices(t *testing.T) {
	w := localWorld(t, 1, 2)
	a, b := w.pair()
	const size = 512 << 10
	x, y := newMover(t, a, b, size), newMover(t, b, a, size)
	post := func(m *mover) {
		s := m.a.wqe()
		s.SetRequest(1, abi.WRRDMAWrite, abi.SendSignaled)
		s.SetRDMA(uint64(m.dst), m.rkey)
		s.SetSGEs([]abi.SGE{{Addr: uint64(m.src), Length: uint32(m.size), LKey: m.lkey}})
		m.a.post()
	}
	copied := func(m *mover) uint64 { return m.a.g.qpFor(m.a.n).engine.stats.LocalBytes }
	most := func(m *mover) (n uint64) {
		for until := copied(m) + size; copied(m) < until; {
			was := copied(m)
			w.step(1)
			n = max(n, copied(m)-was)
		}
		return n
	}
	x.expect("before", false)
	w.clock.Advance(2 * time.Millisecond)
	post(x)
	if n := most(x); n != localSliceAlone {
		t.Errorf("%d bytes in a pass for one VM alone, want %d", n, localSliceAlone)
	}
	x.a.scq.await(1)
	post(y)
	w.step(1)
	post(x)
	if n := most(x); n != localSlice {
		t.Errorf("%d bytes in a pass for one VM of two, want %d", n, localSlice)
	}
	x.a.scq.await(1)
	y.a.scq.await(1)
	w.clock.Advance(2 * time.Millisecond)
	c, d := a.g.qp(qpSpec{pd: 1}), b.g.qp(qpSpec{pd: 1})
	c.connectRC(d)
	d.connectRC(c)
	z := newMover(t, c, d, size)
	got := func(m *mover) (n int) {
		for src, dst := m.a.g.at(m.src, m.size), m.b.g.at(m.dst, m.size); n < m.size && src[n] == dst[n]; n++ {
		}
		return n
	}
	for _, m := range []*mover{x, z} {
		for i, b := range m.b.g.at(m.dst, m.size) {
			m.a.g.at(m.src, m.size)[i] = ^b
		}
		post(m)
	}
	w.step(1)
	if got(x) != 2*localSlice || got(z) != 2*localSlice {
		t.Errorf("%d and %d bytes in a pass for two QPs of one VM, want two slices of %d for each", got(x), got(z),
			localSlice)
	}
	x.a.scq.await(1)
	z.a.scq.await(1)
}
