package recovery

import (
	"testing"

	"github.com/vnicd/vnicd/device/rdma/wire"
)

const (
	us = int64(1000)
	// base is the first PSN of the tests; the ring of 64 PSNs wraps soon behind it.
	base = uint64(1)<<32 + 60
)

// arrivals returns a bitmap of the given offsets.
func arrivals(offsets ...uint64) *wire.Arrivals {
	a := new(wire.Arrivals)
	for _, i := range offsets {
		a.Set(i, 1)
	}
	return a
}

// sending returns a scoreboard of n packets of SENDs or WRITEs, sent 1 us apart from time 100 us on, with a response
// time of 40 us.
func sending(n uint64) *Scoreboard {
	b := NewScoreboard(64)
	b.RTT.Sample(100*us, 40*us)
	for i := range n {
		b.NoteSent(base+i, base+i+1, (100+int64(i))*us, 0)
	}
	return &b
}

// reading returns a scoreboard of READs with the given numbers of responses, requested 1 us apart from time 100 us on.
func reading(responses ...uint64) (b *Scoreboard, sent uint64) {
	b, sent = sending(0), base
	for i, n := range responses {
		b.NoteSent(sent, sent+n, (100+int64(i))*us, AwaitsResponse|FirstResponse)
		sent += n
	}
	return b, sent
}

// queue does what the requester does with response psn, which arrives out of order.
func queue(b *Scoreboard, psn, una, sent uint64, now int64) {
	b.Start(una)
	b.ResponseArrived(psn, una, sent, now)
	b.MarkReceived(psn)
	b.Executed = max(b.Executed, psn)
	b.ResponseQueued(psn, una, now)
	b.Extend(sent)
}

// detect runs DetectLosses again.
func detect(b *Scoreboard, una, sent uint64, now int64) (lost, oldest uint64) {
	b.ClearCounts()
	return b.DetectLosses(una, sent, now)
}

// TestLossDetection: of ten packets, sent at 100 us to 109 us, a selective acknowledgement at 145 us reports some.
func TestLossDetection(t *testing.T) {
	const sent, at = base + 10, 145 * us
	for name, c := range map[string]struct {
		executed uint64         // offset
		arrived  *wire.Arrivals // from executed on
		now      int64
		lost     uint64
		oldest   uint64 // offset
		checkAt  int64
		inFlight uint64
	}{
		// The newest arrived packet took 145-105 = 40 us. Packet i is lost at 100+i+40+10 us: the reorder
		// window is 10 us.
		"one missing, not yet":                        {0, arrivals(1, 2, 3, 4, 5), at, 0, 0, 150 * us, 5},
		"one missing, in time":                        {0, arrivals(1, 2, 3, 4, 5), 150 * us, 1, 0, 0, 4},
		"a nanosecond before":                         {0, arrivals(1, 2, 3, 4, 5), 150*us - 1, 0, 0, 150 * us, 5},
		"two missing":                                 {2, arrivals(2, 3), 160 * us, 2, 2, 0, 4},
		"those sent later are not lost, however late": {0, arrivals(1), 1e9, 1, 0, 0, 8},
		"the next is due":                             {0, arrivals(1, 3, 5), 151 * us, 1, 0, 152 * us, 6},
		"nothing is missing":                          {6, arrivals(), at, 0, 0, 0, 4},
		"beyond what is sent":                         {8, arrivals(2, 3, 100, 255), 1e9, 0, 0, 0, 2},
		"all":                                         {10, arrivals(0, 1, 255), 1e9, 0, 0, 0, 0},
	} {
		b := sending(10)
		una := base + c.executed
		b.Start(base)
		b.Acknowledged(base, una, sent, at)
		b.SelectiveAck(una, una, sent, c.arrived, at)
		b.Extend(sent)
		lost, oldest := detect(b, una, sent, c.now)
		if want := c.oldest + base; lost != c.lost || lost > 0 && oldest != want || b.CheckAt != c.checkAt {
			t.Errorf("%s: %d lost from %d on, next check at %d, want %d from %d on, %d",
				name, lost, oldest-base, b.CheckAt, c.lost, c.oldest, c.checkAt)
		}
		if got := b.InFlight(una, sent, sent); got != c.inFlight {
			t.Errorf("%s: %d in flight, want %d", name, got, c.inFlight)
		}
	}
}

