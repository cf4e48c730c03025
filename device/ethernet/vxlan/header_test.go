package vxlan

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/vnicd/vnicd/device/frame/header"
)

func TestHeaderGolden(t *testing.T) {
	var h [HeaderLen]byte
	putHeader(&h, 0xabcdef)
	if got := hex.EncodeToString(h[:]); got != "08000000abcdef00" { // RFC 7348, section 5
		t.Errorf("header %s", got)
	}
	for _, c := range []struct {
		in  string
		vni uint32
		ok  bool
	}{
		{"08000000abcdef00", 0xabcdef, true},
		{"0800000000000100ffff", 1, true},
		{"ffffffffabcdefff", 0xabcdef, true}, // reserved bits are ignored
		{"00000000abcdef00", 0, false},
		{"f7000000abcdef00", 0, false}, // every bit but I
		{"08000000abcdef", 0, false},
		{"", 0, false},
	} {
		b, err := hex.DecodeString(c.in)
		if err != nil {
			t.Fatal(err)
		}
		if vni, ok := parseHeader(b); vni != c.vni || ok != c.ok {
			t.Errorf("%s: %x %v", c.in, vni, ok)
		}
	}
}

func FuzzHeader(f *testing.F) {
	f.Add([]byte{8, 0, 0, 0, 1, 2, 3, 0})
	f.Fuzz(func(t *testing.T, p []byte) {
		vni, ok := parseHeader(p)
		if !ok {
			return
		}
		var h [HeaderLen]byte
		putHeader(&h, vni)
		if again, ok := parseHeader(h[:]); !ok || again != vni {
			t.Errorf("%x: %x, then %x", p, vni, again)
		}
	})
}

// ip4 makes an Ethernet frame with an IPv4 packet and its header checksum.
func ip4(tos uint8, src, dst byte, proto uint8, sport, dport uint16) []byte {
	f := make([]byte, 14+20+8)
	f[0], f[6] = 2, 2
	binary.BigEndian.PutUint16(f[12:], header.TypeIPv4)
	p := f[14:]
	p[0], p[1], p[3], p[8], p[9] = 0x45, tos, 28, 64, proto
	p[12], p[15], p[16], p[19] = 10, src, 10, dst
	binary.BigEndian.PutUint16(p[20:], sport)
	binary.BigEndian.PutUint16(p[22:], dport)
	binary.BigEndian.PutUint16(p[10:], ^sum16(p[:20]))
	return f
}

func ip6(tc uint8, src, dst byte, proto uint8, sport, dport uint16) []byte {
	f := make([]byte, 14+40+8)
	f[0], f[6] = 2, 2
	binary.BigEndian.PutUint16(f[12:], header.TypeIPv6)
	p := f[14:]
	p[0], p[1], p[5], p[6], p[7] = 0x60|tc>>4, tc<<4, 8, proto, 64
	p[8], p[23], p[24], p[39] = 0xfd, src, 0xfd, dst
	binary.BigEndian.PutUint16(p[40:], sport)
	binary.BigEndian.PutUint16(p[42:], dport)
	return f
}

