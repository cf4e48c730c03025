package roce

import (
	"fmt"
	"math/rand"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Requests that are kept for an absent page instead of refused (HF-1, suspend.go).

// hostGone makes the page at va of region key absent on the host.
func (n *node) hostGone(key translate.Key, va uint64) {
	n.pages[pageID{key, va / pageBytes}] = hostAbsent
}

// gone makes all pages of region key absent.
func (n *node) allGone(key translate.Key, how absence) {
	for i := range uint64(len(n.regions[key].buf)+pageBytes-1) / pageBytes {
		n.pages[pageID{key, n.regions[key].va/pageBytes + i}] = how
	}
}

// expire calls n's timer.
func (n *node) expire() {
	n.timer = 0
	leave := n.enter()
	n.q.Timer(n.f.now)
	leave()
}

// peerKind is an implementation of the other end.
type peerKind struct {
	name     string
	back     bool // go-back-N
	unmarked bool
}

var peerKinds = []peerKind{{name: "vnicd"}, {name: "older", unmarked: true}, {name: "rxe", back: true, unmarked: true}}

// be makes n behave as k. Its peer must be told by o.backA or o.backB.
func (k *peerKind) pair(f *fabric, o pairOpt) (a, b *node) {
	o.backA = k.back
	a, b = f.pair(o)
	a.unmarked = k.unmarked
	return a, b
}

// TestNoRetriesAbsent (HF-1): a peer with rnr_retry 0 whose requests meet absent pages sees no error and no RNR NAK,
// at either level of translation, and whoever it is. Nothing is lost, so nothing is asked for again.
func TestNoRetriesAbsent(t *testing.T) {
	for _, k := range peerKinds {
		for _, how := range []absence{hostAbsent, guestAbsent, hostAbsent | guestAbsent} {
			for _, x := range []struct {
				name string
				w    WQE
			}{
				{"write", WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 50000)}}},
				{"write imm", WQE{Opcode: WRWriteImm, RKey: 2, SGEs: []SGE{sge(1, 0, 5000)}}},
				{"send", WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 50000)}}},
				{"small send", WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 8)}}},
				{"read", WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 50000)}}},
				{"atomic", WQE{Opcode: WRFetchAdd, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}},
				{"atomic write", WQE{Opcode: WRAtomicWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}},
			} {
				t.Run(fmt.Sprintf("%s/%d/%s", k.name, how, x.name), func(t *testing.T) {
					f := newFabric(t, 1)
					o := opts()
					o.rnr = 0
					a, b := k.pair(f, o)
					a.reg(1, 0, 1<<16, allAccess)
					b.reg(2, 0, 1<<16, allAccess)
					b.paging(1, 0, 0)
					b.whole = true
					b.service = func() int64 { return 40e6 } // the timeout is 67 ms
					n, ring := 3, 0
					b.recvMiss = func() Fetch { // the receive queue is absent too
						if ring++; ring == 1 {
							return FetchFault
						}
						return FetchReady
					}
					for range n {
						b.postRecv(sge(2, 0, 1<<16))
					}
					b.allGone(2, how)
					for range n {
						a.post(x.w)
					}
					f.until(x.name, 10e9, func() bool { return len(a.sends) == n })
					a.wantSends(0, 0, 0)
					f.settle(1e9)
					if s := b.q.Stats(); s.TxRNR != 0 || s.TxNaks != 0 || s.FaultDrops != 0 || b.raised[Responder] == 0 {
						t.Errorf("%d RNR NAKs, %d NAKs, %d drops, %d faults", s.TxRNR, s.TxNaks, s.FaultDrops,
							b.raised[Responder])
					}
					if w := x.w.SGEs[0].Length; x.w.Opcode != WRFetchAdd {
						same(t, "data", b.regions[2].buf[:w], a.regions[1].buf[:w])
					}
				})
			}
		}
	}
}

