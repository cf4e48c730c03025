// SPDX-License-Identifier: GPL-2.0
/*
 * Completes the outstanding work of processes when the device is lost. They
 * poll their CQs in memory, without a system call, so only a completion reaches
 * them: every work request in their rings gets one with flush status (IBTA
 * 10.3.1, error state), and waiters for a CQ's event are woken.
 *
 * A process that changes its rings meanwhile harms only its own completions: indices
 * are masked, and each ring is scanned at most once. So does a device that is only
 * slow and goes on before it is reset: the rings are not freed until then.
 */
#include <rdma/ib_user_verbs.h>

#include "vnicd.h"

/* False: the CQ is full. */
static bool vnicd_flush_post(struct vnicd_cq *cq, const struct ib_uverbs_wc *wc)
{
	struct rxe_queue_buf *buf = cq->ring->buf;
	u32 mask = cq->ring->num_elems - 1;
	u32 prod = READ_ONCE(buf->producer_index) & mask;
	u32 next = (prod + 1) & mask;

	if (next == (virt_load_acquire(&buf->consumer_index) & mask))
		return false;
	memcpy(vnicd_ring_elem(cq->ring, prod), wc, sizeof(*wc));
	virt_store_release(&buf->producer_index, next);
	return true;
}

/* Send and receive elements both begin with the consumer's wr_id. */
static void vnicd_flush_ring(struct vnicd_qp *qp, struct vnicd_ring_mem *ring,
			     struct vnicd_cq *cq, enum ib_wc_opcode opcode)
{
	struct ib_uverbs_wc wc = {
		.status = IB_WC_WR_FLUSH_ERR, .opcode = opcode,
		.qp_num = qp->qpn, .port_num = VNICD_PORT,
	};
	u32 mask, cons, prod, first;

	BUILD_BUG_ON(offsetof(struct rxe_send_wqe, wr.wr_id) != 0);
	BUILD_BUG_ON(offsetof(struct rxe_recv_wqe, wr_id) != 0);
	if (!ring)
		return;
	mask = ring->num_elems - 1;
	cons = first = READ_ONCE(ring->buf->consumer_index) & mask;
	prod = virt_load_acquire(&ring->buf->producer_index) & mask;

	mutex_lock(&cq->resize_lock);
	for (; cons != prod; cons = (cons + 1) & mask) {
		wc.wr_id = READ_ONCE(*(u64 *)vnicd_ring_elem(ring, cons));
		if (!vnicd_flush_post(cq, &wc))
			break;
	}
	mutex_unlock(&cq->resize_lock);
	virt_store_release(&ring->buf->consumer_index, cons);
	if (cons != first)
		vnicd_cq_event(cq);
}

/* Receives of an SRQ belong to no queue pair until consumed (IBTA 10.2.9.5). */
void vnicd_flush_processes(struct vnicd_dev *vd)
{
	struct vnicd_qp *qp;
	unsigned long qpn;

	xa_for_each(&vd->qps, qpn, qp) {
		/* The QP may be gone by now; look it up again, with a reference. */
		qp = vnicd_qp_get(vd, qpn);
		if (!qp)
			continue;
		if (qp->user) {
			vnicd_flush_ring(qp, qp->sq.ring, qp->send_cq, IB_WC_SEND);
			vnicd_flush_ring(qp, qp->rq.ring, qp->recv_cq, IB_WC_RECV);
		}
		vnicd_qp_put(qp);
	}
}
