package integration

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// thorough is true for long runs, which must cover all of a large region.
func thorough() bool { return *odpDuration >= time.Minute }

// TestODPOversubscribed: guests of 512 MiB register 1 GiB, and the peers write and read all of it, in both directions
// at once; then also with the host's memory limited, so that both stages fault (PF-15). Finally a VM is reset and a
// daemon killed during the load: nothing stays stuck or held.
func TestODPOversubscribed(t *testing.T) {
	l, ctx := newLab(t)
	group := must[*harness.MemoryGroup](t)(harness.NewMemoryGroup("vnicd-odp"))
	l.Add(func() {
		if err := group.Close(); err != nil {
			t.Error(err)
		}
	})
	va, vb := vmA, vmB
	for _, v := range []*lab.VM{&va, &vb} {
		v.MemoryMiB, v.SwapMiB, v.Budget = 512, 2048, "128MiB"
	}
	w := makeTwoHosts(ctx, t, l, func(w *twoHosts) { w.a.Group = group }, va, vb)
	a, b := w.load(ctx, t)
	for _, m := range w.vms {
		run(ctx, t, m, "mkswap /dev/vdb && swapon /dev/vdb")
	}
	install(ctx, t, l, w.vms...)
	// A long run covers all of the region. A short one cannot write more than a guest's memory, so there the guests get
	// less memory.
	all := ""
	if thorough() {
		all = " -C -s 262144" // an absent page costs per message
	} else {
		for _, m := range w.vms {
			run(ctx, t, m,
				`a=$(awk '/MemAvailable/ {print int($2/1024)}' /proc/meminfo); echo $(((a - 80) / 2)) >/proc/sys/vm/nr_hugepages`)
		}
	}
	oversubscribe := func(t *testing.T) {
		t.Helper()
		before := []int{swapped(ctx, t, w.vms[0]), swapped(ctx, t, w.vms[1])}
		stress(ctx, t, a, "-r 1024 -H 120 -w atomic"+all, b, "-r 1024 -H 120")
		for i, m := range w.vms {
			n := swapped(ctx, t, m) - before[i]
			t.Logf("%s swapped %d pages", m.Name(), n)
			if n == 0 {
				t.Errorf("%s did not swap: its memory was not oversubscribed", m.Name())
			}
		}
	}
	t.Run("guest", oversubscribe)

	remove, err := harness.AddSwap(l.Dir+"/swap", 1536)
	check(t, err)
	l.Add(func() {
		if err := remove(); err != nil {
			t.Error(err)
		}
	})
	shrink, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	before := must[uint64](t)(group.Usage())
	check(t, group.SetLimit(shrink, before*2/3))
	t.Logf("host memory limited to %d MiB of %d", before*2/3>>20, before>>20)
	t.Run("both", func(t *testing.T) {
		oversubscribe(t)
		s := statusOf(ctx, t, w.a, "vm1")
		f := s.HCA.Faults
		t.Logf("vm1: %d guest faults, %d host faults, %d MiB resident of budget %d MiB", f.Guest.Raised, f.Host.Raised,
			s.Memory.Resident>>20, s.Memory.Budget>>20)
		if f.Host.Raised == 0 {
			t.Error("no host faults: stage two was not tested")
		}
	})
	check(t, group.SetLimit(ctx, 0))
	noneHeld(ctx, t, w.a, "vm1")
	noneHeld(ctx, t, w.b, "vm2")
	quietKernels(ctx, t, w.vms...)

	start := func(server, client lab.End) (*qemu.Process, *qemu.Process) {
		// The retries of a dead peer last for nearly two minutes; only then do operations hang.
		s := must[*qemu.Process](t)(lab.Listen(ctx, server.VM, lab.StressCommand(server, "-r 1024 -H 240", ""),
			lab.StressPort))
		c := must[*qemu.Process](t)(client.VM.StartShell(ctx, "exec timeout -k 5 400 "+
			lab.StressCommand(client, "-t 300 -r 1024 -H 240", server.Addr)))
		before := hcaStatus(ctx, t, w.a, "vm1").Faults.Guest.Raised
		eventually(ctx, t, "faults", func() bool { return hcaStatus(ctx, t, w.a, "vm1").Faults.Guest.Raised > before+100 })
		return s, c
	}
	ended := func(t *testing.T, p *qemu.Process) {
		t.Helper()
		r := must[qemu.Result](t)(p.Wait(ctx))
		t.Logf("the survivor's program: exit %d, %s", r.ExitCode, tail(r.Stderr, 300))
		if r.ExitCode == 0 || r.ExitCode == 124 || r.ExitCode == 2 || r.ExitCode == 3 {
			t.Errorf("the survivor's program ended with status %d", r.ExitCode)
		}
	}
	t.Run("VM reset", func(t *testing.T) {
		_, c := start(b, a)
		check(t, w.vms[1].Reset(ctx))
		ended(t, c)
		eventually(ctx, t, "the survivor's QPs are gone", func() bool { return rdmaQPs(ctx, t, w.a, "vm1") == 1 })
		// The previous driver's objects, faults included, are frozen until a new driver starts.
		check(t, lab.LoadModule(ctx, w.vms[1]))
		noneHeld(ctx, t, w.b, "vm2")
		run(ctx, t, w.vms[1], "mkswap /dev/vdb && swapon /dev/vdb")
		install(ctx, t, l, w.vms[1])
		b = must[lab.End](t)(lab.NewEnd(ctx, w.vms[1], lab.Device, vb.Addr))
		must[string](t)(lab.Pingpong(ctx, a, b, "ibv_rc_pingpong", "-o", "-c", "-n", "50"))
	})
	t.Run("daemon killed", func(t *testing.T) {
		s, c := start(b, a)
		w.a.Proc.Kill()
		ended(t, c)
		ended(t, s)
		// No worker of the driver is stuck in an unanswered page fault.
		run(ctx, t, w.vms[0], "timeout 60 rmmod vnicd")
		noneHeld(ctx, t, w.b, "vm2")
	})
	quietKernels(ctx, t, w.vms...)
	t.Run("VM killed", func(t *testing.T) {
		w.vms[1].Kill()
		eventually(ctx, t, "none of its memory is held", func() bool {
			m := statusOf(ctx, t, w.b, "vm2").Memory
			return m.Resident == 0 && m.Held == 0
		})
	})
}

// swapped returns the number of pages that a guest swapped out and in.
func swapped(ctx context.Context, t *testing.T, m *qemu.Machine) (n int) {
	t.Helper()
	_, err := fmt.Sscan(run(ctx, t, m, "awk '/^pswp(in|out) / {n += $2} END {print n}' /proc/vmstat"), &n)
	check(t, err)
	return n
}
