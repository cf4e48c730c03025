package recovery

// Constants of the congestion window.
const (
	WindowUnit = 256 // of Window.Size, per packet

	alphaOne  = 1 << 10 // of Window.alpha
	alphaGain = 4       // 1/16, as in RFC 8257

	// After a mark the window grows by one packet per window, as the other flows in the same queue do. From the
	// growthDelay-th window without a mark on, the increment grows by one packet per window, up to maxGrowth: the
	// path has become free. Where loss is the only signal, the increment grows at once.
	growthDelay = 5
	maxGrowth   = 8

	initialWindow      = 16 // packets; slow start doubles it per window until the first sign of congestion
	restartWindow      = 4  // packets; slow start after a loss, up to half of the packets that were in flight
	minWindowSelective = 2  // packets; the minimum after a loss that is repaired selectively
	unlimited          = 1<<32 - 1
	chanceLoss         = 16 // at most one loss among this many packets may be chance
)

// Window is a congestion window: it bounds the packets that a requester has in flight. The algorithm is DCTCP's (RFC
// 8257) with one bit of information per window: alpha is a moving average of the windows that were marked, and a marked
// window is cut by alpha/2. Losses halve it. README.md describes the whole.
type Window struct {
	// Size is the window, Max its upper bound, both in packets times WindowUnit. Below Ssthresh (slow-start
	// threshold) the window doubles per window.
	Size, Max, Ssthresh uint32

	// Size and Ssthresh before silence cut them; 0: it did not.
	saved, savedSsthresh uint32

	// After an RNR NAK the receiver takes one packet at most until it is ready, so open bounds the window besides Size,
	// in the same unit; unlimited: it does not.
	open       uint32
	notReadyAt uint64 // PSN of the newest RNR NAK
	readyFor   uint32 // packets that the receiver took before it

	acked      uint32 // packets acknowledged since the last adjustment
	alpha      uint32 // fraction of recent windows that were marked
	growth     uint32 // last increment in packets, plus growthDelay
	markedEnd  uint64 // PSN: marks of packets sent before it have already cut the window
	everMarked bool   // the path has marked packets since the window was at Max
}

// NewWindow returns a window in slow start that is at most max packets.
func NewWindow(max int) Window {
	n := uint32(max) * WindowUnit
	return Window{Size: min(n, initialWindow*WindowUnit), Max: n, Ssthresh: n, open: unlimited, alpha: alphaOne}
}

// SetMax changes the upper bound to max packets.
func (w *Window) SetMax(max int) {
	full := uint32(max) * WindowUnit
	if w.Ssthresh == w.Max { // no sign of congestion so far
		w.Ssthresh = full
	}
	if w.savedSsthresh == w.Max {
		w.savedSsthresh = full
	}
	w.Max, w.Ssthresh, w.Size = full, min(w.Ssthresh, full), min(w.Size, full)
}

// Packets returns how many packets may be in flight: at least one.
func (w *Window) Packets() uint64 { return uint64(min(w.Size, w.open) / WindowUnit) }

// OnAck grows the window for n acknowledged packets, the last of which is before una.
func (w *Window) OnAck(una, n uint64) {
	w.saved = 0
	if w.open != unlimited {
		if w.open = max(w.open, w.readyFor*WindowUnit) + ackedUnits(n); w.open >= w.Size {
			w.open = unlimited
		}
	}
	if w.Size < w.Ssthresh {
		w.Size = min(w.Size+ackedUnits(n), w.Ssthresh)
		return
	}
	if una <= w.markedEnd {
		return // some of them were marked
	}
	if w.acked += ackedUnits(n) / WindowUnit; uint64(w.acked) < w.Packets() {
		return
	}
	w.acked = 0
	w.alpha -= w.alpha >> alphaGain
	w.growth = min(w.growth+1, growthDelay+maxGrowth)
	w.Size += WindowUnit * max(1, w.growth-min(growthDelay, w.growth))
	if w.Size >= w.Max {
		w.Size, w.alpha, w.everMarked = w.Max, alphaOne, false // the next congestion is a new one
	}
}

