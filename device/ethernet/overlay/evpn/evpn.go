// Package evpn feeds the overlay's tables from BGP EVPN (RFC 7432 over VXLAN, RFC 8365), and advertises the addresses
// on this host.
//
// One Speaker per daemon keeps the BGP sessions (session.go, on osrg/gobgp), in another process if Config.Process says
// so (remote.go, process.go). One Network per tenant network is its MAC-VRF and the overlay.TableSource of its table:
//
//	sessions ── best paths, read (path.go) ──▶ judge (route.go) ──▶ elect per MAC and IP (elect.go) ──▶ overlay.Table
//	vswitch: addresses at this host's ports ──▶ claim, sequence numbers, duplicates (local.go) ──▶ sessions
//
// Received routes are untrusted: each is checked against this host's networks, VTEP and limits; one that is not usable
// is kept with the reason. If an address is both at a port of this host and elsewhere, MAC mobility decides (RFC 7432
// section 15): sticky first, then the higher sequence number, then the lower VTEP address.
//
// Concurrency: Speaker.mu guards all routes and claims; it is taken by the goroutine that receives gobgp's events, by
// the one that watches the ports, and by callers, never by loops. Lock order: Speaker.mu, then remote.mu, gobgp's own,
// overlay.Table's and vswitch's.
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
	"github.com/vnicd/vnicd/hypervisor/loglimit"
)

// Defaults and bounds of Config.
const (
	DefaultPort        = 179
	DefaultHoldTime    = 90 * time.Second  // RFC 4271 section 10
	DefaultRestartTime = 120 * time.Second // not specified in RFC 4724; FRR's default
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
	VTEP     netip.Addr // this host's tunnel end: the next hop of its routes
	// Listen are the addresses that accept sessions, Port their TCP port; 0: none.
	Listen []netip.Addr
	Port   uint16
	// HoldTime ends a session on which nothing was received; zero: DefaultHoldTime.
	HoldTime time.Duration
	// RestartTime is how long others may keep this host's routes after its sessions broke (RFC 4724); zero: no graceful
	// restart, in either direction.
	RestartTime time.Duration
	// LimitIdle is how long a neighbour that exceeded its MaxRoutes is kept away; zero: DefaultLimitIdle.
	LimitIdle  time.Duration
	Neighbours []Neighbour
	Clock      func() time.Time // nil: time.Now
	Log        hclog.Logger
	// Process, if not nil, has BGP run in another process. It starts one, calls serve with a connection to its Open,
	// and, whenever serve returns, ends that process and starts another. The function that it returns ends that.
	Process func(serve func(context.Context, Conn) error) (stop func())
}

// Neighbour is one BGP session.
type Neighbour struct {
	Address netip.Addr
	AS      uint32
	// Password signs the session's segments (RFC 2385); "": no signatures.
	Password string
	// Hops is the neighbour's maximum distance in hops, checked by the TTL of received packets (RFC 5082); 0: not
	// checked.
	Hops uint8
	// Passive waits for the neighbour to connect. Otherwise vnicd connects to Port (zero: DefaultPort), from the
	// address Local.
	Passive bool
	Port    uint16
	Local   netip.Addr
	// MaxRoutes ends the session if the neighbour sends more; zero: DefaultMaxRoutes.
	MaxRoutes int
	// NextHops are the VTEPs that the neighbour may use as next hops. Nil: any.
	NextHops []netip.Prefix
}

// Speaker is this host in BGP.
type Speaker struct {
	cfg   Config
	bgp   backend
	log   hclog.Logger
	clock func() time.Time

	mu       sync.Mutex
	networks map[uint32]*Network        // by VNI
	targets  map[RouteTarget][]*Network // those with configured targets
	routes   map[nlri]*route            // routes for networks of this host
	held     map[netip.Addr]int         // number of routes by neighbour
	swept    map[netip.Addr]uint64      // epoch in which a neighbour's older routes were removed
	epoch    uint64                     // number of processes that ran BGP and have ended
	arrivals uint64
	ignored  map[string]uint64 // refusals by reason
	warn     warnings
	closed   bool

	kick chan struct{} // capacity 1: ports of this host have changed
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
	c.Log = loglimit.New(c.Log)
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
		routes: map[nlri]*route{}, held: map[netip.Addr]int{}, swept: map[netip.Addr]uint64{},
		ignored: map[string]uint64{}, kick: make(chan struct{}, 1), stop: stop,
	}
	if err := s.openBGP(ctx); err != nil {
		stop()
		return nil, err
	}
	s.done.Go(func() { s.watchPorts(ctx) })
	return s, nil
}

