package roce

import (
	"errors"
	"fmt"
	"math"
	"math/rand"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/record"
	"github.com/vnicd/vnicd/device/rdma/roce/recovery"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

func anywhere(*AddressVector) bool { return true }

// newestRecord makes records with all fields of all versions.
const newestRecord = math.MaxUint32

// context returns the context of a frozen QP.
func (n *node) context() []byte {
	n.f.t.Helper()
	w := record.Writer().Of(newestRecord)
	n.q.Context(w, n.f.now, nil)
	if w.Err() != nil {
		n.f.t.Fatal(w.Err())
	}
	return w.Bytes()
}

// adopt replaces the QP by a new one with that context.
func (n *node) adopt(context []byte) error {
	return n.adoptFrom(record.Reader(context).Of(newestRecord))
}

func (n *node) adoptFrom(r *record.Codec) error {
	q := NewQP(n.q.cfg, n)
	q.Context(r, n.f.now, anywhere)
	if r.End() == nil {
		n.q.Close()
		n.q = q
	}
	return r.End()
}

// move lets another process continue n's QP after d ns.
func (n *node) move(d int64) {
	n.f.t.Helper()
	retry := n.q.attr.RetryCnt // chaos exceeds what attributes permit
	n.q.attr.RetryCnt = min(retry, 7)
	n.f.pause(n, d)
	n.q.attr.RetryCnt = min(retry, 7)
	before := n.context()
	if err := n.adopt(before); err != nil {
		n.f.t.Fatalf("%s: %v", n.name, err)
	}
	if after := n.context(); string(after) != string(before) {
		n.f.t.Fatalf("%s: the context of the new QP differs", n.name)
	}
	n.q.attr.RetryCnt, n.q.recovery.retryLeft = retry, retry
	n.busy, n.run, n.timer = [2]bool{}, false, 0
}

// Mixed operations over a bad network while the QPs of both ends move to other processes every now and then: each
// completes once, and all bytes are right (CO-1).
func TestMoveChaos(t *testing.T) {
	for i, im := range impairments {
		for k, m := range []localMode{framesOnly, localOn, localMixed} {
			for _, faults := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%v/faults=%v", im.name, m, faults), func(t *testing.T) {
					chaos(t, im, m, 1000+100*int64(k)+int64(i), faults, 0.02)
				})
			}
		}
	}
}

// A QP in each state moves and is then as it was.
func TestMoveStates(t *testing.T) {
	for _, typ := range []Type{GSI, RC, UC, UD} {
		f := newFabric(t, 1)
		n := f.node("n", Config{QPN: 0x11, Type: typ, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInline: 64})
		check := func(want State) {
			t.Helper()
			var was, is Attr
			n.q.Query(&was)
			n.move(1e3)
			if n.q.Query(&is); is != was || is.State != want {
				t.Errorf("type %d: %+v, was %+v, want state %v", typ, is, was, want)
			}
			f.settle(1e6)
		}
		check(Reset)
		o := opts()
		if typ == RC || typ == UC {
			o.typ, o.stay = typ, RTR
			n.modify(Attr{State: Init, Port: 1, Access: o.access}, maskInitRC)
			check(Init)
			n.connect(&o, 0x22, o.avA, 1, 2)
			check(RTR)
			rts := maskRTSRC
			if typ == UC {
				rts = maskRTSUC
			}
			n.modify(Attr{State: RTS, SQPSN: 5, Timeout: 14, RetryCnt: 3, RNRRetry: 2, MaxRdAtomic: 4}, rts)
		} else {
			n.modify(Attr{State: Init, Port: 1, QKey: 7}, maskInitUD)
			check(Init)
			n.modify(Attr{State: RTR}, MaskState)
			check(RTR)
			n.modify(Attr{State: RTS, SQPSN: 5}, MaskState|MaskSQPSN)
		}
		check(RTS)
		n.modify(Attr{State: Err}, MaskState)
		check(Err)
	}
}

