package hca

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
)

func decodeQP(typ roce.Type) *qp {
	return &qp{typ: typ, maxSendSGE: 4, maxInline: 64}
}

// A send request as bytes: every field at its offset in rdma_user_rxe.h.
func TestDecodeSendGolden(t *testing.T) {
	raw := make([]byte, 256)
	p64 := binary.LittleEndian.PutUint64
	p32 := binary.LittleEndian.PutUint32
	p64(raw[0:], 0x1122334455667788) // wr_id
	p32(raw[12:], abi.WRRDMAWriteWithImm)
	p32(raw[16:], abi.SendFence|abi.SendSignaled|abi.SendSolicited)
	copy(raw[20:], []byte{0xde, 0xad, 0xbe, 0xef})
	p64(raw[24:], 0xaabbccddeeff0011)
	p32(raw[32:], 0x99887766)
	// Stale data of the slot's last use, which must not matter.
	for i := 144; i < 184; i++ {
		raw[i] = 0xff
	}
	p32(raw[184:], 12345) // dma.length, wrong
	p32(raw[188:], 0xffffffff)
	p32(raw[196:], 3) // num_sge
	for i, s := range []abi.SGE{{Addr: 0x1000, Length: 10, LKey: 7}, {Addr: 0x2000, Length: 0, LKey: 8},
		{Addr: 0x3000, Length: 0xffffffff, LKey: 9}} {
		p64(raw[208+16*i:], s.Addr)
		p32(raw[216+16*i:], s.Length)
		p32(raw[220+16*i:], s.LKey)
	}
	w := roce.WQE{SGEs: make([]roce.SGE, 0, 4), InlineData: make([]byte, 0, 64)}
	tail, ok := decodeQP(roce.RC).decodeSend(raw[:abi.SizeSendWQE], &w)
	if !ok || tail != 48 {
		t.Fatalf("tail %d, %v, status %d", tail, ok, w.Status)
	}
	decodeTail(raw[abi.SizeSendWQE:][:tail], &w)
	if w.ID != 0x1122334455667788 || w.Opcode != roce.WRWriteImm || !w.Signaled || !w.Fence || !w.Solicited || w.Inline ||
		w.Imm != [4]byte{0xde, 0xad, 0xbe, 0xef} || w.RemoteVA != 0xaabbccddeeff0011 || w.RKey != 0x99887766 {
		t.Fatalf("decoded %+v", w)
	}
	if len(w.SGEs) != 2 || w.SGEs[0] != (roce.SGE{VA: 0x1000, Length: 10, Key: 7}) ||
		w.SGEs[1] != (roce.SGE{VA: 0x3000, Length: 0xffffffff, Key: 9}) || w.Length != 10+0xffffffff {
		t.Fatalf("segments %+v, length %d: the sum of the segments counts, not dma.length", w.SGEs, w.Length)
	}
}

