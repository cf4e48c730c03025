// SPDX-License-Identifier: GPL-2.0
/*
 * Event queues. Completion events are dispatched from a tasklet: handlers of
 * ib_core expect at most softirq context, and a flood of them must not block
 * the (shared, INTx) interrupt. Asynchronous events are rare and use an ordered
 * workqueue of their own: a page fault waits neither for rtnl_lock nor for memory.
 *
 * A buffer is read once, then returned to the device before the event is
 * dispatched, so that the device gets room as early as possible.
 */
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "vnicd.h"

/* Events handled before other softirqs and works may run. */
#define VNICD_EQ_BUDGET 128

static int vnicd_eq_add_locked(struct vnicd_eq *eq, void *buf)
{
	struct scatterlist sg;

	sg_init_one(&sg, buf, eq->buf_size);
	return virtqueue_add_inbuf(eq->vq, &sg, 1, buf, GFP_ATOMIC);
}

/*
 * Copies one event to @out, which has eq->buf_size bytes, and returns the
 * buffer to the device. False: none, and callbacks are enabled again.
 */
static bool vnicd_eq_next(struct vnicd_eq *eq, void *out)
{
	unsigned long flags;
	bool found = false;
	unsigned int len;
	void *buf;

	spin_lock_irqsave(&eq->lock, flags);
	while (!eq->stopped) {
		buf = virtqueue_get_buf(eq->vq, &len);
		if (!buf) {
			if (virtqueue_is_broken(eq->vq) || virtqueue_enable_cb(eq->vq))
				break;
			virtqueue_disable_cb(eq->vq);
			continue;
		}
		if (len == eq->buf_size) {
			memcpy(out, buf, eq->buf_size);
			found = true;
		} else {
			dev_err_ratelimited(&eq->vd->vdev->dev,
					    "event of %u bytes, expected %zu\n",
					    len, eq->buf_size);
		}
		memset(buf, 0, eq->buf_size);
		if (!vnicd_eq_add_locked(eq, buf))
			virtqueue_kick(eq->vq);
		if (found)
			break;
	}
	spin_unlock_irqrestore(&eq->lock, flags);
	return found;
}

static void vnicd_ceq_tasklet(struct tasklet_struct *t)
{
	struct vnicd_eq *eq = container_of(t, struct vnicd_eq, tasklet);
	unsigned int budget = VNICD_EQ_BUDGET;
	struct vnicd_ceqe ceqe;
	struct vnicd_cq *cq;

	while (budget--) {
		if (!vnicd_eq_next(eq, &ceqe))
			return;
		cq = vnicd_cq_get(eq->vd, le32_to_cpu(ceqe.cqn));
		if (!cq)
			continue;	/* destroyed meanwhile */
		vnicd_cq_event(cq);
		vnicd_cq_put(cq);
	}
	tasklet_schedule(t);
}

static void vnicd_cq_async(struct vnicd_dev *vd, u32 cqn, struct ib_event *ev)
{
	struct vnicd_cq *cq = vnicd_cq_get(vd, cqn);

	if (!cq)
		return;
	ev->element.cq = &cq->base;
	if (cq->base.event_handler)
		cq->base.event_handler(ev, cq->base.cq_context);
	vnicd_cq_put(cq);
}

static void vnicd_qp_async(struct vnicd_dev *vd, u32 qpn, struct ib_event *ev)
{
	struct vnicd_qp *qp = vnicd_qp_get(vd, qpn);

	if (!qp)
		return;
	ev->element.qp = &qp->base;
	if (qp->base.event_handler)
		qp->base.event_handler(ev, qp->base.qp_context);
	vnicd_qp_put(qp);
}

static void vnicd_srq_async(struct vnicd_dev *vd, u32 srqn, struct ib_event *ev)
{
	struct vnicd_srq *srq = vnicd_srq_get(vd, srqn);

	if (!srq)
		return;
	ev->element.srq = &srq->base;
	if (srq->base.event_handler)
		srq->base.event_handler(ev, srq->base.srq_context);
	vnicd_srq_put(srq);
}

