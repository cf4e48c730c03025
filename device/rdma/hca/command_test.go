package hca

import (
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// Every command with an invalid envelope is refused with the right status, and
// nothing changes.
func TestCommandEnvelope(t *testing.T) {
	g := newWorld(t, 1, 1, Limits{}).guests[0]
	req := func(op, reserved uint16, length uint32, payload int) []byte {
		b := make([]byte, 8+payload)
		binary.LittleEndian.PutUint16(b, op)
		binary.LittleEndian.PutUint16(b[2:], reserved)
		binary.LittleEndian.PutUint32(b[4:], length)
		return b
	}
	for _, c := range []struct {
		name string
		req  []byte
		want abi.Status
	}{
		{"empty", nil, abi.StatusInvalid},
		{"header cut short", req(1, 0, 0, 0)[:7], abi.StatusInvalid},
		{"reserved field", req(1, 1, 0, 0), abi.StatusInvalid},
		{"length too large", req(1, 0, 8, 0), abi.StatusInvalid},
		{"length too small", req(8, 0, 0, 8), abi.StatusInvalid},
		{"huge length", req(8, 0, 0xffffffff, 8), abi.StatusInvalid},
		{"opcode 0", req(0, 0, 0, 0), abi.StatusUnsupported},
		{"opcode past the table", req(uint16(len(commandTable)), 0, 0, 0), abi.StatusUnsupported},
		{"opcode 65535", req(65535, 0, 0, 0), abi.StatusUnsupported},
		{"payload too short", req(8, 0, 4, 4), abi.StatusInvalid},
		{"payload with fields of a later release", append(req(8, 0, 16, 15), 1), abi.StatusUnsupported},
		{"payload of a command that has none", append(req(7, 0, 8, 7), 1), abi.StatusUnsupported},
		{"longer payload of a command with a list", req(9, 0, abi.SizeCreateCQ+8, abi.SizeCreateCQ+8), abi.StatusInvalid},
	} {
		if s, r := g.raw(c.req); s != c.want || len(r) != 0 {
			t.Errorf("%s: %v with %d bytes, want %v", c.name, s, len(r), c.want)
		}
	}
	// Fields of a later release that are zero change nothing, in however many bytes (CO-6).
	if s, r := g.raw(req(uint16(abi.CmdCreatePD), 0, 24, 24)); s != abi.StatusOK || len(r) != abi.SizeHandle {
		t.Errorf("longer CREATE_PD: %v with %d bytes", s, len(r))
	} else if s, _ := g.raw(append(append(req(uint16(abi.CmdDestroyPD), 0, 24, 0), r...), make([]byte, 16)...)); s !=
		abi.StatusOK {
		t.Errorf("longer DESTROY_PD: %v", s)
	}
	// A larger response buffer, of a driver that knows more fields: the reply is as long as it is here.
	b := req(uint16(abi.CmdQueryPort), 0, 0, 0)
	if n := g.runHere(b, g.resp[:], abi.SizeResp+abi.SizePortAttr+32); n != abi.SizeResp+abi.SizePortAttr {
		t.Errorf("response of %d bytes", n)
	}
	// A response buffer too small for the reply: refused without effect.
	b = req(uint16(abi.CmdCreatePD), 0, 0, 0)
	if n := g.runHere(b, g.resp[:], abi.SizeResp+4); n != abi.SizeResp {
		t.Errorf("response of %d bytes", n)
	}
	if n := len(g.tables.pds); n != 0 {
		t.Errorf("%d PDs after a refused CREATE_PD", n)
	}
}

// Reserved fields of every payload must be zero.
func TestCommandReserved(t *testing.T) {
	g := newWorld(t, 1, 1, Limits{}).guests[0]
	for _, c := range []struct {
		op   abi.Opcode
		size int
		at   []int
	}{
		{abi.CmdSetGID, abi.SizeSetGID, []int{3, 12}}, {abi.CmdClearGID, abi.SizeClearGID, []int{2, 7}},
		{abi.CmdDestroyPD, abi.SizeHandle, []int{4}}, {abi.CmdCreateCQ, abi.SizeCreateCQ, []int{14, 20, 36}},
		{abi.CmdResizeCQ, abi.SizeResizeCQ, []int{4, 22}}, {abi.CmdCreateSRQ, abi.SizeCreateSRQ, []int{12}},
		{abi.CmdModifySRQ, abi.SizeModifySRQ, []int{12}}, {abi.CmdCreateQP, abi.SizeCreateQP, []int{36, 54}},
		{abi.CmdModifyQP, abi.SizeQPAttr, []int{19, 44, 87}}, {abi.CmdCreateMR, abi.SizeCreateMR, []int{13}},
		{abi.CmdAttachMcast, abi.SizeMcast, []int{4}},
	} {
		for _, at := range c.at {
			b := make([]byte, c.size)
			b[at] = 1
			g.refused(abi.StatusInvalid, c.op, b)
		}
	}
}

// References keep an object alive; counts return to zero.
func TestReferences(t *testing.T) {
	g := newWorld(t, 2, 1, Limits{}).guests[0]
	pd := g.pd()
	cq := g.cq(64)
	r := g.ring(64, 7)
	srq := g.mustHandle(abi.CmdCreateSRQ, enc(abi.SizeCreateSRQ, &abi.CreateSRQ{PDN: pd, MaxSGE: 2, Ring: r.desc},
		r.pas...))
	qp := g.qp(qpSpec{typ: abi.QPTypeUD, pd: pd, flags: abi.QPHasSRQ, srq: srq, scq: cq})
	key := g.mr(pd, g.alloc(4096), 4096, 1)
	group := abi.Mcast{QPN: qp.n, GID: [16]byte{0: 0xff, 1: 2, 15: 1}}
	g.must(abi.CmdAttachMcast, enc(abi.SizeMcast, &group))
	g.must(abi.CmdAttachMcast, enc(abi.SizeMcast, &group)) // again: no second membership

	g.refused(abi.StatusBusy, abi.CmdDestroyPD, handle(pd))
	g.refused(abi.StatusBusy, abi.CmdDestroyCQ, handle(cq.n))
	g.refused(abi.StatusBusy, abi.CmdDestroySRQ, handle(srq))
	g.refused(abi.StatusBusy, abi.CmdDestroyQP, handle(qp.n))
	g.must(abi.CmdDetachMcast, enc(abi.SizeMcast, &group))
	g.refused(abi.StatusNotFound, abi.CmdDetachMcast, enc(abi.SizeMcast, &group))
	g.must(abi.CmdDestroyQP, handle(qp.n))
	g.refused(abi.StatusNotFound, abi.CmdDestroyQP, handle(qp.n))
	g.must(abi.CmdDestroyCQ, handle(cq.n))
	g.refused(abi.StatusBusy, abi.CmdDestroyPD, handle(pd))
	g.must(abi.CmdDestroySRQ, handle(srq))
	g.refused(abi.StatusBusy, abi.CmdDestroyPD, handle(pd))
	g.must(abi.CmdDestroyMR, handle(key))
	g.refused(abi.StatusNotFound, abi.CmdDestroyMR, handle(key))
	g.must(abi.CmdDestroyPD, handle(pd))
	g.refused(abi.StatusNotFound, abi.CmdDestroyPD, handle(pd))
}

// Limits hold, and refused objects are not counted: after one object is destroyed, one
// more fits.
func TestLimits(t *testing.T) {
	g := newWorld(t, 1, 1, Limits{QPs: 3, CQs: 2, PDs: 2, SRQs: 1, MRs: 2, MTTs: 8, QPWRs: 64, CQEs: 64, SGEs: 4,
		Inline: 64, SRQWRs: 64, McastGroups: 1, McastMembers: 1, AHs: 64, GIDs: 2}).guests[0]
	pd := g.pd()
	pd2 := g.pd()
	g.refused(abi.StatusNoMemory, abi.CmdCreatePD, nil)
	g.must(abi.CmdDestroyPD, handle(pd2))
	g.pd()

	cq := g.cq(64)
	g.cq(64)
	r := g.ring(64, 6)
	g.refused(abi.StatusNoMemory, abi.CmdCreateCQ, enc(abi.SizeCreateCQ,
		&abi.CreateCQ{Ring: r.desc, ArmPA: uint64(memBase)}, r.pas...))
	r = g.ring(128, 6)
	g.refused(abi.StatusNoMemory, abi.CmdResizeCQ, enc(abi.SizeResizeCQ, &abi.ResizeCQ{CQN: cq.n, Ring: r.desc}, r.pas...))

	var qps []*tqp
	for range 3 {
		qps = append(qps, g.qp(qpSpec{typ: abi.QPTypeUD, pd: pd, scq: cq}))
	}
	_, _, req := g.qpRequest(&qpSpec{pd: pd, scq: cq})
	g.refused(abi.StatusNoMemory, abi.CmdCreateQP, req)
	old := qps[0].n
	g.must(abi.CmdDestroyQP, handle(old))
	q := g.qp(qpSpec{pd: pd, scq: cq})
	if q.n == old || q.slot != qps[0].slot {
		t.Errorf("QP number %#x in slot %d after %#x was destroyed: want its index, %d, a new number", q.n, q.slot,
			old, qps[0].slot)
	}
	for _, mod := range []func(r *abi.CreateQP){
		func(r *abi.CreateQP) { r.MaxSendSGE = 5 }, func(r *abi.CreateQP) { r.MaxRecvSGE = 5 },
		func(r *abi.CreateQP) { r.MaxInline = 65 },
	} {
		g.must(abi.CmdDestroyQP, handle(q.n))
		_, r, _ := g.qpRequest(&qpSpec{pd: pd, scq: cq})
		mod(&r)
		b := enc(abi.SizeCreateQP, &r, make([]uint64, r.SQ.NPages+r.RQ.NPages)...)
		g.refused(abi.StatusNoMemory, abi.CmdCreateQP, b)
		q = g.qp(qpSpec{pd: pd, scq: cq})
	}

	gid := [16]byte{0: 0xff, 1: 2}
	g.must(abi.CmdAttachMcast, enc(abi.SizeMcast, &abi.Mcast{QPN: qps[1].n, GID: gid}))
	g.refused(abi.StatusNoMemory, abi.CmdAttachMcast, enc(abi.SizeMcast, &abi.Mcast{QPN: qps[2].n, GID: gid}))
	gid[15] = 9
	g.refused(abi.StatusNoMemory, abi.CmdAttachMcast, enc(abi.SizeMcast, &abi.Mcast{QPN: qps[2].n, GID: gid}))

	g.refused(abi.StatusInvalid, abi.CmdSetGID, enc(abi.SizeSetGID,
		&abi.SetGID{Index: 2, Type: 2, VLANID: abi.NoVLAN, SMAC: g.cfg.MAC, GID: g.gid()}))
	g.refused(abi.StatusNoMemory, abi.CmdSetAHTable, enc(abi.SizeSetAHTable, &abi.SetAHTable{NumEntries: 65, NPages: 2}, 0,
		0))
	mr := abi.CreateMR{PDN: pd, PageShift: 12, Length: 9 * 4096, NPages: 9}
	g.refused(abi.StatusNoMemory, abi.CmdCreateMR, enc(abi.SizeCreateMR, &mr))
}

// QP numbers cannot be predicted (TR-3, TR-4), a number that differs in any bit finds no QP, and doorbell slots stay
// dense.
func TestQPNumbersAreRandom(t *testing.T) {
	const n = 64
	w := newWorld(t, 1, 2, Limits{QPs: n})
	var nums [2][n]uint32
	for i := range nums {
		g := w.guests[i]
		pd, cq := g.pd(), g.cq(64)
		for k := range nums[i] {
			q := g.qp(qpSpec{typ: abi.QPTypeUC, pd: pd, scq: cq, elems: 2})
			if q.slot != uint32(firstQPIndex+k) || q.n <= gsiQPN || q.n >= mcastQPN {
				t.Fatalf("QP %#x in slot %d", q.n, q.slot)
			}
			nums[i][k] = q.n
		}
		for _, qpn := range nums[i] {
			for bit := range 24 {
				if x := qpn ^ 1<<bit; g.qpFor(x) != nil && !slices.Contains(nums[i][:], x) {
					t.Errorf("QP %#x is found by %#x", qpn, x)
				}
			}
		}
	}
	// With random numbers each of these fails less often than once in 10^12 runs.
	same, steps := 0, map[uint32]bool{}
	for k := range n {
		if nums[0][k] == nums[1][k] {
			same++
		}
		if k > 0 {
			steps[nums[0][k]-nums[0][k-1]] = true
		}
	}
	if same > 2 || len(steps) < n-8 {
		t.Errorf("%d of %d numbers are the same in another VM; %d different steps between them", same, n, len(steps))
	}
	or, and := uint32(0), uint32(mcastQPN)
	for _, x := range append(nums[0][:], nums[1][:]...) {
		or, and = or|x, and&x
	}
	if or != mcastQPN || and != 0 {
		t.Errorf("bits %#x are never set, bits %#x always", mcastQPN&^or, and)
	}
}

// The ring description of a command is checked in full.
func TestRingChecks(t *testing.T) {
	g := newWorld(t, 1, 1, Limits{}).guests[0]
	good := g.ring(64, 6)
	arm := uint64(g.alloc(4))
	try := func(name string, want abi.Status, mod func(r *abi.CreateCQ, pas []uint64) []uint64) {
		t.Helper()
		r := abi.CreateCQ{Ring: good.desc, ArmPA: arm}
		pas := mod(&r, append([]uint64(nil), good.pas...))
		if s, _ := g.do(abi.CmdCreateCQ, enc(abi.SizeCreateCQ, &r, pas...)); s != want {
			t.Errorf("%s: %v, want %v", name, s, want)
		}
	}
	keep := func(f func(r *abi.CreateCQ)) func(r *abi.CreateCQ, pas []uint64) []uint64 {
		return func(r *abi.CreateCQ, pas []uint64) []uint64 { f(r); return pas }
	}
	try("good", abi.StatusOK, keep(func(*abi.CreateCQ) {}))
	try("no pages", abi.StatusInvalid, func(r *abi.CreateCQ, pas []uint64) []uint64 { r.Ring.NPages = 0; return nil })
	try("npages without list", abi.StatusInvalid, func(r *abi.CreateCQ, pas []uint64) []uint64 { return nil })
	try("huge npages", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.Ring.NPages = 0xffffffff }))
	try("page shift 11", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.Ring.PageShift = 11 }))
	try("page shift 31", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.Ring.PageShift = 31 }))
	try("page shift 255", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.Ring.PageShift = 255 }))
	try("element 32 bytes", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.Ring.Log2ElemSize = 5 }))
	try("element 128 KiB", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.Ring.Log2ElemSize = 17 }))
	try("element size 255", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.Ring.Log2ElemSize = 255 }))
	try("63 elements", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.Ring.NumElems = 63 }))
	try("0 elements", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.Ring.NumElems = 0 }))
	try("1 element", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.Ring.NumElems = 1 }))
	try("2^31 elements", abi.StatusNoMemory, keep(func(r *abi.CreateCQ) { r.Ring.NumElems = 1 << 31 }))
	try("too short", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.Ring.Length-- }))
	try("longer than its pages", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.Ring.Length = 1 << 40 }))
	try("length wraps", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.Ring.Length = 1<<64 - 1 }))
	try("a page too many", abi.StatusInvalid, func(r *abi.CreateCQ, pas []uint64) []uint64 {
		r.Ring.NPages++
		return append(pas, pas[0])
	})
	try("page misaligned", abi.StatusInvalid, func(r *abi.CreateCQ, pas []uint64) []uint64 { pas[0] += 8; return pas })
	try("page outside memory", abi.StatusFault, func(r *abi.CreateCQ, pas []uint64) []uint64 {
		pas[0] = 0x1000
		return pas
	})
	try("page far outside", abi.StatusFault, func(r *abi.CreateCQ, pas []uint64) []uint64 {
		pas[1] = 1<<63 + 4096
		return pas
	})
	try("arm word misaligned", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.ArmPA += 2 }))
	try("arm word outside", abi.StatusFault, keep(func(r *abi.CreateCQ) { r.ArmPA = 64 }))
	try("no such event queue", abi.StatusInvalid, keep(func(r *abi.CreateCQ) { r.CEQ = 1 }))
}

