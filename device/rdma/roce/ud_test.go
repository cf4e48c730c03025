package roce

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

func (f *fabric) datagramQP(name string, typ Type, qpn, qkey uint32) *node {
	n := f.node(name, Config{Type: typ, QPN: qpn, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInline: 64, MTU: 1024, ECN: true,
		SelectiveRepeat: true})
	m := maskInitUD
	if typ == GSI {
		m &^= MaskPort
	}
	n.modify(Attr{State: Init, Port: 1, QKey: qkey}, m)
	n.modify(Attr{State: RTR}, MaskState)
	n.modify(Attr{State: RTS, SQPSN: 0xffffff}, MaskState|MaskSQPSN)
	return n
}

func TestUD(t *testing.T) {
	v6A, v6B := [16]byte{0: 0xfe, 1: 0x80, 15: 1}, [16]byte{0: 0xfe, 1: 0x80, 15: 2}
	v1 := av(v6A, v6B)
	v1.RoCEv1, v1.FlowLabel = true, 0x12345
	for i, path := range []AddressVector{av(ipA, ipB), av(v6A, v6B), v1} {
		for _, typ := range []Type{UD, GSI} {
			f := newFabric(t, int64(i))
			qa, qb := uint32(0x11), uint32(0x22)
			if typ == GSI {
				qb = 1
			}
			path.TrafficClass, path.HopLimit = 0x68, 33
			a, b := f.datagramQP("a", typ, qa, 0x1234), f.datagramQP("b", typ, qb, 0x1234)
			src := a.reg(1, 0, 4096, allAccess)
			dst := b.reg(2, 0, 1<<16, allAccess)
			for k, n := range []int{0, 1, 255, 256, 1000, 1024} {
				b.postRecv(sge(2, uint64(k*2048), 30), sge(2, uint64(k*2048+30), 1034))
				w := WQE{Opcode: WRSend, AV: path, RemoteQPN: qb, QKey: 0x1234, SGEs: []SGE{sge(1, 0, n)}}
				if n == 256 {
					w.Opcode, w.Imm, w.Solicited = WRSendImm, [4]byte{5, 6, 7, 8}, true
				}
				a.post(w)
				f.settle(1e6)
				if len(a.sends) != k+1 || len(b.recvs) != k+1 || a.sends[k].c.Status != 0 {
					t.Fatalf("%d bytes: %v %v", n, a.sends, b.recvs)
				}
				c := b.recvs[k].c
				want := Completion{Opcode: WCRecv, ByteLen: uint32(40 + n), Flags: FlagGRH, SrcQP: qa, VLAN: NoVLAN,
					SMAC: path.SMAC, IPv4: i == 0, RoCEv1: i == 2}
				if n == 256 {
					want.Flags |= FlagImm
					want.Imm, want.Solicited = w.Imm, true
				}
				if c != want {
					t.Errorf("%d bytes: completion %+v, want %+v", n, c, want)
				}
				buf := dst.buf[k*2048:]
				same(t, "payload", buf[40:40+n], src.buf[:n])
				if i == 0 {
					// Like Linux: 20 zero bytes, then the IPv4 header.
					if !bytes.Equal(buf[:20], make([]byte, 20)) || buf[20] != 0x45 || buf[21] != 0x68 ||
						buf[28] != 33 ||
						!bytes.Equal(buf[32:36], ipA[12:]) || !bytes.Equal(buf[36:40], ipB[12:]) {
						t.Errorf("GRH area % x", buf[:40])
					}
				} else if buf[0]>>4 != 6 || !bytes.Equal(buf[8:24], v6A[:]) || !bytes.Equal(buf[24:40], v6B[:]) {
					t.Errorf("GRH area % x", buf[:40])
				}
			}
			if a.q.req.nxt&psnMask != 5 {
				t.Errorf("PSN %#x", a.q.req.nxt)
			}
		}
	}
}

