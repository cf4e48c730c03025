package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/lab"
)

// demand is a stream of WRITEs that advances when its owner calls feed, so that one thread can serve many streams.
type demand struct {
	*end
	wr      *guestdrv.SendWR
	slots   int // buffers of each side, used in turn
	window  int // outstanding requests
	posted  int
	done    int
	src     *guestdrv.MR
	dst     *guestdrv.MR
	message int
	proof   *proof // of both memories
}

// newDemand connects x with y for messages of that size, in memory bytes on both sides.
func newDemand(x, y *node, message, memory, window int) (*demand, error) {
	e, _, err := connect(x, y)
	if err != nil {
		return nil, err
	}
	from, src, err := x.region(memory)
	if err != nil {
		return nil, err
	}
	to, dst, err := y.region(memory)
	if err != nil {
		return nil, err
	}
	d := demandOf(e, src, dst, message, window)
	d.proof = proofOf(slots(from.Bytes(), to.Bytes(), message)...)
	return d, nil
}

// demandOf returns e's stream of messages from src to dst, scattered over both, which have equal size.
func demandOf(e *end, src, dst *guestdrv.MR, message, window int) *demand {
	return &demand{
		end: e, src: src, dst: dst, message: message, window: window, slots: int(src.Len()) / message,
		wr: guestdrv.NewWrite(0, dst.Remote(0), make([]guestdrv.SGE, 1)...).With(guestdrv.SendSignaled),
	}
}

// feed polls completions and posts as many requests.
func (d *demand) feed() error {
	n, err := d.poll()
	d.done += n
	before := d.posted
	for ; err == nil && d.posted-d.done < d.window; d.posted++ {
		at := d.posted % d.slots * d.message
		d.wr.SGL[0], d.wr.Remote = d.src.SGE(at, d.message), d.dst.Remote(at)
		err = d.qp.QueueSend(d.wr)
	}
	if d.posted > before {
		d.qp.Ring()
	}
	return err
}

// drain waits for outstanding requests.
func (d *demand) drain(ctx context.Context) error {
	err := d.spin(ctx, d.posted-d.done)
	d.done = d.posted
	return err
}

// feedAll feeds all streams for d and returns the number of completed requests of each, and the work in messages. It
// compares their data.
func feedAll(ctx context.Context, all []*demand, d time.Duration, beside func() error) (served []float64, w work,
	err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	served = make([]float64, len(all))
	for i, x := range all {
		served[i] = -float64(x.done)
		x.proof.prepare()
	}
	begun, err := begin()
	if err != nil {
		return nil, w, err
	}
	for stop := time.Now().Add(d); time.Now().Before(stop); {
		for _, x := range all {
			if err := x.feed(); err != nil {
				return nil, w, err
			}
		}
		if err := beside(); err != nil {
			return nil, w, err
		}
	}
	sum := 0.0
	for i, x := range all {
		served[i] += float64(x.done)
		sum += served[i]
	}
	if w, err = begun.end("message", sum); err != nil {
		return nil, w, err
	}
	for _, x := range all {
		if err := x.drain(ctx); err != nil {
			return nil, w, err
		}
	}
	for i, x := range all {
		if err := x.proof.verify(int(served[i])); err != nil {
			return nil, w, err
		}
	}
	return served, w, nil
}

func nothing() error { return nil }

// busyLatency measures the latency between two VMs while two others keep the same engine busy with messages of that
// size, in memory bytes on either side.
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
			load.proof.prepare()
			before, start := load.done, time.Now()
			s, err := busy(ctx, d)
			if err != nil {
				return s, err
			}
			s.Extra["load, GB/s"] = float64(load.done-before) * float64(message) / giga / time.Since(start).Seconds()
			if err := load.drain(ctx); err != nil {
				return s, err
			}
			return s, load.proof.verify(load.done - before)
		}
		m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
			s, err := quiet(ctx, d)
			s.Extra = map[string]float64{"anchor, p99.9": s.Extra["p99.9"]}
			return s, err
		}
		return m, nil
	}
}

