package roce

import (
	"fmt"
	"testing"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// link is a slow link with one queue, which marks packets that find it longer than mark and drops those that find it
// full.
type link struct {
	rate         int64 // bytes per second
	mark, full   int64 // bytes; mark 0: never
	free         int64 // when all queued bytes will have left
	sent         int64 // bytes
	marks, drops int
	longest      int64 // queue, bytes
	sum, n       int64 // queue lengths found by packets
}

// pass queues a frame and returns the time at which it has left the link; negative: dropped.
func (l *link) pass(now int64, p *wire.RoCE, frame []byte) int64 {
	l.free = max(l.free, now)
	queue := (l.free - now) * l.rate / 1e9
	if queue+int64(len(frame)) > l.full {
		l.drops++
		return -1
	}
	l.longest = max(l.longest, queue)
	l.sum, l.n = l.sum+queue, l.n+1
	if ecn := p.TOS & header.ECNMask; l.mark != 0 && queue > l.mark && (ecn == header.ECT0 || ecn == header.ECT1) {
		l.marks++
		setCE(frame)
	}
	l.sent += int64(len(frame))
	l.free += int64(len(frame)) * 1e9 / l.rate
	return l.free
}

// setCE marks an IPv4 frame without VLAN.
func setCE(frame []byte) {
	ip := frame[header.EthernetLen:][:header.IPv4Len]
	ip[1] |= header.CE
	ip[10], ip[11] = 0, 0
	sum := header.Checksum(ip, 0)
	ip[10], ip[11] = byte(sum>>8), byte(sum)
}

// watch resets the counters.
func (l *link) watch() { *l = link{rate: l.rate, mark: l.mark, full: l.full, free: l.free} }

// flow is a QP that always has data to send, and its peer.
type flow struct {
	a, b *node
	op   WROpcode
	base uint64 // una when counting began
}

const flowMessage = 64 << 10

// flows joins n pairs of QPs. Data goes from a to b for WRITEs and to a for READs, over the link.
func (f *fabric) flows(n int, op WROpcode, cfg Config) (out []*flow) {
	cfg.Type, cfg.MaxSendSGE, cfg.MaxRecvSGE = RC, 1, 1
	f.held = newHeld(f.t, n*responseSpan)
	o := opts()
	o.rd, o.destRd, o.timeout = 16, 16, 10 // 4 ms
	for i := range n {
		fl := &flow{op: op}
		cfg.QPN = uint32(0x100 + i)
		fl.a = f.node(fmt.Sprintf("a%d", i), cfg)
		cfg.QPN = uint32(0x10100 + i)
		fl.b = f.node(fmt.Sprintf("b%d", i), cfg)
		fl.a.connect(&o, fl.b.q.QPN(), o.avA, o.psnB, o.psnA)
		fl.b.connect(&o, fl.a.q.QPN(), o.avB, o.psnA, o.psnB)
		fl.a.reg(1, 0, flowMessage, allAccess)
		fl.b.reg(1, 0, flowMessage, allAccess)
		fl.a.slow, fl.b.slow = op != WRRead, op == WRRead
		out = append(out, fl)
	}
	return out
}

// feed keeps requests posted.
func (fl *flow) feed() {
	for len(fl.a.sq)-len(fl.a.sends) < 8 {
		fl.a.post(WQE{Opcode: fl.op, SGEs: []SGE{sge(1, 0, flowMessage)}, RKey: 1})
	}
}

// run lets the flows send for d ns and fails if one stops.
func (f *fabric) run(flows []*flow, d int64) {
	f.t.Helper()
	for _, fl := range flows {
		fl.base = fl.a.q.req.una
	}
	f.steps = 0
	for end := f.now + d; f.now < end; {
		for _, fl := range flows {
			fl.feed()
			fl.a.wantState(RTS)
		}
		for range 100 {
			if !f.step() {
				f.t.Fatal("nothing is in flight")
			}
		}
	}
}

// linkPacket is the size of a full packet of a flow on the link.
const linkPacket = 1024 + header.EthernetLen + header.IPv4Len + header.UDPLen + wire.BTHLen + wire.ICRCLen

// slow returns a link with the given bits per second.
func slow(rate, mark, full int64) *link {
	return &link{rate: rate / 8, mark: mark * linkPacket, full: full * linkPacket}
}

// outcomes are the results of a run of d ns.
type outcomes struct {
	busy, useful, jain float64 // shares of the link's rate; Jain's index of fairness: 1 if all flows are equal
	queue              int64   // average, packets
	cnps, repeats      uint64
	retries            uint8 // lowest number of retries left
}

func (f *fabric) outcomes(flows []*flow, d int64) (o outcomes) {
	f.t.Helper()
	sum, squares := 0.0, 0.0
	o.retries = 7
	for _, fl := range flows {
		n := float64(fl.a.q.req.una - fl.base)
		sum, squares = sum+n, squares+n*n
		o.cnps += fl.a.q.stats.TxCNP + fl.b.q.stats.TxCNP
		o.repeats += fl.a.q.stats.Retransmits
		o.retries = min(o.retries, fl.a.q.recovery.retryLeft)
	}
	all := float64(f.link.rate) * float64(d) / 1e9
	o.busy, o.useful, o.jain = float64(f.link.sent)/all, sum*linkPacket/all, sum*sum/(float64(len(flows))*squares)
	o.queue = f.link.sum / max(f.link.n, 1) / linkPacket
	f.t.Logf("busy %.3f, useful %.3f, Jain %.3f; queue %d on the average, %d at most; %d marks, %d drops; %d CNPs, %d retransmits since the beginning",
		o.busy, o.useful, o.jain, o.queue, f.link.longest/linkPacket, f.link.marks, f.link.drops, o.cnps, o.repeats)
	return o
}

// TestSharedLink: a marking queue keeps the flows of one link from overfilling it: the queue stays short, the link
// busy, nothing is lost once the flows have converged, and they share the link equally.
func TestSharedLink(t *testing.T) {
	for _, op := range []WROpcode{WRWrite, WRRead} {
		for _, tc := range []struct {
			name        string
			flows       int
			rate, delay int64
			mark, full  int64 // packets
			warm, d     int64
			queue       int64 // maximum of the average
			busy        float64
		}{
			{name: "one", flows: 1, rate: 10e9, delay: 20e3, mark: 40, full: 200, warm: 30e6, d: 30e6, queue: 45,
				busy: 0.9},
			{name: "two", flows: 2, rate: 1e9, delay: 20e3, mark: 20, full: 100, warm: 150e6, d: 200e6, queue: 25,
				busy: 0.97},
			{name: "eight", flows: 8, rate: 1e9, delay: 20e3, mark: 20, full: 100, warm: 150e6, d: 200e6, queue: 30,
				busy: 0.97},
			{name: "eight, far", flows: 8, rate: 10e9, delay: 200e3, mark: 100, full: 600, warm: 50e6, d: 50e6,
				queue: 110, busy: 0.97},
			{name: "crowd", flows: 40, rate: 1e9, delay: 20e3, mark: 20, full: 600, warm: 150e6, d: 200e6, queue: 45,
				busy: 0.97},
		} {
			t.Run(fmt.Sprintf("%v/%s", map[WROpcode]string{WRWrite: "write", WRRead: "read"}[op], tc.name),
				func(t *testing.T) {
					f := newFabric(t, 1)
					f.delay, f.link = tc.delay, slow(tc.rate, tc.mark, tc.full)
					flows := f.flows(tc.flows, op, Config{ECN: true, SelectiveRepeat: true})
					f.run(flows, tc.warm)
					f.link.watch()
					f.run(flows, tc.d)
					if o := f.outcomes(flows, tc.d); f.link.drops != 0 || o.busy < tc.busy || o.useful < tc.busy ||
						o.jain < 0.95 || o.queue > tc.queue {
						t.Error("results are out of bounds")
					}
				})
		}
	}
}

// TestSharedLinkLoss: the queue only drops. All flows survive, no retry count gets low, and most packets sent are
// useful.
func TestSharedLinkLoss(t *testing.T) {
	for _, gbn := range []bool{true, false} {
		for n, useful := range map[int]float64{1: 0.8, 8: 0.8, 40: 0.7} {
			for seed := int64(1); seed <= 4; seed++ {
				t.Run(fmt.Sprint(n, gbn, seed), func(t *testing.T) {
					f := newFabric(t, seed)
					f.delay, f.link = 20e3, slow(1e9, 0, 100)
					// Shorter than one packet, so that nothing is reordered. With constant times some flows stay in
					// step with the queue and always find it full.
					f.jitter = 8e3
					flows := f.flows(n, WRWrite, Config{ECN: true, SelectiveRepeat: !gbn})
					f.run(flows, 150e6)
					f.link.watch()
					f.run(flows, 300e6)
					if o := f.outcomes(flows, 300e6); o.useful < useful || o.jain < 0.9 || o.retries < 4 {
						t.Error("results are out of bounds")
					}
				})
			}
		}
	}
}

// TestCongestionEnds: seven of eight flows stop; the last one soon uses the whole link.
func TestCongestionEnds(t *testing.T) {
	f := newFabric(t, 1)
	f.delay, f.link = 20e3, slow(1e9, 20, 100)
	flows := f.flows(8, WRWrite, Config{ECN: true, SelectiveRepeat: true})
	f.run(flows, 150e6)
	f.run(flows[:1], 60e6) // the others finish posted requests
	f.link.watch()
	f.run(flows[:1], 20e6)
	if o := f.outcomes(flows[:1], 20e6); o.useful < 0.97 {
		t.Error("the link is not used")
	}
	// Without marks the window opens fully.
	f.link = nil
	f.run(flows[:1], 20e6)
	if q := flows[0].a.q; q.recovery.cwnd.Packets() != uint64(q.cfg.Window) {
		t.Errorf("a window of %d", q.recovery.cwnd.Packets())
	}
}

// TestCNP checks a CNP's contents (A17.9.3), which packets cause one, and how often.
func TestCNP(t *testing.T) {
	for _, tc := range []struct {
		name string
		typ  Type
		c    craft
		off  bool
		v1   bool
		want bool
	}{
		{name: "send", typ: RC, c: craft{op: wire.OpRCWriteOnly, data: make([]byte, 8), va: 0, key: 1, length: 8},
			want: true},
		{name: "uc", typ: UC, c: craft{op: wire.OpUCWriteOnly, data: make([]byte, 8), va: 0, key: 1, length: 8},
			want: true},
		{name: "out of sequence", typ: RC, c: craft{op: wire.OpRCWriteOnly, psn: 9, data: make([]byte, 8), va: 0,
			key: 1, length: 8}, want: true},
		{name: "no data", typ: RC, c: craft{op: wire.OpRCReadRequest, va: 0, key: 1, length: 8}},
		{name: "ack", typ: RC, c: craft{op: wire.OpRCAck, syn: wire.NoCredits}},
		{name: "cnp", typ: RC, c: craft{op: wire.OpCNP}},
		{name: "off", typ: RC, c: craft{op: wire.OpRCWriteOnly, data: make([]byte, 8), va: 0, key: 1, length: 8},
			off: true},
		{name: "RoCE v1", typ: RC, c: craft{op: wire.OpRCWriteOnly, data: make([]byte, 8), va: 0, key: 1, length: 8},
			v1: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFabric(t, 1)
			o := opts()
			o.typ, o.noECN = tc.typ, tc.off
			o.avA.RoCEv1, o.avB.RoCEv1 = tc.v1, tc.v1
			a, b := f.pair(o)
			b.reg(1, 0, 64, allAccess)
			cnps, others := 0, 0
			b.onTx = func(p *wire.RoCE, frame []byte) bool {
				if p.Info.Op != wire.CNP {
					others++
					return true
				}
				cnps++
				want := wire.BTH{Opcode: wire.OpCNP, PKey: 0xffff, BECN: true, DestQP: a.q.QPN()}
				if p.BTH != want || string(p.Ext) != string(make([]byte, wire.CNPLen)) || p.DstIP != ipA {
					t.Errorf("%+v", p)
				}
				return true
			}
			tc.c.psn += uint32(b.q.resp.epsn & psnMask)
			tc.c.tos = header.CE
			for range 50 { // 150 us
				b.inject(tc.c)
				b.runAll()
				f.now += 3e3
			}
			if want := map[bool]int{true: 3}[tc.want]; cnps != want {
				t.Errorf("%d CNPs, want %d", cnps, want)
			}
			if marked := b.q.stats.ECNMarked; (marked != 0) != !tc.v1 && tc.name != "cnp" ||
				b.q.stats.TxCNP != uint64(cnps) {
				t.Errorf("%d marks, %d CNPs counted", marked, b.q.stats.TxCNP)
			}
		})
	}
}

