package harness

import (
	"strings"
	"testing"
)

// Beginnings of reports as guests printed them, with the line that must be found.
func TestComplaints(t *testing.T) {
	for _, l := range []string{
		"[   31.020134] BUG: KASAN: slab-use-after-free in use_after_free+0x7a/0xc0 [vnicd_faulty]",
		"[   33.117820] BUG: KASAN: vmalloc-out-of-bounds in beyond_vmalloc+0x71/0xa0 [vnicd_faulty]",
		"[   35.006418] UBSAN: shift-out-of-bounds in /build.abc/vnicd_faulty.c:58:43",
		"[   36.220022] UBSAN: array-index-out-of-bounds in /build.abc/vnicd_faulty.c:65:2",
		"[   37.000100] BUG: sleeping function called from invalid context at /build.abc/vnicd_faulty.c:73",
		"[   38.000100] BUG: scheduling while atomic: insmod/812/0x00000002",
		"[   39.000100] [ BUG: Invalid wait context ]",
		"[   40.000100] WARNING: suspicious RCU usage",
		"[   41.000100] WARNING: possible circular locking dependency detected",
		"[   42.000100] WARNING: possible recursive locking detected",
		"[   43.000100] WARNING: inconsistent lock state",
		"[   44.000100] WARNING: bad unlock balance detected!",
		"[   45.000100] WARNING: CPU: 0 PID: 831 at lib/list_debug.c:62 __list_del_entry_valid_or_report+0x13f/0x1b0",
		"[   46.000100] list_add corruption. prev->next should be next (ffff888004b10000), but was 0000000000000000.",
		"[   47.000100] kernel BUG at lib/list_debug.c:32!",
		"[   48.000100] refcount_t: underflow; use-after-free.",
		"[   49.000100] ODEBUG: free active (active state 0) object: ffff88800c1d2a00 object type: timer_list hint: never+0x0/0x10",
		"[   50.000100] ODEBUG: Out of memory. ODEBUG disabled",
		"[   51.000100] kmemleak: 3 new suspected memory leaks (see /sys/kernel/debug/kmemleak)",
		"unreferenced object 0xffff88800a4d8000 (size 4096):",
		"[   52.000100] kmemleak: Kernel memory leak detector disabled",
		"[   53.000100] INFO: trying to register non-static key.",
		"[   54.000100] turning off the locking correctness validator.",
		"[   55.000100] BUG: MAX_LOCKDEP_ENTRIES too low!",
		"[   56.000100] INFO: lockdep is turned off.",
		"[   57.000100] Disabling lock debugging due to kernel taint",
		"[   58.000100] INFO: task kworker/u8:2:57 blocked for more than 614 seconds.",
		"[   59.000100] watchdog: BUG: soft lockup - CPU#1 stuck for 134s! [ib_write_bw:901]",
		"[   60.000100] BUG: workqueue lockup - pool cpus=0 node=0 flags=0x0 nice=0 stuck for 302s!",
		"[   61.000100] rcu: INFO: rcu_preempt self-detected stall on CPU",
		"[   62.000100] restrack: BUG: RESTRACK detected leak of resources on vnic0",
		"[   63.000100] BUG kmalloc-64 (Tainted: G           O      ): Right Redzone overwritten",
		"[   64.000100] Oops: general protection fault, probably for non-canonical address 0xdffffc0000000001: 0000 [#1]",
	} {
		if got := Complaints("[    1.0] booted\n" + l + "\r\n[   99.0] quiet\n"); len(got) != 1 || got[0] != l {
			t.Errorf("%q: found %q", l, got)
		}
	}
	for _, l := range []string{
		"[    0.000000] Linux version 6.12.118-vnicd-debug (root@host) (gcc (Debian 14.2.0-19) 14.2.0, GNU ld 2.44) #1 SMP PREEMPT",
		"[    0.000000] Lock dependency validator: Copyright (c) 2006 Red Hat, Inc., Ingo Molnar",
		"[    0.030000] kasan: KernelAddressSanitizer initialized",
		"[    0.400000] kmemleak: Kernel memory leak detector initialized (mem pool available: 36521)",
		"[    0.500000] kcsan: enabled early",
		"[    9.000000] vnicd: loading out-of-tree module taints kernel.",
		"[    9.100000] vnicd virtio5: vnic0: 128 QPs",
	} {
		if got := Complaints(l); len(got) != 0 {
			t.Errorf("found %q", got)
		}
	}
}

