/* SPDX-License-Identifier: Apache-2.0 */
/* Bad arguments, limits and the order of destruction: errors SOCKET. Prints mismatches, and fails if there is one. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vnicd.h>

static int bad;

static void expect(int line, int got, int want)
{
	if (got != want || (want < 0 && !*vnicd_error())) {
		printf("line %d: %d (%s), expected %d\n", line, got, vnicd_error(), want);
		bad = 1;
	}
}
#define EXPECT(got, want) expect(__LINE__, got, want)

static void open_errors(const char *path)
{
	struct vnicd_device *dev;
	char longer[200];

	memset(longer, 'x', sizeof(longer) - 1);
	longer[sizeof(longer) - 1] = 0;
	setenv("VNICD_SOCKET", longer, 1);
	EXPECT(vnicd_open(NULL, NULL, &dev), -EINVAL);
	setenv("VNICD_SOCKET", "/nonexistent/x.hca", 1);
	EXPECT(vnicd_open("", NULL, &dev), -ENOENT);
	unsetenv("VNICD_SOCKET");
	EXPECT(vnicd_open(NULL, NULL, &dev), -ENOENT);
	EXPECT(vnicd_open(path, NULL, NULL), -EINVAL);
	EXPECT(vnicd_open("/nonexistent/x.hca", NULL, &dev), -ENOENT);
	EXPECT(vnicd_open(longer, NULL, &dev), -EINVAL);
	EXPECT(vnicd_open(path, &(struct vnicd_options){ .memory = 4096 }, &dev), -EINVAL);
	EXPECT(vnicd_open(path, &(struct vnicd_options){ .memory = 2ULL << 40 }, &dev), -EINVAL);
	EXPECT(vnicd_open(path, &(struct vnicd_options){ .ah_entries = 1 }, &dev), -EINVAL);
	EXPECT(dev != NULL, 0);
}

static void memory_errors(struct vnicd_device *dev, struct vnicd_pd *pd)
{
	uint8_t *a = vnicd_alloc(dev, 10000), *b = vnicd_alloc(dev, 1), *big, own[64];
	struct vnicd_mr *mr, *second;

	EXPECT(!a || !b, 0);
	EXPECT(vnicd_alloc(dev, 0) != NULL, 0);
	EXPECT(vnicd_alloc(dev, SIZE_MAX) != NULL, 0);
	EXPECT(vnicd_alloc(dev, 64 << 20) != NULL, 0);
	EXPECT(vnicd_reg_mr(pd, a, 0, 0, &mr), -EINVAL);
	EXPECT(vnicd_reg_mr(pd, a, 12289, 0, &mr), -EINVAL);
	EXPECT(vnicd_reg_mr(pd, a, SIZE_MAX, 0, &mr), -EINVAL);
	EXPECT(vnicd_reg_mr(pd, own, sizeof(own), 0, &mr), -EINVAL);
	EXPECT(vnicd_reg_mr(pd, NULL, 1, 0, &mr), -EINVAL);
	EXPECT(vnicd_reg_mr(pd, a, 100, VNICD_ACCESS_REMOTE_WRITE, &mr), -EINVAL);
	EXPECT(mr != NULL, 0);
	EXPECT(vnicd_reg_mr(pd, a + 5000, 5000, VNICD_ACCESS_LOCAL_WRITE, &mr), 0);
	EXPECT(vnicd_reg_mr(pd, a, 100, 0, &second), 0);
	EXPECT(vnicd_free(dev, a), -EBUSY);
	EXPECT(vnicd_free(dev, a + 4096), -EINVAL);
	EXPECT(vnicd_free(dev, own), -EINVAL);
	EXPECT(vnicd_free_pd(pd), -EBUSY);
	EXPECT(vnicd_dereg_mr(mr), 0);
	EXPECT(vnicd_free(dev, a), -EBUSY);
	EXPECT(vnicd_dereg_mr(second), 0);
	memset(a, 0xaa, 12288);
	EXPECT(vnicd_free(dev, a), 0);
	EXPECT(vnicd_free(dev, a), -EINVAL);
	EXPECT(vnicd_free(dev, NULL), 0);
	/* What is used again is zero, and spans are joined. */
	EXPECT(vnicd_free(dev, b), 0);
	big = vnicd_alloc(dev, 16384);
	EXPECT(!big, 0);
	for (size_t i = 0; big && i < 16384; i++)
		EXPECT(big[i], 0);
	EXPECT(vnicd_free(dev, big), 0);
}

