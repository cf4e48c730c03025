package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/lab"
	"github.com/vnicd/vnicd/lab/harness"
)

// idle measures a daemon with 8 attached VMs, each connected to the next, all idle; the anchor is a daemon without
// attached VMs.
func idle(ctx context.Context, b *Bench) (m Meter, err error) {
	full, nodes, err := b.local(ctx, 8, 16<<20)
	if err != nil {
		return m, err
	}
	for i := range nodes {
		x, _, err := connect(nodes[i], nodes[(i+1)%len(nodes)])
		if err != nil {
			return m, err
		}
		_, mr, err := nodes[i].region(4096)
		if err != nil {
			return m, err
		}
		// Give the engines some work first.
		if err := x.qp.PostSend(guestdrv.NewWrite(0, guestdrv.Remote{RKey: mr.RKey()},
			mr.SGE(0, 0)).With(guestdrv.SendSignaled)); err != nil {
			return m, err
		}
		if err := x.spin(ctx, 1); err != nil {
			return m, err
		}
	}
	empty, err := b.host()
	if err != nil {
		return m, err
	}
	if err := b.daemon(ctx, empty, 0, 8, ""); err != nil {
		return m, err
	}
	return Meter{Ours: shareOf(full.Proc), Anchor: shareOf(empty.Proc)}, nil
}

// shareOf measures the processor share of a process in percent of a core.
func shareOf(p *harness.Process) func(context.Context, time.Duration) (Sample, error) {
	return func(ctx context.Context, d time.Duration) (Sample, error) {
		return working("s", func() (Sample, float64, error) {
			before, err := cpuTime(p)
			if err != nil {
				return Sample{}, 0, err
			}
			start := time.Now()
			select {
			case <-ctx.Done():
				return Sample{}, 0, ctx.Err()
			case <-time.After(2 * d):
			}
			after, err := cpuTime(p)
			took := time.Since(start)
			return Sample{Value: 100 * float64(after-before) / float64(took)}, took.Seconds(), err
		})
	}
}

// growth measures how much a new daemon's private memory grows per object, in KiB, when n objects are created. attached
// is the number of its 8 VMs that have drivers.
func growth(n, attached int, memory uint64, create func(b *Bench, h *lab.Host, nodes []*node,
	n int) error) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		m.Ours = func(ctx context.Context, _ time.Duration) (s Sample, err error) {
			// Each measurement starts a new daemon: memory that Go's collector freed stays resident and would hide
			// growth.
			h, err := b.host()
			if err != nil {
				return s, err
			}
			if err := b.daemon(ctx, h, 0, 8, ""); err != nil {
				return s, err
			}
			nodes, err := b.attach(h, 0, attached, memory)
			if err != nil {
				return s, err
			}
			defer func() {
				for _, n := range nodes {
					err = errors.Join(err, n.Close()) // and let its memory go
				}
			}()
			before, err := privateMemory(h.Proc)
			if err != nil {
				return s, err
			}
			if s, err = working("object", func() (Sample, float64, error) {
				return Sample{}, float64(n), create(b, h, nodes, n)
			}); err != nil {
				return s, err
			}
			after, err := privateMemory(h.Proc)
			if err != nil {
				return s, err
			}
			s.Value = (after - before) / float64(n) / 1024
			return s, b.stop(ctx, h)
		}
		return m, nil
	}
}

func makeVMs(b *Bench, h *lab.Host, nodes []*node, n int) error {
	_, err := b.attach(h, len(nodes), n, 16<<20)
	return err
}

func makeQPs(_ *Bench, _ *lab.Host, nodes []*node, n int) error {
	for range n {
		if _, _, err := connect(nodes[0], nodes[1]); err != nil {
			return err
		}
	}
	return nil
}

func makeMRs(_ *Bench, _ *lab.Host, nodes []*node, n int) error {
	buf, err := nodes[0].Alloc(1 << 20)
	if err != nil {
		return err
	}
	for range n {
		if _, err := nodes[0].pd.Register(context.Background(), buf, allAccess); err != nil {
			return err
		}
	}
	return nil
}

// makeEntries registers 4 GiB of memory that nobody has touched, by their pages.
func makeEntries(_ *Bench, _ *lab.Host, nodes []*node, _ int) error {
	_, _, err := nodes[0].region(millionEntries * pageSize)
	return err
}

const millionEntries = 1 << 20

// startUp measures the time from starting a daemon with 8 VMs until a driver has its device; the anchor is a process
// that prints its version.
func startUp(ctx context.Context, b *Bench) (m Meter, err error) {
	h, err := b.host()
	if err != nil {
		return m, err
	}
	if err := b.daemon(ctx, h, 0, 8, ""); err != nil {
		return m, err
	}
	if err := b.stop(ctx, h); err != nil {
		return m, err
	}
	m.Ours = func(ctx context.Context, _ time.Duration) (Sample, error) {
		begun, err := begin()
		if err != nil {
			return Sample{}, err
		}
		start := time.Now()
		p, err := h.Launch()
		if err != nil {
			return Sample{}, err
		}
		defer p.Kill()
		if err := awaitSocket(ctx, p, hcaSocket(h, 7)); err != nil {
			return Sample{}, err
		}
		d, err := guestdrv.Open(context.Background(), hcaSocket(h, 0), guestdrv.Config{Memory: 16 << 20})
		if err != nil {
			return Sample{}, err
		}
		s := Sample{Value: float64(time.Since(start)) / 1e6}
		s.Work, err = begun.end("start", 1)
		return s, errors.Join(err, d.Close(), p.Stop(ctx))
	}
	m.Anchor = func(ctx context.Context, _ time.Duration) (Sample, error) {
		return working("start", func() (Sample, float64, error) {
			start := time.Now()
			_, err := h.CLI(ctx, "--version")
			return Sample{Value: float64(time.Since(start)) / 1e6}, 1, err
		})
	}
	return m, nil
}

// awaitSocket waits until the process p accepts connections at path.
func awaitSocket(ctx context.Context, p *harness.Process, path string) error {
	for {
		c, err := net.Dial("unix", path)
		if err == nil {
			return c.Close()
		}
		select {
		case <-p.Done():
			return fmt.Errorf("vnicd exited: %s", p.LogTail())
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Microsecond):
		}
	}
}
