package libvnicd_test

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/virtio"
	"github.com/vnicd/vnicd/device/virtio/vhostuser"
)

var update = flag.Bool("update", false, "write the generated headers in place of comparing them")

// constant is a C constant whose value is the Go constant of the device.
type constant struct {
	name  string
	value uint64
	doc   string
}

// group is a list of constants under one comment.
type group struct {
	doc  string
	list []constant
}

// verbs are the numbers of Linux's RDMA core that the device's commands and rings use, see abi/ib.go.
var verbs = []group{
	{"Operations of send requests, vnicd_send_wr.opcode.", []constant{
		{"VNICD_WR_RDMA_WRITE", abi.WRRDMAWrite, "RC, UC"},
		{"VNICD_WR_RDMA_WRITE_WITH_IMM", abi.WRRDMAWriteWithImm, "RC, UC; completes a receive of the peer"},
		{"VNICD_WR_SEND", abi.WRSend, "all types"},
		{"VNICD_WR_SEND_WITH_IMM", abi.WRSendWithImm, "all types"},
		{"VNICD_WR_RDMA_READ", abi.WRRDMARead, "RC"},
		{"VNICD_WR_ATOMIC_CMP_AND_SWP", abi.WRAtomicCmpAndSwp, "RC; 8 bytes"},
		{"VNICD_WR_ATOMIC_FETCH_AND_ADD", abi.WRAtomicFetchAndAdd, "RC; 8 bytes"},
		{"VNICD_WR_ATOMIC_WRITE", abi.WRAtomicWrite, "RC, VNICD_CAP_ATOMIC_WRITE; 8 bytes"},
	}},
	{"Bits of vnicd_send_wr.flags.", []constant{
		{"VNICD_SEND_FENCE", abi.SendFence, "start after all earlier READs and atomics of the QP"},
		{"VNICD_SEND_SIGNALED", abi.SendSignaled, "write a completion on success, too"},
		{"VNICD_SEND_SOLICITED", abi.SendSolicited, "raise an event if the peer armed for solicited ones"},
		{"VNICD_SEND_INLINE", abi.SendInline, "copy the data into the queue while posting"},
	}},
	{"Statuses of completions, vnicd_wc.status (IBTA 11.6.2).", []constant{
		{"VNICD_WC_SUCCESS", abi.WCSuccess, ""},
		{"VNICD_WC_LOC_LEN_ERR", abi.WCLocLenErr, "wrong length, or a message longer than the receive request"},
		{"VNICD_WC_LOC_QP_OP_ERR", abi.WCLocQPOpErr, "malformed, or not possible on this QP"},
		{"VNICD_WC_LOC_PROT_ERR", abi.WCLocProtErr, "L_Key, range or rights of an SGE"},
		{"VNICD_WC_WR_FLUSH_ERR", abi.WCWRFlushErr, "the QP went to ERR or SQE before the request was complete"},
		{"VNICD_WC_MW_BIND_ERR", abi.WCMWBindErr, ""},
		{"VNICD_WC_BAD_RESP_ERR", abi.WCBadRespErr, "malformed response of the peer"},
		{"VNICD_WC_LOC_ACCESS_ERR", abi.WCLocAccessErr, "of a receive: a peer's WRITE was denied access"},
		{"VNICD_WC_REM_INV_REQ_ERR", abi.WCRemInvReqErr, "the peer rejects the request"},
		{"VNICD_WC_REM_ACCESS_ERR", abi.WCRemAccessErr, "the peer denies access: R_Key, range or rights"},
		{"VNICD_WC_REM_OP_ERR", abi.WCRemOpErr, "the peer failed to execute the request"},
		{"VNICD_WC_RETRY_EXC_ERR", abi.WCRetryExcErr, "the peer did not answer"},
		{"VNICD_WC_RNR_RETRY_EXC_ERR", abi.WCRNRRetryExcErr, "the peer had no receive request"},
	}},
	{"Operations that completions report, vnicd_wc.opcode; receives have the bit VNICD_WC_RECV.", []constant{
		{"VNICD_WC_SEND", abi.WCOpSend, ""},
		{"VNICD_WC_RDMA_WRITE", abi.WCOpRDMAWrite, ""},
		{"VNICD_WC_RDMA_READ", abi.WCOpRDMARead, ""},
		{"VNICD_WC_COMP_SWAP", abi.WCOpCompSwap, ""},
		{"VNICD_WC_FETCH_ADD", abi.WCOpFetchAdd, ""},
		{"VNICD_WC_ATOMIC_WRITE", abi.WCOpAtomicWrite, ""},
		{"VNICD_WC_RECV", abi.WCOpRecv, ""},
		{"VNICD_WC_RECV_RDMA_WITH_IMM", abi.WCOpRecvRDMAWithImm, ""},
	}},
	{"Bits of vnicd_wc.flags.", []constant{
		{"VNICD_WC_GRH", abi.WCFlagGRH, "UD: the first 40 bytes of the buffer are a GRH"},
		{"VNICD_WC_WITH_IMM", abi.WCFlagWithImm, "vnicd_wc.imm is valid"},
	}},
	{"Access rights of regions and QPs.", []constant{
		{"VNICD_ACCESS_LOCAL_WRITE", abi.AccessLocalWrite, "required by the two rights to write remotely"},
		{"VNICD_ACCESS_REMOTE_WRITE", abi.AccessRemoteWrite, ""},
		{"VNICD_ACCESS_REMOTE_READ", abi.AccessRemoteRead, ""},
		{"VNICD_ACCESS_REMOTE_ATOMIC", abi.AccessRemoteAtomic, ""},
	}},
	{"States of QPs, vnicd_qp_attr.qp_state (IBTA 10.3.1).", []constant{
		{"VNICD_QPS_RESET", abi.QPReset, ""},
		{"VNICD_QPS_INIT", abi.QPInit, ""},
		{"VNICD_QPS_RTR", abi.QPRTR, "ready to receive"},
		{"VNICD_QPS_RTS", abi.QPRTS, "ready to send"},
		{"VNICD_QPS_SQD", abi.QPSQD, "send queue drained"},
		{"VNICD_QPS_SQE", abi.QPSQE, "send queue error; UC and UD"},
		{"VNICD_QPS_ERR", abi.QPErr, ""},
	}},
	{"Attributes of QPs, vnicd_qp_attr.attr_mask.", []constant{
		{"VNICD_QP_STATE", abi.QPAttrState, ""},
		{"VNICD_QP_CUR_STATE", abi.QPAttrCurState, ""},
		{"VNICD_QP_EN_SQD_ASYNC_NOTIFY", abi.QPAttrEnSQDAsyncNotify, ""},
		{"VNICD_QP_ACCESS_FLAGS", abi.QPAttrAccessFlags, ""},
		{"VNICD_QP_PKEY_INDEX", abi.QPAttrPKeyIndex, ""},
		{"VNICD_QP_PORT", abi.QPAttrPort, ""},
		{"VNICD_QP_QKEY", abi.QPAttrQKey, ""},
		{"VNICD_QP_AV", abi.QPAttrAV, ""},
		{"VNICD_QP_PATH_MTU", abi.QPAttrPathMTU, ""},
		{"VNICD_QP_TIMEOUT", abi.QPAttrTimeout, ""},
		{"VNICD_QP_RETRY_CNT", abi.QPAttrRetryCnt, ""},
		{"VNICD_QP_RNR_RETRY", abi.QPAttrRNRRetry, ""},
		{"VNICD_QP_RQ_PSN", abi.QPAttrRQPSN, ""},
		{"VNICD_QP_MAX_QP_RD_ATOMIC", abi.QPAttrMaxQPRdAtomic, ""},
		{"VNICD_QP_MIN_RNR_TIMER", abi.QPAttrMinRNRTimer, ""},
		{"VNICD_QP_SQ_PSN", abi.QPAttrSQPSN, ""},
		{"VNICD_QP_MAX_DEST_RD_ATOMIC", abi.QPAttrMaxDestRdAtomic, ""},
		{"VNICD_QP_DEST_QPN", abi.QPAttrDestQPN, ""},
	}},
	{"Path MTUs: 128 << value bytes.", []constant{
		{"VNICD_MTU_256", abi.MTU256, ""},
		{"VNICD_MTU_512", abi.MTU512, ""},
		{"VNICD_MTU_1024", abi.MTU1024, ""},
		{"VNICD_MTU_2048", abi.MTU2048, ""},
		{"VNICD_MTU_4096", abi.MTU4096, ""},
	}},
	{"Other numbers.", []constant{
		{"VNICD_NO_VLAN", abi.NoVLAN, "vnicd_av.vlan_id of an untagged path"},
		{"VNICD_ATOMIC_BYTES", abi.AtomicLen, "size of the operand of an atomic"},
	}},
}