// Queue pairs: inconsistent requests are refused.
func TestQPChecks(t *testing.T) {
	g := newWorld(t, 1, 1, Limits{}).guests[0]
	pd := g.pd()
	cq := g.cq(64)
	try := func(name string, want abi.Status, spec qpSpec, mod func(r *abi.CreateQP)) {
		t.Helper()
		spec.pd, spec.scq = pd, cq
		q, r, _ := g.qpRequest(&spec)
		mod(&r)
		pas := append([]uint64(nil), q.sq.pas...)
		if r.RQ.NPages > 0 {
			pas = append(pas, q.rq.pas...)
		}
		if s, _ := g.do(abi.CmdCreateQP, enc(abi.SizeCreateQP, &r, pas...)); s != want {
			t.Errorf("%s: %v, want %v", name, s, want)
		}
	}
	try("type 0", abi.StatusUnsupported, qpSpec{}, func(r *abi.CreateQP) { r.Type = 0 })
	try("type XRC", abi.StatusUnsupported, qpSpec{}, func(r *abi.CreateQP) { r.Type = 9 })
	try("unknown flag", abi.StatusInvalid, qpSpec{}, func(r *abi.CreateQP) { r.Flags = 8 })
	try("no such PD", abi.StatusNotFound, qpSpec{}, func(r *abi.CreateQP) { r.PDN = 77 })
	try("no such CQ", abi.StatusNotFound, qpSpec{}, func(r *abi.CreateQP) { r.RecvCQN = 77 })
	try("no such SRQ", abi.StatusNotFound, qpSpec{flags: abi.QPHasSRQ, srq: 77}, func(r *abi.CreateQP) {})
	try("srqn without flag", abi.StatusInvalid, qpSpec{}, func(r *abi.CreateQP) { r.SRQN = 1 })
	try("no send ring", abi.StatusInvalid, qpSpec{}, func(r *abi.CreateQP) { r.SQ.NPages = 0 })
	try("send elements too small", abi.StatusInvalid, qpSpec{}, func(r *abi.CreateQP) { r.MaxSendSGE = 20 })
	try("receive elements too small", abi.StatusInvalid, qpSpec{}, func(r *abi.CreateQP) { r.MaxRecvSGE = 20 })
	try("GSI", abi.StatusOK, qpSpec{typ: abi.QPTypeGSI}, func(r *abi.CreateQP) {})
	try("a second GSI", abi.StatusBusy, qpSpec{typ: abi.QPTypeGSI}, func(r *abi.CreateQP) {})
	if q := g.qpFor(gsiQPN); q == nil || q.n != 1 || q.index != 1 {
		t.Errorf("the GSI QP is %+v", q)
	}

	q := g.qp(qpSpec{pd: pd, scq: cq})
	mod := func(name string, want abi.Status, a abi.QPAttr) {
		t.Helper()
		a.QPN = q.n
		if s, _ := g.do(abi.CmdModifyQP, enc(abi.SizeQPAttr, &a)); s != want {
			t.Errorf("%s: %v, want %v", name, s, want)
		}
	}
	init := uint32(abi.QPAttrState | abi.QPAttrPKeyIndex | abi.QPAttrPort | abi.QPAttrAccessFlags)
	mod("port 2", abi.StatusInvalid, abi.QPAttr{AttrMask: init, QPState: abi.QPInit, PortNum: 2})
	mod("pkey 1", abi.StatusInvalid, abi.QPAttr{AttrMask: init, QPState: abi.QPInit, PortNum: 1, PKeyIndex: 1})
	mod("alternate path", abi.StatusUnsupported, abi.QPAttr{AttrMask: init | abi.QPAttrAltPath, QPState: abi.QPInit,
		PortNum: 1})
	mod("unknown bit", abi.StatusUnsupported, abi.QPAttr{AttrMask: init | 1<<30, QPState: abi.QPInit, PortNum: 1})
	mod("state 200", abi.StatusInvalid, abi.QPAttr{AttrMask: init, QPState: 200, PortNum: 1})
	mod("to RTS", abi.StatusInvalid, abi.QPAttr{AttrMask: abi.QPAttrState, QPState: abi.QPRTS})
	mod("to INIT", abi.StatusOK, abi.QPAttr{AttrMask: init, QPState: abi.QPInit, PortNum: 1})
	rtr := uint32(abi.QPAttrState | abi.QPAttrAV | abi.QPAttrPathMTU | abi.QPAttrDestQPN | abi.QPAttrRQPSN |
		abi.QPAttrMaxDestRdAtomic | abi.QPAttrMinRNRTimer)
	av := func(f func(*abi.AV)) abi.QPAttr {
		a := abi.QPAttr{AttrMask: rtr, QPState: abi.QPRTR, PathMTU: 1, DestQPN: 2, AV: g.av()}
		f(&a.AV)
		return a
	}
	mod("unset GID", abi.StatusInvalid, av(func(a *abi.AV) { a.SGIDIndex = 3 }))
	mod("GID index past the table", abi.StatusInvalid, av(func(a *abi.AV) { a.SGIDIndex = 65535 }))
	mod("another VLAN", abi.StatusInvalid, av(func(a *abi.AV) { a.VLANID = 5 }))
	mod("no dmac", abi.StatusInvalid, av(func(a *abi.AV) { a.DMAC = [6]byte{} }))
	mod("no dgid", abi.StatusInvalid, av(func(a *abi.AV) { a.DGID = [16]byte{} }))
	mod("IPv6 from an IPv4 GID", abi.StatusInvalid, av(func(a *abi.AV) { a.DGID = [16]byte{0: 0xfe, 1: 0x80, 15: 1} }))
	mod("flow label", abi.StatusInvalid, av(func(a *abi.AV) { a.FlowLabel = 1 << 20 }))
	mod("MTU above the port's", abi.StatusInvalid,
		func() abi.QPAttr { a := av(func(*abi.AV) {}); a.PathMTU = 6; return a }())
	mod("to RTR", abi.StatusOK, av(func(*abi.AV) {}))
}

