package main

import (
	"context"
	"encoding/binary"
	"errors"
	"runtime"
	"slices"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/lab"
)

const giga = 1e9

// localWrite1M streams WRITEs of 1 MiB between two VMs of one daemon. Source and destination cycle through more memory
// than caches hold.
func localWrite1M(ctx context.Context, b *Bench) (m Meter, err error) {
	const size, count = 1 << 20, 160
	nodes, x, _, err := b.localPair(ctx, 2, count*size+16<<20)
	if err != nil {
		return m, err
	}
	src, smr, err := nodes[0].region(count * size)
	if err != nil {
		return m, err
	}
	dst, dmr, err := nodes[1].region(count * size)
	if err != nil {
		return m, err
	}
	proof := proofOf(slots(src.Bytes(), dst.Bytes(), size)...)
	at := 0
	wr := guestdrv.NewWrite(0, dmr.Remote(0), make([]guestdrv.SGE, 1)...)
	m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
		proof.prepare()
		s, err := costing([]*lab.Host{x.host}, "KiB", func() (Sample, float64, error) {
			rate, err := x.stream(ctx, d, 8, 1, wr, func(int) {
				at = (at + 1) % count
				wr.SGL[0], wr.Remote = smr.SGE(at*size, size), dmr.Remote(at*size)
			})
			return Sample{Value: rate * size / giga}, rate * d.Seconds() * size / 1024, err
		})
		return s, errors.Join(err, proof.verify(x.streamed))
	}
	m.Anchor = func(_ context.Context, d time.Duration) (Sample, error) {
		proof.prepare()
		n := 0
		s, err := working("KiB", func() (Sample, float64, error) {
			start := time.Now()
			for time.Since(start) < d {
				at = (at + 1) % count
				copy(dst.Bytes()[at*size:][:size], src.Bytes()[at*size:][:size])
				n++
			}
			took := time.Since(start)
			return Sample{Value: float64(n) * size / giga / took.Seconds()}, float64(n) * size / 1024, nil
		})
		return s, errors.Join(err, proof.verify(n))
	}
	return m, nil
}

// localLatency measures the one-way latency of 8 bytes.
func localLatency(ctx context.Context, b *Bench) (m Meter, err error) {
	nodes, x, y, err := b.localPair(ctx, 2, 16<<20)
	if err != nil {
		return m, err
	}
	bounce, err := pingPong(nodes, x, y, nil)
	if err != nil {
		return m, err
	}
	m.Ours = byDistance(bounce)
	puts := b.ucx("ucp_put_lat", 8, 200_000)
	m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
		r, w, err := puts.run(ctx, d)
		return Sample{Value: r["50.0_percentile_lat"] * 1e3, Work: w}, err
	}
	return m, nil
}

// pingPong bounces 8 bytes between x and y, which belong to the two nodes: each side WRITEs once it sees the other's
// WRITE. If between is not nil it is called repeatedly while the thread waits. The sample is the median of one way in
// ns.
func pingPong(nodes []*node, x, y *end, between func() error) (func(context.Context, time.Duration) (Sample, error),
	error) {
	var bufs [2]*guestdrv.Buffer
	var wrs [2]*guestdrv.SendWR
	ends := []*end{x, y}
	for i, n := range nodes[:2] {
		buf, mr, err := n.region(4096)
		if err != nil {
			return nil, err
		}
		bufs[i] = buf
		wrs[1-i] = guestdrv.NewWrite(0, mr.Remote(0))
		wrs[1-i].Inline = make([]byte, 8)
	}
	times := make([]float64, 0, 1<<22)
	n := uint64(0)
	return func(ctx context.Context, d time.Duration) (Sample, error) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		times = times[:0]
		p, err := begin()
		if err != nil {
			return Sample{}, err
		}
		last := time.Now()
		for stop := last.Add(d); last.Before(stop) && len(times) < cap(times); {
			for i := range ends {
				n++
				binary.LittleEndian.PutUint64(wrs[i].Inline, n)
				if err := ends[i].qp.PostSend(wrs[i]); err != nil {
					return Sample{}, err
				}
				for spins := 0; bufs[1-i].Load64(0) != n; spins++ {
					if between != nil && spins%64 == 63 {
						if err := between(); err != nil {
							return Sample{}, err
						}
					}
					if spins%65536 == 65535 && ctx.Err() != nil {
						return Sample{}, errStuck
					}
				}
			}
			now := time.Now()
			times = append(times, float64(now.Sub(last))/2)
			last = now
		}
		w, err := p.end("message", 2*float64(len(times)))
		slices.Sort(times)
		at := func(q float64) float64 { return times[int(q*float64(len(times)-1))] }
		extra := map[string]float64{"p99": at(0.99), "p99.9": at(0.999), "max": at(1)}
		return Sample{Value: at(0.5), Extra: extra, Work: w}, err
	}, nil
}

