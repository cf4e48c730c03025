package hca

import (
	"bytes"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/rdma/cm/cmtest"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Requests of RC that meet absent pages, in a whole device (HF-1).

// refusals counts RNR NAKs and NAKs that go over the network, and makes requests say nothing about rnr_retry if
// unmarked, as those of other implementations do.
type refusals struct {
	rnr, naks int
	unmarked  bool
}

func (r *refusals) watch(w *world) {
	w.losing(func(f []byte) bool {
		var p wire.RoCE
		if wire.ParseRoCE(f, header.Locate(f), &p) != nil {
			w.tb.Error("not RoCE")
		}
		if p.Info.Op == wire.Ack {
			switch p.AETH().Syndrome.Kind() {
			case wire.SyndromeRNR:
				r.rnr++
			case wire.SyndromeNAK:
				r.naks++
			}
		}
		if p.BTH.Patience != 0 && r.unmarked {
			f[header.EthernetLen+header.IPv4Len+header.UDPLen+4] &^= 0x3f // not covered by the ICRC
		}
		return false
	})
}

// connectWith connects two RC QPs with an rnr_retry at both ends.
func connectWith(a, b *tqp, rnr uint8) {
	a.connectRNR(b, rnr)
	b.connectRNR(a, rnr)
}

// A peer with rnr_retry 0 accesses memory that is absent on the host, and sends into absent buffers of an absent
// receive ring: everything completes, and it gets no RNR NAK, also if it is not known to be a vnicd.
func TestKeptRC(t *testing.T) {
	for _, unmarked := range []bool{false, true} {
		for _, op := range []uint32{abi.WRRDMAWrite, abi.WRRDMAWriteWithImm, abi.WRSend, abi.WRRDMARead,
			abi.WRAtomicFetchAndAdd} {
			w := newWorld(t, 1, 2, Limits{})
			r := &refusals{unmarked: unmarked}
			r.watch(w)
			ga, gb := w.guests[0], w.guests[1]
			pa, pb := ga.pd(), gb.pd()
			a, b := ga.qp(qpSpec{pd: pa}), gb.qp(qpSpec{pd: pb})
			connectWith(a, b, 0)
			const size = 5 * 4096
			src, dst := ga.alloc(size), gb.alloc(size)
			ka, kb := ga.mr(pa, src, size, 1), gb.mr(pb, dst, size, demandAccess)
			fill(ga.at(src, size), 3)
			fill(gb.at(dst, size), 3)
			used, n := w.pool.InUse(), uint32(size)
			if op == abi.WRAtomicFetchAndAdd {
				n = 8
			}
			const count = 3
			for i := range uint64(count) {
				b.recv(i, abi.SGE{Addr: uint64(dst), Length: size, LKey: kb})
			}
			fill(gb.at(dst, size), 3)
			if op != abi.WRRDMARead && op != abi.WRAtomicFetchAndAdd {
				clear(gb.at(dst, size))
			}
			gb.takeAway(dst, size)
			gb.takeAway(translate.PA(b.rq.pas[0]), 4096)
			for i := range uint64(count) {
				s := a.wqe()
				s.SetRequest(i, op, abi.SendSignaled)
				if op == abi.WRAtomicFetchAndAdd {
					s.SetAtomic(uint64(dst), kb, 0, 0)
				} else if op != abi.WRSend {
					s.SetRDMA(uint64(dst), kb)
				}
				s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: n, LKey: ka}})
				a.post()
			}
			w.step(10)
			if got := a.scq.poll(); len(got) != 0 {
				t.Fatalf("completed in absent memory: %+v", got)
			}
			var got []abi.WC
			w.until("the requests", func() bool {
				gb.hostServe()
				got = append(got, a.scq.poll()...)
				return len(got) == count
			})
			for _, wc := range got {
				if wc.Status != abi.WCSuccess {
					t.Fatalf("opcode %d: %+v", op, wc)
				}
			}
			if !bytes.Equal(ga.at(src, size), gb.at(dst, size)) {
				t.Errorf("opcode %d: data differs", op)
			}
			if r.rnr != 0 || r.naks != 0 || gb.Stats().Value[abi.StatFaultDrops] != 0 {
				t.Errorf("opcode %d: %d RNR NAKs, %d NAKs, %d drops", op, r.rnr, r.naks,
					gb.Stats().Value[abi.StatFaultDrops])
			}
			w.step(10)
			if m := w.pool.InUse(); m != used || gb.engines[0].heldFrames != 0 {
				t.Errorf("%d frame buffers are in use, %d were", m, used)
			}
		}
	}
}

