package roce

import (
	"math/rand"
	"testing"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// benchNode is a node without checks, copies or maps: benchmarks measure the transport and the codec.
type benchNode struct {
	q, near      *QP // near: reached directly
	pool         *frame.Pool
	w            WQE
	posted, done uint32
	recvs        int
	mem          []byte
	sg           SGE
	out          []*frame.Buf
	run          bool
	faults       int // every faults-th access misses; 0: none
	accesses     int
	timer        int64
	served       [2]bool // faults waiting for Resume
	hand         *frame.Buf
	lose         int // one of this many arriving frames is lost; 0: none
	rng          *rand.Rand
}

// miss injects a page fault now and then.
func (n *benchNode) miss(va translate.VA) (m translate.Miss) {
	if n.faults == 0 {
		return m
	}
	if n.accesses++; n.accesses%n.faults == 0 {
		m = translate.Miss{Kind: translate.HostFault, Key: 1, Where: translate.Where{VA: va}, Len: 8}
	}
	return m
}

func (n *benchNode) FetchSend(seq uint32, w *WQE) Fetch {
	if seq >= n.posted {
		return FetchEmpty
	}
	sg, in := append(w.SGEs, n.w.SGEs...), append(w.InlineData, n.w.InlineData...)
	*w = n.w
	w.SGEs, w.InlineData, w.Seq = sg, in, seq
	return FetchReady
}
func (n *benchNode) CompleteSend(_ *WQE, c *Completion) {
	if c.Status != 0 {
		panic(c.Status)
	}
	n.done++
}
func (n *benchNode) FetchRecv(w *RecvWQE) Fetch {
	w.SGEs = append(w.SGEs, n.sg)
	w.Length = uint64(n.sg.Length)
	return FetchReady
}
func (n *benchNode) CompleteRecv(*RecvWQE, *Completion) { n.recvs++ }
func (n *benchNode) Gather(dst []byte, w *WQE, off uint64) translate.Miss {
	if m := n.miss(0); !m.OK() {
		return m
	}
	copy(dst, n.mem[off:])
	return translate.Miss{}
}
func (n *benchNode) Scatter(_ []SGE, off uint64, src []byte) translate.Miss {
	if m := n.miss(0); !m.OK() {
		return m
	}
	copy(n.mem[off:], src)
	return translate.Miss{}
}
func (n *benchNode) CheckRemote(translate.Key, translate.VA, uint64, translate.Access) translate.Miss {
	return translate.Miss{}
}
func (n *benchNode) FlushRemote(translate.Key, translate.VA, uint64, bool, translate.Access) translate.Miss {
	return translate.Miss{}
}
func (n *benchNode) ReadRemote(dst []byte, _ translate.Key, va translate.VA) translate.Miss {
	if m := n.miss(va); !m.OK() {
		return m
	}
	copy(dst, n.mem[va:])
	return translate.Miss{}
}
func (n *benchNode) WriteRemote(_ translate.Key, va translate.VA, src []byte) translate.Miss {
	if m := n.miss(va); !m.OK() {
		return m
	}
	copy(n.mem[va:], src)
	return translate.Miss{}
}
func (n *benchNode) AtomicRemote(_ translate.Key, _ translate.VA, _ AtomicOp, _, _ uint64) (uint64, translate.Miss) {
	return 0, n.miss(0)
}
func (n *benchNode) Peer() (*QP, uint64) { return n.near, 64 << 10 }

func (n *benchNode) Stored(uint64) {}

func (n *benchNode) Journaled() bool { return false }
func (n *benchNode) GatherSpan(_ *WQE, off, k uint64) ([]byte, translate.Miss) {
	return n.mem[off:][:k], n.miss(0)
}
func (n *benchNode) ScatterSpan(_ []SGE, off, k uint64) ([]byte, translate.Miss) {
	return n.mem[off:][:k], n.miss(0)
}
func (n *benchNode) RemoteSpan(_ translate.Key, va translate.VA, k uint64,
	_ translate.Access) ([]byte, translate.Miss) {
	return n.mem[va:][:k], n.miss(va)
}
func (n *benchNode) InvalidateRemote(translate.Key) translate.Outcome { return translate.Done }
func (n *benchNode) Manage(*WQE) (translate.Outcome, translate.Miss) {
	return translate.Done, translate.Miss{}
}
func (n *benchNode) GetBuf() *frame.Buf                                 { return n.pool.Get() }
func (n *benchNode) Transmit(b *frame.Buf)                              { n.out = append(n.out, b) }
func (n *benchNode) ArmTimer(at int64)                                  { n.timer = at }
func (n *benchNode) Affordable(at int64) int64                          { return at }
func (n *benchNode) Used()                                              {}
func (n *benchNode) Fault(s Side, _ translate.Miss, _ translate.Access) { n.served[s] = true }
func (n *benchNode) Keep() bool                                         { return false }
func (n *benchNode) Hold(bool) *frame.Buf {
	n.hand.Ref()
	return n.hand
}
func (n *benchNode) PeerPatience() wire.Patience { return wire.PatienceUnknown }
func (n *benchNode) Release(b *frame.Buf)        { b.Free() }
func (n *benchNode) InHand(b *frame.Buf)         { n.hand = b }
func (n *benchNode) FaultDelay() int64           { return 200e3 }
func (n *benchNode) Schedule()                   { n.run = true }
func (n *benchNode) Event(EventKind)             {}

func benchPair(b testing.TB, typ Type) (x, y *benchNode) {
	pool, err := frame.NewPool(frame.Config{Count: 1024, Capacity: 8192})
	if err != nil {
		b.Fatal(err)
	}
	o := opts()
	o.typ, o.mtu, o.rd, o.destRd = typ, 5, 16, 16
	mk := func(qpn, peer uint32, av AddressVector, rq, sq uint32) *benchNode {
		n := &benchNode{pool: pool, mem: make([]byte, 1<<20), sg: sge(1, 0, 1<<20), out: make([]*frame.Buf, 0, 1024)}
		n.q = NewQP(Config{QPN: qpn, Type: typ, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInline: 64, MaxOutstanding: 64,
			ECN: true, SelectiveRepeat: true}, n)
		set := func(a Attr, m Mask) {
			if err := n.q.Modify(0, &a, m); err != nil {
				b.Fatal(err)
			}
		}
		rtr, rts := maskRTRRC, maskRTSRC
		if typ == UC {
			rtr, rts = maskRTRUC, maskRTSUC
		}
		set(Attr{State: Init, Port: 1, Access: o.access}, maskInitRC)
		set(Attr{State: RTR, AV: av, PathMTU: o.mtu, DestQPN: peer, RQPSN: rq, MaxDestRdAtomic: o.destRd,
			MinRNRTimer: 12}, rtr)
		set(Attr{State: RTS, SQPSN: sq, Timeout: 14, RetryCnt: 7, RNRRetry: 7, MaxRdAtomic: o.rd}, rts)
		return n
	}
	return mk(0x11, 0x22, o.avA, 1, 2), mk(0x22, 0x11, o.avB, 2, 1)
}

// spin moves frames and runs the QPs until x has completed all posted requests.
func spin(x, y *benchNode, p *wire.RoCE) {
	now := int64(1)
	deliver := func(from, to *benchNode) {
		for _, b := range from.out {
			if err := wire.ParseRoCE(b.Bytes(), header.Locate(b.Bytes()), p); err != nil || !wire.CheckICRC(b.Bytes(), p) {
				panic("bad frame")
			}
			if to.hand = b; to.lose == 0 || to.rng.Intn(to.lose) != 0 {
				to.q.Receive(now, p)
			}
			b.Free()
		}
		from.out = from.out[:0]
	}
	x.run = true
	for x.done != x.posted {
		now += 1000
		if x.run {
			x.run = false
			x.run = x.q.Run(now, 128) || x.run
		}
		deliver(x, y)
		if y.run {
			y.run = false
			y.run = y.q.Run(now, 128) || y.run
		}
		deliver(y, x)
		for _, n := range [...]*benchNode{x, y} {
			if n.timer != 0 && now >= n.timer {
				n.timer = 0
				n.q.Timer(now)
			}
			for s, ok := range n.served {
				if ok {
					n.served[s] = false
					n.q.Resume(now, Side(s), true)
				}
			}
		}
	}
}

func benchmarkOps(b *testing.B, typ Type, w WQE) {
	x, y := benchPair(b, typ)
	for _, s := range w.SGEs {
		w.Length += uint64(s.Length)
	}
	if w.Inline {
		w.Length = uint64(len(w.InlineData))
	}
	x.w = w
	var p wire.RoCE
	x.posted = 128
	spin(x, y, &p)
	b.SetBytes(int64(w.Length))
	b.ReportAllocs()
	b.ResetTimer()
	for left := b.N; left > 0; {
		k := min(left, 64)
		left -= k
		x.posted += uint32(k)
		spin(x, y, &p)
	}
}

func BenchmarkRCWrite8(b *testing.B) {
	benchmarkOps(b, RC, WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
}

func BenchmarkRCWriteInline8(b *testing.B) {
	benchmarkOps(b, RC, WQE{Opcode: WRWrite, RKey: 2, Inline: true, InlineData: make([]byte, 8)})
}

func BenchmarkRCSend64(b *testing.B) {
	benchmarkOps(b, RC, WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 64)}})
}

