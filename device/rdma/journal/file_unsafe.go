package journal

import "unsafe"

// word returns the word at the start of b, a part of a mapped file; b begins at a multiple of 8 and has 8 bytes.
func word(b []byte) *Word { return (*Word)(unsafe.Pointer(&b[:8][0])) }
