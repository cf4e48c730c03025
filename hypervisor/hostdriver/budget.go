package hostdriver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/vnicd/vnicd/translate"
)

// MinBudget is the smallest limit of a Budget.
const MinBudget = 4 << 20

// ErrBudget: a Hold exceeds the part of the budget that may be held.
var ErrBudget = errors.New("memory budget exceeded")

// Budget bounds the bytes of one VM's memory that the device keeps resident (PF-15). The drivers of the VM's sockets
// share it; memory that two of them have resident counts twice.
//
// It is a segmented FIFO. The device sets no access bits, so the oldest granules are put on probation: removed from the
// table, but kept resident for a while.
//
//	                 oldest of all                    oldest of these, epoch drained
//	absent ──▶ active ───────────▶ inactive ─────────────────────▶ absent
//	  fault      ▲   (withdrawn)      │    (returned to the kernel)
//	             └────────────────────┘
//	              fault: second chance, costs a table entry
//
// Lock order: Driver.mu, Budget.mu, then translate's.
type Budget struct {
	limit uint64 // 0: none

	mu       sync.Mutex    // never held while waiting; guards the fields below and the granules
	used     uint64        // resident, or about to be
	held     uint64        // of these, by Hold
	huge     uint64        // resident, not counted
	active   list          // published
	inactive list          // withdrawn, resident
	changed  chan struct{} // closed and replaced by changeLocked
	waiting  int           // number of waiters for changed
	drivers  map[*Driver]struct{}
	counters counters
}

// counters of a Budget, over all its drivers, present and past.
type counters struct {
	evictions, refaults, withdrawals, discarded uint64
	faults, failed                              uint64 // of closed drivers
	longest                                     time.Duration
	heat                                        translate.HeatMap
	unlocked                                    string // why some memory is not locked
}

// NewBudget returns a Budget of limit bytes, at least MinBudget; 0: no limit.
func NewBudget(limit uint64) *Budget {
	if limit != 0 {
		limit = max(limit, MinBudget)
	}
	return &Budget{limit: limit, changed: make(chan struct{}), drivers: make(map[*Driver]struct{})}
}

// granule is the unit in which memory becomes resident and is evicted.
type granule struct {
	r     *region
	index uint64 // within r
	state state
	holds int              // > 0: active and on no list
	drain *translate.Drain // inactive, leaving: epoch that may still use it

	prev, next *granule
	on         *list
}

type state uint8

const (
	filling  state = iota // a goroutine makes it resident
	active                // resident and published
	inactive              // resident, not published
	leaving               // a goroutine evicts it
)

// busy reports that a goroutine works on the granule without the mutex.
func (g *granule) busy() bool { return g.state == filling || g.state == leaving }

func (g *granule) size() uint64 {
	from, to := g.r.span(g.index)
	return to - from
}

// list is a FIFO of granules.
type list struct {
	head, tail *granule
	bytes      uint64
}

func (l *list) push(g *granule) {
	g.prev, g.next, g.on = l.tail, nil, l
	if l.tail != nil {
		l.tail.next = g
	} else {
		l.head = g
	}
	l.tail = g
	l.bytes += g.size()
}

// unlist removes g from its list, if it is on one.
func (g *granule) unlist() {
	l := g.on
	if l == nil {
		return
	}
	if g.prev != nil {
		g.prev.next = g.next
	} else {
		l.head = g.next
	}
	if g.next != nil {
		g.next.prev = g.prev
	} else {
		l.tail = g.prev
	}
	g.prev, g.next, g.on = nil, nil, nil
	l.bytes -= g.size()
}

// waitLocked waits for the next change that may end a wait: a granule is no longer busy, or there is room.
func (b *Budget) waitLocked(ctx context.Context) error {
	changed := b.changed
	b.waiting++
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		b.waiting--
	}()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (b *Budget) changeLocked() {
	if b.waiting > 0 {
		close(b.changed)
		b.changed = make(chan struct{})
	}
}

func (b *Budget) giveLocked(n uint64) {
	if n > 0 {
		b.used -= n
		b.changeLocked()
	}
}

// bring makes granule i of r resident and published. It may wait, for the kernel or for an epoch to drain. It returns
// the memory's error (translate.ErrMemoryGone and others), errGone if the slot is being removed, ErrBudget for hold, or
// ctx's error.
func (b *Budget) bring(ctx context.Context, r *region, i uint64, hold bool) (*granule, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var room uint64 // reserved for the granule
	defer func() { b.giveLocked(room) }()
	for {
		g := r.granules[i]
		switch {
		case r.gone:
			return nil, errGone
		case g == nil && room == 0 && r.counted():
			n := uint64(len(r.bytes(i)))
			if err := b.takeLocked(ctx, n); err != nil {
				return nil, err
			}
			room = n
		case g == nil:
			g = &granule{r: r, index: i, state: filling}
			room = 0
			if err := b.fillLocked(g); err != nil {
				return nil, err
			}
			return g, b.useLocked(g, hold)
		case g.busy():
			if err := b.waitLocked(ctx); err != nil {
				return nil, err
			}
		default:
			return g, b.useLocked(g, hold)
		}
	}
}

