package roce

import (
	"fmt"
	"math/rand"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/roce/recovery"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// marked is a one-byte WRITE of its PSN to the address of the same number, from a peer that supports selective repeat.
func marked(psn uint32, ack bool) craft {
	return craft{op: wire.OpRCWriteOnly, psn: psn, ack: ack, sel: true, key: 2, va: uint64(psn & 0xff), length: 1,
		data: []byte{byte(psn)}}
}

// wantSACK fails unless exactly one selective acknowledgement was sent: psn is expected, and those offsets have
// arrived.
func (n *node) wantSACK(sent *[]wire.RoCE, psn uint32, there ...uint64) {
	n.f.t.Helper()
	n.runAll()
	var want wire.Arrivals
	for _, i := range there {
		want.Set(i, 1)
	}
	if len(*sent) != 1 {
		n.f.t.Fatalf("%d packets sent, want a selective acknowledgement", len(*sent))
	}
	p := (*sent)[0]
	if p.BTH.Opcode != wire.OpRCSelectiveAck || p.BTH.PSN != psn&psnMask || p.AETH().Syndrome != wire.NAKSequence ||
		p.Arrivals() != want {
		n.f.t.Fatalf("%v psn %#x syndrome %#x, %x; want %#x, %x", p.BTH.Opcode, p.BTH.PSN, p.AETH().Syndrome,
			p.Arrivals(), psn, want)
	}
	*sent = nil
}

func (f *fabric) wantHeld(n int) {
	f.t.Helper()
	if got := f.held.InUse(); got != n {
		f.t.Fatalf("%d frames are held, want %d", got, n)
	}
}

// TestKeep: queued requests are reported, and executed in order and once.
func TestKeep(t *testing.T) {
	o := opts()
	o.psnA = 0xfffffe
	f, b, sent := lone(t, o)
	mem := b.reg(2, 0, 1<<16, allAccess)
	clear(mem.buf)
	b.inject(marked(0, false)) // 0xfffffe and 0xffffff are missing
	b.inject(marked(2, false))
	b.wantSACK(sent, 0xfffffe, 2, 4)
	if mem.buf[0] != 0 || mem.buf[2] != 0 {
		t.Error("placed out of order")
	}
	b.inject(marked(2, true)) // a copy
	b.wantSACK(sent, 0xfffffe, 2, 4)
	for range sackEvery - 1 {
		b.inject(marked(2, false))
	}
	b.wantResp(sent) // nothing new
	f.wantHeld(2)
	b.inject(marked(0xffffff, true))
	b.wantSACK(sent, 0xfffffe, 1, 2, 4)
	b.inject(marked(0xfffffe, true)) // 0xfffffe to 0
	b.wantSACK(sent, 1, 1)
	f.wantHeld(1)
	mem.buf[0] = 0xee
	b.inject(marked(0, true)) // a duplicate now; AckReq gets a full report
	b.wantSACK(sent, 1, 1)
	b.inject(marked(1, true))
	b.wantResp(sent, ackOf(2))
	f.wantHeld(0)
	if mem.buf[0] != 0xee || mem.buf[1] != 1 || mem.buf[2] != 2 || mem.buf[0xff] != 0xff {
		t.Errorf("% x", mem.buf[:3])
	}
	// A peer without the mark gets a plain NAK, and goes back.
	c := marked(5, true)
	c.sel = false
	b.inject(c)
	b.wantResp(sent, nakOf(3, wire.NAKSequence))
	b.inject(marked(6, true)) // from now on only 3 helps
	b.wantResp(sent)
	f.wantHeld(0)
	// The same if the peer changes in the middle.
	b.inject(marked(3, false))
	b.inject(marked(5, false))
	b.wantSACK(sent, 4, 1)
	b.inject(c)
	b.wantResp(sent, nakOf(4, wire.NAKSequence))
	f.wantHeld(0)
	if b.q.stats.Kept != 4 {
		t.Errorf("%d requests counted as queued", b.q.stats.Kept)
	}
}

// TestKeepBounds: how many requests are queued, and for how long.
func TestKeepBounds(t *testing.T) {
	o := opts()
	o.psnA, o.mtu = 0, 1
	f, b, sent := lone(t, o)
	b.reg(2, 0, 1<<16, allAccess)
	b.inject(marked(reorderSpan, true)) // too far ahead, and the queue is empty
	b.wantResp(sent, nakOf(0, wire.NAKSequence))
	b.inject(marked(0, false))
	for psn := range uint32(reorderSpan + 70) {
		b.inject(marked(psn+2, false))
	}
	b.runAll()
	if there := (*sent)[len(*sent)-1].Arrivals(); !there.Has(reorderSpan-1) || len(*sent) > 1+reorderSpan/sackEvery {
		t.Errorf("%d selective acknowledgements, %x", len(*sent), there)
	}
	*sent = nil
	f.wantHeld(reorderSpan - 1)
	// The pool is empty: queued requests are reported, further ones dropped.
	b.inject(marked(1, true)) // executes 1 to reorderSpan
	b.wantResp(sent, ackOf(reorderSpan))
	var all []interface{ Free() }
	for {
		x := f.held.Get()
		if x == nil {
			break
		}
		all = append(all, x)
	}
	b.inject(marked(reorderSpan+2, false))
	b.wantResp(sent, nakOf(reorderSpan+1, wire.NAKSequence))
	for _, x := range all {
		x.Free()
	}
	b.inject(marked(reorderSpan+1, false))
	// A READ occupies the PSNs of all its responses.
	b.inject(craft{op: wire.OpRCReadRequest, psn: reorderSpan + 3, sel: true, key: 2, length: 700})
	b.inject(marked(reorderSpan+6, true))
	b.wantSACK(sent, reorderSpan+2, 1, 2, 3, 4)
	// A request that overlaps with it is invalid.
	b.inject(marked(reorderSpan+4, true))
	b.wantSACK(sent, reorderSpan+2, 1, 2, 3, 4)
	f.wantHeld(2)
	b.inject(marked(reorderSpan+2, false))
	b.runAll()
	if n := len(*sent); n != 4 || (*sent)[3].BTH.Opcode != wire.OpRCAck || (*sent)[3].BTH.PSN != reorderSpan+6 {
		t.Errorf("%d packets", n)
	}
	*sent = nil
	// The queue is emptied after a time.
	b.inject(marked(reorderSpan+8, true))
	b.wantSACK(sent, reorderSpan+7, 1)
	for range 3 {
		if f.now = max(f.now, b.timer); f.held.InUse() == 0 {
			break
		}
		b.timer = 0
		b.q.Timer(f.now)
	}
	f.wantHeld(0)
	if d := f.now - 1e9; d > 2*reorderTimeout {
		t.Errorf("queued for %d ms", d/1e6)
	}
}

// TestKeepEnds: any other event that stops the responder releases the queued frames.
func TestKeepEnds(t *testing.T) {
	for name, end := range map[string]func(f *fabric, b *node){
		"RNR": func(f *fabric, b *node) { b.inject(craft{op: wire.OpRCSendOnly, psn: 0, sel: true}) },
		"absent page": func(f *fabric, b *node) {
			b.paging(1, 0, 0)
			b.absent(2, 0)
			b.waits = true
			b.inject(marked(0, true))
		},
		"wrong key": func(f *fabric, b *node) {
			c := marked(0, true)
			c.key = 3
			b.inject(c)
		},
		"reset": func(f *fabric, b *node) { b.modify(Attr{State: Reset}, MaskState) },
		"error": func(f *fabric, b *node) { b.modify(Attr{State: Err}, MaskState) },
		"close": func(f *fabric, b *node) { b.q.Close() },
		"inner": func(f *fabric, b *node) { // a queued SEND without a receive
			b.inject(craft{op: wire.OpRCSendOnly, psn: 1, sel: true})
			b.inject(marked(0, true))
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := opts()
			o.psnA = 0
			f, b, _ := lone(t, o)
			b.reg(2, 0, 4096, allAccess)
			b.inject(marked(2, true))
			b.inject(marked(3, true))
			f.wantHeld(2)
			end(f, b)
			f.wantHeld(0)
		})
	}
}

