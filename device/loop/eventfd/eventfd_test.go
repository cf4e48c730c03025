package eventfd

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func signal(t *testing.T, w *Waiter) {
	t.Helper()
	if _, err := unix.Write(w.FD(), []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
		t.Error(err)
	}
}

func newWaiter(t *testing.T) *Waiter {
	t.Helper()
	w, err := New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

// TestSignals: look runs at once, and after every signal, though the count is never read; signals during look are not
// lost. Wait can be called again.
func TestSignals(t *testing.T) {
	w := newWaiter(t)
	for range 3 {
		looks := 0
		if err := w.Wait(func() bool {
			looks++
			if looks < 1000 {
				signal(t, w)
				return false
			}
			return true
		}); err != nil || looks != 1000 {
			t.Fatal(looks, err)
		}
	}
	looks := make(chan struct{})
	go func() {
		for range looks {
			signal(t, w)
		}
	}()
	n := 0
	if err := w.Wait(func() bool {
		if n++; n == 1000 {
			close(looks)
			return true
		}
		looks <- struct{}{}
		return false
	}); err != nil {
		t.Fatal(err)
	}
}

// TestDup: a duplicate gets the same signals, and still works when the first is closed.
func TestDup(t *testing.T) {
	w := newWaiter(t)
	d, err := Dup(w.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	n := 0
	if err := d.Wait(func() bool {
		if n++; n == 1 {
			signal(t, w)
			w.Close()
		}
		return n == 2
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := Dup(-1); err == nil {
		t.Fatal("Dup accepted an invalid descriptor")
	}
}

// TestEnds: a wait ends by deadline or Close, before it starts, within look, and from outside.
func TestEnds(t *testing.T) {
	w := newWaiter(t)
	never := func() bool { return false }
	for range 2 {
		if err := w.SetDeadline(time.Now().Add(-1)); err != nil {
			t.Fatal(err)
		}
		if err := w.Wait(never); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal(err)
		}
	}
	if err := w.SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if err := w.Wait(func() bool { return w.SetDeadline(time.Now().Add(time.Millisecond)) != nil }); !errors.Is(err,
		os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	if err := w.SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	looked := make(chan struct{}, 1)
	go func() {
		<-looked
		w.Close()
		w.Close()
	}()
	if err := w.Wait(func() bool { looked <- struct{}{}; return false }); err == nil ||
		errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	if err := w.Wait(never); err == nil {
		t.Fatal("Wait on a closed Waiter succeeded")
	}
}

// TestTake: Take clears the count and does not block, not even if the eventfd's other owner has made it blocking.
func TestTake(t *testing.T) {
	w := newWaiter(t)
	readable := func() bool {
		p := []unix.PollFd{{Fd: int32(w.FD()), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		if err != nil {
			t.Fatal(err)
		}
		return n == 1
	}
	if err := unix.SetNonblock(w.FD(), false); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		Add(w.FD())
		if !readable() {
			t.Fatal("Add did not increase the count")
		}
		if Take(w.FD()); readable() {
			t.Fatal("the count is not 0 after Take")
		}
		Take(w.FD())
	}
	if n := testing.AllocsPerRun(100, func() { Add(w.FD()); Take(w.FD()) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
