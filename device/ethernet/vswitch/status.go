package vswitch

import (
	"bytes"
	"cmp"
	"net/netip"
	"slices"
	"time"
)

// Entry is one line of the forwarding table.
type Entry struct {
	MAC    MAC           `json:"mac"`
	VLAN   uint16        `json:"vlan,omitempty"` // 0: untagged; of a static entry: all
	Port   string        `json:"port"`
	Kind   string        `json:"kind"`
	Remote Remote        `json:"remote,omitempty"`
	Static bool          `json:"static,omitempty"`
	Idle   time.Duration `json:"idle"` // since the last frame from it, whole seconds
}

// MarshalText makes a MAC a string in JSON.
func (m MAC) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (m *MAC) UnmarshalText(b []byte) (err error) {
	*m, err = ParseMAC(string(b))
	return err
}

// PortStatus is a snapshot of one port.
type PortStatus struct {
	Name    string       `json:"name"`
	Kind    string       `json:"kind"`
	MACs    []MAC        `json:"macs,omitempty"`
	IPs     []netip.Addr `json:"ips,omitempty"`
	Loop    int          `json:"loop"` // -1 = no single one
	Entries int          `json:"learnt"`
	// ShortPath counts the frames among them that bypassed vnicd, in the kernel.
	ShortPath uint64 `json:"short_path_frames,omitempty"`
	Totals
}

// Status is a snapshot of a network for `vnicd status`.
type Status struct {
	VNI     uint32 `json:"vni"`
	Name    string `json:"name"`
	MTU     int    `json:"mtu"`
	Entries int    `json:"entries"`
	Static  int    `json:"static"`
	Moves   uint64 `json:"moves"`
	Aged    uint64 `json:"aged"`
	// Displaced counts entries removed for ports below their share of a full table.
	Displaced uint64 `json:"displaced,omitempty"`
	// Flaps counts addresses found flapping; Flapping lists the present ones.
	Flaps      uint64            `json:"flaps,omitempty"`
	Flapping   []Flapping        `json:"flapping,omitempty"`
	Drops      map[string]uint64 `json:"drops,omitempty"` // of all ports, closed ones included
	Ports      []PortStatus      `json:"ports"`
	FDB        []Entry           `json:"fdb"`
	Neighbours []Neighbour       `json:"neighbours,omitempty"`
	// Pruned counts the multicast frames of all ports that were not flooded.
	Pruned    uint64           `json:"pruned,omitempty"`
	Multicast *MulticastStatus `json:"multicast,omitempty"` // nil: flooded
}

// Status returns a snapshot. It walks the whole table: for the control plane.
func (n *Network) Status() Status {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := Status{VNI: n.cfg.VNI, Name: n.cfg.Name, MTU: n.MTU(), Moves: n.moves.Load(), Aged: n.evicted.Load(),
		Displaced: n.displaced.Load(), Flaps: n.flaps.count.Load(), Flapping: n.Flapping(), FDB: n.Entries(),
		Neighbours: n.Neighbours(), Multicast: n.Multicast()}
	var sum Totals
	sum.Merge(n.pastTotals)
	s.Ports = n.Ports()
	for _, p := range s.Ports {
		sum.Merge(p.Totals)
	}
	s.Drops, s.Pruned = sum.Drops, sum.Pruned
	for _, e := range s.FDB {
		s.Entries++
		if e.Static {
			s.Static++
		}
	}
	return s
}

// Ports returns a snapshot of the ports, in the order of attachment.
func (n *Network) Ports() (out []PortStatus) {
	for _, a := range n.table.Load().flood {
		p := PortStatus{Name: a.cfg.Name, Kind: a.cfg.Kind.String(), MACs: a.cfg.MACs, IPs: a.cfg.IPs, Loop: -1,
			Entries: int(a.entries.Load()), Totals: a.Counters.Totals()}
		short := a.carried()
		p.ShortPath = short.InFrames + short.OutFrames
		p.Totals.Merge(short)
		if a.cfg.Loop != nil {
			p.Loop = a.cfg.Loop.ID()
		}
		out = append(out, p)
	}
	return out
}

// Entries returns the live entries of the forwarding table, ordered by address.
func (n *Network) Entries() []Entry {
	now := n.seconds()
	var out []Entry
	n.fdb.each(func(k uint64, v value) {
		if e, ok := n.entry(k, v, now); ok {
			out = append(out, e)
		}
	})
	slices.SortFunc(out, func(a, b Entry) int {
		return cmp.Or(bytes.Compare(a.MAC[:], b.MAC[:]), cmp.Compare(a.VLAN, b.VLAN))
	})
	return out
}

// Lookup returns the table's entry for untagged frames to an address. Callable from any goroutine.
func (n *Network) Lookup(m MAC) (Entry, bool) { return n.LookupIn(Address{MAC: m}) }

// LookupIn is Lookup for any VLAN.
func (n *Network) LookupIn(m Address) (Entry, bool) {
	now := n.seconds()
	v, ok := n.find(m.MAC.key(), uint64(m.VLAN)<<48, now)
	if !ok {
		return Entry{}, false
	}
	return n.entry(m.key(), v, now)
}

func (n *Network) entry(k uint64, v value, now uint32) (Entry, bool) {
	a := n.byID(v.port())
	if a == nil || v.expired(now, n.age) {
		return Entry{}, false
	}
	e := Entry{MAC: keyMAC(k), VLAN: keyVLAN(k), Port: a.cfg.Name, Kind: a.cfg.Kind.String(), Remote: Remote(v.remote()),
		Static: v.static()}
	if idle := int32(now - v.seen()); !e.Static && idle > 0 {
		e.Idle = time.Duration(idle) * time.Second
	}
	return e, true
}

// Merge adds o.
func (t *Totals) Merge(o Totals) {
	t.InFrames += o.InFrames
	t.InBytes += o.InBytes
	t.OutFrames += o.OutFrames
	t.OutBytes += o.OutBytes
	t.Floods += o.Floods
	t.Answered += o.Answered
	t.Pruned += o.Pruned
	for k, v := range o.Drops {
		if t.Drops == nil {
			t.Drops = make(map[string]uint64)
		}
		t.Drops[k] += v
	}
}
