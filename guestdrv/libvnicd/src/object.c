/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PDs, regions, CQs, address handles and GIDs. The memory that the device uses for an object is freed only once the
 * device has confirmed that the object is destroyed, or, when the device is unusable, by vnicd_close: nothing is
 * allocated from then on.
 */
#include <arpa/inet.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "internal.h"

void object_add(struct vnicd_device *dev, struct object *o, uint16_t destroy_op, uint32_t handle,
		void (*release)(struct object *o))
{
	o->dev = dev;
	o->destroy_op = destroy_op;
	o->handle = handle;
	o->release = release;
	o->prev = NULL;
	pthread_mutex_lock(&dev->obj_lock);
	o->next = dev->objects;
	if (o->next)
		o->next->prev = o;
	dev->objects = o;
	if (destroy_op == VNICD_CMD_DESTROY_CQ) {
		struct vnicd_cq *cq = (struct vnicd_cq *)o;

		cq->chain = dev->cqs[handle % CQ_BUCKETS];
		dev->cqs[handle % CQ_BUCKETS] = cq;
		cq->listed = true;
		if (atomic_load(&dev->failed)) /* device_fail did not see it */
			signal_fd(cq->event);
	}
	pthread_mutex_unlock(&dev->obj_lock);
}

/* Under obj_lock. */
static void unlink_object(struct object *o)
{
	if (o->prev)
		o->prev->next = o->next;
	else
		o->dev->objects = o->next;
	if (o->next)
		o->next->prev = o->prev;
	if (o->destroy_op == VNICD_CMD_DESTROY_CQ)
		cq_unlist((struct vnicd_cq *)o);
}

int object_destroy(struct object *o)
{
	struct vnicd_device *dev = o->dev;
	struct vnicd_handle h = { .handle = o->handle };
	int err = 0;

	if (o->destroy_op == VNICD_CMD_DESTROY_CQ) {
		/* The device may give the number to another CQ as soon as this one is destroyed. */
		pthread_mutex_lock(&dev->obj_lock);
		cq_unlist((struct vnicd_cq *)o);
		pthread_mutex_unlock(&dev->obj_lock);
	}
	if (o->destroy_op)
		err = command_run(dev, &(struct command){ o->destroy_op, .fixed = &h, .size = sizeof(h) });
	pthread_mutex_lock(&dev->obj_lock);
	if (err && !atomic_load(&dev->failed)) {
		if (o->destroy_op == VNICD_CMD_DESTROY_CQ) {
			struct vnicd_cq *cq = (struct vnicd_cq *)o;

			cq->chain = dev->cqs[o->handle % CQ_BUCKETS];
			dev->cqs[o->handle % CQ_BUCKETS] = cq;
			cq->listed = true;
		}
		pthread_mutex_unlock(&dev->obj_lock);
		return err;
	}
	unlink_object(o);
	pthread_mutex_unlock(&dev->obj_lock);
	o->release(o);
	return 0;
}

void objects_release(struct vnicd_device *dev)
{
	while (dev->objects) {
		struct object *o = dev->objects;

		unlink_object(o);
		o->release(o);
	}
}

static int created(struct vnicd_device *dev, uint16_t op, const void *req, uint32_t size, uint32_t *handle)
{
	struct vnicd_handle h;
	int err = command_run(dev, &(struct command){ op, .fixed = req, .size = size, .resp = &h,
						      .resp_size = sizeof(h), .resp_min = sizeof(h) });

	*handle = err ? 0 : h.handle;
	return err;
}

static void release_plain(struct object *o)
{
	free(o);
}

/* ---- PDs ---- */

EXPORT int vnicd_alloc_pd(struct vnicd_device *dev, struct vnicd_pd **out)
{
	struct vnicd_pd *pd = calloc(1, sizeof(*pd));
	uint32_t handle;
	int err;

	*out = NULL;
	if (!pd)
		return set_error_text(-ENOMEM, "out of memory");
	err = created(dev, VNICD_CMD_CREATE_PD, NULL, 0, &handle);
	if (err) {
		free(pd);
		return err;
	}
	object_add(dev, &pd->o, VNICD_CMD_DESTROY_PD, handle, release_plain);
	*out = pd;
	return 0;
}

EXPORT int vnicd_free_pd(struct vnicd_pd *pd)
{
	return pd ? object_destroy(&pd->o) : 0;
}

/* ---- regions ---- */

static void release_region(struct object *o)
{
	struct region *r = (struct region *)o;

	mem_release(&o->dev->mem, (void *)(uintptr_t)r->mr.addr);
	free(r);
}

