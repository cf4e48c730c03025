package hca

import (
	"bytes"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/translate"
)

// ahs is the guest's address handle table.
type ahs struct {
	g    *guest
	base translate.PA
}

func (g *guest) ahTable() ahs {
	g.tb.Helper()
	pa := g.alloc(4096)
	g.must(abi.CmdSetAHTable, enc(abi.SizeSetAHTable, &abi.SetAHTable{NumEntries: 64, NPages: 1}, uint64(pa)))
	return ahs{g: g, base: pa}
}

func (a ahs) set(i uint32, ah abi.AH) { ah.Encode(a.g.at(a.base+translate.PA(64*i), 64)) }

// to returns a valid handle for peer.
func to(peer *guest, pd uint32) abi.AH {
	v := peer.av()
	return abi.AH{Valid: 1, PDN: pd, DGID: v.DGID, DMAC: v.DMAC, VLANID: v.VLANID, HopLimit: 64}
}

func (q *tqp) sendUD(id uint64, qpn, ah uint32, sgl ...abi.SGE) {
	s := q.wqe()
	s.SetRequest(id, abi.WRSend, abi.SendSignaled)
	s.SetUD(qpn, 0x1234, ah)
	s.SetSGEs(sgl)
	q.post()
}

// A datagram arrives behind 40 bytes of header; the GSI QP is number 1.
func TestUD(t *testing.T) {
	w := newWorld(t, 2, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	table := ga.ahTable()
	for _, typ := range []uint32{abi.QPTypeUD, abi.QPTypeGSI} {
		pa, pb := ga.pd(), gb.pd()
		a, b := ga.qp(qpSpec{typ: typ, pd: pa}), gb.qp(qpSpec{typ: typ, pd: pb})
		qkey := uint32(0x1234)
		if typ == abi.QPTypeGSI {
			qkey = 0x80010000
			if a.n != 1 || b.n != 1 {
				t.Fatalf("GSI QPs %d and %d", a.n, b.n)
			}
		}
		a.connectUD(qkey)
		b.connectUD(qkey)
		table.set(5, to(gb, pa))
		src, dst := ga.alloc(4096), gb.alloc(4096)
		ka, kb := ga.mr(pa, src, 4096, 1), gb.mr(pb, dst, 4096, 1)
		fill(ga.at(src, 4096), 3)
		b.recv(9, abi.SGE{Addr: uint64(dst), Length: 1040, LKey: kb})
		s := a.wqe()
		s.SetRequest(8, abi.WRSend, abi.SendSignaled)
		s.SetUD(b.n, qkey, 5)
		s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 1000, LKey: ka}})
		a.post()
		if wc := a.scq.await(1)[0]; wc.Status != abi.WCSuccess {
			t.Fatalf("send: %+v", wc)
		}
		wc := b.rcq.await(1)[0]
		if wc.ID != 9 || wc.Status != 0 || wc.ByteLen != 1040 || wc.SrcQP != a.n || wc.Flags != abi.WCFlagGRH {
			t.Fatalf("receive: %+v", wc)
		}
		if !bytes.Equal(ga.at(src, 1000), gb.at(dst+40, 1000)) {
			t.Fatal("data differ")
		}
		// The IPv4 header is the last 20 of the 40 bytes.
		if h := gb.at(dst+20, 20); h[0] != 0x45 || !bytes.Equal(h[12:16], []byte{10, 0, 0, 1}) ||
			!bytes.Equal(h[16:20], []byte{10, 0, 0, 2}) {
			t.Errorf("header area % x", h)
		}
	}
}

// An address handle is used only if it is valid and belongs to the QP's PD.
func TestBadAH(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	g := w.guests[0]
	pd, other := g.pd(), g.pd()
	table := g.ahTable()
	bad := map[string]abi.AH{}
	mod := func(name string, f func(*abi.AH)) {
		ah := to(w.guests[1], pd)
		f(&ah)
		bad[name] = ah
	}
	mod("not valid", func(a *abi.AH) { a.Valid = 0 })
	mod("valid is 2", func(a *abi.AH) { a.Valid = 2 })
	mod("another PD", func(a *abi.AH) { a.PDN = other })
	mod("unset GID", func(a *abi.AH) { a.SGIDIndex = 1 })
	mod("GID index", func(a *abi.AH) { a.SGIDIndex = 65535 })
	mod("VLAN", func(a *abi.AH) { a.VLANID = 9 })
	mod("flow label", func(a *abi.AH) { a.FlowLabel = 1 << 20 })
	mod("no MAC", func(a *abi.AH) { a.DMAC = [6]byte{} })
	try := func(name string, ah uint32) {
		q := g.qp(qpSpec{typ: abi.QPTypeUD, pd: pd})
		q.connectUD(1)
		q.sendUD(1, 2, ah)
		if wc := q.scq.await(1)[0]; wc.Status != abi.WCLocQPOpErr {
			t.Errorf("%s: %+v", name, wc)
		}
	}
	for name, ah := range bad {
		table.set(3, ah)
		try(name, 3)
	}
	table.set(0, to(w.guests[1], pd))
	try("entry 0", 0)
	try("entry past the table", 64)
	try("entry 2^32-1", 0xffffffff)
	w.guests[1].remove()
	w.guests = w.guests[:1]
	fresh := g
	fresh.Reset()
	fresh.up.Store(true)
	fresh.setUpDriver()
	pd = g.pd()
	try("no table at all", 1)
}

