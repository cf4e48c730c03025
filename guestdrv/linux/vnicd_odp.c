// SPDX-License-Identifier: GPL-2.0
/*
 * On-demand regions: the pages that the device has.
 *
 * The address space of a region is divided into parts. A part is created when a
 * page in it is first needed; it watches its addresses (mmu_interval_notifier) and
 * knows which of its pages the device has. So changes elsewhere in the process cost
 * nothing, an implicit region needs memory only for the parts in use, and an
 * invalidation affects the faults of its own part only.
 *
 *	fetch					invalidate
 *	  mmap_lock (read)			  gate (read), part->lock
 *	  seq = mmu_interval_read_begin()	  mmu_interval_set_seq()
 *	  fault the pages in			  pages of the device: CLEAR_MTT
 *	  read the page table (hmm)		  	(answered when unused, ODP-5)
 *	  gate (read), part->lock
 *	  seq unchanged? no: again
 *	  mmap_lock released
 *	  SET_MTT (the last one with the
 *	  fault's token)
 *
 * mmap_lock is held until the sequence number was checked, so that a process that
 * keeps forking, mapping and protecting cannot starve its own faults. It is not held
 * while this or another fetch waits for the device, which may take long: others need
 * it for mmap() and /proc.
 *
 * Pages are neither pinned nor referenced (ODP-4): between SET_MTT and CLEAR_MTT
 * the kernel cannot move a page, because it waits for the notifier. The notifier waits
 * until the device has answered CLEAR_MTT, or was lost and reset (vnicd_fence()); it
 * fails only if it must not sleep.
 *
 * Under gate and part->lock, no allocation may enter reclaim, which calls the
 * notifier, and no command waits for a slot that others use: an invalidation of the
 * same part would wait for them. Commands allocate nothing: their slots are allocated
 * in advance, and some are reserved for CLEAR_MTT.
 *
 * Dirty pages. The device's writes do not set the dirty bit of a page table
 * entry, so the device gets a page as writable only if the kernel already considers
 * it dirty: a fault for writing is handled as a write, which leaves
 * the entry dirty, within the same sequence number. The kernel calls the notifier
 * before it makes such an entry clean again. Other pages of the range are
 * read-only, unless they are anonymous and have no copy in swap: reclaim has to
 * write those to swap in any case.
 */
#include <linux/bitmap.h>
#include <linux/delay.h>
#include <linux/hmm.h>
#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "vnicd.h"

#define VNICD_PART_SHIFT	24		/* 16 MiB: */
#define VNICD_PART_PAGES	(1U << (VNICD_PART_SHIFT - PAGE_SHIFT))
/* Pages that one command sets at most, and the range examined around them. */
#define VNICD_FETCH_MAX		256U		/* 1 MiB, as in an event */
#define VNICD_FETCH_AROUND	64U		/* 256 KiB, aligned */
/* Attempts for a page that is repeatedly invalidated; then the device must fault again. */
#define VNICD_FETCH_ROUNDS	16
/* Pages that are cleared ahead of reclaim, at most. */
#define VNICD_CLEAR_AHEAD	256U
/* Number of idle parts that starts a sweep. */
#define VNICD_SWEEP		32

struct vnicd_part {
	struct mmu_interval_notifier notifier;
	struct vnicd_odp *odp;		/* outlives the notifier */
	refcount_t refs;		/* the table and users of the part */
	unsigned long start;		/* address, page-aligned */
	u64 first;			/* index of its first page in the MTT */
	unsigned int npages;

	struct mutex lock;		/* guards the fields below; orders SET and CLEAR */
	bool gone;			/* no longer watches */
	bool idle;			/* the device has none of its pages; in num_idle */
	unsigned int next;		/* page after those cleared last */
	unsigned int ahead;		/* pages that may be cleared with it */
	DECLARE_BITMAP(given, VNICD_PART_PAGES);
};

/* One page: HMM's page list becomes the command's list in place. */
struct vnicd_fetch {
	struct vnicd_fault *fault;	/* answered with the last page, or NULL */
	unsigned long left;		/* pages up to the last one */
	bool locked;			/* mmap_lock is held */
	struct vnicd_set_mtt cmd;	/* the list follows it */
	union {
		DECLARE_FLEX_ARRAY(unsigned long, pfns);	/* HMM's format */
		DECLARE_FLEX_ARRAY(__le64, ptes);
	};
};

