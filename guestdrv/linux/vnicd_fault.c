// SPDX-License-Identifier: GPL-2.0
/*
 * Page fault events: the workers that serve them, and their limits.
 *
 *	event queue --> region's process (struct vnicd_pager)
 *			  up to VNICD_PAGER_RUNNING are served, the others wait
 *			    vnicd_odp_fetch(): SET_MTT, which resumes the QP
 *			    no pages: RESUME_FAULT
 *	            \-> no region: RESUME_FAULT with EFAULT
 *
 * A fault may never end: it may depend on a userfaultfd pager that does not
 * answer. So each process has a share of the workers (one worker if few are
 * left), and no call waits for a fault: deregistering a region answers its faults
 * and interrupts the workers, so that they release the address space. Only SIGKILL
 * interrupts their sleep, and a kernel thread may allow it.
 *
 * A worker keeps the address space, and with it the mappings of rings and thus the
 * file by which the process has its regions. So when the process was killed nothing
 * deregisters them, as long as its pager is elsewhere and alive. The workers of an
 * address space that nobody else uses are therefore interrupted too (vnicd_pager_watch()).
 *
 * Each event is answered exactly once, by SET_MTT or RESUME_FAULT. The context
 * that removes it from its list answers it: the worker, with the gate held for
 * reading, or the deregistration.
 *
 * HF-2: "invalid" is the answer only for an address that really is. What may pass,
 * such as a shortage of memory or of the device's entries, is answered with "try
 * again": the device then raises another event.
 */
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "vnicd.h"

/* Faults of one process that are served at once: they may all be stuck. */
#define VNICD_PAGER_RUNNING	16
/* Faults of all processes that are served at once: beyond half of it a process gets one. */
#define VNICD_WORKERS		WQ_MAX_ACTIVE
/* Faults of one process that may wait: several of each QP of a large device. */
#define VNICD_PAGER_WAITING	65536
/* Prefetches of one process that are served at once, in addition, and that may wait. */
#define VNICD_PAGER_PREFETCHING	4
#define VNICD_PAGER_PREFETCHES	64
/* Events for no region: there are a few when regions end, not thousands. */
#define VNICD_MAX_STRAYS	4096

/* A fault, or a prefetch in the background, which has no waiter. */
struct vnicd_fault {
	struct work_struct work;
	struct list_head queue;		/* in vnicd_pager.waiting or .prefetches */
	struct list_head list;		/* in vnicd_odp.faults or vnicd_dev.strays */
	struct vnicd_odp *odp;		/* with a reference */
	u64 va;
	u64 length;
	unsigned int how;
	u32 token;
};

/* A thread that fetches pages for a region. */
struct vnicd_worker {
	struct list_head list;		/* in vnicd_pager.workers */
	const struct vnicd_odp *odp;
	struct task_struct *task;
};

/* One per address space that has on-demand regions. */
struct vnicd_pager {
	refcount_t refs;		/* its regions */
	struct mm_struct *mm;		/* grabbed */
	atomic_t fetches;		/* of the users of mm */
	bool exited;			/* its processes: mm has no other users */
	struct delayed_work watch;	/* pending while there are workers */
	spinlock_t lock;		/* guards the fields below */
	unsigned int running;
	unsigned int num_waiting;
	struct list_head waiting;
	unsigned int prefetching;
	unsigned int num_prefetches;
	struct list_head prefetches;
	struct list_head workers;
};

static struct workqueue_struct *vnicd_fault_wq;
static atomic_t vnicd_workers;		/* sum of vnicd_pager.running and .prefetching */
static DEFINE_MUTEX(vnicd_pagers_lock);
static DEFINE_XARRAY(vnicd_pagers);	/* by address of the mm */