// A QP in the error state flushes the rest of its work after a move.
func TestMoveFlushes(t *testing.T) {
	f := newFabric(t, 1)
	a, b := f.pair(opts())
	a.reg(1, 0, 1<<16, allAccess)
	b.reg(2, 0, 1<<16, allAccess)
	for range 10 {
		a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 4096)}})
	}
	a.q.Run(f.now, 3)
	a.modify(Attr{State: Err}, MaskState)
	a.move(1e3)
	f.until("flush", 1e9, func() bool { return len(a.sends) == 10 })
	for i, c := range a.sends {
		if c.c.Status != StatusFlush {
			t.Errorf("request %d: %v", i, c.c.Status)
		}
	}
}

// A request that fails when a part of it was sent, behind one that is not acknowledged, moves with its PSNs. The next
// process comes to the same results.
func TestMoveFailedInPart(t *testing.T) {
	f := newFabric(t, 1)
	a, b := f.pair(opts())
	a.reg(1, 0, 1<<16, allAccess)
	b.reg(2, 0, 1<<16, allAccess)
	lost := true
	a.onTx = func(*wire.RoCE, []byte) bool { return lost }
	a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 64)}})
	a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 2048), sge(99, 0, 2048)}})
	a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 64)}})
	a.q.Run(f.now, 100)
	if s := a.q.req.slot(a.q.req.head + 1); !s.failed || s.end == s.first || a.q.req.sent == a.q.req.una {
		t.Fatalf("the second request: failed %v, PSNs %d", s.failed, s.end-s.first)
	}
	f.pause(a, 1e3)
	if err := a.adopt(a.context()); err != nil {
		t.Fatal(err)
	}
	a.busy, a.run, a.timer = [2]bool{}, false, 0
	lost = false
	f.until("three completions", 1e9, func() bool { return len(a.sends) == 3 })
	for i, want := range []Status{StatusSuccess, StatusLocProt, StatusFlush} {
		if got := a.sends[i].c.Status; got != want {
			t.Errorf("request %d: %v, want %v", i, got, want)
		}
	}
}

// A READ that is in flight while max_rd_atomic becomes 0, and a path MTU beyond that of the port.
func TestMoveChangedAttributes(t *testing.T) {
	f := newFabric(t, 1)
	a, b := f.pair(opts())
	a.reg(1, 0, 1<<16, allAccess)
	b.reg(2, 0, 1<<16, allAccess)
	a.onTx = func(*wire.RoCE, []byte) bool { return true }
	a.post(WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 64)}})
	a.q.Run(f.now, 100)
	a.onTx = nil
	a.q.attr.MaxRdAtomic = 0 // as MODIFY_QP does in SQD
	a.q.cfg.MTU = 256
	f.pause(a, 1e3)
	if err := a.adopt(a.context()); err != nil {
		t.Fatal(err)
	}
	a.busy, a.run, a.timer = [2]bool{}, false, 0
	f.until("the READ", 1e9, func() bool { return len(a.sends) == 1 && a.sends[0].c.Status == StatusSuccess })
}

// The wait that an RNR NAK asked for is lost, so the attempt that comes too early is not charged.
func TestMoveWhileNotReady(t *testing.T) {
	f := newFabric(t, 1)
	o := opts()
	o.rnr, o.minRNR = 1, 31 // 491 ms
	a, b := f.pair(o)
	a.reg(1, 0, 1<<16, allAccess)
	b.reg(2, 0, 1<<16, allAccess)
	a.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 64)}})
	f.until("an RNR NAK", 1e9, func() bool { return a.q.req.rnrUntil != 0 })
	a.move(1e6)
	f.until("another one", 1e9, func() bool { return a.q.req.rnrUntil != 0 })
	b.postRecv(sge(2, 0, 64))
	f.until("the SEND", 2e9, func() bool { return len(a.sends) == 1 })
	if st := a.sends[0].c.Status; st != StatusSuccess {
		t.Error(st)
	}
}

