package roce

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Each operation with its data, immediate data and completion fields on both sides.
func TestRCOperations(t *testing.T) {
	f := newFabric(t, 1)
	a, b := f.pair(opts())
	src := a.reg(1, 0x10000, 8192, allAccess)
	dst := b.reg(2, 0x900000, 8192, allAccess)

	b.postRecv(sge(2, 0x900000, 4096))
	a.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0x10000, 100), sge(1, 0x10800, 2900)}, Solicited: true})
	f.until("send", 1e9, func() bool { return len(a.sends) == 1 && len(b.recvs) == 1 })
	same(t, "send", dst.buf[:3000], append(append([]byte{}, src.buf[:100]...), src.buf[0x800:0x800+2900]...))
	if c := b.recvs[0].c; c.Opcode != WCRecv || c.ByteLen != 3000 || c.Flags != 0 || !c.Solicited || c.SrcQP != 0x11 ||
		b.recvs[0].id != 5000 {
		t.Errorf("receive completion %+v", b.recvs[0])
	}
	if c := a.sends[0]; c.c.Opcode != WCSend || c.c.ByteLen != 3000 || c.id != 1000 {
		t.Errorf("send completion %+v", c)
	}

	b.postRecv(sge(2, 0x900000, 10))
	a.post(WQE{Opcode: WRSendImm, Imm: [4]byte{1, 2, 3, 4}, Inline: true, InlineData: []byte("inline")})
	f.until("send imm", 1e9, func() bool { return len(a.sends) == 2 && len(b.recvs) == 2 })
	same(t, "inline", dst.buf[:6], []byte("inline"))
	if c := b.recvs[1].c; c.Flags != FlagImm || c.Imm != [4]byte{1, 2, 3, 4} || c.ByteLen != 6 || c.Solicited {
		t.Errorf("receive completion %+v", c)
	}

	b.postRecv()
	a.post(WQE{Opcode: WRSendInv, InvKey: 2})
	f.until("send inv", 1e9, func() bool { return len(a.sends) == 3 && len(b.recvs) == 3 })
	if c := b.recvs[2].c; c.Flags != FlagInv || c.InvKey != 2 || c.ByteLen != 0 || len(b.invalid) != 1 {
		t.Errorf("receive completion %+v", c)
	}

	a.post(WQE{Opcode: WRWrite, RKey: 2, RemoteVA: 0x900100, SGEs: []SGE{sge(1, 0x10000, 5000)}})
	f.until("write", 1e9, func() bool { return len(a.sends) == 4 })
	same(t, "write", dst.buf[0x100:0x100+5000], src.buf[:5000])

	b.postRecv()
	a.post(WQE{Opcode: WRWriteImm, Imm: [4]byte{9, 8, 7, 6}, RKey: 2, RemoteVA: 0x900000,
		SGEs: []SGE{sge(1, 0x10100, 1025)}})
	f.until("write imm", 1e9, func() bool { return len(a.sends) == 5 && len(b.recvs) == 4 })
	same(t, "write imm", dst.buf[:1025], src.buf[0x100:0x100+1025])
	if c := b.recvs[3].c; c.Opcode != WCRecvWithImm || c.Flags != FlagImm || c.Imm != [4]byte{9, 8, 7, 6} ||
		c.ByteLen != 1025 {
		t.Errorf("receive completion %+v", c)
	}

	a.post(WQE{Opcode: WRRead, RKey: 2, RemoteVA: 0x900003, SGEs: []SGE{sge(1, 0x10000, 7), sge(1, 0x10400, 4000)}})
	f.until("read", 1e9, func() bool { return len(a.sends) == 6 })
	same(t, "read 1", src.buf[:7], dst.buf[3:10])
	same(t, "read 2", src.buf[0x400:0x400+4000], dst.buf[10:4010])
	if c := a.sends[5].c; c.Opcode != WCRead || c.ByteLen != 4007 {
		t.Errorf("read completion %+v", c)
	}

	binary.LittleEndian.PutUint64(dst.buf[64:], 40)
	a.post(WQE{Opcode: WRFetchAdd, RKey: 2, RemoteVA: 0x900040, SwapAdd: 2, SGEs: []SGE{sge(1, 0x10008, 8)}})
	a.post(WQE{Opcode: WRCompareSwap, RKey: 2, RemoteVA: 0x900040, Compare: 42, SwapAdd: 7,
		SGEs: []SGE{sge(1, 0x10010, 8)}})
	a.post(WQE{Opcode: WRCompareSwap, RKey: 2, RemoteVA: 0x900040, Compare: 1, SwapAdd: 8,
		SGEs: []SGE{sge(1, 0x10018, 4), sge(1, 0x10020, 4)}})
	f.until("atomics", 1e9, func() bool { return len(a.sends) == 9 })
	if v := binary.LittleEndian.Uint64(dst.buf[64:]); v != 7 {
		t.Errorf("memory is %d after the atomics", v)
	}
	if x, y, z := binary.LittleEndian.Uint64(src.buf[8:]), binary.LittleEndian.Uint64(src.buf[16:]),
		binary.LittleEndian.Uint32(src.buf[24:]); x != 40 || y != 42 || z != 7 {
		t.Errorf("atomics returned %d %d %d", x, y, z)
	}
	if c := a.sends[6].c; c.Opcode != WCFetchAdd || c.ByteLen != 8 {
		t.Errorf("atomic completion %+v", c)
	}

	a.post(WQE{Opcode: WRAtomicWrite, RKey: 2, RemoteVA: 0x900048, SGEs: []SGE{sge(1, 0x10100, 3), sge(1, 0x10200, 5)}})
	a.post(WQE{Opcode: WRAtomicWrite, RKey: 2, RemoteVA: 0x900050, Inline: true, InlineData: []byte("inlined!")})
	f.until("atomic writes", 1e9, func() bool { return len(a.sends) == 11 })
	same(t, "atomic write", dst.buf[72:80], append(append([]byte{}, src.buf[0x100:0x103]...), src.buf[0x200:0x205]...))
	same(t, "inline atomic write", dst.buf[80:88], []byte("inlined!"))
	if c := a.sends[9].c; c.Opcode != WCAtomicWrite || c.ByteLen != 8 {
		t.Errorf("completion of an atomic write %+v", c)
	}
	for _, s := range a.sends {
		if s.c.Status != 0 {
			t.Errorf("%+v", s)
		}
	}
	if len(a.events)+len(b.events) != 0 {
		t.Errorf("events %v %v", a.events, b.events)
	}
}

