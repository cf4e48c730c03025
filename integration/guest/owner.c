// SPDX-License-Identifier: Apache-2.0
/*
 * The owner of a region: lets the peer write it, takes memory away, and checks the contents with the processor.
 * README.md describes the protocol with the hammer.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stress.h"

struct owner {
	struct nic *nic;
	struct ibv_qp *qp[MAX_QPS];
	struct remote to[MAX_QPS];
	struct ibv_cq *cq;
	struct ibv_mr *mr, *counter_mr;
	char *base;
	uint64_t *counters;
	int fd;
	bool done;
	struct chaos chaos;
	unsigned long long cycles, reconnects;
};

#define COUNTER_BYTES	(MAX_QPS * COUNTERS * sizeof(uint64_t))

struct owner *owner_make(struct nic *n)
{
	const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
			   IBV_ACCESS_REMOTE_ATOMIC;
	struct owner *o = calloc(1, sizeof(*o));
	uint64_t start;
	unsigned i;

	o->nic = n;
	/* Aligned to pages only. */
	o->base = (char *)map_pages(opt.region + 8 * PAGE) + 3 * PAGE;
	o->counters = map_pages(COUNTER_BYTES);
	if (opt.pager_ms != PAGER_NONE)
		pager_start(o->base, opt.region, opt.pager_ms);
	start = now_ms();
	o->mr = nic_register(n, opt.memory, o->base, opt.region, access);
	say("registered %zu MiB in %llu ms", opt.region >> 20, (unsigned long long)(now_ms() - start));
	o->counter_mr = nic_register(n, opt.memory, o->counters, COUNTER_BYTES, access);
	o->cq = ibv_create_cq(n->ctx, 16, NULL, NULL, 0);
	if (!o->cq)
		fail(EXIT_SETUP, "creating a completion queue: %m");
	for (i = 0; i < opt.qps; i++)
		o->qp[i] = nic_qp(n, IBV_QPT_RC, o->cq, 1);
	o->chaos.base = o->base;
	o->chaos.length = opt.region;
	o->chaos.random = opt.seed + (opt.server ? 100 : 200);
	chaos_start(&o->chaos);
	return o;
}

struct target owner_target(struct owner *o)
{
	uint32_t kinds = 0;
	unsigned i;

	for (i = 0; i < chaos_count; i++)
		kinds |= opt.chaos >> i & 1 ? chaos_ops[i].kind : 0;
	return (struct target){
		.addr = (uint64_t)o->base, .length = opt.region, .chunk = opt.chunk, .counters = (uint64_t)o->counters,
		.rkey = o->mr->rkey, .counter_key = o->counter_mr->rkey,
		.chaos = kinds,
	};
}

struct ibv_qp *owner_qp(struct owner *o, unsigned i) { return o->qp[i]; }
void owner_socket(struct owner *o, int fd) { o->fd = fd; }

void owner_connect(struct owner *o, unsigned i, const struct remote *to, uint32_t psn)
{
	o->to[i] = *to;
	qp_connect(o->nic, o->qp[i], to, psn);
}

/* Receives the generations of all sectors, then the counters, and compares everything with the processor. */
static void verify_all(struct owner *o, uint64_t seed)
{
	uint32_t sectors = opt.region / SECTOR, *gen = malloc(sectors * sizeof(*gen)), s, written = 0;
	uint64_t want[COUNTERS];
	unsigned q, i;

	net_recv(o->fd, gen, sectors * sizeof(*gen));
	for (s = 0; s < sectors; s++) {
		if (!(s % 1024))
			pulse_begin(&o->chaos.pulse, "the owner's check of its region");
		/* Reading sectors that were never written would only fill memory with zero pages. */
		if (opt.pager_ms != PAGER_NONE && !gen[s])
			continue;
		if (!pattern_is(o->base + (size_t)s * SECTOR, seed, s, gen[s]))
			pattern_blame("final check by the owner", o->base + (size_t)s * SECTOR, seed, s, gen[s]);
		written += !!gen[s];
	}
	for (q = 0; q < opt.qps; q++) {
		net_recv(o->fd, want, sizeof(want));
		for (i = 0; i < COUNTERS; i++)
			if (want[i] != o->counters[q * COUNTERS + i])
				fail(EXIT_DATA, "counter %u of queue pair %u is %llu, not %llu", i, q,
				     (unsigned long long)o->counters[q * COUNTERS + i], (unsigned long long)want[i]);
	}
	pulse_end(&o->chaos.pulse);
	free(gen);
	say("verified %zu MiB by the processor, %u MiB of it written by the peer", opt.region >> 20, written / 2048);
}

