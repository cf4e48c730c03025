package roce

import (
	"errors"
	"fmt"
	"math/bits"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
)

// The transition table written a second time, as pairs of states with the minimal mask, per type (IBTA table 91).
func TestTransitions(t *testing.T) {
	type key struct{ from, to State }
	ud := map[key]Mask{
		{Reset, Init}: MaskPKeyIndex | MaskPort | MaskQKey, {Init, Init}: 0, {Init, RTR}: 0,
		{RTR, RTS}: MaskSQPSN, {RTS, RTS}: 0, {RTS, SQD}: 0, {SQD, RTS}: 0, {SQD, SQD}: 0, {SQE, RTS}: 0,
	}
	uc := map[key]Mask{
		{Reset, Init}: MaskPKeyIndex | MaskPort | MaskAccess, {Init, Init}: 0,
		{Init, RTR}: MaskAV | MaskPathMTU | MaskDestQPN | MaskRQPSN,
		{RTR, RTS}:  MaskSQPSN, {RTS, RTS}: 0, {RTS, SQD}: 0, {SQD, RTS}: 0, {SQD, SQD}: 0, {SQE, RTS}: 0,
	}
	rc := map[key]Mask{
		{Reset, Init}: MaskPKeyIndex | MaskPort | MaskAccess, {Init, Init}: 0,
		{Init, RTR}: MaskAV | MaskPathMTU | MaskDestQPN | MaskRQPSN | MaskMaxDestRdAtomic | MaskMinRNRTimer,
		{RTR, RTS}:  MaskSQPSN | MaskTimeout | MaskRetryCnt | MaskRNRRetry | MaskMaxRdAtomic,
		{RTS, RTS}:  0, {RTS, SQD}: 0, {SQD, RTS}: 0, {SQD, SQD}: 0,
	}
	gsi := map[key]Mask{}
	for k, m := range ud {
		gsi[k] = m &^ MaskPort
	}
	for typ, table := range map[Type]map[key]Mask{UD: ud, UC: uc, RC: rc, GSI: gsi} {
		for from := Reset; from <= Err+1; from++ {
			for to := Reset; to <= Err+1; to++ {
				need, ok := table[key{from, to}]
				if (to == Reset || to == Err) && from <= Err {
					ok = true
				}
				if r := checkTransition(typ, from, to, need|MaskState); (r == "") != ok {
					t.Errorf("%v %v to %v with %v: %q, want allowed %v", typ, from, to, need, r, ok)
				}
				if !ok || to == Reset || to == Err {
					continue
				}
				for rest := need; rest != 0; rest &= rest - 1 {
					missing := Mask(1) << bits.TrailingZeros32(uint32(rest))
					if r := checkTransition(typ, from, to, need&^missing); !strings.Contains(r, missing.String()) {
						t.Errorf("%v %v to %v without %v: %q", typ, from, to, missing, r)
					}
				}
				if r := checkTransition(typ, from, to, need|MaskCap); !strings.Contains(r, "cap") {
					t.Errorf("%v %v to %v with cap: %q", typ, from, to, r)
				}
				if r := checkTransition(typ, from, to, need|MaskRQPSN); from != Init && r == "" {
					t.Errorf("%v %v to %v accepts rq_psn", typ, from, to)
				}
			}
		}
	}
}

