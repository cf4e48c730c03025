package hostdriver

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/translate"
)

// A daemon without permission to lock memory works, and logs that with the remedy once per VM.
func TestNotAllowedToLock(t *testing.T) {
	const capIPCLock = 14
	// Capabilities belong to a thread; this one is not reused.
	runtime.LockOSThread()
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&hdr, &caps[0]); err != nil {
		t.Fatal(err)
	}
	caps[0].Effective &^= 1 << capIPCLock
	if err := unix.Capset(&hdr, &caps[0]); err != nil {
		t.Fatal(err)
	}
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 64 << 10, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old) }()

	const name = "vnicd-test-unlocked"
	var log bytes.Buffer
	b := NewBudget(MinBudget)
	s := translate.NewSpace(1)
	d := New(s, hclog.New(&hclog.LoggerOptions{Output: &log, Mutex: new(sync.Mutex), Level: hclog.Warn}),
		Options{Budget: b})
	defer d.Close()
	for i := range uint64(2) {
		slot(t, d, name, i<<32, 16<<20)
	}
	for i := range 2 * MinBudget / minGranule {
		if err := fetch(testContext(t), s, translate.PA(i*minGranule), 1); err != nil {
			t.Fatal(err)
		}
	}
	if u := smaps(t, name); u.lockedFlag || u.rss != MinBudget {
		t.Errorf("%+v", u)
	}
	for _, want := range []string{"RLIMIT_MEMLOCK is 65536", "CAP_IPC_LOCK", "LimitMEMLOCK"} {
		if st := b.Status(); !strings.Contains(st.Unlocked, want) || strings.Count(log.String(), want) != 1 {
			t.Errorf("%q is not reported exactly once: %q, %s", want, st.Unlocked, log.String())
		}
	}
	if err := audit(b, true); err != nil {
		t.Error(err)
	}
}

// Memory of hugetlbfs comes in its own pages. It is not counted, because it is never swapped. If a page is not
// available, the fault gets an error.
func TestHugeTLB(t *testing.T) {
	const (
		name = "vnicd-test-hugetlb"
		page = 2 << 20
	)
	testutil.HugePages(t, 3)

	b := NewBudget(MinBudget)
	d, s := newDriver(t, Options{Budget: b})
	fd := memfd(t, name, 4096*page, unix.MFD_HUGETLB|unix.MFD_HUGE_2MB, 0)
	// The slot begins inside a huge page, so the mapping must begin before it.
	const lead = 0x180000
	if err := d.AddSlot(Slot{GuestPA: 1 << 32, Size: 4096*page - lead, Offset: lead, FD: fd}); err != nil {
		t.Fatal(err)
	}
	ctx := testContext(t)
	for pa, want := range map[translate.PA]string{1 << 32: "first", 1<<32 + page - lead: "second"} {
		if err := access(ctx, s, 0, pa, 16, func(b []byte) { copy(b, want) }); err != nil {
			t.Fatal(err)
		}
	}
	if !present(s, 1<<32) || !present(s, 1<<32+2*page-lead-1) || present(s, 1<<32+2*page-lead) {
		t.Error("exactly the first two huge pages should be present")
	}
	h, err := d.Hold(ctx, 1<<32+page-lead, page) // more than half of the budget
	if err != nil {
		t.Fatal(err)
	}
	if st := b.Status(); st.HugeTLB != 2*page || st.Resident != 0 || st.Held != 0 {
		t.Errorf("%+v", st)
	}
	// Others may use huge pages too, so it is only certain that there are not as many. A fault that finds none waits
	// (HF-2), and gets the one that the balloon returns.
	var w *waiter
	for i := 2; i < 4096 && b.Status().Short == 0; i++ {
		w = raise(s, 1<<32+translate.PA(i)*page, 1)[0]
		testutil.Eventually(t, "the end of the fault, or of the pool", func() bool {
			return !w.Waiting() || b.Status().Short > 0
		})
	}
	if st := b.Status(); st.Short != 1 || !strings.Contains(st.ShortReason, "huge page") {
		t.Errorf("4096 huge pages: %+v", st)
	}
	if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, page); err != nil {
		t.Fatal(err)
	}
	if err := <-w.done; err != nil {
		t.Error(err)
	}
	d.Resync()
	if present(s, 1<<32) || !present(s, 1<<32+page-lead) {
		t.Error("punched memory should be absent, held memory present")
	}
	h.Release()
	if err := audit(b, true); err != nil {
		t.Error(err)
	}
}

