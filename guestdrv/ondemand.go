package guestdrv

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// On-demand paging (ODP-1..8): a region whose pages a Pager brings in when the
// device asks for them, and which the program takes away again with Invalidate.
//
//	device: PAGE_FAULT event ─▶ Pager.PageIn ─▶ SET_MTT, RESUME_FAULT ─▶ the operation goes on
//	program: forgets a page ─▶ Invalidate: CLEAR_MTT ─▶ uses the page for something else
//
// What PageIn found is only put into the table if no Invalidate of these pages
// began meanwhile; otherwise PageIn is asked again. So once Invalidate has returned
// the device has none of the pages that the Pager gave before.

// Pager says where the pages of an on-demand region are. PageIn is called from many
// goroutines at once, for different faults and perhaps for the same page.
//
// PageIn sets pas[i], which is abi.MTTAbsent, to the PA of page i from f.VA on
// (Buffer.PA, a multiple of 4096), with abi.MTTReadOnly added if peers may not write
// to it yet. pas[0] must be given, and be writable if f.Write; what follows the
// first page that is left absent is not looked at. An error means that the address
// is not valid: the operation that waits fails (PF-13). PageIn may take its time:
// nobody else waits for it. It must return when ctx ends, which it does when
// the region is deregistered or the device closed.
type Pager interface {
	PageIn(ctx context.Context, f PageFault, pas []uint64) error
}

// PagerFunc is a function as a Pager.
type PagerFunc func(ctx context.Context, f PageFault, pas []uint64) error

// PageIn calls p.
func (p PagerFunc) PageIn(ctx context.Context, f PageFault, pas []uint64) error {
	return p(ctx, f, pas)
}

// PageFault says what pages are wanted for.
type PageFault struct {
	VA    uint64 // of the first page: a multiple of 4096
	Write bool   // they are going to be written to
	QPN   uint32 // whose operation waits; 0: nobody's, as with Prefetch
}

// ImplicitLength is the size of the implicit region, which begins at VA 0.
const ImplicitLength = 1 << 57

// maxPageIn bounds the pages of one call of PageIn: what an event asks for at most.
const maxPageIn = 1 << 20 >> pageShift

// OnDemandMR is a region whose pages come and go.
type OnDemandMR struct {
	MR
	pager  Pager
	ctx    context.Context // ends with Deregister and with the device
	cancel context.CancelFunc
	base   uint64 // VA of the first page
	pages  uint64

	users sync.WaitGroup // calls of PageIn; Add under faultServer.mu, while registered

	// publish is held for reading from the check that a window is not stale until
	// its pages are in the table, and for writing while one is made so: tables
	// never get what was found before an invalidation.
	publish sync.RWMutex
	mu      sync.Mutex
	windows map[*window]struct{} // guarded by mu

	careful atomic.Bool // a SET_MTT was refused: look at answers before resuming
	stats   struct{ faults, pages, failed, retries, invalidations, prefetches atomic.Uint64 }
}

// window is a range of pages that PageIn is looking for.
type window struct {
	first, count uint64
	stale        bool // guarded by mu: invalidated meanwhile
}

// OnDemandStats counts what happened to one region (ODP-8).
type OnDemandStats struct {
	Faults        uint64 // events
	Pages         uint64 // given to the device
	Failed        uint64 // faults that ended with an error
	Retries       uint64 // calls of PageIn whose outcome an Invalidate made void
	Invalidations uint64
	Prefetches    uint64
}

// RegisterOnDemand registers length bytes from VA iova on, without any page: pager
// gives them when they are needed. The time it takes does not depend on length.
func (p *PD) RegisterOnDemand(iova, length uint64, access uint32, pager Pager) (*OnDemandMR, error) {
	offset := iova & (pageSize - 1)
	if length == 0 || offset+length < length || iova+length-1 < iova {
		return nil, invalid("on-demand region of %d bytes at %#x", length, iova)
	}
	return p.onDemand(abi.CreateMR{
		Access: access, Flags: abi.MROnDemand, PageShift: pageShift, IOVA: iova, Length: length, Offset: offset,
		NPages: (offset + length + pageSize - 1) >> pageShift,
	}, pager)
}

