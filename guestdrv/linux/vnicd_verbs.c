// SPDX-License-Identifier: GPL-2.0
/* The device, its port, GIDs, contexts, protection domains, counters. */
#include <linux/etherdevice.h>
#include <rdma/ib_addr.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_mad.h>

#include "vnicd.h"

/* No provider, rxe's included, passes driver data here. */
int vnicd_udata_empty(struct ib_udata *udata)
{
	if (udata && udata->inlen && !ib_is_udata_cleared(udata, 0, udata->inlen))
		return -EINVAL;
	return 0;
}

/* "1.2.3" in the form that libibverbs prints; 0 for anything else. */
static u64 vnicd_fw_number(const char *version)
{
	unsigned int major, minor = 0, patch = 0;

	if (*version == 'v')
		version++;
	if (sscanf(version, "%u.%u.%u", &major, &minor, &patch) < 1)
		return 0;
	return (u64)(major & 0xffff) << 32 | (minor & 0xffff) << 16 | (patch & 0xffff);
}

static int vnicd_query_device(struct ib_device *ibdev, struct ib_device_attr *attr,
			      struct ib_udata *udata)
{
	struct vnicd_dev *vd = to_vd(ibdev);
	const struct vnicd_limits *lim = &vd->lim;
	int err = vnicd_udata_empty(udata);

	if (err)
		return err;

	memset(attr, 0, sizeof(*attr));
	attr->sys_image_guid = lim->node_guid;
	attr->max_mr_size = lim->max_mr_size;
	attr->page_size_cap = GENMASK(30, 12);
	attr->fw_ver = vnicd_fw_number(vd->fw_version);
	attr->vendor_id = vd->vdev->id.vendor & 0xffffff;
	attr->vendor_part_id = vd->vdev->id.device;
	attr->device_cap_flags = IB_DEVICE_RC_RNR_NAK_GEN | IB_DEVICE_PORT_ACTIVE_EVENT |
				 IB_DEVICE_SYS_IMAGE_GUID;
	if (lim->caps & VNICD_CAP_SRQ)
		attr->device_cap_flags |= IB_DEVICE_SRQ_RESIZE;
	attr->kernel_cap_flags = IBK_LOCAL_DMA_LKEY;
	if (lim->max_fast_reg) {
		attr->device_cap_flags |= IB_DEVICE_MEM_MGT_EXTENSIONS;
		attr->max_fast_reg_page_list_len = lim->max_fast_reg;
	}
	if (lim->caps & VNICD_CAP_MW) {
		attr->device_cap_flags |= IB_DEVICE_MEM_WINDOW | IB_DEVICE_MEM_WINDOW_TYPE_2B;
		attr->max_mw = lim->max_mw;
	}
#ifdef VNICD_HAVE_ATOMIC_WRITE
	if (lim->caps & VNICD_CAP_ATOMIC_WRITE)
		attr->device_cap_flags |= IB_DEVICE_ATOMIC_WRITE;
#endif
#ifdef VNICD_HAVE_FLUSH
	/* No persistence: the guest's memory is volatile on the host. */
	if (lim->caps & VNICD_CAP_FLUSH_GLOBAL)
		attr->device_cap_flags |= IB_DEVICE_FLUSH_GLOBAL;
#endif
	attr->max_qp = lim->max_qp;
	attr->max_qp_wr = lim->max_qp_wr;
	attr->max_send_sge = lim->max_sge;
	attr->max_recv_sge = lim->max_sge;
	attr->max_sge_rd = lim->max_sge;
	attr->max_cq = lim->max_cq;
	attr->max_cqe = lim->max_cqe;
	attr->max_mr = lim->max_mr;
	attr->max_pd = lim->max_pd;
	attr->max_ah = vd->ah_entries - 1;	/* entry 0 is never used */
	attr->max_qp_rd_atom = lim->max_qp_rd_atom;
	attr->max_res_rd_atom = min_t(u64, (u64)lim->max_qp * lim->max_qp_rd_atom, INT_MAX);
	attr->max_qp_init_rd_atom = lim->max_qp_init_rd_atom;
	attr->atomic_cap = lim->caps & VNICD_CAP_ATOMIC ? IB_ATOMIC_HCA : IB_ATOMIC_NONE;
	if (lim->caps & VNICD_CAP_SRQ) {
		attr->max_srq = lim->max_srq;
		attr->max_srq_wr = lim->max_srq_wr;
		attr->max_srq_sge = lim->max_srq_sge;
	}
	if (lim->caps & VNICD_CAP_MCAST) {
		attr->max_mcast_grp = lim->max_mcast_grp;
		attr->max_mcast_qp_attach = lim->max_mcast_qp_attach;
		attr->max_total_mcast_qp_attach =
			min_t(u64, (u64)lim->max_mcast_grp * lim->max_mcast_qp_attach, INT_MAX);
	}
	if (vnicd_odp_supported(vd)) {
		attr->kernel_cap_flags |= IBK_ON_DEMAND_PAGING;
		attr->odp_caps.general_caps = IB_ODP_SUPPORT | IB_ODP_SUPPORT_IMPLICIT;
		attr->odp_caps.per_transport_caps.rc_odp_caps = lim->odp_rc;
		attr->odp_caps.per_transport_caps.uc_odp_caps = lim->odp_uc;
		attr->odp_caps.per_transport_caps.ud_odp_caps = lim->odp_ud;
	}
	attr->max_pkeys = 1;
	attr->local_ca_ack_delay = 15;
	return 0;
}

