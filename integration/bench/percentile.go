package main

import (
	"math"
	"slices"
)

// latencies are the times of single operations.
type latencies []float64

// sorted returns l after sorting it in place.
func (l latencies) sorted() latencies {
	slices.Sort(l)
	return l
}

// at returns the smallest time that at least the part q of all does not exceed (nearest rank: no interpolation). l must
// be sorted and not empty.
func (l latencies) at(q float64) float64 {
	// The product of a decimal fraction may exceed the integer that it stands for, by rounding.
	rank := int(math.Ceil(q*float64(len(l)) - 1e-9))
	return l[min(max(rank, 1), len(l))-1]
}

// percentiles returns the figures that rows show beside the median; who precedes their names.
func (l latencies) percentiles(who string) map[string]float64 {
	return map[string]float64{who + "p99": l.at(0.99), who + "p99.9": l.at(0.999), who + "max": l.at(1)}
}
