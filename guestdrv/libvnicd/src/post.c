/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The data path: work requests and completions. Nothing here allocates, locks or blocks; the only system call is the
 * notification of an engine that sleeps. Indices that the device writes are masked; elements are written, and read,
 * once.
 */
#include <string.h>

#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_rxe.h>

#include "internal.h"

static uint8_t *element(const struct ring *r, uint32_t i)
{
	return r->data + ((size_t)(i & r->mask) << r->log2);
}

/* The next element to fill; NULL: the ring is full. */
static uint8_t *room(const struct ring *r)
{
	if (((r->own + 1) & r->mask) == (atomic_load_explicit(r->cons, memory_order_acquire) & r->mask))
		return NULL;
	return element(r, r->own);
}

static void publish(struct ring *r)
{
	r->own = (r->own + 1) & r->mask;
	atomic_store_explicit(r->prod, r->own, memory_order_release);
}

/* The sum of the lengths; more than 32 bits mean -EINVAL. */
static int total(const struct vnicd_sge *sg, uint32_t n, uint32_t *bytes)
{
	uint64_t sum = 0;
	uint32_t i;

	for (i = 0; i < n; i++)
		sum += sg[i].length;
	*bytes = (uint32_t)sum;
	return sum > UINT32_MAX ? set_error_text(-EINVAL, "the SGEs have 4 GiB or more together") : 0;
}

static void put_sges(struct rxe_dma_info *dma, const struct vnicd_sge *sg, uint32_t n, uint32_t bytes)
{
	uint32_t i;

	dma->length = bytes;
	dma->resid = bytes;
	dma->num_sge = n;
	for (i = 0; i < n; i++)
		dma->sge[i] = (struct rxe_sge){ .addr = sg[i].addr, .length = sg[i].length, .lkey = sg[i].lkey };
}

static void put_inline(struct rxe_dma_info *dma, const struct vnicd_sge *sg, uint32_t n, uint32_t bytes)
{
	uint8_t *p = dma->inline_data;
	uint32_t i;

	dma->length = bytes;
	dma->resid = bytes;
	for (i = 0; i < n; i++) {
		if (sg[i].length)
			memcpy(p, (const void *)(uintptr_t)sg[i].addr, sg[i].length);
		p += sg[i].length;
	}
}

/* Whether the QP's type can have the operation at all; the device decides on the rest. */
static int check_send(const struct vnicd_qp *qp, const struct vnicd_send_wr *wr, uint32_t *bytes)
{
	const uint32_t known = VNICD_SEND_FENCE | VNICD_SEND_SIGNALED | VNICD_SEND_SOLICITED | VNICD_SEND_INLINE;
	const bool ud = qp->type == VNICD_QPT_UD;

	switch (wr->opcode) {
	case VNICD_WR_SEND:
	case VNICD_WR_SEND_WITH_IMM:
		if (ud && (!wr->address || wr->address->o.dev != qp->o.dev))
			return set_error_text(-EINVAL, "a UD request needs an address handle of the same device");
		break;
	case VNICD_WR_RDMA_WRITE:
	case VNICD_WR_RDMA_WRITE_WITH_IMM:
	case VNICD_WR_RDMA_READ:
	case VNICD_WR_ATOMIC_CMP_AND_SWP:
	case VNICD_WR_ATOMIC_FETCH_AND_ADD:
	case VNICD_WR_ATOMIC_WRITE:
		if (ud)
			return set_error_text(-EINVAL, "a UD QP can only send messages");
		break;
	default:
		return set_error_text(-EINVAL, "unknown operation");
	}
	if (wr->flags & ~known)
		return set_error_text(-EINVAL, "unknown flags");
	if (wr->num_sge && !wr->sg_list)
		return set_error_text(-EINVAL, "num_sge without sg_list");
	if (wr->num_sge > qp->max_send_sge)
		return set_error_text(-EINVAL, "more SGEs than the QP was created for");
	if (total(wr->sg_list, wr->num_sge, bytes))
		return -EINVAL;
	if (!(wr->flags & VNICD_SEND_INLINE))
		return 0;
	if (*bytes > qp->max_inline)
		return set_error_text(-EINVAL, "more inline data than the QP was created for");
	if (wr->opcode == VNICD_WR_RDMA_READ || wr->opcode == VNICD_WR_ATOMIC_CMP_AND_SWP ||
	    wr->opcode == VNICD_WR_ATOMIC_FETCH_AND_ADD)
		return set_error_text(-EINVAL, "inline data for an operation that returns data");
	return 0;
}

static void put_target(const struct vnicd_qp *qp, const struct vnicd_send_wr *wr, struct rxe_send_wqe *e)
{
	switch (wr->opcode) {
	case VNICD_WR_SEND:
	case VNICD_WR_SEND_WITH_IMM:
		if (qp->type == VNICD_QPT_UD) {
			e->wr.wr.ud.remote_qpn = wr->remote_qpn;
			e->wr.wr.ud.remote_qkey = wr->remote_qkey;
			e->wr.wr.ud.ah_num = wr->address->num;
		}
		break;
	case VNICD_WR_ATOMIC_CMP_AND_SWP:
	case VNICD_WR_ATOMIC_FETCH_AND_ADD:
		e->wr.wr.atomic.remote_addr = wr->remote_addr;
		e->wr.wr.atomic.compare_add = wr->compare_add;
		e->wr.wr.atomic.swap = wr->swap;
		e->wr.wr.atomic.rkey = wr->rkey;
		e->iova = wr->remote_addr;
		break;
	default:
		e->wr.wr.rdma.remote_addr = wr->remote_addr;
		e->wr.wr.rdma.rkey = wr->rkey;
		e->iova = wr->remote_addr;
	}
	if (wr->opcode == VNICD_WR_SEND_WITH_IMM || wr->opcode == VNICD_WR_RDMA_WRITE_WITH_IMM)
		memcpy(&e->wr.ex.imm_data, wr->imm, sizeof(wr->imm));
}

