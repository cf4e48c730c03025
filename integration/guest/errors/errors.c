// SPDX-License-Identifier: Apache-2.0
/*
 * errors DEVICE GID-INDEX [SERVER]: provokes each error that a verbs program can provoke, one after the other, on fresh
 * queue pairs between two instances of this program, through the guest's own libibverbs. The table lists the results:
 * the completions of requester (the one with SERVER) and responder, the states of both queue pairs, the asynchronous
 * event, and whether memory may change. Afterwards both queue pairs work again. Exit status 0: all results matched.
 *
 * Statuses are defined in IBTA volume 1, 11.6.2; queue pair states in 10.3.1; a responder's checks and answers in 9.7.4
 * and 9.7.5.2 (UC: 9.8.2, UD: 9.8.3); asynchronous events in 11.6.3. No program can provoke the following with a
 * correct device: Bad Response; Remote Aborted and everything about EE contexts (RD only); Local Access, which needs a
 * region invalidated between two packets (device/rdma/roce's TestResponderImmAccess).
 */
#include "../common.h"
#include <fcntl.h>
#include <poll.h>

#define PORT   18519
#define SIZE   8192
#define LENGTH 64	/* default length of a request */
#define QKEY   0x1234

#define RIGHTS (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
#define ALL    (IBV_ACCESS_LOCAL_WRITE | RIGHTS)

enum op { WRITE, WRITE_IMM, SEND, SEND_INV, READ, ADD, SWAP, PUT, FLUSH, BIND, INVALIDATE };

/* The region of a key: the row's, or an unsuitable one. */
enum key { GOOD, NONE, OTHER_PD, GONE, WEAK };

struct row {
	const char *what;
	enum ibv_qp_type type;	/* 0: RC */
	enum op op;
	enum key lkey, rkey, recv_key;	/* of the request, of its target, of the receive */
	uint32_t length, from, at;	/* from, at: offsets in the source and in the target */
	unsigned target, qp;	/* rights of the target's region, of the responder's queue pair; 0: all */
	int receive;		/* the responder posts two receives of this size; 0: none */
	int srq;		/* they are posted to a shared receive queue */
	int no_reads;		/* 1: the requester's max_rd_atomic is 0; 2: the responder's */
	int deaf;		/* the responder stays in RESET */
	uint32_t qkey;		/* added to the right Q_Key by the requester */
	/* Expected results. */
	enum ibv_wc_status status;
	int got;		/* status of the first receive; -1: it stays queued. In ERROR others are flushed */
	enum ibv_qp_state state, peer;	/* 0: RTS */
	int event;		/* the responder's; -1: none */
	int changes;		/* the target may be written before the error is found */
};

#define FAILS(s)        .status = IBV_WC_##s, .state = IBV_QPS_ERR, .got = -1, .event = -1
#define STOPS(s)        .status = IBV_WC_##s, .state = IBV_QPS_SQE, .got = -1, .event = -1
#define REFUSED(s, e)   .status = IBV_WC_##s, .state = IBV_QPS_ERR, .peer = IBV_QPS_ERR, .got = -1, \
			.event = IBV_EVENT_QP_##e
#define FAILS_BOTH(s,r) .status = IBV_WC_##s, .state = IBV_QPS_ERR, .peer = IBV_QPS_ERR, .got = IBV_WC_##r, .event = -1
#define LOST            .status = IBV_WC_SUCCESS, .got = -1, .event = -1

