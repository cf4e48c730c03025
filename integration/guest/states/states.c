// SPDX-License-Identifier: Apache-2.0
/*
 * states DEVICE GID-INDEX: functions of queue pairs, CQs and SRQs other than data transfer, on two queue pairs of this
 * process: drain (IBTA 10.3.1.5), solicited events (11.4.2.2), an SRQ's limit (10.2.9.2), CQ overrun (10.2.4,
 * 11.6.3.2), resizing with entries inside (11.2.8.3), queries during transitions, and refusals with their errno. Exit
 * status 0: all was right; otherwise a line says what was wrong.
 */
#include "../common.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#define SIZE 65536

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *scq, *rcq;
static struct ibv_mr *mr;
static int gid_index;
static union ibv_gid gid;
static char *mem;

static struct ibv_qp *make_qp(struct ibv_cq *send, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = send, .recv_cq = rcq, .srq = srq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = 60, .max_recv_wr = 32, .max_send_sge = 1, .max_recv_sge = 1,
			.max_inline_data = 64 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	check(qp != NULL, "ibv_create_qp");
	return qp;
}

static void connect_qp(struct ibv_qp *qp, struct ibv_qp *to)
{
	to_rts(qp, to->qp_num, &gid, gid_index, (struct ibv_qp_attr){
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7,
		.min_rnr_timer = 12 });
}

/* a sends to b. */
static void pair(struct ibv_qp **a, struct ibv_qp **b, struct ibv_cq *send, struct ibv_srq *srq)
{
	*a = make_qp(send, NULL);
	*b = make_qp(scq, srq);
	connect_qp(*a, *b);
	connect_qp(*b, *a);
}

static void destroy(struct ibv_qp *a, struct ibv_qp *b)
{
	check(!ibv_destroy_qp(a) && !ibv_destroy_qp(b), "ibv_destroy_qp");
}

static int send_to(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t length, int flags)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mem, .length = length, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .opcode = op, .send_flags = flags, .sg_list = &sge, .num_sge = 1,
				  .wr.rdma = { .remote_addr = (uintptr_t)mem + SIZE / 2, .rkey = mr->rkey } }, *bad;

	return ibv_post_send(qp, &wr, &bad);
}

static int receive(struct ibv_qp *qp, struct ibv_srq *srq)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mem + SIZE / 2, .length = 64, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	return srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad);
}

static void completions(struct ibv_cq *cq, int n, enum ibv_wc_status status, const char *what)
{
	double end = now() + 60;
	struct ibv_wc wc;

	while (n) {
		int got = ibv_poll_cq(cq, 1, &wc);

		check(got >= 0 && now() < end, what);
		check(!got || wc.status == status, what);
		n -= got;
	}
	check(!ibv_poll_cq(cq, 1, &wc), what);
}

/* event takes the next asynchronous event and checks its type. */
static struct ibv_async_event event(enum ibv_event_type want, const char *what)
{
	struct pollfd p = { .fd = ctx->async_fd, .events = POLLIN };
	struct ibv_async_event e;

	check(poll(&p, 1, 60000) == 1 && !ibv_get_async_event(ctx, &e), what);
	if (e.event_type != want) {
		fprintf(stderr, "states: %s: %s\n", what, ibv_event_type_str(e.event_type));
		exit(1);
	}
	ibv_ack_async_event(&e);
	return e;
}

static void no_event(const char *what)
{
	struct pollfd p = { .fd = ctx->async_fd, .events = POLLIN };
	struct ibv_async_event e;

	if (!poll(&p, 1, 0))
		return;
	check(!ibv_get_async_event(ctx, &e), "ibv_get_async_event");
	fprintf(stderr, "states: %s: %s\n", what, ibv_event_type_str(e.event_type));
	exit(1);
}

static int notified(int ms)
{
	struct pollfd p = { .fd = channel->fd, .events = POLLIN };
	struct ibv_cq *cq;
	void *context;

	if (poll(&p, 1, ms) != 1)
		return 0;
	check(!ibv_get_cq_event(channel, &cq, &context) && cq == rcq, "ibv_get_cq_event");
	ibv_ack_cq_events(cq, 1);
	return 1;
}

