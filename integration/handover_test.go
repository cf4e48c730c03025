package integration

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
	"github.com/vnicd/vnicd/lab/wirefault"
)

var (
	handovers = flag.Int("handovers", 6, "how often TestHandover and each TestOutlive restart vnicd; 200 for the long test")
	kills     = flag.Int("kills", 8, "how often TestHandover and each TestOutlive kill vnicd; 500 for the long test")
	pauses    = flag.Int("pauses", 3, "how often each TestOutlive pauses VMs; 100 for the long test")
	longest   = flag.Duration("outlive.pause", 5*time.Second, "the longest pause; 1m for the long test")
	chosen    = flag.String("outlive.workloads", "counters,odp,nvme,cm,ping",
		"what TestOutlive's VMs run; perftest and app, too")
	record = flag.String("outlive.record", "",
		"file of results: tests of continuity that pass append to it, and do only what it lacks")
	series = flag.Duration("outlive.for", 0,
		"the time after which each TestOutlive ends its programs and compares; 0: once all events have happened")
	burst = flag.Int("outlive.burst", 1,
		"events of a kind that follow each other, as soon as vnicd is back, before TestOutlive looks at the programs")
	pairs = flag.Int("outlive.pairs", 100, "queue pairs of the workload counters")
)

// TestHandover: the vnicds of two hosts are replaced, then killed at any moment, in turns while VMs on them use RC
// connections: programs that poll and programs that sleep go on without an error, and what they transfer is right
// (CO-1, CO-2). One is stopped and started again under a service manager, the other is replaced by its keeper
// (`vnicd upgrade`). The last two times the VM is paused meanwhile.
func TestHandover(t *testing.T) {
	outlive(t, onTwoHosts, "perftest", event{name: "upgrade", run: upgrade, times: handovers},
		event{name: "kill", run: kill, times: kills})
}

// TestOutlive: every workload goes on, with every byte and number right and each completion there once, while vnicd is
// killed, replaced, and VMs are paused: with VMs on two hosts, on one, with Linux rxe as the peer, and with HCAs behind
// ivshmem-doorbell (CO-1 to CO-3). For how long the queue pairs were silent is printed, and how many echo requests were
// lost.
func TestOutlive(t *testing.T) {
	for _, p := range []struct {
		name  string
		place func(context.Context, *testing.T, *lab.Lab) *stand
	}{{"two hosts", onTwoHosts}, {"one host", onOneHost}, {"rxe", besideRXE}, {"ivshmem", behindIvshmem}} {
		t.Run(p.name, func(t *testing.T) {
			outlive(t, p.place, *chosen, event{name: "kill", run: kill, times: kills},
				event{name: "upgrade", run: upgrade, times: handovers}, event{name: "pause", run: pause, times: pauses})
		})
	}
}

// stand is two VMs on one or two hosts.
type stand struct {
	*lab.Lab
	hosts          []*lab.Host
	vms            []*qemu.Machine // the client's, the server's; on hosts[0] and on the last host
	client, server lab.End
	// rxe: the server's end is rxe. timeout is the exponent of stock programs' retransmission timeout: rxe's retries
	// must last until vnicd is back.
	rxe     bool
	timeout int
	pairs   int // queue pairs of the workload counters, if they are to be fewer than -outlive.pairs
	nvmeEnd func() error
	app     *harness.Process // of the first host; nil without that workload

	at       [2]int          // the hosts on which the VMs are
	moves    [2]lab.VM       // how the VMs are booted that may move to the other host
	mover    int             // the one that moves
	wire     *wirefault.Wire // between the hosts, where it may be cut
	complete func()          // called once the VMs have all that they need, if not nil
}

// onTwoHosts: one host has a service manager, the other a keeper.
func onTwoHosts(ctx context.Context, t *testing.T, l *lab.Lab) *stand {
	return betweenHosts(ctx, t, l, "")
}

// behindIvshmem: on two hosts, with the other one of QEMU's devices.
func behindIvshmem(ctx context.Context, t *testing.T, l *lab.Lab) *stand {
	return betweenHosts(ctx, t, l, "ivshmem")
}

