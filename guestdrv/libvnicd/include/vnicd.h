/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libvnicd: the HCA of vnicd for C programs on the host. The API resembles verbs; libvnicd(3) has an overview.
 *
 * Errors. Functions that return int return 0, or the number that they count, on success, and a negative errno value
 * on failure. vnicd_error() then has a text for this thread that says what was wrong. Values:
 *   -EINVAL, -ENOMEM, -ENOENT, -EBUSY, -EOPNOTSUPP, -EFAULT, -EPERM, -EIO  as argument checks and the device give them
 *   -EAGAIN      a queue is full, or nothing arrived within the time
 *   -ENODEV      vnicd has ended or closed the connection: the device is unusable
 *   -EPROTO      the device violated the protocol: the device is unusable
 *   -ETIMEDOUT   the device did not answer a command in time: the device is unusable; vnicd_resolve: no such host
 * Once the device is unusable, every function but vnicd_free_..., vnicd_destroy_... and vnicd_close fails. There is no
 * way back but vnicd_close and vnicd_open.
 *
 * Threads. Commands (everything that creates, destroys, modifies, queries, allocates or resolves) may be issued by any
 * threads at the same time. One thread at a time posts to a QP's send queue, one to its receive queue, and one polls,
 * arms and waits for a CQ. An object must not be destroyed while another thread uses it. vnicd_close must be the last
 * call for the device. A device has one thread of its own, which blocks all signals and calls nothing of the program.
 * A process that was forked must not use its parent's device.
 *
 * Data path. Posting and polling neither allocate nor lock nor block. Their only system call is the notification of the
 * device, when it asks for that because it sleeps.
 *
 * Structures of vnicd_abi.h (vnicd_config, vnicd_device_attr, vnicd_port_attr, vnicd_qp_attr, vnicd_av, vnicd_event,
 * vnicd_stats) are those that the device uses. Their numbers are little-endian, as are the machines that the library
 * supports; GIDs, MACs and immediate data are in network order. Fields named reserved are 0.
 */
#ifndef VNICD_H
#define VNICD_H

#include <stddef.h>
#include <stdint.h>

#include "vnicd_abi.h"
#include "vnicd_ib.h"