static int own_file(int flags)
{
	int fd = memfd_create("own", MFD_CLOEXEC | flags);

	if (fd < 0 || ftruncate(fd, 16384)) {
		perror("memfd");
		exit(3);
	}
	return fd;
}

static uint8_t *map(int fd, int flags)
{
	uint8_t *p = mmap(NULL, 16384, PROT_READ | PROT_WRITE, flags, fd, 0);

	if (p == MAP_FAILED) {
		perror("mmap");
		exit(3);
	}
	return p;
}

static void share_errors(struct vnicd_device *dev, struct vnicd_pd *pd)
{
	int fd = own_file(MFD_ALLOW_SEALING), final = own_file(0), other = own_file(MFD_ALLOW_SEALING), read_only;
	uint8_t *p = map(fd, MAP_SHARED), *private = map(fd, MAP_PRIVATE), *q = map(final, MAP_SHARED);
	uint8_t *next = map(other, MAP_SHARED), heap[8192];
	struct vnicd_mr *mr;
	char path[64];
	FILE *file = tmpfile();

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	read_only = open(path, O_RDONLY | O_CLOEXEC);
	EXPECT(!file || read_only < 0, 0);
	EXPECT(vnicd_share(dev, -1, 0, p, 16384), -EBADF);
	EXPECT(vnicd_share(dev, fileno(file), 0, p, 4096), -EINVAL);
	EXPECT(vnicd_share(dev, read_only, 0, p, 16384), -EINVAL);
	EXPECT(vnicd_share(dev, final, 0, q, 16384), -EINVAL);
	EXPECT(vnicd_share(dev, fd, 0, p, 100), -EINVAL);
	EXPECT(vnicd_share(dev, fd, 0, p, 0), -EINVAL);
	EXPECT(vnicd_share(dev, fd, 1, p, 4096), -EINVAL);
	EXPECT(vnicd_share(dev, fd, 4096, p, 16384), -EINVAL);
	EXPECT(vnicd_share(dev, fd, UINT64_MAX - 4095, p, 8192), -EINVAL);
	EXPECT(vnicd_share(dev, fd, 4096, p, 4096), -EINVAL); /* another offset */
	EXPECT(vnicd_share(dev, fd, 0, q, 16384), -EINVAL);   /* another file */
	EXPECT(vnicd_share(dev, fd, 0, heap, 4096), -EINVAL);
	EXPECT(vnicd_share(dev, fd, 0, private, 16384), -EINVAL);
	EXPECT(vnicd_share(dev, fd, 0, NULL, 4096), -EINVAL);
	EXPECT(fcntl(fd, F_GET_SEALS), 0); /* it is as it was */
	EXPECT(vnicd_reg_mr(pd, p, 4096, 0, &mr), -EINVAL);
	EXPECT(vnicd_unshare(dev, p), -EINVAL);

	EXPECT(vnicd_share(dev, fd, 0, p, 16384), 0);
	EXPECT(vnicd_share(dev, fd, 0, p, 16384), -EINVAL); /* twice */
	EXPECT(vnicd_free(dev, p), -EINVAL);
	EXPECT(vnicd_reg_mr(pd, p, 16385, 0, &mr), -EINVAL);
	EXPECT(vnicd_reg_mr(pd, p + 16384, 1, 0, &mr), -EINVAL);
	EXPECT(vnicd_reg_mr(pd, p + 100, 16284, VNICD_ACCESS_LOCAL_WRITE, &mr), 0);
	EXPECT(vnicd_unshare(dev, p), -EBUSY);
	EXPECT(vnicd_unshare(dev, p + 4096), -EINVAL);
	EXPECT(vnicd_share(dev, other, 0, next, 16384), 0);
	EXPECT(vnicd_dereg_mr(mr), 0);
	EXPECT(vnicd_unshare(dev, p), 0);
	EXPECT(vnicd_unshare(dev, p), -EINVAL);
	EXPECT(vnicd_reg_mr(pd, p, 4096, 0, &mr), -EINVAL);
	EXPECT(vnicd_reg_mr(pd, next, 16384, 0, &mr), 0); /* the other one is as before */
	for (int i = 0; i < 200; i++) {
		int again = own_file(MFD_ALLOW_SEALING);
		uint8_t *at = map(again, MAP_SHARED);

		EXPECT(vnicd_share(dev, again, 0, at, 16384), 0);
		close(again);
		munmap(at, 16384);
		EXPECT(vnicd_unshare(dev, at), 0);
	}
	EXPECT(vnicd_device_status(dev), 0);
	EXPECT(vnicd_dereg_mr(mr), 0);
	munmap(p, 16384);
	munmap(private, 16384);
	munmap(q, 16384);
	munmap(next, 16384);
	close(fd);
	close(final);
	close(other);
	close(read_only);
	fclose(file);
}