// RegisterImplicit registers the whole address space up to ImplicitLength (ODP-1):
// every VA is valid for which pager has a page.
func (p *PD) RegisterImplicit(access uint32, pager Pager) (*OnDemandMR, error) {
	return p.onDemand(abi.CreateMR{
		Access: access, Flags: abi.MROnDemand | abi.MRImplicit, PageShift: pageShift, Length: ImplicitLength, NPages: ImplicitLength >> pageShift,
	}, pager)
}

func (p *PD) onDemand(req abi.CreateMR, pager Pager) (*OnDemandMR, error) {
	d := p.d
	r := &OnDemandMR{pager: pager, base: req.IOVA - req.Offset, pages: req.NPages, windows: map[*window]struct{}{}}
	r.ctx, r.cancel = context.WithCancel(d.ctx)
	req.PDN = p.num
	mr, err := d.createMR(&req)
	if err != nil {
		r.cancel()
		return nil, err
	}
	r.MR = *mr
	d.faults.add(r.lkey, r)
	return r, nil
}

// Deregister revokes the region and returns when nothing uses its pages any more
// (EP-3) and no call of PageIn is under way. What waits for its pages fails. Windows keep it, as any region.
func (r *OnDemandMR) Deregister() error {
	err := r.MR.Deregister()
	if errors.Is(err, abi.StatusBusy) {
		return err
	}
	r.cancel()
	r.users.Wait()
	return err
}

// Stats returns the region's counters.
func (r *OnDemandMR) Stats() OnDemandStats {
	s := &r.stats
	return OnDemandStats{
		Faults: s.faults.Load(), Pages: s.pages.Load(), Failed: s.failed.Load(), Retries: s.retries.Load(),
		Invalidations: s.invalidations.Load(), Prefetches: s.prefetches.Load(),
	}
}

// SGEAt names n bytes from VA va on.
func (r *OnDemandMR) SGEAt(va uint64, n int) abi.SGE {
	return abi.SGE{Addr: va, Length: uint32(n), LKey: r.lkey}
}

// span gives the indices of the pages that hold part of [va, va+n), as far as the
// region goes.
func (r *OnDemandMR) span(va, n uint64) (first, count uint64) {
	end := va + n
	if end < va {
		end = 1<<64 - 1
	}
	limit := r.iova + r.length // does not wrap: CREATE_MR was accepted; 0: the very end
	va, end = max(va, r.iova), min(end-1, limit-1)
	if n == 0 || va > end {
		return 0, 0
	}
	first = (va - r.base) >> pageShift
	return first, (end-r.base)>>pageShift - first + 1
}

// Invalidate takes the pages that hold part of [va, va+n) away from the device and
// returns when it does not use them any more (ODP-5, EP-3). Before the call, the
// program has seen to it that its Pager does not give them out any more. It does not
// wait for calls of PageIn.
func (r *OnDemandMR) Invalidate(va, n uint64) error {
	first, count := r.span(va, n)
	if count == 0 {
		return nil
	}
	r.stats.invalidations.Add(1)
	b, err := r.startInvalidate(first, count)
	if err != nil {
		return err
	}
	defer b.end()
	return b.wait(0, nil)
}

func (r *OnDemandMR) startInvalidate(first, count uint64) (*batch, error) {
	r.publish.Lock()
	defer r.publish.Unlock()
	r.mu.Lock()
	for w := range r.windows {
		if first < w.first+w.count && w.first < first+count {
			w.stale = true
		}
	}
	r.mu.Unlock()
	// Commands begin in the order of submission: pages that are published from now
	// on stay.
	return r.d.begin(request{op: abi.CmdClearMTT, fixed: &abi.ClearMTT{Handle: r.handle, First: first, Count: count}, size: abi.SizeClearMTT})
}