const (
	rule = "[   70.0] ==================================================================\n"
	// foreignRace is of the kernel alone.
	foreignRace = rule + `[   70.0] BUG: KCSAN: data-race in tick_nohz_idle_stop_tick / tick_sched_timer
[   70.0]
[   70.0] write to 0xffffffff82a3b0c0 of 4 bytes by interrupt on cpu 0:
[   70.0]  tick_sched_timer+0x5f/0xd0
[   70.0]
[   70.0] Reported by Kernel Concurrency Sanitizer on:
[   70.0] CPU: 1 UID: 0 PID: 0 Comm: swapper/1 Tainted: G           O       6.12.118-vnicd-kcsan #1
` + rule
	// ourRace has the module in a stack, though not in the title.
	ourRace = rule + `[   71.0] BUG: KCSAN: data-race in _raw_spin_lock / __list_add_valid_or_report
[   71.0]
[   71.0] write to 0xffff88800bd1a2c8 of 8 bytes by task 812 on cpu 1:
[   71.0]  __list_add_valid_or_report+0x3c/0x90
[   71.0]  vnicd_create_cq+0x2a1/0x4b0 [vnicd]
[   71.0]
` + rule
)

// TestComplaintsOfRaces: a race is a complaint if it names our module anywhere.
func TestComplaintsOfRaces(t *testing.T) {
	if got := Complaints(foreignRace + "quiet\n"); len(got) != 0 {
		t.Errorf("a foreign race: %q", got)
	}
	got := strings.Join(Complaints(foreignRace+ourRace+foreignRace+"[   72.0] BUG: sleeping function called\n"), "\n")
	for _, want := range []string{"BUG: KCSAN: data-race in _raw_spin_lock", "vnicd_create_cq", "BUG: sleeping"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q lacks %q", got, want)
		}
	}
	if strings.Contains(got, "tick_sched_timer") {
		t.Errorf("%q has the foreign race", got)
	}
	// The log ends within the report: the part that is there is judged.
	cut, _, _ := strings.Cut(ourRace, "[   71.0]\n"+rule)
	if got := Complaints(cut); len(got) == 0 {
		t.Error("a race at the end of the log was not found")
	}
}

const failedAllocation = `[   80.0] inject: vmalloc error: size 266240, page order 0, failed to allocate pages, mode:0xdc2(GFP_KERNEL|__GFP_HIGHMEM|__GFP_ZERO), nodemask=(null)
[   80.0] CPU: 0 UID: 0 PID: 950 Comm: inject Tainted: G           O       6.12.118-vnicd-debug #1
[   80.0] Call Trace:
[   80.0]  <TASK>
[   80.0]  dump_stack_lvl+0x5d/0x80
[   80.0]  </TASK>
[   80.0] Mem-Info:
`

// TestComplaintsOfFailedAllocations: a failed allocation is a complaint, unless the test injects failures; other
// complaints remain.
func TestComplaintsOfFailedAllocations(t *testing.T) {
	if got := Complaints(failedAllocation); len(got) == 0 {
		t.Error("a failed allocation was not found")
	}
	between := "[   79.0] " + InjectionBegins + "\n" + failedAllocation
	if got := Complaints(between + "[   90.0] " + InjectionEnds + "\n"); len(got) != 0 {
		t.Errorf("an injected failure: %q", got)
	}
	const userFault = "[   80.5] Huh VM_FAULT_OOM leaked out to the #PF handler. Retrying PF\n"
	if got := Complaints(userFault); len(got) != 1 {
		t.Errorf("a page fault without memory: %q", got)
	}
	if got := Complaints(between + userFault); len(got) != 0 {
		t.Errorf("an injected failure of a page fault: %q", got)
	}
	const bug = "[   81.0] BUG: KASAN: slab-use-after-free in vnicd_destroy_qp+0x11/0x20 [vnicd]"
	if got := Complaints(between + bug); len(got) != 1 || got[0] != bug {
		t.Errorf("beside injected failures: %q", got)
	}
	if got := Complaints(between + "[   90.0] " + InjectionEnds + "\n" + failedAllocation); len(got) == 0 {
		t.Error("a failed allocation after the injection was not found")
	}
}
