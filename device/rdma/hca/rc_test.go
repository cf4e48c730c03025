package hca

import (
	"bytes"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

func fill(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i*7) ^ byte(i>>8) ^ seed
	}
}

// SEND, WRITE, READ and atomics between two guests through real rings.
func TestRCTransfer(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	a, b := w.pair()
	const n = 10000
	src, dst := a.g.alloc(n), b.g.alloc(n)
	ka := a.g.mr(1, src, n, abi.AccessLocalWrite)
	kb := b.g.mr(1, dst, n, abi.AccessLocalWrite|remoteAll)
	fill(a.g.at(src, n), 1)

	b.recv(5, abi.SGE{Addr: uint64(dst), Length: n, LKey: kb})
	s := a.wqe()
	s.SetRequest(11, abi.WRSendWithImm, abi.SendSignaled)
	s.SetImm([4]byte{1, 2, 3, 4})
	s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 100, LKey: ka}, {Addr: uint64(src) + 100, Length: n - 100, LKey: ka}})
	a.post()
	wc := a.scq.await(1)[0]
	if wc.ID != 11 || wc.Status != abi.WCSuccess || wc.Opcode != abi.WCOpSend || wc.QPN != a.n {
		t.Fatalf("send completion %+v", wc)
	}
	wc = b.rcq.await(1)[0]
	if wc.ID != 5 || wc.Status != abi.WCSuccess || wc.Opcode != abi.WCOpRecv || wc.ByteLen != n || wc.QPN != b.n ||
		wc.Flags != abi.WCFlagWithImm || wc.Ex != [4]byte{1, 2, 3, 4} {
		t.Fatalf("receive completion %+v", wc)
	}
	if !bytes.Equal(a.g.at(src, n), b.g.at(dst, n)) {
		t.Fatal("SEND: data differ")
	}

	fill(a.g.at(src, n), 2)
	s = a.wqe()
	s.SetRequest(12, abi.WRRDMAWrite, 0)
	s.SetRDMA(uint64(dst), kb)
	s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: n, LKey: ka}})
	a.post()
	s = a.wqe()
	s.SetRequest(13, abi.WRRDMAWrite, abi.SendSignaled|abi.SendInline)
	s.SetRDMA(uint64(dst), kb)
	s.SetInline([]byte("inline"))
	a.post()
	if wc = a.scq.await(1)[0]; wc.ID != 13 || wc.Status != abi.WCSuccess || wc.Opcode != abi.WCOpRDMAWrite {
		t.Fatalf("write completion %+v", wc)
	}
	if c, p := a.sq.cons().Load(), a.sq.prod().Load(); c != p {
		t.Fatalf("SQ consumer %d, producer %d: unsignalled requests count too", c, p)
	}
	copy(a.g.at(src, n), "inline")
	if !bytes.Equal(a.g.at(src, n), b.g.at(dst, n)) {
		t.Fatal("WRITE: data differ")
	}

	fill(b.g.at(dst, n), 3)
	s = a.wqe()
	s.SetRequest(14, abi.WRRDMARead, abi.SendSignaled)
	s.SetRDMA(uint64(dst), kb)
	s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: n, LKey: ka}})
	a.post()
	if wc = a.scq.await(1)[0]; wc.ID != 14 || wc.Status != abi.WCSuccess || wc.Opcode != abi.WCOpRDMARead ||
		wc.ByteLen != n {
		t.Fatalf("read completion %+v", wc)
	}
	if !bytes.Equal(a.g.at(src, n), b.g.at(dst, n)) {
		t.Fatal("READ: data differ")
	}

	word := b.g.u64(dst)
	word.Store(40)
	for i, op := range []uint32{abi.WRAtomicFetchAndAdd, abi.WRAtomicCmpAndSwp} {
		s = a.wqe()
		s.SetRequest(uint64(20+i), op, abi.SendSignaled)
		s.SetAtomic(uint64(dst), kb, []uint64{2, 42}[i], 99)
		s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 8, LKey: ka}})
		a.post()
		if wc = a.scq.await(1)[0]; wc.Status != abi.WCSuccess {
			t.Fatalf("atomic completion %+v", wc)
		}
		if old, now := a.g.u64(src).Load(), word.Load(); old != []uint64{40, 42}[i] || now != []uint64{42, 99}[i] {
			t.Fatalf("atomic %d: returned %d, memory %d", op, old, now)
		}
	}
}
