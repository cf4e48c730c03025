package vswitch

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// DefaultMaxNeighbours bounds the IP addresses that a network knows, MaxMaxNeighbours the configurable bound. Addresses
// snooped at one port other than a tunnel may fill a quarter.
const (
	DefaultMaxNeighbours = 4096
	MaxMaxNeighbours     = 1 << 18
)

// ErrIPInUse: an IP address is static for another MAC of the network.
var ErrIPInUse = errors.New("vswitch: IP address belongs to another MAC of the network")

// ip is an address as the table has it; IPv4 addresses are mapped (RFC 4291, 2.5.5.2).
type ip = [16]byte

// neighbours is the table IP address and VLAN -> MAC, for answering ARP and neighbour solicitations. Only ARP and ND
// frames use it. Loops try the lock and continue without the table if it is held.
type neighbours struct {
	mu      sync.Mutex
	sets    []neighSet
	mask    uint64
	seed    [2]uint64
	count   int
	max     int
	perPort int
	ofPort  map[uint16]int // number of snooped entries; keys are added and removed with the ports
}

type neighSet [8]neighbour

type neighbour struct {
	ip     ip
	mac    uint64 // 0: the slot is free
	seen   uint32 // second
	port   uint16 // static entries: noPort if set without a port
	vlan   uint16
	static bool // applies to all VLANs if vlan is 0
	yields bool // static, but ports other than tunnels may claim it
	router bool
}

const noPort = 0xffff

func (t *neighbours) init(maxEntries int) {
	t.max, t.perPort = maxEntries, max(maxEntries/4, 1)
	n := uint64(1) << bits.Len64(uint64(2*maxEntries/len(neighSet{})))
	t.sets, t.mask, t.seed = make([]neighSet, n), n-1, [2]uint64{rand.Uint64(), rand.Uint64()}
	t.ofPort = map[uint16]int{}
}

func (t *neighbours) set(a *ip, vlan uint16) *neighSet {
	hi, lo := bits.Mul64(binary.LittleEndian.Uint64(a[:])^t.seed[0],
		binary.LittleEndian.Uint64(a[8:])^t.seed[1]^uint64(vlan)*0x9e3779b97f4a7c15)
	h := (hi ^ lo) * 0xd6e8feb86659fd93
	return &t.sets[h>>32&t.mask]
}

// exact returns the entry of exactly that VLAN, nil if there is none.
func (t *neighbours) exact(a *ip, vlan uint16) *neighbour {
	s := t.set(a, vlan)
	for i := range s {
		if e := &s[i]; e.mac != 0 && e.vlan == vlan && e.ip == *a {
			return e
		}
	}
	return nil
}

// find returns the entry that applies in a VLAN. Static ones take precedence.
func (t *neighbours) find(a *ip, vlan uint16) *neighbour {
	e := t.exact(a, vlan)
	if vlan != 0 && (e == nil || !e.static) {
		if all := t.exact(a, 0); all != nil && all.static {
			return all
		}
	}
	return e
}

// slot returns a slot for a new entry of a port, nil if there is none: a free or expired one, or one of the port's own.
func (t *neighbours) slot(s *neighSet, port uint16, expired func(*neighbour) bool) (best *neighbour) {
	rank := func(e *neighbour) int {
		switch {
		case e.mac == 0:
			return 3
		case e.static:
			return 0
		case expired(e):
			return 2
		case e.port == port:
			return 1
		}
		return 0
	}
	for i := range s {
		if r := rank(&s[i]); r > 0 && (best == nil || r > rank(best)) {
			best = &s[i]
		}
	}
	return best
}

func (t *neighbours) remove(e *neighbour) {
	if e.mac == 0 {
		return
	}
	t.count--
	if !e.static {
		if t.ofPort[e.port]--; t.ofPort[e.port] <= 0 {
			delete(t.ofPort, e.port)
		}
	}
	*e = neighbour{}
}

func (t *neighbours) removeIf(match func(*neighbour) bool) (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.sets {
		for k := range t.sets[i] {
			if e := &t.sets[i][k]; e.mac != 0 && match(e) {
				t.remove(e)
				n++
			}
		}
	}
	return n
}

func (n *Network) neighExpired(now uint32) func(*neighbour) bool {
	return func(e *neighbour) bool { return !e.static && int32(now-e.seen) > int32(n.age) }
}

// snoop records a MAC's claim to an IP address. It returns false if the address is static for another MAC. Only an
// advertisement says whether its sender is a router; a solicitation (known false) only refreshes.
func (n *Network) snoop(a *Attachment, addr ip, vlan uint16, mac uint64, router, known bool, now uint32) bool {
	t := &n.neigh
	if !t.mu.TryLock() {
		return true
	}
	defer t.mu.Unlock()
	if e := t.find(&addr, vlan); e != nil && e.static {
		if e.mac == mac && known {
			e.router = router
		}
		if !e.yields || a.cfg.Kind == KindVTEP || !known {
			return e.mac == mac
		}
		t.remove(e)
	}
	e := t.exact(&addr, vlan)
	if e != nil && e.mac == mac && e.port == a.id {
		e.seen = now
		if known {
			e.router = router
		}
		return true
	}
	if !known {
		return true
	}
	if e != nil {
		t.remove(e)
	}
	limit := t.perPort
	if a.cfg.Kind == KindVTEP {
		limit = t.max
	}
	expired := n.neighExpired(now)
	if e = t.slot(t.set(&addr, vlan), a.id, expired); e == nil {
		return true
	}
	t.remove(e)
	if t.count >= t.max || t.ofPort[a.id] >= limit {
		return true
	}
	*e = neighbour{ip: addr, vlan: vlan, mac: mac, port: a.id, seen: now, router: router}
	t.count++
	t.ofPort[a.id]++
	if a.cfg.Kind != KindVTEP {
		n.tell()
	}
	return true
}