// fillLocked makes g resident. The caller has reserved room for it; on an error the room is released. It drops the
// mutex meanwhile.
func (b *Budget) fillLocked(g *granule) error {
	r := g.r
	r.granules[g.index] = g
	if !r.counted() {
		b.huge += g.size()
	}
	r.users++
	b.mu.Unlock()
	err := r.populate(g.index)
	b.mu.Lock()
	r.users--
	if err == nil && r.gone {
		err = errGone
	}
	if err == nil {
		// Only this package writes the table, so an error is a bug; it is returned all the same.
		err = r.publish(g.index)
	}
	if err != nil {
		r.discard(g.index)
		b.forgetLocked(g)
		return err
	}
	g.state = active
	b.changeLocked()
	return nil
}

// forgetLocked removes g, which is on no list.
func (b *Budget) forgetLocked(g *granule) {
	delete(g.r.granules, g.index)
	if n := g.size(); g.r.counted() {
		b.used -= n
	} else {
		b.huge -= n
	}
	b.changeLocked()
}

// useLocked publishes g again if it is inactive, and puts it on the active list, or removes it from there to hold it.
func (b *Budget) useLocked(g *granule, hold bool) error {
	if g.state == inactive {
		if err := g.r.publish(g.index); err != nil {
			return err
		}
		g.unlist()
		g.state, g.drain = active, nil
		b.counters.refaults++
	}
	counted := g.r.counted()
	if counted && g.on == nil && g.holds == 0 {
		b.active.push(g)
	}
	if hold {
		if n := g.size(); g.holds == 0 && counted {
			if b.limit != 0 && b.held+n > b.limit/2 {
				return fmt.Errorf("%d bytes are held, %d more exceed half of the budget of %d: %w", b.held, n, b.limit, ErrBudget)
			}
			g.unlist()
			b.held += n
		}
		g.holds++
	}
	b.trimLocked()
	return nil
}

// releaseLocked ends one hold of g.
func (b *Budget) releaseLocked(g *granule) {
	if g.holds--; g.holds > 0 || g.r.gone || !g.r.counted() {
		return
	}
	b.held -= g.size()
	b.active.push(g)
	b.changeLocked()
}

// takeLocked reserves n bytes, evicting as needed. It may drop the mutex and wait: for an epoch, or for granules that
// others fill or hold at the moment.
func (b *Budget) takeLocked(ctx context.Context, n uint64) error {
	for b.limit != 0 && b.used+n > b.limit {
		g := b.inactive.head
		if g == nil {
			if b.withdrawLocked() == 0 {
				if err := b.waitLocked(ctx); err != nil {
					return err
				}
			}
			continue
		}
		if err := b.evictLocked(ctx, g); err != nil {
			return err
		}
		b.counters.evictions++
	}
	b.used += n
	return nil
}

// evictLocked waits until nothing uses the memory of g, which is withdrawn, and returns it to the kernel. It drops the
// mutex meanwhile.
func (b *Budget) evictLocked(ctx context.Context, g *granule) error {
	g.unlist()
	g.state = leaving
	g.r.users++
	b.mu.Unlock()
	err := g.r.d.drained(ctx, g.drain)
	if err == nil {
		g.r.discard(g.index)
	}
	b.mu.Lock()
	g.r.users--
	if err != nil {
		g.state = inactive
		if !g.r.gone {
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

// trimLocked keeps a sixteenth to an eighth of the budget inactive once it is nearly used up: enough that memory in use
// gets its second chance, and that an eviction finds an epoch that drained long ago.
func (b *Budget) trimLocked() {
	if b.limit == 0 || b.used < b.limit-b.limit/8 || b.inactive.bytes >= b.limit/16 {
		return
	}
	b.withdrawLocked()
}

// withdrawLocked removes the oldest active granules from the table, up to a sixteenth of the budget, with one flip for
// all of them. It returns their number.
func (b *Budget) withdrawLocked() int {
	var batch [maxBatch]*granule
	n := 0
	for first := b.inactive.bytes; n < maxBatch && b.active.head != nil && b.inactive.bytes-first < b.limit/16; n++ {
		g := b.active.head
		g.unlist()
		g.r.withdraw(g.index)
		g.state = inactive
		b.inactive.push(g)
		batch[n] = g
	}
	b.counters.withdrawals += uint64(n)
	flip(batch[:n])
	return n
}

// flip starts the drain of granules that have just been withdrawn, one per Space.
func flip(gs []*granule) {
	var d *translate.Drain
	var of *Driver
	for _, g := range gs {
		g.drain = nil
	}
	for i, g := range gs {
		if g.drain != nil {
			continue
		}
		of, d = g.r.d, g.r.d.space.Epochs().Flip()
		for _, o := range gs[i:] {
			if o.r.d == of {
				o.drain = d
			}
		}
	}
}

// withdrawAll removes regions of one Driver from the table and waits until nothing in this package uses their mappings.
func (b *Budget) withdrawAll(rs []*region) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range rs {
		r.gone = true
		if err := r.d.space.Unmap(translate.PA(r.GuestPA), r.Size); err != nil {
			return err
		}
		for _, g := range r.granules {
			g.unlist()
			if g.holds > 0 && r.counted() {
				b.held -= g.size() // later releases do nothing
			}
		}
	}
	b.changeLocked()
	for _, r := range rs {
		for r.users > 0 {
			_ = b.waitLocked(context.Background())
		}
	}
	return nil
}

// forgetAll removes unmapped regions from the accounting.
func (b *Budget) forgetAll(rs []*region) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range rs {
		for _, g := range r.granules {
			b.forgetLocked(g)
		}
	}
}
