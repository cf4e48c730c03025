// Package evpn feeds the overlay's tables from BGP EVPN (RFC 7432 over VXLAN, RFC 8365), and tells others what is on
// this host.
//
// One Speaker per daemon keeps the BGP sessions (session.go, on osrg/gobgp). One Network per tenant network is its
// MAC-VRF and the overlay.TableSource of its table:
//
//	sessions ── best path of each NLRI ──▶ decode, judge (route.go) ──▶ elect per MAC and IP (elect.go) ──▶ overlay.Table
//	vswitch: addresses at this host's ports ──▶ claim, sequence numbers, duplicates (local.go) ──▶ sessions
//
// What arrives is from others: every route is checked against this host's networks, VTEP and limits before it counts,
// and one that does not count is kept with the reason. An address that is at a port of this host and at another is
// decided by MAC mobility (RFC 7432 section 15): sticky first, then the higher sequence number, then the lower VTEP
// address.
//
// Concurrency: Speaker.mu guards all routes and claims; it is taken by the goroutine that hears gobgp, by the one that
// looks at the ports, and by callers, never by loops. Lock order: Speaker.mu, then gobgp's own, overlay.Table's and
// vswitch's.
package evpn

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/vnicd/vnicd/device/ethernet/overlay"
	"github.com/vnicd/vnicd/device/ethernet/vswitch"
)

// Defaults and bounds of Config.
const (
	DefaultPort        = 179
	DefaultHoldTime    = 90 * time.Second  // RFC 4271 section 10
	DefaultRestartTime = 120 * time.Second // RFC 4724 leaves it open; what FRR has
	DefaultMaxRoutes   = 1 << 18
	DefaultLimitIdle   = 5 * time.Minute
	MaxMaxRoutes       = 1 << 22
	MaxNeighbours      = 64
	MaxPassword        = 80 // TCP_MD5SIG_MAXKEYLEN
)

// Config describes the speaker.
type Config struct {
	AS       uint32
	RouterID netip.Addr // IPv4
	VTEP     netip.Addr // this host's end of the tunnels: the next hop of what it advertises
	// Listen is where sessions are accepted, Port the TCP port; 0: nowhere.
	Listen []netip.Addr
	Port   uint16
	// HoldTime ends a session on which nothing was heard; zero: DefaultHoldTime.
	HoldTime time.Duration
	// RestartTime is how long others may keep this host's routes when its sessions break (RFC 4724); zero: no graceful
	// restart, in either direction.
	RestartTime time.Duration
	// LimitIdle is how long a neighbour stays away that has exceeded its MaxRoutes; zero: DefaultLimitIdle.
	LimitIdle  time.Duration
	Neighbours []Neighbour
	Clock      func() time.Time // nil: time.Now
	Log        hclog.Logger
}

// Neighbour is one BGP session.
type Neighbour struct {
	Address netip.Addr
	AS      uint32
	// Password signs the session's segments (RFC 2385); "": no signatures.
	Password string
	// Hops is how many hops away the neighbour is at most, by the TTL of what arrives (RFC 5082); 0: not checked.
	Hops uint8
	// Passive waits for the neighbour to connect. Port is where to connect to; zero: DefaultPort. Local is the address to
	// do so from.
	Passive bool
	Port    uint16
	Local   netip.Addr
	// MaxRoutes ends the session when the neighbour sends more; zero: DefaultMaxRoutes.
	MaxRoutes int
	// NextHops are the VTEPs that the neighbour may name. Nil: any.
	NextHops []netip.Prefix
}

// Speaker is this host in BGP.
type Speaker struct {
	cfg   Config
	bgp   session
	log   hclog.Logger
	clock func() time.Time

	mu       sync.Mutex
	networks map[uint32]*Network        // by VNI
	targets  map[RouteTarget][]*Network // those with targets of their own
	routes   map[nlri]*route            // that are about a network of this host
	arrivals uint64
	ignored  map[string]uint64 // refusals by reason
	warn     warnings
	closed   bool

	kick chan struct{} // one place: ports of this host have changed
	stop context.CancelFunc
	done sync.WaitGroup
}