// All sizes with all path MTUs for the three data operations, over IPv4, IPv6, RoCE v1 and VLANs, with loss; PSNs wrap.
func TestRCSizesAndMTUs(t *testing.T) {
	v6A, v6B := [16]byte{0: 0xfe, 1: 0x80, 15: 1}, [16]byte{0: 0xfe, 1: 0x80, 15: 2}
	v1A, v1B := av(ipA, ipB), av(ipB, ipA)
	v1A.RoCEv1, v1B.RoCEv1 = true, true
	vlA, vlB := av(ipA, ipB), av(ipB, ipA)
	vlA.VLAN, vlB.VLAN, vlA.SL = 100, 100, 3
	for i, avs := range [][2]AddressVector{{av(ipA, ipB), av(ipB, ipA)}, {av(v6A, v6B), av(v6B, v6A)}, {v1A, v1B},
		{vlA, vlB}, {av(ipA, ipB), av(ipB, ipA)}} {
		mtu := i%5 + 1
		m := mtuBytes(uint8(mtu))
		t.Run(fmt.Sprintf("mtu%d", m), func(t *testing.T) {
			f := newFabric(t, int64(mtu))
			o := opts()
			o.mtu, o.avA, o.avB = uint8(mtu), avs[0], avs[1]
			o.psnA, o.psnB = 0xfffffd, 0xfffffe
			a, b := f.pair(o)
			n := 0
			f.loss = func(*wire.RoCE) bool { n++; return n%23 == 0 }
			const size = 1 << 16
			src := a.reg(1, 0x10000, size, allAccess)
			dst := b.reg(2, 0x90000000, size, allAccess)
			sizes := []int{0, 1, 2, 3, 4, 5, 7, 8, m - 1, m, m + 1, 2*m - 1, 2 * m, 2*m + 1, 3*m + 5, 40000, size}
			for _, k := range sizes {
				for _, op := range []WROpcode{WRSend, WRWrite, WRRead} {
					f.rng.Read(src.buf)
					f.rng.Read(dst.buf)
					var keep []byte
					if op == WRRead {
						keep = append([]byte{}, dst.buf[:k]...)
					} else {
						keep = append([]byte{}, src.buf[:k]...)
					}
					tail := append([]byte{}, dst.buf[k:]...)
					if op == WRSend {
						b.postRecv(sge(2, 0x90000000, k))
					}
					done := len(a.sends)
					a.post(WQE{Opcode: op, RKey: 2, RemoteVA: 0x90000000, SGEs: []SGE{sge(1, 0x10000, k)}})
					f.until(fmt.Sprintf("opcode %d of %d bytes", op, k), 60e9, func() bool {
						return len(a.sends) > done
					})
					if st := a.sends[done].c.Status; st != 0 {
						t.Fatalf("opcode %d of %d bytes: status %d", op, k, st)
					}
					same(t, "source", src.buf[:k], keep)
					same(t, "destination", dst.buf[:k], keep)
					same(t, "behind the destination", dst.buf[k:], tail)
				}
			}
		})
	}
}