// A sender cannot choose its own identity.
func TestGIDChecks(t *testing.T) {
	g := newWorld(t, 1, 1, Limits{}).guests[0]
	good := abi.SetGID{Index: 1, Type: abi.GIDRoCEv1, VLANID: 7, SMAC: g.cfg.MAC, GID: [16]byte{0: 0xfe, 1: 0x80, 15: 1}}
	try := func(want abi.Status, mod func(*abi.SetGID)) {
		t.Helper()
		r := good
		mod(&r)
		g.refused(want, abi.CmdSetGID, enc(abi.SizeSetGID, &r))
	}
	try(abi.StatusOK, func(*abi.SetGID) {})
	try(abi.StatusPermission, func(r *abi.SetGID) { r.SMAC[5]++ })
	try(abi.StatusInvalid, func(r *abi.SetGID) { r.Type = 3 })
	try(abi.StatusInvalid, func(r *abi.SetGID) { r.VLANID = 4095 })
	try(abi.StatusInvalid, func(r *abi.SetGID) { r.VLANID = 0 })
	try(abi.StatusInvalid, func(r *abi.SetGID) { r.GID = [16]byte{} })
	try(abi.StatusInvalid, func(r *abi.SetGID) { r.GID = [16]byte{0: 0xff} })
	try(abi.StatusInvalid, func(r *abi.SetGID) { r.GID = [16]byte{10: 0xff, 11: 0xff, 12: 239, 15: 1} })
	if !g.gids.has(&good.GID, true, 7) || g.gids.has(&good.GID, false, 7) || g.gids.has(&good.GID, true, abi.NoVLAN) {
		t.Error("a GID must match in version and VLAN too")
	}
	g.must(abi.CmdClearGID, enc(abi.SizeClearGID, &abi.ClearGID{Index: 1}))
	if g.gids.has(&good.GID, true, 7) {
		t.Error("a cleared GID still matches")
	}
}

