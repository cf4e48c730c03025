package vswitch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// arp makes an ARP frame; the target MAC is that of dst for replies.
func arp(op uint16, dst, src MAC, sender, spa string, tpa string) []byte {
	m := header.ARP{Op: op, SenderMAC: header.MAC(src), SenderIP: addr(spa).As4(), TargetIP: addr(tpa).As4()}
	if sender != "" {
		x, _ := ParseMAC(sender)
		m.SenderMAC = header.MAC(x)
	}
	if op == header.ARPReply {
		m.TargetMAC = header.MAC(dst)
	}
	b := make([]byte, header.ARPLen)
	m.Encode(b)
	return slices.Concat(dst[:], src[:], []byte{8, 6}, b)
}

func who(src MAC, spa, tpa string) []byte {
	return arp(header.ARPRequest, broadcast, src, "", spa, tpa)
}

// nd makes a neighbour message; target and option are the message's.
func nd(dst, src MAC, from, to string, m header.Neighbor) []byte {
	a, b := addr(from).As16(), addr(to).As16()
	p := make([]byte, header.IPv6Len+m.Len())
	h := header.IPv6{PayloadLen: uint16(m.Len()), NextHeader: header.ProtoICMPv6, HopLimit: 255, Src: a, Dst: b}
	h.Encode(p)
	m.Encode(p[header.IPv6Len:], a, b)
	return slices.Concat(dst[:], src[:], []byte{0x86, 0xdd}, p)
}

func solicit(src MAC, from, target string) []byte {
	t := addr(target).As16()
	group := ip{0: 0xff, 1: 2, 11: 1, 12: 0xff, 13: t[13], 14: t[14], 15: t[15]}
	m := header.Neighbor{Target: t, Link: header.MAC(src), HasLink: from != "::"}
	return nd(MAC{0x33, 0x33, 0xff, t[13], t[14], t[15]}, src, from, netip.AddrFrom16(group).String(), m)
}

func advert(dst, src MAC, target, to string, router bool) []byte {
	return nd(dst, src, target, to, header.Neighbor{Advert: true, Router: router, Solicited: true, Override: true,
		Target: addr(target).As16(), Link: header.MAC(src), HasLink: true})
}

func withPool(t testing.TB) Config {
	p, err := frame.NewPool(frame.Config{Count: 16})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if n := p.InUse(); n != 0 {
			t.Errorf("%d buffers of the switch's own leaked", n)
		}
	})
	return Config{Pool: p}
}

