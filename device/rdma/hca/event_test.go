package hca

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// drvq is the driver's side of an event virtqueue: single writable buffers,
// descriptor i for buffer i.
type drvq struct {
	g                      *guest
	index                  int
	size                   uint16
	desc, avail, used, buf translate.PA
	bufLen                 int
	free                   []uint16
	put, got               uint16
	kick                   int
	q                      *virtq.Queue
}

func (g *guest) eventQueue(index int, size uint16, bufLen int) *drvq {
	g.tb.Helper()
	d := g.newEventQueue(index, size, bufLen)
	d.start()
	return d
}

// newEventQueue is eventQueue without the start.
func (g *guest) newEventQueue(index int, size uint16, bufLen int) *drvq {
	g.tb.Helper()
	d := &drvq{g: g, index: index, size: size, desc: g.alloc(4096), avail: g.alloc(4096), used: g.alloc(4096),
		buf: g.alloc(int(size) * bufLen), bufLen: bufLen}
	for i := range size {
		d.free = append(d.free, i)
		b := g.at(d.desc+translate.PA(16*i), 16)
		binary.LittleEndian.PutUint64(b, uint64(d.buf)+uint64(int(i)*bufLen))
		binary.LittleEndian.PutUint32(b[8:], uint32(bufLen))
		binary.LittleEndian.PutUint16(b[12:], 2) // write
	}
	var err error
	if d.kick, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		g.tb.Fatal(err)
	}
	g.tb.Cleanup(func() { unix.Close(d.kick) })
	d.q, err = virtq.New(g.space, virtq.Config{Index: index, Size: int(size), Desc: d.desc, Avail: d.avail, Used: d.used,
		Kick: d.kick})
	if err != nil {
		g.tb.Fatal(err)
	}
	return d
}

func (d *drvq) start() {
	d.g.tb.Helper()
	if err := d.g.StartQueue(d.index, d.q); err != nil {
		d.g.tb.Fatal(err)
	}
}

// add makes n buffers available, and kicks if the device asks for it.
func (d *drvq) add(n int) {
	for range n {
		i := d.free[0]
		d.free = d.free[1:]
		binary.LittleEndian.PutUint16(d.g.at(d.avail+4+2*translate.PA(d.put%d.size), 2), i)
		d.put++
	}
	d.g.u32(d.avail).Store(uint32(d.put) << 16)
	if d.g.u32(d.used).Load()&1 == 0 {
		one := []byte{1, 0, 0, 0, 0, 0, 0, 0}
		_, _ = unix.Write(d.kick, one)
	}
}

// get returns the contents of the buffers that the device returned.
func (d *drvq) get() (out [][]byte) {
	for d.got != uint16(d.g.u32(d.used).Load()>>16) {
		e := d.g.at(d.used+4+8*translate.PA(d.got%d.size), 8)
		i := uint16(binary.LittleEndian.Uint32(e))
		out = append(out, append([]byte(nil), d.g.at(d.buf+translate.PA(int(i)*d.bufLen),
			int(binary.LittleEndian.Uint32(e[4:])))...))
		d.free = append(d.free, i)
		d.got++
	}
	return out
}

func (d *drvq) events() (out []abi.Event) {
	d.g.tb.Helper()
	for _, b := range d.get() {
		var e abi.Event
		if err := e.Decode(b); err != nil {
			d.g.tb.Fatal(err)
		}
		out = append(out, e)
	}
	return out
}

// Arming: NEXT fires for anything, SOLICITED for solicited completions and errors,
// once each; no event without arming; none is lost while there are no buffers.
func TestArm(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	c := g.cq(64)
	q := g.tables.cqs[c.n].q
	dq := g.eventQueue(abi.CEQQueue(0), 8, abi.SizeCEQE)
	dq.add(4)
	arm := g.u32(c.arm)
	for i, s := range []struct {
		arm       uint32
		solicited bool
		event     bool
	}{
		{abi.ArmNone, true, false}, {abi.ArmNext, false, true}, {abi.ArmNone, false, false}, {abi.ArmSolicited, false, false},
		{abi.ArmSolicited, true, true}, {abi.ArmNext, true, true}, {0xffffffff, false, true},
	} {
		arm.Store(s.arm)
		tok := g.space.Epochs().Enter(translate.ByLoop(0))
		q.post(&abi.WC{ID: uint64(i)}, s.solicited)
		g.space.Epochs().Leave(0, tok)
		w.step(2)
		got := dq.get()
		if (len(got) == 1) != s.event || s.event && binary.LittleEndian.Uint32(got[0]) != c.n {
			t.Errorf("step %d: events %x, want %v", i, got, s.event)
		}
		if s.event != (arm.Load() == 0 && s.arm != 0) {
			t.Errorf("step %d: arm word is %d afterwards", i, arm.Load())
		}
		dq.add(len(got))
	}
}

