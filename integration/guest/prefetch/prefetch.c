// SPDX-License-Identifier: Apache-2.0
/*
 * prefetch DEVICE GID-INDEX library|kernel: what ibv_advise_mr does, by the counters of `rdma statistic show mr`, which
 * must be in the PATH. A WRITE into an on-demand region of this process faults; after the advice the same WRITE does
 * not. With `library` the provider must have ibv_advise_mr (rdma-core 59); with `kernel` the program makes the system
 * call itself. Exit status 0: all was right.
 */
#include "../advise.h"
#include <sys/mman.h>

#define PAGES	256
#define SIZE	(PAGES * 4096)

static struct ibv_context *ctx;
static struct ibv_pd *pd, *other_pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *source;
static const char *device;
static int use_library;

static int advise(uint64_t advice, uint32_t flags, struct ibv_mr *mr, uint64_t addr, uint32_t length)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = mr->lkey };

	if (use_library)
		return ibv_advise_mr(pd, advice, flags, &sge, 1);
	return advise_mr(pd, advice, flags, &sge);
}

struct counters { long faults, invalidations, prefetched; };

/* counters of the only on-demand region. */
static struct counters counters(void)
{
	struct counters c = { -1, -1, -1 };
	char word[64];
	int regions = 0;
	FILE *f;

	fflush(NULL);
	f = popen("rdma statistic show mr", "r");
	check(f != NULL, "rdma statistic");
	while (fscanf(f, "%63s", word) == 1) {
		long *to = !strcmp(word, "page_faults") ? &c.faults :
			   !strcmp(word, "page_invalidations") ? &c.invalidations :
			   !strcmp(word, "page_prefetch") ? &c.prefetched : NULL;

		if (!to)
			continue;
		regions += to == &c.faults;
		check(fscanf(f, "%ld", to) == 1, "rdma statistic: a counter without a value");
	}
	check(!pclose(f), "rdma statistic");
	errno = 0;
	check(regions == 1 && c.invalidations >= 0 && c.prefetched >= 0, "rdma statistic shows no counters");
	return c;
}

static void expect(int ok, const char *what, struct counters c)
{
	if (ok)
		return;
	fprintf(stderr, "prefetch: %s: %ld faults, %ld invalidations, %ld prefetched, of %d pages\n", what, c.faults,
		c.invalidations, c.prefetched, PAGES);
	exit(1);
}

static struct ibv_mr *region(int access)
{
	char *p = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr;

	check(p != MAP_FAILED, "mmap");
	/* Each page by itself, so that the counters are exact. */
	check(!madvise(p, SIZE, MADV_NOHUGEPAGE), "madvise");
	mr = ibv_reg_mr(pd, p, SIZE, access | IBV_ACCESS_ON_DEMAND);
	check(mr != NULL, "ibv_reg_mr");
	return mr;
}

static void release(struct ibv_mr *mr)
{
	void *p = mr->addr;

	check(!ibv_dereg_mr(mr), "ibv_dereg_mr");
	munmap(p, SIZE);
}

/* WRITEs the source to the whole region and compares. */
static void write_to(struct ibv_mr *mr)
{
	struct ibv_sge sge = { .addr = (uintptr_t)source->addr, .length = SIZE, .lkey = source->lkey };
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1 }, *bad;
	double end = now() + 300;
	struct ibv_wc wc;
	int n;

	wr.wr.rdma.remote_addr = (uintptr_t)mr->addr;
	wr.wr.rdma.rkey = mr->rkey;
	check(!ibv_post_send(qp, &wr, &bad), "ibv_post_send");
	while (!(n = ibv_poll_cq(cq, 1, &wc)))
		check(now() < end, "the WRITE does not complete");
	check(n == 1 && wc.status == IBV_WC_SUCCESS, "the WRITE failed");
	check(!memcmp(mr->addr, source->addr, SIZE), "the region has other data");
}

