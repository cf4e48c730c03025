package hca

import (
	"math/rand/v2"
	"testing"

	"github.com/vnicd/vnicd/device/abi"
	"github.com/vnicd/vnicd/translate"
)

// The bitmap against a set: every ring is seen once, whatever the slot.
func TestDoorbellScan(t *testing.T) {
	g := newWorld(t, 1, 1, Limits{QPs: 65000}).guests[0]
	l := g.lanes[0]
	r := rand.New(rand.NewPCG(1, 4))
	tok, _ := l.enter()
	defer l.leave(tok)
	model := map[int]bool{}
	bell := func(slot int) {
		word := func(off int) translate.PA { return l.db.pages[off>>12] + translate.PA(off&4095) }
		g.u64(word(abi.DoorbellBitsOff + 8*(slot/64))).Or(1 << (slot % 64))
		g.u64(word(abi.DoorbellSummaryOff + 8*(slot/4096))).Or(1 << (slot / 64 % 64))
		model[slot] = true
	}
	for round := range 300 {
		for range r.IntN(40) {
			slot := r.IntN(abi.DoorbellSlots)
			if round%3 == 0 {
				slot = r.IntN(100)
			}
			bell(slot)
		}
		if l.db.rung() != (len(model) > 0) {
			t.Fatalf("round %d: rung says %v", round, l.db.rung())
		}
		got := map[int]bool{}
		any, m := l.db.scan(func(s int) {
			if got[s] {
				t.Fatalf("slot %d twice", s)
			}
			got[s] = true
		})
		if !m.OK() || any != (len(model) > 0) || len(got) != len(model) {
			t.Fatalf("round %d: %d slots, %v, %v; want %d", round, len(got), any, m, len(model))
		}
		for s := range model {
			if !got[s] {
				t.Fatalf("slot %d was not seen", s)
			}
		}
		clear(model)
	}
}

// Bits of slots without a QP, and the guest's summary without bits, do no harm;
// need_wakeup follows Prepare and Resume, and a bell between them is seen.
func TestDoorbellWakeup(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	l := g.lanes[0]
	for _, slot := range []uint32{0, 1, 2, 63, 64, 4095, 4096} {
		(&tqp{g: g, slot: slot}).bell()
	}
	g.u64(l.db.pages[0] + abi.DoorbellSummaryOff).Store(1<<64 - 1)
	w.step(1)
	flag := g.u32(l.db.pages[0])
	if flag.Load() != 0 {
		t.Error("need_wakeup is set while the loop runs")
	}
	if l.Prepare() || flag.Load() != 1 {
		t.Errorf("need_wakeup %d after Prepare", flag.Load())
	}
	q := g.qp(qpSpec{pd: g.pd()})
	q.bell()
	if !l.Prepare() {
		t.Error("Prepare overlooked a bell")
	}
	l.Resume()
	if flag.Load() != 0 {
		t.Error("need_wakeup is set after Resume")
	}
}

// With all QPs of a VM busy, each gets its turn.
func TestFairness(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	pa, pb := ga.pd(), gb.pd()
	n := 8 * 4096
	src, dst := ga.alloc(n), gb.alloc(n)
	ka, kb := ga.mr(pa, src, n, 1), gb.mr(pb, dst, n, 1|remoteAll)
	var qs []*tqp
	for range 8 {
		a, b := ga.qp(qpSpec{pd: pa, elems: 128}), gb.qp(qpSpec{pd: pb})
		a.connectRC(b)
		b.connectRC(a)
		qs = append(qs, a)
	}
	for _, q := range qs {
		for i := range 120 {
			s := q.wqe()
			s.SetRequest(uint64(i), abi.WRRDMAWrite, 0)
			s.SetRDMA(uint64(dst), kb)
			s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: uint32(n), LKey: ka}})
			q.sq.push()
		}
	}
	for _, q := range qs {
		q.bell()
	}
	w.until("half of the work of one", func() bool { return qs[0].sq.cons().Load() >= 60 })
	for i, q := range qs {
		if c := q.sq.cons().Load(); c < 40 || c > 80 {
			t.Errorf("QP %d has completed %d requests when QP 0 has completed 60", i, c)
		}
	}
	w.until("the rest", func() bool {
		for _, q := range qs {
			if q.sq.cons().Load() != q.sq.prod().Load() {
				return false
			}
		}
		return true
	})
}

// Requests that are flushed are not free: a VM that posts to QPs in the error state gets no more of a pass than one whose requests are carried out.
func TestFlushedShare(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	pd := g.pd()
	const qps, posted = 16, 120
	var qs []*tqp
	for range qps {
		q := g.qp(qpSpec{pd: pd, elems: 128})
		q.modify(abi.QPErr, 0, abi.QPAttr{})
		for i := range posted {
			q.wqe().SetRequest(uint64(i), abi.WRRDMAWrite, 0)
			q.sq.push()
		}
		q.bell()
		qs = append(qs, q)
	}
	flushed := func() (n uint64) {
		for _, q := range qs {
			n += uint64(q.sq.cons().Load())
		}
		return n
	}
	for n := flushed(); n < qps*posted; {
		w.step(1)
		was := n
		if n = flushed(); n-was > pollBudget/flushCost {
			t.Fatalf("%d requests were flushed in one pass, the budget is for %d", n-was, pollBudget/flushCost)
		}
	}
}
