package translate

import "sync/atomic"

// place returns the place of a key in the table.
func (vm *VM) place(key Key) uint32 { return key.Index() & vm.mask }

// byKey returns the region of key, or nil.
func (vm *VM) byKey(key Key) *Region {
	idx := vm.place(key)
	g := vm.mpt[idx>>mptGroupShift].Load()
	if g == nil {
		return nil
	}
	r := g.region[idx&mptGroupMask].Load()
	if r == nil || r.key != key {
		return nil
	}
	return r
}

// lookup finds the key's region and checks rights and range, in the order of
// IBTA 10.6: key, protection domain, rights, bounds.
func (vm *VM) lookup(key Key, pd PD, va VA, n uint64, need Access) (r *Region, off uint64, kind MissKind) {
	r = vm.byKey(key)
	if r == nil {
		return nil, 0, BadKey
	}
	if r.pd != pd {
		return nil, 0, BadPD
	}
	if r.access&need != need {
		return nil, 0, BadAccess
	}
	// Neither subtraction can give a wrong result: IOVA+Length does not wrap, so a VA below IOVA gives an offset beyond
	// any length.
	off = uint64(va) - uint64(r.iova)
	if off > r.length || n > r.length-off {
		return nil, 0, OutOfRange
	}
	return r, off, None
}

// Check checks key, rights and range, but not pages, as a responder does at the first packet of a message. n may be 0.
func (vm *VM) Check(key Key, pd PD, va VA, n uint64, need Access) Miss {
	if _, _, kind := vm.lookup(key, pd, va, n, need); kind != None {
		return Miss{kind, key, Where{VA: va}, n}
	}
	return Miss{}
}

// CheckKey is Check for a whole region or window.
func (vm *VM) CheckKey(key Key, pd PD, need Access) Miss {
	va := VA(0)
	if r := vm.byKey(key); r != nil {
		va = r.iova
	}
	return vm.Check(key, pd, va, 0, need)
}

// locate is lookup and both stages in one function, for the common case that all n bytes are contiguous in both stages:
// calls between the steps would cost as much as the steps. It returns false for all other cases, misses included. n >
// 0.
func (vm *VM) locate(key Key, pd PD, va VA, n uint64, need Access) (hostAddr, bool) {
	r := vm.byKey(key)
	if r == nil || r.pd != pd || r.access&need != need {
		return 0, false
	}
	off := uint64(va) - uint64(r.iova)
	if off > r.length || n > r.length-off {
		return 0, false
	}
	off += r.offset
	g := off >> (r.groupShift & 63)
	var group *mttGroup
	if g < uint64(len(r.mtt)) {
		group = &r.mtt[g]
	} else if r.sparse == nil { // no table: a physical region
		return 0, false
	} else if group = r.sparse.find(g); group == nil {
		return 0, false
	}
	in, size := off&r.groupMask, r.groupMask+1
	w := group.run.Load()
	switch {
	case w&(mttAlone|mttIdle) != 0:
		if w&mttIdle != 0 {
			return 0, false // page clears the mark
		}
		w = alone(w, in>>(r.shift&63))
		in, size = off&r.pageMask, r.pageMask+1
	case w == 0:
		if t := group.entries.Load(); t != nil {
			w = t[in>>(r.shift&63)&mttGroupMask].Load()
		}
		in, size = off&r.pageMask, r.pageMask+1
	}
	if w == 0 || size-in < n || vm.space.uplink.Load() != 0 || w&mttReadOnly != 0 && need.Writes() {
		return 0, false
	}
	pa := PA(w&^mttFlags + in)
	h, run := vm.space.leaf(pa)
	if run < n {
		h, run, _ = vm.space.page(pa)
	}
	return h, run >= n
}

// both translates offset off of r, which has been checked, n > 0. It returns the host address and how many of the n
// bytes are contiguous there, at least one.
func (vm *VM) both(r *Region, off, n uint64, need Access) (h hostAddr, got uint64, m Miss) {
	// Before the lookups: an access that is refused must not raise a fault.
	if kind := vm.space.permit(need.Writes()); kind != None {
		return 0, 0, Miss{kind, r.key, Where{VA: r.iova + VA(off)}, n}
	}
	pa, got, ok := r.toPA(off, n, need.Writes())
	if !ok {
		return 0, 0, Miss{GuestFault, r.key, Where{VA: r.iova + VA(off)}, n}
	}
	h, got, kind := vm.space.span(pa, got)
	if kind != None {
		return 0, 0, Miss{kind, r.key, Where{r.iova + VA(off), pa}, got}
	}
	if need.Writes() {
		vm.space.written(pa, got)
	}
	return h, got, Miss{}
}

