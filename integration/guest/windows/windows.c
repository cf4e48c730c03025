// SPDX-License-Identifier: Apache-2.0
/*
 * windows DEVICE GID-INDEX: memory windows of both types through the guest's own libibverbs, on two connected RC queue
 * pairs of this process, on a pinned region, an on-demand one, and an implicit one. Exit status 0: all was as IBTA
 * 10.6.7 requires; otherwise a line says what was wrong.
 */
#include "../common.h"
#include <sys/mman.h>

#define SIZE 16384

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static int gid_index;
static union ibv_gid gid;
static char *mem;

static struct ibv_qp *make_qp(void)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	check(qp != NULL, "ibv_create_qp");
	return qp;
}

static void connect_qp(struct ibv_qp *qp, struct ibv_qp *to)
{
	to_rts(qp, to->qp_num, &gid, gid_index, (struct ibv_qp_attr){
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ, .timeout = 14, .retry_cnt = 7,
		.rnr_retry = 7, .min_rnr_timer = 12, .max_rd_atomic = 1, .max_dest_rd_atomic = 1 });
}

static struct ibv_wc completion(void)
{
	struct ibv_wc wc;
	int n;

	while (!(n = ibv_poll_cq(cq, 1, &wc)))
		;
	check(n == 1, "ibv_poll_cq");
	return wc;
}

static void expect(enum ibv_wc_status status, const char *what)
{
	struct ibv_wc wc = completion();

	if (wc.status == status)
		return;
	fprintf(stderr, "windows: %s: %s, want %s\n", what, ibv_wc_status_str(wc.status), ibv_wc_status_str(status));
	exit(1);
}

static void post(struct ibv_qp *qp, struct ibv_send_wr *wr)
{
	struct ibv_send_wr *bad;

	check(!ibv_post_send(qp, wr, &bad), "ibv_post_send");
}

static void write_to(struct ibv_qp *qp, struct ibv_mr *from, void *to, uint32_t rkey, enum ibv_wc_status status,
		     const char *what)
{
	struct ibv_sge sge = { .addr = (uintptr_t)from->addr, .length = 100, .lkey = from->lkey };
	struct ibv_send_wr wr = {
		.opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1,
		.wr.rdma = { .remote_addr = (uintptr_t)to, .rkey = rkey },
	};

	post(qp, &wr);
	expect(status, what);
}

static void bind2(struct ibv_qp *qp, struct ibv_mw *mw, uint32_t rkey, struct ibv_mr *mr, void *addr,
		  enum ibv_wc_status status)
{
	struct ibv_send_wr wr = {
		.opcode = IBV_WR_BIND_MW,
		.bind_mw = { .mw = mw, .rkey = rkey, .bind_info = {
			.mr = mr, .addr = (uintptr_t)addr, .length = 4096,
			.mw_access_flags = IBV_ACCESS_REMOTE_WRITE } },
	};

	post(qp, &wr);
	expect(status, "BIND_MW");
	if (status == IBV_WC_SUCCESS)
		mw->rkey = rkey;
}

/* Also through a window, the device releases pages that the guest's kernel takes away, and faults them in again. */
static void comes_and_goes(struct ibv_qp *qp, struct ibv_mr *src, char *at, uint32_t rkey)
{
	for (int i = 0; i < 20; i++) {
		check(!madvise(mem, SIZE, MADV_DONTNEED), "madvise");
		write_to(qp, src, at, rkey, IBV_WC_SUCCESS, "WRITE into released pages");
		check(!memcmp(at, src->addr, 100) && !at[-1] && !at[100], "data differ in a page faulted in again");
	}
}

