package guestdrv_test

import (
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/guestdrv"
)

// operation is an operation of RC and the errors that it can have.
type operation struct {
	name string
	op   guestdrv.Opcode
	data int             // bytes that it gathers
	into int             // bytes that it scatters
	need guestdrv.Access // right needed at the peer; 0: it accesses no memory there
	recv bool            // it consumes a receive
}

var operations = []operation{
	{name: "SEND", op: guestdrv.WRSend, data: 64, recv: true},
	{name: "SEND with immediate", op: guestdrv.WRSendWithImm, data: 64, recv: true},
	{name: "SEND with invalidate", op: guestdrv.WRSendWithInv, data: 64, recv: true},
	{name: "WRITE", op: guestdrv.WRRDMAWrite, data: 64, need: guestdrv.AccessRemoteWrite},
	{name: "WRITE with immediate", op: guestdrv.WRRDMAWriteWithImm, data: 64, need: guestdrv.AccessRemoteWrite,
		recv: true},
	{name: "READ", op: guestdrv.WRRDMARead, into: 64, need: guestdrv.AccessRemoteRead},
	{name: "compare and swap", op: guestdrv.WRAtomicCmpAndSwp, into: 8, need: guestdrv.AccessRemoteAtomic},
	{name: "fetch and add", op: guestdrv.WRAtomicFetchAndAdd, into: 8, need: guestdrv.AccessRemoteAtomic},
	{name: "ATOMIC WRITE", op: guestdrv.WRAtomicWrite, data: 8, need: guestdrv.AccessRemoteWrite},
	{name: "FLUSH", op: guestdrv.WRFlush, need: guestdrv.AccessFlushGlobal},
}

// managing are the verbs that send nothing: table "memory" has their errors.
var managing = []guestdrv.Opcode{guestdrv.WRLocalInv, guestdrv.WRBindMW, guestdrv.WRRegMR}

// request makes v's request, from and to good memory, with key as R_Key.
func (w *badWorld) request(v *operation, key uint32) *request {
	wr := &request{Opcode: v.op, RemoteAddr: w.dmr.Addr(), RKey: key,
		Flush: guestdrv.Flush{Length: 64, Placement: guestdrv.FlushGlobal}}
	if n := v.data + v.into; n > 0 {
		wr.SGL = []guestdrv.SGE{w.smr.SGE(0, n)}
	}
	if v.op == guestdrv.WRSendWithInv {
		wr.InvalidateKey = key
	}
	return wr
}

// everyVerb combines verbs with the errors of IBTA 11.6.2 that a program can provoke; impossible names the others, with
// reasons. Bad responses and local access errors need a peer that is not this device; device/rdma/roce tests them.
func (w *badWorld) everyVerb() (all []badRequest) {
	good := w.dmr.RKey()
	for i := range operations {
		v := &operations[i]
		add := func(what string, b badRequest) {
			b.name = v.name + ": " + what
			if b.wr == nil {
				b.wr = w.request(v, good)
			}
			all = append(all, b)
			if v.recv && (b.status == guestdrv.WCRemInvReqErr || b.status == guestdrv.WCRemOpErr ||
				b.status == guestdrv.WCRNRRetryExcErr) {
				b.name, b.srq = b.name+", SRQ", true
				wr := *b.wr
				b.wr = &wr
				all = append(all, b)
			}
		}
		if v.data+v.into > 0 {
			wr := w.request(v, good)
			wr.SGL[0].LKey ^= 0x55
			b := badRequest{ibta: "9.9.2, 10.6.3", wr: wr, status: guestdrv.WCLocProtErr}
			if v.recv {
				b.recv, b.peer = []guestdrv.SGE{w.dmr.SGE(0, 100)}, still
			}
			add("bad L_Key", b)

			wr = w.request(v, good)
			switch {
			case v.op == guestdrv.WRAtomicWrite:
				wr.SGL[0].Length = 16
			case v.into == 8:
				wr.SGL[0].Length = 7
			default: // nothing is checked before
				wr.SGL = []guestdrv.SGE{{Addr: w.src.Addr(), Length: 1 << 31, LKey: w.smr.LKey()}, w.smr.SGE(0, 1)}
			}
			add("wrong length", badRequest{ibta: "9.7.7, 9.9.2, A19", wr: wr, status: guestdrv.WCLocLenErr})
		}
		if v.into > 0 || v.op == guestdrv.WRAtomicWrite || v.op == guestdrv.WRFlush {
			add("max_rd_atomic is 0", badRequest{ibta: "9.7.8.1, 11.2.5.2", noRd: true, status: guestdrv.WCLocQPOpErr})
		}
		if v.need != 0 {
			other := guestdrv.AccessRemoteRead
			if v.need == other {
				other = guestdrv.AccessRemoteWrite
			}
			add("QP forbids", refusedRequest(badRequest{ibta: "9.7.4.1.5, 11.2.5.2", access: other}))
			for _, r := range []struct {
				what, ibta string
				key        uint32
			}{
				{"no such R_Key", "9.9.3, 10.6.3", good ^ 0x55}, {"stale R_Key", "9.9.3, 10.6.5", w.gone.RKey()},
				{"reserved R_Key", "9.9.3, 10.6.3", guestdrv.DMALKey},
				{"R_Key of another PD", "9.9.3, 10.2.3", w.foreign.RKey()},
				{"region without the right", "9.9.3, 10.6.3", w.local.RKey()},
			} {
				b := refusedAccess(badRequest{ibta: r.ibta, wr: w.request(v, r.key)})
				if v.recv { // posted, not consumed: flushed in ERR
					b.recv = []guestdrv.SGE{}
				}
				add(r.what, b)
			}
			wr := w.request(v, good)
			wr.RemoteAddr += 8192
			add("beyond the region", refusedAccess(badRequest{ibta: "9.9.3, 9.7.4.1.5", wr: wr}))
		}
		switch {
		case v.op == guestdrv.WRSendWithInv:
			add("key is no window's", refusedInvalidation(badRequest{ibta: "9.9.3, 10.6.5",
				recv: []guestdrv.SGE{w.dmr.SGE(0, 100)}}))
			fallthrough
		case v.recv && v.need == 0:
			short := badRequest{ibta: "9.7.5.2, 9.9.3", recv: []guestdrv.SGE{w.dmr.SGE(0, 63)}, status: guestdrv.WCRemInvReqErr,
				peer: guestdrv.WCLocLenErr, breaks: true}
			add("receive too short", short)
			bad := badRequest{ibta: "9.7.5.2, 9.9.3", recv: []guestdrv.SGE{{Addr: w.dst.Addr(), Length: 100,
				LKey: w.dmr.LKey() ^ 0x55}}, status: guestdrv.WCRemOpErr, peer: guestdrv.WCLocProtErr, breaks: true}
			add("receive's L_Key is bad", bad)
		}
		if v.recv {
			add("no receive", badRequest{ibta: "9.7.5.2.8", status: guestdrv.WCRNRRetryExcErr})
		}
		add("no peer", badRequest{ibta: "9.7.6.1.3, 9.9.2", alone: true, status: guestdrv.WCRetryExcErr})
		add("in ERR", badRequest{ibta: "10.3.1.8, 10.8.6", flushed: true, status: guestdrv.WCWRFlushErr})
	}
	return all
}