// TestRepair: only packets that the peer reports missing are retransmitted, not before they count as lost, and once per
// response time.
func TestRepair(t *testing.T) {
	o := opts()
	o.psnB, o.timeout = psnMask-1, 18 // 1 s
	f, b, sent := lone(t, o)
	b.reg(1, 0, 4096, allAccess)
	w := WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}
	only := func(psn uint32) resp { return resp{wire.OpRCWriteOnly, psn & psnMask, wire.NoCredits} }
	ack := func(psn uint32) { b.inject(craft{op: wire.OpRCAck, psn: psn & psnMask, syn: wire.NoCredits}) }
	tell := func(psn uint32, there ...uint64) {
		c := craft{op: wire.OpRCSelectiveAck, psn: psn & psnMask, syn: wire.NAKSequence}
		for _, i := range there {
			c.there.Set(i, 1)
		}
		b.inject(c)
	}
	const first = psnMask - 1
	pass := func(d int64) {
		for end := f.now + d; ; {
			if b.timer == 0 || b.timer > end {
				f.now = end
				return
			}
			f.now, b.timer = max(f.now, b.timer), 0
			b.q.Timer(f.now)
			b.runAll()
		}
	}
	post := func(n int) (out []resp) {
		for range n {
			out = append(out, only(first+uint32(len(b.sq))))
			b.post(w)
		}
		return out
	}
	b.wantResp(sent, post(1)...)
	if p := b.q.tx; p.Len() == 0 {
		t.Fatal("no path")
	}
	pass(100e3)
	ack(first) // response time 100 us
	b.wantResp(sent, post(6)...)
	pass(100e3)
	tell(first+1, 2, 3, 5) // 0, 1 and 4 are missing
	b.wantResp(sent)       // they were sent at the same time
	pass(20e3)
	tell(first+1, 2, 3, 5)
	b.wantResp(sent)
	pass(6e3) // a quarter of 100 us
	b.wantResp(sent, only(first+1), only(first+2), only(first+5))
	tell(first+1, 2, 3, 5)
	b.wantResp(sent)
	// New packets follow; their arrival shows that retransmissions were lost again.
	pass(10e3)
	b.wantResp(sent, post(1)...)
	pass(100e3)
	tell(first+2, 1, 2, 4, 5) // the first has arrived
	pass(30e3)
	b.wantResp(sent, only(first+2), only(first+5))
	// No response: the oldest is repeated a few times, then all are.
	pass(2e6)
	if n := len(*sent); n != maxGapProbes {
		t.Errorf("%d probes", n)
	}
	for i, p := range *sent {
		if p.BTH.PSN != (first+2)&psnMask || !p.BTH.AckReq || !p.BTH.Selective {
			t.Errorf("probe %d: %+v", i, p.BTH)
		}
	}
	*sent = nil
	pass(60e6)
	if n := len(*sent); n < 4 || (*sent)[0].BTH.PSN != (first+2)&psnMask || (*sent)[1].BTH.PSN != (first+3)&psnMask {
		t.Errorf("%d packets when it goes back", n)
	}
	*sent = nil
	ack(first + 7)
	b.wantSends(0, 0, 0, 0, 0, 0, 0, 0)
	if b.q.recovery.scoreboard.Active || b.q.recovery.retryLeft != 7 {
		t.Error("the recovery is still active")
	}
}

