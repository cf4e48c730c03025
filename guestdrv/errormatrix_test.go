package guestdrv_test

import (
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/guestdrv"
)

// operation is an operation of RC and what errors it can meet.
type operation struct {
	name string
	op   uint32
	data int    // bytes that it gathers
	into int    // bytes that it scatters
	need uint32 // right at the peer; 0: it names no memory there
	recv bool   // it takes a receive
}

var operations = []operation{
	{name: "SEND", op: abi.WRSend, data: 64, recv: true},
	{name: "SEND with immediate", op: abi.WRSendWithImm, data: 64, recv: true},
	{name: "SEND with invalidate", op: abi.WRSendWithInv, data: 64, recv: true},
	{name: "WRITE", op: abi.WRRDMAWrite, data: 64, need: abi.AccessRemoteWrite},
	{name: "WRITE with immediate", op: abi.WRRDMAWriteWithImm, data: 64, need: abi.AccessRemoteWrite, recv: true},
	{name: "READ", op: abi.WRRDMARead, into: 64, need: abi.AccessRemoteRead},
	{name: "compare and swap", op: abi.WRAtomicCmpAndSwp, into: 8, need: abi.AccessRemoteAtomic},
	{name: "fetch and add", op: abi.WRAtomicFetchAndAdd, into: 8, need: abi.AccessRemoteAtomic},
	{name: "ATOMIC WRITE", op: abi.WRAtomicWrite, data: 8, need: abi.AccessRemoteWrite},
	{name: "FLUSH", op: abi.WRFlush, need: abi.AccessFlushGlobal},
}

// managing are the verbs that send nothing: table "memory" has them.
var managing = []uint32{abi.WRLocalInv, abi.WRBindMW, abi.WRRegMR}

// request makes v's, from and to good memory, with key as R_Key.
func (w *badWorld) request(v *operation, key uint32) *guestdrv.SendWR {
	wr := &guestdrv.SendWR{Opcode: v.op, RemoteAddr: w.dmr.Addr(), RKey: key, Flush: guestdrv.Flush{Length: 64, Placement: abi.FlushGlobal}}
	if n := v.data + v.into; n > 0 {
		wr.SGL = []abi.SGE{w.smr.SGE(0, n)}
	}
	if v.op == abi.WRSendWithInv {
		wr.InvalidateKey = key
	}
	return wr
}

// everyVerb crosses verbs with the errors of IBTA 11.6.2 that a program can provoke. What it cannot, and why:
// impossible. Bad responses and local access errors need a peer that is not this device: device/rdma/roce has them.
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
			if v.recv && (b.status == abi.WCRemInvReqErr || b.status == abi.WCRemOpErr || b.status == abi.WCRNRRetryExcErr) {
				b.name, b.srq = b.name+", SRQ", true
				wr := *b.wr
				b.wr = &wr
				all = append(all, b)
			}
		}
		if v.data+v.into > 0 {
			wr := w.request(v, good)
			wr.SGL[0].LKey ^= 0x55
			b := badRequest{ibta: "9.9.2, 10.6.3", wr: wr, status: abi.WCLocProtErr}
			if v.recv {
				b.recv, b.peer = []abi.SGE{w.dmr.SGE(0, 100)}, still
			}
			add("bad L_Key", b)

			wr = w.request(v, good)
			switch {
			case v.op == abi.WRAtomicWrite:
				wr.SGL[0].Length = 16
			case v.into == 8:
				wr.SGL[0].Length = 7
			default: // nothing is looked at before
				wr.SGL = []abi.SGE{{Addr: w.src.Addr(), Length: 1 << 31, LKey: w.smr.LKey()}, w.smr.SGE(0, 1)}
			}
			add("wrong length", badRequest{ibta: "9.7.7, 9.9.2, A19", wr: wr, status: abi.WCLocLenErr})
		}
		if v.into > 0 || v.op == abi.WRAtomicWrite || v.op == abi.WRFlush {
			add("max_rd_atomic is 0", badRequest{ibta: "9.7.8.1, 11.2.5.2", noRd: true, status: abi.WCLocQPOpErr})
		}
		if v.need != 0 {
			other := uint32(abi.AccessRemoteRead)
			if v.need == other {
				other = abi.AccessRemoteWrite
			}
			add("QP forbids", refusedRequest(badRequest{ibta: "9.7.4.1.5, 11.2.5.2", access: other}))
			for _, r := range []struct {
				what, ibta string
				key        uint32
			}{
				{"no such R_Key", "9.9.3, 10.6.3", good ^ 0x55}, {"stale R_Key", "9.9.3, 10.6.5", w.gone.RKey()}, {"reserved R_Key", "9.9.3, 10.6.3", abi.DMALKey},
				{"R_Key of another PD", "9.9.3, 10.2.3", w.foreign.RKey()}, {"region without the right", "9.9.3, 10.6.3", w.local.RKey()},
			} {
				b := refusedAccess(badRequest{ibta: r.ibta, wr: w.request(v, r.key)})
				if v.recv { // it was posted, not taken: what a QP in ERR does with those
					b.recv = []abi.SGE{}
				}
				add(r.what, b)
			}
			wr := w.request(v, good)
			wr.RemoteAddr += 8192
			add("beyond the region", refusedAccess(badRequest{ibta: "9.9.3, 9.7.4.1.5", wr: wr}))
		}
		switch {
		case v.op == abi.WRSendWithInv:
			add("key is no window's", refusedInvalidation(badRequest{ibta: "9.9.3, 10.6.5", recv: []abi.SGE{w.dmr.SGE(0, 100)}}))
			fallthrough
		case v.recv && v.need == 0:
			short := badRequest{ibta: "9.7.5.2, 9.9.3", recv: []abi.SGE{w.dmr.SGE(0, 63)}, status: abi.WCRemInvReqErr, peer: abi.WCLocLenErr, breaks: true}
			add("receive too short", short)
			bad := badRequest{ibta: "9.7.5.2, 9.9.3", recv: []abi.SGE{{Addr: w.dst.Addr(), Length: 100, LKey: w.dmr.LKey() ^ 0x55}}, status: abi.WCRemOpErr, peer: abi.WCLocProtErr, breaks: true}
			add("receive's L_Key is bad", bad)
		}
		if v.recv {
			add("no receive", badRequest{ibta: "9.7.5.2.8", status: abi.WCRNRRetryExcErr})
		}
		add("no peer", badRequest{ibta: "9.7.6.1.3, 9.9.2", alone: true, status: abi.WCRetryExcErr})
		add("in ERR", badRequest{ibta: "10.3.1.8, 10.8.6", flushed: true, status: abi.WCWRFlushErr})
	}
	return all
}

