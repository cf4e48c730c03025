package hca

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

func pattern(b []byte, seed byte) []byte {
	for i := range b {
		b[i] = seed + byte(i*7)
	}
	return b
}

// Every access that can meet a page absent in the guest: the event names the access,
// the operation continues when the page is present (PF-7, PF-8, PF-10, ODP-3), whether
// the driver answers with one command or with two.
func TestGuestFaultEvents(t *testing.T) {
	t.Run("SET_MTT", func(t *testing.T) { testGuestFaultEvents(t, false) })
	t.Run("SET_MTT, RESUME_FAULT", func(t *testing.T) { testGuestFaultEvents(t, true) })
}

func testGuestFaultEvents(t *testing.T, two bool) {
	const n = 3 * 4096
	for _, c := range []struct {
		name   string
		op     uint32
		local  bool   // the local buffer is on demand, else the remote one
		access uint32 // access in the event
		size   int
	}{
		{"gather", abi.WRRDMAWrite, true, 0, n},
		{"read response", abi.WRRDMARead, true, abi.AccessLocalWrite, n},
		{"write", abi.WRRDMAWrite, false, abi.AccessRemoteWrite, n},
		{"read", abi.WRRDMARead, false, abi.AccessRemoteRead, n},
		{"atomic", abi.WRAtomicFetchAndAdd, false, abi.AccessRemoteAtomic, 8},
		{"atomic write", abi.WRAtomicWrite, false, abi.AccessRemoteWrite, 8},
		{"receive", abi.WRSend, false, abi.AccessLocalWrite, n},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, 2, 2, Limits{})
			a, b := w.pair()
			near, far := a, b
			if !c.local {
				near, far = b, a
			}
			d := near.g.demand(1, 4, demandAccess)
			d.two = two
			dq := near.g.faultQueue(4)
			other := far.g.alloc(n)
			otherKey := far.g.mr(1, other, n, demandAccess)
			want, at := pattern(make([]byte, c.size), 3), uint64(100)
			if c.size == 8 {
				at = 104
			}
			copy(d.bytes(int(at), c.size), want)
			if (c.op == abi.WRRDMAWrite || c.op == abi.WRAtomicWrite) && !c.local || c.op == abi.WRSend ||
				c.op == abi.WRRDMARead && c.local {
				copy(d.bytes(int(at), c.size), make([]byte, c.size))
				copy(far.g.at(other, c.size), want)
			}
			mine := abi.SGE{Addr: d.iova + at, Length: uint32(c.size), LKey: d.key}
			rva, rkey := uint64(other), otherKey
			if !c.local {
				mine = abi.SGE{Addr: uint64(other), Length: uint32(c.size), LKey: otherKey}
				rva, rkey = d.iova+at, d.key
			}
			s := a.wqe()
			switch c.op {
			case abi.WRAtomicFetchAndAdd:
				s.SetRequest(9, c.op, abi.SendSignaled)
				s.SetAtomic(rva, rkey, 1, 0)
			case abi.WRSend:
				b.recv(5, abi.SGE{Addr: d.iova + at, Length: n, LKey: d.key})
				s.SetRequest(9, c.op, abi.SendSignaled)
			default:
				s.SetRequest(9, c.op, abi.SendSignaled)
				s.SetRDMA(rva, rkey)
			}
			s.SetSGEs([]abi.SGE{mine})
			a.post()
			faults := 0
			var wcs []abi.WC
			w.until("the completion", func() bool {
				for _, e := range dq.events() {
					dq.add(1)
					faults++
					if e.Type != abi.EventPageFault || e.Handle != near.n || e.Key != d.key || e.Access != c.access || e.Token == 0 {
						t.Fatalf("event %+v", e)
					}
					d.serve(e)
				}
				wcs = append(wcs, a.scq.poll()...)
				return len(wcs) > 0
			})
			if wcs[0].ID != 9 || wcs[0].Status != abi.WCSuccess || faults == 0 {
				t.Fatalf("%+v after %d faults", wcs[0], faults)
			}
			if c.op != abi.WRAtomicFetchAndAdd && (!bytes.Equal(d.bytes(int(at), c.size), want) ||
				!bytes.Equal(far.g.at(other, c.size), want)) {
				t.Error("data differs")
			}
			st := near.g.Stats()
			if st.Value[abi.StatGuestFaults] != uint64(faults) || st.Value[abi.StatFaultsResumed] != uint64(faults) ||
				st.Value[abi.StatHostFaults] != 0 || far.g.Stats().Value[abi.StatGuestFaults] != 0 {
				t.Errorf("%d faults, counters %v", faults, st.Value)
			}
		})
	}
}

