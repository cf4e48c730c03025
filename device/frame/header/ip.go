package header

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// Header sizes in bytes, without options.
const (
	IPv4Len = 20
	IPv6Len = 40
	UDPLen  = 8
)

// Codepoints of the ECN field, the low bits of an IPv4 TOS or IPv6 traffic class (RFC 3168).
const (
	ECNMask = 3
	NotECT  = 0
	ECT1    = 1
	ECT0    = 2
	CE      = 3 // congestion experienced
)

// IP protocol numbers.
const (
	ProtoTCP    = 6
	ProtoUDP    = 17
	ProtoICMPv6 = 58
)

// PortRoCE is the UDP destination port of RoCE v2 (IBTA annex A17).
const PortRoCE = 4791

// IPv4 is an IPv4 header (RFC 791) without options.
type IPv4 struct {
	TOS        uint8
	TotalLen   uint16 // header included
	ID         uint16
	DontFrag   bool
	MoreFrags  bool
	FragOffset uint16 // in units of 8 bytes
	TTL        uint8
	Protocol   uint8
	Checksum   uint16 // of the decoded header; Encode computes it
	Src, Dst   [4]byte
}

// Decode reads the header at the start of b, checks version, header checksum
// and TotalLen against len(b), and returns the header's size, options included.
func (h *IPv4) Decode(b []byte) (int, error) {
	if len(b) < IPv4Len {
		return 0, ErrShort
	}
	if b[0]>>4 != 4 {
		return 0, ErrVersion
	}
	n := int(b[0]&0xf) * 4
	h.TOS = b[1]
	h.TotalLen = binary.BigEndian.Uint16(b[2:])
	if n < IPv4Len || n > len(b) || int(h.TotalLen) < n || int(h.TotalLen) > len(b) {
		return 0, ErrLength
	}
	h.ID = binary.BigEndian.Uint16(b[4:])
	frag := binary.BigEndian.Uint16(b[6:])
	h.DontFrag, h.MoreFrags, h.FragOffset = frag&0x4000 != 0, frag&0x2000 != 0, frag&0x1fff
	h.TTL, h.Protocol = b[8], b[9]
	h.Checksum = binary.BigEndian.Uint16(b[10:])
	h.Src, h.Dst = [4]byte(b[12:16]), [4]byte(b[16:20])
	if n == IPv4Len && headerSum(b) != 0xffff || n != IPv4Len && Checksum(b[:n], 0) != 0 {
		return 0, ErrChecksum
	}
	return n, nil
}

// headerSum returns the sum over 20 bytes, not complemented: 0xffff if they contain their checksum.
func headerSum(b []byte) uint16 {
	b = b[:IPv4Len]
	sum := uint64(binary.BigEndian.Uint32(b)) + uint64(binary.BigEndian.Uint32(b[4:])) +
		uint64(binary.BigEndian.Uint32(b[8:])) +
		uint64(binary.BigEndian.Uint32(b[12:])) + uint64(binary.BigEndian.Uint32(b[16:]))
	return fold(sum)
}

// fold adds the 16-bit words of a one's complement sum.
func fold(sum uint64) uint16 {
	sum = sum>>32 + sum&0xffffffff
	sum = sum>>32 + sum&0xffffffff
	sum = sum>>16 + sum&0xffff
	sum = sum>>16 + sum&0xffff
	return uint16(sum)
}

// Encode writes the header with its checksum to b (20 bytes).
func (h *IPv4) Encode(b []byte) int {
	b = b[:IPv4Len]
	frag := h.FragOffset & 0x1fff
	if h.DontFrag {
		frag |= 0x4000
	}
	if h.MoreFrags {
		frag |= 0x2000
	}
	b[0], b[1] = 0x45, h.TOS
	binary.BigEndian.PutUint16(b[2:], h.TotalLen)
	binary.BigEndian.PutUint16(b[4:], h.ID)
	binary.BigEndian.PutUint16(b[6:], frag)
	b[8], b[9] = h.TTL, h.Protocol
	b[10], b[11] = 0, 0
	copy(b[12:], h.Src[:])
	copy(b[16:], h.Dst[:])
	binary.BigEndian.PutUint16(b[10:], Checksum(b, 0))
	return IPv4Len
}

// IPv6 is an IPv6 header (RFC 8200), and with NextHeader 0x1b a GRH (IBTA 8.3).
type IPv6 struct {
	TrafficClass uint8
	FlowLabel    uint32 // 20 bits
	PayloadLen   uint16
	NextHeader   uint8
	HopLimit     uint8
	Src, Dst     [16]byte
}

// Decode reads the header at the start of b, checks version and PayloadLen
// against len(b), and returns its size, 40.
func (h *IPv6) Decode(b []byte) (int, error) {
	if len(b) < IPv6Len {
		return 0, ErrShort
	}
	w := binary.BigEndian.Uint32(b)
	if w>>28 != 6 {
		return 0, ErrVersion
	}
	h.TrafficClass, h.FlowLabel = uint8(w>>20), w&0xfffff
	h.PayloadLen = binary.BigEndian.Uint16(b[4:])
	if int(h.PayloadLen) > len(b)-IPv6Len {
		return 0, ErrLength
	}
	h.NextHeader, h.HopLimit = b[6], b[7]
	h.Src, h.Dst = [16]byte(b[8:24]), [16]byte(b[24:40])
	return IPv6Len, nil
}

