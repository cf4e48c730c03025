// SPDX-License-Identifier: Apache-2.0
/* The control channel: small messages over TCP. */
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#include "stress.h"

int net_listen(int port)
{
	struct sockaddr_in sa = { .sin_family = AF_INET, .sin_port = htons(port) };
	int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) ||
	    bind(fd, (struct sockaddr *)&sa, sizeof(sa)) || listen(fd, 4))
		fail(EXIT_SETUP, "listening on port %d: %m", port);
	return fd;
}

static int nodelay(int fd)
{
	int one = 1;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	return fd;
}

int net_accept(int listener)
{
	int fd = accept(listener, NULL, NULL);

	if (fd < 0)
		fail(EXIT_SETUP, "accept: %m");
	return nodelay(fd);
}

int net_connect(const char *host, int port)
{
	struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM }, *ai;
	char service[16];
	int fd, err;

	snprintf(service, sizeof(service), "%d", port);
	err = getaddrinfo(host, service, &hints, &ai);
	if (err)
		fail(EXIT_SETUP, "%s: %s", host, gai_strerror(err));
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0 || connect(fd, ai->ai_addr, ai->ai_addrlen))
		fail(EXIT_SETUP, "connecting to %s port %d: %m", host, port);
	freeaddrinfo(ai);
	return nodelay(fd);
}

void net_send(int fd, const void *p, size_t n)
{
	const char *c = p;

	while (n) {
		ssize_t k = send(fd, c, n, MSG_NOSIGNAL);

		if (k <= 0)
			fail(EXIT_PEER, "the peer is gone: %m");
		c += k;
		n -= k;
	}
}

void net_recv(int fd, void *p, size_t n)
{
	char *c = p;

	while (n) {
		ssize_t k = read(fd, c, n);

		if (k <= 0)
			fail(EXIT_PEER, "the peer is gone%s", k ? ": %m" : "");
		c += k;
		n -= k;
	}
}

bool net_readable(int fd, int timeout_ms)
{
	struct pollfd p = { fd, POLLIN, 0 };

	return poll(&p, 1, timeout_ms) > 0;
}

void msg_send(int fd, uint32_t type, uint32_t a, uint64_t b)
{
	struct msg m = { type, a, b };

	net_send(fd, &m, sizeof(m));
}

struct msg msg_recv(int fd)
{
	struct msg m;

	net_recv(fd, &m, sizeof(m));
	return m;
}
