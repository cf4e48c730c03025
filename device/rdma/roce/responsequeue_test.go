package roce

import (
	"encoding/binary"
	"fmt"
	"math/rand"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
)

// reader is a QP with a READ of four packets, an atomic, a WRITE and a READ of two packets in flight, at PSNs 0xfffffe
// to 5.
type reader struct {
	*node
	mem  *region
	sent *[]wire.RoCE
}

const readFrom = psnMask - 1

func newReader(t *testing.T) (*fabric, *reader) {
	o := opts()
	o.psnB, o.mtu, o.timeout = readFrom, 1, 18 // 256 bytes; 1 s
	f, b, sent := lone(t, o)
	r := &reader{b, b.reg(1, 0, 4096, allAccess), sent}
	clear(r.mem.buf)
	r.q.recovery.scoreboard.RTT.Sample(r.q.now, 100e3) // the response time
	r.post(WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 1000)}})
	r.post(WQE{Opcode: WRFetchAdd, RKey: 2, SGEs: []SGE{sge(1, 1024, 8)}})
	r.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 3000, 8)}})
	r.post(WQE{Opcode: WRRead, RKey: 2, RemoteVA: 2048, SGEs: []SGE{sge(1, 2048, 512)}})
	r.wantAsked(readFrom, 1000, readFrom+6, 512)
	f.now += 100e3
	return f, r
}

