package recovery

import (
	"math"
	"math/rand/v2"
	"testing"
)

// path acknowledges whole windows of a sender that always has something to send.
type path struct {
	w         *Window
	una, sent uint64
}

// window acknowledges everything in flight, packet by packet or at once, and sends a new window.
func (p *path) window(each bool) {
	p.fill()
	if n := p.sent - p.una; !each {
		p.una = p.sent
		p.w.OnAck(p.una, n)
	} else {
		for end := p.sent; p.una < end; {
			p.una++
			p.w.OnAck(p.una, 1)
		}
	}
	p.fill()
}

func (p *path) fill() { p.sent = max(p.sent, p.una+p.w.Packets()) }

func newPath(w *Window) *path {
	p := &path{w: w, una: 1 << 32, sent: 1 << 32}
	p.fill()
	return p
}

// avoidance returns a window of n packets of at most maximum that has left slow start by a mark.
func avoidance(n, maximum int) Window {
	w := NewWindow(maximum)
	w.Size = uint32(n) * 2 * WindowUnit // alpha is 1: a mark halves it
	w.OnMark(1, 2)
	return w
}

// TestSlowStart: the window doubles per window up to its maximum.
func TestSlowStart(t *testing.T) {
	for _, each := range []bool{false, true} {
		w := NewWindow(256)
		p := newPath(&w)
		for _, want := range []uint64{16, 32, 64, 128, 256, 256, 256} {
			if w.Packets() != want {
				t.Errorf("packet by packet %t: %d packets, want %d", each, w.Packets(), want)
			}
			p.window(each)
		}
	}
	if w := NewWindow(8); w.Packets() != 8 {
		t.Errorf("%d packets in a window of at most 8", w.Packets())
	}
}

// TestAvoidance: after a mark the window grows by one packet per window, and from the fifth window without a mark on
// faster.
func TestAvoidance(t *testing.T) {
	w := avoidance(20, 256)
	p := newPath(&w)
	p.una, p.sent = 100, 100 // the marked window is acknowledged
	got := []uint64{}
	for range 15 {
		before := w.Packets()
		p.window(true)
		got = append(got, w.Packets()-before)
	}
	for i, want := range []uint64{1, 1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8} {
		if got[i] != want {
			t.Fatalf("grown by %d packets per window", got)
		}
	}
}

// TestMarks: a window is cut once however many of its packets are marked, by alpha/2, and alpha follows the share of
// windows that were marked (RFC 8257).
func TestMarks(t *testing.T) {
	w := avoidance(100, 256)
	p := newPath(&w)
	p.una, p.sent = 100, 200
	w.OnMark(p.una, p.sent)
	once := w.Size
	if once != 50*WindowUnit {
		t.Errorf("alpha is 1: the window was cut to %d of 100 packets", once/WindowUnit)
	}
	for range 10 { // the others of that window
		p.una++
		w.OnMark(p.una, p.sent)
	}
	if w.Size != once {
		t.Errorf("cut to %d packets by marks of one window", w.Packets())
	}
	w.OnMark(200, 200) // nothing is in flight
	if w.Size != once {
		t.Errorf("cut to %d packets by a mark with nothing in flight", w.Packets())
	}
	for _, unmarked := range []int{0, 1, 8, 32, 64} {
		w := avoidance(100, 4096)
		p := newPath(&w)
		p.una, p.sent = 100, 100
		for range unmarked {
			p.window(true)
		}
		p.fill()
		before := float64(w.Size)
		w.OnMark(p.una, p.sent)
		alpha := math.Pow(15./16, float64(unmarked))
		alpha += (1 - alpha) / 16
		if cut := 1 - float64(w.Size)/before; math.Abs(cut-alpha/2) > 0.02 {
			t.Errorf("after %d windows without marks: cut by %.3f, want %.3f", unmarked, cut, alpha/2)
		}
	}
}

