/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * vnicd device ABI: the interface between the guest driver and the device (vnicd on
 * the host). The Go mirror is device/rdma/abi; a test compiles this header
 * and compares every size, offset and constant.
 *
 * Rules:
 *  - every multi-byte field is little-endian, except where a comment says
 *    "network order" (addresses: GIDs, MACs);
 *  - every field named reserved is written as zero. In what the driver gives, the
 *    device refuses another value; in what the device gives, the driver ignores it;
 *  - every address that the guest gives is a guest physical address (PA), never
 *    a DMA address: the device sits behind no vIOMMU;
 *  - structures have no implicit padding; sizes are multiples of 8.
 *
 * Extensions (CO-6). Driver and device of neighbouring releases work together:
 *  - behaviour: a virtio feature bit, VNICD_FEATURE_*. The device offers it, and does
 *    nothing of it unless the driver has accepted it; the driver accepts what it knows.
 *    Bits of vnicd_device_attr.caps are for what needs no consent: the device offers
 *    it, the driver uses it or not. The driver ignores bits that it does not know;
 *  - opcodes: the device answers an unknown one with VNICD_EOPNOTSUPP, without effect;
 *  - requests without a list: fields are appended, and zero means as before. The device
 *    takes a request that is longer than it knows if the rest is zero, and refuses it
 *    with VNICD_EOPNOTSUPP otherwise; it takes missing fields as zero, but not those of
 *    VNICD_ABI_OLDEST. Where a list follows, the length says how long the list is: a
 *    longer structure needs a feature bit. Flags and values that the device does not
 *    know are refused with VNICD_EINVAL: the driver uses them if a bit offers them;
 *  - responses and events: fields are appended. The device writes what the driver's
 *    buffer takes, but refuses a buffer that is smaller than in VNICD_ABI_OLDEST. The
 *    driver takes missing fields as zero, but not those of VNICD_ABI_OLDEST, takes an
 *    unknown status for VNICD_EIO, and ignores events of unknown types;
 *  - config space: fields are appended, and announced by a feature bit. The driver reads
 *    them if it has accepted that, and config space is long enough: its length is QEMU's
 *    choice (config_size). Bytes that are reserved today stay zero as long as modules
 *    older than feature bits are served: they insist on it;
 *  - layouts: abi_version is the oldest that the device serves. A change for which the
 *    rules above leave no room makes a new one, with a number and a feature bit by which
 *    the driver selects it. The driver speaks VNICD_ABI_OLDEST to VNICD_ABI_VERSION and
 *    needs one of them that the device serves: abi_version, or one whose bit is offered.
 *
 * The device is a virtio 1.x device with id 38 or 42 (see VNICD_MAGIC).
 *
 * Queues (virtqueues), in this order:
 *   0                          command queue
 *   1                          asynchronous event queue (page faults included)
 *   2 .. 2+num_ceqs-1          completion event queues
 *   2+num_ceqs .. +num_engines doorbell queues, one per engine
 *
 * Work queues and completion queues are not virtqueues. They are rings in guest
 * memory in the user ABI of rdma_rxe (rdma_user_rxe.h), which the command queue
 * names: a header (log2_elem_size at 0, index_mask at 4, producer at 128,
 * consumer at 256) and elements from byte 384 on. The device uses the sizes
 * given in the command, never those in the shared header.
 *
 * SQ elements: struct rxe_send_wqe, followed by SGEs or inline data.
 * RQ and SRQ elements: struct rxe_recv_wqe, followed by SGEs.
 * CQ elements: struct ib_uverbs_wc (48 bytes in a 64-byte slot), kernel CQs too.
 */
#ifndef VNICD_ABI_H
#define VNICD_ABI_H

#include <linux/types.h>

#define VNICD_VIRTIO_ID		38	/* also probed: 42 (RDMA), see README */
#define VNICD_VIRTIO_ID_RDMA	42

#define VNICD_MAGIC		0x64636e76	/* "vncd" as bytes in memory */
#define VNICD_ABI_VERSION	2	/* the newest layout */
#define VNICD_ABI_OLDEST	2	/* the oldest that is still spoken */

/* Feature bits (virtio device-specific range 0..23), by number. */
#define VNICD_FEATURE_NONCE	0	/* struct vnicd_doorbells has the driver's nonce */