/* An object was found, so ib_core's device exists: it outlives its objects. */
static void vnicd_aeq_dispatch(struct vnicd_dev *vd, const struct vnicd_event *e)
{
	u32 type = le32_to_cpu(e->type);
	u32 handle = le32_to_cpu(e->handle);
	struct ib_event ev = { .device = &vd->ib->base };

	switch (type) {
	case VNICD_EVENT_CQ_ERR:
		ev.event = IB_EVENT_CQ_ERR;
		dev_warn_ratelimited(&vd->vdev->dev, "CQ %u failed\n", handle);
		vnicd_cq_async(vd, handle, &ev);
		break;
	case VNICD_EVENT_QP_FATAL:
		ev.event = IB_EVENT_QP_FATAL;
		vnicd_qp_async(vd, handle, &ev);
		break;
	case VNICD_EVENT_QP_REQ_ERR:
		ev.event = IB_EVENT_QP_REQ_ERR;
		vnicd_qp_async(vd, handle, &ev);
		break;
	case VNICD_EVENT_QP_ACCESS_ERR:
		ev.event = IB_EVENT_QP_ACCESS_ERR;
		vnicd_qp_async(vd, handle, &ev);
		break;
	case VNICD_EVENT_QP_COMM_EST:
		ev.event = IB_EVENT_COMM_EST;
		vnicd_qp_async(vd, handle, &ev);
		break;
	case VNICD_EVENT_SQ_DRAINED:
		ev.event = IB_EVENT_SQ_DRAINED;
		vnicd_qp_async(vd, handle, &ev);
		break;
	case VNICD_EVENT_QP_LAST_WQE:
		ev.event = IB_EVENT_QP_LAST_WQE_REACHED;
		vnicd_qp_async(vd, handle, &ev);
		break;
	case VNICD_EVENT_SRQ_ERR:
		ev.event = IB_EVENT_SRQ_ERR;
		vnicd_srq_async(vd, handle, &ev);
		break;
	case VNICD_EVENT_SRQ_LIMIT:
		ev.event = IB_EVENT_SRQ_LIMIT_REACHED;
		vnicd_srq_async(vd, handle, &ev);
		break;
	case VNICD_EVENT_PAGE_FAULT:
		vnicd_fault_event(vd, e);
		break;
	default:
		/* Of a later device. */
		dev_dbg(&vd->vdev->dev, "event of unknown type %u\n", type);
	}
}

static void vnicd_aeq_work(struct work_struct *work)
{
	struct vnicd_eq *eq = container_of(work, struct vnicd_eq, work);
	unsigned int budget = VNICD_EQ_BUDGET;
	struct vnicd_event event;

	while (budget--) {
		if (!vnicd_eq_next(eq, &event))
			return;
		vnicd_aeq_dispatch(eq->vd, &event);
	}
	queue_work(eq->vd->event_wq, work);
}

void vnicd_aeq_irq(struct virtqueue *vq)
{
	struct vnicd_dev *vd = vq->vdev->priv;

	virtqueue_disable_cb(vq);
	queue_work(vd->event_wq, &vd->aeq.work);
}

void vnicd_ceq_irq(struct virtqueue *vq)
{
	struct vnicd_dev *vd = vq->vdev->priv;

	virtqueue_disable_cb(vq);
	/* Queue 0 is for commands, 1 for asynchronous events. */
	tasklet_schedule(&vd->ceqs[vq->index - 2].tasklet);
}

/* Called before the virtqueues exist: their callbacks may run at once. */
void vnicd_eq_setup(struct vnicd_dev *vd, struct vnicd_eq *eq, bool async)
{
	eq->vd = vd;
	eq->stopped = true;
	spin_lock_init(&eq->lock);
	if (async)
		INIT_WORK(&eq->work, vnicd_aeq_work);
	else
		tasklet_setup(&eq->tasklet, vnicd_ceq_tasklet);
}

int vnicd_eq_start(struct vnicd_eq *eq, struct virtqueue *vq, bool async)
{
	unsigned int i, n = virtqueue_get_vring_size(vq);
	unsigned long flags;
	int err = 0;

	eq->buf_size = async ? sizeof(struct vnicd_event) : sizeof(struct vnicd_ceqe);
	eq->bufs = kcalloc(n, eq->buf_size, GFP_KERNEL);
	if (!eq->bufs)
		return -ENOMEM;

	spin_lock_irqsave(&eq->lock, flags);
	eq->vq = vq;
	eq->num_bufs = n;
	for (i = 0; i < n && !err; i++)
		err = vnicd_eq_add_locked(eq, eq->bufs + i * eq->buf_size);
	eq->stopped = !!err;
	spin_unlock_irqrestore(&eq->lock, flags);
	if (!err)
		virtqueue_kick(vq);
	return err;
}

/*
 * After it returns, no event is or will be dispatched. Interrupts may still schedule
 * the tasklet or work, to no effect: stop again when they have ended.
 */
void vnicd_eq_stop(struct vnicd_eq *eq)
{
	unsigned long flags;

	if (!eq->vd)
		return;
	spin_lock_irqsave(&eq->lock, flags);
	eq->stopped = true;
	spin_unlock_irqrestore(&eq->lock, flags);
	if (eq->work.func)
		cancel_work_sync(&eq->work);
	else
		tasklet_kill(&eq->tasklet);
}

/* Only after the device was reset: it writes to these buffers. */
void vnicd_eq_free(struct vnicd_eq *eq)
{
	kfree(eq->bufs);
	eq->bufs = NULL;
}
