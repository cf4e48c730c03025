// SPDX-License-Identifier: GPL-2.0
/* Shared receive queues. */
#include <linux/slab.h>

#include "vnicd.h"

struct vnicd_srq *vnicd_srq_get(struct vnicd_dev *vd, u32 srqn)
{
	struct vnicd_srq *srq;
	unsigned long flags;

	xa_lock_irqsave(&vd->srqs, flags);
	srq = xa_load(&vd->srqs, srqn);
	if (srq && !refcount_inc_not_zero(&srq->refs))
		srq = NULL;
	xa_unlock_irqrestore(&vd->srqs, flags);
	return srq;
}

void vnicd_srq_put(struct vnicd_srq *srq)
{
	if (refcount_dec_and_test(&srq->refs))
		complete(&srq->unused);
}

static u32 vnicd_srq_elem_size(u32 max_sge)
{
	return sizeof(struct rxe_recv_wqe) + max_sge * sizeof(struct rxe_sge);
}

/* Kernel consumers: a token per receive, since completions come in any order. */
static int vnicd_srq_tokens(struct vnicd_srq *srq, u32 n)
{
	u32 i;

	srq->wq.wr_ids = kvcalloc(n, sizeof(*srq->wq.wr_ids), GFP_KERNEL);
	srq->next_token = kvcalloc(n, sizeof(*srq->next_token), GFP_KERNEL);
	if (!srq->wq.wr_ids || !srq->next_token)
		return -ENOMEM;
	for (i = 0; i < n; i++)
		srq->next_token[i] = i + 1 < n ? i + 1 : VNICD_NO_TOKEN;
	srq->free_token = 0;
	srq->num_tokens = n;
	return 0;
}

static void vnicd_srq_free_tokens(struct vnicd_srq *srq)
{
	kvfree(srq->wq.wr_ids);
	kvfree(srq->next_token);
}

/*
 * Returns the wr_id of a token in use and frees it. A token in use links to
 * itself, which exposes a forged or repeated one.
 */
bool vnicd_srq_complete(struct vnicd_srq *srq, u32 token, u64 *wr_id)
{
	unsigned long flags;
	bool found = false;

	if (srq->user || token >= srq->num_tokens)
		return false;
	spin_lock_irqsave(&srq->wq.lock, flags);
	if (srq->next_token[token] == token) {
		*wr_id = srq->wq.wr_ids[token];
		srq->next_token[token] = srq->free_token;
		srq->free_token = token;
		found = true;
	}
	spin_unlock_irqrestore(&srq->wq.lock, flags);
	return found;
}

int vnicd_create_srq(struct ib_srq *ibsrq, struct ib_srq_init_attr *init,
		     struct ib_udata *udata)
{
	struct vnicd_dev *vd = to_vd(ibsrq->device);
	struct vnicd_srq *srq = to_vsrq(ibsrq);
	struct rxe_create_srq_resp resp = {};
	struct ib_srq_attr *attr = &init->attr;
	bool released;
	u32 elems;
	int err;

	if (init->srq_type != IB_SRQT_BASIC)
		return -EOPNOTSUPP;
	if (udata && udata->outlen < sizeof(resp))
		return -EINVAL;
	if (!attr->max_wr || attr->max_wr > vd->lim.max_srq_wr ||
	    attr->max_sge > vd->lim.max_srq_sge || attr->srq_limit > attr->max_wr)
		return -EINVAL;

	refcount_set(&srq->refs, 1);
	init_completion(&srq->unused);
	mutex_init(&srq->resize_lock);
	spin_lock_init(&srq->wq.lock);
	srq->user = udata;
	srq->wq.max_sge = max(attr->max_sge, 1U);
	elems = roundup_pow_of_two(attr->max_wr + 1);
	srq->wq.max_wr = elems - 1;

	if (!udata) {
		err = vnicd_srq_tokens(srq, srq->wq.max_wr);
		if (err)
			goto err_tokens;
	}
	srq->wq.ring = vnicd_ring_create(vd, elems,
					 vnicd_srq_elem_size(srq->wq.max_sge), udata);
	if (IS_ERR(srq->wq.ring)) {
		err = PTR_ERR(srq->wq.ring);
		goto err_tokens;
	}
	err = vnicd_cmd_create_srq(vd, to_vpd(ibsrq->pd)->pdn, srq->wq.max_sge,
				   attr->srq_limit, srq->wq.ring, &srq->srqn);
	if (err) {
		released = !vnicd_dead(vd);
		goto err_ring;
	}
	err = xa_insert_irq(&vd->srqs, srq->srqn, srq, GFP_KERNEL);
	if (err) {
		if (err == -EBUSY)
			vnicd_fail(vd, "it returned an SRQ number that is in use");
		goto err_destroy;
	}