/* Device configuration space, read-only for the driver. 128 bytes or more. */
struct vnicd_config {
	__le32 magic;		/* VNICD_MAGIC */
	__le32 abi_version;	/* the oldest layout that the device serves */
	__u8   mac[6];		/* MAC shared with the VM's virtio-net */
	__le16 num_ceqs;	/* completion event queues, 1..VNICD_MAX_CEQS */
	__le16 num_engines;	/* doorbell queues, 1..VNICD_MAX_ENGINES */
	__le16 link_up;		/* 1: the port is up; changes raise a config interrupt */
	__le32 port_mtu;	/* largest RoCE path MTU in bytes: 256..4096 */
	__le32 generation;	/* changes whenever the device lost its state */
	__u8   device_name[32];	/* suggested name, e.g. "vnic0"; NUL-terminated */
	__u8   fw_version[24];	/* NUL-terminated version of vnicd */
	__u8   reserved[44];
};

#define VNICD_MAX_CEQS		8
#define VNICD_MAX_ENGINES	8

/* ------------------------------------------------------------------ */
/* Command queue                                                       */
/* ------------------------------------------------------------------ */
/*
 * One descriptor chain per command: device-readable buffers with the request
 * (header, then payload), then device-writable buffers with the response
 * (header, then payload). Several commands may be outstanding; they complete
 * in any order. A request is at most VNICD_CMD_MAX bytes.
 */
#define VNICD_CMD_MAX		65536

enum vnicd_opcode {
	VNICD_CMD_QUERY_DEVICE	= 1,
	VNICD_CMD_QUERY_PORT	= 2,
	VNICD_CMD_SET_GID	= 3,
	VNICD_CMD_CLEAR_GID	= 4,
	VNICD_CMD_SET_DOORBELLS	= 5,
	VNICD_CMD_SET_AH_TABLE	= 6,
	VNICD_CMD_CREATE_PD	= 7,
	VNICD_CMD_DESTROY_PD	= 8,
	VNICD_CMD_CREATE_CQ	= 9,
	VNICD_CMD_RESIZE_CQ	= 10,
	VNICD_CMD_DESTROY_CQ	= 11,
	VNICD_CMD_CREATE_SRQ	= 12,
	VNICD_CMD_MODIFY_SRQ	= 13,
	VNICD_CMD_QUERY_SRQ	= 14,
	VNICD_CMD_DESTROY_SRQ	= 15,
	VNICD_CMD_CREATE_QP	= 16,
	VNICD_CMD_MODIFY_QP	= 17,
	VNICD_CMD_QUERY_QP	= 18,
	VNICD_CMD_DESTROY_QP	= 19,
	VNICD_CMD_CREATE_MR	= 20,
	VNICD_CMD_SET_MTT	= 21,
	VNICD_CMD_DESTROY_MR	= 22,
	VNICD_CMD_ATTACH_MCAST	= 23,
	VNICD_CMD_DETACH_MCAST	= 24,
	VNICD_CMD_QUERY_STATS	= 25,
	VNICD_CMD_CLEAR_MTT	= 26,
	VNICD_CMD_RESUME_FAULT	= 27,
	VNICD_CMD_CREATE_MW	= 28,
	VNICD_CMD_DESTROY_MW	= 29,
	VNICD_CMD_RESOLVE	= 30,
	VNICD_CMD_COUNT_QP	= 31,	/* devices with VNICD_CAP_COUNT_QP only */
	VNICD_CMD_MODIFY_CQ	= 32,	/* devices with VNICD_CAP_MODIFY_CQ only */
};

/* Status of a command; the driver maps them to errno as written. */
enum vnicd_status {
	VNICD_OK		= 0,
	VNICD_EINVAL		= 1,	/* -EINVAL: malformed or contradicting request */
	VNICD_ENOMEM		= 2,	/* -ENOMEM: a per-VM limit is reached */
	VNICD_ENOENT		= 3,	/* -ENOENT: no such object */
	VNICD_EBUSY		= 4,	/* -EBUSY: the object is still in use */
	VNICD_EOPNOTSUPP	= 5,	/* -EOPNOTSUPP: unknown opcode, capability or field */
	VNICD_EFAULT		= 6,	/* -EFAULT: an address outside the guest's memory */
	VNICD_EPERM		= 7,	/* -EPERM */
	VNICD_EIO		= 8,	/* -EIO: the device failed; see the host's log */
};