static void post_errors(struct vnicd_qp *qp, struct vnicd_mr *mr)
{
	struct vnicd_sge sge[3] = { { mr->addr, 65, mr->lkey } };
	struct vnicd_sge huge[2] = { { mr->addr, UINT32_MAX, mr->lkey }, { mr->addr, 1, mr->lkey } };
	struct vnicd_send_wr wr = { .opcode = VNICD_WR_SEND, .sg_list = sge, .num_sge = 3 };
	struct vnicd_recv_wr rr = { .sg_list = sge, .num_sge = 3 };
	int n;

	EXPECT(vnicd_post_send(qp, &wr), -EINVAL);
	EXPECT(vnicd_post_recv(qp, &rr), -EINVAL);
	EXPECT(vnicd_post_send(qp, &(struct vnicd_send_wr){ .opcode = VNICD_WR_SEND, .num_sge = 1 }), -EINVAL);
	EXPECT(vnicd_post_recv(qp, &(struct vnicd_recv_wr){ .num_sge = 1 }), -EINVAL);
	EXPECT(vnicd_post_send(qp, &(struct vnicd_send_wr){ .opcode = 77 }), -EINVAL);
	EXPECT(vnicd_post_send(qp, &(struct vnicd_send_wr){ .opcode = VNICD_WR_SEND, .flags = 1U << 31 }), -EINVAL);
	wr.num_sge = 1;
	wr.flags = VNICD_SEND_INLINE;
	EXPECT(vnicd_post_send(qp, &wr), -EINVAL); /* 65 bytes, 64 fit */
	sge[0].length = 8;
	wr.opcode = VNICD_WR_RDMA_READ;
	EXPECT(vnicd_post_send(qp, &wr), -EINVAL);
	EXPECT(vnicd_post_send(qp, &(struct vnicd_send_wr){ .opcode = VNICD_WR_SEND, .sg_list = huge, .num_sge = 2 }),
	       -EINVAL);
	EXPECT(vnicd_post_recv(qp, &(struct vnicd_recv_wr){ .sg_list = huge, .num_sge = 2 }), -EINVAL);
	for (n = 0; n < 1000 && vnicd_post_recv(qp, &(struct vnicd_recv_wr){ .id = 1 }) == 0; n++)
		;
	EXPECT(n, 3); /* the smallest ring that holds 2 */
	EXPECT(vnicd_post_recv(qp, &(struct vnicd_recv_wr){ .id = 1 }), -EAGAIN);
	for (n = 0; n < 1000 && vnicd_queue_send(qp, &(struct vnicd_send_wr){ .opcode = VNICD_WR_SEND }) == 0; n++)
		;
	EXPECT(n, 3);
	EXPECT(vnicd_post_send(qp, &(struct vnicd_send_wr){ .opcode = VNICD_WR_SEND }), -EAGAIN);
}

