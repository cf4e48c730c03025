package guestdrv_test

import (
	"bytes"
	"testing"

	"github.com/vnicd/vnicd/guestdrv"
)

// badRequest is a request that must fail, with what IBTA volume 1 requires and what both sides see.
type badRequest struct {
	name string
	ibta string // sections; 11.6.2 defines the statuses, 11.6.3 the events, 10.3.1 the states
	wr   *request
	make func() *request // instead of wr: uses the objects made for each request
	// kernel: posted by a kernel's QP; otherwise by a process's.
	kernel  bool
	flushed bool              // by a QP in ERR
	access  guestdrv.Access   // of the peer's QP; 0: all
	recv    []guestdrv.SGE    // posted at the peer; nil: none
	status  guestdrv.WCStatus // of the request; later requests are flushed, unless it is WCSuccess
	// peer is the status of the peer's receive, or still if it stays posted.
	peer guestdrv.WCStatus
	// event is the event at the peer's program; 0: none.
	event guestdrv.EventType
	srq   bool // the peer receives from an SRQ
	alone bool // the peer's QP has been destroyed
	noRd  bool // max_rd_atomic is 0
	// breaks: the peer's QP is in ERR afterwards; otherwise its state is unchanged.
	breaks bool
}

const still = 0xffffffff

// badWorld has the objects that the requests use. The requester is hosts[0].
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
	w.src, w.smr = ha.region(t, 8192, guestdrv.AccessLocalWrite)
	_, w.ro = ha.region(t, 8192, 0)
	_, w.sendBind = ha.region(t, 8192, allAccess|guestdrv.AccessMWBind)
	w.dst, w.dmr = hb.region(t, 8192, allAccess|guestdrv.AccessFlushGlobal)
	_, w.readOnly = hb.region(t, 8192, guestdrv.AccessRemoteRead)
	_, w.local = hb.region(t, 8192, guestdrv.AccessLocalWrite)
	var err error
	w.absent, err = hb.pd.RegisterPages(bg, guestdrv.PageSpec{IOVA: 0x10000, Length: 8192, PageShift: 12,
		PAs: []uint64{w.dst.PA(), guestdrv.PageAbsent}, Access: allAccess})
	ok(err)
	w.gone, err = hb.pd.Register(bg, w.dst, allAccess)
	ok(err)
	ok(w.gone.Close())
	w.mem, err = ha.Alloc(32 << 10)
	ok(err)
	otherB, err := hb.AllocPD(bg)
	ok(err)
	b, err := hb.Alloc(8192)
	ok(err)
	w.foreign, err = otherB.Register(bg, b, allAccess)
	ok(err)
	w.peerFast, err = otherB.AllocFast(bg, 4)
	ok(err)
	otherA, err := ha.AllocPD(bg)
	ok(err)
	w.otherFast, err = otherA.AllocFast(bg, 4)
	ok(err)
	w.ah, w.staleAH = ha.ah(t, hb), ha.ah(t, hb)
	w.staleAH.Close()
	w.foreignAH, err = otherA.CreateAH(hb.at())
	ok(err)
	return w
}

func (w *badWorld) write(mr *guestdrv.MR, off uint64, n int) *request {
	return &request{Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{w.smr.SGE(0, n)}, RemoteAddr: mr.Addr() + off,
		RKey: mr.RKey()}
}

func (w *badWorld) read(mr *guestdrv.MR, off uint64, n int) *request {
	return &request{Opcode: guestdrv.WRRDMARead, SGL: []guestdrv.SGE{w.smr.SGE(0, n)}, RemoteAddr: mr.Addr() + off,
		RKey: mr.RKey()}
}

func (w *badWorld) atomic(mr *guestdrv.MR, off uint64) *request {
	return &request{Opcode: guestdrv.WRAtomicFetchAndAdd, SGL: []guestdrv.SGE{w.smr.SGE(0, 8)},
		RemoteAddr: mr.Addr() + off, RKey: mr.RKey(), CompareAdd: 1}
}

