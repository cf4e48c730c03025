package abi

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

const abiHeader = "../../../guestdrv/linux/vnicd_abi.h"

// cStruct is a structure of vnicd_abi.h as found by text search.
type cStruct struct {
	name     string
	fields   []string // without reserved ones
	reserved []string
}

var (
	reStruct = regexp.MustCompile(`(?s)\nstruct (vnicd_\w+) \{(.*?)\n\};`)
	reField  = regexp.MustCompile(`(?m)^\s+(?:struct )?(\w+)\s+(\w+)\s*(?:\[[^\]]*\])?;`)
	reDefine = regexp.MustCompile(`(?m)^#define\s+(VNICD_\w+)[ \t]+\S`)
	reEnum   = regexp.MustCompile(`(?s)\nenum (vnicd_\w+) \{(.*?)\n\};`)
	reMember = regexp.MustCompile(`(?m)^\s+(VNICD_\w+)`)
)

// parseHeader finds all structures and constants of the header, so that the test detects additions that Go lacks.
func parseHeader(t *testing.T) (structs []cStruct, consts []string) {
	t.Helper()
	text, err := os.ReadFile(abiHeader)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range reStruct.FindAllSubmatch(text, -1) {
		s := cStruct{name: string(m[1])}
		for _, f := range reField.FindAllSubmatch(m[2], -1) {
			if n := string(f[2]); strings.HasPrefix(n, "reserved") {
				s.reserved = append(s.reserved, n)
			} else {
				s.fields = append(s.fields, n)
			}
		}
		structs = append(structs, s)
	}
	for _, m := range reDefine.FindAllSubmatch(text, -1) {
		consts = append(consts, string(m[1]))
	}
	for _, e := range reEnum.FindAllSubmatch(text, -1) {
		for _, m := range reMember.FindAllSubmatch(e[2], -1) {
			consts = append(consts, string(m[1]))
		}
	}
	if len(structs) < 29 || len(consts) < 90 {
		t.Fatalf("found only %d structures and %d constants in %s: has its style changed?", len(structs), len(consts),
			abiHeader)
	}
	return structs, consts
}

// goStructs pairs each C structure with its Go twin. Structures with a nil twin
// are described by constants (goOffsets) instead.
var goStructs = map[string]func() record{
	"vnicd_config":         func() record { return new(Config) },
	"vnicd_req":            func() record { return new(Req) },
	"vnicd_resp":           func() record { return new(Resp) },
	"vnicd_ring":           func() record { return new(Ring) },
	"vnicd_device_attr":    func() record { return new(DeviceAttr) },
	"vnicd_port_attr":      func() record { return new(PortAttr) },
	"vnicd_set_gid":        func() record { return new(SetGID) },
	"vnicd_clear_gid":      func() record { return new(ClearGID) },
	"vnicd_set_doorbells":  func() record { return new(SetDoorbells) },
	"vnicd_ah":             func() record { return new(AH) },
	"vnicd_set_ah_table":   func() record { return new(SetAHTable) },
	"vnicd_handle":         func() record { return new(Handle) },
	"vnicd_create_cq":      func() record { return new(CreateCQ) },
	"vnicd_resize_cq":      func() record { return new(ResizeCQ) },
	"vnicd_modify_cq":      func() record { return new(ModifyCQ) },
	"vnicd_create_srq":     func() record { return new(CreateSRQ) },
	"vnicd_modify_srq":     func() record { return new(ModifySRQ) },
	"vnicd_srq_attr":       func() record { return new(SRQAttr) },
	"vnicd_create_qp":      func() record { return new(CreateQP) },
	"vnicd_create_qp_resp": func() record { return new(CreateQPResp) },
	"vnicd_av":             func() record { return new(AV) },
	"vnicd_qp_attr":        func() record { return new(QPAttr) },
	"vnicd_create_mr":      func() record { return new(CreateMR) },
	"vnicd_create_mr_resp": func() record { return new(CreateMRResp) },
	"vnicd_set_mtt":        func() record { return new(SetMTT) },
	"vnicd_clear_mtt":      func() record { return new(ClearMTT) },
	"vnicd_resume_fault":   func() record { return new(ResumeFault) },
	"vnicd_mcast":          func() record { return new(Mcast) },
	"vnicd_reg_wr":         func() record { return new(RegWR) },
	"vnicd_create_mw":      func() record { return new(CreateMW) },
	"vnicd_resolve":        func() record { return new(Resolve) },
	"vnicd_resolve_resp":   func() record { return new(ResolveResp) },
	"vnicd_stats":          func() record { return new(Stats) },
	"vnicd_count_qp":       func() record { return new(CountQP) },
	"vnicd_ceqe":           func() record { return new(CEQE) },
	"vnicd_event":          func() record { return new(Event) },
	"vnicd_doorbells":      nil,
}

