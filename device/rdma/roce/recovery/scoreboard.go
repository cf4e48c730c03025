package recovery

import (
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// Loss detection follows RFC 8985 (RACK). A packet counts as lost once a packet sent later has arrived and the time
// since it was sent exceeds that packet's response time plus the reorder window, the delay by which paths may differ.
// So neither the order of arrival matters, nor whether a packet is a retransmission.
//
// Responses to READs and atomics arrive in the order of their PSNs, behind everything requested before them: the time
// of a request tells little about when its response is due. A response is lost if a later one, requested no earlier,
// has been here for the length of the reorder window.
const (
	reorderWindowMin   = 10e3 // ns; the reorder window is a quarter of the smoothed response time, at least this
	reorderQuartersMax = 8    // quarters of the smoothed response time
	reorderHoldLosses  = 16   // losses without a spurious retransmission until the reorder window is one quarter again
)

// Flags describe one PSN in flight.
type Flags uint8

// Flags of a PSN.
const (
	Retransmitted      Flags = 1 << iota // sent more than once
	RetransmittedAlone                   // ... the last time by selective repeat
	AwaitsResponse                       // of a READ or atomic: a response is awaited, not an acknowledgement
	FirstResponse                        // ... it is the first response of its request
	Overdue                              // ... a later response has been here since the time of this PSN
	RequestQueued                        // ... the peer has the request in its reorder queue
	Received                             // the peer has the packet; if AwaitsResponse: the response is here
)

// Scoreboard records what is known of the packets in flight. Until a selective acknowledgement or a response shows a
// gap it records only when each packet was sent. The methods take the requester's una (oldest PSN without response) and
// sent (end of all PSNs that were sent).
type Scoreboard struct {
	span   uint64  // a power of two
	sentAt []int64 // ring by PSN: when it was sent last; if Overdue: since when
	flags  []Flags // ring by PSN; both are made for the first packet

	RTT RTT

	Active         bool   // a gap has shown, and recoveryEnd has not been acknowledged
	Retransmitting bool   // the requester sends what is lost again, by selective repeat
	Executed       uint64 // the peer has executed everything before this PSN
	CheckAt        int64  // when more packets may count as lost; 0: not by time alone

	recoveryEnd uint64 // end of all that was sent when the gap last showed
	newestSent  int64  // when the latest-sent of the packets that have arrived was sent
	newestRTT   int64  // ... and how long it took
	lastRTT     int64  // the newest response time
	delivered   uint64 // PSNs from una on that the peer has
	lost        uint64 // PSNs that are lost and not yet sent again
	cwndCutEnd  uint64 // losses of packets sent before it have already cut the congestion window

	reorderQuarters int64 // the reorder window, in quarters of the smoothed response time
	reorderHold     uint8 // losses until reorderQuarters falls back to 1
}

// NewScoreboard makes a scoreboard for n PSNs in flight; n is a power of two.
func NewScoreboard(n int) Scoreboard { return Scoreboard{span: uint64(n)} }

// allocate makes the rings.
func (b *Scoreboard) allocate() { b.sentAt, b.flags = make([]int64, b.span), make([]Flags, b.span) }

// Footprint bounds the bytes that a scoreboard for n PSNs occupies.
func Footprint(n int) uint64 {
	return translate.AllocatedFor[int64](n) + translate.AllocatedFor[Flags](n)
}

// Reset returns to the state of a new scoreboard and keeps the rings.
func (b *Scoreboard) Reset() { *b = Scoreboard{span: b.span, sentAt: b.sentAt, flags: b.flags} }

func (b *Scoreboard) time(psn uint64) *int64 {
	if b.sentAt == nil {
		b.allocate()
	}
	return &b.sentAt[psn&uint64(len(b.sentAt)-1)]
}

func (b *Scoreboard) flag(psn uint64) *Flags {
	if b.flags == nil {
		b.allocate()
	}
	return &b.flags[psn&uint64(len(b.flags)-1)]
}

// Flags returns the flags of psn.
func (b *Scoreboard) Flags(psn uint64) Flags { return *b.flag(psn) }

// SentAt returns when psn, which is in flight, was sent last; 0: not known.
func (b *Scoreboard) SentAt(psn uint64) int64 { return *b.time(psn) }

// MarkReceived notes that the response psn is here.
func (b *Scoreboard) MarkReceived(psn uint64) { *b.flag(psn) |= Received }

// ClearReceived undoes MarkReceived.
func (b *Scoreboard) ClearReceived(psn uint64) { *b.flag(psn) &^= Received }

// NoteSent records that the PSNs [psn, end) were sent now.
func (b *Scoreboard) NoteSent(psn, end uint64, now int64, f Flags) {
	for ; psn < end; psn++ {
		*b.time(psn), *b.flag(psn) = now, f
		f &^= FirstResponse
	}
}

// NoteRetransmit returns the flags of n PSNs, f so far, that are sent again.
func (b *Scoreboard) NoteRetransmit(f Flags, n uint64) Flags {
	if b.Retransmitting {
		f |= RetransmittedAlone
	}
	b.lost -= min(b.lost, n)
	return f | Retransmitted
}

// EndRetransmit notes that all that is lost has been sent again.
func (b *Scoreboard) EndRetransmit() { b.Retransmitting, b.lost = false, 0 }

// Delivered reports whether psn need not be sent again.
func (b *Scoreboard) Delivered(psn uint64) bool {
	f := *b.flag(psn)
	return f&Received != 0 || f&AwaitsResponse == 0 && psn < b.Executed
}

// Start begins to record what has arrived.
func (b *Scoreboard) Start(una uint64) {
	if !b.Active {
		b.Active, b.Executed, b.newestSent = true, una, 0
	}
}

// Clear discards what is known of [una, sent): all of it is to be sent again.
func (b *Scoreboard) Clear(una, sent uint64) {
	for psn := una; psn < sent; psn++ {
		*b.flag(psn) &^= Overdue | RequestQueued | Received
	}
	b.Active, b.Retransmitting, b.Executed, b.delivered, b.lost, b.CheckAt = false, false, 0, 0, 0, 0
}

// Extend makes the recovery last until sent is acknowledged.
func (b *Scoreboard) Extend(sent uint64) { b.recoveryEnd = sent }

// spurious widens the reorder window: a packet that was sent again had only been late.
func (b *Scoreboard) spurious() {
	b.reorderQuarters, b.reorderHold = min(b.reorderQuarters+1, reorderQuartersMax), reorderHoldLosses
}

// RequestArrived notes that the packet psn has reached the peer.
func (b *Scoreboard) RequestArrived(psn uint64, now int64) {
	at := *b.time(psn)
	if *b.flag(psn)&Retransmitted != 0 && now-at < b.RTT.Min {
		b.spurious()
		return
	}
	if at >= b.newestSent && at != 0 {
		b.newestSent, b.newestRTT = at, max(now-at, 1)
		b.lastRTT = b.newestRTT
	}
}

// ResponseArrived notes that the response psn is here. Whether it was requested again unnecessarily shows only when it
// arrives twice (DuplicateResponse).
func (b *Scoreboard) ResponseArrived(psn, una, sent uint64, now int64) {
	at := *b.time(psn)
	switch f := *b.flag(psn); {
	case f&Overdue != 0: // it is itself late
	case f&RetransmittedAlone != 0: // the peer answers such requests at once, in their order
		for p := una; p < sent; p++ {
			if *b.flag(p)&RetransmittedAlone != 0 && *b.time(p) < at {
				b.markOverdue(p, now)
			}
		}
	case f&(FirstResponse|Retransmitted) == FirstResponse:
		b.lastRTT = max(now-at, 1)
		b.RTT.Sample(now, b.lastRTT)
	}
}

// DuplicateResponse notes that the response psn arrived once more.
func (b *Scoreboard) DuplicateResponse(psn, sent uint64) {
	if sent-psn > b.span {
		return
	}
	if f := b.flag(psn); *f&(AwaitsResponse|RetransmittedAlone) == AwaitsResponse|RetransmittedAlone {
		*f &^= RetransmittedAlone
		b.spurious()
	}
}

// Acknowledged records the arrival of [from, una), which the requester now has answers to.
func (b *Scoreboard) Acknowledged(from, una, sent uint64, now int64) {
	for psn := from; psn < una; psn++ {
		if f := *b.flag(psn); f&(AwaitsResponse|Received) == AwaitsResponse {
			b.ResponseArrived(psn, una, sent, now)
		} else if !b.Delivered(psn) {
			b.RequestArrived(psn, now)
		}
	}
}

// ResponseQueued records that the peer has sent all PSNs up to psn, which has arrived out of order.
func (b *Scoreboard) ResponseQueued(psn, una uint64, now int64) {
	if *b.flag(psn)&Overdue == 0 { // else it is itself late
		b.overdueBefore(una, psn, *b.time(psn), now)
	}
}

// SelectiveAck records a selective acknowledgement: the peer expects psn and has the packets of arrivals. It reports
// whether the acknowledgement contains anything new.
func (b *Scoreboard) SelectiveAck(psn, una, sent uint64, arrivals *wire.Arrivals, now int64) bool {
	b.Executed = max(b.Executed, psn)
	end, newest, rtt := uint64(0), int64(0), int64(0)
	for i := range min(sent-psn, wire.ArrivalsSpan) {
		f := b.flag(psn + i)
		if !arrivals.Has(i) || *f&(RequestQueued|Received) != 0 {
			continue
		}
		switch {
		case *f&AwaitsResponse == 0:
			*f |= Received
		case *f&Overdue == 0:
			*f |= RequestQueued
		default:
			*f = *f&^Overdue | RequestQueued
			continue // it was late
		}
		end, newest = psn+i, max(newest, *b.time(psn + i))
		b.RequestArrived(psn+i, now)
		rtt = b.newestRTT
	}
	if rtt == 0 {
		return false
	}
	b.RTT.Sample(now, rtt)
	b.overdueBefore(una, end, newest, now)
	return true
}

// overdueBefore marks the responses before end that were requested no later than at: those that are not lost have left
// the peer.
func (b *Scoreboard) overdueBefore(una, end uint64, at, now int64) {
	queued := false
	for psn := una; psn < end; psn++ {
		f := *b.flag(psn)
		if f&(FirstResponse|AwaitsResponse) != AwaitsResponse {
			queued = f&RequestQueued != 0 && psn >= b.Executed
		}
		if !queued && *b.time(psn) <= at {
			b.markOverdue(psn, now)
		}
	}
}

// markOverdue records that psn, if it is a response, should have arrived already.
func (b *Scoreboard) markOverdue(psn uint64, now int64) {
	if f := b.flag(psn); *f&(AwaitsResponse|Overdue|Received) == AwaitsResponse {
		*f |= Overdue
		*b.time(psn) = now
	}
}

// MarkLost makes psn, the oldest in flight, count as lost: no further reports arrive.
func (b *Scoreboard) MarkLost(psn uint64) {
	if *b.time(psn) = 0; *b.flag(psn)&AwaitsResponse != 0 {
		*b.flag(psn) |= Overdue
	}
}

// lostAt returns when psn counts as lost; 0: not known yet.
func (b *Scoreboard) lostAt(psn uint64) int64 {
	at := *b.time(psn)
	switch f := *b.flag(psn); {
	case f&Overdue != 0:
		return at + b.ReorderWindow()
	case f&AwaitsResponse != 0 || at > b.newestSent:
		return 0
	}
	return at + b.newestRTT + b.ReorderWindow()
}

// NeedsRetransmit reports whether psn is to be sent again.
func (b *Scoreboard) NeedsRetransmit(psn uint64, now int64) bool {
	if b.Delivered(psn) {
		return false
	}
	if !b.Retransmitting {
		return true
	}
	at := b.lostAt(psn)
	return at != 0 && now >= at
}

// ReorderWindow returns the delay that different paths may cause (RFC 8985).
func (b *Scoreboard) ReorderWindow() int64 {
	return max(reorderWindowMin, b.RTT.Smoothed*max(b.reorderQuarters, 1)/4)
}

// Done reports whether there is nothing left to recover.
func (b *Scoreboard) Done(una uint64) bool { return una >= b.recoveryEnd && !b.Retransmitting }

// ClearCounts discards the results of the last DetectLosses.
func (b *Scoreboard) ClearCounts() { b.CheckAt, b.delivered, b.lost = 0, 0, 0 }

// DetectLosses looks at all PSNs in flight. It sets CheckAt, and returns how many are lost and the oldest of those.
func (b *Scoreboard) DetectLosses(una, sent uint64, now int64) (lost, oldest uint64) {
	for psn := una; psn < sent; psn++ {
		if b.Delivered(psn) {
			b.delivered++
			continue
		}
		switch at := b.lostAt(psn); {
		case at == 0:
		case now >= at:
			if b.lost++; oldest == 0 {
				oldest = psn
			}
		case b.CheckAt == 0 || at < b.CheckAt:
			b.CheckAt = at
		}
	}
	return b.lost, oldest
}

// CutWindow reports whether a loss whose oldest PSN is given is to cut the congestion window: once for all that was in
// flight. It lets the reorder window shrink after some losses without a spurious retransmission.
func (b *Scoreboard) CutWindow(oldest, sent uint64) bool {
	if oldest < b.cwndCutEnd {
		return false
	}
	b.cwndCutEnd = sent
	if b.reorderHold--; b.reorderHold == 0 || b.reorderHold > reorderHoldLosses {
		b.reorderQuarters, b.reorderHold = 1, 0
	}
	return true
}

// QueueBuilt reports whether the newest response time says that the queue on the path is longer than usual.
func (b *Scoreboard) QueueBuilt() bool { return b.lastRTT > b.RTT.Min+b.RTT.Min/2 }

// InFlight returns how many PSNs are in flight; PSNs that are lost, or have arrived at the peer, are not.
func (b *Scoreboard) InFlight(una, nxt, sent uint64) uint64 {
	if b.Active && (b.Retransmitting || nxt == sent) {
		return sent - una - b.delivered - b.lost
	}
	return nxt - una
}