// New starts the sessions.
func New(c Config) (*Speaker, error) {
	if c.HoldTime == 0 {
		c.HoldTime = DefaultHoldTime
	}
	if c.LimitIdle == 0 {
		c.LimitIdle = DefaultLimitIdle
	}
	if c.Clock == nil {
		c.Clock = time.Now
	}
	if c.Log == nil {
		c.Log = hclog.NewNullLogger()
	}
	c.VTEP = c.VTEP.Unmap()
	if c.AS == 0 || !c.RouterID.Is4() || !hostAddr(c.VTEP) {
		return nil, fmt.Errorf("evpn: needs an AS, an IPv4 router id and a VTEP; found %d, %v, %v", c.AS, c.RouterID, c.VTEP)
	}
	if len(c.Neighbours) > MaxNeighbours {
		return nil, fmt.Errorf("evpn: %d neighbours; want at most %d", len(c.Neighbours), MaxNeighbours)
	}
	ctx, stop := context.WithCancel(context.Background())
	s := &Speaker{
		cfg: c, log: c.Log, clock: c.Clock, networks: map[uint32]*Network{}, targets: map[RouteTarget][]*Network{},
		routes: map[nlri]*route{}, ignored: map[string]uint64{}, kick: make(chan struct{}, 1), stop: stop,
	}
	if err := s.bgp.open(ctx, s); err != nil {
		s.Close()
		return nil, err
	}
	s.done.Go(func() { s.watchPorts(ctx) })
	return s, nil
}

// Close ends all sessions; what was advertised is withdrawn by that. Networks must be detached before. It may be called
// twice.
func (s *Speaker) Close() {
	s.mu.Lock()
	closed := s.closed
	s.closed = true
	s.mu.Unlock()
	if closed {
		return
	}
	s.stop()
	s.done.Wait()
	s.bgp.close()
}

// ErrVNI says that the speaker has a network of that VNI.
var ErrVNI = errors.New("evpn: the VNI has a network")

// NetworkConfig describes a tenant network to the speaker.
type NetworkConfig struct {
	// Import and Export are the route targets; nil: derived (RFC 8365 section 5.1.2.1). Derived ones are imported whatever
	// their AS, so that networks may span several.
	Import, Export []RouteTarget
	// MaxEntries bounds the addresses taken over from others, MACs and IPs each; zero: vswitch.DefaultMaxEntries.
	MaxEntries int
	// Present tells of a VM's port whether it is in use; nil: all are. It must not block.
	Present func(port string) bool
}

// Network is one tenant network in EVPN: a MAC-VRF. It implements overlay.TableSource.
type Network struct {
	s   *Speaker
	cfg NetworkConfig

	// Guarded by Speaker.mu.
	table  *overlay.Table // nil: not attached
	vni    uint32
	rd     [8]byte
	export []RouteTarget
	vteps  map[netip.Addr]int // type 3 routes in use
	macs   map[vswitch.MAC]*mac
	ips    map[netip.Addr]*ip
	gone   map[vswitch.MAC]uint32 // mac.after of those that nobody has
	taken  struct{ macs, ips full }
	// What is at this host's ports, and what is advertised of it.
	here       map[vswitch.MAC]*mac
	hereIPs    map[netip.Addr]*ip
	said       map[claim]mobility
	duplicates uint64
}

// Network makes the source of one network's routes. It speaks once it is attached.
func (s *Speaker) Network(c NetworkConfig) *Network {
	if c.MaxEntries == 0 {
		c.MaxEntries = vswitch.DefaultMaxEntries
	}
	return &Network{s: s, cfg: c}
}

// Name implements overlay.TableSource.
func (*Network) Name() string { return "evpn" }

