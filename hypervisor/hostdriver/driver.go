// Package hostdriver owns stage two (PF-2): it maps the memory that a front end
// hands over, makes it resident, and only then publishes it in the VM's
// translate.Space; when memory is taken away it removes the entries, waits until
// no loop uses them, and only then unmaps (EP-2, EP-3).
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

// region is a mapped Slot.
type region struct {
	Slot
	whole []byte // what mmap returned: may begin before the slot (huge pages)
	host  []byte // the slot within whole
}

// Driver maps the memory of one front end into one Space.
//
// The next step, paging on demand, replaces the populating in AddSlot: slots
// are then reserved at once and published page by page.
type Driver struct {
	space *translate.Space
	log   hclog.Logger

	mu       sync.Mutex // guards all below; never held while an epoch drains
	regions  []*region
	closed   bool
	warned   bool // of a file that may shrink
	draining sync.WaitGroup
}

// New returns a Driver without memory.
func New(space *translate.Space, log hclog.Logger) *Driver {
	return &Driver{space: space, log: log.Named("memory")}
}

// AddSlot maps the slot, makes all of it resident and publishes it. FD is
// borrowed for the call: it is neither kept nor closed (the mapping keeps the
// file). It blocks while memory is populated. On error nothing has changed.
func (d *Driver) AddSlot(s Slot) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.checkLocked(&s); err != nil {
		return err
	}
	f, err := inspect(s.FD)
	if err != nil {
		return fmt.Errorf("memory slot at %#x: %w", s.GuestPA, err)
	}
	if end := s.Offset + s.Size; end < s.Size || end > f.size {
		return fmt.Errorf("memory slot at %#x: file has %#x bytes, slot needs %#x at offset %#x: %w", s.GuestPA, f.size, s.Size, s.Offset, ErrFile)
	}
	if !f.keepsSize && !d.warned {
		d.warned = true
		d.log.Warn("guest memory file is not sealed against shrinking: if it shrinks, the VM loses its device", "guest_pa", hclog.Fmt("%#x", s.GuestPA))
	}
	r := &region{Slot: s}
	r.FD = -1
	if err := r.mmap(s.FD, f.block); err != nil {
		return fmt.Errorf("memory slot at %#x, %#x bytes: %w", s.GuestPA, s.Size, err)
	}
	err = r.populate()
	if err == nil {
		err = d.space.Map(translate.PA(s.GuestPA), r.host)
	}
	if err != nil {
		r.munmap(d.log)
		return fmt.Errorf("memory slot at %#x, %#x bytes: %w", s.GuestPA, s.Size, err)
	}
	d.regions = append(d.regions, r)
	d.log.Debug("slot added", "guest_pa", hclog.Fmt("%#x", s.GuestPA), "size", hclog.Fmt("%#x", s.Size))
	return nil
}

func (d *Driver) checkLocked(s *Slot) error {
	const mask = translate.PageSize - 1
	switch {
	case d.closed:
		return ErrClosed
	case len(d.regions) >= MaxSlots:
		return fmt.Errorf("memory slots: %d exist: %w", len(d.regions), translate.ErrLimit)
	case s.Size == 0 || (s.GuestPA|s.Size|s.UserAddr|s.Offset)&mask != 0:
		return fmt.Errorf("memory slot at %#x: size %#x, user address %#x, offset %#x: expected multiples of %#x, size not 0: %w",
			s.GuestPA, s.Size, s.UserAddr, s.Offset, translate.PageSize, translate.ErrInvalid)
	case s.GuestPA >= uint64(translate.MaxPA) || s.Size > uint64(translate.MaxPA)-s.GuestPA:
		return fmt.Errorf("memory slot at %#x: ends beyond %v, size %#x: %w", s.GuestPA, translate.MaxPA, s.Size, translate.ErrInvalid)
	case !s.fits(s.UserAddr):
		return fmt.Errorf("memory slot at %#x: user address %#x and size %#x wrap around: %w", s.GuestPA, s.UserAddr, s.Size, translate.ErrInvalid)
	}
	for _, r := range d.regions {
		if overlap(s.UserAddr, s.Size, r.UserAddr, r.Size) || overlap(s.GuestPA, s.Size, r.GuestPA, r.Size) {
			return fmt.Errorf("memory slot at %#x (user %#x), %#x bytes, and slot at %#x (user %#x), %#x bytes: %w",
				s.GuestPA, s.UserAddr, s.Size, r.GuestPA, r.UserAddr, r.Size, translate.ErrOverlap)
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

// Close takes all slots away, as RemoveSlot does. It is idempotent, and when it
// returns no memory is mapped any more.
func (d *Driver) Close() {
	d.mu.Lock()
	rs := d.regions
	d.regions, d.closed = nil, true
	d.mu.Unlock()
	if len(rs) > 0 {
		d.release(rs)
	}
	d.draining.Wait()
}

// drainPatience is how long an epoch may take before it is reported.
const drainPatience = time.Second

// release removes regions from stage two, waits, and unmaps them.
func (d *Driver) release(rs []*region) {
	for _, r := range rs {
		if err := d.space.Unmap(translate.PA(r.GuestPA), r.Size); err != nil {
			// Only this driver writes the table, so this is a bug; the memory
			// stays mapped rather than be pulled away under a reader.
			d.log.Error("slot is not in the table", "err", err)
			return
		}
	}
	drain := d.space.Epochs().Flip()
	start := time.Now()
	for wait := drainPatience; ; wait *= 2 {
		ctx, cancel := context.WithTimeout(context.Background(), wait)
		err := drain.Wait(ctx)
		cancel()
		if err == nil {
			break
		}
		d.log.Warn("memory is still in use by the device, removal waits", "gvmi", d.space.GVMI(), "since", time.Since(start).Round(time.Millisecond))
	}
	for _, r := range rs {
		r.munmap(d.log)
		d.log.Debug("slot removed", "guest_pa", hclog.Fmt("%#x", r.GuestPA), "size", hclog.Fmt("%#x", r.Size))
	}
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
