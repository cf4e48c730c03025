// Package gso does in software what senders leave to network cards: checksums, segmentation and merging of TCP (TSO) and UDP
// (USO). It is the one place that does so, and the one that decides whether to believe the headers that ask for it.
//
// Accept checks a virtio header against its frame; Complete and Segmenter do the work where a frame leaves through a port
// that cannot; Merger makes large frames of small ones. Nothing here allocates or keeps state beyond the frame in the making.
package gso

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/packet"
	"github.com/vnicd/vnicd/device/wire"
)

// Complete computes the checksum of a frame that needs just that. Only a sole owner may call it.
func Complete(b *packet.Buf) {
	o := &b.Offload
	complete(b.Bytes(), int(o.L4), int(o.CsumOff))
	*o = packet.Offload{Valid: true}
}

// complete sums up the frame from start on; what the checksum field holds, the pseudo-header's sum, is part of it. A
// result of 0 would mean "none" in UDP; 0xffff is the same number and harmless in every other protocol.
func complete(f []byte, start, off int) {
	sum := wire.Checksum(f[start:], 0)
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(f[start+off:], sum)
}

// Segmenter cuts one frame. It reads the frame until the last Next.
type Segmenter struct {
	f               []byte
	l3, l4, payload int
	size, pos       int // payload bytes per segment; where the next one's payload begins
	v6, tcp         bool
	id              uint16
	seq             uint32
	pseudo          uint32 // sum of the pseudo-header without the length
	flags           byte   // TCP, as in the frame
}

// Start begins with a frame whose Offload, from Accept, has a GSOSize.
func (s *Segmenter) Start(b *packet.Buf) {
	o, f := &b.Offload, b.Bytes()
	*s = Segmenter{f: f, l3: int(o.L3), l4: int(o.L4), payload: int(o.Payload), size: int(o.GSOSize), pos: int(o.Payload),
		v6: o.Need&(packet.NeedTSO6|packet.NeedUSO6) != 0, tcp: o.Need&packet.NeedTSO != 0}
	proto := uint8(wire.ProtoUDP)
	if s.tcp {
		proto = protoTCP
		s.seq = binary.BigEndian.Uint32(f[s.l4+4:])
		s.flags = f[s.l4+tcpFlags]
	}
	if s.v6 {
		s.pseudo = wire.PseudoSum6([16]byte(f[s.l3+8:s.l3+24]), [16]byte(f[s.l3+24:s.l3+40]), proto, 0)
	} else {
		s.pseudo = wire.PseudoSum4([4]byte(f[s.l3+12:s.l3+16]), [4]byte(f[s.l3+16:s.l3+20]), proto, 0)
		s.id = binary.BigEndian.Uint16(f[s.l3+4:])
	}
}

// Left returns how many segments are still to come.
func (s *Segmenter) Left() int { return (len(s.f) - s.pos + s.size - 1) / s.size }

// Next writes the next segment, finished, to the start of dst and returns its length. dst must have room for it (Offload's
// Payload plus GSOSize), and Left must not be 0.
func (s *Segmenter) Next(dst []byte) int {
	n, part := s.Header(dst)
	return n + copy(dst[n:n+len(part)], part)
}

// Header is Next for who sends from several places: it writes the segment's headers only, Offload's Payload bytes, and returns
// their length and the payload, which stays where it is in the frame.
func (s *Segmenter) Header(dst []byte) (n int, part []byte) {
	part = s.f[s.pos:]
	last := len(part) <= s.size
	if !last {
		part = part[:s.size]
	}
	first := s.pos == s.payload
	s.pos += len(part)
	n = s.payload
	dst = dst[:n]
	copy(dst, s.f)
	ip, l4 := dst[s.l3:s.l4], dst[s.l4:]
	length := len(l4) + len(part)
	if s.v6 {
		binary.BigEndian.PutUint16(ip[4:], uint16(length))
	} else {
		binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+length))
		// Each segment is a packet of its own (RFC 6864), numbered as a sender would have done.
		binary.BigEndian.PutUint16(ip[4:], s.id)
		s.id++
		ip[10], ip[11] = 0, 0
		binary.BigEndian.PutUint16(ip[10:], wire.Checksum(ip, 0))
	}
	field := l4[udpCsum:]
	if s.tcp {
		field = l4[tcpCsum:]
		binary.BigEndian.PutUint32(l4[4:], s.seq)
		s.seq += uint32(len(part))
		fl := s.flags
		if !first {
			fl &^= flagCWR // RFC 3168, 6.1.2: once, on the first new segment
		}
		if !last {
			fl &^= flagFIN | flagPSH
		}
		l4[tcpFlags] = fl
	} else {
		binary.BigEndian.PutUint16(l4[4:], uint16(length))
	}
	field[0], field[1] = 0, 0
	// Both headers are of even length, so the sums of the parts add up.
	sum := wire.Checksum(part, s.pseudo+uint32(length)+uint32(^wire.Checksum(l4, 0)))
	if sum == 0 && !s.tcp {
		sum = 0xffff // RFC 768: 0 is "no checksum"
	}
	binary.BigEndian.PutUint16(field, sum)
	return n, part
}
