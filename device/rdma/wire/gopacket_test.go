package wire

import (
	"bytes"
	"net"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/vnicd/vnicd/device/frame/header"
)

// TestRoCEByGopacket parses our frames with gopacket, as far as it knows the layers.
func TestRoCEByGopacket(t *testing.T) {
	for _, kind := range []string{"v4", "v6"} {
		path := testPath(kind)
		path.VLAN = 9
		f := build(t, path, BTH{Opcode: OpRCSendOnly, PKey: 0xffff, DestQP: 5}, nil, []byte("payload"))
		p := gopacket.NewPacket(f, layers.LayerTypeEthernet, gopacket.Default)
		if e := p.ErrorLayer(); e != nil {
			t.Fatal(e.Error())
		}
		eth := p.Layer(layers.LayerTypeEthernet).(*layers.Ethernet)
		tag := p.Layer(layers.LayerTypeDot1Q).(*layers.Dot1Q)
		udp := p.Layer(layers.LayerTypeUDP).(*layers.UDP)
		if !bytes.Equal(eth.SrcMAC, path.SMAC[:]) || !bytes.Equal(eth.DstMAC, path.DMAC[:]) ||
			tag.VLANIdentifier != 9 ||
			udp.DstPort != RoCEPort || uint16(udp.SrcPort) != path.SrcPort ||
			int(udp.Length) != header.UDPLen+len(udp.Payload) || len(udp.Payload) != BTHLen+8+ICRCLen {
			t.Errorf("%s: %v %v %v", kind, eth, tag, udp)
		}
		flow := p.NetworkLayer().NetworkFlow()
		if !net.IP(flow.Src().Raw()).Equal(path.SrcIP[:]) || !net.IP(flow.Dst().Raw()).Equal(path.DstIP[:]) {
			t.Errorf("%s: %v", kind, flow)
		}
	}
}
