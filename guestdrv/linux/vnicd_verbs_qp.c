// SPDX-License-Identifier: GPL-2.0
/* Queue pairs: creation, state, destruction. Posting is in vnicd_verbs_post.c. */
#include <linux/slab.h>
#include <rdma/ib_addr.h>
#include <rdma/ib_cache.h>

#include "vnicd.h"

struct vnicd_qp *vnicd_qp_get(struct vnicd_dev *vd, u32 qpn)
{
	struct vnicd_qp *qp;
	unsigned long flags;

	xa_lock_irqsave(&vd->qps, flags);
	qp = xa_load(&vd->qps, qpn);
	if (qp && !refcount_inc_not_zero(&qp->refs))
		qp = NULL;
	xa_unlock_irqrestore(&vd->qps, flags);
	return qp;
}

void vnicd_qp_put(struct vnicd_qp *qp)
{
	if (refcount_dec_and_test(&qp->refs))
		complete(&qp->unused);
}

static int vnicd_qp_type(struct vnicd_dev *vd, enum ib_qp_type type, bool user)
{
	switch (type) {
	case IB_QPT_RC:
		return VNICD_QPT_RC;
	case IB_QPT_UD:
		return VNICD_QPT_UD;
	case IB_QPT_UC:
		return vd->lim.caps & VNICD_CAP_UC ? VNICD_QPT_UC : -EOPNOTSUPP;
	case IB_QPT_GSI:
		/* QP1 belongs to the kernel's MAD layer. */
		return user ? -EPERM : VNICD_QPT_GSI;
	default:
		return -EOPNOTSUPP;
	}
}

static int vnicd_qp_check_caps(struct vnicd_dev *vd, const struct ib_qp_init_attr *init)
{
	const struct ib_qp_cap *cap = &init->cap;
	const struct vnicd_limits *lim = &vd->lim;

	if (init->create_flags)
		return -EOPNOTSUPP;
	if (!init->send_cq || !init->recv_cq)
		return -EINVAL;
	if (cap->max_send_wr > lim->max_qp_wr || cap->max_send_sge > lim->max_sge ||
	    cap->max_inline_data > lim->max_inline)
		return -EINVAL;
	if (!init->srq && (cap->max_recv_wr > lim->max_qp_wr ||
			   cap->max_recv_sge > lim->max_sge))
		return -EINVAL;
	return 0;
}

/* At least two slots: rxe's provider maps the queue in any case. */
static int vnicd_wq_init(struct vnicd_dev *vd, struct vnicd_wq *wq, u32 max_wr,
			 u32 elem_size, struct ib_udata *udata)
{
	u32 elems = roundup_pow_of_two(max(max_wr, 1U) + 1);

	spin_lock_init(&wq->lock);
	wq->max_wr = elems - 1;
	if (!udata) {
		wq->wr_ids = kvcalloc(elems, sizeof(*wq->wr_ids), GFP_KERNEL);
		if (!wq->wr_ids)
			return -ENOMEM;
	}
	wq->ring = vnicd_ring_create(vd, elems, elem_size, udata);
	if (IS_ERR(wq->ring)) {
		int err = PTR_ERR(wq->ring);

		wq->ring = NULL;
		kvfree(wq->wr_ids);
		wq->wr_ids = NULL;
		return err;
	}
	return 0;
}

static void vnicd_wq_destroy(struct vnicd_wq *wq, bool released)
{
	vnicd_ring_destroy(wq->ring, released);
	kvfree(wq->wr_ids);
	wq->ring = NULL;
	wq->wr_ids = NULL;
}

static int vnicd_qp_init_sq(struct vnicd_dev *vd, struct vnicd_qp *qp,
			    struct ib_qp_cap *cap, struct ib_udata *udata)
{
	u32 room = max_t(u32, cap->max_send_sge * sizeof(struct rxe_sge),
			 cap->max_inline_data);
	u32 size = roundup_pow_of_two(sizeof(struct rxe_send_wqe) + room);
	int err;

	err = vnicd_wq_init(vd, &qp->sq, cap->max_send_wr, size, udata);
	if (err)
		return err;
	/* A slot's size is a power of two: use the rest for more SGEs. */
	room = size - sizeof(struct rxe_send_wqe);
	qp->sq.max_sge = min_t(u32, room / sizeof(struct rxe_sge), vd->lim.max_sge);
	qp->sq.max_inline = min(room, vd->lim.max_inline);
	cap->max_send_wr = qp->sq.max_wr;
	cap->max_send_sge = qp->sq.max_sge;
	cap->max_inline_data = qp->sq.max_inline;
	return 0;
}

