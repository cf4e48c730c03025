// SPDX-License-Identifier: GPL-2.0
/*
 * Memory regions. The driver writes stage one of the translation, key to page
 * to guest physical address (PF-1, PF-2); stage two is the host's.
 */
#include <linux/io.h>
#include <linux/log2.h>
#include <linux/slab.h>
#include <net/netlink.h>
#include <rdma/rdma_netlink.h>
#include <rdma/restrack.h>

#include "vnicd.h"

/* Addresses per command: 32 KiB, if that much memory can be allocated. */
#define VNICD_MTT_BATCH 4096

static int vnicd_mr_create(struct vnicd_mr *mr, struct vnicd_create_mr *cmd)
{
	struct vnicd_dev *vd = to_vd(mr->base.device);
	struct vnicd_create_mr_resp resp;
	int err;

	err = vnicd_cmd_create_mr(vd, cmd, &resp);
	if (err)
		return err;
	mr->handle = le32_to_cpu(resp.handle);
	mr->base.lkey = le32_to_cpu(resp.lkey);
	mr->base.rkey = le32_to_cpu(resp.rkey);
	return 0;
}

static void vnicd_mr_free(struct vnicd_mr *mr)
{
	ib_umem_release(mr->umem);
	free_page((unsigned long)mr->pages);
	kfree(mr);
}

static void vnicd_mr_unbury(struct vnicd_grave *grave)
{
	vnicd_mr_free(container_of(grave, struct vnicd_mr, grave));
}

/* Pages stay pinned until the device confirms that nothing uses them (EP-3). */
static int vnicd_mr_destroy(struct vnicd_mr *mr)
{
	struct vnicd_dev *vd = to_vd(mr->base.device);
	bool released;
	int err;

	err = vnicd_cmd_destroy_mr(vd, mr->handle, &released);
	if (err)
		return err;
	/* Of a fast registration the pages belong to the consumer, which frees them (TR-5). */
	if (!released && mr->pages) {
		vnicd_fence(vd, "it did not release a fast registration");
		released = true;
	}
	if (released)
		vnicd_mr_free(mr);
	else
		vnicd_bury(vd, &mr->grave, vnicd_mr_unbury);
	return 0;
}

/*
 * Only for local use. The core would pass on the key of a remotely accessible
 * one together with kernel addresses, which the device cannot resolve.
 */
struct ib_mr *vnicd_get_dma_mr(struct ib_pd *ibpd, int access)
{
	struct vnicd_dev *vd = to_vd(ibpd->device);
	struct vnicd_create_mr cmd = {};
	struct vnicd_mr *mr;
	int err;

	if (access & ~(IB_ACCESS_LOCAL_WRITE | IB_ACCESS_OPTIONAL))
		return ERR_PTR(-EOPNOTSUPP);

	mr = kzalloc(sizeof(*mr), GFP_KERNEL);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	mr->base.device = ibpd->device;
	mr->phys = true;

	cmd.pdn = cpu_to_le32(to_vpd(ibpd)->pdn);
	cmd.access = cpu_to_le32(access & IB_ACCESS_LOCAL_WRITE);
	cmd.flags = cpu_to_le32(VNICD_MR_PHYS);
	cmd.page_shift = PAGE_SHIFT;
	cmd.length = cpu_to_le64(min_t(u64, vd->lim.max_mr_size, BIT_ULL(52)));
	err = vnicd_mr_create(mr, &cmd);
	if (err) {
		kfree(mr);
		return ERR_PTR(err);
	}
	/* Posting must translate addresses to physical ones for this key. */
	err = xa_insert_irq(&vd->phys_keys, mr->base.lkey, mr, GFP_KERNEL);
	if (err) {
		vnicd_mr_destroy(mr);
		return ERR_PTR(err);
	}
	return &mr->base;
}

/*
 * The umem's DMA addresses are kernel addresses of the pages (no DMA device). Blocks
 * of these sizes have the same alignment there and in physical memory. Not every
 * architecture's linear map has the alignment of the largest blocks (RISC-V).
 */
