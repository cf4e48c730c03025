/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The front end's side of vhost-user, in QEMU's order. Every message is bounded by a deadline. Replies are checked for
 * request, flags and size before their payload is read; descriptors that are not expected are closed.
 */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <linux/vhost_types.h>
#include <linux/virtio_config.h>

#include "internal.h"
#include "transport.h"

/* User addresses in messages are labels that differ from PAs. */
#define USER_BASE 0x7e0000000000ULL

struct header {
	uint32_t request, flags, size;
};
_Static_assert(sizeof(struct header) == VHOST_USER_HEADER_BYTES, "header");

struct mem_region {
	uint64_t pa, size, user, offset;
};

struct mem_table {
	uint32_t regions, padding;
	struct mem_region region;
};

struct config_space {
	uint32_t offset, size, flags;
	uint8_t data[sizeof(struct vnicd_config)];
};

union payload {
	uint64_t u64;
	struct vhost_vring_state state;
	struct vhost_vring_addr addr;
	struct mem_table table;
	struct config_space config;
};

static int lost(const char *what)
{
	return set_error(-ENODEV, "vnicd closed the connection (%s)", what);
}

static int wait_for(int fd, short events, uint64_t deadline)
{
	struct pollfd p = { .fd = fd, .events = events };
	int n;

	do {
		n = poll(&p, 1, remaining_ms(deadline));
	} while (n < 0 && errno == EINTR);
	if (n < 0)
		return set_error(-errno, "poll: %s", strerror(errno));
	if (!n)
		return set_error_text(-ETIMEDOUT, "vnicd did not answer a vhost-user message in time");
	return 0;
}

static int send_message(int fd, uint32_t request, uint32_t flags, const void *body, uint32_t size, int pass,
			uint64_t deadline)
{
	struct header h = { .request = request, .flags = flags, .size = size };
	struct iovec iov[2] = { { &h, sizeof(h) }, { (void *)(uintptr_t)body, size } };
	union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } control;
	struct msghdr m = { .msg_iov = iov, .msg_iovlen = size ? 2 : 1 };
	ssize_t n;
	int err;

	if (pass >= 0) {
		struct cmsghdr *c;

		memset(&control, 0, sizeof(control));
		m.msg_control = control.bytes;
		m.msg_controllen = sizeof(control.bytes);
		c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), &pass, sizeof(int));
	}
	for (;;) {
		n = sendmsg(fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n >= 0)
			break;
		if (errno == EAGAIN) {
			err = wait_for(fd, POLLOUT, deadline);
			if (err)
				return err;
		} else if (errno != EINTR) {
			return lost(strerror(errno));
		}
	}
	/* Messages are far smaller than the socket's buffer, which takes them whole or not at all. */
	return (size_t)n == sizeof(h) + size ? 0 : lost("a message was not taken as a whole");
}

