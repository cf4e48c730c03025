package abi

import "fmt"

// Identity of the device (vnicd_abi.h).
const (
	VirtioID     = 38         // virtio device id; the driver also probes VirtioIDRDMA
	VirtioIDRDMA = 42         // the RDMA id of the virtio specification
	Magic        = 0x64636e76 // "vncd" as bytes in memory
	Version      = 2          // the newest layout
	Oldest       = 2          // the oldest layout that is still spoken
)

// Feature bits, device-specific ones of virtio. The rules by which driver and device of different releases work
// together are at the top of vnicd_abi.h (CO-6).
const (
	FeatureNonceBit = 0
	FeatureNonce    = 1 << FeatureNonceBit // the doorbell area of engine 0 has the driver's nonce
	Features        = FeatureNonce         // all
)

// Bounds of the queue layout and of commands.
const (
	MaxCEQs    = 8     // completion event queues
	MaxEngines = 8     // doorbell queues
	CmdMax     = 65536 // bytes of a request, header included
)

// Queue numbers: queue 0 carries commands, 1 asynchronous events; see CEQQueue and DoorbellQueue.
const (
	CommandQueue = 0
	EventQueue   = 1
)

// CEQQueue returns the virtqueue number of completion event queue i.
func CEQQueue(i int) int { return 2 + i }

// DoorbellQueue returns the virtqueue number of engine e's doorbell queue on a
// device with numCEQs completion event queues.
func DoorbellQueue(numCEQs, e int) int { return 2 + numCEQs + e }

// NumQueues returns the number of virtqueues of a device.
func NumQueues(numCEQs, numEngines int) int { return 2 + numCEQs + numEngines }

// Opcode numbers the commands (enum vnicd_opcode).
type Opcode uint16

// The commands.
const (
	CmdQueryDevice  Opcode = 1
	CmdQueryPort    Opcode = 2
	CmdSetGID       Opcode = 3
	CmdClearGID     Opcode = 4
	CmdSetDoorbells Opcode = 5
	CmdSetAHTable   Opcode = 6
	CmdCreatePD     Opcode = 7
	CmdDestroyPD    Opcode = 8
	CmdCreateCQ     Opcode = 9
	CmdResizeCQ     Opcode = 10
	CmdDestroyCQ    Opcode = 11
	CmdCreateSRQ    Opcode = 12
	CmdModifySRQ    Opcode = 13
	CmdQuerySRQ     Opcode = 14
	CmdDestroySRQ   Opcode = 15
	CmdCreateQP     Opcode = 16
	CmdModifyQP     Opcode = 17
	CmdQueryQP      Opcode = 18
	CmdDestroyQP    Opcode = 19
	CmdCreateMR     Opcode = 20
	CmdSetMTT       Opcode = 21
	CmdDestroyMR    Opcode = 22
	CmdAttachMcast  Opcode = 23
	CmdDetachMcast  Opcode = 24
	CmdQueryStats   Opcode = 25
	CmdClearMTT     Opcode = 26
	CmdResumeFault  Opcode = 27
	CmdCreateMW     Opcode = 28
	CmdDestroyMW    Opcode = 29
	CmdResolve      Opcode = 30
	CmdCountQP      Opcode = 31 // devices with CapCountQP only
	CmdModifyCQ     Opcode = 32 // devices with CapModifyCQ only
)

var opcodeNames = [...]string{
	CmdQueryDevice: "QUERY_DEVICE", CmdQueryPort: "QUERY_PORT", CmdSetGID: "SET_GID", CmdClearGID: "CLEAR_GID",
	CmdSetDoorbells: "SET_DOORBELLS", CmdSetAHTable: "SET_AH_TABLE", CmdCreatePD: "CREATE_PD", CmdDestroyPD: "DESTROY_PD",
	CmdCreateCQ: "CREATE_CQ", CmdResizeCQ: "RESIZE_CQ", CmdDestroyCQ: "DESTROY_CQ", CmdCreateSRQ: "CREATE_SRQ",
	CmdModifySRQ: "MODIFY_SRQ", CmdQuerySRQ: "QUERY_SRQ", CmdDestroySRQ: "DESTROY_SRQ", CmdCreateQP: "CREATE_QP",
	CmdModifyQP: "MODIFY_QP", CmdQueryQP: "QUERY_QP", CmdDestroyQP: "DESTROY_QP", CmdCreateMR: "CREATE_MR",
	CmdSetMTT: "SET_MTT", CmdDestroyMR: "DESTROY_MR", CmdAttachMcast: "ATTACH_MCAST", CmdDetachMcast: "DETACH_MCAST",
	CmdQueryStats: "QUERY_STATS", CmdClearMTT: "CLEAR_MTT", CmdResumeFault: "RESUME_FAULT",
	CmdCreateMW: "CREATE_MW", CmdDestroyMW: "DESTROY_MW", CmdResolve: "RESOLVE",
	CmdCountQP: "COUNT_QP", CmdModifyCQ: "MODIFY_CQ",
}