// TestHostileSACK: invalid selective acknowledgements change nothing, and a requester that uses go-back-N ignores all.
func TestHostileSACK(t *testing.T) {
	for _, back := range []bool{false, true} {
		o := opts()
		o.psnB = 100
		f, b, sent := lone(t, o)
		b.q.cfg.SelectiveRepeat = !back
		b.reg(1, 0, 4096, allAccess)
		for range 4 {
			b.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
		}
		b.runAll()
		if (*sent)[0].BTH.Selective == back {
			t.Errorf("SelectiveRepeat %v, but the request has Selective %v", !back, back)
		}
		*sent = nil
		f.now += 1e6
		for _, c := range []craft{
			{psn: 100, there: wire.Arrivals{3}},              // the expected PSN has arrived
			{psn: 100, there: wire.Arrivals{1 << 4, 1}},      // a PSN never sent has arrived
			{psn: 104, there: wire.Arrivals{2}},              // ... is missing
			{psn: 99, there: wire.Arrivals{2}},               // old
			{psn: 100},                                       // nothing has arrived
			{psn: 100 + 1<<22, there: wire.Arrivals{1 << 5}}, //
		} {
			c.op, c.syn = wire.OpRCSelectiveAck, wire.NAKSequence
			b.inject(c)
			b.wantResp(sent)
			if b.q.recovery.scoreboard.Active {
				t.Errorf("%+v was accepted", c)
			}
		}
		b.inject(craft{op: wire.OpRCSelectiveAck, psn: 101, syn: wire.NAKSequence, there: wire.Arrivals{2}})
		if b.runAll(); len(b.sends) != map[bool]int{false: 1}[back] {
			t.Errorf("%d completions", len(b.sends))
		}
	}
}

