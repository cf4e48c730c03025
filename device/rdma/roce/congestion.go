package roce

import "github.com/vnicd/vnicd/device/rdma/wire"

// Congestion control (RoCE v2: annex A17.9). Packets of an RC QP say that their sender reacts to congestion (ECT(0)). A
// queue on the path that grows marks them (CE; on the underlay the tunnel copies the mark, RFC 6040). The QP that
// receives a marked packet, the notification point, sends a CNP to the packet's sender. The sender, the reaction point,
// reduces its congestion window.
//
// A CNP does not say how severe congestion is, and one QP sends at most one in cnpInterval, as hardware expects. The
// severity is estimated as DCTCP does (RFC 8257), from the share of recent windows that were marked (recovery.Window):
// a marked window is cut once, however many CNPs arrive. Flows that share a full queue each reduce by a few per cent,
// as often as necessary; a queue that is full for the first time halves them. A CNP can be forged, if at all, only by a
// sender that passes the checks of the peer (admit.go), and one packet may always be in flight.
//
// A loss halves the window. READ responses are flow-controlled by the requester, so their marks also count there, as
// those of requests do at the far end.

// cnpInterval is the minimum time between CNPs of one QP, ns.
const cnpInterval = 50e3

// usesECN reports whether the QP takes part in congestion control over path av. UC and UD have no window, so their
// packets' ECN field comes from the traffic class. RoCE v1 has no such field.
func (q *QP) usesECN(av *AddressVector) bool { return q.typ == RC && q.cfg.ECN && !av.RoCEv1 }

// receiveMarked handles the mark of p, a packet of this connection that met congestion.
func (q *QP) receiveMarked(p *wire.RoCE) {
	if p.V1 {
		return
	}
	q.stats.ECNMarked++
	// Acknowledgements and CNPs cannot be reduced, so their marks are counted only.
	if !q.cfg.ECN || q.typ.class() == classUD || len(p.Payload) == 0 {
		return
	}
	if p.Info.Op == wire.ReadResponse {
		q.recovery.cwnd.OnMark(q.req.una, q.req.sent)
	}
	if q.now >= q.resp.cnpAt && !q.resp.cnpDue {
		q.resp.cnpDue = true
		q.wake()
	}
}

// receiveCNP handles a CNP, as the reaction point.
func (q *QP) receiveCNP() {
	q.stats.RxCNP++
	q.recovery.cwnd.OnMark(q.req.una, q.req.sent)
}

// sendCNP tells the peer that its packets meet congestion, as the notification point.
func (q *QP) sendCNP() {
	buf, hdr, _ := q.newFrame(&q.tx, &bth{}, wire.CNPLen, 0)
	if buf == nil {
		q.resp.stallUntil = q.now + bufferDelay
		return
	}
	clear(hdr)
	// A CNP has BECN set, and neither MigReq nor a PSN.
	h := wire.BTH{Opcode: wire.OpCNP, PKey: wire.DefaultPKey, BECN: true, DestQP: q.attr.DestQPN}
	h.Encode(buf.Bytes()[q.tx.Len():])
	q.resp.cnpDue, q.resp.cnpAt = false, q.now+cnpInterval
	q.stats.TxCNP++
	q.transmit(&q.tx, buf)
}
