// SPDX-License-Identifier: Apache-2.0
/* Options, connections, threads. */
#define _GNU_SOURCE
#include <getopt.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "stress.h"

struct options opt = {
	.device = "vnic0", .port = 18600, .memory = ON_DEMAND, .local = ON_DEMAND, .region = 64u << 20,
	.chunk = 256u << 10, .pager_ms = PAGER_NONE, .patience = 60, .seconds = 5, .qps = 2, .depth = 8, .seed = 1,
	.rnr_retry = 7,
	.message = 64u << 10,
};

volatile sig_atomic_t enough;

static void on_signal(int sig)
{
	enough = sig;
}

static int usage(void)
{
	char list[512];

	chaos_list(list, sizeof(list));
	fprintf(stderr,
		"usage: odpstress [options] [SERVER]     without SERVER: wait for a client\n"
		"  -d DEVICE  -x GID-INDEX  -p TCP-PORT\n"
		"  -m MEMORY  of the region: pinned, odp or implicit [odp]     -l MEMORY  of local buffers [odp]\n"
		"  -r MIB     size of the region [64]    -c LIST  what its owner does [none]: all, keep, release,\n"
		"             hole, or%s\n"
		"  -P MS      a pager provides the region's pages in MS ms each; never: it does not answer;\n"
		"             elsewhere: it is in another process, outlives this one, and does not answer\n"
		"  -H SECONDS after which an operation counts as hung [60]\n"
		"  -R COUNT   rnr_retry of this side's queue pairs [7]\n"
		"  -L SECONDS for which it watches released memory when the device or the other side is lost [0]\n"
		"client only, applies to both sides:\n"
		"  -w LIST    rdma, atomic, send, ud [rdma]; or access: invalid accesses\n"
		"  -t SECONDS [5], or until SIGINT at both sides   -C  continue until all of the region was written and read   -S SEED [1]\n"
		"  -s BYTES   largest message [65536]    -q QPS [2]    -k concurrent operations per queue pair [8]\n",
		list);
	return EXIT_SETUP;
}

static enum memory memory_kind(const char *s)
{
	const char *names[] = { "pinned", "odp", "implicit" };
	unsigned i;

	for (i = 0; i < 3; i++)
		if (!strcmp(s, names[i]))
			return i;
	fail(EXIT_SETUP, "unknown memory %s: pinned, odp or implicit", s);
}

/* Sent by the client at the start. */
struct plan {
	uint32_t seconds, qps, depth, seed, message;
	uint8_t rdma, atomics, send, ud, cover, access;
};

static bool access_only;

static void words(const char *list)
{
	char *copy = strdup(list), *w, *save = NULL;

	for (w = strtok_r(copy, ",", &save); w; w = strtok_r(NULL, ",", &save)) {
		bool *b = !strcmp(w, "rdma") ? &opt.rdma : !strcmp(w, "atomic") ? &opt.atomics :
			  !strcmp(w, "send") ? &opt.send : !strcmp(w, "ud") ? &opt.ud :
			  !strcmp(w, "access") ? &access_only : NULL;

		if (!b)
			fail(EXIT_SETUP, "unknown work %s", w);
		*b = true;
	}
	free(copy);
	opt.rdma |= opt.atomics;
}

static void parse(int argc, char **argv)
{
	int c;

	while ((c = getopt(argc, argv, "d:x:p:m:l:r:c:P:H:R:L:w:t:CS:s:q:k:h")) != -1)
		switch (c) {
		case 'd': opt.device = optarg; break;
		case 'x': opt.gid_index = atoi(optarg); break;
		case 'p': opt.port = atoi(optarg); break;
		case 'm': opt.memory = memory_kind(optarg); break;
		case 'l': opt.local = memory_kind(optarg); break;
		case 'r': opt.region = (size_t)atoi(optarg) << 20; break;
		case 'c': opt.chaos = chaos_parse(optarg); break;
		case 'P': opt.pager_ms = pager_parse(optarg); break;
		case 'H': opt.patience = atoi(optarg); break;
		case 'R': opt.rnr_retry = atoi(optarg); break;
		case 'L': opt.watch = atoi(optarg); break;
		case 'w': words(optarg); break;
		case 't': opt.seconds = atoi(optarg); break;
		case 'C': opt.cover = true; break;
		case 'S': opt.seed = atoi(optarg); break;
		case 's': opt.message = atoi(optarg); break;
		case 'q': opt.qps = atoi(optarg); break;
		case 'k': opt.depth = atoi(optarg); break;
		default: exit(usage());
		}
	opt.server = argv[optind];
	if (!opt.rdma && !opt.send && !opt.ud)
		opt.rdma = true;
	if (!opt.region || !opt.qps || opt.qps > MAX_QPS || !opt.depth || opt.message < SECTOR ||
	    opt.message > opt.chunk || opt.chunk % opt.message)
		exit(usage());
}

static void agree(int fd)
{
	struct plan p = { opt.seconds, opt.qps, opt.depth, opt.seed, opt.message, opt.rdma, opt.atomics, opt.send,
			  opt.ud, opt.cover, access_only };

	if (opt.server) {
		net_send(fd, &p, sizeof(p));
		return;
	}
	net_recv(fd, &p, sizeof(p));
	if (!p.qps || p.qps > MAX_QPS || !p.depth || p.message < SECTOR || p.message > opt.chunk ||
	    opt.chunk % p.message)
		fail(EXIT_PEER, "the client sent an invalid plan");
	opt.seconds = p.seconds;
	opt.qps = p.qps;
	opt.depth = p.depth;
	opt.seed = p.seed;
	opt.message = p.message;
	opt.rdma = p.rdma;
	opt.atomics = p.atomics;
	opt.send = p.send;
	opt.ud = p.ud;
	opt.cover = p.cover;
	access_only = p.access;
}

