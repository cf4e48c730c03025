package frame

// Need is the set of work that a frame's sender has left undone; for a port, the work that may be left undone in frames
// to it.
type Need uint8

// Work that can be left undone. TSO and USO imply NeedCsum.
const (
	NeedCsum  Need = 1 << iota // the transport header's checksum field holds the sum of the pseudo-header only
	NeedTSO4                   // segmentation: TCP over IPv4
	NeedTSO6                   // TCP over IPv6
	NeedUSO4                   // UDP over IPv4, each segment a datagram
	NeedUSO6                   // UDP over IPv6
	NeedECN                    // with TSO: only the first segment keeps CWR (RFC 3168, 6.1.2)
	NeedTrain                  // RoCE v2 packets of one queue pair with one copy of the headers up to UDP (gso.Train)

	NeedTSO = NeedTSO4 | NeedTSO6
	NeedUSO = NeedUSO4 | NeedUSO6
	NeedGSO = NeedTSO | NeedUSO
	NeedAll = NeedCsum | NeedGSO | NeedECN
)

// Offload describes a frame's pending work. It is set before the frame enters a network and has been checked against
// the frame (package gso), so readers may rely on it. It is zero for a complete frame. Where the headers
// are, Buf.Layout tells.
type Offload struct {
	Need    Need
	CsumOff uint8 // of the checksum field, from Layout.L4: 16 (TCP) or 6 (UDP)
	// Valid: a trusted party has verified the transport checksum.
	Valid bool
	// Pad: padding after the frame is harmless, because its receiver is known to remove it.
	Pad bool
	// GSOSize is the number of payload bytes per segment; 0 = no segmentation.
	GSOSize uint16
	Payload uint16 // where the payload begins, only if GSOSize is set
}

// WireLen returns the length of the longest frame that b becomes on a wire: its own, or that of a full segment.
func (b *Buf) WireLen() int {
	if o := &b.Offload; o.GSOSize != 0 {
		return min(b.n, int(o.Payload)+int(o.GSOSize))
	}
	return b.n
}

// Segments returns the number of frames that b becomes on a wire.
func (b *Buf) Segments() int {
	if o := &b.Offload; o.GSOSize != 0 {
		return (b.n - int(o.Payload) + int(o.GSOSize) - 1) / int(o.GSOSize)
	}
	return 1
}

// WireBytes returns the sum of their lengths.
func (b *Buf) WireBytes() int { return b.n + (b.Segments()-1)*int(b.Offload.Payload) }
