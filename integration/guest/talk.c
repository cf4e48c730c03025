// SPDX-License-Identifier: Apache-2.0
/*
 * SENDs in both directions at once, out of and into memory that is absent again and again. RC: all of them arrive, in
 * order. UD: some may be lost while pages are brought in.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "stress.h"

#define SLOTS	16
#define GRH	40

struct talk {
	struct nic *nic;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_ah *ah;
	struct remote to;
	struct ibv_mr *out_mr, *in_mr;
	char *out, *in;
	size_t slot;
	uint64_t out_seed, in_seed, random;
	bool ud, used[SLOTS];
	int fd;
	uint32_t sent, done, received;
	unsigned long long bytes;
	struct pulse pulse;
};

struct talk *talk_make(struct nic *n, bool ud)
{
	struct talk *t = calloc(1, sizeof(*t));

	t->nic = n;
	t->ud = ud;
	t->slot = ((opt.message + GRH + 64 + PAGE - 1) / PAGE) * PAGE;
	t->out = map_pages(SLOTS * t->slot);
	t->in = map_pages(SLOTS * t->slot);
	t->out_mr = nic_register(n, opt.local, t->out, SLOTS * t->slot, 0);
	t->in_mr = nic_register(n, opt.memory, t->in, SLOTS * t->slot, IBV_ACCESS_LOCAL_WRITE);
	t->cq = ibv_create_cq(n->ctx, 2 * SLOTS + 1, NULL, NULL, 0);
	if (!t->cq)
		fail(EXIT_SETUP, "creating a completion queue: %m");
	t->qp = nic_qp(n, ud ? IBV_QPT_UD : IBV_QPT_RC, t->cq, SLOTS);
	t->out_seed = opt.seed * 4 + 1000 + !!opt.server + 2 * ud;
	t->in_seed = opt.seed * 4 + 1000 + !opt.server + 2 * ud;
	t->random = t->out_seed;
	pulse_add(&t->pulse);
	return t;
}

struct ibv_qp *talk_qp(struct talk *t) { return t->qp; }
void talk_socket(struct talk *t, int fd) { t->fd = fd; }

static char *in_slot(struct talk *t, unsigned i) { return t->in + i * t->slot + (i & 1 ? 8 * i : 0); }

static void post_recv(struct talk *t, unsigned i)
{
	struct ibv_sge sge = { (uint64_t)in_slot(t, i), opt.message + (t->ud ? GRH : 0), t->in_mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = SLOTS + i, .sg_list = &sge, .num_sge = 1 }, *bad;
	int err = ibv_post_recv(t->qp, &wr, &bad);

	if (err)
		fail(EXIT_VERBS, "ibv_post_recv: %s", strerror(err));
}

void talk_connect(struct talk *t, const struct remote *to, uint32_t psn)
{
	t->to = *to;
	qp_connect(t->nic, t->qp, to, psn);
	if (t->ud)
		t->ah = nic_ah(t->nic, to);
	for (unsigned i = 0; i < SLOTS; i++)
		post_recv(t, i);
}

static void post_send(struct talk *t, unsigned i)
{
	uint32_t mtu = t->to.mtu < t->nic->port.active_mtu ? t->to.mtu : t->nic->port.active_mtu;
	uint32_t most = (t->ud ? 128u << mtu : opt.message) / SECTOR;
	uint32_t sectors = 1 + below(&t->random, most), s;
	char *p = t->out + i * t->slot + below(&t->random, 64);
	struct ibv_sge sge = { (uint64_t)p, sectors * SECTOR, t->out_mr->lkey };
	struct ibv_send_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM,
				  .imm_data = htonl(t->sent) }, *bad;
	int err;

	if (t->ud) {
		wr.wr.ud.ah = t->ah;
		wr.wr.ud.remote_qpn = t->to.qpn;
		wr.wr.ud.remote_qkey = 0x1ee7;
	}
	for (s = 0; s < sectors; s++)
		pattern_fill(p + s * SECTOR, t->out_seed, t->sent, s + 1);
	if (opt.local != PINNED && !below(&t->random, 4))
		madvise(t->out + i * t->slot, t->slot, MADV_PAGEOUT);	/* the gather finds absent pages */
	err = ibv_post_send(t->qp, &wr, &bad);
	if (err)
		fail(EXIT_VERBS, "ibv_post_send: %s", strerror(err));
	t->used[i] = true;
	t->sent++;
}

