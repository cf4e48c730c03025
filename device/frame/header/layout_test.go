package header

import (
	"encoding/binary"
	"slices"
	"strings"
	"testing"
)

// Layer-3 packets, written out byte by byte; port 4791 is 0x12b7.
var (
	v4RoCE = []byte{0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0xc0, 0, 0x12, 0xb7, 0, 8, 0,
		0}
	v4Other = []byte{0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0x12, 0xb7, 0, 53, 0, 8, 0, 0}
	v6RoCE  = slices.Concat([]byte{0x60, 0, 0, 0, 0, 8, 17, 64}, make([]byte, 32), []byte{0xc0, 0, 0x12, 0xb7, 0, 8, 0, 0})
)

func isRoCE(f []byte) bool { return Locate(f).Is(IsRoCE) }

func eth(typ uint16, p []byte, tags ...uint16) []byte {
	f := make([]byte, 12)
	f[0], f[6] = 2, 2
	for _, t := range tags {
		f = append(binary.BigEndian.AppendUint16(f, t), 0, 7)
	}
	return append(binary.BigEndian.AppendUint16(f, typ), p...)
}

// with returns a copy of p with some bytes changed: offset, value, offset, value ...
func with(p []byte, changes ...int) []byte {
	p = slices.Clone(p)
	for i := 0; i < len(changes); i += 2 {
		p[changes[i]] = byte(changes[i+1])
	}
	return p
}

// v6Headers puts extension headers between an IPv6 header and UDP to port 4791.
func v6Headers(first byte, headers ...[]byte) []byte {
	p := with(v6RoCE[:40], 6, int(first))
	return slices.Concat(p, slices.Concat(headers...), v6RoCE[40:])
}

