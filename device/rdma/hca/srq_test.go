package hca

import (
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

func (g *guest) srq(pd, elems, limit uint32) (uint32, *tring) {
	g.tb.Helper()
	r := g.ring(elems, 7)
	return g.mustHandle(abi.CmdCreateSRQ, enc(abi.SizeCreateSRQ,
		&abi.CreateSRQ{PDN: pd, MaxSGE: 4, Limit: limit, Ring: r.desc}, r.pas...)), &r
}

func (r *tring) postRecv(id uint64, sgl ...abi.SGE) {
	abi.RecvWQE(r.elem(r.prod().Load())).Set(id, sgl)
	r.push()
}

// Two QPs on two engines feed from one SRQ into one CQ, through a limit event and a
// move to a larger ring, and every request is used once, in order.
func TestSRQ(t *testing.T) {
	w := newWorld(t, 2, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	pa, pb := ga.pd(), gb.pd()
	dq := gb.eventQueue(abi.EventQueue, 8, abi.SizeEvent)
	dq.add(8)
	n, r := gb.srq(pb, 16, 4)
	rcq := gb.cq(64)
	// The first QP binds the SRQ to an engine; the second is placed there although its send
	// CQ belongs to another engine.
	anchor := gb.cq(64)
	first := gb.qp(qpSpec{pd: pb, scq: gb.cq(64), rcq: rcq, flags: abi.QPHasSRQ, srq: n})
	gb.qp(qpSpec{pd: pb, scq: anchor})
	if gb.tables.cqs[anchor.n].owner == gb.qpFor(first.n).engine {
		t.Fatal("test set-up: both engines are the same")
	}
	// Placement follows the SRQ, so a QP with that anchor shares the anchor.
	second := gb.qp(qpSpec{pd: pb, scq: anchor, rcq: rcq, flags: abi.QPHasSRQ, srq: n})
	if !gb.tables.cqs[anchor.n].q.shared || gb.qpFor(second.n).engine != gb.qpFor(first.n).engine {
		t.Error("the QPs of an SRQ are not on one engine, or the CQ between two engines has no lock")
	}
	senders := []*tqp{ga.qp(qpSpec{pd: pa}), ga.qp(qpSpec{pd: pa})}
	for i, p := range []*tqp{first, second} {
		senders[i].connectRC(p)
		p.connectRC(senders[i])
	}
	for i := range 15 {
		r.postRecv(uint64(i))
	}
	send := func(k, i int) {
		q := senders[k]
		s := q.wqe()
		s.SetRequest(uint64(i), abi.WRSend, abi.SendSignaled)
		q.post()
		if wc := rcq.await(1)[0]; wc.ID != uint64(i) || wc.QPN != []uint32{first.n, second.n}[k] {
			t.Fatalf("receive %d: %+v", i, wc)
		}
		senders[k].scq.await(1)
	}
	for i := range 10 {
		send(i%2, i)
	}
	w.step(3)
	if ev := dq.events(); len(ev) != 0 {
		t.Fatalf("events %+v with 5 requests left and limit 4", ev)
	}
	nr := gb.ring(64, 8)
	gb.must(abi.CmdModifySRQ, enc(abi.SizeModifySRQ, &abi.ModifySRQ{SRQN: n, Flags: abi.SRQResize, Ring: nr.desc},
		nr.pas...))
	if p, c := nr.prod().Load(), nr.cons().Load(); p != 5 || c != 0 {
		t.Fatalf("new ring: producer %d, consumer %d, want 5 and 0", p, c)
	}
	r = &nr
	for i := 10; i < 13; i++ {
		send(i%2, i)
	}
	w.step(3)
	if ev := dq.events(); len(ev) != 1 || ev[0].Type != abi.EventSRQLimit || ev[0].Handle != n {
		t.Fatalf("events %+v, want one SRQ limit", ev)
	}
	// The event disarms the limit; MODIFY arms it again.
	var a abi.SRQAttr
	_ = a.Decode(gb.must(abi.CmdQuerySRQ, handle(n)))
	if a.Limit != 0 {
		t.Errorf("limit %d after the event", a.Limit)
	}
	gb.must(abi.CmdModifySRQ, enc(abi.SizeModifySRQ, &abi.ModifySRQ{SRQN: n, Flags: abi.SRQLimit, Limit: 10}))
	send(0, 13)
	w.step(3)
	if ev := dq.events(); len(ev) != 1 {
		t.Fatalf("events %+v", ev)
	}
	// The new ring is too small for the posted requests.
	for i := range 20 {
		r.postRecv(uint64(100 + i))
	}
	small := gb.ring(16, 8)
	gb.refused(abi.StatusInvalid, abi.CmdModifySRQ, enc(abi.SizeModifySRQ,
		&abi.ModifySRQ{SRQN: n, Flags: abi.SRQResize, Ring: small.desc}, small.pas...))
	gb.refused(abi.StatusInvalid, abi.CmdModifySRQ, enc(abi.SizeModifySRQ,
		&abi.ModifySRQ{SRQN: n, Flags: abi.SRQLimit, Limit: 64}))
	gb.refused(abi.StatusInvalid, abi.CmdModifySRQ, enc(abi.SizeModifySRQ, &abi.ModifySRQ{SRQN: n, Flags: 4}))
}

// RESIZE_CQ moves the completions not polled yet, in order, however the ring is wrapped.
func TestResizeCQ(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	c := g.cq(8)
	q := g.tables.cqs[c.n].q
	post := func(id uint64) {
		tok := g.space.Epochs().Enter(translate.ByLoop(0))
		defer g.space.Epochs().Leave(0, tok)
		q.post(&abi.WC{ID: id}, false)
	}
	id, want := uint64(0), uint64(0)
	for round := range 40 {
		for range 5 {
			post(id)
			id++
		}
		elems := uint32(8 << (round % 3))
		r := g.ring(elems, 6+uint8(round%2))
		g.must(abi.CmdResizeCQ, enc(abi.SizeResizeCQ, &abi.ResizeCQ{CQN: c.n, Ring: r.desc}, r.pas...))
		c.tring = r
		if p := r.prod().Load(); p != 5 || r.cons().Load() != 0 {
			t.Fatalf("round %d: producer %d, consumer %d", round, p, r.cons().Load())
		}
		got := c.poll()
		for _, wc := range got {
			if wc.ID != want {
				t.Fatalf("round %d: %+v, want id %d", round, wc, want)
			}
			want++
		}
	}
	for range 7 {
		post(1)
	}
	r := g.ring(4, 6)
	g.refused(abi.StatusInvalid, abi.CmdResizeCQ, enc(abi.SizeResizeCQ, &abi.ResizeCQ{CQN: c.n, Ring: r.desc}, r.pas...))
	g.refused(abi.StatusNotFound, abi.CmdResizeCQ, enc(abi.SizeResizeCQ, &abi.ResizeCQ{CQN: 99, Ring: r.desc}, r.pas...))
	if got := c.poll(); len(got) != 7 {
		t.Errorf("a refused resize lost completions: %d", len(got))
	}
}

// RESIZE_CQ moves many completions in parts, between which the loop serves others, and which CQs go on being produced.
func TestResizeCQInParts(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	c, q := g.cq(16384), (*cq)(nil)
	q = g.tables.cqs[c.n].q
	post := func(n int) {
		tok := g.space.Epochs().Enter(translate.ByLoop(0))
		defer g.space.Epochs().Leave(0, tok)
		for range n {
			q.post(&abi.WC{ID: uint64(q.prod)}, false)
		}
	}
	const many = 3*moveChunk + 100
	post(many)
	r := g.ring(16384, 6)
	if err := w.loops[0].Start(); err != nil {
		t.Fatal(err)
	}
	o, between := g.tables.cqs[c.n], 0
	o.owner = g.engines[0]
	w.loops[0].Do(func() {
		w.loops[0].Post(func() { // runs when the first part has been moved
			post(5)
			between++
		})
	})
	g.must(abi.CmdResizeCQ, enc(abi.SizeResizeCQ, &abi.ResizeCQ{CQN: c.n, Ring: r.desc}, r.pas...))
	o.owner = nil
	c.tring = r
	got := c.poll()
	if len(got) != many+5 || between != 1 {
		t.Fatalf("%d completions, want %d", len(got), many+5)
	}
	for i, wc := range got {
		if wc.ID != uint64(i) {
			t.Fatalf("completion %d is %d", i, wc.ID)
		}
	}
	// The parts themselves; a ring that becomes too small meanwhile is refused.
	post(many)
	small := g.ring(8192, 6)
	to, err := newRing(g.space, &small.desc, enc(0, &abi.Handle{}, small.pas...), abi.SizeWC, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	tok := g.space.Epochs().Enter(translate.ByLoop(0))
	defer g.space.Epochs().Leave(0, tok)
	m, err := q.startMove(to)
	if err != nil {
		t.Fatal(err)
	}
	calls := 0
	for done := false; !done && err == nil; calls++ {
		if done, err = q.continueMove(&m, func() {}); calls == 1 {
			for range 3000 {
				q.post(&abi.WC{}, false)
			}
		}
	}
	if calls != 3 || statusOf(err) != abi.StatusInvalid {
		t.Errorf("%d calls, %v", calls, err)
	}
}
