// SPDX-License-Identifier: Apache-2.0
/*
 * sparse: few pages in each of many windows of 2 MiB, in an implicit on-demand region (HF-2, HF-3).
 *
 *   sparse DEVICE GID-INDEX walk WINDOWS PAGES
 * writes by a loop-back RC pair to each page, in order of address, then reads all of them back by RDMA, and compares
 * all of memory with the processor. Nothing is released meanwhile, so the kernel invalidates no page.
 *
 *   sparse DEVICE GID-INDEX KIND WINDOWS PAGES SECONDS [SERVER]
 * does WRITEs and READs at random, in both directions at once, from such an area of local buffers to such an area of
 * the peer, and checks every READ; in the end each side compares its own area with the processor. Each side does at
 * least two operations for each page, even if that takes longer. KIND is implicit, or pinned, where the pages lie side
 * by side: for a device without implicit regions. The client chooses WINDOWS, PAGES and SECONDS.
 *
 * A word's value is a function of area, page, generation and place, so that any word found identifies itself. Exit
 * status 0: all data were right; otherwise a line says what was wrong.
 */
#include "../common.h"
#include <stdbool.h>
#include <sys/mman.h>

#define PORT	18620
#define PAGE	4096ull
#define WINDOW	(2ull << 20)
#define BYTES	512u		/* of an operation */
#define QPS	4
#define DEPTH	4		/* operations of each QP at once */
#define SLOTS	(QPS * DEPTH)
#define HANG	120		/* seconds without a completion */

struct area {
	char *p;
	uint64_t pages;		/* in all, of each window */
	uint64_t per_window;
	bool dense;
	struct ibv_mr *mr;
};

struct op {
	bool busy, read;
	uint64_t remote, local;	/* pages */
};

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qps[2 * QPS];	/* requesters, then responders */
static union ibv_gid gid;
static int gid_index;
static bool on_demand;
static struct ibv_mr *implicit;

static uint64_t rnd(uint64_t n)
{
	static uint64_t state = 1;
	uint64_t z = state += 0x9e3779b97f4a7c15;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return (z ^ z >> 31) % n;
}

/* place returns the offset of a page's data in its area: the page and the offset in it vary by window. */
static uint64_t place(const struct area *a, uint64_t page)
{
	uint64_t window = page / a->per_window, nth = page % a->per_window;
	uint64_t in = window % (PAGE / BYTES) * BYTES;

	if (a->dense)
		return page * PAGE + in;
	/* Not adjacent, so that pages in a window never form a run. */
	return window * WINDOW + (window * 7 + nth * 100) % 512 * PAGE + in;
}

static struct area make_area(uint64_t windows, uint64_t per_window, bool dense)
{
	struct area a = { .pages = windows * per_window, .per_window = per_window, .dense = dense };
	size_t size = dense ? a.pages * PAGE : windows * WINDOW;
	char *p = mmap(NULL, size + WINDOW, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	check(p != MAP_FAILED, "mmap");
	a.p = (char *)(((uintptr_t)p + WINDOW - 1) & ~(WINDOW - 1));
	check(!madvise(a.p, size, MADV_NOHUGEPAGE), "MADV_NOHUGEPAGE");
	a.mr = dense ? ibv_reg_mr(pd, a.p, size,
				  IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ) : implicit;
	check(a.mr != NULL, "ibv_reg_mr");
	return a;
}

static uint64_t word(uint64_t page, uint32_t gen, unsigned i)
{
	return gen ? (page * SLOTS + 1) * 0x9e3779b97f4a7c15 + gen * 0xbf58476d1ce4e5b9 + i : 0;
}

static void fill(char *at, uint64_t page, uint32_t gen)
{
	unsigned i;

	for (i = 0; i < BYTES / 8; i++)
		((uint64_t *)at)[i] = word(page, gen, i);
}

static void compare(const char *at, uint64_t page, uint32_t gen, const char *who)
{
	unsigned i;

	for (i = 0; i < BYTES / 8; i++)
		if (((volatile uint64_t *)at)[i] != word(page, gen, i)) {
			fprintf(stderr, "sparse: %s: page %llu, word %u: %#llx, want %#llx of generation %u\n", who,
				(unsigned long long)page, i, (unsigned long long)((uint64_t *)at)[i],
				(unsigned long long)word(page, gen, i), gen);
			exit(2);
		}
}

static void post(unsigned slot, bool read, struct ibv_mr *mr, char *at, uint64_t to, uint32_t rkey)
{
	struct ibv_sge sge = { .addr = (uintptr_t)at, .length = BYTES, .lkey = mr->lkey };
	struct ibv_send_wr *bad, wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED,
		.opcode = read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
		.wr.rdma = { .remote_addr = to, .rkey = rkey } };

