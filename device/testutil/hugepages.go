package testutil

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// HugePages adds n huge pages of 2 MiB to those of the host until the test ends. Tests of other processes that do so
// wait meanwhile.
func HugePages(tb testing.TB, n int) {
	tb.Helper()
	const pool = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
	f, err := os.OpenFile(pool, os.O_RDWR, 0)
	if err != nil {
		tb.Fatal("cannot reserve huge pages of 2 MiB, which takes root and a kernel that has them: ", err)
	}
	tb.Cleanup(func() { _ = f.Close() }) // and the lock
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		tb.Fatal(err)
	}
	get := func() int {
		b, err := os.ReadFile(pool)
		if err != nil {
			tb.Fatal(err)
		}
		have, err := strconv.Atoi(strings.TrimSpace(string(b)))
		if err != nil {
			tb.Fatal(err)
		}
		return have
	}
	set := func(n int) {
		if err := os.WriteFile(pool, []byte(strconv.Itoa(n)), 0o600); err != nil {
			tb.Fatal(err)
		}
	}
	had := get()
	tb.Cleanup(func() { set(max(get()-n, 0)) }) // others may have changed it meanwhile
	// This may fail where memory is fragmented, unless the kernel compacts it.
	set(had + n)
	_ = os.WriteFile("/proc/sys/vm/compact_memory", []byte("1"), 0o600)
	set(had + n)
	if now := get(); now < had+n {
		tb.Fatalf("the host has %d huge pages, want %d: it has none to spare", now, had+n)
	}
}
