// SPDX-License-Identifier: GPL-2.0
/*
 * Probe and remove, failure and recovery.
 *
 *	            probe                 remove
 *	(unbound) --------> alive -----------------> (unbound)
 *	                      |                        ^  |
 *	       vnicd_fail()   v    remove              |  | probe
 *	                    dead ----------------------+  v
 *	                      |   a new generation in config space, or a
 *	                      +-> late answer: reset, unbind, bind
 *
 * Death: from then on every command fails at once, ib_core is notified, and the
 * RDMA device is unregistered, which disassociates the processes.
 *
 * The fence (TR-5). A dead device may still write to memory: it may only be slow, or
 * stopped. So memory goes back to the kernel when one of these is certain:
 *  - The device has answered the command that releases it, however late.
 *  - The device was reset. virtio_reset_device() returns when the device's side has
 *    stopped to access the VM's memory, or has lost its connection and thus its
 *    mapping of that memory: QEMU asks vnicd to stop each queue, and waits.
 * A device that has failed otherwise than by silence is reset at once, a silent one
 * after fence_timeout_ms, so that a short stop of vnicd does not stop the VM: a
 * reset blocks QEMU until vnicd answers. Until then
 *  - invalidations of on-demand memory wait (vnicd_cmd_clear_mtt()),
 *  - kernel consumers get no flush completions, and their QPs and fast registrations
 *    are not destroyed: they free their buffers afterwards,
 *  - rings and pinned memory are kept (vnicd_bury()), in fact until remove.
 * The work that resets takes no locks of others and allocates nothing, because reclaim
 * waits for it.
 */
#include <linux/pci.h>
#include <linux/reboot.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>
#include <linux/virtio_pci.h>

#include "vnicd.h"

static unsigned int fence_timeout_ms = 60000;
module_param(fence_timeout_ms, uint, 0644);
MODULE_PARM_DESC(fence_timeout_ms,
		 "milliseconds after which a lost device that stays silent is reset, which blocks the VM while vnicd is stopped (default 60000)");

/* For resets: with a rescuer. */
static struct workqueue_struct *vnicd_fence_wq;

/* Recovery outlives the struct vnicd_dev that requests it. */
static struct workqueue_struct *vnicd_recovery_wq;

struct vnicd_recovery {
	struct work_struct work;
	struct device *dev;		/* held */
};

static void vnicd_recover_work(struct work_struct *work)
{
	struct vnicd_recovery *rec = container_of(work, struct vnicd_recovery, work);

	/* Calls remove, then probe, whose errors are not returned. */
	if (device_reprobe(rec->dev) < 0 || !READ_ONCE(rec->dev->driver))
		dev_err(rec->dev, "device did not recover after its reset\n");
	put_device(rec->dev);
	kfree(rec);
}

/* Allocated in advance: recovery may be due because memory is short. */
static int vnicd_recovery_init(struct vnicd_dev *vd)
{
	struct vnicd_recovery *rec = kzalloc(sizeof(*rec), GFP_KERNEL);

	if (!rec)
		return -ENOMEM;
	INIT_WORK(&rec->work, vnicd_recover_work);
	rec->dev = get_device(&vd->vdev->dev);
	vd->recovery = rec;
	return 0;
}

static void vnicd_recovery_free(struct vnicd_dev *vd)
{
	struct vnicd_recovery *rec = xchg(&vd->recovery, NULL);

	if (!rec)
		return;
	put_device(rec->dev);
	kfree(rec);
}

static void vnicd_fence_now(struct vnicd_dev *vd)
{
	mod_delayed_work(vnicd_fence_wq, &vd->fence_work, 0);
}

void vnicd_revive(struct vnicd_dev *vd)
{
	if (vnicd_dead(vd) && !test_and_set_bit(VNICD_F_RECOVERING, &vd->flags))
		vnicd_fence_now(vd);
}

static void vnicd_die(struct vnicd_dev *vd, const char *why, unsigned int fence_ms)
{
	if (test_and_set_bit(VNICD_F_DEAD, &vd->flags))
		return;
	dev_err(&vd->vdev->dev, "device lost: %s\n", why);
	/*
	 * Does not delay a reset that is due earlier. Remove sets its flag, then looks
	 * whether the device is dead.
	 */
	queue_delayed_work(vnicd_fence_wq, &vd->fence_work,
			   READ_ONCE(vd->removing) ? 0 : msecs_to_jiffies(fence_ms));
	vnicd_cmdq_kill(&vd->cmdq);
	/* Not on vd->wq: unregistering waits for its work. */
	queue_work(system_long_wq, &vd->fail_work);
}