// TestMaximumForgets: a window at its maximum treats the next mark as new congestion.
func TestMaximumForgets(t *testing.T) {
	w := avoidance(60, 64)
	p := newPath(&w)
	p.una, p.sent = 100, 100
	for range 20 {
		p.window(true)
	}
	if w.Packets() != 64 {
		t.Fatalf("%d packets, want 64", w.Packets())
	}
	if w.OnMark(p.una, p.sent); w.Packets() != 32 {
		t.Errorf("cut to %d packets, want 32", w.Packets())
	}
}

func TestLosses(t *testing.T) {
	for name, c := range map[string]struct {
		size           int
		loss           func(w *Window)
		size1, sthresh uint32 // packets
	}{
		"go-back-N restarts below half":       {100, func(w *Window) { w.OnLoss() }, 4, 50},
		"go-back-N again while restarting":    {100, func(w *Window) { w.OnLoss(); w.OnLoss() }, 4, 25},
		"go-back-N, small window":             {3, func(w *Window) { w.OnLoss() }, 3, 3},
		"go-back-N, one packet":               {1, func(w *Window) { w.OnLoss() }, 1, 1},
		"selective, congestion":               {100, func(w *Window) { w.OnSelectiveLoss(1, true) }, 50, 50},
		"selective, chance":                   {100, func(w *Window) { w.OnSelectiveLoss(1, false) }, 80, 80},
		"selective, one in 16":                {96, func(w *Window) { w.OnSelectiveLoss(6, false) }, 76, 76}, // 76.8
		"selective, more than one in 16":      {96, func(w *Window) { w.OnSelectiveLoss(7, false) }, 48, 48},
		"selective, at least two packets":     {3, func(w *Window) { w.OnSelectiveLoss(3, true) }, 2, 2},
		"selective, one packet stays":         {1, func(w *Window) { w.OnSelectiveLoss(1, true) }, 1, 1},
		"selective, more lost than ever fits": {100, func(w *Window) { w.OnSelectiveLoss(1<<40, false) }, 50, 50},
		"silence":                             {100, func(w *Window) { w.OnSilence() }, 4, 50},
		"silence that was no congestion":      {100, func(w *Window) { w.OnSilence(); w.Restore() }, 100, 100},
		"repeated silence is restored as well": {100, func(w *Window) { w.OnSilence(); w.OnSilence(); w.Restore() }, 100,
			100},
		"restored once": {100, func(w *Window) { w.OnSilence(); w.Restore(); w.OnLoss(); w.Restore() },
			4, 50},
		"an acknowledgement confirms the cut": {100, func(w *Window) { w.OnSilence(); w.OnAck(2, 1); w.Restore() }, 5, 50},
		"restored below a new maximum":        {100, func(w *Window) { w.OnSilence(); w.SetMax(64); w.Restore() }, 64, 64},
	} {
		w := avoidance(c.size, 256)
		c.loss(&w)
		if got := w.Size / WindowUnit; got != c.size1 || w.Ssthresh/WindowUnit != c.sthresh {
			t.Errorf("%s: %d packets, slow start up to %d, want %d and %d", name, got, w.Ssthresh/WindowUnit, c.size1, c.sthresh)
		}
	}
}

// TestLossGrowth: where loss is the only signal the window grows fast at once; after marks, and after congestion that
// selective repeat repairs, it does not.
func TestLossGrowth(t *testing.T) {
	for name, c := range map[string]struct {
		marked bool
		loss   func(w *Window)
		grown  uint64
	}{
		"chance, never marked":     {false, func(w *Window) { w.OnSelectiveLoss(1, false) }, maxGrowth},
		"chance, marked":           {true, func(w *Window) { w.OnSelectiveLoss(1, false) }, 1},
		"congestion, never marked": {false, func(w *Window) { w.OnSelectiveLoss(1, true) }, 1},
		"go-back-N, never marked":  {false, func(w *Window) { w.OnLoss(); w.Size = w.Ssthresh }, maxGrowth},
		"go-back-N, marked":        {true, func(w *Window) { w.OnLoss(); w.Size = w.Ssthresh }, 1},
	} {
		w := NewWindow(256)
		w.Size = 100 * WindowUnit
		if c.marked {
			w = avoidance(100, 256)
		}
		c.loss(&w)
		p := newPath(&w)
		p.una, p.sent = 100, 100
		before := w.Packets()
		if p.window(true); w.Packets()-before != c.grown {
			t.Errorf("%s: grown by %d packets, want %d", name, w.Packets()-before, c.grown)
		}
	}
}

