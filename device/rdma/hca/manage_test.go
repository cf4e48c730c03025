package hca

import (
	"encoding/binary"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// fast creates a region for fast registration with one page; list is its page list.
func (g *guest) fast(pd uint32) (key uint32, list translate.PA) {
	g.tb.Helper()
	return g.fastRegion(pd, 1)
}

// setReg writes a fast registration of pages of 4 KiB; r is all else.
func setReg(s abi.SendWQE, id uint64, flags uint32, r abi.RegWR) {
	r.PageShift = 12
	s.SetRequest(id, abi.WRRegMR, flags)
	r.Encode(s[abi.SendWQERegOff:])
}

// fastRegion makes a region for fast registrations of so many pages, and room for their list.
func (g *guest) fastRegion(pd uint32, pages uint64) (key uint32, list translate.PA) {
	g.tb.Helper()
	var r abi.CreateMRResp
	req := abi.CreateMR{PDN: pd, Flags: abi.MRFast, PageShift: 12, NPages: pages}
	if err := r.Decode(g.must(abi.CmdCreateMR, enc(abi.SizeCreateMR, &req))); err != nil {
		g.tb.Fatal(err)
	}
	return r.LKey, g.alloc(4096)
}

// TestInvalidationWaits: another loop uses memory that is invalidated, first by the
// peer, then by a local request. The key is void at once; the
// completion comes when the other loop has finished (EP-3), and later completions after it.
func TestInvalidationWaits(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	a, b := ga.qp(qpSpec{pd: ga.pd(), flags: abi.QPPrivileged}), gb.qp(qpSpec{pd: gb.pd()})
	a.connectRC(b)
	b.connectRC(a)
	key, list := ga.fast(1)
	mem, src := ga.alloc(4096), gb.alloc(4096)
	kb := gb.mr(1, src, 4096, abi.AccessLocalWrite|remoteAll)
	fill(gb.at(src, 4096), 1)
	binary.LittleEndian.PutUint64(ga.at(list, 8), uint64(mem))
	register := func(low uint32) uint32 {
		t.Helper()
		s := a.wqe()
		reg := abi.RegWR{IOVA: 1 << 40, Length: 4096, PageList: uint64(list), NPages: 1, RKey: key&^0xff | low,
			Access: abi.AccessLocalWrite | remoteAll}
		setReg(s, 1, abi.SendSignaled, reg)
		a.post()
		if wc := a.scq.await(1)[0]; wc.Status != abi.WCSuccess || wc.Opcode != abi.WCOpRegMR {
			t.Fatalf("registration %+v", wc)
		}
		return reg.RKey
	}
	void := func(k uint32) {
		t.Helper()
		if m := ga.vm.Check(translate.Key(k), 1, 1<<40, 1, 0); m.Kind != translate.BadKey {
			t.Fatalf("key %#x is not void: %v", k, m.Err())
		}
	}
	epochs := ga.space.Epochs()
	const busy = 9 // a slot of no loop of this test

	k := register(5)
	for id := range uint64(3) {
		a.recv(20+id, abi.SGE{})
	}
	other := epochs.Enter(translate.ByLoop(busy))
	s := b.wqe()
	s.SetRequest(2, abi.WRRDMAWrite, abi.SendSignaled)
	s.SetRDMA(1<<40, k)
	s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 4096, LKey: kb}})
	b.post()
	for id := range uint32(2) { // the second is behind the waiting one
		s = b.wqe()
		s.SetRequest(uint64(3+id), []uint32{abi.WRSendWithInv, abi.WRSend}[id], abi.SendSignaled)
		s.SetInvalidateRKey(k)
		s.SetSGEs(nil)
		b.post()
	}
	if wc := b.scq.await(1)[0]; wc.ID != 2 || wc.Status != abi.WCSuccess {
		t.Fatalf("WRITE %+v", wc)
	}
	w.step(50)
	if got := a.rcq.poll(); len(got) != 0 {
		t.Fatalf("completed while the memory is in use: %+v", got)
	}
	void(k)
	epochs.Leave(busy, other)
	got := a.rcq.await(2)
	if got[0].ID != 20 || got[0].Status != abi.WCSuccess || got[0].Flags&abi.WCFlagsInvalidate == 0 ||
		le.Uint32(got[0].Ex[:]) != k || got[1].ID != 21 {
		t.Fatalf("receives %+v", got)
	}
	b.scq.await(2)

	k = register(6)
	other = epochs.Enter(translate.ByLoop(busy))
	s = a.wqe()
	s.SetRequest(7, abi.WRLocalInv, abi.SendSignaled)
	s.SetInvalidateRKey(k)
	a.post()
	w.step(50)
	void(k)
	if got := a.scq.poll(); len(got) != 0 {
		t.Fatalf("completed while the memory is in use: %+v", got)
	}
	epochs.Leave(busy, other)
	if wc := a.scq.await(1)[0]; wc.ID != 7 || wc.Status != abi.WCSuccess || wc.Opcode != abi.WCOpLocalInv {
		t.Fatalf("invalidation %+v", wc)
	}

	// A QP that is destroyed while it waits releases everything.
	k = register(7)
	other = epochs.Enter(translate.ByLoop(busy))
	s = b.wqe()
	s.SetRequest(8, abi.WRSendWithInv, abi.SendSignaled)
	s.SetInvalidateRKey(k)
	s.SetSGEs(nil)
	b.post()
	w.step(50)
	void(k)
	ga.must(abi.CmdDestroyQP, handle(a.n))
	epochs.Leave(busy, other)
	w.step(5)
	if n := w.pool.InUse(); n != 0 {
		t.Errorf("%d frame buffers are kept", n)
	}
}

