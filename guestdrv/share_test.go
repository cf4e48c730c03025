package guestdrv_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/guestdrv"
	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/hypervisor/worktime/worktimetest"
)

// A guest that issues expensive commands without end uses its share of a processor, and the commands of another VM are
// not delayed. Each measurement of the test's clock takes 200 microseconds, so what the guest uses depends on how many
// commands the device has executed, and not on this machine.
func TestHostileCommandsKeepToTheirShare(t *testing.T) {
	const (
		percent = 20
		burst   = 100 * time.Millisecond
		step    = 200 * time.Microsecond
	)
	clock := worktimetest.New(step)
	var accounts []*worktime.Account
	// No command may end early, by the real clock: its buffers stay with the device, which soon gets no more commands.
	driver := guestdrv.Config{Timeout: time.Hour}
	r := newRig(t, rigConfig{driver: driver, work: func() *worktime.Account {
		a := worktime.New(worktime.Config{Percent: percent, Burst: burst, Exact: true, Clock: clock, Thread: clock.Thread})
		accounts = append(accounts, a)
		return a
	}})
	hostile, other := r.hosts[0], r.hosts[1]
	mine, theirs := accounts[0], accounts[1]
	used := func() time.Duration { s := mine.Status(); return s.Commands + s.Messages }

	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for ctx.Err() == nil {
				cq, err := hostile.CreateCQ(ctx, 4096, guestdrv.CQOptions{})
				if err != nil {
					continue // the test is over, or the device has lost its memory for rings to abandoned commands
				}
				_ = cq.Close()
			}
		})
	}
	over := func() bool { return mine.Delay() > 0 }
	testutil.Eventually(t, "the share is used up", func() bool { return over() && mine.Status().Delayed > 0 })
	begin, before := clock.Now(), used()
	for range 20 {
		clock.Advance(100 * time.Millisecond)
		pd, err := other.AllocPD(ctxFor(t))
		if err != nil {
			t.Fatal(err)
		}
		if err := pd.Close(); err != nil {
			t.Fatal(err)
		}
		testutil.Eventually(t, "the share is used up again", func() bool {
			// The goroutine may have set its timer by the time before. Without a timer it works, however slowly: then
			// more time would give it more to use up.
			if !over() && clock.Timers() > 0 {
				clock.Advance(time.Millisecond)
			}
			return over()
		})
	}
	share := clock.Now().Sub(begin) * percent / 100
	if got := used() - before; got < share/2 || got > share+20*step {
		t.Errorf("within %v the guest used %v, want about %v", clock.Now().Sub(begin), got, share)
	}
	if n := theirs.Status().Delayed; n > 0 {
		t.Errorf("%d commands of the other VM were delayed", n)
	}
	cancel()
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	testutil.Eventually(t, "the hostile program ends", func() bool {
		clock.Advance(time.Second)
		select {
		case <-done:
			return true
		default:
			return false
		}
	})
	// What it has left under way is answered before the device closes.
	testutil.Eventually(t, "the last commands are answered", func() bool {
		clock.Advance(time.Second)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		_, err := hostile.AllocPD(ctx)
		return err == nil
	})
}