// The traps of the user ABI, and the operations of each QP type.
func TestDecodeSendRules(t *testing.T) {
	for _, c := range []struct {
		name   string
		typ    roce.Type
		op     uint32
		flags  uint32
		length uint32
		nsge   uint32
		ok     bool
		tail   int
		status roce.Status
	}{
		{"plain", roce.RC, abi.WRSend, 0, 0, 4, true, 64, 0},
		{"too many SGEs", roce.RC, abi.WRSend, 0, 0, 5, false, 0, roce.StatusLocQPOp},
		{"2^32-1 SGEs", roce.RC, abi.WRSend, 0, 0, 0xffffffff, false, 0, roce.StatusLocQPOp},
		{"inline with num_sge", roce.RC, abi.WRSend, abi.SendInline, 64, 3, true, 64, 0},
		{"inline, num_sge garbage", roce.RC, abi.WRSend, abi.SendInline, 5, 0xffffffff, true, 5, 0},
		{"inline of zero bytes", roce.RC, abi.WRSend, abi.SendInline, 0, 1, true, 0, 0},
		{"inline too long", roce.RC, abi.WRSend, abi.SendInline, 65, 0, false, 0, roce.StatusLocLen},
		{"inline without the flag", roce.RC, abi.WRRDMAWrite, 0, 9, 0, true, 9, 0},
		{"empty message", roce.RC, abi.WRRDMAWrite, 0, 0, 0, true, 0, 0},
		{"read, stale length", roce.RC, abi.WRRDMARead, 0, 9, 0, true, 0, 0},
		{"inline read", roce.RC, abi.WRRDMARead, abi.SendInline, 9, 0, false, 0, roce.StatusLocQPOp},
		{"inline atomic", roce.RC, abi.WRAtomicFetchAndAdd, abi.SendInline, 8, 1, false, 0, roce.StatusLocQPOp},
		{"atomic write as rdma-core's builder encodes it", roce.RC, abi.WRAtomicWrite, 0, 8, 0, true, 8, 0},
		{"atomic write from a segment", roce.RC, abi.WRAtomicWrite, 0, 8, 1, true, 16, 0},
		{"flush as rdma-core's builder encodes it", roce.RC, abi.WRFlush, 0, 8, 0, true, 0, 0},
		{"flush on UC", roce.UC, abi.WRFlush, 0, 8, 0, false, 0, roce.StatusLocQPOp},
		{"atomic write on UC", roce.UC, abi.WRAtomicWrite, 0, 8, 0, false, 0, roce.StatusLocQPOp},
		{"unknown flags", roce.RC, abi.WRSend, 0xfffffff0, 0, 1, true, 16, 0},
		{"opcode 255", roce.RC, 255, 0, 0, 1, false, 0, roce.StatusLocQPOp},
		{"opcode 2^32-1", roce.RC, 0xffffffff, 0, 0, 1, false, 0, roce.StatusLocQPOp},
		{"LOCAL_INV", roce.RC, abi.WRLocalInv, 0, 0, 3, true, 0, 0},
		{"BIND_MW", roce.RC, abi.WRBindMW, 0, 0, 3, true, 0, 0},
		{"BIND_MW on UC", roce.UC, abi.WRBindMW, 0, 0, 0, true, 0, 0},
		{"REG_MR without privilege", roce.RC, abi.WRRegMR, 0, 0, 0, false, 0, roce.StatusLocQPOp},
		{"REG_MR on UC", roce.UC, abi.WRRegMR, 0, 0, 0, false, 0, roce.StatusLocQPOp},
		{"LOCAL_INV on UC", roce.UC, abi.WRLocalInv, 0, 0, 0, false, 0, roce.StatusLocQPOp},
		{"LOCAL_INV on UD", roce.UD, abi.WRLocalInv, 0, 0, 0, false, 0, roce.StatusLocQPOp},
		{"SEND_WITH_INV", roce.RC, abi.WRSendWithInv, 0, 0, 1, true, 16, 0},
		{"SEND_WITH_INV on UC", roce.UC, abi.WRSendWithInv, 0, 0, 0, false, 0, roce.StatusLocQPOp},
		{"UC read", roce.UC, abi.WRRDMARead, 0, 0, 1, false, 0, roce.StatusLocQPOp},
		{"UC write", roce.UC, abi.WRRDMAWrite, 0, 0, 1, true, 16, 0},
		{"UD write", roce.UD, abi.WRRDMAWrite, 0, 0, 1, false, 0, roce.StatusLocQPOp},
		{"UD send", roce.UD, abi.WRSend, 0, 0, 1, true, 16, 0},
		{"GSI send", roce.GSI, abi.WRSend, 0, 0, 1, true, 16, 0},
	} {
		raw := make(abi.SendWQE, abi.SizeSendWQE)
		raw.SetRequest(1, c.op, c.flags)
		binary.LittleEndian.PutUint32(raw[abi.SendWQEDMALengthOff:], c.length)
		binary.LittleEndian.PutUint32(raw[abi.SendWQENumSGEOff:], c.nsge)
		var w roce.WQE
		tail, ok := decodeQP(c.typ).decodeSend(raw, &w)
		if ok != c.ok || tail != c.tail || !ok && w.Status != c.status {
			t.Errorf("%s: tail %d, %v, status %d; want %d, %v, %d", c.name, tail, ok, w.Status, c.tail, c.ok, c.status)
		}
	}
	raw := make(abi.SendWQE, abi.SizeSendWQE)
	raw.SetRequest(1, abi.WRSend, 0)
	raw.SetUD(0x1000000, 0, 1)
	var w roce.WQE
	if _, ok := decodeQP(roce.UD).decodeSend(raw, &w); ok {
		t.Error("a QP number of 25 bits was accepted")
	}
}

