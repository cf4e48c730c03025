package hca

import (
	"context"
	"slices"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/virtio/virtq"
	"github.com/vnicd/vnicd/translate"
)

// slowHost is a guest whose host driver serves nothing until the test says so: Hold blocks, and absent pages stay so.
type slowHost struct {
	*guest
	d     *drvcq
	come  chan struct{} // closed: the memory comes
	pd    uint32
	r     *dregion
	first int // page of r that is cleared next
}

func newSlowHost(t *testing.T, lim Limits) *slowHost {
	w := newWorld(t, 1, 1, lim)
	g := w.guests[0]
	s := &slowHost{guest: g, d: g.commandQueue(512), come: make(chan struct{})}
	s.pd = g.pd()
	s.r = g.demand(s.pd, 64, demandAccess)
	s.r.set(0, 64, 0)
	return s
}

// slow begins the time without memory.
func (s *slowHost) slow() {
	block := func(ctx context.Context) error {
		select {
		case <-s.come:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s.block.Store(&block)
}

// settled makes the effects of answered commands visible to the test.
func (s *slowHost) settled() {
	s.mu.Lock()
	defer s.mu.Unlock()
}

// awaitAside waits until n commands wait for host memory.
func (s *slowHost) awaitAside(n int) {
	s.tb.Helper()
	testutil.Eventually(s.tb, "commands wait", func() bool {
		return int(s.blocked.Load())+int(s.space.Faults().Stats().Waiting) >= n
	})
}

// comes lets all memory come.
func (s *slowHost) comes() {
	close(s.come)
	s.hostDriver(s.tb)
}

// others checks that releases and other commands are answered at once.
func (s *slowHost) others(what string) {
	s.tb.Helper()
	key := s.mr(s.pd, s.r.home, 4096, demandAccess)
	for _, x := range []struct {
		op      abi.Opcode
		payload []byte
		want    abi.Status
	}{
		{abi.CmdClearMTT, clearOf(s.r, s.first), abi.StatusOK},
		{abi.CmdDestroyMR, handle(key), abi.StatusOK},
		{abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: s.r.handle, Count: 1, First: uint64(s.first)},
			s.r.pas(s.first, 1, 0)...), abi.StatusOK},
		{abi.CmdResumeFault, enc(abi.SizeResumeFault, &abi.ResumeFault{Token: 5}), abi.StatusNotFound},
		{abi.CmdClearMTT, clearOf(s.r, s.first), abi.StatusOK},
		{abi.CmdQueryPort, nil, abi.StatusOK},
	} {
		n := s.d.submit(x.op, x.payload)
		if got := s.d.await(1); !slices.Equal(got, []uint16{n}) || s.d.status(n) != x.want {
			s.tb.Fatalf("%s: answered %v, want %v of %d, %v", what, got, x.op, n, x.want)
		}
	}
	if s.r.present(s.first) {
		s.tb.Errorf("%s: the page was not cleared", what)
	}
	s.first++
}

// createCQ returns the request for a CQ in new memory.
func (s *slowHost) createCQ() []byte {
	r := s.ring(16, abi.WCLog2ElemSize)
	return enc(abi.SizeCreateCQ, &abi.CreateCQ{Ring: r.desc, ArmPA: uint64(s.alloc(4))}, r.pas...)
}