// sizes are the Size... constants by C structure.
var sizes = map[string]int{
	"vnicd_config": SizeConfig, "vnicd_req": SizeReq, "vnicd_resp": SizeResp, "vnicd_ring": SizeRing,
	"vnicd_device_attr": SizeDeviceAttr, "vnicd_port_attr": SizePortAttr, "vnicd_set_gid": SizeSetGID,
	"vnicd_clear_gid": SizeClearGID, "vnicd_set_doorbells": SizeSetDoorbells, "vnicd_ah": SizeAH,
	"vnicd_set_ah_table": SizeSetAHTable, "vnicd_handle": SizeHandle, "vnicd_create_cq": SizeCreateCQ,
	"vnicd_resize_cq": SizeResizeCQ, "vnicd_modify_cq": SizeModifyCQ,
	"vnicd_create_srq": SizeCreateSRQ, "vnicd_modify_srq": SizeModifySRQ,
	"vnicd_srq_attr": SizeSRQAttr, "vnicd_create_qp": SizeCreateQP, "vnicd_create_qp_resp": SizeCreateQPResp,
	"vnicd_av": SizeAV, "vnicd_qp_attr": SizeQPAttr, "vnicd_create_mr": SizeCreateMR,
	"vnicd_create_mr_resp": SizeCreateMRResp, "vnicd_set_mtt": SizeSetMTT, "vnicd_clear_mtt": SizeClearMTT,
	"vnicd_resume_fault": SizeResumeFault, "vnicd_mcast": SizeMcast,
	"vnicd_reg_wr": SizeRegWR, "vnicd_create_mw": SizeCreateMW,
	"vnicd_resolve": SizeResolve, "vnicd_resolve_resp": SizeResolveResp,
	"vnicd_stats": SizeStats, "vnicd_count_qp": SizeCountQP, "vnicd_ceqe": SizeCEQE, "vnicd_event": SizeEvent,
	"vnicd_doorbells": DoorbellSize,
}

