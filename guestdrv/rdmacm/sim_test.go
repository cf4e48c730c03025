package rdmacm

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vnicd/vnicd/device/rdma/cm"
	"github.com/vnicd/vnicd/guestdrv"
)

// Machines on a network of their own, with a clock of their own.

const testPort = 7471

func addr(n byte) netip.Addr          { return netip.AddrFrom4([4]byte{10, 0, 0, n}) }
func gidOf(n byte) guestdrv.GID       { return guestdrv.IPGID(addr(n)) }
func counting(n uint32) func() uint32 { return func() uint32 { n++; return n } }

// host is a machine with its programs.
type host struct {
	*machine
	n    byte
	port *port
	qpns uint32
}

func newHost(n byte, s settings) *host {
	s.gid, s.guid = gidOf(n), uint64(n)
	if s.maxMTU == 0 {
		s.maxMTU = uint8(guestdrv.MTU1024)
	}
	if s.most == 0 {
		s.most = 1000
	}
	if s.response == 0 {
		s.response, s.retries = 18, 15
	}
	if s.timeWait == 0 {
		s.timeWait = time.Second
	}
	if s.random == nil {
		s.random = counting(uint32(n) << 24)
	}
	return &host{machine: newMachine(s), n: n, qpns: 16 * uint32(n)}
}

func (h *host) qpn() uint32 { h.qpns++; return h.qpns }

// serve listens on testPort.
func (h *host) serve(tb testing.TB, backlog int) {
	tb.Helper()
	var err error
	if h.port, err = h.listen(testPort, backlog, nil); err != nil {
		tb.Fatal(err)
	}
}

// requestTo returns what Dial passes to the machine.
func (h *host) requestTo(n byte, private []byte) cm.Fields {
	x := ipHeader{src: netip.AddrPortFrom(addr(h.n), 50000), dst: addr(n), rest: private}
	return cm.Fields{QPN: h.qpn(), PSN: 5, Service: serviceID(testPort), PathMTU: uint8(guestdrv.MTU1024), RetryCount: 7,
		RNRRetry: 7, Private: x.encode()}
}