// prepare brings two connected ends into the state for the request.
func (b *badRequest) prepare(t *testing.T, a, p *end) {
	t.Helper()
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	if b.noRd {
		ok(a.qp.Modify(bg, guestdrv.QPAttr{State: guestdrv.QPSQD}, guestdrv.QPAttrState))
		ok(a.qp.Modify(bg, guestdrv.QPAttr{State: guestdrv.QPSQD}, guestdrv.QPAttrState|guestdrv.QPAttrMaxQPRdAtomic))
		ok(a.qp.Modify(bg, guestdrv.QPAttr{State: guestdrv.QPRTS}, guestdrv.QPAttrState))
	}
	if b.flushed {
		ok(a.qp.ToErr(bg))
	}
	if b.alone {
		destroy(t, p)
	}
}

// receive posts b's receive, which is number 50.
func (b *badRequest) receive(t *testing.T, p *end) {
	t.Helper()
	if !b.srq {
		p.recv(t, 50, b.recv...)
	} else if err := p.srq.PostRecv(&guestdrv.RecvWR{ID: 50, SGL: b.recv}); err != nil {
		t.Fatal(err)
	}
}

// cell is a place in the table of RC's verbs and statuses.
type cell struct {
	op     guestdrv.Opcode
	status guestdrv.WCStatus
}

// impossible returns why a verb of RC cannot end with a status, with a reason per verb where it differs. Every other
// cell must have been tested.
func (v *operation) impossible(status guestdrv.WCStatus) string {
	switch {
	case status == abi.WCLocEECOpErr, status == abi.WCLocRDDViolErr, status == abi.WCRemInvRdReqErr,
		status == guestdrv.WCRemAbortErr, status == abi.WCInvEECNErr, status == abi.WCInvEECStateErr:
		return "of reliable datagrams, which RoCE does not have (A16)"
	case status == guestdrv.WCFatalErr, status == guestdrv.WCRespTimeoutErr, status == guestdrv.WCGeneralErr:
		return "of Linux, for failures of hardware"
	case status == guestdrv.WCMWBindErr:
		return "of registration, invalidation and binding"
	case status == guestdrv.WCBadRespErr:
		return "a peer with wrong responses: TestRequesterResponses in device/rdma/roce"
	case status == guestdrv.WCLocAccessErr:
		return "of receives: TestResponderImmAccess in device/rdma/roce"
	case v.data+v.into == 0 && (status == guestdrv.WCLocProtErr || status == guestdrv.WCLocLenErr):
		return "it accesses no local memory"
	case status == guestdrv.WCLocQPOpErr && v.into == 0 && v.op != guestdrv.WRAtomicWrite && v.op != guestdrv.WRFlush:
		return "every RC QP carries it; posting refuses requests that do not fit into the ring, or an unknown opcode"
	case v.need == 0 && v.op != guestdrv.WRSendWithInv && status == guestdrv.WCRemAccessErr:
		return "it accesses no memory there"
	case status == guestdrv.WCRemOpErr && (!v.recv || v.need != 0):
		return "it writes to no memory of a receive"
	case status == guestdrv.WCRNRRetryExcErr && !v.recv:
		return "it consumes no receive, and a wait for a page uses up no rnr_retry (HF-1)"
	}
	return ""
}

// complete checks that every cell of the table was tested, or is impossible.
func (w *badWorld) complete(t *testing.T) {
	for i := range operations {
		v := &operations[i]
		for s := guestdrv.WCLocLenErr; s <= guestdrv.WCGeneralErr; s++ {
			seen, why := w.seen[cell{v.op, s}], v.impossible(s)
			if seen == (why != "") {
				t.Errorf("%s was seen to end with %q: %v; said to be impossible: %q", v.name, s, seen, why)
			}
		}
	}
	for _, op := range managing {
		if !w.seen[cell{op, guestdrv.WCMWBindErr}] {
			t.Errorf("opcode %d was not seen to end with %q", op, guestdrv.WCMWBindErr)
		}
	}
}