// TestSelectiveAckNews: only a report of something new restarts timers.
func TestSelectiveAckNews(t *testing.T) {
	b := sending(10)
	b.Start(base)
	for i, c := range []struct {
		psn     uint64
		arrived *wire.Arrivals
		news    bool
	}{
		{0, arrivals(2, 3), true},
		{0, arrivals(2, 3), false},       // a copy
		{0, arrivals(2), false},          // an older one
		{0, arrivals(), false},           // nothing
		{0, arrivals(12, 200), false},    // never sent
		{2, arrivals(0, 1, 2, 3), true},  // 2 and 3 are known, 4 and 5 are not
		{10, arrivals(0, 1, 255), false}, // all that was sent is before it
	} {
		una := base + c.psn
		b.Acknowledged(base, una, base+10, 150*us)
		if got := b.SelectiveAck(una, una, base+10, c.arrived, 150*us); got != c.news {
			t.Errorf("report %d: news %t, want %t", i, got, c.news)
		}
	}
}

// TestRetransmission: a retransmission is lost by the same rule. One that is acknowledged sooner than the minimum
// response time was spurious and widens the reorder window.
func TestRetransmission(t *testing.T) {
	const sent = base + 10
	again := func(b *Scoreboard, now int64) {
		b.Retransmitting = true
		b.NoteSent(base, base+1, now, b.NoteRetransmit(0, 1))
		b.EndRetransmit()
	}
	start := func() *Scoreboard {
		b := sending(10)
		b.Start(base)
		b.SelectiveAck(base, base, sent, arrivals(1, 2, 3, 4, 5), 145*us)
		b.Extend(sent)
		if lost, oldest := detect(b, base, sent, 150*us); lost != 1 || !b.CutWindow(oldest, sent) {
			t.Fatalf("%d lost", lost)
		}
		if b.NeedsRetransmit(base+1, 150*us) || !b.NeedsRetransmit(base, 150*us) {
			t.Fatal("packet 0, and no other, needs a retransmission")
		}
		again(b, 150*us)
		return b
	}

	b := start()
	if b.Retransmitting || b.Flags(base) != Retransmitted|RetransmittedAlone || b.InFlight(base, sent, sent) != 5 {
		t.Errorf("flags %b, %d in flight", b.Flags(base), b.InFlight(base, sent, sent))
	}
	// Nothing sent after the retransmission has arrived: it is not lost, and a second loss of the window cuts
	// nothing.
	b.SelectiveAck(base, base, sent, arrivals(6, 7, 8, 9), 170*us)
	if lost, _ := detect(b, base, sent, 1e9); lost != 0 || b.CheckAt != 0 {
		t.Errorf("%d lost, next check at %d", lost, b.CheckAt)
	}
	if b.CutWindow(base, sent) {
		t.Error("two losses of one window cut the congestion window twice")
	}
	// Something newer arrives: it was lost again.
	b.NoteSent(sent, sent+1, 200*us, 0)
	b.SelectiveAck(base, base, sent+1, arrivals(10), 240*us)
	if lost, oldest := detect(b, base, sent+1, 250*us); lost != 1 || oldest != base {
		t.Errorf("%d lost from %d on", lost, oldest-base)
	}

	b = start()
	if before := b.ReorderWindow(); before != 10*us {
		t.Errorf("reorder window %d", before)
	}
	b.Acknowledged(base, base+6, sent, 150*us+39*us) // sooner than a response to the retransmission can be
	if got := b.ReorderWindow(); got != 20*us {
		t.Errorf("reorder window %d after a spurious retransmission, want %d", got, 20*us)
	}
	for range 20 {
		b.NoteSent(base+6, base+7, 300*us, Retransmitted)
		b.RequestArrived(base+6, 301*us)
	}
	if got := b.ReorderWindow(); got != reorderQuartersMax*10*us {
		t.Errorf("reorder window %d, want at most %d", got, reorderQuartersMax*10*us)
	}
	for i := range uint64(reorderHoldLosses) {
		if got := b.ReorderWindow(); got != reorderQuartersMax*10*us {
			t.Errorf("reorder window %d after %d losses", got, i)
		}
		b.CutWindow(sent+i, sent+i+1)
	}
	if got := b.ReorderWindow(); got != 10*us {
		t.Errorf("reorder window %d after %d losses without a spurious retransmission", got, reorderHoldLosses)
	}

	b = start()
	b.Acknowledged(base, base+6, sent, 150*us+40*us)
	if got := b.ReorderWindow(); got != 10*us {
		t.Errorf("reorder window %d after a retransmission that was needed", got)
	}
	if b.Done(base+6) || !b.Done(sent) {
		t.Error("the recovery ends when all that was in flight at the loss is acknowledged")
	}
}

