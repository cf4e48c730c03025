package roce

import (
	"fmt"
	"math/rand"
	"testing"
)

// storm is a stream of WRITEs, or of WRITEs and READs in turn, into memory whose pages are released all the time.
type storm struct {
	peer    peerKind
	reads   bool
	service int64   // mean service time of a fault, ns
	release int64   // interval in which four pages are released, ns
	loss    float64 // of frames
}

func (s *storm) String() string {
	ops := "writes"
	if s.reads {
		ops = "mixed"
	}
	return fmt.Sprintf("%s/%s/service=%dus/release=%dus/loss=%v", s.peer.name, ops, s.service/1e3, s.release/1e3, s.loss)
}

// stormCounts are the costs of a storm.
type stormCounts struct {
	faults      int
	rnr, resent float64 // per fault
	dropped     float64 // share of the packets received that were dropped out of sequence
	took        int64   // ns
}

const stormOps = 600

func (s *storm) run(t *testing.T) stormCounts {
	f := newFabric(t, 1)
	o := opts()
	o.timeout, o.mtu = 20, 5
	a, b := s.peer.pair(f, o)
	f.delay = 20e3
	rng := rand.New(rand.NewSource(2))
	if s.loss > 0 {
		f.losses(int(s.loss*1e4), 1)
	}
	const size = 1 << 20
	a.reg(1, 0, size, allAccess)
	b.reg(2, 0, size, allAccess)
	b.waits, b.whole, b.delay = true, true, s.service
	b.paging(1, 0, 0)
	b.service = func() int64 {
		d := s.service/2 + int64(rng.ExpFloat64()*float64(s.service)/2)
		b.delay += (d - b.delay) / 8 // smoothed as hca does
		return d
	}
	var release func()
	release = func() {
		for range 4 {
			b.absent(2, uint64(rng.Intn(size)))
		}
		if len(a.sends) < stormOps {
			f.after(s.release, release)
		}
	}
	release()
	start := f.now
	f.until("storm", 600e9, func() bool {
		for len(a.sq) < stormOps && len(a.sq)-len(a.sends) < 16 {
			n := 1 << (3 + rng.Intn(13))
			va := rng.Intn(size - n)
			w := WQE{Opcode: WRWrite, RKey: 2, RemoteVA: sge(0, uint64(va), 0).VA, SGEs: []SGE{sge(1, uint64(va), n)}}
			if s.reads && len(a.sq)%2 == 1 {
				w.Opcode = WRRead
			}
			a.post(w)
		}
		return len(a.sends) == stormOps
	})
	for i := range a.sends {
		if st := a.sends[i].c.Status; st != StatusSuccess {
			t.Fatalf("request %d: status %d", i, st)
		}
	}
	r, n := b.q.Stats(), float64(max(b.raised[Responder], 1))
	return stormCounts{
		faults: b.raised[Responder], rnr: float64(r.TxRNR) / n, resent: float64(a.q.Stats().Retransmits) / n,
		dropped: (float64(r.OutOfSequence) - float64(r.Kept)) / float64(r.RxPackets), took: f.now - start,
	}
}

// TestFaultStorm: what a fault costs on the wire (PF-8, PF-9). A fault is refused about once, and neither the packet
// that it refuses nor the next absent page makes the requester send many packets that the responder drops.
func TestFaultStorm(t *testing.T) {
	for _, k := range []peerKind{peerKinds[0], peerKinds[2]} {
		for _, reads := range []bool{false, true} {
			for _, service := range []int64{50e3, 500e3, 5e6} {
				for _, release := range []int64{20e3, 200e3} {
					for _, loss := range []float64{0, 0.01} {
						s := storm{peer: k, reads: reads, service: service, release: release, loss: loss}
						t.Run(s.String(), func(t *testing.T) {
							c := s.run(t)
							t.Logf("%d faults in %d ms; per fault %.2f RNR NAKs, %.1f packets sent again; %.0f %% dropped",
								c.faults, c.took/1e6, c.rnr, c.resent, 100*c.dropped)
							rnr := 1.5
							if k.name == "vnicd" && loss == 0 {
								rnr = 1.15
							}
							if c.rnr > rnr {
								t.Errorf("%.2f RNR NAKs per fault", c.rnr)
							}
							if c.resent > 20 || c.resent > 7 && release < service || c.dropped > 0.65 {
								t.Errorf("%.1f packets sent again per fault, %.0f %% dropped", c.resent, 100*c.dropped)
							}
						})
					}
				}
			}
		}
	}
}

// A single fault in a stream does not slow it down: the window is open at once when the page is present.
func TestRareFault(t *testing.T) {
	took := [2]int64{}
	for i := range took {
		f := newFabric(t, 1)
		f.delay = 20e3
		a, b := f.pair(opts())
		a.reg(1, 0, 1<<20, allAccess)
		b.reg(2, 0, 1<<20, allAccess)
		b.paging(1, 0, 0)
		b.whole = true
		b.service = func() int64 { return 200e3 }
		for range 8 {
			a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 1<<20)}})
		}
		if i == 1 {
			f.after(1e6, func() { b.absent(2, 1<<19) })
		}
		start := f.now
		f.until("stream", 1e9, func() bool { return len(a.sends) == 8 })
		took[i] = f.now - start
		if i == 1 && b.raised[Responder] != 1 {
			t.Fatalf("%d faults", b.raised[Responder])
		}
	}
	// The fault, and a round trip for each of the packets in flight, the RNR NAK and the ACK.
	if d := took[1] - took[0]; d > 200e3+4*40e3 {
		t.Errorf("a fault of 200 us cost %d us of %d", d/1e3, took[0]/1e3)
	}
}
