package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/lab"
)

// Rows about many VMs, or many objects of one.

// amongIdle measures the latency between two VMs of a daemon with that many VMs, of which the others are attached and
// idle. The anchor is a daemon with 8. Beside it stands the processor share of the daemon while all are idle.
func amongIdle(vms int) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		open := func(vms int, who string) (func(context.Context, time.Duration) (Sample, error), error) {
			h, nodes, err := b.local(ctx, vms, 4<<20)
			if err != nil {
				return nil, err
			}
			// Each VM has a connected QP, whose loop knows it.
			for i := 2; i+1 < vms; i += 2 {
				if _, _, err := connectAs(nodes[i], nodes[i+1], 16, false); err != nil {
					return nil, err
				}
			}
			x, y, err := connect(nodes[0], nodes[1])
			if err != nil {
				return nil, err
			}
			bounce, err := pingPong(nodes, x, y, nil)
			if err != nil {
				return nil, err
			}
			share := shareOf(h.Proc)
			return func(ctx context.Context, d time.Duration) (Sample, error) {
				asleep, err := share(ctx, d/2)
				if err != nil {
					return Sample{}, err
				}
				s, err := bounce(ctx, d)
				if err != nil {
					return s, err
				}
				s.Extra = map[string]float64{who + "p99": s.Extra["p99"], who + "p99.9": s.Extra["p99.9"],
					who + "idle, % of a core": asleep.Value}
				return s, nil
			}, nil
		}
		if m.Ours, err = open(vms, ""); err == nil {
			m.Anchor, err = open(8, "anchor, ")
		}
		return m, err
	}
}

// amongQPs measures the latency of one connection while the daemon's VMs have that many idle QPs. The anchor is the
// same in a daemon without them. Beside it stand the daemon's private memory per idle QP and its collections of
// garbage.
func amongQPs(qps int) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		const vms, queue = 50, 16 // a VM has at most 2,048 QPs
		open := func(qps int, who string) (func(context.Context, time.Duration) (Sample, error), error) {
			h, err := b.host()
			if err != nil {
				return nil, err
			}
			if err := b.daemon(ctx, h, 0, 2+vms, b.monitored(h)); err != nil {
				return nil, err
			}
			nodes, err := b.attach(h, 0, 2+vms, 256<<20)
			if err != nil {
				return nil, err
			}
			before, err := privateMemory(h.Proc)
			if err != nil {
				return nil, err
			}
			if err := idlePairs(nodes[2:], qps/2, queue); err != nil {
				return nil, err
			}
			after, err := privateMemory(h.Proc)
			if err != nil {
				return nil, err
			}
			x, y, err := connect(nodes[0], nodes[1])
			if err != nil {
				return nil, err
			}
			bounce, err := pingPong(nodes, x, y, nil)
			if err != nil {
				return nil, err
			}
			return func(ctx context.Context, d time.Duration) (Sample, error) {
				had, err := collections(ctx, h)
				if err != nil {
					return Sample{}, err
				}
				s, err := bounce(ctx, d)
				if err != nil {
					return s, err
				}
				has, err := collections(ctx, h)
				s.Extra = map[string]float64{who + "p99": s.Extra["p99"], who + "p99.9": s.Extra["p99.9"],
					who + "max": s.Extra["max"], who + "collections": has - had}
				if qps > 0 {
					s.Extra["KiB per QP"] = (after - before) / float64(qps) / 1024
				}
				return s, err
			}, nil
		}
		if m.Ours, err = open(qps, ""); err == nil {
			m.Anchor, err = open(0, "anchor, ")
		}
		return m, err
	}
}

// idlePairs connects n pairs of QPs, spread over the nodes, each of which has one CQ for all of its QPs.
func idlePairs(nodes []*node, n, queue int) error {
	cqs := make([]*guestdrv.CQ, len(nodes))
	for i, nd := range nodes {
		var err error
		if cqs[i], err = nd.CreateCQ(context.Background(), queue, guestdrv.CQOptions{}); err != nil {
			return err
		}
	}
	create := func(i int) (*guestdrv.QP, error) {
		return nodes[i].pd.CreateQP(context.Background(), guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: cqs[i],
			RecvCQ: cqs[i], MaxSendWR: queue, MaxRecvWR: queue})
	}
	for k := range n {
		i := k % len(nodes)
		j := (i + 1) % len(nodes)
		x, err := create(i)
		if err != nil {
			return err
		}
		y, err := create(j)
		if err != nil {
			return err
		}
		o := guestdrv.ConnectOptions{Access: guestdrv.AccessRemoteWrite}
		if err := errors.Join(
			x.Connect(context.Background(), guestdrv.Peer{QPN: y.Number(), Path: nodes[j].path}, o),
			y.Connect(context.Background(), guestdrv.Peer{QPN: x.Number(), Path: nodes[i].path}, o)); err != nil {
			return err
		}
	}
	return nil
}

// startMany measures the time from starting a daemon with that many VMs until a driver of each has its device. Beside
// it stands the same after the daemon was killed: until all have a device again. The anchor is one VM.
func startMany(vms int) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		open := func(vms int, who string) (func(context.Context, time.Duration) (Sample, error), error) {
			h, err := b.host()
			if err != nil {
				return nil, err
			}
			if err := b.daemon(ctx, h, 0, vms, ""); err != nil {
				return nil, err
			}
			if err := b.stop(ctx, h); err != nil {
				return nil, err
			}
			return func(ctx context.Context, _ time.Duration) (Sample, error) {
				s, err := working("start", func() (Sample, float64, error) {
					cold, err := startAll(ctx, h, vms, true)
					if err != nil {
						return Sample{}, 0, err
					}
					again, err := startAll(ctx, h, vms, false)
					return Sample{Value: ms(cold), Extra: map[string]float64{who + "after a kill": ms(again)}}, 2, err
				})
				return s, err
			}, nil
		}
		if m.Ours, err = open(vms, ""); err == nil {
			m.Anchor, err = open(1, "anchor, ")
		}
		return m, err
	}
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

// startAll starts the daemon and connects a driver to each VM, all at once. It returns the time until all have their
// device. Then it kills the daemon, or stops it in good order.
func startAll(ctx context.Context, h *lab.Host, vms int, kill bool) (took time.Duration, err error) {
	start := time.Now()
	p, err := h.Launch()
	if err != nil {
		return 0, err
	}
	defer p.Kill()
	var opening sync.WaitGroup
	errs := make([]error, vms)
	devices := make([]*guestdrv.Device, vms)
	for i := range vms {
		opening.Go(func() {
			if errs[i] = awaitSocket(ctx, p, hcaSocket(h, i)); errs[i] == nil {
				devices[i], errs[i] = guestdrv.Open(ctx, hcaSocket(h, i), guestdrv.Config{Memory: 4 << 20})
			}
		})
	}
	opening.Wait()
	took = time.Since(start)
	err = errors.Join(errs...)
	if kill {
		p.Kill()
	}
	for _, d := range devices {
		if d != nil {
			err = errors.Join(err, d.Close())
		}
	}
	if !kill {
		err = errors.Join(err, p.Stop(ctx))
	}
	return took, err
}
