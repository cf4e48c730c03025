package gso

import (
	"bytes"
	"encoding/binary"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
)

// Part is a frame that may be part of a large one, as parsed by Parse.
type Part struct {
	transport
	payload int
	end     int  // of the IP packet, and of the frame
	last    bool // must be the last part of a large frame
}

// Flags that the TCP segments of a large frame may have; the last one may also have FIN and PSH.
const (
	flagACK = 0x10
	flagECE = 0x40
)

const (
	dontFragment = 0x4000
	typeOfIPv4   = 0x45 // version 4, no options
	maxIP        = 65535
)

// Parse reports whether a frame may be part of a large one: TCP with payload and only plain flags, or UDP with payload
// and a checksum (but not RoCE v2, whose packets each have an ICRC); no IP options or extension headers, no fragment,
// no padding. It reads only headers.
func Parse(f []byte, at *header.Layout) (p Part, ok bool) {
	if p.transport, ok = locate(f, at); !ok {
		return p, false
	}
	if p.payload, ok = p.transport.payload(f); !ok {
		return p, false
	}
	p.end = len(f)
	if !p.v6 && f[p.l3] != typeOfIPv4 {
		return p, false
	}
	l4 := f[p.l4:]
	if p.tcp {
		fl := l4[tcpFlags]
		p.last = fl&(flagFIN|flagPSH) != 0
		return p, fl&^(flagFIN|flagPSH|flagECE) == flagACK
	}
	return p, int(binary.BigEndian.Uint16(l4[4:])) == len(l4) && l4[udpCsum]|l4[udpCsum+1] != 0 && !at.Is(header.IsRoCE)
}

// Need returns the Need of a large frame of such parts.
func (p *Part) Need() frame.Need {
	switch {
	case p.tcp && p.v6:
		return frame.NeedCsum | frame.NeedTSO6
	case p.tcp:
		return frame.NeedCsum | frame.NeedTSO4
	case p.v6:
		return frame.NeedCsum | frame.NeedUSO6
	}
	return frame.NeedCsum | frame.NeedUSO4
}

// Last reports that no part may follow this one.
func (p *Part) Last() bool { return p.last }

// valid reports whether the part's checksums are right. pseudo is the pseudo-header's sum without the length.
func (p *Part) valid(f []byte, pseudo uint32) bool {
	if !p.v6 && header.Checksum(f[p.l3:p.l4], 0) != 0 {
		return false
	}
	return header.Checksum(f[p.l4:p.end], pseudo+uint32(p.end-p.l4)) == 0
}

func (t *transport) pseudo(f []byte, length int) uint32 {
	proto := uint8(header.ProtoUDP)
	if t.tcp {
		proto = header.ProtoTCP
	}
	if t.v6 {
		return header.PseudoSum6([16]byte(f[t.l3+8:t.l3+24]), [16]byte(f[t.l3+24:t.l3+40]), proto, uint32(length))
	}
	return header.PseudoSum4([4]byte(f[t.l3+12:t.l3+16]), [4]byte(f[t.l3+16:t.l3+20]), proto, uint16(length))
}

// Merger is the inverse of Segmenter: it makes a large frame of consecutive parts. Segmenting the large frame restores
// the parts, except for IPv4 IDs of packets with DF.
//
// The first part is not copied before a second one fits; so a part that remains alone costs nothing, and its bytes must
// not change before Take.
type Merger struct {
	b     *frame.Buf // nil while there is only one part
	first []byte
	head  Part
	size  int // payload of the first part
	n     int // parts
	seq   uint32
	done  bool // no part may follow

	pseudo uint32 // sum of all parts' pseudo-headers without the length
}

// Start sets the first part. The Merger must be empty.
func (m *Merger) Start(f []byte, p Part) {
	*m = Merger{first: f, head: p, size: p.end - p.payload, n: 1, done: p.last, pseudo: p.pseudo(f, 0)}
	if p.tcp {
		m.seq = binary.BigEndian.Uint32(f[p.l4+4:]) + uint32(m.size)
	}
}

// Parts returns the number of parts; 0 = empty.
func (m *Merger) Parts() int { return m.n }

// Full reports that no part can be added.
func (m *Merger) Full() bool { return m.done }

