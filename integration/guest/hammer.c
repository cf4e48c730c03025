// SPDX-License-Identifier: Apache-2.0
/*
 * The hammer: WRITEs, READs and atomics all over the peer's region, many at once. It knows the generation of every
 * sector, and no two of its operations access the same sector at the same time. So every READ has exactly one right
 * answer, except in a chunk whose owner is releasing pages.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "stress.h"

enum state { NORMAL, WILD, SETTLING, FROZEN };

struct op {
	enum ibv_wr_opcode kind;
	bool busy;		/* the device executes it */
	bool again;		/* failed because of a hole in the region: to be repeated */
	bool job;		/* part of the owner's request */
	unsigned qp;
	uint32_t first, count;	/* sectors; atomics: index of the counter */
	char *buf;
	uint64_t since;
};

struct hammer {
	struct nic *nic;
	struct target to;
	int fd;
	uint64_t seed, random;
	struct ibv_cq *cq;
	struct ibv_comp_channel *channel;
	struct lane {
		struct ibv_qp *qp;
		struct remote to;
		uint32_t psn;
		unsigned busy;		/* operations in the queue */
		bool broken, asked;	/* in error; reconnection requested */
		uint64_t flushed;	/* time of the first flushed completion without an error completion */
		uint64_t counter[COUNTERS];
	} lane[MAX_QPS];
	struct op *op;
	unsigned ops;
	char *arena;
	size_t slot;		/* bytes per operation in the arena */
	struct ibv_mr *mr;

	uint32_t sectors, chunk_sectors, chunks, cell;	/* cell: sectors in the largest message */
	uint32_t *gen;
	uint8_t *state;
	uint32_t wild;		/* chunk that is wild, or chunks */
	uint32_t *order, cells, next_write, next_read;	/* the sweep: each cell once, in random order */

	/* The owner's request: chunk and progress. */
	struct job { uint32_t chunk, answer, next, pending; bool active, write; } job;

	bool claimed;		/* the owner works on a chunk, from WILD to THAW */
	bool sweeping;		/* time is over: only finish the sweep */
	bool ending, done;
	unsigned long long writes, reads, atomics, written, read, reconnects, loose;
	struct pulse pulse;
};

struct hammer *hammer_make(struct nic *n)
{
	struct hammer *h = calloc(1, sizeof(*h));
	unsigned i;

	h->nic = n;
	h->ops = opt.qps * opt.depth;
	h->op = calloc(h->ops, sizeof(*h->op));
	h->slot = ((opt.message + 64 + PAGE - 1) / PAGE) * PAGE;
	h->arena = map_pages(h->slot * h->ops);
	h->mr = nic_register(n, opt.local, h->arena, h->slot * h->ops, IBV_ACCESS_LOCAL_WRITE);
	h->channel = ibv_create_comp_channel(n->ctx);
	h->cq = h->channel ? ibv_create_cq(n->ctx, h->ops + 1, NULL, h->channel, 0) : NULL;
	if (!h->cq)
		fail(EXIT_SETUP, "creating a completion queue: %m");
	for (i = 0; i < opt.qps; i++)
		h->lane[i].qp = nic_qp(n, IBV_QPT_RC, h->cq, opt.depth);
	h->seed = opt.seed * 2 + !!opt.server + 1;
	h->random = h->seed << 20;
	pulse_add(&h->pulse);
	return h;
}

struct ibv_qp *hammer_qp(struct hammer *h, unsigned i) { return h->lane[i].qp; }

void hammer_connect(struct hammer *h, unsigned i, const struct remote *to, uint32_t psn)
{
	h->lane[i].to = *to;
	h->lane[i].psn = psn;
	qp_connect(h->nic, h->lane[i].qp, to, psn);
}

void hammer_aim(struct hammer *h, const struct target *t, int fd)
{
	uint32_t i;

	h->to = *t;
	h->fd = fd;
	h->sectors = t->length / SECTOR;
	h->chunk_sectors = t->chunk / SECTOR;
	h->chunks = h->wild = t->length / t->chunk;
	h->cell = opt.message / SECTOR;
	h->cells = h->sectors / h->cell;
	h->gen = calloc(h->sectors, sizeof(*h->gen));
	h->state = calloc(h->chunks, 1);
	h->order = malloc(h->cells * sizeof(*h->order));
	for (i = 0; i < h->cells; i++) {
		uint32_t j = below(&h->random, i + 1);

		h->order[i] = h->order[j];
		h->order[j] = i;
	}
}

