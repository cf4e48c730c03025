// SPDX-License-Identifier: Apache-2.0
/*
 * inject DEVICE GID-INDEX VERB: makes the first allocation or copy from or to the process fail that the kernel does for
 * the verb, then the second and so on, until the verb needs fewer than that. After each failure the verb must have
 * failed with ENOMEM or EFAULT, or managed without; and without injection it then succeeds. `inject list` prints the
 * verbs. The kernel must have fault injection (/proc/thread-self/fail-nth).
 *
 * Prints how many calls failed with which error. A failed destruction may have destroyed the object if the answer could
 * not be copied: that is the RDMA core's, for every driver.
 */
#include "../advise.h"
#include <fcntl.h>
#include <stdbool.h>
#include <sys/mman.h>

#define SIZE	(1 << 20)
#define ROUNDS	5000	/* more allocations than a verb has */

static const char *device;
static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_comp_channel *channel;
static struct ibv_srq *srq;
static struct ibv_qp *qp;
static struct ibv_ah *ah;
static struct ibv_mr *mr;
static struct ibv_mw *mw;
/* What the verb under test makes. */
static struct ibv_context *new_ctx;
static struct ibv_pd *new_pd;
static struct ibv_cq *new_cq;
static struct ibv_comp_channel *new_channel;
static struct ibv_srq *new_srq;
static int gid_index;
static union ibv_gid gid, group;
static char *mem;

/* Verbs: 0 or errno. */

static int made(const void *object)
{
	return object ? 0 : errno ? errno : EINVAL;
}

/* Linux looks for a route to a destination's address, and without memory for it says ENOBUFS. */
static int routed(int err)
{
	return err == ENOBUFS ? ENOMEM : err;
}

static int open_act(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	int i, err = made(list);

	if (err)
		return err;
	for (i = 0; list[i] && strcmp(ibv_get_device_name(list[i]), device); i++)
		;
	/* Reading sysfs failed for this device, and libibverbs left it out. */
	if (!list[i]) {
		ibv_free_device_list(list);
		return ENOMEM;
	}
	err = made(new_ctx = ibv_open_device(list[i]));
	ibv_free_device_list(list);
	/* If open() failed, libibverbs tries the name in /dev/char that udev makes. The guests have no udev. */
	return err == ENOENT ? ENOMEM : err;
}

static void open_undo(void)
{
	check(!ibv_close_device(new_ctx), "ibv_close_device");
}

static int pd_act(void)
{
	return made(new_pd = ibv_alloc_pd(ctx));
}

static int pd_end(void)
{
	return ibv_dealloc_pd(new_pd);
}

static void pd_make(void)
{
	check(!pd_act(), "ibv_alloc_pd");
}

static void pd_undo(void)
{
	check(!pd_end(), "ibv_dealloc_pd");
}

static int mr_pinned(void)
{
	return made(mr = ibv_reg_mr(pd, mem, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
}

static int mr_odp(void)
{
	return made(mr = ibv_reg_mr(pd, mem, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND));
}

static int mr_implicit(void)
{
	return made(mr = ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND));
}

static int mr_end(void)
{
	return ibv_dereg_mr(mr);
}

static void mr_make(void)
{
	check(!mr_pinned(), "ibv_reg_mr");
}

static void odp_make(void)
{
	check(!mr_odp(), "ibv_reg_mr, on demand");
}

static void mr_undo(void)
{
	check(!mr_end(), "ibv_dereg_mr");
}

static int advise_act(void)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mem, .length = SIZE, .lkey = mr->lkey };

	return advise_mr(pd, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE, IB_UVERBS_ADVISE_MR_FLAG_FLUSH, &sge);
}

static int channel_act(void)
{
	return made(new_channel = ibv_create_comp_channel(ctx));
}

static void channel_undo(void)
{
	check(!ibv_destroy_comp_channel(new_channel), "ibv_destroy_comp_channel");
}

static int cq_act(void)
{
	return made(new_cq = ibv_create_cq(ctx, 100, NULL, channel, 0));
}

static int cq_large(void)
{
	return made(new_cq = ibv_create_cq(ctx, 20000, NULL, NULL, 0));
}

static int cq_end(void)
{
	return ibv_destroy_cq(new_cq);
}

static void cq_make(void)
{
	check(!cq_act(), "ibv_create_cq");
}

static void cq_undo(void)
{
	check(!cq_end(), "ibv_destroy_cq");
}