static void vnicd_pager_watch(struct work_struct *work)
{
	struct vnicd_pager *pager = container_of(to_delayed_work(work), struct vnicd_pager, watch);
	struct vnicd_worker *worker;

	spin_lock(&pager->lock);
	if (atomic_read(&pager->mm->mm_users) <= atomic_read(&pager->fetches))
		WRITE_ONCE(pager->exited, true);
	if (pager->exited)
		list_for_each_entry(worker, &pager->workers, list)
			send_sig(SIGKILL, worker->task, 1);
	if (!list_empty(&pager->workers))
		queue_delayed_work(system_long_wq, &pager->watch, HZ);
	spin_unlock(&pager->lock);
}

bool vnicd_pager_begin(struct vnicd_pager *pager)
{
	if (READ_ONCE(pager->exited) || !mmget_not_zero(pager->mm))
		return false;
	/* Never more than the users of the address space that they are. */
	atomic_inc(&pager->fetches);
	return true;
}

void vnicd_pager_end(struct vnicd_pager *pager)
{
	atomic_dec(&pager->fetches);
	mmput(pager->mm);
}

struct vnicd_pager *vnicd_pager_get(struct mm_struct *mm)
{
	struct vnicd_pager *pager;

	mutex_lock(&vnicd_pagers_lock);
	pager = xa_load(&vnicd_pagers, (unsigned long)mm);
	if (pager) {
		refcount_inc(&pager->refs);
		goto out;
	}
	pager = kzalloc(sizeof(*pager), GFP_KERNEL);
	if (!pager)
		goto out;
	refcount_set(&pager->refs, 1);
	pager->mm = mm;
	atomic_set(&pager->fetches, 0);
	INIT_DELAYED_WORK(&pager->watch, vnicd_pager_watch);
	spin_lock_init(&pager->lock);
	INIT_LIST_HEAD(&pager->waiting);
	INIT_LIST_HEAD(&pager->prefetches);
	INIT_LIST_HEAD(&pager->workers);
	if (xa_insert(&vnicd_pagers, (unsigned long)mm, pager, GFP_KERNEL)) {
		kfree(pager);
		pager = NULL;
		goto out;
	}
	mmgrab(mm);
out:
	mutex_unlock(&vnicd_pagers_lock);
	return pager;
}

void vnicd_pager_put(struct vnicd_pager *pager)
{
	if (!refcount_dec_and_mutex_lock(&pager->refs, &vnicd_pagers_lock))
		return;
	xa_erase(&vnicd_pagers, (unsigned long)pager->mm);
	mutex_unlock(&vnicd_pagers_lock);
	cancel_delayed_work_sync(&pager->watch);
	mmdrop(pager->mm);
	kfree(pager);
}

/*
 * Takes one of the places for running faults. A process without one always gets one.
 * Prefetches have places of their own, because they may be stuck as well.
 */
static bool vnicd_pager_enter(struct vnicd_pager *pager, bool prefetch)
{
	bool few = atomic_read(&vnicd_workers) >= VNICD_WORKERS / 2;

	if (prefetch) {
		if (few || pager->prefetching >= VNICD_PAGER_PREFETCHING)
			return false;
		pager->prefetching++;
	} else {
		if (pager->running >= (few ? 1 : VNICD_PAGER_RUNNING))
			return false;
		pager->running++;
	}
	atomic_inc(&vnicd_workers);
	return true;
}

/* False: too many faults wait already, or a prefetch would wait for none of them. */
static bool vnicd_pager_submit(struct vnicd_pager *pager, struct vnicd_fault *fault)
{
	bool prefetch = fault->how & VNICD_FETCH_PREFETCH;
	bool start = false, taken = true;

	spin_lock(&pager->lock);
	if (vnicd_pager_enter(pager, prefetch)) {
		start = true;
	} else if (prefetch && pager->num_prefetches < VNICD_PAGER_PREFETCHES &&
		   pager->running + pager->prefetching) {
		pager->num_prefetches++;
		list_add_tail(&fault->queue, &pager->prefetches);
	} else if (!prefetch && pager->num_waiting < VNICD_PAGER_WAITING) {
		pager->num_waiting++;
		list_add_tail(&fault->queue, &pager->waiting);
	} else {
		taken = false;
	}
	spin_unlock(&pager->lock);
	if (start)
		queue_work(vnicd_fault_wq, &fault->work);
	return taken;
}

