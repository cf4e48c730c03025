package guestdrv

import (
	"sync/atomic"
	"unsafe"
)

// addressOf returns the address of b's first byte. The memory is mapped, not
// Go's: it does not move.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// atomic32 views four bytes at off, which must be 4-byte aligned, as an atomic
// word. The device's words are little-endian, and so are the machines that vnicd
// supports.
func atomic32(b []byte, off int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&b[off : off+4][0]))
}

// atomic64 views eight bytes at off, which must be 8-byte aligned.
func atomic64(b []byte, off int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&b[off : off+8][0]))
}