// The members of a group receive a datagram on all engines, those of the sender's own VM
// included, and no other QP does.
func TestMulticast(t *testing.T) {
	w := newWorld(t, 2, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	gid := [16]byte{10: 0xff, 11: 0xff, 12: 239, 13: 1, 14: 1, 15: 1}
	mac := [6]byte{1, 0, 0x5e, 1, 1, 1}
	pa, pb := ga.pd(), gb.pd()
	table := ga.ahTable()
	ah := to(gb, pa)
	ah.DGID, ah.DMAC = gid, mac
	table.set(1, ah)
	sender := ga.qp(qpSpec{typ: abi.QPTypeUD, pd: pa})
	sender.connectUD(0x1234)
	join := func(g *guest, pd uint32) *tqp {
		q := g.qp(qpSpec{typ: abi.QPTypeUD, pd: pd})
		q.connectUD(0x1234)
		g.must(abi.CmdAttachMcast, enc(abi.SizeMcast, &abi.Mcast{QPN: q.n, GID: gid}))
		buf := g.alloc(4096)
		q.recv(1, abi.SGE{Addr: uint64(buf), Length: 4096, LKey: g.mr(pd, buf, 4096, 1)})
		return q
	}
	members := []*tqp{join(ga, pa), join(gb, pb), join(gb, pb), join(gb, pb)}
	stranger := gb.qp(qpSpec{typ: abi.QPTypeUD, pd: pb})
	stranger.connectUD(0x1234)
	stranger.recv(1)
	left := members[3]
	gb.must(abi.CmdDetachMcast, enc(abi.SizeMcast, &abi.Mcast{QPN: left.n, GID: gid}))
	members = members[:3]

	sender.sendUD(2, 0xffffff, 1)
	sender.scq.await(1)
	for i, m := range members {
		if wc := m.rcq.await(1)[0]; wc.Status != 0 || wc.ByteLen != 40 || wc.SrcQP != sender.n {
			t.Errorf("member %d: %+v", i, wc)
		}
	}
	w.step(10)
	if len(stranger.rcq.poll())+len(left.rcq.poll()) != 0 {
		t.Error("a QP outside the group got the datagram")
	}
}

// In the service level, a process gets the packet type, a kernel the priority.
func TestUDServiceLevel(t *testing.T) {
	for _, x := range []struct {
		c                roce.Completion
		process, machine uint8
	}{
		{roce.Completion{Flags: roce.FlagGRH, IPv4: true, SL: 5}, abi.WCSLIPv4, 5},
		{roce.Completion{Flags: roce.FlagGRH, SL: 5}, abi.WCSLIPv6, 5},
		{roce.Completion{Flags: roce.FlagGRH, RoCEv1: true, SL: 5}, abi.WCSLRoCEv1, 5},
		{roce.Completion{}, 0, 0},
	} {
		if got := (&qp{}).wcSL(&x.c); got != x.process {
			t.Errorf("%+v: a process gets %#x, want %#x", x.c, got, x.process)
		}
		if got := (&qp{privileged: true}).wcSL(&x.c); got != x.machine {
			t.Errorf("%+v: a kernel gets %#x, want %#x", x.c, got, x.machine)
		}
	}
}

// RA-1, RA-2, RA-3: the reserved key names guest-physical memory in local segments of
// privileged QPs, and is invalid elsewhere.
func TestDMAKey(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	pa, pb := ga.pd(), gb.pd()
	src, dst := ga.alloc(4096), gb.alloc(4096)
	pair := func(flags uint32) (a, b *tqp) {
		a, b = ga.qp(qpSpec{pd: pa, flags: flags}), gb.qp(qpSpec{pd: pb, flags: flags})
		a.connectRC(b)
		b.connectRC(a)
		return a, b
	}
	a, b := pair(abi.QPPrivileged)
	fill(ga.at(src, 4096), 5)
	b.recv(1, abi.SGE{Addr: uint64(dst), Length: 4096})
	s := a.wqe()
	s.SetRequest(1, abi.WRSend, abi.SendSignaled)
	s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 4096}})
	a.post()
	if wc := a.scq.await(1)[0]; wc.Status != abi.WCSuccess {
		t.Fatalf("privileged send: %+v", wc)
	}
	if !bytes.Equal(ga.at(src, 4096), gb.at(dst, 4096)) {
		t.Fatal("data differ")
	}
	// Physical memory outside the guest.
	s = a.wqe()
	s.SetRequest(2, abi.WRSend, abi.SendSignaled)
	s.SetSGEs([]abi.SGE{{Addr: 0x1000, Length: 4096}})
	a.post()
	if wc := a.scq.await(1)[0]; wc.Status != abi.WCLocProtErr {
		t.Fatalf("PA outside memory: %+v", wc)
	}
	// As R_Key it is invalid, even for kernel QPs.
	a, _ = pair(abi.QPPrivileged)
	s = a.wqe()
	s.SetRequest(3, abi.WRRDMAWrite, abi.SendSignaled)
	s.SetRDMA(uint64(dst), abi.DMALKey)
	s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 64}})
	a.post()
	if wc := a.scq.await(1)[0]; wc.Status != abi.WCRemAccessErr {
		t.Fatalf("reserved key as R_Key: %+v", wc)
	}
	// Unprivileged QPs must not use it.
	a, _ = pair(0)
	s = a.wqe()
	s.SetRequest(4, abi.WRSend, abi.SendSignaled)
	s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 64}})
	a.post()
	if wc := a.scq.await(1)[0]; wc.Status != abi.WCLocProtErr {
		t.Fatalf("unprivileged send: %+v", wc)
	}
	// A segment that wraps around the address space.
	a, _ = pair(abi.QPPrivileged)
	s = a.wqe()
	s.SetRequest(5, abi.WRSend, abi.SendSignaled)
	s.SetSGEs([]abi.SGE{{Addr: 1<<64 - 10, Length: 4096}})
	a.post()
	if wc := a.scq.await(1)[0]; wc.Status != abi.WCLocProtErr {
		t.Fatalf("wrapping segment: %+v", wc)
	}
}

