// SPDX-License-Identifier: GPL-2.0
/*
 * Address handles: entries of a table in memory that the device reads. They
 * need no command, so they can be made in atomic context.
 */
#include <linux/bitmap.h>
#include <linux/io.h>
#include <linux/slab.h>
#include <rdma/ib_addr.h>

#include "vnicd.h"

int vnicd_ah_table_init(struct vnicd_dev *vd)
{
	u32 entries = vd->lim.max_ah;

	/* A smaller table is better than none. */
	for (;; entries /= 2) {
		vd->ah_table_size = PAGE_ALIGN(entries * sizeof(struct vnicd_ah));
		vd->ah_table = alloc_pages_exact(vd->ah_table_size,
						 GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN);
		if (vd->ah_table || vd->ah_table_size <= PAGE_SIZE)
			break;
	}
	if (!vd->ah_table)
		return -ENOMEM;
	vd->ah_entries = entries;
	vd->ah_used = bitmap_zalloc(entries, GFP_KERNEL);
	if (!vd->ah_used) {
		vnicd_ah_table_free(vd);
		return -ENOMEM;
	}
	set_bit(0, vd->ah_used);	/* never valid */
	vd->ah_next = 1;
	return 0;
}

/* Only after the device was reset, or before it knew the table. */
void vnicd_ah_table_free(struct vnicd_dev *vd)
{
	if (vd->ah_table)
		free_pages_exact(vd->ah_table, vd->ah_table_size);
	bitmap_free(vd->ah_used);
	vd->ah_table = NULL;
	vd->ah_used = NULL;
}

/* 0: none left. Numbers rotate, so that a stale one is detected. */
static u32 vnicd_ah_alloc(struct vnicd_dev *vd)
{
	unsigned long flags, i;

	spin_lock_irqsave(&vd->ah_lock, flags);
	i = find_next_zero_bit(vd->ah_used, vd->ah_entries, vd->ah_next);
	if (i >= vd->ah_entries)
		i = find_next_zero_bit(vd->ah_used, vd->ah_entries, 1);
	if (i < vd->ah_entries) {
		__set_bit(i, vd->ah_used);
		vd->ah_next = i + 1 < vd->ah_entries ? i + 1 : 1;
	} else {
		i = 0;
	}
	spin_unlock_irqrestore(&vd->ah_lock, flags);
	return i;
}

static void vnicd_ah_free(struct vnicd_dev *vd, u32 i)
{
	unsigned long flags;

	spin_lock_irqsave(&vd->ah_lock, flags);
	__clear_bit(i, vd->ah_used);
	spin_unlock_irqrestore(&vd->ah_lock, flags);
}

/* The device may read it at any time: "valid" is written last. */
static void vnicd_ah_publish(struct vnicd_ah *e, u32 pdn, const struct rdma_ah_attr *attr,
			     u16 vlan)
{
	struct vnicd_av av;

	vnicd_fill_av(&av, attr);
	e->pdn = cpu_to_le32(pdn);
	memcpy(e->dgid, av.dgid, sizeof(e->dgid));
	memcpy(e->dmac, av.dmac, sizeof(e->dmac));
	e->sgid_index = av.sgid_index;
	e->vlan_id = cpu_to_le16(vlan);
	e->traffic_class = av.traffic_class;
	e->hop_limit = av.hop_limit;
	e->flow_label = av.flow_label;
	e->sl = av.sl;
	/* Entry first, then the word that makes it valid. */
	virt_wmb();
	WRITE_ONCE(e->valid, cpu_to_le32(1));
}

static void vnicd_ah_revoke(struct vnicd_ah *e)
{
	WRITE_ONCE(e->valid, 0);
	/* Invalid first, before the entry is reused. */
	virt_wmb();
}

int vnicd_create_ah(struct ib_ah *ibah, struct rdma_ah_init_attr *init,
		    struct ib_udata *udata)
{
	struct vnicd_dev *vd = to_vd(ibah->device);
	struct vnicd_ah_obj *ah = to_vah_obj(ibah);
	struct rxe_create_ah_resp resp = {};
	u16 vlan;
	u32 i;
	int err;

	/* Providers before 2021 put addresses into the WQE: not supported. */
	if (udata && udata->outlen < sizeof(resp))
		return -EINVAL;
	err = vnicd_gid_l2(init->ah_attr, &vlan);
	if (err)
		return err;

	i = vnicd_ah_alloc(vd);
	if (!i)
		return -ENOMEM;
	ah->index = i;
	ah->attr = *init->ah_attr;
	ah->attr.grh.sgid_attr = NULL;	/* ib_core holds that reference */
	vnicd_ah_publish(&vd->ah_table[i], to_vpd(ibah->pd)->pdn, init->ah_attr, vlan);

	if (udata) {
		resp.ah_num = i;
		err = ib_copy_to_udata(udata, &resp, sizeof(resp));
		if (err) {
			vnicd_destroy_ah(ibah, 0);
			return err;
		}
	}
	return 0;
}

int vnicd_query_ah(struct ib_ah *ibah, struct rdma_ah_attr *attr)
{
	*attr = to_vah_obj(ibah)->attr;
	return 0;
}

int vnicd_destroy_ah(struct ib_ah *ibah, u32 flags)
{
	struct vnicd_dev *vd = to_vd(ibah->device);
	u32 i = to_vah_obj(ibah)->index;

	vnicd_ah_revoke(&vd->ah_table[i]);
	vnicd_ah_free(vd, i);
	return 0;
}
