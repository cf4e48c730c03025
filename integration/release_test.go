package integration

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// TestReleaseWhileLost: vnicd is stopped (SIGSTOP) for longer than the guest's driver waits for an answer, while a
// program releases memory that its peer writes, and goes on later. The driver gives up the device, but the releases
// wait: nothing is written to a page after its release (TR-5, ODP-5), and nothing hangs.
func TestReleaseWhileLost(t *testing.T) {
	l, ctx := newLab(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	check(t, h.Run(ctx, `networks:
  - {name: blue, vni: 100}
vms:
  - {name: vm1, network: blue, mac: "02:00:00:00:00:01"}
`))
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	// A failed test must not leave it stopped: it could not end.
	t.Cleanup(func() { _ = h.Proc.Signal(syscall.SIGCONT) })
	v := vmA
	v.CPUs = 2
	v.KernelArgs = []string{"page_poison=1", "loglevel=7"} // the console shows warnings
	ms, err := l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, v)))
	check(t, err)
	check(t, harness.LoadModule(ctx, ms[0], "/host/vnicd.ko", "cmd_timeout_ms=3000", "fence_timeout_ms=600000"))
	check(t, lab.WaitRDMA(ctx, ms[0], lab.Device))
	check(t, l.Programs(ctx, l.Share))

	for i := range 3 {
		// A late answer ends the wait.
		t.Run(fmt.Sprintf("late answer %d", i), func(t *testing.T) {
			releaseWhileStopped(ctx, t, h, ms[0], "device lost", 0, 6*time.Second)
		})
	}
	t.Run("reset", func(t *testing.T) {
		// No answer: the driver resets the device, which waits in QEMU until vnicd goes on.
		run(ctx, t, ms[0], "echo 3000 >/sys/module/vnicd/parameters/fence_timeout_ms")
		releaseWhileStopped(ctx, t, h, ms[0], "resetting the device", 3*time.Second, 6*time.Second)
	})
	quietKernels(ctx, t, ms...)
}

// releaseWhileStopped stops vnicd until the guest's kernel has logged sign, and then for stop, while the program
// `released` runs. At least one release must have waited from the loss of the device, which is at least lead before
// sign, to the end of the stop.
func releaseWhileStopped(ctx context.Context, t *testing.T, h *lab.Host, m *qemu.Machine, sign string, lead,
	stop time.Duration) {
	t.Helper()
	const up = "RDMA device " + lab.Device
	end := must[lab.End](t)(lab.NewEnd(ctx, m, lab.Device, vmA.Addr))
	run(ctx, t, m, "rm -f /tmp/released.ready")
	p := must[*qemu.Process](t)(m.StartShell(ctx, fmt.Sprintf("exec timeout -k 5 300 /host/released %s %d", end.Device,
		end.GID)))
	if err := harness.WaitGuest(ctx, m, fmt.Sprintf("[ -e /tmp/released.ready ] || ! kill -0 %d", p.PID())); err != nil {
		t.Fatal(err)
	}
	run(ctx, t, m, "ls /tmp/released.ready")
	before, signs := strings.Count(run(ctx, t, m, "dmesg"), up), strings.Count(console(t, m), sign)

	check(t, h.Proc.Signal(syscall.SIGSTOP))
	defer func() { _ = h.Proc.Signal(syscall.SIGCONT) }()
	// On the console, because the guest's agent may not answer: a reset blocks QEMU. Linux 7.3 prints in a thread, which
	// is then too late.
	eventually(ctx, t, "the guest's kernel reports: "+sign, func() bool {
		return strings.Count(console(t, m), sign) > signs || blocked(ctx, m)
	})
	time.Sleep(stop)
	check(t, h.Proc.Signal(syscall.SIGCONT))
	eventually(ctx, t, "the guest's console shows: "+sign, func() bool {
		return strings.Count(console(t, m), sign) > signs
	})

	eventually(ctx, t, "the HCA is back", func() bool {
		log := run(ctx, t, m, "dmesg")
		if off := strings.LastIndex(log, "RDMA is off until"); off >= 0 && !strings.Contains(log[off:], up) {
			// It was reset before it could answer.
			run(ctx, t, m, "cd /sys/bus/virtio/drivers/vnicd && d=$(basename $(ls -d virtio*)) && echo $d >unbind && echo $d >bind")
		}
		return strings.Count(log, up) > before
	})
	check(t, lab.WaitRDMA(ctx, m, lab.Device))
	check(t, p.Signal(ctx, "TERM"))
	r := must[qemu.Result](t)(p.Wait(ctx))
	t.Logf("exit status %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	if r.ExitCode != 0 {
		t.Fatal("a page changed after its release, or the program failed")
	}
	var longest int
	if _, err := fmt.Sscanf(r.Stdout, "longest release %d ms", &longest); err != nil {
		t.Fatal(err)
	}
	// Perhaps none waited from the beginning of the stop: another command may have been the first to time out.
	if least := lead + stop - time.Second; time.Duration(longest)*time.Millisecond < least {
		t.Errorf("the longest release took %d ms, want at least %v: none waited for the device", longest, least)
	}
}

// blocked reports that QEMU does not answer for 10 s: its main loop waits.
func blocked(ctx context.Context, m *qemu.Machine) bool {
	answered := make(chan struct{})
	go func() { // ends when QEMU goes on
		_, _ = m.QMP().Status(ctx)
		close(answered)
	}()
	select {
	case <-answered:
		return false
	case <-time.After(10 * time.Second):
		return true
	}
}

func console(t *testing.T, m *qemu.Machine) string {
	t.Helper()
	return string(must[[]byte](t)(os.ReadFile(m.Console())))
}
