package integration

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
	"github.com/vnicd/vnicd/lab/wirefault"
)

// TestVMMigrates: QEMU migrates a VM whose network card is vnicd's from one host to another and back, while a VM on
// one of the hosts exchanges pings, TCP data and RC messages with it, all verified (CO-5). All go on: also when the
// migration is cancelled, when the destination's QEMU or the source's vnicd is killed on the way. The migrated VM uses
// Linux rxe, whose state moves with the VM's memory. A VM whose HCA is QEMU's vhost-user device is not migrated: QEMU
// refuses that, and nothing has happened to it.
func TestVMMigrates(t *testing.T) {
	l, ctx := newLab(t)
	w := wiredHosts(t, l)
	oneKeeper(t, l)(w)
	stays, moves := vmA, vmB
	stays.MemoryMiB, moves.MemoryMiB, moves.NoHCA = 512, 512, true
	stays.HCA = "vhost-user"
	check(t, w.a.Run(ctx, hostConfig("192.0.2.1", "192.0.2.2", stays, moves)))
	check(t, w.b.Run(ctx, hostConfig("192.0.2.2", "192.0.2.1", moves)))
	hosts := []*lab.Host{w.a, w.b}
	dumpOnFailure(t, hosts, &w.vms)
	var err error
	w.vms, err = l.Boot(ctx, must[qemu.Config](t)(w.a.Config(ctx, stays)), movable(ctx, t, l, w.b, moves))
	check(t, err)
	a, b := w.vms[0], w.vms[1]
	check(t, both(func() error { return lab.LoadModule(ctx, a) }, func() error {
		// Both hosts share the disk; from here on nothing writes to it.
		if _, err := b.Run(ctx, "sync; mount -o remount,ro /"); err != nil {
			return err
		}
		return harness.AddRXE(ctx, b, "rxe0", "eth0")
	}))
	check(t, lab.WaitRDMA(ctx, b, "rxe0"))
	prepareFlows(ctx, t, a, b)
	must[*qemu.Process](t)(b.StartShell(ctx, "exec python3 /tmp/talk.py hold"))
	must[*qemu.Process](t)(b.StartShell(ctx, "exec rping -s -a 0.0.0.0 -P"))
	check(t, harness.WaitGuest(ctx, b, "rdma resource show cm_id | grep -q 'state LISTEN' && ss -ltnH | grep -q :7001"))
	flows := []*flow{
		newFlow(ctx, t, a, "ping", "ttl=", "ping -n -i 0.1 10.0.0.2"),
		newFlow(ctx, t, a, "tcp", "right", "python3 /tmp/talk.py fill 10.0.0.2"),
		newFlow(ctx, t, a, "rc", "ping data", "rping -c -a 10.0.0.2 -v -C 10000000"),
	}
	goOn := func(what string) {
		t.Helper()
		for _, f := range flows {
			f.goesOn(what)
		}
	}
	at := 1 // the VM's host
	there := func() qemu.Config { return movable(ctx, t, l, hosts[1-at], moves) }
	move := func(g *migration) {
		t.Helper()
		var before []int
		for _, f := range flows {
			before = append(before, f.answers())
		}
		downtime := g.arrives(true)
		at = 1 - at
		goOn("at " + hosts[at].Name)
		var gaps []string
		for i, f := range flows {
			gaps = append(gaps, fmt.Sprint(f.name, " ", f.longest(before[i])))
		}
		t.Logf("from %s to %s: QEMU stopped the VM for %v; no answer for: %s", hosts[1-at].Name, hosts[at].Name, downtime,
			strings.Join(gaps, ", "))
	}

	t.Run("VM with an HCA", func(t *testing.T) {
		err := a.QMP().Run(ctx, "migrate", map[string]any{"uri": "unix:" + filepath.Join(l.Dir, "nowhere")}, nil)
		if err == nil || !strings.Contains(err.Error(), "vhost-user") {
			t.Errorf("a VM with an HCA: %v, want a refusal for its sake", err)
		}
		goOn("after the refusal")
	})
	for range 2 {
		move(beginMigration(ctx, t, l, b, there(), fast))
	}
	t.Run("cancelled", func(t *testing.T) {
		g := beginMigration(ctx, t, l, b, there(), slow)
		g.copies()
		g.isCancelled()
		goOn("after the cancellation")
	})
	t.Run("destination killed", func(t *testing.T) {
		g := beginMigration(ctx, t, l, b, there(), slow)
		g.copies()
		g.fails()
		goOn("after the destination's end")
	})
	t.Run("vnicd killed", func(t *testing.T) {
		for _, x := range []int{at, 1 - at, at} { // at the source, twice, and at the destination
			g := beginMigration(ctx, t, l, b, there(), slow)
			g.copies()
			kill(ctx, t, &stand{hosts: hosts[x : x+1], vms: w.vms[:1]}, 0)
			g.copies() // it goes on
			goOn("after a kill at " + hosts[x].Name)
			g.hurries()
			move(g)
		}
	})
	quietKernels(ctx, t, a, b)
}

