package hca

import (
	"sync"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// A command that waits for the host's swap device blocks no other caller: the caller that
// changes the port's MTU holds the tunnels' lock, and status queries are for all VMs. The tables can be read meanwhile.
func TestSlowCommand(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	g.pd()
	inside, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	g.hold = func(translate.PA, uint64) {
		once.Do(func() { close(inside) })
		<-goOn
	}
	var wg sync.WaitGroup
	wg.Go(func() { g.cq(16) })
	<-inside
	others := make(chan Status)
	go func() {
		g.PortChanged()
		others <- g.Describe()
	}()
	select {
	case s := <-others:
		if g.notes != 1 || s.Busy || !s.Connected || s.PDs != 1 || s.Stats["rx_packets"] != 0 || len(s.GIDs) != 1 {
			t.Errorf("%d notices, status %+v", g.notes, s)
		}
	case <-time.After(patienceHere):
		t.Error("a change of the port, or a status, waits for a command")
		defer func() { <-others }()
	}
	close(goOn)
	wg.Wait()
	if s := g.Describe(); s.Busy || s.PDs != 1 || s.CQs != 1 {
		t.Errorf("status after the command: %+v", s)
	}
}

// While eachQP visits many QPs, their loop, which other VMs share, does other work in between.
func TestManyQPsAreVisitedInTurns(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	pd, cq := g.pd(), g.cq(16)
	const n = 3 * visitQPs
	for range n {
		g.qp(qpSpec{pd: pd, scq: cq, rcq: cq, elems: 2})
	}
	if err := w.loops[0].Start(); err != nil {
		t.Fatal(err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	seen, between := map[uint32]bool{}, 0
	g.eachQP(func(q *qp) {
		if len(seen) == 0 {
			w.loops[0].Post(func() { between = len(seen) })
		}
		seen[q.n] = true
	})
	if len(seen) != n || between == 0 || between > n-visitQPs {
		t.Errorf("%d QPs of %d visited; the loop did other work after %d", len(seen), n, between)
	}
}

// The memory that a list of pages makes the host bring in is bounded, whatever the list.
func TestWarmBounded(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	pd := g.pd()
	var warmed uint64
	g.hold = func(_ translate.PA, n uint64) { warmed += n }
	for _, x := range []struct {
		shift      uint8
		step, want uint64
	}{{12, 0, 500 << 12}, {12, 1 << 12, 500 << 12}, {30, 0, maxWarm}} {
		pas := make([]uint64, 500)
		for i := range pas {
			pas[i] = uint64(memBase) + uint64(i)*x.step
		}
		var r abi.CreateMRResp
		req := abi.CreateMR{PDN: pd, Access: abi.AccessLocalWrite, PageShift: x.shift, Length: 500 << x.shift, NPages: 500}
		if err := r.Decode(g.must(abi.CmdCreateMR, enc(abi.SizeCreateMR, &req))); err != nil {
			t.Fatal(err)
		}
		g.takeAway(memBase, 500<<12)
		warmed = 0
		g.must(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: r.Handle, Count: 500}, pas...))
		if warmed != x.want {
			t.Errorf("pages of %d bytes, %d apart: %d bytes brought in, want %d", 1<<x.shift, x.step, warmed, x.want)
		}
		g.bringAll()
		if warmed = 0; x.shift == translate.PageShift {
			g.must(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: r.Handle, Count: 500}, pas...))
		}
		if warmed != 0 {
			t.Errorf("pages of %d bytes, %d apart: %d bytes brought in that were present", 1<<x.shift, x.step, warmed)
		}
	}
}
