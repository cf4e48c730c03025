package roce

import (
	"bytes"
	"fmt"
	"math/rand"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Tests with a suspended side, observed at both ends of a connection.

// An ACK of nothing new ends an RNR wait (PF-9), and the RNR NAK is not charged to rnr_retry. Other packets do not end
// the wait.
func TestRequesterUnsolicitedAck(t *testing.T) {
	o := opts()
	o.psnB, o.rnr = 100, 1
	f, b, sent := lone(t, o)
	b.reg(1, 0, 1<<16, allAccess)
	w := WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}
	only := func(psn uint32) resp { return resp{wire.OpRCWriteOnly, psn, wire.NoCredits} }
	ack := func(psn uint32, syn wire.Syndrome) { b.inject(craft{op: wire.OpRCAck, psn: psn, syn: syn}) }
	b.post(w)
	b.post(w)
	b.wantResp(sent, only(100), only(101))
	ack(100, wire.NoCredits)
	for range 5 { // more often than rnr_retry allows
		ack(101, wire.SyndromeRNR|20)
		b.wantResp(sent)
		b.inject(craft{op: wire.OpRCAtomicAck, psn: 100, syn: wire.NoCredits})
		ack(100, wire.NAKSequence)
		ack(100, wire.SyndromeRNR|20)
		b.wantResp(sent)
		ack(100, wire.NoCredits)
		b.wantResp(sent, only(101))
	}
	// Progress ends the wait too.
	ack(101, wire.SyndromeRNR|20)
	b.wantResp(sent)
	b.post(w)
	b.wantResp(sent)
	ack(101, wire.NoCredits)
	b.wantResp(sent, only(102))
	b.wantSends(0, 0)
	// Otherwise the wait lasts its full time, and is charged to rnr_retry.
	ack(102, wire.SyndromeRNR|20)
	f.now += 10239e3
	b.timer = 0
	b.q.Timer(f.now)
	b.wantResp(sent)
	f.now += 2e3
	b.q.Timer(f.now)
	b.wantResp(sent, only(102))
	ack(102, wire.SyndromeRNR|20)
	b.runAll()
	b.wantSends(0, 0, StatusRNRRetryExc)
}

// Between vnicds a sender continues as soon as the fault is served, however long its RNR wait.
func TestResumeIsPrompt(t *testing.T) {
	for _, op := range []WROpcode{WRWrite, WRSend, WRRead, WRFetchAdd, WRAtomicWrite} {
		f := newFabric(t, 1)
		a, b := f.pair(opts())
		a.reg(1, 0, 4096, allAccess)
		b.reg(2, 0, 4096, allAccess)
		b.paging(1, 0, 0)
		b.absent(2, 0)
		b.delay = 400e6 // far too long
		b.service = func() int64 { return 3e6 }
		b.whole = true
		b.postRecv(sge(2, 0, 4096))
		start := f.now
		a.post(WQE{Opcode: op, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
		f.until("op", 10e9, func() bool { return len(a.sends) == 1 })
		a.wantSends(0)
		if d := f.now - start; d > 3e6+100e3 {
			t.Errorf("opcode %d: %d us for a fault of 3 ms", op, d/1e3)
		}
	}
}

// Faults far longer than the timeouts use up neither retry_cnt nor, if the expected service time is about right,
// rnr_retry; and they do not reduce the window.
func TestSlowFaults(t *testing.T) {
	for _, x := range []struct {
		name string
		w    WQE
	}{
		{"write", WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 200000)}}},
		{"send", WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 200000)}}},
		{"read", WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 200000)}}},
		{"atomic", WQE{Opcode: WRFetchAdd, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}},
		{"atomic write", WQE{Opcode: WRAtomicWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}},
	} {
		for _, warm := range []bool{false, true} {
			for _, delay := range []int64{40e6, 3e9} {
				t.Run(fmt.Sprintf("%s/warm=%v/%d", x.name, warm, delay), func(t *testing.T) {
					f := newFabric(t, 1)
					o := opts()
					o.retry, o.timeout, o.rnr = 1, 9, 7 // 2 ms
					a, b := f.pair(o)
					a.reg(1, 0, 1<<18, allAccess)
					b.reg(2, 0, 1<<18, allAccess)
					for range 40 {
						b.postRecv(sge(2, 0, 1<<18))
					}
					want := []Status{}
					if warm { // the response time is known, so there are probes
						for range 20 {
							a.post(x.w)
							want = append(want, 0)
						}
						f.until("warm", 10e9, func() bool { return len(a.sends) == 20 })
					}
					before := a.q.recovery.cwnd.Size
					for _, n := range []*node{a, b} {
						n.paging(2, 1, 0)
						n.whole = true
						n.service = func() int64 { return delay }
					}
					for range 3 {
						a.post(x.w)
						want = append(want, 0)
					}
					f.until("slow", 600e9, func() bool { return len(a.sends) == len(want) })
					a.wantSends(want...)
					if w := &a.q.recovery.cwnd; w.Size < before || w.Ssthresh != w.Max {
						t.Errorf("the window is %+v, it was %d", w, before)
					}
					if a.q.recovery.retryLeft != 1 {
						t.Errorf("%d retries left", a.q.recovery.retryLeft)
					}
				})
			}
		}
	}
	// rnr_retry 3, service times within a factor of four of the expected one.
	f := newFabric(t, 1)
	o := opts()
	o.rnr = 3
	a, b := f.pair(o)
	a.reg(1, 0, 1<<18, allAccess)
	b.reg(2, 0, 1<<18, allAccess)
	b.paging(2, 1, 0)
	b.whole = true
	b.delay = 1e6
	b.service = func() int64 { return b.rng.Int63n(4e6) }
	b.onTx = func(p *wire.RoCE, _ []byte) bool { // a peer that does not implement PF-9
		return p.Info.Op == wire.Ack && p.AETH().Syndrome.Kind() == wire.SyndromeACK &&
			extend(b.q.resp.epsn, p.BTH.PSN)+1 == a.q.req.una && a.q.req.rnrUntil != 0
	}
	for range 100 {
		a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 20000)}})
	}
	f.until("rnr", 600e9, func() bool { return len(a.sends) == 100 })
	if s := a.sends[99].c.Status; s != 0 {
		t.Errorf("status %d", s)
	}
}