// Zero-length requests access no memory: key and address are not checked.
func TestRCZeroLength(t *testing.T) {
	f := newFabric(t, 1)
	a, b := f.pair(opts())
	b.postRecv()
	for _, op := range []WROpcode{WRWrite, WRRead, WRSend} {
		a.post(WQE{Opcode: op, RKey: 0x99, RemoteVA: 1 << 63})
	}
	f.until("zero length", 1e9, func() bool { return len(a.sends) == 3 })
	a.wantSends(0, 0, 0)
	b.wantRecvs(0)
}

// 8 MiB in each direction: SEND, WRITE and READ.
func TestRCLarge(t *testing.T) {
	f := newFabric(t, 1)
	o := opts()
	o.mtu, o.psnA = 5, 0xffffff
	a, b := f.pair(o)
	f.budget = 256
	const size = 8 << 20
	src := a.reg(1, 0, size, allAccess)
	dst := b.reg(2, 0, size, allAccess)
	for i, op := range []WROpcode{WRSend, WRWrite, WRRead} {
		f.rng.Read(src.buf)
		if op == WRSend {
			b.postRecv(sge(2, 0, size/2), sge(2, size/2, size/2))
		}
		a.post(WQE{Opcode: op, RKey: 2, SGEs: []SGE{sge(1, 0, size)}})
		f.until("large", 10e9, func() bool { return len(a.sends) == i+1 })
		same(t, "large", dst.buf, src.buf)
	}
	a.wantSends(0, 0, 0)
	if a.q.Stats().Retransmits+a.q.Stats().Timeouts != 0 {
		t.Errorf("retransmissions without loss: %+v", *a.q.Stats())
	}
}

// A message of 2^31 bytes is accepted, one byte more is a local length error; checked without moving the data.
func TestRCMessageLimit(t *testing.T) {
	f := newFabric(t, 1)
	a, b := f.pair(opts())
	b.reg(2, 0, 64, allAccess)
	a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: nil, Length: maxMessage + 1})
	f.settle(1e9)
	a.wantSends(StatusLocLen)
	a.wantState(Err)
	_ = b
}

func flushOf(key translate.Key, va translate.VA, n uint32, selectivity uint8) WQE {
	return WQE{Opcode: WRFlush, RKey: key, RemoteVA: va, FlushLen: n,
		Flush: wire.FETH{Placement: wire.FlushGlobal, Selectivity: selectivity}}
}