static int vnicd_qp_init_rq(struct vnicd_dev *vd, struct vnicd_qp *qp,
			    struct ib_qp_cap *cap, struct ib_udata *udata)
{
	u32 sge = max(cap->max_recv_sge, 1U);
	int err;

	if (qp->srq) {
		cap->max_recv_wr = 0;
		cap->max_recv_sge = 0;
		return 0;
	}
	err = vnicd_wq_init(vd, &qp->rq, cap->max_recv_wr,
			    sizeof(struct rxe_recv_wqe) + sge * sizeof(struct rxe_sge),
			    udata);
	if (err)
		return err;
	qp->rq.max_sge = sge;
	cap->max_recv_wr = qp->rq.max_wr;
	cap->max_recv_sge = sge;
	return 0;
}

static int vnicd_qp_create_hw(struct vnicd_dev *vd, struct vnicd_qp *qp, int type)
{
	struct vnicd_create_qp cmd = {
		.type = cpu_to_le32(type),
		.pdn = cpu_to_le32(to_vpd(qp->base.pd)->pdn),
		.send_cqn = cpu_to_le32(qp->send_cq->cqn),
		.recv_cqn = cpu_to_le32(qp->recv_cq->cqn),
		.max_send_sge = cpu_to_le32(qp->sq.max_sge),
		.max_recv_sge = cpu_to_le32(qp->rq.max_sge),
		.max_inline = cpu_to_le32(qp->sq.max_inline),
	};
	struct vnicd_create_qp_resp resp;
	u32 flags = 0;
	int err;

	if (qp->sig_all)
		flags |= VNICD_QP_SIG_ALL;
	if (!qp->user)
		flags |= VNICD_QP_PRIVILEGED;
	if (qp->srq) {
		flags |= VNICD_QP_HAS_SRQ;
		cmd.srqn = cpu_to_le32(qp->srq->srqn);
	}
	cmd.flags = cpu_to_le32(flags);
	err = vnicd_cmd_create_qp(vd, &cmd, qp->sq.ring, qp->rq.ring, &resp);
	if (err)
		return err;
	qp->qpn = le32_to_cpu(resp.qpn);
	qp->db_slot = le32_to_cpu(resp.db_slot);
	qp->engine = &vd->engines[le32_to_cpu(resp.engine)];
	/* ib_core uses this number for QP1; verbs' consumers the device's. */
	qp->base.qp_num = qp->qpn;
	return 0;
}

/* Kernel QPs are flushed through their CQs when the device dies. */
static void vnicd_qp_link(struct vnicd_qp *qp)
{
	if (qp->user)
		return;
	spin_lock_irq(&qp->send_cq->lock);
	list_add_tail(&qp->send_node, &qp->send_cq->send_qps);
	spin_unlock_irq(&qp->send_cq->lock);
	spin_lock_irq(&qp->recv_cq->lock);
	list_add_tail(&qp->recv_node, &qp->recv_cq->recv_qps);
	spin_unlock_irq(&qp->recv_cq->lock);
}

/* Afterwards no poller of the CQs uses this QP, which left the table before. */
static void vnicd_qp_unlink(struct vnicd_qp *qp)
{
	if (qp->user)
		return;
	spin_lock_irq(&qp->send_cq->lock);
	list_del(&qp->send_node);
	spin_unlock_irq(&qp->send_cq->lock);
	spin_lock_irq(&qp->recv_cq->lock);
	list_del(&qp->recv_node);
	spin_unlock_irq(&qp->recv_cq->lock);
}

static u32 vnicd_new_cookie(struct vnicd_dev *vd)
{
	return atomic_inc_return(&vd->next_cookie) & VNICD_COOKIE_MASK;
}

int vnicd_create_qp(struct ib_qp *ibqp, struct ib_qp_init_attr *init,
		    struct ib_udata *udata)
{
	struct vnicd_dev *vd = to_vd(ibqp->device);
	struct vnicd_qp *qp = to_vqp(ibqp);
	struct rxe_create_qp_resp resp = {};
	bool released = true;
	int type, err;

	err = vnicd_udata_empty(udata);
	if (err)
		return err;
	if (udata && udata->outlen < sizeof(resp))
		return -EINVAL;
	type = vnicd_qp_type(vd, init->qp_type, udata);
	if (type < 0)
		return type;
	err = vnicd_qp_check_caps(vd, init);
	if (err)
		return err;