void vnicd_fail(struct vnicd_dev *vd, const char *why)
{
	vnicd_die(vd, why, 0);
}

void vnicd_time_out(struct vnicd_dev *vd)
{
	vnicd_die(vd, "a command timed out", fence_timeout_ms);
}

/* A device that was unplugged answers nothing, not even that it was reset. */
static bool vnicd_unplugged(struct virtio_device *vdev)
{
	struct device *parent = vdev->dev.parent;

	return parent && dev_is_pci(parent) && !pci_device_is_present(to_pci_dev(parent));
}

/*
 * The nonce in the doorbell area of engine 0 says that the driver still uses the
 * device, if its queues stop: then the VM is paused.
 */
static void vnicd_set_nonce(struct vnicd_dev *vd)
{
	struct vnicd_doorbells *db = vd->engines[0].db;
	u64 nonce;

	if (!virtio_has_feature(vd->vdev, VNICD_FEATURE_NONCE))
		return;
	do
		nonce = get_random_u64();
	while (!nonce);
	WRITE_ONCE(db->nonce, cpu_to_le64(nonce));
}

static void vnicd_clear_nonce(struct vnicd_dev *vd)
{
	struct vnicd_doorbells *db = READ_ONCE(vd->engines[0].db);

	if (db)
		WRITE_ONCE(db->nonce, 0);
	/* Before the queues stop. */
	virt_wmb();
}

/*
 * A transport may have given up, because shutdown must come to an end. Only status 0 says
 * that the device has stopped.
 */
static void vnicd_reset_device(struct virtio_device *vdev)
{
	while (!vnicd_unplugged(vdev)) {
		virtio_reset_device(vdev);
		if (!vdev->config->get_status(vdev))
			return;
		schedule_timeout_idle(HZ);
	}
}

/* Afterwards the device accesses no memory. Idempotent. */
static void vnicd_reset(struct vnicd_dev *vd)
{
	mutex_lock(&vd->reset_lock);
	if (!vnicd_quiet(vd)) {
		vnicd_clear_nonce(vd);
		vnicd_reset_device(vd->vdev);
		/* Pairs with the acquire in vnicd_quiet(). */
		smp_mb__before_atomic();
		set_bit(VNICD_F_QUIET, &vd->flags);
		/* May find late answers, which ask for recovery. */
		if (vd->cmdq.vq)
			vnicd_cmdq_after_reset(&vd->cmdq);
	}
	mutex_unlock(&vd->reset_lock);
	wake_up_all(&vd->fence_wait);
}

static void vnicd_fence_work(struct work_struct *work)
{
	struct vnicd_dev *vd = container_of(to_delayed_work(work), struct vnicd_dev, fence_work);
	bool first = !vnicd_quiet(vd);
	struct vnicd_recovery *rec;

	if (first)
		dev_warn(&vd->vdev->dev, "resetting the device, so that its memory can be freed\n");
	vnicd_reset(vd);
	/* Kernel consumers get their flush completions. */
	if (first)
		queue_work(vd->wq, &vd->flush_work);
	if (READ_ONCE(vd->removing))
		return;
	if (!test_bit(VNICD_F_RECOVERING, &vd->flags)) {
		if (first)
			dev_err(&vd->vdev->dev, "RDMA is off until %s is unbound and bound\n",
				dev_name(&vd->vdev->dev));
		return;
	}
	rec = xchg(&vd->recovery, NULL);
	if (rec)
		queue_work(vnicd_recovery_wq, &rec->work);
}

void vnicd_fence(struct vnicd_dev *vd, const char *why)
{
	vnicd_fail(vd, why);
	wait_event(vd->fence_wait, vnicd_quiet(vd));
}

static void vnicd_fail_work(struct work_struct *work)
{
	struct vnicd_dev *vd = container_of(work, struct vnicd_dev, fail_work);
	struct ib_device *ibdev = &vd->ib->base;
	struct ib_event ev = { .device = ibdev, .event = IB_EVENT_DEVICE_FATAL };

	if (READ_ONCE(vd->removing))
		return;
	if (ib_device_try_get(ibdev)) {
		ev.element.port_num = VNICD_PORT;
		ib_dispatch_event(&ev);
		ib_device_put(ibdev);
	}
	vnicd_ib_unregister(vd);
}

