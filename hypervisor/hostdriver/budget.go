package hostdriver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/translate"
)

// MinBudget is the smallest limit of a Budget.
const MinBudget = 4 << 20

// ErrBudget: a Hold exceeds the part of the budget that may be held.
var ErrBudget = errors.New("memory budget exceeded")

// Budget is the account of one VM's memory that the device keeps resident, and bounds it (PF-15). The drivers of the
// VM's sockets share it, and with it the mappings of the memory that they have in common: a granule is resident, and
// counted, once, however many of them have published it.
//
// Two bounds apply. The limit, which is configured, is never exceeded; a lower one (SetLimit) is approached as a target
// is. The target, which a Host sets while memory is short, is approached by evicting more than is brought in.
//
// It is a segmented FIFO. The device sets no access bits, so the oldest granules are put on probation: removed from the
// tables, but kept resident for a while.
//
//	                 oldest of all                    oldest of these, epochs drained
//	absent ──▶ active ───────────▶ inactive ─────────────────────▶ absent
//	  fault      ▲   (withdrawn)      │    (returned to the kernel)
//	             └────────────────────┘
//	              fault: second chance, costs a table entry
//
// Lock order: Driver.mu, Budget.making, Host.mu, Budget.mu, then mappedTotal.mu and translate's.
type Budget struct {
	shared uint64            // bound of mapped, 0: none; set before the first Driver
	host   *Host             // nil: none; likewise
	work   *worktime.Account // of the VM; nil: none; likewise
	space  *mappedTotal
	fill   func(b []byte) (read bool, err error)

	// making serialises new mappings, so that two connections of the VM do not map, and charge, the same memory. It is
	// taken before mu.
	making sync.Mutex

	mu       sync.Mutex    // never held while waiting; guards the fields below, mappings and granules
	limit    uint64        // 0: none
	target   uint64        // 0: none
	mapped   uint64        // bytes of all mappings
	used     uint64        // resident, or about to be
	held     uint64        // of these, by Hold
	huge     uint64        // resident, not counted
	unit     uint64        // size of the largest granule so far
	swapped  float64       // smoothed part of the granules that had to be read from the swap device
	active   list          // published
	inactive list          // withdrawn, resident
	changed  chan struct{} // closed and replaced by changeLocked
	waiting  int           // number of waiters for changed
	drivers  map[*Driver]struct{}
	mappings map[mappingKey]*mapping // that another connection may share
	files    map[fileKey]*keptFile
	counters counters
}

// counters of a Budget, over all its drivers, present and past.
type counters struct {
	evictions, refaults, withdrawals, discarded uint64
	faults, failed                              uint64 // of closed drivers
	delayed                                     uint64 // faults, and holds, that found memory short
	longest                                     time.Duration
	heat                                        translate.HeatMap
	unlocked                                    string // why some memory is not locked
}

// NewBudget returns a Budget of limit bytes, at least MinBudget; 0: no limit.
func NewBudget(limit uint64) *Budget {
	if limit != 0 {
		limit = max(limit, MinBudget)
	}
	return &Budget{limit: limit, space: addressSpace, fill: populate,
		changed: make(chan struct{}), drivers: make(map[*Driver]struct{}),
		mappings: make(map[mappingKey]*mapping), files: make(map[fileKey]*keptFile)}
}

// SetWork sets the account of the processor time that paging takes. It is called before the first Driver exists.
func (b *Budget) SetWork(a *worktime.Account) { b.work = a }

// granule is the unit in which memory becomes resident and is evicted.
type granule struct {
	m     *mapping
	index uint64 // within m
	in    uint32 // views in whose tables it is published
	state state
	holds int    // > 0: active and on no list
	drain *drain // inactive, leaving: epochs that may still use it

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
	from, to := g.m.span(g.index)
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

// bring makes granule i of r resident and published. It may wait, for the kernel or for epochs to drain. It returns
// the memory's error (translate.ErrMemoryGone, ErrShort), errGone if the slot is being removed, ErrBudget for hold, or
// ctx's error.
func (b *Budget) bring(ctx context.Context, r *region, i uint64, hold bool) (*granule, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var room uint64 // reserved for the granule
	defer func() { b.giveLocked(room) }()
	for m := r.m; ; {
		g := m.granules[i]
		switch {
		case r.gone:
			return nil, errGone
		case g == nil && room == 0 && m.counted():
			n := uint64(len(m.bytes(i)))
			if err := b.takeLocked(ctx, n); err != nil {
				return nil, err
			}
			room = n
		case g == nil:
			g = &granule{m: m, index: i, state: filling}
			room = 0
			if err := b.fillLocked(r, g); err != nil {
				return nil, err
			}
			return g, b.useLocked(r, g, hold)
		case g.busy():
			if err := b.waitLocked(ctx); err != nil {
				return nil, err
			}
		default:
			return g, b.useLocked(r, g, hold)
		}
	}
}

// fillLocked makes g resident, for r. The caller has reserved room for it; on an error the room is released. It drops
// the mutex meanwhile.
func (b *Budget) fillLocked(r *region, g *granule) error {
	m := g.m
	m.granules[g.index] = g
	if !m.counted() {
		b.huge += g.size()
	}
	m.users++
	b.mu.Unlock()
	read := false
	err := r.d.contain(func() (err error) {
		if err = b.host.admit(g); err == nil {
			read, err = m.populate(g.index)
		}
		return err
	})
	b.mu.Lock()
	m.users--
	if err == nil {
		b.readLocked(read)
	}
	if err == nil && r.gone {
		err = errGone
	}
	if err == nil {
		// Only this package writes the table, so an error is a bug; it is returned all the same.
		err = r.publish(g)
	}
	if err != nil {
		m.discard(g.index)
		b.forgetLocked(g)
		return err
	}
	g.state = active
	b.changeLocked()
	return nil
}

// forgetLocked removes g, which is on no list.
func (b *Budget) forgetLocked(g *granule) {
	delete(g.m.granules, g.index)
	if n := g.size(); g.m.counted() {
		b.used -= n
	} else {
		b.huge -= n
	}
	b.changeLocked()
}

// useLocked publishes g for r if it is not, and puts it on the active list, or removes it from there to hold it.
func (b *Budget) useLocked(r *region, g *granule, hold bool) error {
	if g.in&r.view == 0 {
		if err := r.publish(g); err != nil {
			return err
		}
	}
	if g.state == inactive {
		g.unlist()
		g.state, g.drain = active, nil
		b.counters.refaults++
	}
	counted := g.m.counted()
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
		r.held[g]++
	}
	b.trimLocked()
	return nil
}

