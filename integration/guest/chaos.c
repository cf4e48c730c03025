// SPDX-License-Identifier: Apache-2.0
/*
 * Operations of an owner on its memory while the peer writes it. Memory that has left the region must not change any
 * more.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stress.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#define HUGE ((uintptr_t)2 << 20)

/* Calls that may block go through here, so that the watchdog can name them. */
#define DO(c, call) ({ pulse_begin(&(c)->pulse, #call); __typeof__(call) _r = (call); pulse_end(&(c)->pulse); _r; })

static void must(int err, const char *what)
{
	if (err)
		fail(EXIT_SETUP, "%s: %m", what);
}

#define PARKED (sizeof(((struct chaos *)0)->parked) / sizeof(struct parked))

/* An operation holds the lock. */
static pthread_mutex_t running = PTHREAD_MUTEX_INITIALIZER;
static struct chaos *started;

void chaos_start(struct chaos *c)
{
	started = c;
	pulse_add(&c->pulse);
}

static void examine(const struct parked *k)
{
	if (k->p && checksum(k->p, k->n) != k->sum)
		fail(EXIT_DATA, "a write landed in memory that was released before: %zu bytes now at %p", k->n, k->p);
}

static void unpark(struct chaos *c, struct parked *k)
{
	examine(k);
	if (!k->p)
		return;
	munmap(k->p, k->n);
	k->p = NULL;
	c->parked_checked++;
}

void chaos_park(struct chaos *c, char *p, size_t n)
{
	struct parked *k = &c->parked[c->parked_next++ % PARKED];

	unpark(c, k);
	*k = (struct parked){ p, n, checksum(p, n) };
}

void chaos_finish(struct chaos *c)
{
	unsigned i;

	pthread_mutex_lock(&running);
	for (i = 0; i < PARKED; i++)
		unpark(c, &c->parked[i]);
	pthread_mutex_unlock(&running);
}

void chaos_watch(void)
{
	uint64_t end;
	unsigned i;

	if (!opt.watch || !started)
		return;
	/* Waits for an operation that waits for the device. Not unlocked: other threads wait for the exit. */
	pthread_mutex_lock(&running);
	for (end = now_ms() + opt.watch * 1000ull; now_ms() < end; nap_us(100000))
		for (i = 0; i < PARKED; i++)
			examine(&started->parked[i]);
	say("watched released memory for %d s; longest operation %llu ms", opt.watch,
	    (unsigned long long)started->longest);
}

/* Pages just freed are reused first: a mapping filled at once gets the same memory, and a late write shows in it. */
static void recycle(struct chaos *c, size_t n)
{
	char *p = DO(c, mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));

	must(p == MAP_FAILED, "mmap of canaries");
	memset(p, 0xc5, n);
	chaos_park(c, p, n);
}

/* Contents are lost; nothing is ever unmapped. */

static void op_dontneed(struct chaos *c, char *p, size_t n)
{
	must(DO(c, madvise(p, n, MADV_DONTNEED)), "madvise(MADV_DONTNEED)");
	recycle(c, n);
}

static void op_free(struct chaos *c, char *p, size_t n)
{
	must(DO(c, madvise(p, n, MADV_FREE)), "madvise(MADV_FREE)");
}

static void op_replace(struct chaos *c, char *p, size_t n)
{
	must(DO(c, mmap(p, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
			-1, 0)) != p, "mmap(MAP_FIXED)");
	recycle(c, n);
}

/* The pages themselves move elsewhere; the region gets fresh ones. */
static void op_mremap(struct chaos *c, char *p, size_t n)
{
	chaos_park(c, DO(c, carry_pages(p, n, MREMAP_DONTUNMAP, map_pages(n))), n);
}

/* For a while nothing is mapped. */