// goConsts are the constants of vnicd_abi.h.
var goConsts = map[string]uint64{
	"VNICD_VIRTIO_ID": VirtioID, "VNICD_VIRTIO_ID_RDMA": VirtioIDRDMA, "VNICD_MAGIC": Magic, "VNICD_ABI_VERSION": Version,
	"VNICD_ABI_OLDEST": Oldest, "VNICD_FEATURE_NONCE": FeatureNonceBit,
	"VNICD_MAX_CEQS": MaxCEQs, "VNICD_MAX_ENGINES": MaxEngines, "VNICD_CMD_MAX": CmdMax,
	"VNICD_CMD_QUERY_DEVICE": uint64(CmdQueryDevice), "VNICD_CMD_QUERY_PORT": uint64(CmdQueryPort),
	"VNICD_CMD_SET_GID": uint64(CmdSetGID), "VNICD_CMD_CLEAR_GID": uint64(CmdClearGID),
	"VNICD_CMD_SET_DOORBELLS": uint64(CmdSetDoorbells), "VNICD_CMD_SET_AH_TABLE": uint64(CmdSetAHTable),
	"VNICD_CMD_CREATE_PD": uint64(CmdCreatePD), "VNICD_CMD_DESTROY_PD": uint64(CmdDestroyPD),
	"VNICD_CMD_CREATE_CQ": uint64(CmdCreateCQ), "VNICD_CMD_RESIZE_CQ": uint64(CmdResizeCQ),
	"VNICD_CMD_DESTROY_CQ": uint64(CmdDestroyCQ), "VNICD_CMD_CREATE_SRQ": uint64(CmdCreateSRQ),
	"VNICD_CMD_MODIFY_SRQ": uint64(CmdModifySRQ), "VNICD_CMD_QUERY_SRQ": uint64(CmdQuerySRQ),
	"VNICD_CMD_DESTROY_SRQ": uint64(CmdDestroySRQ), "VNICD_CMD_CREATE_QP": uint64(CmdCreateQP),
	"VNICD_CMD_MODIFY_QP": uint64(CmdModifyQP), "VNICD_CMD_QUERY_QP": uint64(CmdQueryQP),
	"VNICD_CMD_DESTROY_QP": uint64(CmdDestroyQP), "VNICD_CMD_CREATE_MR": uint64(CmdCreateMR),
	"VNICD_CMD_SET_MTT": uint64(CmdSetMTT), "VNICD_CMD_DESTROY_MR": uint64(CmdDestroyMR),
	"VNICD_CMD_ATTACH_MCAST": uint64(CmdAttachMcast), "VNICD_CMD_DETACH_MCAST": uint64(CmdDetachMcast),
	"VNICD_CMD_QUERY_STATS": uint64(CmdQueryStats), "VNICD_CMD_CLEAR_MTT": uint64(CmdClearMTT),
	"VNICD_CMD_RESUME_FAULT": uint64(CmdResumeFault), "VNICD_CMD_CREATE_MW": uint64(CmdCreateMW),
	"VNICD_CMD_DESTROY_MW": uint64(CmdDestroyMW), "VNICD_CMD_RESOLVE": uint64(CmdResolve),
	"VNICD_CMD_COUNT_QP": uint64(CmdCountQP), "VNICD_COUNT_APART": CountApart, "VNICD_CAP_COUNT_QP": CapCountQP,
	"VNICD_CMD_MODIFY_CQ": uint64(CmdModifyCQ), "VNICD_CAP_MODIFY_CQ": CapModifyCQ,
	"VNICD_MR_FAST":       MRFast,
	"VNICD_WR_REG_MR":     WRRegMR,
	"VNICD_WR_REG_OFFSET": SendWQERegOff, "VNICD_WR_FLUSH_OFFSET": SendWQEFlushRKeyOff - 12, "VNICD_WC_REG_MR": WCOpRegMR,
	"VNICD_MAX_FAST_REG": MaxFastReg,
	"VNICD_ODP_SEND":     ODPSend, "VNICD_ODP_RECV": ODPRecv, "VNICD_ODP_WRITE": ODPWrite, "VNICD_ODP_READ": ODPRead,
	"VNICD_ODP_ATOMIC": ODPAtomic, "VNICD_ODP_SRQ_RECV": ODPSRQRecv,
	"VNICD_OK": uint64(StatusOK), "VNICD_EINVAL": uint64(StatusInvalid), "VNICD_ENOMEM": uint64(StatusNoMemory),
	"VNICD_ENOENT": uint64(StatusNotFound), "VNICD_EBUSY": uint64(StatusBusy),
	"VNICD_EOPNOTSUPP": uint64(StatusUnsupported),
	"VNICD_EFAULT":     uint64(StatusFault), "VNICD_EPERM": uint64(StatusPermission), "VNICD_EIO": uint64(StatusIO),
	"VNICD_CAP_ATOMIC": CapAtomic, "VNICD_CAP_SRQ": CapSRQ, "VNICD_CAP_UC": CapUC, "VNICD_CAP_MCAST": CapMcast,
	"VNICD_CAP_ROCE_V1": CapRoCEv1, "VNICD_CAP_RESIZE_CQ": CapResizeCQ, "VNICD_CAP_LOCAL_DMA_LKEY": CapLocalDMALKey,
	"VNICD_CAP_MEM_MGT": CapMemMgt, "VNICD_CAP_MW": CapMW, "VNICD_CAP_ATOMIC_WRITE": CapAtomicWrite,
	"VNICD_CAP_FLUSH_GLOBAL": CapFlushGlobal, "VNICD_CAP_SET_MTT_RESUME": CapSetMTTResume,
	"VNICD_SET_MTT_RESUME": SetMTTResume, "VNICD_DMA_LKEY": DMALKey,
	"VNICD_GID_ROCE_V1": GIDRoCEv1, "VNICD_GID_ROCE_V2": GIDRoCEv2, "VNICD_DB_SLOTS": DoorbellSlots,
	"VNICD_ARM_NONE": ArmNone, "VNICD_ARM_SOLICITED": ArmSolicited, "VNICD_ARM_NEXT": ArmNext,
	"VNICD_SRQ_LIMIT": SRQLimit, "VNICD_SRQ_RESIZE": SRQResize,
	"VNICD_QPT_GSI": QPTypeGSI, "VNICD_QPT_RC": QPTypeRC, "VNICD_QPT_UC": QPTypeUC, "VNICD_QPT_UD": QPTypeUD,
	"VNICD_QP_SIG_ALL": QPSigAll, "VNICD_QP_PRIVILEGED": QPPrivileged, "VNICD_QP_HAS_SRQ": QPHasSRQ,
	"VNICD_MR_PHYS": MRPhys, "VNICD_MR_ON_DEMAND": MROnDemand, "VNICD_MR_IMPLICIT": MRImplicit,
	"VNICD_MTT_ABSENT": MTTAbsent, "VNICD_MTT_READ_ONLY": MTTReadOnly,
	"VNICD_STAT_TX_PACKETS": uint64(StatTxPackets), "VNICD_STAT_TX_BYTES": uint64(StatTxBytes),
	"VNICD_STAT_RX_PACKETS": uint64(StatRxPackets), "VNICD_STAT_RX_BYTES": uint64(StatRxBytes),
	"VNICD_STAT_TX_ACKS": uint64(StatTxAcks), "VNICD_STAT_TX_NAKS": uint64(StatTxNaks),
	"VNICD_STAT_TX_RNR": uint64(StatTxRNR),
	"VNICD_STAT_RX_RNR": uint64(StatRxRNR), "VNICD_STAT_RETRANSMITS": uint64(StatRetransmits),
	"VNICD_STAT_TIMEOUTS": uint64(StatTimeouts), "VNICD_STAT_OUT_OF_SEQUENCE": uint64(StatOutOfSequence),
	"VNICD_STAT_DUPLICATES": uint64(StatDuplicates), "VNICD_STAT_ICRC_ERRORS": uint64(StatICRCErrors),
	"VNICD_STAT_RX_DROPPED": uint64(StatRxDropped), "VNICD_STAT_ACCESS_ERRORS": uint64(StatAccessErrors),
	"VNICD_STAT_GUEST_FAULTS": uint64(StatGuestFaults), "VNICD_STAT_HOST_FAULTS": uint64(StatHostFaults),
	"VNICD_STAT_INVALIDATIONS": uint64(StatInvalidations), "VNICD_STAT_FAULTS_RESUMED": uint64(StatFaultsResumed),
	"VNICD_STAT_FAULTS_FAILED": uint64(StatFaultsFailed), "VNICD_STAT_FAULT_DROPS": uint64(StatFaultDrops),
	"VNICD_NUM_STATS":    uint64(NumStats),
	"VNICD_EVENT_CQ_ERR": uint64(EventCQErr), "VNICD_EVENT_QP_FATAL": uint64(EventQPFatal),
	"VNICD_EVENT_QP_REQ_ERR": uint64(EventQPReqErr), "VNICD_EVENT_QP_ACCESS_ERR": uint64(EventQPAccessErr),
	"VNICD_EVENT_QP_COMM_EST": uint64(EventQPCommEst), "VNICD_EVENT_SQ_DRAINED": uint64(EventSQDrained),
	"VNICD_EVENT_QP_LAST_WQE": uint64(EventQPLastWQE), "VNICD_EVENT_SRQ_ERR": uint64(EventSRQErr),
	"VNICD_EVENT_SRQ_LIMIT": uint64(EventSRQLimit), "VNICD_EVENT_PAGE_FAULT": uint64(EventPageFault),
}

