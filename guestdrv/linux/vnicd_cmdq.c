// SPDX-License-Identifier: GPL-2.0
/* Command queue mechanics; see vnicd_cmdq.h. */
#include <linux/jiffies.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/virtio.h>

#include "vnicd.h"

/* Interval in which a waiter checks whether the device is gone. */
#define VNICD_CMD_SLICE (HZ / 2)

static unsigned int cmd_timeout_ms = 20000;
module_param(cmd_timeout_ms, uint, 0644);
MODULE_PARM_DESC(cmd_timeout_ms,
		 "milliseconds after which an unanswered command means that the device is lost (default 20000)");

static int vnicd_status_errno(u32 status)
{
	switch (status) {
	case VNICD_OK:		return 0;
	case VNICD_EINVAL:	return -EINVAL;
	case VNICD_ENOMEM:	return -ENOMEM;
	case VNICD_ENOENT:	return -ENOENT;
	case VNICD_EBUSY:	return -EBUSY;
	case VNICD_EOPNOTSUPP:	return -EOPNOTSUPP;
	case VNICD_EFAULT:	return -EFAULT;
	case VNICD_EPERM:	return -EPERM;
	default:		return -EIO;	/* of a later device, too */
	}
}

int vnicd_cmdq_init(struct vnicd_cmdq *q, struct vnicd_dev *vd,
		    struct virtqueue *vq)
{
	unsigned int i, n;

	spin_lock_init(&q->lock);
	init_waitqueue_head(&q->wait);
	INIT_LIST_HEAD(&q->free);
	q->vd = vd;
	q->vq = vq;
	q->dead = false;

	/* A chain has at most three descriptors. */
	n = min_t(unsigned int, VNICD_CMDQ_SLOTS, virtqueue_get_vring_size(vq) / 3);
	/* With few slots, half of them are reserved. */
	q->num_reserved = n >= 2 * VNICD_CMDQ_RESERVED ? VNICD_CMDQ_RESERVED : n / 2;
	if (!n) {
		dev_err(&vd->vdev->dev, "command queue has %u entries, need 3\n",
			virtqueue_get_vring_size(vq));
		return -EINVAL;
	}

	for (i = 0; i < n; i++) {
		struct vnicd_slot *slot = &q->slots[i];

		slot->req = (void *)get_zeroed_page(GFP_KERNEL);
		slot->resp = (void *)get_zeroed_page(GFP_KERNEL);
		q->num_slots = i + 1;
		if (!slot->req || !slot->resp) {
			vnicd_cmdq_free(q);
			return -ENOMEM;
		}
		init_completion(&slot->done);
		slot->state = VNICD_SLOT_FREE;
		list_add_tail(&slot->entry, &q->free);
		q->num_free++;
	}
	return 0;
}

void vnicd_cmdq_free(struct vnicd_cmdq *q)
{
	unsigned int i;

	for (i = 0; i < q->num_slots; i++) {
		free_page((unsigned long)q->slots[i].req);
		free_page((unsigned long)q->slots[i].resp);
		kfree(q->slots[i].list);
		q->slots[i].req = NULL;
		q->slots[i].resp = NULL;
		q->slots[i].list = NULL;
	}
	q->num_slots = 0;
	q->num_free = 0;
	INIT_LIST_HEAD(&q->free);
}

static void vnicd_slot_put_locked(struct vnicd_cmdq *q, struct vnicd_slot *slot)
{
	slot->state = VNICD_SLOT_FREE;
	kfree(slot->list);
	slot->list = NULL;
	list_add_tail(&slot->entry, &q->free);
	q->num_free++;
	wake_up(&q->wait);
}

static void vnicd_cmdq_collect_locked(struct vnicd_cmdq *q)
{
	struct vnicd_slot *slot;
	unsigned int len;

	while ((slot = virtqueue_get_buf(q->vq, &len))) {
		slot->written = len;
		if (slot->state == VNICD_SLOT_BUSY) {
			slot->state = VNICD_SLOT_DONE;
			complete(&slot->done);
		} else {
			/* The waiter has given up. */
			vnicd_slot_put_locked(q, slot);
		}
		/* A lost device that does respond. */
		if (q->dead)
			vnicd_revive(q->vd);
	}
}

void vnicd_cmdq_irq(struct vnicd_cmdq *q)
{
	unsigned long flags;

	spin_lock_irqsave(&q->lock, flags);
	do {
		virtqueue_disable_cb(q->vq);
		vnicd_cmdq_collect_locked(q);
	} while (!virtqueue_enable_cb(q->vq) && !virtqueue_is_broken(q->vq));
	spin_unlock_irqrestore(&q->lock, flags);
}

