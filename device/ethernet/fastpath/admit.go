package fastpath

import (
	"errors"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

var errMonitored = errors.New("the interface is promiscuous: a capture reads its frames")

// admitLocked makes an entry for an offer if the switch forwards such frames unchanged and the kernel may carry them.
func (c *controller) admitLocked(o *vswitch.Candidate) {
	out := o.From.Config().Kind == vswitch.KindTAP
	local, tunnel := o.To, o.From
	if out {
		local, tunnel = o.From, o.To
	}
	n := c.nets[tunnel]
	dev, ok := local.Port().(interface{ Index() int })
	if n == nil || !ok || out && c.v6 && !c.cfg.ZeroChecksum6 {
		return // the kernel's segments have no outer checksum, which peers over IPv6 need not accept
	}
	gen := n.gen.Load() // read first: any later change makes the entry void
	if c.cfg.Tunnel.Monitored() {
		return
	}
	peer, lastPort, ok := c.cfg.Tunnel.Peer(tunnel, o.Remote)
	if !ok {
		return
	}
	f := flow{out: out, host: dev.Index(), vni: tunnel.Network().VNI(), peer: peer, dst: o.Dst, src: o.Src}
	e := c.entries[f]
	if e != nil && e.gen == gen || e == nil && n.entries >= networkEntries || !tunnel.Network().OnlyForwards(o) {
		return
	}
	to, ok := c.routes[peer]
	if !ok {
		if to, ok = c.routeTo(peer); !ok {
			return
		}
		c.routes[peer] = to
	}
	if err := c.putLocked(f, n, local, to, gen, lastPort); err != nil {
		c.cfg.Log.Debug("no short path for a flow", "vni", f.vni, "to", o.Dst, "from", o.Src, "error", err)
		return
	}
	if e == nil {
		n.entries++
	}
	c.entries[f] = &entry{net: n, gen: gen, from: o.From, far: o.Remote, peer: peer, lastPort: lastPort}
}

// putLocked writes an entry to the table, with its programs attached to the interfaces concerned.
func (c *controller) putLocked(f flow, n *network, port *vswitch.Attachment, to route, gen uint64,
	lastPort uint16) error {
	h := c.hosts[port]
	if h == nil {
		state, err := c.hostState(f.host)
		if err != nil {
			return err
		}
		h = &host{net: n, hostState: state}
		if err := c.inside(func() (err error) {
			h.hostPort, err = c.table.attachHost(f.host)
			return err
		}); err != nil {
			return err
		}
		c.hosts[port] = h
	}
	if h.monitored {
		return errMonitored
	}
	mtu := n.tunnel.Network().MTU()
	if f.out {
		mtu = min(mtu, to.mtu)
	} else {
		mtu = min(mtu, h.mtu)
		if err := c.inside(func() error { return c.table.attachUnderlay(to.dev) }); err != nil {
			return err
		}
	}
	return c.table.put(f, terms{network: n.number, generation: gen, host: h.hostPort, underlay: to.dev,
		maxFrame: mtu + vswitch.HeaderLen, lastPort: lastPort, tick: now()})
}

func (c *controller) removeLocked(f flow, e *entry) {
	c.table.remove(f)
	delete(c.entries, f)
	e.net.entries--
}
