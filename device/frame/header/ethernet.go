package header

import (
	"encoding/binary"
	"net"
)

// Header sizes in bytes.
const (
	EthernetLen = 14
	VLANLen     = 4 // one 802.1Q tag
)

// EtherTypes.
const (
	TypeIPv4  = 0x0800
	TypeARP   = 0x0806
	TypeVLAN  = 0x8100 // IEEE 802.1Q
	TypeIPv6  = 0x86dd
	TypeQinQ  = 0x88a8 // IEEE 802.1ad
	TypeRoCE1 = 0x8915 // IBTA annex A16
)

// NoVLAN is the VLAN of an untagged frame.
const NoVLAN = 0xffff

// MAC is an Ethernet address.
type MAC [6]byte

// Broadcast is ff:ff:ff:ff:ff:ff.
var Broadcast = MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// IsMulticast reports whether the group bit is set, as it is in broadcast.
func (m MAC) IsMulticast() bool { return m[0]&1 != 0 }

// IsZero reports whether the address is 00:00:00:00:00:00.
func (m MAC) IsZero() bool { return m == MAC{} }

// String returns the form aa:bb:cc:dd:ee:ff.
func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// Ethernet is an Ethernet header with at most one 802.1Q tag.
type Ethernet struct {
	Dst, Src MAC
	Type     uint16 // of the payload, after the tag if there is one
	VLAN     uint16 // 0..4095 (0: priority tag), or NoVLAN
	PCP      uint8  // priority 0..7, if tagged
	DEI      bool   // drop eligible, if tagged
}

// Len returns the encoded size: 14, or 18 with a tag.
func (h *Ethernet) Len() int {
	if h.VLAN == NoVLAN {
		return EthernetLen
	}
	return EthernetLen + VLANLen
}

// Decode reads the header at the start of b and returns its size. A second tag is not decoded; Type is then TypeVLAN.
func (h *Ethernet) Decode(b []byte) (int, error) {
	if len(b) < EthernetLen {
		return 0, ErrShort
	}
	h.Dst, h.Src = MAC(b[0:6]), MAC(b[6:12])
	h.Type = binary.BigEndian.Uint16(b[12:])
	h.VLAN, h.PCP, h.DEI = NoVLAN, 0, false
	if h.Type != TypeVLAN {
		return EthernetLen, nil
	}
	if len(b) < EthernetLen+VLANLen {
		return 0, ErrShort
	}
	tci := binary.BigEndian.Uint16(b[14:])
	h.VLAN, h.PCP, h.DEI = tci&0xfff, uint8(tci>>13), tci&0x1000 != 0
	h.Type = binary.BigEndian.Uint16(b[16:])
	return EthernetLen + VLANLen, nil
}

// Encode writes the header to b, which must have room for Len bytes, and
// returns its size.
func (h *Ethernet) Encode(b []byte) int {
	n := h.Len()
	b = b[:n]
	copy(b[0:], h.Dst[:])
	copy(b[6:], h.Src[:])
	if n > EthernetLen {
		tci := h.VLAN&0xfff | uint16(h.PCP)<<13
		if h.DEI {
			tci |= 0x1000
		}
		binary.BigEndian.PutUint16(b[12:], TypeVLAN)
		binary.BigEndian.PutUint16(b[14:], tci)
	}
	binary.BigEndian.PutUint16(b[n-2:], h.Type)
	return n
}