static const struct row rows[] = {
	/* Local errors: only the requester goes to ERROR (9.9.2). */
	{ "WRITE from an invalid key", .op = WRITE, .lkey = NONE, FAILS(LOC_PROT_ERR) },
	{ "WRITE from a region of another PD", .op = WRITE, .lkey = OTHER_PD, FAILS(LOC_PROT_ERR) },
	{ "SEND from a deregistered region", .op = SEND, .lkey = GONE, .receive = 64, FAILS(LOC_PROT_ERR) },
	{ "WRITE from beyond a region", .op = WRITE, .from = SIZE - LENGTH + 1, FAILS(LOC_PROT_ERR) },
	{ "READ into a region without local write", .op = READ, .lkey = WEAK, FAILS(LOC_PROT_ERR) },
	{ "READ into an invalid key", .op = READ, .lkey = NONE, FAILS(LOC_PROT_ERR) },
	{ "FETCH_ADD into a region without local write", .op = ADD, .lkey = WEAK, .length = 8, .changes = 1,
	  FAILS(LOC_PROT_ERR) },
	{ "SEND of more than 2^31 bytes", .op = SEND, .length = (1u << 31) + 1, .receive = 64, FAILS(LOC_LEN_ERR) },
	{ "FETCH_ADD with a result of 4 bytes", .op = ADD, .length = 4, FAILS(LOC_LEN_ERR) },
	{ "READ with max_rd_atomic 0", .op = READ, .no_reads = 1, FAILS(LOC_QP_OP_ERR) },
	{ "BIND_MW of a region without the right", .op = BIND, FAILS(MW_BIND_ERR) },
	{ "LOCAL_INV of an invalid key", .op = INVALIDATE, FAILS(MW_BIND_ERR) },

	/* R_Key violations (9.7.4.1, NAK Remote Access Error). */
	{ "WRITE to an invalid key", .op = WRITE, .rkey = NONE, REFUSED(REM_ACCESS_ERR, ACCESS_ERR) },
	{ "WRITE to a region of another PD", .op = WRITE, .rkey = OTHER_PD, REFUSED(REM_ACCESS_ERR, ACCESS_ERR) },
	{ "WRITE to a deregistered region", .op = WRITE, .rkey = GONE, REFUSED(REM_ACCESS_ERR, ACCESS_ERR) },
	{ "WRITE beyond a region", .op = WRITE, .at = SIZE - LENGTH + 1, REFUSED(REM_ACCESS_ERR, ACCESS_ERR) },
	{ "WRITE of several packets, the last beyond a region", .op = WRITE, .at = 8, .length = SIZE,
	  REFUSED(REM_ACCESS_ERR, ACCESS_ERR) },
	{ "WRITE to a read-only region", .op = WRITE, .target = IBV_ACCESS_REMOTE_READ,
	  REFUSED(REM_ACCESS_ERR, ACCESS_ERR) },
	{ "WRITE with immediate data to an invalid key", .op = WRITE_IMM, .rkey = NONE, .receive = 64,
	  .status = IBV_WC_REM_ACCESS_ERR, .state = IBV_QPS_ERR, .peer = IBV_QPS_ERR, .got = IBV_WC_WR_FLUSH_ERR,
	  .event = IBV_EVENT_QP_ACCESS_ERR },
	{ "READ of an invalid key", .op = READ, .rkey = NONE, REFUSED(REM_ACCESS_ERR, ACCESS_ERR) },
	{ "READ beyond a region", .op = READ, .at = SIZE - LENGTH + 1, REFUSED(REM_ACCESS_ERR, ACCESS_ERR) },
	{ "READ of a write-only region", .op = READ, .target = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
	  REFUSED(REM_ACCESS_ERR, ACCESS_ERR) },
	{ "FETCH_ADD in a write-only region", .op = ADD, .length = 8,
	  .target = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, REFUSED(REM_ACCESS_ERR, ACCESS_ERR) },
	{ "CMP_SWAP with an invalid key", .op = SWAP, .length = 8, .rkey = NONE, REFUSED(REM_ACCESS_ERR, ACCESS_ERR) },
	{ "SEND that invalidates an invalid key", .op = SEND_INV, .rkey = NONE, .receive = 64, .changes = 1,
	  .status = IBV_WC_REM_ACCESS_ERR, .state = IBV_QPS_ERR, .peer = IBV_QPS_ERR, .got = IBV_WC_REM_ACCESS_ERR,
	  .event = IBV_EVENT_QP_ACCESS_ERR },

	/* Invalid requests (9.7.4.1, NAK Invalid Request). */
	{ "WRITE, not enabled in the queue pair", .op = WRITE, .qp = RIGHTS & ~IBV_ACCESS_REMOTE_WRITE,
	  REFUSED(REM_INV_REQ_ERR, REQ_ERR) },
	{ "READ, not enabled in the queue pair", .op = READ, .qp = RIGHTS & ~IBV_ACCESS_REMOTE_READ,
	  REFUSED(REM_INV_REQ_ERR, REQ_ERR) },
	{ "FETCH_ADD, not enabled in the queue pair", .op = ADD, .length = 8, .qp = RIGHTS & ~IBV_ACCESS_REMOTE_ATOMIC,
	  REFUSED(REM_INV_REQ_ERR, REQ_ERR) },
	{ "READ, more than max_dest_rd_atomic", .op = READ, .no_reads = 2, REFUSED(REM_INV_REQ_ERR, REQ_ERR) },
	{ "FETCH_ADD at an address not a multiple of 8", .op = ADD, .length = 8, .at = 4,
	  REFUSED(REM_INV_REQ_ERR, REQ_ERR) },
	{ "CMP_SWAP at an address not a multiple of 8", .op = SWAP, .length = 8, .at = 1,
	  REFUSED(REM_INV_REQ_ERR, REQ_ERR) },
	{ "SEND longer than the receive", .op = SEND, .receive = LENGTH - 1, .changes = 1,
	  FAILS_BOTH(REM_INV_REQ_ERR, LOC_LEN_ERR) },
	{ "SEND of several packets longer than the receive", .op = SEND, .length = 4000, .receive = 3999, .changes = 1,
	  FAILS_BOTH(REM_INV_REQ_ERR, LOC_LEN_ERR) },

	/* The responder cannot execute it (9.7.5.2, NAK Remote Operational Error). */
	{ "SEND into an invalid key", .op = SEND, .receive = 64, .recv_key = NONE,
	  FAILS_BOTH(REM_OP_ERR, LOC_PROT_ERR) },
	{ "SEND into a region of another PD", .op = SEND, .receive = 64, .recv_key = OTHER_PD,
	  FAILS_BOTH(REM_OP_ERR, LOC_PROT_ERR) },
	{ "SEND into a region without local write", .op = SEND, .receive = 64, .recv_key = WEAK,
	  FAILS_BOTH(REM_OP_ERR, LOC_PROT_ERR) },
	{ "SEND into a shared receive's invalid key", .op = SEND, .receive = 64, .recv_key = NONE, .srq = 1,
	  .status = IBV_WC_REM_OP_ERR, .state = IBV_QPS_ERR, .peer = IBV_QPS_ERR, .got = IBV_WC_LOC_PROT_ERR,
	  .event = IBV_EVENT_QP_LAST_WQE_REACHED },

	/* No answer, or RNR NAKs only (9.7.6.1, 9.7.5.2.8). */
	{ "SEND to a queue pair in RESET", .op = SEND, .deaf = 1, FAILS(RETRY_EXC_ERR) },
	{ "READ from a queue pair in RESET", .op = READ, .deaf = 1, FAILS(RETRY_EXC_ERR) },
	{ "SEND without a receive", .op = SEND, FAILS(RNR_RETRY_EXC_ERR) },
	{ "WRITE with immediate data without a receive", .op = WRITE_IMM, .changes = 1, FAILS(RNR_RETRY_EXC_ERR) },

	/* UC: a request that fails at the responder is lost; local errors lead to SQE (9.8.2, 10.3.1). */
	{ "UC: WRITE to an invalid key", IBV_QPT_UC, .op = WRITE, .rkey = NONE, .receive = 64, LOST },
	{ "UC: WRITE beyond a region", IBV_QPT_UC, .op = WRITE, .at = SIZE - LENGTH + 1, .receive = 64, LOST },
	{ "UC: WRITE, not enabled in the queue pair", IBV_QPT_UC, .op = WRITE, .qp = IBV_ACCESS_REMOTE_READ,
	  .receive = 64, LOST },
	{ "UC: SEND longer than the receive", IBV_QPT_UC, .op = SEND, .receive = LENGTH - 1, .changes = 1, LOST },
	{ "UC: SEND without a receive", IBV_QPT_UC, .op = SEND, LOST },
	{ "UC: WRITE from an invalid key", IBV_QPT_UC, .op = WRITE, .lkey = NONE, STOPS(LOC_PROT_ERR) },
	{ "UC: READ", IBV_QPT_UC, .op = READ, STOPS(LOC_QP_OP_ERR) },
	{ "UC: SEND into an invalid key", IBV_QPT_UC, .op = SEND, .receive = 64, .recv_key = NONE,
	  .status = IBV_WC_SUCCESS, .got = IBV_WC_LOC_PROT_ERR, .peer = IBV_QPS_ERR, .event = -1 },

	/* UD: the same; the Q_Key is checked too (9.8.3, 10.2.5). */
	{ "UD: another Q_Key", IBV_QPT_UD, .op = SEND, .qkey = 1, .receive = 128, LOST },
	{ "UD: SEND longer than the receive", IBV_QPT_UD, .op = SEND, .receive = 40 + LENGTH - 1, LOST },
	{ "UD: SEND without a receive", IBV_QPT_UD, .op = SEND, LOST },
	{ "UD: SEND longer than a packet", IBV_QPT_UD, .op = SEND, .length = 4097, STOPS(LOC_LEN_ERR) },
	{ "UD: SEND from an invalid key", IBV_QPT_UD, .op = SEND, .lkey = NONE, STOPS(LOC_PROT_ERR) },
	{ "UD: WRITE", IBV_QPT_UD, .op = WRITE, STOPS(LOC_QP_OP_ERR) },
	{ "UD: SEND into an invalid key", IBV_QPT_UD, .op = SEND, .receive = 128, .recv_key = NONE,
	  .status = IBV_WC_SUCCESS, .got = IBV_WC_LOC_PROT_ERR, .peer = IBV_QPS_ERR, .event = -1 },

	/* Annex A19. */
	{ "ATOMIC WRITE at an address not a multiple of 8", .op = PUT, .length = 8, .at = 4,
	  REFUSED(REM_INV_REQ_ERR, REQ_ERR) },
	{ "ATOMIC WRITE to a read-only region", .op = PUT, .length = 8, .target = IBV_ACCESS_REMOTE_READ,
	  REFUSED(REM_ACCESS_ERR, ACCESS_ERR) },
#ifdef HAVE_FLUSH
	{ "FLUSH of a region without the right", .op = FLUSH, REFUSED(REM_ACCESS_ERR, ACCESS_ERR) },
#endif
};