// The sides wait independently (PF-16): while one never resumes, the other makes progress, and requests that the
// suspended requester has already sent are still repeated and completed.
func TestSidesWaitAlone(t *testing.T) {
	f := newFabric(t, 1)
	a, b := f.pair(opts())
	for _, n := range []*node{a, b} {
		n.reg(1, 0, 1<<16, allAccess)
		n.reg(2, 0, 1<<16, allAccess)
		n.stuck()
	}
	small := WQE{Opcode: WRWrite, RKey: 1, SGEs: []SGE{sge(1, 0, 3000)}}
	bad := WQE{Opcode: WRWrite, RKey: 1, SGEs: []SGE{sge(2, 0, 3000)}}
	a.absent(2, 0)
	// a's requester waits; one ACK for its earlier requests is lost.
	lost := false
	b.onTx = func(p *wire.RoCE, _ []byte) bool {
		drop := !lost && p.Info.Op == wire.Ack
		lost = lost || drop
		return drop
	}
	a.post(small)
	a.post(bad)
	a.post(small)
	for range 10 {
		b.post(small)
	}
	f.until("b", 1e9, func() bool { return len(b.sends) == 10 && len(a.sends) == 1 })
	if !lost {
		t.Fatal("no ACK was lost")
	}
	f.settle(1e9)
	a.noFaultBut(Requester)
	a.wantSends(0)
	a.answer(Requester, true)
	f.until("a", 1e9, func() bool { return len(a.sends) == 3 })
	// a's responder waits, for a READ; a's requester makes progress.
	a.absent(2, 0)
	b.post(WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}})
	f.settle(1e9)
	a.noFaultBut(Responder)
	for range 10 {
		a.post(small)
	}
	f.until("a", 1e9, func() bool { return len(a.sends) == 13 })
	if len(b.sends) != 10 {
		t.Error("the READ completed without its page")
	}
	a.answer(Responder, true)
	f.until("b", 2e9, func() bool { return len(b.sends) == 11 })
	// Both wait at once.
	a.absent(2, 0)
	a.post(bad)
	b.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}})
	f.settle(1e9)
	if a.open[0] == nil || a.open[1] == nil {
		t.Fatal("the two sides do not both wait")
	}
	a.answer(Responder, true)
	a.answer(Requester, true)
	f.until("both", 2e9, func() bool { return len(b.sends) == 12 && len(a.sends) == 14 })
}

