/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared by the small programs of this folder: failing, opening the device, connecting to the peer and connecting queue
 * pairs.
 */
#ifndef COMMON_H
#define COMMON_H

#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <arpa/inet.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static inline void check(int ok, const char *what)
{
	if (ok)
		return;
	fprintf(stderr, "%s: %s (errno %d, %s)\n", program_invocation_short_name, what, errno, strerror(errno));
	exit(1);
}

/* now returns the time in seconds. */
static inline double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static inline struct ibv_context *open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *ctx;

	for (; list && *list && strcmp(ibv_get_device_name(*list), name); list++)
		;
	check(list && *list, "no such device");
	ctx = ibv_open_device(*list);
	check(ctx != NULL, "ibv_open_device");
	return ctx;
}

/* join_peer connects to a server, or without one waits for a client. */
static inline int join_peer(const char *server, int port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };
	int one = 1, s = socket(AF_INET, SOCK_STREAM, 0), i;

	check(s >= 0, "socket");
	if (server) {
		check(inet_pton(AF_INET, server, &a.sin_addr) == 1, "address");
		for (i = 0; connect(s, (struct sockaddr *)&a, sizeof(a)); i++) {
			check(i < 600, "connect");
			usleep(100000);
			close(s);
			s = socket(AF_INET, SOCK_STREAM, 0);
		}
		return s;
	}
	setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	check(!bind(s, (struct sockaddr *)&a, sizeof(a)) && !listen(s, 1), "listen");
	i = accept(s, NULL, NULL);
	check(i >= 0, "accept");
	return i;
}

/* swap exchanges data with the peer, and thus waits until both have reached this point. */
static inline void swap(int s, const void *mine, void *theirs, size_t n)
{
	check(send(s, mine, n, MSG_NOSIGNAL) == (ssize_t)n && recv(s, theirs, n, MSG_WAITALL) == (ssize_t)n,
	      "the other side has exited");
}

/* to_rts connects an RC or UC queue pair, or makes a UD one ready, with the attributes in a that its type supports. */
static inline void to_rts(struct ibv_qp *qp, uint32_t dest, const union ibv_gid *dgid, int gid_index,
			  struct ibv_qp_attr a)
{
	int init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT, rtr = IBV_QP_STATE;
	int rts = IBV_QP_STATE | IBV_QP_SQ_PSN;

	if (qp->qp_type == IBV_QPT_UD) {
		init |= IBV_QP_QKEY;
	} else {
		init |= IBV_QP_ACCESS_FLAGS;
		rtr |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	}
	if (qp->qp_type == IBV_QPT_RC) {
		rtr |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
		rts |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	}
	a.qp_state = IBV_QPS_INIT;
	a.port_num = 1;
	check(!ibv_modify_qp(qp, &a, init), "to INIT");
	a.qp_state = IBV_QPS_RTR;
	a.path_mtu = IBV_MTU_1024;
	a.dest_qp_num = dest;
	a.ah_attr.is_global = 1;
	a.ah_attr.port_num = 1;
	a.ah_attr.grh.dgid = *dgid;
	a.ah_attr.grh.sgid_index = gid_index;
	a.ah_attr.grh.hop_limit = 64;
	check(!ibv_modify_qp(qp, &a, rtr), "to RTR");
	a.qp_state = IBV_QPS_RTS;
	check(!ibv_modify_qp(qp, &a, rts), "to RTS");
}

#endif