func betweenHosts(ctx context.Context, t *testing.T, l *lab.Lab, hca string) *stand {
	va, vb := vmA, vmB
	va.HCA, vb.HCA = hca, hca
	va.MemoryMiB = 3072 // more than q35 has below 4 GiB, so it has several regions, in one file
	w := makeTwoHosts(ctx, t, l, oneKeeper(t, l), va, vb)
	s := &stand{Lab: l, hosts: []*lab.Host{w.a, w.b}, vms: w.vms, timeout: 14, at: [2]int{0, 1}}
	s.client, s.server = w.load(ctx, t)
	return s
}

func oneKeeper(t *testing.T, l *lab.Lab) func(*twoHosts) {
	return func(w *twoHosts) {
		w.a.Manager = must[*harness.ServiceManager](t)(harness.NewServiceManager(w.a.Dir))
		l.Add(func() { check(t, w.a.Manager.Close()) })
		w.b.Keep = true
	}
}

// onOneHost: both VMs lose the same vnicd.
func onOneHost(ctx context.Context, t *testing.T, l *lab.Lab) *stand {
	h := must[*lab.Host](t)(l.Host("h1"))
	h.Keep = true
	s := &stand{Lab: l, hosts: []*lab.Host{h}, timeout: 14}
	dumpOnFailure(t, s.hosts, &s.vms)
	check(t, h.Run(ctx, fmt.Sprintf("networks: [{name: blue, vni: 100}]\n"+
		"vms: [{name: vm1, network: blue, mac: %q}, {name: vm2, network: blue, mac: %q}]\n", vmA.MAC, vmB.MAC)))
	var err error
	s.vms, err = l.Boot(ctx, must[qemu.Config](t)(h.Config(ctx, vmA)), must[qemu.Config](t)(h.Config(ctx, vmB)))
	check(t, err)
	for i, m := range s.vms {
		check(t, lab.LoadModule(ctx, m))
		*[]*lab.End{&s.client, &s.server}[i] = must[lab.End](t)(lab.NewEnd(ctx, m, lab.Device, []lab.VM{vmA, vmB}[i].Addr))
	}
	return s
}

// besideRXE: as on two hosts, but the server's VM uses rxe over its network card.
func besideRXE(ctx context.Context, t *testing.T, l *lab.Lab) *stand {
	vb := vmB
	vb.NoHCA = true
	w := makeTwoHosts(ctx, t, l, oneKeeper(t, l), vmA, vb)
	s := &stand{Lab: l, hosts: []*lab.Host{w.a, w.b}, vms: w.vms, rxe: true, timeout: 18, at: [2]int{0, 1}}
	check(t, lab.LoadModule(ctx, s.vms[0]))
	check(t, harness.AddRXE(ctx, s.vms[1], "rxe0", "eth0"))
	check(t, lab.WaitRDMA(ctx, s.vms[1], "rxe0"))
	s.client = must[lab.End](t)(lab.NewEnd(ctx, s.vms[0], lab.Device, vmA.Addr))
	s.server = must[lab.End](t)(lab.NewEnd(ctx, s.vms[1], "rxe0", vmB.Addr))
	return s
}

// event is something that programs in VMs have to outlive, several times; n tells the times apart.
type event struct {
	name  string
	run   func(ctx context.Context, t *testing.T, s *stand, n int)
	times *int
	flaps bool // the links of the VMs' network cards may go down
	awake bool // the VMs are not paused meanwhile
}

// victim is the host, and its VM, whose turn it is.
func (s *stand) victim(n int) (*lab.Host, *qemu.Machine) {
	return s.hosts[n%len(s.hosts)], s.vms[n%len(s.vms)]
}

// upgrade replaces a host's vnicd in good order.
func upgrade(ctx context.Context, t *testing.T, s *stand, n int) {
	h, _ := s.victim(n)
	if h.Keep {
		t.Log(strings.TrimSpace(must[string](t)(h.CLI(ctx, "upgrade"))))
		return
	}
	check(t, h.Stop(ctx))
	check(t, h.Start(ctx))
}

