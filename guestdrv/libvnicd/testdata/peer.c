/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One end of a connection for the tests: reads commands from standard input, a line each, and answers each by a line,
 * "ok ..." or "err CODE TEXT". Numbers are decimal, immediate data and memory in hexadecimal. With the argument "share"
 * its memory is of its own.
 */
#include <inttypes.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vnicd.h>

#define PATIENCE_MS 60000

static struct vnicd_device *dev;
static struct vnicd_pd *pd;
static struct vnicd_cq *cq;
static struct vnicd_qp *qp;
static struct vnicd_mr *mr;
static struct vnicd_address *address;
static uint32_t remote_qpn, remote_qkey;
static uint8_t *buf;
static size_t bytes;
static bool share;

/* The file's first page is not shared. */
static uint8_t *own_memory(size_t n)
{
	int fd = memfd_create("own", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	uint8_t *p;

	n = (n + 4095) & ~(size_t)4095;
	if (fd < 0 || ftruncate(fd, (off_t)n + 4096))
		exit(3);
	p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 4096);
	if (p == MAP_FAILED)
		exit(3);
	if (vnicd_share(dev, fd, 4096, p, n))
		p = NULL;
	close(fd);
	return p;
}

static int answer(int result)
{
	if (result < 0)
		printf("err %d %s\n", result, vnicd_error());
	else
		printf("ok\n");
	return result;
}

static void open_device(const char *path, const char *ip, size_t n)
{
	struct vnicd_options o = { .memory = 24 << 20, .timeout_ms = PATIENCE_MS };
	uint8_t gid[16];
	int r = vnicd_open(path, &o, &dev);

	bytes = n;
	if (!r)
		r = vnicd_ip_to_gid(ip, gid);
	if (!r)
		r = vnicd_set_gid(dev, 0, gid, 0);
	if (!r)
		r = vnicd_alloc_pd(dev, &pd);
	if (!r)
		r = vnicd_create_cq(dev, 64, 0, &cq);
	if (!r) {
		buf = share ? own_memory(n) : vnicd_alloc(dev, n);
		r = buf ? 0 : -1;
	}
	if (!r)
		r = vnicd_reg_mr(pd, buf, n, VNICD_ACCESS_LOCAL_WRITE | VNICD_ACCESS_REMOTE_WRITE |
					    VNICD_ACCESS_REMOTE_READ | VNICD_ACCESS_REMOTE_ATOMIC, &mr);
	answer(r);
}

static void create_qp(const char *type)
{
	struct vnicd_qp_init init = {
		.type = strcmp(type, "ud") ? VNICD_QPT_RC : VNICD_QPT_UD, .send_cq = cq, .recv_cq = cq,
		.max_send_wr = 4,
		.max_recv_wr = 4, .max_send_sge = 2, .max_recv_sge = 2, .max_inline = 128,
	};
	int r = 0;

	if (address)
		r = vnicd_destroy_address(address);
	address = NULL;
	if (!r && qp)
		r = vnicd_destroy_qp(qp);
	if (!r)
		r = vnicd_create_qp(pd, &init, &qp);
	if (r)
		answer(r);
	else
		printf("ok %u %" PRIu64 " %u\n", vnicd_qp_number(qp), mr->addr, mr->rkey);
}

static int find(const char *ip, struct vnicd_av *av)
{
	uint8_t gid[16];
	int r = vnicd_ip_to_gid(ip, gid);

	return r ? r : vnicd_resolve(dev, gid, 0, PATIENCE_MS, av);
}

static int connect_rc(const char *ip, uint32_t qpn, uint32_t psn, uint32_t peer_psn)
{
	struct vnicd_connect_options o = {
		.psn = psn, .access = VNICD_ACCESS_REMOTE_WRITE | VNICD_ACCESS_REMOTE_READ | VNICD_ACCESS_REMOTE_ATOMIC,
	};
	struct vnicd_peer peer = { .qpn = qpn, .psn = peer_psn };
	int r = find(ip, &peer.av);

	return r ? r : vnicd_connect_qp(qp, &peer, &o);
}

static int address_ud(const char *ip, uint32_t qpn, uint32_t qkey)
{
	struct vnicd_av av;
	int r = find(ip, &av);

	remote_qpn = qpn;
	remote_qkey = qkey;
	return r ? r : vnicd_create_address(pd, &av, &address);
}

