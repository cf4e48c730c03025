package integration

import (
	"context"
	"flag"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

var restarts = flag.Int("restarts", 3, "how often TestContinuity kills vnicd; 20 for the long test")

// managed starts the vnicds of both hosts under a service manager.
func managed(t *testing.T, l *lab.Lab) func(*twoHosts) {
	return func(w *twoHosts) {
		for _, h := range []*lab.Host{w.a, w.b} {
			m, err := harness.NewServiceManager(h.Dir)
			check(t, err)
			h.Manager = m
			l.Add(func() { check(t, m.Close()) })
		}
	}
}

// sleepingPingpong starts ibv_rc_pingpong that sleeps between messages and compares their data.
func sleepingPingpong(ctx context.Context, t *testing.T, a, b lab.End) (client, server *qemu.Process) {
	t.Helper()
	const pingpong = "exec timeout -k 5 400 ibv_rc_pingpong -c -e -n 100000000 -p 18599 -d vnic0 -g %d %s"
	server = must[*qemu.Process](t)(b.VM.StartShell(ctx, fmt.Sprintf(pingpong, b.GID, "")))
	check(t, harness.WaitGuest(ctx, b.VM, "ss -ltn | grep -q :18599"))
	client = must[*qemu.Process](t)(a.VM.StartShell(ctx, fmt.Sprintf(pingpong, a.GID, b.Addr)))
	return client, server
}

// TestContinuity: a vnicd without a journal is killed and started again while two VMs have an RC connection in use
// and a TCP stream between them. The stream continues. RDMA programs, polling and sleeping ones, end with errors by
// themselves; the HCA comes back by itself and works again. The last time the VM is paused meanwhile. Nothing is left
// over on host or guest.
func TestContinuity(t *testing.T) {
	l, ctx := newLab(t)
	w := makeTwoHosts(ctx, t, l, managed(t, l), vmA, vmB, "journal: false")
	a, b := w.load(ctx, t)
	tcp := must[*qemu.Process](t)(w.vms[1].StartShell(ctx, "exec iperf3 -s -1 -p 5301"))
	check(t, harness.WaitGuest(ctx, w.vms[1], "ss -ltn | grep -q :5301"))
	stream := must[*qemu.Process](t)(w.vms[0].StartShell(ctx,
		fmt.Sprintf("exec iperf3 -c %s -p 5301 -b 1M -t 3600", strings.TrimSuffix(vmB.Addr, "/24"))))

	flows := func(when string) {
		t.Helper()
		moved := received(ctx, t, w.vms[1])
		eventually(ctx, t, "TCP flows "+when, func() bool { return received(ctx, t, w.vms[1]) > moved+300_000 })
	}
	flows("at first")

	kept := func() (n int) {
		for _, name := range w.a.Manager.Kept() {
			if strings.HasPrefix(name, "hca/vm1") || strings.HasPrefix(name, "net/vm1") {
				n++
			}
		}
		return n
	}
	eventually(ctx, t, "the connections of HCA and network card are kept", func() bool { return kept() >= 8 })
	first := kept()
	for i := range *restarts {
		victim, vm := w.a, w.vms[0]
		if i%2 == 1 {
			victim, vm = w.b, w.vms[1]
		}
		// Some programs poll, some sleep.
		programs := map[string]*qemu.Process{}
		programs["client that polls"], programs["server that polls"] = w.stream(ctx, t, a, b)
		programs["client that sleeps"], programs["server that sleeps"] = sleepingPingpong(ctx, t, a, b)
		eventually(ctx, t, "both connections are open", func() bool {
			return connected(ctx, t, w.a, "vm1") == 2 && connected(ctx, t, w.b, "vm2") == 2
		})
		start := time.Now()
		last := i == *restarts-1
		if last {
			check(t, vm.QMP().Run(ctx, "stop", nil, nil))
		}
		check(t, victim.Proc.Signal(syscall.SIGKILL))
		<-victim.Proc.Done()
		check(t, victim.Start(ctx))
		if last {
			check(t, vm.QMP().Run(ctx, "cont", nil, nil))
		}
		// Programs in the VM whose vnicd restarted must end, and so must those that send to it. A program on the other
		// side that only waits for messages does not learn of it, as with any RC connection.
		idle := map[bool]string{true: "server that sleeps", false: "client that sleeps"}[victim == w.a]
		check(t, programs[idle].Signal(ctx, "KILL"))
		for what, p := range programs {
			r := must[qemu.Result](t)(p.Wait(ctx))
			t.Logf("%d: the %s ended with status %d: %s", i, what, r.ExitCode, tail(strings.TrimSpace(r.Stderr), 100))
			if r.ExitCode == 0 || r.ExitCode == 124 {
				t.Errorf("%d: the %s did not end", i, what)
			}
		}
		check(t, lab.WaitRDMA(ctx, vm, lab.Device))
		t.Logf("%d: the HCA of %s was back after %.1f s", i, vm.Name(), time.Since(start).Seconds())
		a, b = must[lab.End](t)(lab.NewEnd(ctx, w.vms[0], lab.Device, vmA.Addr)),
			must[lab.End](t)(lab.NewEnd(ctx, w.vms[1], lab.Device, vmB.Addr))
		must[string](t)(lab.Pingpong(ctx, a, b, "ibv_rc_pingpong", "-c", "-n", "50"))
		flows("again")
		eventually(ctx, t, "no queue pairs remain",
			func() bool { return rdmaQPs(ctx, t, w.a, "vm1") == 1 && rdmaQPs(ctx, t, w.b, "vm2") == 1 })
	}
	if n := kept(); n != first {
		t.Errorf("%d descriptors are kept for vm1, %d before: %v", n, first, w.a.Manager.Kept())
	}
	for _, p := range []*qemu.Process{stream, tcp} {
		check(t, p.Signal(ctx, "INT"))
		r := must[qemu.Result](t)(p.Wait(ctx))
		if strings.Contains(r.Stderr, "error") && !strings.Contains(r.Stderr, "interrupt") {
			t.Errorf("the TCP stream broke: %s", r.Stderr)
		}
	}
	quietKernels(ctx, t, w.vms...)
	// A VM that exits leaves nothing behind.
	w.vms[0].Kill()
	defer func() {
		if t.Failed() {
			t.Logf("kept: %q", w.a.Manager.Kept())
		}
	}()
	eventually(ctx, t, "no descriptors are kept for an exited VM", func() bool { return kept() == 0 })
}

// connected returns the number of RC QPs of a VM in RTR or beyond: before RTR their programs may still wait for each
// other on TCP. A server that only receives stays in RTR.
func connected(ctx context.Context, t *testing.T, h *lab.Host, vm string) (n int) {
	t.Helper()
	for _, q := range hcaStatus(ctx, t, h, vm).QPs {
		if q.Type == "RC" && (q.State == "RTR" || q.State == "RTS") {
			n++
		}
	}
	return n
}

// received returns the number of bytes that the guest's network card received.
func received(ctx context.Context, t *testing.T, m *qemu.Machine) (n int) {
	t.Helper()
	_, err := fmt.Sscan(run(ctx, t, m, "cat /sys/class/net/eth0/statistics/rx_bytes"), &n)
	check(t, err)
	return n
}