var moves = flag.Int("migrations", 4,
	"how often each TestHCAMigrates moves the VM; 50 for the long test. What else may happen to one does a quarter as often")

// TestHCAMigrates: QEMU migrates a VM with our HCA, behind ivshmem-doorbell, from one host to another and back, also in
// a pause, while programs on it are at work with a VM on one of the hosts: no program notices, and the VM's memory is
// the same, byte by byte, at both ends (CO-5). They also go on at the source if the migration is cancelled, if the
// destination's QEMU is killed while it receives, or once it has all; and at the destination if either vnicd is killed
// on the way, or the hosts cannot reach each other for two seconds.
func TestHCAMigrates(t *testing.T) { migrations(t, serverMoves, *chosen) }

// TestHCAMigratesBesideRXE: the same, with Linux rxe in the VM that stays. odpstress, which rxe's losses do not slow
// down as others, would leave emulated processors no time for the rest.
func TestHCAMigratesBesideRXE(t *testing.T) {
	migrations(t, clientMoves, strings.ReplaceAll(*chosen, "odp,", ""))
}

func migrations(t *testing.T, place func(context.Context, *testing.T, *lab.Lab) *stand, workloads string) {
	some := (*moves + 3) / 4
	outlive(t, place, workloads, event{name: "migration", run: migrate, times: moves},
		event{name: "cancelled migration", run: cancelMigration, times: &some, awake: true},
		event{name: "migration to a QEMU that ends", run: endDestination, times: &some, awake: true},
		event{name: "migration that is taken back", run: takeBack, times: &some, awake: true},
		event{name: "kill in a migration", run: killInMigration, times: &some, awake: true},
		event{name: "migration beside a cut wire", run: cutWire, times: &some, awake: true})
}

// serverMoves: on two hosts, and the server's VM can move.
func serverMoves(ctx context.Context, t *testing.T, l *lab.Lab) *stand {
	stays, moves := vmA, vmB
	moves.HCA = "ivshmem"
	s := &stand{timeout: 14, mover: 1, moves: [2]lab.VM{1: moves}}
	s.bootMovable(ctx, t, l, stays, moves)
	check(t, lab.LoadModule(ctx, s.vms[0]))
	s.client = must[lab.End](t)(lab.NewEnd(ctx, s.vms[0], lab.Device, stays.Addr))
	s.server = must[lab.End](t)(lab.NewEnd(ctx, s.vms[1], lab.Device, moves.Addr))
	return s
}

// clientMoves: on two hosts, and the client's VM can move; the server's end is rxe.
func clientMoves(ctx context.Context, t *testing.T, l *lab.Lab) *stand {
	stays, moves := vmB, vmA
	stays.NoHCA, moves.HCA = true, "ivshmem"
	s := &stand{timeout: 18, rxe: true, pairs: 10, moves: [2]lab.VM{0: moves}} // rxe is slow, and emulated
	s.bootMovable(ctx, t, l, moves, stays)
	check(t, harness.AddRXE(ctx, s.vms[1], "rxe0", "eth0"))
	check(t, lab.WaitRDMA(ctx, s.vms[1], "rxe0"))
	s.client = must[lab.End](t)(lab.NewEnd(ctx, s.vms[0], lab.Device, moves.Addr))
	s.server = must[lab.End](t)(lab.NewEnd(ctx, s.vms[1], "rxe0", stays.Addr))
	return s
}

