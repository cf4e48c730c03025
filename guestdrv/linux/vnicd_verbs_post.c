// SPDX-License-Identifier: GPL-2.0
/*
 * Posting work requests: validate, translate into rxe's WQE, publish the
 * producer index, ring the doorbell. A process writes its WQEs itself and calls
 * this only for the doorbell.
 *
 * We register without a DMA device, so ib_core's ib_dma_* return kernel virtual
 * addresses. Segments with VNICD_DMA_LKEY are converted to guest physical
 * addresses here (RA-1); memory from vmalloc yields one per page.
 */
#include <linux/io.h>
#include <linux/log2.h>
#include <linux/mm.h>

#include "vnicd.h"

/* The protocol is described at struct vnicd_doorbells. */
static void vnicd_ring_doorbell(struct vnicd_qp *qp)
{
	struct vnicd_doorbells *db = qp->engine->db;

	/* WQE and index, also a process's, before the bit. */
	virt_mb();
#ifdef __LITTLE_ENDIAN
	vnicd_shared_set_bit(qp->db_slot, (unsigned long *)db->bits);
	/* The bit before the summary bit that makes the engine check it. */
	virt_mb();
	vnicd_shared_set_bit(qp->db_slot / 64, (unsigned long *)db->summary);
#else
#error "the rings of rxe's ABI are in host order, the device expects little-endian"
#endif
	/* Both before the check; the engine announces its sleep, then checks them. */
	virt_mb();
	if (READ_ONCE(db->need_wakeup))
		virtqueue_notify(qp->engine->vq);
}

/*
 * Appends one segment of the consumer as device segments. Returns their number,
 * or a negative errno: no room, or an invalid address.
 */
static int vnicd_add_sge(struct vnicd_dev *vd, struct rxe_sge *out, u32 room,
			 const struct ib_sge *sge)
{
	u32 left = sge->length;
	const char *va;
	u32 n = 0;

	if (sge->lkey != VNICD_DMA_LKEY && !xa_load(&vd->phys_keys, sge->lkey)) {
		if (!room)
			return -EINVAL;
		out->addr = sge->addr;
		out->length = sge->length;
		out->lkey = sge->lkey;
		return 1;
	}

	va = vnicd_dma_to_ptr(sge->addr);
	while (left) {
		phys_addr_t pa;
		u32 len = left;

		if (is_vmalloc_addr(va)) {
			struct page *page = vmalloc_to_page(va);

			if (!page)
				return -EINVAL;
			len = min_t(u32, left, PAGE_SIZE - offset_in_page(va));
			pa = page_to_phys(page) + offset_in_page(va);
		} else if (virt_addr_valid(va) && virt_addr_valid(va + left - 1)) {
			pa = virt_to_phys((void *)va);
		} else {
			return -EINVAL;
		}
		if (n && out[n - 1].addr + out[n - 1].length == pa) {
			out[n - 1].length += len;
		} else {
			if (n == room)
				return -EINVAL;
			out[n].addr = pa;
			out[n].length = len;
			out[n].lkey = sge->lkey;
			n++;
		}
		va += len;
		left -= len;
	}
	return n;
}

static int vnicd_fill_sges(struct vnicd_dev *vd, struct rxe_dma_info *dma, u32 room,
			   const struct ib_sge *sges, int num)
{
	u64 total = 0;
	u32 used = 0;
	int i, n;

	for (i = 0; i < num; i++) {
		total += sges[i].length;
		if (total > VNICD_MAX_MSG)
			return -EINVAL;
		n = vnicd_add_sge(vd, dma->sge + used, room - used, &sges[i]);
		if (n < 0)
			return n;
		used += n;
	}
	dma->length = total;
	dma->resid = total;
	dma->cur_sge = 0;
	dma->num_sge = used;
	dma->sge_offset = 0;
	return 0;
}

