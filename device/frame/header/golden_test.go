package header

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"
)

// codec is the common interface of all fixed headers.
type codec interface {
	Decode([]byte) (int, error)
	Encode([]byte) int
}

// TestGoldenHeaders compares, in both directions, with literal bytes from the header diagrams of the specifications.
func TestGoldenHeaders(t *testing.T) {
	for name, c := range map[string]struct {
		bytes string
		want  codec
		empty func() codec
	}{
		"Ethernet": {"ffffffffffff 020000000001 0806",
			&Ethernet{Dst: Broadcast, Src: MAC{2, 0, 0, 0, 0, 1}, Type: TypeARP, VLAN: NoVLAN},
			func() codec { return new(Ethernet) }},
		"802.1Q": {"020000000002 020000000001 8100 b123 0800",
			&Ethernet{Dst: MAC{2, 0, 0, 0, 0, 2}, Src: MAC{2, 0, 0, 0, 0, 1}, Type: TypeIPv4, VLAN: 0x123, PCP: 5,
				DEI: true},
			func() codec { return new(Ethernet) }},
		"ARP": {"0001 0800 06 04 0002 020000000001 0a000001 020000000002 0a000002",
			&ARP{Op: ARPReply, SenderMAC: MAC{2, 0, 0, 0, 0, 1}, TargetMAC: MAC{2, 0, 0, 0, 0, 2},
				SenderIP: [4]byte{10, 0, 0, 1}, TargetIP: [4]byte{10, 0, 0, 2}},
			func() codec { return new(ARP) }},
		// A textbook example, checksum b861.
		"IPv4": {"45000073 00004000 4011b861 c0a80001 c0a800c7" + strings.Repeat("00", 0x73-20),
			&IPv4{TotalLen: 0x73, DontFrag: true, TTL: 64, Protocol: 17, Checksum: 0xb861, Src: [4]byte{192, 168, 0, 1},
				Dst: [4]byte{192, 168, 0, 199}},
			func() codec { return new(IPv4) }},
		"IPv6": {"668abcde 0002 11 3f 20010db8000000000000000000000001 20010db8000000000000000000000002 0000",
			&IPv6{TrafficClass: 0x68, FlowLabel: 0xabcde, PayloadLen: 2, NextHeader: ProtoUDP, HopLimit: 63,
				Src: [16]byte{0x20, 1, 0xd, 0xb8, 15: 1}, Dst: [16]byte{0x20, 1, 0xd, 0xb8, 15: 2}},
			func() codec { return new(IPv6) }},
		"UDP": {"c001 12b7 000a beef 0000", &UDP{SrcPort: 0xc001, DstPort: 4791, Length: 10, Checksum: 0xbeef},
			func() codec { return new(UDP) }},
		// RFC 7348, figure 1.
		"VXLAN": {"08000000 123456 00", &VXLAN{VNI: 0x123456},
			func() codec { return new(VXLAN) }},
	} {
		b := unhex(t, c.bytes)
		got := c.empty()
		n, err := got.Decode(b)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if a, w := deref(got), deref(c.want); a != w {
			t.Errorf("%s: decoded %+v, expected %+v", name, a, w)
		}
		out := make([]byte, n)
		if m := c.want.Encode(out); m != n || !bytes.Equal(out, b[:n]) {
			t.Errorf("%s: encoded %x, expected %x", name, out, b[:n])
		}
		for short := range n { // every truncation is detected
			if _, err := c.empty().Decode(b[:short]); !errors.Is(err, ErrShort) {
				t.Errorf("%s: %d of %d bytes: %v", name, short, n, err)
			}
		}
	}
}

// deref returns comparable values.
func deref(c codec) any {
	switch h := c.(type) {
	case *Ethernet:
		return *h
	case *ARP:
		return *h
	case *IPv4:
		return *h
	case *IPv6:
		return *h
	case *UDP:
		return *h
	case *VXLAN:
		return *h
	}
	panic("unknown codec")
}

