// Package record encodes the state of RDMA objects that another process continues (CO-1, CO-7).
//
// One function describes a record for both directions:
//
//	func (x *thing) record(c *record.Codec) {
//		record.Num(c, &x.count)
//		c.Bool(&x.ready)
//	}
//
// Numbers are unsigned LEB128 (encoding/binary's Uvarint), truth values are 0 or 1, byte strings of fixed length stand
// for themselves, and lists begin with their length. What is written often is in words of 8 bytes (Words, Pack). A
// record begins with a version (Version); fields are only ever appended to it, within Since. What is read is untrusted:
// a Codec never panics, reads nothing twice, and keeps the first error.
package record

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// ErrInvalid is wrapped by all errors.
var ErrInvalid = errors.New("invalid state record")

// Codec writes a record, or reads one.
type Codec struct {
	b       []byte // written so far, or to be read
	reading bool
	version uint32
	as      uint32 // the version to write; 0: the newest
	most    int    // bytes to write; 0: any number
	err     error
}

// Writer returns a Codec that writes.
func Writer() *Codec { return &Codec{} }

// AtMost makes a writer fail whose record gets longer than n > 0 bytes. It writes little more.
func (c *Codec) AtMost(n int) *Codec {
	c.most = n
	return c
}

// full reports whether the record is too long, or something was wrong before.
func (c *Codec) full() bool {
	if len(c.b) > c.most {
		c.Fail("more than %d bytes", c.most)
	}
	return c.err != nil
}

// AppendTo makes c a writer that appends to b, and returns it.
func (c *Codec) AppendTo(b []byte) *Codec {
	*c = Codec{b: b}
	return c
}

// Reader returns a Codec that reads b, which must not change.
func Reader(b []byte) *Codec { return &Codec{b: b, reading: true} }

// Reading reports the direction.
func (c *Codec) Reading() bool { return c.reading }

// Err returns the first error, nil if there was none.
func (c *Codec) Err() error { return c.err }

// Bytes returns what was written.
func (c *Codec) Bytes() []byte { return c.b }

// Fail records an error, unless there is one: a value contradicts others.
func (c *Codec) Fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
	}
}

// End checks that everything was read, or that no more was written than may be.
func (c *Codec) End() error {
	switch {
	case c.reading && len(c.b) > 0:
		c.Fail("%d bytes too many", len(c.b))
	case c.most > 0:
		c.full()
	}
	return c.err
}

// Version begins a record of a kind that magic names: it writes newest, or reads a version that is at most newest.
func (c *Codec) Version(magic string, newest uint32) {
	m := []byte(magic)
	c.Fixed(m)
	if string(m) != magic {
		c.Fail("begins with %q, want %q", m, magic)
	}
	v := newest
	if c.as != 0 {
		v = c.as
	}
	Num(c, &v)
	if v == 0 || v > newest {
		c.Fail("%s of version %d, this vnicd knows 1 to %d", magic, v, newest)
	}
	c.version = v
}

// Of sets the version of a record within one that has a version, before anything is written or read. It returns c.
func (c *Codec) Of(outer uint32) *Codec {
	c.version = outer
	return c
}

// As makes a writer write an older version: the records that an older vnicd would have written.
func (c *Codec) As(version uint32) *Codec {
	c.as = version
	return c
}

// Written returns the version of what is read, or the newest.
func (c *Codec) Written() uint32 { return c.version }

// Since reports whether the record has the fields of a version.
func (c *Codec) Since(version uint32) bool { return c.version >= version }

// Num is a number; it must fit into T. Negative numbers are not for records.
func Num[T ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~int](c *Codec, p *T) {
	if !c.reading {
		if c.most > 0 && c.full() {
			return
		}
		c.b = binary.AppendUvarint(c.b, uint64(*p))
		return
	}
	v := c.number()
	if *p = T(v); uint64(*p) != v || *p < 0 {
		*p = 0
		c.Fail("number %d is too large", v)
	}
}

// Max is Num for a number that must not exceed most.
func Max[T ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~int](c *Codec, p *T, most T, what string) {
	Num(c, p)
	if c.reading && *p > most {
		c.Fail("%s is %d, must be at most %d", what, *p, most)
		*p = 0
	}
}

func (c *Codec) number() uint64 {
	if c.err != nil {
		return 0
	}
	v, n := binary.Uvarint(c.b)
	if n <= 0 {
		c.Fail("number is cut off, or has more than 64 bits")
		return 0
	}
	c.b = c.b[n:]
	return v
}

