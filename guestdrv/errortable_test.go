package guestdrv_test

import (
	"bytes"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/guestdrv"
)

// badRequest is a request that must fail: what IBTA volume 1 says of it, and what
// both sides see.
type badRequest struct {
	name string
	ibta string // where it is said; 11.6.2 defines the statuses, 11.6.3 the events, 10.3.1 the states
	wr   *guestdrv.SendWR
	make func() *guestdrv.SendWR // instead of wr: of the objects made for each request
	// kernel: posted by a kernel's QP; else by a process's.
	kernel  bool
	flushed bool      // by a QP in ERR
	access  uint32    // of the peer's QP, 0: all
	recv    []abi.SGE // posted at the peer; nil: none
	status  uint32    // of the request; what is behind it is flushed, unless it is WCSuccess
	// peer is what becomes of the receive: a status, or still for it stays posted.
	peer uint32
	// event tells the peer's program; 0: it hears nothing.
	event abi.EventType
	srq   bool // the peer receives from an SRQ
	alone bool // the peer's QP is gone
	noRd  bool // max_rd_atomic is 0
	// breaks: the peer's QP is in ERR then, else as before.
	breaks bool
}

const still = 0xffffffff

// badWorld is what the requests are made of. The requester is hosts[0].
type badWorld struct {
	*rig
	src, dst, mem                               *guestdrv.Buffer
	smr, ro, sendBind                           *guestdrv.MR // the requester's
	dmr, readOnly, local, foreign, gone, absent *guestdrv.MR // the peer's
	fast, otherFast, peerFast                   *guestdrv.FastMR
	w1, w2                                      *guestdrv.MW
	ah, staleAH, foreignAH                      *guestdrv.AH
	seen                                        map[cell]bool
}

func newBadWorld(t *testing.T) *badWorld {
	w := &badWorld{rig: newRig(t, rigConfig{}), seen: map[cell]bool{}}
	ha, hb := w.hosts[0], w.hosts[1]
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	w.src, w.smr = ha.region(t, 8192, abi.AccessLocalWrite)
	_, w.ro = ha.region(t, 8192, 0)
	_, w.sendBind = ha.region(t, 8192, allAccess|abi.AccessMWBind)
	w.dst, w.dmr = hb.region(t, 8192, allAccess|abi.AccessFlushGlobal)
	_, w.readOnly = hb.region(t, 8192, abi.AccessRemoteRead)
	_, w.local = hb.region(t, 8192, abi.AccessLocalWrite)
	var err error
	w.absent, err = hb.pd.RegisterPages(guestdrv.PageSpec{IOVA: 0x10000, Length: 8192, PageShift: 12, PAs: []uint64{w.dst.PA(), abi.MTTAbsent}, Access: allAccess})
	ok(err)
	w.gone, err = hb.pd.Register(w.dst, allAccess)
	ok(err)
	ok(w.gone.Deregister())
	w.mem, err = ha.Alloc(32 << 10)
	ok(err)
	otherB, err := hb.AllocPD()
	ok(err)
	b, err := hb.Alloc(8192)
	ok(err)
	w.foreign, err = otherB.Register(b, allAccess)
	ok(err)
	w.peerFast, err = otherB.AllocFast(4)
	ok(err)
	otherA, err := ha.AllocPD()
	ok(err)
	w.otherFast, err = otherA.AllocFast(4)
	ok(err)
	w.ah, w.staleAH = ha.ah(t, hb), ha.ah(t, hb)
	w.staleAH.Destroy()
	w.foreignAH, err = otherA.CreateAH(hb.at())
	ok(err)
	return w
}

func (w *badWorld) write(mr *guestdrv.MR, off uint64, n int) *guestdrv.SendWR {
	return &guestdrv.SendWR{Opcode: abi.WRRDMAWrite, SGL: []abi.SGE{w.smr.SGE(0, n)}, RemoteAddr: mr.Addr() + off, RKey: mr.RKey()}
}

func (w *badWorld) read(mr *guestdrv.MR, off uint64, n int) *guestdrv.SendWR {
	return &guestdrv.SendWR{Opcode: abi.WRRDMARead, SGL: []abi.SGE{w.smr.SGE(0, n)}, RemoteAddr: mr.Addr() + off, RKey: mr.RKey()}
}