// bootMovable boots a VM on each host; those of s.moves have our module, and may move to the other host.
func (s *stand) bootMovable(ctx context.Context, t *testing.T, l *lab.Lab, vms ...lab.VM) {
	t.Helper()
	w := wiredHosts(t, l)
	oneKeeper(t, l)(w)
	s.Lab, s.hosts, s.wire, s.at = l, []*lab.Host{w.a, w.b}, w.wire, [2]int{0, 1}
	dumpOnFailure(t, s.hosts, &s.vms)
	for i, h := range s.hosts {
		var here []lab.VM
		for k, v := range vms {
			if k == i || s.moves[k].Name != "" {
				here = append(here, v)
			}
		}
		addr := []string{"192.0.2.1", "192.0.2.2"}
		check(t, h.Run(ctx, hostConfig(addr[i], addr[1-i], here...)))
	}
	var cfgs []qemu.Config
	for i, v := range vms {
		if s.moves[i].Name != "" {
			cfgs = append(cfgs, movable(ctx, t, l, s.hosts[i], v))
		} else {
			cfgs = append(cfgs, must[qemu.Config](t)(s.hosts[i].Config(ctx, v)))
		}
	}
	var err error
	s.vms, err = l.Boot(ctx, cfgs...)
	check(t, err)
	check(t, l.Programs(ctx, l.Share))
	for i, m := range s.vms {
		if s.moves[i].Name == "" {
			continue
		}
		// A folder of the host would keep QEMU from migrating the VM.
		run(ctx, t, m, "mkdir -p /host && mount -t tmpfs none /host")
		for _, name := range []string{"vnicd.ko", "counters", "odpstress"} {
			check(t, m.WriteFile(ctx, "/host/"+name, must[[]byte](t)(os.ReadFile(filepath.Join(l.Share, name)))))
		}
		run(ctx, t, m, "chmod +x /host/*")
		check(t, lab.LoadModule(ctx, m))
	}
	s.complete = func() {
		for i, m := range s.vms {
			if s.moves[i].Name != "" { // both hosts share the disk; from here on nothing writes to it
				run(ctx, t, m, "sync; mount -o remount,ro /")
			}
		}
	}
}

// host is where the VM is that moves.
func (s *stand) host() *lab.Host { return s.hosts[s.at[s.mover]] }

// there configures QEMU for the VM that moves on the other host.
func (s *stand) there(ctx context.Context, t *testing.T) qemu.Config {
	t.Helper()
	return movable(ctx, t, s.Lab, s.hosts[1-s.at[s.mover]], s.moves[s.mover])
}

// begin starts to migrate the VM to the other host, at most that many bytes a second.
func (s *stand) begin(ctx context.Context, t *testing.T, rate int) *migration {
	t.Helper()
	return beginMigration(ctx, t, s.Lab, s.vms[s.mover], s.there(ctx, t), rate)
}

// arrive waits until it is there. Each fourth time its memory is compared, which takes longer than the move.
func (s *stand) arrive(t *testing.T, g *migration, n int) {
	t.Helper()
	from, stopped := s.host(), g.arrives(n%4 == 0)
	s.at[s.mover] = 1 - s.at[s.mover]
	t.Logf("from %s to %s: QEMU stopped the VM for %v", from.Name, s.host().Name, stopped)
}

const (
	fast = 1 << 30 // bytes per second
	slow = 8 << 20 // long enough for something to happen meanwhile
)

// migrate moves the VM, every other time by `vnicd migrate`.
func migrate(ctx context.Context, t *testing.T, s *stand, n int) {
	if n%2 == 0 {
		s.arrive(t, s.begin(ctx, t, fast), n)
		return
	}
	m := s.vms[s.mover]
	g := awaitMigration(ctx, t, s.Lab, m, s.there(ctx, t))
	command := []string{"migrate", "--qmp", m.Socket(operator), "--destination", s.capabilities(ctx, t), m.Name(), g.uri}
	t.Log(strings.TrimSpace(must[string](t)(s.host().CLI(ctx, command...))))
	s.arrive(t, g, n)
}