static void qp_errors(struct vnicd_device *dev, struct vnicd_pd *pd)
{
	const struct vnicd_device_attr *a = vnicd_get_device_attr(dev);
	struct vnicd_qp_init init = { .type = VNICD_QPT_RC, .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 2,
				      .max_recv_sge = 2, .max_inline = 64 };
	struct vnicd_qp_init other;
	struct vnicd_qp_attr attr = { .attr_mask = VNICD_QP_STATE, .qp_state = VNICD_QPS_RTS };
	struct vnicd_peer peer = { .qpn = 1 };
	struct vnicd_mr *mr;
	struct vnicd_qp *qp, *ud;
	struct vnicd_cq *cq;
	struct vnicd_wc wc;
	void *buf = vnicd_alloc(dev, 4096);

	EXPECT(vnicd_create_cq(dev, 0, 0, &cq), -EINVAL);
	EXPECT(vnicd_create_cq(dev, a->max_cqe + 1, 0, &cq), -EINVAL);
	EXPECT(vnicd_create_cq(dev, 1, vnicd_get_config(dev)->num_ceqs, &cq), -EINVAL);
	EXPECT(cq != NULL, 0);
	EXPECT(vnicd_create_cq(dev, 16, 0, &cq), 0);
	EXPECT(vnicd_poll_cq(cq, 1, &wc), 0);
	EXPECT(vnicd_poll_cq(cq, 0, &wc), 0);
	EXPECT(vnicd_wait_cq(cq, 0), -EAGAIN);
	EXPECT(vnicd_reg_mr(pd, buf, 4096, VNICD_ACCESS_LOCAL_WRITE, &mr), 0);
	EXPECT(vnicd_create_qp(pd, &init, &qp), -EINVAL); /* no CQ */
	EXPECT(qp != NULL, 0);
	init.send_cq = init.recv_cq = cq;
	other = init, other.type = 99;
	EXPECT(vnicd_create_qp(pd, &other, &qp), -EINVAL);
	other = init, other.max_send_wr = a->max_qp_wr + 1;
	EXPECT(vnicd_create_qp(pd, &other, &qp), -EINVAL);
	other = init, other.max_recv_sge = a->max_sge + 1;
	EXPECT(vnicd_create_qp(pd, &other, &qp), -EINVAL);
	other = init, other.max_inline = a->max_inline + 1;
	EXPECT(vnicd_create_qp(pd, &other, &qp), -EINVAL);
	EXPECT(vnicd_create_qp(pd, &init, &qp), 0);
	EXPECT(vnicd_modify_qp(qp, &attr), -EINVAL); /* not from RESET */
	EXPECT(vnicd_start_ud(qp, 1), -EINVAL);
	peer.av.sgid_index = 9; /* an empty entry */
	EXPECT(vnicd_connect_qp(qp, &peer, NULL), -EINVAL);
	post_errors(qp, mr);
	/* RESET empties the queues. */
	attr.qp_state = VNICD_QPS_RESET;
	EXPECT(vnicd_modify_qp(qp, &attr), 0);
	EXPECT(vnicd_post_recv(qp, &(struct vnicd_recv_wr){ .id = 1 }), 0);
	EXPECT(vnicd_destroy_cq(cq), -EBUSY);
	EXPECT(vnicd_arm_cq(cq, 0), 0); /* it is usable as before */
	init.type = VNICD_QPT_UD;
	EXPECT(vnicd_create_qp(pd, &init, &ud), 0);
	EXPECT(vnicd_connect_qp(ud, &peer, NULL), -EINVAL);
	EXPECT(vnicd_post_send(ud, &(struct vnicd_send_wr){ .opcode = VNICD_WR_SEND }), -EINVAL);
	EXPECT(vnicd_post_send(ud, &(struct vnicd_send_wr){ .opcode = VNICD_WR_RDMA_WRITE }), -EINVAL);
	EXPECT(vnicd_destroy_qp(ud), 0);
	EXPECT(vnicd_destroy_qp(qp), 0);
	EXPECT(vnicd_destroy_cq(cq), 0);
	EXPECT(vnicd_dereg_mr(mr), 0);
	EXPECT(vnicd_free(dev, buf), 0);
}