// TestSetMax: the maximum follows the peer, and slow start continues to the new one.
func TestSetMax(t *testing.T) {
	w := NewWindow(128)
	w.SetMax(256)
	p := newPath(&w)
	for range 10 {
		p.window(true)
	}
	if w.Packets() != 256 {
		t.Errorf("%d packets after slow start, want 256", w.Packets())
	}
	if w.SetMax(128); w.Packets() != 128 || w.Ssthresh != w.Max {
		t.Errorf("%d packets, slow start up to %d", w.Packets(), w.Ssthresh/WindowUnit)
	}
	w = NewWindow(128)
	w.OnSilence()
	w.SetMax(256) // the response that ends the silence identifies the peer as a vnicd
	w.Restore()
	if w.Ssthresh != w.Max {
		t.Errorf("slow start up to %d packets, want 256", w.Ssthresh/WindowUnit)
	}
}

// TestWindowInvariants: whatever the network reports, at least one packet may be in flight and at most the maximum.
// Forged marks cannot stop a connection, and no count overflows.
func TestWindowInvariants(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 3))
	for run := range 200 {
		w := NewWindow(1 << rng.IntN(13))
		una, sent := uint64(1)<<32, uint64(1)<<32
		for step := range 1000 {
			sent += rng.Uint64N(w.Packets() + 1)
			switch rng.IntN(10) {
			case 0:
				w.OnLoss()
			case 1:
				w.OnSelectiveLoss(rng.Uint64()>>rng.IntN(64), rng.IntN(2) == 0)
			case 2:
				w.OnSilence()
			case 3:
				w.Restore()
			case 4:
				w.SetMax(1 << rng.IntN(13))
			case 5:
				w.OnMark(rng.Uint64(), rng.Uint64())
			case 6:
				w.OnAck(rng.Uint64(), rng.Uint64()>>rng.IntN(64))
			case 7:
				w.OnMark(una, sent)
			default:
				n := rng.Uint64N(sent - una + 1)
				una += n
				w.OnAck(una, n)
			}
			if w.Size < WindowUnit || w.Size > w.Max || w.Ssthresh < WindowUnit || w.Ssthresh > w.Max || w.alpha > alphaOne {
				t.Fatalf("run %d, step %d: %+v", run, step, w)
			}
		}
	}
}

// TestWindowNotReady: after an RNR NAK one packet is sent. The window opens to what the receiver took before, and
// doubles from there on; Size is not touched.
func TestWindowNotReady(t *testing.T) {
	w := NewWindow(256)
	w.Size = 200 * WindowUnit
	w.Ssthresh = w.Size
	una := uint64(1 << 32)
	want := func(what string, n uint64) {
		t.Helper()
		if w.Packets() != n {
			t.Errorf("%s: %d packets, want %d", what, w.Packets(), n)
		}
		if w.Size < 200*WindowUnit {
			t.Fatalf("%s: the window was cut", what)
		}
	}
	ack := func(n uint64) {
		una += n
		w.OnAck(una, n)
	}
	want("at first", 200)
	w.OnNotReady(una)
	want("refused", 1)
	w.OnNotReady(una)
	want("refused again", 1)
	w.OnReady()
	want("ready, refused for the first time", 200)
	ack(3)
	w.OnNotReady(una)
	w.OnNotReady(una)
	want("refused", 1)
	w.OnReady()
	want("ready, and three packets were taken before", 3)
	ack(1)
	want("one packet taken", 4)
	ack(4)
	want("four more", 8)
	w.OnNotReady(una) // five were taken since
	ack(1)
	want("the probe taken", 6)
	for n := uint64(6); n < 200; n *= 2 {
		ack(n)
	}
	want("open", uint64(w.Size/WindowUnit))
	w.OnNotReady(una)
	want("refused", 1)
}
