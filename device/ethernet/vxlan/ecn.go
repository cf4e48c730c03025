package vxlan

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/frame/header"
)

// Codepoints of the ECN field (RFC 3168).
const (
	ecnMask = 3
	ecnNot  = 0 // not ECN-capable
	ecnECT1 = 1
	ecnECT0 = 2
	ecnCE   = 3 // congestion experienced
)

// outerTOS is the outer header's traffic class: our DSCP for RoCE (MT-8), best effort for the rest, and the
// inner ECN field (RFC 6040, section 4.1, normal mode).
func outerTOS(fl flow, dscp uint8) uint8 {
	tos := fl.tos & ecnMask
	if fl.roce {
		tos |= dscp << 2
	}
	return tos
}

// decapECN combines the outer ECN field with the inner header's (RFC 6040, section 4.2 and figure 4): a congestion mark
// on the outer header is copied to the inner one, and so is ECT(1) over ECT(0). It returns false if the frame must be
// dropped: congestion was marked on a flow that is not ECN-capable. The frame must not be shared.
func decapECN(f []byte, outer uint8) bool {
	outer &= ecnMask
	if outer == ecnNot || outer == ecnECT0 {
		return true
	}
	fl := classify(f, header.Locate(f))
	if fl.ip == 0 {
		return true // nothing to mark
	}
	inner := fl.tos & ecnMask
	switch {
	case inner == ecnNot:
		return outer != ecnCE
	case inner == outer, inner == ecnCE:
		return true
	}
	setECN(f[fl.ip:], outer)
	return true
}

// setECN changes the ECN field of an IP header.
func setECN(p []byte, ecn uint8) {
	if p[0]>>4 == 6 {
		p[1] = p[1]&^(ecnMask<<4) | ecn<<4 // the low half of the traffic class is the high half of this byte
		return
	}
	// RFC 1624: HC' = ~(~HC + ~m + m') over the 16-bit word that changed.
	old := binary.BigEndian.Uint16(p)
	p[1] = p[1]&^ecnMask | ecn
	sum := uint32(^binary.BigEndian.Uint16(p[10:])) + uint32(^old) + uint32(binary.BigEndian.Uint16(p))
	sum = sum&0xffff + sum>>16
	sum = sum&0xffff + sum>>16
	binary.BigEndian.PutUint16(p[10:], ^uint16(sum))
}
