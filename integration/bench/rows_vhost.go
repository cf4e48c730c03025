package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// vhostFrames circulates 64-byte frames: DPDK's testpmd has two virtio ports (net_virtio_user) and forwards between
// them. The ports are joined by vnicd's switch or, as anchor, by a second testpmd with two vhost ports (net_vhost).
//
// The bottleneck depends on the number of cores, and testpmd polls all the time. The figure is therefore what one core
// in the middle could forward: frames divided by the processor time they took. For vnicd this is all time that the
// daemon ran, including polling and wake-ups; for testpmd it is its own count (--record-core-cycles), which excludes
// empty polls. That count is wall-clock time and on a busy machine includes other processes' time. The frames forwarded
// in the best second are shown beside it.
func vhostFrames(ctx context.Context, b *Bench) (m Meter, err error) {
	h, err := b.host()
	if err != nil {
		return m, err
	}
	if err := b.daemon(ctx, h, 0, 2, ""); err != nil {
		return m, err
	}
	var sockets, anchors [2]string
	for i := range sockets {
		sockets[i] = filepath.Join(h.Dir, vmName(i)+".net")
		anchors[i] = filepath.Join(h.Dir, fmt.Sprintf("dpdk%d", i))
	}
	m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
		rate, perCore, w, err := b.guestPorts(ctx, h, h.Proc, sockets, d)
		return Sample{Value: perCore, Extra: map[string]float64{"frames/s": rate}, Work: w}, err
	}
	m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
		var ports []string
		for i, path := range anchors {
			_ = os.Remove(path) // of the previous round
			ports = append(ports, fmt.Sprintf("--vdev=net_vhost%d,iface=%s", i, path))
		}
		// Use the core on which the other testpmd does not forward.
		p, log, err := b.testpmd(h, "vhost", "0@1,1@0", append(ports, "--", "--auto-start", "--record-core-cycles"))
		if err != nil {
			return Sample{}, err
		}
		defer p.Kill()
		forwards := func() bool {
			text, err := os.ReadFile(log)
			return err == nil && strings.Contains(string(text), "Port statistics") // it has started
		}
		if err := waitFor(ctx, p, forwards); err != nil {
			return Sample{}, err
		}
		rate, _, w, err := b.guestPorts(ctx, h, p, anchors, d)
		if err != nil {
			return Sample{}, err
		}
		// testpmd prints the cycles when it exits.
		if err := p.Signal(os.Interrupt); err != nil {
			return Sample{}, err
		}
		select {
		case <-p.Done():
		case <-ctx.Done():
			return Sample{}, fmt.Errorf("testpmd does not exit: %w", ctx.Err())
		}
		text, err := os.ReadFile(log)
		if err != nil {
			return Sample{}, err
		}
		perCore, err := parseCycles(string(text))
		return Sample{Value: perCore, Extra: map[string]float64{"DPDK's frames/s": rate}, Work: w}, err
	}
	return m, nil
}

var cycles = regexp.MustCompile(`CPU cycles/packet=([\d.]+) .* at (\d+) MHz`)

// parseCycles computes the packets per second that one core can forward from testpmd's cycles per packet.
func parseCycles(s string) (float64, error) {
	m := cycles.FindStringSubmatch(s)
	if m == nil {
		return 0, errors.New("testpmd printed no cycles")
	}
	each, err := strconv.ParseFloat(m[1], 64)
	if err != nil || each == 0 {
		return 0, fmt.Errorf("testpmd: %q", m[0])
	}
	mhz, err := strconv.ParseFloat(m[2], 64)
	return mhz * 1e6 / each, err
}

