package vswitch

import "encoding/binary"

const (
	etherVLAN  = 0x8100
	etherQinQ  = 0x88a8
	etherIPv4  = 0x0800
	etherIPv6  = 0x86dd
	etherRoCE  = 0x8915 // RoCE v1, IBTA annex A16
	roceV2Port = 4791   // IBTA annex A17

	protoUDP = 17

	maxTags    = 2
	maxHeaders = 4 // IPv6 extension headers looked through
)

// IsRoCE tells whether a frame is for an HCA: Ethernet type 0x8915 (RoCE v1), or UDP to port 4791 over IPv4 or IPv6
// (RoCE v2), tagged or not. Later fragments of an IP packet carry no UDP header and are not RoCE. A frame too short to
// tell is not RoCE.
func IsRoCE(f []byte) bool {
	off := 12
	for range maxTags + 1 {
		if len(f) < off+2 {
			return false
		}
		switch binary.BigEndian.Uint16(f[off:]) {
		case etherVLAN, etherQinQ:
			off += 4
			continue
		case etherRoCE:
			return true
		case etherIPv4:
			return isRoCEv4(f[off+2:])
		case etherIPv6:
			return isRoCEv6(f[off+2:])
		}
		return false
	}
	return false
}

func isRoCEv4(p []byte) bool {
	if len(p) < 20 || p[0]>>4 != 4 || p[9] != protoUDP {
		return false
	}
	if binary.BigEndian.Uint16(p[6:])&0x1fff != 0 {
		return false
	}
	return isRoCEPort(p, int(p[0]&15)*4, 20)
}

func isRoCEv6(p []byte) bool {
	if len(p) < 40 || p[0]>>4 != 6 {
		return false
	}
	next, off := p[6], 40
	for range maxHeaders {
		if next == protoUDP {
			return isRoCEPort(p, off, 40)
		}
		if len(p) < off+8 {
			return false
		}
		switch next {
		case 0, 43, 60: // hop-by-hop, routing, destination options: RFC 8200, section 4
			next, off = p[off], off+8+int(p[off+1])*8
		case 44: // fragment
			if binary.BigEndian.Uint16(p[off+2:])&0xfff8 != 0 {
				return false
			}
			next, off = p[off], off+8
		default:
			return false
		}
	}
	return next == protoUDP && isRoCEPort(p, off, 40)
}

// isRoCEPort looks at the UDP header at off, which lies behind a header of at least so many bytes.
func isRoCEPort(p []byte, off, least int) bool {
	return off >= least && len(p) >= off+8 && binary.BigEndian.Uint16(p[off+2:]) == roceV2Port
}
