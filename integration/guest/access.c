// SPDX-License-Identifier: Apache-2.0
/*
 * Invalid accesses, each on a fresh connection, and memory that they must not change. The server offers regions, the
 * client tries; the server then checks whether a byte has changed.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "stress.h"

#define LEN	(16 * PAGE)
#define ALL	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | \
		 IBV_ACCESS_REMOTE_ATOMIC)

enum region { OPEN, NO_WRITE, NO_READ, NO_ATOMIC, STALE, HOLE, READ_ONLY, FOREIGN_PD, WHOLE, REGIONS };
enum { MSG_TRY = 100, MSG_READY, MSG_CHECK, MSG_CHECKED, MSG_END };

struct offer {
	uint64_t addr[REGIONS];
	uint32_t key[REGIONS];
	uint32_t implicit;	/* server has an implicit region */
};

/* The client's local buffer and key of a case. */
enum local { GOOD, BAD_KEY, STALE_KEY, BEYOND, NOT_WRITABLE, LOCAL_HOLE, REMOTES_KEY };

static const struct bad {
	const char *name;
	enum ibv_wr_opcode op;
	enum region region;
	int64_t offset;		/* from the region's start; wrap: see below */
	uint32_t len;
	enum local local;
	enum ibv_wc_status want;
} cases[] = {
#define W IBV_WR_RDMA_WRITE
#define R IBV_WR_RDMA_READ
#define A IBV_WR_ATOMIC_FETCH_AND_ADD
#define S IBV_WR_SEND
	{ "WRITE one byte beyond", W, OPEN, LEN - 63, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "READ one byte beyond", R, OPEN, LEN - 63, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "WRITE far beyond", W, OPEN, 1ll << 40, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "WRITE before", W, OPEN, -1, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "READ before", R, OPEN, -64, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "WRITE of many pages, the last beyond", W, OPEN, PAGE, LEN, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "WRITE that wraps around", W, OPEN, INT64_MIN, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "READ that wraps around", R, OPEN, INT64_MIN, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "atomic beyond", A, OPEN, LEN, 8, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "WRITE without the right", W, NO_WRITE, 0, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "READ without the right", R, NO_READ, 0, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "atomic without the right", A, NO_ATOMIC, 0, 8, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "WRITE by a stale key", W, STALE, 0, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "READ by a stale key", R, STALE, 0, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "WRITE into another domain", W, FOREIGN_PD, 0, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "WRITE where nothing is mapped", W, HOLE, LEN / 2, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "READ where nothing is mapped", R, HOLE, LEN / 2, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "WRITE that runs into a hole", W, HOLE, LEN / 2 - PAGE, 2 * PAGE, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "READ that runs into a hole", R, HOLE, LEN / 2 - PAGE, 2 * PAGE, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "atomic where nothing is mapped", A, HOLE, LEN / 2, 8, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "WRITE to a read-only mapping", W, READ_ONLY, 0, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "atomic on a read-only mapping", A, READ_ONLY, 0, 8, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "WRITE to a kernel address by the implicit key", W, WHOLE, 0, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "READ of the null page by the implicit key", R, WHOLE, INT64_MAX, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "WRITE by this VM's own key", W, REGIONS, 0, 64, GOOD, IBV_WC_REM_ACCESS_ERR },
	{ "WRITE with a bad local key", W, OPEN, 0, 64, BAD_KEY, IBV_WC_LOC_PROT_ERR },
	{ "SEND with a bad local key", S, OPEN, 0, 64, BAD_KEY, IBV_WC_LOC_PROT_ERR },
	{ "SEND with a stale local key", S, OPEN, 0, 64, STALE_KEY, IBV_WC_LOC_PROT_ERR },
	{ "WRITE with the other VM's key as local key", W, OPEN, 0, 64, REMOTES_KEY, IBV_WC_LOC_PROT_ERR },
	{ "WRITE from beyond the local region", W, OPEN, 0, 64, BEYOND, IBV_WC_LOC_PROT_ERR },
	{ "READ to beyond the local region", R, OPEN, 0, 64, BEYOND, IBV_WC_LOC_PROT_ERR },
	{ "READ into memory that may not be written", R, OPEN, 0, 64, NOT_WRITABLE, IBV_WC_LOC_PROT_ERR },
	{ "SEND out of a local hole", S, OPEN, 0, 64, LOCAL_HOLE, IBV_WC_LOC_PROT_ERR },
	{ "WRITE out of a local hole", W, OPEN, 0, 64, LOCAL_HOLE, IBV_WC_LOC_PROT_ERR },
	{ "READ into a local hole", R, OPEN, 0, 64, LOCAL_HOLE, IBV_WC_LOC_PROT_ERR },
#undef W
#undef R
#undef A
#undef S
};