// releaseLocked ends n holds of g by r.
func (b *Budget) releaseLocked(r *region, g *granule, n int) {
	if r.held[g] -= n; r.held[g] == 0 {
		delete(r.held, g)
	}
	if g.holds -= n; g.holds > 0 || !g.m.counted() {
		return
	}
	b.held -= g.size()
	b.active.push(g)
	b.changeLocked()
}

// abandon ends a region that was never in a table.
func (b *Budget) abandon(r *region) {
	b.mu.Lock()
	m := r.m
	m.drop(r)
	for m.gone && m.users > 0 {
		_ = b.waitLocked(context.Background()) // another connection is removing it
	}
	b.mu.Unlock()
	if m.gone {
		b.finish(removal{last: []*mapping{m}})
	}
}

// removal is the end of some regions of one Driver.
type removal struct {
	last    []*mapping // that no connection has any more
	shared  []*mapping // that others still have
	orphans []*granule // of these, published by nobody any more: discarded after the drain
	drain   *drain     // of the Driver
}

// withdrawAll removes regions of one Driver from its table. It waits until nothing in this package uses mappings that
// no other connection has.
func (b *Budget) withdrawAll(d *Driver, rs []*region) (rm removal, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range rs {
		r.gone = true
		if err := d.space.Unmap(translate.PA(r.GuestPA), r.Size); err != nil {
			return removal{}, err
		}
		for g, n := range r.held {
			b.releaseLocked(r, g, n) // later releases do nothing
		}
		for _, g := range r.m.granules {
			g.in &^= r.view
		}
		r.m.drop(r)
	}
	rm.drain = new(drain)
	rm.drain.add(d)
	rm.drain.flip()
	for _, r := range rs {
		switch m := r.m; {
		case slices.Contains(rm.last, m) || slices.Contains(rm.shared, m):
		case m.gone:
			rm.last = append(rm.last, m)
			for _, g := range m.granules {
				g.unlist()
			}
		default:
			// Until the drain has ended, loops may use the memory by the removed entries: it stays mapped, and evictions
			// wait for this drain, too.
			rm.shared = append(rm.shared, m)
			m.users++
			m.parting = append(m.parting, rm.drain)
			for _, g := range m.granules {
				if g.in == 0 && g.state == active {
					g.unlist()
					g.state = leaving
					rm.orphans = append(rm.orphans, g)
				}
			}
		}
	}
	b.changeLocked()
	for _, m := range rm.last {
		for m.users > 0 {
			_ = b.waitLocked(context.Background())
		}
	}
	return rm, nil
}

// drop removes a view.
func (m *mapping) drop(r *region) {
	m.views = slices.DeleteFunc(m.views, func(v *region) bool { return v == r })
	if m.gone = len(m.views) == 0; m.gone && m.b.mappings[m.key] == m {
		delete(m.b.mappings, m.key)
	}
}

// finish ends a removal that has drained: memory that nobody uses any more is returned to the kernel and forgotten.
func (b *Budget) finish(rm removal) {
	for _, m := range rm.last {
		m.close()
	}
	for _, g := range rm.orphans {
		g.m.discard(g.index)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range rm.last {
		for _, g := range m.granules {
			b.forgetLocked(g)
		}
	}
	for _, g := range rm.orphans {
		b.forgetLocked(g)
	}
	for _, m := range rm.shared {
		m.users--
		m.parting = slices.DeleteFunc(m.parting, func(d *drain) bool { return d == rm.drain })
	}
	b.changeLocked()
}
