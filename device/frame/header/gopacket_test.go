package header

import (
	"bytes"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// serialize returns gopacket's encoding of the layers, with lengths and checksums.
func serialize(t testing.TB, ls ...gopacket.SerializableLayer) []byte {
	t.Helper()
	buf := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true},
		ls...); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// TestAgainstGopacket compares with another implementation: equal values give equal bytes.
func TestAgainstGopacket(t *testing.T) {
	src, dst := MAC{2, 0, 0, 0, 0, 1}, MAC{2, 0, 0, 0, 0, 2}
	src4, dst4 := [4]byte{192, 0, 2, 1}, [4]byte{192, 0, 2, 2}
	src6, dst6 := [16]byte{0x20, 1, 0xd, 0xb8, 15: 1}, [16]byte{0x20, 1, 0xd, 0xb8, 15: 2}
	payload := []byte("inner frame, of odd length.")

	check := func(name string, want []byte, parts ...func([]byte) int) {
		t.Helper()
		got := make([]byte, len(want)+64)
		n := 0
		for _, p := range parts {
			n += p(got[n:])
		}
		if !bytes.Equal(got[:n], want) {
			t.Errorf("%s:\n%x, gopacket:\n%x", name, got[:n], want)
		}
	}
	data := func(b []byte) int { return copy(b, payload) }

	// VXLAN over UDP over IPv4, tagged.
	eth := Ethernet{Dst: dst, Src: src, Type: TypeIPv4, VLAN: 77, PCP: 6}
	ip4 := IPv4{TOS: 0x68, TotalLen: uint16(IPv4Len + UDPLen + VXLANLen + len(payload)), ID: 0x4321, DontFrag: true,
		TTL: 64, Protocol: ProtoUDP, Src: src4, Dst: dst4}
	udp := UDP{SrcPort: 50000, DstPort: VXLANPort, Length: uint16(UDPLen + VXLANLen + len(payload))}
	vx := VXLAN{VNI: 0xabcdef}
	l4 := make([]byte, udp.Length)
	n := udp.Encode(l4)
	n += vx.Encode(l4[n:])
	copy(l4[n:], payload)
	udp.Checksum = Checksum(l4, PseudoSum4(src4, dst4, ProtoUDP, udp.Length))
	gip4 := &layers.IPv4{Version: 4, TOS: 0x68, Id: 0x4321, Flags: layers.IPv4DontFragment, TTL: 64,
		Protocol: layers.IPProtocolUDP, SrcIP: src4[:], DstIP: dst4[:]}
	gudp := &layers.UDP{SrcPort: 50000, DstPort: 4789}
	if err := gudp.SetNetworkLayerForChecksum(gip4); err != nil {
		t.Fatal(err)
	}
	check("VXLAN over IPv4", serialize(t,
		&layers.Ethernet{SrcMAC: src[:], DstMAC: dst[:], EthernetType: layers.EthernetTypeDot1Q},
		&layers.Dot1Q{Priority: 6, VLANIdentifier: 77, Type: layers.EthernetTypeIPv4}, gip4, gudp,
		&layers.VXLAN{ValidIDFlag: true, VNI: 0xabcdef}, gopacket.Payload(payload)),
		eth.Encode, ip4.Encode, udp.Encode, vx.Encode, data)

	// The same over IPv6.
	ip6 := IPv6{TrafficClass: 0x68, FlowLabel: 0x12345, PayloadLen: udp.Length, NextHeader: ProtoUDP, HopLimit: 63,
		Src: src6, Dst: dst6}
	udp.Checksum = 0
	udp.Encode(l4)
	udp.Checksum = Checksum(l4, PseudoSum6(src6, dst6, ProtoUDP, uint32(udp.Length)))
	gip6 := &layers.IPv6{Version: 6, TrafficClass: 0x68, FlowLabel: 0x12345, NextHeader: layers.IPProtocolUDP,
		HopLimit: 63, SrcIP: src6[:], DstIP: dst6[:]}
	gudp = &layers.UDP{SrcPort: 50000, DstPort: 4789}
	if err := gudp.SetNetworkLayerForChecksum(gip6); err != nil {
		t.Fatal(err)
	}
	eth6 := Ethernet{Dst: dst, Src: src, Type: TypeIPv6, VLAN: NoVLAN}
	check("VXLAN over IPv6", serialize(t,
		&layers.Ethernet{SrcMAC: src[:], DstMAC: dst[:], EthernetType: layers.EthernetTypeIPv6}, gip6, gudp,
		&layers.VXLAN{ValidIDFlag: true, VNI: 0xabcdef}, gopacket.Payload(payload)),
		eth6.Encode, ip6.Encode, udp.Encode, vx.Encode, data)

	arp := ARP{Op: ARPReply, SenderMAC: src, TargetMAC: dst, SenderIP: src4, TargetIP: dst4}
	check("ARP", serialize(t, &layers.ARP{AddrType: layers.LinkTypeEthernet, Protocol: layers.EthernetTypeIPv4,
		HwAddressSize: 6, ProtAddressSize: 4,
		Operation: layers.ARPReply, SourceHwAddress: src[:], SourceProtAddress: src4[:], DstHwAddress: dst[:],
		DstProtAddress: dst4[:]}), arp.Encode)

	for _, advert := range []bool{false, true} {
		nb := Neighbor{Advert: advert, Target: dst6, Link: src, HasLink: true}
		icmp := &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(NDNeighborSolicit, 0)}
		opt := layers.ICMPv6Option{Type: layers.ICMPv6OptSourceAddress, Data: src[:]}
		var body gopacket.SerializableLayer = &layers.ICMPv6NeighborSolicitation{TargetAddress: dst6[:],
			Options: []layers.ICMPv6Option{opt}}
		if advert {
			nb.Solicited, nb.Override = true, true
			icmp.TypeCode = layers.CreateICMPv6TypeCode(NDNeighborAdvert, 0)
			opt.Type = layers.ICMPv6OptTargetAddress
			body = &layers.ICMPv6NeighborAdvertisement{Flags: 0x60, TargetAddress: dst6[:],
				Options: []layers.ICMPv6Option{opt}}
		}
		if err := icmp.SetNetworkLayerForChecksum(gip6); err != nil {
			t.Fatal(err)
		}
		check("neighbour", serialize(t, icmp, body), func(b []byte) int { return nb.Encode(b, src6, dst6) })
	}
}