struct vnicd_req {
	__le16 opcode;		/* enum vnicd_opcode */
	__le16 reserved;
	__le32 length;		/* of the payload that follows, in bytes */
};

struct vnicd_resp {
	__le32 status;		/* enum vnicd_status */
	__le32 length;		/* of the payload that follows, in bytes; 0 on error */
};

/*
 * Location of a ring: npages PAs of (1 << page_shift) bytes each cover length
 * bytes from the start of the first page. The PA list stands in the request's
 * payload after the command's fixed part; lists of several rings follow each
 * other in the order of the rings in the command.
 */
struct vnicd_ring {
	__le64 length;		/* of header (384) and elements, or up to the end of their last 4 KiB */
	__le32 npages;		/* 0: no ring */
	__u8   page_shift;	/* 12..30 */
	__u8   log2_elem_size;	/* 6..16 */
	__le16 reserved;
	__le32 num_elems;	/* power of two; one stays empty */
	__le32 reserved2;
};

/* QUERY_DEVICE: no request payload. Limits are those of this VM. */
struct vnicd_device_attr {
	__le64 node_guid;	/* network order */
	__le64 max_mr_size;
	__le32 max_qp;
	__le32 max_qp_wr;
	__le32 max_sge;		/* send and receive */
	__le32 max_inline;	/* bytes */
	__le32 max_cq;
	__le32 max_cqe;
	__le32 max_mr;
	__le32 max_mw;
	__le32 max_pd;
	__le32 max_srq;
	__le32 max_srq_wr;
	__le32 max_srq_sge;
	__le32 max_ah;		/* entries of the AH table */
	__le32 max_gid;		/* entries of the GID table, 1..256 */
	__le32 max_qp_rd_atom;	/* as responder */
	__le32 max_qp_init_rd_atom;
	__le32 max_mcast_grp;
	__le32 max_mcast_qp_attach;
	__le64 max_mtt;		/* MTT entries (pages) over all MRs */
	__le64 caps;		/* VNICD_CAP_* */
	__le32 odp_rc;		/* VNICD_ODP_*; 0: no on-demand paging */
	__le32 odp_uc;
	__le32 odp_ud;
	__le32 max_fast_reg;	/* pages of a VNICD_MR_FAST region, at most VNICD_MAX_FAST_REG */
};

#define VNICD_CAP_ATOMIC	(1ULL << 0)
#define VNICD_CAP_SRQ		(1ULL << 1)
#define VNICD_CAP_UC		(1ULL << 2)
#define VNICD_CAP_MCAST		(1ULL << 3)
#define VNICD_CAP_ROCE_V1	(1ULL << 4)
#define VNICD_CAP_RESIZE_CQ	(1ULL << 5)
#define VNICD_CAP_LOCAL_DMA_LKEY (1ULL << 6)	/* RA-1: VNICD_DMA_LKEY works */
#define VNICD_CAP_MEM_MGT	(1ULL << 7)	/* REG_MR, LOCAL_INV, SEND_WITH_INV */
#define VNICD_CAP_MW		(1ULL << 8)	/* types 1 and 2B: CREATE_MW, BIND_MW, LOCAL_INV */
#define VNICD_CAP_ATOMIC_WRITE	(1ULL << 9)	/* ATOMIC WRITE, on RC */
#define VNICD_CAP_FLUSH_GLOBAL	(1ULL << 10)	/* FLUSH to global visibility, on RC */
#define VNICD_CAP_SET_MTT_RESUME (1ULL << 11)	/* VNICD_SET_MTT_RESUME */
#define VNICD_CAP_COUNT_QP	(1ULL << 12)	/* COUNT_QP */
#define VNICD_CAP_MODIFY_CQ	(1ULL << 13)	/* MODIFY_CQ */

/* ODP-2: operations that may meet an absent page; as enum ib_odp_transport_cap_bits */
#define VNICD_ODP_SEND		(1U << 0)
#define VNICD_ODP_RECV		(1U << 1)
#define VNICD_ODP_WRITE		(1U << 2)
#define VNICD_ODP_READ		(1U << 3)
#define VNICD_ODP_ATOMIC	(1U << 4)
#define VNICD_ODP_SRQ_RECV	(1U << 5)