// TestInFlightWhileRetransmitting: a lost packet is in flight again when it has been sent again.
func TestInFlightWhileRetransmitting(t *testing.T) {
	const sent = base + 10
	b := sending(10)
	b.Start(base)
	b.SelectiveAck(base, base, sent, arrivals(3, 4, 5, 6, 7, 8, 9), 149*us)
	b.Extend(sent)
	if lost, _ := detect(b, base, sent, 160*us); lost != 3 {
		t.Fatalf("%d lost", lost)
	}
	b.Retransmitting = true
	for i := range uint64(3) {
		if got := b.InFlight(base, base+i, sent); got != i {
			t.Errorf("%d in flight, want %d", got, i)
		}
		b.NoteSent(base+i, base+i+1, 160*us, b.NoteRetransmit(0, 1))
	}
	b.EndRetransmit()
	if got := b.InFlight(base, base+3, sent); got != 3 {
		t.Errorf("%d in flight, want 3 until the PSNs behind are skipped", got)
	}
}

// TestMissingResponse: a response is lost if a later one, requested no earlier, has been here for the reorder window.
func TestMissingResponse(t *testing.T) {
	for name, c := range map[string]struct {
		reads  []uint64 // responses of each
		una    uint64   // offset
		queued uint64   // offset of the response that is here, at 150 us
		lost   uint64   // after the reorder window
	}{
		"one within a READ":          {[]uint64{4}, 1, 2, 1},
		"two within a READ":          {[]uint64{4}, 1, 3, 2},
		"a whole READ":               {[]uint64{2, 2}, 0, 2, 2},
		"the end of one, and so on":  {[]uint64{3, 3, 3}, 2, 7, 5},
		"those behind it may follow": {[]uint64{8}, 0, 1, 1},
	} {
		b, sent := reading(c.reads...)
		una := base + c.una
		queue(b, base+c.queued, una, sent, 150*us)
		lost, _ := detect(b, una, sent, 150*us)
		if want := 150*us + b.ReorderWindow(); lost != 0 || b.CheckAt != want {
			t.Errorf("%s: %d lost at once, next check at %d, want %d", name, lost, b.CheckAt, want)
		}
		lost, oldest := detect(b, una, sent, b.CheckAt)
		if lost != c.lost || oldest != una {
			t.Errorf("%s: %d lost from %d on, want %d", name, lost, oldest-base, c.lost)
		}
		if got, want := b.InFlight(una, sent, sent), sent-una-lost-1; got != want {
			t.Errorf("%s: %d in flight, want %d", name, got, want)
		}
		if !b.Delivered(base+c.queued) || b.Delivered(una) {
			t.Errorf("%s: flags %b, %b", name, b.Flags(base+c.queued), b.Flags(una))
		}
		if b.ClearReceived(base + c.queued); b.Delivered(base + c.queued) {
			t.Errorf("%s: a response that was dropped counts as received", name)
		}
	}
}

