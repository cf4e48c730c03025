package translate

import "sync/atomic"

// byKey returns the region that key names, or nil.
func (vm *VM) byKey(key Key) *Region {
	idx := uint32(key) >> keyVariantBits
	if int(idx>>mptGroupShift) >= len(vm.mpt) {
		return nil
	}
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
// IBTA 10.6.3: key, protection domain, rights, bounds.
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
	// Neither subtraction can mislead: IOVA+Length does not wrap, so a VA below
	// IOVA gives an offset beyond any length.
	off = uint64(va) - uint64(r.iova)
	if off > r.length || n > r.length-off {
		return nil, 0, OutOfRange
	}
	return r, off, None
}

// Check looks at keys, rights and range only, not at pages: what a responder
// does with the first packet of a message. n may be 0.
func (vm *VM) Check(key Key, pd PD, va VA, n uint64, need Access) Miss {
	if _, _, kind := vm.lookup(key, pd, va, n, need); kind != None {
		return Miss{Kind: kind, Key: key, VA: va, Len: n, Access: need}
	}
	return Miss{}
}

// Resolve translates both stages: host bytes for va, at least one and at most
// n, as far as they are contiguous on the host. The whole of [va, va+n) must lie
// in the region. Bytes may be used until Leave, and written only if need
// contains a write. n == 0 yields nil without a lookup (IBTA 9.7.5.2.4.: a
// zero-length access needs no valid key).
func (vm *VM) Resolve(key Key, pd PD, va VA, n uint64, need Access) ([]byte, Miss) {
	if n == 0 {
		return nil, Miss{}
	}
	r, off, kind := vm.lookup(key, pd, va, n, need)
	if kind != None {
		return nil, Miss{Kind: kind, Key: key, VA: va, Len: n, Access: need}
	}
	h, got, m := vm.both(r, off, n, need)
	if !m.OK() {
		return nil, m
	}
	return hostBytes(h, int(got)), Miss{}
}

// both translates offset off of r, which has been checked, n > 0.
func (vm *VM) both(r *Region, off, n uint64, need Access) (h hostAddr, got uint64, m Miss) {
	pa, got, ok := r.toPA(off, n)
	if !ok {
		return 0, 0, Miss{Kind: GuestFault, Key: r.key, VA: r.iova + VA(off), Len: n, Access: need}
	}
	kind := vm.space.permit(need.writes())
	if kind == None {
		h, got, kind = vm.space.span(pa, got)
	}
	if kind != None {
		return 0, 0, Miss{Kind: kind, Key: r.key, VA: r.iova + VA(off), PA: pa, Len: n, Access: need}
	}
	return h, got, Miss{}
}

// Read copies len(dst) bytes from va on. On a miss dst's contents are undefined.
func (vm *VM) Read(dst []byte, key Key, pd PD, va VA, need Access) Miss {
	n := uint64(len(dst))
	if n == 0 {
		return Miss{}
	}
	r, off, kind := vm.lookup(key, pd, va, n, need)
	if kind != None {
		return Miss{Kind: kind, Key: key, VA: va, Len: n, Access: need}
	}
	for len(dst) > 0 {
		h, got, m := vm.both(r, off, uint64(len(dst)), need)
		if !m.OK() {
			m.Len = n
			return m
		}
		copy(dst, hostBytes(h, int(got)))
		dst, off = dst[got:], off+got
	}
	return Miss{}
}

// Write copies src to va on: all of it, or nothing and a miss. (Only if pages
// are removed during the very call may a part have been written when it
// reports the miss.)
func (vm *VM) Write(key Key, pd PD, va VA, src []byte, need Access) Miss {
	n := uint64(len(src))
	if n == 0 {
		return Miss{}
	}
	r, off, kind := vm.lookup(key, pd, va, n, need)
	if kind != None {
		return Miss{Kind: kind, Key: key, VA: va, Len: n, Access: need}
	}
	h, got, m := vm.both(r, off, n, need)
	if m.OK() && got == n {
		copy(hostBytes(h, int(got)), src)
		return Miss{}
	}
	for o := uint64(0); m.OK(); {
		if o += got; o == n {
			break
		}
		_, got, m = vm.both(r, off+o, n-o, need)
	}
	for len(src) > 0 && m.OK() {
		if h, got, m = vm.both(r, off, uint64(len(src)), need); m.OK() {
			copy(hostBytes(h, int(got)), src)
			src, off = src[got:], off+got
		}
	}
	if !m.OK() {
		m.Len = n
	}
	return m
}

// Uint64 returns the 8-byte word at va for atomic use within the epoch. A word
// that is not aligned in guest physical memory is a BadAddress.
func (vm *VM) Uint64(key Key, pd PD, va VA, need Access) (*atomic.Uint64, Miss) {
	r, off, kind := vm.lookup(key, pd, va, 8, need)
	if kind != None {
		return nil, Miss{Kind: kind, Key: key, VA: va, Len: 8, Access: need}
	}
	h, got, m := vm.both(r, off, 8, need)
	if !m.OK() {
		return nil, m
	}
	if got != 8 || h&7 != 0 {
		return nil, Miss{Kind: BadAddress, Key: key, VA: va, Len: 8, Access: need}
	}
	return hostUint64(h), Miss{}
}
