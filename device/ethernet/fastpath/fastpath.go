// Package fastpath implements the short path: two eBPF programs, at a host port's egress and at the underlay's ingress,
// carry established TCP between host ports and tunnels where the switch would forward it unchanged.
//
//	loop: the switch forwards a TCP frame      -> Offer, at most 640 per second (offer.go)
//	controller: does the switch only forward   -> an entry, of the network's generation as it was before the question
//	such frames, and does the kernel permit?      (admit.go, kernel.go, ipsec.go)
//	any change of the network's tables         -> another generation: its entries are void, frames return to the switch
//	controller, once a second                  -> entries in use keep their addresses from ageing; idle and void ones are
//	                                              removed (sweep.go)
//	controller, on a kernel notification       -> the same; if interfaces, routes or IPsec policies have changed,
//	                                              all entries are void
//	controller, once a minute                  -> all entries are void: frames pass netfilter again first
//
// So the switch decides which frames take the short path, and any change of its tables revokes the decision. Frames
// without a valid entry, and all frames that the programs cannot fully check, go on to vnicd as if there were no
// programs.
//
// Lock order: VTEP.mu, then vswitch's, then controller.mu.
package fastpath

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
	"github.com/vnicd/vnicd/device/loop"
)

const (
	// networkEntries bounds the entries of one network, both directions together, so that no network uses up the table.
	networkEntries = maxEntries / 8
	// idleTicks is how long an entry lives without a frame, in ticks of about a second.
	idleTicks = 30
	// holdOff is the shortest time between two checks that kernel notifications cause.
	holdOff = 20 * time.Millisecond
)

// renewTicks is the maximum lifetime of an entry, in ticks. Tests shorten it.
var renewTicks = uint32(60)

// controller makes, checks and removes the entries of one VTEP. It implements vxlan.ShortPath.
type controller struct {
	cfg    vxlan.ShortPathConfig
	v6     bool
	offers chan vswitch.Candidate
	recent [loop.MaxLoops]recentOffers
	checks chan struct{} // capacity 1: something in the kernel has changed
	done   chan struct{}
	ended  sync.WaitGroup

	nl *netlink.Handle // in the network namespace that the VTEP was made in
	ns netns.NsHandle  // that namespace

	mu      sync.Mutex // innermost lock; guards the fields below
	table   *table
	ipsec   *policies
	renewed uint32                           // tick
	nets    map[*vswitch.Attachment]*network // by tunnel port
	hosts   map[*vswitch.Attachment]*host
	entries map[flow]*entry
	routes  map[netip.Addr]route // to the peers of entries
	past    vswitch.Totals       // counters of networks that have left
}

// network is one network that has joined. It implements vswitch.ShortPath.
type network struct {
	c       *controller
	tunnel  *vswitch.Attachment
	number  int
	gen     *atomic.Uint64 // entries of another generation are void; the programs read it
	entries int
	past    vswitch.Totals // counters of removed host ports, as seen from the tunnel port
}

// host is a host port that has entries.
type host struct {
	*hostPort
	net *network
	hostState
}

// entry is the controller's record of an entry of the table.
type entry struct {
	net  *network
	gen  uint64
	from *vswitch.Attachment
	far  vswitch.Remote // the peer's number in its network
	peer netip.Addr

	lastPort uint16 // highest source port that is accepted from the peer
}

// Open loads the programs and starts the controller, in the network namespace of the calling thread. The error names
// the kernel feature or permission that is missing.
func Open(cfg vxlan.ShortPathConfig) (vxlan.ShortPath, error) {
	c := &controller{cfg: cfg, v6: cfg.Local.Is6(), offers: make(chan vswitch.Candidate, offerQueue),
		checks: make(chan struct{}, 1), done: make(chan struct{}), renewed: now(), nets: map[*vswitch.Attachment]*network{},
		hosts: map[*vswitch.Attachment]*host{}, entries: map[flow]*entry{}, routes: map[netip.Addr]route{}}
	if err := c.open(); err != nil {
		c.release()
		return nil, err
	}
	c.ended.Go(c.run)
	return c, nil
}

