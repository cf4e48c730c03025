package fastpath

import "net/netip"

// sweepLocked checks all entries and what they depend on, and removes those that are idle or void.
func (c *controller) sweepLocked() {
	now := now()
	if c.ipsec.changed() || now-c.renewed >= renewTicks {
		c.invalidateLocked()
		c.renewed = now
	}
	c.checkRoutesLocked()
	c.checkHostsLocked()
	for f, e := range c.entries {
		used, ok := c.table.used(f)
		idle := uint32(max(int32(now-used), 0))
		if ok {
			far := e.far
			if f.out {
				far = 0 // the source is at the host port
			}
			e.net.tunnel.Network().Refresh(f.src, e.from, far, tickSeconds(idle))
		}
		if !ok || idle > idleTicks || e.gen != e.net.gen.Load() || !c.believesLocked(e) {
			c.removeLocked(f, e)
		}
	}
}

// checkHostsLocked makes the entries of a host port void if its interface has changed, and removes the records of
// deleted ports.
func (c *controller) checkHostsLocked() {
	for a, h := range c.hosts {
		state, err := c.hostState(h.index)
		switch {
		case err != nil || a.Closed():
			h.net.Invalidate()
			h.net.past.Merge(tunnelled(h.totals()))
			h.close()
			delete(c.hosts, a)
		case state != h.hostState:
			h.hostState = state
			h.net.Invalidate()
		}
	}
}

// checkRoutesLocked makes all entries void if a route to a peer has changed. It asks for every route: which of them a
// notification concerns is not known. Programs are detached from underlay interfaces that no entry uses.
func (c *controller) checkRoutesLocked() {
	used := map[netip.Addr]bool{}
	for _, e := range c.entries {
		if used[e.peer] || e.gen != e.net.gen.Load() {
			continue
		}
		used[e.peer] = true
		if !c.isPeer(e) {
			continue // the network has just left
		}
		if now, ok := c.routeTo(e.peer); !ok || now != c.routes[e.peer] {
			c.invalidateLocked()
			c.cfg.Tunnel.RecomputeMTUs()
			return
		}
	}
	devs := map[int]bool{}
	for a, r := range c.routes {
		if used[a] {
			devs[r.dev] = true
		} else {
			delete(c.routes, a)
		}
	}
	c.table.detachUnderlay(func(index int) bool { return devs[index] })
}

// believesLocked reports whether an entry's check of the source port is the one that its peer has now.
func (c *controller) believesLocked(e *entry) bool {
	_, lastPort, _ := c.cfg.Tunnel.Peer(e.net.tunnel, e.far)
	return lastPort == e.lastPort
}

// isPeer reports whether an entry's peer still belongs to its network.
func (c *controller) isPeer(e *entry) bool {
	addr, _, ok := c.cfg.Tunnel.Peer(e.net.tunnel, e.far)
	return ok && addr == e.peer
}
