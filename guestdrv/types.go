package guestdrv

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// The numbers of all types in this file are those of verbs (include/rdma/ib_verbs.h of Linux).

// Opcode is the operation of a send request, see SendWR.Opcode.
type Opcode uint32

// The operations. See the constructors of SendWR.
const (
	WRRDMAWrite         Opcode = abi.WRRDMAWrite
	WRRDMAWriteWithImm  Opcode = abi.WRRDMAWriteWithImm
	WRSend              Opcode = abi.WRSend
	WRSendWithImm       Opcode = abi.WRSendWithImm
	WRRDMARead          Opcode = abi.WRRDMARead
	WRAtomicCmpAndSwp   Opcode = abi.WRAtomicCmpAndSwp
	WRAtomicFetchAndAdd Opcode = abi.WRAtomicFetchAndAdd
	WRLocalInv          Opcode = abi.WRLocalInv
	WRBindMW            Opcode = abi.WRBindMW
	WRSendWithInv       Opcode = abi.WRSendWithInv
	WRFlush             Opcode = abi.WRFlush
	WRAtomicWrite       Opcode = abi.WRAtomicWrite
	WRRegMR             Opcode = abi.WRRegMR
)

var opcodeNames = map[Opcode]string{
	WRRDMAWrite: "RDMA_WRITE", WRRDMAWriteWithImm: "RDMA_WRITE_WITH_IMM", WRSend: "SEND", WRSendWithImm: "SEND_WITH_IMM",
	WRRDMARead: "RDMA_READ", WRAtomicCmpAndSwp: "ATOMIC_CMP_AND_SWP", WRAtomicFetchAndAdd: "ATOMIC_FETCH_AND_ADD",
	WRLocalInv: "LOCAL_INV", WRBindMW: "BIND_MW", WRSendWithInv: "SEND_WITH_INV", WRFlush: "FLUSH",
	WRAtomicWrite: "ATOMIC_WRITE", WRRegMR: "REG_MR",
}

func (o Opcode) String() string { return name(opcodeNames, o, "opcode") }

// SendFlags modify a send request, see SendWR.With.
type SendFlags uint32

// The flags. Inline data needs none: it is in SendWR.Inline.
const (
	SendFence     SendFlags = abi.SendFence     // start only when all earlier READs and atomics of the QP are complete
	SendSignaled  SendFlags = abi.SendSignaled  // write a completion on success, too
	SendSolicited SendFlags = abi.SendSolicited // raise an event at a peer that armed its CQ for solicited completions

	sendInline SendFlags = abi.SendInline
)

func (f SendFlags) String() string {
	return flagNames(uint64(f), []string{"fence", "signaled", "solicited", "inline"})
}

// WCStatus is the status of a completion. Every value but WCSuccess and WCWRFlushErr means that the QP left RTS.
type WCStatus uint32

// The statuses (IBTA 11.6.2).
const (
	WCSuccess        WCStatus = abi.WCSuccess
	WCLocLenErr      WCStatus = abi.WCLocLenErr      // wrong length, or a message longer than the receive request
	WCLocQPOpErr     WCStatus = abi.WCLocQPOpErr     // malformed, or not possible on this QP
	WCLocProtErr     WCStatus = abi.WCLocProtErr     // an SGE's L_Key, range or rights
	WCWRFlushErr     WCStatus = abi.WCWRFlushErr     // the QP went to ERR or SQE before the request was complete
	WCMWBindErr      WCStatus = abi.WCMWBindErr      // NewBind, NewRegister or NewLocalInvalidate was refused
	WCBadRespErr     WCStatus = abi.WCBadRespErr     // malformed response of the peer
	WCLocAccessErr   WCStatus = abi.WCLocAccessErr   // of a receive: a peer's NewWriteImm was denied access
	WCRemInvReqErr   WCStatus = abi.WCRemInvReqErr   // the peer rejects the request, such as a message too long for it
	WCRemAccessErr   WCStatus = abi.WCRemAccessErr   // the peer denies access: R_Key, range or rights
	WCRemOpErr       WCStatus = abi.WCRemOpErr       // the peer failed to execute the request
	WCRetryExcErr    WCStatus = abi.WCRetryExcErr    // the peer did not answer, see ConnectOptions.RetryCnt
	WCRNRRetryExcErr WCStatus = abi.WCRNRRetryExcErr // the peer was not ready, see ConnectOptions.RNRRetry

	// The device does not report these.
	WCRemAbortErr    WCStatus = abi.WCRemAbortErr
	WCFatalErr       WCStatus = abi.WCFatalErr
	WCRespTimeoutErr WCStatus = abi.WCRespTimeoutErr
	WCGeneralErr     WCStatus = abi.WCGeneralErr
)