EXPORT int vnicd_queue_send(struct vnicd_qp *qp, const struct vnicd_send_wr *wr)
{
	struct rxe_send_wqe *e;
	uint32_t bytes = 0;
	int err = device_check(qp->o.dev);

	if (!err)
		err = check_send(qp, wr, &bytes);
	if (err)
		return err;
	e = (struct rxe_send_wqe *)room(&qp->sq);
	if (!e)
		return set_error_text(-EAGAIN, "the send queue is full");
	memset(e, 0, sizeof(*e));
	e->wr.wr_id = wr->id;
	e->wr.opcode = wr->opcode;
	e->wr.send_flags = wr->flags;
	put_target(qp, wr, e);
	if (wr->flags & VNICD_SEND_INLINE)
		put_inline(&e->dma, wr->sg_list, wr->num_sge, bytes);
	else
		put_sges(&e->dma, wr->sg_list, wr->num_sge, bytes);
	publish(&qp->sq);
	return 0;
}

/*
 * The load of need_wakeup follows the stores of the bits in the order of all threads: either the device finds the bits
 * in its last check before it sleeps, or this load finds the device's flag.
 */
EXPORT void vnicd_ring(struct vnicd_qp *qp)
{
	struct vnicd_doorbells *d = qp->db->area;
	const uint32_t slot = qp->slot;

	__atomic_fetch_or(&d->bits[slot / 64], 1ULL << slot % 64, __ATOMIC_SEQ_CST);
	__atomic_fetch_or(&d->summary[slot / 4096], 1ULL << slot / 64 % 64, __ATOMIC_SEQ_CST);
	if (__atomic_load_n(&d->need_wakeup, __ATOMIC_SEQ_CST))
		queue_notify(qp->db->q);
}

EXPORT int vnicd_post_send(struct vnicd_qp *qp, const struct vnicd_send_wr *wr)
{
	int err = vnicd_queue_send(qp, wr);

	if (!err)
		vnicd_ring(qp);
	return err;
}

EXPORT int vnicd_post_recv(struct vnicd_qp *qp, const struct vnicd_recv_wr *wr)
{
	struct rxe_recv_wqe *e;
	uint32_t bytes;
	int err = device_check(qp->o.dev);

	if (err)
		return err;
	if (wr->num_sge && !wr->sg_list)
		return set_error_text(-EINVAL, "num_sge without sg_list");
	if (wr->num_sge > qp->max_recv_sge)
		return set_error_text(-EINVAL, "more SGEs than the QP was created for");
	if (total(wr->sg_list, wr->num_sge, &bytes))
		return -EINVAL;
	e = (struct rxe_recv_wqe *)room(&qp->rq);
	if (!e)
		return set_error_text(-EAGAIN, "the receive queue is full");
	memset(e, 0, sizeof(*e));
	e->wr_id = wr->id;
	put_sges(&e->dma, wr->sg_list, wr->num_sge, bytes);
	publish(&qp->rq);
	return 0;
}

EXPORT int vnicd_poll_cq(struct vnicd_cq *cq, int n, struct vnicd_wc *wc)
{
	const uint32_t mask = cq->ring.mask;
	uint32_t prod = atomic_load_explicit(cq->ring.prod, memory_order_acquire) & mask;
	int i;

	for (i = 0; i < n && cq->ring.own != prod; i++) {
		struct ib_uverbs_wc e;

		memcpy(&e, element(&cq->ring, cq->ring.own), sizeof(e));
		wc[i] = (struct vnicd_wc){
			.id = e.wr_id, .status = e.status, .opcode = e.opcode, .vendor_err = e.vendor_err,
			.byte_len = e.byte_len, .flags = e.wc_flags, .qpn = e.qp_num, .src_qpn = e.src_qp,
		};
		memcpy(wc[i].imm, &e.ex.imm_data, sizeof(wc[i].imm));
		cq->ring.own = (cq->ring.own + 1) & mask;
	}
	if (i)
		atomic_store_explicit(cq->ring.cons, cq->ring.own, memory_order_release);
	return i || n <= 0 ? i : device_check(cq->o.dev);
}

/* The arm word is written before the producer index is read; the device does both in reverse. */
EXPORT int vnicd_arm_cq(struct vnicd_cq *cq, int solicited_only)
{
	int err = device_check(cq->o.dev);

	if (err)
		return err;
	atomic_store(cq->arm, solicited_only ? VNICD_ARM_SOLICITED : VNICD_ARM_NEXT);
	return (atomic_load(cq->ring.prod) & cq->ring.mask) != cq->ring.own;
}
