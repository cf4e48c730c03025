package fastpath

import (
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// shared maps an array of the programs into our memory. It is never unmapped: a loop that changes a network may be
// about to write to it when the table is closed.
func shared(fd, n int) ([]atomic.Uint64, error) {
	size := int(unsafe.Sizeof(atomic.Uint64{}))
	page := unix.Getpagesize()
	b, err := unix.Mmap(fd, 0, (n*size+page-1)/page*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(b))), n), nil
}
