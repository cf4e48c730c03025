package hostdriver

import (
	"context"
	"errors"
	"fmt"
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
	gs   []heldGranule
}

type heldGranule struct {
	r *region
	g *granule
}

// Hold makes [pa, pa+n) resident and published, and keeps it so until Release. It is for memory that a loop must be
// able to use without a fault, such as rings. It waits for the memory, or until ctx ends. If the range is not guest
// memory, the error is a *translate.MissError. At most half of the budget may be held (ErrBudget). It must not be
// called on a loop or inside an epoch. A hold does not keep a slot from being removed.
func (d *Driver) Hold(ctx context.Context, pa translate.PA, n uint64) (*Hold, error) {
	h := &Hold{b: d.opts.Budget}
	end, ok := pa.Add(n)
	if !ok {
		return nil, translate.Miss{Kind: translate.BadAddress, Where: translate.Where{PA: pa}, Len: n}.Err()
	}
	for at := pa; at < end; {
		r := d.find(at)
		if r == nil {
			h.Release()
			return nil, translate.Miss{Kind: translate.BadAddress, Where: translate.Where{PA: at}, Len: uint64(end - at)}.Err()
		}
		to := min(end, r.end())
		for i := r.granule(at); i <= r.granule(to-1); i++ {
			g, err := d.hold(ctx, h, r, i)
			if err != nil {
				h.Release()
				return nil, fmt.Errorf("holding %v, %d bytes: %w", pa, n, err)
			}
			h.gs = append(h.gs, heldGranule{r, g})
		}
		at = to
	}
	return h, nil
}

// Release ends the hold. It never waits. It may be called from any goroutine, any number of times, also after the
// memory is gone.
func (h *Hold) Release() {
	h.once.Do(func() {
		h.b.mu.Lock()
		defer h.b.mu.Unlock()
		for _, x := range h.gs {
			if !x.r.gone {
				h.b.releaseLocked(x.r, x.g, 1)
			}
		}
		h.gs = nil
	})
}
