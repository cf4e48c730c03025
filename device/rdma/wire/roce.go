package wire

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/frame/header"
)

// RoCE constants (IBTA annexes A16, A17).
const (
	RoCEPort = 4791 // UDP destination port of RoCE v2
	GRHLen   = 40

	grhNextHeader = 0x1b // IBTA 8.3
)

// RoCE is a parsed RoCE frame. Slices point into the frame.
type RoCE struct {
	SMAC, DMAC header.MAC
	VLAN       uint16 // or NoVLAN
	PCP        uint8
	V1         bool // RoCE v1: GRH instead of IP and UDP
	IsV6       bool // the network header is IPv6 or a GRH, of 40 bytes
	SrcIP      [16]byte
	DstIP      [16]byte // both IPv4-mapped if the network header is IPv4
	TOS        uint8    // or traffic class
	TTL        uint8    // or hop limit
	FlowLabel  uint32
	SrcPort    uint16 // UDP, v2 only

	BTH     BTH
	Info    *OpInfo // of BTH.Opcode, always Valid
	Net     []byte  // the network header: 20 or 40 bytes
	Ext     []byte  // extension headers, Info.ExtLen bytes
	Payload []byte  // without pad

	bth  int // where BTH begins in the frame
	icrc int // where the ICRC begins
}

// ParseRoCE parses frame, whose headers are where at says, into p and validates every length against the others. It
// does not check the ICRC (CheckICRC), the P_Key or addresses. Bytes behind the network packet are ignored (Ethernet
// padding), and so is the UDP checksum, which A17 permits senders to omit. p is undefined after an error.
func ParseRoCE(frame []byte, at *header.Layout, p *RoCE) error {
	n, err := p.network(frame, at)
	if err != nil {
		return err
	}
	end := n.end
	if end-n.bth < BTHLen+ICRCLen {
		return ErrShort
	}
	if _, err := p.BTH.Decode(frame[n.bth:]); err != nil {
		return err
	}
	p.Info = p.BTH.Opcode.Info()
	if !p.Info.Valid() {
		return ErrOpcode
	}
	p.bth, p.icrc = n.bth, end-ICRCLen
	ext := n.bth + BTHLen
	data := ext + int(p.Info.ExtLen)
	rest := p.icrc - data // payload and pad
	switch {
	case rest < 0:
		return ErrShort
	case rest&3 != 0:
		return ErrPad
	case rest < int(p.BTH.Pad):
		return ErrLength
	case rest != 0 && !p.Info.Is(HasPayload):
		return ErrLength
	}
	p.Ext = frame[ext:data:data]
	p.Payload = frame[data : p.icrc-int(p.BTH.Pad) : p.icrc-int(p.BTH.Pad)]
	return nil
}

// layout holds the offsets of a packet's parts in its frame.
type layout struct{ net, bth, end int }