#define VNICD_FETCH_ENTRIES \
	((PAGE_SIZE - sizeof(struct vnicd_fetch)) / sizeof(__le64))

static unsigned long vnicd_odp_base(const struct vnicd_odp *odp)
{
	return odp->start & PAGE_MASK;
}

static u64 vnicd_odp_npages(const struct vnicd_odp *odp)
{
	return DIV_ROUND_UP_ULL(odp->length + offset_in_page(odp->start), PAGE_SIZE);
}

static void vnicd_part_put(struct vnicd_part *part)
{
	if (!refcount_dec_and_test(&part->refs))
		return;
	mutex_destroy(&part->lock);
	kfree(part);
}

/* The part is not in the table. Waits for invalidations: the caller holds none of their locks. */
static void vnicd_part_remove(struct vnicd_part *part)
{
	mmu_interval_notifier_remove(&part->notifier);
	vnicd_part_put(part);
}

/* Revokes @count pages of the region from @first on (ODP-5, ODP-6). */
static void vnicd_odp_clear(struct vnicd_odp *odp, u64 first, u64 count)
{
	vnicd_cmd_clear_mtt(odp->vd, odp->handle, first, count);
}

static void vnicd_fetch_unlock(struct vnicd_odp *odp, struct vnicd_fetch *f)
{
	if (f->locked)
		mmap_read_unlock(odp->mm);
	f->locked = false;
}

/* Both locks are held. False: it would have to sleep, which the range forbids. */
static bool vnicd_part_invalidate_locked(struct vnicd_part *part,
					 const struct mmu_notifier_range *range)
{
	struct vnicd_odp *odp = part->odp;
	unsigned long start = max(range->start, part->start);
	unsigned long end = min(range->end, part->start + part->npages * PAGE_SIZE);
	unsigned int from, to, last;

	if (!odp->vd || odp->released)
		return true;

	from = (start - part->start) >> PAGE_SHIFT;
	to = DIV_ROUND_UP(end - part->start, PAGE_SIZE);
	from = find_next_bit(part->given, to, from);
	if (from >= to)
		return true;
	if (!mmu_notifier_range_blockable(range))
		return false;

	/*
	 * Reclaim unmaps page by page, mostly upwards, and waits for each command:
	 * the longer it continues, the more pages are cleared ahead of it.
	 */
	if (find_next_bit(part->given, part->npages, part->next) == from)
		part->ahead = clamp(2 * part->ahead, 1U, VNICD_CLEAR_AHEAD);
	else
		part->ahead = 0;
	to = max(to, min(from + part->ahead, part->npages));
	part->next = to;

	last = from;
	for (unsigned int i = from; i < to; i = find_next_bit(part->given, to, i + 1)) {
		last = i;
		atomic64_inc(&odp->page_invalidations);
	}

	if (range->event == MMU_NOTIFY_RELEASE) {
		/* Every part will follow: one command for all of them. */
		vnicd_odp_clear(odp, 0, vnicd_odp_npages(odp));
		odp->released = true;
		return true;
	}
	vnicd_odp_clear(odp, part->first + from, last - from + 1);
	bitmap_clear(part->given, from, last - from + 1);
	if (bitmap_empty(part->given, part->npages)) {
		part->idle = true;
		atomic_inc(&odp->num_idle);
	}
	return true;
}

static bool vnicd_part_invalidate(struct mmu_interval_notifier *notifier,
				  const struct mmu_notifier_range *range,
				  unsigned long seq)
{
	struct vnicd_part *part = container_of(notifier, struct vnicd_part, notifier);
	struct vnicd_odp *odp = part->odp;
	bool done;

	if (mmu_notifier_range_blockable(range)) {
		down_read(&odp->gate);
		mutex_lock(&part->lock);
	} else {
		if (!down_read_trylock(&odp->gate))
			return false;
		if (!mutex_trylock(&part->lock)) {
			up_read(&odp->gate);
			return false;
		}
	}
	mmu_interval_set_seq(notifier, seq);
	done = vnicd_part_invalidate_locked(part, range);
	mutex_unlock(&part->lock);
	up_read(&odp->gate);
	return done;
}

