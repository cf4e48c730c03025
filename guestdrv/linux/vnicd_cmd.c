// SPDX-License-Identifier: GPL-2.0
/*
 * One function per command: conversion of byte order, and validation of the
 * device's responses before their use.
 */
#include <linux/io.h>
#include <linux/log2.h>
#include <linux/slab.h>

#include "vnicd.h"

#define VNICD_ODP_ALL (VNICD_ODP_SEND | VNICD_ODP_RECV | VNICD_ODP_WRITE | \
		       VNICD_ODP_READ | VNICD_ODP_ATOMIC | VNICD_ODP_SRQ_RECV)

static int vnicd_exec(struct vnicd_dev *vd, u16 opcode, const void *req,
		      size_t req_len, void *resp, size_t resp_len)
{
	return vnicd_cmdq_exec(&vd->cmdq, opcode, req, req_len, NULL, 0,
			       resp, resp_len, 0);
}

/* A command with only an object's handle. */
static int vnicd_exec_handle(struct vnicd_dev *vd, u16 opcode, u32 handle,
			     void *resp, size_t resp_len)
{
	struct vnicd_handle req = { .handle = cpu_to_le32(handle) };

	return vnicd_exec(vd, opcode, &req, sizeof(req), resp, resp_len);
}

/* A command with the page lists of up to two rings. */
static int vnicd_exec_rings(struct vnicd_dev *vd, u16 opcode,
			    const void *req, size_t req_len,
			    struct vnicd_ring_mem *a, struct vnicd_ring_mem *b,
			    void *resp, size_t resp_len)
{
	size_t n = (a ? a->npages : 0) + (b ? b->npages : 0);
	__le64 *pas = NULL;

	if (n > (VNICD_CMD_MAX - sizeof(struct vnicd_req) - req_len) / sizeof(*pas))
		return -ENOMEM;	/* a ring of this size needs huge pages */
	if (n) {
		pas = kmalloc_array(n, sizeof(*pas), GFP_KERNEL);
		if (!pas)
			return -ENOMEM;
		if (a)
			vnicd_ring_pages(a, pas);
		if (b)
			vnicd_ring_pages(b, pas + (a ? a->npages : 0));
	}
	return vnicd_cmdq_exec(&vd->cmdq, opcode, req, req_len,
			       pas, n * sizeof(*pas), resp, resp_len, 0);
}

static int vnicd_bad_answer(struct vnicd_dev *vd, const char *what, u64 value)
{
	dev_err(&vd->vdev->dev, "malformed response: %s %llu\n",
		what, value);
	return -EIO;
}

