// Package wire encodes and decodes the headers that vnicd sends and receives:
// Ethernet, 802.1Q, ARP, IPv4, IPv6, UDP, ICMPv6 neighbour discovery, VXLAN,
// and RoCE (GRH, BTH, extension headers, ICRC). No I/O, no state, no allocation
// on the data path; errors of the frame parsers are fixed values, so that they
// can be compared and counted.
package wire

import "errors"

// Errors of the decoders.
var (
	ErrShort     = errors.New("frame is shorter than its headers")
	ErrLength    = errors.New("length field contradicts the frame or the opcode")
	ErrType      = errors.New("not a RoCE frame")
	ErrVersion   = errors.New("wrong header version")
	ErrOptions   = errors.New("IP options or extension headers where none may be")
	ErrFragment  = errors.New("IP fragment")
	ErrChecksum  = errors.New("wrong IP header checksum")
	ErrOpcode    = errors.New("unknown transport opcode")
	ErrPad       = errors.New("payload and pad are no multiple of 4 bytes")
	ErrReserved  = errors.New("reserved field is not zero")
	ErrAddresses = errors.New("IPv4 and IPv6 addresses mixed")
)
