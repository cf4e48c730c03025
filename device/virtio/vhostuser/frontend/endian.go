package frontend

import (
	"encoding/binary"
	"math/bits"
)

var hostBig = binary.NativeEndian.Uint16([]byte{0, 1}) == 1

// le32 converts between a ring's little-endian words and the host's order.
func le32(v uint32) uint32 {
	if hostBig {
		return bits.ReverseBytes32(v)
	}
	return v
}
