package vxlan

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Source ports of datagrams (TR-3, TR-4). A peer is known by its address, and any user of the peer host can send from
// that address. Ports below 1024 need CAP_NET_BIND_SERVICE there, so a VTEP sends from such ports, and does not believe
// a peer host's other ports once it knows that the peer does so, too.

// reservedPorts is the number of UDP ports that only privileged processes can bind (ip_unprivileged_port_start).
const reservedPorts = 1024

// ourPorts are the ranges, first and last port, of which the VTEP takes source ports. They are unassigned, or assigned
// to services that nobody runs over UDP, and far from those that the kernel's sunrpc (665 to 1023) and bindresvport(3)
// (600 to 1023) take at random. RFC 7348, section 5 recommends the dynamic range, for which nobody needs a right.
var ourPorts = [][2]uint16{{180, 190}, {225, 255}, {272, 307}, {325, 343}, {352, 362}, {390, 394}, {412, 422},
	{450, 463}, {476, 486}, {565, 586}}

// The dynamic range (RFC 6335), for a process without the right.
const (
	firstPort = 49152
	lastPort  = 65535
)

// PeerPorts says from which UDP ports peers must send.
type PeerPorts uint8

const (
	// PeerPortsAuto: a peer that has sent from a port below 1024 must do so from then on, until it is no peer any more or
	// the VTEP ends. So peers that send from others (Linux, older versions) are accepted.
	PeerPortsAuto PeerPorts = iota
	// PeerPortsReserved: all peers must send from ports below 1024.
	PeerPortsReserved
	// PeerPortsAny: the port does not matter.
	PeerPortsAny
)

// ParsePeerPorts returns the value of a name: auto, reserved or any.
func ParsePeerPorts(s string) (p PeerPorts, ok bool) {
	i := slices.Index([]string{PeerPortsAuto: "auto", PeerPortsReserved: "reserved", PeerPortsAny: "any"}, s)
	return PeerPorts(max(i, 0)), i >= 0
}

// supply opens the sockets that send.
type supply struct {
	vt      *VTEP
	left    []uint16 // reserved ports that have not been tried
	share   int      // of each loop
	dynamic bool     // the process may not bind reserved ports
}

func newSupply(vt *VTEP) *supply {
	s := &supply{vt: vt}
	for _, r := range ourPorts {
		for p := r[0]; p <= r[1]; p++ {
			s.left = append(s.left, p)
		}
	}
	s.share = min(vt.cfg.SourcePorts, max(len(s.left)/len(vt.cfg.Loops), 1))
	rand.Shuffle(len(s.left), func(i, k int) { s.left[i], s.left[k] = s.left[k], s.left[i] })
	vt.warnUnprivileged()
	return s
}

// sockets opens the sockets of one loop.
func (s *supply) sockets() (list []*txSocket, err error) {
	for range s.share {
		var k *txSocket
		if k, err = s.open(); err != nil {
			break
		}
		list = append(list, k)
	}
	if len(list) == 0 || err != nil && !errors.Is(err, unix.EADDRINUSE) {
		for _, k := range list {
			unix.Close(k.fd)
		}
		return nil, err
	}
	if err != nil {
		s.vt.log.Warn("other programs use source ports: flows to a peer have fewer paths", "ports", len(list), "want", s.share)
	}
	return list, nil
}