	attr->max_wr = srq->wq.max_wr;
	attr->max_sge = srq->wq.max_sge;
	if (udata) {
		vnicd_ring_mminfo(srq->wq.ring, &resp.mi);
		resp.srq_num = srq->srqn;
		err = ib_copy_to_udata(udata, &resp, sizeof(resp));
		if (err) {
			vnicd_destroy_srq(ibsrq, udata);
			return err;
		}
	}
	return 0;

err_destroy:
	released = vnicd_cmd_destroy(vd, VNICD_CMD_DESTROY_SRQ, srq->srqn);
err_ring:
	vnicd_ring_destroy(srq->wq.ring, released);
err_tokens:
	vnicd_srq_free_tokens(srq);
	return err;
}

/* The device moves unconsumed receives; the provider holds its lock. */
static int vnicd_srq_resize(struct vnicd_srq *srq, struct ib_srq_attr *attr,
			    u32 flags, struct ib_udata *udata)
{
	struct vnicd_dev *vd = to_vd(srq->base.device);
	struct vnicd_ring_mem *ring, *old;
	struct rxe_modify_srq_cmd cmd;
	struct mminfo mi;
	u32 elems;
	int err;

	if (!udata || !srq->user)
		return -EOPNOTSUPP;
	if (udata->inlen < sizeof(cmd))
		return -EINVAL;
	if (!attr->max_wr || attr->max_wr > vd->lim.max_srq_wr)
		return -EINVAL;
	err = ib_copy_from_udata(&cmd, udata, sizeof(cmd));
	if (err)
		return err;

	elems = roundup_pow_of_two(attr->max_wr + 1);
	ring = vnicd_ring_create(vd, elems, vnicd_srq_elem_size(srq->wq.max_sge), udata);
	if (IS_ERR(ring))
		return PTR_ERR(ring);
	vnicd_ring_mminfo(ring, &mi);
	/* Before the irreversible step. */
	if (copy_to_user(u64_to_user_ptr(cmd.mmap_info_addr), &mi, sizeof(mi))) {
		vnicd_ring_destroy(ring, true);
		return -EFAULT;
	}

	mutex_lock(&srq->resize_lock);
	err = vnicd_cmd_modify_srq(vd, srq->srqn, flags | VNICD_SRQ_RESIZE,
				   attr->srq_limit, ring);
	old = ring;
	if (!err) {
		old = srq->wq.ring;
		srq->wq.ring = ring;
		srq->wq.max_wr = elems - 1;
		attr->max_wr = elems - 1;
	}
	mutex_unlock(&srq->resize_lock);
	vnicd_ring_destroy(old, !vnicd_dead(vd));
	return err;
}

int vnicd_modify_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr,
		     enum ib_srq_attr_mask mask, struct ib_udata *udata)
{
	struct vnicd_dev *vd = to_vd(ibsrq->device);
	struct vnicd_srq *srq = to_vsrq(ibsrq);
	u32 max_wr = mask & IB_SRQ_MAX_WR ? attr->max_wr : READ_ONCE(srq->wq.max_wr);
	u32 flags = 0;

	if (mask & ~(IB_SRQ_MAX_WR | IB_SRQ_LIMIT))
		return -EINVAL;
	if (mask & IB_SRQ_LIMIT) {
		if (attr->srq_limit > max_wr)
			return -EINVAL;
		flags = VNICD_SRQ_LIMIT;
	}
	if (mask & IB_SRQ_MAX_WR)
		return vnicd_srq_resize(srq, attr, flags, udata);
	if (!flags)
		return 0;
	return vnicd_cmd_modify_srq(vd, srq->srqn, flags, attr->srq_limit, NULL);
}

int vnicd_query_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr)
{
	struct vnicd_srq *srq = to_vsrq(ibsrq);
	u32 limit;
	int err;

	err = vnicd_cmd_query_srq(to_vd(ibsrq->device), srq->srqn, &limit);
	if (err)
		return err;
	attr->max_wr = READ_ONCE(srq->wq.max_wr);
	attr->max_sge = srq->wq.max_sge;
	attr->srq_limit = limit;
	return 0;
}

int vnicd_destroy_srq(struct ib_srq *ibsrq, struct ib_udata *udata)
{
	struct vnicd_dev *vd = to_vd(ibsrq->device);
	struct vnicd_srq *srq = to_vsrq(ibsrq);
	bool released;

	xa_erase_irq(&vd->srqs, srq->srqn);
	vnicd_srq_put(srq);
	wait_for_completion(&srq->unused);

	released = vnicd_cmd_destroy(vd, VNICD_CMD_DESTROY_SRQ, srq->srqn);
	vnicd_ring_destroy(srq->wq.ring, released);
	vnicd_srq_free_tokens(srq);
	return 0;
}
