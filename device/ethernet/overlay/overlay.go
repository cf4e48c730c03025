// Package overlay maintains the tables of tenant networks. A TableSource (static configuration, the control API, EVPN)
// provides routes; the Table of a network holds the routes of all sources, selects the best for each key, and installs
// it in the switch (vswitch) and the tunnels (vxlan). Addresses that the data path learns rank below all sources and
// exist only in the switch.
//
//	Peer   this VTEP serves the network: floods go to it          (EVPN type 3)
//	MAC    this MAC is behind that VTEP, or at that local port    (EVPN type 2)
//	IP     this IP address is that MAC's: ARP and ND are answered (EVPN type 2)
//
// A route that cannot be installed (its VTEP is no peer, a VM of this host has the MAC) is kept, shown with the reason,
// and tried again on every change. A Table's methods may be called from any goroutine except loops. Lock order:
// Table.mu, then vxlan's and vswitch's.
package overlay

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/vnicd/vnicd/device/ethernet/vswitch"
	"github.com/vnicd/vnicd/device/ethernet/vxlan"
)

// TableSource is one origin of routes.
type TableSource interface {
	// Name identifies the source: "static", "api".
	Name() string
	// Rank orders the sources: the lowest wins.
	Rank() int
	// Attach begins to feed a network's table: the source calls Set and Withdraw, now and later, until Detach. Routes set
	// with an error from Attach are withdrawn by the caller.
	Attach(t *Table) error
	// Detach reverts Attach. The caller withdraws the remaining routes.
	Detach(t *Table)
}

// Ranks of the sources. Learnt addresses rank below all of them.
const (
	RankStatic = 10
	RankAPI    = 20
	RankEVPN   = 30
)

// Errors that callers test for.
var (
	ErrNoTunnel = errors.New("overlay: this host has no vtep")
	ErrNoPeer   = errors.New("overlay: the VTEP is not a peer of the network")
	ErrNoPort   = errors.New("overlay: no such port in the network")
	ErrLimit    = errors.New("overlay: table is full")
	ErrInvalid  = errors.New("overlay: malformed route")

	errOutranked = errors.New("another source comes first")
)

// MaxRoutes bounds the routes of one network.
const MaxRoutes = 1 << 20

// Kind is the kind of a route.
type Kind uint8

// The kinds of routes.
const (
	Peer Kind = iota + 1
	MAC
	IP
)

var kindNames = [...]string{Peer: "peer", MAC: "mac", IP: "ip"}

// String returns the name that status output uses.
func (k Kind) String() string {
	if k == 0 || int(k) >= len(kindNames) {
		return "unknown"
	}
	return kindNames[k]
}

// MarshalText makes a kind a string in JSON.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (k *Kind) UnmarshalText(b []byte) error {
	i := slices.Index(kindNames[:], string(b))
	if i < 1 {
		return fmt.Errorf("overlay: %q is no kind of route", b)
	}
	*k = Kind(i)
	return nil
}

// Key identifies a route's subject; fields that its kind does not use are zero.
type Key struct {
	Kind Kind
	VTEP netip.Addr  // Peer
	MAC  vswitch.MAC // MAC
	VLAN uint16      // MAC and IP; 0: all
	IP   netip.Addr  // IP
}

// Route is one statement of a source.
type Route struct {
	Key
	Behind netip.Addr  // MAC: the VTEP of the address; or
	Port   string      // MAC: the local port of the address
	At     vswitch.MAC // IP: the MAC that has it
	Yields bool        // ports of this host may take it over; its source then reports it (vswitch.Network.SetYielding)
}

