package main

import "unsafe"

// addressOf returns the address of mapped memory, which does not move.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