int vnicd_cmd_query_device(struct vnicd_dev *vd, struct vnicd_limits *lim)
{
	struct vnicd_device_attr a;
	int err;

	err = vnicd_exec(vd, VNICD_CMD_QUERY_DEVICE, NULL, 0, &a, sizeof(a));
	if (err)
		return err;

	/* Declared __le64, but a GUID stays in network order. */
	memcpy(&lim->node_guid, &a.node_guid, sizeof(lim->node_guid));
	lim->max_mr_size = le64_to_cpu(a.max_mr_size);
	lim->caps = le64_to_cpu(a.caps);
	lim->max_qp = le32_to_cpu(a.max_qp);
	lim->max_qp_wr = le32_to_cpu(a.max_qp_wr);
	lim->max_sge = le32_to_cpu(a.max_sge);
	lim->max_inline = le32_to_cpu(a.max_inline);
	lim->max_cq = le32_to_cpu(a.max_cq);
	lim->max_cqe = le32_to_cpu(a.max_cqe);
	lim->max_mr = le32_to_cpu(a.max_mr);
	lim->max_mw = le32_to_cpu(a.max_mw);
	lim->max_pd = le32_to_cpu(a.max_pd);
	lim->max_srq = le32_to_cpu(a.max_srq);
	lim->max_srq_wr = le32_to_cpu(a.max_srq_wr);
	lim->max_srq_sge = le32_to_cpu(a.max_srq_sge);
	lim->max_ah = le32_to_cpu(a.max_ah);
	lim->max_gid = le32_to_cpu(a.max_gid);
	lim->max_qp_rd_atom = le32_to_cpu(a.max_qp_rd_atom);
	lim->max_qp_init_rd_atom = le32_to_cpu(a.max_qp_init_rd_atom);
	lim->max_mcast_grp = le32_to_cpu(a.max_mcast_grp);
	lim->max_mcast_qp_attach = le32_to_cpu(a.max_mcast_qp_attach);
	lim->odp_rc = le32_to_cpu(a.odp_rc) & VNICD_ODP_ALL;
	lim->odp_uc = le32_to_cpu(a.odp_uc) & VNICD_ODP_ALL;
	lim->odp_ud = le32_to_cpu(a.odp_ud) & VNICD_ODP_ALL;
	lim->max_fast_reg = le32_to_cpu(a.max_fast_reg);

	/* Refuse values that would break arithmetic here or in ib_core. */
	if (!lim->max_gid || lim->max_gid > 256)
		return vnicd_bad_answer(vd, "max_gid", lim->max_gid);
	if (!lim->max_qp_wr)
		return vnicd_bad_answer(vd, "max_qp_wr", lim->max_qp_wr);
	if (!lim->max_cqe)
		return vnicd_bad_answer(vd, "max_cqe", lim->max_cqe);
	if (!lim->max_sge)
		return vnicd_bad_answer(vd, "max_sge", lim->max_sge);
	if (lim->max_ah < 2)
		return vnicd_bad_answer(vd, "max_ah", lim->max_ah);
	/* Trim larger limits, because ib_core stores them as int. */
	lim->max_qp_wr = min(lim->max_qp_wr, 1U << 20);
	lim->max_cqe = min(lim->max_cqe, (1U << 22) - 1);
	lim->max_srq_wr = min(lim->max_srq_wr, 1U << 20);
	lim->max_sge = min(lim->max_sge, 256U);
	lim->max_srq_sge = min(lim->max_srq_sge, 256U);
	lim->max_inline = min(lim->max_inline, 4096U);
	lim->max_ah = min(lim->max_ah, 65536U);
	lim->max_qp = min(lim->max_qp, 1U << 24);
	lim->max_cq = min(lim->max_cq, 1U << 24);
	lim->max_mr = min(lim->max_mr, 1U << 24);
	lim->max_mw = min(lim->max_mw, 1U << 24);
	lim->max_fast_reg = min_t(u32, lim->max_fast_reg, VNICD_MAX_FAST_REG);
	if (!(lim->caps & VNICD_CAP_MEM_MGT))
		lim->max_fast_reg = 0;
	lim->max_pd = min(lim->max_pd, 1U << 24);
	lim->max_srq = min(lim->max_srq, 1U << 24);
	lim->max_qp_rd_atom = min(lim->max_qp_rd_atom, 255U);
	lim->max_qp_init_rd_atom = min(lim->max_qp_init_rd_atom, 255U);
	lim->max_mcast_grp = min(lim->max_mcast_grp, 1U << 24);
	lim->max_mcast_qp_attach = min(lim->max_mcast_qp_attach, 1U << 24);
	return 0;
}

int vnicd_cmd_query_port(struct vnicd_dev *vd, struct vnicd_port_attr *attr)
{
	return vnicd_exec(vd, VNICD_CMD_QUERY_PORT, NULL, 0, attr, sizeof(*attr));
}

int vnicd_cmd_query_stats(struct vnicd_dev *vd, u64 *values, unsigned int n)
{
	struct vnicd_stats stats;
	unsigned int i;
	int err;

	err = vnicd_exec(vd, VNICD_CMD_QUERY_STATS, NULL, 0, &stats, sizeof(stats));
	if (err)
		return err;
	for (i = 0; i < min_t(unsigned int, n, VNICD_NUM_STATS); i++)
		values[i] = le64_to_cpu(stats.value[i]);
	return 0;
}

/* values: VNICD_NUM_STATS, what the queue pair counted apart since the last call. */
int vnicd_cmd_count_qp(struct vnicd_dev *vd, u32 qpn, u32 flags, u64 *values)
{
	struct vnicd_count_qp req = {
		.qpn = cpu_to_le32(qpn),
		.flags = cpu_to_le32(flags),
	};
	struct vnicd_stats stats;
	unsigned int i;
	int err;

	err = vnicd_exec(vd, VNICD_CMD_COUNT_QP, &req, sizeof(req), &stats, sizeof(stats));
	if (err)
		return err;
	for (i = 0; i < VNICD_NUM_STATS; i++)
		values[i] = le64_to_cpu(stats.value[i]);
	return 0;
}

int vnicd_cmd_set_gid(struct vnicd_dev *vd, u16 index, u8 type, u16 vlan,
		      const u8 *smac, const union ib_gid *gid)
{
	struct vnicd_set_gid req = {
		.index = cpu_to_le16(index),
		.type = type,
		.vlan_id = cpu_to_le16(vlan),
	};

	memcpy(req.smac, smac, sizeof(req.smac));
	memcpy(req.gid, gid->raw, sizeof(req.gid));
	return vnicd_exec(vd, VNICD_CMD_SET_GID, &req, sizeof(req), NULL, 0);
}