func (r *Route) check() error {
	host := func(a netip.Addr) bool { return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() }
	switch {
	case r.Kind == Peer && !host(r.VTEP):
		return fmt.Errorf("%w: peer %v is not the address of a host", ErrInvalid, r.VTEP)
	case r.Kind == MAC && (r.MAC.IsZero() || r.MAC.IsGroup()):
		return fmt.Errorf("%w: %v is not the address of a host", ErrInvalid, r.MAC)
	case r.Kind == MAC && host(r.Behind) == (r.Port != ""):
		return fmt.Errorf("%w: %v must be behind a VTEP or at a port", ErrInvalid, r.MAC)
	case r.Kind == IP && (!host(r.IP) || r.At.IsZero() || r.At.IsGroup()):
		return fmt.Errorf("%w: %v at %v are not a host's addresses", ErrInvalid, r.IP, r.At)
	case r.Kind < Peer || r.Kind > IP:
		return fmt.Errorf("%w: kind %d", ErrInvalid, r.Kind)
	}
	return nil
}

// Table has the routes of one network, and their state.
type Table struct {
	net *vswitch.Network
	vt  *vxlan.VTEP // nil: the network is on this host only

	mu     sync.Mutex
	routes map[Key]*entry
	count  int
	// Entries that depend on others: those whose best offer is behind a VTEP, and those not installed. So a change only
	// visits the entries that depend on it.
	behind  map[netip.Addr]map[*entry]struct{}
	waiting map[*entry]struct{}
}

// entry has the routes of all sources for one key. installed is the one in the switch.
type entry struct {
	offers    []offer // best first
	installed *Route
	why       error      // why offers[0] is not installed
	under     netip.Addr // key of the entry in Table.behind
}

type offer struct {
	src TableSource
	Route
}

// NewTable makes the table of a network. If the host has a VTEP, the network's tunnel port must exist already.
func NewTable(net *vswitch.Network, vt *vxlan.VTEP) *Table {
	return &Table{net: net, vt: vt, routes: make(map[Key]*entry), behind: make(map[netip.Addr]map[*entry]struct{}),
		waiting: make(map[*entry]struct{})}
}

// Network returns the network whose table it is.
func (t *Table) Network() *vswitch.Network { return t.net }

// Tunnels returns the host's VTEP, nil if it has none.
func (t *Table) Tunnels() *vxlan.VTEP { return t.vt }

// Set adds a source's route, or replaces its route for the same key. The error says why the route is not installed
// (errors.Is with this package's and vswitch's errors); it stays in the table nevertheless. Malformed routes and those
// beyond the table's limit are refused.
func (t *Table) Set(src TableSource, r Route) error {
	r.VTEP, r.Behind, r.IP = unmap(r.VTEP), unmap(r.Behind), unmap(r.IP)
	if err := r.check(); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.routes[r.Key]
	if e == nil {
		e = &entry{}
	}
	if i := e.of(src); i >= 0 {
		e.offers[i].Route = r
	} else {
		if t.count >= MaxRoutes {
			return fmt.Errorf("%w: network %q: %d routes", ErrLimit, t.net.Name(), MaxRoutes)
		}
		t.count++
		e.offers = append(e.offers, offer{src, r})
		slices.SortStableFunc(e.offers, func(a, b offer) int { return cmp.Compare(a.src.Rank(), b.src.Rank()) })
	}
	t.routes[r.Key] = e
	t.settleLocked(e)
	if r.Kind == Peer {
		t.peerChangedLocked(r.VTEP)
	}
	return e.why
}

// State reports whether a source's route is installed, otherwise why not; false, nil: there is none.
func (t *Table) State(src TableSource, k Key) (active bool, why error) {
	k.VTEP, k.IP = unmap(k.VTEP), unmap(k.IP)
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.routes[k]
	if e == nil {
		return false, nil
	}
	switch e.of(src) {
	case -1:
		return false, nil
	case 0:
		return e.why == nil, e.why
	}
	return false, errOutranked
}

// Said returns a source's route for a key.
func (t *Table) Said(src TableSource, k Key) (Route, bool) {
	k.VTEP, k.IP = unmap(k.VTEP), unmap(k.IP)
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.routes[k]; e != nil {
		if i := e.of(src); i >= 0 {
			return e.offers[i].Route, true
		}
	}
	return Route{}, false
}

