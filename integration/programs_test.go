package integration

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

var allPrograms = flag.Bool("programs.all", false, "run every combination of perftest's programs, not one of each kind")

// TestPrograms runs all of the distribution's verbs programs between two hosts, and our programs for other cases.
func TestPrograms(t *testing.T) {
	l, ctx := newLab(t)
	w := newTwoHosts(ctx, t, l)
	a, b := w.load(ctx, t)
	programs(ctx, t, l, a, b)
	quietKernels(ctx, t, w.vms...)
}

// TestProgramsOnOneHost runs the same between two VMs under one vnicd.
func TestProgramsOnOneHost(t *testing.T) {
	l, ctx := newLab(t)
	a, b := pair(ctx, t, l)
	programs(ctx, t, l, a, b)
	quietKernels(ctx, t, a.VM, b.VM)
}

// program is a run with a server in one guest and a client in the other.
type program struct {
	name           string // "": the first word of server
	server, client string // SERVER and CLIENT stand for addresses
	ready          string // condition that the server is ready; "": an rdma_cm listener
	stays          bool   // the server does not exit by itself
	datagrams      bool   // it uses nothing else, and may hang after one was lost
}

// cmPrograms are the programs of rdmacm-utils, all based on the connection manager, and those of other packages.
var cmPrograms = []program{
	{server: "rping -s -a SERVER -C 20 -V", client: "rping -c -a SERVER -C 20 -V"},
	{server: "ucmatose -c 4 -C 20 -S 1000", client: "ucmatose -s SERVER -c 4 -C 20 -S 1000"},
	{server: "udaddy -c 2 -C 10 -S 500", client: "udaddy -s SERVER -c 2 -C 10 -S 500"},
	{server: "rstream -S 4096 -C 20", client: "rstream -s SERVER -S 4096 -C 20"},
	{server: "riostream -S 4096 -C 20", client: "riostream -s SERVER -S 4096 -C 20"},
	{server: "rcopy", client: "rcopy /usr/bin/rping SERVER:/tmp/copy", stays: true},
	{server: "cmtime -c 4", client: "cmtime -s SERVER -c 4", stays: true},
	{server: "mckey -m 239.1.2.3 -b SERVER -C 5", client: "mckey -m 239.1.2.3 -b CLIENT -s -C 5",
		ready: "grep -q 030201EF /proc/net/igmp"},
	{server: "qperf", client: "qperf -t 1 -cm 1 SERVER rc_bw rc_lat rc_rdma_read_bw rc_rdma_write_bw",
		ready: "ss -ltnH | grep -q :19765", stays: true},
	{name: "fi_pingpong rdm", server: "fi_pingpong -p 'verbs;ofi_rxm' -e rdm -I 20 -S 4096",
		client: "fi_pingpong -p 'verbs;ofi_rxm' -e rdm -I 20 -S 4096 SERVER", ready: "ss -ltnH | grep -q :47592"},
	{server: "fi_pingpong -p verbs -e msg -I 20 -S 4096", client: "fi_pingpong -p verbs -e msg -I 20 -S 4096 SERVER",
		ready: "ss -ltnH | grep -q :47592"},
}

// ucxPrograms are runs of UCX's perftest over its verbs transports: messages, active messages, remote memory access and
// atomics.
func ucxPrograms() (all []program) {
	for _, tls := range []string{"rc_v", "ud_v", "rc_v,ud_v"} {
		ucx := "env UCX_TLS=" + tls + " UCX_NET_DEVICES=" + lab.Device + ":1 ucx_perftest -P 0"
		for _, x := range []string{"tag_bw -n 50 -s 65536", "tag_lat -n 50", "stream_bw -n 50", "ucp_am_lat -n 50",
			"ucp_put_bw -n 50 -s 65536", "ucp_get -n 50 -s 65536", "ucp_fadd -n 50 -s 8"} {
			name, _, _ := strings.Cut(x, " ")
			all = append(all, program{name: "ucx " + tls + " " + name, server: ucx, client: ucx + " SERVER -t " + x,
				ready: "ss -ltnH | grep -q :13337", datagrams: tls == "ud_v"})
		}
	}
	return all
}

