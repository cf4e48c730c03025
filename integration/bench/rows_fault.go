package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/rdma/hca"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/lab"
)

const (
	pageSize = 4096
	onDemand = 1 << 40 // VA of on-demand regions
)

// onePage registers an on-demand region of one page; wait delays its pager.
func (n *node) onePage(wait func(context.Context)) (*guestdrv.OnDemandMR, error) {
	frame, err := n.Alloc(pageSize)
	if err != nil {
		return nil, err
	}
	return n.pd.RegisterOnDemand(context.Background(), onDemand, pageSize, allAccess,
		guestdrv.PagerFunc(func(ctx context.Context, _ guestdrv.PageFault, pas []uint64) error {
			if wait != nil {
				wait(ctx)
			}
			pas[0] = frame.PA()
			return ctx.Err()
		}))
}

// guestFault measures a WRITE of 8 bytes that meets an absent page, which is the responder's if far, from post to
// completion. The anchor is a WRITE whose page is present. Each time is kept, so quantiles are exact. The part from
// raise to resume, which the device measures, is shown as a mean: the device keeps a sum and a coarse histogram.
func guestFault(far bool) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		h, nodes, err := b.local(ctx, 2, 16<<20)
		if err != nil {
			return m, err
		}
		x, _, err := connect(nodes[0], nodes[1])
		if err != nil {
			return m, err
		}
		absent, present := nodes[0], nodes[1]
		if far {
			absent, present = present, absent
		}
		mr, err := absent.onePage(nil)
		if err != nil {
			return m, err
		}
		_, other, err := present.region(pageSize)
		if err != nil {
			return m, err
		}
		wr := guestdrv.NewWrite(0, other.Remote(0), mr.SGE(0, 8)).With(guestdrv.SendSignaled)
		if far {
			wr.SGL[0], wr.Remote = other.SGE(0, 8), mr.Remote(0)
		}
		took := make([]float64, 0, 1<<20)
		sample := func(fault bool) func(context.Context, time.Duration) (Sample, error) {
			return func(ctx context.Context, d time.Duration) (Sample, error) {
				took = took[:0]
				writes := func() error {
					stop := time.Now().Add(d)
					for len(took) == 0 || len(took) < cap(took) && time.Now().Before(stop) {
						if fault {
							if err := mr.Invalidate(context.Background(), mr.Addr(), pageSize); err != nil {
								return err
							}
						}
						start := time.Now()
						if err := x.qp.PostSend(wr); err != nil {
							return err
						}
						if err := x.spinIdly(ctx, 1); err != nil {
							return err
						}
						took = append(took, float64(time.Since(start))/1e3)
					}
					slices.Sort(took)
					return nil
				}
				if !fault {
					return working("WRITE", func() (Sample, float64, error) {
						if err := writes(); err != nil {
							return Sample{}, 0, err
						}
						return Sample{Value: median(took)}, float64(len(took)), nil
					})
				}
				return working("WRITE", func() (Sample, float64, error) {
					f, err := served(ctx, h, writes)
					if err != nil {
						return Sample{}, 0, err
					}
					if f.n < uint64(len(took)) {
						return Sample{}, 0, fmt.Errorf("%d faults during %d WRITEs to absent pages", f.n, len(took))
					}
					return Sample{Value: quantile(took, 0.5), Extra: map[string]float64{
						"p90": quantile(took, 0.9), "p99": quantile(took, 0.99), "p99.9": quantile(took, 0.999),
						"raise to resume, mean": f.mean(),
					}}, float64(len(took)), nil
				})
			}
		}
		return Meter{Ours: sample(true), Anchor: sample(false)}, nil
	}
}

// registration measures the time to register an on-demand region of 1 GiB; the anchor is one page.
func registration(ctx context.Context, b *Bench) (m Meter, err error) {
	_, nodes, err := b.local(ctx, 1, 16<<20)
	if err != nil {
		return m, err
	}
	never := guestdrv.PagerFunc(func(ctx context.Context, _ guestdrv.PageFault, _ []uint64) error {
		return context.Canceled
	})
	sample := func(size uint64) func(context.Context, time.Duration) (Sample, error) {
		return func(_ context.Context, d time.Duration) (Sample, error) {
			return working("region", func() (Sample, float64, error) {
				var took []float64
				for stop := time.Now().Add(d); len(took) == 0 || time.Now().Before(stop); {
					start := time.Now()
					mr, err := nodes[0].pd.RegisterOnDemand(context.Background(), onDemand, size, allAccess, never)
					if err != nil {
						return Sample{}, 0, err
					}
					took = append(took, float64(time.Since(start))/1e3)
					if err := mr.Close(); err != nil {
						return Sample{}, 0, err
					}
				}
				return Sample{Value: median(took)}, float64(len(took)), nil
			})
		}
	}
	return Meter{Ours: sample(1 << 30), Anchor: sample(pageSize)}, nil
}

