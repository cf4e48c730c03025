package roce

import (
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Unreliable connection (IBTA 9.8.2): messages like RC's SEND and WRITE, never acknowledged. A message with a gap is
// dropped as a whole; the next one is independent of it.

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
			q.req.localPeer, left = q.localPeer()
		}
		if q.req.localPeer != nil && q.req.nxt != s.end {
			switch q.localUC(q.req.localPeer, s, &left) {
			case localDone:
				if left == 0 {
					return true
				}
				continue
			case localStop:
				return false
			}
		}
		if s.info.kind == kindManage && !q.executeManage(s) {
			return false
		}
		// In this order, so that nxt is correct if Transmit faults and the engine recovers.
		if q.req.nxt != s.end {
			buf := q.sendPacket(s, q.req.nxt-s.first)
			if buf == nil {
				return false
			}
			q.req.nxt++
			q.transmit(&q.tx, buf)
		}
		if q.req.nxt == s.end {
			q.req.una, q.req.sent = q.req.nxt, q.req.nxt
			managed := s.info.kind == kindManage
			q.completeHead(StatusSuccess)
			if managed && q.link.Journaled() {
				return true // see runRC
			}
		}
	}
	return true
}

// nextUnacked returns the WQE that an unacknowledged service sends, and fetches one if there is none; nil: nothing can
// be sent.
func (q *QP) nextUnacked() *sendSlot {
	if q.state != RTS && q.state != SQD || q.req.stallUntil != 0 || q.faults.send.blocks(q.req.nxt) {
		return nil
	}
	if q.req.head == q.req.tail && !q.fetchWQE() {
		return nil
	}
	s := q.req.slot(q.req.head)
	if s.failed {
		q.failHead(s.w.Status)
		return nil
	}
	return s
}

// receiveUC executes a request packet of a UC connection.
func (q *QP) receiveUC(p *wire.RoCE) {
	psn := extend(q.resp.epsn, p.BTH.PSN)
	if p.Info.Is(wire.First) {
		// A new message. One in progress is abandoned, and its receive WQE is used for the next.
		q.resp.op, q.resp.off, q.resp.dropMessage = 0, 0, false
	} else if q.resp.dropMessage || psn != q.resp.epsn || q.resp.op == 0 {
		q.abandon(p, psn)
		return
	}
	switch v := q.executeSendWrite(p); v {
	case vOK:
		q.resp.epsn = psn + 1
	case vRecvProt:
		q.failRecv(StatusLocProt)
		q.toErr()
	case vRecvBad:
		q.failRecv(q.resp.recv.Status)
		q.toErr()
	default:
		switch v {
		case vRemAccess, vImmAccess:
			q.stats.AccessErrors++
		case vFault:
			if q.link.Keep() {
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
	q.resp.op, q.resp.off = 0, 0
	q.resp.dropMessage = !p.Info.Is(wire.Last)
	q.resp.epsn = psn + 1
}
