package hca

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/frame"
	"github.com/vnicd/vnicd/device/frame/header"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/rdma/roce"
	"github.com/vnicd/vnicd/device/rdma/wire"
)

// connections is what the adapter knows of the connection management that passes its queue pair 1 (MT-3, MT-4). The
// lock is taken for management datagrams and for changes of QPs, never for data.
type connections struct {
	mu      sync.Mutex
	table   *cm.Table
	refused [cm.NumReasons]uint64
	forged  uint64 // not from the MAC that its address is known to have
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

// sentGSI takes note of a frame that the GSI QP sends.
func (d *Device) sentGSI(q *qp, b *frame.Buf) {
	var p wire.RoCE
	if wire.ParseRoCE(b.Bytes(), &p) != nil || !p.Info.Is(wire.HasDETH) {
		return
	}
	c := &d.conns
	c.mu.Lock()
	defer c.mu.Unlock()
	x, _ := c.table.Watch(q.engine.loop.Now(), &cm.Datagram{
		Out: true, Local: p.SrcIP, Remote: p.DstIP, RemoteMAC: p.DMAC, VLAN: networkVLAN(p.VLAN), RemoteQPN: p.BTH.DestQP,
		MAD: p.Payload,
	})
	// The connection's packets will have the addresses of its datagrams.
	if port := d.port.Load(); x != nil && port != nil {
		(*port).ResolveHCA(q.engine.loop, b.Bytes(), &x.Path)
	}
}

// admitGSI tells whether a packet that has arrived for the GSI QP may reach it. Those without the GSI's Q_Key are the
// transport's to drop.
func (d *Device) admitGSI(q *qp, p *wire.RoCE) bool {
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
	if x != nil && port != nil {
		back := wire.Path{SMAC: p.DMAC, DMAC: p.SMAC, VLAN: p.VLAN, V1: p.V1, SrcIP: p.DstIP, DstIP: p.SrcIP}
		if t, err := back.Template(); err == nil {
			(*port).ResolveHCA(loop, t.Bytes(), &x.Path)
		}
	}
	return true
}

// networkVLAN converts a frame's VLAN to the network's: 0 is untagged.
func networkVLAN(vlan uint16) uint16 {
	if vlan == header.NoVLAN {
		return 0
	}
	return vlan
}

// bind finds the path of a connected QP that has got its peer (MT-5): its connection's, if connection management has
// made one, else by its addresses. On its engine.
func (q *qp) bind(a *roce.Attr) {
	h, loop, port := q.t.Header(), q.engine.loop, q.dev.port.Load()
	if h == nil {
		return
	}
	c := &q.dev.conns
	c.mu.Lock()
	if x := c.table.Bind(q.n, a.AV.DGID, a.DestQPN); x != nil && x.RemoteMAC == a.AV.DMAC {
		q.path = x.Path
	}
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
	c.mu.Unlock()
}

// Connection describes a connection of the VM for people: a connected QP, one that connection management is setting up
// or has ended, or one of datagrams that a service ID was resolved for.
type Connection struct {
	Type string `json:"type"` // RC, UC, UD
	// State is that of connection management (cm.State), or "direct": programs have exchanged addresses by themselves.
	State    string `json:"state"`
	QPState  string `json:"qp_state,omitempty"`
	Role     string `json:"role,omitempty"` // active, passive
	LocalQPN uint32 `json:"lqpn,omitempty"`
	// RemoteQPN is 0 as long as it is not known.
	RemoteQPN    uint32  `json:"rqpn,omitempty"`
	LocalID      uint32  `json:"local_comm_id,omitempty"`
	RemoteID     uint32  `json:"remote_comm_id,omitempty"`
	ServiceID    string  `json:"service_id,omitempty"`
	Service      string  `json:"service,omitempty"` // of rdma_cm: port space and port
	LocalGID     string  `json:"local_gid"`
	RemoteGID    string  `json:"remote_gid"`
	LocalMAC     string  `json:"local_mac"`
	RemoteMAC    string  `json:"remote_mac"`
	VLAN         uint16  `json:"vlan,omitempty"`
	RoCEv1       bool    `json:"roce_v1,omitempty"`
	PathMTU      int     `json:"path_mtu,omitempty"`
	RejectReason uint16  `json:"reject_reason,omitempty"` // IBTA 12.6.7.2
	Tuple        *Tuple  `json:"tuple,omitempty"`         // none: the peer's place is not known
	Age          float64 `json:"age_s,omitempty"`         // seconds since connection management began
}

// Tuple is where a connection's packets go (MT-3).
type Tuple struct {
	Network string         `json:"network"`
	VNI     uint32         `json:"vni"`
	Port    string         `json:"port"` // of the switch
	Kind    string         `json:"kind"` // of the port: vtep, vm, tap
	Far     vswitch.Remote `json:"-"`    // far end of a vtep port
	VTEP    netip.Addr     `json:"vtep,omitzero"`
	Source  netip.Addr     `json:"local_vtep,omitzero"`
	UDPPort uint16         `json:"udp_port,omitempty"`
	DSCP    uint8          `json:"dscp,omitempty"`
	MTU     int            `json:"mtu"`
	// Moves counts how often the place has changed while it was bound.
	Moves uint64 `json:"moves"`
}

func tupleOf(p *vswitch.Path) *Tuple {
	out, far := p.Out()
	if out == nil {
		return nil
	}
	n, c := out.Network(), out.Config()
	return &Tuple{Network: n.Name(), VNI: n.VNI(), Port: c.Name, Kind: c.Kind.String(), Far: far, MTU: n.MTU(),
		Moves: p.Moves()}
}

// Connections lists the VM's connections: those with a QP by QP number, then the others. It visits the loops; any
// goroutine but theirs. QPs are left out if a command in progress takes long.
func (d *Device) Connections() []Connection {
	var out []Connection
	if d.tryLockTables() {
		defer d.mu.Unlock()
		d.eachQP(func(q *qp) {
			if q.typ == roce.RC || q.typ == roce.UC {
				if c, ok := q.connection(); ok {
					out = append(out, c)
				}
			}
		})
	}
	slices.SortFunc(out, func(a, b Connection) int { return int(a.LocalQPN) - int(b.LocalQPN) })
	with := map[uint32]int{} // QP number -> place in out
	for i := range out {
		with[out[i].LocalQPN] = i
	}
	now := d.engines[0].loop.Clock().Now()
	for _, c := range d.conns.copy(now) {
		if i, ok := with[c.LocalQPN]; ok && c.Bound() {
			out[i].managed(&c, now)
			continue
		}
		x := Connection{Type: [...]string{"RC", "UC", "RD", "UD"}[c.Transport&3], LocalQPN: c.LocalQPN,
			RemoteQPN: c.RemoteQPN, LocalGID: gidText(c.Local), RemoteGID: gidText(c.Remote), LocalMAC: macText(d.cfg.MAC),
			RemoteMAC: macText(c.RemoteMAC), VLAN: c.VLAN, Tuple: tupleOf(&c.Path)}
		x.managed(&c, now)
		out = append(out, x)
	}
	return out
}

// copy returns what is known; loops wait for it, so no more is done with it here.
func (c *connections) copy(now int64) (out []cm.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	out = make([]cm.Conn, 0, c.table.Len())
	c.table.Each(now, func(x *cm.Conn) { out = append(out, *x) })
	return out
}

// connection describes a QP that has a peer; on its engine.
func (q *qp) connection() (c Connection, ok bool) {
	var a roce.Attr
	q.t.Query(&a)
	h := q.t.Header()
	if h == nil || a.State == roce.Reset {
		return c, false
	}
	if port := q.dev.port.Load(); port != nil {
		(*port).ResolveHCA(q.engine.loop, h, &q.path)
	}
	return Connection{Type: q.typ.String(), State: "direct", QPState: a.State.String(), LocalQPN: q.n,
		RemoteQPN: a.DestQPN, LocalGID: gidText(a.AV.SGID), RemoteGID: gidText(a.AV.DGID), LocalMAC: macText(a.AV.SMAC),
		RemoteMAC: macText(a.AV.DMAC), VLAN: networkVLAN(a.AV.VLAN), RoCEv1: a.AV.RoCEv1, PathMTU: abi.MTUBytes(a.PathMTU),
		Tuple: tupleOf(&q.path)}, true
}

// managed adds what connection management says.
func (x *Connection) managed(c *cm.Conn, now int64) {
	x.State, x.Role = c.State.String(), "passive"
	if c.Active {
		x.Role = "active"
	}
	x.LocalID, x.RemoteID, x.RejectReason = c.LocalID, c.RemoteID, c.Reject
	x.ServiceID, x.Service = fmt.Sprintf("0x%016x", c.Service), serviceText(c.Service)
	x.Age = time.Duration(now - c.Began).Seconds()
	if x.PathMTU == 0 {
		x.PathMTU = abi.MTUBytes(c.PathMTU)
	}
}

// serviceText reads the service IDs of rdma_cm (IBTA annex A11): port space and port.
func serviceText(id uint64) string {
	if id>>24 != 1 {
		return ""
	}
	space := map[uint8]string{0x06: "tcp", 0x11: "udp", 0x3f: "ib", 0x02: "ipoib"}[uint8(id>>16)]
	if space == "" {
		return ""
	}
	return fmt.Sprintf("%s %d", space, uint16(id))
}

func gidText(g [16]byte) string { return netip.AddrFrom16(g).Unmap().String() }
func macText(m [6]byte) string  { return net.HardwareAddr(m[:]).String() }

// Drops counts what arrived and was not accepted, by reason (MT-6). It visits the loops; any goroutine but theirs.
func (d *Device) Drops() map[string]uint64 {
	out := map[string]uint64{}
	add := func(name string, n uint64) {
		if n > 0 {
			out[name] += n
		}
	}
	for _, e := range d.engines {
		e.loop.Do(func() {
			for i, n := range e.stats.Drops {
				add(roce.Drop(i).String(), n)
			}
			add("r-key", e.stats.AccessErrors)
			add("sequence", e.stats.OutOfSequence)
			add("duplicate", e.stats.Duplicates)
		})
		add("inbox-full", e.inboxFull.Load())
	}
	for i := range d.rejected {
		add(rejectNames[i], d.rejected[i].Load())
	}
	d.conns.mu.Lock()
	defer d.conns.mu.Unlock()
	for i, n := range d.conns.refused {
		add(cm.Reason(i).String(), n)
	}
	add("cm-mac", d.conns.forged)
	return out
}