// maxAcked bounds the packets that one acknowledgement counts for, so that the arithmetic does not overflow.
const maxAcked = 4096

func ackedUnits(n uint64) uint32 { return uint32(min(n, maxAcked)) * WindowUnit }

// OnNotReady closes the window to one packet, because the receiver has refused una by an RNR NAK: it drops everything
// behind that packet. Once it takes the packet, the window opens to as many as the receiver took between its last two
// refusals, and doubles per round trip from there on. So after a rare RNR NAK it is open at once, and a receiver that
// refuses every few packets is sent few that it drops. Size does not change: this is no congestion.
func (w *Window) OnNotReady(una uint64) {
	if una != w.notReadyAt {
		w.readyFor, w.notReadyAt = uint32(min(una-w.notReadyAt, maxAcked)), una
	}
	w.open = WindowUnit
}

// OnReady opens the window after OnNotReady: the receiver says that it is ready.
func (w *Window) OnReady() { w.open = max(w.open, w.readyFor*WindowUnit) }

// OnMark cuts the window, once per window, because packets from una, the oldest in flight, on may have met congestion.
// sent is the end of all that was sent.
func (w *Window) OnMark(una, sent uint64) {
	if una == sent || una < w.markedEnd {
		return
	}
	w.markedEnd = sent
	w.alpha += (alphaOne - w.alpha) >> alphaGain
	w.Size = max(w.Size-w.Size*w.alpha/(2*alphaOne), WindowUnit)
	w.Ssthresh, w.acked, w.growth, w.everMarked = w.Size, 0, 0, true
}

// OnLoss reacts to a loss that is repaired by go-back-N. The packets behind the lost one are dropped at the receiver
// but still fill the queue on the path, so the retransmission starts with a small window.
func (w *Window) OnLoss() {
	size := max(w.Size, w.Ssthresh)
	w.Ssthresh = max(size/2, min(size, restartWindow*WindowUnit))
	w.Size = min(w.Size, restartWindow*WindowUnit)
	w.acked, w.growth = 0, 0
	if !w.everMarked {
		w.growth = growthDelay + maxGrowth
	}
}

// OnSelectiveLoss reacts to losses that are repaired by selective repeat; the caller calls it once for all packets that
// were in flight. Only the lost packets are sent again, so there is no slow start. queued reports whether the queue on
// the path is longer than usual. A loss counts as chance if the queue is not (TCP Veno's criterion) and if it is one of
// many packets. Neither is sufficient alone: a flow that joins a queue which is always full has never seen a shorter
// one.
func (w *Window) OnSelectiveLoss(lost uint64, queued bool) {
	chance := !queued && lost*chanceLoss <= w.Packets()
	cut := w.Size / 2
	if chance {
		cut = w.Size / 5
	}
	w.Size = max(w.Size-cut, min(w.Size, minWindowSelective*WindowUnit))
	w.Ssthresh, w.acked, w.growth = w.Size, 0, 0
	if chance && !w.everMarked {
		w.growth = growthDelay + maxGrowth
	}
}

// OnSilence cuts the window as OnLoss does, because no response arrives. Restore undoes it.
func (w *Window) OnSilence() {
	w.Save()
	w.OnLoss()
}

// Save keeps the window as it is before silence cuts it, for Restore.
func (w *Window) Save() {
	if w.saved == 0 {
		w.saved, w.savedSsthresh = w.Size, w.Ssthresh
	}
}

// Restore undoes the cuts since Save: the silence was no congestion.
func (w *Window) Restore() {
	if w.saved != 0 {
		w.Size, w.Ssthresh, w.saved = min(w.saved, w.Max), min(w.savedSsthresh, w.Max), 0
	}
}