static unsigned long vnicd_block_sizes(const struct ib_umem *umem)
{
	const struct page *page = sg_page(umem->sgt_append.sgt.sgl);
	unsigned long skew = (unsigned long)page_address(page) - page_to_phys(page);

	return GENMASK(skew ? min_t(unsigned long, 30, __ffs(skew)) : 30, PAGE_SHIFT);
}

/* The blocks of the linear map are physical blocks: see vnicd_block_sizes(). */
static int vnicd_mr_fill(struct vnicd_mr *mr, unsigned long pgsz)
{
	struct vnicd_dev *vd = to_vd(mr->base.device);
	size_t left = ib_umem_num_dma_blocks(mr->umem, pgsz);
	struct ib_block_iter biter;
	u32 batch = VNICD_MTT_BATCH;
	__le64 *pas = NULL;
	u64 first = 0;
	u32 count = 0;
	int err = 0;

	rdma_umem_for_each_dma_block(mr->umem, &biter, pgsz) {
		void *va = vnicd_dma_to_ptr(rdma_block_iter_dma_address(&biter));

		if (!pas) {
			batch = min_t(size_t, batch, left);
			pas = kmalloc_array(batch, sizeof(*pas), GFP_KERNEL | __GFP_NOWARN);
		}
		if (!pas) {
			batch = min_t(u32, batch, PAGE_SIZE / sizeof(*pas));
			pas = kmalloc_array(batch, sizeof(*pas), GFP_KERNEL);
		}
		if (!pas)
			return -ENOMEM;
		pas[count++] = cpu_to_le64(virt_to_phys(va));
		if (count < batch)
			continue;
		err = vnicd_cmd_set_mtt(vd, pas, mr->handle, first, count);
		pas = NULL;
		if (err)
			break;
		first += count;
		left -= count;
		count = 0;
		cond_resched();
	}
	if (pas)
		err = vnicd_cmd_set_mtt(vd, pas, mr->handle, first, count);
	return err;
}

/* Nothing is pinned or even read: takes the same time for any size (ODP-1). */
static struct ib_mr *vnicd_reg_on_demand(struct ib_pd *ibpd, u64 start, u64 length,
					 u64 iova, int access)
{
	struct vnicd_dev *vd = to_vd(ibpd->device);
	struct vnicd_create_mr cmd = {};
	struct vnicd_mr *mr;
	int err;

	if (!vnicd_odp_supported(vd))
		return ERR_PTR(-EOPNOTSUPP);
	mr = kzalloc(sizeof(*mr), GFP_KERNEL);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	mr->base.device = ibpd->device;

	mr->odp = vnicd_odp_alloc(vd, ibpd, start, length, iova,
				  ib_access_writable(access), &cmd);
	if (IS_ERR(mr->odp)) {
		err = PTR_ERR(mr->odp);
		goto err_free;
	}
	cmd.pdn = cpu_to_le32(to_vpd(ibpd)->pdn);
	cmd.access = cpu_to_le32(access & VNICD_MR_ACCESS);
	err = vnicd_mr_create(mr, &cmd);
	if (err) {
		vnicd_odp_put(mr->odp);
		goto err_free;
	}
	mr->odp->handle = mr->handle;
	mr->odp->lkey = mr->base.lkey;
	mr->odp->rkey = mr->base.rkey;
	err = vnicd_odp_publish(mr->odp);
	if (err) {
		vnicd_odp_destroy(mr->odp);	/* the key is not in use yet */
		goto err_free;
	}
	return &mr->base;

err_free:
	kfree(mr);
	return ERR_PTR(err);
}

#ifdef VNICD_HAVE_DMAH
struct ib_mr *vnicd_reg_user_mr(struct ib_pd *ibpd, u64 start, u64 length,
				u64 iova, int access, struct ib_dmah *dmah,
				struct ib_udata *udata)
#else
struct ib_mr *vnicd_reg_user_mr(struct ib_pd *ibpd, u64 start, u64 length,
				u64 iova, int access, struct ib_udata *udata)
