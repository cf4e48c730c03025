/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Guest driver of vnicd's paravirtual HCA.
 *
 * Layers, each calling only downwards:
 *	vnicd_main.c	probe, remove, failure and recovery
 *	vnicd_verbs*.c	the verbs of ib_core, in the user ABI of rdma_rxe
 *	vnicd_fault.c	page fault events: workers of each process
 *	vnicd_odp.c	on-demand regions: the device's pages
 *	vnicd_netdev.c	pairing with the VM's virtio-net, port events
 *	vnicd_eq.c	completion and asynchronous event queues
 *	vnicd_ring.c	memory of work rings, mappings into processes
 *	vnicd_config.c	config space: whose device, which ABI
 *	vnicd_cmd.c	one function per command of vnicd_abi.h
 *	vnicd_cmdq.c	command queue mechanics
 *	vnicd_ivshmem.c	a virtio transport: the device behind QEMU's ivshmem-doorbell
 *
 * Lifetimes. struct vnicd_dev lives from probe to remove of the virtio device.
 * struct vnicd_ibdev belongs to ib_core: "rmmod rdma_rxe" unregisters every
 * device with its driver id, including ours. So probe takes a reference to it,
 * which remove drops, and calls into ib_core from outside a verb hold
 * ib_device_try_get().
 *
 * Locks, outermost first:
 *	vnicd_dev.reg_lock
 *	rtnl_lock, ib_core's locks
 *	vnicd_qp.lock, vnicd_cq.resize_lock, vnicd_srq.resize_lock (mutexes)
 *	mmap_lock, reclaim, the MMU notifiers' own
 *	vnicd_odp.gate, then vnicd_part.lock: no allocation that may enter reclaim
 *	vnicd_dev.reset_lock
 *	vnicd_odp.lock, vnicd_pager.lock, vnicd_dev.stray_lock (leaves)
 *	vnicd_cq.lock
 *	vnicd_wq.lock
 *	vnicd_dev.netdev_lock, .ah_lock, .grave_lock, xa_lock of the tables,
 *	vnicd_cmdq.lock, vnicd_eq.lock (leaves; all taken with interrupts off)
 */
#ifndef VNICD_H
#define VNICD_H

#include <linux/atomic.h>
#include <linux/completion.h>
#include <linux/interrupt.h>
#include <linux/list.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/netdevice.h>
#include <linux/notifier.h>
#include <linux/refcount.h>
#include <linux/spinlock.h>
#include <linux/virtio.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>
#include <rdma/rdma_user_rxe.h>

#include "vnicd_abi.h"
#include "vnicd_cmdq.h"
#include "vnicd_compat.h"
#include "vnicd_odp.h"

#define VNICD_UVERBS_ABI	2	/* as rdma_rxe */
#define VNICD_PORT		1	/* the only one */
#define VNICD_GSI_QPN		1
#define VNICD_PKEY		0xffff	/* the only one */
#define VNICD_MAX_MSG		0x80000000U

/* QUERY_DEVICE in host byte order, validated. */
struct vnicd_limits {
	__be64 node_guid;
	u64 max_mr_size;
	u64 caps;
	u32 max_qp;
	u32 max_qp_wr;
	u32 max_sge;
	u32 max_inline;
	u32 max_cq;
	u32 max_cqe;
	u32 max_mr;
	u32 max_mw;
	u32 max_pd;
	u32 max_srq;
	u32 max_srq_wr;
	u32 max_srq_sge;
	u32 max_ah;
	u32 max_gid;
	u32 max_qp_rd_atom;
	u32 max_qp_init_rd_atom;
	u32 max_mcast_grp;
	u32 max_mcast_qp_attach;
	u32 odp_rc;			/* enum ib_odp_transport_cap_bits */
	u32 odp_uc;
	u32 odp_ud;
	u32 max_fast_reg;		/* pages; 0: no fast registration */
};

/*
 * Memory that the device may still access, because it never confirmed the
 * release. It is freed after the reset in remove.
 */
struct vnicd_grave {
	struct list_head list;
	void (*release)(struct vnicd_grave *grave);
};

/* Event queue: a virtqueue of buffers that the device fills. */
struct vnicd_eq {
	struct vnicd_dev *vd;
	struct virtqueue *vq;
	struct tasklet_struct tasklet;	/* completion event queues */
	struct work_struct work;	/* asynchronous event queue */
	void *bufs;
	size_t buf_size;
	unsigned int num_bufs;
	spinlock_t lock;		/* guards vq and stopped */
	bool stopped;
};