void vnicd_check_config(struct vnicd_dev *vd)
{
	queue_work(vd->wq, &vd->config_work);
}

static void vnicd_config_work(struct work_struct *work)
{
	struct vnicd_dev *vd = container_of(work, struct vnicd_dev, config_work);
	u32 generation;
	u16 link_up;

	if (READ_ONCE(vd->removing))
		return;
	virtio_cread_le(vd->vdev, struct vnicd_config, link_up, &link_up);
	virtio_cread_le(vd->vdev, struct vnicd_config, generation, &generation);

	/* All ones, or zeros: the device does not answer. */
	if (!generation || generation == U32_MAX)
		return;
	if (generation != vd->generation) {
		set_bit(VNICD_F_RECOVERING, &vd->flags);
		vnicd_fail(vd, "it has lost its state (new generation)");
		vnicd_fence_now(vd);
		return;
	}
	WRITE_ONCE(vd->link_up, link_up == 1);
	vnicd_port_update(vd);
}

void vnicd_bury(struct vnicd_dev *vd, struct vnicd_grave *grave,
		void (*release)(struct vnicd_grave *grave))
{
	unsigned long flags;

	grave->release = release;
	spin_lock_irqsave(&vd->grave_lock, flags);
	list_add(&grave->list, &vd->graves);
	spin_unlock_irqrestore(&vd->grave_lock, flags);
}

/* Only after the device was reset. */
static void vnicd_empty_graves(struct vnicd_dev *vd)
{
	struct vnicd_grave *grave, *next;

	list_for_each_entry_safe(grave, next, &vd->graves, list) {
		list_del(&grave->list);
		grave->release(grave);
	}
}

static void vnicd_cmd_irq(struct virtqueue *vq)
{
	struct vnicd_dev *vd = vq->vdev->priv;

	vnicd_cmdq_irq(&vd->cmdq);
}

/* In the order of vnicd_abi.h; vnicd_ceq_irq() depends on it. */
static int vnicd_find_queues(struct vnicd_dev *vd)
{
	unsigned int i, n = 2 + vd->num_ceqs + vd->num_engines;
	struct virtqueue_info *info;
	int err;

	vd->vqs = kcalloc(n, sizeof(*vd->vqs), GFP_KERNEL);
	info = kcalloc(n, sizeof(*info), GFP_KERNEL);
	if (!vd->vqs || !info) {
		err = -ENOMEM;
		goto out;
	}
	info[0].name = "commands";
	info[0].callback = vnicd_cmd_irq;
	info[1].name = "events";
	info[1].callback = vnicd_aeq_irq;
	for (i = 0; i < vd->num_ceqs; i++) {
		info[2 + i].name = "completions";
		info[2 + i].callback = vnicd_ceq_irq;
	}
	for (i = 0; i < vd->num_engines; i++)
		info[2 + vd->num_ceqs + i].name = "doorbells";

	err = vnicd_find_vqs(vd->vdev, n, vd->vqs, info);
	if (err)
		dev_err(&vd->vdev->dev, "cannot set up its %u queues: %d\n", n, err);
	else
		for (i = 0; i < vd->num_engines; i++)
			vd->engines[i].vq = vd->vqs[2 + vd->num_ceqs + i];
out:
	kfree(info);
	if (err) {
		kfree(vd->vqs);
		vd->vqs = NULL;
	}
	return err;
}

/*
 * Only after the device was reset. Commands that it has not answered are still in
 * their queue; del_vqs() would leak their descriptors, which virtio allocates.
 */
static void vnicd_delete_queues(struct vnicd_dev *vd)
{
	unsigned int i, n = 2 + vd->num_ceqs + vd->num_engines;

	if (!vd->vqs)
		return;
	for (i = 0; i < n; i++)
		while (virtqueue_detach_unused_buf(vd->vqs[i]))
			;
	vd->vdev->config->del_vqs(vd->vdev);
	kfree(vd->vqs);
}

/* Completion event queues are for one processor each, if they have own interrupts. */
static void vnicd_spread_interrupts(struct vnicd_dev *vd)
{
	unsigned int i, cpu;

	for (i = 0; i < vd->num_ceqs; i++) {
		cpu = cpumask_local_spread(i, dev_to_node(&vd->vdev->dev));
		virtqueue_set_affinity(vd->vqs[2 + i], cpumask_of(cpu));
	}
}