static int resize_act(void)
{
	return ibv_resize_cq(new_cq, 5000);
}

static int notify_act(void)
{
	return ibv_req_notify_cq(new_cq, 0);
}

static int srq_act(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 200, .max_sge = 2 } };

	return made(new_srq = ibv_create_srq(pd, &init));
}

static int srq_end(void)
{
	return ibv_destroy_srq(new_srq);
}

static void srq_make(void)
{
	check(!srq_act(), "ibv_create_srq");
}

static void srq_undo(void)
{
	check(!srq_end(), "ibv_destroy_srq");
}

static int srq_limit(void)
{
	struct ibv_srq_attr a = { .srq_limit = 10 };

	return ibv_modify_srq(new_srq, &a, IBV_SRQ_LIMIT);
}

static int srq_resize(void)
{
	struct ibv_srq_attr a = { .max_wr = 1000 };

	return ibv_modify_srq(new_srq, &a, IBV_SRQ_MAX_WR);
}

static int srq_query(void)
{
	struct ibv_srq_attr a;

	return ibv_query_srq(new_srq, &a);
}

static int make_qp(enum ibv_qp_type type, int entries, struct ibv_srq *with)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .srq = with, .qp_type = type, .sq_sig_all = 1,
		.cap = { .max_send_wr = entries, .max_recv_wr = with ? 0 : entries, .max_send_sge = 2,
			 .max_recv_sge = with ? 0 : 2 },
	};

	return made(qp = ibv_create_qp(pd, &init));
}

static int qp_rc(void)
{
	return make_qp(IBV_QPT_RC, 64, NULL);
}

static int qp_uc(void)
{
	return make_qp(IBV_QPT_UC, 64, NULL);
}

static int qp_ud(void)
{
	return make_qp(IBV_QPT_UD, 64, NULL);
}

static int qp_srq(void)
{
	return make_qp(IBV_QPT_RC, 64, srq);
}

static int qp_large(void)
{
	return make_qp(IBV_QPT_RC, 4000, NULL);
}

static int qp_end(void)
{
	return ibv_destroy_qp(qp);
}

static void qp_make(void)
{
	check(!qp_rc(), "ibv_create_qp");
}

static void qp_undo(void)
{
	check(!qp_end(), "ibv_destroy_qp");
}

static int to_init(void)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };

	return ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static void init_make(void)
{
	qp_make();
	check(!to_init(), "to INIT");
}

static int to_rtr(void)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1,
			     .grh = { .dgid = gid, .sgid_index = gid_index, .hop_limit = 64 } } };

	return routed(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
}

static void rtr_make(void)
{
	init_make();
	check(!to_rtr(), "to RTR");
}

static int to_rts_act(void)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTS, .timeout = 17, .retry_cnt = 7, .rnr_retry = 7,
		.max_rd_atomic = 1 };

	return ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			     IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

static void rts_make(void)
{
	rtr_make();
	check(!to_rts_act(), "to RTS");
}

static int to_error(void)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR };

	return ibv_modify_qp(qp, &a, IBV_QP_STATE);
}

static int to_reset(void)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RESET };

	return ibv_modify_qp(qp, &a, IBV_QP_STATE);
}

static int qp_query(void)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr a;

	return ibv_query_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_CAP, &init);
}

/* The queue pair is connected to itself. */
static void post_make(void)
{
	rts_make();
	mr_make();
}

static int post_act(void)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mem, .length = 64, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1 }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)mem + SIZE / 2;
	wr.wr.rdma.rkey = mr->rkey;
	return ibv_post_send(qp, &wr, &bad);
}

/* A request whose doorbell failed is in the ring and is sent by the next one. */
static void post_undo(void)
{
	double end = now() + 120;
	struct ibv_wc wc;

	while (!ibv_poll_cq(cq, 1, &wc))
		check(now() < end, "a WRITE does not complete");
	check(wc.status == IBV_WC_SUCCESS, "a WRITE failed");
	qp_undo();
	mr_undo();
	while (ibv_poll_cq(cq, 1, &wc) > 0)
		;
}

static int ah_act(void)
{
	struct ibv_ah_attr a = { .is_global = 1, .port_num = 1,
		.grh = { .dgid = gid, .sgid_index = gid_index, .hop_limit = 64 } };

	return routed(made(ah = ibv_create_ah(pd, &a)));
}