static const struct mmu_interval_notifier_ops vnicd_part_ops = {
	.invalidate = vnicd_part_invalidate,
};

/* Frees parts without pages, because address spaces are large. */
static void vnicd_odp_sweep(struct vnicd_odp *odp)
{
	struct vnicd_part *part;
	unsigned long index;

	if (atomic_read(&odp->num_idle) < VNICD_SWEEP)
		return;
	xa_for_each(&odp->parts, index, part) {
		bool forget;

		xa_lock(&odp->parts);
		if (xa_load(&odp->parts, index) != part) {
			xa_unlock(&odp->parts);
			continue;
		}
		refcount_inc(&part->refs);
		xa_unlock(&odp->parts);

		mutex_lock(&part->lock);
		forget = part->idle && !part->gone;
		if (forget) {
			part->gone = true;
			atomic_dec(&odp->num_idle);
		}
		mutex_unlock(&part->lock);
		if (forget && xa_cmpxchg(&odp->parts, index, part, NULL, 0) == part)
			vnicd_part_remove(part);
		vnicd_part_put(part);
	}
}

static struct vnicd_part *vnicd_part_create(struct vnicd_odp *odp, unsigned long index)
{
	unsigned long base = vnicd_odp_base(odp);
	unsigned long end = base + vnicd_odp_npages(odp) * PAGE_SIZE;
	unsigned long start = index << VNICD_PART_SHIFT;
	struct vnicd_part *part;
	int err;

	part = kzalloc(sizeof(*part), GFP_KERNEL);
	if (!part)
		return ERR_PTR(-ENOMEM);
	part->odp = odp;
	part->start = max(start, base);
	end = min(end, start + (1UL << VNICD_PART_SHIFT));
	part->npages = (end - part->start) >> PAGE_SHIFT;
	part->first = (part->start - base) >> PAGE_SHIFT;
	part->idle = true;
	refcount_set(&part->refs, 1);
	mutex_init(&part->lock);

	err = mmu_interval_notifier_insert(&part->notifier, odp->mm, part->start,
					   end - part->start, &vnicd_part_ops);
	if (err) {
		vnicd_part_put(part);
		return ERR_PTR(err);
	}
	atomic_inc(&odp->num_idle);
	return part;
}

/* The part that contains @addr, with a reference. The address space is gotten. */
static struct vnicd_part *vnicd_part_get(struct vnicd_odp *odp, unsigned long addr)
{
	unsigned long index = addr >> VNICD_PART_SHIFT;
	struct vnicd_part *part;
	bool exists, closed;
	int err;

	xa_lock(&odp->parts);
	part = xa_load(&odp->parts, index);
	if (part)
		refcount_inc(&part->refs);
	xa_unlock(&odp->parts);
	if (part)
		return part;

	/* Addresses that do not exist must not use memory. */
	if (mmap_read_lock_killable(odp->mm))
		return ERR_PTR(-EINTR);
	exists = vma_lookup(odp->mm, addr);
	mmap_read_unlock(odp->mm);
	if (!exists)
		return ERR_PTR(-EFAULT);

	vnicd_odp_sweep(odp);
	part = vnicd_part_create(odp, index);
	if (IS_ERR(part))
		return part;
	refcount_inc(&part->refs);	/* the caller's */
	err = xa_insert(&odp->parts, index, part, GFP_KERNEL);
	if (err) {
		/* -EBUSY: another thread inserted the part first. */
		atomic_dec(&odp->num_idle);
		vnicd_part_remove(part);
		vnicd_part_put(part);
		return ERR_PTR(err == -EBUSY ? -EAGAIN : err);
	}

	/* Either this function sees that the region ended, or the region's end sees the part. */
	spin_lock(&odp->lock);
	closed = odp->closed;
	spin_unlock(&odp->lock);
	if (closed && xa_cmpxchg(&odp->parts, index, part, NULL, 0) == part)
		vnicd_part_remove(part);
	return part;
}

/*
 * Reports whether the kernel considers the page dirty, so that the device's writes
 * are not lost; see Dirty pages above. It must neither sleep nor allocate, which
 * is possible for anonymous pages only.
 */