// A write to a read-only page faults, a read does not.
func TestReadOnlyPage(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	a, b := w.pair()
	d := b.g.demand(1, 2, demandAccess)
	d.set(0, 2, abi.MTTReadOnly)
	dq := b.g.faultQueue(4)
	buf := a.g.alloc(4096)
	key := a.g.mr(1, buf, 4096, demandAccess)
	for i, op := range []uint32{abi.WRRDMARead, abi.WRRDMAWrite} {
		s := a.wqe()
		s.SetRequest(uint64(i), op, abi.SendSignaled)
		s.SetRDMA(d.iova, d.key)
		s.SetSGEs([]abi.SGE{{Addr: uint64(buf), Length: 64, LKey: key}})
		a.post()
		if i == 1 {
			d.serve(dq.awaitEvents(1)[0])
		}
		if wc := a.scq.await(1)[0]; wc.Status != abi.WCSuccess {
			t.Fatalf("%+v", wc)
		}
	}
	if n := b.g.Stats().Value[abi.StatGuestFaults]; n != 1 {
		t.Errorf("%d faults", n)
	}
}

// Work rings that are absent on the host (PF-12), each page of them,
// repeatedly: no request or completion is lost or doubled, and the consumer
// index is right in the end.
func TestAbsentRings(t *testing.T) {
	for _, what := range []string{"SQ", "RQ", "SRQ"} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t, 2, 2, Limits{})
			ga, gb := w.guests[0], w.guests[1]
			a := ga.qp(qpSpec{pd: ga.pd()})
			spec := qpSpec{pd: gb.pd()}
			var rq tring
			if what == "SRQ" {
				rq = gb.ring(64, 7)
				spec.flags = abi.QPHasSRQ
				spec.srq = gb.mustHandle(abi.CmdCreateSRQ, enc(abi.SizeCreateSRQ,
					&abi.CreateSRQ{PDN: spec.pd, MaxSGE: 4, Ring: rq.desc}, rq.pas...))
			}
			b := gb.qp(spec)
			if what != "SRQ" {
				rq = b.rq
			}
			a.connectRC(b)
			b.connectRC(a)
			g, r := gb, &rq
			if what == "SQ" {
				g, r = ga, &a.sq
			}
			const total = 400
			posted, sent, received := uint64(0), uint64(0), uint64(0)
			step := 0
			w.until("all messages", func() bool {
				for ; posted < total && posted-received < 20 && posted-sent < 20; posted++ {
					abi.RecvWQE(rq.elem(rq.prod().Load())).Set(posted, nil)
					rq.push()
					s := a.wqe()
					s.SetRequest(posted, abi.WRSend, abi.SendSignaled)
					a.post()
				}
				if step++; step%4 == 2 {
					g.hostServe()
				}
				for _, wc := range a.scq.poll() {
					if wc.ID != sent || wc.Status != abi.WCSuccess {
						t.Fatalf("send completion %+v, want %d", wc, sent)
					}
					sent++
					if n := (uint32(sent) - a.sq.cons().Load()) & 63; n != 0 && n < 32 {
						t.Fatalf("completion %d came before its slot was free", sent)
					}
				}
				for _, wc := range b.rcq.poll() {
					if wc.ID != received || wc.Status != abi.WCSuccess {
						t.Fatalf("receive completion %+v, want %d", wc, received)
					}
					received++
				}
				if step%11 == 0 {
					g.takeAway(r.base, int(r.desc.Length))
				}
				return sent == total && received == total
			})
			g.hostServe()
			w.step(10)
			for _, r := range []*tring{&a.sq, &rq} {
				if c := r.cons().Load(); c != total%64 {
					t.Errorf("consumer index %d after %d requests", c, total)
				}
			}
			if n := g.Stats().Value[abi.StatHostFaults]; n < 20 {
				t.Errorf("only %d host faults", n)
			}
			if g.Describe().Faults.Parked != 0 {
				t.Error("a side of a QP still waits")
			}
		})
	}
}