// Rank implements overlay.TableSource.
func (*Network) Rank() int { return overlay.RankEVPN }

// Attach implements overlay.TableSource.
func (n *Network) Attach(t *overlay.Table) error {
	s := n.s
	if t.Tunnels() == nil {
		return overlay.ErrNoTunnel
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	vni := t.Network().VNI()
	if s.networks[vni] != nil {
		return fmt.Errorf("%w: %d", ErrVNI, vni)
	}
	n.table, n.vni, n.export = t, vni, n.cfg.Export
	n.vteps, n.macs, n.ips = map[netip.Addr]int{}, map[vswitch.MAC]*mac{}, map[netip.Addr]*ip{}
	n.gone = map[vswitch.MAC]uint32{}
	n.here, n.hereIPs, n.said = map[vswitch.MAC]*mac{}, map[netip.Addr]*ip{}, map[claim]mobility{}
	n.taken.macs, n.taken.ips = full{max: n.cfg.MaxEntries}, full{max: n.cfg.MaxEntries}
	if n.export == nil {
		n.export = []RouteTarget{derived(s.cfg.AS, vni)}
	}
	n.rd = s.freeRDLocked(vni)
	s.networks[vni] = n
	for _, rt := range n.cfg.Import {
		s.targets[rt] = append(s.targets[rt], n)
	}
	if err := s.bgp.advertise(n, claim{}, mobility{}); err != nil {
		s.forgetLocked(n)
		return err
	}
	t.Network().OnChange(s.poke)
	// What has arrived already was of no interest until now.
	if err := s.bgp.each(s.takeLocked); err != nil {
		return err
	}
	s.poke()
	return nil
}

// freeRDLocked makes a route distinguisher: the router id and a number (RFC 7432 section 7.9). The number only tells
// this host's networks apart; it is the lower half of the VNI, or the next that is free.
func (s *Speaker) freeRDLocked(vni uint32) (rd [8]byte) {
	id := s.cfg.RouterID.As4()
	rd[1] = 1 // IPv4 address and 2 octets
	copy(rd[2:], id[:])
	for i := uint16(vni); ; i++ {
		binary.BigEndian.PutUint16(rd[6:], i)
		taken := false
		for _, n := range s.networks {
			taken = taken || n.rd == rd
		}
		if !taken { // a host has fewer networks than there are numbers
			return rd
		}
	}
}

// Detach implements overlay.TableSource.
func (n *Network) Detach(t *overlay.Table) {
	s := n.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if n.table == nil {
		return
	}
	t.Network().OnChange(nil)
	for c := range n.said {
		s.bgp.withdraw(n, c)
	}
	s.bgp.withdraw(n, claim{})
	s.forgetLocked(n)
}

// forgetLocked ends a network; its routes in the table are the caller's affair.
func (s *Speaker) forgetLocked(n *Network) {
	delete(s.networks, n.vni)
	for _, rt := range n.cfg.Import {
		if s.targets[rt] = without(s.targets[rt], n); len(s.targets[rt]) == 0 {
			delete(s.targets, rt)
		}
	}
	for k, r := range s.routes {
		if r.net == n {
			delete(s.routes, k)
		}
	}
	n.table = nil
}

// poke has the ports looked at soon. Any goroutine, loops included.
func (s *Speaker) poke() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// Retry is to be called when ports have come or gone.
func (s *Speaker) Retry() { s.poke() }

// warnings lets one line through per second, and counts the rest.
type warnings struct {
	last    time.Time
	dropped int
}

func (w *warnings) allow(now time.Time) (dropped int, ok bool) {
	if now.Sub(w.last) < time.Second {
		w.dropped++
		return 0, false
	}
	dropped, w.dropped, w.last = w.dropped, 0, now
	return dropped, true
}

func without(list []*Network, n *Network) []*Network {
	out := list[:0]
	for _, x := range list {
		if x != n {
			out = append(out, x)
		}
	}
	return out
}
