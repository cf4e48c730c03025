package eventfd

import (
	"encoding/binary"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// full is the largest count that write(2) permits.
const full = ^uint64(0) - 1

// hostile makes an eventfd that another process has made blocking, and filled to that count.
func hostile(tb testing.TB, count uint64) int {
	tb.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { unix.Close(fd) })
	if err := unix.SetNonblock(fd, false); err != nil {
		tb.Fatal(err)
	}
	if count > 0 {
		if _, err := unix.Write(fd, binary.NativeEndian.AppendUint64(nil, count)); err != nil {
			tb.Fatal(err)
		}
	}
	return fd
}

func count(tb testing.TB, fd int) uint64 {
	tb.Helper()
	var b [8]byte
	if n, err := unix.Read(fd, b[:]); n != 8 || err != nil {
		tb.Fatal(n, err)
	}
	return binary.NativeEndian.Uint64(b[:])
}

// returns fails the test if f blocks; then it reads fd, so that f returns.
func returns(tb testing.TB, what string, fd int, f func()) {
	tb.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		tb.Errorf("%s blocks", what)
		count(tb, fd)
		<-done
	}
}

// TestRaiseDoesNotBlock: an eventfd that its other owner has made blocking and filled blocks nobody, by Raise or
// through a Waiter, and who waits for it is woken (TR-2). Signals that fit are counted.
func TestRaiseDoesNotBlock(t *testing.T) {
	if err := Prepare(); err != nil {
		t.Fatal(err)
	}
	var h Hint
	fd := hostile(t, full)
	returns(t, "Raise", fd, func() {
		for range 1000 { // more than a context has places
			Raise(fd, &h)
		}
	})
	if n := count(t, fd); n != full+1 { // as far as the kernel counts
		t.Errorf("count %#x", n)
	}
	for range 1000 {
		Raise(fd, &h)
	}
	if n := count(t, fd); n != 1000 {
		t.Errorf("count %d, want 1000", n)
	}

	fd = hostile(t, 0)
	if err := unix.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
	w, err := Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := unix.SetNonblock(fd, false); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Write(fd, binary.NativeEndian.AppendUint64(nil, full)); err != nil {
		t.Fatal(err)
	}
	returns(t, "Waiter.Signal", fd, w.Signal)

	// Waiters in epoll are woken, and in poll, which looks at the count.
	fd = hostile(t, 0)
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ep)
	if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN}); err != nil {
		t.Fatal(err)
	}
	go func() { time.Sleep(time.Millisecond); Raise(fd, &h) }()
	for _, wait := range []func() (int, error){
		func() (int, error) { return unix.EpollWait(ep, make([]unix.EpollEvent, 1), 10000) },
		func() (int, error) { return unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10000) },
	} {
		n, err := wait()
		for err == unix.EINTR {
			n, err = wait()
		}
		if n != 1 || err != nil {
			t.Error("not woken:", n, err)
		}
	}
}

// TestRaiseFromManyThreads: no signal is lost, none goes to another eventfd, and none is slowed down by one that is
// filled.
func TestRaiseFromManyThreads(t *testing.T) {
	if err := Prepare(); err != nil {
		t.Fatal(err)
	}
	const each = 20000
	bad := hostile(t, full)
	var wg sync.WaitGroup
	fds := make([]int, 2*runtime.GOMAXPROCS(0)+2)
	for i := range fds {
		fds[i] = hostile(t, 0)
		wg.Go(func() {
			var h, hb Hint
			for range each {
				Raise(fds[i], &h)
				Raise(bad, &hb)
			}
		})
	}
	wg.Wait()
	for _, fd := range fds {
		if n := count(t, fd); n != each {
			t.Errorf("count %d, want %d", n, each)
		}
	}
}

func TestRaiseAllocatesNothing(t *testing.T) {
	fd := hostile(t, 0)
	var h Hint
	if n := testing.AllocsPerRun(1000, func() { Raise(fd, &h) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkRaise(b *testing.B) {
	if err := Prepare(); err != nil {
		b.Fatal(err)
	}
	fd := hostile(b, 0)
	var h Hint
	b.ReportAllocs()
	for b.Loop() {
		Raise(fd, &h)
	}
}

// BenchmarkAdd is the anchor: what a write costs, which the other side can block.
func BenchmarkAdd(b *testing.B) {
	fd := hostile(b, 0)
	b.ReportAllocs()
	for b.Loop() {
		Add(fd)
	}
}