static bool vnicd_page_dirty(unsigned long pfn)
{
	struct folio *folio = page_folio(hmm_pfn_to_page(pfn));

	if (!folio_test_anon(folio) || folio_test_swapcache(folio))
		return false;
	folio_mark_dirty(folio);
	return true;
}

/* The current pages of the part, offsets @from to @to. mmap_lock is held. */
static int vnicd_part_look(struct vnicd_part *part, struct vnicd_fetch *f,
			   unsigned long seq, unsigned int from, unsigned int to)
{
	struct hmm_range range = {
		.notifier = &part->notifier,
		.notifier_seq = seq,
		.start = part->start + from * PAGE_SIZE,
		.end = part->start + to * PAGE_SIZE,
		.hmm_pfns = f->pfns,
	};
	int err;

	memset(f->pfns, 0, (to - from) * sizeof(f->pfns[0]));
	err = hmm_range_fault(&range);
	return err == -EBUSY ? -EAGAIN : err;
}

static bool vnicd_pfn_ok(unsigned long pfn, bool write)
{
	unsigned long need = HMM_PFN_VALID | (write ? HMM_PFN_WRITE : 0);

	return (pfn & (need | HMM_PFN_ERROR)) == need;
}

/*
 * Makes the kernel fault in those of @n pages from @addr on that @pfns lacks. HMM
 * could do that, but not from a userfaultfd pager. Returns the number of available
 * pages, at least one, or an error. mmap_lock is held, except while it waits.
 */
static int vnicd_touch(struct mm_struct *mm, unsigned long addr, unsigned int n,
		       bool write, const unsigned long *pfns)
{
	unsigned int flags = FAULT_FLAG_REMOTE | (write ? FAULT_FLAG_WRITE : 0);
	unsigned int i;
	int err = 0;

	for (i = 0; i < n; i++) {
		bool unlocked = false;

		if (pfns && vnicd_pfn_ok(pfns[i], write))
			continue;
		err = fixup_user_fault(mm, addr + i * PAGE_SIZE, flags, &unlocked);
		if (err)
			break;
		cond_resched();
	}
	return i ? i : err;
}

/*
 * Takes gate and part->lock. Their holders may wait for the device, so mmap_lock is
 * released if that takes longer; the sequence number then shows what has changed.
 */
static void vnicd_part_lock(struct vnicd_part *part, struct vnicd_fetch *f)
{
	struct vnicd_odp *odp = part->odp;

	if (down_read_trylock(&odp->gate)) {
		if (mutex_trylock(&part->lock))
			return;
		up_read(&odp->gate);
	}
	vnicd_fetch_unlock(odp, f);
	down_read(&odp->gate);
	mutex_lock(&part->lock);
}

/*
 * Gives the device the pages @from to @to as read into @f, if they are still
 * current. Returns the number that it got of the @n pages from @want on, at least one.
 * Releases mmap_lock before it waits for others or for the command.
 *
 * Pages that the device has already are given again: it may have dropped them.
 */