// TestRCFlush: FLUSH of a range, of nothing, and of a region by an address outside it; on the wire and on the local
// path.
func TestRCFlush(t *testing.T) {
	for _, local := range []bool{false, true} {
		f := newFabric(t, 1)
		if local {
			f.local = localOn
		}
		o := opts()
		o.access |= translate.FlushGlobal
		a, b := f.pair(o)
		a.reg(4, chLocal, 4096, allAccess)
		b.reg(1, chTarget, 4096, allAccess|translate.FlushGlobal)
		for _, w := range []WQE{
			{Opcode: WRWrite, RKey: 1, RemoteVA: chTarget, SGEs: []SGE{sge(4, chLocal, 4096)}},
			flushOf(1, chTarget, 4096, wire.FlushRange), flushOf(1, chTarget, 0, wire.FlushRange),
			flushOf(1, 0, 1<<31, wire.FlushRegion),
			{Opcode: WRAtomicWrite, RKey: 1, RemoteVA: chTarget, SGEs: []SGE{sge(4, chLocal+8, 8)}},
			flushOf(1, chTarget, 8, wire.FlushRange), // exceeds max_rd_atomic
		} {
			a.post(w)
		}
		f.settle(1e9)
		a.wantSends(0, 0, 0, 0, 0, 0)
		if c := a.sends[1].c; c.Opcode != WCFlush || c.ByteLen != 0 {
			t.Errorf("completion %+v", c)
		}
		if local != (f.frames == 0) {
			t.Errorf("%d frames", f.frames)
		}
		same(t, "memory", b.regions[1].buf[8:], a.regions[4].buf[8:])
	}
}

// TestRCErrors checks the completion status at each side (IBTA 11.6.2), the event (11.6.3), the state (9.9.2, 9.9.3),
// and that memory is unchanged; also on the local path. integration/guest/errors checks the same with a guest's verbs.
func TestRCErrors(t *testing.T) {
	for _, mode := range []localMode{framesOnly, localOn} {
		t.Run(mode.String(), func(t *testing.T) { rcErrors(t, mode) })
	}
}

