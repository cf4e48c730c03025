package hca

import (
	"slices"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/record"
	"github.com/vnicd/vnicd/device/virtio/virtq"
)

// setNonce accepts the feature and sets up the doorbells of engine 0 anew, with a nonce. There must be no QP.
func (g *guest) setNonce(n uint64) {
	g.tb.Helper()
	if err := g.SetFeatures(abi.FeatureNonce); err != nil {
		g.tb.Fatal(err)
	}
	pa := g.alloc(abi.DoorbellSize)
	g.u64(pa + abi.DoorbellNonceOff).Store(n)
	g.must(abi.CmdSetDoorbells, doorbellsAt(0, uint64(pa)))
}

func doorbellsAt(engine uint32, pa uint64) []byte {
	return enc(abi.SizeSetDoorbells, &abi.SetDoorbells{Engine: engine, NPages: abi.DoorbellPages,
		PA: [abi.DoorbellPages]uint64{pa, pa + 4096, pa + 8192}})
}

// pausable is a world with a connection of which b's guest has a nonce and a command queue that can be started.
type pausable struct {
	*world
	a, b  *tqp
	g     *guest // b's
	start func(base uint16)
	dst   uint64
	key   uint32
}

const testNonce = 0x1234567890abcdef

func newPausable(t *testing.T) *pausable {
	t.Helper()
	w := newWorld(t, 1, 2, Limits{})
	p := &pausable{world: w, g: w.guests[1]}
	p.g.setNonce(testNonce)
	p.a, p.b = w.pair()
	dst := p.g.alloc(4096)
	p.dst, p.key = uint64(dst), p.g.mr(1, dst, 4096, 1|remoteAll)
	dq := p.g.newEventQueue(abi.CommandQueue, 4, 64)
	p.start = func(base uint16) {
		t.Helper()
		q, err := virtq.New(p.g.space, virtq.Config{Size: 4, Desc: dq.desc, Avail: p.g.alloc(4096), Used: p.g.alloc(4096),
			Base: base, Kick: dq.kick})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.g.StartQueue(abi.CommandQueue, q); err != nil {
			t.Fatal(err)
		}
	}
	p.start(7)
	return p
}

// write posts a WRITE from a to b.
func (p *pausable) write(id uint64) {
	s := p.a.wqe()
	s.SetRequest(id, abi.WRRDMAWrite, abi.SendSignaled|abi.SendInline)
	s.SetRDMA(p.dst, p.key)
	s.SetInline([]byte("hello"))
	p.a.post()
}

// dropped checks that b's state is gone, and that its peer's request fails by its retries.
func (p *pausable) dropped(t *testing.T, gen uint32) {
	t.Helper()
	if g := p.g; len(g.tables.pds)+g.tables.qps != 0 || g.generation.Load() == gen || g.Describe().Paused {
		t.Errorf("the driver's objects remain: %d PDs, %d QPs, generation %d after %d", len(g.tables.pds), g.tables.qps,
			g.generation.Load(), gen)
	}
	var got []abi.WC
	p.until("the peer's request ends", func() bool {
		p.clock.Advance(100 * time.Millisecond)
		got = append(got, p.a.scq.poll()...)
		return len(got) > 0
	})
	if got[0].Status != abi.WCRetryExcErr {
		t.Errorf("the peer's request ends with status %d", got[0].Status)
	}
}

// held checks that the peer's request waits for a minute.
func (p *pausable) held(t *testing.T) {
	t.Helper()
	for range 600 {
		p.step(5)
		p.clock.Advance(100 * time.Millisecond)
	}
	if n := len(p.a.scq.poll()); n != 0 || !p.g.Describe().Paused {
		t.Fatalf("%d completions while the VM is paused", n)
	}
}

// The nonce tells a pause from the end of the driver, whenever that is looked at (CO-3).
func TestNonce(t *testing.T) {
	t.Run("in its place", func(t *testing.T) {
		p := newPausable(t)
		p.g.StopQueue(abi.CommandQueue)
		p.write(5)
		p.held(t)
		gen := p.g.generation.Load()
		p.start(7)
		if wc := p.a.scq.await(1)[0]; wc.ID != 5 || wc.Status != 0 {
			t.Errorf("the peer's request: %+v", wc)
		}
		if p.b.state() != abi.QPRTS || p.g.generation.Load() != gen {
			t.Error("the pause lost objects")
		}
	})
	for value, name := range map[uint64]string{0: "cleared", testNonce ^ 1: "another number"} {
		t.Run(name+" before the queue stops", func(t *testing.T) {
			p := newPausable(t)
			gen, notes := p.g.generation.Load(), p.g.notes
			p.g.u64(p.g.tables.nonce.at).Store(value)
			if p.write(5); p.a.scq.await(1)[0].Status != 0 || p.g.tables.qps == 0 {
				t.Fatal("a running driver changes its nonce and loses its objects")
			}
			p.g.StopQueue(abi.CommandQueue)
			p.write(6)
			p.dropped(t, gen)
			if p.g.notes == notes {
				t.Error("the driver was not notified")
			}
		})
		t.Run(name+" during the pause", func(t *testing.T) {
			p := newPausable(t)
			defer func(d time.Duration) { lookInterval = d }(lookInterval)
			lookInterval = 5 * time.Millisecond
			gen := p.g.generation.Load()
			p.g.StopQueue(abi.CommandQueue)
			p.write(5)
			p.held(t)
			time.Sleep(4 * lookInterval) // several looks change nothing
			if p.g.Describe().QPs == nil {
				t.Fatal("objects lost while the nonce is in its place")
			}
			p.g.u64(p.g.tables.nonce.at).Store(value)
			for end := time.Now().Add(20 * time.Second); p.g.Describe().Paused && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
			p.g.lookForDriver() // returns when the timer's look has ended
			p.dropped(t, gen)
		})
		for base, what := range map[uint16]string{7: "where it stopped", 0: "from 0"} {
			t.Run(name+" when the queue starts "+what, func(t *testing.T) {
				p := newPausable(t)
				p.g.StopQueue(abi.CommandQueue)
				gen := p.g.generation.Load()
				p.g.u64(p.g.tables.nonce.at).Store(value)
				p.start(base)
				if p.g.tables.qps != 0 || !p.g.Up() {
					t.Error("the objects remain")
				}
				if changed := p.g.generation.Load() != gen; changed != (base != 0) {
					t.Errorf("the generation changed: %v", changed)
				}
				if p.g.tables.nonce.value != 0 {
					t.Error("the nonce of the previous driver is kept")
				}
			})
		}
	}
}