static int vnicd_part_give(struct vnicd_part *part, struct vnicd_fetch *f,
			   unsigned long seq, unsigned int from, unsigned int to,
			   unsigned int want, unsigned int n, unsigned int how)
{
	struct vnicd_odp *odp = part->odp;
	unsigned int first = to, last = from, got = want, fresh = 0;
	int err = -EAGAIN;
	u16 flags = 0;

	vnicd_part_lock(part, f);
	if (!odp->vd || odp->released) {
		err = -ECANCELED;
		goto out;
	}
	if (part->gone || mmu_interval_read_retry(&part->notifier, seq))
		goto out;

	for (unsigned int i = from; i < to; i++) {
		unsigned long pfn = f->pfns[i - from];
		bool wanted = i >= want && i < want + n;
		u64 pte = VNICD_MTT_ABSENT;

		if (vnicd_pfn_ok(pfn, false)) {
			bool write = odp->writable && (pfn & HMM_PFN_WRITE);

			if (write && !(wanted && (how & VNICD_FETCH_WRITE)))
				write = vnicd_page_dirty(pfn);
			pte = PFN_PHYS(pfn & ~HMM_PFN_FLAGS);
			if (!write)
				pte |= VNICD_MTT_READ_ONLY;
			if (i == got && wanted && (write || !(how & VNICD_FETCH_WRITE)))
				got++;
			if (first == to)
				first = i;
			last = i;
		}
		f->ptes[i - from] = cpu_to_le64(pte);
	}
	if (got == want && !(how & VNICD_FETCH_PRESENT))
		goto out;
	err = n;
	if (first == to)
		goto out;

	/* Set before the command: whatever the device answers, the pages will be cleared. */
	for (unsigned int i = first; i <= last; i++)
		if (!(f->ptes[i - from] & cpu_to_le64(VNICD_MTT_ABSENT)))
			fresh += !__test_and_set_bit(i, part->given);
	if (part->idle) {
		part->idle = false;
		atomic_dec(&odp->num_idle);
	}
	atomic64_add(fresh, how & VNICD_FETCH_PREFETCH ? &odp->page_prefetches : &odp->page_faults);
	memmove(f->ptes, f->ptes + (first - from), (last - first + 1) * sizeof(f->ptes[0]));
	/* An operation that needs further pages would fault again at once. */
	if (f->fault && got - want == f->left &&
	    (odp->vd->lim.caps & VNICD_CAP_SET_MTT_RESUME)) {
		f->ptes[last - first + 1] = cpu_to_le64(vnicd_fault_token(f->fault));
		flags = VNICD_SET_MTT_RESUME;
	}
	/* From here on part->lock stops invalidations. */
	vnicd_fetch_unlock(odp, f);
	err = vnicd_cmd_set_mtt_short(odp->vd, &f->cmd, odp->handle, part->first + first,
				      last - first + 1, flags);
	if (!err && flags)
		vnicd_fault_answered(f->fault);
	if (!err)
		err = how & VNICD_FETCH_PRESENT ? n : got - want;
	else if (err != -ENOBUFS && !vnicd_dead(odp->vd))
		dev_warn_ratelimited(&odp->vd->vdev->dev,
				     "device refused pages of an on-demand region: %d\n",
				     err);
out:
	mutex_unlock(&part->lock);
	up_read(&odp->gate);
	return err;
}

/*
 * One attempt for up to @n pages from @addr on, with mmap_lock held at first. Returns
 * the number of pages that need no further attempt, or an errno.
 */
static int vnicd_part_try(struct vnicd_part *part, struct vnicd_fetch *f,
			  unsigned long addr, unsigned int n, unsigned int how)
{
	unsigned int want = (addr - part->start) >> PAGE_SHIFT;
	struct mm_struct *mm = part->odp->mm;
	bool write = how & VNICD_FETCH_WRITE;
	unsigned int from, to;
	unsigned long seq;
	int ret;

	n = min3(n, part->npages - want, VNICD_FETCH_MAX);
	from = want & ~(VNICD_FETCH_AROUND - 1);
	to = min(ALIGN(want + n, VNICD_FETCH_AROUND), part->npages);
	BUILD_BUG_ON(VNICD_FETCH_MAX + 2 * VNICD_FETCH_AROUND + 1 > VNICD_FETCH_ENTRIES);

	seq = mmu_interval_read_begin(&part->notifier);
	if (write && !(how & VNICD_FETCH_PRESENT)) {
		/* Fault in all of them: writable pages must become dirty, too. */
		ret = vnicd_touch(mm, addr, n, true, NULL);
		if (ret < 0)
			return ret;
		n = ret;
	}
	ret = vnicd_part_look(part, f, seq, from, to);
	if (ret)
		return ret;
	if (!write && !(how & VNICD_FETCH_PRESENT)) {
		const unsigned long *pfns = f->pfns + (want - from);
		unsigned int have = 0;

		while (have < n && vnicd_pfn_ok(pfns[have], false))
			have++;
		if (have < n) {
			ret = vnicd_touch(mm, addr, n, false, pfns);
			if (ret < 0)
				return ret;
			n = ret;
			ret = vnicd_part_look(part, f, seq, from, to);
			if (ret)
				return ret;
		}
	}
	/* Present, but not usable by the device: device memory, usually. */
	if (!(how & VNICD_FETCH_PRESENT) && (f->pfns[want - from] & HMM_PFN_ERROR))
		return -EFAULT;
	return vnicd_part_give(part, f, seq, from, to, want, n, how);
}

