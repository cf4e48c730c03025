/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command queue. A command has a slot with a request and a response buffer; slot i has descriptors 2i and 2i+1. The
 * caller waits until the device's thread has taken the answer:
 *
 *   FREE -> TAKEN (the caller writes the request) -> SUBMITTED (the device has it) -> DONE -> FREE
 *
 * If an answer does not arrive in time the device is unusable: the command may still be executed later, and nothing
 * that it names is used again. FAULT_SLOT is for the device's thread, which waits for nothing.
 */
#include <string.h>

#include "internal.h"

static const char *const status_texts[] = {
	[VNICD_EINVAL] = "malformed or contradicting request",
	[VNICD_ENOMEM] = "a limit of this application is reached",
	[VNICD_ENOENT] = "no such object",
	[VNICD_EBUSY] = "the object is still in use",
	[VNICD_EOPNOTSUPP] = "not supported",
	[VNICD_EFAULT] = "an address outside of the memory",
	[VNICD_EPERM] = "not permitted",
	[VNICD_EIO] = "the device failed; see vnicd's log",
};

static const int status_codes[] = {
	[VNICD_EINVAL] = -EINVAL, [VNICD_ENOMEM] = -ENOMEM,         [VNICD_ENOENT] = -ENOENT, [VNICD_EBUSY] = -EBUSY,
	[VNICD_EOPNOTSUPP] = -EOPNOTSUPP, [VNICD_EFAULT] = -EFAULT, [VNICD_EPERM] = -EPERM,   [VNICD_EIO] = -EIO,
};

int command_init(struct vnicd_device *dev)
{
	pthread_condattr_t attr;
	int i;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&dev->cmd_cond, &attr);
	pthread_condattr_destroy(&attr);
	for (i = 0; i <= FAULT_SLOT; i++) {
		struct slot *s = &dev->slots[i];

		s->req = mem_alloc(&dev->mem, i == FAULT_SLOT ? PAGE_BYTES : VNICD_CMD_MAX);
		s->resp = s->req ? mem_alloc(&dev->mem, RESP_BYTES) : NULL;
		if (!s->resp)
			return -ENOMEM;
	}
	return 0;
}

/* Submits slot i, whose request has n bytes. Under cmd_lock. */
static void submit(struct vnicd_device *dev, uint16_t i, uint32_t n)
{
	struct queue *q = &dev->queues[0];
	struct slot *s = &dev->slots[i];

	queue_desc(q, 2 * i, mem_pa(&dev->mem, s->req), n, false, 2 * i + 1);
	queue_desc(q, 2 * i + 1, mem_pa(&dev->mem, s->resp), RESP_BYTES, true, -1);
	s->state = SLOT_SUBMITTED;
	queue_put(q, 2 * i);
	queue_kick(q);
}

/* Waits for a change of slots or of the device, under cmd_lock. */
static bool wait_until(struct vnicd_device *dev, uint64_t deadline)
{
	struct timespec ts = { .tv_sec = (time_t)(deadline / 1000), .tv_nsec = (long)(deadline % 1000) * 1000000 };

	return pthread_cond_timedwait(&dev->cmd_cond, &dev->cmd_lock, &ts) != ETIMEDOUT;
}

static uint8_t *put_pages(uint8_t *p, uint64_t pa, uint32_t n)
{
	for (; n; n--, pa += PAGE_BYTES, p += sizeof(pa))
		memcpy(p, &pa, sizeof(pa));
	return p;
}

/* Checks a response of which the device says that it wrote n bytes, and copies the payload. */
static int parse(struct vnicd_device *dev, const struct command *c, const uint8_t *resp, uint32_t n)
{
	struct vnicd_resp h;

	if (n < sizeof(h) || n > RESP_BYTES)
		goto malformed;
	memcpy(&h, resp, sizeof(h));
	if (h.status != VNICD_OK) {
		bool known = h.status < sizeof(status_codes) / sizeof(status_codes[0]);

		return set_error(known ? status_codes[h.status] : -EIO, "command %u: %s", c->op,
				 known ? status_texts[h.status] : "unknown status");
	}
	if (h.length > n - sizeof(h) || h.length < c->resp_min)
		goto malformed;
	if (c->resp) {
		memset(c->resp, 0, c->resp_size);
		memcpy(c->resp, resp + sizeof(h), h.length < c->resp_size ? h.length : c->resp_size);
	}
	return 0;
malformed:
	device_fail(dev, -EPROTO, "malformed response of %u bytes to command %u", n, c->op);
	return device_check(dev);
}