// kill kills a host's vnicd and has another started.
func kill(ctx context.Context, t *testing.T, s *stand, n int) {
	h, _ := s.victim(n)
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
}

// rest waits before some of the kills, while everything works: a vnicd that was killed within ten seconds of its start,
// twenty times in a row, is suspected to have died of a VM.
func rest(n int) {
	if n%12 == 11 {
		time.Sleep(11 * time.Second)
	}
}

// pause pauses one VM, the other, or both, for a second or more: as often for less than the root of the longest pause
// as for more. Nobody can answer for rxe in a paused VM: then the pause is shorter than its peers' retries, 29 s.
func pause(ctx context.Context, t *testing.T, s *stand, n int) {
	d := time.Duration(float64(time.Second) * math.Pow(max(longest.Seconds(), 1), rand.Float64()))
	paused := [][]*qemu.Machine{s.vms[:1], s.vms[1:], s.vms}[n%3]
	if s.rxe && n%3 != 0 {
		d = min(d, 12*time.Second)
	}
	for _, m := range paused {
		check(t, m.QMP().Run(ctx, "stop", nil, nil))
	}
	time.Sleep(d)
	for _, m := range paused {
		check(t, m.QMP().Run(ctx, "cont", nil, nil))
	}
}

// result is a line of the record: what one event has cost.
type result struct {
	Test, Event, Workloads string
	Version                string // of vnicd
	Silence                []int  `json:",omitempty"` // ms, of the queue pairs: median, 90th percentile, maximum
	Between                []int  `json:",omitempty"` // the same, without an event; of some
	Lost                   *int   `json:",omitempty"` // echo requests
}

// resumed waits until the vnicds have resumed all devices.
func (s *stand) resumed(ctx context.Context, t *testing.T) {
	t.Helper()
	for _, h := range s.hosts {
		eventually(ctx, t, h.Name+" has resumed all devices", func() bool {
			status, err := h.Status(ctx)
			return err == nil && status["continued"].(map[string]any)["pending"].(float64) == 0
		})
	}
}