static enum ibv_qp_state state(struct ibv_qp *qp, struct ibv_qp_attr *a)
{
	struct ibv_qp_init_attr init;

	check(!ibv_query_qp(qp, a, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY, &init), "ibv_query_qp");
	return a->qp_state;
}

/* Requests begun before SQD complete; requests posted in SQD wait for RTS. */
static void drain(void)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1 };
	struct ibv_qp *x, *y;
	struct ibv_wc wc;
	int i;

	pair(&x, &y, scq, NULL);
	for (i = 0; i < 8; i++)
		check(!send_to(x, IBV_WR_RDMA_WRITE, SIZE / 2, 0), "ibv_post_send");
	check(!ibv_modify_qp(x, &a, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), "to SQD");
	check(event(IBV_EVENT_SQ_DRAINED, "SQ_DRAINED").element.qp == x, "drained: another queue pair");
	check(state(x, &a) == IBV_QPS_SQD && !a.sq_draining, "it is not in SQD, drained");
	for (i = 0; ibv_poll_cq(scq, 1, &wc) == 1; i++)
		check(wc.status == IBV_WC_SUCCESS, "a WRITE that was begun before SQD");
	check(!send_to(x, IBV_WR_RDMA_WRITE, 64, 0), "ibv_post_send in SQD");
	usleep(100000);
	check(!ibv_poll_cq(scq, 1, &wc), "a request was executed in SQD");
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_SQD, .min_rnr_timer = 20, .timeout = 19 };
	check(!ibv_modify_qp(x, &a, IBV_QP_STATE | IBV_QP_MIN_RNR_TIMER | IBV_QP_TIMEOUT), "attributes in SQD");
	a.qp_state = IBV_QPS_RTS;
	check(!ibv_modify_qp(x, &a, IBV_QP_STATE), "SQD to RTS");
	completions(scq, 9 - i, IBV_WC_SUCCESS, "after SQD");
	no_event("an event after SQD");
	destroy(x, y);
}

/* A CQ armed for solicited completions signals only those and errors. */
static void solicited(void)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR };
	struct ibv_qp *x, *y;
	int i;

	pair(&x, &y, scq, NULL);
	for (i = 0; i < 4; i++)
		check(!receive(y, NULL), "ibv_post_recv");
	check(!ibv_req_notify_cq(rcq, 1), "ibv_req_notify_cq");
	check(!send_to(x, IBV_WR_SEND, 64, 0), "ibv_post_send");
	completions(scq, 1, IBV_WC_SUCCESS, "SEND");
	completions(rcq, 1, IBV_WC_SUCCESS, "receive");
	check(!notified(200), "an event for an unsolicited completion");
	check(!send_to(x, IBV_WR_SEND, 64, IBV_SEND_SOLICITED), "ibv_post_send");
	check(notified(60000), "no event for a solicited completion");
	completions(scq, 1, IBV_WC_SUCCESS, "solicited SEND");
	completions(rcq, 1, IBV_WC_SUCCESS, "solicited receive");
	check(!ibv_req_notify_cq(rcq, 1), "ibv_req_notify_cq");
	check(!ibv_modify_qp(y, &a, IBV_QP_STATE), "to ERROR");
	check(notified(60000), "no event for a completion with an error");
	completions(rcq, 2, IBV_WC_WR_FLUSH_ERR, "flushed receives");
	destroy(x, y);
}