int vnicd_cmd_clear_gid(struct vnicd_dev *vd, u16 index)
{
	struct vnicd_clear_gid req = { .index = cpu_to_le16(index) };

	return vnicd_exec(vd, VNICD_CMD_CLEAR_GID, &req, sizeof(req), NULL, 0);
}

int vnicd_cmd_set_doorbells(struct vnicd_dev *vd, u32 engine,
			    struct vnicd_doorbells *db)
{
	struct vnicd_set_doorbells req = { .engine = cpu_to_le32(engine) };
	phys_addr_t pa = virt_to_phys(db);
	unsigned int i;

	req.npages = cpu_to_le32(ARRAY_SIZE(req.pa));
	for (i = 0; i < ARRAY_SIZE(req.pa); i++)
		req.pa[i] = cpu_to_le64(pa + i * SZ_4K);
	return vnicd_exec(vd, VNICD_CMD_SET_DOORBELLS, &req, sizeof(req), NULL, 0);
}

int vnicd_cmd_set_ah_table(struct vnicd_dev *vd, struct vnicd_ah *table,
			   u32 entries, size_t size)
{
	u32 i, npages = DIV_ROUND_UP(size, SZ_4K);
	struct vnicd_set_ah_table req = {
		.num_entries = cpu_to_le32(entries),
		.npages = cpu_to_le32(npages),
	};
	phys_addr_t pa = virt_to_phys(table);
	__le64 *pas;

	pas = kmalloc_array(npages, sizeof(*pas), GFP_KERNEL);
	if (!pas)
		return -ENOMEM;
	for (i = 0; i < npages; i++)
		pas[i] = cpu_to_le64(pa + (u64)i * SZ_4K);
	return vnicd_cmdq_exec(&vd->cmdq, VNICD_CMD_SET_AH_TABLE, &req, sizeof(req),
			       pas, npages * sizeof(*pas), NULL, 0, 0);
}

int vnicd_cmd_create_pd(struct vnicd_dev *vd, u32 *pdn)
{
	struct vnicd_handle resp;
	int err;

	err = vnicd_exec(vd, VNICD_CMD_CREATE_PD, NULL, 0, &resp, sizeof(resp));
	if (!err)
		*pdn = le32_to_cpu(resp.handle);
	return err;
}

int vnicd_cmd_create_cq(struct vnicd_dev *vd, struct vnicd_ring_mem *ring,
			__le32 *arm, u32 ceq, u32 *cqn)
{
	struct vnicd_create_cq req = {
		.arm_pa = cpu_to_le64(virt_to_phys(arm)),
		.ceq = cpu_to_le32(ceq),
	};
	struct vnicd_handle resp;
	int err;

	vnicd_ring_describe(ring, &req.ring);
	err = vnicd_exec_rings(vd, VNICD_CMD_CREATE_CQ, &req, sizeof(req), ring, NULL,
			       &resp, sizeof(resp));
	if (!err)
		*cqn = le32_to_cpu(resp.handle);
	return err;
}

int vnicd_cmd_resize_cq(struct vnicd_dev *vd, u32 cqn, struct vnicd_ring_mem *ring)
{
	struct vnicd_resize_cq req = { .cqn = cpu_to_le32(cqn) };

	vnicd_ring_describe(ring, &req.ring);
	return vnicd_exec_rings(vd, VNICD_CMD_RESIZE_CQ, &req, sizeof(req), ring, NULL,
				NULL, 0);
}

/* period: microseconds */
int vnicd_cmd_modify_cq(struct vnicd_dev *vd, u32 cqn, u16 count, u16 period)
{
	struct vnicd_modify_cq req = {
		.cqn = cpu_to_le32(cqn),
		.count = cpu_to_le16(count),
		.period = cpu_to_le16(period),
	};

	return vnicd_exec(vd, VNICD_CMD_MODIFY_CQ, &req, sizeof(req), NULL, 0);
}

int vnicd_cmd_create_srq(struct vnicd_dev *vd, u32 pdn, u32 max_sge, u32 limit,
			 struct vnicd_ring_mem *ring, u32 *srqn)
{
	struct vnicd_create_srq req = {
		.pdn = cpu_to_le32(pdn),
		.max_sge = cpu_to_le32(max_sge),
		.limit = cpu_to_le32(limit),
	};
	struct vnicd_handle resp;
	int err;