// perftestRuns returns the options of perftest's runs: one of each kind, or with -programs.all every combination that
// perftest accepts.
func perftestRuns() (runs [][]string) {
	few := [][]string{
		{"ib_write_bw", "-c", "UC"}, {"ib_send_bw", "-c", "UD", "-s", "1024"}, {"ib_write_bw", "-R"}, {"ib_send_lat", "-e"},
		{"ib_send_bw", "--use-srq", "-q", "4"}, {"ib_atomic_bw", "-A", "FETCH_AND_ADD"},
		{"ib_atomic_lat", "-A", "CMP_AND_SWAP"},
		{"ib_read_lat"}, {"ib_write_lat", "-I", "64", "-s", "64"}, {"ib_read_bw", "-b"},
		{"ib_send_bw", "-c", "UC", "-b"}, {"ib_send_lat", "-c", "UD", "-s", "1024", "-e"},
		{"ib_send_bw", "-c", "UD", "-s", "1024", "-R"},
		{"ib_send_bw", "-b", "-q", "16"}, {"ib_write_bw", "-c", "UC", "-q", "16"}, {"ib_read_bw", "-R", "-q", "4"},
		{"ib_send_bw", "-e"},
	}
	if !*allPrograms {
		return few
	}
	for _, x := range []struct{ program, transport string }{
		{"ib_write", "RC"}, {"ib_write", "UC"}, {"ib_read", "RC"}, {"ib_send", "RC"}, {"ib_send", "UC"}, {"ib_send", "UD"},
		{"ib_atomic", "RC"},
	} {
		bw, lat := []string{"", "-b", "-q 16", "-b -q 16"}, []string{""}
		if x.program != "ib_write" { // "Events feature not available on WRITE verb"
			bw, lat = append(bw, "-e"), append(lat, "-e")
		}
		if x.program == "ib_send" && x.transport != "UC" { // IBTA 10.2.9: UC has no shared receives
			srq := "--use-srq"
			if x.transport == "RC" { // perftest shares 100 datagram receives, enough for one queue pair
				srq += " -q 4"
			}
			bw, lat = append(bw, srq), append(lat, "--use-srq")
		}
		cms := []string{"", "-R"}
		if x.transport == "UC" {
			cms = cms[:1] // "UC is not supported in librdmacm"
		}
		for _, cm := range cms {
			add := func(kind string, all []string) {
				for _, more := range all {
					if kind == "_lat" && x.transport == "UD" && cm+more == "-R--use-srq" {
						continue // perftest posts a receive to the queue pair, which has no receive queue
					}
					run := []string{x.program + kind, "-c", x.transport}
					switch {
					case x.transport == "UD":
						run = append(run, "-s", "1024")
					// no flow control: send no more than the underlay's sockets hold
					case x.transport == "UC" && strings.Contains(more, "-q 16"):
						run = append(run, "-s", "4096")
					}
					runs = append(runs, append(run, strings.Fields(cm+" "+more)...))
				}
			}
			add("_bw", bw)
			add("_lat", lat)
		}
	}
	return append(runs, few...)
}

