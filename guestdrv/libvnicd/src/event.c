/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Event queues: the device's thread takes events. Asynchronous ones keep their buffer until vnicd_get_event returns
 * them, so that the device holds back what the program does not take. Completion events go to their CQ's eventfd.
 */
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "internal.h"

int events_init(struct vnicd_device *dev)
{
	uint16_t i;

	dev->event_bufs = mem_alloc(&dev->mem, QUEUE_SIZE * sizeof(struct vnicd_event));
	if (!dev->event_bufs)
		return -ENOMEM;
	for (i = 0; i < QUEUE_SIZE; i++) {
		queue_desc(&dev->queues[1], i, mem_pa(&dev->mem, dev->event_bufs + i * sizeof(struct vnicd_event)),
			   sizeof(struct vnicd_event), true, -1);
		queue_put(&dev->queues[1], i);
	}
	queue_kick(&dev->queues[1]);
	return 0;
}

int events_give(struct vnicd_device *dev, uint16_t buf)
{
	pthread_mutex_lock(&dev->event_lock);
	queue_put(&dev->queues[1], buf);
	queue_kick(&dev->queues[1]);
	pthread_mutex_unlock(&dev->event_lock);
	return 0;
}

int events_take(struct vnicd_device *dev)
{
	struct vnicd_event e;
	uint32_t written;
	uint16_t buf;
	int got, i;

	for (i = 0; i < QUEUE_SIZE; i++) {
		pthread_mutex_lock(&dev->event_lock);
		got = queue_get(&dev->queues[1], &buf, &written);
		if (got > 0 && written >= sizeof(e)) {
			memcpy(&e, dev->event_bufs + buf * sizeof(e), sizeof(e));
			if (e.type != VNICD_EVENT_PAGE_FAULT) {
				uint32_t at = (dev->first_event + dev->num_events++) % QUEUE_SIZE;

				dev->events[at].event = e;
				dev->events[at].buf = buf;
				signal_fd(dev->event_fd);
			}
		}
		pthread_mutex_unlock(&dev->event_lock);
		if (!got)
			return 0;
		if (got < 0 || written < sizeof(e))
			return set_error_text(-EPROTO, "event queue: not a chain of the device, or a short event");
		if (e.type == VNICD_EVENT_PAGE_FAULT)
			command_refuse_fault(dev, e.token, buf);
	}
	return 1; /* maybe more */
}

EXPORT int vnicd_event_fd(const struct vnicd_device *dev)
{
	return dev->event_fd;
}

EXPORT int vnicd_get_event(struct vnicd_device *dev, int timeout_ms, struct vnicd_event *event)
{
	const uint64_t deadline = timeout_ms < 0 ? UINT64_MAX : now_ms() + (uint64_t)timeout_ms;
	struct pollfd p = { .fd = dev->event_fd, .events = POLLIN };

	for (;;) {
		int err, left;

		pthread_mutex_lock(&dev->event_lock);
		if (dev->num_events) {
			*event = dev->events[dev->first_event].event;
			queue_put(&dev->queues[1], dev->events[dev->first_event].buf);
			queue_kick(&dev->queues[1]);
			dev->first_event = (dev->first_event + 1) % QUEUE_SIZE;
			/* The descriptor stays readable while there are events, or the device is unusable. */
			if (!--dev->num_events && !atomic_load(&dev->failed))
				drain_fd(dev->event_fd);
			pthread_mutex_unlock(&dev->event_lock);
			return 0;
		}
		pthread_mutex_unlock(&dev->event_lock);
		err = device_check(dev);
		if (err)
			return err;
		left = timeout_ms < 0 ? -1 : remaining_ms(deadline);
		if (!left || poll(&p, 1, left) == 0)
			return set_error_text(-EAGAIN, "no event");
	}
}

int ceq_init(struct vnicd_device *dev, uint32_t i)
{
	struct queue *q = &dev->queues[2 + i];
	uint16_t b;

	dev->ceq_bufs[i] = mem_alloc(&dev->mem, QUEUE_SIZE * sizeof(struct vnicd_ceqe));
	if (!dev->ceq_bufs[i])
		return -ENOMEM;
	for (b = 0; b < QUEUE_SIZE; b++) {
		queue_desc(q, b, mem_pa(&dev->mem, dev->ceq_bufs[i] + b * sizeof(struct vnicd_ceqe)),
			   sizeof(struct vnicd_ceqe), true, -1);
		queue_put(q, b);
	}
	queue_kick(q);
	return 0;
}

int ceq_take(struct vnicd_device *dev, uint32_t i)
{
	struct queue *q = &dev->queues[2 + i];
	struct vnicd_ceqe e;
	struct vnicd_cq *cq;
	uint32_t written;
	uint16_t buf;
	int n, got;

	for (n = 0; n < QUEUE_SIZE; n++) {
		got = queue_get(q, &buf, &written);
		if (!got)
			return 0;
		if (got < 0 || written < sizeof(e))
			return set_error_text(-EPROTO,
					      "completion events: not a chain of the device, or a short event");
		memcpy(&e, dev->ceq_bufs[i] + buf * sizeof(e), sizeof(e));
		queue_put(q, buf);
		queue_kick(q);
		pthread_mutex_lock(&dev->obj_lock);
		for (cq = dev->cqs[e.cqn % CQ_BUCKETS]; cq && cq->o.handle != e.cqn; cq = cq->chain)
			;
		if (cq) /* otherwise it has been destroyed */
			signal_fd(cq->event);
		pthread_mutex_unlock(&dev->obj_lock);
	}
	return 1;
}

EXPORT int vnicd_wait_cq(struct vnicd_cq *cq, int timeout_ms)
{
	const uint64_t deadline = timeout_ms < 0 ? UINT64_MAX : now_ms() + (uint64_t)timeout_ms;
	struct pollfd p[2] = { { .fd = cq->event, .events = POLLIN }, { .fd = cq->o.dev->gone, .events = POLLIN } };

	for (;;) {
		int err = device_check(cq->o.dev), left;

		if (err)
			return err;
		if (drain_fd(cq->event)) {
			err = device_check(cq->o.dev);
			if (err) /* the signal was, or may have been, device_fail's */
				signal_fd(cq->event);
			return err;
		}
		left = timeout_ms < 0 ? -1 : remaining_ms(deadline);
		if (!left || poll(p, 2, left) == 0)
			return set_error_text(-EAGAIN, "no completion event");
	}
}

EXPORT int vnicd_cq_fd(const struct vnicd_cq *cq)
{
	return cq->event;
}