/* RA-1: the reserved L_Key that marks a segment as guest-physical. */
#define VNICD_DMA_LKEY		0

/* QUERY_PORT: no request payload */
struct vnicd_port_attr {
	__le32 state;		/* enum ib_port_state: 1 down, 4 active */
	__le32 max_mtu;		/* bytes */
	__le32 active_mtu;	/* bytes */
	__le32 active_speed;	/* IB_SPEED_* bit */
	__le32 active_width;	/* IB_WIDTH_* bit */
	__le32 reserved;
};

enum vnicd_gid_type {
	VNICD_GID_ROCE_V1 = 1,
	VNICD_GID_ROCE_V2 = 2,
};

struct vnicd_set_gid {
	__le16 index;
	__u8   type;		/* enum vnicd_gid_type */
	__u8   reserved;
	__le16 vlan_id;		/* 0xffff: untagged */
	__u8   smac[6];		/* source MAC; must be the device's or it is refused */
	__le32 reserved2;
	__u8   gid[16];		/* network order; IPv4-mapped for RoCEv2 over IPv4 */
};

struct vnicd_clear_gid {
	__le16 index;
	__le16 reserved[3];
};

/*
 * Doorbells: one area per engine, in guest memory, zeroed by the driver and
 * given to the device by SET_DOORBELLS before the first QP is created.
 *
 * Ringing (driver), after the producer index of the SQ is visible:
 *	set bit (slot % 64) of bits[slot / 64]		(atomic, release)
 *	set bit (slot / 64 % 64) of summary[slot / 4096]	(atomic, release)
 *	smp_mb()
 *	if (READ_ONCE(need_wakeup)) notify the engine's doorbell virtqueue
 * The doorbell virtqueue never carries a buffer, only notifications.
 *
 * Engine (device): exchanges summary words with 0, then the words they name;
 * or reads the words of the slots in use and leaves the summary unchanged.
 * Before it sleeps: need_wakeup = 1, full barrier, scan again.
 *
 * The nonce (CO-3), with VNICD_FEATURE_NONCE, in the area of engine 0 only: a random
 * number, not zero, of this start of the driver. The driver sets it before SET_DOORBELLS,
 * which fails with EINVAL otherwise, and clears it when it ends: before it resets the
 * device, and before the memory can be reused (unloading, reboot, kexec). Not every
 * front end reports a reset; the queues stop, as for a pause of the VM. If the
 * nonce is in its place, that is a pause, and the device keeps the objects; if not, the
 * driver has gone, and so do they. If a driver goes on nevertheless, it finds a new
 * generation.
 */
#define VNICD_DB_SLOTS		65536
struct vnicd_doorbells {
	__le32 need_wakeup;		/* written by the device */
	__le32 reserved[15];
	__le64 summary[VNICD_DB_SLOTS / 4096];	/* 16 words at offset 64 */
	__le64 nonce;				/* of the driver, at offset 192; or 0 */
	__le64 reserved2[39];
	__le64 bits[VNICD_DB_SLOTS / 64];	/* 1024 words at offset 512 */
	__le64 reserved3[448];			/* to 12 KiB: three pages */
};

struct vnicd_set_doorbells {
	__le32 engine;
	__le32 npages;		/* 4 KiB pages: 3 */
	__le64 pa[3];
};

/*
 * Address handles are in a table in guest memory that only the guest kernel
 * writes; a UD work request names an entry by its number. The device copies an
 * entry once per use and validates it. Entry 0 is never valid. SET_AH_TABLE
 * is followed by npages PAs (4 KiB pages); it is executed once, before any UD QP.
 */
struct vnicd_ah {
	__le32 valid;		/* 1: in use. Written last, cleared first */
	__le32 pdn;		/* protection domain */
	__u8   dgid[16];	/* network order */
	__u8   dmac[6];		/* network order */
	__le16 sgid_index;
	__le16 vlan_id;		/* 0xffff: untagged; must equal the GID's */
	__u8   traffic_class;
	__u8   hop_limit;
	__le32 flow_label;	/* 20 bits */
	__u8   sl;
	__u8   reserved[7];
	__le64 reserved2[2];	/* to 64 bytes */
};

