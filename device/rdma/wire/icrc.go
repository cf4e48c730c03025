package wire

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/vnicd/vnicd/device/frame/header"
)

// The invariant CRC (IBTA 7.8.1, A17) is the CRC-32 of Ethernet over the packet from the LRH (absent, all ones) to the
// pad. Fields that may change on the way count as ones: TOS or traffic class, TTL or hop limit, flow label, IP and UDP
// checksum, and the byte before BTH's DestQP (congestion bits). It is sent least significant byte first.

// lrhCRC is the CRC-32 of eight bytes of ones, which stand for the LRH.
const lrhCRC = 0x2144df1c

// The masked part of a packet, 40 (IPv4: 20+8+12) to 60 bytes, is copied to a buffer, with some bytes behind it. CRC-32
// in hardware takes steps of 64 bytes, so zeros are put in front to make the length a multiple of that: seeds[k] is the
// start value that k zeros turn into lrhCRC. Short packets are copied as a whole.
const (
	icrcStep = 64
	icrcHead = 2 * icrcStep // zeros included: more than 60 + 63
)

var seeds = makeSeeds()

// makeSeeds computes CRC-32 backwards over zeros.
func makeSeeds() (seeds [icrcHead]uint32) {
	var byTop [256]int // the table's entries differ in their top bytes
	for i, w := range crc32.IEEETable {
		byTop[w>>24] = i
	}
	state := ^uint32(lrhCRC)
	for k := range seeds {
		seeds[k] = ^state
		i := byTop[state>>24]
		state = (state^crc32.IEEETable[i])<<8 | uint32(i)
	}
	return seeds
}

// icrcAt computes the ICRC of frame, whose network header begins at net, BTH
// at bth and ICRC at end.
func icrcAt(frame []byte, net, bth, end int, v6, v1 bool) uint32 {
	var buf [icrcHead]byte
	n := end - net
	k := max(icrcHead-n, -n&(icrcStep-1))
	head := buf[k:]
	rest := net + copy(head, frame[net:end])
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
	return updateCRC(seeds[k], &buf, frame[rest:end])
}

// updateCRCPlain is updateCRC without AVX-512.
func updateCRCPlain(crc uint32, head *[icrcHead]byte, rest []byte) uint32 {
	crc = crc32.Update(crc, crc32.IEEETable, noescape(head))
	if len(rest) > 0 {
		crc = crc32.Update(crc, crc32.IEEETable, rest)
	}
	return crc
}

// CheckICRC reports whether frame, which ParseRoCE has parsed into p, has the correct ICRC.
func CheckICRC(frame []byte, p *RoCE) bool {
	want := icrcAt(frame, p.bth-p.netDistance(), p.bth, p.icrc, p.IsV6, p.V1)
	return binary.LittleEndian.Uint32(frame[p.icrc:]) == want
}

// netDistance returns the number of bytes from the network header to the BTH.
func (p *RoCE) netDistance() int {
	n := len(p.Net)
	if !p.V1 {
		n += header.UDPLen
	}
	return n
}

// SealICRC computes the ICRC of a frame that is complete except for its ICRC, and writes it to the last four bytes of
// the packet, whose end the length fields determine. It returns an error if the headers are not valid.
func SealICRC(frame []byte) error {
	var p RoCE
	l, err := p.network(frame, header.Locate(frame))
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

// Seal is SealICRC for a frame that begins with the headers of t.Put and ends with the four bytes of the ICRC: nothing
// is parsed again. The frame must contain at least a BTH.
func (t *Template) Seal(frame []byte) {
	end := len(frame) - ICRCLen
	binary.LittleEndian.PutUint32(frame[end:], icrcAt(frame, int(t.net), int(t.n), end, !t.v4, t.v1))
}