func rcErrors(t *testing.T, mode localMode) {
	const noRights = translate.Access(0)
	for _, c := range []struct {
		name   string
		access translate.Access // of QP b
		region translate.Access // of b's region
		recv   []SGE
		recvSt Status
		w      WQE
		a      Status
		b      []Status
		event  EventKind
		stateB State
	}{
		{name: "write, no such key", access: allAccess, region: allAccess,
			w: WQE{Opcode: WRWrite, RKey: 99, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemAccess, event: EventAccessErr,
			stateB: Err},
		{name: "write, out of range", access: allAccess, region: allAccess,
			w: WQE{Opcode: WRWrite, RKey: 2, RemoteVA: 4090, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemAccess,
			event: EventAccessErr, stateB: Err},
		{name: "long write, out of range", access: allAccess, region: allAccess,
			w: WQE{Opcode: WRWrite, RKey: 2, RemoteVA: 1, SGEs: []SGE{sge(1, 0, 4096)}}, a: StatusRemAccess,
			event: EventAccessErr, stateB: Err},
		{name: "write, region read-only", access: allAccess, region: translate.RemoteRead,
			w: WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemAccess, event: EventAccessErr,
			stateB: Err},
		{name: "write, QP forbids", access: noRights, region: allAccess,
			w: WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemInvReq, event: EventReqErr,
			stateB: Err},
		{name: "read, region forbids", access: allAccess, region: translate.RemoteWrite,
			w: WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemAccess, event: EventAccessErr,
			stateB: Err},
		{name: "read, out of range", access: allAccess, region: allAccess,
			w: WQE{Opcode: WRRead, RKey: 2, RemoteVA: 4000, SGEs: []SGE{sge(1, 0, 4000)}}, a: StatusRemAccess,
			event: EventAccessErr, stateB: Err},
		{name: "read, QP forbids", access: noRights, region: allAccess,
			w: WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemInvReq, event: EventReqErr,
			stateB: Err},
		{name: "atomic, region forbids", access: allAccess, region: translate.RemoteWrite,
			w: WQE{Opcode: WRFetchAdd, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemAccess, event: EventAccessErr,
			stateB: Err},
		{name: "atomic, misaligned", access: allAccess, region: allAccess,
			w: WQE{Opcode: WRFetchAdd, RKey: 2, RemoteVA: 4, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemInvReq,
			event: EventReqErr, stateB: Err},
		{name: "atomic, QP forbids", access: noRights, region: allAccess,
			w: WQE{Opcode: WRCompareSwap, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemInvReq, event: EventReqErr,
			stateB: Err},
		{name: "atomic, result too short", access: allAccess, region: allAccess,
			w: WQE{Opcode: WRFetchAdd, RKey: 2, SGEs: []SGE{sge(1, 0, 4)}}, a: StatusLocLen, stateB: RTS},
		{name: "atomic write, region forbids", access: allAccess, region: translate.RemoteAtomic,
			w: WQE{Opcode: WRAtomicWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemAccess,
			event: EventAccessErr, stateB: Err},
		{name: "atomic write, misaligned", access: allAccess, region: allAccess,
			w: WQE{Opcode: WRAtomicWrite, RKey: 2, RemoteVA: 4, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemInvReq,
			event: EventReqErr, stateB: Err},
		{name: "atomic write, QP forbids", access: noRights, region: allAccess,
			w: WQE{Opcode: WRAtomicWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemInvReq, event: EventReqErr,
			stateB: Err},
		{name: "atomic write of another length", access: allAccess, region: allAccess,
			w: WQE{Opcode: WRAtomicWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 16)}}, a: StatusLocLen, stateB: RTS},
		{name: "atomic write from bad key", access: allAccess, region: allAccess,
			w: WQE{Opcode: WRAtomicWrite, RKey: 2, SGEs: []SGE{sge(66, 0, 8)}}, a: StatusLocProt, stateB: RTS},
		{name: "flush, region forbids", access: allAccess | translate.FlushGlobal, region: translate.RemoteWrite,
			w: flushOf(2, 0, 64, wire.FlushRange), a: StatusRemAccess, event: EventAccessErr, stateB: Err},
		{name: "flush of a region, region forbids", access: allAccess | translate.FlushGlobal,
			region: translate.RemoteWrite, w: flushOf(2, 0, 0, wire.FlushRegion), a: StatusRemAccess,
			event: EventAccessErr, stateB: Err},
		{name: "flush, out of range", access: allAccess | translate.FlushGlobal, region: translate.FlushGlobal,
			w: flushOf(2, 4000, 97, wire.FlushRange), a: StatusRemAccess, event: EventAccessErr, stateB: Err},
		{name: "flush of a region, no such key", access: allAccess | translate.FlushGlobal,
			region: translate.FlushGlobal, w: flushOf(99, 0, 0, wire.FlushRegion), a: StatusRemAccess,
			event: EventAccessErr, stateB: Err},
		{name: "flush, QP forbids", access: noRights, region: translate.FlushGlobal,
			w: flushOf(2, 0, 64, wire.FlushRange), a: StatusRemInvReq, event: EventReqErr, stateB: Err},
		{name: "flush, to persistence", access: allAccess | translate.FlushGlobal, region: translate.FlushGlobal,
			w: WQE{Opcode: WRFlush, RKey: 2, Flush: wire.FETH{Placement: wire.FlushPersistent}}, a: StatusRemInvReq,
			event: EventReqErr, stateB: Err},
		{name: "flush, to nothing", access: allAccess | translate.FlushGlobal, region: translate.FlushGlobal,
			w: WQE{Opcode: WRFlush, RKey: 2}, a: StatusLocQPOp, stateB: RTS},
		{name: "send too long", access: allAccess, region: allAccess, recv: []SGE{sge(2, 0, 7)},
			w: WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemInvReq, b: []Status{StatusLocLen},
			stateB: Err},
		{name: "send too long in its second packet", access: allAccess, region: allAccess, recv: []SGE{sge(2, 0, 1030)},
			w: WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 1031)}}, a: StatusRemInvReq, b: []Status{StatusLocLen},
			stateB: Err},
		{name: "send into bad key", access: allAccess, region: allAccess, recv: []SGE{sge(77, 0, 8)},
			w: WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemOp, b: []Status{StatusLocProt}, stateB: Err},
		{name: "send into read-only memory", access: allAccess, region: noRights, recv: []SGE{sge(2, 0, 8)},
			w: WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemOp, b: []Status{StatusLocProt}, stateB: Err},
		{name: "send, malformed receive", access: allAccess, region: allAccess, recv: []SGE{sge(2, 0, 8)},
			recvSt: StatusLocQPOp, w: WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 8)}}, a: StatusRemOp,
			b: []Status{StatusLocQPOp}, stateB: Err},
		{name: "send with invalidate of no key", access: allAccess, region: allAccess, recv: []SGE{sge(2, 0, 8)},
			w: WQE{Opcode: WRSendInv, InvKey: 55}, a: StatusRemAccess, b: []Status{StatusRemAccess},
			event: EventAccessErr, stateB: Err},
		{name: "gather from bad key", access: allAccess, region: allAccess,
			w: WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(66, 0, 8)}}, a: StatusLocProt, stateB: RTS},
		{name: "gather beyond region in the third packet", access: allAccess, region: allAccess,
			w: WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 2048), sge(1, 4095, 8)}}, a: StatusLocProt,
			stateB: RTS},
		{name: "read into bad key", access: allAccess, region: allAccess,
			w: WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(66, 0, 8)}}, a: StatusLocProt, stateB: RTS},
		{name: "unknown opcode", access: allAccess, region: allAccess, w: WQE{Opcode: 200}, a: StatusLocQPOp,
			stateB: RTS},
		{name: "read with inline flag", access: allAccess, region: allAccess,
			w: WQE{Opcode: WRRead, Inline: true, InlineData: []byte("x")}, a: StatusLocQPOp, stateB: RTS},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFabric(t, 3)
			f.local = mode
			o := opts()
			o.timeout, o.retry = 8, 2
			a, b := f.pair(o)
			b.q.attr.Access = c.access
			src := a.reg(1, 0, 4096, allAccess)
			ok := a.reg(3, 0, 64, allAccess)
			dst := b.reg(2, 0, 4096, c.region)
			bok := b.reg(4, 0, 64, allAccess)
			if c.recv != nil {
				b.postRecv(c.recv...)
				b.rq[0].Status = c.recvSt
			}
			before := append([]byte{}, dst.buf...)
			_ = src
			// One request succeeds before it, one behind it is flushed.
			a.post(WQE{Opcode: WRWrite, RKey: 4, SGEs: []SGE{sge(3, 0, 64)}})
			if c.access == noRights {
				a.sq = nil
			}
			a.post(c.w)
			a.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(3, 0, 8)}})
			f.settle(2e9)
			want := []Status{0, c.a, StatusFlush}
			if c.access == noRights {
				want = want[1:]
			} else {
				same(t, "write before", bok.buf, ok.buf)
			}
			a.wantSends(want...)
			a.wantState(Err)
			a.wantEvents()
			b.wantRecvs(c.b...)
			b.wantState(c.stateB)
			if c.event != 0 {
				b.wantEvents(c.event)
			} else {
				b.wantEvents()
			}
			if c.stateB == Err && c.a != StatusRemInvReq || c.name == "send too long" {
				same(t, "responder's memory", dst.buf, before)
			}
		})
	}
}

