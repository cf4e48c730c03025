// Side: data

package hca

import (
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
)

// Address resolution for drivers without a network stack: host applications (PF-4). The device resolves others'
// addresses by ARP and ND (RESOLVE), and as the network face of its port answers for its own GIDs. The switch learns
// the replies, so no state is kept here.

// sendRequest sends a request for target's MAC from one of the device's GIDs; on a loop.
func (d *dataSide) sendRequest(l *loop.Loop, port Port, g *gid, target *[16]byte) {
	eth := header.Ethernet{Dst: header.Broadcast, Src: d.mac, VLAN: g.vlan}
	if isV4(target) {
		d.sendARP(l, port, eth, &header.ARP{Op: header.ARPRequest, SenderMAC: d.mac, SenderIP: [4]byte(g.addr[12:]),
			TargetIP: [4]byte(target[12:])})
		return
	}
	// The solicited-node group of the target, and its MAC (RFC 4291, 2.7.1; RFC 2464, 7).
	group := [16]byte{0: 0xff, 1: 2, 11: 1, 12: 0xff, 13: target[13], 14: target[14], 15: target[15]}
	eth.Dst = header.MAC{0x33, 0x33, group[12], group[13], group[14], group[15]}
	d.sendND(l, port, eth, g.addr, group, &header.Neighbor{Target: *target, Link: d.mac, HasLink: true})
}

func (d *dataSide) sendARP(l *loop.Loop, port Port, eth header.Ethernet, m *header.ARP) {
	eth.Type = header.TypeARP
	d.sendNeighbour(l, port, &eth, header.ARPLen, func(b []byte) { m.Encode(b) })
}

func (d *dataSide) sendND(l *loop.Loop, port Port, eth header.Ethernet, src, dst [16]byte, m *header.Neighbor) {
	eth.Type = header.TypeIPv6
	ip := header.IPv6{PayloadLen: uint16(m.Len()), NextHeader: header.ProtoICMPv6, HopLimit: 255, Src: src, Dst: dst}
	d.sendNeighbour(l, port, &eth, header.IPv6Len+m.Len(), func(b []byte) {
		ip.Encode(b)
		m.Encode(b[header.IPv6Len:], src, dst)
	})
}

// sendNeighbour sends a frame with n bytes behind its Ethernet header. If there is no buffer the frame is lost, as on
// a wire.
func (d *dataSide) sendNeighbour(l *loop.Loop, port Port, eth *header.Ethernet, n int, payload func([]byte)) {
	b := d.pool.Get()
	if b == nil {
		return
	}
	defer b.Free()
	b.SetLen(eth.Len() + n)
	payload(b.Bytes()[eth.Encode(b.Bytes()):])
	port.InputHCA(l, b)
}

// neighbours is the network face of a port without a network card.
type neighbours struct{ d *dataSide }

// Deliver implements vswitch.Face.
func (x neighbours) Deliver(l *loop.Loop, b *frame.Buf) {
	d, f := x.d, b.Bytes()
	port := d.port.Load()
	var eth header.Ethernet
	n, err := eth.Decode(f)
	if err != nil || port == nil || !d.Up() || !d.link.Load() || eth.Src.IsMulticast() {
		return
	}
	p, asker := f[n:], eth.Src
	eth.Dst, eth.Src = asker, d.mac
	switch eth.Type {
	case header.TypeARP:
		var m header.ARP
		if _, err := m.Decode(p); err != nil || m.Op != header.ARPRequest ||
			!d.hasAddress(header.Mapped4(m.TargetIP), eth.VLAN) {
			return
		}
		d.sendARP(l, *port, eth, &header.ARP{Op: header.ARPReply, SenderMAC: d.mac, SenderIP: m.TargetIP,
			TargetMAC: m.SenderMAC, TargetIP: m.SenderIP})
	case header.TypeIPv6:
		var ip header.IPv6
		var m header.Neighbor
		n, err := ip.Decode(p)
		// RFC 4861, 7.1.1
		if err != nil || ip.NextHeader != header.ProtoICMPv6 || ip.HopLimit != 255 || int(ip.PayloadLen) > len(p)-n {
			return
		}
		if m.Decode(p[n:n+int(ip.PayloadLen)], ip.Src, ip.Dst) != nil || m.Advert || !d.hasAddress(m.Target, eth.VLAN) {
			return
		}
		reply := header.Neighbor{Advert: true, Solicited: true, Override: true, Target: m.Target, Link: d.mac,
			HasLink: true}
		to := ip.Src
		if to == ([16]byte{}) { // duplicate address detection: multicast the answer (RFC 4861, 7.2.4)
			to, eth.Dst, reply.Solicited = [16]byte{0: 0xff, 1: 2, 15: 1}, header.MAC{0x33, 0x33, 0, 0, 0, 1}, false
		}
		d.sendND(l, *port, eth, m.Target, to, &reply)
	}
}

// hasAddress reports whether an address is one of the device's GIDs, of either RoCE version.
func (d *dataSide) hasAddress(addr [16]byte, vlan uint16) bool {
	return d.gids.has(&addr, false, vlan) || d.gids.has(&addr, true, vlan)
}