func (w *badWorld) atomic(mr *guestdrv.MR, off uint64) *guestdrv.SendWR {
	return &guestdrv.SendWR{Opcode: abi.WRAtomicFetchAndAdd, SGL: []abi.SGE{w.smr.SGE(0, 8)}, RemoteAddr: mr.Addr() + off, RKey: mr.RKey(), CompareAdd: 1}
}

func (w *badWorld) atomicWrite(mr *guestdrv.MR, off uint64, n int) *guestdrv.SendWR {
	return &guestdrv.SendWR{Opcode: abi.WRAtomicWrite, SGL: []abi.SGE{w.smr.SGE(0, n)}, RemoteAddr: mr.Addr() + off, RKey: mr.RKey()}
}

func send(sge ...abi.SGE) *guestdrv.SendWR { return &guestdrv.SendWR{Opcode: abi.WRSend, SGL: sge} }

// refusedAccess: the responder finds a key, a right or bounds violated.
func refusedAccess(b badRequest) badRequest {
	b.status, b.event, b.breaks, b.peer = abi.WCRemAccessErr, abi.EventQPAccessErr, true, abi.WCWRFlushErr
	return b
}

// refusedInvalidation: the same, told of the receive as well.
func refusedInvalidation(b badRequest) badRequest {
	b = refusedAccess(b)
	b.peer = abi.WCRemAccessErr
	return b
}

// refusedRequest: the responder cannot make sense of the request.
func refusedRequest(b badRequest) badRequest {
	b.status, b.event, b.breaks, b.peer = abi.WCRemInvReqErr, abi.EventQPReqErr, true, abi.WCWRFlushErr
	return b
}