struct vnicd_engine {
	struct virtqueue *vq;		/* carries notifications only */
	struct vnicd_doorbells *db;
};

struct vnicd_recovery;

struct vnicd_ibdev {
	struct ib_device base;		/* first: ib_core frees it */
	struct vnicd_dev *vd;
};

struct vnicd_dev {
	struct virtio_device *vdev;
	struct vnicd_ibdev *ib;		/* set once, see Lifetimes */
	struct mutex reg_lock;		/* guards ib_registered */
	bool ib_registered;		/* we must unregister it */
	bool removing;

	/* From config space, validated. */
	u8 mac[ETH_ALEN];
	u16 num_ceqs;
	u16 num_engines;
	u32 port_mtu;
	u32 generation;
	char name[IB_DEVICE_NAME_MAX];
	char fw_version[sizeof_field(struct vnicd_config, fw_version) + 1];

	struct vnicd_limits lim;

	struct virtqueue **vqs;
	struct vnicd_cmdq cmdq;
	struct vnicd_eq aeq;
	struct vnicd_eq ceqs[VNICD_MAX_CEQS];
	struct vnicd_engine engines[VNICD_MAX_ENGINES];

	/*
	 * Objects by the device's numbers. Completions and events look them up
	 * in interrupt context, so the xa_lock is taken with interrupts off.
	 */
	struct xarray qps;
	struct xarray cqs;
	struct xarray srqs;
	struct xarray phys_keys;	/* keys of VNICD_MR_PHYS regions */
	struct xarray odps;		/* on-demand regions by key; process context */
	struct xarray counters;		/* of queue pairs, by the id of the rdma_counter */
	atomic_t next_cookie;

	/* Address handles: table in memory shared with the device. */
	struct vnicd_ah *ah_table;
	size_t ah_table_size;
	u32 ah_entries;
	spinlock_t ah_lock;		/* guards ah_used and ah_next */
	unsigned long *ah_used;
	u32 ah_next;

	/* Failure. Each flag is set once and never cleared. */
	unsigned long flags;
#define VNICD_F_DEAD		0	/* before anything else */
#define VNICD_F_RECOVERING	1	/* alive again: probed after its reset */
#define VNICD_F_QUIET		2	/* was reset: it accesses no memory any more */
	struct work_struct fail_work;
	struct work_struct config_work;
	struct work_struct flush_work;
	struct workqueue_struct *wq;	/* may wait for rtnl_lock and the like */
	struct workqueue_struct *event_wq;	/* ordered: events keep their order */

	/* The fence, see vnicd_main.c. */
	struct mutex reset_lock;	/* only spinlocks are taken under it */
	struct delayed_work fence_work;
	wait_queue_head_t fence_wait;	/* for VNICD_F_QUIET */
	struct vnicd_recovery *recovery;	/* taken by xchg() */

	struct notifier_block reboot_nb;

	spinlock_t grave_lock;		/* guards graves */
	struct list_head graves;

	/* Page faults outside of regions. */
	spinlock_t stray_lock;		/* guards strays and num_strays */
	struct list_head strays;
	unsigned int num_strays;
	struct work_struct stray_work;

	/* Pairing with the VM's virtio-net. */
	struct notifier_block netdev_nb;
	bool netdev_nb_registered;
	spinlock_t netdev_lock;		/* guards netdev and netdev_changed */
	struct net_device *netdev;	/* held */
	bool netdev_changed;		/* its GIDs must be scanned */
	bool link_up;			/* as in config space */
	int port_state;			/* as last reported to ib_core */
	struct work_struct port_work;
};

/* Memory of one ring of the kernel or a process. */
struct vnicd_ring_mem {
	struct rdma_user_mmap_entry entry;	/* processes only */
	struct vnicd_grave grave;
	struct vnicd_dev *vd;
	struct rxe_queue_buf *buf;
	size_t size;			/* of the ring, header included */
	size_t alloc_size;		/* whole pages */
	u32 num_elems;			/* power of two */
	u32 npages;			/* of 1 << page_shift each */
	u8 page_shift;
	u8 log2_elem_size;
	bool contiguous;
	bool mapped;			/* entry is in the process's table */
	bool buried;			/* the device may still use it */
};

