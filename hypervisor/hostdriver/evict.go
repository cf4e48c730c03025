package hostdriver

import (
	"context"
	"slices"

	"github.com/vnicd/vnicd/translate"
)

// boundLocked returns the bound in force, 0: none.
func (b *Budget) boundLocked() uint64 {
	if b.limit == 0 || b.target != 0 && b.target < b.limit {
		return b.target
	}
	return b.limit
}

func (b *Budget) bound() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.boundLocked()
}

// takeLocked reserves n bytes, evicting as needed. It may drop the mutex and wait: for an epoch, or for granules that
// others fill or hold at the moment. Above the target, or a limit that was lowered, it evicts about twice what it
// reserves, so that no fault waits for all of the memory that the VM has to return.
func (b *Budget) takeLocked(ctx context.Context, n uint64) error {
	for freed := uint64(0); ; {
		limit := b.limit != 0 && b.used+n > b.limit && (b.used <= b.limit || freed < 2*n)
		target := b.target != 0 && b.used+n > b.target && freed < 2*n
		if !limit && !target {
			break
		}
		g := b.inactive.head
		switch {
		case g != nil:
			freed += g.size()
			if err := b.evictLocked(ctx, g); err != nil {
				return err
			}
			b.counters.evictions++
		case b.withdrawLocked() > 0:
		case limit:
			if err := b.waitLocked(ctx); err != nil {
				return err
			}
		default: // all is held or busy: pressure stops no VM
			freed = 2 * n
		}
	}
	b.used += n
	return nil
}

// evictLocked waits until nothing uses the memory of g, which is withdrawn, and returns it to the kernel. It drops the
// mutex meanwhile.
func (b *Budget) evictLocked(ctx context.Context, g *granule) error {
	g.unlist()
	g.state = leaving
	m := g.m
	m.users++
	b.mu.Unlock()
	err := g.drain.wait(ctx)
	if err == nil {
		m.discard(g.index)
	}
	b.mu.Lock()
	m.users--
	if err != nil {
		g.state = inactive
		if !m.gone {
			b.inactive.push(g)
		}
		b.changeLocked()
		return err
	}
	b.forgetLocked(g)
	return nil
}

// maxBatch bounds the granules that one flip withdraws.
const maxBatch = 64

// trimLocked keeps a part of the bound inactive once it is nearly used up, so that memory in use gets its second chance
// and an eviction finds epochs that drained long ago. While evicted memory comes back from the page cache, a second
// chance costs as much as a return, and that part is a sixteenth to an eighth. While it comes back from the swap
// device, that part is up to a half: then what stays resident is nearly what was used last (README).
func (b *Budget) trimLocked() {
	bound := b.boundLocked()
	if bound == 0 || b.used < bound-bound/8 {
		return
	}
	if part := 1.0/16 + 7.0/16*b.swapped; b.inactive.bytes < uint64(part*float64(bound)) {
		b.withdrawLocked()
	}
}

// readLocked records whether a granule had to be read.
func (b *Budget) readLocked(read bool) {
	const gain = 1.0 / 32
	b.swapped -= gain * b.swapped
	if read {
		b.swapped += gain
	}
}

// withdrawLocked removes the oldest active granules from the tables, up to a sixteenth of the bound, with one flip of
// each connection for all of them. It returns their number.
func (b *Budget) withdrawLocked() int {
	most := b.boundLocked() / 16
	d := new(drain)
	n := 0
	for first := b.inactive.bytes; n < maxBatch && b.active.head != nil && b.inactive.bytes-first < most; n++ {
		g := b.active.head
		g.unlist()
		d.withdraw(g)
		g.state = inactive
		b.inactive.push(g)
	}
	b.counters.withdrawals += uint64(n)
	d.flip()
	return n
}

// maxShrink bounds the granules that one call of shrink evicts.
const maxShrink = 1024

// shrink evicts down to the bound, as far as epochs have drained; it waits for nothing. It reports whether there is
// more to evict soon.
func (b *Budget) shrink() (more bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for range maxShrink {
		bound := b.boundLocked()
		if bound == 0 || b.used <= bound {
			return false
		}
		// What goes next is withdrawn well before, so that memory in use gets its second chance.
		if b.inactive.bytes < b.used-bound+bound/8 && b.withdrawLocked() > 0 {
			continue
		}
		g := b.inactive.head
		if g == nil {
			return false // all is held or busy
		}
		if !g.drain.done() {
			return true
		}
		_ = b.evictLocked(context.Background(), g) // it has drained
		b.counters.evictions++
	}
	return true
}

// setTarget sets the bound under pressure, 0: none. It evicts nothing: see takeLocked and shrink.
func (b *Budget) setTarget(n uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.target = n
}

// drain waits until nothing uses granules that were withdrawn together: for an epoch of each connection that had
// published one of them.
type drain []draining

type draining struct {
	d     *Driver
	epoch *translate.Drain // nil before flip
}

// add makes d wait for an epoch of that connection.
func (d *drain) add(of *Driver) {
	for _, x := range *d {
		if x.d == of && x.epoch == nil {
			return
		}
	}
	*d = append(*d, draining{d: of})
}

// withdraw removes g from all tables. The caller then calls flip.
func (d *drain) withdraw(g *granule) {
	for _, r := range g.m.views {
		if g.in&r.view != 0 {
			r.withdraw(g)
			d.add(r.d)
		}
	}
	for _, p := range g.m.parting {
		for _, x := range *p {
			if !slices.Contains(*d, x) {
				*d = append(*d, x)
			}
		}
	}
	g.drain = d
}

// flip begins the wait, after all granules were withdrawn.
func (d *drain) flip() {
	for i := range *d {
		if x := &(*d)[i]; x.epoch == nil {
			x.epoch = x.d.space.Epochs().Flip()
		}
	}
}

func (d *drain) done() bool {
	return !slices.ContainsFunc(*d, func(x draining) bool { return !x.epoch.Done() })
}

// wait waits for the epochs; only ctx ends it early.
func (d *drain) wait(ctx context.Context) error {
	for _, x := range *d {
		if err := x.d.drained(ctx, x.epoch); err != nil {
			return err
		}
	}
	return nil
}