// open opens a socket on a port that is free: reserved if this process may.
func (s *supply) open() (*txSocket, error) {
	c := &s.vt.cfg
	try := func(port uint16) (*txSocket, error) {
		fd, err := openSender(s.vt.nl, netip.AddrPortFrom(c.Local, port), s.vt.device(), c.ZeroChecksum6)
		return &txSocket{fd: fd, port: port}, err
	}
	for !s.dynamic {
		if len(s.left) == 0 {
			return nil, fmt.Errorf("vxlan: source ports of %v below %d: all of %v: %w", c.Local, reservedPorts, ourPorts,
				unix.EADDRINUSE)
		}
		port := s.left[0]
		s.left = s.left[1:]
		k, err := try(port)
		switch {
		case err == nil:
			return k, nil
		case errors.Is(err, unix.EACCES):
			s.dynamic = true
			s.vt.log.Warn("datagrams leave from ports above 1023, as any user of this host could send them: peers that know"+
				" this host by its reserved ports refuse them; vnicd needs CAP_NET_BIND_SERVICE", "error", err)
		case !errors.Is(err, unix.EADDRINUSE):
			return nil, err
		}
	}
	const tries = 64
	var err error
	for range tries {
		var k *txSocket
		if k, err = try(uint16(firstPort + rand.IntN(lastPort-firstPort+1))); err == nil {
			return k, nil
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("vxlan: no source port of %v from %d up: %w", c.Local, firstPort, err)
}

// warnUnprivileged reports a host whose users may bind reserved ports: peers would take them for this VTEP.
func (vt *VTEP) warnUnprivileged() {
	const name = "/proc/sys/net/ipv4/ip_unprivileged_port_start" // for IPv6, too
	b, err := os.ReadFile(name)
	if err != nil {
		return // not visible in this sandbox
	}
	if first, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && first < reservedPorts {
		vt.log.Warn("any user of this host may send from reserved ports, which peers take for this host's vnicd",
			"sysctl", "net.ipv4.ip_unprivileged_port_start", "value", first, "want", reservedPorts)
	}
}

// origin is what is known about a peer host's source ports, in all its networks.
type origin struct {
	reserved atomic.Bool // a datagram came from a reserved port
	users    int         // peers of networks; guarded by origins.mu
}

// origins are the origins of all peers.
type origins struct {
	mu sync.Mutex // innermost lock; taken only when peers come and go
	m  map[netip.Addr]*origin
}

// use returns the origin of a peer that is going to be in a network; drop is its inverse.
func (s *origins) use(a netip.Addr) *origin {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.m[a]
	if o == nil {
		if s.m == nil {
			s.m = map[netip.Addr]*origin{}
		}
		o = new(origin)
		s.m[a] = o
	}
	o.users++
	return o
}

func (s *origins) drop(peers ...*peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range peers {
		if x.origin.users--; x.origin.users == 0 {
			delete(s.m, x.addr)
		}
	}
}

// believes reports whether a datagram of a peer, from a reserved port or from another one, is accepted.
func (vt *VTEP) believes(x *peer, reserved bool) bool {
	switch {
	case vt.cfg.PeerPorts == PeerPortsAny:
		return true
	case !reserved:
		return vt.cfg.PeerPorts == PeerPortsAuto && !x.origin.reserved.Load()
	case vt.cfg.PeerPorts == PeerPortsAuto && !x.origin.reserved.Load():
		x.origin.reserved.Store(true)
		vt.recompute() // the short path's entries for the peer change
	}
	return true
}

// mayLearn reports whether a host that is no peer of the network may become one by a datagram.
func (vt *VTEP) mayLearn(a netip.Addr, reserved bool) bool {
	if vt.cfg.Protection != nil && !vt.cfg.Protection.Peer(a) {
		return false // a user of this host: for the kernel its datagrams have come by the protection's interface
	}
	if reserved || vt.cfg.PeerPorts == PeerPortsAny {
		return true
	}
	return vt.cfg.PeerPorts == PeerPortsAuto && !vt.origins.reserved(a)
}

// reserved reports whether a host is known, from other networks, to send from reserved ports. It does not wait: if
// peers are coming or going it returns true, and the host's next datagram decides.
func (s *origins) reserved(a netip.Addr) bool {
	if !s.mu.TryLock() {
		return true
	}
	defer s.mu.Unlock()
	o := s.m[a]
	return o != nil && o.reserved.Load()
}

// lastPort returns the highest source port that is accepted from a peer.
func (vt *VTEP) lastPort(x *peer) uint16 {
	if vt.cfg.PeerPorts == PeerPortsAny || vt.cfg.PeerPorts == PeerPortsAuto && !x.origin.reserved.Load() {
		return 65535
	}
	return reservedPorts - 1
}
