package loop

import (
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// How long a loop works for whom is sampled: the clock is read at the handlers of one iteration in meterEvery, on
// average, at irregular distances, and what was measured counts for the iterations since the sample before. So a
// metered handler costs a comparison in the other iterations, and a guest cannot know which one is measured. It is
// wall-clock time: it contains what the host's scheduler took from the loop meanwhile, but not the loop's sleep.
const meterEvery = 64

// Meter counts the time that loops spend with one owner's handlers, such as a VM's device. Its zero value is ready.
type Meter struct {
	slots [MaxLoops]meterSlot
}

// meterSlot is written by one loop only; it fills a cache line.
type meterSlot struct {
	ns      atomic.Int64
	resting *Polled // the owner's pollers that rest there
	_       [48]byte
}

// Time returns the time of all loops, an estimate. Callable from anywhere.
func (m *Meter) Time() time.Duration {
	var sum int64
	for i := range m.slots {
		sum += m.slots[i].ns.Load()
	}
	return time.Duration(sum)
}

// Metered makes the time of a handler count for m, and the handler one of m's owner: see poller.go.
func Metered(m *Meter) Option { return func(h *handler) { h.meter = m } }

// sampler is a loop's part of metering. Owned by the loop's thread.
type sampler struct {
	on     bool   // this iteration is a sample
	left   uint32 // iterations until the next sample
	gap    uint32 // iterations since the last one
	weight int64  // iterations that this sample stands for
	since  int64  // when current began
	meter  *Meter // whose time it is; nil: nobody's
}

// nextSample decides at the start of an iteration whether it is a sample.
func (l *Loop) nextSample() {
	s := &l.sample
	if s.on {
		l.stopSample()
	}
	s.gap++
	if s.gap < s.left {
		return
	}
	// 1 to 2*meterEvery-1: meterEvery on average.
	s.weight, s.gap, s.left = int64(s.gap), 0, 1+rand.Uint32N(2*meterEvery-1)
	s.on, s.meter, s.since = true, nil, l.now
}

// stopSample ends a sample: before the loop sleeps, or with its iteration.
func (l *Loop) stopSample() {
	l.switchMeter(nil)
	l.sample.on = false
}

// Charge makes the loop's time count for m until the next call, which restores prev:
//
//	prev := l.Charge(m)
//	... work for m's owner, within another owner's handler ...
//	l.Charge(prev)
//
// It ends with the handler in any case. Loop thread only.
func (l *Loop) Charge(m *Meter) (prev *Meter) {
	if !l.sample.on {
		return nil
	}
	return l.switchMeter(m)
}

func (l *Loop) switchMeter(m *Meter) (prev *Meter) {
	s := &l.sample
	if prev = s.meter; prev == m {
		return prev
	}
	now := l.clock.Now()
	if prev != nil {
		prev.slots[l.id].ns.Add((now - s.since) * s.weight)
	}
	s.meter, s.since = m, now
	return prev
}
