package translate

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// Epochs tells when memory that was taken out of the tables is no longer in
// use (EP-1..5). There is one per Space, so one VM never waits for another.
//
// How it works. Each slot (one per loop, in cache lines of its own) has a small
// ring of counters; a reader counts itself in the one that the current epoch
// selects, and out of the same one. A release is done once every counter has
// been seen at zero at some moment after the release was asked for: whoever was
// inside has then left, and whoever enters later finds the tables already
// changed. That argument does not depend on which counter a reader chose, so a
// reader that loaded the epoch and was then delayed does no harm and never has
// to retry. The epoch number only provides progress: a flip moves new readers
// to a counter that is empty, so the others can only fall (EP-4).
//
// Flipping needs an empty counter to move to. If epochRing-1 earlier epochs are
// all held by slow readers, a release is kept and flips as soon as one is free;
// it then also waits for readers that came after it, once.
type Epochs struct {
	current atomic.Uint64 // read by every Enter, written by flips only
	wanted  atomic.Uint32 // bit i: signal when ring counter i falls to zero; read by every Leave
	_       [116]byte

	slots [epochSlots]epochSlot

	mu     sync.Mutex // guards all below
	drains []*Drain   // not done yet, oldest first
	namer  func(slot int) string
	stats  EpochStats

	signal atomic.Pointer[func()]
}

// EpochStats counts releases.
type EpochStats struct {
	Flips   uint64        // times the epoch moved on; one may serve several releases
	Drains  uint64        // releases that are done
	Longest time.Duration // that one of them took
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

// Token is what Enter returned; Leave takes it back, once.
type Token uint8

// Enter counts a batch of operations into the current epoch. slot is a small
// number, best Loop.ID; it is taken modulo 16 and may be shared. Host memory
// that a lookup returns may be used until the matching Leave. An operation that
// has to wait for anything must leave first (architecture.md, decision 5).
func (e *Epochs) Enter(slot int) Token {
	i := e.current.Load() % epochRing
	e.slots[uint(slot)%epochSlots].n[i].Add(1)
	return Token(i)
}

// Leave counts the batch out. It panics when there was no matching Enter.
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
	flipped bool              // readers have been moved on since it was asked for
	waiting [epochSlots]uint8 // bit i: ring counter i not yet seen at zero
	done    bool
}

// Flip starts a release: call it after the entries have been removed from the
// tables (EP-2). It does not block.
func (e *Epochs) Flip() *Drain {
	d := new(Drain)
	e.begin(d)
	return d
}

// begin is Flip into memory of the caller's, which is not in use: done, or new.
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

// Alone reports whether nobody is inside but the caller, who has entered once, by
// slot. Then nobody uses what was taken out of the tables before the call: it is as
// good as a Drain that is done, costs no lock, and may be asked from inside.
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

// Done reports whether everything that was inside when the release was asked
// for has left (EP-3). It never blocks; once true it stays true.
func (d *Drain) Done() bool {
	d.e.mu.Lock()
	defer d.e.mu.Unlock()
	if !d.done {
		d.e.advanceLocked()
	}
	return d.done
}

// DoneOrSignal is Done; if it is false, what SetSignal named is called when readers
// have left for whom the release waits, and DoneOrSignal is to be called again then.
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
		want = 1 << ((e.current.Load() + 1) % epochRing) // it has to be empty first
	}
	for _, w := range d.waiting {
		want |= w
	}
	if !d.done {
		// Whoever leaves from here on sees the bits, and who has left is seen by us.
		e.wanted.Or(uint32(want))
		e.advanceLocked()
	}
	return d.done
}

// SetSignal names the function for DoneOrSignal, in place of any before it. It is
// called by whoever leaves, so it must not block.
func (e *Epochs) SetSignal(f func()) { e.signal.Store(&f) }

// advanceLocked looks at every counter once, on behalf of all releases, and
// flips for those that still need it. A counter that readers are about to be
// moved to is among those seen at zero, so no release waits for readers who
// come after its flip.
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

// Wait blocks until Done or until ctx ends, in which case it returns ctx's
// error and may be called again. Never call it between Enter and Leave.
func (d *Drain) Wait(ctx context.Context) error {
	// Batches last microseconds, so the first looks come without a timer.
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

// WaitWarn is Wait that calls warn whenever the release has taken patience,
// twice that, four times that and so on, with the time since Flip and what Held
// returns then.
func (d *Drain) WaitWarn(ctx context.Context, patience time.Duration, warn func(since time.Duration, held []string)) error {
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

// Held names the slots that the release still waits for; none if it is done.
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

// SetNamer has name called when Held wants to name a slot, which is in 0..15.
// It may be called at any time, on any goroutine.
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
