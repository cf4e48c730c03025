package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// offloads are what a veth pair has and a plain card has not: frames of 64 KiB pass it whole.
var offloads = []string{"tso", "gso", "tx-udp-segmentation"}

// withoutOffloads turns them off on the hosts' underlay interface, so that every frame that crosses it fits the MTU.
func withoutOffloads(ctx context.Context, hosts []*lab.Host) error {
	for _, h := range hosts {
		args := []string{"ethtool", "-K", "ul"}
		for _, o := range offloads {
			args = append(args, o, "off")
		}
		if _, err := h.NS.Run(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

// sent is what an interface has sent.
type sent struct{ bytes, frames float64 }

// sentBy returns the counters of a namespace's interface.
func sentBy(ns *harness.Namespace, name string) (s sent, err error) {
	var b []byte
	if err = ns.Do(func() (err error) {
		b, err = os.ReadFile("/proc/thread-self/net/dev") // of the calling thread's namespace
		return err
	}); err != nil {
		return s, err
	}
	return parseSent(string(b), name)
}

// parseSent finds an interface in /proc/net/dev: eight figures of what was received, then eight of what was sent, of
// which bytes and packets are the first two.
func parseSent(dev, name string) (s sent, err error) {
	for l := range strings.Lines(dev) {
		k, v, _ := strings.Cut(l, ":")
		if strings.TrimSpace(k) != name {
			continue
		}
		f := strings.Fields(v)
		if len(f) < 10 {
			break
		}
		if s.bytes, err = strconv.ParseFloat(f[8], 64); err == nil {
			s.frames, err = strconv.ParseFloat(f[9], 64)
		}
		return s, err
	}
	return s, fmt.Errorf("no interface %s in %q", name, dev)
}

// meanFrame returns the mean length of the frames sent since before, which must fit the MTU.
func (s sent) meanFrame(before sent, mtu int) (float64, error) {
	const ethernet = 14
	n := (s.bytes - before.bytes) / (s.frames - before.frames)
	if !(n <= float64(mtu+ethernet)) { // not a number: nothing was sent
		return n, fmt.Errorf("the wire carried frames of %.0f bytes: the MTU is %d", n, mtu)
	}
	return n, nil
}

// wireWithoutOffloads is remoteWrite, its anchor included, on a wire that segments nothing. Both must send frames that
// fit the MTU.
func wireWithoutOffloads(ctx context.Context, b *Bench) (m Meter, err error) {
	const mtu, size, window = 1500, 64 << 10, 16
	hosts, nodes, err := b.remote(ctx, mtu, 32<<20)
	if err != nil {
		return m, err
	}
	if err := withoutOffloads(ctx, hosts); err != nil {
		return m, err
	}
	s, err := newCheckedStream(nodes[0], nodes[1], size, window, signalled)
	if err != nil {
		return m, err
	}
	if err := b.iperfServer(hosts[1]); err != nil {
		return m, err
	}
	watched := func(name string, f func() (Sample, error)) (Sample, error) {
		before, err := sentBy(hosts[0].NS, "ul")
		if err != nil {
			return Sample{}, err
		}
		s, err := f()
		if err != nil {
			return s, err
		}
		after, err := sentBy(hosts[0].NS, "ul")
		if err != nil {
			return s, err
		}
		if s.Extra == nil {
			s.Extra = map[string]float64{}
		}
		s.Extra[name], err = after.meanFrame(before, mtu)
		return s, err
	}
	m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
		return watched("frame, B", func() (Sample, error) { return s.gigabits(ctx, hosts, d) })
	}
	m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
		return watched("anchor, frame, B", func() (Sample, error) {
			return working("KiB", func() (Sample, float64, error) {
				r, err := iperf(ctx, hosts[0], kernelAddr(1), d)
				return Sample{Value: r.End.Received.BitsPerSecond / giga}, r.End.Received.Bytes / 1024, err
			})
		})
	}
	return m, nil
}
