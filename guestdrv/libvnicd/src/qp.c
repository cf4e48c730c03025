/* SPDX-License-Identifier: Apache-2.0 */
/* Work rings in the user ABI of rdma_rxe (rdma_user_rxe.h), and QPs. */
#include <stdlib.h>
#include <string.h>

#include <rdma/rdma_user_rxe.h>

#include "internal.h"

/* Makes a ring for at least n elements of at least elem_size bytes, in the limits of struct vnicd_ring. */
int ring_init(struct ring *r, struct memory *m, uint32_t n, uint64_t elem_size)
{
	struct rxe_queue_buf *h;
	uint64_t elems = 2;

	if (n >= 1U << 31 || elem_size > 1U << 16)
		return set_error(-EINVAL, "a queue of %u elements of %llu bytes", n, (unsigned long long)elem_size);
	r->log2 = 6;
	while (1U << r->log2 < elem_size)
		r->log2++;
	while (elems <= n) /* one element stays empty */
		elems *= 2;
	h = mem_alloc(m, sizeof(*h) + (elems << r->log2));
	if (!h)
		return -ENOMEM;
	h->log2_elem_size = r->log2;
	h->index_mask = (uint32_t)elems - 1;
	r->mem = h;
	r->data = h->data;
	r->mask = (uint32_t)elems - 1;
	r->prod = (_Atomic uint32_t *)&h->producer_index;
	r->cons = (_Atomic uint32_t *)&h->consumer_index;
	return 0;
}

void ring_fini(struct ring *r, struct memory *m)
{
	if (r->mem)
		mem_free(m, r->mem);
	r->mem = NULL;
}

void ring_describe(const struct ring *r, struct vnicd_ring *d)
{
	uint64_t length = sizeof(struct rxe_queue_buf) + ((uint64_t)(r->mask + 1) << r->log2);

	*d = (struct vnicd_ring){
		.length = length, .npages = (uint32_t)((length + PAGE_BYTES - 1) >> PAGE_SHIFT),
		.page_shift = PAGE_SHIFT,
		.log2_elem_size = r->log2, .num_elems = r->mask + 1,
	};
}

static void release_qp(struct object *o)
{
	struct vnicd_qp *qp = (struct vnicd_qp *)o;

	ring_fini(&qp->sq, &o->dev->mem);
	ring_fini(&qp->rq, &o->dev->mem);
	free(qp);
}

static uint32_t at_least_one(uint32_t n)
{
	return n ? n : 1;
}

static int check_init(const struct vnicd_device *dev, const struct vnicd_qp_init *c)
{
	const struct vnicd_device_attr *a = &dev->attr;

	if (c->type != VNICD_QPT_RC && c->type != VNICD_QPT_UC && c->type != VNICD_QPT_UD)
		return set_error(-EINVAL, "QP type %u, expected VNICD_QPT_RC, VNICD_QPT_UC or VNICD_QPT_UD", c->type);
	if (!c->send_cq || !c->recv_cq || c->send_cq->o.dev != dev || c->recv_cq->o.dev != dev)
		return set_error_text(-EINVAL, "a QP needs a send and a receive CQ of the same device");
	if (c->max_send_wr > a->max_qp_wr || c->max_recv_wr > a->max_qp_wr)
		return set_error(-EINVAL, "%u send and %u receive requests, at most %u", c->max_send_wr, c->max_recv_wr,
				 a->max_qp_wr);
	if (c->max_send_sge > a->max_sge || c->max_recv_sge > a->max_sge)
		return set_error(-EINVAL, "%u send and %u receive SGEs, at most %u", c->max_send_sge, c->max_recv_sge,
				 a->max_sge);
	if (c->max_inline > a->max_inline)
		return set_error(-EINVAL, "%u bytes of inline data, at most %u", c->max_inline, a->max_inline);
	return 0;
}