/* side is exchanged before each row. */
struct side {
	uint32_t row, qpn, rkey;
	uint64_t addr;
	union ibv_gid gid;
};

static struct ibv_context *ctx;
static struct ibv_pd *pd, *other_pd;
static struct ibv_cq *cq;
static struct ibv_mr *source, *landing;	/* of mem and of target_mem, with all rights */
static struct ibv_mr *foreign, *weak;	/* of another PD; without rights */
static struct ibv_ah *ah;
static uint32_t gone;
static struct side mine, theirs;
static const struct row *row;
static char *mem, *target_mem;
static int gid_index, peer;

static void wrong(const char *what, const char *got, const char *want)
{
	fprintf(stderr, "errors: %s: %s: %s, want %s\n", row->what, what, got, want);
	exit(1);
}

static enum ibv_qp_type type(void) { return row->type ? row->type : IBV_QPT_RC; }

static uint32_t key(enum key k, struct ibv_mr *good)
{
	switch (k) {
	case NONE:
		return 0x7ffffe00;
	case OTHER_PD:
		return foreign->lkey;
	case GONE:
		return gone;
	case WEAK:
		return weak->lkey;
	default:
		return good->lkey;
	}
}

static struct ibv_qp *make_qp(struct ibv_srq *srq)
{
	struct ibv_qp_init_attr_ex init = {
		.qp_type = type(), .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .pd = pd,
		.send_cq = cq, .recv_cq = cq, .srq = srq, .sq_sig_all = 1,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 2, .max_recv_sge = 1 },
		.send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	struct ibv_qp *qp;

