package hostdriver

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// lockOnFault makes every page of b that is mapped, now or later, unevictable (mlock2 with MLOCK_ONFAULT). b is whole
// pages of a mapping.
func lockOnFault(b []byte) error {
	_, _, e := unix.Syscall(unix.SYS_MLOCK2, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
		unix.MLOCK_ONFAULT)
	if e != 0 {
		return e
	}
	return nil
}

// mincore sets bit 0 of vec[i] for each page i of b whose file page is in memory.
// len(vec) is the number of pages of b.
func mincore(b, vec []byte) error {
	_, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
		uintptr(unsafe.Pointer(unsafe.SliceData(vec))))
	if e != 0 {
		return e
	}
	return nil
}
