package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/guestdrv"
)

// pinnedRegistration measures the time to pin 1 GiB of resident memory (mlock) and to register all its pages, as
// ibv_reg_mr does without on-demand paging. The anchor is mlock alone: the native driver itself has nothing to pin. An
// RDMA WRITE to the last bytes of each region shows that it works.
func pinnedRegistration(ctx context.Context, b *Bench) (m Meter, err error) {
	const size = 1 << 30
	_, nodes, err := b.local(ctx, 1, size+32<<20)
	if err != nil {
		return m, err
	}
	n := nodes[0]
	x, _, err := connect(n, n)
	if err != nil {
		return m, err
	}
	buf, err := n.Alloc(size)
	if err != nil {
		return m, err
	}
	for at := 0; at < size; at += pageSize {
		buf.Bytes()[at] = 1 // makes the page resident
	}
	number := uint64(0)
	wr := guestdrv.NewWrite(0, guestdrv.Remote{}).With(guestdrv.SendSignaled)
	wr.Inline = make([]byte, 8)
	use := func(ctx context.Context, mr *guestdrv.MR) error {
		number++
		binary.LittleEndian.PutUint64(wr.Inline, number)
		wr.Remote = mr.Remote(size - 8)
		if err := x.qp.PostSend(wr); err != nil {
			return err
		}
		if err := x.spin(ctx, 1); err != nil {
			return err
		}
		if got := buf.Load64(size - 8); got != number {
			return fmt.Errorf("the region's last bytes are %#x, written was %#x", got, number)
		}
		return nil
	}
	pinned := func(f func() error) (time.Duration, error) {
		start := time.Now()
		if err := unix.Mlock(buf.Bytes()); err != nil {
			return 0, fmt.Errorf("mlock: %w", err)
		}
		err := f()
		took := time.Since(start)
		return took, errors.Join(err, unix.Munlock(buf.Bytes()))
	}
	sample := func(one func() (time.Duration, error)) func(context.Context, time.Duration) (Sample, error) {
		return func(_ context.Context, d time.Duration) (Sample, error) {
			return working("region", func() (Sample, float64, error) {
				var took latencies
				for stop := time.Now().Add(d); len(took) == 0 || time.Now().Before(stop); {
					t, err := one()
					if err != nil {
						return Sample{}, 0, err
					}
					took = append(took, float64(t)/1e3)
				}
				return Sample{Value: took.sorted().at(0.5)}, float64(len(took)), nil
			})
		}
	}
	m.Anchor = sample(func() (time.Duration, error) { return pinned(func() error { return nil }) })
	m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
		var alone latencies
		s, err := sample(func() (time.Duration, error) {
			var mr *guestdrv.MR
			took, err := pinned(func() (err error) {
				start := time.Now()
				mr, err = n.pd.Register(context.Background(), buf, allAccess)
				alone = append(alone, float64(time.Since(start))/1e3)
				return err
			})
			if err != nil {
				return 0, err
			}
			return took, errors.Join(use(ctx, mr), mr.Close())
		})(ctx, d)
		if err == nil {
			s.Extra = map[string]float64{"without mlock": alone.sorted().at(0.5)}
		}
		return s, err
	}
	return m, nil
}
