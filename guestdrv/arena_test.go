package guestdrv_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vnicd/vnicd/guestdrv"
)

const (
	page    = 4096
	granule = 64 << 10 // unit of the host driver's paging
	canary  = 0xdb     // fills frames that must not be written to
)

// arena is a program's paged memory: it may have more pages than frames, with the rest in a store. Its Pager brings
// pages in; evict removes them. A released frame holds canaries, which reveal late writes.
type arena struct {
	tb     testing.TB
	h      *host
	base   uint64 // VA of page 0
	frames *guestdrv.Buffer
	stride int // between frames
	// hook, if set, runs before every PageIn; its error is PageIn's.
	hook func(ctx context.Context, f guestdrv.PageFault) error

	mu       sync.Mutex
	cond     sync.Cond // a page is no longer leaving
	mr       *guestdrv.OnDemandMR
	pages    []arenaPage
	free     []int // frames
	resident []int // pages, oldest first
	readOnly bool  // PageIn without Write gives pages read-only
}

type arenaPage struct {
	frame   int // -1: in store
	leaving bool
	store   []byte // nil: zeroes
}

// newArena makes an arena with that many pages and frames, and no resident page.
func newArena(tb testing.TB, h *host, base uint64, pages, frames int) *arena {
	tb.Helper()
	return newSparseArena(tb, h, base, pages, frames, page)
}

// newSparseArena places its frames stride bytes apart; a stride of a granule spreads them over as much host memory as
// possible.
func newSparseArena(tb testing.TB, h *host, base uint64, pages, frames, stride int) *arena {
	tb.Helper()
	a := &arena{tb: tb, h: h, base: base, stride: stride, pages: make([]arenaPage, pages)}
	a.cond.L = &a.mu
	// It has its own granules, so that no other user affects whether they are present on the host.
	size := (frames*stride + granule - 1) &^ (granule - 1)
	var err error
	if a.frames, err = h.AllocAligned(size, granule); err != nil {
		tb.Fatal(err)
	}
	for i := range a.pages {
		a.pages[i].frame = -1
	}
	for f := range frames {
		a.free = append(a.free, f)
	}
	for f := range frames {
		spoil(a.frame(f))
	}
	return a
}

// register registers an explicit region that covers the arena.
func (a *arena) register(access guestdrv.Access) *arena {
	a.tb.Helper()
	mr, err := a.h.pd.RegisterOnDemand(bg, a.base, uint64(len(a.pages)*page), access, a)
	if err != nil {
		a.tb.Fatal(err)
	}
	a.use(mr)
	return a
}

func (a *arena) use(mr *guestdrv.OnDemandMR) {
	a.mu.Lock()
	a.mr = mr
	a.mu.Unlock()
}

func (a *arena) frame(f int) []byte { return a.frames.Bytes()[f*a.stride:][:page] }

func spoil(b []byte) {
	for i := range b {
		b[i] = canary
	}
}

var errOutside = errors.New("no such page")

