package vxlan

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netns"

	"github.com/vnicd/vnicd/device/ethernet/fastpath"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/loop"
)

// The short path: TCP between host ports and tunnels that the kernel carries by itself (package fastpath).
//
//	loop: a frame of TCP passes the switch    -> Offer, at most 640 times a second in all
//	keeper: does the switch do nothing but    -> an entry, of the network's generation as it was before the question
//	        pass such frames on?
//	any change of the network                 -> another generation: no entry holds, frames come to the switch again
//	keeper, once a second                     -> what is used keeps its addresses from ageing; what is not, or does not hold, goes
//	keeper, when the kernel tells of a change -> the same: interfaces, routes and IPsec policies are what they were, or nothing holds
//	keeper, once a minute                     -> nothing holds: what netfilter has come to forbid is not offered again
//
// So the switch decides what goes, and what goes ends with the change that ends the reason for it.

const (
	// offerEvery is how often a loop offers addresses of the same hash, at most.
	offerEvery = int64(100 * time.Millisecond)
	offersHeld = 64  // hashes
	offerQueue = 256 // offers that wait for the keeper; more are not made

	// networkEntries bounds the entries of one network, both directions together, so that none has them all.
	networkEntries = fastpath.MaxEntries / 8
	// idleTicks is how long an entry lives without a frame, in ticks of about a second.
	idleTicks = 30
	// calm is how long changes that the kernel tells of are not looked at behind one that was.
	calm = 20 * time.Millisecond
)

// renewTicks is how long any entry lives, about. Tests have less time.
var renewTicks = uint32(60)

// short is the keeper of the short path.
type short struct {
	vt     *VTEP
	offers chan vswitch.Candidate
	recent [loop.MaxLoops]offered
	kicks  chan struct{} // one place: something of the kernel's has changed
	done   chan struct{}
	ended  sync.WaitGroup

	ns netns.NsHandle // where the VTEP was made

	mu      sync.Mutex // taken after VTEP.mu and vswitch's; nothing is taken inside it
	table   *fastpath.Table
	ipsec   *policies
	renewed uint32                            // tick
	nets    map[*vswitch.Attachment]*shortNet // by tunnel port
	hosts   map[*vswitch.Attachment]*shortHost
	entries map[fastpath.Way]*shortEntry
	routes  map[netip.Addr]route // to the far ends of entries
	past    vswitch.Totals       // of networks that are gone
}

// offered is when a loop has offered last. Whatever addresses frames come with, it offers at most offersHeld times in offerEvery.
type offered struct {
	at [offersHeld]int64 // by the addresses' hash, which others may share
	_  [64]byte
}

type shortNet struct {
	p       *port
	number  int
	gen     *atomic.Uint64
	entries int
	past    vswitch.Totals // of host ports that are gone, as the tunnel port sees it
}

type shortHost struct {
	*fastpath.Host
	net *shortNet
	hostState
}

// hostState is what is asked of a host port's interface.
type hostState struct {
	mtu     int
	watched bool // somebody looks at its frames, who would not see those that leave by the short path
}

type shortEntry struct {
	net  *shortNet
	gen  uint64
	from *vswitch.Attachment
	far  vswitch.Remote // of from
	peer netip.Addr
}

// openShort starts the keeper in the network namespace of the calling thread.
func openShort(vt *VTEP) (*short, error) {
	c := fastpath.Config{Local: vt.cfg.Local.WithZone(""), Port: vt.cfg.Port}
	for _, s := range vt.tx {
		if s != nil {
			for _, k := range s.socks {
				c.SourcePorts = append(c.SourcePorts, k.port)
			}
		}
	}
	table, err := fastpath.Open(c)
	if err != nil {
		return nil, err
	}
	s := &short{vt: vt, table: table, offers: make(chan vswitch.Candidate, offerQueue), kicks: make(chan struct{}, 1), done: make(chan struct{}), renewed: fastpath.Now(),
		nets: map[*vswitch.Attachment]*shortNet{}, hosts: map[*vswitch.Attachment]*shortHost{}, entries: map[fastpath.Way]*shortEntry{}, routes: map[netip.Addr]route{}}
	if s.ipsec, err = watchPolicies(vt.v6, s.kick); err != nil {
		table.Close()
		return nil, err
	}
	if s.ns, err = netns.Get(); err != nil {
		s.ipsec.close()
		table.Close()
		return nil, err
	}
	s.ended.Go(s.keep)
	return s, nil
}

// close ends the keeper; no network is left.
func (s *short) close() {
	close(s.done)
	s.ended.Wait()
	s.ipsec.close()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.table.Close()
	s.ns.Close()
}