// Withdraw removes a source's route for a key, and reports whether there was one.
func (t *Table) Withdraw(src TableSource, k Key) bool {
	k.VTEP, k.IP = unmap(k.VTEP), unmap(k.IP)
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.routes[k]
	if e == nil || e.of(src) < 0 {
		return false
	}
	t.withdrawLocked(k, e, src)
	if k.Kind == Peer {
		t.peerChangedLocked(k.VTEP)
	}
	tries := 0
	for w := range t.waiting { // the cause may have been a full table
		if tries++; tries > roomTries {
			break
		}
		t.settleLocked(w)
	}
	return true
}

// WithdrawAll removes all routes of a source.
func (t *Table) WithdrawAll(src TableSource) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k, e := range t.routes {
		if e.of(src) >= 0 {
			t.withdrawLocked(k, e, src)
		}
	}
	for _, e := range t.routes {
		t.settleLocked(e)
	}
}

// Retry tries again to install routes after a port was added or removed. Routes that yield to ports are retried by
// their source.
func (t *Table) Retry() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range t.routes {
		// An installed entry may have been removed with its port.
		if e.why != nil || e.installed != nil && e.installed.Kind == MAC && !e.installed.Yields {
			t.settleLocked(e)
		}
	}
}

// roomTries bounds how many routes are retried when one is removed.
const roomTries = 4

// peerChangedLocked updates the entries behind a VTEP that was added or removed.
func (t *Table) peerChangedLocked(vtep netip.Addr) {
	for e := range t.behind[vtep] {
		t.settleLocked(e)
	}
}

// fileLocked updates the indices of entries that depend on others.
func (t *Table) fileLocked(e *entry) {
	var under netip.Addr
	if len(e.offers) > 0 && e.offers[0].Kind == MAC {
		under = e.offers[0].Behind
	}
	if under != e.under {
		if set := t.behind[e.under]; set != nil {
			if delete(set, e); len(set) == 0 {
				delete(t.behind, e.under)
			}
		}
		if under.IsValid() {
			if t.behind[under] == nil {
				t.behind[under] = make(map[*entry]struct{})
			}
			t.behind[under][e] = struct{}{}
		}
		e.under = under
	}
	if e.why != nil {
		t.waiting[e] = struct{}{}
	} else {
		delete(t.waiting, e)
	}
}

func (t *Table) withdrawLocked(k Key, e *entry, src TableSource) {
	i := e.of(src)
	e.offers = slices.Delete(e.offers, i, i+1)
	t.count--
	t.settleLocked(e)
	if len(e.offers) == 0 {
		delete(t.routes, k)
	}
}

// settleLocked installs the best offer of a key.
func (t *Table) settleLocked(e *entry) {
	defer t.fileLocked(e)
	if e.installed != nil && (len(e.offers) == 0 || e.offers[0].Route != *e.installed &&
		!t.replaces(&e.offers[0].Route, e.installed)) {
		t.remove(e.installed)
		e.installed = nil
	}
	e.why = nil
	if len(e.offers) == 0 {
		return
	}
	r := e.offers[0].Route
	if e.why = t.install(&r); e.why == nil {
		e.installed = &r
	} else if e.installed != nil {
		// It was installed and its port or peer is gone, or it was to replace another source's entry.
		t.remove(e.installed)
		e.installed = nil
	}
}

// replaces reports whether one route may be installed over the other: an address that moves between VTEPs is never
// unknown in between.
func (t *Table) replaces(r, old *Route) bool {
	return r.Kind == MAC && r.Behind.IsValid() && old.Behind.IsValid()
}

