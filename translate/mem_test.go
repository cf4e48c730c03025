package translate

import (
	"testing"

	"golang.org/x/sys/unix"
)

// hostMem returns n bytes of zeroed memory outside the Go heap.
func hostMem(t testing.TB, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANONYMOUS|unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

func mustMap(t testing.TB, s *Space, pa PA, host []byte) {
	t.Helper()
	if err := s.Map(pa, host); err != nil {
		t.Fatal(err)
	}
}