// crowd is n connections from guest 0 to guest 1, each of which writes to its own
// page of an on-demand region.
type crowd struct {
	d    *dregion
	a, b []*tqp
}

func (w *world) crowd(n int) *crowd {
	w.tb.Helper()
	ga, gb := w.guests[0], w.guests[1]
	bpd := gb.pd()
	c := &crowd{d: gb.demand(bpd, n, demandAccess)}
	buf := ga.alloc(4096)
	pd := ga.pd()
	key := ga.mr(pd, buf, 4096, demandAccess)
	for i := range n {
		a, b := ga.qp(qpSpec{pd: pd, elems: 8}), gb.qp(qpSpec{pd: bpd, elems: 8})
		a.connectRC(b)
		b.connectRC(a)
		c.a, c.b = append(c.a, a), append(c.b, b)
		s := a.wqe()
		s.SetRequest(uint64(i), abi.WRRDMAWrite, abi.SendSignaled)
		s.SetRDMA(c.d.iova+uint64(i)*4096, c.d.key)
		s.SetSGEs([]abi.SGE{{Addr: uint64(buf), Length: 100, LKey: key}})
		a.post()
	}
	return c
}

// The driver posts few buffers, or none: every fault waits with its QP, none is
// lost or delivered twice, and those of destroyed QPs are not delivered.
func TestFaultsWithoutBuffers(t *testing.T) {
	const n = 40
	w := newWorld(t, 2, 2, Limits{})
	gb := w.guests[1]
	c := w.crowd(n)
	w.until("all faults", func() bool { return gb.Stats().Value[abi.StatGuestFaults] == n })
	st := gb.Describe()
	if f := st.Faults; f.Guest.Waiting != n || f.Parked != n {
		t.Errorf("%d faults wait, %d parked, want %d", f.Guest.Waiting, f.Parked, n)
	}
	for _, q := range st.QPs {
		if len(q.Waits) != 1 || !strings.HasPrefix(q.Waits[0], "responder: ") ||
			!strings.Contains(q.Waits[0], "absent in the guest") {
			t.Fatalf("QP %#x waits for %q", q.QPN, q.Waits)
		}
	}
	gone := map[uint32]bool{}
	for i := 0; i < n; i += 4 {
		gone[c.b[i].n] = true
		gb.must(abi.CmdDestroyQP, handle(c.b[i].n))
	}
	w.step(20)
	dq := gb.faultQueue(0)
	dq = gb.restartFaultQueue(dq, 3)
	seen := map[uint32]bool{}
	w.until("all events", func() bool {
		for _, e := range dq.events() {
			if seen[e.Handle] || gone[e.Handle] {
				t.Fatalf("duplicate event for QP %#x, or event of a destroyed QP", e.Handle)
			}
			seen[e.Handle] = true
			c.d.serve(e)
			dq.add(1)
		}
		return len(seen) == n-len(gone)
	})
	for i, a := range c.a {
		if gone[c.b[i].n] {
			continue
		}
		if wc := a.scq.await(1)[0]; wc.Status != abi.WCSuccess {
			t.Fatalf("QP %d: %+v", i, wc)
		}
	}
	if f := gb.Describe().Faults; f.Guest.Waiting != 0 || f.Parked != 0 || f.Guest.Resumed != n-uint64(len(gone)) {
		t.Errorf("at the end: %+v", f)
	}
	if got := dq.events(); len(got) > 0 {
		t.Errorf("more events: %+v", got)
	}
}