#ifdef __cplusplus
extern "C" {
#endif

struct vnicd_device;
struct vnicd_pd;
struct vnicd_cq;
struct vnicd_qp;
struct vnicd_address;

/*
 * Describes the last failure of this thread: a text without a newline, valid until the thread's next call of the
 * library. Never NULL; empty if no call has failed yet.
 */
const char *vnicd_error(void);

/* ---- device ---- */

/* Options of vnicd_open. Zero in a field, and a NULL pointer to the structure, mean the default. */
struct vnicd_options {
	uint64_t memory;      /* bytes for buffers, rings and queues, 4 MiB to 1 TiB; 0: 64 MiB. Used when written to */
	uint32_t ah_entries;  /* address handles + 1, 2..; 0: 1024. vnicd_device_attr.max_ah applies, too */
	uint32_t timeout_ms;  /* bounds vnicd_open and every command; 0: 30000 */
};

/*
 * Connects to the socket of an application (run-dir/NAME.hca, see docs/configuration.md) of a running vnicd, and
 * initialises the device. *out is owned by the caller, who ends it by vnicd_close. One program at a time uses a socket.
 * A path that is NULL or empty stands for that in the environment variable VNICD_SOCKET, or else for /run/vnicd/hca,
 * where containers have it (`vnicd cdi`). Programs with more rights than their caller ignore the variable.
 * -EPROTO: something else than a vnicd of a matching version listens there.
 */
int vnicd_open(const char *path, const struct vnicd_options *options, struct vnicd_device **out);

/*
 * Ends the connection, and destroys every object of the device. All handles, buffers and descriptors of the device are
 * invalid then. Waits at most 10 s until vnicd has stopped using the memory. NULL is ignored.
 */
void vnicd_close(struct vnicd_device *dev);

/* Returns 0 while the device is usable, then the error that ended it. A program that only polls may check it. */
int vnicd_device_status(struct vnicd_device *dev);

/* Config space as of vnicd_open: MAC, MTU, name. Valid until vnicd_close. */
const struct vnicd_config *vnicd_get_config(const struct vnicd_device *dev);

/* Reads config space again: link_up and port_mtu can change. */
int vnicd_read_config(struct vnicd_device *dev, struct vnicd_config *config);

/* Limits of this application and capabilities (VNICD_CAP_*) of the device. Valid until vnicd_close. */
const struct vnicd_device_attr *vnicd_get_device_attr(const struct vnicd_device *dev);

int vnicd_query_port(struct vnicd_device *dev, struct vnicd_port_attr *attr);
int vnicd_query_stats(struct vnicd_device *dev, struct vnicd_stats *stats);

/*
 * A descriptor that is readable while vnicd_get_event has an event, or the device is unusable. The library owns it:
 * the program may only poll it.
 */
int vnicd_event_fd(const struct vnicd_device *dev);

/*
 * Takes the oldest asynchronous event, waiting at most timeout_ms for one (-1: without limit). -EAGAIN: none. Events
 * that are not taken are kept; while 64 wait, the device holds further ones back. Ignore events of unknown types.
 * Page faults (VNICD_EVENT_PAGE_FAULT) are never returned: the library answers them, with a refusal.
 */
int vnicd_get_event(struct vnicd_device *dev, int timeout_ms, struct vnicd_event *event);

/* ---- addresses ---- */

/* Converts an IPv4 or IPv6 address in text form into a GID. */
int vnicd_ip_to_gid(const char *ip, uint8_t gid[16]);

/*
 * Writes entry index, 0..vnicd_device_attr.max_gid-1, of the table of this end's addresses, as a RoCEv2 address in
 * VLAN vlan (1..4094; 0: untagged). vnicd_clear_gid empties the entry.
 */
int vnicd_set_gid(struct vnicd_device *dev, uint32_t index, const uint8_t gid[16], uint16_t vlan);
int vnicd_clear_gid(struct vnicd_device *dev, uint32_t index);

/*
 * Finds the path from the GID at sgid_index to the port with the GID gid. vnicd asks the tenant's network by ARP or
 * neighbour discovery, again and again until a host answers or timeout_ms have passed (-ETIMEDOUT; the device stays
 * usable). traffic_class, hop_limit, flow_label and sl of *av may be changed afterwards.
 */
int vnicd_resolve(struct vnicd_device *dev, const uint8_t gid[16], uint32_t sgid_index, uint32_t timeout_ms,
		  struct vnicd_av *av);

/* ---- memory ---- */

/*
 * Allocates size bytes, zeroed, in whole pages, that device and program share. The program ends them by vnicd_free.
 * The device can access no other memory, but for that of vnicd_share. NULL: options.memory is used up, or the device
 * is unusable (vnicd_error()).
 */
void *vnicd_alloc(struct vnicd_device *dev, size_t size);

/* Frees memory of vnicd_alloc; NULL is ignored. -EBUSY while a region is registered in it. */
int vnicd_free(struct vnicd_device *dev, void *buf);

/*
 * Gives the device memory that the program has made itself: length bytes at addr, where the program has mapped the
 * memory file fd from offset on (MAP_SHARED, for reading and writing). Nothing is copied; regions are registered in
 * it as in memory of vnicd_alloc. The file is one of memfd_create with MFD_ALLOW_SEALING that
 * has not been shared before; offset and length are multiples of its pages. The library adds F_SEAL_SHRINK, and vnicd
 * F_SEAL_FUTURE_WRITE: nobody can take pages out of the file from then on, nor map it for writing again. fd may be
 * closed afterwards. vnicd counts the length as the application's `memory`, and takes 63 files at a time. After a
 * kill of vnicd the next one cannot continue a device with such memory: it becomes unusable.
 */
int vnicd_share(struct vnicd_device *dev, int fd, uint64_t offset, void *addr, size_t length);

/*
 * Takes memory of vnicd_share back, and returns when the device accesses it no more. The mapping stays the program's.
 * -EBUSY while a region is registered in it.
 */
int vnicd_unshare(struct vnicd_device *dev, void *addr);

/* ---- protection domains and memory regions ---- */

int vnicd_alloc_pd(struct vnicd_device *dev, struct vnicd_pd **out);

/* -EBUSY while an object of the PD exists. */
int vnicd_free_pd(struct vnicd_pd *pd);

/* A registered region. The fields are for reading. */
struct vnicd_mr {
	uint64_t addr;    /* address of the first byte, for SGEs and for remote_addr of peers */
	uint64_t length;  /* bytes */
	uint32_t lkey;    /* for SGEs */
	uint32_t rkey;    /* for peers */
};

/*
 * Registers length bytes at addr, which lie in one allocation of vnicd_alloc or in memory of vnicd_share. access:
 * VNICD_ACCESS_*; LOCAL_WRITE is required with REMOTE_WRITE and REMOTE_ATOMIC.
 */
int vnicd_reg_mr(struct vnicd_pd *pd, void *addr, size_t length, uint32_t access, struct vnicd_mr **out);

/* Deregisters. On success the device has stopped using the memory. */
int vnicd_dereg_mr(struct vnicd_mr *mr);

/* ---- completion queues ---- */

/*
 * Makes a CQ for at least entries unpolled completions, 1..vnicd_device_attr.max_cqe. If more arrive the CQ is unusable
 * (VNICD_EVENT_CQ_ERR). ceq, 0..vnicd_config.num_ceqs-1, is the completion event queue that serves it.
 */
int vnicd_create_cq(struct vnicd_device *dev, uint32_t entries, uint32_t ceq, struct vnicd_cq **out);

/* -EBUSY while a QP uses the CQ. */
int vnicd_destroy_cq(struct vnicd_cq *cq);

/* The number of the CQ, as in vnicd_event.handle. */
uint32_t vnicd_cq_number(const struct vnicd_cq *cq);

/* A finished work request. If status is not VNICD_WC_SUCCESS, only id, status, vendor_err and qpn are valid. */
struct vnicd_wc {
	uint64_t id;          /* of the request */
	uint32_t status;      /* VNICD_WC_SUCCESS and following */
	uint32_t opcode;      /* VNICD_WC_SEND and following */
	uint32_t vendor_err;  /* more about status, for logs */
	uint32_t byte_len;    /* bytes received or read; with VNICD_WC_GRH including the 40 bytes of the GRH */
	uint32_t flags;       /* VNICD_WC_GRH, VNICD_WC_WITH_IMM */
	uint8_t imm[4];       /* immediate data in network order */
	uint32_t qpn;         /* of the local QP */
	uint32_t src_qpn;     /* UD: of the sender */
};

/* Describes a status. */
const char *vnicd_wc_status_text(uint32_t status);

/*
 * Moves up to n completions, oldest first, to wc, and returns their number, 0 if there is none. Does not wait. If the
 * device is unusable, completions that are present are returned, then the error.
 */
int vnicd_poll_cq(struct vnicd_cq *cq, int n, struct vnicd_wc *wc);

/*
 * Requests one event for the next completion or, with solicited_only, the next that is solicited or failed. Returns 1
 * if completions are present, which may have arrived before and raise no event: poll again. Otherwise 0.
 */
int vnicd_arm_cq(struct vnicd_cq *cq, int solicited_only);

/*
 * A descriptor that is readable once the event that vnicd_arm_cq requested has arrived, or the device is unusable; for
 * poll(2) and epoll(7). The library owns it. Take the event by vnicd_wait_cq with 0 ms.
 */
int vnicd_cq_fd(const struct vnicd_cq *cq);

/*
 * Waits for the event that vnicd_arm_cq requested, at most timeout_ms (-1: without limit). -EAGAIN: it did not arrive.
 * An event that arrives while nobody waits is kept, so that the CQ may be empty after the next wait.
 */
int vnicd_wait_cq(struct vnicd_cq *cq, int timeout_ms);

/* ---- queue pairs ---- */

/* Properties of a new QP. type and the CQs are required. vnicd_device_attr has the limits of the numbers. */
struct vnicd_qp_init {
	uint32_t type;          /* VNICD_QPT_RC, VNICD_QPT_UC or VNICD_QPT_UD */
	struct vnicd_cq *send_cq;
	struct vnicd_cq *recv_cq; /* may be the same */
	uint32_t max_send_wr;   /* outstanding requests, at least; 0: 1; likewise the next three */
	uint32_t max_recv_wr;
	uint32_t max_send_sge;  /* of a request */
	uint32_t max_recv_sge;
	uint32_t max_inline;    /* bytes; 0: no inline data */
	int sig_all;            /* every send request completes as with VNICD_SEND_SIGNALED */
};

/* Makes a QP in state RESET: vnicd_connect_qp, vnicd_start_ud or vnicd_modify_qp continue. */
int vnicd_create_qp(struct vnicd_pd *pd, const struct vnicd_qp_init *init, struct vnicd_qp **out);

/* Outstanding requests do not complete. */
int vnicd_destroy_qp(struct vnicd_qp *qp);

/* The number of the QP, which peers need. */
uint32_t vnicd_qp_number(const struct vnicd_qp *qp);

/*
 * Changes the attributes in attr->attr_mask (VNICD_QP_*). attr->qpn is ignored. The device refuses what the state and
 * type do not permit with -EINVAL (IBTA 10.3.1). No thread may post while the state becomes RESET.
 */
int vnicd_modify_qp(struct vnicd_qp *qp, const struct vnicd_qp_attr *attr);
int vnicd_query_qp(struct vnicd_qp *qp, struct vnicd_qp_attr *attr);

/* The other end of a connection. */
struct vnicd_peer {
	uint32_t qpn;
	uint32_t psn;        /* first PSN that the peer sends, 24 bits */
	struct vnicd_av av;  /* of vnicd_resolve */
};

/* Options of vnicd_connect_qp. Zero in a field, and a NULL pointer to the structure, mean the default. */
struct vnicd_connect_options {
	uint32_t psn;          /* first PSN to send; the peer needs it */
	uint32_t access;       /* rights of the peer, VNICD_ACCESS_REMOTE_*; 0: it can only send messages */
	uint8_t mtu;           /* VNICD_MTU_*; 0: the largest that the port carries */
	uint8_t timeout;       /* of an ACK: 4.096 us * 2^timeout, 1..31; 0: 14 (67 ms) */
	uint8_t retry_cnt;     /* 1..7 or VNICD_NO_RETRY; 0: 7 */
	uint8_t rnr_retry;     /* 1..7 or VNICD_NO_RETRY; 7: without limit; 0: 7 */
	uint8_t min_rnr_timer; /* 1..31; 0: 12 (0.64 ms) */
	uint8_t rd_atomic;     /* concurrent READs and atomics each way; 0: the device's limit, at most 16 */
};
#define VNICD_NO_RETRY 0xff

/*
 * Moves a new RC or UC QP through INIT and RTR to RTS. No packet is exchanged: the peer does the same with its QP.
 * After a failure move the QP to RESET before the next attempt.
 */
int vnicd_connect_qp(struct vnicd_qp *qp, const struct vnicd_peer *peer, const struct vnicd_connect_options *options);

/* Moves a new UD QP through INIT and RTR to RTS. Peers need qkey to send to it. */
int vnicd_start_ud(struct vnicd_qp *qp, uint32_t qkey);

/* ---- address handles ---- */

/* Makes the path of UD requests. Issues no command. -ENOMEM: all of options.ah_entries are in use. */
int vnicd_create_address(struct vnicd_pd *pd, const struct vnicd_av *av, struct vnicd_address **out);

/* Requests that use it must have completed. */
int vnicd_destroy_address(struct vnicd_address *address);

/* ---- work requests ---- */

/* A piece of a registered region. */
struct vnicd_sge {
	uint64_t addr;
	uint32_t length;
	uint32_t lkey;   /* vnicd_mr.lkey; with VNICD_SEND_INLINE unused, and addr is any readable memory */
};

struct vnicd_send_wr {
	uint64_t id;                     /* returned in the completion */
	uint32_t opcode;                 /* VNICD_WR_* */
	uint32_t flags;                  /* VNICD_SEND_* */
	const struct vnicd_sge *sg_list; /* gathered (SEND, WRITE) or scattered to (READ, atomics) in order */
	uint32_t num_sge;
	uint8_t imm[4];                  /* ..._WITH_IMM: in network order */
	uint64_t remote_addr;            /* WRITE, READ, atomics */
	uint32_t rkey;                   /* likewise */
	uint64_t compare_add;            /* atomics: to compare with, or to add */
	uint64_t swap;                   /* CMP_AND_SWP */
	const struct vnicd_address *address; /* UD, with the next two */
	uint32_t remote_qpn;
	uint32_t remote_qkey;
};

struct vnicd_recv_wr {
	uint64_t id;
	const struct vnicd_sge *sg_list; /* filled in order; UD: the first 40 bytes are for the GRH */
	uint32_t num_sge;
};

/*
 * Posts a request; everything is copied. -EAGAIN: the queue is full until completions are polled. -EINVAL: it does not
 * fit the QP. Errors of the request itself are in its completion. Without VNICD_SEND_SIGNALED (or sig_all) a request
 * completes silently unless it fails.
 */
int vnicd_post_send(struct vnicd_qp *qp, const struct vnicd_send_wr *wr);

/* vnicd_post_send without the doorbell: queue several requests, then ring once. The device may start them earlier. */
int vnicd_queue_send(struct vnicd_qp *qp, const struct vnicd_send_wr *wr);
void vnicd_ring(struct vnicd_qp *qp);

/* Posts a place for an incoming message. Errors as vnicd_post_send. */
int vnicd_post_recv(struct vnicd_qp *qp, const struct vnicd_recv_wr *wr);

#ifdef __cplusplus
}
#endif

#endif
