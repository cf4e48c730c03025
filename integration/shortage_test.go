package integration

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/hypervisor/hostdriver"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// enoughEvictions is how many of each VM's granules must have been evicted, and brought back, for the test to show
// anything.
const enoughEvictions = 200

// TestShortOfMemory: two VMs get a budget of a fifth of their working sets, by a reload under load. NFS over RDMA, NVMe
// over RDMA, and an RC program with rnr_retry 0 in both directions go on for -odp.duration without an error or a
// reconnect; all data are compared (HF-1, HF-2, PF-15).
func TestShortOfMemory(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	a, b := w.load(ctx, t)
	install(ctx, t, l, w.vms...)
	s := &stand{Lab: l, hosts: []*lab.Host{w.a, w.b}, vms: w.vms, client: a, server: b, at: [2]int{0, 1}}
	sides := []*shortSide{{host: w.a, vm: vmA}, {host: w.b, vm: vmB}}

	ps := slices.Concat(nvmeLoad(ctx, t, s), nfsLoad(ctx, t, b, a), keptLoad(ctx, t, a, b))
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range ps {
				t.Logf("%s on %s: %s", p.name, p.vm.Name(), p.said(context.Background()))
			}
		}
	})
	before := workingSets(ctx, t, ps, sides)
	for _, x := range sides {
		x.pairs = pairsOf(ctx, t, x.host, x.vm.Name)
		x.limit(ctx, t)
	}

	// At least for that time, and until enough was evicted.
	end, latest := time.Now().Add(*odpDuration), time.Now().Add(*odpDuration+harness.Patience(5*time.Minute))
	rounds := 0
	for ; ; rounds++ {
		now, _, _ := work(ctx, t, ps, "while memory is short")
		for p, o := range now {
			if o.faults != before[p].faults {
				t.Errorf("%s: %s errors that were recovered from, %s before", p.name, o.faults, before[p].faults)
			}
		}
		evicted := true
		for _, x := range sides {
			evicted = x.within(ctx, t) && evicted
		}
		if t.Failed() || time.Now().After(end) && evicted || time.Now().After(latest) {
			break
		}
	}
	for _, x := range sides {
		m := statusOf(ctx, t, x.host, x.vm.Name).Memory
		t.Logf("%s: %d rounds, %d evictions, %d host faults, half of them within %v, %d MiB resident of %d", x.vm.Name, rounds,
			m.Evictions-x.before.Evictions, m.HostFaults-x.before.HostFaults, m.FaultTime.Quantile(0.5), m.Resident>>20,
			m.Budget>>20)
		if m.Evictions-x.before.Evictions < enoughEvictions || m.HostFaults-x.before.HostFaults < enoughEvictions {
			t.Errorf("%s was not short of memory: the test shows nothing", x.vm.Name)
		}
		if n := m.FailedFaults - x.before.FailedFaults; n != 0 {
			t.Errorf("%s: %d faults failed", x.vm.Name, n)
		}
		if now := pairsOf(ctx, t, x.host, x.vm.Name); !slices.Equal(now, x.pairs) {
			t.Errorf("%s: the queue pairs are %q, and were %q: a connection was made again, or has ended", x.vm.Name, now,
				x.pairs)
		}
	}
	finish(ctx, t, ps)
	if t.Failed() {
		return
	}
	nvmeDone(ctx, t, s)
	run(ctx, t, b.VM, fmt.Sprintf(nfsCompare, a.Addr))
	run(ctx, t, a.VM, nfsServerEnd)
	for _, x := range sides {
		x.within(ctx, t)
		noneHeld(ctx, t, x.host, x.vm.Name)
		eventually(ctx, t, "no queue pairs of "+x.vm.Name+" remain", func() bool {
			return rdmaQPs(ctx, t, x.host, x.vm.Name) == 1
		})
	}
	quietKernels(ctx, t, w.vms...)
}

// shortSide is a VM whose host has too little memory for it.
type shortSide struct {
	host   *lab.Host
	vm     lab.VM
	before hostdriver.Status // its memory without a budget
	budget uint64
	pairs  []string
}

