package roce

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/roce/recovery"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// The requester's reorder queue: responses that arrive out of order. A lost response of a READ or atomic is requested
// again alone (selective.go). The responses behind it are queued and handled in order when the gap is filled, as if
// they had just arrived. Nothing is placed out of order.
//
// Each response carries a mark if its sender repeats responses one by one, beside the responses that it is sending
// already (responses.go). An out-of-order response without that mark makes the requester go back. So do an RNR NAK, a
// NAK, an absent page in the requester's memory, and 100 ms without progress: the queue is emptied, and everything is
// requested again.

// responseSpan bounds how far ahead of una a queued response may be, in PSNs.
const responseSpan = 256

// responseQueue holds responses ahead of una.
type responseQueue struct {
	recovery.Queue
	expiresAt int64 // when the queue is emptied; 0: it is empty
}

// dequeue removes and returns the frame of response psn; nil: it is not queued.
func (r *responseQueue) dequeue(psn uint64) *frame.Buf {
	b := r.Take(psn)
	if r.Len() == 0 {
		r.expiresAt = 0
	}
	return b
}

// drop empties the queue.
func (r *responseQueue) drop(link Link) {
	for psn := uint64(0); r.Len() > 0; psn++ {
		if b := r.dequeue(psn); b != nil {
			link.Release(b)
		}
	}
}

// keepsResponses reports whether responses of p's sender may be queued at present.
func (q *QP) keepsResponses(p *wire.RoCE) bool {
	return p.BTH.Selective && q.cfg.SelectiveRepeat && q.req.rnrUntil == 0 && q.faults.send.cause != waitResult
}

// responseGap handles response psn, which arrives while one before it is missing: an implied NAK.
func (q *QP) responseGap(psn uint64, p *wire.RoCE) {
	if q.requesterActive() && !(q.keepsResponses(p) && q.queueResponse(psn, p)) {
		q.gapDetected()
	}
}

// queueResponse queues p. An ACK is only recorded in the scoreboard, as it carries no data. If it returns false, the
// requester goes back.
func (q *QP) queueResponse(psn uint64, p *wire.RoCE) bool {
	b, r := &q.recovery.scoreboard, &q.recovery.responses
	if p.Info.Op == wire.Ack {
		if b.Start(q.req.una); psn < b.Executed {
			return true
		}
		b.Executed = psn + 1
		b.RequestArrived(psn, q.now)
	} else if b.Active && b.Flags(psn)&recovery.Received != 0 {
		q.stats.Duplicates++
		b.DuplicateResponse(psn, q.req.sent)
		return true
	} else {
		var f *frame.Buf
		if psn-q.req.una < r.Span() && b.Flags(psn)&recovery.AwaitsResponse != 0 {
			f = q.link.Hold(false)
		}
		if f == nil {
			if r.Len() == 0 {
				return false
			}
			q.stats.RxDropped++ // the queued ones need not be requested again
			return true
		}
		b.Start(q.req.una)
		r.Put(psn, f)
		if r.expiresAt == 0 {
			r.expiresAt = q.now + reorderTimeout
		}
		q.stats.Kept++
		b.ResponseArrived(psn, q.req.una, q.req.sent, q.now)
		b.MarkReceived(psn)
		b.Executed = max(b.Executed, psn)
	}
	b.ResponseQueued(psn, q.req.una, q.now)
	q.restartTimers()
	return true
}

// handleQueuedResponses handles the queued responses that are in order.
func (q *QP) handleQueuedResponses() {
	b := &q.recovery.scoreboard
	for q.requesterActive() && b.Active {
		if q.req.una < b.Executed {
			q.acknowledge(b.Executed)
		}
		psn := q.req.una
		f := q.recovery.responses.dequeue(psn)
		if f == nil {
			break
		}
		q.link.InHand(f)
		var p wire.RoCE
		if wire.ParseRoCE(f.Bytes(), f.Layout(), &p) == nil { // as it did on arrival
			q.handleResponse(psn, &p)
		}
		q.link.Release(f)
		if q.req.una == psn { // it was not the expected response
			b.ClearReceived(psn)
			break
		}
	}
	q.link.InHand(nil)
}
