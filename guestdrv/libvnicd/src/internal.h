/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the sources of libvnicd share.
 *
 *   post.c     data path: work requests and completions
 *   object.c   PDs, regions, CQs, address handles     qp.c  QPs
 *   command.c  command queue: slots, deadlines
 *   device.c   open, close, the device's thread       event.c  event queues
 *   queue.c    virtqueues, split (virtio 1.2, 2.7)    memory.c  shared memory
 *   share.c    memory of the program's own            vhost.c   messages of vhost-user
 *   error.c    texts
 *
 * Memory that the device can write is not trusted: values are read once, checked, and used.
 *
 * Locks: cmd_lock, obj_lock, mem_lock, event_lock and sock_lock are never held together, but for obj_lock, under which
 * mem_lock may be taken.
 */
#ifndef VNICD_INTERNAL_H
#define VNICD_INTERNAL_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include <linux/virtio_ring.h>

#include "vnicd.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the library supports little-endian machines");

#define PAGE_SHIFT 12
#define PAGE_BYTES 4096ULL

/* PA of the memory's first byte: neither a file offset nor an address of the process, so that confusion fails. */
#define PA_BASE (1ULL << 40)

/* PAs of what the program shares: from here to the end of those that vnicd takes, each piece at a multiple. */
#define SHARED_BASE (1ULL << 41)
#define SHARED_ALIGN (1ULL << 30)
#define PA_END (1ULL << 48)

enum {
	QUEUE_SIZE = 64,                                     /* entries of a virtqueue, and buffers of an event queue */
	MAX_QUEUES = 2 + VNICD_MAX_CEQS + VNICD_MAX_ENGINES, /* that an ABI of today needs */
	CMD_SLOTS = 8,                                       /* concurrent commands of the program */
	FAULT_SLOT = CMD_SLOTS,                              /* answers page faults; the device's thread only */
	RESP_BYTES = 4096,
	DB_PAGES = sizeof(struct vnicd_doorbells) / PAGE_BYTES,
	CQ_BUCKETS = 256,
	MAX_GIDS = 256,
	CLOSE_PATIENCE_MS = 10000,
};

#define EXPORT __attribute__((visibility("default")))

/* ---- errors ---- */