static struct remote swap(int fd, struct remote self)
{
	net_send(fd, &self, sizeof(self));
	net_recv(fd, &self, sizeof(self));
	return self;
}

/* Pinned and locked memory of this process, and pinned pages of the system. */
struct pins { uint64_t pin, lock, foll; };

static struct pins pins(void)
{
	return (struct pins){
		meminfo("/proc/self/status", "VmPin"), meminfo("/proc/self/status", "VmLck"),
		meminfo("/proc/vmstat", "nr_foll_pin_acquired") - meminfo("/proc/vmstat", "nr_foll_pin_released"),
	};
}

int main(int argc, char **argv)
{
	pthread_t thread[4];
	struct owner *owner = NULL;
	struct hammer *hammer = NULL;
	struct talk *rc = NULL, *ud = NULL;
	struct target mine, theirs;
	struct pins at_start, most, now;
	struct nic nic = {};
	int sock[5], i, listener = -1, threads = 0;
	bool nothing_pinned;

	parse(argc, argv);
	sigaction(SIGINT, &(struct sigaction){ .sa_handler = on_signal, .sa_flags = SA_RESTART }, NULL);
	nic_open(&nic);
	if (!opt.server)
		listener = net_listen(opt.port);
	/* 0: setup. 1: client's hammer, server's owner. 2: server's hammer, client's owner. 3, 4: SEND, UD. */
	for (i = 0; i < 5; i++)
		sock[i] = opt.server ? net_connect(opt.server, opt.port) : net_accept(listener);
	agree(sock[0]);
	if (access_only)
		return opt.server ? access_client(&nic, sock[0]) : access_server(&nic, sock[0]);

	nothing_pinned = opt.memory != PINNED && opt.local != PINNED;
	at_start = most = pins();
	if (opt.rdma) {
		owner = owner_make(&nic);
		hammer = hammer_make(&nic);
	}
	if (opt.send)
		rc = talk_make(&nic, false);
	if (opt.ud)
		ud = talk_make(&nic, true);
	for (i = 0; opt.rdma && i < (int)opt.qps; i++) {
		uint32_t psn = opt.seed * 1000 + i;
		struct remote h = nic_self(&nic, hammer_qp(hammer, i), psn);
		struct remote o = nic_self(&nic, owner_qp(owner, i), psn);

		/* Each side's owner is connected to the other side's hammer. */
		if (opt.server) {
			o = swap(sock[0], o);
			h = swap(sock[0], h);
		} else {
			h = swap(sock[0], h);
			o = swap(sock[0], o);
		}
		owner_connect(owner, i, &o, psn);
		hammer_connect(hammer, i, &h, psn);
	}
	if (rc) {
		struct remote to = swap(sock[0], nic_self(&nic, talk_qp(rc), 77));

		talk_connect(rc, &to, 77);
		talk_socket(rc, sock[3]);
	}
	if (ud) {
		struct remote to = swap(sock[0], nic_self(&nic, talk_qp(ud), 0));

		talk_connect(ud, &to, 0);
		talk_socket(ud, sock[4]);
	}
	memset(&theirs, 0, sizeof(theirs));
	mine = opt.rdma ? owner_target(owner) : theirs;
	net_send(sock[0], &mine, sizeof(mine));	/* all queue pairs are connected */
	net_recv(sock[0], &theirs, sizeof(theirs));
	if (opt.rdma) {
		owner_socket(owner, sock[opt.server ? 2 : 1]);
		hammer_aim(hammer, &theirs, sock[opt.server ? 1 : 2]);
		pthread_create(&thread[threads++], NULL, owner_run, owner);
		pthread_create(&thread[threads++], NULL, hammer_run, hammer);
	}
	if (rc)
		pthread_create(&thread[threads++], NULL, talk_run, rc);
	if (ud)
		pthread_create(&thread[threads++], NULL, talk_run, ud);

	for (i = 0; i < threads; ) {
		if (!pthread_tryjoin_np(thread[i], NULL)) {
			i++;
			continue;
		}
		nap_us(250000);
		pulse_watch();
		now = pins();
		most.pin = now.pin > most.pin ? now.pin : most.pin;
		most.lock = now.lock > most.lock ? now.lock : most.lock;
		most.foll = now.foll > most.foll ? now.foll : most.foll;
	}
	if (opt.rdma) {
		owner_report(owner);
		hammer_report(hammer);
	}
	if (rc)
		talk_report(rc);
	if (ud)
		talk_report(ud);
	say("result vmpin=+%llu vmlck=+%llu pinned_pages=+%lld", (unsigned long long)(most.pin - at_start.pin),
	    (unsigned long long)(most.lock - at_start.lock), (long long)(most.foll - at_start.foll));
	if (nothing_pinned && (most.pin != at_start.pin || most.lock != at_start.lock))
		fail(EXIT_PINNED, "VmPin or VmLck grew");
	/* Wait until the other side no longer uses this side's memory. */
	net_send(sock[0], "x", 1);
	net_recv(sock[0], &(char){ 0 }, 1);
	say("ok");
	return 0;
}
