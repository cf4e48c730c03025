package hostdriver

import (
	"context"
	"slices"

	"github.com/vnicd/vnicd/translate"
)

// Resync finds memory that is accounted as resident but missing from its file, because a balloon took it or a device
// was unplugged. It withdraws that memory, and makes held memory resident again. It waits for an epoch to drain, so it
// must not be called on a loop.
func (d *Driver) Resync() {
	d.mu.Lock()
	rs := slices.Clone(d.regions)
	d.mu.Unlock()
	for _, r := range rs {
		d.opts.Budget.resync(r)
	}
}

// Resync is Driver.Resync for all drivers of the budget.
func (b *Budget) Resync() {
	b.mu.Lock()
	var ds []*Driver
	for d := range b.drivers {
		ds = append(ds, d)
	}
	b.mu.Unlock()
	for _, d := range ds {
		d.Resync()
	}
}

func (b *Budget) resync(r *region) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.gone {
		return
	}
	var look []uint64
	for i, g := range r.granules {
		if !g.busy() {
			look = append(look, i)
		}
	}
	r.users++
	b.mu.Unlock()
	look = r.incomplete(look)
	b.mu.Lock()

	// Changes meanwhile do not matter: a granule withdrawn needlessly comes back at the next fault.
	var lost, held []*granule
	for _, i := range look {
		switch g := r.granules[i]; {
		case r.gone || g == nil || g.busy():
		case g.holds > 0:
			held = append(held, g)
		default:
			if g.state == active {
				r.withdraw(i)
			}
			g.unlist()
			g.state = leaving
			lost = append(lost, g)
		}
	}
	flip(lost)
	b.mu.Unlock()
	for _, g := range held {
		if err := r.populate(g.index); err != nil {
			r.d.log.Warn("memory held by the device disappeared", "err", err)
		}
	}
	for _, g := range lost {
		_ = r.d.drained(context.Background(), g.drain)
		r.discard(g.index)
	}
	b.mu.Lock()
	for _, g := range lost {
		b.forgetLocked(g)
	}
	b.counters.discarded += uint64(len(lost))
	r.users--
	b.changeLocked()
}

// incomplete returns those granules of which the file lacks a page.
func (r *region) incomplete(is []uint64) (holes []uint64) {
	vec := make([]byte, max(1<<r.shift, translate.PageSize)/translate.PageSize)
	for _, i := range is {
		b := r.bytes(i)
		v := vec[:len(b)/translate.PageSize]
		if err := mincore(b, v); err != nil {
			r.d.log.Warn("mincore", "err", err)
			return nil
		}
		if slices.ContainsFunc(v, func(x byte) bool { return x&1 == 0 }) {
			holes = append(holes, i)
		}
	}
	return holes
}
