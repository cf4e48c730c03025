package hca

import (
	"sync/atomic"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/loop"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Port is the tenant's network as the adapter sees it; vswitch.VMPort is one. The methods with a loop are called on it.
type Port interface {
	// InputHCA lets a frame in; b is lent.
	InputHCA(l *loop.Loop, b *frame.Buf)
	// SendHCA lets a frame of a connection in. The path is the connection's alone, and all its frames have the same
	// Ethernet and IP addresses (MT-5).
	SendHCA(l *loop.Loop, b *frame.Buf, p *vswitch.Path)
	// ResolveHCA finds a connection's path (MT-3): header is what its frames begin with.
	ResolveHCA(l *loop.Loop, header []byte, p *vswitch.Path) bool
	// RouteHCA says where frames of the HCA go, for a connection that would rather copy.
	RouteHCA(l *loop.Loop, f *vswitch.Flow) vswitch.Route
	// Owner returns the MAC that an IP address is known to have; vlan is 0 for untagged frames.
	Owner(addr [16]byte, vlan uint16) (vswitch.MAC, bool)
}

// SetPort names where frames go. Nil: nowhere.
func (d *Device) SetPort(p Port) {
	if p == nil {
		d.port.Store(nil)
		return
	}
	d.port.Store(&p)
}

// refusal says why an arriving frame reached no QP (MT-6).
type refusal uint8

const (
	refusedHeader refusal = iota // headers that make no RoCE packet
	refusedICRC
	refusedQPN
	refusedMAC
	refusedGID
	refusedGroup
	refusedSource // an unknown source, and the QP is not its peer
	numRefusals
)

var refusalNames = [numRefusals]string{"header", "icrc", "qp-number", "own-mac", "own-gid", "group", "unknown-source"}

type refusals [numRefusals]atomic.Uint64

// peer is who may send to a QP, as its attributes say, for loops other than its own.
type peer struct {
	udKey    bool // anybody who has the Q_Key
	qkey     uint32
	mac      header.MAC
	src, dst [16]byte
}

// attributes follows a change of the QP's attributes: who may send to it, and where its frames go (MT-3: by RTR at the latest,
// whoever exchanged the addresses). On its lane.
func (q *qp) attributes(mask roce.Mask) {
	if mask&(roce.MaskState|roce.MaskAV|roce.MaskQKey) == 0 {
		return
	}
	var a roce.Attr
	q.t.Query(&a)
	q.near = near{}
	switch {
	case a.State == roce.Reset:
		q.unbind()
	case mask&roce.MaskAV != 0 && (q.typ == roce.RC || q.typ == roce.UC):
		q.bind(&a)
	}
	var p *peer
	switch {
	case a.State < roce.RTR || a.State == roce.Err:
	case q.typ == roce.GSI:
		p = &peer{udKey: true, qkey: roce.GSIQKey}
	case q.typ == roce.UD:
		p = &peer{udKey: true, qkey: a.QKey}
	default:
		p = &peer{mac: header.MAC(a.AV.DMAC), src: a.AV.DGID, dst: a.AV.SGID}
	}
	q.peer.Store(p)
}

// Wants implements vswitch.Inspector: what it refuses teaches the switch nothing. It is for frames of sources that the switch does not
// know, so it may take its time.
func (d *Device) Wants(_ *loop.Loop, f []byte) bool {
	why, ok := d.judge(f)
	if !ok {
		d.turned[why].Add(1)
	}
	return ok
}

func (d *Device) judge(f []byte) (refusal, bool) {
	var p wire.RoCE
	if wire.ParseRoCE(f, &p) != nil {
		return refusedHeader, false
	}
	if !wire.CheckICRC(f, &p) {
		return refusedICRC, false
	}
	if p.BTH.DestQP == mcastQPN {
		_, ok := d.groups.Load().groups[p.DstIP]
		return refusedGroup, ok
	}
	q := d.qpFor(p.BTH.DestQP)
	if q == nil {
		return refusedQPN, false
	}
	x := q.peer.Load()
	switch {
	case x == nil:
		return refusedSource, false
	case x.udKey:
		return refusedSource, p.Info.Is(wire.HasDETH) && p.DETH().QKey == x.qkey && d.owns(p.SMAC, p.SrcIP, p.VLAN)
	}
	return refusedSource, p.SMAC == x.mac && p.SrcIP == x.src && p.DstIP == x.dst
}

// owns tells whether a MAC may speak for an IP address: the address is its own, or nobody's that is known.
func (d *Device) owns(mac header.MAC, addr [16]byte, vlan uint16) bool {
	port := d.port.Load()
	if port == nil {
		return true
	}
	owner, ok := (*port).Owner(addr, tagOf(vlan))
	return !ok || owner == vswitch.MAC(mac)
}