// Resolve translates both stages. It returns host bytes for va, at least one and at most n, as far as they are
// contiguous on the host. All of [va, va+n) must be in the region. The bytes may be used until Leave, and written only
// if need contains a write. n == 0 returns nil without a lookup: a zero-length access needs no valid key (IBTA chapter
// 9).
func (vm *VM) Resolve(key Key, pd PD, va VA, n uint64, need Access) ([]byte, Miss) {
	if n == 0 {
		return nil, Miss{}
	}
	if h, ok := vm.locate(key, pd, va, n, need); ok {
		return hostBytes(h, int(n)), Miss{}
	}
	r, off, kind := vm.lookup(key, pd, va, n, need)
	if kind != None {
		return nil, Miss{kind, key, Where{VA: va}, n}
	}
	h, got, m := vm.both(r, off, n, need)
	if !m.OK() {
		return nil, m
	}
	return hostBytes(h, int(got)), Miss{}
}

// Read copies len(dst) bytes from va on. On a miss dst's contents are undefined.
func (vm *VM) Read(dst []byte, key Key, pd PD, va VA, need Access) Miss {
	n := uint64(len(dst))
	if n == 0 {
		return Miss{}
	}
	if h, ok := vm.locate(key, pd, va, n, need); ok {
		copy(dst, hostBytes(h, len(dst)))
		return Miss{}
	}
	r, off, kind := vm.lookup(key, pd, va, n, need)
	if kind != None {
		return Miss{kind, key, Where{VA: va}, n}
	}
	for len(dst) > 0 {
		h, got, m := vm.both(r, off, uint64(len(dst)), need)
		if !m.OK() {
			return m
		}
		copy(dst, hostBytes(h, int(got)))
		dst, off = dst[got:], off+got
	}
	return Miss{}
}

// Write copies src to va on: all of it, or nothing and a miss. (If pages are removed during the call, a part may have
// been written when it reports the miss.) An aligned 8-byte word within src is never seen half written. A need without
// a write counts as LocalWrite: no caller can write past a read-only entry.
func (vm *VM) Write(key Key, pd PD, va VA, src []byte, need Access) Miss {
	n := uint64(len(src))
	if n == 0 {
		return Miss{}
	}
	if !need.Writes() {
		need |= LocalWrite
	}
	if h, ok := vm.locate(key, pd, va, n, need); ok {
		copy(hostBytes(h, len(src)), src)
		return Miss{}
	}
	r, off, kind := vm.lookup(key, pd, va, n, need)
	if kind != None {
		return Miss{kind, key, Where{VA: va}, n}
	}
	// Check first that everything is present, then write.
	for o := uint64(0); o < n; {
		_, got, m := vm.both(r, off+o, n-o, need)
		if !m.OK() {
			return m
		}
		o += got
	}
	for len(src) > 0 {
		h, got, m := vm.both(r, off, uint64(len(src)), need)
		if !m.OK() {
			return m
		}
		copy(hostBytes(h, int(got)), src)
		src, off = src[got:], off+got
	}
	return Miss{}
}

// Uint64 returns the 8-byte word at va for atomic use within the epoch. A word
// that is not 8-byte aligned in guest physical memory is a BadAddress.
func (vm *VM) Uint64(key Key, pd PD, va VA, need Access) (*atomic.Uint64, Miss) {
	const size = 8
	h, ok := vm.locate(key, pd, va, size, need)
	if !ok {
		r, off, kind := vm.lookup(key, pd, va, size, need)
		if kind != None {
			return nil, Miss{kind, key, Where{VA: va}, size}
		}
		var got uint64
		var m Miss
		if h, got, m = vm.both(r, off, size, need); !m.OK() {
			return nil, m
		}
		if got < size {
			h = 1 // crosses pages, so it cannot be aligned
		}
	}
	if h%size != 0 {
		return nil, Miss{BadAddress, key, Where{VA: va}, size}
	}
	return hostUint64(h), Miss{}
}