static void vnicd_get_dev_fw_str(struct ib_device *ibdev, char *str)
{
	strscpy(str, to_vd(ibdev)->fw_version, IB_FW_VERSION_NAME_MAX);
}

static enum rdma_link_layer vnicd_get_link_layer(struct ib_device *ibdev, u32 port)
{
	return IB_LINK_LAYER_ETHERNET;
}

static int vnicd_get_port_immutable(struct ib_device *ibdev, u32 port,
				    struct ib_port_immutable *im)
{
	struct vnicd_dev *vd = to_vd(ibdev);

	if (port != VNICD_PORT)
		return -EINVAL;
	im->core_cap_flags = RDMA_CORE_PORT_IBA_ROCE_UDP_ENCAP;
	if (vd->lim.caps & VNICD_CAP_ROCE_V1)
		im->core_cap_flags |= RDMA_CORE_PORT_IBA_ROCE;
	im->pkey_tbl_len = 1;
	im->gid_tbl_len = vd->lim.max_gid;
	im->max_mad_size = IB_MGMT_MAD_SIZE;
	return 0;
}

static int vnicd_query_pkey(struct ib_device *ibdev, u32 port, u16 index, u16 *pkey)
{
	if (index)
		return -EINVAL;
	*pkey = VNICD_PKEY;
	return 0;
}

static int vnicd_add_gid(const struct ib_gid_attr *attr, void **context)
{
	struct vnicd_dev *vd = to_vd(attr->device);
	u8 smac[ETH_ALEN] = {};
	u16 vlan = 0xffff;
	u8 type;
	int err;

	switch (attr->gid_type) {
	case IB_GID_TYPE_ROCE:
		type = VNICD_GID_ROCE_V1;
		break;
	case IB_GID_TYPE_ROCE_UDP_ENCAP:
		type = VNICD_GID_ROCE_V2;
		break;
	default:
		return -EOPNOTSUPP;
	}
	err = rdma_read_gid_l2_fields(attr, &vlan, smac);
	if (err)
		return err;
	return vnicd_cmd_set_gid(vd, attr->index, type, vlan, smac, &attr->gid);
}

static int vnicd_del_gid(const struct ib_gid_attr *attr, void **context)
{
	struct vnicd_dev *vd = to_vd(attr->device);
	int err = vnicd_cmd_clear_gid(vd, attr->index);

	/* A dead device has none. */
	return vnicd_dead(vd) ? 0 : err;
}