struct vnicd_ucontext {
	struct ib_ucontext base;
};

struct vnicd_pd {
	struct ib_pd base;
	u32 pdn;
};

struct vnicd_ah_obj {
	struct ib_ah base;
	u32 index;			/* in the AH table */
	struct rdma_ah_attr attr;	/* for query, without references */
};

struct vnicd_mr {
	struct ib_mr base;
	struct vnicd_grave grave;
	struct ib_umem *umem;		/* pinned: ... */
	struct vnicd_odp *odp;		/* ... or on demand */
	__le64 *pages;			/* ... or for fast registration: the list, one page */
	u32 num_pages;
	u32 max_pages;
	u32 handle;
	bool phys;
};

/* Rights that regions and windows may grant. */
#ifdef VNICD_HAVE_FLUSH
#define VNICD_ACCESS_FLUSH IB_ACCESS_FLUSH_GLOBAL
#else
#define VNICD_ACCESS_FLUSH 0
#endif
#define VNICD_MR_ACCESS (IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE | \
			 IB_ACCESS_REMOTE_READ | IB_ACCESS_REMOTE_ATOMIC | \
			 IB_ACCESS_MW_BIND | VNICD_ACCESS_FLUSH)

struct vnicd_mw {
	struct ib_mw base;
	u32 handle;			/* the first key */
};

/* Separate, so that it outlives a CQ that the device did not release. */
struct vnicd_arm {
	struct vnicd_grave grave;
	__le32 word ____cacheline_aligned;
};

struct vnicd_cq {
	struct ib_cq base;
	refcount_t refs;		/* pending events hold one */
	struct completion unused;
	u32 cqn;
	bool user;
	struct vnicd_arm *arm;
	atomic_t armed;			/* events requested by the consumer */
	struct mutex resize_lock;	/* guards ring (processes), and moderation */
	u16 count;			/* moderation, as the consumer chose it */
	u16 period;			/* microseconds */
	struct vnicd_ring_mem *ring;

	spinlock_t lock;		/* guards polling and the lists below */
	u32 cons;			/* our copy; the one in the header is for the device */
	struct list_head send_qps;	/* kernel QPs, for flushing */
	struct list_head recv_qps;
};

/*
 * One direction of a kernel QP. The device returns a token in its CQEs, not the
 * consumer's wr_id, which usually is a pointer: a forged one must not reach the
 * consumer. Free-running counters; posted - polled is bounded by max.
 */
struct vnicd_wq {
	struct vnicd_ring_mem *ring;
	spinlock_t lock;		/* serialises posting */
	u32 posted;			/* written under lock */
	u32 polled;			/* written under the CQ's lock */
	u32 max_wr;
	u32 max_sge;
	u32 max_inline;
	u64 *wr_ids;			/* by slot; kernel QPs only */
};

/* Slots below this number are visible to the caller. */
static inline u32 vnicd_wq_posted(const struct vnicd_wq *wq)
{
	/* Pairs with the release in vnicd_wq_publish(). */
	return smp_load_acquire(&wq->posted);
}

static inline u32 vnicd_wq_polled(const struct vnicd_wq *wq)
{
	/* Pairs with the release in vnicd_wq_retire(). */
	return smp_load_acquire(&wq->polled);
}

/* Slots below @n may be reused; their wr_id has been read. */
static inline void vnicd_wq_retire(struct vnicd_wq *wq, u32 n)
{
	/* Pairs with the acquire in vnicd_wq_polled(). */
	smp_store_release(&wq->polled, n);
}

struct vnicd_srq {
	struct ib_srq base;
	refcount_t refs;
	struct completion unused;
	u32 srqn;
	bool user;
	struct mutex resize_lock;	/* guards wq.ring and limits (processes) */
	struct vnicd_wq wq;
	/* Completions come in any order: a free list of tokens. */
	u32 *next_token;
	u32 free_token;			/* under wq.lock; VNICD_NO_TOKEN: none */
	u32 num_tokens;
};

#define VNICD_NO_TOKEN	U32_MAX