/* Their waiters look at the state of slot and device. */
static void vnicd_cmdq_wake_locked(struct vnicd_cmdq *q)
{
	unsigned int i;

	for (i = 0; i < q->num_slots; i++)
		if (q->slots[i].state == VNICD_SLOT_BUSY)
			complete(&q->slots[i].done);
}

void vnicd_cmdq_kill(struct vnicd_cmdq *q)
{
	unsigned long flags;

	spin_lock_irqsave(&q->lock, flags);
	q->dead = true;
	vnicd_cmdq_wake_locked(q);
	spin_unlock_irqrestore(&q->lock, flags);
	wake_up_all(&q->wait);
}

void vnicd_cmdq_after_reset(struct vnicd_cmdq *q)
{
	unsigned long flags;

	spin_lock_irqsave(&q->lock, flags);
	vnicd_cmdq_collect_locked(q);
	vnicd_cmdq_wake_locked(q);
	spin_unlock_irqrestore(&q->lock, flags);
}

/*
 * A broken queue is one that a malformed used ring or the removal of the device has
 * ended. It says nothing about what the device does with the commands in it.
 */
static void vnicd_cmdq_check_broken(struct vnicd_cmdq *q)
{
	if (virtqueue_is_broken(q->vq))
		vnicd_fail(q->vd, "its command queue is broken");
}

static struct vnicd_slot *vnicd_slot_try_get(struct vnicd_cmdq *q, unsigned int keep,
					     bool *dead)
{
	struct vnicd_slot *slot = NULL;
	unsigned long flags;

	spin_lock_irqsave(&q->lock, flags);
	*dead = q->dead || virtqueue_is_broken(q->vq);
	if (!*dead && q->num_free > keep) {
		slot = list_first_entry(&q->free, struct vnicd_slot, entry);
		list_del(&slot->entry);
		q->num_free--;
	}
	spin_unlock_irqrestore(&q->lock, flags);
	return slot;
}

static struct vnicd_slot *vnicd_slot_get(struct vnicd_cmdq *q, unsigned int flags)
{
	unsigned int keep = flags & VNICD_EXEC_RESERVED ? 0 : q->num_reserved;
	unsigned long end = jiffies + msecs_to_jiffies(cmd_timeout_ms);
	struct vnicd_slot *slot = NULL;
	bool dead = false;

	while (!(slot = vnicd_slot_try_get(q, keep, &dead)) && !dead) {
		if (flags & VNICD_EXEC_NO_SLOT_WAIT)
			return ERR_PTR(-ENOBUFS);
		if (time_after(jiffies, end)) {
			/* The commands before it were not answered either. */
			if (flags & VNICD_EXEC_RELEASE)
				vnicd_time_out(q->vd);
			return ERR_PTR(-EIO);
		}
		wait_event_timeout(q->wait,
				   (slot = vnicd_slot_try_get(q, keep, &dead)) || dead,
				   VNICD_CMD_SLICE);
		if (slot)
			return slot;
	}
	if (!slot) {
		vnicd_cmdq_check_broken(q);
		return ERR_PTR(-EIO);
	}
	return slot;
}

static int vnicd_slot_submit(struct vnicd_cmdq *q, struct vnicd_slot *slot,
			     size_t req_len, size_t list_len, size_t resp_len)
{
	struct scatterlist req, more, resp;
	struct scatterlist *sgs[3];
	unsigned int out = 0;
	unsigned long flags;
	bool kick;
	int err;

	sg_init_one(&req, slot->req, req_len);
	sgs[out++] = &req;
	if (list_len) {
		sg_init_one(&more, slot->list, list_len);
		sgs[out++] = &more;
	}
	sg_init_one(&resp, slot->resp, resp_len);
	sgs[out] = &resp;

	spin_lock_irqsave(&q->lock, flags);
	if (q->dead) {
		vnicd_slot_put_locked(q, slot);
		spin_unlock_irqrestore(&q->lock, flags);
		return -EIO;
	}
	reinit_completion(&slot->done);
	slot->state = VNICD_SLOT_BUSY;
	err = virtqueue_add_sgs(q->vq, sgs, out, 1, slot, GFP_ATOMIC);
	if (err) {
		vnicd_slot_put_locked(q, slot);
		spin_unlock_irqrestore(&q->lock, flags);
		vnicd_cmdq_check_broken(q);
		return -EIO;
	}
	kick = virtqueue_kick_prepare(q->vq);
	spin_unlock_irqrestore(&q->lock, flags);

	/* Exits to the host, so not with the lock held. */
	if (kick)
		virtqueue_notify(q->vq);
	return 0;
}