static bool atomic(const struct op *o)
{
	return o->kind == IBV_WR_ATOMIC_FETCH_AND_ADD || o->kind == IBV_WR_ATOMIC_CMP_AND_SWP;
}

static bool taken(struct hammer *h, uint32_t first, uint32_t count)
{
	unsigned i;

	for (i = 0; i < h->ops; i++) {
		struct op *o = &h->op[i];

		if ((o->busy || o->again) && !atomic(o) && o->first < first + count && first < o->first + o->count)
			return true;
	}
	return false;
}

static void post(struct hammer *h, struct op *o)
{
	struct lane *l = &h->lane[o->qp];
	struct ibv_sge sge = { .addr = (uint64_t)o->buf, .length = atomic(o) ? 8 : o->count * SECTOR,
			       .lkey = h->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = o - h->op, .sg_list = &sge, .num_sge = 1, .opcode = o->kind }, *bad;
	int err;

	if (atomic(o)) {
		uint64_t *c = &l->counter[o->first];

		wr.wr.atomic.remote_addr = h->to.counters + (o->qp * COUNTERS + o->first) * sizeof(*c);
		wr.wr.atomic.rkey = h->to.counter_key;
		/* The previous value is known, so the next operation detects one executed twice or never. */
		wr.wr.atomic.compare_add = o->kind == IBV_WR_ATOMIC_CMP_AND_SWP ? *c : 1;
		wr.wr.atomic.swap = *c + 1;
	} else {
		wr.wr.rdma.remote_addr = h->to.addr + (uint64_t)o->first * SECTOR;
		wr.wr.rdma.rkey = h->to.rkey;
	}
	o->busy = true;
	o->again = false;
	o->since = now_ms();
	l->busy++;
	pulse_begin(&h->pulse, "ibv_post_send");
	err = ibv_post_send(l->qp, &wr, &bad);
	pulse_end(&h->pulse);
	if (err)
		fail(EXIT_VERBS, "ibv_post_send: %s", strerror(err));
}

static void begin(struct hammer *h, struct op *o, enum ibv_wr_opcode kind, uint32_t first, uint32_t count)
{
	uint32_t s;

	o->kind = kind;
	o->first = first;
	o->count = count;
	o->buf = h->arena + h->slot * (o - h->op);
	if (atomic(o)) {
		post(h, o);
		return;
	}
	o->buf += below(&h->random, 2) ? below(&h->random, 64) : 0;
	if (kind == IBV_WR_RDMA_WRITE)
		for (s = 0; s < count; s++)
			pattern_fill(o->buf + s * SECTOR, h->seed, first + s, ++h->gen[first + s]);
	post(h, o);
}

static uint32_t chunk_of(struct hammer *h, uint32_t sector) { return sector / h->chunk_sectors; }

static bool ours(struct hammer *h, uint32_t sector)
{
	enum state s = h->state[chunk_of(h, sector)];

	return s == NORMAL || s == WILD;
}

/* Starts the next operation of the sweep, if possible now. */
static bool sweep(struct hammer *h, struct op *o)
{
	uint32_t first;

	/* READs lag behind, so that written pages may be paged out first. */
	if (h->next_read < h->cells && (h->next_read + h->cells / 8 + 2 * h->ops < h->next_write ||
					h->next_write == h->cells)) {
		first = h->order[h->next_read] * h->cell;
		if (!ours(h, first) || taken(h, first, h->cell))
			return false;
		h->next_read++;
		begin(h, o, IBV_WR_RDMA_READ, first, h->cell);
		return true;
	}
	if (h->next_write == h->cells)
		return false;
	first = h->order[h->next_write] * h->cell;
	if (!ours(h, first) || taken(h, first, h->cell))
		return false;
	h->next_write++;
	begin(h, o, IBV_WR_RDMA_WRITE, first, h->cell);
	return true;
}