// Error describes the status. Every value but WCSuccess is a sentinel error for errors.Is, see Completion.Err.
func (s WCStatus) Error() string { return s.String() }

func (s WCStatus) String() string { return abi.WCStatusString(uint32(s)) }

// WCOpcode is the operation that a completion reports. It is valid if the status is WCSuccess.
type WCOpcode uint32

// The operations. Both receive opcodes have the bit WCOpRecv.
const (
	WCOpSend            WCOpcode = abi.WCOpSend
	WCOpRDMAWrite       WCOpcode = abi.WCOpRDMAWrite
	WCOpRDMARead        WCOpcode = abi.WCOpRDMARead
	WCOpCompSwap        WCOpcode = abi.WCOpCompSwap
	WCOpFetchAdd        WCOpcode = abi.WCOpFetchAdd
	WCOpBindMW          WCOpcode = abi.WCOpBindMW
	WCOpLocalInv        WCOpcode = abi.WCOpLocalInv
	WCOpFlush           WCOpcode = abi.WCOpFlush
	WCOpAtomicWrite     WCOpcode = abi.WCOpAtomicWrite
	WCOpRegMR           WCOpcode = abi.WCOpRegMR
	WCOpRecv            WCOpcode = abi.WCOpRecv
	WCOpRecvRDMAWithImm WCOpcode = abi.WCOpRecvRDMAWithImm
)

var wcOpcodeNames = map[WCOpcode]string{
	WCOpSend: "SEND", WCOpRDMAWrite: "RDMA_WRITE", WCOpRDMARead: "RDMA_READ", WCOpCompSwap: "COMP_SWAP",
	WCOpFetchAdd: "FETCH_ADD", WCOpBindMW: "BIND_MW", WCOpLocalInv: "LOCAL_INV", WCOpFlush: "FLUSH",
	WCOpAtomicWrite: "ATOMIC_WRITE", WCOpRegMR: "REG_MR", WCOpRecv: "RECV", WCOpRecvRDMAWithImm: "RECV_RDMA_WITH_IMM",
}

func (o WCOpcode) String() string { return name(wcOpcodeNames, o, "opcode") }

// WCFlags say which fields of a completion are valid.
type WCFlags uint32

// The flags.
const (
	WCFlagGRH     WCFlags = abi.WCFlagGRH     // UD: the first 40 bytes of the buffer are a GRH
	WCFlagWithImm WCFlags = abi.WCFlagWithImm // Imm is valid
	// WCFlagWithInvalidate marks a message that invalidated an R_Key, see Completion.InvalidatedKey.
	WCFlagWithInvalidate WCFlags = abi.WCFlagsInvalidate
)

func (f WCFlags) String() string {
	return flagNames(uint64(f), []string{"GRH", "immediate", "invalidate", "", "SMAC", "VLAN", "network header type"})
}

// QPType is the transport service of a QP.
type QPType uint32

