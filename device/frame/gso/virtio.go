package gso

import (
	"encoding/binary"
	"errors"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
)

// HeaderLen is the length of struct virtio_net_hdr_v1 (virtio 1.2, 5.1.6), which TAP devices use, too.
const HeaderLen = 12

// Fields of the header, little-endian.
const (
	atFlags      = 0
	atType       = 1
	atHdrLen     = 2
	atGSOSize    = 4
	atCsumStart  = 6
	atCsumOffset = 8
	atNumBuffers = 10

	flagNeedsCsum = 1
	flagDataValid = 2

	typeNone  = 0
	typeTCPv4 = 1
	typeTCPv6 = 4
	typeUDP   = 5
	typeECN   = 0x80 // in addition to a TCP type
)

// MaxHeaders bounds the headers of a large frame, Offload's Payload: Ethernet with two tags, IPv4 and TCP with all
// options.
const MaxHeaders = header.EthernetLen + header.MaxTags*header.VLANLen + 60 + 60

// Bounds on large frames.
const (
	// MaxSegments bounds the segments of one frame.
	MaxSegments = 2048
	// MaxDatagrams is the same for UDP; Linux has the same limit.
	MaxDatagrams = 128
)

// Errors of a header.
var (
	ErrNotNegotiated = errors.New("gso: an offload that was not negotiated")
	ErrType          = errors.New("gso: unknown or contradictory type")
	ErrChecksum      = errors.New("gso: checksum outside the frame, or not where the protocol has it")
	ErrHeaders       = errors.New("gso: not a whole TCP or UDP packet of the type that is claimed")
	ErrSize          = errors.New("gso: segment size of 0, or too many segments")
)

// Accept reads the virtio header h (HeaderLen bytes) of frame b, whose sender may leave the work in allowed undone, and
// sets b's Offload. Neither is trusted: the result has been checked against the frame, and from then on the frame's
// bytes up to the payload must not change. The header's hdr_len, a hint, is ignored. The caller must be b's only owner:
// a checksum at another place than a known protocol's is completed at once, so that switches inspect the frame as it
// will leave. After an error b's Offload is zero.
func Accept(h []byte, b *frame.Buf, allowed frame.Need) error {
	b.Offload = frame.Offload{}
	flags, typ := h[atFlags], h[atType]
	if flags&flagNeedsCsum == 0 {
		if typ != typeNone {
			return ErrType // virtio 1.2, 5.1.6.2.1: segmentation needs checksum offload
		}
		return nil
	}
	if allowed&frame.NeedCsum == 0 {
		return ErrNotNegotiated
	}
	f := b.Bytes()
	start, off := int(binary.LittleEndian.Uint16(h[atCsumStart:])), int(binary.LittleEndian.Uint16(h[atCsumOffset:]))
	if start+off+2 > len(f) {
		return ErrChecksum
	}
	t, ok := locate(f, b.Layout())
	ok = ok && t.l4 == start && t.csumOff == off
	if typ == typeNone {
		if !ok {
			complete(f, start, off)
			b.SetLayout(&header.Layout{}) // it may have been a part of any header
			return nil
		}
		b.Offload = t.offload(frame.NeedCsum)
		return nil
	}
	if !ok {
		return ErrHeaders
	}
	need := frame.NeedCsum
	switch {
	case typ&^typeECN == typeTCPv4 && t.tcp && !t.v6:
		need |= frame.NeedTSO4
	case typ&^typeECN == typeTCPv6 && t.tcp && t.v6:
		need |= frame.NeedTSO6
	case typ == typeUDP && !t.tcp && !t.v6:
		need |= frame.NeedUSO4
	case typ == typeUDP && !t.tcp && t.v6:
		need |= frame.NeedUSO6
	default:
		return ErrType
	}
	if typ&typeECN != 0 {
		need |= frame.NeedECN
	}
	if need&^allowed != 0 {
		return ErrNotNegotiated
	}
	payload, ok := t.payload(f)
	if !ok {
		return ErrHeaders
	}
	limit := MaxSegments
	if !t.tcp {
		limit = MaxDatagrams
	}
	size := int(binary.LittleEndian.Uint16(h[atGSOSize:]))
	if size == 0 || len(f)-payload > limit*size {
		return ErrSize
	}
	o := t.offload(need)
	o.GSOSize, o.Payload = uint16(size), uint16(payload)
	b.Offload = o
	return nil
}

// DataValid reports whether a header declares the frame's checksum right. Only the kernel's headers may be trusted.
func DataValid(h []byte) bool { return h[atFlags]&(flagDataValid|flagNeedsCsum) == flagDataValid }

