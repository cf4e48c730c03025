package hca

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// A guest's memory file shrinks under traffic: that device stops with an error, its
// loop and the other VMs continue, and after a reset, with the memory restored, it works.
func TestMemoryVanishes(t *testing.T) {
	w := newWorld(t, 1, 3, Limits{})
	a, b := w.pair() // guests 0 and 2
	g1 := w.guests[1]
	c := g1.qp(qpSpec{pd: g1.pd()})
	d := w.guests[2].qp(qpSpec{pd: 1})
	c.connectRC(d)
	d.connectRC(c)

	s := a.wqe()
	s.SetRequest(1, abi.WRRDMAWrite, abi.SendSignaled)
	a.sq.push()
	a.bell()
	if err := unix.Ftruncate(a.g.memfd, 0); err != nil {
		t.Fatal(err)
	}
	w.step(10)
	if !a.g.broken.Load() || a.g.Up() || !a.g.Describe().Failed {
		t.Fatal("the device did not stop")
	}
	w.step(10)
	b.g.must(abi.CmdQueryPort, nil)
	a.g.refused(abi.StatusIO, abi.CmdQueryPort, nil)
	s = c.wqe()
	s.SetRequest(2, abi.WRRDMAWrite, abi.SendSignaled)
	c.post()
	if wc := c.scq.await(1)[0]; wc.Status != 0 {
		t.Fatalf("another VM: %+v", wc)
	}

	if err := unix.Ftruncate(a.g.memfd, memSize); err != nil {
		t.Fatal(err)
	}
	gen := a.g.generation.Load()
	a.g.Reset()
	if a.g.generation.Load() == gen {
		t.Error("the generation did not change")
	}
	a.g.next = memBase
	a.g.up.Store(true)
	a.g.setUpDriver()
	a = a.g.qp(qpSpec{pd: a.g.pd()})
	b = b.g.qp(qpSpec{pd: 1})
	a.connectRC(b)
	b.connectRC(a)
	s = a.wqe()
	s.SetRequest(3, abi.WRRDMAWrite, abi.SendSignaled)
	a.post()
	if wc := a.scq.await(1)[0]; wc.ID != 3 || wc.Status != 0 {
		t.Fatalf("after the reset: %+v", wc)
	}
}

// A command, too, may meet the missing memory.
func TestMemoryVanishesCommand(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	r := g.ring(64, 6)
	arm := uint64(g.alloc(4))
	if err := unix.Ftruncate(g.memfd, 0); err != nil {
		t.Fatal(err)
	}
	g.refused(abi.StatusIO, abi.CmdCreateCQ, enc(abi.SizeCreateCQ, &abi.CreateCQ{Ring: r.desc, ArmPA: arm}, r.pas...))
	if n := len(g.tables.cqs); n != 0 {
		t.Errorf("%d CQs", n)
	}
	// No epoch is left open, or disconnect would hang.
}

