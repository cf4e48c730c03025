/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other end of perftest's ib_write_bw and ib_read_bw (version 5.70 or newer) with one queue pair.
 *
 *   rdma_bw /run/vnicd/a.hca 10.0.0.5 18515 8388608                serves a client with messages up to that long
 *   rdma_bw /run/vnicd/a.hca 10.0.0.5 18515 65536 write 1000 HOST  WRITEs 1000 such messages to ib_write_bw on HOST
 *   rdma_bw /run/vnicd/a.hca 10.0.0.5 18515 65536 read 1000 HOST   READs them from ib_read_bw
 *
 * Both ends describe themselves over TCP: the client always writes first and reads then, the server answers. They
 * exchange, in this order: version, cycle size, cache line, MTU; the keys of the queue pair, three times (before the
 * connection, after it, and when both can receive); after the transfer the keys, the client's report, and the keys.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <time.h>

#include "example.h"

#define VERSION_SIZE 16
#define KEYS_SIZE 108
#define CYCLE 4096U /* messages that are shorter go to changing places within so many bytes */
#define DEPTH 64
#define SERVERS 0xa5 /* what memory has at first */
#define CLIENTS 0x5a

/* An end as the other one needs it. */
struct keys {
	unsigned int reads, qpn, psn, rkey;
	uint64_t addr;
	uint8_t gid[16];
};

struct side {
	int tcp;
	bool client;
};

/* Sends n bytes and receives n. */
static void exchange(const struct side *s, const void *mine, void *theirs, size_t n)
{
	if (s->client)
		send_all(s->tcp, mine, n);
	receive_all(s->tcp, theirs, n);
	if (!s->client)
		send_all(s->tcp, mine, n);
}

static uint64_t exchange_u64(const struct side *s, uint64_t mine)
{
	uint64_t theirs;

	mine = __builtin_bswap64(mine);
	exchange(s, &mine, &theirs, sizeof(mine));
	return __builtin_bswap64(theirs);
}

static uint32_t exchange_u32(const struct side *s, uint32_t mine)
{
	uint32_t theirs;

	mine = htonl(mine);
	exchange(s, &mine, &theirs, sizeof(mine));
	return ntohl(theirs);
}

static double exchange_double(const struct side *s, double mine)
{
	uint64_t bits;
	double theirs;

	memcpy(&bits, &mine, sizeof(bits));
	bits = exchange_u64(s, bits);
	memcpy(&theirs, &bits, sizeof(theirs));
	return theirs;
}

/* Exchanges what there is before the queue pairs; returns the path MTU, VNICD_MTU_*. */
static uint8_t greet(const struct side *s)
{
	char version[VERSION_SIZE] = "6.00", theirs[VERSION_SIZE];
	char mtu[2] = "3"; /* VNICD_MTU_1024, which every link has */
	int smallest;

	exchange(s, version, theirs, sizeof(version));
	theirs[VERSION_SIZE - 1] = 0;
	if (atof(theirs) < 5.7) {
		fprintf(stderr, "rdma_bw: the peer has perftest's version \"%s\", expected 5.70 or newer\n", theirs);
		exit(1);
	}
	if (exchange_u32(s, CYCLE) > CYCLE) {
		fprintf(stderr, "rdma_bw: the peer cycles through more than %u bytes\n", CYCLE);
		exit(1);
	}
	exchange_u32(s, 64); /* cache line */
	exchange(s, mtu, theirs, sizeof(mtu));
	smallest = theirs[0] - '0';
	if (smallest < (int)VNICD_MTU_256 || smallest > (int)VNICD_MTU_4096) {
		fprintf(stderr, "rdma_bw: the peer's MTU has the number %d, expected 1 to 5\n", smallest);
		exit(1);
	}
	return (uint8_t)(smallest < (int)VNICD_MTU_1024 ? smallest : (int)VNICD_MTU_1024);
}

static void exchange_keys(const struct side *s, const struct keys *mine, struct keys *theirs)
{
	char out[KEYS_SIZE], in[KEYS_SIZE + 1] = { 0 };
	unsigned int lid, byte;
	int n, used;

	n = snprintf(out, sizeof(out), "%04x:%04x:%06x:%06x:%08x:%016" PRIx64 ":", 0, mine->reads, mine->qpn, mine->psn,
		     mine->rkey, mine->addr);
	for (int i = 0; i < 16; i++)
		n += snprintf(out + n, sizeof(out) - (size_t)n, "%02x:", mine->gid[i]);
	snprintf(out + n, sizeof(out) - (size_t)n, "%08x:", 0); /* SRQ */
	exchange(s, out, in, KEYS_SIZE);
	used = 0;
	n = sscanf(in, "%4x:%4x:%6x:%6x:%8x:%16" SCNx64 ":%n", &lid, &theirs->reads, &theirs->qpn, &theirs->psn,
		   &theirs->rkey, &theirs->addr, &used);
	for (int i = 0; i < 16 && used; i++) {
		int more = 0;

		if (sscanf(in + used, "%2x:%n", &byte, &more) != 1 || !more) {
			used = 0;
			break;
		}
		theirs->gid[i] = (uint8_t)byte;
		used += more;
	}
	if (n != 6 || !used) {
		fprintf(stderr, "rdma_bw: the peer sent \"%s\", expected LID:reads:QPN:PSN:R_Key:address:GID:SRQ\n", in);
		exit(1);
	}
}

