package roce

import (
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// sendOps gives the operations of the packets of a message, as RC opcodes; UC's
// are ucOpcode higher.
type sendOps struct{ first, middle, last, only wire.Opcode }

const ucOpcode wire.Opcode = 0x20

func (o *sendOps) pick(first, last bool) wire.Opcode {
	switch {
	case first && last:
		return o.only
	case first:
		return o.first
	case last:
		return o.last
	}
	return o.middle
}

// wrInfo describes the opcode of a work request.
type wrInfo struct {
	kind     opKind
	wc       WCOpcode
	ops      sendOps
	imm      bool
	inv      bool
	uc       bool // UC carries it
	afterAll bool // is executed after all WQEs before it have completed
	ud       bool // UD carries it
}

// wrTable is the allow-list of work request opcodes; the others have kindBad.
var wrTable = [WRRegMR + 2]wrInfo{
	WRWrite: {kind: kindWrite, wc: WCWrite, uc: true,
		ops: sendOps{wire.OpRCWriteFirst, wire.OpRCWriteMiddle, wire.OpRCWriteLast, wire.OpRCWriteOnly}},
	WRWriteImm: {kind: kindWrite, wc: WCWrite, imm: true, uc: true,
		ops: sendOps{wire.OpRCWriteFirst, wire.OpRCWriteMiddle, wire.OpRCWriteLastImm, wire.OpRCWriteOnlyImm}},
	WRSend: {kind: kindSend, wc: WCSend, uc: true, ud: true,
		ops: sendOps{wire.OpRCSendFirst, wire.OpRCSendMiddle, wire.OpRCSendLast, wire.OpRCSendOnly}},
	WRSendImm: {kind: kindSend, wc: WCSend, imm: true, uc: true, ud: true,
		ops: sendOps{wire.OpRCSendFirst, wire.OpRCSendMiddle, wire.OpRCSendLastImm, wire.OpRCSendOnlyImm}},
	WRSendInv: {kind: kindSend, wc: WCSend, inv: true,
		ops: sendOps{wire.OpRCSendFirst, wire.OpRCSendMiddle, wire.OpRCSendLastInv, wire.OpRCSendOnlyInv}},
	WRLocalInv:    {kind: kindManage, wc: WCLocalInv, afterAll: true},
	WRBindMW:      {kind: kindManage, wc: WCBindMW, uc: true, afterAll: true},
	WRRegMR:       {kind: kindManage, wc: WCRegMR},
	WRRead:        {kind: kindRead, wc: WCRead, ops: sendOps{only: wire.OpRCReadRequest}},
	WRCompareSwap: {kind: kindAtomic, wc: WCCompareSwap, ops: sendOps{only: wire.OpRCCompareSwap}},
	WRFetchAdd:    {kind: kindAtomic, wc: WCFetchAdd, ops: sendOps{only: wire.OpRCFetchAdd}},
	WRFlush:       {kind: kindFlush, wc: WCFlush, ops: sendOps{only: wire.OpRCFlush}},
	WRAtomicWrite: {kind: kindAtomicWrite, wc: WCAtomicWrite, ops: sendOps{only: wire.OpRCAtomicWrite}},
}

var readOps = sendOps{
	wire.OpRCReadResponseFirst, wire.OpRCReadResponseMid, wire.OpRCReadResponseLast, wire.OpRCReadResponseOnly,
}

func (o WROpcode) info() *wrInfo {
	if int(o) < len(wrTable) {
		return &wrTable[o]
	}
	return &wrTable[len(wrTable)-1] // kindBad
}

// opKind groups work requests by how they are acknowledged.
type opKind uint8

const (
	kindBad opKind = iota
	kindSend
	kindWrite
	kindManage      // memory management: executed here, sends nothing
	kindFlush       // answered by a READ response without data (A19)
	kindAtomicWrite // the same
	kindRead        // answered by READ responses
	kindAtomic      // answered by an ATOMIC acknowledge
)

// needsResponse reports whether only an explicit response completes the request.
func (k opKind) needsResponse() bool { return k >= kindFlush }

// returnsData reports whether the response carries data.
func (k opKind) returnsData() bool { return k >= kindRead }