// collectedLatency measures the 99.9th percentile of the latency between two VMs while the daemon is asked for its
// metrics all the time, which produces garbage. The collector runs at a fiftieth of the growth of Go's default; the
// anchor is a daemon that never collects.
func collectedLatency(ctx context.Context, b *Bench) (m Meter, err error) {
	open := func(collects bool) (func(context.Context, time.Duration) (Sample, error), error) {
		h, err := b.host()
		if err != nil {
			return nil, err
		}
		h.Env = []string{"GOGC=off"}
		if collects {
			h.Env = []string{"GOGC=2"}
		}
		if err := b.daemon(ctx, h, 0, 2, b.monitored(h)); err != nil {
			return nil, err
		}
		nodes, err := b.attach(h, 0, 2, 16<<20)
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
			// Collections of this process must not count as the daemon's.
			defer debug.SetGCPercent(debug.SetGCPercent(-1))
			before, err := collections(ctx, h)
			if err != nil {
				return Sample{}, err
			}
			var asking sync.WaitGroup
			var stop atomic.Bool
			var askErr error
			asking.Go(func() {
				// leaves the processors to the two VMs
				for ; !stop.Load() && askErr == nil; time.Sleep(5 * time.Millisecond) {
					_, askErr = get(ctx, monitoringSocket(h), "/metrics")
				}
			})
			s, err := bounce(ctx, d)
			stop.Store(true)
			asking.Wait()
			if err = errors.Join(err, askErr); err != nil {
				return s, err
			}
			after, err := collections(ctx, h)
			if err != nil {
				return s, err
			}
			n, value := after-before, s.Extra["p99.9"]
			switch {
			case !collects && n > 0:
				return s, fmt.Errorf("%s: garbage was collected with GOGC=off", h.Name)
			case !collects:
				return Sample{Value: value, Work: s.Work}, nil
			case n == 0:
				return s, fmt.Errorf("no garbage was collected in %v: choose a longer TIME", d)
			}
			extra := map[string]float64{"collections/s": n / d.Seconds(), "median": s.Value, "max": s.Extra["max"]}
			return Sample{Value: value, Extra: extra, Work: s.Work}, nil
		}, nil
	}
	if m.Ours, err = open(true); err == nil {
		m.Anchor, err = open(false)
	}
	return m, err
}

// collections returns the number of garbage collections of a daemon.
func collections(ctx context.Context, h *lab.Host) (float64, error) {
	metrics, err := get(ctx, monitoringSocket(h), "/metrics")
	if err != nil {
		return 0, err
	}
	for l := range strings.Lines(string(metrics)) {
		if n, ok := strings.CutPrefix(l, "go_gc_duration_seconds_count "); ok {
			return strconv.ParseFloat(strings.TrimSpace(n), 64)
		}
	}
	return 0, fmt.Errorf("%s: no go_gc_duration_seconds_count among the metrics", h.Name)
}

// fairShares runs 8 VMs with 1, 1, 2, 2, 4, 4, 8 and 8 QPs, each of which demands more than an eighth of the engine.
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
		served, w, err := feedAll(ctx, all, d, nothing)
		if err != nil {
			return Sample{}, err
		}
		shares := make([]float64, vms)
		for i, n := range served {
			shares[owner[i]] += n
		}
		return Sample{Value: slices.Min(shares) / w.units * vms, Extra: map[string]float64{
			"largest": slices.Max(shares) / w.units * vms, "GB/s": w.units * message / giga / d.Seconds(),
		}, Work: w}, nil
	}
	return m, nil
}

// flooded measures the rate of one VM beside another that rings doorbells all the time: of an idle QP, and of a QP in
// the error state to which it posts as fast as completions are polled.
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
	bad := guestdrv.NewWrite(0, guestdrv.Remote{RKey: 0xbad}).With(guestdrv.SendSignaled)
	bad.Inline = make([]byte, 8)
	flushed := 0
	flood := func() error {
		for range 64 {
			idle.qp.Ring()
		}
		flushed += dead.cq.Poll(dead.wcs[:])
		for range len(dead.wcs) {
			if dead.qp.QueueSend(bad) != nil {
				break // full
			}
		}
		dead.qp.Ring()
		return nil
	}
	rate := func(ctx context.Context, d time.Duration, all []*demand, beside func() error) (Sample, error) {
		served, w, err := feedAll(ctx, all, d, beside)
		if err != nil {
			return Sample{}, err
		}
		w.unit, w.units = "KiB", served[0]*message/1024 // of ours, as the figure
		return Sample{Value: served[0] * message / giga / d.Seconds(), Work: w}, nil
	}
	m.Turns = 10
	m.Ours = func(ctx context.Context, d time.Duration) (Sample, error) {
		before := flushed
		s, err := rate(ctx, d, []*demand{honest}, flood)
		s.Extra = map[string]float64{"flushed/s": float64(flushed-before) / d.Seconds()}
		return s, err
	}
	m.Anchor = func(ctx context.Context, d time.Duration) (Sample, error) {
		return rate(ctx, d, []*demand{honest, equal}, nothing)
	}
	return m, nil
}
