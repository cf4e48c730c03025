package translate

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// Epochs determines when memory that was removed from the tables is no longer in use (EP-1..5). There is one per Space,
// so one VM never waits for another.
//
// Each slot (one per loop, on separate cache lines) has a small ring of counters. A reader increments the
// counter that the current epoch selects, and later decrements the same one. A release is done once every counter has
// been seen at zero at some moment after the release was requested: all earlier readers have then left, and later
// readers find the changed tables. This holds whichever counter a reader chose, so a reader that loaded the epoch and
// was then delayed does no harm and never retries. The epoch number only provides progress: a flip directs new readers
// to a counter at zero, so the others can only fall (EP-4).
//
// A flip needs a counter at zero. If slow readers hold all epochRing-1 earlier epochs, a release is queued and flips as
// soon as one is free; it then also waits, once, for readers that entered after it.
type Epochs struct {
	current atomic.Uint64 // read by every Enter, written by flips only
	wanted  atomic.Uint32 // bit i: signal when ring counter i falls to zero; read by every Leave
	_       [116]byte

	slots [epochSlots]epochSlot

	mu     sync.Mutex // guards the fields below
	drains []*Drain   // not done yet, oldest first
	namer  func(slot int) string
	stats  EpochStats

	signal atomic.Pointer[func()]
}

// EpochStats counts releases.
type EpochStats struct {
	Flips   uint64        // changes of epoch; one may serve several releases
	Drains  uint64        // completed releases
	Longest time.Duration // the longest of them
}

const (
	epochSlots = 16
	epochRing  = 8
)

// epochSlot is 128 bytes: two cache lines, for the adjacent-line prefetcher.
type epochSlot struct {
	n [epochRing]atomic.Int64
	_ [64]byte
}

// Token is returned by Enter and passed to Leave, once.
type Token uint8

// Enter counts a batch of operations into the current epoch, in the caller's reader slot: a small number, Loop.ID for a
// loop, taken modulo 16, that may be shared. It panics if the caller is not guarded against memory faults. Host memory
// that a lookup returns may be used until the matching Leave. An operation that must wait must leave first: a waiting
// reader blocks every release.
func (e *Epochs) Enter(g Guarded) Token {
	if g.slot == 0 {
		panic("translate: Epochs.Enter by a caller that is not guarded")
	}
	i := e.current.Load() % epochRing
	e.slots[(g.slot-1)%epochSlots].n[i].Add(1)
	return Token(i)
}

// Leave ends the batch. It panics if there was no matching Enter.
func (e *Epochs) Leave(slot int, t Token) {
	switch n := e.slots[uint(slot)%epochSlots].n[t%epochRing].Add(-1); {
	case n < 0:
		panic("translate: Epochs.Leave without Enter")
	case n == 0 && e.wanted.Load()&(1<<(t%epochRing)) != 0:
		if f := e.signal.Load(); e.wanted.Swap(0) != 0 && f != nil {
			(*f)()
		}
	}
}

// Drain is one release that waits for earlier readers.
type Drain struct {
	e     *Epochs
	since time.Time

	// Guarded by e.mu.
	flipped bool              // the epoch has changed since it was requested
	waiting [epochSlots]uint8 // bit i: ring counter i not yet seen at zero
	done    bool
}

// Flip starts a release. Call it after removing the entries from the tables (EP-2). It does not block.
func (e *Epochs) Flip() *Drain {
	d := new(Drain)
	e.begin(d)
	return d
}

