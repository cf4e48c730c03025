package roce

import (
	"container/heap"
	"fmt"
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Loops that get no processor: timers that expire late, and peers that answer late.

// A timer that expires late is no expiry: the response may be among what has not been received yet.
func TestLateTimer(t *testing.T) {
	for _, retry := range []uint8{0, 1, 7} {
		t.Run(fmt.Sprint(retry), func(t *testing.T) {
			o := opts()
			o.psnB, o.retry, o.timeout = 100, retry, 14
			f, b, sent := lone(t, o)
			b.reg(1, 0, 1<<16, allAccess)
			post := func() {
				t.Helper()
				b.post(WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 8)}})
				b.runAll()
				*sent = nil
			}
			expire := func(at int64) {
				t.Helper()
				f.now = at
				b.expire()
				b.runAll()
			}
			unsent := func(what string) {
				t.Helper()
				if n := len(*sent); n != 0 || b.q.stats.Timeouts != 0 || b.q.recovery.retryLeft != retry {
					t.Fatalf("%s: %d packets sent, %d timeouts, %d retries left", what, n, b.q.stats.Timeouts,
						b.q.recovery.retryLeft)
				}
			}
			ack := func(psn uint32) { b.inject(craft{op: wire.OpRCAck, psn: psn, syn: wire.NoCredits}) }
			for psn := range uint32(3) {
				post()
				expire(b.timer + 30e6)
				unsent("late")
				ack(100 + psn)
				if len(b.sends) != int(psn)+1 {
					t.Fatal("not completed")
				}
				f.now += 20e9 // so that it is no measure of the peer
			}
			// No response: it counts once the loop has run for as long as it was late.
			post()
			at := f.now + timeoutNS(14) + 30e6
			late := at - b.q.recovery.rtxAt // of a probe
			expire(at)
			unsent("late")
			if want := at + min(late, timeoutNS(14)); b.timer != want {
				t.Errorf("it expires %d us later than wanted", (b.timer-want)/1e3)
			}
			expire(b.timer)
			if b.q.stats.Timeouts != 1 {
				t.Errorf("%d timeouts", b.q.stats.Timeouts)
			}
			if retry == 0 {
				b.wantSends(0, 0, 0, StatusRetryExc)
				return
			}
			if len(*sent) != 1 || b.q.recovery.retryLeft != retry-1 {
				t.Errorf("%d packets sent, %d retries left", len(*sent), b.q.recovery.retryLeft)
			}
			// A loop that is always late ends the connection all the same.
			for n := 0; b.q.State() == RTS; n++ {
				if n > (int(retry)+1)*(maxLate+2) {
					t.Fatal("it never ends")
				}
				expire(b.timer + 300e6)
			}
			b.wantSends(0, 0, 0, StatusRetryExc)
		})
	}
}

// runs returns when n's loop runs, from now on.
func (n *node) runs(now int64) int64 {
	if n.runsAt == nil {
		return now
	}
	return n.runsAt(now)
}

// expires returns when n's timer expires: before what has arrived while its loop did not run is received, as in a loop.
func (n *node) expires() int64 {
	if at := n.runs(n.timer); at > n.timer {
		return at - 1
	}
	return n.timer
}

// receivesLater reports whether n's loop does not run now, and puts d off until it does.
func (n *node) receivesLater(d *delivery) bool {
	at := n.runs(n.f.now)
	if at == n.f.now {
		return false
	}
	d.at = at
	heap.Push(&n.f.queue, *d)
	return true
}

// timeSlices returns a schedule: a loop that runs for the first length ns of each period.
func timeSlices(period, length int64) func(int64) int64 {
	return func(now int64) int64 {
		if now%period < length {
			return now
		}
		return (now/period + 1) * period
	}
}

// A requester whose loop gets two per cent of a processor, in slices, loses no connection to a peer that answers at
// once, whatever its retry_cnt, and sends nothing again.
func TestStarvedRequester(t *testing.T) {
	for _, retry := range []uint8{0, 1, 7} {
		f := newFabric(t, 1)
		o := opts()
		o.timeout, o.retry = 14, retry
		a, b := f.pair(o)
		a.reg(1, 0, 1<<16, allAccess)
		b.reg(2, 0, 1<<16, allAccess)
		a.runsAt = timeSlices(150e6, 3e6)
		n := 0
		for range 40 {
			// Just before the end of a slice: the response arrives after it.
			f.now = (f.now/150e6+1)*150e6 + 3e6 - 6e3
			for _, op := range []WROpcode{WRWrite, WRRead} {
				a.post(WQE{Opcode: op, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}})
				n++
			}
			f.until("starved", 10e9, func() bool { return len(a.sends) == n })
			if st := a.sends[n-1].c.Status; st != StatusSuccess {
				t.Fatalf("retry_cnt %d: status %d after %d requests", retry, st, n)
			}
		}
		if s := a.q.Stats(); s.Timeouts != 0 || s.Retransmits != 0 {
			t.Errorf("retry_cnt %d: %d timeouts, %d packets sent again", retry, s.Timeouts, s.Retransmits)
		}
	}
}

// A peer that was slow lately gets four times the timeout for each retry (IBTA 9.7.6.1.3), any other peer less for the
// first two.
func TestSlowPeer(t *testing.T) {
	for _, x := range []struct {
		before int64   // the peer does not run for so long, ...
		rest   int64   // ... some time ago
		want   float64 // time until the connection ends, in timeouts
	}{
		{0, 0, 1 + 2 + 6*4},
		{10e6, 1e6, 1 + 2 + 6*4},
		{50e6, 1e6, 1.5 + 3 + 6*4},
		{200e6, 1e6, 8 * 4},
		{900e6, 1e6, 8 * 4},
		{200e6, 11e9, 1 + 2 + 6*4},
	} {
		t.Run(fmt.Sprintf("%dms/%dms", x.before/1e6, x.rest/1e6), func(t *testing.T) {
			f := newFabric(t, 1)
			a, b := f.pair(opts())
			a.reg(1, 0, 1<<16, allAccess)
			b.reg(2, 0, 1<<16, allAccess)
			w := WQE{Opcode: WRWrite, RKey: 2, SGEs: []SGE{sge(1, 0, 3000)}}
			write := func(n int) {
				for range n {
					a.post(w)
					f.until("write", 10e9, func() bool { return len(a.sends) == len(a.sq) })
					if st := a.sends[len(a.sends)-1].c.Status; st != StatusSuccess {
						t.Fatalf("status %d", st)
					}
				}
			}
			write(20)
			if x.before > 0 {
				until := f.now + x.before
				b.runsAt = func(now int64) int64 { return max(now, until) }
				write(1)
				f.now += x.rest
			}
			b.runsAt = nil
			write(20)
			f.loss = func(*wire.RoCE) bool { return true }
			start := f.now
			a.post(w)
			f.until("dead peer", 10e9, func() bool { return len(a.sends) == len(a.sq) })
			a.wantState(Err)
			if took := float64(f.now-start) / float64(timeoutNS(14)); took < x.want-0.1 || took > x.want+0.2 {
				t.Errorf("gave up after %.2f timeouts, want %.1f", took, x.want)
			}
			if n := a.q.Stats().Timeouts; n < 8 {
				t.Errorf("%d timeouts", n)
			}
		})
	}
}