/* Transfers the messages, at most DEPTH at a time; returns the seconds it took. */
static double transfer(struct vnicd_qp *qp, struct vnicd_cq *cq, struct vnicd_send_wr *wr, unsigned long count)
{
	struct timespec began, ended;
	unsigned long posted = 0;

	clock_gettime(CLOCK_MONOTONIC, &began);
	for (unsigned long done = 0; done < count; done++) {
		for (; posted < count && posted - done < DEPTH; posted++)
			check(vnicd_post_send(qp, wr), "post");
		complete(cq, "transfer");
	}
	clock_gettime(CLOCK_MONOTONIC, &ended);
	return (double)(ended.tv_sec - began.tv_sec) + (double)(ended.tv_nsec - began.tv_nsec) / 1e9;
}

int main(int argc, char **argv)
{
	struct side s = { .client = argc == 8 };
	bool reads = argc == 8 && !strcmp(argv[5], "read");
	struct vnicd_connect_options how = { .access = VNICD_ACCESS_REMOTE_WRITE | VNICD_ACCESS_REMOTE_READ };
	unsigned long size, buffer, count = 0, changed = 0;
	double mib = 0, rate = 0, seconds;
	struct keys me = { .reads = 16 }, peer;
	struct vnicd_options options = { 0 };
	struct vnicd_peer end = { 0 };
	struct vnicd_send_wr wr;
	struct vnicd_device *dev;
	struct vnicd_pd *pd;
	struct vnicd_cq *cq;
	struct vnicd_qp *qp;
	struct vnicd_mr *mr;
	struct vnicd_sge sge;
	uint8_t *buf;

	size = argc == 5 || argc == 8 ? strtoul(argv[4], NULL, 10) : 0;
	count = argc == 8 ? strtoul(argv[6], NULL, 10) : 0;
	if (!size || size > 1UL << 30 || (argc == 8 && (!count || (!reads && strcmp(argv[5], "write"))))) {
		fprintf(stderr, "usage: rdma_bw SOCKET IP PORT BYTES [write|read COUNT HOST]\n");
		return 2;
	}
	buffer = size < CYCLE ? CYCLE : size;
	options.memory = buffer + (8 << 20); /* beside it, what queues need */
	check(vnicd_ip_to_gid(argv[2], me.gid), "address");
	check(vnicd_open(argv[1], &options, &dev), "open");
	check(vnicd_set_gid(dev, 0, me.gid, 0), "set GID");
	check(vnicd_alloc_pd(dev, &pd), "PD");
	check(vnicd_create_cq(dev, DEPTH, 0, &cq), "CQ");
	buf = vnicd_alloc(dev, buffer);
	check(buf ? 0 : -1, "memory");
	memset(buf, s.client ? CLIENTS : SERVERS, buffer);
	check(vnicd_reg_mr(pd, buf, buffer, VNICD_ACCESS_LOCAL_WRITE | how.access, &mr), "region");
	check(vnicd_create_qp(pd, &(struct vnicd_qp_init){ .type = VNICD_QPT_RC, .send_cq = cq, .recv_cq = cq,
							   .max_send_wr = DEPTH, .max_recv_wr = 1, .sig_all = 1 }, &qp),
							   "QP");
	me.qpn = vnicd_qp_number(qp);
	me.rkey = mr->rkey;
	me.addr = mr->addr;

	s.tcp = tcp_connect(argv[3], s.client ? argv[7] : NULL);
	how.mtu = greet(&s);
	exchange_keys(&s, &me, &peer);
	check(vnicd_resolve(dev, peer.gid, 0, TIMEOUT_MS, &end.av), "resolve");
	end.qpn = peer.qpn;
	end.psn = peer.psn;
	check(vnicd_connect_qp(qp, &end, &how), "connect");
	exchange_keys(&s, &me, &peer);
	exchange_keys(&s, &me, &peer);
	if (s.client) {
		sge = (struct vnicd_sge){ mr->addr, (uint32_t)size, mr->lkey };
		wr = (struct vnicd_send_wr){ .opcode = reads ? VNICD_WR_RDMA_READ : VNICD_WR_RDMA_WRITE,
					     .sg_list = &sge, .num_sge = 1,
					     .remote_addr = peer.addr, .rkey = peer.rkey };
		seconds = transfer(qp, cq, &wr, count);
		mib = (double)size * (double)count / seconds / (1 << 20);
		rate = (double)count / seconds / 1e6;
	}
	exchange_keys(&s, &me, &peer);
	if (s.client) {
		exchange_u64(&s, size);
		exchange_u64(&s, count);
		exchange_double(&s, mib); /* peak */
		exchange_double(&s, mib);
		exchange_double(&s, rate);
	} else {
		size = exchange_u64(&s, 0);
		count = exchange_u64(&s, 0);
		exchange_double(&s, 0);
		mib = exchange_double(&s, 0);
		exchange_double(&s, 0);
	}
	exchange_keys(&s, &me, &peer); /* neither ends before both have finished */
	for (unsigned long i = 0; i < size && i < buffer; i++)
		changed += buf[i] != (s.client ? CLIENTS : SERVERS);
	printf("%lu messages of %lu bytes, %.2f MiB/s; %lu bytes here have changed\n", count, size, mib,
	       changed);
	close(s.tcp);
	vnicd_close(dev);
	return 0;
}