struct vnicd_qp {
	struct ib_qp base;
	refcount_t refs;
	struct completion unused;
	u32 qpn;
	u32 cookie;			/* distinguishes CQEs of earlier QPs with this number */
	u32 db_slot;
	struct vnicd_engine *engine;
	bool user;
	struct mutex lock;		/* serialises modify and query */
	enum ib_qp_state state;		/* written under lock, read without it */
	bool sig_all;
	struct vnicd_wq sq;
	struct vnicd_wq rq;		/* no ring with an SRQ */
	struct vnicd_srq *srq;
	struct vnicd_cq *send_cq;
	struct vnicd_cq *recv_cq;
	struct list_head send_node;	/* in send_cq->send_qps */
	struct list_head recv_node;
	struct list_head counter_node;	/* guarded by the counter's lock */
};

static inline struct vnicd_dev *to_vd(struct ib_device *ibdev)
{
	return container_of(ibdev, struct vnicd_ibdev, base)->vd;
}

#define VNICD_TO(type, ibtype)						\
static inline struct vnicd_##type *to_v##type(struct ib_##ibtype *p)	\
{									\
	return container_of(p, struct vnicd_##type, base);		\
}
VNICD_TO(pd, pd)
VNICD_TO(ah_obj, ah)
VNICD_TO(mr, mr)
VNICD_TO(mw, mw)
VNICD_TO(cq, cq)
VNICD_TO(srq, srq)
VNICD_TO(qp, qp)
#undef VNICD_TO

/* ODP-2. An on-demand region's table has 4 KiB pages. */
static inline bool vnicd_odp_supported(const struct vnicd_dev *vd)
{
#ifdef VNICD_ODP
	return PAGE_SHIFT == 12 && (vd->lim.odp_rc || vd->lim.odp_uc || vd->lim.odp_ud);
#else
	return false;
#endif
}

static inline bool vnicd_dead(struct vnicd_dev *vd)
{
	return test_bit(VNICD_F_DEAD, &vd->flags);
}

/* The device can access no memory any more: it was reset. */
static inline bool vnicd_quiet(struct vnicd_dev *vd)
{
	return test_bit_acquire(VNICD_F_QUIET, &vd->flags);
}

/* vnicd_config.c */

/* 0 if it is a vnicd HCA with an ABI that this module speaks. */
int vnicd_validate(struct virtio_device *vdev);
/* Reads and checks what probe needs of config space. */
int vnicd_read_config(struct vnicd_dev *vd);

/* vnicd_ivshmem.c */
#ifdef CONFIG_PCI
int vnicd_ivshmem_register(void);
/* Removes its devices, so before the driver above. */
void vnicd_ivshmem_unregister(void);
/* Whether the device is behind ivshmem; its config space is large enough. */
bool vnicd_ivshmem_is(const struct virtio_device *vdev);
#else
static inline int vnicd_ivshmem_register(void) { return 0; }
static inline void vnicd_ivshmem_unregister(void) { }
static inline bool vnicd_ivshmem_is(const struct virtio_device *vdev) { return false; }
#endif

/* vnicd_main.c */

/* The device is lost: logs why, once, and makes everything fail fast. Any context. */
void vnicd_fail(struct vnicd_dev *vd, const char *why);
/* The same for one that does not answer: it has more time until it is reset. */
void vnicd_time_out(struct vnicd_dev *vd);
/*
 * Fails the device, if it is not dead yet, and waits until it can access no memory
 * any more (TR-5). Bounded by fence_timeout_ms and the time that the reset takes.
 * May be called with any lock but reset_lock, also from reclaim.
 */
void vnicd_fence(struct vnicd_dev *vd, const char *why);
/* Schedules a check of config space: link, generation. Any context. */
void vnicd_check_config(struct vnicd_dev *vd);
/* A lost device has answered: resets it at once, then probes it. Any context. */
void vnicd_revive(struct vnicd_dev *vd);
void vnicd_bury(struct vnicd_dev *vd, struct vnicd_grave *grave,
		void (*release)(struct vnicd_grave *grave));

/* vnicd_cmd.c: all may sleep and return 0 or an errno. */
int vnicd_cmd_query_device(struct vnicd_dev *vd, struct vnicd_limits *lim);
int vnicd_cmd_query_port(struct vnicd_dev *vd, struct vnicd_port_attr *attr);
int vnicd_cmd_query_stats(struct vnicd_dev *vd, u64 *values, unsigned int n);
int vnicd_cmd_count_qp(struct vnicd_dev *vd, u32 qpn, u32 flags, u64 *values);
int vnicd_cmd_set_gid(struct vnicd_dev *vd, u16 index, u8 type, u16 vlan,
		      const u8 *smac, const union ib_gid *gid);
int vnicd_cmd_clear_gid(struct vnicd_dev *vd, u16 index);
int vnicd_cmd_set_doorbells(struct vnicd_dev *vd, u32 engine,
			    struct vnicd_doorbells *db);
int vnicd_cmd_set_ah_table(struct vnicd_dev *vd, struct vnicd_ah *table,
			   u32 entries, size_t size);
int vnicd_cmd_create_pd(struct vnicd_dev *vd, u32 *pdn);
int vnicd_cmd_create_cq(struct vnicd_dev *vd, struct vnicd_ring_mem *ring,
			__le32 *arm, u32 ceq, u32 *cqn);
int vnicd_cmd_modify_cq(struct vnicd_dev *vd, u32 cqn, u16 count, u16 period);
int vnicd_cmd_resize_cq(struct vnicd_dev *vd, u32 cqn, struct vnicd_ring_mem *ring);
int vnicd_cmd_create_srq(struct vnicd_dev *vd, u32 pdn, u32 max_sge, u32 limit,
			 struct vnicd_ring_mem *ring, u32 *srqn);
int vnicd_cmd_modify_srq(struct vnicd_dev *vd, u32 srqn, u32 flags, u32 limit,
			 struct vnicd_ring_mem *ring);
int vnicd_cmd_query_srq(struct vnicd_dev *vd, u32 srqn, u32 *limit);
int vnicd_cmd_create_qp(struct vnicd_dev *vd, struct vnicd_create_qp *cmd,
			struct vnicd_ring_mem *sq, struct vnicd_ring_mem *rq,
			struct vnicd_create_qp_resp *resp);
int vnicd_cmd_modify_qp(struct vnicd_dev *vd, const struct vnicd_qp_attr *attr);
int vnicd_cmd_query_qp(struct vnicd_dev *vd, u32 qpn, struct vnicd_qp_attr *attr);
int vnicd_cmd_create_mr(struct vnicd_dev *vd, const struct vnicd_create_mr *cmd,
			struct vnicd_create_mr_resp *resp);
int vnicd_cmd_set_mtt(struct vnicd_dev *vd, __le64 *pas, u32 handle, u64 first, u32 count);
int vnicd_cmd_set_mtt_short(struct vnicd_dev *vd, struct vnicd_set_mtt *buf, u32 handle,
			    u64 first, u32 count, u16 flags);
/*
 * -EBUSY: windows are bound to it; it stays valid. Otherwise 0; @released as
 * the result of vnicd_cmd_destroy().
 */
int vnicd_cmd_destroy_mr(struct vnicd_dev *vd, u32 handle, bool *released);
int vnicd_cmd_create_mw(struct vnicd_dev *vd, u32 pdn, u32 type, u32 *handle);
/*
 * These two allocate nothing. A slot is reserved for the first, which returns when the
 * device does not use the pages any more, whatever it answers. @exec of the second:
 * VNICD_EXEC_*.
 */
void vnicd_cmd_clear_mtt(struct vnicd_dev *vd, u32 handle, u64 first, u64 count);
int vnicd_cmd_resume_fault(struct vnicd_dev *vd, u32 token, u32 status, unsigned int exec);
int vnicd_cmd_mcast(struct vnicd_dev *vd, bool attach, u32 qpn,
		    const union ib_gid *gid);
/*
 * Destroys object @handle by @opcode. True: the device has released the
 * object's memory. False: unknown; bury the memory.
 */
bool vnicd_cmd_destroy(struct vnicd_dev *vd, u16 opcode, u32 handle);

/* vnicd_ring.c */
int vnicd_ring_elems(u32 max_wr);
/*
 * A ring for @num_elems (a power of two) elements of @elem_size bytes (rounded
 * up to a power of two). With @udata it gets an mmap offset in that process's
 * context.
 */
struct vnicd_ring_mem *vnicd_ring_create(struct vnicd_dev *vd, u32 num_elems,
					 u32 elem_size, struct ib_udata *udata);
/* @released: the device has released it. @ring may be NULL. */
void vnicd_ring_destroy(struct vnicd_ring_mem *ring, bool released);
void vnicd_ring_describe(const struct vnicd_ring_mem *ring, struct vnicd_ring *out);
void vnicd_ring_pages(const struct vnicd_ring_mem *ring, __le64 *pas);
void vnicd_ring_mminfo(const struct vnicd_ring_mem *ring, struct mminfo *mi);
int vnicd_mmap(struct ib_ucontext *ctx, struct vm_area_struct *vma);
void vnicd_mmap_free(struct rdma_user_mmap_entry *entry);

static inline void *vnicd_ring_elem(const struct vnicd_ring_mem *ring, u32 index)
{
	return ring->buf->data +
	       ((size_t)(index & (ring->num_elems - 1)) << ring->log2_elem_size);
}

/* vnicd_eq.c */
void vnicd_eq_setup(struct vnicd_dev *vd, struct vnicd_eq *eq, bool async);
int vnicd_eq_start(struct vnicd_eq *eq, struct virtqueue *vq, bool async);
void vnicd_eq_stop(struct vnicd_eq *eq);
void vnicd_eq_free(struct vnicd_eq *eq);
void vnicd_aeq_irq(struct virtqueue *vq);
void vnicd_ceq_irq(struct virtqueue *vq);

/* vnicd_netdev.c */
void vnicd_netdev_init(struct vnicd_dev *vd);
int vnicd_netdev_start(struct vnicd_dev *vd);
void vnicd_netdev_stop(struct vnicd_dev *vd);
void vnicd_port_update(struct vnicd_dev *vd);
struct net_device *vnicd_get_netdev(struct ib_device *ibdev, u32 port);
int vnicd_query_port(struct ib_device *ibdev, u32 port, struct ib_port_attr *attr);

/* vnicd_verbs.c */
int vnicd_ib_register(struct vnicd_dev *vd);
void vnicd_ib_unregister(struct vnicd_dev *vd);
int vnicd_udata_empty(struct ib_udata *udata);
void vnicd_fill_av(struct vnicd_av *av, const struct rdma_ah_attr *attr);
int vnicd_gid_l2(const struct rdma_ah_attr *attr, u16 *vlan);

/* vnicd_verbs_ah.c */
int vnicd_ah_table_init(struct vnicd_dev *vd);
void vnicd_ah_table_free(struct vnicd_dev *vd);
int vnicd_create_ah(struct ib_ah *ibah, struct rdma_ah_init_attr *init,
		    struct ib_udata *udata);
int vnicd_query_ah(struct ib_ah *ibah, struct rdma_ah_attr *attr);
int vnicd_destroy_ah(struct ib_ah *ibah, u32 flags);

/* vnicd_verbs_mr.c */
struct ib_mr *vnicd_get_dma_mr(struct ib_pd *ibpd, int access);
#ifdef VNICD_HAVE_DMAH
struct ib_mr *vnicd_reg_user_mr(struct ib_pd *ibpd, u64 start, u64 length,
				u64 iova, int access, struct ib_dmah *dmah,
				struct ib_udata *udata);
#else
struct ib_mr *vnicd_reg_user_mr(struct ib_pd *ibpd, u64 start, u64 length,
				u64 iova, int access, struct ib_udata *udata);
#endif
struct ib_mr *vnicd_alloc_mr(struct ib_pd *ibpd, enum ib_mr_type type, u32 max_num_sg);
int vnicd_map_mr_sg(struct ib_mr *ibmr, struct scatterlist *sg, int sg_nents,
		    unsigned int *sg_offset);
int vnicd_dereg_mr(struct ib_mr *ibmr, struct ib_udata *udata);
int vnicd_alloc_mw(struct ib_mw *ibmw, struct ib_udata *udata);
int vnicd_dealloc_mw(struct ib_mw *ibmw);
int vnicd_advise_mr(struct ib_pd *ibpd, enum ib_uverbs_advise_mr_advice advice,
		    u32 flags, struct ib_sge *sgl, u32 num_sge,
		    struct uverbs_attr_bundle *attrs);
int vnicd_fill_stat_mr_entry(struct sk_buff *msg, struct ib_mr *ibmr);

/* vnicd_verbs_cq.c */
int vnicd_create_cq(struct ib_cq *ibcq, const struct ib_cq_init_attr *attr,
		    vnicd_cq_attrs attrs);
int vnicd_modify_cq(struct ib_cq *ibcq, u16 count, u16 period);
#ifdef VNICD_HAVE_RESIZE_USER_CQ
int vnicd_resize_cq(struct ib_cq *ibcq, unsigned int cqe, struct ib_udata *udata);
#else
int vnicd_resize_cq(struct ib_cq *ibcq, int cqe, struct ib_udata *udata);
#endif
int vnicd_destroy_cq(struct ib_cq *ibcq, struct ib_udata *udata);
int vnicd_poll_cq(struct ib_cq *ibcq, int num, struct ib_wc *wc);
int vnicd_req_notify_cq(struct ib_cq *ibcq, enum ib_cq_notify_flags flags);
/* Completion event of this CQ: notifies a waiting consumer. */
void vnicd_cq_event(struct vnicd_cq *cq);
void vnicd_cq_clean(struct vnicd_cq *cq, struct vnicd_qp *qp);
struct vnicd_cq *vnicd_cq_get(struct vnicd_dev *vd, u32 cqn);
void vnicd_cq_put(struct vnicd_cq *cq);
void vnicd_flush_work(struct work_struct *work);

/* vnicd_verbs_srq.c */
int vnicd_create_srq(struct ib_srq *ibsrq, struct ib_srq_init_attr *init,
		     struct ib_udata *udata);
int vnicd_modify_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr,
		     enum ib_srq_attr_mask mask, struct ib_udata *udata);
