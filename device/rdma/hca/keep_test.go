package hca

import (
	"bytes"
	"testing"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/gso"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// connectUC connects two UC QPs; either may write to the other's memory.
func connectUC(a, b *tqp) {
	for _, x := range [][2]*tqp{{a, b}, {b, a}} {
		x[0].modify(abi.QPInit, abi.QPAttrPKeyIndex|abi.QPAttrPort|abi.QPAttrAccessFlags,
			abi.QPAttr{AccessFlags: abi.AccessRemoteWrite})
		x[0].modify(abi.QPRTR, abi.QPAttrAV|abi.QPAttrPathMTU|abi.QPAttrDestQPN|abi.QPAttrRQPSN,
			abi.QPAttr{PathMTU: abi.MTU4096, DestQPN: x[1].n, AV: x[1].g.av()})
		x[0].modify(abi.QPRTS, abi.QPAttrSQPSN, abi.QPAttr{})
	}
}

// UC and UD packets to pages absent on the host are delivered, in order, when the
// pages are present; packets beyond the bounds are dropped and counted. A destroyed
// QP frees its frame buffers.
func TestKept(t *testing.T) {
	for _, typ := range []uint32{abi.QPTypeUD, abi.QPTypeUC} {
		w := newWorld(t, 1, 2, Limits{})
		ga, gb := w.guests[0], w.guests[1]
		table := ga.ahTable()
		pa, pb := ga.pd(), gb.pd()
		a, b := ga.qp(qpSpec{typ: typ, pd: pa}), gb.qp(qpSpec{typ: typ, pd: pb})
		const size = 3 * 4096 // of b's memory
		n, head := 1000, 40
		if typ == abi.QPTypeUC {
			n, head = 9000, 0 // in three packets, on all three pages
			connectUC(a, b)
		} else {
			a.connectUD(0x1234)
			b.connectUD(0x1234)
			table.set(5, to(gb, pa))
		}
		src, dst := ga.alloc(size), gb.alloc(size)
		ka, kb := ga.mr(pa, src, size, 3), gb.mr(pb, dst, size, 3)
		fill(ga.at(src, size), 3)
		send := func(id uint64) {
			sge := abi.SGE{Addr: uint64(src) + id, Length: uint32(n), LKey: ka}
			if typ == abi.QPTypeUD {
				a.sendUD(id, b.n, 5, sge)
			} else {
				s := a.wqe()
				s.SetRequest(id, abi.WRSend, abi.SendSignaled)
				s.SetSGEs([]abi.SGE{sge})
				a.post()
			}
			if wc := a.scq.await(1)[0]; wc.Status != abi.WCSuccess {
				t.Fatalf("send: %+v", wc)
			}
		}
		used := w.pool.InUse()
		for round := range uint64(2) {
			// A datagram's header goes to one page, the data to the next: two faults, one after the other.
			at := dst + translate.PA(4096-40)*translate.PA(head/40)
			for id := range uint64(3) {
				b.recv(id, abi.SGE{Addr: uint64(at), Length: uint32(head + n), LKey: kb})
			}
			gb.takeAway(dst, size)
			for id := range uint64(3) {
				send(id + round)
			}
			w.step(10)
			if got := b.rcq.poll(); len(got) != 0 {
				t.Fatalf("received in absent memory: %+v", got)
			}
			var got []abi.WC
			w.until("the messages", func() bool {
				gb.hostServe()
				got = append(got, b.rcq.poll()...)
				return len(got) == 3
			})
			for id, wc := range got {
				if wc.ID != uint64(id) || wc.Status != 0 || int(wc.ByteLen) != head+n {
					t.Fatalf("%+v", wc)
				}
			}
			if !bytes.Equal(ga.at(src+2+translate.PA(round), n), gb.at(at+translate.PA(head), n)) {
				t.Fatal("data differ")
			}
		}
		if n := gb.Stats().Value[abi.StatFaultDrops]; n != 0 {
			t.Errorf("%d drops for faults", n)
		}
		gb.takeAway(dst, size)
		b.recv(1, abi.SGE{Addr: uint64(dst), Length: uint32(head + n), LKey: kb})
		others := 0 // keep the maximum: nothing is left for b
		for w.pool.Keep() {
			others++
		}
		send(0)
		w.step(10)
		if n := gb.Stats().Value[abi.StatFaultDrops]; n == 0 {
			t.Error("kept beyond half of the pool")
		}
		w.pool.Unkeep(others)
		for range maxKept + 10 {
			send(0)
		}
		w.step(10)
		if n := gb.Stats().Value[abi.StatFaultDrops]; n < 10 {
			t.Errorf("%d drops for faults, want 10 or more", n)
		}
		gb.must(abi.CmdDestroyQP, handle(b.n))
		gb.hostServe()
		w.step(10)
		if n := w.pool.InUse(); n != used {
			t.Errorf("%d frame buffers are in use, %d were", n, used)
		}
		for others = 0; w.pool.Keep(); {
			others++
		}
		if others != w.pool.Count()/2 {
			t.Errorf("%d frame buffers may be kept, want %d", others, w.pool.Count()/2)
		}
		w.pool.Unkeep(others)
	}
}

// If the host cannot provide memory, the packets that need it are dropped, and the
// fault is not raised for ever.
func TestKeptGone(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	pa, pb := ga.pd(), gb.pd()
	a, b := ga.qp(qpSpec{typ: abi.QPTypeUC, pd: pa}), gb.qp(qpSpec{typ: abi.QPTypeUC, pd: pb})
	connectUC(a, b)
	src, dst := ga.alloc(4096), gb.alloc(8192)
	ka, kb := ga.mr(pa, src, 4096, 1), gb.mr(pb, dst, 8192, abi.AccessLocalWrite|abi.AccessRemoteWrite)
	fill(ga.at(src, 4096), 7)
	used := w.pool.InUse()
	gb.takeAway(dst, 4096)
	const lost = 3 // WRITEs to the missing page; one more to the next page
	for i := range uint64(lost + 1) {
		s := a.wqe()
		s.SetRequest(i, abi.WRRDMAWrite, abi.SendSignaled)
		s.SetRDMA(uint64(dst)+4096*(i/lost), kb)
		s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 100, LKey: ka}})
		a.post()
		a.scq.await(1)
	}
	asked := 0
	w.until("the last WRITE", func() bool {
		for f := gb.space.Faults().TryNext(); f != nil; f = gb.space.Faults().TryNext() {
			asked++
			gb.space.Faults().Finish(f, errAbsent)
		}
		return bytes.Equal(gb.at(dst+4096, 100), ga.at(src, 100))
	})
	if n := gb.Stats().Value[abi.StatFaultDrops]; asked != lost || n != lost {
		t.Errorf("%d WRITEs to missing memory: %d faults, %d drops", lost, asked, n)
	}
	if n := w.pool.InUse(); n != used {
		t.Errorf("%d frame buffers are in use, %d were", n, used)
	}
}

