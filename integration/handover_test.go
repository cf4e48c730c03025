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
	"github.com/vnicd/vnicd/integration/harness"
	"github.com/vnicd/vnicd/integration/lab"
)

var handovers = flag.Int("handovers", 6, "how often TestHandover restarts vnicd; 200 for the long test")

var kills = flag.Int("kills", 8, "how often TestKill kills vnicd; 500 for the long test")

// TestHandover: the vnicds of two hosts are replaced in turns while VMs on them use RC connections: programs that poll
// and programs that sleep go on without an error, and what they transfer is right (CO-1). One is stopped and started
// again under a service manager, the other is replaced by its keeper (`vnicd upgrade`). The last two times the VM is
// paused meanwhile.
func TestHandover(t *testing.T) {
	outlive(t, *handovers, func(ctx context.Context, h *lab.Host) {
		if h.Keep {
			t.Log(must[string](t)(h.CLI(ctx, "upgrade")))
			return
		}
		check(t, h.Stop(ctx))
		check(t, h.Start(ctx))
	})
}

// TestKill is TestHandover with SIGKILL, at any moment (CO-2).
func TestKill(t *testing.T) {
	outlive(t, *kills, func(ctx context.Context, h *lab.Host) {
		if !h.Keep {
			check(t, h.Proc.Signal(syscall.SIGKILL))
			<-h.Proc.Done()
			check(t, h.Start(ctx))
			return
		}
		pid := func() int {
			s, err := h.Status(ctx)
			if err != nil {
				return 0 // it is not back yet
			}
			return int(s["pid"].(float64))
		}
		was := pid()
		check(t, syscall.Kill(was, syscall.SIGKILL))
		eventually(ctx, t, "the keeper starts another vnicd", func() bool { n := pid(); return n != 0 && n != was })
	})
}

// outlive runs programs in VMs of two hosts, of which one has a service manager and the other a keeper, and replaces
// their vnicds in turns; times says how often.
func outlive(t *testing.T, times int, replace func(context.Context, *lab.Host)) {
	l, ctx := newLab(t)
	va := vmA
	va.MemoryMiB = 3072 // more than q35 has below 4 GiB, so it has several regions, in one file
	w := makeTwoHosts(ctx, t, l, func(w *twoHosts) {
		w.a.Manager = must[*harness.ServiceManager](t)(harness.NewServiceManager(w.a.Dir))
		l.Add(func() { check(t, w.a.Manager.Close()) })
		w.b.Keep = true
	}, va, vmB)
	dumpOnFailure(t, []*lab.Host{w.a, w.b}, &w.vms)
	a, b := w.load(ctx, t)
	programs := map[string]*qemu.Process{}
	programs["client that polls"], programs["server that polls"] = w.stream(ctx, t, a, b)
	programs["client that sleeps"], programs["server that sleeps"] = sleepingPingpong(ctx, t, a, b)
	for i, name := range []string{"ib_read_bw", "ib_atomic_bw"} {
		port := 18700 + i
		line := fmt.Sprintf("exec timeout -k 5 3600 %s -F -p %d --run_infinitely -D 1 -d %%s -x %%d %%s", name, port)
		programs["server of "+name] = must[*qemu.Process](t)(b.VM.StartShell(ctx, fmt.Sprintf(line, b.Device, b.GID, "")))
		check(t, harness.WaitGuest(ctx, b.VM, fmt.Sprintf("ss -ltn | grep -q :%d", port)))
		programs["client of "+name] = must[*qemu.Process](t)(a.VM.StartShell(ctx, fmt.Sprintf(line, a.Device, a.GID, b.Addr)))
	}
	const pairs = 4
	eventually(ctx, t, "all connections are open", func() bool {
		return connected(ctx, t, w.a, "vm1") == pairs && connected(ctx, t, w.b, "vm2") == pairs
	})
	var silences []time.Duration
	for i := range times {
		victim := []*lab.Host{w.a, w.b}[i%2]
		start := time.Now()
		paused := w.vms[i%2].QMP()
		if i >= times-2 {
			check(t, paused.Run(ctx, "stop", nil, nil))
		}
		replace(ctx, victim)
		if i >= times-2 {
			check(t, paused.Run(ctx, "cont", nil, nil))
		}
		// The counters of the new vnicd begin at 0.
		for _, h := range []struct {
			host *lab.Host
			vm   string
		}{{w.a, "vm1"}, {w.b, "vm2"}} {
			before := uint64(0)
			if h.host != victim {
				before = packets(ctx, t, h.host, h.vm)
			}
			eventually(ctx, t, "traffic of "+h.vm, func() bool { return packets(ctx, t, h.host, h.vm) > before+1000 })
			if n := connected(ctx, t, h.host, h.vm); n != pairs {
				t.Errorf("%d: %d queue pairs of %s are connected, want %d", i, n, h.vm, pairs)
			}
		}
		silences = append(silences, time.Since(start))
		for what, p := range programs {
			vm := w.vms[0]
			if strings.HasPrefix(what, "server") {
				vm = w.vms[1]
			}
			if r := must[qemu.Result](t)(vm.Shell(ctx, fmt.Sprint("kill -0 ", p.PID()))); r.ExitCode != 0 {
				t.Errorf("%d: the %s has ended", i, what)
			}
		}
		if t.Failed() {
			break
		}
	}
	t.Logf("from the end of vnicd to 1000 packets after the start of the next: %v", silences)
	for what, p := range programs {
		if t.Failed() {
			check(t, p.Kill(ctx)) // unless it has ended
			r := must[qemu.Result](t)(p.Wait(ctx))
			t.Logf("the %s: status %d: %s%s", what, r.ExitCode, tail(r.Stdout, 300), tail(r.Stderr, 300))
			continue
		}
		check(t, p.Signal(ctx, "INT"))
	}
	// Objects are released, and new ones made, as if nothing had happened.
	eventually(ctx, t, "no queue pairs remain",
		func() bool { return rdmaQPs(ctx, t, w.a, "vm1") == 1 && rdmaQPs(ctx, t, w.b, "vm2") == 1 })
	must[string](t)(lab.Pingpong(ctx, a, b, "ibv_rc_pingpong", "-c", "-n", "50"))
	must[string](t)(lab.Pingpong(ctx, a, b, "ibv_ud_pingpong", "-n", "50"))
	quietKernels(ctx, t, w.vms...)
}

// packets returns the number of packets that a VM's HCA sent since its vnicd started.
func packets(ctx context.Context, t *testing.T, h *lab.Host, vm string) uint64 {
	t.Helper()
	return hcaStatus(ctx, t, h, vm).Stats["tx_packets"]
}