// A frame is delivered to missing memory of another VM: the sender loses the
// frame, as on any network, and retransmits it after a timeout.
func TestForeignFault(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	a, b := w.pair()
	hole, err := unix.MemfdCreate("hole", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(hole)
	gone, err := unix.Mmap(hole, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(gone) }()
	told := 0
	owner := loop.NewOwner(func(loop.Fault) { told++ })
	carry := w.carry
	for _, g := range w.guests { // requests and answers
		n := 0
		g.SetPort(framePort(func(l *loop.Loop, f *frame.Buf) {
			if n++; n%2 == 1 {
				prev := l.Blame(owner)
				gone[0] = 1
				l.Blame(prev)
			}
			carry(l, f)
		}))
	}
	for i := range uint64(5) {
		s := a.wqe()
		s.SetRequest(i, abi.WRRDMAWrite, abi.SendSignaled)
		a.post()
		if wc := a.scq.await(1)[0]; wc.ID != i || wc.Status != 0 {
			t.Fatalf("completion %+v", wc)
		}
	}
	if a.g.broken.Load() || b.g.broken.Load() || told == 0 {
		t.Fatalf("stopped: %v, %v; the owner was told %d times", a.g.broken.Load(), b.g.broken.Load(), told)
	}
}

// TestMemoryVanishesBeforeQueue: the memory file is truncated before a queue is started for which events wait, and
// before the command queue is, which lets the engines go on. The start fails, the device stops, and neither the
// goroutine of the connection nor the other VMs are harmed (TR-6).
func TestMemoryVanishesBeforeQueue(t *testing.T) {
	for name, start := range map[string]func(g *guest, q *drvq) error{
		"event queue": func(g *guest, q *drvq) error { return g.StartQueue(q.index, q.q) },
		"command queue": func(g *guest, q *drvq) error {
			q.start()
			q.g.engines[0].freeze()
			g.fire()
			must(g.tb, unix.Ftruncate(g.memfd, 0))
			cq, err := virtq.New(g.space, virtq.Config{Index: abi.CommandQueue, Size: 8, Desc: q.desc, Avail: q.avail,
				Used: q.used, Base: 1, Kick: q.kick})
			must(g.tb, err)
			return g.StartQueue(abi.CommandQueue, cq)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 1, 3, Limits{})
			a, b := w.pair() // guests 0 and 2
			g := w.guests[1]
			q := g.newEventQueue(abi.CEQQueue(0), 8, abi.SizeCEQE)
			q.add(4)
			if name == "event queue" {
				g.fire()
				must(t, unix.Ftruncate(g.memfd, 0))
			}
			if err := start(g, q); !errors.Is(err, translate.ErrMemoryGone) {
				t.Fatalf("error %v, want %v", err, translate.ErrMemoryGone)
			}
			if !g.broken.Load() || g.Up() || g.commands != nil {
				t.Error("the device did not stop")
			}
			if eq := g.eventQueueAt(q.index); name == "event queue" && (eq.q != nil || eq.watch != nil) {
				t.Error("the device keeps a queue whose start failed")
			}
			s := a.wqe()
			s.SetRequest(1, abi.WRRDMAWrite, abi.SendSignaled)
			a.post()
			if wc := a.scq.await(1)[0]; wc.Status != 0 {
				t.Errorf("another VM: %+v", wc)
			}
			b.g.must(abi.CmdQueryPort, nil)

			must(t, unix.Ftruncate(g.memfd, memSize))
			g.StopQueue(q.index)
			g.Reset()
			g.engines[0].frozen = false // no command queue runs here
			g.next = memBase
			g.up.Store(true)
			g.setUpDriver()
			g.must(abi.CmdQueryPort, nil)
		})
	}
}

// TestForeignFaultAtStart: while the engines go on, as the command queue starts, another VM's memory vanishes. The
// start succeeds, and what was interrupted is done.
func TestForeignFaultAtStart(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	q := g.newEventQueue(abi.CEQQueue(0), 8, abi.SizeCEQE)
	q.add(4)
	q.start()
	hole, err := unix.MemfdCreate("hole", unix.MFD_CLOEXEC)
	must(t, err)
	defer unix.Close(hole)
	gone, err := unix.Mmap(hole, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	defer func() { _ = unix.Munmap(gone) }()
	told := 0
	owner := loop.NewOwner(func(loop.Fault) { told++ })
	e := g.engines[0]
	e.freeze()
	g.fire()
	for range 3 { // answers to faults, of which each meets other memory
		n := &eventNode{}
		n.init(0, nodeAnswers)
		n.wake = func(uint32) { e.loop.Blame(owner); gone[0] = 1 }
		e.answers.push(n, 1)
	}
	ring := g.newEventQueue(abi.CEQQueue(1), 8, abi.SizeCEQE) // serves as the command queue
	cq, err := virtq.New(g.space, virtq.Config{Index: abi.CommandQueue, Size: 8, Desc: ring.desc, Avail: ring.avail,
		Used: ring.used, Base: 1, Kick: ring.kick}) // not 0: the same driver goes on
	must(t, err)
	if err := g.StartQueue(abi.CommandQueue, cq); err != nil {
		t.Fatal(err)
	}
	if told != 3 || g.broken.Load() || !g.Up() {
		t.Errorf("the owner was told %d times, want 3; stopped: %v, up: %v", told, g.broken.Load(), g.Up())
	}
	if n := len(q.get()); n != 1 {
		t.Errorf("%d events, want 1", n)
	}
	g.StopQueue(abi.CommandQueue)
	g.StopQueue(q.index)
}

// fire makes an event for the first completion event queue.
func (g *guest) fire() {
	c := g.cq(16)
	g.u32(c.arm).Store(abi.ArmNext)
	tok := g.space.Epochs().Enter(translate.ByLoop(0))
	g.tables.cqs[c.n].q.post(&abi.WC{}, false)
	g.space.Epochs().Leave(0, tok)
}

func must(tb testing.TB, errs ...error) {
	tb.Helper()
	if err := errors.Join(errs...); err != nil {
		tb.Fatal(err)
	}
}
