package vhostuser

import (
	"context"
	"time"
)

// SetTrial changes how long a resumed connection is under suspicion, and returns the inverse. The first suspect waits
// for a millisecond.
func SetTrial(settle, alone time.Duration) (restore func()) {
	s, a, f := settleTime, aloneTime, firstTime
	settleTime, aloneTime, firstTime = settle, alone, time.Millisecond
	return func() { settleTime, aloneTime, firstTime = s, a, f }
}

// MarkOff is the place of a kept connection's mark.
const MarkOff = markOff

// MaxSpared bounds the kills that cast no suspicion.
const MaxSpared = maxSpared

// SetPwrite replaces the writes of states while no server runs, and returns the inverse.
func SetPwrite(f func(fd int, b []byte, off int64) (int, error)) (restore func()) {
	was := pwrite
	pwrite = f
	return func() { pwrite = was }
}

// SetCrossed calls f between the steps of a message while no server runs, and returns the inverse.
func SetCrossed(f func(step string)) (restore func()) {
	was := crossed
	crossed = f
	return func() { crossed = was }
}

// Limits of messages to a Keeper.
const (
	PaceBurst = paceBurst
	PaceRate  = paceRate
)

// PaceBy makes a server without front end measure and wait by a clock of the test's, as far as it is paced.
func (s *Server) PaceBy(now func() time.Time, sleep func(time.Duration)) {
	if p, ok := s.cfg.Keeper.(*pacer); ok {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.now, p.sleep = now, func(_ context.Context, d time.Duration) { sleep(d) }
	}
}