// uapiConsts are the numbers of the RDMA core that the uapi headers name.
var uapiConsts = map[string]uint64{
	"IB_UVERBS_WR_RDMA_WRITE": WRRDMAWrite, "IB_UVERBS_WR_RDMA_WRITE_WITH_IMM": WRRDMAWriteWithImm,
	"IB_UVERBS_WR_SEND": WRSend, "IB_UVERBS_WR_SEND_WITH_IMM": WRSendWithImm, "IB_UVERBS_WR_RDMA_READ": WRRDMARead,
	"IB_UVERBS_WR_ATOMIC_CMP_AND_SWP": WRAtomicCmpAndSwp, "IB_UVERBS_WR_ATOMIC_FETCH_AND_ADD": WRAtomicFetchAndAdd,
	"IB_UVERBS_WR_LOCAL_INV": WRLocalInv, "IB_UVERBS_WR_BIND_MW": WRBindMW, "IB_UVERBS_WR_SEND_WITH_INV": WRSendWithInv,
	"IB_UVERBS_WR_TSO": WRTSO, "IB_UVERBS_WR_RDMA_READ_WITH_INV": WRRDMAReadWithInv,
	"IB_UVERBS_WR_MASKED_ATOMIC_CMP_AND_SWP":   WRMaskedAtomicCmpAndSwp,
	"IB_UVERBS_WR_MASKED_ATOMIC_FETCH_AND_ADD": WRMaskedAtomicFetchAdd,
	"IB_UVERBS_WC_SEND":                        WCOpSend, "IB_UVERBS_WC_RDMA_WRITE": WCOpRDMAWrite,
	"IB_UVERBS_WC_RDMA_READ": WCOpRDMARead,
	"IB_UVERBS_WC_COMP_SWAP": WCOpCompSwap, "IB_UVERBS_WC_FETCH_ADD": WCOpFetchAdd, "IB_UVERBS_WC_BIND_MW": WCOpBindMW,
	"IB_UVERBS_WC_LOCAL_INV": WCOpLocalInv, "IB_UVERBS_WC_TSO": WCOpTSO,
	"IB_UVERBS_ACCESS_LOCAL_WRITE": AccessLocalWrite, "IB_UVERBS_ACCESS_REMOTE_WRITE": AccessRemoteWrite,
	"IB_UVERBS_ACCESS_REMOTE_READ": AccessRemoteRead, "IB_UVERBS_ACCESS_REMOTE_ATOMIC": AccessRemoteAtomic,
	"IB_UVERBS_ACCESS_MW_BIND": AccessMWBind, "IB_UVERBS_ACCESS_ZERO_BASED": AccessZeroBased,
	"IB_UVERBS_ACCESS_ON_DEMAND": AccessOnDemand, "IB_UVERBS_ACCESS_HUGETLB": AccessHugeTLB,
	"IB_UVERBS_ACCESS_RELAXED_ORDERING": AccessRelaxedOrdering, "IB_UVERBS_ACCESS_OPTIONAL_RANGE": AccessOptional,
	"IB_UVERBS_QPT_RC": QPTypeRC, "IB_UVERBS_QPT_UC": QPTypeUC, "IB_UVERBS_QPT_UD": QPTypeUD,
}