// neighbourOf returns a copy of the live entry of an address.
func (n *Network) neighbourOf(addr ip, vlan uint16, now uint32) (neighbour, bool) {
	t := &n.neigh
	if !t.mu.TryLock() {
		return neighbour{}, false
	}
	defer t.mu.Unlock()
	e := t.find(&addr, vlan)
	if e == nil || n.neighExpired(now)(e) {
		return neighbour{}, false
	}
	return *e, true
}

// SetNeighbour makes an IP address known as that of a MAC, in one VLAN or, without VLAN, in all: the switch answers
// requests for it, and other MACs may not claim it. It does not age. ErrIPInUse: it is static for another MAC.
func (n *Network) SetNeighbour(addr netip.Addr, m Address) error {
	return n.setNeighbour(addr, m, noPort, false)
}

// SetYieldingNeighbour is SetNeighbour for a control plane's entry: a port of this host may claim the address.
func (n *Network) SetYieldingNeighbour(addr netip.Addr, m Address) error {
	return n.setNeighbour(addr, m, noPort, true)
}

func (n *Network) setNeighbour(addr netip.Addr, m Address, port uint16, yields bool) error {
	if !addr.IsValid() || addr.IsUnspecified() || addr.IsMulticast() {
		return fmt.Errorf("vswitch: network %q: %v is not the address of a host", n.cfg.Name, addr)
	}
	if m.MAC.IsGroup() || m.MAC.IsZero() || m.VLAN > maxVLAN {
		return fmt.Errorf("vswitch: network %q: %v cannot be the neighbour %v", n.cfg.Name, m, addr)
	}
	a, now := ip(addr.As16()), n.seconds()
	t := &n.neigh
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.exact(&a, m.VLAN)
	if e != nil && e.static && !e.yields && (e.mac != m.MAC.key() || e.port != port) {
		if e.mac == m.MAC.key() {
			return nil // already known, from elsewhere
		}
		return fmt.Errorf("%w: network %q, %v: %v", ErrIPInUse, n.cfg.Name, addr, keyMAC(e.mac))
	}
	if e == nil {
		if e = t.slot(t.set(&a, m.VLAN), noPort, n.neighExpired(now)); e == nil || e.mac == 0 && t.count >= t.max {
			return fmt.Errorf("vswitch: network %q: no room for neighbour %v", n.cfg.Name, addr)
		}
	}
	t.remove(e)
	*e = neighbour{ip: a, vlan: m.VLAN, mac: m.MAC.key(), port: port, static: true, yields: yields}
	t.count++
	return nil
}

// RemoveNeighbour removes a static neighbour set by SetNeighbour, and reports whether there was one.
func (n *Network) RemoveNeighbour(addr netip.Addr, vlan uint16) bool {
	if !addr.IsValid() {
		return false
	}
	a := ip(addr.As16())
	t := &n.neigh
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.exact(&a, vlan)
	if e == nil || !e.static || e.port != noPort {
		return false
	}
	t.remove(e)
	return true
}

// Neighbour is one IP address that the network knows.
type Neighbour struct {
	IP     netip.Addr    `json:"ip"`
	VLAN   uint16        `json:"vlan,omitempty"` // 0: untagged; of a static entry: all
	MAC    MAC           `json:"mac"`
	Port   string        `json:"port,omitempty"` // where it was snooped or is configured
	Static bool          `json:"static,omitempty"`
	Router bool          `json:"router,omitempty"`
	Idle   time.Duration `json:"idle"` // since the last frame from it, whole seconds
}

// Neighbours lists the live entries, ordered by address.
func (n *Network) Neighbours() (out []Neighbour) {
	now := n.seconds()
	expired := n.neighExpired(now)
	t := &n.neigh
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.sets {
		for k := range t.sets[i] {
			e := &t.sets[i][k]
			if e.mac == 0 || expired(e) {
				continue
			}
			x := Neighbour{IP: netip.AddrFrom16(e.ip).Unmap(), VLAN: e.vlan, MAC: keyMAC(e.mac), Static: e.static,
				Router: e.router}
			if a := n.byID(e.port); a != nil {
				x.Port = a.cfg.Name
			}
			if idle := int32(now - e.seen); !e.static && idle > 0 {
				x.Idle = time.Duration(idle) * time.Second
			}
			out = append(out, x)
		}
	}
	slices.SortFunc(out, func(a, b Neighbour) int { return cmp.Or(a.IP.Compare(b.IP), cmp.Compare(a.VLAN, b.VLAN)) })
	return out
}
