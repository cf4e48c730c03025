// Package gso does in software the work that senders leave to network cards: checksums, segmentation and merging of TCP
// (TSO) and UDP (USO). Only this package does it, and only this package decides whether to trust the headers that
// request it.
//
// Accept checks a virtio header against its frame; Complete and Segmenter do the work for ports that do not accept it;
// Merger makes large frames of small ones. Nothing here allocates or keeps state beyond the current frame.
package gso

import (
	"encoding/binary"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
)

// Complete computes the checksum of a frame that needs only that. Only a sole owner may call it.
func Complete(b *frame.Buf) {
	o := &b.Offload
	complete(b.Bytes(), int(b.Layout().L4), int(o.CsumOff))
	*o = frame.Offload{Valid: true}
}

// complete sums up the frame from start on, including the checksum field, which holds the pseudo-header's sum. A result
// of 0 would mean "none" in UDP; 0xffff is the same number and harmless in every other protocol.
func complete(f []byte, start, off int) {
	sum := header.Checksum(f[start:], 0)
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(f[start+off:], sum)
}

// Segmenter segments one frame. It reads the frame until the last Next.
type Segmenter struct {
	f               []byte
	l3, l4, payload int
	size, pos       int // payload bytes per segment; offset of the next segment's payload
	v6, tcp, train  bool
	id              uint16
	seq             uint32
	flags           byte // TCP, as in the frame

	// Sums of the IP header, and of pseudo-header and L4 header, without the fields that differ between segments.
	ipSum, l4Sum uint32
}

// Start sets the frame, whose Offload, from Accept, has a GSOSize.
func (s *Segmenter) Start(b *frame.Buf) {
	o, f, at := &b.Offload, b.Bytes(), b.Layout()
	*s = Segmenter{f: f, l3: int(at.L3), l4: int(at.L4), payload: int(o.Payload), size: int(o.GSOSize),
		pos: int(o.Payload), v6: o.Need&(frame.NeedTSO6|frame.NeedUSO6) != 0,
		tcp: o.Need&frame.NeedTSO != 0, train: o.Need&frame.NeedTrain != 0}
	if s.train {
		return
	}
	t := transport{l3: s.l3, v6: s.v6, tcp: s.tcp}
	l4 := f[s.l4:s.payload]
	s.l4Sum = t.pseudo(f, 0)
	if s.tcp {
		s.seq = binary.BigEndian.Uint32(l4[4:])
		s.flags = l4[tcpFlags]
		s.l4Sum += sumWithout(l4, 4, 6, tcpFlags-1, tcpCsum)
	} else {
		s.l4Sum += sumWithout(l4, 4, udpCsum)
	}
	if !s.v6 {
		s.id = binary.BigEndian.Uint16(f[s.l3+4:])
		s.ipSum = sumWithout(f[s.l3:s.l4], 2, 4, 10)
	}
}

// sumWithout returns the one's complement sum of a header of even length without the given words.
func sumWithout(h []byte, words ...int) uint32 {
	sum := uint32(^header.Checksum(h, 0))
	for _, at := range words {
		sum += uint32(^binary.BigEndian.Uint16(h[at:]))
	}
	return sum
}

// Left returns the number of remaining segments.
func (s *Segmenter) Left() int { return (len(s.f) - s.pos + s.size - 1) / s.size }

// Next writes the next complete segment to the start of dst and returns its length. dst must have room for it
// (Offload's Payload plus GSOSize), and Left must not be 0.
func (s *Segmenter) Next(dst []byte) int {
	n, part := s.Header(dst)
	return n + copy(dst[n:n+len(part)], part)
}

// Header is Next for senders with scatter/gather: it writes only the segment's headers, Offload's Payload bytes, and
// returns their length and the payload, which stays in the frame.
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
	if s.train {
		return n, part
	}
	ip, l4 := dst[s.l3:s.l4], dst[s.l4:]
	length := len(l4) + len(part)
	if s.v6 {
		binary.BigEndian.PutUint16(ip[4:], uint16(length))
	} else {
		binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+length))
		// Each segment is a packet (RFC 6864), numbered as a sender would have done.
		binary.BigEndian.PutUint16(ip[4:], s.id)
		binary.BigEndian.PutUint16(ip[10:], header.Checksum(nil, s.ipSum+uint32(len(ip)+length)+uint32(s.id)))
		s.id++
	}
	field, sum := l4[udpCsum:], s.l4Sum+uint32(length)
	if s.tcp {
		field = l4[tcpCsum:]
		sum += s.seq>>16 + s.seq&0xffff
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
		sum += uint32(binary.BigEndian.Uint16(l4[tcpFlags-1:]))
	} else {
		binary.BigEndian.PutUint16(l4[4:], uint16(length))
		sum += uint32(length)
	}
	// Both headers have even length, so the sums of the parts can be added.
	csum := header.Checksum(part, sum)
	if csum == 0 && !s.tcp {
		csum = 0xffff // RFC 768: 0 is "no checksum"
	}
	binary.BigEndian.PutUint16(field, csum)
	return n, part
}
