package hca

import (
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// Invalid CREATE_MR, SET_MTT, CLEAR_MTT and RESUME_FAULT commands, and their status.
func TestOnDemandRefusals(t *testing.T) {
	w := newWorld(t, 1, 1, Limits{MTTs: 4096})
	g := w.guests[0]
	pd := g.pd()
	mr := func(name string, want abi.Status, f func(*abi.CreateMR)) {
		t.Helper()
		r := abi.CreateMR{PDN: pd, Access: demandAccess | abi.AccessOnDemand, Flags: abi.MROnDemand, PageShift: 12,
			IOVA: 0x10000, Length: 8192, NPages: 2}
		f(&r)
		if s, _ := g.do(abi.CmdCreateMR, enc(abi.SizeCreateMR, &r)); s != want {
			t.Errorf("%s: %v, want %v", name, s, want)
		}
	}
	mr("valid", abi.StatusOK, func(*abi.CreateMR) {})
	mr("offset in the first page", abi.StatusOK, func(r *abi.CreateMR) {
		r.IOVA, r.Offset, r.Length = 0x10010, 0x10, 8192-0x10
	})
	mr("larger than the quota, but all absent", abi.StatusOK,
		func(r *abi.CreateMR) { r.Length, r.NPages = 1<<40, 1<<28 })
	mr("large pages", abi.StatusInvalid, func(r *abi.CreateMR) { r.PageShift, r.NPages = 21, 1 })
	mr("physical, too", abi.StatusInvalid, func(r *abi.CreateMR) { r.Flags |= abi.MRPhys })
	mr("access is on demand, flags are not", abi.StatusInvalid, func(r *abi.CreateMR) { r.Flags = 0 })
	mr("unknown flag", abi.StatusUnsupported, func(r *abi.CreateMR) { r.Flags |= 1 << 3 })
	mr("no such PD", abi.StatusNotFound, func(r *abi.CreateMR) { r.PDN = 99 })
	implicit := func(r *abi.CreateMR) {
		r.Flags |= abi.MRImplicit
		r.IOVA, r.Length, r.NPages = 0, 1<<57, 1<<45
	}
	mr("implicit", abi.StatusOK, implicit)
	mr("implicit, not on demand", abi.StatusInvalid, func(r *abi.CreateMR) {
		implicit(r)
		r.Flags, r.Access = abi.MRImplicit, demandAccess
	})
	mr("implicit, too large", abi.StatusInvalid, func(r *abi.CreateMR) { implicit(r); r.Length, r.NPages = 1<<58, 1<<46 })
	mr("implicit, not from address 0", abi.StatusInvalid, func(r *abi.CreateMR) { implicit(r); r.IOVA = 4096 })
	mr("implicit, pages and length differ", abi.StatusInvalid, func(r *abi.CreateMR) { implicit(r); r.NPages-- })

	d := g.demand(pd, 4, demandAccess)
	pinned := g.mr(pd, g.alloc(4096), 4096, demandAccess)
	pa := uint64(g.alloc(4096))
	set := func(name string, want abi.Status, handle uint32, first uint64, pas ...uint64) {
		t.Helper()
		g.refused(want, abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: handle, Count: uint16(len(pas)), First: first},
			pas...))
	}
	set("read-only", abi.StatusOK, d.handle, 3, pa|abi.MTTReadOnly)
	set("absent, with another flag", abi.StatusOK, d.handle, 3, abi.MTTAbsent|abi.MTTReadOnly)
	set("read-only, not on demand", abi.StatusInvalid, pinned, 0, pa|abi.MTTReadOnly)
	set("unknown mark", abi.StatusInvalid, d.handle, 0, pa|4)
	set("beyond the region", abi.StatusInvalid, d.handle, 4, pa)
	clr := func(want abi.Status, handle uint32, first, count uint64) {
		t.Helper()
		g.refused(want, abi.CmdClearMTT, enc(abi.SizeClearMTT, &abi.ClearMTT{Handle: handle, First: first, Count: count}))
	}
	clr(abi.StatusOK, d.handle, 0, 4)
	clr(abi.StatusOK, d.handle, 4, 0)
	clr(abi.StatusInvalid, d.handle, 0, 5)
	clr(abi.StatusInvalid, d.handle, 1, 1<<64-1)
	clr(abi.StatusNotFound, d.handle^1, 0, 1)
	clr(abi.StatusOK, pinned, 0, 1)

	a := g.attr()
	if a.Caps&abi.CapSetMTTResume == 0 {
		t.Errorf("capabilities %#x", a.Caps)
	}
	all := uint32(abi.ODPSend | abi.ODPRecv | abi.ODPWrite | abi.ODPRead | abi.ODPAtomic | abi.ODPSRQRecv)
	if a.ODPRC != all || a.ODPUC&^all != 0 || a.ODPUD&(abi.ODPSend|abi.ODPRecv) != abi.ODPSend|abi.ODPRecv ||
		a.ODPUD&abi.ODPWrite != 0 {
		t.Errorf("capabilities %#x, %#x, %#x", a.ODPRC, a.ODPUC, a.ODPUD)
	}
}

