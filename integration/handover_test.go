package integration

import (
	"context"
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/integration/harness"
	"github.com/vnicd/vnicd/integration/lab"
)

var handovers = flag.Int("handovers", 6, "how often TestHandover restarts vnicd; 200 for the long test")

// TestHandover: the vnicds of two hosts are replaced in turns while VMs on them use RC connections: programs that poll
// and programs that sleep go on without an error, and what they transfer is right (CO-1). One is stopped and started
// again under a service manager, the other is replaced by its keeper (`vnicd upgrade`). The last two times the VM is
// paused meanwhile.
func TestHandover(t *testing.T) {
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
	eventually(ctx, t, "both connections are open", func() bool {
		return connected(ctx, t, w.a, "vm1") == 2 && connected(ctx, t, w.b, "vm2") == 2
	})
	var silences []time.Duration
	for i := range *handovers {
		victim := []*lab.Host{w.a, w.b}[i%2]
		start := time.Now()
		paused := w.vms[i%2].QMP()
		if i >= *handovers-2 {
			check(t, paused.Run(ctx, "stop", nil, nil))
		}
		if victim.Keep {
			t.Log(must[string](t)(victim.CLI(ctx, "upgrade")))
		} else {
			check(t, victim.Stop(ctx))
			check(t, victim.Start(ctx))
		}
		if i >= *handovers-2 {
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
			if n := connected(ctx, t, h.host, h.vm); n != 2 {
				t.Errorf("%d: %d queue pairs of %s are connected, want 2", i, n, h.vm)
			}
		}
		silences = append(silences, time.Since(start))
		for what, p := range programs {
			vm := w.vms[0]
			if what == "server that polls" || what == "server that sleeps" {
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
	t.Logf("from the stop of vnicd to 1000 packets after its start: %v", silences)
	for what, p := range programs {
		if t.Failed() {
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