static int ah_end(void)
{
	return ibv_destroy_ah(ah);
}

static void ah_make(void)
{
	check(!ah_act(), "ibv_create_ah");
}

static void ah_undo(void)
{
	check(!ah_end(), "ibv_destroy_ah");
}

static int mw_act(void)
{
	return made(mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2));
}

static int mw_end(void)
{
	return ibv_dealloc_mw(mw);
}

static void mw_make(void)
{
	check(!mw_act(), "ibv_alloc_mw");
}

static void mw_undo(void)
{
	check(!mw_end(), "ibv_dealloc_mw");
}

static void ud_make(void)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 1 };

	check(!qp_ud(), "ibv_create_qp");
	check(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "to INIT");
}

static int attach_act(void)
{
	return ibv_attach_mcast(qp, &group, 0);
}

static int detach_act(void)
{
	return ibv_detach_mcast(qp, &group, 0);
}

static void attach_make(void)
{
	ud_make();
	check(!attach_act(), "ibv_attach_mcast");
}

static void attach_undo(void)
{
	check(!detach_act(), "ibv_detach_mcast");
	qp_undo();
}

static int device_query(void)
{
	struct ibv_device_attr_ex a;

	return ibv_query_device_ex(ctx, NULL, &a);
}

static int port_query(void)
{
	struct ibv_port_attr a;

	return ibv_query_port(ctx, 1, &a);
}

static int gid_query(void)
{
	struct ibv_gid_entry e;

	return ibv_query_gid_ex(ctx, 1, gid_index, &e, 0);
}

static const struct verb {
	const char *name;
	void (*make)(void);	/* before each call, without injection */
	int (*act)(void);
	void (*undo)(void);	/* after a call that succeeded */
	int destroys;		/* nothing is left to undo */
} verbs[] = {
	{ "open_device", NULL, open_act, open_undo, 0 },
	{ "query_device", NULL, device_query, NULL, 0 },
	{ "query_port", NULL, port_query, NULL, 0 },
	{ "query_gid", NULL, gid_query, NULL, 0 },
	{ "alloc_pd", NULL, pd_act, pd_undo, 0 },
	{ "dealloc_pd", pd_make, pd_end, NULL, 1 },
	{ "reg_mr", NULL, mr_pinned, mr_undo, 0 },
	{ "dereg_mr", mr_make, mr_end, NULL, 1 },
	{ "reg_mr_odp", NULL, mr_odp, mr_undo, 0 },
	{ "dereg_mr_odp", odp_make, mr_end, NULL, 1 },
	{ "reg_mr_implicit", NULL, mr_implicit, mr_undo, 0 },
	{ "advise_mr", odp_make, advise_act, mr_undo, 0 },
	{ "alloc_mw", NULL, mw_act, mw_undo, 0 },
	{ "dealloc_mw", mw_make, mw_end, NULL, 1 },
	{ "create_comp_channel", NULL, channel_act, channel_undo, 0 },
	{ "create_cq", NULL, cq_act, cq_undo, 0 },
	{ "create_cq_large", NULL, cq_large, cq_undo, 0 },
	{ "resize_cq", cq_make, resize_act, cq_undo, 0 },
	{ "req_notify_cq", cq_make, notify_act, cq_undo, 0 },
	{ "destroy_cq", cq_make, cq_end, NULL, 1 },
	{ "create_srq", NULL, srq_act, srq_undo, 0 },
	{ "modify_srq_limit", srq_make, srq_limit, srq_undo, 0 },
	{ "modify_srq_size", srq_make, srq_resize, srq_undo, 0 },
	{ "query_srq", srq_make, srq_query, srq_undo, 0 },
	{ "destroy_srq", srq_make, srq_end, NULL, 1 },
	{ "create_qp_rc", NULL, qp_rc, qp_undo, 0 },
	{ "create_qp_uc", NULL, qp_uc, qp_undo, 0 },
	{ "create_qp_ud", NULL, qp_ud, qp_undo, 0 },
	{ "create_qp_srq", NULL, qp_srq, qp_undo, 0 },
	{ "create_qp_large", NULL, qp_large, qp_undo, 0 },
	{ "modify_qp_init", qp_make, to_init, qp_undo, 0 },
	{ "modify_qp_rtr", init_make, to_rtr, qp_undo, 0 },
	{ "modify_qp_rts", rtr_make, to_rts_act, qp_undo, 0 },
	{ "modify_qp_err", rts_make, to_error, qp_undo, 0 },
	{ "modify_qp_reset", rts_make, to_reset, qp_undo, 0 },
	{ "query_qp", rts_make, qp_query, qp_undo, 0 },
	{ "destroy_qp", rts_make, qp_end, NULL, 1 },
	{ "post_send", post_make, post_act, post_undo, 0 },
	{ "create_ah", NULL, ah_act, ah_undo, 0 },
	{ "destroy_ah", ah_make, ah_end, NULL, 1 },
	{ "attach_mcast", ud_make, attach_act, attach_undo, 0 },
	{ "detach_mcast", attach_make, detach_act, qp_undo, 0 },
};

