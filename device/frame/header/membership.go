package header

import (
	"encoding/binary"
	"time"
)

// IP protocol numbers of the messages between multicast routers and hosts. MLD is part of ICMPv6.
const (
	ProtoIGMP = 2
	ProtoPIM  = 103
)

// Types of IGMP (RFC 1112, 2236, 3376) and MLD (RFC 2710, 3810).
const (
	igmpQuery    = 0x11
	igmpReport1  = 0x12
	igmpReport2  = 0x16
	igmpLeave    = 0x17
	igmpReport3  = 0x22
	mldQuery     = 130
	mldReport1   = 131
	mldDone      = 132
	mldReport2   = 143
	mldFixedLen  = 24
	igmpFixedLen = 8
	query3Len    = 12 // IGMPv3 (RFC 3376, 4.1)
	mldQuery2Len = 28 // MLDv2 (RFC 3810, 5.1)
)

// Record types (RFC 3376, 4.2.12; RFC 3810, 5.2.12).
const (
	modeIsInclude   = 1
	modeIsExclude   = 2
	changeToInclude = 3
	changeToExclude = 4
	allowNewSources = 5
	blockOldSources = 6
)

// Defaults of the protocols (RFC 3376, 8; RFC 3810, 9).
const (
	DefaultRobustness    = 2
	DefaultQueryInterval = 125 * time.Second
	DefaultQueryResponse = 10 * time.Second
)

// Membership is an IGMP or MLD message: what hosts and multicast routers tell each other about groups. IPv4 addresses
// are mapped (Mapped4).
type Membership struct {
	Query bool
	// Group of a query; zero: a general query.
	Group [16]byte
	// Source is the sender's IP address.
	Source [16]byte
	// Response is how long hosts may wait with their answers, Interval the time between general queries, Robustness
	// the number of queries that may be lost plus one, 2 to 7. For versions whose messages do not have them they are
	// the defaults. Of queries only.
	Response, Interval time.Duration
	Robustness         int

	typ     byte
	records []byte // of a version 3 (MLD: 2) report
	left    int
	v6      bool
	single  [16]byte
}

// IsMembership reports whether a frame holds an IGMP or MLD message, of any content; l is the frame's layout.
func IsMembership(f []byte, l *Layout) bool {
	if l.L4 == 0 || l.Is(IsLater) {
		return false
	}
	if !l.Is(IsIPv6) {
		return l.Proto == ProtoIGMP
	}
	if l.Proto != ProtoICMPv6 || int(l.L4) >= len(f) {
		return false
	}
	switch f[l.L4] {
	case mldQuery, mldReport1, mldDone, mldReport2:
		return true
	}
	return false
}

// Decode reads the message of a frame with layout l. It accepts what RFC 3376, section 4 (with 9.1 for versions), and
// RFC 3810, sections 5 and 6.2, let receivers accept: valid lengths and checksums; a TTL of 1 and, except from IGMPv1,
// the router alert option; MLD from link-local addresses (reports also from ::); a group address within the message;
// general queries to all hosts, others and reports to their group. Fragments are refused. ErrType: another message, or
// one not sent by these rules.
func (m *Membership) Decode(f []byte, l *Layout) error {
	*m = Membership{}
	if !IsMembership(f, l) || l.Is(IsFragment) {
		return ErrType
	}
	if l.Is(IsIPv6) {
		return m.decode6(f[l.L3:], int(l.L4-l.L3))
	}
	return m.decode4(f[l.L3:])
}

func (m *Membership) decode4(p []byte) error {
	var h IPv4
	n, err := h.Decode(p)
	if err != nil {
		return err
	}
	body := p[n:h.TotalLen]
	if len(body) < igmpFixedLen {
		return ErrShort
	}
	if Checksum(body, 0) != 0 {
		return ErrChecksum
	}
	m.typ, m.Source = body[0], Mapped4(h.Src)
	group := [4]byte(body[4:8])
	multicast := group[0]>>4 == 14
	alert := routerAlert4(p[IPv4Len:n])
	switch {
	case h.TTL != 1 || h.Src[0]>>4 == 14:
		return ErrType
	case m.typ == igmpReport3:
		m.records, m.left = body[igmpFixedLen:], int(binary.BigEndian.Uint16(body[6:]))
		if !alert || h.Dst != [4]byte{224, 0, 0, 22} {
			return ErrType
		}
		return m.checkRecords()
	case m.typ == igmpQuery:
		m.Query = true
		if group != [4]byte{} {
			m.Group = Mapped4(group)
		}
		if m.Group != [16]byte{} && (!multicast || h.Dst != group) ||
			m.Group == [16]byte{} && h.Dst != [4]byte{224, 0, 0, 1} {
			return ErrType
		}
		return m.query4(body, alert)
	case !multicast:
		return ErrType
	}
	m.single = Mapped4(group)
	switch m.typ {
	case igmpReport1:
		if h.Dst != group {
			return ErrType
		}
	case igmpReport2:
		if !alert || h.Dst != group {
			return ErrType
		}
	case igmpLeave:
		if !alert || h.Dst != [4]byte{224, 0, 0, 2} {
			return ErrType
		}
	default:
		return ErrType
	}
	return nil
}

