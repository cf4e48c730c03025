package vswitch

import (
	"math"
	"sync/atomic"
	"time"
)

// DefaultStorm is the default limit of frames per second without a known single receiver (broadcast, multicast, unknown
// unicast) from a port; the burst is one second's worth.
const DefaultStorm = 10000

// Unlimited turns off a limit that has a default.
const Unlimited = -1

// Bounds of the configured rates.
const (
	MaxStorm = 10_000_000
	MinRate  = 64_000 // bits per second
	MaxRate  = 1_000_000_000_000
)

// meter is a token bucket that any loop uses without a lock. It stores the time at which the bucket will be full again
// (the generic cell rate algorithm, ITU-T I.371): one word, one compare-and-swap. The zero value limits nothing.
type meter struct {
	full atomic.Int64
	unit int64 // nanoseconds per unit, times 2^16; 0 = no limit
	size int64 // burst, in nanoseconds
}

// set initialises a meter that is not in use yet. rate is in units per second, burst in units.
func (m *meter) set(rate, burst int64) {
	if rate <= 0 {
		return
	}
	m.unit = max(int64(float64(time.Second)*(1<<16)/float64(rate)), 1)
	m.size = int64(float64(burst) / float64(rate) * float64(time.Second))
}

// meterTries bounds the retries of take while other loops take at the same time.
const meterTries = 16

// take removes n units from the bucket, or nothing if they are not there. A bucket that is not in debt gives any
// amount, so that a frame larger than the burst passes now and then instead of never.
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

// A tunnel's peers have their own storm meters, by number, so that none uses up the others' share.
const remoteMeters = 64

// limits are the meters of one port.
type limits struct {
	in, out meter // bits
	storm   []meter
	answers meter   // for answers made by the switch
	records []meter // of membership messages
}

// Limits of ICMP errors per second and port.
const answerRate, answerBurst = 100, 50

// set initialises limits that are not in use yet.
func (m *limits) set(p *PortConfig, network int) {
	storm := p.Storm
	if storm == 0 {
		storm = network
	}
	m.storm = make([]meter, 1)
	if p.Kind == KindVTEP {
		m.storm = make([]meter, remoteMeters)
	}
	m.records = make([]meter, len(m.storm))
	for i := range m.storm {
		m.storm[i].set(int64(storm), int64(storm))
		m.records[i].set(recordRate, recordBurst)
	}
	// 20 ms, and at least two large frames.
	burst := max(p.Rate/50, 2*8*(MaxMTU+HeaderLen))
	m.in.set(p.Rate, burst)
	m.out.set(p.Rate, burst)
	m.answers.set(answerRate, answerBurst)
}

func (m *limits) stormOf(r Remote) *meter { return &m.storm[int(r)%len(m.storm)] }

func (m *limits) recordsOf(r Remote) *meter { return &m.records[int(r)%len(m.records)] }
