package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

// neighbour measures what an innocent VM gets beside another VM of its engine: one that is idle, one that is honest and
// busy, and hostile ones (TR-1). The conditions take turns, so that a slower machine slows all of them.

const (
	neighbourRounds = 5
	neighbourTime   = 2 * time.Second // of each measurement
	streamSize      = 64 << 10
	// streamWindow keeps the engine at work: with few WRITEs in flight it sleeps between them unless the other VM keeps it
	// awake, and the rate says how long a processor takes to wake up.
	streamWindow = 32
)

// condition is what the other VM does while the innocent is measured.
type condition struct {
	name string
	do   func(ctx context.Context, s *stage, rng *rand.Rand) error // until ctx ends
	rate []float64                                                 // WRITEs of streamSize a second
	p50  []time.Duration                                           // of 8-byte WRITEs
	p999 []time.Duration
}

func repeated(episode func(context.Context, *stage, *rand.Rand) error) func(context.Context, *stage, *rand.Rand) error {
	return func(ctx context.Context, s *stage, rng *rand.Rand) error {
		for ctx.Err() == nil {
			if err := s.once(ctx, campaign{episode: episode}, rng); err != nil {
				return err
			}
		}
		return nil
	}
}

func (s *stage) neighbour(ctx context.Context, seed uint64) error {
	conditions := []*condition{
		{name: "idle", do: func(ctx context.Context, _ *stage, _ *rand.Rand) error { <-ctx.Done(); return nil }},
		{name: "honest, busy", do: honest},
		{name: "idle; CPU load", do: compute},
		{name: "hostile guest", do: repeated(guestEpisode)},
		{name: "hostile network", do: repeated(networkEpisode)},
		{name: "hostile front end", do: repeated(frontEndEpisode)},
	}
	stream, ping := s.pairs[0], s.pairs[0]
	for round := range neighbourRounds {
		for i, c := range conditions {
			within, stop := context.WithCancel(ctx)
			result := make(chan error, 1)
			go func() { result <- c.do(within, s, rand.New(rand.NewPCG(seed, uint64(round*len(conditions)+i)))) }()
			time.Sleep(200 * time.Millisecond) // the other VM gets under way
			rate, err := stream.rate(neighbourTime)
			var p50, p999 time.Duration
			if err == nil {
				p50, p999, err = ping.latency(neighbourTime)
			}
			stop()
			if err = errors.Join(err, <-result); err != nil && ctx.Err() == nil {
				return fmt.Errorf("beside a VM that is %s: %w", c.name, err)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			c.rate, c.p50, c.p999 = append(c.rate, rate), append(c.p50, p50), append(c.p999, p999)
		}
	}
	fmt.Printf("%-20s %14s %12s %12s %10s %10s   medians of %d rounds\n", "beside a VM that is", "64 KiB WRITE/s",
		"8 B p50", "8 B p99.9", "of honest", "of load", neighbourRounds)
	ofHonest, ofLoad := median(conditions[1].rate), median(conditions[2].rate)
	for _, c := range conditions {
		rate := median(c.rate)
		fmt.Printf("%-20s %14.0f %12v %12v %10.2f %10.2f\n", c.name, rate, median(c.p50).Round(100),
			median(c.p999).Round(100), rate/ofHonest, rate/ofLoad)
	}
	return nil
}

func median[T float64 | time.Duration](v []T) T {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

// rate returns how many WRITEs a second complete, with streamWindow of them in flight.
func (p *pair) rate(d time.Duration) (float64, error) {
	wr := guestdrv.NewWrite(1, p.b.mr.Remote(0), p.a.mr.SGE(0, streamSize)).With(guestdrv.SendSignaled)
	begin, flying, done := time.Now(), 0, 0
	for over := false; !over || flying > 0; {
		for !over && flying < streamWindow {
			if err := p.a.qp.PostSend(wr); err != nil {
				return 0, err
			}
			flying++
		}
		n, err := p.a.reap()
		if err != nil {
			return 0, err
		}
		flying, done = flying-n, done+n
		over = time.Since(begin) >= d
	}
	return float64(done) / time.Since(begin).Seconds(), nil
}

// latency returns the median and the 99.9th percentile of single WRITEs of 8 bytes.
func (p *pair) latency(d time.Duration) (p50, p999 time.Duration, err error) {
	wr := guestdrv.NewWrite(1, p.b.mr.Remote(0), p.a.mr.SGE(0, 8))
	for begin := time.Now(); time.Since(begin) < d; {
		start := time.Now()
		if err := p.a.do(wr); err != nil {
			return 0, 0, err
		}
		p.times = append(p.times, time.Since(start))
	}
	_, p50, p999 = p.phase()
	return p50, p999, nil
}

// reap waits for completions and checks them.
func (e *end) reap() (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	n, err := e.cq.PollWait(ctx, e.wcs[:])
	for i := range n {
		if err == nil {
			err = e.wcs[i].Err()
		}
	}
	return n, err
}

// compute keeps a processor busy without vnicd, as the attackers themselves do beside what they make vnicd do. Where
// innocents and engine have no processors of their own, that load alone takes some of their time.
func compute(ctx context.Context, _ *stage, rng *rand.Rand) error {
	for ctx.Err() == nil {
		for range 1000 {
			sink.Store(rng.Uint64())
		}
	}
	return nil
}

// sink takes what compute computes.
var sink atomic.Uint64

// honest is a VM that streams to itself as fast as it may.
func honest(ctx context.Context, s *stage, _ *rand.Rand) error {
	dev, err := guestdrv.Open(ctx, s.socket(s.h1, "mallory.hca"), guestdrv.Config{Memory: 16 << 20})
	if err != nil {
		return err
	}
	defer dev.Close()
	p := &party{name: "mallory", host: s.h1, dev: dev,
		path: guestdrv.Path{GID: guestdrv.IPGID(netip.MustParseAddr("10.0.0.4")), MAC: dev.MAC()}}
	if err := dev.SetGID(ctx, 0, p.path.GID, guestdrv.GIDOptions{}); err != nil {
		return err
	}
	if p.pd, err = dev.AllocPD(ctx); err != nil {
		return err
	}
	x, err := newPair(ctx, p, p)
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		if _, err := x.rate(50 * time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}