// Doorbell areas and the AH table.
func TestTableChecks(t *testing.T) {
	g := newWorld(t, 1, 1, Limits{}).guests[0]
	pa := uint64(g.alloc(abi.DoorbellSize))
	db := func(want abi.Status, mod func(*abi.SetDoorbells)) {
		t.Helper()
		r := abi.SetDoorbells{NPages: 3, PA: [3]uint64{pa, pa + 4096, pa + 8192}}
		mod(&r)
		g.refused(want, abi.CmdSetDoorbells, enc(abi.SizeSetDoorbells, &r))
	}
	db(abi.StatusOK, func(*abi.SetDoorbells) {})
	db(abi.StatusInvalid, func(r *abi.SetDoorbells) { r.Engine = 1 })
	db(abi.StatusInvalid, func(r *abi.SetDoorbells) { r.NPages = 2 })
	db(abi.StatusInvalid, func(r *abi.SetDoorbells) { r.PA[1]++ })
	db(abi.StatusFault, func(r *abi.SetDoorbells) { r.PA[2] = 4096 })
	g.qp(qpSpec{pd: g.pd()})
	db(abi.StatusBusy, func(*abi.SetDoorbells) {})

	ah := func(want abi.Status, n, pages uint32, pas ...uint64) {
		t.Helper()
		g.refused(want, abi.CmdSetAHTable, enc(abi.SizeSetAHTable, &abi.SetAHTable{NumEntries: n, NPages: pages}, pas...))
	}
	ah(abi.StatusInvalid, 0, 0)
	ah(abi.StatusInvalid, 65, 1, pa)
	ah(abi.StatusInvalid, 64, 2, pa, pa)
	ah(abi.StatusInvalid, 64, 2, pa)
	ah(abi.StatusFault, 64, 1, 4096)
	ah(abi.StatusOK, 64, 1, pa)
	ah(abi.StatusBusy, 64, 1, pa)
}