// Peers fill memory that the host does not provide. What one VM keeps is bounded, leaves room for others and ends after
// a time. Requests to memory that is present go on, and lost packets of another QP are still repaired one by one.
func TestKeptRCBounds(t *testing.T) {
	const size, small = 1 << 20, 64 << 10
	w := newWorld(t, 1, 2, Limits{})
	lossy, frames := false, 0
	w.losing(func([]byte) bool { frames++; return lossy && frames%20 == 0 })
	ga, gb := w.guests[0], w.guests[1]
	pa, pb := ga.pd(), gb.pd()
	src, gone, dst := ga.alloc(size), gb.alloc(small), gb.alloc(size)
	ka, kgone, kb := ga.mr(pa, src, size, 1), gb.mr(pb, gone, small, demandAccess), gb.mr(pb, dst, size, demandAccess)
	fill(ga.at(src, size), 9)
	used, e := w.pool.InUse(), gb.engines[0]
	gb.takeAway(gone, small)
	write := func(a *tqp, to translate.PA, key, n uint32) {
		s := a.wqe()
		s.SetRequest(1, abi.WRRDMAWrite, abi.SendSignaled)
		s.SetRDMA(uint64(to), key)
		s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: n, LKey: ka}})
		a.post()
	}
	var peers []*tqp
	for i := range 48 {
		a, b := ga.qp(qpSpec{pd: pa}), gb.qp(qpSpec{pd: pb})
		connectWith(a, b, 0)
		if peers = append(peers, a); i == 0 {
			continue
		}
		write(a, gone, kgone, small)
	}
	most := 0
	for range 100 {
		w.step(1)
		most = max(most, e.heldFrames)
	}
	limit := min(maxLaneHeld, w.pool.Count()/2)
	if most < limit/2 || most >= limit {
		t.Errorf("%d frames are kept, the limit is %d", most, limit)
	}
	lossy = true
	write(peers[0], dst, kb, size)
	if wc := peers[0].scq.await(1)[0]; wc.Status != abi.WCSuccess || !bytes.Equal(ga.at(src, size), gb.at(dst, size)) {
		t.Errorf("a WRITE to memory that is present: %+v", wc)
	}
	if gb.Describe().Stats["selective_acks_sent"] == 0 {
		t.Error("its lost packets were not repaired one by one")
	}
	lossy = false
	w.clock.Advance(2 * time.Second)
	w.until("the end of what is kept", func() bool { return e.heldFrames == 0 })
	// The peers have been told that the host is slow, so they still wait, and what was dropped is sent again.
	for _, a := range peers[1:] {
		var wcs []abi.WC
		w.until("the memory", func() bool { gb.hostServe(); wcs = a.scq.poll(); return len(wcs) > 0 })
		if wcs[0].Status != abi.WCSuccess {
			t.Fatalf("%+v", wcs[0])
		}
	}
	if !bytes.Equal(ga.at(src, small), gb.at(gone, small)) {
		t.Error("data differs")
	}
	w.step(10)
	if n := w.pool.InUse(); n != used {
		t.Errorf("%d frame buffers are in use, %d were", n, used)
	}
}