func TestModifyErrors(t *testing.T) {
	f := newFabric(t, 1)
	n := f.node("n", Config{QPN: 5, Type: RC, MTU: 1024, MaxRdAtomic: 8, ECN: true, SelectiveRepeat: true})
	fails := func(a Attr, m Mask, want string) {
		t.Helper()
		var me *ModifyError
		err := n.q.Modify(f.now, &a, m)
		if !errors.As(err, &me) || !errors.Is(err, ErrModify) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}

	}
	before := n.q.attr
	fails(Attr{State: RTS}, MaskState, "no such transition")
	fails(Attr{State: 9}, MaskState, "no such state")
	fails(Attr{State: Init}, MaskState|MaskPort, "attributes missing: qp_access_flags,pkey_index")
	fails(Attr{State: Init, Port: 2}, maskInitRC, "port_num is 2, want 1")
	fails(Attr{State: Init, Port: 1, PKeyIndex: 3}, maskInitRC, "pkey_index is 3")
	fails(Attr{State: Init, Port: 1, CurState: RTS}, maskInitRC|MaskCurState, "cur_qp_state is RTS")
	n.modify(Attr{State: Init, Port: 1}, maskInitRC)
	good := Attr{State: RTR, AV: av(ipA, ipB), PathMTU: 3, DestQPN: 7, RQPSN: 9, MaxDestRdAtomic: 2, MinRNRTimer: 3}
	for _, c := range []struct {
		change func(a *Attr)
		want   string
	}{
		{func(a *Attr) { a.PathMTU = 4 }, "path_mtu is 4, want 1 (256) to 5 (4096) within the port's 1024 bytes"},
		{func(a *Attr) { a.PathMTU = 0 }, "path_mtu"},
		{func(a *Attr) { a.DestQPN = 1 << 24 }, "dest_qp_num"},
		{func(a *Attr) { a.MaxDestRdAtomic = 9 }, "max_dest_rd_atomic is 9, want 0..8"},
		{func(a *Attr) { a.MinRNRTimer = 32 }, "min_rnr_timer"},
		{func(a *Attr) { a.AV.VLAN = 4095 }, "vlan_id"},
		{func(a *Attr) { a.AV.SGID = [16]byte{0: 0xfe} }, "IPv4 and IPv6"},
	} {
		a := good
		c.change(&a)
		fails(a, maskRTRRC, c.want)
	}
	if n.q.State() != Init || n.q.attr.DestQPN != before.DestQPN {
		t.Error("a refused Modify changed something")
	}
	n.modify(good, maskRTRRC)
	fails(Attr{State: RTS, RetryCnt: 8}, maskRTSRC, "retry_cnt is 8")
	fails(Attr{State: RTS, RNRRetry: 8}, maskRTSRC, "rnr_retry is 8")
	fails(Attr{State: RTS, Timeout: 32}, maskRTSRC, "timeout is 32")
	fails(Attr{State: RTS, MaxRdAtomic: 9}, maskRTSRC, "max_rd_atomic is 9")
	n.modify(Attr{State: RTS, SQPSN: 0xabcdef, Timeout: 14, RetryCnt: 3, RNRRetry: 2, MaxRdAtomic: 4}, maskRTSRC)
	fails(Attr{AV: av(ipA, ipB)}, MaskAltPath, "no automatic path migration")
	var got Attr
	n.q.Query(&got)
	want := good
	want.State, want.CurState, want.Port, want.SQPSN, want.Timeout, want.RetryCnt, want.RNRRetry,
		want.MaxRdAtomic = RTS, RTS, 1, 0xabcdef, 14, 3, 2, 4
	if got != want {
		t.Errorf("Query: %+v\nwant   %+v", got, want)
	}
	n.q.Close()
	fails(Attr{State: Err}, MaskState, "closed")
	n.q.Receive(1, &wire.RoCE{})
	n.q.Timer(1)
	if n.q.Run(1, 1) {
		t.Error("a closed QP asks for another Run")
	}
}

// Packets and requests in the states before RTS.
func TestEarlyStates(t *testing.T) {
	f := newFabric(t, 1)
	o := opts()
	o.timeout = 10
	a, b := f.pair(o)
	src := a.reg(1, 0, 64, allAccess)
	dst := b.reg(2, 0, 64, allAccess)
	w := WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 64)}}

	b.modify(Attr{State: Reset}, MaskState)
	a.post(w)
	f.settle(3e6)
	b.modify(Attr{State: Init, Port: 1, Access: allAccess}, maskInitRC)
	f.settle(3e6)
	if b.q.Stats().RxDropped < 2 || b.q.Stats().TxPackets != 0 {
		t.Errorf("in RESET and INIT: %+v", *b.q.Stats())
	}
	b.modify(Attr{State: RTR, AV: o.avB, PathMTU: o.mtu, DestQPN: 0x11, RQPSN: o.psnA, MaxDestRdAtomic: 4}, maskRTRRC)
	// Posted early; must wait for RTS.
	c := w
	c.RKey = 1
	c.SGEs = []SGE{sge(2, 0, 64)}
	b.post(c)
	f.until("write to a QP in RTR", 1e9, func() bool { return len(a.sends) == 1 })
	a.wantSends(0)
	same(t, "data", dst.buf, src.buf)
	b.wantEvents(EventCommEst)
	f.settle(20e6)
	b.wantSends()
	b.modify(Attr{State: RTS, SQPSN: o.psnB, Timeout: 14, RetryCnt: 7}, maskRTSRC)
	f.until("posted before RTS", 1e9, func() bool { return len(b.sends) == 1 })
	b.wantSends(0)
	b.wantEvents(EventCommEst)
}

