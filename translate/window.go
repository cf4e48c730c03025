package translate

import "sync/atomic"

// window is a range of guest memory that is accessed often, such as a ring. Its host address is looked up on first use,
// and again only after the space's tables have changed; a range that is not contiguous on the host, or partly absent,
// is looked up with every access. Results may be used until the caller leaves its epoch, like those of Space. A window
// belongs to one goroutine at a time. While writes are logged, each access is looked up, too.
type window struct {
	space *Space
	pa    PA
	n     uint64
	ring  bool // the attribute does not apply (PF-3)

	gen  uint64   // of the tables when host was found
	host hostAddr // of pa
	ok   bool     // host is known; else each access is looked up
}

// Window is a window of data: it yields nothing while the attribute is not UplinkReadWrite.
type Window struct{ window }

// RingWindow is a window of a ring.
type RingWindow struct{ window }

// Window returns the window of [pa, pa+n), which must not wrap around. It looks nothing up yet.
func (s *Space) Window(pa PA, n uint64) Window { return Window{window{space: s, pa: pa, n: n}} }

// RingWindow is Window for a ring.
func (s *Space) RingWindow(pa PA, n uint64) RingWindow {
	return RingWindow{window{space: s, pa: pa, n: n, ring: true}}
}

// whole reports whether the whole window is contiguous at host.
func (w *window) whole() bool { return w.gen == w.space.gen.Load() && w.ok || w.find() }

// find looks the window up if the tables have changed. It reads the generation first, so that the next access notices a
// later change.
func (w *window) find() bool {
	s := w.space
	if gen := s.gen.Load(); gen != w.gen {
		w.gen = gen
		kind := None
		h, got := s.leaf(w.pa)
		if got < w.n {
			h, got, kind = s.span(w.pa, w.n)
		}
		up := s.uplink.Load()
		w.host, w.ok = h, kind == None && got >= w.n && (up == 0 || w.ring && up&logging == 0)
	}
	return w.ok
}

// Bytes returns the first n bytes of the window as Space.Host does, or nil if they are not contiguous on the host,
// partly absent, or beyond the window's end.
func (w *window) Bytes(n uint64) []byte {
	if n <= w.n && w.whole() {
		return hostBytes(w.host, int(n))
	}
	return nil
}

// Prefetch is Space.Prefetch of the window's beginning.
func (w *window) Prefetch(write bool) {
	switch {
	case !w.whole():
	case write:
		prefetchWrite(uintptr(w.host))
	default:
		prefetchRead(uintptr(w.host))
	}
}

// Uint32 is Space.RingUint32 at off.
func (w *RingWindow) Uint32(off uint64) (*atomic.Uint32, Miss) {
	if w.whole() && off+4 <= w.n && (w.host+hostAddr(off))&3 == 0 {
		return hostUint32(w.host + hostAddr(off)), Miss{}
	}
	return w.space.RingUint32(w.pa + PA(off))
}

// Around returns the aligned word that contains the 2 bytes at off, which is a multiple of 2, and their shift in it in
// bits (little-endian).
func (w *RingWindow) Around(off uint64) (word *atomic.Uint32, shift uint, m Miss) {
	shift = uint(w.pa+PA(off)) & 2 * 8
	if w.whole() && off+2 <= w.n {
		h := w.host + hostAddr(off)
		return hostUint32(h &^ 3), shift, Miss{}
	}
	word, m = w.space.RingUint32((w.pa + PA(off)) &^ 3)
	return word, shift, m
}

// Read16 copies 16 bytes from off on to dst.
func (w *RingWindow) Read16(dst *[16]byte, off uint64) Miss {
	if w.whole() && off+16 <= w.n {
		h := w.host + hostAddr(off)
		*dst = [16]byte(hostBytes(h, 16))
		return Miss{}
	}
	return w.space.RingRead(dst[:], w.pa+PA(off))
}

// Write8 copies 8 bytes from src to off.
func (w *RingWindow) Write8(off uint64, src *[8]byte) Miss {
	if w.whole() && off+8 <= w.n {
		h := w.host + hostAddr(off)
		*(*[8]byte)(hostBytes(h, 8)) = *src
		return Miss{}
	}
	return w.space.RingWrite(w.pa+PA(off), src[:])
}
