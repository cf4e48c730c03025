package daemon

import (
	"fmt"
	"slices"

	"github.com/vnicd/vnicd/cmd/vnicd/internal/config"
	"github.com/vnicd/vnicd/device/engine"
	"github.com/vnicd/vnicd/device/lfe"
	"github.com/vnicd/vnicd/device/overlay"
	"github.com/vnicd/vnicd/device/tap"
)

// network is one tenant's segment on this host: its switch, the table that feeds it, and the host's port.
type network struct {
	sw     *lfe.Network
	table  *overlay.Table
	static *overlay.Static // what the file says; Daemon.mu
	tap    *tap.TAP        // nil = none; Daemon.mu
	undo   undo
}

// newNetwork makes a network with its tunnel port and host port, or nothing.
func (d *Daemon) newNetwork(c *config.Network) (*network, error) {
	sw, err := lfe.NewNetwork(lfe.Config{
		VNI: c.VNI, Name: c.Name, MTU: c.MTU, Age: c.Ageing, MaxEntries: c.MaxEntries, Storm: c.Storm, Pool: d.pool, Log: d.log.Named("switch"),
	})
	if err != nil {
		return nil, err
	}
	n := &network{sw: sw, table: overlay.NewTable(sw, d.vtep)}
	if err := n.open(d, c); err != nil {
		n.undo.run()
		return nil, err
	}
	return n, nil
}

func (n *network) open(d *Daemon, c *config.Network) error {
	if d.vtep != nil {
		if err := d.vtep.AddNetwork(n.sw, nil); err != nil {
			return err
		}
		n.undo.push(func() { _ = d.vtep.RemoveNetwork(c.VNI) })
	}
	n.static = &overlay.Static{Peers: c.Peers, LearnPeers: c.LearnPeers}
	for _, s := range []overlay.TableSource{n.static, d.source} {
		n.undo.push(func() { s.Detach(n.table); n.table.WithdrawAll(s) })
		if err := s.Attach(n.table); err != nil {
			return err
		}
	}
	if d.vtep != nil {
		if err := d.vtep.RefreshMTU(); err != nil { // its peers are known only now
			return err
		}
	}
	n.undo.push(n.closeTAP)
	if c.TAP != nil {
		return n.openTAP(d, c.TAP)
	}
	return nil
}

func (n *network) openTAP(d *Daemon, c *config.TAP) (err error) {
	first := d.nextLoop()
	more := slices.DeleteFunc(slices.Clone(d.loops), func(l *engine.Loop) bool { return l == first })
	n.tap, err = tap.Open(tap.Config{
		Network: n.sw, Loop: first, More: more, Pool: d.pool, Name: c.Name, Addrs: c.Addresses, Bridge: c.Bridge, Log: d.log.Named("tap"),
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