/* Records the text and returns code, a negative errno value. */
int set_error(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Records a constant text without formatting, for the data path. */
int set_error_text(int code, const char *text);

/* ---- memory ---- */

struct span {                  /* of the shared memory: free, or an allocation; sorted by offset */
	struct span *next;
	uint64_t off, size;    /* bytes, multiples of a page */
	uint32_t regions;      /* registered in the allocation */
	bool used;
};

struct piece {                 /* of the program's own memory */
	struct piece *next;
	uint8_t *addr;
	uint64_t pa, size;
	uint32_t regions;
	bool usable;           /* the device has it: regions may be registered */
};

struct memory {
	int fd;
	uint8_t *base;         /* NULL: not mapped */
	uint64_t size;
	uint64_t touched;      /* beyond this offset all bytes are zero and not resident */
	struct span *spans;
	struct piece *pieces;
	uint64_t next_pa;      /* of the next piece, unless that would be behind the end */
	pthread_mutex_t lock;
};

int mem_init(struct memory *m, uint64_t size);
int mem_make(struct memory *m);             /* with a file of its own */
int mem_use(struct memory *m, int fd);      /* with fd, which it takes over */
void mem_fini(struct memory *m);
void *mem_alloc(struct memory *m, uint64_t size); /* zeroed whole pages; NULL: no room, with the error set */
int mem_free(struct memory *m, void *p);
/* n bytes at p are in one allocation or piece, which becomes busy. *pa: where they are. */
int mem_hold(struct memory *m, const void *p, uint64_t n, uint64_t *pa);
void mem_release(struct memory *m, const void *p);
uint64_t mem_pa(const struct memory *m, const void *p);     /* of an allocation's byte */
struct piece *piece_of(struct memory *m, const void *p);    /* the piece that has the byte at p; under the lock */

/* ---- virtqueues ---- */

/* A split virtqueue without indirect descriptors and event index. Chains have fixed descriptors, named by the head. */
struct queue {
	struct vring_desc *desc;
	struct vring_avail *avail;
	struct vring_used *used;
	void *mem;
	uint16_t next_avail, next_used;
	bool owned[QUEUE_SIZE]; /* by head: the device has the chain */
	int kick, call;         /* eventfds */
};

int queue_init(struct queue *q, struct memory *m);
void queue_fini(struct queue *q);
void queue_desc(struct queue *q, uint16_t i, uint64_t pa, uint32_t len, bool write, int next); /* next -1: the last */
void queue_put(struct queue *q, uint16_t head);
void queue_kick(struct queue *q);
void queue_notify(const struct queue *q);
int queue_get(struct queue *q, uint16_t *head, uint32_t *written); /* 1: a chain, 0: none, -EPROTO */

/* ---- vhost-user ---- */

struct vhost {
	int fd, back;           /* the connection; the back end's own channel, or -1 */
	bool ack, given;        /* REPLY_ACK negotiated; GET_MEMORY sent */
	bool out_of_step;       /* a request's reply has not come as it should: no more are sent; true meanwhile */
	uint64_t features, proto;
	uint32_t num_queues;    /* that the back end has */
	pthread_mutex_t lock;   /* a request and its reply at a time */
};

/* Connects and negotiates up to the memory, which mem becomes. */
int vhost_open(struct vhost *v, const char *path, struct memory *mem, uint64_t features, uint64_t deadline);
int vhost_start_queue(struct vhost *v, struct memory *mem, uint32_t i, struct queue *q, uint64_t deadline);
int vhost_driver_ok(struct vhost *v, uint64_t deadline);
int vhost_add_memory(struct vhost *v, uint64_t pa, uint64_t size, uint64_t offset, int fd, uint64_t deadline);
int vhost_remove_memory(struct vhost *v, uint64_t pa, uint64_t size, uint64_t deadline);
int vhost_read_config(struct vhost *v, void *dst, uint32_t n, uint64_t deadline);
int vhost_take_message(struct vhost *v);    /* of the back end's own channel: 0, or an error: the channel has ended */
void vhost_fini(struct vhost *v);

/* ---- objects ---- */

struct object {
	struct object *next, *prev; /* in vnicd_device.objects */
	struct vnicd_device *dev;
	uint16_t destroy_op;        /* 0: no command */
	uint32_t handle;
	void (*release)(struct object *o); /* frees what the object has, and the object */
};

struct ring {                       /* rdma_user_rxe.h; geometry and own index are private copies */
	void *mem;
	uint8_t *data;
	_Atomic uint32_t *prod, *cons;
	uint32_t own;               /* the index that this side writes */
	uint32_t mask;
	uint8_t log2;
};

struct vnicd_pd {
	struct object o;
};

struct region {
	struct object o;
	struct vnicd_mr mr;
};

struct vnicd_cq {
	struct object o;
	struct ring ring;
	_Atomic uint32_t *arm;
	int event;                  /* eventfd */
	struct vnicd_cq *chain;     /* next in the bucket */
	bool listed;
};

struct doorbell {
	struct vnicd_doorbells *area;
	struct queue *q;
};

struct vnicd_qp {
	struct object o;
	struct ring sq, rq;
	struct doorbell *db;
	uint32_t slot;
	uint32_t type;
	uint32_t max_send_sge, max_recv_sge, max_inline;
};

struct vnicd_address {
	struct object o;
	uint32_t num;
};

/* ---- device ---- */

enum slot_state { SLOT_FREE, SLOT_TAKEN, SLOT_SUBMITTED, SLOT_DONE };

struct slot {
	uint8_t *req, *resp;
	enum slot_state state;
	uint32_t written;
};

struct vnicd_device {
	struct memory mem;
	struct vhost vhost;
	struct queue queues[MAX_QUEUES];
	uint32_t num_queues;        /* initialised */
	struct vnicd_config config;
	struct vnicd_device_attr attr;
	uint32_t timeout_ms;

	pthread_t thread;
	bool threaded;
	int stop, gone;             /* eventfds: readable when the thread is to end; when the device is unusable */
	atomic_int failed;          /* 0, or the error */
	char reason[160];           /* written before failed */

	pthread_mutex_t cmd_lock;   /* slots, command queue, ended */
	pthread_cond_t cmd_cond;
	struct slot slots[CMD_SLOTS + 1];
	bool ended;                 /* the back end has closed its channel */
	uint32_t faults[QUEUE_SIZE];    /* tokens to refuse */
	uint16_t fault_bufs[QUEUE_SIZE];
	uint32_t num_faults;

	pthread_mutex_t event_lock; /* event queue and list */
	uint8_t *event_bufs;
	struct { struct vnicd_event event; uint16_t buf; } events[QUEUE_SIZE];
	uint32_t first_event, num_events;
	int event_fd;

	uint8_t *ceq_bufs[VNICD_MAX_CEQS];
	struct doorbell dbs[VNICD_MAX_ENGINES];
	uint32_t num_dbs;

	pthread_mutex_t obj_lock;   /* objects, CQs by number, address handles, VLANs */
	struct object *objects;
	struct vnicd_cq *cqs[CQ_BUCKETS];
	struct vnicd_ah *ahs;
	uint32_t *free_ahs, num_free_ahs;
	uint16_t vlans[MAX_GIDS];
};

static inline uint64_t now_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

/* Milliseconds until deadline for poll(2). */
static inline int remaining_ms(uint64_t deadline)
{
	uint64_t now = now_ms();
	uint64_t n = deadline > now ? deadline - now : 0;

	return n > 0x7fffffff ? 0x7fffffff : (int)n;
}

/* Makes the device unusable; the first error is kept. */
void device_fail(struct vnicd_device *dev, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* 0, or the error that made the device unusable, with the text set. */
int device_check(struct vnicd_device *dev);

void signal_fd(int fd);
bool drain_fd(int fd);

/* ---- commands ---- */

int command_init(struct vnicd_device *dev);

/*
 * Issues a command: size bytes at fixed, n PAs of pages of the memory from pa on, and again for pa2. Of the response's
 * payload, resp_size bytes are copied to resp; missing ones beyond resp_min are zero.
 */
struct command {
	uint16_t op;
	const void *fixed;
	uint32_t size;
	uint64_t pa, pa2;
	uint32_t n, n2;
	void *resp;
	uint32_t resp_size, resp_min;
};
int command_run(struct vnicd_device *dev, const struct command *c);
int command_reap(struct vnicd_device *dev);              /* the device's thread: takes answers */
int command_refuse_fault(struct vnicd_device *dev, uint32_t token, uint16_t buf);

/* ---- events ---- */

int events_init(struct vnicd_device *dev);
int events_take(struct vnicd_device *dev);               /* the device's thread */
int events_give(struct vnicd_device *dev, uint16_t buf); /* returns a buffer to the device */
int ceq_init(struct vnicd_device *dev, uint32_t i);
int ceq_take(struct vnicd_device *dev, uint32_t i);      /* the device's thread */

/* ---- objects ---- */

void object_add(struct vnicd_device *dev, struct object *o, uint16_t destroy_op, uint32_t handle,
		void (*release)(struct object *o));
int object_destroy(struct object *o);
void objects_release(struct vnicd_device *dev);
int addresses_init(struct vnicd_device *dev, uint32_t entries);
void cq_unlist(struct vnicd_cq *cq);

int ring_init(struct ring *r, struct memory *m, uint32_t n, uint64_t elem_size);
void ring_fini(struct ring *r, struct memory *m);
void ring_describe(const struct ring *r, struct vnicd_ring *d);

#endif