/* Receives n bytes. A descriptor that comes with them goes to *fd, if that is still -1; others are closed. */
static int receive(int sock, void *dst, size_t n, int *fd, uint64_t deadline)
{
	uint8_t *p = dst;

	while (n) {
		union { struct cmsghdr align; char bytes[CMSG_SPACE(8 * sizeof(int))]; } control;
		struct iovec iov = { p, n };
		struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes,
				    .msg_controllen = sizeof(control.bytes) };
		struct cmsghdr *c;
		ssize_t got;
		int err = wait_for(sock, POLLIN, deadline);

		if (err)
			return err;
		got = recvmsg(sock, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
		if (got < 0 && (errno == EINTR || errno == EAGAIN))
			continue;
		if (got < 0)
			return lost(strerror(errno));
		for (c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
			size_t i, fds;

			if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
				continue;
			fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
			for (i = 0; i < fds; i++) {
				int passed;

				memcpy(&passed, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
				if (fd && *fd < 0)
					*fd = passed;
				else
					close(passed);
			}
		}
		if (!got)
			return lost("end of the stream");
		p += got;
		n -= (size_t)got;
	}
	return 0;
}

/*
 * Sends a request and waits for its reply, if it has one (reply_size bytes, or with optional none), or for its
 * acknowledgement. A vnicd that was killed meanwhile may reply to GET_MEMORY twice: one more such reply is dropped.
 */
static int exchange(struct vhost *v, uint32_t request, const void *body, uint32_t size, int pass, void *reply,
		    uint32_t reply_size, int *reply_fd, uint64_t deadline)
{
	union payload buf;
	struct header h;
	uint64_t code = 0;
	int err, fd, dropped = 0;

	if (v->out_of_step)
		return set_error_text(-ENODEV, "vnicd owes the reply to an earlier vhost-user message");
	v->out_of_step = true;
	err = send_message(v->fd, request, VHOST_USER_VERSION | (v->ack && !reply ? VHOST_USER_NEED_REPLY : 0), body,
			   size, pass, deadline);
	if (err)
		return err;
	if (!reply && !v->ack) {
		v->out_of_step = false;
		return 0;
	}
	v->given |= request == VHOST_USER_GET_MEMORY;
	for (;; dropped++) {
		fd = -1;
		err = receive(v->fd, &h, sizeof(h), &fd, deadline);
		if (!err && ((h.flags & VHOST_USER_VERSION_MASK) != VHOST_USER_VERSION ||
			!(h.flags & VHOST_USER_REPLY)))
			err = set_error(-EPROTO, "flags %#x in the reply to request %u", h.flags, request);
		if (!err && h.size > sizeof(buf))
			err = set_error(-EPROTO, "reply of %u bytes to request %u", h.size, request);
		if (!err)
			err = receive(v->fd, &buf, h.size, &fd, deadline);
		if (!err && h.request == request)
			break;
		if (fd >= 0)
			close(fd);
		if (err)
			return err;
		if (h.request != VHOST_USER_GET_MEMORY || !v->given || dropped)
			return set_error(-EPROTO, "reply to request %u in place of %u", h.request, request);
	}
	v->out_of_step = false;
	if (reply_fd) {
		*reply_fd = fd;
	} else if (fd >= 0) {
		close(fd);
	}
	if (!reply) {
		if (h.size != sizeof(code))
			return set_error(-EPROTO, "acknowledgement of %u bytes", h.size);
		return buf.u64 ? set_error(-EPROTO, "vnicd refused vhost-user request %u", request) : 0;
	}
	if (h.size != reply_size) {
		if (reply_fd && *reply_fd >= 0) {
			close(*reply_fd);
			*reply_fd = -1;
		}
		return set_error(-EPROTO, "vnicd refused vhost-user request %u: reply of %u bytes, expected %u",
				 request, h.size, reply_size);
	}
	memcpy(reply, &buf, reply_size);
	return 0;
}

static int get_u64(struct vhost *v, uint32_t request, uint64_t *value, uint64_t deadline)
{
	return exchange(v, request, NULL, 0, -1, value, sizeof(*value), NULL, deadline);
}

static int set_u64(struct vhost *v, uint32_t request, uint64_t value, int pass, uint64_t deadline)
{
	return exchange(v, request, &value, sizeof(value), pass, NULL, 0, NULL, deadline);
}

static int set_status(struct vhost *v, uint64_t status, uint64_t deadline)
{
	return v->proto & VHOST_USER_PROTOCOL_F_STATUS ? set_u64(v, VHOST_USER_SET_STATUS, status, -1, deadline) : 0;
}

static int open_back_channel(struct vhost *v, uint64_t deadline)
{
	int fds[2], err;

	if (!(v->proto & VHOST_USER_PROTOCOL_F_BACKEND_REQ))
		return 0;
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds))
		return set_error(-errno, "socketpair: %s", strerror(errno));
	err = exchange(v, VHOST_USER_SET_BACKEND_REQ_FD, NULL, 0, fds[1], NULL, 0, NULL, deadline);
	close(fds[1]);
	if (err)
		close(fds[0]); /* nobody would close the other end: do not wait for that */
	else
		v->back = fds[0];
	return err;
}