// No command waits behind one that needs host memory, whatever that command is and wherever the memory is missing
// (TR-5, EP-3). When the memory comes, the command has its effect.
func TestReleasesDoNotWaitForHostMemory(t *testing.T) {
	type slowCommand struct {
		op      abi.Opcode
		payload []byte
		done    func() bool // the command has taken effect; nil: as the status says
	}
	for name, prepare := range map[string]func(t *testing.T, s *slowHost) slowCommand{
		"CREATE_CQ": func(_ *testing.T, s *slowHost) slowCommand {
			n := len(s.tables.cqs)
			return slowCommand{abi.CmdCreateCQ, s.createCQ(), func() bool { return len(s.tables.cqs) == n+1 }}
		},
		"RESIZE_CQ": func(_ *testing.T, s *slowHost) slowCommand {
			cq, r := s.cq(16), s.ring(64, abi.WCLog2ElemSize)
			o := s.tables.cqs[cq.n]
			return slowCommand{abi.CmdResizeCQ, enc(abi.SizeResizeCQ, &abi.ResizeCQ{CQN: cq.n, Ring: r.desc}, r.pas...),
				func() bool { return o.q.r.mask == 63 }}
		},
		"SET_DOORBELLS": func(_ *testing.T, s *slowHost) slowCommand {
			pa := uint64(s.alloc(abi.DoorbellSize))
			return slowCommand{abi.CmdSetDoorbells, enc(abi.SizeSetDoorbells,
				&abi.SetDoorbells{NPages: 3, PA: [3]uint64{pa, pa + 4096, pa + 8192}}),
				func() bool { return s.engines[0].db.pages[0] == translate.PA(pa) }}
		},
		"SET_AH_TABLE": func(_ *testing.T, s *slowHost) slowCommand {
			return slowCommand{abi.CmdSetAHTable, enc(abi.SizeSetAHTable, &abi.SetAHTable{NumEntries: 16, NPages: 1},
				uint64(s.alloc(4096))), func() bool { return s.ahs.Load() != nil }}
		},
		"CREATE_SRQ": func(_ *testing.T, s *slowHost) slowCommand {
			r := s.ring(64, 7)
			s.takeAway(r.base, 4096)
			return slowCommand{abi.CmdCreateSRQ, enc(abi.SizeCreateSRQ, &abi.CreateSRQ{PDN: s.pd, MaxSGE: 2, Ring: r.desc},
				r.pas...), func() bool { return len(s.tables.srqs) == 1 }}
		},
		"MODIFY_SRQ": func(_ *testing.T, s *slowHost) slowCommand {
			old, r := s.ring(64, 7), s.ring(128, 7)
			n := s.mustHandle(abi.CmdCreateSRQ, enc(abi.SizeCreateSRQ, &abi.CreateSRQ{PDN: s.pd, MaxSGE: 2, Ring: old.desc},
				old.pas...))
			s.takeAway(old.base, 4096)
			s.takeAway(r.base, 4096)
			o := s.tables.srqs[n]
			return slowCommand{abi.CmdModifySRQ, enc(abi.SizeModifySRQ,
				&abi.ModifySRQ{SRQN: n, Flags: abi.SRQResize, Ring: r.desc}, r.pas...),
				func() bool { return o.q.wr.mask == 127 }}
		},
		"CREATE_QP": func(_ *testing.T, s *slowHost) slowCommand {
			q, _, payload := s.qpRequest(&qpSpec{pd: s.pd})
			s.takeAway(q.sq.base, 4096)
			s.takeAway(q.rq.base, 4096)
			// Running again takes one engine's turn and one number, not more.
			lane, index := s.tables.nextLane, s.tables.nextQP
			return slowCommand{abi.CmdCreateQP, payload, func() bool {
				return s.tables.qps == 1 && s.tables.nextLane == lane+1 && s.tables.nextQP == index+1
			}}
		},
		"MODIFY_QP to RESET": func(_ *testing.T, s *slowHost) slowCommand {
			q := s.qp(qpSpec{pd: s.pd})
			q.recv(1)
			q.recv(2)
			s.takeAway(q.rq.base, 4096)
			return slowCommand{abi.CmdModifyQP, enc(abi.SizeQPAttr, &abi.QPAttr{QPN: q.n, AttrMask: abi.QPAttrState,
				PortNum: 1, QPState: abi.QPReset}), func() bool { return q.rq.cons().Load() == 2 }}
		},
		"SET_MTT of a pinned region": func(t *testing.T, s *slowHost) slowCommand {
			var r abi.CreateMRResp
			pa := s.alloc(2 * 4096)
			req := abi.CreateMR{PDN: s.pd, Access: demandAccess, PageShift: 12, IOVA: uint64(pa), Length: 8192, NPages: 2}
			if err := r.Decode(s.must(abi.CmdCreateMR, enc(abi.SizeCreateMR, &req))); err != nil {
				t.Fatal(err)
			}
			s.takeAway(pa+4096, 4096)
			return slowCommand{abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: r.Handle, Count: 2}, uint64(pa),
				uint64(pa)+4096), func() bool { _, ok := s.vm.Lookup(translate.Key(r.LKey), translate.VA(pa)); return ok }}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSlowHost(t, Limits{})
			c := prepare(t, s)
			held := s.held.Load()
			s.slow()
			n := s.d.submit(c.op, c.payload)
			for range 5 {
				s.others(name)
			}
			s.settled()
			if c.op != abi.CmdSetMTT && c.done() || s.held.Load() != held {
				t.Error("the command has taken effect without its memory")
			}
			s.comes()
			if got := s.d.await(1); !slices.Equal(got, []uint16{n}) || s.d.status(n) != abi.StatusOK {
				t.Fatalf("answered %v, %v", got, s.d.status(n))
			}
			if s.settled(); !c.done() {
				t.Error("the command was answered without an effect")
			}
		})
	}
	for name, away := range map[string]func(s *slowHost) (pa translate.PA){
		"absent request":  func(s *slowHost) translate.PA { return s.d.req },
		"absent response": func(s *slowHost) translate.PA { return s.d.out },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSlowHost(t, Limits{})
			pds := len(s.tables.pds)
			s.takeAway(away(s), 4096) // of the slots 0 to 15
			s.d.use(3)
			n := s.d.submit(abi.CmdCreatePD, nil)
			for range 5 {
				s.d.use(20)
				s.others(name)
			}
			s.comes()
			if got := s.d.await(1); !slices.Equal(got, []uint16{n}) || s.d.status(n) != abi.StatusOK {
				t.Fatalf("answered %v, %v", got, s.d.status(n))
			}
			if s.settled(); len(s.tables.pds) != pds+1 {
				t.Errorf("%d PDs, want %d", len(s.tables.pds), pds+1)
			}
		})
	}
}

