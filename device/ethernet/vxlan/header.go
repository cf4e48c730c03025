package vxlan

import (
	"encoding/binary"
	"math/bits"

	"github.com/vnicd/vnicd/device/frame/header"
)

// HeaderLen is the length of the VXLAN header.
const HeaderLen = 8

// flagI: the VNI field is valid. A receiver requires it and ignores all reserved bits (RFC 7348, section 5).
const flagI = 0x08

// putHeader writes a VXLAN header: flags, 24 reserved bits, the VNI, 8 reserved bits.
func putHeader(h *[HeaderLen]byte, vni uint32) {
	binary.BigEndian.PutUint32(h[0:], flagI<<24)
	binary.BigEndian.PutUint32(h[4:], vni<<8)
}

// parseHeader reads the VNI at the start of a datagram; ok is false if it is too short or has no valid VNI.
func parseHeader(p []byte) (vni uint32, ok bool) {
	if len(p) < HeaderLen || p[0]&flagI == 0 {
		return 0, false
	}
	return binary.BigEndian.Uint32(p[4:]) >> 8, true
}

const protoSCTP = 132

// flow is what the outer headers derive from the inner frame.
type flow struct {
	hash uint32 // same for all packets of a flow (RFC 7348, section 5, outer UDP source port)
	tos  uint8  // traffic class of the inner IP header, 0 if there is none
	roce bool
	ip   int // offset of the inner IP header, 0 = none
}

// classify returns the flow of the frame f, located in at. A flow is addresses, protocol and ports; a RoCE v2 QP has
// its own UDP source port (IBTA annex A17), so each QP is a flow. Fragments have no ports. Frames that are not IP are
// classified by MAC addresses and, for RoCE v1, by the global route header's addresses.
func classify(f []byte, at *header.Layout) (fl flow) {
	if at.L3 == 0 {
		return fl // shorter than an Ethernet header
	}
	p := f[at.L3:]
	fl.roce = at.Is(header.IsRoCE) && !at.Is(header.IsFragment)
	var a, b, c uint64
	switch {
	case at.L4 != 0 && !at.Is(header.IsIPv6):
		fl.ip, fl.tos = int(at.L3), p[1]
		a, b, c = binary.BigEndian.Uint64(p[12:]), ports(f, at), uint64(p[9])
		fl.hash = mix(a, b, c)
		return fl
	case at.L4 != 0:
		fl.ip, fl.tos = int(at.L3), p[0]<<4|p[1]>>4
		a = binary.BigEndian.Uint64(p[8:]) ^ bits.RotateLeft64(binary.BigEndian.Uint64(p[16:]), 23)
		b = ports(f, at) ^ uint64(p[6])<<32
		c = binary.BigEndian.Uint64(p[24:]) ^ bits.RotateLeft64(binary.BigEndian.Uint64(p[32:]), 41)
		fl.hash = mix(a, b, c)
		return fl
	case at.Type == header.TypeRoCE1 && len(p) >= header.IPv6Len:
		a = binary.BigEndian.Uint64(p[8:]) ^ bits.RotateLeft64(binary.BigEndian.Uint64(p[16:]), 23)
		c = binary.BigEndian.Uint64(p[24:]) ^ bits.RotateLeft64(binary.BigEndian.Uint64(p[32:]), 41)
	}
	b = uint64(binary.BigEndian.Uint32(f[8:])) | uint64(at.Type)<<32
	fl.hash = mix(a^binary.BigEndian.Uint64(f), b, c)
	return fl
}

// ports returns both ports of a TCP, UDP or SCTP header that no fragmentation or IPv6 extension header hides, else 0.
func ports(f []byte, at *header.Layout) uint64 {
	switch at.Proto {
	case header.ProtoTCP, header.ProtoUDP, protoSCTP:
		if at.Flags&(header.IsFragment|header.IsExtended) == 0 && len(f) >= int(at.L4)+4 {
			return uint64(binary.BigEndian.Uint32(f[at.L4:]))
		}
	}
	return 0
}

func mix(a, b, c uint64) uint32 {
	hi, lo := bits.Mul64(a^0x9e3779b97f4a7c15, b^0xe7037ed1a0b428db)
	hi2, lo2 := bits.Mul64(hi^lo^c, 0x8ebc6af09c88c6e3)
	return uint32((hi2 ^ lo2) >> 16)
}
