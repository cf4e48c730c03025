package header

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// membershipPacket describes an IGMP or MLD packet; the zero values of its fields are right for one.
type membershipPacket struct {
	src, dst string
	body     []byte // checksum zero
	noAlert  bool
	ttl      uint8 // 0: 1
	vlan     uint16
	fragment bool
	badSum   bool
	cut      int // bytes missing at the end, padding included
}

func (p membershipPacket) frame(t testing.TB) []byte {
	t.Helper()
	src, dst := netip.MustParseAddr(p.src), netip.MustParseAddr(p.dst)
	if p.ttl == 0 {
		p.ttl = 1
	}
	eth := &layers.Ethernet{SrcMAC: []byte{2, 0, 0, 0, 0, 1}, DstMAC: []byte{1, 0, 0x5e, 0, 0, 1}}
	ls := []gopacket.SerializableLayer{eth}
	typ := layers.EthernetTypeIPv4
	if dst.Is6() {
		typ = layers.EthernetTypeIPv6
	}
	if eth.EthernetType = typ; p.vlan != 0 {
		eth.EthernetType = layers.EthernetTypeDot1Q
		ls = append(ls, &layers.Dot1Q{VLANIdentifier: p.vlan, Type: typ})
	}
	body := slices.Clone(p.body)
	if dst.Is6() {
		binary.BigEndian.PutUint16(body[2:], Checksum(body, PseudoSum6(src.As16(), dst.As16(), ProtoICMPv6,
			uint32(len(body)))))
		ip := &layers.IPv6{Version: 6, HopLimit: p.ttl, NextHeader: layers.IPProtocolICMPv6, SrcIP: src.AsSlice(),
			DstIP: dst.AsSlice()}
		if !p.noAlert {
			ip.NextHeader = layers.IPProtocolIPv6HopByHop
			hbh := &layers.IPv6HopByHop{}
			hbh.NextHeader = layers.IPProtocolICMPv6
			hbh.Options = []*layers.IPv6HopByHopOption{{OptionType: 5, OptionLength: 2, OptionData: []byte{0, 0}},
				{OptionType: 1}} // PadN
			ls = append(ls, ip, hbh)
		} else {
			ls = append(ls, ip)
		}
	} else {
		binary.BigEndian.PutUint16(body[2:], Checksum(body, 0))
		ip := &layers.IPv4{Version: 4, TTL: p.ttl, Protocol: layers.IPProtocolIGMP, SrcIP: src.AsSlice(),
			DstIP: dst.AsSlice()}
		if !p.noAlert {
			ip.Options = []layers.IPv4Option{{OptionType: 148, OptionLength: 4, OptionData: []byte{0, 0}}}
		}
		if p.fragment {
			ip.Flags = layers.IPv4MoreFragments
		}
		ls = append(ls, ip)
	}
	if p.badSum {
		body[3] ^= 1
	}
	f := serialize(t, append(ls, gopacket.Payload(body))...)
	return f[:len(f)-p.cut]
}

func igmp(typ, code byte, group string, more ...byte) []byte {
	g := netip.MustParseAddr(group).As4()
	return append([]byte{typ, code, 0, 0, g[0], g[1], g[2], g[3]}, more...)
}

func mld(typ byte, code uint16, group string, more ...byte) []byte {
	g := netip.MustParseAddr(group).As16()
	b := append([]byte{typ, 0, 0, 0, byte(code >> 8), byte(code), 0, 0}, g[:]...)
	return append(b, more...)
}

// report returns a report of version 3 (MLD: 2) with records of a type, number of sources and group each.
func report(records ...any) []byte {
	b := []byte{igmpReport3, 0, 0, 0, 0, 0, 0, byte(len(records) / 3)}
	for i := 0; i < len(records); i += 3 {
		g := netip.MustParseAddr(records[i+2].(string))
		b = append(b, byte(records[i].(int)), 0, 0, byte(records[i+1].(int)))
		b = append(b, g.AsSlice()...)
		b = append(b, make([]byte, records[i+1].(int)*len(g.AsSlice()))...)
		if g.Is6() {
			b[0] = mldReport2
		}
	}
	return b
}