func (w *badWorld) reliable() []badRequest {
	dmr, smr := w.dmr, w.smr
	return []badRequest{
		// The peer's memory: NAK "remote access error" (9.7.5.2, 9.9.3).
		refusedAccess(badRequest{name: "write beyond the end", ibta: "9.7.4.1.5, 10.6.3", wr: w.write(dmr, 8000, 500)}),
		refusedAccess(badRequest{name: "write before the start", ibta: "9.7.4.1.5, 10.6.3", wr: w.write(dmr, ^uint64(0), 1)}),
		refusedAccess(badRequest{name: "write that wraps", ibta: "9.7.4.1.5", wr: &guestdrv.SendWR{Opcode: abi.WRRDMAWrite, SGL: []abi.SGE{smr.SGE(0, 64)}, RemoteAddr: ^uint64(0) - 10, RKey: dmr.RKey()}}),
		refusedAccess(badRequest{name: "write without right", ibta: "10.6.3", wr: w.write(w.readOnly, 0, 100)}),
		refusedAccess(badRequest{name: "write to another PD", ibta: "10.2.3", wr: w.write(w.foreign, 0, 100)}),
		refusedAccess(badRequest{name: "write with a stale key", ibta: "10.6.5", wr: w.write(w.gone, 0, 100)}),
		refusedAccess(badRequest{name: "write with key 0", ibta: "10.6.3", wr: &guestdrv.SendWR{Opcode: abi.WRRDMAWrite, SGL: []abi.SGE{smr.SGE(0, 64)}, RemoteAddr: w.dst.PA()}}),
		refusedAccess(badRequest{name: "write with the reserved key", ibta: "10.6.3", wr: &guestdrv.SendWR{Opcode: abi.WRRDMAWrite, SGL: []abi.SGE{smr.SGE(0, 64)}, RemoteAddr: w.dst.PA(), RKey: abi.DMALKey}}),
		refusedAccess(badRequest{name: "write of several packets beyond the end", ibta: "9.7.4.1.5", wr: w.write(dmr, 8192-5000, 5001)}),
		refusedAccess(badRequest{name: "read beyond the end", ibta: "9.7.4.1.5", wr: w.read(dmr, 8000, 500)}),
		refusedAccess(badRequest{name: "read without right", ibta: "10.6.3", wr: w.read(w.local, 0, 100)}),
		refusedAccess(badRequest{name: "read of another PD", ibta: "10.2.3", wr: w.read(w.foreign, 0, 100)}),
		refusedAccess(badRequest{name: "atomic without right", ibta: "10.6.3", wr: w.atomic(w.readOnly, 0)}),
		refusedAccess(badRequest{name: "atomic beyond the end", ibta: "9.7.4.1.5", wr: w.atomic(dmr, 8192)}),
		refusedAccess(badRequest{name: "atomic write without right", ibta: "A19, 10.6.3", wr: w.atomicWrite(w.readOnly, 0, 8)}),
		refusedAccess(badRequest{name: "atomic write beyond the end", ibta: "A19, 9.7.4.1.5", wr: w.atomicWrite(dmr, 8192, 8)}),
		refusedInvalidation(badRequest{name: "invalidate an ordinary region of the peer", ibta: "10.6.5, 9.9.3", wr: &guestdrv.SendWR{Opcode: abi.WRSendWithInv, InvalidateKey: dmr.RKey()}, recv: []abi.SGE{}}),
		refusedInvalidation(badRequest{name: "invalidate another domain's region of the peer", ibta: "10.6.5, 9.9.3", wr: &guestdrv.SendWR{Opcode: abi.WRSendWithInv, InvalidateKey: w.peerFast.Key()}, recv: []abi.SGE{}}),
		refusedInvalidation(badRequest{name: "invalidate nothing of the peer", ibta: "10.6.5, 9.9.3", wr: &guestdrv.SendWR{Opcode: abi.WRSendWithInv, InvalidateKey: 0xfffff00}, recv: []abi.SGE{}}),
		{name: "write to an absent page that stays so", ibta: "9.7.5.2.8", wr: w.write(w.absent, 4096, 100), status: abi.WCRNRRetryExcErr, event: abi.EventPageFault},

		// What the peer's QP does not do: NAK "invalid request".
		refusedRequest(badRequest{name: "write, QP forbids", ibta: "9.7.4.1.5, 11.2.5.2", wr: w.write(dmr, 0, 100), access: abi.AccessRemoteRead}),
		refusedRequest(badRequest{name: "read, QP forbids", ibta: "9.7.4.1.5, 11.2.5.2", wr: w.read(dmr, 0, 100), access: abi.AccessRemoteWrite}),
		refusedRequest(badRequest{name: "atomic, QP forbids", ibta: "9.7.4.1.5, 11.2.5.2", wr: w.atomic(dmr, 0), access: abi.AccessRemoteWrite}),
		refusedRequest(badRequest{name: "atomic unaligned", ibta: "9.4.5", wr: w.atomic(dmr, 4)}),
		refusedRequest(badRequest{name: "atomic write, QP forbids", ibta: "A19, 11.2.5.2", wr: w.atomicWrite(dmr, 0, 8), access: abi.AccessRemoteAtomic}),
		refusedRequest(badRequest{name: "atomic write unaligned", ibta: "A19", wr: w.atomicWrite(dmr, 4, 8)}),

		// The peer's receive: NAK "invalid request" for its length, "remote operational error" for its memory.
		{name: "receive buffer too short", ibta: "9.7.5.2, 9.9.3", wr: send(smr.SGE(0, 5000)), recv: []abi.SGE{dmr.SGE(0, 4999)}, status: abi.WCRemInvReqErr, peer: abi.WCLocLenErr, breaks: true},
		{name: "receive buffer's key is bad", ibta: "9.7.5.2, 9.9.3", wr: send(smr.SGE(0, 100)), recv: []abi.SGE{{Addr: w.dst.Addr(), Length: 100, LKey: dmr.LKey() ^ 0x55}}, status: abi.WCRemOpErr, peer: abi.WCLocProtErr, breaks: true},
		{name: "receive buffer is read-only", ibta: "9.7.5.2, 9.9.3", wr: send(smr.SGE(0, 100)), recv: []abi.SGE{w.readOnly.SGE(0, 100)}, status: abi.WCRemOpErr, peer: abi.WCLocProtErr, breaks: true},
		{name: "receive buffer is another domain's", ibta: "10.2.3, 9.9.3", wr: send(smr.SGE(0, 100)), recv: []abi.SGE{w.foreign.SGE(0, 100)}, status: abi.WCRemOpErr, peer: abi.WCLocProtErr, breaks: true},
		{name: "no receive buffer", ibta: "9.7.5.2.8", wr: send(smr.SGE(0, 100)), status: abi.WCRNRRetryExcErr},
		{name: "immediate data without receive buffer", ibta: "9.7.5.2.8", wr: &guestdrv.SendWR{Opcode: abi.WRRDMAWriteWithImm, RemoteAddr: dmr.Addr(), RKey: dmr.RKey()}, status: abi.WCRNRRetryExcErr},

		// The requester's own memory and requests: nothing of it reaches the peer.
		{name: "gather beyond the end", ibta: "9.9.2, 10.6.3", wr: send(abi.SGE{Addr: w.src.Addr() + 8000, Length: 500, LKey: smr.LKey()}), recv: []abi.SGE{}, status: abi.WCLocProtErr, peer: still},
		{name: "gather with a bad key", ibta: "9.9.2, 10.6.3", wr: send(abi.SGE{Addr: w.src.Addr(), Length: 5, LKey: smr.LKey() ^ 0x55}), recv: []abi.SGE{}, status: abi.WCLocProtErr, peer: still},
		{name: "gather with the reserved key", ibta: "9.9.2, 10.6.3", wr: send(abi.SGE{Addr: w.src.PA(), Length: 5, LKey: abi.DMALKey}), recv: []abi.SGE{}, status: abi.WCLocProtErr, peer: still},
		{name: "scatter without right", ibta: "9.9.2, 10.6.3", wr: &guestdrv.SendWR{Opcode: abi.WRRDMARead, SGL: []abi.SGE{w.ro.SGE(0, 100)}, RemoteAddr: dmr.Addr(), RKey: dmr.RKey()}, status: abi.WCLocProtErr},
		{name: "atomic without room for the answer", ibta: "9.9.2, 11.4.1", wr: &guestdrv.SendWR{Opcode: abi.WRAtomicFetchAndAdd, SGL: []abi.SGE{smr.SGE(0, 4)}, RemoteAddr: dmr.Addr(), RKey: dmr.RKey()}, status: abi.WCLocLenErr},
		{name: "atomic write of 16 bytes", ibta: "A19", wr: w.atomicWrite(dmr, 0, 16), status: abi.WCLocLenErr},
		{name: "unknown opcode", ibta: "9.9.2, 10.7.2", wr: &guestdrv.SendWR{Opcode: 99, SGL: []abi.SGE{smr.SGE(0, 100)}}, recv: []abi.SGE{}, status: abi.WCLocQPOpErr, peer: still},
	}
}

