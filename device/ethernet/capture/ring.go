package capture

import (
	"encoding/binary"
	"sync/atomic"
)

// ring passes copies of packets from one loop to the reader: one producer, one consumer, no locks, bounded. Packets
// that do not fit are dropped and counted. Positions only grow; the index into buf is the position modulo its size.
type ring struct {
	buf     []byte // its size is a power of two
	_       [64]byte
	tail    atomic.Uint64 // producer: end of the written packets
	dropped atomic.Uint64
	_       [48]byte
	head    atomic.Uint64 // consumer: end of the read packets
	end     uint64        // consumer: tail at the mark
}

// record precedes each packet's bytes.
type record struct {
	time int64  // nanoseconds since 1970
	n    uint32 // original length
	kept uint32 // bytes that follow
	out  bool
}

const recordLen = 24

func newRing(size int) *ring { return &ring{buf: make([]byte, size)} }

// put appends a packet, which is the concatenation of parts, truncated to snap bytes.
func (r *ring) put(rec record, snap int, parts ...[]byte) {
	total := 0
	for _, p := range parts {
		total += len(p)
	}
	rec.n, rec.kept = uint32(total), uint32(min(total, snap))
	need := recordLen + uint64(rec.kept)
	tail := r.tail.Load()
	if tail-r.head.Load()+need > uint64(len(r.buf)) {
		r.dropped.Add(1)
		return
	}
	var h [recordLen]byte
	binary.LittleEndian.PutUint64(h[0:], uint64(rec.time))
	binary.LittleEndian.PutUint32(h[8:], rec.n)
	binary.LittleEndian.PutUint32(h[12:], rec.kept)
	if rec.out {
		h[16] = 1
	}
	at := r.write(tail, h[:])
	left := int(rec.kept)
	for _, p := range parts {
		p = p[:min(len(p), left)]
		left -= len(p)
		at = r.write(at, p)
	}
	r.tail.Store(at)
}

func (r *ring) write(at uint64, p []byte) uint64 {
	i := int(at) & (len(r.buf) - 1)
	copy(r.buf, p[copy(r.buf[i:], p):])
	return at + uint64(len(p))
}

// peek returns the oldest packet; its bytes are in up to two pieces, valid until next.
func (r *ring) peek() (rec record, a, b []byte, ok bool) {
	head := r.head.Load()
	if head == r.tail.Load() {
		return rec, nil, nil, false
	}
	var h [recordLen]byte
	x, y := r.read(head, recordLen)
	copy(h[copy(h[:], x):], y)
	rec.time = int64(binary.LittleEndian.Uint64(h[0:]))
	rec.n, rec.kept, rec.out = binary.LittleEndian.Uint32(h[8:]), binary.LittleEndian.Uint32(h[12:]), h[16] != 0
	a, b = r.read(head+recordLen, int(rec.kept))
	return rec, a, b, true
}

// next removes the packet that peek returned.
func (r *ring) next(rec record) { r.head.Add(recordLen + uint64(rec.kept)) }

func (r *ring) read(at uint64, n int) (a, b []byte) {
	i := int(at) & (len(r.buf) - 1)
	end := min(i+n, len(r.buf))
	return r.buf[i:end], r.buf[:n-(end-i)]
}