// The types.
const (
	QPTypeGSI QPType = abi.QPTypeGSI // QP 1, for connection managers
	QPTypeRC  QPType = abi.QPTypeRC  // reliable connection
	QPTypeUC  QPType = abi.QPTypeUC  // unreliable connection
	QPTypeUD  QPType = abi.QPTypeUD  // unreliable datagram
)

var qpTypeNames = map[QPType]string{QPTypeGSI: "GSI", QPTypeRC: "RC", QPTypeUC: "UC", QPTypeUD: "UD"}

func (t QPType) String() string { return name(qpTypeNames, t, "QP type") }

// QPState is a state of a QP (IBTA 10.3.1).
type QPState uint8

// The states.
const (
	QPReset QPState = abi.QPReset
	QPInit  QPState = abi.QPInit
	QPRTR   QPState = abi.QPRTR // ready to receive
	QPRTS   QPState = abi.QPRTS // ready to send
	QPSQD   QPState = abi.QPSQD // send queue drained
	QPSQE   QPState = abi.QPSQE // send queue error; UC and UD
	QPErr   QPState = abi.QPErr
)

var qpStateNames = map[QPState]string{
	QPReset: "RESET", QPInit: "INIT", QPRTR: "RTR", QPRTS: "RTS", QPSQD: "SQD", QPSQE: "SQE", QPErr: "ERR",
}

func (s QPState) String() string { return name(qpStateNames, s, "QP state") }

// QPAttrMask names attributes of a QP, see QPAttr.
type QPAttrMask uint32

// The attributes.
const (
	QPAttrState            QPAttrMask = abi.QPAttrState
	QPAttrCurState         QPAttrMask = abi.QPAttrCurState
	QPAttrEnSQDAsyncNotify QPAttrMask = abi.QPAttrEnSQDAsyncNotify
	QPAttrAccessFlags      QPAttrMask = abi.QPAttrAccessFlags
	QPAttrPKeyIndex        QPAttrMask = abi.QPAttrPKeyIndex
	QPAttrPort             QPAttrMask = abi.QPAttrPort
	QPAttrQKey             QPAttrMask = abi.QPAttrQKey
	QPAttrAV               QPAttrMask = abi.QPAttrAV
	QPAttrPathMTU          QPAttrMask = abi.QPAttrPathMTU
	QPAttrTimeout          QPAttrMask = abi.QPAttrTimeout
	QPAttrRetryCnt         QPAttrMask = abi.QPAttrRetryCnt
	QPAttrRNRRetry         QPAttrMask = abi.QPAttrRNRRetry
	QPAttrRQPSN            QPAttrMask = abi.QPAttrRQPSN
	QPAttrMaxQPRdAtomic    QPAttrMask = abi.QPAttrMaxQPRdAtomic
	QPAttrMinRNRTimer      QPAttrMask = abi.QPAttrMinRNRTimer
	QPAttrSQPSN            QPAttrMask = abi.QPAttrSQPSN
	QPAttrMaxDestRdAtomic  QPAttrMask = abi.QPAttrMaxDestRdAtomic
	QPAttrDestQPN          QPAttrMask = abi.QPAttrDestQPN
)

func (m QPAttrMask) String() string {
	return flagNames(uint64(m), []string{
		"state", "current state", "SQD notification", "access", "P_Key index", "port", "Q_Key", "path", "path MTU", "timeout",
		"retry count", "RNR retry", "RQ PSN", "max rd atomic", "alternate path", "min RNR timer", "SQ PSN",
		"max dest rd atomic", "path migration", "capabilities", "destination QPN",
	})
}

// MTU is a path MTU of RoCE.
type MTU uint8

// The path MTUs.
const (
	MTU256  MTU = abi.MTU256
	MTU512  MTU = abi.MTU512
	MTU1024 MTU = abi.MTU1024
	MTU2048 MTU = abi.MTU2048
	MTU4096 MTU = abi.MTU4096
)

// MTUFromBytes returns the largest MTU of at most n bytes, or 0 if n is less than 256.
func MTUFromBytes(n int) MTU { return MTU(abi.MTUFromBytes(n)) }