// guestPorts circulates frames for d, at least two seconds, and returns the rate, the rate per core of processor time
// of the process in the middle, and the machine's work.
func (b *Bench) guestPorts(ctx context.Context, h *lab.Host, middle *harness.Process, sockets [2]string,
	d time.Duration) (rate, perCore float64, w work, err error) {
	var ports, peers []string
	for i, path := range sockets {
		ports = append(ports, fmt.Sprintf("--vdev=net_virtio_user%d,path=%s,mac=%s,queue_size=1024", i, path, vmMAC(i)))
		peers = append(peers, fmt.Sprintf("--eth-peer=%d,%s", i, vmMAC(1-i)))
	}
	p, log, err := b.testpmd(h, "virtio", "0@0,1@1", append(append(append(ports, "--"), peers...), "--tx-first"))
	if err != nil {
		return 0, 0, w, err
	}
	defer p.Kill()
	// the first second is incomplete and includes the start
	want := 1 + max(2, int(d.Round(time.Second).Seconds()))
	var (
		seen         int
		total, first float64
		start, ran   time.Duration
		measured     phase
		failed       error
	)
	err = waitFor(ctx, p, func() bool {
		text, err := os.ReadFile(log)
		if err != nil {
			return false
		}
		seconds, n := parseTestpmd(string(text))
		if len(seconds) == seen {
			return false
		}
		// The statistics are from a moment ago, so sample the time now.
		if ran, failed = cpuTime(middle); failed != nil {
			return true
		}
		if seen, total = len(seconds), n; first == 0 {
			first, start = n, ran
			measured, failed = begin()
			return failed != nil
		}
		rate = max(rate, seconds[seen-1])
		if seen <= want {
			return false
		}
		w, failed = measured.end("frame", total-first)
		return true
	})
	if err = errors.Join(err, failed); err != nil {
		return 0, 0, w, err
	}
	return rate, (total - first) / (ran - start).Seconds(), w, nil
}

// testpmd starts DPDK's test program, whose second thread forwards; cores places the threads (--lcores). It needs no
// huge pages.
func (b *Bench) testpmd(h *lab.Host, name, cores string, args []string) (*harness.Process, string, error) {
	log := filepath.Join(h.Dir, "testpmd-"+name+".log")
	if err := os.WriteFile(log, nil, 0o644); err != nil {
		return nil, "", err
	}
	prefix := fmt.Sprintf("vnicd-bench-%d-%s", os.Getpid(), name)
	b.Add(func() { _ = os.RemoveAll(filepath.Join("/var/run/dpdk", prefix)) })
	argv := []string{"dpdk-testpmd", "--lcores", cores, "-m", "256", "--no-pci", "--no-huge", "--no-shconf",
		"--file-prefix=" + prefix}
	for _, a := range args {
		argv = append(argv, a)
		if a == "--" {
			argv = append(argv, "--nb-cores=1", "--forward-mode=io", "--burst=256", "--total-num-mbufs=16384",
				"--no-lsc-interrupt", "--disable-link-check", "--stats-period=1")
		}
	}
	p, err := h.NS.Start(log, nil, argv...)
	if err != nil {
		return nil, "", fmt.Errorf("dpdk-testpmd (Debian's dpdk-dev): %w", err)
	}
	b.Add(p.Kill)
	return p, log, nil
}

// parseTestpmd parses the statistics that testpmd prints for its two ports each second: frames received per second, and
// in total.
func parseTestpmd(s string) (seconds []float64, total float64) {
	var sum, all float64
	ports := 0
	for l := range strings.Lines(s) {
		f := strings.Fields(l)
		if len(f) < 2 {
			continue
		}
		v, err := strconv.ParseFloat(f[1], 64)
		switch {
		case err != nil:
		case f[0] == "RX-packets:":
			all += v
		case f[0] == "Rx-pps:":
			sum += v
			if ports++; ports == 2 {
				seconds, total = append(seconds, sum), all
				ports, sum, all = 0, 0, 0
			}
		}
	}
	return seconds, total
}

// waitFor waits until ok returns true or the process exits.
func waitFor(ctx context.Context, p *harness.Process, ok func() bool) error {
	for !ok() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %s", ctx.Err(), p.LogTail())
		case <-p.Done():
			return fmt.Errorf("testpmd exited: %s", p.LogTail())
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}