/* Starts a new operation if one is possible now. */
static bool choose(struct hammer *h, struct op *o)
{
	uint32_t chunk, first, count, most;

	if (h->job.active && h->job.next < h->chunk_sectors && !h->lane[o->qp].broken) {
		first = h->job.chunk * h->chunk_sectors + h->job.next;
		count = h->cell < h->chunk_sectors - h->job.next ? h->cell : h->chunk_sectors - h->job.next;
		if (taken(h, first, count))
			return false;	/* wait for older operations */
		h->job.next += count;
		h->job.pending++;
		o->job = true;
		if (h->job.write) {	/* the same generation everywhere: begin() adds one */
			for (uint32_t s = 0; s < count; s++)
				h->gen[first + s] = h->job.answer - 1;
			begin(h, o, IBV_WR_RDMA_WRITE, first, count);
		} else {
			begin(h, o, IBV_WR_RDMA_READ, first, count);
		}
		return true;
	}
	if (h->ending)
		return false;
	if (h->sweeping)
		return sweep(h, o);
	if (opt.atomics && !(h->to.chaos & CHAOS_HOLE) && !below(&h->random, 8)) {
		/* One operation at a time per counter. */
		uint32_t c = below(&h->random, COUNTERS);
		unsigned i;

		for (i = 0; i < h->ops; i++)
			if (h->op[i].busy && atomic(&h->op[i]) && h->op[i].qp == o->qp && h->op[i].first == c)
				return false;
		begin(h, o, below(&h->random, 2) ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP, c, 1);
		return true;
	}
	chunk = below(&h->random, h->chunks);
	if (h->wild < h->chunks && below(&h->random, 4))
		chunk = h->wild;
	else if (below(&h->random, 2) && sweep(h, o))
		return true;
	/* Sizes of all magnitudes. */
	most = h->cell < h->chunk_sectors ? h->cell : h->chunk_sectors;
	count = 1 + below(&h->random, 1 + below(&h->random, most));
	first = chunk * h->chunk_sectors + below(&h->random, h->chunk_sectors - count + 1);
	if (!ours(h, first) || taken(h, first, count))
		return false;
	begin(h, o, below(&h->random, 2) ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, first, count);
	return true;
}

static void check_read(struct hammer *h, struct op *o)
{
	bool wild = h->state[chunk_of(h, o->first)] == WILD || h->state[chunk_of(h, o->first)] == SETTLING;
	uint32_t s;

	/* When a settled chunk is read for the owner, the answer is exact. */
	if (o->job && !h->job.write)
		wild = false;
	for (s = 0; s < o->count; s++) {
		const char *p = o->buf + s * SECTOR;
		uint32_t sector = o->first + s;

		if (wild ? !pattern_upto(p, h->seed, sector, h->gen[sector]) :
		    !pattern_is(p, h->seed, sector, h->gen[sector]))
			pattern_blame(wild ? "RDMA READ of a chunk being released" : "RDMA READ", p, h->seed, sector,
				      h->gen[sector]);
	}
	h->loose += wild;
}