struct vnicd_set_ah_table {
	__le32 num_entries;	/* <= max_ah */
	__le32 npages;
	/* __le64 pa[npages] */
};

struct vnicd_handle {		/* generic: create replies, destroy requests */
	__le32 handle;
	__le32 reserved;
};
/* CREATE_PD: no request payload, reply vnicd_handle. DESTROY_PD: vnicd_handle */

/*
 * Completion queues. The arm word is in guest kernel memory, apart from the
 * ring that a user process can write:
 *   driver: *arm = VNICD_ARM_*; smp_mb(); if the ring is not empty, report it
 *   device: write CQE, producer index, full barrier; if *arm asks for this CQE,
 *           exchange it with 0 and, if it was still set, post one event.
 */
#define VNICD_ARM_NONE		0
#define VNICD_ARM_SOLICITED	1
#define VNICD_ARM_NEXT		2

struct vnicd_create_cq {
	struct vnicd_ring ring;
	__le64 arm_pa;		/* PA of a __le32, 4-byte aligned */
	__le32 ceq;		/* completion event queue, 0..num_ceqs-1 */
	__le32 reserved;
	/* __le64 pa[ring.npages] */
};	/* reply: vnicd_handle (cqn) */

/*
 * RESIZE_CQ: the device stops producing, copies unpolled CQEs to the new ring
 * (in order), sets its producer and consumer, and continues there. The driver
 * holds its CQ lock meanwhile. Fails with EINVAL if they do not fit.
 */
struct vnicd_resize_cq {
	__le32 cqn;
	__le32 reserved;
	struct vnicd_ring ring;
	/* __le64 pa[ring.npages] */
};

/*
 * MODIFY_CQ: an event that is due, because its completion was written and asked for, is
 * posted when there are as many completions, or when the period since the first one has
 * passed; at once if count is 0 or 1, or period 0, as for a new CQ.
 */
struct vnicd_modify_cq {
	__le32 cqn;
	__le16 count;
	__le16 period;		/* microseconds */
};

struct vnicd_create_srq {
	__le32 pdn;
	__le32 max_sge;
	__le32 limit;
	__le32 reserved;
	struct vnicd_ring ring;
	/* __le64 pa[ring.npages] */
};	/* reply: vnicd_handle (srqn) */

struct vnicd_modify_srq {
	__le32 srqn;
	__le32 flags;		/* VNICD_SRQ_* */
	__le32 limit;
	__le32 reserved;
	struct vnicd_ring ring;	/* VNICD_SRQ_RESIZE: unconsumed WQEs are copied */
	/* __le64 pa[ring.npages] */
};
#define VNICD_SRQ_LIMIT		(1U << 0)
#define VNICD_SRQ_RESIZE	(1U << 1)

/* QUERY_SRQ: request vnicd_handle, reply: */
struct vnicd_srq_attr {
	__le32 limit;
	__le32 reserved;
};

enum vnicd_qp_type {
	VNICD_QPT_GSI	= 1,	/* as enum ib_qp_type */
	VNICD_QPT_RC	= 2,
	VNICD_QPT_UC	= 3,
	VNICD_QPT_UD	= 4,
};

#define VNICD_QP_SIG_ALL	(1U << 0)	/* every send completes with a CQE */
#define VNICD_QP_PRIVILEGED	(1U << 1)	/* RA-2: kernel QP, may use VNICD_DMA_LKEY */
#define VNICD_QP_HAS_SRQ	(1U << 2)

struct vnicd_create_qp {
	__le32 type;		/* enum vnicd_qp_type */
	__le32 flags;		/* VNICD_QP_* */
	__le32 pdn;
	__le32 send_cqn;
	__le32 recv_cqn;
	__le32 srqn;		/* if VNICD_QP_HAS_SRQ */
	__le32 max_send_sge;
	__le32 max_recv_sge;
	__le32 max_inline;
	__le32 reserved;
	struct vnicd_ring sq;
	struct vnicd_ring rq;	/* npages 0 with an SRQ */
	/* __le64 pa[sq.npages], then pa[rq.npages] */
};

struct vnicd_create_qp_resp {
	__le32 qpn;		/* 24 bits; 1 for the GSI QP */
	__le32 engine;		/* its doorbell area has the QP's doorbell */
	__le32 db_slot;		/* doorbell bit */
	__le32 reserved;
};