// More packets in flight than a window has are refused: each acknowledgement could look at all of them.
func TestMoveHugeFlight(t *testing.T) {
	f := newFabric(t, 1)
	a, b := f.pair(opts())
	a.reg(1, 0, 1<<16, allAccess)
	b.reg(2, 0, 1<<16, allAccess)
	for range 8 {
		a.post(WQE{Opcode: WRWrite, RKey: 2, Length: maxMessage, SGEs: []SGE{{Key: 1, Length: maxMessage}}})
	}
	a.onTx = func(*wire.RoCE, []byte) bool { return true }
	a.q.Run(f.now, 1)
	f.pause(a, 1e3)
	if err := a.adopt(a.context()); err != nil {
		t.Fatal(err)
	}
	r := &a.q.req
	r.sent = r.una + uint64(a.q.cfg.Window+readChunk)
	if err := a.adopt(a.context()); err != nil {
		t.Fatal(err)
	}
	a.q.req.sent++
	if err := a.adopt(a.context()); !errors.Is(err, record.ErrInvalid) {
		t.Error("accepted:", err)
	}
}

// A context that was damaged anywhere is refused, or describes a QP that does no harm: it neither panics nor runs for
// ever, whatever its peer sends (CO-7).
func FuzzContext(f *testing.F) {
	fab := newFabric(f, 1)
	for i, o := range []pairOpt{opts(), opts()} {
		a, b := fab.pair(o)
		a.reg(1, 0, 1<<16, allAccess)
		b.reg(2, 0, 1<<16, allAccess)
		fab.mixed(a, b, 3)
		for range 20 * (i + 1) {
			fab.step()
		}
		for _, n := range []*node{a, b} {
			n.q.Freeze(fab.now)
			f.Add(n.context())
		}
		fab.nodes, fab.queue = nil, nil
	}
	f.Fuzz(func(t *testing.T, context []byte) {
		fab := newFabric(t, 1)
		a, b := fab.pair(opts())
		a.reg(1, 0, 1<<16, allAccess)
		b.reg(2, 0, 1<<16, allAccess)
		a.hostile = true
		fab.pause(a, 1e3)
		if err := a.adopt(context); err != nil {
			if !errors.Is(err, record.ErrInvalid) {
				t.Error(err)
			}
			return
		}
		fab.mixed(a, b, 1)
		fab.mixed(b, a, 1)
		for range 2000 {
			if !fab.step() {
				break
			}
		}
	})
}

// Contexts with single bytes changed.
func TestDamagedContext(t *testing.T) {
	rng := rand.New(rand.NewSource(1))
	f := newFabric(t, 1)
	a, b := f.pair(opts())
	a.reg(1, 0, 1<<16, allAccess)
	b.reg(2, 0, 1<<16, allAccess)
	f.mixed(a, b, 3)
	for range 40 {
		f.step()
	}
	a.q.Freeze(f.now)
	good := a.context()
	refused := 0
	for i := range good {
		bad := append([]byte(nil), good...)
		bad[i] ^= byte(1 + rng.Intn(255))
		x := newFabric(t, 1)
		n, peer := x.pair(opts())
		n.reg(1, 0, 1<<16, allAccess)
		peer.reg(2, 0, 1<<16, allAccess)
		n.hostile = true
		x.pause(n, 1e3)
		if n.adopt(bad) != nil {
			refused++
			continue
		}
		x.mixed(peer, n, 1)
		for range 2000 {
			if !x.step() {
				break
			}
		}
	}
	if refused == 0 || refused == len(good) {
		t.Errorf("%d of %d contexts with a changed byte were refused", refused, len(good))
	}
}

