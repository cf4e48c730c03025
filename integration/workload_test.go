package integration

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/integration/harness"
	"github.com/vnicd/vnicd/integration/lab"
)

// guestProgram runs in a guest until the test ends it, with its output in a file there.
type guestProgram struct {
	name string
	vm   *qemu.Machine
	line string // of the shell; `exec` where signals are for the program itself
	// ready is a shell condition that holds once the program's peer may start; "": at once.
	ready string
	// progress is a shell command that prints a number, which grows as the program's operations complete; $PID is the
	// program. "" for servers, which their clients judge.
	progress string
	// faults prints a number that nothing but a pause may change; "": none.
	faults string
	// ends: SIGINT ends the program, which then exits with 0 if all was right; follows: its peer's end does. Others are
	// killed.
	ends, follows bool

	*qemu.Process
}

// out is the file with the program's output, in its guest.
func (p *guestProgram) out() string { return "/tmp/" + strings.ReplaceAll(p.name, " ", "-") + ".out" }

// start starts programs, in this order.
func start(ctx context.Context, t *testing.T, ps ...*guestProgram) []*guestProgram {
	t.Helper()
	for _, p := range ps {
		p.Process = must[*qemu.Process](t)(p.vm.StartShell(ctx, fmt.Sprintf("exec >%s 2>&1\n%s", p.out(), p.line)))
		if p.ready != "" {
			check(t, harness.WaitGuest(ctx, p.vm, p.ready))
		}
	}
	return ps
}

// observation is what a program shows at a moment: numbers of progress (for ping also, behind a slash, of all requests)
// and of faults.
type observation struct {
	ended            bool
	progress, faults string
}

// observe looks at all programs, with one command for each guest: in busy emulated guests a command takes a second.
func observe(ctx context.Context, t *testing.T, ps []*guestProgram) []observation {
	t.Helper()
	all := make([]observation, len(ps))
	scripts := map[*qemu.Machine]string{}
	for i, p := range ps {
		scripts[p.vm] += fmt.Sprintf("PID=%d; kill -0 $PID 2>/dev/null; echo \"%d|$?|$(%s)|$(%s)\"\n", p.PID(), i, p.progress,
			p.faults)
	}
	for vm, script := range scripts {
		for line := range strings.Lines(run(ctx, t, vm, script+"true")) {
			f := strings.Split(strings.TrimSpace(line), "|")
			i, err := strconv.Atoi(f[0])
			check(t, err)
			all[i] = observation{f[1] != "0", f[2], f[3]}
		}
	}
	return all
}

// amount is the number of operations, 0 if there is none yet.
func (o observation) amount() int {
	n, _, _ := strings.Cut(o.progress, "/")
	v, _ := strconv.Atoi(n)
	return v
}

// said returns the end of the program's output.
func (p *guestProgram) said(ctx context.Context) string {
	r, _ := p.vm.Shell(ctx, "tail -c 600 "+p.out())
	return r.Stdout
}

// workload is programs between the two ends of a stand. All of them notice errors; each one's operations must go on
// after whatever happens.
type workload struct {
	name string
	// start starts them; finish, if set, is called when they have ended.
	start  func(ctx context.Context, t *testing.T, s *stand) []*guestProgram
	finish func(ctx context.Context, t *testing.T, s *stand)
}

var workloads = []workload{
	{name: "perftest", start: perftestLoad},
	{name: "counters", start: countersLoad},
	{name: "odp", start: odpLoad},
	{name: "nvme", start: nvmeLoad, finish: nvmeDone},
	{name: "cm", start: cmLoad},
	{name: "ping", start: pingLoad},
}

// listens is a shell condition: there is a TCP listener.
func listens(port int) string { return fmt.Sprintf("ss -ltn | grep -q :%d", port) }