// network parses everything before the BTH. RoCE has one VLAN tag at most, no IP options and no extension headers.
func (p *RoCE) network(frame []byte, at *header.Layout) (l layout, err error) {
	l.net = int(at.L3)
	switch p.VLAN, p.PCP = header.NoVLAN, 0; l.net {
	case header.EthernetLen:
	case header.EthernetLen + header.VLANLen:
		if binary.BigEndian.Uint16(frame[12:]) != header.TypeVLAN {
			return l, ErrType
		}
		p.VLAN, p.PCP = at.VLAN, frame[header.EthernetLen]>>5
	case 0:
		return l, ErrShort
	default:
		return l, ErrType
	}
	p.DMAC, p.SMAC = header.MAC(frame[0:6]), header.MAC(frame[6:12])
	b := frame[l.net:]
	var proto uint8
	n := 0
	switch at.Type {
	case header.TypeIPv4:
		var ip header.IPv4
		if n, err = ip.Decode(b); err != nil {
			return l, err
		}
		if n != header.IPv4Len {
			return l, ErrOptions
		}
		if ip.MoreFrags || ip.FragOffset != 0 {
			return l, ErrFragment
		}
		p.V1, p.IsV6 = false, false
		p.SrcIP, p.DstIP = header.Mapped4(ip.Src), header.Mapped4(ip.Dst)
		p.TOS, p.TTL, p.FlowLabel = ip.TOS, ip.TTL, 0
		proto, l.end = ip.Protocol, l.net+int(ip.TotalLen)
	case header.TypeIPv6, header.TypeRoCE1:
		var ip header.IPv6
		if n, err = ip.Decode(b); err != nil {
			return l, err
		}
		p.V1, p.IsV6 = at.Type == header.TypeRoCE1, true
		p.SrcIP, p.DstIP = ip.Src, ip.Dst
		p.TOS, p.TTL, p.FlowLabel = ip.TrafficClass, ip.HopLimit, ip.FlowLabel
		proto, l.end = ip.NextHeader, l.net+header.IPv6Len+int(ip.PayloadLen)
	default:
		return l, ErrType
	}
	p.Net = frame[l.net : l.net+n : l.net+n]
	l.bth = l.net + n
	if p.V1 {
		if proto != grhNextHeader {
			return l, ErrType
		}
		p.SrcPort = 0
		return l, nil
	}
	if proto != header.ProtoUDP {
		return l, ErrType
	}
	var udp header.UDP
	if n, err = udp.Decode(frame[l.bth:l.end]); err != nil {
		return l, err
	}
	if udp.DstPort != RoCEPort {
		return l, ErrType
	}
	p.SrcPort = udp.SrcPort
	l.end = l.bth + int(udp.Length)
	l.bth += n
	return l, nil
}

// The methods below return the extension headers, or zero if the opcode does not have them.

// RETH returns the RDMA header.
func (p *RoCE) RETH() (h RETH) {
	switch {
	case p.Info.Is(HasFETH):
		_, _ = h.Decode(p.Ext[FETHLen:])
	case p.Info.Is(HasRETH):
		_, _ = h.Decode(p.Ext)
	}
	return h
}

// FETH returns the header of a FLUSH.
func (p *RoCE) FETH() (h FETH) {
	if p.Info.Is(HasFETH) {
		_, _ = h.Decode(p.Ext)
	}
	return h
}

// AtomicETH returns the atomic header.
func (p *RoCE) AtomicETH() (h AtomicETH) {
	if p.Info.Is(HasAtomic) {
		_, _ = h.Decode(p.Ext)
	}
	return h
}

// AETH returns the acknowledge header.
func (p *RoCE) AETH() (h AETH) {
	if p.Info.Is(HasAETH) {
		_, _ = h.Decode(p.Ext)
	}
	return h
}

// DETH returns the datagram header.
func (p *RoCE) DETH() (h DETH) {
	if p.Info.Is(HasDETH) {
		_, _ = h.Decode(p.Ext)
	}
	return h
}

// AtomicAck returns an atomic's original value.
func (p *RoCE) AtomicAck() uint64 {
	if p.Info.Is(HasAtomicAck) {
		return binary.BigEndian.Uint64(p.Ext[AETHLen:])
	}
	return 0
}

// Arrivals returns the bitmap of a selective acknowledgement.
func (p *RoCE) Arrivals() (a Arrivals) {
	if p.Info.Is(HasArrivals) {
		_, _ = a.Decode(p.Ext[AETHLen:])
	}
	return a
}

// Imm returns immediate data, the four bytes as on the wire.
func (p *RoCE) Imm() (imm [4]byte) {
	if p.Info.Is(HasImm) {
		imm = [4]byte(p.Ext[len(p.Ext)-ImmLen:])
	}
	return imm
}

// InvKey returns the R_Key to invalidate.
func (p *RoCE) InvKey() uint32 {
	if p.Info.Is(HasIETH) {
		return binary.BigEndian.Uint32(p.Ext[len(p.Ext)-IETHLen:])
	}
	return 0
}

// GRH fills the 40 bytes that precede a datagram in its receive buffer: the GRH or IPv6 header, or, as in Linux (union
// rdma_network_hdr), 20 zeros and the IPv4 header.
func (p *RoCE) GRH(dst *[GRHLen]byte) {
	n := len(p.Net)
	clear(dst[:GRHLen-n])
	copy(dst[GRHLen-n:], p.Net)
}