	if (type() == IBV_QPT_RC)
		init.send_ops_flags |= IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP;
	if (row->op == PUT)
		init.send_ops_flags |= IBV_QP_EX_WITH_ATOMIC_WRITE;
#ifdef HAVE_FLUSH
	if (row->op == FLUSH)
		init.send_ops_flags |= IBV_QP_EX_WITH_FLUSH;
#endif
	qp = ibv_create_qp_ex(ctx, &init);
	check(qp != NULL, "ibv_create_qp_ex");
	return qp;
}

/* ready connects a queue pair with the row's attributes, or with the default ones. */
static void ready(struct ibv_qp *qp, const struct row *as)
{
	unsigned rights = as && as->qp ? as->qp : RIGHTS;

#ifdef HAVE_FLUSH
	if (row->op == FLUSH)
		rights |= IBV_ACCESS_FLUSH_GLOBAL;
#endif
	to_rts(qp, theirs.qpn, &theirs.gid, gid_index, (struct ibv_qp_attr){
		.qp_access_flags = rights, .qkey = QKEY, .min_rnr_timer = 1, .rnr_retry = 2,
		/* A peer that does not answer is given up soon; other peers may be slow. */
		.timeout = as && as->deaf ? 8 : 18, .retry_cnt = as && as->deaf ? 1 : 7,
		.max_rd_atomic = !as || as->no_reads != 1, .max_dest_rd_atomic = !as || as->no_reads != 2 });
}

