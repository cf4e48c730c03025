// SPDX-License-Identifier: Apache-2.0
/*
 * many DEVICE GID-INDEX QPS MRS: creates memory regions, queue pairs and address handles until the device refuses, at
 * least the given numbers; each pair of queue pairs writes through its own regions. Prints the time per object for each
 * eighth of them, which shows whether the last cost as much as the first. Exit status 0: there were enough, all worked,
 * and the refusal was ENOMEM, at the reported limit.
 */
#include "../common.h"

#define PAGE  4096
#define PAGES 4096	/* regions share them */
#define PARTS 8

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static int gid_index;
static union ibv_gid gid;
static char *mem;

static void *make_mr(int i)
{
	return ibv_reg_mr(pd, mem + (size_t)(i % PAGES) * PAGE, PAGE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
}

static void *make_qp(int i)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	(void)i;
	return ibv_create_qp(pd, &init);
}

static void *make_ah(int i)
{
	struct ibv_ah_attr a = { .is_global = 1, .port_num = 1 };

	(void)i;
	a.grh.dgid = gid;
	a.grh.sgid_index = gid_index;
	a.grh.hop_limit = 64;
	return ibv_create_ah(pd, &a);
}

/* Creates objects until that fails or there are most of them, and returns their number. */
static int fill(const char *what, void *(*make)(int), void **all, int most, int reported)
{
	double start = now(), part = start;
	int n, done = 0, size = most / PARTS;

	printf("%s, us each:", what);
	for (n = 0; n < most; n++) {
		errno = 0;
		all[n] = make(n);
		if (!all[n])
			break;
		if (n + 1 - done == size) {
			printf(" %.0f", 1e6 * (now() - part) / size);
			part = now();
			done = n + 1;
		}
	}
	printf("; %d of %d\n", n, reported);
	check(n < most, "the device has no limit");
	check(errno == ENOMEM, "the refusal was another error");
	/* The kernel's own objects, such as the GSI queue pair, count as well. */
	check(n <= reported && n >= reported - 8, "the limit is not the one reported");
	return n;
}

static void connect_qp(struct ibv_qp *qp, struct ibv_qp *to)
{
	to_rts(qp, to->qp_num, &gid, gid_index, (struct ibv_qp_attr){
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE, .timeout = 17, .retry_cnt = 7, .rnr_retry = 7,
		.min_rnr_timer = 12 });
}

/* Queue pair i writes word i of its region to word i of its peer's. */
static void write_one(struct ibv_qp *qp, int i, struct ibv_mr *from, struct ibv_mr *to)
{
	size_t off = 8 * (i % (PAGE / 8));
	struct ibv_sge sge = { .addr = (uintptr_t)from->addr + off, .length = 8, .lkey = from->lkey };
	struct ibv_send_wr wr = { .wr_id = i, .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_wc wc;
	double end = now() + 60;
	uint64_t want = 0x1234567800000000ull + i;
	int n;

	memcpy((char *)from->addr + off, &want, 8);
	wr.wr.rdma.remote_addr = (uintptr_t)to->addr + off;
	wr.wr.rdma.rkey = to->rkey;
	check(!ibv_post_send(qp, &wr, &bad), "ibv_post_send");
	while (!(n = ibv_poll_cq(cq, 1, &wc)))
		check(now() < end, "a WRITE does not complete");
	check(n == 1 && wc.status == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)i, "completion");
	check(!memcmp((char *)to->addr + off, &want, 8), "the data written is not there");
}

int main(int argc, char **argv)
{
	struct ibv_device_attr attr;
	int qps, mrs, nqp, nmr, nah, i;
	void **qp, **mr, **ah;
	double start;

	check(argc == 5, "usage: many DEVICE GID-INDEX QPS MRS");
	gid_index = atoi(argv[2]);
	qps = atoi(argv[3]);
	mrs = atoi(argv[4]);
	ctx = open_device(argv[1]);
	check(!ibv_query_device(ctx, &attr), "ibv_query_device");
	check(!ibv_query_gid(ctx, 1, gid_index, &gid), "ibv_query_gid");
	check((pd = ibv_alloc_pd(ctx)) != NULL, "ibv_alloc_pd");
	check((cq = ibv_create_cq(ctx, 64, NULL, NULL, 0)) != NULL, "ibv_create_cq");
	check((mem = aligned_alloc(PAGE, (size_t)PAGES * PAGE)) != NULL, "memory");
	memset(mem, 0, (size_t)PAGES * PAGE);
	mr = calloc(attr.max_mr + 1, sizeof(*mr));
	qp = calloc(attr.max_qp + 1, sizeof(*qp));
	ah = calloc(attr.max_ah + 1, sizeof(*ah));
	check(mr && qp && ah, "memory");

	nmr = fill("regions", make_mr, mr, attr.max_mr + 1, attr.max_mr);
	nqp = fill("queue pairs", make_qp, qp, attr.max_qp + 1, attr.max_qp);
	nah = fill("address handles", make_ah, ah, attr.max_ah + 1, attr.max_ah);
	check(nmr >= mrs, "too few regions");
	check(nqp >= qps, "too few queue pairs");

	start = now();
	for (i = 0; i + 1 < nqp; i += 2) {
		connect_qp(qp[i], qp[i + 1]);
		connect_qp(qp[i + 1], qp[i]);
	}
	printf("connected, us each: %.0f\n", 1e6 * (now() - start) / nqp);
	start = now();
	for (i = 0; i < (nqp & ~1); i++) /* adjacent ones use the same pages, but not the same regions */
		write_one(qp[i], i, mr[(i * 16) % nmr], mr[(i * 16 + 7) % nmr]);
	printf("WRITEs, us each: %.0f\n", 1e6 * (now() - start) / i);

	for (i = 0; i < nah; i++)
		check(!ibv_destroy_ah(ah[i]), "ibv_destroy_ah");
	start = now();
	for (i = 0; i < nqp; i++)
		check(!ibv_destroy_qp(qp[i]), "ibv_destroy_qp");
	printf("queue pairs destroyed, us each: %.0f\n", 1e6 * (now() - start) / nqp);
	start = now();
	for (i = 0; i < nmr; i++)
		check(!ibv_dereg_mr(mr[i]), "ibv_dereg_mr");
	printf("regions deregistered, us each: %.0f\n", 1e6 * (now() - start) / nmr);
	/* Resources are available again. */
	check((qp[0] = make_qp(0)) && (mr[0] = make_mr(0)) && (ah[0] = make_ah(0)), "resources were not released");
	return 0;
}