static int set_pages(struct vnicd_device *dev, uint32_t handle, uint64_t pa, uint64_t n)
{
	const uint64_t most = (VNICD_CMD_MAX - sizeof(struct vnicd_req) - sizeof(struct vnicd_set_mtt)) / sizeof(pa);
	uint64_t first = 0;

	while (first < n) {
		struct vnicd_set_mtt req = {
			.handle = handle, .count = (uint16_t)(n - first < most ? n - first : most), .first = first,
		};
		int err = command_run(dev, &(struct command){ VNICD_CMD_SET_MTT, .fixed = &req, .size = sizeof(req),
							      .pa = pa + first * PAGE_BYTES, .n = req.count });

		if (err)
			return err;
		first += req.count;
	}
	return 0;
}

EXPORT int vnicd_reg_mr(struct vnicd_pd *pd, void *addr, size_t length, uint32_t access, struct vnicd_mr **out)
{
	struct vnicd_device *dev = pd->o.dev;
	struct vnicd_create_mr_resp resp;
	struct vnicd_create_mr req;
	struct region *r;
	uint64_t pa;
	int err;

	*out = NULL;
	err = mem_hold(&dev->mem, addr, length, &pa);
	if (err)
		return err;
	r = calloc(1, sizeof(*r));
	if (!r) {
		mem_release(&dev->mem, addr);
		return set_error_text(-ENOMEM, "out of memory");
	}
	req = (struct vnicd_create_mr){
		.pdn = pd->o.handle, .access = access, .page_shift = PAGE_SHIFT, .iova = (uintptr_t)addr,
		.length = length,
		.offset = pa % PAGE_BYTES, .npages = (pa % PAGE_BYTES + length + PAGE_BYTES - 1) >> PAGE_SHIFT,
	};
	err = command_run(dev, &(struct command){ VNICD_CMD_CREATE_MR, .fixed = &req, .size = sizeof(req),
		.resp = &resp,
						  .resp_size = sizeof(resp), .resp_min = sizeof(resp) });
	if (err) {
		mem_release(&dev->mem, addr);
		free(r);
		return err;
	}
	r->mr = (struct vnicd_mr){ .addr = req.iova, .length = length, .lkey = resp.lkey, .rkey = resp.rkey };
	object_add(dev, &r->o, VNICD_CMD_DESTROY_MR, resp.handle, release_region);
	err = set_pages(dev, resp.handle, pa - pa % PAGE_BYTES, req.npages);
	if (err) {
		const char *text = vnicd_error();

		if (!object_destroy(&r->o))
			set_error_text(err, text);
		return err;
	}
	*out = &r->mr;
	return 0;
}

EXPORT int vnicd_dereg_mr(struct vnicd_mr *mr)
{
	return mr ? object_destroy((struct object *)((char *)mr - offsetof(struct region, mr))) : 0;
}

/* ---- CQs ---- */

/* Under obj_lock. */
void cq_unlist(struct vnicd_cq *cq)
{
	struct vnicd_cq **p = &cq->o.dev->cqs[cq->o.handle % CQ_BUCKETS];

	if (!cq->listed)
		return;
	while (*p != cq)
		p = &(*p)->chain;
	*p = cq->chain;
	cq->listed = false;
}

static void release_cq(struct object *o)
{
	struct vnicd_cq *cq = (struct vnicd_cq *)o;

	ring_fini(&cq->ring, &o->dev->mem);
	if (cq->arm)
		mem_free(&o->dev->mem, (void *)cq->arm);
	if (cq->event >= 0)
		close(cq->event);
	free(cq);
}

EXPORT int vnicd_create_cq(struct vnicd_device *dev, uint32_t entries, uint32_t ceq, struct vnicd_cq **out)
{
	struct vnicd_create_cq req = { .ceq = ceq };
	struct vnicd_cq *cq;
	uint32_t handle;
	int err;

	*out = NULL;
	if (!entries || entries > dev->attr.max_cqe)
		return set_error(-EINVAL, "CQ of %u entries, expected 1 to %u", entries, dev->attr.max_cqe);
	if (ceq >= dev->config.num_ceqs)
		return set_error(-EINVAL, "completion event queue %u, expected 0 to %u", ceq, dev->config.num_ceqs - 1);
	cq = calloc(1, sizeof(*cq));
	if (!cq)
		return set_error_text(-ENOMEM, "out of memory");
	cq->o.dev = dev;
	cq->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	err = cq->event < 0 ? set_error(-errno, "eventfd: %s", strerror(errno)) : 0;
	if (!err)
		err = ring_init(&cq->ring, &dev->mem, entries, 64);
	if (!err) {
		cq->arm = mem_alloc(&dev->mem, sizeof(*cq->arm));
		err = cq->arm ? 0 : -ENOMEM;
	}
	if (!err) {
		struct vnicd_handle h;

		ring_describe(&cq->ring, &req.ring);
		req.arm_pa = mem_pa(&dev->mem, (void *)cq->arm);
		err = command_run(dev, &(struct command){
			VNICD_CMD_CREATE_CQ, .fixed = &req, .size = sizeof(req), .pa = mem_pa(&dev->mem, cq->ring.mem),
			.n = req.ring.npages, .resp = &h, .resp_size = sizeof(h), .resp_min = sizeof(h) });
		handle = h.handle;
	}
	if (err) {
		const char *text = vnicd_error();

		release_cq(&cq->o);
		return set_error_text(err, text);
	}
	object_add(dev, &cq->o, VNICD_CMD_DESTROY_CQ, handle, release_cq);
	*out = cq;
	return 0;
}