// Only the driver that got the event can answer a token, and only once: other answers get ENOENT and change
// no state (PF-5). SET_MTT with such a token sets its entries and resumes no operation.
func TestHostileTokens(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	c := w.crowd(3)
	scratch := map[*guest]*dregion{ga: ga.demand(ga.pd(), 1, demandAccess), gb: gb.demand(gb.pd(), 1, demandAccess)}
	w.until("all faults", func() bool { return gb.Stats().Value[abi.StatGuestFaults] == 3 })
	try := func(g *guest, token uint32) {
		t.Helper()
		for _, s := range []abi.Status{abi.StatusOK, abi.StatusFault} {
			g.refused(abi.StatusNotFound, abi.CmdResumeFault,
				enc(abi.SizeResumeFault, &abi.ResumeFault{Token: token, Status: s}))
		}
		d := scratch[g]
		d.setResume(abi.StatusOK, 0, 1, uint64(token))
		if !d.present(0) {
			t.Fatalf("token %#x: the entry is not set", token)
		}
		d.clear(0, 1)
	}
	all := func(g *guest) {
		t.Helper()
		for _, hi := range []uint32{0, 1, 2, 3, 4, 5, 0x7fff << 1, 0xffff} {
			for lo := range uint32(8) {
				try(g, hi<<16|lo)
			}
		}
		for i := range uint32(3000) {
			try(g, i*2654435761)
		}
	}
	all(gb) // events are not posted yet: even the right number is not valid
	dq := gb.faultQueue(3)
	events := dq.awaitEvents(3)
	for _, e := range events {
		try(ga, e.Token) // the token of another VM
		for bit := range 32 {
			if x := e.Token ^ 1<<bit; x != events[0].Token && x != events[1].Token && x != events[2].Token {
				try(gb, x)
			}
		}
	}
	w.step(50)
	if f := gb.Describe().Faults; f.Parked != 3 || f.Guest.Resumed+f.Guest.Failed != 0 {
		t.Fatalf("an operation was resumed: %+v", f)
	}
	gb.must(abi.CmdDestroyQP, handle(c.b[0].n))
	for _, e := range events {
		if e.Handle == c.b[0].n {
			try(gb, e.Token)
			continue
		}
		c.d.serve(e)
		try(gb, e.Token)
	}
	for _, a := range c.a[1:] {
		if wc := a.scq.await(1)[0]; wc.Status != abi.WCSuccess {
			t.Fatalf("%+v", wc)
		}
	}
}

// The guest's driver answers "no such address": that operation fails as its
// table requires, and no other operation fails (PF-13).
func TestInvalidAddress(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	gb := w.guests[1]
	c := w.crowd(2)
	dq := gb.faultQueue(4)
	for _, e := range dq.awaitEvents(2) {
		if e.Handle == c.b[0].n {
			gb.resumeFault(e.Token, abi.StatusFault)
		} else {
			c.d.serve(e)
		}
	}
	if wc := c.a[0].scq.await(1)[0]; wc.Status != abi.WCRemAccessErr {
		t.Errorf("%+v", wc)
	}
	if wc := c.a[1].scq.await(1)[0]; wc.Status != abi.WCSuccess {
		t.Errorf("%+v", wc)
	}
	st := gb.Stats()
	if st.Value[abi.StatFaultsFailed] != 1 || st.Value[abi.StatFaultsResumed] != 1 {
		t.Errorf("counters %v", st.Value)
	}
}