// TestECT: packets of RC over RoCE v2 are ECN-capable, and otherwise keep their traffic class.
func TestECT(t *testing.T) {
	for _, tc := range []struct {
		name  string
		typ   Type
		off   bool
		v1    bool
		class uint8
		want  uint8
	}{
		{"RC", RC, false, false, 26<<2 | header.ECT1, 26<<2 | header.ECT0},
		{"RC, off", RC, true, false, 26<<2 | header.ECT1, 26<<2 | header.ECT1},
		{"RC, RoCE v1", RC, false, true, 26 << 2, 26 << 2},
		{"UC", UC, false, false, 26 << 2, 26 << 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFabric(t, 1)
			o := opts()
			o.typ, o.noECN = tc.typ, tc.off
			o.avA.RoCEv1, o.avB.RoCEv1, o.avA.TrafficClass = tc.v1, tc.v1, tc.class
			a, b := f.pair(o)
			a.reg(1, 0, 4096, allAccess)
			b.reg(1, 0, 4096, allAccess)
			seen := 0
			a.onTx = func(p *wire.RoCE, _ []byte) bool {
				if seen++; p.TOS != tc.want {
					t.Errorf("traffic class %#x, want %#x", p.TOS, tc.want)
				}
				return false
			}
			a.post(WQE{Opcode: WRWrite, SGEs: []SGE{sge(1, 0, 4096)}, RKey: 1})
			f.settle(1e6)
			if a.wantSends(StatusSuccess); seen != 4 {
				t.Errorf("%d packets", seen)
			}
			var attr Attr
			if a.q.Query(&attr); attr.AV.TrafficClass != tc.class {
				t.Errorf("Query returns traffic class %#x", attr.AV.TrafficClass)
			}
		})
	}
}