// use makes slot i the next one, and those after it.
func (d *drvcq) use(i uint16) {
	slices.SortFunc(d.free, func(a, b uint16) int { return int((a-i)%(d.size/2)) - int((b-i)%(d.size/2)) })
}

// A guest has more commands under way than may wait: the places for releases stay free. What finds no place is refused
// as "later", without an effect.
func TestManyCommandsWaitForHostMemory(t *testing.T) {
	s := newSlowHost(t, Limits{})
	held := s.held.Load()
	s.slow()
	var all []uint16
	for range maxJobs {
		all = append(all, s.d.submit(abi.CmdCreateCQ, s.createCQ()))
	}
	refused := s.d.await(maxJobs - maxAside)
	for _, n := range refused {
		if st := s.d.status(n); st != abi.StatusNoMemory {
			t.Errorf("command %d: %v", n, st)
		}
	}
	for range 20 {
		s.others("64 commands wait")
	}
	s.settled()
	if n := s.held.Load(); n != held || len(s.tables.cqs) != 0 {
		t.Errorf("%d holds, %d CQs", n, len(s.tables.cqs))
	}
	s.comes()
	for _, n := range s.d.await(maxAside) {
		if st := s.d.status(n); st != abi.StatusOK || slices.Contains(refused, n) || !slices.Contains(all, n) {
			t.Errorf("command %d: %v", n, st)
		}
	}
	s.settled()
	if n := len(s.tables.cqs); n != maxAside {
		t.Errorf("%d CQs, want %d", n, maxAside)
	}
	s.checkAccount()
}

