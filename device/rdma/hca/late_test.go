package hca

import (
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// A loop that gets no processor for longer than the timeout finds an expired timer and, behind it, the acknowledgement:
// nothing is sent again, and nothing counts as a timeout.
func TestLateLoop(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	w.losing(func([]byte) bool { return false }) // frames only
	ga, gb := w.guests[0], w.guests[1]
	pa, pb := ga.pd(), gb.pd()
	a, b := ga.qp(qpSpec{pd: pa}), gb.qp(qpSpec{pd: pb})
	a.connectRC(b)
	b.connectRC(a)
	src, dst := ga.alloc(4096), gb.alloc(4096)
	ka, kb := ga.mr(pa, src, 4096, 1), gb.mr(pb, dst, 4096, remoteAll|1)
	for i, gap := range []time.Duration{0, 10 * time.Millisecond, 100 * time.Millisecond, time.Second} {
		s := a.wqe()
		s.SetRequest(uint64(i), abi.WRRDMAWrite, abi.SendSignaled)
		s.SetRDMA(uint64(dst), kb)
		s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 8, LKey: ka}})
		a.post()
		sent := w.carried
		for steps := 0; w.carried < sent+2; steps++ { // the request and its acknowledgement
			if steps == 10 {
				t.Fatal("no acknowledgement is on its way")
			}
			w.step(1)
		}
		if got := a.scq.poll(); len(got) != 0 {
			t.Fatalf("completed before the gap: %+v", got)
		}
		w.clock.Advance(gap)
		w.step(3)
		if got := a.scq.poll(); len(got) != 1 || got[0].Status != abi.WCSuccess {
			t.Fatalf("after a gap of %v: %+v", gap, got)
		}
		if st := ga.Describe().Stats; st["timeouts"] != 0 || st["retransmits"] != 0 || w.carried != sent+2 {
			t.Errorf("after a gap of %v: %d timeouts, %d packets sent again, %d frames", gap, st["timeouts"],
				st["retransmits"], w.carried-sent)
		}
		w.clock.Advance(20 * time.Second)
		w.step(3)
	}
}
