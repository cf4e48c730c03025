// Package libvnicd holds the tests of libvnicd, the C library for programs on the host that use the HCA (PF-4, MT-10).
// The library itself is C: include/vnicd.h is its interface, src its source; see README.md. Go programs use package
// guestdrv.
package libvnicd
