package main

import "unsafe"

// addressOf returns where mapped memory, which does not move, begins.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
