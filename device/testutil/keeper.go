package testutil

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Keeper keeps copies of descriptors between two servers, as systemd's file descriptor store does between two processes
// (vhostuser.Keeper).
type Keeper struct {
	tb testing.TB

	mu     sync.Mutex
	fds    map[string]int // guarded by mu
	ending bool           // guarded by mu
}

// NewKeeper returns an empty Keeper, whose descriptors are closed at the end of the test.
func NewKeeper(tb testing.TB) *Keeper {
	k := &Keeper{tb: tb, fds: map[string]int{}}
	tb.Cleanup(func() {
		for _, fd := range k.fds {
			_ = unix.Close(fd)
		}
	})
	return k
}

// Keep implements vhostuser.Keeper. Keeping a name twice fails the test. A file that is kept already is not kept by a
// second name, as systemd does.
func (k *Keeper) Keep(name string, fd int) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, other := range k.fds {
		if sameFile(fd, other) {
			return nil
		}
	}
	if _, twice := k.fds[name]; twice {
		k.tb.Errorf("%s was kept twice", name)
	}
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	k.fds[name] = dup
	return err
}

// Forget implements vhostuser.Keeper. After End it does nothing.
func (k *Keeper) Forget(name string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if fd, ok := k.fds[name]; ok && !k.ending {
		delete(k.fds, name)
		return unix.Close(fd)
	}
	return nil
}

// Drop removes what is kept under name, as a broken store would.
func (k *Keeper) Drop(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	fd, ok := k.fds[name]
	if !ok {
		k.tb.Errorf("%s is not kept", name)
		return
	}
	delete(k.fds, name)
	_ = unix.Close(fd)
}

// Ending implements vhostuser.Keeper.
func (k *Keeper) Ending() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.ending
}

// End is the end of the process that keeps: nothing is removed any more.
func (k *Keeper) End() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ending = true
}

// FD returns a descriptor that is kept; the Keeper owns it.
func (k *Keeper) FD(name string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	fd, ok := k.fds[name]
	if !ok {
		k.tb.Errorf("%s is not kept", name)
	}
	return fd
}

// Names returns the names of what is kept.
func (k *Keeper) Names() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Sorted(maps.Keys(k.fds))
}

// Pass returns copies of the descriptors for the next process, which begins.
func (k *Keeper) Pass() map[string]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ending = false
	kept := map[string]int{}
	for name, fd := range k.fds {
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			k.tb.Fatal(err)
		}
		kept[name] = dup
	}
	return kept
}

// Copy returns a Keeper with what the next process would find if this one were killed now: what it writes to files of
// state and to journals later is not in it.
func (k *Keeper) Copy(tb testing.TB) *Keeper {
	c := NewKeeper(tb)
	for _, name := range k.Names() {
		fd := k.FD(name)
		if strings.HasSuffix(name, "/state") || strings.Contains(name, "/journal/") {
			fd = copyFile(tb, fd)
			defer unix.Close(fd)
		}
		if err := c.Keep(name, fd); err != nil {
			tb.Fatal(err)
		}
	}
	return c
}

// copyFile returns a memory file with the first 64 KiB of another one.
func copyFile(tb testing.TB, fd int) int {
	dup, err := unix.MemfdCreate("copy", unix.MFD_CLOEXEC)
	if err != nil {
		tb.Fatal(err)
	}
	b := make([]byte, 1<<16)
	n, err := unix.Pread(fd, b, 0)
	if err == nil {
		_, err = unix.Pwrite(dup, b[:n], 0)
	}
	if err != nil {
		tb.Fatal(err)
	}
	return dup
}

// sameFile reports whether two descriptors are of the same open file (kcmp(2)).
func sameFile(a, b int) bool {
	pid := uintptr(unix.Getpid())
	order, _, errno := unix.Syscall6(unix.SYS_KCMP, pid, pid, 0, uintptr(a), uintptr(b), 0) // 0: KCMP_FILE
	return errno == 0 && order == 0
}
