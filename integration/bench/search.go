package main

import (
	"fmt"
	"math"
	"time"
)

// probe is the outcome of offering datagrams at one rate.
type probe struct {
	sent, read int           // datagrams; read counts each one once
	elapsed    time.Duration // from the first one sent to the last one read
}

// perSecond is the rate at which the receiver read. Queues that the sender filled do not raise it: emptying them takes
// time too.
func (p probe) perSecond() float64 { return float64(p.read) / p.elapsed.Seconds() }

// A rate is carried if at most a thousandth of the datagrams is lost and they were read at nearly that rate. A sender
// that is too slow, or a queue that grew, fails the second condition.
const (
	mostLost = 0.001
	inTime   = 0.97
	enough   = 2000 // datagrams that show so small a loss
)

func (p probe) carries(rate float64) bool {
	return p.sent >= enough/2 && float64(p.sent-p.read) <= mostLost*float64(p.sent) && p.perSecond() >= inTime*rate
}

// probeTime returns how long to offer a rate, at least d.
func probeTime(rate float64, d time.Duration) time.Duration {
	return max(d, time.Duration(enough/rate*float64(time.Second)))
}

const (
	lowestRate = 1000
	mostProbes = 100
	precision  = 1.03 // ratio of the bounds at which the search ends
	// Factors from the guess on: the rate of the last search is a good guess.
	firstStep, longestStep = 1.25, 4.0
	confirmed              = 2 // probes in succession that must carry the rate found
)

// highestRate searches for the highest rate that try carries: it goes up or down from the guess, by growing factors,
// until the rate is between two bounds, and bisects on a geometric scale. A rate must fail twice, since other load of
// the machine can fail a probe. The rate found is confirmed by further probes, and lowered until it is. The result is
// the mean rate at which these were read.
func highestRate(guess float64, try func(rate float64) (probe, error)) (float64, error) {
	probes := 0
	var last probe
	once := func(rate float64) (p probe, ok bool, err error) {
		if probes++; probes > mostProbes || rate < lowestRate {
			return p, false, fmt.Errorf(
				"no rate down to %s/s is carried with at most %v %% lost, after %d probes; the last: %d of %d read, in %v",
				number(rate), 100*mostLost, probes-1, last.read, last.sent, last.elapsed)
		}
		p, err = try(rate)
		last = p
		return p, err == nil && p.carries(rate), err
	}
	carried := func(rate float64) (bool, error) {
		_, ok, err := once(rate)
		if !ok && err == nil {
			_, ok, err = once(rate)
		}
		return ok, err
	}
	low, high := 0.0, 0.0 // 0: unknown
	step := firstStep
	for rate := guess; low == 0 || high == 0 || high/low > precision; {
		ok, err := carried(rate)
		if err != nil {
			return 0, err
		}
		if ok {
			low = rate
		} else {
			high = rate
		}
		switch {
		case high == 0:
			rate, step = low*step, min(step*step, longestStep)
		case low == 0:
			rate, step = high/step, min(step*step, longestStep)
		default:
			rate = math.Sqrt(low * high)
		}
	}
	for {
		sum, n := 0.0, 0
		for n < confirmed {
			p, ok, err := once(low)
			if err != nil {
				return 0, err
			}
			if !ok {
				break
			}
			sum += p.perSecond()
			n++
		}
		if n == confirmed {
			return sum / confirmed, nil
		}
		low /= precision
	}
}
