/* SPDX-License-Identifier: Apache-2.0 */
/* What the examples share: errors that end the program, a TCP connection, and waiting for a completion. */
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <vnicd.h>

#define TIMEOUT_MS 30000

static inline void check(int result, const char *what)
{
	if (result < 0) {
		fprintf(stderr, "%s: %s: %s (%d)\n", program_invocation_short_name, what, vnicd_error(), result);
		exit(1);
	}
}

static inline void check_errno(int failed, const char *what)
{
	if (failed) {
		fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, strerror(errno));
		exit(1);
	}
}

/* Connects to host, an IPv4 address; without one, prints the port that it listens on, and accepts one connection. */
static inline int tcp_connect(const char *port, const char *host)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)) };
	int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), c, on = 1;
	socklen_t n = sizeof(a);

	check_errno(s < 0, "socket");
	if (host) {
		check_errno(inet_pton(AF_INET, host, &a.sin_addr) != 1, "the peer's address");
		check_errno(connect(s, (struct sockaddr *)&a, sizeof(a)), "connect");
		return s;
	}
	check_errno(setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)), "setsockopt");
	check_errno(bind(s, (struct sockaddr *)&a, sizeof(a)) || listen(s, 1), "listen");
	check_errno(getsockname(s, (struct sockaddr *)&a, &n), "getsockname");
	printf("port %u\n", ntohs(a.sin_port));
	fflush(stdout);
	c = accept(s, NULL, NULL);
	check_errno(c < 0, "accept");
	close(s);
	return c;
}

static inline void send_all(int tcp, const void *p, size_t n)
{
	check_errno(send(tcp, p, n, MSG_NOSIGNAL) != (ssize_t)n, "send");
}

static inline void receive_all(int tcp, void *p, size_t n)
{
	errno = ECONNRESET; /* for the end of the stream */
	check_errno(recv(tcp, p, n, MSG_WAITALL) != (ssize_t)n, "receive");
}

/* Waits for one completion: polls, arms if there is none, polls again, then sleeps. */
static inline void complete(struct vnicd_cq *cq, const char *what)
{
	struct vnicd_wc wc;
	int n;

	while (!(n = vnicd_poll_cq(cq, 1, &wc))) {
		n = vnicd_arm_cq(cq, 0);
		check(n, what);
		if (!n)
			check(vnicd_wait_cq(cq, TIMEOUT_MS), what);
	}
	check(n, what);
	if (wc.status != VNICD_WC_SUCCESS) {
		fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, vnicd_wc_status_text(wc.status));
		exit(1);
	}
}

#endif