// Invalid addresses end in the proper error, wherever they occur (PF-13).
func TestFaultInvalid(t *testing.T) {
	absent := func(n *node, key translate.Key) { n.absent(key, 0) }
	for _, x := range []struct {
		name           string
		typ            Type
		w              WQE
		a, b           bool // page 0 of key 2 is absent there
		queue          string
		send           Status
		recv           []Status
		eventsA        []EventKind
		eventsB        []EventKind
		stateA, stateB State
	}{
		{name: "gather", a: true, w: WQE{Opcode: WRWrite, RKey: 1, SGEs: []SGE{sge(1, 0, 2000), sge(2, 0, 8)}},
			send: StatusLocProt, stateA: Err, stateB: RTS},
		{name: "result", a: true, w: WQE{Opcode: WRRead, RKey: 1, SGEs: []SGE{sge(1, 0, 4000), sge(2, 0, 8)}},
			send: StatusLocProt, stateA: Err, stateB: RTS},
		{name: "atomic result", a: true, w: WQE{Opcode: WRFetchAdd, RKey: 1, SGEs: []SGE{sge(2, 0, 8)}},
			send: StatusLocProt, stateA: Err, stateB: RTS},
		{name: "write", b: true, w: WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}}, send: StatusRemAccess,
			recv: []Status{5}, eventsB: []EventKind{EventAccessErr}, stateA: Err, stateB: Err},
		{name: "read", b: true, w: WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}}, send: StatusRemAccess,
			recv: []Status{5}, eventsB: []EventKind{EventAccessErr}, stateA: Err, stateB: Err},
		{name: "atomic", b: true, w: WQE{Opcode: WRFetchAdd, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}, send: StatusRemAccess,
			recv: []Status{5}, eventsB: []EventKind{EventAccessErr}, stateA: Err, stateB: Err},
		{name: "atomic write", b: true, w: WQE{Opcode: WRAtomicWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}},
			send: StatusRemAccess, recv: []Status{5}, eventsB: []EventKind{EventAccessErr}, stateA: Err, stateB: Err},
		{name: "gather of an atomic write", a: true, w: WQE{Opcode: WRAtomicWrite, RKey: 1, SGEs: []SGE{sge(2, 0, 8)}},
			send: StatusLocProt, stateA: Err, stateB: RTS},
		{name: "recv", b: true, w: WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 3000)}}, send: StatusRemOp,
			recv: []Status{StatusLocProt}, stateA: Err, stateB: Err},
		{name: "send queue", queue: "send", w: WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 8)}},
			eventsA: []EventKind{EventFatal}, stateA: Err, stateB: RTS},
		{name: "receive queue", queue: "recv", w: WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 8)}}, send: StatusRetryExc,
			eventsB: []EventKind{EventFatal}, stateA: Err, stateB: Err},
		{name: "gather, UC", typ: UC, a: true, w: WQE{Opcode: WRWrite, RKey: 1,
			SGEs: []SGE{sge(1, 0, 2000), sge(2, 0, 8)}}, send: StatusLocProt, stateA: SQE, stateB: RTS},
		{name: "write, UC", typ: UC, b: true, w: WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}},
			stateA: RTS, stateB: RTS},
		{name: "recv, UC", typ: UC, b: true, w: WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 3000)}},
			recv: []Status{StatusLocProt}, stateA: RTS, stateB: Err},
		{name: "send queue, UC", typ: UC, queue: "send", w: WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 8)}},
			eventsA: []EventKind{EventFatal}, stateA: Err, stateB: RTS},
	} {
		for _, slow := range []int64{50e3, 700e6} {
			t.Run(fmt.Sprintf("%s/%d", x.name, slow), func(t *testing.T) {
				f := newFabric(t, 1)
				o := opts()
				if x.typ != 0 {
					o.typ = x.typ
				}
				a, b := f.pair(o)
				for _, n := range []*node{a, b} {
					n.reg(1, 0, 1<<16, allAccess)
					n.reg(2, 0, 1<<16, allAccess)
					n.paging(1, 0, 0)
					n.service = func() int64 { return slow }
					n.refuse = func(translate.Miss) bool { return true }
				}
				if x.a {
					absent(a, 2)
				}
				if x.b {
					absent(b, 2)
				}
				b.postRecv(sge(2, 0, 4000))
				switch x.queue {
				case "send":
					a.fault = func(what string) translate.MissKind {
						if what == "fetchsend" {
							return translate.HostFault
						}
						return 0
					}
				case "recv":
					b.recvMiss = func() Fetch { return FetchFault }
				}
				a.post(x.w)
				a.post(WQE{Opcode: WRWrite, RKey: 1, SGEs: []SGE{sge(1, 0, 8)}})
				f.settle(20e9)
				a.wantState(x.stateA)
				b.wantState(x.stateB)
				switch {
				case x.queue == "send":
					a.wantSends()
				case x.send == 0:
					a.wantSends(0, 0)
				default:
					a.wantSends(x.send, StatusFlush)
				}
				b.wantRecvs(x.recv...)
				a.wantEvents(x.eventsA...)
				b.wantEvents(x.eventsB...)
				for _, n := range []*node{a, b} {
					if n.timer != 0 && n.q.flushAt == 0 {
						t.Errorf("%s: the timer is rearmed for ever", n.name)
					}
				}
			})
		}
	}
}

