package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// TestKernelChecks shows that the complaints of a debugging kernel fail a test: a module made for that
// (integration/guest/faulty) has one defect after the other, and each is found in the kernel log, and at the end of the
// VM on the console. Leaks, and a lockdep that has turned itself off, are found at the end only.
func TestKernelChecks(t *testing.T) {
	type defect struct{ fault, complaint string }
	var defects []defect
	var atEnd []string
	switch release := os.Getenv("RELEASE"); release {
	case harness.Debug:
		defects = []defect{
			{"shift", "UBSAN: shift-out-of-bounds"},
			{"bounds", "UBSAN: array-index-out-of-bounds"},
			{"sleep_in_atomic", "BUG: sleeping function called from invalid context"},
			{"rcu_usage", "WARNING: suspicious RCU usage"},
			{"list_twice", "list_del corruption"},
			{"refcount_of_zero", "refcount_t: addition on 0; use-after-free"},
			{"free_timer", "ODEBUG: free active"},
			{"leak", ""},
			// Lockdep turns itself off after the first report, and after one of KASAN.
			{"lock_order", "WARNING: possible circular locking dependency"},
			{"use_after_free", "BUG: KASAN: slab-use-after-free"},
			{"beyond_vmalloc", "BUG: KASAN: vmalloc-out-of-bounds"},
		}
		atEnd = []string{"KASAN: slab-use-after-free", "circular locking", "lockdep is turned off", "unreferenced object"}
	case harness.KCSAN:
		defects = []defect{{"race", "BUG: KCSAN: data-race in racer [vnicd_faulty]"}}
		atEnd = []string{"data-race in racer"}
	default:
		t.Skipf("the kernel of RELEASE=%q has no such checks; `make test-debug` runs this test", release)
	}
	l, ctx := newLabWithoutModule(t)
	var last strings.Builder
	l.Complain = func(_, what string) { last.WriteString(what + "\n") }
	l.Share = t.TempDir()
	check(t, l.Builder.Module(ctx, filepath.Join(l.Root, "integration", "guest", "faulty"), l.Share))
	h := must[*lab.Host](t)(l.Host("h1"))
	check(t, h.Run(ctx,
		"networks: [{name: blue, vni: 100}]\nvms: [{name: vm1, network: blue, mac: \"02:00:00:00:00:01\"}]\n"))
	v := vmA
	v.NoHCA = true
	m := must[[]*qemu.Machine](t)(l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, v))))[0]
	quietKernels(ctx, t, m)
	for _, d := range defects {
		t.Run(d.fault, func(t *testing.T) {
			run(ctx, t, m, "dmesg -C; insmod /host/vnicd_faulty.ko fault="+d.fault+"; rmmod vnicd_faulty")
			bad := strings.Join(must[[]string](t)(harness.KernelComplaints(ctx, m)), "\n")
			if !strings.Contains(bad, d.complaint) || d.complaint == "" && bad != "" {
				t.Errorf("expected %q, the kernel's complaints are:\n%s\nits log:\n%s", d.complaint, bad,
					run(ctx, t, m, "dmesg"))
			}
		})
	}
	l.Run()
	for _, want := range atEnd {
		if !strings.Contains(last.String(), want) {
			t.Errorf("the complaints at the end of the VM lack %q:\n%s", want, last.String())
		}
	}
}

// injection makes the kernel's fault injection silent and applies it to every allocation. By default it spares those
// that may sleep, as nearly all of the module's may.
const injection = `set -e
cd /sys/kernel/debug
for f in failslab fail_page_alloc fail_usercopy; do echo 0 >$f/verbose; done
for f in failslab/ignore-gfp-wait fail_page_alloc/ignore-gfp-wait fail_page_alloc/ignore-gfp-highmem; do echo N >$f; done
echo 0 >fail_page_alloc/min-order
`

// failModule lets one of 20 allocations fail that the module's code makes, or a function called by it, in the kernel's
// workers: they handle page faults. Processes do not make their objects there; those of each verb have failed before.
// New workers inherit make-it-fail from kthreadd.
const failModule = `exec bash -ec '
for p in 2 $(ps --ppid 2 -o pid=); do echo 1 >/proc/$p/make-it-fail || [ ! -e /proc/$p ]; done
set -- $(grep "^vnicd " /proc/modules)
cd /sys/kernel/debug
for f in failslab fail_page_alloc; do
	echo $6 >$f/require-start
	printf "0x%x" $(($6 + $2)) >$f/require-end
	echo 32 >$f/stacktrace-depth
	echo Y >$f/task-filter
	echo 1000000 >$f/times
	echo 5 >$f/probability
done'`