	refcount_set(&qp->refs, 1);
	init_completion(&qp->unused);
	mutex_init(&qp->lock);
	qp->user = udata;
	qp->state = IB_QPS_RESET;
	qp->sig_all = init->sq_sig_type == IB_SIGNAL_ALL_WR;
	qp->cookie = vnicd_new_cookie(vd);
	qp->send_cq = to_vcq(init->send_cq);
	qp->recv_cq = to_vcq(init->recv_cq);
	qp->srq = init->srq ? to_vsrq(init->srq) : NULL;

	err = vnicd_qp_init_rq(vd, qp, &init->cap, udata);
	if (err)
		return err;
	err = vnicd_qp_init_sq(vd, qp, &init->cap, udata);
	if (err)
		goto err_rq;
	err = vnicd_qp_create_hw(vd, qp, type);
	if (err) {
		released = !vnicd_dead(vd);
		goto err_sq;
	}
	err = xa_insert_irq(&vd->qps, qp->qpn, qp, GFP_KERNEL);
	if (err) {
		if (err == -EBUSY)
			vnicd_fail(vd, "it returned a QP number that is in use");
		goto err_destroy;
	}
	vnicd_qp_link(qp);

	if (udata) {
		if (qp->rq.ring)
			vnicd_ring_mminfo(qp->rq.ring, &resp.rq_mi);
		vnicd_ring_mminfo(qp->sq.ring, &resp.sq_mi);
		err = ib_copy_to_udata(udata, &resp, sizeof(resp));
		if (err) {
			vnicd_destroy_qp(ibqp, udata);
			return err;
		}
	}
	return 0;

err_destroy:
	released = vnicd_cmd_destroy(vd, VNICD_CMD_DESTROY_QP, qp->qpn);
err_sq:
	vnicd_wq_destroy(&qp->sq, released);
err_rq:
	vnicd_wq_destroy(&qp->rq, released);
	return err;
}

/*
 * Frees the SRQ's tokens of receives that completed and were not polled. In RESET the
 * QP completes nothing more, and its number is not used again before it is destroyed.
 */
static void vnicd_qp_leave_srq(struct vnicd_dev *vd, struct vnicd_qp *qp)
{
	struct vnicd_qp_attr reset = {
		.qpn = cpu_to_le32(qp->qpn),
		.attr_mask = cpu_to_le32(IB_QP_STATE),
		.qp_state = IB_QPS_RESET,
		.port_num = cpu_to_le16(VNICD_PORT),
	};

	if (!vnicd_cmd_modify_qp(vd, &reset))
		vnicd_cq_clean(qp->recv_cq, qp);
}

int vnicd_destroy_qp(struct ib_qp *ibqp, struct ib_udata *udata)
{
	struct vnicd_dev *vd = to_vd(ibqp->device);
	struct vnicd_qp *qp = to_vqp(ibqp);
	bool released;

	/* Out of the table first: the device may reuse the number at once. */
	xa_erase_irq(&vd->qps, qp->qpn);
	vnicd_qp_put(qp);
	wait_for_completion(&qp->unused);
	vnicd_qp_unlink(qp);
	if (!qp->user && qp->srq)
		vnicd_qp_leave_srq(vd, qp);

	released = vnicd_cmd_destroy(vd, VNICD_CMD_DESTROY_QP, qp->qpn);
	/* The kernel's consumer frees its buffers next (TR-5). */
	if (!released && !qp->user) {
		vnicd_fence(vd, "it did not release a queue pair");
		released = true;
	}
	vnicd_wq_destroy(&qp->sq, released);
	vnicd_wq_destroy(&qp->rq, released);
	return 0;
}