// Requests for known addresses are answered at the requesting port, and no other port gets them.
func TestARPSuppression(t *testing.T) {
	for _, vlan := range []uint16{0, 100} {
		b := newBench(t, withPool(t))
		vm := b.port(PortConfig{Name: "vm", Kind: KindVM, MACs: []MAC{mac(1)}, IPs: []netip.Addr{addr("10.0.0.1")}})
		tap, vtep := b.port(PortConfig{Name: "tap", Kind: KindTAP}), b.port(PortConfig{Name: "vtep", Kind: KindVTEP})
		in := func(p *recPort, f []byte) { b.input(p.att, tagged(vlan, f), Source{}) }
		check := func(what string, wantVM, wantTAP, wantVTEP int) {
			t.Helper()
			if x, y, z := len(vm.got), len(tap.got), len(vtep.got); x != wantVM || y != wantTAP || z != wantVTEP {
				t.Errorf("VLAN %d: %s: vm %d tap %d vtep %d frames, want %d %d %d", vlan, what, x, y, z, wantVM, wantTAP, wantVTEP)
			}
			vm.got, tap.got, vtep.got = nil, nil, nil
		}
		in(tap, who(mac(2), "10.0.0.2", "10.0.0.1"))
		if len(tap.got) == 1 {
			want := tagged(vlan, arp(header.ARPReply, mac(2), mac(1), "", "10.0.0.1", "10.0.0.2"))
			if g := tap.got[0].frame; g != string(want) {
				t.Errorf("answer\n%x, want\n%x", g, want)
			}
		}
		check("a configured address", 0, 1, 0)
		in(vm, who(mac(1), "10.0.0.1", "10.0.0.2"))
		check("an address snooped from a request", 1, 0, 0)
		in(vm, who(mac(1), "10.0.0.1", "10.0.0.3"))
		check("unknown", 0, 1, 1)
		b.input(vtep.att, tagged(vlan, arp(header.ARPReply, mac(1), mac(3), "", "10.0.0.3", "10.0.0.1")), Source{Remote: 4})
		check("the answer", 1, 0, 0)
		in(vm, who(mac(1), "10.0.0.1", "10.0.0.3"))
		check("snooped from an answer out of a tunnel", 1, 0, 0)
		in(vtep, who(mac(4), "10.0.0.4", "10.0.0.1"))
		check("requests from tunnels are not answered", 1, 1, 0)
		in(tap, who(mac(5), "10.0.0.5", "10.0.0.2"))
		check("the target is behind the requesting port", 1, 0, 1)
		in(tap, who(mac(2), "10.0.0.2", "10.0.0.2"))
		check("gratuitous", 1, 0, 1)
		in(tap, arp(header.ARPReply, broadcast, mac(2), "", "10.0.0.2", "10.0.0.2"))
		check("gratuitous, as an answer", 1, 0, 1)
		in(vm, who(mac(1), "0.0.0.0", "10.0.0.2"))
		check("a probe for a snooped address", 0, 1, 1)
		in(tap, who(mac(2), "0.0.0.0", "10.0.0.1"))
		check("a probe for a configured address", 0, 1, 0)
		if n := vm.att.Counters.Totals().Answered; n != 2 {
			t.Errorf("%d answers to the VM counted", n)
		}
		// An address that was removed is requested again.
		b.net.FlushRemote(vtep.att, 4)
		in(vm, who(mac(1), "10.0.0.1", "10.0.0.3"))
		check("its MAC was removed", 0, 1, 1)
		// The MAC is refreshed, the IP address is not.
		for range 8 {
			b.advance(time.Minute)
			in(tap, buildFrame(broadcast, mac(2), ""))
		}
		vm.got, vtep.got = nil, nil
		in(vm, who(mac(1), "10.0.0.1", "10.0.0.2"))
		check("too old", 0, 1, 1)
		// It moved to another MAC: the announcement takes effect at once.
		in(tap, who(mac(6), "10.0.0.2", "10.0.0.2"))
		vm.got, vtep.got = nil, nil
		in(vm, who(mac(1), "10.0.0.1", "10.0.0.2"))
		if len(vm.got) != 1 || []byte(vm.got[0].frame)[11] != 6 {
			t.Errorf("after the move: %+v", vm.got)
		}
		vm.att.Close()
		tap.got = nil
		in(tap, who(mac(2), "10.0.0.2", "10.0.0.1"))
		if len(tap.got) != 0 {
			t.Error("answered for a closed port's address")
		}
	}
}