static int negotiate(struct vhost *v, uint64_t features, uint64_t deadline)
{
	const uint64_t want = VHOST_USER_PROTOCOL_F_MQ | VHOST_USER_PROTOCOL_F_REPLY_ACK |
			      VHOST_USER_PROTOCOL_F_BACKEND_REQ | VHOST_USER_PROTOCOL_F_CONFIG |
			      VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS | VHOST_USER_PROTOCOL_F_STATUS |
			      VHOST_USER_PROTOCOL_F_MEMORY;
	const uint64_t must = VHOST_FEATURE_VERSION_1 | VHOST_FEATURE_PROTOCOL_FEATURES;
	const uint64_t must_proto = VHOST_USER_PROTOCOL_F_MQ | VHOST_USER_PROTOCOL_F_CONFIG;
	uint64_t offered, proto, status;
	int err;

	err = get_u64(v, VHOST_USER_GET_FEATURES, &offered, deadline);
	if (!err && (offered & must) != must)
		err = set_error(-EPROTO, "back end offers features %#llx: not a vnicd", (unsigned long long)offered);
	if (!err)
		err = get_u64(v, VHOST_USER_GET_PROTOCOL_FEATURES, &proto, deadline);
	if (err)
		return err;
	if ((proto & must_proto) != must_proto)
		return set_error(-EPROTO, "back end offers protocol features %#llx: not a vnicd",
			(unsigned long long)proto);
	v->proto = proto & want;
	err = set_u64(v, VHOST_USER_SET_PROTOCOL_FEATURES, v->proto, -1, deadline);
	if (err)
		return err;
	v->ack = v->proto & VHOST_USER_PROTOCOL_F_REPLY_ACK;
	err = exchange(v, VHOST_USER_SET_OWNER, NULL, 0, -1, NULL, 0, NULL, deadline);
	if (!err)
		err = open_back_channel(v, deadline);
	if (!err)
		err = set_status(v, 0, deadline);
	if (!err)
		err = set_status(v, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER, deadline);
	if (err)
		return err;
	v->features = offered & (must | features);
	err = set_u64(v, VHOST_USER_SET_FEATURES, v->features, -1, deadline);
	if (!err)
		err = set_status(v, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER | VIRTIO_CONFIG_S_FEATURES_OK,
				 deadline);
	if (err || !(v->proto & VHOST_USER_PROTOCOL_F_STATUS))
		return err;
	err = get_u64(v, VHOST_USER_GET_STATUS, &status, deadline);
	if (!err && !(status & VIRTIO_CONFIG_S_FEATURES_OK))
		err = set_error(-EPROTO, "vnicd does not accept features %#llx", (unsigned long long)v->features);
	return err;
}

static int share_memory(struct vhost *v, struct memory *mem, uint64_t deadline)
{
	struct mem_table t = { .regions = 1 };
	int err;

	if (v->proto & VHOST_USER_PROTOCOL_F_MEMORY) {
		uint64_t size = mem->size;
		int fd = -1;

		err = exchange(v, VHOST_USER_GET_MEMORY, &size, sizeof(size), -1, &size, sizeof(size), &fd, deadline);
		if (!err && fd < 0)
			err = set_error_text(-EPROTO, "GET_MEMORY: the reply has no descriptor");
		if (!err)
			err = mem_use(mem, fd);
	} else {
		err = mem_make(mem);
	}
	if (err)
		return err;
	t.region = (struct mem_region){ .pa = PA_BASE, .size = mem->size, .user = USER_BASE + PA_BASE };
	if (v->proto & VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS) {
		t.regions = 0; /* padding of ADD_MEM_REG */
		return exchange(v, VHOST_USER_ADD_MEM_REG, &t, sizeof(t), mem->fd, NULL, 0, NULL, deadline);
	}
	return exchange(v, VHOST_USER_SET_MEM_TABLE, &t, sizeof(t), mem->fd, NULL, 0, NULL, deadline);
}

static int memory_region(struct vhost *v, uint32_t request, const struct mem_region *r, int fd, uint64_t deadline)
{
	struct mem_table t = { .region = *r }; /* without regions: the padding of these messages */
	int err;

	if (!(v->proto & VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS))
		return set_error_text(-EOPNOTSUPP, "the back end cannot be given memory while it runs");
	pthread_mutex_lock(&v->lock);
	err = exchange(v, request, &t, sizeof(t), fd, NULL, 0, NULL, deadline);
	pthread_mutex_unlock(&v->lock);
	return err;
}

int vhost_add_memory(struct vhost *v, uint64_t pa, uint64_t size, uint64_t offset, int fd, uint64_t deadline)
{
	return memory_region(v, VHOST_USER_ADD_MEM_REG,
			     &(struct mem_region){ .pa = pa, .size = size, .user = USER_BASE + pa, .offset = offset },
			     fd, deadline);
}

int vhost_remove_memory(struct vhost *v, uint64_t pa, uint64_t size, uint64_t deadline)
{
	return memory_region(v, VHOST_USER_REM_MEM_REG,
			     &(struct mem_region){ .pa = pa, .size = size, .user = USER_BASE + pa }, -1, deadline);
}