// Requests that cost the loop many steps each, 512 pages to register or many one-byte segments to gather, use up the
// budget of a poll like packets: a guest cannot make other VMs of the engine wait for a thousand of them.
func TestStepsUseUpTheBudget(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{})
	g := w.guests[0]
	pd := g.pd()
	list := g.alloc(4096)
	for i := range 512 {
		binary.LittleEndian.PutUint64(g.at(list+translate.PA(8*i), 8), uint64(memBase))
	}
	cq := g.cq(1024)
	const qps, each = 12, 16
	for range qps {
		q := g.qp(qpSpec{pd: pd, flags: abi.QPPrivileged, scq: cq})
		q.connectRC(q)
		for range each {
			var r abi.CreateMRResp
			if err := r.Decode(g.must(abi.CmdCreateMR, enc(abi.SizeCreateMR, &abi.CreateMR{PDN: pd, Flags: abi.MRFast,
				PageShift: 12, NPages: 512}))); err != nil {
				t.Fatal(err)
			}
			s := q.wqe()
			setReg(s, 1, abi.SendSignaled, abi.RegWR{IOVA: 1 << 40, Length: 512 << 12, PageList: uint64(list),
				NPages: 512, RKey: r.RKey, Access: abi.AccessLocalWrite})
			q.post()
		}
	}
	done, polls := 0, 0
	most := 100
	if Journaled {
		most = 300 // each registration is committed before the next request of its queue pair
	}
	for ; done < qps*each && polls < most; polls++ {
		w.step(1)
		n := 0
		for _, wc := range cq.poll() {
			if n++; wc.Status != abi.WCSuccess {
				t.Fatalf("%+v", wc)
			}
		}
		if n > qpBudget {
			t.Errorf("%d registrations of 512 pages in one poll, want at most %d", n, qpBudget)
		}
		done += n
	}
	if done != qps*each {
		t.Errorf("%d of %d registered", done, qps*each)
	}
	// The segments of a request count as well.
	q := g.qp(qpSpec{pd: pd, scq: cq})
	q.connectRC(q)
	src := g.alloc(4096)
	key := g.mr(pd, src, 4096, abi.AccessLocalWrite)
	before := g.engines[0].steps
	q.recv(1, abi.SGE{Addr: uint64(src) + 64, Length: 64, LKey: key})
	s := q.wqe()
	s.SetRequest(2, abi.WRSend, abi.SendSignaled)
	s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 1, LKey: key}, {Addr: uint64(src), Length: 1, LKey: key},
		{Addr: uint64(src), Length: 1, LKey: key}})
	q.post()
	cq.await(2)
	if n := g.engines[0].steps - before; n != 2 {
		t.Errorf("%d steps for three segments, want 2 beside the packet", n)
	}
}
