package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

// messageSizes measures local WRITEs of 64 B to 256 KiB. If cached, each size uses one buffer on either side, which
// stays in the processor's caches; otherwise the messages cycle through more memory than the caches hold. The anchor is
// memcpy on the same buffers. The figure is the rate of 4 KiB; the other sizes stand beside it.
func messageSizes(cached bool) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		const memory, figure = 160 << 20, 4 << 10
		nodes, x, _, err := b.localPair(ctx, 2, memory+16<<20)
		if err != nil {
			return m, err
		}
		src, smr, err := nodes[0].region(memory)
		if err != nil {
			return m, err
		}
		dst, dmr, err := nodes[1].region(memory)
		if err != nil {
			return m, err
		}
		sizes := []int{64, 1 << 10, figure, 16 << 10, 64 << 10, 256 << 10}
		count := func(size int) int {
			if cached {
				return 1
			}
			return memory / size
		}
		proofs := map[int]*proof{}
		for _, size := range sizes {
			used := count(size) * size
			proofs[size] = proofOf(slots(src.Bytes()[:used], dst.Bytes()[:used], size)...)
		}
		// step separates the slots of two messages in succession, so that a prefetcher of the next line gains nothing.
		step := func(size, at int) int { return (at + 97) % count(size) }
		wr := guestdrv.NewWrite(0, dmr.Remote(0), make([]guestdrv.SGE, 1)...)
		writes := func(ctx context.Context, size int, d time.Duration) (Sample, error) {
			at := 0
			rate, err := x.proved(proofs[size], 1, func() (float64, error) {
				return x.stream(ctx, d, 64, 8, wr, func(int) {
					at = step(size, at)
					wr.SGL[0], wr.Remote = smr.SGE(at*size, size), dmr.Remote(at*size)
				})
			})
			return Sample{Value: rate * float64(size) / giga, Work: x.worked}, err
		}
		copies := func(_ context.Context, size int, d time.Duration) (Sample, error) {
			p := proofs[size]
			p.prepare()
			at, n := 0, 0
			var took time.Duration
			s, err := working("message", func() (Sample, float64, error) {
				for start := time.Now(); took < d; took = time.Since(start) {
					for range 64 {
						at = step(size, at)
						copy(dst.Bytes()[at*size:][:size], src.Bytes()[at*size:][:size])
					}
					n += 64
				}
				return Sample{Value: float64(n) * float64(size) / giga / took.Seconds()}, float64(n), nil
			})
			return s, errors.Join(err, p.verify(n))
		}
		sample := func(one func(context.Context, int, time.Duration) (Sample, error),
			who string) func(context.Context, time.Duration) (Sample, error) {
			return func(ctx context.Context, d time.Duration) (s Sample, err error) {
				extra := map[string]float64{}
				for _, size := range sizes {
					if size == figure {
						continue
					}
					other, err := one(ctx, size, d/time.Duration(len(sizes)))
					if err != nil {
						return s, fmt.Errorf("messages of %d bytes: %w", size, err)
					}
					extra[who+bytesName(size)+", GB/s"] = other.Value
				}
				s, err = one(ctx, figure, d/2)
				s.Extra = extra
				return s, err
			}
		}
		return Meter{Ours: sample(writes, ""), Anchor: sample(copies, "memcpy ")}, nil
	}
}

// bytesName writes a size, which is below 1 MiB, in B or KiB.
func bytesName(n int) string {
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}
