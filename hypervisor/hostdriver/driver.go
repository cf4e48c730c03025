// Package hostdriver owns stage two (PF-2): it maps the memory that a front end
// hands over, and when the device asks for a page (PF-7) makes it resident, keeps
// it so, and only then publishes it in the VM's translate.Space. When memory is
// taken away, or has to be given back because the VM's budget is used up, it
// removes the entries, waits until no loop uses them, and only then lets go
// (PF-14, EP-2, EP-3).
package hostdriver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

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
	UserAddr uint64 // where the front end has it mapped: names it in ring addresses
	FD       int    // a memfd, or a file in tmpfs or hugetlbfs; borrowed, see AddSlot
	Offset   uint64 // of the slot in that file
}

// fits reports whether Size bytes from a on do not wrap around.
func (s *Slot) fits(a uint64) bool { return a+s.Size > a || a+s.Size == 0 }

// Options of a Driver.
type Options struct {
	// Budget bounds what is resident; nil: one without a limit.
	Budget *Budget
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

	mu       sync.Mutex // guards all below; never held while an epoch drains
	regions  []*region
	closed   bool
	warned   bool // of a file that may shrink
	draining sync.WaitGroup
}

// servers of one Driver: as many faults may wait for the swap device at once.
const servers = 8

// New returns a Driver without memory, which serves the faults of space until
// Close.
func New(space *translate.Space, log hclog.Logger, opts Options) *Driver {
	if opts.Budget == nil {
		opts.Budget = NewBudget(0)
	}
	d := &Driver{space: space, log: log.Named("memory"), opts: opts}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	d.opts.Budget.join(d)
	for range servers {
		d.servers.Go(d.serve)
	}
	return d
}

// AddSlot maps the slot; its pages become resident and appear in the Space when
// they are asked for, so the time this takes does not depend on the size. FD is
// borrowed for the call: it is neither kept nor closed (the mapping keeps the
// file). On error nothing has changed.
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
		r.munmap()
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

// RemoveSlot takes away the slot that has exactly these values, or ErrNoSlot.
// It blocks until no loop uses the memory, then unmaps it. Never call it on a
// loop.
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
			return nil
		}
	}
	d.mu.Unlock()
	return fmt.Errorf("memory slot at %#x, %#x bytes, user address %#x: %w", guestPA, size, userAddr, ErrNoSlot)
}

// Close takes all slots away, as RemoveSlot does, and ends the service. Every
// fault that waits ends with an error. It is idempotent, and when it returns no
// memory is mapped or locked any more. Whoever raises faults in the Space has to
// stop before.
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
	for q := d.space.Faults(); ; {
		f := q.TryNext()
		if f == nil {
			break
		}
		q.Finish(f, ErrClosed)
	}
	d.opts.Budget.leave(d)
}

// release takes regions out of stage two, waits until nobody uses them, and
// unmaps them.
func (d *Driver) release(rs []*region) {
	if err := d.opts.Budget.withdrawAll(rs); err != nil {
		// Only this driver writes the table, so this is a bug; the memory
		// stays mapped rather than be pulled away under a reader.
		d.log.Error("slot is not in the table", "err", err)
		return
	}
	_ = d.drained(context.Background(), d.space.Epochs().Flip())
	for _, r := range rs {
		r.munmap()
		d.log.Debug("slot removed", "guest_pa", hclog.Fmt("%#x", r.GuestPA), "size", hclog.Fmt("%#x", r.Size))
	}
	d.opts.Budget.forgetAll(rs)
}

// drainPatience is how long an epoch may take before it is reported.
const drainPatience = time.Second

// drained waits until nobody uses what was taken away before e's flip. A wait
// that is long is reported, with who holds it, and never cut short but by ctx.
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
