package roce

import (
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// TestFaults (PF-8, PF-10, PF-12): every operation completes once absent memory is present, and once frame buffers are
// available again.
func TestFaults(t *testing.T) {
	ops := []WQE{
		{Opcode: WRWrite, RKey: 2, RemoteVA: 0x1000, SGEs: []SGE{sge(1, 0, 5000)}},
		{Opcode: WRSendImm, SGEs: []SGE{sge(1, 5000, 3000)}},
		{Opcode: WRRead, RKey: 2, RemoteVA: 0x8000, SGEs: []SGE{sge(1, 0x8000, 5000)}},
		{Opcode: WRFetchAdd, RKey: 2, RemoteVA: 0x7000, SwapAdd: 1, SGEs: []SGE{sge(1, 0x7000, 8)}},
		{Opcode: WRWriteImm, RKey: 2, RemoteVA: 0x4000, SGEs: []SGE{sge(1, 0x4000, 3000)}},
	}
	for _, what := range []string{"fetchsend", "fetchrecv", "gather", "scatter", "readremote", "writeremote", "atomic",
		"bufs"} {
		for _, kind := range []translate.MissKind{translate.GuestFault, translate.HostFault} {
			t.Run(what, func(t *testing.T) {
				f := newFabric(t, 1)
				o := opts()
				o.retry, o.timeout = 1, 9 // waits must not use up retries
				a, b := f.pair(o)
				src := a.reg(1, 0, 1<<16, allAccess)
				dst := b.reg(2, 0, 1<<16, allAccess)
				k := 0
				miss := func(w string) translate.MissKind {
					if w == what {
						if k++; k%7 < 5 { // mostly absent
							return kind
						}
					}
					return 0
				}
				a.fault, b.fault = miss, miss
				switch what {
				case "fetchrecv":
					b.recvMiss = func() Fetch {
						if k++; k%7 < 5 {
							return FetchFault
						}
						return FetchReady
					}
				case "bufs":
					a.noBufs, b.noBufs = 20, 20
				}
				b.postRecv(sge(2, 0xa000, 4000))
				b.postRecv(sge(2, 0xa000, 4000))
				want := append([]byte{}, dst.buf[0x8000:0x8000+5000]...)
				for _, w := range ops {
					a.post(w)
				}
				for len(a.sends) < len(ops) && f.step() {
					if what == "bufs" && f.rng.Intn(3) == 0 {
						a.noBufs, b.noBufs = f.rng.Intn(3), f.rng.Intn(3)
					}
					if f.now > 100e9 {
						t.Fatal("stuck")
					}
				}
				a.wantSends(0, 0, 0, 0, 0)
				b.wantRecvs(0, 0)
				same(t, "write", dst.buf[0x1000:0x1000+5000], src.buf[:5000])
				same(t, "send", dst.buf[0xa000:0xa000+3000], src.buf[5000:8000])
				same(t, "read", src.buf[0x8000:0x8000+5000], want)
				same(t, "write imm", dst.buf[0x4000:0x4000+3000], src.buf[0x4000:0x4000+3000])
				if b.atomics != 1 {
					t.Errorf("%d atomics executed", b.atomics)
				}
				if s := a.q.Stats().Faults + b.q.Stats().Faults; s == 0 && what != "bufs" {
					t.Error("no fault was counted")
				}
				if what == "writeremote" && b.q.Stats().TxRNR == 0 {
					t.Error("no RNR NAK for a WRITE to absent memory (PF-8)")
				}
			})
		}
	}
}

// UC and UD drop on a miss (PF-11).
func TestFaultDrops(t *testing.T) {
	f := newFabric(t, 1)
	o := opts()
	o.typ = UC
	a, b := f.pair(o)
	a.reg(1, 0, 4096, allAccess)
	b.reg(2, 0, 4096, allAccess)
	b.fault = func(w string) translate.MissKind { return translate.GuestFault }
	b.postRecv(sge(2, 0, 4096))
	a.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 3000)}})
	a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}})
	f.settle(10e6)
	a.wantSends(0, 0)
	b.wantRecvs()
	b.wantState(RTS)
	if b.q.Stats().RxDropped != 6 || f.frames != 6 {
		t.Errorf("%d dropped of %d", b.q.Stats().RxDropped, f.frames)
	}
	b.fault = nil
	a.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 3000)}})
	f.settle(10e6)
	b.wantRecvs(0)
}

// An idle connection does not rearm its timer.
func TestIdle(t *testing.T) {
	f := newFabric(t, 1)
	a, b := f.pair(opts())
	a.reg(1, 0, 4096, allAccess)
	b.reg(2, 0, 4096, allAccess)
	a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}})
	f.until("write", 1e9, func() bool { return len(a.sends) == 1 })
	f.settle(1e9)
	steps := f.steps
	f.settle(3600e9)
	if f.steps-steps > 2 || a.timer != 0 || b.timer != 0 {
		t.Errorf("%d steps in an idle hour", f.steps-steps)
	}
}

// A loop-back connection: the QP is its own peer.
func TestSelf(t *testing.T) {
	f := newFabric(t, 1)
	o := opts()
	n := f.node("self", Config{Type: RC, QPN: 0x33, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInline: 64, ECN: true,
		SelectiveRepeat: true})
	n.connect(&o, 0x33, av(ipA, ipA), 77, 77)
	m := n.reg(1, 0, 1<<16, allAccess)
	n.postRecv(sge(1, 0x8000, 4000))
	n.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 4000)}})
	n.post(WQE{Opcode: WRRead, RKey: 1, RemoteVA: 0x8000, SGEs: []SGE{sge(1, 0xa000, 4000)}})
	i := 0
	f.loss = func(p *wire.RoCE) bool { i++; return i%5 == 0 }
	f.until("self", 10e9, func() bool { return len(n.sends) == 2 })
	n.wantSends(0, 0)
	same(t, "send", m.buf[0x8000:0x8000+4000], m.buf[:4000])
	same(t, "read", m.buf[0xa000:0xa000+4000], m.buf[:4000])
}