/* @mr covers mem. */
static void both(enum ibv_mw_type type, struct ibv_mr *mr, struct ibv_mr *src, int on_demand)
{
	struct ibv_qp *a = make_qp(), *b = make_qp();
	struct ibv_mw *mw = ibv_alloc_mw(pd, type);
	char *at = mem + 4000;
	uint32_t old;

	check(mw != NULL, "ibv_alloc_mw");
	connect_qp(a, b);
	connect_qp(b, a);
	memset(mem, 0, SIZE);
	if (type == IBV_MW_TYPE_1) {
		struct ibv_mw_bind bind = {
			.bind_info = { .mr = mr, .addr = (uintptr_t)at, .length = 4096,
				.mw_access_flags = IBV_ACCESS_REMOTE_WRITE },
		};

		check(!ibv_bind_mw(a, mw, &bind), "ibv_bind_mw");
		expect(IBV_WC_SUCCESS, "ibv_bind_mw");
	} else {
		bind2(a, mw, ibv_inc_rkey(mw->rkey), mr, at, IBV_WC_SUCCESS);
	}
	write_to(b, src, at, mw->rkey, IBV_WC_SUCCESS, "WRITE into the window");
	check(!memcmp(at, src->addr, 100), "data differ");
	check(ibv_dereg_mr(mr) == EBUSY, "a region with a window was deregistered");
	if (on_demand)
		comes_and_goes(b, src, at, mw->rkey);
	old = mw->rkey;
	if (type == IBV_MW_TYPE_1) {
		struct ibv_mw_bind bind = { .bind_info = { .mr = mr } };

		check(!ibv_bind_mw(a, mw, &bind), "ibv_bind_mw of no length");
		expect(IBV_WC_SUCCESS, "ibv_bind_mw of no length");
	} else {
		struct ibv_send_wr wr = { .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = old };

		post(a, &wr);
		expect(IBV_WC_SUCCESS, "LOCAL_INV");
	}
	write_to(b, src, at, old, IBV_WC_REM_ACCESS_ERR, "WRITE into an invalidated window");
	check(!ibv_destroy_qp(a) && !ibv_destroy_qp(b), "ibv_destroy_qp");
	if (type == IBV_MW_TYPE_2) { // a process cannot register by work request, nor bind what it may not
		a = make_qp();
		b = make_qp();
		connect_qp(a, b);
		connect_qp(b, a);
		bind2(a, mw, ibv_inc_rkey(mw->rkey), src, src->addr, IBV_WC_MW_BIND_ERR);
		check(!ibv_destroy_qp(a) && !ibv_destroy_qp(b), "ibv_destroy_qp");
	}
	check(!ibv_dealloc_mw(mw), "ibv_dealloc_mw");
}

int main(int argc, char **argv)
{
	struct ibv_device_attr attr;
	struct ibv_mr *mr, *src;

	check(argc == 3, "usage: windows DEVICE GID-INDEX");
	gid_index = atoi(argv[2]);
	ctx = open_device(argv[1]);
	check(!ibv_query_gid(ctx, 1, gid_index, &gid) && !ibv_query_device(ctx, &attr), "ibv_query_gid");
	check(attr.max_mw > 0 && (attr.device_cap_flags & (IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B)) ==
	      (IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B), "the device does not report windows");
	pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	mem = aligned_alloc(4096, 2 * SIZE);
	check(pd && cq && mem, "pd, cq, memory");
	memset(mem, 0x5a, 2 * SIZE);
	src = ibv_reg_mr(pd, mem + SIZE, SIZE, IBV_ACCESS_LOCAL_WRITE);
	check(src != NULL, "ibv_reg_mr");
	for (int kind = 0; kind < 3; kind++) { // pinned, on demand, implicit
		int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND | (kind ? IBV_ACCESS_ON_DEMAND : 0);

		mr = ibv_reg_mr(pd, kind == 2 ? NULL : mem, kind == 2 ? SIZE_MAX : SIZE, access);
		check(mr != NULL, "ibv_reg_mr");
		both(IBV_MW_TYPE_1, mr, src, kind);
		both(IBV_MW_TYPE_2, mr, src, kind);
		check(!ibv_dereg_mr(mr), "ibv_dereg_mr");
	}
	check(!ibv_dereg_mr(src), "ibv_dereg_mr");
	puts("windows: all right");
	return 0;
}