// fuzzGuest issues random commands, most of them nearly right.
type fuzzGuest struct {
	*guest
	r    *rand.Rand
	ring tring
}

func (f *fuzzGuest) step() {
	r, tb := f.r, &f.tables
	// Handles, mostly of existing objects.
	pd, cq, srq, qp := f.pick(keys(tb.pds)), f.pick(keys(tb.cqs)), f.pick(keys(tb.srqs)), f.pick(keys(tb.qpList))
	op := abi.Opcode(r.UintN(uint(len(commandTable) + 1)))
	if len(tb.qpList) == 0 || r.IntN(4) == 0 { // QPs and the objects that they need
		op = []abi.Opcode{abi.CmdCreatePD, abi.CmdCreateCQ, abi.CmdCreateSRQ, abi.CmdCreateQP, abi.CmdModifyQP}[r.IntN(5)]
	}
	b := make([]byte, r.IntN(128))
	for i := range b {
		if r.IntN(4) == 0 {
			b[i] = byte(r.Uint32())
		}
	}
	ring := f.ring.desc
	pas := f.ring.pas
	if r.IntN(4) == 0 {
		ring.NumElems = 1 << r.UintN(32)
		ring.Length = r.Uint64() >> r.UintN(64)
		ring.NPages = r.Uint32N(4)
		ring.Log2ElemSize = uint8(r.UintN(20))
		pas = []uint64{r.Uint64(), f.ring.pas[0], r.Uint64N(1<<32) &^ 4095, 0}[:ring.NPages]
	}
	switch op {
	case abi.CmdDestroyPD:
		b = handle(pd)
	case abi.CmdDestroyCQ:
		b = handle(cq)
	case abi.CmdDestroySRQ, abi.CmdQuerySRQ:
		b = handle(srq)
	case abi.CmdDestroyQP, abi.CmdQueryQP:
		b = handle(qp)
	case abi.CmdDestroyMR:
		b = handle(f.pick(keys(tb.mrs)))
	case abi.CmdCreatePD, abi.CmdQueryStats, abi.CmdQueryDevice, abi.CmdQueryPort:
		b = nil
	case abi.CmdCreateCQ:
		b = enc(abi.SizeCreateCQ, &abi.CreateCQ{Ring: ring, ArmPA: uint64(f.ring.base) + r.Uint64N(16)}, pas...)
	case abi.CmdResizeCQ:
		b = enc(abi.SizeResizeCQ, &abi.ResizeCQ{CQN: cq, Ring: ring}, pas...)
	case abi.CmdCreateSRQ:
		b = enc(abi.SizeCreateSRQ, &abi.CreateSRQ{PDN: pd, MaxSGE: r.Uint32N(40), Limit: r.Uint32N(20), Ring: ring}, pas...)
	case abi.CmdModifySRQ:
		b = enc(abi.SizeModifySRQ, &abi.ModifySRQ{SRQN: srq, Flags: r.Uint32N(5), Limit: r.Uint32N(20), Ring: ring}, pas...)
	case abi.CmdCreateQP:
		q := abi.CreateQP{Type: r.Uint32N(6), Flags: r.Uint32N(10), PDN: pd, SendCQN: cq, RecvCQN: cq,
			MaxSendSGE: r.Uint32N(34), MaxRecvSGE: r.Uint32N(34), MaxInline: r.Uint32N(600), SQ: ring, RQ: ring}
		if q.Flags&abi.QPHasSRQ != 0 {
			q.SRQN, q.RQ = srq, abi.Ring{}
			b = enc(abi.SizeCreateQP, &q, pas...)
		} else {
			b = enc(abi.SizeCreateQP, &q, append(append([]uint64(nil), pas...), pas...)...)
		}
	case abi.CmdModifyQP:
		a := abi.QPAttr{QPN: qp, AttrMask: r.Uint32N(1 << 21), QPState: uint8(r.UintN(8)), PathMTU: uint8(r.UintN(7)),
			PortNum: 1, MaxRdAtomic: uint8(r.UintN(20)), MaxDestRdAtomic: uint8(r.UintN(20)), DestQPN: qp, AV: f.av()}
		if tb.qpList[qp] != nil {
			var at abi.QPAttr
			_ = at.Decode(f.must(abi.CmdQueryQP, handle(qp)))
			switch r.IntN(4) {
			case 0, 1: // the next state, with the attributes of all transitions
				a.QPState = at.QPState + 1
				a.AttrMask = []uint32{0x39, 0x1a1181, 0x12e01, 1, 1, 1, 1}[at.QPState%7]
			case 2:
				a.QPState, a.AttrMask = []uint8{abi.QPReset, abi.QPErr}[r.IntN(2)], abi.QPAttrState
			}
		}
		b = enc(abi.SizeQPAttr, &a)
	case abi.CmdModifyCQ:
		b = enc(abi.SizeModifyCQ, &abi.ModifyCQ{CQN: cq, Count: uint16(r.UintN(5)), Period: uint16(r.UintN(3) * 100)})
	case abi.CmdCountQP:
		b = enc(abi.SizeCountQP, &abi.CountQP{QPN: qp, Flags: r.Uint32N(3)})
	case abi.CmdCreateMR:
		b = enc(abi.SizeCreateMR, &abi.CreateMR{PDN: pd, Access: r.Uint32N(32), Flags: r.Uint32N(3),
			PageShift: uint8(11 + r.UintN(4)), IOVA: r.Uint64(), Length: r.Uint64N(1 << 16), NPages: r.Uint64N(32)})
	case abi.CmdSetMTT:
		n := r.Uint32N(4)
		words := make([]uint64, n, n+1)
		flags := uint16(0)
		if r.IntN(2) == 0 {
			flags = uint16(r.UintN(3))
			words = append(words, r.Uint64()>>r.UintN(64))
		}
		b = enc(abi.SizeSetMTT, &abi.SetMTT{Handle: f.pick(keys(tb.mrs)), Count: uint16(n), Flags: flags,
			First: r.Uint64() >> r.UintN(64)}, words...)
	case abi.CmdAttachMcast, abi.CmdDetachMcast:
		b = enc(abi.SizeMcast, &abi.Mcast{QPN: qp, GID: [16]byte{0: 0xff, 15: byte(r.UintN(3))}})
	}
	if r.IntN(16) == 0 && len(b) > 0 {
		b = b[:r.IntN(len(b))]
	}
	f.do(op, b)
}

