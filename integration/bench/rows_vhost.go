package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/vnicd/vnicd/integration/harness"
	"github.com/vnicd/vnicd/integration/lab"
)

// vhostFrames is 64-byte frames going round: DPDK's testpmd has two virtio ports (net_virtio_user) and passes what one gets to the other; between
// the ports is vnicd's switch, or, as anchor, a second testpmd that does the same with two vhost ports (net_vhost). One core each. What counts is frames
// per second through the middle, of the best second.
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
		return costing([]*lab.Host{h}, "frame", func() (Sample, float64, error) {
			rate, n, err := b.guestPorts(ctx, h, sockets, d)
			return Sample{Value: rate}, n, err
		})
	}
	m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
		var ports []string
		for i, path := range anchors {
			_ = os.Remove(path) // of the round before
			ports = append(ports, fmt.Sprintf("--vdev=net_vhost%d,iface=%s", i, path))
		}
		p, log, err := b.testpmd(h, "vhost", append(ports, "--", "--auto-start"))
		if err != nil {
			return Sample{}, err
		}
		defer p.Kill()
		forwards := func() bool {
			text, err := os.ReadFile(log)
			return err == nil && strings.Contains(string(text), "Port statistics") // it has begun
		}
		if err := waitFor(ctx, p, forwards); err != nil {
			return Sample{}, err
		}
		rate, _, err := b.guestPorts(ctx, h, anchors, d)
		return Sample{Value: rate}, err
	}
	return m, nil
}

// guestPorts lets frames go round for d, at least two seconds, and returns the rate and how many there were.
func (b *Bench) guestPorts(ctx context.Context, h *lab.Host, sockets [2]string, d time.Duration) (rate, n float64, err error) {
	var ports, peers []string
	for i, path := range sockets {
		ports = append(ports, fmt.Sprintf("--vdev=net_virtio_user%d,path=%s,mac=%s,queue_size=1024", i, path, vmMAC(i)))
		peers = append(peers, fmt.Sprintf("--eth-peer=%d,%s", i, vmMAC(1-i)))
	}
	p, log, err := b.testpmd(h, "virtio", append(append(append(ports, "--"), peers...), "--tx-first"))
	if err != nil {
		return 0, 0, err
	}
	defer p.Kill()
	want := 1 + max(2, int(d.Round(time.Second).Seconds())) // the first second is a part of one
	err = waitFor(ctx, p, func() bool {
		text, err := os.ReadFile(log)
		if err != nil {
			return false
		}
		seconds, total := parseTestpmd(string(text))
		rate, n = 0, total
		for _, r := range seconds {
			rate = max(rate, r)
		}
		return len(seconds) > want
	})
	return rate, n, err
}

// testpmd starts DPDK's test program on both cores, one of which forwards. It needs no huge pages.
func (b *Bench) testpmd(h *lab.Host, name string, args []string) (*harness.Process, string, error) {
	log := filepath.Join(h.Dir, "testpmd-"+name+".log")
	if err := os.WriteFile(log, nil, 0o644); err != nil {
		return nil, "", err
	}
	prefix := fmt.Sprintf("vnicd-bench-%d-%s", os.Getpid(), name)
	b.Add(func() { _ = os.RemoveAll(filepath.Join("/var/run/dpdk", prefix)) })
	argv := []string{"dpdk-testpmd", "-l", "0,1", "-m", "256", "--no-pci", "--no-huge", "--no-shconf", "--file-prefix=" + prefix}
	for _, a := range args {
		argv = append(argv, a)
		if a == "--" {
			argv = append(argv, "--nb-cores=1", "--forward-mode=io", "--burst=256", "--total-num-mbufs=16384", "--no-lsc-interrupt", "--disable-link-check", "--stats-period=1")
		}
	}
	p, err := h.NS.Start(log, nil, argv...)
	if err != nil {
		return nil, "", fmt.Errorf("dpdk-testpmd (Debian's dpdk-dev): %w", err)
	}
	b.Add(p.Kill)
	return p, log, nil
}

// parseTestpmd reads the statistics that testpmd prints of its two ports each second: frames received per second, and in all.
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

// waitFor waits until something has become true, or a process has ended.
func waitFor(ctx context.Context, p *harness.Process, ok func() bool) error {
	for !ok() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %s", ctx.Err(), p.LogTail())
		case <-p.Done():
			return fmt.Errorf("testpmd ended: %s", p.LogTail())
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}