static int send_request(const char *args)
{
	struct vnicd_sge sge[2];
	struct vnicd_send_wr wr = { .sg_list = sge, .remote_qpn = remote_qpn, .remote_qkey = remote_qkey,
				    .address = address };
	uint64_t off, len;
	uint32_t imm, key;
	int i;

	if (sscanf(args, "%u %u %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %u %x %" SCNu64 " %" SCNu64 " %u",
		&wr.opcode,
		   &wr.flags, &wr.id, &off, &len, &wr.remote_addr, &wr.rkey, &imm, &wr.compare_add, &wr.swap,
		   &key) != 11)
		exit(3);
	for (i = 0; i < 4; i++)
		wr.imm[i] = (uint8_t)(imm >> (24 - 8 * i));
	key ^= mr->lkey;
	/* In two pieces where possible. */
	wr.num_sge = len >= 2 && wr.opcode != VNICD_WR_ATOMIC_CMP_AND_SWP &&
		     wr.opcode != VNICD_WR_ATOMIC_FETCH_AND_ADD && wr.opcode != VNICD_WR_ATOMIC_WRITE ? 2 : len > 0;
	sge[0] = (struct vnicd_sge){ mr->addr + off, (uint32_t)(wr.num_sge == 2 ? len / 2 : len), key };
	sge[1] = (struct vnicd_sge){ mr->addr + off + len / 2, (uint32_t)(len - len / 2), key };
	return vnicd_post_send(qp, &wr);
}

/* Waits for a completion by poll(2), as programs with an event loop do. */
static void wait_completion(void)
{
	struct pollfd p = { .fd = vnicd_cq_fd(cq), .events = POLLIN };
	struct vnicd_wc wc;
	int r;

	while (!(r = vnicd_poll_cq(cq, 1, &wc))) {
		r = vnicd_arm_cq(cq, 0);
		if (r > 0)
			continue;
		if (!r && poll(&p, 1, PATIENCE_MS) != 1) {
			printf("err 0 no completion\n");
			return;
		}
		if (!r)
			r = vnicd_wait_cq(cq, 0);
		if (r < 0)
			break;
	}
	if (r < 0) {
		answer(r);
		return;
	}
	if (wc.status != VNICD_WC_SUCCESS)
		printf("ok %" PRIu64 " %s\n", wc.id, vnicd_wc_status_text(wc.status));
	else
		printf("ok %" PRIu64 " %s opcode %u bytes %u flags %u imm %02x%02x%02x%02x own %d\n", wc.id,
		       vnicd_wc_status_text(wc.status), wc.opcode, wc.byte_len, wc.flags,
		       wc.flags & VNICD_WC_WITH_IMM ? wc.imm[0] : 0, wc.flags & VNICD_WC_WITH_IMM ? wc.imm[1] : 0,
		       wc.flags & VNICD_WC_WITH_IMM ? wc.imm[2] : 0, wc.flags & VNICD_WC_WITH_IMM ? wc.imm[3] : 0,
		       wc.qpn == vnicd_qp_number(qp));
}

static void describe(void)
{
	const struct vnicd_device_attr *a = vnicd_get_device_attr(dev);
	const struct vnicd_config *c = vnicd_get_config(dev);
	struct vnicd_port_attr p;
	int r = vnicd_query_port(dev, &p);

	if (r)
		answer(r);
	else
		printf("ok %s mtu %u qps %u wrs %u sges %u inline %u cqes %u ahs %u caps %" PRIu64
		       " state %u active %u mac "
		       "%02x%02x%02x%02x%02x%02x\n", (const char *)c->device_name, c->port_mtu, a->max_qp, a->max_qp_wr,
		       a->max_sge, a->max_inline, a->max_cqe, a->max_ah, (uint64_t)a->caps, p.state, p.active_mtu,
		       c->mac[0],
		       c->mac[1], c->mac[2], c->mac[3], c->mac[4], c->mac[5]);
}

static void query(void)
{
	struct vnicd_qp_attr a;
	int r = vnicd_query_qp(qp, &a);

	if (r)
		answer(r);
	else
		printf("ok state %u mtu %u timeout %u retry %u rnr %u timer %u rd %u %u access %u rq %u sq %u\n",
			a.qp_state,
		       a.path_mtu, a.timeout, a.retry_cnt, a.rnr_retry, a.min_rnr_timer, a.max_rd_atomic,
		       a.max_dest_rd_atomic, a.access_flags, a.rq_psn, a.sq_psn);
}

