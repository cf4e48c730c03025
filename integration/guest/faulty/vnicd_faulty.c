// SPDX-License-Identifier: GPL-2.0
/*
 * Has, on request, one defect of each kind that a debugging kernel's checks report: insmod vnicd_faulty.ko fault=NAME.
 * It is for the test that those reports fail a test. Some defects damage the kernel: throw the VM away.
 */
#include <linux/completion.h>
#include <linux/kthread.h>
#include <linux/list.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/rcupdate.h>
#include <linux/refcount.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/timer.h>
#include <linux/vmalloc.h>

static char *fault = "";
module_param(fault, charp, 0);

/* The compiler must not see through the defects. */
static int number(int n)
{
	OPTIMIZER_HIDE_VAR(n);
	return n;
}

static void use_after_free(void)
{
	char *p = kmalloc(64, GFP_KERNEL);

	OPTIMIZER_HIDE_VAR(p);
	kfree(p);
	if (p)
		pr_info("freed memory has %d\n", READ_ONCE(p[8]));
}

/* Within the page: the next one is not mapped, and reading it would be an oops after the report. */
static void beyond_vmalloc(void)
{
	char *p = vmalloc(PAGE_SIZE / 2);

	OPTIMIZER_HIDE_VAR(p);
	if (p)
		pr_info("beyond the end is %d\n", READ_ONCE(p[PAGE_SIZE - 1]));
	vfree(p);
}

static void shift(void)
{
	pr_info("shifted by 40: %d\n", number(1) << number(40));
}

/*
 * Only UBSAN sees this: the address is within the whole array. KASAN's report would turn lockdep off. The address of
 * element 4, one past the end, is valid.
 */
static void bounds(void)
{
	static int array[2][4];

	pr_info("element 5 of 4: %d\n", READ_ONCE(array[0][number(5)]));
}

static void sleep_in_atomic(void)
{
	static DEFINE_SPINLOCK(lock);

	spin_lock(&lock);
	might_sleep();
	spin_unlock(&lock);
}

static void rcu_usage(void)
{
	static int __rcu *pointer;

	if (rcu_dereference(pointer))
		pr_info("there is a pointer\n");
}

static void lock_order(void)
{
	static DEFINE_MUTEX(a);
	static DEFINE_MUTEX(b);

	mutex_lock(&a);
	mutex_lock(&b);
	mutex_unlock(&b);
	mutex_unlock(&a);
	mutex_lock(&b);
	mutex_lock(&a);
	mutex_unlock(&a);
	mutex_unlock(&b);
}

static void list_twice(void)
{
	LIST_HEAD(list);
	LIST_HEAD(entry);

	list_add(&entry, &list);
	list_del(&entry);
	list_del(&entry);
}

static void refcount_of_zero(void)
{
	refcount_t r = REFCOUNT_INIT(0);

	refcount_inc(&r);
}

static void never(struct timer_list *t)
{
}

static void free_timer(void)
{
	struct timer_list *t = kmalloc(sizeof(*t), GFP_KERNEL);

	if (!t)
		return;
	timer_setup(t, never, 0);
	mod_timer(t, jiffies + 3600 * HZ);
	kfree(t);
}

static void leak(void)
{
	char *p;
	int i;

	for (i = 0; i < 16; i++) {
		p = kmalloc(3000, GFP_KERNEL);
		OPTIMIZER_HIDE_VAR(p);
	}
}

static unsigned long raced;

static int racer(void *done)
{
	unsigned long end = jiffies + 5 * HZ;

	while (time_before(jiffies, end)) {
		raced++;
		barrier();
		cond_resched();
	}
	complete(done);
	return 0;
}

static void race(void)
{
	struct completion done;
	int i, n = 0;

	init_completion(&done);
	for (i = 0; i < 2; i++)
		n += !IS_ERR(kthread_run(racer, &done, "vnicd_racer"));
	while (n--)
		wait_for_completion(&done);
}

static const struct {
	const char *name;
	void (*run)(void);
} faults[] = {
	{ "use_after_free", use_after_free },	{ "beyond_vmalloc", beyond_vmalloc },
	{ "shift", shift },			{ "bounds", bounds },
	{ "sleep_in_atomic", sleep_in_atomic },	{ "rcu_usage", rcu_usage },
	{ "lock_order", lock_order },		{ "list_twice", list_twice },
	{ "refcount_of_zero", refcount_of_zero }, { "free_timer", free_timer },
	{ "leak", leak },			{ "race", race },
};

static int __init faulty_init(void)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(faults); i++) {
		if (strcmp(fault, faults[i].name))
			continue;
		faults[i].run();
		return 0;
	}
	pr_err("unknown fault '%s'\n", fault);
	return -EINVAL;
}

static void __exit faulty_exit(void)
{
}

module_init(faulty_init);
module_exit(faulty_exit);
MODULE_DESCRIPTION("Defects for the checks of a debugging kernel");
MODULE_LICENSE("GPL");
