package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/lab"
)

// storm is a set of QPs whose WRITEs of 8 bytes meet absent pages at the same time. Each QP has a page of one on-demand
// region, with a page between it and the next QP's, so that each meets a fault of its own.
type storm struct {
	host  *lab.Host
	ends  []*end
	wrs   []*guestdrv.SendWR
	mr    *guestdrv.OnDemandMR
	pages *guestdrv.Buffer
	wave  uint64 // number of the last one, which its WRITEs carry
}

func stormPage(i int) int { return 2 * i * pageSize }

// newStorm connects x with y, where the pages are absent, by n QPs.
func newStorm(h *lab.Host, x, y *node, n int) (*storm, error) {
	s := &storm{host: h}
	var err error
	if s.pages, err = y.Alloc(stormPage(n)); err != nil {
		return nil, err
	}
	if s.mr, err = y.pd.RegisterOnDemand(context.Background(), onDemand, uint64(stormPage(n)), allAccess,
		guestdrv.PagerFunc(func(ctx context.Context, f guestdrv.PageFault, pas []uint64) error {
			for i := range pas {
				pas[i] = s.pages.PA() + f.VA - onDemand + uint64(i*pageSize)
			}
			return ctx.Err()
		})); err != nil {
		return nil, err
	}
	for i := range n {
		e, _, err := connectAs(x, y, 16, false)
		if err != nil {
			return nil, err
		}
		wr := guestdrv.NewWrite(0, s.mr.Remote(stormPage(i))).With(guestdrv.SendSignaled)
		wr.Inline = make([]byte, 8)
		s.ends, s.wrs = append(s.ends, e), append(s.wrs, wr)
	}
	return s, nil
}

// blow lets the first n QPs write once and waits for them with the function. With fault their pages are absent. It
// compares what has arrived.
func (s *storm) blow(n int, fault bool, wait func(*end) error) error {
	s.wave++
	if fault {
		if err := s.mr.Invalidate(context.Background(), s.mr.Addr(), s.mr.Len()); err != nil {
			return err
		}
	}
	for i, e := range s.ends[:n] {
		binary.LittleEndian.PutUint64(s.wrs[i].Inline, s.wave)
		if err := e.qp.PostSend(s.wrs[i]); err != nil {
			return err
		}
	}
	for i, e := range s.ends[:n] {
		if err := wait(e); err != nil {
			return err
		}
		if got := s.pages.Load64(stormPage(i)); got != s.wave {
			return fmt.Errorf("QP %d wrote %d, its page has %d", i, s.wave, got)
		}
	}
	return nil
}

// keepBlowing lets all QPs write again and again, in a goroutine of its own, which leaves the processors to others
// while it waits. stop ends it and returns the number of waves.
func (s *storm) keepBlowing(ctx context.Context, fault bool) (stop func() (waves int, err error)) {
	var stopped atomic.Bool
	var blowing sync.WaitGroup
	var err error
	waves := 0
	blowing.Go(func() {
		for err == nil && !stopped.Load() {
			err = s.blow(len(s.ends), fault, func(e *end) error {
				for {
					n, err := e.poll()
					if n > 0 || err != nil || ctx.Err() != nil {
						return err
					}
					time.Sleep(time.Millisecond)
				}
			})
			waves++
			time.Sleep(time.Millisecond)
		}
	})
	return func() (int, error) {
		stopped.Store(true)
		blowing.Wait()
		return waves, err
	}
}

const stormQPs = 64

// faultStorm measures the rate of guest faults of 64 QPs. The anchor is one QP.
func faultStorm(ctx context.Context, b *Bench) (m Meter, err error) {
	h, nodes, err := b.local(ctx, 2, 64<<20)
	if err != nil {
		return m, err
	}
	s, err := newStorm(h, nodes[0], nodes[1], stormQPs)
	if err != nil {
		return m, err
	}
	sample := func(n int, who string) func(context.Context, time.Duration) (Sample, error) {
		return func(ctx context.Context, d time.Duration) (Sample, error) {
			return working("fault", func() (Sample, float64, error) {
				writes, start := 0, time.Now()
				var took time.Duration
				f, err := served(ctx, h, func() error {
					for start = time.Now(); took < d; took = time.Since(start) {
						if err := s.blow(n, true, func(e *end) error { return e.spinIdly(ctx, 1) }); err != nil {
							return err
						}
						writes += n
					}
					return nil
				})
				if err == nil {
					err = faultedEach(f.n, writes)
				}
				if err != nil {
					return Sample{}, 0, err
				}
				return Sample{Value: float64(f.n) / took.Seconds(),
					Extra: map[string]float64{who + "raise to resume, mean, us": f.mean()}}, float64(f.n), nil
			})
		}
	}
	return Meter{Ours: sample(stormQPs, ""), Anchor: sample(1, "anchor, ")}, nil
}

// faultedEach compares the faults that the device counted with the WRITEs that should have met one each.
func faultedEach(faults uint64, writes int) error {
	if faults < uint64(writes) {
		return fmt.Errorf("%d WRITEs to absent pages met %d faults", writes, faults)
	}
	return nil
}

// besideStorm measures the latency between two other VMs while a storm blows. The anchor is the same WRITEs with their
// pages present: on two cores the storm's driver takes time from the others, too.
func besideStorm(ctx context.Context, b *Bench) (m Meter, err error) {
	h, nodes, err := b.local(ctx, 4, 64<<20)
	if err != nil {
		return m, err
	}
	s, err := newStorm(h, nodes[0], nodes[1], stormQPs)
	if err != nil {
		return m, err
	}
	w, err := newWriters(nodes[2], nodes[3], false)
	if err != nil {
		return m, err
	}
	p := newBouncer(w[0], w[1], false)
	sample := func(fault bool, who string) func(context.Context, time.Duration) (Sample, error) {
		return func(ctx context.Context, d time.Duration) (Sample, error) {
			stop := s.keepBlowing(ctx, fault)
			t, w, err := p.sample(ctx, d)
			waves, stormErr := stop()
			if err == nil {
				err = stormErr
			}
			if err != nil {
				return Sample{}, err
			}
			extra := t.percentiles(who)
			extra[who+"WRITEs beside/s"] = float64(waves*len(s.ends)) / d.Seconds()
			return Sample{Value: t.at(0.5), Extra: extra, Work: w}, nil
		}
	}
	return Meter{Ours: sample(true, ""), Anchor: sample(false, "anchor, "), Turns: 4}, nil
}