static void received(struct talk *t, const struct ibv_wc *wc)
{
	unsigned i = wc->wr_id - SLOTS;
	const char *p = in_slot(t, i) + (t->ud ? GRH : 0);
	uint32_t len = wc->byte_len - (t->ud ? GRH : 0), seq = ntohl(wc->imm_data), s;

	if (!t->ud && seq != t->received)
		fail(EXIT_DATA, "message %u arrived instead of %u", seq, t->received);
	if (!len || len % SECTOR || len > opt.message)
		fail(EXIT_DATA, "message %u has %u bytes", seq, len);
	for (s = 0; s < len / SECTOR; s++)
		if (!pattern_is(p + s * SECTOR, t->in_seed, seq, s + 1))
			pattern_blame(t->ud ? "UD message" : "message", p + s * SECTOR, t->in_seed, seq, s + 1);
	t->received++;
	t->bytes += len;
	/* The next buffer is absent: never touched, or swapped out. */
	if (opt.memory != PINNED && below(&t->random, 2))
		madvise(t->in + i * t->slot, t->slot, below(&t->random, 2) ? MADV_DONTNEED : MADV_PAGEOUT);
	post_recv(t, i);
}

static bool progress(struct talk *t)
{
	struct ibv_wc wc;
	bool some = false;
	int n;

	while ((n = ibv_poll_cq(t->cq, 1, &wc)) > 0) {
		some = true;
		if (wc.status != IBV_WC_SUCCESS)
			fail(EXIT_VERBS, "%s %s: %s (vendor %#x)", t->ud ? "UD" : "RC",
			     wc.wr_id < SLOTS ? "SEND" : "receive", ibv_wc_status_str(wc.status), wc.vendor_err);
		if (wc.wr_id < SLOTS) {
			t->used[wc.wr_id] = false;
			t->done++;
		} else {
			received(t, &wc);
		}
	}
	if (n < 0)
		fail(EXIT_VERBS, "ibv_poll_cq: %m");
	if (some)
		pulse_begin(&t->pulse, t->ud ? "UD traffic" : "SEND traffic");
	return some;
}

void *talk_run(void *arg)
{
	struct talk *t = arg;
	uint64_t end = now_ms() + opt.seconds * 1000ull;
	uint32_t expect;
	unsigned i;

	pulse_begin(&t->pulse, t->ud ? "UD traffic" : "SEND traffic");
	while (now_ms() < end && !enough) {
		for (i = 0; i < SLOTS; i++)
			if (!t->used[i] && (!t->ud || !below(&t->random, 4)))
				post_send(t, i);
		if (!progress(t) || t->ud)
			nap_us(500);
	}
	while (t->done < t->sent)
		if (!progress(t))
			nap_us(500);
	net_send(t->fd, &t->sent, sizeof(t->sent));
	while (!net_readable(t->fd, 0))
		if (!progress(t))
			nap_us(500);
	net_recv(t->fd, &expect, sizeof(expect));
	if (t->ud) {
		for (i = 0; i < 100; i++) {
			progress(t);
			nap_us(1000);
		}
		/* A fault loses the datagrams that arrive meanwhile, but the page is brought in (PF-11). */
		if (t->received > expect || t->received < expect / 100 + 1)
			fail(EXIT_DATA, "%u of %u datagrams arrived", t->received, expect);
	} else {
		while (t->received < expect)
			if (!progress(t))
				nap_us(500);
	}
	pulse_end(&t->pulse);
	/* Neither side exits before both have received everything. */
	net_send(t->fd, &expect, sizeof(expect));
	net_recv(t->fd, &expect, sizeof(expect));
	return NULL;
}

void talk_report(struct talk *t)
{
	say("result %s sent=%u received=%u bytes=%llu", t->ud ? "ud" : "rc", t->sent, t->received, t->bytes);
}
