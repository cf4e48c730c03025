/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The numbers of verbs, as Linux's RDMA core has them.
 *
 * Generated from the Go constants of the device: go test ./guestdrv/libvnicd -run TestGenerated -update
 */
#ifndef VNICD_IB_H
#define VNICD_IB_H

/* Operations of send requests, vnicd_send_wr.opcode. */
#define VNICD_WR_RDMA_WRITE 0x0U /* RC, UC */
#define VNICD_WR_RDMA_WRITE_WITH_IMM 0x1U /* RC, UC; completes a receive of the peer */
#define VNICD_WR_SEND 0x2U /* all types */
#define VNICD_WR_SEND_WITH_IMM 0x3U /* all types */
#define VNICD_WR_RDMA_READ 0x4U /* RC */
#define VNICD_WR_ATOMIC_CMP_AND_SWP 0x5U /* RC; 8 bytes */
#define VNICD_WR_ATOMIC_FETCH_AND_ADD 0x6U /* RC; 8 bytes */
#define VNICD_WR_ATOMIC_WRITE 0xfU /* RC, VNICD_CAP_ATOMIC_WRITE; 8 bytes */

/* Bits of vnicd_send_wr.flags. */
#define VNICD_SEND_FENCE 0x1U /* start after all earlier READs and atomics of the QP */
#define VNICD_SEND_SIGNALED 0x2U /* write a completion on success, too */
#define VNICD_SEND_SOLICITED 0x4U /* raise an event if the peer armed for solicited ones */
#define VNICD_SEND_INLINE 0x8U /* copy the data into the queue while posting */

/* Statuses of completions, vnicd_wc.status (IBTA 11.6.2). */
#define VNICD_WC_SUCCESS 0x0U
#define VNICD_WC_LOC_LEN_ERR 0x1U /* wrong length, or a message longer than the receive request */
#define VNICD_WC_LOC_QP_OP_ERR 0x2U /* malformed, or not possible on this QP */
#define VNICD_WC_LOC_PROT_ERR 0x4U /* L_Key, range or rights of an SGE */
#define VNICD_WC_WR_FLUSH_ERR 0x5U /* the QP went to ERR or SQE before the request was complete */
#define VNICD_WC_MW_BIND_ERR 0x6U
#define VNICD_WC_BAD_RESP_ERR 0x7U /* malformed response of the peer */
#define VNICD_WC_LOC_ACCESS_ERR 0x8U /* of a receive: a peer's WRITE was denied access */
#define VNICD_WC_REM_INV_REQ_ERR 0x9U /* the peer rejects the request */
#define VNICD_WC_REM_ACCESS_ERR 0xaU /* the peer denies access: R_Key, range or rights */
#define VNICD_WC_REM_OP_ERR 0xbU /* the peer failed to execute the request */
#define VNICD_WC_RETRY_EXC_ERR 0xcU /* the peer did not answer */
#define VNICD_WC_RNR_RETRY_EXC_ERR 0xdU /* the peer had no receive request */

/* Operations that completions report, vnicd_wc.opcode; receives have the bit VNICD_WC_RECV. */
#define VNICD_WC_SEND 0x0U
#define VNICD_WC_RDMA_WRITE 0x1U
#define VNICD_WC_RDMA_READ 0x2U
#define VNICD_WC_COMP_SWAP 0x3U
#define VNICD_WC_FETCH_ADD 0x4U
#define VNICD_WC_ATOMIC_WRITE 0x9U
#define VNICD_WC_RECV 0x80U
#define VNICD_WC_RECV_RDMA_WITH_IMM 0x81U

/* Bits of vnicd_wc.flags. */
#define VNICD_WC_GRH 0x1U /* UD: the first 40 bytes of the buffer are a GRH */
#define VNICD_WC_WITH_IMM 0x2U /* vnicd_wc.imm is valid */

/* Access rights of regions and QPs. */
#define VNICD_ACCESS_LOCAL_WRITE 0x1U /* required by the two rights to write remotely */
#define VNICD_ACCESS_REMOTE_WRITE 0x2U
#define VNICD_ACCESS_REMOTE_READ 0x4U
#define VNICD_ACCESS_REMOTE_ATOMIC 0x8U

/* States of QPs, vnicd_qp_attr.qp_state (IBTA 10.3.1). */
#define VNICD_QPS_RESET 0x0U
#define VNICD_QPS_INIT 0x1U
#define VNICD_QPS_RTR 0x2U /* ready to receive */
#define VNICD_QPS_RTS 0x3U /* ready to send */
#define VNICD_QPS_SQD 0x4U /* send queue drained */
#define VNICD_QPS_SQE 0x5U /* send queue error; UC and UD */
#define VNICD_QPS_ERR 0x6U

/* Attributes of QPs, vnicd_qp_attr.attr_mask. */
#define VNICD_QP_STATE 0x1U
#define VNICD_QP_CUR_STATE 0x2U
#define VNICD_QP_EN_SQD_ASYNC_NOTIFY 0x4U
#define VNICD_QP_ACCESS_FLAGS 0x8U
#define VNICD_QP_PKEY_INDEX 0x10U
#define VNICD_QP_PORT 0x20U
#define VNICD_QP_QKEY 0x40U
#define VNICD_QP_AV 0x80U
#define VNICD_QP_PATH_MTU 0x100U
#define VNICD_QP_TIMEOUT 0x200U
#define VNICD_QP_RETRY_CNT 0x400U
#define VNICD_QP_RNR_RETRY 0x800U
#define VNICD_QP_RQ_PSN 0x1000U
#define VNICD_QP_MAX_QP_RD_ATOMIC 0x2000U
#define VNICD_QP_MIN_RNR_TIMER 0x8000U
#define VNICD_QP_SQ_PSN 0x10000U
#define VNICD_QP_MAX_DEST_RD_ATOMIC 0x20000U
#define VNICD_QP_DEST_QPN 0x100000U

/* Path MTUs: 128 << value bytes. */
#define VNICD_MTU_256 0x1U
#define VNICD_MTU_512 0x2U
#define VNICD_MTU_1024 0x3U
#define VNICD_MTU_2048 0x4U
#define VNICD_MTU_4096 0x5U

/* Other numbers. */
#define VNICD_NO_VLAN 0xffffU /* vnicd_av.vlan_id of an untagged path */
#define VNICD_ATOMIC_BYTES 0x8U /* size of the operand of an atomic */

#endif