// A region whose pages the guest clears is written again only after they are present
// again; pages are not accessed after CLEAR_MTT was answered (ODP-5).
func TestClearedPagesFault(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	gb := w.guests[1]
	c := w.crowd(1)
	dq := gb.faultQueue(4)
	c.d.serve(dq.awaitEvents(1)[0])
	c.a[0].scq.await(1)
	for i := range uint64(3) {
		c.d.clear(0, 1)
		pattern(c.d.bytes(0, 100), 9)
		s := c.a[0].wqe() // the next slot is not filled yet: the same request again
		copy(s, abi.SendWQE(c.a[0].sq.elem(0)))
		c.a[0].post()
		e := dq.awaitEvents(1)[0]
		w.step(20)
		if !bytes.Equal(c.d.bytes(0, 100), pattern(make([]byte, 100), 9)) {
			t.Fatal("a page was written after CLEAR_MTT")
		}
		c.d.serve(e)
		if wc := c.a[0].scq.await(1)[0]; wc.Status != abi.WCSuccess {
			t.Fatalf("%+v", wc)
		}
		if n := gb.Stats().Value[abi.StatInvalidations]; n != i+1 {
			t.Errorf("%d invalidations", n)
		}
	}
}

// A goroutine serves host faults while the pages of both VMs are evicted repeatedly,
// except command buffers: traffic of all kinds succeeds.
func TestHostFaults(t *testing.T) {
	w := newWorld(t, 2, 2, Limits{})
	a, b := w.pair()
	ga, gb := w.guests[0], w.guests[1]
	const n = 10000
	src, dst := ga.alloc(n), gb.alloc(n)
	skey, dkey := ga.mr(1, src, n, demandAccess), gb.mr(1, dst, n, demandAccess)
	ga.hostDriver(t)
	gb.hostDriver(t)
	for i := range 60 {
		op := []uint32{abi.WRRDMAWrite, abi.WRRDMARead, abi.WRSend, abi.WRAtomicFetchAndAdd}[i%4]
		pattern(ga.at(src, n), byte(i))
		pattern(gb.at(dst, n), byte(i+100))
		size := uint32(n)
		s := a.wqe()
		s.SetRequest(uint64(i), op, abi.SendSignaled)
		switch op {
		case abi.WRSend:
			b.recv(uint64(i), abi.SGE{Addr: uint64(dst), Length: n, LKey: dkey})
		case abi.WRAtomicFetchAndAdd:
			size = 8
			s.SetAtomic(uint64(dst)+16, dkey, 1, 0)
		default:
			s.SetRDMA(uint64(dst), dkey)
		}
		s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: size, LKey: skey}})
		for _, m := range []struct {
			g  *guest
			pa translate.PA
			n  int
		}{{ga, src, n}, {gb, dst, n}, {ga, a.sq.base, int(a.sq.desc.Length)}, {gb, b.rq.base, int(b.rq.desc.Length)}} {
			m.g.takeAway(m.pa, m.n)
		}
		a.post()
		if wc := a.scq.await(1)[0]; wc.ID != uint64(i) || wc.Status != abi.WCSuccess {
			t.Fatalf("%d: %+v", i, wc)
		}
		if op != abi.WRAtomicFetchAndAdd && !bytes.Equal(ga.at(src, n), gb.at(dst, n)) {
			t.Fatalf("%d: data differs", i)
		}
	}
	for _, g := range w.guests {
		// The last completion does not wait for every page: one that was fetched ahead may be on its way.
		w.until("all host faults", func() bool { h := g.Describe().Faults.Host; return h.Resumed == h.Raised })
		f := g.Describe().Faults
		if f.Host.Raised == 0 || f.Parked != 0 || f.Host.Estimate == 0 || f.Guest.Raised != 0 {
			t.Errorf("%+v", f)
		}
	}
}