static void vnicd_pager_start_locked(struct vnicd_pager *pager, struct list_head *from,
				     unsigned int *num, bool prefetch)
{
	struct vnicd_fault *fault, *next;

	list_for_each_entry_safe(fault, next, from, queue) {
		if (!vnicd_pager_enter(pager, prefetch))
			break;
		list_del(&fault->queue);
		--*num;
		queue_work(vnicd_fault_wq, &fault->work);
	}
}

/* A fault was served: starts others. Without any, waiting prefetches start in any case. */
static void vnicd_pager_next(struct vnicd_pager *pager, bool prefetch)
{
	struct vnicd_fault *fault;

	spin_lock(&pager->lock);
	if (prefetch)
		pager->prefetching--;
	else
		pager->running--;
	atomic_dec(&vnicd_workers);
	vnicd_pager_start_locked(pager, &pager->waiting, &pager->num_waiting, false);
	vnicd_pager_start_locked(pager, &pager->prefetches, &pager->num_prefetches, true);
	fault = list_first_entry_or_null(&pager->prefetches, struct vnicd_fault, queue);
	if (fault && !pager->running && !pager->prefetching) {
		list_del(&fault->queue);
		pager->num_prefetches--;
		pager->prefetching++;
		atomic_inc(&vnicd_workers);
		queue_work(vnicd_fault_wq, &fault->work);
	}
	spin_unlock(&pager->lock);
}

/* The answer for an errno: the device retries transient errors (HF-2). */
static u32 vnicd_fault_status(int err)
{
	switch (err) {
	case 0:
	case -EAGAIN:
	case -ENOMEM:
		return VNICD_OK;
	default:
		return VNICD_EFAULT;
	}
}

u32 vnicd_fault_token(const struct vnicd_fault *fault)
{
	return fault->token;
}

/* True: it was pending, and the caller answers it. */
static bool vnicd_fault_take(struct vnicd_fault *fault)
{
	bool pending;

	spin_lock(&fault->odp->lock);
	pending = !list_empty(&fault->list);
	list_del_init(&fault->list);
	spin_unlock(&fault->odp->lock);
	return pending;
}

static void vnicd_fault_put_back(struct vnicd_fault *fault)
{
	spin_lock(&fault->odp->lock);
	list_add_tail(&fault->list, &fault->odp->faults);
	spin_unlock(&fault->odp->lock);
}

void vnicd_fault_answered(struct vnicd_fault *fault)
{
	vnicd_fault_take(fault);
}

/* Does nothing if SET_MTT was the answer or the region has ended. */
static void vnicd_fault_answer(struct vnicd_odp *odp, struct vnicd_fault *fault, int err)
{
	u32 status = vnicd_fault_status(err);
	int ret;

	for (;;) {
		ret = 0;
		down_read(&odp->gate);
		if (odp->vd && vnicd_fault_take(fault)) {
			ret = vnicd_cmd_resume_fault(odp->vd, fault->token, status,
						     VNICD_EXEC_NO_SLOT_WAIT);
			if (ret == -ENOBUFS)
				vnicd_fault_put_back(fault);
		}
		up_read(&odp->gate);
		if (ret != -ENOBUFS)
			return;
		/* Without the gate: slots become free, or the device dies. */
		usleep_range(50, 100);
	}
}

