package vswitch

import (
	"sync/atomic"

	"github.com/vnicd/vnicd/device/loop"
)

// Counters count frames and drops of one port or network. Every loop writes to its own part with plain loads and
// stores, so counting causes no bus traffic; therefore only loop threads may call the counting methods. The zero value
// is ready.
type Counters struct {
	shards [loop.MaxLoops]shard
}

type shard struct {
	inFrames, inBytes, outFrames, outBytes, floods, answers, pruned atomic.Uint64
	drops                                                           [NumReasons]atomic.Uint64
	_                                                               [(64 - (7+int(NumReasons))*8%64) % 64]byte
}

func add(c *atomic.Uint64, n uint64) { c.Store(c.Load() + n) }

// In counts frames, with their total bytes, that entered the network.
func (c *Counters) In(l *loop.Loop, frames, bytes int) { c.in(l.ID(), frames, bytes) }

func (c *Counters) in(loop, frames, bytes int) {
	s := &c.shards[loop]
	add(&s.inFrames, uint64(frames))
	add(&s.inBytes, uint64(bytes))
}

// Out counts frames, with their total bytes, that left the network.
func (c *Counters) Out(l *loop.Loop, frames, bytes int) { c.out(l.ID(), frames, bytes) }

func (c *Counters) out(loop, frames, bytes int) {
	s := &c.shards[loop]
	add(&s.outFrames, uint64(frames))
	add(&s.outBytes, uint64(bytes))
}

func (c *Counters) answered(l *loop.Loop) { add(&c.shards[l.ID()].answers, 1) }

func (c *Counters) prune(l *loop.Loop) { add(&c.shards[l.ID()].pruned, 1) }

func (c *Counters) flood(l *loop.Loop) { add(&c.shards[l.ID()].floods, 1) }

// Drop counts n frames dropped for a reason.
func (c *Counters) Drop(l *loop.Loop, r Reason, n int) {
	add(&c.shards[l.ID()].drops[r], uint64(n))
}

// Totals are the sums of Counters at one moment. Drops holds only reasons that occurred, by name.
type Totals struct {
	InFrames  uint64 `json:"in_frames"`
	InBytes   uint64 `json:"in_bytes"`
	OutFrames uint64 `json:"out_frames"`
	OutBytes  uint64 `json:"out_bytes"`
	Floods    uint64 `json:"floods,omitempty"`
	// Pruned counts multicast frames that were not flooded, but sent to members.
	Pruned uint64 `json:"pruned,omitempty"`
	// Answered counts requests and errors that the switch answered.
	Answered uint64            `json:"answered,omitempty"`
	Drops    map[string]uint64 `json:"drops,omitempty"`
}

// Dropped returns the sum for one reason.
func (c *Counters) Dropped(r Reason) uint64 {
	var n uint64
	for i := range c.shards {
		n += c.shards[i].drops[r].Load()
	}
	return n
}

// Totals adds up all loops' parts. Callable from any goroutine.
func (c *Counters) Totals() Totals {
	var t Totals
	for i := range c.shards {
		s := &c.shards[i]
		t.InFrames += s.inFrames.Load()
		t.InBytes += s.inBytes.Load()
		t.OutFrames += s.outFrames.Load()
		t.OutBytes += s.outBytes.Load()
		t.Floods += s.floods.Load()
		t.Answered += s.answers.Load()
		t.Pruned += s.pruned.Load()
	}
	for r := Reason(0); r < NumReasons; r++ {
		if n := c.Dropped(r); n > 0 {
			if t.Drops == nil {
				t.Drops = make(map[string]uint64)
			}
			t.Drops[r.String()] = n
		}
	}
	return t
}
