package guestdrv

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
)

// On-demand paging (ODP-1..8): a Pager provides the pages of a region when the device needs them, and the program
// revokes them with Invalidate.
//
//	device: PAGE_FAULT event ─▶ Pager.PageIn ─▶ SET_MTT with the event's token ─▶ the operation resumes
//	program: unmaps a page ─▶ Invalidate: CLEAR_MTT ─▶ reuses the page
//
// The result of PageIn enters the table only if no Invalidate of these pages began meanwhile; otherwise PageIn is
// called again. So once Invalidate has returned, the device uses none of the pages that the Pager returned before.

// Pager provides the pages of an on-demand region. PageIn is called from many goroutines at once, for different faults
// and possibly for the same page.
//
// On entry every pas[i] is PageAbsent. PageIn sets pas[i] to the PA (Buffer.PA, a multiple of 4096) of the page at VA
// f.VA + i*4096, plus PageReadOnly if writes to it shall fault. pas[0] is required, and must be writable if f.Write is
// set. Entries after the first absent one are ignored. An error means that the address is invalid: the faulting
// operation fails (PF-13). An error that matches ErrNoMemory or StatusNoMemory means that there is no page now: the
// operation faults again after a pause (HF-2). PageIn may block; only the faulting operation waits for it. It must
// return when ctx ends, which happens when the region or the device is closed.
type Pager interface {
	PageIn(ctx context.Context, f PageFault, pas []uint64) error
}

// PagerFunc is a function that implements Pager.
type PagerFunc func(ctx context.Context, f PageFault, pas []uint64) error

// PageIn calls p.
func (p PagerFunc) PageIn(ctx context.Context, f PageFault, pas []uint64) error {
	return p(ctx, f, pas)
}

// PageFault describes why pages are needed.
type PageFault struct {
	VA    uint64 // of pas[0]: a multiple of 4096
	Write bool   // the operation writes
	QPN   uint32 // of the operation; 0: Prefetch
}

// ImplicitLength is the size of the implicit region, which begins at VA 0.
const ImplicitLength = 1 << 57

// maxPageIn bounds the pages of one call of PageIn. An event requests at most as many.
const maxPageIn = 1 << 20 >> pageShift

// OnDemandMR is a region whose pages a Pager provides when the device needs them. SGE and Remote count from the
// region's first byte, in an implicit region from VA 0; SGEAt and RemoteAt take a VA.
type OnDemandMR struct {
	region
	pager  Pager
	ctx    context.Context // ends with the region and with the device
	cancel context.CancelFunc
	base   uint64 // VA of the first page
	pages  uint64

	users sync.WaitGroup // calls of PageIn; Add under faultServer.mu, while registered

	// publish is held for reading from the check that a window is not stale until its pages are in the table, and for
	// writing while windows become stale: a table never receives what PageIn returned before an invalidation.
	publish sync.RWMutex
	mu      sync.Mutex
	windows map[*window]struct{} // guarded by mu

	careful atomic.Bool  // a posted SET_MTT was refused: wait for the answers until one succeeds
	pause   atomic.Int64 // before the next answer "later", in ns; 0: shortest
	stats   struct{ faults, pages, failed, later, retries, invalidations, prefetches atomic.Uint64 }
}

// Bounds of OnDemandMR.pause.
const (
	shortestPause = time.Millisecond
	longestPause  = 100 * time.Millisecond
)

// window is a range of pages for which a call of PageIn is under way.
type window struct {
	first, count uint64
	stale        bool // invalidated meanwhile; guarded by mu
}

// OnDemandStats are the counters of an on-demand region (ODP-8).
type OnDemandStats struct {
	Faults        uint64 // events
	Pages         uint64 // set in the device's table
	Failed        uint64 // faults that ended with an error
	Later         uint64 // faults that met a shortage and were raised again after a pause
	Retries       uint64 // results of PageIn that an Invalidate made stale
	Invalidations uint64
	Prefetches    uint64
}

// RegisterOnDemand registers length bytes from VA iova on without pages; pager provides them when the device needs
// them. The time it takes does not depend on length.
func (p *PD) RegisterOnDemand(ctx context.Context, iova, length uint64, access Access, pager Pager) (*OnDemandMR,
	error) {
	offset := iova & (pageSize - 1)
	if length == 0 || offset+length < length || iova+length-1 < iova {
		return nil, invalid("on-demand region of %d bytes at %#x", length, iova)
	}
	return p.onDemand(ctx, abi.CreateMR{
		Access: uint32(access), Flags: abi.MROnDemand, PageShift: pageShift, IOVA: iova, Length: length, Offset: offset,
		NPages: (offset + length + pageSize - 1) >> pageShift,
	}, pager)
}

// RegisterImplicit registers the whole address space up to ImplicitLength (ODP-1): a VA is valid if pager has a page
// for it.
func (p *PD) RegisterImplicit(ctx context.Context, access Access, pager Pager) (*OnDemandMR, error) {
	return p.onDemand(ctx, abi.CreateMR{
		Access: uint32(access), Flags: abi.MROnDemand | abi.MRImplicit, PageShift: pageShift, Length: ImplicitLength,
		NPages: ImplicitLength >> pageShift,
	}, pager)
}