static void receive(struct ibv_qp *qp, struct ibv_srq *srq, uint32_t length, uint32_t lkey)
{
	struct ibv_sge sge = { .addr = (uintptr_t)target_mem, .length = length, .lkey = lkey };
	struct ibv_recv_wr wr = { .wr_id = 2, .sg_list = &sge, .num_sge = 1 }, *bad;

	check(!(srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad)), "ibv_post_recv");
}

static void post(struct ibv_qp *qp, enum ibv_wr_opcode op, struct ibv_sge *sge, uint64_t to, uint32_t rkey,
		 uint32_t qkey)
{
	struct ibv_send_wr wr = { .wr_id = 1, .opcode = op, .sg_list = sge, .num_sge = !!sge }, *bad;

	if (op == IBV_WR_SEND_WITH_INV)
		wr.invalidate_rkey = rkey;
	if (qp->qp_type == IBV_QPT_UD) { /* also for a WRITE: the provider needs an address handle */
		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = theirs.qpn;
		wr.wr.ud.remote_qkey = qkey;
	} else {
		wr.wr.rdma.remote_addr = to;
		wr.wr.rdma.rkey = rkey;
	}
	check(!ibv_post_send(qp, &wr, &bad), "ibv_post_send");
}

/* Uses the ibv_wr interface: ibv_post_send rejects some of these requests itself. */
static void post_ex(struct ibv_qp *qp, const struct ibv_sge *sge, uint64_t to)
{
	struct ibv_qp_ex *x = ibv_qp_to_qp_ex(qp);

	ibv_wr_start(x);
	x->wr_id = 1;
	x->wr_flags = IBV_SEND_SIGNALED;
	switch (row->op) {
	case ADD:
		ibv_wr_atomic_fetch_add(x, theirs.rkey, to, 1);
		break;
	case SWAP:
		ibv_wr_atomic_cmp_swp(x, theirs.rkey, to, 0, 1);
		break;
	case PUT:
		ibv_wr_atomic_write(x, theirs.rkey, to, "8 bytes");
		break;
#ifdef HAVE_FLUSH
	case FLUSH:
		ibv_wr_flush(x, theirs.rkey, to, LENGTH, IBV_FLUSH_GLOBAL, IBV_FLUSH_RANGE);
		break;
#endif
	default:
		check(0, "no such operation");
	}
	if (row->op == ADD || row->op == SWAP)
		ibv_wr_set_sge(x, sge->lkey, sge->addr, sge->length);
	check(!ibv_wr_complete(x), "ibv_wr_complete");
}

