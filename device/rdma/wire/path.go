package wire

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/frame/header"
)

// Path holds the header fields that all packets between two QPs (or to one address handle) share.
type Path struct {
	SMAC, DMAC   header.MAC
	VLAN         uint16 // or NoVLAN
	PCP          uint8  // 0..7, if tagged
	V1           bool   // RoCE v1
	SrcIP, DstIP [16]byte
	TrafficClass uint8
	HopLimit     uint8  // 0 is sent as 64: a datagram with TTL 0 must not be sent
	FlowLabel    uint32 // 20 bits; no meaning over IPv4
	SrcPort      uint16 // UDP source port, v2
}

const defaultHopLimit = 64

// Template is the encoded header of a Path, ready to be copied before each packet. The zero Template is not usable.
type Template struct {
	hdr [header.EthernetLen + header.VLANLen + header.IPv6Len + header.UDPLen]byte
	n   uint8 // bytes of hdr
	net uint8 // where the network header begins
	at  header.Layout
	v4  bool
	v1  bool
	sum uint32 // IPv4: sum over the header without TotalLen
}

// Template encodes p. RoCE v2 uses IPv4 if both addresses are IPv4-mapped, IPv6 if neither is; otherwise Template
// returns ErrAddresses. RoCE v1 uses the addresses as GIDs.
func (p *Path) Template() (t Template, err error) {
	t.v1 = p.V1
	if !t.v1 {
		t.v4 = header.IsMapped4(p.SrcIP)
		if header.IsMapped4(p.DstIP) != t.v4 {
			return Template{}, ErrAddresses
		}
	}
	ttl := p.HopLimit
	if ttl == 0 {
		ttl = defaultHopLimit
	}
	eth := header.Ethernet{Dst: p.DMAC, Src: p.SMAC, VLAN: p.VLAN, PCP: p.PCP, Type: header.TypeIPv6}
	switch {
	case t.v1:
		eth.Type = header.TypeRoCE1
	case t.v4:
		eth.Type = header.TypeIPv4
	}
	n := eth.Encode(t.hdr[:])
	t.net = uint8(n)
	if t.v4 {
		// DF and ID 0: an atomic datagram (RFC 6864).
		ip := header.IPv4{TOS: p.TrafficClass, DontFrag: true, TTL: ttl, Protocol: header.ProtoUDP,
			Src: [4]byte(p.SrcIP[12:]), Dst: [4]byte(p.DstIP[12:])}
		ip.Encode(t.hdr[n:])
		t.hdr[n+10], t.hdr[n+11] = 0, 0
		t.sum = header.Sum16(t.hdr[n : n+header.IPv4Len])
		n += header.IPv4Len
	} else {
		ip := header.IPv6{TrafficClass: p.TrafficClass, FlowLabel: p.FlowLabel, HopLimit: ttl,
			NextHeader: header.ProtoUDP, Src: p.SrcIP, Dst: p.DstIP}
		if t.v1 {
			ip.NextHeader = grhNextHeader
		}
		n += ip.Encode(t.hdr[n:])
	}
	if !t.v1 {
		udp := header.UDP{SrcPort: p.SrcPort, DstPort: RoCEPort}
		n += udp.Encode(t.hdr[n:])
	}
	t.n = uint8(n)
	t.at.Locate(t.hdr[:n])
	return t, nil
}

// Len returns the number of bytes that Put writes: the offset of the BTH.
func (t *Template) Len() int { return int(t.n) }

// Layout returns where the headers are, of every frame that begins with them.
func (t *Template) Layout() *header.Layout { return &t.at }

// Bytes returns the headers without their lengths, which Put fills in.
func (t *Template) Bytes() []byte { return t.hdr[:t.n] }

// Put writes the headers to frame for a packet of transport bytes from BTH to
// ICRC, both included, and returns Len. transport is at most 65,000. The UDP
// checksum is 0 (A17: the ICRC covers more).
func (t *Template) Put(frame []byte, transport int) int {
	n := int(t.n)
	frame = frame[:n]
	copy(frame, t.hdr[:n])
	net := frame[t.net:]
	switch {
	case t.v1:
		binary.BigEndian.PutUint16(net[4:], uint16(transport))
	case t.v4:
		total := uint16(header.IPv4Len + header.UDPLen + transport)
		sum := t.sum + uint32(total)
		sum = sum>>16 + sum&0xffff
		sum = sum>>16 + sum&0xffff
		binary.BigEndian.PutUint16(net[2:], total)
		binary.BigEndian.PutUint16(net[10:], ^uint16(sum))
		binary.BigEndian.PutUint16(net[header.IPv4Len+4:], uint16(header.UDPLen+transport))
	default:
		binary.BigEndian.PutUint16(net[4:], uint16(header.UDPLen+transport))
		binary.BigEndian.PutUint16(net[header.IPv6Len+4:], uint16(header.UDPLen+transport))
	}
	return n
}

// SourcePort returns the UDP source port of a connection, in 0xc000..0xffff (A17 leaves it to the sender). All packets
// of a pair of QPs have the same port, so that equal-cost paths keep them in order; different pairs spread over the
// ports.
func SourcePort(localQP, remoteQP uint32) uint16 {
	h := (uint64(localQP&QPNMask)<<24 | uint64(remoteQP&QPNMask)) * 0x9e3779b97f4a7c15
	return 0xc000 | uint16(h>>50)
}
