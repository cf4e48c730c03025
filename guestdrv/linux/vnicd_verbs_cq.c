// SPDX-License-Identifier: GPL-2.0
/*
 * Completion queues. The device writes CQEs in the layout of ib_uverbs_wc. For
 * kernel consumers they are translated, and each field is validated, because
 * the ring could contain anything.
 *
 * When the device was lost and reset, polling a kernel CQ returns the rest of the
 * ring, then a flush completion for every work request outstanding on its QPs, so
 * that ib_drain_qp() and similar functions return. Not before the reset: consumers
 * reuse their buffers (TR-5).
 */
#include <linux/slab.h>
#include <rdma/ib_user_verbs.h>

#include "vnicd.h"

/* wc_flags of libibverbs (IBV_WC_*); the kernel's INVALIDATE differs. */
#define VNICD_WC_GRH	BIT(0)
#define VNICD_WC_IMM	BIT(1)
#define VNICD_WC_INV	BIT(3)

/*
 * Entries of the smallest CQ, where the device allows as many. Hardware also
 * rounds up, and programs that request a single entry unknowingly rely on it.
 */
#define VNICD_CQ_LEAST	31

/* Maximum of requested events of a CQ. */
#define VNICD_MAX_ARMED 65536

static void vnicd_arm_unbury(struct vnicd_grave *grave)
{
	kfree(container_of(grave, struct vnicd_arm, grave));
}

static void vnicd_arm_destroy(struct vnicd_dev *vd, struct vnicd_arm *arm, bool released)
{
	if (released)
		kfree(arm);
	else
		vnicd_bury(vd, &arm->grave, vnicd_arm_unbury);
}

struct vnicd_cq *vnicd_cq_get(struct vnicd_dev *vd, u32 cqn)
{
	struct vnicd_cq *cq;
	unsigned long flags;

	xa_lock_irqsave(&vd->cqs, flags);
	cq = xa_load(&vd->cqs, cqn);
	if (cq && !refcount_inc_not_zero(&cq->refs))
		cq = NULL;
	xa_unlock_irqrestore(&vd->cqs, flags);
	return cq;
}

void vnicd_cq_put(struct vnicd_cq *cq)
{
	if (refcount_dec_and_test(&cq->refs))
		complete(&cq->unused);
}

/*
 * Every request for notification permits one event, however many the device
 * sends. Counted, not flagged: the event of one request may still be pending
 * when the consumer makes the next.
 */
void vnicd_cq_event(struct vnicd_cq *cq)
{
	if (atomic_dec_if_positive(&cq->armed) >= 0 && cq->base.comp_handler)
		cq->base.comp_handler(&cq->base, cq->base.cq_context);
}

/* Ring size for at least @cqe entries; one slot stays empty. 0: too many. */
static u32 vnicd_cq_elems(struct vnicd_dev *vd, unsigned int cqe)
{
	if (!cqe || cqe > vd->lim.max_cqe)
		return 0;
	return roundup_pow_of_two(max_t(u32, cqe, min_t(u32, VNICD_CQ_LEAST, vd->lim.max_cqe)) + 1);
}

int vnicd_create_cq(struct ib_cq *ibcq, const struct ib_cq_init_attr *attr,
		    vnicd_cq_attrs attrs)
{
	struct ib_udata *udata = vnicd_cq_udata(attrs);
	struct vnicd_dev *vd = to_vd(ibcq->device);
	struct vnicd_cq *cq = to_vcq(ibcq);
	struct rxe_create_cq_resp resp = {};
	bool released;
	u32 elems;
	int err;

	if (attr->flags)
		return -EOPNOTSUPP;
	if (udata && udata->outlen < sizeof(resp))
		return -EINVAL;
	elems = vnicd_cq_elems(vd, attr->cqe);
	if (!elems)
		return -EINVAL;

	refcount_set(&cq->refs, 1);
	init_completion(&cq->unused);
	mutex_init(&cq->resize_lock);
	spin_lock_init(&cq->lock);
	INIT_LIST_HEAD(&cq->send_qps);
	INIT_LIST_HEAD(&cq->recv_qps);
	atomic_set(&cq->armed, 0);
	cq->user = udata;

	cq->arm = kzalloc(sizeof(*cq->arm), GFP_KERNEL);
	if (!cq->arm)
		return -ENOMEM;
	cq->ring = vnicd_ring_create(vd, elems, sizeof(struct ib_uverbs_wc), udata);
	if (IS_ERR(cq->ring)) {
		err = PTR_ERR(cq->ring);
		kfree(cq->arm);
		return err;
	}

	err = vnicd_cmd_create_cq(vd, cq->ring, &cq->arm->word,
				  attr->comp_vector % vd->num_ceqs, &cq->cqn);
	if (err) {
		released = !vnicd_dead(vd);
		goto err_ring;
	}
	ibcq->cqe = elems - 1;

	err = xa_insert_irq(&vd->cqs, cq->cqn, cq, GFP_KERNEL);
	if (err) {
		if (err == -EBUSY)
			vnicd_fail(vd, "it returned a CQ number that is in use");
		goto err_destroy;
	}

	if (udata) {
		vnicd_ring_mminfo(cq->ring, &resp.mi);
		err = ib_copy_to_udata(udata, &resp, sizeof(resp));
		if (err) {
			vnicd_destroy_cq(ibcq, udata);
			return err;
		}
	}
	return 0;

err_destroy:
	released = vnicd_cmd_destroy(vd, VNICD_CMD_DESTROY_CQ, cq->cqn);
err_ring:
	vnicd_ring_destroy(cq->ring, released);
	vnicd_arm_destroy(vd, cq->arm, released);
	return err;
}

