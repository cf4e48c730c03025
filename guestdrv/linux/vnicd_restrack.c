// SPDX-License-Identifier: GPL-2.0
/*
 * What "rdma -dd resource show" prints of this driver's objects beside their
 * attributes in verbs: their names in the device, and what no verb queries. All
 * of it is read without locks.
 */
#include <rdma/ib_verbs.h>
#include <rdma/rdma_netlink.h>
#include <rdma/restrack.h>

#include "vnicd.h"

/* Ends the table, or removes it if an attribute did not fit. */
static int vnicd_details_end(struct sk_buff *msg, struct nlattr *table, int err)
{
	if (err) {
		nla_nest_cancel(msg, table);
		return -EMSGSIZE;
	}
	nla_nest_end(msg, table);
	return 0;
}

int vnicd_fill_res_cq_entry(struct sk_buff *msg, struct ib_cq *ibcq)
{
	struct nlattr *table = nla_nest_start(msg, RDMA_NLDEV_ATTR_DRIVER);
	struct vnicd_cq *cq = to_vcq(ibcq);
	int err;

	if (!table)
		return -EMSGSIZE;
	err = rdma_nl_put_driver_u32(msg, "cqn", cq->cqn) ||
	      rdma_nl_put_driver_u32(msg, "armed", atomic_read(&cq->armed));
	if (READ_ONCE(cq->period))
		err = err || rdma_nl_put_driver_u32(msg, "event_count", READ_ONCE(cq->count)) ||
		      rdma_nl_put_driver_u32(msg, "event_period_us", READ_ONCE(cq->period));
	return vnicd_details_end(msg, table, err);
}

/* Requests that the consumer has posted and not polled; a process's own are in its memory. */
static int vnicd_put_wq(struct sk_buff *msg, const struct vnicd_wq *wq,
			const char *max_wr, const char *outstanding)
{
	u32 polled = vnicd_wq_polled(wq);

	return rdma_nl_put_driver_u32(msg, max_wr, wq->max_wr) ||
	       (wq->wr_ids && rdma_nl_put_driver_u32(msg, outstanding, vnicd_wq_posted(wq) - polled));
}

int vnicd_fill_res_qp_entry(struct sk_buff *msg, struct ib_qp *ibqp)
{
	struct nlattr *table = nla_nest_start(msg, RDMA_NLDEV_ATTR_DRIVER);
	struct vnicd_qp *qp = to_vqp(ibqp);
	int err;

	if (!table)
		return -EMSGSIZE;
	err = rdma_nl_put_driver_u32(msg, "engine", qp->engine - to_vd(ibqp->device)->engines) ||
	      vnicd_put_wq(msg, &qp->sq, "sq_max_wr", "sq_outstanding");
	if (qp->srq)
		err = err || rdma_nl_put_driver_u32(msg, "srqn", qp->srq->srqn);
	else
		err = err || vnicd_put_wq(msg, &qp->rq, "rq_max_wr", "rq_outstanding");
	return vnicd_details_end(msg, table, err);
}

int vnicd_fill_res_mr_entry(struct sk_buff *msg, struct ib_mr *ibmr)
{
	struct nlattr *table = nla_nest_start(msg, RDMA_NLDEV_ATTR_DRIVER);
	struct vnicd_mr *mr = to_vmr(ibmr);
	const char *kind = "pinned";
	int err;

	if (!table)
		return -EMSGSIZE;
	if (mr->phys)
		kind = "all-memory";
	else if (mr->odp)
		kind = "on-demand";
	else if (mr->pages)
		kind = "fast-registration";
	err = rdma_nl_put_driver_string(msg, "kind", kind) ||
	      rdma_nl_put_driver_u32_hex(msg, "handle", mr->handle);
	if (mr->pages)
		err = err || rdma_nl_put_driver_u32(msg, "max_pages", mr->max_pages);
	return vnicd_details_end(msg, table, err);
}
