package translate

// The writer's side of the PA2MA table. All of it runs under Space.mu; pa and n have been checked. Stores are ordered
// so that a reader at any moment finds either the old or the new entry of each page:
//   - a lower table is filled before its pointer is stored, and its pointer is stored before the leaf above becomes 0,
//   - entries are set before the leaf that summarises them,
//   - a leaf is cleared only after its lower table is right,
//   - a lower table is removed only when none of its pages is guest memory.
//
// The states of a leaf whose 2 MiB are guest memory are therefore: (reserved, no table), (present, with or without
// table), (0, table).

// dirLocked returns the dir that covers pa, or nil.
func (s *Space) dirLocked(pa PA) *paDir {
	t := s.table.Load()
	if i := uint64(pa >> dirShift); i < uint64(len(t.dirs)) && t.dirs[i] != noDir {
		return t.dirs[i]
	}
	return nil
}

// makeDirLocked is dirLocked, and makes a missing dir.
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

// tableLocked returns the 4 KiB table beneath leaf j of d, which it makes from the leaf if necessary. The caller then
// stores the leaf again.
func (d *paDir) tableLocked(j int) *paTable {
	t := d.small[j].Load()
	if t != nil {
		return t
	}
	t = new(paTable)
	if w := d.leaf[j].Load(); w != 0 {
		step := uint64(0) // all reserved pages have the same entry
		if w&entryPresent != 0 {
			step = PageSize
		}
		for k := range t {
			t[k].Store(w + uint64(k)*step)
		}
	}
	d.small[j].Store(t)
	return t
}

// part is the part of a range under one leaf.
type part struct {
	d    *paDir
	j    int    // of the leaf
	k, n uint64 // pages under it: first, count
}

func (p *part) whole() bool { return p.n == leafPages }

// partsLocked cuts [pa, pa+size) at leaf boundaries, and makes missing dirs.
func (s *Space) partsLocked(pa PA, size uint64, f func(p part)) {
	for size > 0 {
		step := min(size, leafSize-uint64(pa)&(leafSize-1))
		f(part{
			d: s.makeDirLocked(pa),
			j: int(pa>>leafShift) & dirLeafMask,
			k: uint64(pa>>PageShift) & leafPageMask,
			n: step >> PageShift,
		})
		pa, size = pa+PA(step), size-step
	}
}

// allLocked reports whether ok holds for each page's entry; if not, it returns the first address for which it does not.
// Present entries passed to ok need not be exact.
func (s *Space) allLocked(pa PA, n uint64, ok func(entry uint64) bool) (PA, bool) {
	for n > 0 {
		d := s.dirLocked(pa)
		if d == nil {
			if !ok(0) {
				return pa, false
			}
			step := min(n, 1<<dirShift-uint64(pa)&(1<<dirShift-1))
			pa, n = pa+PA(step), n-step
			continue
		}
		step := min(n, leafSize-uint64(pa)&(leafSize-1))
		j := int(pa>>leafShift) & dirLeafMask
		if w, t := d.leaf[j].Load(), d.small[j].Load(); w != 0 || t == nil {
			if !ok(w) {
				return pa, false
			}
		} else {
			for off := uint64(0); off < step; off += PageSize {
				if !ok(t[(uint64(pa)+off)>>PageShift&leafPageMask].Load()) {
					return pa + PA(off), false
				}
			}
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

// reserveLocked makes [pa, pa+n), which is empty, absent guest memory.
func (s *Space) reserveLocked(pa PA, n uint64) {
	s.partsLocked(pa, n, func(p part) {
		if p.whole() && p.d.small[p.j].Load() == nil {
			p.d.leaf[p.j].Store(entryReserved)
			return
		}
		t := p.d.tableLocked(p.j)
		for k := p.k; k < p.k+p.n; k++ {
			t[k].Store(entryReserved)
		}
	})
}

// fillLocked publishes [host, host+n) at pa, where nothing is present.
func (s *Space) fillLocked(pa PA, host, n uint64) {
	w := host | entryPresent
	s.partsLocked(pa, n, func(p part) {
		if p.whole() && p.d.small[p.j].Load() == nil {
			p.d.leaf[p.j].Store(w)
			w += leafSize
			return
		}
		t := p.d.tableLocked(p.j)
		for k := p.k; k < p.k+p.n; k++ {
			t[k].Store(w)
			w += PageSize
		}
		p.d.leaf[p.j].Store(t.summary())
	})
}

// summary returns the first entry if all are present and contiguous, else 0.
func (t *paTable) summary() uint64 {
	w := t[0].Load()
	if w&entryPresent == 0 || t[leafPages-1].Load() != w+(leafPages-1)<<PageShift {
		return 0
	}
	for k := range t {
		if t[k].Load() != w+uint64(k)<<PageShift {
			return 0
		}
	}
	return w
}

// clearLocked sets all entries of [pa, pa+n), which is memory, to entry: entryReserved, or 0, which also frees the
// tables.
func (s *Space) clearLocked(pa PA, n, entry uint64) {
	s.partsLocked(pa, n, func(p part) {
		if p.whole() && p.d.small[p.j].Load() == nil {
			p.d.leaf[p.j].Store(entry)
			return
		}
		t := p.d.tableLocked(p.j)
		for k := p.k; k < p.k+p.n; k++ {
			t[k].Store(entry)
		}
		p.d.leaf[p.j].Store(0)
		if entry == 0 && t.empty() {
			p.d.small[p.j].Store(nil)
		}
	})
	if entry == 0 {
		s.dropDirsLocked(pa, n)
	}
}

func (t *paTable) empty() bool {
	for k := range t {
		if t[k].Load() != 0 {
			return false
		}
	}
	return true
}

func (d *paDir) empty() bool {
	for j := range d.leaf {
		if d.leaf[j].Load() != 0 || d.small[j].Load() != nil {
			return false
		}
	}
	return true
}

// dropDirsLocked removes empty dirs of [pa, pa+n). A reader that has found one already sees it empty.
func (s *Space) dropDirsLocked(pa PA, n uint64) {
	dirs := append([]*paDir(nil), s.table.Load().dirs...)
	for i := pa >> dirShift; i <= (pa+PA(n-1))>>dirShift; i++ {
		if dirs[i].empty() {
			dirs[i] = noDir
		}
	}
	for len(dirs) > 0 && dirs[len(dirs)-1] == noDir {
		dirs = dirs[:len(dirs)-1]
	}
	s.table.Store(&pa2ma{dirs})
}
