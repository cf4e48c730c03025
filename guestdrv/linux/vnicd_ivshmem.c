// SPDX-License-Identifier: GPL-2.0
/*
 * The HCA behind QEMU's ivshmem-doorbell: a virtio transport. Registers are in BAR 2,
 * which is memory that vnicd shares, see vnicd_ivshmem.h. Each queue with a callback has
 * an interrupt of its own.
 *
 * Waiting. vnicd answers requests when it runs, so every wait has an end. The wait for
 * FEATURES_OK or DRIVER_OK ends in a message and a status without that bit. A reset that
 * was not confirmed leaves the status as it was, and vnicd_reset() asks again: what it
 * frees afterwards, the device may access until then. Shutdown goes on without.
 *
 * Lost doorbells and interrupts. While the PCI device is reset both are dropped. After
 * migration with KVM, QEMU has interrupts bound to nothing until MSI-X is enabled anew.
 * The device changes the generation of config space when it has moved; if that comes
 * without its interrupt, a periodic work enables MSI-X again and looks at all queues.
 */
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/log2.h>
#include <linux/pci.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>

#include "vnicd.h"
#include "vnicd_ivshmem.h"

/* How long a request may take. vnicd may be in the middle of being replaced. */
#define VNICD_IV_PATIENCE	(30 * HZ)
/* Doorbells are lost while the PCI device is reset, so they are repeated. */
#define VNICD_IV_REPEAT		HZ
#define VNICD_IV_WATCH		HZ

/* What a driver may accept: the layout has split rings, and the device knows no more. */
#define VNICD_IV_FEATURES	(GENMASK_ULL(23, 0) | BIT_ULL(VIRTIO_RING_F_INDIRECT_DESC) | \
				 BIT_ULL(VIRTIO_RING_F_EVENT_IDX) | BIT_ULL(VIRTIO_F_VERSION_1))

/* Lives until the last reference to vdev is gone; regs and doorbell while bound. */
struct vnicd_ivdev {
	struct virtio_device vdev;
	struct pci_dev *pdev;
	void __iomem *bar0;
	struct vnicd_ivshmem *regs;

	/* From BAR 2, validated. */
	u32 peer;
	u32 num_queues;
	u32 config_size;
	u16 max_size;
	u64 features;

	struct mutex request_lock;	/* guards the driver's part of regs and status */
	u32 request;			/* the last one */
	u8 status;			/* as the driver sees it; 0: confirmed */

	struct mutex vq_lock;		/* guards num_vqs and the queues */
	unsigned int num_vqs;
	unsigned int num_irqs;		/* that were requested */
	struct virtqueue *vqs[VNICD_IVSHMEM_QUEUES];
	char irq_names[1 + VNICD_IVSHMEM_QUEUES][32];

	struct delayed_work watch;
	u32 generation;			/* of config space, known to the driver */
	u32 watched;			/* of config space, as watch saw it last */
	bool missed;			/* the PCI device was reset */
};

static struct vnicd_ivdev *to_ivdev(struct virtio_device *vdev)
{
	return container_of(vdev, struct vnicd_ivdev, vdev);
}

static void vnicd_iv_ring(struct vnicd_ivdev *d, u32 vector)
{
	writel(d->peer << 16 | vector, d->bar0 + VNICD_IVSHMEM_DOORBELL);
}

static u32 vnicd_iv_generation_now(struct vnicd_ivdev *d)
{
	return le32_to_cpu(virt_load_acquire(&d->regs->config_generation));
}

/*
 * The device says that it has ended. It is all ones, too, while the PCI device is reset
 * and its memory cannot be read; the magic tells.
 */
static bool vnicd_iv_ended(struct vnicd_ivdev *d)
{
	return le32_to_cpu(virt_load_acquire(&d->regs->answer)) == VNICD_IVSHMEM_ENDED &&
	       le64_to_cpu(READ_ONCE(d->regs->magic)) == VNICD_IVSHMEM_MAGIC;
}

/*
 * Has the device bring itself into line with @status. -ETIMEDOUT: it has not answered,
 * and may do so later. -ENODEV: it is unplugged or has ended, so it accesses no memory.
 * Only a request that sets something is interrupted (-EINTR), and only by a fatal signal.
 */