func (o Opcode) String() string {
	if int(o) < len(opcodeNames) && opcodeNames[o] != "" {
		return opcodeNames[o]
	}
	return fmt.Sprintf("command %d", uint16(o))
}

// Status is the outcome of a command (enum vnicd_status). It is an error when it is not StatusOK.
type Status uint32

// The statuses and the errno to which a Linux driver maps them.
const (
	StatusOK          Status = 0
	StatusInvalid     Status = 1 // EINVAL: malformed or contradictory request
	StatusNoMemory    Status = 2 // ENOMEM: a per-VM limit is reached
	StatusNotFound    Status = 3 // ENOENT: no such object
	StatusBusy        Status = 4 // EBUSY: the object is still in use
	StatusUnsupported Status = 5 // EOPNOTSUPP: unknown opcode, capability or field
	StatusFault       Status = 6 // EFAULT: an address outside the guest's memory
	StatusPermission  Status = 7 // EPERM
	StatusIO          Status = 8 // EIO: the device failed
)

var statusNames = [...]string{
	"ok", "invalid request", "limit reached", "no such object", "object in use", "not supported",
	"address outside guest memory", "not permitted", "device failure",
}

// Error describes the status, so that a Status can serve as a sentinel error.
func (s Status) Error() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return fmt.Sprintf("unknown status %d", uint32(s))
}

// Capability bits of DeviceAttr.Caps.
const (
	CapAtomic       = 1 << 0
	CapSRQ          = 1 << 1
	CapUC           = 1 << 2
	CapMcast        = 1 << 3
	CapRoCEv1       = 1 << 4
	CapResizeCQ     = 1 << 5
	CapLocalDMALKey = 1 << 6  // RA-1: DMALKey works
	CapMemMgt       = 1 << 7  // REG_MR, LOCAL_INV, SEND_WITH_INV
	CapMW           = 1 << 8  // types 1 and 2B
	CapAtomicWrite  = 1 << 9  // ATOMIC WRITE, on RC
	CapFlushGlobal  = 1 << 10 // FLUSH to global visibility, on RC
	CapSetMTTResume = 1 << 11 // SetMTTResume
	CapCountQP      = 1 << 12 // COUNT_QP
	CapModifyCQ     = 1 << 13 // MODIFY_CQ
)

// Operations with on-demand paging, per transport: DeviceAttr.ODPRC and its siblings (ODP-2; the bits of enum
// ib_odp_transport_cap_bits).
const (
	ODPSend    = 1 << 0
	ODPRecv    = 1 << 1
	ODPWrite   = 1 << 2
	ODPRead    = 1 << 3
	ODPAtomic  = 1 << 4
	ODPSRQRecv = 1 << 5
)

// DMALKey is the reserved L_Key that marks a segment as guest-physical (RA-1).
const DMALKey = 0

// GID types (enum vnicd_gid_type).
const (
	GIDRoCEv1 = 1
	GIDRoCEv2 = 2
)

// NoVLAN in a vlan_id stands for untagged.
const NoVLAN = 0xffff

// Layout of a doorbell area (struct vnicd_doorbells): the driver sets bit
// slot%64 of the bits word slot/64, then bit slot/64%64 of the summary word
// slot/4096, and notifies if need_wakeup is set.
const (
	DoorbellSlots         = 65536
	DoorbellNeedWakeupOff = 0
	DoorbellSummaryOff    = 64  // DoorbellSlots/4096 words of 64 bits
	DoorbellNonceOff      = 192 // of engine 0, with FeatureNonce
	DoorbellBitsOff       = 512 // DoorbellSlots/64 words of 64 bits
	DoorbellSize          = 12288
	DoorbellPages         = 3 // of 4 KiB
)