func (c *controller) open() (err error) {
	if c.table, err = openTable(tableConfig{local: c.cfg.Local, port: c.cfg.Port,
		sourcePorts: c.cfg.SourcePorts}); err != nil {
		return err
	}
	if c.ipsec, err = watchPolicies(c.v6, c.Recheck); err != nil {
		return err
	}
	c.ns = netns.None()
	if c.ns, err = netns.Get(); err != nil {
		return err
	}
	c.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE)
	return err
}

// release undoes a partial or complete Open.
func (c *controller) release() {
	if c.nl != nil {
		c.nl.Close()
	}
	if c.ipsec != nil {
		c.ipsec.close()
		_ = c.ns.Close()
	}
	if c.table != nil {
		c.table.close()
	}
}

// Close implements vxlan.ShortPath.
func (c *controller) Close() {
	close(c.done)
	c.ended.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.release()
}

// run handles offers and checks the entries, until Close.
func (c *controller) run() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	quiet := time.NewTimer(0)
	defer quiet.Stop()
	checks := c.checks
	for {
		select {
		case <-c.done:
			return
		case o := <-c.offers:
			c.mu.Lock()
			c.admitLocked(&o)
			c.mu.Unlock()
			continue
		case <-quiet.C:
			checks = c.checks
			continue
		case <-checks:
			checks = nil
			quiet.Reset(holdOff)
		case <-tick.C:
		}
		c.mu.Lock()
		c.sweepLocked()
		c.mu.Unlock()
	}
}

// Recheck implements vxlan.ShortPath.
func (c *controller) Recheck() {
	select {
	case c.checks <- struct{}{}:
	default: // a check is pending
	}
}

// Join implements vxlan.ShortPath.
func (c *controller) Join(tunnel *vswitch.Attachment) {
	c.mu.Lock()
	n := &network{c: c, tunnel: tunnel}
	var ok bool
	if n.number, n.gen, ok = c.table.takeNetwork(); ok {
		c.nets[tunnel] = n
	}
	c.mu.Unlock()
	if ok {
		tunnel.Network().SetShortPath(n)
	}
}

// Leave implements vxlan.ShortPath.
func (c *controller) Leave(tunnel *vswitch.Attachment) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.nets[tunnel]
	if n == nil {
		return
	}
	c.table.giveNetwork(n.number)
	tunnel.Network().SetShortPath(nil)
	c.past.Merge(c.carriedLocked(n))
	delete(c.nets, tunnel)
	for f, e := range c.entries {
		if e.net == n {
			c.removeLocked(f, e)
		}
	}
	for a, h := range c.hosts {
		if h.net == n {
			h.close()
			delete(c.hosts, a)
		}
	}
}

// Invalidate implements vxlan.ShortPath.
func (c *controller) Invalidate() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.invalidateLocked()
}

func (c *controller) invalidateLocked() {
	for _, n := range c.nets {
		n.Invalidate()
	}
	clear(c.routes)
}

// Invalidate implements vswitch.ShortPath.
func (n *network) Invalidate() { n.gen.Add(1) }

// Entries implements vxlan.ShortPath.
func (c *controller) Entries() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.entries)
}

// Carried implements vxlan.ShortPath.
func (c *controller) Carried() (t vswitch.Totals) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t.Merge(c.past)
	for _, n := range c.nets {
		t.Merge(c.carriedLocked(n))
	}
	return t
}

// Carried implements vswitch.ShortPath.
func (n *network) Carried(a *vswitch.Attachment) vswitch.Totals {
	c := n.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if h := c.hosts[a]; h != nil {
		t := h.totals()
		return vswitch.Totals{InFrames: t.sentFrames, InBytes: t.sentBytes, OutFrames: t.receivedFrames,
			OutBytes: t.receivedBytes}
	}
	if a == n.tunnel {
		return c.carriedLocked(n)
	}
	return vswitch.Totals{}
}

// carriedLocked returns the counters of a network's tunnel port.
func (c *controller) carriedLocked(n *network) vswitch.Totals {
	t := n.past
	for _, h := range c.hosts {
		if h.net == n {
			t.Merge(tunnelled(h.totals()))
		}
	}
	return t
}

// tunnelled turns a host port's counters into those of the tunnel port.
func tunnelled(t totals) vswitch.Totals {
	return vswitch.Totals{InFrames: t.receivedFrames, InBytes: t.receivedBytes, OutFrames: t.sentFrames,
		OutBytes: t.sentBytes}
}