static void post_manage(struct ibv_qp *qp, struct ibv_mw *mw)
{
	struct ibv_send_wr wr = { .wr_id = 1, .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = key(NONE, NULL) }, *bad;

	if (row->op == BIND) {
		wr.opcode = IBV_WR_BIND_MW;
		wr.invalidate_rkey = 0;
		wr.bind_mw.mw = mw;
		wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
		wr.bind_mw.bind_info.mr = source;
		wr.bind_mw.bind_info.addr = (uintptr_t)mem;
		wr.bind_mw.bind_info.length = LENGTH;
		wr.bind_mw.bind_info.mw_access_flags = IBV_ACCESS_REMOTE_WRITE;
	}
	check(!ibv_post_send(qp, &wr, &bad), "ibv_post_send");
}

static void provoke(struct ibv_qp *qp, struct ibv_mw *mw)
{
	static const enum ibv_wr_opcode opcode[] = {
		[WRITE] = IBV_WR_RDMA_WRITE, [WRITE_IMM] = IBV_WR_RDMA_WRITE_WITH_IMM,
		[SEND] = IBV_WR_SEND, [SEND_INV] = IBV_WR_SEND_WITH_INV, [READ] = IBV_WR_RDMA_READ,
	};
	uint64_t to = theirs.addr + row->at;
	struct ibv_sge sge = { .addr = (uintptr_t)mem + row->from, .length = row->length ? row->length : LENGTH,
			       .lkey = key(row->lkey, source) };

	if (row->op <= READ)
		post(qp, opcode[row->op], &sge, to, theirs.rkey, QKEY + row->qkey);
	else if (row->op < BIND)
		post_ex(qp, &sge, to);
	else
		post_manage(qp, mw);
}

/* completes polls the next completion and returns its length. */
static uint32_t completes(uint64_t id, enum ibv_wc_status status, const char *what)
{
	double end = now() + 60;
	struct ibv_wc wc;
	int n;

	while (!(n = ibv_poll_cq(cq, 1, &wc)))
		if (now() > end)
			wrong(what, "no completion", ibv_wc_status_str(status));
	check(n == 1, "ibv_poll_cq");
	if (wc.status != status)
		wrong(what, ibv_wc_status_str(wc.status), ibv_wc_status_str(status));
	if (wc.wr_id != id)
		wrong(what, "a completion of another request", "one of this request");
	return wc.byte_len;
}

/* lost: the responder ignores the request, and receives the requester's next one. */
static int lost(void) { return row->status == IBV_WC_SUCCESS && row->got < 0 && row->receive; }

static void idle(const char *what)
{
	struct ibv_wc wc;

	if (ibv_poll_cq(cq, 1, &wc))
		wrong(what, ibv_wc_status_str(wc.status), "no completion");
}

static void in_state(struct ibv_qp *qp, enum ibv_qp_state want, const char *what)
{
	static const char *const name[] = { "RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERROR" };
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr a;

	check(!ibv_query_qp(qp, &a, IBV_QP_STATE, &init), "ibv_query_qp");
	if (a.qp_state != want)
		wrong(what, a.qp_state < 7 ? name[a.qp_state] : "?", name[want]);
}