// Packet by packet: a request that meets a page absent on the host is kept, with those behind it. Repetitions are
// duplicates, and those of executed requests are acknowledged. When the page is present everything is executed.
func TestKeptForPage(t *testing.T) {
	for _, level := range []absence{hostAbsent, guestAbsent} {
		for _, sel := range []bool{false, true} {
			o := opts()
			o.psnA = 0xfffffe
			f, b, sent := lone(t, o)
			mem := b.reg(2, 0, 1<<16, allAccess)
			clear(mem.buf)
			b.stuck()
			b.pages[pageID{2, 4}] = level
			w := func(psn uint32, va uint64, data string) craft {
				c := write(psn, va, data)
				c.sel = sel
				return c
			}
			b.inject(w(0xfffffe, 0, "a"))
			b.wantResp(sent, ackOf(0xfffffe))
			b.inject(w(0xffffff, 0x1000, "b"))
			b.inject(w(1, 1, "d"))
			b.inject(w(0, 0, "c"))
			b.inject(craft{op: wire.OpRCReadRequest, psn: 2, sel: sel, key: 2, va: 0x1000, length: 1})
			b.inject(craft{op: wire.OpRCFetchAdd, psn: 3, sel: sel, key: 2, va: 8, swap: 5})
			b.wantResp(sent)
			f.wantHeld(5)
			for range 3 { // its timeout
				b.inject(w(0xfffffe, 0, "a"))
				b.inject(w(0xffffff, 0x1000, "b"))
				b.inject(w(0, 0, "c"))
				b.inject(w(1, 1, "d"))
				if sel && level == hostAbsent {
					b.wantSACK(sent, 0xffffff, 0)
				} else {
					b.wantResp(sent, ackOf(0xfffffe))
				}
			}
			f.wantHeld(5)
			if mem.buf[0] != 'a' || mem.buf[1] != 0 || b.raised[Responder] != 1 {
				t.Fatalf("% x, %d faults", mem.buf[:2], b.raised[Responder])
			}
			b.answer(Responder, true)
			b.wantResp(sent, resp{wire.OpRCReadResponseOnly, 2, wire.NoCredits},
				resp{wire.OpRCAtomicAck, 3, wire.NoCredits})
			f.wantHeld(0)
			if mem.buf[0x1000] != 'b' || mem.buf[0] != 'c' || mem.buf[1] != 'd' || mem.buf[8] != 5 {
				t.Errorf("% x", mem.buf[:9])
			}
			b.inject(w(4, 0, "e"))
			b.wantResp(sent, ackOf(4))
			if s := b.q.Stats(); s.Kept != 5 || s.FaultDrops != 0 || s.Duplicates != 12 {
				t.Errorf("%+v", *s)
			}
		}
	}
}

// A repetition that finds the page present is executed, and so are the requests behind it, without an answer to the
// fault.
func TestKeptPageCame(t *testing.T) {
	o := opts()
	o.psnA = 10
	f, b, sent := lone(t, o)
	mem := b.reg(2, 0, 1<<16, allAccess)
	b.stuck(0x1000)
	b.inject(write(10, 0x1000, "a"))
	b.inject(write(11, 0, "b"))
	b.wantResp(sent)
	b.present()
	b.inject(write(10, 0x1000, "x"))
	b.wantResp(sent, ackOf(11))
	f.wantHeld(0)
	if mem.buf[0x1000] != 'x' || mem.buf[0] != 'b' {
		t.Error("not executed")
	}
	b.answer(Responder, true)
	b.wantResp(sent)
	// Without a repetition it is tried again after faultRetry.
	b.absent(2, 0x1000)
	b.inject(write(12, 0x1000, "c"))
	b.inject(write(13, 0, "d"))
	b.wantResp(sent)
	b.present()
	f.now += faultRetry
	b.expire()
	b.wantResp(sent, ackOf(13))
	f.wantHeld(0)
}

// Only a peer that retries RNR NAKs for ever gets them for pages absent in the guest (PF-8): it says so itself, or
// connection management does. What it says itself counts more. Whoever it is, pages absent on the host are no reason,
// unless it repeats the request: then its retry_cnt is at stake.
func TestPatience(t *testing.T) {
	for _, x := range []struct {
		mark  wire.Patience
		cm    bool
		waits bool
	}{
		{wire.PatienceUnknown, false, false}, {wire.PatienceUnknown, true, true}, {wire.PatienceEnds, true, false},
		{wire.PatienceForever, false, true}, {0x3f, false, false},
	} {
		for _, level := range []absence{guestAbsent, hostAbsent} {
			for _, what := range []string{"write", "send", "read", "atomic"} {
				t.Run(fmt.Sprintf("%#x/%v/%d/%s", x.mark, x.cm, level, what), func(t *testing.T) {
					o := opts()
					o.psnA = 10
					f, b, sent := lone(t, o)
					b.reg(2, 0, 1<<16, allAccess)
					b.stuck()
					b.waits = x.cm
					b.pages[pageID{2, 4}] = level
					b.postRecv(sge(2, 0x1000, 8))
					c := write(10, 0x1000, "a")
					answer := ackOf(10)
					switch what {
					case "send":
						c.op, c.key, c.va, c.length = wire.OpRCSendOnly, 0, 0, 0
					case "read":
						c = craft{op: wire.OpRCReadRequest, psn: 10, key: 2, va: 0x1000, length: 8}
						answer = resp{wire.OpRCReadResponseOnly, 10, wire.NoCredits}
					case "atomic":
						c = craft{op: wire.OpRCFetchAdd, psn: 10, key: 2, va: 0x1000, swap: 5}
						answer = resp{wire.OpRCAtomicAck, 10, wire.NoCredits}
					}
					c.wait = x.mark
					refusal := []resp{}
					if x.waits {
						code := wire.Syndrome(9) // 240 us for a service time of 200
						if x.mark == wire.PatienceForever {
							code = 11 // 480: the end of the wait is announced
						}
						refusal = append(refusal, rnrOf(10, code))
					}
					b.inject(c)
					early := x.waits && level == guestAbsent && (what == "write" || what == "send")
					if early { // PF-8
						b.wantResp(sent, refusal...)
						f.wantHeld(0)
					} else {
						b.wantResp(sent)
					}
					b.inject(c)
					b.wantResp(sent, refusal...)
					b.inject(c)
					b.wantResp(sent, refusal...)
					b.answer(Responder, true)
					if early {
						b.wantResp(sent, ackOf(9)) // PF-9
						b.inject(c)
					}
					b.wantResp(sent, answer)
					f.wantHeld(0)
				})
			}
		}
	}
}