func TestNDSuppression(t *testing.T) {
	b := newBench(t, withPool(t))
	vm := b.port(PortConfig{Name: "vm", Kind: KindVM, MACs: []MAC{mac(1)}, IPs: []netip.Addr{addr("fd00::1")}})
	tap, vtep := b.port(PortConfig{Name: "tap", Kind: KindTAP}), b.port(PortConfig{Name: "vtep", Kind: KindVTEP})
	take := func() (n [3]int) {
		n = [3]int{len(vm.got), len(tap.got), len(vtep.got)}
		vm.got, tap.got, vtep.got = nil, nil, nil
		return n
	}
	b.input(tap.att, solicit(mac(2), "fd00::2", "fd00::1"), Source{})
	if len(tap.got) != 1 {
		t.Fatalf("%d answers", len(tap.got))
	}
	want := advert(mac(2), mac(1), "fd00::1", "fd00::2", false)
	if tap.got[0].frame != string(want) {
		t.Errorf("answer\n%x, want\n%x", tap.got[0].frame, want)
	}
	if n := take(); n != [3]int{0, 1, 0} {
		t.Errorf("configured address: %v", n)
	}
	b.input(vm.att, solicit(mac(1), "fd00::1", "fd00::2"), Source{})
	if n := take(); n != [3]int{0, 1, 1} {
		t.Errorf("answered for a node known only from a solicitation, which says nothing of routers: %v", n)
	}
	b.input(tap.att, advert(mac(1), mac(2), "fd00::2", "fd00::1", true), Source{})
	if n := take(); n != [3]int{1, 0, 0} {
		t.Errorf("advertisement: %v", n)
	}
	b.input(vm.att, solicit(mac(1), "fd00::1", "fd00::2"), Source{})
	if len(vm.got) != 1 || vm.got[0].frame != string(advert(mac(1), mac(2), "fd00::2", "fd00::1", true)) {
		t.Errorf("answer for a router: %+v", vm.got)
	}
	take()
	b.input(tap.att, solicit(mac(2), "::", "fd00::1"), Source{})
	to := MAC{0x33, 0x33, 0, 0, 0, 1}
	dad := nd(to, mac(1), "fd00::1", "ff02::1", header.Neighbor{Advert: true, Override: true,
		Target: addr("fd00::1").As16(), Link: header.MAC(mac(1)), HasLink: true})
	if len(tap.got) != 1 || tap.got[0].frame != string(dad) {
		t.Errorf("duplicate address detection of a configured address: %+v", tap.got)
	}
	take()
	b.input(vm.att, solicit(mac(1), "::", "fd00::2"), Source{})
	if n := take(); n != [3]int{0, 1, 1} {
		t.Errorf("duplicate address detection of a snooped address: %v", n)
	}
	// A malformed message passes, but nothing is learnt from it and it is not answered.
	bad := solicit(mac(2), "fd00::2", "fd00::1")
	bad[len(bad)-1] ^= 1
	b.input(tap.att, bad, Source{})
	if n := take(); n != [3]int{1, 0, 1} {
		t.Errorf("wrong checksum: %v", n)
	}
	far := solicit(mac(2), "fd00::2", "fd00::1")
	far[HeaderLen+7] = 64
	b.input(tap.att, far, Source{})
	if n := take(); n != [3]int{1, 0, 1} {
		t.Errorf("hop limit: %v", n)
	}
}