// A failed WQE completes after all WQEs before it.
func TestRCErrorOrder(t *testing.T) {
	f := newFabric(t, 5)
	a, b := f.pair(opts())
	src := a.reg(1, 0, 1<<16, allAccess)
	dst := b.reg(2, 0, 1<<16, allAccess)
	a.post(WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 20000)}})
	a.post(WQE{Opcode: WRWrite, RKey: 2, RemoteVA: 30000, SGEs: []SGE{sge(1, 30000, 10000)}})
	a.bad[2] = StatusLocLen
	a.post(WQE{Opcode: WRSend})
	a.post(WQE{Opcode: WRWrite, RKey: 2, RemoteVA: 50000, SGEs: []SGE{sge(1, 50000, 10)}})
	keep := append([]byte{}, dst.buf[50000:50010]...)
	f.until("all", 1e9, func() bool { return len(a.sends) == 4 })
	a.wantSends(0, 0, StatusLocLen, StatusFlush)
	same(t, "read", src.buf[:20000], dst.buf[:20000])
	same(t, "write", dst.buf[30000:40000], src.buf[30000:40000])
	same(t, "flushed write", dst.buf[50000:50010], keep)
	a.post(WQE{Opcode: WRSend})
	f.until("posted in ERR", 1e9, func() bool { return len(a.sends) == 5 })
	a.wantSends(0, 0, StatusLocLen, StatusFlush, StatusFlush)
}