/* happens takes the expected asynchronous event, if any, and checks that there is no other. */
static void happens(struct ibv_qp *qp, int want)
{
	struct pollfd p = { .fd = ctx->async_fd, .events = POLLIN };
	struct ibv_async_event e;

	if (want >= 0) {
		if (poll(&p, 1, 60000) != 1)
			wrong("event", "none", ibv_event_type_str(want));
		check(!ibv_get_async_event(ctx, &e), "ibv_get_async_event");
		if (e.event_type != (enum ibv_event_type)want || e.element.qp != qp)
			wrong("event", ibv_event_type_str(e.event_type), ibv_event_type_str(want));
		ibv_ack_async_event(&e);
	}
	if (poll(&p, 1, 0) == 1 && !ibv_get_async_event(ctx, &e))
		wrong("event", ibv_event_type_str(e.event_type), "none");
}

static void move(struct ibv_qp *qp, enum ibv_qp_state to)
{
	struct ibv_qp_attr a = { .qp_state = to };

	check(!ibv_modify_qp(qp, &a, IBV_QP_STATE), "ibv_modify_qp");
}

/* again checks that the queue pairs work: out of SQE at once, otherwise after RESET. */
static void again(struct ibv_qp *qp, int active)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mem, .length = LENGTH, .lkey = source->lkey };
	int grh = type() == IBV_QPT_UD ? 40 : 0;

	if (row->state == IBV_QPS_SQE) {
		if (active)
			move(qp, IBV_QPS_RTS);
	} else {
		move(qp, IBV_QPS_RESET);
		ready(qp, NULL);
	}
	memset(target_mem, 0, SIZE);
	if (!active)
		receive(qp, NULL, grh + LENGTH, landing->lkey);
	swap(peer, &mine, &theirs, sizeof(mine));
	if (active)
		post(qp, IBV_WR_SEND, &sge, 0, 0, QKEY);
	completes(active ? 1 : 2, IBV_WC_SUCCESS, "the SEND afterwards");
	if (!active && memcmp(target_mem + grh, mem, LENGTH))
		wrong("the SEND afterwards", "other data", "the data sent");
}

static void requester(struct ibv_qp *qp, struct ibv_mw *mw)
{
	provoke(qp, mw);
	completes(1, row->status, "requester");
	if (row->status != IBV_WC_SUCCESS) {
		post(qp, IBV_WR_SEND, NULL, 0, 0, QKEY);
		completes(1, IBV_WC_WR_FLUSH_ERR, "the next request");
	} else if (lost()) {
		post(qp, IBV_WR_SEND, NULL, 0, 0, QKEY);
		completes(1, IBV_WC_SUCCESS, "the next request");
	}
	in_state(qp, row->state ? row->state : IBV_QPS_RTS, "requester's state");
	happens(qp, -1);
	idle("requester");
	swap(peer, &mine, &theirs, sizeof(mine));
}

static void responder(struct ibv_qp *qp, const char *before)
{
	int i = 0, grh = type() == IBV_QPT_UD ? 40 : 0;	/* the next request may have a GRH */

	swap(peer, &mine, &theirs, sizeof(mine));
	if (lost() && (int)completes(2, IBV_WC_SUCCESS, "the next request") != grh)
		wrong("responder", "received it", "only the next request");
	if (row->got >= 0) {
		completes(2, row->got, "responder");
		i = 1;
	}
	/* Unused receives are flushed, unless they are in a shared receive queue. */
	for (; row->peer == IBV_QPS_ERR && row->receive && !row->srq && i < 2; i++)
		completes(2, IBV_WC_WR_FLUSH_ERR, "responder's other receive");
	in_state(qp, row->peer || row->deaf ? row->peer : IBV_QPS_RTS, "responder's state");
	happens(qp, row->event);
	idle("responder");
	if (!row->changes && memcmp(target_mem + grh, before + grh, SIZE - grh))
		wrong("responder's memory", "changed", "unchanged");
}