// A READ response is dropped because its page is absent at the requester; then a WRITE behind it ends the connection,
// and the responder no longer answers. The READ must fail at once, not after all retries.
func TestNakBehindSuspendedRead(t *testing.T) {
	for _, target := range []struct {
		name   string
		absent bool
	}{{"no such key", false}, {"invalid page", true}} {
		t.Run(target.name, func(t *testing.T) {
			f := newFabric(t, 1)
			a, b := f.pair(opts())
			a.reg(1, 0, 1<<16, allAccess)
			a.reg(2, 0, 1<<16, allAccess)
			b.reg(1, 0, 1<<16, allAccess)
			a.stuck(0)
			key := translate.Key(9)
			if target.absent {
				key = 2
				b.reg(2, 0, 1<<16, allAccess)
				b.stuck(0)
			}
			a.post(WQE{Opcode: WRRead, RKey: 1, SGEs: []SGE{sge(2, 0, 3000)}})
			a.post(WQE{Opcode: WRWrite, RKey: key, SGEs: []SGE{sge(1, 0x8000, 3000)}})
			f.settle(1e6)
			if target.absent {
				b.answer(Responder, false)
			}
			f.settle(1e6)
			a.wantSends(StatusRemAccess, StatusFlush)
			a.wantState(Err)
			b.wantState(Err)
		})
	}
}

// The page for a result is present again, but the answer to its fault is on its way when a duplicate of the response
// arrives. It completes the request, and what waited behind it is sent.
func TestResponseBeforeAnswer(t *testing.T) {
	for _, first := range []WQE{
		{Opcode: WRRead, RKey: 1, SGEs: []SGE{sge(2, 0, 100)}},
		{Opcode: WRFetchAdd, RKey: 1, SGEs: []SGE{sge(2, 0, 8)}},
	} {
		t.Run(fmt.Sprint(first.Opcode), func(t *testing.T) {
			f := newFabric(t, 1)
			a, b := f.pair(opts())
			for _, n := range []*node{a, b} {
				n.reg(1, 0, 1<<16, allAccess)
				n.reg(2, 0, 1<<16, allAccess)
			}
			a.stuck(0)
			var response []byte
			b.onTx = func(p *wire.RoCE, fr []byte) bool {
				if p.Info.Op == wire.ReadResponse || p.Info.Op == wire.AtomicAck {
					response = bytes.Clone(fr)
				}
				return false
			}
			a.post(first)
			f.settle(1e6)
			a.noFaultBut(Requester)
			a.post(WQE{Opcode: WRWrite, RKey: 1, SGEs: []SGE{sge(1, 0x8000, 3000)}})
			for a.run { // it must wait for the page
				f.step()
			}
			a.wantSends()
			a.present()
			a.receive(response)
			a.answer(Requester, true)
			f.until("the request behind it", 1e9, func() bool { return len(a.sends) == 2 })
			a.wantSends(0, 0)
		})
	}
}