static int vnicd_fill_inline(struct rxe_dma_info *dma, u32 room,
			     const struct ib_sge *sges, int num)
{
	u32 used = 0;
	int i;

	for (i = 0; i < num; i++) {
		if (sges[i].length > room - used)
			return -EINVAL;
		memcpy(dma->inline_data + used, vnicd_dma_to_ptr(sges[i].addr),
		       sges[i].length);
		used += sges[i].length;
	}
	dma->length = used;
	dma->resid = used;
	dma->cur_sge = 0;
	dma->num_sge = num;
	dma->sge_offset = 0;
	return 0;
}

static int vnicd_fill_ud(struct vnicd_qp *qp, struct rxe_send_wr *out,
			 const struct ib_send_wr *wr)
{
	const struct ib_ud_wr *ud = ud_wr(wr);

	if (wr->opcode != IB_WR_SEND && wr->opcode != IB_WR_SEND_WITH_IMM)
		return -EINVAL;
	if (!ud->ah)
		return -EINVAL;
	out->wr.ud.remote_qpn = ud->remote_qpn;
	out->wr.ud.remote_qkey = ud->remote_qkey;
	out->wr.ud.pkey_index = ud->pkey_index;
	out->wr.ud.ah_num = to_vah_obj(ud->ah)->index;
	return 0;
}

/* The device reads the region's list when it executes the request. */
static int vnicd_fill_reg(struct rxe_send_wr *out, const struct ib_reg_wr *wr)
{
	struct vnicd_reg_wr *reg = (void *)&out->wr;
	const struct vnicd_mr *mr = to_vmr(wr->mr);

	BUILD_BUG_ON(offsetof(struct rxe_send_wr, wr) != VNICD_WR_REG_OFFSET);
#ifdef VNICD_HAVE_FLUSH
	BUILD_BUG_ON(offsetof(struct rxe_send_wr, wr.flush) != VNICD_WR_FLUSH_OFFSET);
	BUILD_BUG_ON(offsetof(struct rxe_send_wr, wr.flush.rkey) != VNICD_WR_FLUSH_OFFSET + 12);
	BUILD_BUG_ON(offsetof(struct rxe_send_wr, wr.flush.level) != VNICD_WR_FLUSH_OFFSET + 17);
#endif
	BUILD_BUG_ON(sizeof(*reg) > sizeof(out->wr));
	if (!mr->pages)
		return -EINVAL;
	if (wr->access & ~(VNICD_MR_ACCESS | IB_ACCESS_OPTIONAL))
		return -EOPNOTSUPP;
	out->opcode = VNICD_WR_REG_MR;
	reg->iova = cpu_to_le64(wr->mr->iova);
	reg->length = cpu_to_le64(wr->mr->length);
	reg->page_list = cpu_to_le64(virt_to_phys(mr->pages));
	reg->npages = cpu_to_le32(mr->num_pages);
	reg->offset = cpu_to_le32(wr->mr->iova & (wr->mr->page_size - 1));
	reg->rkey = cpu_to_le32(wr->key);
	reg->access = cpu_to_le32(wr->access & VNICD_MR_ACCESS);
	reg->page_shift = ilog2(wr->mr->page_size);
	return 0;
}

static int vnicd_fill_connected(struct rxe_send_wr *out, const struct ib_send_wr *wr)
{
	switch (wr->opcode) {
	case IB_WR_SEND:
	case IB_WR_SEND_WITH_IMM:
		return 0;
	case IB_WR_REG_MR:
		return vnicd_fill_reg(out, reg_wr(wr));
	case IB_WR_SEND_WITH_INV:
	case IB_WR_LOCAL_INV:
		out->ex.invalidate_rkey = wr->ex.invalidate_rkey;
		return 0;
	case IB_WR_RDMA_WRITE:
	case IB_WR_RDMA_WRITE_WITH_IMM:
	case IB_WR_RDMA_READ:
#ifdef VNICD_HAVE_ATOMIC_WRITE
	case IB_WR_ATOMIC_WRITE:
#endif
		out->wr.rdma.remote_addr = rdma_wr(wr)->remote_addr;
		out->wr.rdma.rkey = rdma_wr(wr)->rkey;
		return 0;
	case IB_WR_ATOMIC_CMP_AND_SWP:
	case IB_WR_ATOMIC_FETCH_AND_ADD:
		if (atomic_wr(wr)->remote_addr & 7)
			return -EINVAL;
		out->wr.atomic.remote_addr = atomic_wr(wr)->remote_addr;
		out->wr.atomic.compare_add = atomic_wr(wr)->compare_add;
		out->wr.atomic.swap = atomic_wr(wr)->swap;
		out->wr.atomic.rkey = atomic_wr(wr)->rkey;
		return 0;
	default:
		return -EOPNOTSUPP;
	}
}

