package integration

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
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

// observation is what a program shows: numbers of progress, when observe was called and now (for ping also, behind a
// slash, of all requests), and of faults.
type observation struct {
	ended            bool
	was, now, faults string
}

type observations map[*guestProgram]observation

// idle reports whether there was no progress.
func (o observation) idle() bool { return amount(o.now) <= amount(o.was) }

// amount is the number of operations, 0 if there is none yet.
func amount(progress string) int {
	s, _, _ := strings.Cut(progress, "/")
	n, _ := strconv.Atoi(s)
	return n
}

// observing is the part of observe that runs in a guest. `each` calls its argument for each program, with its index,
// PID, progress and faults.
const observing = `
look() {
	PID=$2; kill -0 $PID 2>/dev/null || ended=1
	[ "$3" ] || return
	now=$(eval "$3"); now=${now:-0}
	eval ": \${was$1:=$now}; was=\$was$1"
	[ "${now%%/*}" != "${was%%/*}" ] || idle=1
}
show() {
	PID=$2; kill -0 $PID 2>/dev/null && state= || state=ended
	eval "was=\$was$1"
	echo "$1|$state|$was|$(eval "$3")|$(eval "$4")"
}
silence() { # PID OUT
	n=$(grep -c ^silence $2); kill -USR1 $1 || return
	while [ $(grep -c ^silence $2) = $n ]; do kill -0 $1 || return; sleep 0.1; done
	grep ^silence $2 | tail -n 1
}
tries=0
while ended= idle=; each look; [ "$idle" ] && [ ! "$ended" ] && [ $tries -lt 200 ]; do tries=$((tries + 1)); sleep 0.2; done
each show
`

// observe waits, in the guests, until all programs have made progress since the call or one has ended, for a while, and
// returns what they show then. silent is how long the queue pairs of the workload "counters" were
// silent at most since it was asked for last, in ms, once all of them work: median, 90th percentile and maximum; nil
// without that workload. There is one command for each guest, as it takes seconds in busy emulated ones.
func observe(ctx context.Context, t *testing.T, ps []*guestProgram) (seen observations, silent []int) {
	t.Helper()
	each, last := map[*qemu.Machine]string{}, map[*qemu.Machine]string{}
	for i, p := range ps {
		each[p.vm] += fmt.Sprintf("$1 %d %d %s %s\n", i, p.PID(), quote(p.progress), quote(p.faults))
		if p.name == "counters" {
			last[p.vm] = fmt.Sprintf("[ \"$ended$idle\" ] || silence %d %s", p.PID(), p.out())
		}
	}
	outs := make(chan string, len(each))
	for vm, calls := range each {
		go func() {
			out, err := vm.Run(ctx, "each() {\n"+calls+"}\n"+observing+last[vm])
			if err != nil {
				out = err.Error()
			}
			outs <- out
		}()
	}
	seen = observations{}
	for range each {
		for line := range strings.Lines(<-outs) {
			ms := make([]int, 3)
			if n, _ := fmt.Sscanf(line, "silence %d %d %d", &ms[0], &ms[1], &ms[2]); n == len(ms) {
				silent = ms
				continue
			}
			f := strings.Split(strings.TrimSpace(line), "|")
			i, err := strconv.Atoi(f[0])
			if err != nil || len(f) != 5 || i >= len(ps) {
				t.Fatalf("the programs in a guest: %s", line)
			}
			seen[ps[i]] = observation{f[1] != "", f[2], f[3], f[4]}
		}
	}
	return seen, silent
}

// quote returns s as a word of the shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

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
	{name: "app", start: appLoad, finish: appDone},
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
	n := *pairs
	if s.pairs > 0 {
		n = min(n, s.pairs)
	}
	for _, x := range []struct {
		name           string
		client, server lab.End
		port           int
		opts           string
	}{{"counters", s.client, s.server, 18610, fmt.Sprint("-e -q ", n)}, {"counters back", s.server, s.client, 18611,
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
		line:     fioRuns("--filename=/dev/nvme0n1 --size=4M --bsrange=512-64k")})
}

// fioRuns returns a script that runs fio with these options again and again until SIGINT: it writes at random, and
// verifies what it wrote, each time with other data.
func fioRuns(opts string) string {
	return `trap 'stop=1' INT
until [ "$stop" ]; do
	n=$((n + 1))
	setsid fio --name=verify ` + opts + ` --rw=randwrite --direct=1 --ioengine=libaio --iodepth=8 --verify=crc32c \
		--verify_fatal=1 --randseed=$n --minimal >/tmp/fio.last 2>&1 || {
		status=$?
		[ "$stop" ] && [ $status = 130 ] && break # the signal that ends this came before setsid
		cat /tmp/fio.last
		exit 1
	}
done
echo $n runs`
}