// RNR: first no receive is posted, then one is.
func TestRCReceiverNotReady(t *testing.T) {
	for _, op := range []WROpcode{WRSend, WRWriteImm} {
		f := newFabric(t, 6)
		o := opts()
		o.minRNR, o.rnr = 14, 7 // 1.28... see rnrTimer
		a, b := f.pair(o)
		src := a.reg(1, 0, 4096, allAccess)
		dst := b.reg(2, 0, 4096, allAccess)
		start := f.now
		a.post(WQE{Opcode: op, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}})
		f.settle(100e6)
		a.wantSends()
		if rnr := b.q.Stats().TxRNR; rnr < 50 || int64(rnr) > (f.now-start)/rnrTimer[14]+1 {
			t.Errorf("%d RNR NAKs in 100 ms with a wait of %d ns", rnr, rnrTimer[14])
		}
		b.postRecv(sge(2, 0, 4096))
		f.until("send after RNR", 1e9, func() bool { return len(a.sends) == 1 })
		a.wantSends(0)
		b.wantRecvs(0)
		same(t, "data", dst.buf[:3000], src.buf[:3000])
		if a.q.Stats().Timeouts != 0 {
			t.Errorf("timeouts during an RNR wait")
		}
	}
}

func TestRCRNRRetryExceeded(t *testing.T) {
	for retry := range uint8(7) {
		f := newFabric(t, 6)
		o := opts()
		o.rnr = retry
		a, b := f.pair(o)
		a.reg(1, 0, 4096, allAccess)
		a.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 8)}})
		a.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 8)}})
		f.settle(1e9)
		a.wantSends(StatusRNRRetryExc, StatusFlush)
		a.wantState(Err)
		b.wantState(RTS)
		if n := b.q.Stats().TxRNR; n != uint64(retry)+1 {
			t.Errorf("rnr_retry %d: %d RNR NAKs", retry, n)
		}
	}
}

func TestRCRetryExceeded(t *testing.T) {
	for retry := range uint8(8) {
		f := newFabric(t, 7)
		o := opts()
		o.retry, o.timeout = retry, 12
		a, _ := f.pair(o)
		a.reg(1, 0, 4096, allAccess)
		f.loss = func(*wire.RoCE) bool { return true }
		start := f.now
		a.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 8)}})
		a.post(WQE{Opcode: WRRead, SGEs: []SGE{sge(1, 0, 8)}})
		f.until("retries exceeded", 10e9, func() bool { return len(a.sends) == 2 })
		a.wantSends(StatusRetryExc, StatusFlush)
		a.wantState(Err)
		want := int64(0)
		for i := range retry + 1 {
			want += timeoutNS(12) << min(i, 2)
		}
		if took := f.now - start; took < want || took > want+want/4 {
			t.Errorf("retry_cnt %d: gave up after %d us, want about %d us", retry, took/1000, want/1000)
		}
		if a.q.Stats().Timeouts != uint64(retry)+1 {
			t.Errorf("%d timeouts", a.q.Stats().Timeouts)
		}
	}
}

// Timeout 0: no retransmission by time, and no error.
func TestRCNoTimeout(t *testing.T) {
	f := newFabric(t, 7)
	o := opts()
	o.timeout = 0
	a, _ := f.pair(o)
	a.reg(1, 0, 4096, allAccess)
	f.loss = func(*wire.RoCE) bool { return true }
	a.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 8)}})
	f.settle(3600e9)
	a.wantSends()
	if f.frames != 1 {
		t.Errorf("%d frames", f.frames)
	}
}

