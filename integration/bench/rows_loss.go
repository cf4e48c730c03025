package main

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/lab"
)

// The wire between two hosts loses frames, each by chance and in both directions. It has no segmentation offloads, so
// that a frame is what a wire carries; RoCE's and TCP's are of 1146 and 1512 bytes. The anchors are TCP with selective
// acknowledgements over kernel VXLAN.

// lossyWire prepares the wire of hosts and their kernels' TCP.
func (b *Bench) lossyWire(ctx context.Context, hosts []*lab.Host) (*loss, error) {
	if err := withoutOffloads(ctx, hosts); err != nil {
		return nil, err
	}
	l, err := newLoss()
	if err != nil {
		return nil, err
	}
	b.Add(func() { _ = l.Close() })
	for _, h := range hosts {
		if err := l.attach(h.NS, "ul"); err != nil {
			return nil, err
		}
		if _, err := h.NS.Shell(ctx, "echo 1 >/proc/sys/net/ipv4/tcp_sack"); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// during runs f with a share of frames lost, and checks that it was.
func (l *loss) during(share float64, f func() error) (c lossCount, err error) {
	if err := l.set(share); err != nil {
		return c, err
	}
	err = f()
	if c2, cerr := l.counted(); err == nil {
		c, err = c2, errors.Join(cerr, c2.check(share))
	}
	return c, errors.Join(err, l.set(0))
}

// lossGoodput measures the goodput with loss as a part of that of the same path without, the one right after the other.
func lossGoodput(share float64) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		const size, window = 64 << 10, 16
		hosts, nodes, err := b.remote(ctx, 1500, 32<<20)
		if err != nil {
			return m, err
		}
		l, err := b.lossyWire(ctx, hosts)
		if err != nil {
			return m, err
		}
		s, err := newCheckedStream(nodes[0], nodes[1], size, window, signalled)
		if err != nil {
			return m, err
		}
		if err := b.iperfServer(hosts[1]); err != nil {
			return m, err
		}
		// part measures with f, which returns bits per second and the KiB that arrived.
		part := func(who string, f func() (float64, float64, error)) (Sample, error) {
			var clean, lossy, arrived float64
			if _, err := l.during(0, func() (err error) { clean, _, err = f(); return err }); err != nil {
				return Sample{}, err
			}
			return working("KiB", func() (Sample, float64, error) {
				c, err := l.during(share, func() (err error) { lossy, arrived, err = f(); return err })
				return Sample{Value: lossy / clean, Extra: map[string]float64{who + "Gbit/s": lossy / giga,
					who + "without loss, Gbit/s": clean / giga, who + "lost, %": c.percent()}}, arrived, err
			})
		}
		m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
			return part("", func() (float64, float64, error) {
				rate, err := s.sample(ctx, d)
				return rate * size * 8, s.moved(), err
			})
		}
		m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
			return part("anchor, ", func() (float64, float64, error) {
				r, err := iperf(ctx, hosts[0], kernelAddr(1), d)
				return r.End.Received.BitsPerSecond, r.End.Received.Bytes / 1024, err
			})
		}
		return m, nil
	}
}

// lossLatency measures 8 bytes that bounce between programs that sleep.
func lossLatency(share float64) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		hosts, nodes, err := b.remote(ctx, 1500, 16<<20)
		if err != nil {
			return m, err
		}
		l, err := b.lossyWire(ctx, hosts)
		if err != nil {
			return m, err
		}
		w, err := newWriters(nodes[0], nodes[1], true)
		if err != nil {
			return m, err
		}
		s, err := b.kernelSockets(hosts, unix.SOCK_STREAM, true)
		if err != nil {
			return m, err
		}
		sample := func(p *bouncer, who string) func(context.Context, time.Duration) (Sample, error) {
			return func(ctx context.Context, d time.Duration) (s Sample, err error) {
				var t latencies
				c, err := l.during(share, func() (err error) { t, s.Work, err = p.sample(ctx, d); return err })
				if err != nil {
					return s, err
				}
				s.Value, s.Extra = t.at(0.999), t.percentiles(who)
				delete(s.Extra, who+"p99.9")
				s.Extra[who+"median"], s.Extra[who+"round trips"] = t.at(0.5), float64(len(t))
				s.Extra[who+"lost, %"] = c.percent()
				return s, nil
			}
		}
		return Meter{Ours: sample(newBouncer(w[0], w[1], true), ""),
			Anchor: sample(newBouncer(s[0], s[1], true), "anchor, ")}, nil
	}
}
