/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of the program's own. vnicd refuses files that it cannot seal, and ends the connection for some of them, with
 * the reason in its log only; so everything is checked here first.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>

#include "internal.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x10
#endif

/* The file's bytes can be shared. */
static int check_file(int fd, uint64_t offset, uint64_t length)
{
	uint64_t page = PAGE_BYTES;
	struct statfs fs;
	struct stat st;
	int seals;

	if (fstat(fd, &st) || fstatfs(fd, &fs))
		return set_error(-errno, "memory file: %s", strerror(errno));
	if (fs.f_type == HUGETLBFS_MAGIC)
		page = (uint64_t)fs.f_bsize;
	if (!length || offset % page || length % page)
		return set_error(-EINVAL, "%" PRIu64 " bytes at offset %" PRIu64 ": expected multiples of %" PRIu64,
				 length, offset, page);
	if (offset + length < offset || offset + length > (uint64_t)st.st_size)
		return set_error(-EINVAL, "%" PRIu64 " bytes at offset %" PRIu64 " of a file of %" PRIu64, length,
				 offset, (uint64_t)st.st_size);
	if ((fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR)
		return set_error_text(-EINVAL, "the file is not open for reading and writing");
	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0)
		return set_error_text(-EINVAL, "the file cannot be sealed; expected one of memfd_create with "
					       "MFD_ALLOW_SEALING");
	if (seals & F_SEAL_SEAL)
		return set_error_text(-EINVAL, "the file's seals are final (F_SEAL_SEAL); expected one of memfd_create "
					       "with MFD_ALLOW_SEALING");
	if (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE))
		return set_error_text(-EINVAL, "the file is sealed against writing, as one is that has been shared; "
					       "share all of a file at once");
	return 0;
}

/* The bytes at addr are mapped, readable, writable and shared, to the file from offset on. */
static int check_mapping(int fd, uint64_t offset, uint64_t addr, uint64_t length)
{
	uint64_t at = addr, end = addr + length, first, last, start, inode;
	unsigned int major_of, minor_of;
	char *line = NULL, mode[5];
	size_t size = 0;
	struct stat st;
	FILE *maps;
	int err = 0;

	if (fstat(fd, &st))
		return set_error(-errno, "memory file: %s", strerror(errno));
	maps = fopen("/proc/self/maps", "re");
	if (!maps)
		return set_error(-errno, "/proc/self/maps: %s", strerror(errno));
	while (!err && at < end && getline(&line, &size, maps) > 0) {
		if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64, &first, &last, mode, &start,
			   &major_of, &minor_of, &inode) != 7 || at < first || at >= last)
			continue;
		if (major_of != major(st.st_dev) || minor_of != minor(st.st_dev) || inode != st.st_ino ||
		    start + (at - first) != offset + (at - addr))
			err = set_error(-EINVAL, "the memory at %#" PRIx64 " is not a mapping of the file's offset %#"
						 PRIx64, at, offset + (at - addr));
		else if (strncmp(mode, "rw", 2) || mode[3] != 's')
			err = set_error(-EINVAL, "the memory at %#" PRIx64 " is mapped as %s; expected rw-s, a shared "
						 "mapping", at, mode);
		at = last;
	}
	free(line);
	fclose(maps);
	if (!err && at < end)
		err = set_error(-EINVAL, "the memory at %#" PRIx64 " is not mapped", at);
	return err;
}

struct piece *piece_of(struct memory *m, const void *p)
{
	struct piece *own;

	for (own = m->pieces; own && (uintptr_t)p - (uintptr_t)own->addr >= own->size; own = own->next)
		;
	return own;
}

static uint64_t behind(const struct piece *own)
{
	return ((own->pa + own->size) & ~(SHARED_ALIGN - 1)) + 2 * SHARED_ALIGN;
}

/*
 * Where a piece goes: behind the last one, with a gap, so that a PA does not soon mean something else. From the end of
 * all PAs on it is the first gap between the pieces. 0: there is none.
 */