// UD: the datagram is dropped and counted, and one fault is raised; then the page becomes present, or the receive fails
// (PF-11, PF-13).
func TestFaultUD(t *testing.T) {
	f := newFabric(t, 1)
	a, b := f.datagramQP("a", UD, 0x11, 7), f.datagramQP("b", UD, 0x22, 7)
	a.reg(1, 0, 4096, allAccess)
	b.reg(2, 0, 1<<16, allAccess)
	b.stuck(0x400)
	b.postRecv(sge(2, 0x400-40, 1040))
	b.postRecv(sge(2, 0x400, 1040))
	w := WQE{Opcode: WRSend, AV: av(ipA, ipB), RemoteQPN: 0x22, QKey: 7, SGEs: []SGE{sge(1, 0, 1000)}}
	for range 3 {
		a.post(w)
	}
	f.settle(1e6)
	b.wantRecvs()
	if s := b.q.Stats(); s.FaultDrops != 3 || b.raised[Responder] != 1 || b.asked[0].Len != 1000 {
		t.Fatalf("%+v, requested %v", *s, b.asked)
	}
	b.answer(Responder, true)
	a.post(w)
	f.settle(1e6)
	b.wantRecvs(0)
	b.absent(2, 0x400)
	a.post(w)
	f.settle(1e6)
	b.answer(Responder, false)
	f.settle(1e6)
	b.wantState(Err)
	b.wantRecvs(0, StatusLocProt)
	a.wantSends(0, 0, 0, 0, 0)
}

// Answers to waits that have ended change nothing, valid or invalid.
func TestLateResume(t *testing.T) {
	for _, x := range []struct {
		name string
		side Side
		w    WQE
	}{
		{"gather", Requester, WQE{Opcode: WRWrite, RKey: 1, SGEs: []SGE{sge(2, 0, 3000)}}},
		{"result", Requester, WQE{Opcode: WRRead, RKey: 1, SGEs: []SGE{sge(2, 0, 3000)}}},
		{"write", Responder, WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}}},
		{"send", Responder, WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 3000)}}},
		{"read", Responder, WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}}},
		{"atomic", Responder, WQE{Opcode: WRFetchAdd, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}},
		{"atomic write", Responder, WQE{Opcode: WRAtomicWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}},
	} {
		for _, ok := range []bool{true, false} {
			for _, meanwhile := range []string{"reset", "err", "sqd", "close", "page came"} {
				t.Run(fmt.Sprintf("%s/%s/%v", x.name, meanwhile, ok), func(t *testing.T) {
					f := newFabric(t, 1)
					o := opts()
					a, b := f.pair(o)
					for _, n := range []*node{a, b} {
						n.reg(1, 0, 1<<16, allAccess)
						n.reg(2, 0, 1<<16, allAccess)
						n.stuck(0)
					}
					n := a
					if x.side == Responder {
						n = b
					}
					b.postRecv(sge(2, 0, 4000))
					b.postRecv(sge(2, 0, 4000))
					a.post(x.w)
					f.settle(5e6)
					n.noFaultBut(x.side)
					again := func() {
						for _, m := range []*node{a, b} {
							m.modify(Attr{State: Reset}, MaskState)
							m.sq, m.sends, m.recvs, m.rq, m.rqNext, m.seen = nil, nil, nil, m.rq[:0], 0,
								map[uint32]bool{}
							m.events = nil
						}
						f.queue = nil
						a.connect(&o, 0x22, o.avA, o.psnB, o.psnA)
						b.connect(&o, 0x11, o.avB, o.psnA, o.psnB)
					}
					switch meanwhile {
					case "reset":
						// After a reset the same page is missed again: the old answer is not for it.
						again()
						b.postRecv(sge(2, 0, 4000))
						a.post(x.w)
						f.settle(5e6)
						if n.raised[x.side] != 1 {
							t.Fatal("a second fault was raised before the first was answered")
						}
						n.idle = true
						n.open[x.side](ok)
						n.idle = false
						f.settle(200e6)
						if n.raised[x.side] != 2 {
							t.Fatal("no fault was raised after the old answer")
						}
						a.wantSends()
						n.answer(x.side, true)
						f.until("new life", 10e9, func() bool { return len(a.sends) == 1 })
						a.wantSends(0)
					case "err":
						n.modify(Attr{State: Err}, MaskState)
						n.runAll()
						sends, recvs := len(n.sends), len(n.recvs)
						n.open[x.side](ok)
						n.runAll()
						n.wantState(Err)
						n.wantEvents()
						if len(n.sends) != sends || len(n.recvs) != recvs {
							t.Error("completions")
						}
					case "sqd":
						a.modify(Attr{State: SQD, SQDNotify: true}, MaskState|MaskSQDNotify)
						f.settle(5e6)
						a.wantEvents()
						n.present()
						if !ok {
							return
						}
						n.open[x.side](true)
						f.until("drained", 10e9, func() bool { return len(a.events) == 1 })
						a.wantSends(0)
						a.wantEvents(EventSQDrained)
					case "close":
						n.q.Close()
						n.open[x.side](ok)
					case "page came":
						// A retry or a repetition finds the page present.
						n.present()
						f.until("op", 10e9, func() bool { return len(a.sends) == 1 })
						a.wantSends(0)
						n.absent(2, 0)
						n.open[x.side](ok)
						f.settle(1e9)
						a.wantState(RTS)
						b.wantState(RTS)
						a.wantSends(0)
					}
				})
			}
		}
	}
}

