package lab

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/vnicd/vnicd/hypervisor/qemu"
	"github.com/vnicd/vnicd/lab/harness"
)

// Device is the RDMA device's name in guests that run our module.
const Device = "vnic0"

// LoadModule loads vnicd.ko in a guest and waits until the RDMA device is active
// and has a GID for the interface's IPv4 address.
func LoadModule(ctx context.Context, m *qemu.Machine) error {
	if err := harness.LoadModule(ctx, m, "/host/vnicd.ko"); err != nil {
		return err
	}
	return WaitRDMA(ctx, m, Device)
}

// WaitRDMA waits until the RDMA device's port is active and has an IPv4 RoCEv2 GID.
func WaitRDMA(ctx context.Context, m *qemu.Machine, device string) error {
	ctx, cancel := context.WithTimeout(ctx, harness.Patience(time.Minute))
	defer cancel()
	cond := fmt.Sprintf("grep -q ACTIVE /sys/class/infiniband/%[1]s/ports/1/state && grep -q ^0000:0000:0000:0000:0000:ffff: /sys/class/infiniband/%[1]s/ports/1/gids/*", device)
	if err := harness.WaitGuest(ctx, m, cond); err != nil {
		out, _ := m.Shell(context.Background(),
			"ls /sys/class/infiniband; rdma link; cat /sys/class/infiniband/*/ports/1/state; cat /sys/class/infiniband/*/ports/1/gids/* | sort | uniq -c | tail; dmesg | tail -20")
		return fmt.Errorf("%s does not come up: %w\n%s%s", device, err, out.Stdout, out.Stderr)
	}
	return nil
}

// GIDIndex finds the index of the RoCEv2 GID of an IPv4 address on a device.
func GIDIndex(ctx context.Context, m *qemu.Machine, device string) (int, error) {
	out, err := m.Run(ctx, fmt.Sprintf(
		`cd /sys/class/infiniband/%s/ports/1 && for i in gids/*; do n=${i#gids/}; g=$(cat $i); case $g in 0000:0000:0000:0000:0000:ffff:*) [ "$(cat gid_attrs/types/$n)" = "RoCE v2" ] && echo $n;; esac; done; true`, device))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(out)
	if len(fields) == 0 {
		return 0, fmt.Errorf("VM %s: %s has no IPv4 RoCE v2 GID", m.Name(), device)
	}
	return strconv.Atoi(fields[0])
}

// limit bounds a program's run time by default.
const limit = 4 * time.Minute

// Limited ends a program that hangs (status 124), so that no test waits for ever.
func Limited(d time.Duration, cmd string) string {
	return fmt.Sprintf("exec timeout -k 5 %d %s", int(harness.Patience(d).Seconds()), cmd)
}

// Listen starts a server program in a guest and waits until it listens on the TCP port (0: an rdma_cm listener).
func Listen(ctx context.Context, server *qemu.Machine, cmd string, port int) (*qemu.Process, error) {
	return listen(ctx, server, Limited(limit, cmd), port)
}

func listen(ctx context.Context, server *qemu.Machine, cmd string, port int) (*qemu.Process, error) {
	p, err := server.StartShell(ctx, cmd)
	if err != nil {
		return nil, err
	}
	wctx, cancel := context.WithTimeout(ctx, harness.Patience(time.Minute))
	defer cancel()
	// The wait ends early if the server exits.
	listens := fmt.Sprintf("ss -ltnH | grep -q :%d", port)
	if port == 0 {
		listens = "rdma resource show cm_id | grep -q 'state LISTEN'"
	}
	cond := fmt.Sprintf("until %s; do kill -0 %d 2>/dev/null || exit 9; sleep 0.05; done", listens, p.PID())
	if r, werr := server.Shell(wctx, cond); werr != nil || r.ExitCode != 0 {
		sr, _ := finish(ctx, server, p)
		return nil, fmt.Errorf("VM %s: `%s` does not listen on port %d: %w\n%s%s", server.Name(), cmd, port,
			orStatus(werr, r.ExitCode), sr.Stdout, sr.Stderr)
	}
	return p, nil
}

// finish waits a minute for a program to exit; then it reports the state of the queue pairs and kills the program.
func finish(ctx context.Context, m *qemu.Machine, p *qemu.Process) (qemu.Result, error) {
	wctx, cancel := context.WithTimeout(ctx, harness.Patience(time.Minute))
	defer cancel()
	r, err := p.Wait(wctx)
	if err != nil {
		qps, _ := m.Shell(ctx, "rdma -d resource show qp; rdma statistic; head -n 1 /proc/loadavg")
		err = fmt.Errorf("%w; after a minute:\n%s", err, qps.Stdout)
		_ = p.Kill(ctx)
	}
	return r, err
}

// Pair runs a server program in one guest (Listen) and the client in the other or the same guest, and waits for both.
func Pair(ctx context.Context, server *qemu.Machine, serverCmd string, client *qemu.Machine, clientCmd string,
	port int) (serverOut, clientOut string, err error) {
	return PairFor(ctx, limit, server, serverCmd, client, clientCmd, port)
}

