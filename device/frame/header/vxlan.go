package header

import "encoding/binary"

// VXLAN constants (RFC 7348).
const (
	VXLANLen  = 8
	VXLANPort = 4789
	MaxVNI    = 1<<24 - 1

	vxlanFlagVNI = 0x08
)

// VXLAN is a VXLAN header (RFC 7348, 5).
type VXLAN struct {
	VNI uint32 // 24 bits
}

// Decode reads the header at the start of b and returns its size. The I flag must be set. Reserved bits are ignored, as
// the RFC requires of receivers; that also admits other senders' extensions.
func (h *VXLAN) Decode(b []byte) (int, error) {
	if len(b) < VXLANLen {
		return 0, ErrShort
	}
	if b[0]&vxlanFlagVNI == 0 {
		return 0, ErrVersion
	}
	h.VNI = binary.BigEndian.Uint32(b[4:]) >> 8
	return VXLANLen, nil
}

// Encode writes the header to b (8 bytes).
func (h *VXLAN) Encode(b []byte) int {
	b = b[:VXLANLen]
	binary.BigEndian.PutUint32(b, vxlanFlagVNI<<24)
	binary.BigEndian.PutUint32(b[4:], h.VNI<<8)
	return VXLANLen
}