static char *region(bool hole)
{
	char *p = map_pages(LEN);

	memset(p, 0x5a, LEN);
	if (hole && munmap(p + LEN / 2, LEN / 2))
		fail(EXIT_SETUP, "munmap: %m");
	return p;
}

static bool untouched(const char *p, size_t n)
{
	size_t i;

	for (i = 0; i < n; i++)
		if (p[i] != 0x5a)
			return false;
	return true;
}

/* Some cases need on-demand memory: pinned memory cannot have a hole. */
static bool wanted(const struct bad *b, const struct offer *of)
{
	if (b->region == HOLE || b->region == READ_ONLY)
		return of->key[b->region];
	if (b->region == WHOLE)
		return of->implicit;
	return b->local != LOCAL_HOLE || opt.local != PINNED;
}

static struct ibv_mr *hole_mr(struct nic *n, char **p)
{
	*p = map_pages(LEN);
	memset(*p, 0x5a, LEN);
	struct ibv_mr *mr = nic_register(n, ON_DEMAND, *p, LEN, ALL);

	if (munmap(*p + LEN / 2, LEN / 2))
		fail(EXIT_SETUP, "munmap: %m");
	return mr;
}

int access_server(struct nic *n, int fd)
{
	const int rights[REGIONS] = {
		[OPEN] = ALL, [NO_WRITE] = IBV_ACCESS_REMOTE_READ,
		[NO_READ] = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
		[NO_ATOMIC] = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
		[STALE] = ALL, [FOREIGN_PD] = ALL, [READ_ONLY] = ALL,
	};
	/* The kind of memory does not matter for keys; a whole address space has no bounds to test. */
	enum memory kind = opt.memory == IMPLICIT ? ON_DEMAND : opt.memory;
	struct ibv_cq *cq = ibv_create_cq(n->ctx, 16, NULL, NULL, 0);
	struct ibv_qp *qp = nic_qp(n, IBV_QPT_RC, cq, 4);
	struct nic other = *n;
	struct offer of = {};
	struct remote self = nic_self(n, qp, 0), peer;
	struct ibv_mr *mr;
	char *p[REGIONS] = {};
	struct msg m;
	unsigned i;

	other.pd = ibv_alloc_pd(n->ctx);
	for (i = 0; i < REGIONS; i++) {
		if (i == WHOLE) {
			of.addr[i] = 0xffff888000000000ull;
			if (opt.memory == IMPLICIT) {
				of.key[i] = nic_register(n, IMPLICIT, NULL, 0, 0)->rkey;
				of.implicit = 1;
			}
			continue;
		}
		if ((i == HOLE || i == READ_ONLY) && kind == PINNED)
			continue;
		if (i == HOLE) {
			mr = hole_mr(n, &p[i]);
		} else {
			p[i] = region(false);
			if (i == READ_ONLY && mprotect(p[i], LEN, PROT_READ))
				fail(EXIT_SETUP, "mprotect: %m");
			mr = nic_register(i == FOREIGN_PD ? &other : n, kind, p[i], LEN, rights[i]);
		}
		of.addr[i] = (uint64_t)p[i];
		of.key[i] = mr->rkey;
		if (i == STALE && ibv_dereg_mr(mr))
			fail(EXIT_SETUP, "ibv_dereg_mr: %m");
	}
	net_send(fd, &of, sizeof(of));
	for (;;) {
		m = msg_recv(fd);
		switch (m.type) {
		case MSG_TRY:
			net_recv(fd, &peer, sizeof(peer));
			qp_reset(qp);
			qp_connect(n, qp, &peer, peer.psn);
			self.psn = peer.psn;
			net_send(fd, &self, sizeof(self));
			break;
		case MSG_CHECK:
			/* A WRITE that fails on a later page may have written the earlier ones (case "many pages"). */
			for (i = 0; i < REGIONS; i++)
				if (p[i] && i != OPEN && i != HOLE && !untouched(p[i], LEN))
					fail(EXIT_DATA, "case %u changed region %u", m.a, i);
			if (p[HOLE] && !untouched(p[HOLE], LEN / 2 - PAGE))
				fail(EXIT_DATA, "case %u changed memory around a hole", m.a);
			if (m.b && !untouched(p[OPEN], LEN))
				fail(EXIT_DATA, "case %u changed the open region", m.a);
			memset(p[OPEN], 0x5a, LEN);
			msg_send(fd, MSG_CHECKED, m.a, 0);
			break;
		case MSG_END:
			return 0;
		}
	}
}

