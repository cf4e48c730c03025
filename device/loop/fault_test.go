package loop

import (
	"errors"
	"os"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/device/testutil/testlog"
	"github.com/vnicd/vnicd/translate"
)

// hole maps a page of a file and then truncates the file, as a hostile or broken VM may do. Accessing it raises SIGBUS.
func hole(t *testing.T) []byte {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "guest")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(8192); err != nil {
		t.Fatal(err)
	}
	m, err := unix.Mmap(int(f.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(m) })
	m[5000] = 1
	if err := f.Truncate(0); err != nil {
		t.Fatal(err)
	}
	return m
}

func TestFaultInEveryHandler(t *testing.T) {
	m := hole(t)
	l := startLoop(t, Config{})
	touch := func() { m[5000]++ }
	var faults atomic.Int32
	check := func(where string) Option {
		return func(h *handler) {
			Name(where)(h)
			OnFault(func(f Fault) {
				if f.Where != where || f.Foreign || f.Addr == 0 {
					t.Errorf("%s: %+v", where, f)
				}
				if !strings.Contains(f.Error(), where) {
					t.Errorf("message %q", f.Error())
				}
				faults.Add(1)
			})(h)
		}
	}
	want := int32(0)
	expect := func(what string) {
		t.Helper()
		want++
		testutil.Eventually(t, what+" reports its fault", func() bool { return faults.Load() == want })
		ran := false
		if err := l.Do(func() { ran = true }); err != nil || !ran {
			t.Errorf("loop does not run after a fault in %s", what)
		}
	}

	fd := newEventfd(t)
	w, err := l.Watch(fd, func() { drain(fd); touch() }, check("a watch"))
	if err != nil {
		t.Fatal(err)
	}
	kick(t, fd)
	expect("a watch")
	kick(t, fd)
	expect("a watch") // it is not removed: it has OnFault
	w.Close()

	tm := l.NewTimer(func(int64) { touch() }, check("a timer"))
	l.Do(func() { tm.Arm(1) })
	expect("a timer")

	var once atomic.Bool
	once.Store(true)
	p := &testPoller{inPoll: func() {
		if once.Swap(false) {
			touch()
		}
	}}
	l.AddPoller(p, check("a poller"))
	expect("a poller")
	p2 := &testPoller{}
	var prep atomic.Bool
	prep.Store(true)
	p2.inPrepare = func() bool {
		if prep.Swap(false) {
			touch()
		}
		return false
	}
	l.AddPoller(p2, check("a prepare"))
	expect("a prepare")
	l.RemovePoller(p)
	l.RemovePoller(p2)

	once.Store(true)
	h := l.AtFlush(func() {
		if once.Swap(false) {
			touch()
		}
	}, check("a hook"))
	expect("a hook")
	h.Close()
	k := l.NewHook(touch, check("an armed hook"))
	l.Do(k.Arm)
	expect("an armed hook")
	k.Close()

	var released atomic.Int32
	mb := NewMailbox(l, 4, func(int) { touch() }, func(int) { released.Add(1) }, check("a mailbox"))
	mb.Put(1)
	expect("a mailbox")
	if released.Load() != 1 {
		t.Errorf("released %d", released.Load())
	}
	mb.Close()

	var f Fault
	err = l.Do(touch)
	if !errors.As(err, &f) || f.Where != "Do" || f.Addr == 0 || !errors.Is(err, translate.ErrMemoryGone) {
		t.Errorf("a fault in Do did not reach the caller: %v", err)
	}
	if n := l.Stats().Faults; n != uint64(want)+1 {
		t.Errorf("%d faults counted, want %d", n, want+1)
	}
}

// A handler that faults does not keep later handlers of the iteration from running, and without OnFault it is removed.
func TestFaultDoesNotStarve(t *testing.T) {
	m := hole(t)
	l := newLoop(t, Config{})
	var order []string
	bad := &testPoller{inPoll: func() { order = append(order, "bad"); m[5000] = 0 }}
	good := &testPoller{inPoll: func() { order = append(order, "good") }}
	l.AddPoller(bad)
	l.AddPoller(good)
	l.AtFlush(func() { order = append(order, "flush") })
	l.Step()
	if got := strings.Join(order, " "); got != "bad good flush" {
		t.Errorf("order: %s", got)
	}
	order = nil
	l.Step()
	if got := strings.Join(order, " "); got != "good flush" {
		t.Errorf("the faulting poller was not removed: %s", got)
	}
}