// PutHeader writes the virtio header of a frame in bufs guest buffers (0 for a TAP device). valid: the receiver may be
// told that the checksum is right.
func PutHeader(h *[HeaderLen]byte, b *frame.Buf, valid bool, bufs int) {
	o := &b.Offload
	*h = [HeaderLen]byte{}
	binary.LittleEndian.PutUint16(h[atNumBuffers:], uint16(bufs))
	if o.Need == 0 {
		if o.Valid && valid {
			h[atFlags] = flagDataValid
		}
		return
	}
	h[atFlags] = flagNeedsCsum
	binary.LittleEndian.PutUint16(h[atCsumStart:], b.Layout().L4)
	binary.LittleEndian.PutUint16(h[atCsumOffset:], uint16(o.CsumOff))
	if o.GSOSize == 0 {
		return
	}
	switch {
	case o.Need&frame.NeedTSO4 != 0:
		h[atType] = typeTCPv4
	case o.Need&frame.NeedTSO6 != 0:
		h[atType] = typeTCPv6
	default:
		h[atType] = typeUDP
	}
	if o.Need&frame.NeedECN != 0 {
		h[atType] |= typeECN
	}
	binary.LittleEndian.PutUint16(h[atHdrLen:], o.Payload)
	binary.LittleEndian.PutUint16(h[atGSOSize:], o.GSOSize)
}

// transport has the offsets of a frame's headers.
type transport struct {
	at              header.Layout
	l3, l4, csumOff int
	v6, tcp         bool
}

const (
	tcpLen   = 20
	tcpCsum  = 16
	udpCsum  = 6
	tcpFlags = 13
	flagFIN  = 0x01
	flagPSH  = 0x08
	flagCWR  = 0x80
)

// locate finds the TCP or UDP header, of a packet that is no fragment and, over IPv6, has no extension headers.
func locate(f []byte, at *header.Layout) (t transport, ok bool) {
	if at.Flags&(header.IsFragment|header.IsExtended) != 0 || at.L4 == 0 {
		return t, false
	}
	t = transport{at: *at, l3: int(at.L3), l4: int(at.L4), v6: at.Is(header.IsIPv6)}
	switch at.Proto {
	case header.ProtoTCP:
		t.tcp, t.csumOff = true, tcpCsum
		return t, len(f) >= t.l4+tcpLen
	case header.ProtoUDP:
		t.csumOff = udpCsum
		return t, len(f) >= t.l4+header.UDPLen
	}
	return t, false
}

// unpadded returns the frame without the padding after its IP packet (IEEE 802.3).
func (t *transport) unpadded(f []byte) []byte {
	end := t.l3
	if t.v6 {
		end += header.IPv6Len + int(binary.BigEndian.Uint16(f[t.l3+4:]))
	} else {
		end += int(binary.BigEndian.Uint16(f[t.l3+2:]))
	}
	if end < t.l4+header.UDPLen || end > len(f) {
		return f // no IP packet of that length
	}
	return f[:end]
}

// payload returns the offset of the payload of a packet that ends with the frame, as large frames do; the payload must
// not be empty.
func (t *transport) payload(f []byte) (at int, ok bool) {
	at = t.l4 + header.UDPLen
	if t.tcp {
		n := int(f[t.l4+12]>>4) * 4
		if n < tcpLen {
			return 0, false
		}
		at = t.l4 + n
	}
	length, want := binary.BigEndian.Uint16(f[t.l3+2:]), len(f)-t.l3
	if t.v6 {
		length, want = binary.BigEndian.Uint16(f[t.l3+4:]), len(f)-t.l4
	}
	return at, at < len(f) && int(length) == want
}

func (t *transport) offload(n frame.Need) frame.Offload {
	return frame.Offload{Need: n, CsumOff: uint8(t.csumOff)}
}

// Unfinished detects a kernel's pending work in a TCP frame without a virtio header, as from a tunnel over a wire
// inside this machine: the checksum field holds only the pseudo-header's sum, and a frame beyond limit, the size of the
// network's frames, is not segmented yet. A complete frame may look like that once in 65536 times; completing it again
// changes nothing.
func Unfinished(f []byte, at *header.Layout, limit int) (o frame.Offload, ok bool) {
	t, ok := locate(f, at)
	if !ok || !t.tcp {
		return o, false
	}
	field := f[t.l4+t.csumOff:]
	if header.Checksum(field[:2], 0) != header.Checksum(nil, t.pseudo(f, len(f)-t.l4)) {
		return o, false
	}
	o = t.offload(frame.NeedCsum)
	if len(f) <= limit {
		return o, true
	}
	payload, ok := t.payload(f)
	size := limit - payload
	if !ok || size <= 0 || len(f)-payload > MaxSegments*size {
		return frame.Offload{}, false
	}
	o.Need |= frame.NeedTSO4
	if t.v6 {
		o.Need = frame.NeedCsum | frame.NeedTSO6
	}
	o.GSOSize, o.Payload = uint16(size), uint16(payload)
	return o, true
}