/*
 * 0 if the device answered; otherwise it is dead, and the slot an orphan. If
 * @release, it was also reset.
 */
static int vnicd_slot_wait(struct vnicd_cmdq *q, struct vnicd_slot *slot, bool release)
{
	unsigned long end = jiffies + msecs_to_jiffies(cmd_timeout_ms);
	unsigned long flags;

	for (;;) {
		bool answered, over;

		wait_for_completion_timeout(&slot->done, VNICD_CMD_SLICE);
		spin_lock_irqsave(&q->lock, flags);
		/* Also covers a lost interrupt. */
		vnicd_cmdq_collect_locked(q);
		answered = slot->state == VNICD_SLOT_DONE;
		over = release ? vnicd_quiet(q->vd) : q->dead;
		if (!answered && over)
			slot->state = VNICD_SLOT_ORPHAN;
		spin_unlock_irqrestore(&q->lock, flags);

		if (answered)
			return 0;
		if (over)
			return -EIO;
		vnicd_cmdq_check_broken(q);
		if (time_after(jiffies, end))
			vnicd_time_out(q->vd);
	}
}

/* The page is shared with the device: read each word once, then validate. */
static int vnicd_slot_result(struct vnicd_cmdq *q, struct vnicd_slot *slot,
			     u16 opcode, void *resp, size_t resp_len)
{
	struct device *dev = &q->vd->vdev->dev;
	struct vnicd_resp hdr;
	u32 status, length;

	if (slot->written < sizeof(hdr) || slot->written > sizeof(hdr) + resp_len) {
		dev_err(dev, "command %u: response of %u bytes, expected %zu\n",
			opcode, slot->written, sizeof(hdr) + resp_len);
		goto malformed;
	}
	memcpy(&hdr, slot->resp, sizeof(hdr));
	status = le32_to_cpu(hdr.status);
	length = le32_to_cpu(hdr.length);
	if (status != VNICD_OK) {
		dev_dbg(dev, "command %u: status %u\n", opcode, status);
		return vnicd_status_errno(status);
	}
	if (length != resp_len || slot->written != sizeof(hdr) + resp_len) {
		dev_err(dev, "command %u: payload of %u bytes (%u written), expected %zu\n",
			opcode, length, slot->written, resp_len);
		goto malformed;
	}
	if (resp_len)
		memcpy(resp, slot->resp + sizeof(hdr), resp_len);
	return 0;

malformed:
	/* It is unknown what the device has done, and with which memory. */
	vnicd_fail(q->vd, "malformed response to a command");
	return -EIO;
}

int vnicd_cmdq_exec(struct vnicd_cmdq *q, u16 opcode,
		    const void *req, size_t req_len,
		    void *list, size_t list_len,
		    void *resp, size_t resp_len, unsigned int exec)
{
	size_t room = sizeof(struct vnicd_resp) + resp_len;
	struct vnicd_slot *slot;
	struct vnicd_req *hdr;
	unsigned long flags;
	int err;

	might_sleep();
	err = -EINVAL;
	if (WARN_ON_ONCE(sizeof(*hdr) + req_len > PAGE_SIZE || room > PAGE_SIZE))
		goto err_list;
	err = -E2BIG;
	if (sizeof(*hdr) + req_len + list_len > VNICD_CMD_MAX)
		goto err_list;
	slot = vnicd_slot_get(q, exec);
	if (IS_ERR(slot)) {
		err = PTR_ERR(slot);
		goto err_list;
	}

	slot->list = list;
	hdr = slot->req;
	hdr->opcode = cpu_to_le16(opcode);
	hdr->reserved = 0;
	hdr->length = cpu_to_le32(req_len + list_len);
	if (req_len)
		memcpy(hdr + 1, req, req_len);
	memset(slot->resp, 0, room);

	err = vnicd_slot_submit(q, slot, sizeof(*hdr) + req_len, list_len, room);
	if (err)
		return err;

	err = vnicd_slot_wait(q, slot, exec & VNICD_EXEC_RELEASE);
	if (err)
		return err;

	err = vnicd_slot_result(q, slot, opcode, resp, resp_len);
	spin_lock_irqsave(&q->lock, flags);
	vnicd_slot_put_locked(q, slot);
	spin_unlock_irqrestore(&q->lock, flags);

	/* It may have lost its state: check the generation. */
	if (err == -EIO || (err == -ENOENT && !(exec & VNICD_EXEC_MAY_MISS)))
		vnicd_check_config(q->vd);
	return err;

err_list:
	kfree(list);
	return err;
}