// A SET_MTT that fails resumes no operation: the fault can still be answered, by SET_MTT
// or by RESUME_FAULT, once (PF-5, PF-8).
func TestFailedSetMTTDoesNotResume(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{MTTs: 1024})
	gb := w.guests[1]
	c := w.crowd(3)
	dq := gb.faultQueue(3)
	events := dq.awaitEvents(3)
	pa, token := uint64(c.d.home), uint64(events[0].Token)
	set := abi.SetMTT{Handle: c.d.handle, Count: 1, Flags: abi.SetMTTResume}
	large := abi.SetMTT{Handle: gb.demand(1, 2000, demandAccess).handle, Count: 1025, Flags: abi.SetMTTResume}
	pas := make([]uint64, large.Count)
	for i := range pas {
		pas[i] = pa
	}
	for _, x := range []struct {
		name  string
		want  abi.Status
		f     func(*abi.SetMTT)
		words []uint64
	}{
		{"no token", abi.StatusInvalid, func(*abi.SetMTT) {}, []uint64{pa}},
		{"token without flag", abi.StatusInvalid, func(s *abi.SetMTT) { s.Flags = 0 }, []uint64{pa, token}},
		{"two tokens", abi.StatusInvalid, func(*abi.SetMTT) {}, []uint64{pa, token, token}},
		{"token of more than 32 bits", abi.StatusInvalid, func(*abi.SetMTT) {}, []uint64{pa, 1<<32 | token}},
		{"unknown flag", abi.StatusUnsupported, func(s *abi.SetMTT) { s.Flags |= 2 }, []uint64{pa, token}},
		{"unknown flag alone", abi.StatusUnsupported, func(s *abi.SetMTT) { s.Flags = 0x8000 }, []uint64{pa}},
		{"no such region", abi.StatusNotFound, func(s *abi.SetMTT) { s.Handle ^= 0x4000 }, []uint64{pa, token}},
		{"beyond the region", abi.StatusInvalid, func(s *abi.SetMTT) { s.First = 3 }, []uint64{pa, token}},
		{"unknown mark", abi.StatusInvalid, func(*abi.SetMTT) {}, []uint64{pa | 4, token}},
		{"not in guest memory", abi.StatusFault, func(*abi.SetMTT) {}, []uint64{1 << 60, token}},
		{"limit", abi.StatusNoMemory, func(s *abi.SetMTT) { *s = large }, append(pas, token)},
	} {
		s := set
		x.f(&s)
		if got, _ := gb.do(abi.CmdSetMTT, enc(abi.SizeSetMTT, &s, x.words...)); got != x.want {
			t.Errorf("%s: %v, want %v", x.name, got, x.want)
		}
		if c.d.present(0) {
			t.Fatalf("%s: the entry is set", x.name)
		}
		w.step(5)
		if f := gb.Describe().Faults; f.Parked != 3 || f.Guest.Waiting != 3 || f.Guest.Resumed+f.Guest.Failed != 0 {
			t.Fatalf("%s: an operation was resumed: %+v", x.name, f)
		}
	}
	for i, e := range events {
		page := int(e.VA-c.d.iova) / 4096
		switch i {
		case 0: // pages and answer in one command
			c.d.setResume(abi.StatusOK, page, 1, uint64(e.Token))
		case 1: // all are present: the answer has no entries
			c.d.set(page, 1, 0)
			c.d.setResume(abi.StatusOK, 0, 0, uint64(e.Token))
		default: // like drivers that know no flags
			c.d.set(page, 1, 0)
			gb.resumeFault(e.Token, abi.StatusOK)
		}
		gb.refused(abi.StatusNotFound, abi.CmdResumeFault, enc(abi.SizeResumeFault, &abi.ResumeFault{Token: e.Token}))
		c.d.setResume(abi.StatusOK, page, 1, uint64(e.Token)) // again: ignored
	}
	for _, a := range c.a {
		if wc := a.scq.await(1)[0]; wc.Status != abi.WCSuccess {
			t.Errorf("%+v", wc)
		}
	}
	// Every resumed operation found its page.
	if f := gb.Describe().Faults; f.Parked != 0 || f.Guest.Resumed != 3 || gb.Stats().Value[abi.StatGuestFaults] != 3 {
		t.Errorf("at the end: %+v", f)
	}
}