/*
 * MODIFY_QP and QUERY_QP. attr_mask and the values are those of enum
 * ib_qp_attr_mask, ib_qp_state, ib_mtu etc. The device also checks the attributes that
 * a transition requires and permits (IBTA 10.3.1, ib_modify_qp_is_ok).
 */
struct vnicd_av {
	__u8   dgid[16];	/* network order */
	__u8   dmac[6];
	__le16 sgid_index;
	__le16 vlan_id;		/* 0xffff: untagged */
	__u8   traffic_class;
	__u8   hop_limit;
	__le32 flow_label;
	__u8   sl;
	__u8   reserved[7];
};

struct vnicd_qp_attr {
	__le32 qpn;
	__le32 attr_mask;	/* enum ib_qp_attr_mask */
	__u8   qp_state;	/* enum ib_qp_state */
	__u8   cur_qp_state;
	__u8   path_mtu;	/* enum ib_mtu: 1 = 256 .. 5 = 4096 */
	__u8   timeout;		/* 4.096 us * 2^timeout; 0: never */
	__u8   retry_cnt;	/* 0..7 */
	__u8   rnr_retry;	/* 0..7, 7: for ever */
	__u8   min_rnr_timer;	/* 0..31 */
	__u8   max_rd_atomic;
	__u8   max_dest_rd_atomic;
	__u8   en_sqd_async_notify;
	__u8   sq_draining;	/* QUERY_QP only */
	__u8   reserved;
	__le16 pkey_index;
	__le16 port_num;
	__le32 access_flags;	/* enum ib_access_flags */
	__le32 qkey;
	__le32 dest_qpn;
	__le32 rq_psn;
	__le32 sq_psn;
	__le32 reserved2;
	struct vnicd_av av;
};
/* MODIFY_QP: request vnicd_qp_attr, no reply payload.
 * QUERY_QP: request vnicd_handle (qpn), reply vnicd_qp_attr. */

/*
 * Memory regions (stage one: key -> MTT -> PA; PF-1, PF-2). CREATE_MR makes the
 * region without any page present; SET_MTT fills the table, in as many commands
 * as necessary. A VNICD_MR_PHYS region has no table: its VAs are PAs.
 *
 * On demand (ODP-1): page_shift is 12. SET_MTT sets pages, usually in answer to
 * a page fault event, and CLEAR_MTT removes them; both act on parts. A write to an
 * entry that is read-only also faults: the driver makes the page writable first.
 * The limit max_mtt counts pages, and for regions on demand the memory of the populated
 * part, in entries. At the limit the device makes entries on demand absent that were not
 * used lately: the next access faults, the driver sets the page again. Such a page still
 * needs CLEAR_MTT before it is freed. ENOMEM from SET_MTT on demand means later, not never.
 */
#define VNICD_MR_PHYS		(1U << 0)
#define VNICD_MR_ON_DEMAND	(1U << 1)	/* set after page faults, removed by CLEAR_MTT */
#define VNICD_MR_IMPLICIT	(1U << 2)	/* with ON_DEMAND: the whole address space: iova 0,
						 * offset 0, page_shift 12, length = npages << 12,
						 * at most 2^57 */
#define VNICD_MR_FAST		(1U << 3)	/* unusable until a work request registers it, see
						 * struct vnicd_reg_wr; npages: the maximum;
						 * access, iova, length and offset are 0, page_shift 12 */

struct vnicd_create_mr {
	__le32 pdn;
	__le32 access;		/* enum ib_access_flags */
	__le32 flags;		/* VNICD_MR_* */
	__u8   page_shift;	/* 12..30 */
	__u8   reserved[3];
	__le64 iova;		/* first VA of the region */
	__le64 length;		/* bytes, > 0; VNICD_MR_FAST: 0 */
	__le64 offset;		/* of the first byte in the first page */
	__le64 npages;		/* MTT entries: covers offset + length */
};

struct vnicd_create_mr_resp {
	__le32 lkey;
	__le32 rkey;
	__le32 handle;
	__le32 reserved;
};

/*
 * SET_MTT with VNICD_SET_MTT_RESUME also answers a page fault event, as a later RESUME_FAULT
 * with VNICD_OK does: the entries are visible before the operation tries
 * again. If the command fails, the fault is not answered. A token that is unknown or
 * stale is ignored: the status is about the entries only.
 *
 * Only devices with VNICD_CAP_SET_MTT_RESUME support flags. Others read flags as the
 * upper half of count, which is more than fits into a command: EINVAL.
 */