// manage are registration, invalidation and binding (10.6, 11.4.4): "memory management operation error".
func (w *badWorld) manage() (all []badRequest) {
	reg := func(name string, f func(*abi.RegWR)) badRequest {
		return badRequest{name: name, ibta: "11.4.4.1, 10.6.4", kernel: true, status: abi.WCMWBindErr, make: func() *guestdrv.SendWR {
			x := w.fast.Map(w.mem, 100, 8192, 9, allAccess)
			f(x)
			return &guestdrv.SendWR{Opcode: abi.WRRegMR, Reg: x}
		}}
	}
	inv := func(name string, kernel bool, key func() uint32) badRequest {
		return badRequest{name: name, ibta: "10.6.5", kernel: kernel, status: abi.WCMWBindErr, make: func() *guestdrv.SendWR {
			return &guestdrv.SendWR{Opcode: abi.WRLocalInv, InvalidateKey: key()}
		}}
	}
	bind := func(name string, f func(*guestdrv.BindMW)) badRequest {
		return badRequest{name: name, ibta: "10.6.7.2, 11.4.4.2", status: abi.WCMWBindErr, make: func() *guestdrv.SendWR {
			x := &guestdrv.BindMW{Key: w.w2.Key(), NewKey: w.w2.Key() + 1, Region: w.sendBind.LKey(), Access: abi.AccessRemoteRead, Addr: w.sendBind.Addr(), Length: 100}
			f(x)
			return &guestdrv.SendWR{Opcode: abi.WRBindMW, Bind: x}
		}}
	}
	asProcess := reg("register as a process", func(*abi.RegWR) {})
	asProcess.kernel, asProcess.status = false, abi.WCLocQPOpErr
	real := bind("bind real addresses", func(x *guestdrv.BindMW) { x.Region, x.Addr = abi.DMALKey, w.mem.PA() })
	real.kernel = true
	return []badRequest{
		asProcess, real,
		reg("no pages", func(x *abi.RegWR) { x.NPages = 0 }),
		reg("2^32-1 pages", func(x *abi.RegWR) { x.NPages = 1<<32 - 1 }),
		reg("more pages than room", func(x *abi.RegWR) { x.NPages = 5 }),
		reg("list beyond its page", func(x *abi.RegWR) { x.PageList += 4096 - 8 }),
		reg("list misaligned", func(x *abi.RegWR) { x.PageList += 4 }),
		reg("list outside of memory", func(x *abi.RegWR) { x.PageList = 1 << 60 }),
		reg("pages do not cover it", func(x *abi.RegWR) { x.Length = 1 << 40 }),
		reg("register another domain's region", func(x *abi.RegWR) { x.RKey = w.otherFast.Key() }),
		reg("register an ordinary region", func(x *abi.RegWR) { x.RKey = w.sendBind.LKey() }),
		reg("register no region", func(x *abi.RegWR) { x.RKey = 0xffffffff }),
		reg("register key 0", func(x *abi.RegWR) { x.RKey = 0 }),
		inv("invalidate another key", true, func() uint32 { return w.fast.Key() + 1 }),
		inv("invalidate another domain's", true, w.otherFast.Key),
		inv("invalidate an ordinary region", true, w.sendBind.LKey),
		inv("invalidate key 0", false, func() uint32 { return 0 }),
		inv("invalidate a type 1 window", false, func() uint32 { return w.w1.Key() }),
		bind("bind without right", func(x *guestdrv.BindMW) { x.Region = w.smr.LKey(); x.Addr = w.smr.Addr() }),
		bind("bind beyond the region", func(x *guestdrv.BindMW) { x.Length = 8193 }),
		bind("bind type 2 to nothing", func(x *guestdrv.BindMW) { x.Length = 0 }),
		bind("bind an old key", func(x *guestdrv.BindMW) { x.Key++ }),
	}
}

