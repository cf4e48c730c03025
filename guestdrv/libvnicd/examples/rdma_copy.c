/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two programs that exchange addresses over TCP, and then data by WRITE, READ and SEND, which both verify.
 *
 *   rdma_copy /run/vnicd/a.hca 10.0.0.5 PORT          waits for the other on 127.0.0.1:PORT (0: any, printed)
 *   rdma_copy /run/vnicd/b.hca 10.0.0.6 PORT HOST     connects to HOST:PORT
 *
 * The server sends nothing. The client WRITEs a pattern into the server's memory, READs it back into another place, and
 * compares; then it SENDs a message, upon which the server compares what was written.
 */
#include "example.h"

#define BYTES (1U << 20)

/* What each end tells the other, in network order but for the GID, which always is. */
struct hello {
	uint8_t gid[16];
	uint32_t qpn, psn, rkey, reserved;
	uint64_t addr;
};

static uint8_t pattern(uint32_t i)
{
	return (uint8_t)(i * 2654435761U >> 24);
}

static void fill(uint8_t *p)
{
	for (uint32_t i = 0; i < BYTES; i++)
		p[i] = pattern(i);
}

static void compare(const uint8_t *p, const char *what)
{
	for (uint32_t i = 0; i < BYTES; i++) {
		if (p[i] != pattern(i)) {
			fprintf(stderr, "rdma_copy: %s: byte %u is %#x, expected %#x\n", what, i, p[i], pattern(i));
			exit(1);
		}
	}
	printf("%s: %u bytes verified\n", what, BYTES);
}

int main(int argc, char **argv)
{
	struct vnicd_options options = { .memory = 16 << 20 };
	struct vnicd_connect_options rights = { .access = VNICD_ACCESS_REMOTE_WRITE | VNICD_ACCESS_REMOTE_READ };
	struct hello me = { 0 }, peer;
	struct vnicd_peer end = { 0 };
	struct vnicd_send_wr wr;
	struct vnicd_device *dev;
	struct vnicd_pd *pd;
	struct vnicd_cq *cq;
	struct vnicd_qp *qp;
	struct vnicd_mr *mr;
	struct vnicd_sge sge;
	uint8_t *buf;
	int tcp;

	if (argc != 4 && argc != 5) {
		fprintf(stderr, "usage: rdma_copy SOCKET IP PORT [HOST]\n");
		return 2;
	}
	check(vnicd_ip_to_gid(argv[2], me.gid), "address");
	check(vnicd_open(argv[1], &options, &dev), "open");
	check(vnicd_set_gid(dev, 0, me.gid, 0), "set GID");
	check(vnicd_alloc_pd(dev, &pd), "PD");
	check(vnicd_create_cq(dev, 16, 0, &cq), "CQ");
	buf = vnicd_alloc(dev, 2 * BYTES); /* the first half is the peer's, the second this end's */
	check(buf ? 0 : -1, "memory");
	check(vnicd_reg_mr(pd, buf, 2 * BYTES, VNICD_ACCESS_LOCAL_WRITE | rights.access, &mr), "region");
	check(vnicd_create_qp(pd, &(struct vnicd_qp_init){ .type = VNICD_QPT_RC, .send_cq = cq, .recv_cq = cq,
							   .max_send_wr = 4, .max_recv_wr = 1, .sig_all = 1 }, &qp),
							   "QP");
	check(vnicd_post_recv(qp, &(struct vnicd_recv_wr){ .id = 1 }), "receive");

	tcp = tcp_connect(argv[3], argc == 5 ? argv[4] : NULL);
	me.qpn = htonl(vnicd_qp_number(qp));
	me.rkey = htonl(mr->rkey);
	me.addr = __builtin_bswap64(mr->addr);
	send_all(tcp, &me, sizeof(me));
	receive_all(tcp, &peer, sizeof(peer));
	check(vnicd_resolve(dev, peer.gid, 0, TIMEOUT_MS, &end.av), "resolve");
	end.qpn = ntohl(peer.qpn);
	end.psn = ntohl(peer.psn);
	check(vnicd_connect_qp(qp, &end, &rights), "connect");

	if (argc == 4) {
		complete(cq, "receive");
		compare(buf, "written by the peer");
	} else {
		fill(buf + BYTES);
		sge = (struct vnicd_sge){ mr->addr + BYTES, BYTES, mr->lkey };
		wr = (struct vnicd_send_wr){ .opcode = VNICD_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1,
					     .remote_addr = __builtin_bswap64(peer.addr), .rkey = ntohl(peer.rkey) };
		check(vnicd_post_send(qp, &wr), "WRITE");
		complete(cq, "WRITE");
		memset(buf + BYTES, 0, BYTES);
		wr.opcode = VNICD_WR_RDMA_READ;
		check(vnicd_post_send(qp, &wr), "READ");
		complete(cq, "READ");
		compare(buf + BYTES, "read back");
		check(vnicd_post_send(qp, &(struct vnicd_send_wr){ .opcode = VNICD_WR_SEND }), "SEND");
		complete(cq, "SEND");
	}
	send_all(tcp, "", 1); /* neither ends before both have finished */
	receive_all(tcp, &peer, 1);
	close(tcp);
	vnicd_close(dev);
	return 0;
}