// ERROR flushes both queues in order, including WQEs posted later; RESET discards them.
func TestFlush(t *testing.T) {
	for _, srq := range []bool{false, true} {
		f := newFabric(t, 2)
		o := opts()
		o.srq, o.outstanding = srq, 4
		a, b := f.pair(o)
		a.reg(1, 0, 1<<16, allAccess)
		b.reg(2, 0, 1<<16, allAccess)
		for range 5 {
			a.postRecv(sge(1, 0, 100))
		}
		// One receive is in use when the QP fails.
		b.onTx = func(p *wire.RoCE, _ []byte) bool { return p.Info.Op == wire.Ack }
		b.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(2, 0, 100), sge(2, 0, 0)}})
		f.loss = func(p *wire.RoCE) bool { return p.BTH.DestQP == 0x22 }
		for range 10 {
			a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 20000)}})
		}
		f.settle(50e6)
		a.wantSends()
		a.wantRecvs(0)
		a.modify(Attr{State: Err}, MaskState)
		f.settle(20e6)
		if got := statuses(a.sends); got != "[5 5 5 5 5 5 5 5 5 5]" {
			t.Fatal(got)
		}
		if srq {
			a.wantRecvs(0)
			a.wantEvents(EventLastWQE)
		} else {
			a.wantRecvs(0, 5, 5, 5, 5)
			a.wantEvents()
		}
		a.post(WQE{Opcode: 99})
		f.settle(1e6)
		if a.sends[10].c.Status != StatusFlush {
			t.Error("not flushed")
		}
		if !srq {
			// No doorbell: found by polling.
			f.settle(10e9)
			a.postRecv(sge(1, 0, 100))
			f.settle(1e9)
			a.wantRecvs(0, 5, 5, 5, 5, 5)
			if a.q.flushDelay > flushDelayMax {
				t.Error(a.q.flushDelay)
			}
		}
		a.wantState(Err)
		a.modify(Attr{State: Reset}, MaskState)
		if a.timer != 0 {
			t.Error("a timer is left after RESET")
		}
		// Start again from sequence number 0.
		a.sq, a.sends, a.rq, a.rqNext, a.recvs, a.events = nil, nil, nil, 0, nil, nil
		a.seen = map[uint32]bool{}
		b.onTx, f.loss = nil, nil
		b.modify(Attr{State: Reset}, MaskState)
		b.sq, b.sends, b.seen = nil, nil, map[uint32]bool{}
		a.connect(&o, 0x22, o.avA, 5, 6)
		b.connect(&o, 0x11, o.avB, 6, 5)
		a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 20000)}})
		f.until("after reset", 1e9, func() bool { return len(a.sends) == 1 })
		a.wantSends(0)
		same(t, "after reset", b.regions[2].buf[:20000], a.regions[1].buf[:20000])
	}
}

// A receive in use by a message in progress is flushed first; with an SRQ only that one is.
func TestFlushInUse(t *testing.T) {
	for _, srq := range []bool{false, true} {
		f := newFabric(t, 2)
		o := opts()
		o.srq = srq
		a, b := f.pair(o)
		a.reg(1, 0, 4096, allAccess)
		b.reg(2, 0, 4096, allAccess)
		b.postRecv(sge(2, 0, 4096))
		b.postRecv(sge(2, 0, 4096))
		f.loss = func(p *wire.RoCE) bool { return p.Info.Op == wire.Send && p.Info.Flags&wire.Last != 0 }
		a.post(WQE{Opcode: WRSend, SGEs: []SGE{sge(1, 0, 4000)}})
		f.settle(10e6)
		if !b.q.resp.haveRecv {
			t.Fatal("no receive in use")
		}
		b.modify(Attr{State: Err}, MaskState)
		f.settle(10e6)
		if srq {
			b.wantRecvs(StatusFlush)
			b.wantEvents(EventLastWQE)
			continue
		}
		b.wantRecvs(StatusFlush, StatusFlush)
		b.wantEvents()
		if b.recvs[0].id != 5000 || b.recvs[1].id != 5001 {
			t.Error(b.recvs)
		}
	}
}