func (h *host) dial(tb testing.TB, now time.Time, n byte) *session {
	tb.Helper()
	s, err := h.connect(now, gidOf(n), h.requestTo(n, []byte("hello")), nil)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// packet is a message on the way.
type packet struct {
	from, to guestdrv.GID
	mad      []byte
	at       time.Time
}

// network carries the messages of its hosts. With a rng it loses, duplicates, delays and reorders them.
type network struct {
	now   time.Time
	hosts []*host
	rng   *rand.Rand
	loss  float64
	way   []packet
	sent  map[cm.Kind]int
	last  cm.Kind // that was sent
}

func newNetwork(hosts ...*host) *network {
	return &network{now: time.Unix(0, 0), hosts: hosts, sent: map[cm.Kind]int{}}
}

// collect takes the messages that the hosts have sent.
func (n *network) collect() {
	for _, h := range n.hosts {
		for _, d := range h.out {
			m, err := cm.Parse(d.mad)
			if err != nil {
				panic(err)
			}
			n.last = m.Kind()
			n.sent[n.last]++
			copies := 1
			if n.rng != nil {
				copies = 0
				for n.rng.Float64() >= n.loss && copies < 3 {
					copies++
					if n.rng.IntN(5) > 0 {
						break
					}
				}
			}
			for range copies {
				p := packet{from: h.gid, to: d.to, mad: slices.Clone(d.mad), at: n.now}
				if n.rng != nil {
					p.at = n.now.Add(time.Duration(n.rng.IntN(int(300 * time.Millisecond))))
				}
				n.way = append(n.way, p)
			}
		}
		h.out = nil
	}
}

// deliver delivers the messages that have arrived by now, and those that result.
func (n *network) deliver(tb testing.TB) {
	tb.Helper()
	for n.collect(); ; n.collect() {
		i := slices.IndexFunc(n.way, func(p packet) bool { return !p.at.After(n.now) })
		if i < 0 {
			return
		}
		for j, p := range n.way {
			if p.at.Before(n.way[i].at) {
				i = j
			}
		}
		p := n.way[i]
		n.way = slices.Delete(n.way, i, i+1)
		for _, h := range n.hosts {
			if h.gid == p.to {
				h.receive(n.now, p.from, p.mad)
				if x := h.invariants(); x != "" {
					tb.Fatalf("host %d: %s", h.n, x)
				}
			}
		}
	}
}

// pass lets time pass, with the timers and messages that it brings.
func (n *network) pass(tb testing.TB, d time.Duration) {
	tb.Helper()
	for end := n.now.Add(d); ; {
		n.deliver(tb)
		next := end
		for _, h := range n.hosts {
			if t, ok := h.next(); ok && t.Before(next) {
				next = t
			}
		}
		for _, p := range n.way {
			if p.at.Before(next) {
				next = p.at
			}
		}
		if next.After(n.now) {
			n.now = next
		}
		if !n.now.Before(end) {
			return
		}
		for _, h := range n.hosts {
			h.tick(n.now)
			if x := h.invariants(); x != "" {
				tb.Fatalf("host %d: %s", h.n, x)
			}
		}
	}
}

// drop loses all messages that are on the way.
func (n *network) drop() {
	n.collect()
	n.way = nil
}

// invariants returns what is wrong with the machine's tables, "" if nothing is.
func (m *machine) invariants() string {
	if len(m.byLocal) > m.most {
		return fmt.Sprintf("%d sessions, at most %d", len(m.byLocal), m.most)
	}
	if n := len(m.waiting); n > 3*len(m.byLocal)+17 {
		return fmt.Sprintf("%d sessions are remembered, %d exist", n, len(m.byLocal))
	}
	remote, qps, timers := 0, 0, 0
	for id, s := range m.byLocal {
		has := s.timer > 0
		switch {
		case id != s.localID || id == 0:
			return fmt.Sprintf("session %d has the ID %d", id, s.localID)
		case s.state < sidrSent || s.state >= gone:
			return fmt.Sprintf("session %d is in state %d", id, s.state)
		case s.haveRemote && m.byRemote[remoteKey{s.peer, s.remoteID}] != s:
			return fmt.Sprintf("session %d in %v is not found by its peer's ID", id, s.state)
		case s.haveRemote != (s.state > reqSent):
			return fmt.Sprintf("session %d in %v: peer's ID known: %v", id, s.state, s.haveRemote)
		case s.state != repReceived && s.state != established && !has, s.state == established && has:
			return fmt.Sprintf("session %d in %v: timer: %v", id, s.state, has)
		case s.port != nil && s.state != reqReceived:
			return fmt.Sprintf("session %d in %v is in a backlog", id, s.state)
		case s.retries < 0 || s.retries > 15:
			return fmt.Sprintf("session %d has %d retries", id, s.retries)
		case (s.message != nil) != (s.state <= reqSent || s.state == repSent || s.state == dreqSent):
			return fmt.Sprintf("session %d in %v: message: %v", id, s.state, s.message != nil)
		}
		if has {
			if timers++; m.timers[s.timer-1] != s {
				return fmt.Sprintf("session %d is not at its place in the timers", id)
			}
		}
		if s.haveRemote {
			remote++
			if m.byPeerQP[remoteKey{s.peer, s.peerQPN}] == s {
				if qps++; s.state == timeWait {
					return fmt.Sprintf("session %d in time wait is found by its queue pair", id)
				}
			}
		}
	}
	if remote != len(m.byRemote) || qps != len(m.byPeerQP) || timers != len(m.timers) {
		return fmt.Sprintf("%d of %d sessions by peer, %d of %d by queue pair, %d of %d timers", remote, len(m.byRemote),
			qps, len(m.byPeerQP), timers, len(m.timers))
	}
	for n, p := range m.ports {
		if p.number != n || len(p.backlog) > p.most {
			return fmt.Sprintf("port %d with a backlog of %d, at most %d", n, len(p.backlog), p.most)
		}
		for _, s := range p.backlog {
			if s.port != p || s.state != reqReceived || m.byLocal[s.localID] != s {
				return fmt.Sprintf("session %d in %v in the backlog of port %d", s.localID, s.state, n)
			}
		}
	}
	return ""
}

// empty fails unless nothing is left in the machine.
func (h *host) empty(tb testing.TB) {
	tb.Helper()
	if len(h.byLocal)+len(h.byRemote)+len(h.byPeerQP)+len(h.timers) != 0 {
		tb.Errorf("host %d: left: %d sessions, %d by peer, %d by queue pair, %d timers", h.n, len(h.byLocal),
			len(h.byRemote), len(h.byPeerQP), len(h.timers))
	}
}

func (s *session) String() string {
	return fmt.Sprintf("session %#x of %#x at %v: %v, active %v, up %v, QP %d of %d, %v", s.localID, s.remoteID, s.peer,
		s.state, s.active, s.up, s.qpn, s.peerQPN, s.err)
}