static int vnicd_iv_request(struct vnicd_ivdev *d, u8 status, u32 *device_status)
{
	unsigned long end = jiffies + VNICD_IV_PATIENCE, repeat = jiffies + VNICD_IV_REPEAT;
	struct vnicd_ivshmem *regs = d->regs;
	unsigned int pause = 0;
	u32 result;

	lockdep_assert_held(&d->request_lock);
	if (++d->request == VNICD_IVSHMEM_ENDED)
		d->request = 1;
	WRITE_ONCE(regs->status, cpu_to_le32(status));
	virt_store_release(&regs->request, cpu_to_le32(d->request));
	vnicd_iv_ring(d, 0);

	while (le32_to_cpu(virt_load_acquire(&regs->answer)) != d->request) {
		if (vnicd_iv_ended(d))
			return -ENODEV;
		if (pause < HZ / 20)
			pause++;
		if (!status) {
			schedule_timeout_idle(pause);
		} else {
			schedule_timeout_killable(pause);
			if (fatal_signal_pending(current))
				return -EINTR;
		}
		if (time_before(jiffies, repeat))
			continue;
		if (!pci_device_is_present(d->pdev))
			return -ENODEV;
		if (time_after(jiffies, end))
			return -ETIMEDOUT;
		repeat = jiffies + VNICD_IV_REPEAT;
		vnicd_iv_ring(d, 0);
	}
	*device_status = le32_to_cpu(READ_ONCE(regs->device_status));
	result = le32_to_cpu(READ_ONCE(regs->result));
	if (!result)
		return 0;
	dev_err(&d->pdev->dev, "vnicd refuses device status %#x: error %u\n", status, result);
	return -EIO;
}

static void vnicd_iv_get(struct virtio_device *vdev, unsigned int offset, void *buf,
			 unsigned int len)
{
	struct vnicd_ivdev *d = to_ivdev(vdev);
	const u8 *src = d->regs->config + offset;

	if (offset > d->config_size || len > d->config_size - offset) {
		memset(buf, 0xff, len);
		return;
	}
	/* Fields are aligned: none is seen half changed. */
	if (len == 2 && IS_ALIGNED(offset, 2))
		*(u16 *)buf = READ_ONCE(*(const u16 *)src);
	else if (len == 4 && IS_ALIGNED(offset, 4))
		*(u32 *)buf = READ_ONCE(*(const u32 *)src);
	else if (len == 8 && IS_ALIGNED(offset, 8))
		*(u64 *)buf = READ_ONCE(*(const u64 *)src);
	else
		memcpy(buf, src, len);
}

/* Config space is read-only. */
static void vnicd_iv_set(struct virtio_device *vdev, unsigned int offset, const void *buf,
			 unsigned int len)
{
	dev_warn_once(&vdev->dev, "config space cannot be written\n");
}

static u32 vnicd_iv_generation(struct virtio_device *vdev)
{
	struct vnicd_ivdev *d = to_ivdev(vdev);
	unsigned int i;
	u32 gen;

	/* Odd: it is changing, or vnicd has ended in the middle and will write it again. */
	for (i = 0; i < 1000; i++) {
		gen = vnicd_iv_generation_now(d);
		if (!(gen & 1))
			break;
		cpu_relax();
	}
	virt_rmb();
	return gen;
}

static u8 vnicd_iv_get_status(struct virtio_device *vdev)
{
	return READ_ONCE(to_ivdev(vdev)->status);
}

static const char *vnicd_iv_why(int err)
{
	switch (err) {
	case -ETIMEDOUT:	return "vnicd does not answer";
	case -ENODEV:		return "it is unplugged, or its vnicd has ended";
	case -EINTR:		return "killed while waiting for vnicd";
	default:		return "vnicd refuses";
	}
}

/* The device acts on two of the bits; the others are for the driver's side alone. */
static void vnicd_iv_set_status(struct virtio_device *vdev, u8 status)
{
	const u8 acting = VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK;
	struct vnicd_ivdev *d = to_ivdev(vdev);
	u32 have;
	int err;

	mutex_lock(&d->request_lock);
	if (status & ~d->status & acting) {
		err = vnicd_iv_request(d, status, &have);
		if (!err && ~have & status & acting)
			err = -EIO;
		if (err) {
			dev_err(&vdev->dev, "cannot set device status %#x: %s\n", status,
				vnicd_iv_why(err));
			/* The device may have set it all the same: only a reset is certain. */
			status &= ~(acting & ~d->status);
		}
	}
	WRITE_ONCE(d->status, status);
	mutex_unlock(&d->request_lock);
}

