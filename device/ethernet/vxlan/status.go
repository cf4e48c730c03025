package vxlan

import (
	"net/netip"
	"slices"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// PeerStatus is one peer of one network.
type PeerStatus struct {
	Addr   netip.Addr     `json:"addr"`
	Remote vswitch.Remote `json:"remote"` // the number in the forwarding table's entries
	Learnt bool           `json:"learnt,omitempty"`
	MTU    int            `json:"mtu,omitempty"` // inner, of the path to the peer; 0 = unknown or no route
	// ReservedPort: datagrams are accepted only from UDP ports below 1024.
	ReservedPort bool `json:"reserved_port,omitempty"`
}

// NetworkStatus is one network of a VTEP.
type NetworkStatus struct {
	VNI   uint32       `json:"vni"`
	Name  string       `json:"name"`
	Learn bool         `json:"learn_peers,omitempty"`
	Peers []PeerStatus `json:"peers"`
}

// Status is a snapshot of a VTEP for `vnicd status`. Drops at a network's tunnel port are in that network's status;
// Totals has those without a network.
type Status struct {
	Local       netip.Addr      `json:"local"`
	Port        uint16          `json:"port"`
	Device      string          `json:"device"`
	MTU         int             `json:"mtu"` // for tenants, of the local address's interface
	SourcePorts []uint16        `json:"source_ports"`
	Networks    []NetworkStatus `json:"networks"`
	Refused     []Refused       `json:"refused,omitempty"` // the latest
	ShortPath   ShortPathStatus `json:"short_path"`
	vswitch.Totals
}

// Status returns a snapshot.
func (vt *VTEP) Status() Status {
	vt.mu.Lock()
	defer vt.mu.Unlock()
	s := Status{Local: vt.cfg.Local, Port: vt.cfg.Port, Device: vt.dev, MTU: vt.mtu, Totals: vt.Counters.Totals(),
		Refused: vt.refusals()}
	s.ShortPath = vt.shortPathStatus(&s.Totals)
	vt.socketDrops(&s.Totals)
	for _, t := range vt.tx {
		if t != nil {
			for _, k := range t.socks {
				s.SourcePorts = append(s.SourcePorts, k.port)
			}
		}
	}
	for vni, p := range *vt.nets.Load() {
		n := NetworkStatus{VNI: vni, Name: p.net.Name(), Learn: p.learn.Load()}
		n.Peers = vt.Peers(vni)
		s.Networks = append(s.Networks, n)
	}
	slices.SortFunc(s.Networks, func(a, b NetworkStatus) int { return int(a.VNI) - int(b.VNI) })
	return s
}

// Peers lists the peers of one network, in the order of their numbers.
func (vt *VTEP) Peers(vni uint32) (out []PeerStatus) {
	if p := (*vt.nets.Load())[vni]; p != nil {
		for _, x := range p.peers.Load().list {
			out = append(out, PeerStatus{Addr: x.addr, Remote: x.id, Learnt: x.learnt, MTU: (*vt.paths.Load())[x.addr],
				ReservedPort: vt.lastPort(x) < reservedPorts})
		}
	}
	return out
}

// socketDrops adds the kernel's drops at our sockets: datagrams that found a receive buffer full, datagrams to a source
// port of ours, where none is accepted (MT-6), and datagrams that did not come through the protection.
func (vt *VTEP) socketDrops(t *vswitch.Totals) {
	add := func(name string, fd int) {
		n, err := socketDrops(fd)
		if err != nil || n == 0 {
			return
		}
		if t.Drops == nil {
			t.Drops = make(map[string]uint64)
		}
		t.Drops[name] += uint64(n)
	}
	for _, r := range vt.rx {
		add(SocketOverflow, r.fd)
	}
	for _, s := range vt.tx {
		if s != nil {
			for _, k := range s.socks {
				add(WrongPort, k.fd)
			}
		}
	}
	if vt.guard >= 0 {
		add(Unprotected, vt.guard)
	}
}

// DropReasons returns the names of the reasons for which a VTEP drops datagrams that are of no network (Status.Drops).
func DropReasons() []string {
	return []string{vswitch.BadHeader.String(), vswitch.UnknownVNI.String(), vswitch.Truncated.String(),
		vswitch.NoBuffer.String(), SocketOverflow, WrongPort, Unprotected}
}

// Names of drops that the kernel counts, modulo 2^32.
const (
	SocketOverflow = "socket-overflow"
	WrongPort      = "wrong-port"
	Unprotected    = "unprotected" // not through Config.Protection
)