// unreliable are those of UC (9.8.2): nobody tells the requester what the peer made of its message.
func (w *badWorld) unreliable() []badRequest {
	return []badRequest{
		{name: "write beyond the end", ibta: "9.8.2.2", wr: w.write(w.dmr, 8000, 500), recv: []abi.SGE{}, peer: still},
		{name: "write without right", ibta: "9.8.2.2", wr: w.write(w.readOnly, 0, 100), recv: []abi.SGE{}, peer: still},
		{name: "write, QP forbids", ibta: "9.8.2.2", wr: w.write(w.dmr, 0, 100), access: abi.AccessLocalWrite, recv: []abi.SGE{}, peer: still},
		{name: "no receive buffer", ibta: "9.8.2.2", wr: send(w.smr.SGE(0, 100))},
		{name: "receive buffer too short", ibta: "9.8.2.2, 9.9.3", wr: send(w.smr.SGE(0, 5000)), recv: []abi.SGE{w.dmr.SGE(0, 4999)}, peer: still},
		{name: "receive buffer's key is bad", ibta: "9.9.3", wr: send(w.smr.SGE(0, 100)), recv: []abi.SGE{{Addr: w.dst.Addr(), Length: 100, LKey: w.dmr.LKey() ^ 0x55}}, peer: abi.WCLocProtErr, breaks: true},
		{name: "gather with a bad key", ibta: "9.9.2, 10.3.1.7", wr: send(abi.SGE{Addr: w.src.Addr(), Length: 5, LKey: w.smr.LKey() ^ 0x55}), recv: []abi.SGE{}, status: abi.WCLocProtErr, peer: still},
		{name: "read", ibta: "10.7.2, 10.3.1.7", wr: w.read(w.dmr, 0, 100), status: abi.WCLocQPOpErr},
		{name: "atomic", ibta: "10.7.2, 10.3.1.7", wr: w.atomic(w.dmr, 0), status: abi.WCLocQPOpErr},
		{name: "atomic write", ibta: "A19, 10.3.1.7", wr: w.atomicWrite(w.dmr, 0, 8), status: abi.WCLocQPOpErr},
		{name: "unknown opcode", ibta: "10.7.2, 10.3.1.7", wr: &guestdrv.SendWR{Opcode: 99}, status: abi.WCLocQPOpErr},
	}
}