static int vnicd_qp_check_attr(struct vnicd_dev *vd, struct vnicd_qp *qp,
			       const struct ib_qp_attr *attr, int mask)
{
	enum ib_qp_state cur = mask & IB_QP_CUR_STATE ? attr->cur_qp_state : qp->state;
	enum ib_qp_state next = mask & IB_QP_STATE ? attr->qp_state : cur;

	if (mask & ~IB_QP_ATTR_STANDARD_BITS)
		return -EOPNOTSUPP;
	if (!ib_modify_qp_is_ok(cur, next, qp->base.qp_type, mask))
		return -EINVAL;
	if (mask & (IB_QP_ALT_PATH | IB_QP_CAP))
		return -EOPNOTSUPP;
	/* There are no alternate paths, so all QPs are "migrated". */
	if ((mask & IB_QP_PATH_MIG_STATE) && attr->path_mig_state != IB_MIG_MIGRATED)
		return -EOPNOTSUPP;
	if ((mask & IB_QP_PKEY_INDEX) && attr->pkey_index)
		return -EINVAL;
	if ((mask & IB_QP_PORT) && attr->port_num != VNICD_PORT)
		return -EINVAL;
	if ((mask & IB_QP_MAX_QP_RD_ATOMIC) &&
	    attr->max_rd_atomic > vd->lim.max_qp_init_rd_atom)
		return -EINVAL;
	if ((mask & IB_QP_MAX_DEST_RD_ATOMIC) &&
	    attr->max_dest_rd_atomic > vd->lim.max_qp_rd_atom)
		return -EINVAL;
	return 0;
}

static int vnicd_qp_fill_attr(struct vnicd_qp_attr *out, const struct ib_qp_attr *attr,
			      int mask)
{
	u16 vlan;
	int err;

	out->attr_mask = cpu_to_le32(mask);
	out->qp_state = attr->qp_state;
	out->cur_qp_state = attr->cur_qp_state;
	out->path_mtu = attr->path_mtu;
	out->timeout = attr->timeout & 0x1f;
	out->retry_cnt = attr->retry_cnt & 7;
	out->rnr_retry = attr->rnr_retry & 7;
	out->min_rnr_timer = attr->min_rnr_timer & 0x1f;
	out->max_rd_atomic = attr->max_rd_atomic;
	out->max_dest_rd_atomic = attr->max_dest_rd_atomic;
	out->en_sqd_async_notify = !!attr->en_sqd_async_notify;
	out->pkey_index = cpu_to_le16(attr->pkey_index);
	out->port_num = cpu_to_le16(VNICD_PORT);
	out->access_flags = cpu_to_le32(attr->qp_access_flags);
	out->qkey = cpu_to_le32(attr->qkey);
	out->dest_qpn = cpu_to_le32(attr->dest_qp_num & 0xffffff);
	out->rq_psn = cpu_to_le32(attr->rq_psn & 0xffffff);
	out->sq_psn = cpu_to_le32(attr->sq_psn & 0xffffff);
	if (!(mask & IB_QP_AV))
		return 0;
	err = vnicd_gid_l2(&attr->ah_attr, &vlan);
	if (err)
		return err;
	vnicd_fill_av(&out->av, &attr->ah_attr);
	out->av.vlan_id = cpu_to_le16(vlan);
	return 0;
}

/* In RESET nothing is outstanding, and earlier CQEs must not be polled. */
static void vnicd_qp_forget(struct vnicd_dev *vd, struct vnicd_qp *qp)
{
	if (qp->user)
		return;
	spin_lock_irq(&qp->send_cq->lock);
	qp->cookie = vnicd_new_cookie(vd);
	vnicd_wq_retire(&qp->sq, vnicd_wq_posted(&qp->sq));
	spin_unlock_irq(&qp->send_cq->lock);
	spin_lock_irq(&qp->recv_cq->lock);
	vnicd_wq_retire(&qp->rq, vnicd_wq_posted(&qp->rq));
	spin_unlock_irq(&qp->recv_cq->lock);
}

int vnicd_modify_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
		    struct ib_udata *udata)
{
	struct vnicd_dev *vd = to_vd(ibqp->device);
	struct vnicd_qp *qp = to_vqp(ibqp);
	struct vnicd_qp_attr out = {};
	int err;

	mutex_lock(&qp->lock);
	err = vnicd_qp_check_attr(vd, qp, attr, mask);
	if (err)
		goto out;
	/* Not an attribute of the device. */
	mask &= ~IB_QP_PATH_MIG_STATE;
	out.qpn = cpu_to_le32(qp->qpn);
	err = vnicd_qp_fill_attr(&out, attr, mask);
	if (err)
		goto out;
	err = vnicd_cmd_modify_qp(vd, &out);
	/* A drain must succeed: a dead device is flushed in software. */
	if (err && vnicd_dead(vd) && (mask & IB_QP_STATE) &&
	    (attr->qp_state == IB_QPS_ERR || attr->qp_state == IB_QPS_RESET)) {
		/* In RESET nothing is outstanding, and the buffers are free. */
		if (!qp->user && attr->qp_state == IB_QPS_RESET)
			vnicd_fence(vd, "it did not reset a queue pair");
		err = 0;
	}
	if (err)
		goto out;
	if (mask & IB_QP_STATE) {
		WRITE_ONCE(qp->state, attr->qp_state);
		if (attr->qp_state == IB_QPS_RESET)
			vnicd_qp_forget(vd, qp);
	}
out:
	mutex_unlock(&qp->lock);
	return err;
}