func (s *short) keep() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	quiet := time.NewTimer(0)
	defer quiet.Stop()
	kicks := s.kicks
	for {
		select {
		case <-s.done:
			return
		case c := <-s.offers:
			s.mu.Lock()
			s.take(&c)
			s.mu.Unlock()
			continue
		case <-quiet.C:
			kicks = s.kicks
			continue
		case <-kicks:
			kicks = nil
			quiet.Reset(calm)
		case <-tick.C:
		}
		s.mu.Lock()
		s.sweep()
		s.mu.Unlock()
	}
}

// kick has the keeper look at all that the entries rely on. Any goroutine, loops included.
func (s *short) kick() {
	select {
	case s.kicks <- struct{}{}:
	default: // it is about to
	}
}

// join lets a network's frames go the short way.
func (s *short) join(p *port) {
	s.mu.Lock()
	n := &shortNet{p: p}
	var ok bool
	if n.number, n.gen, ok = s.table.TakeNetwork(); ok {
		s.nets[p.att] = n
	}
	s.mu.Unlock()
	if ok {
		p.net.SetBypass(s, n.gen)
	}
}

// leave ends that. No frame goes the short way any more when it returns.
func (s *short) leave(p *port) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.nets[p.att]
	if n == nil {
		return
	}
	s.table.GiveNetwork(n.number)
	p.net.SetBypass(nil, nil)
	s.past.Merge(s.carriedBy(n))
	delete(s.nets, p.att)
	for w, e := range s.entries {
		if e.net == n {
			s.remove(w, e)
		}
	}
	for a, h := range s.hosts {
		if h.net == n {
			h.Close()
			delete(s.hosts, a)
		}
	}
}

// change is for what networks do not know of: no entry holds any more.
func (s *short) change() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changeLocked()
}

func (s *short) changeLocked() {
	for _, n := range s.nets {
		n.gen.Add(1)
	}
	clear(s.routes)
}

// Offer implements vswitch.Bypass.
func (s *short) Offer(l *loop.Loop, c vswitch.Candidate) {
	key := uint64(c.Dst[5])<<40 | uint64(c.Dst[4])<<32
	for i, b := range c.Src {
		key = (key^uint64(b)<<(8*i))*0x9e3779b97f4a7c15 + uint64(c.Dst[i])
	}
	key ^= uint64(c.From.Network().VNI()) << 1
	at := &s.recent[l.ID()].at[key>>32%offersHeld]
	if now := l.Now(); now-*at >= offerEvery {
		*at = now
		select {
		case s.offers <- c:
		default: // the keeper is busy; the addresses are offered again
		}
	}
}

// Carried implements vswitch.Bypass.
func (s *short) Carried(a *vswitch.Attachment) (t vswitch.Totals) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.hosts[a]; h != nil {
		c := h.Totals()
		return vswitch.Totals{InFrames: c.SentFrames, InBytes: c.SentBytes, OutFrames: c.ReceivedFrames, OutBytes: c.ReceivedBytes}
	}
	if n := s.nets[a]; n != nil {
		t = s.carriedBy(n)
	}
	return t
}

// carriedBy is what has passed a network's tunnel port.
func (s *short) carriedBy(n *shortNet) vswitch.Totals {
	t := n.past
	for _, h := range s.hosts {
		if h.net == n {
			t.Merge(tunnelled(h.Totals()))
		}
	}
	return t
}

// tunnelled is what a host port has counted, as the tunnel port sees it.
func tunnelled(c fastpath.Totals) vswitch.Totals {
	return vswitch.Totals{InFrames: c.ReceivedFrames, InBytes: c.ReceivedBytes, OutFrames: c.SentFrames, OutBytes: c.SentBytes}
}

// take makes an entry for what was offered, if the switch vouches for it.
func (s *short) take(c *vswitch.Candidate) {
	out := c.From.Config().Kind == vswitch.KindTAP
	host, tunnel := c.To, c.From
	if out {
		host, tunnel = c.From, c.To
	}
	n := s.nets[tunnel]
	dev, ok := host.Port().(interface{ Index() int })
	if n == nil || !ok || out && s.vt.v6 && !s.vt.cfg.ZeroChecksum6 {
		return // the kernel's segments have no outer checksum, which peers over IPv6 need not accept
	}
	gen := n.gen.Load() // first: what changes from here on ends the entry
	set := n.p.peers.Load()
	if s.vt.monitor.Load() != nil || int(c.Remote) >= len(set.byID) {
		return
	}
	x := set.byID[c.Remote]
	if x == nil || x.retired || x.scope != 0 {
		return
	}
	w := fastpath.Way{Out: out, Host: dev.Index(), VNI: n.p.net.VNI(), Peer: x.addr, Dst: c.Dst, Src: c.Src}
	e := s.entries[w]
	if e != nil && e.gen == gen || e == nil && n.entries >= networkEntries || !n.p.net.Vouch(c) {
		return
	}
	to, ok := s.routes[x.addr]
	if !ok {
		if to, ok = s.routeTo(x); !ok {
			return
		}
		s.routes[x.addr] = to
	}
	if err := s.put(w, n, host, to, gen); err != nil {
		s.vt.log.Debug("not by the short path", "vni", w.VNI, "to", c.Dst, "from", c.Src, "error", err)
		return
	}
	if e == nil {
		n.entries++
	}
	s.entries[w] = &shortEntry{net: n, gen: gen, from: c.From, far: c.Remote, peer: x.addr}
	if out {
		s.entries[w].far = 0
	}
}

