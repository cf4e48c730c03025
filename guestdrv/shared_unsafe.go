package guestdrv

import (
	"sync/atomic"
	"unsafe"
)

// addressOf returns the address of b's first byte. The memory is mapped, so the garbage collector does not move it.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// atomic32 returns the four bytes at off, a multiple of 4, as an atomic word. The device's words are little-endian, as
// are the machines that vnicd supports.
func atomic32(b []byte, off int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&b[off : off+4][0]))
}

// atomic64 returns the eight bytes at off, a multiple of 8, as an atomic word.
func atomic64(b []byte, off int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&b[off : off+8][0]))
}