// A file of transparent huge pages is served in such pages.
func TestTransparentHuge(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "huge=always,size=64m"); err != nil {
		if errors.Is(err, unix.EINVAL) {
			t.Skip("this kernel has no huge pages in tmpfs: ", err)
		}
		t.Fatal("mounting a tmpfs, which takes root: ", err)
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	const name = "vnicd-test-thp"
	f, err := os.Create(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(32 << 20); err != nil {
		t.Fatal(err)
	}
	d, s := newDriver(t, Options{})
	if err := d.AddSlot(Slot{Size: 32 << 20, FD: int(f.Fd())}); err != nil {
		t.Fatal(err)
	}
	if err := fetch(testContext(t), s, 5<<20, 1); err != nil {
		t.Fatal(err)
	}
	if u, st := smaps(t, name), d.Status(); u.rss != hugePage || st.Resident != hugePage || !u.lockedFlag {
		t.Errorf("%+v, %+v", u, st)
	} else if u.huge != hugePage {
		t.Logf("no huge page was free: %+v", u)
	}
	d.Close()
}

// The time to add a slot does not depend on its size.
func BenchmarkAddSlot64GiB(b *testing.B) { benchmarkAdd(b, 64<<30) }
func BenchmarkAddSlot1MiB(b *testing.B)  { benchmarkAdd(b, 1<<20) }

func benchmarkAdd(b *testing.B, size uint64) {
	d, _ := newDriver(b, Options{})
	fd := memfd(b, "vnicd-test-add", int64(size), 0, unix.F_SEAL_SHRINK)
	for b.Loop() {
		if err := d.AddSlot(Slot{GuestPA: 1 << 32, Size: size, FD: fd}); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := d.RemoveSlot(1<<32, size, 0); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// From raising to service: 64 KiB that are new (zeroed), in memory, or just withdrawn (second chance).
func BenchmarkFault(b *testing.B) {
	const size = 1 << 30
	one := func(b *testing.B, budget uint64, prepare func(d *Driver, fd, i int)) {
		d, s := newDriver(b, Options{Budget: NewBudget(budget)})
		fd := slot(b, d, "vnicd-test-bench", 0, size)
		ctx := testContext(b)
		i := 0
		for b.Loop() {
			prepare(d, fd, i)
			if err := fetch(ctx, s, translate.PA(i%(size/minGranule)*minGranule), 1); err != nil {
				b.Fatal(err)
			}
			i++
		}
		st := d.Status()
		b.ReportMetric(float64(st.FaultTime.Quantile(0.5).Nanoseconds()), "p50-ns")
		b.ReportMetric(float64(st.Evictions)/float64(i), "evictions/op")
		b.ReportMetric(float64(st.Refaults)/float64(i), "refaults/op")
	}
	b.Run("cold", func(b *testing.B) {
		one(b, 64<<20, func(_ *Driver, fd, i int) {
			b.StopTimer()
			off := int64(i % (size / minGranule) * minGranule)
			_ = unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, minGranule)
			b.StartTimer()
		})
	})
	b.Run("warm", func(b *testing.B) { one(b, 64<<20, func(*Driver, int, int) {}) })
	b.Run("second-chance", func(b *testing.B) {
		one(b, 0, func(d *Driver, _, _ int) {
			b.StopTimer()
			d.opts.Budget.mu.Lock()
			d.opts.Budget.limit = 1 << 40
			d.opts.Budget.withdrawLocked()
			d.opts.Budget.mu.Unlock()
			b.StartTimer()
		})
	})
	b.Run("present", func(b *testing.B) {
		one(b, 0, func(*Driver, int, int) {})
	})
}
