package abi

// The numbers of Linux's RDMA core (include/rdma/ib_verbs.h and its uapi headers), which the device's commands and
// rings use unchanged.

// QP states (enum ib_qp_state).
const (
	QPReset = 0
	QPInit  = 1
	QPRTR   = 2
	QPRTS   = 3
	QPSQD   = 4
	QPSQE   = 5
	QPErr   = 6
)

// Bits of QPAttr.AttrMask (enum ib_qp_attr_mask).
const (
	QPAttrState            = 1 << 0
	QPAttrCurState         = 1 << 1
	QPAttrEnSQDAsyncNotify = 1 << 2
	QPAttrAccessFlags      = 1 << 3
	QPAttrPKeyIndex        = 1 << 4
	QPAttrPort             = 1 << 5
	QPAttrQKey             = 1 << 6
	QPAttrAV               = 1 << 7
	QPAttrPathMTU          = 1 << 8
	QPAttrTimeout          = 1 << 9
	QPAttrRetryCnt         = 1 << 10
	QPAttrRNRRetry         = 1 << 11
	QPAttrRQPSN            = 1 << 12
	QPAttrMaxQPRdAtomic    = 1 << 13 // as requester
	QPAttrAltPath          = 1 << 14
	QPAttrMinRNRTimer      = 1 << 15
	QPAttrSQPSN            = 1 << 16
	QPAttrMaxDestRdAtomic  = 1 << 17 // as responder
	QPAttrPathMigState     = 1 << 18
	QPAttrCap              = 1 << 19
	QPAttrDestQPN          = 1 << 20
	QPAttrRateLimit        = 1 << 25
)

// Path MTUs (enum ib_mtu); the size in bytes is 128 << value.
const (
	MTU256  = 1
	MTU512  = 2
	MTU1024 = 3
	MTU2048 = 4
	MTU4096 = 5
)

// MTUBytes converts an MTU256..MTU4096 into bytes; 0 for anything else.
func MTUBytes(mtu uint8) int {
	if mtu < MTU256 || mtu > MTU4096 {
		return 0
	}
	return 128 << mtu
}

// MTUFromBytes returns the largest MTU256..MTU4096 that is at most n bytes; 0 if n is below 256.
func MTUFromBytes(n int) uint8 {
	for m := uint8(MTU4096); m >= MTU256; m-- {
		if MTUBytes(m) <= n {
			return m
		}
	}
	return 0
}

// Access rights of regions and QPs (enum ib_access_flags).
const (
	AccessLocalWrite      = 1 << 0
	AccessRemoteWrite     = 1 << 1
	AccessRemoteRead      = 1 << 2
	AccessRemoteAtomic    = 1 << 3
	AccessMWBind          = 1 << 4
	AccessZeroBased       = 1 << 5
	AccessOnDemand        = 1 << 6
	AccessHugeTLB         = 1 << 7
	AccessFlushGlobal     = 1 << 8
	AccessFlushPersistent = 1 << 9
	AccessRelaxedOrdering = 1 << 20
	// AccessOptional are the bits that a provider may ignore.
	AccessOptional = 0x3ff00000
)

// Work request opcodes (enum ib_wr_opcode).
const (
	WRRDMAWrite             = 0
	WRRDMAWriteWithImm      = 1
	WRSend                  = 2
	WRSendWithImm           = 3
	WRRDMARead              = 4
	WRAtomicCmpAndSwp       = 5
	WRAtomicFetchAndAdd     = 6
	WRLocalInv              = 7
	WRBindMW                = 8
	WRSendWithInv           = 9
	WRTSO                   = 10
	WRRDMAReadWithInv       = 11
	WRMaskedAtomicCmpAndSwp = 12
	WRMaskedAtomicFetchAdd  = 13
	WRFlush                 = 14
	WRAtomicWrite           = 15
	WRRegMR                 = 0x20 // kernel users only
)

// Placement of a FLUSH (enum ib_placement_type) and its selectivity (enum ib_selectivity_level).
const (
	FlushGlobal     = 1 << 0
	FlushPersistent = 1 << 1
	FlushRange      = 0
	FlushMR         = 1
)

// AtomicLen is the operand size of an atomic or ATOMIC WRITE in bytes.
const AtomicLen = 8

// Flags of a send request (enum ib_send_flags).
const (
	SendFence     = 1 << 0
	SendSignaled  = 1 << 1
	SendSolicited = 1 << 2
	SendInline    = 1 << 3
	SendIPCsum    = 1 << 4
)