// The queue stops while commands wait for memory that never comes: they end without an effect, or return to the queue,
// nothing hangs, and nothing stays held. The queue then runs again, as after a pause of the VM.
func TestStopWhileCommandsWait(t *testing.T) {
	s := newSlowHost(t, Limits{})
	mr := s.mr(s.pd, s.alloc(4096), 4096, demandAccess)
	s.takeAway(s.d.req, 4096)
	s.slow()
	held := s.held.Load()
	s.d.use(16)
	var waiting []uint16
	for range 5 {
		waiting = append(waiting, s.d.submit(abi.CmdCreateCQ, s.createCQ()))
	}
	s.d.use(2)
	waiting = append(waiting, s.d.submit(abi.CmdCreatePD, nil)) // cannot be read
	s.d.use(25)
	s.others("before the stop")
	s.d.use(3)
	last := s.d.submit(abi.CmdDestroyMR, handle(mr)) // cannot be read either, and is the last
	s.d.use(26)
	pds := len(s.tables.pds)
	s.awaitAside(7)
	s.StopQueue(abi.CommandQueue)
	got := s.d.done()
	slices.Sort(got)
	slices.Sort(waiting)
	if !slices.Equal(got, waiting) || s.d.q.InFlight() != 0 {
		t.Fatalf("answered %v, want %v; %d in flight", got, waiting, s.d.q.InFlight())
	}
	for _, n := range got {
		if st := s.d.status(n); st != abi.StatusNoMemory {
			t.Errorf("command %d: %v", n, st)
		}
	}
	if n := s.held.Load(); n != held || len(s.tables.cqs) != 0 || len(s.tables.pds) != pds {
		t.Errorf("%d holds of %d, %d CQs, %d PDs of %d", n, held, len(s.tables.cqs), len(s.tables.pds), pds)
	}
	s.checkAccount()
	s.comes()
	q, err := virtq.New(s.space, virtq.Config{Index: abi.CommandQueue, Size: int(s.d.size), Desc: s.d.desc,
		Avail: s.d.avail, Used: s.d.used, Base: s.d.q.Base(), Kick: s.d.kick})
	if err != nil {
		t.Fatal(err)
	}
	s.d.q = q
	if err := s.StartQueue(abi.CommandQueue, q); err != nil {
		t.Fatal(err)
	}
	if got := s.d.await(1); !slices.Equal(got, []uint16{last}) || s.d.status(last) != abi.StatusOK {
		t.Errorf("after the stop: answered %v, %v", got, s.d.status(last))
	}
	s.settled()
	if _, ok := s.tables.mrs[mr]; ok {
		t.Error("DESTROY_MR had no effect")
	}
}

// The front end goes away while commands wait.
func TestDisconnectWhileCommandsWait(t *testing.T) {
	s := newSlowHost(t, Limits{})
	s.slow()
	r := s.ring(64, 7)
	s.takeAway(r.base, 4096)
	for range 10 {
		s.d.submit(abi.CmdCreateCQ, s.createCQ())
		s.d.submit(abi.CmdCreateSRQ, enc(abi.SizeCreateSRQ, &abi.CreateSRQ{PDN: s.pd, MaxSGE: 2, Ring: r.desc}, r.pas...))
	}
	s.awaitAside(20)
	s.disconnect()
	if n := s.held.Load(); n != 0 {
		t.Errorf("%d holds after the disconnect", n)
	}
}

// Commands on one object that are under way at once: each takes effect as a whole on what the tables have then.
func TestWaitingCommandsAreCheckedAgain(t *testing.T) {
	s := newSlowHost(t, Limits{})
	cq, other := s.cq(16), s.cq(16)
	ring := s.ring(64, abi.WCLog2ElemSize)
	q, _, createQP := s.qpRequest(&qpSpec{pd: s.pd, scq: cq, rcq: cq})
	srqRing := s.ring(64, 7)
	pd2 := s.mustHandle(abi.CmdCreatePD, nil)
	s.takeAway(q.rq.base, 4096)
	s.takeAway(srqRing.base, 4096)
	reset := s.qp(qpSpec{pd: s.pd, scq: other, rcq: other})
	s.takeAway(reset.rq.base, 4096)
	held := s.held.Load()
	s.slow()
	want := map[uint16]abi.Status{
		s.d.submit(abi.CmdResizeCQ, enc(abi.SizeResizeCQ, &abi.ResizeCQ{CQN: cq.n, Ring: ring.desc},
			ring.pas...)): abi.StatusNotFound,
		s.d.submit(abi.CmdCreateQP, createQP): abi.StatusNotFound,
		s.d.submit(abi.CmdCreateSRQ, enc(abi.SizeCreateSRQ, &abi.CreateSRQ{PDN: pd2, MaxSGE: 2, Ring: srqRing.desc},
			srqRing.pas...)): abi.StatusNotFound,
		// The QP is in RESET; its rings are not flushed any more.
		s.d.submit(abi.CmdModifyQP, enc(abi.SizeQPAttr, &abi.QPAttr{QPN: reset.n, AttrMask: abi.QPAttrState, PortNum: 1,
			QPState: abi.QPReset})): abi.StatusOK,
	}
	s.awaitAside(len(want))
	for _, x := range []struct {
		op abi.Opcode
		n  uint32
	}{{abi.CmdDestroyCQ, cq.n}, {abi.CmdDestroyPD, pd2}, {abi.CmdDestroyQP, reset.n}} {
		n := s.d.submit(x.op, handle(x.n))
		if got := s.d.await(1); !slices.Equal(got, []uint16{n}) || s.d.status(n) != abi.StatusOK {
			t.Fatalf("%v: answered %v, %v", x.op, got, s.d.status(n))
		}
	}
	s.comes()
	for _, n := range s.d.await(len(want)) {
		if st := s.d.status(n); st != want[n] {
			t.Errorf("command %d: %v, want %v", n, st, want[n])
		}
	}
	s.settled()
	if n := s.held.Load(); n != held-2 { // the destroyed CQ's
		t.Errorf("%d holds, want %d", n, held-2)
	}
	s.checkAccount()
	if s.tables.qps != 0 || len(s.tables.srqs) != 0 || s.tables.cqs[other.n].refs != 0 {
		t.Errorf("%d QPs, %d SRQs, CQ used by %d", s.tables.qps, len(s.tables.srqs), s.tables.cqs[other.n].refs)
	}
}