// A malformed request completes with an error and its QP enters the error state; the peer,
// and the other QPs of the VM, continue.
func TestBadSendRequest(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	a, b := w.pair()
	s := a.wqe()
	s.SetRequest(77, 200, 0) // unsignalled: an error completes all the same
	a.post()
	wc := a.scq.await(1)[0]
	if wc.ID != 77 || wc.Status != abi.WCLocQPOpErr || wc.VendorErr == 0 {
		t.Fatalf("completion %+v", wc)
	}
	w.until("the error state", func() bool { return a.state() == abi.QPErr })
	// Later requests are flushed, sends and receives.
	a.recv(78)
	s = a.wqe()
	s.SetRequest(79, abi.WRSend, 0)
	a.post()
	for _, wc := range a.scq.await(2) {
		if wc.Status != abi.WCWRFlushErr {
			t.Errorf("completion %+v", wc)
		}
	}
	if st := b.state(); st != abi.QPRTS {
		t.Errorf("the peer is in state %d", st)
	}
}

// Invalid indices: no request is fetched that was not posted, no memory outside the
// ring is accessed, and the QP either continues or fails.
func TestHostileIndices(t *testing.T) {
	for _, bad := range []uint32{0xffffffff, 0x80000000, 63, 1 << 20} {
		w := newWorld(t, 1, 2, Limits{})
		a, _ := w.pair()
		a.sq.prod().Store(bad) // slots of zeros: RDMA WRITEs of nothing to key 0
		a.rq.prod().Store(bad)
		a.bell()
		w.step(200)
		if c := a.sq.cons().Load(); c > 63 {
			t.Errorf("producer %#x: consumer %#x", bad, c)
		}
	}
	// The producer index moves back over requests that were fetched and are not complete.
	w := newWorld(t, 1, 2, Limits{})
	a, _ := w.pair()
	w.losing(func([]byte) bool { return true })
	for range 10 {
		s := a.wqe()
		s.SetRequest(1, abi.WRSend, abi.SendSignaled)
		a.post()
	}
	w.step(20)
	a.sq.prod().Store(5)
	a.bell()
	w.until("the error state", func() bool { return a.state() == abi.QPErr })
	eq := w.guests[0].async
	eq.waiting.collect(&eq.incoming)
	if eq.waiting.first == nil || eq.waiting.first.bits.Load()&(1<<abi.EventQPFatal) == 0 {
		t.Error("no QP fatal event")
	}
}

// The device owns the consumer index in shared memory: values that the guest writes there
// have no effect.
func TestHostileConsumer(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	a, b := w.pair()
	for i := range 200 {
		a.sq.cons().Store(uint32(i * 77777))
		b.rq.cons().Store(uint32(i * 88888))
		b.recv(uint64(i))
		s := a.wqe()
		s.SetRequest(uint64(i), abi.WRSend, abi.SendSignaled)
		a.post()
		if wc := a.scq.await(1)[0]; wc.ID != uint64(i) || wc.Status != abi.WCSuccess {
			t.Fatalf("completion %+v", wc)
		}
		if wc := b.rcq.await(1)[0]; wc.ID != uint64(i) {
			t.Fatalf("completion %+v", wc)
		}
	}
}

