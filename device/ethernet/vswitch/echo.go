package vswitch

import (
	"hash/maphash"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/loop"
)

// How many flooded frames are remembered, for how long, and how much of each is looked at. A storm overwrites them
// sooner; then flap.go is what ends a loop.
const (
	echoSlots  = 1024
	echoWindow = 2 // seconds
	echoBytes  = 2048
)

// echoes finds frames that come back: what the network has flooded and now gets from elsewhere than where its sender is
// has gone round in a loop outside. Nothing is learnt from them.
type echoes struct {
	seed   maphash.Seed
	slots  [echoSlots]atomic.Uint64 // 48 bits of a frame's hash, 16 bits of the second in which it was flooded
	logged atomic.Uint32            // second of the last log line
}

func (e *echoes) hash(f []byte) uint64 { return maphash.Bytes(e.seed, f[:min(len(f), echoBytes)]) }

// note remembers a frame that is flooded.
func (e *echoes) note(f []byte, now uint32) {
	h := e.hash(f)
	e.slots[h%echoSlots].Store(h&^0xffff | uint64(uint16(now)))
}

// echo tells whether a frame has been flooded lately. It is not remembered for longer then: a host that has moved, and
// says again what it said before, is heard soon.
func (e *echoes) echo(f []byte, now uint32) bool {
	h := e.hash(f)
	v := e.slots[h%echoSlots].Load()
	age := int16(uint16(now) - uint16(v))
	return v>>16 == h>>16 && age >= -1 && age <= echoWindow // loops' clocks may differ by one
}

// looped counts a frame that has come back and says so, at most once per flapWindow, on a goroutine of its own because
// the log may block.
func (a *Attachment) looped(l *loop.Loop, now uint32) {
	a.Counters.Drop(l, Looped, 1)
	n := a.net
	last := n.echoes.logged.Load()
	if last != 0 && ago(now, last) < flapWindow || !n.echoes.logged.CompareAndSwap(last, now) {
		return
	}
	go n.log.Warn("loop detected: two ports are connected outside the network", "network", n.cfg.Name, "port", a.cfg.Name)
}
