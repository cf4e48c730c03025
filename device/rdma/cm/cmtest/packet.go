package cmtest

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Packet is a RoCE packet inside VXLAN, as a host on the underlay may forge it.
type Packet struct {
	VNI  uint32
	Path wire.Path
	BTH  wire.BTH
	Ext  []byte // extension headers of the opcode
	Data []byte // a multiple of four bytes
}

// Bytes returns the UDP payload: VXLAN header, inner frame, correct ICRC.
func (p *Packet) Bytes() ([]byte, error) {
	t, err := p.Path.Template()
	if err != nil {
		return nil, err
	}
	n := wire.BTHLen + len(p.Ext) + len(p.Data) + wire.ICRCLen
	frame := make([]byte, t.Len()+n)
	at := t.Put(frame, n)
	at += p.BTH.Encode(frame[at:])
	at += copy(frame[at:], p.Ext)
	copy(frame[at:], p.Data)
	t.Seal(frame)
	out := make([]byte, 8, 8+len(frame))
	out[0] = 8 // RFC 7348, 5: the VNI is valid
	binary.BigEndian.PutUint32(out[4:], p.VNI<<8)
	return append(out, frame...), nil
}

// Datagram makes it a datagram to a queue pair.
func (p *Packet) Datagram(qpn, qkey, from uint32, data []byte) {
	p.BTH.Opcode, p.BTH.DestQP, p.Ext, p.Data = wire.OpUDSendOnly, qpn, make([]byte, wire.DETHLen), data
	h := wire.DETH{QKey: qkey, SrcQP: from}
	h.Encode(p.Ext)
}

// Write makes it an RDMA WRITE of data in one packet.
func (p *Packet) Write(qpn, psn, key uint32, va uint64, data []byte) {
	p.BTH = wire.BTH{Opcode: wire.OpRCWriteOnly, Migrated: true, PKey: wire.DefaultPKey, DestQP: qpn, PSN: psn}
	p.Ext, p.Data = make([]byte, wire.RETHLen), data
	h := wire.RETH{VA: va, RKey: key, Length: uint32(len(data))}
	h.Encode(p.Ext)
}
