package roce

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Responses before their turn. A lost response of a READ or atomic is asked for again alone (repair.go), and those behind it are kept
// and taken in order, as if they had just come, when the gap is filled. Nothing is placed out of order.
//
// Each response says in itself that its sender answers what is asked for again response by response, beside whatever else it is
// sending (respond.go). One that does not say so, before its turn, makes the requester go back. So do an RNR NAK and a NAK, an absent
// page of its own, and 100 ms without progress; then those kept are given back, and all is asked for again.

// repliesSpan bounds how far ahead a response may be.
const repliesSpan = 256

type replies struct {
	frames  []*frame.Buf // ring, by PSN
	kept    int
	untilAt int64 // they are given back; 0: there is none
}

// keeps tells whether responses of p's sender may be kept now.
func (q *QP) keeps(p *wire.RoCE) bool {
	return p.BTH.Selective && !q.cfg.GoBackN && q.rnrAt == 0 && q.waits.send.cause != atResult
}

// gap hears of a response, psn, that comes while one before it is missing: implied NAK.
func (q *QP) gap(psn uint64, p *wire.RoCE) {
	if q.live() && !(q.keeps(p) && q.keepReply(psn, p)) {
		q.lost()
	}
}

// keepReply keeps p, or notes what it says if that is all. False: the requester goes back.
func (q *QP) keepReply(psn uint64, p *wire.RoCE) bool {
	b, r := &q.board, &q.replies
	if p.Info.Op == wire.Ack {
		if q.open(); psn < b.executed {
			return true
		}
		b.executed = psn + 1
		q.arrived(psn)
	} else if b.active && *b.mark(psn)&isThere != 0 {
		q.stats.Duplicates++
		q.twice(psn)
		return true
	} else {
		var f *frame.Buf
		if psn-q.una < uint64(len(r.frames)) && *b.mark(psn)&isReply != 0 {
			f = q.a.Hold()
		}
		if f == nil {
			if r.kept == 0 {
				return false
			}
			q.stats.RxDropped++ // the others need not be asked for again
			return true
		}
		q.open()
		if r.kept++; r.untilAt == 0 {
			r.untilAt = q.now + aheadFor
		}
		r.frames[psn%uint64(len(r.frames))] = f
		q.stats.Kept++
		q.replied(psn)
		*b.mark(psn) |= isThere
		b.executed = max(b.executed, psn)
	}
	if m := *b.mark(psn); m&isMissed == 0 { // else it is itself late
		q.overdue(psn, *b.at(psn))
	}
	q.heard()
	return true
}

// takeReply takes what was kept of psn out of what is kept; nil: nothing.
func (q *QP) takeReply(psn uint64) *frame.Buf {
	r := &q.replies
	if r.kept == 0 {
		return nil
	}
	f := &r.frames[psn%uint64(len(r.frames))]
	b := *f
	if *f = nil; b != nil {
		if r.kept--; r.kept == 0 {
			r.untilAt = 0
		}
	}
	return b
}

// dropReplies gives everything back.
func (q *QP) dropReplies() {
	for psn := range uint64(len(q.replies.frames)) {
		if b := q.takeReply(psn); b != nil {
			q.a.Release(b)
		}
	}
}

// replay takes what was kept and has its turn now.
func (q *QP) replay() {
	b := &q.board
	for q.live() && b.active {
		if q.una < b.executed {
			q.ackTo(b.executed)
		}
		psn := q.una
		f := q.takeReply(psn)
		if f == nil {
			break
		}
		q.a.InHand(f)
		var p wire.RoCE
		if wire.ParseRoCE(f.Bytes(), &p) == nil { // as it did before
			q.response(psn, &p)
		}
		q.a.Release(f)
		if q.una == psn { // it was not what is awaited
			*b.mark(psn) &^= isThere
			break
		}
	}
	q.a.InHand(nil)
}