static void completed(struct hammer *h, const struct ibv_wc *wc)
{
	struct op *o = &h->op[wc->wr_id];
	struct lane *l = &h->lane[o->qp];

	o->busy = false;
	l->busy--;
	if (wc->status == IBV_WC_WR_FLUSH_ERR && !l->broken) {
		/* The error completion comes later: older requests may be flushed before it. */
		if (!l->flushed)
			l->flushed = now_ms();
		o->again = true;
		return;
	}
	if (wc->status != IBV_WC_SUCCESS) {
		if (!(h->to.chaos & CHAOS_HOLE) || atomic(o) ||
		    (wc->status != IBV_WC_REM_ACCESS_ERR && wc->status != IBV_WC_WR_FLUSH_ERR))
			fail(EXIT_VERBS,
			     "%s of %u sectors at %u (offset %#llx) on queue pair %u after %llu ms: %s (vendor %#x)",
			     atomic(o) ? "atomic" : o->kind == IBV_WR_RDMA_READ ? "READ" : "WRITE", o->count, o->first,
			     (unsigned long long)o->first * SECTOR, o->qp, (unsigned long long)(now_ms() - o->since),
			     ibv_wc_status_str(wc->status), wc->vendor_err);
		l->broken = true;
		l->flushed = 0;
		o->again = true;
		return;
	}
	if (atomic(o)) {
		uint64_t old;

		memcpy(&old, o->buf, sizeof(old));
		if (old != l->counter[o->first])
			fail(EXIT_DATA, "%s of counter %u on queue pair %u found %llu instead of %llu",
			     o->kind == IBV_WR_ATOMIC_FETCH_AND_ADD ? "fetch-and-add" : "compare-and-swap", o->first,
			     o->qp, (unsigned long long)old, (unsigned long long)l->counter[o->first]);
		l->counter[o->first]++;
		h->atomics++;
	} else if (o->kind == IBV_WR_RDMA_READ) {
		check_read(h, o);
		h->reads++;
		h->read += o->count * SECTOR;
	} else {
		h->writes++;
		h->written += o->count * SECTOR;
	}
	if (o->job) {
		o->job = false;
		h->job.pending--;
	}
	/* Now and then make local memory absent as well. */
	if (opt.local != PINNED && !below(&h->random, 8))
		madvise(h->arena + h->slot * (o - h->op), h->slot, below(&h->random, 2) ? MADV_DONTNEED : MADV_PAGEOUT);
}

static void job_start(struct hammer *h, uint32_t chunk, bool write, uint32_t gen)
{
	h->job = (struct job){ .chunk = chunk, .write = write, .answer = gen, .active = true };
}

/* Handles the owner's requests; the owner has one at a time. */
static void request(struct hammer *h)
{
	struct msg m = msg_recv(h->fd);
	uint32_t s, top = 0;

	if (m.type != MSG_DONE_OK && m.type != MSG_RECONNECTED && m.a >= h->chunks)
		fail(EXIT_PEER, "no chunk %u", m.a);
	switch (m.type) {
	case MSG_WILD:
		h->state[m.a] = WILD;
		h->wild = m.a;
		h->claimed = true;
		msg_send(h->fd, MSG_WILD_OK, m.a, h->seed);
		break;
	case MSG_SETTLE:
		h->state[m.a] = SETTLING;
		h->wild = h->chunks;
		for (s = 0; s < h->chunk_sectors; s++)
			if (h->gen[m.a * h->chunk_sectors + s] > top)
				top = h->gen[m.a * h->chunk_sectors + s];
		job_start(h, m.a, true, top + 1);
		break;
	case MSG_VERIFY:
		for (s = 0; s < h->chunk_sectors; s++)
			h->gen[m.a * h->chunk_sectors + s] = m.b;
		job_start(h, m.a, false, m.b);
		break;
	case MSG_THAW:
		h->state[m.a] = NORMAL;
		h->claimed = false;
		break;
	case MSG_RECONNECTED: {
		struct lane *l = &h->lane[m.a];

		qp_reset(l->qp);
		l->to.psn = l->psn;
		qp_connect(h->nic, l->qp, &l->to, l->psn);
		l->broken = l->asked = false;
		h->reconnects++;
		break;
	}
	case MSG_DONE_OK:
		h->done = true;
		break;
	default:
		fail(EXIT_PEER, "message %u", m.type);
	}
}

static void job_step(struct hammer *h)
{
	if (!h->job.active || h->job.next < h->chunk_sectors || h->job.pending)
		return;
	if (h->job.write) {	/* written; now read it back */
		job_start(h, h->job.chunk, false, h->job.answer);
		return;
	}
	h->job.active = false;
	msg_send(h->fd, h->state[h->job.chunk] == SETTLING ? MSG_SETTLED : MSG_VERIFIED, h->job.chunk, h->job.answer);
	h->state[h->job.chunk] = FROZEN;
}