func (w *badWorld) atomicWrite(mr *guestdrv.MR, off uint64, n int) *request {
	return &request{Opcode: guestdrv.WRAtomicWrite, SGL: []guestdrv.SGE{w.smr.SGE(0, n)}, RemoteAddr: mr.Addr() + off,
		RKey: mr.RKey()}
}

func send(sge ...guestdrv.SGE) *request { return &request{Opcode: guestdrv.WRSend, SGL: sge} }

// refusedAccess: the responder finds a violation of key, rights or bounds.
func refusedAccess(b badRequest) badRequest {
	b.status, b.event, b.breaks, b.peer = guestdrv.WCRemAccessErr, guestdrv.EventQPAccessErr, true, guestdrv.WCWRFlushErr
	return b
}

// refusedInvalidation is refusedAccess that also ends the receive with an error.
func refusedInvalidation(b badRequest) badRequest {
	b = refusedAccess(b)
	b.peer = guestdrv.WCRemAccessErr
	return b
}

// refusedRequest: the responder finds the request malformed or unsupported.
func refusedRequest(b badRequest) badRequest {
	b.status, b.event, b.breaks, b.peer = guestdrv.WCRemInvReqErr, guestdrv.EventQPReqErr, true, guestdrv.WCWRFlushErr
	return b
}