// Event buffers, and the event queue's rings, that are absent on the host: only this
// queue waits for them; no event is lost or delivered twice.
func TestAbsentEventBuffers(t *testing.T) {
	const n = 24
	w := newWorld(t, 2, 2, Limits{})
	gb := w.guests[1]
	dq := gb.faultQueue(0)
	c := w.crowd(n)
	w.until("all faults", func() bool { return gb.Stats().Value[abi.StatGuestFaults] == n })
	seen := map[uint32]bool{}
	step := 0
	w.until("all events", func() bool {
		if step++; step%3 == 0 {
			gb.hostServe()
		}
		for _, e := range dq.events() {
			if seen[e.Handle] {
				t.Fatalf("duplicate event for QP %#x", e.Handle)
			}
			seen[e.Handle] = true
			c.d.serve(e)
		}
		if step%7 == 0 && len(dq.free) > 0 {
			for i, pa := range []translate.PA{dq.buf, dq.avail, dq.used, dq.desc} {
				if step/7>>i&1 == 0 {
					gb.takeAway(pa, 4096)
				}
			}
			dq.add(1)
		}
		return len(seen) == n
	})
	for _, a := range c.a {
		if wc := a.scq.await(1)[0]; wc.Status != abi.WCSuccess {
			t.Fatalf("%+v", wc)
		}
	}
	if gb.Stats().Value[abi.StatHostFaults] == 0 {
		t.Error("no host fault")
	}
}

// QPs are destroyed, reset and restarted while their faults are outstanding, at both
// levels: later answers of the drivers, whatever they are, have no effect.
func TestFaultsOutliveTheirQPs(t *testing.T) {
	for _, how := range []string{"destroyed", "reset", "error", "disconnected", "device reset"} {
		for _, level := range []string{"guest", "host"} {
			t.Run(how+" "+level, func(t *testing.T) {
				w := newWorld(t, 2, 2, Limits{})
				gb := w.guests[1]
				dq := gb.faultQueue(4)
				c := w.crowd(3)
				if level == "host" {
					c.d.set(0, 3, 0)
					gb.takeAway(c.d.home, 3*4096)
				}
				var out []*translate.Fault
				var events []abi.Event
				w.until("all faults", func() bool {
					for f := gb.space.Faults().TryNext(); f != nil; f = gb.space.Faults().TryNext() {
						out = append(out, f)
					}
					events = append(events, dq.events()...)
					return len(out)+len(events) == 3
				})
				space := gb.space
				answer := func() {
					for i, f := range out {
						err := errAbsent
						if i%2 == 0 {
							err = nil
						}
						space.Faults().Finish(f, err)
					}
					for _, e := range events {
						gb.do(abi.CmdResumeFault, enc(abi.SizeResumeFault, &abi.ResumeFault{Token: e.Token, Status: abi.StatusFault}))
					}
					w.step(20)
				}
				b := c.b[0]
				switch how {
				case "disconnected", "device reset":
					gb.StopQueue(abi.EventQueue)
					if how == "disconnected" {
						gb.disconnect()
					} else {
						gb.Reset()
						gb.up.Store(true)
						gb.setUpDriver()
					}
					for _, a := range c.a {
						w.guests[0].must(abi.CmdDestroyQP, handle(a.n))
					}
					if how == "disconnected" {
						endFaults(space, out)
						gb.connect()
					} else {
						answer()
					}
				case "destroyed":
					gb.must(abi.CmdDestroyQP, handle(b.n))
					answer()
				case "reset":
					b.modify(abi.QPReset, 0, abi.QPAttr{})
					answer()
				case "error":
					b.modify(abi.QPErr, 0, abi.QPAttr{})
					answer()
				}
				if n := gb.Describe().Faults.Parked; n > 2 {
					t.Errorf("%d parked", n)
				}
				switch how {
				case "reset":
					// The QP works again, and its new fault is answered separately.
					b.connectRC(c.a[0])
					c.d.set(0, 3, 0)
					gb.bringAll()
					w.step(50)
					if b.state() != abi.QPRTS {
						t.Errorf("state %d", b.state())
					}
				case "disconnected", "device reset":
					c2 := w.crowd(1)
					dq := gb.faultQueue(4)
					c2.d.serve(dq.awaitEvents(1)[0])
					if wc := c2.a[0].scq.await(1)[0]; wc.Status != abi.WCSuccess {
						t.Errorf("%+v", wc)
					}
				}
			})
		}
	}
}