static void vnicd_iv_synchronize_cbs(struct virtio_device *vdev)
{
	struct vnicd_ivdev *d = to_ivdev(vdev);
	unsigned int i;

	for (i = 0; i < d->num_irqs; i++)
		synchronize_irq(pci_irq_vector(d->pdev, i));
}

static int vnicd_iv_reset_locked(struct vnicd_ivdev *d)
{
	u32 have;
	int err;

	if (!d->status)
		return 0;
	err = vnicd_iv_request(d, 0, &have);
	if (!err || err == -ENODEV)
		WRITE_ONCE(d->status, 0);
	return err;
}

static void vnicd_iv_reset(struct virtio_device *vdev)
{
	struct vnicd_ivdev *d = to_ivdev(vdev);
	int err;

	mutex_lock(&d->request_lock);
	err = vnicd_iv_reset_locked(d);
	mutex_unlock(&d->request_lock);
	if (err && err != -ENODEV)
		dev_err(&vdev->dev, "no reset within %u s: %s\n", VNICD_IV_PATIENCE / HZ,
			vnicd_iv_why(err));
	vnicd_iv_synchronize_cbs(vdev);
}

static u64 vnicd_iv_get_features(struct virtio_device *vdev)
{
	return to_ivdev(vdev)->features;
}

static int vnicd_iv_finalize_features(struct virtio_device *vdev)
{
	struct vnicd_ivdev *d = to_ivdev(vdev);

	vring_transport_features(vdev);
	mutex_lock(&d->request_lock);
	WRITE_ONCE(d->regs->driver_features, cpu_to_le64(vdev->features));
	mutex_unlock(&d->request_lock);
	/* The driver reads config space later. */
	WRITE_ONCE(d->generation, vnicd_iv_generation_now(d));
	return 0;
}

static bool vnicd_iv_notify(struct virtqueue *vq)
{
	vnicd_iv_ring(to_ivdev(vq->vdev), 1 + vq->index);
	return true;
}

static irqreturn_t vnicd_iv_config_irq(int irq, void *data)
{
	struct vnicd_ivdev *d = data;

	WRITE_ONCE(d->generation, vnicd_iv_generation_now(d));
	virtio_config_changed(&d->vdev);
	return IRQ_HANDLED;
}

/* Interrupts may have been lost: as if each had come now. And doorbells likewise. */
static void vnicd_iv_catch_up(struct vnicd_ivdev *d)
{
	unsigned int i;

	lockdep_assert_held(&d->vq_lock);
	for (i = 0; i < d->num_vqs; i++) {
		if (d->vqs[i]->callback) {
			int irq = pci_irq_vector(d->pdev, 1 + i);
			unsigned long flags;

			/* Its handler never runs twice at a time. */
			disable_irq(irq);
			local_irq_save(flags);
			vring_interrupt(irq, d->vqs[i]);
			local_irq_restore(flags);
			enable_irq(irq);
		}
		vnicd_iv_notify(d->vqs[i]);
	}
	virtio_config_changed(&d->vdev);
}

static void vnicd_iv_enable_msix_again(struct pci_dev *pdev)
{
	int pos = pdev->msix_cap + PCI_MSIX_FLAGS;
	u16 ctrl;

	pci_read_config_word(pdev, pos, &ctrl);
	if (PCI_POSSIBLE_ERROR(ctrl) || !(ctrl & PCI_MSIX_FLAGS_ENABLE))
		return;
	pci_write_config_word(pdev, pos, ctrl & ~PCI_MSIX_FLAGS_ENABLE);
	pci_write_config_word(pdev, pos, ctrl);
}

static void vnicd_iv_watch(struct work_struct *work)
{
	struct vnicd_ivdev *d = container_of(to_delayed_work(work), struct vnicd_ivdev, watch);
	u32 gen = vnicd_iv_generation_now(d);
	bool moved;

	mutex_lock(&d->vq_lock);
	if (!d->num_vqs)
		goto out;
	/* Seen twice: its interrupt had time to come. All ones: unplugged or in a reset. */
	moved = gen != READ_ONCE(d->generation) && gen == d->watched && gen != U32_MAX;
	d->watched = gen;
	if (moved) {
		WRITE_ONCE(d->generation, gen);
		dev_info(&d->vdev.dev, "an interrupt is missing: enabling MSI-X again\n");
		vnicd_iv_enable_msix_again(d->pdev);
	}
	if (xchg(&d->missed, false) || moved)
		vnicd_iv_catch_up(d);
	schedule_delayed_work(&d->watch, round_jiffies_relative(VNICD_IV_WATCH));
out:
	mutex_unlock(&d->vq_lock);
}