static void address_errors(struct vnicd_device *dev, struct vnicd_pd *pd)
{
	struct vnicd_av av = { .vlan_id = VNICD_NO_VLAN, .hop_limit = 64 };
	struct vnicd_address *first, *second, *third;
	struct vnicd_event e;
	uint8_t gid[16];

	EXPECT(vnicd_ip_to_gid("10.0.0", gid), -EINVAL);
	EXPECT(vnicd_ip_to_gid("fd00::1", gid), 0);
	EXPECT(gid[0] == 0xfd && gid[15] == 1, 1);
	EXPECT(vnicd_ip_to_gid("10.0.0.1", gid), 0);
	EXPECT(memcmp(gid, "\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\0\0\1", 16), 0);
	EXPECT(vnicd_set_gid(dev, 256, gid, 0), -EINVAL);
	EXPECT(vnicd_set_gid(dev, 0, gid, 4095), -EINVAL);
	EXPECT(vnicd_set_gid(dev, 0, gid, 0), 0);
	EXPECT(vnicd_clear_gid(dev, 65536), -EINVAL);
	EXPECT(vnicd_resolve(dev, gid, 256, 0, &av), -EINVAL);
	EXPECT(vnicd_ip_to_gid("10.0.0.99", gid), 0);
	EXPECT(vnicd_resolve(dev, gid, 0, 20, &av), -ETIMEDOUT);
	EXPECT(vnicd_device_status(dev), 0);
	av.sgid_index = 300;
	EXPECT(vnicd_create_address(pd, &av, &first), -EINVAL);
	av.sgid_index = 0;
	EXPECT(vnicd_create_address(pd, &av, &first), 0);
	EXPECT(vnicd_create_address(pd, &av, &second), 0);
	EXPECT(vnicd_create_address(pd, &av, &third), -ENOMEM); /* 3 entries, one reserved */
	EXPECT(vnicd_destroy_address(second), 0);
	EXPECT(vnicd_create_address(pd, &av, &second), 0);
	EXPECT(vnicd_get_event(dev, 0, &e), -EAGAIN);
	/* Both are left to vnicd_close. */
}

int main(int argc, char **argv)
{
	struct vnicd_options o = { .memory = 16 << 20, .ah_entries = 3, .timeout_ms = 60000 };
	struct vnicd_device *dev;
	struct vnicd_config config;
	struct vnicd_stats stats;
	struct vnicd_pd *pd, *left;

	if (argc != 2)
		return 2;
	EXPECT(*vnicd_error(), 0);
	open_errors(argv[1]);
	EXPECT(vnicd_open(argv[1], &o, &dev), 0);
	if (!dev)
		return 1;
	EXPECT(vnicd_read_config(dev, &config), 0);
	EXPECT(vnicd_query_stats(dev, &stats), 0);
	EXPECT(vnicd_alloc_pd(dev, &pd), 0);
	EXPECT(vnicd_alloc_pd(dev, &left), 0);
	memory_errors(dev, pd);
	share_errors(dev, pd);
	qp_errors(dev, pd);
	EXPECT(vnicd_free_pd(pd), 0);
	address_errors(dev, left);
	EXPECT(strcmp(vnicd_wc_status_text(VNICD_WC_SUCCESS), "success"), 0);
	EXPECT(strcmp(vnicd_wc_status_text(1000), "unknown completion status"), 0);
	EXPECT(vnicd_free_pd(NULL) | vnicd_destroy_cq(NULL) | vnicd_destroy_qp(NULL) | vnicd_dereg_mr(NULL), 0);
	vnicd_close(dev);
	vnicd_close(NULL);
	printf(bad ? "failed\n" : "passed\n");
	return bad;
}