// A fault on an on-demand region is answered by RNR NAKs only if the peer retries them for ever (PF-8). Of a peer that
// does not say so itself, REQ and REP do.
func TestPatienceByCM(t *testing.T) {
	for _, tc := range []struct {
		unmarked  bool
		own       uint8 // of the QPs
		req, rep  uint8 // in the messages; 0xff: none
		wantFirst bool
	}{
		{false, 7, 0xff, 0xff, true}, {false, 0, 0xff, 0xff, false}, {false, 0, 7, 7, false}, {false, 7, 0, 0, true},
		{true, 7, 0xff, 0xff, false}, {true, 7, 7, 7, true}, {true, 7, 7, 0, false}, {true, 7, 0, 7, false},
	} {
		w := newWorld(t, 2, 2, Limits{})
		r := &refusals{unmarked: tc.unmarked}
		r.watch(w)
		ga, gb := w.guests[0], w.guests[1]
		pa, pb := ga.pd(), gb.pd()
		a, b := ga.qp(qpSpec{pd: pa}), gb.qp(qpSpec{pd: pb})
		say := gsiPair(ga, gb)
		if tc.req != 0xff {
			say(ga, cmtest.Message{Kind: cm.REQ, LocalID: 5, QPN: a.n, PathMTU: 5, RNRRetry: tc.req, Local: ga.gid(),
				Remote: gb.gid()})
		}
		b.connectRNR(a, tc.own)
		if tc.req != 0xff {
			say(gb, cmtest.Message{Kind: cm.REP, LocalID: 6, RemoteID: 5, QPN: b.n, RNRRetry: tc.rep})
		}
		a.connectRNR(b, tc.own)
		// In both directions: the passive side is bound before the REP, the active side after it.
		for i, x := range [][2]*tqp{{a, b}, {b, a}} {
			from, to := x[0], x[1]
			d := to.g.demand([]uint32{pb, pa}[i], 1, demandAccess)
			dq := to.g.faultQueue(4)
			src := from.g.alloc(4096)
			key := from.g.mr([]uint32{pa, pb}[i], src, 4096, 1)
			fill(from.g.at(src, 64), 4)
			r.rnr = 0
			s := from.wqe()
			s.SetRequest(1, abi.WRRDMAWrite, abi.SendSignaled)
			s.SetRDMA(d.iova, d.key)
			s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 64, LKey: key}})
			from.post()
			ev := dq.awaitEvents(1)[0]
			w.step(10)
			if r.rnr != map[bool]int{true: 1}[tc.wantFirst] {
				t.Errorf("%+v, direction %d: %d RNR NAKs", tc, i, r.rnr)
			}
			d.serve(ev)
			if wc := from.scq.await(1)[0]; wc.Status != abi.WCSuccess || !bytes.Equal(d.bytes(0, 64), from.g.at(src, 64)) {
				t.Errorf("%+v, direction %d: %+v", tc, i, wc)
			}
		}
	}
}