// train has the network join packets to trains, as a VTEP does.
type train struct {
	w *world
	gso.Train
	packets, sent int        // packets that arrived in trains, and trains
	shared        *frame.Buf // every third train has another reader for a while
	was           []byte     // the contents that it must keep
}

func (t *train) take(l *loop.Loop, f []byte) {
	if t.Packets() > 0 && t.Continues(f) && t.Add(t.w.pool, f) {
		return
	}
	t.leave(l)
	if f = bytes.Clone(f); !first(t.Start(f, header.Locate(f))) {
		t.alone(l, f)
	}
}

func first(a, _ bool) bool { return a }

func (t *train) alone(l *loop.Loop, f []byte) {
	b := t.w.pool.Get()
	b.Append(f)
	t.w.hand(l, b)
	b.Free()
}

// leave sends the train.
func (t *train) leave(l *loop.Loop) {
	if t.shared != nil {
		if !bytes.Equal(t.shared.Bytes(), t.was) {
			t.w.tb.Error("a train was changed while it had another reader")
		}
		t.shared.Free()
		t.shared = nil
	}
	if t.Packets() == 0 {
		return
	}
	f := t.First()
	b := t.Take()
	if b == nil {
		t.alone(l, f)
		return
	}
	t.packets += b.Segments()
	t.w.hand(l, b)
	if t.sent++; t.sent%3 == 0 {
		t.shared, t.was = b, bytes.Clone(b.Bytes())
		return
	}
	b.Free()
}