static int vnicd_start_events(struct vnicd_dev *vd)
{
	unsigned int i;
	int err;

	err = vnicd_eq_start(&vd->aeq, vd->vqs[1], true);
	for (i = 0; i < vd->num_ceqs && !err; i++)
		err = vnicd_eq_start(&vd->ceqs[i], vd->vqs[2 + i], false);
	return err;
}

static void vnicd_stop_events(struct vnicd_dev *vd)
{
	unsigned int i;

	vnicd_eq_stop(&vd->aeq);
	for (i = 0; i < vd->num_ceqs; i++)
		vnicd_eq_stop(&vd->ceqs[i]);
}

/* Limits, doorbells, the AH table: the device needs them first. */
static int vnicd_start_device(struct vnicd_dev *vd)
{
	struct device *dev = &vd->vdev->dev;
	unsigned int i;
	int err;

	err = vnicd_cmd_query_device(vd, &vd->lim);
	if (err) {
		dev_err(dev, "cannot query the device: %d\n", err);
		return err;
	}
	if (!(vd->lim.caps & VNICD_CAP_LOCAL_DMA_LKEY)) {
		dev_err(dev, "the device has no local DMA key, which this module needs\n");
		return -EOPNOTSUPP;
	}

	for (i = 0; i < vd->num_engines; i++) {
		struct vnicd_engine *e = &vd->engines[i];

		e->db = alloc_pages_exact(sizeof(*e->db), GFP_KERNEL | __GFP_ZERO);
		if (!e->db)
			return -ENOMEM;
		if (!i)
			vnicd_set_nonce(vd);
		err = vnicd_cmd_set_doorbells(vd, i, e->db);
		if (err) {
			dev_err(dev, "cannot set doorbells of engine %u: %d\n", i, err);
			return err;
		}
	}

	err = vnicd_ah_table_init(vd);
	if (err)
		return err;
	err = vnicd_cmd_set_ah_table(vd, vd->ah_table, vd->ah_entries, vd->ah_table_size);
	if (err)
		dev_err(dev, "cannot set the address handle table: %d\n", err);
	return err;
}

/*
 * The system ends, perhaps by kexec. The queues stop later: the machine is reset, or,
 * on newer kernels, the virtio bus resets its devices. Until then the device goes on.
 */
static int vnicd_reboot(struct notifier_block *nb, unsigned long action, void *data)
{
	vnicd_clear_nonce(container_of(nb, struct vnicd_dev, reboot_nb));
	return NOTIFY_DONE;
}

static void vnicd_init(struct vnicd_dev *vd, struct virtio_device *vdev)
{
	unsigned int i;

	vd->vdev = vdev;
	mutex_init(&vd->reg_lock);
	mutex_init(&vd->reset_lock);
	init_waitqueue_head(&vd->fence_wait);
	xa_init_flags(&vd->qps, XA_FLAGS_LOCK_IRQ);
	xa_init_flags(&vd->cqs, XA_FLAGS_LOCK_IRQ);
	xa_init_flags(&vd->srqs, XA_FLAGS_LOCK_IRQ);
	xa_init_flags(&vd->phys_keys, XA_FLAGS_LOCK_IRQ);
	xa_init_flags(&vd->counters, XA_FLAGS_ALLOC1);
	spin_lock_init(&vd->ah_lock);
	spin_lock_init(&vd->grave_lock);
	INIT_LIST_HEAD(&vd->graves);
	INIT_WORK(&vd->fail_work, vnicd_fail_work);
	INIT_WORK(&vd->config_work, vnicd_config_work);
	INIT_WORK(&vd->flush_work, vnicd_flush_work);
	INIT_DELAYED_WORK(&vd->fence_work, vnicd_fence_work);
	vd->reboot_nb.notifier_call = vnicd_reboot;
	vnicd_netdev_init(vd);
	vnicd_fault_start(vd);
	vnicd_eq_setup(vd, &vd->aeq, true);
	for (i = 0; i < VNICD_MAX_CEQS; i++)
		vnicd_eq_setup(vd, &vd->ceqs[i], false);
}

/*
 * Takes down whatever exists, so it serves remove and a failed probe. Order:
 * consumers, netdev, events, device, memory.
 */