// Keys, PDs and rights: a key of another VM or PD gives no access (PF-5).
func TestKeysAndDomains(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	pa, pb, pb2 := ga.pd(), gb.pd(), gb.pd()
	src, dst := ga.alloc(4096), gb.alloc(4096)
	ka := ga.mr(pa, src, 4096, abi.AccessLocalWrite|remoteAll)
	foreign := gb.mr(pb2, dst, 4096, abi.AccessLocalWrite|remoteAll)
	readOnly := gb.mr(pb, dst, 4096, abi.AccessLocalWrite|abi.AccessRemoteRead)
	for name, key := range map[string]uint32{"another PD": foreign, "no right": readOnly,
		"the other VM's key": ka ^ 0x5500, "garbage": 0xdeadbeef} {
		a, b := ga.qp(qpSpec{pd: pa}), gb.qp(qpSpec{pd: pb})
		a.connectRC(b)
		b.connectRC(a)
		s := a.wqe()
		s.SetRequest(1, abi.WRRDMAWrite, abi.SendSignaled)
		s.SetRDMA(uint64(dst), key)
		s.SetSGEs([]abi.SGE{{Addr: uint64(src), Length: 64, LKey: ka}})
		a.post()
		if wc := a.scq.await(1)[0]; wc.Status != abi.WCRemAccessErr {
			t.Errorf("%s: %+v", name, wc)
		}
	}
}

// RESET drops posted and fetched requests; the QP works again afterwards.
func TestQPReset(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	a, b := w.pair()
	w.losing(func([]byte) bool { return true })
	for i := range 30 {
		s := a.wqe()
		s.SetRequest(uint64(i), abi.WRSend, abi.SendSignaled)
		a.post()
		b.recv(uint64(i))
	}
	w.step(10)
	for _, q := range []*tqp{a, b} {
		q.modify(abi.QPReset, 0, abi.QPAttr{})
		if q.sq.cons().Load() != q.sq.prod().Load() || q.rq.cons().Load() != q.rq.prod().Load() {
			t.Error("RESET left requests in a ring")
		}
	}
	w.lose = nil
	w.step(10)
	if got := a.scq.poll(); len(got) != 0 {
		t.Errorf("completions of requests that RESET dropped: %+v", got)
	}
	a.connectRC(b)
	b.connectRC(a)
	b.recv(100)
	s := a.wqe()
	s.SetRequest(101, abi.WRSend, abi.SendSignaled)
	a.post()
	if wc := a.scq.await(1)[0]; wc.ID != 101 || wc.Status != 0 {
		t.Errorf("after RESET: %+v", wc)
	}
	if wc := b.rcq.await(1)[0]; wc.ID != 100 {
		t.Errorf("after RESET: %+v", wc)
	}
}