// A SET_MTT whose request cannot be read at first must not bring pages back that a later CLEAR_MTT has removed: the
// guest frees them then (TR-5). It is refused as "later"; those of other regions are not.
func TestOvertakenSetMTT(t *testing.T) {
	for _, clears := range []int{1, maxOvertaken + 1} {
		s := newSlowHost(t, Limits{})
		other := s.demand(s.pd, 2, demandAccess)
		var more []*dregion
		for range clears - 1 {
			x := s.demand(s.pd, 1, demandAccess)
			x.set(0, 1, 0)
			more = append(more, x)
		}
		s.r.clear(7, 1)
		s.takeAway(s.d.req, 4096)
		s.d.use(1)
		set := s.d.submit(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: s.r.handle, Count: 1, First: 7},
			s.r.pas(7, 1, 0)...))
		set2 := s.d.submit(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: other.handle, Count: 1},
			other.pas(0, 1, 0)...))
		for i, x := range append(more, s.r) {
			s.d.use(20)
			page := 0
			if x == s.r {
				page = 7
			}
			n := s.d.submit(abi.CmdClearMTT, clearOf(x, page))
			if got := s.d.await(1); !slices.Equal(got, []uint16{n}) || s.d.status(n) != abi.StatusOK {
				t.Fatalf("CLEAR_MTT %d: answered %v, %v", i, got, s.d.status(n))
			}
		}
		s.comes()
		if got := s.d.await(2); len(got) != 2 || s.d.status(set) != abi.StatusNoMemory {
			t.Errorf("answered %v, the overtaken SET_MTT with %v", got, s.d.status(set))
		}
		if s.r.present(7) {
			t.Error("the page is in the table, although the guest may have freed it")
		}
		if clears == 1 && (s.d.status(set2) != abi.StatusOK || !other.present(0)) {
			t.Errorf("another region: %v", s.d.status(set2))
		}
	}
}

// The descriptors of a command are absent: the queue cannot go on, but releases that were read before are answered.
func TestAbsentDescriptors(t *testing.T) {
	s := newSlowHost(t, Limits{})
	tok := s.space.Epochs().Enter(translate.ByLoop(3))
	release := s.d.submit(abi.CmdClearMTT, clearOf(s.r, 0))
	testutil.Eventually(t, "CLEAR_MTT is executed", func() bool { return !s.r.present(0) })
	if err := s.space.Withdraw(s.d.desc, uint64(s.d.size)*16); err != nil {
		t.Fatal(err)
	}
	query := s.d.submit(abi.CmdQueryPort, nil)
	s.awaitAside(1)
	s.space.Epochs().Leave(3, tok)
	if got := s.d.await(1); !slices.Equal(got, []uint16{release}) {
		t.Fatalf("answered %v, want %d", got, release)
	}
	s.comes()
	if got := s.d.await(1); !slices.Equal(got, []uint16{query}) || s.d.status(query) != abi.StatusOK {
		t.Fatalf("answered %v, want %d", got, query)
	}
}