int vhost_open(struct vhost *v, const char *path, struct memory *mem, uint64_t features, uint64_t deadline)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	uint64_t n;
	int err;

	v->fd = v->back = -1;
	if (strlen(path) >= sizeof(sa.sun_path))
		return set_error(-EINVAL, "the path of the socket has more than %zu bytes", sizeof(sa.sun_path) - 1);
	snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", path);
	v->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (v->fd < 0 || connect(v->fd, (struct sockaddr *)&sa, sizeof(sa)))
		return set_error(-errno, "connecting to %s: %s", path, strerror(errno));
	err = negotiate(v, features, deadline);
	if (!err)
		err = share_memory(v, mem, deadline);
	if (!err)
		err = get_u64(v, VHOST_USER_GET_QUEUE_NUM, &n, deadline);
	if (!err && (!n || n > VHOST_USER_MAX_QUEUES))
		err = set_error(-EPROTO, "vnicd has %llu queues", (unsigned long long)n);
	if (!err)
		v->num_queues = (uint32_t)n;
	return err;
}

int vhost_start_queue(struct vhost *v, struct memory *mem, uint32_t i, struct queue *q, uint64_t deadline)
{
	struct vhost_vring_state num = { .index = i, .num = QUEUE_SIZE }, base = { .index = i };
	struct vhost_vring_state enable = { .index = i, .num = 1 };
	struct vhost_vring_addr addr = {
		.index = i,
		.desc_user_addr = USER_BASE + mem_pa(mem, q->desc),
		.used_user_addr = USER_BASE + mem_pa(mem, q->used),
		.avail_user_addr = USER_BASE + mem_pa(mem, q->avail),
	};
	int err;

	err = exchange(v, VHOST_USER_SET_VRING_NUM, &num, sizeof(num), -1, NULL, 0, NULL, deadline);
	if (!err)
		err = exchange(v, VHOST_USER_SET_VRING_BASE, &base, sizeof(base), -1, NULL, 0, NULL, deadline);
	if (!err)
		err = exchange(v, VHOST_USER_SET_VRING_ADDR, &addr, sizeof(addr), -1, NULL, 0, NULL, deadline);
	if (!err)
		err = set_u64(v, VHOST_USER_SET_VRING_CALL, i, q->call, deadline);
	if (!err)
		err = set_u64(v, VHOST_USER_SET_VRING_KICK, i, q->kick, deadline);
	if (!err)
		err = exchange(v, VHOST_USER_SET_VRING_ENABLE, &enable, sizeof(enable), -1, NULL, 0, NULL, deadline);
	return err;
}

int vhost_driver_ok(struct vhost *v, uint64_t deadline)
{
	return set_status(v, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER | VIRTIO_CONFIG_S_FEATURES_OK |
				     VIRTIO_CONFIG_S_DRIVER_OK, deadline);
}

int vhost_read_config(struct vhost *v, void *dst, uint32_t n, uint64_t deadline)
{
	struct config_space c = { .size = n };
	const uint32_t size = (uint32_t)offsetof(struct config_space, data) + n;
	int err;

	pthread_mutex_lock(&v->lock);
	err = exchange(v, VHOST_USER_GET_CONFIG, &c, size, -1, &c, size, NULL, deadline);
	pthread_mutex_unlock(&v->lock);
	if (!err && (c.offset || c.size != n))
		err = set_error(-EPROTO, "GET_CONFIG: asked for %u bytes at 0, got %u at %u", n, c.size, c.offset);
	if (!err)
		memcpy(dst, c.data, n);
	return err;
}

int vhost_take_message(struct vhost *v)
{
	/* A message that has begun must follow at once: nobody else serves this channel. */
	const uint64_t deadline = now_ms() + 1000;
	const uint64_t ok = 0;
	struct header h;
	int err = receive(v->back, &h, sizeof(h), NULL, deadline);

	if (err)
		return err;
	if (h.request != VHOST_USER_BACKEND_CONFIG_CHANGE || h.size || h.flags & VHOST_USER_REPLY ||
	    (h.flags & VHOST_USER_VERSION_MASK) != VHOST_USER_VERSION)
		return set_error(-EPROTO, "unexpected back-end request %u", h.request);
	if (!(h.flags & VHOST_USER_NEED_REPLY))
		return 0;
	return send_message(v->back, h.request, VHOST_USER_VERSION | VHOST_USER_REPLY, &ok, sizeof(ok), -1, deadline);
}

void vhost_fini(struct vhost *v)
{
	if (v->back >= 0)
		close(v->back);
	if (v->fd >= 0)
		close(v->fd);
}
