package roce

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Frames are built in place. Modify encodes the constant part (Ethernet to UDP) once from the path. BTH, extension
// headers and payload are written behind it, and then the ICRC.

const (
	bthSolicited = 0x80
	bthMigrated  = 0x40 // IBTA 9.2.3: QPs start in the migrated state, which vnicd never leaves
	bthAckReq    = 0x80
)

// template encodes the path av. local and remote are QP numbers.
func (av *AddressVector) template(local, remote uint32) (wire.Template, error) {
	pcp := av.SL
	if pcp > 7 { // not a priority: derived from a UD completion (hca)
		pcp = 0
	}
	p := wire.Path{
		SMAC: av.SMAC, DMAC: av.DMAC, VLAN: av.VLAN, PCP: pcp, V1: av.RoCEv1,
		SrcIP: av.SGID, DstIP: av.DGID,
		TrafficClass: av.TrafficClass, HopLimit: av.HopLimit, FlowLabel: av.FlowLabel & 0xfffff,
		SrcPort: wire.SourcePort(local, remote),
	}
	if f := p.FlowLabel; f != 0 {
		// A flow label alone determines the port, as the verbs API promises (all 20 bits folded).
		p.SrcPort = uint16(0xc000 | (f^f>>14)&0x3fff)
	}
	return p.Template()
}

// bth holds the variable fields of a base transport header (IBTA 9.2).
type bth struct {
	opcode    wire.Opcode
	solicited bool
	ackReq    bool
	selective bool
	patience  wire.Patience
	destQP    uint32
	psn       uint64 // low 24 bits go out
}

// newFrame lays out a frame with ext bytes of extension headers and n bytes of payload in a new buffer. The caller
// fills ext and payload, then calls transmit. buf is nil if there is no buffer.
func (q *QP) newFrame(h *wire.Template, t *bth, ext, n int) (buf *frame.Buf, extHdr, payload []byte) {
	buf = q.link.GetBuf()
	if buf == nil {
		return nil, nil, nil
	}
	pad := -n & 3
	transport := wire.BTHLen + ext + n + pad + wire.ICRCLen
	if !buf.SetLen(h.Len() + transport) {
		// The buffers are too small for the path MTU. The device refuses such a configuration; here it counts
		// as having no buffer.
		buf.Free()
		return nil, nil, nil
	}
	buf.SetLayout(h.Layout())
	b := buf.Bytes()
	b = b[h.Put(b, transport):]
	b[0] = byte(t.opcode)
	b[1] = bthMigrated | byte(pad)<<4
	if t.solicited {
		b[1] |= bthSolicited
	}
	binary.BigEndian.PutUint16(b[2:], wire.DefaultPKey)
	binary.BigEndian.PutUint32(b[4:], uint32(t.patience)<<24|t.destQP&psnMask)
	binary.BigEndian.PutUint32(b[8:], uint32(t.psn&psnMask))
	if t.ackReq {
		b[8] |= bthAckReq
	}
	if t.selective {
		b[8] |= wire.SelectiveMark
	}
	data := wire.BTHLen + ext
	clear(b[data+n : data+n+pad])
	return buf, b[wire.BTHLen:data:data], b[data : data+n : data+n]
}

// transmit writes the ICRC of a frame that was built on template h, and sends the frame.
func (q *QP) transmit(h *wire.Template, buf *frame.Buf) {
	b := buf.Bytes()
	h.Seal(b)
	q.stats.TxPackets++
	q.stats.TxBytes += uint64(len(b))
	q.link.Transmit(buf)
}
