package hca

import (
	"reflect"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// count executes COUNT_QP.
func (q *tqp) count(flags uint32) (s abi.Stats) {
	q.g.tb.Helper()
	if err := s.Decode(q.g.must(abi.CmdCountQP, enc(abi.SizeCountQP, &abi.CountQP{QPN: q.n, Flags: flags}))); err != nil {
		q.g.tb.Fatal(err)
	}
	return s
}

// driverStats is what QUERY_STATS returns.
func (g *guest) driverStats() (s abi.Stats) {
	g.tb.Helper()
	if err := s.Decode(g.must(abi.CmdQueryStats, nil)); err != nil {
		g.tb.Fatal(err)
	}
	return s
}

// What a QP counts apart is not in the device's counters that its driver reads, is given once, and is part of the
// host's counters at any time: while it is counted, after it was read, and when the QP has gone.
func TestCountQP(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	a, b := w.pair()
	m := newMover(t, a, b, 64)
	sent := func(s abi.Stats) uint64 { return s.Value[abi.StatTxPackets] }
	move := func(n int) {
		t.Helper()
		for range n {
			if status, _ := m.move(); status != abi.WCSuccess {
				t.Fatalf("status %d", status)
			}
		}
	}
	expect := func(when string, apart, driver, host uint64, flags uint32) {
		t.Helper()
		if n := sent(a.g.Stats()); n != host {
			t.Errorf("%s: the host counts %d packets, want %d", when, n, host)
		}
		if n := sent(a.count(flags)); n != apart {
			t.Errorf("%s: %d packets apart, want %d", when, n, apart)
		}
		if n := sent(a.g.driverStats()); n != driver {
			t.Errorf("%s: the driver counts %d packets, want %d", when, n, driver)
		}
		if n := sent(a.g.Stats()); n != host {
			t.Errorf("%s: the host counts %d packets after COUNT_QP, want %d", when, n, host)
		}
	}
	move(3)
	expect("before", 0, 3, 3, abi.CountApart)
	move(5)
	expect("apart", 5, 3, 8, abi.CountApart)
	expect("read twice", 0, 3, 8, abi.CountApart)
	move(2)
	expect("at last", 2, 3, 10, 0)
	move(1)
	expect("in the device's again", 0, 4, 11, abi.CountApart)
	move(4)
	if n := a.g.Describe().Stats[abi.StatTxPackets.String()]; n != 15 {
		t.Errorf("the status has %d packets, want 15", n)
	}
	a.g.must(abi.CmdDestroyQP, handle(a.n))
	if d, h := sent(a.g.driverStats()), sent(a.g.Stats()); d != 4 || h != 15 {
		t.Errorf("when the QP has gone the driver counts %d packets and the host %d, want 4 and 15", d, h)
	}
	for _, e := range a.g.data.engines {
		if len(e.apart) != 0 {
			t.Errorf("engine %d has %d QPs that count apart, all have gone", e.id, len(e.apart))
		}
	}
	count := func(n, flags uint32) []byte { return enc(abi.SizeCountQP, &abi.CountQP{QPN: n, Flags: flags}) }
	b.g.refused(abi.StatusNotFound, abi.CmdCountQP, count(a.n, 0))
	b.g.refused(abi.StatusUnsupported, abi.CmdCountQP, count(b.n, abi.CountApart<<1))
}

// A QP that moves to another engine takes what it has counted apart with it.
func TestCountQPMoves(t *testing.T) {
	w := localWorld(t, 2, 2)
	g, h := w.guests[0], w.guests[1]
	a, pd := g.qp(qpSpec{pd: g.pd()}), h.pd()
	b := h.qp(qpSpec{pd: pd})
	for range 2 { // QPs get the engines in turn
		if a.where() != b.where() {
			break
		}
		b = h.qp(qpSpec{pd: pd})
	}
	was := map[*tqp]int{a: a.where(), b: b.where()}
	for _, q := range []*tqp{a, b} {
		q.count(abi.CountApart)
		q.g.qpFor(q.n).own.RxDropped = 7 // before the move
	}
	a.connectRC(b)
	b.connectRC(a)
	m := newMover(t, a, b, 64)
	m.move()
	moved := 0
	for q, from := range was {
		to := q.where()
		if to != from {
			moved++
		}
		for _, e := range q.g.data.engines {
			if _, ok := e.apart[q.g.qpFor(q.n)]; ok != (e.id == to) {
				t.Errorf("engine %d has the QP, which moved from %d to %d: %v", e.id, from, to, ok)
			}
		}
		if s := q.count(abi.CountApart); s.Value[abi.StatRxDropped] != 7 {
			t.Errorf("%d packets dropped before the move, want 7", s.Value[abi.StatRxDropped])
		}
		if s := q.g.driverStats(); s.Value[abi.StatRxPackets]+s.Value[abi.StatTxPackets]+s.Value[abi.StatRxDropped] != 0 {
			t.Errorf("the QP counts in its engine's counters: %v", s.Value)
		}
	}
	if moved != 1 {
		t.Errorf("%d QPs moved, want 1", moved)
	}
}

// A counter that a driver may read of a QP is reported, whoever counts it.
func TestCountersReport(t *testing.T) {
	var c, sum counters
	fields := reflect.ValueOf(&c.Stats).Elem()
	for i := range fields.NumField() {
		if f := fields.Field(i); f.CanUint() {
			f.SetUint(uint64(i + 1))
		}
	}
	c.hostFaults, c.guestFaults = 100, 200
	sum.add(&c)
	sum.add(&c)
	var one, two abi.Stats
	c.report(&one)
	sum.report(&two)
	ofDevice := map[abi.Stat]bool{abi.StatICRCErrors: true, abi.StatInvalidations: true, abi.StatFaultsResumed: true,
		abi.StatFaultsFailed: true}
	for i := range one.Value {
		if n := one.Value[i]; (n == 0) != ofDevice[abi.Stat(i)] || two.Value[i] != 2*n {
			t.Errorf("%v is %d, and %d when it was added twice", abi.Stat(i), n, two.Value[i])
		}
	}
}