EXPORT int vnicd_destroy_cq(struct vnicd_cq *cq)
{
	return cq ? object_destroy(&cq->o) : 0;
}

EXPORT uint32_t vnicd_cq_number(const struct vnicd_cq *cq)
{
	return cq->o.handle;
}

/* ---- GIDs ---- */

EXPORT int vnicd_ip_to_gid(const char *ip, uint8_t gid[16])
{
	memset(gid, 0, 16);
	if (inet_pton(AF_INET6, ip, gid) == 1)
		return 0;
	/* IPv4 is mapped into IPv6 (IBTA A17.4.5). */
	memset(gid, 0, 10);
	memset(gid + 10, 0xff, 2);
	if (inet_pton(AF_INET, ip, gid + 12) == 1)
		return 0;
	return set_error(-EINVAL, "\"%.64s\" is no IP address", ip);
}

static int check_gid_index(struct vnicd_device *dev, uint32_t index)
{
	uint32_t n = dev->attr.max_gid < MAX_GIDS ? dev->attr.max_gid : MAX_GIDS;

	return index < n ? 0 : set_error(-EINVAL, "GID index %u, expected 0 to %u", index, n - 1);
}

static void set_vlan(struct vnicd_device *dev, uint32_t index, uint16_t vlan)
{
	pthread_mutex_lock(&dev->obj_lock);
	dev->vlans[index] = vlan;
	pthread_mutex_unlock(&dev->obj_lock);
}

EXPORT int vnicd_set_gid(struct vnicd_device *dev, uint32_t index, const uint8_t gid[16], uint16_t vlan)
{
	struct vnicd_set_gid req = { .index = (uint16_t)index, .type = VNICD_GID_ROCE_V2 };
	int err = check_gid_index(dev, index);

	if (err)
		return err;
	if (vlan > 4094)
		return set_error(-EINVAL, "VLAN %u, expected 0 to 4094", vlan);
	req.vlan_id = vlan ? vlan : VNICD_NO_VLAN;
	memcpy(req.smac, dev->config.mac, sizeof(req.smac));
	memcpy(req.gid, gid, sizeof(req.gid));
	err = command_run(dev, &(struct command){ VNICD_CMD_SET_GID, .fixed = &req, .size = sizeof(req) });
	if (!err)
		set_vlan(dev, index, vlan);
	return err;
}

EXPORT int vnicd_clear_gid(struct vnicd_device *dev, uint32_t index)
{
	struct vnicd_clear_gid req = { .index = (uint16_t)index };
	int err = check_gid_index(dev, index);

	if (!err)
		err = command_run(dev, &(struct command){ VNICD_CMD_CLEAR_GID, .fixed = &req, .size = sizeof(req) });
	if (!err)
		set_vlan(dev, index, 0);
	return err;
}

EXPORT int vnicd_resolve(struct vnicd_device *dev, const uint8_t gid[16], uint32_t sgid_index, uint32_t timeout_ms,
			 struct vnicd_av *av)
{
	static const uint8_t unknown[6];
	const uint64_t deadline = now_ms() + timeout_ms;
	struct vnicd_resolve req = { .sgid_index = (uint16_t)sgid_index };
	struct vnicd_resolve_resp resp;
	struct pollfd gone = { .fd = dev->gone, .events = POLLIN };
	int err = check_gid_index(dev, sgid_index), pause = 2, left;

