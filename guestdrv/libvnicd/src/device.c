/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device: opening, its thread, and its end.
 *
 *   vnicd_open -> usable -> (device_fail) unusable -> vnicd_close
 *
 * device_fail wakes every wait: commands by cmd_cond, CQs and events by their eventfds, which stay readable from then
 * on, address resolution by gone.
 */
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "internal.h"

void device_fail(struct vnicd_device *dev, int code, const char *format, ...)
{
	struct object *o;
	va_list args;

	pthread_mutex_lock(&dev->obj_lock);
	if (!atomic_load(&dev->failed)) {
		va_start(args, format);
		vsnprintf(dev->reason, sizeof(dev->reason), format, args);
		va_end(args);
		atomic_store(&dev->failed, code);
	}
	for (o = dev->objects; o; o = o->next)
		if (o->destroy_op == VNICD_CMD_DESTROY_CQ)
			signal_fd(((struct vnicd_cq *)o)->event);
	pthread_mutex_unlock(&dev->obj_lock);
	pthread_mutex_lock(&dev->event_lock); /* vnicd_get_event reads the counter only while the device is usable */
	signal_fd(dev->event_fd);
	pthread_mutex_unlock(&dev->event_lock);
	signal_fd(dev->gone);
	pthread_mutex_lock(&dev->cmd_lock);
	pthread_cond_broadcast(&dev->cmd_cond);
	pthread_mutex_unlock(&dev->cmd_lock);
}

int device_check(struct vnicd_device *dev)
{
	int code = atomic_load_explicit(&dev->failed, memory_order_acquire);

	return code ? set_error(code, "the device is unusable: %s", dev->reason) : 0;
}

EXPORT int vnicd_device_status(struct vnicd_device *dev)
{
	return device_check(dev);
}

/* Takes what the queues have. Returns 1 if there may be more. */
static int serve_queues(struct vnicd_device *dev)
{
	int err, more = 0;
	uint32_t i;

	err = command_reap(dev);
	more |= err;
	if (err >= 0) {
		err = events_take(dev);
		more |= err;
	}
	for (i = 0; i < dev->config.num_ceqs && err >= 0; i++) {
		err = ceq_take(dev, i);
		more |= err;
	}
	return err < 0 ? err : more;
}

static void *run(void *arg)
{
	struct vnicd_device *dev = arg;
	const uint32_t queues = 2 + dev->config.num_ceqs;
	struct pollfd p[3 + MAX_QUEUES];
	bool failed = false;
	uint32_t i;

	p[0] = (struct pollfd){ .fd = dev->stop, .events = POLLIN };
	p[1] = (struct pollfd){ .fd = dev->vhost.back, .events = POLLIN };
	/* The back end closes its channel last. Without one, the end of the connection has to do. */
	p[2] = (struct pollfd){ .fd = dev->vhost.back < 0 ? dev->vhost.fd : -1 };
	for (i = 0; i < queues; i++)
		p[3 + i] = (struct pollfd){ .fd = dev->queues[i].call, .events = POLLIN };
	for (;;) {
		if (poll(p, 3 + queues, -1) < 0)
			continue; /* EINTR cannot occur, and ENOMEM passes */
		if (p[0].revents)
			return NULL;
		if ((p[1].revents && vhost_take_message(&dev->vhost)) || p[2].revents) {
			device_fail(dev, -ENODEV, "vnicd has ended or closed the connection");
			pthread_mutex_lock(&dev->cmd_lock);
			dev->ended = true;
			pthread_cond_broadcast(&dev->cmd_cond);
			pthread_mutex_unlock(&dev->cmd_lock);
			return NULL;
		}
		for (i = 0; i < queues; i++)
			if (p[3 + i].revents)
				drain_fd(dev->queues[i].call);
		while (!failed) {
			int more = serve_queues(dev);

			if (more < 0) { /* from now on only the end of the connection is of interest */
				device_fail(dev, more, "%s", vnicd_error());
				failed = true;
				for (i = 0; i < queues; i++)
					p[3 + i].fd = -1;
			}
			if (more <= 0)
				break;
		}
	}
}

static int start_thread(struct vnicd_device *dev)
{
	sigset_t all, old;
	int err;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	err = pthread_create(&dev->thread, NULL, run, dev);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (err)
		return set_error(-err, "starting a thread: %s", strerror(err));
	dev->threaded = true;
	return 0;
}

static int check_config(const struct vnicd_device *dev, const struct vnicd_config *c)
{
	if (c->magic != VNICD_MAGIC)
		return set_error(-EPROTO, "config space: magic %#x, expected %#x: not a vnicd", c->magic, VNICD_MAGIC);
	if (c->abi_version < VNICD_ABI_OLDEST || c->abi_version > VNICD_ABI_VERSION)
		return set_error(-EPROTO, "the device has ABI version %u, this library %u to %u", c->abi_version,
				 VNICD_ABI_OLDEST, VNICD_ABI_VERSION);
	if (!c->num_ceqs || c->num_ceqs > VNICD_MAX_CEQS || !c->num_engines || c->num_engines > VNICD_MAX_ENGINES ||
	    2U + c->num_ceqs + c->num_engines > dev->num_queues)
		return set_error(-EPROTO, "config space: %u completion event queues and %u engines, with %u queues",
				 c->num_ceqs, c->num_engines, dev->num_queues);
	return 0;
}