static void event(void)
{
	struct vnicd_event e;
	int r = vnicd_get_event(dev, PATIENCE_MS, &e);

	if (r)
		answer(r);
	else
		printf("ok type %u own %d\n", e.type, e.handle == vnicd_qp_number(qp));
}

/* The digit's value. */
static unsigned int digit(char c)
{
	return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : (exit(3), 0);
}

static void load(const char *hex)
{
	for (size_t i = 0; i < bytes; i++)
		buf[i] = (uint8_t)(digit(hex[2 * i]) << 4 | digit(hex[2 * i + 1]));
	printf("ok\n");
}

static void dump(void)
{
	static const char digits[] = "0123456789abcdef";
	char *text = malloc(2 * bytes + 1);

	if (!text)
		exit(3);
	for (size_t i = 0; i < bytes; i++) {
		text[2 * i] = digits[buf[i] >> 4];
		text[2 * i + 1] = digits[buf[i] & 15];
	}
	text[2 * bytes] = 0;
	printf("ok %s\n", text);
	free(text);
}

int main(int argc, char **argv)
{
	char *line = NULL;
	size_t room = 0;

	share = argc > 1 && !strcmp(argv[1], "share");

	while (getline(&line, &room, stdin) > 0) {
		char path[256], ip[64];
		uint32_t a, b, c;
		uint64_t id, off, len;
		size_t n;

		if (sscanf(line, "open %255s %63s %zu", path, ip, &n) == 3) {
			open_device(path, ip, n);
		} else if (sscanf(line, "qp %63s", ip) == 1) {
			create_qp(ip);
		} else if (sscanf(line, "connect %63s %u %u %u", ip, &a, &b, &c) == 4) {
			answer(connect_rc(ip, a, b, c));
		} else if (sscanf(line, "startud %u", &a) == 1) {
			answer(vnicd_start_ud(qp, a));
		} else if (sscanf(line, "address %63s %u %u", ip, &a, &b) == 3) {
			answer(address_ud(ip, a, b));
		} else if (!strncmp(line, "send ", 5)) {
			answer(send_request(line + 5));
		} else if (sscanf(line, "recv %" SCNu64 " %" SCNu64 " %" SCNu64, &id, &off, &len) == 3) {
			struct vnicd_sge sge = { mr->addr + off, (uint32_t)len, mr->lkey };

			answer(vnicd_post_recv(qp, &(struct vnicd_recv_wr){ .id = id, .sg_list = &sge,
				.num_sge = len > 0 }));
		} else if (!strcmp(line, "wait\n")) {
			wait_completion();
		} else if (!strcmp(line, "describe\n")) {
			describe();
		} else if (!strcmp(line, "query\n")) {
			query();
		} else if (!strcmp(line, "event\n")) {
			event();
		} else if (!strncmp(line, "load ", 5)) {
			load(line + 5);
		} else if (!strcmp(line, "dump\n")) {
			dump();
		} else if (!strcmp(line, "dereg\n")) {
			answer(vnicd_dereg_mr(mr));
		} else if (!strcmp(line, "stopped\n")) {
			/* Waits until the device is unusable, then shows that nothing hangs. */
			struct pollfd p = { .fd = vnicd_event_fd(dev), .events = POLLIN };
			struct vnicd_mr *other;
			struct vnicd_event e;
			struct vnicd_wc wc;
			int r[6];

			if (poll(&p, 1, PATIENCE_MS) != 1)
				exit(3);
			r[0] = vnicd_get_event(dev, -1, &e);
			r[1] = vnicd_wait_cq(cq, -1);
			r[2] = vnicd_poll_cq(cq, 1, &wc);
			r[3] = vnicd_post_send(qp, &(struct vnicd_send_wr){ .opcode = VNICD_WR_SEND });
			r[4] = vnicd_reg_mr(pd, buf, bytes, 0, &other);
			r[5] = vnicd_alloc(dev, 1) ? 0 : vnicd_device_status(dev);
			printf("ok %d %d %d %d %d %d\n", r[0], r[1], r[2], r[3], r[4], r[5]);
		} else if (!strcmp(line, "close\n")) {
			vnicd_close(dev);
			dev = NULL;
			printf("ok\n");
		} else {
			exit(3);
		}
		fflush(stdout);
	}
	free(line);
	vnicd_close(dev);
	return 0;
}