// A fault whose answer was lost is raised again.
func TestFaultForgotten(t *testing.T) {
	for _, w := range []WQE{
		{Opcode: WRWrite, RKey: 1, SGEs: []SGE{sge(2, 0, 3000)}},
		{Opcode: WRRead, RKey: 1, SGEs: []SGE{sge(2, 0, 3000)}},
		{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}},
		{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}},
		{Opcode: WRFetchAdd, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}},
	} {
		f := newFabric(t, 1)
		a, b := f.pair(opts())
		for _, n := range []*node{a, b} {
			n.reg(1, 0, 1<<16, allAccess)
			n.reg(2, 0, 1<<16, allAccess)
			n.stuck(0)
		}
		a.post(w)
		f.settle(50e6)
		n := a
		if b.busy[Responder] {
			n = b
		}
		n.busy, n.open = [2]bool{}, [2]func(bool){}
		n.service = func() int64 { return 1e6 }
		f.until("again", 1e9, func() bool { return len(a.sends) == 1 })
		a.wantSends(0)
		if n.raised[0]+n.raised[1] != 2 {
			t.Errorf("%v: raised %v", w.Opcode, n.raised)
		}
	}
}

// A storm of faults on one connection changes neither the packets of another nor their times.
func TestStormIsAlone(t *testing.T) {
	trace := func(storm bool) string {
		var s strings.Builder
		f := newFabric(t, 5)
		a, b := f.pair(opts())
		cfg := Config{Type: RC, MaxSendSGE: 8, MaxRecvSGE: 8, MaxRdAtomic: 16, ECN: true, SelectiveRepeat: true}
		o := opts()
		cfg.QPN = 0x33
		c := f.node("c", cfg)
		cfg.QPN = 0x44
		d := f.node("d", cfg)
		c.connect(&o, 0x44, o.avA, o.psnB, o.psnA)
		d.connect(&o, 0x33, o.avB, o.psnA, o.psnB)
		for i, n := range []*node{a, b, c, d} {
			n.reg(1, 0, 1<<18, allAccess)
			if i < 2 && storm {
				n.paging(int64(i), 1, 0.9)
				n.service = func() int64 { return n.rng.Int63n(2e3) }
			}
		}
		for _, n := range []*node{c, d} {
			n.onTx = func(p *wire.RoCE, frame []byte) bool {
				fmt.Fprintf(&s, "%s %d %v %x %d\n", n.name, f.now, p.BTH.Opcode, p.BTH.PSN, len(frame))
				return false
			}
		}
		rng := rand.New(rand.NewSource(9))
		for range 30 {
			w := WQE{Opcode: []WROpcode{WRWrite, WRRead}[rng.Intn(2)], RKey: 1,
				SGEs: []SGE{sge(1, uint64(rng.Intn(1<<16)), rng.Intn(1<<17))}}
			for _, n := range []*node{a, b, c, d} {
				n.post(w)
			}
		}
		f.until("quiet", 10e9, func() bool { return len(c.sends) == 30 && len(d.sends) == 30 })
		if storm && a.raised[0]+a.raised[1]+b.raised[0]+b.raised[1] < 100 {
			t.Errorf("no storm: %v %v", a.raised, b.raised)
		}
		return s.String()
	}
	if calm, storm := trace(false), trace(true); calm != storm {
		t.Errorf("packets differ:\n%s\n%s", calm, storm)
	}
}