// A process is killed after it has sent the parts of a READ, which its journal does not have. The next one may have
// more room for its requests: longer ones than the original, and those that begin before an earlier repetition, are
// dropped by Linux rxe for good.
func TestReadAfterKill(t *testing.T) {
	f := newFabric(t, 1)
	o := opts()
	o.rd, o.destRd = 4, 4
	a, b := f.pair(o)
	const packets = 24
	size := packets * int(a.q.mtu)
	to := a.reg(1, 0, size, allAccess)
	from := b.reg(2, 0, size, allAccess)
	for i := range from.buf {
		from.buf[i] = byte(i * 7)
	}
	const version = 4
	w := record.Writer().Of(version)
	a.q.Journal(w, f.now)
	a.post(WQE{Opcode: WRRead, RKey: 2, Length: uint64(size), SGEs: []SGE{sge(1, 0, size)}})
	a.q.recovery.cwnd.Size = 4 * recovery.WindowUnit
	f.until("parts of the READ", 1e9, func() bool { return a.q.req.una > 2 })

	f.pause(a, 1e6)
	if err := a.adoptFrom(record.Reader(w.Bytes()).Of(version)); err != nil {
		t.Fatal(err)
	}
	a.q.Revived(0)
	clear(a.seen)
	requests := 0
	a.onTx = func(p *wire.RoCE, _ []byte) bool {
		if p.Info.Op == wire.ReadRequest {
			requests++
			if n := p.RETH().Length; n > uint32(a.q.mtu) {
				t.Errorf("PSN %d: a request of %d bytes", p.BTH.PSN, n)
			}
			if una := extend(a.q.req.una, p.BTH.PSN); una != a.q.req.una {
				t.Errorf("PSN %d is requested, %d is not answered", una, a.q.req.una)
			}
		}
		return requests%5 == 3
	}
	f.until("the READ", 60e9, func() bool { return len(a.sends) == 1 })
	a.wantSends(StatusSuccess)
	same(t, "memory", to.buf, from.buf)
	if requests < packets {
		t.Errorf("%d requests, want at least %d", requests, packets)
	}
}

// A peer whose process was killed, and that answers nothing for a while, says when it is back: what was sent to it
// meanwhile comes again at once, not after the time that the probes have doubled.
func TestPeerReturns(t *testing.T) {
	for _, x := range []struct {
		name string
		op   WROpcode
	}{{"WRITE", WRWrite}, {"SEND", WRSend}, {"READ", WRRead}, {"atomic", WRFetchAdd}} {
		t.Run(x.name, func(t *testing.T) {
			for seed := range int64(20) {
				f := newFabric(t, seed)
				o := opts()
				o.timeout = 19 // 2.1 s
				a, b := f.pair(o)
				a.reg(1, 0, 1<<16, allAccess)
				b.reg(2, 0, 1<<16, allAccess)
				n := 0
				post := func(op WROpcode) {
					b.postRecv(sge(2, 0, 64))
					a.post(WQE{Opcode: op, RKey: 2, RemoteVA: 1 << 12, SGEs: []SGE{sge(1, 0, 8)}})
					n++
				}
				done := func() bool { return len(a.sends) == n }
				for _, op := range []WROpcode{WRWrite, WRSend, WRRead, WRFetchAdd} { // response times are known
					post(op)
					f.until("a request", 1e9, done)
				}
				f.loss = func(*wire.RoCE) bool { return true }
				post(x.op)
				back := int64(0)
				f.after(600e6+f.rng.Int63n(900e6), func() {
					f.loss, back = nil, f.now
					b.move(1e6)
				})
				f.until("the request", 10e9, done)
				if d := f.now - back; back == 0 || d > 20e6 {
					t.Errorf("seed %d: it took %d ms", seed, d/1e6)
				}
				if a.q.recovery.returned {
					t.Error("the next silence would have no end")
				}
			}
		})
	}
}

// TestReturnsOnce: a peer that acknowledges nothing new again and again makes the requester probe anew once, not more.
func TestReturnsOnce(t *testing.T) {
	f := newFabric(t, 1)
	o := opts()
	o.timeout = 19
	a, b := f.pair(o)
	a.reg(1, 0, 1<<16, allAccess)
	b.reg(2, 0, 1<<16, allAccess)
	a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
	f.until("a request", 1e9, func() bool { return len(a.sends) == 1 })
	sent := 0
	f.loss = func(p *wire.RoCE) bool {
		if p.Info.Op == wire.Write {
			sent++
		}
		return true
	}
	a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
	for f.now < 1e9 && f.step() {
	}
	sent = 0
	for ms := range int64(1000) {
		f.after(ms*1e6, func() {
			a.inject(craft{op: wire.OpRCAck, psn: o.psnA, syn: wire.NoCredits})
			a.runAll()
		})
	}
	for f.now < 2e9 && f.step() {
	}
	if sent < 4 || sent > 12 { // once, and the probes after that
		t.Errorf("1000 acknowledgements of nothing new within 1 s: %d packets were sent again", sent)
	}
}
