package main

import (
	"context"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

// What it costs that connections survive a kill (CO-2): a daemon under a keeper has journals. The anchors are the same
// measurements with a daemon without a keeper.

type sampler = func(context.Context, time.Duration) (Sample, error)

// journaled measures what open returns for VMs of a daemon that has journals, and of one that has none.
func journaled(open func(context.Context, *Bench) (sampler, error)) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		b.keep = true
		m.Ours, err = open(ctx, b)
		b.keep = false
		if err != nil {
			return m, err
		}
		m.Anchor, err = open(ctx, b)
		return m, err
	}
}

// journaledRate is the stream of local_write_rate.
func journaledRate(ctx context.Context, b *Bench) (sampler, error) {
	nodes, x, _, err := b.localPair(ctx, 2, 16<<20)
	if err != nil {
		return nil, err
	}
	f, err := smallStream(nodes, x)
	return byDistance(f), err
}

// journaledLatency is the exchange of local_write_lat.
func journaledLatency(ctx context.Context, b *Bench) (sampler, error) {
	nodes, x, y, err := b.localPair(ctx, 2, 16<<20)
	if err != nil {
		return nil, err
	}
	f, err := pingPong(nodes, x, y, nil)
	return byDistance(f), err
}

// journaledRemote is the stream of remote_write_64k.
func journaledRemote(ctx context.Context, b *Bench) (sampler, error) {
	const size = 64 << 10
	f, _, err := b.remoteStream(ctx, 1500, size, 16)
	return func(ctx context.Context, d time.Duration) (Sample, error) {
		rate, w, err := f(ctx, d)
		return Sample{Value: rate * size * 8 / giga, Work: w.of("KiB", size/1024)}, err
	}, err
}

// journaledRead streams READs of 4 KiB between two VMs of a daemon: with journals they go as frames.
func journaledRead(ctx context.Context, b *Bench) (sampler, error) {
	const size = 4096
	nodes, x, _, err := b.localPair(ctx, 2, 16<<20)
	if err != nil {
		return nil, err
	}
	dst, dmr, err := nodes[0].region(size)
	if err != nil {
		return nil, err
	}
	src, smr, err := nodes[1].region(size)
	if err != nil {
		return nil, err
	}
	proof := proofOf(piece{src.Bytes(), dst.Bytes()})
	wr := guestdrv.NewRead(0, smr.Remote(0), dmr.SGE(0, size))
	return func(ctx context.Context, d time.Duration) (Sample, error) {
		rate, err := x.proved(proof, 1, func() (float64, error) { return x.stream(ctx, d, 64, 8, wr, nil) })
		return Sample{Value: rate, Work: x.worked}, err
	}, nil
}