// PageIn implements guestdrv.Pager.
func (a *arena) PageIn(ctx context.Context, f guestdrv.PageFault, pas []uint64) error {
	if a.hook != nil {
		if err := a.hook(ctx, f); err != nil {
			return err
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if (f.VA-a.base)/page >= uint64(len(a.pages)) { // the end may be the end of the address space
		return errOutside
	}
	first := int((f.VA - a.base) / page)
	for i := range pas {
		if first+i >= len(a.pages) {
			return nil
		}
		p := &a.pages[first+i]
		for p.frame < 0 {
			switch {
			case !p.leaving && len(a.free) > 0:
				a.fillLocked(first + i)
			case i > 0:
				return nil
			case p.leaving:
				a.cond.Wait()
			case len(a.resident) > 0:
				a.evictLocked(a.resident[0])
			default:
				a.cond.Wait() // other evictions are in progress
			}
		}
		pas[i] = a.frames.PA() + uint64(p.frame*a.stride)
		if a.readOnly && !f.Write {
			pas[i] |= readOnlyPage
		}
	}
	return nil
}

// fillLocked gives a page a free frame.
func (a *arena) fillLocked(n int) {
	p := &a.pages[n]
	p.frame = a.free[len(a.free)-1]
	a.free = a.free[:len(a.free)-1]
	a.checkCanaries(p.frame)
	clear(a.frame(p.frame))
	copy(a.frame(p.frame), p.store)
	a.resident = append(a.resident, n)
}

func (a *arena) checkCanaries(f int) {
	for i, c := range a.frame(f) {
		if c != canary {
			a.tb.Errorf("released frame %d was written to: byte %d is %#x", f, i, c)
			return
		}
	}
}

// evictLocked withdraws a resident page from the device and releases its frame. It drops mu meanwhile.
func (a *arena) evictLocked(n int) {
	p := &a.pages[n]
	f, mr := p.frame, a.mr
	p.frame, p.leaving = -1, true
	for i, r := range a.resident {
		if r == n {
			a.resident = append(a.resident[:i], a.resident[i+1:]...)
			break
		}
	}
	a.mu.Unlock()
	err := mr.Invalidate(bg, a.va(n*page), page)
	a.mu.Lock()
	if err == nil { // otherwise the device has gone or still has the page: the frame is not reused
		if p.store == nil {
			p.store = make([]byte, page)
		}
		copy(p.store, a.frame(f))
		spoil(a.frame(f))
		a.free = append(a.free, f)
	} else if !errors.Is(err, guestdrv.ErrClosed) && !errors.Is(err, guestdrv.ErrDisconnected) {
		a.tb.Errorf("invalidating page %d: %v", n, err)
	}
	p.leaving = false
	a.cond.Broadcast()
}

// evict evicts page n if it is resident, and reports whether it was.
func (a *arena) evict(n int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.pages[n].frame < 0 {
		return false
	}
	a.evictLocked(n)
	return true
}

func (a *arena) evictAll() {
	for n := range a.pages {
		a.evict(n)
	}
}

// evictor evicts random pages of an arena until stop, a number for each unit of work: without a bound, operations might
// never find all their pages.
type evictor struct {
	credit atomic.Int64
	stop   func()
}

func (a *arena) startEvictor(seed uint64) *evictor {
	e := &evictor{}
	var stopped atomic.Bool
	var wg sync.WaitGroup
	e.stop = func() {
		stopped.Store(true)
		wg.Wait()
	}
	wg.Go(func() {
		for rng := rand.New(rand.NewPCG(seed, 5)); !stopped.Load(); {
			if e.credit.Load() <= 0 || !a.evict(rng.IntN(len(a.pages))) {
				time.Sleep(20 * time.Microsecond)
				continue
			}
			e.credit.Add(-1)
		}
	})
	return e
}

// worked lets e evict n more pages.
func (e *evictor) worked(n int64) { e.credit.Store(min(e.credit.Load()+n, 4*n)) }

// va is the address of byte off.
func (a *arena) va(off int) uint64 { return a.base + uint64(off) }

// settledLocked waits until a page is either in its frame or in store.
func (a *arena) settledLocked(n int) *arenaPage {
	for a.pages[n].leaving {
		a.cond.Wait()
	}
	return &a.pages[n]
}

// read copies n bytes from off on, from frames or store.
func (a *arena) read(off, n int) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []byte
	for n > 0 {
		p, in := a.settledLocked(off/page), off%page
		k := min(n, page-in)
		src := make([]byte, page)
		copy(src, p.store)
		if p.frame >= 0 {
			src = a.frame(p.frame)
		}
		out = append(out, src[in:in+k]...)
		off, n = off+k, n-k
	}
	return out
}

// write puts b at off, without making anything resident.
func (a *arena) write(off int, b []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(b) > 0 {
		p, in := a.settledLocked(off/page), off%page
		if p.store == nil {
			p.store = make([]byte, page)
		}
		dst := p.store
		if p.frame >= 0 {
			dst = a.frame(p.frame)
		}
		n := copy(dst[in:], b)
		off, b = off+n, b[n:]
	}
}

// check looks for late writes in all free frames.
func (a *arena) check() {
	a.tb.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range a.free {
		a.checkCanaries(f)
	}
}

// expect compares the arena's contents.
func (a *arena) expect(off int, want []byte, what string) {
	a.tb.Helper()
	if got := a.read(off, len(want)); !bytes.Equal(got, want) {
		i := 0
		for got[i] == want[i] {
			i++
		}
		a.tb.Errorf("%s: bytes differ from %d on", what, off+i)
	}
}

// warm makes frames present on the host by letting the device touch them.
func (a *arena) warm(x *end) {
	a.tb.Helper()
	mr, err := a.h.pd.Register(bg, a.frames, allAccess)
	if err != nil {
		a.tb.Fatal(err)
	}
	touch(a.tb, x, mr)
	if err := mr.Close(); err != nil {
		a.tb.Fatal(err)
	}
}
