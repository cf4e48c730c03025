package vhostuser

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestReopen: the next process gets no more access to a memory file than its front end has given.
func TestReopen(t *testing.T) {
	path := t.TempDir() + "/memory"
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []int{unix.O_RDONLY, unix.O_RDWR} {
		fd, err := unix.Open(path, mode|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		again, err := reopen(fd)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(again)
		if got, err := unix.FcntlInt(uintptr(again), unix.F_GETFL, 0); err != nil || got&unix.O_ACCMODE != mode {
			t.Errorf("access %#o, want %#o: %v", got&unix.O_ACCMODE, mode, err)
		}
	}
}