/* The VLAN of an address vector's source GID; its MAC is the device's. */
int vnicd_gid_l2(const struct rdma_ah_attr *attr, u16 *vlan)
{
	const struct ib_gid_attr *sgid = attr->grh.sgid_attr;

	*vlan = 0xffff;
	/* RoCE has no packets without a global address (IBTA A17.4.5.1). */
	if (attr->type != RDMA_AH_ATTR_TYPE_ROCE || !sgid ||
	    !(rdma_ah_get_ah_flags(attr) & IB_AH_GRH))
		return -EINVAL;
	return rdma_read_gid_l2_fields(sgid, vlan, NULL);
}

/* Everything except the VLAN. */
void vnicd_fill_av(struct vnicd_av *av, const struct rdma_ah_attr *attr)
{
	const struct ib_global_route *grh = rdma_ah_read_grh(attr);

	memset(av, 0, sizeof(*av));
	memcpy(av->dgid, grh->dgid.raw, sizeof(av->dgid));
	memcpy(av->dmac, attr->roce.dmac, sizeof(av->dmac));
	av->sgid_index = cpu_to_le16(grh->sgid_index);
	av->traffic_class = grh->traffic_class;
	av->hop_limit = grh->hop_limit;
	av->flow_label = cpu_to_le32(grh->flow_label & 0xfffff);
	av->sl = rdma_ah_get_sl(attr);
}

static int vnicd_alloc_ucontext(struct ib_ucontext *ctx, struct ib_udata *udata)
{
	return vnicd_udata_empty(udata);
}

static void vnicd_dealloc_ucontext(struct ib_ucontext *ctx)
{
}

/*
 * Its presence lets ib_core revoke a process's objects while the process still
 * runs. There is nothing to do: what remains mapped is ordinary memory.
 */
static void vnicd_disassociate_ucontext(struct ib_ucontext *ctx)
{
}

static int vnicd_alloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	return vnicd_cmd_create_pd(to_vd(ibpd->device), &to_vpd(ibpd)->pdn);
}

static int vnicd_dealloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	/* It holds no memory, and ib_core guarantees that it is unused. */
	vnicd_cmd_destroy(to_vd(ibpd->device), VNICD_CMD_DESTROY_PD, to_vpd(ibpd)->pdn);
	return 0;
}

static int vnicd_mcast(struct ib_qp *ibqp, union ib_gid *gid, bool attach)
{
	struct vnicd_dev *vd = to_vd(ibqp->device);

	if (!(vd->lim.caps & VNICD_CAP_MCAST))
		return -EOPNOTSUPP;
	return vnicd_cmd_mcast(vd, attach, to_vqp(ibqp)->qpn, gid);
}

static int vnicd_attach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	return vnicd_mcast(ibqp, gid, true);
}

static int vnicd_detach_mcast(struct ib_qp *ibqp, union ib_gid *gid, u16 lid)
{
	int err = vnicd_mcast(ibqp, gid, false);

	/* Must succeed: nothing is attached to a dead device. */
	return vnicd_dead(to_vd(ibqp->device)) ? 0 : err;
}

/*
 * ib_core releases the device: at our request, or because rdma_rxe was
 * unloaded, which unregisters every device with its driver id. In that case the
 * virtio device stays bound and idle until it is probed again.
 */
static void vnicd_dealloc_driver(struct ib_device *ibdev)
{
	struct vnicd_dev *vd = to_vd(ibdev);

	if (!READ_ONCE(vd->removing) && !vnicd_dead(vd))
		dev_warn(&vd->vdev->dev,
			 "RDMA device %s was unregistered from outside, probably by unloading rdma_rxe (we share its driver id); unbind and bind %s to get it back\n",
			 dev_name(&ibdev->dev), dev_name(&vd->vdev->dev));
}