static int read_config(struct vnicd_device *dev, struct vnicd_config *c, uint64_t deadline)
{
	int err = vhost_read_config(&dev->vhost, c, sizeof(*c), deadline);

	if (err)
		return err;
	c->device_name[sizeof(c->device_name) - 1] = 0;
	c->fw_version[sizeof(c->fw_version) - 1] = 0;
	return check_config(dev, c);
}

/* Gives the device the doorbell areas, with the driver's nonce in the first (CO-3). */
static int init_doorbells(struct vnicd_device *dev)
{
	uint32_t i, p;
	int err;

	for (i = 0; i < dev->config.num_engines; i++) {
		struct vnicd_set_doorbells req = { .engine = i, .npages = DB_PAGES };

		for (p = 0; p < DB_PAGES; p++)
			req.pa[p] = mem_pa(&dev->mem, dev->dbs[i].area) + p * PAGE_BYTES;
		err = command_run(dev, &(struct command){ VNICD_CMD_SET_DOORBELLS, .fixed = &req,
			.size = sizeof(req) });
		if (err)
			return err;
	}
	return 0;
}

static int alloc_doorbells(struct vnicd_device *dev)
{
	uint64_t nonce = 0;
	uint32_t i;

	for (i = 0; i < dev->config.num_engines; i++) {
		dev->dbs[i].area = mem_alloc(&dev->mem, sizeof(struct vnicd_doorbells));
		if (!dev->dbs[i].area)
			return -ENOMEM;
		dev->dbs[i].q = &dev->queues[2 + dev->config.num_ceqs + i];
		dev->num_dbs++;
	}
	if (!(dev->vhost.features & 1ULL << VNICD_FEATURE_NONCE))
		return 0;
	if (getrandom(&nonce, sizeof(nonce), 0) != sizeof(nonce))
		return set_error(-errno, "getrandom: %s", strerror(errno));
	__atomic_store_n(&dev->dbs[0].area->nonce, nonce | 1, __ATOMIC_SEQ_CST);
	return 0;
}

static int open_device(struct vnicd_device *dev, const char *path, const struct vnicd_options *o)
{
	const uint64_t deadline = now_ms() + dev->timeout_ms;
	uint32_t i, n;
	int err;

	dev->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	dev->gone = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	dev->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (dev->event_fd < 0 || dev->gone < 0 || dev->stop < 0)
		return set_error(-errno, "eventfd: %s", strerror(errno));
	err = mem_init(&dev->mem, o->memory);
	if (!err)
		err = vhost_open(&dev->vhost, path, &dev->mem, 1ULL << VNICD_FEATURE_NONCE, deadline);
	if (err)
		return err;
	n = dev->vhost.num_queues < MAX_QUEUES ? dev->vhost.num_queues : MAX_QUEUES;
	for (i = 0; i < n && !err; i++) {
		dev->num_queues++;
		err = queue_init(&dev->queues[i], &dev->mem);
		if (!err)
			err = vhost_start_queue(&dev->vhost, &dev->mem, i, &dev->queues[i], deadline);
	}
	if (!err)
		err = vhost_driver_ok(&dev->vhost, deadline);
	if (!err)
		err = read_config(dev, &dev->config, deadline);
	if (!err)
		err = command_init(dev);
	if (!err)
		err = events_init(dev);
	for (i = 0; i < dev->config.num_ceqs && !err; i++)
		err = ceq_init(dev, i);
	if (!err)
		err = alloc_doorbells(dev);
	if (!err)
		err = start_thread(dev);
	if (!err)
		err = command_run(dev, &(struct command){ VNICD_CMD_QUERY_DEVICE, .resp = &dev->attr,
							  .resp_size = sizeof(dev->attr),
							  .resp_min = sizeof(dev->attr) });
	if (!err)
		err = init_doorbells(dev);
	if (!err)
		err = addresses_init(dev, o->ah_entries);
	return err;
}