	check(!ibv_post_send(qps[slot % QPS], &wr, &bad), "ibv_post_send");
}

static unsigned completed(void)
{
	double start = now();
	struct ibv_wc wc;
	int n;

	while (!(n = ibv_poll_cq(cq, 1, &wc)))
		if (now() - start > HANG) {
			fprintf(stderr, "sparse: no completion within %d s\n", HANG);
			exit(3);
		}
	check(n == 1, "ibv_poll_cq");
	if (wc.status != IBV_WC_SUCCESS) {
		fprintf(stderr, "sparse: completion of slot %llu: %s\n", (unsigned long long)wc.wr_id,
			ibv_wc_status_str(wc.status));
		exit(4);
	}
	return wc.wr_id;
}

static void connect_qps(struct ibv_qp **mine, const uint32_t *theirs, const union ibv_gid *to)
{
	struct ibv_qp_attr attr = { .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ, .timeout = 18,
		.retry_cnt = 7, .rnr_retry = 7, .min_rnr_timer = 1, .max_rd_atomic = 4, .max_dest_rd_atomic = 4 };

	for (int i = 0; i < QPS; i++)
		to_rts(mine[i], theirs[i], to, gid_index, attr);
}

/* pass does one operation for each page, in order; it compares what the processor or the READ found. */
static uint64_t pass(struct area *a, struct area *local, bool read)
{
	uint64_t page[SLOTS], next = 0, done = 0;
	unsigned s, used = 0;

	while (done < a->pages) {
		if (next < a->pages && used < SLOTS) {
			s = used++;
		} else {
			s = completed();
			compare((read ? local->p + s * PAGE : a->p + place(a, page[s])), page[s], 1,
				read ? "READ" : "memory after a WRITE");
			done++;
			if (next == a->pages)
				continue;
		}
		page[s] = next++;
		fill(local->p + s * PAGE, page[s], !read);
		post(s, read, local->mr, local->p + s * PAGE, (uintptr_t)a->p + place(a, page[s]), a->mr->rkey);
	}
	return done;
}

static void walk(uint64_t windows, uint64_t per_window)
{
	struct area a = make_area(windows, per_window, false), local = make_area(1, SLOTS, true);
	uint32_t numbers[2 * QPS];
	double start = now();
	int i;

	for (i = 0; i < 2 * QPS; i++)
		numbers[i] = qps[(i + QPS) % (2 * QPS)]->qp_num;
	connect_qps(qps, numbers, &gid);
	connect_qps(qps + QPS, numbers + QPS, &gid);
	printf("%llu pages written in %.0f s\n", (unsigned long long)pass(&a, &local, false), now() - start);
	start = now();
	printf("%llu pages read in %.0f s\n", (unsigned long long)pass(&a, &local, true), now() - start);
	for (uint64_t p = 0; p < a.pages; p++)
		compare(a.p + place(&a, p), p, 1, "memory at the end");
}

/* What the two sides tell each other at first. */
struct hello {
	uint64_t addr, windows, per_window, seconds;
	uint32_t rkey, dense, qpn[2 * QPS];
	union ibv_gid gid;
};

static void start_op(struct op *o, unsigned slot, struct area *local, const struct area *remote, uint32_t rkey,
		     uint32_t *gen, bool *taken, bool *local_taken)
{
	do
		o->remote = rnd(remote->pages);
	while (taken[o->remote]);
	do
		o->local = rnd(local->pages);
	while (local_taken[o->local]);
	taken[o->remote] = local_taken[o->local] = o->busy = true;
	o->read = rnd(2);
	fill(local->p + place(local, o->local), o->remote, o->read ? 0 : ++gen[o->remote]);
	post(slot, o->read, local->mr, local->p + place(local, o->local),
	     (uintptr_t)remote->p + place(remote, o->remote), rkey);
}