#endif
{
	struct vnicd_dev *vd = to_vd(ibpd->device);
	struct vnicd_create_mr cmd = {};
	struct vnicd_mr *mr;
	unsigned long pgsz;
	int err;

#ifdef VNICD_HAVE_DMAH
	if (dmah)
		return ERR_PTR(-EOPNOTSUPP);
#endif
	/* Huge pages are only a promise, so the pages are checked anyway. */
	if (access & ~(VNICD_MR_ACCESS | IB_ACCESS_ON_DEMAND | IB_ACCESS_HUGETLB |
		       IB_ACCESS_OPTIONAL))
		return ERR_PTR(-EOPNOTSUPP);
	if (access & IB_ACCESS_ON_DEMAND)
		return vnicd_reg_on_demand(ibpd, start, length, iova, access);
	if (!length || length > vd->lim.max_mr_size)
		return ERR_PTR(-EINVAL);

	mr = kzalloc(sizeof(*mr), GFP_KERNEL);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	mr->base.device = ibpd->device;	/* the core sets it only afterwards */

	mr->umem = vnicd_umem_get(ibpd->device, start, length, access);
	if (IS_ERR(mr->umem)) {
		err = PTR_ERR(mr->umem);
		goto err_free;
	}
	pgsz = ib_umem_find_best_pgsz(mr->umem, vnicd_block_sizes(mr->umem), iova);
	if (!pgsz) {
		err = -EINVAL;
		goto err_umem;
	}

	cmd.pdn = cpu_to_le32(to_vpd(ibpd)->pdn);
	cmd.access = cpu_to_le32(access & VNICD_MR_ACCESS);
	cmd.page_shift = ilog2(pgsz);
	cmd.iova = cpu_to_le64(iova);
	cmd.length = cpu_to_le64(length);
	cmd.offset = cpu_to_le64(iova & (pgsz - 1));
	cmd.npages = cpu_to_le64(ib_umem_num_dma_blocks(mr->umem, pgsz));
	err = vnicd_mr_create(mr, &cmd);
	if (err)
		goto err_umem;

	err = vnicd_mr_fill(mr, pgsz);
	if (err) {
		vnicd_mr_destroy(mr);
		return ERR_PTR(err);
	}
	return &mr->base;

err_umem:
	/* A device that never answered does not use the pages. */
	ib_umem_release(mr->umem);
err_free:
	kfree(mr);
	return ERR_PTR(err);
}

int vnicd_dereg_mr(struct ib_mr *ibmr, struct ib_udata *udata)
{
	struct vnicd_mr *mr = to_vmr(ibmr);
	int err;

	if (mr->odp) {
		err = vnicd_odp_destroy(mr->odp);
		if (!err)
			kfree(mr);
		return err;
	}
	if (mr->phys)
		xa_erase_irq(&to_vd(ibmr->device)->phys_keys, ibmr->lkey);
	return vnicd_mr_destroy(mr);
}

/*
 * Fast registration: a region without meaning until a REG_MR work request gives
 * it the pages that vnicd_map_mr_sg() has listed. The device reads the list
 * when it executes the request.
 */
struct ib_mr *vnicd_alloc_mr(struct ib_pd *ibpd, enum ib_mr_type type, u32 max_num_sg)
{
	struct vnicd_dev *vd = to_vd(ibpd->device);
	struct vnicd_create_mr cmd = {
		.pdn = cpu_to_le32(to_vpd(ibpd)->pdn),
		.flags = cpu_to_le32(VNICD_MR_FAST),
		.page_shift = 12,
		.npages = cpu_to_le64(max_num_sg),
	};
	struct vnicd_mr *mr;
	int err;

	if (type != IB_MR_TYPE_MEM_REG)
		return ERR_PTR(-EOPNOTSUPP);
	if (!max_num_sg || max_num_sg > vd->lim.max_fast_reg)
		return ERR_PTR(-EINVAL);

	mr = kzalloc(sizeof(*mr), GFP_KERNEL);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	mr->base.device = ibpd->device;
	mr->max_pages = max_num_sg;
	mr->pages = (__le64 *)get_zeroed_page(GFP_KERNEL);
	err = mr->pages ? vnicd_mr_create(mr, &cmd) : -ENOMEM;
	if (err) {
		vnicd_mr_free(mr);
		return ERR_PTR(err);
	}
	return &mr->base;
}