func (w *badWorld) reliable() []badRequest {
	dmr, smr := w.dmr, w.smr
	return []badRequest{
		// The peer's memory: NAK "remote access error" (9.7.5.2, 9.9.3).
		refusedAccess(badRequest{name: "write beyond the end", ibta: "9.7.4.1.5, 10.6.3", wr: w.write(dmr, 8000, 500)}),
		refusedAccess(badRequest{name: "write before the start", ibta: "9.7.4.1.5, 10.6.3", wr: w.write(dmr, ^uint64(0), 1)}),
		refusedAccess(badRequest{name: "write that wraps", ibta: "9.7.4.1.5",
			wr: &request{Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{smr.SGE(0, 64)}, RemoteAddr: ^uint64(0) - 10,
				RKey: dmr.RKey()}}),
		refusedAccess(badRequest{name: "write without right", ibta: "10.6.3", wr: w.write(w.readOnly, 0, 100)}),
		refusedAccess(badRequest{name: "write to another PD", ibta: "10.2.3", wr: w.write(w.foreign, 0, 100)}),
		refusedAccess(badRequest{name: "write with a stale key", ibta: "10.6.5", wr: w.write(w.gone, 0, 100)}),
		refusedAccess(badRequest{name: "write with key 0", ibta: "10.6.3",
			wr: &request{Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{smr.SGE(0, 64)}, RemoteAddr: w.dst.PA()}}),
		refusedAccess(badRequest{name: "write with the reserved key", ibta: "10.6.3",
			wr: &request{Opcode: guestdrv.WRRDMAWrite, SGL: []guestdrv.SGE{smr.SGE(0, 64)}, RemoteAddr: w.dst.PA(),
				RKey: guestdrv.DMALKey}}),
		refusedAccess(badRequest{name: "write of several packets beyond the end", ibta: "9.7.4.1.5",
			wr: w.write(dmr, 8192-5000, 5001)}), refusedAccess(badRequest{name: "read beyond the end", ibta: "9.7.4.1.5",
			wr: w.read(dmr, 8000, 500)}),
		refusedAccess(badRequest{name: "read without right", ibta: "10.6.3", wr: w.read(w.local, 0, 100)}),
		refusedAccess(badRequest{name: "read of another PD", ibta: "10.2.3", wr: w.read(w.foreign, 0, 100)}),
		refusedAccess(badRequest{name: "atomic without right", ibta: "10.6.3", wr: w.atomic(w.readOnly, 0)}),
		refusedAccess(badRequest{name: "atomic beyond the end", ibta: "9.7.4.1.5", wr: w.atomic(dmr, 8192)}),
		refusedAccess(badRequest{name: "atomic write without right", ibta: "A19, 10.6.3",
			wr: w.atomicWrite(w.readOnly, 0, 8)}), refusedAccess(badRequest{name: "atomic write beyond the end",
			ibta: "A19, 9.7.4.1.5", wr: w.atomicWrite(dmr, 8192, 8)}),
		refusedInvalidation(badRequest{name: "invalidate an ordinary region of the peer", ibta: "10.6.5, 9.9.3",
			wr: &request{Opcode: guestdrv.WRSendWithInv, InvalidateKey: dmr.RKey()}, recv: []guestdrv.SGE{}}),
		refusedInvalidation(badRequest{name: "invalidate another domain's region of the peer", ibta: "10.6.5, 9.9.3",
			wr: &request{Opcode: guestdrv.WRSendWithInv, InvalidateKey: w.peerFast.Key()}, recv: []guestdrv.SGE{}}),
		refusedInvalidation(badRequest{name: "invalidate nothing of the peer", ibta: "10.6.5, 9.9.3",
			wr: &request{Opcode: guestdrv.WRSendWithInv, InvalidateKey: 0xfffff00}, recv: []guestdrv.SGE{}}),
		// No RNR NAK: rnr_retry may run out (HF-1). So it is the ACK that does not come.
		{name: "write to an absent page that stays so", ibta: "9.7.6.1.3", wr: w.write(w.absent, 4096, 100),
			status: guestdrv.WCRetryExcErr, event: guestdrv.EventPageFault},

		// Operations that the peer's QP does not support: NAK "invalid request".
		refusedRequest(badRequest{name: "write, QP forbids", ibta: "9.7.4.1.5, 11.2.5.2", wr: w.write(dmr, 0, 100),
			access: guestdrv.AccessRemoteRead}), refusedRequest(badRequest{name: "read, QP forbids", ibta: "9.7.4.1.5, 11.2.5.2",
			wr: w.read(dmr, 0, 100), access: guestdrv.AccessRemoteWrite}),
		refusedRequest(badRequest{name: "atomic, QP forbids", ibta: "9.7.4.1.5, 11.2.5.2", wr: w.atomic(dmr, 0),
			access: guestdrv.AccessRemoteWrite}), refusedRequest(badRequest{name: "atomic unaligned", ibta: "9.4.5",
			wr: w.atomic(dmr, 4)}),
		refusedRequest(badRequest{name: "atomic write, QP forbids", ibta: "A19, 11.2.5.2", wr: w.atomicWrite(dmr, 0, 8),
			access: guestdrv.AccessRemoteAtomic}), refusedRequest(badRequest{name: "atomic write unaligned", ibta: "A19",
			wr: w.atomicWrite(dmr, 4, 8)}),

		// The peer's receive: NAK "invalid request" for its length, "remote operational error" for its memory.
		{name: "receive buffer too short", ibta: "9.7.5.2, 9.9.3", wr: send(smr.SGE(0, 5000)),
			recv: []guestdrv.SGE{dmr.SGE(0, 4999)}, status: guestdrv.WCRemInvReqErr, peer: guestdrv.WCLocLenErr, breaks: true},
		{name: "receive buffer's key is bad", ibta: "9.7.5.2, 9.9.3", wr: send(smr.SGE(0, 100)),
			recv: []guestdrv.SGE{{Addr: w.dst.Addr(), Length: 100, LKey: dmr.LKey() ^ 0x55}}, status: guestdrv.WCRemOpErr,
			peer: guestdrv.WCLocProtErr, breaks: true},
		{name: "receive buffer is read-only", ibta: "9.7.5.2, 9.9.3", wr: send(smr.SGE(0, 100)),
			recv: []guestdrv.SGE{w.readOnly.SGE(0, 100)}, status: guestdrv.WCRemOpErr, peer: guestdrv.WCLocProtErr,
			breaks: true},
		{name: "receive buffer is another domain's", ibta: "10.2.3, 9.9.3", wr: send(smr.SGE(0, 100)),
			recv: []guestdrv.SGE{w.foreign.SGE(0, 100)}, status: guestdrv.WCRemOpErr, peer: guestdrv.WCLocProtErr, breaks: true},
		{name: "no receive buffer", ibta: "9.7.5.2.8", wr: send(smr.SGE(0, 100)), status: guestdrv.WCRNRRetryExcErr},
		{name: "immediate data without receive buffer", ibta: "9.7.5.2.8",
			wr:     &request{Opcode: guestdrv.WRRDMAWriteWithImm, RemoteAddr: dmr.Addr(), RKey: dmr.RKey()},
			status: guestdrv.WCRNRRetryExcErr},

		// The requester's own memory and requests: nothing reaches the peer.
		{name: "gather beyond the end", ibta: "9.9.2, 10.6.3",
			wr: send(guestdrv.SGE{Addr: w.src.Addr() + 8000, Length: 500, LKey: smr.LKey()}), recv: []guestdrv.SGE{},
			status: guestdrv.WCLocProtErr, peer: still},
		{name: "gather with a bad key", ibta: "9.9.2, 10.6.3",
			wr: send(guestdrv.SGE{Addr: w.src.Addr(), Length: 5, LKey: smr.LKey() ^ 0x55}), recv: []guestdrv.SGE{},
			status: guestdrv.WCLocProtErr, peer: still},
		{name: "gather with the reserved key", ibta: "9.9.2, 10.6.3",
			wr: send(guestdrv.SGE{Addr: w.src.PA(), Length: 5, LKey: guestdrv.DMALKey}), recv: []guestdrv.SGE{},
			status: guestdrv.WCLocProtErr, peer: still},
		{name: "scatter without right", ibta: "9.9.2, 10.6.3",
			wr: &request{Opcode: guestdrv.WRRDMARead, SGL: []guestdrv.SGE{w.ro.SGE(0, 100)}, RemoteAddr: dmr.Addr(),
				RKey: dmr.RKey()}, status: guestdrv.WCLocProtErr},
		{name: "atomic without room for the answer", ibta: "9.9.2, 11.4.1",
			wr: &request{Opcode: guestdrv.WRAtomicFetchAndAdd, SGL: []guestdrv.SGE{smr.SGE(0, 4)}, RemoteAddr: dmr.Addr(),
				RKey: dmr.RKey()}, status: guestdrv.WCLocLenErr},
		{name: "atomic write of 16 bytes", ibta: "A19", wr: w.atomicWrite(dmr, 0, 16), status: guestdrv.WCLocLenErr},
		{name: "unknown opcode", ibta: "9.9.2, 10.7.2", wr: &request{Opcode: 99, SGL: []guestdrv.SGE{smr.SGE(0, 100)}},
			recv: []guestdrv.SGE{}, status: guestdrv.WCLocQPOpErr, peer: still},
	}
}

