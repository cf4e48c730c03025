// Side: data

package hca

import (
	"slices"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/translate"
)

// The device's part of the local path: it identifies the peer. A QP's frames go
// where the tenant's switch sends them (vswitch.Route), to a device that is up, has
// their GID, and has a QP of their number. All of that is looked up once and then
// compared: generations of the switch and of the QP's attributes, and the snapshot of
// the peer's GIDs; values that one load reads are read each time. The check is done once
// per turn and in both directions, because answers must reach the requester too.
//
// During a turn both VMs' epochs and the switch's are held, so removing a key, a page,
// a QP or a port waits for the copy in progress, as for a frame.

// localRoute caches the destination of a QP's frames. It belongs to the QP's loop, and is
// cleared with each change of the QP's attributes.
type localRoute struct {
	route vswitch.Route
	port  *Port     // the port that was queried
	dev   *dataSide // the device that has the frames' GID; nil: none on this host
	gids  *gidSnap  // the GIDs of dev
}

// localPeer returns the QP that frames of q currently reach, nil if it is not on this
// host or frames must be sent.
func (q *qp) localPeer() *qp {
	n, d := &q.localRoute, q.dev
	port := d.port.Load()
	if !d.options.LocalCopy || port == nil || !d.link.Load() {
		return nil
	}
	av, dest := q.t.Destination()
	if n.port != port || !n.route.Current() || n.dev != nil && n.dev.gids.snap.Load() != n.gids {
		q.findLocalRoute(port, av)
	}
	if n.dev == nil || !n.dev.up.Load() || !n.dev.link.Load() {
		return nil
	}
	return n.dev.qpFor(dest)
}

// findLocalRoute queries the switch.
func (q *qp) findLocalRoute(port *Port, av *roce.AddressVector) {
	n := &q.localRoute
	n.port, n.dev, n.gids = port, nil, nil
	n.route = (*port).RouteHCA(q.engine.loop, &vswitch.Flow{
		Src: vswitch.MAC(av.SMAC), Dst: vswitch.MAC(av.DMAC), SrcIP: av.SGID, V1: av.RoCEv1,
		Size: int(q.t.MTU()) + mtuOverhead,
	})
	dev, ok := n.route.HCA().(*dataSide)
	if !ok || av.VLAN != roce.NoVLAN || dev.mac != av.DMAC {
		return
	}
	gids := dev.gids.snap.Load()
	if dev.gids.has(&av.DGID, av.RoCEv1, abi.NoVLAN) && dev.gids.snap.Load() == gids {
		n.dev, n.gids = dev, gids
	}
}

// localTurn is an engine's Run of a QP together with its peer.
type localTurn struct {
	q     *qp
	peer  *engine // nil: none
	token translate.Token
	held  bool
}

// Bytes that a turn may copy: a slice, or, if no other QP waits and no other VM has had work lately, a larger one
// that takes the time limit of a pass.
const (
	localSlice      = 64 << 10
	localSliceAlone = 256 << 10
)

// Peer implements roce.Adapter.
func (q *qp) Peer() (*roce.QP, uint64) {
	e := q.engine
	p := q.localPeer()
	// The loop is compared first: other fields of a QP of another loop must not be read.
	if p == nil || p == q || p.engine.loop != e.loop || p.closed || p.localPeer() != q || e.local.held ||
		!q.localRoute.route.Enter(e.loop) {
		return nil, 0
	}
	tok, ok := p.engine.enter()
	if !ok {
		q.localRoute.route.Leave(e.loop)
		return nil, 0
	}
	e.local = localTurn{q: q, peer: p.engine, token: tok, held: true}
	if j := e.journal; j != nil && !slices.Contains(j.peers, p.engine) {
		j.peers = append(j.peers, p.engine)
	}
	p.engine.touch(p)
	if e.first == nil && !e.loop.Shared() {
		return p.t, localSliceAlone
	}
	return p.t, localSlice
}

// endLocal ends a localTurn, if there is one; also while a vanished page unwinds it. The
// peer stays recorded for onMemoryFault.
func (e *engine) endLocal() {
	if m := &e.local; m.held {
		m.held = false
		m.peer.space.Epochs().Leave(e.loop.ID(), m.token)
		m.q.localRoute.route.Leave(e.loop)
	}
}

// GatherSpan implements roce.Adapter.
func (q *qp) GatherSpan(w *roce.WQE, off, n uint64) ([]byte, translate.Miss) {
	return q.localSpan(w.SGEs, off, n, translate.LocalRead)
}

// ScatterSpan implements roce.Adapter.
func (q *qp) ScatterSpan(sg []roce.SGE, off, n uint64) ([]byte, translate.Miss) {
	return q.localSpan(sg, off, n, translate.LocalWrite)
}

func (q *qp) localSpan(sg []roce.SGE, off, n uint64, need translate.Access) ([]byte, translate.Miss) {
	for i := range sg {
		s := &sg[i]
		if off >= uint64(s.Length) {
			off -= uint64(s.Length)
			continue
		}
		va, ok := s.VA.Add(off)
		if !ok {
			return nil, translate.Miss{Kind: translate.OutOfRange, Key: s.Key, Where: translate.Where{VA: s.VA},
				Len: uint64(s.Length)}
		}
		n = min(n, uint64(s.Length)-off)
		switch {
		case !q.phys(s.Key):
			return q.dev.vm.Resolve(s.Key, q.pd, va, n, need)
		case need.Writes():
			return q.engine.space.Host(translate.PA(va), int(n))
		default:
			return q.engine.space.HostRead(translate.PA(va), int(n))
		}
	}
	return nil, translate.Miss{Kind: translate.OutOfRange, Len: n}
}

// RemoteSpan implements roce.Adapter.
func (q *qp) RemoteSpan(key translate.Key, va translate.VA, n uint64, need translate.Access) ([]byte, translate.Miss) {
	b, m := q.dev.vm.Resolve(key, q.pd, va, n, need)
	if m.Kind == translate.BadPD {
		b, m = q.dev.vm.Resolve(key, q.windowPD, va, n, need)
	}
	return b, m
}