// outlive runs workloads, whose names list has, through events. All programs must work again after each; after four of
// five only those that measure, so that the next event finds the others in whatever state the last has left them. In a
// burst (-outlive.burst) nothing is waited for but vnicd, up to two seconds more, and its last event.
func outlive(t *testing.T, place func(context.Context, *testing.T, *lab.Lab) *stand, list string, events ...event) {
	l, ctx := newLab(t)
	var all []result // of this test, those of earlier runs first
	done := func(e event) (n int) {
		for _, r := range all {
			if r.Event == e.name {
				n++
			}
		}
		return n
	}
	for _, r := range recorded(t) {
		if r.Test == t.Name() && r.Workloads == list {
			all = append(all, r)
		}
	}
	t.Cleanup(func() { summarize(t, all, events) })
	if len(all) > 0 && !slices.ContainsFunc(events, func(e event) bool { return done(e) < *e.times }) {
		return // the record has all of it
	}
	s := place(ctx, t, l)
	check(t, l.Programs(ctx, l.Share))
	for _, m := range s.vms {
		check(t, lab.InstallPrograms(ctx, m))
	}
	if s.complete != nil {
		s.complete()
	}
	var ps []*guestProgram
	var loads []workload
	for _, name := range strings.Split(list, ",") {
		i := slices.IndexFunc(workloads, func(w workload) bool { return w.name == name })
		if i < 0 {
			t.Fatalf("no workload %q", name)
		}
		loads = append(loads, workloads[i])
		ps = append(ps, workloads[i].start(ctx, t, s)...)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range ps {
				t.Logf("%s on %s: %s", p.name, p.vm.Name(), p.said(context.Background()))
			}
		}
	})
	before, _, _ := work(ctx, t, ps, "at first")
	links := carriers(ctx, t, s.vms)
	old, begin := len(all), time.Now()
	version, _ := must[map[string]any](t)(s.hosts[0].Status(ctx))["version"].(string)
	for _, e := range events {
		for n := done(e); n < *e.times && (*series == 0 || time.Since(begin) < *series) && !t.Failed(); n++ {
			r := result{Test: t.Name(), Event: e.name, Workloads: list, Version: version}
			if e.name == "kill" {
				rest(n)
			}
			if (n+1)%*burst != 0 && n < *e.times-2 {
				e.run(ctx, t, s, n)
				s.resumed(ctx, t)
				time.Sleep(rand.N(2 * time.Second))
				all = append(all, r)
				continue
			}
			if n%10 == 0 || e.name == "pause" && *burst == 1 {
				before, r.Between, _ = work(ctx, t, ps, fmt.Sprintf("before %s %d", e.name, n))
			}
			began := time.Now()
			if _, m := s.victim(n); e.name != "pause" && !e.awake && n >= *e.times-2 {
				check(t, m.QMP().Run(ctx, "stop", nil, nil))
				e.run(ctx, t, s, n)
				check(t, m.QMP().Run(ctx, "cont", nil, nil))
			} else {
				e.run(ctx, t, s, n)
			}
			took := time.Since(began)
			watched := ps
			if quick := measured(ps); len(quick) > 0 && (n+1) / *burst % 5 != 0 && n < *e.times-2 {
				watched = quick
			}
			after, silent, last := work(ctx, t, watched, fmt.Sprintf("after %s %d", e.name, n))
			if r.Silence = silent; *burst > 1 {
				r.Silence = nil // of the whole burst
			}
			for p, o := range after {
				if o.faults != before[p].faults && e.name != "pause" {
					t.Errorf("%s %d: %s: %s errors that were recovered from, %s before", e.name, n, p.name, o.faults, before[p].faults)
				}
			}
			if now := lostPings(t, after); now >= 0 {
				if now -= lostPings(t, before); *burst == 1 {
					r.Lost = &now
				}
			}
			maps.Copy(before, after)
			t.Logf("%s %d: %.1f s, all work again after %.1f s (last:%s), silence %v ms, lost echo requests: %s", e.name, n,
				took.Seconds(), time.Since(began).Seconds(), last, r.Silence, deref(r.Lost))
			if !t.Failed() {
				all = append(all, r)
			}
		}
		if e.flaps {
			links = carriers(ctx, t, s.vms)
		}
	}
	finish(ctx, t, ps)
	for _, w := range loads {
		if w.finish != nil && !t.Failed() {
			w.finish(ctx, t, s)
		}
	}
	if now := carriers(ctx, t, s.vms); !slices.Equal(now, links) {
		t.Errorf("the links of the VMs' network cards have changed: %q, before %q", now, links)
	}
	if t.Failed() {
		return
	}
	// Objects are released, and new ones made, as if nothing had happened.
	eventually(ctx, t, "no queue pairs remain", func() bool {
		return rdmaQPs(ctx, t, s.hosts[s.at[0]], "vm1") == 1 &&
			(s.rxe || rdmaQPs(ctx, t, s.hosts[s.at[1]], "vm2") == 1)
	})
	must[string](t)(lab.Pingpong(ctx, s.client, s.server, "ibv_rc_pingpong", "-c", "-n", "50"))
	must[string](t)(lab.Pingpong(ctx, s.client, s.server, "ibv_ud_pingpong", "-s", "1024", "-n", "50"))
	quietKernels(ctx, t, s.vms...)
	if !t.Failed() {
		appendTo(t, all[old:]...)
	}
}

// carriers returns how often each VM has seen its network card's link change.
func carriers(ctx context.Context, t *testing.T, vms []*qemu.Machine) (changes []string) {
	t.Helper()
	for _, m := range vms {
		changes = append(changes, must[string](t)(m.Run(ctx, "cat /sys/class/net/eth0/carrier_changes")))
	}
	return changes
}

// measured returns the programs whose progress tells how long an event was felt.
func measured(ps []*guestProgram) []*guestProgram {
	return slices.DeleteFunc(slices.Clone(ps), func(p *guestProgram) bool {
		return p.name != "counters" && p.name != "ping"
	})
}

