package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// quarantineRun is one stream of WRITEs during which vm1 is quarantined.
type quarantineRun struct {
	name           string
	options        []string // of `vnicd vm quarantine`
	client, server int      // of the ends
	// status of the completion that the client sees.
	status string
}

// TestVMQuarantine: `vnicd vm quarantine` during ib_write_bw from and to vm1, with the other end on its own host and on
// another: how long it took, and what the programs saw (PF-3). vm3 and vm2 communicate all the time, and after each
// release pingpongs and rdma_cm work again with vm1.
func TestVMQuarantine(t *testing.T) {
	l, ctx := newLab(t)
	w := wiredHosts(t, l)
	vmC := lab.VM{Name: "vm3", MAC: "02:00:00:00:00:03", Addr: "10.0.0.3/24"}
	check(t, w.a.Run(ctx, hostConfig("192.0.2.1", "192.0.2.2", vmA, vmC)))
	check(t, w.b.Run(ctx, hostConfig("192.0.2.2", "192.0.2.1", vmB)))
	dumpOnFailure(t, []*lab.Host{w.a, w.b}, &w.vms)
	var err error
	w.vms, err = l.Boot(ctx, must[qemu.Config](t)(w.a.Config(ctx, vmA)), must[qemu.Config](t)(w.b.Config(ctx, vmB)),
		must[qemu.Config](t)(w.a.Config(ctx, vmC)))
	check(t, err)
	var ends []lab.End
	for i, v := range []lab.VM{vmA, vmB, vmC} {
		check(t, lab.LoadModule(ctx, w.vms[i]))
		ends = append(ends, must[lab.End](t)(lab.NewEnd(ctx, w.vms[i], lab.Device, v.Addr)))
	}
	if out, err := w.a.CLI(ctx, "vm", "quarantine", "vm2"); err == nil || !strings.Contains(err.Error()+out,
		`no VM "vm2"; there are: vm1, vm3`) {
		t.Errorf("a VM of another host: %v\n%s", err, out)
	}
	const ro = "--read-only"
	for _, q := range []quarantineRun{
		{"read-only, WRITE from the other host", []string{ro}, 1, 0, "10"},
		{"read-only, WRITE from the same host", []string{ro}, 2, 0, "10"},
		{"blocked, WRITE from the other host", nil, 1, 0, "12"},
		{"blocked, WRITE from the same host", nil, 2, 0, "12"},
		{"blocked, WRITE by the VM", nil, 0, 1, "5"},
	} {
		t.Run(q.name, func(t *testing.T) { w.quarantine(ctx, t, ends, &q) })
	}
	quietKernels(ctx, t, w.vms...)
}

var failedStatus = regexp.MustCompile(`Failed status (\d+)`)

func (w *twoHosts) quarantine(ctx context.Context, t *testing.T, ends []lab.End, q *quarantineRun) {
	const program = "exec timeout -k 5 200 ib_write_bw -F -d %s -x %d --run_infinitely -D 1"
	c, s := ends[q.client], ends[q.server]
	packets := func() uint64 {
		st := hcaStatus(ctx, t, w.a, "vm1").Stats
		return st["rx_packets"] + st["tx_packets"]
	}
	before := packets()
	server := must[*qemu.Process](t)(s.VM.StartShell(ctx, fmt.Sprintf(program, s.Device, s.GID)))
	check(t, harness.WaitGuest(ctx, s.VM, "ss -ltn | grep -q :18515"))
	client := must[*qemu.Process](t)(c.VM.StartShell(ctx, fmt.Sprintf(program+" "+s.Addr, c.Device, c.GID)))
	eventually(ctx, t, "traffic", func() bool { return packets() > before+1000 })

	var answer struct {
		DMA, Was string
		Attached bool
		Took     time.Duration `json:"took_ns"`
	}
	began := time.Now()
	out := must[string](t)(w.a.CLI(ctx, append([]string{"vm", "quarantine", "vm1", "-j"}, q.options...)...))
	check(t, json.Unmarshal([]byte(out), &answer))
	t.Logf("quarantine: %v within vnicd, %v with the command; dma %s, was %s", answer.Took, time.Since(began), answer.DMA,
		answer.Was)
	if want := map[bool]string{true: "ro", false: "blocked"}[len(q.options) > 0]; answer.DMA != want || !answer.Attached {
		t.Errorf("%+v, want %s", answer, want)
	}
	r := must[qemu.Result](t)(client.Wait(ctx))
	saw := failedStatus.FindStringSubmatch(r.Stdout + r.Stderr)
	if saw == nil || saw[1] != q.status {
		t.Errorf("the client: exit status %d, want a completion with status %s:\n%s%s", r.ExitCode, q.status, r.Stdout,
			r.Stderr)
	} else {
		t.Logf("the client: exit status %d, %v after the command: %s", r.ExitCode, time.Since(began), saw[0])
	}
	check(t, server.Kill(ctx))
	r = must[qemu.Result](t)(server.Wait(ctx))
	t.Logf("the server, killed: %s", strings.TrimSpace(r.Stderr))

	st := must[string](t)(w.a.CLI(ctx, "status", "vm1"))
	if want := "dma " + answer.DMA + ", refused "; !strings.Contains(st, want) {
		t.Errorf("`vnicd status vm1` lacks %q:\n%s", want, st)
	}
	if answer.DMA == "blocked" {
		check(t, harness.WaitGuest(ctx, ends[0].VM, "grep -q DOWN /sys/class/infiniband/vnic0/ports/1/state"))
	}
	if r := must[qemu.Result](t)(w.vms[2].Shell(ctx, "ping -c 2 -W 1 10.0.0.1")); r.ExitCode == 0 {
		t.Error("the quarantined VM's network card answers")
	}
	must[string](t)(lab.Pingpong(ctx, ends[1], ends[2], "ibv_rc_pingpong", "-c", "-n", "100")) // the others

	t.Log(strings.TrimSpace(must[string](t)(w.a.CLI(ctx, "vm", "release", "vm1"))))
	check(t, lab.WaitRDMA(ctx, ends[0].VM, lab.Device))
	for _, peer := range ends[1:] {
		run(ctx, t, peer.VM, "ping -c 2 -i 0.2 -W 20 10.0.0.1")
		must[string](t)(lab.Pingpong(ctx, peer, ends[0], "ibv_rc_pingpong", "-c", "-n", "100"))
	}
	_, rping, err := lab.Pair(ctx, w.vms[0], "rping -s -a 0.0.0.0 -C 10 -v", w.vms[1], "rping -c -a 10.0.0.1 -C 10 -v", 0)
	check(t, err)
	if strings.Count(rping, "ping data:") != 10 {
		t.Errorf("rping printed:\n%s", rping)
	}
}