// Addresses that a port may use as its own, in every header with an address.
func TestGuard(t *testing.T) {
	b := newBench(t, withPool(t))
	strict := b.port(PortConfig{Name: "strict", Kind: KindVM, MACs: []MAC{mac(1)},
		IPs: []netip.Addr{addr("10.0.0.1"), addr("fd00::1")}})
	own := b.port(PortConfig{Name: "own", Kind: KindVM, MACs: []MAC{mac(2)}, IPs: []netip.Addr{addr("fe80::2")}})
	free := b.port(PortConfig{Name: "free", Kind: KindVM, MACs: []MAC{mac(3)}})
	tap := b.port(PortConfig{Name: "tap", Kind: KindTAP})
	v4 := func(src string, proto byte, rest ...byte) []byte {
		h := header.IPv4{TotalLen: uint16(20 + len(rest)), TTL: 64, Protocol: proto, Src: addr(src).As4(),
			Dst: [4]byte{10, 0, 0, 9}}
		p := make([]byte, 20)
		h.Encode(p)
		return append(p, rest...)
	}
	v6 := func(src string, next byte, rest ...byte) []byte {
		h := header.IPv6{PayloadLen: uint16(len(rest)), NextHeader: next, HopLimit: 255, Src: addr(src).As16(),
			Dst: addr("fd00::9").As16()}
		p := make([]byte, 40)
		h.Encode(p)
		return append(p, rest...)
	}
	eth := func(src int, typ uint16, p []byte) []byte {
		d, s := mac(99), mac(src)
		return append(binary.BigEndian.AppendUint16(slices.Concat(d[:], s[:]), typ), p...)
	}
	dhcp := []byte{0, 68, 0, 67, 0, 8, 0, 0}
	for _, c := range []struct {
		name string
		p    *recPort
		f    []byte
		want Reason // NumReasons = passes
	}{
		{"IPv4", strict, eth(1, 0x800, v4("10.0.0.1", 17)), NumReasons},
		{"IPv4, another's", strict, eth(1, 0x800, v4("10.0.0.2", 17)), SpoofedIP},
		{"IPv4, another's, tagged", strict, tagged(7, eth(1, 0x800, v4("10.0.0.2", 17))), SpoofedIP},
		{"IPv4, another's, two tags", strict, tagged(7, tagged(8, eth(1, 0x800, v4("10.0.0.2", 17)))), SpoofedIP},
		{"IPv4, own, two tags", strict, tagged(7, tagged(8, eth(1, 0x800, v4("10.0.0.1", 17)))), NumReasons},
		{"three tags", strict, tagged(7, tagged(8, tagged(9, eth(1, 0x800, v4("10.0.0.1", 17))))), SpoofedIP},
		{"truncated IPv4", strict, eth(1, 0x800, v4("10.0.0.1", 17)[:19]), SpoofedIP},
		{"IPv4 of another version", strict, eth(1, 0x800, v6("fd00::1", 17)), SpoofedIP},
		{"later fragment", strict, eth(1, 0x800, with(v4("10.0.0.1", 17), 6, 0x20, 7, 9)), NumReasons},
		{"DHCP", strict, eth(1, 0x800, v4("0.0.0.0", 17, dhcp...)), NumReasons},
		{"from 0.0.0.0", strict, eth(1, 0x800, v4("0.0.0.0", 17, 0, 68, 0, 53, 0, 8, 0, 0)), SpoofedIP},
		{"from 0.0.0.0, a fragment", strict, eth(1, 0x800, with(v4("0.0.0.0", 17, dhcp...), 7, 1)), SpoofedIP},
		{"IGMP", strict, eth(1, 0x800, v4("0.0.0.0", 2)), NumReasons},
		{"IPv6", strict, eth(1, 0x86dd, v6("fd00::1", 17)), NumReasons},
		{"IPv6, another's", strict, eth(1, 0x86dd, v6("fd00::2", 17)), SpoofedIP},
		{"IPv6 link-local", strict, eth(1, 0x86dd, v6("fe80::77", 17)), NumReasons},
		{"IPv6 unspecified", strict, eth(1, 0x86dd, v6("::", 17)), SpoofedIP},
		{"router solicitation", strict, eth(1, 0x86dd, v6("::", 58, 133, 0, 0, 0, 0, 0, 0, 0)), NumReasons},
		{"MLD behind hop-by-hop", strict, eth(1, 0x86dd, v6("::", 0, 58, 0, 5, 2, 0, 0, 1, 0, 143, 0, 0, 0)), NumReasons},
		{"other listed link-local", own, eth(2, 0x86dd, v6("fe80::3", 17)), SpoofedIP},
		{"listed link-local", own, eth(2, 0x86dd, v6("fe80::2", 17)), NumReasons},
		{"own has no IPv4", own, eth(2, 0x800, v4("10.0.0.2", 17)), SpoofedIP},
		{"RoCE v1", strict, eth(1, 0x8915, v6("::ffff:10.0.0.1", 0x1b)), NumReasons},
		{"RoCE v1, another's GID", strict, eth(1, 0x8915, v6("::ffff:10.0.0.2", 0x1b)), SpoofedIP},
		{"truncated RoCE v1", strict, eth(1, 0x8915, v6("::ffff:10.0.0.1", 0x1b)[:39]), SpoofedIP},
		{"no IP at all", strict, eth(1, 0x88b5, []byte("x")), NumReasons},
		{"ARP", strict, arp(1, broadcast, mac(1), "", "10.0.0.1", "10.0.0.9"), NumReasons},
		{"ARP probe", strict, arp(1, broadcast, mac(1), "", "0.0.0.0", "10.0.0.9"), NumReasons},
		{"ARP, another's IP", strict, arp(2, mac(99), mac(1), "", "10.0.0.7", "10.0.0.9"), SpoofedIP},
		{"ARP, another's MAC", strict, arp(2, mac(99), mac(1), mac(7).String(), "10.0.0.1", "10.0.0.9"), SpoofedNeighbour},
		{"ARP, another's MAC, any IP", free, arp(2, mac(99), mac(3), mac(7).String(), "10.0.0.3", "10.0.0.9"),
			SpoofedNeighbour},
		{"ARP, a configured IP, from a VM", free, arp(2, mac(99), mac(3), "", "10.0.0.1", "10.0.0.9"), SpoofedNeighbour},
		{"ARP, a configured IP, from the host", tap, arp(1, broadcast, mac(8), "", "10.0.0.1", "10.0.0.1"), SpoofedNeighbour},
		{"advertisement", strict, advert(mac(99), mac(1), "fd00::1", "fd00::9", false), NumReasons},
		{"advertisement of another's IP", strict, nd(mac(99), mac(1), "fe80::1", "fd00::9",
			header.Neighbor{Advert: true, Target: addr("fd00::7").As16()}), SpoofedNeighbour},
		{"advertisement of another's MAC", free, nd(mac(99), mac(3), "fe80::1", "fd00::9",
			header.Neighbor{Advert: true, Target: addr("fd00::7").As16(), Link: header.MAC(mac(7)), HasLink: true}),
			SpoofedNeighbour},
		{"advertisement of a configured IP, by the host", tap, advert(mac(99), mac(8), "fd00::1", "fd00::9", false),
			SpoofedNeighbour},
		{"solicitation with a configured IP, by the host", tap, solicit(mac(8), "fd00::1", "fd00::9"), SpoofedNeighbour},
	} {
		before, others := c.p.att.Counters.Totals(), 0
		for _, p := range []*recPort{strict, own, free, tap} {
			p.got = nil
		}
		b.input(c.p.att, c.f, Source{})
		for _, p := range []*recPort{strict, own, free, tap} {
			others += len(p.got)
		}
		if passed := others > 0; passed != (c.want == NumReasons) {
			t.Errorf("%s: passed %v, drops %v", c.name, passed, c.p.att.Counters.Totals().Drops)
		} else if !passed && c.p.att.Counters.Dropped(c.want) != before.Drops[c.want.String()]+1 {
			t.Errorf("%s: dropped, not as %v: %v before %v", c.name, c.want, c.p.att.Counters.Totals().Drops, before.Drops)
		}
	}
	for _, pc := range []PortConfig{
		{Name: "twin", MACs: []MAC{mac(50)}, IPs: []netip.Addr{addr("10.0.0.1")}},
		{MACs: []MAC{mac(50), mac(51)}, IPs: []netip.Addr{addr("10.0.0.50")}},
		{IPs: []netip.Addr{addr("10.0.0.50")}},
		{MACs: []MAC{mac(50)}, IPs: []netip.Addr{addr("224.0.0.1")}},
		{MACs: []MAC{mac(50)}, IPs: []netip.Addr{addr("0.0.0.0")}},
		{MACs: []MAC{mac(50)}, IPs: slices.Repeat([]netip.Addr{addr("10.0.0.50")}, MaxIPs+1)},
	} {
		_, err := b.net.Attach(&recPort{}, pc)
		if err == nil || pc.Name == "twin" && !errors.Is(err, ErrIPInUse) {
			t.Errorf("%+v: %v", pc, err)
		}
	}
	if _, ok := b.net.Lookup(mac(50)); ok {
		t.Error("a failed Attach left an entry")
	}
}