	vnicd_ring_describe(ring, &req.ring);
	err = vnicd_exec_rings(vd, VNICD_CMD_CREATE_SRQ, &req, sizeof(req), ring, NULL,
			       &resp, sizeof(resp));
	if (!err)
		*srqn = le32_to_cpu(resp.handle);
	return err;
}

int vnicd_cmd_modify_srq(struct vnicd_dev *vd, u32 srqn, u32 flags, u32 limit,
			 struct vnicd_ring_mem *ring)
{
	struct vnicd_modify_srq req = {
		.srqn = cpu_to_le32(srqn),
		.flags = cpu_to_le32(flags),
		.limit = cpu_to_le32(limit),
	};

	if (ring)
		vnicd_ring_describe(ring, &req.ring);
	return vnicd_exec_rings(vd, VNICD_CMD_MODIFY_SRQ, &req, sizeof(req), ring, NULL,
				NULL, 0);
}

int vnicd_cmd_query_srq(struct vnicd_dev *vd, u32 srqn, u32 *limit)
{
	struct vnicd_srq_attr resp;
	int err;

	err = vnicd_exec_handle(vd, VNICD_CMD_QUERY_SRQ, srqn, &resp, sizeof(resp));
	if (!err)
		*limit = le32_to_cpu(resp.limit);
	return err;
}

/* A QP with unusable numbers is destroyed again here. */
int vnicd_cmd_create_qp(struct vnicd_dev *vd, struct vnicd_create_qp *cmd,
			struct vnicd_ring_mem *sq, struct vnicd_ring_mem *rq,
			struct vnicd_create_qp_resp *resp)
{
	u32 qpn, engine, slot;
	int err;

	vnicd_ring_describe(sq, &cmd->sq);
	if (rq)
		vnicd_ring_describe(rq, &cmd->rq);
	err = vnicd_exec_rings(vd, VNICD_CMD_CREATE_QP, cmd, sizeof(*cmd), sq, rq,
			       resp, sizeof(*resp));
	if (err)
		return err;

	qpn = le32_to_cpu(resp->qpn);
	engine = le32_to_cpu(resp->engine);
	slot = le32_to_cpu(resp->db_slot);
	/* Only the GSI is QP1. */
	if (!qpn || qpn >> 24 || (qpn == VNICD_GSI_QPN) != (le32_to_cpu(cmd->type) == VNICD_QPT_GSI))
		err = vnicd_bad_answer(vd, "QP number", qpn);
	else if (engine >= vd->num_engines)
		err = vnicd_bad_answer(vd, "engine", engine);
	else if (slot >= VNICD_DB_SLOTS)
		err = vnicd_bad_answer(vd, "doorbell slot", slot);
	if (err) {
		/* The device still uses its rings. */
		vnicd_cmd_destroy(vd, VNICD_CMD_DESTROY_QP, qpn);
		vnicd_fail(vd, "it returned an invalid QP");
	}
	return err;
}

int vnicd_cmd_modify_qp(struct vnicd_dev *vd, const struct vnicd_qp_attr *attr)
{
	return vnicd_exec(vd, VNICD_CMD_MODIFY_QP, attr, sizeof(*attr), NULL, 0);
}

int vnicd_cmd_query_qp(struct vnicd_dev *vd, u32 qpn, struct vnicd_qp_attr *attr)
{
	int err;

	err = vnicd_exec_handle(vd, VNICD_CMD_QUERY_QP, qpn, attr, sizeof(*attr));
	if (err)
		return err;
	if (attr->qp_state > IB_QPS_ERR)
		return vnicd_bad_answer(vd, "QP state", attr->qp_state);
	return 0;
}

int vnicd_cmd_create_mr(struct vnicd_dev *vd, const struct vnicd_create_mr *cmd,
			struct vnicd_create_mr_resp *resp)
{
	return vnicd_exec(vd, VNICD_CMD_CREATE_MR, cmd, sizeof(*cmd),
			  resp, sizeof(*resp));
}

/* Takes over @pas, its @count addresses: see vnicd_cmdq_exec(). */
int vnicd_cmd_set_mtt(struct vnicd_dev *vd, __le64 *pas, u32 handle, u64 first, u32 count)
{
	struct vnicd_set_mtt req = {
		.handle = cpu_to_le32(handle),
		.count = cpu_to_le16(count),
		.first = cpu_to_le64(first),
	};

	return vnicd_cmdq_exec(&vd->cmdq, VNICD_CMD_SET_MTT, &req, sizeof(req),
			       pas, count * sizeof(*pas), NULL, 0, 0);
}

