package wire

import (
	"encoding/binary"
	"hash/crc32"
)

// The invariant CRC (IBTA 7.8.1, A17.3.3): CRC-32 as Ethernet's over the packet
// from the (absent, all ones) LRH to the pad, with fields that may change on
// the way taken as ones: TOS or traffic class, TTL or hop limit, flow label, IP
// and UDP checksum, and the byte before BTH's DestQP (congestion bits). It goes
// on the wire least significant byte first.

// lrhCRC is the CRC-32 of eight bytes of ones, which stand for the LRH.
const lrhCRC = 0x2144df1c

// icrcHead is how much of a packet is copied aside to be masked. The masked
// part is 40 (IPv4: 20+8+12) to 60 bytes; some more lets CRC-32 run in wide
// steps of 64 bytes or more, then 16.
const icrcHead = 80

// icrcAt computes the ICRC of frame, whose network header begins at net, BTH
// at bth and ICRC at end.
func icrcAt(frame []byte, net, bth, end int, v6, v1 bool) uint32 {
	var head [icrcHead]byte
	n := copy(head[:], frame[net:end])
	if v6 {
		head[0] |= 0x0f // traffic class, flow label
		head[1], head[2], head[3] = 0xff, 0xff, 0xff
		head[7] = 0xff // hop limit
	} else {
		head[1] = 0xff                  // TOS
		head[8] = 0xff                  // TTL
		head[10], head[11] = 0xff, 0xff // header checksum
	}
	b := bth - net
	if !v1 {
		head[b-2], head[b-1] = 0xff, 0xff // UDP checksum
	}
	head[b+4] = 0xff // FECN, BECN, reserved
	crc := crc32.Update(lrhCRC, crc32.IEEETable, noescape(&head)[:n])
	if net+n < end {
		crc = crc32.Update(crc, crc32.IEEETable, frame[net+n:end])
	}
	return crc
}

// CheckICRC reports whether the frame that ParseRoCE took apart into p carries
// the right ICRC.
func CheckICRC(frame []byte, p *RoCE) bool {
	want := icrcAt(frame, p.bth-p.netDistance(), p.bth, p.icrc, p.IsV6, p.V1)
	return binary.LittleEndian.Uint32(frame[p.icrc:]) == want
}

func (p *RoCE) netDistance() int {
	n := len(p.Net)
	if !p.V1 {
		n += UDPLen
	}
	return n
}

// SealICRC computes the ICRC of a frame that is complete but for the ICRC and
// writes it to the last four bytes of the packet, as its length fields say.
// The error tells what is wrong with the headers.
func SealICRC(frame []byte) error {
	var p RoCE
	l, err := p.network(frame)
	if err != nil {
		return err
	}
	if l.end-l.bth < BTHLen+ICRCLen {
		return ErrShort
	}
	end := l.end - ICRCLen
	binary.LittleEndian.PutUint32(frame[end:], icrcAt(frame, l.net, l.bth, end, p.IsV6, p.V1))
	return nil
}

// Seal is SealICRC for a frame that begins with what t.Put wrote and ends with
// the four bytes of the ICRC: nothing is parsed again. The frame must hold a
// BTH at least.
func (t *Template) Seal(frame []byte) {
	end := len(frame) - ICRCLen
	binary.LittleEndian.PutUint32(frame[end:], icrcAt(frame, int(t.net), int(t.n), end, !t.v4, t.v1))
}
