package virtq

import "github.com/vnicd/vnicd/translate"

// MaxChain bounds the segments of one chain, indirect ones included. Virtio
// forbids chains longer than the queue; drivers that use indirect tables exceed
// short queues all the same, so the bound is that of the largest usual queue.
const MaxChain = 1024

// Seg is one buffer of guest memory, as the descriptor said; the address has
// been checked for overflow only, so each access may still miss.
type Seg struct {
	PA  translate.PA
	Len uint32
}

// Chain is one buffer chain that the driver made available: first the segments
// that the device may read, then those that it may write. It is filled by
// Queue.Pop and keeps its storage from one Pop to the next; reuse it.
type Chain struct {
	space    *translate.Space
	segs     []Seg            // those to be read first
	reads    int              // how many these are
	first    translate.Window // of the only segment, if it has been looked up already
	head     uint16
	at       uint16 // where in the ring it began
	entries  uint16 // of the ring: 1, or its descriptors in a packed one
	readLen  uint64
	writeLen uint64
}

// Readable and Writable are valid until the chain is popped into again.
func (c *Chain) Readable() []Seg { return c.segs[:c.reads:c.reads] }

// Writable is what the device may write; see Readable.
func (c *Chain) Writable() []Seg { return c.segs[c.reads:] }

// Head is the index of the chain's first descriptor, or its id in a packed ring, for messages.
func (c *Chain) Head() uint16 { return c.head }

// ReadableLen is the number of bytes that the driver gave to the device.
func (c *Chain) ReadableLen() uint64 { return c.readLen }

// WritableLen is the number of bytes that the device may write.
func (c *Chain) WritableLen() uint64 { return c.writeLen }

// ReadAt copies in readable bytes from offset off on, as many as dst takes and
// the chain has, and returns their number.
func (c *Chain) ReadAt(dst []byte, off uint64) (int, translate.Miss) {
	n := 0
	for _, s := range c.Readable() {
		if off >= uint64(s.Len) {
			off -= uint64(s.Len)
			continue
		}
		if n == len(dst) {
			break
		}
		part := dst[n:]
		if left := uint64(s.Len) - off; uint64(len(part)) > left {
			part = part[:left]
		}
		if m := c.space.Read(part, s.PA+translate.PA(off)); !m.OK() {
			return n, m
		}
		n += len(part)
		off = 0
	}
	return n, translate.Miss{}
}

// ReadAll is ReadAt from the start of the chain.
func (c *Chain) ReadAll(dst []byte) (int, translate.Miss) { return c.ReadAt(dst, 0) }

// WriteAt copies src to the writable bytes from offset off on, as much as there
// is room for, and returns the number of bytes written.
func (c *Chain) WriteAt(src []byte, off uint64) (int, translate.Miss) {
	n := 0
	for _, s := range c.Writable() {
		if off >= uint64(s.Len) {
			off -= uint64(s.Len)
			continue
		}
		if n == len(src) {
			break
		}
		part := src[n:]
		if left := uint64(s.Len) - off; uint64(len(part)) > left {
			part = part[:left]
		}
		if m := c.space.Write(s.PA+translate.PA(off), part); !m.OK() {
			return n, m
		}
		n += len(part)
		off = 0
	}
	return n, translate.Miss{}
}

// WriteAll is WriteAt from the start of the writable part.
func (c *Chain) WriteAll(src []byte) (int, translate.Miss) { return c.WriteAt(src, 0) }

// Piece returns the chain's first n bytes where they are on the host, if the chain is one segment and they are in one
// piece there; else nil. They are the guest's own, which it may change at any time, and may be used until the caller
// leaves its epoch.
func (c *Chain) Piece(n int) []byte { return c.first.Bytes(uint64(n)) }

// reset empties the chain and keeps its storage.
func (c *Chain) reset(space *translate.Space) {
	c.space = space
	c.segs = c.segs[:0]
	c.reads = 0
	c.first = space.Window(0, 0)
	c.readLen, c.writeLen = 0, 0
	c.head, c.at, c.entries = 0, 0, 0
}

// take makes the chain that of t, which is plain.
func (c *Chain) take(space *translate.Space, t *taken) {
	c.space, c.head, c.entries, c.first = space, t.head, 1, t.buf
	c.segs = append(c.segs[:0], Seg{PA: t.desc.addr, Len: t.desc.len})
	if n := uint64(t.desc.len); t.desc.flags&descWrite == 0 {
		c.reads, c.readLen, c.writeLen = 1, n, 0
	} else {
		c.reads, c.readLen, c.writeLen = 0, 0, n
	}
}