static int vnicd_part_fetch(struct vnicd_part *part, struct vnicd_fetch *f,
			    unsigned long addr, unsigned int n, unsigned int how)
{
	int ret;

	/* An invalidation in progress waits for the device: not with mmap_lock. */
	mmu_interval_read_begin(&part->notifier);
	if (mmap_read_lock_killable(part->odp->mm))
		return -EINTR;
	f->locked = true;
	ret = vnicd_part_try(part, f, addr, n, how);
	/* Our own copy on write also invalidates: it is complete now. */
	if (ret == -EAGAIN && f->locked)
		ret = vnicd_part_try(part, f, addr, n, how);
	vnicd_fetch_unlock(part->odp, f);
	return ret;
}

/*
 * Repeats the attempt until it succeeds, fails, or the attempts are used up. One that
 * found no slot for its command does not count: slots become free, or the device dies.
 */
static int vnicd_odp_fetch_some(struct vnicd_odp *odp, struct vnicd_fetch *f,
				unsigned long addr, unsigned int n, unsigned int how)
{
	int ret = -EAGAIN;

	for (unsigned int round = 0; round < VNICD_FETCH_ROUNDS; ) {
		struct vnicd_part *part;

		if (fatal_signal_pending(current))
			return -EINTR;
		if (READ_ONCE(odp->closed))
			return -ECANCELED;
		part = vnicd_part_get(odp, addr);
		if (!IS_ERR(part)) {
			ret = vnicd_part_fetch(part, f, addr, n, how);
			vnicd_part_put(part);
		} else {
			ret = PTR_ERR(part);
		}
		if (ret == -ENOBUFS) {
			usleep_range(50, 100);
			continue;
		}
		if (ret != -EAGAIN && ret != -ENOMEM)
			return ret;
		round++;
		/* Under memory pressure pages are soon reclaimed again: take fewer. */
		if (round > 2) {
			n = max(n / 2, 1U);
			usleep_range(50 << min(round, 8U), 100 << min(round, 8U));
		}
	}
	return ret;
}

int vnicd_odp_fetch(struct vnicd_odp *odp, u64 va, u64 length, unsigned int how,
		    struct vnicd_fault *fault)
{
	unsigned long addr, end;
	struct vnicd_fetch *f;
	int ret = 0;

	if (va < odp->iova || va - odp->iova >= odp->length)
		return -EFAULT;
	length = min(length, odp->length - (va - odp->iova));
	addr = odp->start + (va - odp->iova);
	end = PAGE_ALIGN(addr + length);
	addr &= PAGE_MASK;

	/* No other process has these addresses. */
	if (!vnicd_pager_begin(odp->pager))
		return -EFAULT;
	f = kmalloc(PAGE_SIZE, GFP_KERNEL);
	if (f)
		f->fault = fault;
	else
		ret = -ENOMEM;

	for (bool some = false; !ret && addr < end; some = true) {
		f->left = (end - addr) >> PAGE_SHIFT;
		ret = vnicd_odp_fetch_some(odp, f, addr,
					   min_t(unsigned long, f->left, VNICD_FETCH_MAX), how);
		if (ret > 0) {
			addr += (unsigned long)ret << PAGE_SHIFT;
			ret = 0;
			cond_resched();
		} else if (some && !(how & VNICD_FETCH_PREFETCH)) {
			/* The device faults again for the rest, if it needs it. */
			ret = 0;
			break;
		}
	}
	kfree(f);
	vnicd_pager_end(odp->pager);
	return ret;
}

struct vnicd_odp *vnicd_odp_alloc(struct vnicd_dev *vd, const struct ib_pd *pd,
				  u64 start, u64 length, u64 iova, bool writable,
				  struct vnicd_create_mr *cmd)
{
	bool implicit = !start && length == U64_MAX;
	struct vnicd_odp *odp;

	if (!current->mm)
		return ERR_PTR(-EINVAL);
	if (implicit) {
		if (iova)
			return ERR_PTR(-EINVAL);
		length = min_t(u64, current->mm->task_size & PAGE_MASK, BIT_ULL(57));
	} else if (!length || length > vd->lim.max_mr_size ||
		   start >= current->mm->task_size ||
		   length > current->mm->task_size - start ||
		   offset_in_page(start) != offset_in_page(iova) ||
		   iova + length < iova) {
		return ERR_PTR(-EINVAL);
	}