static void op_munmap(struct chaos *c, char *p, size_t n)
{
	must(DO(c, munmap(p, n)), "munmap");
	nap_us(below(&c->random, 3000));
	/* No other mapping has taken the address: threads of this program map nothing at this stage. */
	must(DO(c, mmap(p, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE,
			-1, 0)) != p, "mmap(MAP_FIXED_NOREPLACE)");
	recycle(c, n);
}

static void op_away(struct chaos *c, char *p, size_t n)
{
	char *to = DO(c, carry_pages(p, n, 0, map_pages(n)));
	uint64_t sum = checksum(to, n);

	nap_us(below(&c->random, 3000));
	if (checksum(to, n) != sum)
		fail(EXIT_DATA, "a write landed in memory that mremap had moved away, %zu bytes at %p", n, p);
	DO(c, carry_pages(to, n, 0, p));
}

static void op_protnone(struct chaos *c, char *p, size_t n)
{
	uint64_t sum;

	must(DO(c, mprotect(p, n, PROT_READ)), "mprotect(PROT_READ)");
	sum = checksum(p, n);
	nap_us(below(&c->random, 3000));
	if (checksum(p, n) != sum)
		fail(EXIT_DATA, "a write landed in memory that mprotect had made read-only, %zu bytes at %p", n, p);
	must(DO(c, mprotect(p, n, PROT_NONE)), "mprotect(PROT_NONE)");
	nap_us(below(&c->random, 1000));
	must(DO(c, mprotect(p, n, PROT_READ | PROT_WRITE)), "mprotect");
}

/* Contents stay. Advice may be refused: EAGAIN, EINVAL and EBUSY depend on the kernel's state. */

static void op_pageout(struct chaos *c, char *p, size_t n)
{
	DO(c, madvise(p, n, MADV_PAGEOUT));
}

static void op_cold(struct chaos *c, char *p, size_t n)
{
	DO(c, madvise(p, n, MADV_COLD));
}

static void op_mprotect(struct chaos *c, char *p, size_t n)
{
	must(DO(c, mprotect(p, n, PROT_READ | PROT_WRITE | PROT_EXEC)), "mprotect(PROT_EXEC)");
	nap_us(below(&c->random, 1000));
	must(DO(c, mprotect(p, n, PROT_READ | PROT_WRITE)), "mprotect");
}

/* The child keeps the memory as of the fork: later writes reach the parent only. */
static void op_fork(struct chaos *c, char *p, size_t n)
{
	unsigned us = 1000 + below(&c->random, 20000);
	pid_t child = DO(c, fork());
	int status;

	must(child < 0, "fork");
	if (!child) {
		uint64_t sum = checksum(p, n);

		nap_us(us);
		_exit(checksum(p, n) == sum ? 0 : EXIT_DATA);
	}
	must(DO(c, waitpid(child, &status, 0)) != child, "waitpid");
	if (status)
		fail(EXIT_DATA, "a write after a fork landed in the child's memory, %zu bytes at %p (status %#x)", n, p,
		     status);
}

static void op_movepages(struct chaos *c, char *p, size_t n)
{
	unsigned i, count = n / PAGE;
	int node = below(&c->random, 2);
	int *nodes = malloc(count * sizeof(int)), *status = malloc(count * sizeof(int));
	void **pages = malloc(count * sizeof(void *));

	for (i = 0; i < count; i++) {
		pages[i] = p + (size_t)i * PAGE;
		nodes[i] = node;
	}
	/* ENODEV with one node: then compaction migrates pages. */
	if (DO(c, syscall(SYS_move_pages, 0, (long)count, pages, nodes, status, 2)) < 0 && errno != ENODEV &&
	    errno != ENOENT && errno != ENOMEM)
		fail(EXIT_SETUP, "move_pages: %m");
	free(nodes);
	free(status);
	free(pages);
}