/* vnicd_fault_interrupt() can interrupt the fetch. */
static int vnicd_fault_fetch(struct vnicd_odp *odp, struct vnicd_fault *fault)
{
	bool prefetch = fault->how & VNICD_FETCH_PREFETCH;
	struct vnicd_worker me = { .odp = odp, .task = current };
	struct vnicd_pager *pager = odp->pager;
	int err = -ECANCELED;

	allow_kernel_signal(SIGKILL);
	spin_lock(&pager->lock);
	list_add(&me.list, &pager->workers);
	queue_delayed_work(system_long_wq, &pager->watch, HZ);
	spin_unlock(&pager->lock);

	/* Either this sees that the region is closed, or it will be interrupted. */
	if (!READ_ONCE(odp->closed))
		err = vnicd_odp_fetch(odp, fault->va, fault->length, fault->how,
				      prefetch ? NULL : fault);

	spin_lock(&pager->lock);
	list_del(&me.list);
	spin_unlock(&pager->lock);
	/* No signal can come now: restore the thread's state for other work. */
	disallow_signal(SIGKILL);
	flush_signals(current);
	return err;
}

void vnicd_fault_interrupt(struct vnicd_odp *odp)
{
	struct vnicd_worker *worker;

	spin_lock(&odp->pager->lock);
	list_for_each_entry(worker, &odp->pager->workers, list)
		if (worker->odp == odp)
			send_sig(SIGKILL, worker->task, 1);
	spin_unlock(&odp->pager->lock);
}

static void vnicd_fault_work(struct work_struct *work)
{
	struct vnicd_fault *fault = container_of(work, struct vnicd_fault, work);
	bool prefetch = fault->how & VNICD_FETCH_PREFETCH;
	struct vnicd_odp *odp = fault->odp;
	int err;

	err = vnicd_fault_fetch(odp, fault);
	if (!prefetch)
		vnicd_fault_answer(odp, fault, err);
	kfree(fault);
	vnicd_pager_next(odp->pager, prefetch);
	vnicd_odp_put(odp);
}

/* Takes over the caller's reference on @odp, if it succeeds. */
static struct vnicd_fault *vnicd_fault_alloc(struct vnicd_odp *odp, u64 va, u64 length,
					     unsigned int how, gfp_t gfp)
{
	struct vnicd_fault *fault = kmalloc(sizeof(*fault), gfp);

	if (!fault)
		return NULL;
	INIT_WORK(&fault->work, vnicd_fault_work);
	INIT_LIST_HEAD(&fault->queue);
	INIT_LIST_HEAD(&fault->list);
	fault->odp = odp;
	fault->va = va;
	fault->length = length;
	fault->how = how;
	fault->token = 0;
	return fault;
}

void vnicd_fault_prefetch(struct vnicd_odp *odp, u64 va, u64 length, unsigned int how)
{
	struct vnicd_fault *fault;

	how |= VNICD_FETCH_PREFETCH;
	fault = vnicd_fault_alloc(odp, va, length, how, GFP_KERNEL | __GFP_NOWARN);
	if (!fault)
		return;
	refcount_inc(&odp->refs);
	if (!vnicd_pager_submit(odp->pager, fault)) {
		vnicd_odp_put(odp);
		kfree(fault);
	}
}

void vnicd_fault_abandon(struct vnicd_odp *odp, struct vnicd_dev *vd)
{
	struct vnicd_fault *fault;
	u32 token = 0;

	for (;;) {
		spin_lock(&odp->lock);
		fault = list_first_entry_or_null(&odp->faults, struct vnicd_fault, list);
		if (fault) {
			token = fault->token;
			/* The fault itself belongs to its worker. */
			list_del_init(&fault->list);
		}
		spin_unlock(&odp->lock);
		if (!fault)
			return;
		vnicd_cmd_resume_fault(vd, token, VNICD_EFAULT, 0);
	}
}

static void vnicd_stray_work(struct work_struct *work)
{
	struct vnicd_dev *vd = container_of(work, struct vnicd_dev, stray_work);
	struct vnicd_fault *fault;

	for (;;) {
		spin_lock(&vd->stray_lock);
		fault = list_first_entry_or_null(&vd->strays, struct vnicd_fault, list);
		if (fault) {
			list_del(&fault->list);
			vd->num_strays--;
		}
		spin_unlock(&vd->stray_lock);
		if (!fault)
			return;
		vnicd_cmd_resume_fault(vd, fault->token, VNICD_EFAULT, 0);
		kfree(fault);
	}
}

