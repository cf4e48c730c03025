package header

import "encoding/binary"

// Layout says where the headers of a frame are, and what they are. Locate finds it, and it is then carried with the
// frame (frame.Buf.Layout), so that a frame's headers are parsed once on its way. The zero Layout belongs to a frame
// that has not been looked at, or is shorter than an Ethernet header.
//
// A Layout is no validation: lengths and checksums in the headers are for those to check who use them.
type Layout struct {
	Type uint16 // Ethernet type behind at most two VLAN tags; a tag's type if a third follows or the frame ends in one
	VLAN uint16 // VLAN id of the outer tag, 0..4095; 0 without a tag
	L3   uint16 // where the packet behind the Ethernet header begins: 14, 18 or 22
	// L4 is where the packet's transport header begins, behind IPv6 extension headers, possibly beyond the frame's end.
	// It is 0 if the packet is not IP or its IP header is malformed. Of a later fragment it is where data begins (IPv4)
	// or the fragment header (IPv6).
	L4    uint16
	Proto uint8 // IP protocol number at L4
	Flags LayoutFlags
}

// LayoutFlags is a set of properties of a packet.
type LayoutFlags uint8

// Properties of a packet.
const (
	IsIPv6     LayoutFlags = 1 << iota
	IsFragment             // part of a fragmented IP packet
	IsLater                // of these, not the first: there is no transport header
	IsExtended             // IPv6 extension headers lie between L3 and L4
	IsRoCE                 // RoCE v1, or UDP to the port of RoCE v2 with the UDP header within the frame
)

const (
	// MaxTags bounds the VLAN tags that Locate looks behind.
	MaxTags = 2

	maxExtensions = 4 // IPv6 extension headers that Locate looks behind

	extHopByHop     = 0 // RFC 8200, section 4
	extRouting      = 43
	extFragment     = 44
	extDestinations = 60
)

// Is tells whether the packet has all of these properties.
func (l *Layout) Is(f LayoutFlags) bool { return l.Flags&f == f }

// Locate finds the headers of the frame f, which may be anything. It reads no byte of f twice.
func Locate(f []byte) *Layout {
	var l Layout
	l.Locate(f)
	return &l
}

// Locate is the function Locate, into l.
func (l *Layout) Locate(f []byte) {
	*l = Layout{}
	if len(f) < EthernetLen {
		return
	}
	l.Type, l.L3 = binary.BigEndian.Uint16(f[12:]), EthernetLen
	if IsTag(l.Type) {
		l.skipTags(f)
	}
	switch p := f[l.L3:]; l.Type {
	case TypeIPv4:
		l.ipv4(p)
	case TypeIPv6:
		l.ipv6(f, p)
	case TypeRoCE1:
		l.Flags = IsRoCE
		return
	}
	if l.Proto == ProtoUDP && l.Flags&IsLater == 0 {
		if at := int(l.L4); len(f) >= at+UDPLen && binary.BigEndian.Uint16(f[at+2:]) == PortRoCE {
			l.Flags |= IsRoCE
		}
	}
}

func (l *Layout) ipv4(p []byte) {
	if len(p) < IPv4Len || p[0] < 4<<4|IPv4Len/4 || p[0] > 4<<4|15 {
		return
	}
	l.L4, l.Proto = l.L3+uint16(p[0]&15)*4, p[9]
	if frag := binary.BigEndian.Uint16(p[6:]); frag&0x1fff != 0 {
		l.Flags = IsFragment | IsLater
	} else if frag&0x2000 != 0 {
		l.Flags = IsFragment
	}
}

func (l *Layout) ipv6(f, p []byte) {
	if len(p) < IPv6Len || p[0]>>4 != 6 {
		return
	}
	l.Flags = IsIPv6
	l.L4, l.Proto = l.L3+IPv6Len, p[6]
	if l.Proto != ProtoTCP && l.Proto != ProtoUDP {
		l.skipExtensions(f)
	}
}

// IsTag tells whether an Ethernet type announces a VLAN tag.
func IsTag(typ uint16) bool { return typ == TypeVLAN || typ == TypeQinQ }

func (l *Layout) skipTags(f []byte) {
	if len(f) >= EthernetLen+VLANLen {
		l.VLAN = binary.BigEndian.Uint16(f[EthernetLen:]) & 0xfff
	}
	for range MaxTags {
		if !IsTag(l.Type) || len(f) < int(l.L3)+VLANLen {
			return
		}
		l.L3 += VLANLen
		l.Type = binary.BigEndian.Uint16(f[l.L3-2:])
	}
}

func (l *Layout) skipExtensions(f []byte) {
	for range maxExtensions {
		at := int(l.L4)
		if len(f) < at+8 {
			return
		}
		switch h := f[at : at+8]; l.Proto {
		case extHopByHop, extRouting, extDestinations:
			l.Proto, l.L4 = h[0], l.L4+8+uint16(h[1])*8
		case extFragment:
			frag := binary.BigEndian.Uint16(h[2:])
			if l.Flags |= IsFragment; frag&0xfff8 != 0 {
				l.Flags |= IsLater | IsExtended
				return
			}
			l.Proto, l.L4 = h[0], l.L4+8
		default:
			return
		}
		l.Flags |= IsExtended
	}
}