// TestLaterRequestedResponse: a request that was sent again after the queued response was requested may still be
// answered.
func TestLaterRequestedResponse(t *testing.T) {
	b, sent := reading(2, 2)
	b.NoteSent(base, base+2, 140*us, AwaitsResponse|FirstResponse|Retransmitted)
	queue(b, base+2, base, sent, 150*us)
	if lost, _ := detect(b, base, sent, 1e9); lost != 0 || b.CheckAt != 0 {
		t.Errorf("%d lost, next check at %d", lost, b.CheckAt)
	}
}

// TestRepeatedResponses: responses that were requested again alone are answered at once, in the order of their
// requests. A response that arrives twice was requested unnecessarily.
func TestRepeatedResponses(t *testing.T) {
	b, sent := reading(6)
	queue(b, base+4, base, sent, 150*us)
	if lost, oldest := detect(b, base, sent, 160*us); lost != 4 || !b.CutWindow(oldest, sent) {
		t.Fatalf("%d lost", lost)
	}
	b.Retransmitting = true
	for i := range uint64(4) {
		b.NoteSent(base+i, base+i+1, (160+int64(i))*us, b.NoteRetransmit(AwaitsResponse|FirstResponse, 1))
	}
	b.EndRetransmit()
	if lost, _ := detect(b, base, sent, 1e9); lost != 0 || b.CheckAt != 0 {
		t.Errorf("%d lost before any is answered, next check at %d", lost, b.CheckAt)
	}
	queue(b, base+2, base, sent, 200*us)
	lost, oldest := detect(b, base, sent, 210*us)
	if lost != 2 || oldest != base { // 0 and 1, but not 3
		t.Errorf("%d lost from %d on, want 2 from 0 on", lost, oldest-base)
	}
	before := b.RTT
	b.ResponseArrived(base+1, base, sent, 205*us)
	b.ResponseQueued(base+1, base, 205*us)
	if at := *b.time(base); b.RTT != before || at != 200*us {
		t.Errorf("an overdue response changed the response time, or when another was due: %d", at)
	}
	if !b.SelectiveAck(base, base, sent, arrivals(3), 206*us) || b.SelectiveAck(base, base, sent, arrivals(1), 207*us) {
		t.Error("the report of an overdue request must not count as new, any other must")
	}
	if f := b.Flags(base + 1); f&(Overdue|RequestQueued) != RequestQueued {
		t.Errorf("flags %b: its request has reached the peer's reorder queue", f)
	}

	window := b.ReorderWindow()
	b.DuplicateResponse(base+5, sent) // was never requested again
	if b.ReorderWindow() != window {
		t.Error("a duplicate of the network widened the reorder window")
	}
	b.DuplicateResponse(base+2, sent)
	wide := b.ReorderWindow()
	if wide < 2*window || wide > 2*window+1 {
		t.Errorf("reorder window %d, want two quarters of the response time: %d", wide, 2*window)
	}
	b.DuplicateResponse(base+2, sent) // counts once
	if b.ReorderWindow() != wide {
		t.Errorf("reorder window %d after another copy", b.ReorderWindow())
	}
}

