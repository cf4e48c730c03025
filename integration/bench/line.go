package main

import (
	"context"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// On a virtual machine, and on any with several caches of the last level, two threads may run on cores that share such
// a cache or on cores that do not. A cache line then takes 110 or 540 ns to the other core and back (AMD EPYC, two
// processors of a virtual machine that its host moves), and rows in which driver and engine exchange many lines have
// two modes. These rows measure that time before and after each sample and show their figure for either state.

// far is the time of a line from which cores count as far from each other.
const far = 250 * time.Nanosecond

// What byDistance adds to a sample.
const (
	lineFigure = "cache line, ns"
	coresNear  = "cores near"
	coresFar   = "cores far"
)

// cacheLine is alone in its cache line, and in the one that is prefetched with it.
type cacheLine struct {
	_ [128]byte
	v atomic.Uint32
	_ [128]byte
}

// lineTime returns the time of a cache line to another thread's core and back: the least of several means, so that
// other load does not count. It returns 0 if there is one processor only, or so much load that none was found.
func lineTime() time.Duration {
	const batch, batches, patience = 200, 20, 100 * time.Millisecond
	if runtime.NumCPU() < 2 {
		return 0
	}
	var there, back cacheLine
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for last := uint32(0); !stop.Load(); {
			if v := there.v.Load(); v != last {
				last = v
				back.v.Store(v)
			}
		}
	})
	best := time.Duration(math.MaxInt64)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	n := uint32(0)
	deadline := time.Now().Add(patience)
	for range batches {
		start := time.Now()
		for range batch {
			n++
			there.v.Store(n)
			for spins := 0; back.v.Load() != n; spins++ {
				if spins%1024 == 1023 && time.Now().After(deadline) {
					break
				}
			}
		}
		end := time.Now()
		if end.After(deadline) {
			break
		}
		best = min(best, end.Sub(start)/batch)
	}
	stop.Store(true)
	wg.Wait()
	if best == math.MaxInt64 {
		return 0
	}
	return best
}

// byDistance adds to a sample the time of a cache line and, if the cores were near or far before and after it, the
// figure under that name.
func byDistance(f func(context.Context, time.Duration) (Sample, error)) func(context.Context, time.Duration) (Sample,
	error) {
	return func(ctx context.Context, d time.Duration) (Sample, error) {
		before := lineTime()
		s, err := f(ctx, d)
		if err == nil {
			addDistance(&s, before, lineTime())
		}
		return s, err
	}
}

func addDistance(s *Sample, before, after time.Duration) {
	if before == 0 || after == 0 {
		return
	}
	if s.Extra == nil {
		s.Extra = map[string]float64{}
	}
	s.Extra[lineFigure] = float64(before+after) / 2
	switch {
	case before < far && after < far:
		s.Extra[coresNear] = s.Value
	case before >= far && after >= far:
		s.Extra[coresFar] = s.Value
	}
}