	odp = kzalloc(sizeof(*odp), GFP_KERNEL);
	if (!odp)
		return ERR_PTR(-ENOMEM);
	odp->pager = vnicd_pager_get(current->mm);
	if (!odp->pager) {
		kfree(odp);
		return ERR_PTR(-ENOMEM);
	}
	refcount_set(&odp->refs, 1);
	odp->vd = vd;
	odp->mm = current->mm;
	odp->pd = pd;
	odp->start = start;
	odp->length = length;
	odp->iova = iova;
	odp->writable = writable;
	init_rwsem(&odp->gate);
	xa_init(&odp->parts);
	spin_lock_init(&odp->lock);
	INIT_LIST_HEAD(&odp->faults);

	cmd->flags = cpu_to_le32(VNICD_MR_ON_DEMAND | (implicit ? VNICD_MR_IMPLICIT : 0));
	cmd->page_shift = PAGE_SHIFT;
	cmd->iova = cpu_to_le64(iova);
	cmd->length = cpu_to_le64(length);
	cmd->offset = cpu_to_le64(offset_in_page(start));
	cmd->npages = cpu_to_le64(vnicd_odp_npages(odp));
	return odp;
}

void vnicd_odp_put(struct vnicd_odp *odp)
{
	if (!refcount_dec_and_test(&odp->refs))
		return;
	WARN_ON(!xa_empty(&odp->parts));
	xa_destroy(&odp->parts);
	vnicd_pager_put(odp->pager);
	kfree(odp);
}

int vnicd_odp_publish(struct vnicd_odp *odp)
{
	struct vnicd_dev *vd = odp->vd;
	int err;

	err = xa_insert(&vd->odps, odp->lkey, odp, GFP_KERNEL);
	if (err)
		return err;
	if (odp->rkey != odp->lkey) {
		err = xa_insert(&vd->odps, odp->rkey, odp, GFP_KERNEL);
		if (err)
			xa_erase(&vd->odps, odp->lkey);
	}
	return err;
}

struct vnicd_odp *vnicd_odp_get(struct vnicd_dev *vd, u32 key)
{
	struct vnicd_odp *odp;

	xa_lock(&vd->odps);
	odp = xa_load(&vd->odps, key);
	if (odp)
		refcount_inc(&odp->refs);
	xa_unlock(&vd->odps);
	return odp;
}

int vnicd_odp_destroy(struct vnicd_odp *odp)
{
	struct vnicd_dev *vd = odp->vd;
	struct vnicd_part *part;
	unsigned long index;
	bool released, pending;
	int err;

	/* Invalidations wait here: the pages are in use until the answer. */
	down_write(&odp->gate);
	err = vnicd_cmd_destroy_mr(vd, odp->handle, &released);
	if (err) {
		up_write(&odp->gate);
		return err;
	}
	/*
	 * Nothing will revoke the pages later, so they must be revoked now, whatever the
	 * device keeps of the region (TR-5). Of a dead device this waits for the reset.
	 */
	if (!released && !odp->released)
		vnicd_odp_clear(odp, 0, vnicd_odp_npages(odp));
	odp->released = true;
	xa_cmpxchg(&vd->odps, odp->lkey, odp, NULL, 0);
	xa_cmpxchg(&vd->odps, odp->rkey, odp, NULL, 0);
	spin_lock(&odp->lock);
	WRITE_ONCE(odp->closed, true);
	spin_unlock(&odp->lock);
	up_write(&odp->gate);
	vnicd_fault_interrupt(odp);

	/* Without the gate: there may be many. A worker may put its fault back. */
	do {
		vnicd_fault_abandon(odp, vd);
		down_write(&odp->gate);
		pending = !list_empty(&odp->faults);
		if (!pending)
			odp->vd = NULL;
		up_write(&odp->gate);
	} while (pending);

	xa_for_each(&odp->parts, index, part)
		if (xa_cmpxchg(&odp->parts, index, part, NULL, 0) == part)
			vnicd_part_remove(part);
	vnicd_odp_put(odp);
	return 0;
}
