package vxlan

import (
	"fmt"
	"net/netip"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// ShortPath carries established TCP between host ports and tunnels where the switch would forward it unchanged. Package
// fastpath implements it in the kernel. The VTEP calls Join, Leave and Close one at a time, Recheck from any goroutine.
type ShortPath interface {
	// Join lets frames of a network take the short path; tunnel is the VTEP's port of the network.
	Join(tunnel *vswitch.Attachment)
	// Leave reverts Join: once it has returned, no frame of the network takes the short path.
	Leave(tunnel *vswitch.Attachment)
	// Invalidate makes all entries void, after a change outside the networks. Flows may be offered again.
	Invalidate()
	// Recheck schedules a check of the interfaces and routes that the entries depend on. It does not block.
	Recheck()
	// Entries returns the number of entries.
	Entries() int
	// Carried returns the counters of all frames that took the short path, as seen from the tunnels.
	Carried() vswitch.Totals
	// Close releases everything. All networks must have left.
	Close()
}

// ShortPathConfig describes the tunnel end that a short path serves.
type ShortPathConfig struct {
	Local       netip.Addr // without zone
	Port        uint16
	SourcePorts []uint16 // source ports of the tunnel end's datagrams
	// ZeroChecksum6 permits datagrams over IPv6 without UDP checksum.
	ZeroChecksum6 bool
	Tunnel        Tunnel
	Log           hclog.Logger
}

// Tunnel answers a short path's questions about its VTEP. Its methods take no lock.
type Tunnel interface {
	// Peer returns the address of one of a tunnel port's peers, and the highest UDP port from which its datagrams are
	// accepted; ok is false if it has left or its address has a zone.
	Peer(tunnel *vswitch.Attachment, r vswitch.Remote) (addr netip.Addr, lastPort uint16, ok bool)
	// InnerMTU returns the tenants' MTU for an underlay MTU.
	InnerMTU(underlay int) int
	// Monitored reports whether a capture reads the tunnels' datagrams.
	Monitored() bool
	// RecomputeMTUs schedules a computation of the networks' MTUs.
	RecomputeMTUs()
}

// tunnel implements Tunnel.
type tunnel struct{ vt *VTEP }

func (t tunnel) Peer(a *vswitch.Attachment, r vswitch.Remote) (addr netip.Addr, lastPort uint16, ok bool) {
	p, ok := a.Port().(*port)
	if !ok {
		return netip.Addr{}, 0, false
	}
	set := p.peers.Load()
	if int(r) >= len(set.byID) {
		return netip.Addr{}, 0, false
	}
	x := set.byID[r]
	if x == nil || x.retired || x.scope != 0 {
		return netip.Addr{}, 0, false
	}
	return x.addr, t.vt.lastPort(x), true
}

func (t tunnel) InnerMTU(underlay int) int { return t.vt.inner(underlay) }
func (t tunnel) Monitored() bool           { return t.vt.monitor.Load() != nil }
func (t tunnel) RecomputeMTUs()            { t.vt.recompute() }

// openShortPath opens the short path, if configured and possible. Without it, TCP of host ports goes through the
// switch.
func (vt *VTEP) openShortPath() {
	switch {
	case vt.cfg.ShortPath == nil:
		vt.noShort = "off"
		return
	case vt.cfg.Protection != nil: // its programs send and receive at an Ethernet interface, in cleartext
		vt.noShort = "off: the underlay is encrypted"
		return
	}
	c := ShortPathConfig{Local: vt.cfg.Local.WithZone(""), Port: vt.cfg.Port, ZeroChecksum6: vt.cfg.ZeroChecksum6,
		Tunnel: tunnel{vt}, Log: vt.log}
	for _, s := range vt.tx {
		if s != nil {
			for _, k := range s.socks {
				c.SourcePorts = append(c.SourcePorts, k.port)
			}
		}
	}
	short, err := vt.cfg.ShortPath(c)
	if err != nil {
		vt.noShort = fmt.Sprintf("not possible: %v", err)
		vt.log.Info("no short path: TCP of host ports passes through vnicd", "error", err)
		return
	}
	vt.short = short
}

// ShortPathOn is the State of a short path in use.
const ShortPathOn = "on"

// ShortPathStatus describes the use of the short path.
type ShortPathStatus struct {
	State   string `json:"state"` // ShortPathOn, "off", or why there is none
	Entries int    `json:"entries,omitempty"`
	// Frames counts frames in both directions. The totals include them.
	Frames uint64 `json:"frames,omitempty"`
}

// shortPathStatus returns the status and adds the short path's frames to the totals.
func (vt *VTEP) shortPathStatus(t *vswitch.Totals) ShortPathStatus {
	if vt.short == nil {
		return ShortPathStatus{State: vt.noShort}
	}
	sum := vt.short.Carried()
	t.Merge(sum)
	return ShortPathStatus{State: ShortPathOn, Entries: vt.short.Entries(), Frames: sum.InFrames + sum.OutFrames}
}
