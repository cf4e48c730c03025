package translate

import "sync/atomic"

// The MTT: one word per page in groups of 512. An entry is PA | 1 if present, | 2 if read-only; 0 if absent. If all
// pages of a group are physically contiguous, run holds the first entry: a lookup then skips the entries, and 300 KiB
// describe a region of 10 million such pages. run is a shortcut; the entries are authoritative. A group with one
// present page has no entries: run holds that page's entry and index.
//
// The groups of a pinned region are in one slice; their entries are made when first needed. The groups of a demand
// region are in a sparseMTT, and exist while one of their pages is present: creating such a region costs the same for
// any size.
const (
	mttGroupShift = 9
	mttGroupSize  = 1 << mttGroupShift
	mttGroupMask  = mttGroupSize - 1

	mttPresent  = 1
	mttReadOnly = 2
	mttFlags    = mttPresent | mttReadOnly

	// Only in run. PAs are multiples of 4 KiB below 2^48, so these bits are free.
	mttAlone      = 1 << 11 // the entry of one page, whose index is in the bits below
	mttIndexShift = 2
	mttIdle       = 1 << 63 // no lookup since the reclaimer passed (reclaim.go)
)

// mttGroup is the state of 512 pages. What a reader finds, in this order:
//
//	run, whole       every page
//	run, mttAlone    one page
//	entries          each page; readers that load run before and entries after such a change find the page in both
//	neither          none
type mttGroup struct {
	run     atomic.Uint64
	entries atomic.Pointer[mttEntries]
}

type mttEntries [mttGroupSize]atomic.Uint64

// alone returns the entry of page i from run, which has mttAlone.
func alone(run, i uint64) uint64 {
	if run>>mttIndexShift&mttGroupMask != i {
		return 0
	}
	return run &^ (mttAlone | mttGroupMask<<mttIndexShift)
}

// use clears mttIdle and returns run without it. Lookups that find the mark call it, so an access stores nothing unless
// the reclaimer has passed since the last one.
func (g *mttGroup) use() uint64 { return g.run.And(^uint64(mttIdle)) &^ mttIdle }

