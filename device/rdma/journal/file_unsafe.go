package journal

import (
	"sync/atomic"
	"unsafe"
)

// word returns the word at the start of b, a part of a mapped file; b begins at a multiple of 8 and has 8 bytes.
func word(b []byte) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&b[:8][0])) }
