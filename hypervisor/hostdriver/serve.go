package hostdriver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/vnicd/vnicd/translate"
)

var errGone = fmt.Errorf("the slot is being removed: %w", translate.ErrMemoryGone)

// maxAround bounds what one fault brings in, whatever it asks for.
const maxAround = 2 << 20

// serve serves faults until Close. There are several servers, so that a fault that waits for the swap device does not
// delay others. Each VM has its own. A fault that finds memory short occupies none while it waits: see late.
func (d *Driver) serve() {
	for q := d.space.Faults(); ; {
		f, err := q.Next(d.ctx)
		if err != nil {
			return
		}
		err = d.contain(func() error { return d.pageIn(f.Miss) })
		if errors.Is(err, ErrShort) {
			d.late.add(f, err)
			continue
		}
		d.late.settle(f, err)
		q.Finish(f, err)
	}
}

// pageIn makes the memory of m present: its first granule, and the others as far as possible.
func (d *Driver) pageIn(m translate.Miss) error {
	r := d.find(m.PA)
	if r == nil {
		return translate.Miss{Kind: translate.BadAddress, Where: m.Where, Len: m.Len}.Err()
	}
	around := uint64(maxAround)
	if bound := d.opts.Budget.bound(); bound != 0 {
		around = min(around, bound/16)
	}
	last := m.PA + translate.PA(max(min(m.Len, around, uint64(r.end()-m.PA)), 1)-1)
	first := r.granule(m.PA)
	for i := first; i <= r.granule(last); i++ {
		_, err := d.opts.Budget.bring(d.ctx, r, i, false)
		if i == first && !errors.Is(err, ErrShort) {
			d.opts.Budget.faultAt(m.PA) // once, however often it is served
		}
		if err != nil {
			if errors.Is(err, context.Canceled) {
				err = ErrClosed
			}
			if i == first {
				return err
			}
			return nil
		}
	}
	return nil
}

// find returns the region that holds pa, or nil.
func (d *Driver) find(pa translate.PA) *region {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.regions {
		if uint64(pa) >= r.GuestPA && uint64(pa)-r.GuestPA < r.Size {
			return r
		}
	}
	return nil
}

// Hold keeps memory present, see Driver.Hold.
type Hold struct {
	b    *Budget
	once sync.Once
	held []heldRange
}

// heldRange are the granules first..last of a region, each held once.
type heldRange struct {
	r           *region
	first, last uint64
}

// Hold makes [pa, pa+n) resident and published, and keeps it so until Release. See HoldRanges.
func (d *Driver) Hold(ctx context.Context, pa translate.PA, n uint64) (*Hold, error) {
	return d.HoldRanges(ctx, []translate.Range{{PA: pa, N: n}})
}

// HoldRanges makes all ranges resident and published, and keeps them so until Release. It is for memory that a loop
// must be able to use without a fault, such as rings. It waits for the memory, or until ctx ends. If a range is not
// guest memory, the error is a *translate.MissError. At most half of the budget may be held (ErrBudget). On an error
// nothing is held. It must not be called on a loop or inside an epoch. A hold does not keep a slot from being removed.
//
// Ranges in ascending order cost least: a Hold has one entry for all ranges whose granules are adjacent or the same.
func (d *Driver) HoldRanges(ctx context.Context, ranges []translate.Range) (*Hold, error) {
	h := &Hold{b: d.opts.Budget}
	for _, x := range ranges {
		if err := d.holdRange(ctx, h, x); err != nil {
			h.Release()
			return nil, err
		}
	}
	h.held = slices.Clip(h.held)
	return h, nil
}

// holdRange adds a range to h.
func (d *Driver) holdRange(ctx context.Context, h *Hold, x translate.Range) error {
	end, ok := x.PA.Add(x.N)
	if !ok {
		return translate.Miss{Kind: translate.BadAddress, Where: translate.Where{PA: x.PA}, Len: x.N}.Err()
	}
	for at := x.PA; at < end; {
		r := d.find(at)
		if r == nil {
			return translate.Miss{Kind: translate.BadAddress, Where: translate.Where{PA: at}, Len: uint64(end - at)}.Err()
		}
		to := min(end, r.end())
		for i := r.granule(at); i <= r.granule(to-1); i++ {
			if h.has(r, i) {
				continue
			}
			if _, err := d.hold(ctx, h, r, i); err != nil {
				return fmt.Errorf("holding %v, %d bytes: %w", x.PA, x.N, err)
			}
			h.add(r, i)
		}
		at = to
	}
	return nil
}

// HoldCost bounds the memory that a Hold of these ranges, which are in ascending order, occupies, in bytes, if none of
// them crosses from one slot to the next.
func HoldCost(ranges []translate.Range) uint64 {
	const release = 32 // the function value that callers keep
	entries := 0
	for i, x := range ranges {
		// Less than a granule apart, their granules are the same or adjacent.
		if i == 0 || x.PA >= ranges[i-1].PA+translate.PA(ranges[i-1].N)+minGranule {
			entries++
		}
	}
	return translate.AllocatedFor[Hold](1) + translate.AllocatedFor[heldRange](entries) + release
}

// has reports whether granule i of r is in the newest entry.
func (h *Hold) has(r *region, i uint64) bool {
	n := len(h.held)
	return n > 0 && h.held[n-1].r == r && i >= h.held[n-1].first && i <= h.held[n-1].last
}

// add records that granule i of r is held once more.
func (h *Hold) add(r *region, i uint64) {
	if n := len(h.held); n > 0 && h.held[n-1].r == r && h.held[n-1].last+1 == i {
		h.held[n-1].last = i
		return
	}
	h.held = append(h.held, heldRange{r, i, i})
}

// Release ends the hold. It never waits. It may be called from any goroutine, any number of times, also after the
// memory is gone.
func (h *Hold) Release() {
	h.once.Do(func() {
		h.b.mu.Lock()
		defer h.b.mu.Unlock()
		for _, x := range h.held {
			if x.r.gone {
				continue
			}
			for i := x.first; i <= x.last; i++ {
				h.b.releaseLocked(x.r, x.r.m.granules[i], 1) // it is not absent while it is held
			}
		}
		h.held = nil
	})
}