func (m *Membership) query4(body []byte, alert bool) error {
	m.defaults()
	code := body[1]
	switch {
	case len(body) == igmpFixedLen && code == 0: // version 1: 10 seconds (RFC 2236, 4)
	case !alert:
		return ErrType
	case len(body) == igmpFixedLen:
		m.Response = time.Duration(code) * 100 * time.Millisecond
	case len(body) < query3Len || int(binary.BigEndian.Uint16(body[10:]))*4 > len(body)-query3Len:
		return ErrLength // RFC 3376, 7.1
	default:
		m.Response = time.Duration(floating8(code)) * 100 * time.Millisecond
		m.timers(body[8], body[9])
	}
	return nil
}

func (m *Membership) decode6(p []byte, off int) error {
	var h IPv6
	if _, err := h.Decode(p); err != nil {
		return err
	}
	end := IPv6Len + int(h.PayloadLen)
	if off > end || end-off < igmpFixedLen {
		return ErrShort
	}
	body := p[off:end]
	if Checksum(body, PseudoSum6(h.Src, h.Dst, ProtoICMPv6, uint32(len(body)))) != 0 {
		return ErrChecksum
	}
	m.typ, m.v6, m.Source = body[0], true, h.Src
	linkLocal := h.Src[0] == 0xfe && h.Src[1]&0xc0 == 0x80
	switch {
	case h.HopLimit != 1 || body[1] != 0 || !routerAlert6(p[IPv6Len:off], h.NextHeader):
		return ErrType
	case !linkLocal && (h.Src != [16]byte{} || m.typ == mldQuery): // RFC 3810, 5.1.14 and 5.2.13
		return ErrType
	case m.typ == mldReport2:
		m.records, m.left = body[igmpFixedLen:], int(binary.BigEndian.Uint16(body[6:]))
		if h.Dst != allMLDv2Routers {
			return ErrType
		}
		return m.checkRecords()
	case len(body) < mldFixedLen:
		return ErrShort
	}
	group := [16]byte(body[8:24])
	if m.typ == mldQuery {
		m.Query, m.Group = true, group
		if group != [16]byte{} && (group[0] != 0xff || h.Dst != group) || group == [16]byte{} && h.Dst != allNodes {
			return ErrType
		}
		return m.query6(body)
	}
	m.single = group
	if group[0] != 0xff || m.typ == mldReport1 && h.Dst != group || m.typ == mldDone && h.Dst != allRouters {
		return ErrType
	}
	return nil
}

var (
	allNodes        = [16]byte{0: 0xff, 1: 2, 15: 1}
	allRouters      = [16]byte{0: 0xff, 1: 2, 15: 2}
	allMLDv2Routers = [16]byte{0: 0xff, 1: 2, 15: 22}
)

func (m *Membership) query6(body []byte) error {
	m.defaults()
	code := binary.BigEndian.Uint16(body[4:])
	switch {
	case len(body) == mldFixedLen:
		m.Response = time.Duration(code) * time.Millisecond
	case len(body) < mldQuery2Len || int(binary.BigEndian.Uint16(body[26:]))*16 > len(body)-mldQuery2Len:
		return ErrLength // RFC 3810, 8.1
	default:
		m.Response = time.Duration(floating16(code)) * time.Millisecond
		m.timers(body[24], body[25])
	}
	return nil
}

func (m *Membership) defaults() {
	m.Response, m.Interval, m.Robustness = DefaultQueryResponse, DefaultQueryInterval, DefaultRobustness
}

// timers takes robustness and interval from a query; zero: the querier does not tell (RFC 3376, 4.1.6 and 4.1.7).
func (m *Membership) timers(flags, code byte) {
	if r := int(flags & 7); r != 0 {
		m.Robustness = max(r, 2)
	}
	if code != 0 {
		m.Interval = time.Duration(floating8(code)) * time.Second
	}
}

// floating8 is the value of an 8-bit code with exponent (RFC 3376, 4.1.1 and 4.1.7).
func floating8(c byte) uint32 {
	if c < 0x80 {
		return uint32(c)
	}
	return (uint32(c&15) | 16) << (c>>4&7 + 3)
}

// floating16 is the value of a 16-bit code with exponent (RFC 3810, 5.1.3).
func floating16(c uint16) uint32 {
	if c < 0x8000 {
		return uint32(c)
	}
	return (uint32(c&0xfff) | 0x1000) << (c>>12&7 + 3)
}

