package header

import "encoding/binary"

// ICMPv6 types of neighbour discovery (RFC 4861).
const (
	NDRouterSolicit    = 133
	NDRouterAdvert     = 134
	NDNeighborSolicit  = 135
	NDNeighborAdvert   = 136
	NDOptSourceLink    = 1
	NDOptTargetLink    = 2
	ndNeighborFixedLen = 24
	ndLinkOptLen       = 8
)

// Neighbor is a neighbour solicitation or advertisement (RFC 4861, 4.3, 4.4).
type Neighbor struct {
	Advert    bool // otherwise a solicitation
	Router    bool // this and the next two: advertisements only
	Solicited bool
	Override  bool
	Target    [16]byte
	Link      MAC  // source (solicitation) or target (advertisement) link-layer address
	HasLink   bool // the option is present
}

// ndMaxOptions bounds the walk through options.
const ndMaxOptions = 16

// Decode reads an ICMPv6 message (the payload of the IPv6 packet) and checks its checksum with the given addresses.
// ErrType if it is another type of message.
func (n *Neighbor) Decode(b []byte, src, dst [16]byte) error {
	if len(b) < ndNeighborFixedLen {
		return ErrShort
	}
	if b[0] != NDNeighborSolicit && b[0] != NDNeighborAdvert || b[1] != 0 {
		return ErrType
	}
	if Checksum(b, PseudoSum6(src, dst, ProtoICMPv6, uint32(len(b)))) != 0 {
		return ErrChecksum
	}
	*n = Neighbor{Advert: b[0] == NDNeighborAdvert, Target: [16]byte(b[8:24])}
	want := byte(NDOptSourceLink)
	if n.Advert {
		n.Router, n.Solicited, n.Override = b[4]&0x80 != 0, b[4]&0x40 != 0, b[4]&0x20 != 0
		want = NDOptTargetLink
	}
	opts := b[ndNeighborFixedLen:]
	for range ndMaxOptions {
		if len(opts) == 0 {
			return nil
		}
		// Length is in units of 8 bytes, and never 0 (RFC 4861, 4.6).
		if len(opts) < 2 || opts[1] == 0 || int(opts[1])*8 > len(opts) {
			return ErrLength
		}
		if opts[0] == want && opts[1] == 1 {
			n.Link, n.HasLink = MAC(opts[2:8]), true
		}
		opts = opts[int(opts[1])*8:]
	}
	return ErrLength
}

// Len returns the encoded size.
func (n *Neighbor) Len() int {
	if n.HasLink {
		return ndNeighborFixedLen + ndLinkOptLen
	}
	return ndNeighborFixedLen
}

// Encode writes the message with its checksum to b (Len bytes).
func (n *Neighbor) Encode(b []byte, src, dst [16]byte) int {
	b = b[:n.Len()]
	clear(b)
	b[0] = NDNeighborSolicit
	opt := byte(NDOptSourceLink)
	if n.Advert {
		b[0], opt = NDNeighborAdvert, NDOptTargetLink
		for i, f := range [...]bool{n.Router, n.Solicited, n.Override} {
			if f {
				b[4] |= 0x80 >> i
			}
		}
	}
	copy(b[8:], n.Target[:])
	if n.HasLink {
		b[24], b[25] = opt, 1
		copy(b[26:], n.Link[:])
	}
	binary.BigEndian.PutUint16(b[2:], Checksum(b, PseudoSum6(src, dst, ProtoICMPv6, uint32(len(b)))))
	return len(b)
}
