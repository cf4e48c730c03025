package vswitch

import (
	"slices"
	"sync/atomic"
	"time"
)

// An address that moves flapMoves times within flapWindow flaps: two hosts use it, or two ports of the network belong
// to one segment outside it (a looped bridge). Its place before the first of those moves is its home. It is returned
// there at once, and held while frames from elsewhere claim it, until its home has been silent for a window: then the
// next sender gets it, and the count restarts. So during a lasting loop only the first few frames of a contest pass,
// and a host that has moved waits at most a window, unless a loop repeats its frames from its new place; then it waits
// until the old entry has aged.
const (
	flapMoves  = 5
	flapWindow = 10 // seconds
	// The home of an address that moves more slowly is remembered for this many seconds: a loop only repeats what the
	// host sends, which may be little.
	flapMemory = 60
	flapSlots  = 64
)

// flaps detects flapping addresses. It is exact for the few that a healthy network has; if more than flapSlots move at
// once, they displace each other.
type flaps struct {
	busy   atomic.Bool // guards the fields below, for some nanoseconds; bucket locks are only tried while it is held
	slots  [flapSlots]flap
	logged uint32 // second of the last log line

	count atomic.Uint64 // addresses found flapping, once per contest
}

type flap struct {
	key   uint64
	home  value     // with the second of the last frame there
	since uint32    // second of the first move; once flapping, of the detection
	last  uint32    // second of the last move or refusal
	moves uint32    // since then; from flapMoves on the address flaps
	ports [2]uint16 // the last move: from, to
}

// over reports whether the contest for the address has ended.
func (s *flap) over(now uint32) bool { return s.moves >= flapMoves && ago(now, s.last) > flapWindow }

// ago returns how many seconds ago t was; loops' clocks may differ by one.
func ago(now, t uint32) int32 { return int32(now - t) }

// flapTries bounds a loop's attempts to get the lock.
const flapTries = 64

func (f *flaps) tryLock() bool {
	for range flapTries {
		if f.busy.CompareAndSwap(false, true) {
			return true
		}
	}
	return false
}

// lock is for the control plane.
func (f *flaps) lock() {
	for !f.busy.CompareAndSwap(false, true) {
		time.Sleep(time.Microsecond)
	}
}

func (f *flaps) unlock() { f.busy.Store(false) }

func (f *flaps) slot(key uint64) *flap { return &f.slots[(key*0x9e3779b97f4a7c15)>>58] }

type verdict uint8

const (
	moveFree  verdict = iota
	moveLater         // another loop is deciding: do not learn from this frame
	moveHeld          // drop the frame
)

// mayFlap decides whether an address may move from one place to another.
func (n *Network) mayFlap(key uint64, from, to value, now uint32) verdict {
	f := &n.flaps
	if n.cfg.noHold {
		return moveFree
	}
	if !f.tryLock() {
		return moveLater
	}
	defer f.unlock()
	s := f.slot(key)
	if s.key != key || s.moves < flapMoves || s.home.place() == to.place() {
		return moveFree
	}
	if n.homeless(s, now) {
		*s = flap{}
		return moveFree
	}
	heard := s.since
	if from.place() == s.home.place() {
		s.home = from
		if ago(from.seen(), heard) > 0 {
			heard = from.seen()
		}
	}
	if s.over(now) || ago(now, heard) > flapWindow {
		s.moves = 0
		return moveFree
	}
	if from.place() != s.home.place() { // it moved there while we found it flapping
		n.sendHome(s, from)
	}
	s.last = now
	return moveHeld
}

// moved counts a completed move. It returns true if the address flaps and was returned to its home: the frame that
// moved it must be dropped.
func (n *Network) moved(key uint64, from, to value, now uint32) bool {
	n.moves.Add(1)
	f := &n.flaps
	if !f.tryLock() {
		return false
	}
	defer f.unlock()
	s := f.slot(key)
	switch {
	case s.key != key || ago(now, s.last) > flapMemory || n.homeless(s, now):
		*s = flap{key: key, since: now, home: from}
	case s.over(now) || s.moves < flapMoves && ago(now, s.since) > flapWindow:
		s.since, s.moves = now, 0
		if s.home.place() != to.place() {
			s.home = from
		}
	}
	s.moves++
	s.last = now
	s.ports = [2]uint16{from.port(), to.port()}
	if s.moves == flapMoves {
		s.since = now
		n.report(s, now)
	}
	return s.moves >= flapMoves && !n.cfg.noHold && s.home.place() != to.place() && n.sendHome(s, to)
}

// homeless reports whether an address's home is gone, or has been silent for the ageing time.
func (n *Network) homeless(s *flap, now uint32) bool {
	h := n.byID(s.home.port())
	return h == nil || h.closed.Load() || s.home.expired(now, n.age)
}

// sendHome returns a flapping address with a valid home from its present place. It returns false if another loop holds
// the entry.
func (n *Network) sendHome(s *flap, from value) bool {
	h := n.byID(s.home.port())
	if h == nil {
		return false
	}
	n.entries.Add(1)
	h.entries.Add(1)
	var old value
	res := n.fdb.put(s.key, s.home, false, func(value) bool { return false }, func(v value) bool {
		old = v
		return v != 0 && v.place() == from.place()
	}, n.gone)
	if res != putDone {
		n.gone(s.home) // undoes the counts reserved for it
		return false
	}
	n.gone(old)
	return true
}

// forgetHomes removes the homes that match gone, together with and, which removes the entries: no address is returned
// home meanwhile.
func (n *Network) forgetHomes(gone func(*flap) bool, and func()) {
	f := &n.flaps
	f.lock()
	defer f.unlock()
	for i := range f.slots {
		if gone(&f.slots[i]) {
			f.slots[i] = flap{}
		}
	}
	and()
}

// report counts a flapping address. It logs at most once per window, on a separate goroutine, because logging may
// block.
func (n *Network) report(s *flap, now uint32) {
	f := &n.flaps
	f.count.Add(1)
	if f.logged != 0 && ago(now, f.logged) < flapWindow {
		return
	}
	f.logged = now
	x := n.flapping(*s)
	go n.log.Warn("address flaps between ports: two hosts use it, or the ports are connected outside the network",
		"network", n.cfg.Name, "mac", x.MAC, "vlan", x.VLAN, "from", x.From, "to", x.To, "moves", x.Moves, "flapping so far",
		f.count.Load())
}

// Flapping is an address that moves back and forth.
type Flapping struct {
	MAC   MAC    `json:"mac"`
	VLAN  uint16 `json:"vlan,omitempty"`
	Moves uint32 `json:"moves"` // in the current window
	Home  string `json:"home"`  // where it is held
	From  string `json:"from"`  // of the last move
	To    string `json:"to"`
}

func (n *Network) flapping(s flap) Flapping {
	name := func(id uint16) string {
		if a := n.byID(id); a != nil {
			return a.cfg.Name
		}
		return ""
	}
	return Flapping{MAC: keyMAC(s.key), VLAN: keyVLAN(s.key), Moves: s.moves, Home: name(s.home.port()),
		From: name(s.ports[0]), To: name(s.ports[1])}
}

// Flapping lists the addresses that flap at present, ordered by address.
func (n *Network) Flapping() (out []Flapping) {
	n.flaps.lock()
	slots := n.flaps.slots
	n.flaps.unlock()
	now := n.seconds()
	for _, s := range slots {
		if s.moves >= flapMoves && !s.over(now) {
			out = append(out, n.flapping(s))
		}
	}
	slices.SortFunc(out, func(a, b Flapping) int { return slices.Compare(a.MAC[:], b.MAC[:]) })
	return out
}