static void op_migrate(struct chaos *c, char *p, size_t n)
{
	unsigned long from = 1 + below(&c->random, 2), to = 3 - from;

	(void)p;
	(void)n;
	if (DO(c, syscall(SYS_migrate_pages, 0, 8 * sizeof(long), &from, &to)) < 0 && errno != EINVAL &&
	    errno != ENOMEM)
		fail(EXIT_SETUP, "migrate_pages: %m");
}

static void write_file(struct chaos *c, const char *file, const char *text)
{
	int fd = open(file, O_WRONLY);

	if (fd >= 0 && DO(c, write(fd, text, strlen(text))) < 0 && errno != EINTR)
		fail(EXIT_SETUP, "writing %s: %m", file);
	if (fd >= 0)
		close(fd);
}

static void op_compact(struct chaos *c, char *p, size_t n)
{
	(void)p;
	(void)n;
	write_file(c, "/proc/sys/vm/compact_memory", "1");
}

/*
 * Collapses the surrounding memory into a huge page. MADV_HUGEPAGE would leave adjacent mappings of different kinds,
 * which mremap refuses to move at once.
 */
static void op_thp(struct chaos *c, char *p, size_t n)
{
	char *start = (char *)((uintptr_t)p & ~(HUGE - 1));

	(void)n;
	if (start < c->base)
		start += HUGE;
	if (start + HUGE <= c->base + c->length)
		DO(c, madvise(start, HUGE, MADV_COLLAPSE));
}

const struct chaos_op chaos_ops[] = {
	{ "dontneed", CHAOS_RELEASE, op_dontneed },
	{ "free", CHAOS_RELEASE, op_free },
	{ "replace", CHAOS_RELEASE, op_replace },
	{ "mremap", CHAOS_RELEASE, op_mremap },
	{ "munmap", CHAOS_HOLE, op_munmap },
	{ "away", CHAOS_HOLE, op_away },
	{ "protnone", CHAOS_HOLE, op_protnone },
	{ "pageout", CHAOS_KEEP, op_pageout },
	{ "cold", CHAOS_KEEP, op_cold },
	{ "mprotect", CHAOS_KEEP, op_mprotect },
	{ "fork", CHAOS_KEEP, op_fork },
	{ "movepages", CHAOS_KEEP, op_movepages },
	{ "migrate", CHAOS_KEEP, op_migrate },
	{ "compact", CHAOS_KEEP, op_compact },
	{ "thp", CHAOS_KEEP, op_thp },
};
const unsigned chaos_count = sizeof(chaos_ops) / sizeof(chaos_ops[0]);

unsigned long chaos_parse(const char *list)
{
	unsigned long set = 0;
	char *copy = strdup(list), *word, *save = NULL;

	for (word = strtok_r(copy, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
		unsigned long found = 0;
		unsigned i;

		for (i = 0; i < chaos_count; i++)
			if (!strcmp(word, chaos_ops[i].name) || !strcmp(word, "all") ||
			    (!strcmp(word, "keep") && chaos_ops[i].kind == CHAOS_KEEP) ||
			    (!strcmp(word, "release") && chaos_ops[i].kind == CHAOS_RELEASE) ||
			    (!strcmp(word, "hole") && chaos_ops[i].kind == CHAOS_HOLE))
				found |= 1ul << i;
		if (!found && strcmp(word, "none"))
			fail(EXIT_SETUP, "unknown chaos %s", word);
		set |= found;
	}
	free(copy);
	return set;
}

void chaos_do(struct chaos *c, unsigned op, char *p, size_t n)
{
	uint64_t start;

	pthread_mutex_lock(&running);
	start = now_ms();
	chaos_ops[op].run(c, p, n);
	c->longest = now_ms() - start > c->longest ? now_ms() - start : c->longest;
	c->done[op]++;
	pthread_mutex_unlock(&running);
}

void chaos_list(char *buf, size_t len)
{
	size_t used = 0;
	unsigned i;

	for (i = 0; i < chaos_count && used < len; i++)
		used += snprintf(buf + used, len - used, " %s", chaos_ops[i].name);
}
