package integration

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// TestReleaseWhileStopped: the stress of TestODPRelease between two VMs, in both directions, in whose midst vnicd is
// stopped (SIGSTOP) for a minute, with the module's default parameters: the guests' drivers give up the device after
// 20 s, but their releases wait for its answer (TR-5, ODP-5). Nothing is written to a page after its release, the
// programs end, and the devices come back by themselves. The owners of odpstress may be waiting for each other when
// vnicd stops; the program `released` in each VM never waits for anything but its releases.
func TestReleaseWhileStopped(t *testing.T) {
	l, ctx := newLab(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	check(t, h.Run(ctx, `networks:
  - {name: blue, vni: 100}
vms:
  - {name: vm1, network: blue, mac: "02:00:00:00:00:01"}
  - {name: vm2, network: blue, mac: "02:00:00:00:00:02"}
`))
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	// A failed test must not leave it stopped: it could not end.
	t.Cleanup(func() { _ = h.Proc.Signal(syscall.SIGCONT) })
	va, vb := vmA, vmB
	for _, v := range []*lab.VM{&va, &vb} {
		v.CPUs, v.KernelArgs = 2, []string{"page_poison=1"}
	}
	var err error
	ms, err = l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, va)), must[qemu.Config](t)(h.Config(ctx, vb)))
	check(t, err)
	for _, m := range ms {
		check(t, lab.LoadModule(ctx, m))
	}
	install(ctx, t, l, ms...)
	ends := func() (a, b lab.End) {
		return must[lab.End](t)(lab.NewEnd(ctx, ms[0], lab.Device, va.Addr)),
			must[lab.End](t)(lab.NewEnd(ctx, ms[1], lab.Device, vb.Addr))
	}
	a, b := ends()

	const stop = time.Minute
	const timeout = 20 * time.Second // cmd_timeout_ms: of a command that may not be a release, which then begin later
	// The operations wait for longer than the stop, and released memory is watched for longer than that, too.
	const limit = 8 * time.Minute
	opts := fmt.Sprintf("-w atomic,send -r 8 -c release -H %d -L 90", int(harness.Patience(5*time.Minute).Seconds()))
	start := func(e lab.End, more, to string) *qemu.Process {
		return must[*qemu.Process](t)(e.VM.StartShell(ctx, lab.Limited(limit, lab.StressCommand(e, opts+more, to))))
	}
	server := start(b, "", "")
	check(t, harness.WaitGuest(ctx, b.VM, fmt.Sprintf("ss -ltnH | grep -q :%d || ! kill -0 %d", lab.StressPort,
		server.PID())))
	client := start(a, fmt.Sprintf(" -t %d", int(harness.Patience(limit).Seconds())), b.Addr)
	var releasing []*qemu.Process
	for _, e := range []lab.End{a, b} {
		p := must[*qemu.Process](t)(e.VM.StartShell(ctx, lab.Limited(limit, fmt.Sprintf("/host/released %s %d", e.Device,
			e.GID))))
		check(t, harness.WaitGuest(ctx, e.VM, fmt.Sprintf("[ -e /tmp/released.ready ] || ! kill -0 %d", p.PID())))
		releasing = append(releasing, p)
	}
	eventually(ctx, t, "both VMs release memory that is in use", func() bool {
		return hcaStatus(ctx, t, h, "vm1").Faults.Invalidations > 500 &&
			hcaStatus(ctx, t, h, "vm2").Faults.Invalidations > 500
	})

	check(t, h.Proc.Signal(syscall.SIGSTOP))
	time.Sleep(stop)
	check(t, h.Proc.Signal(syscall.SIGCONT))

	for _, p := range []struct {
		vm string
		*qemu.Process
	}{{"vm1", client}, {"vm2", server}} {
		r := must[qemu.Result](t)(p.Wait(ctx))
		t.Logf("%s: exit status %d: %s%s", p.vm, r.ExitCode, tail(r.Stdout, 300), r.Stderr)
		// The device or the other side was lost. Wrong bytes would be status 2, a hang 3 or that of `timeout`.
		if r.ExitCode != 4 && r.ExitCode != 5 {
			t.Errorf("%s: exit status %d, want 4 or 5", p.vm, r.ExitCode)
		}
		if !strings.Contains(r.Stdout, "watched released memory") {
			t.Errorf("%s: released memory was not watched", p.vm)
		}
	}
	for _, m := range ms {
		eventually(ctx, t, "the HCA of "+m.Name()+" is back", func() bool {
			log := run(ctx, t, m, "dmesg")
			return strings.Contains(log, "device lost") && strings.Count(log, "RDMA device "+lab.Device) >= 2
		})
		check(t, lab.WaitRDMA(ctx, m, lab.Device))
	}
	for i, p := range releasing {
		check(t, p.Signal(ctx, "TERM"))
		r := must[qemu.Result](t)(p.Wait(ctx))
		t.Logf("%s: exit status %d: %s%s", ms[i].Name(), r.ExitCode, r.Stdout, r.Stderr)
		var longest int
		if _, err := fmt.Sscanf(r.Stdout, "longest release %d ms", &longest); r.ExitCode != 0 || err != nil {
			t.Errorf("%s: a page changed after its release, or the program failed", ms[i].Name())
		} else if least := stop - timeout - 5*time.Second; time.Duration(longest)*time.Millisecond < least {
			t.Errorf("%s: the longest release took %d ms, want at least %v: none waited for vnicd", ms[i].Name(), longest,
				least)
		}
	}
	a, b = ends()
	stress(ctx, t, a, "-w atomic,send -r 8 -c release", b, "-r 8 -c release")
	noneHeld(ctx, t, h, "vm1", "vm2")
	quietKernels(ctx, t, ms...)
}
