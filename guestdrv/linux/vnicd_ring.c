// SPDX-License-Identifier: GPL-2.0
/*
 * Memory of work rings: allocation, description to the device, mapping into
 * processes.
 *
 * A ring is ordinary memory with one reference per page. A process's mapping
 * holds its own references (vm_insert_page). A process that destroys a QP and
 * unmaps the ring later, as rdma-core does, or never, keeps only those pages
 * alive, and the driver need not track mappings. Rings are freed after the
 * device has confirmed their release; otherwise they are buried until it is
 * reset.
 */
#include <linux/io.h>
#include <linux/log2.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "vnicd.h"

/* The mmap size in rxe's ABI has 32 bits; stay well below. */
#define VNICD_RING_MAX BIT(30)

static void vnicd_ring_free(struct vnicd_ring_mem *ring)
{
	if (ring->contiguous)
		free_pages_exact(ring->buf, ring->alloc_size);
	else
		vfree(ring->buf);
	kfree(ring);
}

static void vnicd_ring_unbury(struct vnicd_grave *grave)
{
	vnicd_ring_free(container_of(grave, struct vnicd_ring_mem, grave));
}

static void vnicd_ring_drop(struct vnicd_ring_mem *ring)
{
	if (ring->buried)
		vnicd_bury(ring->vd, &ring->grave, vnicd_ring_unbury);
	else
		vnicd_ring_free(ring);
}

static bool vnicd_ring_in_huge_pages(const struct vnicd_ring_mem *ring)
{
	unsigned long off, first = 0;

	for (off = 0; off < ring->size; off += PAGE_SIZE) {
		unsigned long in = off & ~PMD_MASK;
		unsigned long pfn = vmalloc_to_pfn((void *)ring->buf + off);

		if (!in)
			first = pfn;
		if (first & (PTRS_PER_PTE - 1) || pfn != first + (in >> PAGE_SHIFT))
			return false;
	}
	return true;
}

/*
 * One contiguous span if it is cheap: the device then maps the ring as one.
 * alloc_pages_exact returns naturally aligned memory, so one large "page"
 * describes it. A large ring needs huge pages: the list of small ones may not
 * fit into a command.
 */
static int vnicd_ring_alloc(struct vnicd_ring_mem *ring)
{
	ring->alloc_size = PAGE_ALIGN(ring->size);
	if (get_order(ring->size) <= VNICD_MAX_ORDER) {
		ring->buf = alloc_pages_exact(ring->alloc_size,
					      GFP_KERNEL_ACCOUNT | __GFP_ZERO |
					      __GFP_NOWARN | __GFP_NORETRY);
		if (ring->buf) {
			ring->contiguous = true;
			ring->page_shift = get_order(ring->size) + PAGE_SHIFT;
			ring->npages = 1;
			return 0;
		}
	}

	ring->buf = vmalloc_huge(ring->size < PMD_SIZE ? ring->alloc_size :
				 ALIGN(ring->size, PMD_SIZE),
				 GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	if (!ring->buf)
		return -ENOMEM;
	ring->page_shift = PAGE_SHIFT;
	if (ring->size >= PMD_SIZE && vnicd_ring_in_huge_pages(ring))
		ring->page_shift = PMD_SHIFT;
	ring->npages = DIV_ROUND_UP(ring->size, BIT(ring->page_shift));
	return 0;
}

struct vnicd_ring_mem *vnicd_ring_create(struct vnicd_dev *vd, u32 num_elems,
					 u32 elem_size, struct ib_udata *udata)
{
	struct vnicd_ring_mem *ring;
	u64 size;
	int err;

	elem_size = roundup_pow_of_two(max(elem_size, 64U));
	size = sizeof(struct rxe_queue_buf) + (u64)num_elems * elem_size;
	if (!is_power_of_2(num_elems) || elem_size > SZ_64K || size > VNICD_RING_MAX)
		return ERR_PTR(-EINVAL);

	ring = kzalloc(sizeof(*ring), GFP_KERNEL);
	if (!ring)
		return ERR_PTR(-ENOMEM);
	ring->vd = vd;
	ring->size = size;
	ring->num_elems = num_elems;
	ring->log2_elem_size = ilog2(elem_size);
	err = vnicd_ring_alloc(ring);
	if (err) {
		kfree(ring);
		return ERR_PTR(err);
	}

	/* For the process; the device uses only the command's value. */
	ring->buf->log2_elem_size = ring->log2_elem_size;
	ring->buf->index_mask = num_elems - 1;

	if (udata) {
		struct vnicd_ucontext *uc =
			rdma_udata_to_drv_context(udata, struct vnicd_ucontext, base);

		err = rdma_user_mmap_entry_insert(&uc->base, &ring->entry, ring->size);
		if (err) {
			vnicd_ring_free(ring);
			return ERR_PTR(err);
		}
		ring->mapped = true;
	}
	return ring;
}

void vnicd_ring_destroy(struct vnicd_ring_mem *ring, bool released)
{
	if (!ring)
		return;
	ring->buried = !released;
	/* With an offset an mmap() may be in progress: the last user frees. */
	if (ring->mapped)
		rdma_user_mmap_entry_remove(&ring->entry);
	else
		vnicd_ring_drop(ring);
}

void vnicd_mmap_free(struct rdma_user_mmap_entry *entry)
{
	vnicd_ring_drop(container_of(entry, struct vnicd_ring_mem, entry));
}

void vnicd_ring_describe(const struct vnicd_ring_mem *ring, struct vnicd_ring *out)
{
	out->length = cpu_to_le64(ring->size);
	out->npages = cpu_to_le32(ring->npages);
	out->page_shift = ring->page_shift;
	out->log2_elem_size = ring->log2_elem_size;
	out->num_elems = cpu_to_le32(ring->num_elems);
}

static struct page *vnicd_ring_page(const struct vnicd_ring_mem *ring, size_t off)
{
	void *va = (void *)ring->buf + off;

	return ring->contiguous ? virt_to_page(va) : vmalloc_to_page(va);
}

void vnicd_ring_pages(const struct vnicd_ring_mem *ring, __le64 *pas)
{
	u32 i;

	for (i = 0; i < ring->npages; i++)
		pas[i] = cpu_to_le64(page_to_phys(vnicd_ring_page(ring, (size_t)i << ring->page_shift)));
}

void vnicd_ring_mminfo(const struct vnicd_ring_mem *ring, struct mminfo *mi)
{
	mi->offset = rdma_user_mmap_get_offset(&ring->entry);
	mi->size = ring->size;
	mi->pad = 0;
}

int vnicd_mmap(struct ib_ucontext *ctx, struct vm_area_struct *vma)
{
	struct rdma_user_mmap_entry *entry;
	struct vnicd_ring_mem *ring;
	unsigned long i, n;
	int err = 0;

	/* A private mapping would diverge from the device at the first write. */
	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;

	/* Searches only this context, and requires the exact length. */
	entry = rdma_user_mmap_entry_get(ctx, vma);
	if (!entry)
		return -EINVAL;
	ring = container_of(entry, struct vnicd_ring_mem, entry);

	vnicd_vm_flags_set(vma, VM_DONTEXPAND | VM_DONTDUMP);
	n = ring->alloc_size >> PAGE_SHIFT;
	for (i = 0; i < n && !err; i++)
		err = vm_insert_page(vma, vma->vm_start + (i << PAGE_SHIFT),
				     vnicd_ring_page(ring, i << PAGE_SHIFT));
	/* On error the caller of mmap unmaps the pages mapped so far. */
	rdma_user_mmap_entry_put(entry);
	return err;
}
