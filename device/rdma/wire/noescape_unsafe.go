package wire

import "unsafe"

// noescape returns buf as a slice that the compiler's escape analysis does not
// follow. crc32.Update calls through a function variable, so its argument would
// move to the heap, an allocation per packet, though no implementation of it
// keeps the slice.
//
//go:nosplit
//go:nocheckptr
func noescape(buf *[icrcHead]byte) []byte {
	x := uintptr(unsafe.Pointer(buf))
	return (*[icrcHead]byte)(unsafe.Add(unsafe.Pointer(nil), x))[:]
}
