package ivshmem

import (
	"sync/atomic"
	"unsafe"
)

// word returns the aligned word at the beginning of b, which other processes may change.
func word(b []byte) *atomic.Uint32 {
	_ = b[3]
	return (*atomic.Uint32)(unsafe.Pointer(unsafe.SliceData(b)))
}