/* The limit event comes once and can be armed again; receives in an SRQ survive resizing. */
static void srq_limit(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	struct ibv_srq_attr a = { .srq_limit = 4 };
	struct ibv_qp_attr err = { .qp_state = IBV_QPS_ERR };
	struct ibv_qp *x, *y;
	int i, round;

	check(srq != NULL, "ibv_create_srq");
	pair(&x, &y, scq, srq);
	for (round = 0; round < 2; round++) {
		for (i = 0; i < 6; i++)
			check(!receive(NULL, srq), "ibv_post_srq_recv");
		a.srq_limit = 4;
		check(!ibv_modify_srq(srq, &a, IBV_SRQ_LIMIT), "limit");
		check(!ibv_query_srq(srq, &a) && a.srq_limit == 4, "the limit is wrong");
		for (i = 0; i < 2; i++)
			check(!send_to(x, IBV_WR_SEND, 64, 0), "ibv_post_send");
		completions(rcq, 2, IBV_WC_SUCCESS, "receives down to the limit");
		no_event("an event at the limit, not below");
		check(!send_to(x, IBV_WR_SEND, 64, 0), "ibv_post_send");
		check(event(IBV_EVENT_SRQ_LIMIT_REACHED, "SRQ_LIMIT_REACHED").element.srq == srq, "limit: another SRQ");
		check(!ibv_query_srq(srq, &a) && !a.srq_limit, "the limit is still set");
		a.max_wr = 64;
		check(!ibv_modify_srq(srq, &a, IBV_SRQ_MAX_WR), "ibv_modify_srq: size");
		for (i = 0; i < 3; i++)
			check(!send_to(x, IBV_WR_SEND, 64, 0), "ibv_post_send");
		completions(rcq, 4, IBV_WC_SUCCESS, "receives below the limit");
		completions(scq, 6, IBV_WC_SUCCESS, "SENDs");
		no_event("a second event of one limit");
	}
	a.srq_limit = 1000;
	check(ibv_modify_srq(srq, &a, IBV_SRQ_LIMIT) == EINVAL, "a limit beyond the SRQ");
	check(ibv_destroy_srq(srq) == EBUSY, "an SRQ in use was destroyed");
	check(!ibv_modify_qp(y, &err, IBV_QP_STATE), "to ERROR");
	check(event(IBV_EVENT_QP_LAST_WQE_REACHED, "QP_LAST_WQE_REACHED").element.qp == y,
	      "last WQE: another queue pair");
	destroy(x, y);
	check(!ibv_destroy_srq(srq), "ibv_destroy_srq");
}

/* A CQ overrun puts the CQ and its queue pairs into error, but no others. */
static void overrun(void)
{
	struct ibv_cq *small = ibv_create_cq(ctx, 3, NULL, NULL, 0);
	struct ibv_qp *x, *y, *bystander, *other;
	struct ibv_qp_attr a;
	int i, qps = 0, cqs = 0;

	check(small != NULL, "ibv_create_cq");
	pair(&x, &y, small, NULL);
	pair(&bystander, &other, scq, NULL);
	for (i = 0; i < small->cqe + 5; i++) /* a CQ may have more room than requested */
		check(!send_to(x, IBV_WR_RDMA_WRITE, 8, 0), "ibv_post_send");
	for (i = 0; i < 2; i++) {
		struct pollfd p = { .fd = ctx->async_fd, .events = POLLIN };
		struct ibv_async_event e;

		check(poll(&p, 1, 60000) == 1 && !ibv_get_async_event(ctx, &e), "event of an overrun");
		cqs += e.event_type == IBV_EVENT_CQ_ERR && e.element.cq == small;
		qps += e.event_type == IBV_EVENT_QP_FATAL && e.element.qp == x;
		ibv_ack_async_event(&e);
	}
	check(cqs == 1 && qps == 1, "not CQ_ERR and QP_FATAL");
	check(state(x, &a) == IBV_QPS_ERR, "the queue pair is not in ERROR");
	check(!send_to(bystander, IBV_WR_RDMA_WRITE, 64, 0), "ibv_post_send");
	completions(scq, 1, IBV_WC_SUCCESS, "a bystander's WRITE");
	destroy(x, y);
	destroy(bystander, other);
	check(!ibv_destroy_cq(small), "ibv_destroy_cq");
}

