package hostdriver

import (
	"context"
	"maps"
	"slices"
)

// Resync finds memory that is accounted as resident but missing from its file, because a balloon took it or a device
// was unplugged. It withdraws that memory, and makes held memory resident again. It waits for an epoch to drain, so it
// must not be called on a loop.
func (d *Driver) Resync() {
	d.mu.Lock()
	ms := map[*mapping]bool{}
	for _, r := range d.regions {
		ms[r.m] = true
	}
	d.mu.Unlock()
	for m := range ms {
		d.opts.Budget.resync(m)
	}
}

// Resync is Driver.Resync for all drivers of the budget.
func (b *Budget) Resync() {
	b.mu.Lock()
	ds := slices.Collect(maps.Keys(b.drivers))
	b.mu.Unlock()
	ms := map[*mapping]bool{}
	for _, d := range ds {
		d.mu.Lock()
		for _, r := range d.regions {
			ms[r.m] = true
		}
		d.mu.Unlock()
	}
	for m := range ms {
		b.resync(m)
	}
}

func (b *Budget) resync(m *mapping) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m.gone {
		return
	}
	var look []uint64
	for i, g := range m.granules {
		if !g.busy() {
			look = append(look, i)
		}
	}
	m.users++
	b.mu.Unlock()
	look = m.incomplete(look...)
	b.mu.Lock()

	// Changes meanwhile do not matter: a granule withdrawn needlessly comes back at the next fault.
	var lost, held []*granule
	withdrawn := new(drain)
	for _, i := range look {
		switch g := m.granules[i]; {
		case m.gone || g == nil || g.busy():
		case g.holds > 0:
			held = append(held, g)
		default:
			before := g.drain
			withdrawn.withdraw(g)
			if g.state == inactive {
				g.drain = before // it is in no table any more
			}
			g.unlist()
			g.state = leaving
			lost = append(lost, g)
		}
	}
	withdrawn.flip()
	b.mu.Unlock()
	for _, g := range held {
		if _, err := m.populate(g.index); err != nil {
			m.log.Warn("memory held by the device disappeared", "err", err)
		}
	}
	for _, g := range lost {
		_ = g.drain.wait(context.Background())
		m.discard(g.index)
	}
	b.mu.Lock()
	for _, g := range lost {
		b.forgetLocked(g)
	}
	b.counters.discarded += uint64(len(lost))
	m.users--
	b.changeLocked()
}
