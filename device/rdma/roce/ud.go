package roce

import (
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Unreliable datagrams and the GSI queue pair (IBTA 9.8.3, annex A17): one packet
// per message, each with its own destination.

// controlledQKey: a work request with this bit set sends the QP's own Q_Key
// instead (IBTA 10.2.5).
const controlledQKey = 1 << 31

// runUD sends up to budget datagrams.
func (q *QP) runUD(budget int) (more bool) {
	for ; budget > 0; budget-- {
		s := q.nextUnacked()
		if s == nil || !q.sendDatagram(s) {
			return false
		}
	}
	return true
}

// sendDatagram sends the datagram of s and completes it.
func (q *QP) sendDatagram(s *sendSlot) bool {
	w := &s.w
	if !q.req.udCached || q.req.udAV != w.AV || q.req.udQPN != w.RemoteQPN {
		t, err := w.AV.template(q.cfg.QPN, w.RemoteQPN)
		if err != nil {
			q.failHead(StatusLocQPOp)
			return false
		}
		q.tx, q.req.udAV, q.req.udQPN, q.req.udCached = t, w.AV, w.RemoteQPN, true
	}
	t := bth{opcode: wire.OpUDSendOnly, solicited: w.Solicited, destQP: w.RemoteQPN, psn: q.req.nxt}
	ext := wire.DETHLen
	if s.info.imm {
		t.opcode = wire.OpUDSendOnlyImm
		ext += wire.ImmLen
	}
	buf, hdr, data := q.newFrame(&q.tx, &t, ext, int(w.Length))
	if buf == nil {
		q.req.stallUntil = q.now + bufferDelay
		return false
	}
	h := wire.DETH{QKey: w.QKey, SrcQP: q.cfg.QPN}
	switch {
	case q.typ == GSI:
		h.QKey = GSIQKey
	case w.QKey&controlledQKey != 0:
		h.QKey = q.attr.QKey
	}
	n := h.Encode(hdr)
	if s.info.imm {
		wire.PutImm(hdr[n:], w.Imm)
	}
	if !q.gather(s, data, 0) {
		buf.Free()
		return false
	}
	q.req.nxt++
	q.req.una, q.req.sent = q.req.nxt, q.req.nxt
	q.transmit(&q.tx, buf)
	q.completeHead(StatusSuccess)
	return true
}

// receiveUD copies a datagram behind the 40 bytes of its GRH area. If there is no receive WQE or it is too small, the
// datagram is dropped and the receive WQE kept: anyone who knows the Q_Key can be the sender, and must not be able to
// end the QP. The same if the VM's attribute forbids the write: the GSI QP must outlive a quarantine (PF-3).
func (q *QP) receiveUD(p *wire.RoCE) {
	d := p.DETH()
	want := q.attr.QKey
	if q.typ == GSI {
		want = GSIQKey
	}
	if d.QKey != want {
		q.drop(DropQKey)
		return
	}
	v := q.ensureRecv()
	n := uint64(len(p.Payload))
	if v == vOK && q.resp.recv.Length < wire.GRHLen+n {
		v = vRecvShort
	}
	if v == vOK {
		p.GRH(&q.resp.grh)
		v = q.scatterRecv(0, q.resp.grh[:], wire.GRHLen+n)
	}
	if v == vOK && n > 0 {
		v = q.scatterRecv(wire.GRHLen, p.Payload, n)
	}
	switch v {
	case vOK:
	case vRecvProt:
		q.failRecv(StatusLocProt)
		q.toErr()
		return
	case vRecvBad:
		q.failRecv(q.resp.recv.Status)
		q.toErr()
		return
	default:
		if v == vFault {
			if q.link.Keep() {
				return
			}
			q.stats.FaultDrops++ // PF-11
		}
		q.stats.RxDropped++
		return
	}
	c := &q.resp.cqe
	*c = Completion{
		Opcode: WCRecv, ByteLen: uint32(wire.GRHLen + n), Flags: FlagGRH, SrcQP: d.SrcQP,
		SL: p.PCP, VLAN: p.VLAN, SMAC: p.SMAC, IPv4: !p.IsV6, RoCEv1: p.V1, Solicited: p.BTH.Solicited,
	}
	if p.Info.Is(wire.HasImm) {
		c.Flags |= FlagImm
		c.Imm = p.Imm()
	}
	q.finishRecv()
}