// While the device is frozen (the VM is paused) faults may be served: waiting operations
// continue when the VM does.
func TestFaultsServedWhileFrozen(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	gb := w.guests[1]
	c := w.crowd(1)
	c.d.set(0, 1, 0)
	gb.takeAway(c.d.home, 4096)
	w.until("the fault", func() bool { return gb.Stats().Value[abi.StatHostFaults] == 1 })
	e := gb.engines[0]
	e.loop.Do(e.freeze)
	gb.hostServe()
	w.step(20)
	if gb.Describe().Faults.Parked != 1 {
		t.Fatal("resumed while frozen")
	}
	e.loop.Do(e.thaw)
	if wc := c.a[0].scq.await(1)[0]; wc.Status != abi.WCSuccess {
		t.Fatalf("%+v", wc)
	}
}

// A guest that destroys QPs whose faults the host still serves cannot accumulate more of
// them than its limit allows.
func TestLingeringQPs(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{QPs: 4})
	gb := w.guests[1]
	c := w.crowd(4)
	c.d.set(0, 4, 0)
	gb.takeAway(c.d.home, 4*4096)
	w.until("the faults", func() bool { return gb.Stats().Value[abi.StatHostFaults] == 4 })
	for _, b := range c.b[:3] {
		gb.must(abi.CmdDestroyQP, handle(b.n))
	}
	_, _, payload := gb.qpRequest(&qpSpec{pd: 1})
	gb.refused(abi.StatusNoMemory, abi.CmdCreateQP, payload)
	gb.bringBack(gb.space.Faults().TryNext())
	gb.must(abi.CmdCreateQP, payload)
	gb.refused(abi.StatusNoMemory, abi.CmdCreateQP, payload)

	// A reset frees all QPs but three, whose faults are with the host's driver.
	gb.Reset()
	gb.setUpDriver()
	for i := range 2 {
		_, _, payload = gb.qpRequest(&qpSpec{pd: gb.pd()})
		if i == 0 {
			gb.must(abi.CmdCreateQP, payload)
		} else {
			gb.refused(abi.StatusNoMemory, abi.CmdCreateQP, payload)
		}
	}
	gb.hostServe()
	gb.must(abi.CmdCreateQP, payload)
}

// The whole address space as one region (ODP-1): absent pages fault at any address;
// the guest's driver checks the bounds (PF-13).
func TestImplicitRegion(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	a, b := w.pair()
	gb := b.g
	dq := gb.faultQueue(4)
	var resp abi.CreateMRResp
	req := abi.CreateMR{PDN: 1, Access: demandAccess | abi.AccessOnDemand, Flags: abi.MROnDemand | abi.MRImplicit,
		PageShift: 12, Length: 1 << 57, NPages: 1 << 45}
	if err := resp.Decode(gb.must(abi.CmdCreateMR, enc(abi.SizeCreateMR, &req))); err != nil {
		t.Fatal(err)
	}
	src := a.g.alloc(4096)
	key := a.g.mr(1, src, 4096, demandAccess)
	home := gb.alloc(4096)
	for i, va := range []uint64{0x1000, 0x7fff12345000, 1<<57 - 4096, 1 << 57} {
		pattern(a.g.at(src, 64), byte(i))
		s := a.wqe()
		s.SetRequest(uint64(i), abi.WRRDMAWrite, abi.SendSignaled)
		s.SetRDMA(va+64, resp.RKey)
		s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 64, LKey: key}})
		a.post()
		want := uint32(abi.WCRemAccessErr)
		if va < 1<<57 {
			want = abi.WCSuccess
			e := dq.awaitEvents(1)[0]
			if e.VA != va+64 || e.Length != 64 || e.Key != resp.RKey {
				t.Fatalf("event %+v", e)
			}
			gb.must(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: resp.Handle, Count: 1, First: va >> 12},
				uint64(home)))
			gb.resumeFault(e.Token, abi.StatusOK)
		}
		if wc := a.scq.await(1)[0]; wc.Status != want {
			t.Fatalf("at %#x: %+v", va, wc)
		}
		if want == abi.WCSuccess && !bytes.Equal(gb.at(home+64, 64), a.g.at(src, 64)) {
			t.Errorf("at %#x: data differs", va)
		}
	}
	if n := gb.Describe().MTTs; n > 4*512 {
		t.Errorf("three pages cost %d entries of the quota", n)
	}
}