// verbsConsts are defined in libibverbs' <infiniband/verbs.h> (libibverbs-dev), not in linux-libc-dev. They are
// compared if that header is installed; TestCoreNumbers compares them with literals everywhere.
var verbsConsts = map[string]uint64{
	"IBV_QPS_RESET": QPReset, "IBV_QPS_INIT": QPInit, "IBV_QPS_RTR": QPRTR, "IBV_QPS_RTS": QPRTS, "IBV_QPS_SQD": QPSQD,
	"IBV_QPS_SQE": QPSQE, "IBV_QPS_ERR": QPErr,
	"IBV_QP_STATE": QPAttrState, "IBV_QP_CUR_STATE": QPAttrCurState, "IBV_QP_EN_SQD_ASYNC_NOTIFY": QPAttrEnSQDAsyncNotify,
	"IBV_QP_ACCESS_FLAGS": QPAttrAccessFlags, "IBV_QP_PKEY_INDEX": QPAttrPKeyIndex, "IBV_QP_PORT": QPAttrPort,
	"IBV_QP_QKEY": QPAttrQKey, "IBV_QP_AV": QPAttrAV, "IBV_QP_PATH_MTU": QPAttrPathMTU, "IBV_QP_TIMEOUT": QPAttrTimeout,
	"IBV_QP_RETRY_CNT": QPAttrRetryCnt, "IBV_QP_RNR_RETRY": QPAttrRNRRetry, "IBV_QP_RQ_PSN": QPAttrRQPSN,
	"IBV_QP_MAX_QP_RD_ATOMIC": QPAttrMaxQPRdAtomic, "IBV_QP_ALT_PATH": QPAttrAltPath,
	"IBV_QP_MIN_RNR_TIMER": QPAttrMinRNRTimer,
	"IBV_QP_SQ_PSN":        QPAttrSQPSN, "IBV_QP_MAX_DEST_RD_ATOMIC": QPAttrMaxDestRdAtomic,
	"IBV_QP_PATH_MIG_STATE": QPAttrPathMigState,
	"IBV_QP_CAP":            QPAttrCap, "IBV_QP_DEST_QPN": QPAttrDestQPN, "IBV_QP_RATE_LIMIT": QPAttrRateLimit,
	"IBV_MTU_256": MTU256, "IBV_MTU_512": MTU512, "IBV_MTU_1024": MTU1024, "IBV_MTU_2048": MTU2048,
	"IBV_MTU_4096":   MTU4096,
	"IBV_SEND_FENCE": SendFence, "IBV_SEND_SIGNALED": SendSignaled, "IBV_SEND_SOLICITED": SendSolicited,
	"IBV_SEND_INLINE": SendInline, "IBV_SEND_IP_CSUM": SendIPCsum,
	"IBV_WC_SUCCESS": WCSuccess, "IBV_WC_LOC_LEN_ERR": WCLocLenErr, "IBV_WC_LOC_QP_OP_ERR": WCLocQPOpErr,
	"IBV_WC_LOC_EEC_OP_ERR": WCLocEECOpErr, "IBV_WC_LOC_PROT_ERR": WCLocProtErr, "IBV_WC_WR_FLUSH_ERR": WCWRFlushErr,
	"IBV_WC_MW_BIND_ERR": WCMWBindErr, "IBV_WC_BAD_RESP_ERR": WCBadRespErr, "IBV_WC_LOC_ACCESS_ERR": WCLocAccessErr,
	"IBV_WC_REM_INV_REQ_ERR": WCRemInvReqErr, "IBV_WC_REM_ACCESS_ERR": WCRemAccessErr, "IBV_WC_REM_OP_ERR": WCRemOpErr,
	"IBV_WC_RETRY_EXC_ERR": WCRetryExcErr, "IBV_WC_RNR_RETRY_EXC_ERR": WCRNRRetryExcErr,
	"IBV_WC_LOC_RDD_VIOL_ERR": WCLocRDDViolErr, "IBV_WC_REM_INV_RD_REQ_ERR": WCRemInvRdReqErr,
	"IBV_WC_REM_ABORT_ERR": WCRemAbortErr, "IBV_WC_INV_EECN_ERR": WCInvEECNErr,
	"IBV_WC_INV_EEC_STATE_ERR": WCInvEECStateErr,
	"IBV_WC_FATAL_ERR":         WCFatalErr, "IBV_WC_RESP_TIMEOUT_ERR": WCRespTimeoutErr,
	"IBV_WC_GENERAL_ERR": WCGeneralErr,
	"IBV_WC_RECV":        WCOpRecv, "IBV_WC_RECV_RDMA_WITH_IMM": WCOpRecvRDMAWithImm,
	"IBV_WC_GRH": WCFlagGRH, "IBV_WC_WITH_IMM": WCFlagWithImm, "IBV_WC_WITH_INV": WCFlagWithInvalidateUser,
	"IBV_PORT_NOP": PortNop, "IBV_PORT_DOWN": PortDown, "IBV_PORT_INIT": PortInit, "IBV_PORT_ARMED": PortArmed,
	"IBV_PORT_ACTIVE": PortActive,
}