// Between vnicds a page of the host may take as long as it takes: retry_cnt 1 and a timeout of 2 ms survive seconds,
// the window stays as it was, and the request is repeated once per timeout only. A page of the guest that takes as long
// ends the connection, because its owner may never provide it.
func TestHostTakesLong(t *testing.T) {
	for _, tc := range []struct {
		level   absence
		service int64
	}{{hostAbsent, keepTime / 2}, {hostAbsent, 5 * keepTime}, {guestAbsent, keepTime / 2}} {
		for _, x := range []struct {
			name string
			w    WQE
		}{
			{"write", WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 50000)}}},
			{"send", WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 50000)}}},
			{"read", WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 50000)}}},
			{"atomic", WQE{Opcode: WRFetchAdd, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}},
		} {
			t.Run(fmt.Sprintf("%s/%d/%d", x.name, tc.level, tc.service), func(t *testing.T) {
				f := newFabric(t, 1)
				o := opts()
				o.retry, o.timeout, o.rnr = 1, 9, 0
				a, b := f.pair(o)
				a.reg(1, 0, 1<<18, allAccess)
				b.reg(2, 0, 1<<18, allAccess)
				for range 23 {
					b.postRecv(sge(2, 0, 1<<18))
				}
				want := []Status{}
				for range 20 {
					a.post(x.w)
					want = append(want, 0)
				}
				f.until("warm", 10e9, func() bool { return len(a.sends) == 20 })
				before, sent := a.q.recovery.cwnd.Size, f.frames
				b.paging(1, 0, 0)
				b.whole = true
				served := int64(0)
				b.service = func() int64 { served = f.now + tc.service; return tc.service }
				b.allGone(2, tc.level)
				for range 3 {
					a.post(x.w)
				}
				f.until("the page", 60e9, func() bool { return len(a.sends) == 23 })
				if tc.level == guestAbsent {
					a.wantSends(append(want, StatusRetryExc, StatusFlush, StatusFlush)...)
					return
				}
				a.wantSends(append(want, 0, 0, 0)...)
				if d := f.now - served; d > 1e6 {
					t.Errorf("done %d us after the page came", d/1e3)
				}
				f.settle(1e9)
				if x.w.Opcode != WRFetchAdd {
					same(t, "data", b.regions[2].buf[:50000], a.regions[1].buf[:50000])
				}
				// What was dropped after keepTime counts as lost.
				if w := &a.q.recovery.cwnd; tc.service < keepTime && (w.Size < before || w.Ssthresh != w.Max) {
					t.Errorf("the window is %+v, it was %d", w, before)
				}
				if a.q.recovery.retryLeft != 1 || b.q.Stats().TxRNR != 0 {
					t.Errorf("%d retries left, %d RNR NAKs", a.q.recovery.retryLeft, b.q.Stats().TxRNR)
				}
				if n := f.frames - sent; int64(n) > 400+tc.service/2e6*200 {
					t.Errorf("%d frames were sent", n)
				}
			})
		}
	}
}

