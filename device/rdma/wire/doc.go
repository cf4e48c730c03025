// Package wire encodes and decodes RoCE v1 and v2 packets: GRH, BTH, the extension headers and the ICRC (IBTA chapter
// 9, annexes A16 and A17). Package device/frame/header has the headers around them. There is no I/O, no state, and no
// allocation on the data path. The errors of the parsers are fixed values, so that they can be compared and counted.
package wire

import (
	"errors"

	"github.com/vnicd/vnicd/device/frame/header"
)

// Errors of the decoders. The first five are those of package header.
var (
	ErrShort     = header.ErrShort
	ErrLength    = header.ErrLength
	ErrType      = header.ErrType
	ErrVersion   = header.ErrVersion
	ErrChecksum  = header.ErrChecksum
	ErrOptions   = errors.New("IP options or extension headers in a RoCE packet")
	ErrFragment  = errors.New("IP fragment")
	ErrOpcode    = errors.New("unknown transport opcode")
	ErrPad       = errors.New("payload and pad are not a multiple of 4 bytes")
	ErrReserved  = errors.New("reserved field is not zero")
	ErrAddresses = errors.New("IPv4 and IPv6 addresses mixed")
)
