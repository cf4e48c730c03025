package translate

import "sync/atomic"

// find looks up one address: where it is on the host, and how many bytes from
// there on are contiguous at least.
func (s *Space) find(pa PA) (host hostAddr, run uint64, kind MissKind) {
	t := s.table.Load()
	i := uint64(pa >> dirShift)
	if i >= uint64(len(t.dirs)) {
		return 0, 0, BadAddress
	}
	d := t.dirs[i]
	if d == nil {
		return 0, 0, BadAddress
	}
	j := uint64(pa>>leafShift) & dirLeafMask
	if w := d.leaf[j].Load(); w != 0 {
		o := uint64(pa) & (leafSize - 1)
		return hostAddr(w - entryPresent + o), leafSize - o, None
	}
	small := d.small[j].Load()
	if small == nil {
		return 0, 0, BadAddress
	}
	w := small[uint64(pa>>PageShift)&leafPageMask].Load()
	if w&entryPresent == 0 {
		if w == 0 {
			return 0, 0, BadAddress
		}
		return 0, 0, HostFault
	}
	o := uint64(pa) & pageMask
	return hostAddr(w - entryPresent + o), PageSize - o, None
}

// span looks up [pa, pa+n), n > 0: the host address of pa, and how many of the
// n bytes are contiguous there (at least one).
func (s *Space) span(pa PA, n uint64) (host hostAddr, got uint64, kind MissKind) {
	host, run, kind := s.find(pa)
	if kind != None || run >= n {
		return host, n, kind
	}
	for run < n {
		next, ok := pa.Add(run)
		if !ok {
			break
		}
		h, more, kind := s.find(next)
		if kind != None || h != host+hostAddr(run) {
			break
		}
		run += more
	}
	return host, min(run, n), None
}

// permit checks the uplink attribute (PF-3).
func (s *Space) permit(write bool) MissKind {
	if u := Uplink(s.uplink.Load()); u != 0 && (u&UplinkBlocked != 0 || write) {
		return Blocked
	}
	return None
}

// Host returns host memory for reading and writing, from pa on: at least one
// byte and at most n, as far as it is contiguous. The bytes are the guest's own,
// which it may change at any time, and may be used only until the caller leaves
// its epoch. n must not be negative; n == 0 yields nil.
func (s *Space) Host(pa PA, n int) ([]byte, Miss) { return s.host(pa, n, true) }

// HostRead is Host for reading only: it works for a VM that the uplink
// attribute makes read-only. The result must not be written to.
func (s *Space) HostRead(pa PA, n int) ([]byte, Miss) { return s.host(pa, n, false) }

func (s *Space) host(pa PA, n int, write bool) ([]byte, Miss) {
	if n <= 0 {
		return s.nothing(pa, n)
	}
	kind := s.permit(write)
	if kind == None {
		var h hostAddr
		var got uint64
		if h, got, kind = s.span(pa, uint64(n)); kind == None {
			return hostBytes(h, int(got)), Miss{}
		}
	}
	return nil, Miss{Kind: kind, PA: pa, Len: uint64(n)}
}

func (s *Space) nothing(pa PA, n int) ([]byte, Miss) {
	if n < 0 {
		return nil, Miss{Kind: OutOfRange, PA: pa}
	}
	return nil, Miss{}
}

// Read copies len(dst) bytes from pa on, across pages and slots. On a miss
// dst's contents are undefined.
func (s *Space) Read(dst []byte, pa PA) Miss {
	if kind := s.permit(false); kind != None {
		return Miss{Kind: kind, PA: pa, Len: uint64(len(dst))}
	}
	total := uint64(len(dst))
	for len(dst) > 0 {
		h, n, kind := s.span(pa, uint64(len(dst)))
		if kind != None {
			return Miss{Kind: kind, PA: pa, Len: total}
		}
		copy(dst, hostBytes(h, int(n)))
		dst, pa = dst[n:], pa+PA(n)
	}
	return Miss{}
}

// Write copies src to pa on, across pages and slots: all of it, or nothing and
// a miss. (Only if pages are withdrawn during the very call may a part have
// been written when it reports the miss.) An 8-byte aligned word that src
// covers is never seen half written.
func (s *Space) Write(pa PA, src []byte) Miss {
	total := uint64(len(src))
	if total == 0 {
		return Miss{}
	}
	kind := s.permit(true)
	if kind != None {
		return Miss{Kind: kind, PA: pa, Len: total}
	}
	h, n, kind := s.span(pa, total)
	if kind == None && n == total {
		copy(hostBytes(h, int(n)), src)
		return Miss{}
	}
	if m := s.probe(pa, total); !m.OK() {
		return m
	}
	for len(src) > 0 {
		h, n, kind := s.span(pa, uint64(len(src)))
		if kind != None {
			return Miss{Kind: kind, PA: pa, Len: total}
		}
		copy(hostBytes(h, int(n)), src)
		src, pa = src[n:], pa+PA(n)
	}
	return Miss{}
}

// probe walks [pa, pa+n) without touching it.
func (s *Space) probe(pa PA, n uint64) Miss {
	for left := n; left > 0; {
		_, got, kind := s.span(pa, left)
		if kind != None {
			return Miss{Kind: kind, PA: pa, Len: n}
		}
		left -= got
		pa += PA(got)
	}
	return Miss{}
}

// Uint32 returns the 4-byte aligned word at pa for atomic use. The pointer is
// valid within the epoch, like Host's. A misaligned pa is a BadAddress.
func (s *Space) Uint32(pa PA) (*atomic.Uint32, Miss) {
	h, m := s.word(pa, 4)
	if !m.OK() {
		return nil, m
	}
	return hostUint32(h), Miss{}
}

// Uint64 is Uint32 for 8 bytes.
func (s *Space) Uint64(pa PA) (*atomic.Uint64, Miss) {
	h, m := s.word(pa, 8)
	if !m.OK() {
		return nil, m
	}
	return hostUint64(h), Miss{}
}

func (s *Space) word(pa PA, size uint64) (hostAddr, Miss) {
	if uint64(pa)&(size-1) != 0 {
		return 0, Miss{Kind: BadAddress, PA: pa, Len: size}
	}
	kind := s.permit(true)
	if kind == None {
		var h hostAddr
		if h, _, kind = s.find(pa); kind == None {
			return h, Miss{}
		}
	}
	return 0, Miss{Kind: kind, PA: pa, Len: size}
}