// goOffsets are the offset and size constants of structures that have no Go struct: C expression -> Go value.
var goOffsets = map[string]uint64{
	"offsetof(struct vnicd_doorbells, need_wakeup)":           DoorbellNeedWakeupOff,
	"offsetof(struct vnicd_doorbells, summary)":               DoorbellSummaryOff,
	"offsetof(struct vnicd_doorbells, bits)":                  DoorbellBitsOff,
	"offsetof(struct vnicd_doorbells, nonce)":                 DoorbellNonceOff,
	"sizeof(struct vnicd_doorbells) / 4096":                   DoorbellPages,
	"offsetof(struct rxe_queue_buf, log2_elem_size)":          RingLog2ElemSizeOff,
	"offsetof(struct rxe_queue_buf, index_mask)":              RingIndexMaskOff,
	"offsetof(struct rxe_queue_buf, producer_index)":          RingProducerOff,
	"offsetof(struct rxe_queue_buf, consumer_index)":          RingConsumerOff,
	"offsetof(struct rxe_queue_buf, data)":                    RingDataOff,
	"sizeof(struct rxe_queue_buf)":                            RingDataOff,
	"offsetof(struct rxe_send_wqe, wr.wr_id)":                 SendWQEIDOff,
	"offsetof(struct rxe_send_wqe, wr.opcode)":                SendWQEOpcodeOff,
	"offsetof(struct rxe_send_wqe, wr.send_flags)":            SendWQEFlagsOff,
	"offsetof(struct rxe_send_wqe, wr.ex)":                    SendWQEExOff,
	"offsetof(struct rxe_send_wqe, wr.wr.rdma.remote_addr)":   SendWQERemoteAddrOff,
	"offsetof(struct rxe_send_wqe, wr.wr.rdma.rkey)":          SendWQERKeyOff,
	"offsetof(struct rxe_send_wqe, wr.wr.atomic.remote_addr)": SendWQERemoteAddrOff,
	"offsetof(struct rxe_send_wqe, wr.wr.atomic.compare_add)": SendWQECompareAddOff,
	"offsetof(struct rxe_send_wqe, wr.wr.atomic.swap)":        SendWQESwapOff,
	"offsetof(struct rxe_send_wqe, wr.wr.atomic.rkey)":        SendWQEAtomicRKeyOff,
	"offsetof(struct rxe_send_wqe, wr.wr.ud.remote_qpn)":      SendWQERemoteQPNOff,
	"offsetof(struct rxe_send_wqe, wr.wr.ud.remote_qkey)":     SendWQEQKeyOff,
	"offsetof(struct rxe_send_wqe, wr.wr.ud.pkey_index)":      SendWQEPKeyIndexOff,
	"offsetof(struct rxe_send_wqe, wr.wr.ud.ah_num)":          SendWQEAHNumOff,
	"offsetof(struct rxe_send_wqe, wr.wr.mw.addr)":            SendWQEMWAddrOff,
	"offsetof(struct rxe_send_wqe, wr.wr.mw.length)":          SendWQEMWLengthOff,
	"offsetof(struct rxe_send_wqe, wr.wr.mw.mr_lkey)":         SendWQEMWMRLKeyOff,
	"offsetof(struct rxe_send_wqe, wr.wr.mw.mw_rkey)":         SendWQEMWRKeyOff,
	"offsetof(struct rxe_send_wqe, wr.wr.mw.rkey)":            SendWQEMWNewRKeyOff,
	"offsetof(struct rxe_send_wqe, wr.wr.mw.access)":          SendWQEMWAccessOff,
	"offsetof(struct rxe_send_wqe, status)":                   SendWQEStatusOff,
	"offsetof(struct rxe_send_wqe, state)":                    SendWQEStateOff,
	"offsetof(struct rxe_send_wqe, iova)":                     SendWQEIOVAOff,
	"offsetof(struct rxe_send_wqe, dma.length)":               SendWQEDMALengthOff,
	"offsetof(struct rxe_send_wqe, dma.resid)":                SendWQEResidOff,
	"offsetof(struct rxe_send_wqe, dma.num_sge)":              SendWQENumSGEOff,
	"offsetof(struct rxe_send_wqe, dma.sge)":                  SendWQESGEOff,
	"offsetof(struct rxe_send_wqe, dma.inline_data)":          SendWQESGEOff,
	"sizeof(struct rxe_send_wqe)":                             SizeSendWQE,
	"offsetof(struct rxe_recv_wqe, wr_id)":                    RecvWQEIDOff,
	"offsetof(struct rxe_recv_wqe, dma.length)":               RecvWQEDMALengthOff,
	"offsetof(struct rxe_recv_wqe, dma.resid)":                RecvWQEDMALengthOff + 4,
	"offsetof(struct rxe_recv_wqe, dma.num_sge)":              RecvWQENumSGEOff,
	"offsetof(struct rxe_recv_wqe, dma.sge)":                  RecvWQESGEOff,
	"sizeof(struct rxe_recv_wqe)":                             SizeRecvWQE,
	"offsetof(struct rxe_sge, addr)":                          0,
	"offsetof(struct rxe_sge, length)":                        8,
	"offsetof(struct rxe_sge, lkey)":                          12,
	"sizeof(struct rxe_sge)":                                  SizeSGE,
	"sizeof(struct ib_uverbs_wc)":                             SizeWC,
}

