package roce

import (
	"bytes"
	"testing"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Hand-made packets: the test plays the other side.

type craft struct {
	op     wire.Opcode
	psn    uint32
	ack    bool
	se     bool
	pkey   uint16
	qpn    uint32
	qkey   uint32
	srcqp  uint32
	va     uint64
	key    uint32
	length uint32
	swap   uint64
	cmp    uint64
	syn    wire.Syndrome
	orig   uint64
	inv    uint32
	imm    [4]byte
	data   []byte
	av     *AddressVector
	feth   wire.FETH
	tos    uint8
	sel    bool
	wait   wire.Patience
	there  wire.Arrivals
}

// frame encodes c as a frame from the peer of n.
func (n *node) frame(c craft) []byte {
	n.f.t.Helper()
	a := n.q.attr.AV
	if c.av != nil {
		a = *c.av
	}
	p := wire.Path{SMAC: a.DMAC, DMAC: a.SMAC, VLAN: a.VLAN, V1: a.RoCEv1, SrcIP: a.DGID, DstIP: a.SGID,
		TrafficClass: c.tos, SrcPort: 0xc123}
	t, err := p.Template()
	if err != nil {
		n.f.t.Fatal(err)
	}
	info := c.op.Info()
	pad := -len(c.data) & 3
	if !info.Valid() {
		pad = 0
	}
	transport := wire.BTHLen + int(info.ExtLen) + len(c.data) + pad + wire.ICRCLen
	f := make([]byte, t.Len()+transport)
	o := t.Put(f, transport)
	if c.pkey == 0 {
		c.pkey = 0xffff
	}
	if c.qpn == 0 {
		c.qpn = n.q.QPN()
	}
	h := wire.BTH{Opcode: c.op, PSN: c.psn & psnMask, AckReq: c.ack, Selective: c.sel, Solicited: c.se, PKey: c.pkey,
		DestQP: c.qpn, Pad: uint8(pad), Patience: c.wait}
	o += h.Encode(f[o:])
	if info.Is(wire.HasDETH) {
		h := wire.DETH{QKey: c.qkey, SrcQP: c.srcqp}
		o += h.Encode(f[o:])
	}
	if info.Is(wire.HasFETH) {
		o += c.feth.Encode(f[o:])
	}
	if info.Is(wire.HasRETH) {
		h := wire.RETH{VA: c.va, RKey: c.key, Length: c.length}
		o += h.Encode(f[o:])
	}
	if info.Is(wire.HasAtomic) {
		h := wire.AtomicETH{VA: c.va, RKey: c.key, SwapAdd: c.swap, Compare: c.cmp}
		o += h.Encode(f[o:])
	}
	if info.Is(wire.HasAETH) {
		h := wire.AETH{Syndrome: c.syn}
		o += h.Encode(f[o:])
	}
	if info.Is(wire.HasAtomicAck) {
		o += wire.PutAtomicAck(f[o:], c.orig)
	}
	if info.Is(wire.HasArrivals) {
		o += c.there.Encode(f[o:])
	}
	if info.Is(wire.HasImm) {
		o += wire.PutImm(f[o:], c.imm)
	}
	if info.Is(wire.HasIETH) {
		o += wire.PutIETH(f[o:], c.inv)
	}
	copy(f[o:], c.data)
	t.Seal(f)
	return f
}

// inject delivers c to n at once and runs n.
func (n *node) inject(c craft) {
	n.f.t.Helper()
	n.receive(n.frame(c))
}

// receive hands a frame to n's QP.
func (n *node) receive(fr []byte) {
	n.f.t.Helper()
	var p wire.RoCE
	if err := wire.ParseRoCE(fr, header.Locate(fr), &p); err != nil {
		n.f.t.Fatalf("frame %x: %v", fr, err)
	}
	n.f.frame = fr
	leave := n.enter()
	n.q.Receive(n.f.now, &p)
	leave()
}

// lone returns QP b, whose peer is the test; sent collects its packets.
func lone(t testing.TB, o pairOpt) (f *fabric, b *node, sent *[]wire.RoCE) {
	f = newFabric(t, 1)
	b = f.node("b", Config{Type: o.typ, QPN: 0x22, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInline: 64, MaxRdAtomic: 16,
		HasSRQ: o.srq, ECN: true, SelectiveRepeat: true})
	b.connect(&o, 0x11, o.avB, o.psnA, o.psnB)
	sent = new([]wire.RoCE)
	b.onTx = func(p *wire.RoCE, frame []byte) bool {
		*sent = append(*sent, *p)
		return true
	}
	return f, b, sent
}

// runAll runs b until nothing is due, without advancing the clock.
func (n *node) runAll() {
	for i := 0; n.run; i++ {
		if i > 100000 {
			n.f.t.Fatal("the QP does not come to rest")
		}
		n.run = false
		leave := n.enter()
		n.run = n.q.Run(n.f.now, 64) || n.run
		leave()
	}
}

type resp struct {
	op  wire.Opcode
	psn uint32
	syn wire.Syndrome
}

func (n *node) wantResp(sent *[]wire.RoCE, want ...resp) {
	n.f.t.Helper()
	n.runAll()
	ok := len(*sent) == len(want)
	for i := range min(len(*sent), len(want)) {
		p := &(*sent)[i]
		syn := wire.NoCredits
		if p.Info.Is(wire.HasAETH) {
			syn = p.AETH().Syndrome
		}
		ok = ok && p.BTH.Opcode == want[i].op && p.BTH.PSN == want[i].psn&psnMask && syn == want[i].syn
	}
	if !ok {
		for _, p := range *sent {
			n.f.t.Logf("sent %v psn %#x syndrome %#x", p.BTH.Opcode, p.BTH.PSN, p.AETH().Syndrome)
		}
		n.f.t.Fatalf("want %+v", want)
	}
	*sent = nil
}

func ackOf(psn uint32) resp { return resp{wire.OpRCAck, psn, wire.NoCredits} }
func nakOf(psn uint32, s wire.Syndrome) resp {
	return resp{wire.OpRCAck, psn, s}
}

func TestResponderSequence(t *testing.T) {
	o := opts()
	o.psnA = 0xfffffe
	f, b, sent := lone(t, o)
	mem := b.reg(2, 0, 1<<16, allAccess)
	w := func(psn uint32, data string) craft {
		return craft{op: wire.OpRCWriteOnly, psn: psn, ack: true, key: 2, va: uint64(psn & 0xff),
			length: uint32(len(data)), data: []byte(data)}
	}
	// In order; two packets before Run get one acknowledgement.
	b.inject(w(0xfffffe, "a"))
	b.inject(w(0xffffff, "b"))
	b.wantResp(sent, ackOf(0xffffff))
	// The PSN wraps; a gap gets one NAK, however much follows.
	b.inject(w(2, "x"))
	b.inject(w(1, "y"))
	b.wantResp(sent, nakOf(0, wire.NAKSequence))
	b.inject(w(3, "x"))
	b.wantResp(sent)
	// Duplicates are acknowledged, not executed.
	mem.buf[0xfe] = '!'
	b.inject(w(0xfffffe, "Z"))
	b.wantResp(sent, ackOf(0xffffff))
	if mem.buf[0xfe] != '!' {
		t.Error("a duplicate WRITE was executed")
	}
	// The expected packet ends the gap; the next gap gets a NAK again.
	b.inject(w(0, "c"))
	b.inject(w(2, "x"))
	b.wantResp(sent, nakOf(1, wire.NAKSequence))
	// AckReq not set: no acknowledgement.
	c := w(1, "d")
	c.ack = false
	b.inject(c)
	b.wantResp(sent)
	_ = f
}

func TestResponderReadReplay(t *testing.T) {
	o := opts()
	o.mtu, o.psnA, o.destRd = 1, 10, 2 // 256 bytes
	_, b, sent := lone(t, o)
	mem := b.reg(2, 0x1000, 1<<16, allAccess)
	first := func(p uint32) resp { return resp{wire.OpRCReadResponseFirst, p, wire.NoCredits} }
	mid := func(p uint32) resp { return resp{wire.OpRCReadResponseMid, p, wire.NoCredits} }
	last := func(p uint32) resp { return resp{wire.OpRCReadResponseLast, p, wire.NoCredits} }
	only := func(p uint32) resp { return resp{wire.OpRCReadResponseOnly, p, wire.NoCredits} }
	read := func(psn uint32, va uint64, n uint32) craft {
		return craft{op: wire.OpRCReadRequest, psn: psn, key: 2, va: va, length: n}
	}
	b.inject(read(10, 0x1000, 1000)) // 10..13
	b.inject(craft{op: wire.OpRCWriteOnly, psn: 14, ack: true, key: 2, va: 0x5000, length: 1, data: []byte{1}})
	b.inject(read(15, 0x2000, 0))
	// Responses in order; the READ at 15 acknowledges the WRITE before it.
	b.wantResp(sent, first(10), mid(11), mid(12), last(13), only(15))
	// Partial repetitions: from the middle, the whole, the end, the beginning.
	b.inject(read(12, 0x1200, 488))
	b.wantResp(sent, first(12), last(13))
	b.inject(read(10, 0x1000, 1000))
	b.wantResp(sent, first(10), mid(11), mid(12), last(13))
	b.inject(read(13, 0x1300, 232))
	b.wantResp(sent, only(13))
	b.inject(read(10, 0x1000, 512))
	b.wantResp(sent, first(10), last(11))
	// A different request gets no answer.
	for _, c := range []craft{read(10, 0x1001, 1000), read(10, 0x1000, 1001), read(11, 0x1000, 256),
		read(10, 0x1000, 100),
		{op: wire.OpRCReadRequest, psn: 10, key: 3, va: 0x1000, length: 1000}, read(9, 0x1000, 100),
		read(14, 0x1000, 100),
		{op: wire.OpRCFetchAdd, psn: 10, key: 2, va: 0x1000}} {
		b.inject(c)
	}
	b.wantResp(sent)
	// A duplicate during the original's responses does not restart them.
	b.inject(read(16, 0x3000, 600)) // 16..18
	b.inject(read(16, 0x3000, 600))
	b.wantResp(sent, first(16), mid(17), last(18))
	// Forgotten: two are remembered, 10 is the third.
	b.inject(read(10, 0x1000, 1000))
	b.wantResp(sent)
	// A duplicate WRITE is acknowledged with the newest WRITE's PSN, never with a READ's.
	b.inject(craft{op: wire.OpRCWriteOnly, psn: 14, ack: true, key: 2, va: 0x5000, length: 1, data: []byte{9}})
	b.wantResp(sent, ackOf(14))
	if mem.buf[0x4000] != 1 {
		t.Error("duplicate executed")
	}
	// The key is gone when the repetition arrives: NAK, but the connection stays, because the requester may have
	// received its answer. A new READ ends it.
	delete(b.regions, 2)
	b.inject(read(17, 0x3100, 344))
	b.wantResp(sent, nakOf(17, wire.NAKRemoteAccess))
	b.wantState(RTS)
	b.inject(read(19, 0x3100, 344))
	b.wantResp(sent, nakOf(19, wire.NAKRemoteAccess))
	b.wantState(Err)
	b.wantEvents(EventAccessErr)
}

// A repetition that arrives during the response restarts it at the requested PSN if that part was already sent.
// Responses of a later READ stay behind it.
func TestResponderReadReplayUnderWay(t *testing.T) {
	o := opts()
	o.mtu, o.psnA, o.destRd = 1, 10, 2
	_, b, sent := lone(t, o)
	b.reg(2, 0x1000, 1<<16, allAccess)
	read := func(psn uint32, va uint64, n uint32) craft {
		return craft{op: wire.OpRCReadRequest, psn: psn, key: 2, va: va, length: n}
	}
	r := func(op wire.Opcode, psn uint32) resp { return resp{op, psn, wire.NoCredits} }
	b.inject(read(10, 0x1000, 1024)) // 10..13
	b.inject(read(14, 0x1000, 8))
	b.q.Run(b.f.now, 6) // 6 responses' budget: 10, 11, 12
	b.inject(read(11, 0x1100, 768))
	b.wantResp(sent, r(wire.OpRCReadResponseFirst, 10), r(wire.OpRCReadResponseMid, 11),
		r(wire.OpRCReadResponseMid, 12),
		r(wire.OpRCReadResponseFirst, 11), r(wire.OpRCReadResponseMid, 12), r(wire.OpRCReadResponseLast, 13),
		r(wire.OpRCReadResponseOnly, 14))
}

// A late copy of an answered READ or atomic must not block the next one: with max_dest_rd_atomic 1 both need the same
// resource.
func TestResponderReplayGivesWay(t *testing.T) {
	o := opts()
	o.mtu, o.psnA, o.destRd = 1, 10, 1
	_, b, sent := lone(t, o)
	b.reg(2, 0x1000, 1<<16, allAccess)
	read := func(psn uint32, n uint32) craft {
		return craft{op: wire.OpRCReadRequest, psn: psn, key: 2, va: 0x1000, length: n}
	}
	add := func(psn uint32) craft {
		return craft{op: wire.OpRCFetchAdd, psn: psn, key: 2, va: 0x1000, swap: 1}
	}
	r := func(op wire.Opcode, psn uint32) resp { return resp{op, psn, wire.NoCredits} }
	b.inject(read(10, 512))
	b.wantResp(sent, r(wire.OpRCReadResponseFirst, 10), r(wire.OpRCReadResponseLast, 11))
	b.inject(read(10, 512))
	b.inject(add(12))
	b.wantResp(sent, r(wire.OpRCAtomicAck, 12))
	b.inject(add(12))
	b.inject(read(13, 8))
	b.wantResp(sent, r(wire.OpRCReadResponseOnly, 13))
	// Also while the repetition is being sent; but not while the first response is.
	b.inject(read(14, 1024)) // 14..17
	b.runAll()
	*sent = nil
	b.inject(read(14, 1024))
	b.q.Run(b.f.now, 4)
	b.inject(read(18, 1024)) // 18..21
	b.wantResp(sent, r(wire.OpRCReadResponseFirst, 14), r(wire.OpRCReadResponseMid, 15),
		r(wire.OpRCReadResponseFirst, 18), r(wire.OpRCReadResponseMid, 19), r(wire.OpRCReadResponseMid, 20),
		r(wire.OpRCReadResponseLast, 21))
	b.inject(read(22, 1024)) // 22..25
	b.q.Run(b.f.now, 4)
	*sent = nil
	b.inject(read(26, 8))
	b.runAll()
	b.wantState(Err)
	b.wantEvents(EventReqErr)
}

func TestResponderAtomicReplay(t *testing.T) {
	o := opts()
	o.psnA, o.destRd = psnMask, 2
	_, b, sent := lone(t, o)
	mem := b.reg(2, 0, 64, allAccess)
	clear(mem.buf)
	add := func(psn uint32) craft {
		return craft{op: wire.OpRCFetchAdd, psn: psn, key: 2, va: 8, swap: 5}
	}
	for i := range uint32(3) {
		b.inject(add(psnMask + i))
		b.runAll()
	}
	*sent = nil
	for range 3 {
		b.inject(add(0))
		b.runAll()
		b.inject(add(1))
		b.runAll()
	}
	b.inject(add(psnMask)) // forgotten
	b.runAll()
	if len(*sent) != 6 || b.atomics != 3 || mem.buf[8] != 15 {
		t.Fatalf("%d responses, %d executed, memory %d", len(*sent), b.atomics, mem.buf[8])
	}
	for i, p := range *sent {
		if p.BTH.Opcode != wire.OpRCAtomicAck || p.BTH.PSN != uint32(i%2) || p.AtomicAck() != uint64(5+5*(i%2)) {
			t.Errorf("replay %d: %v psn %d original %d", i, p.BTH.Opcode, p.BTH.PSN, p.AtomicAck())
		}
	}
}

// An ATOMIC WRITE is executed once; its duplicates get the original's response.
func TestResponderAtomicWriteReplay(t *testing.T) {
	o := opts()
	o.psnA, o.destRd = 0, 2
	_, b, sent := lone(t, o)
	mem := b.reg(2, 0, 64, translate.RemoteWrite)
	put := func(psn uint32, v string) craft {
		return craft{op: wire.OpRCAtomicWrite, psn: psn, key: 2, va: 8, length: 8, data: []byte(v)}
	}
	b.inject(put(0, "original"))
	b.runAll()
	b.inject(put(1, "another.")) // by the application
	b.runAll()
	b.inject(put(0, "original"))
	b.runAll()
	only := func(psn uint32) resp { return resp{wire.OpRCReadResponseOnly, psn, wire.NoCredits} }
	for _, p := range *sent {
		if len(p.Payload) != 0 {
			t.Errorf("response with %d bytes", len(p.Payload))
		}
	}
	b.wantResp(sent, only(0), only(1), only(0))
	same(t, "memory", mem.buf[8:16], []byte("another."))
	// Not duplicates: other requests with the PSN of one.
	b.inject(craft{op: wire.OpRCReadRequest, psn: 1, key: 2, va: 8})
	b.inject(craft{op: wire.OpRCFetchAdd, psn: 1, key: 2, va: 8})
	b.wantResp(sent)
	if b.atomics != 2 {
		t.Errorf("%d executed", b.atomics)
	}
}

// Too many READs and atomics at once are an invalid request (IBTA 9.7.4.1.7...).
func TestResponderTooManyReads(t *testing.T) {
	o := opts()
	o.psnA, o.destRd = 0, 2
	_, b, sent := lone(t, o)
	b.reg(2, 0, 4096, allAccess)
	for i := range uint32(3) {
		b.inject(craft{op: wire.OpRCReadRequest, psn: i, key: 2, length: 8})
	}
	b.wantResp(sent, resp{wire.OpRCReadResponseOnly, 0, wire.NoCredits},
		resp{wire.OpRCReadResponseOnly, 1, wire.NoCredits}, nakOf(2, wire.NAKInvalidRequest))
	b.wantState(Err)
}

// FLUSHes and ATOMIC WRITEs, which some requesters do not count, need no resource of max_dest_rd_atomic. Old ones are
// answered although they are no longer remembered, and not executed.
func TestResponderUncounted(t *testing.T) {
	o := opts()
	o.psnA, o.destRd = 0, 1
	o.access |= translate.FlushGlobal
	_, b, sent := lone(t, o)
	mem := b.reg(2, 0, 4096, allAccess|translate.FlushGlobal)
	put := func(psn uint32, v byte) craft {
		return craft{op: wire.OpRCAtomicWrite, psn: psn, key: 2, va: 8, length: 8, data: bytes.Repeat([]byte{v}, 8)}
	}
	flush := func(psn uint32) craft {
		return craft{op: wire.OpRCFlush, psn: psn, key: 2, length: 64, feth: wire.FETH{Placement: wire.FlushGlobal}}
	}
	write := func(psn uint32) craft {
		return craft{op: wire.OpRCWriteOnly, psn: psn, key: 2, va: 64, length: 4, data: []byte("data")}
	}
	only := func(psn uint32) resp { return resp{wire.OpRCReadResponseOnly, psn, wire.NoCredits} }
	var want []resp
	psn := uint32(0)
	for ; psn < psnSetSpan-1; psn += 3 { // a PSN between two of them is acknowledged by the second
		b.inject(write(psn))
		b.inject(flush(psn + 1))
		b.inject(put(psn+2, byte(psn)))
		want = append(want, only(psn+1), only(psn+2))
	}
	b.wantResp(sent, want...)
	same(t, "memory", mem.buf[8:16], bytes.Repeat([]byte{byte(psn - 3)}, 8))
	// Their number is bounded: beyond it a request counts as lost.
	want = nil
	for i := range uint32(psnSetSpan) {
		b.inject(flush(psn + i))
		want = append(want, only(psn+i))
	}
	psn += psnSetSpan
	b.inject(flush(psn))
	b.wantResp(sent, append(want, nakOf(psn, wire.NAKSequence))...)
	executed := b.atomics
	for _, i := range []uint32{5, 2, 10} {
		b.inject(put(i, 99))
	}
	b.inject(flush(4))
	b.wantResp(sent, only(2), only(4), only(5), only(10))
	if b.atomics != executed {
		t.Errorf("%d executed again", b.atomics-executed)
	}

	// They evict no resource, and are answered in order with remembered ones.
	add := craft{op: wire.OpRCFetchAdd, psn: psn, key: 2, va: 64, swap: 1}
	b.inject(flush(psn - 1))
	b.inject(add)
	b.inject(flush(psn + 1))
	b.inject(put(psn+2, 1))
	b.inject(flush(psn - 2))
	atomic := resp{wire.OpRCAtomicAck, psn, wire.NoCredits}
	b.wantResp(sent, only(psn-2), only(psn-1), atomic, only(psn+1), only(psn+2))
	b.inject(add)
	b.wantResp(sent, atomic)
	if b.atomics != executed+2 {
		t.Errorf("%d executed, not once each", b.atomics-executed)
	}
}

// A key invalidated between the packets of a WRITE with immediate data is a local access error of the receive (11.6.2).
func TestResponderImmAccess(t *testing.T) {
	o := opts()
	o.psnA = 0
	_, b, sent := lone(t, o)
	b.reg(2, 0, 4096, allAccess)
	b.postRecv()
	b.inject(craft{op: wire.OpRCWriteFirst, psn: 0, key: 2, length: 1030, data: make([]byte, 1024)})
	delete(b.regions, 2)
	b.inject(craft{op: wire.OpRCWriteLastImm, psn: 1, data: make([]byte, 6)})
	b.wantResp(sent, nakOf(1, wire.NAKRemoteAccess))
	b.wantRecvs(StatusLocAccess)
	b.wantEvents(EventAccessErr)
	b.wantState(Err)
}

// Opcode sequence and packet length (IBTA 9.7.4.1): each violation is an invalid request and changes no memory.
func TestResponderInvalid(t *testing.T) {
	mtu := make([]byte, 1024)
	long := make([]byte, 1028)
	first := craft{op: wire.OpRCSendFirst, data: mtu}
	wfirst := craft{op: wire.OpRCWriteFirst, key: 2, length: 3000, data: mtu}
	for name, seq := range map[string][]craft{
		"middle without first":          {{op: wire.OpRCSendMiddle, data: mtu}},
		"last without first":            {{op: wire.OpRCSendLast, data: mtu}},
		"write middle without first":    {{op: wire.OpRCWriteMiddle, data: mtu}},
		"first after first":             {first, first},
		"only within a message":         {first, {op: wire.OpRCSendOnly}},
		"read within a message":         {first, {op: wire.OpRCReadRequest, key: 2, length: 8}},
		"atomic within a message":       {wfirst, {op: wire.OpRCFetchAdd, key: 2}},
		"atomic write within a message": {wfirst, {op: wire.OpRCAtomicWrite, key: 2, length: 8, data: mtu[:8]}},
		"atomic write of 4 bytes":       {{op: wire.OpRCAtomicWrite, key: 2, length: 4, data: mtu[:4]}},
		"atomic write, lengths differ":  {{op: wire.OpRCAtomicWrite, key: 2, length: 8, data: mtu[:16]}},
		"atomic write, RETH too long":   {{op: wire.OpRCAtomicWrite, key: 2, length: 16, data: mtu[:8]}},
		"write within a send":           {first, {op: wire.OpRCWriteLast, data: mtu}},
		"send within a write":           {wfirst, {op: wire.OpRCSendLast, data: mtu}},
		"short first":                   {{op: wire.OpRCSendFirst, data: mtu[:1020]}},
		"long first":                    {{op: wire.OpRCSendFirst, data: long}},
		"short middle":                  {first, {op: wire.OpRCSendMiddle, data: mtu[:4]}},
		"empty last":                    {first, {op: wire.OpRCSendLast}},
		"long only":                     {{op: wire.OpRCSendOnly, data: long}},
		"write only, length differs":    {{op: wire.OpRCWriteOnly, key: 2, length: 9, data: mtu[:8]}},
		"write first, nothing left":     {{op: wire.OpRCWriteFirst, key: 2, length: 1024, data: mtu}},
		"write last, too short":         {wfirst, {op: wire.OpRCWriteLast, data: mtu}},
		"write middle, beyond": {wfirst, {op: wire.OpRCWriteMiddle, data: mtu},
			{op: wire.OpRCWriteMiddle, data: mtu}},
		"write of more than 2^31":        {{op: wire.OpRCWriteFirst, key: 2, length: 1<<31 + 1, data: mtu}},
		"read of more than 2^31":         {{op: wire.OpRCReadRequest, key: 2, length: 1<<31 + 1}},
		"write only with 0, length 2^32": {{op: wire.OpRCWriteOnly, key: 2, length: 1<<32 - 1}},
	} {
		t.Run(name, func(t *testing.T) {
			o := opts()
			o.psnA = 7
			_, b, sent := lone(t, o)
			mem := b.reg(2, 0, 8192, allAccess)
			for range 3 {
				b.postRecv(sge(2, 4096, 4096))
			}
			var before []byte
			for i, c := range seq {
				c.psn = 7 + uint32(i)
				before = append([]byte{}, mem.buf...)
				b.inject(c)
			}
			b.wantResp(sent, nakOf(7+uint32(len(seq)-1), wire.NAKInvalidRequest))
			same(t, "memory", mem.buf, before)
			b.wantState(Err)
			b.wantEvents(EventReqErr)
			// No further request is answered.
			b.inject(craft{op: wire.OpRCWriteOnly, psn: 7, ack: true})
			b.wantResp(sent)
			b.runAll()
			for _, r := range b.recvs {
				if r.c.Status != StatusRemInvReq && r.c.Status != StatusFlush {
					t.Error(r)
				}
			}
		})
	}
}

// TestAdmission: packets that differ from the peer's in any checked field are ignored.
func TestAdmission(t *testing.T) {
	o := opts()
	o.psnA = 0
	_, b, sent := lone(t, o)
	mem := b.reg(2, 0, 64, allAccess)
	before := append([]byte{}, mem.buf...)
	good := craft{op: wire.OpRCWriteOnly, ack: true, key: 2, length: 4, data: []byte("evil")}
	alter := func(f func(*AddressVector)) *AddressVector {
		a := o.avB
		f(&a)
		return &a
	}
	for name, change := range map[string]func(*craft){
		"source IP":      func(c *craft) { c.av = alter(func(a *AddressVector) { a.DGID[15] = 9 }) },
		"destination IP": func(c *craft) { c.av = alter(func(a *AddressVector) { a.SGID[15] = 9 }) },
		"RoCE v1":        func(c *craft) { c.av = alter(func(a *AddressVector) { a.RoCEv1 = true }) },
		"VLAN":           func(c *craft) { c.av = alter(func(a *AddressVector) { a.VLAN = 5 }) },
		"P_Key":          func(c *craft) { c.pkey = 0x8001 },
		"UC":             func(c *craft) { c.op = wire.OpUCWriteOnly },
		"UD":             func(c *craft) { c.op = wire.OpUDSendOnly },
		"other QP":       func(c *craft) { c.qpn = 0x23 },
		"multicast QPN":  func(c *craft) { c.qpn = 0xffffff },
		"IPv6 of the same": func(c *craft) {
			c.av = alter(func(a *AddressVector) {
				a.DGID[0], a.SGID[0] = 0xfe,
					0xfe
			})
		},
	} {
		c := good
		change(&c)
		dropped := b.q.Stats().RxDropped
		b.inject(c)
		if b.q.Stats().RxDropped != dropped+1 {
			t.Errorf("%s: not dropped", name)
		}
	}
	b.wantResp(sent)
	same(t, "memory", mem.buf, before)
	// A limited P_Key member and a priority tag are accepted.
	c := good
	c.pkey = 0x7fff
	c.av = alter(func(a *AddressVector) { a.VLAN = 0 })
	b.inject(c)
	b.wantResp(sent, ackOf(0))
	b.wantState(RTS)
}

// TestRequesterResponses: invalid responses change nothing; valid ones are accepted in any order.
func TestRequesterResponses(t *testing.T) {
	o := opts()
	o.psnB, o.timeout = 0xfffffe, 0
	start := func() (*fabric, *node, *[]wire.RoCE) {
		f, b, sent := lone(t, o)
		b.reg(2, 0, 1<<16, allAccess)
		b.post(WQE{Opcode: WRWrite, SGEs: []SGE{sge(2, 0, 2500)}})      // fffffe, ffffff, 0
		b.post(WQE{Opcode: WRRead, SGEs: []SGE{sge(2, 0, 2048)}})       // 1, 2
		b.post(WQE{Opcode: WRFetchAdd, SGEs: []SGE{sge(2, 0x1000, 8)}}) // 3
		b.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(2, 0, 1)}})          // 4
		b.runAll()
		*sent = nil
		return f, b, sent
	}
	ack := func(psn uint32) craft { return craft{op: wire.OpRCAck, psn: psn, syn: wire.NoCredits} }
	rr := func(op wire.Opcode, psn uint32, n int) craft {
		return craft{op: op, psn: psn, syn: wire.NoCredits, data: make([]byte, n)}
	}
	at := craft{op: wire.OpRCAtomicAck, psn: 3, syn: wire.NoCredits, orig: 77}

	_, b, sent := start()
	// Ghosts, old responses, unknown syndromes; an ACK does not answer a READ or atomic.
	for _, c := range []craft{ack(0xfffffd), ack(5), ack(0x800000), {op: wire.OpRCAck, psn: 4, syn: 0x40},
		{op: wire.OpRCAck, psn: 4, syn: 0x80},
		{op: wire.OpRCAck, psn: 0xfffffe, syn: wire.NAKInvalidRD}} {
		b.inject(c)
	}
	b.wantResp(sent)
	b.wantSends()
	b.inject(ack(0xfffffe))
	b.wantSends()
	b.inject(ack(1)) // has the READ's PSN: acknowledges the WRITE only
	b.wantSends(0)
	b.inject(ack(1))
	b.inject(ack(2))
	b.wantSends(0)
	b.inject(rr(wire.OpRCReadResponseFirst, 1, 1024))
	b.inject(rr(wire.OpRCReadResponseLast, 2, 1024))
	b.wantSends(0, 0)
	b.inject(ack(3))
	b.wantSends(0, 0)
	b.inject(at)
	b.wantSends(0, 0, 0)
	b.inject(ack(4))
	b.wantSends(0, 0, 0, 0)
	b.inject(ack(4))
	b.inject(at)
	b.wantResp(sent)
	if b.regions[2].buf[0x1000] != 77 {
		t.Error("wrong atomic result")
	}

	// A READ response acknowledges the WRITE before it. Responses are placed by position: MIDDLE after MIDDLE or FIRST
	// after FIRST are accepted.
	_, b, sent = start()
	b.inject(rr(wire.OpRCReadResponseMid, 1, 1024))
	b.wantSends(0)
	b.inject(rr(wire.OpRCReadResponseOnly, 2, 1024))
	b.wantSends(0, 0)
	// The ACK of the SEND shows that the atomic's response was lost; this is counted once.
	b.inject(ack(4))
	b.wantResp(sent, resp{wire.OpRCFetchAdd, 3, wire.NoCredits}, resp{wire.OpRCSendOnly, 4, wire.NoCredits})
	b.inject(ack(4))
	b.wantResp(sent)
	b.inject(at)
	b.inject(ack(4))
	b.wantSends(0, 0, 0, 0)

	// A lost READ response: the rest is requested from there on.
	_, b, sent = start()
	b.inject(rr(wire.OpRCReadResponseLast, 2, 1024))
	b.wantSends(0)
	b.runAll()
	if p := (*sent)[0]; p.BTH.Opcode != wire.OpRCReadRequest || p.BTH.PSN != 1 || p.RETH().Length != 2048 {
		t.Errorf("%v %d %+v", p.BTH.Opcode, p.BTH.PSN, p.RETH())
	}
	*sent = nil
	b.inject(rr(wire.OpRCReadResponseFirst, 1, 1024))
	b.inject(at)
	b.runAll()
	if p := (*sent)[0]; p.BTH.Opcode != wire.OpRCReadRequest || p.BTH.PSN != 2 || p.RETH().Length != 1024 ||
		p.RETH().VA != 1024 {
		t.Errorf("%v %d %+v", p.BTH.Opcode, p.BTH.PSN, p.RETH())
	}

	// Responses of a wrong kind or size.
	_, b, _ = start()
	b.inject(at)
	b.wantSends(0) // acknowledges the WRITE only
	b.inject(rr(wire.OpRCReadResponseFirst, 1, 1020))
	b.runAll()
	b.wantSends(0, StatusBadResp, StatusFlush, StatusFlush)
	b.wantState(Err)

	// NAK codes.
	for syn, st := range map[wire.Syndrome]Status{wire.NAKInvalidRequest: StatusRemInvReq,
		wire.NAKRemoteAccess: StatusRemAccess, wire.NAKRemoteOp: StatusRemOp} {
		_, b, _ = start()
		b.inject(craft{op: wire.OpRCAck, psn: 1, syn: syn})
		b.runAll()
		b.wantSends(0, st, StatusFlush, StatusFlush)
	}

	// Sequence NAK in the middle of the WRITE, and a copy; RNR NAK and a copy. After a loss the window is four PSNs.
	_, b, sent = start()
	b.inject(craft{op: wire.OpRCAck, psn: 0, syn: wire.NAKSequence})
	b.wantResp(sent, resp{wire.OpRCWriteLast, 0, wire.NoCredits}, resp{wire.OpRCReadRequest, 1, wire.NoCredits},
		resp{wire.OpRCFetchAdd, 3, wire.NoCredits})
	b.inject(craft{op: wire.OpRCAck, psn: 0, syn: wire.NAKSequence})
	b.wantResp(sent)
	b.q.attr.RNRRetry, b.q.req.rnrLeft = 1, 1
	b.inject(craft{op: wire.OpRCAck, psn: 0, syn: wire.SyndromeRNR | 5})
	b.inject(craft{op: wire.OpRCAck, psn: 0, syn: wire.SyndromeRNR | 5})
	b.inject(craft{op: wire.OpRCAck, psn: 0, syn: wire.NAKSequence}) // rxe sends one for each following packet
	b.wantResp(sent)
	if b.timer != b.f.now+60e3 {
		t.Errorf("timer expires in %d ns", b.timer-b.f.now)
	}
	b.wantSends()
	b.wantState(RTS)
}