// perftestLoad: stock programs that poll, and the pingpong, which sleeps and compares data. The latter gives a peer
// half a second to come back (timeout 14), which is not enough for rxe.
func perftestLoad(ctx context.Context, t *testing.T, s *stand) (ps []*guestProgram) {
	for i, name := range []string{"ib_write_bw", "ib_read_bw", "ib_atomic_bw"} {
		port := 18700 + i
		const line = "exec stdbuf -oL %s -F -u %d -p %d --run_infinitely -D 1 -d %s -x %d %s"
		ps = append(ps,
			&guestProgram{name: name + " server", vm: s.server.VM, ready: listens(port),
				line: fmt.Sprintf(line, name, s.timeout, port, s.server.Device, s.server.GID, "")},
			&guestProgram{name: name, vm: s.client.VM, progress: fmt.Sprintf("grep -c '^ *[0-9]' /tmp/%s.out", name),
				line: fmt.Sprintf(line, name, s.timeout, port, s.client.Device, s.client.GID, s.server.Addr)})
	}
	if !s.rxe {
		const line = "exec ibv_rc_pingpong -c -e -n 100000000 -p 18599 -d %s -g %d %s"
		ps = append(ps, &guestProgram{name: "pingpong server", vm: s.server.VM, ready: listens(18599),
			line: fmt.Sprintf(line, s.server.Device, s.server.GID, "")},
			&guestProgram{name: "pingpong", vm: s.client.VM, progress: "awk '/^voluntary/ {print $2}' /proc/$PID/status",
				line: fmt.Sprintf(line, s.client.Device, s.client.GID, s.server.Addr)})
	}
	return start(ctx, t, ps...)
}

// countersLoad: completions, counters and messages that are compared, on 100 queue pairs to the server and on ten back.
// All ends sleep between completions. The client of the first also measures the silence. Emulated guests with all
// workloads may stand still for longer than the 1.8 s that a retransmission timeout of 14 gives, hence 18.
func countersLoad(ctx context.Context, t *testing.T, s *stand) (ps []*guestProgram) {
	for _, x := range []struct {
		name           string
		client, server lab.End
		port           int
		opts           string
	}{{"counters", s.client, s.server, 18610, fmt.Sprint("-e -q ", *pairs)}, {"counters back", s.server, s.client, 18611,
		"-e -q 10"}} {
		line := fmt.Sprintf("exec /host/counters -t 18 -p %d %s %%s %%d %%s", x.port, x.opts)
		p := &guestProgram{name: x.name, vm: x.client.VM, ends: true,
			line: fmt.Sprintf(line, x.client.Device, x.client.GID, x.server.Addr)}
		p.progress = "tail -n 4 " + p.out() + " | sed -n 's/^done //p' | tail -n 1"
		ps = append(ps, &guestProgram{name: x.name + " server", vm: x.server.VM, ready: listens(x.port), follows: true,
			line: fmt.Sprintf(line, x.server.Device, x.server.GID, "")}, p)
	}
	return start(ctx, t, ps...)
}

// silences returns how long the queue pairs of the workload "counters" were silent at most since the last call, in ms,
// once all of them work: median, 90th percentile and maximum. Without that workload: nil.
func silences(ctx context.Context, t *testing.T, ps []*guestProgram) []int {
	t.Helper()
	const script = `n=$(grep -c ^silence %[1]s); kill -USR1 %[2]d || exit
until [ $(grep -c ^silence %[1]s) -gt $n ]; do kill -0 %[2]d || exit; sleep 0.1; done
grep ^silence %[1]s | tail -n 1`
	for _, p := range ps {
		if p.name == "counters" {
			ms := make([]int, 3)
			_, err := fmt.Sscanf(run(ctx, t, p.vm, fmt.Sprintf(script, p.out(), p.PID())), "silence %d %d %d", &ms[0], &ms[1],
				&ms[2])
			if err != nil {
				t.Fatalf("%s: %v: %s", p.name, err, p.said(ctx))
			}
			return ms
		}
	}
	return nil
}

// odpLoad: odpstress, which compares every byte, with regions and buffers on demand whose owners release pages.
func odpLoad(ctx context.Context, t *testing.T, s *stand) []*guestProgram {
	const opts = "-p 18600 -r 8 -H 240 -s 16384 -q 1 -k 4 "
	c, v := "-w atomic,send -t 100000 -c release", "-c release"
	if s.rxe {
		c, v = "-w rdma,send -t 100000", "-m pinned -l pinned"
	}
	const progress = `awk '/MiB written/ {n = $2 + $5} END {print n + 0}' /tmp/odpstress.out`
	return start(ctx, t,
		&guestProgram{name: "odpstress server", vm: s.server.VM, ends: true, ready: listens(18600),
			line: "exec " + lab.StressCommand(s.server, opts+v, "")},
		&guestProgram{name: "odpstress", vm: s.client.VM, ends: true, progress: progress,
			line: "exec " + lab.StressCommand(s.client, opts+c, s.server.Addr)})
}