int access_client(struct nic *n, int fd)
{
	enum memory kind = opt.local == IMPLICIT ? ON_DEMAND : opt.local;
	struct ibv_cq *cq = ibv_create_cq(n->ctx, 16, NULL, NULL, 0);
	struct ibv_qp *qp = nic_qp(n, IBV_QPT_RC, cq, 4);
	struct remote self = nic_self(n, qp, 1), peer;
	char *good = region(false), *ro = region(false), *gone = region(false), *hole = NULL;
	struct ibv_mr *mr = nic_register(n, kind, good, LEN, ALL), *ro_mr = nic_register(n, kind, ro, LEN, 0);
	struct ibv_mr *stale, *hole_region = NULL;
	uint32_t stale_key;
	struct offer of;
	unsigned i, tried = 0, wrong = 0;

	stale = nic_register(n, kind, gone, LEN, ALL);
	stale_key = stale->lkey;
	if (ibv_dereg_mr(stale))
		fail(EXIT_SETUP, "ibv_dereg_mr: %m");
	if (kind != PINNED)
		hole_region = hole_mr(n, &hole);
	net_recv(fd, &of, sizeof(of));

	for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		const struct bad *b = &cases[i];
		struct ibv_sge sge = { (uint64_t)good, b->len, mr->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = b->op,
					  .send_flags = IBV_SEND_SIGNALED }, *bad;
		uint64_t addr, start = now_ms();
		uint32_t key;
		struct ibv_wc wc;
		int k;

		if (!wanted(b, &of))
			continue;
		tried++;
		self.psn = (self.psn + (1u << 18)) & 0xffffff;
		msg_send(fd, MSG_TRY, i, 0);
		net_send(fd, &self, sizeof(self));
		net_recv(fd, &peer, sizeof(peer));
		qp_reset(qp);
		qp_connect(n, qp, &peer, peer.psn);

		addr = b->region == REGIONS ? (uint64_t)good : of.addr[b->region] + b->offset;
		key = b->region == REGIONS ? mr->rkey : of.key[b->region];
		if (b->offset == INT64_MIN)
			addr = -(uint64_t)b->len / 2;	/* wraps: the end is at a small address */
		if (b->offset == INT64_MAX)
			addr = 0;
		switch (b->local) {
		case GOOD: break;
		case BAD_KEY: sge.lkey = mr->lkey ^ 0x00ab00; break;
		case STALE_KEY: sge.addr = (uint64_t)gone; sge.lkey = stale_key; break;
		case BEYOND: sge.addr += LEN - b->len + 1; break;
		case NOT_WRITABLE: sge.addr = (uint64_t)ro; sge.lkey = ro_mr->lkey; break;
		case LOCAL_HOLE: sge.addr = (uint64_t)hole + LEN / 2; sge.lkey = hole_region->lkey; break;
		case REMOTES_KEY: sge.addr = of.addr[OPEN]; sge.lkey = of.key[OPEN]; break;
		}
		if (b->op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
			wr.wr.atomic.remote_addr = addr;
			wr.wr.atomic.rkey = key;
			wr.wr.atomic.compare_add = 1;
		} else if (b->op != IBV_WR_SEND) {
			wr.wr.rdma.remote_addr = addr;
			wr.wr.rdma.rkey = key;
		}
		k = ibv_post_send(qp, &wr, &bad);
		if (k)
			fail(EXIT_VERBS, "%s: ibv_post_send: %s", b->name, strerror(k));
		while (!(k = ibv_poll_cq(cq, 1, &wc))) {
			if (now_ms() > start + opt.patience * 1000ull)
				fail(EXIT_HANG, "%s: no completion in %d s", b->name, opt.patience);
			nap_us(200);
		}
		if (k < 0)
			fail(EXIT_VERBS, "ibv_poll_cq: %m");
		if (wc.status != b->want) {
			fprintf(stderr, "client: FAILED: %s: %s, not %s\n", b->name, ibv_wc_status_str(wc.status),
				ibv_wc_status_str(b->want));
			wrong++;
		}
		/* Only the WRITE that runs beyond the end may have written what is before it. */
		msg_send(fd, MSG_CHECK, i, b->len != LEN);
		if (msg_recv(fd).type != MSG_CHECKED)
			fail(EXIT_PEER, "unexpected answer");
		if (!untouched(good, LEN) || !untouched(ro, LEN) || !untouched(gone, LEN))
			fail(EXIT_DATA, "%s changed local memory", b->name);
	}
	msg_send(fd, MSG_END, 0, 0);
	say("result access tried=%u wrong=%u", tried, wrong);
	return wrong ? EXIT_VERBS : 0;
}