/* Addresses are kernel addresses of the linear map (no DMA device). */
static int vnicd_set_page(struct ib_mr *ibmr, u64 addr)
{
	struct vnicd_mr *mr = to_vmr(ibmr);
	void *va = vnicd_dma_to_ptr(addr);

	if (mr->num_pages == mr->max_pages)
		return -ENOMEM;
	if (WARN_ON_ONCE(!virt_addr_valid(va)))
		return -EINVAL;
	mr->pages[mr->num_pages++] = cpu_to_le64(virt_to_phys(va));
	return 0;
}

int vnicd_map_mr_sg(struct ib_mr *ibmr, struct scatterlist *sg, int sg_nents,
		    unsigned int *sg_offset)
{
	to_vmr(ibmr)->num_pages = 0;
	return ib_sg_to_pages(ibmr, sg, sg_nents, sg_offset, vnicd_set_page);
}

int vnicd_alloc_mw(struct ib_mw *ibmw, struct ib_udata *udata)
{
	struct vnicd_mw *mw = to_vmw(ibmw);
	int err;

	err = vnicd_udata_empty(udata);
	if (err)
		return err;
	err = vnicd_cmd_create_mw(to_vd(ibmw->device), to_vpd(ibmw->pd)->pdn, ibmw->type,
				  &mw->handle);
	ibmw->rkey = mw->handle;
	return err;
}

int vnicd_dealloc_mw(struct ib_mw *ibmw)
{
	/* It holds no memory. */
	vnicd_cmd_destroy(to_vd(ibmw->device), VNICD_CMD_DESTROY_MW, to_vmw(ibmw)->handle);
	return 0;
}

/* ODP-8. With the flush flag synchronous, with errors; otherwise best effort. */
int vnicd_advise_mr(struct ib_pd *ibpd, enum ib_uverbs_advise_mr_advice advice,
		    u32 flags, struct ib_sge *sgl, u32 num_sge,
		    struct uverbs_attr_bundle *attrs)
{
	unsigned int how = VNICD_FETCH_PREFETCH;
	int err = 0;

	switch (advice) {
	case IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH:
		break;
	case IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE:
		how |= VNICD_FETCH_WRITE;
		break;
	case IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT:
		how |= VNICD_FETCH_PRESENT;
		break;
	default:
		return -EOPNOTSUPP;
	}
	if (flags & ~IB_UVERBS_ADVISE_MR_FLAG_FLUSH)
		return -EOPNOTSUPP;

	for (u32 i = 0; i < num_sge && !err; i++) {
		struct vnicd_odp *odp = vnicd_odp_get(to_vd(ibpd->device), sgl[i].lkey);

		if (!odp)
			return -ENOENT;
		if (odp->pd != ibpd)
			err = -EPERM;
		else if ((how & VNICD_FETCH_WRITE) && !odp->writable)
			err = -EPERM;
		else if (sgl[i].length && flags & IB_UVERBS_ADVISE_MR_FLAG_FLUSH)
			err = vnicd_odp_fetch(odp, sgl[i].addr, sgl[i].length, how, NULL);
		else if (sgl[i].length)
			vnicd_fault_prefetch(odp, sgl[i].addr, sgl[i].length, how);
		vnicd_odp_put(odp);
	}
	return err;
}

/* "rdma statistic show mr". */
int vnicd_fill_stat_mr_entry(struct sk_buff *msg, struct ib_mr *ibmr)
{
	struct vnicd_odp *odp = to_vmr(ibmr)->odp;
	struct nlattr *table;

	if (!odp)
		return 0;
	table = nla_nest_start(msg, RDMA_NLDEV_ATTR_STAT_HWCOUNTERS);
	if (!table)
		return -EMSGSIZE;
	if (rdma_nl_stat_hwcounter_entry(msg, "page_faults",
					 atomic64_read(&odp->page_faults)) ||
	    rdma_nl_stat_hwcounter_entry(msg, "page_invalidations",
					 atomic64_read(&odp->page_invalidations)) ||
	    rdma_nl_stat_hwcounter_entry(msg, "page_prefetch",
					 atomic64_read(&odp->page_prefetches))) {
		nla_nest_cancel(msg, table);
		return -EMSGSIZE;
	}
	nla_nest_end(msg, table);
	return 0;
}