// field is the place where Encode puts a field of a Go struct, found by encoding the struct with only that field set.
type field struct {
	cname        string
	offset, size int
}

func probeFields(t *testing.T, mk func() record, size int) []field {
	t.Helper()
	typ := reflect.TypeOf(mk()).Elem()
	var out []field
	for i := range typ.NumField() {
		x := mk()
		setOnes(reflect.ValueOf(x).Elem().Field(i))
		b := make([]byte, size)
		x.Encode(b)
		first, last := bytes.IndexByte(b, 0xff), bytes.LastIndexByte(b, 0xff)
		if first < 0 {
			t.Fatalf("%v.%s is not encoded", typ, typ.Field(i).Name)
		}
		if i > 0 && first < out[i-1].offset+out[i-1].size {
			t.Errorf("%v.%s overlaps the field before it", typ, typ.Field(i).Name)
		}
		n := last + 1 - first
		switch typ.Field(i).Type { // nested structures end in reserved bytes
		case reflect.TypeFor[Ring]():
			n = SizeRing
		case reflect.TypeFor[AV]():
			n = SizeAV
		}
		out = append(out, field{typ.Field(i).Tag.Get("c"), first, n})
	}
	return out
}

func setOnes(v reflect.Value) {
	switch v.Kind() {
	case reflect.Array:
		for i := range v.Len() {
			setOnes(v.Index(i))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			setOnes(v.Field(i))
		}
	default:
		v.SetUint(1<<v.Type().Bits() - 1)
	}
}