func nvmeDone(ctx context.Context, t *testing.T, s *stand) {
	t.Helper()
	run(ctx, t, s.client.VM, lab.NVMe{Transport: "rdma"}.Disconnect())
	check(t, s.nvmeEnd())
}

// rounds is a shell script that runs a client's rping which is not to end: it prints how many rounds have been right,
// at most once a second, and what is not one. Without -W interactive mawk waits until it has read many rounds.
func rounds(rping string) string {
	return "stdbuf -oL " + rping + ` 2>&1 | mawk -W interactive '!/ping data/ {print; next}
	{n++; now = systime()} now != last {print n; fflush(); last = now}'; exit 1`
}

// cmLoad: one rdma_cm connection for ever, and new ones all the time, to one server. Both ends compare all bytes. rping
// exits with 0 even if it fails, so its exchanges are counted.
func cmLoad(ctx context.Context, t *testing.T, s *stand) []*guestProgram {
	return start(ctx, t,
		&guestProgram{name: "rping server", vm: s.server.VM, line: "exec rping -s -P -V -S 2000 -a 0.0.0.0",
			ready: "rdma resource show cm_id | grep -q 'state LISTEN'"},
		&guestProgram{name: "rping", vm: s.client.VM, progress: "tail -n 1 /tmp/rping.out",
			line: rounds("rping -c -v -V -S 500 -C 1000000000 -a " + s.server.Addr)},
		&guestProgram{name: "rping again", vm: s.client.VM, ends: true, progress: "tail -n 1 /tmp/rping-again.out",
			line: fmt.Sprintf(`trap 'stop=1' INT
until [ "$stop" ]; do
	n=$((n + 1))
	setsid timeout 300 rping -c -v -V -S 2000 -C 10 -a %s >/tmp/rping.last 2>&1
	status=$?
	[ "$stop" ] && [ $status = 130 ] && break # the signal that ends this came before setsid
	# Twice: the signal that ends this may hit the first grep.
	[ "$(grep -c 'ping data' /tmp/rping.last)" = 10 ] || [ "$(grep -c 'ping data' /tmp/rping.last)" = 10 ] ||
		{ cut -c1-200 /tmp/rping.last; exit 1; }
	echo $n
done`, s.server.Addr)})
}

// appLoad: a program of the first host (PF-4) serves the stock rping of the server's VM over an rdma_cm connection. The
// program READs and WRITEs the VM's memory; rping compares.
func appLoad(ctx context.Context, t *testing.T, s *stand) []*guestProgram {
	const name, addr = "app1", "10.0.0.101"
	program, h := buildExample(ctx, t, s.Lab, "rping"), s.hosts[0]
	addApplications(ctx, t, h, fmt.Sprintf(`  - {name: %s, network: blue, mac: "02:00:00:00:00:a1", ips: [%s]}`, name, addr))
	s.app = must[*harness.Process](t)(h.NS.Start(filepath.Join(h.Dir, "app.log"), nil, program, "-socket",
		filepath.Join(h.Dir, name+".hca"), "-address", addr, "-size", "4096", "-timeout", "100h"))
	t.Cleanup(s.app.Kill)
	eventually(ctx, t, "the host's program listens", func() bool {
		return strings.Contains(s.app.LogTail(), "waiting for a client")
	})
	return start(ctx, t, &guestProgram{name: "rping to a host", vm: s.server.VM,
		progress: "tail -n 1 /tmp/rping-to-a-host.out", line: rounds("rping -c -v -V -S 3000 -C 1000000000 -a " + addr)})
}

// appDone: the program has noticed nothing but the end of its connection, perhaps in the middle of a round.
func appDone(ctx context.Context, t *testing.T, s *stand) {
	t.Helper()
	if err := s.app.Wait(ctx); err != nil && !strings.HasSuffix(s.app.LogTail(), "\nrping: the peer has disconnected") {
		t.Errorf("the host's program: %v\n%s", err, s.app.LogTail())
	}
}

// pingLoad: an echo request every 5 ms over the network card, which counts the lost ones. It does not retry.
func pingLoad(ctx context.Context, t *testing.T, s *stand) []*guestProgram {
	return start(ctx, t, &guestProgram{name: "ping", vm: s.client.VM, line: "exec ping -q -i 0.005 " + s.server.Addr,
		progress: "kill -QUIT $PID; sleep 0.1; tr '\\r' '\\n' </tmp/ping.out | sed -n 's, packets.*loss.*,,p' | tail -n 1"})
}

// lostPings returns the number of requests that had not been answered, or -1 without that workload.
func lostPings(t *testing.T, seen observations) int {
	t.Helper()
	for p, o := range seen {
		if p.name == "ping" {
			var received, sent int
			_, err := fmt.Sscanf(o.now, "%d/%d", &received, &sent)
			check(t, err)
			return sent - received
		}
	}
	return -1
}
