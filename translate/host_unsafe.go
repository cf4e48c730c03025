package translate

import (
	"sync/atomic"
	"unsafe"
)

// hostAddr is an address in vnicd's own address space (the MA of the requirements). It points to mapped guest memory
// outside the Go heap.
type hostAddr uintptr

// addrOf returns the address of b, which must not be empty.
func addrOf(b []byte) hostAddr { return hostAddr(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// The conversions below are exempt from checkptr: the tables hold plain numbers because entries are tagged and change
// atomically. Space and its epochs, not the garbage collector, keep their targets mapped.

//go:nocheckptr
func hostBytes(a hostAddr, n int) []byte {
	return unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(nil), a)), n)
}

// hostUint32 needs a 4-byte aligned address.
//
//go:nocheckptr
func hostUint32(a hostAddr) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Add(unsafe.Pointer(nil), a))
}

// hostUint64 needs an 8-byte aligned address.
//
//go:nocheckptr
func hostUint64(a hostAddr) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Add(unsafe.Pointer(nil), a))
}