static uint64_t place(const struct memory *m, uint64_t size)
{
	const uint64_t from[] = { m->next_pa ? m->next_pa : SHARED_BASE, SHARED_BASE };
	const struct piece *own;
	bool moved;

	for (int i = 0; i < 2; i++) {
		uint64_t pa = from[i];

		do {
			moved = false;
			for (own = m->pieces; own; own = own->next) {
				if (pa < behind(own) && own->pa < pa + size) {
					pa = behind(own);
					moved = true;
				}
			}
		} while (moved);
		if (pa < PA_END && size <= PA_END - pa)
			return pa;
	}
	return 0;
}

static void drop(struct memory *m, struct piece *own)
{
	struct piece **p;

	pthread_mutex_lock(&m->lock);
	for (p = &m->pieces; *p != own; p = &(*p)->next)
		;
	*p = own->next;
	pthread_mutex_unlock(&m->lock);
	free(own);
}

/* A request without a reply may still be executed, and its late reply would be taken for that to the next one. */
static int in_step(struct vnicd_device *dev, int err)
{
	bool lost;

	if (!err)
		return 0;
	pthread_mutex_lock(&dev->vhost.lock); /* of another thread's request it is known when that is over */
	lost = dev->vhost.out_of_step;
	pthread_mutex_unlock(&dev->vhost.lock);
	if (!lost)
		return err;
	device_fail(dev, err, "sharing memory: %s", vnicd_error());
	return device_check(dev);
}

EXPORT int vnicd_share(struct vnicd_device *dev, int fd, uint64_t offset, void *addr, size_t length)
{
	struct memory *m = &dev->mem;
	struct piece *own;
	int err;

	err = device_check(dev);
	if (!err)
		err = check_file(fd, offset, length);
	if (!err)
		err = check_mapping(fd, offset, (uintptr_t)addr, length);
	if (err)
		return err;
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK))
		return set_error(-errno, "F_SEAL_SHRINK: %s", strerror(errno));
	own = calloc(1, sizeof(*own));
	if (!own)
		return set_error_text(-ENOMEM, "out of memory");
	own->addr = addr;
	own->size = length;
	pthread_mutex_lock(&m->lock);
	own->pa = place(m, length);
	if (own->pa) {
		m->next_pa = behind(own);
		own->next = m->pieces;
		m->pieces = own;
	}
	pthread_mutex_unlock(&m->lock);
	if (!own->pa) {
		free(own);
		return set_error_text(-ENOMEM, "no room among the device's addresses");
	}
	err = in_step(dev, vhost_add_memory(&dev->vhost, own->pa, own->size, offset, fd, now_ms() + dev->timeout_ms));
	if (err) {
		drop(m, own);
		return err;
	}
	pthread_mutex_lock(&m->lock);
	own->usable = true;
	pthread_mutex_unlock(&m->lock);
	return 0;
}

EXPORT int vnicd_unshare(struct vnicd_device *dev, void *addr)
{
	struct memory *m = &dev->mem;
	struct piece *own;
	int err = 0;

	pthread_mutex_lock(&m->lock);
	own = piece_of(m, addr);
	if (!own || !own->usable || own->addr != addr)
		err = set_error_text(-EINVAL, "not memory of vnicd_share of this device");
	else if (own->regions)
		err = set_error(-EBUSY, "%u regions are registered in the memory", own->regions);
	else
		own->usable = false;
	pthread_mutex_unlock(&m->lock);
	if (err)
		return err;
	err = in_step(dev, vhost_remove_memory(&dev->vhost, own->pa, own->size, now_ms() + dev->timeout_ms));
	if (err) {
		pthread_mutex_lock(&m->lock);
		own->usable = true;
		pthread_mutex_unlock(&m->lock);
		return err;
	}
	drop(m, own);
	return 0;
}