func (s *short) put(w fastpath.Way, n *shortNet, host *vswitch.Attachment, to route, gen uint64) error {
	h := s.hosts[host]
	if h == nil {
		state, err := s.vt.hostState(w.Host)
		if err != nil {
			return err
		}
		h = &shortHost{net: n, hostState: state}
		if err := s.inside(func() (err error) {
			h.Host, err = s.table.Host(w.Host)
			return err
		}); err != nil {
			return err
		}
		s.hosts[host] = h
	}
	if h.watched {
		return errWatched
	}
	mtu := min(n.p.net.MTU(), to.mtu)
	if !w.Out {
		mtu = min(n.p.net.MTU(), h.mtu)
		if err := s.inside(func() error { return s.table.Underlay(to.dev) }); err != nil {
			return err
		}
	}
	return s.table.Put(w, fastpath.Terms{Network: n.number, Generation: gen, Host: h.Host, Underlay: to.dev, MaxFrame: mtu + vswitch.HeaderLen,
		Tick: fastpath.Now()})
}

func (s *short) remove(w fastpath.Way, e *shortEntry) {
	s.table.Delete(w)
	delete(s.entries, w)
	e.net.entries--
}

// sweep looks after all entries.
func (s *short) sweep() {
	now := fastpath.Now()
	if s.ipsec.changed() || now-s.renewed >= renewTicks {
		s.changeLocked()
		s.renewed = now
	}
	s.follow()
	for a, h := range s.hosts {
		if state, err := s.vt.hostState(h.Index()); err == nil && !a.Closed() {
			if state != h.hostState {
				h.hostState = state
				h.net.gen.Add(1)
			}
		} else {
			h.net.gen.Add(1)
			h.net.past.Merge(tunnelled(h.Totals()))
			h.Close()
			delete(s.hosts, a)
		}
	}
	for w, e := range s.entries {
		used, ok := s.table.Used(w)
		idle := uint32(max(int32(now-used), 0))
		if ok {
			e.net.p.net.Heard(w.Src, e.from, e.far, fastpath.TickSeconds(idle))
		}
		if !ok || idle > idleTicks || e.gen != e.net.gen.Load() {
			s.remove(w, e)
		}
	}
}

// follow looks whether the ways to the far ends are what they were: path MTU discovery, for one, tells nobody.
func (s *short) follow() {
	used := map[netip.Addr]bool{}
	for _, e := range s.entries {
		if used[e.peer] || e.gen != e.net.gen.Load() {
			continue
		}
		used[e.peer] = true
		x := e.net.p.peers.Load().byAddr[e.peer]
		if x == nil {
			continue // just gone
		}
		if now, ok := s.routeTo(x); !ok || now != s.routes[e.peer] {
			s.changeLocked()
			s.vt.recompute()
			return
		}
	}
	devs := map[int]bool{}
	for a, r := range s.routes {
		if used[a] {
			devs[r.dev] = true
		} else {
			delete(s.routes, a)
		}
	}
	s.table.LeaveUnderlay(func(index int) bool { return devs[index] })
}

// ShortPathOn is the state of a short path that there is.
const ShortPathOn = "on"

// ShortPath is how much goes the short way.
type ShortPath struct {
	State   string `json:"state"` // ShortPathOn, "off", or why there is none
	Entries int    `json:"entries,omitempty"`
	// Frames that arrived or left so. The totals have them, too.
	Frames uint64 `json:"frames,omitempty"`
}

// shortPath adds what went the short way to the totals.
func (vt *VTEP) shortPath(t *vswitch.Totals) ShortPath {
	s := vt.short
	if s == nil {
		return ShortPath{State: vt.noShort}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	sum := s.past
	for _, n := range s.nets {
		sum.Merge(s.carriedBy(n))
	}
	t.Merge(sum)
	return ShortPath{State: ShortPathOn, Entries: len(s.entries), Frames: sum.InFrames + sum.OutFrames}
}

// openShortPath has TCP of host ports go the short way, if it may and can.
func (vt *VTEP) openShortPath() {
	if vt.cfg.NoShortPath {
		vt.noShort = "off"
		return
	}
	var err error
	if vt.short, err = openShort(vt); err != nil {
		vt.short, vt.noShort = nil, fmt.Sprintf("not possible: %v", err)
		vt.log.Info("TCP of host ports goes through vnicd: the kernel's short path is not possible", "why", err)
	}
}