// pick returns one of them, or a random number.
func (f *fuzzGuest) pick(of []uint32) uint32 {
	if len(of) == 0 || f.r.IntN(16) == 0 {
		return f.r.Uint32() >> f.r.UintN(32)
	}
	return of[f.r.IntN(len(of))]
}

// keys returns the keys of m in order, so that a seed always gives the same run.
func keys[V any](m map[uint32]V) []uint32 { return slices.Sorted(maps.Keys(m)) }

// check compares the tables with fresh counts.
func (f *fuzzGuest) check(t testing.TB) {
	t.Helper()
	tb := &f.tables
	pds, cqs, srqs, engines := map[uint32]int{}, map[uint32]int{}, map[uint32]int{}, map[*engine]int{}
	for n, o := range tb.qpList {
		q := o.q
		if f.qpFor(n) != q {
			t.Fatalf("QP %#x is not in the table of the loops", n)
		}
		pds[uint32(q.pd)]++
		cqs[q.scq.n]++
		cqs[q.rcq.n]++
		if q.srq != nil {
			srqs[q.srq.n]++
		}
		engines[q.engine]++
	}
	for _, p := range tb.mrs {
		pds[p]++
	}
	for n, s := range tb.srqs {
		pds[s.pdn]++
		if s.refs != srqs[n] {
			t.Fatalf("SRQ %d: %d references, %d users", n, s.refs, srqs[n])
		}
	}
	for n, c := range tb.cqs {
		if c.refs != cqs[n] || (c.owner == nil) != (c.refs == 0) {
			t.Fatalf("CQ %d: %d references, %d users, owner %v", n, c.refs, cqs[n], c.owner)
		}
	}
	for n, p := range tb.pds {
		if p.refs != pds[n] {
			t.Fatalf("PD %d: %d references, %d users", n, p.refs, pds[n])
		}
	}
	for _, e := range f.engines {
		if e.qps != engines[e] {
			t.Fatalf("engine %d: %d QPs counted, %d exist", e.id, e.qps, engines[e])
		}
	}
	if r, _ := f.vm.Usage(); r != len(tb.mrs) {
		t.Fatalf("%d regions, %d in mrs", r, len(tb.mrs))
	}
}