int command_run(struct vnicd_device *dev, const struct command *c)
{
	const uint64_t length = c->size + ((uint64_t)c->n + c->n2) * sizeof(uint64_t);
	const uint64_t deadline = now_ms() + dev->timeout_ms;
	struct vnicd_req h = { .opcode = c->op, .length = (uint32_t)length };
	struct slot *s;
	uint8_t *p;
	uint16_t i;
	int err;

	if (length > VNICD_CMD_MAX - sizeof(h))
		return set_error(-EINVAL, "command %u with %u pages is longer than %u bytes", c->op, c->n + c->n2,
				 VNICD_CMD_MAX);
	pthread_mutex_lock(&dev->cmd_lock);
	for (;;) {
		err = device_check(dev);
		if (err)
			goto out;
		for (i = 0; i < CMD_SLOTS && dev->slots[i].state != SLOT_FREE; i++)
			;
		if (i < CMD_SLOTS)
			break;
		if (!wait_until(dev, deadline)) {
			err = set_error(-ETIMEDOUT, "command %u: %u others are outstanding", c->op, CMD_SLOTS);
			goto out;
		}
	}
	s = &dev->slots[i];
	s->state = SLOT_TAKEN;
	pthread_mutex_unlock(&dev->cmd_lock);
	memcpy(s->req, &h, sizeof(h));
	p = s->req + sizeof(h);
	if (c->size)
		memcpy(p, c->fixed, c->size);
	p = put_pages(p + c->size, c->pa, c->n);
	put_pages(p, c->pa2, c->n2);
	pthread_mutex_lock(&dev->cmd_lock);
	submit(dev, i, (uint32_t)(sizeof(h) + length));
	while (s->state != SLOT_DONE) {
		err = device_check(dev);
		if (err)
			goto out;
		if (!wait_until(dev, deadline) && s->state != SLOT_DONE) {
			pthread_mutex_unlock(&dev->cmd_lock);
			device_fail(dev, -ETIMEDOUT, "vnicd did not answer command %u within %u ms", c->op,
				dev->timeout_ms);
			return device_check(dev);
		}
	}
	pthread_mutex_unlock(&dev->cmd_lock);
	err = parse(dev, c, s->resp, s->written);
	pthread_mutex_lock(&dev->cmd_lock);
	s->state = SLOT_FREE;
	pthread_cond_broadcast(&dev->cmd_cond);
out:
	pthread_mutex_unlock(&dev->cmd_lock);
	return err;
}

/* Submits the refusal of the oldest page fault, if FAULT_SLOT is free. Under cmd_lock. Returns the event's buffer. */
static int refuse_next(struct vnicd_device *dev)
{
	const struct vnicd_req h = { .opcode = VNICD_CMD_RESUME_FAULT, .length = sizeof(struct vnicd_resume_fault) };
	const struct vnicd_resume_fault f = { .token = dev->faults[0], .status = VNICD_EFAULT };
	struct slot *s = &dev->slots[FAULT_SLOT];
	uint16_t buf = dev->fault_bufs[0];

	if (!dev->num_faults || s->state != SLOT_FREE)
		return -1;
	dev->num_faults--;
	memmove(dev->faults, dev->faults + 1, dev->num_faults * sizeof(dev->faults[0]));
	memmove(dev->fault_bufs, dev->fault_bufs + 1, dev->num_faults * sizeof(dev->fault_bufs[0]));
	memcpy(s->req, &h, sizeof(h));
	memcpy(s->req + sizeof(h), &f, sizeof(f));
	submit(dev, FAULT_SLOT, sizeof(h) + sizeof(f));
	return buf;
}

/*
 * A page fault (PF-7): all pages of regions are present, so the address is wrong, such as in a region that is being
 * registered. The event's buffer returns to the device with the answer, so that at most QUEUE_SIZE faults wait here.
 */
int command_refuse_fault(struct vnicd_device *dev, uint32_t token, uint16_t buf)
{
	int given;

	pthread_mutex_lock(&dev->cmd_lock);
	dev->faults[dev->num_faults] = token;
	dev->fault_bufs[dev->num_faults++] = buf;
	given = refuse_next(dev);
	pthread_mutex_unlock(&dev->cmd_lock);
	return given < 0 ? 0 : events_give(dev, (uint16_t)given);
}

int command_reap(struct vnicd_device *dev)
{
	int given[2 * FAULT_SLOT + 2], n = 0, got = 0, i;
	uint32_t written;
	uint16_t head;

	pthread_mutex_lock(&dev->cmd_lock);
	/* A round takes at most one answer of each slot, and new answers raise the next interrupt. */
	for (i = 0; i <= FAULT_SLOT; i++) {
		got = queue_get(&dev->queues[0], &head, &written);
		if (got <= 0)
			break;
		dev->slots[head / 2].written = written;
		dev->slots[head / 2].state = head / 2 == FAULT_SLOT ? SLOT_FREE : SLOT_DONE;
		if (head / 2 == FAULT_SLOT) { /* a refused token belongs to an operation that has ended */
			given[n] = refuse_next(dev);
			n += given[n] >= 0;
		}
	}
	pthread_cond_broadcast(&dev->cmd_cond);
	pthread_mutex_unlock(&dev->cmd_lock);
	if (got < 0)
		return set_error_text(-EPROTO, "command queue: the device returned a chain that it did not have");
	for (i = 0; i < n; i++)
		events_give(dev, (uint16_t)given[i]);
	return got > 0; /* maybe more */
}