EXPORT int vnicd_create_qp(struct vnicd_pd *pd, const struct vnicd_qp_init *init, struct vnicd_qp **out)
{
	struct vnicd_device *dev = pd->o.dev;
	struct vnicd_create_qp_resp resp = { 0 };
	struct vnicd_create_qp req;
	struct vnicd_qp *qp;
	uint64_t room;
	int err;

	*out = NULL;
	err = check_init(dev, init);
	if (err)
		return err;
	qp = calloc(1, sizeof(*qp));
	if (!qp)
		return set_error_text(-ENOMEM, "out of memory");
	qp->o.dev = dev;
	qp->type = init->type;
	qp->max_send_sge = at_least_one(init->max_send_sge);
	qp->max_recv_sge = at_least_one(init->max_recv_sge);
	qp->max_inline = init->max_inline;
	room = qp->max_send_sge * sizeof(struct rxe_sge);
	if (room < qp->max_inline)
		room = qp->max_inline;
	err = ring_init(&qp->sq, &dev->mem, at_least_one(init->max_send_wr), sizeof(struct rxe_send_wqe) + room);
	if (!err)
		err = ring_init(&qp->rq, &dev->mem, at_least_one(init->max_recv_wr),
				sizeof(struct rxe_recv_wqe) + qp->max_recv_sge * sizeof(struct rxe_sge));
	if (!err) {
		req = (struct vnicd_create_qp){
			.type = init->type, .flags = init->sig_all ? VNICD_QP_SIG_ALL : 0, .pdn = pd->o.handle,
			.send_cqn = init->send_cq->o.handle, .recv_cqn = init->recv_cq->o.handle,
			.max_send_sge = qp->max_send_sge, .max_recv_sge = qp->max_recv_sge,
			.max_inline = qp->max_inline,
		};
		ring_describe(&qp->sq, &req.sq);
		ring_describe(&qp->rq, &req.rq);
		err = command_run(dev, &(struct command){
			VNICD_CMD_CREATE_QP, .fixed = &req, .size = sizeof(req), .pa = mem_pa(&dev->mem, qp->sq.mem),
			.n = req.sq.npages, .pa2 = mem_pa(&dev->mem, qp->rq.mem), .n2 = req.rq.npages, .resp = &resp,
			.resp_size = sizeof(resp), .resp_min = sizeof(resp) });
	}
	if (!err && (resp.engine >= dev->num_dbs || resp.db_slot >= VNICD_DB_SLOTS)) {
		/* The device has the QP, so its memory must not be used again. */
		device_fail(dev, -EPROTO, "CREATE_QP: engine %u, doorbell %u", resp.engine, resp.db_slot);
		err = device_check(dev);
	}
	if (err) {
		const char *text = vnicd_error();

		release_qp(&qp->o);
		return set_error_text(err, text);
	}
	qp->db = &dev->dbs[resp.engine];
	qp->slot = resp.db_slot;
	object_add(dev, &qp->o, VNICD_CMD_DESTROY_QP, resp.qpn, release_qp);
	*out = qp;
	return 0;
}

EXPORT int vnicd_destroy_qp(struct vnicd_qp *qp)
{
	return qp ? object_destroy(&qp->o) : 0;
}

EXPORT uint32_t vnicd_qp_number(const struct vnicd_qp *qp)
{
	return qp->o.handle;
}

/* After RESET: the queues are empty. The device owns the consumer indices. */
static void empty_ring(struct ring *r)
{
	r->own = atomic_load(r->cons) & r->mask;
	atomic_store(r->prod, r->own);
}

EXPORT int vnicd_modify_qp(struct vnicd_qp *qp, const struct vnicd_qp_attr *attr)
{
	struct vnicd_qp_attr req = *attr;
	int err;

	req.qpn = qp->o.handle;
	if (!(req.attr_mask & VNICD_QP_AV))
		memset(&req.av, 0, sizeof(req.av));
	err = command_run(qp->o.dev, &(struct command){ VNICD_CMD_MODIFY_QP, .fixed = &req, .size = sizeof(req) });
	if (!err && req.attr_mask & VNICD_QP_STATE && req.qp_state == VNICD_QPS_RESET) {
		empty_ring(&qp->sq);
		empty_ring(&qp->rq);
	}
	return err;
}

EXPORT int vnicd_query_qp(struct vnicd_qp *qp, struct vnicd_qp_attr *attr)
{
	struct vnicd_handle h = { .handle = qp->o.handle };

	return command_run(qp->o.dev, &(struct command){ VNICD_CMD_QUERY_QP, .fixed = &h, .size = sizeof(h),
		.resp = attr,
							 .resp_size = sizeof(*attr), .resp_min = sizeof(*attr) });
}