// group returns group n of the table: nil or an empty one if none of its pages is present. n may be beyond the table.
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
	w := g.run.Load()
	if w&mttIdle != 0 {
		w = g.use()
	}
	switch {
	case w&mttAlone != 0:
		return alone(w, i), 1
	case w != 0:
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
		return r.sparse.chargeLocked()
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

// missingLocked returns what setLocked would add to chargeLocked at most.
func (r *Region) missingLocked(first uint64, pas []PA) (pages uint64) {
	if !r.demand {
		return 0
	}
	made := false
	eachPart(first, uint64(len(pas)), func(n, in, from, to uint64) {
		run, t := r.stateLocked(n)
		if t != nil {
			return
		}
		present, _ := presentAfter(run, in, pas[from:to])
		if present > 0 && run == 0 {
			pages += sparseGroupCharge
			made = true
		}
		if present > 1 {
			pages += mttGroupSize
		}
	})
	if made && r.sparse.table.Load() == noGroups {
		pages += sparseTableCharge
	}
	return pages
}

// stateLocked returns run and entries of group n; 0 and nil if none of its pages is present.
func (r *Region) stateLocked(n uint64) (run uint64, t *mttEntries) {
	g := r.group(n)
	if g == nil {
		return 0, nil
	}
	return g.run.Load() &^ mttIdle, g.entries.Load()
}

// presentAfter returns how many pages of a group without entries are present once part is set from page in on: 0, 1, or
// 2 for more; and run for one page.
func presentAfter(run, in uint64, part []PA) (present int, after uint64) {
	if run != 0 {
		if i := run >> mttIndexShift & mttGroupMask; i-in >= uint64(len(part)) { // not replaced
			present, after = 1, run
		}
	}
	for k, pa := range part {
		if pa&absentPA != 0 {
			continue
		}
		if present++; present > 1 {
			return present, 0
		}
		after = entryOf(pa) | mttAlone | (in+uint64(k))<<mttIndexShift
	}
	return present, after
}

func entryOf(pa PA) uint64 {
	if pa&absentPA != 0 {
		return 0
	}
	return uint64(pa) | mttPresent // readOnlyPA is mttReadOnly
}

// lostBy reports whether readers of old lose something by w. Making the same page writable is not a change for them.
func lostBy(old, w uint64) bool { return old != 0 && old != w && old != w|mttReadOnly }

// setLocked stores pas from page first on; ranges have been checked. It reports whether a present entry was changed or
// removed.
func (r *Region) setLocked(first uint64, pas []PA) (lost bool) {
	eachPart(first, uint64(len(pas)), func(n, in, from, to uint64) {
		run, t := r.stateLocked(n)
		part := pas[from:to]
		if t == nil {
			present, after := presentAfter(run, in, part)
			if present <= 1 {
				lost = r.setAloneLocked(n, run, after) || lost
				return
			}
			t = r.newEntriesLocked(n, run)
		}
		for k, pa := range part {
			w, e := entryOf(pa), &t[in+uint64(k)]
			if old := e.Load(); old != w {
				lost = lost || lostBy(old, w)
				e.Store(w)
			}
		}
		g := r.group(n)
		if g == nil || g.entries.Load() == nil {
			r.addEntriesLocked(n, t)
			g = r.group(n)
		}
		g.summariseLocked(t, r.shift, r.npages-n<<mttGroupShift)
		r.dropEmptyLocked(n, t)
	})
	return lost
}

// setAloneLocked replaces run of group n, which has no entries, by after: 0, or that of one page.
func (r *Region) setAloneLocked(n, run, after uint64) (lost bool) {
	if after == 0 {
		if run != 0 {
			r.dropLocked(n)
		}
		return run != 0
	}
	if r.npages-n<<mttGroupShift == 1 {
		after &^= mttAlone // the region has only this page of the group: the run is whole
	}
	if run == 0 && r.demand {
		r.sparse.makeLocked(n, nil, after)
	} else {
		r.group(n).run.Store(after)
	}
	return run != 0 && (run^after)>>mttIndexShift&mttGroupMask != 0 || lostBy(run, after)
}

// newEntriesLocked returns entries for group n, with the page of run, which readers do not see yet.
func (r *Region) newEntriesLocked(n, run uint64) *mttEntries {
	var t *mttEntries
	if r.demand {
		t = r.sparse.pool.spare.take()
	} else {
		t = new(mttEntries)
	}
	if run != 0 {
		i := run >> mttIndexShift & mttGroupMask
		t[i].Store(alone(run, i))
	}
	return t
}

// addEntriesLocked makes t the entries of group n. They contain the page of its run, so readers find it throughout.
func (r *Region) addEntriesLocked(n uint64, t *mttEntries) {
	if r.demand {
		r.sparse.addEntriesLocked(n, t)
	} else {
		r.group(n).entries.Store(t)
	}
}

// clearLocked removes count entries from page first on, in time that depends on the present entries. It reports whether
// there were any.
func (r *Region) clearLocked(first, count uint64) (lost bool) {
	clearPart := func(n, in, size uint64) {
		run, t := r.stateLocked(n)
		if t == nil {
			if run != 0 && run>>mttIndexShift&mttGroupMask-in < size {
				lost = true
				r.dropLocked(n)
			}
			return
		}
		for k := in; k < in+size; k++ {
			if t[k].Load() != 0 {
				lost = true
				t[k].Store(0)
			}
		}
		r.group(n).run.Store(0)
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
	r.dropLocked(n)
}

// dropLocked removes the pages of group n, which is not empty, and has no entries if the region is pinned.
func (r *Region) dropLocked(n uint64) {
	if r.demand {
		r.sparse.dropLocked(n)
	} else {
		r.group(n).run.Store(0)
	}
}

// summariseLocked updates run from the entries t, of which the region has n (the last group may be short; the rest is
// never read).
func (g *mttGroup) summariseLocked(t *mttEntries, shift uint8, n uint64) {
	w := t[0].Load()
	for k := range min(n, mttGroupSize) {
		if w == 0 || t[k].Load() != w+k<<shift {
			w = 0
			break
		}
	}
	g.run.Store(w)
}