// Bytes returns the MTU in bytes, or 0 if it is none of the constants.
func (m MTU) Bytes() int { return abi.MTUBytes(uint8(m)) }

func (m MTU) String() string { return strconv.Itoa(m.Bytes()) }

// Access is a set of rights of a region, a window or a QP.
type Access uint32

// The rights. Local reads are always allowed.
const (
	AccessLocalWrite   Access = abi.AccessLocalWrite // the device may write: receives, READ and atomic results
	AccessRemoteWrite  Access = abi.AccessRemoteWrite
	AccessRemoteRead   Access = abi.AccessRemoteRead
	AccessRemoteAtomic Access = abi.AccessRemoteAtomic
	AccessMWBind       Access = abi.AccessMWBind    // windows may be bound to the region
	AccessZeroBased    Access = abi.AccessZeroBased // windows of type 2: addresses begin at 0
	AccessFlushGlobal  Access = abi.AccessFlushGlobal
)

func (a Access) String() string {
	return flagNames(uint64(a), []string{
		"local write", "remote write", "remote read", "remote atomic", "MW bind", "zero based", "on demand", "huge TLB",
		"flush global", "flush persistent",
	})
}

// DMALKey is the reserved L_Key: Addr of an SGE with it is a PA (Buffer.PA). Only privileged QPs may use it (RA-2).
const DMALKey = abi.DMALKey

// Caps are capabilities of the device.
type Caps uint64

// The capabilities.
const (
	CapAtomic       Caps = abi.CapAtomic
	CapSRQ          Caps = abi.CapSRQ
	CapUC           Caps = abi.CapUC
	CapMcast        Caps = abi.CapMcast
	CapRoCEv1       Caps = abi.CapRoCEv1
	CapResizeCQ     Caps = abi.CapResizeCQ
	CapMemMgt       Caps = abi.CapMemMgt // FastMR, NewLocalInvalidate, NewSendInvalidate
	CapMW           Caps = abi.CapMW     // windows of types 1 and 2B
	CapAtomicWrite  Caps = abi.CapAtomicWrite
	CapFlushGlobal  Caps = abi.CapFlushGlobal
	CapSetMTTResume Caps = abi.CapSetMTTResume // one command answers a page fault
)

func (c Caps) String() string {
	return flagNames(uint64(c), []string{
		"atomic", "SRQ", "UC", "multicast", "RoCEv1", "resize CQ", "DMA L_Key", "memory management", "MW", "atomic write",
		"flush global", "resume by SET_MTT",
	})
}

// ODPCaps say which operations may use on-demand regions (ODP-2).
type ODPCaps uint32

// The operations.
const (
	ODPSend    ODPCaps = abi.ODPSend
	ODPRecv    ODPCaps = abi.ODPRecv
	ODPWrite   ODPCaps = abi.ODPWrite
	ODPRead    ODPCaps = abi.ODPRead
	ODPAtomic  ODPCaps = abi.ODPAtomic
	ODPSRQRecv ODPCaps = abi.ODPSRQRecv
)

func (c ODPCaps) String() string {
	return flagNames(uint64(c), []string{"send", "receive", "write", "read", "atomic", "SRQ receive"})
}

// EventType is the kind of an asynchronous event.
type EventType uint32