// SQD completes requests that were begun, raises the event, and keeps the rest for RTS.
func TestSQD(t *testing.T) {
	for _, typ := range []Type{RC, UC} {
		f := newFabric(t, 3)
		o := opts()
		o.typ, o.outstanding = typ, 2
		a, b := f.pair(o)
		a.reg(1, 0, 1<<16, allAccess)
		b.reg(2, 0, 1<<16, allAccess)
		const n = 8
		for range n {
			a.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 50000)}})
		}
		f.budget = 10
		f.until("some progress", 1e9, func() bool { return len(a.sends) > 1 && a.q.req.head != a.q.req.tail })
		a.modify(Attr{State: SQD, SQDNotify: true}, MaskState|MaskSQDNotify)
		var q Attr
		a.q.Query(&q)
		if !q.SQDraining || q.State != SQD {
			t.Errorf("%v: %+v", typ, q)
		}
		f.settle(100e6)
		done := len(a.sends)
		if done < 2 || done > 6 || a.q.req.head != a.q.req.tail {
			t.Fatalf("%v: %d completions, %d in flight", typ, done, a.q.req.tail-a.q.req.head)
		}
		a.wantEvents(EventSQDrained)
		a.q.Query(&q)
		if q.SQDraining {
			t.Error("still draining")
		}
		if typ == RC {
			a.modify(Attr{State: SQD, AV: o.avA, Timeout: 13}, MaskState|MaskAV|MaskTimeout)
		}
		a.modify(Attr{State: RTS}, MaskState)
		f.until("the rest", 1e9, func() bool { return len(a.sends) == n })
		for _, s := range a.sends {
			if s.c.Status != 0 {
				t.Error(s)
			}
		}
		a.wantEvents(EventSQDrained)
		// With nothing in flight it is drained at once.
		a.modify(Attr{State: SQD, SQDNotify: true}, MaskState|MaskSQDNotify)
		a.wantEvents(EventSQDrained, EventSQDrained)
	}
}

// max_dest_rd_atomic may change in SQD; remembered requests stay.
func TestResizeMemory(t *testing.T) {
	f := newFabric(t, 4)
	o := opts()
	o.destRd = 4
	a, b := f.pair(o)
	a.reg(1, 0, 4096, allAccess)
	b.reg(2, 0, 4096, allAccess)
	for range 6 {
		a.post(WQE{Opcode: WRFetchAdd, RKey: 2, SwapAdd: 1, SGEs: []SGE{sge(1, 0, 8)}})
	}
	f.until("atomics", 1e9, func() bool { return len(a.sends) == 6 })
	last := b.q.resp.epsn - 1
	for _, n := range []int{7, 2, 3, 1, 16, 16} {
		b.q.resp.resizeResources(n)
		r := b.q.resp.findResource(last)
		if r == nil || r.first != last || r.op != wire.FetchAdd {
			t.Fatalf("after resize to %d: %+v", n, r)
		}
	}
	b.q.resp.resizeResources(0)
	if b.q.resp.findResource(last) != nil {
		t.Error("a request is remembered beyond max_dest_rd_atomic")
	}
}

func TestStrings(t *testing.T) {
	for s := Reset; s <= Err+1; s++ {
		if s.String() == "" {
			t.Error(s)
		}
	}
	for _, y := range []Type{GSI, RC, UC, UD, 9} {
		if y.String() == "" {
			t.Error(y)
		}
	}
	if s := fmt.Sprint(MaskAV | MaskState | 1<<30); s != "qp_state,ah_attr|0x40000000" {
		t.Error(s)
	}
}