/* The producer index is for the device; the driver uses posted. */
static void vnicd_wq_publish(struct vnicd_wq *wq)
{
	u32 posted = wq->posted + 1;

	/* The slot's wr_id before the count, the WQE before the index. */
	smp_store_release(&wq->posted, posted);
	virt_store_release(&wq->ring->buf->producer_index,
			   posted & (wq->ring->num_elems - 1));
}

static bool vnicd_wq_full(const struct vnicd_wq *wq)
{
	return wq->posted - vnicd_wq_polled(wq) >= wq->max_wr;
}

static int vnicd_post_one_send(struct vnicd_dev *vd, struct vnicd_qp *qp,
			       const struct ib_send_wr *wr)
{
	struct vnicd_wq *sq = &qp->sq;
	struct rxe_send_wqe *wqe;
	int err;

	if (vnicd_wq_full(sq))
		return -ENOMEM;
	if (wr->num_sge < 0 || wr->num_sge > sq->max_sge)
		return -EINVAL;

	wqe = vnicd_ring_elem(sq->ring, sq->posted);
	memset(wqe, 0, sizeof(*wqe));
	wqe->wr.wr_id = vnicd_token(VNICD_TOKEN_SEND, qp->cookie, sq->posted);
	wqe->wr.opcode = wr->opcode;
	wqe->wr.send_flags = wr->send_flags;
	if (wr->opcode == IB_WR_SEND_WITH_IMM || wr->opcode == IB_WR_RDMA_WRITE_WITH_IMM)
		wqe->wr.ex.imm_data = wr->ex.imm_data;

	if (qp->base.qp_type == IB_QPT_UD || qp->base.qp_type == IB_QPT_GSI)
		err = vnicd_fill_ud(qp, &wqe->wr, wr);
	else
		err = vnicd_fill_connected(&wqe->wr, wr);
	if (err)
		return err;

	if (wr->send_flags & IB_SEND_INLINE)
		err = vnicd_fill_inline(&wqe->dma, sq->max_inline, wr->sg_list, wr->num_sge);
	else
		err = vnicd_fill_sges(vd, &wqe->dma, sq->max_sge, wr->sg_list, wr->num_sge);
	if (err)
		return err;

	sq->wr_ids[sq->posted & (sq->ring->num_elems - 1)] = wr->wr_id;
	vnicd_wq_publish(sq);
	return 0;
}

int vnicd_post_send(struct ib_qp *ibqp, const struct ib_send_wr *wr,
		    const struct ib_send_wr **bad_wr)
{
	struct vnicd_dev *vd = to_vd(ibqp->device);
	struct vnicd_qp *qp = to_vqp(ibqp);
	unsigned long flags;
	bool posted = false;
	int err = 0;

	/* Without work requests: the process wrote them into the ring. */
	if (qp->user) {
		*bad_wr = wr;
		if (READ_ONCE(qp->state) < IB_QPS_RTS)
			return -EINVAL;
		vnicd_ring_doorbell(qp);
		/* The device may have died after the flush. */
		return vnicd_dead(vd) ? -EIO : 0;
	}

	spin_lock_irqsave(&qp->sq.lock, flags);
	/* IBTA 10.8.2: an immediate error before RTS; in ERR they are flushed. */
	if (READ_ONCE(qp->state) < IB_QPS_RTS)
		err = -EINVAL;
	while (wr && !err) {
		err = vnicd_post_one_send(vd, qp, wr);
		if (err)
			break;
		posted = true;
		wr = wr->next;
	}
	spin_unlock_irqrestore(&qp->sq.lock, flags);
	if (err)
		*bad_wr = wr;

	if (posted)
		vnicd_ring_doorbell(qp);
	if (vnicd_dead(vd))
		queue_work(vd->wq, &vd->flush_work);
	return err;
}