// Packets of trains are received as if they had arrived one by one: in order, or kept alone if they are out of order
// or their page is absent. An invalid packet does not affect the others.
func TestTrain(t *testing.T) {
	const size = 1 << 20
	w := newWorld(t, 1, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	pa, pb := ga.pd(), gb.pd()
	src, dst := ga.alloc(size), gb.alloc(size)
	ka, kb := ga.mr(pa, src, size, abi.AccessLocalWrite), gb.mr(pb, dst, size, abi.AccessLocalWrite|abi.AccessRemoteWrite)
	a, b := ga.qp(qpSpec{typ: abi.QPTypeRC, pd: pa}), gb.qp(qpSpec{typ: abi.QPTypeRC, pd: pb})
	a.connectRC(b)
	b.connectRC(a)
	used, n, loss := w.pool.InUse(), 0, false
	w.losing(func(f []byte) bool {
		n++
		if loss && n%50 == 17 {
			f[len(f)-20] ^= 1 // the ICRC is wrong
		}
		return loss && n%40 == 3
	})
	w.train = &train{w: w}
	write := func(seed byte) {
		t.Helper()
		fill(ga.at(src, size), seed)
		s := a.wqe()
		s.SetRequest(1, abi.WRRDMAWrite, abi.SendSignaled)
		s.SetRDMA(uint64(dst), kb)
		s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: size, LKey: ka}})
		a.post()
		if wc := a.scq.await(1)[0]; wc.Status != abi.WCSuccess {
			t.Fatalf("%+v", wc)
		}
		if !bytes.Equal(ga.at(src, size), gb.at(dst, size)) {
			t.Error("data differ")
		}
	}
	for round, lossy := range []bool{false, true} {
		loss = lossy
		write(byte(round))
		if n := ga.Stats().Value[abi.StatRetransmits]; lossy != (n > 0) {
			t.Errorf("lossy %v: %d packets were retransmitted", lossy, n)
		}
	}
	if n := gb.rejected[rejectHeader].Load(); n != 0 {
		t.Errorf("%d packets have invalid headers", n)
	}
	big := 0
	for w.pool.KeepBig() {
		big++
	}
	if big != 4 {
		t.Errorf("%d of 8 big buffers may be kept, want half", big)
	}
	before, repeated := w.train.packets, ga.Stats().Value[abi.StatRetransmits]
	loss = false
	write(3) // no buffers for trains are left
	for ; big > 0; big-- {
		w.pool.UnkeepBig()
	}
	if n := gb.rejected[rejectHeader].Load(); n != 0 || w.train.packets == before ||
		ga.Stats().Value[abi.StatRetransmits] != repeated {
		t.Errorf("no train buffers: %d invalid headers, %d packets came, some retransmitted", n, w.train.packets-before)
	}
	st, icrc := gb.Describe().Stats, gb.rejected[rejectICRC].Load()
	if w.train.packets < size/4096 || w.train.sent < 20 || st["kept_packets"] == 0 || icrc == 0 {
		t.Errorf("%d packets arrived in %d trains, %d were kept, %d had a wrong ICRC", w.train.packets, w.train.sent,
			st["kept_packets"], icrc)
	}
	w.step(10)
	if n := w.pool.InUse(); n != used {
		t.Errorf("%d frame buffers are in use, %d were", n, used)
	}
}