static void vnicd_teardown(struct vnicd_dev *vd)
{
	struct virtio_device *vdev = vd->vdev;
	unsigned int i;

	WRITE_ONCE(vd->removing, true);
	/* Either this sees that the device is dead, or vnicd_die() that it is removed. */
	smp_mb();
	if (vnicd_dead(vd))
		vnicd_fence_now(vd);
	/* Without effect if it is not registered. */
	unregister_reboot_notifier(&vd->reboot_nb);
	vnicd_ib_unregister(vd);
	vnicd_netdev_stop(vd);
	vnicd_stop_events(vd);
	vnicd_fault_stop(vd);

	vnicd_reset(vd);
	vnicd_delete_queues(vd);
	/*
	 * Interrupts have stopped; until now they could schedule tasklets and works,
	 * which do nothing. A work is cancelled after those that can queue it.
	 */
	vnicd_stop_events(vd);
	if (vd->wq) {
		cancel_work_sync(&vd->config_work);
		cancel_work_sync(&vd->port_work);
		cancel_delayed_work_sync(&vd->fence_work);
		cancel_work_sync(&vd->fail_work);
		cancel_work_sync(&vd->flush_work);
		destroy_workqueue(vd->wq);
	}
	if (vd->event_wq)
		destroy_workqueue(vd->event_wq);
	vnicd_recovery_free(vd);

	vnicd_empty_graves(vd);
	vnicd_ah_table_free(vd);
	for (i = 0; i < vd->num_engines; i++)
		if (vd->engines[i].db)
			free_pages_exact(vd->engines[i].db, sizeof(*vd->engines[i].db));
	vnicd_eq_free(&vd->aeq);
	for (i = 0; i < vd->num_ceqs; i++)
		vnicd_eq_free(&vd->ceqs[i]);
	vnicd_cmdq_free(&vd->cmdq);

	xa_destroy(&vd->qps);
	xa_destroy(&vd->cqs);
	xa_destroy(&vd->srqs);
	xa_destroy(&vd->phys_keys);
	xa_destroy(&vd->counters);
	vdev->priv = NULL;
	/* Last, because buried memory refers to it. */
	if (vd->ib)
		put_device(&vd->ib->base.dev);
	kfree(vd);
}

static int vnicd_probe(struct virtio_device *vdev)
{
	struct vnicd_dev *vd;
	int err;

	vd = kzalloc(sizeof(*vd), GFP_KERNEL);
	if (!vd)
		return -ENOMEM;
	vnicd_init(vd, vdev);
	err = vnicd_read_config(vd);
	if (err) {
		kfree(vd);
		return err;
	}
	vdev->priv = vd;

	err = -ENOMEM;
	vd->wq = alloc_ordered_workqueue("vnicd/%s", 0, dev_name(&vdev->dev));
	vd->event_wq = alloc_ordered_workqueue("vnicd/%s/ev", WQ_MEM_RECLAIM,
					       dev_name(&vdev->dev));
	if (!vd->wq || !vd->event_wq || vnicd_recovery_init(vd))
		goto err;
	vd->ib = ib_alloc_device(vnicd_ibdev, base);
	if (!vd->ib)
		goto err;
	vd->ib->vd = vd;
	get_device(&vd->ib->base.dev);

	err = vnicd_find_queues(vd);
	if (err)
		goto err_ib;
	err = vnicd_cmdq_init(&vd->cmdq, vd, vd->vqs[0]);
	if (err)
		goto err_ib;
	vnicd_spread_interrupts(vd);
	virtio_device_ready(vdev);
	err = vnicd_start_events(vd);
	if (err)
		goto err_ib;
	err = vnicd_start_device(vd);
	if (err)
		goto err_ib;
	err = register_reboot_notifier(&vd->reboot_nb);
	if (err)
		goto err_ib;
	err = vnicd_netdev_start(vd);
	if (err)
		goto err_ib;
	err = vnicd_ib_register(vd);
	if (err)
		goto err_ib;
	return 0;

err_ib:
	WRITE_ONCE(vd->removing, true);
	/* Never registered, so ib_core does not release it. */
	ib_dealloc_device(&vd->ib->base);
err:
	vnicd_teardown(vd);
	return err;
}

static void vnicd_remove(struct virtio_device *vdev)
{
	vnicd_teardown(vdev->priv);
}

