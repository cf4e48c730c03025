package vxlan

import (
	"encoding/binary"
	"math/bits"
)

// HeaderLen is the length of the VXLAN header.
const HeaderLen = 8

// flagI says that the VNI field is valid; a receiver insists on it and ignores all reserved bits (RFC 7348, section 5).
const flagI = 0x08

// putHeader writes a VXLAN header: flags, 24 reserved bits, the VNI, 8 reserved bits.
func putHeader(h *[HeaderLen]byte, vni uint32) {
	binary.BigEndian.PutUint32(h[0:], flagI<<24)
	binary.BigEndian.PutUint32(h[4:], vni<<8)
}

// parseHeader reads the VNI from the start of a datagram; ok is false when it is too short or has no valid VNI.
func parseHeader(p []byte) (vni uint32, ok bool) {
	if len(p) < HeaderLen || p[0]&flagI == 0 {
		return 0, false
	}
	return binary.BigEndian.Uint32(p[4:]) >> 8, true
}

const (
	etherIPv4 = 0x0800
	etherIPv6 = 0x86dd
	etherVLAN = 0x8100
	etherQinQ = 0x88a8
	etherRoCE = 0x8915

	protoTCP  = 6
	protoUDP  = 17
	protoSCTP = 132

	roceV2Port = 4791
)

// flow is what the outer headers take from the inner frame.
type flow struct {
	hash uint32 // same for all packets of a flow (RFC 7348, section 5, outer UDP source port)
	tos  uint8  // traffic class of the inner IP header, 0 if there is none
	roce bool
	ip   int // offset of the inner IP header, 0 = none
}

// classify reads an inner Ethernet frame. Flows are told apart by addresses, protocol and ports; a RoCE v2 QP has a UDP
// source port of its own (IBTA annex A17), so each QP is a flow. Fragments have no ports to go by. Frames that are not
// IP go by their MAC addresses and, for RoCE v1, by the global route header's addresses.
func classify(f []byte) (fl flow) {
	off := 12
	for len(f) >= off+4 && off < 20 {
		if t := binary.BigEndian.Uint16(f[off:]); t != etherVLAN && t != etherQinQ {
			break
		}
		off += 4
	}
	if len(f) < off+2 {
		return fl
	}
	p := f[off+2:]
	var a, b, c uint64
	switch binary.BigEndian.Uint16(f[off:]) {
	case etherIPv4:
		if len(p) < 20 || p[0]>>4 != 4 {
			break
		}
		fl.ip, fl.tos = off+2, p[1]
		a, c = binary.BigEndian.Uint64(p[12:]), uint64(p[9])
		if ihl := int(p[0]&15) * 4; binary.BigEndian.Uint16(p[6:])&0x3fff == 0 && ihl >= 20 {
			b, fl.roce = ports(p[9], p, ihl)
		}
		fl.hash = mix(a, b, c)
		return fl
	case etherIPv6:
		if len(p) < 40 || p[0]>>4 != 6 {
			break
		}
		fl.ip, fl.tos = off+2, p[0]<<4|p[1]>>4
		b, fl.roce = ports(p[6], p, 40)
		a = binary.BigEndian.Uint64(p[8:]) ^ bits.RotateLeft64(binary.BigEndian.Uint64(p[16:]), 23)
		c = binary.BigEndian.Uint64(p[24:]) ^ bits.RotateLeft64(binary.BigEndian.Uint64(p[32:]), 41)
		fl.hash = mix(a, b^uint64(p[6])<<32, c)
		return fl
	case etherRoCE:
		fl.roce = true
		if len(p) >= 40 {
			a = binary.BigEndian.Uint64(p[8:]) ^ bits.RotateLeft64(binary.BigEndian.Uint64(p[16:]), 23)
			c = binary.BigEndian.Uint64(p[24:]) ^ bits.RotateLeft64(binary.BigEndian.Uint64(p[32:]), 41)
		}
	}
	b = uint64(binary.BigEndian.Uint32(f[8:])) | uint64(binary.BigEndian.Uint16(f[off:]))<<32
	fl.hash = mix(a^binary.BigEndian.Uint64(f), b, c)
	return fl
}

// ports returns both ports of a transport header at off, and whether it is RoCE v2.
func ports(proto uint8, p []byte, off int) (v uint64, roce bool) {
	switch proto {
	case protoTCP, protoUDP, protoSCTP:
		if len(p) >= off+4 {
			v = uint64(binary.BigEndian.Uint32(p[off:]))
			roce = proto == protoUDP && v&0xffff == roceV2Port
		}
	}
	return v, roce
}

func mix(a, b, c uint64) uint32 {
	hi, lo := bits.Mul64(a^0x9e3779b97f4a7c15, b^0xe7037ed1a0b428db)
	hi2, lo2 := bits.Mul64(hi^lo^c, 0x8ebc6af09c88c6e3)
	return uint32((hi2 ^ lo2) >> 16)
}