// nvmeLoad: fio writes to a disk over NVMe over RDMA and verifies it, again and again. Recoveries by the kernel would
// hide what the connection suffers.
func nvmeLoad(ctx context.Context, t *testing.T, s *stand) []*guestProgram {
	way := lab.NVMe{Transport: "rdma", Addr: s.server.Addr}
	s.nvmeEnd = must[func() error](t)(lab.ExportNVMe(ctx, s.server.VM, way))
	run(ctx, t, s.client.VM, way.Connect(0))
	return start(ctx, t, &guestProgram{name: "fio", vm: s.client.VM, ends: true,
		progress: "awk '{print $1+$5}' /sys/block/nvme0n1/stat",
		faults:   "dmesg | grep -cE 'nvme.*(error|timeout|timed out|onnect)' || true",
		line: `trap 'stop=1' INT
until [ "$stop" ]; do
	n=$((n + 1))
	setsid fio --name=verify --filename=/dev/nvme0n1 --size=4M --rw=randwrite --bsrange=512-64k --direct=1 --ioengine=libaio \
		--iodepth=8 --verify=crc32c --verify_fatal=1 --randseed=$n --minimal >/tmp/fio.last 2>&1 ||
		{ cat /tmp/fio.last; exit 1; }
done
echo $n runs`})
}

func nvmeDone(ctx context.Context, t *testing.T, s *stand) {
	t.Helper()
	run(ctx, t, s.client.VM, lab.NVMe{Transport: "rdma"}.Disconnect())
	check(t, s.nvmeEnd())
}

// cmLoad: one rdma_cm connection for ever, and new ones all the time, to one server. Both ends compare all bytes. rping
// exits with 0 even if it fails, so its exchanges are counted.
func cmLoad(ctx context.Context, t *testing.T, s *stand) []*guestProgram {
	return start(ctx, t,
		&guestProgram{name: "rping server", vm: s.server.VM, line: "exec rping -s -P -V -S 2000 -a 0.0.0.0",
			ready: "rdma resource show cm_id | grep -q 'state LISTEN'"},
		&guestProgram{name: "rping", vm: s.client.VM, progress: "tail -n 1 /tmp/rping.out",
			line: fmt.Sprintf("rping -c -v -V -S 500 -C 1000000000 -a %s 2>&1 | "+
				"awk 'NR %% 16 == 0 {print NR; fflush()} !/ping data/ {print}'; exit 1", s.server.Addr)},
		&guestProgram{name: "rping again", vm: s.client.VM, ends: true, progress: "tail -n 1 /tmp/rping-again.out",
			line: fmt.Sprintf(`trap 'stop=1' INT
until [ "$stop" ]; do
	n=$((n + 1))
	setsid timeout 300 rping -c -v -V -S 2000 -C 10 -a %s >/tmp/rping.last 2>&1
	[ $(grep -c 'ping data' /tmp/rping.last) = 10 ] || { cut -c1-200 /tmp/rping.last; exit 1; }
	echo $n
done`, s.server.Addr)})
}

// pingLoad: an echo request every 5 ms over the network card, which counts the lost ones. It does not retry.
func pingLoad(ctx context.Context, t *testing.T, s *stand) []*guestProgram {
	return start(ctx, t, &guestProgram{name: "ping", vm: s.client.VM, line: "exec ping -q -i 0.005 " + s.server.Addr,
		progress: "kill -QUIT $PID; sleep 0.1; tr '\\r' '\\n' </tmp/ping.out | sed -n 's, packets.*loss.*,,p' | tail -n 1"})
}

// lostPings returns the number of requests that had not been answered, or -1 without that workload.
func lostPings(t *testing.T, ps []*guestProgram, seen []observation) int {
	t.Helper()
	for i, p := range ps {
		if p.name == "ping" {
			var received, sent int
			_, err := fmt.Sscanf(seen[i].progress, "%d/%d", &received, &sent)
			check(t, err)
			return sent - received
		}
	}
	return -1
}