// capabilities returns a file with those of the other host for the VM. A host with a smaller limit is refused first.
func (s *stand) capabilities(ctx context.Context, t *testing.T) string {
	t.Helper()
	m, has := s.vms[s.mover], ""
	eventually(ctx, t, "the QEMU that waits to connect", func() bool {
		has = must[string](t)(s.hosts[1-s.at[s.mover]].CLI(ctx, "vm", "capabilities", "-j", m.Name()))
		return strings.Contains(has, `"attached": true`) && strings.Contains(has, `"hca_device": "ivshmem"`)
	})
	file, fewer := filepath.Join(s.Dir, "capabilities.json"), filepath.Join(s.Dir, "fewer.json")
	check(t, os.WriteFile(file, []byte(has), 0o600))
	less := regexp.MustCompile(`"QPs": \d+`).ReplaceAllString(has, `"QPs": 2`)
	check(t, os.WriteFile(fewer, []byte(less), 0o600))
	command := []string{"migrate", "--qmp", m.Socket(operator), "--destination", fewer, m.Name(), "tcp:192.0.2.9:1"}
	_, err := s.host().CLI(ctx, command...)
	if err == nil || !strings.Contains(err.Error(), "limit QPs is 2") {
		t.Fatalf("a destination with a smaller limit: %v", err)
	}
	return file
}

func cancelMigration(ctx context.Context, t *testing.T, s *stand, n int) {
	g := s.begin(ctx, t, slow)
	g.copies()
	g.isCancelled()
}

func endDestination(ctx context.Context, t *testing.T, s *stand, n int) {
	g := s.begin(ctx, t, slow)
	g.copies()
	g.fails()
}

// takeBack lets the VM run on at its source once the destination has all of it.
func takeBack(ctx context.Context, t *testing.T, s *stand, n int) {
	g := s.begin(ctx, t, fast)
	g.completes()
	g.there.Kill()
	check(t, g.m.QMP().Run(ctx, "cont", nil, nil))
}

// killInMigration kills the vnicd of the source, and that of the destination.
func killInMigration(ctx context.Context, t *testing.T, s *stand, n int) {
	g := s.begin(ctx, t, slow)
	for i := range s.hosts {
		g.copies()
		kill(ctx, t, s, s.at[s.mover]+i)
	}
	g.copies()
	g.hurries()
	s.arrive(t, g, n)
}

func cutWire(ctx context.Context, t *testing.T, s *stand, n int) {
	s.wire.SetPolicy(wirefault.Policy{Drop: 1000})
	cut := time.Now()
	g := s.begin(ctx, t, fast)
	s.arrive(t, g, n)
	time.Sleep(time.Until(cut.Add(2 * time.Second)))
	s.wire.SetPolicy(wirefault.Policy{})
}

// movable configures a VM without what prevents migration, and with a folder of its own.
func movable(ctx context.Context, t *testing.T, l *lab.Lab, h *lab.Host, v lab.VM) qemu.Config {
	t.Helper()
	cfg := must[qemu.Config](t)(h.Config(ctx, v))
	cfg.HostShare, cfg.Images, cfg.Accel = "", l.Images, l.Accel
	cfg.Dir = filepath.Join(l.Dir, fmt.Sprintf("%s-%s-%d", v.Name, h.Name, time.Now().UnixNano()))
	check(t, os.MkdirAll(cfg.Dir, 0o755))
	cfg.ExtraArgs = append(cfg.ExtraArgs, "-qmp", "unix:"+filepath.Join(cfg.Dir, operator)+",server=on,wait=off")
	return cfg
}

// operator is the name of a second monitor: one has only one client.
const operator = "operator.sock"

// migration is a VM on its way to another host, as an operator does it: QEMU copies its memory while it runs, stops it,
// and resumes it on the other host.
type migration struct {
	ctx   context.Context
	t     *testing.T
	m     *qemu.Machine // leaves
	there *qemu.Machine // arrives
	uri   string
}

// awaitMigration starts the QEMU to which m goes.
func awaitMigration(ctx context.Context, t *testing.T, l *lab.Lab, m *qemu.Machine, to qemu.Config) *migration {
	t.Helper()
	g := &migration{ctx: ctx, t: t, m: m, uri: "unix:" + filepath.Join(to.Dir, "migrate")}
	to.ExtraArgs = append(to.ExtraArgs, "-incoming", g.uri, "-S")
	g.there = must[*qemu.Machine](t)(qemu.Boot(ctx, to))
	l.Add(g.there.Kill)
	return g
}

// beginMigration starts it, and the copying, with at most that many bytes a second.
func beginMigration(ctx context.Context, t *testing.T, l *lab.Lab, m *qemu.Machine, to qemu.Config,
	rate int) *migration {
	t.Helper()
	g := awaitMigration(ctx, t, l, m, to)
	check(t, m.QMP().Run(ctx, "migrate-set-parameters", map[string]any{"downtime-limit": 300, "max-bandwidth": rate}, nil))
	check(t, m.QMP().Run(ctx, "migrate", map[string]any{"uri": g.uri}, nil))
	return g
}