// PairFor is Pair with a given time limit.
func PairFor(ctx context.Context, d time.Duration, server *qemu.Machine, serverCmd string, client *qemu.Machine,
	clientCmd string, port int) (serverOut, clientOut string, err error) {
	p, err := listen(ctx, server, Limited(d, serverCmd), port)
	if err != nil {
		return "", "", err
	}
	cr, cerr := client.Shell(ctx, Limited(d, clientCmd))
	if cerr != nil || cr.ExitCode != 0 {
		_ = p.Signal(ctx, "TERM")
	}
	sr, serr := finish(ctx, server, p)
	switch {
	case cerr != nil || cr.ExitCode != 0:
		return sr.Stdout, cr.Stdout, fmt.Errorf("VM %s: `%s`: %w\n%s%s\nserver on %s: %s%s", client.Name(), clientCmd,
			orStatus(cerr, cr.ExitCode), cr.Stdout, cr.Stderr, server.Name(), sr.Stdout, sr.Stderr)
	case serr != nil || sr.ExitCode != 0:
		return sr.Stdout, cr.Stdout, fmt.Errorf("VM %s: `%s`: %w\n%s%s", server.Name(), serverCmd,
			orStatus(serr, sr.ExitCode), sr.Stdout, sr.Stderr)
	}
	return sr.Stdout, cr.Stdout, nil
}

func orStatus(err error, code int) error {
	if err != nil {
		return err
	}
	return fmt.Errorf("exit status %d", code)
}

// End is one end of a run: a guest, the RDMA device in it, its address.
type End struct {
	VM     *qemu.Machine
	Device string
	GID    int
	Addr   string // without prefix length
	// Opts are options for this end's programs only, such as on-demand paging.
	Opts string
}

// NewEnd returns an end and looks up its GID index.
func NewEnd(ctx context.Context, m *qemu.Machine, device, addr string) (End, error) {
	gid, err := GIDIndex(ctx, m, device)
	a, _, _ := strings.Cut(addr, "/")
	return End{VM: m, Device: device, GID: gid, Addr: a}, err
}

// perftestPort is the TCP port of perftest and the pingpongs.
const perftestPort = 18515

// Perftest runs a perftest program (ib_write_bw ...) with the client on one end and the server on the other; opts go to
// both. -F suppresses the warnings about the emulated CPU's clock.
func Perftest(ctx context.Context, client, server End, program string, opts ...string) (string, error) {
	cmd := func(e End) string {
		return fmt.Sprintf("%s -F -d %s -x %d %s %s", program, e.Device, e.GID, e.Opts, strings.Join(opts, " "))
	}
	_, out, err := Pair(ctx, server.VM, cmd(server), client.VM, cmd(client)+" "+server.Addr, perftestPort)
	return out, err
}

// Pingpong runs an ibv_*_pingpong program. With -c the program compares the first byte of each page and only prints a
// mismatch; here a mismatch is an error.
func Pingpong(ctx context.Context, client, server End, program string, opts ...string) (string, error) {
	cmd := func(e End) string {
		return fmt.Sprintf("%s -d %s -g %d %s %s", program, e.Device, e.GID, e.Opts, strings.Join(opts, " "))
	}
	received, out, err := Pair(ctx, server.VM, cmd(server), client.VM, cmd(client)+" "+server.Addr, perftestPort)
	if strings.Contains(received, invalidData) {
		err = errors.Join(fmt.Errorf("%s on %s: %s", program, server.VM.Name(), received), err)
	}
	return out, err
}

// invalidData is the message about a wrong page; the program exits with status 0 nevertheless.
const invalidData = "invalid data in page"

// Row is one line of perftest's table.
type Row []float64

// number matches a column. A standard deviation may be the root of a rounded, negative number; on a busy machine
// perftest may fail to measure the clock and print infinite times.
var number = regexp.MustCompile(`^\s*\d+(\s+([\d.]+|-?nan|inf))+\s*$`)

// Rows returns the number lines of perftest's output: for *_bw bytes, iterations, peak MB/s, average MB/s, Mmsg/s; for
// *_lat bytes, iterations, t_min, t_max, t_typical, t_avg, t_stdev, 99%, 99.9% in microseconds.
func Rows(out string) []Row {
	var rows []Row
	for line := range strings.Lines(out) {
		if !number.MatchString(strings.TrimRight(line, "\n")) {
			continue
		}
		var r Row
		for _, f := range strings.Fields(line) {
			v, _ := strconv.ParseFloat(f, 64)
			r = append(r, v)
		}
		if len(r) >= 5 {
			rows = append(rows, r)
		}
	}
	return rows
}

// Bandwidth returns the average MiB/s of the last row of a *_bw run.
func Bandwidth(out string) (float64, error) { return column(out, 3) }

// Latency returns the typical latency in microseconds of the last row of a *_lat run.
func Latency(out string) (float64, error) { return column(out, 4) }

func column(out string, i int) (float64, error) {
	rows := Rows(out)
	if len(rows) == 0 || len(rows[len(rows)-1]) <= i {
		return 0, fmt.Errorf("no result in perftest's output:\n%s", out)
	}
	return rows[len(rows)-1][i], nil
}