// transport are the numbers of vhost-user and virtio that the library uses.
var transport = []group{
	{"Requests of the front end (vhost-user, \"Front-end message types\").", []constant{
		{"VHOST_USER_GET_FEATURES", uint64(vhostuser.ReqGetFeatures), ""},
		{"VHOST_USER_SET_FEATURES", uint64(vhostuser.ReqSetFeatures), ""},
		{"VHOST_USER_SET_OWNER", uint64(vhostuser.ReqSetOwner), ""},
		{"VHOST_USER_SET_MEM_TABLE", uint64(vhostuser.ReqSetMemTable), ""},
		{"VHOST_USER_SET_VRING_NUM", uint64(vhostuser.ReqSetVringNum), ""},
		{"VHOST_USER_SET_VRING_ADDR", uint64(vhostuser.ReqSetVringAddr), ""},
		{"VHOST_USER_SET_VRING_BASE", uint64(vhostuser.ReqSetVringBase), ""},
		{"VHOST_USER_SET_VRING_KICK", uint64(vhostuser.ReqSetVringKick), ""},
		{"VHOST_USER_SET_VRING_CALL", uint64(vhostuser.ReqSetVringCall), ""},
		{"VHOST_USER_GET_PROTOCOL_FEATURES", uint64(vhostuser.ReqGetProtocolFeatures), ""},
		{"VHOST_USER_SET_PROTOCOL_FEATURES", uint64(vhostuser.ReqSetProtocolFeatures), ""},
		{"VHOST_USER_GET_QUEUE_NUM", uint64(vhostuser.ReqGetQueueNum), ""},
		{"VHOST_USER_SET_VRING_ENABLE", uint64(vhostuser.ReqSetVringEnable), ""},
		{"VHOST_USER_SET_BACKEND_REQ_FD", uint64(vhostuser.ReqSetBackendReqFD), ""},
		{"VHOST_USER_GET_CONFIG", uint64(vhostuser.ReqGetConfig), ""},
		{"VHOST_USER_ADD_MEM_REG", uint64(vhostuser.ReqAddMemReg), ""},
		{"VHOST_USER_REM_MEM_REG", uint64(vhostuser.ReqRemMemReg), ""},
		{"VHOST_USER_SET_STATUS", uint64(vhostuser.ReqSetStatus), ""},
		{"VHOST_USER_GET_STATUS", uint64(vhostuser.ReqGetStatus), ""},
		{"VHOST_USER_GET_MEMORY", uint64(vhostuser.ReqGetMemory), "vnicd's own: a memory file"},
		{"VHOST_USER_BACKEND_CONFIG_CHANGE", uint64(vhostuser.BackendConfigChange), "of the back end"},
	}},
	{"Protocol features.", []constant{
		{"VHOST_USER_PROTOCOL_F_MQ", vhostuser.ProtoMQ, ""},
		{"VHOST_USER_PROTOCOL_F_REPLY_ACK", vhostuser.ProtoReplyAck, ""},
		{"VHOST_USER_PROTOCOL_F_BACKEND_REQ", vhostuser.ProtoBackendReq, ""},
		{"VHOST_USER_PROTOCOL_F_CONFIG", vhostuser.ProtoConfig, ""},
		{"VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS", vhostuser.ProtoConfigureMemSlots, ""},
		{"VHOST_USER_PROTOCOL_F_STATUS", vhostuser.ProtoStatus, ""},
		{"VHOST_USER_PROTOCOL_F_MEMORY", vhostuser.ProtoMemory, "vnicd's own: GET_MEMORY"},
	}},
	{"Bits of a message's flags, and limits.", []constant{
		{"VHOST_USER_VERSION_MASK", vhostuser.FlagVersionMask, ""},
		{"VHOST_USER_VERSION", vhostuser.FlagVersion, ""},
		{"VHOST_USER_REPLY", vhostuser.FlagReply, ""},
		{"VHOST_USER_NEED_REPLY", vhostuser.FlagNeedReply, ""},
		{"VHOST_USER_HEADER_BYTES", vhostuser.HeaderSize, ""},
		{"VHOST_USER_MAX_QUEUES", vhostuser.MaxQueues, ""},
	}},
	{"Feature bits, as masks.", []constant{
		{"VHOST_FEATURE_PROTOCOL_FEATURES", vhostuser.FeatureProtocolFeatures, ""},
		{"VHOST_FEATURE_VERSION_1", virtio.FeatureVersion1, ""},
	}},
}