// A repeated MIDDLE of a WRITE has no RETH, a repeated FIRST has the whole length; solicited and AckReq are set in the
// last packet.
func TestRequesterHeaders(t *testing.T) {
	o := opts()
	o.psnB = 5
	_, b, sent := lone(t, o)
	b.reg(2, 0, 1<<16, allAccess)
	b.post(WQE{Opcode: WRWriteImm, RKey: 0x1234, RemoteVA: 0xabcdef, Imm: [4]byte{1, 2, 3, 4}, Solicited: true,
		SGEs: []SGE{sge(2, 0, 2049)}})
	b.runAll()
	if len(*sent) != 3 {
		t.Fatal(len(*sent))
	}
	for i, p := range *sent {
		lastOne := i == 2
		if p.BTH.AckReq != lastOne || p.BTH.Solicited != lastOne || !p.BTH.Migrated || p.BTH.PKey != 0xffff ||
			p.BTH.DestQP != 0x11 || p.BTH.PSN != uint32(5+i) {
			t.Errorf("packet %d: %+v", i, p.BTH)
		}
		if p.SrcPort < 0xc000 || p.SrcPort != (*sent)[0].SrcPort || p.TTL != 64 {
			t.Errorf("packet %d: port %#x ttl %d", i, p.SrcPort, p.TTL)
		}
	}
	if h := (*sent)[0].RETH(); h.VA != 0xabcdef || h.RKey != 0x1234 || h.Length != 2049 {
		t.Errorf("%+v", h)
	}
	if p := (*sent)[2]; p.Imm() != [4]byte{1, 2, 3, 4} || len(p.Payload) != 1 || p.BTH.Pad != 3 {
		t.Errorf("%+v", p)
	}
	if translate.Key((*sent)[0].RETH().RKey) != 0x1234 {
		t.Error()
	}
}

// After an RNR NAK following packets are dropped without an answer until the request is repeated (IBTA 9.7.5.2.8). The
// NAK's timer is min_rnr_timer.
func TestResponderNotReady(t *testing.T) {
	o := opts()
	o.psnA, o.minRNR = 20, 17
	_, b, sent := lone(t, o)
	b.reg(2, 0, 4096, allAccess)
	s := func(psn uint32) craft { return craft{op: wire.OpRCSendOnly, psn: psn, ack: true, data: []byte{1}} }
	b.inject(s(20))
	b.wantResp(sent, nakOf(20, wire.SyndromeRNR|17))
	b.inject(s(21))
	b.inject(s(22))
	b.wantResp(sent)
	b.postRecv(sge(2, 0, 8))
	b.postRecv(sge(2, 0, 8))
	b.inject(s(20))
	b.inject(s(21))
	b.inject(s(22))
	b.wantResp(sent, nakOf(22, wire.SyndromeRNR|17))
	b.wantRecvs(0, 0)
}