// Completion statuses (enum ib_wc_status).
const (
	WCSuccess        = 0
	WCLocLenErr      = 1
	WCLocQPOpErr     = 2
	WCLocEECOpErr    = 3
	WCLocProtErr     = 4
	WCWRFlushErr     = 5
	WCMWBindErr      = 6
	WCBadRespErr     = 7
	WCLocAccessErr   = 8
	WCRemInvReqErr   = 9
	WCRemAccessErr   = 10
	WCRemOpErr       = 11
	WCRetryExcErr    = 12
	WCRNRRetryExcErr = 13
	WCLocRDDViolErr  = 14
	WCRemInvRdReqErr = 15
	WCRemAbortErr    = 16
	WCInvEECNErr     = 17
	WCInvEECStateErr = 18
	WCFatalErr       = 19
	WCRespTimeoutErr = 20
	WCGeneralErr     = 21
)

var wcStatusNames = [...]string{
	"success", "local length error", "local QP operation error", "local EE context operation error",
	"local protection error", "work request flushed", "memory window bind error", "bad response",
	"local access error", "remote invalid request", "remote access error", "remote operation error",
	"transport retry counter exceeded", "RNR retry counter exceeded", "local RDD violation",
	"remote invalid RD request", "operation aborted", "invalid EE context number", "invalid EE context state",
	"fatal error", "response timeout", "general error",
}

// WCStatusString describes a completion status.
func WCStatusString(status uint32) string {
	if int64(status) < int64(len(wcStatusNames)) {
		return wcStatusNames[status]
	}
	return "unknown completion status"
}

// Completion opcodes (enum ib_wc_opcode, as of Linux 6.12; those from 8 to 12
// differ between kernels and concern kernel users only). WCOpRecv is a bit: every opcode of a receive has it.
const (
	WCOpSend            = 0
	WCOpRDMAWrite       = 1
	WCOpRDMARead        = 2
	WCOpCompSwap        = 3
	WCOpFetchAdd        = 4
	WCOpBindMW          = 5
	WCOpLocalInv        = 6
	WCOpTSO             = 7
	WCOpFlush           = 8
	WCOpAtomicWrite     = 9
	WCOpRegMR           = 10
	WCOpMaskedCompSwap  = 11
	WCOpMaskedFetchAdd  = 12
	WCOpRecv            = 128
	WCOpRecvRDMAWithImm = 129
)

// Packet kinds of a UD completion, in its service level (CompleteRecv in hca).
const (
	WCSLRoCEv1 = 0x0
	WCSLIPv6   = 0x9 // RoCE v2
	WCSLIPv4   = 0xa // RoCE v2
)

// Flags of a completion (enum ib_wc_flags). The kernel and libibverbs disagree
// about two of them: what the kernel calls IB_WC_WITH_INVALIDATE (4) is
// IBV_WC_IP_CSUM_OK to an application, and IBV_WC_WITH_INV (8) is
// IB_WC_IP_CSUM_OK to the kernel. Kernel and user CQs have one format here, so a
// device sets both (WCFlagsInvalidate); the checksum bits mean nothing on RC.
const (
	WCFlagGRH            = 1 << 0
	WCFlagWithImm        = 1 << 1
	WCFlagWithInvalidate = 1 << 2
	WCFlagIPCsumOK       = 1 << 3
	WCFlagWithSMAC       = 1 << 4
	WCFlagWithVLAN       = 1 << 5
	WCFlagNetworkHdrType = 1 << 6

	WCFlagWithInvalidateUser = 1 << 3 // IBV_WC_WITH_INV
	WCFlagsInvalidate        = WCFlagWithInvalidate | WCFlagWithInvalidateUser
)

// Port states (enum ib_port_state), speeds and widths (IB_SPEED_*, IB_WIDTH_*).
const (
	PortNop    = 0
	PortDown   = 1
	PortInit   = 2
	PortArmed  = 3
	PortActive = 4

	SpeedSDR   = 1
	SpeedDDR   = 2
	SpeedQDR   = 4
	SpeedFDR10 = 8
	SpeedFDR   = 16
	SpeedEDR   = 32
	SpeedHDR   = 64
	SpeedNDR   = 128

	Width1X  = 1
	Width4X  = 2
	Width8X  = 4
	Width12X = 8
	Width2X  = 16
)