/*
 * The same for a short list that follows @buf and is copied: allocates nothing. With
 * VNICD_SET_MTT_RESUME a token follows the list. -ENOBUFS: no slot is free.
 */
int vnicd_cmd_set_mtt_short(struct vnicd_dev *vd, struct vnicd_set_mtt *buf, u32 handle,
			    u64 first, u32 count, u16 flags)
{
	size_t words = count + (flags & VNICD_SET_MTT_RESUME ? 1 : 0);

	buf->handle = cpu_to_le32(handle);
	buf->count = cpu_to_le16(count);
	buf->flags = cpu_to_le16(flags);
	buf->first = cpu_to_le64(first);
	return vnicd_cmdq_exec(&vd->cmdq, VNICD_CMD_SET_MTT, buf,
			       sizeof(*buf) + words * sizeof(__le64), NULL, 0, NULL, 0,
			       VNICD_EXEC_NO_SLOT_WAIT);
}

void vnicd_cmd_clear_mtt(struct vnicd_dev *vd, u32 handle, u64 first, u64 count)
{
	struct vnicd_clear_mtt req = {
		.handle = cpu_to_le32(handle),
		.first = cpu_to_le64(first),
		.count = cpu_to_le64(count),
	};
	int err = vnicd_cmdq_exec(&vd->cmdq, VNICD_CMD_CLEAR_MTT, &req, sizeof(req),
				  NULL, 0, NULL, 0, VNICD_EXEC_RESERVED | VNICD_EXEC_RELEASE);

	/* A device that has lost its state knows neither region nor pages. */
	if (err && err != -ENOENT)
		vnicd_fence(vd, "it did not revoke pages");
}

/* -ENOENT: the fault is no longer outstanding. */
int vnicd_cmd_resume_fault(struct vnicd_dev *vd, u32 token, u32 status, unsigned int exec)
{
	struct vnicd_resume_fault req = {
		.token = cpu_to_le32(token),
		.status = cpu_to_le32(status),
	};

	return vnicd_cmdq_exec(&vd->cmdq, VNICD_CMD_RESUME_FAULT, &req, sizeof(req),
			       NULL, 0, NULL, 0, VNICD_EXEC_MAY_MISS | exec);
}

int vnicd_cmd_mcast(struct vnicd_dev *vd, bool attach, u32 qpn,
		    const union ib_gid *gid)
{
	struct vnicd_mcast req = { .qpn = cpu_to_le32(qpn) };

	memcpy(req.gid, gid->raw, sizeof(req.gid));
	return vnicd_exec(vd, attach ? VNICD_CMD_ATTACH_MCAST : VNICD_CMD_DETACH_MCAST,
			  &req, sizeof(req), NULL, 0);
}

int vnicd_cmd_create_mw(struct vnicd_dev *vd, u32 pdn, u32 type, u32 *handle)
{
	struct vnicd_create_mw req = {
		.pdn = cpu_to_le32(pdn),
		.type = cpu_to_le32(type),
	};
	struct vnicd_handle resp;
	int err;

	err = vnicd_exec(vd, VNICD_CMD_CREATE_MW, &req, sizeof(req), &resp, sizeof(resp));
	if (!err)
		*handle = le32_to_cpu(resp.handle);
	return err;
}

static bool vnicd_released(struct vnicd_dev *vd, u16 opcode, u32 handle, int err)
{
	/* An object that the device does not know uses no memory. */
	if (!err || err == -ENOENT)
		return true;
	if (!vnicd_dead(vd))
		dev_err(&vd->vdev->dev,
			"destroy command %u for object %u failed (%d); its memory is kept until the next reset\n",
			opcode, handle, err);
	return false;
}

bool vnicd_cmd_destroy(struct vnicd_dev *vd, u16 opcode, u32 handle)
{
	int err = vnicd_exec_handle(vd, opcode, handle, NULL, 0);

	return vnicd_released(vd, opcode, handle, err);
}

int vnicd_cmd_destroy_mr(struct vnicd_dev *vd, u32 handle, bool *released)
{
	int err = vnicd_exec_handle(vd, VNICD_CMD_DESTROY_MR, handle, NULL, 0);

	if (err == -EBUSY)
		return err;
	*released = vnicd_released(vd, VNICD_CMD_DESTROY_MR, handle, err);
	return 0;
}