/* Only after a reset. */
static void vnicd_iv_del_vqs(struct virtio_device *vdev)
{
	struct vnicd_ivdev *d = to_ivdev(vdev);
	unsigned int i;

	mutex_lock(&d->vq_lock);
	for (i = 0; i < d->num_irqs; i++)
		free_irq(pci_irq_vector(d->pdev, i), i ? (void *)d->vqs[i - 1] : d);
	d->num_irqs = 0;
	for (i = 0; i < d->num_vqs; i++) {
		vring_del_virtqueue(d->vqs[i]);
		memset(&d->regs->queue[i], 0, sizeof(d->regs->queue[i]));
	}
	d->num_vqs = 0;
	pci_free_irq_vectors(d->pdev);
	mutex_unlock(&d->vq_lock);
	cancel_delayed_work_sync(&d->watch);
}

static int vnicd_iv_add_queue(struct vnicd_ivdev *d, unsigned int i, struct virtqueue_info *info)
{
	struct vnicd_ivshmem_queue *regs = &d->regs->queue[i];
	struct virtqueue *vq;

	vq = vring_create_virtqueue(i, d->max_size, SMP_CACHE_BYTES, &d->vdev, true, true, false,
				    vnicd_iv_notify, info->callback, info->name);
	if (!vq)
		return -ENOMEM;
	vq->num_max = d->max_size;
	d->vqs[i] = vq;
	d->num_vqs = i + 1;

	regs->desc = cpu_to_le64(virtqueue_get_desc_addr(vq));
	regs->avail = cpu_to_le64(virtqueue_get_avail_addr(vq));
	regs->used = cpu_to_le64(virtqueue_get_used_addr(vq));
	regs->size = cpu_to_le16(virtqueue_get_vring_size(vq));
	return 0;
}

/*
 * The layout names the vectors: 0 is config space's, 1 + i that of queue i. Queues
 * without a callback are last in the HCA, so they need none.
 */
static int vnicd_iv_add_irqs(struct vnicd_ivdev *d, unsigned int n)
{
	const char *name = dev_name(&d->vdev.dev);
	unsigned int i;
	int err;

	while (n && !d->vqs[n - 1]->callback)
		n--;
	err = pci_alloc_irq_vectors(d->pdev, 1 + n, 1 + n, PCI_IRQ_MSIX);
	if (err < 0) {
		dev_err(&d->vdev.dev,
			"cannot have %u interrupts: %d (the device's vectors: %d)\n",
			1 + n, err, pci_msix_vec_count(d->pdev));
		return err;
	}
	for (i = 0; i <= n; i++) {
		snprintf(d->irq_names[i], sizeof(d->irq_names[i]), "%s-%s", name,
			 i ? d->vqs[i - 1]->name : "config");
		err = request_irq(pci_irq_vector(d->pdev, i),
				  i ? vring_interrupt : vnicd_iv_config_irq, 0,
				  d->irq_names[i], i ? (void *)d->vqs[i - 1] : d);
		if (err) {
			dev_err(&d->vdev.dev, "cannot have interrupt %u: %d\n", i, err);
			return err;
		}
		d->num_irqs = i + 1;
	}
	return 0;
}

static int vnicd_iv_add_vqs(struct virtio_device *vdev, unsigned int n, struct virtqueue *vqs[],
			    struct virtqueue_info info[])
{
	struct vnicd_ivdev *d = to_ivdev(vdev);
	unsigned int i;
	int err = 0;

