package integration

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// TestPausedVM: QEMU's `stop` and `cont` for longer than any retry limit, of either end of a connection or of both,
// with the other end on the same host, on another, or on Linux rxe: programs go on (CO-3).
func TestPausedVM(t *testing.T) {
	l, ctx := newLab(t)
	w := wiredHosts(t, l)
	vmC := lab.VM{Name: "vm3", MAC: "02:00:00:00:00:03", Addr: "10.0.0.3/24"}
	vmD := lab.VM{Name: "vm4", MAC: "02:00:00:00:00:04", Addr: "10.0.0.4/24", NoHCA: true}
	check(t, w.a.Run(ctx, hostConfig("192.0.2.1", "192.0.2.2", vmA, vmC)))
	check(t, w.b.Run(ctx, hostConfig("192.0.2.2", "192.0.2.1", vmB, vmD)))
	dumpOnFailure(t, []*lab.Host{w.a, w.b}, &w.vms)
	var err error
	w.vms, err = l.Boot(ctx, must[qemu.Config](t)(w.a.Config(ctx, vmA)), must[qemu.Config](t)(w.b.Config(ctx, vmB)),
		must[qemu.Config](t)(w.a.Config(ctx, vmC)), must[qemu.Config](t)(w.b.Config(ctx, vmD)))
	check(t, err)
	var ends []lab.End
	for i, v := range []lab.VM{vmA, vmB, vmC} {
		check(t, lab.LoadModule(ctx, w.vms[i]))
		ends = append(ends, must[lab.End](t)(lab.NewEnd(ctx, w.vms[i], lab.Device, v.Addr)))
	}
	check(t, harness.AddRXE(ctx, w.vms[3], "rxe0", "eth0"))
	check(t, lab.WaitRDMA(ctx, w.vms[3], "rxe0"))
	ends = append(ends, must[lab.End](t)(lab.NewEnd(ctx, w.vms[3], "rxe0", vmD.Addr)))

	for _, p := range []pausedRun{
		{"the responder, the other host writes", 1, 0, []int{0}, time.Minute},
		{"the requester, to the other host", 0, 1, []int{0}, 20 * time.Second},
		{"the responder, on its host", 2, 0, []int{0}, 20 * time.Second},
		{"both ends, on one host", 0, 2, []int{0, 2}, 20 * time.Second},
		{"the responder, rxe writes", 3, 0, []int{0}, 20 * time.Second},
		{"the requester, to rxe", 0, 3, []int{0}, 20 * time.Second},
	} {
		t.Run(p.name, func(t *testing.T) { w.pause(ctx, t, ends, &p) })
	}
	check(t, l.Programs(ctx, l.Share))
	for _, p := range []impatientRun{
		{"vnicd with rnr_retry 3", 1, "-R 3", false},
		{"vnicd with retry_cnt 1", 1, "-r 1", false},
		{"rxe with rnr_retry 3", 3, "-R 3", true},
		{"rxe with retry_cnt 1", 3, "-r 1", true},
		{"rxe with both at 7", 3, "", false},
	} {
		t.Run(p.name, func(t *testing.T) { w.pauseImpatient(ctx, t, ends, &p) })
	}
	quietKernels(ctx, t, w.vms...)
}

// pausedRun is a stream of WRITEs and one of READs from client to server, during which VMs are paused.
type pausedRun struct {
	name           string
	client, server int   // of the ends
	paused         []int // VMs
	time           time.Duration
}