// The RNR timer sent to a peer follows the service time of the driver that serves the
// kind of fault met last (PF-8).
func TestFaultDelay(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	gb := w.guests[1]
	dq := gb.faultQueue(4)
	c := w.crowd(2)
	events := dq.awaitEvents(2)
	w.clock.Advance(50 * time.Millisecond)
	for _, e := range events {
		c.d.serve(e)
	}
	q := gb.qpFor(c.b[0].n)
	guest := q.FaultDelay()
	if guest < 40e6 || guest > 500e6 {
		t.Errorf("guest faults took 50 ms, the delay is %d ns", guest)
	}
	if wc := c.a[0].scq.await(1)[0]; wc.Status != abi.WCSuccess {
		t.Fatalf("%+v", wc)
	}
	gb.takeAway(c.d.home, 4096)
	s := c.a[0].wqe()
	copy(s, abi.SendWQE(c.a[0].sq.elem(0)))
	c.a[0].post()
	w.until("the host fault", func() bool { return gb.hostServe() == 1 })
	if d := q.FaultDelay(); d == guest || time.Duration(d) != gb.space.Faults().Estimate() {
		t.Errorf("delay %d ns after a host fault, its estimate is %v", d, gb.space.Faults().Estimate())
	}
	c.a[0].scq.await(1)
	h := gb.Describe().Faults.Guest
	if h.Max < 50*time.Millisecond || h.Median < 50*time.Millisecond/2 || len(h.Buckets) < 16 ||
		h.Estimate != time.Duration(guest) {
		t.Errorf("%+v", h)
	}
}

// A READ waits for the guest's driver, the WRITE behind it for the host's. The host's
// driver answers that there is no such memory: the WRITE fails, not the READ (PF-13).
func TestAnswerForAnotherWait(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	a, _ := w.pair()
	ga, gb := w.guests[0], w.guests[1]
	d := gb.demand(1, 1, demandAccess)
	dq := gb.faultQueue(4)
	buf, gone := ga.alloc(4096), gb.alloc(4096)
	key, goneKey := ga.mr(1, buf, 4096, demandAccess), gb.mr(1, gone, 4096, demandAccess)
	gb.takeAway(gone, 4096)
	copy(d.bytes(0, 64), pattern(make([]byte, 64), 7))
	post := func(id uint64, op uint32, va uint64, rkey uint32) {
		s := a.wqe()
		s.SetRequest(id, op, abi.SendSignaled)
		s.SetRDMA(va, rkey)
		s.SetSGEs([]abi.SGE{{Addr: uint64(buf), Length: 64, LKey: key}})
		a.post()
	}
	post(1, abi.WRRDMARead, d.iova, d.key)
	e := dq.awaitEvents(1)[0]
	post(2, abi.WRRDMAWrite, uint64(gone), goneKey)
	fail := func() bool {
		f := gb.space.Faults().TryNext()
		if f != nil {
			gb.space.Faults().Finish(f, errAbsent)
		}
		return f != nil
	}
	if !LocalPath { // there the WRITE begins after the READ
		w.until("the host fault", fail)
		w.step(20)
	}
	if wcs := a.scq.poll(); len(wcs) > 0 {
		t.Fatalf("completions %+v, though the guest's driver has not answered", wcs)
	}
	d.serve(e)
	var wcs []abi.WC
	w.until("both completions", func() bool {
		fail()
		wcs = append(wcs, a.scq.poll()...)
		return len(wcs) == 2
	})
	if wcs[0].ID != 1 || wcs[0].Status != abi.WCSuccess || wcs[1].ID != 2 || wcs[1].Status != abi.WCRemAccessErr {
		t.Errorf("completions %+v", wcs)
	}
	if !bytes.Equal(ga.at(buf, 64), pattern(make([]byte, 64), 7)) {
		t.Error("data differs")
	}
}