// losses drops frames: with probability share in 10^4 a burst begins.
func (f *fabric) losses(share, burst int) {
	left := 0
	f.loss = func(*wire.RoCE) bool {
		if left > 0 {
			left--
			return true
		}
		if f.rng.Intn(1e4) < share {
			left = burst - 1
			return true
		}
		return false
	}
}

// TestLoss: a random loss costs little more than the lost packet, on a link of 10 Gbit/s with 40 us; if one end uses
// go-back-N it costs the window (the README's figures are from this test).
func TestLoss(t *testing.T) {
	for _, tc := range []struct {
		name        string
		loss, burst int
		seeds       int64   // with few packets the mean of several runs counts
		write, read float64 // minimum useful share
		back        float64 // ... if one end uses go-back-N
	}{
		{"none", 0, 1, 1, 0.99, 0.99, 0.99},
		{"0.1 %", 10, 1, 1, 0.85, 0.9, 0.6},
		{"1 %", 100, 1, 1, 0.6, 0.7, 0.1},
		{"1 % in bursts of 8", 12, 8, 4, 0.6, 0.3, 0.2},
		{"10 %", 1000, 1, 8, 0.03, 0.03, 0.002},
	} {
		for _, m := range []struct {
			name         string
			op           WROpcode
			backA, backB bool
		}{
			{"write", WRWrite, false, false}, {"write, one goes back", WRWrite, false, true},
			{"write, the other", WRWrite, true, false},
			{"read", WRRead, false, false}, {"read, one goes back", WRRead, false, true},
			{"read, the other", WRRead, true, false},
		} {
			if m.backA && tc.loss != 100 || m.backB && tc.loss == 0 {
				continue
			}
			t.Run(tc.name+"/"+m.name, func(t *testing.T) {
				useful := 0.0
				for seed := range tc.seeds {
					f := newFabric(t, seed+1)
					f.delay, f.link = 20e3, slow(10e9, 0, 1000)
					flows := f.flows(1, m.op, Config{ECN: true, SelectiveRepeat: true})
					a, b := flows[0].a.q, flows[0].b.q
					a.cfg.SelectiveRepeat, b.cfg.SelectiveRepeat = !m.backA, !m.backB
					f.losses(tc.loss, tc.burst)
					f.run(flows, 10e6)
					f.link.watch()
					f.run(flows, 50e6)
					o := f.outcomes(flows, 50e6)
					if useful += o.useful; o.retries < 3 {
						t.Error("retry_cnt was nearly exhausted")
					}
					maps := a.stats.RxSelectiveAcks
					if kept := a.stats.Kept + b.stats.Kept; !m.backA && !m.backB && tc.loss != 0 && kept == 0 ||
						(m.backA || m.backB) && kept+maps != 0 {
						t.Errorf("%d queued, %d selective acknowledgements", kept, maps)
					}
				}
				useful /= float64(tc.seeds)
				t.Logf("%.3f", useful)
				least := map[WROpcode]float64{WRWrite: tc.write, WRRead: tc.read}[m.op]
				if m.backA || m.backB {
					least = tc.back
				}
				if useful < least {
					t.Errorf("want %.3f", least)
				}
			})
		}
	}
}

// TestReorder: with reordering and without loss hardly any packet is repeated.
func TestReorder(t *testing.T) {
	for _, op := range []WROpcode{WRWrite, WRRead} {
		for _, jitter := range []int64{5e3, 20e3, 40e3} {
			f := newFabric(t, 1)
			f.delay, f.link, f.jitter = 20e3, slow(10e9, 0, 1000), jitter
			flows := f.flows(1, op, Config{ECN: true, SelectiveRepeat: true})
			f.run(flows, 60e6)
			o, q := f.outcomes(flows, 60e6), flows[0].a.q
			if kept := q.stats.Kept + flows[0].b.q.stats.Kept; o.repeats > 20 || o.useful < 0.95 ||
				q.recovery.cwnd.Packets() < 64 || kept < 1000 {
				t.Errorf("%d us: %d repeated, a window of %d, %d queued", jitter/1e3, o.repeats,
					q.recovery.cwnd.Packets(), kept)
			}
		}
	}
}