static void random_access(bool dense, struct hello mine, const char *server)
{
	int s = join_peer(server, PORT);
	struct hello theirs;
	struct area target, local, remote;
	struct op ops[SLOTS] = {};
	bool *taken, *local_taken;
	uint32_t *gen, *expected;
	uint64_t done = 0, reads = 0;
	unsigned i, busy = 0;
	bool more = true;
	double end;

	/* The client's choice first. */
	if (server)
		check(send(s, &mine, sizeof(mine), MSG_NOSIGNAL) == sizeof(mine), "send");
	else
		check(recv(s, &mine, sizeof(mine), MSG_WAITALL) == sizeof(mine), "recv");
	target = make_area(mine.windows, mine.per_window, dense);
	local = make_area(mine.windows, mine.per_window, dense);
	mine.addr = (uintptr_t)target.p;
	mine.rkey = target.mr->rkey;
	mine.dense = dense;
	mine.gid = gid;
	for (i = 0; i < 2 * QPS; i++)
		mine.qpn[i] = qps[i]->qp_num;
	swap(s, &mine, &theirs, sizeof(mine));
	connect_qps(qps, theirs.qpn + QPS, &theirs.gid);
	connect_qps(qps + QPS, theirs.qpn, &theirs.gid);
	swap(s, "c", &(char){ 0 }, 1);

	remote = target;
	remote.p = (char *)theirs.addr;
	remote.dense = theirs.dense;
	gen = calloc(remote.pages, sizeof(*gen));
	expected = calloc(remote.pages, sizeof(*gen));
	taken = calloc(remote.pages, 1);
	local_taken = calloc(remote.pages, 1);
	check(gen && expected && taken && local_taken, "memory");
	for (end = now() + mine.seconds; busy || more; ) {
		struct op *o;

		more = now() < end || done < 2 * remote.pages;
		for (i = 0; i < SLOTS && more; i++)
			if (!ops[i].busy) {
				start_op(&ops[i], i, &local, &remote, theirs.rkey, gen, taken, local_taken);
				busy++;
			}
		if (!busy)
			break;
		o = &ops[completed()];
		if (o->read)
			compare(local.p + place(&local, o->local), o->remote, gen[o->remote], "READ");
		reads += o->read;
		taken[o->remote] = local_taken[o->local] = o->busy = false;
		busy--;
		done++;
	}
	/* Each side is idle when the other has its generations. In parts, so that both sides can send at once. */
	for (uint64_t at = 0, n; at < remote.pages; at += n) {
		n = remote.pages - at < 1024 ? remote.pages - at : 1024;
		swap(s, gen + at, expected + at, n * sizeof(*gen));
	}
	for (uint64_t p = 0; p < target.pages; p++)
		compare(target.p + place(&target, p), p, expected[p], "memory at the end");
	swap(s, "d", &(char){ 0 }, 1);
	printf("%llu operations, %llu of them READs\n", (unsigned long long)done, (unsigned long long)reads);
}

int main(int argc, char **argv)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = DEPTH, .max_recv_wr = 1,
		.max_send_sge = 1, .max_recv_sge = 1 } };
	const char *usage = "usage: sparse DEVICE GID-INDEX walk WINDOWS PAGES, or "
			    "sparse DEVICE GID-INDEX implicit|pinned WINDOWS PAGES SECONDS [SERVER]";
	bool walks;

	check(argc >= 6, usage);
	walks = !strcmp(argv[3], "walk");
	on_demand = strcmp(argv[3], "pinned");
	check(walks ? argc == 6 : argc == 7 || argc == 8, usage);
	check(walks || !on_demand || !strcmp(argv[3], "implicit"), usage);
	gid_index = atoi(argv[2]);
	ctx = open_device(argv[1]);
	pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, SLOTS, NULL, NULL, 0);
	check(pd && cq && !ibv_query_gid(ctx, 1, gid_index, &gid), "PD, CQ, GID");
	init.send_cq = init.recv_cq = cq;
	for (int i = 0; i < 2 * QPS; i++) {
		qps[i] = ibv_create_qp(pd, &init);
		check(qps[i] != NULL, "ibv_create_qp");
	}
	if (on_demand) {
		implicit = ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
				      IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ON_DEMAND);
		check(implicit != NULL, "ibv_reg_mr, implicit");
	}
	if (walks)
		walk(strtoull(argv[4], NULL, 0), strtoull(argv[5], NULL, 0));
	else
		random_access(!on_demand, (struct hello){
			.windows = strtoull(argv[4], NULL, 0), .per_window = strtoull(argv[5], NULL, 0),
			.seconds = strtoull(argv[6], NULL, 0) }, argv[7]);
	return 0;
}
