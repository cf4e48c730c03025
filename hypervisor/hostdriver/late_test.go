package hostdriver

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/translate"
)

// fakeClock is a Clock that the test advances.
type fakeClock struct {
	mu     sync.Mutex
	now    time.Time
	timers []*fakeTimer
}

type fakeTimer struct {
	at time.Time
	f  func()
}

func newFakeClock() *fakeClock { return &fakeClock{now: time.Unix(1e9, 0)} }

func (c *fakeClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *fakeClock) AfterFunc(after time.Duration, f func()) func() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &fakeTimer{c.now.Add(after), f}
	c.timers = append(c.timers, t)
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		n := len(c.timers)
		c.timers = slices.DeleteFunc(c.timers, func(x *fakeTimer) bool { return x == t })
		return len(c.timers) < n
	}
}

// pending returns how long the next timer has to run, 0 if there is none.
func (c *fakeClock) pending() (d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range c.timers {
		if left := t.at.Sub(c.now); d == 0 || left < d {
			d = left
		}
	}
	return d
}

// advance moves the time and calls what is due.
func (c *fakeClock) advance(d time.Duration) {
	c.mu.Lock()
	c.now = c.now.Add(d)
	var due []*fakeTimer
	c.timers = slices.DeleteFunc(c.timers, func(t *fakeTimer) bool {
		if t.at.After(c.now) {
			return false
		}
		due = append(due, t)
		return true
	})
	c.mu.Unlock()
	for _, t := range due {
		t.f()
	}
}

// ended reports whether the waiter's fault is finished, and its error.
func (w *waiter) ended() (err error, ok bool) {
	select {
	case err = <-w.done:
		return err, true
	default:
		return nil, false
	}
}