// neighbours measures the rate of one QP's WRITEs of 4 KiB while another QP faults all the time: its page is evicted
// after each use, and its pager takes a millisecond or never answers. The anchor is the rate while that QP keeps its
// page and posts once a millisecond: on two cores its driver also takes time from ours. Shown beside the rates is the
// processor time that the faults cost daemon and driver, without the two threads that the measured QP needs, its own
// and the engine. On few cores the QP can lose that time.
func neighbours(sameVM, answered bool) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		h, nodes, err := b.local(ctx, 4, 16<<20)
		if err != nil {
			return m, err
		}
		faulty, _, err := connect(nodes[0], nodes[1])
		if err != nil {
			return m, err
		}
		// gate blocks the pager until it is closed.
		var gate atomic.Pointer[chan struct{}]
		mr, err := nodes[1].onePage(func(ctx context.Context) {
			var patience <-chan time.Time
			if answered {
				patience = time.After(time.Millisecond)
			}
			select {
			case <-*gate.Load():
			case <-patience:
			case <-ctx.Done():
			}
		})
		if err != nil {
			return m, err
		}
		_, src, err := nodes[0].region(pageSize)
		if err != nil {
			return m, err
		}
		wr := guestdrv.NewWrite(0, mr.Remote(0), src.SGE(0, 8)).With(guestdrv.SendSignaled)
		from, to := nodes[0], nodes[1]
		if !sameVM {
			from, to = nodes[2], nodes[3]
		}
		x, _, err := connect(from, to)
		if err != nil {
			return m, err
		}
		sent, smr, err := from.region(pageSize)
		if err != nil {
			return m, err
		}
		received, dmr, err := to.region(pageSize)
		if err != nil {
			return m, err
		}
		proof := proofOf(piece{sent.Bytes(), received.Bytes()})
		write := guestdrv.NewWrite(0, dmr.Remote(0), smr.SGE(0, pageSize))
		beside := func(fault bool) func(context.Context, time.Duration) (Sample, error) {
			return func(ctx context.Context, d time.Duration) (Sample, error) {
				proof.prepare()
				g := make(chan struct{})
				if !fault {
					close(g) // pages evicted by the last measurement come in at once
				}
				gate.Store(&g)
				before := mr.Stats().Faults
				var wg sync.WaitGroup
				var stop atomic.Bool
				var ferr error
				wg.Go(func() {
					for !stop.Load() && ferr == nil {
						if fault {
							ferr = mr.Invalidate(context.Background(), mr.Addr(), pageSize)
						}
						if ferr == nil {
							ferr = faulty.qp.PostSend(wr)
						}
						for n := 0; n == 0 && ferr == nil; {
							time.Sleep(time.Millisecond) // no spinning: two cores are few
							n, ferr = faulty.poll()
						}
					}
				})
				var spent time.Duration
				s, err := working("message", func() (Sample, float64, error) {
					rate, others, err := apart(h.Proc.PID(),
						func() (float64, error) { return x.stream(ctx, d, 16, 1, write, nil) })
					spent = others
					return Sample{Value: rate}, rate * d.Seconds(), err
				})
				faults := float64(mr.Stats().Faults - before)
				stop.Store(true)
				if fault {
					close(g)
				}
				wg.Wait()
				if err == nil {
					err = errors.Join(ferr, proof.verify(x.streamed))
				}
				s.Extra = map[string]float64{}
				if fault {
					s.Extra["faults/s"] = faults / d.Seconds()
					s.Extra["beside, % of a core"] = 100 * spent.Seconds() / d.Seconds()
				} else {
					s.Extra["anchor, beside, % of a core"] = 100 * spent.Seconds() / d.Seconds()
				}
				return s, err
			}
		}
		return Meter{Ours: beside(true), Anchor: beside(false), Turns: 20}, nil
	}
}

// apart runs f on a separate thread and returns the time that the other threads of this process and of the daemon ran
// meanwhile, except the daemon's busiest thread, its engine.
func apart(daemon int, f func() (float64, error)) (rate float64, spent time.Duration, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, after [2]map[int]time.Duration
	look := func(to *[2]map[int]time.Duration) {
		for i, pid := range []int{os.Getpid(), daemon} {
			if err == nil {
				to[i], err = threadTimes(pid)
			}
		}
	}
	if look(&before); err != nil {
		return 0, 0, err
	}
	if rate, err = f(); err != nil {
		return 0, 0, err
	}
	look(&after)
	engine := time.Duration(0)
	for i := range after {
		for tid, t := range after[i] {
			t -= before[i][tid]
			switch {
			case i == 0 && tid == unix.Gettid():
				continue
			case i == 1:
				engine = max(engine, t)
			}
			spent += t
		}
	}
	return rate, spent - engine, err
}

// quantile returns the smallest of the sorted times that a part q of them does not exceed.
func quantile(sorted []float64, q float64) float64 {
	return sorted[max(int(math.Ceil(q*float64(len(sorted))))-1, 0)]
}

// faults counts guest faults that the VMs' drivers answered, with their times from raise to resume as the device
// measures them.
type faults struct {
	n   uint64
	sum time.Duration
}

// mean returns the mean in us.
func (f *faults) mean() float64 { return float64(f.sum.Nanoseconds()) / float64(f.n) / 1e3 }

// served runs f and returns the guest faults answered meanwhile, at least one.
func served(ctx context.Context, h *lab.Host, f func() error) (now faults, err error) {
	before, err := guestFaults(ctx, h)
	if err != nil {
		return now, err
	}
	if err := f(); err != nil {
		return now, err
	}
	if now, err = guestFaults(ctx, h); err != nil {
		return now, err
	}
	now.n, now.sum = now.n-before.n, now.sum-before.sum
	if now.n == 0 {
		return now, errors.New("no page fault occurred")
	}
	return now, nil
}

// guestFaults returns the faults of all VMs so far.
func guestFaults(ctx context.Context, h *lab.Host) (f faults, err error) {
	out, err := h.CLI(ctx, "status", "-j")
	if err != nil {
		return f, err
	}
	var s struct {
		VMs []struct{ HCA hca.Status }
	}
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		return f, err
	}
	for i := range s.VMs {
		q := &s.VMs[i].HCA.Faults.Guest
		f.sum += q.Sum
		for _, n := range q.Buckets {
			f.n += n
		}
	}
	return f, nil
}
