package roce

import (
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Unreliable connection (IBTA 9.8.2): messages like RC's SEND and WRITE, never
// acknowledged. A message with a gap is dropped as a whole, the next one starts
// afresh.

// runUC sends up to budget packets.
func (q *QP) runUC(budget int) (more bool) {
	asked, left := false, uint64(0)
	for ; budget > 0; budget-- {
		s := q.nextUnacked()
		if s == nil {
			return false
		}
		if !asked {
			asked = true
			q.near, left = q.localPeer()
		}
		if q.near != nil && q.nxt != s.end {
			switch q.localUC(q.near, s, &left) {
			case localDone:
				if left == 0 {
					return true
				}
				continue
			case localStop:
				return false
			}
		}
		if s.info.kind == kindManage && !q.manage(s) {
			return false
		}
		// In this order, so that a memory fault that the engine catches inside
		// Transmit finds the message as sent.
		if q.nxt != s.end {
			buf := q.sendPacket(s, q.nxt-s.first)
			if buf == nil {
				return false
			}
			q.nxt++
			q.send(&q.tx, buf)
		}
		if q.nxt == s.end {
			q.una, q.sent = q.nxt, q.nxt
			q.completeHead(StatusSuccess)
		}
	}
	return true
}

// nextUnacked returns the WQE being sent by an unacknowledged service, fetching
// one if there is none; nil if there is nothing to do now.
func (q *QP) nextUnacked() *sendSlot {
	if q.state != RTS && q.state != SQD || q.stallAt != 0 || q.waits.send.stops(q.nxt) {
		return nil
	}
	if q.head == q.tail && !q.fetch() {
		return nil
	}
	s := q.slot(q.head)
	if s.failed {
		q.failHead(s.w.Status)
		return nil
	}
	return s
}

func (q *QP) receiveUC(p *wire.RoCE) {
	psn := extend(q.epsn, p.BTH.PSN)
	if p.Info.Is(wire.First) {
		// A new message; whatever was in progress is abandoned, and its receive
		// WQE serves the next.
		q.msg, q.off, q.dropMsg = 0, 0, false
	} else if q.dropMsg || psn != q.epsn || q.msg == 0 {
		q.abandon(p, psn)
		return
	}
	switch v := q.execute(p); v {
	case vOK:
		q.epsn = psn + 1
	case vRecvProt:
		q.failRecv(StatusLocProt)
		q.toErr()
	case vRecvBad:
		q.failRecv(q.wqe.Status)
		q.toErr()
	default:
		switch v {
		case vRemAccess, vImmAccess:
			q.stats.AccessErrors++
		case vFault:
			if q.a.Keep() {
				return
			}
			q.stats.FaultDrops++
		}
		q.abandon(p, psn)
	}
}

// abandon drops a packet and the rest of its message.
func (q *QP) abandon(p *wire.RoCE, psn uint64) {
	q.stats.RxDropped++
	q.msg, q.off = 0, 0
	q.dropMsg = !p.Info.Is(wire.Last)
	q.epsn = psn + 1
}