// Events wait with their objects for buffers, in order, and one per object.
func TestEventsWait(t *testing.T) {
	w := newWorld(t, 2, 1, Limits{})
	g := w.guests[0]
	var cqs []*tcq
	for range 5 {
		cqs = append(cqs, g.cq(16))
	}
	fire := func(i int) {
		g.u32(cqs[i].arm).Store(abi.ArmNext)
		tok := g.space.Epochs().Enter(translate.ByLoop(0))
		g.tables.cqs[cqs[i].n].q.post(&abi.WC{}, false)
		g.space.Epochs().Leave(0, tok)
	}
	for _, i := range []int{3, 0, 3, 4, 1, 0} { // before the queue exists
		fire(i)
	}
	w.step(3)
	dq := g.eventQueue(abi.CEQQueue(0), 4, abi.SizeCEQE)
	w.step(3)
	var got []uint32
	for range 6 {
		dq.add(1)
		w.step(3)
		for _, b := range dq.get() {
			got = append(got, binary.LittleEndian.Uint32(b))
		}
	}
	want := []uint32{cqs[3].n, cqs[0].n, cqs[4].n, cqs[1].n}
	if len(got) != 4 || [4]uint32(got) != [4]uint32(want) {
		t.Fatalf("events for %v, want %v", got, want)
	}
	// A stopped queue keeps the events too; a destroyed CQ's events are dropped.
	g.StopQueue(abi.CEQQueue(0))
	fire(2)
	fire(1)
	w.step(3)
	g.must(abi.CmdDestroyCQ, handle(cqs[2].n))
	dq.start()
	w.step(3)
	if b := dq.get(); len(b) != 1 || binary.LittleEndian.Uint32(b[0]) != cqs[1].n {
		t.Fatalf("events %x, want one for CQ %d", b, cqs[1].n)
	}
}

// Random posts, buffers, destruction and restarts against a model: a set of
// (object, type) that have not been delivered to the driver.
func TestEventsModel(t *testing.T) {
	for seed := range uint64(5) {
		r := rand.New(rand.NewPCG(seed, 3))
		w := newWorld(t, 1, 1, Limits{})
		g := w.guests[0]
		dq := g.eventQueue(abi.EventQueue, 8, abi.SizeEvent)
		nodes := make([]eventNode, 6)
		for i := range nodes {
			nodes[i].init(uint32(i), nodeQP)
		}
		pending := map[[2]uint32]bool{}
		running := true
		take := func() {
			for _, e := range dq.events() {
				k := [2]uint32{e.Handle, uint32(e.Type)}
				if !pending[k] {
					t.Fatalf("seed %d: event %v of %d was not pending", seed, e.Type, e.Handle)
				}
				delete(pending, k)
			}
		}
		for range 2000 {
			i := r.Uint32N(6)
			switch r.IntN(8) {
			case 0, 1, 2, 3:
				ev := 1 + r.Uint32N(9)
				take() // earlier events must not be taken for this one
				g.async.post(&nodes[i], 1<<ev)
				pending[[2]uint32{i, ev}] = true
			case 4:
				if len(dq.free) > 0 {
					dq.add(1 + r.IntN(len(dq.free)))
				}
			case 5:
				w.step(2)
				take()
			case 6:
				if r.IntN(4) == 0 {
					take()
					g.async.drop(&nodes[i])
					for k := range pending {
						if k[0] == i {
							delete(pending, k)
						}
					}
				}
			case 7:
				if r.IntN(8) == 0 {
					if running {
						g.StopQueue(abi.EventQueue)
					} else {
						dq.start()
					}
					running = !running
				}
			}
		}
		if !running {
			dq.start()
		}
		for range 20 {
			if n := len(dq.free); n > 0 {
				dq.add(n)
			}
			w.step(3)
			take()
		}
		if len(pending) != 0 {
			t.Fatalf("seed %d: %d events were lost: %v", seed, len(pending), pending)
		}
	}
}

// A buffer that is too small, or outside memory, breaks only its queue.
func TestEventBadBuffer(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	dq := g.eventQueue(abi.EventQueue, 4, 8)
	dq.add(1)
	var n eventNode
	n.init(1, nodeQP)
	g.async.post(&n, 1<<abi.EventQPFatal)
	w.step(3)
	if dq.q.Broken() == nil {
		t.Fatal("the queue is not broken")
	}
	w.step(3)
	g.pd() // the command queue still works
}