// A fence holds a request back until READs and atomics before it have completed.
func TestRCFence(t *testing.T) {
	f := newFabric(t, 8)
	a, b := f.pair(opts())
	a.reg(1, 0, 8192, allAccess)
	b.reg(2, 0, 8192, allAccess)
	fenced := false
	a.onTx = func(p *wire.RoCE, _ []byte) bool {
		if p.Info.Op == wire.Write {
			fenced = true
			if len(a.sends) != 2 {
				t.Errorf("fenced WRITE sent after %d completions", len(a.sends))
			}
		}
		return false
	}
	a.post(WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 5000)}})
	a.post(WQE{Opcode: WRFetchAdd, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
	a.post(WQE{Opcode: WRWrite, Fence: true, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
	f.until("fence", 1e9, func() bool { return len(a.sends) == 3 })
	if !fenced {
		t.Error("no WRITE")
	}
}

// At most max_rd_atomic READs and atomics are in flight.
func TestRCMaxRdAtomic(t *testing.T) {
	for rd := uint8(1); rd <= 5; rd++ {
		f := newFabric(t, 9)
		o := opts()
		o.rd, o.destRd = rd, rd
		a, b := f.pair(o)
		a.reg(1, 0, 1<<20, allAccess)
		b.reg(2, 0, 1<<20, allAccess)
		for i := range 20 {
			if i%3 == 0 {
				a.post(WQE{Opcode: WRFetchAdd, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
			} else {
				a.post(WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 50000*i%300000)}})
			}
		}
		f.until("reads", 10e9, func() bool {
			if k := a.q.req.readTail - a.q.req.readHead; k > uint32(rd) {
				t.Fatalf("%d in flight, limit %d", k, rd)
			}
			return len(a.sends) == 20
		})
		for _, s := range a.sends {
			if s.c.Status != 0 {
				t.Fatal(a.sends)
			}
		}
	}
	// max_rd_atomic 0 is a local error, not a hang.
	f := newFabric(t, 9)
	o := opts()
	o.rd = 0
	a, _ := f.pair(o)
	a.reg(1, 0, 64, allAccess)
	a.post(WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
	f.settle(1e9)
	a.wantSends(StatusLocQPOp)
}

// The responder accepts no READ when max_dest_rd_atomic is 0.
func TestRCNoDestRdAtomic(t *testing.T) {
	f := newFabric(t, 9)
	o := opts()
	o.destRd = 0
	a, b := f.pair(o)
	a.reg(1, 0, 64, allAccess)
	b.reg(2, 0, 64, allAccess)
	a.post(WQE{Opcode: WRRead, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
	f.settle(1e9)
	a.wantSends(StatusRemInvReq)
	b.wantEvents(EventReqErr)
}

// A loss that no later packet reveals is repaired after a few response times, long before the timeout, and is not
// charged to retry_cnt. A dead peer still gets the full time of all retries.
func TestRCProbe(t *testing.T) {
	f := newFabric(t, 9)
	o := opts()
	o.timeout, o.retry = 18, 1 // 1.07 s
	a, b := f.pair(o)
	a.reg(1, 0, 1<<16, allAccess)
	b.reg(2, 0, 1<<16, allAccess)
	for i := range 3 {
		for _, op := range []WROpcode{WRWrite, WRRead, WRFetchAdd} {
			n := 8
			if op != WRFetchAdd {
				n = 20000
			}
			w := WQE{Opcode: op, RKey: 2, SGEs: []SGE{sge(1, 0, n)}}
			a.post(w)
			f.until("warm up", 1e9, func() bool { return len(a.sends) == len(a.sq) })
			// The last packet to or from b is lost, twice.
			lost := 0
			f.loss = func(p *wire.RoCE) bool {
				if p.Info.Is(wire.Last) && lost < 1+i && p.BTH.DestQP == 0x11+0x11*uint32(i&1) {
					lost++
					return true
				}
				return false
			}
			start := f.now
			a.post(w)
			f.until("lost at the end", 2e9, func() bool { return len(a.sends) == len(a.sq) })
			if took := f.now - start; took > 60e6 {
				t.Errorf("opcode %d lost %d times: took %d us", op, lost, took/1000)
			}
			f.loss = nil
		}
	}
	if s := a.q.Stats(); s.Timeouts != 0 || s.Retransmits == 0 || a.q.recovery.retryLeft != 1 {
		t.Errorf("%+v", s)
	}
	f.loss = func(*wire.RoCE) bool { return true }
	start, frames := f.now, f.frames
	a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 20000)}})
	f.until("dead peer", 10e9, func() bool { return len(a.sends) == len(a.sq) })
	if took, want := f.now-start, 3*timeoutNS(18); took < want || took > want+want/8 {
		t.Errorf("gave up after %d ms, want %d ms", took/1e6, want/1e6)
	}
	if n := f.frames - frames; n > 300 {
		t.Errorf("%d frames sent to a dead peer", n)
	}
}
