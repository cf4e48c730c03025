package translate

import "sync/atomic"

// The writer's side of the PA2MA table. All of it runs under Space.mu; pa and n
// have been checked. Stores are ordered so that a reader at any moment finds
// either the old or the new entry of each page:
//   - a lower table is filled before its pointer is stored,
//   - entries are set before the leaf that summarises them,
//   - and a leaf is cleared only after its lower table is right.

// dirLocked returns the dir that covers pa, or nil.
func (s *Space) dirLocked(pa PA) *paDir {
	t := s.table.Load()
	if i := uint64(pa >> dirShift); i < uint64(len(t.dirs)) && t.dirs[i] != noDir {
		return t.dirs[i]
	}
	return nil
}

// makeDirLocked is dirLocked that makes what is missing.
func (s *Space) makeDirLocked(pa PA) *paDir {
	if d := s.dirLocked(pa); d != nil {
		return d
	}
	old := s.table.Load()
	i := int(pa >> dirShift)
	dirs := make([]*paDir, max(len(old.dirs), i+1))
	for k := copy(dirs, old.dirs); k < len(dirs); k++ {
		dirs[k] = noDir
	}
	dirs[i] = new(paDir)
	s.table.Store(&pa2ma{dirs})
	return dirs[i]
}

// tableLocked returns the 4 KiB table beneath leaf j of d, made from the leaf
// if there is none yet.
func (d *paDir) tableLocked(j int) *paTable {
	t := d.small[j].Load()
	if t != nil {
		return t
	}
	t = new(paTable)
	if w := d.leaf[j].Load(); w != 0 {
		for k := range t {
			t[k].Store(w + uint64(k)<<PageShift)
		}
	}
	d.small[j].Store(t)
	return t
}

// entryLocked returns the entry of one page.
func (s *Space) entryLocked(pa PA) uint64 {
	d := s.dirLocked(pa)
	if d == nil {
		return 0
	}
	j := int(pa>>leafShift) & dirLeafMask
	k := uint64(pa>>PageShift) & leafPageMask
	if w := d.leaf[j].Load(); w != 0 {
		return w + k<<PageShift
	}
	if t := d.small[j].Load(); t != nil {
		return t[k].Load()
	}
	return 0
}

// allLocked reports whether ok holds for each page's entry, else the first
// address for which it does not. Whole leaves count as one step.
func (s *Space) allLocked(pa PA, n uint64, ok func(entry uint64) bool) (PA, bool) {
	for n > 0 {
		step := uint64(PageSize)
		if !ok(s.entryLocked(pa)) {
			return pa, false
		}
		if d := s.dirLocked(pa); d == nil {
			step = 1<<dirShift - uint64(pa)&(1<<dirShift-1)
		} else if j := int(pa>>leafShift) & dirLeafMask; d.leaf[j].Load() != 0 || d.small[j].Load() == nil {
			step = leafSize - uint64(pa)&(leafSize-1)
		}
		if step >= n {
			break
		}
		pa, n = pa+PA(step), n-step
	}
	return 0, true
}

func (s *Space) emptyLocked(pa PA, n uint64) (PA, bool) {
	return s.allLocked(pa, n, func(e uint64) bool { return e == 0 })
}

func (s *Space) absentLocked(pa PA, n uint64) (PA, bool) {
	return s.allLocked(pa, n, func(e uint64) bool { return e&entryPresent == 0 })
}

func (s *Space) memoryLocked(pa PA, n uint64) (PA, bool) {
	return s.allLocked(pa, n, func(e uint64) bool { return e != 0 })
}

// eachPageLocked calls f with each page's 4 KiB entry and its offset from pa,
// making tables as needed. Leaves are left alone.
func (s *Space) eachPageLocked(pa PA, n uint64, f func(e *atomic.Uint64, off uint64)) {
	for off := uint64(0); off < n; off += PageSize {
		p := pa + PA(off)
		t := s.makeDirLocked(p).tableLocked(int(p>>leafShift) & dirLeafMask)
		f(&t[uint64(p>>PageShift)&leafPageMask], off)
	}
}

// fillLocked publishes [host, host+n) at pa.
func (s *Space) fillLocked(pa PA, host, n uint64) {
	for n > 0 {
		step := min(n, leafSize-uint64(pa)&(leafSize-1))
		d := s.makeDirLocked(pa)
		j := int(pa>>leafShift) & dirLeafMask
		if step < leafSize || d.small[j].Load() != nil {
			s.eachPageLocked(pa, step, func(e *atomic.Uint64, off uint64) { e.Store(host + off | entryPresent) })
			d.summariseLocked(j)
		} else {
			d.leaf[j].Store(host | entryPresent)
		}
		pa, host, n = pa+PA(step), host+step, n-step
	}
}

// summariseLocked sets leaf j if its lower table is one contiguous run.
func (d *paDir) summariseLocked(j int) {
	t := d.small[j].Load()
	w := t[0].Load()
	if w&entryPresent == 0 {
		return
	}
	for k := range t {
		if t[k].Load() != w+uint64(k)<<PageShift {
			return
		}
	}
	d.leaf[j].Store(w)
}

// clearLocked sets all entries of [pa, pa+n), which are memory, to entry.
func (s *Space) clearLocked(pa PA, n, entry uint64) {
	for n > 0 {
		step := min(n, leafSize-uint64(pa)&(leafSize-1))
		d := s.makeDirLocked(pa)
		j := int(pa>>leafShift) & dirLeafMask
		if step < leafSize || entry != 0 || d.small[j].Load() != nil {
			s.eachPageLocked(pa, step, func(e *atomic.Uint64, _ uint64) { e.Store(entry) })
		}
		d.leaf[j].Store(0)
		pa, n = pa+PA(step), n-step
	}
}