// A frame beyond the MTU is answered as a router would do, within the limit, and an error is never answered by an
// error.
func TestTooBigAnswer(t *testing.T) {
	b := newBench(t, withPool(t))
	vm := b.port(PortConfig{Name: "vm", Kind: KindVM, MACs: []MAC{mac(1)}})
	tap := b.port(PortConfig{Name: "tap", Kind: KindTAP})
	v4 := func(proto byte, flags byte, rest ...byte) []byte {
		h := header.IPv4{TotalLen: 1501, TTL: 64, Protocol: proto, Src: [4]byte{10, 0, 0, 1}, Dst: [4]byte{10, 0, 0, 2}}
		p := make([]byte, 1501)
		h.Encode(p)
		p[6] = flags
		copy(p[20:], rest)
		f := buildFrame(mac(2), mac(1), "")
		f[12], f[13] = 8, 0
		return append(f, p...)
	}
	v6 := func(next byte, rest ...byte) []byte {
		h := header.IPv6{PayloadLen: 1461, NextHeader: next, HopLimit: 64, Src: addr("fd00::1").As16(),
			Dst: addr("fd00::2").As16()}
		p := make([]byte, 1501)
		h.Encode(p)
		copy(p[40:], rest)
		f := buildFrame(mac(2), mac(1), "")
		f[12], f[13] = 0x86, 0xdd
		return append(f, p...)
	}
	group := func(f []byte) []byte { f = slices.Clone(f); f[0] |= 1; return f }
	for _, c := range []struct {
		name string
		f    []byte
		want bool
	}{
		{"IPv4", v4(6, 0x40), true},
		{"IPv4 tagged", tagged(5, v4(6, 0x40)), true},
		{"IPv4 without DF", v4(6, 0), false},
		{"IPv4 first fragment", v4(6, 0x60), true},
		{"IPv4 later fragment", v4(6, 0x41), false},
		{"IPv4 echo", v4(1, 0x40, 8), true},
		{"IPv4 error", v4(1, 0x40, 3), false},
		{"IPv4 to a group", group(v4(6, 0x40)), false},
		{"RoCE", v4(17, 0x40, 0xc0, 0, 0x12, 0xb7), false},
		{"IPv6", v6(6), true},
		{"IPv6 echo", v6(58, 128), true},
		{"IPv6 error", v6(58, 2), false},
		{"IPv6 error after an extension header", v6(0, 58, 0, 1, 4, 0, 0, 0, 0, 1), false},
		{"no IP", append(buildFrame(mac(2), mac(1), ""), make([]byte, 1501)...), false},
	} {
		b.advance(time.Second)
		b.input(vm.att, c.f, Source{})
		got := vm.take()
		if len(tap.take()) != 0 || len(got) > 1 || (len(got) == 1) != c.want {
			t.Errorf("%s: %d answers", c.name, len(got))
		}
		if !c.want || len(got) != 1 {
			continue
		}
		f := []byte(got[0].frame)
		h := header.Locate(f)
		p := f[h.L3:]
		if macKey(f) != mac(1).key() || macKey(f[6:]) != mac(2).key() || h.VLAN != parseVID(c.f) {
			t.Errorf("%s: Ethernet header %x", c.name, f[:h.L3])
		}
		var mtu int
		var quoted []byte
		if h.Type == header.TypeIPv4 {
			var ip4 header.IPv4
			n, err := ip4.Decode(p)
			if err != nil || n != 20 || ip4.Src != [4]byte{10, 0, 0, 2} || ip4.Dst != [4]byte{10, 0, 0, 1} ||
				len(p) != icmpMax4 {
				t.Errorf("%s: %+v %v, %d bytes", c.name, ip4, err, len(p))
			}
			m := p[20:]
			if m[0] != 3 || m[1] != 4 || header.Checksum(m, 0) != 0 {
				t.Errorf("%s: ICMP %x", c.name, m[:8])
			}
			mtu, quoted = int(binary.BigEndian.Uint16(m[6:])), m[8:]
		} else {
			var ip6 header.IPv6
			if _, err := ip6.Decode(p); err != nil || len(p) != icmpMax6 {
				t.Errorf("%s: %v, %d bytes", c.name, err, len(p))
			}
			m := p[40:]
			if m[0] != 2 || m[1] != 0 || header.Checksum(m, header.PseudoSum6(ip6.Src, ip6.Dst, 58, uint32(len(m)))) != 0 {
				t.Errorf("%s: ICMPv6 %x", c.name, m[:8])
			}
			mtu, quoted = int(binary.BigEndian.Uint32(m[4:])), m[8:]
		}
		if mtu != 1500 || !strings.HasPrefix(string(c.f[header.Locate(c.f).L3:]), string(quoted)) {
			t.Errorf("%s: MTU %d, quotes %x", c.name, mtu, quoted[:20])
		}
	}
	for range 10000 {
		b.input(vm.att, v4(6, 0x40), Source{})
	}
	if n := len(vm.take()); n < answerBurst/2 || n > answerBurst {
		t.Errorf("a burst of %d answers", n)
	}
	b.advance(time.Second)
	// The tunnel has found that the path is even narrower.
	f := v4(6, 0x40)[:1400]
	b.loop.Do(func() { b.net.AnswerTooBig(b.loop, f, 1300+HeaderLen) })
	got := vm.take()
	if len(got) != 1 || binary.BigEndian.Uint16([]byte(got[0].frame)[HeaderLen+26:]) != 1300 {
		t.Errorf("for the tunnel: %+v", got)
	}
	b.loop.Do(func() { b.net.AnswerTooBig(b.loop, with(f, 11, 77), 1300); b.net.AnswerTooBig(b.loop, nil, 1300) })
	if len(vm.take())+len(tap.take()) != 0 {
		t.Error("an answer to an unknown sender")
	}
}