int main(int argc, char **argv)
{
	const int rw = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	const uint64_t read_advice = IBV_ADVISE_MR_ADVICE_PREFETCH, write_advice = IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE;
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct counters c, d;
	struct ibv_mr *mr, *stranger;
	union ibv_gid gid;
	char *data;
	int i, err;

	check(argc == 4, "usage: prefetch DEVICE GID-INDEX library|kernel");
	device = argv[1];
	use_library = !strcmp(argv[3], "library");
	ctx = open_device(device);
	check(!ibv_query_gid(ctx, 1, atoi(argv[2]), &gid), "ibv_query_gid");
	check((pd = ibv_alloc_pd(ctx)) && (other_pd = ibv_alloc_pd(ctx)), "ibv_alloc_pd");
	check((cq = ibv_create_cq(ctx, 8, NULL, NULL, 0)) != NULL, "ibv_create_cq");
	init.send_cq = init.recv_cq = cq;
	check((qp = ibv_create_qp(pd, &init)) != NULL, "ibv_create_qp");
	to_rts(qp, qp->qp_num, &gid, atoi(argv[2]), (struct ibv_qp_attr){
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE, .timeout = 17, .retry_cnt = 7, .rnr_retry = 7,
		.min_rnr_timer = 12 });
	data = malloc(SIZE);
	check(data != NULL, "memory");
	for (i = 0; i < SIZE; i++)
		data[i] = i * 31 + i / 4096;
	check((source = ibv_reg_mr(pd, data, SIZE, IBV_ACCESS_LOCAL_WRITE)) != NULL, "ibv_reg_mr");

	/* Without advice, so that the rest proves something. */
	mr = region(rw);
	c = counters();
	expect(!c.faults && !c.prefetched, "a new region", c);
	write_to(mr);
	c = counters();
	expect(c.faults == PAGES && !c.prefetched, "a WRITE without advice", c);
	release(mr);

	/* Synchronous advice. */
	mr = region(rw);
	check(!advise(write_advice, IBV_ADVISE_MR_FLAG_FLUSH, mr, (uintptr_t)mr->addr, SIZE), "ibv_advise_mr");
	c = counters();
	expect(!c.faults && c.prefetched == PAGES, "after synchronous advice", c);
	write_to(mr);
	c = counters();
	expect(!c.faults && c.prefetched == PAGES, "a WRITE after synchronous advice", c);
	/* The pages go away and come back. */
	check(!madvise(mr->addr, SIZE, MADV_DONTNEED), "madvise");
	c = counters();
	expect(c.invalidations == PAGES, "after the release of all pages", c);
	write_to(mr);
	d = counters();
	expect(d.faults == PAGES && d.prefetched == PAGES, "a WRITE after the release", d);
	release(mr);

	/* Asynchronous advice, and only for half of the region. */
	mr = region(rw);
	check(!advise(write_advice, 0, mr, (uintptr_t)mr->addr, SIZE / 2), "ibv_advise_mr, asynchronous");
	for (i = 0; (c = counters()).prefetched < PAGES / 2; i++) {
		expect(i < 600, "the pages are not prefetched", c);
		usleep(100000);
	}
	expect(!c.faults && c.prefetched == PAGES / 2, "after asynchronous advice", c);
	write_to(mr);
	c = counters();
	expect(c.faults == PAGES / 2 && c.prefetched == PAGES / 2, "a WRITE after advice for half of the region", c);
	release(mr);

	/* Advice for reading brings pages, which may be read-only, and no errors. */
	mr = region(rw);
	memcpy(mr->addr, data, SIZE);
	err = advise(read_advice, IBV_ADVISE_MR_FLAG_FLUSH, mr, (uintptr_t)mr->addr, SIZE);
	check(!err, "ibv_advise_mr for reading");
	c = counters();
	expect(!c.faults && c.prefetched == PAGES, "after advice for reading", c);
	release(mr);

	/* Wrong advice. */
	mr = region(IBV_ACCESS_REMOTE_READ);
	err = advise(write_advice, IBV_ADVISE_MR_FLAG_FLUSH, mr, (uintptr_t)mr->addr, SIZE);
	check(err == EPERM, "advice to write for a read-only region");
	err = advise(read_advice, IBV_ADVISE_MR_FLAG_FLUSH, mr, (uintptr_t)mr->addr + SIZE, 4096);
	check(err != 0, "advice for an address beyond the region succeeded");
	err = advise(77, IBV_ADVISE_MR_FLAG_FLUSH, mr, (uintptr_t)mr->addr, SIZE);
	check(err != 0, "unknown advice succeeded");
	release(mr);
	err = advise(read_advice, IBV_ADVISE_MR_FLAG_FLUSH, source, (uintptr_t)source->addr, SIZE);
	check(err != 0, "advice for a pinned region succeeded");
	stranger = ibv_reg_mr(other_pd, data, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND);
	check(stranger != NULL, "ibv_reg_mr");
	err = advise(read_advice, IBV_ADVISE_MR_FLAG_FLUSH, stranger, (uintptr_t)data, SIZE);
	check(err != 0, "advice for a region of another protection domain succeeded");
	printf("prefetch: all right, by the %s\n", use_library ? "library" : "kernel");
	return 0;
}