// smallFS returns a file of 16 MiB in a file system that has room for 4 MiB.
func smallFS(t *testing.T) *os.File {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=4m"); err != nil {
		t.Fatal("mounting a tmpfs, which takes root: ", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	f, err := os.Create(filepath.Join(dir, "vnicd-test-small"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(16 << 20); err != nil {
		t.Fatal(err)
	}
	return f
}

// HF-2: where the file system of the memory is full, a fault waits, and others go on: those of the same connection for
// memory that is there, and those of other VMs. It is served once there is room. Only memory that is gone, because the
// file shrank or the slot was removed, ends it with an error.
func TestFullFileSystem(t *testing.T) {
	f := smallFS(t)
	s := translate.NewSpace(1)
	d := New(s, testLog(t), Options{})
	defer d.Close()
	if err := d.AddSlot(Slot{Size: 16 << 20, UserAddr: 1 << 40, FD: int(f.Fd())}); err != nil {
		t.Fatal(err)
	}
	ctx := testContext(t)
	const fit = 3 << 20
	for pa := translate.PA(0); pa < fit; pa += minGranule {
		if err := fetch(ctx, s, pa, 1); err != nil {
			t.Fatal(err)
		}
	}
	ws := raise(s, fit, 40) // 2.5 MiB, of which less than 1 MiB fits
	waiting := func() (n int) {
		for _, w := range ws {
			if w.Waiting() {
				n++
			}
		}
		return n
	}
	testutil.Eventually(t, "faults wait for memory", func() bool { n := d.Status().Short; return n > 0 && n == waiting() })
	st := d.Status()
	if st.Short < 24 || st.FailedFaults != 0 || st.Delayed != uint64(st.Short) || st.ShortFor <= 0 ||
		!strings.Contains(st.ShortReason, "quota") {
		t.Errorf("%+v", st)
	}
	before := st.HostFaults
	for range 100 {
		if err := fetch(ctx, s, 0, 1); err != nil {
			t.Fatal("a fault beside those that wait: ", err)
		}
	}
	other, otherS := newDriver(t, Options{})
	slot(t, other, "vnicd-test-beside", 0, 8<<20)
	if err := fetch(ctx, otherS, 0, 2<<20); err != nil {
		t.Error("a fault of another VM: ", err)
	}
	if st := d.Status(); st.HostFaults < before+100 {
		t.Errorf("%d faults served beside those that wait", st.HostFaults-before)
	}
	held := make(chan error, 1)
	go func() {
		h, err := d.Hold(ctx, 12<<20, 1)
		if err == nil {
			h.Release()
		}
		held <- err
	}()
	testutil.Eventually(t, "a hold waits, too", func() bool { return d.Status().Delayed > st.Delayed })

	// Room for all of them.
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, fit); err != nil {
		t.Fatal(err)
	}
	for i, w := range ws {
		if err := <-w.done; err != nil {
			t.Errorf("fault %d: %v", i, err)
		}
	}
	if err := <-held; err != nil {
		t.Error(err)
	}
	testutil.Eventually(t, "nothing waits", func() bool { return d.Status().Short == 0 })
	if st := d.Status(); st.FailedFaults != 0 || st.ShortReason != "" || st.Delayed < 24 {
		t.Errorf("%+v", st)
	}
	if err := audit(d.opts.Budget, true); err != nil {
		t.Error(err)
	}

	// Full again; then the file ends before some of the memory that is waited for.
	ws = append(raise(s, 7<<20, 48), raise(s, 14<<20, 1)...)
	testutil.Eventually(t, "faults wait for memory", func() bool { n := d.Status().Short; return n > 0 && n == waiting() })
	if err := f.Truncate(13 << 20); err != nil {
		t.Fatal(err)
	}
	if err := <-ws[48].done; !errors.Is(err, translate.ErrMemoryGone) {
		t.Errorf("beyond the end of the file: %v", err)
	}
	if n := waiting(); n == 0 {
		t.Fatal("nothing waits: this proves nothing")
	}
	if err := d.RemoveSlot(0, 16<<20, 1<<40); err != nil {
		t.Fatal(err)
	}
	for i, w := range ws[:48] {
		if err := <-w.done; err != nil && !errors.Is(err, translate.ErrMemoryGone) && !errors.Is(err, translate.ErrMiss) {
			t.Errorf("fault %d of a removed slot: %v", i, err)
		}
	}
}

// shortMemory makes the kernel's answer to populating an error while one is set.
type shortMemory struct {
	err   atomic.Pointer[error]
	calls atomic.Int64
}

func (s *shortMemory) set(err error) {
	if err == nil {
		s.err.Store(nil)
	} else {
		s.err.Store(&err)
	}
}

func (s *shortMemory) in(b *Budget) {
	b.fill = func(mem []byte) (bool, error) {
		s.calls.Add(1)
		if e := s.err.Load(); e != nil {
			return false, *e
		}
		return populate(mem)
	}
}

// HF-2: the kernel is out of memory, or the memory cgroup is full (ENOMEM, EAGAIN). One attempt at a time, at growing
// intervals, while any number of faults waits; all of them once it succeeds.
func TestBackOff(t *testing.T) {
	for _, cause := range []error{unix.ENOMEM, unix.EAGAIN} {
		t.Run(cause.Error(), func(t *testing.T) {
			clock, short, b := newFakeClock(), new(shortMemory), NewBudget(0)
			short.in(b)
			d, s := newDriver(t, Options{Budget: b, Clock: clock})
			slot(t, d, "vnicd-test-backoff", 0, 64<<20)
			short.set(cause)
			const faults = 300
			ws := raise(s, 0, faults)
			testutil.Eventually(t, "all wait", func() bool { return d.Status().Short == faults })
			attempts := func() int64 { // one attempt may call several times
				if cause == unix.EAGAIN {
					return short.calls.Load() / 101
				}
				return short.calls.Load()
			}
			if n := attempts(); n != faults {
				t.Errorf("%d attempts of %d faults", n, faults)
			}
			want := minDelay
			for round := range int64(12) {
				if n := clock.pending(); n != want {
					t.Fatalf("round %d: next attempt in %v, want %v", round, n, want)
				}
				clock.advance(want - 1)
				if n := attempts(); n != faults+round {
					t.Fatalf("%d attempts before the time", n-faults)
				}
				clock.advance(1)
				testutil.Eventually(t, "one attempt", func() bool { return clock.pending() > 0 })
				if n := attempts(); n != faults+round+1 {
					t.Fatalf("%d attempts, want %d", n-faults, round+1)
				}
				want = min(2*want, maxDelay)
			}
			if st := d.Status(); st.Short != faults || st.Delayed != faults || st.ShortFor < maxDelay {
				t.Errorf("%+v", st)
			}
			short.set(nil)
			clock.advance(maxDelay)
			for _, w := range ws {
				if err := <-w.done; err != nil {
					t.Fatal(err)
				}
			}
			testutil.Eventually(t, "nothing waits", func() bool { return d.Status().Short == 0 })
			if n := clock.pending(); n != 0 {
				t.Errorf("a timer runs for another %v", n)
			}
			if st := d.Status(); st.FailedFaults != 0 || st.HostFaults != faults {
				t.Errorf("%+v", st)
			}
		})
	}
}

// Close ends faults and holds that wait for memory, with an error.
func TestCloseAmidShortage(t *testing.T) {
	short, b := new(shortMemory), NewBudget(MinBudget)
	short.in(b)
	short.set(unix.ENOMEM)
	d, s := newDriver(t, Options{Budget: b})
	slot(t, d, "vnicd-test-close-short", 0, 16<<20)
	ws := raise(s, 0, 50)
	held := make(chan error, 2)
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, err := d.Hold(ctx, 8<<20, 1)
		held <- err
	}()
	testutil.Eventually(t, "all wait", func() bool { return d.Status().Short == len(ws)+1 })
	cancel()
	if err := <-held; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	go func() {
		_, err := d.Hold(context.Background(), 8<<20, 1)
		held <- err
	}()
	testutil.Eventually(t, "all wait", func() bool { return d.Status().Short == len(ws)+1 })
	d.Close()
	for _, w := range ws {
		if err, ok := w.ended(); !ok || err == nil {
			t.Errorf("ended %v, %v", ok, err)
		}
	}
	if err := <-held; err == nil {
		t.Error("a hold succeeded")
	}
	if st := b.Status(); st.Resident != 0 || st.Held != 0 || st.Delayed != uint64(len(ws)+2) {
		t.Errorf("%+v", st)
	}
}

// TestBugInPager: a panic while memory is made resident ends that connection, with its stack in the log, and nothing
// else: the operation that waits fails, and the memory is released as always (TR-6).
func TestBugInPager(t *testing.T) {
	b := NewBudget(0)
	fill := b.fill
	b.fill = func(mem []byte) (bool, error) {
		var nothing *struct{ x int }
		nothing.x = 1
		return fill(mem)
	}
	var out strings.Builder
	broken := 0
	s := translate.NewSpace(1)
	d := New(s, hclog.New(&hclog.LoggerOptions{Output: &out}), Options{Budget: b, Broken: func() { broken++ }})
	other, theirs := newDriver(t, Options{})
	slot(t, d, "vnicd-test-bug", 0, 1<<20)
	slot(t, other, "vnicd-test-ok", 0, 1<<20)
	ctx := testContext(t)
	for range 3 {
		if err := fetch(ctx, s, 0x1000, 8); err == nil {
			t.Error("the fault was served")
		}
	}
	if _, err := d.Hold(ctx, 0x2000, 8); err == nil {
		t.Error("memory is held that is not resident")
	}
	if err := fetch(ctx, theirs, 0x1000, 8); err != nil {
		t.Error(err)
	}
	d.Close()
	if s := out.String(); broken != 1 || strings.Count(s, "bug in vnicd") == 0 || !strings.Contains(s, "late_test.go") {
		t.Errorf("connection ended %d times; log:\n%s", broken, s)
	}
	if n := mappings(t, "vnicd-test-bug"); n != 0 {
		t.Errorf("%d mappings are left", n)
	}
}
