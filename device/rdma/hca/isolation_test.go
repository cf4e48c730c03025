package hca

import (
	"bytes"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/translate"
)

// Three VMs: the first two are connected, the third attacks them.
type trio struct {
	w      *world
	a, b   *tqp
	evil   *guest
	secret translate.PA // in b's VM
	key    uint32       // b's
}

const secretLen = 64

func newTrio(t *testing.T) *trio {
	w := newWorld(t, 1, 3, Limits{})
	ga, gb := w.guests[0], w.guests[1]
	x := &trio{w: w, a: ga.qp(qpSpec{pd: ga.pd()}), b: gb.qp(qpSpec{pd: gb.pd()}), evil: w.guests[2]}
	x.a.connectRC(x.b)
	x.b.connectRC(x.a)
	gb.mr(1, gb.alloc(4096), 4096, demandAccess) // so that the evil guest does not have the key below
	gb.mr(1, gb.alloc(4096), 4096, demandAccess)
	x.secret = gb.alloc(4096)
	x.key = gb.mr(1, x.secret, 4096, demandAccess)
	pattern(gb.at(x.secret, secretLen), 77)
	return x
}

// intact checks that the secret is unchanged and was not copied into the evil guest.
func (x *trio) intact(t *testing.T, what string) {
	t.Helper()
	want := pattern(make([]byte, secretLen), 77)
	if !bytes.Equal(x.b.g.at(x.secret, secretLen), want) {
		t.Errorf("%s: another VM's memory was changed", what)
	}
	if bytes.Contains(x.evil.mem, want) {
		t.Errorf("%s: another VM's memory was read", what)
	}
}

// run posts a request and returns its status.
func (q *tqp) run(op uint32, sge abi.SGE, rva uint64, rkey uint32) uint32 {
	q.g.tb.Helper()
	q.request(op, sge, rva, rkey)
	return q.scq.await(1)[0].Status
}

// request posts a request.
func (q *tqp) request(op uint32, sge abi.SGE, rva uint64, rkey uint32) {
	s := q.wqe()
	s.SetRequest(1, op, abi.SendSignaled)
	if op != abi.WRSend {
		s.SetRDMA(rva, rkey)
	}
	s.SetSGEs([]abi.SGE{sge})
	q.post()
}

// loop connects the guest to itself and returns the requester's QP.
func (g *guest) loop(pd uint32) *tqp {
	g.tb.Helper()
	a, b := g.qp(qpSpec{pd: pd}), g.qp(qpSpec{pd: pd})
	a.connectRC(b)
	b.connectRC(a)
	return a
}

// A key of another VM is invalid in every use (PF-5).
func TestForeignKeys(t *testing.T) {
	for _, op := range []uint32{abi.WRRDMAWrite, abi.WRRDMARead} {
		x := newTrio(t)
		g := x.evil
		p := g.qp(qpSpec{pd: g.pd()})
		p.connectRC(p)
		mine := g.alloc(4096)
		own := g.mr(1, mine, 4096, demandAccess)
		if own == x.key {
			t.Fatal("test set-up: the evil guest has the same key")
		}
		if s := p.run(op, abi.SGE{Addr: uint64(x.secret), Length: 8, LKey: x.key}, uint64(mine), own); s != abi.WCLocProtErr {
			t.Errorf("as a local key: status %d", s)
		}
		p = g.loop(1)
		if s := p.run(op, abi.SGE{Addr: uint64(mine), Length: 8, LKey: own}, uint64(x.secret),
			x.key); s != abi.WCRemAccessErr {
			t.Errorf("as a remote key: status %d", s)
		}
		x.intact(t, "key")
	}
}

// The same number may be a key in two VMs; in each it reaches that VM's memory.
func TestEqualKeys(t *testing.T) {
	x := newTrio(t)
	g := x.evil
	pd := g.pd()
	var own uint32
	for i := byte(0); own != x.key; i++ { // the places in use differ, so not every seed will do
		if i > 100 {
			t.Fatalf("keys %#x and %#x: test set-up: want equal keys", own, x.key)
		}
		x.b.g.data.vm.SeedKeys([32]byte{i})
		g.data.vm.SeedKeys([32]byte{i})
		x.key = x.b.g.mr(1, x.secret, 4096, demandAccess)
		own = g.mr(pd, g.alloc(4096), 4096, demandAccess)
	}
	p := g.qp(qpSpec{pd: pd})
	p.connectRC(p)
	if s := p.run(abi.WRRDMARead, abi.SGE{Addr: uint64(g.alloc(4096)), Length: 8, LKey: own}, uint64(x.secret),
		own); s == abi.WCSuccess {
		t.Errorf("status %d", s)
	}
	x.intact(t, "equal keys")
}