// datagrams are those of UD (9.8.3).
func (w *badWorld) datagrams() []badRequest {
	to := func(ah *guestdrv.AH, qkey uint32, n int) *guestdrv.SendWR {
		return &guestdrv.SendWR{Opcode: abi.WRSend, SGL: []abi.SGE{w.smr.SGE(0, n)}, AH: ah, QKey: qkey}
	}
	badKey := to(w.ah, 5, 10)
	badKey.SGL[0].LKey ^= 0x55
	return []badRequest{
		{name: "longer than the MTU", ibta: "9.8.3, 10.3.1.7", wr: to(w.ah, 5, 1025), status: abi.WCLocLenErr},
		{name: "stale address handle", ibta: "10.2.2, 10.3.1.7", wr: to(w.staleAH, 5, 10), status: abi.WCLocQPOpErr},
		{name: "another PD's address handle", ibta: "10.2.3, 10.3.1.7", wr: to(w.foreignAH, 5, 10), status: abi.WCLocQPOpErr},
		{name: "gather with a bad key", ibta: "9.9.2, 10.3.1.7", wr: badKey, status: abi.WCLocProtErr},
		{name: "another Q_Key", ibta: "9.6.1.4, 10.2.5", wr: to(w.ah, 6, 10), recv: []abi.SGE{w.dmr.SGE(0, 100)}, peer: still},
		{name: "no receive buffer", ibta: "9.8.3", wr: to(w.ah, 5, 10)},
		{name: "receive buffer too short", ibta: "9.8.3, 9.9.3", wr: to(w.ah, 5, 61), recv: []abi.SGE{w.dmr.SGE(0, 100)}, peer: still},
		{name: "receive buffer's key is bad", ibta: "9.9.3", wr: to(w.ah, 5, 10), recv: []abi.SGE{{Addr: w.dst.Addr(), Length: 100, LKey: w.dmr.LKey() ^ 0x55}}, peer: abi.WCLocProtErr, breaks: true},
	}
}

// TestErrors makes a request fail in every way in which a peer, a key or the request
// itself can make it fail, and looks at both sides: statuses, states, events, memory.
func TestErrors(t *testing.T) {
	w := newBadWorld(t)
	for _, x := range []struct {
		name string
		typ  uint32
		all  []badRequest
	}{
		{"RC", abi.QPTypeRC, w.reliable()}, {"memory", abi.QPTypeRC, w.manage()},
		{"verbs", abi.QPTypeRC, w.everyVerb()}, {"UC", abi.QPTypeUC, w.unreliable()}, {"UD", abi.QPTypeUD, w.datagrams()},
	} {
		for i := range x.all {
			b := &x.all[i]
			t.Run(x.name+"/"+b.name, func(t *testing.T) {
				if b.ibta == "" {
					t.Error("no section of IBTA volume 1 is named")
				}
				b.try(t, w, x.typ)
			})
		}
	}
	w.complete(t)
	st, err := w.hosts[1].Stats()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []abi.Stat{abi.StatAccessErrors, abi.StatTxNaks, abi.StatTxRNR, abi.StatRxDropped} {
		if st.Value[n] == 0 {
			t.Errorf("errors were not counted: statistic %d", n)
		}
	}
}