// TestPad: only frames with data to a peer known to be a vnicd may be padded: requests since its newest response
// carried the mark, and responses to requests with the mark. While its responses carry the mark it gets the whole
// window.
func TestPad(t *testing.T) {
	f := newFabric(t, 1)
	o := opts()
	a, b := f.pair(o)
	const size = 5 * 1024
	a.reg(1, 0, size, allAccess)
	b.reg(1, 0, size, allAccess)
	padded := map[wire.Operation]int{}
	note := func(n *node) func(*wire.RoCE, []byte) bool {
		return func(p *wire.RoCE, _ []byte) bool {
			if n.pad {
				padded[p.Info.Op]++
			}
			return false
		}
	}
	a.onTx, b.onTx = note(a), note(b)
	for i, tc := range []struct {
		op           WROpcode
		backA, backB bool
		requests     int
		responses    int
	}{
		{op: WRWrite},                           // the peer is unknown
		{op: WRWrite, requests: 5},              // it has answered
		{op: WRWrite, backB: true, requests: 5}, // by its newest response it was a vnicd
		{op: WRWrite, backB: true},
		{op: WRRead, responses: 5},
		{op: WRRead, backB: true},
		{op: WRRead, backA: true},
		{op: WRWrite, requests: 0}, // responses to requests without the mark carry none
		{op: WRWrite, requests: 5},
	} {
		clear(padded)
		a.q.cfg.SelectiveRepeat, b.q.cfg.SelectiveRepeat = !tc.backA, !tc.backB
		a.post(WQE{Opcode: tc.op, SGEs: []SGE{sge(1, 0, size)}, RKey: 1})
		f.settle(1e9)
		want := goBackNWindow
		if a.q.recovery.peerSelective {
			want = defaultWindow
		}
		if w := &a.q.recovery.cwnd; w.Max != uint32(want)*recovery.WindowUnit || w.Ssthresh != w.Max || w.Size > w.Max {
			t.Errorf("step %d: a window of %d up to %d and then %d; want %d", i, w.Size/recovery.WindowUnit,
				w.Ssthresh/recovery.WindowUnit, w.Max/recovery.WindowUnit, want)
		}
		requests := padded[wire.Write]
		responses := padded[wire.ReadResponse]
		delete(padded, wire.Write)
		delete(padded, wire.ReadResponse)
		if requests != tc.requests || responses != tc.responses || len(padded) != 0 || len(a.sends) != i+1 {
			t.Errorf("step %d: %d requests and %d responses may be padded, %v others; want %d and %d", i, requests,
				responses, padded, tc.requests, tc.responses)
		}
	}
}

// TestPeerChanges: ends switch selective repeat on and off and discard their queues at any time: no request is lost or
// executed twice.
func TestPeerChanges(t *testing.T) {
	for seed := range int64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			f := newFabric(t, seed)
			o := opts()
			o.psnA, o.psnB = psnMask-50, psnMask-70
			a, b := f.pair(o)
			rng := rand.New(rand.NewSource(seed))
			const size, n = 20000, 40
			src, dst := a.reg(1, 0, size, allAccess), b.reg(1, 0, size, allAccess)
			word := b.reg(2, 0, 8, allAccess)
			clear(word.buf)
			a.reg(3, 0, 8, allAccess)
			for range n {
				a.post(WQE{Opcode: WRWrite, SGEs: []SGE{sge(1, 0, size)}, RKey: 1})
				a.post(WQE{Opcode: WRFetchAdd, SGEs: []SGE{sge(3, 0, 8)}, RKey: 2, SwapAdd: 1})
			}
			f.losses(300, 1+int(seed)%3)
			f.jitter = seed % 2 * 10e3
			var change func()
			change = func() {
				a.q.cfg.SelectiveRepeat, b.q.cfg.SelectiveRepeat = rng.Intn(3) != 0, rng.Intn(3) != 0
				if rng.Intn(2) == 0 {
					b.q.resp.reorder.drop(b.q.link)
				}
				if len(a.sends) < 2*n {
					f.after(rng.Int63n(200e3), change)
				}
			}
			change()
			f.until("all", 20e9, func() bool { return len(a.sends) == 2*n })
			f.loss = nil
			f.settle(1e9)
			for i, c := range a.sends {
				if c.c.Status != 0 {
					t.Fatalf("%d: status %d", i, c.c.Status)
				}
			}
			same(t, "data", dst.buf, src.buf)
			if word.buf[0] != n || b.atomics != n {
				t.Errorf("%d of %d atomics", word.buf[0], n)
			}
			f.wantHeld(0)
		})
	}
}