func TestDecodersRefuse(t *testing.T) {
	ip4 := "45000014 00004000 4011b8c0 c0a80001 c0a800c7"
	for name, c := range map[string]struct {
		h     codec
		bytes string
		want  error
	}{
		"IPv4 version":   {new(IPv4), "65" + ip4[2:], ErrVersion},
		"IPv4 short IHL": {new(IPv4), "44" + ip4[2:], ErrLength},
		"IPv4 long IHL":  {new(IPv4), "46" + ip4[2:], ErrLength},
		"IPv4 total":     {new(IPv4), "45000015" + ip4[8:], ErrLength},
		"IPv4 total < h": {new(IPv4), "45000013" + ip4[8:], ErrLength},
		"IPv4 checksum":  {new(IPv4), strings.Replace(ip4, "b8c0", "b8c1", 1), ErrChecksum},
		"IPv6 version":   {new(IPv6), "4" + strings.Repeat("0", 79), ErrVersion},
		"IPv6 length":    {new(IPv6), "60000000 0001 11 40" + strings.Repeat("00", 32), ErrLength},
		"UDP length 7":   {new(UDP), "0001 0002 0007 0000", ErrLength},
		"UDP length 9":   {new(UDP), "0001 0002 0009 0000", ErrLength},
		"VXLAN no VNI":   {new(VXLAN), "00000000 12345600", ErrVersion},
		"ARP hardware":   {new(ARP), "0006" + "0800 06 04 0002 020000000001 0a000001 020000000002 0a000002", ErrType},
		"ARP protocol":   {new(ARP), "0001 86dd 06 04 0002 020000000001 0a000001 020000000002 0a000002", ErrType},
		"ARP lengths":    {new(ARP), "0001 0800 08 04 0002 020000000001 0a000001 020000000002 0a000002", ErrType},
	} {
		if _, err := c.h.Decode(unhex(t, c.bytes)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, expected %v", name, err, c.want)
		}
	}
}

// FuzzHeaders decodes, encodes, decodes again and compares, for each header.
func FuzzHeaders(f *testing.F) {
	f.Add(unhex(f, "45000014 00004000 4011b8c0 c0a80001 c0a800c7"))
	f.Add(unhex(f, "0001 0800 06 04 0002 020000000001 0a000001 020000000002 0a000002"))
	f.Add(unhex(f, "020000000002 020000000001 8100 b123 0800"))
	f.Add(make([]byte, 64))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, pair := range [][2]codec{
			{new(Ethernet), new(Ethernet)}, {new(ARP), new(ARP)}, {new(IPv4), new(IPv4)}, {new(IPv6), new(IPv6)},
			{new(UDP), new(UDP)}, {new(VXLAN), new(VXLAN)},
		} {
			n, err := pair[0].Decode(b)
			if err != nil {
				continue
			}
			if n > len(b) {
				t.Fatalf("%T: %d of %d bytes", pair[0], n, len(b))
			}
			if ip, ok := pair[0].(*IPv4); ok {
				if n != IPv4Len {
					continue // options are not encoded
				}
				ip.Checksum = 0
			}
			out := bytes.Clone(b)
			pair[0].Encode(out)
			if _, err := pair[1].Decode(out); err != nil {
				t.Fatalf("%T: again: %v", pair[0], err)
			}
			if ip, ok := pair[1].(*IPv4); ok {
				ip.Checksum = 0
			}
			if deref(pair[0]) != deref(pair[1]) {
				t.Fatalf("%+v, then %+v", pair[0], pair[1])
			}
		}
		var n, m Neighbor
		if len(b) < 32 {
			return
		}
		src, dst := [16]byte(b[:16]), [16]byte(b[16:32])
		msg := bytes.Clone(b[32:])
		if len(msg) > 4 { // otherwise no input has the right checksum
			msg[2], msg[3] = 0, 0
			binary.BigEndian.PutUint16(msg[2:], Checksum(msg, PseudoSum6(src, dst, ProtoICMPv6, uint32(len(msg)))))
		}
		if n.Decode(msg, src, dst) == nil {
			out := make([]byte, n.Len())
			n.Encode(out, src, dst)
			if err := m.Decode(out, src, dst); err != nil || n != m {
				t.Fatalf("%+v, then %+v, %v", n, m, err)
			}
		}
	})
}
