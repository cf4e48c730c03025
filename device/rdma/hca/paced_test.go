package hca

import (
	"slices"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/testutil"
	"github.com/vnicd/vnicd/hypervisor/worktime"
	"github.com/vnicd/vnicd/hypervisor/worktime/worktimetest"
)

// busyGuest is a guest that may use a tenth of a processor, and has a region with 64 pages.
type busyGuest struct {
	*guest
	d     *drvcq
	clock *worktimetest.Clock
	work  *worktime.Account
	pd    uint32
	r     *dregion
}

func newBusyGuest(g *guest) *busyGuest {
	b := &busyGuest{guest: g, clock: worktimetest.New(0)}
	b.work = worktime.New(worktime.Config{Percent: 10, Burst: time.Second, Exact: true, Clock: b.clock,
		Thread: b.clock.Thread})
	g.Device.cfg.Work = b.work
	b.d = g.commandQueue(512)
	b.pd = g.pd()
	b.r = g.demand(b.pd, 64, demandAccess)
	b.r.set(0, 64, 0)
	return b
}

// exhaust uses all of the guest's share, and half a second of debt.
func (b *busyGuest) exhaust() {
	w := b.work.Start(worktime.Commands)
	b.clock.Work(time.Second + 50*time.Millisecond)
	w.Stop()
}

// answered submits a command that must be answered at once.
func (b *busyGuest) answered(op abi.Opcode, payload []byte, want abi.Status) {
	b.tb.Helper()
	n := b.d.submit(op, payload)
	if got := b.d.await(1); !slices.Equal(got, []uint16{n}) || b.d.status(n) != want {
		b.tb.Fatalf("answered %v, want %v of %v, %v", got, want, n, op)
	}
}

// awaitDelayed waits until n commands were delayed, and checks that none of them is answered.
func (b *busyGuest) awaitDelayed(n uint64) {
	b.tb.Helper()
	testutil.Eventually(b.tb, "commands are delayed", func() bool { return b.work.Status().Delayed >= n })
	if got := b.d.done(); len(got) > 0 {
		b.tb.Fatalf("commands %v were answered beyond the share", got)
	}
}

// awaitShare lets time pass until n commands are answered. The goroutine may be about to set its timer, by the time
// before, so the time passes in steps.
func (b *busyGuest) awaitShare(n int) (out []uint16) {
	b.tb.Helper()
	testutil.Eventually(b.tb, "delayed commands are answered", func() bool {
		b.clock.Advance(time.Second)
		out = append(out, b.d.done()...)
		return len(out) >= n
	})
	return out
}

// Commands beyond a VM's share wait and are then executed in order, and none fails. Releases of guest pages do not wait
// (EP-3, TR-5), and neither do the commands of another VM.
func TestCommandsBeyondShareWait(t *testing.T) {
	w := newWorld(t, 1, 2, Limits{})
	b, other := newBusyGuest(w.guests[0]), newBusyGuest(w.guests[1])
	b.answered(abi.CmdQueryPort, nil, abi.StatusOK)
	b.exhaust()
	var want []uint16
	for range 40 {
		want = append(want, b.d.submit(abi.CmdCreatePD, nil))
	}
	b.awaitDelayed(40)
	for i := range 8 {
		key := b.mr(b.pd, b.r.home, 4096, demandAccess)
		b.answered(abi.CmdClearMTT, clearOf(b.r, i), abi.StatusOK)
		if b.r.present(i) {
			t.Errorf("page %d was not cleared", i)
		}
		b.answered(abi.CmdDestroyMR, handle(key), abi.StatusOK)
		other.answered(abi.CmdCreatePD, nil, abi.StatusOK)
	}
	b.awaitDelayed(40)
	b.clock.Advance(499 * time.Millisecond)
	b.answered(abi.CmdClearMTT, clearOf(b.r, 8), abi.StatusOK)
	b.awaitDelayed(40)
	if got := b.awaitShare(40); !slices.Equal(got, want) {
		t.Errorf("answered %v, want %v", got, want)
	}
	for _, n := range want {
		if s := b.d.status(n); s != abi.StatusOK {
			t.Errorf("command %d: %v", n, s)
		}
	}
	if n := b.work.Status().Delayed; n != 40 {
		t.Errorf("%d commands delayed, want 40", n)
	}
	if n := other.work.Status().Delayed; n != 0 {
		t.Errorf("%d commands of the other VM delayed", n)
	}
	b.answered(abi.CmdQueryPort, nil, abi.StatusOK)
}

// A SET_MTT that waits for its share does not bring back pages that a CLEAR_MTT has removed meanwhile.
func TestClearOvertakesDelayedSet(t *testing.T) {
	b := newBusyGuest(newWorld(t, 1, 1, Limits{}).guests[0])
	b.exhaust()
	set := b.d.submit(abi.CmdSetMTT, enc(abi.SizeSetMTT, &abi.SetMTT{Handle: b.r.handle, Count: 1, First: 3},
		b.r.pas(3, 1, 0)...))
	b.awaitDelayed(1)
	b.answered(abi.CmdClearMTT, clearOf(b.r, 3), abi.StatusOK)
	if got := b.awaitShare(1); got[0] != set || b.d.status(set) == abi.StatusOK {
		t.Errorf("answered %v, %v; want the SET_MTT, refused", got, b.d.status(set))
	}
	if b.r.present(3) {
		t.Error("the page is back")
	}
}

// A guest that has more commands under way than any driver waits with all that follow, and nothing is lost.
func TestManyDelayed(t *testing.T) {
	g := newWorld(t, 1, 1, Limits{}).guests[0]
	b := newBusyGuest(g)
	b.exhaust()
	n := min(maxPaced, len(b.d.free))
	for range n {
		b.d.submit(abi.CmdQueryPort, nil)
	}
	b.awaitDelayed(uint64(n))
	b.awaitShare(n)
	b.answered(abi.CmdQueryPort, nil, abi.StatusOK)
}

// When the queue stops, commands that wait return to it, except those behind which another was answered: these are
// executed. None is executed twice, and none is lost (CO-3).
func TestStopWithDelayed(t *testing.T) {
	for name, overtaken := range map[string]bool{"returned": false, "executed": true} {
		t.Run(name, func(t *testing.T) {
			b := newBusyGuest(newWorld(t, 1, 1, Limits{}).guests[0])
			pds := func() int {
				b.Device.mu.Lock()
				defer b.Device.mu.Unlock()
				return len(b.tables.pds)
			}
			before := pds()
			b.exhaust()
			for range 5 {
				b.d.submit(abi.CmdCreatePD, nil)
			}
			b.awaitDelayed(5)
			want := 0
			if overtaken {
				b.answered(abi.CmdClearMTT, clearOf(b.r, 0), abi.StatusOK)
				want = 5
			}
			b.StopQueue(abi.CommandQueue)
			if got := len(b.d.done()); got != want {
				t.Errorf("%d commands answered, want %d", got, want)
			}
			if got := b.d.q.InFlight(); got != 0 {
				t.Errorf("%d commands are neither answered nor returned", got)
			}
			if got := pds() - before; got != want {
				t.Errorf("%d protection domains made, want %d", got, want)
			}
			if n := b.clock.Timers(); n != 0 {
				t.Errorf("%d timers left", n)
			}
		})
	}
}