func (p *PD) onDemand(ctx context.Context, req abi.CreateMR, pager Pager) (*OnDemandMR, error) {
	d := p.d
	r := &OnDemandMR{pager: pager, base: req.IOVA - req.Offset, pages: req.NPages, windows: map[*window]struct{}{}}
	r.ctx, r.cancel = context.WithCancel(d.ctx)
	req.PDN = p.handle
	base, err := d.createMR(ctx, &req, nil)
	if err != nil {
		r.cancel()
		return nil, err
	}
	r.region = *base
	d.faults.add(r.lkey, r)
	r.free = func() {
		d.faults.forget(r.lkey)
		r.cancel()
	}
	return r, nil
}

// Close deregisters the region. When it returns nil, the device has stopped using its pages (EP-3) and no call of
// PageIn is under way. Operations that wait for pages fail. It fails with StatusBusy while windows are bound to the
// region.
func (r *OnDemandMR) Close() error {
	err := r.close()
	if errors.Is(err, StatusBusy) || errors.Is(err, ErrTimeout) {
		return err // still registered, or unknown
	}
	r.cancel()
	r.users.Wait()
	return err
}

// Stats returns the region's counters.
func (r *OnDemandMR) Stats() OnDemandStats {
	s := &r.stats
	return OnDemandStats{
		Faults: s.faults.Load(), Pages: s.pages.Load(), Failed: s.failed.Load(), Later: s.later.Load(),
		Retries: s.retries.Load(), Invalidations: s.invalidations.Load(), Prefetches: s.prefetches.Load(),
	}
}

// SGEAt returns an SGE for n bytes from VA va on. It panics as SGE does.
func (r *OnDemandMR) SGEAt(va uint64, n int) SGE { return r.sgeAt(va, n) }

// RemoteAt returns the place at VA va, for a peer's requests. It panics as Remote does.
func (r *OnDemandMR) RemoteAt(va uint64) Remote { return r.remoteAt(va) }

// span returns the first index and the number of the region's pages that contain part of [va, va+n).
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

// Invalidate revokes the pages that contain part of [va, va+n). When it returns nil, the device has stopped using them
// (ODP-5, EP-3). Before the call, the program makes sure that its Pager does not return them any more. Invalidate does
// not wait for calls of PageIn. If it ends with its context or with ErrTimeout, the device may still use the pages:
// call it again.
func (r *OnDemandMR) Invalidate(ctx context.Context, va, n uint64) error {
	first, count := r.span(va, n)
	if count == 0 {
		return nil
	}
	r.stats.invalidations.Add(1)
	b, err := r.startInvalidate(ctx, first, count)
	if err != nil {
		return err
	}
	defer b.end()
	_, err = b.wait(ctx, 0, nil)
	return err
}

func (r *OnDemandMR) startInvalidate(ctx context.Context, first, count uint64) (*batch, error) {
	r.publish.Lock()
	defer r.publish.Unlock()
	r.mu.Lock()
	for w := range r.windows {
		if first < w.first+w.count && w.first < first+count {
			w.stale = true
		}
	}
	r.mu.Unlock()
	// The device begins commands in the order of submission, so later publications survive.
	return r.d.begin(ctx, request{
		op: abi.CmdClearMTT, fixed: &abi.ClearMTT{Handle: r.handle, First: first, Count: count}, size: abi.SizeClearMTT,
	})
}

// Prefetch calls the Pager for the pages that contain part of [va, va+n) and sets them in the device's table (ODP-8).
// It fails at the first page that the Pager does not provide, and with StatusNoMemory if the device has no room now.
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

var errNoPage = errors.New("the pager returned no page")

// pageIn calls the Pager and publishes the result, repeatedly while invalidations make it stale. It returns the number
// of pages that it set. Unless a is nil, it also answers the fault.
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
			pas[i] = PageAbsent
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

// given validates the result of PageIn and returns its number of pages.
func (r *OnDemandMR) given(pas []uint64, write bool) (int, error) {
	for i, pa := range pas {
		switch {
		case pa == PageAbsent && i > 0:
			return i, nil
		case pa == PageAbsent || i == 0 && write && pa&PageReadOnly != 0:
			return 0, errNoPage
		case pa&(pageSize-1)&^PageReadOnly != 0 || !r.d.has(pa&^(pageSize-1)):
			return 0, invalid("the pager returned PA %#x, which is no page of the driver's memory", pa)
		}
	}
	return len(pas), nil
}

// publishWindow sets pas in the table, unless w has become stale.
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
	if a == nil {
		return true, r.setPages(r.d.ctx, w.first, pas)
	}
	return true, r.setAndResume(w.first, pas, a)
}