// Random bytes in every slot, doorbells, time: no panic, no frame to another QP than the
// peer, no write to guest memory outside the registered memory.
func TestGarbageRings(t *testing.T) {
	for seed := range uint64(8) {
		r := rand.New(rand.NewPCG(seed, 2))
		w := newWorld(t, 1, 2, Limits{})
		a, b := w.pair()
		canary := a.g.alloc(4096)
		fill(a.g.at(canary, 4096), 9)
		garbage := func(q *tqp) {
			for range 32 {
				for _, ring := range []*tring{&q.sq, &q.rq} {
					e := ring.elem(r.Uint32())
					for i := range e {
						e[i] = byte(r.Uint32())
					}
					if r.IntN(2) == 0 { // plausible enough to pass the first checks
						if ring == &q.sq {
							binary.LittleEndian.PutUint32(e[abi.SendWQEOpcodeOff:], r.Uint32N(8))
							binary.LittleEndian.PutUint32(e[abi.SendWQENumSGEOff:], r.Uint32N(5))
						}
						binary.LittleEndian.PutUint32(e[abi.RecvWQENumSGEOff:], r.Uint32N(5))
					}
				}
			}
			for _, ring := range []*tring{&q.sq, &q.rq} {
				ring.prod().Store(r.Uint32())
				if r.IntN(2) == 0 {
					ring.prod().Store(ring.cons().Load() + r.Uint32N(8))
				}
			}
			q.scq.cons().Store(r.Uint32())
			q.bell()
		}
		for i := range 20 {
			garbage(a)
			garbage(b)
			w.step(20)
			w.clock.Advance(50e6)
			if i%5 != 4 {
				continue
			}
			c := a.g.qp(qpSpec{pd: a.g.pd()})
			for _, state := range []uint8{abi.QPErr, abi.QPReset, abi.QPInit, abi.QPErr} { // also without a connection
				c.modify(state, abi.QPAttrPKeyIndex|abi.QPAttrPort|abi.QPAttrAccessFlags, abi.QPAttr{AccessFlags: remoteAll})
				garbage(c)
				w.step(20)
				w.clock.Advance(50e6)
			}
		}
		want := make([]byte, 4096)
		fill(want, 9)
		if string(a.g.at(canary, 4096)) != string(want) {
			t.Fatalf("seed %d: memory outside all regions was written", seed)
		}
	}
}

func FuzzDecode(f *testing.F) {
	raw := make(abi.SendWQE, 512)
	raw.SetRequest(1, abi.WRSend, 0)
	raw.SetSGEs([]abi.SGE{{Addr: 1, Length: 2, LKey: 3}})
	f.Add([]byte(raw), uint8(2))
	f.Fuzz(func(t *testing.T, b []byte, typ uint8) {
		if len(b) < abi.SizeSendWQE {
			return
		}
		q := decodeQP(roce.Type(typ%4 + 1))
		w := roce.WQE{SGEs: make([]roce.SGE, 0, 4), InlineData: make([]byte, 0, 64)}
		tail, ok := q.decodeSend(b[:abi.SizeSendWQE], &w)
		if !ok {
			if w.Status == roce.StatusSuccess {
				t.Fatal("refused without a status")
			}
			return
		}
		if tail > 64 {
			t.Fatalf("%d bytes follow the fixed part", tail)
		}
		rest := make([]byte, tail)
		copy(rest, b[abi.SizeSendWQE:])
		decodeTail(rest, &w)
		sum := uint64(len(w.InlineData))
		for _, s := range w.SGEs {
			sum += uint64(s.Length)
		}
		if len(w.SGEs) > 4 || len(w.InlineData) > 64 || cap(w.SGEs) != 4 || cap(w.InlineData) != 64 || sum != w.Length {
			t.Fatalf("decoded %+v", w)
		}
		rw := roce.RecvWQE{SGEs: make([]roce.SGE, 0, 4)}
		if n, ok := decodeRecv(b[:abi.SizeRecvWQE], 4, &rw); ok && n > 64 {
			t.Fatalf("receive request: %d bytes follow", n)
		}
	})
}
