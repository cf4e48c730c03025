// Side: data

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
	// InputHCA sends a frame into the network; b is lent.
	InputHCA(l *loop.Loop, b *frame.Buf)
	// SendHCA sends a frame of a connection into the network. Only this connection uses the path, and all its frames
	// have the same Ethernet and IP addresses (MT-5).
	SendHCA(l *loop.Loop, b *frame.Buf, p *vswitch.Path)
	// ResolveHCA finds a connection's path (MT-3); its frames begin with header.
	ResolveHCA(l *loop.Loop, header []byte, p *vswitch.Path) bool
	// RouteHCA returns the route of frames of the HCA, for a connection that may copy instead.
	RouteHCA(l *loop.Loop, f *vswitch.Flow) vswitch.Route
	// Owner returns the known owner of an IP address; vlan is 0 for untagged frames.
	Owner(addr [16]byte, vlan uint16) (vswitch.MAC, bool)
	// Claim makes the device's MAC the port's, although it was elsewhere while no driver ran.
	Claim() error
}

// rejectReason is the reason why a received frame reached no QP (MT-6).
type rejectReason uint8

const (
	rejectHeader rejectReason = iota // not a valid RoCE packet
	rejectICRC
	rejectQPN
	rejectMAC
	rejectGID
	rejectGroup
	rejectSource // an unknown source, and the QP is not its peer
	rejectLink   // the port is down
	rejectUnsent // a frame of the device itself, while the port is down
	numRejects
)

var rejectNames = [numRejects]string{"header", "icrc", "qp-number", "own-mac", "own-gid", "group", "unknown-source",
	"link-down", "link-down-sent"}

type rejectCounts [numRejects]atomic.Uint64

// sourceFilter is the set of senders that a QP accepts, for loops other than its own.
type sourceFilter struct {
	byQKey   bool // any sender that has the Q_Key
	qkey     uint32
	mac      header.MAC
	src, dst [16]byte
}

// attributesChanged updates the QP's source filter and path after a change of its attributes (MT-3: at RTR at the
// latest, no matter how the addresses were exchanged). On its engine.
func (q *qp) attributesChanged(mask roce.Mask) {
	if mask&(roce.MaskState|roce.MaskAV|roce.MaskQKey) == 0 {
		return
	}
	var a roce.Attr
	q.t.Query(&a)
	q.localRoute = localRoute{}
	switch {
	case a.State == roce.Reset:
		q.unbind()
	case mask&roce.MaskAV != 0 && (q.typ == roce.RC || q.typ == roce.UC):
		q.bind(&a)
	}
	var p *sourceFilter
	switch {
	case a.State < roce.RTR || a.State == roce.Err:
	case q.typ == roce.GSI:
		p = &sourceFilter{byQKey: true, qkey: roce.GSIQKey}
	case q.typ == roce.UD:
		p = &sourceFilter{byQKey: true, qkey: a.QKey}
	default:
		p = &sourceFilter{mac: header.MAC(a.AV.DMAC), src: a.AV.DGID, dst: a.AV.SGID}
	}
	q.source.Store(p)
}

// Wants implements vswitch.Inspector: the switch does not learn from frames that it refuses. It is called only for
// frames of sources that the switch does not know, so it may be slow.
func (d *dataSide) Wants(_ *loop.Loop, b *frame.Buf) bool {
	why, ok := d.checkSource(b)
	if !ok {
		d.rejected[why].Add(1)
	}
	return ok
}

func (d *dataSide) checkSource(b *frame.Buf) (rejectReason, bool) {
	var p wire.RoCE
	f := b.Bytes()
	if wire.ParseRoCE(f, b.Layout(), &p) != nil {
		return rejectHeader, false
	}
	if !wire.CheckICRC(f, &p) {
		return rejectICRC, false
	}
	if p.BTH.DestQP == mcastQPN {
		_, ok := d.groups.Load().groups[p.DstIP]
		return rejectGroup, ok
	}
	q := d.qpFor(p.BTH.DestQP)
	if q == nil {
		return rejectQPN, false
	}
	x := q.source.Load()
	switch {
	case x == nil:
		return rejectSource, false
	case x.byQKey:
		return rejectSource, p.Info.Is(wire.HasDETH) && p.DETH().QKey == x.qkey && d.ownsAddress(p.SMAC, p.SrcIP, p.VLAN)
	}
	return rejectSource, p.SMAC == x.mac && p.SrcIP == x.src && p.DstIP == x.dst
}

// ownsAddress reports whether a MAC may use an IP address: the address has no known owner, or the MAC is it.
func (d *dataSide) ownsAddress(mac header.MAC, addr [16]byte, vlan uint16) bool {
	port := d.port.Load()
	if port == nil {
		return true
	}
	owner, ok := (*port).Owner(addr, networkVLAN(vlan))
	return !ok || owner == vswitch.MAC(mac)
}