static void vnicd_config_changed(struct virtio_device *vdev)
{
	struct vnicd_dev *vd = vdev->priv;

	if (vd)
		vnicd_check_config(vd);
}

#ifdef CONFIG_PM_SLEEP
/* Neither the device's state nor that of its peers can be saved. */
static int vnicd_freeze(struct virtio_device *vdev)
{
	dev_err(&vdev->dev, "cannot be suspended: unbind it or unload vnicd first\n");
	return -EBUSY;
}

static int vnicd_restore(struct virtio_device *vdev)
{
	return -EIO;
}
#endif

static const struct virtio_device_id vnicd_id_table[] = {
	{ VNICD_VIRTIO_ID, VIRTIO_DEV_ANY_ID },
	{ VNICD_VIRTIO_ID_RDMA, VIRTIO_DEV_ANY_ID },
	{ 0 },
};
MODULE_DEVICE_TABLE(virtio, vnicd_id_table);

static const unsigned int vnicd_features[] = {
	VNICD_FEATURE_NONCE,
};

static struct virtio_driver vnicd_driver = {
	.driver.name = KBUILD_MODNAME,
	.driver.owner = THIS_MODULE,
	.feature_table = vnicd_features,
	.feature_table_size = ARRAY_SIZE(vnicd_features),
	.id_table = vnicd_id_table,
	.validate = vnicd_validate,
	.probe = vnicd_probe,
	.remove = vnicd_remove,
	.config_changed = vnicd_config_changed,
#ifdef CONFIG_PM_SLEEP
	.freeze = vnicd_freeze,
	.restore = vnicd_restore,
#endif
};

/* Sizes that the device relies on; a test compares the offsets. */
static void __maybe_unused vnicd_check_abi(void)
{
	BUILD_BUG_ON(sizeof(struct vnicd_config) != 128);
	BUILD_BUG_ON(sizeof(struct vnicd_ring) != 24);
	BUILD_BUG_ON(sizeof(struct vnicd_doorbells) != 3 * SZ_4K);
	BUILD_BUG_ON(sizeof(struct vnicd_ah) != 64);
	BUILD_BUG_ON(sizeof(struct vnicd_event) != 64);
	BUILD_BUG_ON(offsetof(struct rxe_queue_buf, producer_index) != 128);
	BUILD_BUG_ON(offsetof(struct rxe_queue_buf, consumer_index) != 256);
	BUILD_BUG_ON(offsetof(struct rxe_queue_buf, data) != 384);
	BUILD_BUG_ON(sizeof(struct rxe_send_wqe) != 208);
	BUILD_BUG_ON(sizeof(struct rxe_recv_wqe) != 40);
}

static int __init vnicd_module_init(void)
{
	int err;

	vnicd_fence_wq = alloc_workqueue("vnicd_fence", WQ_UNBOUND | WQ_MEM_RECLAIM, 0);
	if (!vnicd_fence_wq)
		return -ENOMEM;
	err = -ENOMEM;
	vnicd_recovery_wq = alloc_workqueue("vnicd_recovery", WQ_UNBOUND, 0);
	if (!vnicd_recovery_wq)
		goto err_fence;
	err = vnicd_fault_init();
	if (err)
		goto err_recovery;
	err = register_virtio_driver(&vnicd_driver);
	if (err)
		goto err_fault;
	/* Its devices are probed by the driver above at once. */
	err = vnicd_ivshmem_register();
	if (err)
		goto err_driver;
	return 0;

err_driver:
	unregister_virtio_driver(&vnicd_driver);
err_fault:
	vnicd_fault_exit();
err_recovery:
	destroy_workqueue(vnicd_recovery_wq);
err_fence:
	destroy_workqueue(vnicd_fence_wq);
	return err;
}

static void __exit vnicd_module_exit(void)
{
	vnicd_ivshmem_unregister();
	unregister_virtio_driver(&vnicd_driver);
	/* Waits for a recovery in progress, which finds no driver to bind. */
	destroy_workqueue(vnicd_recovery_wq);
	destroy_workqueue(vnicd_fence_wq);
	vnicd_fault_exit();
}

module_init(vnicd_module_init);
module_exit(vnicd_module_exit);

MODULE_DESCRIPTION("vnicd paravirtual RDMA HCA");
MODULE_AUTHOR("The vnicd authors");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1");
/* ib_core unregisters by driver id; without uverbs the device has no users. */
MODULE_SOFTDEP("pre: ib_uverbs");