func TestUDDrops(t *testing.T) {
	f := newFabric(t, 1)
	a, b := f.datagramQP("a", UD, 0x11, 7), f.datagramQP("b", UD, 0x22, 0x80000042)
	a.reg(1, 0, 4096, allAccess)
	dst := b.reg(2, 0, 4096, allAccess)
	send := func(qkey uint32, n int) {
		a.post(WQE{Opcode: WRSend, AV: av(ipA, ipB), RemoteQPN: 0x22, QKey: qkey, SGEs: []SGE{sge(1, 0, n)}})
		f.settle(1e6)
	}
	before := append([]byte{}, dst.buf...)
	b.postRecv(sge(2, 0, 39))
	send(0x42, 8)       // wrong Q_Key
	send(0x80000042, 8) // controlled: the QP's own 7 is sent
	if b.q.Stats().RxDropped != 2 {
		t.Errorf("%+v", *b.q.Stats())
	}
	a.modify(Attr{QKey: 0x80000042}, MaskQKey)
	send(0x80000000, 8) // too small a receive: it stays for a smaller message
	if b.q.Stats().RxDropped != 3 || b.rqNext != 1 {
		t.Errorf("%+v", *b.q.Stats())
	}
	same(t, "memory", dst.buf, before)
	b.wantRecvs()
	b.modify(Attr{State: Err}, MaskState)
	f.settle(1e6)
	b.wantRecvs(StatusFlush)

	// No receive is posted.
	f = newFabric(t, 1)
	a, b = f.datagramQP("a", UD, 0x11, 7), f.datagramQP("b", UD, 0x22, 7)
	a.reg(1, 0, 4096, allAccess)
	send(7, 8)
	a.wantSends(0)
	b.wantState(RTS)
	// A malformed or inaccessible receive ends the QP.
	b.postRecv(sge(2, 0, 100))
	send(7, 8)
	b.wantRecvs(StatusLocProt)
	b.wantState(Err)
}

// Send errors put UD and UC into SQE, which flushes; RTS ends SQE.
func TestSQE(t *testing.T) {
	for _, c := range []struct {
		w    WQE
		want Status
	}{
		{WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 1025)}}, StatusLocLen},
		{WQE{Opcode: WRWrite, SGEs: []SGE{sge(1, 0, 8)}}, StatusLocQPOp},
		{WQE{Opcode: WRSend, SGEs: []SGE{sge(9, 0, 8)}}, StatusLocProt},
	} {
		f := newFabric(t, 1)
		a, b := f.datagramQP("a", UD, 0x11, 7), f.datagramQP("b", UD, 0x22, 7)
		a.reg(1, 0, 4096, allAccess)
		a.reg(3, 0, 4096, allAccess)
		b.reg(2, 0, 4096, allAccess)
		c.w.AV, c.w.RemoteQPN, c.w.QKey = av(ipA, ipB), 0x22, 7
		good := c.w
		good.Opcode, good.SGEs = WRSend, []SGE{sge(1, 0, 8)}
		b.postRecv(sge(2, 0, 100))
		b.postRecv(sge(2, 0, 100))
		a.postRecv(sge(3, 0, 100))
		a.post(good)
		a.post(c.w)
		a.post(good)
		f.settle(1e6)
		a.wantSends(0, c.want, StatusFlush)
		a.wantState(SQE)
		a.post(good)
		f.settle(1e6)
		a.wantSends(0, c.want, StatusFlush, StatusFlush)
		// The receive side still works.
		back := good
		back.AV, back.RemoteQPN, back.SGEs = av(ipB, ipA), 0x11, []SGE{sge(2, 0, 8)}
		b.post(back)
		f.settle(1e6)
		a.wantRecvs(0)
		a.modify(Attr{State: RTS}, MaskState)
		a.post(good)
		f.settle(1e6)
		a.wantSends(0, c.want, StatusFlush, StatusFlush, 0)
		b.wantRecvs(0, 0)
	}
}

func TestUCOperations(t *testing.T) {
	for mtu := uint8(1); mtu <= 5; mtu++ {
		f := newFabric(t, 1)
		o := opts()
		o.typ, o.mtu, o.psnA = UC, mtu, 0xfffffe
		a, b := f.pair(o)
		src := a.reg(1, 0, 1<<16, allAccess)
		dst := b.reg(2, 0, 1<<16, allAccess)
		m := mtuBytes(mtu)
		k := 0
		for _, n := range []int{0, 1, 3, m - 1, m, m + 1, 3*m + 2, 1 << 16} {
			for _, op := range []WROpcode{WRSend, WRSendImm, WRWrite, WRWriteImm} {
				f.rng.Read(src.buf)
				before := len(b.recvs)
				if op != WRWrite {
					b.postRecv(sge(2, 0, 1<<16))
				}
				a.post(WQE{Opcode: op, RKey: 2, Imm: [4]byte{1, 2, 3, byte(op)}, SGEs: []SGE{sge(1, 0, n)}})
				f.settle(10e6)
				k++
				if len(a.sends) != k || a.sends[k-1].c.Status != 0 {
					t.Fatalf("mtu %d, opcode %d, %d bytes: %v", m, op, n, a.sends)
				}
				same(t, fmt.Sprint(op, n), dst.buf[:n], src.buf[:n])
				if op == WRWrite {
					continue
				}
				c := b.recvs[before].c
				if c.Status != 0 || c.ByteLen != uint32(n) || op != WRSend &&
					(c.Flags != FlagImm || c.Imm[3] != byte(op)) ||
					(c.Opcode == WCRecvWithImm) != (op == WRWriteImm) {
					t.Errorf("completion %+v", c)
				}
			}
		}
	}
	// UC has no READ and no atomics.
	f := newFabric(t, 1)
	o := opts()
	o.typ = UC
	a, _ := f.pair(o)
	a.reg(1, 0, 64, allAccess)
	a.post(WQE{Opcode: WRRead, SGEs: []SGE{sge(1, 0, 8)}})
	f.settle(1e6)
	a.wantSends(StatusLocQPOp)
	a.wantState(SQE)
}