// limit gives the VM, which is attached, a fifth of what it has resident, by a reload.
func (x *shortSide) limit(ctx context.Context, t *testing.T) {
	t.Helper()
	m := statusOf(ctx, t, x.host, x.vm.Name).Memory
	x.before, x.budget = m, (m.Resident/5)&^(1<<10-1)
	path := filepath.Join(x.host.Dir, "vnicd.yaml")
	text := string(must[[]byte](t)(os.ReadFile(path)))
	entry := fmt.Sprintf("{name: %s, network: blue, mac: %q", x.vm.Name, x.vm.MAC)
	if strings.Count(text, entry) != 1 {
		t.Fatalf("%s has no place for a memory-budget:\n%s", path, text)
	}
	text = strings.Replace(text, entry, fmt.Sprintf("%s, memory-budget: %dKiB", entry, x.budget>>10), 1)
	check(t, os.WriteFile(path, []byte(text), 0o644))
	out := must[string](t)(x.host.CLI(ctx, "reload"))
	if !strings.HasPrefix(out, "VM "+x.vm.Name+" memory-budget ") {
		t.Fatalf("the reload on %s printed %q", x.host.Name, out)
	}
	t.Logf("%s: %d MiB resident, %d MiB held; the budget is %d MiB", x.vm.Name, m.Resident>>20, m.Held>>20, x.budget>>20)
}

// within fails the test if the VM has more memory resident than its budget. It reports whether enough was evicted.
func (x *shortSide) within(ctx context.Context, t *testing.T) (enough bool) {
	t.Helper()
	m := statusOf(ctx, t, x.host, x.vm.Name).Memory
	if m.Budget != x.budget || m.Resident > m.Budget {
		t.Errorf("%s: %d bytes are resident, the budget is %d, of %d", x.vm.Name, m.Resident, m.Budget, x.budget)
	}
	return m.Evictions-x.before.Evictions >= enoughEvictions && m.HostFaults-x.before.HostFaults >= enoughEvictions
}

// workingSets runs the programs until what they use hardly grows any more, and returns what they show then.
func workingSets(ctx context.Context, t *testing.T, ps []*guestProgram, sides []*shortSide) (now observations) {
	t.Helper()
	was := make([]uint64, len(sides))
	for range 20 {
		now, _, _ = work(ctx, t, ps, "with all memory")
		grows := false
		for i, x := range sides {
			n := statusOf(ctx, t, x.host, x.vm.Name).Memory.Resident
			grows = grows || n > was[i]+was[i]/16
			was[i] = n
		}
		if !grows {
			break
		}
	}
	return now
}

// pairsOf returns a VM's queue pairs: their numbers, peers and states.
func pairsOf(ctx context.Context, t *testing.T, h *lab.Host, vm string) (pairs []string) {
	t.Helper()
	var st hca.Status
	eventually(ctx, t, "the queue pairs of "+vm+" are shown", func() bool {
		st = hcaStatus(ctx, t, h, vm)
		return !st.Busy
	})
	slices.SortFunc(st.QPs, func(x, y hca.QPStatus) int { return cmp.Compare(x.QPN, y.QPN) })
	for _, q := range st.QPs {
		pairs = append(pairs, fmt.Sprintf("%d %s to %d: %s", q.QPN, q.Type, q.Dest, q.State))
	}
	return pairs
}

// nfsLoad: fio writes a file over NFS over RDMA and verifies it, again and again. The connections that the client has
// made are counted.
func nfsLoad(ctx context.Context, t *testing.T, client, server lab.End) []*guestProgram {
	run(ctx, t, server.VM, nfsServer)
	run(ctx, t, client.VM, fmt.Sprintf(nfsBegin, server.Addr))
	// The transport's line: port, binds, connects, their time, idle time, sends, receives.
	const stat = `awk '$1 == "xprt:" && $2 == "rdma" {n += $%d} END {print n + 0}' /proc/self/mountstats`
	connects := fmt.Sprintf(stat, 5)
	if n := strings.TrimSpace(run(ctx, t, client.VM, connects)); n == "0" {
		t.Fatal("the guest does not show the connection to the NFS server: reconnects could not be seen")
	}
	return start(ctx, t, &guestProgram{name: "fio on NFS", vm: client.VM, ends: true, progress: fmt.Sprintf(stat, 9),
		faults: connects, line: fioRuns("--directory=/mnt/nfs --size=4M --bsrange=4k-256k")})
}

// keptLoad: odpstress in both directions between pinned regions, which only the host pages. No queue pair retries RNR
// NAKs.
func keptLoad(ctx context.Context, t *testing.T, client, server lab.End) []*guestProgram {
	const opts = "-p 18600 -R 0 -r 96 -H 240 -m pinned -l pinned"
	const progress = `awk '/MiB written/ {n = $2 + $5} END {print n + 0}' /tmp/odpstress.out`
	return start(ctx, t,
		&guestProgram{name: "odpstress server", vm: server.VM, ends: true, ready: listens(18600),
			line: "exec " + lab.StressCommand(server, opts, "")},
		&guestProgram{name: "odpstress", vm: client.VM, ends: true, progress: progress,
			line: "exec " + lab.StressCommand(client, opts+" -w atomic -t 100000", server.Addr)})
}
