package guestdrv_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/guestdrv"
)

// stopLoops stops the loops of a site until the returned function is called: commands that need a loop, and those
// queued behind them, get no answer.
func stopLoops(tb testing.TB, s *site) (release func()) {
	tb.Helper()
	gate, stopped := make(chan struct{}), make(chan struct{}, len(s.loops))
	for _, l := range s.loops {
		if !l.Post(func() { stopped <- struct{}{}; <-gate }) {
			tb.Fatal("the loop is closed")
		}
	}
	for range s.loops {
		<-stopped
	}
	return func() { close(gate) }
}

// largest returns the size in bytes of the largest buffer that can be allocated.
func largest(tb testing.TB, h *host) int {
	tb.Helper()
	lo, hi := 0, 64<<20
	for hi-lo > page {
		n := (lo + hi) / 2 &^ (page - 1)
		b, err := h.Alloc(n)
		switch {
		case err == nil:
			if err := b.Close(); err != nil {
				tb.Fatal(err)
			}
			lo = n
		case errors.Is(err, guestdrv.ErrNoMemory):
			hi = n
		default:
			tb.Fatal(err)
		}
	}
	return lo
}

// A command whose context ends, or that exceeds Config.Timeout, affects no other: the device remains usable, and memory
// and objects of the command are released once the device has answered.
func TestLateAnswers(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1, driver: guestdrv.Config{Timeout: 200 * time.Millisecond}})
	h := r.hosts[0]
	cq, err := h.CreateCQ(bg, 16, guestdrv.CQOptions{})
	if err != nil {
		t.Fatal(err)
	}
	newQP := func() *guestdrv.QP {
		qp, err := h.pd.CreateQP(bg, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: cq, RecvCQ: cq, MaxSendWR: 16,
			MaxRecvWR: 16})
		if err != nil {
			t.Fatal(err)
		}
		return qp
	}
	before, room := h.hca.Describe(), largest(t, h)
	for round := range 3 {
		qp := newQP()
		release := stopLoops(t, h.site)
		if err := qp.Close(); !errors.Is(err, guestdrv.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("round %d: Close: %v, want %v", round, err, guestdrv.ErrTimeout)
		}
		// More commands than slots, behind the one that waits for the loops.
		for i := range 20 {
			ctx, cancel := context.WithTimeout(bg, 10*time.Millisecond)
			var err error
			if i%2 == 0 {
				_, err = h.CreateCQ(ctx, 16, guestdrv.CQOptions{})
			} else {
				_, err = h.AllocPD(ctx)
			}
			if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, guestdrv.ErrTimeout) {
				t.Errorf("round %d: command %d: %v, want the context's error", round, i, err)
			}
			cancel()
		}
		if room := largest(t, h); round == 0 && room == 0 {
			t.Error("no memory is left")
		}
		release()
		if err := qp.Close(); err != nil {
			t.Errorf("round %d: Close after the late answer: %v", round, err)
		}
		testutil.Eventually(t, "the objects made late are destroyed", func() bool {
			now := h.hca.Describe()
			return now.PDs == before.PDs && now.CQs == before.CQs && len(now.QPs) == len(before.QPs)
		})
		testutil.Eventually(t, "their memory is free", func() bool { return largest(t, h) == room })
	}
	// All slots are free again, and the device works.
	for range 40 {
		if err := newQP().Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A canceled command ends at once. Device.Close does not wait for answers that never come; it waits for at most 10 s
// for the back end to return the memory.
func TestNoAnswer(t *testing.T) {
	r := newRig(t, rigConfig{hosts: 1, driver: guestdrv.Config{Timeout: patience}})
	h := r.hosts[0]
	cq, err := h.CreateCQ(bg, 16, guestdrv.CQOptions{})
	if err != nil {
		t.Fatal(err)
	}
	qp, err := h.pd.CreateQP(bg, guestdrv.QPConfig{Type: guestdrv.QPTypeRC, SendCQ: cq, RecvCQ: cq, MaxSendWR: 16})
	if err != nil {
		t.Fatal(err)
	}
	release := stopLoops(t, h.site)
	defer release()
	closed, canceled := make(chan error, 1), make(chan error, 1)
	go func() { closed <- qp.Close() }()
	ctx, cancel := context.WithCancelCause(bg)
	cause := errors.New("not needed any more")
	go func() {
		for {
			if _, err := h.AllocPD(ctx); err != nil { // the first may precede the destruction
				canceled <- err
				return
			}
		}
	}()
	time.Sleep(20 * time.Millisecond)
	cancel(cause)
	if err := <-canceled; !errors.Is(err, cause) {
		t.Errorf("a canceled command ends with %v, want %v", err, cause)
	}
	if err := h.Device.Close(); err != nil {
		t.Error(err)
	}
	if err := <-closed; !errors.Is(err, guestdrv.ErrClosed) {
		t.Errorf("a pending command ends with %v, want %v", err, guestdrv.ErrClosed)
	}
}
