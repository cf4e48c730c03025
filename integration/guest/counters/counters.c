// SPDX-License-Identifier: Apache-2.0
/*
 * counters [options] DEVICE GID-INDEX [SERVER]: exactly-once, over many RC queue pairs, until SIGINT.
 *
 * The client repeats three operations on each queue pair, four at a time: a fetch-and-add on a counter of this queue
 * pair alone, which must find the number of those before it; a fetch-and-add on a counter that all share, which must
 * find more than the one before it; a SEND with its number. Completions must arrive in order, each once. The server
 * sleeps; its receive requests must complete in order with the number expected. At the end it compares: each counter
 * with the number of completed additions, the messages with those that the client has completed.
 *
 * The client prints the number of completed operations about every second. SIGUSR1 has it print, once each queue pair
 * has completed an operation again, the longest times between two completions since the last such line: median, 90th
 * percentile and maximum over the queue pairs.
 *
 * Exit status 0: all was right; 1: setup; 2: a wrong number, or a completion lost, doubled or out of order; 3: an
 * operation did not complete in time; 4: a completion with an error.
 */
#include "../common.h"

#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>

#define WINDOW	4	/* operations of a queue pair at once */
#define RECVS	8	/* receive requests of a queue pair */
#define LINE	64	/* bytes between counters */
#define KINDS	3
#define LANE(id) ((id) >> 40)
#define SEQ(id)	((id) & 0xffffffffffull)

enum kind { OWN, SHARED, MESSAGE };

static struct lane {
	struct ibv_qp *qp;
	uint64_t posted, done;	/* operations; at the server receive requests */
	uint64_t seen;		/* the shared counter's last value, plus one */
	double last, gap;	/* time of the last completion; longest time between two */
	int fresh;		/* has completed something since the last request for a line */
} *lanes;

/* totals are what the client tells the server at the end. */
struct totals { uint64_t operations; } *totals;

static volatile sig_atomic_t ending, asked;
static int count = 100, additions_only, sleeps;
static double patience = 180;
static struct ibv_cq *cq;
static struct ibv_comp_channel *channel;
static struct ibv_mr *mr;
static uint64_t *mem;	/* server: counters, then messages; client: results and messages */
static struct peer { union ibv_gid gid; uint64_t addr; uint32_t qpn, rkey; } *peers;

static void on_signal(int sig)
{
	if (sig == SIGINT)
		ending = 1;
	else
		asked = 1;
}

__attribute__((noreturn, format(printf, 2, 3))) static void fail(int status, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	putchar('\n');
	exit(status);
}

static enum kind kind_of(uint64_t n) { return additions_only ? n % 2 : n % KINDS; }
static uint64_t number_of(uint64_t n) { return n / (additions_only ? 2 : KINDS); }
/* done_of returns how many of the first n operations are of a kind. */
static uint64_t done_of(uint64_t n, enum kind k) { return number_of(n) + (n % (additions_only ? 2 : KINDS) > k); }

static uint64_t *slot(int lane, uint64_t n, int slots, int base)
{
	return mem + base + (size_t)lane * slots + n % slots;
}

static int messages_at(void) { return (count + 1) * LINE / 8; }