int vnicd_destroy_cq(struct ib_cq *ibcq, struct ib_udata *udata)
{
	struct vnicd_dev *vd = to_vd(ibcq->device);
	struct vnicd_cq *cq = to_vcq(ibcq);
	bool released;

	/* Out of the table first: the device may reuse the number at once. */
	xa_erase_irq(&vd->cqs, cq->cqn);
	vnicd_cq_put(cq);
	wait_for_completion(&cq->unused);

	released = vnicd_cmd_destroy(vd, VNICD_CMD_DESTROY_CQ, cq->cqn);
	vnicd_ring_destroy(cq->ring, released);
	vnicd_arm_destroy(vd, cq->arm, released);
	return 0;
}

/*
 * Only for processes. rxe's provider holds its own lock meanwhile, so the CQ is
 * not polled; the device moves the CQEs. The old ring stays mapped until the
 * process unmaps it.
 */
#ifdef VNICD_HAVE_RESIZE_USER_CQ
int vnicd_resize_cq(struct ib_cq *ibcq, unsigned int cqe, struct ib_udata *udata)
#else
int vnicd_resize_cq(struct ib_cq *ibcq, int cqe, struct ib_udata *udata)
#endif
{
	struct vnicd_dev *vd = to_vd(ibcq->device);
	struct vnicd_cq *cq = to_vcq(ibcq);
	struct rxe_resize_cq_resp resp = {};
	struct vnicd_ring_mem *ring, *old;
	u32 elems;
	int err;

	if (!udata || !cq->user)
		return -EOPNOTSUPP;
	if (udata->outlen < sizeof(resp))
		return -EINVAL;
	elems = vnicd_cq_elems(vd, cqe);
	if (!elems)
		return -EINVAL;

	ring = vnicd_ring_create(vd, elems, sizeof(struct ib_uverbs_wc), udata);
	if (IS_ERR(ring))
		return PTR_ERR(ring);
	vnicd_ring_mminfo(ring, &resp.mi);
	/* Before the irreversible step, whose failure is harmless here. */
	err = ib_copy_to_udata(udata, &resp, sizeof(resp));
	if (err) {
		vnicd_ring_destroy(ring, true);
		return err;
	}

	mutex_lock(&cq->resize_lock);
	err = vnicd_cmd_resize_cq(vd, cq->cqn, ring);
	old = ring;
	if (!err) {
		old = cq->ring;
		cq->ring = ring;
		ibcq->cqe = elems - 1;
	}
	mutex_unlock(&cq->resize_lock);
	/* The device has released it, or has never used it. */
	vnicd_ring_destroy(old, !vnicd_dead(vd));
	return err;
}

/* rdma_set_cq_moderation(), and ib_core's where adaptive moderation is on. */
int vnicd_modify_cq(struct ib_cq *ibcq, u16 count, u16 period)
{
	struct vnicd_cq *cq = to_vcq(ibcq);
	int err;

	mutex_lock(&cq->resize_lock);
	err = vnicd_cmd_modify_cq(to_vd(ibcq->device), cq->cqn, count, period);
	if (!err) {
		WRITE_ONCE(cq->count, count);
		WRITE_ONCE(cq->period, period);
	}
	mutex_unlock(&cq->resize_lock);
	return err;
}

/*
 * The consumer's wr_id for a token, if the token is outstanding and its completions
 * belong to @cq. Otherwise the CQE is forged.
 */
