/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Command queue: only its mechanics: chains, slots and time-outs. The commands
 * are in vnicd_cmd.c.
 */
#ifndef VNICD_CMDQ_H
#define VNICD_CMDQ_H

#include <linux/completion.h>
#include <linux/list.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/wait.h>

struct virtqueue;
struct vnicd_dev;

/*
 * A slot is one pending command. Its two pages are allocated once, because a
 * destroy command must not fail for lack of memory.
 *
 *	free -> busy -> done -> free
 *	          \-> orphan (the waiter gave up) -> free when the device answers
 *
 * The device keeps an orphan's pages and list, because it may still execute the
 * command; they are freed only after a reset. The waiter for a release
 * (VNICD_EXEC_RELEASE) gives up only after the reset.
 */
enum vnicd_slot_state {
	VNICD_SLOT_FREE,
	VNICD_SLOT_BUSY,
	VNICD_SLOT_DONE,
	VNICD_SLOT_ORPHAN,
};

struct vnicd_slot {
	struct list_head entry;		/* in vnicd_cmdq.free */
	struct completion done;
	enum vnicd_slot_state state;
	u32 written;			/* bytes the device says it wrote */
	void *req;			/* one page */
	void *resp;			/* one page */
	void *list;			/* see vnicd_cmdq_exec() */
};

#define VNICD_CMDQ_SLOTS 32
/* The last of these are only for VNICD_EXEC_RESERVED commands. */
#define VNICD_CMDQ_RESERVED 4

/* Memory reclaim waits for this command. */
#define VNICD_EXEC_RESERVED	(1U << 0)
/* -ENOENT is a normal answer, not a sign of lost state. */
#define VNICD_EXEC_MAY_MISS	(1U << 1)
/* Pages become free by the answer: it is waited for until the device is reset. */
#define VNICD_EXEC_RELEASE	(1U << 2)
/* The caller holds locks: -ENOBUFS if no slot is free; nothing has happened then. */
#define VNICD_EXEC_NO_SLOT_WAIT	(1U << 3)

struct vnicd_cmdq {
	struct vnicd_dev *vd;
	struct virtqueue *vq;
	wait_queue_head_t wait;		/* for a free slot */
	unsigned int num_slots;
	unsigned int num_reserved;

	spinlock_t lock;		/* guards the fields below, and vq */
	bool dead;
	unsigned int num_free;
	struct list_head free;
	struct vnicd_slot slots[VNICD_CMDQ_SLOTS];
};

int vnicd_cmdq_init(struct vnicd_cmdq *q, struct vnicd_dev *vd,
		    struct virtqueue *vq);
/* Only after the device was reset. */
void vnicd_cmdq_free(struct vnicd_cmdq *q);

/*
 * Sends one command and waits for its answer. May sleep, and cannot be
 * interrupted; returns within a bounded time in any case. If the device does not
 * answer, or its queue is broken, it counts as lost (vnicd_dead()).
 *
 * @req, @req_len: payload, copied; together with the header up to a page
 * @list, @list_len: more payload, or NULL; from kmalloc() and always taken over:
 *	freed when the device can no longer read it
 * @resp, @resp_len: buffer for the payload of the response, which must have
 *	exactly this length
 * @flags: VNICD_EXEC_*
 *
 * Allocates nothing except through virtio, atomically; failure is harmless.
 *
 * 0, or the errno of the device's status, or -EIO: the device is dead. An error of
 * a device that is not dead means that it does not execute the command any more.
 */
int vnicd_cmdq_exec(struct vnicd_cmdq *q, u16 opcode,
		    const void *req, size_t req_len,
		    void *list, size_t list_len,
		    void *resp, size_t resp_len, unsigned int flags);

/* From now on every command, except pending releases, ends with -EIO. */
void vnicd_cmdq_kill(struct vnicd_cmdq *q);
/* The device was reset: collects its last answers and ends the pending releases. */
void vnicd_cmdq_after_reset(struct vnicd_cmdq *q);

/* Virtqueue callback: collects answers. */
void vnicd_cmdq_irq(struct vnicd_cmdq *q);

#endif /* VNICD_CMDQ_H */
