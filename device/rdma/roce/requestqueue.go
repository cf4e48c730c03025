package roce

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/roce/recovery"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// The responder's reorder queue: requests that arrive out of order. A request is queued if its sender understands
// selective acknowledgements, and executed when the gap before it has been filled: in order, as if it had just arrived.
// Nothing is placed out of order.
//
// A selective acknowledgement (a NAK for a sequence error with a bitmap of the packets that have arrived,
// wire.Arrivals) is sent at once. The sender, which knows the times, decides whether a packet is late or lost. If the
// packet does not carry the mark that its sender understands selective acknowledgements, the answer is a plain NAK. So
// nothing is negotiated, and no agreement can become stale when the peer changes.
//
// The queue also keeps the request at the expected PSN that waits for an absent page, with the requests behind it, of
// any sender (suspend.go). Any other event that stops the responder (RNR, an error) makes the sender go back and send
// everything again, so the queue is emptied.
const (
	reorderSpan = wire.ArrivalsSpan
	// reorderTimeout is how long a reorder queue is kept without progress, ns.
	reorderTimeout = 100e6
	// sackEvery: one selective acknowledgement is sent for this many packets that do not request an
	// acknowledgement.
	sackEvery = 8
)

// requestQueue holds requests from the expected PSN on.
type requestQueue struct {
	recovery.Queue
	// arrived is relative to the expected PSN. Bit 0 is set only while that request waits for an absent page, and while
	// queued requests are executed.
	arrived   wire.Arrivals
	sackDue   bool  // a selective acknowledgement is to be sent
	paused    bool  // requests were queued because of an absent page: gaps have not been reported
	sinceSACK uint8 // packets queued since the last selective acknowledgement
	expiresAt int64 // when the queue is emptied; 0: it is empty
}

// queueRequest queues p, which is ahead of epsn. If it returns false, p is dropped, and the sender goes back.
func (q *QP) queueRequest(p *wire.RoCE, psn uint64) bool {
	h := &q.resp.reorder
	paused := q.faults.request.cause != waitNone
	if paused && !q.keepsBehind() ||
		!paused && (!p.BTH.Selective || !q.cfg.SelectiveRepeat || q.resp.nakSent) {
		return false
	}
	first, d := !h.arrived.Any(), psn-q.resp.epsn
	switch {
	case h.arrived.Has(d):
		q.stats.Duplicates++
	default:
		var b *frame.Buf
		if d < reorderSpan {
			b = q.link.Hold(paused)
		}
		if b == nil {
			if paused {
				q.stats.FaultDrops++
				q.resp.missing = max(q.resp.missing, psn+1)
				return true
			}
			if first {
				return false
			}
			q.stats.RxDropped++ // the queued ones need not be sent again
			break
		}
		n := uint64(1)
		if p.Info.Op == wire.ReadRequest {
			n = packets(uint64(p.RETH().Length), q.mtu)
		}
		h.Put(psn, b)
		h.arrived.Set(d, n)
		h.sinceSACK++
		q.stats.Kept++
	}
	if paused {
		q.pauseQueue()
		return true
	}
	if first {
		h.expiresAt = q.now + reorderTimeout
	}
	if first || p.BTH.AckReq || h.sinceSACK >= sackEvery {
		h.sackDue = true
		q.wake()
	}
	return true
}

// advance releases the frames of n PSNs from epsn on, the expected one, which are done.
func (h *requestQueue) advance(epsn, n uint64, now int64, link Link) {
	for psn := epsn; psn < epsn+min(n, reorderSpan); psn++ {
		if b := h.Take(psn); b != nil {
			link.Release(b)
		}
	}
	h.arrived.Shift(n)
	h.expiresAt = now + reorderTimeout
}

// drop empties the queue.
func (h *requestQueue) drop(link Link) {
	for psn := uint64(0); h.Len() > 0; psn++ {
		if b := h.Take(psn); b != nil {
			link.Release(b)
		}
	}
	*h = requestQueue{Queue: h.Queue}
}

// executeQueuedRequests executes the queued requests that are in order: at most reorderSpan packets. If retry, it tries
// the one that waits for a page again.
func (q *QP) executeQueuedRequests(retry bool) {
	h := &q.resp.reorder
	for ; h.arrived.Has(0) && (retry || q.faults.request.cause == waitNone); retry = false {
		b, psn := h.Peek(q.resp.epsn), q.resp.epsn
		var p wire.RoCE
		if b == nil || wire.ParseRoCE(b.Bytes(), b.Layout(), &p) != nil { // a PSN within a READ: the peer contradicts itself
			h.drop(q.link)
			break
		}
		q.link.InHand(b)
		if q.executeRequest(&p); q.resp.epsn == psn {
			break
		}
	}
	q.link.InHand(nil)
	if h.paused && q.faults.request.cause == waitNone {
		q.askForMissing()
	}
	if !h.arrived.Any() {
		h.sackDue, h.sinceSACK, h.expiresAt = false, 0, 0
	}
}

// sendSelectiveAck reports which packets ahead of epsn have arrived.
func (q *QP) sendSelectiveAck() bool {
	h := &q.resp.reorder
	arrived := h.arrived
	arrived[0] &^= 1
	if !q.sendArrivals(q.resp.epsn, &arrived) {
		return false
	}
	h.sackDue, h.sinceSACK = false, 0
	return true
}

// sendWaits tells a requester that its request psn has arrived and waits for a page.
func (q *QP) sendWaits(psn uint64) bool { return q.sendArrivals(psn, &wire.Arrivals{1}) }

// sendArrivals sends a selective acknowledgement. It returns false if there is no buffer.
func (q *QP) sendArrivals(psn uint64, arrived *wire.Arrivals) bool {
	t := bth{opcode: wire.OpRCSelectiveAck, destQP: q.attr.DestQPN, psn: psn, selective: q.resp.peerSelective}
	buf, hdr, _ := q.newFrame(&q.tx, &t, wire.AETHLen+wire.ArrivalsLen, 0)
	if buf == nil {
		q.resp.stallUntil = q.now + bufferDelay
		return false
	}
	a := wire.AETH{Syndrome: wire.NAKSequence, MSN: q.resp.msn}
	arrived.Encode(hdr[a.Encode(hdr):])
	q.stats.TxSelectiveAcks++
	q.transmit(&q.tx, buf)
	return true
}
