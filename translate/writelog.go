package translate

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
)

// WriteLog notes which pages of a Space are written to, for whoever copies the memory while it is in use (live
// migration, CO-4 and CO-5). A page must be noted after the write, since a copy that is taken between note and write
// would lack it. But a lookup hands out memory that its caller writes later, until it leaves its epoch:
//
//	lookup ── notes in the map of now ── write ── Leave
//	Flush  ── exchanges the maps ── waits for all who were inside (EP-3) ── reports what the old map has
//
// So what Flush reports has been written, and what is written later is in the next report. While a Space has a log, its
// lookups take their slow ways, as under an attribute; otherwise the log costs a comparison for each write to a ring.
type WriteLog struct {
	space *Space
	pages uint64                  // that are noted, a multiple of 64
	now   atomic.Pointer[pageMap] // notes go there

	mu      sync.Mutex // of Flush and Stop
	spare   *pageMap   // empty, unless waiting
	waiting *Drain     // for the last users of spare; nil: there are none
}

// pageMap has a bit for each page from PA 0 on. Parts are made when a page of theirs is noted first, because guest
// memory may lie far apart: a part, of 4 KiB, costs no more than what its first page did.
type pageMap []atomic.Pointer[mapPart]

type mapPart [512]atomic.Uint64

// partPages is how many pages a part of the map is for.
const partPages = 64 * uint64(len(mapPart{}))

// logging is set in Space.uplink, beside the attribute, while there is a log.
const logging uint32 = 1 << 31

// LogWrites begins to note writes to guest memory below end. Every write that is not noted has ended when the release
// is done; what is copied before may lack it. A Space has one log at a time: another one is ErrInvalid.
func (s *Space) LogWrites(end PA) (*WriteLog, *Drain, error) {
	pages := (uint64(end) + PageSize*64 - 1) / (PageSize * 64) * 64
	parts := (pages + partPages - 1) / partPages
	l := &WriteLog{space: s, pages: pages, spare: newPageMap(parts)}
	l.now.Store(newPageMap(parts))
	if !s.log.CompareAndSwap(nil, l) {
		return nil, nil, fmt.Errorf("writes are being logged already: %w", ErrInvalid)
	}
	s.changeUplink(0, logging)
	return l, s.epochs.Flip(), nil
}

func newPageMap(parts uint64) *pageMap {
	m := make(pageMap, parts)
	return &m
}

// part returns part i of the map, i within it.
func (m pageMap) part(i uint64) *mapPart {
	if p := m[i].Load(); p != nil {
		return p
	}
	m[i].CompareAndSwap(nil, new(mapPart))
	return m[i].Load()
}

// Stop ends the log. Writes that have not been reported are not any more.
func (l *WriteLog) Stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.space.log.CompareAndSwap(l, nil) {
		l.space.changeUplink(logging, 0)
	}
}

// Flush reports pages that have been written to since the last report: report is called for each group of 64 pages of
// which some were, with the address of the group's first page, and a bit for each page. It waits for readers that are
// inside the Space's epochs, and must not be called by one. If ctx ends before they have left, it returns ctx's error,
// and the next call reports those pages.
func (l *WriteLog) Flush(ctx context.Context, report func(first PA, pages uint64)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.waiting == nil {
		l.spare = l.now.Swap(l.spare)
		l.waiting = l.space.epochs.Flip()
	}
	if err := l.waiting.Wait(ctx); err != nil {
		return err
	}
	l.waiting = nil
	for i := range *l.spare {
		p := (*l.spare)[i].Load() // nobody else uses it now
		if p == nil {
			continue
		}
		for k := range p {
			if w := &p[k]; w.Load() != 0 {
				report((PA(i)*PA(partPages)+PA(k)*64)*PageSize, w.Load())
				w.Store(0)
			}
		}
	}
	return nil
}

// note notes that [pa, pa+n) is about to be written to, inside the caller's epoch. n > 0.
func (l *WriteLog) note(pa PA, n uint64) {
	m := *l.now.Load()
	for page, last := uint64(pa)/PageSize, (uint64(pa)+n-1)/PageSize; page <= last && page < l.pages; {
		first, w := page%64, &m.part(page / partPages)[page%partPages/64]
		some := min(last-page+1, 64-first)
		set := ^uint64(0) >> (64 - some) << first
		if w.Load()&set != set { // most were noted before; a store would take the line from other loops
			w.Or(set)
		}
		page += some
	}
}

// written notes a write, if there is a log.
func (s *Space) written(pa PA, n uint64) {
	if s.uplink.Load()&logging == 0 {
		return
	}
	if l := s.log.Load(); l != nil {
		l.note(pa, n)
	}
}
