/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory that the device can access: one memfd of fixed size, allocated first fit in whole pages. vnicd makes the
 * file if it offers that (GET_MEMORY), so that its successor can map it; otherwise the library does.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

int mem_init(struct memory *m, uint64_t size)
{
	m->fd = -1;
	m->size = (size + PAGE_BYTES - 1) & ~(PAGE_BYTES - 1);
	m->spans = calloc(1, sizeof(*m->spans));
	if (!m->spans)
		return set_error_text(-ENOMEM, "out of memory");
	m->spans->size = m->size;
	return 0;
}

int mem_make(struct memory *m)
{
	int fd = memfd_create("vnicd-guest", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0)
		return set_error(-errno, "memfd: %s", strerror(errno));
	if (ftruncate(fd, (off_t)m->size) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) {
		int err = errno;

		close(fd);
		return set_error(-err, "memfd of %llu bytes: %s", (unsigned long long)m->size, strerror(err));
	}
	return mem_use(m, fd);
}

int mem_use(struct memory *m, int fd)
{
	struct stat st;
	void *p;

	m->fd = fd;
	if (fstat(fd, &st))
		return set_error(-errno, "memory file: %s", strerror(errno));
	if ((uint64_t)st.st_size < m->size)
		return set_error(-EPROTO, "memory file of %lld bytes, expected %llu", (long long)st.st_size,
				 (unsigned long long)m->size);
	p = mmap(NULL, m->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED)
		return set_error(-errno, "mapping %llu bytes: %s", (unsigned long long)m->size, strerror(errno));
	m->base = p;
	/* A forked child must not hold memory that the device writes to. */
	madvise(p, m->size, MADV_DONTFORK);
	return 0;
}

void mem_fini(struct memory *m)
{
	if (m->base)
		munmap(m->base, m->size);
	if (m->fd >= 0)
		close(m->fd);
	while (m->spans) {
		struct span *s = m->spans;

		m->spans = s->next;
		free(s);
	}
	while (m->pieces) {
		struct piece *own = m->pieces;

		m->pieces = own->next;
		free(own);
	}
}

void *mem_alloc(struct memory *m, uint64_t size)
{
	struct span *s, *rest;
	uint8_t *p = NULL;

	if (!size || size > m->size) {
		set_error(-ENOMEM, "no %llu bytes in a memory of %llu", (unsigned long long)size,
			  (unsigned long long)m->size);
		return NULL;
	}
	size = (size + PAGE_BYTES - 1) & ~(PAGE_BYTES - 1);
	rest = calloc(1, sizeof(*rest));
	if (!rest) {
		set_error_text(-ENOMEM, "out of memory");
		return NULL;
	}
	pthread_mutex_lock(&m->lock);
	for (s = m->spans; s && (s->used || s->size < size); s = s->next)
		;
	if (s) {
		if (s->size > size) {
			rest->off = s->off + size;
			rest->size = s->size - size;
			rest->next = s->next;
			s->next = rest;
			s->size = size;
			rest = NULL;
		}
		s->used = true;
		s->regions = 0;
		p = m->base + s->off;
		if (m->touched > s->off)
			memset(p, 0, m->touched - s->off < size ? m->touched - s->off : size);
		if (m->touched < s->off + size)
			m->touched = s->off + size;
	}
	pthread_mutex_unlock(&m->lock);
	free(rest);
	if (!p)
		set_error(-ENOMEM, "no %llu contiguous bytes are free in a memory of %llu", (unsigned long long)size,
			  (unsigned long long)m->size);
	return p;
}

/* The allocation that has the byte at p; NULL: none. */
static struct span *find(struct memory *m, const void *p)
{
	uint64_t off = (uint64_t)((uintptr_t)p - (uintptr_t)m->base);
	struct span *s;

	if ((uintptr_t)p < (uintptr_t)m->base || off >= m->size)
		return NULL;
	for (s = m->spans; s && off - s->off >= s->size; s = s->next)
		;
	return s && s->used ? s : NULL;
}

/* Joins s with its successor if both are free. */
static void join(struct span *s)
{
	struct span *n = s->next;

	if (!n || s->used || n->used)
		return;
	s->size += n->size;
	s->next = n->next;
	free(n);
}

int mem_free(struct memory *m, void *p)
{
	struct span *s, *before;
	int err = 0;

	pthread_mutex_lock(&m->lock);
	s = find(m, p);
	if (!s || m->base + s->off != (uint8_t *)p) {
		err = set_error_text(-EINVAL, "not memory of vnicd_alloc of this device");
	} else if (s->regions) {
		err = set_error(-EBUSY, "%u regions are registered in the memory", s->regions);
	} else {
		s->used = false;
		join(s);
		for (before = m->spans; before != s && before->next != s; before = before->next)
			;
		if (before != s)
			join(before);
	}
	pthread_mutex_unlock(&m->lock);
	return err;
}

int mem_hold(struct memory *m, const void *p, uint64_t n, uint64_t *pa)
{
	const uint8_t *at = p;
	struct piece *own;
	struct span *s;
	int err = 0;

	pthread_mutex_lock(&m->lock);
	s = find(m, p);
	own = s ? NULL : piece_of(m, p);
	if (s && n && n <= s->size - (uint64_t)(at - (m->base + s->off))) {
		s->regions++;
		*pa = mem_pa(m, p);
	} else if (own && own->usable && n && n <= own->size - (uint64_t)(at - own->addr)) {
		own->regions++;
		*pa = own->pa + (uint64_t)(at - own->addr);
	} else {
		err = set_error_text(-EINVAL, "the range is not within one allocation of vnicd_alloc, nor memory of "
					      "vnicd_share, of this device");
	}
	pthread_mutex_unlock(&m->lock);
	return err;
}

void mem_release(struct memory *m, const void *p)
{
	struct piece *own;
	struct span *s;

	pthread_mutex_lock(&m->lock);
	s = find(m, p);
	own = s ? NULL : piece_of(m, p);
	if (s)
		s->regions--;
	else if (own)
		own->regions--;
	pthread_mutex_unlock(&m->lock);
}

uint64_t mem_pa(const struct memory *m, const void *p)
{
	return PA_BASE + (uint64_t)((const uint8_t *)p - m->base);
}
