package translate

import "sync/atomic"

// leaf looks up an address that a present leaf covers. It returns the host address and the number of bytes from there
// on that are contiguous at least; run is 0 if no leaf covers it. It is small enough to be inlined.
func (s *Space) leaf(pa PA) (h hostAddr, run uint64) {
	dirs := s.table.Load().dirs
	if i := uint64(pa >> dirShift); i < uint64(len(dirs)) {
		if w := dirs[i].leaf[uint64(pa>>leafShift)&dirLeafMask].Load(); w&entryPresent != 0 {
			o := uint64(pa) & (leafSize - 1)
			return hostAddr(w - entryPresent + o), leafSize - o
		}
	}
	return 0, 0
}

// find tries the leaf, then the 4 KiB entry.
func (s *Space) find(pa PA) (h hostAddr, run uint64, kind MissKind) {
	if h, run = s.leaf(pa); run != 0 {
		return h, run, None
	}
	return s.page(pa)
}

// page is the complete lookup of an address that no leaf covered a moment ago. It reads the leaf again, before the
// table beneath: see space_table.go.
func (s *Space) page(pa PA) (h hostAddr, run uint64, kind MissKind) {
	dirs := s.table.Load().dirs
	i := uint64(pa >> dirShift)
	if i >= uint64(len(dirs)) {
		return 0, 0, BadAddress
	}
	j := uint64(pa>>leafShift) & dirLeafMask
	size := uint64(leafSize)
	w := dirs[i].leaf[j].Load()
	if w == 0 {
		small := dirs[i].small[j].Load()
		if small == nil {
			return 0, 0, BadAddress
		}
		w, size = small[uint64(pa>>PageShift)&leafPageMask].Load(), PageSize
	}
	if w&entryPresent == 0 {
		if w == 0 {
			return 0, 0, BadAddress
		}
		return 0, 0, HostFault
	}
	o := uint64(pa) & (size - 1)
	return hostAddr(w - entryPresent + o), size - o, None
}

// span looks up [pa, pa+n), n > 0: the host address of pa, and how many of the
// n bytes are contiguous there (at least one).
func (s *Space) span(pa PA, n uint64) (h hostAddr, got uint64, kind MissKind) {
	h, run, kind := s.find(pa)
	if kind != None || run >= n {
		return h, n, kind
	}
	for run < n {
		next, ok := pa.Add(run)
		if !ok {
			break
		}
		h2, more, kind := s.find(next)
		if kind != None || h2 != h+hostAddr(run) {
			break
		}
		run += more
	}
	return h, min(run, n), None
}

// Holds reports whether host address addr is published as memory of this guest. It searches the whole table, to
// attribute a SIGBUS to a VM.
func (s *Space) Holds(addr uintptr) bool {
	in := func(w, size uint64) bool {
		return w&entryPresent != 0 && uint64(addr)-(w-entryPresent) < size
	}
	for _, d := range s.table.Load().dirs {
		for j := range d.leaf {
			if in(d.leaf[j].Load(), leafSize) {
				return true
			}
			t := d.small[j].Load()
			for k := 0; t != nil && k < len(t); k++ {
				if in(t[k].Load(), PageSize) {
					return true
				}
			}
		}
	}
	return false
}

// fast is permit and find for the case that the attribute permits everything and one entry covers all n bytes.
func (s *Space) fast(pa PA, n uint64) (hostAddr, bool) {
	h, run := s.leaf(pa)
	if run < n {
		h, run, _ = s.page(pa)
	}
	return h, run >= n && s.uplink.Load() == 0
}

// ringFast is fast for a ring, which the attribute does not concern.
func (s *Space) ringFast(pa PA, n uint64) (hostAddr, bool) {
	h, run := s.leaf(pa)
	if run < n {
		h, run, _ = s.page(pa)
	}
	return h, run >= n
}

// Host returns host memory for reading and writing, from pa on: at least one byte and at most n, as far as it is
// contiguous. The guest may change the bytes at any time; they may be used only until the caller leaves its epoch. n ==
// 0 yields nil; a negative n is OutOfRange.
func (s *Space) Host(pa PA, n int) ([]byte, Miss) {
	if n > 0 {
		if h, ok := s.fast(pa, uint64(n)); ok {
			return hostBytes(h, n), Miss{}
		}
	}
	return s.hostSlow(pa, n, true)
}

// HostRead is Host for reading only, and works for a VM with a read-only uplink attribute. The result must not be
// written to.
func (s *Space) HostRead(pa PA, n int) ([]byte, Miss) {
	if n > 0 {
		if h, ok := s.fast(pa, uint64(n)); ok {
			return hostBytes(h, n), Miss{}
		}
	}
	return s.hostSlow(pa, n, false)
}

