package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

// manyQPs measures the rate of WRITEs of 8 bytes by 1,000 QPs; one thread fills their queues in turn. The anchor is one
// QP. The rates of 10 and 100 QPs are shown beside it.
func manyQPs(ctx context.Context, b *Bench) (m Meter, err error) {
	const most, queue, message = 1000, 32, 8
	_, nodes, err := b.local(ctx, 2, 256<<20)
	if err != nil {
		return m, err
	}
	from, src, err := nodes[0].region(pageSize)
	if err != nil {
		return m, err
	}
	to, dst, err := nodes[1].region(pageSize)
	if err != nil {
		return m, err
	}
	var all []*demand
	for range most {
		e, _, err := connectAs(nodes[0], nodes[1], queue, false)
		if err != nil {
			return m, err
		}
		all = append(all, demandOf(e, src, dst, message, queue))
		all[len(all)-1].proof = proofOf(slots(from.Bytes(), to.Bytes(), message)...)
	}
	sample := func(ctx context.Context, n int, d time.Duration) (Sample, error) {
		served, w, err := feedAll(ctx, all[:n], d, nothing)
		if err == nil && slices.Contains(served, 0) {
			err = errors.New("a queue pair made no progress")
		}
		return Sample{Value: w.units / d.Seconds(), Work: w}, err
	}
	m.Ours = byDistance(func(ctx context.Context, d time.Duration) (s Sample, err error) {
		s.Extra = map[string]float64{}
		for _, n := range []int{10, 100} {
			some, err := sample(ctx, n, d/2)
			if err != nil {
				return s, err
			}
			s.Extra[fmt.Sprintf("%d QPs", n)] = some.Value
		}
		all, err := sample(ctx, most, d)
		all.Extra = s.Extra
		return all, err
	})
	m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) { return sample(ctx, 1, d) }
	return m, nil
}

// muchMemory measures the rate of WRITEs of 8 bytes to 256 pages scattered over a region of 64 GiB. The anchor's region
// has 1 MiB, which is 256 pages; a region of 1 GiB is shown beside it. The regions page on demand in a VM with that
// much memory, of which only those pages are touched.
func muchMemory(ctx context.Context, b *Bench) (m Meter, err error) {
	const small, middle, large, touched = 1 << 20, 1 << 30, 64 << 30, 256
	h, err := b.host()
	if err != nil {
		return m, err
	}
	if err := b.start(ctx, h, fmt.Sprintf("networks: [{name: blue, vni: 100}]\nvms:\n  - {name: %s, network: blue, mac: %q, "+
		"limits: {memory: 128GiB}}\n", vmName(0), vmMAC(0))); err != nil {
		return m, err
	}
	n, err := b.open(h, 0, large+middle+small+16<<20)
	if err != nil {
		return m, err
	}
	x, _, err := connect(n, n)
	if err != nil {
		return m, err
	}
	from, src, err := n.region(pageSize)
	if err != nil {
		return m, err
	}
	writes := func(size int) (func(context.Context, time.Duration) (float64, error), error) {
		buf, err := n.Alloc(size)
		if err != nil {
			return nil, err
		}
		dst, err := n.pd.RegisterOnDemand(context.Background(), onDemand, uint64(size), allAccess,
			guestdrv.PagerFunc(func(_ context.Context, f guestdrv.PageFault, pas []uint64) error {
				for i := range pas {
					pas[i] = buf.PA() + f.VA - onDemand + uint64(i*pageSize)
				}
				return nil
			}))
		if err != nil {
			return nil, fmt.Errorf("region of %d bytes: %w", size, err)
		}
		wr := guestdrv.NewWrite(0, dst.Remote(0), src.SGE(0, 8))
		at, stride := uint64(0), uint64(size/touched)
		proof := proofOf()
		for i := range touched {
			proof.pieces = append(proof.pieces, piece{from.Bytes()[:8], buf.Bytes()[i*(size/touched):][:8]})
		}
		return func(ctx context.Context, d time.Duration) (float64, error) {
			return x.proved(proof, 1, func() (float64, error) {
				return x.stream(ctx, d, depth-depth/8, 32, wr, func(int) {
					at = (at + 97) % touched
					wr.Remote.Addr = dst.Addr() + at*stride
				})
			})
		}, nil
	}
	toSmall, err := writes(small)
	if err != nil {
		return m, err
	}
	toMiddle, err := writes(middle)
	if err != nil {
		return m, err
	}
	toLarge, err := writes(large)
	if err != nil {
		return m, err
	}
	m.Ours = byDistance(func(ctx context.Context, d time.Duration) (s Sample, err error) {
		s.Extra = map[string]float64{}
		if s.Extra["1 GiB"], err = toMiddle(ctx, d/2); err != nil {
			return s, err
		}
		s.Value, err = toLarge(ctx, d)
		s.Work = x.worked
		return s, err
	})
	m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
		v, err := toSmall(ctx, d)
		return Sample{Value: v, Work: x.worked}, err
	}
	return m, nil
}