// setAndResume sets pages and answers the fault: SET_MTT carries the token; if the device does not support that,
// RESUME_FAULT follows it. The commands are posted, as the device begins them in order. If it refuses the pages, the
// operation is resumed and faults again. From then on the region's answers are awaited, until one succeeds: the reason
// of a second refusal decides whether the operation fails or waits.
func (r *OnDemandMR) setAndResume(first uint64, pas []uint64, a *answer) error {
	d, token := r.d, a.token
	fixed := abi.SetMTT{Handle: r.handle, Count: uint16(len(pas)), First: first}
	set := request{op: abi.CmdSetMTT, fixed: &fixed, size: abi.SizeSetMTT, words: pas}
	one := d.attr.Caps&abi.CapSetMTTResume != 0
	if one {
		fixed.Flags = abi.SetMTTResume
		set.words = append(pas[:len(pas):len(pas)], uint64(token))
	}
	if r.careful.Load() {
		_, err := d.call(d.ctx, set, nil)
		if err != nil {
			return err
		}
		r.careful.Store(false)
		if one {
			a.given = true
			return nil
		}
		return a.give(d, true)
	}
	set.onLate = func(_ []byte, err error) {
		if err == nil {
			return
		}
		r.careful.Store(true)
		if one { // a SET_MTT that fails does not resume the operation
			d.late.add(func() {
				_ = d.ResumeFault(d.ctx, token, true) // fails only if the operation or the device is gone
			})
		}
	}
	reqs := []request{set}
	if !one {
		reqs = append(reqs, resume(token, true))
	}
	err := d.post(d.ctx, reqs...)
	a.given = err == nil
	return err
}

// answer is the answer to a page fault event.
type answer struct {
	token uint32
	given bool
}

// give sends the answer unless it has been sent. An error means that the faulting operation is gone.
func (a *answer) give(d *Device, valid bool) error {
	if a.given {
		return nil
	}
	a.given = true
	return d.ResumeFault(d.ctx, a.token, valid)
}

// faultServer dispatches page faults to their regions.
type faultServer struct {
	work    chan fault // to an idle goroutine
	mu      sync.Mutex
	regions map[uint32]*OnDemandMR // by key; nil: a region without Pager; guarded by mu
	waiting int                    // faults that are being served; guarded by mu
	idle    int                    // goroutines that wait for work; guarded by mu
}

// maxIdle bounds faultServer.idle. Reusing a goroutine reuses its grown stack.
const maxIdle = 4

// fault is a page fault event and its region, nil if the region is closed.
type fault struct {
	event  abi.Event
	region *OnDemandMR
}

// add registers a region. Its key is not in use yet: the program learns it afterwards.
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

// use makes r's Close wait until r.users.Done. It returns false if r is closed.
func (s *faultServer) use(r *OnDemandMR) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.regions[r.lkey] != r {
		return false
	}
	r.users.Add(1)
	return true
}

// dispatch starts serving a page fault. served is false if the region has no Pager: the program answers. It does not
// wait for the Pager.
func (s *faultServer) dispatch(d *Device, e *abi.Event) (served bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, known := s.regions[e.Key]
	if known && r == nil {
		return false, nil
	}
	// A QP has at most one fault as requester and one as responder.
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

// serve serves f and then waits for more work, unless maxIdle goroutines do so already.
func (s *faultServer) serve(d *Device, f fault) {
	for {
		if r := f.region; r != nil {
			r.serve(&f.event)
			r.users.Done()
		} else {
			_ = d.ResumeFault(d.ctx, f.event.Token, false) // fails only if the operation or the device is gone
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
		f := PageFault{QPN: e.Handle,
			Write: e.Access&(abi.AccessLocalWrite|abi.AccessRemoteWrite|abi.AccessRemoteAtomic) != 0}
		_, err = r.pageIn(r.ctx, first, f, make([]uint64, min(count, maxPageIn)), &a)
	}
	switch {
	case err == nil:
		r.pause.Store(0)
	case later(err) && r.backOff():
		r.stats.later.Add(1)
		_ = a.give(r.d, true)
	default:
		r.stats.failed.Add(1)
		_ = a.give(r.d, false)
	}
}

// later reports whether err is a shortage that may pass (HF-2): the operation faults again. For every other reason the
// address counts as invalid (PF-13).
func later(err error) bool {
	return errors.Is(err, StatusNoMemory) || errors.Is(err, StatusBusy) || errors.Is(err, ErrNoMemory) ||
		errors.Is(err, ErrTimeout)
}

// backOff waits before an answer "later", twice as long each time while the shortage lasts. It returns false when
// the region is being closed.
func (r *OnDemandMR) backOff() bool {
	pause := max(time.Duration(r.pause.Load()), shortestPause)
	r.pause.Store(int64(min(2*pause, longestPause)))
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-r.ctx.Done():
		return false
	}
}

// ResumeFault answers a page fault event that NextEvent returned: the operation continues or, if valid is false, fails
// (PF-13). Each event is answered exactly once. If the operation's QP was destroyed meanwhile, ResumeFault fails with
// StatusNotFound.
func (d *Device) ResumeFault(ctx context.Context, token uint32, valid bool) error {
	_, err := d.call(ctx, resume(token, valid), nil)
	return err
}

func resume(token uint32, valid bool) request {
	r := abi.ResumeFault{Token: token}
	if !valid {
		r.Status = abi.StatusFault
	}
	return request{op: abi.CmdResumeFault, fixed: &r, size: abi.SizeResumeFault}
}