/* Injection into this thread. */

static int nth = -1;

static void arm(int n)
{
	char b[16];
	int k = snprintf(b, sizeof(b), "%d", n);

	check(pwrite(nth, b, k, 0) == k, "fail-nth");
}

/* disarm ends injection and reports whether the failure was injected. Its own copies count as well. */
static bool disarm(void)
{
	char b[16] = "";
	ssize_t k = pread(nth, b, sizeof(b) - 1, 0);
	bool injected = k > 0 && atoi(b) == 0;
	int i;

	for (i = 0; pwrite(nth, "0", 1, 0) != 1; i++)
		check(i < 10, "fail-nth");
	return injected;
}

static int inject(const struct verb *v)
{
	int nomem = 0, fault = 0, managed = 0, gone = 0, n, err, again;
	bool injected;

	for (n = 1; ; n++) {
		check(n < ROUNDS, "the verb never ends");
		if (v->make)
			v->make();
		errno = 0;
		arm(n);
		err = v->act();
		injected = disarm();
		if (err && !injected) {
			fprintf(stderr, "inject: %s failed without injection: %s\n", v->name, strerror(err));
			return 1;
		}
		again = err ? v->act() : 0;
		if (again && v->destroys && err == EFAULT && (again == ENOENT || again == EINVAL)) {
			gone++;
			again = 0;
		}
		if (again) {
			fprintf(stderr, "inject: %s after failure %d (errno %d): %s\n", v->name, n, err,
				strerror(again));
			return 1;
		}
		if (v->undo)
			v->undo();
		if (!injected)
			break;
		switch (err) {
		case 0:
			managed++;
			break;
		case ENOMEM:
			nomem++;
			break;
		case EFAULT:
			fault++;
			break;
		default:
			fprintf(stderr, "inject: %s, failure %d: %s\n", v->name, n, strerror(err));
			return 1;
		}
	}
	printf("%s: %d failures: ENOMEM %d, EFAULT %d, succeeded nevertheless %d, destroyed nevertheless %d\n",
	       v->name, n - 1, nomem, fault, managed, gone);
	/* Each verb at least copies something. */
	check(n > 1, "nothing was injected");
	return 0;
}

int main(int argc, char **argv)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 100, .max_sge = 1 } };
	const struct verb *v;
	size_t i;

	for (i = 0; argc == 2 && !strcmp(argv[1], "list") && i < sizeof(verbs) / sizeof(*verbs); i++)
		puts(verbs[i].name);
	if (i)
		return 0;
	check(argc == 4, "usage: inject DEVICE GID-INDEX VERB, or inject list");
	device = argv[1];
	gid_index = atoi(argv[2]);
	for (v = verbs; strcmp(v->name, argv[3]); )
		check(++v < verbs + sizeof(verbs) / sizeof(*verbs), "no such verb");
	nth = open("/proc/thread-self/fail-nth", O_RDWR);
	check(nth >= 0, "this kernel has no fault injection");

	mem = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	check(mem != MAP_FAILED, "memory");
	check(inet_pton(AF_INET6, "::ffff:239.1.2.3", &group) == 1, "group");
	ctx = open_device(device);
	check(!ibv_query_gid(ctx, 1, gid_index, &gid), "ibv_query_gid");
	check((pd = ibv_alloc_pd(ctx)) != NULL, "ibv_alloc_pd");
	check((channel = ibv_create_comp_channel(ctx)) != NULL, "ibv_create_comp_channel");
	check((cq = ibv_create_cq(ctx, 100, NULL, NULL, 0)) != NULL, "ibv_create_cq");
	check((srq = ibv_create_srq(pd, &init)) != NULL, "ibv_create_srq");
	return inject(v);
}