// Prefetch brings the pages that hold part of [va, va+n) in (ODP-8). It ends at the
// first that the Pager does not give.
func (r *OnDemandMR) Prefetch(ctx context.Context, va, n uint64, write bool) error {
	if !r.d.faults.use(r) {
		return fmt.Errorf("prefetch: %w", ErrClosed)
	}
	defer r.users.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.ctx, cancel)()
	r.stats.prefetches.Add(1)
	first, count := r.span(va, n)
	for count > 0 {
		pas := make([]uint64, min(count, maxPageIn))
		got, err := r.pageIn(ctx, first, PageFault{Write: write}, pas, nil)
		if err != nil {
			return fmt.Errorf("prefetch at %#x: %w", r.base+first<<pageShift, err)
		}
		first, count = first+got, count-got
	}
	return nil
}

var errNoPage = errors.New("the pager gave no page")

// pageIn asks the Pager for pages and puts them into the table, until no
// invalidation came in between. It returns how many pages were put there. If a is not
// nil the fault that it answers is over then.
func (r *OnDemandMR) pageIn(ctx context.Context, first uint64, f PageFault, pas []uint64, a *answer) (uint64, error) {
	f.VA = r.base + first<<pageShift
	w := &window{first: first, count: uint64(len(pas))}
	r.mu.Lock()
	r.windows[w] = struct{}{}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		delete(r.windows, w)
		r.mu.Unlock()
	}()
	for {
		for i := range pas {
			pas[i] = abi.MTTAbsent
		}
		if err := r.pager.PageIn(ctx, f, pas); err != nil {
			return 0, err
		}
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		n, err := r.given(pas, f.Write)
		if err != nil {
			return 0, err
		}
		done, err := r.publishWindow(w, pas[:n], a)
		if done {
			return uint64(n), err
		}
		r.stats.retries.Add(1)
	}
}

// given checks what the Pager gave and returns how many pages that is.
func (r *OnDemandMR) given(pas []uint64, write bool) (int, error) {
	for i, pa := range pas {
		switch {
		case pa == abi.MTTAbsent && i > 0:
			return i, nil
		case pa == abi.MTTAbsent || i == 0 && write && pa&abi.MTTReadOnly != 0:
			return 0, errNoPage
		case pa&(pageSize-1)&^abi.MTTReadOnly != 0 || !r.d.mem.has(pa&^(pageSize-1)):
			return 0, invalid("the pager gave PA %#x, which is no page of the driver's memory", pa)
		}
	}
	return len(pas), nil
}

// publishWindow puts pas into the table, unless w has become stale.
func (r *OnDemandMR) publishWindow(w *window, pas []uint64, a *answer) (done bool, err error) {
	r.publish.RLock()
	defer r.publish.RUnlock()
	r.mu.Lock()
	stale := w.stale
	w.stale = false
	r.mu.Unlock()
	if stale {
		return false, nil
	}
	r.stats.pages.Add(uint64(len(pas)))
	if a == nil || r.careful.Load() {
		err = r.SetPages(w.first, pas)
		if err == nil && a != nil {
			err = a.give(r.d, true)
		}
		return true, err
	}
	return true, r.setAndResume(w.first, pas, a)
}

// setAndResume is SET_MTT and RESUME_FAULT at once: the device begins commands in
// order, so the operation that is resumed finds the pages. Nobody waits for the answers.
// If the pages are refused it faults anew, and then is told.
func (r *OnDemandMR) setAndResume(first uint64, pas []uint64, a *answer) error {
	set := abi.SetMTT{Handle: r.handle, Count: uint32(len(pas)), First: first}
	err := r.d.post(request{op: abi.CmdSetMTT, fixed: &set, size: abi.SizeSetMTT, words: pas, refused: func() { r.careful.Store(true) }}, resume(a.token, true))
	a.given = err == nil
	return err
}

// answer to a page fault event.
type answer struct {
	token uint32
	given bool
}

