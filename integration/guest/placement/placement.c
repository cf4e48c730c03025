// SPDX-License-Identifier: Apache-2.0
/*
 * placement DEVICE GID-INDEX yes|no [SERVER]: many concurrent WRITEs, FLUSHes (or not) and ATOMIC WRITEs through the
 * guest's own libibverbs. Each round writes a record, flushes it, and puts the round's number into a word with one
 * 8-byte write. When the peer's processor sees the word, the record must hold the data of that round or a later one.
 */
#include "../common.h"

#define PORT   18517
#define ROUNDS 2000
#define AHEAD  8	/* rounds in flight */
#define RECORD 2048	/* two packets */
#define SLOTS  16
#define DEPTH  4	/* max_rd_atomic: fewer than are in flight */

struct side {
	uint32_t qpn, rkey;
	uint64_t addr;
	union ibv_gid gid;
	uint32_t flush;
};

static struct ibv_cq *cq;
static struct side mine, theirs;

static void active(struct ibv_qp *qp, struct ibv_mr *mr, char *mem)
{
	struct ibv_qp_ex *x = ibv_qp_to_qp_ex(qp);
	uint64_t posted = 0, done = 0, k;
	double end = now() + 240;
	struct ibv_wc wc;
	int n;

	while (done < ROUNDS) {
		for (; posted < ROUNDS && posted - done < AHEAD; posted++) {
			uint64_t round = posted + 1, slot = round % SLOTS;
			uint64_t *record = (uint64_t *)(mem + slot * RECORD), to = theirs.addr + 64 + slot * RECORD;

			for (k = 0; k < RECORD / 8; k++)
				record[k] = round << 16 | k;
			ibv_wr_start(x);
			x->wr_id = round;
			x->wr_flags = 0;
			ibv_wr_rdma_write(x, theirs.rkey, to);
			ibv_wr_set_sge(x, mr->lkey, (uintptr_t)record, RECORD);
#ifdef HAVE_FLUSH
			if (theirs.flush)
				ibv_wr_flush(x, theirs.rkey, to, RECORD, IBV_FLUSH_GLOBAL,
					     round & 1 ? IBV_FLUSH_RANGE : IBV_FLUSH_MR);
#endif
			x->wr_flags = IBV_SEND_SIGNALED;
			ibv_wr_atomic_write(x, theirs.rkey, theirs.addr, &round);
			check(!ibv_wr_complete(x), "ibv_wr_complete");
		}
		n = ibv_poll_cq(cq, 1, &wc);
		check(n >= 0 && now() < end, "no completion arrived");
		if (n && (wc.status != IBV_WC_SUCCESS || wc.wr_id != done + 1)) {
			fprintf(stderr, "placement: round %llu of %llu: %s\n", (unsigned long long)wc.wr_id,
				(unsigned long long)done + 1, ibv_wc_status_str(wc.status));
			exit(1);
		}
		done += n;
	}
}

static void passive(char *mem)
{
	volatile uint64_t *word = (void *)mem;
	uint64_t seen = 0, k;
	double end = now() + 240;

	while (seen < ROUNDS) {
		uint64_t v = *word;
		volatile uint64_t *record = (void *)(mem + 64 + v % SLOTS * RECORD);

		check(now() < end, "the word does not arrive");
		check(v >= seen && v <= ROUNDS, "the word decreased");
		for (k = 0; v != seen && k < RECORD / 8; k++) {
			uint64_t r = record[k];

			if ((r >> 16 < v || (r & 0xffff) != k) &&
			    *word + AHEAD < v + SLOTS) { /* otherwise it is being overwritten */
				fprintf(stderr, "placement: round %llu: word %llu is %#llx\n", (unsigned long long)v,
					(unsigned long long)k, (unsigned long long)r);
				exit(1);
			}
		}
		seen = v;
	}
}

int main(int argc, char **argv)
{
	unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_RC, .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.cap = { .max_send_wr = 4 * AHEAD, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_ATOMIC_WRITE,
	};
	struct ibv_device_attr_ex attr;
	struct ibv_context *ctx;
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	char *mem;
	int s;

	check(argc == 4 || argc == 5, "usage: placement DEVICE GID-INDEX yes|no [SERVER]");
	ctx = open_device(argv[1]);
	check(!ibv_query_device_ex(ctx, NULL, &attr), "ibv_query_device_ex");
#ifdef HAVE_FLUSH
	if (!strcmp(argv[3], "yes") && attr.device_cap_flags_ex & 1ull << 38) { /* IB_UVERBS_DEVICE_FLUSH_GLOBAL */
		mine.flush = 1;
		access |= IBV_ACCESS_FLUSH_GLOBAL;
		init.send_ops_flags |= IBV_QP_EX_WITH_FLUSH;
	}
#endif
	init.pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, 4 * AHEAD, NULL, NULL, 0);
	check(init.pd && cq, "PD, CQ");
	init.send_cq = init.recv_cq = cq;
	check((mem = aligned_alloc(4096, 64 + SLOTS * RECORD + 4032)) != NULL, "memory");
	memset(mem, 0, 64 + SLOTS * RECORD);
	check((mr = ibv_reg_mr(init.pd, mem, 64 + SLOTS * RECORD, access)) != NULL, "ibv_reg_mr");
	check((qp = ibv_create_qp_ex(ctx, &init)) != NULL, "ibv_create_qp_ex");
	check(!ibv_query_gid(ctx, 1, atoi(argv[2]), &mine.gid), "ibv_query_gid");
	mine.qpn = qp->qp_num;
	mine.rkey = mr->rkey;
	mine.addr = (uintptr_t)mem;
	s = join_peer(argc == 5 ? argv[4] : NULL, PORT);
	swap(s, &mine, &theirs, sizeof(mine));
	to_rts(qp, theirs.qpn, &theirs.gid, atoi(argv[2]), (struct ibv_qp_attr){
		.qp_access_flags = access & ~IBV_ACCESS_LOCAL_WRITE, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7,
		.min_rnr_timer = 12, .max_rd_atomic = DEPTH, .max_dest_rd_atomic = DEPTH });
	swap(s, &mine, &theirs, sizeof(mine));
	if (argc == 5)
		active(qp, mr, mem);
	else
		passive(mem);
	swap(s, &mine, &theirs, sizeof(mine));
	printf("%d rounds, %s\n", ROUNDS, theirs.flush ? "with FLUSH" : "without FLUSH");
	return 0;
}
