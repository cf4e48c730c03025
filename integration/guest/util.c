// SPDX-License-Identifier: Apache-2.0
/* Messages, random numbers, patterns, the watchdog. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "stress.h"

static const char *role(void)
{
	return opt.server ? "client" : "server";
}

void say(const char *fmt, ...)
{
	char line[1024];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(line, sizeof(line), fmt, ap);
	va_end(ap);
	printf("%s: %s\n", role(), line);
	fflush(stdout);
}

void fail(int status, const char *fmt, ...)
{
	char line[1024];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(line, sizeof(line), fmt, ap);
	va_end(ap);
	fprintf(stderr, "%s: FAILED: %s\n", role(), line);
	if (status == EXIT_VERBS || status == EXIT_PEER)
		chaos_watch();
	fflush(NULL);
	_exit(status);	/* other threads still run: no destructors */
}

uint64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000ull + t.tv_nsec / 1000000;
}

void nap_us(unsigned us)
{
	struct timespec t = { us / 1000000, us % 1000000 * 1000 };

	nanosleep(&t, NULL);
}

static uint64_t mix(uint64_t z)
{
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

uint64_t rnd(uint64_t *state)
{
	return mix(*state += 0x9e3779b97f4a7c15ull);
}

uint64_t below(uint64_t *state, uint64_t n)
{
	return (uint64_t)(((unsigned __int128)rnd(state) * n) >> 64);
}

uint64_t meminfo(const char *file, const char *key)
{
	unsigned long long v = 0;
	char line[256];
	size_t n = strlen(key);
	FILE *f = fopen(file, "r");

	if (!f)
		return 0;
	while (fgets(line, sizeof(line), f))
		if (!strncmp(line, key, n) && (line[n] == ':' || line[n] == ' ')) {
			v = strtoull(line + n + 1, NULL, 10);
			break;
		}
	fclose(f);
	return v;
}

void *map_pages(size_t n)
{
	void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (p == MAP_FAILED)
		fail(EXIT_SETUP, "mmap of %zu bytes: %m", n);
	return p;
}

/*
 * Linux before 6.17 moves pages of one mapping only, and a fork prevents adjacent mappings from being merged. The first
 * attempt may have unmapped the destination; another thread must not map it before the second attempt.
 */
char *carry_pages(char *p, size_t n, int how, char *to)
{
	const int flags = MREMAP_MAYMOVE | MREMAP_FIXED | how;
	size_t i;

	if (mremap(p, n, n, flags, to) == to)
		return to;
	for (i = 0; errno == EFAULT && i < n && mremap(p + i, PAGE, PAGE, flags, to + i) == to + i; i += PAGE)
		;
	if (i < n)
		fail(EXIT_SETUP, "mremap of page %zu of %zu: %m", i / PAGE, n / PAGE);
	return to;
}

/* Both are odd, so that multiplication by them is invertible. */
#define GEN_STEP	0xd6e8feb86659fd93ull
#define WORD_STEP	0xa0761d6478bd642full
#define WORDS		(SECTOR / sizeof(uint64_t))

static uint64_t origin(uint64_t seed, uint32_t sector)
{
	return mix(seed * 0x2545f4914f6cdd1dull + sector);
}

/* The generation of a word, or a huge number if it belongs to none. */
static uint64_t generation(uint64_t v, uint64_t seed, uint32_t sector, unsigned word)
{
	uint64_t inv = GEN_STEP;
	int i;

	for (i = 0; i < 5; i++)		/* Newton: correct bits double each time */
		inv *= 2 - GEN_STEP * inv;
	return (v - origin(seed, sector) - word * WORD_STEP) * inv;
}

void pattern_fill(void *p, uint64_t seed, uint32_t sector, uint32_t gen)
{
	uint64_t v = origin(seed, sector) + gen * GEN_STEP;
	uint64_t *w = p;
	unsigned i;

	for (i = 0; i < WORDS; i++, v += WORD_STEP)
		memcpy(&w[i], &v, sizeof(v));	/* p need not be aligned */
}

bool pattern_is(const void *p, uint64_t seed, uint32_t sector, uint32_t gen)
{
	uint64_t v = gen ? origin(seed, sector) + gen * GEN_STEP : 0;
	uint64_t step = gen ? WORD_STEP : 0, got, bad = 0;
	unsigned i;

	for (i = 0; i < WORDS; i++, v += step) {
		memcpy(&got, (const char *)p + i * sizeof(got), sizeof(got));
		bad |= got ^ v;
	}
	return !bad;
}

bool pattern_upto(const void *p, uint64_t seed, uint32_t sector, uint32_t newest)
{
	uint64_t got;
	unsigned i;

	for (i = 0; i < WORDS; i++) {
		memcpy(&got, (const char *)p + i * sizeof(got), sizeof(got));
		if (got && generation(got, seed, sector, i) - 1 >= newest)
			return false;
	}
	return true;
}

void pattern_blame(const char *who, const void *p, uint64_t seed, uint32_t sector, uint32_t gen)
{
	unsigned i, wrong = 0, first = WORDS;
	uint64_t got, found = 0;
	char what[64];

	for (i = 0; i < WORDS; i++) {
		uint64_t want = gen ? origin(seed, sector) + gen * GEN_STEP + i * WORD_STEP : 0;

		memcpy(&got, (const char *)p + i * sizeof(got), sizeof(got));
		if (got == want)
			continue;
		if (!wrong++) {
			first = i;
			found = got;
		}
	}
	got = generation(found, seed, sector, first);
	if (!found)
		snprintf(what, sizeof(what), "zero");
	else if (got && got < 1u << 31)
		snprintf(what, sizeof(what), "generation %llu", (unsigned long long)got);
	else
		snprintf(what, sizeof(what), "foreign, %#llx", (unsigned long long)found);
	fail(EXIT_DATA, "%s: sector %u (offset %#llx, %p): %u of %zu words are not of generation %u; word %u is %s",
	     who, sector, (unsigned long long)sector * SECTOR, p, wrong, WORDS, gen, first, what);
}

uint64_t checksum(const void *p, size_t n)
{
	const uint64_t *w = p;
	uint64_t s = 0;
	size_t i;

	for (i = 0; i < n / sizeof(*w); i++)
		s = s * 0x9e3779b97f4a7c15ull + w[i];
	return s;
}

static struct pulse *pulses;

void pulse_add(struct pulse *p)
{
	p->next = pulses;
	pulses = p;
}

void pulse_begin(struct pulse *p, const char *what)
{
	__atomic_store_n(&p->since, now_ms(), __ATOMIC_RELEASE);
	__atomic_store_n(&p->what, what, __ATOMIC_RELEASE);
}

void pulse_end(struct pulse *p)
{
	__atomic_store_n(&p->what, NULL, __ATOMIC_RELEASE);
}

void pulse_watch(void)
{
	struct pulse *p;

	for (p = pulses; p; p = p->next) {
		const char *what = __atomic_load_n(&p->what, __ATOMIC_ACQUIRE);
		uint64_t since = __atomic_load_n(&p->since, __ATOMIC_ACQUIRE);

		if (what && now_ms() > since + opt.patience * 1000ull &&
		    what == __atomic_load_n(&p->what, __ATOMIC_ACQUIRE) &&
		    since == __atomic_load_n(&p->since, __ATOMIC_ACQUIRE))
			fail(EXIT_HANG, "%s did not complete within %d s", what, opt.patience);
	}
}