func parseVID(f []byte) uint16 { h := header.Locate(f); return h.VLAN }

// The neighbour table against a map.
func TestNeighbourModel(t *testing.T) {
	const age, limit = 20, 40
	c := withPool(t)
	c.Age, c.MaxNeighbours, c.noHold = age*time.Second, 4*limit, true
	b := newBench(t, c)
	type key struct {
		ip   netip.Addr
		vlan uint16
	}
	type entry struct {
		mac    MAC
		port   int // -1: static
		seen   int64
		static bool
	}
	model := map[key]entry{}
	rng := rand.New(rand.NewPCG(7, 8))
	var ports []*recPort
	for i := range 3 {
		ports = append(ports, b.port(PortConfig{Name: fmt.Sprint("p", i), Kind: KindTAP}))
	}
	now := func() int64 { return b.clock.Now() / int64(time.Second) }
	live := func(k key) (entry, bool) {
		e, ok := model[k]
		return e, ok && (e.static || now()-e.seen <= age)
	}
	effective := func(k key) (entry, bool) {
		e, ok := live(k)
		if all, ok := live(key{ip: k.ip}); ok && all.static && !e.static {
			return all, true
		}
		return e, ok
	}
	random := func() key {
		return key{netip.AddrFrom4([4]byte{10, 0, 0, byte(rng.IntN(30) + 1)}), []uint16{0, 5}[rng.IntN(2)]}
	}
	for step := range 20000 {
		k, m, pi := random(), mac(rng.IntN(20)+1), rng.IntN(len(ports))
		switch r := rng.IntN(100); {
		case r < 75:
			dropped := ports[pi].att.Counters.Dropped(SpoofedNeighbour)
			b.input(ports[pi].att, tagged(k.vlan, arp(header.ARPReply, mac(99), m, "", k.ip.String(), "10.0.0.99")), Source{})
			e, ok := effective(k)
			refused := ports[pi].att.Counters.Dropped(SpoofedNeighbour) - dropped
			if want := ok && e.static && e.mac != m; want != (refused == 1) {
				t.Fatalf("step %d: %v is at %v: refused %d, model %+v %v", step, k, m, refused, e, ok)
			}
			if !e.static {
				model[k] = entry{mac: m, port: pi, seen: now()}
			}
		case r < 85:
			b.advance(time.Duration(rng.IntN(4000)) * time.Millisecond)
		case r < 90:
			err := b.net.SetNeighbour(k.ip, Address{m, k.vlan})
			if e, ok := live(k); ok && e.static && e.mac != m {
				if !errors.Is(err, ErrIPInUse) {
					t.Fatalf("step %d: SetNeighbour %v: %v", step, k, err)
				}
			} else if err != nil {
				t.Fatal(err)
			} else {
				model[k] = entry{mac: m, port: -1, static: true}
			}
		case r < 99:
			want := model[k].static
			if b.net.RemoveNeighbour(k.ip, k.vlan) != want {
				t.Fatalf("step %d: RemoveNeighbour %v: want %v", step, k, want)
			}
			if want {
				delete(model, k)
			}
		default:
			ports[pi].att.Close()
			for k, e := range model {
				if e.port == pi && !e.static {
					delete(model, k)
				}
			}
			ports[pi] = b.port(PortConfig{Name: fmt.Sprint("p", pi), Kind: KindTAP})
		}
		k = random()
		got, ok := b.net.neighbourOf(k.ip.As16(), k.vlan, uint32(now()))
		want, wantOK := effective(k)
		if ok != wantOK || ok && (keyMAC(got.mac) != want.mac || got.static != want.static) {
			t.Fatalf("step %d: %v: table %+v %v, model %+v %v", step, k, got, ok, want, wantOK)
		}
		if step%1000 == 0 {
			n := 0
			for k := range model {
				if _, ok := live(k); ok {
					n++
				}
			}
			if got := len(b.net.Neighbours()); got != n {
				t.Fatalf("step %d: %d listed, model %d", step, got, n)
			}
		}
	}
}