static void vnicd_qp_query_av(struct rdma_ah_attr *ah, const struct vnicd_av *av)
{
	ah->type = RDMA_AH_ATTR_TYPE_ROCE;
	rdma_ah_set_sl(ah, av->sl);
	rdma_ah_set_port_num(ah, VNICD_PORT);
	rdma_ah_set_grh(ah, NULL, le32_to_cpu(av->flow_label) & 0xfffff,
			le16_to_cpu(av->sgid_index), av->hop_limit, av->traffic_class);
	rdma_ah_set_dgid_raw(ah, (void *)av->dgid);
	memcpy(ah->roce.dmac, av->dmac, sizeof(ah->roce.dmac));
}

int vnicd_query_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
		   struct ib_qp_init_attr *init)
{
	struct vnicd_dev *vd = to_vd(ibqp->device);
	struct vnicd_qp *qp = to_vqp(ibqp);
	struct vnicd_qp_attr in = {};
	int err;

	memset(attr, 0, sizeof(*attr));
	memset(init, 0, sizeof(*init));
	/* Otherwise the answer could be older than a transition that ends meanwhile. */
	mutex_lock(&qp->lock);
	err = vnicd_cmd_query_qp(vd, qp->qpn, &in);
	/* The device may have moved it to an error state. */
	if (!err)
		WRITE_ONCE(qp->state, in.qp_state);
	mutex_unlock(&qp->lock);
	if (err) {
		if (!vnicd_dead(vd))
			return err;
		/* Of a dead device's QP at least the state is known. */
		in.qp_state = IB_QPS_ERR;
		in.cur_qp_state = IB_QPS_ERR;
	}

	attr->qp_state = in.qp_state;
	attr->cur_qp_state = in.qp_state;
	attr->path_mtu = clamp_t(u8, in.path_mtu, IB_MTU_256, IB_MTU_4096);
	attr->path_mig_state = IB_MIG_MIGRATED;
	attr->qkey = le32_to_cpu(in.qkey);
	attr->rq_psn = le32_to_cpu(in.rq_psn) & 0xffffff;
	attr->sq_psn = le32_to_cpu(in.sq_psn) & 0xffffff;
	attr->dest_qp_num = le32_to_cpu(in.dest_qpn) & 0xffffff;
	attr->qp_access_flags = le32_to_cpu(in.access_flags);
	attr->en_sqd_async_notify = !!in.en_sqd_async_notify;
	attr->sq_draining = !!in.sq_draining;
	attr->max_rd_atomic = in.max_rd_atomic;
	attr->max_dest_rd_atomic = in.max_dest_rd_atomic;
	attr->min_rnr_timer = in.min_rnr_timer & 0x1f;
	attr->port_num = VNICD_PORT;
	attr->timeout = in.timeout & 0x1f;
	attr->retry_cnt = in.retry_cnt & 7;
	attr->rnr_retry = in.rnr_retry & 7;
	if (qp->base.qp_type == IB_QPT_RC || qp->base.qp_type == IB_QPT_UC)
		vnicd_qp_query_av(&attr->ah_attr, &in.av);

	attr->cap.max_send_wr = qp->sq.max_wr;
	attr->cap.max_recv_wr = qp->rq.max_wr;
	attr->cap.max_send_sge = qp->sq.max_sge;
	attr->cap.max_recv_sge = qp->rq.max_sge;
	attr->cap.max_inline_data = qp->sq.max_inline;

	init->event_handler = qp->base.event_handler;
	init->qp_context = qp->base.qp_context;
	init->send_cq = qp->base.send_cq;
	init->recv_cq = qp->base.recv_cq;
	init->srq = qp->base.srq;
	init->cap = attr->cap;
	init->sq_sig_type = qp->sig_all ? IB_SIGNAL_ALL_WR : IB_SIGNAL_REQ_WR;
	init->qp_type = qp->base.qp_type;
	init->port_num = VNICD_PORT;
	return 0;
}