func TestLocateRoCE(t *testing.T) {
	options := slices.Concat([]byte{0x46}, v4RoCE[1:20], []byte{1, 1, 1, 1}, v4RoCE[20:])
	for _, c := range []struct {
		name string
		f    []byte
		want bool
	}{
		{"v1", eth(0x8915, nil), true},
		{"v1 tagged", eth(0x8915, nil, 0x8100), true},
		{"v2 IPv4", eth(0x800, v4RoCE), true},
		{"v2 IPv4 tagged", eth(0x800, v4RoCE, 0x8100), true},
		{"v2 IPv4 double tagged", eth(0x800, v4RoCE, 0x88a8, 0x8100), true},
		{"three tags", eth(0x800, v4RoCE, 0x88a8, 0x8100, 0x8100), false},
		{"v2 IPv4 with options", eth(0x800, options), true},
		{"v2 IPv6", eth(0x86dd, v6RoCE), true},
		{"source port only", eth(0x800, v4Other), false},
		{"TCP to 4791", eth(0x800, with(v4RoCE, 9, 6)), false},
		{"first fragment", eth(0x800, with(v4RoCE, 6, 0x20)), true},
		{"later fragment", eth(0x800, with(v4RoCE, 6, 0x20, 7, 1)), false},
		{"last fragment", eth(0x800, with(v4RoCE, 6, 0x00, 7, 1)), false},
		{"IPv4 type, version 6", eth(0x800, with(v4RoCE, 0, 0x65)), false},
		{"header length below 20", eth(0x800, with(v4RoCE, 0, 0x44)), false},
		{"header length beyond the frame", eth(0x800, with(v4RoCE, 0, 0x4f)), false},
		{"UDP header cut off", eth(0x800, v4RoCE[:27]), false},
		{"IPv6 type, version 4", eth(0x86dd, with(v6RoCE, 0, 0x45)), false},
		{"IPv6 UDP header cut off", eth(0x86dd, v6RoCE[:47]), false},
		{"IPv6 hop-by-hop", eth(0x86dd, v6Headers(0, []byte{17, 0, 0, 0, 0, 0, 0, 0})), true},
		{"IPv6 four headers", eth(0x86dd, v6Headers(0, []byte{60, 0, 0, 0, 0, 0, 0, 0},
			[]byte{43, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, []byte{60, 0, 0, 0, 0, 0, 0, 0},
			[]byte{17, 0, 0, 0, 0, 0, 0, 0})), true},
		{"IPv6 five headers", eth(0x86dd, v6Headers(60, slices.Repeat([]byte{60, 0, 0, 0, 0, 0, 0, 0}, 4),
			[]byte{17, 0, 0, 0, 0, 0, 0, 0})), false},
		{"IPv6 first fragment", eth(0x86dd, v6Headers(44, []byte{17, 0, 0, 1, 0, 0, 0, 0})), true},
		{"IPv6 later fragment", eth(0x86dd, v6Headers(44, []byte{17, 0, 0, 9, 0, 0, 0, 0})), false},
		{"IPv6 header beyond the frame", eth(0x86dd, v6Headers(60, []byte{17, 255, 0, 0, 0, 0, 0, 0})), false},
		{"IPv6 ESP", eth(0x86dd, v6Headers(50, []byte{17, 0, 0, 0, 0, 0, 0, 0})), false},
		{"ARP", eth(0x806, v4RoCE), false},
		{"no type", make([]byte, 13), false},
		{"tag cut off", eth(0x8100, []byte{0, 1}), false},
	} {
		if got := isRoCE(c.f); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestLocate(t *testing.T) {
	ext := v6Headers(0, []byte{6, 0, 0, 0, 0, 0, 0, 0})
	for _, c := range []struct {
		name string
		f    []byte
		want Layout
	}{
		{"13 bytes", make([]byte, 13), Layout{}},
		{"ARP", eth(TypeARP, make([]byte, 28)), Layout{Type: TypeARP, L3: 14}},
		{"IPv4", eth(TypeIPv4, v4Other), Layout{Type: TypeIPv4, L3: 14, L4: 34, Proto: ProtoUDP}},
		{"RoCE v2", eth(TypeIPv4, v4RoCE, TypeVLAN), Layout{Type: TypeIPv4, VLAN: 7, L3: 18, L4: 38, Proto: ProtoUDP,
			Flags: IsRoCE}},
		{"two tags", eth(TypeIPv6, v6RoCE, TypeQinQ, TypeVLAN), Layout{Type: TypeIPv6, VLAN: 7, L3: 22, L4: 62,
			Proto: ProtoUDP, Flags: IsIPv6 | IsRoCE}},
		{"three tags", eth(TypeIPv4, v4RoCE, TypeQinQ, TypeVLAN, TypeVLAN), Layout{Type: TypeVLAN, VLAN: 7, L3: 22}},
		{"ends in a tag", eth(TypeVLAN, []byte{0, 9}), Layout{Type: TypeVLAN, L3: 14}},
		{"extension header", eth(TypeIPv6, ext), Layout{Type: TypeIPv6, L3: 14, L4: 62, Proto: ProtoTCP,
			Flags: IsIPv6 | IsExtended}},
		{"later fragment", eth(TypeIPv4, with(v4RoCE, 7, 1)), Layout{Type: TypeIPv4, L3: 14, L4: 34, Proto: ProtoUDP,
			Flags: IsFragment | IsLater}},
		{"later fragment, IPv6", eth(TypeIPv6, v6Headers(44, []byte{17, 0, 0, 9, 0, 0, 0, 0})), Layout{Type: TypeIPv6,
			L3: 14, L4: 54, Proto: 44, Flags: IsIPv6 | IsFragment | IsLater | IsExtended}},
		{"IPv4 of 19 bytes", eth(TypeIPv4, v4RoCE[:19]), Layout{Type: TypeIPv4, L3: 14}},
		{"IPv4, header length 16", eth(TypeIPv4, with(v4RoCE, 0, 0x44)), Layout{Type: TypeIPv4, L3: 14}},
	} {
		if got := *Locate(c.f); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

func FuzzLocate(f *testing.F) {
	f.Add(eth(0x800, v4RoCE))
	f.Add(eth(0x86dd, v6Headers(0, []byte{17, 0, 0, 0, 0, 0, 0, 0}), 0x8100))
	f.Add(eth(0x8915, nil))
	f.Fuzz(func(t *testing.T, p []byte) {
		l := Locate(p)
		if l.L3 != 0 && (int(l.L3) > len(p) || l.L4 != 0 && l.L4 < l.L3+IPv4Len) || l.L3 == 0 && *l != (Layout{}) {
			t.Fatalf("%x: %+v", p, l)
		}
		if !l.Is(IsRoCE) {
			return
		}
		// Whatever was taken for RoCE names it somewhere, and stays RoCE when more follows.
		if s := string(p); !strings.Contains(s, "\x89\x15") && !strings.Contains(s, "\x12\xb7") {
			t.Errorf("%x", p)
		}
		if !isRoCE(append(p[:len(p):len(p)], 1, 2, 3)) {
			t.Errorf("%x is RoCE only without a trailer", p)
		}
	})
}

func BenchmarkLocate(b *testing.B) {
	f := eth(0x800, v4RoCE)
	b.ReportAllocs()
	for b.Loop() {
		Locate(f)
	}
}
