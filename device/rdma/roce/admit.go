package roce

import (
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// admits applies the header checks of IBTA 9.6 to a received packet, and checks that a connected QP's packet has its
// peer's MAC. A packet that fails is dropped without an answer: it is not from the peer.
func (q *QP) admits(p *wire.RoCE) bool {
	cnp := p.Info.Op == wire.CNP && q.usesECN(&q.attr.AV)
	if p.Info.Transport != q.typ.transport() && !cnp || p.BTH.DestQP != q.cfg.QPN && q.typ.class() != classUD {
		q.drop(DropTransport)
		return false
	}
	// P_Key: ours is the full member 0xffff of the default partition, which
	// matches full and limited members (IBTA 10.9.3).
	if p.BTH.PKey&0x7fff != wire.DefaultPKey&0x7fff {
		q.drop(DropPKey)
		return false
	}
	if q.typ.class() == classUD {
		return true // the device checks the addresses: any of its GIDs and groups
	}
	av := &q.attr.AV
	if p.SMAC != header.MAC(av.DMAC) {
		q.drop(DropMAC)
		return false
	}
	if p.V1 != av.RoCEv1 || p.SrcIP != av.DGID || p.DstIP != av.SGID || !sameVLAN(p.VLAN, av.VLAN) {
		q.drop(DropAddress)
		return false
	}
	return true
}

// sameVLAN compares tags; a priority tag is no VLAN (802.1Q 9.6).
func sameVLAN(a, b uint16) bool {
	return a == b || a == 0 && b == NoVLAN || a == NoVLAN && b == 0
}

func (t Type) transport() wire.Transport {
	switch t {
	case RC:
		return wire.RC
	case UC:
		return wire.UC
	}
	return wire.UD
}