static bool vnicd_wc_wr_id(struct vnicd_cq *cq, struct vnicd_qp *qp, u64 token, u64 *wr_id)
{
	u32 cookie = token >> 32 & VNICD_COOKIE_MASK;
	struct vnicd_wq *wq;
	u32 n = token;

	switch (token >> 62) {
	case VNICD_TOKEN_SRQ:
		return qp->recv_cq == cq && qp->srq && vnicd_srq_complete(qp->srq, n, wr_id);
	case VNICD_TOKEN_SEND:
		if (qp->send_cq != cq)
			return false;
		wq = &qp->sq;
		break;
	case VNICD_TOKEN_RECV:
		if (qp->recv_cq != cq)
			return false;
		wq = &qp->rq;
		break;
	default:
		return false;
	}
	if (cookie != qp->cookie || !wq->ring)
		return false;
	/* Completions come in order; earlier requests were not signalled. */
	if (n - wq->polled >= vnicd_wq_posted(wq) - wq->polled)
		return false;
	*wr_id = wq->wr_ids[n & (wq->ring->num_elems - 1)];
	vnicd_wq_retire(wq, n + 1);
	return true;
}

/* The status and opcode values of user space and of the kernel are the same. */
static bool vnicd_wc_from_cqe(struct vnicd_cq *cq, const struct ib_uverbs_wc *cqe,
			      struct ib_wc *wc)
{
	struct vnicd_dev *vd = to_vd(cq->base.device);
	struct vnicd_qp *qp;
	bool ok;

	/* With a reference, because it may be any QP until we know that it is of this CQ. */
	qp = vnicd_qp_get(vd, cqe->qp_num);
	if (!qp)
		return false;
	memset(wc, 0, sizeof(*wc));
	ok = !qp->user && vnicd_wc_wr_id(cq, qp, cqe->wr_id, &wc->wr_id);
	/* Destroying a QP of this CQ also takes the CQ's lock, which we hold. */
	wc->qp = &qp->base;
	vnicd_qp_put(qp);
	if (!ok)
		return false;
	wc->status = cqe->status > IB_WC_GENERAL_ERR ? IB_WC_GENERAL_ERR : cqe->status;
	wc->opcode = cqe->opcode == VNICD_WC_REG_MR ? IB_WC_REG_MR : cqe->opcode & 0xff;
	wc->vendor_err = cqe->vendor_err;
	wc->byte_len = cqe->byte_len;
	if (cqe->wc_flags & VNICD_WC_GRH)
		wc->wc_flags |= IB_WC_GRH;
	if (cqe->wc_flags & VNICD_WC_IMM) {
		wc->wc_flags |= IB_WC_WITH_IMM;
		wc->ex.imm_data = cqe->ex.imm_data;
	} else if (cqe->wc_flags & VNICD_WC_INV) {
		wc->wc_flags |= IB_WC_WITH_INVALIDATE;
		wc->ex.invalidate_rkey = cqe->ex.invalidate_rkey;
	}
	wc->src_qp = cqe->src_qp & 0xffffff;
	wc->slid = cqe->slid;
	wc->pkey_index = 0;
	wc->sl = cqe->sl & 0xf;
	wc->port_num = VNICD_PORT;
	return true;
}

static u32 vnicd_cq_prod(const struct vnicd_cq *cq)
{
	/* Index first, then the CQEs that it announces. */
	return virt_load_acquire(&cq->ring->buf->producer_index) &
	       (cq->ring->num_elems - 1);
}

static int vnicd_poll_ring(struct vnicd_cq *cq, int num, struct ib_wc *wc)
{
	u32 mask = cq->ring->num_elems - 1;
	u32 prod = vnicd_cq_prod(cq);
	struct ib_uverbs_wc cqe;
	bool moved = false;
	int n = 0;

	/* At most one pass over the ring: prod is read once. */
	while (n < num && cq->cons != prod) {
		memcpy(&cqe, vnicd_ring_elem(cq->ring, cq->cons), sizeof(cqe));
		cq->cons = (cq->cons + 1) & mask;
		moved = true;
		/* CQEs of destroyed QPs are dropped here. */
		if (vnicd_wc_from_cqe(cq, &cqe, &wc[n]))
			n++;
	}
	if (moved) {
		/* The CQEs were read before the device may overwrite them. */
		virt_store_release(&cq->ring->buf->consumer_index, cq->cons);
	}
	return n;
}

/*
 * The device has ended @qp, a kernel QP with an SRQ: its CQEs in the ring will not be
 * polled, so their tokens become free here, and a later QP with its number must not
 * get them.
 */
void vnicd_cq_clean(struct vnicd_cq *cq, struct vnicd_qp *qp)
{
	struct ib_uverbs_wc *cqe;
	u32 mask, prod, i;
	u64 wr_id;

	spin_lock_irq(&cq->lock);
	mask = cq->ring->num_elems - 1;
	prod = vnicd_cq_prod(cq);
	for (i = cq->cons; i != prod; i = (i + 1) & mask) {
		cqe = vnicd_ring_elem(cq->ring, i);
		if (READ_ONCE(cqe->qp_num) != qp->qpn)
			continue;
		vnicd_wc_wr_id(cq, qp, READ_ONCE(cqe->wr_id), &wr_id);
		WRITE_ONCE(cqe->qp_num, 0);
	}
	spin_unlock_irq(&cq->lock);
}

