package hostdriver

import (
	"context"
	"fmt"
	"time"
)

// Least is the smallest limit that SetLimit accepts at present, at least MinBudget: twice what is held, since only half
// of a limit may be, and 16 of the largest granules.
func (b *Budget) Least() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.leastLocked()
}

func (b *Budget) leastLocked() uint64 { return max(MinBudget, 2*b.held, 16*b.unit) }

// SetLimit changes the limit while Drivers use the budget; 0: none. Below Least it changes nothing and returns
// ErrBudget. It evicts nothing: Settle does, and faults do. Memory that is mapped already keeps its granules' size.
func (b *Budget) SetLimit(limit uint64) error {
	b.making.Lock() // a mapping's granules suit the limit that it was made under
	defer b.making.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	if least := b.leastLocked(); limit != 0 && limit < least {
		return fmt.Errorf("a limit of %d bytes: want at least %d, with %d held and granules of up to %d: %w", limit, least,
			b.held, b.unit, ErrBudget)
	}
	b.limit = limit
	b.changeLocked() // there may be room
	return nil
}

// Settle evicts down to a limit that SetLimit has lowered. It waits for epochs and for granules that are busy; only ctx
// ends it early.
func (b *Budget) Settle(ctx context.Context) error {
	for {
		b.shrink()
		if !b.exceeded() {
			return nil
		}
		t := time.NewTimer(shrinkAgain)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		}
	}
}

// exceeded reports whether more is resident than a lowered limit permits.
func (b *Budget) exceeded() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.limit != 0 && b.used > b.limit
}

// limitNow returns the limit.
func (b *Budget) limitNow() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.limit
}

// SetWeight changes the weight of a VM that was added. What is divided at present is divided again.
func (h *Host) SetWeight(b *Budget, weight int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.vms[b]; !ok {
		return
	}
	h.vms[b] = uint64(weight)
	h.divideLocked()
	h.hurry()
}