// Blame reports the fault to the memory's owner; the handler is only told that it was interrupted.
func TestBlame(t *testing.T) {
	m := hole(t)
	l := newLoop(t, Config{})
	var owner, handler []Fault
	o := NewOwner(func(f Fault) { owner = append(owner, f) })
	p := &testPoller{}
	blame := true
	p.inPoll = func() {
		if blame {
			outer := l.Blame(o)
			if inner := l.Blame(o); inner != o || outer != nil {
				t.Error("Blame does not nest")
			}
		}
		m[5000] = 0
	}
	l.AddPoller(p, OnFault(func(f Fault) { handler = append(handler, f) }))
	l.Step()
	if len(owner) != 1 || owner[0].Foreign || len(handler) != 1 || !handler[0].Foreign {
		t.Fatalf("owner %+v, handler %+v", owner, handler)
	}
	blame = false // the declaration must end with the handler
	l.Step()
	if len(owner) != 1 || len(handler) != 2 || handler[1].Foreign {
		t.Fatalf("owner %+v, handler %+v", owner, handler)
	}
}

// Bugs are not memory faults: a nil dereference still ends the program (here it reaches the test, because Step runs
// inline).
func TestOtherPanicsPass(t *testing.T) {
	l := newLoop(t, Config{})
	var nothing *struct{ x int }
	p := &testPoller{inPoll: func() { nothing.x = 1 }}
	l.AddPoller(p, OnFault(func(Fault) { t.Error("a bug was reported as a memory fault") }))
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(false))
	defer func() {
		if recover() == nil {
			t.Error("the panic was recovered")
		}
		l.stage, l.index = stageEvents, 0
	}()
	l.Step()
}

// TestDoReturnsFaults: a memory fault is Do's error wherever f runs, and neither the caller, a handler that called Do,
// nor the loop is unwound (TR-6).
func TestDoReturnsFaults(t *testing.T) {
	m := hole(t)
	touch := func() { m[5000]++ }
	check := func(what string, err error) {
		t.Helper()
		var f Fault
		if !errors.As(err, &f) || f.Foreign || !errors.Is(err, translate.ErrMemoryGone) {
			t.Errorf("%s: error %v, want a Fault", what, err)
		}
	}
	l := newLoop(t, Config{})
	check("before Start", l.Do(touch))
	if err := l.Start(); err != nil {
		t.Fatal(err)
	}
	check("from another goroutine", l.Do(touch))
	var nested error
	if err := l.Do(func() { nested = l.Do(touch) }); err != nil {
		t.Errorf("the fault of an inner Do reached the outer one: %v", err)
	}
	check("on the loop", nested)

	// In a handler, the owner that the inner function declares is notified; the handler's own declaration stays.
	var of []string
	outer := NewOwner(func(Fault) { of = append(of, "outer") })
	inner := NewOwner(func(Fault) { of = append(of, "inner") })
	var f Fault
	done := make(chan struct{})
	l.Post(func() {
		defer close(done)
		l.Blame(outer)
		err := l.Do(func() { l.Blame(inner); touch() })
		if !errors.As(err, &f) || l.Blame(nil) != outer {
			t.Errorf("error %v, or the declaration was lost", err)
		}
	})
	<-done
	if strings.Join(of, " ") != "inner" || !f.Foreign {
		t.Errorf("notified: %v; %+v", of, f)
	}
	l.Close()
	check("after Close", l.Do(touch))
	if n := l.Stats().Faults; n != 5 {
		t.Errorf("%d faults counted, want 5", n)
	}
}

// TestFaultInFaultHandler: fault handlers must not touch guest memory. One that does so all the same, an owner's or a
// handler's, does not end the loop: it is logged, and the handler is removed.
func TestFaultInFaultHandler(t *testing.T) {
	m := hole(t)
	log := &testlog.Log{}
	l := newLoop(t, Config{Log: log.Logger()})
	touch := func() { m[5000]++ }
	owner := NewOwner(func(Fault) { touch() })
	runs := 0
	p := &testPoller{inPoll: func() { runs++; l.Blame(owner); touch() }}
	l.AddPoller(p, Name("bad"), OnFault(func(f Fault) {
		if !f.Foreign {
			t.Errorf("%+v", f)
		}
		touch()
	}))
	flushed := 0
	l.AtFlush(func() { flushed++ })
	l.Step()
	l.Step()
	if runs != 1 || flushed != 2 {
		t.Errorf("the poller ran %d times, want 1; the flush hook %d, want 2", runs, flushed)
	}
	if n := l.Stats().Faults; n != 3 {
		t.Errorf("%d faults counted, want 3", n)
	}
	if !strings.Contains(log.String(), "fault handler accessed memory") {
		t.Error("nothing was logged")
	}
}