static int vnicd_fill_recv(struct vnicd_dev *vd, struct vnicd_wq *wq, u64 token,
			   const struct ib_recv_wr *wr)
{
	struct rxe_recv_wqe *wqe = vnicd_ring_elem(wq->ring, wq->posted);

	if (wr->num_sge < 0 || wr->num_sge > wq->max_sge)
		return -EINVAL;
	memset(wqe, 0, sizeof(*wqe));
	wqe->wr_id = token;
	return vnicd_fill_sges(vd, &wqe->dma, wq->max_sge, wr->sg_list, wr->num_sge);
}

static int vnicd_post_one_recv(struct vnicd_dev *vd, struct vnicd_qp *qp,
			       const struct ib_recv_wr *wr)
{
	struct vnicd_wq *rq = &qp->rq;
	int err;

	if (vnicd_wq_full(rq))
		return -ENOMEM;
	err = vnicd_fill_recv(vd, rq, vnicd_token(VNICD_TOKEN_RECV, qp->cookie, rq->posted),
			      wr);
	if (err)
		return err;
	rq->wr_ids[rq->posted & (rq->ring->num_elems - 1)] = wr->wr_id;
	vnicd_wq_publish(rq);
	return 0;
}

int vnicd_post_recv(struct ib_qp *ibqp, const struct ib_recv_wr *wr,
		    const struct ib_recv_wr **bad_wr)
{
	struct vnicd_dev *vd = to_vd(ibqp->device);
	struct vnicd_qp *qp = to_vqp(ibqp);
	unsigned long flags;
	int err = 0;

	/* A process posts receives itself. IBTA C10-97.2.1: not in RESET. */
	if (qp->user || qp->srq || READ_ONCE(qp->state) == IB_QPS_RESET) {
		*bad_wr = wr;
		return -EINVAL;
	}

	spin_lock_irqsave(&qp->rq.lock, flags);
	while (wr) {
		err = vnicd_post_one_recv(vd, qp, wr);
		if (err) {
			*bad_wr = wr;
			break;
		}
		wr = wr->next;
	}
	spin_unlock_irqrestore(&qp->rq.lock, flags);

	/*
	 * The device checks for receives when a packet needs one. In ERR no
	 * packet comes, so it must be told that there is something to flush.
	 */
	if (READ_ONCE(qp->state) == IB_QPS_ERR)
		vnicd_ring_doorbell(qp);
	if (vnicd_dead(vd))
		queue_work(vd->wq, &vd->flush_work);
	return err;
}

static int vnicd_post_one_srq_recv(struct vnicd_dev *vd, struct vnicd_srq *srq,
				   const struct ib_recv_wr *wr)
{
	struct vnicd_wq *wq = &srq->wq;
	u32 token = srq->free_token;
	int err;

	/* One token per slot: a free token means a free slot. */
	if (token == VNICD_NO_TOKEN)
		return -ENOMEM;
	err = vnicd_fill_recv(vd, wq, vnicd_token(VNICD_TOKEN_SRQ, 0, token), wr);
	if (err)
		return err;
	wq->wr_ids[token] = wr->wr_id;
	srq->free_token = srq->next_token[token];
	srq->next_token[token] = token;
	vnicd_wq_publish(wq);
	return 0;
}

int vnicd_post_srq_recv(struct ib_srq *ibsrq, const struct ib_recv_wr *wr,
			const struct ib_recv_wr **bad_wr)
{
	struct vnicd_dev *vd = to_vd(ibsrq->device);
	struct vnicd_srq *srq = to_vsrq(ibsrq);
	unsigned long flags;
	int err = 0;

	if (srq->user) {
		*bad_wr = wr;
		return -EINVAL;
	}
	spin_lock_irqsave(&srq->wq.lock, flags);
	while (wr) {
		err = vnicd_post_one_srq_recv(vd, srq, wr);
		if (err) {
			*bad_wr = wr;
			break;
		}
		wr = wr->next;
	}
	spin_unlock_irqrestore(&srq->wq.lock, flags);
	return err;
}
