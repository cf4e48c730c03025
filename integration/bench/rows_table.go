package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/translate"
)

// resolver is a region of n scattered 4 KiB pages, looked up through both stages.
type resolver struct {
	vm  *translate.VM
	key translate.Key
	n   uint64
}

const (
	firstPA = translate.PA(1 << 32)
	firstVA = translate.VA(0x7f0000000000)
	inSet   = 256 // pages looked up: the warm set
)

// resolver builds the tables. With large, guest and host memory are aligned to each other, as a VM's are, and stage two
// maps pieces of 2 MiB; otherwise pages of 4 KiB.
func (b *Bench) resolver(n uint64, large bool) (*resolver, error) {
	// Only addresses are looked up; the memory is never touched.
	const huge = 2 << 20
	mem, err := unix.Mmap(-1, 0, int(n)<<translate.PageShift+2*huge, unix.PROT_READ,
		unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("%d pages of address space: %w", n, err)
	}
	whole := mem
	b.Add(func() { _ = unix.Munmap(whole) })
	off := huge - addressOf(mem)%huge
	if !large {
		off += translate.PageSize
	}
	mem = mem[off:][:n<<translate.PageShift]
	s := translate.NewSpace(1)
	if err := s.Map(firstPA, mem); err != nil {
		return nil, err
	}
	vm := translate.NewVM(s, translate.Limits{})
	r, err := vm.CreateRegion(translate.RegionSpec{
		PD: 1, Access: translate.LocalWrite | translate.RemoteWrite, PageShift: translate.PageShift, IOVA: firstVA,
		Length: n << translate.PageShift, NPages: n,
	})
	if err != nil {
		return nil, err
	}
	pas := make([]translate.PA, 0, 4096)
	for first := uint64(0); first < n; first += uint64(len(pas)) {
		pas = pas[:0]
		for p := first; p < min(first+uint64(cap(pas)), n); p++ {
			// A permutation without adjacent pages: n is no multiple of this prime.
			pas = append(pas, firstPA+translate.PA(p*7919%n<<translate.PageShift))
		}
		if err := vm.SetPages(r.Handle(), first, pas); err != nil {
			return nil, err
		}
	}
	return &resolver{vm, r.LKey(), n}, nil
}

// run looks up random pages of the warm set for d and returns ns per look-up, without the epoch.
func (r *resolver) run(ctx context.Context, d time.Duration) (Sample, error) {
	return r.lookUp(ctx, d, min(r.n, inSet), false)
}

// The pages looked up, or words loaded, are those of this sequence.
const multiplier, increment = 6364136223846793005, 1442695040888963407

// lookUp looks up random pages for d, of a set that is spread over the region. If dependent, each look-up needs the
// result of the one before it; otherwise the processor can overlap them.
func (r *resolver) lookUp(_ context.Context, d time.Duration, set uint64, dependent bool) (Sample, error) {
	stride := r.n / set
	return working("look-up", func() (Sample, float64, error) {
		x := uint64(1)
		n, start := 0, time.Now()
		for time.Since(start) < d {
			for range 1 << 16 {
				x = x*multiplier + increment
				p := (x >> 32) * set >> 32 * stride
				h, m := r.vm.Resolve(r.key, 1, firstVA+translate.VA(p<<translate.PageShift)+64, 64, translate.RemoteWrite)
				if !m.OK() {
					return Sample{}, 0, m.Err()
				}
				if dependent {
					x += addressOf(h) >> 63 // 0 for addresses of user space, which the processor cannot know
				}
			}
			n += 1 << 16
		}
		return Sample{Value: float64(time.Since(start)) / float64(n)}, float64(n), nil
	})
}

// loads returns a measurement of ns per load of random words of n. Each load needs the result of the one before it.
func loads(n uint64) func(context.Context, time.Duration) (Sample, error) {
	words := make([]uint64, n)
	for i := range words {
		words[i] = 1 // pages that were never written would all be one
	}
	return func(_ context.Context, d time.Duration) (Sample, error) {
		return working("look-up", func() (Sample, float64, error) {
			x := uint64(1)
			count, start := 0, time.Now()
			for time.Since(start) < d {
				for range 1 << 16 {
					x = x*multiplier + increment
					x += words[(x>>32)*n>>32] >> 1
				}
				count += 1 << 16
			}
			if x == 0 {
				return Sample{}, 0, errors.New("the sequence ended") // keeps the loads
			}
			return Sample{Value: float64(time.Since(start)) / float64(count)}, float64(count), nil
		})
	}
}

// coldTranslation returns the row of look-ups all over a region of n pages, each of which needs the result of the one
// before it. The anchor is a load from memory of the size of the table, a word for each page.
func coldTranslation(n uint64) func(context.Context, *Bench) (Meter, error) {
	return func(_ context.Context, b *Bench) (m Meter, err error) {
		r, err := b.resolver(n, true)
		if err != nil {
			return m, err
		}
		m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
			overlapped, err := r.lookUp(ctx, d/2, n, false)
			if err != nil {
				return Sample{}, err
			}
			s, err := r.lookUp(ctx, d/2, n, true)
			s.Extra = map[string]float64{"overlapped": overlapped.Value}
			return s, err
		}
		m.Anchor = loads(n)
		return m, nil
	}
}

// translation returns the row for a region of n pages; the anchor is a region of one.
func translation(n uint64, large bool) func(context.Context, *Bench) (Meter, error) {
	return func(_ context.Context, b *Bench) (m Meter, err error) {
		many, err := b.resolver(n, large)
		if err != nil {
			return m, err
		}
		one, err := b.resolver(1, large)
		if err != nil {
			return m, err
		}
		return Meter{Ours: many.run, Anchor: one.run}, nil
	}
}