// What finds no room is dropped in silence and asked for once, when the page is present: by a NAK, or by a selective
// acknowledgement if requests behind the gap are queued.
func TestKeptOverflow(t *testing.T) {
	for _, sel := range []bool{false, true} {
		for _, room := range []int{0, 1, 3} {
			for _, what := range []string{"write", "atomic"} {
				t.Run(fmt.Sprintf("%v/%d/%s", sel, room, what), func(t *testing.T) {
					o := opts()
					o.psnA = 10
					f, b, sent := lone(t, o)
					b.reg(2, 0, 1<<16, allAccess)
					b.stuck()
					b.hostGone(2, 0x1000)
					f.held = newHeld(t, max(room, 1))
					if room == 0 {
						defer f.held.Get().Free()
					}
					w := func(psn uint32, va uint64) craft {
						c := write(psn, va, "x")
						if c.sel = sel; what == "atomic" && psn == 10 {
							c = craft{op: wire.OpRCFetchAdd, psn: 10, sel: sel, key: 2, va: va, swap: 1}
						}
						return c
					}
					b.inject(w(10, 0x1000))
					for psn := uint32(11); psn < 40; psn++ {
						b.inject(w(psn, uint64(psn)))
					}
					if sel && room == 0 && what == "write" {
						b.wantSACK(sent, 10, 0)
					}
					b.wantResp(sent)
					end := 10 + uint32(room) // of what is executed
					want := []resp{nakOf(end, wire.NAKSequence)}
					if what == "atomic" {
						end++
						want = []resp{{wire.OpRCAtomicAck, 10, wire.NoCredits}, nakOf(end, wire.NAKSequence)}
					}
					b.answer(Responder, true)
					b.wantResp(sent, want...)
					for psn := end + 1; psn < 40; psn++ { // sent before the NAK arrives
						b.inject(w(psn, uint64(psn)))
					}
					b.wantResp(sent)
					for psn := end; psn < 40; psn++ {
						b.inject(w(psn, uint64(psn)))
					}
					if what == "atomic" || room > 0 {
						b.wantResp(sent, ackOf(39))
					}
				})
			}
		}
	}
	// A gap among the kept.
	for _, sel := range []bool{false, true} {
		o := opts()
		o.psnA = 10
		f, b, sent := lone(t, o)
		b.reg(2, 0, 1<<16, allAccess)
		b.stuck(0x1000)
		for _, psn := range []uint32{10, 11, 13, 14} {
			c := write(psn, 0x1000*uint64(psn&1^1), "x")
			c.sel = sel
			b.inject(c)
		}
		b.wantResp(sent)
		b.answer(Responder, true)
		if sel {
			b.wantSACK(sent, 12, 1, 2)
			f.wantHeld(2)
			continue
		}
		b.wantResp(sent, nakOf(12, wire.NAKSequence))
		f.wantHeld(0)
	}
}

// A peer that repeats its requests for ever, to a page that never comes: what is kept is bounded in number and time,
// and no message is sent. When the page does come the peer is asked once.
func TestKeptFlood(t *testing.T) {
	for _, what := range []string{"write", "atomic"} {
		for _, level := range []absence{hostAbsent, guestAbsent} {
			o := opts()
			o.psnA = 10
			f, b, sent := lone(t, o)
			f.held = newHeld(t, 2*reorderSpan)
			b.reg(2, 0, 1<<16, allAccess)
			b.stuck()
			b.pages[pageID{2, 4}] = level
			most := 0
			first := write(10, 0x1000, "x")
			if what == "atomic" {
				first = craft{op: wire.OpRCFetchAdd, psn: 10, key: 2, va: 0x1000, swap: 1}
			}
			for start := f.now; f.now < start+5*keepTime; f.now += 50e6 {
				b.inject(first)
				for psn := uint32(11); psn < 300; psn++ {
					b.inject(write(psn, 0, "x"))
				}
				b.wantResp(sent)
				most = max(most, f.held.InUse())
				if b.timer != 0 && b.timer <= f.now {
					b.expire()
				}
				if n := f.held.InUse(); f.now > start+keepTime+100e6 && n != 0 {
					t.Fatalf("%d frames are held after %d ms", n, (f.now-start)/1e6)
				}
			}
			if most < reorderSpan-1 || most > reorderSpan {
				t.Errorf("%d frames were held", most)
			}
			b.answer(Responder, true)
			if what == "atomic" {
				b.wantResp(sent, resp{wire.OpRCAtomicAck, 10, wire.NoCredits}, nakOf(11, wire.NAKSequence))
			} else {
				b.wantResp(sent, nakOf(10, wire.NAKSequence))
				b.inject(first)
			}
			b.inject(write(11, 0, "y"))
			b.wantResp(sent, ackOf(11))
		}
	}
}