func render(guard, doc string, groups []group) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "/* SPDX-License-Identifier: Apache-2.0 */\n/*\n * %s\n *\n"+
		" * Generated from the Go constants of the device: go test ./guestdrv/libvnicd -run TestGenerated -update\n */\n"+
		"#ifndef %s\n#define %s\n", doc, guard, guard)
	for _, g := range groups {
		fmt.Fprintf(&b, "\n/* %s */\n", g.doc)
		for _, c := range g.list {
			value := fmt.Sprintf("%#xU", c.value)
			if c.value > 1<<31 {
				value = fmt.Sprintf("%#xULL", c.value)
			}
			fmt.Fprintf(&b, "#define %s %s", c.name, value)
			if c.doc != "" {
				fmt.Fprintf(&b, " /* %s */", c.doc)
			}
			b.WriteByte('\n')
		}
	}
	return b.Bytes()
}

func renderNames() []byte {
	var b bytes.Buffer
	b.WriteString("\n/* Descriptions of completion statuses, by number. */\n#define VNICD_WC_STATUS_NAMES { \\\n")
	for s := uint32(0); abi.WCStatusString(s) != abi.WCStatusString(^uint32(0)); s++ {
		fmt.Fprintf(&b, "\t%q, \\\n", abi.WCStatusString(s))
	}
	b.WriteString("}\n")
	return b.Bytes()
}

// TestGenerated compares the generated headers with the constants of the device: C has no second set of numbers.
func TestGenerated(t *testing.T) {
	end := []byte("\n#endif\n")
	for path, want := range map[string][]byte{
		"include/vnicd_ib.h": append(render("VNICD_IB_H", "The numbers of verbs, as Linux's RDMA core has them.", verbs),
			end...),
		"src/transport.h": append(append(render("VNICD_TRANSPORT_H", "The numbers of vhost-user, and names of statuses.",
			transport), renderNames()...), end...),
	} {
		if *update {
			if err := os.WriteFile(path, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s differs from the Go constants: write it with -update", path)
		}
	}
}
