package daemon

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/ethernet/overlay"
	"github.com/vnicd/vnicd/device/ethernet/overlay/evpn"
	"github.com/vnicd/vnicd/device/ethernet/tap"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
)

// network is one tenant's segment on this host: its switch, the table that feeds the switch, and the host's port.
type network struct {
	sw     *vswitch.Network
	table  *overlay.Table
	static *overlay.Static     // the file's entries; Daemon.mu
	evpn   *evpn.Network       // nil: not in EVPN
	tap    *tap.TAP            // nil: none; Daemon.mu
	hand   map[netip.Addr]bool // peers that operators have set; Daemon.mu
	undo   undo
}

// newNetwork makes a network with its tunnel port and host port. On an error it makes nothing.
func (d *Daemon) newNetwork(c *config.Network) (*network, error) {
	lc := vswitch.Config{
		VNI: c.VNI, Name: c.Name, MTU: c.MTU, Age: c.Ageing, MaxEntries: c.MaxEntries, Storm: c.Storm, Pool: d.pool,
		Snoop: c.Snoop, Log: d.log.Named("switch"),
	}
	n := &network{hand: map[netip.Addr]bool{}}
	if d.evpn != nil && c.EVPN {
		// EVPN may bring as many remote addresses as the switch may learn, so the table has room for both.
		others := cmp.Or(c.MaxEntries, vswitch.DefaultMaxEntries)
		n.evpn = d.evpn.Network(evpn.NetworkConfig{Import: c.RouteTargets, Export: c.RouteTargets, MaxEntries: others,
			Present: d.present})
		lc.MaxEntries = min(2*others, vswitch.MaxMaxEntries)
		lc.MaxNeighbours = min(others+vswitch.DefaultMaxNeighbours, vswitch.MaxMaxNeighbours)
	}
	sw, err := vswitch.NewNetwork(lc)
	if err != nil {
		return nil, err
	}
	n.sw, n.table = sw, overlay.NewTable(sw, d.vtep)
	if err := n.open(d, c); err != nil {
		n.undo.run()
		return nil, err
	}
	return n, nil
}

func (n *network) open(d *Daemon, c *config.Network) error {
	if d.vtep != nil {
		if err := d.vtep.AddNetwork(n.sw, nil, vxlan.MaxPeers(maxPeers)); err != nil {
			return err
		}
		n.undo.push(func() { _ = d.vtep.RemoveNetwork(c.VNI) })
	}
	n.static = &overlay.Static{Peers: c.Peers, LearnPeers: c.LearnPeers}
	sources := []overlay.TableSource{n.static, d.source}
	if n.evpn != nil {
		sources = append(sources, n.evpn)
	}
	n.setTunnels(c)
	for _, s := range sources {
		n.undo.push(func() { s.Detach(n.table); n.table.WithdrawAll(s) })
		if err := s.Attach(n.table); err != nil {
			return err
		}
	}
	if d.vtep != nil {
		if err := d.vtep.RefreshMTU(); err != nil { // its peers are known only from here on
			return err
		}
	}
	n.undo.push(n.closeTAP)
	if c.TAP != nil {
		return n.openTAP(d, c.TAP)
	}
	return nil
}

// maxPeers bounds the VTEPs of one network.
const maxPeers = 4096

// setTunnels configures the tunnels. If EVPN alone provides the addresses behind them, nothing is learnt from their
// frames.
func (n *network) setTunnels(c *config.Network) {
	n.sw.SetTunnels(c.FloodUnknown, n.evpn == nil || c.LearnPeers || len(c.Peers) > 0 || len(n.hand) > 0)
}

// present reports whether a VM's port is in use. A port that waits for its QEMU is not advertised.
func (d *Daemon) present(port string) bool {
	f, ok := d.fronts.Load(port)
	return ok && f.(func() bool)()
}

// portsChanged must be called after a port of a network was added or removed.
func (d *Daemon) portsChanged(n *network) {
	n.table.Retry()
	if d.evpn != nil {
		d.evpn.Retry()
	}
}

func (n *network) openTAP(d *Daemon, c *config.TAP) (err error) {
	first := d.nextLoop()
	n.tap, err = tap.Open(tap.Config{
		Network: n.sw, Loop: first, More: d.otherLoops(first), Pool: d.pool, Name: c.Name, Addrs: c.Addresses,
		Bridge: c.Bridge, Rate: c.Rate, Offloads: c.Offloads, Log: d.log.Named("tap"),
	})
	if err != nil {
		n.tap = nil
		return fmt.Errorf("TAP port %q: %w%s", c.Name, err, hint(err))
	}
	return nil
}

func (n *network) closeTAP() {
	if n.tap != nil {
		_ = n.tap.Close()
		n.tap = nil
	}
}