// Bool is a truth value.
func (c *Codec) Bool(p *bool) {
	v := uint8(0)
	if *p {
		v = 1
	}
	Max(c, &v, 1, "truth value")
	if c.reading {
		*p = v == 1
	}
}

// Words are numbers of 8 bytes each: longer than Nums, but many times faster to write.
func (c *Codec) Words(w []uint64) {
	if !c.reading {
		n := len(c.b)
		c.b = slices.Grow(c.b, 8*len(w))[:n+8*len(w)]
		for i, v := range w {
			binary.LittleEndian.PutUint64(c.b[n+8*i:], v)
		}
		return
	}
	if c.err != nil || len(c.b) < 8*len(w) {
		clear(w)
		c.Fail("%d words are cut off", len(w))
		return
	}
	for i := range w {
		w[i] = binary.LittleEndian.Uint64(c.b[8*i:])
	}
	c.b = c.b[8*len(w):]
}

// Pack returns truth values as the bits of a word, from bit 0 on.
func Pack(p ...*bool) (w uint64) {
	for i := range p {
		if *p[i] {
			w |= 1 << i
		}
	}
	return w
}

// Unpack sets truth values to the bits of a word that Pack has made.
func Unpack(w uint64, p ...*bool) {
	for i := range p {
		*p[i] = w&(1<<i) != 0
	}
}

// Pair returns a word of two numbers.
func Pair(low, high uint32) uint64 { return uint64(low) | uint64(high)<<32 }

// Unpair sets the numbers of a word that Pair has made.
func Unpair(w uint64, low, high *uint32) { *low, *high = uint32(w), uint32(w>>32) }

// Open begins a byte string, which is what is written until Close: its reader uses Sub.
func (c *Codec) Open() (at int) {
	c.b = append(c.b, 0, 0, 0, 0)
	return len(c.b)
}

// Close ends the byte string that Open has begun.
func (c *Codec) Close(at int) { binary.LittleEndian.PutUint32(c.b[at-4:], uint32(len(c.b)-at)) }

// Sub is a byte string, such as a record within the record. Reading returns a part of what is read.
func (c *Codec) Sub(p *[]byte) {
	if !c.reading {
		at := c.Open()
		c.b = append(c.b, *p...)
		c.Close(at)
		return
	}
	*p = nil
	if c.err != nil || len(c.b) < 4 || uint64(binary.LittleEndian.Uint32(c.b)) > uint64(len(c.b)-4) {
		c.Fail("a byte string is cut off")
		return
	}
	n := 4 + int(binary.LittleEndian.Uint32(c.b))
	*p, c.b = c.b[4:n:n], c.b[n:]
}

// Fixed is a byte string whose length both sides know.
func (c *Codec) Fixed(p []byte) {
	switch {
	case !c.reading:
		c.b = append(c.b, p...)
	case c.err != nil || len(c.b) < len(p):
		clear(p)
		c.Fail("%d bytes are cut off", len(p))
	default:
		c.b = c.b[copy(p, c.b):]
	}
}

// Blob is a byte string of at most most bytes, such as a record within the record. Reading returns a part of what is
// read.
func (c *Codec) Blob(p *[]byte, most int, what string) {
	n := c.Len(len(*p), most, what)
	if !c.reading {
		c.b = append(c.b, *p...)
		return
	}
	*p, c.b = c.b[:n:n], c.b[n:]
}

// Len is the length of a list, n when writing. It is at most most, and, when reading, at most what the rest of the
// record can hold: each element has at least one byte.
func (c *Codec) Len(n, most int, what string) int {
	Num(c, &n)
	if c.reading && (n > most || n > len(c.b)) {
		c.Fail("%d %s, at most %d fit", n, what, min(most, len(c.b)))
	}
	if c.err != nil {
		return 0
	}
	return n
}

// List is a list of at most most elements; f describes one. Reading replaces *p.
func List[T any](c *Codec, p *[]T, most int, what string, f func(*T)) {
	n := c.Len(len(*p), most, what)
	if c.reading {
		*p = make([]T, 0, min(n, 1024)) // grows only with what is really there
	}
	for i := range n {
		if c.reading {
			*p = append(*p, *new(T))
		}
		if f(&(*p)[i]); c.err != nil {
			return
		}
	}
}
