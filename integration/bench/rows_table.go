package main

import (
	"context"
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
func (r *resolver) run(_ context.Context, d time.Duration) (Sample, error) {
	set := min(r.n, inSet)
	stride := r.n / set
	return working("look-up", func() (Sample, float64, error) {
		x := uint64(1)
		n, start := 0, time.Now()
		for time.Since(start) < d {
			for range 1 << 16 {
				x = x*6364136223846793005 + 1442695040888963407
				p := (x >> 32) * set >> 32 * stride
				if _, m := r.vm.Resolve(r.key, 1, firstVA+translate.VA(p<<translate.PageShift)+64, 64,
					translate.RemoteWrite); !m.OK() {
					return Sample{}, 0, m.Err()
				}
			}
			n += 1 << 16
		}
		return Sample{Value: float64(time.Since(start)) / float64(n)}, float64(n), nil
	})
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