	if (n > d->num_queues) {
		dev_err(&vdev->dev, "the device has %u queues, config space says %u\n",
			d->num_queues, n);
		return -EINVAL;
	}
	mutex_lock(&d->vq_lock);
	for (i = 0; i < n && !err; i++)
		err = vnicd_iv_add_queue(d, i, &info[i]);
	if (!err)
		err = vnicd_iv_add_irqs(d, n);
	mutex_unlock(&d->vq_lock);
	if (err) {
		vnicd_iv_del_vqs(vdev);
		return err;
	}
	memcpy(vqs, d->vqs, n * sizeof(*vqs));
	schedule_delayed_work(&d->watch, VNICD_IV_WATCH);
	return 0;
}

#ifdef VNICD_HAVE_VIRTQUEUE_INFO
static int vnicd_iv_find_vqs(struct virtio_device *vdev, unsigned int n, struct virtqueue *vqs[],
			     struct virtqueue_info info[], struct irq_affinity *desc)
{
	return vnicd_iv_add_vqs(vdev, n, vqs, info);
}
#else
static int vnicd_iv_find_vqs(struct virtio_device *vdev, unsigned int n, struct virtqueue *vqs[],
			     vq_callback_t *callbacks[], const char * const names[],
			     const bool *ctx, struct irq_affinity *desc)
{
	struct virtqueue_info *info = kcalloc(n, sizeof(*info), GFP_KERNEL);
	unsigned int i;
	int err;

	if (!info)
		return -ENOMEM;
	for (i = 0; i < n; i++) {
		info[i].name = names[i];
		info[i].callback = callbacks[i];
	}
	err = vnicd_iv_add_vqs(vdev, n, vqs, info);
	kfree(info);
	return err;
}
#endif

static int vnicd_iv_set_vq_affinity(struct virtqueue *vq, const struct cpumask *mask)
{
	struct vnicd_ivdev *d = to_ivdev(vq->vdev);

	if (!mask || !vq->callback)
		return 0;
	return irq_set_affinity(pci_irq_vector(d->pdev, 1 + vq->index), mask);
}

static const struct cpumask *vnicd_iv_get_vq_affinity(struct virtio_device *vdev, int index)
{
	struct vnicd_ivdev *d = to_ivdev(vdev);

	if (index < 0 || index + 1 >= d->num_irqs)
		return NULL;
	return pci_irq_get_affinity(d->pdev, 1 + index);
}

static const char *vnicd_iv_bus_name(struct virtio_device *vdev)
{
	return pci_name(to_ivdev(vdev)->pdev);
}

static const struct virtio_config_ops vnicd_iv_ops = {
	.get = vnicd_iv_get,
	.set = vnicd_iv_set,
	.generation = vnicd_iv_generation,
	.get_status = vnicd_iv_get_status,
	.set_status = vnicd_iv_set_status,
	.reset = vnicd_iv_reset,
	.find_vqs = vnicd_iv_find_vqs,
	.del_vqs = vnicd_iv_del_vqs,
	.synchronize_cbs = vnicd_iv_synchronize_cbs,
	.get_features = vnicd_iv_get_features,
	.finalize_features = vnicd_iv_finalize_features,
	.bus_name = vnicd_iv_bus_name,
	.set_vq_affinity = vnicd_iv_set_vq_affinity,
	.get_vq_affinity = vnicd_iv_get_vq_affinity,
};

bool vnicd_ivshmem_is(const struct virtio_device *vdev)
{
	return vdev->config == &vnicd_iv_ops;
}

