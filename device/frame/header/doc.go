// Package header encodes and decodes the headers of frames: Ethernet, 802.1Q, ARP, IPv4, IPv6, UDP, ICMPv6 neighbour
// discovery and VXLAN, and computes the Internet checksum. Package device/rdma/wire has RoCE's headers. No I/O, no
// state, no allocation; errors are fixed values, so that they can be compared and counted.
package header

import "errors"

// Errors of the decoders.
var (
	ErrShort    = errors.New("frame is shorter than its headers")
	ErrLength   = errors.New("length field contradicts the frame")
	ErrType     = errors.New("not the expected protocol")
	ErrVersion  = errors.New("wrong header version")
	ErrChecksum = errors.New("wrong IP header checksum")
)