func (w *twoHosts) pause(ctx context.Context, t *testing.T, ends []lab.End, p *pausedRun) {
	const line = "exec timeout -k 5 400 %s -F -p %d -d %s -x %d --run_infinitely -D 1 %s"
	c, s := ends[p.client], ends[p.server]
	packets := func() uint64 {
		st := hcaStatus(ctx, t, w.a, "vm1").Stats
		return st["rx_packets"] + st["tx_packets"] // local messages count, too
	}
	moves := func(when string) {
		t.Helper()
		before := packets()
		eventually(ctx, t, "traffic "+when, func() bool { return packets() > before+1000 })
	}
	type program struct {
		name string
		vm   *qemu.Machine
		*qemu.Process
	}
	var running []program
	start := func(e lab.End, name, line string) {
		t.Helper()
		running = append(running, program{name, e.VM, must[*qemu.Process](t)(e.VM.StartShell(ctx, line))})
	}
	for i, name := range []string{"ib_write_bw", "ib_read_bw"} {
		port := 18515 + i
		start(s, name+", the server", fmt.Sprintf(line, name, port, s.Device, s.GID, ""))
		check(t, harness.WaitGuest(ctx, s.VM, fmt.Sprintf("ss -ltn | grep -q :%d", port)))
		start(c, name, fmt.Sprintf(line, name, port, c.Device, c.GID, s.Addr))
	}
	moves("at first")

	for _, i := range p.paused {
		check(t, w.vms[i].QMP().Run(ctx, "stop", nil, nil))
	}
	eventually(ctx, t, "`vnicd status` says paused", func() bool {
		return strings.Contains(must[string](t)(w.a.CLI(ctx, "status", "vm1")), "hca paused")
	})
	time.Sleep(p.time)
	for _, i := range slices.Backward(p.paused) {
		check(t, w.vms[i].QMP().Run(ctx, "cont", nil, nil))
	}
	began := time.Now()
	moves("after the pause")
	t.Logf("traffic %v after `cont`", time.Since(began))
	for _, x := range running {
		if r := must[qemu.Result](t)(x.vm.Shell(ctx, fmt.Sprintf("kill -0 %d", x.PID()))); r.ExitCode != 0 {
			r = must[qemu.Result](t)(x.Wait(ctx))
			t.Errorf("%s ended with status %d: %s", x.name, r.ExitCode, tail(r.Stdout+r.Stderr, 500))
		}
	}
	for _, x := range running {
		check(t, x.Kill(ctx))
	}
}

// impatientRun is a client that counts its retries, of which docs/limits.md tells the fate, and that does not use
// rdma_cm: vnicd has to find out what it asks for. The server's VM is paused.
type impatientRun struct {
	name   string
	client int // of the ends
	opts   string
	ends   bool
}

func (w *twoHosts) pauseImpatient(ctx context.Context, t *testing.T, ends []lab.End, p *impatientRun) {
	c, s := ends[p.client], ends[0]
	line := fmt.Sprintf("exec /host/counters -a -e -q 4 -t 14 %s %%s %%d %%s", p.opts)
	client := &guestProgram{name: "impatient", vm: c.VM, line: fmt.Sprintf(line, c.Device, c.GID, s.Addr),
		progress: "tail -n 4 /tmp/impatient.out | sed -n 's/^done //p' | tail -n 1", ends: true}
	ps := start(ctx, t, &guestProgram{name: "counters server", vm: s.VM, ready: listens(18610),
		line: fmt.Sprintf(line, s.Device, s.GID, "")}, client)
	defer func() {
		for _, x := range ps {
			check(t, x.Kill(ctx))
		}
	}()
	work(ctx, t, ps, "at first")
	check(t, w.vms[0].QMP().Run(ctx, "stop", nil, nil))
	time.Sleep(20 * time.Second)
	check(t, w.vms[0].QMP().Run(ctx, "cont", nil, nil))
	r := must[qemu.Result](t)(c.VM.Shell(ctx, fmt.Sprint("sleep 2; kill -0 ", client.PID())))
	if ended := r.ExitCode != 0; ended != p.ends {
		t.Errorf("the client has ended: %v, want %v", ended, p.ends)
	}
	if r.ExitCode == 0 {
		work(ctx, t, ps, "after the pause")
	}
	t.Logf("it says: %s", client.said(ctx))
}
