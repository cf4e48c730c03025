package hca

import (
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// What CREATE_MR, SET_MTT, CLEAR_MTT and RESUME_FAULT refuse, and with what.
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
	mr("as it should be", abi.StatusOK, func(*abi.CreateMR) {})
	mr("offset in the first page", abi.StatusOK, func(r *abi.CreateMR) {
		r.IOVA, r.Offset, r.Length = 0x10010, 0x10, 8192-0x10
	})
	mr("larger than the quota, as nothing is there", abi.StatusOK,
		func(r *abi.CreateMR) { r.Length, r.NPages = 1<<40, 1<<28 })
	mr("large pages", abi.StatusInvalid, func(r *abi.CreateMR) { r.PageShift, r.NPages = 21, 1 })
	mr("physical, too", abi.StatusInvalid, func(r *abi.CreateMR) { r.Flags |= abi.MRPhys })
	mr("access says on demand, flags do not", abi.StatusInvalid, func(r *abi.CreateMR) { r.Flags = 0 })
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
	mr("implicit, not from 0 on", abi.StatusInvalid, func(r *abi.CreateMR) { implicit(r); r.IOVA = 4096 })
	mr("implicit, pages and length differ", abi.StatusInvalid, func(r *abi.CreateMR) { implicit(r); r.NPages-- })

	d := g.demand(pd, 4, demandAccess)
	pinned := g.mr(pd, g.alloc(4096), 4096, demandAccess)
	pa := uint64(g.alloc(4096))
	set := func(name string, want abi.Status, handle uint32, first uint64, pas ...uint64) {
		t.Helper()
		g.refused(want, abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: handle, Count: uint32(len(pas)), First: first},
			pas...))
	}
	set("read-only", abi.StatusOK, d.handle, 3, pa|abi.MTTReadOnly)
	set("absent, and whatever else", abi.StatusOK, d.handle, 3, abi.MTTAbsent|abi.MTTReadOnly)
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
	all := uint32(abi.ODPSend | abi.ODPRecv | abi.ODPWrite | abi.ODPRead | abi.ODPAtomic | abi.ODPSRQRecv)
	if a.ODPRC != all || a.ODPUC&^all != 0 || a.ODPUD&(abi.ODPSend|abi.ODPRecv) != abi.ODPSend|abi.ODPRecv ||
		a.ODPUD&abi.ODPWrite != 0 {
		t.Errorf("capabilities %#x, %#x, %#x", a.ODPRC, a.ODPUC, a.ODPUD)
	}
}