// Add appends a part that continues the others; false: it does not, a checksum is wrong, or there is no buffer.
// Checksums are verified only of parts that are merged, because merging discards them.
func (m *Merger) Add(pool *frame.Pool, f []byte, p Part) bool {
	size := p.end - p.payload
	if m.done || size > m.size || !m.continues(f, &p) {
		return false
	}
	length := m.head.payload + m.n*m.size + size
	limit := MaxSegments
	if !p.tcp {
		limit = MaxDatagrams / 2 // Linux's maximum before 6.9
	}
	if m.n == limit || length-p.l3 > maxIP || length > frame.BigCapacity {
		return false
	}
	if m.b == nil && !m.head.valid(m.first, m.pseudo) || !p.valid(f, m.pseudo) {
		return false
	}
	if m.b == nil {
		if m.b = pool.GetFor(frame.BigCapacity); m.b == nil {
			return false
		}
		m.b.Append(m.first)
	}
	m.b.Append(f[p.payload:p.end])
	m.n++
	if p.tcp {
		m.b.Bytes()[p.l4+tcpFlags] |= f[p.l4+tcpFlags]
		m.seq += uint32(size)
	}
	m.done = p.last || size < m.size
	return true
}

// continues compares headers, word by word, because it runs for every received segment.
func (m *Merger) continues(f []byte, p *Part) bool {
	h, g := &m.head, m.first
	if h.l3 != p.l3 || h.l4 != p.l4 || h.payload != p.payload || h.tcp != p.tcp || h.v6 != p.v6 ||
		u64(f) != u64(g) || u64(f[6:]) != u64(g[6:]) || !bytes.Equal(f[header.EthernetLen:p.l3], g[header.EthernetLen:p.l3]) {
		return false
	}
	a, b := f[p.l3:], g[p.l3:]
	if p.v6 {
		if u32(a) != u32(b) || u16(a[6:]) != u16(b[6:]) || !bytes.Equal(a[8:header.IPv6Len], b[8:header.IPv6Len]) {
			return false
		}
	} else {
		if u16(a) != u16(b) || u32(a[6:]) != u32(b[6:]) || u64(a[12:]) != u64(b[12:]) {
			return false
		}
		if u16(a[6:])&dontFragment == 0 && u16(a[4:]) != u16(b[4:])+uint16(m.n) {
			return false
		}
	}
	a, b = f[p.l4:], g[p.l4:]
	if u32(a) != u32(b) {
		return false
	}
	if !p.tcp {
		return true
	}
	const endings = flagFIN | flagPSH
	return u32(a[4:]) == m.seq && u32(a[8:]) == u32(b[8:]) && a[12] == b[12] &&
		a[tcpFlags]&^endings == b[tcpFlags]&^endings &&
		u16(a[14:]) == u16(b[14:]) && bytes.Equal(a[tcpCsum+2:p.payload-p.l4], b[tcpCsum+2:p.payload-p.l4])
}

func u16(b []byte) uint16 { return binary.BigEndian.Uint16(b) }
func u32(b []byte) uint32 { return binary.BigEndian.Uint32(b) }
func u64(b []byte) uint64 { return binary.BigEndian.Uint64(b) }

// Take empties the Merger. It returns the large frame, whose Offload is set, with a reference; or nil if there was only
// one part, which is still a complete frame.
func (m *Merger) Take() *frame.Buf {
	b, h := m.b, &m.head
	m.b, m.n, m.first = nil, 0, nil
	if b == nil {
		return nil
	}
	f := b.Bytes()
	length := len(f) - h.l4
	if h.v6 {
		binary.BigEndian.PutUint16(f[h.l3+4:], uint16(length))
	} else {
		ip := f[h.l3:h.l4]
		binary.BigEndian.PutUint16(ip[2:], uint16(len(f)-h.l3))
		ip[10], ip[11] = 0, 0
		binary.BigEndian.PutUint16(ip[10:], header.Checksum(ip, 0))
	}
	if !h.tcp {
		binary.BigEndian.PutUint16(f[h.l4+4:], uint16(length))
	}
	// Completing the frame adds the sum of the rest to that of the pseudo-header.
	binary.BigEndian.PutUint16(f[h.l4+h.csumOff:], ^header.Checksum(nil, h.pseudo(f, length)))
	b.Offload = h.offload(h.Need())
	b.Offload.GSOSize, b.Offload.Payload = uint16(m.size), uint16(h.payload)
	b.SetLayout(&h.at)
	return b
}
