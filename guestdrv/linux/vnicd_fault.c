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
 * Each event is answered exactly once, by SET_MTT or RESUME_FAULT. The context
 * that removes it from its list answers it: the worker, with the gate held for
 * reading, or the deregistration, with the gate held for writing.
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
/* Prefetches of one process that may wait: they are only advice. */
#define VNICD_PAGER_PREFETCHES	64
/* Events for no region: there are a few when regions end, not thousands. */
#define VNICD_MAX_STRAYS	4096

/* A fault, or a prefetch in the background, which has no waiter. */
struct vnicd_fault {
	struct work_struct work;
	struct list_head queue;		/* in vnicd_pager.waiting */
	struct list_head list;		/* in vnicd_odp.faults or vnicd_dev.strays */
	struct vnicd_odp *odp;		/* with a reference */
	u64 va;
	u64 length;
	unsigned int how;
	u32 token;
};

/* A thread that fetches pages for a region. */
struct vnicd_worker {
	struct list_head list;		/* in vnicd_odp.workers */
	struct task_struct *task;
};

/* One per address space that has on-demand regions. */
struct vnicd_pager {
	refcount_t refs;		/* its regions */
	struct mm_struct *mm;		/* grabbed */
	spinlock_t lock;		/* guards the fields below */
	unsigned int running;
	unsigned int num_waiting;
	struct list_head waiting;
};

static struct workqueue_struct *vnicd_fault_wq;
static atomic_t vnicd_workers;		/* sum of vnicd_pager.running */
static DEFINE_MUTEX(vnicd_pagers_lock);
static DEFINE_XARRAY(vnicd_pagers);	/* by address of the mm */

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
	spin_lock_init(&pager->lock);
	INIT_LIST_HEAD(&pager->waiting);
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
	mmdrop(pager->mm);
	kfree(pager);
}

/* Takes one of the places for running faults. A process without one always gets one. */
static bool vnicd_pager_enter(struct vnicd_pager *pager)
{
	bool few = atomic_read(&vnicd_workers) >= VNICD_WORKERS / 2;

	if (pager->running >= (few ? 1 : VNICD_PAGER_RUNNING))
		return false;
	pager->running++;
	atomic_inc(&vnicd_workers);
	return true;
}

/* False: too many faults wait already. */
static bool vnicd_pager_submit(struct vnicd_pager *pager, struct vnicd_fault *fault,
			       unsigned int max_waiting)
{
	bool start = false, taken = true;

	spin_lock(&pager->lock);
	if (vnicd_pager_enter(pager)) {
		start = true;
	} else if (pager->num_waiting < max_waiting) {
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

/* A fault was served: starts others. */
static void vnicd_pager_next(struct vnicd_pager *pager)
{
	struct vnicd_fault *fault, *next;

	spin_lock(&pager->lock);
	pager->running--;
	atomic_dec(&vnicd_workers);
	list_for_each_entry_safe(fault, next, &pager->waiting, queue) {
		if (!vnicd_pager_enter(pager))
			break;
		list_del(&fault->queue);
		pager->num_waiting--;
		queue_work(vnicd_fault_wq, &fault->work);
	}
	spin_unlock(&pager->lock);
}

/* The answer for an errno: the device retries transient errors. */
static u32 vnicd_fault_status(int err)
{
	return !err || err == -EAGAIN ? VNICD_OK : VNICD_EFAULT;
}

u32 vnicd_fault_token(const struct vnicd_fault *fault)
{
	return fault->token;
}

void vnicd_fault_answered(struct vnicd_fault *fault)
{
	spin_lock(&fault->odp->lock);
	list_del_init(&fault->list);
	spin_unlock(&fault->odp->lock);
}

/* Does nothing if SET_MTT was the answer or the region has ended. */
static void vnicd_fault_answer(struct vnicd_odp *odp, struct vnicd_fault *fault, int err)
{
	down_read(&odp->gate);
	if (odp->vd && !list_empty(&fault->list)) {
		vnicd_cmd_resume_fault(odp->vd, fault->token, vnicd_fault_status(err));
		vnicd_fault_answered(fault);
	}
	up_read(&odp->gate);
}

/* vnicd_fault_interrupt() can interrupt the fetch. */
static int vnicd_fault_fetch(struct vnicd_odp *odp, struct vnicd_fault *fault)
{
	bool prefetch = fault->how & VNICD_FETCH_PREFETCH;
	struct vnicd_worker me = { .task = current };
	int err = -ECANCELED;
	bool open;

	allow_kernel_signal(SIGKILL);
	spin_lock(&odp->lock);
	list_add(&me.list, &odp->workers);
	open = !odp->closed;
	spin_unlock(&odp->lock);

	if (open)
		err = vnicd_odp_fetch(odp, fault->va, fault->length, fault->how,
				      prefetch ? NULL : fault);

	spin_lock(&odp->lock);
	list_del(&me.list);
	spin_unlock(&odp->lock);
	/* No signal can come now: restore the thread's state for other work. */
	disallow_signal(SIGKILL);
	flush_signals(current);
	return err;
}

void vnicd_fault_interrupt(struct vnicd_odp *odp)
{
	struct vnicd_worker *worker;

	spin_lock(&odp->lock);
	list_for_each_entry(worker, &odp->workers, list)
		send_sig(SIGKILL, worker->task, 1);
	spin_unlock(&odp->lock);
}

static void vnicd_fault_work(struct work_struct *work)
{
	struct vnicd_fault *fault = container_of(work, struct vnicd_fault, work);
	struct vnicd_odp *odp = fault->odp;
	int err;

	err = vnicd_fault_fetch(odp, fault);
	if (!(fault->how & VNICD_FETCH_PREFETCH))
		vnicd_fault_answer(odp, fault, err);
	kfree(fault);
	vnicd_pager_next(odp->pager);
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
	if (!vnicd_pager_submit(odp->pager, fault, VNICD_PAGER_PREFETCHES)) {
		vnicd_odp_put(odp);
		kfree(fault);
	}
}

void vnicd_fault_abandon(struct vnicd_odp *odp)
{
	struct vnicd_fault *fault;

	/* The faults themselves belong to their workers. */
	list_for_each_entry(fault, &odp->faults, list)
		vnicd_cmd_resume_fault(odp->vd, fault->token, VNICD_EFAULT);
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
		vnicd_cmd_resume_fault(vd, fault->token, VNICD_EFAULT);
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
	if (vnicd_pager_submit(odp->pager, fault, VNICD_PAGER_WAITING))
		return true;
	vnicd_fault_answer(odp, fault, -EFAULT);
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

	/* The allocation is small, and the device waits for an answer in any case. */
	fault = vnicd_fault_alloc(odp, le64_to_cpu(event->va), length,
				  write ? VNICD_FETCH_WRITE : 0, GFP_KERNEL | __GFP_NOFAIL);
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
