package hca

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/rdma/cm/cmtest"
	"github.com/vnicd/vnicd/device/rdma/record"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// twin makes a new device like g's, with g's memory and no objects. The caller removes it by dropTwin.
func (w *world) twin(tb testing.TB, g *guest) *guest {
	tb.Helper()
	d, err := New(g.cfg)
	if err != nil {
		tb.Fatal(err)
	}
	x := &guest{Device: d, dataSide: d.data, w: w, tb: tb, mem: g.mem, space: translate.NewSpace(1), view: g.view}
	if err := x.space.Map(memBase, g.mem); err != nil {
		tb.Fatal(err)
	}
	x.Connected(fakeConn{x})
	return x
}

func (x *guest) dropTwin() {
	x.tb.Helper()
	x.Disconnected()
	x.checkEmpty()
	if n := x.held.Load(); n != 0 {
		x.tb.Errorf("%d holds are left", n)
	}
	x.Close()
	if err := x.space.Unmap(memBase, memSize); err != nil {
		x.tb.Error(err)
	}
}

// furnished is a guest with objects of all kinds, some of them in use.
func furnished(tb testing.TB, loops int) (*world, *guest) {
	w := newWorld(tb, loops, 2, Limits{})
	g, other := w.guests[0], w.guests[1]
	pd := g.pd()
	g.pd()
	mem := g.alloc(64 << 10)
	key := g.mr(pd, mem, 64<<10, abi.AccessLocalWrite|abi.AccessMWBind|remoteAll)
	g.demand(pd, 100, demandAccess)
	g.fast(pd)
	for typ := range uint32(2) {
		g.must(abi.CmdCreateMW, enc(abi.SizeCreateMW, &abi.CreateMW{PDN: pd, Type: typ + 1}))
	}
	g.ahTable()
	a := g.qp(qpSpec{pd: pd})
	b := other.qp(qpSpec{pd: other.pd()})
	a.connectRC(b)
	b.connectRC(a)
	theirs := other.alloc(4096)
	rkey := other.mr(1, theirs, 4096, abi.AccessLocalWrite|remoteAll)
	for range 5 {
		a.request(abi.WRRDMARead, abi.SGE{Addr: uint64(mem), Length: 4096, LKey: key}, uint64(theirs), rkey)
	}
	w.step(2)
	shared, ring := g.srq(pd, 16, 4)
	ring.postRecv(1, abi.SGE{Addr: uint64(mem), Length: 64, LKey: key})
	g.qp(qpSpec{pd: pd, flags: abi.QPHasSRQ | abi.QPSigAll, srq: shared})
	ud := g.qp(qpSpec{pd: pd, typ: abi.QPTypeUD})
	ud.connectUD(5)
	g.must(abi.CmdAttachMcast, enc(abi.SizeMcast, &abi.Mcast{QPN: ud.n, GID: [16]byte{0: 0xff, 1: 2, 15: 1}}))
	g.qp(qpSpec{pd: pd, typ: abi.QPTypeGSI})
	g.must(abi.CmdDestroyQP, handle(g.qp(qpSpec{pd: pd}).n)) // leaves an index free
	failed := g.qp(qpSpec{pd: pd})
	failed.modify(abi.QPErr, 0, abi.QPAttr{})
	return w, g
}