int vnicd_query_srq(struct ib_srq *ibsrq, struct ib_srq_attr *attr);
int vnicd_destroy_srq(struct ib_srq *ibsrq, struct ib_udata *udata);
bool vnicd_srq_complete(struct vnicd_srq *srq, u32 token, u64 *wr_id);
struct vnicd_srq *vnicd_srq_get(struct vnicd_dev *vd, u32 srqn);
void vnicd_srq_put(struct vnicd_srq *srq);

/* vnicd_verbs_qp.c */
int vnicd_create_qp(struct ib_qp *ibqp, struct ib_qp_init_attr *init,
		    struct ib_udata *udata);
int vnicd_modify_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
		    struct ib_udata *udata);
int vnicd_query_qp(struct ib_qp *ibqp, struct ib_qp_attr *attr, int mask,
		   struct ib_qp_init_attr *init);
int vnicd_destroy_qp(struct ib_qp *ibqp, struct ib_udata *udata);
struct vnicd_qp *vnicd_qp_get(struct vnicd_dev *vd, u32 qpn);
void vnicd_qp_put(struct vnicd_qp *qp);

/* vnicd_restrack.c */
int vnicd_fill_res_cq_entry(struct sk_buff *msg, struct ib_cq *ibcq);
int vnicd_fill_res_mr_entry(struct sk_buff *msg, struct ib_mr *ibmr);
int vnicd_fill_res_qp_entry(struct sk_buff *msg, struct ib_qp *ibqp);