static void post(int i)
{
	struct lane *l = &lanes[i];
	uint64_t n = l->posted++, *buf = slot(i, n, WINDOW, 0);
	struct ibv_sge sge = { .addr = (uintptr_t)buf, .length = 8, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .wr_id = (uint64_t)i << 40 | n, .sg_list = &sge, .num_sge = 1,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	enum kind k = kind_of(n);

	if (k == MESSAGE) {
		wr.opcode = IBV_WR_SEND;
		*buf = number_of(n);
	} else {
		wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
		wr.wr.atomic.compare_add = 1;
		wr.wr.atomic.rkey = peers[i].rkey;
		wr.wr.atomic.remote_addr = peers[i].addr + (k == OWN ? i : count) * LINE;
		*buf = ~0ull;
	}
	check(!ibv_post_send(l->qp, &wr, &bad), "ibv_post_send");
}

static void receive(int i)
{
	uint64_t n = lanes[i].posted++, *buf = slot(i, n, RECVS, messages_at());
	struct ibv_sge sge = { .addr = (uintptr_t)buf, .length = 8, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = (uint64_t)i << 40 | n, .sg_list = &sge, .num_sge = 1 }, *bad;

	*buf = ~0ull;
	check(!ibv_post_recv(lanes[i].qp, &wr, &bad), "ibv_post_recv");
}

/* Judges one completion, which must be the next of its queue pair. */
static void complete(const struct ibv_wc *wc, int server, double t)
{
	int i = LANE(wc->wr_id);
	uint64_t n = SEQ(wc->wr_id), v;
	struct lane *l = &lanes[i];
	enum kind k = server ? MESSAGE : kind_of(n);

	if (i >= count || n != l->done || l->done >= l->posted)
		fail(2, "queue pair %d: completion of request %llu, want %llu of %llu", i, (unsigned long long)n,
		     (unsigned long long)l->done, (unsigned long long)l->posted);
	if (wc->status)
		fail(4, "queue pair %d: request %llu: %s %.3f s after the completion before it", i,
		     (unsigned long long)n, ibv_wc_status_str(wc->status), t - l->last);
	v = *slot(i, n, server ? RECVS : WINDOW, server ? messages_at() : 0);
	if ((server && (v != n || wc->byte_len != 8)) || (k == OWN && v != number_of(n)))
		fail(2, "queue pair %d: %s %llu, want %llu", i, server ? "message" : "its counter was",
		     (unsigned long long)v, (unsigned long long)(server ? n : number_of(n)));
	if (k == SHARED && v < l->seen)
		fail(2, "queue pair %d: the shared counter was %llu, and %llu before", i, (unsigned long long)v,
		     (unsigned long long)l->seen - 1);
	if (k == SHARED)
		l->seen = v + 1;
	if (t - l->last > l->gap)
		l->gap = t - l->last;
	l->last = t;
	l->fresh = 1;
	l->done++;
}

/* Polls once. Returns the number of completions. */
static int poll_once(int server)
{
	struct ibv_wc wc[32];
	int n = ibv_poll_cq(cq, 32, wc), j;
	double t = now();

	check(n >= 0, "ibv_poll_cq");
	for (j = 0; j < n; j++) {
		complete(&wc[j], server, t);
		if (server)
			receive(LANE(wc[j].wr_id));
		else if (!ending)
			post(LANE(wc[j].wr_id));
	}
	return n;
}

/*
 * Sleeps until there is a completion, the other end has something to say, or a signal comes. A completion that brings
 * no event is found after ten seconds.
 */
static void snooze(int sock, int server)
{
	struct pollfd p[2] = { { channel->fd, POLLIN, 0 }, { sock, POLLIN, 0 } };
	struct ibv_cq *c;
	void *arg;
	int n = poll(p, 2, 10000);

	if (n > 0 && p[0].revents) {
		check(!ibv_get_cq_event(channel, &c, &arg), "ibv_get_cq_event");
		ibv_ack_cq_events(c, 1);
		check(!ibv_req_notify_cq(cq, 0), "ibv_req_notify_cq");
	} else if (!n && poll_once(server) && !poll(p, 1, 1000)) {
		fail(2, "a completion without an event");
	}
}

static int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* Prints the line that SIGUSR1 asks for, once all queue pairs have completed something since. */
static void report(int *open)
{
	double gaps[count];
	int i;

	if (asked) {
		asked = 0;
		*open = 1;
		for (i = 0; i < count; i++)
			lanes[i].fresh = 0;
	}
	for (i = 0; *open && i < count; i++)
		if (!lanes[i].fresh)
			return;
	if (!*open)
		return;
	for (i = 0; i < count; i++) {
		gaps[i] = lanes[i].gap;
		lanes[i].gap = 0;
	}
	qsort(gaps, count, sizeof(*gaps), by_size);
	printf("silence %.0f %.0f %.0f\n", 1e3 * gaps[count / 2], 1e3 * gaps[count * 9 / 10], 1e3 * gaps[count - 1]);
	*open = 0;
}

/* Fails if an operation takes too long, and prints the number of those completed. */
static void check_progress(double t)
{
	uint64_t done = 0;
	int i;

	for (i = 0; i < count; done += lanes[i++].done)
		if (lanes[i].done < lanes[i].posted && t - lanes[i].last > patience)
			fail(3, "queue pair %d: request %llu has not completed for %.0f s", i,
			     (unsigned long long)lanes[i].done, patience);
	printf("done %llu\n", (unsigned long long)done);
}

static void client(int sock)
{
	int i, n, open = 0, busy = 1;
	double t = now(), looked = t;
	char answer;

	for (i = 0; i < count; i++) {
		lanes[i].last = t;
		for (n = 0; n < WINDOW; n++)
			post(i);
	}
	while (busy) {
		if (!poll_once(0) && sleeps)
			snooze(sock, 0);
		report(&open);
		t = now();
		if (t - looked > 1) {
			check_progress(t);
			looked = t;
		}
		for (i = 0, busy = !ending; !busy && i < count; i++)
			busy = lanes[i].done < lanes[i].posted;
	}
	for (i = 0; i < count; i++)
		totals[i].operations = lanes[i].done;
	n = count * sizeof(*totals);
	check(send(sock, totals, n, MSG_NOSIGNAL) == n, "telling the server the totals");
	check(recv(sock, &answer, 1, MSG_WAITALL) == 1, "the server's verdict");
	usleep(100000);
	if (poll_once(0))
		fail(2, "a completion after all were there");
}

static int compare(void)
{
	uint64_t shared = 0, messages = 0, own;
	int i, complete = 1;

	for (i = 0; i < count; i++) {
		shared += done_of(totals[i].operations, SHARED);
		own = done_of(totals[i].operations, OWN);
		if (mem[i * LINE / 8] != own)
			fail(2, "queue pair %d: its counter is %llu, %llu additions have completed", i,
			     (unsigned long long)mem[i * LINE / 8], (unsigned long long)own);
		if (additions_only)
			continue;
		own = done_of(totals[i].operations, MESSAGE);
		if (lanes[i].done > own)
			fail(2, "queue pair %d: %llu messages, %llu were sent", i, (unsigned long long)lanes[i].done,
			     (unsigned long long)own);
		complete &= lanes[i].done == own;
		messages += own;
	}
	if (mem[count * LINE / 8] != shared)
		fail(2, "the shared counter is %llu, %llu additions have completed",
		     (unsigned long long)mem[count * LINE / 8], (unsigned long long)shared);
	if (complete)
		printf("result additions=%llu messages=%llu\n", (unsigned long long)shared * 2,
		       (unsigned long long)messages);
	return complete;
}

static void server(int sock)
{
	int n = count * sizeof(*totals), got = 0, i;
	double end;

	for (i = 0; i < count; i++)
		lanes[i].last = now();
	while (got < n) {
		if (!poll_once(1))
			snooze(sock, 1);
		i = recv(sock, (char *)totals + got, n - got, MSG_DONTWAIT);
		if (!i)
			fail(1, "the client has gone");
		if (i > 0)
			got += i;
	}
	for (end = now() + 60; !compare(); )
		if (!poll_once(1) && now() > end)
			fail(2, "messages are lost");
	check(send(sock, "x", 1, MSG_NOSIGNAL) == 1, "the verdict");
	usleep(100000);
	if (poll_once(1))
		fail(2, "a message after all were there");
}

int main(int argc, char **argv)
{
	int c, i, sock, port = 18610, timeout = 14, retry = 7, rnr = 7;
	struct sigaction on = { .sa_handler = on_signal };
	struct ibv_context *ctx;
	const char *to;
	size_t size;
	struct ibv_pd *pd;
	struct peer mine = {};

	while ((c = getopt(argc, argv, "q:p:t:r:R:aeH:")) != -1)
		switch (c) {
		case 'q': count = atoi(optarg); break;
		case 'p': port = atoi(optarg); break;
		case 't': timeout = atoi(optarg); break;
		case 'r': retry = atoi(optarg); break;
		case 'R': rnr = atoi(optarg); break;
		case 'a': additions_only = 1; break;
		case 'e': sleeps = 1; break;
		case 'H': patience = atoi(optarg); break;
		default: optind = argc;
		}
	errno = 0;
	check(argc - optind >= 2 && count > 0 && count <= 1024,
	      "usage: counters [-q QPS] [-p TCP-PORT] [-t TIMEOUT] [-r RETRY_CNT] [-R RNR_RETRY] [-a: no messages] "
	      "[-e: the client sleeps, too] [-H SECONDS: patience] DEVICE GID-INDEX [SERVER]");
	to = argv[optind + 2];
	setvbuf(stdout, NULL, _IOLBF, 0);
	sigaction(SIGINT, &on, NULL);
	sigaction(SIGUSR1, &on, NULL);
	ctx = open_device(argv[optind]);
	check(!ibv_query_gid(ctx, 1, atoi(argv[optind + 1]), &mine.gid), "ibv_query_gid");
	check((pd = ibv_alloc_pd(ctx)) != NULL, "ibv_alloc_pd");
	check((channel = ibv_create_comp_channel(ctx)) != NULL, "ibv_create_comp_channel");
	check((cq = ibv_create_cq(ctx, count * (WINDOW + RECVS), NULL, channel, 0)) != NULL, "ibv_create_cq");
	check(!ibv_req_notify_cq(cq, 0), "ibv_req_notify_cq");
	size = messages_at() * 8 + (size_t)count * RECVS * 8;
	size = (size + 4095) & ~4095ul;
	check((mem = aligned_alloc(4096, size)) != NULL, "memory");
	memset(mem, 0, size);
	mr = ibv_reg_mr(pd, mem, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
	check(mr != NULL, "ibv_reg_mr");
	lanes = calloc(count, sizeof(*lanes));
	peers = calloc(count, sizeof(*peers));
	totals = calloc(count, sizeof(*totals));
	check(lanes && peers && totals, "memory");
	sock = join_peer(to, port);
	for (i = 0; i < count; i++) {
		struct ibv_qp_init_attr init = {
			.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = WINDOW, .max_recv_wr = RECVS, .max_send_sge = 1, .max_recv_sge = 1 },
		};

		check((lanes[i].qp = ibv_create_qp(pd, &init)) != NULL, "ibv_create_qp");
		mine.qpn = lanes[i].qp->qp_num;
		mine.addr = (uintptr_t)mem;
		mine.rkey = mr->rkey;
		swap(sock, &mine, &peers[i], sizeof(mine));
		to_rts(lanes[i].qp, peers[i].qpn, &peers[i].gid, atoi(argv[optind + 1]), (struct ibv_qp_attr){
			.qp_access_flags = IBV_ACCESS_REMOTE_ATOMIC, .timeout = timeout, .retry_cnt = retry,
			.rnr_retry = rnr, .min_rnr_timer = 12, .max_rd_atomic = 1, .max_dest_rd_atomic = 1 });
		for (c = 0; !to && !additions_only && c < RECVS; c++)
			receive(i);
	}
	swap(sock, &(char){ 0 }, &(char){ 0 }, 1);	/* all queue pairs are connected */
	if (to)
		client(sock);
	else
		server(sock);
	return 0;
}