// A driver without the feature has no nonce, whatever is in its memory; one that has accepted it must have one.
func TestNonceNegotiation(t *testing.T) {
	w := newWorld(t, 2, 1, Limits{})
	g := w.guests[0]
	if g.Features() != abi.Features {
		t.Errorf("features %#x", g.Features())
	}
	pa := g.alloc(abi.DoorbellSize)
	word := g.u64(pa + abi.DoorbellNonceOff)
	word.Store(testNonce)
	g.must(abi.CmdSetDoorbells, doorbellsAt(0, uint64(pa)))
	if g.tables.nonce.value != 0 {
		t.Error("a word that the driver has not announced is taken for a nonce")
	}
	if err := g.SetFeatures(abi.FeatureNonce); err != nil {
		t.Fatal(err)
	}
	held := g.held.Load()
	word.Store(0)
	g.refused(abi.StatusInvalid, abi.CmdSetDoorbells, doorbellsAt(0, uint64(pa)))
	g.must(abi.CmdSetDoorbells, doorbellsAt(1, uint64(g.alloc(abi.DoorbellSize)))) // only engine 0 has one
	if n := g.held.Load(); n != held {
		t.Errorf("%d holds after a refusal, %d before", n, held)
	}
	word.Store(testNonce)
	g.must(abi.CmdSetDoorbells, doorbellsAt(0, uint64(pa)))
	if g.tables.nonce != (driverNonce{testNonce, pa + abi.DoorbellNonceOff}) || g.Describe().Features != "0x1" {
		t.Errorf("nonce %+v, status %q", g.tables.nonce, g.Describe().Features)
	}
	g.Reset()
	if g.tables.nonce.value != 0 {
		t.Error("the nonce outlives a reset")
	}
}

// The nonce goes to the next process, in the context and in the journal, and is compared there. A context of an earlier
// version has none, and its driver is told from a pause as before.
func TestNonceKept(t *testing.T) {
	p := newPausable(t)
	g := p.g
	g.StopQueue(abi.CommandQueue)
	context := saved(t, g)
	var before deviceContext
	c := record.Reader(context)
	before.record(c, g.Device)
	if c.Err() != nil || before.bells[0].nonce != testNonce {
		t.Fatalf("%v; %+v", c.Err(), before.bells)
	}
	for i := range before.qps {
		c := record.Writer().Of(3)
		g.qpFor(before.qps[i].n).t.Context(c, 0, nil)
		before.qps[i].transport = c.Bytes()
	}
	w3 := record.Writer().As(3)
	before.record(w3, g.Device)
	word := g.u64(g.tables.nonce.at)
	type way struct {
		name   string
		resume func(*guest) error
		has    bool
	}
	ways := []way{
		{"context", func(x *guest) error { return x.Restore(context) }, true},
		{"earlier context", func(x *guest) error { return x.Restore(w3.Bytes()) }, false},
	}
	if Journaled {
		ways = append(ways, way{"journal", func(x *guest) error { return x.Revive(g.Device.journal.file.FD()) }, true})
	}
	for _, y := range ways {
		for _, value := range []uint64{testNonce, 0} {
			word.Store(value)
			x := p.twin(t, g)
			if err := y.resume(x); err != nil {
				t.Fatalf("%s: %v", y.name, err)
			}
			if kept := value == testNonce || !y.has; kept != (x.tables.qps > 0) || kept != x.Describe().Paused {
				t.Errorf("%s, with %#x in memory: %d QPs", y.name, value, x.tables.qps)
			}
			if y.name == "context" && value == testNonce && !slices.Equal(saved(t, x), context) {
				t.Errorf("%s: the next process has another context", y.name)
			}
			x.dropTwin()
		}
	}
	word.Store(testNonce)
}