// begin is Flip with the caller's storage: a Drain that is new or done.
func (e *Epochs) begin(d *Drain) {
	*d = Drain{e: e, since: time.Now()}
	for i := range d.waiting {
		d.waiting[i] = 1<<epochRing - 1
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.drains = append(e.drains, d)
	e.advanceLocked()
}

// Alone reports whether the caller, which has entered once with slot, is the only reader. If so, nothing uses entries
// that were removed before the call: true is equivalent to a completed Drain. It takes no lock and may be called
// between Enter and Leave.
func (e *Epochs) Alone(slot int) bool {
	own := uint(slot) % epochSlots
	n := int64(0)
	for s := range e.slots {
		for i := range epochRing {
			k := e.slots[s].n[i].Load()
			if k != 0 && uint(s) != own {
				return false
			}
			n += k
		}
	}
	return n == 1
}

// Done reports whether every reader that was inside when the release was requested has left (EP-3). It never blocks;
// once true it stays true.
func (d *Drain) Done() bool {
	d.e.mu.Lock()
	defer d.e.mu.Unlock()
	if !d.done {
		d.e.advanceLocked()
	}
	return d.done
}

// DoneOrSignal is Done. If it returns false, the function given to SetSignal is called once readers that the release
// waits for have left; call DoneOrSignal again then.
func (d *Drain) DoneOrSignal() bool {
	e := d.e
	e.mu.Lock()
	defer e.mu.Unlock()
	if d.done {
		return true
	}
	e.advanceLocked()
	var want uint8
	if !d.flipped {
		want = 1 << ((e.current.Load() + 1) % epochRing) // it must be at zero first
	}
	for _, w := range d.waiting {
		want |= w
	}
	if !d.done {
		// Readers that leave from here on see the bits; those that left before are seen by advanceLocked.
		e.wanted.Or(uint32(want))
		e.advanceLocked()
	}
	return d.done
}

// SetSignal sets the function for DoneOrSignal and replaces any earlier one. Leaving readers call it, so it must not
// block.
func (e *Epochs) SetSignal(f func()) { e.signal.Store(&f) }

// advanceLocked reads every counter once for all releases, and flips for those that still need it. The counter that new
// readers will use is among those seen at zero, so no release waits for readers that enter after its flip.
func (e *Epochs) advanceLocked() {
	next := e.current.Load() + 1
	canFlip, wantFlip := true, false
	var zero [epochSlots]uint8
	for s := range e.slots {
		for i := range epochRing {
			if e.slots[s].n[i].Load() == 0 {
				zero[s] |= 1 << i
			}
		}
		canFlip = canFlip && zero[s]&(1<<(next%epochRing)) != 0
	}
	left := e.drains[:0]
	for _, d := range e.drains {
		rest := uint8(0)
		for s := range zero {
			d.waiting[s] &^= zero[s]
			rest |= d.waiting[s]
		}
		if d.done = rest == 0; d.done {
			e.stats.Drains++
			e.stats.Longest = max(e.stats.Longest, time.Since(d.since))
		} else {
			left = append(left, d)
			wantFlip = wantFlip || !d.flipped
		}
	}
	clear(e.drains[len(left):])
	e.drains = left
	if wantFlip && canFlip {
		for _, d := range e.drains {
			d.flipped = true
		}
		e.current.Store(next)
		e.stats.Flips++
	}
}

// Wait blocks until Done, or until ctx ends; then it returns ctx's error and may be called again. It must not be called
// between Enter and Leave.
func (d *Drain) Wait(ctx context.Context) error {
	// Batches last microseconds, so the first checks use no timer.
	for range 64 {
		if d.Done() {
			return nil
		}
		runtime.Gosched()
	}
	const longest = 500 * time.Microsecond
	pause := 5 * time.Microsecond
	t := time.NewTimer(pause)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			if d.Done() {
				return nil
			}
			return ctx.Err()
		case <-t.C:
		}
		if d.Done() {
			return nil
		}
		pause = min(2*pause, longest)
		t.Reset(pause)
	}
}

// WaitWarn is Wait, and calls warn after patience, twice that, four times that, and so on, with the time since Flip and
// the result of Held.
func (d *Drain) WaitWarn(ctx context.Context, patience time.Duration,
	warn func(since time.Duration, held []string)) error {
	for patience = max(patience, time.Millisecond); ; patience *= 2 {
		turn, cancel := context.WithDeadline(ctx, d.since.Add(patience))
		err := d.Wait(turn)
		cancel()
		if err == nil {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		warn(time.Since(d.since), d.Held())
	}
}

// Held names the slots that the release waits for; none if it is done.
func (d *Drain) Held() []string {
	d.e.mu.Lock()
	namer := d.e.namer
	var slots []int
	if !d.done {
		d.e.advanceLocked()
		for s, waiting := range d.waiting {
			if waiting != 0 {
				slots = append(slots, s)
			}
		}
	}
	d.e.mu.Unlock()
	names := make([]string, len(slots))
	for i, s := range slots {
		if names[i] = fmt.Sprintf("slot %d", s); namer != nil {
			names[i] = namer(s)
		}
	}
	return names
}

// SetNamer sets the function by which Held names a slot, 0..15. It may be called at any time, from any goroutine.
func (e *Epochs) SetNamer(name func(slot int) string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.namer = name
}

// Stats returns the counters.
func (e *Epochs) Stats() EpochStats {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.stats
}