// A full CQ is a CQ error: one event, and its QPs on all engines enter the
// error state; other QPs continue.
func TestOverrun(t *testing.T) {
	w := newWorld(t, 2, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	pa, pb := ga.pd(), gb.pd()
	dq := ga.eventQueue(abi.EventQueue, 16, abi.SizeEvent)
	dq.add(16)
	small, big := ga.cq(8), ga.cq(256)
	a := ga.qp(qpSpec{pd: pa, scq: small})
	// other is placed on another engine, where its send CQ is new, and shares small.
	other := ga.qp(qpSpec{pd: pa, scq: big, rcq: small})
	bystander := ga.qp(qpSpec{pd: pa})
	b, b2 := gb.qp(qpSpec{pd: pb}), gb.qp(qpSpec{pd: pb})
	a.connectRC(b)
	b.connectRC(a)
	bystander.connectRC(b2)
	b2.connectRC(bystander)
	other.modify(abi.QPInit, abi.QPAttrPKeyIndex|abi.QPAttrPort|abi.QPAttrAccessFlags, abi.QPAttr{})

	for i := range 20 {
		s := a.wqe()
		s.SetRequest(uint64(i), abi.WRRDMAWrite, abi.SendSignaled)
		a.post()
	}
	w.until("the error state", func() bool { return a.state() == abi.QPErr && other.state() == abi.QPErr })
	if got := small.poll(); len(got) != 7 {
		t.Errorf("%d completions in a CQ of 8 elements, want 7", len(got))
	}
	w.step(5)
	n := map[abi.EventType]int{}
	for _, e := range dq.events() {
		n[e.Type]++
		if e.Type == abi.EventCQErr && e.Handle != small.n {
			t.Errorf("CQ error of %d", e.Handle)
		}
	}
	if n[abi.EventCQErr] != 1 || n[abi.EventQPFatal] != 2 {
		t.Errorf("events %v, want one CQ error and two fatal QPs", n)
	}
	s := bystander.wqe()
	s.SetRequest(5, abi.WRRDMAWrite, abi.SendSignaled)
	bystander.post()
	if wc := bystander.scq.await(1)[0]; wc.Status != abi.WCSuccess {
		t.Errorf("bystander: %+v", wc)
	}
}

// The rxe provider of rdma-core 44 may step its consumer over the producer. That
// is no overrun; the device then continues at the guest's index.
func TestConsumerPassesProducer(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	c := g.cq(8)
	q := g.tables.cqs[c.n].q
	tok := g.space.Epochs().Enter(translate.ByLoop(0))
	defer g.space.Epochs().Leave(0, tok)
	for i := range uint64(100) {
		for range 4 { // half full
			q.post(&abi.WC{ID: i}, false)
		}
		c.cons().Store((c.prod().Load() + 1) & 7) // past it by one
		q.post(&abi.WC{ID: 1000 + i}, false)
		if q.failed.Load() {
			t.Fatal("the CQ failed")
		}
		if got := c.poll(); len(got) != 1 || got[0].ID != 1000+i {
			t.Fatalf("round %d: %+v", i, got)
		}
	}
}

// An event's buffer may be in a few pieces. One in many, which the loop would read for each of thousands of events,
// stops the queue before more than the bound is read.
func TestEventBufferInPieces(t *testing.T) {
	for _, x := range []struct {
		pieces int
		ok     bool
	}{{1, true}, {eventWalk, true}, {eventWalk + 1, false}, {64, false}} {
		w := newWorld(t, 1, 1, Limits{})
		g := w.guests[0]
		const size = 128
		dq := g.eventQueue(abi.EventQueue, size, abi.SizeEvent)
		for i := range x.pieces { // of one byte, the last one of the rest
			b := g.at(dq.desc+translate.PA(16*i), 16)
			n, flags := uint32(1), uint16(2|1)
			if i == x.pieces-1 {
				n, flags = uint32(abi.SizeEvent-i), 2
			}
			binary.LittleEndian.PutUint64(b, uint64(dq.buf)+uint64(i))
			binary.LittleEndian.PutUint32(b[8:], n)
			binary.LittleEndian.PutUint16(b[12:], flags)
			binary.LittleEndian.PutUint16(b[14:], uint16(i+1))
		}
		dq.add(1)
		var n eventNode
		n.init(7, nodeCQ)
		g.async.post(&n, 1<<abi.EventCQErr)
		w.step(2)
		if got := dq.events(); x.ok != (len(got) == 1 && got[0].Handle == 7) || x.ok != (dq.q.Broken() == nil) {
			t.Errorf("%d pieces: %+v, %v", x.pieces, got, dq.q.Broken())
		}
		if n := dq.q.Walked(); n > eventWalk {
			t.Errorf("%d pieces: %d descriptors read", x.pieces, n)
		}
		g.StopQueue(abi.EventQueue)
	}
}
