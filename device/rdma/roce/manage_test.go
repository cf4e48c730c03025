package roce

import (
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// TestManageOrder: memory management requests among others, over a wire that loses packets, with an adapter that is
// busy or has its memory paged out now and then. Each executes once; LOCAL_INV and BIND_MW after all requests before
// them have completed; all complete in order (IBTA 10.8.3).
func TestManageOrder(t *testing.T) {
	for _, typ := range []Type{RC, UC} {
		f := newFabric(t, 11)
		o := opts()
		o.typ = typ
		a, b := f.pair(o)
		if typ == RC {
			f.loss = func(*wire.RoCE) bool { return f.rng.Intn(20) == 0 }
		}
		a.reg(1, 0x1000, 1<<16, allAccess)
		b.reg(2, 0x2000, 1<<16, allAccess)
		done := map[uint32]bool{}
		executed := 0
		a.manage = func(w *WQE) translate.Outcome {
			switch {
			case done[w.Seq]:
				t.Fatalf("%v: request %d executed twice", typ, w.Seq)
			case w.Opcode != WRRegMR && len(a.sends) != int(w.Seq):
				t.Fatalf("%v: request %d executed when %d had completed", typ, w.Seq, len(a.sends))
			case f.rng.Intn(3) == 0:
				return translate.Again
			}
			done[w.Seq] = true
			executed++
			return translate.Done
		}
		a.fault = func(what string) translate.MissKind {
			if what == "manage" && f.rng.Intn(4) == 0 {
				return translate.HostFault
			}
			return translate.None
		}
		ops := []WROpcode{WRBindMW, WRWrite}
		if typ == RC {
			ops = []WROpcode{WRRegMR, WRLocalInv, WRBindMW, WRWrite, WRRead, WRSend}
		}
		const n = 400
		managed := 0
		for i := range n {
			w := WQE{Opcode: ops[f.rng.Intn(len(ops))], Fence: f.rng.Intn(4) == 0}
			switch w.Opcode {
			case WRRegMR, WRLocalInv, WRBindMW:
				managed++
			case WRSend:
				w.SGEs = []SGE{sge(1, 0x1000, f.rng.Intn(5000))}
				b.postRecv(sge(2, 0x2000, 5000))
			default:
				w.SGEs = []SGE{sge(1, 0x1000, 1+f.rng.Intn(5000))}
				w.RemoteVA, w.RKey = 0x2000, 2
			}
			w.Manage.List = translate.PA(i)
			a.post(w)
		}
		f.until("everything completes", 100e9, func() bool { return len(a.sends) == n })
		for i := range a.sends {
			if c := &a.sends[i].c; c.Status != StatusSuccess || c.Opcode != a.sq[i].Opcode.info().wc {
				t.Fatalf("%v: request %d: %+v", typ, i, c)
			}
		}
		if executed != managed {
			t.Errorf("%v: %d of %d executed", typ, executed, managed)
		}
	}
}

// TestManageRefused: requests posted before are not affected, those behind are flushed.
func TestManageRefused(t *testing.T) {
	f := newFabric(t, 1)
	a, b := f.pair(opts())
	a.reg(1, 0x1000, 8192, allAccess)
	b.reg(2, 0x2000, 8192, allAccess)
	a.manage = func(*WQE) translate.Outcome { return translate.Refused }
	w := WQE{Opcode: WRWrite, SGEs: []SGE{sge(1, 0x1000, 8192)}, RemoteVA: 0x2000, RKey: 2}
	a.post(w)
	a.post(WQE{Opcode: WRRegMR})
	a.post(w)
	f.settle(10e9)
	a.wantSends(StatusSuccess, StatusMemMgt, StatusFlush)
	a.wantState(Err)
	same(t, "the WRITE before", b.regions[2].buf, a.regions[1].buf)
}
