package lfe

import (
	"slices"
	"sync/atomic"
	"time"
)

// An address that moves flapMoves times within flapWindow flaps: two hosts use it, or two ports of the network are one
// segment outside it (a looped bridge).
const (
	flapMoves  = 5
	flapWindow = 10 // seconds
	flapSlots  = 64
)

// flaps finds addresses that flap. It is exact for the few that a healthy network has; when more than flapSlots move at
// once they displace each other, which a storm of moving addresses deserves.
type flaps struct {
	busy   atomic.Bool // held for the fields below; loops do not wait for it
	slots  [flapSlots]flap
	logged uint32 // second of the last log line

	count atomic.Uint64 // addresses found flapping, once per window
}

type flap struct {
	key   uint64
	since uint32 // second of the first move, then of having been found flapping
	moves uint32
	home  uint64    // where it was before the first move: value.place
	ports [2]uint16 // the last move: from, to
}

// held tells whether a flapping address may not go to a place now: it stays at its home for a window. Frames that bring it
// from elsewhere are dropped, which also ends what goes round in a loop.
func (n *Network) held(key, to uint64, now uint32) bool {
	f := &n.flaps
	if n.cfg.NoHold || !f.busy.CompareAndSwap(false, true) {
		return false
	}
	defer f.busy.Store(false)
	s := f.slot(key)
	return s.key == key && s.moves >= flapMoves && now-s.since <= flapWindow && s.home != to
}

func (f *flaps) slot(key uint64) *flap { return &f.slots[(key*0x9e3779b97f4a7c15)>>58] }

// Flapping is an address that moves to and fro.
type Flapping struct {
	MAC   MAC    `json:"mac"`
	VLAN  uint16 `json:"vlan,omitempty"`
	Moves uint32 `json:"moves"` // within the last seconds
	From  string `json:"from"`
	To    string `json:"to"`
}

// moved counts a move. It logs at most once per window, on a goroutine of its own, because the log may block.
func (n *Network) moved(key uint64, from, to value, now uint32) {
	n.moves.Add(1)
	f := &n.flaps
	if !f.busy.CompareAndSwap(false, true) {
		return
	}
	defer f.busy.Store(false)
	s := f.slot(key)
	if s.key != key || now-s.since > flapWindow {
		*s = flap{key: key, since: now, home: from.place()}
	}
	s.moves++
	s.ports = [2]uint16{from.port(), to.port()}
	if s.moves != flapMoves {
		return
	}
	s.since = now
	f.count.Add(1)
	if f.logged != 0 && now-f.logged < flapWindow {
		return
	}
	f.logged = now
	x := n.flapping(*s)
	go n.log.Warn("an address flaps between ports: two hosts use it, or the ports are joined outside the network",
		"network", n.cfg.Name, "mac", x.MAC, "vlan", x.VLAN, "from", x.From, "to", x.To, "moves", x.Moves, "flapping so far", f.count.Load())
}

func (n *Network) flapping(s flap) Flapping {
	name := func(id uint16) string {
		if a := n.byID(id); a != nil {
			return a.cfg.Name
		}
		return ""
	}
	return Flapping{MAC: keyMAC(s.key), VLAN: keyVLAN(s.key), Moves: s.moves, From: name(s.ports[0]), To: name(s.ports[1])}
}

// Flapping lists the addresses that flap now, ordered by address.
func (n *Network) Flapping() (out []Flapping) {
	f := &n.flaps
	for !f.busy.CompareAndSwap(false, true) {
		time.Sleep(time.Microsecond)
	}
	slots := f.slots
	f.busy.Store(false)
	now := n.seconds()
	for _, s := range slots {
		if s.moves >= flapMoves && now-s.since <= flapWindow {
			out = append(out, n.flapping(s))
		}
	}
	slices.SortFunc(out, func(a, b Flapping) int { return slices.Compare(a.MAC[:], b.MAC[:]) })
	return out
}