// With lost, reordered and duplicated UC packets a message arrives as it was sent or not at all, and receive WQEs are
// neither lost nor swapped.
func TestUCLoss(t *testing.T) {
	for seed := range int64(20) {
		f := newFabric(t, seed)
		o := opts()
		o.typ, o.mtu = UC, 1
		a, b := f.pair(o)
		f.impair([]impair{{loss: 0.1}, {loss: 0.05, dup: 0.1}, {every: 4}, {loss: 0.02, flip: 0.05}}[seed%4])
		const n, size = 200, 2048
		a.reg(1, 0, n*size, allAccess)
		b.reg(2, 0, n*size, allAccess)
		lens := make([]int, n)
		for i := range n {
			lens[i] = f.rng.Intn(size)
			b.postRecv(sge(2, uint64(i*size), size))
			// Every message contains its number.
			for k := range lens[i] {
				a.regions[1].buf[i*size+k] = byte(i + k/256)
			}
			a.post(WQE{Opcode: WRSendImm, Imm: [4]byte{byte(i)}, SGEs: []SGE{sge(1, uint64(i*size), lens[i])}})
		}
		f.until("sends", 1e9, func() bool { return len(a.sends) == n })
		f.settle(1e9)
		if len(b.recvs) < 20 || len(b.recvs) >= n {
			t.Errorf("seed %d: %d of %d arrived", seed, len(b.recvs), n)
		}
		for i, r := range b.recvs {
			m := int(r.c.Imm[0])
			if r.id != uint64(5000+i) || r.c.ByteLen != uint32(lens[m]) {
				t.Fatalf("seed %d, receive %d: message %d of %d bytes, %+v", seed, i, m, lens[m], r)
			}
			same(t, "message", b.regions[2].buf[i*size:i*size+lens[m]], a.regions[1].buf[m*size:m*size+lens[m]])
		}
		b.wantState(RTS)
	}
}

// UC's rules for dropping, packet by packet (IBTA 9.8.2.2).
func TestUCResponder(t *testing.T) {
	o := opts()
	o.typ, o.psnA, o.mtu = UC, 100, 1
	f, b, sent := lone(t, o)
	mem := b.reg(2, 0, 8192, allAccess)
	pkt := make([]byte, 256)
	c := func(op wire.Opcode, psn uint32, n int) craft {
		return craft{op: op, psn: psn, data: pkt[:n], key: 2, length: uint32(n)}
	}
	b.inject(c(wire.OpUCSendOnly, 100, 8)) // no receive: dropped
	b.postRecv(sge(2, 0, 700))
	b.inject(c(wire.OpUCSendFirst, 101, 256))
	b.inject(c(wire.OpUCSendLast, 103, 4)) // gap
	b.inject(c(wire.OpUCSendMiddle, 104, 256))
	b.inject(c(wire.OpUCSendLast, 105, 4))
	b.wantRecvs()
	b.inject(c(wire.OpUCSendFirst, 50, 256)) // any PSN may start
	b.inject(c(wire.OpUCSendLast, 51, 4))
	b.wantRecvs(0)
	b.postRecv(sge(2, 0, 700))
	b.inject(c(wire.OpUCSendFirst, 52, 256))
	b.inject(c(wire.OpUCSendOnly, 53, 3)) // abandons the previous message
	b.wantRecvs(0, 0)
	if b.recvs[1].c.ByteLen != 3 || b.recvs[1].id != 5001 {
		t.Errorf("%+v", b.recvs[1])
	}
	// Too long for the receive, no rights, bad key: the message is dropped and the QP continues.
	b.postRecv(sge(2, 0, 2))
	b.inject(c(wire.OpUCSendOnly, 54, 3))
	before := append([]byte{}, mem.buf...)
	b.regions[2].access = translate.LocalWrite
	b.inject(c(wire.OpUCWriteOnly, 55, 8))
	b.q.attr.Access = 0
	b.regions[2].access = allAccess
	b.inject(c(wire.OpUCWriteOnly, 56, 8))
	same(t, "memory", mem.buf, before)
	b.wantState(RTS)
	b.wantRecvs(0, 0)
	b.inject(c(wire.OpUCSendOnly, 57, 2))
	b.wantRecvs(0, 0, 0)
	// A local error ends it.
	b.postRecv(sge(99, 0, 2))
	b.inject(c(wire.OpUCSendOnly, 58, 2))
	b.wantRecvs(0, 0, 0, StatusLocProt)
	b.wantState(Err)
	b.wantResp(sent)
	_ = f
}