func (g *migration) progress() qemu.Migration {
	g.t.Helper()
	return must[qemu.Migration](g.t)(qemu.QueryMigration(g.ctx, g.m.QMP()))
}

// copies waits until the copying is under way.
func (g *migration) copies() {
	g.t.Helper()
	eventually(g.ctx, g.t, "the migration to copy", func() bool {
		p := g.progress()
		if p.Status == "completed" || p.Status == "failed" {
			g.t.Fatalf("migration: %+v", p)
		}
		return p.Status == "active" && p.RAM.Transferred > 8<<20
	})
}

// ends waits for the end of the migration.
func (g *migration) ends() (p qemu.Migration) {
	g.t.Helper()
	eventually(g.ctx, g.t, "the end of the migration", func() bool {
		p = g.progress()
		return p.Ended()
	})
	return p
}

// hurries ends the limit on its speed.
func (g *migration) hurries() {
	g.t.Helper()
	check(g.t, g.m.QMP().Run(g.ctx, "migrate-set-parameters", map[string]any{"max-bandwidth": fast}, nil))
}

// isCancelled cancels it.
func (g *migration) isCancelled() {
	g.t.Helper()
	check(g.t, g.m.QMP().Run(g.ctx, "migrate_cancel", nil, nil))
	if p := g.ends(); p.Status != "cancelled" {
		g.t.Fatalf("%+v", p)
	}
	g.there.Kill()
}

// fails kills the destination.
func (g *migration) fails() {
	g.t.Helper()
	g.there.Kill()
	if p := g.ends(); p.Status != "failed" {
		g.t.Fatalf("%+v", p)
	}
}

// completes waits until the destination has all of the VM, which stands, and returns how long QEMU stopped it.
func (g *migration) completes() time.Duration {
	g.t.Helper()
	p := g.ends()
	if p.Status != "completed" {
		g.t.Fatalf("migration: %+v", p)
	}
	g.waits()
	return time.Duration(p.Downtime) * time.Millisecond
}

// waits waits until the destination has all of the VM.
func (g *migration) waits() {
	g.t.Helper()
	eventually(g.ctx, g.t, "the VM at its destination", func() bool {
		var s struct {
			Status string `json:"status"`
		}
		check(g.t, g.there.QMP().Run(g.ctx, "query-status", nil, &s))
		return s.Status == "paused"
	})
}

// arrives waits until the VM is at its destination, has it run there, and ends the QEMU that it has left. compare: its
// memory is compared with that which it has left. It returns how long QEMU stopped the VM.
func (g *migration) arrives(compare bool) time.Duration {
	g.t.Helper()
	stopped := g.completes()
	if compare {
		if pages := differ(g.t, guestMemory(g.t, g.m), guestMemory(g.t, g.there)); len(pages) > 0 {
			g.t.Errorf("the VM's memory was not copied as it is: %d pages, such as %#x", len(pages), pages[:min(len(pages), 8)])
		}
	}
	check(g.t, g.there.QMP().Run(g.ctx, "cont", nil, nil))
	check(g.t, g.m.Become(g.ctx, g.there))
	return stopped
}

// guestMemory opens the memory of a VM.
func guestMemory(t *testing.T, m *qemu.Machine) *os.File {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", m.PID())
	for _, e := range must[[]os.DirEntry](t)(os.ReadDir(dir)) {
		path := filepath.Join(dir, e.Name())
		if to, err := os.Readlink(path); err == nil && strings.Contains(to, "memfd:memory-backend-memfd") {
			f := must[*os.File](t)(os.Open(path))
			t.Cleanup(func() { _ = f.Close() })
			return f
		}
	}
	t.Fatalf("%s: no memory in %s", m.Name(), dir)
	return nil
}

// differ returns the numbers of the pages in which two files differ.
func differ(t *testing.T, a, b *os.File) (pages []int64) {
	t.Helper()
	size := must[os.FileInfo](t)(a.Stat()).Size()
	if other := must[os.FileInfo](t)(b.Stat()).Size(); size == 0 || other != size {
		t.Fatalf("memory of %d and %d bytes", size, other)
	}
	const page = 4096
	var x, y [256 * page]byte
	for at := int64(0); at < size; at += int64(len(x)) {
		n := must[int](t)(a.ReadAt(x[:min(size-at, int64(len(x)))], at))
		must[int](t)(b.ReadAt(y[:n], at))
		for i := 0; i < n; i += page {
			if !bytes.Equal(x[i:i+page], y[i:i+page]) {
				pages = append(pages, (at+int64(i))/page)
			}
		}
	}
	return pages
}