func BenchmarkRCRead8(b *testing.B) {
	benchmarkOps(b, RC, WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
}

func BenchmarkRCWrite64K(b *testing.B) {
	benchmarkOps(b, RC, WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 65536)}})
}

func BenchmarkRCRead64K(b *testing.B) {
	benchmarkOps(b, RC, WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 65536)}})
}

func BenchmarkUCWrite8(b *testing.B) {
	benchmarkOps(b, UC, WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
}

// No operation allocates once a connection is warm, with or without faults.
func TestNoAllocations(t *testing.T) {
	for _, faults := range []int{0, 7} {
		for _, lose := range []int{0, 10} {
			noAllocations(t, faults, lose)
		}
	}
}

func noAllocations(t *testing.T, faults, lose int) {
	for _, w := range []WQE{
		{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 5000)}, Length: 5000},
		{Opcode: WRSendImm, SGEs: []SGE{sge(1, 0, 8)}, Length: 8},
		{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 300000)}, Length: 300000},
		{Opcode: WRFetchAdd, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}, Length: 8},
	} {
		x, y := benchPair(t, RC)
		var p wire.RoCE
		x.w = w
		x.faults, y.faults = faults, faults
		x.lose, y.lose, x.rng, y.rng = lose, lose, rand.New(rand.NewSource(1)), rand.New(rand.NewSource(2))
		x.posted = 100
		spin(x, y, &p)
		if n := testing.AllocsPerRun(10, func() { x.posted += 10; spin(x, y, &p) }); n != 0 {
			t.Errorf("opcode %d: %v allocations per 10 operations", w.Opcode, n)
		}
		if s := y.q.Stats(); faults > 0 && s.Resumed+x.q.Stats().Resumed == 0 {
			t.Errorf("opcode %d: no fault occurred", w.Opcode)
		}
		if s := y.q.Stats(); lose > 0 && faults == 0 && s.Kept == 0 {
			t.Errorf("opcode %d: nothing was queued for reordering", w.Opcode)
		}
	}
}