// prepare makes of two connected ends what the request is to meet.
func (b *badRequest) prepare(t *testing.T, a, p *end) {
	t.Helper()
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	if b.noRd {
		ok(a.qp.Modify(abi.QPAttr{QPState: abi.QPSQD}, abi.QPAttrState))
		ok(a.qp.Modify(abi.QPAttr{QPState: abi.QPSQD}, abi.QPAttrState|abi.QPAttrMaxQPRdAtomic))
		ok(a.qp.Modify(abi.QPAttr{QPState: abi.QPRTS}, abi.QPAttrState))
	}
	if b.flushed {
		ok(a.qp.ToErr())
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
type cell struct{ op, status uint32 }

// impossible says why a verb of RC cannot end with a status, by verb where it is one's own reason. Every other cell must
// have been tried.
func (v *operation) impossible(status uint32) string {
	switch {
	case status == abi.WCLocEECOpErr, status == abi.WCLocRDDViolErr, status == abi.WCRemInvRdReqErr, status == abi.WCRemAbortErr,
		status == abi.WCInvEECNErr, status == abi.WCInvEECStateErr:
		return "of reliable datagrams, which RoCE does not have (A16)"
	case status == abi.WCFatalErr, status == abi.WCRespTimeoutErr, status == abi.WCGeneralErr:
		return "of Linux, for failures of hardware"
	case status == abi.WCMWBindErr:
		return "of registration, invalidation and binding"
	case status == abi.WCBadRespErr:
		return "a peer that answers wrong: TestRequesterResponses in device/rdma/roce"
	case status == abi.WCLocAccessErr:
		return "of receives: TestResponderImmAccess in device/rdma/roce"
	case v.data+v.into == 0 && (status == abi.WCLocProtErr || status == abi.WCLocLenErr):
		return "it has no memory here"
	case status == abi.WCLocQPOpErr && v.into == 0 && v.op != abi.WRAtomicWrite && v.op != abi.WRFlush:
		return "every RC QP carries it; what does not fit into the ring is refused at posting, or an unknown opcode"
	case v.need == 0 && v.op != abi.WRSendWithInv && status == abi.WCRemAccessErr:
		return "it names no memory there"
	case status == abi.WCRemOpErr && (!v.recv || v.need != 0):
		return "it uses no memory of a receive there"
	case status == abi.WCRNRRetryExcErr && !v.recv && v.op != abi.WRRDMAWrite:
		return "it takes no receive, and what waits for a page is not told before its timeout"
	}
	return ""
}

// complete sees that every cell of the table was tried, or cannot be.
func (w *badWorld) complete(t *testing.T) {
	for i := range operations {
		v := &operations[i]
		for s := uint32(abi.WCLocLenErr); s <= abi.WCGeneralErr; s++ {
			seen, why := w.seen[cell{v.op, s}], v.impossible(s)
			if seen == (why != "") {
				t.Errorf("%s was seen to end with %q: %v; said to be impossible: %q", v.name, abi.WCStatusString(s), seen, why)
			}
		}
	}
	for _, op := range managing {
		if !w.seen[cell{op, abi.WCMWBindErr}] {
			t.Errorf("opcode %d was not seen to end with %q", op, abi.WCStatusString(abi.WCMWBindErr))
		}
	}
}
