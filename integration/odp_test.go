package integration

import (
	"context"
	"flag"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// odpDuration is the length of each page fault stress. The requirement is a minute; `make test` has less time.
var odpDuration = flag.Duration("odp.duration", 5*time.Second,
	"duration of each run of odpstress; 1m for the long tests")

// install compiles odpstress and copies it into guests.
func install(ctx context.Context, t *testing.T, l *lab.Lab, ms ...*qemu.Machine) {
	t.Helper()
	check(t, l.Programs(ctx, l.Share))
	for _, m := range ms {
		check(t, lab.InstallPrograms(ctx, m))
	}
}

// stress runs odpstress for odpDuration and logs the last line of its output.
func stress(ctx context.Context, t *testing.T, client lab.End, clientOpts string, server lab.End, serverOpts string) {
	t.Helper()
	start := time.Now()
	out, err := lab.Stress(ctx, *odpDuration, client, clientOpts, server, serverOpts)
	for line := range strings.Lines(out) {
		if strings.Contains(line, "result") || strings.Contains(line, "verified") || strings.Contains(line, "chaos") {
			t.Logf("%3.0fs %s", time.Since(start).Seconds(), strings.TrimSpace(line))
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestODPPrograms: stock programs use on-demand paging between two hosts, explicit and implicit, and against Linux rxe
// (ODP-1, ODP-2, ODP-7). Nothing is pinned: odpstress fails if VmPin or VmLck grows (ODP-4).
func TestODPPrograms(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	a, b := w.load(ctx, t)
	install(ctx, t, l, w.vms...)

	t.Run("capabilities", func(t *testing.T) {
		out := run(ctx, t, w.vms[0], "ibv_devinfo -v -d vnic0")
		for _, want := range []string{
			`general_odp_caps:\s+ODP_SUPPORT\s+ODP_SUPPORT_IMPLICIT`,
			`rc_odp_caps:\s+SUPPORT_SEND\s+SUPPORT_RECV\s+SUPPORT_WRITE\s+SUPPORT_READ\s+SUPPORT_ATOMIC\s+SUPPORT_SRQ`,
			`ud_odp_caps:\s+SUPPORT_SEND`,
		} {
			if !regexp.MustCompile(want).MatchString(out) {
				t.Errorf("ibv_devinfo lacks %q:\n%s", want, out)
			}
		}
	})
	before := hcaStatus(ctx, t, w.b, "vm2").Faults.Guest.Raised
	odpPrograms(ctx, t, l.Images.Release, a, b)
	if n := hcaStatus(ctx, t, w.b, "vm2").Faults.Guest.Raised; n == before {
		t.Error("no page fault occurred: the test shows nothing")
	}
	t.Run("verified", func(t *testing.T) { stress(ctx, t, a, "-w atomic,send,ud", b, "") })
	t.Run("verified-implicit", func(t *testing.T) {
		stress(ctx, t, a, "-w atomic,send -m implicit -l implicit", b, "-m implicit -l implicit")
	})
	t.Run("no-rnr-retries", func(t *testing.T) { stress(ctx, t, a, "-R 0 -w atomic", b, "-R 0") })
	t.Run("prefetch", func(t *testing.T) {
		t.Log(run(ctx, t, a.VM, lab.Limited(4*time.Minute, fmt.Sprintf("/host/prefetch %s %d kernel", a.Device, a.GID))))
	})
	accessErrors(ctx, t, a, b)
	t.Run("tool", func(t *testing.T) { toolDetects(ctx, t, a, b) })
	quietKernels(ctx, t, w.vms...)

	// The same with rxe in vm2, which runs without on-demand paging.
	run(ctx, t, w.vms[1], "rmmod vnicd")
	check(t, harness.AddRXE(ctx, w.vms[1], "rxe0", "eth0"))
	check(t, lab.WaitRDMA(ctx, w.vms[1], "rxe0"))
	rxe := must[lab.End](t)(lab.NewEnd(ctx, w.vms[1], "rxe0", vmB.Addr))
	for _, d := range []struct {
		name string
		swap bool
	}{{"to-rxe", false}, {"from-rxe", true}} {
		t.Run(d.name, func(t *testing.T) {
			run := func(f func(context.Context, lab.End, lab.End, string, ...string) (string, error), odp, program string,
				opts ...string) {
				t.Helper()
				client, server := a, rxe
				client.Opts = odp
				if d.swap {
					client, server = server, client
				}
				must[string](t)(f(ctx, client, server, program, opts...))
			}
			run(lab.Pingpong, "-o", "ibv_rc_pingpong", "-c", "-n", "100")
			run(lab.Pingpong, "-oO", "ibv_rc_pingpong", "-c", "-n", "100")
			for _, p := range []string{"ib_write_bw", "ib_read_bw", "ib_send_bw"} {
				run(lab.Perftest, "--odp", p, "-s", "65536", "-n", "20")
			}
		})
	}
	t.Run("rxe-verified", func(t *testing.T) { stress(ctx, t, a, "-r 16 -w rdma,send", rxe, "-r 16 -m pinned -l pinned") })
	t.Run("rxe-no-rnr-retries", func(t *testing.T) {
		stress(ctx, t, a, "-R 0 -r 16 -w rdma", rxe, "-R 0 -r 16 -m pinned -l pinned")
	})
	quietKernels(ctx, t, w.vms...)
}

// odpPrograms runs the stock programs with on-demand paging at both ends.
func odpPrograms(ctx context.Context, t *testing.T, release string, a, b lab.End) {
	t.Run("pingpong", func(t *testing.T) {
		must[string](t)(lab.Pingpong(ctx, a, b, "ibv_rc_pingpong", "-o", "-c", "-n", "100"))
		must[string](t)(lab.Pingpong(ctx, a, b, "ibv_rc_pingpong", "-oO", "-c", "-n", "100"))
		must[string](t)(lab.Pingpong(ctx, a, b, "ibv_srq_pingpong", "-o", "-c", "-n", "100"))
	})
	for _, x := range [][]string{
		{"ib_write_bw", "--odp", "-s", "1048576", "-n", "10"},
		{"ib_read_bw", "--odp", "-s", "1048576", "-n", "10"},
		{"ib_send_bw", "--odp", "-s", "65536", "-n", "50"},
		{"ib_atomic_bw", "--odp", "-n", "50"},
	} {
		t.Run(strings.Join(x, ""), func(t *testing.T) {
			if x[0] == "ib_atomic_bw" && release == debian12 {
				t.Skip("Debian 12's perftest refuses atomics with on-demand paging; `verified` covers them")
			}
			t.Log(lab.Rows(must[string](t)(lab.Perftest(ctx, a, b, x[0], x[1:]...))))
		})
	}
	t.Run("UD", func(t *testing.T) {
		// On-demand paging at the sender only: a datagram into an absent page is dropped (PF-11), and perftest waits
		// for every datagram. For the same reason the receiver must have no memory budget. odpstress covers absent
		// receive buffers.
		b := b
		b.Opts = "--odp"
		t.Log(lab.Rows(must[string](t)(lab.Perftest(ctx, b, a, "ib_send_bw", "-c", "UD", "-s", "1024", "-n", "200"))))
	})
}

// accessErrors: accesses beyond a region, without rights, with stale keys, with other VMs' keys, into holes, and with
// wrapping addresses get the right error and change nothing, in both directions (PF-5, PF-13).
func accessErrors(ctx context.Context, t *testing.T, a, b lab.End) {
	for _, kind := range []string{"pinned", "odp", "implicit"} {
		opts := fmt.Sprintf("-m %[1]s -l %[1]s", kind)
		t.Run("access-"+kind, func(t *testing.T) {
			stress(ctx, t, a, "-w access "+opts, b, opts)
			stress(ctx, t, b, "-w access "+opts, a, opts)
		})
	}
}

// toolDetects shows that odpstress can fail: pinned memory does not follow changes by its owner, and odpstress must
// report that.
func toolDetects(ctx context.Context, t *testing.T, a, b lab.End) {
	for _, x := range [][2]string{
		{"dontneed", "are not of generation"},
		{"mremap", ""}, // any of several errors
		{"protnone", "landed in memory"},
	} {
		out, err := lab.Stress(ctx, 20*time.Second, a, "-m pinned -l pinned", b, "-r 1 -m pinned -l pinned -c "+x[0])
		if err == nil || !strings.Contains(err.Error(), "server: FAILED") || !strings.Contains(err.Error(), x[1]) {
			t.Errorf("chaos %s with pinned memory was not detected: %v\n%s", x[0], err, out)
		}
	}
}

// TestODPRelease: while a peer writes and reads a region at full speed, its owner releases, replaces, moves, forks,
// protects, migrates and compacts memory. No write reaches memory released before, and nothing hangs (EP-1 to EP-4,
// ODP-5). Both VMs are on one host, which tests the local path. Freed pages are poisoned, and the kernel checks them
// when it reuses them. The guests have two memory nodes.
func TestODPRelease(t *testing.T) {
	l, ctx := newLab(t)
	h := must[*lab.Host](t)(l.Host("h1"))
	check(t, h.Run(ctx, `networks:
  - {name: blue, vni: 100, mtu: 4500}
vms:
  - {name: vm1, network: blue, mac: "02:00:00:00:00:01"}
  - {name: vm2, network: blue, mac: "02:00:00:00:00:02", memory-budget: 96MiB}
`))
	var ms []*qemu.Machine
	dumpOnFailure(t, []*lab.Host{h}, &ms)
	va, vb := vmA, vmB
	for _, v := range []*lab.VM{&va, &vb} {
		v.MTU, v.CPUs, v.SwapMiB = 4500, 2, 512
		v.KernelArgs = []string{"page_poison=1", "numa=fake=2"}
	}
	var err error
	ms, err = l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, va)), must[qemu.Config](t)(h.Config(ctx, vb)))
	check(t, err)
	for _, m := range ms {
		check(t, lab.LoadModule(ctx, m))
		run(ctx, t, m, "mkswap /dev/vdb && swapon /dev/vdb")
	}
	install(ctx, t, l, ms...)
	a := must[lab.End](t)(lab.NewEnd(ctx, ms[0], lab.Device, va.Addr))
	b := must[lab.End](t)(lab.NewEnd(ctx, ms[1], lab.Device, vb.Addr))
	if n := strings.TrimSpace(run(ctx, t, ms[0], "ls -d /sys/devices/system/node/node* | wc -l")); n != "2" {
		t.Errorf("%s memory nodes: pages cannot migrate between them", n)
	}

	odpPrograms(ctx, t, l.Images.Release, a, b)
	accessErrors(ctx, t, a, b)
	t.Run("keep", func(t *testing.T) { stress(ctx, t, a, "-w atomic -c keep", b, "-c keep") })
	t.Run("release", func(t *testing.T) { stress(ctx, t, a, "-w atomic -r 8 -c release", b, "-r 8 -c release") })
	t.Run("hole", func(t *testing.T) { stress(ctx, t, a, "-r 8 -c hole", b, "-r 8 -c hole") })
	t.Run("all", func(t *testing.T) { stress(ctx, t, a, "-w rdma,send,ud -c all", b, "-c all") })
	t.Run("all-implicit", func(t *testing.T) {
		stress(ctx, t, a, "-m implicit -l implicit -c all", b, "-m implicit -l implicit -c all")
	})
	// Pinned regions beyond vm2's budget: the host pages them, and no queue pair retries RNR NAKs (HF-1).
	t.Run("host", func(t *testing.T) {
		stress(ctx, t, a, "-R 0 -w atomic -m pinned -l pinned -r 128 -C", b, "-R 0 -m pinned -l pinned -r 128")
	})
	t.Run("pager", func(t *testing.T) { stuckPager(ctx, t, h, a, b) })
	noneHeld(ctx, t, h, "vm1", "vm2")
	quietKernels(ctx, t, ms...)
}

// stuckPager: QPs fault, and the pager behind their region never answers. Other QPs of the same VMs make progress,
// their releases drain, and the process that owns the region can be killed (PF-8, PF-16, EP-5). A slow pager only
// delays.
func stuckPager(ctx context.Context, t *testing.T, h *lab.Host, a, b lab.End) {
	server, client := stick(ctx, t, h, a, b, "never")
	stress(ctx, t, a, "-r 8 -c release", b, "-r 8 -c release")
	stress(ctx, t, a, "-r 1", b, "-r 1 -P 5")
	must[string](t)(lab.Pingpong(ctx, a, b, "ibv_rc_pingpong", "-c", "-n", "100"))
	if n := hcaStatus(ctx, t, h, "vm2").Faults.Parked; n < 4 {
		t.Errorf("%d QPs wait: the pager was not stuck all the time", n)
	}
	killBoth(ctx, t, h, server, client)

	// A pager in another process goes on after the kill, and so would the fault: it keeps the process's memory, whose
	// mappings keep the queue pairs.
	server, client = stick(ctx, t, h, a, b, "elsewhere")
	killBoth(ctx, t, h, server, client)
	run(ctx, t, b.VM, "pkill -x sleep")
}

// stick starts odpstress at both ends, with a pager that does not answer behind b's region, and returns when QPs wait.
func stick(ctx context.Context, t *testing.T, h *lab.Host, a, b lab.End, pager string) (server, client *qemu.Process) {
	t.Helper()
	server = must[*qemu.Process](t)(lab.Listen(ctx, b.VM, lab.StressCommand(b, "-p 18601 -r 4 -P "+pager, ""), 18601))
	client = must[*qemu.Process](t)(a.VM.StartShell(ctx, "exec timeout -k 5 200 "+
		lab.StressCommand(a, "-p 18601 -r 4 -t 180 -H 200 -q 4", b.Addr)))
	eventually(ctx, t, "QPs wait for the pager", func() bool { return hcaStatus(ctx, t, h, "vm2").Faults.Parked >= 4 })
	return server, client
}

// killBoth kills the programs of stick and waits until their queue pairs are gone. `timeout`, by which they run, is
// killed as well as its child.
func killBoth(ctx context.Context, t *testing.T, h *lab.Host, ps ...*qemu.Process) {
	t.Helper()
	for _, p := range ps {
		check(t, p.Signal(ctx, "KILL"))
		_, err := p.Wait(ctx)
		check(t, err)
	}
	eventually(ctx, t, "the killed programs' QPs are gone", func() bool {
		return rdmaQPs(ctx, t, h, "vm1") == 1 && rdmaQPs(ctx, t, h, "vm2") == 1
	})
}

// noneHeld waits until no fault waits and no epoch is held, as required when the VMs are idle.
func noneHeld(ctx context.Context, t *testing.T, h *lab.Host, vms ...string) {
	t.Helper()
	for _, vm := range vms {
		eventually(ctx, t, "nothing of "+vm+" waits", func() bool {
			f := hcaStatus(ctx, t, h, vm).Faults
			return f.Parked == 0 && f.Guest.Waiting == 0 && f.Host.Waiting == 0
		})
	}
}