/* Entries survive resizing; a CQ does not shrink below their number. */
static void resize(void)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, 7, NULL, NULL, 0);
	struct ibv_qp *x, *y;
	int i;

	check(cq != NULL, "ibv_create_cq");
	pair(&x, &y, cq, NULL);
	for (i = 0; i < 7; i++)
		check(!send_to(x, IBV_WR_RDMA_WRITE, 64, 0), "ibv_post_send");
	for (i = 0; i < 7; i++) { /* the last one shows that all have arrived */
		check(!send_to(y, IBV_WR_RDMA_WRITE, 64, 0), "ibv_post_send");
		completions(scq, 1, IBV_WC_SUCCESS, "WRITE back");
		usleep(10000);
	}
	check(!ibv_resize_cq(cq, 100), "ibv_resize_cq");
	check(cq->cqe >= 100, "it is smaller than requested");
	for (i = 0; i < 25; i++)
		check(!send_to(x, IBV_WR_RDMA_WRITE, 64, 0), "ibv_post_send");
	usleep(200000);
	check(ibv_resize_cq(cq, 3) == EINVAL, "it shrank below its number of entries");
	completions(cq, 32, IBV_WC_SUCCESS, "after resizing");
	check(!ibv_resize_cq(cq, 3), "ibv_resize_cq to less");
	check(!send_to(x, IBV_WR_RDMA_WRITE, 64, 0), "ibv_post_send");
	completions(cq, 1, IBV_WC_SUCCESS, "in a smaller CQ");
	destroy(x, y);
	check(!ibv_destroy_cq(cq), "ibv_destroy_cq");
}

/* refused checks a call's result and errno: some verbs return the error, some only set errno. */
static void refused(int ok, int want, const char *what)
{
	check(!ok && errno == want, what);
}