// Close ends all sessions, which withdraws all routes. Networks must be detached before. It may be called twice.
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

// backend is a Speaker's BGP: in this process (session) or in another (remote).
type backend interface {
	// advertise and withdraw change this host's routes. They do not wait for neighbours or processes. Speaker.mu is
	// held.
	advertise(a advert) error
	withdraw(o own) error
	// replay has every best path arrive once more: take is called before replay returns, or they arrive as changes do.
	// Speaker.mu is held.
	replay(take func(*path)) error
	// each calls f with the best path of every NLRI. It may wait.
	each(f func(*path)) error
	sessions() []SessionStatus
	close()
}

func (s *Speaker) openBGP(ctx context.Context) error {
	if s.cfg.Process != nil {
		r := newRemote(s)
		s.bgp = r
		return r.open()
	}
	b := newSession(s.cfg)
	s.bgp = b
	take := func(paths []path) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for i := range paths {
			s.takeLocked(&paths[i])
		}
	}
	err := b.listen(ctx, take, nil)
	if err == nil {
		err = b.greet()
	}
	if err != nil {
		b.close()
	}
	return err
}

// advert returns the route of a claim.
func (n *Network) advert(c claim, m mobility) advert {
	return advert{own: own{rd: n.rd, vni: n.vni, claim: c}, mobility: m, targets: n.export}
}

func (s *Speaker) withdraw(n *Network, c claim) {
	if err := s.bgp.withdraw(own{rd: n.rd, vni: n.vni, claim: c}); err != nil {
		s.log.Warn("not withdrawn", "network", n.table.Network().Name(), "mac", c.mac, "ip", c.ip, "error", err)
	}
}

// limit returns how many routes a neighbour may send; 0: it is none.
func (c *Config) limit(neighbour netip.Addr) int {
	for i := range c.Neighbours {
		if n := &c.Neighbours[i]; n.Address == neighbour {
			return n.limit()
		}
	}
	return 0
}

// ErrVNI: the speaker already has a network with that VNI.
var ErrVNI = errors.New("evpn: VNI is in use")

// NetworkConfig describes a tenant network to the speaker.
type NetworkConfig struct {
	// Import and Export are the route targets; nil: derived (RFC 8365 section 5.1.2.1). Derived targets of any AS are
	// imported, so that networks may span several.
	Import, Export []RouteTarget
	// MaxEntries bounds the addresses installed from others, MACs and IPs each; zero: vswitch.DefaultMaxEntries.
	MaxEntries int
	// Present reports whether a VM's port is in use; nil: all are. It must not block.
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
	vteps  map[netip.Addr]int // number of usable type 3 routes
	macs   map[vswitch.MAC]*mac
	ips    map[netip.Addr]*ip
	gone   map[vswitch.MAC]uint32 // mac.after of MACs without claims
	taken  struct{ macs, ips full }
	// The addresses at this host's ports, and what is advertised for them.
	here       map[vswitch.MAC]*mac
	hereIPs    map[netip.Addr]*ip
	said       map[claim]mobility
	duplicates uint64
}

// Network makes the source of one network's routes. It does nothing before it is attached.
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
	if err := s.bgp.advertise(n.advert(claim{}, mobility{})); err != nil {
		s.forgetLocked(n)
		return err
	}
	t.Network().OnChange(s.poke)
	// Routes that arrived earlier were not kept without the network.
	if err := s.bgp.replay(s.takeLocked); err != nil {
		return err
	}
	s.poke()
	return nil
}

// freeRDLocked makes a route distinguisher: the router id and a number (RFC 7432 section 7.9). The number only
// distinguishes this host's networks; it is the lower half of the VNI, or the next free number.
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
		if !taken { // there are more numbers than networks of a host
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
		s.withdraw(n, c)
	}
	s.withdraw(n, claim{})
	s.forgetLocked(n)
}

// forgetLocked removes a network from the speaker; the caller withdraws its routes from the table.
func (s *Speaker) forgetLocked(n *Network) {
	delete(s.networks, n.vni)
	for _, rt := range n.cfg.Import {
		if s.targets[rt] = without(s.targets[rt], n); len(s.targets[rt]) == 0 {
			delete(s.targets, rt)
		}
	}
	for k, r := range s.routes {
		if r.net == n {
			s.forgetRouteLocked(k, r)
		}
	}
	n.table = nil
}

// poke schedules a check of the ports. Any goroutine may call it, loops included.
func (s *Speaker) poke() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// Retry must be called after ports were added or removed.
func (s *Speaker) Retry() { s.poke() }

// warnings admits one line per second, and counts the others.
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
