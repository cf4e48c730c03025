package roce

import (
	"fmt"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Suspension and resumption packet by packet: the test answers the faults.

// stuck makes b's faults wait until answer is called, and its pages at absent.
func (n *node) stuck(absent ...uint64) {
	n.service = func() int64 { return -1 }
	n.paging(1, 0, 0)
	for _, va := range absent {
		n.absent(2, va)
	}
}

func (n *node) absent(key translate.Key, va uint64) {
	n.pages[pageID{key, va / pageBytes}] = guestAbsent
}

// present makes all pages present without answering a fault.
func (n *node) present() { clear(n.pages) }

// answer serves the fault of side.
func (n *node) answer(side Side, ok bool) {
	n.f.t.Helper()
	if n.open[side] == nil {
		n.f.t.Fatalf("%s: no fault waits on side %d", n.name, side)
	}
	if ok {
		n.present()
	}
	n.open[side](ok)
}

// noFault fails if a fault is outstanding.
func (n *node) noFault() {
	n.f.t.Helper()
	if n.busy != [2]bool{} {
		n.f.t.Fatalf("%s: faults are outstanding: %v", n.name, n.busy)
	}
}

// wantWait fails unless side waits for va; 0: it waits for nothing.
func (n *node) wantWait(side Side, va uint64) {
	n.f.t.Helper()
	m, queue := n.q.Waits(side)
	if queue || m.OK() != (va == 0) || uint64(m.VA) != va {
		n.f.t.Fatalf("%s: side %d waits for %+v (queue: %v), want %#x", n.name, side, m, queue, va)
	}
}

// watched fails if the requester has requests and nothing that continues with them. For those in flight it needs a
// timer, because their answers may be lost.
func (n *node) watched() {
	q := n.q
	if n.paused || n.hostile || n.run || q.scheduled || q.typ != RC || !q.requesterActive() ||
		q.req.rnrUntil != 0 || q.req.stallUntil != 0 || q.faults.send.cause != waitNone {
		return
	}
	if q.req.sent > q.req.una && q.recovery.timeout != 0 && q.recovery.rtxAt == 0 ||
		q.req.sent == q.req.una && q.req.head != q.req.tail {
		n.f.t.Fatalf("%s waits for ever: %+v", n.name, q.req)
	}
}

// write is a WRITE of a peer that does not say what it does after RNR NAKs.
func write(psn uint32, va uint64, data string) craft {
	return craft{op: wire.OpRCWriteOnly, psn: psn, ack: true, key: 2, va: va, length: uint32(len(data)),
		data: []byte(data)}
}

func rnrOf(psn uint32, code wire.Syndrome) resp { return nakOf(psn, wire.SyndromeRNR|code) }

// The timer of an RNR NAK follows the expected service time, or the time already waited (PF-8); for a missing receive
// it is MinRNRTimer. When the page is present the sender gets an ACK of the requests done (PF-9).
func TestResponderRNR(t *testing.T) {
	o := opts()
	o.psnA, o.minRNR = 10, 7
	f, b, sent := lone(t, o)
	mem := b.reg(2, 0, 1<<16, allAccess)
	b.stuck(0x1000)
	b.waits = true
	b.inject(write(10, 0, "a"))
	b.wantResp(sent, ackOf(10))
	b.inject(write(11, 0x1000, "b"))
	b.inject(write(12, 0, "c")) // behind it: dropped
	b.wantResp(sent, rnrOf(11, 9))
	for _, x := range []struct {
		after int64
		code  wire.Syndrome
	}{{100e3, 9}, {200e3, 10}, {5e6, 19}, {400e6, 31}, {2e9, 0}} {
		f.now += x.after
		b.inject(write(11, 0x1000, "b"))
		b.inject(write(12, 0, "c"))
		b.wantResp(sent, rnrOf(11, x.code))
	}
	if b.raised[Responder] != 1 {
		t.Errorf("%d faults raised", b.raised[Responder])
	}
	b.answer(Responder, true)
	b.wantResp(sent, ackOf(10))
	b.inject(write(11, 0x1000, "b"))
	b.wantResp(sent, ackOf(11))
	if mem.buf[0x1000] != 'b' {
		t.Error("the WRITE was not executed")
	}
	send := craft{op: wire.OpRCSendOnly, psn: 12, ack: true, data: []byte{1}}
	b.inject(send)
	b.wantResp(sent, rnrOf(12, 7))
	b.noFault()
	b.delay = 3e6
	b.postRecv(sge(2, 0x2000, 8))
	b.absent(2, 0x2000)
	b.inject(send)
	b.wantResp(sent, rnrOf(12, 17))
	b.answer(Responder, true)
	b.wantResp(sent, ackOf(11))
	b.inject(send)
	b.wantResp(sent, ackOf(12))
	b.wantRecvs(0)
	b.delay = -1 // no service time was measured yet
	b.absent(2, 0x1000)
	b.inject(write(13, 0x1000, "b"))
	b.wantResp(sent, rnrOf(13, 16))
	if s := b.q.Stats(); s.FaultDrops != 8 || s.Resumed != 2 || s.TxRNR != 9 {
		t.Errorf("%+v", *s)
	}
}

// A fault is served before its RNR NAK was sent: the NAK must still be sent, because the packet was dropped, with the
// shortest timer. An ACK must not name the PSN of a READ but the newest WRITE before it.
func TestResponderRNRLate(t *testing.T) {
	o := opts()
	o.psnA = 10
	_, b, sent := lone(t, o)
	b.reg(2, 0, 1<<16, allAccess)
	b.stuck(0x1000)
	b.waits = true
	b.inject(write(10, 0x1000, "a"))
	b.answer(Responder, true)
	b.wantResp(sent, rnrOf(10, 1))
	b.inject(write(10, 0x1000, "a"))
	b.inject(craft{op: wire.OpRCReadRequest, psn: 11, key: 2, va: 0, length: 8})
	b.wantResp(sent, resp{wire.OpRCReadResponseOnly, 11, wire.NoCredits})
	b.absent(2, 0x1000)
	b.inject(write(12, 0x1000, "a"))
	b.wantResp(sent, rnrOf(12, 9))
	b.answer(Responder, true)
	b.wantResp(sent, ackOf(10))
}

// A READ waits for its page without a message (PF-10). Requests before it are acknowledged, requests behind it execute.
// If its requester repeats it, it gets an RNR NAK.
func TestResponderReadWaits(t *testing.T) {
	o := opts()
	o.psnA, o.mtu = 10, 3 // 1024 bytes
	f, b, sent := lone(t, o)
	mem := b.reg(2, 0, 1<<16, allAccess)
	b.stuck(0x1400)
	b.waits = true
	read := func(psn uint32, va uint64, n uint32) craft {
		return craft{op: wire.OpRCReadRequest, psn: psn, key: 2, va: va, length: n}
	}
	b.inject(write(10, 0, "a"))
	b.inject(read(11, 0x1000, 3000)) // 11, 12, 13: the second page is absent
	b.inject(write(14, 0, "b"))
	b.inject(read(15, 0, 10))
	b.wantResp(sent, resp{wire.OpRCReadResponseFirst, 11, wire.NoCredits})
	if mem.buf[0] != 'b' {
		t.Error("a WRITE behind the READ was not executed")
	}
	f.now += 30e6
	b.inject(read(12, 0x1400, 1976))
	b.inject(write(14, 0, "b"))
	b.inject(read(15, 0, 10))
	b.wantResp(sent, rnrOf(12, 23))
	b.answer(Responder, true)
	b.wantResp(sent, resp{wire.OpRCReadResponseMid, 12, wire.NoCredits},
		resp{wire.OpRCReadResponseLast, 13, wire.NoCredits},
		resp{wire.OpRCReadResponseOnly, 15, wire.NoCredits}) // acknowledges the WRITE before it, too

	// The first page of a READ is absent: the WRITE before it gets its ACK without waiting.
	b.absent(2, 0x2000)
	b.inject(write(16, 0, "c"))
	b.inject(read(17, 0x2000, 8))
	b.wantResp(sent, ackOf(16))
	// A lost ACK is requested again.
	b.inject(write(16, 0, "c"))
	b.wantResp(sent, ackOf(16))
	b.inject(read(17, 0x2000, 8))
	b.wantResp(sent, rnrOf(17, 9))
	b.answer(Responder, true)
	b.wantResp(sent, resp{wire.OpRCReadResponseOnly, 17, wire.NoCredits})

	// A lost ACK is requested again while a request behind the READ has been executed.
	b.inject(write(18, 0, "d"))
	b.wantResp(sent, ackOf(18))
	b.absent(2, 0x2000)
	b.inject(read(19, 0x2000, 8))
	b.inject(write(20, 0, "e"))
	b.inject(write(18, 0, "d"))
	b.wantResp(sent, ackOf(18))
	b.answer(Responder, true)
	b.wantResp(sent, resp{wire.OpRCReadResponseOnly, 19, wire.NoCredits}, ackOf(20))

	// After another READ there is nothing to acknowledge.
	b.absent(2, 0x2000)
	b.inject(read(21, 0x2000, 8))
	b.inject(write(22, 0x5000, "z")) // behind it, and absent as well: RNR NAK when the READ is answered
	b.absent(2, 0x5000)
	b.inject(write(22, 0x5000, "z"))
	b.wantResp(sent)
	b.noFaultBut(Responder)
}

func (n *node) noFaultBut(s Side) {
	n.f.t.Helper()
	if n.open[s] == nil || n.open[1-s] != nil {
		n.f.t.Fatalf("%s: faults %v", n.name, n.busy)
	}
}

// A READ and the WRITE behind it miss: one fault at a time, the second right after the first, and the messages in
// order.
func TestResponderTwoWaits(t *testing.T) {
	o := opts()
	o.psnA = 10
	_, b, sent := lone(t, o)
	b.reg(2, 0, 1<<16, allAccess)
	b.stuck(0x1000, 0x5000)
	b.waits = true
	b.wantWait(Responder, 0)
	b.inject(craft{op: wire.OpRCReadRequest, psn: 10, key: 2, va: 0x1000, length: 8})
	b.wantResp(sent)
	b.inject(write(11, 0x5000, "z"))
	b.wantResp(sent)
	b.wantWait(Responder, 0x1000) // the requested page
	delete(b.pages, pageID{2, 0x1000 / pageBytes})
	b.open[Responder](true)
	if b.raised[Responder] != 2 || b.asked[1].VA != 0x5000 {
		t.Fatalf("raised %v", b.asked)
	}
	b.wantWait(Responder, 0x5000)
	b.wantResp(sent, resp{wire.OpRCReadResponseOnly, 10, wire.NoCredits}, rnrOf(11, 9))
	b.answer(Responder, true)
	b.wantResp(sent, ackOf(9)) // never the READ's PSN
	b.inject(write(11, 0x5000, "z"))
	b.wantResp(sent, ackOf(11))
	b.noFault()
	b.wantWait(Responder, 0)
	// Conversely: a WRITE waits, and a READ is repeated.
	b.absent(2, 0x5000)
	b.absent(2, 0x1000)
	b.inject(write(12, 0x5000, "z"))
	b.wantResp(sent, rnrOf(12, 9))
	b.inject(craft{op: wire.OpRCReadRequest, psn: 10, key: 2, va: 0x1000, length: 8})
	b.wantResp(sent)
	b.wantWait(Responder, 0x5000)
	b.wantWait(Requester, 0)
	delete(b.pages, pageID{2, 0x5000 / pageBytes})
	b.open[Responder](true)
	b.wantResp(sent) // the ACK waits behind the READ
	b.answer(Responder, true)
	b.wantResp(sent, resp{wire.OpRCReadResponseOnly, 10, wire.NoCredits}, ackOf(11))
}

// An atomic waits without a message and executes once (PF-10); nothing overtakes it.
func TestResponderAtomicWaits(t *testing.T) {
	o := opts()
	o.psnA = 10
	_, b, sent := lone(t, o)
	mem := b.reg(2, 0, 1<<16, allAccess)
	clear(mem.buf)
	b.stuck(0x1000)
	b.waits = true
	add := func(psn uint32) craft { return craft{op: wire.OpRCFetchAdd, psn: psn, key: 2, va: 0x1000, swap: 5} }
	b.inject(add(10))
	b.wantResp(sent)
	b.answer(Responder, true)
	b.wantResp(sent, resp{wire.OpRCAtomicAck, 10, wire.NoCredits})

	b.absent(2, 0x1000)
	b.inject(add(11))
	b.inject(write(12, 0, "x"))
	b.inject(write(13, 0, "x"))
	b.wantResp(sent, rnrOf(11, 9))
	b.inject(add(11))
	b.wantResp(sent, rnrOf(11, 9))
	if mem.buf[0] == 'x' {
		t.Error("a WRITE overtook an atomic")
	}
	b.answer(Responder, true)
	b.wantResp(sent, resp{wire.OpRCAtomicAck, 11, wire.NoCredits})
	b.inject(write(12, 0, "x"))
	b.wantResp(sent, ackOf(12))

	// Served before the NAK for the requests behind it was sent.
	b.absent(2, 0x1000)
	b.inject(add(13))
	b.inject(write(14, 0, "y"))
	b.answer(Responder, true)
	b.wantResp(sent, resp{wire.OpRCAtomicAck, 13, wire.NoCredits}, rnrOf(14, 1))
	b.inject(write(14, 0, "y"))
	b.wantResp(sent, ackOf(14))
	if b.atomics != 3 || mem.buf[0x1000] != 15 {
		t.Errorf("%d atomics, sum %d", b.atomics, mem.buf[0x1000])
	}

	// An ATOMIC WRITE behaves the same.
	b.absent(2, 0x1000)
	b.inject(craft{op: wire.OpRCAtomicWrite, psn: 15, key: 2, va: 0x1000, length: 8, data: []byte("12345678")})
	b.inject(write(16, 0, "z"))
	b.wantResp(sent, rnrOf(15, 9))
	b.answer(Responder, true)
	b.wantResp(sent, resp{wire.OpRCReadResponseOnly, 15, wire.NoCredits})
	same(t, "memory", mem.buf[0x1000:0x1008], []byte("12345678"))
}

// A fault requests the bytes that will be needed, as far as the transport can know.
func TestFaultLengths(t *testing.T) {
	const mib = 1 << 20
	for _, x := range []struct {
		name string
		w    WQE
		recv int
		a, b []uint64 // requested lengths at each side, in order
	}{
		{"write", WQE{Opcode: WRWrite, RKey: 2, RemoteVA: 0x400,
			SGEs: []SGE{sge(2, 0x800, 3000), sge(2, 0x4000, 2000)}}, 0, []uint64{3000, 2000}, []uint64{5000}},
		{"large write", WQE{Opcode: WRWrite, RKey: 2, RemoteVA: 0, SGEs: []SGE{sge(2, 0, 2*mib)}}, 0,
			[]uint64{mib, mib}, []uint64{mib, mib}},
		{"read", WQE{Opcode: WRRead, RKey: 2, RemoteVA: 0x400, SGEs: []SGE{sge(2, 0, 8), sge(2, 0x4000, 6000)}}, 0,
			[]uint64{8, 6000}, []uint64{6008}},
		{"send", WQE{Opcode: WRSend, SGEs: []SGE{sge(2, 0, 2000)}}, 20000, []uint64{2000}, []uint64{20000}},
		{"short send", WQE{Opcode: WRSend, SGEs: []SGE{sge(2, 0, 200)}}, 20000, []uint64{200}, []uint64{200}},
		{"atomic", WQE{Opcode: WRFetchAdd, RKey: 2, RemoteVA: 0x400, SGEs: []SGE{sge(2, 0x400, 8)}}, 0, []uint64{8},
			[]uint64{8}},
		{"atomic write", WQE{Opcode: WRAtomicWrite, RKey: 2, RemoteVA: 0x400, SGEs: []SGE{sge(2, 0x400, 8)}}, 0,
			[]uint64{8}, []uint64{8}},
	} {
		t.Run(x.name, func(t *testing.T) {
			f := newFabric(t, 1)
			a, b := f.pair(opts())
			for _, n := range []*node{a, b} {
				n.reg(2, 0, 3*mib, allAccess)
				n.paging(1, 0, 0)
				for i := range uint64(3 * mib / pageBytes) {
					n.pages[pageID{2, i}] = guestAbsent
				}
				n.whole = true
			}
			if x.recv > 0 {
				b.postRecv(sge(2, 0x2000, x.recv))
			}
			a.post(x.w)
			f.until(x.name, 10e9, func() bool { return len(a.sends) == 1 })
			a.wantSends(0)
			lengths := func(n *node) (l []uint64) {
				for _, m := range n.asked {
					l = append(l, m.Len)
				}
				return
			}
			if got, want := fmt.Sprint(lengths(a), lengths(b)), fmt.Sprint(x.a, x.b); got != want {
				t.Errorf("requested %s, want %s", got, want)
			}
		})
	}
}