// A port that claims many addresses fills only its part; the counts match the table.
func TestNeighbourLimits(t *testing.T) {
	c := withPool(t)
	c.MaxNeighbours, c.Storm = 400, Unlimited
	b := newBench(t, c)
	p, q := b.port(PortConfig{Name: "p", Kind: KindTAP}), b.port(PortConfig{Name: "q", Kind: KindTAP})
	for i := range 3000 {
		f := arp(header.ARPReply, mac(99), mac(1), "", netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String(),
			"10.0.0.1")
		b.input(p.att, f, Source{})
	}
	b.input(q.att, arp(header.ARPReply, mac(99), mac(2), "", "10.9.9.9", "10.0.0.1"), Source{})
	of := map[string]int{}
	for _, x := range b.net.Neighbours() {
		of[x.Port]++
	}
	if of["p"] != 100 || of["q"] != 1 || b.net.neigh.count != 101 || b.net.neigh.ofPort[p.att.id] != 100 {
		t.Errorf("%v, counted %d, %v", of, b.net.neigh.count, b.net.neigh.ofPort)
	}
	p.att.Close()
	if len(b.net.Neighbours()) != 1 || b.net.neigh.count != 1 || len(b.net.neigh.ofPort) != 1 {
		t.Errorf("after the port was closed: %d, %v", b.net.neigh.count, b.net.neigh.ofPort)
	}
}