func (t *Table) install(r *Route) error {
	switch r.Kind {
	case Peer:
		if t.vt == nil {
			return ErrNoTunnel
		}
		return t.vt.AddPeer(t.net.VNI(), r.VTEP)
	case MAC:
		att, remote, err := t.place(r)
		if err != nil {
			return err
		}
		if r.Yields {
			return t.net.SetYielding(vswitch.Address{MAC: r.MAC, VLAN: r.VLAN}, att, remote)
		}
		return t.net.SetStatic(vswitch.Address{MAC: r.MAC, VLAN: r.VLAN}, att, remote)
	}
	if r.Yields {
		return t.net.SetYieldingNeighbour(r.IP, vswitch.Address{MAC: r.At, VLAN: r.VLAN})
	}
	return t.net.SetNeighbour(r.IP, vswitch.Address{MAC: r.At, VLAN: r.VLAN})
}

func (t *Table) remove(r *Route) {
	switch r.Kind {
	case Peer:
		// On an error the peer is gone already.
		_ = t.vt.RemovePeer(t.net.VNI(), r.VTEP)
	case MAC:
		if att, _, err := t.place(r); err == nil {
			t.net.RemoveStatic(vswitch.Address{MAC: r.MAC, VLAN: r.VLAN}, att)
		}
	case IP:
		t.net.RemoveNeighbour(r.IP, r.VLAN)
	}
}

// place resolves the location of a MAC route.
func (t *Table) place(r *Route) (*vswitch.Attachment, vswitch.Remote, error) {
	if r.Port != "" {
		if a := t.net.Port(r.Port); a != nil {
			return a, 0, nil
		}
		return nil, 0, fmt.Errorf("%w: %q", ErrNoPort, r.Port)
	}
	if t.vt == nil {
		return nil, 0, ErrNoTunnel
	}
	a := t.vt.Attachment(t.net.VNI())
	remote, ok := t.vt.Remote(t.net.VNI(), r.Behind)
	if a == nil || !ok {
		return nil, 0, fmt.Errorf("%w: %v", ErrNoPeer, r.Behind)
	}
	return a, remote, nil
}

func (e *entry) of(src TableSource) int {
	return slices.IndexFunc(e.offers, func(o offer) bool { return o.src == src })
}

// RouteStatus is one route of one source.
type RouteStatus struct {
	Kind   Kind        `json:"kind"`
	Source string      `json:"source"`
	VTEP   netip.Addr  `json:"vtep,omitzero"` // Peer, or the location of a MAC
	MAC    vswitch.MAC `json:"mac,omitzero"`
	VLAN   uint16      `json:"vlan,omitempty"`
	Port   string      `json:"port,omitempty"`
	IP     netip.Addr  `json:"ip,omitzero"`
	Active bool        `json:"active"`
	Why    string      `json:"why,omitempty"` // why it is not active
}

// Routes lists the routes of all sources, ordered by kind and address.
func (t *Table) Routes() (out []RouteStatus) {
	t.mu.Lock()
	defer t.mu.Unlock()
	keys := slices.SortedFunc(maps.Keys(t.routes), func(a, b Key) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), a.VTEP.Compare(b.VTEP), slices.Compare(a.MAC[:], b.MAC[:]),
			a.IP.Compare(b.IP), cmp.Compare(a.VLAN, b.VLAN))
	})
	for _, k := range keys {
		e := t.routes[k]
		for i, o := range e.offers {
			s := RouteStatus{Kind: k.Kind, Source: o.src.Name(), VTEP: k.VTEP, MAC: k.MAC, VLAN: k.VLAN, Port: o.Port, IP: k.IP,
				Active: i == 0 && e.why == nil}
			switch {
			case k.Kind == MAC:
				s.VTEP = o.Behind
			case k.Kind == IP:
				s.MAC = o.At
			}
			switch {
			case i > 0:
				s.Why = errOutranked.Error()
			case e.why != nil:
				s.Why = e.why.Error()
			}
			out = append(out, s)
		}
	}
	return out
}

func unmap(a netip.Addr) netip.Addr {
	if a.IsValid() {
		return a.Unmap()
	}
	return a
}
