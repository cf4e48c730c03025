package virtq

import "github.com/vnicd/vnicd/translate"

// MaxChain bounds the segments of one chain, indirect ones included. Virtio forbids chains longer than the queue, but
// drivers with indirect tables exceed short queues, so the bound is the largest usual queue size.
const MaxChain = 1024

// Seg is one buffer of guest memory as in its descriptor; the address is only checked for overflow, so each access may
// still miss.
type Seg struct {
	PA  translate.PA
	Len uint32
}

// Chain is one buffer chain that the driver made available: first the segments that the device may read, then those
// that it may write. Queue.Pop fills it and reuses its storage.
type Chain struct {
	space    *translate.Space
	segs     []Seg            // readable ones first
	reads    int              // number of readable ones
	first    translate.Window // the only segment, if it has been looked up already
	head     uint16
	at       uint16 // place in the ring
	entries  uint16 // entries in the ring: 1, or the number of descriptors in a packed one
	readLen  uint64
	writeLen uint64
	cut      bool // not all descriptors that the device needs were read
	again    bool // from Retake: its place is not known
}

// Cut reports that the chain has fewer bytes than PopPart was to find, in as many descriptors as it was to read.
func (c *Chain) Cut() bool { return c.cut }

// Readable and Writable return the chain's buffers; they are valid until the next Pop into the chain.
func (c *Chain) Readable() []Seg { return c.segs[:c.reads:c.reads] }

// Writable returns the buffers that the device may write; see Readable.
func (c *Chain) Writable() []Seg { return c.segs[c.reads:] }

// Head is the index of the chain's first descriptor, or its id in a packed ring. It is for messages.
func (c *Chain) Head() uint16 { return c.head }

// ReadableLen is the number of bytes that the device may read.
func (c *Chain) ReadableLen() uint64 { return c.readLen }

// WritableLen is the number of bytes that the device may write.
func (c *Chain) WritableLen() uint64 { return c.writeLen }

// ReadAt copies readable bytes from offset off on into dst, up to the end of either, and returns their number.
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

// WriteAt copies src to the writable bytes from offset off on, up to the end of either, and returns the number of bytes
// written.
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

// ReadMessage is ReadAll for a message to the device itself, such as a command: it is part of the queue, so that the
// VM's uplink attribute does not apply to it (PF-3).
func (c *Chain) ReadMessage(dst []byte) (int, translate.Miss) {
	n := 0
	for _, s := range c.Readable() {
		part := dst[n:min(uint64(len(dst)), uint64(n)+uint64(s.Len))]
		if m := c.space.RingRead(part, s.PA); !m.OK() {
			return n, m
		}
		n += len(part)
	}
	return n, translate.Miss{}
}

// WriteMessage is WriteAll for a message of the device itself; see ReadMessage.
func (c *Chain) WriteMessage(src []byte) (int, translate.Miss) {
	n := 0
	for _, s := range c.Writable() {
		part := src[n:min(uint64(len(src)), uint64(n)+uint64(s.Len))]
		if m := c.space.RingWrite(s.PA, part); !m.OK() {
			return n, m
		}
		n += len(part)
	}
	return n, translate.Miss{}
}

// Piece returns the chain's first n bytes in place, if the chain is one segment and they are contiguous on the host;
// otherwise, or if the VM's attribute restricts accesses (PF-3), nil. The guest may change them at any time; the caller
// may use them until it leaves its epoch.
func (c *Chain) Piece(n int) []byte { return c.first.Bytes(uint64(n)) }

// reset empties the chain and keeps its storage.
func (c *Chain) reset(space *translate.Space) {
	c.space = space
	c.segs = c.segs[:0]
	c.reads = 0
	c.first = space.Window(0, 0)
	c.readLen, c.writeLen = 0, 0
	c.head, c.at, c.entries, c.cut, c.again = 0, 0, 0, false, false
}

// take fills the chain from t, which is plain.
func (c *Chain) take(space *translate.Space, t *taken) {
	c.space, c.head, c.entries, c.first, c.cut, c.again = space, t.head, 1, t.buf, false, false
	c.segs = append(c.segs[:0], Seg{PA: t.desc.addr, Len: t.desc.len})
	if n := uint64(t.desc.len); t.desc.flags&descWrite == 0 {
		c.reads, c.readLen, c.writeLen = 1, n, 0
	} else {
		c.reads, c.readLen, c.writeLen = 0, 0, n
	}
}