// wantAsked fails unless READs with exactly these first PSNs and lengths were sent.
func (n *reader) wantAsked(want ...uint32) {
	n.f.t.Helper()
	n.runAll()
	var got []uint32
	for _, p := range *n.sent {
		if p.Info.Op == wire.ReadRequest {
			got = append(got, p.BTH.PSN, p.RETH().Length)
			i := uint64(p.BTH.PSN-readFrom) & psnMask
			if i >= 6 {
				i += 2 // the second READ is at 2048
			}
			if p.RETH().VA != 256*i {
				n.f.t.Errorf("PSN %#x requests %#x", p.BTH.PSN, p.RETH().VA)
			}
		}
	}
	for i := range want {
		if i%2 == 0 {
			want[i] &= psnMask
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		n.f.t.Fatalf("READs sent: %d, want %d", got, want)
	}
	*n.sent = nil
}

// reply injects the response with PSN readFrom+i, filled with i+1.
func (n *reader) reply(i uint32, sel bool) {
	n.f.t.Helper()
	c := craft{op: wire.OpRCReadResponseOnly, psn: (readFrom + i) & psnMask, sel: sel, syn: wire.NoCredits,
		data: make([]byte, 256)}
	switch i {
	case 3:
		c.data = c.data[:232]
	case 4:
		c.op, c.orig, c.data = wire.OpRCAtomicAck, 5, nil
	case 5:
		c.op, c.data = wire.OpRCAck, nil
	}
	for k := range c.data {
		c.data[k] = byte(i + 1)
	}
	n.inject(c)
}

// pass advances the clock by d ns.
func (n *reader) pass(d int64) {
	for end := n.f.now + d; ; {
		n.runAll()
		if n.timer == 0 || n.timer > end {
			n.f.now = end
			return
		}
		n.f.now, n.timer = max(n.f.now, n.timer), 0
		leave := n.enter()
		n.q.Timer(n.f.now)
		leave()
	}
}

// check compares the data of all READs.
func (n *reader) check() {
	n.f.t.Helper()
	n.wantSends(0, 0, 0, 0)
	for i, x := range n.mem.buf[:2560] {
		want := byte(i/256 + 1)
		switch {
		case i >= 2048:
			want = byte(i/256 - 1)
		case i == 1024:
			want = 5 // the atomic's result, in the guest's byte order
		case i >= 1000:
			want = 0
		}
		if x != want {
			n.f.t.Fatalf("byte %d is %d, want %d", i, x, want)
		}
	}
	n.f.wantHeld(0)
	if n.q.recovery.scoreboard.Active || n.q.recovery.retryLeft != 7 {
		n.f.t.Error("a recovery is still active, or retry_cnt was charged")
	}
}

// TestKeepReplies: a lost response is requested again alone, once, and not before it counts as lost; responses behind
// it are queued and placed in order.
func TestKeepReplies(t *testing.T) {
	f, b := newReader(t)
	b.reply(0, true)
	b.reply(2, true)
	b.reply(4, true)
	b.reply(4, true) // a copy
	f.wantHeld(2)
	if b.mem.buf[512] != 0 || b.mem.buf[1024] != 0 || len(b.sends) != 0 {
		t.Error("placed out of order")
	}
	b.wantAsked()
	b.pass(20e3)
	b.wantAsked() // not before a quarter of 100 us
	b.pass(6e3)
	b.wantAsked(readFrom+1, 256, readFrom+3, 232)
	b.reply(6, true) // acknowledges the WRITE
	b.pass(40e3)     // ... but tells nothing about later requests
	b.wantAsked()
	f.wantHeld(3)
	b.reply(3, true) // the second gap, so the request for the first was lost
	b.pass(26e3)
	b.wantAsked(readFrom+1, 256)
	b.reply(1, true)
	b.wantSends(0, 0, 0)
	f.wantHeld(0)
	b.reply(7, true)
	b.check()
	if b.q.stats.Kept != 4 || b.q.stats.Retransmits != 3 {
		t.Errorf("%d queued, %d retransmits", b.q.stats.Kept, b.q.stats.Retransmits)
	}
}

// TestKeepRepliesAcked: an acknowledgement and a selective acknowledgement reveal a gap too, and executed requests are
// not repeated.
func TestKeepRepliesAcked(t *testing.T) {
	for _, m := range []bool{false, true} {
		f, b := newReader(t)
		if m {
			b.inject(craft{op: wire.OpRCSelectiveAck, psn: (readFrom + 6) & psnMask, sel: true, syn: wire.NAKSequence,
				there: wire.Arrivals{2}})
		} else {
			b.reply(5, true)
		}
		b.pass(26e3)
		if m { // the second READ's request is missing, although later ones arrived
			b.wantAsked(readFrom, 1000, readFrom+6, 512)
		} else {
			b.wantAsked(readFrom, 1000)
		}
		for i := range uint32(5) {
			b.reply(4-i, true)
		}
		b.wantSends(0, 0, 0)
		b.reply(6, true)
		b.reply(7, true)
		b.check()
		f.wantHeld(0)
	}
}

// TestProbeReply: without other packets the oldest response is requested several times, and at last all are.
func TestProbeReply(t *testing.T) {
	f, b := newReader(t)
	b.reply(1, true)
	b.pass(26e3)
	b.wantAsked(readFrom, 256)
	for range maxGapProbes {
		b.pass(2e6)
		if len(*b.sent) == 0 {
			break
		}
	}
	all := 0
	for _, p := range *b.sent {
		if p.BTH.PSN == readFrom && p.RETH().Length == 1000 {
			all++
		}
	}
	if all == 0 {
		t.Errorf("%d requests, none for the whole READ", len(*b.sent))
	}
	f.wantHeld(0)
	*b.sent = nil
	for i := range uint32(8) {
		b.reply(i, true)
	}
	b.check()
}

// TestAskedAlone: single responses arrive in the order of their requests, whatever their PSNs.
func TestAskedAlone(t *testing.T) {
	_, b := newReader(t)
	b.reply(2, true)
	b.reply(4, true)
	b.pass(26e3)
	b.wantAsked(readFrom, 512, readFrom+3, 232)
	b.pass(230e3) // a probe
	b.wantAsked(readFrom, 256)
	b.reply(0, true)
	b.pass(26e3)
	b.wantAsked(readFrom+1, 256, readFrom+3, 232)
}

// TestExecuted: requests that must have been executed are not retransmitted, not even when going back.
func TestExecuted(t *testing.T) {
	_, b := newReader(t)
	b.q.goBack()
	b.reply(6, true)
	b.runAll()
	for _, p := range *b.sent {
		if p.Info.Op == wire.Write {
			t.Error("the WRITE was retransmitted")
		}
	}
	b.wantAsked(readFrom, 1000)
}

// TestKeepRepliesEnds: other events that stop the requester, and peers that do not repeat single responses, make it go
// back and release the queued frames.
func TestKeepRepliesEnds(t *testing.T) {
	for name, end := range map[string]func(f *fabric, b *reader){
		"unmarked":  func(f *fabric, b *reader) { b.reply(3, false) },
		"goes back": func(f *fabric, b *reader) { b.q.cfg.SelectiveRepeat = false; b.reply(3, true) },
		"RNR": func(f *fabric, b *reader) {
			b.inject(craft{op: wire.OpRCAck, psn: readFrom, syn: wire.SyndromeRNR | 1})
			b.reply(3, true) // sent before
		},
		"RNR behind": func(f *fabric, b *reader) {
			b.inject(craft{op: wire.OpRCAck, psn: readFrom + 1, sel: true, syn: wire.SyndromeRNR | 1})
		},
		"NAK": func(f *fabric, b *reader) { b.inject(craft{op: wire.OpRCAck, psn: readFrom, syn: wire.NAKSequence}) },
		"map": func(f *fabric, b *reader) { b.inject(craft{op: wire.OpRCSelectiveAck, psn: 5, syn: wire.NAKSequence}) },
		"access": func(f *fabric, b *reader) {
			b.inject(craft{op: wire.OpRCAck, psn: readFrom, syn: wire.NAKRemoteAccess})
		},
		"absent page": func(f *fabric, b *reader) {
			b.paging(1, 0, 0)
			b.absent(1, 0)
			b.reply(0, true)
			b.reply(3, true) // during the wait
		},
		"wrong size": func(f *fabric, b *reader) {
			b.inject(craft{op: wire.OpRCReadResponseOnly, psn: readFrom, sel: true, syn: wire.NoCredits,
				data: make([]byte, 8)})
		},
		"wrong size, kept": func(f *fabric, b *reader) {
			b.inject(craft{op: wire.OpRCReadResponseOnly, psn: readFrom + 1, sel: true, syn: wire.NoCredits,
				data: make([]byte, 8)})
			b.reply(0, true)
		},
		"reset": func(f *fabric, b *reader) { b.modify(Attr{State: Reset}, MaskState) },
		"error": func(f *fabric, b *reader) { b.modify(Attr{State: Err}, MaskState) },
		"close": func(f *fabric, b *reader) { b.q.Close() },
		"silence": func(f *fabric, b *reader) {
			b.q.recovery.timeout, b.q.recovery.rtxAt = 0, 0 // no timer
			b.pass(30e3)
			if f.held.InUse() == 0 {
				f.t.Error("released too early")
			}
			b.pass(2 * reorderTimeout)
		},
	} {
		t.Run(name, func(t *testing.T) {
			f, b := newReader(t)
			if name != "wrong size, kept" {
				b.reply(1, true)
			}
			b.reply(2, true)
			b.reply(6, true)
			end(f, b)
			f.wantHeld(0)
			if f.pool.InUse() != 0 {
				t.Error("frames are leaked")
			}
		})
	}
}

// TestKeepRepliesBounds: the queue is bounded, and responses that do not fit are requested again.
func TestKeepRepliesBounds(t *testing.T) {
	f, b := newReader(t)
	f.held = newHeld(t, 1)
	b.reply(1, true)
	b.reply(2, true)
	f.wantHeld(1)
	b.reply(3, true)
	if b.q.recovery.retryLeft != 7 {
		t.Error("it went back")
	}
	b.reply(0, true)
	f.wantHeld(0)
	b.reply(3, true)
	f.wantHeld(1)
	b.reply(6, true)
	b.pass(26e3)
	b.wantAsked(readFrom+2, 256)
	b.reply(2, true)
	for i := range uint32(4) {
		b.reply(4+i, true)
	}
	b.check()
	// No response arrives: it goes back.
	f, b = newReader(t)
	f.held = newHeld(t, 1)
	x := f.held.Get()
	b.reply(1, true)
	b.wantAsked(readFrom, 1000)
	if b.q.recovery.retryLeft != 6 {
		t.Error("it did not go back")
	}
	x.Free()
	// A response to a request without one, out of order.
	b.inject(craft{op: wire.OpRCReadResponseOnly, psn: (readFrom + 5) & psnMask, sel: true, syn: wire.NoCredits,
		data: make([]byte, 8)})
	f.wantHeld(0)
}

// TestKeepRequest: a READ whose request was lost is requested as a whole, once something behind it has arrived. A
// selective acknowledgement of the request tells nothing about its responses.
func TestKeepRequest(t *testing.T) {
	f, b := newReader(t)
	tell := func(psn uint32, there wire.Arrivals) {
		b.inject(craft{op: wire.OpRCSelectiveAck, psn: psn & psnMask, sel: true, syn: wire.NAKSequence, there: there})
	}
	tell(readFrom, wire.Arrivals{0xf0}) // all but the first READ
	b.pass(26e3)
	b.wantAsked(readFrom, 1000)
	f.wantHeld(0)
	b.pass(50e3)
	for i := range uint32(4) {
		b.reply(i, true)
	}
	b.reply(7, true) // the responses of the atomic and of 6 are lost
	b.pass(26e3)
	if n := len(*b.sent); n != 2 || (*b.sent)[0].Info.Op != wire.FetchAdd {
		t.Fatalf("%d packets", n)
	}
	b.wantAsked(readFrom+6, 256)
	b.reply(6, true)
	b.reply(4, true)
	b.check()
}

// TestRepeatReplies: a peer that supports it gets single responses again, between the responses being sent.
func TestRepeatReplies(t *testing.T) {
	o := opts()
	o.mtu, o.psnA, o.destRd = 1, 10, 2
	f, b, sent := lone(t, o)
	b.reg(2, 0x1000, 1<<18, allAccess)
	read := func(psn uint32, i, n uint32) craft {
		return craft{op: wire.OpRCReadRequest, psn: psn, key: 2, sel: true, va: 0x1000 + 256*uint64(i), length: n}
	}
	only := func(p uint32) resp { return resp{wire.OpRCReadResponseOnly, p, wire.NoCredits} }
	seq := func(lo, hi uint32) (out []resp) {
		for p := lo; p < hi; p++ {
			out = append(out, resp{wire.OpRCReadResponseMid, p, wire.NoCredits})
		}
		out[0].op = wire.OpRCReadResponseFirst
		out[len(out)-1].op = wire.OpRCReadResponseLast
		return out
	}
	step := func(n int) { // sends n packets
		leave := b.enter()
		b.q.Run(f.now, 2*n)
		leave()
	}
	b.inject(read(10, 0, 2560)) // 10 to 19
	step(6)
	b.inject(read(14, 4, 768)) // 14 and 15 have been sent, 16 has not
	b.inject(read(11, 1, 256))
	b.inject(read(11, 1, 256))
	all := seq(10, 20)
	b.wantResp(sent, append(append(all[:6:6], only(11), only(14), only(15)), all[6:]...)...)
	// Both are remembered while the next is sent, and all responses carry the mark.
	b.inject(read(20, 10, 512))
	step(1)
	b.inject(read(13, 3, 256))
	b.inject(read(19, 9, 256))
	b.inject(read(20, 10, 256))
	b.runAll()
	for _, p := range *sent {
		if !p.BTH.Selective {
			t.Errorf("%v has no Selective bit", p.BTH)
		}
	}
	b.wantResp(sent, append(seq(20, 22)[:1], only(13), only(19), only(20), seq(20, 22)[1])...)
	// A peer without the mark gets the responses from there on.
	c := read(11, 1, 512)
	c.sel = false
	b.inject(c)
	b.runAll()
	if (*sent)[0].BTH.Selective {
		t.Error("the response has the Selective bit")
	}
	b.wantResp(sent, seq(11, 13)...)
	// So does a request for more responses than can be noted.
	b.inject(read(22, 0, (psnSetSpan+2)*256)) // 22 to 279
	b.runAll()
	*sent = nil
	b.inject(read(22, 0, (psnSetSpan+1)*256))
	b.wantResp(sent, seq(22, 23+psnSetSpan)...)
	b.inject(read(22, 0, 256))
	b.inject(read(24, 2, psnSetSpan*256)) // in addition to the other
	b.wantResp(sent, append([]resp{only(22)}, seq(24, 24+psnSetSpan)...)...)
	// A response whose resource was replaced is not sent.
	b.inject(read(22, 0, 256))
	b.inject(read(280, 0, 256))
	b.inject(read(281, 200, 256))
	b.wantResp(sent, only(280), only(281))
	// A page became absent: the repetition waits, and so do those behind it. An invalid key ends only that repetition.
	b.stuck(0x1000)
	b.inject(read(280, 0, 256))
	b.wantResp(sent)
	b.inject(read(281, 200, 256))
	b.wantResp(sent)
	b.answer(Responder, true)
	b.wantResp(sent, only(280), only(281))
	b.absent(2, 0x1000+200*256)
	b.inject(read(281, 200, 256))
	b.inject(craft{op: wire.OpRCWriteOnly, psn: 282, sel: true, ack: true, key: 2, va: 0x20000, length: 1,
		data: []byte{1}})
	b.inject(read(283, 100, 256))
	b.wantResp(sent)
	b.answer(Responder, true)
	b.wantResp(sent, only(281), only(283))
	b.inject(read(283, 100, 256))
	delete(b.regions, 2)
	b.wantResp(sent, nakOf(283, wire.NAKRemoteAccess))
	b.wantState(RTS)
}

// TestMixedLoss: READs of any length, WRITEs, SENDs and atomics, in both directions, with packets lost, late or
// duplicated and pages absent, while the ends switch selective repeat on and off and discard their queues. READ data is
// compared, and each atomic executes once.
func TestMixedLoss(t *testing.T) {
	for seed := range int64(30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			f := newFabric(t, seed)
			o := opts()
			rng := rand.New(rand.NewSource(seed))
			o.psnA, o.psnB = psnMask-uint32(rng.Intn(200)), psnMask-uint32(rng.Intn(200))
			o.mtu, o.rd = uint8(1+rng.Intn(4)), uint8(1+rng.Intn(8))
			o.destRd = o.rd
			a, b := f.pair(o)
			const size, n = 40000, 40
			reads := map[*node]map[int][2]int{a: {}, b: {}}
			for _, x := range []*node{a, b} {
				x.q.attr.RetryCnt, x.q.recovery.retryLeft = 255, 255
				x.reg(1, 0, size, allAccess) // source of READs
				x.reg(2, 0, 8, allAccess)
				clear(x.regions[2].buf)
				x.reg(3, 0, n*size, allAccess) // results
				x.reg(4, 0, size, allAccess)   // target of WRITEs
				x.reg(5, 0, n*1024, allAccess) // receive buffers
				for range n {
					x.postRecv(sge(5, uint64(len(x.rq))*1024, 1024))
				}
				for i := range n {
					switch rng.Intn(6) {
					case 0:
						x.post(WQE{Opcode: WRFetchAdd, SGEs: []SGE{sge(3, uint64(i*size), 8)}, RKey: 2, SwapAdd: 1})
					case 1:
						x.post(WQE{Opcode: WRWrite, SGEs: []SGE{sge(1, 0, 1+rng.Intn(size))}, RKey: 4})
					case 2:
						x.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, rng.Intn(1025))}})
					default:
						off := rng.Intn(size)
						k := rng.Intn(size - off)
						reads[x][i] = [2]int{off, k}
						x.post(WQE{Opcode: WRRead, SGEs: []SGE{sge(3, uint64(i*size), k/3),
							sge(3, uint64(i*size+k/3), k-k/3)}, RKey: 1, RemoteVA: vaOf(off), Fence: rng.Intn(8) == 0})
					}
				}
				if seed%3 == 0 {
					x.chaosFaults(seed)
				}
			}
			f.losses([]int{100, 500, 2000}[rng.Intn(3)], 1+rng.Intn(4))
			f.jitter = []int64{0, 10e3, 50e3}[rng.Intn(3)]
			if rng.Intn(2) == 0 {
				f.dup, f.late, f.lag = 0.1, 100e3, 10e3
			}
			done := func() bool { return len(a.sends) == n && len(b.sends) == n }
			var change func()
			change = func() {
				for _, x := range []*node{a, b} {
					switch rng.Intn(6) {
					case 0:
						x.q.cfg.SelectiveRepeat = !x.q.cfg.SelectiveRepeat
					case 1:
						x.q.resp.reorder.drop(x.q.link)
						x.q.resp.repeatsDue = psnSet{}
					case 2:
						x.q.goBack()
					}
				}
				if !done() {
					f.after(rng.Int63n(400e3), change)
				}
			}
			if seed%2 == 0 {
				change()
			}
			f.until("all", 600e9, done)
			f.loss, f.dup = nil, 0
			f.settle(1e9)
			f.wantHeld(0)
			for _, x := range []*node{a, b} {
				y := map[*node]*node{a: b, b: a}[x]
				adds := uint64(0)
				for i, c := range x.sends {
					if c.c.Status != 0 {
						t.Fatalf("%s: %d: status %d", x.name, i, c.c.Status)
					}
					if x.sq[i].Opcode == WRFetchAdd {
						if got := binary.LittleEndian.Uint64(x.regions[3].buf[i*size:]); got != adds {
							t.Errorf("%s: atomic %d is %d, want %d", x.name, i, got, adds)
						}
						adds++
					}
				}
				for i, r := range reads[x] {
					same(t, fmt.Sprintf("%s READ %d", x.name, i), x.regions[3].buf[i*size:][:r[1]],
						y.regions[1].buf[r[0]:][:r[1]])
				}
				if got := binary.LittleEndian.Uint64(y.regions[2].buf); got != adds || uint64(y.atomics) != adds {
					t.Errorf("%s: sum is %d after %d atomics, want %d", y.name, got, y.atomics, adds)
				}
			}
		})
	}
}
