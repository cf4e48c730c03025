// Side: data

package hca

import (
	"sync"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// Connection management datagrams of the GSI QP (queue pair 1), and the paths that they give to connected QPs.

// connections is the adapter's record of the connection management that passes its queue pair 1 (MT-3, MT-4). The
// lock is taken for management datagrams and for changes of QPs, never for data.
type connections struct {
	mu      sync.Mutex
	table   *cm.Table
	refused [cm.NumReasons]uint64
	forged  uint64 // datagrams whose source MAC is not the known owner of the source address
}

func (c *connections) dropped() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.forged
	for _, x := range c.refused {
		n += x
	}
	return n
}

// clear forgets all connections.
func (c *connections) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.table.Clear()
}

// dropCMMAC is the reason for forged.
const dropCMMAC = "cm-mac"

// countDrops calls add for each reason to drop a datagram.
func (c *connections) countDrops(add func(reason string, n uint64)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, n := range c.refused {
		add(cm.Reason(i).String(), n)
	}
	add(dropCMMAC, c.forged)
}

// sentGSI records a datagram that the GSI QP sends.
func (d *dataSide) sentGSI(q *qp, b *frame.Buf) {
	var p wire.RoCE
	if wire.ParseRoCE(b.Bytes(), b.Layout(), &p) != nil || !p.Info.Is(wire.HasDETH) {
		return
	}
	c := &d.conns
	c.mu.Lock()
	defer c.mu.Unlock()
	x, _ := c.table.Watch(q.engine.loop.Now(), &cm.Datagram{
		Out: true, Local: p.SrcIP, Remote: p.DstIP, RemoteMAC: p.DMAC, VLAN: networkVLAN(p.VLAN), RemoteQPN: p.BTH.DestQP,
		MAD: p.Payload,
	})
	d.notePatience(x)
	// The connection's packets will have the addresses of its datagrams.
	if port := d.port.Load(); x != nil && port != nil {
		(*port).ResolveHCA(q.engine.loop, b.Bytes(), &x.Path)
	}
}

// admitGSI reports whether a received packet may reach the GSI QP. It admits packets without the GSI's Q_Key: the
// transport drops them.
func (d *dataSide) admitGSI(q *qp, p *wire.RoCE) bool {
	h := p.DETH()
	if !p.Info.Is(wire.HasDETH) || h.QKey != roce.GSIQKey {
		return true
	}
	c, loop, port := &d.conns, q.engine.loop, d.port.Load()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !d.ownsAddress(p.SMAC, p.SrcIP, p.VLAN) {
		c.forged++
		return false
	}
	x, why := c.table.Watch(loop.Now(), &cm.Datagram{
		Local: p.DstIP, Remote: p.SrcIP, RemoteMAC: p.SMAC, VLAN: networkVLAN(p.VLAN), RemoteQPN: h.SrcQP, MAD: p.Payload,
	})
	if why != cm.Pass {
		c.refused[why]++
		return false
	}
	d.notePatience(x)
	if x != nil && port != nil {
		back := wire.Path{SMAC: p.DMAC, DMAC: p.SMAC, VLAN: p.VLAN, V1: p.V1, SrcIP: p.DstIP, DstIP: p.SrcIP}
		if t, err := back.Template(); err == nil {
			(*port).ResolveHCA(loop, t.Bytes(), &x.Path)
		}
	}
	return true
}

// notePatience tells the queue pair of connection x, nil if none, what the peer does after RNR NAKs. The caller holds
// the lock of d.conns.
func (d *dataSide) notePatience(x *cm.Conn) {
	if x == nil || !x.Bound() {
		return
	}
	if q := d.qpFor(x.LocalQPN); q != nil {
		q.patience.Store(uint32(x.PeerPatience()))
	}
}

// networkVLAN converts a frame's VLAN to the network's: 0 is untagged.
func networkVLAN(vlan uint16) uint16 {
	if vlan == header.NoVLAN {
		return 0
	}
	return vlan
}

// bind finds the path of a connected QP that has got its peer (MT-5): the path of its connection, if connection
// management made one, else by its addresses. On its engine.
func (q *qp) bind(a *roce.Attr) {
	h, loop, port := q.t.Header(), q.engine.loop, q.dev.port.Load()
	if h == nil {
		return
	}
	c := &q.dev.conns
	c.mu.Lock()
	patience := wire.PatienceUnknown
	if x := c.table.Bind(q.n, a.AV.DGID, a.DestQPN); x != nil && x.RemoteMAC == a.AV.DMAC {
		q.path, patience = x.Path, x.PeerPatience()
	}
	q.patience.Store(uint32(patience))
	c.mu.Unlock()
	if port != nil {
		(*port).ResolveHCA(loop, h, &q.path)
	}
}

// unbind ends the QP's connection; on its engine.
func (q *qp) unbind() {
	q.path = vswitch.Path{}
	c := &q.dev.conns
	c.mu.Lock()
	c.table.Release(q.engine.loop.Now(), q.n)
	q.patience.Store(uint32(wire.PatienceUnknown))
	c.mu.Unlock()
}

// copy returns a snapshot. Loops wait for the lock, so the caller processes it outside.
func (c *connections) copy(now int64) (out []cm.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	out = make([]cm.Conn, 0, c.table.Len())
	c.table.Each(now, func(x *cm.Conn) { out = append(out, *x) })
	return out
}

// restore adds the connections of a context.
func (c *connections) restore(now int64, conns []cm.Conn) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range conns {
		if err := c.table.Add(now, &conns[i]); err != nil {
			return err
		}
	}
	return nil
}
