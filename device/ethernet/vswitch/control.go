package vswitch

import "net/netip"

// The interface for control planes of addresses (EVPN): they set what tunnels are used for, are notified of changes at
// this host's ports, and list the addresses there.

// Bits of Network.tunnels.
const (
	noTunnelFlood = 1 << iota
	noTunnelLearn
)

// SetTunnels sets whether unicast frames to unknown addresses are flooded into tunnels, and whether addresses are
// learnt from tunnels. Both are on initially. Frames from tunnels are checked as before; learnt addresses age.
func (n *Network) SetTunnels(floodUnknown, learn bool) {
	var v uint32
	if !floodUnknown {
		v |= noTunnelFlood
	}
	if !learn {
		v |= noTunnelLearn
	}
	n.tunnels.Store(v)
}

// OnChange has f called when an address was learnt at a port of this host, or has moved there, or when such a port has
// claimed an IP address. f runs on loops and must not block; nil removes it. Ageing is not reported.
func (n *Network) OnChange(f func()) {
	if f == nil {
		n.changed.Store(nil)
		return
	}
	n.changed.Store(&f)
}

func (n *Network) tell() {
	if f := n.changed.Load(); f != nil {
		(*f)()
	}
}

// Local is an address at a port of this host.
type Local struct {
	MAC
	Port  string
	Kind  Kind
	Fixed bool // the port's own, not learnt
}

// LocalIP is an IP address whose MAC is at a port of this host.
type LocalIP struct {
	IP netip.Addr
	MAC
}

// Locals lists the addresses at ports of this host, each once for all its VLANs, without those set by SetStatic, and
// without those of VMs that have not run here yet, since they may run on another host. They are not ordered.
func (n *Network) Locals() (macs []Local, ips []LocalIP) {
	now := n.seconds()
	t := n.table.Load()
	seen := map[uint64]bool{}
	n.fdb.each(func(k uint64, v value) {
		if int(v.port()) >= len(t.byID) || v.expired(now, n.age) {
			return
		}
		a := t.byID[v.port()]
		if a == nil || a.cfg.Kind == KindVTEP || seen[k&macBits] {
			return
		}
		if p, ok := a.port.(traveller); ok && v.static() && !p.claimed() {
			return
		}
		seen[k&macBits] = true
		macs = append(macs, Local{MAC: keyMAC(k), Port: a.cfg.Name, Kind: a.cfg.Kind, Fixed: v.static()})
	})
	expired := n.neighExpired(now)
	n.neigh.mu.Lock()
	defer n.neigh.mu.Unlock()
	for i := range n.neigh.sets {
		for k := range n.neigh.sets[i] {
			if e := &n.neigh.sets[i][k]; e.mac != 0 && e.port != noPort && !expired(e) && seen[e.mac] {
				ips = append(ips, LocalIP{IP: netip.AddrFrom16(e.ip).Unmap(), MAC: keyMAC(e.mac)})
			}
		}
	}
	return macs, ips
}
