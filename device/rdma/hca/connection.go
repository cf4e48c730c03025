// Side: control

package hca

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/rdma/abi"
	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/device/rdma/roce"
)

// Connection describes a connection of the VM for status output: a connected QP, a connection that connection
// management is setting up or has ended, or a datagram service whose service ID was resolved.
type Connection struct {
	Type string `json:"type"` // RC, UC, UD
	// State is that of connection management (cm.State), or "direct" if the programs exchanged addresses themselves.
	State    string `json:"state"`
	QPState  string `json:"qp_state,omitempty"`
	Role     string `json:"role,omitempty"` // active, passive
	LocalQPN uint32 `json:"lqpn,omitempty"`
	// RemoteQPN is 0 while it is unknown.
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
	Tuple        *Tuple  `json:"tuple,omitempty"`         // nil: the peer's location is unknown
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
	// Moves counts the changes of location while the QP was bound.
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

// Connections lists the VM's connections: first those with a QP, by QP number. It visits the loops; call it from any
// other goroutine. QPs are left out if a command in progress takes long.
func (d *Device) Connections() []Connection {
	var out []Connection
	if d.tryLockTables() {
		defer d.mu.Unlock()
		d.eachQP(func(q *qp) {
			if q.typ == roce.RC || q.typ == roce.UC {
				if c, ok := connectionOf(q); ok {
					out = append(out, c)
				}
			}
		})
	}
	slices.SortFunc(out, func(a, b Connection) int { return int(a.LocalQPN) - int(b.LocalQPN) })
	with := map[uint32]int{} // QP number -> index in out
	for i := range out {
		with[out[i].LocalQPN] = i
	}
	now := d.data.engines[0].loop.Clock().Now()
	for _, c := range d.data.conns.copy(now) {
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

// connectionOf describes a QP that has a peer; on the QP's engine.
func connectionOf(q *qp) (c Connection, ok bool) {
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

// managed adds the information of connection management.
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

// serviceText decodes the service IDs of rdma_cm (IBTA annex A11): port space and port.
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

// Reasons of Drops that no other table has.
const (
	dropKey       = "r-key"
	dropSequence  = "sequence"
	dropDuplicate = "duplicate"
	dropInbox     = "inbox-full"
)

// DropReasons returns the reasons that Drops counts, each once.
func DropReasons() []string {
	out := []string{dropKey, dropSequence, dropDuplicate, dropInbox, dropCMMAC}
	for r := range roce.NumDrops {
		out = append(out, r.String())
	}
	out = append(out, rejectNames[:]...)
	for r := cm.Pass + 1; r < cm.NumReasons; r++ {
		out = append(out, r.String())
	}
	return out
}

// Drops counts rejected packets by reason (MT-6); reasons that did not occur are left out. It visits the loops; call it
// from any other goroutine.
func (d *Device) Drops() map[string]uint64 {
	out := map[string]uint64{}
	add := func(name string, n uint64) {
		if n > 0 {
			out[name] += n
		}
	}
	for _, e := range d.data.engines {
		e.onLoop(func() {
			c := e.total()
			for i, n := range c.Drops {
				add(roce.Drop(i).String(), n)
			}
			add(dropKey, c.AccessErrors)
			add(dropSequence, c.OutOfSequence)
			add(dropDuplicate, c.Duplicates)
		})
		add(dropInbox, e.inboxFull.Load())
	}
	for i := range d.data.rejected {
		add(rejectNames[i], d.data.rejected[i].Load())
	}
	d.data.conns.countDrops(add)
	return out
}