// smallMessages measures the rate of WRITEs of 8 bytes.
func smallMessages(ctx context.Context, b *Bench) (m Meter, err error) {
	nodes, x, _, err := b.localPair(ctx, 2, 16<<20)
	if err != nil {
		return m, err
	}
	stream, err := smallStream(nodes, x)
	if err != nil {
		return m, err
	}
	m.Ours = byDistance(func(ctx context.Context, d time.Duration) (Sample, error) {
		return costing([]*lab.Host{x.host}, "message", func() (Sample, float64, error) {
			s, err := stream(ctx, d)
			return s, s.Work.units, err
		})
	})
	puts := b.ucx("ucp_put_bw", 8, 4_000_000)
	m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
		r, w, err := puts.run(ctx, d)
		return Sample{Value: r["overall_mr"], Work: w}, err
	}
	return m, nil
}

// smallStream streams WRITEs of 8 bytes by x, the first node's end, in batches of 32, one of them signalled.
func smallStream(nodes []*node, x *end) (sampler, error) {
	src, smr, err := nodes[0].region(4096)
	if err != nil {
		return nil, err
	}
	dst, dmr, err := nodes[1].region(4096)
	if err != nil {
		return nil, err
	}
	proof := proofOf(piece{src.Bytes()[:8], dst.Bytes()[:8]})
	wr := guestdrv.NewWrite(0, dmr.Remote(0), smr.SGE(0, 8))
	return func(ctx context.Context, d time.Duration) (Sample, error) {
		rate, err := x.proved(proof, 1, func() (float64, error) {
			return x.stream(ctx, d, depth-depth/8, 32, wr, nil)
		})
		return Sample{Value: rate, Work: x.worked}, err
	}, nil
}

// remoteWrite streams WRITEs of 64 KiB between VMs of two daemons. The anchor is iperf3's TCP over the kernel's VXLAN,
// on the same wire.
func remoteWrite(mtu int) func(ctx context.Context, b *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		const size = 64 << 10
		ours, hosts, err := b.remoteStream(ctx, mtu, size, 16)
		if err != nil {
			return m, err
		}
		m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
			return costing(hosts, "KiB", func() (Sample, float64, error) {
				rate, w, err := ours(ctx, d)
				w = w.of("KiB", size/1024)
				return Sample{Value: rate * size * 8 / giga, Work: w}, w.units, err
			})
		}
		m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
			return working("KiB", func() (Sample, float64, error) {
				r, err := iperf(ctx, hosts[0], kernelAddr(1), d)
				return Sample{Value: r.End.Received.BitsPerSecond / giga}, r.End.Received.Bytes / 1024, err
			})
		}
		return m, nil
	}
}

// remotePackets streams messages of one packet each; the anchor is UDP.
func remotePackets(ctx context.Context, b *Bench) (m Meter, err error) {
	const size = 1024
	ours, hosts, err := b.remoteStream(ctx, 1500, size, 128)
	if err != nil {
		return m, err
	}
	m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
		return costing(hosts, "packet", func() (Sample, float64, error) {
			rate, w, err := ours(ctx, d)
			w = w.of("packet", 1)
			return Sample{Value: rate, Work: w}, w.units, err
		})
	}
	m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
		return working("packet", func() (Sample, float64, error) {
			r, err := iperf(ctx, hosts[0], kernelAddr(1), d, "-u", "-b", "0", "-l", "1400")
			arrived := r.End.Sum.Packets - r.End.Sum.Lost
			return Sample{
				Value: arrived / r.End.Sum.Seconds,
				Extra: map[string]float64{"lost by UDP, %": 100 * r.End.Sum.Lost / r.End.Sum.Packets},
			}, arrived, err
		})
	}
	return m, nil
}

// signalled is the number of WRITEs per signalled WRITE of a stream. ib_write_bw has 100; iperf3 sleeps until a third
// of its buffer is free.
const signalled = 4

// remoteStream prepares a stream of WRITEs between two daemons and an iperf3 server at the far end. It returns the
// hosts; the first one sends.
func (b *Bench) remoteStream(ctx context.Context, mtu, size,
	window int) (func(context.Context, time.Duration) (float64, work, error), []*lab.Host, error) {
	hosts, nodes, err := b.remote(ctx, mtu, 32<<20)
	if err != nil {
		return nil, hosts, err
	}
	x, _, err := connect(nodes[0], nodes[1])
	if err != nil {
		return nil, hosts, err
	}
	x.events = true
	src, smr, err := nodes[0].region(size)
	if err != nil {
		return nil, hosts, err
	}
	dst, dmr, err := nodes[1].region(size)
	if err != nil {
		return nil, hosts, err
	}
	proof := proofOf(piece{src.Bytes(), dst.Bytes()})
	wr := guestdrv.NewWrite(0, dmr.Remote(0), smr.SGE(0, size))
	f := func(ctx context.Context, d time.Duration) (float64, work, error) {
		rate, err := x.proved(proof, 1, func() (float64, error) { return x.stream(ctx, d, window, signalled, wr, nil) })
		return rate, x.worked, err
	}
	return f, hosts, b.iperfServer(hosts[1])
}