/* Not in the caller's context, which also watches the device's state. */
static void vnicd_fault_stray(struct vnicd_dev *vd, struct vnicd_fault *fault)
{
	bool many;

	spin_lock(&vd->stray_lock);
	list_add_tail(&fault->list, &vd->strays);
	many = ++vd->num_strays > VNICD_MAX_STRAYS;
	spin_unlock(&vd->stray_lock);
	if (many)
		vnicd_fail(vd, "it reports too many page faults outside of regions");
	queue_work(vnicd_fault_wq, &vd->stray_work);
}

/* Either lists the fault with the region and gives it to a worker, or does neither. */
static bool vnicd_fault_start_one(struct vnicd_odp *odp, struct vnicd_fault *fault)
{
	bool open;

	spin_lock(&odp->lock);
	open = !odp->closed;
	if (open)
		list_add_tail(&fault->list, &odp->faults);
	spin_unlock(&odp->lock);
	if (!open)
		return false;
	if (vnicd_pager_submit(odp->pager, fault))
		return true;
	vnicd_fault_answer(odp, fault, -EAGAIN);
	kfree(fault);
	vnicd_odp_put(odp);
	return true;
}

void vnicd_fault_event(struct vnicd_dev *vd, const struct vnicd_event *event)
{
	u32 access = le32_to_cpu(event->access);
	bool write = access & (IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE |
			       IB_ACCESS_REMOTE_ATOMIC);
	u64 length = clamp_t(u64, le64_to_cpu(event->length), 1, SZ_1M);
	struct vnicd_odp *odp = vnicd_odp_get(vd, le32_to_cpu(event->key));
	struct vnicd_fault *fault;

	/*
	 * Not behind reclaim, and other events must not wait either: without memory the
	 * device is told to try again.
	 */
	fault = vnicd_fault_alloc(odp, le64_to_cpu(event->va), length,
				  write ? VNICD_FETCH_WRITE : 0, GFP_NOWAIT | __GFP_NOWARN);
	if (!fault) {
		if (odp)
			vnicd_odp_put(odp);
		usleep_range(1000, 2000);
		vnicd_cmd_resume_fault(vd, le32_to_cpu(event->token), VNICD_OK, 0);
		return;
	}
	fault->token = le32_to_cpu(event->token);
	if (odp && !(write && !odp->writable) && vnicd_fault_start_one(odp, fault))
		return;
	if (odp)
		vnicd_odp_put(odp);
	vnicd_fault_stray(vd, fault);
}

void vnicd_fault_start(struct vnicd_dev *vd)
{
	xa_init(&vd->odps);
	spin_lock_init(&vd->stray_lock);
	INIT_LIST_HEAD(&vd->strays);
	INIT_WORK(&vd->stray_work, vnicd_stray_work);
}

void vnicd_fault_stop(struct vnicd_dev *vd)
{
	struct vnicd_fault *fault, *next;

	cancel_work_sync(&vd->stray_work);
	list_for_each_entry_safe(fault, next, &vd->strays, list)
		kfree(fault);
	INIT_LIST_HEAD(&vd->strays);
	WARN_ON(!xa_empty(&vd->odps));
	xa_destroy(&vd->odps);
}

int vnicd_fault_init(void)
{
	/* A stuck fault blocks its worker for long: allow the maximum. */
	vnicd_fault_wq = alloc_workqueue("vnicd_fault", WQ_UNBOUND, VNICD_WORKERS);
	return vnicd_fault_wq ? 0 : -ENOMEM;
}

void vnicd_fault_exit(void)
{
	destroy_workqueue(vnicd_fault_wq);
	WARN_ON(!xa_empty(&vnicd_pagers));
}