// Loops resolve while the control plane lists and changes entries: for the race detector, and no call blocks for ever.
func TestResolveConcurrent(t *testing.T) {
	c := withPool(t)
	c.VNI = 3
	n, err := NewNetwork(c)
	if err != nil {
		t.Fatal(err)
	}
	pool, err := frame.NewPool(frame.Config{Count: 8, Capacity: 512})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 3 {
		l, err := loop.New(loop.Config{ID: i})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Start(); err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		att, err := n.Attach(nullPort{}, PortConfig{Kind: KindTAP})
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			for k := range 300 {
				l.Do(func() {
					b := pool.Get()
					defer b.Free()
					for j := range 20 {
						b.Reset()
						b.Append(who(mac(i*100+j+1), fmt.Sprintf("10.0.%d.%d", i, j+1), fmt.Sprintf("10.0.%d.%d", (i+k)%3, j+1)))
						att.Input(l, b, Source{})
					}
				})
			}
		})
	}
	for range 100 {
		n.Neighbours()
		_ = n.SetNeighbour(addr("10.0.0.200"), Address{MAC: mac(200)})
		n.RemoveNeighbour(addr("10.0.0.200"), 0)
	}
	wg.Wait()
}

// For any frames of a VM, every frame is accounted for, and none passes with a MAC that is not the VM's own.
func FuzzInput(f *testing.F) {
	for _, x := range [][]byte{who(mac(1), "10.0.0.1", "10.0.0.2"), solicit(mac(1), "fd00::1", "fd00::2"),
		tagged(5, advert(mac(2), mac(1), "fd00::1", "fd00::2", true)), eth(0x800, v4RoCE, 0x88a8, 0x8100), {1, 2, 3}} {
		f.Add(x, true)
		f.Add(x, false)
	}
	f.Fuzz(func(t *testing.T, data []byte, fromVM bool) {
		c := withPool(t)
		c.MaxEntries, c.MaxNeighbours = 64, 16
		b := newBench(t, c)
		b.net.SetUnderlayMTU(MinMTU)
		vm := b.port(PortConfig{Name: "vm", Kind: KindVM, MACs: []MAC{mac(1)},
			IPs: []netip.Addr{addr("10.0.0.1"), addr("fd00::1")}})
		tap := b.port(PortConfig{Name: "tap", Kind: KindTAP})
		if len(data) > 9000 {
			data = data[:9000]
		}
		from, to := tap, vm
		if fromVM {
			from, to = vm, tap
		}
		b.input(from.att, data, Source{})
		var drops uint64
		s := from.att.Counters.Totals()
		for _, n := range s.Drops {
			drops += n
		}
		if uint64(len(to.got))+drops == 0 && s.Answered == 0 || len(to.got) > 0 && drops > 0 {
			t.Errorf("%d delivered, dropped %v, answered %d", len(to.got), s.Drops, s.Answered)
		}
		for _, r := range to.got {
			if r.frame != string(data) {
				t.Error("the frame was changed")
			}
			if fromVM && macKey([]byte(r.frame)[6:]) != mac(1).key() {
				t.Error("spoofed")
			}
		}
	})
}
