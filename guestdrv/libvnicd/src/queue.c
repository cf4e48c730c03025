/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's side of split virtqueues (virtio 1.2, 2.7). A queue's lock is its user's. */
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "internal.h"

void signal_fd(int fd)
{
	uint64_t one = 1;

	/* EAGAIN: the counter is full, so the other side has a signal. */
	while (write(fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

bool drain_fd(int fd)
{
	uint64_t n;
	ssize_t got;

	do {
		got = read(fd, &n, sizeof(n));
	} while (got < 0 && errno == EINTR);
	return got == sizeof(n);
}

int queue_init(struct queue *q, struct memory *m)
{
	const size_t avail = QUEUE_SIZE * sizeof(struct vring_desc);
	const size_t used = (avail + sizeof(struct vring_avail) + (QUEUE_SIZE + 1) * sizeof(uint16_t) + 3) & ~(size_t)3;
	const size_t size = used + sizeof(struct vring_used) + QUEUE_SIZE * sizeof(struct vring_used_elem) + 4;
	uint8_t *p;

	memset(q, 0, sizeof(*q));
	q->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	q->call = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (q->kick < 0 || q->call < 0)
		return set_error(-errno, "eventfd: %s", strerror(errno));
	p = mem_alloc(m, size);
	if (!p)
		return -ENOMEM;
	q->mem = p;
	q->desc = (struct vring_desc *)p;
	q->avail = (struct vring_avail *)(p + avail);
	q->used = (struct vring_used *)(p + used);
	return 0;
}

void queue_fini(struct queue *q)
{
	if (q->kick >= 0)
		close(q->kick);
	if (q->call >= 0)
		close(q->call);
}

void queue_desc(struct queue *q, uint16_t i, uint64_t pa, uint32_t len, bool write, int next)
{
	q->desc[i] = (struct vring_desc){
		.addr = pa,
		.len = len,
		.flags = (uint16_t)((write ? VRING_DESC_F_WRITE : 0) | (next >= 0 ? VRING_DESC_F_NEXT : 0)),
		.next = (uint16_t)(next >= 0 ? next : 0),
	};
}

void queue_put(struct queue *q, uint16_t head)
{
	q->owned[head] = true;
	q->avail->ring[q->next_avail % QUEUE_SIZE] = head;
	q->next_avail++;
}

void queue_kick(struct queue *q)
{
	__atomic_store_n(&q->avail->idx, q->next_avail, __ATOMIC_RELEASE);
	/* The index is visible before the flag is read: the device does both in reverse (2.7.13). */
	atomic_thread_fence(memory_order_seq_cst);
	if (!(__atomic_load_n(&q->used->flags, __ATOMIC_RELAXED) & VRING_USED_F_NO_NOTIFY))
		signal_fd(q->kick);
}

void queue_notify(const struct queue *q)
{
	signal_fd(q->kick);
}

int queue_get(struct queue *q, uint16_t *head, uint32_t *written)
{
	volatile struct vring_used_elem *e;
	uint32_t id;

	if (__atomic_load_n(&q->used->idx, __ATOMIC_ACQUIRE) == q->next_used)
		return 0;
	e = &q->used->ring[q->next_used % QUEUE_SIZE];
	id = e->id;
	*written = e->len;
	if (id >= QUEUE_SIZE || !q->owned[id])
		return -EPROTO;
	q->owned[id] = false;
	q->next_used++;
	*head = (uint16_t)id;
	return 1;
}
