// Package hostdriver owns stage two (PF-2). It maps the memory that a front end sends. When the device needs a page
// (PF-7), it makes the page resident, locks it, and only then publishes it in the VM's translate.Space. When memory is
// removed, or must be evicted because the VM's budget is used up or the host is short of memory, it removes the
// entries, waits until no loop uses them, and only then releases the memory (PF-14, EP-2, EP-3).
package hostdriver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/hypervisor/loglimit"
	"github.com/vnicd/vnicd/translate"
)

// MaxSlots bounds the memory slots of one Driver; QEMU uses at most 509.
const MaxSlots = 512

// Errors of Driver. Those of translate (ErrInvalid, ErrOverlap) occur too.
var (
	ErrNoSlot = errors.New("no such memory slot")
	ErrClosed = errors.New("memory of this connection is closed")
	ErrFile   = errors.New("file cannot serve as guest memory")
)

// Slot is one contiguous piece of guest memory, as in vhost-user's memory
// region description. All but FD are multiples of the page size.
type Slot struct {
	GuestPA  uint64
	Size     uint64 // bytes, > 0
	UserAddr uint64 // the front end's address of it, used in ring addresses
	FD       int    // a memfd, or a file in tmpfs or hugetlbfs; borrowed, see AddSlot
	Offset   uint64 // of the slot in that file
}

// fits reports whether Size bytes from a on do not wrap around.
func (s *Slot) fits(a uint64) bool { return a+s.Size > a || a+s.Size == 0 }

// Options of a Driver.
type Options struct {
	// Budget bounds the resident memory, and is shared by the connections of a VM; nil: no limit.
	Budget *Budget
	// Clock is replaced by tests; nil: the system's.
	Clock Clock
	// Broken, if set, is called after a bug that the Driver met and survived, and logged: the connection should end. It
	// does not wait.
	Broken func()
}

// Clock is the time, and timers.
type Clock interface {
	Now() time.Time
	// AfterFunc calls f on another goroutine after that time, unless stop is called before.
	AfterFunc(after time.Duration, f func()) (stop func() bool)
}

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

func (systemClock) AfterFunc(after time.Duration, f func()) func() bool {
	return time.AfterFunc(after, f).Stop
}

// Driver maps the memory of one front end into one Space and serves that
// Space's faults.
type Driver struct {
	space *translate.Space
	log   hclog.Logger
	opts  Options

	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	servers sync.WaitGroup
	broken  atomic.Bool // a bug was met

	mu       sync.Mutex // guards the fields below; never held while an epoch drains
	regions  []*region
	closed   bool
	warned   bool // about a file that may shrink
	draining sync.WaitGroup

	late late
}

// contain runs f, work for this connection. A panic of f, or an error of one, ends the connection and not the process
// (TR-6).
func (d *Driver) contain(f func() error) error {
	err := translate.Contain(f)
	if stack := translate.StackOf(err); stack != "" && !d.broken.Swap(true) {
		d.log.Error("device ended by a bug in vnicd; please report it", "gvmi", d.space.GVMI(), "error", err, "stack", stack)
		if d.opts.Broken != nil {
			d.opts.Broken()
		}
	}
	return err
}

// servers is the number of goroutines per Driver that serve faults, and so of faults that wait for the swap device.
const servers = 8

// New returns a Driver without memory, which serves the faults of space until Close.
func New(space *translate.Space, log hclog.Logger, opts Options) *Driver {
	if opts.Budget == nil {
		opts.Budget = NewBudget(0)
	}
	if opts.Clock == nil {
		opts.Clock = systemClock{}
	}
	d := &Driver{space: space, log: loglimit.New(log).Named("memory"), opts: opts}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	d.late.init(d.opts.Clock, d.space.Faults(), d.log)
	d.opts.Budget.join(d)
	for range servers {
		d.servers.Go(d.serve)
	}
	return d
}

// AddSlot maps the slot, or shares the mapping of another connection of the VM. Its pages become resident and appear in
// the Space at their first fault, so the time this takes does not depend on the size. FD is borrowed for the call. On
// error nothing has changed.
func (d *Driver) AddSlot(s Slot) error {
	if err := d.add(s); err != nil {
		return fmt.Errorf("memory slot at %#x, %#x bytes: %w", s.GuestPA, s.Size, err)
	}
	d.log.Debug("slot added", "guest_pa", hclog.Fmt("%#x", s.GuestPA), "size", hclog.Fmt("%#x", s.Size))
	return nil
}

func (d *Driver) add(s Slot) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.checkLocked(&s); err != nil {
		return err
	}
	f, err := inspect(s.FD)
	if err != nil {
		return err
	}
	if end := s.Offset + s.Size; end < s.Size || end > f.size {
		return fmt.Errorf("file has %#x bytes, slot begins at offset %#x: %w", f.size, s.Offset, ErrFile)
	}
	have := uint64(0)
	for _, r := range d.regions {
		have += r.Size
	}
	if err := d.opts.Budget.checkShared(s.Size, have); err != nil {
		return err
	}
	if !f.keepsSize && !d.warned {
		d.warned = true
		d.log.Warn("guest memory file is not sealed against shrinking; if it shrinks, the VM loses its device", "guest_pa",
			hclog.Fmt("%#x", s.GuestPA))
	}
	r, err := d.newRegion(s, f)
	if err != nil {
		return err
	}
	if err := d.space.Reserve(translate.PA(s.GuestPA), s.Size); err != nil {
		d.opts.Budget.abandon(r)
		return err
	}
	d.regions = append(d.regions, r)
	return nil
}

