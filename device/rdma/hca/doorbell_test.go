package hca

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// The bitmap against a set: every doorbell of a slot with a QP is seen once, whatever the slot, while QPs are created
// and destroyed: few, whose words are scanned directly, and many.
func TestDoorbellScan(t *testing.T) {
	g := newWorld(t, 1, 1, Limits{QPs: 65000}).guests[0]
	e := g.engines[0]
	r := rand.New(rand.NewPCG(1, 4))
	tok, _ := e.enter()
	defer e.leave(tok)
	model, live := map[int]bool{}, map[int]bool{}
	bell := func(slot int) {
		word := func(off int) translate.PA { return e.db.pages[off>>12] + translate.PA(off&4095) }
		g.u64(word(abi.DoorbellBitsOff + 8*(slot/64))).Or(1 << (slot % 64))
		g.u64(word(abi.DoorbellSummaryOff + 8*(slot/4096))).Or(1 << (slot / 64 % 64))
		model[slot] = true
	}
	modes := map[bool]int{}
	for round := range 600 {
		many := round/50%2 == 1
		for slot := range live {
			if r.IntN(4) == 0 || !many && round%50 == 0 {
				e.db.leave(slot)
				delete(live, slot)
			}
		}
		for range r.IntN(40) {
			slot := r.IntN(len(g.qps))
			if !many {
				slot = slot % (3 * slotsPerWord)
			}
			if !live[slot] {
				e.db.join(slot)
				live[slot] = true
			}
		}
		modes[len(e.db.used) <= fewWords]++
		bell(r.IntN(len(g.qps))) // rarely has a QP
		for slot := range live {
			if r.IntN(3) == 0 {
				bell(slot)
			}
		}
		want := 0
		for slot := range model {
			if live[slot] {
				want++
			}
		}
		if want > 0 && !e.db.anySet() {
			t.Fatalf("round %d: %d slots, but rung reports none", round, want)
		}
		got := map[int]bool{}
		any, m := e.db.scan(func(s int) {
			if got[s] {
				t.Fatalf("slot %d twice", s)
			}
			got[s] = true
		})
		if !m.OK() || want > 0 && !any {
			t.Fatalf("round %d: %d slots, %v, %v; want %d", round, len(got), any, m, want)
		}
		for s := range got {
			if !model[s] {
				t.Fatalf("slot %d was not rung", s)
			}
			delete(model, s)
		}
		for s := range model {
			if live[s] {
				t.Fatalf("round %d: slot %d was not seen", round, s)
			}
		}
		// Doorbells that are rung before the bits are cleared, again or for the first time, are not lost.
		late, settled := map[int]bool{}, map[int]bool{}
		for slot := range live {
			if r.IntN(3) == 0 {
				bell(slot)
				late[slot] = true
			}
		}
		e.db.clear(func(s int) {
			if !got[s] && !late[s] {
				t.Fatalf("slot %d is settled, and was not rung", s)
			}
			settled[s] = true
			delete(late, s)
			delete(model, s)
		})
		for s := range got {
			if !settled[s] {
				t.Fatalf("slot %d is not settled", s)
			}
		}
		e.db.clear(func(s int) { t.Fatalf("slot %d is settled twice", s) })
		if len(late) > 0 && !e.db.anySet() {
			t.Fatalf("round %d: %d bells are lost", round, len(late))
		}
		e.db.scan(func(s int) {
			delete(late, s)
			delete(model, s)
		})
		if len(late) > 0 {
			t.Fatalf("round %d: %d bells are lost", round, len(late))
		}
		e.db.clear(func(int) {})
		// The summary may still name, once, words that have been cleared already.
		none := func(s int) { t.Fatalf("slot %d is seen twice", s) }
		if any, _ = e.db.scan(none); any && len(e.db.used) <= fewWords {
			t.Fatalf("round %d: doorbells remain after a scan", round)
		}
		e.db.clear(none)
		if any, _ = e.db.scan(none); any || e.db.anySet() {
			t.Fatalf("round %d: doorbells remain after two scans", round)
		}
	}
	if modes[true] < 100 || modes[false] < 100 {
		t.Errorf("few words in use %d times, many %d times", modes[true], modes[false])
	}
}

// Bits of slots without a QP, and summary bits without doorbell bits, are harmless;
// need_wakeup follows Prepare and Resume, and a doorbell between them is seen.
func TestDoorbellWakeup(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	e := g.engines[0]
	for _, slot := range []uint32{0, 1, 2, 63, 64, 4095, 4096} {
		(&tqp{g: g, slot: slot}).bell()
	}
	g.u64(e.db.pages[0] + abi.DoorbellSummaryOff).Store(1<<64 - 1)
	w.step(1)
	w.clock.Advance(time.Second)
	w.step(2)
	flag := g.u32(e.db.pages[0])
	if flag.Load() != 1 {
		t.Errorf("need_wakeup %d of an engine that rests", flag.Load())
	}
	e.Resume()
	if flag.Load() != 0 {
		t.Error("need_wakeup is set after the rest")
	}
	if e.Prepare() || flag.Load() != 1 {
		t.Errorf("need_wakeup %d after Prepare", flag.Load())
	}
	q := g.qp(qpSpec{pd: g.pd()})
	q.bell()
	if !e.Prepare() {
		t.Error("Prepare missed a doorbell")
	}
	e.Resume()
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

// Flushed requests count against the budget: a VM that posts to QPs in the error state gets no more of a pass than one
// whose requests are executed.
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
			t.Fatalf("%d requests were flushed in one pass, the budget allows %d", n-was, pollBudget/flushCost)
		}
	}
}