// Packets that guess QP number, PSN and key of another VM's connection are
// dropped: their source address is wrong.
func TestForeignQPNumber(t *testing.T) {
	x := newTrio(t)
	g := x.evil
	p := g.qp(qpSpec{pd: g.pd()})
	p.connectRC(x.b)
	mine := g.alloc(4096)
	own := g.mr(1, mine, 4096, demandAccess)
	for _, op := range []uint32{abi.WRRDMAWrite, abi.WRRDMARead} {
		if s := p.run(op, abi.SGE{Addr: uint64(mine), Length: secretLen, LKey: own}, uint64(x.secret),
			x.key); s != abi.WCRetryExcErr {
			t.Errorf("op %d: status %d", op, s)
		}
		p = g.qp(qpSpec{pd: 1})
		p.connectRC(x.b)
	}
	x.intact(t, "QP number")
	// The connection itself is unaffected.
	buf := x.a.g.alloc(4096)
	k := x.a.g.mr(1, buf, 4096, demandAccess)
	if s := x.a.run(abi.WRRDMARead, abi.SGE{Addr: uint64(buf), Length: secretLen, LKey: k}, uint64(x.secret),
		x.key); s != abi.WCSuccess {
		t.Errorf("the rightful peer: status %d", s)
	}
	// Commands cannot reach another VM's objects either.
	for _, op := range []abi.Opcode{abi.CmdQueryQP, abi.CmdDestroyQP} {
		g.refused(abi.StatusNotFound, op, handle(x.b.n+0x10000*3))
	}
	g.refused(abi.StatusNotFound, abi.CmdDestroyMR, handle(x.key))
	g.refused(abi.StatusNotFound, abi.CmdClearMTT, enc(abi.SizeClearMTT, &abi.ClearMTT{Handle: x.key, Count: 1}))
	g.refused(abi.StatusNotFound, abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: x.key, Count: 1}, uint64(mine)))
}

// Addresses outside a VM's own memory are refused in every table.
func TestForeignAddresses(t *testing.T) {
	x := newTrio(t)
	g := x.evil
	pd := g.pd()
	mine := g.alloc(4096)
	own := g.mr(pd, mine, 4096, demandAccess)
	d := g.demand(pd, 1, demandAccess)
	for _, pa := range []uint64{0, uint64(memBase) - 4096, uint64(memBase) + memSize, 1<<48 - 4096} {
		g.refused(abi.StatusFault, abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: d.handle, Count: 1}, pa))
		g.refused(abi.StatusFault, abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: d.handle, Count: 1},
			pa|abi.MTTReadOnly))
		// RA-1: real addresses, on a QP that may use them.
		p := g.qp(qpSpec{pd: pd, flags: abi.QPPrivileged})
		p.connectRC(p)
		if s := p.run(abi.WRRDMAWrite, abi.SGE{Addr: pa, Length: 8, LKey: abi.DMALKey}, uint64(mine),
			own); s != abi.WCLocProtErr {
			t.Errorf("PA %#x: status %d", pa, s)
		}
		var r abi.CreateMRResp
		req := abi.CreateMR{PDN: pd, Access: demandAccess, Flags: abi.MRPhys, IOVA: pa, Length: 4096}
		if err := r.Decode(g.must(abi.CmdCreateMR, enc(abi.SizeCreateMR, &req))); err != nil {
			t.Fatal(err)
		}
		p = g.loop(pd)
		if s := p.run(abi.WRRDMARead, abi.SGE{Addr: uint64(mine), Length: 8, LKey: own}, pa,
			r.RKey); s != abi.WCRemAccessErr {
			t.Errorf("physical region at %#x: status %d", pa, s)
		}
	}
	x.intact(t, "address")
}

// The uplink attribute applies to every access of a VM's data (PF-3): read-only memory is not written, blocked memory
// is not read either, and other VMs are unaffected. Rings work: the VM's queue pair answers, so that its peer sees a
// remote access error and no timeout.
func TestUplinkAttribute(t *testing.T) {
	for _, u := range []translate.Uplink{translate.UplinkReadOnly, translate.UplinkBlocked} {
		x := newTrio(t)
		var attribute translate.Attribute
		attribute.Bind(x.b.g.space)
		if _, err := attribute.Set(u); err != nil {
			t.Fatal(err)
		}
		buf := x.a.g.alloc(4096)
		k := x.a.g.mr(1, buf, 4096, demandAccess)
		sge := abi.SGE{Addr: uint64(buf), Length: secretLen, LKey: k}
		if u == translate.UplinkReadOnly {
			if s := x.a.run(abi.WRRDMARead, sge, uint64(x.secret), x.key); s != abi.WCSuccess {
				t.Errorf("reading read-only memory: status %d", s)
			}
			clear(x.a.g.at(buf, secretLen))
			if s := x.a.run(abi.WRRDMAWrite, sge, uint64(x.secret), x.key); s != abi.WCRemAccessErr {
				t.Errorf("writing read-only memory: status %d", s)
			}
		} else if s := x.a.run(abi.WRRDMARead, sge, uint64(x.secret), x.key); s != abi.WCRemAccessErr {
			t.Errorf("reading blocked memory: status %d", s)
		}
		x.intact(t, "uplink")
		if u == translate.UplinkBlocked && bytes.Equal(x.a.g.at(buf, 8), x.b.g.at(x.secret, 8)) {
			t.Error("blocked memory was read")
		}
		p := x.evil.qp(qpSpec{pd: x.evil.pd()})
		p.connectRC(p)
		mine := x.evil.alloc(4096)
		own := x.evil.mr(1, mine, 4096, demandAccess)
		if s := p.run(abi.WRRDMAWrite, abi.SGE{Addr: uint64(mine), Length: 8, LKey: own}, uint64(mine),
			own); s != abi.WCSuccess {
			t.Errorf("another VM: status %d", s)
		}
		if r := attribute.Refused(); r.Reads+r.Writes == 0 {
			t.Error("nothing was counted")
		}
	}
}