static void refusals(void)
{
	struct ibv_qp_init_attr init = { .send_cq = scq, .recv_cq = rcq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_ah_attr ah = { .is_global = 1, .port_num = 1,
		.grh = { .dgid = gid, .sgid_index = gid_index, .hop_limit = 64 } };
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTS };
	struct ibv_device_attr dev;
	struct ibv_qp *x, *y;
	int i;

	check(!ibv_query_device(ctx, &dev), "ibv_query_device");
	refused(ibv_reg_mr(pd, mem, SIZE, IBV_ACCESS_REMOTE_WRITE) != NULL, EINVAL, "remote without local write");
	refused(ibv_reg_mr(pd, (void *)4096, SIZE, IBV_ACCESS_LOCAL_WRITE) != NULL, EFAULT, "a region without memory");
	refused(ibv_create_cq(ctx, dev.max_cqe + 1, NULL, NULL, 0) != NULL, EINVAL, "a CQ beyond the limit");
	init.cap.max_send_wr = dev.max_qp_wr + 1;
	refused(ibv_create_qp(pd, &init) != NULL, EINVAL, "a send queue beyond the limit");
	init.cap.max_send_wr = 1;
	init.cap.max_recv_sge = dev.max_sge + 1;
	refused(ibv_create_qp(pd, &init) != NULL, EINVAL, "more segments than the limit");
	init.cap.max_recv_sge = 1;
	init.cap.max_inline_data = 1 << 20;
	refused(ibv_create_qp(pd, &init) != NULL, EINVAL, "more inline data than the limit");
	ah.grh.sgid_index = 250;
	/* the provider looks up the GID and has an errno of its own */
	check(!ibv_create_ah(pd, &ah), "an address handle with an invalid GID");
	x = make_qp(scq, NULL);
	check(ibv_modify_qp(x, &a, IBV_QP_STATE) == EINVAL, "RESET to RTS");
	a.qp_state = IBV_QPS_INIT;
	check(ibv_modify_qp(x, &a, IBV_QP_STATE) == EINVAL, "INIT without attributes");
	a.port_num = 2;
	check(ibv_modify_qp(x, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == EINVAL,
	      "an invalid port");
	a.port_num = 1;
	a.pkey_index = 9;
	check(ibv_modify_qp(x, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == EINVAL,
	      "an invalid P_Key index");
	check(state(x, &a) == IBV_QPS_RESET, "a refused ibv_modify_qp changed the state");
	check(ibv_destroy_cq(scq) == EBUSY, "a CQ in use was destroyed");
	check(ibv_dealloc_pd(pd) == EBUSY, "a PD in use was deallocated");
	check(!ibv_destroy_qp(x), "ibv_destroy_qp");

	pair(&x, &y, scq, NULL);
	check(send_to(x, IBV_WR_SEND, 1024, IBV_SEND_INLINE) == EINVAL,
	      "more inline data than the queue pair supports");
	a = (struct ibv_qp_attr){ .alt_port_num = 1 };
	check(ibv_modify_qp(x, &a, IBV_QP_ALT_PATH) != 0, "an alternate path");
	for (i = 0; i < 1000 && !receive(x, NULL); i++)
		;
	check(i >= 32 && i < 1000 && receive(x, NULL) == ENOMEM, "a full receive queue");
	check(state(x, &a) == IBV_QPS_RTS, "refusals changed the state");
	destroy(x, y);
}

#define QUERIERS 3

static struct ibv_qp *queried_qp;
static atomic_int querying, idle;

static void *querier(void *arg)
{
	for (;;) {
		struct ibv_qp_init_attr init;
		struct ibv_qp_attr a;
		int on = atomic_load(&querying);

		if (on < 0)
			return arg;
		if (!on) {
			sched_yield();
			continue;
		}
		atomic_fetch_sub(&idle, 1);
		if (atomic_load(&querying) > 0)
			check(!ibv_query_qp(queried_qp, &a, IBV_QP_STATE, &init), "ibv_query_qp");
		atomic_fetch_add(&idle, 1);
	}
}

/* A query that meets a transition does not undo it: in RTS requests can be posted. */
static void queried(void)
{
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	pthread_t threads[QUERIERS];
	struct ibv_qp *x, *y;
	struct ibv_wc wc;
	int i;

	pair(&x, &y, scq, NULL);
	queried_qp = x;
	atomic_store(&idle, QUERIERS);
	for (i = 0; i < QUERIERS; i++)
		check(!pthread_create(&threads[i], NULL, querier, NULL), "pthread_create");
	for (i = 0; i < 300; i++) {
		check(!ibv_modify_qp(x, &reset, IBV_QP_STATE), "to RESET");
		while (ibv_poll_cq(scq, 1, &wc) == 1) /* a completion of each round would overrun it */
			;
		atomic_store(&querying, 1);
		connect_qp(x, y);
		atomic_store(&querying, 0);
		while (atomic_load(&idle) != QUERIERS)
			sched_yield();
		errno = send_to(x, IBV_WR_RDMA_WRITE, 64, IBV_SEND_INLINE);
		check(!errno, "ibv_post_send in RTS, after a query during the transition");
	}
	atomic_store(&querying, -1);
	for (i = 0; i < QUERIERS; i++)
		check(!pthread_join(threads[i], NULL), "pthread_join");
	check(!ibv_modify_qp(x, &reset, IBV_QP_STATE), "to RESET");
	while (ibv_poll_cq(scq, 1, &wc) == 1)
		;
	destroy(x, y);
}

int main(int argc, char **argv)
{
	check(argc == 3, "usage: states DEVICE GID-INDEX");
	gid_index = atoi(argv[2]);
	ctx = open_device(argv[1]);
	check(!ibv_query_gid(ctx, 1, gid_index, &gid), "ibv_query_gid");
	pd = ibv_alloc_pd(ctx);
	channel = ibv_create_comp_channel(ctx);
	check(pd && channel, "PD, channel");
	scq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	rcq = ibv_create_cq(ctx, 64, NULL, channel, 0);
	mem = aligned_alloc(4096, SIZE);
	check(scq && rcq && mem, "CQs, memory");
	memset(mem, 0x5a, SIZE);
	mr = ibv_reg_mr(pd, mem, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	check(mr != NULL, "ibv_reg_mr");
	drain();
	solicited();
	srq_limit();
	overrun();
	resize();
	queried();
	refusals();
	no_event("an unexpected event");
	puts("states: all right");
	return 0;
}
