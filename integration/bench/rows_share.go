package main

import (
	"context"
	"runtime"
	"slices"
	"time"

	"github.com/vnicd/vnicd/device/abi"
	"github.com/vnicd/vnicd/guestdrv"
)

// demand is a stream of WRITEs that its owner keeps going by calling feed, so that one
// thread can serve many.
type demand struct {
	*end
	wr      guestdrv.SendWR
	slots   int // buffers of each side, used in turn
	window  int // requests under way
	posted  int
	done    int
	src     *guestdrv.MR
	dst     *guestdrv.MR
	message int
}

// newDemand connects x with y for messages of that size, in memory bytes on both sides.
func newDemand(x, y *node, message, memory, window int) (*demand, error) {
	e, _, err := connect(x, y)
	if err != nil {
		return nil, err
	}
	d := &demand{end: e, message: message, window: window, slots: memory / message}
	if _, d.src, err = x.region(memory); err != nil {
		return nil, err
	}
	if _, d.dst, err = y.region(memory); err != nil {
		return nil, err
	}
	d.wr = guestdrv.SendWR{Opcode: abi.WRRDMAWrite, Flags: abi.SendSignaled, SGL: make([]abi.SGE, 1), RKey: d.dst.RKey()}
	return d, nil
}

// feed takes completions and posts as many requests again.
func (d *demand) feed() error {
	n, err := d.poll()
	d.done += n
	before := d.posted
	for ; err == nil && d.posted-d.done < d.window; d.posted++ {
		at := d.posted % d.slots * d.message
		d.wr.SGL[0], d.wr.RemoteAddr = d.src.SGE(at, d.message), d.dst.Addr()+uint64(at)
		err = d.qp.QueueSend(&d.wr)
	}
	if d.posted > before {
		d.qp.Ring()
	}
	return err
}

// drain waits for what is under way.
func (d *demand) drain(ctx context.Context) error {
	err := d.spin(ctx, d.posted-d.done)
	d.done = d.posted
	return err
}

// feedAll feeds all of them for a time, and returns how many requests of each were served.
func feedAll(ctx context.Context, all []*demand, d time.Duration, beside func() error) ([]float64, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	served := make([]float64, len(all))
	for i, x := range all {
		served[i] = -float64(x.done)
	}
	for stop := time.Now().Add(d); time.Now().Before(stop); {
		for _, x := range all {
			if err := x.feed(); err != nil {
				return nil, err
			}
		}
		if err := beside(); err != nil {
			return nil, err
		}
	}
	for i, x := range all {
		served[i] += float64(x.done)
		if err := x.drain(ctx); err != nil {
			return nil, err
		}
	}
	return served, nil
}

func nothing() error { return nil }

// busyLatency is the latency between two VMs while two others keep the same engine busy
// with messages of that size in memory bytes on either side.
func busyLatency(message, memory int) func(context.Context, *Bench) (Meter, error) {
	return func(ctx context.Context, b *Bench) (m Meter, err error) {
		_, nodes, err := b.local(ctx, 4, uint64(memory)+16<<20)
		if err != nil {
			return m, err
		}
		x, y, err := connect(nodes[0], nodes[1])
		if err != nil {
			return m, err
		}
		load, err := newDemand(nodes[2], nodes[3], message, memory, 8)
		if err != nil {
			return m, err
		}
		busy, err := pingPong(nodes, x, y, load.feed)
		if err != nil {
			return m, err
		}
		quiet, err := pingPong(nodes, x, y, nothing)
		if err != nil {
			return m, err
		}
		m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
			before, start := load.done, time.Now()
			s, err := busy(ctx, d)
			if err != nil {
				return s, err
			}
			s.Extra["load, GB/s"] = float64(load.done-before) * float64(message) / giga / time.Since(start).Seconds()
			return s, load.drain(ctx)
		}
		m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
			s, err := quiet(ctx, d)
			return Sample{Value: s.Value, Extra: map[string]float64{"anchor, p99.9": s.Extra["p99.9"]}}, err
		}
		return m, nil
	}
}

// fairShares has 8 VMs ask for more than an eighth of the engine each, with 1, 1, 2, 2, 4,
// 4, 8 and 8 QPs.
func fairShares(ctx context.Context, b *Bench) (m Meter, err error) {
	const vms, message, memory = 8, 16 << 10, 1 << 20
	_, nodes, err := b.local(ctx, vms+1, 64<<20)
	if err != nil {
		return m, err
	}
	var all []*demand
	var owner []int
	for i := range vms {
		for range 1 << (i / 2) {
			d, err := newDemand(nodes[i], nodes[vms], message, memory, 64)
			if err != nil {
				return m, err
			}
			all, owner = append(all, d), append(owner, i)
		}
	}
	m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
		served, err := feedAll(ctx, all, d, nothing)
		if err != nil {
			return Sample{}, err
		}
		shares, sum := make([]float64, vms), 0.0
		for i, n := range served {
			shares[owner[i]] += n
			sum += n
		}
		return Sample{Value: slices.Min(shares) / sum * vms, Extra: map[string]float64{
			"largest": slices.Max(shares) / sum * vms, "GB/s": sum * message / giga / d.Seconds(),
		}}, nil
	}
	return m, nil
}

// flooded is the rate of one VM beside another that rings doorbells without end, of a QP
// that has nothing to do and of one in the error state, to which it posts as fast
// as its completions are taken.
func flooded(ctx context.Context, b *Bench) (m Meter, err error) {
	const message, memory, window = 64 << 10, 4 << 20, 32
	_, nodes, err := b.local(ctx, 3, 32<<20)
	if err != nil {
		return m, err
	}
	honest, err := newDemand(nodes[0], nodes[2], message, memory, window)
	if err != nil {
		return m, err
	}
	equal, err := newDemand(nodes[1], nodes[2], message, memory, window)
	if err != nil {
		return m, err
	}
	idle, _, err := connect(nodes[1], nodes[2])
	if err != nil {
		return m, err
	}
	dead, _, err := connect(nodes[1], nodes[2])
	if err != nil {
		return m, err
	}
	bad := guestdrv.SendWR{Opcode: abi.WRRDMAWrite, Flags: abi.SendSignaled | abi.SendInline, Inline: make([]byte, 8), RKey: 0xbad}
	flushed := 0
	flood := func() error {
		for range 64 {
			idle.qp.Ring()
		}
		flushed += dead.cq.Poll(dead.wcs[:])
		for range len(dead.wcs) {
			if dead.qp.QueueSend(&bad) != nil {
				break // full
			}
		}
		dead.qp.Ring()
		return nil
	}
	m.Turns = 10
	m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
		before := flushed
		served, err := feedAll(ctx, []*demand{honest}, d, flood)
		if err != nil {
			return Sample{}, err
		}
		return Sample{Value: served[0] * message / giga / d.Seconds(), Extra: map[string]float64{"flushed/s": float64(flushed-before) / d.Seconds()}}, nil
	}
	m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
		served, err := feedAll(ctx, []*demand{honest, equal}, d, nothing)
		if err != nil {
			return Sample{}, err
		}
		return Sample{Value: served[0] * message / giga / d.Seconds()}, nil
	}
	return m, nil
}
