package vswitch

import (
	"encoding/binary"
	"time"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// The sender of a frame beyond the MTU gets the ICMP message that a router would send (RFC 1191, RFC 8201). A switch
// has no address of its own, so the message comes from the packet's destination, as with Linux's tunnels.

// Bytes of the packet that the message quotes: as many as fit a message of the minimum MTU (RFC 1812, 4.3.2.3; RFC
// 4443, 3.2).
const (
	icmpMax4 = 576
	icmpMax6 = 1280
)

// AnswerTooBig tells the sender of a frame, if it is still at the port in the table, that frames of that length do not
// reach their destination, but frames of up to limit bytes, tags included, do. Loop thread only; the sending port's
// limit of such answers applies.
func (n *Network) AnswerTooBig(l *loop.Loop, f []byte, limit int) {
	if len(f) < HeaderLen {
		return
	}
	r := n.enter(l)
	defer r.leave()
	h := header.Locate(f)
	v, ok := n.find(macKey(f[6:]), vlanKey(h.VLAN), uint32(l.Now()/int64(time.Second)))
	if !ok {
		return
	}
	if a := n.byID(v.port()); a != nil {
		a.tooBig(l, f, h, limit-int(h.L3), Source{Remote: Remote(v.remote())})
	}
}

func (a *Attachment) tooBig(l *loop.Loop, f []byte, h *header.Layout, mtu int, from Source) {
	if a.net.cfg.Pool == nil || macKey(f)&groupBit != 0 || h.Is(header.IsRoCE) {
		return
	}
	p := f[h.L3:]
	v6 := h.Type == header.TypeIPv6
	switch {
	case h.Type == header.TypeIPv4 && answerable4(p), v6 && answerable6(p, h):
	default:
		return
	}
	if !a.limits.answers.take(l.Now(), 1) {
		return
	}
	b := a.net.cfg.Pool.Get()
	if b == nil {
		return
	}
	defer b.Free()
	b.Append(f[6:12])
	b.Append(f[0:6])
	b.Append(f[12:h.L3])
	if v6 {
		packetTooBig6(b, p, mtu)
	} else {
		fragmentationNeeded4(b, p, mtu)
	}
	a.answer(l, b, from)
}

// answer delivers a frame made by the switch to the port.
func (a *Attachment) answer(l *loop.Loop, b *frame.Buf, from Source) {
	a.Counters.answered(l)
	a.output(l, b, Destination{Remote: from.Remote})
}

// answerable4 follows RFC 1122, 3.2.2: no answer to errors, to fragments other than the first, or to packets not from
// one host to another; and none without DF, because a router would have fragmented the packet.
func answerable4(p []byte) bool {
	if len(p) < header.IPv4Len || p[0]>>4 != 4 {
		return false
	}
	n := int(p[0]&15) * 4
	frag := binary.BigEndian.Uint16(p[6:])
	host := func(a []byte) bool { return a[0] != 0 && a[0] != 127 && a[0] < 224 }
	switch {
	case n < header.IPv4Len || len(p) < n+8 || frag&0x4000 == 0 || frag&0x1fff != 0 || !host(p[12:]) || !host(p[16:]):
		return false
	case p[9] == protoICMP:
		switch p[n] {
		case 3, 4, 5, 11, 12:
			return false
		}
	}
	return true
}

func answerable6(p []byte, h *header.Layout) bool {
	if len(p) < header.IPv6Len || p[0]>>4 != 6 || p[8] == 0xff || p[24] == 0xff || ip(p[8:24]) == (ip{}) {
		return false
	}
	off := int(h.L4 - h.L3)
	return h.Proto != header.ProtoICMPv6 || len(p) > off && p[off] >= 128 // lower types are errors
}

func fragmentationNeeded4(b *frame.Buf, p []byte, mtu int) {
	at := b.Len()
	p = p[:min(len(p), icmpMax4-header.IPv4Len-8)]
	b.SetLen(at + header.IPv4Len + 8)
	b.Append(p)
	out := b.Bytes()[at:]
	// Precedence: internetwork control (RFC 1812, 4.3.2.5).
	h := header.IPv4{TOS: 0xc0, TotalLen: uint16(len(out)), TTL: 64, Protocol: protoICMP, Src: [4]byte(p[16:20]),
		Dst: [4]byte(p[12:16])}
	h.Encode(out)
	m := out[header.IPv4Len:]
	m[0], m[1] = 3, 4
	clear(m[2:6])
	binary.BigEndian.PutUint16(m[6:], uint16(min(mtu, MaxMTU)))
	binary.BigEndian.PutUint16(m[2:], header.Checksum(m, 0))
}

func packetTooBig6(b *frame.Buf, p []byte, mtu int) {
	at := b.Len()
	p = p[:min(len(p), icmpMax6-header.IPv6Len-8)]
	b.SetLen(at + header.IPv6Len + 8)
	b.Append(p)
	out := b.Bytes()[at:]
	h := header.IPv6{PayloadLen: uint16(len(out) - header.IPv6Len), NextHeader: header.ProtoICMPv6, HopLimit: 64,
		Src: ip(p[24:40]), Dst: ip(p[8:24])}
	h.Encode(out)
	m := out[header.IPv6Len:]
	m[0], m[1], m[2], m[3] = 2, 0, 0, 0
	binary.BigEndian.PutUint32(m[4:], uint32(mtu))
	binary.BigEndian.PutUint16(m[2:], header.Checksum(m,
		header.PseudoSum6(h.Src, h.Dst, header.ProtoICMPv6, uint32(len(m)))))
}