// Encode writes the header to b (40 bytes).
func (h *IPv6) Encode(b []byte) int {
	b = b[:IPv6Len]
	binary.BigEndian.PutUint32(b, 6<<28|uint32(h.TrafficClass)<<20|h.FlowLabel&0xfffff)
	binary.BigEndian.PutUint16(b[4:], h.PayloadLen)
	b[6], b[7] = h.NextHeader, h.HopLimit
	copy(b[8:], h.Src[:])
	copy(b[24:], h.Dst[:])
	return IPv6Len
}

// UDP is a UDP header (RFC 768).
type UDP struct {
	SrcPort, DstPort uint16
	Length           uint16 // header included
	Checksum         uint16 // 0: none
}

// Decode reads the header at the start of b, checks Length against len(b), and
// returns its size, 8. The checksum is not verified; see PseudoSum.
func (h *UDP) Decode(b []byte) (int, error) {
	if len(b) < UDPLen {
		return 0, ErrShort
	}
	h.SrcPort, h.DstPort = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	h.Length, h.Checksum = binary.BigEndian.Uint16(b[4:]), binary.BigEndian.Uint16(b[6:])
	if h.Length < UDPLen || int(h.Length) > len(b) {
		return 0, ErrLength
	}
	return UDPLen, nil
}

// Encode writes the header unchanged to b (8 bytes).
func (h *UDP) Encode(b []byte) int {
	b = b[:UDPLen]
	binary.BigEndian.PutUint16(b, h.SrcPort)
	binary.BigEndian.PutUint16(b[2:], h.DstPort)
	binary.BigEndian.PutUint16(b[4:], h.Length)
	binary.BigEndian.PutUint16(b[6:], h.Checksum)
	return UDPLen
}

// longSum is the number of bytes from which on calling sumLong pays.
const longSum = 128

// Checksum returns the Internet checksum (RFC 1071) of b plus an initial sum from PseudoSum (or 0). Over data that
// contains its own right checksum it is 0. For UDP a result of 0 is sent as 0xffff.
func Checksum(b []byte, initial uint32) uint16 {
	// Eight bytes at a time, with end-around carry as in one's complement. The sum of swapped words is the swapped sum
	// (RFC 1071, section 2 B), so little-endian machines need not swap each word.
	sum, carry := uint64(0), uint64(0)
	all := b
	if len(b) >= longSum {
		sum, b = sumLong(b)
	}
	for ; len(b) >= 64; b = b[64:] {
		x := (*[64]byte)(b)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(x[:]), carry)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(x[8:]), carry)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(x[16:]), carry)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(x[24:]), carry)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(x[32:]), carry)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(x[40:]), carry)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(x[48:]), carry)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(x[56:]), carry)
	}
	for len(b) >= 8 {
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(b), carry)
		b = b[8:]
	}
	if n := len(b); n > 0 {
		tail := uint64(0)
		if len(all) >= 8 {
			tail = binary.LittleEndian.Uint64(all[len(all)-8:]) >> (64 - 8*n)
		} else {
			for i := n - 1; i >= 0; i-- {
				tail = tail<<8 | uint64(b[i])
			}
		}
		sum, carry = bits.Add64(sum, tail, carry)
	}
	sum, carry = bits.Add64(sum, 0, carry)
	return ^fold(uint64(bits.ReverseBytes16(fold(sum+carry))) + uint64(initial))
}

// PseudoSum4 returns the sum over the IPv4 pseudo-header for length bytes of protocol, for Checksum.
func PseudoSum4(src, dst [4]byte, protocol uint8, length uint16) uint32 {
	return Sum16(src[:]) + Sum16(dst[:]) + uint32(protocol) + uint32(length)
}

// PseudoSum6 is PseudoSum4 for IPv6 (RFC 8200, 8.1).
func PseudoSum6(src, dst [16]byte, protocol uint8, length uint32) uint32 {
	return Sum16(src[:]) + Sum16(dst[:]) + uint32(protocol) + length>>16 + length&0xffff
}

// Sum16 adds up the big-endian 16-bit words of b, whose length is even; for PseudoSum and headers, whose carries need
// no folding.
func Sum16(b []byte) (sum uint32) {
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	return sum
}

// Mapped4 returns a as an IPv4-mapped IPv6 address, which is also its GID.
func Mapped4(a [4]byte) (m [16]byte) {
	m[10], m[11] = 0xff, 0xff
	copy(m[12:], a[:])
	return m
}

// IsMapped4 reports whether a is an IPv4-mapped address.
func IsMapped4(a [16]byte) bool { return netip.AddrFrom16(a).Is4In6() }