struct vnicd_set_mtt {
	__le32 handle;
	__le16 count;		/* entries that follow */
	__le16 flags;		/* VNICD_SET_MTT_* */
	__le64 first;		/* index of the first entry */
	/* __le64 pa[count], VNICD_MTT_* in the low bits */
	/* __le64 token, with VNICD_SET_MTT_RESUME: that of the event, in 32 bits */
};
#define VNICD_SET_MTT_RESUME	(1U << 0)

#define VNICD_MTT_ABSENT	1ULL
#define VNICD_MTT_READ_ONLY	2ULL		/* on demand only: writes fault */

/*
 * CLEAR_MTT: entries become absent; answered when no access uses the pages any
 * more (ODP-5, EP-3). Commands behind it are not delayed.
 */
struct vnicd_clear_mtt {
	__le32 handle;
	__le32 reserved;
	__le64 first;		/* index of the first entry */
	__le64 count;
};

/*
 * RESUME_FAULT answers a page fault event, unless SET_MTT has: each is answered
 * exactly once. A token that is unknown or stale is refused with ENOENT, without effect.
 */
struct vnicd_resume_fault {
	__le32 token;
	__le32 status;		/* VNICD_OK: the pages are in the table, try again;
				 * VNICD_EFAULT: the address is not valid (PF-13);
				 * others: as EFAULT */
};

/*
 * DESTROY_MR: request vnicd_handle. Completes when no access uses the memory (EP-3).
 * EBUSY while memory windows are bound to it.
 */

/*
 * Keys that work requests change. Their upper 24 bits stay, the low 8 are
 * the consumer's. All of it happens in the order of the send queue:
 *  - REG_MR, privileged QPs only: later requests can use the registration. The region
 *    must be free: new, or invalidated;
 *  - BIND_MW (struct rxe_send_wr, mw): as in IBTA 10.6.7; it and LOCAL_INV
 *    begin when everything before them has completed;
 *  - LOCAL_INV, and the receive that a SEND_WITH_INV ends, complete when no access
 *    uses the memory any more.
 * A request that is not permitted completes with IB_WC_MW_BIND_ERR.
 *
 * REG_MR's own part is in rxe_send_wqe where struct rxe_send_wr has wr. The page
 * list is read once, while the request executes.
 */
#define VNICD_WR_REG_MR		0x20
#define VNICD_WR_REG_OFFSET	24
#define VNICD_WC_REG_MR		10	/* opcode in its CQE; kernels number it differently */
#define VNICD_MAX_FAST_REG	512
struct vnicd_reg_wr {
	__le64 iova;
	__le64 length;
	__le64 page_list;	/* PA of npages __le64 PAs: 8-byte aligned, in one 4 KiB page */
	__le32 npages;
	__le32 offset;		/* of the first byte in the first page */
	__le32 rkey;		/* its new key, as L_Key and R_Key */
	__le32 access;		/* enum ib_access_flags */
	__u8   page_shift;	/* 12..30 */
	__u8   reserved[7];
};

/*
 * FLUSH: address, length, R_Key, type and level as in the kernel's struct rxe_send_wr.
 * The rxe provider leaves length 0 there and puts it into dma.length.
 */
#define VNICD_WR_FLUSH_OFFSET	24

/* CREATE_MW: reply vnicd_handle, the window's first R_Key. DESTROY_MW: vnicd_handle, ditto. */
struct vnicd_create_mw {
	__le32 pdn;
	__le32 type;		/* enum ib_mw_type: 1 or 2 (2B) */
};

/*
 * RESOLVE: the MAC of a GID, for a driver without a network stack. If
 * the reply's MAC is zero it is unknown: the device has sent a request from the
 * GID at sgid_index, so try again later.
 */
struct vnicd_resolve {
	__u8   dgid[16];	/* network order */
	__le16 sgid_index;
	__u8   reserved[6];
};

struct vnicd_resolve_resp {
	__u8 mac[6];
	__u8 reserved[2];
};

struct vnicd_mcast {
	__le32 qpn;
	__le32 reserved;
	__u8   gid[16];		/* network order */
};

