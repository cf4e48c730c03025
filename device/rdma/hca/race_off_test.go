//go:build !race

package hca

const (
	raceEnabled = false
	raceDivisor = 1
)