func (b *badRequest) try(t *testing.T, w *badWorld, typ uint32) {
	ha, hb := w.hosts[0], w.hosts[1]
	c, o := qpDefaults(), quick
	c.Type, c.Privileged, o.Access = typ, b.kernel, b.access
	var a, p *end
	if typ == abi.QPTypeUD {
		a, p = ha.udEnd(t, c, 5), hb.udEnd(t, c, 5)
	} else {
		cp := c
		if b.srq {
			srq, err := hb.pd.CreateSRQ(guestdrv.SRQConfig{MaxWR: 4, MaxSGE: 1})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := srq.Destroy(); err != nil {
					t.Error(err)
				}
			}()
			cp.SRQ = srq
		}
		a, p = ha.end(t, c, 0xfffff0), hb.end(t, cp, 0xfffffe)
		join(t, a, p, o)
	}
	b.prepare(t, a, p)
	if b.alone {
		defer destroy(t, a)
	} else {
		defer destroy(t, a, p)
	}
	wr := b.wr
	if b.make != nil {
		var err error
		w.fast = fastMR(t, a, 4)
		if w.w1, err = ha.pd.AllocMW(1); err != nil {
			t.Fatal(err)
		}
		if w.w2, err = ha.pd.AllocMW(2); err != nil {
			t.Fatal(err)
		}
		defer func() {
			for _, f := range []func() error{w.fast.Deregister, w.w1.Free, w.w2.Free} {
				if err := f(); err != nil {
					t.Error(err)
				}
			}
		}()
		wr = b.make()
	}
	if b.recv != nil {
		b.receive(t, p)
	}
	if typ == abi.QPTypeRC {
		w.seen[cell{wr.Opcode, b.status}] = true
	}
	fill(w.src.Bytes(), 1)
	before := append([]byte{}, w.dst.Bytes()...)
	wr.ID, wr.Flags, wr.RemoteQPN = 10, 0, p.qp.Number() // unsignalled: a failure is reported all the same
	behind := &guestdrv.SendWR{ID: 11, Opcode: abi.WRSend, Flags: abi.SendSignaled}
	if typ == abi.QPTypeUD {
		behind.AH, behind.RemoteQPN, behind.QKey = w.ah, 0xfffffe, 5
	}
	if err := a.qp.QueueSend(wr); err != nil {
		t.Fatal(err)
	}
	a.recv(t, 12)
	local := uint8(abi.QPRTS)
	if b.status == abi.WCSuccess {
		dropped := hb.dropped(t)
		a.qp.Ring()
		for ctx := ctxFor(t); !b.breaks && hb.dropped(t) == dropped; {
			if ctx.Err() != nil {
				t.Fatal("the peer did not drop the message")
			}
		}
	} else {
		if err := a.qp.QueueSend(behind); err != nil {
			t.Fatal(err)
		}
		a.qp.Ring()
		expect(t, a.scq, 10, b.status, 0)
		expect(t, a.scq, 11, abi.WCWRFlushErr, 0)
		// A failed send of an unreliable service stops the send queue only (10.3.1.7).
		local = abi.QPSQE
		if typ == abi.QPTypeRC {
			local = abi.QPErr
			expect(t, a.rcq, 12, abi.WCWRFlushErr, 0)
		}
	}
	if b.recv != nil && b.peer != still {
		expect(t, p.rcq, 50, b.peer, 0)
	}
	if b.event != 0 {
		hb.wantEvent(t, b.event, p.qp.Number())
	}
	if b.srq && b.breaks { // what is left in the SRQ is for others (10.2.9.3, 11.6.3.2)
		hb.wantEvent(t, abi.EventQPLastWQE, p.qp.Number())
	}
	b.goOn(t, w, a, p, typ, local)
	if b.peer != abi.WCSuccess && b.peer != abi.WCLocLenErr && typ == abi.QPTypeRC && !bytes.Equal(before, w.dst.Bytes()) {
		t.Error("the target was written to")
	}
}

func (h *host) dropped(tb testing.TB) uint64 {
	tb.Helper()
	st, err := h.Stats()
	if err != nil {
		tb.Fatal(err)
	}
	return st.Value[abi.StatRxDropped]
}

// goOn looks at the states, and that they mean what they should.
func (b *badRequest) goOn(t *testing.T, w *badWorld, a, p *end, typ uint32, local uint8) {
	t.Helper()
	good := &guestdrv.SendWR{ID: 13, Opcode: abi.WRSend, Flags: abi.SendSignaled}
	if typ == abi.QPTypeUD {
		good.AH, good.RemoteQPN, good.QKey = w.ah, p.qp.Number(), 5
	}
	if s := a.state(t); s != local {
		t.Errorf("the QP is in state %d, want %d", s, local)
	}
	if local == abi.QPErr {
		a.post(t, good) // what is posted in ERR is flushed as well
		expect(t, a.scq, 13, abi.WCWRFlushErr, 0)
	}
	if local == abi.QPSQE {
		if err := a.qp.Modify(abi.QPAttr{QPState: abi.QPRTS}, abi.QPAttrState); err != nil {
			t.Fatal(err)
		}
	}
	if !b.breaks && local != abi.QPErr {
		// A good message after the bad one finds the receive that is still there, or this.
		if b.recv == nil {
			b.recv = []abi.SGE{w.dmr.SGE(0, 100)}
			b.receive(t, p)
		}
		a.post(t, good)
		expect(t, a.scq, 13, abi.WCSuccess, abi.WCOpSend)
		if wc := expect(t, p.rcq, 50, abi.WCSuccess, abi.WCOpRecv); wc.ByteLen > grhLen {
			t.Errorf("the receive took the bad message: %+v", wc)
		}
	}
	if b.alone {
		return
	}
	want := uint8(abi.QPRTS)
	if b.breaks {
		want = abi.QPErr
	}
	if s := p.state(t); s != want {
		t.Errorf("the peer's QP is in state %d, want %d", s, want)
	}
}
