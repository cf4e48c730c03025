package vhostuser

import "time"

// SetTrial changes how long a resumed connection is under suspicion, and returns the inverse.
func SetTrial(settle, alone time.Duration) (restore func()) {
	s, a := settleTime, aloneTime
	settleTime, aloneTime = settle, alone
	return func() { settleTime, aloneTime = s, a }
}

// MarkOff is the place of a kept connection's mark.
const MarkOff = markOff