// TestMatchesC compiles a C program that prints every size, offset and constant
// of the headers and compares them with this package.
func TestMatchesC(t *testing.T) {
	structs, consts := parseHeader(t)
	want := map[string]uint64{} // C expression -> the Go side's value
	add := func(expr string, v uint64) {
		if _, ok := want[expr]; ok {
			t.Errorf("%s is in the table twice", expr)
		}
		want[expr] = v
	}
	for _, s := range structs {
		mk, ok := goStructs[s.name]
		if !ok {
			t.Errorf("struct %s has no Go twin", s.name)
			continue
		}
		add("sizeof(struct "+s.name+")", uint64(sizes[s.name]))
		if mk == nil {
			continue
		}
		byName := map[string]field{}
		end := 0
		for _, f := range probeFields(t, mk, sizes[s.name]) {
			byName[f.cname] = f
			end = f.offset + f.size
		}
		for _, name := range s.fields {
			f, ok := byName[name]
			if !ok {
				t.Errorf("struct %s: field %s is missing in Go", s.name, name)
				continue
			}
			delete(byName, name)
			add(fmt.Sprintf("offsetof(struct %s, %s)", s.name, name), uint64(f.offset))
			add(fmt.Sprintf("sizeof(((struct %s *)0)->%s)", s.name, name), uint64(f.size))
		}
		for name := range byName {
			t.Errorf("struct %s: Go has a field %q that C does not", s.name, name)
		}
		if end != sizes[s.name] && len(s.reserved) == 0 {
			t.Errorf("struct %s: Go's fields end at %d of %d", s.name, end, sizes[s.name])
		}
	}
	for _, f := range probeFields(t, func() record { return new(WC) }, SizeWC) {
		add("offsetof(struct ib_uverbs_wc, "+f.cname+")", uint64(f.offset))
		add("sizeof(((struct ib_uverbs_wc *)0)->"+f.cname+")", uint64(f.size))
	}
	for _, name := range consts {
		if _, ok := goConsts[name]; !ok {
			t.Errorf("constant %s is missing in Go", name)
		}
	}
	for _, table := range []map[string]uint64{goConsts, uapiConsts, goOffsets} {
		for expr, v := range table {
			add(expr, v)
		}
	}

	got := runC(t, want, verbsConsts)
	for expr, v := range want {
		if g, ok := got[expr]; !ok {
			t.Errorf("%s: not printed by the C program", expr)
		} else if g != v {
			t.Errorf("%s is %d in C, %d in Go", expr, g, v)
		}
	}
	n := 0
	for expr, v := range verbsConsts {
		if g, ok := got[expr]; ok {
			n++
			if g != v {
				t.Errorf("%s is %d in C, %d in Go", expr, g, v)
			}
		}
	}
	t.Logf("%d sizes, offsets and constants agree; of %d numbers of <infiniband/verbs.h> %d compared", len(want),
		len(verbsConsts), n)
}

// runC compiles and runs a program that prints each expression; those of
// optional only if <infiniband/verbs.h> is there.
func runC(t *testing.T, want, optional map[string]uint64) map[string]uint64 {
	t.Helper()
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Fatalf("this test needs gcc and linux-libc-dev: %v", err)
	}
	header, err := filepath.Abs(abiHeader)
	if err != nil {
		t.Fatal(err)
	}
	var src bytes.Buffer
	fmt.Fprintf(&src, "#include <stddef.h>\n#include <stdio.h>\n#include %q\n", header)
	src.WriteString("#include <rdma/rdma_user_rxe.h>\n#include <rdma/ib_user_verbs.h>\n#include <rdma/ib_user_ioctl_verbs.h>\n")
	src.WriteString("#if __has_include(<infiniband/verbs.h>)\n#include <infiniband/verbs.h>\n#define HAVE_VERBS\n#endif\n")
	src.WriteString("int main(void) {\n")
	emit := func(exprs map[string]uint64) {
		for expr := range exprs {
			fmt.Fprintf(&src, "printf(\"%%s=%%llu\\n\", %q, (unsigned long long)(%s));\n", expr, expr)
		}
	}
	emit(want)
	src.WriteString("#ifdef HAVE_VERBS\n")
	emit(optional)
	src.WriteString("#endif\nreturn 0;\n}\n")

	dir := t.TempDir()
	cfile, bin := filepath.Join(dir, "abi.c"), filepath.Join(dir, "abi")
	if err := os.WriteFile(cfile, src.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(gcc, "-Wall", "-o", bin, cfile).CombinedOutput(); err != nil {
		t.Fatalf("gcc (are the headers of linux-libc-dev installed?): %v\n%s", err, out)
	}
	out, err := exec.Command(bin).Output()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]uint64{}
	for line := range strings.Lines(string(out)) {
		expr, val, _ := strings.Cut(strings.TrimSpace(line), "=")
		n, err := strconv.ParseUint(val, 10, 64)
		if err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		got[expr] = n
	}
	return got
}
