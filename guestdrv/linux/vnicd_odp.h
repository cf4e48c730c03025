/* SPDX-License-Identifier: GPL-2.0 */
/*
 * On-demand paging: regions whose pages are present while the device needs them
 * and the kernel does not reclaim them. See vnicd_odp.c (pages) and
 * vnicd_fault.c (workers of each process, and their limits).
 */
#ifndef VNICD_ODP_H
#define VNICD_ODP_H

#include <linux/atomic.h>
#include <linux/list.h>
#include <linux/refcount.h>
#include <linux/rwsem.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

struct ib_pd;
struct mm_struct;
struct vnicd_create_mr;
struct vnicd_dev;
struct vnicd_event;
struct vnicd_fault;
struct vnicd_pager;

/*
 * One region. It may outlive its registration: deregistration does not wait for
 * workers that are fetching pages. They then find vd == NULL.
 */
struct vnicd_odp {
	refcount_t refs;		/* the registration and its workers */
	struct vnicd_pager *pager;	/* of the process */
	struct mm_struct *mm;		/* the pager's; grabbed, not gotten */
	const struct ib_pd *pd;		/* for comparison only */
	u64 iova;			/* first VA of the device */
	u64 length;			/* bytes */
	unsigned long start;		/* its address in the process */
	u32 handle;
	u32 lkey;
	u32 rkey;
	bool writable;

	/*
	 * Held for reading to send a command about the region, for writing to
	 * end the region, until the device has confirmed. Taken by the MMU
	 * notifier, so no memory is allocated while it is held.
	 */
	struct rw_semaphore gate;
	struct vnicd_dev *vd;		/* NULL: deregistered, and all faults answered */
	bool released;			/* the device has no pages and gets no more */

	struct xarray parts;		/* struct vnicd_part, by address */
	atomic_t num_idle;		/* parts that could be dropped */

	spinlock_t lock;		/* guards the fields below */
	bool closed;
	struct list_head faults;	/* faults that the device waits for */

	/* In pages, as other drivers count them. */
	atomic64_t page_faults;
	atomic64_t page_invalidations;
	atomic64_t page_prefetches;
};

/* How to fetch pages. */
#define VNICD_FETCH_WRITE	(1U << 0)	/* they will be written to */
#define VNICD_FETCH_PRESENT	(1U << 1)	/* only what is present */
#define VNICD_FETCH_PREFETCH	(1U << 2)	/* no waiter; all or an error */

#ifdef VNICD_ODP

/* vnicd_odp.c */

/*
 * Allocates a region of the calling process, not yet known to the device, and
 * fills in its description for the device. Implicit: start 0, length U64_MAX.
 */
struct vnicd_odp *vnicd_odp_alloc(struct vnicd_dev *vd, const struct ib_pd *pd,
				  u64 start, u64 length, u64 iova, bool writable,
				  struct vnicd_create_mr *cmd);
/* The device knows the region by its handle from now on: events may come. */
int vnicd_odp_publish(struct vnicd_odp *odp);
/*
 * Ends the region: the device releases every page, pending faults are answered. The
 * only error is -EBUSY: memory windows are bound to the region; it stays valid.
 */
int vnicd_odp_destroy(struct vnicd_odp *odp);
/* Looks up by key, with a reference; NULL: no such region. May be called in verbs and works. */
struct vnicd_odp *vnicd_odp_get(struct vnicd_dev *vd, u32 key);
void vnicd_odp_put(struct vnicd_odp *odp);
/*
 * Gives the device the pages from @va on. 0 if at least the first one is
 * present (with VNICD_FETCH_PREFETCH: all that exist), -EAGAIN or -ENOMEM if it
 * may be present at the next attempt, another errno if it never will. Sleeps until
 * the page fault is handled.
 *
 * @fault: the event that needs them, or NULL. It is answered together with the last
 * page, if the device supports that and no page was missing.
 */
int vnicd_odp_fetch(struct vnicd_odp *odp, u64 va, u64 length, unsigned int how,
		    struct vnicd_fault *fault);

/* vnicd_fault.c */
int vnicd_fault_init(void);
/* Waits for the workers, which have been interrupted. */
void vnicd_fault_exit(void);
void vnicd_fault_start(struct vnicd_dev *vd);
/* Events have stopped, and no region exists. */
void vnicd_fault_stop(struct vnicd_dev *vd);
void vnicd_fault_event(struct vnicd_dev *vd, const struct vnicd_event *event);
u32 vnicd_fault_token(const struct vnicd_fault *fault);
/* SET_MTT has answered the fault: it must not be answered again. The caller holds the gate. */
void vnicd_fault_answered(struct vnicd_fault *fault);
/* Answers the pending faults of a closed region. The caller does not hold the gate. */
void vnicd_fault_abandon(struct vnicd_odp *odp, struct vnicd_dev *vd);
/* Interrupts the workers of a closed region in any wait. */
void vnicd_fault_interrupt(struct vnicd_odp *odp);
/* Fetches in the background, unless too many prefetches are pending. */
void vnicd_fault_prefetch(struct vnicd_odp *odp, u64 va, u64 length, unsigned int how);
struct vnicd_pager *vnicd_pager_get(struct mm_struct *mm);
void vnicd_pager_put(struct vnicd_pager *pager);
/* Uses the address space for a fetch. False: its processes have exited. */
bool vnicd_pager_begin(struct vnicd_pager *pager);
void vnicd_pager_end(struct vnicd_pager *pager);

#else

static inline struct vnicd_odp *vnicd_odp_alloc(struct vnicd_dev *vd, const struct ib_pd *pd,
						u64 start, u64 length, u64 iova,
						bool writable, struct vnicd_create_mr *cmd)
{
	return ERR_PTR(-EOPNOTSUPP);
}

static inline int vnicd_odp_publish(struct vnicd_odp *odp) { return -EOPNOTSUPP; }
static inline int vnicd_odp_destroy(struct vnicd_odp *odp) { return 0; }
static inline struct vnicd_odp *vnicd_odp_get(struct vnicd_dev *vd, u32 key) { return NULL; }
static inline void vnicd_odp_put(struct vnicd_odp *odp) {}

static inline int vnicd_odp_fetch(struct vnicd_odp *odp, u64 va, u64 length, unsigned int how,
				  struct vnicd_fault *fault)
{
	return -EOPNOTSUPP;
}

static inline int vnicd_fault_init(void) { return 0; }
static inline void vnicd_fault_exit(void) {}
static inline void vnicd_fault_start(struct vnicd_dev *vd) {}
static inline void vnicd_fault_stop(struct vnicd_dev *vd) {}
static inline void vnicd_fault_event(struct vnicd_dev *vd, const struct vnicd_event *event) {}

static inline void vnicd_fault_prefetch(struct vnicd_odp *odp, u64 va, u64 length,
					unsigned int how) {}

#endif /* VNICD_ODP */

#endif /* VNICD_ODP_H */