/* -ENODEV, without a word: it is somebody else's. The memory is the host's: read once. */
static int vnicd_iv_identify(struct vnicd_ivdev *d)
{
	const struct vnicd_ivshmem *regs = d->regs;
	struct device *dev = &d->pdev->dev;
	u32 version, vectors;
	int have;

	if (le64_to_cpu(virt_load_acquire(&regs->magic)) != VNICD_IVSHMEM_MAGIC)
		return -ENODEV;
	version = le32_to_cpu(READ_ONCE(regs->version));
	if (version != VNICD_IVSHMEM_VERSION) {
		dev_err(dev, "registers of version %u, this module knows version %u\n",
			version, VNICD_IVSHMEM_VERSION);
		return -EPROTONOSUPPORT;
	}
	d->vdev.id.device = le32_to_cpu(READ_ONCE(regs->virtio_id));
	d->peer = le32_to_cpu(READ_ONCE(regs->peer));
	d->num_queues = le32_to_cpu(READ_ONCE(regs->num_queues));
	vectors = le32_to_cpu(READ_ONCE(regs->num_vectors));
	d->config_size = le32_to_cpu(READ_ONCE(regs->config_size));
	d->max_size = le16_to_cpu(READ_ONCE(regs->max_size));
	d->features = le64_to_cpu(READ_ONCE(regs->device_features)) & VNICD_IV_FEATURES;
	d->request = le32_to_cpu(READ_ONCE(regs->request));

	if (d->vdev.id.device != VNICD_VIRTIO_ID && d->vdev.id.device != VNICD_VIRTIO_ID_RDMA) {
		dev_err(dev, "virtio id %u, expected %u or %u\n", d->vdev.id.device,
			VNICD_VIRTIO_ID, VNICD_VIRTIO_ID_RDMA);
		return -EINVAL;
	}
	if (d->peer > U16_MAX) {
		dev_err(dev, "peer number %u, expected 0..%u\n", d->peer, U16_MAX);
		return -EINVAL;
	}
	if (!d->num_queues || d->num_queues > VNICD_IVSHMEM_QUEUES) {
		dev_err(dev, "%u queues, expected 1..%u\n", d->num_queues, VNICD_IVSHMEM_QUEUES);
		return -EINVAL;
	}
	have = pci_msix_vec_count(d->pdev);
	if (vectors != 1 + d->num_queues || have < (int)vectors) {
		dev_err(dev, "%u vectors of vnicd and %d of QEMU, expected %u\n",
			vectors, have, 1 + d->num_queues);
		return -EINVAL;
	}
	if (d->config_size < sizeof(struct vnicd_config) || d->config_size > VNICD_IVSHMEM_CONFIG) {
		dev_err(dev, "config space of %u bytes, expected %zu..%u\n", d->config_size,
			sizeof(struct vnicd_config), VNICD_IVSHMEM_CONFIG);
		return -EINVAL;
	}
	if (d->max_size > 32768 || !is_power_of_2(d->max_size)) {
		dev_err(dev, "queues of up to %u entries, expected a power of two up to 32768\n",
			d->max_size);
		return -EINVAL;
	}
	return 0;
}

static void vnicd_iv_release(struct device *dev)
{
	kfree(to_ivdev(dev_to_virtio(dev)));
}

static void vnicd_iv_detach(struct vnicd_ivdev *d)
{
	pci_clear_master(d->pdev);
	pci_iounmap(d->pdev, d->bar0);
	pci_release_regions(d->pdev);
	memunmap(d->regs);
	pci_disable_device(d->pdev);
}

static int vnicd_iv_attach(struct vnicd_ivdev *d)
{
	struct pci_dev *pdev = d->pdev;
	int err;

	err = pci_enable_device_mem(pdev);
	if (err)
		return err;
	/* Memory of the host, cached there, so here as well. */
	d->regs = memremap(pci_resource_start(pdev, 2), VNICD_IVSHMEM_BAR_SIZE, MEMREMAP_WB);
	if (!d->regs) {
		err = -ENOMEM;
		goto err_disable;
	}
	err = vnicd_iv_identify(d);
	if (err)
		goto err_unmap;
	err = pci_request_regions(pdev, KBUILD_MODNAME);
	if (err)
		goto err_unmap;
	d->bar0 = pci_iomap(pdev, 0, 0);
	if (!d->bar0) {
		err = -ENOMEM;
		goto err_regions;
	}
	/* Its interrupts are writes to memory. */
	pci_set_master(pdev);
	return 0;

err_regions:
	pci_release_regions(pdev);
err_unmap:
	memunmap(d->regs);
err_disable:
	pci_disable_device(pdev);
	return err;
}

/* Whatever was set up by a driver before this one, perhaps of another kernel. */
static int vnicd_iv_first_reset(struct vnicd_ivdev *d)
{
	int err;

	mutex_lock(&d->request_lock);
	d->status = VIRTIO_CONFIG_S_FAILED;
	err = vnicd_iv_reset_locked(d);
	mutex_unlock(&d->request_lock);
	if (err)
		dev_err(&d->pdev->dev, "cannot be reset: %s\n", vnicd_iv_why(err));
	return err;
}