static void run(int active, const char *before)
{
	unsigned rights = row->target ? row->target : ALL;
	struct ibv_srq_init_attr sinit = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = row->srq && !active ? ibv_create_srq(pd, &sinit) : NULL;
	struct ibv_mw *mw = row->op == BIND ? ibv_alloc_mw(pd, IBV_MW_TYPE_2) : NULL;
	struct ibv_qp *qp = make_qp(srq);
	struct ibv_mr *target = ibv_reg_mr(pd, target_mem, SIZE, rights), *dead;

	check(target && (srq || active || !row->srq) && (mw || row->op != BIND), "region, SRQ, window");
	memcpy(target_mem, before, SIZE);
	dead = ibv_reg_mr(pd, target_mem, SIZE, ALL);
	check(dead != NULL, "ibv_reg_mr");
	gone = dead->lkey;
	check(!ibv_dereg_mr(dead), "ibv_dereg_mr");
	mine.row = row - rows;
	mine.qpn = qp->qp_num;
	mine.rkey = key(row->rkey, target);
	mine.addr = (uintptr_t)target_mem;
	swap(peer, &mine, &theirs, sizeof(mine));
	if (theirs.row != mine.row)
		wrong("the other side", "at another row", "at this row");
	if (active && type() == IBV_QPT_UD && !ah) {
		struct ibv_ah_attr a = { .is_global = 1, .port_num = 1,
			.grh = { .dgid = theirs.gid, .sgid_index = gid_index, .hop_limit = 64 } };

		check((ah = ibv_create_ah(pd, &a)) != NULL, "ibv_create_ah");
	}
	if (active || !row->deaf)
		ready(qp, row);
	for (int i = 0; i < 2 && row->receive && !active; i++)
		receive(qp, srq, row->receive, key(row->recv_key, target));
	swap(peer, &mine, &theirs, sizeof(mine));
	if (active)
		requester(qp, mw);
	else
		responder(qp, before);
	swap(peer, &mine, &theirs, sizeof(mine));
	if (!row->srq) /* which still holds unsuitable receives */
		again(qp, active);
	swap(peer, &mine, &theirs, sizeof(mine));
	check(!ibv_destroy_qp(qp) && !ibv_dereg_mr(target), "ibv_destroy_qp, ibv_dereg_mr");
	check((!srq || !ibv_destroy_srq(srq)) && (!mw || !ibv_dealloc_mw(mw)), "ibv_destroy_srq, ibv_dealloc_mw");
}

int main(int argc, char **argv)
{
	static char before[SIZE];
	int i;

	check(argc == 3 || argc == 4, "usage: errors DEVICE GID-INDEX [SERVER]");
	gid_index = atoi(argv[2]);
	ctx = open_device(argv[1]);
	check(!ibv_query_gid(ctx, 1, gid_index, &mine.gid), "ibv_query_gid");
	check(!fcntl(ctx->async_fd, F_SETFL, O_NONBLOCK), "O_NONBLOCK");
	pd = ibv_alloc_pd(ctx);
	other_pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	mem = aligned_alloc(4096, SIZE);
	target_mem = aligned_alloc(4096, SIZE);
	check(pd && other_pd && cq && mem && target_mem, "PDs, CQ, memory");
	for (i = 0; i < SIZE; i++) {
		mem[i] = i * 7 + i / 256;
		before[i] = i * 5 + i / 256;
	}
	source = ibv_reg_mr(pd, mem, SIZE, ALL);
	landing = ibv_reg_mr(pd, target_mem, SIZE, ALL);
	foreign = ibv_reg_mr(other_pd, argc == 4 ? mem : target_mem, SIZE, ALL);
	weak = ibv_reg_mr(pd, argc == 4 ? mem : target_mem, SIZE, 0);
	check(source && landing && foreign && weak, "ibv_reg_mr");
	peer = join_peer(argc == 4 ? argv[3] : NULL, PORT);
	for (row = rows; row < rows + sizeof(rows) / sizeof(*rows); row++)
		run(argc == 4, before);
	printf("%zu errors, all as expected\n", row - rows);
	return 0;
}