// Out-of-order packets on RC, requests at the responder and READ responses at the requester, are held until the lost
// packets were retransmitted, within bounds, and freed whatever happens to the QP or its peer.
func TestHeld(t *testing.T) {
	for _, read := range []bool{false, true} {
		t.Run(map[bool]string{false: "requests", true: "answers"}[read], func(t *testing.T) { testHeld(t, read) })
	}
}

func testHeld(t *testing.T, read bool) {
	const size = 1 << 20
	w := newWorld(t, 1, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	pa, pb := ga.pd(), gb.pd()
	ma, mb := ga.alloc(size), gb.alloc(size)
	ka, kb := ga.mr(pa, ma, size, abi.AccessLocalWrite),
		gb.mr(pb, mb, size, abi.AccessLocalWrite|abi.AccessRemoteWrite|abi.AccessRemoteRead)
	fill(ga.at(ma, size), 5)
	fill(gb.at(mb, size), 7)
	want := bytes.Clone(ga.at(ma, size))
	pairs, lose, opcode, holder := uint64(6), wire.Write, uint32(abi.WRRDMAWrite), gb
	if read {
		want = bytes.Clone(gb.at(mb, size))
		pairs, lose, opcode, holder = 24, wire.ReadResponse, abi.WRRDMARead, ga // a QP requests less at once
	}
	used, lossy := w.pool.InUse(), true
	w.losing(func(f []byte) bool {
		var p wire.RoCE
		if wire.ParseRoCE(f, header.Locate(f), &p) != nil {
			t.Fatal("not RoCE")
		}
		return lossy && p.Info.Op == lose && p.Info.Is(wire.First)
	})
	var as, bs []*tqp
	for i := range pairs {
		a, b := ga.qp(qpSpec{typ: abi.QPTypeRC, pd: pa}), gb.qp(qpSpec{typ: abi.QPTypeRC, pd: pb})
		a.connectRC(b)
		b.connectRC(a)
		as, bs = append(as, a), append(bs, b)
		s := a.wqe()
		s.SetRequest(i, opcode, abi.SendSignaled)
		s.SetRDMA(uint64(mb), kb)
		s.SetSGEs([]abi.SGE{{Addr: uint64(ma), Length: size, LKey: ka}})
		a.post()
	}
	e := holder.engines[0]
	w.until("the maximum of held frames", func() bool { return e.heldFrames == min(maxLaneHeld, w.pool.Count()/2) })
	w.step(10)
	if e.heldFrames > maxLaneHeld || e.kept != 0 {
		t.Errorf("%d frames are held, %d kept", e.heldFrames, e.kept)
	}
	holders := bs
	if read {
		holders = as
	}
	holder.must(abi.CmdDestroyQP, handle(holders[0].n))
	holders[1].modify(abi.QPReset, 0, abi.QPAttr{})
	lossy = false
	for _, a := range as[2:] {
		w.until("the others", func() bool { return len(a.scq.poll()) == 1 })
	}
	if !bytes.Equal(ga.at(ma, size), want) || !bytes.Equal(gb.at(mb, size), want) {
		t.Error("data differ")
	}
	if st := holder.Describe().Stats; st["kept_packets"] == 0 || !read &&
		(st["selective_acks_sent"] == 0 || ga.Describe().Stats["selective_acks_received"] == 0) {
		t.Errorf("counted: %v", st)
	}
	w.step(10)
	if n := w.pool.InUse(); n != used || e.heldFrames != 0 {
		t.Errorf("%d frame buffers are in use, %d were; %d are held", n, used, e.heldFrames)
	}
	others := 0
	for w.pool.Keep() {
		others++
	}
	if w.pool.Unkeep(others); others != w.pool.Count()/2 {
		t.Errorf("%d frame buffers may be kept, want %d", others, w.pool.Count()/2)
	}
}