static int vnicd_iv_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct vnicd_ivdev *d;
	int err;

	if (pci_resource_len(pdev, 0) < VNICD_IVSHMEM_DOORBELL + 4 ||
	    pci_resource_len(pdev, 2) < VNICD_IVSHMEM_BAR_SIZE)
		return -ENODEV;
	d = kzalloc(sizeof(*d), GFP_KERNEL);
	if (!d)
		return -ENOMEM;
	d->pdev = pdev;
	mutex_init(&d->request_lock);
	mutex_init(&d->vq_lock);
	INIT_DELAYED_WORK(&d->watch, vnicd_iv_watch);

	err = vnicd_iv_attach(d);
	if (err) {
		kfree(d);
		return err;
	}
	err = vnicd_iv_first_reset(d);
	if (err) {
		vnicd_iv_detach(d);
		kfree(d);
		return err;
	}

	d->vdev.dev.parent = &pdev->dev;
	d->vdev.dev.release = vnicd_iv_release;
	d->vdev.config = &vnicd_iv_ops;
	d->vdev.id.vendor = pdev->subsystem_vendor;
	pci_set_drvdata(pdev, d);
	err = register_virtio_device(&d->vdev);
	if (err) {
		vnicd_iv_detach(d);
		put_device(&d->vdev.dev);
	}
	return err;
}

static void vnicd_iv_remove(struct pci_dev *pdev)
{
	struct vnicd_ivdev *d = pci_get_drvdata(pdev);

	/* Its driver's remove has reset it. */
	get_device(&d->vdev.dev);
	unregister_virtio_device(&d->vdev);
	cancel_delayed_work_sync(&d->watch);
	vnicd_iv_detach(d);
	put_device(&d->vdev.dev);
}

/* As virtio's bus does since 6.15: the next kernel's memory is not the device's. */
static void vnicd_iv_shutdown(struct pci_dev *pdev)
{
	struct vnicd_ivdev *d = pci_get_drvdata(pdev);

	virtio_break_device(&d->vdev);
	vnicd_iv_reset(&d->vdev);
}

/* A reset of the PCI device is none of the device behind it, which sees nothing of it. */
static void vnicd_iv_reset_done(struct pci_dev *pdev)
{
	struct vnicd_ivdev *d = pci_get_drvdata(pdev);

	WRITE_ONCE(d->missed, true);
	mod_delayed_work(system_wq, &d->watch, 0);
}

static const struct pci_error_handlers vnicd_iv_err_handler = {
	.reset_done = vnicd_iv_reset_done,
};

static int vnicd_iv_suspend(struct device *dev)
{
	struct vnicd_ivdev *d = dev_get_drvdata(dev);

	return virtio_device_freeze(&d->vdev);
}

static int vnicd_iv_resume(struct device *dev)
{
	struct vnicd_ivdev *d = dev_get_drvdata(dev);

	return virtio_device_restore(&d->vdev);
}

static DEFINE_SIMPLE_DEV_PM_OPS(vnicd_iv_pm_ops, vnicd_iv_suspend, vnicd_iv_resume);

static const struct pci_device_id vnicd_iv_id_table[] = {
	{ PCI_DEVICE(VNICD_IVSHMEM_VENDOR, VNICD_IVSHMEM_DEVICE) },
	{ 0 },
};
MODULE_DEVICE_TABLE(pci, vnicd_iv_id_table);

static struct pci_driver vnicd_iv_driver = {
	.name = KBUILD_MODNAME,
	.id_table = vnicd_iv_id_table,
	.probe = vnicd_iv_probe,
	.remove = vnicd_iv_remove,
	.shutdown = vnicd_iv_shutdown,
	.err_handler = &vnicd_iv_err_handler,
	.driver.pm = pm_sleep_ptr(&vnicd_iv_pm_ops),
};

int vnicd_ivshmem_register(void)
{
	BUILD_BUG_ON(sizeof(struct vnicd_ivshmem_queue) != 32);
	BUILD_BUG_ON(offsetof(struct vnicd_ivshmem, answer) != 64);
	BUILD_BUG_ON(offsetof(struct vnicd_ivshmem, request) != 128);
	BUILD_BUG_ON(offsetof(struct vnicd_ivshmem, queue) != 192);
	BUILD_BUG_ON(offsetof(struct vnicd_ivshmem, config) != 1280);
	BUILD_BUG_ON(sizeof(struct vnicd_ivshmem) != 1536);
	return pci_register_driver(&vnicd_iv_driver);
}

void vnicd_ivshmem_unregister(void)
{
	pci_unregister_driver(&vnicd_iv_driver);
}