// talkScript is server and client of one TCP connection, and records the times of lines that contain a word. With
// "hold" the server keeps what it got, 64 MiB, and the client verifies what it gets back of that later.
const talkScript = `import random, socket, sys, time
BLOCK, BLOCKS = 65536, 1024
def all(c, n):
    b = b""
    while len(b) < n:
        more = c.recv(n - len(b))
        if not more:
            sys.exit("closed")
        b += more
    return b
def data(i):
    return random.Random(i).randbytes(BLOCK)
if sys.argv[1] == "serve":
    c, _ = socket.create_server(("", 7000)).accept()
    while b := c.recv(100):
        c.sendall(b)
elif sys.argv[1] == "hold":
    c, _ = socket.create_server(("", 7001)).accept()
    kept = [None] * BLOCKS
    while True:
        put, get = [int.from_bytes(all(c, 8), "big") for _ in range(2)]
        kept[put % BLOCKS] = all(c, BLOCK)
        c.sendall(kept[get % BLOCKS])
elif sys.argv[1] == "ask":
    with socket.create_connection((sys.argv[2], 7000), 60) as c:
        c.settimeout(None)
        while True:
            c.sendall(b"echo")
            if not c.recv(100):
                break
            print("echo", flush=True)
            time.sleep(0.02)
elif sys.argv[1] == "fill":
    with socket.create_connection((sys.argv[2], 7001), 60) as c:
        c.settimeout(None)
        for i in range(1 << 40):
            get = random.randrange(max(0, i - BLOCKS + 1), i + 1)
            c.sendall(i.to_bytes(8, "big") + get.to_bytes(8, "big") + data(i))
            if all(c, BLOCK) != data(get):
                sys.exit("block %d is wrong" % get)
            print("right", flush=True)
else:
    with open("/tmp/" + sys.argv[2], "w", buffering=1) as f:
        for line in sys.stdin:
            if sys.argv[3] in line:
                f.write("%d\n" % (time.monotonic() * 1000))
`

// flow is continuous traffic in a VM whose answers' times are recorded.
type flow struct {
	ctx  context.Context
	t    *testing.T
	m    *qemu.Machine
	name string
}

// prepareFlows gives VMs the programs of flows.
func prepareFlows(ctx context.Context, t *testing.T, ms ...*qemu.Machine) {
	t.Helper()
	for _, m := range ms {
		check(t, m.WriteFile(ctx, "/tmp/talk.py", []byte(talkScript)))
	}
}

// newFlow starts a program whose answers are lines that contain word.
func newFlow(ctx context.Context, t *testing.T, m *qemu.Machine, name, word, program string) *flow {
	t.Helper()
	must[*qemu.Process](t)(m.StartShell(ctx,
		fmt.Sprintf("stdbuf -oL %s 2>/tmp/%s.err | exec python3 /tmp/talk.py note %s '%s'", program, name, name, word)))
	f := &flow{ctx, t, m, name}
	eventually(ctx, t, name+" begins", func() bool { return f.answers() > 20 })
	return f
}

func (f *flow) answers() int {
	n, _ := strconv.Atoi(strings.TrimSpace(run(f.ctx, f.t, f.m, "wc -l < /tmp/"+f.name+" || true")))
	return n
}

// goesOn waits for 21 more answers.
func (f *flow) goesOn(what string) {
	f.t.Helper()
	n := f.answers()
	eventually(f.ctx, f.t, fmt.Sprintf("more answers for %s %s (%d so far)", f.name, what, n),
		func() bool { return f.answers() > n+20 })
}

// longest returns the longest time between two answers after the first n.
func (f *flow) longest(n int) time.Duration {
	f.t.Helper()
	out := run(f.ctx, f.t, f.m,
		fmt.Sprintf("tail -n +%d /tmp/%s | awk 'NR > 1 && $1-last > gap { gap = $1-last } { last = $1 } END { print gap+0 }'",
			max(n, 1), f.name))
	ms := must[int](f.t)(strconv.Atoi(strings.TrimSpace(out)))
	return time.Duration(ms) * time.Millisecond
}