// TestForgedCNP: a flood of CNPs with the peer's addresses slows a flow down but does not stop it, and it recovers.
// CNPs from other senders are ignored, and so are all if congestion control is off.
func TestForgedCNP(t *testing.T) {
	for _, tc := range []struct {
		name  string
		alien func(c *craft, av *AddressVector)
		off   bool
		floor bool
	}{
		{name: "peer", floor: true},
		{name: "address", alien: func(_ *craft, av *AddressVector) { av.DGID[15]++ }},
		{name: "mac", alien: func(_ *craft, av *AddressVector) { av.DMAC[5]++ }},
		{name: "p_key", alien: func(c *craft, _ *AddressVector) { c.pkey = 0x1234 }},
		{name: "off", off: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFabric(t, 1)
			f.link = slow(1e9, 0, 1000)
			flows := f.flows(1, WRWrite, Config{ECN: !tc.off, SelectiveRepeat: true})
			f.run(flows, 20e6)
			a := flows[0].a
			from := a.q.attr.AV
			c := craft{op: wire.OpCNP, av: &from}
			if tc.alien != nil {
				tc.alien(&c, &from)
			}
			floods := true
			var flood func()
			flood = func() {
				if floods {
					a.inject(c)
					f.after(1e3, flood)
				}
			}
			flood()
			f.run(flows, 20e6)
			n := a.q.req.una - flows[0].base
			if tc.floor {
				// A packet takes 2 x 5 us and 9 us on the link.
				if a.q.recovery.cwnd.Packets() != 1 || n < 950 || a.q.stats.RxCNP < 19000 {
					t.Errorf("a window of %d, %d packets, %d CNPs", a.q.recovery.cwnd.Packets(), n, a.q.stats.RxCNP)
				}
			} else if a.q.recovery.cwnd.Packets() != defaultWindow || a.q.stats.RxCNP != 0 ||
				a.q.stats.RxDropped < 19000 {
				t.Errorf("a window of %d, %d CNPs, %d dropped", a.q.recovery.cwnd.Packets(), a.q.stats.RxCNP,
					a.q.stats.RxDropped)
			}
			floods = false
			f.run(flows, 60e6)
			if a.q.recovery.cwnd.Packets() != defaultWindow {
				t.Errorf("a window of %d afterwards", a.q.recovery.cwnd.Packets())
			}
		})
	}
}