/* vnicd_counter.c */
extern const struct ib_device_ops vnicd_counter_ops;	/* devices with VNICD_CAP_COUNT_QP */
struct rdma_hw_stats *vnicd_alloc_hw_port_stats(struct ib_device *ibdev, u32 port);
int vnicd_get_hw_stats(struct ib_device *ibdev, struct rdma_hw_stats *stats, u32 port, int index);

/* vnicd_flush.c */
void vnicd_flush_processes(struct vnicd_dev *vd);

/* vnicd_verbs_post.c */

/*
 * Tokens, the wr_id of kernel work requests as the device sees it: bits 63..62
 * kind, 61..32 the QP's cookie, 31..0 counter or SRQ token. The cookie of SRQ
 * receives is 0, because the QP is not known when they are posted.
 */
enum vnicd_token_kind {
	VNICD_TOKEN_SEND = 1,
	VNICD_TOKEN_RECV = 2,
	VNICD_TOKEN_SRQ = 3,
};

#define VNICD_COOKIE_MASK 0x3fffffffU

static inline u64 vnicd_token(enum vnicd_token_kind kind, u32 cookie, u32 n)
{
	return (u64)kind << 62 | (u64)(cookie & VNICD_COOKIE_MASK) << 32 | n;
}

int vnicd_post_send(struct ib_qp *ibqp, const struct ib_send_wr *wr,
		    const struct ib_send_wr **bad_wr);
int vnicd_post_recv(struct ib_qp *ibqp, const struct ib_recv_wr *wr,
		    const struct ib_recv_wr **bad_wr);
int vnicd_post_srq_recv(struct ib_srq *ibsrq, const struct ib_recv_wr *wr,
			const struct ib_recv_wr **bad_wr);

#endif /* VNICD_H */