static int to_init(struct vnicd_qp *qp, uint32_t access, uint32_t qkey)
{
	struct vnicd_qp_attr a = {
		.attr_mask = VNICD_QP_STATE | VNICD_QP_PKEY_INDEX | VNICD_QP_PORT, .qp_state = VNICD_QPS_INIT,
		.port_num = 1,
	};

	if (qp->type == VNICD_QPT_UD) {
		a.attr_mask |= VNICD_QP_QKEY;
		a.qkey = qkey;
	} else {
		a.attr_mask |= VNICD_QP_ACCESS_FLAGS;
		a.access_flags = access;
	}
	return vnicd_modify_qp(qp, &a);
}

static uint8_t retries(uint8_t n)
{
	return n == VNICD_NO_RETRY ? 0 : n ? n : 7;
}

static uint8_t largest_mtu(uint32_t bytes)
{
	uint8_t m = VNICD_MTU_4096;

	while (m && 128U << m > bytes)
		m--;
	return m;
}

EXPORT int vnicd_connect_qp(struct vnicd_qp *qp, const struct vnicd_peer *peer,
			    const struct vnicd_connect_options *options)
{
	struct vnicd_connect_options o = { 0 };
	struct vnicd_device *dev = qp->o.dev;
	struct vnicd_qp_attr a;
	int err;

	if (qp->type == VNICD_QPT_UD)
		return set_error_text(-EINVAL, "a UD QP has no peer: see vnicd_start_ud");
	if (options)
		o = *options;
	if (!o.mtu) {
		struct vnicd_config c;

		err = vnicd_read_config(dev, &c);
		if (err)
			return err;
		o.mtu = largest_mtu(c.port_mtu);
		if (!o.mtu)
			return set_error(-EINVAL, "the port's MTU of %u bytes carries no RoCE", c.port_mtu);
	}
	if (!o.rd_atomic) {
		uint32_t n = dev->attr.max_qp_rd_atom < dev->attr.max_qp_init_rd_atom ? dev->attr.max_qp_rd_atom :
										       dev->attr.max_qp_init_rd_atom;

		o.rd_atomic = (uint8_t)(n < 16 ? n : 16);
	}
	err = to_init(qp, o.access, 0);
	if (err)
		return err;
	a = (struct vnicd_qp_attr){
		.attr_mask = VNICD_QP_STATE | VNICD_QP_AV | VNICD_QP_PATH_MTU | VNICD_QP_DEST_QPN | VNICD_QP_RQ_PSN,
		.qp_state = VNICD_QPS_RTR, .path_mtu = o.mtu, .dest_qpn = peer->qpn, .rq_psn = peer->psn,
		.max_dest_rd_atomic = o.rd_atomic, .min_rnr_timer = o.min_rnr_timer ? o.min_rnr_timer : 12,
		.av = peer->av,
	};
	if (qp->type == VNICD_QPT_RC)
		a.attr_mask |= VNICD_QP_MAX_DEST_RD_ATOMIC | VNICD_QP_MIN_RNR_TIMER;
	err = vnicd_modify_qp(qp, &a);
	if (err)
		return err;
	a = (struct vnicd_qp_attr){
		.attr_mask = VNICD_QP_STATE | VNICD_QP_SQ_PSN, .qp_state = VNICD_QPS_RTS, .sq_psn = o.psn,
		.timeout = o.timeout ? o.timeout : 14, .retry_cnt = retries(o.retry_cnt),
		.rnr_retry = retries(o.rnr_retry),
		.max_rd_atomic = o.rd_atomic,
	};
	if (qp->type == VNICD_QPT_RC)
		a.attr_mask |= VNICD_QP_TIMEOUT | VNICD_QP_RETRY_CNT | VNICD_QP_RNR_RETRY | VNICD_QP_MAX_QP_RD_ATOMIC;
	return vnicd_modify_qp(qp, &a);
}

EXPORT int vnicd_start_ud(struct vnicd_qp *qp, uint32_t qkey)
{
	struct vnicd_qp_attr a = { .attr_mask = VNICD_QP_STATE, .qp_state = VNICD_QPS_RTR };
	int err;

	if (qp->type != VNICD_QPT_UD)
		return set_error_text(-EINVAL, "not a UD QP: see vnicd_connect_qp");
	err = to_init(qp, 0, qkey);
	if (!err)
		err = vnicd_modify_qp(qp, &a);
	if (err)
		return err;
	a.attr_mask |= VNICD_QP_SQ_PSN;
	a.qp_state = VNICD_QPS_RTS;
	return vnicd_modify_qp(qp, &a);
}
