package frame

// Need is a set of things that a frame's sender has left for others to do, and, of a port, the set of those that may be
// left to it.
type Need uint8

// What can be left undone. TSO and USO come with NeedCsum.
const (
	NeedCsum  Need = 1 << iota // the transport header's checksum field holds the sum of the pseudo-header only
	NeedTSO4                   // to be cut into segments: TCP over IPv4
	NeedTSO6                   // TCP over IPv6
	NeedUSO4                   // UDP over IPv4, each segment a datagram
	NeedUSO6                   // UDP over IPv6
	NeedECN                    // beside TSO: only the first segment keeps CWR (RFC 3168, 6.1.2)
	NeedTrain                  // RoCE v2 packets of one queue pair: headers up to UDP, once, are those of each (gso.Train)

	NeedTSO = NeedTSO4 | NeedTSO6
	NeedUSO = NeedUSO4 | NeedUSO6
	NeedGSO = NeedTSO | NeedUSO
	NeedAll = NeedCsum | NeedGSO | NeedECN
)

// Offload goes with a frame: what is still to be done to it, and where. It is set before the frame enters a network
// and has been checked against the frame (package gso), so that whoever reads it may rely on it. The zero value belongs
// to a frame that is finished. Where the headers are, Buf.Layout says.
type Offload struct {
	Need    Need
	CsumOff uint8 // of the checksum field, from Layout.L4: 16 (TCP) or 6 (UDP)
	// Valid tells that somebody trustworthy found the transport checksum right.
	Valid bool
	// Pad tells that padding behind the frame does no harm: its receiver is known to cut it off.
	Pad bool
	// GSOSize is the number of payload bytes per segment; 0 = not to be cut.
	GSOSize uint16
	Payload uint16 // where the payload begins, only if GSOSize is set
}

// WireLen is the length of the longest frame that b becomes on a wire: its own, or that of a full segment.
func (b *Buf) WireLen() int {
	if o := &b.Offload; o.GSOSize != 0 {
		return min(b.n, int(o.Payload)+int(o.GSOSize))
	}
	return b.n
}

// Segments is the number of frames that b becomes on a wire.
func (b *Buf) Segments() int {
	if o := &b.Offload; o.GSOSize != 0 {
		return (b.n - int(o.Payload) + int(o.GSOSize) - 1) / int(o.GSOSize)
	}
	return 1
}

// WireBytes is the sum of their lengths.
func (b *Buf) WireBytes() int { return b.n + (b.Segments()-1)*int(b.Offload.Payload) }