	if (err)
		return err;
	memcpy(req.dgid, gid, sizeof(req.dgid));
	/* Each command sends one request: at most one a second in the long run (RFC 1122, 2.3.2.1). */
	for (;; pause = pause < 500 ? 2 * pause : 1000) {
		err = command_run(dev, &(struct command){ VNICD_CMD_RESOLVE, .fixed = &req, .size = sizeof(req),
							  .resp = &resp, .resp_size = sizeof(resp),
							  .resp_min = sizeof(resp) });
		if (err)
			return err;
		if (memcmp(resp.mac, unknown, sizeof(unknown)))
			break;
		left = remaining_ms(deadline);
		if (!left)
			return set_error_text(-ETIMEDOUT, "no host in the network has the address");
		poll(&gone, 1, left < pause ? left : pause);
	}
	memset(av, 0, sizeof(*av));
	memcpy(av->dgid, gid, sizeof(av->dgid));
	memcpy(av->dmac, resp.mac, sizeof(av->dmac));
	av->sgid_index = (uint16_t)sgid_index;
	av->hop_limit = 64;
	pthread_mutex_lock(&dev->obj_lock);
	av->vlan_id = dev->vlans[sgid_index] ? dev->vlans[sgid_index] : VNICD_NO_VLAN;
	pthread_mutex_unlock(&dev->obj_lock);
	return 0;
}

/* ---- address handles ---- */

int addresses_init(struct vnicd_device *dev, uint32_t entries)
{
	/* The list of pages must fit a command. */
	const uint32_t most = (VNICD_CMD_MAX - 64) / 8 * (uint32_t)(PAGE_BYTES / sizeof(struct vnicd_ah));
	struct vnicd_set_ah_table req;
	uint32_t i, n = entries;
	int err;

	if (n > dev->attr.max_ah)
		n = dev->attr.max_ah;
	if (n > most)
		n = most;
	if (n < 2)
		return 0; /* the device supports no UD */
	dev->ahs = mem_alloc(&dev->mem, (uint64_t)n * sizeof(*dev->ahs));
	if (!dev->ahs)
		return -ENOMEM;
	dev->free_ahs = calloc(n, sizeof(*dev->free_ahs));
	if (!dev->free_ahs)
		return set_error_text(-ENOMEM, "out of memory");
	req = (struct vnicd_set_ah_table){
		.num_entries = n, .npages = (uint32_t)((n * sizeof(*dev->ahs) + PAGE_BYTES - 1) / PAGE_BYTES),
	};
	err = command_run(dev, &(struct command){ VNICD_CMD_SET_AH_TABLE, .fixed = &req, .size = sizeof(req),
						  .pa = mem_pa(&dev->mem, dev->ahs), .n = req.npages });
	if (err)
		return err;
	for (i = n - 1; i > 0; i--) /* entry 0 is never valid */
		dev->free_ahs[dev->num_free_ahs++] = i;
	return 0;
}

static void release_address(struct object *o)
{
	struct vnicd_address *a = (struct vnicd_address *)o;
	struct vnicd_device *dev = o->dev;

	pthread_mutex_lock(&dev->obj_lock);
	__atomic_store_n(&dev->ahs[a->num].valid, 0, __ATOMIC_SEQ_CST);
	dev->free_ahs[dev->num_free_ahs++] = a->num;
	pthread_mutex_unlock(&dev->obj_lock);
	free(a);
}

EXPORT int vnicd_create_address(struct vnicd_pd *pd, const struct vnicd_av *av, struct vnicd_address **out)
{
	struct vnicd_device *dev = pd->o.dev;
	struct vnicd_address *a;
	int err;

	*out = NULL;
	err = device_check(dev);
	if (!err)
		err = check_gid_index(dev, av->sgid_index);
	if (err)
		return err;
	a = calloc(1, sizeof(*a));
	if (!a)
		return set_error_text(-ENOMEM, "out of memory");
	pthread_mutex_lock(&dev->obj_lock);
	if (dev->num_free_ahs) {
		struct vnicd_ah *e;

		a->num = dev->free_ahs[--dev->num_free_ahs];
		e = &dev->ahs[a->num];
		memset(e, 0, sizeof(*e));
		e->pdn = pd->o.handle;
		memcpy(e->dgid, av->dgid, sizeof(e->dgid));
		memcpy(e->dmac, av->dmac, sizeof(e->dmac));
		e->sgid_index = av->sgid_index;
		e->vlan_id = av->vlan_id;
		e->traffic_class = av->traffic_class;
		e->hop_limit = av->hop_limit;
		e->flow_label = av->flow_label;
		e->sl = av->sl;
		__atomic_store_n(&e->valid, 1, __ATOMIC_SEQ_CST); /* written last */
	}
	pthread_mutex_unlock(&dev->obj_lock);
	if (!a->num) {
		free(a);
		return set_error_text(-ENOMEM, "no free address handle: see vnicd_options.ah_entries");
	}
	object_add(dev, &a->o, 0, 0, release_address);
	*out = a;
	return 0;
}

EXPORT int vnicd_destroy_address(struct vnicd_address *address)
{
	return address ? object_destroy(&address->o) : 0;
}
