package vswitch

import (
	"math"
	"sync/atomic"
	"time"
)

// DefaultStorm is how many frames per second without one known receiver (broadcast, multicast, unknown unicast) a port
// may send; a burst may be a second's worth.
const DefaultStorm = 10000

// Unlimited turns a limit off that has a default.
const Unlimited = -1

// Bounds of the configured rates.
const (
	MaxStorm = 10_000_000
	MinRate  = 64_000 // bits per second
	MaxRate  = 1_000_000_000_000
)

// meter is a token bucket that any loop takes from without a lock. It keeps the moment at which the bucket will be full
// again (the generic cell rate algorithm, ITU-T I.371): one word, one compare-and-swap. The zero value limits nothing.
type meter struct {
	full atomic.Int64
	unit int64 // nanoseconds that one unit costs, times 2^16; 0 = no limit
	size int64 // nanoseconds' worth that the bucket holds
}

// set is for a meter that nobody uses yet. rate is in units per second, burst in units.
func (m *meter) set(rate, burst int64) {
	if rate <= 0 {
		return
	}
	m.unit = max(int64(float64(time.Second)*(1<<16)/float64(rate)), 1)
	m.size = int64(float64(burst) / float64(rate) * float64(time.Second))
}

// meterTries bounds how often take tries again when other loops take at the same moment.
const meterTries = 16

// take takes n units out of the bucket, or nothing when they are not there. A bucket that is not in debt gives any
// amount, so that a frame larger than the burst passes once in a while instead of never.
func (m *meter) take(now int64, n int) bool {
	if m.unit == 0 {
		return true
	}
	cost := min(int64(n), math.MaxInt32) * m.unit >> 16
	for range meterTries {
		old := m.full.Load()
		start := max(old, now)
		if start != now && start-now+cost > m.size {
			return false
		}
		if m.full.CompareAndSwap(old, start+cost) {
			return true
		}
	}
	return false
}

// A tunnel's far ends have storm meters of their own, by number, so that one of them does not use up the others' share.
const remoteMeters = 64

// limits are the meters of one port.
type limits struct {
	in, out meter // bits
	storm   []meter
	answers meter // answers that the switch makes itself
}

// How many ICMP errors a port may cause per second.
const answerRate, answerBurst = 100, 50

// set is for limits that nobody uses yet.
func (m *limits) set(p *PortConfig, network int) {
	storm := p.Storm
	if storm == 0 {
		storm = network
	}
	m.storm = make([]meter, 1)
	if p.Kind == KindVTEP {
		m.storm = make([]meter, remoteMeters)
	}
	for i := range m.storm {
		m.storm[i].set(int64(storm), int64(storm))
	}
	// 20 ms, and two large frames at least.
	burst := max(p.Rate/50, 2*8*(MaxMTU+HeaderLen))
	m.in.set(p.Rate, burst)
	m.out.set(p.Rate, burst)
	m.answers.set(answerRate, answerBurst)
}

func (m *limits) stormOf(r Remote) *meter { return &m.storm[int(r)%len(m.storm)] }
