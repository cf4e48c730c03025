package vhostuser

import (
	"sync/atomic"
	"unsafe"
)

// words returns b, which begins a page and has a multiple of 8 bytes, as words, which other processes may change.
func words(b []byte) []atomic.Uint64 {
	return unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
}