EXPORT int vnicd_open(const char *path, const struct vnicd_options *options, struct vnicd_device **out)
{
	struct vnicd_options o = { 0 };
	struct vnicd_device *dev;
	int err;

	if (!out)
		return set_error_text(-EINVAL, "out is NULL");
	*out = NULL;
	if (!path || !*path)
		path = secure_getenv("VNICD_SOCKET");
	if (!path || !*path)
		path = "/run/vnicd/hca";
	if (options)
		o = *options;
	if (!o.memory)
		o.memory = 64ULL << 20;
	if (!o.ah_entries)
		o.ah_entries = 1024;
	if (!o.timeout_ms)
		o.timeout_ms = 30000;
	if (o.memory < 4ULL << 20 || o.memory > 1ULL << 40)
		return set_error(-EINVAL, "memory of %llu bytes, expected 4 MiB to 1 TiB",
			(unsigned long long)o.memory);
	if (o.ah_entries < 2 || o.timeout_ms > 0x7fffffff)
		return set_error(-EINVAL, "%u address handles, %u ms: expected 2 or more, and at most 2^31 - 1",
				 o.ah_entries, o.timeout_ms);
	dev = calloc(1, sizeof(*dev));
	if (!dev)
		return set_error_text(-ENOMEM, "out of memory");
	dev->timeout_ms = o.timeout_ms;
	dev->mem.fd = dev->vhost.fd = dev->vhost.back = dev->event_fd = dev->gone = dev->stop = -1;
	pthread_mutex_init(&dev->mem.lock, NULL);
	pthread_mutex_init(&dev->vhost.lock, NULL);
	pthread_mutex_init(&dev->cmd_lock, NULL);
	pthread_mutex_init(&dev->event_lock, NULL);
	pthread_mutex_init(&dev->obj_lock, NULL);
	pthread_cond_init(&dev->cmd_cond, NULL);
	err = open_device(dev, path, &o);
	if (err) {
		char text[256];

		snprintf(text, sizeof(text), "%s", vnicd_error());
		vnicd_close(dev);
		return set_error(err, "%s", text);
	}
	*out = dev;
	return 0;
}

/* Ends the connection, and waits until the back end has stopped using the memory, which it says by closing. */
static void disconnect(struct vnicd_device *dev)
{
	const uint64_t deadline = now_ms() + CLOSE_PATIENCE_MS;
	struct timespec ts = { .tv_sec = (time_t)(deadline / 1000), .tv_nsec = (long)(deadline % 1000) * 1000000 };

	if (dev->num_dbs)
		__atomic_store_n(&dev->dbs[0].area->nonce, 0, __ATOMIC_SEQ_CST);
	if (dev->vhost.fd >= 0)
		shutdown(dev->vhost.fd, SHUT_WR);
	if (!dev->threaded) {
		struct pollfd p = { .fd = dev->vhost.back >= 0 ? dev->vhost.back : dev->vhost.fd, .events = POLLIN };

		if (p.fd >= 0)
			poll(&p, 1, CLOSE_PATIENCE_MS);
		return;
	}
	pthread_mutex_lock(&dev->cmd_lock);
	while (!dev->ended && pthread_cond_timedwait(&dev->cmd_cond, &dev->cmd_lock, &ts) != ETIMEDOUT)
		;
	pthread_mutex_unlock(&dev->cmd_lock);
	signal_fd(dev->stop);
	pthread_join(dev->thread, NULL);
}

EXPORT void vnicd_close(struct vnicd_device *dev)
{
	uint32_t i;

	if (!dev)
		return;
	disconnect(dev);
	objects_release(dev);
	vhost_fini(&dev->vhost);
	for (i = 0; i < dev->num_queues; i++)
		queue_fini(&dev->queues[i]);
	mem_fini(&dev->mem);
	free(dev->free_ahs);
	if (dev->event_fd >= 0)
		close(dev->event_fd);
	if (dev->gone >= 0)
		close(dev->gone);
	if (dev->stop >= 0)
		close(dev->stop);
	pthread_cond_destroy(&dev->cmd_cond);
	pthread_mutex_destroy(&dev->mem.lock);
	pthread_mutex_destroy(&dev->vhost.lock);
	pthread_mutex_destroy(&dev->cmd_lock);
	pthread_mutex_destroy(&dev->event_lock);
	pthread_mutex_destroy(&dev->obj_lock);
	free(dev);
}

EXPORT const struct vnicd_config *vnicd_get_config(const struct vnicd_device *dev)
{
	return &dev->config;
}

EXPORT const struct vnicd_device_attr *vnicd_get_device_attr(const struct vnicd_device *dev)
{
	return &dev->attr;
}

EXPORT int vnicd_read_config(struct vnicd_device *dev, struct vnicd_config *config)
{
	int err = device_check(dev);

	if (err)
		return err;
	err = read_config(dev, config, now_ms() + dev->timeout_ms);
	if (err) { /* requests and replies may be out of step */
		device_fail(dev, err, "reading config space: %s", vnicd_error());
		return device_check(dev);
	}
	return 0;
}

EXPORT int vnicd_query_port(struct vnicd_device *dev, struct vnicd_port_attr *attr)
{
	return command_run(dev, &(struct command){ VNICD_CMD_QUERY_PORT, .resp = attr, .resp_size = sizeof(*attr),
						   .resp_min = sizeof(*attr) });
}

EXPORT int vnicd_query_stats(struct vnicd_device *dev, struct vnicd_stats *stats)
{
	return command_run(dev, &(struct command){ VNICD_CMD_QUERY_STATS, .resp = stats, .resp_size = sizeof(*stats),
						   .resp_min = sizeof(*stats) });
}

EXPORT void *vnicd_alloc(struct vnicd_device *dev, size_t size)
{
	return device_check(dev) ? NULL : mem_alloc(&dev->mem, size);
}

EXPORT int vnicd_free(struct vnicd_device *dev, void *buf)
{
	return buf ? mem_free(&dev->mem, buf) : 0;
}
