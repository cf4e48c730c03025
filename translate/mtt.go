package translate

import "sync/atomic"

// The MTT: one word per page in groups of 512. An entry is PA | 1 if present, | 2 if read-only; 0 if absent. If all
// pages of a group are physically contiguous, run holds the first entry: a lookup then skips the entries, and 300 KiB
// describe a region of 10 million such pages. run is a shortcut; the entries are authoritative.
//
// The groups of a pinned region are in one slice; their entries are made when first written. The groups of a demand
// region are in a sparseMTT, and exist while one of their pages is present: creating such a region costs the same for
// any size.
const (
	mttGroupShift = 9
	mttGroupSize  = 1 << mttGroupShift
	mttGroupMask  = mttGroupSize - 1

	mttPresent  = 1
	mttReadOnly = 2
	mttFlags    = mttPresent | mttReadOnly
)

type mttGroup struct {
	run     atomic.Uint64
	entries atomic.Pointer[mttEntries]
}

type mttEntries [mttGroupSize]atomic.Uint64

// group returns group n of the table: nil or one without entries if none of its pages is present. n may be beyond the
// table.
func (r *Region) group(n uint64) *mttGroup {
	if n < uint64(len(r.mtt)) {
		return &r.mtt[n]
	}
	if r.sparse == nil {
		return nil
	}
	return r.sparse.find(n)
}

// page returns the entry of page p, and the number of pages from p on that are known to be contiguous.
func (r *Region) page(p uint64) (entry, contiguous uint64) {
	g := r.group(p >> mttGroupShift)
	if g == nil {
		return 0, 0
	}
	i := p & mttGroupMask
	if w := g.run.Load(); w != 0 {
		return w + i<<(r.shift&63), mttGroupSize - i
	}
	t := g.entries.Load()
	if t == nil {
		return 0, 0
	}
	return t[i].Load(), 1
}

// toPA translates off, an offset into the region that has been checked. It also returns how many of the n bytes from
// there on are physically contiguous (at least 1). ok is false if the page is absent, or read-only and write is set.
func (r *Region) toPA(off, n uint64, write bool) (pa PA, got uint64, ok bool) {
	if r.phys {
		return PA(uint64(r.iova) + off), n, true
	}
	off += r.offset
	shift := r.shift & 63
	p := off >> shift
	in := off & (1<<shift - 1)
	w, pages := r.page(p)
	if w == 0 || write && w&mttReadOnly != 0 {
		return 0, 0, false
	}
	pa = PA(w&^mttFlags + in)
	got = pages<<shift - in
	for got < n {
		p += pages
		w += pages << shift
		next, more := r.page(p)
		if next != w {
			break
		}
		got += more << shift
		pages = more
	}
	return pa, min(got, n), true
}

// Below: the writer's side, under VM.mu.

// chargeLocked returns the region's share of Limits.MaxPages.
func (r *Region) chargeLocked() uint64 {
	switch {
	case r.demand:
		return uint64(r.sparse.live) << mttGroupShift
	case r.phys:
		return 0
	}
	return r.npages
}

// eachPart cuts pages [first, first+n) at group boundaries. f gets the group's number, the part's first page in it, and
// the part's position in the range.
func eachPart(first, n uint64, f func(group, in, from, to uint64)) {
	for from := uint64(0); from < n; {
		in := (first + from) & mttGroupMask
		to := min(n, from+mttGroupSize-in)
		f((first+from)>>mttGroupShift, in, from, to)
		from = to
	}
}

// missingLocked returns an upper bound of what setLocked would add to chargeLocked.
func (r *Region) missingLocked(first uint64, pas []PA) (pages uint64) {
	if r.demand {
		eachPart(first, uint64(len(pas)), func(n, _, from, to uint64) {
			if !r.existsLocked(n) && anyPresent(pas[from:to]) {
				pages += mttGroupSize
			}
		})
	}
	return pages
}

// existsLocked reports whether group n has entries.
func (r *Region) existsLocked(n uint64) bool {
	g := r.group(n)
	return g != nil && g.entries.Load() != nil
}

func anyPresent(pas []PA) bool {
	for _, pa := range pas {
		if pa&absentPA == 0 {
			return true
		}
	}
	return false
}

// setLocked stores pas from page first on; ranges have been checked. It reports whether a present entry was changed or
// removed. Making the same page writable is not a change for readers.
func (r *Region) setLocked(first uint64, pas []PA) (lost bool) {
	eachPart(first, uint64(len(pas)), func(n, in, from, to uint64) {
		g, part := r.group(n), pas[from:to]
		if !r.existsLocked(n) {
			switch {
			case !anyPresent(part):
				return
			case r.demand:
				g = r.sparse.makeLocked(n)
			default:
				g.entries.Store(new(mttEntries))
			}
		}
		t := g.entries.Load()
		for k, pa := range part {
			w := uint64(0)
			if pa&absentPA == 0 {
				w = uint64(pa) | mttPresent // readOnlyPA is mttReadOnly
			}
			e := &t[in+uint64(k)]
			if old := e.Load(); old != w {
				lost = lost || old != 0 && old != w|mttReadOnly
				e.Store(w)
			}
		}
		g.summariseLocked(r.shift, r.npages-n<<mttGroupShift)
		r.dropEmptyLocked(n, t)
	})
	return lost
}

// clearLocked removes count entries from page first on, in time that depends on the present entries. It reports whether
// there were any.
func (r *Region) clearLocked(first, count uint64) (lost bool) {
	clearPart := func(n, in, size uint64) {
		if !r.existsLocked(n) {
			return
		}
		g := r.group(n)
		t := g.entries.Load()
		for k := in; k < in+size; k++ {
			if t[k].Load() != 0 {
				lost = true
				t[k].Store(0)
			}
		}
		g.run.Store(0)
		r.dropEmptyLocked(n, t)
	}
	if r.demand && count>>mttGroupShift > uint64(r.sparse.live) {
		for _, n := range r.sparse.numbersLocked() {
			from := max(first, n<<mttGroupShift)
			to := min(first+count-1, n<<mttGroupShift|mttGroupMask) // the last page, which cannot overflow
			if from <= to {
				clearPart(n, from&mttGroupMask, to-from+1)
			}
		}
		return lost
	}
	eachPart(first, count, func(n, in, from, to uint64) { clearPart(n, in, to-from) })
	return lost
}

// dropEmptyLocked removes group n, whose entries are t, from a demand region if all of them are absent. Readers that
// still have it find it empty.
func (r *Region) dropEmptyLocked(n uint64, t *mttEntries) {
	if !r.demand {
		return
	}
	for k := range t {
		if t[k].Load() != 0 {
			return
		}
	}
	r.sparse.dropLocked(n)
}

// summariseLocked updates run from the entries, of which the region has n (the last group may be short; the rest is
// never read).
func (g *mttGroup) summariseLocked(shift uint8, n uint64) {
	t := g.entries.Load()
	w := t[0].Load()
	for k := range min(n, mttGroupSize) {
		if w == 0 || t[k].Load() != w+k<<shift {
			w = 0
			break
		}
	}
	g.run.Store(w)
}
