// SPDX-License-Identifier: Apache-2.0
/* Device, memory regions and queue pairs. */
#include <string.h>

#include "stress.h"

void nic_open(struct nic *n)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	int i;

	for (i = 0; list && list[i]; i++)
		if (!strcmp(ibv_get_device_name(list[i]), opt.device))
			n->ctx = ibv_open_device(list[i]);
	if (!n->ctx)
		fail(EXIT_SETUP, "no RDMA device %s: %m", opt.device);
	ibv_free_device_list(list);
	n->pd = ibv_alloc_pd(n->ctx);
	if (!n->pd || ibv_query_port(n->ctx, 1, &n->port) || ibv_query_gid(n->ctx, 1, opt.gid_index, &n->gid))
		fail(EXIT_SETUP, "opening %s: %m", opt.device);
}

struct ibv_mr *nic_register(struct nic *n, enum memory kind, void *p, size_t len, int access)
{
	struct ibv_mr *mr;

	if (kind == IMPLICIT) {
		if (!n->implicit)
			n->implicit = ibv_reg_mr(n->pd, NULL, SIZE_MAX,
						 IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
						 IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC |
						 IBV_ACCESS_ON_DEMAND);
		if (!n->implicit)
			fail(EXIT_SETUP, "registering the implicit region: %m");
		return n->implicit;
	}
	mr = ibv_reg_mr(n->pd, p, len, access | (kind == ON_DEMAND ? IBV_ACCESS_ON_DEMAND : 0));
	if (!mr)
		fail(EXIT_SETUP, "registering %zu bytes%s: %m", len, kind == ON_DEMAND ? " on demand" : "");
	return mr;
}

struct ibv_qp *nic_qp(struct nic *n, enum ibv_qp_type type, struct ibv_cq *cq, unsigned depth)
{
	struct ibv_qp_init_attr a = {
		.send_cq = cq, .recv_cq = cq, .qp_type = type, .sq_sig_all = 1,
		.cap = { .max_send_wr = depth, .max_recv_wr = depth, .max_send_sge = 2, .max_recv_sge = 2 },
	};
	struct ibv_qp *qp = ibv_create_qp(n->pd, &a);

	if (!qp)
		fail(EXIT_SETUP, "creating a queue pair: %m");
	return qp;
}

struct remote nic_self(struct nic *n, struct ibv_qp *qp, uint32_t psn)
{
	return (struct remote){ n->gid, qp->qp_num, psn, n->port.active_mtu };
}

static struct ibv_ah_attr path(const struct remote *to)
{
	return (struct ibv_ah_attr){
		.is_global = 1, .port_num = 1,
		.grh = { .dgid = to->gid, .sgid_index = opt.gid_index, .hop_limit = 64 },
	};
}

void qp_connect(struct nic *n, struct ibv_qp *qp, const struct remote *to, uint32_t psn)
{
	bool rc = qp->qp_type == IBV_QPT_RC;
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x1ee7,
		.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
	};
	int err;

	err = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			    (rc ? IBV_QP_ACCESS_FLAGS : IBV_QP_QKEY));
	if (err)
		fail(EXIT_SETUP, "queue pair to INIT: %s", strerror(err));

	a = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .ah_attr = path(to), .dest_qp_num = to->qpn, .rq_psn = to->psn,
		.path_mtu = to->mtu < n->port.active_mtu ? to->mtu : n->port.active_mtu,
		.max_dest_rd_atomic = 16, .min_rnr_timer = 12,
	};
	err = ibv_modify_qp(qp, &a, IBV_QP_STATE | (rc ? IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0));
	if (err)
		fail(EXIT_SETUP, "queue pair to RTR: %s", strerror(err));

	/* Swapping is slow: 4.3 s * 7 until the peer is given up. */
	a = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS, .sq_psn = psn, .timeout = 20, .retry_cnt = 7,
		.rnr_retry = opt.rnr_retry, .max_rd_atomic = 16,
	};
	err = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN |
			    (rc ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0));
	if (err)
		fail(EXIT_SETUP, "queue pair to RTS: %s", strerror(err));
}

void qp_reset(struct ibv_qp *qp)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RESET };
	int err = ibv_modify_qp(qp, &a, IBV_QP_STATE);

	if (err)
		fail(EXIT_SETUP, "queue pair to RESET: %s", strerror(err));
}

struct ibv_ah *nic_ah(struct nic *n, const struct remote *to)
{
	struct ibv_ah_attr a = path(to);
	struct ibv_ah *ah = ibv_create_ah(n->pd, &a);

	if (!ah)
		fail(EXIT_SETUP, "creating an address handle: %m");
	return ah;
}