/* Reconnects queue pairs in error once all their requests have been flushed. */
static void mend(struct hammer *h)
{
	unsigned i;

	for (i = 0; i < opt.qps; i++) {
		struct lane *l = &h->lane[i];

		if (l->flushed && now_ms() > l->flushed + 3000)
			fail(EXIT_VERBS, "all operations of queue pair %u were flushed without an error completion", i);
		if (l->broken && !l->busy && !l->asked) {
			l->psn = (l->psn + (1u << 20)) & 0xffffff;
			l->asked = true;
			msg_send(h->fd, MSG_RECONNECT, i, l->psn);
		}
	}
}

static void finish(struct hammer *h)
{
	unsigned q;

	msg_send(h->fd, MSG_DONE, 0, h->seed);
	pulse_begin(&h->pulse, "the owner's final check");
	net_send(h->fd, h->gen, h->sectors * sizeof(*h->gen));
	for (q = 0; q < opt.qps; q++)
		net_send(h->fd, h->lane[q].counter, sizeof(h->lane[q].counter));
	while (!h->done) {
		if (net_readable(h->fd, 1000))
			request(h);
		pulse_begin(&h->pulse, "the owner's final check");
	}
	pulse_end(&h->pulse);
}

static void wait_for_something(struct hammer *h)
{
	struct pollfd p[2] = { { h->channel->fd, POLLIN, 0 }, { h->fd, POLLIN, 0 } };
	struct ibv_cq *cq;
	void *ctx;

	poll(p, 2, 200);
	if (!p[0].revents)
		return;
	if (ibv_get_cq_event(h->channel, &cq, &ctx))
		fail(EXIT_VERBS, "the device was removed: %m");
	ibv_ack_cq_events(cq, 1);
}

void *hammer_run(void *arg)
{
	struct hammer *h = arg;
	uint64_t end = now_ms() + opt.seconds * 1000ull, last = now_ms();
	bool armed = false;

	for (;;) {
		struct ibv_wc wc[16];
		unsigned i, busy = 0;
		bool some = false;
		int n;

		while ((n = ibv_poll_cq(h->cq, 16, wc)) > 0) {
			for (i = 0; i < (unsigned)n; i++)
				completed(h, &wc[i]);
			some = true;
		}
		if (n < 0)
			fail(EXIT_VERBS, "ibv_poll_cq: %m");
		if (net_readable(h->fd, 0)) {
			request(h);
			some = true;
		}
		job_step(h);
		mend(h);
		for (i = 0; i < h->ops; i++) {
			struct op *o = &h->op[i];

			o->qp = i % opt.qps;
			if (!o->busy && !h->lane[o->qp].broken && !h->lane[o->qp].flushed) {
				if (o->again)
					post(h, o);
				else
					(void)(choose(h, o) || choose(h, o));
			}
			busy += o->busy || o->again;
			if (o->busy && now_ms() > o->since + opt.patience * 1000ull)
				fail(EXIT_HANG, "%s of %u sectors at %u (offset %#llx) on queue pair %u hangs for %d s",
				     atomic(o) ? "atomic" : o->kind == IBV_WR_RDMA_READ ? "READ" : "WRITE", o->count,
				     o->first, (unsigned long long)o->first * SECTOR, o->qp, opt.patience);
		}
		if (now_ms() > end || enough) {
			h->sweeping = opt.cover;
			h->ending = !opt.cover || h->next_read == h->cells;
		}
		if (h->ending && !busy && !h->claimed)
			break;
		if (now_ms() > last + 2000) {
			say("%llu MiB written, %llu MiB read, %llu atomics, %llu reconnects, sweep %u%% WRITE %u%% READ",
			    h->written >> 20, h->read >> 20, h->atomics, h->reconnects, 100u * h->next_write / h->cells,
			    100u * h->next_read / h->cells);
			last = now_ms();
		}
		if (some) {
			armed = false;
		} else if (!armed) {
			ibv_req_notify_cq(h->cq, 0);	/* then poll once more */
			armed = true;
		} else {
			wait_for_something(h);
			armed = false;
		}
	}
	finish(h);
	return NULL;
}

void hammer_report(struct hammer *h)
{
	say("result writes=%llu reads=%llu atomics=%llu written=%llu read=%llu reconnects=%llu loose=%llu covered=%u",
	    h->writes, h->reads, h->atomics, h->written, h->read, h->reconnects, h->loose,
	    100u * h->next_read / h->cells);
}
