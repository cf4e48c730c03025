package vswitch

import (
	"hash/maphash"
	"sync/atomic"

	"github.com/vnicd/vnicd/device/loop"
)

// Number of remembered flooded frames, their lifetime, and how much of each is hashed. A storm overwrites them sooner;
// then flap.go ends a loop.
const (
	echoSlots  = 1024
	echoWindow = 2 // seconds
	echoBytes  = 2048
)

// echoes detects returning frames: a frame that the network has flooded, and that arrives from elsewhere than its
// sender's place, has passed a loop outside. Nothing is learnt from such frames.
type echoes struct {
	seed   maphash.Seed
	slots  [echoSlots]atomic.Uint64 // 48 bits of a frame's hash, 16 bits of the second in which it was flooded
	logged atomic.Uint32            // second of the last log line
}

func (e *echoes) hash(f []byte) uint64 { return maphash.Bytes(e.seed, f[:min(len(f), echoBytes)]) }

// note remembers a flooded frame.
func (e *echoes) note(f []byte, now uint32) {
	h := e.hash(f)
	e.slots[h%echoSlots].Store(h&^0xffff | uint64(uint16(now)))
}

// echo reports whether a frame was flooded lately. That does not extend the time: a host that has moved, and repeats a
// frame, is learnt soon.
func (e *echoes) echo(f []byte, now uint32) bool {
	h := e.hash(f)
	v := e.slots[h%echoSlots].Load()
	age := int16(uint16(now) - uint16(v))
	return v>>16 == h>>16 && age >= -1 && age <= echoWindow // loops' clocks may differ by one second
}

// looped counts a returned frame and logs it, at most once per flapWindow, on a separate goroutine because logging may
// block.
func (a *Attachment) looped(l *loop.Loop, now uint32) {
	a.Counters.Drop(l, Looped, 1)
	n := a.net
	last := n.echoes.logged.Load()
	if last != 0 && ago(now, last) < flapWindow || !n.echoes.logged.CompareAndSwap(last, now) {
		return
	}
	go n.log.Warn("loop detected: two ports are connected outside the network", "network", n.cfg.Name, "port", a.cfg.Name)
}