// A region that was registered by a work request behaves as a pinned one although the host pages it: the page list, and
// memory that is written to and read by a peer without RNR retries, and by this side's own requests, may be absent.
func TestAbsentFastRegistration(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	a, b := ga.qp(qpSpec{pd: ga.pd(), flags: abi.QPPrivileged}), gb.qp(qpSpec{pd: gb.pd()})
	connectWith(a, b, 0)
	key, list := ga.fast(1)
	mem, far := ga.alloc(4096), gb.alloc(4096)
	kb := gb.mr(1, far, 4096, demandAccess)
	fill(gb.at(far, 4096), 1)
	le.PutUint64(ga.at(list, 8), uint64(mem))
	// run takes both pages away and waits for a request to complete.
	run := func(what string, q *tqp, set func(s abi.SendWQE)) {
		t.Helper()
		ga.takeAway(mem, 4096)
		ga.takeAway(list, 4096)
		s := q.wqe()
		set(s)
		q.post()
		w.step(10)
		var got []abi.WC
		w.until(what, func() bool {
			ga.hostServe()
			got = append(got, q.scq.poll()...)
			return len(got) == 1
		})
		if got[0].Status != abi.WCSuccess {
			t.Fatalf("%s: %+v", what, got[0])
		}
		ga.bringAll()
	}
	const iova = 1 << 40
	k := key&^0xff | 5
	run("the registration", a, func(s abi.SendWQE) {
		setReg(s, 1, abi.SendSignaled, abi.RegWR{IOVA: iova, Length: 4096, PageList: uint64(list), NPages: 1, RKey: k,
			Access: abi.AccessLocalWrite | remoteAll})
	})
	remote := func(op uint32, own translate.PA, ownKey uint32, to uint64, rkey uint32) func(s abi.SendWQE) {
		return func(s abi.SendWQE) {
			s.SetRequest(2, op, abi.SendSignaled)
			s.SetRDMA(to, rkey)
			s.SetSGEs([]abi.SGE{{Addr: uint64(own), Length: 4096, LKey: ownKey}})
		}
	}
	same := func(what string) {
		t.Helper()
		if !bytes.Equal(ga.at(mem, 4096), gb.at(far, 4096)) {
			t.Errorf("%s: data differs", what)
		}
	}
	run("the peer's WRITE", b, remote(abi.WRRDMAWrite, far, kb, iova, k))
	same("WRITE")
	fill(ga.at(mem, 4096), 2)
	run("the peer's READ", b, remote(abi.WRRDMARead, far, kb, iova, k))
	same("READ")
	fill(ga.at(mem, 4096), 3)
	run("a WRITE from it", a, remote(abi.WRRDMAWrite, iova, k, uint64(far), kb))
	same("WRITE from it")
	fill(gb.at(far, 4096), 4)
	run("a READ into it", a, remote(abi.WRRDMARead, iova, k, uint64(far), kb))
	same("READ into it")
	a.recv(9, abi.SGE{Addr: iova, Length: 4096, LKey: k})
	fill(gb.at(far, 4096), 5)
	run("a SEND into it", b, func(s abi.SendWQE) {
		s.SetRequest(3, abi.WRSend, abi.SendSignaled)
		s.SetSGEs([]abi.SGE{{Addr: uint64(far), Length: 4096, LKey: kb}})
	})
	same("SEND")
}

// gsiPair makes the GSI QPs of two guests; say sends a message from one to the other.
func gsiPair(ga, gb *guest) (say func(from *guest, m cmtest.Message)) {
	type end struct {
		q        *tqp
		buf, in  translate.PA
		key, inK uint32
	}
	ends := map[*guest]*end{}
	for _, g := range []*guest{ga, gb} {
		pd := g.pd()
		x := &end{q: g.qp(qpSpec{typ: abi.QPTypeGSI, pd: pd}), buf: g.alloc(4096), in: g.alloc(4096)}
		x.q.connectUD(0x80010000)
		x.key, x.inK = g.mr(pd, x.buf, 4096, 1), g.mr(pd, x.in, 4096, 1)
		peer := gb
		if g == gb {
			peer = ga
		}
		g.ahTable().set(5, to(peer, pd))
		ends[g] = x
	}
	return func(from *guest, m cmtest.Message) {
		ga.tb.Helper()
		to := gb
		if from == gb {
			to = ga
		}
		x, y := ends[from], ends[to]
		copy(from.at(x.buf, cm.MADLen), m.Bytes())
		y.q.recv(1, abi.SGE{Addr: uint64(y.in), Length: 4096, LKey: y.inK})
		s := x.q.wqe()
		s.SetRequest(1, abi.WRSend, abi.SendSignaled)
		s.SetUD(1, 0x80010000, 5)
		s.SetSGEs([]abi.SGE{{Addr: uint64(x.buf), Length: cm.MADLen, LKey: x.key}})
		x.q.post()
		x.q.scq.await(1)
		y.q.rcq.await(1)
	}
}