static const struct ib_device_ops vnicd_dev_ops = {
	.owner = THIS_MODULE,
	.driver_id = RDMA_DRIVER_RXE,
	.uverbs_abi_ver = VNICD_UVERBS_ABI,

	.add_gid = vnicd_add_gid,
	.alloc_hw_port_stats = vnicd_alloc_hw_port_stats,
	.alloc_pd = vnicd_alloc_pd,
	.alloc_ucontext = vnicd_alloc_ucontext,
	.attach_mcast = vnicd_attach_mcast,
	.create_ah = vnicd_create_ah,
	.create_cq = vnicd_create_cq,
	.create_qp = vnicd_create_qp,
	.create_user_ah = vnicd_create_ah,
	.dealloc_driver = vnicd_dealloc_driver,
	.dealloc_pd = vnicd_dealloc_pd,
	.dealloc_ucontext = vnicd_dealloc_ucontext,
	.del_gid = vnicd_del_gid,
	.dereg_mr = vnicd_dereg_mr,
	.destroy_ah = vnicd_destroy_ah,
	.destroy_cq = vnicd_destroy_cq,
	.destroy_qp = vnicd_destroy_qp,
	.detach_mcast = vnicd_detach_mcast,
	.disassociate_ucontext = vnicd_disassociate_ucontext,
	.fill_res_cq_entry = vnicd_fill_res_cq_entry,
	.fill_res_mr_entry = vnicd_fill_res_mr_entry,
	.fill_res_qp_entry = vnicd_fill_res_qp_entry,
	.get_dev_fw_str = vnicd_get_dev_fw_str,
	.get_dma_mr = vnicd_get_dma_mr,
	.get_hw_stats = vnicd_get_hw_stats,
	.get_link_layer = vnicd_get_link_layer,
	.get_netdev = vnicd_get_netdev,
	.get_port_immutable = vnicd_get_port_immutable,
	.mmap = vnicd_mmap,
	.mmap_free = vnicd_mmap_free,
	.modify_qp = vnicd_modify_qp,
	.poll_cq = vnicd_poll_cq,
	.post_recv = vnicd_post_recv,
	.post_send = vnicd_post_send,
	.query_ah = vnicd_query_ah,
	.query_device = vnicd_query_device,
	.query_pkey = vnicd_query_pkey,
	.query_port = vnicd_query_port,
	.query_qp = vnicd_query_qp,
	.reg_user_mr = vnicd_reg_user_mr,
	.req_notify_cq = vnicd_req_notify_cq,

	INIT_RDMA_OBJ_SIZE(ib_ah, vnicd_ah_obj, base),
	INIT_RDMA_OBJ_SIZE(ib_cq, vnicd_cq, base),
	INIT_RDMA_OBJ_SIZE(ib_pd, vnicd_pd, base),
	INIT_RDMA_OBJ_SIZE(ib_qp, vnicd_qp, base),
	INIT_RDMA_OBJ_SIZE(ib_ucontext, vnicd_ucontext, base),
};

static const struct ib_device_ops vnicd_srq_ops = {
	.create_srq = vnicd_create_srq,
	.destroy_srq = vnicd_destroy_srq,
	.modify_srq = vnicd_modify_srq,
	.post_srq_recv = vnicd_post_srq_recv,
	.query_srq = vnicd_query_srq,

	INIT_RDMA_OBJ_SIZE(ib_srq, vnicd_srq, base),
};

static const struct ib_device_ops vnicd_moderation_ops = {
	.modify_cq = vnicd_modify_cq,
};

static const struct ib_device_ops vnicd_odp_ops = {
	.advise_mr = vnicd_advise_mr,
	.fill_stat_mr_entry = vnicd_fill_stat_mr_entry,
};

static const struct ib_device_ops vnicd_fast_reg_ops = {
	.alloc_mr = vnicd_alloc_mr,
	.map_mr_sg = vnicd_map_mr_sg,
};

static const struct ib_device_ops vnicd_mw_ops = {
	.alloc_mw = vnicd_alloc_mw,
	.dealloc_mw = vnicd_dealloc_mw,

	INIT_RDMA_OBJ_SIZE(ib_mw, vnicd_mw, base),
};

