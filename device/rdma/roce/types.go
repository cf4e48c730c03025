package roce

import (
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// WROpcode is the operation of a send work request, numbered as enum ib_wr_opcode.
type WROpcode uint8

// The operations the transport carries. Every other number ends in StatusLocQPOp.
const (
	WRWrite       WROpcode = 0
	WRWriteImm    WROpcode = 1
	WRSend        WROpcode = 2
	WRSendImm     WROpcode = 3
	WRRead        WROpcode = 4
	WRCompareSwap WROpcode = 5
	WRFetchAdd    WROpcode = 6
	WRLocalInv    WROpcode = 7
	WRBindMW      WROpcode = 8
	WRSendInv     WROpcode = 9
	WRFlush       WROpcode = 14
	WRAtomicWrite WROpcode = 15
	WRRegMR       WROpcode = 0x20
)

// WCOpcode is the operation in a completion, numbered as enum ib_wc_opcode.
type WCOpcode uint8

// Completion opcodes.
const (
	WCSend        WCOpcode = 0
	WCWrite       WCOpcode = 1
	WCRead        WCOpcode = 2
	WCCompareSwap WCOpcode = 3
	WCFetchAdd    WCOpcode = 4
	WCBindMW      WCOpcode = 5
	WCLocalInv    WCOpcode = 6
	WCFlush       WCOpcode = 8
	WCAtomicWrite WCOpcode = 9
	WCRegMR       WCOpcode = 10
	WCRecv        WCOpcode = 128
	WCRecvWithImm WCOpcode = 129 // receive request consumed by RDMA WRITE with immediate
)

// Status is a completion status, numbered as enum ib_wc_status (IBTA 10.10.3, 11.6.2).
type Status uint8

// Completion statuses that the transport produces.
const (
	StatusSuccess     Status = 0
	StatusLocLen      Status = 1
	StatusLocQPOp     Status = 2
	StatusLocProt     Status = 4
	StatusFlush       Status = 5
	StatusMemMgt      Status = 6 // memory management operation error (IB_WC_MW_BIND_ERR)
	StatusBadResp     Status = 7
	StatusLocAccess   Status = 8
	StatusRemInvReq   Status = 9
	StatusRemAccess   Status = 10
	StatusRemOp       Status = 11
	StatusRetryExc    Status = 12
	StatusRNRRetryExc Status = 13
	StatusFatal       Status = 19
	StatusGeneral     Status = 21
)

// Completion flags, numbered as enum ib_wc_flags.
const (
	FlagGRH     uint32 = 1 << 0 // the first 40 bytes of the buffer hold a GRH area (UD)
	FlagImm     uint32 = 1 << 1
	FlagInv     uint32 = 1 << 2
	FlagSMAC    uint32 = 1 << 4
	FlagVLAN    uint32 = 1 << 5
	FlagNetwork uint32 = 1 << 6
)

// Type is the service type of a QP, numbered as enum ib_qp_type.
type Type uint8

// QP types. GSI is the UD queue pair 1.
const (
	GSI Type = 1
	RC  Type = 2
	UC  Type = 3
	UD  Type = 4
)

// State is a QP state, numbered as enum ib_qp_state.
type State uint8

// QP states (IBTA 10.3.1). See state.go for the drawing.
const (
	Reset State = 0
	Init  State = 1
	RTR   State = 2
	RTS   State = 3
	SQD   State = 4
	SQE   State = 5
	Err   State = 6
)

// EventKind is an affiliated asynchronous event of a QP (IBTA 11.6.3).
type EventKind uint8

// Events. Each is raised at most once per cause; hca turns it into a vnicd_event.
const (
	EventFatal     EventKind = iota + 1 // the QP failed for a local reason
	EventReqErr                         // responder: invalid request, the QP is in Err
	EventAccessErr                      // responder: R_Key violation, the QP is in Err
	EventCommEst                        // first packet arrived while in RTR
	EventSQDrained                      // SQD reached with nothing in flight
	EventLastWQE                        // SRQ QP in Err: no more receive completions follow
)

// Fetch is the answer to FetchSend and FetchRecv.
type Fetch uint8

// Fetch results.
const (
	FetchEmpty Fetch = iota // nothing posted
	FetchReady              // the WQE is filled in
	FetchBad                // fetched, but malformed: w.Status is the error with which it completes
	FetchFault              // the queue's memory is absent; fetch again after Resume
)

// AtomicOp selects what AtomicRemote does.
type AtomicOp uint8

// Atomic operations (IBTA 9.4.5, A19).
const (
	AtomicCompareSwap AtomicOp = iota
	AtomicFetchAdd
	AtomicWrite // stores swapAdd; the old value is not used
)

// Needs returns the right of QP and region that op needs.
func (op AtomicOp) Needs() translate.Access {
	if op == AtomicWrite {
		return translate.RemoteWrite
	}
	return translate.RemoteAtomic
}

// SGE is one local data segment.
type SGE struct {
	VA     translate.VA
	Length uint32
	Key    translate.Key
}

// AddressVector is a resolved path: hca fills it from the GID table and the
// address handle. GIDs are in network order, IPv4 as v4-mapped IPv6.
type AddressVector struct {
	DMAC, SMAC   [6]byte
	VLAN         uint16 // NoVLAN or 0..4094
	SGID, DGID   [16]byte
	TrafficClass uint8
	HopLimit     uint8
	SL           uint8 // 802.1p priority if VLAN is set
	FlowLabel    uint32
	RoCEv1       bool // GRH after ethertype 0x8915 instead of IP/UDP
	SGIDIndex    uint16
}

// NoVLAN in AddressVector.VLAN means untagged frames.
const NoVLAN = 0xffff

// WQE is a send work request, decoded. The transport owns the storage: it hands
// FetchSend a WQE whose SGEs and InlineData slices have length 0 and capacity
// MaxSendSGE and MaxInline; FetchSend appends to them or reslices them, and
// never grows them. It sets the flags and all other fields that the opcode uses;
// the rest is left from an older WQE.
type WQE struct {
	Seq       uint32
	ID        uint64
	Opcode    WROpcode
	Signaled  bool // QP-wide "signal all" included
	Solicited bool
	Fence     bool
	Inline    bool    // data is InlineData, SGEs is empty
	Imm       [4]byte // as on the wire
	InvKey    translate.Key
	RemoteVA  translate.VA
	RKey      translate.Key
	Compare   uint64 // CMP_SWP: compare value
	SwapAdd   uint64 // CMP_SWP: swap value; FETCH_ADD: addend
	Flush     wire.FETH
	FlushLen  uint32 // at RemoteVA; Length is 0
	Length    uint64 // sum of the segments, or len(InlineData)

	// Memory management requests, which have no other data; only the adapter uses it.
	Manage Manage

	SGEs       []SGE
	InlineData []byte

	// UD and GSI only
	AV        AddressVector
	RemoteQPN uint32
	QKey      uint32

	Status Status // FetchBad: the completion status
}

// Manage holds the operands of a REG_MR, BIND_MW or LOCAL_INV request; only the adapter uses it.
type Manage struct {
	Key       translate.Key // current key of the region or window; REG_MR: its new key
	NewKey    translate.Key // BIND_MW: the new key
	Region    translate.Key // BIND_MW: the region
	Access    translate.Access
	VA        translate.VA
	Length    uint64
	List      translate.PA // REG_MR: the page list, ...
	NPages    uint32       // its length, ...
	Offset    uint32       // and where in its first page the region begins
	PageShift uint8
}

// RecvWQE is a receive work request, decoded. SGEs is storage of the transport,
// length 0 and capacity MaxRecvSGE when handed to FetchRecv.
type RecvWQE struct {
	ID     uint64
	Length uint64 // sum of the segments
	SGEs   []SGE
	Status Status // FetchBad: the completion status
	Token  uint64 // free for the adapter (ring position, SRQ)
}

// Completion is what CompleteSend and CompleteRecv write as a CQE.
type Completion struct {
	Status    Status
	Opcode    WCOpcode
	Flags     uint32 // Flag*
	ByteLen   uint32
	Imm       [4]byte // FlagImm, as on the wire
	InvKey    translate.Key
	SrcQP     uint32
	SL        uint8
	VLAN      uint16
	SMAC      [6]byte
	IPv4      bool // the packet came over IPv4 (network header type)
	RoCEv1    bool
	Solicited bool // receive side: raises a solicited completion event
}
