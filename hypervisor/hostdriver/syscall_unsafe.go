package hostdriver

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// lockOnFault marks b, whole pages of a mapping, so that every page of it that
// is mapped is unevictable, now and later (mlock2 with MLOCK_ONFAULT).
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