static const struct ib_device_ops vnicd_resize_ops = {
#ifdef VNICD_HAVE_RESIZE_USER_CQ
	.resize_user_cq = vnicd_resize_cq,
#else
	.resize_cq = vnicd_resize_cq,
#endif
};

/* vd->ib is allocated, and we hold a reference to it. */
int vnicd_ib_register(struct vnicd_dev *vd)
{
	struct ib_device *ibdev = &vd->ib->base;
	int err;

	strscpy(ibdev->node_desc, "vnicd paravirtual HCA", sizeof(ibdev->node_desc));
	ibdev->node_type = RDMA_NODE_IB_CA;
	ibdev->phys_port_cnt = 1;
	ibdev->num_comp_vectors = vd->num_ceqs;
	ibdev->local_dma_lkey = VNICD_DMA_LKEY;
	ibdev->node_guid = vd->lim.node_guid;
	/* The virtio, not the PCI device: otherwise udev would rename it. */
	ibdev->dev.parent = &vd->vdev->dev;
	/* These two are off by default; rxe's provider uses both. */
	ibdev->uverbs_cmd_mask |= BIT_ULL(IB_USER_VERBS_CMD_POST_SEND) |
				  BIT_ULL(IB_USER_VERBS_CMD_REQ_NOTIFY_CQ);

	ib_set_device_ops(ibdev, &vnicd_dev_ops);
	if (vd->lim.caps & VNICD_CAP_SRQ)
		ib_set_device_ops(ibdev, &vnicd_srq_ops);
	if (vd->lim.caps & VNICD_CAP_RESIZE_CQ)
		ib_set_device_ops(ibdev, &vnicd_resize_ops);
	if (vnicd_odp_supported(vd))
		ib_set_device_ops(ibdev, &vnicd_odp_ops);
	if (vd->lim.max_fast_reg)
		ib_set_device_ops(ibdev, &vnicd_fast_reg_ops);
	if (vd->lim.caps & VNICD_CAP_MW)
		ib_set_device_ops(ibdev, &vnicd_mw_ops);
	if (vd->lim.caps & VNICD_CAP_MODIFY_CQ)
		ib_set_device_ops(ibdev, &vnicd_moderation_ops);
	if (vd->lim.caps & VNICD_CAP_COUNT_QP)
		ib_set_device_ops(ibdev, &vnicd_counter_ops);

	/* vnicd_fail() must not unregister a half registered device. */
	mutex_lock(&vd->reg_lock);
	/* No DMA device: segments carry kernel addresses, see vnicd_verbs_post.c. */
	err = ib_register_device(ibdev, vd->name, NULL);
	if (err == -ENFILE) {
		dev_notice(&vd->vdev->dev, "the name %s is taken, using another\n",
			   vd->name);
		err = ib_register_device(ibdev, "vnic%d", NULL);
	}
	vd->ib_registered = !err;
	mutex_unlock(&vd->reg_lock);
	if (err) {
		dev_err(&vd->vdev->dev, "cannot register the RDMA device: %d\n", err);
		return err;
	}
	dev_info(&vd->vdev->dev, "RDMA device %s, firmware %s\n",
		 dev_name(&ibdev->dev), vd->fw_version);
	/* ib_core has missed earlier netdev events. */
	vnicd_port_update(vd);
	return 0;
}

/*
 * Returns when the device is no longer in use. Harmless if it is unregistered
 * already: our reference keeps the structure.
 */
void vnicd_ib_unregister(struct vnicd_dev *vd)
{
	mutex_lock(&vd->reg_lock);
	/* While their queue pairs still exist. */
	if (vd->ib_registered && vnicd_dead(vd))
		vnicd_flush_processes(vd);
	if (vd->ib_registered)
		ib_unregister_device(&vd->ib->base);
	vd->ib_registered = false;
	mutex_unlock(&vd->reg_lock);
}