func saved(tb testing.TB, g *guest) []byte {
	tb.Helper()
	b, err := g.Save(maxContext)
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// A device that continues a context has the same context, the same account, and numbers later objects as the first.
func TestContext(t *testing.T) {
	for loops := 1; loops <= 2; loops++ {
		w, g := furnished(t, loops)
		context := saved(t, g)
		x := w.twin(t, g)
		if err := x.Restore(context); err != nil {
			t.Fatal(err)
		}
		if again := saved(t, x); !bytes.Equal(again, context) {
			t.Errorf("%d loops: a context of %d bytes became one of %d", loops, len(context), len(again))
		}
		x.checkAccount()
		if x.generation.Load() != g.generation.Load() {
			t.Error("the driver would take the device for another")
		}
		if got, want := x.pd(), g.pd(); got != want {
			t.Errorf("next protection domain %d, want %d", got, want)
		}
		x.dropTwin()
	}
}

// A context that is longer than it may be is not made.
func TestContextTooLong(t *testing.T) {
	_, g := furnished(t, 1)
	n := len(saved(t, g))
	if b, err := g.Save(n); err != nil || len(b) != n {
		t.Errorf("%d bytes of %d: %v", len(b), n, err)
	}
	for most := 1; most < n; most++ {
		if _, err := g.Save(most); !errors.Is(err, record.ErrInvalid) {
			t.Fatalf("at most %d of %d bytes: %v", most, n, err)
		}
	}
}

// A queue that starts at 0 has a new driver, except if it was stopped there: its indices wrap around.
func TestContextAtZero(t *testing.T) {
	w, g := furnished(t, 1)
	dq := g.eventQueue(abi.EventQueue, 4, 64)
	for _, position := range []uint16{0, 7} {
		g.position = position
		x := w.twin(t, g)
		if err := x.Restore(saved(t, g)); err != nil {
			t.Fatal(err)
		}
		q, err := virtq.New(g.space, virtq.Config{Size: 4, Desc: dq.desc, Avail: g.alloc(4096), Used: g.alloc(4096),
			Kick: dq.kick})
		if err != nil {
			t.Fatal(err)
		}
		if err := x.StartQueue(abi.CommandQueue, q); err != nil {
			t.Fatal(err)
		}
		x.StopQueue(abi.CommandQueue)
		if got, want := len(saved(t, x)) > 0, position == 0; got != want {
			t.Errorf("stopped at %d, started at 0: has objects %v, want %v", position, got, want)
		}
		x.dropTwin()
	}
}

// Contexts that were damaged are refused, or describe a device that can be taken down; nothing of them is left (CO-7).
func TestDamagedContext(t *testing.T) {
	movesNoData(t)
	w, g := furnished(t, 2)
	good := saved(t, g)
	rng := rand.New(rand.NewPCG(1, 2))
	refused := 0
	for range 400 {
		bad := bytes.Clone(good)
		for range 1 + rng.IntN(3) {
			bad[rng.IntN(len(bad))] ^= byte(1 + rng.IntN(255))
		}
		if rng.IntN(10) == 0 {
			bad = bad[:rng.IntN(len(bad))]
		}
		if w.tryContext(t, g, bad) != nil {
			refused++
		}
	}
	if refused < 100 || refused == 400 {
		t.Errorf("%d of 400 damaged contexts were refused", refused)
	}
}

// tryContext lets a twin of g continue a context, do what it then does, and go.
func (w *world) tryContext(tb testing.TB, g *guest, context []byte) error {
	tb.Helper()
	x := w.twin(tb, g)
	defer x.dropTwin()
	err := x.Restore(context)
	if err != nil {
		x.checkEmpty()
		return err
	}
	for _, e := range x.engines {
		_ = x.thaw(e)
	}
	w.step(20)
	return nil
}

func version(n byte) []byte { return append([]byte(contextMagic), n) }

// Contexts of earlier versions are continued (CO-6).
func TestPreviousContext(t *testing.T) {
	w, g := furnished(t, 1)
	newest := saved(t, g)
	for v := uint32(1); v < contextVersion; v++ {
		var x deviceContext
		x.record(record.Reader(newest), g.Device)
		for i := range x.qps {
			q := &x.qps[i]
			c := record.Writer().Of(v)
			g.qpFor(q.n).t.Context(c, 0, nil)
			q.transport = c.Bytes()
		}
		c := record.Writer().As(v)
		x.record(c, g.Device)
		if !bytes.HasPrefix(c.Bytes(), version(byte(v))) {
			t.Fatalf("version %d was not written: %q", v, c.Bytes()[:20])
		}
		h := w.twin(t, g)
		if err := h.Restore(c.Bytes()); err != nil {
			t.Errorf("version %d: %v", v, err)
		} else if again := saved(t, h); !bytes.Equal(again, newest) {
			t.Errorf("version %d: %d bytes became %d", v, len(newest), len(again))
		}
		h.dropTwin()
	}
}

// A context of another VM, of a device with other queues, and of another version.
func TestForeignContext(t *testing.T) {
	w, g := furnished(t, 1)
	other := w.guests[1]
	for what, context := range map[string][]byte{
		"another VM":     saved(t, g),
		"nothing":        nil,
		"not a context":  []byte("a context of nothing"),
		"newer version":  bytes.Replace(saved(t, other), version(contextVersion), version(contextVersion+1), 1),
		"trailing bytes": append(saved(t, other), 0),
	} {
		x := w.twin(t, other)
		if err := x.Restore(context); !errors.Is(err, record.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
		x.checkEmpty()
		x.dropTwin()
	}
	two, h := furnished(t, 2)
	x := two.twin(t, h)
	if err := x.Restore(saved(t, g)); !errors.Is(err, record.ErrInvalid) {
		t.Errorf("another number of engines: %v", err)
	}
	x.dropTwin()
}

// FuzzDeviceContext restores arbitrary bytes.
func FuzzDeviceContext(f *testing.F) {
	w, g := furnished(f, 2)
	f.Add(saved(f, g))
	f.Fuzz(func(t *testing.T, context []byte) { _ = w.tryContext(t, g, context) })
}

// Connections that connection management made are the same in the next device, and so is what it knows of their peers:
// whether they wait for ever (CO-1).
func TestContextConnections(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	g, other := w.guests[0], w.guests[1]
	a, b := g.qp(qpSpec{pd: g.pd()}), other.qp(qpSpec{pd: other.pd()})
	say := gsiPair(g, other)
	say(g, cmtest.Message{Kind: cm.REQ, LocalID: 5, QPN: a.n, PathMTU: 5, RNRRetry: 7, Local: g.gid(),
		Remote: other.gid()})
	b.connectRNR(a, 7)
	say(other, cmtest.Message{Kind: cm.REP, LocalID: 6, RemoteID: 5, QPN: b.n, RNRRetry: 7})
	a.connectRNR(b, 7)
	say(g, cmtest.Message{Kind: cm.RTU, LocalID: 5, RemoteID: 6})
	say(g, cmtest.Message{Kind: cm.REQ, LocalID: 7, QPN: 99, PathMTU: 5, Local: g.gid(), Remote: other.gid()})
	show := func(d *guest) (out []string) {
		for _, c := range d.Connections() {
			out = append(out, fmt.Sprintln(c.State, c.QPState, c.Role, c.LocalQPN, c.RemoteQPN, c.LocalID, c.RemoteID,
				c.ServiceID, c.RemoteGID, c.RemoteMAC, wire.Patience(d.patience(c.LocalQPN))))
		}
		return out
	}
	before := show(g)
	if len(before) != 2 || g.patience(a.n) != uint32(wire.PatienceForever) {
		t.Fatalf("%q, patience %#x", before, g.patience(a.n))
	}
	x := w.twin(t, g)
	defer x.dropTwin()
	if err := x.Restore(saved(t, g)); err != nil {
		t.Fatal(err)
	}
	if after := show(x); !slices.Equal(after, before) {
		t.Errorf("%q became %q", before, after)
	}
}

// patience is what the device knows of the peer of a QP.
func (g *guest) patience(n uint32) uint32 {
	if q := g.qpFor(n); q != nil {
		return q.patience.Load()
	}
	return 0
}

// What may have changed between two processes, or just before the first has ended, does not cost the VM its state.
func TestContextOfOtherTimes(t *testing.T) {
	w, g := furnished(t, 1)
	limit := uint32(0)
	for _, s := range g.tables.srqs {
		s.q.limit, limit = 1000, 1000 // SRQ_LIMIT, then a resize to fewer
	}
	var failed *cq
	for _, c := range g.tables.cqs {
		failed = c.q
	}
	failed.failed.Store(true) // in the last poll: no queue pair has noticed
	x := w.twin(t, g)
	defer x.dropTwin()
	x.Quarantine(true) // the configuration says so now
	notes := x.notes
	if err := x.Restore(saved(t, g)); err != nil {
		t.Fatal(err)
	}
	for _, s := range x.tables.srqs {
		if s.q.limit != limit {
			t.Errorf("limit %d, want %d", s.q.limit, limit)
		}
	}
	if n := x.cqFailures.Load(); n != 1 {
		t.Errorf("%d failures of completion queues are to be noticed", n)
	}
	x.eachQP(func(q *qp) {
		if q.typ == roce.RC && q.t.State() >= roce.RTR && q.t.State() != roce.Err {
			t.Errorf("queue pair %#x of a VM in quarantine is in state %v", q.n, q.t.State())
		}
	})
	if x.notes == notes {
		t.Error("the driver is not told to read link and MTU again")
	}
}

// A driver that has begun, but has no objects yet, keeps what it has set.
func TestContextOfYoungDriver(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	context := saved(t, g)
	if len(context) == 0 {
		t.Fatal("a driver with a GID and doorbells has no context")
	}
	x := w.twin(t, g)
	defer x.dropTwin()
	if err := x.Restore(context); err != nil {
		t.Fatal(err)
	}
	if again := saved(t, x); !bytes.Equal(again, context) {
		t.Errorf("%d bytes became %d", len(context), len(again))
	}
}

// Contexts that contradict themselves are refused: none ends the process, runs for ever, or breaks what loops rely on
// (CO-7).
func TestContradictoryContext(t *testing.T) {
	for what, change := range map[string]func(*deviceContext){
		"doorbell on an engine without doorbells": func(x *deviceContext) {
			x.bells = slices.DeleteFunc(x.bells, func(b bellContext) bool { return b.engine == 1 })
			for i := range x.qps {
				x.qps[i].engine, x.qps[i].bells = 0, 1
			}
		},
		"endless pages of an on-demand region": func(x *deviceContext) {
			for i := range x.keys {
				if k := &x.keys[i]; k.state.Spec.Flags&translate.DemandPaging != 0 {
					k.state.Spec.NPages = 1 << 60
					k.runs = []translate.PageRun{{N: 1 << 60, PA: abi.MTTAbsent}}
				}
			}
		},
		"pages of a window": func(x *deviceContext) {
			for i := range x.keys {
				if k := &x.keys[i]; k.state.Spec.Flags&translate.DemandPaging != 0 {
					k.runs = []translate.PageRun{{N: 1, PA: abi.MTTAbsent}}
				}
			}
		},
		"a shared receive queue of two engines": func(x *deviceContext) {
			for i := range x.qps {
				if q := &x.qps[i]; q.flags&abi.QPHasSRQ != 0 {
					second := *q
					second.n, second.index, second.windowPD = q.n+1<<20, uint32(qpsOfContext+i), q.windowPD+100
					second.engine, second.bells = 1-q.engine, 1-q.engine
					x.qps = append(x.qps, second)
					return
				}
			}
		},
	} {
		w, g := furnished(t, 2)
		var x deviceContext
		r := record.Reader(saved(t, g))
		if x.record(r, g.Device); r.End() != nil {
			t.Fatal(r.Err())
		}
		change(&x)
		c := record.Writer()
		x.record(c, g.Device)
		if err := w.tryContext(t, g, c.Bytes()); !errors.Is(err, record.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

const qpsOfContext = 40 // indices from here on are free in a furnished guest

// A device that has had a paused VM, which went to another host, continues the context with which that comes back.
func TestContextComesBack(t *testing.T) {
	w, g := furnished(t, 2)
	context := saved(t, g)
	x := w.twin(t, g)
	for range 3 {
		if err := x.Restore(context); err != nil {
			t.Fatal(err)
		}
		q, err := virtq.New(g.space, virtq.Config{Size: 4, Desc: g.alloc(4096), Avail: g.alloc(4096), Used: g.alloc(4096),
			Kick: -1})
		if err == nil {
			err = x.StartQueue(abi.CommandQueue, q)
		}
		if err != nil {
			t.Fatal(err)
		}
		x.StopQueue(abi.CommandQueue)
		if len(saved(t, x)) == 0 {
			t.Fatal("the objects are gone")
		}
		x.Disconnected()
		x.Connected(fakeConn{x})
	}
	x.dropTwin()
}
