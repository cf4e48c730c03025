package roce

import (
	"github.com/vnicd/vnicd/device/rdma/wire"
	"github.com/vnicd/vnicd/translate"
)

// RC requests that meet an absent page (HF-1, PF-8, PF-12). Two answers exist:
//
//	kept     the request stays at the head of the reorder queue, with those behind it, and no message is sent. They
//	         are executed when the page is present. The peer sees that a response is late, and repeats requests after
//	         its timeout: a request that is queued already is a duplicate.
//	refused  RNR NAK, and the request is dropped (PF-8). A peer counts RNR NAKs against rnr_retry, and many peers ask
//	         for no retries at all. So only a peer that retries for ever is refused.
//
// Host paging is no affair of the peer, so requests are kept whoever the peer is, as far as there is room. If a guest
// pages itself (on-demand regions) a peer that retries for ever is refused, which costs no buffers, and any other is
// kept.
//
// What finds no room is dropped in silence if its sender must not be refused. When the page is present the peer is
// asked for it, once: by a NAK for a sequence error, or by a selective acknowledgement if requests behind the gap are
// queued.
//
// A kept request that its sender repeats is answered by an RNR NAK if the sender retries for ever. This keeps it from
// using up retry_cnt. A vnicd that does not is told that its request waits if the page is absent on the host: what the
// host does must not end the connection. A guest may leave its page absent for ever, and a peer that has limited its
// retries wants to notice.

// keepTime bounds how long requests are kept for one page, ns. After it they are dropped and asked for later, so that
// memory that never comes occupies no buffers. It is longer than a busy swap device takes.
const keepTime = 1e9

// patience returns what the peer does after RNR NAKs: from its newest request, or else from connection management.
func (q *QP) patience() wire.Patience {
	switch p := q.resp.patience; p {
	case wire.PatienceForever, wire.PatienceEnds:
		return p
	}
	return q.link.PeerPatience()
}

// peerWaits reports whether the peer is known to retry RNR NAKs for ever.
func (q *QP) peerWaits() bool { return q.patience() == wire.PatienceForever }

// ofHost reports whether w waits for the host.
func (w *wait) ofHost() bool { return w.miss.Kind == translate.HostFault || w.cause == waitQueue }

// keepsRequest reports whether the request at epsn, which waits for a page, is to be kept if there is room.
func (q *QP) keepsRequest() bool {
	w := &q.faults.request
	return (w.ofHost() || !q.peerWaits()) && q.now-w.refusedAt < keepTime
}

// keepsBehind reports whether requests behind the one that waits for a page are to be kept if there is room. An atomic
// needs no frame to be kept itself.
func (q *QP) keepsBehind() bool {
	return q.resp.reorder.arrived.Has(0) || q.faults.request.cause == waitAtomic && q.keepsRequest()
}

// suspendRequest handles the request at epsn, which is being received or executed and has met an absent page.
func (q *QP) suspendRequest() {
	r := &q.resp
	switch h := &r.reorder; {
	case h.arrived.Has(0): // kept already
		q.pauseQueue()
		return
	case q.faults.request.cause == waitAtomic: // a repetition
		q.stats.Duplicates++
		r.nakSent = r.nakSent || !q.keepsBehind()
		q.answerWaiting()
		return
	case q.keepsRequest():
		if b := q.link.Hold(true); b != nil {
			h.Put(r.epsn, b)
			h.arrived.Set(0, 1)
			q.stats.Kept++
			q.pauseQueue()
			return
		}
	}
	q.stats.FaultDrops++
	r.reorder.drop(q.link)
	r.nakSent = true
	if !q.peerWaits() {
		r.missing = max(r.missing, r.epsn+1)
	}
	q.answerWaiting()
}

// pauseQueue records that requests are queued because the one at epsn waits for a page. Repetitions do not prolong
// this.
func (q *QP) pauseQueue() {
	q.resp.reorder.paused = true
	q.resp.reorder.expiresAt = q.faults.request.refusedAt + keepTime
}

// answerWaiting answers the request at epsn, which waits for a page, after it was repeated or dropped: by an RNR NAK, a
// report that it waits, or not at all.
func (q *QP) answerWaiting() {
	switch {
	case q.peerWaits():
		q.resp.nak = nakFault
	case q.resp.peerSelective && q.faults.request.ofHost():
		q.resp.waitDue = true
	default:
		return
	}
	q.wake()
}

// receiveBeforeQueue executes p, the request at epsn, while requests are queued. If p is the repetition of the one that
// waits for a page, this tries it again.
func (q *QP) receiveBeforeQueue(p *wire.RoCE) {
	kept, psn := q.resp.reorder.arrived.Has(0), q.resp.epsn
	q.executeRequest(p)
	if !kept || q.resp.epsn != psn {
		q.executeQueuedRequests(false)
	} else if q.faults.request.cause != waitNone {
		q.stats.Duplicates++
		q.answerWaiting()
	}
}

// refuseAhead drops a request ahead of epsn that is not queued, and asks for the missing ones before it.
func (q *QP) refuseAhead(psn uint64) {
	r := &q.resp
	r.reorder.drop(q.link)
	r.nakSent = true
	switch {
	case q.faults.request.cause != waitAtomic:
		r.nak = wire.NAKSequence
	case q.peerWaits(): // nothing was lost
		r.nak = nakFault
	default:
		q.stats.FaultDrops++
		r.missing = max(r.missing, psn+1)
		return
	}
	q.wake()
}

// resumeQueue continues after the page of the request at epsn has become present. refused: the peer was sent an RNR
// NAK.
func (q *QP) resumeQueue(refused bool) {
	r, psn := &q.resp, q.resp.epsn
	if r.reorder.arrived.Has(0) {
		q.executeQueuedRequests(false)
	}
	switch w := &q.faults.request; {
	case !refused:
	case w.cause != waitNone && r.epsn == psn: // another page of the same packet
		w.rnrSent = true
	case r.epsn-r.ackPSN < psnHalf/2:
		// PF-9: the sender need not wait until its RNR timer expires.
		r.ackPending = true
		q.wake()
	}
	q.askForMissing()
}

// askForMissing asks the peer, once, for requests that were lost or dropped while a page was absent.
func (q *QP) askForMissing() {
	r := &q.resp
	h := &r.reorder
	if q.faults.request.cause != waitNone || r.fatal.syndrome != 0 {
		return
	}
	gap, missing := h.paused && h.arrived.Any(), r.missing > r.epsn
	h.paused, r.missing = false, 0
	switch {
	case r.nak != 0: // another answer makes the peer go back
	case gap && r.peerSelective:
		h.sackDue = true
		q.wake()
	case gap || missing:
		h.drop(q.link)
		r.nak, r.nakSent = wire.NAKSequence, true
		q.wake()
	}
}

// expireRequests empties the reorder queue after a time without progress. Requests that were kept for a page are asked
// for when it is present.
func (q *QP) expireRequests() {
	r := &q.resp
	if r.reorder.paused && q.faults.request.cause != waitNone {
		r.missing = max(r.missing, r.epsn+1)
		if q.faults.request.cause == waitAtomic {
			r.missing = max(r.missing, r.epsn+2) // the atomic itself is kept without a frame
		}
		r.nakSent = true
	}
	r.reorder.drop(q.link)
}