static int vnicd_flush_wq(struct vnicd_qp *qp, struct vnicd_wq *wq, bool recv,
			  int num, struct ib_wc *wc)
{
	int n = 0;

	while (wq->ring && n < num && wq->polled != vnicd_wq_posted(wq)) {
		memset(&wc[n], 0, sizeof(wc[n]));
		wc[n].wr_id = wq->wr_ids[wq->polled & (wq->ring->num_elems - 1)];
		wc[n].status = IB_WC_WR_FLUSH_ERR;
		wc[n].opcode = recv ? IB_WC_RECV : IB_WC_SEND;
		wc[n].qp = &qp->base;
		vnicd_wq_retire(wq, wq->polled + 1);
		n++;
	}
	return n;
}

static int vnicd_flush_cq(struct vnicd_cq *cq, int num, struct ib_wc *wc)
{
	struct vnicd_qp *qp;
	int n = 0;

	list_for_each_entry(qp, &cq->send_qps, send_node)
		n += vnicd_flush_wq(qp, &qp->sq, false, num - n, wc + n);
	list_for_each_entry(qp, &cq->recv_qps, recv_node)
		n += vnicd_flush_wq(qp, &qp->rq, true, num - n, wc + n);
	return n;
}

int vnicd_poll_cq(struct ib_cq *ibcq, int num, struct ib_wc *wc)
{
	struct vnicd_dev *vd = to_vd(ibcq->device);
	struct vnicd_cq *cq = to_vcq(ibcq);
	unsigned long flags;
	int n;

	if (cq->user)
		return -EINVAL;
	spin_lock_irqsave(&cq->lock, flags);
	n = vnicd_poll_ring(cq, num, wc);
	if (n < num && vnicd_quiet(vd))
		n += vnicd_flush_cq(cq, num - n, wc + n);
	spin_unlock_irqrestore(&cq->lock, flags);
	return n;
}

/*
 * The arm word is shared with the device, which exchanges it with 0 when it
 * posts the event. A later request for solicited completions does not weaken an
 * earlier one for any completion.
 */
int vnicd_req_notify_cq(struct ib_cq *ibcq, enum ib_cq_notify_flags flags)
{
	struct vnicd_dev *vd = to_vd(ibcq->device);
	struct vnicd_cq *cq = to_vcq(ibcq);
	__le32 *word = &cq->arm->word;
	unsigned long irq_flags;
	int missed = 0;

	spin_lock_irqsave(&cq->lock, irq_flags);
	/* A process may request any number of events. */
	atomic_add_unless(&cq->armed, 1, VNICD_MAX_ARMED);
	if ((flags & IB_CQ_SOLICITED_MASK) != IB_CQ_SOLICITED)
		WRITE_ONCE(*word, cpu_to_le32(VNICD_ARM_NEXT));
	else if (!READ_ONCE(*word))
		WRITE_ONCE(*word, cpu_to_le32(VNICD_ARM_SOLICITED));
	/* Arm, then check; the device writes its CQE, then checks the word. */
	virt_mb();
	/* A process checks itself. */
	if ((flags & IB_CQ_REPORT_MISSED_EVENTS) && !cq->user)
		missed = cq->cons != vnicd_cq_prod(cq);
	spin_unlock_irqrestore(&cq->lock, irq_flags);

	/* A dead device raises no event; there may be work to flush. */
	if (vnicd_dead(vd) && !cq->user)
		queue_work(vd->wq, &vd->flush_work);
	return missed;
}

/* After the reset of a dead device: makes consumers of kernel CQs poll their flush completions. */
void vnicd_flush_work(struct work_struct *work)
{
	struct vnicd_dev *vd = container_of(work, struct vnicd_dev, flush_work);
	struct vnicd_cq *cq;
	unsigned long cqn, flags;
	bool pending;

	/* The reset queues this work again. */
	if (!vnicd_quiet(vd))
		return;
	xa_for_each(&vd->cqs, cqn, cq) {
		struct vnicd_qp *qp;

		/* The CQ may be gone by now; look it up again, with a reference. */
		cq = vnicd_cq_get(vd, cqn);
		if (!cq)
			continue;
		pending = false;
		spin_lock_irqsave(&cq->lock, flags);
		if (!cq->user)
			pending = cq->cons != vnicd_cq_prod(cq);
		list_for_each_entry(qp, &cq->send_qps, send_node)
			pending |= qp->sq.polled != vnicd_wq_posted(&qp->sq);
		list_for_each_entry(qp, &cq->recv_qps, recv_node)
			pending |= qp->rq.polled != vnicd_wq_posted(&qp->rq);
		spin_unlock_irqrestore(&cq->lock, flags);
		if (pending)
			vnicd_cq_event(cq);
		vnicd_cq_put(cq);
	}
}