// Any other event releases what is kept.
func TestKeptEnds(t *testing.T) {
	for name, end := range map[string]func(f *fabric, b *node){
		"invalid": func(f *fabric, b *node) { b.answer(Responder, false) },
		"reset":   func(f *fabric, b *node) { b.modify(Attr{State: Reset}, MaskState) },
		"error":   func(f *fabric, b *node) { b.modify(Attr{State: Err}, MaskState) },
		"close":   func(f *fabric, b *node) { b.q.Close() },
		"another": func(f *fabric, b *node) { // at the same PSN, with a wrong key
			c := write(10, 0x1000, "a")
			c.key = 3
			b.inject(c)
		},
		"no receive": func(f *fabric, b *node) {
			b.inject(craft{op: wire.OpRCSendOnly, psn: 10})
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := opts()
			o.psnA = 10
			f, b, _ := lone(t, o)
			b.reg(2, 0, 1<<16, allAccess)
			b.stuck(0x1000)
			b.inject(write(10, 0x1000, "a"))
			b.inject(write(11, 0, "b"))
			f.wantHeld(2)
			end(f, b)
			f.wantHeld(0)
			b.runAll()
		})
	}
}

// A READ and the WRITE behind it wait, the latter kept; and a SEND waits for its receive queue while a READ waits. The
// kept ones are executed however the answers come.
func TestKeptBehindRead(t *testing.T) {
	for _, queue := range []bool{false, true} {
		o := opts()
		o.psnA = 10
		f, b, sent := lone(t, o)
		b.reg(2, 0, 1<<16, allAccess)
		b.stuck(0x1000, 0x5000)
		b.postRecv(sge(2, 0x6000, 8))
		b.inject(craft{op: wire.OpRCReadRequest, psn: 10, key: 2, va: 0x1000, length: 8})
		second := write(11, 0x5000, "z")
		if queue {
			b.recvMiss = func() Fetch {
				if b.pages[pageID{2, 0x5000 / pageBytes}] != 0 {
					return FetchFault
				}
				return FetchReady
			}
			second = craft{op: wire.OpRCSendOnly, psn: 11, ack: true, data: []byte("z")}
		}
		b.inject(second)
		b.inject(write(12, 0, "y"))
		b.wantResp(sent)
		f.wantHeld(2)
		b.answer(Responder, true) // all pages are present
		if b.open[Responder] != nil {
			b.answer(Responder, true)
		}
		b.wantResp(sent, resp{wire.OpRCReadResponseOnly, 10, wire.NoCredits}, ackOf(12))
		f.wantHeld(0)
		b.noFault()
	}
}

// Mixed work in both directions, in which no end retries RNR NAKs, over pages that come and go at both levels within
// the time that retry_cnt gives: no error, and the data is right. Also with few frames to keep requests in.
func TestChaosNoRetries(t *testing.T) {
	for _, k := range peerKinds {
		for _, room := range []int{256, 20, 3} {
			for seed := range int64(6) {
				for _, m := range []localMode{framesOnly, localOn, localMixed} {
					t.Run(fmt.Sprintf("%s/%d/%v/%d", k.name, room, m, seed), func(t *testing.T) {
						chaosNoRetries(t, k, room, m, seed)
					})
				}
			}
		}
	}
}

func chaosNoRetries(t *testing.T, k peerKind, room int, m localMode, seed int64) {
	f := newFabric(t, seed)
	f.local, f.held = m, newHeld(t, room)
	rng := rand.New(rand.NewSource(seed + 7))
	o := opts()
	o.rnr = 0
	o.mtu = uint8(1 + rng.Intn(5))
	o.rd = uint8(1) << rng.Intn(4)
	o.destRd = o.rd
	o.psnA, o.psnB = psnMask-uint32(rng.Intn(300)), psnMask-uint32(rng.Intn(300))
	o.outstanding = 1 << rng.Intn(7)
	o.win = 8 << rng.Intn(5)
	a, b := k.pair(f, o)
	const count = 25
	sides := []*chaosSide{{x: a, y: b}, {x: b, y: a}}
	for _, n := range []*node{a, b} {
		n.chaosRegions(count)
	}
	for _, s := range sides {
		s.build(rng, count, false)
	}
	for i, n := range []*node{a, b} {
		n.chaosFaults(seed + int64(i))
		n.service = func() int64 { return n.rng.Int63n([]int64{1, 20e3, 200e3, 2e6, 10e6}[n.rng.Intn(5)]) }
	}
	watchAcks(t, a, b)
	watchAcks(t, b, a)
	f.until("chaos", 600e9, func() bool { return len(a.sends) == count && len(b.sends) == count })
	f.settle(1e9)
	for _, s := range sides {
		s.check(t)
		if n := s.y.q.Stats().TxRNR; n != 0 {
			t.Errorf("%s sent %d RNR NAKs", s.y.name, n)
		}
	}
}