// sum16 is the sum of the Internet checksum, in a plain implementation.
func sum16(p []byte) uint16 {
	var s uint32
	for i := 0; i+1 < len(p); i += 2 {
		s += uint32(p[i])<<8 | uint32(p[i+1])
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

func tagged(f []byte) []byte {
	return slices.Concat(f[:12], []byte{0x81, 0, 0, 5}, f[12:])
}

func TestClassify(t *testing.T) {
	base := ip4(0, 1, 2, header.ProtoUDP, 50000, header.PortRoCE)
	same := flowOf(base).hash
	for name, f := range map[string][]byte{
		"another payload": append(slices.Clone(base), 1, 2, 3),
		"tos":             ip4(2, 1, 2, header.ProtoUDP, 50000, header.PortRoCE),
		"tag":             tagged(base),
	} {
		if flowOf(f).hash != same {
			t.Errorf("%s changes the flow", name)
		}
	}
	fragment := ip4(0, 1, 2, header.ProtoUDP, 50000, header.PortRoCE)
	fragment[20] = 0x20
	for name, f := range map[string][]byte{
		"source":   ip4(0, 3, 2, header.ProtoUDP, 50000, header.PortRoCE),
		"dest":     ip4(0, 1, 3, header.ProtoUDP, 50000, header.PortRoCE),
		"port":     ip4(0, 1, 2, header.ProtoUDP, 50001, header.PortRoCE),
		"proto":    ip4(0, 1, 2, header.ProtoTCP, 50000, header.PortRoCE),
		"v6":       ip6(0, 1, 2, header.ProtoUDP, 50000, header.PortRoCE),
		"fragment": fragment,
	} {
		if flowOf(f).hash == same {
			t.Errorf("%s does not change the flow", name)
		}
	}
	// All fragments of a packet take one path.
	last := ip4(0, 1, 2, header.ProtoUDP, 1111, 2222)
	last[20], last[21] = 0, 1
	if flowOf(fragment).hash != flowOf(last).hash {
		t.Error("fragments of one packet differ")
	}
	for _, c := range []struct {
		f    []byte
		roce bool
		tos  uint8
	}{
		{base, true, 0}, {tagged(base), true, 0}, {ip6(0x6a, 1, 2, header.ProtoUDP, 1, header.PortRoCE), true, 0x6a},
		{ip4(0x6a, 1, 2, header.ProtoUDP, header.PortRoCE, 1), false, 0x6a},
		{ip4(3, 1, 2, header.ProtoTCP, 1, header.PortRoCE), false, 3},
		{fragment, false, 0},
	} {
		if fl := flowOf(c.f); fl.roce != c.roce || fl.tos != c.tos {
			t.Errorf("%x: %+v", c.f, fl)
		}
	}
	v1 := slices.Concat(base[:12], []byte{0x89, 0x15}, ip6(0, 1, 2, 27, 0, 0)[14:])
	v1b := slices.Concat(base[:12], []byte{0x89, 0x15}, ip6(0, 1, 3, 27, 0, 0)[14:])
	if a, b := flowOf(v1), flowOf(v1b); !a.roce || a.hash == b.hash {
		t.Errorf("RoCE v1: %+v %+v", a, b)
	}
}

// The flows of many QPs spread over all source ports.
func TestHashSpread(t *testing.T) {
	var n [DefaultSourcePorts]int
	const flows = 16000
	for i := range flows {
		h := flowOf(ip4(0, 1, 2, header.ProtoUDP, uint16(0xc000+i), header.PortRoCE)).hash
		n[uint64(h)*DefaultSourcePorts>>32]++
	}
	for i, k := range n {
		if k < flows/DefaultSourcePorts/2 || k > flows/DefaultSourcePorts*2 {
			t.Errorf("socket %d has %d of %d flows", i, k, flows)
		}
	}
}

// RFC 6040, figure 4: inner codepoint by outer codepoint; -1 = drop.
func TestDecapECN(t *testing.T) {
	const notECT, ect1, ect0, ce = 0, 1, 2, 3
	for _, c := range []struct{ inner, outer, want int }{
		{notECT, notECT, notECT}, {notECT, ect0, notECT}, {notECT, ect1, notECT}, {notECT, ce, -1},
		{ect0, notECT, ect0}, {ect0, ect0, ect0}, {ect0, ect1, ect1}, {ect0, ce, ce},
		{ect1, notECT, ect1}, {ect1, ect0, ect1}, {ect1, ect1, ect1}, {ect1, ce, ce},
		{ce, notECT, ce}, {ce, ect0, ce}, {ce, ect1, ce}, {ce, ce, ce},
	} {
		for _, dscp := range []uint8{0, 26, 63} {
			for name, f := range map[string][]byte{
				"IPv4": ip4(dscp<<2|uint8(c.inner), 1, 2, header.ProtoUDP, 1, 2),
				"IPv6": ip6(dscp<<2|uint8(c.inner), 1, 2, header.ProtoUDP, 1, 2),
				"VLAN": tagged(ip4(dscp<<2|uint8(c.inner), 1, 2, header.ProtoUDP, 1, 2)),
			} {
				ok := decapECN(f, dscp<<2|uint8(c.outer))
				if ok != (c.want >= 0) {
					t.Errorf("%s inner %d outer %d: kept %v", name, c.inner, c.outer, ok)
				}
				if !ok {
					continue
				}
				fl := flowOf(f)
				if fl.tos != dscp<<2|uint8(c.want) {
					t.Errorf("%s inner %d outer %d: traffic class %#x", name, c.inner, c.outer, fl.tos)
				}
				if f[fl.ip]>>4 == 4 && sum16(f[fl.ip:fl.ip+20]) != 0xffff {
					t.Errorf("%s inner %d outer %d: header checksum is wrong", name, c.inner, c.outer)
				}
			}
		}
	}
	if arp := make([]byte, 60); !decapECN(arp, 3) {
		t.Error("a frame without IP was dropped for congestion")
	}
}

func FuzzInner(f *testing.F) {
	f.Add(ip4(2, 1, 2, header.ProtoUDP, 50000, header.PortRoCE), uint8(3))
	f.Add(tagged(ip6(1, 1, 2, header.ProtoTCP, 5, 6)), uint8(0))
	f.Fuzz(func(t *testing.T, p []byte, outer uint8) {
		before := flowOf(p)
		if before.ip >= len(p) && before.ip != 0 {
			t.Fatalf("IP header at %d of %d", before.ip, len(p))
		}
		if !decapECN(p, outer) {
			return
		}
		after := flowOf(p)
		if after.hash != before.hash || after.tos>>2 != before.tos>>2 || after.roce != before.roce {
			t.Errorf("decapsulation changed more than ECN: %+v, %+v", before, after)
		}
	})
}

func TestOuterTOS(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 100 {
		inner := uint8(rng.Uint32())
		if got := outerTOS(flow{tos: inner, roce: true}, 26); got != 26<<2|inner&3 {
			t.Errorf("RoCE %#x: %#x", inner, got)
		}
		if got := outerTOS(flow{tos: inner}, 26); got != inner&3 {
			t.Errorf("other %#x: %#x", inner, got)
		}
	}
}

func BenchmarkClassify(b *testing.B) {
	f := ip4(0, 1, 2, header.ProtoUDP, 50000, header.PortRoCE)
	b.ReportAllocs()
	for b.Loop() {
		flowOf(f)
	}
}

func flowOf(f []byte) flow { return classify(f, header.Locate(f)) }