/* QUERY_STATS: no request payload; reply, without what queue pairs count apart: */
enum vnicd_stat {
	VNICD_STAT_TX_PACKETS,
	VNICD_STAT_TX_BYTES,
	VNICD_STAT_RX_PACKETS,
	VNICD_STAT_RX_BYTES,
	VNICD_STAT_TX_ACKS,
	VNICD_STAT_TX_NAKS,
	VNICD_STAT_TX_RNR,
	VNICD_STAT_RX_RNR,
	VNICD_STAT_RETRANSMITS,
	VNICD_STAT_TIMEOUTS,
	VNICD_STAT_OUT_OF_SEQUENCE,
	VNICD_STAT_DUPLICATES,
	VNICD_STAT_ICRC_ERRORS,
	VNICD_STAT_RX_DROPPED,
	VNICD_STAT_ACCESS_ERRORS,
	VNICD_STAT_GUEST_FAULTS,	/* raised to the guest's driver (PF-7) */
	VNICD_STAT_HOST_FAULTS,		/* raised to the host's driver */
	VNICD_STAT_INVALIDATIONS,	/* CLEAR_MTT */
	VNICD_STAT_FAULTS_RESUMED,	/* guest faults answered: try again */
	VNICD_STAT_FAULTS_FAILED,	/* guest faults answered: no such address */
	VNICD_STAT_FAULT_DROPS,		/* packets dropped for a fault (PF-8, PF-11) */
	VNICD_NUM_STATS
};

struct vnicd_stats {
	__le64 value[VNICD_NUM_STATS];
	__le64 reserved;	/* pads to an even count */
};

/*
 * COUNT_QP: the reply, a struct vnicd_stats, is what the queue pair has counted apart from
 * the device since the last COUNT_QP. Events of no queue pair stay 0 there: ICRC errors,
 * invalidations, answered faults. From now on the queue pair counts apart, with
 * VNICD_COUNT_APART, or in the device's counters, as it does when it is created and after
 * the device's process was replaced.
 */
struct vnicd_count_qp {
	__le32 qpn;
	__le32 flags;		/* VNICD_COUNT_* */
};
#define VNICD_COUNT_APART	(1U << 0)

/* ------------------------------------------------------------------ */
/* Event queues                                                        */
/* ------------------------------------------------------------------ */
/*
 * The driver keeps device-writable buffers of sizeof(struct vnicd_event) in the
 * asynchronous queue, and of sizeof(struct vnicd_ceqe) in each completion event
 * queue. If none is there, the device keeps the event with its object and posts
 * it when a buffer appears: no event is lost.
 */
struct vnicd_ceqe {
	__le32 cqn;
	__le32 reserved;
};

enum vnicd_event_type {
	VNICD_EVENT_CQ_ERR		= 1,	/* handle = cqn */
	VNICD_EVENT_QP_FATAL		= 2,	/* handle = qpn */
	VNICD_EVENT_QP_REQ_ERR		= 3,
	VNICD_EVENT_QP_ACCESS_ERR	= 4,
	VNICD_EVENT_QP_COMM_EST		= 5,
	VNICD_EVENT_SQ_DRAINED		= 6,
	VNICD_EVENT_QP_LAST_WQE		= 7,
	VNICD_EVENT_SRQ_ERR		= 8,	/* handle = srqn */
	VNICD_EVENT_SRQ_LIMIT		= 9,
	VNICD_EVENT_PAGE_FAULT		= 16,	/* handle = qpn; 0: none */
};

/*
 * A page fault (PF-7) suspends one side of one QP until RESUME_FAULT, or SET_MTT,
 * names its token; if no buffer is posted, it waits with its QP until there is one.
 */
struct vnicd_event {
	__le32 type;		/* enum vnicd_event_type */
	__le32 handle;
	__le64 va;		/* PAGE_FAULT: first byte */
	__le64 length;		/* bytes wanted from va on: 1..1 MiB, within the region */
	__le32 key;		/* the region's, also if a window on it was used */
	__le32 access;		/* enum ib_access_flags needed; 0: read for local use */
	__le32 token;		/* names the waiting operation */
	__le32 reserved;
	__le64 reserved2[3];	/* to 64 bytes */
};

#endif /* VNICD_ABI_H */
