// SPDX-License-Identifier: GPL-2.0
/*
 * Makes vnicd's HCA look faulty to its driver. Load it before vnicd.ko, and write to its parameters:
 *
 *	refuse	a bit for each opcode: requests with these get one that the device does not know, so that
 *		it answers them with an error and does not execute them
 *	spoil	puts entries that name no buffer into the used ring of the command queue, until virtio
 *		notices
 *
 * It changes requests when they are put into the command queue. refused counts them.
 */
#include <linux/atomic.h>
#include <linux/delay.h>
#include <linux/io.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/ptrace.h>
#include <linux/scatterlist.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>

#define VNICD_VIRTIO_ID		38
#define VNICD_VIRTIO_ID_RDMA	42
#define VNICD_VQ_CMD		0
#define UNKNOWN_OPCODE		0x7fff

static unsigned long refuse;
module_param(refuse, ulong, 0644);

static unsigned int refused;
module_param(refused, uint, 0444);

static struct virtqueue *commands;

/* Under the command queue's lock. */
static int vnicd_refuse_before_add(struct kprobe *kp, struct pt_regs *regs)
{
	struct virtqueue *vq = (void *)regs_get_kernel_argument(regs, 0);
	struct scatterlist **sgs = (void *)regs_get_kernel_argument(regs, 1);
	u32 id = vq->vdev->id.device;
	__le16 *opcode;
	u16 op;

	if (vq->index != VNICD_VQ_CMD || (id != VNICD_VIRTIO_ID && id != VNICD_VIRTIO_ID_RDMA))
		return 0;
	WRITE_ONCE(commands, vq);
	opcode = sg_virt(sgs[0]);
	op = le16_to_cpu(*opcode);
	if (op < BITS_PER_LONG && (READ_ONCE(refuse) & BIT(op))) {
		*opcode = cpu_to_le16(UNKNOWN_OPCODE);
		refused++;
	}
	return 0;
}

/* The device may overwrite an entry before virtio has seen it. */
static int vnicd_refuse_spoil(const char *val, const struct kernel_param *kp)
{
	struct virtqueue *vq = READ_ONCE(commands);
	unsigned int n = vq ? virtqueue_get_vring_size(vq) : 0;
	struct vring_used *used;

	if (!vq)
		return -ENODEV;
	used = phys_to_virt(virtqueue_get_used_addr(vq));
	for (int i = 0; !virtqueue_is_broken(vq); i++) {
		u16 idx = virtio16_to_cpu(vq->vdev, READ_ONCE(used->idx));

		if (i == 100000)
			return -ETIME;
		used->ring[idx % n].id = cpu_to_virtio32(vq->vdev, U32_MAX);
		virt_store_release(&used->idx, cpu_to_virtio16(vq->vdev, idx + 1));
		usleep_range(100, 200);
	}
	return 0;
}

static const struct kernel_param_ops spoil_ops = { .set = vnicd_refuse_spoil };
module_param_cb(spoil, &spoil_ops, NULL, 0200);

static struct kprobe probe = {
	.symbol_name = "virtqueue_add_sgs",
	.pre_handler = vnicd_refuse_before_add,
};

static int __init vnicd_refuse_init(void)
{
	return register_kprobe(&probe);
}
module_init(vnicd_refuse_init);

static void __exit vnicd_refuse_exit(void)
{
	unregister_kprobe(&probe);
}
module_exit(vnicd_refuse_exit);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("makes vnicd's HCA look faulty; for tests only");