/* Handles the hammer's own requests; returns other messages. */
static bool handled(struct owner *o, struct msg *m)
{
	*m = msg_recv(o->fd);
	switch (m->type) {
	case MSG_RECONNECT:
		if (m->a >= opt.qps)
			fail(EXIT_PEER, "no queue pair %u", m->a);
		qp_reset(o->qp[m->a]);
		o->to[m->a].psn = m->b;
		qp_connect(o->nic, o->qp[m->a], &o->to[m->a], m->b);
		o->reconnects++;
		msg_send(o->fd, MSG_RECONNECTED, m->a, 0);
		return true;
	case MSG_DONE:
		chaos_finish(&o->chaos);
		verify_all(o, m->b);
		msg_send(o->fd, MSG_DONE_OK, 0, 0);
		o->done = true;
		return true;
	}
	return false;
}

/* Sends a request and waits for the answer; false if the hammer has finished instead. */
static bool ask(struct owner *o, uint32_t type, uint32_t chunk, uint64_t b, uint32_t answer, uint64_t *value)
{
	struct msg m;

	msg_send(o->fd, type, chunk, b);
	for (;;) {
		if (handled(o, &m)) {
			if (o->done)
				return false;
			continue;
		}
		if (m.type != answer || m.a != chunk)
			fail(EXIT_PEER, "message %u about chunk %u instead of %u about %u", m.type, m.a, answer, chunk);
		if (value)
			*value = m.b;
		return true;
	}
}

static void check_chunk(struct owner *o, const char *p, uint64_t seed, uint32_t first, uint32_t gen, const char *when)
{
	uint32_t s;

	pulse_begin(&o->chaos.pulse, when);
	for (s = 0; s < opt.chunk / SECTOR; s++)
		if (!pattern_is(p + (size_t)s * SECTOR, seed, first + s, gen))
			pattern_blame(when, p + (size_t)s * SECTOR, seed, first + s, gen);
	pulse_end(&o->chaos.pulse);
}

/* The parent writes after a fork: the peer must see the parent's page, the child its own. */
static bool fork_then_write(struct owner *o, uint32_t chunk, char *p, uint64_t seed, uint32_t gen)
{
	uint32_t first = chunk * (opt.chunk / SECTOR), s;
	int hold[2], status;
	pid_t child;
	char c;

	if (pipe(hold))
		fail(EXIT_SETUP, "pipe: %m");
	child = fork();
	if (child < 0)
		fail(EXIT_SETUP, "fork: %m");
	if (!child) {
		close(hold[1]);
		(void)!read(hold[0], &c, 1);
		for (s = 0; s < opt.chunk / SECTOR; s++)
			if (!pattern_is(p + (size_t)s * SECTOR, seed, first + s, gen))
				_exit(EXIT_DATA);
		_exit(0);
	}
	close(hold[0]);
	for (s = 0; s < opt.chunk / SECTOR; s++)
		pattern_fill(p + (size_t)s * SECTOR, seed, first + s, gen + 1);
	bool go_on = ask(o, MSG_VERIFY, chunk, gen + 1, MSG_VERIFIED, NULL);

	close(hold[1]);
	if (waitpid(child, &status, 0) != child)
		fail(EXIT_SETUP, "waitpid: %m");
	if (status)
		fail(EXIT_DATA, "the child's copy of chunk %u was changed by its parent (status %#x)", chunk, status);
	return go_on;
}