// Values of a CQ's arm word.
const (
	ArmNone      = 0
	ArmSolicited = 1
	ArmNext      = 2
)

// Flags of ModifySRQ.
const (
	SRQLimit  = 1 << 0
	SRQResize = 1 << 1
)

// QP types (enum vnicd_qp_type, numbers of enum ib_qp_type).
const (
	QPTypeGSI = 1
	QPTypeRC  = 2
	QPTypeUC  = 3
	QPTypeUD  = 4
)

// Flags of CreateQP.
const (
	QPSigAll     = 1 << 0 // every send completes with a CQE
	QPPrivileged = 1 << 1 // RA-2: may use DMALKey
	QPHasSRQ     = 1 << 2
)

// Flags of CreateMR.
const (
	MRPhys     = 1 << 0 // VAs are PAs; the region has no table
	MROnDemand = 1 << 1 // pages are set after page fault events and removed by CLEAR_MTT
	MRImplicit = 1 << 2 // with MROnDemand: the whole address space
	MRFast     = 1 << 3 // unusable until a REG_MR request (RegWR)
)

// MaxFastReg bounds the pages of a MRFast region: their list lies in one page.
const MaxFastReg = 512

// SetMTTResume is a flag of SetMTT: the token of a page fault event follows the entries, and the operation that waits
// for them tries again. Devices with CapSetMTTResume only.
const SetMTTResume = 1 << 0

// Marks in the low bits of SetMTT's entries.
const (
	MTTAbsent   = 1
	MTTReadOnly = 2 // on demand only: writes fault
)

// Stat indexes Stats.Value (enum vnicd_stat).
type Stat int

// The device's counters.
const (
	StatTxPackets Stat = iota
	StatTxBytes
	StatRxPackets
	StatRxBytes
	StatTxAcks
	StatTxNaks
	StatTxRNR
	StatRxRNR
	StatRetransmits
	StatTimeouts
	StatOutOfSequence
	StatDuplicates
	StatICRCErrors
	StatRxDropped
	StatAccessErrors
	StatGuestFaults   // raised to the guest's driver (PF-7)
	StatHostFaults    // raised to the host's driver
	StatInvalidations // CLEAR_MTT
	StatFaultsResumed // guest faults answered: try again
	StatFaultsFailed  // guest faults answered: invalid address
	StatFaultDrops    // packets dropped for a fault (PF-8, PF-11)
	NumStats
)

var statNames = [NumStats]string{
	"tx_packets", "tx_bytes", "rx_packets", "rx_bytes", "tx_acks", "tx_naks", "tx_rnr", "rx_rnr", "retransmits",
	"timeouts", "out_of_sequence", "duplicates", "icrc_errors", "rx_dropped", "access_errors", "guest_faults",
	"host_faults",
	"invalidations", "faults_resumed", "faults_failed", "fault_drops",
}

func (s Stat) String() string {
	if s >= 0 && s < NumStats {
		return statNames[s]
	}
	return fmt.Sprintf("stat %d", int(s))
}

// EventType is the type of an asynchronous event (enum vnicd_event_type).
type EventType uint32

// The asynchronous events; the handle is the number of the CQ, QP or SRQ in the name.
const (
	EventCQErr       EventType = 1
	EventQPFatal     EventType = 2
	EventQPReqErr    EventType = 3
	EventQPAccessErr EventType = 4
	EventQPCommEst   EventType = 5
	EventSQDrained   EventType = 6
	EventQPLastWQE   EventType = 7
	EventSRQErr      EventType = 8
	EventSRQLimit    EventType = 9
	EventPageFault   EventType = 16
)

var eventNames = map[EventType]string{
	EventCQErr: "CQ error", EventQPFatal: "QP fatal", EventQPReqErr: "QP request error",
	EventQPAccessErr: "QP access error", EventQPCommEst: "communication established", EventSQDrained: "SQ drained",
	EventQPLastWQE: "last WQE reached", EventSRQErr: "SRQ error", EventSRQLimit: "SRQ limit reached",
	EventPageFault: "page fault",
}

func (e EventType) String() string {
	if n, ok := eventNames[e]; ok {
		return n
	}
	return fmt.Sprintf("event %d", uint32(e))
}