// manage returns registration, invalidation and binding (10.6, 11.4.4): "memory management operation error".
func (w *badWorld) manage() (all []badRequest) {
	reg := func(name string, f func(*guestdrv.Registration)) badRequest {
		return badRequest{name: name, ibta: "11.4.4.1, 10.6.4", kernel: true, status: guestdrv.WCMWBindErr,
			make: func() *request {
				x := mapped(w.tb, w.fast, w.mem, 100, 8192, 9, allAccess)
				f(x)
				return &request{Opcode: guestdrv.WRRegMR, Reg: x}
			}}
	}
	inv := func(name string, kernel bool, key func() uint32) badRequest {
		return badRequest{name: name, ibta: "10.6.5", kernel: kernel, status: guestdrv.WCMWBindErr, make: func() *request {
			return &request{Opcode: guestdrv.WRLocalInv, InvalidateKey: key()}
		}}
	}
	bind := func(name string, f func(*guestdrv.BindMW)) badRequest {
		return badRequest{name: name, ibta: "10.6.7.2, 11.4.4.2", status: guestdrv.WCMWBindErr, make: func() *request {
			x := &guestdrv.BindMW{Key: w.w2.Key(), NewKey: w.w2.Key() + 1, Region: w.sendBind.LKey(),
				Access: guestdrv.AccessRemoteRead, Addr: w.sendBind.Addr(), Length: 100}
			f(x)
			return &request{Opcode: guestdrv.WRBindMW, Bind: x}
		}}
	}
	asProcess := reg("register as a process", func(*guestdrv.Registration) {})
	asProcess.kernel, asProcess.status = false, guestdrv.WCLocQPOpErr
	real := bind("bind real addresses", func(x *guestdrv.BindMW) { x.Region, x.Addr = guestdrv.DMALKey, w.mem.PA() })
	real.kernel = true
	return []badRequest{
		asProcess, real,
		reg("no pages", func(x *guestdrv.Registration) { x.NPages = 0 }),
		reg("2^32-1 pages", func(x *guestdrv.Registration) { x.NPages = 1<<32 - 1 }),
		reg("more pages than room", func(x *guestdrv.Registration) { x.NPages = 5 }),
		reg("list beyond its page", func(x *guestdrv.Registration) { x.PageList += 4096 - 8 }),
		reg("list misaligned", func(x *guestdrv.Registration) { x.PageList += 4 }),
		reg("list outside of memory", func(x *guestdrv.Registration) { x.PageList = 1 << 60 }),
		reg("pages do not cover it", func(x *guestdrv.Registration) { x.Length = 1 << 40 }),
		reg("register another domain's region", func(x *guestdrv.Registration) { x.RKey = w.otherFast.Key() }),
		reg("register an ordinary region", func(x *guestdrv.Registration) { x.RKey = w.sendBind.LKey() }),
		reg("register no region", func(x *guestdrv.Registration) { x.RKey = 0xffffffff }),
		reg("register key 0", func(x *guestdrv.Registration) { x.RKey = 0 }),
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

// unreliable returns requests of UC (9.8.2): the requester gets no response to its message.
func (w *badWorld) unreliable() []badRequest {
	return []badRequest{
		{name: "write beyond the end", ibta: "9.8.2.2", wr: w.write(w.dmr, 8000, 500), recv: []guestdrv.SGE{}, peer: still},
		{name: "write without right", ibta: "9.8.2.2", wr: w.write(w.readOnly, 0, 100), recv: []guestdrv.SGE{}, peer: still},
		{name: "write, QP forbids", ibta: "9.8.2.2", wr: w.write(w.dmr, 0, 100), access: guestdrv.AccessLocalWrite,
			recv: []guestdrv.SGE{}, peer: still},
		{name: "no receive buffer", ibta: "9.8.2.2", wr: send(w.smr.SGE(0, 100))},
		{name: "receive buffer too short", ibta: "9.8.2.2, 9.9.3", wr: send(w.smr.SGE(0, 5000)),
			recv: []guestdrv.SGE{w.dmr.SGE(0, 4999)}, peer: still},
		{name: "receive buffer's key is bad", ibta: "9.9.3", wr: send(w.smr.SGE(0, 100)),
			recv: []guestdrv.SGE{{Addr: w.dst.Addr(), Length: 100, LKey: w.dmr.LKey() ^ 0x55}}, peer: guestdrv.WCLocProtErr,
			breaks: true},
		{name: "gather with a bad key", ibta: "9.9.2, 10.3.1.7",
			wr: send(guestdrv.SGE{Addr: w.src.Addr(), Length: 5, LKey: w.smr.LKey() ^ 0x55}), recv: []guestdrv.SGE{},
			status: guestdrv.WCLocProtErr, peer: still},
		{name: "read", ibta: "10.7.2, 10.3.1.7", wr: w.read(w.dmr, 0, 100), status: guestdrv.WCLocQPOpErr},
		{name: "atomic", ibta: "10.7.2, 10.3.1.7", wr: w.atomic(w.dmr, 0), status: guestdrv.WCLocQPOpErr},
		{name: "atomic write", ibta: "A19, 10.3.1.7", wr: w.atomicWrite(w.dmr, 0, 8), status: guestdrv.WCLocQPOpErr},
		{name: "unknown opcode", ibta: "10.7.2, 10.3.1.7", wr: &request{Opcode: 99}, status: guestdrv.WCLocQPOpErr},
	}
}

// datagrams returns requests of UD (9.8.3).
func (w *badWorld) datagrams() []badRequest {
	to := func(ah *guestdrv.AH, qkey uint32, n int) *request {
		return &request{Opcode: guestdrv.WRSend, SGL: []guestdrv.SGE{w.smr.SGE(0, n)}, AH: ah, QKey: qkey}
	}
	badKey := to(w.ah, 5, 10)
	badKey.SGL[0].LKey ^= 0x55
	return []badRequest{
		{name: "longer than the MTU", ibta: "9.8.3, 10.3.1.7", wr: to(w.ah, 5, 1025), status: guestdrv.WCLocLenErr},
		{name: "stale address handle", ibta: "10.2.2, 10.3.1.7", wr: to(w.staleAH, 5, 10), status: guestdrv.WCLocQPOpErr},
		{name: "another PD's address handle", ibta: "10.2.3, 10.3.1.7", wr: to(w.foreignAH, 5, 10),
			status: guestdrv.WCLocQPOpErr},
		{name: "gather with a bad key", ibta: "9.9.2, 10.3.1.7", wr: badKey, status: guestdrv.WCLocProtErr},
		{name: "another Q_Key", ibta: "9.6.1.4, 10.2.5", wr: to(w.ah, 6, 10), recv: []guestdrv.SGE{w.dmr.SGE(0, 100)},
			peer: still},
		{name: "no receive buffer", ibta: "9.8.3", wr: to(w.ah, 5, 10)},
		{name: "receive buffer too short", ibta: "9.8.3, 9.9.3", wr: to(w.ah, 5, 61), recv: []guestdrv.SGE{w.dmr.SGE(0, 100)},
			peer: still},
		{name: "receive buffer's key is bad", ibta: "9.9.3", wr: to(w.ah, 5, 10),
			recv: []guestdrv.SGE{{Addr: w.dst.Addr(), Length: 100, LKey: w.dmr.LKey() ^ 0x55}}, peer: guestdrv.WCLocProtErr,
			breaks: true},
	}
}

// TestErrors makes a request fail in every way that a peer, a key or the request can cause, and checks both sides:
// statuses, states, events, memory.
func TestErrors(t *testing.T) {
	w := newBadWorld(t)
	for _, x := range []struct {
		name string
		typ  guestdrv.QPType
		all  []badRequest
	}{
		{"RC", guestdrv.QPTypeRC, w.reliable()}, {"memory", guestdrv.QPTypeRC, w.manage()},
		{"verbs", guestdrv.QPTypeRC, w.everyVerb()}, {"UC", guestdrv.QPTypeUC, w.unreliable()},
		{"UD", guestdrv.QPTypeUD, w.datagrams()},
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
	st, err := w.hosts[1].Stats(bg)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []guestdrv.Stat{guestdrv.StatAccessErrors, guestdrv.StatTxNaks, guestdrv.StatTxRNR,
		guestdrv.StatRxDropped} {
		if st[n] == 0 {
			t.Errorf("errors were not counted: statistic %d", n)
		}
	}
}

func (b *badRequest) try(t *testing.T, w *badWorld, typ guestdrv.QPType) {
	ha, hb := w.hosts[0], w.hosts[1]
	c, o := qpDefaults(), quick
	c.Type, c.Privileged, o.Access = typ, b.kernel, b.access
	var a, p *end
	if typ == guestdrv.QPTypeUD {
		a, p = ha.udEnd(t, c, 5), hb.udEnd(t, c, 5)
	} else {
		cp := c
		if b.srq {
			srq, err := hb.pd.CreateSRQ(bg, guestdrv.SRQConfig{MaxWR: 4, MaxSGE: 1})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := srq.Close(); err != nil {
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
		if w.w1, err = ha.pd.AllocMW(bg, 1); err != nil {
			t.Fatal(err)
		}
		if w.w2, err = ha.pd.AllocMW(bg, 2); err != nil {
			t.Fatal(err)
		}
		defer func() {
			for _, f := range []func() error{w.fast.Close, w.w1.Close, w.w2.Close} {
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
	if typ == guestdrv.QPTypeRC {
		w.seen[cell{wr.Opcode, b.status}] = true
	}
	fill(w.src.Bytes(), 1)
	before := append([]byte{}, w.dst.Bytes()...)
	wr.ID, wr.Flags, wr.RemoteQPN = 10, 0, p.qp.Number() // unsignalled: failures are still reported
	behind := &request{ID: 11, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled}
	if typ == guestdrv.QPTypeUD {
		behind.AH, behind.RemoteQPN, behind.QKey = w.ah, 0xfffffe, 5
	}
	if err := queueSend(a.qp, wr); err != nil {
		t.Fatal(err)
	}
	a.recv(t, 12)
	local := guestdrv.QPRTS
	if b.status == guestdrv.WCSuccess {
		dropped := hb.dropped(t)
		a.qp.Ring()
		for ctx := ctxFor(t); !b.breaks && hb.dropped(t) == dropped; {
			if ctx.Err() != nil {
				t.Fatal("the peer did not drop the message")
			}
		}
	} else {
		if err := queueSend(a.qp, behind); err != nil {
			t.Fatal(err)
		}
		a.qp.Ring()
		expect(t, a.scq, 10, b.status, 0)
		expect(t, a.scq, 11, guestdrv.WCWRFlushErr, 0)
		// A failed send of an unreliable service stops the send queue only (10.3.1.7).
		local = guestdrv.QPSQE
		if typ == guestdrv.QPTypeRC {
			local = guestdrv.QPErr
			expect(t, a.rcq, 12, guestdrv.WCWRFlushErr, 0)
		}
	}
	if b.recv != nil && b.peer != still {
		expect(t, p.rcq, 50, b.peer, 0)
	}
	if b.event != 0 {
		hb.wantEvent(t, b.event, p.qp.Number())
	}
	if b.srq && b.breaks { // the rest of the SRQ is for other QPs (10.2.9.3, 11.6.3.2)
		hb.wantEvent(t, guestdrv.EventQPLastWQE, p.qp.Number())
	}
	b.goOn(t, w, a, p, typ, local)
	if b.peer != guestdrv.WCSuccess && b.peer != guestdrv.WCLocLenErr && typ == guestdrv.QPTypeRC &&
		!bytes.Equal(before, w.dst.Bytes()) {
		t.Error("the target was written to")
	}
}

func (h *host) dropped(tb testing.TB) uint64 {
	tb.Helper()
	st, err := h.Stats(bg)
	if err != nil {
		tb.Fatal(err)
	}
	return st[guestdrv.StatRxDropped]
}

// goOn checks the states and their effects.
func (b *badRequest) goOn(t *testing.T, w *badWorld, a, p *end, typ guestdrv.QPType, local guestdrv.QPState) {
	t.Helper()
	good := &request{ID: 13, Opcode: guestdrv.WRSend, Flags: guestdrv.SendSignaled}
	if typ == guestdrv.QPTypeUD {
		good.AH, good.RemoteQPN, good.QKey = w.ah, p.qp.Number(), 5
	}
	if s := a.state(t); s != local {
		t.Errorf("the QP is in state %d, want %d", s, local)
	}
	if local == guestdrv.QPErr {
		a.post(t, good) // requests posted in ERR are flushed as well
		expect(t, a.scq, 13, guestdrv.WCWRFlushErr, 0)
	}
	if local == guestdrv.QPSQE {
		if err := a.qp.Modify(bg, guestdrv.QPAttr{State: guestdrv.QPRTS}, guestdrv.QPAttrState); err != nil {
			t.Fatal(err)
		}
	}
	if !b.breaks && local != guestdrv.QPErr {
		// A good message after the bad one uses the receive that is still posted, or this one.
		if b.recv == nil {
			b.recv = []guestdrv.SGE{w.dmr.SGE(0, 100)}
			b.receive(t, p)
		}
		a.post(t, good)
		expect(t, a.scq, 13, guestdrv.WCSuccess, guestdrv.WCOpSend)
		if wc := expect(t, p.rcq, 50, guestdrv.WCSuccess, guestdrv.WCOpRecv); wc.ByteLen > grhLen {
			t.Errorf("the bad message consumed the receive: %+v", wc)
		}
	}
	if b.alone {
		return
	}
	want := guestdrv.QPRTS
	if b.breaks {
		want = guestdrv.QPErr
	}
	if s := p.state(t); s != want {
		t.Errorf("the peer's QP is in state %d, want %d", s, want)
	}
}