// TestQueuedRequests: a READ in the peer's reorder queue is answered only when the gap in front of it is filled, so
// later responses do not make its responses overdue.
func TestQueuedRequests(t *testing.T) {
	b := sending(2) // a gap at 0
	for i := range uint64(2) {
		b.NoteSent(base+2+2*i, base+4+2*i, (102+int64(i))*us, AwaitsResponse|FirstResponse)
	}
	const sent = base + 6
	b.Start(base)
	if !b.SelectiveAck(base, base, sent, arrivals(1, 2, 3, 4, 5), 145*us) {
		t.Error("the report brought no news")
	}
	b.Extend(sent)
	for i := uint64(2); i < 6; i++ {
		if f := b.Flags(base + i); f&(RequestQueued|Received|Overdue) != RequestQueued {
			t.Errorf("PSN %d: flags %b", i, f)
		}
	}
	if lost, oldest := detect(b, base, sent, 1e9); lost != 1 || oldest != base {
		t.Errorf("%d lost from %d on, want packet 0", lost, oldest-base)
	}
	// The gap is filled. The queued requests are executed: their responses can be missing.
	b.Acknowledged(base, base+2, sent, 190*us)
	queue(b, base+4, base+2, sent, 195*us)
	if lost, oldest := detect(b, base+2, sent, 195*us+b.ReorderWindow()); lost != 2 || oldest != base+2 {
		t.Errorf("%d lost from %d on, want 2 from 2 on", lost, oldest-base)
	}
}

// TestMarkLost: without further responses the oldest packet counts as lost at once.
func TestMarkLost(t *testing.T) {
	b := sending(4)
	b.Start(base)
	b.SelectiveAck(base, base, base+4, arrivals(1), 141*us)
	b.MarkLost(base)
	if lost, oldest := detect(b, base, base+4, 142*us); lost != 1 || oldest != base {
		t.Errorf("SEND: %d lost", lost)
	}
	b, sent := reading(4)
	queue(b, base+1, base, sent, 141*us)
	b.MarkLost(base)
	if lost, oldest := detect(b, base, sent, 142*us); lost != 1 || oldest != base {
		t.Errorf("READ: %d lost", lost)
	}
}

// TestClear: going back forgets what has arrived; a new recovery begins with nothing.
func TestClear(t *testing.T) {
	b := sending(10)
	b.Start(base)
	b.SelectiveAck(base, base, base+10, arrivals(3, 4, 5), 145*us)
	b.Extend(base + 10)
	b.Clear(base, base+10)
	for psn := base; psn < base+10; psn++ {
		if b.Delivered(psn) || !b.NeedsRetransmit(psn, 146*us) {
			t.Errorf("PSN %d is not sent again", psn-base)
		}
	}
	if b.Active || b.CheckAt != 0 || b.InFlight(base, base+2, base+10) != 2 {
		t.Errorf("%+v", b)
	}
	b.Start(base)
	if lost, _ := detect(b, base, base+10, 1e9); lost != 0 || b.CheckAt != 0 {
		t.Errorf("%d lost according to earlier reports", lost)
	}
	b.Reset()
	if b.RTT != (RTT{}) || b.recoveryEnd != 0 {
		t.Errorf("%+v after a reset", b)
	}
}

// TestHostileResponses: numbers that a peer can choose neither panic nor change what is known.
func TestHostileResponses(t *testing.T) {
	b, sent := reading(4, 4)
	queue(b, base+5, base, sent, 150*us)
	before := *b
	for _, psn := range []uint64{0, 1, sent - 65, sent - 1<<24, sent, sent + 1, sent + 1<<23, 1<<64 - 1} {
		b.DuplicateResponse(psn, sent)
	}
	for psn := sent - 64; psn < base; psn++ { // acknowledged long ago, or never used
		b.DuplicateResponse(psn, sent)
	}
	b.NoteSent(base, base+1, 160*us, AwaitsResponse|RetransmittedAlone)
	b.DuplicateResponse(base-64, sent) // uses the same place in the ring
	if b.reorderQuarters != before.reorderQuarters || b.reorderHold != before.reorderHold {
		t.Error("a duplicate of a PSN out of range widened the reorder window")
	}
	all := &wire.Arrivals{1<<64 - 1, 1<<64 - 1, 1<<64 - 1, 1<<64 - 1}
	for psn := base; psn <= sent; psn++ {
		b.SelectiveAck(psn, psn, sent, all, 151*us)
	}
	for psn := sent; psn < sent+64-8; psn++ { // the rest of the ring
		if f := b.Flags(psn); f != 0 {
			t.Errorf("PSN %d was never sent and has flags %b", psn-base, f)
		}
	}
}