func runFuzzCommands(t testing.TB, seed uint64, steps int) {
	g := newWorld(t, 2, 1, Limits{QPs: 6, CQs: 4, PDs: 4, SRQs: 3, MRs: 4}).guests[0]
	f := &fuzzGuest{guest: g, r: rand.New(rand.NewPCG(seed, 1)), ring: g.ring(16, 10)}
	for i := range steps {
		f.step()
		if i%16 == 0 {
			f.check(t)
			// The rings hold random data, and doorbells ring.
			f.ring.prod().Store(f.r.Uint32())
			if f.r.IntN(4) > 0 {
				f.ring.prod().Store(f.ring.cons().Load() + f.r.Uint32N(8))
			}
			for at := range uint32(16) {
				e := f.ring.elem(at)
				for i := range e {
					if f.r.IntN(8) == 0 {
						e[i] = byte(f.r.Uint32())
					}
				}
				binary.LittleEndian.PutUint32(e[abi.SendWQEOpcodeOff:], f.r.Uint32N(20))
				binary.LittleEndian.PutUint32(e[abi.SendWQENumSGEOff:], f.r.Uint32N(3))
			}
			for l := range g.engines {
				for slot := range uint32(8) {
					(&tqp{g: g, engine: uint32(l), slot: slot}).bell()
				}
			}
			g.w.step(1 + f.r.IntN(8))
			g.w.clock.Advance(time.Duration(f.r.IntN(int(50 * time.Millisecond))))
		}
	}
	f.check(t)
	g.Reset()
	f.check(t)
}

// Random commands never break the tables.
func TestCommandsRandom(t *testing.T) {
	movesNoData(t)
	for seed := range uint64(30) {
		runFuzzCommands(t, seed, 600)
	}
}

func FuzzCommands(f *testing.F) {
	f.Add(uint64(1))
	f.Fuzz(func(t *testing.T, seed uint64) { runFuzzCommands(t, seed, 200) })
}

// FuzzRequest feeds arbitrary bytes.
func FuzzRequest(f *testing.F) {
	w := newWorld(f, 1, 1, Limits{QPs: 6, CQs: 4, PDs: 4, SRQs: 3, MRs: 4, MTTs: 1024})
	g := w.guests[0]
	f.Add([]byte{7, 0, 0, 0, 0, 0, 0, 0})
	r := g.ring(16, 6)
	b := append([]byte{9, 0, 0, 0, byte(abi.SizeCreateCQ + 8*len(r.pas)), 0, 0, 0},
		enc(abi.SizeCreateCQ, &abi.CreateCQ{Ring: r.desc, ArmPA: uint64(r.base)}, r.pas...)...)
	f.Add(b)
	f.Fuzz(func(t *testing.T, req []byte) { g.raw(req) })
}