// TestMembership decodes what other implementations send, and refuses what receivers have to ignore (RFC 2236, 3376,
// 2710, 3810).
func TestMembership(t *testing.T) {
	const h4, h6 = "192.0.2.1", "fe80::1"
	type pkt = membershipPacket
	for _, c := range []struct {
		name string
		p    pkt
		want string // group and + or - of each record; query; "" = refused
	}{
		{"IGMPv1 report", pkt{src: h4, dst: "239.1.1.1",
			body: igmp(igmpReport1, 0, "239.1.1.1"), noAlert: true}, "+239.1.1.1"},
		{"IGMPv2 report", pkt{src: h4, dst: "239.1.1.1", body: igmp(igmpReport2, 0, "239.1.1.1")}, "+239.1.1.1"},
		{"tagged", pkt{src: h4, dst: "239.1.1.1", body: igmp(igmpReport2, 0, "239.1.1.1"), vlan: 7}, "+239.1.1.1"},
		{"from nobody", pkt{src: "0.0.0.0", dst: "239.1.1.1", body: igmp(igmpReport2, 0, "239.1.1.1")}, "+239.1.1.1"},
		{"leave", pkt{src: h4, dst: "224.0.0.2", body: igmp(igmpLeave, 0, "239.1.1.1")}, "-239.1.1.1"},
		{"IGMPv3", pkt{src: h4, dst: "224.0.0.22", body: report(2, 0, "239.1.1.1", 4, 0, "239.1.1.2", 1, 1, "239.1.1.3",
			5, 2, "239.1.1.4", 3, 0, "239.1.1.5", 3, 1, "239.1.1.6", 6, 1, "239.1.1.7", 1, 0, "239.1.1.8", 4, 0, "10.0.0.1",
			9, 0, "239.1.1.9")},
			"+239.1.1.1 +239.1.1.2 +239.1.1.3 +239.1.1.4 -239.1.1.5 +239.1.1.6"},
		{"IGMPv3 without records", pkt{src: h4, dst: "224.0.0.22", body: report()}, "none"},
		{"MLDv1 report", pkt{src: h6, dst: "ff05::1", body: mld(mldReport1, 0, "ff05::1")}, "+ff05::1"},
		{"MLDv1 done", pkt{src: h6, dst: "ff02::2", body: mld(mldDone, 0, "ff05::1")}, "-ff05::1"},
		{"MLDv2", pkt{src: "::", dst: "ff02::16", body: report(4, 0, "ff05::1", 3, 0, "ff05::2", 5, 1, "ff05::3")},
			"+ff05::1 -ff05::2 +ff05::3"},
		{"IGMPv1 query", pkt{src: h4, dst: "224.0.0.1",
			body: igmp(igmpQuery, 0, "0.0.0.0"), noAlert: true}, "query :: 10s 2m5s 2"},
		{"IGMPv2 query", pkt{src: h4, dst: "224.0.0.1", body: igmp(igmpQuery, 50, "0.0.0.0")}, "query :: 5s 2m5s 2"},
		{"IGMPv3 query", pkt{src: h4, dst: "224.0.0.1", body: igmp(igmpQuery, 100, "0.0.0.0", 3, 0x8f, 0, 0)},
			"query :: 10s 4m8s 3"},
		{"IGMPv3 query without timers", pkt{src: h4, dst: "224.0.0.1",
			body: igmp(igmpQuery, 0xff, "0.0.0.0", 0, 0, 0, 0)},
			"query :: 52m54.4s 2m5s 2"},
		{"to one group", pkt{src: h4, dst: "239.1.1.1",
			body: igmp(igmpQuery, 10, "239.1.1.1")}, "query 239.1.1.1 1s 2m5s 2"},
		{"MLDv1 query", pkt{src: h6, dst: "ff02::1", body: mld(mldQuery, 5000, "::")}, "query :: 5s 2m5s 2"},
		{"MLDv2 query", pkt{src: h6, dst: "ff02::1",
			body: mld(mldQuery, 0x9000, "::", 2, 60, 0, 0)}, "query :: 1m5.536s 1m0s 2"},

		{"no router alert", pkt{src: h4, dst: "239.1.1.1", body: igmp(igmpReport2, 0, "239.1.1.1"), noAlert: true}, ""},
		{"IGMPv3 without alert", pkt{src: h4, dst: "224.0.0.22", body: report(2, 0, "239.1.1.1"), noAlert: true}, ""},
		{"IGMPv2 query without alert", pkt{src: h4, dst: "224.0.0.1",
			body: igmp(igmpQuery, 50, "0.0.0.0"), noAlert: true}, ""},
		{"MLD without alert", pkt{src: h6, dst: "ff05::1", body: mld(mldReport1, 0, "ff05::1"), noAlert: true}, ""},
		{"TTL 2", pkt{src: h4, dst: "239.1.1.1", body: igmp(igmpReport2, 0, "239.1.1.1"), ttl: 2}, ""},
		{"hop limit 2", pkt{src: h6, dst: "ff05::1", body: mld(mldReport1, 0, "ff05::1"), ttl: 2}, ""},
		{"checksum", pkt{src: h4, dst: "239.1.1.1", body: igmp(igmpReport2, 0, "239.1.1.1"), badSum: true}, ""},
		{"MLD checksum", pkt{src: h6, dst: "ff05::1", body: mld(mldReport1, 0, "ff05::1"), badSum: true}, ""},
		{"fragment", pkt{src: h4, dst: "239.1.1.1", body: igmp(igmpReport2, 0, "239.1.1.1"), fragment: true}, ""},
		{"cut short", pkt{src: h4, dst: "239.1.1.1", body: igmp(igmpReport2, 0, "239.1.1.1"), cut: 15}, ""},
		{"to another group", pkt{src: h4, dst: "239.1.1.2", body: igmp(igmpReport2, 0, "239.1.1.1")}, ""},
		{"no group", pkt{src: h4, dst: "10.0.0.1", body: igmp(igmpReport2, 0, "10.0.0.1")}, ""},
		{"leave to the group", pkt{src: h4, dst: "239.1.1.1", body: igmp(igmpLeave, 0, "239.1.1.1")}, ""},
		{"general query to a group", pkt{src: h4, dst: "239.1.1.1", body: igmp(igmpQuery, 50, "0.0.0.0")}, ""},
		{"query to one host", pkt{src: h4, dst: "192.0.2.2", body: igmp(igmpQuery, 50, "0.0.0.0")}, ""},
		{"from a group", pkt{src: "239.9.9.9", dst: "224.0.0.1", body: igmp(igmpQuery, 50, "0.0.0.0")}, ""},
		{"query of 9 bytes", pkt{src: h4, dst: "224.0.0.1", body: igmp(igmpQuery, 50, "0.0.0.0", 0)}, ""},
		{"sources missing", pkt{src: h4, dst: "224.0.0.1", body: igmp(igmpQuery, 50, "0.0.0.0", 2, 125, 0, 1)}, ""},
		{"records missing", pkt{src: h4, dst: "224.0.0.22",
			body: append(report(2, 0, "239.1.1.1")[:7:7], 2, 2, 0, 0, 0, 239, 1, 1, 1)}, ""},
		{"global MLD query", pkt{src: "2001:db8::1", dst: "ff02::1", body: mld(mldQuery, 5000, "::")}, ""},
		{"MLD query from ::", pkt{src: "::", dst: "ff02::1", body: mld(mldQuery, 5000, "::")}, ""},
		{"global MLD report", pkt{src: "2001:db8::1", dst: "ff05::1", body: mld(mldReport1, 0, "ff05::1")}, ""},
		{"done to the group", pkt{src: h6, dst: "ff05::1", body: mld(mldDone, 0, "ff05::1")}, ""},
		{"other type", pkt{src: h4, dst: "239.1.1.1", body: igmp(0x13, 0, "239.1.1.1")}, ""},
	} {
		f := c.p.frame(t)
		var m Membership
		got := ""
		if err := m.Decode(f, Locate(f)); err == nil {
			got = describe(&m)
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func describe(m *Membership) (s string) {
	if m.Query {
		return "query " + netip.AddrFrom16(m.Group).Unmap().String() + " " + m.Response.String() + " " +
			m.Interval.String() + " " + string(rune('0'+m.Robustness))
	}
	for {
		g, joins, ok := m.Next()
		if !ok {
			break
		}
		if s != "" {
			s += " "
		}
		s += map[bool]string{true: "+", false: "-"}[joins] + netip.AddrFrom16(g).Unmap().String()
	}
	if s == "" {
		return "none"
	}
	return s
}

// TestPIMHold reads hellos (RFC 7761, 4.9.2).
func TestPIMHold(t *testing.T) {
	pim := func(dst string, body ...byte) []byte {
		f := membershipPacket{src: "192.0.2.1", dst: dst, body: body}.frame(t)
		f[14+9] = ProtoPIM
		return f
	}
	for _, c := range []struct {
		f    []byte
		want time.Duration
		ok   bool
	}{
		{pim("224.0.0.13", 0x20, 0, 0, 0), 105 * time.Second, true},
		{pim("224.0.0.13", 0x20, 0, 0, 0, 0, 19, 0, 0, 0, 1, 0, 2, 0, 30), 30 * time.Second, true},
		{pim("224.0.0.13", 0x20, 0, 0, 0, 0, 1, 0, 2, 0, 0), 0, true},
		{pim("224.0.0.13", 0x20, 0, 0, 0, 0, 1, 0, 9, 0, 0), 0, false},
		{pim("224.0.0.13", 0x23, 0, 0, 0), 0, false},
		{pim("224.0.0.14", 0x20, 0, 0, 0), 0, false},
	} {
		if got, ok := PIMHold(c.f, Locate(c.f)); got != c.want || ok != c.ok {
			t.Errorf("%x: %v, %v; want %v, %v", c.f[38:], got, ok, c.want, c.ok)
		}
	}
}

// FuzzMembership decodes any frame: no message has more records than its length allows, and each names a group.
func FuzzMembership(f *testing.F) {
	for _, p := range []membershipPacket{
		{src: "192.0.2.1", dst: "239.1.1.1", body: igmp(igmpReport2, 0, "239.1.1.1")},
		{src: "192.0.2.1", dst: "224.0.0.2", body: igmp(igmpLeave, 0, "239.1.1.1")},
		{src: "192.0.2.1", dst: "224.0.0.1", body: igmp(igmpQuery, 100, "0.0.0.0", 3, 0x8f, 0, 0), vlan: 7},
		{src: "192.0.2.1", dst: "224.0.0.22", body: report(2, 0, "239.1.1.1", 5, 2, "239.1.1.4")},
		{src: "fe80::1", dst: "ff05::1", body: mld(mldReport1, 0, "ff05::1")},
		{src: "fe80::1", dst: "ff02::1", body: mld(mldQuery, 0x9000, "::", 2, 60, 0, 0)},
		{src: "fe80::1", dst: "ff02::16", body: report(4, 0, "ff05::1", 5, 1, "ff05::3")},
	} {
		f.Add(p.frame(f))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		l := Locate(b)
		if hold, ok := PIMHold(b, l); ok && (hold < 0 || hold > 65535*time.Second) {
			t.Errorf("hold of %v", hold)
		}
		var m Membership
		if m.Decode(b, l) != nil {
			return
		}
		if m.Query && (m.Robustness < 2 || m.Robustness > 7 || m.Response < 0 || m.Interval <= 0) {
			t.Errorf("query with %v, %v, %d", m.Response, m.Interval, m.Robustness)
		}
		most := m.Records()
		if most > len(b)/8 {
			t.Errorf("%d records in %d bytes", most, len(b))
		}
		n := 0
		for {
			g, _, ok := m.Next()
			if !ok {
				break
			}
			if n++; !netip.AddrFrom16(g).Unmap().IsMulticast() {
				t.Errorf("record of %x", g)
			}
		}
		if n > most {
			t.Errorf("%d records, said to have %d", n, most)
		}
	})
}