// work returns what observe does once all programs have made progress, and which were the last without. One that has
// ended fails the test.
func work(ctx context.Context, t *testing.T, ps []*guestProgram, when string) (now observations, silent []int,
	last string) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Logf("%s, the last without progress:%s", when, last)
		}
	}()
	eventually(ctx, t, "all programs work "+when, func() bool {
		now, silent = observe(ctx, t, ps)
		idle := ""
		for _, p := range ps {
			if now[p].ended {
				r := must[qemu.Result](t)(p.Wait(ctx))
				t.Fatalf("%s: %s on %s has ended with status %d: %s", when, p.name, p.vm.Name(), r.ExitCode, p.said(ctx))
			}
			if p.progress != "" && now[p].idle() {
				idle += " " + p.name
			}
		}
		if idle != "" {
			last = idle
		}
		return idle == ""
	})
	return now, silent, last
}

// finish ends the programs: those that judge themselves first, with their peers, then the others.
func finish(ctx context.Context, t *testing.T, ps []*guestProgram) {
	t.Helper()
	if t.Failed() {
		return
	}
	for _, p := range ps {
		if p.ends {
			check(t, p.Signal(ctx, "INT"))
		}
	}
	for _, p := range ps {
		if !p.ends && !p.follows {
			check(t, p.Kill(ctx))
			continue
		}
		if r := must[qemu.Result](t)(p.Wait(ctx)); r.ExitCode != 0 {
			t.Errorf("%s on %s: status %d: %s", p.name, p.vm.Name(), r.ExitCode, p.said(ctx))
		} else {
			said := strings.Split(strings.TrimSpace(p.said(ctx)), "\n")
			t.Logf("%s on %s: %s", p.name, p.vm.Name(), said[len(said)-1])
		}
	}
}

// recorded returns the record's lines.
func recorded(t *testing.T) (all []result) {
	if *record == "" {
		return nil
	}
	f, err := os.Open(*record)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	check(t, err)
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var r result
		check(t, json.Unmarshal(lines.Bytes(), &r))
		all = append(all, r)
	}
	return all
}

func appendTo(t *testing.T, rs ...result) {
	if *record == "" {
		return
	}
	f := must[*os.File](t)(os.OpenFile(*record, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644))
	var lines []byte
	for _, r := range rs {
		lines = append(append(lines, must[[]byte](t)(json.Marshal(r))...), '\n')
	}
	_, err := f.Write(lines)
	check(t, errors.Join(err, f.Close()))
}

// summarize prints the distribution over the events: of the time until half of the queue pairs, and all of them, worked
// again, of the same without an event, and of the lost echo requests.
func summarize(t *testing.T, all []result, events []event) {
	for _, e := range events {
		var half, whole, idle, lost []int
		var versions []string
		n := 0
		for _, r := range all {
			if r.Event != e.name {
				continue
			}
			n++
			if !slices.Contains(versions, r.Version) {
				versions = append(versions, r.Version)
			}
			if r.Silence != nil {
				half, whole = append(half, r.Silence[0]), append(whole, r.Silence[2])
			}
			if r.Between != nil {
				idle = append(idle, r.Between[2])
			}
			if r.Lost != nil {
				lost = append(lost, *r.Lost)
			}
		}
		if n == 0 {
			continue
		}
		t.Logf("%s, %d of %d times (median, 90th percentile, maximum): half of the queue pairs silent for %s ms, one for %s ms, "+
			"without an event %s ms; echo requests lost: %s; vnicd %s", e.name, n, *e.times, spread(half), spread(whole),
			spread(idle), spread(lost), strings.Join(versions, ", "))
	}
}

// spread returns the median, the 90th percentile and the maximum.
func spread[T cmp.Ordered](v []T) string {
	if len(v) == 0 {
		return "-"
	}
	v = slices.Sorted(slices.Values(v))
	return fmt.Sprint(v[len(v)/2], ", ", v[len(v)*9/10], ", ", v[len(v)-1])
}

func deref(p *int) string {
	if p == nil {
		return "-"
	}
	return fmt.Sprint(*p)
}
