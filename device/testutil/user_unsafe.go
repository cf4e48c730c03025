package testutil

import (
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// AsUser runs f on a thread of its own with another user, group and supplementary groups, as the kernel and SO_PEERCRED
// see it. The caller must be root. f must not start goroutines that need these identities.
func AsUser(tb testing.TB, uid, gid int, groups []int, f func()) {
	tb.Helper()
	var errno unix.Errno
	var done sync.WaitGroup
	done.Go(func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		ids := make([]uint32, len(groups)+1)
		for i, g := range groups {
			ids[i] = uint32(g)
		}
		// Raw system calls concern one thread (setresuid(2), "C library/kernel differences").
		for _, call := range [][4]uintptr{
			{unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&ids[0]))},
			{unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid)},
			{unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)},
		} {
			if _, _, errno = unix.RawSyscall(call[0], call[1], call[2], call[3]); errno != 0 {
				return
			}
		}
		runtime.KeepAlive(ids)
		f()
	})
	done.Wait()
	if errno != 0 {
		tb.Fatalf("cannot act as user %d group %d: %v", uid, gid, errno)
	}
}