func programs(ctx context.Context, t *testing.T, l *lab.Lab, client, server lab.End) {
	check(t, l.Programs(ctx, l.Share))
	t.Run("errors", func(t *testing.T) { verbsErrors(ctx, t, client, server) })
	for _, alone := range []string{"states", "windows"} {
		t.Run(alone, func(t *testing.T) {
			t.Log(run(ctx, t, client.VM, lab.Limited(2*time.Minute,
				fmt.Sprintf("/host/%s %s %d", alone, client.Device, client.GID))))
		})
	}
	t.Run("placement", func(t *testing.T) { placement(ctx, t, client, server, l.Images.Release != debian12) })
	t.Run("tools", func(t *testing.T) { tools(ctx, t, client, server) })
	t.Run("counters", func(t *testing.T) { queuePairCounters(ctx, t, client, server) })
	t.Run("GIDs", func(t *testing.T) { eachGID(ctx, t, client, server) })
	for _, x := range [][]string{
		{"ibv_uc_pingpong", "-c", "-e"}, {"ibv_ud_pingpong", "-c", "-e", "-s", "1024"}, {"ibv_srq_pingpong", "-c", "-e"},
		{"ibv_rc_pingpong", "-c", "-e", "-o"}, {"ibv_srq_pingpong", "-c", "-e", "-o"},
	} {
		t.Run(strings.Join(x, ""), func(t *testing.T) {
			must[string](t)(lab.Pingpong(ctx, client, server, x[0], append(x[1:], "-n", "100")...))
		})
	}
	for _, p := range append(ucxPrograms(), cmPrograms...) {
		name := p.name
		if name == "" {
			name, _, _ = strings.Cut(p.server, " ")
		}
		t.Run(name, func(t *testing.T) { p.run(ctx, t, client, server) })
	}
	for _, x := range perftestRuns() {
		t.Run(strings.Join(x, ""), func(t *testing.T) {
			opts := append(x[1:], "-n", "40")
			if slices.Contains(x, "-R") { // no TCP port to wait for
				line := fmt.Sprintf("%s -F %s", x[0], strings.Join(opts, " "))
				_, _, err := lab.Pair(ctx, server.VM, line, client.VM, line+" "+server.Addr, 0)
				check(t, err)
				return
			}
			must[string](t)(lab.Perftest(ctx, client, server, x[0], opts...))
		})
	}
}

// lostTries bounds how often a program is run again because datagrams were lost.
const lostTries = 3

// run runs a program. A program that may hang after a lost datagram is run again if the devices show that packets were
// lost, as the wire between two hosts loses them: UCX 1.18 does not always send datagrams again that were lost at the
// start of a connection (seen with 2 % of loss: send queue and completion queues were empty, and no packet followed).
func (p *program) run(ctx context.Context, t *testing.T, client, server lab.End) {
	t.Helper()
	lost := func() (n int) { // packets that one of the devices has sent and the other one has not received, so far
		if p.datagrams {
			for _, e := range []lab.End{client, server} {
				n += counter(ctx, t, e, "tx_packets") - counter(ctx, t, e, "rx_packets")
			}
		}
		return n
	}
	for try := 1; ; try++ {
		before := lost()
		failure := p.once(ctx, t, client, server)
		if failure == "" {
			return
		}
		n := lost() - before
		if n <= 0 || try == lostTries {
			t.Error(failure)
			return
		}
		t.Logf("run again: %d packets were lost on the way\n%s", n, failure)
	}
}

// once returns "" or what failed.
func (p *program) once(ctx context.Context, t *testing.T, client, server lab.End) (failure string) {
	t.Helper()
	line := func(s string) string {
		s = strings.NewReplacer("SERVER", server.Addr, "CLIENT", client.Addr).Replace(s)
		return lab.Limited(2*time.Minute, s)
	}
	srv := must[*qemu.Process](t)(server.VM.StartShell(ctx, line(p.server)))
	ready := p.ready
	if ready == "" {
		ready = "rdma resource show cm_id | grep -q 'state LISTEN'"
	}
	wctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	check(t, harness.WaitGuest(wctx, server.VM, fmt.Sprintf("%s || ! kill -0 %d", ready, srv.PID())))
	r := must[qemu.Result](t)(client.VM.Shell(ctx, line(p.client)))
	if p.stays || r.ExitCode != 0 {
		_ = srv.Signal(ctx, "TERM")
	}
	sr, err := srv.Wait(wctx)
	if r.ExitCode != 0 || err != nil || sr.ExitCode != 0 && !p.stays {
		return fmt.Sprintf("client: exit %d\n%s%s\nserver: %v, exit %d\n%s%s", r.ExitCode, tail(r.Stdout, 1500),
			tail(r.Stderr, 1500), err, sr.ExitCode, tail(sr.Stdout, 1500), tail(sr.Stderr, 1500))
	}
	return ""
}
