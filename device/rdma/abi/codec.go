package abi

import (
	"encoding/binary"
	"errors"
	"fmt"
)

var (
	// ErrShort is wrapped by Decode's error when the input ends before the structure does.
	ErrShort = errors.New("structure is cut short")
	// ErrReserved is wrapped by Decode's error when a reserved field is not zero. All other fields have been decoded: a
	// driver ignores this error, a device does not (CO-6).
	ErrReserved = errors.New("reserved field is not zero")
)

// DecodeError tells which structure could not be decoded and why. It wraps ErrShort or ErrReserved.
type DecodeError struct {
	Struct string // name of the C structure
	Offset int    // of the first offending byte; the input's length for ErrShort
	Want   int    // size of the structure in bytes
	Err    error
}

func (e *DecodeError) Error() string {
	if errors.Is(e.Err, ErrShort) {
		return fmt.Sprintf("%s: %v: %d bytes, need %d", e.Struct, e.Err, e.Offset, e.Want)
	}
	return fmt.Sprintf("%s: %v at byte %d", e.Struct, e.Err, e.Offset)
}

func (e *DecodeError) Unwrap() error { return e.Err }

// codec walks over a structure's bytes in either direction. One list of fields per structure serves Encode and Decode,
// so that the two cannot diverge. The caller has checked that b is long enough.
type codec struct {
	b   []byte
	off int
	dec bool
	bad int // offset of the first nonzero reserved byte, -1 if none
}

func encoder(name string, b []byte, size int) codec {
	if len(b) < size {
		panic(fmt.Sprintf("abi: encode %s: buffer of %d bytes, need %d", name, len(b), size))
	}
	return codec{b: b[:size], bad: -1}
}

func decoder(b []byte, size int) (codec, bool) {
	if len(b) < size {
		return codec{}, false
	}
	return codec{b: b[:size], dec: true, bad: -1}, true
}

func short(name string, b []byte, size int) error {
	return &DecodeError{Struct: name, Offset: len(b), Want: size, Err: ErrShort}
}

// end reports what Decode returns for the structure name.
func (c *codec) end(name string) error {
	if c.bad >= 0 {
		return &DecodeError{Struct: name, Offset: c.bad, Want: len(c.b), Err: ErrReserved}
	}
	return nil
}

func (c *codec) u8(p *uint8) {
	if c.dec {
		*p = c.b[c.off]
	} else {
		c.b[c.off] = *p
	}
	c.off++
}

func (c *codec) u16(p *uint16) {
	if c.dec {
		*p = binary.LittleEndian.Uint16(c.b[c.off:])
	} else {
		binary.LittleEndian.PutUint16(c.b[c.off:], *p)
	}
	c.off += 2
}

func (c *codec) u32(p *uint32) {
	if c.dec {
		*p = binary.LittleEndian.Uint32(c.b[c.off:])
	} else {
		binary.LittleEndian.PutUint32(c.b[c.off:], *p)
	}
	c.off += 4
}

func (c *codec) u64(p *uint64) {
	if c.dec {
		*p = binary.LittleEndian.Uint64(c.b[c.off:])
	} else {
		binary.LittleEndian.PutUint64(c.b[c.off:], *p)
	}
	c.off += 8
}

func (c *codec) bytes(p []byte) {
	if c.dec {
		copy(p, c.b[c.off:])
	} else {
		copy(c.b[c.off:], p)
	}
	c.off += len(p)
}

// zero covers n reserved bytes.
func (c *codec) zero(n int) {
	r := c.b[c.off : c.off+n]
	if !c.dec {
		clear(r)
	} else if c.bad < 0 {
		for i, v := range r {
			if v != 0 {
				c.bad = c.off + i
				break
			}
		}
	}
	c.off += n
}

// PutPAs writes pas as consecutive little-endian 64-bit words, the form in which
// page lists follow a command. dst must hold 8*len(pas) bytes.
func PutPAs(dst []byte, pas []uint64) {
	for i, pa := range pas {
		binary.LittleEndian.PutUint64(dst[8*i:], pa)
	}
}

// PA returns the i-th word of a page list. It panics if list is too short; check
// len(list) >= 8*n once before a loop.
func PA(list []byte, i int) uint64 {
	return binary.LittleEndian.Uint64(list[8*i:])
}