func (s *Space) hostSlow(pa PA, n int, write bool) ([]byte, Miss) {
	if n <= 0 {
		if n < 0 {
			return nil, Miss{Kind: OutOfRange, Where: Where{PA: pa}}
		}
		return nil, Miss{}
	}
	kind := s.permit(write)
	if kind == None {
		var h hostAddr
		var got uint64
		if h, got, kind = s.span(pa, uint64(n)); kind == None {
			if write {
				s.written(pa, got)
			}
			return hostBytes(h, int(got)), Miss{}
		}
	}
	return nil, Miss{Kind: kind, Where: Where{PA: pa}, Len: uint64(n)}
}

// Read copies len(dst) bytes from pa on, across pages and slots. On a miss
// dst's contents are undefined.
func (s *Space) Read(dst []byte, pa PA) Miss {
	n := uint64(len(dst))
	if h, ok := s.fast(pa, n); ok {
		copy(dst, hostBytes(h, len(dst)))
		return Miss{}
	}
	if n == 0 {
		return Miss{}
	}
	if kind := s.permit(false); kind != None {
		return Miss{Kind: kind, Where: Where{PA: pa}, Len: n}
	}
	return s.readParts(dst, pa)
}

// RingRead is Read of a ring.
func (s *Space) RingRead(dst []byte, pa PA) Miss {
	if h, ok := s.ringFast(pa, uint64(len(dst))); ok {
		copy(dst, hostBytes(h, len(dst)))
		return Miss{}
	}
	return s.readParts(dst, pa)
}

// readParts is Read piece by piece.
func (s *Space) readParts(dst []byte, pa PA) Miss {
	for len(dst) > 0 {
		h, got, kind := s.span(pa, uint64(len(dst)))
		if kind != None {
			return Miss{Kind: kind, Where: Where{PA: pa}, Len: uint64(len(dst))}
		}
		copy(dst, hostBytes(h, int(got)))
		dst, pa = dst[got:], pa+PA(got)
	}
	return Miss{}
}

// Write copies src to pa on, across pages and slots: all of it, or nothing and a miss. (If pages are withdrawn during
// the call, a part may have been written when it reports the miss.) An aligned 8-byte word within src is never seen
// half written.
func (s *Space) Write(pa PA, src []byte) Miss {
	n := uint64(len(src))
	if h, ok := s.fast(pa, n); ok {
		copy(hostBytes(h, len(src)), src)
		return Miss{}
	}
	if n == 0 {
		return Miss{}
	}
	if kind := s.permit(true); kind != None {
		return Miss{Kind: kind, Where: Where{PA: pa}, Len: n}
	}
	return s.writeParts(pa, src)
}

// RingWrite is Write to a ring.
func (s *Space) RingWrite(pa PA, src []byte) Miss {
	if h, ok := s.ringFast(pa, uint64(len(src))); ok && s.uplink.Load()&logging == 0 {
		copy(hostBytes(h, len(src)), src)
		return Miss{}
	}
	return s.writeParts(pa, src)
}

// writeParts is Write piece by piece.
func (s *Space) writeParts(pa PA, src []byte) Miss {
	// Check first that everything is present, then write.
	for at, left := pa, uint64(len(src)); left > 0; {
		_, got, kind := s.span(at, left)
		if kind != None {
			return Miss{Kind: kind, Where: Where{PA: at}, Len: left}
		}
		at, left = at+PA(got), left-got
	}
	for len(src) > 0 {
		h, got, kind := s.span(pa, uint64(len(src)))
		if kind != None {
			return Miss{Kind: kind, Where: Where{PA: pa}, Len: uint64(len(src))}
		}
		s.written(pa, got)
		copy(hostBytes(h, int(got)), src)
		src, pa = src[got:], pa+PA(got)
	}
	return Miss{}
}

// Prefetch prefetches the two cache lines at pa for reading or writing. It never faults.
func (s *Space) Prefetch(pa PA, write bool) {
	h, run := s.leaf(pa)
	if run == 0 {
		h, run, _ = s.page(pa)
	}
	switch {
	case run == 0:
	case write:
		prefetchWrite(uintptr(h))
	default:
		prefetchRead(uintptr(h))
	}
}

// RingUint32 returns the 4-byte aligned word of a ring at pa for atomic use. Like Host's result, the pointer is valid
// within the epoch. A misaligned pa is a BadAddress.
func (s *Space) RingUint32(pa PA) (*atomic.Uint32, Miss) {
	h, kind := s.word(pa, 4)
	if kind != None {
		return nil, Miss{Kind: kind, Where: Where{PA: pa}, Len: 4}
	}
	return hostUint32(h), Miss{}
}

// RingUint64 is RingUint32 for 8 bytes.
func (s *Space) RingUint64(pa PA) (*atomic.Uint64, Miss) {
	h, kind := s.word(pa, 8)
	if kind != None {
		return nil, Miss{Kind: kind, Where: Where{PA: pa}, Len: 8}
	}
	return hostUint64(h), Miss{}
}

func (s *Space) word(pa PA, size uint64) (hostAddr, MissKind) {
	if uint64(pa)&(size-1) != 0 {
		return 0, BadAddress
	}
	h, _, kind := s.find(pa)
	if kind == None {
		s.written(pa, size) // whatever the caller does with the word
	}
	return h, kind
}