// The kinds. Event.Handle is the number of the CQ, QP or SRQ, by the name of the kind.
const (
	EventCQErr       = EventType(abi.EventCQErr)       // the CQ overflowed and is unusable
	EventQPFatal     = EventType(abi.EventQPFatal)     // the QP failed for a local reason
	EventQPReqErr    = EventType(abi.EventQPReqErr)    // the peer sent an invalid request: the QP is in ERR
	EventQPAccessErr = EventType(abi.EventQPAccessErr) // the peer was denied access: the QP is in ERR
	EventQPCommEst   = EventType(abi.EventQPCommEst)   // a packet arrived for a QP in RTR
	EventSQDrained   = EventType(abi.EventSQDrained)   // a QP in SQD has nothing in flight; Handle is the QP
	EventQPLastWQE   = EventType(abi.EventQPLastWQE)   // a QP in ERR has taken its last request from the SRQ
	EventSRQErr      = EventType(abi.EventSRQErr)      // the SRQ is unusable
	EventSRQLimit    = EventType(abi.EventSRQLimit)    // see SRQ.SetLimit
	EventPageFault   = EventType(abi.EventPageFault)   // see Device.ResumeFault
)

func (e EventType) String() string { return abi.EventType(e).String() }

// PortState is the state of the port.
type PortState uint32

// The states that the device reports.
const (
	PortDown   PortState = abi.PortDown
	PortActive PortState = abi.PortActive
)

var portStateNames = map[PortState]string{PortDown: "down", PortActive: "active"}

func (s PortState) String() string { return name(portStateNames, s, "port state") }

// Stat is an index into Stats.
type Stat int

// The counters of a device.
const (
	StatTxPackets     = Stat(abi.StatTxPackets)
	StatTxBytes       = Stat(abi.StatTxBytes)
	StatRxPackets     = Stat(abi.StatRxPackets)
	StatRxBytes       = Stat(abi.StatRxBytes)
	StatTxAcks        = Stat(abi.StatTxAcks)
	StatTxNaks        = Stat(abi.StatTxNaks) // without RNR NAKs
	StatTxRNR         = Stat(abi.StatTxRNR)  // RNR NAKs sent
	StatRxRNR         = Stat(abi.StatRxRNR)  // RNR NAKs received
	StatRetransmits   = Stat(abi.StatRetransmits)
	StatTimeouts      = Stat(abi.StatTimeouts)      // of the retransmission timer
	StatOutOfSequence = Stat(abi.StatOutOfSequence) // requests ahead of the expected PSN
	StatDuplicates    = Stat(abi.StatDuplicates)
	StatICRCErrors    = Stat(abi.StatICRCErrors)
	StatRxDropped     = Stat(abi.StatRxDropped)     // packets of wrong state, address, key, opcode or size; no room
	StatAccessErrors  = Stat(abi.StatAccessErrors)  // accesses by peers that were denied
	StatGuestFaults   = Stat(abi.StatGuestFaults)   // page faults of on-demand regions (PF-7)
	StatHostFaults    = Stat(abi.StatHostFaults)    // page faults of the host's paging
	StatInvalidations = Stat(abi.StatInvalidations) // OnDemandMR.Invalidate
	StatFaultsResumed = Stat(abi.StatFaultsResumed) // page faults answered with a page
	StatFaultsFailed  = Stat(abi.StatFaultsFailed)  // page faults answered with an error
	StatFaultDrops    = Stat(abi.StatFaultDrops)    // packets dropped because of a page fault (PF-8, PF-11)
	NumStats          = Stat(abi.NumStats)
)

func (s Stat) String() string { return abi.Stat(s).String() }

// Stats are the counters of a device, indexed by Stat.
type Stats [NumStats]uint64

// name returns the name of v, or its kind and number.
func name[T ~uint8 | ~uint32](names map[T]string, v T, kind string) string {
	if n, ok := names[v]; ok {
		return n
	}
	return fmt.Sprintf("%s %d", kind, v)
}

// flagNames joins the names of the bits of v by "|"; names[i] is that of bit i.
func flagNames(v uint64, names []string) string {
	if v == 0 {
		return "0"
	}
	var parts []string
	for i, n := range names {
		if b := uint64(1) << i; v&b != 0 && n != "" {
			parts = append(parts, n)
			v &^= b
		}
	}
	if v != 0 {
		parts = append(parts, fmt.Sprintf("%#x", v))
	}
	return strings.Join(parts, "|")
}