func (d *Driver) checkLocked(s *Slot) error {
	const mask = translate.PageSize - 1
	switch {
	case d.closed:
		return ErrClosed
	case len(d.regions) >= MaxSlots:
		return fmt.Errorf("%d slots exist: %w", len(d.regions), translate.ErrLimit)
	case s.Size == 0 || (s.GuestPA|s.Size|s.UserAddr|s.Offset)&mask != 0:
		return fmt.Errorf("user address %#x, offset %#x: expected multiples of %#x everywhere, size not 0: %w",
			s.UserAddr, s.Offset, translate.PageSize, translate.ErrInvalid)
	case s.GuestPA >= uint64(translate.MaxPA) || s.Size > uint64(translate.MaxPA)-s.GuestPA:
		return fmt.Errorf("ends beyond %v: %w", translate.MaxPA, translate.ErrInvalid)
	case !s.fits(s.UserAddr):
		return fmt.Errorf("user address %#x and size wrap around: %w", s.UserAddr, translate.ErrInvalid)
	}
	for _, r := range d.regions {
		if overlap(s.UserAddr, s.Size, r.UserAddr, r.Size) || overlap(s.GuestPA, s.Size, r.GuestPA, r.Size) {
			return fmt.Errorf("user address %#x; there is one at %#x, %#x bytes, user address %#x: %w", s.UserAddr, r.GuestPA,
				r.Size, r.UserAddr, translate.ErrOverlap)
		}
	}
	return nil
}

// overlap compares ranges that do not wrap, neither of them empty.
func overlap(a, an, b, bn uint64) bool { return a <= b+(bn-1) && b <= a+(an-1) }

// RemoveSlot removes the slot that has exactly these values, or returns ErrNoSlot. It waits until no loop uses the
// memory, then unmaps it. It must not be called on a loop.
func (d *Driver) RemoveSlot(guestPA, size, userAddr uint64) error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return ErrClosed
	}
	for i, r := range d.regions {
		if r.GuestPA == guestPA && r.Size == size && r.UserAddr == userAddr {
			d.regions = append(d.regions[:i], d.regions[i+1:]...)
			d.draining.Add(1)
			d.mu.Unlock()
			defer d.draining.Done()
			d.release([]*region{r})
			d.late.hurry() // faults of the slot end now
			return nil
		}
	}
	d.mu.Unlock()
	return fmt.Errorf("memory slot at %#x, %#x bytes, user address %#x: %w", guestPA, size, userAddr, ErrNoSlot)
}

// Close removes all slots, as RemoveSlot does, and ends the service. Waiting faults end with an error. It is
// idempotent. When it returns, no memory is mapped or locked. Faults must no longer be raised in the Space when it is
// called.
func (d *Driver) Close() {
	d.mu.Lock()
	rs := d.regions
	d.regions, d.closed = nil, true
	d.mu.Unlock()
	d.cancel()
	if len(rs) > 0 {
		d.release(rs)
	}
	d.draining.Wait()
	d.servers.Wait()
	d.late.close()
	for q := d.space.Faults(); ; {
		f := q.TryNext()
		if f == nil {
			break
		}
		q.Finish(f, ErrClosed)
	}
	d.opts.Budget.leave(d)
}

// release removes regions from stage two, waits until nothing uses them, and unmaps them.
func (d *Driver) release(rs []*region) {
	rm, err := d.opts.Budget.withdrawAll(d, rs)
	if err != nil {
		// Only this driver writes the table, so this is a bug. The memory stays mapped, since a reader may use it.
		d.log.Error("slot is not in the table", "err", err)
		return
	}
	_ = rm.drain.wait(context.Background())
	d.opts.Budget.finish(rm)
	for _, r := range rs {
		d.log.Debug("slot removed", "guest_pa", hclog.Fmt("%#x", r.GuestPA), "size", hclog.Fmt("%#x", r.Size))
	}
}

// drainPatience is how long a drain may take before it is logged.
const drainPatience = time.Second

// drained waits until nothing uses the memory removed before e's flip. A long wait is logged with its holder; only ctx
// ends it early.
func (d *Driver) drained(ctx context.Context, e *translate.Drain) error {
	return e.WaitWarn(ctx, drainPatience, func(since time.Duration, held []string) {
		d.log.Warn("release waits: guest memory still in use", "gvmi", d.space.GVMI(), "since", since.Round(time.Millisecond),
			"by", held)
	})
}

// UserToPA translates an address of the front end, as in vhost-user ring
// addresses. All of [userAddr, userAddr+n) must lie in one slot.
func (d *Driver) UserToPA(userAddr, n uint64) (translate.PA, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.regions {
		if off := userAddr - r.UserAddr; userAddr >= r.UserAddr && off < r.Size && n <= r.Size-off {
			return translate.PA(r.GuestPA + off), true
		}
	}
	return 0, false
}

// Slots returns the present slots, with FD -1.
func (d *Driver) Slots() []Slot {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := make([]Slot, len(d.regions))
	for i, r := range d.regions {
		s[i] = r.Slot
	}
	return s
}
