/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Kernels differ in a few interfaces of RDMA, virtio and mm that this module
 * uses. Kbuild checks the headers and sets VNICD_HAVE_*, because distributions
 * backport interfaces without changing versions.
 */
#ifndef VNICD_COMPAT_H
#define VNICD_COMPAT_H

#include <linux/mm.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>
#include <rdma/iter.h>
#include <rdma/uverbs_ioctl.h>

/* 6.11 turned the parallel arrays of virtio_find_vqs into one of structures. */
#ifndef VNICD_HAVE_VIRTQUEUE_INFO
struct virtqueue_info {
	const char *name;
	vq_callback_t *callback;
};
#endif

static inline int vnicd_find_vqs(struct virtio_device *vdev, unsigned int n,
				 struct virtqueue **vqs,
				 struct virtqueue_info *info)
{
#ifdef VNICD_HAVE_VIRTQUEUE_INFO
	return virtio_find_vqs(vdev, n, vqs, info, NULL);
#else
	vq_callback_t **callbacks;
	const char **names;
	unsigned int i;
	int err = -ENOMEM;

	callbacks = kcalloc(n, sizeof(*callbacks), GFP_KERNEL);
	names = kcalloc(n, sizeof(*names), GFP_KERNEL);
	if (callbacks && names) {
		for (i = 0; i < n; i++) {
			callbacks[i] = info[i].callback;
			names[i] = info[i].name;
		}
		err = virtio_find_vqs(vdev, n, vqs, callbacks, names, NULL);
	}
	kfree(names);
	kfree(callbacks);
	return err;
#endif
}

static inline void vnicd_vm_flags_set(struct vm_area_struct *vma,
				      unsigned long flags)
{
#ifdef VNICD_HAVE_VM_FLAGS_SET
	vm_flags_set(vma, flags);
#else
	vma->vm_flags |= flags;
#endif
}

/* Without a DMA device, a DMA address is the kernel address of the memory. */
static inline void *vnicd_dma_to_ptr(u64 addr)
{
	return (void *)(uintptr_t)addr;
}

static inline struct ib_umem *vnicd_umem_get(struct ib_device *ibdev,
					     unsigned long addr, size_t size,
					     int access)
{
#ifdef VNICD_HAVE_UMEM_GET_VA
	return ib_umem_get_va(ibdev, addr, size, access);
#else
	return ib_umem_get(ibdev, addr, size, access);
#endif
}

/* 6.11 gave create_cq the whole bundle. Kernel consumers have no bundle. */
#ifdef VNICD_HAVE_CQ_ATTRS
typedef struct uverbs_attr_bundle *vnicd_cq_attrs;
#define vnicd_cq_udata(attrs) ((attrs) ? &(attrs)->driver_udata : NULL)
#else
typedef struct ib_udata *vnicd_cq_attrs;
#define vnicd_cq_udata(attrs) (attrs)
#endif

/* Largest order of the page allocator; it has had three names and two meanings. */
#if defined(MAX_PAGE_ORDER)
#define VNICD_MAX_ORDER MAX_PAGE_ORDER
#else
#define VNICD_MAX_ORDER (MAX_ORDER - 1)
#endif

/*
 * A guest with one processor patches the lock prefix out of set_bit() on x86.
 * The device runs on another processor and shares these words, so use the
 * variant that always locks.
 */
#if defined(CONFIG_X86) || defined(CONFIG_ARM64) || defined(CONFIG_ARM)
#include <asm/sync_bitops.h>
#define vnicd_shared_set_bit(nr, p) sync_set_bit(nr, p)
#else
#define vnicd_shared_set_bit(nr, p) set_bit(nr, p)
#endif

#endif /* VNICD_COMPAT_H */