// mostFailures is that number of failures, more than there are. The kernel counts down.
const mostFailures = 1000000

const noInjection = `set -e
cd /sys/kernel/debug
for f in failslab fail_page_alloc; do echo 0 >$f/probability; done
`

// TestInjectedFailures runs the error paths of every verb: the first, the second, ... allocation or copy that the
// kernel does for the verb fails (integration/guest/inject), until the verb needs no more. Nothing is left behind in
// guest or host, the kernel does not complain, and the device works afterwards. Then page faults and releases run while
// allocations of the module fail at random.
func TestInjectedFailures(t *testing.T) {
	if release := os.Getenv("RELEASE"); release != harness.Debug {
		t.Skipf("the kernel of RELEASE=%q has no fault injection; `make test-debug` runs this test", release)
	}
	l, ctx := newLab(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	check(t, h.Run(ctx, `networks: [{name: blue, vni: 100}]
vms:
  - {name: vm1, network: blue, mac: "02:00:00:00:00:01"}
  - {name: vm2, network: blue, mac: "02:00:00:00:00:02"}
`))
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	ms = must[[]*qemu.Machine](t)(l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, vmA)),
		must[qemu.Config](t)(h.Config(ctx, vmB))))
	for _, m := range ms {
		check(t, lab.LoadModule(ctx, m))
		run(ctx, t, m, injection+"echo '<4>"+harness.InjectionBegins+"' >/dev/kmsg")
	}
	install(ctx, t, l, ms...)
	a := must[lab.End](t)(lab.NewEnd(ctx, ms[0], lab.Device, vmA.Addr))
	b := must[lab.End](t)(lab.NewEnd(ctx, ms[1], lab.Device, vmB.Addr))
	works := func() {
		t.Helper()
		must[string](t)(lab.Pingpong(ctx, a, b, "ibv_rc_pingpong", "-c", "-n", "100"))
	}
	before := objects(ctx, t, h, a.VM)
	for verb := range strings.FieldsSeq(run(ctx, t, a.VM, "/host/inject list")) {
		t.Run(verb, func(t *testing.T) {
			t.Log(strings.TrimSpace(run(ctx, t, a.VM, lab.Limited(3*time.Minute, fmt.Sprintf("/host/inject %s %d %s", a.Device,
				a.GID, verb)))))
			var left string
			eventually(ctx, t, "the objects are gone: "+before, func() bool {
				left = objects(ctx, t, h, a.VM)
				return left == before
			})
			quietKernels(ctx, t, a.VM)
		})
	}
	works()
	for _, m := range ms {
		run(ctx, t, m, failModule)
	}
	t.Run("page faults", func(t *testing.T) {
		stress(ctx, t, a, "-w atomic,send -r 8 -c release", b, "-r 8 -c release")
		for _, m := range ms {
			var slab, pages int
			_, err := fmt.Sscan(run(ctx, t, m, "cd /sys/kernel/debug && cat failslab/times fail_page_alloc/times"), &slab, &pages)
			check(t, err)
			t.Logf("%s: %d slab and %d page allocations of workers failed", m.Name(), mostFailures-slab, mostFailures-pages)
			if slab == mostFailures {
				t.Errorf("%s: nothing failed: the test shows nothing", m.Name())
			}
		}
	})
	for _, m := range ms {
		run(ctx, t, m, noInjection+"echo '<4>"+harness.InjectionEnds+"' >/dev/kmsg")
	}
	noneHeld(ctx, t, h, "vm1", "vm2")
	works()
	run(ctx, t, a.VM, "rmmod vnicd")
	check(t, lab.LoadModule(ctx, a.VM))
	works()
	quietKernels(ctx, t, ms...)
}

// objects are the numbers of a guest's RDMA objects, by its kernel and by its host.
func objects(ctx context.Context, t *testing.T, h *lab.Host, m *qemu.Machine) string {
	t.Helper()
	s := hcaStatus(ctx, t, h, m.Name())
	return fmt.Sprintf("%s; host: %d PDs, %d CQs, %d SRQs, %d QPs, %d MRs, %d translations",
		strings.TrimSpace(run(ctx, t, m, "rdma resource show "+lab.Device)), s.PDs, s.CQs, s.SRQs, len(s.QPs), s.MRs, s.MTTs)
}
