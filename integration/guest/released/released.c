// SPDX-License-Identifier: Apache-2.0
/*
 * released DEVICE GID-INDEX: a process writes by RDMA into its own on-demand region, without end, and releases parts
 * of the region meanwhile. Canaries that are allocated right after a release get the pages that it freed, and must not
 * change, whatever happens to the device (TR-5). /tmp/released.ready appears when writes and releases are going on. On
 * SIGUSR1 the program deregisters the region and goes on; after a round of canaries /tmp/released.gone appears. On
 * SIGTERM it ends: with status 2 if a canary has changed, with 0 otherwise, and prints how long the longest release
 * took.
 */
#include "../common.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>

#define REGION	(2u << 20)
#define PART	(128u << 10)	/* of one WRITE and one release */
#define DEPTH	16
#define CANARY	0xc5
#define CANARIES 192		/* 24 MiB */

static struct ibv_cq *cq;
static struct ibv_qp *qp, *peer;
static struct ibv_mr *mr, *source;
static char *region, *canaries[CANARIES];
static atomic_ullong written;
static uint32_t rkey;
static volatile sig_atomic_t stop, deregister;

static void on_signal(int sig)
{
	if (sig == SIGUSR1)
		deregister = 1;
	else
		stop = 1;
}

static char *pages(size_t n, int flags)
{
	char *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);

	check(p != MAP_FAILED, "mmap");
	return p;
}

/* Until the device is lost: completions then have an error status, and posting fails. */
static void *writer(void *arg)
{
	unsigned next = 0, outstanding = 0;
	struct ibv_wc wc;

	for (;;) {
		struct ibv_sge sge = { .addr = (uintptr_t)source->addr, .length = PART, .lkey = source->lkey };
		struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
			.send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { .remote_addr = (uintptr_t)region + next * PART, .rkey = rkey } };

		while (outstanding < DEPTH) {
			if (ibv_post_send(qp, &wr, &bad))
				return arg;
			outstanding++;
			next = (next + 1) % (REGION / PART);
			wr.wr.rdma.remote_addr = (uintptr_t)region + next * PART;
		}
		while (ibv_poll_cq(cq, 1, &wc) == 1) {
			if (wc.status != IBV_WC_SUCCESS)
				return arg;
			outstanding--;
			atomic_fetch_add(&written, 1);
		}
	}
}

static void examine(const char *p)
{
	size_t i;

	for (i = 0; p && i < PART; i++)
		if (p[i] != (char)CANARY) {
			printf("a write landed in memory that was released before: byte %zu of %p is %#x\n", i, p,
			       (unsigned char)p[i]);
			exit(2);
		}
}

static void make_qps(struct ibv_context *ctx, struct ibv_pd *pd, int gid_index)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp_attr attr = { .qp_access_flags = IBV_ACCESS_REMOTE_WRITE, .timeout = 18, .retry_cnt = 7,
		.rnr_retry = 7, .min_rnr_timer = 1 };
	union ibv_gid gid;

	check(!ibv_query_gid(ctx, 1, gid_index, &gid), "ibv_query_gid");
	qp = ibv_create_qp(pd, &init);
	peer = ibv_create_qp(pd, &init);
	check(qp && peer, "ibv_create_qp");
	to_rts(qp, peer->qp_num, &gid, gid_index, attr);
	to_rts(peer, qp->qp_num, &gid, gid_index, attr);
}

int main(int argc, char **argv)
{
	unsigned long long releases = 0, checked = 0, gone = 0;
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	double longest = 0;
	pthread_t thread;
	unsigned i, j = 0;
	bool ready = false, told = false;

	check(argc == 3, "usage: released DEVICE GID-INDEX");
	signal(SIGTERM, on_signal);
	signal(SIGUSR1, on_signal);
	ctx = open_device(argv[1]);
	pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, 2 * DEPTH, NULL, NULL, 0);
	check(pd && cq, "PD, CQ");
	make_qps(ctx, pd, atoi(argv[2]));
	region = pages(REGION, 0);
	source = ibv_reg_mr(pd, memset(pages(PART, 0), 0x11, PART), PART, 0);
	mr = ibv_reg_mr(pd, region, REGION,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ON_DEMAND);
	check(source && mr, "ibv_reg_mr");
	rkey = mr->rkey;
	check(!pthread_create(&thread, NULL, writer, NULL), "pthread_create");

	for (i = 0; !stop; i = (i + 1) % CANARIES) {
		double start = now(), took;

		check(!madvise(region + j * PART, PART, MADV_DONTNEED), "madvise");
		took = now() - start;
		longest = took > longest ? took : longest;
		j = (j + 1) % (REGION / PART);
		if (canaries[i]) {
			examine(canaries[i]);
			check(!munmap(canaries[i], PART), "munmap");
			checked++;
		}
		canaries[i] = memset(pages(PART, MAP_POPULATE), CANARY, PART);
		if (++releases > 200 && written > 200 && !ready) {
			ready = open("/tmp/released.ready", O_CREAT | O_WRONLY, 0644) >= 0;
			check(ready, "/tmp/released.ready");
		}
		if (deregister && mr) {
			if (ibv_dereg_mr(mr))	/* with the device, it was taken away */
				perror("ibv_dereg_mr");
			mr = NULL;
			gone = releases;
		}
		if (!mr && releases > gone + CANARIES && !told) {
			told = open("/tmp/released.gone", O_CREAT | O_WRONLY, 0644) >= 0;
			check(told, "/tmp/released.gone");
		}
	}
	for (i = 0; i < CANARIES; i++)
		examine(canaries[i]);
	printf("longest release %d ms, %llu releases, %llu writes, %llu canaries\n", (int)(longest * 1000), releases,
	       (unsigned long long)written, checked);
	/* The device, and with it the objects, may be gone. */
	fflush(stdout);
	_exit(0);
}