// give answers, if that has not been done. An error says that nobody waits any more.
func (a *answer) give(d *Device, valid bool) error {
	if a.given {
		return nil
	}
	a.given = true
	return d.ResumeFault(a.token, valid)
}

// faultServer hands page faults to the regions that they are about.
type faultServer struct {
	work    chan fault // to a goroutine that waits for one
	mu      sync.Mutex
	regions map[uint32]*OnDemandMR // by key; nil: a region without Pager. Guarded by mu
	waiting int                    // faults that are being served; guarded by mu
	idle    int                    // goroutines that wait for a fault; guarded by mu
}

// maxIdle bounds faultServer.idle: a goroutine that has served a fault has the stack for the next.
const maxIdle = 4

// fault is a page fault event, and the region it is about; nil: that is gone.
type fault struct {
	event  abi.Event
	region *OnDemandMR
}

// add makes a region known. Nobody who knows its key can have used it before.
func (s *faultServer) add(key uint32, r *OnDemandMR) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.regions[key] = r
}

func (s *faultServer) forget(key uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.regions, key)
}

// use keeps r's Deregister waiting; r.users.Done ends that. False: it is deregistered.
func (s *faultServer) use(r *OnDemandMR) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.regions[r.lkey] != r {
		return false
	}
	r.users.Add(1)
	return true
}

// dispatch starts serving a page fault. served is false if the region has no Pager:
// then the program answers. It never blocks for long.
func (s *faultServer) dispatch(d *Device, e *abi.Event) (served bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, known := s.regions[e.Key]
	if known && r == nil {
		return false, nil
	}
	// A QP waits for one page on each side at most.
	if most := 2 * int64(d.attr.MaxQP); int64(s.waiting) > most {
		return true, fmt.Errorf("more than %d page faults at once", most)
	}
	s.waiting++
	if known {
		r.users.Add(1)
	}
	f := fault{*e, r}
	select {
	case s.work <- f:
	default:
		d.wg.Go(func() { s.serve(d, f) })
	}
	return true, nil
}

// serve serves f, and then waits for more, unless enough others do.
func (s *faultServer) serve(d *Device, f fault) {
	for {
		if r := f.region; r != nil {
			r.serve(&f.event)
			r.users.Done()
		} else {
			_ = d.ResumeFault(f.event.Token, false) // if the device is gone too, nobody waits
		}
		s.mu.Lock()
		s.waiting--
		stay := s.idle < maxIdle
		if stay {
			s.idle++
		}
		s.mu.Unlock()
		if !stay {
			return
		}
		select {
		case f = <-s.work:
		case <-d.ctx.Done():
			return
		}
		s.mu.Lock()
		s.idle--
		s.mu.Unlock()
	}
}

// serve answers one page fault event, exactly once.
func (r *OnDemandMR) serve(e *abi.Event) {
	r.stats.faults.Add(1)
	a := answer{token: e.Token}
	err := errNoPage
	if first, count := r.span(e.VA, e.Length); count > 0 {
		f := PageFault{QPN: e.Handle, Write: e.Access&(abi.AccessLocalWrite|abi.AccessRemoteWrite|abi.AccessRemoteAtomic) != 0}
		_, err = r.pageIn(r.ctx, first, f, make([]uint64, min(count, maxPageIn)), &a)
	}
	if err != nil {
		r.stats.failed.Add(1)
		_ = a.give(r.d, false)
	}
}

// ResumeFault answers a page fault event that NextEvent returned: its operation
// tries again, or, if the address is not valid, fails (PF-13). Events are answered
// exactly once; an answer that comes too late, after its QP was destroyed, fails with
// abi.StatusNotFound.
func (d *Device) ResumeFault(token uint32, valid bool) error {
	r := resume(token, valid)
	return d.do(r.op, r.fixed, r.size, nil)
}

func resume(token uint32, valid bool) request {
	r := abi.ResumeFault{Token: token}
	if !valid {
		r.Status = abi.StatusFault
	}
	return request{op: abi.CmdResumeFault, fixed: &r, size: abi.SizeResumeFault}
}