// routerAlert4 reports whether IPv4 options contain the router alert (RFC 2113).
func routerAlert4(o []byte) bool {
	for len(o) > 0 {
		switch {
		case o[0] == 0: // end of the list
			return false
		case o[0] == 1: // no operation
			o = o[1:]
		case len(o) < 2 || o[1] < 2 || int(o[1]) > len(o):
			return false
		case o[0] == 148:
			return o[1] == 4 && o[2] == 0 && o[3] == 0
		default:
			o = o[o[1]:]
		}
	}
	return false
}

// routerAlert6 reports whether extension headers begin with hop-by-hop options that contain the router alert for MLD
// (RFC 2711); next is the type of the first header.
func routerAlert6(e []byte, next uint8) bool {
	if next != extHopByHop || len(e) < 8 || len(e) < 8+int(e[1])*8 {
		return false
	}
	for o := e[2 : 8+int(e[1])*8]; len(o) > 0; {
		switch {
		case o[0] == 0: // Pad1
			o = o[1:]
		case len(o) < 2 || len(o) < 2+int(o[1]):
			return false
		case o[0] == 5:
			return o[1] == 2 && o[2] == 0 && o[3] == 0
		default:
			o = o[2+int(o[1]):]
		}
	}
	return false
}

// recordLen returns the length of the first record of r, 0 if it is cut short.
func (m *Membership) recordLen(r []byte) int {
	fixed, addr := 8, 4
	if m.v6 {
		fixed, addr = 20, 16
	}
	if len(r) < fixed {
		return 0
	}
	n := fixed + int(binary.BigEndian.Uint16(r[2:]))*addr + int(r[1])*4
	if n > len(r) {
		return 0
	}
	return n
}

func (m *Membership) checkRecords() error {
	r := m.records
	for range m.left {
		n := m.recordLen(r)
		if n == 0 {
			return ErrLength
		}
		r = r[n:]
	}
	return nil
}

// Records returns the number of records of a report or leave.
func (m *Membership) Records() int {
	switch {
	case m.Query:
		return 0
	case m.single != [16]byte{}:
		return 1
	}
	return m.left
}

// Next returns the group of the next record, and whether its sender wants the group's frames from now on. ok is false
// behind the last record. Records that change neither, and those without a group address, are left out. Sources are
// not looked at: a sender that wants any source's frames wants the group's.
func (m *Membership) Next() (group [16]byte, joins, ok bool) {
	if m.single != [16]byte{} {
		group, m.single = m.single, [16]byte{}
		return group, m.typ != igmpLeave && m.typ != mldDone, true
	}
	for m.left > 0 {
		n := m.recordLen(m.records)
		if n == 0 {
			return group, false, false
		}
		r := m.records[:n]
		m.records, m.left = m.records[n:], m.left-1
		if m.v6 {
			group, ok = [16]byte(r[4:20]), r[4] == 0xff
		} else {
			group, ok = Mapped4([4]byte(r[4:8])), r[4]>>4 == 14
		}
		if !ok {
			continue
		}
		switch sources := binary.BigEndian.Uint16(r[2:]); r[0] {
		case modeIsExclude, changeToExclude:
			return group, true, true
		case modeIsInclude, allowNewSources:
			if sources > 0 {
				return group, true, true
			}
		case changeToInclude:
			return group, sources > 0, true
		case blockOldSources:
		}
	}
	return group, false, false
}

// PIMHold returns how long the sender of a PIM hello in a frame with layout l wants to be taken for a router (RFC
// 7761, 4.3.1 and 4.9.2). ok is false for other frames.
func PIMHold(f []byte, l *Layout) (hold time.Duration, ok bool) {
	const def = 105 * time.Second
	if l.L4 == 0 || l.Proto != ProtoPIM || l.Is(IsFragment) || len(f) < int(l.L4)+4 {
		return 0, false
	}
	p := f[l.L3:]
	end := int(l.L3) + int(binary.BigEndian.Uint16(p[2:]))
	if l.Is(IsIPv6) {
		end = int(l.L3) + IPv6Len + int(binary.BigEndian.Uint16(p[4:]))
		if p[7] != 1 || [16]byte(p[24:40]) != [16]byte{0: 0xff, 1: 2, 15: 13} {
			return 0, false
		}
	} else if p[8] != 1 || [4]byte(p[16:20]) != [4]byte{224, 0, 0, 13} {
		return 0, false
	}
	if end > len(f) || end < int(l.L4)+4 || f[l.L4] != 2<<4 { // version 2, hello
		return 0, false
	}
	for o := f[l.L4+4 : end]; len(o) >= 4; {
		n := 4 + int(binary.BigEndian.Uint16(o[2:]))
		if n > len(o) {
			return 0, false
		}
		if binary.BigEndian.Uint16(o) == 1 && n == 6 {
			return time.Duration(binary.BigEndian.Uint16(o[4:])) * time.Second, true
		}
		o = o[n:]
	}
	return def, true
}