/* Until THAW a settled chunk belongs to the owner; the peer only reads on request. Returns false at the end. */
static bool settled(struct owner *o, uint32_t chunk, char *p, uint64_t seed, uint32_t gen)
{
	uint32_t first = chunk * (opt.chunk / SECTOR);
	size_t n = opt.chunk;
	char *to;

	check_chunk(o, p, seed, first, gen, "settled chunk, by the owner");
	switch (below(&o->chaos.random, 5)) {
	case 0:
		return fork_then_write(o, chunk, p, seed, gen);
	case 1:		/* read-only: the peer still reads */
		if (mprotect(p, n, PROT_READ))
			fail(EXIT_SETUP, "mprotect: %m");
		if (!ask(o, MSG_VERIFY, chunk, gen, MSG_VERIFIED, NULL))
			return false;
		if (mprotect(p, n, PROT_READ | PROT_WRITE))
			fail(EXIT_SETUP, "mprotect: %m");
		return true;
	case 2:		/* out to swap: the device's writes must have marked the pages dirty */
		madvise(p, n, MADV_PAGEOUT);
		check_chunk(o, p, seed, first, gen, "chunk after page-out, by the owner");
		return ask(o, MSG_VERIFY, chunk, gen, MSG_VERIFIED, NULL);
	case 3:		/* away and back: pages move with their contents */
		to = carry_pages(p, n, 0, map_pages(n));
		check_chunk(o, to, seed, first, gen, "chunk moved by mremap, by the owner");
		carry_pages(to, n, 0, p);
		return ask(o, MSG_VERIFY, chunk, gen, MSG_VERIFIED, NULL);
	}
	return true;
}

/* A random page-aligned part of [p, p+n). */
static char *part(struct owner *o, char *p, size_t n, size_t *len)
{
	size_t pages = n / PAGE, first = below(&o->chaos.random, pages);
	size_t most = pages - first, count = 1 + below(&o->chaos.random, most);

	if (below(&o->chaos.random, 2))
		count = 1 + below(&o->chaos.random, most < 4 ? most : 4);
	*len = count * PAGE;
	return p + first * PAGE;
}

static bool pick(struct owner *o, int kinds, unsigned *op)
{
	unsigned i, n = 0;

	for (i = 0; i < chaos_count; i++)
		if ((opt.chaos >> i & 1) && (chaos_ops[i].kind & kinds) && !below(&o->chaos.random, ++n))
			*op = i;
	return n;
}

/* One round on one chunk, while the peer writes and reads it at full speed. */
static void release_cycle(struct owner *o)
{
	uint32_t chunk = below(&o->chaos.random, opt.region / opt.chunk);
	char *p = o->base + (size_t)chunk * opt.chunk, *q;
	unsigned i, op, rounds = 1 + below(&o->chaos.random, 8);
	uint64_t answer, seed;
	size_t n;

	if (!ask(o, MSG_WILD, chunk, 0, MSG_WILD_OK, &seed))
		return;
	for (i = 0; i < rounds && pick(o, CHAOS_RELEASE | CHAOS_HOLE, &op); i++) {
		q = part(o, p, opt.chunk, &n);
		chaos_do(&o->chaos, op, q, n);
		if (net_readable(o->fd, below(&o->chaos.random, 4))) {
			struct msg m;

			if (!handled(o, &m))
				fail(EXIT_PEER, "unexpected message %u during a release", m.type);
			if (o->done)
				return;
		}
	}
	if (!ask(o, MSG_SETTLE, chunk, 0, MSG_SETTLED, &answer))
		return;
	if (!settled(o, chunk, p, seed, answer))
		return;
	msg_send(o->fd, MSG_THAW, chunk, 0);
	o->cycles++;
}

void *owner_run(void *arg)
{
	struct owner *o = arg;
	unsigned op;
	size_t n;
	char *p;

	while (!o->done) {
		struct msg m;

		if (net_readable(o->fd, opt.chaos ? (int)below(&o->chaos.random, 3) : 1000)) {
			if (!handled(o, &m))
				fail(EXIT_PEER, "unexpected message %u", m.type);
			continue;
		}
		if (pick(o, CHAOS_KEEP, &op)) {
			if (!below(&o->chaos.random, 20)) {
				p = (char *)o->counters;
				n = COUNTER_BYTES;
			} else {
				p = part(o, o->base + below(&o->chaos.random, opt.region / opt.chunk) * opt.chunk,
					 opt.chunk, &n);
			}
			chaos_do(&o->chaos, op, p, n);
		}
		if (pick(o, CHAOS_RELEASE | CHAOS_HOLE, &op))
			release_cycle(o);
	}
	return NULL;
}

void owner_report(struct owner *o)
{
	unsigned i;

	if (!opt.chaos)
		return;
	say("result cycles=%llu reconnects=%llu parked=%llu", o->cycles, o->reconnects, o->chaos.parked_checked);
	for (i = 0; i < chaos_count; i++)
		if (opt.chaos >> i & 1)
			say("chaos %s=%llu", chaos_ops[i].name, o->chaos.done[i]);
}
